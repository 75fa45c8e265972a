"""Plan and run of ``winml build``: builds a model in a folder, stage by stage; up-to-date results stay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.layouts.layout import LAYOUTS, PACKAGE_NAME
from winml.modelkit.errors import MissingOutputError, UsageError, opt, spell
from winml.modelkit.export.declared_options import (
    ACCEPT_ASSUMPTIONS,
    EXPORTER,
    DynamicFields,
    ExporterChoice,
    ProofFields,
)
from winml.modelkit.fields import DEVICE, OUTPUT, SIZES, VERIFICATION, declare
from winml.modelkit.optimize.capabilities import LEVELS, OPERATOR_SETS
from winml.modelkit.optimize.declared_options import OPERATORS
from winml.modelkit.python_functions import python_function
from winml.modelkit.verbs.named_models import keyword_options, model_request, stated_keywords

if TYPE_CHECKING:
    from winml.modelkit.builds.build import BuildListener
    from winml.modelkit.builds.config import CompileSection, WinMLBuildConfig
    from winml.modelkit.builds.manifest_records import BuildResult
    from winml.modelkit.builds.plan import BuildPlan
    from winml.modelkit.builds.planned_build import PlannedBuild
    from winml.modelkit.models.request import ModelRequest

STAGES = "Stages"

_SWITCHES = {"optimize": "optim", "quant": "quant", "compile": "compile"}
"""Option that skips a stage → section of the config."""

_PLACE = ("ep", "ep_options")
"""Options of the execution provider, also keys of the section ``compile``."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest(ProofFields):
    """Options of ``winml build``."""

    model: ModelRequest
    config: WinMLBuildConfig
    """Options of every stage; the options below override it."""

    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """Folder to build in."""
    use_cache: bool = declare(False, OUTPUT)
    """Build in the cache. It has one folder per model and config."""
    rebuild: bool = declare(False, OUTPUT)
    """Run all stages, including up-to-date ones, and replace the build of another model. Files that were not written by
    a build are preserved."""
    layout: str | None = declare(None, OUTPUT, only=LAYOUTS.names)
    """Arrange the folder for this runtime, which then loads it directly."""
    dtypes: str | None = declare(None, OUTPUT, metavar="NAMES")
    """Files to write with --layout transformers.js, named by dtype. Separated by commas, such as q4,q4f16,fp16;
    one export serves all. The first one is the model that winml itself opens in the folder."""
    variants: str | None = declare(
        None, OUTPUT, metavar="NAMES", default_words="cpu,webgpu,standard, and qnn if it is installed"
    )
    """Variants of a model package, with --layout package: cpu, cpu-int8, cpu-int4, webgpu, cuda, dml, standard
    (operators of ONNX only) and qnn. Separated by commas. Of variants for the same provider, ONNX Runtime
    chooses the first."""
    fixed_sizes: bool = declare(False, SIZES)
    """Fix all sizes, as winml export does. By default, batch and sequence are dynamic as far as the model and the
    provider support it."""
    refittable: bool = declare(False, OUTPUT)
    """Also store the traced graph without weights, with which winml refit puts other weights into the build."""
    deploy_only: bool = declare(False, OUTPUT)
    """Retain only the files to deploy: the model, and the files that runtimes need beside it."""
    tokenizer: bool = declare(True, OUTPUT)
    """Copy the config, tokenizer and processor files beside the model into the folder."""
    optimize: bool = declare(True, STAGES)
    """Run the optimization stage."""
    quant: bool = declare(True, STAGES)
    """Run the quantization stage, if a precision is requested."""
    compile: bool | None = declare(None, STAGES, default_words="if --ep or compile.ep names an execution provider")
    """Run the compilation stage."""
    level: str | None = declare(None, STAGES, only=LEVELS, default_words="full", is_common=True)
    """Optimization level. winml optimize --list shows the optimizations of each level."""
    operators: str | None = declare(
        None, STAGES, text=OPERATORS["text"], only=OPERATOR_SETS, default_words=OPERATORS["default"]
    )
    exporter: ExporterChoice = declare(**EXPORTER, group=STAGES)
    skip_pre_normalization: bool = declare(False, STAGES)
    """Do not normalize an .onnx file if no optimization is requested."""
    ep: str | None = declare(None, DEVICE, metavar="NAME", default_words="any", is_common=True)
    """Target execution provider, such as qnn. If it compiles models, the model is compiled for it."""
    ep_options: tuple[str, ...] = declare((), DEVICE, metavar="KEY=VALUE")
    """Option of the execution provider."""
    share_weights: bool = declare(False, STAGES)
    """Compile a prompt graph and a step into one file that contains their weights once. It opens on a device only, not
    in a simulator."""
    verify: bool = declare(True, VERIFICATION, is_common=True)
    """Verify the outputs of each stage. They are compared with those of its input."""

    accept_assumptions: bool = declare(**ACCEPT_ASSUMPTIONS, group=VERIFICATION)

    @property
    def sections_off(self) -> dict[str, str]:
        """Section of the config → option that leaves it out."""
        return {section: spell(f"no_{name}") for name, section in _SWITCHES.items() if getattr(self, name) is False}


