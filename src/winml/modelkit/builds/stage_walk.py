"""The walk over the stages of a build: decides for each stage between reuse of an earlier result and a run.

An earlier result is reused if its options, input, libraries and files are unchanged. Results of other builds come from
the cache. ``build.py`` runs the remaining stages; ``planned_build.py`` lists them.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from winml.modelkit.builds.cache import digest
from winml.modelkit.builds.folder import BuildFolder
from winml.modelkit.builds.identity import FileRecords, ModelIdentity
from winml.modelkit.builds.in_memory_stages import handed_over_stages
from winml.modelkit.builds.layouts.folder_layout import BuildCompanions, FolderLayout
from winml.modelkit.builds.manifest_records import TOOL_NAME, FileRecord, Origin, StageRecord
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stages import (
    BuiltPart,
    Stage,
    relevant_options,
    skip_reason,
    undo_export_resolution,
    with_new_defaults,
)
from winml.modelkit.errors import WriteError, opt
from winml.modelkit.file_names import ONLY_PART, SIDECAR_SUFFIX
from winml.modelkit.onnx.files.named_paths import pause_recording
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import copy_data, link_or_copy
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.version import __version__, library_versions


@dataclass(frozen=True)
class StoredResult:
    """The result of a stage in the folder of another build."""

    folder: Path
    records: Mapping[str, StageRecord]
    """Name of the part → record of the stage."""

    @property
    def files(self) -> list[FileRecord]:
        """The files of all parts."""
        return [file for record in self.records.values() for file in record.files]

    def link(self, folder: Path, files: FileRecords) -> bool:
        """Link the files into a folder; return True if all have the recorded digests.

        Args:
            folder: Target folder.
            files: The digests of the files in that folder.
        """
        try:
            with OutputFiles() as staged:
                for file in self.files:
                    path = self.folder / file.name
                    target = staged.reserve(folder / path.name)
                    # onnx refuses data files that have two names.
                    copy_data(path, target) if path.suffix == ".data" else link_or_copy(path, target)
                staged.commit()
        except OSError:
            return False  # another build replaces the result now: the stage runs here
        return not files.first_changed(self.files)


class StageStore:
    """The results of stages in a cache.

    A note per result names its folder. The files are linked or copied from the folder if their digests are unchanged.
    """

    def __init__(self, root: Path) -> None:
        """Set the folders of notes and statistics below ``root``, the folder of the cache."""
        self._notes = root / "stages"
        self.statistics = root / "statistics"
        """Folder with statistics of activations, shared by builds of a model with other selections or precisions."""

    def add(self, records: Mapping[str, StageRecord], folder: Path) -> None:
        """Note the folder of a result.

        Args:
            records: Name of the part → its record: all parts of an export, one part of another stage.
            folder: Folder of the files.
        """
        origin = next(iter(records.values())).origin
        assert origin is not None  # only results are added
        note = {
            "folder": str(folder),
            "parts": {name: record.model_dump(mode="json") for name, record in records.items()},
        }
        # A read-only cache only costs time.
        with contextlib.suppress(WriteError, OSError), pause_recording():
            write_atomically(self._note_path(origin), json.dumps(note))

    def find(
        self, origin: Origin, folder: Path, *, accepts: Callable[[Sequence[str]], bool] = lambda _parts: True
    ) -> StoredResult | None:
        """Return a result of this origin with unchanged files, or ``None``; changes no file.

        Args:
            origin: Required origin of the result.
            folder: Target folder; a result in this folder is ignored.
            accepts: Returns True if a result with parts of these names is accepted.
        """
        try:
            note = read_json_file(self._note_path(origin))
            records = {
                name: StageRecord.model_validate_json(json.dumps(record)) for name, record in note["parts"].items()
            }
            source = Path(note["folder"]).resolve()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pydantic.ValidationError):
            return None
        result = StoredResult(source, records)
        is_usable = source != folder and all(old.origin == origin for old in records.values()) and accepts([*records])
        return result if is_usable and not FileRecords(source).first_changed(result.files) else None

    def _note_path(self, origin: Origin) -> Path:
        """Return the path of the note on a result with this origin."""
        return self._notes / f"{digest(origin.model_dump(mode='json'))}.json"


_FROM_CACHE = "from the cache"
"""Reason in the record of a result that another folder's build made."""

_MAX_VALUE_LENGTH = 24
"""Maximum characters of a value in messages; longer values such as digests are omitted."""


@dataclass(frozen=True)
class PlacedModel:
    """The files of a finished part."""

    files: tuple[FileRecord, ...] = ()
    """The model and its data files."""
    sidecar: FileRecord | None = None

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        """The files, with the sidecar if present."""
        return self.files if self.sidecar is None else (*self.files, self.sidecar)


