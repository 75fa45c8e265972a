"""Does a graph with a cache generate what the model generates?

The model generates with a cache of its own: two prompts of different lengths at once, greedily, then a second prompt
after what it wrote. The graph is given the same tokens, and in every run what it returned itself in the run before. The
same best token in every step means the same text. The first steps are run one by one, as a reader does; the graph reads
what PyTorch chose after them several tokens at a time, and each has its scores all the same. The last steps are single
ones again, after a longer cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from winml.modelkit.compare.generation import GenerationInfo
from winml.modelkit.compare.outputs import OutputComparison, compare_outputs
from winml.modelkit.errors import VerificationError, first_line
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.caches.arguments import empty_states
from winml.modelkit.load.caches.inputs import several_positions
from winml.modelkit.load.caches.layout import EMBEDDED, CacheLayout
from winml.modelkit.load.inputs.shape_run import REFUSALS
from winml.modelkit.load.library_messages import quiet_libraries
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.verify.other_sizes import Draw, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, dtypes_inside

__all__ = [
    "GeneratedText",
    "as_the_user_calls_it",
    "compare_generation",
    "generate_reference",
    "generated_text",
    "generates_alone",
    "plain_generation",
    "plain_value",
    "read_scores",
    "reason_against",
    "tied_rows",
]

Arrays = dict[str, NDArray[Any]]

_PROMPT, _PADDING = 7, 3
"""Chosen: tokens of the longer prompt, and by how many the other one is shorter."""
_NEW_TOKENS = 32
_SINGLE_STEPS = 8
"""Specified: so many steps of one token each, after its own cache, are asked of a graph."""
_JOINED_STEPS = 8
"""Tokens in a run after those. Chosen: a run of eight takes little longer than a run of one."""
_LAST_STEPS = 2
"""Steps of one token each, after those. Chosen: enough to show what is wrong once a window is full."""
_SECOND_PROMPT = 4
_ROWS = 2
_SCORES = "logits"
_ANSWER = {"use_cache": True, "return_dict_in_generate": True, "output_logits": True}
"""Arguments of generate()."""
_TOKENS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


@dataclass(frozen=True)
class _Step:
    """One run of the model."""

    tokens: NDArray[Any]
    mask: NDArray[Any]
    """Of all tokens so far."""
    scores: NDArray[Any]
    """What PyTorch answers for the last tokens: rows, tokens, vocabulary."""
    told: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """What else is said of the tokens, by name of the input."""
    given_positions: NDArray[Any] | None = None
    """Positions in several rows, as the model makes them: rows, rows of tokens, tokens; None: one, that follows."""

    @property
    def positions(self) -> NDArray[Any]:
        """Place of each token in its text, padding left out."""
        if self.given_positions is not None:
            return self.given_positions
        places: NDArray[Any] = (self.mask.cumsum(-1) - 1).clip(0)[:, -self.tokens.shape[1] :]
        return places


@dataclass(frozen=True)
class GeneratedText:
    """What PyTorch generated, run by run."""

    steps: tuple[_Step, ...]
    """The prompt, one step for each further token, the second prompt."""
    differs_in_pieces: float | None = None
    """By how much of scale the scores are off where PyTorch reads the prompt in two runs; None: not beyond rounding."""

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> GeneratedText:
        """Return a text without padding: the tokens of each run, and the scores after them."""
        counts = np.cumsum([tokens.shape[1] for tokens, _ in runs])
        masks = (np.ones((len(tokens), count), np.int64) for (tokens, _), count in zip(runs, counts, strict=True))
        return cls(tuple(_Step(tokens, mask, scores) for (tokens, scores), mask in zip(runs, masks, strict=True)))

    @property
    def new_tokens(self) -> int:
        """Tokens that were chosen."""
        return len(self.steps) - 1


def generates_alone(part: ModelPart) -> bool:
    """Say whether a part turns tokens into further ones without another."""
    return part.cache is not None and not part.cache.side and any(spec.name == _TOKENS for spec in part.inputs)


def generate_reference(prepared: PreparedPart, seed: int) -> GeneratedText | str:
    """Let the model generate in PyTorch, with a cache of its own; return why not, where it cannot.

    Args:
        prepared: The part, with values.
        seed: Seed of the prompts.
    """
    part = prepared.part
    if reason := reason_against(part):
        return reason
    room = part.most_tokens
    count = min(_NEW_TOKENS, room - _PROMPT - _SECOND_PROMPT) if room is not None else _NEW_TOKENS
    if count < 1:
        return f"the model has no more than {room} positions"
    tokens, mask = _prompts(part, seed)
    try:
        with as_the_user_calls_it(prepared), unchanged_attributes(prepared.model), quiet_libraries(), _FewRows():
            text = generated_text(part, prepared.model, (tokens, mask), count)
            return replace(text, differs_in_pieces=_difference_in_pieces(part, prepared.model, text.steps[0]))
    except Exception as error:  # code of the model
        return f"generate() in PyTorch fails: {type(error).__name__}: {first_line(error)}"


def generated_text(
    part: ModelPart,
    model: Any,
    prompt: tuple[torch.Tensor, torch.Tensor],
    count: int,
    shown: Mapping[str, torch.Tensor] | None = None,
    never: Sequence[int] = (),
) -> GeneratedText:
    """Let a model generate, and read a second prompt after that.

    Args:
        part: What keeps the cache.
        model: Called as its user calls it.
        prompt: Tokens and their mask.
        count: Number of new tokens.
        shown: Further inputs of the first run, such as images.
        never: Tokens that are not chosen.
    """
    tokens, mask = prompt
    assert part.cache is not None
    shown = shown or {}
    arguments = {"input_ids": tokens, "attention_mask": mask, **shown}
    if len(tokens) > len(mask):
        return _text_of_streams(part, model, arguments, count)
    placed = several_positions(part.inputs)
    rows = 0 if placed is None else int(placed.shape[0])
    never_chosen = {"suppress_tokens": list(never)} if never else {}
    with plain_generation(model, count, part.path, **never_chosen), _positions_of_runs(model, rows) as places:
        result = model.generate(**arguments, **_ANSWER)
    told = {spec.name: to_numpy(shown[spec.name]) for spec in part.inputs if spec.name in shown}
    steps = [_Step(to_numpy(tokens), to_numpy(mask), to_numpy(result.logits[0])[:, None], told, next(places, None))]
    for number, scores in enumerate(result.logits[1:], start=1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        end = tokens.shape[1] + number
        chosen = result.sequences[:, end - 1 : end]
        steps.append(_Step(to_numpy(chosen), to_numpy(mask), to_numpy(scores)[:, None], {}, next(places, None)))
    # The last token was chosen and not read yet.
    second = torch.cat([result.sequences[:, -1:], tokens[:, -_SECOND_PROMPT + 1 :]], dim=1)
    mask = torch.cat([mask, torch.ones_like(second)], dim=1)
    cache = getattr(result, part.cache.argument, None) or result.past_key_values
    last = steps[-1].given_positions
    following = None if last is None else last[..., -1:] + 1 + np.arange(second.shape[1])
    unread = _Step(to_numpy(second), to_numpy(mask), np.empty(0), {}, following)
    steps.append(replace(unread, scores=_scores_after(part, model, unread, cache)))
    return GeneratedText(tuple(steps))


@contextmanager
def _positions_of_runs(model: Any, rows: int) -> Iterator[Iterator[NDArray[Any]]]:
    """Yield the positions that the language model of a model is told in each run, the last so many rows of them.

    They are those of the runs in the block, in order; none where ``rows`` is 0.
    """
    seen: deque[NDArray[Any]] = deque()

    def keep(_module: Any, _args: Any, named: Mapping[str, Any]) -> None:
        seen.append(to_numpy(named[_POSITIONS])[-rows:])

    handle = model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True) if rows else None
    try:
        yield (seen.popleft() for _ in iter(lambda: bool(seen), False))
    finally:
        if handle is not None:
            handle.remove()


def _text_of_streams(part: ModelPart, model: Any, arguments: Mapping[str, torch.Tensor], count: int) -> GeneratedText:
    """Let a model generate several streams of tokens, one row each.

    It delays one stream after another, so that it reads other tokens than it chose: what it was given is looked at.
    """
    assert part.cache is not None
    own = model.generation_config
    start = own.bos_token_id if own.decoder_start_token_id is None else own.decoder_start_token_id
    special = {"decoder_start_token_id": start, "bos_token_id": own.bos_token_id, "pad_token_id": own.pad_token_id}
    settings = {**special, "num_return_sequences": 1, "suppress_tokens": [own.pad_token_id]}
    steps: list[_Step] = []

    def look(_module: Any, _arguments: Any, named: Mapping[str, torch.Tensor], answer: Any) -> None:
        tokens, mask, scores = (to_numpy(item) for item in (named[_TOKENS], named[_MASK], answer[_SCORES]))
        # It may leave out tokens of the prompt, and then says too much of them.
        read = tokens.shape[1] + sum(step.tokens.shape[1] for step in steps)
        steps.append(_Step(tokens, mask[:, :read], scores))

    handle = model.get_submodule(part.path).register_forward_hook(look, with_kwargs=True)
    try:
        with plain_generation(model, count, part.path, **settings):
            result = model.generate(**arguments, **_ANSWER)
    finally:
        handle.remove()
    chosen = steps[-1].scores[:, -1:].argmax(-1)
    second = np.concatenate([chosen, to_numpy(arguments["input_ids"])[:, -_SECOND_PROMPT + 1 :]], axis=1)
    mask = np.pad(steps[-1].mask, ((0, 0), (0, _SECOND_PROMPT)), constant_values=1)
    scores = _scores_after(part, model, _Step(second, mask, np.empty(0)), result.past_key_values)
    return GeneratedText((*steps, _Step(second, mask, scores)))


def _scores_after(part: ModelPart, model: nn.Module, step: _Step, cache: Any) -> NDArray[Any]:
    """Return what PyTorch answers to tokens after those in its own cache, one by one where a state asks for it."""
    assert part.cache is not None
    runs = _single_tokens(step) if part.cache.is_recurrent else [step]
    return np.concatenate([to_numpy(_answer_after(part, model, run, cache)[_SCORES]) for run in runs], axis=1)


def _answer_after(part: ModelPart, model: nn.Module, run: _Step, cache: Any) -> Any:
    """Return what PyTorch answers to the tokens of one run after those in its own cache; None: an empty one."""
    assert part.cache is not None
    # The model takes tokens, also where the graph takes their vectors.
    names = {_TOKENS, *(spec.name for spec in part.inputs)}
    positions = run.positions + part.first_position
    named = {_TOKENS: run.tokens, _MASK: _told_mask(part.cache, run), _POSITIONS: positions}
    given = {name: torch.from_numpy(value) for name, value in named.items() if name in names}
    return model.get_submodule(part.path)(**given, **part.forward_kwargs, **{part.cache.argument: cache})


def _difference_in_pieces(part: ModelPart, model: nn.Module, prompt: _Step) -> float | None:
    """Return by how much of scale the scores after a prompt are off where PyTorch reads it in two runs.

    None where that is rounding, where it is known of the cache, or where the model reads no such runs.
    """
    layout = part.cache
    assert layout is not None
    is_other = layout.is_recurrent or layout.dropping_windows or layout.template is not None
    if is_other or isinstance(_token_count(part), int) or prompt.given_positions is not None:
        return None
    half = (prompt.tokens.shape[1] + 1) // 2
    first = _Step(prompt.tokens[:, :half], prompt.mask[:, :half], np.empty(0))
    second = replace(prompt, tokens=prompt.tokens[:, half:])
    try:
        cache = _answer_after(part, model, first, None)[layout.argument]
        scores = _scores_after(part, model, second, cache)[:, -1:]
    except REFUSALS:  # it reads a prompt in one run alone
        return None
    dtypes = dtypes_inside(model, {_SCORES: scores})
    found = compare_outputs([{_SCORES: prompt.scores[:, -1:]}], [{_SCORES: scores}], computed_in=dtypes).worst
    return None if found.is_equal else found.relative_diff


def compare_generation(
    part: ModelPart,
    text: GeneratedText,
    run_file: Callable[[Draw], Mapping[str, NDArray[Any]]],
    computed_in: Sequence[str],
    is_rounding: Callable[[Draw], bool],
    vectors_of: Callable[[NDArray[Any]], Arrays] | None = None,
) -> GenerationInfo:
    """Compare the scores a graph gives, token by token, with those of PyTorch.

    Args:
        part: The part.
        text: What PyTorch generated.
        run_file: Runs the file.
        computed_in: Dtypes the model computes in.
        is_rounding: Says of inputs whether rounding decides what PyTorch answers.
        vectors_of: Returns the vectors of tokens by name of the input, for a graph that takes these.

    Raises:
        VerificationError: the scores of a step differ; names it.
    """
    assert part.cache is not None  # there was something to generate with
    rows = text.steps[0].mask.shape[0]
    graph = _Graph(part, run_file, vectors_of, rows)
    largest, ties, stopped_after = 0.0, 0, None
    number, singly_until, doubt = 0, 0, None
    while number < len(text.steps) and stopped_after is None:
        count = 1 if number < singly_until else _joined_count(number, text, graph.reads_several)
        joined = text.steps[number : number + count]
        states = graph.states
        scores, draw = graph.read(_joined(joined))
        found = _compared(joined, scores, computed_in)
        wrong = next((place for place, item in enumerate(found) if not item.is_equal), None)
        if wrong is not None and count > 1:
            # What excuses one token is no excuse for the others of a run: each is judged alone.
            graph.states, singly_until, doubt = states, number + count, _Doubt(number + wrong, draw, found[wrong])
            continue
        if wrong is not None:
            _refuse_wrong(text, _Doubt(number, draw, found[wrong]), is_rounding)
            stopped_after = number
            break
        for step, item in zip(joined, found, strict=True):
            largest = max(largest, item.relative_diff)
            if number < text.new_tokens:
                ties += tied_rows(step.scores[:, -1], 2 * item.threshold * item.scale)
            number += 1
        if doubt is not None and number == singly_until:
            # Read alone, each is right.
            _refuse_wrong(text, doubt, is_rounding)
            doubt = None
    return GenerationInfo(
        rows=rows,
        prompt_tokens=text.steps[0].tokens.shape[1],
        new_tokens=text.new_tokens,
        second_prompt_tokens=text.steps[-1].tokens.shape[1],
        ties=ties,
        largest_relative_diff=largest,
        stopped_after=stopped_after,
        differs_in_pieces=text.differs_in_pieces,
    )


def read_scores(
    part: ModelPart,
    text: GeneratedText,
    run_file: Callable[[Draw], Mapping[str, NDArray[Any]]],
    vectors_of: Callable[[NDArray[Any]], Arrays] | None = None,
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield for each step the scores of PyTorch, and those that a graph gives to the same tokens.

    Args:
        part: The part.
        text: What PyTorch generated.
        run_file: Runs the file.
        vectors_of: Returns the vectors of tokens by name of the input, for a graph that takes these.
    """
    graph = _Graph(part, run_file, vectors_of, text.steps[0].mask.shape[0])
    number = 0
    while number < len(text.steps):
        joined = text.steps[number : number + _joined_count(number, text, graph.reads_several)]
        scores, _ = graph.read(_joined(joined))
        yield from _by_step(joined, scores)
        number += len(joined)


