"""Builds a model package: each variant is a build in the cache, and the package has the files of all.

The variants share the results of stages, so the model is exported once for each set of sizes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit import file_names
from winml.modelkit.builds.build import BuildListener, identify_plan
from winml.modelkit.builds.build_model import build_plan
from winml.modelkit.builds.config import QuantSection
from winml.modelkit.builds.dtypes import OPTIONS_OF_FLOATS
from winml.modelkit.builds.folder import refuse_input_as_output
from winml.modelkit.builds.layouts import package
from winml.modelkit.builds.layouts.layout import PACKAGE_NAME, BuiltFolder
from winml.modelkit.builds.model_card import CardFacts, CardRow, model_card
from winml.modelkit.builds.package_records import PackagedVariant, PackageResult
from winml.modelkit.builds.package_writing import PackageContent, write_package
from winml.modelkit.builds.plan import BuildPlan, is_onnx_path
from winml.modelkit.builds.verb import BuildRequest, make_plan, python_request
from winml.modelkit.errors import MissingOutputError, OutputExistsError, UsageError, WinMLError, opt, spell
from winml.modelkit.file_names import MODEL_CARD_NAME, ONLY_PART
from winml.modelkit.models.checkpoints.companion_files import module_names
from winml.modelkit.onnx.bundle import described_model
from winml.modelkit.onnx.files.foreign_names import lies_within
from winml.modelkit.onnx.files.output_files import is_waiting, recover, refuse_existing
from winml.modelkit.optimize.capabilities import LEVELS
from winml.modelkit.options import read_json_file
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS
from winml.modelkit.report.plan import Plan, PlannedStep, planned_files
from winml.modelkit.words import time_words

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.builds.manifest_records import BuildResult

_OPTIONS_OF_VARIANTS = ("ep", "operators", "dtypes", "share_weights")
"""Options of a build that each variant decides itself."""
_OPTIONS_OF_FOLDERS = ("use_cache", "proof", "refittable", "deploy_only")
"""Options about files of stages, which a package does not have."""

_ITERATIONS, _WARMUP = 20, 3
"""Chosen: a median within some percent, in less time than the export takes."""
_LEVEL = LEVELS[-1]
"""Chosen: that of a build without a package. A quantization in memory optimizes only if a level is stated."""


@dataclass(frozen=True, kw_only=True)
class PackagePlan(Plan):
    """Plan of a package with the builds of its variants."""

    request: BuildRequest
    folder: Path
    builds: Mapping[str, BuildPlan]
    """Variant → its build."""
    sources: Mapping[str, Path]
    """Card and licence files of the checkpoint."""
    left_out: tuple[str, ...] = ()
    """Notes on default variants that cannot be built here."""


def plan_package(request: BuildRequest) -> PackagePlan:
    """Plan a package: the builds of its variants, and its files. Writes nothing.

    Raises:
        UsageError: an option does not apply to a package, or a variant cannot be built on this machine.
        OutputExistsError: the folder has a file of the package that the package in it does not list.
        WinMLError: see :func:`winml.modelkit.builds.verb.plan_requested_build`.
    """
    _refuse_options(request)
    assert request.output is not None  # checked above
    builds, left_out = _plan_variants(request)
    identity = identify_plan(next(iter(builds.values())))
    if not identity.is_repeatable:
        raise UsageError(
            f"{opt.layout} {PACKAGE_NAME}: {request.model.model} may return another model for each variant",
            hint="Export it first (winml export … -o model.onnx), then build model.onnx.",
        )
    manifest = request.output / file_names.PACKAGE_MANIFEST_NAME
    outputs = dict.fromkeys(
        (file_names.PACKAGE_MANIFEST_NAME, f"{ONLY_PART}/{file_names.PACKAGE_COMPONENT_NAME}", MODEL_CARD_NAME), ""
    )
    refuse_input_as_output(request.output, identity.places, (file_names.PACKAGE_MANIFEST_NAME,))
    # A killed command has moved files that its manifest, which is moved last, will list.
    new_names = outputs.keys() - set(_earlier_files(request.output))
    refuse_existing([request.output / name for name in new_names], overwrite=is_waiting(manifest, [manifest]))
    files = {**outputs, **dict.fromkeys((package.variant_path(ONLY_PART, name) for name in builds), "")}
    return PackagePlan(
        verb="build",
        reads=tuple(path for path in identity.places if path.is_file()) or identity.places,
        writes=planned_files(request.output, {**files, "shared_assets/*": "variants share weights"}),
        steps=tuple(PlannedStep(name, _variant_words(package.VARIANTS[name])) for name in builds),
        notes=tuple(left_out),
        request=request,
        folder=request.output,
        builds=builds,
        sources=identity.card,
        left_out=tuple(left_out),
    )


def _plan_variants(request: BuildRequest) -> tuple[dict[str, BuildPlan], list[str]]:
    """Return variant → its build, and notes on default variants that cannot be built.

    Raises:
        UsageError: a requested variant cannot be built on this machine.
    """
    if request.variants is not None:
        names = package.parse_variants(request.variants)
    else:
        names = package.DEFAULT_VARIANTS
    builds: dict[str, BuildPlan] = {}
    left_out: list[str] = []
    for name in names:
        variant = package.VARIANTS[name]
        try:
            builds[name] = make_plan(_variant_request(request, name, variant))
        except UsageError as error:
            if request.variants is not None or not builds:
                error.message = f"variant {name}: {error.message}"
                raise
            if not variant.is_compiled:  # else its provider is not installed
                left_out.append(f"Variant {name} was left out: {error.message}.")
    return builds, left_out


def run_package(plan: PackagePlan, listener: BuildListener = BuildListener()) -> PackageResult:  # noqa: B008 - frozen
    """Build the variants, and write the package.

    Args:
        plan: The plan.
        listener: Receives the progress of each build.

    Raises:
        UsageError: a variant divides the model into other parts than the first one.
        WinMLError: a build failed, or a file cannot be written.
    """
    started = time.perf_counter()
    request = plan.request
    recover([plan.folder / file_names.PACKAGE_MANIFEST_NAME])
    earlier = _earlier_files(plan.folder)
    recover([plan.folder / name for name in earlier])
    results: dict[str, BuildResult] = {}
    notes = [*plan.left_out]
    for name, build in plan.builds.items():
        listener.tell(f"variant {name}")
        try:
            result = build_plan(build, None, rebuild=request.rebuild, listener=listener)
            _refuse_other_parts(name, result, results)
        except WinMLError as error:
            if request.variants is not None or not results:
                error.message = f"variant {name}: {error.message}"
                raise
            notes.append(f"Variant {name} was left out: {error.message}.")
            continue
        results[name] = result
        notes += [f"{name}: {note}" for note in result.notes if not any(known.endswith(note) for known in notes)]
    first = next(iter(results.values()))
    variants = {name: package.VARIANTS[name] for name in results}
    facts = {
        name: _variant_facts(result, package.VARIANTS[name], is_verified=request.verify)
        for name, result in results.items()
    }
    companions = {record.name: first.folder / record.name for record in first.manifest.companions}
    content = PackageContent(
        plan.folder.absolute().name,
        request.model.model,
        variants,
        {name: result.part_paths for name, result in results.items()},
        facts,
        {**{name: path for name, path in plan.sources.items() if name != MODEL_CARD_NAME}, **companions},
        lambda sizes: _make_card(request, results, facts, sizes, companions, plan.sources),
    )
    written = write_package(plan.folder, content, earlier)
    return PackageResult(
        folder=plan.folder,
        model=request.model.model,
        parts=content.parts,
        variants=tuple(
            PackagedVariant(
                name=name,
                providers=variants[name].providers,
                nodes=facts[name]["nodes"],
                size_bytes=written.by_variant[name][0],
                shared_bytes=written.by_variant[name][1],
                separate_bytes=sum(file.size_bytes for part in result.manifest.parts for file in part.model),
                quality=facts[name]["quality"],
                latency_ms=facts[name]["latency_ms"],
            )
            for name, result in results.items()
        ),
        companions=tuple(content.companions),
        shared_bytes=written.shared_bytes,
        size_bytes=written.size_bytes,
        seconds=round(time.perf_counter() - started, 3),
        notes=tuple(notes),
    )


@python_function(shape_config="sizes")
def build_package(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    listener: BuildListener | None = None,
    **options: Any,
) -> PackageResult:
    """Build a model package of ONNX Runtime: variants of one model for several execution providers.

    Args:
        model: Hub id, checkpoint or an ONNX file.
        output: Folder of the package.
        config: Options of every variant; see :func:`~winml.modelkit.builds.verb.build_model`.
        listener: Receives the progress.
        **options: ``variants``, such as ``"cpu,webgpu"``, and the options of :func:`build_model` that apply to all.

    Raises:
        ConfigError: an option is unknown or of the wrong kind.
        UsageError: the request is wrong, or the folder has files that winml did not write.
        WinMLError: a variant cannot be built.

    Example:
        ```python
        result = build_package("checkpoint", "package", variants="cpu,webgpu")
        ```
    """
    listener = listener or BuildListener()
    request = python_request("build_package", model, output, config, listener, {"layout": PACKAGE_NAME, **options})
    return run_package(plan_package(request), listener)


def _refuse_options(request: BuildRequest) -> None:
    """Refuse options of a build that do not apply to a package.

    Raises:
        UsageError: names the option and the reason.
        MissingOutputError: no folder is specified.
    """
    subject = f"{opt.layout} {PACKAGE_NAME}"
    if request.layout not in (None, PACKAGE_NAME):
        raise UsageError(f"{opt.layout} {request.layout} is no package", hint=f"Use {subject}.")
    if request.output is None:
        raise MissingOutputError(f"{subject}: no output folder is specified", hint="Use -o FOLDER.")
    for name in (*_OPTIONS_OF_VARIANTS, *_OPTIONS_OF_FOLDERS):
        if getattr(request, name):
            is_of_variant = name in _OPTIONS_OF_VARIANTS
            reason = "each variant has its own" if is_of_variant else "a package has no files of stages"
            raise UsageError(f"{subject} and {spell(name)} cannot be combined: {reason}", hint="Omit one of them.")
    quant, compilation = request.config.quant, request.config.compile
    if quant is not None and quant.precision is not None:
        raise UsageError(
            f"{subject} and {opt.precision} cannot be combined: each variant has its own",
            hint=f"Omit one of them; {opt.variants} selects variants by precision and provider.",
        )
    if compilation is not None and compilation.ep is not None:
        raise UsageError(
            f"{subject} and compile.ep cannot be combined: each variant has its own provider", hint="Omit one of them."
        )


def _variant_request(request: BuildRequest, name: str, variant: package.Variant) -> BuildRequest:
    """Return the request for the build of a variant in the cache."""
    config = request.config
    optim, quant = config.optim, config.quant
    has_default_level = request.optimize and optim is not None and not optim.states_optimization
    if variant.precision is None:
        quant = None if quant is None else QuantSection()
    elif quant is None:
        raise UsageError(
            f"{opt.variants} {name} has no effect with {opt.no_quant}", hint="Omit the variant, or the option."
        )
    else:
        stated = quant.model_dump(mode="json", exclude_unset=True)
        if PRECISIONS[variant.precision].float_type:
            stated = {key: value for key, value in stated.items() if key in OPTIONS_OF_FLOATS}
        quant = QuantSection(**{**stated, "precision": variant.precision})
    return replace(
        request,
        config=config.model_copy(update={"layout": None, "quant": quant}),
        layout=None,
        variants=None,
        output=None,
        use_cache=True,
        ep=variant.ep,
        operators=variant.operators,
        level=_LEVEL if request.level is None and has_default_level else request.level,
        ep_options=request.ep_options if variant.is_compiled else (),
        fixed_sizes=request.fixed_sizes or (variant.is_compiled and not is_onnx_path(request.model.model)),
    )


def _refuse_other_parts(name: str, result: BuildResult, others: Mapping[str, BuildResult]) -> None:
    """Refuse a variant with other parts than the variants before it."""
    parts = tuple(result.part_paths)
    for other, built in others.items():
        if tuple(built.part_paths) != parts:
            raise UsageError(
                f"it has the parts {', '.join(parts)}, and variant {other} has {', '.join(built.part_paths)}",
                hint=f"Put it into a package of its own: {opt.variants} {name}.",
            )


def _variant_words(variant: package.Variant) -> str:
    """Describe the build of a variant."""
    operators = "" if variant.operators is None else f", {variant.operators} operators"
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in variant.providers)
    return f"{variant.precision or FLOAT32}{operators}, for {providers}"


def _variant_facts(result: BuildResult, variant: package.Variant, *, is_verified: bool) -> dict[str, Any]:
    """Return facts about a build for the metadata of its variant."""
    manifest = result.manifest
    stages = [stage for part in manifest.parts for stage in part.stages]
    last = [next((stage for stage in reversed(part.stages) if stage.nodes), None) for part in manifest.parts]
    found = [stage.quality for stage in stages if stage.status != "skipped" and stage.quality is not None]
    worst = min(found, key=lambda quality: quality.sqnr_db, default=None)
    # A verified build of the original precision fails unless its outputs are equal.
    without_ratio = "equal outputs" if is_verified and variant.precision is None else "not compared"
    return {
        "precision": variant.precision or FLOAT32,
        "nodes": sum(stage.nodes or 0 for stage in last if stage is not None),
        "quality": without_ratio if worst is None else worst.words,
        "latency_ms": _measure_latency(result) if "CPUExecutionProvider" in variant.providers else None,
    }


def _measure_latency(result: BuildResult) -> float | None:
    """Return the median time of a run on the CPU; ``None`` for a model of several parts, or one that is not run."""
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.profile.latency import LatencyOptions
    from winml.modelkit.profile.perf import PerfOptions, measure_model

    if len(result.part_paths) > 1:
        return None
    try:
        options = PerfOptions(
            RunOptions(result.model_path.name), LatencyOptions(iterations=_ITERATIONS, warmup=_WARMUP)
        )
        return round(measure_model(result.model_path, options).latency.summary.p50, 3)
    except WinMLError:
        return None


def _make_card(
    request: BuildRequest,
    results: Mapping[str, BuildResult],
    facts: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, int],
    companions: Mapping[str, Path],
    sources: Mapping[str, Path],
) -> str:
    """Return the text of the model card.

    Args:
        request: Request of the package.
        results: Variant → its build.
        facts: Variant → its facts.
        sizes: Variant → bytes of its files and of the shared weights that it reads.
        companions: Config, tokenizer and processor files of the builds.
        sources: Card and licence files of the checkpoint.
    """
    first = next(iter(results.values()))
    task = described_model(next(iter(first.part_paths.values()))).get("task") or ""
    rows = [
        CardRow(
            name,
            sizes[name],
            (
                ", ".join(provider.removesuffix("ExecutionProvider") for provider in package.VARIANTS[name].providers),
                fact["precision"],
                fact["quality"],
                "" if fact["latency_ms"] is None else time_words(fact["latency_ms"]),
            ),
        )
        for name, fact in facts.items()
    ]
    opened = BuiltFolder(".", task, (), next(iter(first.part_paths)), has_processors=False)
    columns = ("variant", "size with shared weights", "chosen for", "precision", "quality", "median run on a CPU, ms")
    card_facts = CardFacts(
        request.model.model,
        task,
        package.PACKAGE.readers,
        rows,
        columns,
        usage=package.package_usage(opened),
        tags=("onnx", "onnxruntime"),
        later_modules=module_names(companions),
    )
    return model_card(card_facts, sources)


def _earlier_files(folder: Path) -> tuple[str, ...]:
    """Return the files of the package in a folder; ``()`` if there is none.

    Raises:
        OutputExistsError: the folder has a ``manifest.json`` of another tool.
    """
    path = folder / file_names.PACKAGE_MANIFEST_NAME
    if not os.path.lexists(path):
        return ()
    try:
        files = package.package_files(read_json_file(path))
    except (OSError, ValueError):
        files = None
    if files is None:
        raise OutputExistsError(f"output {path} exists and is no package of winml", hint="Choose another folder.")
    return tuple(name for name in files if lies_within(folder, name))  # a manifest may be damaged
