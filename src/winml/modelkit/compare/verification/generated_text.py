"""What does a model with a cache generate in PyTorch, run by run?

It generates with a cache of its own: two prompts of different lengths at once, greedily, then a second prompt after
what it wrote. What it read and answered in each run is kept, so that a graph may be given the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import Rounding, compare_outputs
from winml.modelkit.compare.verification.reference_run import PreparedPart, dtypes_inside
from winml.modelkit.errors import first_line
from winml.modelkit.models.caches.arguments import DECODER_TOKENS
from winml.modelkit.models.caches.inputs import several_positions
from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS, EMBEDDED, CacheLayout, cache_field
from winml.modelkit.models.inputs.shape_run import REFUSALS
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.state_restoration import unchanged_attributes
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, SCORES, TOKEN_IDS
from winml.modelkit.ort.foreign_libraries import quiet_libraries

_PROMPT, _PADDING = 7, 3
"""Chosen: tokens of the longer prompt, and by how many the other one is shorter."""
NEW_TOKENS = 32
SECOND_PROMPT = 4
ROWS = 2
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TextStep:
    """One run of the model."""

    tokens: Array
    mask: Array
    """Of all tokens so far."""
    scores: Array
    """What PyTorch answers for the last tokens: rows, tokens, vocabulary."""
    told: Arrays = field(default_factory=dict)
    """What else is said of the tokens, by name of the input."""
    passed_positions: Array | None = None
    """Positions in several rows, as the model makes them: rows, rows of tokens, tokens; None: one, that follows."""

    @property
    def positions(self) -> Array:
        """Place of each token in its text, padding left out."""
        if self.passed_positions is not None:
            return self.passed_positions
        places: Array = (self.mask.cumsum(-1) - 1).clip(0)[:, -self.tokens.shape[1] :]
        return places


@dataclass(frozen=True)
class GeneratedText:
    """What PyTorch generated, run by run."""

    steps: tuple[TextStep, ...]
    """The prompt, one step for each further token, the second prompt."""
    differs_in_pieces: float | None = None
    """Relative difference of the scores where PyTorch reads the prompt in two runs; None: not beyond rounding."""

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[Array, Array]]) -> GeneratedText:
        """Return a text without padding: the tokens of each run, and the scores after them."""
        counts = np.cumsum([tokens.shape[1] for tokens, _ in runs])
        masks = (np.ones((len(tokens), count), np.int64) for (tokens, _), count in zip(runs, counts, strict=True))
        return cls(tuple(TextStep(tokens, mask, scores) for (tokens, scores), mask in zip(runs, masks, strict=True)))

    @property
    def new_tokens(self) -> int:
        """Tokens that were chosen."""
        return len(self.steps) - 1


def generates_alone(part: ModelPart) -> bool:
    """Say whether a part turns tokens into further ones without another."""
    return part.cache is not None and not part.cache.side and any(spec.name == TOKEN_IDS for spec in part.inputs)


def generate_reference(prepared: PreparedPart, seed: int) -> GeneratedText | str:
    """Let the model generate in PyTorch, with a cache of its own; return why not, where it cannot.

    Args:
        prepared: The part, with values.
        seed: Seed of the prompts.
    """
    part = prepared.part
    if reason := reason_against(part):
        return reason
    held, room = held_tokens(part), part.most_tokens
    if held is not None:
        room = held + 1
    count = min(NEW_TOKENS, room - _PROMPT - SECOND_PROMPT) if room is not None else NEW_TOKENS
    if count < 1:
        return f"the cache has only {room} tokens" if held is not None else f"the model has only {room} positions"
    tokens, mask = _prompts(part, seed)

    def generate() -> GeneratedText:
        assert part.cache is not None
        with _FewRows():
            is_unsafe = not mask.all() and part.cache.is_recurrent
            is_padded = not is_unsafe or _hides_padding(part, prepared.model, tokens, mask)
            prompt = (tokens, mask if is_padded else torch.ones_like(mask))
            text = generated_text(part, prepared.model, prompt, count)
            return replace(text, differs_in_pieces=_difference_in_pieces(part, prepared.model, text.steps[0]))

    return generated_or_reason(prepared, generate)


def generated_or_reason(prepared: PreparedPart, generate: Callable[[], _Result]) -> _Result | str:
    """Return the result of generating with a model as its user calls it; the reason as a text if that fails.

    Args:
        prepared: The part, with values.
        generate: Calls the model.
    """
    try:
        with as_the_user_calls_it(prepared), unchanged_attributes(prepared.model), quiet_libraries():
            return generate()
    except Exception as error:  # code of the model
        return f"generate() in PyTorch fails: {type(error).__name__}: {first_line(error)}"


def generated_text(
    part: ModelPart,
    model: Any,
    prompt: tuple[torch.Tensor, torch.Tensor],
    count: int,
    displayed: Mapping[str, torch.Tensor] | None = None,
    never: Sequence[int] = (),
) -> GeneratedText:
    """Generate with a model, and read a second prompt after that.

    Args:
        part: What keeps the cache.
        model: Called as its user calls it.
        prompt: Tokens and their mask.
        count: Number of new tokens.
        displayed: Further inputs of the first run, such as images.
        never: Tokens that are not chosen.
    """
    tokens, mask = prompt
    displayed = displayed or {}
    settings: dict[str, Any] = {"suppress_tokens": list(never)} if never else {}
    if len(tokens) > len(mask):  # several streams of tokens, one row each
        own = model.generation_config
        start = own.bos_token_id if own.decoder_start_token_id is None else own.decoder_start_token_id
        special = {"decoder_start_token_id": start, "bos_token_id": own.bos_token_id, "pad_token_id": own.pad_token_id}
        settings = {**special, "num_return_sequences": 1, "suppress_tokens": [own.pad_token_id]}
    reported = {spec.name: to_numpy(displayed[spec.name]) for spec in part.inputs if spec.name in displayed}
    with recorded_generation(part, model, count, to_numpy(mask), to_numpy(tokens), **settings) as recorded:
        model.generate(input_ids=tokens, attention_mask=mask, **displayed, use_cache=True)
    recorded.steps[0] = replace(recorded.steps[0], told=reported)
    following = to_numpy(tokens)[:, -SECOND_PROMPT + 1 :]
    return recorded.with_second_prompt(following, lambda step: _scores_after(part, model, step, recorded.cache), never)


@dataclass
class RecordedText:
    """Runs of a part while its model generated: tokens, scores, and the cache after them."""

    steps: list[TextStep] = field(default_factory=list)
    cache: Any = None
    """The cache after the last run."""

    def with_second_prompt(
        self, tokens: Array, answer: Callable[[TextStep], Array], never: Sequence[int] = ()
    ) -> GeneratedText:
        """Return the text with a second prompt: the last token, which was chosen and not read yet, and further ones.

        Args:
            tokens: The further tokens.
            answer: Returns the scores of PyTorch after the tokens of a step.
            never: Tokens that are not chosen.
        """
        last = self.steps[-1]
        scores = last.scores[:, -1:].copy()
        scores[..., list(never)] = -np.inf
        second = np.concatenate([scores.argmax(-1), tokens], axis=1)
        mask = np.pad(last.mask, ((0, 0), (0, second.shape[1])), constant_values=1)
        places = last.passed_positions
        following = None if places is None else places[..., -1:] + 1 + np.arange(second.shape[1])
        unread = TextStep(second, mask, np.empty(0), {}, following)
        return GeneratedText((*self.steps, replace(unread, scores=answer(unread))))


@contextmanager
def recorded_generation(
    part: ModelPart,
    model: Any,
    count: int,
    mask: Array | None = None,
    prompt: Array | None = None,
    **settings: Any,
) -> Iterator[RecordedText]:
    """Set a model to greedy generation of so many tokens for the block, and record the runs of a part in the block.

    The runs themselves are recorded: a model may delay one stream of tokens after another, so that it reads other
    tokens than it chose, and transformers' generate() returns no cache of a name of its own (for: RWKV). It hands
    caches on by the name that the installed version has for them; a forward of an older version is given the cache by
    its own name (for: checkpoints with code).

    Args:
        part: Keeps the cache; it may have settings of its own, since it generates for the model.
        model: The model.
        count: Number of tokens.
        mask: Mask of the prompt; None: nothing is hidden.
        prompt: Tokens of the prompt, for a part that is given their vectors in the first run (for: BLIP-2).
        **settings: Further settings.
    """
    from transformers import GenerationConfig

    assert part.cache is not None
    make_config: Any = GenerationConfig
    module, argument = model.get_submodule(part.path), part.cache.argument
    choosing = [vars(item) for item in (model, module) if "generation_config" in vars(item)]
    own = [attributes["generation_config"] for attributes in choosing]
    recorded, placed, places = RecordedText(), several_positions(part.inputs), deque[Array](maxlen=1)

    def rename(_module: object, arguments: Any, named: dict[str, Any]) -> Any:
        passed = {argument if name in CACHE_ARGUMENTS else name: value for name, value in named.items()}
        return arguments, passed

    def keep_positions(_module: object, _arguments: Any, named: Mapping[str, Any]) -> None:
        assert placed is not None
        places.append(to_numpy(named[POSITIONS])[-int(placed.shape[0]) :])

    def keep(_module: object, _arguments: object, named: Mapping[str, Any], output: Mapping[str, Any]) -> None:
        read_tokens = named[DECODER_TOKENS] if DECODER_TOKENS in named else named.get(TOKEN_IDS)
        if read_tokens is None:
            assert prompt is not None
            tokens = prompt
        else:
            tokens = to_numpy(read_tokens)
        # A model may leave out tokens of the prompt.
        read = tokens.shape[1] + sum(step.tokens.shape[1] for step in recorded.steps)
        passed = np.ones_like(tokens[:, :0]) if mask is None else mask
        displayed = np.pad(passed, ((0, 0), (0, read)), constant_values=1)[:, :read]
        scores = to_numpy(output[SCORES])
        if len(tokens) <= len(passed):
            # Scores of hidden tokens mean nothing; streams of tokens, one row each, hide none.
            scores = scores[:, -1:]
        recorded.steps.append(TextStep(tokens, displayed, scores, {}, places[0] if places else None))
        recorded.cache = output[cache_field(output, argument)]

    handles = [
        module.register_forward_pre_hook(rename, with_kwargs=True),
        module.register_forward_hook(keep, with_kwargs=True),
    ]
    if placed is not None:
        handles.append(model.get_decoder().register_forward_pre_hook(keep_positions, with_kwargs=True))
    try:
        for attributes in choosing:
            attributes["generation_config"] = make_config(
                **{"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **settings}
            )
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
        for attributes, config in zip(choosing, own, strict=True):
            attributes["generation_config"] = config


def _scores_after(part: ModelPart, model: nn.Module, step: TextStep, cache: Any) -> Array:
    """Return what PyTorch answers to tokens after those in its own cache, one by one where a state asks for it."""
    assert part.cache is not None
    runs = single_tokens(step) if part.cache.is_recurrent else [step]
    return np.concatenate([to_numpy(_torch_output_after(part, model, run, cache)[SCORES]) for run in runs], axis=1)


def _torch_output_after(part: ModelPart, model: nn.Module, run: TextStep, cache: object) -> Any:
    """Return what PyTorch answers to the tokens of one run after those in its own cache; None: an empty one."""
    assert part.cache is not None
    # The model takes tokens, also where the graph takes their vectors.
    names = {TOKEN_IDS, *(spec.name for spec in part.inputs)}
    positions = run.positions + part.first_position
    named = {TOKEN_IDS: run.tokens, MASK: attention_mask_of(part.cache, run), POSITIONS: positions}
    passed = {name: torch.from_numpy(value) for name, value in named.items() if name in names}
    return model.get_submodule(part.path)(**passed, **part.forward_kwargs, **{part.cache.argument: cache})


def _difference_in_pieces(part: ModelPart, model: nn.Module, prompt: TextStep) -> float | None:
    """Return the relative difference of the scores after a prompt where PyTorch reads it in two runs.

    None where that is rounding, where it is known of the cache, or where the model reads no such runs.
    """
    layout = part.cache
    assert layout is not None
    is_other = layout.is_recurrent or layout.dropping_windows or layout.template is not None
    if is_other or isinstance(token_count(part), int) or prompt.passed_positions is not None:
        return None
    half = (prompt.tokens.shape[1] + 1) // 2
    first = TextStep(prompt.tokens[:, :half], prompt.mask[:, :half], np.empty(0))
    second = replace(prompt, tokens=prompt.tokens[:, half:])
    try:
        read = _torch_output_after(part, model, first, None)
        cache = read[cache_field(read, layout.argument)]
        scores = _scores_after(part, model, second, cache)[:, -1:]
    except REFUSALS:  # it reads a prompt in one run alone
        return None
    rounding = Rounding(dtypes_inside(model, {SCORES: scores}))
    found = compare_outputs([{SCORES: prompt.scores[:, -1:]}], [{SCORES: scores}], rounding=rounding).worst
    return None if found.is_equal else found.relative_diff


def single_tokens(step: TextStep) -> Iterator[TextStep]:
    """Yield a step as runs of one token each."""
    count = step.tokens.shape[1]
    for end in range(1, count + 1):
        mask, places = step.mask[:, : step.mask.shape[1] - count + end], step.passed_positions
        places = None if places is None else places[..., end - 1 : end]
        yield TextStep(step.tokens[:, end - 1 : end], mask, step.scores, {}, places)


def attention_mask_of(cache: CacheLayout, step: TextStep) -> Array:
    """Return the mask of a run: of all tokens so far, and of those of the run where no cache holds the others."""
    return step.mask if cache.grows else step.mask[:, -step.tokens.shape[1] :]


def reason_against(part: ModelPart) -> str:
    """Return why nothing can be generated with a graph of these inputs; empty where it can."""
    if reason := reason_of_sizes(part):
        return reason
    return "" if callable(getattr(part.model, "generate", None)) else f"{type(part.model).__name__} has no generate()"


def reason_of_sizes(part: ModelPart) -> str:
    """Return why the sizes of a graph do not allow to generate with it; empty where they do."""
    if token_count(part) not in (1, *(item.name for item in part.dimensions)):
        return "the number of tokens is fixed"
    if held_tokens(part) is not None and all(spec.name != MASK for spec in part.inputs):
        return "the length of the cache is fixed, and no mask hides its empty entries"
    return ""


def held_tokens(part: ModelPart) -> int | None:
    """Return how many tokens the cache holds in every run; None where their number is open, or it does not grow."""
    assert part.cache is not None
    shapes = {spec.name: spec.shape for spec in part.inputs}
    lengths = (shapes[state.input][state.token_axis] for state in part.cache.states if state.token_axis is not None)
    return next((length for length in lengths if isinstance(length, int)), None)


def token_count(part: ModelPart) -> int | str:
    """Return how many tokens a run takes, or the name of their number."""
    return next(spec for spec in part.inputs if spec.name in (TOKEN_IDS, EMBEDDED)).shape[1]


def _prompts(part: ModelPart, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their mask; where the model takes a mask, the first row is padded on the left."""
    specs = {spec.name: spec for spec in part.inputs}
    rows, states = (spec.shape[0] for spec in (specs[TOKEN_IDS], next(spec for spec in part.inputs if spec.cache)))
    rows, states = (count if isinstance(count, int) else ROWS for count in (rows, states))
    low, high = specs[TOKEN_IDS].value_range or (0, 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(int(low), int(high) + 1, (rows, _PROMPT), generator=generator)
    mask = torch.ones(states, _PROMPT, dtype=tokens.dtype)
    # Streams of tokens are of one length.
    if MASK in specs and rows == states > 1:
        mask[0, :_PADDING] = 0
    return tokens, mask


def _hides_padding(part: ModelPart, model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return True if PyTorch answers the padded first row as it answers that row without padding.

    Of recurrent models, some run padding through their states (for: RWKV), or do so in a batch of one row.
    """
    padded = TextStep(to_numpy(tokens), to_numpy(mask), np.empty(0))
    alone = TextStep(padded.tokens[:1, _PADDING:], padded.mask[:1, _PADDING:], np.empty(0))
    scores = []
    for step in (padded, alone):
        with unchanged_attributes(model):
            scores.append(to_numpy(_torch_output_after(part, model, step, None)[SCORES])[:1, -1:])
    rounding = Rounding(dtypes_inside(model, {SCORES: scores[0]}))
    return compare_outputs([{SCORES: scores[1]}], [{SCORES: scores[0]}], rounding=rounding).worst.is_equal


@contextmanager
def as_the_user_calls_it(prepared: PreparedPart) -> Iterator[None]:
    """Pass the model its own forward back for the time of the block, and so those modules that lead to the part."""
    model, path = prepared.model, prepared.part.path
    steps = path.split(".") if path else []
    leading = [model.get_submodule(".".join(steps[:count])) for count in range(len(steps))] or [model]
    replaced = [(vars(module), vars(module).pop("forward")) for module in leading if "forward" in vars(module)]
    if not path:
        model.forward = prepared.forward.unflattened
    try:
        yield
    finally:
        for attributes, forward in replaced:
            attributes["forward"] = forward


class _FewRows(TorchFunctionMode):
    """Computes products of a few rows with a large matrix as a reader of the matrix does.

    Measured with two rows: a quarter of the time of torch's own way, which lays the matrix out anew each time.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply from the other side where that is quicker."""
        if func is nn.functional.linear and not kwargs and len(args) > 1:
            passed, weight, *bias = args
            if 1 < passed.numel() // max(1, passed.shape[-1]) <= ROWS and weight.dim() == 2:
                product = (weight @ passed.reshape(-1, passed.shape[-1]).t()).t()
                product = product.reshape(*passed.shape[:-1], len(weight)).contiguous()
                return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))
