"""Captures a part as a graph: the exporters are tried in turn until one succeeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from winml.modelkit.compare.verification.reference_run import (
    PreparedPart,
    copies_for,
    refuse_verification_beyond_memory,
    with_values,
)
from winml.modelkit.compare.verification.varied_sizes import axes_of
from winml.modelkit.errors import ExportError, missing_name
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.config import (
    EXPORTER_ORDER,
    EXPORTER_WORDS,
    ExporterName,
    ExporterUse,
    WinMLExportConfig,
)
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.state_restoration import unchanged_attributes
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.tags.tree import ModuleTree

_WEIGHTS_LOADED = "The weights were loaded: the export without weights failed."


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
    errors: dict[ExporterName, ExportError] = {}
    for name, has_values in _attempts(prepared.part, config, use):
        if has_values and (errors[name].operator is not None or (name == "dynamo" and not errors[name].is_by_value)):
            # No value gives the operator a form, and dynamo asks for values only where the forward decides by them.
            continue
        try:
            time_limit_s = use.time_limit_s if name == use.name else None
            capture = _capture_with(name, prepared, tensors, tree, config, time_limit_s, has_values=has_values)
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
    """Return the exporters to try in turn, each with whether it may ask for values: of weights and example inputs."""
    attempts: list[tuple[ExporterName, bool]] = [(use.name, False)]
    if config.exporter == "auto" and part.open_grids is None:
        attempts.append((next(name for name in EXPORTER_ORDER if name != use.name), False))
    # Last, since they take the most memory: traces that need values.
    if part.stored is not None and ("torchscript", False) in attempts:
        attempts.append(("torchscript", True))
    if ("dynamo", False) in attempts:
        attempts.append(("dynamo", True))
    return attempts


def _capture_with(
    name: ExporterName,
    prepared: PreparedPart,
    tensors: Mapping[str, torch.Tensor],
    tree: ModuleTree,
    config: WinMLExportConfig,
    time_limit_s: float | None,
    *,
    has_values: bool,
) -> Capture:
    part, model = prepared.part, prepared.model
    if has_values and part.stored is not None:
        if config.verify:
            refuse_verification_beyond_memory(model, available_bytes())
        with with_values(prepared) as weighted:
            capture = _capture_with(name, weighted, tensors, tree, config, time_limit_s, has_values=True)
        return replace(capture, notes=(*capture.notes, _WEIGHTS_LOADED))
    tensors = copies_for(model, tensors)
    options = CaptureOptions(
        opset_version=config.opset_for(name),
        dynamic_axes=axes_of(part.inputs),
        keep_stack_traces=config.keep_torch_metadata,
        weights=part.stored,
        time_limit_s=time_limit_s,
        takes_example_values=has_values,
    )
    # An attempt that fails half-way leaves nothing on the modules for the next.
    with unchanged_attributes(model):
        if name == "torchscript":
            from winml.modelkit.export.torchscript.capturing import capture_torchscript

            return capture_torchscript(model, tensors, prepared.forward, tree, options)
        from winml.modelkit.export.dynamo.capturing import capture_dynamo

        return capture_dynamo(model, tensors, prepared.forward, tree, options)


def _named_failure(name: ExporterName, error: ExportError | ImportError | AttributeError) -> ExportError:
    """Return why an exporter failed, where a name of a library is missing with that; raise any other error again."""
    missing = missing_name(error) or missing_name(error.__cause__ or error)
    if missing:
        other = "--dynamo" if name == "torchscript" else "--no-dynamo"
        failure = ExportError(
            f"{missing}, which the exporter {EXPORTER_WORDS[name]} needs",
            hint=f"Use {other} or a different version of {missing.partition(' ')[0]}. Commands that take an ONNX "
            "file still work.",
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
        return f"{error.operator}{place} has no {EXPORTER_WORDS[name]} form"
    return f"{EXPORTER_WORDS[name]}: {error.message}"


def _both_failed(first: ExportError, second: ExportError) -> ExportError:
    error = ExportError(
        f"neither exporter can make a graph of this model: {first.message}; {second.message}",
        # What is said of an operator TorchScript lacks is to let dynamo try.
        hint=second.hint if first.operator else first.hint,
        operator=first.operator,
        module=first.module,
    )
    error.frozen = (*first.frozen, *second.frozen)
    return error
