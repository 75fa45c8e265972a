"""Does a graph with a cache generate what the model generates?

The graph is given the tokens that PyTorch read and chose, and in every run what it returned itself in the run before.
The same best token in every step means the same text. The first steps are run one by one, as a reader does; the graph
reads what PyTorch chose after them several tokens at a time, and each has its scores all the same. The last steps are
single ones again, after a longer cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import GenerationInfo, OutputComparison, Rounding, compare_outputs
from winml.modelkit.compare.verification.generated_text import (
    GeneratedText,
    TextStep,
    attention_mask_of,
    held_tokens,
    single_tokens,
    token_count,
)
from winml.modelkit.compare.verification.sizes import Draw
from winml.modelkit.errors import VerificationError, opt
from winml.modelkit.models.caches.arguments import empty_states
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.ort.decoding.inputs import (
    MASK,
    POSITIONS,
    SCORES,
    TOKEN_IDS,
    hold_hidden_rows,
    plain_value,
)
from winml.modelkit.progress import count_progress

_SINGLE_STEPS = 8
"""Specified: so many steps of one token each, after its own cache, are asked of a graph."""
_JOINED_STEPS = 8
"""Tokens in a run after those. Chosen: a run of eight takes little longer than a run of one."""
_LAST_STEPS = 2
"""Steps of one token each, after those. Chosen: enough to show what is wrong once a window is full."""


def compare_generation(
    part: ModelPart,
    text: GeneratedText,
    run_file: Callable[[Draw], Arrays],
    rounding: Rounding,
    is_rounding: Callable[[Draw], bool],
    vectors_of: Callable[[Array], Arrays] | None = None,
) -> GenerationInfo:
    """Compare the scores a graph gives, token by token, with those of PyTorch.

    Args:
        part: The part.
        text: What PyTorch generated.
        run_file: Runs the file.
        rounding: Rounding errors to accept.
        is_rounding: Says of inputs whether rounding decides what PyTorch answers.
        vectors_of: Returns the vectors of tokens by name of the input, for a graph that takes these.

    Raises:
        VerificationError: the scores of a step differ; names it.
    """
    assert part.cache is not None  # there was something to generate with
    rows = text.steps[0].mask.shape[0]
    graph = _Graph(part, run_file, vectors_of, rows)
    relative_diff, ties, stopped_after = 0.0, 0, None
    number, singly_until, doubt = 0, 0, None
    while number < len(text.steps) and stopped_after is None:
        count_progress(number, len(text.steps), f"step {number + 1} of {len(text.steps)}")
        count = 1 if number < singly_until else _joined_count(number, text, graph.reads_several)
        joined = text.steps[number : number + count]
        states = graph.states
        scores, draw = graph.read(_joined(joined))
        found = [
            compare_outputs([{SCORES: expected}], [{SCORES: passed}], rounding=rounding).worst
            for expected, passed in _by_step(joined, scores)
        ]
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
            relative_diff = max(relative_diff, item.relative_diff)
            if number < text.new_tokens:
                ties += _tied_rows(step.scores[:, -1], 2 * item.threshold * item.scale)
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
        largest_relative_diff=relative_diff,
        stopped_after=stopped_after,
        differs_in_pieces=text.differs_in_pieces,
        padded_rows=int((text.steps[0].mask == 0).any(axis=1).sum()),
    )


def read_scores(
    part: ModelPart,
    text: GeneratedText,
    run_file: Callable[[Draw], Arrays],
    vectors_of: Callable[[Array], Arrays] | None = None,
) -> Iterator[tuple[Array, Array]]:
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
        raise _unequal(text, doubt.number, problem or f"relative difference {doubt.compared.relative_diff:.1e}")


class _Graph:
    """The graph as its reader runs it: with what it returned itself in the run before."""

    def __init__(
        self,
        part: ModelPart,
        run_file: Callable[[Draw], Arrays],
        vectors_of: Callable[[Array], Arrays] | None,
        rows: int,
    ) -> None:
        """Begin with an empty cache."""
        assert part.cache is not None
        self._part, self._cache, self._run_file, self._vectors_of = part, part.cache, run_file, vectors_of
        self._held = held_tokens(part)
        self.states: Mapping[str, Any] = {
            name: to_numpy(value) for name, value in empty_states(part.cache, rows, self._held or 0).items()
        }
        self.reads_several = False
        """Whether it gave scores of several tokens in one run, and those it gives to each of them alone."""

    def read(self, step: TextStep) -> tuple[Array, Draw]:
        """Return the scores of the last run that a step takes, and what the graph was given in it."""
        for run, reported in _embedded_runs(self._part, step, self._vectors_of):
            feeds = _feeds(self._part, run, {**self.states, **reported}, self._held)
            draw = Draw({name: to_torch(value) for name, value in feeds.items()}, {}, {})
            output = self._run_file(draw)
            self.states = self._next_states(run, output)
        scores: Array = output[SCORES]
        # What a cache drops depends on how many tokens are read at once.
        is_same = not self._cache.dropping_windows
        self.reads_several = self.reads_several or (is_same and 1 < scores.shape[1] == step.tokens.shape[1])
        return scores, draw

    def _next_states(self, run: TextStep, output: Arrays) -> Arrays:
        """Return the states of the next run, as :class:`DecoderGraph` hands them on, also after padding."""
        # Of a cache of a fixed length, the last entries.
        states = {
            state.input: output[state.output]
            if self._held is None or state.token_axis is None
            else np.take(output[state.output], range(-self._held, 0), axis=state.token_axis)
            for state in self._cache.states
        }
        is_hidden = run.mask[:, -1] == 0
        if run.tokens.shape[1] > 1 or not is_hidden.any():
            return states
        carried = {state.input for state in self._cache.states if not state.grows}
        return {
            name: hold_hidden_rows(self.states[name], value, is_hidden, 0) if name in carried else value
            for name, value in states.items()
        }


def _by_step(joined: Sequence[TextStep], scores: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the scores of PyTorch and those of the graph, for each of the steps that were read at once."""
    for place, step in enumerate(joined):
        # Of steps that are read at once, each is one token.
        passed = scores if len(joined) == 1 else scores[:, place : place + 1]
        # A graph that reads one token in each run gives the scores of the last.
        passed = passed[:, -step.scores.shape[1] :]
        yield step.scores[:, -passed.shape[1] :], passed


