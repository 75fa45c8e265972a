"""Builds a model into a folder: runs its stages in order, for each part of the model.

A stage whose earlier result is still right is reused (``stage_runs.py``). The manifest is written after each stage, so
a build that was stopped goes on where it ended. The text of several quantized parts is compared with PyTorch's once all
of them are there, since errors of parts add up. What a stage does is said in ``stages.py``.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from winml.modelkit.builds.cache import library_versions
from winml.modelkit.builds.config import EvalSection, quantize_options
from winml.modelkit.builds.evaluated_models import evaluate_build
from winml.modelkit.builds.folder import BuildFolder, held_folder, refuse_input_as_output
from winml.modelkit.builds.identity import FileRecords, ModelIdentity, identify_model, identify_onnx
from winml.modelkit.builds.in_memory_stages import handed_over_stages
from winml.modelkit.builds.layouts.folder_layout import FolderLayout
from winml.modelkit.builds.layouts.layout import find_layout
from winml.modelkit.builds.manifest_records import (
    BuildManifest,
    BuildResult,
    FileRecord,
    PartRecord,
    StageRecord,
)
from winml.modelkit.builds.plan import BuildPlan, refuse_missing_compiler
from winml.modelkit.builds.stage_runs import TOOL_NAME, BuildJob, BuiltPart, StageRunner, StageStore
from winml.modelkit.builds.stages import STAGES, Stage, adapter_names, names_of, skip_reason
from winml.modelkit.errors import WinMLError
from winml.modelkit.evaluate.records import evaluation_words
from winml.modelkit.export.sidecar import DescribedFile, adapted_sidecar_json
from winml.modelkit.file_names import (
    BUILD_CONFIG_NAME,
    BUILD_MANIFEST_NAME,
    DECODER,
    EVALUATION_NAME,
    ONLY_PART,
    SIDECAR_SUFFIX,
    sidecar_path,
)
from winml.modelkit.onnx.files.companions import (
    Companions,
    is_in_the_way,
    outdated_companions,
    reserve_companions,
    settled_companions,
)
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.named_paths import drop_read
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.optimize.capabilities import LEVELS
from winml.modelkit.options import read_json_file
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.tags.tagging import all_nodes, measure_coverage, read_tag
from winml.modelkit.version import __version__
from winml.modelkit.words import message_words


class BuildCompanions:
    """The companions in the folder of one build: config, tokenizer and processor files.

    A file belongs to builds as long as its content is what a build wrote; one that the user changed is not replaced.

    Attributes:
        placed: What stands there; known once the models are placed.
        records: What the manifest says of them. Until the build is done, these may be two of one name: as the earlier
            build left it, and as this one does.
    """

    def __init__(self, folder: BuildFolder, sources: Mapping[str, Path]) -> None:
        """Take over what the earlier build wrote down.

        Args:
            folder: Held by the build.
            sources: Name in the folder, ``/`` between parts → file to copy.
        """
        self.placed = Companions()
        self.records = folder.manifest.companions if folder.manifest is not None else ()
        self._folder = folder
        self._sources = sources

    def reserve(self, files: OutputFiles) -> None:
        """Copy what is missing or outdated; the names are ours from now on, which the caller is to write down.

        Raises:
            WriteError: a file cannot be written.
        """
        folder = self._folder
        self._disown_changed()
        owned = folder.owned_names()
        self.placed = reserve_companions(files, folder.path, self._sources, owned=owned)
        folder.disown(self.placed.kept)
        new = [name for name in self.placed.names if name not in owned]
        if new:
            folder.claim(new)
        coming = (_record(name, self._sources[name]) for name in self.placed.names)
        self.records = tuple(dict.fromkeys((*self.records, *coming)))

    @property
    def planned(self) -> tuple[str, ...]:
        """Names of all files that may come along."""
        return tuple(self._sources)

    def outdated(self) -> tuple[str, ...]:
        """Return the names of those that :meth:`reserve` would write; changes no file."""
        self._disown_changed()
        return outdated_companions(self._folder.path, self._sources, owned=self._folder.owned_names())

    def settle(self, files: OutputFiles) -> None:
        """Take note of what became of them in the commit."""
        folder = self._folder
        reserved = self.placed.names
        self.placed = settled_companions(self.placed, folder.path, self._sources, files.gave_way)
        folder.disown([name for name in reserved if name not in self.placed.names])
        self.records = tuple(_record(name, folder.path / name) for name in self.placed.names)

    def _disown_changed(self) -> None:
        names = {record.name for record in self.records} & {*self._folder.owned_names()}
        changed = [name for name in names if self._is_changed(name)]
        self._folder.disown(changed)
        self.records = tuple(record for record in self.records if record.name in names and record.name not in changed)

    def _is_changed(self, name: str) -> bool:
        path = self._folder.path / name
        if is_in_the_way(self._folder.path, name):
            return True
        return path.exists() and _record(name, path) not in self.records


def _record(name: str, path: Path) -> FileRecord:
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=hash_file(path))


def has_sidecar(part: BuiltPart) -> bool:
    """Say whether the export of a part wrote a sidecar."""
    return _export_sidecar(part) is not None


def _model_sidecar(part: BuiltPart, folder: Path, written: Path, data: Mapping[str, int]) -> tuple[str | None, str]:
    """Return the sidecar of a finished part, and what is to be said of it.

    Args:
        part: The part; its last stage ran or was reused.
        folder: The folder of the build.
        written: The model as it was written, under the name that the result gets.
        data: Size in bytes of each of its data files, by name.

    Returns:
        The text, None where the export wrote no sidecar or it describes another file; and a note, or an empty string.
    """
    found = _export_sidecar(part)
    if found is None:
        return None, ""
    exported, sidecar = found
    try:
        record: dict[str, object] = read_json_file(folder / sidecar.name)
        # Sidecars of earlier versions do not say what they describe; the manifest does.
        is_its_own = record.get("model_sha256", exported.sha256) == exported.sha256
    except (OSError, ValueError, AttributeError):
        is_its_own = False
    if not is_its_own:
        return None, f"{folder / sidecar.name} does not describe {exported.name} and is ignored."
    # Of the stage, whose weights may lie outside: the nodes are the same, and less is read.
    model = ir.serde.deserialize_model(read_structure(folder / part.current_files[0].name))
    tags = [(node.name or "", tag) for node in all_nodes(model) if (tag := read_tag(node))]
    model_file = _record(written.name, written)
    described = DescribedFile(
        sha256=model_file.sha256,
        files=((model_file.name, model_file.size_bytes), *data.items()),
        nodes={name: tag.tag for name, tag in tags},
        root_nodes=tuple(name for name, tag in tags if tag.source == "root"),
        coverage=measure_coverage(model),
    )
    return adapted_sidecar_json(record, described), ""


def _export_sidecar(part: BuiltPart) -> tuple[FileRecord, FileRecord] | None:
    """Return the model that was made from PyTorch and its sidecar."""
    for record in part.records:
        sidecar = next((file for file in record.files if file.name.endswith(SIDECAR_SUFFIX)), None)
        if sidecar is not None:
            return record.files[0], sidecar
    return None


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
        rebuild: Run every stage, also those that are up to date.
        stages: The stages, in order.
        listener: Who is told.

    Raises:
        UsageError: the folder is the model, or holds files no build wrote or the finished build of another model.
        WinMLError: a stage failed; finished stages are kept.
    """
    refuse_missing_compiler(plan)
    identity = cache.identity if cache is not None else identify_plan(plan)
    identity.start()
    store = cache.store if cache is not None else None
    names = names_of_build(plan, stages)
    refuse_input_as_output(folder, identity.places, (*names, BUILD_MANIFEST_NAME))
    with held_folder(folder, names, is_cache=cache is not None, tell=listener.tell) as held:
        held.refuse_other_model(plan.request.model, lambda: identity.record.get("files"), rebuild=rebuild)
        job = BuildJob(plan, held, identity, tuple(stages), rebuild, store, listener.on_step)
        return _Build(job, listener).run()


