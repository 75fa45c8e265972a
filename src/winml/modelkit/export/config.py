"""Options of the export stage.

A frozen record that validates itself; read from ``--export-config`` JSON, from command options, or passed in Python.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import pydantic

from winml.modelkit.errors import VerificationError, WinMLError, spell
from winml.modelkit.export.declared_options import DynamicFields, ExportFields
from winml.modelkit.onnx.specs import DynamicAxes, DynamicDimension, DynamicRequest, InputTensorSpec, OutputTensorSpec
from winml.modelkit.options import Options
from winml.modelkit.ort.opsets import refuse_unsupported_opset
from winml.modelkit.tags.torch_modules import normalized_torch_modules

ExporterName = Literal["torchscript", "dynamo"]

_SpecT = TypeVar("_SpecT", InputTensorSpec, OutputTensorSpec)

DYNAMO_OPSET = 18
"""Specified: the oldest opset torch's dynamo exporter has operators for."""
NEWEST_CAPTURED_OPSET = 20
"""Specified: the newest opset torch's TorchScript exporter writes. Chosen for dynamo: from 23 on, it writes fused
operators, which later stages do not read. Captured graphs are converted to newer opsets."""
DEFAULT_OPSETS: Mapping[ExporterName, int] = {"torchscript": 17, "dynamo": DYNAMO_OPSET}
"""Chosen: the first with LayerNormalization, and the oldest that needs no conversion."""

SECTION_OPTIONS = ("input_specs", "dynamic_batch", "dynamic_seq_len", "dynamic_image_size", "dynamic_axes", "ep")
"""Options of the command that keys of the section state as well."""

if TYPE_CHECKING:
    from winml.modelkit.models.parts import ModelPart
    from winml.modelkit.models.request import ModelRequest


class WinMLExportConfig(ExportFields, DynamicFields, Options):
    """Options of the export stage. All have defaults; unknown keys are errors."""

    input_tensors: tuple[InputTensorSpec, ...] | None = None
    """The graph inputs, in order; a name in a shape makes that dimension dynamic. None: decided from the model."""
    output_tensors: tuple[OutputTensorSpec, ...] | None = None
    """Names of the graph outputs, in order; their shapes and dtypes must be what the model returns. None: its own."""
    dynamic_axes: DynamicAxes = pydantic.Field(default_factory=dict)
    """Dynamic axes by position, as in torch.onnx.export: input → axis → name, or input → axes."""
    dynamic_dimensions: tuple[DynamicDimension, ...] = ()
    """Bounds and traced sizes of dynamic dimensions; for those not listed, the model determines them."""

    @pydantic.field_validator("torch_module", mode="before")
    @classmethod
    def _normalize_torch_modules(cls, value: object) -> object:
        return normalized_torch_modules(value)

    @pydantic.field_validator("opset_version")
    @classmethod
    def _refuse_unsupported_opset(cls, opset: int | None) -> int | None:
        return refuse_unsupported_opset(opset)

    @pydantic.field_validator("input_tensors", "output_tensors")
    @classmethod
    def _refuse_repeated_names(cls, specs: tuple[_SpecT, ...] | None) -> tuple[_SpecT, ...] | None:
        names = [spec.name for spec in specs or ()]
        if specs is not None and not specs:
            raise ValueError("describe at least one tensor")
        if len(set(names)) < len(names):
            raise ValueError("each name stands for one tensor")
        return specs

    def opset_for(self, exporter: ExporterName) -> int:
        """Return the opset to export with: the requested one, else the default of the exporter."""
        return self.opset_version or DEFAULT_OPSETS[exporter]

    @property
    def dynamic(self) -> DynamicRequest:
        """The dimensions to leave open, besides those named in ``input_tensors``."""
        return DynamicRequest(
            batch=self.dynamic_batch,
            sequence=self.dynamic_sequence,
            image_size=self.dynamic_image_size,
            axes=self.dynamic_axes,
            dimensions=self.dynamic_dimensions,
        ).requested_by("{}")


def configured_request(request: ModelRequest, config: WinMLExportConfig, origin: str = "{}") -> ModelRequest:
    """Return a request with the inputs and the dynamic dimensions of an export config.

    Args:
        request: The model; its own inputs and axis names take precedence.
        config: Options of the export.
        origin: Place of a key of the config, for messages, with ``{}`` for the key.
    """
    request = replace(request, dynamic=request.dynamic.joined(config.dynamic.requested_by(origin)))
    if config.input_tensors is None or request.input_specs is not None:
        return request
    return replace(
        request,
        input_specs=config.input_tensors,
        specs_origin="input_specs" if origin == "{}" else origin.format("input_tensors"),
    )


EXPORTER_ORDER: tuple[ExporterName, ExporterName] = ("torchscript", "dynamo")
"""Chosen: the first exporter of ``auto``, and the exporter tried if the first fails. TorchScript is faster if it can
trace the model; dynamo exports most other models (docs/decisions/0003-torchscript-first.md).
"""
EXPORTER_WORDS: Mapping[ExporterName, str] = {"torchscript": "TorchScript", "dynamo": "dynamo"}

SECOND_TRY_S = 120.0
"""Time limit of the second choice. Chosen: ten times the time for a text encoder of 12 layers; with dynamic sizes that
a forward divides, the export can take hours.
"""


@dataclass(frozen=True)
class ExporterUse:
    """The exporter in use, and the reason for it."""

    name: ExporterName
    reason: str = ""
    """Reason in a few words; ``""`` for the default exporter."""
    time_limit_s: float | None = None
    """Maximum time; None: unlimited."""


def first_choice(config: WinMLExportConfig) -> ExporterUse:
    """Return the exporter to try first."""
    return ExporterUse(EXPORTER_ORDER[0]) if config.exporter == "auto" else ExporterUse(config.exporter, "asked for")


def second_choice(config: WinMLExportConfig, current: ExporterUse, error: VerificationError) -> ExporterUse | None:
    """Return the exporter to try after a failed verification; `None` without a further exporter.

    An exporter may write a wrong graph without an error; the second exporter converts operators by different code.

    Args:
        config: Options of the export.
        current: The exporter of the graph.
        error: The failed verification.
    """
    first_exporter, second_exporter = EXPORTER_ORDER
    if config.exporter != "auto" or current.name != first_exporter or not error.is_graph_wrong:
        return None
    reason = error.message.removeprefix("cannot verify: ").partition(". ")[0]
    if not error.is_normalization_wrong:
        reason = f"the graph {EXPORTER_WORDS[first_exporter]} made is wrong: {reason}"
    return ExporterUse(second_exporter, reason, SECOND_TRY_S)


def suggest_other_exporter(config: WinMLExportConfig, part: ModelPart, error: WinMLError) -> None:
    """Extend the hint of an exporter's failure, in place, by the exporter that is tried if none is requested."""
    if config.exporter != "auto" and part.open_grids is None:
        other = next(name for name in EXPORTER_ORDER if name != config.exporter)
        option = spell("dynamo" if config.exporter == "dynamo" else "no_dynamo")
        error.hint = f"Without {option}, the {EXPORTER_WORDS[other]} exporter is tried too. {error.hint}"
