"""Stored results of a long run, for resuming.

A JSON file with the results and the request they depend on, and a lock on its folder. Results of another request are
never used. Independent of the kind of results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import filelock

from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.onnx.files.output_files import OutputFiles, write_error, write_errors_of
from winml.modelkit.options import read_json_file

_T = TypeVar("_T")


def write_atomically(path: Path, text: str) -> None:
    """Write a small file atomically: a concurrent reader finds the earlier or the new content, complete.

    Raises:
        WriteError: its folder cannot be written to.
        OSError: the file cannot be written.
    """
    with OutputFiles() as files:
        files.write_text(path, text)
        files.commit()


@dataclass(frozen=True)
class OtherRequest:
    """Reason why the results in a file do not apply to a run."""

    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Key of the request → its earlier and current value; empty if the file cannot be read."""


class ResumableResults:
    """Results of one run in a JSON file: ``schema_version``, ``request``, and the results."""

    def __init__(self, path: Path, request: Mapping[str, Any], schema_version: int = 1) -> None:
        """Prepare the request without reading.

        Args:
            path: The file.
            request: Request that the results depend on, JSON-ready.
            schema_version: Raised when earlier results must not be used any more.
        """
        self.path = path
        self._head = {"schema_version": schema_version, "request": json.loads(json.dumps(request))}

    def read(self, parse: Callable[[dict[str, Any]], _T]) -> _T | OtherRequest | None:
        """Return the stored results of the same request; None if the file does not exist.

        Args:
            parse: Returns the results of the whole record. Its ConfigError, ValueError, LookupError, TypeError or
                AttributeError marks a damaged file.
        """
        try:
            record = read_json_file(self.path)
            if record["schema_version"] != self._head["schema_version"]:
                return OtherRequest()
            earlier, now = dict(record["request"]), self._head["request"]
            results = parse(record)
        except FileNotFoundError:
            return None
        except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError):
            return OtherRequest()
        changed = {key: (earlier.get(key), now.get(key)) for key in {**earlier, **now}}
        changed = {key: (then, value) for key, (then, value) in changed.items() if then != value}
        return OtherRequest(changed) if changed else results

    def write(self, results: Mapping[str, Any], *, indent: int | None = None) -> None:
        """Write the results, completely on disk when this returns.

        Raises:
            WriteError: the file cannot be written.
        """
        with write_errors_of(self.path):
            write_atomically(self.path, f"{json.dumps({**self._head, **results}, indent=indent)}\n")


@contextmanager
def locked_folder(folder: Path, lock_name: str, run: str) -> Iterator[None]:
    """Lock a folder for one run; create it if missing. The lock ends with the process.

    Args:
        folder: The folder.
        lock_name: Name of the file in it that is locked. The file stays: a lock on a removed file excludes no other
            process.
        run: Name of the run, for messages: ``tuning``.

    Raises:
        UsageError: another run holds the lock.
        WriteError: the folder cannot be created or written to.
    """
    lock = filelock.FileLock(folder / lock_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UsageError(f"another {run} uses {folder}", hint="Wait for it to end, or choose another folder.") from None
    except OSError as error:
        raise write_error(folder, error) from error
    try:
        yield
    finally:
        lock.release(force=True)