def plan_requested_build(request: BuildRequest) -> PlannedBuild:
    """Plan a build: stages, up-to-date results and files. Writes nothing, fetches nothing.

    Raises:
        UsageError: an option, a path or the config is wrong, or the folder is the model.
        OutputExistsError: the folder contains a file that no build wrote.
        ConfigError: the config lacks a section that the model needs.
        InputError: a file of the model is missing or invalid.
        WriteError: the folder cannot be written.
    """
    if request.output is None and not request.use_cache:
        raise MissingOutputError("no output folder is specified", hint=f"Use -o FOLDER or {opt.use_cache}.")
    if request.output is not None and request.use_cache:
        raise UsageError(f"-o and {opt.use_cache} cannot be combined", hint="Omit one of them.")
    plan = make_plan(request)
    from winml.modelkit.builds.planned_build import planned_build

    return planned_build(plan, request.output, rebuild=request.rebuild)


def refuse_unloadable(plan: PlannedBuild) -> None:
    """Apply the checks of a build before weights are loaded, for a dry run.

    A factory is not called. Missing small files of a Hub id are fetched.

    Raises:
        WinMLError: see :func:`run_planned_build`.
    """
    from winml.modelkit.models.request import CHECKPOINT_KINDS, resolve_source

    config = plan.build.config
    if not plan.is_exported or config.export is None:
        return
    if resolve_source(plan.build.request).kind not in CHECKPOINT_KINDS:
        return
    from winml.modelkit.builds.stages import refuse_resolved
    from winml.modelkit.export.loading import resolve_for_export

    resolve_for_export(plan.build.request, config.export, partial(refuse_resolved, plan.build))


def run_planned_build(plan: PlannedBuild, request: BuildRequest, listener: BuildListener) -> BuildResult:
    """Recover files of killed commands, then build.

    Args:
        plan: The plan.
        request: The request of the plan.
        listener: Receives the progress.

    Raises:
        WinMLError: see :func:`winml.modelkit.builds.build.run_build`.
    """
    from winml.modelkit.builds.build_model import build_plan

    plan.recover()
    return build_plan(plan.build, request.output, rebuild=request.rebuild, listener=listener)


@python_function(shape_config="sizes")
def build_model(
    model: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    listener: BuildListener | None = None,
    **options: Any,
) -> BuildResult:
    """Build a model: export, optimize, quantize and compile it into one folder (``winml build``).

    Results of earlier builds in the folder are reused stage by stage while model, options and libraries are the same.

    Args:
        model: Hub id, checkpoint, ``file.py:function`` or an ONNX file; None: the model in the ``loader`` section of
            the config.
        output: Folder to build in; None: a folder of the cache, one for each model and config.
        config: Options of every stage: a config, its JSON object, or the path of a file with one.
        listener: Receives the progress.
        **options: Options of ``winml build``, which override the config: ``precision``, ``level``, ``ep``, ``exclude``,
            ``rebuild``, ``verify`` and so on; of a checkpoint also ``task``, ``sizes``, ``dynamic_batch`` and the other
            options of loading.

    Returns:
        The files of the build, its stages, and the evaluation if the config has one.

    Raises:
        ConfigError: an option is unknown or of the wrong kind.
        UsageError: the request is wrong, or the folder contains files that no build wrote.
        InputError: model files, the Hub or the user's code failed.
        StageError: a stage failed; finished stages are kept for the next build.
        VerificationError: the outputs of a stage differ from those of its input.

    Example:
        ```python
        built = build_model("checkpoint", "built", level="full", precision="int8")
        ```
    """
    from winml.modelkit.builds.build import BuildListener

    listener = listener or BuildListener()
    request = python_request("build_model", model, output, config, listener, options)
    return run_planned_build(plan_requested_build(request), request, listener)


