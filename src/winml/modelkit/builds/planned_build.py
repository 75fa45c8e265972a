"""What would a build do? Which stages run, which results are up to date, and which files are written and removed.

Writes nothing, holds no folder and fetches nothing. Whether a result is reused is decided by ``stage_runs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from winml.modelkit.builds.build import (
    BuildCompanions,
    has_sidecar,
    identify_plan,
    names_of_build,
    reusable_model,
    with_chosen_stages,
)
from winml.modelkit.builds.build_model import cache_folder
from winml.modelkit.builds.cache import only_looking
from winml.modelkit.builds.config import quantize_options
from winml.modelkit.builds.folder import BuildFolder, refuse_input_as_output
from winml.modelkit.builds.identity import FileRecords, ModelIdentity
from winml.modelkit.builds.layouts.folder_layout import FolderLayout
from winml.modelkit.builds.layouts.layout import find_layout
from winml.modelkit.builds.manifest_records import StageRecord
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stage_runs import FROM_CACHE, BuildJob, BuiltPart, StageRunner, StageStore
from winml.modelkit.builds.stages import STAGES, Stage, adapter_names, skip_reason
from winml.modelkit.file_names import (
    BUILD_CONFIG_NAME,
    BUILD_MANIFEST_NAME,
    EVALUATION_NAME,
    ONLY_PART,
    numbered_data_path,
    part_path,
    sidecar_path,
)
from winml.modelkit.models.checkpoints.adapters import adapter_files, read_adapters
from winml.modelkit.models.checkpoints.hub import cached_snapshot
from winml.modelkit.models.request import resolve_source
from winml.modelkit.onnx.files.named_paths import cache_root
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.quantize.calibration.calibration_files import calibration_files
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep, interruptions_beside, planned_data

_OUTSIDE = "the model has external data"
_EVAL = "eval"
_TRIED = (
    "Batch size and length are dynamic as far as the model supports it, which the build tries; the first try is listed."
)


@dataclass(frozen=True, kw_only=True)
class PlannedBuild(Plan):
    """What a build would do."""

    build: BuildPlan
    folder: Path
    """Where; in the cache, a ``*`` stands for digits that are known when the model is fetched."""
    is_exported: bool = False
    """Whether a graph is exported, because no up-to-date result is known."""


def planned_build(
    plan: BuildPlan, output: Path | None, *, rebuild: bool = False, requested: BuildPlan | None = None
) -> PlannedBuild:
    """Return what a build would do with what is there at this moment.

    Args:
        plan: The build.
        output: Folder to build in; None: that of the cache.
        rebuild: Run every stage, also those that are up to date.
        requested: What is requested where ``plan`` is the first form of it that is tried.

    Raises:
        UsageError: the folder is the model, or the request is wrong.
        OutputExistsError: a file is there that no build wrote, or the finished build of another model.
        InputError: a file of the model is missing or cannot be read.
        WriteError: the folder cannot be written.
    """
    with only_looking():
        identity = None if is_to_be_fetched(plan) else identify_plan(plan)
        folder = output if output is not None else cache_folder(plan, identity)
        names = names_of_build(plan)
        if identity is not None:
            refuse_input_as_output(folder, identity.places, (*names, BUILD_MANIFEST_NAME))
        held = BuildFolder(folder, names, is_cache=output is None)
        files = (lambda: None) if identity is None else (lambda: identity.record.get("files"))
        held.refuse_other_model(plan.request.model, files, rebuild=rebuild)
        store = StageStore(cache_root()) if output is None and identity is not None else None
        is_unknown = identity is None
        unknown = ModelIdentity(dict, is_repeatable=False, places=())
        job = BuildJob(plan, held, identity or unknown, STAGES, rebuild or is_unknown, store, None)
        outline = _Outline(job, is_fetched=not is_unknown).planned()
        return (
            outline
            if requested is None or requested is plan
            else replace(outline, build=requested, notes=(*outline.notes, _TRIED))
        )


def is_to_be_fetched(plan: BuildPlan) -> bool:
    """Say whether the model is one of the Hub that is not on this disk, and may be fetched."""
    request = plan.request
    source = None if plan.onnx_path is not None else resolve_source(request)
    if source is None or source.kind != "hub":
        return False
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return False  # refused where it is not on this disk, as the build is
    needs_weights, needs_code = not request.random_weights, request.trust_remote_code
    return cached_snapshot(source.name, request.revision, needs_weights=needs_weights, needs_code=needs_code) is None


@dataclass
class _Doubt:
    """Why the input of a stage may be another than that of the earlier build."""

    cause: str
    """Stage that runs, or ``recovery``."""
    is_new: bool
    """Whether its result has no earlier one that it may be equal to."""


class _Outline:
    """Follows the stages of one build as :mod:`~winml.modelkit.builds.build` runs them, and notes what each would do.

    A stage behind one that runs is up to date where that makes the same graph as before, so it is listed with a
    condition.
    """

    def __init__(self, job: BuildJob, *, is_fetched: bool) -> None:
        self._files = FileRecords(job.folder.path)
        self._earlier = job.folder.manifest
        self._job = job = with_chosen_stages(job, self._files)
        self._runner = StageRunner(job, self._files, self._earlier)
        self._layout = FolderLayout(job.plan, job.identity)
        self._companions = BuildCompanions(job.folder, self._layout.copied)
        self._interrupted = interruptions_beside([job.folder.path / BUILD_MANIFEST_NAME])
        self._is_fetched = is_fetched
        self._unknown = "" if is_fetched else "no up-to-date result fits the downloaded model"
        self._parts: list[BuiltPart] = []
        self._doubts: dict[str, _Doubt] = {}
        self._runs: set[str] = set()
        """Parts of which a stage runs for certain."""
        self._is_exported = False
        self._writes: dict[Path, PlannedFile] = {}
        self._kept: set[str] = set()

    def planned(self) -> PlannedBuild:
        """Return the plan."""
        plan, folder = self._job.plan, self._job.folder
        steps = [self._stage(stage) for stage in self._job.stages]
        if plan.deploy_only:  # files of stages are removed in the end
            self._writes, self._kept = {}, set()
        for part in self._parts:
            self._place(part)
        self._place_beside()
        if plan.config.eval is not None:
            is_judged = len(self._parts) == 1
            words = "evaluates the result" if is_judged else "skipped: parts are not evaluated separately"
            steps.append(PlannedStep(_EVAL, words))
            if is_judged:
                self._add(folder.path / EVALUATION_NAME)
        return PlannedBuild(
            verb="build",
            reads=self._reads(),
            writes=tuple(self._writes.values()),
            steps=tuple(steps),
            notes=(*folder.notes, *self._notes()),
            removes=self._removes(),
            interrupted=self._interrupted,
            build=plan,
            folder=folder.path,
            is_exported=self._is_exported,
        )

    def _stage(self, stage: Stage) -> PlannedStep:
        skipped = skip_reason(stage, self._job.plan)
        if not self._parts and (skipped or not stage.makes_graph):
            self._set_parts([ONLY_PART], self._job.plan.onnx_path)
        if skipped:
            for part in self._parts:
                part.records.append(StageRecord(name=stage.name, status="skipped", reason=skipped))
            return PlannedStep(stage.name, f"skipped: {skipped}")
        if stage.makes_graph:
            return PlannedStep(stage.name, self._make_graphs(stage))
        words = {part.name: self._change_graph(stage, part) for part in self._parts}
        if len({*words.values()}) == 1:
            return PlannedStep(stage.name, next(iter(words.values())))
        return PlannedStep(stage.name, "; ".join(f"{name}: {text}" for name, text in words.items()))

    def _set_parts(self, names: list[str], current: Path | None) -> None:
        skipped = self._parts[0].records if self._parts else []
        self._parts = [BuiltPart(name, name != ONLY_PART, current, records=[*skipped]) for name in names]
        if self._is_recovered:
            self._doubts = {name: _Doubt("recovery", is_new=False) for name in names}

    @property
    def _is_recovered(self) -> bool:
        """Whether files of the folder are put in place before a stage is looked at."""
        return any(found.completes for found in self._interrupted)

    def _make_graphs(self, stage: Stage) -> str:
        records, reason = self._runner.earlier_result(stage, None)
        if records:
            self._set_parts([*records], None)
            return self._reuse(stage, records)
        if stored := self._runner.stored_result(stage, None):
            self._set_parts([*stored.records], None)
            return self._take(stored.records)
        earlier = [part.name for part in self._earlier.parts] if self._earlier is not None else []
        self._set_parts(earlier or [ONLY_PART], None)
        self._is_exported = True
        return next(iter([self._run(stage, part, reason) for part in self._parts]))

    def _change_graph(self, stage: Stage, part: BuiltPart) -> str:
        records, reason = self._runner.earlier_result(stage, part)
        doubt = self._doubts.get(part.name)
        if doubt is not None and doubt.is_new:
            return self._run(stage, part, reason or f"{doubt.cause} recreates its input")
        if records:
            return self._reuse(stage, {part.name: records[part.name]})
        stored = self._runner.stored_result(stage, part) if doubt is None else None
        return self._run(stage, part, reason) if stored is None else self._take(stored.records)

    def _reuse(self, stage: Stage, records: Mapping[str, StageRecord]) -> str:
        """Note results that are up to date, or may be; return how."""
        words = "up to date"
        for part in self._parts:
            if part.name not in records:
                continue
            part.add(records[part.name].model_copy(update={"status": "reused"}), self._job.folder.path)
            doubt = self._doubts.get(part.name)
            if doubt is None:
                self._kept.update(file.name for file in records[part.name].files)
            else:
                words = f"up to date, unless {doubt.cause} changes its input"
                self._write_stage(stage, part, f"{doubt.cause} changes its input")
        return words

    def _take(self, records: Mapping[str, StageRecord]) -> str:
        for part in self._parts:
            if part.name in records:
                record = records[part.name].model_copy(update={"status": "reused", "reason": FROM_CACHE})
                part.add(record, self._job.folder.path)
                for file in record.files:
                    self._add(self._job.folder.path / file.name)
        return f"up to date, {FROM_CACHE}"

    def _run(self, stage: Stage, part: BuiltPart, reason: str) -> str:
        """Note that a stage runs for a part; return why."""
        earlier = self._earlier.part(part.name) if self._earlier is not None else None
        record = earlier.stage(stage.name) if earlier is not None else None
        files = record.files if record is not None else ()
        part.add(StageRecord(name=stage.name, status="run", files=files), self._job.folder.path)
        self._doubts[part.name] = _Doubt(stage.name, is_new=not files)
        self._runs.add(part.name)
        self._write_stage(stage, part, self._unknown)
        section = self._job.plan.config.quant
        done = f"; {quantize_options(section).words}" if stage.name == "quantize" and section is not None else ""
        if self._unknown:
            return f"runs, if {self._unknown}{done}"
        return f"runs: {reason or 'no result yet'}{done}"

    def _write_stage(self, stage: Stage, part: BuiltPart, condition: str) -> None:
        model = part_path(self._job.folder.path / stage.file, part.name, of_several=part.of_several)
        self._add(model, condition)
        self._add_data(planned_data(model).path, condition)
        if stage.makes_graph and self._writes_sidecar():
            self._add(sidecar_path(model), condition)

    def _writes_sidecar(self) -> bool:
        export = self._job.plan.config.export
        return export is not None and export.hierarchy

    def _place(self, part: BuiltPart) -> None:
        """Note the files of a finished part, unless they are the result already."""
        doubt = self._doubts.get(part.name)
        retained = reusable_model(self._job, self._earlier, part, self._layout, self._files)
        if retained is not None and doubt is None:
            self._kept.update(
                file.name for file in (retained.files if self._job.plan.deploy_only else retained.all_files)
            )
            return
        condition = f"{doubt.cause} changes its input" if retained is not None and doubt is not None else self._unknown
        model = self._job.folder.path / self._layout.model_name(part)
        self._add(model, condition)
        numbered = find_layout(self._job.plan.config.layout).numbers_data
        self._add_data(numbered_data_path(model, 0) if numbered else planned_data(model).path, condition)
        is_described = part.name in self._runs and self._job.plan.onnx_path is None and self._writes_sidecar()
        if not self._job.plan.deploy_only and (is_described or has_sidecar(part)):
            self._add(sidecar_path(model), condition)

    def _place_beside(self) -> None:
        """Note what stands beside the models, and the two files that each build writes."""
        plan, folder = self._job.plan, self._job.folder.path
        copied = self._companions.outdated()
        self._kept.update(name for name in self._companions.planned if name not in copied)
        for name in copied:
            self._add(folder / name)
        layout = find_layout(plan.config.layout)
        for name in self._layout.rewritten_names:
            self._add(folder / name)
        for name in adapter_names(plan):
            self._add(folder / name)
        for name in layout.described:
            self._add(folder / name, f"{layout.readers} expect it for this kind of model")
        if not plan.deploy_only:
            self._add(folder / BUILD_CONFIG_NAME)
        self._add(folder / BUILD_MANIFEST_NAME)

    def _add(self, path: Path, condition: str = "") -> None:
        self._writes[path] = PlannedFile(path, path.exists(), condition)

    def _add_data(self, path: Path, condition: str) -> None:
        self._add(path, f"{_OUTSIDE}, and {condition}" if condition else _OUTSIDE)

    def _reads(self) -> tuple[Path, ...]:
        plan = self._job.plan
        quant = plan.config.quant
        data = quant.calibration_data if quant is not None else None
        samples = () if data is None else calibration_files(data).values()
        if plan.onnx_path is not None:
            return (plan.onnx_path, *external_files(plan.onnx_path), *samples)
        adapters = adapter_files(read_adapters(plan.request.adapter)).values()
        return (*(path for path in resolve_source(plan.request).files if path.is_file()), *adapters, *samples)

    def _removes(self) -> tuple[Path, ...]:
        """Return the files of earlier builds that this one does not make, or not under the same name."""
        folder = self._job.folder
        stays = {folder.path / name for name in self._kept} | self._writes.keys()
        if self._earlier is None:
            return ()
        owned = [folder.path / name for name in self._earlier.files]
        return tuple(path for path in owned if path not in stays and path.is_file())

    def _notes(self) -> list[str]:
        plan = self._job.plan
        notes = []
        if not self._is_fetched:
            notes.append(
                f"{plan.request.model} is not on this disk and is downloaded first; only then are up-to-date stages "
                "and companion files known."
            )
        is_guessed = self._earlier is None or not self._earlier.parts
        if plan.onnx_path is None and is_guessed and all(part.current_files == () for part in self._parts):
            notes.append(
                "The number of parts is known when the model is loaded; the files of one part are listed. For several, "
                "stages write <stage>_<part>.onnx, and the results are named <part>.onnx."
            )
        return notes
