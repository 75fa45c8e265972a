"""Location and file format of a dataset, by its path or name.

Checks names only and imports no library, so that requests are refused and saved results are found before any data is
read. The contents of files are read elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winml.modelkit.errors import UsageError, spell
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.samples.media import install_hint

SourceKind = Literal["text", "csv", "json", "parquet", "arrow", "images", "audio", "saved", "hub"]
"""``saved`` is a folder written by ``save_to_disk`` of datasets; the other kinds describe the files in the folder, or
the single file."""

TABLE_SUFFIXES: dict[str, SourceKind] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
"""Suffix → kind, in order of precedence in a folder: a dataset of parquet files may include a JSON file."""
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
AUDIO_SUFFIXES = frozenset({".aiff", ".flac", ".mp3", ".ogg", ".opus", ".wav"})
_SAVED_NAMES = ("dataset_dict.json", "state.json")
DESCRIPTION_NAMES = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "license.txt", "readme.txt"})
"""Files with metadata of a dataset, although their suffixes are those of data."""
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]*\w")
"""Specified: names of repositories on the Hub, ``name`` or ``owner/name``."""
_DRIVE = re.compile(r"[A-Za-z]:")
"""Start of a path with a drive letter."""
DATA_SET_FORMATS = (
    "Pass a .csv, .json, .jsonl, .parquet, .arrow or .txt file, a folder of such files, of images or of audio "
    "files, a folder written by save_to_disk, or the name of a dataset on the Hub."
)
"""Supported formats, for hints."""


@dataclass(frozen=True)
class DataSource:
    """Location of a dataset."""

    kind: SourceKind
    path: Path | None
    """Local file or folder; None for a dataset on the Hub."""
    name: str
    """File name of a path, or the name on the Hub: for output and records, without folders of this machine."""
    config: str | None = None
    """Configuration on the Hub, written after a colon: ``glue:stsb``."""

    @property
    def folder(self) -> Path | None:
        """Folder to which file names in the data are relative; None for a dataset on the Hub."""
        return self.path.parent if self.path is not None and self.path.is_file() else self.path


def find_source(text: str | os.PathLike[str], option: str = "dataset") -> DataSource:
    """Return the dataset of a path or name. An existing local path is never looked up on the Hub.

    Args:
        text: A path; or ``name``, ``owner/name`` or ``owner/name:config`` on the Hub.
        option: Option with the dataset, for messages.

    Raises:
        UsageError: the text is neither a path nor a name on the Hub, or the file format is not supported.
    """
    name_or_path = os.fspath(text)
    path = Path(name_or_path)
    if name_or_path and path.exists():
        return DataSource(_find_kind(path, option), path, path.absolute().name)
    name, _, config = name_or_path.partition(":")
    suffix = Path(name_or_path).suffix.lower()
    is_file_name = suffix in TABLE_SUFFIXES or suffix in IMAGE_SUFFIXES | AUDIO_SUFFIXES | {".npz", ".zip"}
    is_path = bool(_DRIVE.match(name_or_path)) or "\\" in name_or_path or "/" in config
    if is_file_name or is_path or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise UsageError(f"{spell(option)} {name_or_path}: no such file or folder", hint=DATA_SET_FORMATS)
    return DataSource("hub", None, name, config or None)


def source_files(source: DataSource) -> tuple[Path, ...]:
    """Return the local files of a dataset, sorted; ``()`` for a dataset on the Hub."""
    if source.path is None:
        return ()
    return (source.path,) if source.path.is_file() else tuple(sorted(folder_files(source.path)[0]))


def content_digests(name: str) -> dict[str, str]:
    """Return path → digest of the local files of a dataset, relative to its folder."""
    from winml.modelkit.onnx.files.placing import file_digest  # imports onnx

    source = find_source(name)
    root = source.folder or Path()
    return {path.relative_to(root).as_posix(): file_digest(path) for path in source_files(source)}


def _find_kind(path: Path, option: str) -> SourceKind:
    """Return the format of a file, or of the files in a folder.

    Raises:
        UsageError: no file has a supported format.
    """
    if path.is_file():
        kind = TABLE_SUFFIXES.get(path.suffix.lower())
        if kind is None:
            raise UsageError(
                f"{spell(option)} {path}: a file of type {path.suffix or 'none'} is not supported",
                hint=DATA_SET_FORMATS,
            )
        return kind
    if any((path / name).is_file() for name in _SAVED_NAMES):
        return "saved"
    suffixes: set[str] = set()
    for file in folder_files(path)[0]:
        if file.suffix.lower() in IMAGE_SUFFIXES:
            return "images"
        if file.name.lower() not in DESCRIPTION_NAMES:
            suffixes.add(file.suffix.lower())
    if suffixes & AUDIO_SUFFIXES:
        return "audio"
    kind = next((kind for suffix, kind in TABLE_SUFFIXES.items() if suffix in suffixes), None)
    if kind is None:
        suffix_list = ", ".join(sorted(suffix or "no ending" for suffix in suffixes)[:5])
        problem = f"files with {suffix_list} only, which are not supported" if suffixes else "empty folder, no samples"
        raise UsageError(f"{spell(option)} {path}: {problem}", hint=DATA_SET_FORMATS)
    return kind


def folder_files(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the files below a folder that are not hidden, sorted, and the files that must not be read.

    Returns:
        Regular files and links to files within the folder; and file → reason for its refusal: a link out of the
        folder, a broken link, a pipe, a socket, a device. Linked folders are not entered.
    """
    files: list[Path] = []
    refused: dict[Path, str] = {}
    for subfolder, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(subfolder, name)
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    file_below(folder, path.relative_to(folder))
                files.append(path)
            except (OSError, ForeignNameError) as error:
                refused[path] = str(error)
    return files, refused


def refuse_missing_datasets(label: str) -> None:
    """Refuse a request that needs datasets if the package is not installed; does not import it.

    Args:
        label: Start of messages.

    Raises:
        UsageError: its hint states the installation command.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"{label}: requires the package datasets, which is not installed", hint=install_hint())
