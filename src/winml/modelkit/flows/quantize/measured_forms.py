"""Keeps what was measured of quantized forms of a graph, so that an interrupted run is taken up where it ended.

Each measurement is on disk before the next begins. A file that was written for another model or other options is never
used. Measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.files.content_digest import hash_file
from winml.modelkit.graph.files.output_files import OutputFiles, refuse_existing
from winml.modelkit.graph.files.placing import external_files
from winml.modelkit.options import read_json_file
from winml.modelkit.results.quantization_sensitivity import MeasuredForm

__all__ = ["MeasuredForms", "content_digest", "file_digest", "form_key"]

_HINT = "Repeat those options to go on, or start anew with --overwrite."


def form_key(nodes: Iterable[str]) -> str:
    """Return the key of the form of a graph in which these nodes are quantized and no others."""
    return hashlib.sha256("\n".join(sorted(nodes)).encode()).hexdigest()


def content_digest(model: Path) -> str:
    """Return a digest of a model file and of its data files: 64 hexadecimal digits.

    Raises:
        InputError: the file is no model, or its data is missing.
    """
    return hashlib.sha256("".join(map(file_digest, (model, *external_files(model)))).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return a digest of what a file holds: 64 hexadecimal digits.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return hash_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Give the path of a file.") from error


class MeasuredForms:
    """Measurements by key; kept in a file, where one is given."""

    def __init__(self, path: Path | None, request: Mapping[str, Any], *, overwrite: bool) -> None:
        """Read what an interrupted run measured.

        Args:
            path: The file. None: nothing is kept.
            request: What the measurements depend on, JSON-ready.
            overwrite: Start anew where the file belongs to another request, rather than refuse it.

        Raises:
            UsageError: it belongs to another request; names what differs.
            WriteError: it cannot be written where it is.
        """
        self._path = path
        self._request = json.loads(json.dumps(request))
        self._lock = threading.Lock()
        self._forms: dict[str, MeasuredForm] = {}
        if path is not None:
            refuse_existing([path], overwrite=True)
            self._forms = self._read(path, overwrite=overwrite) if path.exists() else {}
        self.resumed = len(self._forms)
        """Number of measurements that were there already."""

    def get(self, key: str) -> MeasuredForm | None:
        """Return a measurement; None where there is none yet."""
        return self._forms.get(key)

    def put(self, key: str, form: MeasuredForm) -> None:
        """Add a measurement; it is on disk when this returns.

        Raises:
            WriteError: it cannot be written.
        """
        with self._lock:
            self._forms[key] = form
            if self._path is None:
                return
            record = {
                "schema_version": 1,
                "request": self._request,
                "measured": {name: item.as_record() for name, item in self._forms.items()},
            }
            with OutputFiles() as files:
                files.reserve(self._path).write_text(json.dumps(record), encoding="utf-8")
                files.commit(overwrite=True)

    def remove(self) -> None:
        """Remove the file: the answer is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path, *, overwrite: bool) -> dict[str, MeasuredForm]:
        try:
            record = read_json_file(path)
            earlier = dict(record["request"])
            forms = {key: MeasuredForm.from_record(item) for key, item in record["measured"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if overwrite:
                return {}
            raise UsageError(
                f"{path} is in the way: it holds no measurements that can be read",
                hint="Remove it, or start anew with --overwrite.",
            ) from error
        different = [key for key in {**earlier, **self._request} if earlier.get(key) != self._request.get(key)]
        if not different:
            return forms
        if overwrite:
            return {}
        words = ", ".join(f"{key} was {earlier.get(key)!r}, now {self._request.get(key)!r}" for key in different)
        raise UsageError(f"{path} holds measurements of a run with other options: {words}", hint=_HINT)
