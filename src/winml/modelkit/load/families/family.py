"""What a family of models says of one of them: its parts, or why it has none of that kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from winml.modelkit.load.checkpoints.config import CheckpointConfig
from winml.modelkit.load.inputs.decision import InputDecision
from winml.modelkit.load.inputs.nested_arguments import NestedArguments
from winml.modelkit.load.parts import ModelPart

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["Family", "FoundParts", "part_of_decision"]


@dataclass(frozen=True)
class FoundParts:
    """The answer of a family."""

    parts: tuple[ModelPart, ...] = ()
    """In the order in which they run; empty where the model is not of this family."""
    notes: tuple[str, ...] = ()
    """Why it is not, where the user should hear it."""


Family: TypeAlias = "Callable[[torch.nn.Module, CheckpointConfig, str, ModelRequest], FoundParts]"
"""Given a model (its parameters may be on the ``meta`` device), its config and files, the canonical task and what the
user asked for. Refuses with a UsageError what no graph of this family can do."""


def part_of_decision(
    model: torch.nn.Module,
    decision: InputDecision,
    forward_kwargs: Mapping[str, Any],
    arguments: NestedArguments | None,
    **others: Any,
) -> ModelPart:
    """Return a part with the inputs that were decided for it.

    Args:
        model: The whole model.
        decision: Its inputs.
        forward_kwargs: Fixed keywords of every call.
        arguments: How the inputs become arguments of the forward; None where each is one.
        **others: Further fields of the part, such as ``name`` and ``feeds``.
    """
    return ModelPart(
        model=model,
        inputs=decision.inputs,
        forward_kwargs=forward_kwargs,
        arguments=arguments,
        dimensions=decision.dimensions,
        output_axes=decision.output_axes,
        notes=decision.notes,
        **others,
    )
