"""Builds a model into a folder: runs its stages in order, for each part of the model.

A stage whose earlier result is still right is reused (``stage_runs.py``). The manifest is written after each stage, so
a build that was stopped goes on where it ended. What a stage does is said in ``stages.py``.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.builds.cache import library_versions
from winml.modelkit.builds.companions import BuildCompanions
from winml.modelkit.builds.config import EvalSection
from winml.modelkit.builds.file_records import FileRecords
from winml.modelkit.builds.folder import held_folder, refuse_input_as_output
from winml.modelkit.builds.handover import handed_over_stages
from winml.modelkit.builds.identity import ModelIdentity, identify_model, identify_onnx
from winml.modelkit.builds.judged_models import evaluate_build
from winml.modelkit.builds.layouts.folder_layout import FolderLayout
from winml.modelkit.builds.layouts.layout import find_layout
from winml.modelkit.builds.model_sidecar import has_sidecar, model_sidecar
from winml.modelkit.builds.plan import BuildPlan, refuse_missing_compiler
from winml.modelkit.builds.stage_runs import TOOL_NAME, BuildJob, BuiltPart, StageRunner
from winml.modelkit.builds.stage_store import StageStore
from winml.modelkit.builds.stages import STAGES, Stage, names_of
from winml.modelkit.builds.text_together import compared_together
from winml.modelkit.file_names import (
    BUILD_CONFIG_NAME,
    BUILD_MANIFEST_NAME,
    EVALUATION_NAME,
    ONLY_PART,
    sidecar_path,
)
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.placing import external_files
from winml.modelkit.optimize.capabilities import LEVELS
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.build_manifest import BuildManifest, FileRecord, PartRecord, StageRecord
from winml.modelkit.results.build_result import BuildResult
from winml.modelkit.results.evaluation import evaluation_words
from winml.modelkit.version import __version__

__all__ = ["BuildCache", "BuildListener", "identify_plan", "run_build"]

_EVAL = "eval"
"""Step behind the stages that judges the result."""


@dataclass(frozen=True)
class BuildListener:
    """Who is told what a build does."""

    on_stage: Callable[[StepEvent], None] | None = None
    """A stage starts or ends."""
    on_step: Callable[[StepEvent], None] | None = None
    """A step inside the export starts or ends."""
    on_kept: Callable[[str], None] | None = None
    """The result of a stage is in the folder, by name of the stage, and stays there if the build is stopped."""
    tell: Callable[[str], None] = lambda _words: None
    """Something is waited for, or something in the config is not used."""


@dataclass(frozen=True)
class BuildCache:
    """What a build in a folder of the cache is given."""

    identity: ModelIdentity
    """The model, by which the folder is named."""
    store: StageStore
    """Results of other builds, to take and to add to."""


def identify_plan(plan: BuildPlan) -> ModelIdentity:
    """Return what the model of a plan is made from, at this moment.

    Raises:
        UsageError: the request is wrong.
        InputError: a file is missing or cannot be read, or the Hub did not deliver.
    """
    return identify_onnx(plan.onnx_path) if plan.onnx_path is not None else identify_model(plan.request)


def run_build(
    plan: BuildPlan,
    folder: Path,
    *,
    cache: BuildCache | None = None,
    rebuild: bool = False,
    stages: Sequence[Stage] = STAGES,
    listener: BuildListener = BuildListener(),
) -> BuildResult:
    """Build a model into a folder.

    Args:
        plan: What is to be done.
        folder: Where; made if it is missing.
        cache: What goes with a folder that is part of the cache.
        rebuild: Run every stage, whatever is there.
        stages: The stages, in order.
        listener: Who is told.

    Raises:
        UsageError: the folder is the model, or holds files no build wrote.
        WinMLError: a stage failed; finished stages are kept.
    """
    refuse_missing_compiler(plan)
    identity = cache.identity if cache is not None else identify_plan(plan)
    store = cache.store if cache is not None else None
    handed_over = handed_over_stages(stages, plan)
    written = [name for run in (stages, handed_over) for name in names_of(run, config=plan.config)]
    judged = () if plan.config.eval is None else (EVALUATION_NAME,)
    names = tuple(dict.fromkeys((*written, *judged)))
    refuse_input_as_output(folder, identity.places, (*names, BUILD_MANIFEST_NAME))
    with held_folder(folder, names, is_cache=cache is not None, tell=listener.tell) as held:
        job = BuildJob(plan, held, identity, tuple(stages), rebuild, store, listener.on_step)
        return _Build(job, listener).run()


@dataclass(frozen=True)
class _PlacedModel:
    """The files of a finished part."""

    files: tuple[FileRecord, ...] = ()
    """The model and its data."""
    sidecar: FileRecord | None = None

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        """The sidecar included."""
        return self.files if self.sidecar is None else (*self.files, self.sidecar)


def _judged(job: BuildJob, result: BuildResult, section: EvalSection, clock: StepClock) -> BuildResult:
    """Judge a finished build, and write down what was found; the build stays, whatever comes of it."""
    if len(result.manifest.parts) > 1:
        note = "The model has several parts, so it is not judged: run them together, with the metric of your task."
        return replace(result, notes=(*result.notes, note))
    with clock.step(_EVAL) as step:
        request = job.plan.request if job.plan.onnx_path is None else None
        evaluation = evaluate_build(result.model_path, section, request, job.on_step)
        step.summary = evaluation_words(evaluation)
    manifest = result.manifest.model_copy(update={"files": tuple(sorted({*result.manifest.files, EVALUATION_NAME}))})
    with OutputFiles() as files:
        text = json.dumps(evaluation.as_record(), indent=2, ensure_ascii=False) + "\n"
        files.reserve(job.folder.path / EVALUATION_NAME).write_text(text, encoding="utf-8")
        job.folder.save(manifest)
        files.commit(overwrite=True)
    return replace(result, manifest=manifest, evaluation=evaluation)


class _Build:
    """One build in a folder it holds."""

    def __init__(self, job: BuildJob, listener: BuildListener) -> None:
        self._listener = listener
        self._files = FileRecords(job.folder.path)
        self._earlier = job.folder.manifest
        self._job = job = self._with_chosen_stages(job)
        judging = [] if job.plan.config.eval is None else [_EVAL]
        self._clock = StepClock([*(stage.name for stage in job.stages), *judging], listener.on_stage)
        self._runner = StageRunner(job, self._files, self._earlier)
        self._parts: list[BuiltPart] = []
        """Known once the graphs are there."""
        self._layout = FolderLayout(job.plan, job.identity)
        self._companions = BuildCompanions(job.folder, self._layout.copied)
        self._started = datetime.now(timezone.utc).astimezone()
        self._started_at = time.perf_counter()

    def _with_chosen_stages(self, job: BuildJob) -> BuildJob:
        """Let the export hand its graph over in memory where it may; not where a file of it is there already."""
        handed_over = handed_over_stages(job.stages, job.plan)
        if handed_over == job.stages:
            return job
        exports = [stage for stage in job.stages if stage.makes_graph]
        runner = StageRunner(job, self._files, self._earlier)
        if not job.rebuild and all(runner.is_reusable(stage) for stage in exports):
            return job
        return replace(job, stages=handed_over)

    def run(self) -> BuildResult:
        """Run or reuse every stage, and put the result in place."""
        folder = self._job.folder
        folder.announce()
        try:
            for stage in self._job.stages:
                with self._clock.step(stage.name) as step:
                    self._run_stage(stage)
                    step.summary = self._stage_summary(stage)
                if self._listener.on_kept is not None and any(part.records[-1].files for part in self._parts):
                    self._listener.on_kept(stage.name)
        except BaseException:
            if not any(part.current_files for part in self._parts):
                folder.forget()  # nothing is finished: the folder is left as it was found
            raise
        manifest = self._make_manifest("done", self._place_models())
        if self._job.plan.deploy_only:
            manifest = _without_stage_files(manifest)
        folder.remove_all_but(manifest.files)
        folder.save(manifest)
        notes = self._stage_notes()
        notes += [*self._companions.placed.notes, *self._unoptimized_notes()]
        result = BuildResult(folder.path, manifest, (*folder.notes, *manifest.notes, *notes))
        section = self._job.plan.config.eval
        return result if section is None else _judged(self._job, result, section, self._clock)

    def _run_stage(self, stage: Stage) -> None:
        """Run or reuse a stage for every part; those that are finished are kept if another fails."""
        skip_reason = _skip_reason(stage, self._job.plan)
        if not self._parts and (skip_reason or not stage.makes_graph):
            self._parts = [BuiltPart(ONLY_PART, of_several=False, current=self._job.plan.onnx_path)]
        if stage.makes_graph and skip_reason:
            self._layout.refuse(self._parts)
        if skip_reason:
            for part in self._parts:
                part.records.append(StageRecord(name=stage.name, status="skipped", reason=skip_reason))
        elif stage.makes_graph:
            records = self._runner.run(stage, None)
            skipped = self._parts[0].records if self._parts else []
            self._parts = [
                BuiltPart(name, of_several=name != ONLY_PART, current=None, records=[*skipped]) for name in records
            ]
            self._keep_records(records)
            self._layout.refuse(self._parts)
        else:
            for part in self._parts:
                self._keep_records(self._runner.run(stage, part))
            if stage.takes_bits:
                compared_together(self._job.plan, self._parts, self._earlier)
                self._job.folder.save(self._make_manifest("unfinished", {}))

    def _keep_records(self, records: Mapping[str, StageRecord]) -> None:
        """Write down what a stage made."""
        folder = self._job.folder
        for part in self._parts:
            if part.name in records:
                part.add(records[part.name], folder.path)
        folder.save(self._make_manifest("unfinished", {}))
        if self._job.store is not None:
            self._job.store.add(records, folder.path)

    def _stage_summary(self, stage: Stage) -> str:
        """Say in a few words what became of a stage."""
        words = [(part.name, _record_words(part.records[-1])) for part in self._parts]
        if len(words) == 1 or _skip_reason(stage, self._job.plan):
            return words[0][1]
        return "; ".join(f"{name}: {text}" for name, text in words)

    def _make_manifest(
        self, status: Literal["unfinished", "done"], models: Mapping[str, _PlacedModel]
    ) -> BuildManifest:
        """Return what is there by now; ``models`` are the finished parts."""
        job = self._job
        parts = tuple(self._part_record(part, status, models.get(part.name, _PlacedModel())) for part in self._parts)
        stage_files = (file for part in parts for record in part.stages for file in record.files)
        model_files = (file for part in parts for file in (*part.model, part.sidecar) if file is not None)
        written = {file.name for file in (*stage_files, *model_files)}
        finished = (*self._companions.placed.names, *self._layout.written_names, BUILD_CONFIG_NAME, BUILD_MANIFEST_NAME)
        names = tuple(sorted({*written, *(finished if status == "done" else job.folder.owned_names())}))
        libraries = dict.fromkeys(name for stage in job.stages for name in stage.libraries)
        return BuildManifest(
            status=status,
            files=names,
            parts=parts,
            companions=self._companions.records,
            deploy=self._deployed_files(models) if status == "done" else (),
            layout=job.plan.config.layout,
            input=self._input_record(),
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._started_at, 3),
            normalizations=sum(record.normalizations for part in self._parts for record in part.records),
            versions={TOOL_NAME: __version__, "python": platform.python_version(), **library_versions(libraries)},
            notes=self._layout.notes(self._parts, job.folder.path) if status == "done" else (),
        )

    def _deployed_files(self, models: Mapping[str, _PlacedModel]) -> tuple[FileRecord, ...]:
        """Return what is needed where the model is used: the models, and what their readers look for beside them."""
        placed = self._companions.placed
        beside = (*placed.names, *placed.kept, *self._layout.written_names)
        folder = self._job.folder.path
        records = self._files.of(folder / name for name in dict.fromkeys(beside))
        return (*(file for model in models.values() for file in model.files), *records)

    def _stage_notes(self) -> list[str]:
        """Return the notes of all stages; of several parts with its name, unless all say the same."""
        notes = {part.name: [note for record in part.records for note in record.notes] for part in self._parts}
        common = {note for found in notes.values() for note in found if all(note in other for other in notes.values())}
        told = (note if note in common else f"{name}: {note}" for name, found in notes.items() for note in found)
        return list(dict.fromkeys(told))

    def _unoptimized_notes(self) -> tuple[str, ...]:
        """Say that nothing was optimized, where nobody said whether anything should be."""
        section = self._job.plan.config.optim
        if section is None or not section.is_empty or "level" in section.model_fields_set:
            return ()
        from winml.modelkit.builds.decoder_fusions import is_fused  # imports onnx

        if any(part.current is not None and is_fused(part.current, self._job.plan) for part in self._parts):
            return ()
        *levels, last = (level for level in LEVELS if level != "none")
        note = (
            f"Nothing was optimized, since no level was given: --level {', '.join(levels)} or {last} "
            "(optim.level in the config). What each does: winml optimize --list."
        )
        return (note,)

    def _part_record(self, part: BuiltPart, status: str, placed: _PlacedModel) -> PartRecord:
        finished = {record.name for record in part.records}
        # Results of stages that are still to come may be used again, by this build or by the one that follows a kill.
        earlier = None if status == "done" or self._earlier is None else self._earlier.part(part.name)
        waiting = () if earlier is None else earlier.stages
        stages = (*part.records, *(record for record in waiting if record.name not in finished))
        return PartRecord(name=part.name, model=placed.files, sidecar=placed.sidecar, stages=stages)

    def _input_record(self) -> dict[str, Any]:
        return {"model": self._job.plan.request.model, **self._job.identity.record}

    def _place_models(self) -> dict[str, _PlacedModel]:
        """Give the last result of each part its name, and write the config as resolved; return the files by part."""
        folder = self._job.folder.path
        kept = {part.name: self._kept_model(part) for part in self._parts}
        names: dict[str, tuple[str, ...]] = {}
        with OutputFiles() as files:
            for part in self._parts:
                if (model := kept[part.name]) is not None:
                    names[part.name] = tuple(file.name for file in model.files)
                    continue
                path = folder / self._layout.model_name(part)
                names[part.name] = self._layout.place(part, folder, files)
                text, note = model_sidecar(part, folder, path.name)
                if text is not None:
                    files.reserve(sidecar_path(path)).write_text(text, encoding="utf-8")
                self._job.folder.notes += [note] if note else []
            self._claim_data(names.values())
            self._companions.reserve(files)
            # Whatever is put in place next is known to be ours, even after a kill.
            self._job.folder.save(self._make_manifest("unfinished", {}))
            config = files.reserve(folder / BUILD_CONFIG_NAME)
            text = json.dumps(self._resolved_config(), indent=2, ensure_ascii=False) + "\n"
            config.write_text(text, encoding="utf-8")
            for name, text in self._layout.written(self._parts, names).items():
                files.reserve(folder / name).write_text(text, encoding="utf-8")
            written = {path.relative_to(folder.absolute()).as_posix() for path in files.commit()}
        self._companions.settle(files)
        placed = {}
        for part in self._parts:
            path = folder / self._layout.model_name(part)
            placed[part.name] = kept[part.name] or self._placed_model(path, written)
        return placed

    def _claim_data(self, placed: Iterable[tuple[str, ...]]) -> None:
        """Let data be ours whose names are not made of its content, and may be somebody's."""
        if find_layout(self._job.plan.config.layout).numbers_data:
            folder = self._job.folder
            folder.claim([name for _, *data in placed for name in data if name not in folder.owned_names()])

    def _placed_model(self, path: Path, written: Collection[str]) -> _PlacedModel:
        sidecar = sidecar_path(path)
        name = sidecar.relative_to(self._job.folder.path).as_posix()
        described = self._files.of([sidecar])[0] if name in written else None
        return _PlacedModel(self._files.of((path, *external_files(path))), described)

    def _kept_model(self, part: BuiltPart) -> _PlacedModel | None:
        """Return the files of a finished part where they are the result already: a session may have them open."""
        earlier = self._earlier.part(part.name) if self._earlier is not None else None
        if self._earlier is None or earlier is None or not earlier.model:
            return None
        is_same = earlier.last_files == part.current_files and self._earlier.input == self._input_record()
        is_same = is_same and earlier.model[0].name == self._layout.model_name(part)
        is_same = is_same and self._layout.names_data_of([file.name for file in earlier.model])
        if not is_same or any(record.status == "run" for record in part.records):
            return None
        kept = _PlacedModel(earlier.model, earlier.sidecar)
        is_whole = (kept.sidecar is not None) == has_sidecar(part) and not self._files.first_changed(kept.all_files)
        return kept if is_whole else None

    def _resolved_config(self) -> dict[str, Any]:
        config = self._job.plan.config.as_record()
        for part in self._parts:
            for record in part.records:
                config.update(record.resolved)
        return config


