"""Reads files of this disk with the builders of the datasets library: the files that are named, and nothing else.

A builder is handed the files themselves. It resolves no pattern, asks no network, unpacks no archive and reads no
description beside them; and it writes no more than is plausible for files of their size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import InputError
from winml.modelkit.evaluate.data_sources import SourceKind
from winml.modelkit.file_names import is_plain_name
from winml.modelkit.graph.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    import datasets

__all__ = ["prepared_splits", "read_files", "read_saved"]

_MOST_RATIO = 1000
"""Bytes of values for each byte of a file. Chosen: columns of text and numbers compress two to a hundred times."""
_ALWAYS_READ = 2**27
"""Bytes of values that are read whatever the size of the file. Chosen: they harm nobody."""
_BATCH_ROWS = 1000
"""Most rows of a parquet file in memory. Chosen: datasets itself takes whole row groups, of any size."""
_ROW_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
"""Least size of a value in memory, by its type in a parquet file."""


def read_files(
    kind: SourceKind,
    splits: Mapping[str, Sequence[Path]],
    cache: Path,
    *,
    options: Mapping[str, object] | None = None,
    info: Mapping[str, object] | None = None,
) -> dict[str, datasets.Dataset]:
    """Return the tables of files: split → rows, which lie in a cache.

    Args:
        kind: Of all the files: a form of tables, or images.
        splits: Split → its files.
        cache: A folder for what is read.
        options: For the builder.
        info: Describes the columns, as an entry of ``dataset_info`` of a card does; None: read from the files.

    Raises:
        ValueError: a file declares more than is read, or is damaged; and whatever datasets and pyarrow raise.
    """
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.info import DatasetInfosDict

    files = [path for paths in splits.values() for path in paths]
    most_bytes = _most_bytes(files, cache)
    batches = {"batch_size": min(_batch_rows(path, most_bytes) for path in files)} if kind == "parquet" else {}
    named = {split: [str(path.absolute()) for path in paths] for split, paths in splits.items()}
    described = (
        next(iter(DatasetInfosDict.from_dataset_card_data({"dataset_info": dict(info)}).values()), None)
        if info
        else None
    )
    features = described.features if described is not None else None
    builder = _builder_class(kind)(
        cache_dir=str(cache),
        data_files=DataFilesDict({split: DataFilesList(names, [() for _ in names]) for split, names in named.items()}),
        info=None if features is None else datasets.DatasetInfo(features=features),
        **batches,
        **(options or {}),
    )
    if kind != "images":
        builder._generate_tables = _limited(builder._generate_tables, most_bytes)
    return prepared_splits(builder, _named_files_only())


def prepared_splits(builder: datasets.DatasetBuilder, manager: object = None) -> dict[str, datasets.Dataset]:
    """Return the splits of a builder that hold a sample, and an empty table for each that does not."""
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
        InputError: it names files that are not below the folder, or its descriptions are no JSON.
        OSError: a file is missing.
    """
    splits = _read_json(folder / "dataset_dict.json").get("splits") if (folder / "dataset_dict.json").exists() else None
    if splits is None:
        table = _saved_table(folder)
        return {str(table.split or "train"): table}
    if not isinstance(splits, list) or not all(isinstance(name, str) and is_plain_name(name) for name in splits):
        raise InputError(f"{folder / 'dataset_dict.json'}: 'splits' is no list of names of folders beside it")
    return {name: _saved_table(folder / name) for name in splits}


def _saved_table(folder: Path) -> datasets.Dataset:
    import datasets

    _read_json(folder / "dataset_info.json")
    files = _read_json(folder / "state.json").get("_data_files")
    for entry in files if isinstance(files, list) else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{folder / 'state.json'}: '_data_files' is no list of objects with a 'filename'")
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
        raise InputError(f"{path}: {error}", hint="Save the data set again with save_to_disk.") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: is no JSON object", hint="Save the data set again with save_to_disk.")
    return value


def _builder_class(kind: SourceKind) -> Any:
    from datasets import packaged_modules as modules

    return {
        "parquet": modules.parquet.Parquet,
        "arrow": modules.arrow.Arrow,
        "json": modules.json.Json,
        "csv": modules.csv.Csv,
        "text": modules.text.Text,
        "images": modules.imagefolder.ImageFolder,
    }[kind]


def _named_files_only() -> Any:
    """Return what hands files to a builder as they are."""
    from datasets import DownloadManager

    class NamedFiles(DownloadManager):  # type: ignore[misc]  # datasets has no types
        def download(self, url_or_urls: object) -> Any:
            return url_or_urls

        def extract(self, path_or_paths: object) -> Any:
            return path_or_paths

    return NamedFiles(record_checksums=False)


def _most_bytes(files: Sequence[Path], cache: Path) -> int:
    stored = sum(path.stat().st_size for path in files)
    return min(max(_ALWAYS_READ, _MOST_RATIO * stored), shutil.disk_usage(cache).free // 2)


def _batch_rows(path: Path, most_bytes: int) -> int:
    """Return how many rows of a parquet file are read at a time, by its footer.

    Raises:
        ValueError: it declares more values than are read of a file of its size.
    """
    import pyarrow.parquet

    with path.open("rb") as file:
        footer = pyarrow.parquet.read_metadata(file)
    columns = range(footer.num_columns)
    schema = [footer.schema.column(number) for number in columns]
    row_bytes = sum(_ROW_BYTES.get(column.physical_type, column.length or 1) for column in schema)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    declared = max(sum(group.total_byte_size for group in groups), footer.num_rows * row_bytes)
    if declared > most_bytes:
        raise ValueError(
            f"{path.name} declares {size_words(declared)} of values in a file of {size_words(path.stat().st_size)}; "
            f"at most {size_words(most_bytes)} are read"
        )
    chunks = [group.column(number) for group in groups for number in columns]
    # Each row may repeat the largest text that is stored once.
    repeated = max((chunk.total_uncompressed_size for chunk in chunks if chunk.has_dictionary_page), default=0)
    return max(1, min(_BATCH_ROWS, most_bytes // max(repeated, 1)))


def _limited(generate: Callable[..., Iterator[Any]], most_bytes: int) -> Callable[..., Iterator[Any]]:
    """Return what generates tables until they are larger than is read."""

    def limited(*arguments: object, **keywords: Any) -> Iterator[Any]:
        size = 0
        for key, table in generate(*arguments, **keywords):
            size += table.nbytes
            if size > most_bytes:
                raise ValueError(f"holds more than the {size_words(most_bytes)} of values that are read of such files")
            yield key, table

    return limited
