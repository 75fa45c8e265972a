"""Which files of a folder are the splits of a data set, and how are they read?

By their names, as the datasets library has it; or as ``configs`` in the facts of its ``README.md`` say, whose patterns
are matched with the files below the folder and with nothing else. Reads no data, and imports no library of data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.data_sources import (
    DATA_SET_FORMS,
    DESCRIPTION_NAMES,
    IMAGE_SUFFIXES,
    TABLE_SUFFIXES,
    SourceKind,
    folder_files,
)
from winml.modelkit.file_names import MODEL_CARD_NAME, stays_inside
from winml.modelkit.graph.files.front_matter import FrontMatterError, front_matter_value

__all__ = ["FolderLayout", "read_layout"]

_MOST_CARD_BYTES = 256 * 1024
"""Of ``configs`` and of ``dataset_info``. Chosen: the names of a thousand labels take 40 kB."""
_METADATA_NAMES = frozenset(("metadata.csv", "metadata.jsonl", "metadata.parquet"))
"""Specified: what says more of the images beside it."""
_SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Specified by datasets: split → the words in names of files or folders that mean it."""
_SHARD = re.compile(r"data/(\w+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Specified by datasets: files of splits of any name."""
_SPLIT_NAME = re.compile(r"\w+(?:\.\w+)*")
_FACTS = frozenset(("config_name", "data_files", "data_dir", "default", "version", "description"))
_OPTIONS: Mapping[str, frozenset[str]] = {
    "csv": frozenset(("sep", "delimiter")),
    "json": frozenset(("field",)),
    "images": frozenset(("drop_labels", "drop_metadata")),
}
"""What a config may say of the reading, by the form of the files."""


@dataclass(frozen=True)
class FolderLayout:
    """The files of a data set in a folder."""

    kind: SourceKind
    splits: Mapping[str, tuple[Path, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the builder of datasets."""
    info: Mapping[str, Any] | None = None
    """The entry of ``dataset_info`` in the card, which describes the columns."""
    notes: tuple[str, ...] = ()


def read_layout(folder: Path, config: str | None, words: str) -> FolderLayout:
    """Return which files are read of a folder of tables or images, and how.

    Args:
        folder: The folder.
        config: Configuration of the card; None is the only one, or the default.
        words: How messages begin.

    Raises:
        UsageError: there is no such configuration, or several and no default.
        InputError: the card is damaged, or names files that are not below the folder; or a table is a link that leads
            out of it, or no regular file.
    """
    files, refused = folder_files(folder)
    entry = _config(_card_value(folder, "configs", words), config, words)
    by_name = {path.relative_to(folder).as_posix(): path for path in files}
    splits = _splits(entry, by_name, words)
    kind = _kind(path for paths in splits.values() for path in paths)
    if kind is None:
        raise UsageError(f"{words}: holds no sample", hint=DATA_SET_FORMS)
    notes = []
    for path, reason in refused.items():
        if kind == "images" and path.suffix.lower() in IMAGE_SUFFIXES:
            notes.append(f"{path.relative_to(folder).as_posix()} {reason} and is left out")
        elif _is_read(path, kind):
            raise InputError(
                f"{words}: {path.relative_to(folder).as_posix()} {reason}",
                hint="Only regular files below the folder are read: put a copy there, or take it away.",
            )
    read = {split: tuple(path for path in paths if _is_read(path, kind)) for split, paths in splits.items()}
    options, ignored = _options(entry, kind)
    if ignored:
        notes.append(f"{MODEL_CARD_NAME} says {', '.join(map(repr, ignored))} of the files, which is not read")
    if kind == "csv" and _counted(read, ".tsv") > _counted(read, ".csv"):
        options.setdefault("sep", "\t")
    return FolderLayout(
        kind,
        {split: paths for split, paths in read.items() if paths},
        options,
        _info(_card_value(folder, "dataset_info", words), entry, config),
        tuple(notes),
    )


def _card_value(folder: Path, key: str, words: str) -> Any:
    try:
        return front_matter_value(folder / MODEL_CARD_NAME, key, _MOST_CARD_BYTES)
    except FrontMatterError as error:
        raise InputError(
            f"{words}: {MODEL_CARD_NAME} in the folder: {error}", hint="Mend it, or take it away."
        ) from error


def _config(configs: Any, name: str | None, words: str) -> Mapping[str, Any]:
    """Return the configuration that is asked for or the default; empty where the card has none."""
    entries = configs if isinstance(configs, list) else [] if configs is None else [configs]
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("config_name"), str) for entry in entries):
        raise InputError(
            f"{words}: {MODEL_CARD_NAME} in the folder: 'configs' is no list of objects with a 'config_name'",
            hint="Mend it, or take it away.",
        )
    names = ", ".join(entry["config_name"] for entry in entries)
    if name is not None:
        chosen = [entry for entry in entries if entry["config_name"] == name]
        if not chosen:
            raise UsageError(f"{words}: has no configuration {name!r}", hint=f"Its configurations: {names or 'none'}.")
        return dict(chosen[0])
    if len(entries) > 1:
        entries = [entry for entry in entries if entry["config_name"] == "default" or entry.get("default")]
        if not entries:
            raise UsageError(f"{words}: has several configurations: {names}", hint="Give the files of one of them.")
    return dict(entries[0]) if entries else {}


def _splits(entry: Mapping[str, Any], by_name: Mapping[str, Path], words: str) -> dict[str, tuple[Path, ...]]:
    if (place := entry.get("data_dir")) is not None:
        inside = _checked_pattern(place, words).rstrip("/") + "/"
        by_name = {name.removeprefix(inside): path for name, path in by_name.items() if name.startswith(inside)}
    if entry.get("data_files") is None:
        return _splits_by_names(by_name)
    found: dict[str, tuple[Path, ...]] = {}
    for split, patterns in _patterns(entry["data_files"], words):
        parts = [PurePosixPath(_checked_pattern(pattern, words)).parts for pattern in patterns]
        found[split] = tuple(
            path for name, path in by_name.items() if any(_matches(PurePosixPath(name).parts, item) for item in parts)
        )
        if not found[split]:
            raise InputError(
                f"{words}: {MODEL_CARD_NAME} names {', '.join(map(str, patterns))}, and no such file is in the folder",
                hint="Put the files there, or mend 'configs'.",
            )
    return found


def _patterns(data_files: object, words: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the splits that ``data_files`` of a card names, each with its patterns."""
    if isinstance(data_files, Mapping):
        pairs = list(data_files.items())
    elif isinstance(data_files, list) and any(isinstance(item, Mapping) for item in data_files):
        pairs = [(item.get("split"), item.get("path")) if isinstance(item, Mapping) else (None, item)
                 for item in data_files]  # fmt: skip
    else:
        pairs = [("train", data_files)]
    for split, patterns in pairs:
        if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
            raise InputError(
                f"{words}: {MODEL_CARD_NAME}: 'data_files' has the split {split!r}, which is no name of one",
                hint="Mend it, or take it away.",
            )
        yield split, patterns if isinstance(patterns, list) else [patterns]


def _checked_pattern(pattern: Any, words: str) -> str:
    """Return a pattern of names below the folder.

    Raises:
        InputError: it names what is elsewhere.
    """
    text = PurePosixPath(pattern).as_posix() if isinstance(pattern, str) else ""
    if not stays_inside(text) or "::" in text or "://" in pattern:
        raise InputError(
            f"{words}: {MODEL_CARD_NAME} names {pattern!r}, which is no name of files below the folder",
            hint="Only files below the folder are read: put them there, and name them by their path in it.",
        )
    return text


def _matches(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Say whether a name matches a pattern, part by part; ``**`` is any number of folders."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(name) + 1)) if reached else set()
        else:
            reached = {place + 1 for place in reached if place < len(name) and fnmatchcase(name[place], part)}
    return len(name) in reached


def _splits_by_names(by_name: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """Return the splits that names of shards, else of folders, else of files say; else all files are ``train``."""
    shards: dict[str, list[Path]] = {}
    for name, path in by_name.items():
        if shard := _SHARD.fullmatch(name):
            shards.setdefault(shard[1], []).append(path)
    if shards:
        order = [*_SPLIT_WORDS, *sorted(shards.keys() - _SPLIT_WORDS)]
        return {split: tuple(shards[split]) for split in order if split in shards}
    for ending, parts_of in (("(?:[-._ 0-9]|$)", _folders), ("[-._ 0-9]", _file)):
        found = {}
        for split, names in _SPLIT_WORDS.items():
            word = re.compile(f"(?:^|[-._ 0-9])(?:{names}){ending}")
            paths = [path for name, path in by_name.items() if any(word.search(part) for part in parts_of(name))]
            if paths:
                found[split] = tuple(paths)
        if found:
            return found
    return {"train": tuple(by_name.values())}


def _folders(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts[:-1]


def _file(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts[-1:]


def _kind(paths: Iterable[Path]) -> SourceKind | None:
    """Return the form that most files have."""
    counts: Counter[SourceKind] = Counter()
    for path in paths:
        if path.name.lower() not in DESCRIPTION_NAMES | _METADATA_NAMES:
            suffix = path.suffix.lower()
            kind = "images" if suffix in IMAGE_SUFFIXES else TABLE_SUFFIXES.get(suffix)
            if kind is not None:
                counts[kind] += 1
    order: tuple[SourceKind, ...] = (*dict.fromkeys(TABLE_SUFFIXES.values()), "images")
    most = max(counts.values(), default=0)
    return next(kind for kind in order if counts[kind] == most) if most else None


def _is_read(path: Path, kind: SourceKind) -> bool:
    if kind == "images":
        return path.suffix.lower() in IMAGE_SUFFIXES or path.name in _METADATA_NAMES
    return TABLE_SUFFIXES.get(path.suffix.lower()) == kind and path.name.lower() not in DESCRIPTION_NAMES


def _counted(splits: Mapping[str, tuple[Path, ...]], suffix: str) -> int:
    return sum(path.suffix.lower() == suffix for paths in splits.values() for path in paths)


def _options(entry: Mapping[str, object], kind: SourceKind) -> tuple[dict[str, object], list[str]]:
    """Return what a config says of the reading, and the keys that are not read."""
    known = _OPTIONS.get(kind, frozenset())
    stated = {str(key): value for key, value in entry.items() if key not in _FACTS}
    options = {key: value for key, value in stated.items() if key in known and _is_harmless(key, value)}
    return options, sorted(stated.keys() - options.keys())


def _is_harmless(key: str, value: object) -> bool:
    # Longer separators are regular expressions.
    return isinstance(value, bool) or (isinstance(value, str) and (key == "field" or len(value) == 1))


def _info(infos: object, entry: Mapping[str, object], config: str | None) -> Mapping[str, Any] | None:
    """Return the description of the columns of a configuration."""
    entries = [item for item in (infos if isinstance(infos, list) else [infos]) if isinstance(item, Mapping)]
    name = entry.get("config_name", config)
    if name is None and len(entries) == 1:
        return dict(entries[0])
    return next((dict(item) for item in entries if item.get("config_name", "default") == (name or "default")), None)