def python_request(
    function: str,
    model: str | os.PathLike[str] | None,
    output: str | os.PathLike[str] | None,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None,
    listener: BuildListener,
    options: Mapping[str, Any],
) -> BuildRequest:
    """Return the request of a call from Python.

    Args:
        function: Name of the called function, for messages.
        model: The model; None: that of the config.
        output: Folder to build in; None: a folder of the cache.
        config: Options of every stage.
        listener: Receives notes on the config.
        options: Keywords of the call.

    Raises:
        ConfigError: an option is unknown or of the wrong kind.
        UsageError: no model is named.
    """
    from winml.modelkit.builds.build_model import to_build_config
    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.options import parse_options
    from winml.modelkit.quantize.declared_options import QuantizeFields

    parsed = to_build_config(config, listener)
    loader = {} if parsed.loader is None else parsed.loader.model_dump(exclude_defaults=True)
    named = model or loader.pop("model", None)
    if named is None:
        raise UsageError("no model is specified", hint="Pass one, or a config whose loader section names a model.")
    if not {"task", "model_class"}.isdisjoint(options):  # each decides the class
        loader = {name: value for name, value in loader.items() if name not in ("task", "model_class")}
    options = {**{name: value for name, value in loader.items() if name != "model"}, **options}
    if "with_companions" in options:
        options["tokenizer"] = options.pop("with_companions")
    stages = {name: options.pop(name) for name in stated_keywords(BuildRequest, options)}
    if stages.get("proof_inputs") is not None:
        stages["proof_inputs"] = Path(stages["proof_inputs"])
    quant = {name: options.pop(name) for name in stated_keywords(QuantizeFields, options)}
    if quant:
        base = {} if parsed.quant is None else parsed.quant.model_dump(mode="json", exclude_unset=True)
        section = parse_options(QuantSection, {**base, **quant}, function)
        parsed = parsed.model_copy(update={"quant": section})
    return BuildRequest(
        model=model_request(keyword_options(function, named, options, DynamicFields, dynamic_axes=())),
        config=parsed,
        output=None if output is None else Path(output),
        use_cache=output is None,
        **stages,
    )


def make_plan(request: BuildRequest) -> BuildPlan:
    """Return the build plan; refuses errors that names and paths show, without importing a model library."""
    from winml.modelkit.builds.folder import refuse_input_as_output
    from winml.modelkit.builds.plan import is_onnx_path, plan_build, refuse_missing_compiler
    from winml.modelkit.models.request import resolve_source
    from winml.modelkit.ort.execution_providers import refuse_dynamic

    if request.refittable and request.deploy_only:
        raise UsageError(
            f"{opt.refittable} and {opt.deploy_only} cannot be combined: the graph is not deployed",
            hint="Omit one of them; the manifest lists the files to deploy.",
        )
    if request.variants is not None:
        raise UsageError(
            f"{opt.variants} {request.variants} requires {opt.layout} {PACKAGE_NAME}",
            hint="Add it, or omit the option.",
        )
    config = _apply_options(request)
    source = None if is_onnx_path(request.model.model) else resolve_source(request.model).path
    if request.output is not None:  # file names are checked by the plan
        refuse_input_as_output(request.output, [] if source is None else [source], ())
    plan = plan_build(
        config,
        request.model,
        switched_off=request.sections_off,
        skip_pre_normalization=request.skip_pre_normalization,
        verify=request.verify,
        with_companions=request.tokenizer,
        deploy_only=request.deploy_only,
        proof=request.proof_request(request.model.seed),
        is_refittable=request.refittable,
    )
    refuse_missing_compiler(plan, [option for option in _PLACE if getattr(request, option)])
    if (export := plan.config.export) is not None:
        refuse_dynamic(export.ep, is_dynamic=plan.request.is_dynamic, allow_dynamic=export.allow_dynamic)
    if request.output is None:
        from winml.modelkit.builds.build_model import refuse_deploying

        refuse_deploying(plan)
    return plan