def names_of_build(plan: BuildPlan, stages: Sequence[Stage] = STAGES) -> tuple[str, ...]:
    """Return every name that a build of a model of one part may write, besides the manifest and data."""
    runs = (stages, handed_over_stages(stages, plan))
    evaluated = () if plan.config.eval is None else (EVALUATION_NAME,)
    named = (name for run in runs for name in names_of(run, config=plan.config))
    return tuple(dict.fromkeys((*named, *adapter_names(plan), *evaluated)))


@dataclass(frozen=True)
class PlacedModel:
    """The files of a finished part."""

    files: tuple[FileRecord, ...] = ()
    """The model and its data."""
    sidecar: FileRecord | None = None

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        """The sidecar included."""
        return self.files if self.sidecar is None else (*self.files, self.sidecar)


def _write_evaluation(job: BuildJob, result: BuildResult, section: EvalSection, clock: StepClock) -> BuildResult:
    """Judge a finished build, and write down what was found; the build stays, whatever comes of it."""
    if len(result.manifest.parts) > 1:
        note = "The model has several parts and was not evaluated: run them together, with the metric of your task."
        return replace(result, notes=(*result.notes, note))
    with clock.step(_EVAL) as step:
        request = job.plan.request if job.plan.onnx_path is None else None
        evaluation = evaluate_build(result.model_path, section, request, job.on_step)
        step.summary = evaluation_words(evaluation)
    manifest = result.manifest.model_copy(update={"files": tuple(sorted({*result.manifest.files, EVALUATION_NAME}))})
    with OutputFiles() as files:
        text = json.dumps(evaluation.as_record(), indent=2, ensure_ascii=False) + "\n"
        files.reserve(job.folder.path / EVALUATION_NAME).write_text(text, encoding="utf-8", newline="\n")
        job.folder.save(manifest)
        files.commit(overwrite=True)
    return replace(result, manifest=manifest, evaluation=evaluation)


