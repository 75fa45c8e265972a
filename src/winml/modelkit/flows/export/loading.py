"""Loads a model for an export: with its weights where they are small, without them where they are large.

No exporter reads a weight where the forward reads none.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from winml.modelkit.errors import ExportError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse, first_choice
from winml.modelkit.load.library_access import local_files_only
from winml.modelkit.load.model import load_resolved
from winml.modelkit.load.parts import LoadedModel, ModelPart
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.load.resolution import resolve_model
from winml.modelkit.load.weightless import load_weightless
from winml.modelkit.runtime.available_memory import available_bytes
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.memory_check import refuse_verification_beyond_memory
from winml.modelkit.verify.reference_run import prepared_part, run_reference

__all__ = ["LARGE_UNREAD_BYTES", "LARGE_WEIGHTS_BYTES", "load_for_export", "parameter_bytes"]

LARGE_WEIGHTS_BYTES = 2**31
"""Chosen: the largest protobuf file. Weights above it are not to be in memory."""

LARGE_UNREAD_BYTES = 2**27
"""The same where no run in PyTorch reads them: the graph is changed in memory before it is written, or nothing is
compared. Chosen: peak memory is to stay below 1.5 GB, of which 0.5 GB are the libraries; with half a gigabyte of
weights held, a build peaked at 1.7 GB."""


def load_for_export(
    request: ModelRequest, config: WinMLExportConfig, *, is_handed_over: bool = False
) -> tuple[LoadedModel, ExporterUse]:
    """Load a model with its weights, or without them where they are large.

    Args:
        request: What the user asked for.
        config: Options of the export.
        is_handed_over: Whether the graph gets fewer bits before it is written. Weights of 16 bits are then read as
            float32, which the quantizers take and no file ever holds; and fewer weights count as large.

    Returns:
        The model, and the exporter to begin with.

    Raises:
        UsageError: the request is wrong.
        InputError: files, the Hub, or the user's code did not deliver.
        ExportError: the answer is to be compared with PyTorch's, and memory cannot hold the weights.
    """
    resolved = resolve_model(request, needs_weights=not request.random_weights, widens_halves=is_handed_over)
    if resolved.is_widened:
        request = replace(request, dtype="fp32")
    weight_bytes, use = parameter_bytes(resolved.model), first_choice(config)
    are_read = config.verify and not is_handed_over
    are_large = weight_bytes > (LARGE_WEIGHTS_BYTES if are_read else LARGE_UNREAD_BYTES)
    if use.name == "torchscript" and not are_large:
        return load_resolved(resolved, request), use
    # A graph that is handed over is compared without them.
    if are_read:
        refuse_verification_beyond_memory(weight_bytes, available_bytes())
    loaded = load_weightless(resolved, request)
    for part in loaded.parts:
        if part.stored is not None and (refusal := _refusal_without_values(part)) is not None:
            if config.verify:
                refuse_verification_beyond_memory(weight_bytes, available_bytes())
            note = f"The weights were loaded: without them the model does not run ({refusal.module or 'the root'})."
            whole = load_resolved(resolved, request)
            parts = tuple(replace(item, notes=seen.notes) for item, seen in zip(whole.parts, loaded.parts, strict=True))
            return LoadedModel.of_parts(loaded.info, parts, loaded.model_notes, [note], wanted=loaded.wanted), use
    return loaded, use


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of the parameters in bytes, tied ones once; they need no storage."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _refusal_without_values(part: ModelPart) -> ExportError | None:
    """Return why a part cannot run without values, such as a forward that reads them; None where it can."""
    with local_files_only(), prepared_part(part) as prepared:
        try:
            run_reference(prepared, InputDraws(part, seed=0).draw(0))
        except ExportError as error:
            return error
    return None
