"""Brings two decoders to one step of a text: the reference writes it, and both are fed what it is fed there.

An error that grows with the cache shows at a late step, and not in one run on random values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from winml.modelkit.errors import UsageError
from winml.modelkit.runtime.decoding.inputs import SCORES, TOKEN_IDS, next_feeds, state_feeds
from winml.modelkit.verify.by_module.onnx_side import OnnxSide
from winml.modelkit.verify.by_module.sides import SidePair
from winml.modelkit.verify.by_module.torch_side import TorchSide

__all__ = ["at_step", "step_words"]


def at_step(pair: SidePair, step: int) -> SidePair:
    """Return two sides with what the reference is fed at a step of each text.

    Args:
        pair: Both, with prompts.
        step: Tokens that the reference writes greedily, with its own cache; 0 leaves the prompts.

    Raises:
        UsageError: the model has no cache, takes no token ids, or answers no scores of tokens.
        WinMLError: whatever a run raises.
    """
    _refuse_without_ids(pair, step)
    states, shapes = _states(pair), _shapes(pair)
    texts = []
    for prompt in pair.draws:
        feeds = dict(prompt)
        for _ in range(step):
            outputs = pair.reference.outputs(pair.reference_feeds(feeds))
            output = {pair.names.get(name, name): array for name, array in outputs.items()}
            _refuse_without_scores(pair, list(output), step)
            feeds = next_feeds(feeds, output, states, shapes)
        texts.append(feeds)
    return replace(pair, draws=texts)


def step_words(pair: SidePair, step: int) -> str:
    """Say what both are fed."""
    tokens = pair.draws[0][TOKEN_IDS].shape[1]
    if step == 0:
        return f"At step 0: the prompt of {tokens} tokens."
    return (
        f"At step {step}: token {step} of the text that {pair.reference.shown} writes greedily, with the cache of its "
        "own runs before."
    )


def _refuse_without_ids(pair: SidePair, step: int) -> None:
    """Refuse, before anything is run, what the reference cannot write a text with.

    Raises:
        UsageError: the model takes no token ids, or a file answers no scores.
    """
    if TOKEN_IDS not in pair.candidate.input_dtypes:
        raise UsageError(
            f"--step {step}: {pair.candidate.shown} has no input {TOKEN_IDS!r}, to which the next token is fed",
            hint="Only decoders that take token ids write a text here; compare others on values of a file "
            "(--input-data), without --step.",
        )
    if step and isinstance(pair.reference, OnnxSide):
        _refuse_without_scores(pair, [pair.names.get(name, name) for name in pair.reference.output_names], step)


def _refuse_without_scores(pair: SidePair, outputs: Sequence[str], step: int) -> None:
    if SCORES not in outputs:
        raise UsageError(
            f"--step {step}: {pair.reference.shown} has no output {SCORES!r}, from which the next token is taken",
            hint="Say which output it is with --map, or compare without --step.",
        )


def _shapes(pair: SidePair) -> Mapping[str, Sequence[int | str | None]]:
    """Return the sizes of the inputs as the candidate states them."""
    side = pair.candidate
    if isinstance(side, OnnxSide):
        return side.session().input_shapes
    return {spec.name: spec.shape for spec in side.part.inputs} if isinstance(side, TorchSide) else {}


def _states(pair: SidePair) -> Mapping[str, str]:
    """Return which input of the candidate takes which output, as a file or the exporter's decision says.

    Raises:
        UsageError: nothing does.
    """
    for side in (pair.candidate, pair.reference):
        if isinstance(side, OnnxSide):
            states: Mapping[str, str] = state_feeds(side.session())
        else:
            cache = side.part.cache if isinstance(side, TorchSide) else None
            states = {} if cache is None else {state.input: state.output for state in cache.states}
        if states:
            return states
    raise UsageError("--step: the models have no cache", hint="Compare decoders that were exported with their cache.")
