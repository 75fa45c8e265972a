"""Build of a model from Python or by the command.

The folder of the build is chosen here: a folder of the cache or the caller's. ``build.py`` runs the stages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.build import BuildCache, BuildListener, identify_plan, run_build
from winml.modelkit.builds.cache import CACHE_SPELLING, digest
from winml.modelkit.builds.config import (
    WinMLBuildConfig,
    check_load_keywords,
    parse_build_config,
    with_precision,
)
from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.manifest_records import TOOL_NAME, BuildResult
from winml.modelkit.builds.open_sizes import make_most_open, with_fixed_sizes
from winml.modelkit.builds.plan import BuildPlan, plan_build, request_record
from winml.modelkit.builds.stage_walk import StageStore
from winml.modelkit.builds.stages import STAGES
from winml.modelkit.errors import UsageError, opt, spell_keyword, spell_options
from winml.modelkit.export.config import SECTION_OPTIONS, WinMLExportConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.files.named_paths import cache_root, pause_recording
from winml.modelkit.options import read_json
from winml.modelkit.ort.execution_providers import find_execution_provider
from winml.modelkit.progress import OnStep, StepEvent
from winml.modelkit.python_functions import python_function
from winml.modelkit.version import __version__, library_versions

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel

_SLUG_LENGTH = 40
"""Characters of the model name in the name of a cache folder; the digest after it distinguishes entries."""


@python_function()
def build_hf_model(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    precision: str | None = None,
    verify: bool = True,
    rebuild: bool = False,
    with_companions: bool = True,
    deploy_only: bool = False,
    listener: BuildListener = BuildListener(),  # noqa: B008 - frozen
    **load: Any,
) -> BuildResult:
    """Build a PyTorch or Hugging Face model: export, optimize, quantize and compile it, as the config states.

    Results of earlier builds in the folder are reused stage by stage while model, options and libraries are the same.

    Args:
        model: Hub id, checkpoint folder, config.json, ``file.py:function`` or ``package.module:function``.
        output: Folder to build in; None: a folder of the cache, one for each model and config.
        config: Options of every stage: a config, its JSON object, or the path of a file with one.
        precision: Precision of the result, such as ``int8``; overrides the config.
        verify: Compare the result of each stage with its input.
        rebuild: Run every stage, also those that are up to date.
        with_companions: Copy config, tokenizer and processor files of the checkpoint beside the result.
        deploy_only: Keep only the files to deploy and the manifest, which lists them in ``deploy``.
        listener: Receives the progress.
        **load: How the model is loaded, with the names of the command's options, such as ``task`` or ``dtype``; all of
            them are fields of :class:`~winml.modelkit.models.load_options.LoadOptions`.

    Raises:
        ConfigError: an unknown keyword, or a value of the wrong kind.
        UsageError: the request is wrong, or the folder contains files that no build wrote.
        InputError: model files, the Hub or the user's code failed.
        StageError: a stage failed; finished stages are kept for the next build.
        VerificationError: the outputs of a stage's result differ from those of its input.
    """
    check_load_keywords(load, "build_hf_model")
    build_config = to_build_config(config, listener, precision=precision)
    with spell_options(_section_keys(build_config)):
        plan = plan_build(
            build_config,
            ModelRequest(os.fspath(model) if isinstance(model, os.PathLike) else model, **load),
            verify=verify,
            with_companions=with_companions,
            deploy_only=deploy_only,
        )
        return build_plan(plan, output, rebuild=rebuild, listener=listener)


@python_function()
def build_onnx_model(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    precision: str | None = None,
    verify: bool = True,
    rebuild: bool = False,
    deploy_only: bool = False,
    listener: BuildListener = BuildListener(),  # noqa: B008 - frozen
) -> BuildResult:
    """Build from an ONNX file, of any origin; see :func:`build_hf_model` for the arguments and errors."""
    request = ModelRequest(model=os.fspath(model))
    if Path(request.model).suffix.lower() != ".onnx":
        raise UsageError(f"{request.model}: does not end in .onnx", hint="build_hf_model builds PyTorch models.")
    build_config = to_build_config(config, listener, precision=precision)
    with spell_options(_section_keys(build_config)):
        plan = plan_build(build_config, request, verify=verify, deploy_only=deploy_only)
        return build_plan(plan, output, rebuild=rebuild, listener=listener)


def build_in_cache(
    plan: BuildPlan,
    *,
    rebuild: bool = False,
    listener: BuildListener = BuildListener(),  # noqa: B008 - frozen
) -> BuildResult:
    """Build in the cache folder of this model, config and library versions.

    Raises:
        UsageError: the plan keeps only the files to deploy.
        WinMLError: see :func:`~winml.modelkit.builds.build.run_build`.
    """
    refuse_deploying(plan)
    identity = identify_plan(plan)
    folder = cache_folder(plan, identity)
    cache = BuildCache(identity, StageStore(cache_root()))
    with pause_recording(), spell_options(CACHE_SPELLING):
        return run_build(plan, folder, cache=cache, rebuild=rebuild, listener=listener)


def refuse_deploying(plan: BuildPlan) -> None:
    """Refuse ``deploy_only`` for a build in the cache.

    Raises:
        UsageError: the plan keeps only the files to deploy.
    """
    if plan.deploy_only:
        raise UsageError(
            f"{opt.deploy_only} removes the results of stages, which the cache stores for other builds",
            hint=f"Build in a separate folder: {opt.output_folder}.",
        )


def cache_folder(plan: BuildPlan, identity: ModelIdentity | None) -> Path:
    """Return the cache folder of this model, config and library versions.

    Args:
        plan: The build.
        identity: Identity of the model; None if unknown yet, and the name has a ``*`` for the digest.
    """
    key = "*" if identity is None else cache_key(plan, identity)[:16]
    return cache_root() / "builds" / f"{_name_slug(plan.request.model)}-{key}"


def exported_file(model: NamedModel, on_step: OnStep | None = None) -> Path:
    """Return the ONNX file of a found model; a checkpoint is exported into the cache if necessary."""
    if model.path is not None:
        return model.path
    assert model.request is not None
    return exported_model(model.request, model.export or WinMLExportConfig(), on_step)


def exported_model(request: ModelRequest, config: WinMLExportConfig, on_step: OnStep | None = None) -> Path:
    """Return the ONNX file of a model, exported into the cache if missing.

    The cache key covers the content of the model's files, the request, the config, and the versions of this tool and
    the libraries. The model of a user's factory is exported each time.

    Args:
        request: The model.
        config: Options of the export.
        on_step: Called when a step of an export starts and when it ends.

    Raises:
        UsageError: the request is wrong.
        InputError: model files, the Hub or the user's code failed.
        ExportError: the model cannot be exported.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ.
        WriteError: the cache cannot be written to.
    """
    from winml.modelkit.onnx.bundle import only_part  # imports onnx

    export_only = WinMLBuildConfig(export=config, optim=None, quant=None, compile=None)
    plan = replace(plan_build(export_only, request), is_deployed=False)
    result = build_in_cache(plan, listener=BuildListener(on_step=on_step))
    record = only_part(result.manifest.parts).stage("export")
    assert record is not None  # the stage ran, or its result came from the cache
    return result.folder / record.files[0].name


def cache_key(plan: BuildPlan, identity: ModelIdentity) -> str:
    """Return a digest of everything that the result of a build in the cache depends on."""
    config = plan.config.model_dump(mode="json")
    if plan.config.quant is not None:
        # The order of rules matters, and the digest ignores the order of keys.
        config["quant"]["per_module"] = [*plan.config.quant.per_module.items()]
    libraries = sorted({name for stage in STAGES for name in stage.libraries})
    return digest(
        {
            "model": identity.record,
            "request": request_record(plan.request),
            "config": config,
            "skip_pre_normalization": plan.skip_pre_normalization,
            "verify": plan.verify,
            "with_companions": plan.with_companions,
            "versions": {TOOL_NAME: __version__, **library_versions(libraries)},
        }
    )


def to_build_config(
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None,
    listener: BuildListener = BuildListener(),  # noqa: B008 - frozen
    *,
    precision: str | None = None,
) -> WinMLBuildConfig:
    """Parse a config in any form that :func:`build_hf_model` accepts; the listener gets its notes.

    Raises:
        ConfigError: the config cannot be read or is invalid, or the precision is unknown.
    """
    notes: tuple[str, ...] = ()
    if config is None:
        parsed = WinMLBuildConfig()
    elif isinstance(config, WinMLBuildConfig):
        parsed = config
    elif isinstance(config, Mapping):
        parsed, notes = parse_build_config(dict(config), "config")
    else:
        parsed, notes = parse_build_config(*read_json(config, "config"))
    for note in notes:
        listener.tell(f"note: {note}")
    return parsed if precision is None else parsed.model_copy(update={"quant": with_precision(parsed.quant, precision)})


def build_plan(
    plan: BuildPlan, output: str | os.PathLike[str] | None, *, rebuild: bool, listener: BuildListener
) -> BuildResult:
    """Build in a folder, or in the cache if ``output`` is None; for errors see :func:`build_hf_model`.

    Batch and sequence are dynamic as far as the model supports it, unless the plan states sizes.
    """
    if listener.on_stage is not None:
        listener = replace(listener, on_stage=_without_repeated_skips(listener.on_stage))

    def build(sized: BuildPlan) -> BuildResult:
        if output is None:
            return build_in_cache(sized, rebuild=rebuild, listener=listener)
        return run_build(sized, Path(output), rebuild=rebuild, listener=listener)

    note = None if rebuild else note_of_sizes(plan)
    result, size_notes = make_most_open(plan, build, note, lambda: cache_key(plan, identify_plan(plan)))
    return replace(result, notes=(*result.notes, *size_notes))


def note_of_sizes(plan: BuildPlan) -> Path:
    """Return the path of the note on the dynamic sizes that the model of a plan supports."""
    name = digest({"request": request_record(plan.request), "config": plan.config.model_dump(mode="json")})
    return cache_root() / "open_sizes" / f"{name}.json"


def build_with_open_sizes(
    request: ModelRequest,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None,
    *,
    ep: str | None = None,
    precision: str | None = None,
) -> BuildResult:
    """Build in the cache for a provider: with dynamic sizes if possible; sizes in the config are used as stated.

    Args:
        request: The model.
        config: See :func:`build_hf_model`.
        ep: Execution provider of the model; fixed sizes if it requires them.
        precision: See :func:`build_hf_model`.

    Raises:
        WinMLError: see :func:`build_hf_model`.
    """
    parsed = to_build_config(config, precision=precision)
    if ep is not None and not find_execution_provider(ep).takes_dynamic:
        parsed = with_fixed_sizes(parsed)
    return build_plan(plan_build(parsed, request), None, rebuild=False, listener=BuildListener())


def _section_keys(config: WinMLBuildConfig) -> dict[str, str]:
    """Return option → config key for messages of a Python call."""
    names = {option: f"export.{spell_keyword(option)}" for option in SECTION_OPTIONS}
    names |= {option: f"compile.{option}" for option in ("ep_options", "device")} | {"no_compile": "compile: null"}
    names |= {"level": "optim.level", "min_sqnr": "quant.min_sqnr_db"}
    if config.export is None or config.export.ep is None:
        names["ep"] = "compile.ep"
    return names


def _name_slug(name: str) -> str:
    """Return the name of a model as a part of a folder name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name or name).strip("-.")[:_SLUG_LENGTH] or "model"


def _without_repeated_skips(on_stage: OnStep) -> OnStep:
    """Return a listener that receives a skipped stage once, even if a build tries several sizes."""
    received: set[tuple[int, str]] = set()

    def receive(event: StepEvent) -> None:
        summary = "" if event.finished is None else event.finished.summary
        if not summary.startswith("skipped") or (event.number, summary) not in received:
            received.add((event.number, summary))
            on_stage(event)

    return receive