def _without_stage_files(manifest: BuildManifest) -> BuildManifest:
    """Return the manifest of a folder that holds only what is deployed, and the manifest itself."""
    parts = tuple(
        part.model_copy(
            update={
                "sidecar": None,
                "stages": tuple(stage.model_copy(update={"files": ()}) for stage in part.stages),
            }
        )
        for part in manifest.parts
    )
    files = tuple(sorted({*(file.name for file in manifest.deploy), BUILD_MANIFEST_NAME} & {*manifest.files}))
    return manifest.model_copy(update={"parts": parts, "files": files})


def _skip_reason(stage: Stage, plan: BuildPlan) -> str:
    """Return why a stage does not run, or an empty string."""
    if stage.makes_graph and plan.onnx_path is not None:
        return "the model is an ONNX file already"
    if stage.section in plan.switched_off:
        return plan.switched_off[stage.section]
    if getattr(plan.config, stage.section) is None:
        return f"{stage.section} is null in the config"
    if stage.handed_to is not None:
        return f"done by {stage.handed_to} in memory: no float copy of the weights is written"
    return stage.idle(plan.config) if stage.work else f"winml {__version__} has no {stage.name} stage yet"


def _record_words(record: StageRecord) -> str:
    if record.status == "skipped":
        return f"skipped: {record.reason}"
    because = f" ({record.reason})" if record.reason else ""
    return f"{'reused, ' if record.status == 'reused' else ''}{record.nodes} nodes, {record.summary}{because}"
