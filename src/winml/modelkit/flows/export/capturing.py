"""Captures a part as a graph: with the exporter chosen first, or with the other one where that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from winml.modelkit.errors import ExportError, missing_name
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.config import ExporterName, WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse
from winml.modelkit.flows.export.loading import parameter_bytes
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.runtime.available_memory import available_bytes
from winml.modelkit.verify.memory_check import refuse_verification_beyond_memory
from winml.modelkit.verify.other_sizes import axes_of, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, copies_for, with_values

__all__ = ["capture_graph"]

_WEIGHTS_LOADED = "The weights were loaded: without them no exporter makes a graph of the model."
_WORDS: Mapping[ExporterName, str] = {"torchscript": "TorchScript", "dynamo": "dynamo"}


def capture_graph(
    prepared: PreparedPart,
    tensors: Mapping[str, torch.Tensor],
    tree: ModuleTree,
    config: WinMLExportConfig,
    use: ExporterUse,
) -> tuple[Capture, ExporterUse]:
    """Capture a prepared part with the exporter chosen first, or with the other one where that fails.

    Args:
        prepared: The part; its forward was called before.
        tensors: Example inputs, with values.
        tree: The modules that ran.
        config: Options of the export.
        use: The first choice.

    Returns:
        The graph, and which exporter made it.

    Raises:
        ExportError: none of the exporters that may be used can; tells the reason of each.
    """
    request = _CaptureRequest(prepared, tensors, tree, config)
    errors: dict[ExporterName, ExportError] = {}
    for name, has_values in _attempts(prepared.part, config, use):
        if has_values and errors[name].operator is not None:
            # No value gives the operator a form.
            continue
        try:
            capture = _capture_with(name, request, None if errors else use.time_limit_s, has_values=has_values)
        except (ExportError, ImportError, AttributeError) as error:
            errors[name] = _named_failure(name, error)
        else:
            other = next((failed for failed in errors if failed != name), None)
            return capture, use if other is None else ExporterUse(name, _failure_words(other, errors[other]))
    first_error, *second_errors = errors.values()
    for second_error in second_errors:
        raise _both_failed(first_error, second_error) from second_error
    raise first_error


def _attempts(part: ModelPart, config: WinMLExportConfig, use: ExporterUse) -> list[tuple[ExporterName, bool]]:
    """Return the exporters to try in turn, each with whether the weights are loaded for it."""
    attempts: list[tuple[ExporterName, bool]] = [(use.name, False)]
    if config.exporter == "auto" and part.open_grids is None:
        attempts.append(("dynamo" if use.name == "torchscript" else "torchscript", False))
    if part.stored is not None and ("torchscript", False) in attempts:
        # Last, since it takes the most memory: a trace that needs values.
        attempts.append(("torchscript", True))
    return attempts


@dataclass(frozen=True)
class _CaptureRequest:
    """What is to be captured."""

    prepared: PreparedPart
    tensors: Mapping[str, torch.Tensor]
    tree: ModuleTree
    config: WinMLExportConfig


def _capture_with(
    name: ExporterName, request: _CaptureRequest, time_limit_s: float | None, *, has_values: bool
) -> Capture:
    if has_values:
        if request.config.verify:
            refuse_verification_beyond_memory(parameter_bytes(request.prepared.model), available_bytes())
        with with_values(request.prepared) as weighted:
            capture = _capture_with(name, replace(request, prepared=weighted), time_limit_s, has_values=False)
        return replace(capture, notes=(*capture.notes, _WEIGHTS_LOADED))
    prepared, config = request.prepared, request.config
    part, model = prepared.part, prepared.model
    tensors = copies_for(model, request.tensors)
    options = CaptureOptions(
        opset_version=config.opset_for(name),
        dynamic_axes=axes_of(part.inputs),
        keep_stack_traces=config.keep_torch_metadata,
        weights=part.stored,
        time_limit_s=time_limit_s,
    )
    # An attempt that fails half-way leaves nothing on the modules for the next.
    with unchanged_attributes(model):
        if name == "torchscript":
            from winml.modelkit.export.torchscript.capturing import capture_torchscript

            return capture_torchscript(model, tensors, prepared.forward, request.tree, options)
        from winml.modelkit.export.dynamo.capturing import capture_dynamo

        return capture_dynamo(model, tensors, prepared.forward, request.tree, options)


def _named_failure(name: ExporterName, error: ExportError | ImportError | AttributeError) -> ExportError:
    """Return why an exporter failed, where a name of a library is missing with that; raise any other error again."""
    missing = missing_name(error) or missing_name(error.__cause__ or error)
    if missing:
        other = "--dynamo" if name == "torchscript" else "--no-dynamo"
        failure = ExportError(
            f"{missing}, which the exporter {_WORDS[name]} needs",
            hint=f"Use {other} or another version of {missing.partition(' ')[0]}. What takes an ONNX file still works.",
        )
        failure.__cause__ = error
        return failure
    if isinstance(error, ExportError):
        return error
    raise error


def _failure_words(name: ExporterName, error: ExportError) -> str:
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
