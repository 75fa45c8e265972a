"""Runs one stage of a build, or reuses its earlier result if that is up to date.

An earlier result is used again if options, input and libraries are those it was made with, and its files are as it
wrote them. Results of other builds come from the cache.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pydantic

from winml.modelkit.builds.cache import digest, library_versions
from winml.modelkit.builds.folder import BuildFolder
from winml.modelkit.builds.identity import FileRecords, ModelIdentity
from winml.modelkit.builds.manifest_records import BuildManifest, CoverageRecord, FileRecord, Origin, StageRecord
from winml.modelkit.builds.plan import BuildPlan, open_sizes_words
from winml.modelkit.builds.stages import Stage, StageOutcome, StageTask, names_of
from winml.modelkit.errors import WriteError, rename_options
from winml.modelkit.file_names import ONLY_PART, SIDECAR_SUFFIX, part_path
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.named_paths import unrecorded
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import copy_data, link_or_copy
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.host import PeakMemory
from winml.modelkit.progress import StepEvent
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.version import __version__

_KEY_VERSION = 1
"""Part of every key. Raised when results noted before must not be used any more."""


@dataclass(frozen=True)
class StoredResult:
    """The result of a stage in the folder of another build."""

    place: Path
    records: Mapping[str, StageRecord]
    """By name of the part."""

    @property
    def files(self) -> list[FileRecord]:
        """The files of all parts."""
        return [file for record in self.records.values() for file in record.files]

    def link(self, folder: Path, files: FileRecords) -> bool:
        """Link the files into a folder; say whether they are there now.

        Args:
            folder: Where they go.
            files: The digests of the files in that folder.
        """
        try:
            with OutputFiles() as staged:
                for file in self.files:
                    path = self.place / file.name
                    place = staged.reserve(folder / path.name)
                    # onnx refuses data files that have two names.
                    copy_data(path, place) if path.suffix == ".data" else link_or_copy(path, place)
                staged.commit()
        except OSError:
            return False  # it is being replaced just now: ours is made anew
        return not files.first_changed(self.files)


class StageStore:
    """The results of stages in a cache.

    A note per result names its folder. Its files are linked or copied from there, and are used only if their digests
    are as noted.
    """

    def __init__(self, root: Path) -> None:
        """Look below ``root``, the folder of the cache."""
        self._notes = root / "stages"
        self.statistics = root / "statistics"
        """Statistics of activations, which builds of other placements or precisions of one model share."""

    def add(self, records: Mapping[str, StageRecord], folder: Path) -> None:
        """Note where a result is.

        Args:
            records: Name of the part → its record; the export makes all parts at once, another stage one.
            folder: Where the files are.
        """
        origin = next(iter(records.values())).origin
        assert origin is not None  # only results are added
        note = {
            "folder": str(folder),
            "parts": {name: record.model_dump(mode="json") for name, record in records.items()},
        }
        # A cache that cannot be written to only costs time.
        with contextlib.suppress(WriteError, OSError), unrecorded():
            write_atomically(self._note_path(origin), json.dumps(note))

    def find(
        self, origin: Origin, folder: Path, *, accepts: Callable[[Sequence[str]], bool] = lambda _parts: True
    ) -> StoredResult | None:
        """Return a result of this origin whose files are as noted; changes nothing.

        Args:
            origin: What the result has to depend on.
            folder: Where it is wanted; a result that is there already is none of another build.
            accepts: Says whether a result of these parts is what was looked for.
        """
        try:
            note = read_json_file(self._note_path(origin))
            noted = note["parts"] if "parts" in note else {ONLY_PART: note["record"]}
            records = {name: StageRecord.model_validate_json(json.dumps(record)) for name, record in noted.items()}
            place = Path(note["folder"]).resolve()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pydantic.ValidationError):
            return None
        found = StoredResult(place, records)
        is_usable = all(record.origin == origin for record in records.values()) and accepts(tuple(records))
        return found if is_usable and place != folder and not FileRecords(place).first_changed(found.files) else None

    def _note_path(self, origin: Origin) -> Path:
        return self._notes / f"{digest([_KEY_VERSION, origin.model_dump(mode='json')])}.json"


TOOL_NAME = "winml-modelkit"
FROM_CACHE = "from the cache"
"""Why a result is there that this folder's builds did not make."""

_DISPLAYED_LENGTH = 24
"""Characters of a value that are shown; a digest says nothing to people."""