def with_chosen_stages(job: BuildJob, files: FileRecords) -> BuildJob:
    """Let the export hand its graph over in memory where it may; not where a file of it is there already.

    Args:
        job: The build.
        files: The files of its folder.
    """
    handed_over = handed_over_stages(job.stages, job.plan)
    if handed_over == job.stages:
        return job
    exports = [stage for stage in job.stages if stage.makes_graph]
    runner = StageRunner(job, files, job.folder.manifest)
    if all(runner.earlier_result(stage, None)[0] for stage in exports):
        return job
    return replace(job, stages=handed_over)


def reusable_model(
    job: BuildJob, manifest: BuildManifest | None, part: BuiltPart, layout: FolderLayout, files: FileRecords
) -> PlacedModel | None:
    """Return the files of a finished part where they are the result already: a session may have them open.

    Args:
        job: The build.
        manifest: What the build before left.
        part: The part, after its last stage.
        layout: How the folder is laid out.
        files: The files of the folder.
    """
    earlier = manifest.part(part.name) if manifest is not None else None
    if manifest is None or earlier is None or not earlier.model:
        return None
    is_same = earlier.last_files == part.current_files and manifest.input == _input_record(job)
    is_same = is_same and earlier.model[0].name == layout.model_name(part)
    is_same = is_same and layout.names_data_of([file.name for file in earlier.model])
    if not is_same or any(record.status == "run" for record in part.records):
        return None
    retained = PlacedModel(earlier.model, earlier.sidecar)
    is_whole = (retained.sidecar is not None) == has_sidecar(part) and not files.first_changed(retained.all_files)
    return retained if is_whole else None


def _input_record(job: BuildJob) -> dict[str, object]:
    """Return what the manifest says of the model a build starts from."""
    return {"model": job.plan.request.model, **job.identity.record}


