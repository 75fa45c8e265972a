"""The plan of a build: config, model, and checks of options before the model is loaded.

Plain data, independent of the work of the stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from winml.modelkit.builds.config import (
    AUTO_PRECISION,
    WinMLBuildConfig,
    loader_section,
    quantize_options,
    requested_provider,
    requested_quantization,
    with_default_level,
    with_values,
)
from winml.modelkit.builds.dtypes import refuse_dtypes, requested_quantizations, with_weight_format
from winml.modelkit.builds.evaluated_models import refuse_missing_evaluations, refuse_unfit_limits
from winml.modelkit.builds.layouts.layout import PACKAGE_NAME, Layout, find_layout, refuse_provider
from winml.modelkit.errors import (
    ConfigError,
    ModelPathError,
    UsageError,
    WinMLError,
    opt,
    spell,
    spell_flag,
    spell_options,
)
from winml.modelkit.export.config import DEFAULT_OPSETS, WinMLExportConfig, configured_request
from winml.modelkit.models.checkpoints.quantized.formats import folder_format
from winml.modelkit.models.load_options import declared_options, is_not_default
from winml.modelkit.models.request import ModelRequest, cached_checkpoint, resolve_source
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.optimize.capabilities import ATTENTION_VARIANT, CAPABILITIES
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.ort.execution_providers import find_execution_provider, refuse_dynamic
from winml.modelkit.quantize.calibration.calibration_files import refuse_missing_files
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import MODES
from winml.modelkit.words import command_line

if TYPE_CHECKING:
    from winml.modelkit.builds.manifest_records import Recipe
    from winml.modelkit.compare.proof.records import ProofRequest


def without_compilation() -> str:
    """Return a sentence for hints: the option that skips the compile stage."""
    return f" {opt.no_compile} skips the stage."


@dataclass(frozen=True)
class BuildPlan:
    """One build."""

    config: WinMLBuildConfig
    """Options of every stage; a section that is None skips its stage."""
    request: ModelRequest
    """The model. For an ONNX file, only the name matters."""
    onnx_path: Path | None = None
    """The ONNX file; None for a PyTorch model."""
    switched_off: Mapping[str, str] = field(default_factory=dict)
    """Section of the config → option that removed it."""
    skip_pre_normalization: bool = False
    """Leave an ONNX file unchanged if no optimization is requested."""
    verify: bool = True
    """Compare the result of each stage with its input."""
    with_companions: bool = True
    """Copy config, tokenizer and processor files of the model beside the result."""
    is_deployed: bool = True
    """True if the finished model may be moved out of the folder. A model that is only read in the folder shares the
    data files of its last stage."""
    deploy_only: bool = False
    """Leave only the files to deploy and the manifest in the folder: no files of stages, no sidecar, no build
    config."""
    has_coded_weights: bool = False
    """True if the checkpoint has quantized weights, as its files say when the plan is made."""
    proof: ProofRequest | None = None
    """The proof to make of the finished build; None: none."""
    is_refittable: bool = False
    """Store the traced graphs without weights and the recipe, for ``winml refit``."""
    refit: Mapping[str, Path] | None = None
    """Part → file with its traced graph, for a refit; None: the model is traced."""
    recipe: Recipe | None = None
    """Recipe for the next refit; None: the request of this build."""
    has_default_level: bool = False
    """True if the optimization level is the default, so that a lower one is used if the result is not exact."""

    @property
    def layout(self) -> Layout:
        """Layout of the folder."""
        return find_layout(self.config.layout)


_PACKING = "packed_projection_fusion"
"""Capability that merges the projections of an attention."""
_RUNTIME_MODES = ("weight-only", "bnb4")
"""Quantization modes that make operators of ONNX Runtime."""


def is_for_onnxruntime(plan: BuildPlan) -> bool:
    """Return True if only ONNX Runtime can run the result of a build, independent of the optimizer."""
    return plan.layout.for_onnxruntime or any(map(_is_of_runtime, requested_quantizations(plan.config)))


def _attention_variant(plan: BuildPlan) -> frozenset[str]:
    """Return the names of the capabilities that choose the variant of a decoder's attention over a cache.

    Programs of the layout decide where padding is. On WebGPU, nodes are fewer if the attention itself rotates queries
    and keys.
    """
    if plan.layout.pads_right:
        return frozenset(ATTENTION_VARIANT)
    is_for_webgpu = plan.layout.for_browsers or requested_provider(plan.config) == "webgpu"
    return frozenset(ATTENTION_VARIANT) - {"right_padding"} if is_for_webgpu else frozenset()


def fused_attention_variant(plan: BuildPlan) -> frozenset[str]:
    """Return the capabilities of :func:`_attention_variant` that the optimization of a build fuses.

    Projections are merged after the quantization of their weights, which is module by module.
    """
    quantized = {name for options in requested_quantizations(plan.config) for name in options.quantized_operators()}
    return _attention_variant(plan) - ({_PACKING} if "MatMul" in quantized else set())


def packs_projections(plan: BuildPlan) -> bool:
    """Return True if a build merges the projections of an attention after it has quantized their weights."""
    provider, section = requested_provider(plan.config), plan.config.optim
    is_supported = provider is None or provider in CAPABILITIES[_PACKING].providers
    is_disabled = section is not None and getattr(section, _PACKING) is False
    return is_supported and not is_disabled and _PACKING in _attention_variant(plan)


def _is_of_runtime(options: QuantizeOptions) -> bool:
    """Return True if a quantization makes operators of ONNX Runtime."""
    modes = {mode for _, mode in options.requested_modes()}
    if options.weight_operators == "standard":
        modes.discard("weight-only")
    return options.kv_cache is not None or not modes.isdisjoint(_RUNTIME_MODES)


def is_onnx_path(model: str) -> bool:
    """Return True if a model name is the path of an ONNX file."""
    return model.strip().lower().endswith(".onnx")


def plan_build(
    config: WinMLBuildConfig,
    request: ModelRequest,
    *,
    switched_off: Mapping[str, str] | None = None,
    skip_pre_normalization: bool = False,
    verify: bool = True,
    with_companions: bool = True,
    deploy_only: bool = False,
    proof: ProofRequest | None = None,
    is_refittable: bool = False,
) -> BuildPlan:
    """Make the plan of a build and refuse contradictory options.

    Args:
        config: Options of every stage. Its ``loader`` is replaced by that of ``request``.
        request: The model.
        switched_off: Section to leave out → option that requests it.
        skip_pre_normalization: See :class:`BuildPlan`.
        verify: See :class:`BuildPlan`; the export section may switch off the comparison of the export alone.
        with_companions: See :class:`BuildPlan`.
        deploy_only: See :class:`BuildPlan`.
        proof: See :class:`BuildPlan`.
        is_refittable: See :class:`BuildPlan`.

    Raises:
        ModelPathError: an ONNX file that does not exist.
        UsageError: an option of a PyTorch model with an ONNX file, a precision that its mode does not support, an
            option of quantization that its mode does not read, or missing calibration data.
        ConfigError: the config must be complete (``auto`` false) and is not, or lacks the export section that the model
            needs.
    """
    sections_off = dict(switched_off or {})
    if config.layout == PACKAGE_NAME:
        raise UsageError(
            f"{opt.layout} {PACKAGE_NAME}: a package has several builds, and one is requested",
            hint="Use winml build, or build_package() in Python.",
        )
    config = _apply_provider(config)
    config = config.model_copy(update={"loader": loader_section(request), **dict.fromkeys(sections_off)})
    if config.optim is not None:
        _refuse_optimization(config.optim, None if is_onnx_path(request.model) else config.export)
    refuse_dtypes(config)
    if config.quant is not None and not config.dtypes:
        config = config.model_copy(update={"quant": with_weight_format(config.quant, config)})
    if config.quant is not None:
        options = quantize_options(config.quant)
        if not config.dtypes:
            options.refuse_contradictions()
        refuse_missing_files(options)
        _refuse_idle_limit(config)
    if config.eval is not None:
        refuse_missing_evaluations(config.eval)
        refuse_unfit_limits(config.eval, request.task)
    config = _with_standard_opset(config)
    plan = BuildPlan(
        config,
        request,
        switched_off=sections_off,
        skip_pre_normalization=skip_pre_normalization,
        verify=verify,
        with_companions=with_companions,
        deploy_only=deploy_only,
        proof=proof,
        is_refittable=is_refittable,
    )
    _refuse_runtime_operators(plan)
    if is_onnx_path(request.model):
        path = named_path(request.model.strip())
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "no such file"
            raise ModelPathError(f"{path}: {problem}", hint="Pass the path of an ONNX file.")
        if proof is not None or is_refittable:
            raise UsageError(
                f"{opt.proof if proof is not None else opt.refittable} requires a PyTorch model, and {request.model} "
                "is an ONNX file",
                hint="Build the checkpoint that it was exported from.",
            )
        _refuse_torch_options(request)
        return _with_default_level(replace(plan, config=config.model_copy(update={"export": None}), onnx_path=path))
    if config.export is None:
        raise ConfigError(
            f"export: null skips the export, but {request.model} is not an ONNX file",
            hint="Add the export section, or build from the .onnx file of an earlier export.",
        )
    if not config.auto and config.export.input_tensors is None:
        raise ConfigError(
            "auto is false, but export.input_tensors is missing", hint="winml config writes a complete config."
        )
    for quantization in requested_quantizations(config):
        _refuse_requantization(request, quantization)
    request = configured_request(request, config.export, "export.{}")
    layout = find_layout(config.layout)
    request = replace(request, cross_keys=layout.cross_keys, embedding_of=layout.embedding_of)
    if not verify:
        config = with_values(config, {"export": {"verify": False}})
    is_coded = config.optim is not None and _has_coded_weights(request)
    return _with_default_level(replace(plan, config=config, request=request, has_coded_weights=is_coded))


def _with_default_level(plan: BuildPlan) -> BuildPlan:
    """Return a plan with the default optimization level, unless the request states an optimization.

    Weights that are quantized in memory have no level unless standard operators are requested: ONNX Runtime would read
    them in float from a temporary file.
    """
    section = plan.config.optim
    if section is None or section.states_optimization or plan.skip_pre_normalization:
        return plan
    is_in_memory = stage_in_memory(plan) is not None
    if is_in_memory and section.operators != "standard":
        return plan
    config = plan.config.model_copy(update={"optim": with_default_level(section)})
    return replace(plan, config=config, has_default_level=not is_in_memory)


def stage_in_memory(plan: BuildPlan) -> Literal["quantize", "optimize"] | None:
    """Return the stage that changes the exported graph in memory; ``None`` if the export writes a file."""
    if plan.onnx_path is not None:
        return None
    # Several files are made from one graph in a file.
    options = None if plan.config.dtypes else requested_quantization(plan.config)
    # Activation ranges and cache scales are measured on a file.
    if (
        options is not None
        and not options.needs_ranges
        and options.kv_cache is None
        and all(MODES[mode].is_by_tensor for _, mode in options.requested_modes())
    ):
        return "quantize"
    if plan.config.optim is not None:
        is_fused = plan.layout.for_onnxruntime and not plan.verify
        return "optimize" if is_fused or plan.has_coded_weights else None
    return None


def _has_coded_weights(request: ModelRequest) -> bool:
    """Return True if a checkpoint on this disk has quantized weights; False if it cannot be read."""
    path = named_path(request.model.strip())
    if request.random_weights:
        return False
    if path.suffix.lower() == ".gguf":
        return path.is_file()
    folder = path if path.is_dir() else None
    try:
        if not path.exists():
            folder = cached_checkpoint(resolve_source(request), request)
        return folder is not None and folder_format(folder) is not None
    except WinMLError:
        return False  # the loader reports the error


def _refuse_requantization(request: ModelRequest, options: QuantizeOptions) -> None:
    """Refuse to quantize a checkpoint on this disk with quantized weights.

    Raises:
        UsageError: a precision is requested for such a checkpoint; names the precision and the format.
        CheckpointError: the format of the checkpoint is not supported.
    """
    folder = named_path(request.model.strip())
    weight_format = folder_format(folder) if folder.is_dir() and not request.random_weights else None
    if weight_format is not None and options.modes():
        raise UsageError(
            f"{opt.precision} {options.base.name}: the weights of {request.model} are already quantized "
            f"({weight_format.words})",
            hint="Remove it: the quantized weights of the checkpoint are preserved. For another precision, build the "
            "model that it was quantized from.",
        )


def _apply_provider(config: WinMLBuildConfig) -> WinMLBuildConfig:
    """Return a config with the provider of ``compile.ep`` in each section without a provider.

    Raises:
        UsageError: the provider is unknown, or the layout does not support it.
    """
    section, quant = config.compile, config.quant
    provider = requested_provider(config)
    if section is None or provider is None:
        return config
    refuse_provider(find_layout(config.layout), provider)
    sections = {name: getattr(config, name) for name in ("export", "optim", "quant")}
    values: dict[str, dict[str, Any]] = {
        name: {"ep": provider} for name, stage in sections.items() if stage is not None and stage.ep is None
    }
    if quant is not None and "quant" in values and quant.precision == AUTO_PRECISION and quant.device is None:
        values["quant"]["device"] = section.device  # determines precision ``auto`` only
    return with_values(config, values)


def _refuse_optimization(options: OptimizeOptions, export: WinMLExportConfig | None) -> None:
    """Refuse capabilities that do not apply to the provider or the opset, before the export runs.

    Args:
        options: Options of the optimizer.
        export: Section with the opset of the graph; None for an ONNX file.

    Raises:
        UsageError: a capability does not apply; names its key.
    """
    # The exporter is known later.
    exported = None if export is None else export.opset_version or max(DEFAULT_OPSETS.values())
    opset = options.opset_after(exported)
    list(options.enabled())
    if opset is not None:
        options.refuse_older_opset(opset)


def _with_standard_opset(config: WinMLBuildConfig) -> WinMLBuildConfig:
    """Return a config that exports at the opset of standard operators, if these are requested and no opset is."""
    if config.optim is None or config.export is None or config.optim.operators != "standard":
        return config
    opset = config.export.opset_version or config.optim.opset_after(None)
    return with_values(config, {"export": {"opset_version": opset}})


def _refuse_runtime_operators(plan: BuildPlan) -> None:
    """Refuse standard operators in a build whose result has operators of ONNX Runtime.

    Raises:
        UsageError: the layout or the precision requires such operators.
    """
    section = plan.config.optim
    if section is None or section.operators != "standard" or not is_for_onnxruntime(plan):
        return
    cause, hint = f"{opt.layout} {plan.config.layout}", "Omit one of them."
    if not plan.layout.for_onnxruntime:
        quantization = next(filter(_is_of_runtime, requested_quantizations(plan.config)))
        cause = opt.kv_cache if quantization.kv_cache else f"{opt.precision} {quantization.base.name}"
        hint = "Omit one of them, or use fp16, int4, int8, w8a8 or w8a16, which are written with operators of ONNX."
    raise UsageError(f"{opt.operators} standard: {cause} is written with operators of ONNX Runtime only", hint=hint)


def _refuse_idle_limit(config: WinMLBuildConfig) -> None:
    """Refuse a minimum SQNR in a build that neither quantizes nor compiles.

    Raises:
        UsageError: no stage would apply the limit.
    """
    section = config.quant
    if section is None or section.min_sqnr_db is None or requested_quantizations(config):
        return
    if config.compile is None or idle_compilation(config):
        raise UsageError(
            f"{opt.min_sqnr} {section.min_sqnr_db:g}: this build neither quantizes nor compiles",
            hint=f"Request a precision ({opt.precision}), compile for a provider ({opt.compile} {opt.ep}), or omit it.",
        )


def refuse_missing_compiler(plan: BuildPlan, flags: Collection[str] = ()) -> None:
    """Refuse a build whose compile stage cannot run on this machine, before the export runs.

    Args:
        plan: The build.
        flags: Stated options of the command; messages name config keys for all others.

    Raises:
        UsageError: its execution provider is not installed, cannot compile, or needs fixed sizes.
        StageError: the provider is a plug-in that the installed ONNX Runtime does not load.
    """
    section = plan.config.compile
    if section is None or section.ep is None or idle_compilation(plan.config):
        return
    from winml.modelkit.ort.devices import choose_compiler

    keys = {option: f"compile.{option}" for option in ("ep", "device", "ep_options") if option not in flags}
    with spell_options({**keys, **spell_open_sizes(plan.config)}):
        try:
            choose_compiler(section.ep, section.device, section.ep_options or {})
        except UsageError as error:
            if "ep_options" not in flags:  # an option of this stage only
                error.hint += without_compilation()
            raise
        refuse_dynamic(section.ep, is_dynamic=plan.request.is_dynamic, allow_dynamic=False)


def idle_compilation(config: WinMLBuildConfig) -> str:
    """Return the reason why the compile section of a config compiles nothing; ``""`` if it compiles or is null.

    Raises:
        UsageError: no provider has the name in the config.
    """
    section = config.compile
    if section is None:
        return ""
    if section.ep is None:
        names = [stage.ep for stage in (config.export, config.optim, config.quant) if stage is not None and stage.ep]
        if names:
            return f"compile.ep is not set, though other sections specify {names[0]}"
        return "no execution provider is specified (compile.ep)"
    provider = find_execution_provider(section.ep)
    # A section without compile options only names the target of the result.
    is_merely_for = not section.model_dump(exclude_defaults=True, exclude={"ep", "device", "min_sqnr_db"})
    if is_merely_for and not provider.has_compiled_form:
        return f"{provider.name} compiles when a session is created, and cannot write compiled files"
    return ""


def spell_open_sizes(config: WinMLBuildConfig) -> Mapping[str, str]:
    """Return the spelling of ``allow_dynamic`` for a build with a compiled file that may require fixed sizes.

    `{}` for other builds.
    """
    section = config.compile
    if section is None or section.ep is None or find_execution_provider(section.ep).takes_dynamic:
        return {}
    return {"allow_dynamic": f"{opt.no_compile} {opt.allow_dynamic}"}


def request_record(request: ModelRequest) -> dict[str, object]:
    """Return a request as JSON values; all fields affect the exported graph."""
    record = {request_field.name: getattr(request, request_field.name) for request_field in fields(request)}
    record["dynamic"] = request.dynamic.model_dump(mode="json")
    if request.shape_config is not None:
        record["shape_config"] = request.shape_config.model_dump(mode="json", exclude_none=True)
    if request.input_specs is not None:
        record["input_specs"] = [spec.model_dump(mode="json", exclude_none=True) for spec in request.input_specs]
    del record["specs_origin"]  # the origin does not affect the graph
    return {key: value for key, value in record.items() if value not in (None, ())}


def _refuse_torch_options(request: ModelRequest) -> None:
    """Refuse options of PyTorch models and sizes for an ONNX file; raises UsageError."""
    dynamic = request.dynamic
    option_values = {
        **{
            spell(option.name): is_not_default(option.name, getattr(request, option.name))
            for option in declared_options()
            if not option.is_for_onnx
        },
        opt.input_specs: request.input_specs,
        opt.dynamic_batch: dynamic.batch,
        opt.dynamic_seq_len: dynamic.sequence,
        opt.dynamic_image_size: dynamic.image_size,
        opt.dynamic_axes: dynamic.axes,
    }
    for option, value in option_values.items():
        if value:
            raise UsageError(
                f"{option} does not apply to {request.model}, which is an ONNX file",
                hint="Remove it, or build from the PyTorch model.",
            )
    if request.shape_config is not None:
        refuse_sizes(request.model, "shape_config", request.shape_config.model_dump_json(exclude_none=True))
    if request.batch_size is not None:
        refuse_sizes(request.model, "batch_size", str(request.batch_size))


def refuse_sizes(model: str, option: str, value: str) -> NoReturn:
    """Refuse sizes for a build of an ONNX file: dynamic dimensions stay dynamic.

    Raises:
        UsageError: always.
    """
    command = f"winml export -m {command_line([model])} -o fixed.onnx {spell_flag(option)} {command_line([value])}"
    raise UsageError(
        f"{spell(option)}: a build does not change the sizes of an ONNX file such as {model}",
        hint=f"Fix them first: {command}; then build fixed.onnx.",
    )