@dataclass(frozen=True)
class BuildJob:
    """One build in a folder it holds."""

    plan: BuildPlan
    folder: BuildFolder
    identity: ModelIdentity
    """The model it starts from."""
    stages: tuple[Stage, ...]
    rebuild: bool
    """Run every stage, also those that are up to date."""
    store: StageStore | None
    """Results of other builds."""
    on_step: Callable[[StepEvent], None] | None
    """Told about the steps inside a stage."""


@dataclass
class BuiltPart:
    """One part of the model, as far as it is built."""

    name: str
    of_several: bool
    current: Path | None
    """Result of the stages so far; None before the first."""
    current_files: tuple[FileRecord, ...] = ()
    """Its files; empty where it is the model the build starts from."""
    records: list[StageRecord] = field(default_factory=list)

    def add(self, record: StageRecord, folder: Path) -> None:
        """Take the result of the next stage."""
        self.records.append(record)
        if record.files:
            self.current, self.current_files = folder / record.files[0].name, record.files


class StageRunner:
    """Runs the stages of one build."""

    def __init__(self, job: BuildJob, files: FileRecords, earlier: BuildManifest | None) -> None:
        """Prepare for a build.

        Args:
            job: The build.
            files: The files of its folder.
            earlier: What the build before left there.
        """
        self._job = job
        self._files = files
        self._earlier = earlier

    def run(self, stage: Stage, part: BuiltPart | None) -> dict[str, StageRecord]:
        """Run a stage or reuse its result.

        Args:
            stage: The stage.
            part: What it changes; None for a stage that makes the graphs of all parts.

        Returns:
            Name of the part → what became of the stage.

        Raises:
            WinMLError: the stage failed.
        """
        earlier, reason = self.earlier_result(stage, part)
        if earlier:
            self._claim_parts(tuple(earlier))
            return _as_reused(earlier, "")
        if stored := self.stored_result(stage, part):
            self._claim_parts(tuple(stored.records))
            if stored.link(self._job.folder.path, self._files):
                return _as_reused(stored.records, FROM_CACHE)
        return self._run_work(stage, part, reason)

    def earlier_result(self, stage: Stage, part: BuiltPart | None) -> tuple[Mapping[str, StageRecord], str]:
        """Return what the build before made with a stage, where that is still right; else why it is made again.

        Changes no file.

        Args:
            stage: The stage.
            part: What it changes; None for a stage that makes the graphs of all parts.

        Returns:
            Name of the part → record, empty where the stage has to run; and the reason, empty where it never ran here.
        """
        if self._job.rebuild:
            return {}, "requested by --rebuild"
        earlier = self._earlier_records(stage, part)
        reason = self._reason_to_run(stage, part, earlier) if earlier else ""
        return ({} if reason else earlier), reason

    def _earlier_records(self, stage: Stage, part: BuiltPart | None) -> dict[str, StageRecord]:
        """Return what the build before made with a stage; empty where a part has no result of it."""
        if self._earlier is None:
            return {}
        records = {
            item.name: item.stage(stage.name) for item in self._earlier.parts if part is None or item.name == part.name
        }
        # A build that left only what is deployed kept no file of a stage.
        results = {name: record for name, record in records.items() if record is not None and record.files}
        return results if len(results) == len(records) else {}

    def _origin_of(self, stage: Stage, part: BuiltPart | None) -> Origin:
        """Return what a result depends on; waits until the model's files are read."""
        return Origin(
            options=json.loads(json.dumps(stage.options(self._job.plan))),
            source=self._input_digests(part),
            versions={TOOL_NAME: __version__, **library_versions(stage.libraries)},
        )

    def _input_digests(self, part: BuiltPart | None) -> dict[str, object]:
        if part is None or not part.current_files:
            return self._job.identity.record
        # The sidecar says when the graph was made, which changes nothing of it.
        graph_files = (record for record in part.current_files if not record.name.endswith(SIDECAR_SUFFIX))
        return {record.name: record.sha256 for record in graph_files}

    def _reason_to_run(self, stage: Stage, part: BuiltPart | None, earlier: Mapping[str, StageRecord]) -> str:
        """Return why earlier results cannot be used, or an empty string."""
        if stage.makes_graph and not self._job.identity.is_repeatable:
            return "a factory may return a different model each time"
        current = self._origin_of(stage, part)
        for record in earlier.values():
            before = record.origin
            assert before is not None  # only results are given
            requested = stage.undo_resolution(current.options, record)
            if changed := _changed_keys(stage.relevant(before.options, earlier), stage.relevant(requested, earlier)):
                return f"options changed: {', '.join(changed)}"
            if before.source != current.source:
                return f"its input changed: {', '.join(_changed_keys(before.source, current.source))}"
            if changed := _changed_keys(before.versions, current.versions):
                return f"versions changed: {', '.join(changed)}"
            if damaged := self._files.first_changed(record.files):
                path = self._job.folder.path / damaged
                self._job.folder.notes.append(f"{path} is missing or damaged: rebuilt.")
                return f"{damaged} was missing or damaged"
        return ""

    def stored_result(self, stage: Stage, part: BuiltPart | None) -> StoredResult | None:
        """Return the result of another build that serves, if there is one; changes no file."""
        job = self._job
        if job.store is None or job.rebuild or (stage.makes_graph and not job.identity.is_repeatable):
            return None
        origin, folder = self._origin_of(stage, part), job.folder.path
        found = job.store.find(origin, folder)
        less = stage.relevant(origin.options, (ONLY_PART,)) if stage.makes_graph else origin.options
        if found is not None or less == origin.options:
            return found
        # What the parts are is not known before they are loaded; what was stored tells.
        return job.store.find(
            origin.model_copy(update={"options": less}),
            folder,
            accepts=lambda names: stage.relevant(origin.options, names) == less,
        )

    def _run_work(self, stage: Stage, part: BuiltPart | None, reason: str) -> dict[str, StageRecord]:
        job = self._job
        output = job.folder.path / stage.file
        if part is not None:
            output = part_path(output, part.name, of_several=part.of_several)
        started = time.perf_counter()
        with PeakMemory() as memory:
            source = None if part is None else part.current
            with rename_options(open_sizes_words(job.plan.config)):
                outcomes = stage.work(
                    StageTask(
                        job.plan,
                        source,
                        output,
                        job.on_step,
                        self._claim_parts,
                        None if job.store is None else job.store.statistics,
                    )
                )
        seconds = time.perf_counter() - started
        origin = self._origin_of(stage, part)
        if part is None:
            relevant = stage.relevant(origin.options, [outcome.part for outcome in outcomes])
            origin = origin.model_copy(update={"options": relevant})

        def record(outcome: StageOutcome) -> StageRecord:
            nodes, coverage = _count_nodes(outcome.files[0])
            return StageRecord(
                name=stage.name,
                status="run",
                reason=reason,
                origin=origin,
                files=self._files.of(outcome.files),
                seconds=round(seconds if outcome.seconds is None else outcome.seconds, 3),
                peak_memory_bytes=memory.largest_bytes,
                nodes=nodes,
                coverage=coverage,
                normalizations=outcome.normalizations,
                summary=outcome.summary,
                assumed=outcome.assumed,
                resolved=dict(outcome.resolved),
                notes=outcome.notes,
            )

        return {outcome.part if part is None else part.name: record(outcome) for outcome in outcomes}

    def _claim_parts(self, names: Sequence[str]) -> None:
        """Let the files of the parts be ours, before they are written.

        Raises:
            OutputExistsError: one is there and no build wrote it.
        """
        if tuple(names) != (ONLY_PART,):
            self._job.folder.claim(names_of(self._job.stages, names, self._job.plan.config))