class _Build:
    """One build in a folder it holds."""

    def __init__(self, job: BuildJob, listener: BuildListener) -> None:
        self._listener = listener
        self._files = FileRecords(job.folder.path)
        self._earlier = job.folder.manifest
        self._job = job = with_chosen_stages(job, self._files)
        judging = [] if job.plan.config.eval is None else [_EVAL]
        self._clock = StepClock([*(stage.name for stage in job.stages), *judging], listener.on_stage)
        self._runner = StageRunner(job, self._files, self._earlier)
        self._parts: list[BuiltPart] = []
        """Known once the graphs are there."""
        self._layout = FolderLayout(job.plan, job.identity)
        self._companions = BuildCompanions(job.folder, self._layout.copied)
        self._started = datetime.now(timezone.utc).astimezone()
        self._started_at = time.perf_counter()

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
        except BaseException as error:
            if not any(part.current_files for part in self._parts):
                folder.forget()  # nothing is finished: the folder is left as it was found
            elif isinstance(error, WinMLError):
                unfinished = self._make_manifest("unfinished", {})
                reason = message_words(error.message)
                folder.save(unfinished.model_copy(update={"failed": stage.name, "reason": reason}))
            drop_read(folder.path)
            raise
        manifest = self._make_manifest("done", self._place_models())
        # While the files of the stages are there: the notes look at the graphs.
        notes = [*self._stage_notes(), *self._companions.placed.notes, *self._unoptimized_notes()]
        if self._job.plan.deploy_only:
            manifest = _without_stage_files(manifest)
        folder.remove_all_but(manifest.files)
        folder.save(manifest)
        result = BuildResult(folder.path, manifest, (*folder.notes, *manifest.notes, *notes))
        section = self._job.plan.config.eval
        return result if section is None else _write_evaluation(self._job, result, section, self._clock)

    def _run_stage(self, stage: Stage) -> None:
        """Run or reuse a stage for every part; those that are finished are kept if another fails."""
        skipped = skip_reason(stage, self._job.plan)
        if not self._parts and (skipped or not stage.makes_graph):
            self._parts = [BuiltPart(ONLY_PART, of_several=False, current=self._job.plan.onnx_path)]
        if stage.makes_graph and skipped:
            self._layout.refuse(self._parts)
        if skipped:
            for part in self._parts:
                part.records.append(StageRecord(name=stage.name, status="skipped", reason=skipped))
        elif stage.makes_graph:
            records = self._runner.run(stage, None)
            before = self._parts[0].records if self._parts else []
            self._parts = [
                BuiltPart(name, of_several=name != ONLY_PART, current=None, records=[*before]) for name in records
            ]
            self._keep_records(records)
            self._layout.refuse(self._parts)
        else:
            for part in self._parts:
                self._keep_records(self._runner.run(stage, part))
            if stage.takes_bits:
                _compared_together(self._job.plan, self._parts, self._earlier)
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
        if len(words) == 1 or skip_reason(stage, self._job.plan):
            return words[0][1]
        return "; ".join(f"{name}: {text}" for name, text in words)

    def _make_manifest(self, status: Literal["unfinished", "done"], models: Mapping[str, PlacedModel]) -> BuildManifest:
        """Return what is there by now; ``models`` are the finished parts."""
        job = self._job
        parts = tuple(self._part_record(part, status, models.get(part.name, PlacedModel())) for part in self._parts)
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
            input=_input_record(self._job),
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._started_at, 3),
            normalizations=sum(record.normalizations for part in self._parts for record in part.records),
            versions={TOOL_NAME: __version__, "python": platform.python_version(), **library_versions(libraries)},
            notes=self._layout.notes(self._parts, job.folder.path) if status == "done" else (),
        )

    def _deployed_files(self, models: Mapping[str, PlacedModel]) -> tuple[FileRecord, ...]:
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
        reported = (note if note in common else f"{name}: {note}" for name, found in notes.items() for note in found)
        return list(dict.fromkeys(reported))

    def _unoptimized_notes(self) -> tuple[str, ...]:
        """Say that nothing was optimized, where nobody said whether anything should be."""
        section = self._job.plan.config.optim
        if section is None or not section.is_empty or "level" in section.model_fields_set:
            return ()
        from winml.modelkit.builds.decoder_fusions import is_fused, note_on_half_precision  # imports onnx

        models = [part.current for part in self._parts if part.current is not None]
        if fused := [model for model in models if is_fused(model, self._job.plan)]:
            return tuple(dict.fromkeys(filter(None, map(note_on_half_precision, fused))))
        *levels, last = (level for level in LEVELS if level != "none")
        note = (
            f"Nothing was optimized: no level was requested. Pass --level {', '.join(levels)} or {last} "
            "(optim.level in the config); winml optimize --list describes them, winml tune finds the fastest."
        )
        return (note,)

    def _part_record(self, part: BuiltPart, status: str, placed: PlacedModel) -> PartRecord:
        finished = {record.name for record in part.records}
        # Results of stages that are still to come may be used again, by this build or by the one that follows a kill.
        earlier = None if status == "done" or self._earlier is None else self._earlier.part(part.name)
        waiting = () if earlier is None else earlier.stages
        stages = (*part.records, *(record for record in waiting if record.name not in finished))
        return PartRecord(name=part.name, model=placed.files, sidecar=placed.sidecar, stages=stages)

    def _place_models(self) -> dict[str, PlacedModel]:
        """Pass the last result of each part its name, and write the config as resolved; return the files by part."""
        folder = self._job.folder.path
        retained = {
            part.name: reusable_model(self._job, self._earlier, part, self._layout, self._files) for part in self._parts
        }
        names: dict[str, tuple[str, ...]] = {}
        with OutputFiles() as files:
            for part in self._parts:
                if (model := retained[part.name]) is not None:
                    names[part.name] = tuple(file.name for file in model.files)
                    continue
                path = folder / self._layout.model_name(part)
                names[part.name] = self._layout.place(part, folder, files)
                text, note = self._sidecar_of(part, path, names[part.name], files)
                if text is not None:
                    files.reserve(sidecar_path(path)).write_text(text, encoding="utf-8", newline="\n")
                self._job.folder.notes += [note] if note else []
            self._claim_data(names.values())
            self._companions.reserve(files)
            # Whatever is put in place next is known to be ours, even after a kill.
            self._job.folder.save(self._make_manifest("unfinished", {}))
            config = files.reserve(folder / BUILD_CONFIG_NAME)
            text = json.dumps(self._resolved_config(), indent=2, ensure_ascii=False) + "\n"
            config.write_text(text, encoding="utf-8", newline="\n")
            for name, text in self._layout.written(self._parts, names).items():
                files.reserve(folder / name).write_text(text, encoding="utf-8", newline="\n")
            self._layout.place_adapters(self._parts, folder, files)
            written = {path.relative_to(folder.absolute()).as_posix() for path in files.commit()}
        self._companions.settle(files)
        placed = {}
        for part in self._parts:
            path = folder / self._layout.model_name(part)
            placed[part.name] = retained[part.name] or self._placed_model(path, written)
        return placed

    def _sidecar_of(
        self, part: BuiltPart, path: Path, names: Sequence[str], files: OutputFiles
    ) -> tuple[str | None, str]:
        """Return the sidecar of a model that was written under its name, before it is put in place."""
        folder = self._job.folder.path
        sizes = files.written_sizes()
        data = {name: sizes[(folder / name).absolute()] for name in names[1:]}
        if not self._job.plan.is_deployed:  # it may share the data of its stage
            shared = (file for file in part.current_files[1:] if not file.name.endswith(SIDECAR_SUFFIX))
            data = {**{file.name: file.size_bytes for file in shared}, **data}
        return _model_sidecar(part, folder, files.reserve(path), data)

    def _claim_data(self, placed: Iterable[tuple[str, ...]]) -> None:
        """Let data be ours whose names are not made of its content, and may be somebody's."""
        if find_layout(self._job.plan.config.layout).numbers_data:
            folder = self._job.folder
            folder.claim([name for _, *data in placed for name in data if name not in folder.owned_names()])

    def _placed_model(self, path: Path, written: Collection[str]) -> PlacedModel:
        sidecar = sidecar_path(path)
        name = sidecar.relative_to(self._job.folder.path).as_posix()
        described = self._files.of([sidecar])[0] if name in written else None
        return PlacedModel(self._files.of((path, *external_files(path))), described)

    def _resolved_config(self) -> dict[str, object]:
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


