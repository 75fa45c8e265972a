"""Finds the result of a stage that some build in the cache made already.

A note per result names the folder it is in. Its files are linked or copied from there, and are used only if their
digests are as noted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pydantic

from winml.modelkit.builds.cache import digest, write_atomically
from winml.modelkit.builds.file_records import FileRecords
from winml.modelkit.errors import WriteError
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.graph.files.committed import unrecorded
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.placing import copy_data, link_or_copy
from winml.modelkit.options import read_json_file
from winml.modelkit.results.build_manifest import Origin, StageRecord

__all__ = ["StageStore"]


_KEY_VERSION = 1
"""Part of every key. Raised when results noted before must not be used any more."""


class StageStore:
    """The results of stages in a cache."""

    def __init__(self, root: Path) -> None:
        """Look below ``root``, the folder of the cache."""
        self._notes = root / "stages"

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

    def take(
        self,
        origin: Origin,
        folder: Path,
        files: FileRecords,
        on_parts: Callable[[Sequence[str]], None],
        *,
        accepts: Callable[[Sequence[str]], bool] = lambda _parts: True,
    ) -> dict[str, StageRecord]:
        """Link a result into a folder, if there is one of this origin and its files are as noted.

        Args:
            origin: What the result has to depend on.
            folder: Where its files go.
            files: The digests of the files in that folder.
            on_parts: Called with the names of the parts before anything is written.
            accepts: Says whether a result of these parts is what was looked for.

        Returns:
            Name of the part → its record; empty where there is no result.
        """
        try:
            note = read_json_file(self._note_path(origin))
            noted = note["parts"] if "parts" in note else {ONLY_PART: note["record"]}
            records = {name: StageRecord.model_validate_json(json.dumps(record)) for name, record in noted.items()}
            place = Path(note["folder"]).resolve()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pydantic.ValidationError):
            return {}
        kept = [file for record in records.values() for file in record.files]
        is_usable = all(record.origin == origin for record in records.values())
        is_usable = is_usable and accepts(tuple(records))
        if not is_usable or place == folder or FileRecords(place).first_changed(kept):
            return {}
        on_parts(tuple(records))
        try:
            _link_all((place / file.name for file in kept), folder)
        except OSError:
            return {}  # it is being replaced just now: ours is made anew
        return {} if files.first_changed(kept) else records

    def _note_path(self, origin: Origin) -> Path:
        return self._notes / f"{digest([_KEY_VERSION, origin.model_dump(mode='json')])}.json"


def _link_all(paths: Iterable[Path], folder: Path) -> None:
    with OutputFiles() as staged:
        for path in paths:
            place = staged.reserve(folder / path.name)
            # onnx refuses data files that have two names.
            copy_data(path, place) if path.suffix == ".data" else link_or_copy(path, place)
        staged.commit()
