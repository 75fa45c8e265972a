"""Plan and run of ``winml config``: decides the build config of a model without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.fields import DEVICE, MODEL, OUTPUT, QUANTIZATION, declare
from winml.modelkit.quantize.precisions import PRECISIONS
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_file

if TYPE_CHECKING:
    from winml.modelkit.builds.config import QuantSection, WinMLBuildConfig
    from winml.modelkit.models.request import ModelRequest


@dataclass(frozen=True, kw_only=True)
class ConfigRequest:
    """Options of ``winml config`` for the config of a model."""

    model: ModelRequest
    """The model; without a name if ``model_type`` replaces it."""
    config: WinMLBuildConfig
    """The initial config; the options below override it."""

    model_type: str | None = declare(None, MODEL, metavar="TYPE", is_common=True)
    """Architecture, such as bert, instead of a model."""
    device: Literal["cpu", "gpu", "npu"] | None = declare(None, DEVICE, short="-d", is_common=True)
    """Kind of device to run on."""
    ep: str | None = declare(None, DEVICE, metavar="NAME", is_common=True)
    """Execution provider to run on, such as qnn."""
    precision: str | None = declare(
        None,
        QUANTIZATION,
        text=f"Precision, or auto for the usual one of the device. Values: {', '.join(PRECISIONS)}, auto.",
        short="-p",
        metavar="NAME",
        is_common=True,
    )
    no_quant: bool = declare(False, QUANTIZATION, is_common=True)
    """Do not quantize."""
    no_compile: bool = declare(False, DEVICE, is_common=True)
    """Do not compile."""
    output: Path | None = declare(None, OUTPUT, short="-o", default_words="stdout", is_common=True)
    """JSON file to write."""
    overwrite: bool = declare(False, OUTPUT)
    """Overwrite an existing file."""


@dataclass(frozen=True, kw_only=True)
class ConfigPlan(Plan):
    """Plan of ``winml config``."""

    request: ConfigRequest
    config: WinMLBuildConfig
    """The config with the options of the request, before the model determines missing values."""


def plan_config(request: ConfigRequest) -> ConfigPlan:
    """Plan ``winml config``. Imports no model library, writes nothing and fetches nothing.

    Raises:
        UsageError: options contradict each other, a path is wrong, or the output exists.
        ConfigError: the value of an option is invalid.
        InputError: no model exists at the path.
        WriteError: the output cannot be written.
    """
    from winml.modelkit.onnx.files.output_files import refuse_existing, refuse_inputs

    config, notes = _apply_options(request)
    reads = _check_model_files(request, config)
    outputs = [] if request.output is None else [request.output]
    if outputs:
        refuse_inputs(outputs, reads)
        refuse_existing(outputs, overwrite=request.overwrite)
    model = request.model_type or request.model.model
    return ConfigPlan(
        verb="config",
        reads=tuple(path for path in reads if path.is_file()),
        writes=tuple(map(planned_file, outputs)),
        steps=(
            PlannedStep("deciding", f"{model}: task, class, inputs and opset, as in winml export"),
            PlannedStep("writing", str(request.output or "stdout")),
        ),
        notes=notes,
        interrupted=interruptions_beside(outputs),
        request=request,
        config=config,
    )


def run_config(plan: ConfigPlan) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Recover files of killed commands, then decide the config; the caller writes it.

    Returns:
        The config, and notes on decided values, without the notes of the plan.

    Raises:
        WinMLError: the model cannot be read or exported.
    """
    from winml.modelkit.builds.plan import BuildPlan, is_onnx_path, plan_build

    plan.recover()
    request = plan.request
    if is_onnx_path(request.model.model):
        from winml.modelkit.builds.stages import without_idle_stages

        # The path alone decides: the file is not read.
        return without_idle_stages(plan_build(plan.config, request.model).config)
    from winml.modelkit.builds.config_resolution import resolve_build_config
    from winml.modelkit.builds.open_sizes import make_most_open

    def resolve(sized: BuildPlan) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
        return resolve_build_config(sized.config, sized.request, model_type=request.model_type)

    return make_most_open(BuildPlan(plan.config, request.model), resolve)[0]


def _check_model_files(request: ConfigRequest, config: WinMLBuildConfig) -> tuple[Path, ...]:
    """Return the files of the model; refuses errors that names and paths show. `()` for a model type."""
    from winml.modelkit.builds.plan import is_onnx_path, plan_build
    from winml.modelkit.models.request import resolve_source
    from winml.modelkit.ort.execution_providers import refuse_dynamic

    model, export = request.model, config.export
    if is_onnx_path(model.model):
        onnx_path = plan_build(config, model).onnx_path
        return () if onnx_path is None else (onnx_path,)
    is_dynamic = model.is_dynamic or (export is not None and not export.dynamic.is_empty)
    refuse_dynamic(request.ep, is_dynamic=is_dynamic, allow_dynamic=export is not None and export.allow_dynamic)
    return () if request.model_type else resolve_source(model, needs_weights=False).files


def _apply_options(request: ConfigRequest) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Return the config, overridden by the options of the request, and notes.

    Raises:
        UsageError: an option applies to a skipped stage.
        ConfigError: the value of an option is invalid.
    """
    from winml.modelkit.builds.config import parse_build_config
    from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS

    target_options = {"device": request.device, "ep": request.ep}
    target = {key: value for key, value in target_options.items() if value is not None}
    precision = {} if request.precision is None else {"precision": request.precision}
    if precision and request.no_quant:
        raise UsageError(f"{opt.precision} has no effect with {opt.no_quant}", hint="Omit one of them.")
    if target and request.no_quant and request.no_compile:
        raise UsageError(
            f"{spell(next(iter(target)))} has no effect with {opt.no_quant} and {opt.no_compile}",
            hint="Omit it.",
        )
    section_values = {"quant": {**precision, **target}, "compile": target}
    parsed = parse_build_config({name: values for name, values in section_values.items() if values}, "options")[0]
    sections: dict[str, Any] = {}
    for name, values in section_values.items():
        if getattr(request, f"no_{name}"):
            sections[name] = None
        # A device or provider alone does not add a quantization that the config omits.
        elif values and not (name == "quant" and request.config.quant is None and not precision):
            section = getattr(request.config, name) or getattr(parsed, name)
            sections[name] = section.model_copy(update=values)
    export = request.config.export
    is_dynamic = request.model.is_dynamic or (export is not None and not export.dynamic.is_empty)
    notes: tuple[str, ...] = ()
    if request.device == "npu" and request.ep is None and is_dynamic:
        fixed = ", ".join(name for name, provider in EXECUTION_PROVIDERS.items() if not provider.takes_dynamic)
        notes = (
            f"{opt.device} npu with dynamic dimensions: {fixed} require fixed sizes. Name the provider with {opt.ep}.",
        )
    if sections.get("quant") is not None:
        sections["quant"], precision_notes = _resolve_precision(sections["quant"])
        notes = (*notes, *precision_notes)
    return request.config.model_copy(update=sections), notes


def _resolve_precision(section: QuantSection) -> tuple[QuantSection, tuple[str, ...]]:
    """Return a section with the precision of the device in place of a missing precision, and a note on ``auto``."""
    from winml.modelkit.builds.config import AUTO_PRECISION, auto_words, quantize_options, with_precision

    if section.precision is None:
        section = with_precision(section, AUTO_PRECISION)
    auto_note = auto_words(section)
    return with_precision(section, quantize_options(section).base.name), (auto_note,) if auto_note else ()