def _record_words(record: StageRecord) -> str:
    if record.status == "skipped":
        return f"skipped: {record.reason}"
    because = f" ({record.reason})" if record.reason else ""
    return f"{'reused, ' if record.status == 'reused' else ''}{record.nodes} nodes, {record.summary}{because}"


_SEPARATOR = "; "


def _compared_together(plan: BuildPlan, parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> None:
    """Compare the text of parts whose last stage took bits away, and add the outcome to the record of the decoder.

    What was compared before and is used again is not compared a second time, unless that build was refused or killed.

    Args:
        plan: The build.
        parts: All parts, with the record of that stage as their last.
        earlier: What the build before left in the folder.

    Raises:
        VerificationError: too little is left of the scores.
    """
    decoder = next((part for part in parts if part.name == DECODER), None)
    paths = {part.name: part.current for part in parts if part.current is not None}
    if decoder is None:
        return
    if decoder.records[-1].together:
        if _are_of_one_build(parts, earlier):
            return
        decoder.records[-1] = _with_words(decoder.records[-1], "")
    if len(parts) < 2 or len(paths) < len(parts) or not plan.verify or plan.onnx_path is not None:
        return
    from winml.modelkit.export.part_export import words_of_text_together
    from winml.modelkit.quantize.file_quantization import Quantization

    config, section = plan.config.export, plan.config.quant
    assert config is not None  # there are several parts, which an export made
    assert section is not None  # a stage took bits away
    least = Quantization(decoder.current or paths[DECODER], quantize_options(section), {}).least_sqnr_db
    words = words_of_text_together(plan.request, config, paths, least)
    if words is not None:
        decoder.records[-1] = _with_words(decoder.records[-1], words)


def _are_of_one_build(parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> bool:
    """Say whether all parts are those that the build before ended with; those of the cache may be of several builds."""
    if earlier is None or earlier.status != "done" or len(earlier.parts) != len(parts):
        return False
    return all(part.records[-1].status == "reused" and not part.records[-1].reason for part in parts)


def _with_words(record: StageRecord, words: str) -> StageRecord:
    summary = record.summary.removesuffix(f"{_SEPARATOR}{record.together}") if record.together else record.summary
    return record.model_copy(
        update={"together": words, "summary": f"{summary}{_SEPARATOR}{words}" if words else summary}
    )
