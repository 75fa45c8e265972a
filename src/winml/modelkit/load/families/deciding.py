"""Decides the parts of a transformers model: each family is asked in turn, and the first that knows it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.load.checkpoints.config import CheckpointConfig
from winml.modelkit.load.checkpoints.task import canonical_task
from winml.modelkit.load.families.decoder import decoder_parts
from winml.modelkit.load.families.dual_encoder import dual_encoder_parts
from winml.modelkit.load.families.encoder_decoder import encoder_decoder_parts
from winml.modelkit.load.families.family import Family
from winml.modelkit.load.families.vision_language import vision_language_parts
from winml.modelkit.load.families.whole_model import whole_model
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.options import nearest

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["FAMILIES", "decide_parts", "refuse_unknown_parts"]

FAMILIES: Final[tuple[Family, ...]] = (encoder_decoder_parts, vision_language_parts, decoder_parts, dual_encoder_parts)
"""In the order in which they are asked. A family is found by what a model takes and returns, never by its name."""


def decide_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> tuple[ModelPart, ...]:
    """Return all parts of a transformers model, with or without storage, in the order in which they run.

    Raises:
        UsageError: sizes or inputs that the model does not take, or a part that it does not have.
    """
    notes: list[str] = []
    parts: tuple[ModelPart, ...] = ()
    for family in FAMILIES:
        found = family(model, checkpoint, canonical_task(task), request)
        notes = notes or [*found.notes]  # the first that says why it is one graph has said it
        if parts := found.parts:
            break
    parts = parts or (whole_model(model, checkpoint, canonical_task(task), request, tuple(notes)),)
    refuse_unknown_parts(request.submodel, parts, type(model).__name__)
    return parts


def refuse_unknown_parts(wanted: Sequence[str], parts: Sequence[ModelPart], name: str) -> None:
    """Refuse parts that a model does not have.

    Args:
        wanted: Their names.
        parts: What it has.
        name: The model, for the message.

    Raises:
        UsageError: names the part, and those that there are.
    """
    names = [part.name for part in parts]
    for part in wanted:
        if len(names) == 1:
            raise UsageError(
                f"--submodel {part}: {name} becomes one graph and has no parts", hint="Leave --submodel out."
            )
        if part not in names:
            guess = nearest(part, names)
            raise UsageError(
                f"--submodel {part}: {name} has no such part",
                hint=f"{f'Did you mean {guess!r}? ' if guess else ''}It has {', '.join(names)}.",
            )
