"""Any other model: one part, whose forward is called with no cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from winml.modelkit.load.checkpoints.config import CheckpointConfig
from winml.modelkit.load.families.family import part_of_decision
from winml.modelkit.load.inputs.argument_names import arguments_of_names
from winml.modelkit.load.inputs.decision import (
    InputDecision,
    check_input_specs,
    decide_inputs,
    forward_keywords,
    known_meanings,
)
from winml.modelkit.load.inputs.dynamic_axes import open_axes
from winml.modelkit.load.parts import ModelPart

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["decide_whole_inputs", "firm_keys", "unused_size_notes", "whole_model"]


def whole_model(
    model: torch.nn.Module,
    checkpoint: CheckpointConfig,
    task: str,
    request: ModelRequest,
    notes: tuple[str, ...] = (),
) -> ModelPart:
    """Return the model as one part, with the inputs of the user's manifest, else decided ones.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        checkpoint: Its config and files.
        task: Canonical task.
        request: What the user asked for.
        notes: Why it is exported like this.

    Raises:
        UsageError: a size the model refuses, or inputs that are not its own.
    """
    decision = decide_whole_inputs(model, checkpoint, task, request)
    decision = dataclasses.replace(decision, notes=(*notes, *decision.notes))
    described = [spec.name for spec in request.input_specs or ()]
    arguments = arguments_of_names(model, described, request.specs_origin)
    return part_of_decision(model, decision, forward_keywords(model), arguments)


def decide_whole_inputs(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    """Return the inputs of the user's manifest, else decided ones.

    Raises:
        UsageError: a size the model refuses, or inputs that are not its own.
    """
    if request.input_specs is None:
        decision = decide_inputs(
            model,
            checkpoint.config,
            checkpoint.root,
            task=task,
            shape=request.shape_config,
            batch_size=request.batch_size,
        )
        left_open = request.shape_config.left_open() if request.shape_config else {}
        return open_axes(decision, request.dynamic, left_open, firm_keys=firm_keys(request))
    check_input_specs(model, request.input_specs, request.specs_origin)
    meanings = known_meanings(model, checkpoint.config, request.input_specs, checkpoint.root, task)
    notes = unused_size_notes(request)
    decision = InputDecision(request.input_specs, notes, meanings, given_by=request.specs_origin)
    return open_axes(decision, request.dynamic, are_sizes_firm=True)


def firm_keys(request: ModelRequest) -> frozenset[str]:
    """Return the sizes the user gave a number for."""
    given = request.shape_config.given() if request.shape_config else {}
    return frozenset({*given, *(["batch_size"] if request.batch_size else [])})


def unused_size_notes(request: ModelRequest) -> tuple[str, ...]:
    """Return a note on sizes that a manifest of the inputs makes useless, if there are any."""
    given = {"--shape-config": request.shape_config, "--batch-size": request.batch_size}
    names = [name for name, value in given.items() if value is not None]
    return (f"{request.specs_origin} decides the inputs; {' and '.join(names)} not used",) if names else ()
