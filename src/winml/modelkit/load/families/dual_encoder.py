"""An encoder for text and one for images or recordings in one model: a graph of each, where these are asked for.

Which models these are is said by the methods they have: each encoder's answers, pooled and projected, are what its
method returns. The whole model is one graph, as long as no part of it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from winml.modelkit.load.checkpoints.config import CheckpointConfig
from winml.modelkit.load.families.family import FoundParts, part_of_decision
from winml.modelkit.load.families.whole_model import decide_whole_inputs
from winml.modelkit.load.inputs.decision import InputDecision
from winml.modelkit.load.inputs.nested_arguments import NestedArguments
from winml.modelkit.load.parts import ModelPart

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["dual_encoder_parts"]


@dataclass(frozen=True)
class _Encoder:
    """One of the encoders."""

    part: str
    method: str
    """Specified by transformers: the method that returns its answers."""
    output: str
    """Specified: what transformers, optimum and transformers.js call them."""


_ENCODERS: Final = (
    _Encoder("text", "get_text_features", "text_embeds"),
    _Encoder("vision", "get_image_features", "image_embeds"),
    _Encoder("audio", "get_audio_features", "audio_embeds"),
)


def dual_encoder_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> FoundParts:
    """Return an encoder of text and one of another medium, where one of them is asked for.

    Raises:
        UsageError: sizes or inputs that the model does not take.
    """
    encoders = [item for item in _ENCODERS if callable(getattr(model, item.method, None))]
    if not request.submodel or len(encoders) < 2 or encoders[0].part != "text":
        return FoundParts()
    whole = decide_whole_inputs(model, checkpoint, task, request)
    taken = {item.part: _parameters(getattr(model, item.method)) for item in encoders}
    decisions = {item.part: _inputs_among(whole, taken[item.part]) for item in encoders}
    if not all(decision.inputs for decision in decisions.values()):
        return FoundParts()
    return FoundParts(tuple(_part(model, item, decisions[item.part]) for item in encoders))


def _part(model: torch.nn.Module, encoder: _Encoder, decision: InputDecision) -> ModelPart:
    names = tuple(spec.name for spec in decision.inputs)

    def results(outputs: Any) -> Mapping[str, torch.Tensor]:
        # Before it returned a record, a method returned the vectors themselves.
        pooled = outputs if isinstance(outputs, torch.Tensor) else outputs["pooler_output"]
        return {encoder.output: pooled}

    entry: Callable[[torch.nn.Module], Callable[..., Any]] = attrgetter(encoder.method)
    return part_of_decision(
        model, decision, {}, NestedArguments(names, {}, dict, results), name=encoder.part, entry=entry
    )


def _parameters(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)


def _inputs_among(whole: InputDecision, names: frozenset[str]) -> InputDecision:
    """Return the inputs of these names, with the dimensions that are theirs."""
    inputs = tuple(spec for spec in whole.inputs if spec.name in names)
    sizes = {size for spec in inputs for size in spec.shape}
    dimensions = tuple(item for item in whole.dimensions if item.name in sizes)
    return replace(whole, inputs=inputs, dimensions=dimensions)