@dataclass(frozen=True)
class _Doubt:
    """A step whose scores differ."""

    number: int
    draw: Draw
    """What the graph was given."""
    compared: OutputComparison


def _refuse_wrong(text: GeneratedText, doubt: _Doubt, is_rounding: Callable[[Draw], bool]) -> None:
    """Refuse scores that differ, unless rounding decides what PyTorch answers.

    Raises:
        VerificationError: names the step.
    """
    problem = doubt.compared.problem
    if problem or not is_rounding(doubt.draw):
        raise _unequal(text, doubt.number, problem or f"they differ by {doubt.compared.relative_diff:.1e} of scale")


class _Graph:
    """The graph as its reader runs it: with what it returned itself in the run before."""

    def __init__(
        self,
        part: ModelPart,
        run_file: Callable[[Draw], Mapping[str, NDArray[Any]]],
        vectors_of: Callable[[NDArray[Any]], Arrays] | None,
        rows: int,
    ) -> None:
        """Begin with an empty cache."""
        assert part.cache is not None
        self._part, self._cache, self._run_file, self._vectors_of = part, part.cache, run_file, vectors_of
        self.states: Mapping[str, Any] = {
            name: to_numpy(value) for name, value in empty_states(part.cache, rows).items()
        }
        self.reads_several = False
        """Whether it gave scores of several tokens in one run, and those it gives to each of them alone."""

    def read(self, step: _Step) -> tuple[NDArray[Any], Draw]:
        """Return the scores of the last run that a step takes, and what the graph was given in it."""
        for run, told in _told_runs(self._part, step, self._vectors_of):
            feeds = _feeds(self._part, run, {**self.states, **told})
            draw = Draw({name: torch.from_numpy(value) for name, value in feeds.items()}, {}, {})
            answer = self._run_file(draw)
            self.states = _fed(self._cache, answer)
        scores: NDArray[Any] = answer[_SCORES]
        # What a cache drops depends on how many tokens are read at once.
        is_same = not self._cache.dropping_windows
        self.reads_several = self.reads_several or (is_same and 1 < scores.shape[1] == step.tokens.shape[1])
        return scores, draw


