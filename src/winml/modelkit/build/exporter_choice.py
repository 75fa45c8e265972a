"""Which exporter makes the graph, and what if it cannot?

TorchScript is faster on what it can trace; dynamo takes any size of model, and most of what TorchScript does not trace.
Decided from the options and the size of the weights, before anything is loaded; undone by what an exporter fails on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from winml.modelkit.build.dynamic_proof import axes_of, unchanged_attributes
from winml.modelkit.build.reference_run import copies_for, with_values
from winml.modelkit.errors import ExportError, VerificationError
from winml.modelkit.export.capture import Capture
from winml.modelkit.export.config import ExporterName, WinMLExportConfig
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.records import LoadedModel
from winml.modelkit.report.words import size_words

__all__ = [
    "LARGE_WEIGHTS_BYTES",
    "SECOND_TRY_S",
    "ExporterUse",
    "capture_graph",
    "first_choice",
    "parameter_bytes",
    "second_choice",
]

LARGE_WEIGHTS_BYTES = 2**31
"""Specified by issue and format alike: what one protobuf file can hold. TorchScript needs the weights in memory."""

SECOND_TRY_S = 120.0
"""How long dynamo may try what nobody asked it for. Chosen: ten times what a text encoder of 12 layers takes; with open
sizes that a forward divides it can take hours."""

_WORDS: Mapping[ExporterName, str] = {"torchscript": "TorchScript", "dynamo": "dynamo"}


@dataclass(frozen=True)
class ExporterUse:
    """Which exporter is used, and why."""

    name: ExporterName
    reason: str = ""
    """In a few words; empty where it is simply the first to be tried."""
    time_limit_s: float | None = None
    """How long it may take; None: as long as it wants."""


def first_choice(config: WinMLExportConfig, weight_bytes: int) -> ExporterUse:
    """Return the exporter to begin with.

    Args:
        config: Options of the export.
        weight_bytes: Size of the parameters in memory.
    """
    if config.exporter != "auto":
        return ExporterUse(config.exporter, "asked for")
    if weight_bytes > LARGE_WEIGHTS_BYTES:
        return ExporterUse("dynamo", f"{size_words(weight_bytes)} of weights, over {size_words(LARGE_WEIGHTS_BYTES)}")
    return ExporterUse("torchscript")


def second_choice(config: WinMLExportConfig, used: ExporterUse, error: VerificationError) -> ExporterUse | None:
    """Return the exporter to try when a file does not answer as the model does, or None if none is left to try.

    TorchScript writes some wrong graphs without a word; dynamo translates other operators, by other code.

    Args:
        config: Options of the export.
        used: Which exporter made the graph.
        error: What is wrong with the file.
    """
    if config.exporter != "auto" or used.name != "torchscript" or not error.is_graph_wrong:
        return None
    reason = error.message.removeprefix("cannot verify: ").partition(". ")[0]
    return ExporterUse("dynamo", f"the graph TorchScript made is wrong: {reason}", SECOND_TRY_S)


def parameter_bytes(model: nn.Module) -> int:
    """Return what the parameters take, tied ones once; they may be without storage."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def capture_graph(
    loaded: LoadedModel,
    tensors: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    config: WinMLExportConfig,
    use: ExporterUse,
) -> tuple[Capture, ExporterUse]:
    """Capture the prepared model with the exporter chosen first, or with the other one where that fails.

    Args:
        loaded: The model, its forward replaced by ``forward``.
        tensors: Example inputs, with values.
        forward: The flat forward, called before.
        tree: The modules of the model.
        config: Options of the export.
        use: The first choice.

    Returns:
        The graph, and which exporter made it.

    Raises:
        ExportError: none of the exporters that may be used can; tells the reason of each.
    """
    try:
        return _capture(use.name, loaded, tensors, forward, tree, config, use.time_limit_s), use
    except ExportError as error:
        if config.exporter != "auto":
            raise
        first = error
    other: ExporterName = "dynamo" if use.name == "torchscript" else "torchscript"
    try:
        capture = _capture(other, loaded, tensors, forward, tree, config)
    except ExportError as second:
        raise _both_failed(first, second) from second
    return capture, ExporterUse(other, _reason(use.name, first))


def _capture(
    name: ExporterName,
    loaded: LoadedModel,
    tensors: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    config: WinMLExportConfig,
    time_limit_s: float | None = None,
) -> Capture:
    if name == "torchscript" and loaded.stored is not None:
        return _capture_with_weights(loaded, tensors, forward, tree, config)
    opset_version, axes = config.opset_for(name), axes_of(loaded.inputs)
    # An attempt that fails half-way leaves nothing on the modules for the next.
    with unchanged_attributes(loaded.model):
        if name == "torchscript":
            from winml.modelkit.export.torchscript import capture_torchscript

            return capture_torchscript(
                loaded.model,
                tensors,
                forward,
                tree,
                opset_version=opset_version,
                dynamic_axes=axes,
                keep_stack_traces=config.keep_torch_metadata,
            )
        from winml.modelkit.export.dynamo import capture_dynamo

        return capture_dynamo(
            loaded.model,
            copies_for(loaded.model, tensors),
            forward,
            tree,
            opset_version=opset_version,
            dynamic_axes=axes,
            keep_stack_traces=config.keep_torch_metadata,
            weights=loaded.stored,
            time_limit_s=time_limit_s,
        )


def _capture_with_weights(
    loaded: LoadedModel,
    tensors: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    config: WinMLExportConfig,
) -> Capture:
    """Capture with TorchScript what was loaded without weights."""
    with with_values(loaded, forward) as (whole, fresh):
        return _capture("torchscript", whole, tensors, fresh, tree, config)


def _reason(name: ExporterName, error: ExportError) -> str:
    """Say in a few words why an exporter could not."""
    if error.operator:
        place = f" in module {error.module or '(the root)'}" if error.module is not None else ""
        return f"{error.operator}{place} has no {_WORDS[name]} form"
    return f"{_WORDS[name]}: {error.message}"


def _both_failed(first: ExportError, second: ExportError) -> ExportError:
    return ExportError(
        f"neither exporter can make a graph of this model: {first.message}; {second.message}",
        # What is said of an operator TorchScript lacks is to let dynamo try.
        hint=second.hint if first.operator else first.hint,
        operator=first.operator,
        module=first.module,
    )
