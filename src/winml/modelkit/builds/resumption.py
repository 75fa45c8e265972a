"""What do kept results depend on? An interrupted run of many measurements goes on only where all of it is as it was."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from winml.modelkit.builds.cache import digest, library_versions
from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import WinMLError
from winml.modelkit.version import __version__

__all__ = ["place_state", "resume_identity", "tool_versions"]

_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def resume_identity(requested: Mapping[str, object], files: object) -> dict[str, object]:
    """Return all that kept results depend on, JSON-ready: equal where they may be used again.

    Args:
        requested: What is measured, and on what machine.
        files: What the files are that it is measured with: digests of their content, or :func:`place_state`.
    """
    return {**requested, "files": files, "versions": tool_versions()}


def tool_versions() -> dict[str, str]:
    """Return the versions of winml and of the libraries that results depend on."""
    return {"winml-modelkit": __version__, **_installed()}


@functools.cache
def _installed() -> dict[str, str]:
    return library_versions(_LIBRARIES)


def place_state(name: str, is_left_out: Callable[[Path], bool] = lambda _folder: False) -> str | None:
    """Return a digest of the names, sizes and times of change of files; None where there is nothing at that path.

    Nothing of their content is read: it serves where there are too many for that. Of a folder, those in its folders
    count too, hidden ones excepted; of an ONNX file, its data files.

    Args:
        name: Path of a file or folder.
        is_left_out: Whether a folder does not count.
    """
    path = Path(name)
    try:
        files = sorted(_files_below(path, is_left_out)) if path.is_dir() else [path, *_data_files(path)]
        states = [(file, file.stat()) for file in files]
    except OSError:
        return None
    return digest([[file.as_posix(), state.st_size, state.st_mtime_ns] for file, state in states])


def _files_below(folder: Path, is_left_out: Callable[[Path], bool]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if name[0] != "." and not is_left_out(here / name)]
        yield from (here / name for name in names if (here / name).is_file())


def _data_files(path: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights of an ONNX file; none of a damaged one."""
    from winml.modelkit.graph.files.placing import external_files

    try:
        return external_files(path) if is_onnx_path(str(path)) and path.is_file() else ()
    except WinMLError:
        return ()