def _compared(joined: Sequence[_Step], scores: NDArray[Any], computed_in: Sequence[str]) -> list[OutputComparison]:
    """Compare the scores of steps that were read at once, each by itself."""
    return [
        compare_outputs([{_SCORES: expected}], [{_SCORES: given}], computed_in=computed_in).worst
        for expected, given in _by_step(joined, scores)
    ]


def _by_step(joined: Sequence[_Step], scores: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the scores of PyTorch and those of the graph, for each of the steps that were read at once."""
    for place, step in enumerate(joined):
        # Of steps that are read at once, each is one token.
        given = scores if len(joined) == 1 else scores[:, place : place + 1]
        # A graph that reads one token in each run gives the scores of the last.
        given = given[:, -step.scores.shape[1] :]
        yield step.scores[:, -given.shape[1] :], given


def _joined_count(number: int, text: GeneratedText, reads_several: bool) -> int:
    """Return how many steps a graph reads at once, from this one on."""
    # The second prompt, and before it steps of one token after a cache that is longer than a usual window.
    last = len(text.steps) - 1 - _LAST_STEPS
    is_alike = reads_several and text.differs_in_pieces is None
    return min(_JOINED_STEPS, last - number) if is_alike and _SINGLE_STEPS < number < last else 1


def _joined(steps: Sequence[_Step]) -> _Step:
    """Return steps that follow each other as one."""
    tokens, scores = (
        np.concatenate(arrays, axis=1) for arrays in zip(*((item.tokens, item.scores) for item in steps), strict=True)
    )
    # Of steps that are read at once, each is told nothing.
    places = [item.given_positions for item in steps if item.given_positions is not None]
    return _Step(tokens, steps[-1].mask, scores, steps[0].told, np.concatenate(places, axis=-1) if places else None)


def _runs(part: ModelPart, step: _Step) -> Iterator[_Step]:
    """Yield a step as the runs a graph makes of it: one, or one for each token."""
    if not isinstance(_token_count(part), int):
        yield step
        return
    yield from _single_tokens(step)


def _told_runs(
    part: ModelPart, step: _Step, vectors_of: Callable[[NDArray[Any]], Arrays] | None
) -> Iterator[tuple[_Step, Mapping[str, NDArray[Any]]]]:
    """Yield the runs of a step with the vectors of their tokens, which are made of all at once."""
    vectors = vectors_of(step.tokens) if vectors_of is not None else {}
    end = 0
    for run in _runs(part, step):
        start, end = end, end + run.tokens.shape[1]
        yield run, {name: array[:, start:end] for name, array in vectors.items()}


def _single_tokens(step: _Step) -> Iterator[_Step]:
    count = step.tokens.shape[1]
    for end in range(1, count + 1):
        mask, places = step.mask[:, : step.mask.shape[1] - count + end], step.given_positions
        places = None if places is None else places[..., end - 1 : end]
        yield _Step(step.tokens[:, end - 1 : end], mask, step.scores, {}, places)


def _told_mask(cache: CacheLayout, step: _Step) -> NDArray[Any]:
    """Return the mask of a run: of all tokens so far, and of those of the run where no cache holds the others."""
    return step.mask if cache.grows else step.mask[:, -step.tokens.shape[1] :]


def _feeds(part: ModelPart, step: _Step, states: Mapping[str, NDArray[Any]]) -> Arrays:
    assert part.cache is not None
    known = {_TOKENS: step.tokens, _MASK: _told_mask(part.cache, step), _POSITIONS: step.positions, **states}
    known |= step.told
    # What else says something of each token says the same of all.
    others = {spec.name: np.full_like(step.tokens, plain_value(spec)) for spec in part.inputs if spec.name not in known}
    return {spec.name: known[spec.name] if spec.name in known else others[spec.name] for spec in part.inputs}


def plain_value(spec: InputTensorSpec) -> int:
    """Return what an input says of a token that is not marked."""
    return int(spec.value_range[0]) if spec.value_range and spec.first_values else 0


def _fed(cache: CacheLayout, answer: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    return {state.input: answer[state.output] for state in cache.states}


def tied_rows(scores: NDArray[Any], margin: float) -> int:
    """Return in how many rows the best two scores are no farther apart than the margin."""
    best = np.sort(scores.astype(np.float64), axis=-1)[:, -2:]
    return int((best[:, 1] - best[:, 0] <= margin).sum())


def _unequal(text: GeneratedText, number: int, difference: str) -> VerificationError:
    step = text.steps[number]
    past = step.mask.shape[1] - step.tokens.shape[1]
    begun = "the prompt" if step.tokens.shape[1] > 1 else "the start"
    which = f"step {number}" if 0 < number <= text.new_tokens else begun
    if number > text.new_tokens:
        which = "a second prompt"
    return VerificationError(
        f"not equal when generating: at {which}, {step.tokens.shape[1]} tokens after {past} in the cache, the scores "
        f"are not those of PyTorch: {difference}",
        hint="The graph is not the model with its cache. No file was written; --no-verify writes it all the same, "
        "--no-cache a graph that reads all tokens in every run.",
        is_graph_wrong=True,
    )


def reason_against(part: ModelPart) -> str:
    """Return why nothing can be generated with a graph of these inputs; empty where it can."""
    if _token_count(part) not in (1, *(item.name for item in part.dimensions)):
        return "the number of tokens is fixed"
    if any(isinstance(spec.shape[2], int) for spec in part.inputs if spec.cache and spec.cache.kind == "key"):
        return "the length of the cache is fixed"
    if not callable(getattr(part.model, "generate", None)):
        return f"{type(part.model).__name__} has no generate()"
    return ""


def _token_count(part: ModelPart) -> int | str:
    """Return how many tokens a run takes, or the name of their number."""
    return next(spec for spec in part.inputs if spec.name in (_TOKENS, EMBEDDED)).shape[1]


def _prompts(part: ModelPart, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their mask; where the model takes a mask, the first row is padded on the left."""
    specs = {spec.name: spec for spec in part.inputs}
    rows, states = (spec.shape[0] for spec in (specs[_TOKENS], next(spec for spec in part.inputs if spec.cache)))
    rows, states = (count if isinstance(count, int) else _ROWS for count in (rows, states))
    low, high = specs[_TOKENS].value_range or (0, 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(int(low), int(high) + 1, (rows, _PROMPT), generator=generator)
    mask = torch.ones(states, _PROMPT, dtype=tokens.dtype)
    # Padding goes through a state that is computed from token to token.
    # Streams of tokens are of one length.
    if _MASK in specs and rows == states > 1 and not (part.cache and part.cache.is_recurrent):
        mask[0, :_PADDING] = 0
    return tokens, mask


@contextmanager
def as_the_user_calls_it(prepared: PreparedPart) -> Iterator[None]:
    """Give the model its own forward back for the time of the block, and so those modules that lead to the part."""
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


@contextmanager
def plain_generation(model: nn.Module, count: int, path: str = "", **settings: Any) -> Iterator[None]:
    """Let a model choose the best of so many tokens, whatever its own settings are, for the time of the block.

    Args:
        model: The model.
        count: Number of tokens.
        path: Of the module in it that may have settings of its own, since it generates for the model.
        **settings: Further ones.
    """
    from transformers import GenerationConfig

    make_config: Any = GenerationConfig
    choosing = [vars(module) for module in (model, model.get_submodule(path)) if "generation_config" in vars(module)]
    own = [attributes["generation_config"] for attributes in choosing]
    for attributes in choosing:
        attributes["generation_config"] = make_config(
            **{"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **settings}
        )
    try:
        yield
    finally:
        for attributes, config in zip(choosing, own, strict=True):
            attributes["generation_config"] = config


class _FewRows(TorchFunctionMode):
    """Computes products of a few rows with a large matrix as a reader of the matrix does.

    Measured with two rows: a quarter of the time of torch's own way, which lays the matrix out anew each time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply from the other side where that is quicker."""
        if func is nn.functional.linear and not kwargs and len(args) > 1:
            given, weight, *bias = args
            if 1 < given.numel() // max(1, given.shape[-1]) <= _ROWS and weight.dim() == 2:
                product = (weight @ given.reshape(-1, given.shape[-1]).t()).t()
                product = product.reshape(*given.shape[:-1], len(weight)).contiguous()
                return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))
