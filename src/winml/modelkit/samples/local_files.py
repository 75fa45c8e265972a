"""Reads local files with the builders of the datasets library: only the named files.

Finds the sample files of a folder, and passes them to the builder of their kind. The builder resolves no pattern,
uses no network, unpacks no archive and reads no metadata beside the files. The amount of data that it writes is
limited by the size of the files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import MODEL_CARD_NAME, is_plain_name, stays_inside
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.front_matter import FrontMatterError, front_matter_value
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.samples import data_sources
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    import datasets


_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}
"""Folder name → split in datasets."""
_METADATA_FILES: dict[str, data_sources.SourceKind] = {"metadata.csv": "csv", "metadata.jsonl": "json"}
_NAME_COLUMN = "file_name"


def read_audio_folder(folder: Path, cache: Path) -> dict[str, datasets.Dataset]:
    """Return the splits of an audio folder: a column ``audio`` and columns from metadata or folder names.

    Args:
        folder: The folder.
        cache: Cache folder of datasets for the metadata.

    Raises:
        InputError: the metadata names no files, or files outside of the folder.
    """
    folder = folder.absolute()
    folders = {split: folder / name for name, split in _SPLITS.items() if (folder / name).is_dir()}
    return {split: _read_split(path, split, cache) for split, path in (folders or {"train": folder}).items()}


def _read_split(folder: Path, split: str, cache: Path) -> datasets.Dataset:
    """Return the audio files of one split, with columns of the metadata file, else with folder names as labels."""
    import datasets

    metadata = next((name for name in _METADATA_FILES if (folder / name).is_file()), None)
    if metadata is not None:
        columns = _read_metadata(folder, metadata, cache)
        return _make_audio_table(columns, [_path_inside(folder, name) for name in columns.pop(_NAME_COLUMN)], split)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in data_sources.AUDIO_SUFFIXES)
    labels = [path.parent.name for path in files]
    names = sorted(set(labels))
    table = _make_audio_table({"label": labels} if len(names) > 1 else {}, [str(path) for path in files], split)
    return table.cast_column("label", datasets.ClassLabel(names=names)) if len(names) > 1 else table


def _make_audio_table(columns: dict[str, list[Any]], paths: list[str], split: str) -> datasets.Dataset:
    import datasets

    table = datasets.Dataset.from_dict({"audio": paths, **columns}, split=datasets.NamedSplit(split))
    return table.cast_column("audio", datasets.Audio(decode=False))


def _read_metadata(folder: Path, name: str, cache: Path) -> dict[str, list[Any]]:
    """Return column → values of the metadata file of a folder of files.

    Raises:
        InputError: the file is missing, has no column of file names, or names a file outside the folder.
    """
    try:
        metadata = file_below(folder, name)
    except ForeignNameError as error:
        raise InputError(f"{folder / name}: {error}", hint="Only regular files below the folder are read.") from error
    tables = read_files(_METADATA_FILES[name], {"train": [metadata]}, cache)
    columns: dict[str, list[Any]] = tables["train"].to_dict()
    if _NAME_COLUMN not in columns:
        raise InputError(
            f"{folder / name}: no column {_NAME_COLUMN}; columns: {', '.join(columns)}",
            hint="Add the path of every audio file, relative to the folder of this file.",
        )
    return columns


def _path_inside(folder: Path, name: Any) -> str:
    """Return the path of a file named in metadata.

    Raises:
        InputError: the file is outside of the folder.
    """
    path = Path(os.path.normpath(folder / str(name)))
    if not path.is_relative_to(os.path.normpath(folder)):
        raise InputError(
            f"{folder}: the metadata references {name}, which is outside the folder", hint="Move it into the folder."
        )
    return str(path)


_MAX_RATIO = 1000
"""Maximum ratio of value bytes to file bytes. Chosen: columns of text and numbers compress two to a hundred times."""
_MIN_LIMIT_BYTES = 2**27
"""Value bytes that are read regardless of the file size. Chosen: harmless."""
_BATCH_ROWS = 1000
"""Maximum number of rows of a parquet file in memory. Chosen: datasets itself reads whole row groups, of any size."""
_ROW_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
"""Parquet type → minimum size of a value in memory."""


def read_files(
    kind: data_sources.SourceKind,
    splits: Mapping[str, Sequence[Path]],
    cache: Path,
    *,
    options: Mapping[str, object] | None = None,
    info: Mapping[str, object] | None = None,
) -> dict[str, datasets.Dataset]:
    """Read files as tables, stored in a cache: split → rows.

    Args:
        kind: Format of all files: a table format, or images.
        splits: Split → its files.
        cache: Folder for the converted tables.
        options: Options of the builder.
        info: Description of the columns, in the format of ``dataset_info`` of a card; None: read from the files.

    Raises:
        ValueError: a file declares more values than the limit, or is damaged; also errors of datasets and pyarrow.
    """
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.info import DatasetInfosDict

    files = [path for paths in splits.values() for path in paths]
    stored_bytes = sum(path.stat().st_size for path in files)
    most_bytes = min(max(_MIN_LIMIT_BYTES, _MAX_RATIO * stored_bytes), shutil.disk_usage(cache).free // 2)
    batches = {"batch_size": min(_count_batch_rows(path, most_bytes) for path in files)} if kind == "parquet" else {}
    texts = {split: [str(path.absolute()) for path in paths] for split, paths in splits.items()}
    card_info = (
        next(iter(DatasetInfosDict.from_dataset_card_data({"dataset_info": dict(info)}).values()), None)
        if info
        else None
    )
    features = card_info.features if card_info is not None else None
    builder = _builder_class(kind)(
        cache_dir=str(cache),
        data_files=DataFilesDict({split: DataFilesList(names, [() for _ in names]) for split, names in texts.items()}),
        info=None if features is None else datasets.DatasetInfo(features=features),
        **batches,
        **(options or {}),
    )
    if kind != "images":
        builder._generate_tables = _limit_tables(builder._generate_tables, most_bytes)
    return prepared_splits(builder, _make_local_manager())


def prepared_splits(builder: datasets.DatasetBuilder, manager: object = None) -> dict[str, datasets.Dataset]:
    """Return the splits of a builder; splits without samples are empty tables."""
    import datasets

    builder.download_and_prepare(dl_manager=manager)
    sizes = {str(name): split.num_examples for name, split in (builder.info.splits or {}).items()}
    return {
        name: builder.as_dataset(split=name) if size else datasets.Dataset.from_dict({}, split=name)
        for name, size in sizes.items()
    }


def read_saved(folder: Path) -> Mapping[str, datasets.Dataset]:
    """Return the splits of a folder that ``save_to_disk`` wrote.

    Raises:
        InputError: the folder references files outside of it, or its descriptions are not JSON.
        OSError: a file is missing.
    """
    splits = _read_json(folder / "dataset_dict.json").get("splits") if (folder / "dataset_dict.json").exists() else None
    if splits is None:
        table = _load_saved_table(folder)
        return {str(table.split or "train"): table}
    if not isinstance(splits, list) or not all(isinstance(name, str) and is_plain_name(name) for name in splits):
        raise InputError(f"{folder / 'dataset_dict.json'}: 'splits' is not a list of folder names beside it")
    return {name: _load_saved_table(folder / name) for name in splits}


def _load_saved_table(folder: Path) -> datasets.Dataset:
    """Load one split that ``save_to_disk`` wrote.

    Raises:
        InputError: its description is malformed, or names files outside of the folder.
    """
    import datasets

    _read_json(folder / "dataset_info.json")
    files = _read_json(folder / "state.json").get("_data_files")
    for entry in files if isinstance(files, list) else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{folder / 'state.json'}: '_data_files' is not a list of objects with a 'filename'")
        try:
            file_below(folder, name)
        except ForeignNameError as error:
            raise InputError(
                f"{folder / 'state.json'}: names {name!r}, which {error}",
                hint="Only regular files below the folder are read.",
            ) from error
    return datasets.Dataset.load_from_disk(str(folder.absolute())).with_format(None)


def _read_json(path: Path) -> dict[str, object]:
    try:
        file_below(path.parent, path.name)
        value = read_json_file(path)
    except (JsonError, ForeignNameError) as error:
        raise InputError(f"{path}: {error}", hint="Save the dataset again with save_to_disk.") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object", hint="Save the dataset again with save_to_disk.")
    return value


def _builder_class(kind: data_sources.SourceKind) -> Any:
    from datasets import packaged_modules as modules

    return {
        "parquet": modules.parquet.Parquet,
        "arrow": modules.arrow.Arrow,
        "json": modules.json.Json,
        "csv": modules.csv.Csv,
        "text": modules.text.Text,
        "images": modules.imagefolder.ImageFolder,
    }[kind]


def _make_local_manager() -> Any:
    """Return a download manager that returns file paths unchanged."""
    from datasets import DownloadManager

    class NamedFiles(DownloadManager):  # type: ignore[misc]  # datasets has no types
        def download(self, url_or_urls: object) -> Any:
            return url_or_urls

        def extract(self, path_or_paths: object) -> Any:
            return path_or_paths

    return NamedFiles(record_checksums=False)


def _count_batch_rows(path: Path, most_bytes: int) -> int:
    """Return the number of rows of a parquet file to read at a time, based on its footer.

    Raises:
        ValueError: the file declares more values than the limit for its size.
    """
    import pyarrow.parquet

    with path.open("rb") as file:
        footer = pyarrow.parquet.read_metadata(file)
    columns = range(footer.num_columns)
    schema = [footer.schema.column(number) for number in columns]
    row_bytes = sum(_ROW_BYTES.get(column.physical_type, column.length or 1) for column in schema)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    value_bytes = max(sum(group.total_byte_size for group in groups), footer.num_rows * row_bytes)
    if value_bytes > most_bytes:
        raise ValueError(
            f"{path.name} declares {size_words(value_bytes)} of values in a file of "
            f"{size_words(path.stat().st_size)}; the maximum is {size_words(most_bytes)}"
        )
    chunks = [group.column(number) for group in groups for number in columns]
    # Each row may repeat the largest text, which is stored once.
    repeated = max((chunk.total_uncompressed_size for chunk in chunks if chunk.has_dictionary_page), default=0)
    return max(1, min(_BATCH_ROWS, most_bytes // max(repeated, 1)))


def _limit_tables(generate: Callable[..., Iterator[Any]], most_bytes: int) -> Callable[..., Iterator[Any]]:
    """Return a table generator that raises ValueError when its tables exceed the limit."""

    def generate_limited(*arguments: object, **keywords: Any) -> Iterator[Any]:
        size = 0
        for key, table in generate(*arguments, **keywords):
            size += table.nbytes
            if size > most_bytes:
                raise ValueError(f"contains more than {size_words(most_bytes)} of values, the maximum for such files")
            yield key, table

    return generate_limited


_MAX_CARD_BYTES = 256 * 1024
"""Size limit of ``configs`` and of ``dataset_info``. Chosen: the names of a thousand labels take 40 kB."""
_METADATA_NAMES = frozenset(("metadata.csv", "metadata.jsonl", "metadata.parquet"))
"""Specified: metadata files of an image folder."""
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Specified by datasets: split → its words in names of files or folders."""
_SHARD = re.compile(r"data/(\w+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Specified by datasets: shards of splits with any name."""
_SPLIT_NAME = re.compile(r"\w+(?:\.\w+)*")
_FACT_KEYS = frozenset(("config_name", "data_files", "data_dir", "default", "version", "description"))
_READER_OPTIONS: Mapping[str, frozenset[str]] = {
    "csv": frozenset(("sep", "delimiter")),
    "json": frozenset(("field",)),
    "images": frozenset(("drop_labels", "drop_metadata")),
}
"""Kind → options of a config that are passed to the builder."""


@dataclass(frozen=True)
class FolderLayout:
    """The files of a dataset in a folder."""

    kind: data_sources.SourceKind
    splits: Mapping[str, tuple[Path, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the datasets builder."""
    info: Mapping[str, Any] | None = None
    """Entry of ``dataset_info`` in the card, which describes the columns."""
    notes: tuple[str, ...] = ()


def read_layout(folder: Path, config: str | None, label: str) -> FolderLayout:
    """Return the files of a folder of tables or images, and the options for reading them.

    Args:
        folder: The folder.
        config: Configuration of the card; None: the only configuration, or the default.
        label: Start of messages.

    Raises:
        UsageError: the configuration does not exist, or there are several without a default.
        InputError: the card is damaged, or names files outside of the folder; or a table is a link out of the folder,
            or no regular file.
    """
    files, refused = data_sources.folder_files(folder)
    entry = _select_config(_read_card_value(folder, "configs", label), config, label)
    by_name = {path.relative_to(folder).as_posix(): path for path in files}
    splits = _split_files(entry, by_name, label)
    kind = _most_frequent_kind(path for paths in splits.values() for path in paths)
    if kind is None:
        raise UsageError(f"{label}: no samples", hint=data_sources.DATA_SET_FORMATS)
    notes = []
    for path, reason in refused.items():
        if kind == "images" and path.suffix.lower() in data_sources.IMAGE_SUFFIXES:
            notes.append(f"{path.relative_to(folder).as_posix()} {reason} and is skipped")
        elif _has_kind(path, kind):
            raise InputError(
                f"{label}: {path.relative_to(folder).as_posix()} {reason}",
                hint="Only regular files below the folder are read: put a copy there, or remove it.",
            )
    selected = {split: tuple(path for path in paths if _has_kind(path, kind)) for split, paths in splits.items()}
    options, ignored = _reading_options(entry, kind)
    if ignored:
        notes.append(f"{MODEL_CARD_NAME} sets {', '.join(map(repr, ignored))} for the files, which is ignored")
    if kind == "csv" and _count_suffix(selected, ".tsv") > _count_suffix(selected, ".csv"):
        options.setdefault("sep", "\t")
    return FolderLayout(
        kind,
        {split: paths for split, paths in selected.items() if paths},
        options,
        _find_info(_read_card_value(folder, "dataset_info", label), entry, config),
        tuple(notes),
    )


def _read_card_value(folder: Path, key: str, label: str) -> Any:
    try:
        return front_matter_value(folder / MODEL_CARD_NAME, key, _MAX_CARD_BYTES)
    except FrontMatterError as error:
        raise InputError(f"{label}: {MODEL_CARD_NAME} in the folder: {error}", hint="Correct or remove it.") from error


def _select_config(configs: Any, name: str | None, label: str) -> Mapping[str, Any]:
    """Return the requested or default configuration; ``{}`` if the card has none.

    Args:
        configs: Value of ``configs`` in the card.
        name: Name of the requested configuration; `None`: the default.
        label: The data set, for messages.

    Raises:
        InputError: ``configs`` is malformed.
        UsageError: the requested configuration does not exist, or there are several and no default.
    """
    entries = configs if isinstance(configs, list) else [] if configs is None else [configs]
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("config_name"), str) for entry in entries):
        raise InputError(
            f"{label}: {MODEL_CARD_NAME} in the folder: 'configs' is not a list of objects with a 'config_name'",
            hint="Correct or remove it.",
        )
    names = ", ".join(entry["config_name"] for entry in entries)
    if name is not None:
        matching = [entry for entry in entries if entry["config_name"] == name]
        if not matching:
            raise UsageError(f"{label}: no configuration {name!r}", hint=f"Its configurations: {names or 'none'}.")
        return dict(matching[0])
    if len(entries) > 1:
        entries = [entry for entry in entries if entry["config_name"] == "default" or entry.get("default")]
        if not entries:
            raise UsageError(f"{label}: several configurations: {names}", hint="Pass the files of one of them.")
    return dict(entries[0]) if entries else {}


def _split_files(entry: Mapping[str, Any], by_name: Mapping[str, Path], label: str) -> dict[str, tuple[Path, ...]]:
    """Return split → files, by the patterns of a configuration, else by the names of files and folders.

    Raises:
        InputError: a pattern leads out of the folder, or matches no file.
    """
    if (data_dir := entry.get("data_dir")) is not None:
        prefix = _check_pattern(data_dir, label).rstrip("/") + "/"
        by_name = {name.removeprefix(prefix): path for name, path in by_name.items() if name.startswith(prefix)}
    if entry.get("data_files") is None:
        return _split_by_names(by_name)
    splits: dict[str, tuple[Path, ...]] = {}
    for split, patterns in _split_patterns(entry["data_files"], label):
        globs = [PurePosixPath(_check_pattern(pattern, label)).parts for pattern in patterns]
        splits[split] = tuple(
            path for name, path in by_name.items() if any(_fits_glob(PurePosixPath(name).parts, glob) for glob in globs)
        )
        if not splits[split]:
            raise InputError(
                f"{label}: {MODEL_CARD_NAME} references {', '.join(map(str, patterns))}, but the folder has no "
                "such file",
                hint="Add the files, or correct 'configs'.",
            )
    return splits


def _split_patterns(data_files: object, label: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the splits in ``data_files`` of a card, with their patterns.

    Raises:
        InputError: the name of a split is invalid.
    """
    if isinstance(data_files, Mapping):
        pairs = list(data_files.items())
    elif isinstance(data_files, list) and any(isinstance(entry, Mapping) for entry in data_files):
        pairs = [(entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else (None, entry)
                 for entry in data_files]  # fmt: skip
    else:
        pairs = [("train", data_files)]
    for split, patterns in pairs:
        if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
            raise InputError(
                f"{label}: {MODEL_CARD_NAME}: 'data_files' has the invalid split name {split!r}",
                hint="Correct or remove it.",
            )
        yield split, patterns if isinstance(patterns, list) else [patterns]


def _check_pattern(pattern: Any, label: str) -> str:
    """Return a pattern of names below the folder.

    Raises:
        InputError: the pattern names files outside of the folder.
    """
    text = PurePosixPath(pattern).as_posix() if isinstance(pattern, str) else ""
    if not stays_inside(text) or "::" in text or "://" in pattern:
        raise InputError(
            f"{label}: {MODEL_CARD_NAME} references {pattern!r}, which is not a path in the folder",
            hint="Only files below the folder are read: put them there, and use relative paths.",
        )
    return text


def _fits_glob(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return True if a name matches a pattern, part by part; ``**`` matches any number of folders."""
    positions = {0}
    for part in pattern:
        if part == "**":
            positions = set(range(min(positions), len(name) + 1)) if positions else set()
        else:
            positions = {index + 1 for index in positions if index < len(name) and fnmatchcase(name[index], part)}
    return len(name) in positions


def _split_by_names(by_name: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """Return the splits by names of shards, else of folders, else of files; else all files are ``train``."""
    shards: dict[str, list[Path]] = {}
    for name, path in by_name.items():
        if shard := _SHARD.fullmatch(name):
            shards.setdefault(shard[1], []).append(path)
    if shards:
        order = [*SPLIT_WORDS, *sorted(shards.keys() - SPLIT_WORDS)]
        return {split: tuple(shards[split]) for split in order if split in shards}
    for ending, levels in (("(?:[-._ 0-9]|$)", slice(None, -1)), ("[-._ 0-9]", slice(-1, None))):
        splits = {}
        for split, names in SPLIT_WORDS.items():
            regex = re.compile(f"(?:^|[-._ 0-9])(?:{'|'.join(names)}){ending}")
            paths = [
                path for name, path in by_name.items() if any(map(regex.search, PurePosixPath(name).parts[levels]))
            ]
            if paths:
                splits[split] = tuple(paths)
        if splits:
            return splits
    return {"train": tuple(by_name.values())}


def _most_frequent_kind(paths: Iterable[Path]) -> data_sources.SourceKind | None:
    """Return the most frequent file format; `None` if no file has a known format."""
    counts: Counter[data_sources.SourceKind] = Counter()
    for path in paths:
        if path.name.lower() not in data_sources.DESCRIPTION_NAMES | _METADATA_NAMES:
            suffix = path.suffix.lower()
            kind = "images" if suffix in data_sources.IMAGE_SUFFIXES else data_sources.TABLE_SUFFIXES.get(suffix)
            if kind is not None:
                counts[kind] += 1
    if not counts:
        return None
    order: tuple[data_sources.SourceKind, ...] = (*dict.fromkeys(data_sources.TABLE_SUFFIXES.values()), "images")
    return max(order, key=counts.__getitem__)  # for ties, the first in the order


def _has_kind(path: Path, kind: data_sources.SourceKind) -> bool:
    """Return True if a file has this format; metadata files belong to images."""
    if kind == "images":
        return path.suffix.lower() in data_sources.IMAGE_SUFFIXES or path.name in _METADATA_NAMES
    return (
        data_sources.TABLE_SUFFIXES.get(path.suffix.lower()) == kind
        and path.name.lower() not in data_sources.DESCRIPTION_NAMES
    )


def _count_suffix(splits: Mapping[str, tuple[Path, ...]], suffix: str) -> int:
    return sum(path.suffix.lower() == suffix for paths in splits.values() for path in paths)


def _reading_options(entry: Mapping[str, object], kind: data_sources.SourceKind) -> tuple[dict[str, object], list[str]]:
    """Return the reading options of a config, and its ignored keys."""
    allowed = _READER_OPTIONS.get(kind, frozenset())
    settings = {str(key): value for key, value in entry.items() if key not in _FACT_KEYS}
    options = {key: value for key, value in settings.items() if key in allowed and _is_harmless(key, value)}
    return options, sorted(settings.keys() - options.keys())


def _is_harmless(key: str, value: object) -> bool:
    # Separators of several characters are regular expressions.
    return isinstance(value, bool) or (isinstance(value, str) and (key == "field" or len(value) == 1))


def _find_info(infos: object, entry: Mapping[str, object], config: str | None) -> Mapping[str, Any] | None:
    """Return the column description of a configuration; `None` if the card has none."""
    entries = [info for info in (infos if isinstance(infos, list) else [infos]) if isinstance(info, Mapping)]
    name = entry.get("config_name", config)
    if name is None and len(entries) == 1:
        return dict(entries[0])
    return next((dict(info) for info in entries if info.get("config_name", "default") == (name or "default")), None)