def _joined_count(number: int, text: GeneratedText, reads_several: bool) -> int:
    """Return how many steps a graph reads at once, from this one on."""
    # The second prompt, and before it steps of one token after a cache that is longer than a usual window.
    last = len(text.steps) - 1 - _LAST_STEPS
    is_alike = reads_several and text.differs_in_pieces is None
    return min(_JOINED_STEPS, last - number) if is_alike and _SINGLE_STEPS < number < last else 1


def _joined(steps: Sequence[TextStep]) -> TextStep:
    """Return steps that follow each other as one."""
    tokens, scores = (
        np.concatenate(arrays, axis=1) for arrays in zip(*((item.tokens, item.scores) for item in steps), strict=True)
    )
    # Of steps that are read at once, each is told nothing.
    places = [item.passed_positions for item in steps if item.passed_positions is not None]
    return TextStep(tokens, steps[-1].mask, scores, steps[0].told, np.concatenate(places, axis=-1) if places else None)


def _embedded_runs(
    part: ModelPart, step: TextStep, vectors_of: Callable[[Array], Arrays] | None
) -> Iterator[tuple[TextStep, Arrays]]:
    """Yield the runs that a graph makes of a step, one or one for each token, with the vectors of their tokens."""
    vectors = vectors_of(step.tokens) if vectors_of is not None else {}
    end = 0
    for run in single_tokens(step) if isinstance(token_count(part), int) else [step]:
        start, end = end, end + run.tokens.shape[1]
        yield run, {name: array[:, start:end] for name, array in vectors.items()}


def _feeds(part: ModelPart, step: TextStep, states: Arrays, held: int | None) -> Arrays:
    assert part.cache is not None
    mask = attention_mask_of(part.cache, step)
    if held is not None:
        missing = held + step.tokens.shape[1] - mask.shape[1]
        mask = np.pad(mask, ((0, 0), (missing, 0)))
    known = {TOKEN_IDS: step.tokens, MASK: mask, POSITIONS: step.positions, **states, **step.told}
    # What else says something of each token says the same of all.
    return {
        spec.name: known[spec.name] if spec.name in known else np.full_like(step.tokens, plain_value(spec))
        for spec in part.inputs
    }


def _tied_rows(scores: Array, margin: float) -> int:
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
        f"not equal when generating: at {which}, with {step.tokens.shape[1]} tokens after {past} in the cache, the "
        f"logits differ from PyTorch's: {difference}",
        hint=f"The graph with its cache differs from the model. No file was written; {opt.no_verify} writes it anyway, "
        f"{opt.no_cache} a graph that reads all tokens in every run.",
        is_graph_wrong=True,
    )