class StageWalk(ABC):
    """One build, stage by stage. A subclass runs a stage, or only lists its files.

    Attributes:
        plan: The build.
        folder: The folder that it is made in.
        identity: The model that it starts from.
        stages: The stages, in order, including those that another stage runs in memory.
        store: Results of other builds, or None.
        earlier: Manifest of the earlier build in the folder, or None.
        files: Digests of the files of the folder.
        layout: Names of the files of the finished folder.
        companions: Companion files of the checkpoint.
        parts: The parts of the model; empty until its graphs are known.
    """

    def __init__(
        self,
        plan: BuildPlan,
        folder: BuildFolder,
        identity: ModelIdentity,
        stages: Sequence[Stage],
        *,
        rebuild: bool,
        store: StageStore | None,
    ) -> None:
        """Start before the first stage; ``rebuild`` runs every stage, including up-to-date ones."""
        self.plan, self.folder, self.identity, self.store = plan, folder, identity, store
        self._rebuild = rebuild
        self.earlier = folder.manifest
        self.files = FileRecords(folder.path)
        self.layout = FolderLayout(plan, identity)
        self.companions = BuildCompanions(folder, self.layout.copied)
        self.parts: list[BuiltPart] = []
        self.stages = tuple(stages)
        handed_over = handed_over_stages(stages, plan)
        exports = [stage for stage in stages if stage.makes_graph]
        # An exported graph is handed over in memory, unless a file of it exists.
        if handed_over != self.stages and not all(self.earlier_result(stage, None)[0] for stage in exports):
            self.stages = handed_over

    def walk_stage(self, stage: Stage) -> None:
        """Run or reuse a stage for every part; finished parts are kept if another part fails."""
        skipped = skip_reason(stage, self.plan)
        if not self.parts and (skipped or not stage.makes_graph):
            self.parts = [BuiltPart(ONLY_PART, of_several=False, current=self.plan.onnx_path)]
        if skipped:
            for part in self.parts:
                part.records.append(StageRecord(name=stage.name, status="skipped", reason=skipped))
        elif stage.makes_graph:
            records = self.find_or_run(stage, None)
            earlier = self.parts[0].records if self.parts else []
            self.parts = [BuiltPart(name, name != ONLY_PART, current=None, records=[*earlier]) for name in records]
            self.keep_records(records)
        elif self.joins_parts(stage):
            self.keep_records(self.find_or_run(stage, None))
        else:
            for part in self.parts:
                if idle := stage.idle_for(self.plan.config, part.name):
                    part.records.append(StageRecord(name=stage.name, status="skipped", reason=idle))
                else:
                    self.keep_records(self.find_or_run(stage, part))

    def joins_parts(self, stage: Stage) -> bool:
        """Return True if a stage changes several parts together."""
        return len(self.parts) > 1 and stage.joins_parts(self.plan.config)

    def find_or_run(self, stage: Stage, part: BuiltPart | None) -> Mapping[str, StageRecord]:
        """Return name of the part → result of a stage, from an earlier build, the cache, or a run.

        Args:
            stage: The stage.
            part: The part to change; None for a stage that makes or changes the graphs of all parts.

        Raises:
            WinMLError: the stage failed.
        """
        earlier, reason = self.earlier_result(stage, part)
        if earlier:
            self.claim_parts(tuple(earlier))
            return _mark_reused(earlier, "")
        if stored := self.stored_result(stage, part):
            self.claim_parts(tuple(stored.records))
            if self.take(stored):
                return _mark_reused(stored.records, _FROM_CACHE)
        return self.run_stage(stage, part, reason)

    @abstractmethod
    def run_stage(self, stage: Stage, part: BuiltPart | None, reason: str) -> Mapping[str, StageRecord]:
        """Run a stage without a usable result, or list it; ``reason`` explains why an earlier result is not reused."""

    @abstractmethod
    def take(self, stored: StoredResult) -> bool:
        """Copy a result of another build into the folder; False if it disappeared meanwhile."""

    @abstractmethod
    def claim_parts(self, names: Sequence[str]) -> None:
        """Note the names of the parts, before their files are written."""

    def keep_records(self, records: Mapping[str, StageRecord]) -> None:
        """Add the results of a stage to the parts."""
        for part in self.parts:
            if part.name in records:
                part.add(records[part.name], self.folder.path)

    def reusable_model(self, part: BuiltPart) -> PlacedModel | None:
        """Return the up-to-date files of a finished part, else ``None``: files open in a session are not replaced."""
        earlier = self.earlier.part(part.name) if self.earlier is not None else None
        if self.earlier is None or earlier is None or not earlier.model:
            return None
        is_same = earlier.last_files == part.current_files and self.earlier.input == self.input_record
        is_same = is_same and earlier.model[0].name == self.layout.model_name(part)
        is_same = is_same and self.layout.names_data_of([file.name for file in earlier.model])
        if not is_same or part.has_run:
            return None
        reusable = PlacedModel(earlier.model, earlier.sidecar)
        is_described = (reusable.sidecar is not None) == (part.exported is not None)
        return reusable if is_described and not self.files.first_changed(reusable.all_files) else None

    @property
    def input_record(self) -> dict[str, object]:
        """The source model, as recorded in the manifest."""
        return {"model": self.plan.request.model, **self.identity.record}

    def earlier_result(self, stage: Stage, part: BuiltPart | None) -> tuple[Mapping[str, StageRecord], str]:
        """Return the reusable records of the earlier build for a stage, or the reason to run it again.

        Changes no file.

        Args:
            stage: The stage.
            part: The part to change; None for a stage that makes the graphs of all parts.

        Returns:
            Name of the part → record, ``{}`` if the stage has to run; and the reason, ``""`` if it has no earlier
                result.
        """
        if self._rebuild:
            return {}, f"requested by {opt.rebuild}"
        earlier = self._earlier_records(stage, part)
        reason = self._reason_to_run(stage, part, earlier) if earlier else ""
        return ({} if reason else earlier), reason

    def _earlier_records(self, stage: Stage, part: BuiltPart | None) -> dict[str, StageRecord]:
        """Return name of the part → record of a stage in the earlier build; ``{}`` if a part has no result of it."""
        if self.earlier is None:
            return {}
        records = {
            old.name: old.stage(stage.name) for old in self.earlier.parts if part is None or old.name == part.name
        }
        # A build with ``deploy_only`` kept no file of a stage.
        results = {name: record for name, record in records.items() if record is not None and record.files}
        return results if len(results) == len(records) else {}

    def origin_of(self, stage: Stage, part: BuiltPart | None) -> Origin:
        """Return the origin of a result of a stage; waits until the model's files are read."""
        return Origin(
            options=json.loads(json.dumps(stage.options(self.plan))),
            source=self._input_digests(self.parts if self.joins_parts(stage) else () if part is None else (part,)),
            versions={TOOL_NAME: __version__, **library_versions(stage.libraries)},
        )

    def _input_digests(self, parts: Sequence[BuiltPart]) -> dict[str, object]:
        """Return name → digest of the input files of a stage; before any result, the identity of the source model."""
        files = [record for part in parts for record in part.current_files]
        if not files:
            return self.identity.record
        # The sidecar contains the time of the export, which does not affect the graph.
        graph_files = (record for record in files if not record.name.endswith(SIDECAR_SUFFIX))
        return {record.name: record.sha256 for record in graph_files}

    def _reason_to_run(self, stage: Stage, part: BuiltPart | None, earlier: Mapping[str, StageRecord]) -> str:
        """Return the reason why earlier results cannot be reused; ``""`` if they can.

        A missing or damaged file is noted in the folder as well.

        Args:
            stage: The stage.
            part: The part of the model; `None` if the stage works on the whole model.
            earlier: Records of the stage in the earlier build.
        """
        if stage.makes_graph and not self.identity.is_repeatable:
            return "a factory may return a different model each time"
        current = self.origin_of(stage, part)
        for record in earlier.values():
            origin = record.origin
            assert origin is not None  # skipped stages have no files
            new = undo_export_resolution(current.options, record)
            old = with_new_defaults(origin.options, new)
            if changes := _changed_keys(relevant_options(old, earlier), relevant_options(new, earlier)):
                return f"options changed: {', '.join(changes)}"
            if origin.source != current.source:
                return f"its input changed: {', '.join(_changed_keys(origin.source, current.source))}"
            if changes := _changed_keys(origin.versions, current.versions):
                return f"versions changed: {', '.join(changes)}"
            if damaged := self.files.first_changed(record.files):
                path = self.folder.path / damaged
                self.folder.notes.append(f"{path} is missing or damaged: rebuilt.")
                return f"{damaged} was missing or damaged"
        return ""

    def stored_result(self, stage: Stage, part: BuiltPart | None) -> StoredResult | None:
        """Return a usable result of another build, or ``None``; changes no file."""
        if self.store is None or self._rebuild or (stage.makes_graph and not self.identity.is_repeatable):
            return None
        origin, folder = self.origin_of(stage, part), self.folder.path
        result = self.store.find(origin, folder)
        reduced_options = relevant_options(origin.options, (ONLY_PART,))
        if result is not None or reduced_options == origin.options:
            return result
        # The parts are unknown before the model is loaded; the stored record names them.
        return self.store.find(
            origin.model_copy(update={"options": reduced_options}),
            folder,
            accepts=lambda names: relevant_options(origin.options, names) == reduced_options,
        )


def _mark_reused(records: Mapping[str, StageRecord], reason: str) -> dict[str, StageRecord]:
    """Return records with status ``reused`` and a reason."""
    return {name: record.model_copy(update={"status": "reused", "reason": reason}) for name, record in records.items()}


def _changed_keys(before: Mapping[str, object], after: Mapping[str, object], prefix: str = "") -> list[str]:
    """Return the dotted keys of different values in two JSON objects, after ``prefix``; with the values if short."""
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
    return isinstance(value, str) and len(value) <= _MAX_VALUE_LENGTH


def _value_words(value: object) -> str:
    return "none" if value is None else str(value)
