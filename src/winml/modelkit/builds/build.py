"""In what order do the stages of a build run, and which of them need not run again?

A stage whose options, input and libraries are those of its earlier result, and whose files are as it wrote them, is
reused; the manifest is written after each stage, so a build that was stopped goes on where it ended. What a stage does
is said in ``build_stages``.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.builds.cache import library_versions
from winml.modelkit.builds.file_records import FileRecords
from winml.modelkit.builds.folder import BuildFolder, held_folder, refuse_input_as_output
from winml.modelkit.builds.identity import ModelIdentity, identify_model, identify_onnx
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stage_store import StageStore
from winml.modelkit.builds.stages import STAGES, Stage, StageTask, names_of
from winml.modelkit.file_names import (
    BUILD_CONFIG_NAME,
    BUILD_MANIFEST_NAME,
    BUILT_MODEL_NAME,
    SIDECAR_SUFFIX,
    data_path,
)
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.placing import external_files, place_copy
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.hierarchy.coverage import measure_coverage
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.build_manifest import BuildManifest, CoverageRecord, FileRecord, Origin, StageRecord
from winml.modelkit.results.build_result import BuildResult
from winml.modelkit.runtime.peak_memory import PeakMemory
from winml.modelkit.version import __version__

__all__ = ["BuildListener", "run_build"]

_TOOL = "winml-modelkit"


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
    """Something is waited for."""


def run_build(
    plan: BuildPlan,
    folder: Path,
    *,
    identity: ModelIdentity | None = None,
    rebuild: bool = False,
    store: StageStore | None = None,
    stages: Sequence[Stage] = STAGES,
    listener: BuildListener = BuildListener(),
) -> BuildResult:
    """Build a model into a folder.

    Args:
        plan: What is to be done.
        folder: Where; made if it is missing.
        identity: The model, where it was looked at already.
        rebuild: Run every stage, whatever is there.
        store: Results of stages in the cache, to take and to add to; also says that the folder is part of it.
        stages: The stages, in order.
        listener: Who is told.

    Raises:
        UsageError: the folder is the model, or holds files no build wrote.
        WinMLError: a stage failed; finished stages are kept.
    """
    if identity is None:
        identity = identify_onnx(plan.onnx_path) if plan.onnx_path is not None else identify_model(plan.request)
    names = names_of(tuple(stages))
    refuse_input_as_output(folder, identity.places, (*names, BUILD_MANIFEST_NAME))
    with held_folder(folder, names, is_cache=store is not None, tell=listener.tell) as held:
        return _Build(plan, held, identity, tuple(stages), rebuild=rebuild, store=store, listener=listener).run()


class _Build:
    """One build in a folder it holds."""

    def __init__(
        self,
        plan: BuildPlan,
        folder: BuildFolder,
        identity: ModelIdentity,
        stages: tuple[Stage, ...],
        *,
        rebuild: bool,
        store: StageStore | None,
        listener: BuildListener,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._identity = identity
        self._stages = stages
        self._rebuild = rebuild
        self._store = store
        self._listener = listener
        self._clock = StepClock([stage.name for stage in stages], listener.on_stage)
        self._files = FileRecords(folder.path)
        self._earlier = folder.manifest
        self._current: Path | None = plan.onnx_path
        """Result of the stages so far."""
        self._current_files: tuple[FileRecord, ...] = ()
        """Its files; empty where it is the model the build starts from."""
        self._records: list[StageRecord] = []
        self._started = datetime.now(timezone.utc).astimezone()
        self._started_at = time.perf_counter()

    def run(self) -> BuildResult:
        """Run or reuse every stage, and put the result in place."""
        self._folder.announce()
        try:
            for stage in self._stages:
                with self._clock.step(stage.name) as step:
                    record = self._stage(stage)
                    step.summary = _summary(record)
                self._finish_stage(record)
        except BaseException:
            self._leave_unfinished()
            raise
        model = self._place_model()
        manifest = self._manifest("done", model=model)
        self._folder.remove_all_but(manifest.files)
        self._folder.save(manifest)
        notes = (*self._folder.notes, *(note for record in self._records for note in record.notes))
        return BuildResult(self._folder.path, manifest, notes)

    def _stage(self, stage: Stage) -> StageRecord:
        if reason := self._skip_reason(stage):
            return StageRecord(name=stage.name, status="skipped", reason=reason)
        earlier = self._earlier.stage(stage.name) if self._earlier is not None else None
        before = earlier.origin if earlier is not None else None
        reason = "asked for by --rebuild" if self._rebuild else ""
        if not self._rebuild and earlier is not None and before is not None:
            reason = self._why_run(stage, earlier, before)
            if not reason:
                return earlier.model_copy(update={"status": "reused", "reason": ""})
        if stored := self._from_store(stage):
            return stored.model_copy(update={"status": "reused", "reason": "from the cache"})
        return self._run_stage(stage, reason)

    def _origin(self, stage: Stage) -> Origin:
        """Return what a result depends on; waits until the model's files are read."""
        return Origin(
            options=json.loads(json.dumps(stage.options(self._plan))),
            source=self._source_record(stage),
            versions={_TOOL: __version__, **library_versions(stage.libraries)},
        )

    def _skip_reason(self, stage: Stage) -> str:
        """Return why a stage does not run, or an empty string."""
        if stage.makes_graph and self._plan.onnx_path is not None:
            return "the model is an ONNX file already"
        if stage.section in self._plan.switched_off:
            return self._plan.switched_off[stage.section]
        if getattr(self._plan.config, stage.section) is None:
            return f"{stage.section} is null in the config"
        return "" if stage.work else f"winml {__version__} has no {stage.name} stage yet"

    def _source_record(self, stage: Stage) -> dict[str, Any]:
        if stage.makes_graph or not self._current_files:
            return self._identity.record
        # The sidecar says when the graph was made, which changes nothing of it.
        graph = (record for record in self._current_files if not record.name.endswith(SIDECAR_SUFFIX))
        return {record.name: record.sha256 for record in graph}

    def _why_run(self, stage: Stage, earlier: StageRecord, before: Origin) -> str:
        """Return why an earlier result cannot be used, or an empty string."""
        if stage.makes_graph and not self._identity.is_repeatable:
            return "a factory may return another model each time"
        now = self._origin(stage)
        if changed := _changes(before.options, stage.as_asked_before(now.options, earlier)):
            return f"options changed: {', '.join(changed)}"
        if before.source != now.source:
            return f"its input changed: {', '.join(_changes(before.source, now.source))}"
        if changed := _changes(before.versions, now.versions):
            return f"versions changed: {', '.join(changed)}"
        damaged = self._files.first_changed(earlier.files)
        if damaged:
            self._folder.notes.append(f"{self._folder.path / damaged} is missing or damaged: made again.")
            return f"{damaged} was missing or damaged"
        return ""

    def _from_store(self, stage: Stage) -> StageRecord | None:
        if self._store is None or self._rebuild or (stage.makes_graph and not self._identity.is_repeatable):
            return None
        return self._store.take(self._origin(stage), self._folder.path, self._files)

    def _run_stage(self, stage: Stage, reason: str) -> StageRecord:
        assert stage.work is not None  # skipped otherwise
        output = self._folder.path / stage.file
        started = time.perf_counter()
        with PeakMemory() as memory:
            outcome = stage.work(StageTask(self._plan, self._current, output, self._listener.on_step))
        seconds = time.perf_counter() - started
        nodes, coverage = _count(output)
        return StageRecord(
            name=stage.name,
            status="run",
            reason=reason,
            origin=self._origin(stage),
            files=self._files.of(outcome.files),
            seconds=round(seconds, 3),
            peak_memory_bytes=memory.largest_bytes,
            nodes=nodes,
            coverage=coverage,
            normalizations=outcome.normalizations,
            summary=outcome.summary,
            resolved=dict(outcome.resolved),
            notes=outcome.notes,
        )

    def _finish_stage(self, record: StageRecord) -> None:
        self._records.append(record)
        if not record.files:
            return
        self._current = self._folder.path / record.files[0].name
        self._current_files = record.files
        self._folder.save(self._manifest("unfinished"))
        if self._listener.on_kept is not None:
            self._listener.on_kept(record.name)
        if self._store is not None:
            self._store.add(record, self._folder.path)

    def _leave_unfinished(self) -> None:
        """Keep what is finished; a folder in which nothing is, is left as it was found."""
        if not any(record.files for record in self._records):
            self._folder.forget()

    def _manifest(self, status: Any, model: tuple[FileRecord, ...] = ()) -> BuildManifest:
        done = {record.name for record in self._records}
        # Results of stages that are still to come may be used again, by this build or by the one that follows a kill.
        waiting = [] if status == "done" or self._earlier is None else self._earlier.stages
        stages = (*self._records, *(record for record in waiting if record.name not in done))
        if status == "done":
            written = [file.name for record in stages for file in record.files]
            names: tuple[str, ...] = tuple(
                sorted({*written, *(file.name for file in model), BUILD_CONFIG_NAME, BUILD_MANIFEST_NAME})
            )
        else:
            names = self._folder.owned_names()
        libraries = dict.fromkeys(name for stage in self._stages for name in stage.libraries)
        return BuildManifest(
            status=status,
            files=names,
            model=model,
            input={"model": self._plan.request.model, **self._identity.record},
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._started_at, 3),
            normalizations=sum(record.normalizations for record in self._records),
            versions={_TOOL: __version__, "python": platform.python_version(), **library_versions(libraries)},
            stages=stages,
        )

    def _place_model(self) -> tuple[FileRecord, ...]:
        """Give the last result its name, and write the config as resolved."""
        assert self._current is not None  # an export ran, or the model was an ONNX file
        path = self._folder.path / BUILT_MODEL_NAME
        kept = self._kept_model()
        with OutputFiles() as files:
            if not kept:
                files.drop(data_path(path))
                # A stage's result is ours and stays beside it; the model a build starts from is neither.
                is_ours = bool(self._current_files)
                place_copy(self._current, files.stage(path), share_data=is_ours, may_link=is_ours)
            config = files.stage(self._folder.path / BUILD_CONFIG_NAME)
            config.write_text(
                json.dumps(self._resolved_config(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            files.commit()
        return kept or self._files.of((path, *external_files(path)))

    def _kept_model(self) -> tuple[FileRecord, ...]:
        """Return the files of ``model.onnx`` where they are the result already: a session may have them open."""
        earlier = self._earlier
        if earlier is None or not earlier.model or any(record.status == "run" for record in self._records):
            return ()
        before = next((record.files for record in reversed(earlier.stages) if record.files), ())
        is_same = before == self._current_files and earlier.input == {
            "model": self._plan.request.model,
            **self._identity.record,
        }
        return earlier.model if is_same and not self._files.first_changed(earlier.model) else ()

    def _resolved_config(self) -> dict[str, Any]:
        record = self._plan.config.as_record()
        for stage in self._records:
            record.update(stage.resolved)
        return record


def _count(path: Path) -> tuple[int, CoverageRecord]:
    """Count the nodes and tags of a written file."""
    found = measure_coverage(ir.serde.deserialize_model(read_structure(path)))
    # A model none of whose nodes has a tag never had a hierarchy, or was told to drop it.
    percent = round(found.percent, 2) if found.tagged or not found.nodes else None
    return found.nodes, CoverageRecord(tagged=found.tagged, percent=percent)


def _summary(record: StageRecord) -> str:
    if record.status == "skipped":
        return f"skipped: {record.reason}"
    because = f" ({record.reason})" if record.reason else ""
    return f"{'reused, ' if record.status == 'reused' else ''}{record.nodes} nodes, {record.summary}{because}"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys at which two JSON objects differ, with their values where these are short."""
    found = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += _changes(old, new, f"{prefix}{key}.")
        elif all(value is None or isinstance(value, (bool, int, float)) or _is_short(value) for value in (old, new)):
            found.append(f"{prefix}{key} {_shown(old)} → {_shown(new)}")
        else:
            found.append(f"{prefix}{key}")
    return found


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _SHOWN_LENGTH


_SHOWN_LENGTH = 24
"""Characters of a value that are shown; a digest says nothing to people."""


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