def _apply_options(request: BuildRequest) -> WinMLBuildConfig:
    """Return the config, overridden by the stage options of the request.

    Raises:
        UsageError: an option applies to a stage that is left out.
    """
    from winml.modelkit.builds.config import with_values
    from winml.modelkit.builds.open_sizes import with_fixed_sizes
    from winml.modelkit.ort.execution_providers import find_execution_provider, parse_ep_options, short_name

    config = request.config
    sections: dict[str, dict[str, Any]] = {"export": {}, "optim": {}, "quant": {}, "compile": {}}
    for name in ("level", "operators"):
        if (value := getattr(request, name)) is not None:
            if "optim" in request.sections_off:
                raise UsageError(f"{spell(name)} has no effect with {opt.no_optimize}", hint="Omit one of them.")
            sections["optim"][name] = value
    if request.ep is not None:
        provider = short_name(find_execution_provider(request.ep).name)
        for section_values in sections.values():
            section_values["ep"] = provider
    if request.ep_options:
        sections["compile"]["ep_options"] = parse_ep_options(request.ep_options)
    if request.exporter != "auto":
        sections["export"]["exporter"] = request.exporter
    if request.accept_assumptions:
        sections["export"]["accept_assumptions"] = True
    values: dict[str, Any] = {} if request.layout is None else {"layout": request.layout}
    if request.fixed_sizes:
        _refuse_fixed_sizes(request)
        config = with_fixed_sizes(config)
    if request.dtypes is not None:
        values["dtypes"] = names = tuple(name for text in request.dtypes.split(",") if (name := text.strip()))
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{opt.dtypes} {request.dtypes}: {repeated[0]} is named twice", hint="Name it once.")
        if not names:
            raise UsageError(f"{opt.dtypes} {request.dtypes!r}: no dtype is named", hint="Use q8, for example.")
    if request.share_weights:
        sections["compile"]["share_weights"] = True
    if request.compile or request.ep_options or request.share_weights:
        values["compile"] = _requested_compilation(request)
    return with_values(config.model_copy(update=values), sections)


def _refuse_fixed_sizes(request: BuildRequest) -> None:
    """Refuse ``fixed_sizes`` for an ONNX file, and beside dynamic dimensions.

    Raises:
        UsageError: the option contradicts the request.
    """
    from winml.modelkit.builds.plan import is_onnx_path
    from winml.modelkit.export.config import configured_request

    name, export = request.model.model, request.config.export
    if is_onnx_path(name):
        raise UsageError(
            f"{opt.fixed_sizes} does not apply to {name}, which is an ONNX file",
            hint=f"Fix its dynamic dimensions first: winml export -m {name} -o fixed.onnx "
            f"{opt.shape_config} '{{\"batch_size\": 1}}'; then build fixed.onnx.",
        )
    if export is not None and configured_request(request.model, export).is_dynamic:
        raise UsageError(f"{opt.fixed_sizes}: dynamic dimensions are requested as well", hint="Omit one of them.")


def _requested_compilation(request: BuildRequest) -> CompileSection:
    """Return the ``compile`` section for a requested compilation.

    Raises:
        UsageError: the stage is left out, or no provider that compiles is specified.
    """
    from winml.modelkit.builds.config import CompileSection
    from winml.modelkit.ort.execution_providers import refuse_uncompilable

    flag = spell("compile" if request.compile else "ep_options" if request.ep_options else "share_weights")
    if request.compile is False:
        raise UsageError(f"{flag} has no effect with {opt.no_compile}", hint="Omit one of them.")
    section = request.config.compile or CompileSection()
    ep = request.ep or section.ep
    if ep is None:
        raise UsageError(
            f"{flag}: no execution provider to compile for is specified",
            hint=f"Add {opt.ep}, such as {opt.ep} cpu; winml compile --list lists the providers.",
        )
    refuse_uncompilable(ep)
    return section
