"""Has some build in the cache made this result already?

A note per result says in which folder it is; the files are linked or copied from there, and count only if their digests
are as noted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pydantic

from winml.modelkit.builds.cache import digest, write_atomically
from winml.modelkit.builds.file_records import FileRecords
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.placing import link_or_copy
from winml.modelkit.results.build_manifest import MANIFEST_VERSION, Origin, StageRecord

__all__ = ["StageStore"]


class StageStore:
    """The results of stages in a cache."""

    def __init__(self, root: Path) -> None:
        """Look below ``root``, the folder of the cache."""
        self._notes = root / "stages"

    def add(self, record: StageRecord, folder: Path) -> None:
        """Note where a result is."""
        assert record.origin is not None  # only results are added
        note = {"folder": str(folder), "record": record.model_dump(mode="json")}
        # A cache that cannot be written to only costs time.
        with contextlib.suppress(OSError):
            write_atomically(self._note(record.origin), json.dumps(note))

    def take(self, origin: Origin, folder: Path, files: FileRecords) -> StageRecord | None:
        """Link a result into a folder, if there is one of this origin and it is whole.

        Returns:
            Its record, or None.
        """
        try:
            note = json.loads(self._note(origin).read_text(encoding="utf-8"))
            record = StageRecord.model_validate_json(json.dumps(note["record"]))
            place = Path(note["folder"])
        except (OSError, ValueError, KeyError, TypeError, pydantic.ValidationError):
            return None
        if record.origin != origin or place == folder or FileRecords(place).first_changed(record.files):
            return None
        try:
            _link_all((place / file.name for file in record.files), folder)
        except OSError:
            return None  # it is being replaced just now: ours is made anew
        return None if files.first_changed(record.files) else record

    def _note(self, origin: Origin) -> Path:
        return self._notes / f"{digest([MANIFEST_VERSION, origin.model_dump(mode='json')])}.json"


def _link_all(paths: Iterable[Path], folder: Path) -> None:
    with OutputFiles() as staged:
        for path in paths:
            place = staged.stage(folder / path.name)
            # onnx refuses data files that have two names.
            shutil.copyfile(path, place) if path.suffix == ".data" else link_or_copy(path, place)
        staged.commit()
