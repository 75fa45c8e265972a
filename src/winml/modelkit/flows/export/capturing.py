"""How is a loaded model captured as a graph: by the exporter chosen first, or by the other where that one fails?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from winml.modelkit.errors import ExportError
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.config import ExporterName, WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.parts import LoadedModel
from winml.modelkit.verify.other_sizes import axes_of, unchanged_attributes
from winml.modelkit.verify.reference_run import copies_for, with_values

__all__ = ["capture_graph"]

_WORDS: Mapping[ExporterName, str] = {"torchscript": "TorchScript", "dynamo": "dynamo"}


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
    options = CaptureOptions(
        opset_version=config.opset_for(name),
        dynamic_axes=axes_of(loaded.inputs),
        keep_stack_traces=config.keep_torch_metadata,
        weights=loaded.stored,
        time_limit_s=time_limit_s,
    )
    # An attempt that fails half-way leaves nothing on the modules for the next.
    with unchanged_attributes(loaded.model):
        if name == "torchscript":
            from winml.modelkit.export.torchscript.capturing import capture_torchscript

            return capture_torchscript(loaded.model, tensors, forward, tree, options)
        from winml.modelkit.export.dynamo.capturing import capture_dynamo

        return capture_dynamo(loaded.model, copies_for(loaded.model, tensors), forward, tree, options)


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
