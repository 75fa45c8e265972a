"""The walk over the stages of a build: which earlier result is reused, and which stage has to run.

An earlier result is used again if options, input and libraries are those it was made with, and its files are as it
wrote them. Results of other builds come from the cache. ``build.py`` runs the stages that have to; ``planned_build.py``
lists them.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from winml.modelkit.builds.cache import digest, library_versions
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
from winml.modelkit.onnx.files.named_paths import unrecorded
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import copy_data, link_or_copy
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.version import __version__


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
            records = {
                name: StageRecord.model_validate_json(json.dumps(record)) for name, record in note["parts"].items()
            }
            place = Path(note["folder"]).resolve()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pydantic.ValidationError):
            return None
        found = StoredResult(place, records)
        is_usable = all(record.origin == origin for record in records.values()) and accepts(tuple(records))
        return found if is_usable and place != folder and not FileRecords(place).first_changed(found.files) else None

    def _note_path(self, origin: Origin) -> Path:
        return self._notes / f"{digest(origin.model_dump(mode='json'))}.json"


_FROM_CACHE = "from the cache"
"""Why a result is there that this folder's builds did not make."""

_DISPLAYED_LENGTH = 24
"""Characters of a value that are shown; a digest says nothing to people."""


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


class StageWalk(ABC):
    """One build, stage by stage. A subclass does the work of a stage, or only writes down what it would do.

    Attributes:
        plan: The build.
        folder: The folder that it is made in.
        identity: The model that it starts from.
        stages: The stages, in order; those that another stage does in memory among them.
        store: Results of other builds; None: there are none.
        earlier: Manifest of the build before in the folder.
        files: Digests of the files of the folder.
        layout: Names of the files of the finished folder.
        companions: Files of the checkpoint that come along.
        parts: The parts of the model; known once its graphs are.
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
        """Begin before the first stage; ``rebuild`` runs every stage, also those that are up to date."""
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
        # An exported graph is handed over in memory, unless a file of it is there already.
        if handed_over != self.stages and not all(self.earlier_result(stage, None)[0] for stage in exports):
            self.stages = handed_over

    def walk_stage(self, stage: Stage) -> None:
        """Run or reuse a stage for every part; those that are finished are kept if another fails."""
        skipped = skip_reason(stage, self.plan)
        if not self.parts and (skipped or not stage.makes_graph):
            self.parts = [BuiltPart(ONLY_PART, of_several=False, current=self.plan.onnx_path)]
        if skipped:
            for part in self.parts:
                part.records.append(StageRecord(name=stage.name, status="skipped", reason=skipped))
        elif stage.makes_graph:
            records = self.find_or_run(stage, None)
            before = self.parts[0].records if self.parts else []
            self.parts = [BuiltPart(name, name != ONLY_PART, current=None, records=[*before]) for name in records]
            self.keep_records(records)
        else:
            for part in self.parts:
                self.keep_records(self.find_or_run(stage, part))

    def find_or_run(self, stage: Stage, part: BuiltPart | None) -> Mapping[str, StageRecord]:
        """Return the results of a stage by name of the part: of an earlier build, of the cache, or of a run.

        Args:
            stage: The stage.
            part: What it changes; None for a stage that makes the graphs of all parts.

        Raises:
            WinMLError: the stage failed.
        """
        earlier, reason = self.earlier_result(stage, part)
        if earlier:
            self.claim_parts(tuple(earlier))
            return _as_reused(earlier, "")
        if stored := self.stored_result(stage, part):
            self.claim_parts(tuple(stored.records))
            if self.take(stored):
                return _as_reused(stored.records, _FROM_CACHE)
        return self.run_stage(stage, part, reason)

    @abstractmethod
    def run_stage(self, stage: Stage, part: BuiltPart | None, reason: str) -> Mapping[str, StageRecord]:
        """Do the work of a stage whose result is not there, or list it; ``reason`` says why an earlier one is none."""

    @abstractmethod
    def take(self, stored: StoredResult) -> bool:
        """Take a result of another build into the folder; False if it is gone meanwhile."""

    @abstractmethod
    def claim_parts(self, names: Sequence[str]) -> None:
        """Note the names of the parts, before files of them are written."""

    def keep_records(self, records: Mapping[str, StageRecord]) -> None:
        """Add the results of a stage to the parts."""
        for part in self.parts:
            if part.name in records:
                part.add(records[part.name], self.folder.path)

    def reusable_model(self, part: BuiltPart) -> PlacedModel | None:
        """Return the files of a finished part where they are the result already: a session may have them open."""
        earlier = self.earlier.part(part.name) if self.earlier is not None else None
        if self.earlier is None or earlier is None or not earlier.model:
            return None
        is_same = earlier.last_files == part.current_files and self.earlier.input == self.input_record
        is_same = is_same and earlier.model[0].name == self.layout.model_name(part)
        is_same = is_same and self.layout.names_data_of([file.name for file in earlier.model])
        if not is_same or part.has_run:
            return None
        retained = PlacedModel(earlier.model, earlier.sidecar)
        is_described = (retained.sidecar is not None) == (part.exported is not None)
        return retained if is_described and not self.files.first_changed(retained.all_files) else None

    @property
    def input_record(self) -> dict[str, object]:
        """The model that the build starts from, as the manifest states it."""
        return {"model": self.plan.request.model, **self.identity.record}

    def earlier_result(self, stage: Stage, part: BuiltPart | None) -> tuple[Mapping[str, StageRecord], str]:
        """Return what the build before made with a stage, where that is still right; else why it is made again.

        Changes no file.

        Args:
            stage: The stage.
            part: What it changes; None for a stage that makes the graphs of all parts.

        Returns:
            Name of the part → record, empty where the stage has to run; and the reason, empty where it never ran here.
        """
        if self._rebuild:
            return {}, f"requested by {opt.rebuild}"
        earlier = self._earlier_records(stage, part)
        reason = self._reason_to_run(stage, part, earlier) if earlier else ""
        return ({} if reason else earlier), reason

    def _earlier_records(self, stage: Stage, part: BuiltPart | None) -> dict[str, StageRecord]:
        """Return what the build before made with a stage; empty where a part has no result of it."""
        if self.earlier is None:
            return {}
        records = {
            item.name: item.stage(stage.name) for item in self.earlier.parts if part is None or item.name == part.name
        }
        # A build that left only what is deployed kept no file of a stage.
        results = {name: record for name, record in records.items() if record is not None and record.files}
        return results if len(results) == len(records) else {}

    def origin_of(self, stage: Stage, part: BuiltPart | None) -> Origin:
        """Return what a result depends on; waits until the model's files are read."""
        return Origin(
            options=json.loads(json.dumps(stage.options(self.plan))),
            source=self._input_digests(part),
            versions={TOOL_NAME: __version__, **library_versions(stage.libraries)},
        )

    def _input_digests(self, part: BuiltPart | None) -> dict[str, object]:
        if part is None or not part.current_files:
            return self.identity.record
        # The sidecar says when the graph was made, which changes nothing of it.
        graph_files = (record for record in part.current_files if not record.name.endswith(SIDECAR_SUFFIX))
        return {record.name: record.sha256 for record in graph_files}

    def _reason_to_run(self, stage: Stage, part: BuiltPart | None, earlier: Mapping[str, StageRecord]) -> str:
        """Return why earlier results cannot be used, or an empty string."""
        if stage.makes_graph and not self.identity.is_repeatable:
            return "a factory may return a different model each time"
        current = self.origin_of(stage, part)
        for record in earlier.values():
            before = record.origin
            assert before is not None  # only results are given
            requested = undo_export_resolution(current.options, record)
            stated = with_new_defaults(before.options, requested)
            if changed := _changed_keys(relevant_options(stated, earlier), relevant_options(requested, earlier)):
                return f"options changed: {', '.join(changed)}"
            if before.source != current.source:
                return f"its input changed: {', '.join(_changed_keys(before.source, current.source))}"
            if changed := _changed_keys(before.versions, current.versions):
                return f"versions changed: {', '.join(changed)}"
            if damaged := self.files.first_changed(record.files):
                path = self.folder.path / damaged
                self.folder.notes.append(f"{path} is missing or damaged: rebuilt.")
                return f"{damaged} was missing or damaged"
        return ""

    def stored_result(self, stage: Stage, part: BuiltPart | None) -> StoredResult | None:
        """Return the result of another build that serves, if there is one; changes no file."""
        if self.store is None or self._rebuild or (stage.makes_graph and not self.identity.is_repeatable):
            return None
        origin, folder = self.origin_of(stage, part), self.folder.path
        found = self.store.find(origin, folder)
        less = relevant_options(origin.options, (ONLY_PART,))
        if found is not None or less == origin.options:
            return found
        # What the parts are is not known before they are loaded; what was stored tells.
        return self.store.find(
            origin.model_copy(update={"options": less}),
            folder,
            accepts=lambda names: relevant_options(origin.options, names) == less,
        )


def _as_reused(records: Mapping[str, StageRecord], reason: str) -> dict[str, StageRecord]:
    return {name: record.model_copy(update={"status": "reused", "reason": reason}) for name, record in records.items()}


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
