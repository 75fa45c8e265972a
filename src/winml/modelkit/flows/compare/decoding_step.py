"""Brings two decoders to one step of a text: the reference writes it, and both are fed what it is fed there.

An error that grows with the cache shows at a late step, and not in one run on random values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from winml.modelkit.errors import UsageError
from winml.modelkit.runtime.decoder_inputs import next_feeds, state_feeds
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
        UsageError: the model has no cache.
        WinMLError: whatever a run raises.
    """
    states = _states(pair)
    texts = []
    for prompt in pair.draws:
        feeds = dict(prompt)
        for _ in range(step):
            answer = pair.reference.outputs(pair.reference_feeds(feeds))
            feeds = next_feeds(feeds, {pair.names.get(name, name): array for name, array in answer.items()}, states)
        texts.append(feeds)
    return replace(pair, draws=texts)


def step_words(pair: SidePair, step: int) -> str:
    """Say what both are fed."""
    tokens = pair.draws[0]["input_ids"].shape[1]
    if step == 0:
        return f"At step 0: the prompt of {tokens} tokens."
    return (
        f"At step {step}: token {step} of the text that {pair.reference.shown} writes greedily, with the cache of its "
        "own runs before."
    )


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