def _as_reused(records: Mapping[str, StageRecord], reason: str) -> dict[str, StageRecord]:
    return {name: record.model_copy(update={"status": "reused", "reason": reason}) for name, record in records.items()}


def _count_nodes(path: Path) -> tuple[int, CoverageRecord]:
    """Count the nodes and tags of a written file."""
    coverage = measure_coverage(graph_of(read_structure(path), path))
    # A model none of whose nodes has a tag never had a hierarchy, or was told to drop it.
    if coverage.nodes and not coverage.tagged:
        return coverage.nodes, CoverageRecord(tagged=0, percent=None)
    shares = (round(coverage.percent, 2), round(coverage.at_root_percent, 2))
    return coverage.nodes, CoverageRecord(tagged=coverage.tagged, percent=shares[0], at_root_percent=shares[1])


def _changed_keys(before: Mapping[str, object], after: Mapping[str, object], prefix: str = "") -> list[str]:
    """Return the dotted keys at which two JSON objects differ, with their values where these are short."""
    changes = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changed_keys(old, new, f"{prefix}{key}.")
        elif all(value is None or isinstance(value, (bool, int, float)) or _is_short(value) for value in (old, new)):
            changes.append(f"{prefix}{key} {_value_words(old)} → {_value_words(new)}")
        else:
            changes.append(f"{prefix}{key}")
    return changes


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _DISPLAYED_LENGTH


def _value_words(value: object) -> str:
    return "none" if value is None else str(value)
