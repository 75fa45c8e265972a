"""Reads the samples of a dataset: local files, or a dataset of the Hub named by the user.

The datasets library reads the samples; local data is read without network access, and is not left in a cache. The
library writes nothing to the terminal. The Hub is requested once before the library connects. ``columns.py`` maps
columns to roles, and ``preprocessing.py`` converts rows to inputs.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import HubError, InputError, UsageError, error_chain, opt
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.ort.shared_settings import shared_by_threads
from winml.modelkit.samples.data_sources import DATA_SET_FORMATS, DataSource, find_source, refuse_missing_datasets
from winml.modelkit.samples.local_files import (
    SPLIT_WORDS,
    FolderLayout,
    prepared_splits,
    read_files,
    read_layout,
    read_saved,
)
from winml.modelkit.samples.media import Unreadable, open_image, open_recording
from winml.modelkit.words import first_words

if TYPE_CHECKING:
    import datasets


_TRAINING = "train"
_PREFERRED_SPLITS = ("validation", "test", _TRAINING)
"""Chosen: a model is evaluated on data it was not trained on; labels of a test split are often withheld."""
_LONGEST_REASON = 300
"""Maximum number of characters of a library message. Chosen: three lines of a terminal; messages of pyarrow list
whole schemas."""
_FEWEST_REMAINING = 16
"""Minimum number of samples beside those of another request. Chosen: as many as are generated without data."""
_NAME_LIMIT = 5
"""Maximum number of file names in one sentence. Chosen: enough for an inspection."""


@dataclass(frozen=True)
class DataSetRequest:
    """Request for samples of a dataset."""

    source: str
    """Path; or ``name``, ``owner/name`` or ``owner/name:config`` on the Hub."""
    _: KW_ONLY
    split: str | None = None
    """None: the validation split, else the test split, else the training split, else the only split."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role → column, for columns with unknown names; see :mod:`winml.modelkit.samples.columns`."""
    samples: int | None = None
    """Number of random samples of the split; None: all."""
    most: int | None = None
    """Maximum number of samples if ``samples`` is None; None: no limit."""
    seed: int = 0
    """Seed of the random samples."""
    config: str | None = None
    """Configuration on the Hub, if the source names none."""
    option: str = field(default_factory=lambda: opt.dataset)
    """Option with the dataset, for messages."""
    besides: DataSetRequest | None = None
    """Request whose samples are left out; see :meth:`others`."""

    @property
    def words(self) -> str:
        """Start of messages."""
        return f"{self.option} {self.source}"

    def others(self, most: int) -> DataSetRequest:
        """Return a request for other samples of the same data.

        They are of the split train, if that is another split; else the remaining samples of the split, or all of its
        samples if few remain.

        Args:
            most: Maximum number of samples.
        """
        return replace(self, samples=None, most=most, besides=self)

    def count_samples(self, available: int) -> int:
        """Return the number of samples to read.

        Raises:
            UsageError: more are requested than available.
        """
        if self.samples is not None and not 1 <= self.samples <= available:
            raise UsageError(
                f"{self.words}: {available} samples, but {opt.samples} requests {self.samples}",
                hint=f"Add data, or reduce {opt.samples}.",
            )
        return self.samples or min(self.most or available, available)


_COMPARED_ROWS = 32
"""Chosen: splits whose first rows are equal in order are copies of each other."""
_IMAGE_ROLES = frozenset({"image", "mask"})
"""Roles of columns with images."""


class DataSet:
    """The samples of one split.

    A context manager: temporary files are removed when it is closed.

    Attributes:
        request: The request.
        name: File name or name on the Hub, without folders of this machine.
        split: The split that is read.
        words: Name, and split if the data has several.
        features: Column → its type in datasets (``ClassLabel`` has the names of its labels).
        notes: Automatic decisions, one sentence each.
        unreadable: Number of the sample → image or audio file that could not be opened, and was skipped.
    """

    def __init__(
        self, request: DataSetRequest, source: DataSource, table: datasets.Dataset, resources: ExitStack
    ) -> None:
        """Take the rows of a split; see :func:`open_data_set`."""
        self.request = request
        self.name = source.name
        self.split = str(table.split) if table.split is not None else "train"
        self.words = source.name
        self.features: Mapping[str, Any] = dict(table.features)
        self.notes: tuple[str, ...] = ()
        self.unreadable: dict[int, Unreadable] = {}
        self._folders = (source.folder,) if source.folder is not None else _hub_folders()
        self._table = table
        self._close = weakref.finalize(self, resources.close)

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(self.features)

    def __len__(self) -> int:
        """Return the number of samples, including unreadable samples."""
        return len(self._table)

    def rows(self, roles: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples in order, lazily, with images and audio opened.

        Samples with a file that cannot be opened are skipped, and noted in ``unreadable``.

        Args:
            roles: Role → column. The keys of a row are then roles, and other columns are not read. None: all columns.

        Raises:
            InputError: no image or audio file can be opened.
        """
        columns = {name: name for name in self.columns} if roles is None else dict(roles)
        media = {key: self._find_opener(key, column) for key, column in columns.items()}
        count = 0
        for number, cells in enumerate(self._table.select_columns(sorted(set(columns.values())))):
            row = {
                key: cells[column] if media[key] is None else media[key](cells[column], self._folders, f"row {number}")
                for key, column in columns.items()
            }
            if failed := [value for value in row.values() if isinstance(value, Unreadable)]:
                self.unreadable[number] = failed[0]
                continue
            count += 1
            yield row
        if self.unreadable and not count:
            example = next(iter(self.unreadable.values()))
            raise InputError(
                f"{self.request.words}: none of {len(self.unreadable)} files can be opened; {example.name}: "
                f"{example.reason}",
                hint="Use a supported image or audio format.",
            )

    @property
    def unreadable_note(self) -> str | None:
        """Note on skipped samples; None if all samples were opened."""
        if not self.unreadable:
            return None
        names = first_words([cell.name for cell in self.unreadable.values()], _NAME_LIMIT)
        count = len(self.unreadable)
        verbs = "cannot be opened and is" if count == 1 else "cannot be opened and are"
        return f"{count} of {len(self)} samples of {self.name} {verbs} skipped: {names}"

    def close(self) -> None:
        """Remove temporary files; rows cannot be read afterwards."""
        self._close()

    def __enter__(self) -> DataSet:  # noqa: PYI034  # no subclasses
        """Return the dataset itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the dataset."""
        self.close()

    def _find_opener(self, key: str, column: str) -> Any:
        """Return the function that opens the cells of a column, by its type or role; None for other columns."""
        feature = type(self.features[column]).__name__
        if feature == "Image" or key in _IMAGE_ROLES:
            return open_image
        return open_recording if feature == "Audio" or key == "audio" else None


@shared_by_threads
def _forbid_network() -> Iterator[None]:
    """Keep datasets off the network during the block: the library reports every use, also of local files.

    Other network access of the library raises ConnectionError, as without a network.
    """
    from datasets import config
    from huggingface_hub import constants

    old_values = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = old_values


@shared_by_threads
def _quiet_datasets() -> Iterator[None]:
    """Keep datasets and huggingface_hub from writing to stderr during the block; their failures become our errors."""
    import datasets
    from datasets.utils import logging as messages
    from huggingface_hub.utils import logging as hub_messages

    level, has_bars = messages.get_verbosity(), datasets.is_progress_bar_enabled()
    hub_level = hub_messages.get_verbosity()
    messages.set_verbosity(logging.CRITICAL)
    hub_messages.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        hub_messages.set_verbosity(hub_level)
        if has_bars:
            datasets.enable_progress_bars()


def _hub_folders() -> tuple[Path, ...]:
    """Return the folders of downloaded and unpacked files of Hub datasets."""
    from datasets import config
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE), Path(config.DOWNLOADED_DATASETS_PATH)


def _ask_hub(name: str, label: str) -> str:
    """Request a dataset from the Hub once: the datasets library repeats failed requests for half a minute.

    Args:
        name: The dataset.
        label: Start of messages.

    Returns:
        The reason why the Hub cannot be reached; empty if the Hub has the dataset.

    Raises:
        HubError: the Hub has no such dataset, or this account has no access.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return "the Hub is not used in offline mode (HF_HUB_OFFLINE)"
    # The base error of the Hub client's HTTP library, which has changed more than once.
    connection: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
    try:
        huggingface_hub.HfApi().dataset_info(name)
    except errors.GatedRepoError as error:
        raise HubError(
            f"{label}: is gated and this account has no access",
            hint="Request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise HubError(
            f"{label}: no such file or folder, and no such dataset on the Hub",
            hint="Check the spelling; for a private dataset, log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except connection as error:
        return f"the Hub cannot be reached: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""


def open_data_set(request: DataSetRequest) -> DataSet:
    """Open a dataset for reading.

    Local data is read without network access. Table files are converted once into a temporary folder, so that one row
    at a time is in memory; image and audio files are not copied.

    Raises:
        UsageError: the dataset, split or configuration does not exist; the split is empty, or has fewer samples than
            requested; or the package datasets is missing.
        InputError: a file is damaged.
        HubError: the Hub cannot be reached, or has no such dataset.
    """
    source = find_source(request.source, request.option)
    refuse_missing_datasets(request.words)
    with ExitStack() as resources:
        offline: AbstractContextManager[None] = nullcontext() if source.path is None else _forbid_network()
        with _quiet_datasets(), offline:
            splits, notes = _read_splits(request, source, resources)
        chosen, split_notes = _choose_split(request, source, splits)
        split = _TRAINING if request.besides is not None and _TRAINING in splits else chosen
        table = _disable_decoding(splits[split])
        if source.kind == "text":
            table = table.select([number for number, text in enumerate(table["text"]) if text.strip()])
        if not len(table):
            raise UsageError(
                f"{request.words}: split {split} contains no samples",
                hint=f"Use a different {opt.split}, or different data.",
            )
        rows, is_shared = _draw_rows(request, len(table), request.besides if split == chosen else None)
        data_set = DataSet(
            request, source, table if len(rows) == len(table) else table.select(rows), resources.pop_all()
        )
    if request.besides is not None:
        also = f"its samples also judge the result, since fewer than {_FEWEST_REMAINING} others remain"
        split_notes = (f"calibrated on {data_set.name}: {also}",) if is_shared else ()
        if split != chosen and _have_equal_rows(splits[split], splits[chosen]):
            equal = f"splits {split} and {chosen} have equal samples"
            split_notes = (f"{data_set.name}: {equal}, so that samples of the calibration also judge the result",)
    data_set.split = split
    data_set.words = f"{source.name}, split {split}" if len(splits) > 1 else source.name
    data_set.notes = (*split_notes, *notes)
    return data_set


def _have_equal_rows(first: datasets.Dataset, second: datasets.Dataset) -> bool:
    """Return True if two splits begin with equal rows and have equally many."""
    if len(first) != len(second) or first.column_names != second.column_names:
        return False
    numbers = range(min(len(first), _COMPARED_ROWS))
    starts = (_disable_decoding(table).select(numbers) for table in (first, second))
    return all(_row_content(one) == _row_content(other) for one, other in zip(*starts, strict=True))


def _row_content(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a row, with the content of a media file in place of its path."""
    return {name: _cell_content(cell) for name, cell in row.items()}


def _cell_content(cell: Any) -> Any:
    if not isinstance(cell, dict) or cell.get("bytes") is not None or not cell.get("path"):
        return cell["bytes"] if isinstance(cell, dict) and cell.get("bytes") is not None else cell
    path = Path(cell["path"])
    return path.read_bytes() if path.is_file() else cell


def _read_splits(
    request: DataSetRequest, source: DataSource, resources: ExitStack
) -> tuple[Mapping[str, datasets.Dataset], tuple[str, ...]]:
    """Return the splits, and notes on their files.

    Args:
        request: The request of the user.
        source: Its location and format.
        resources: Receives the temporary folder of converted files, for as long as the splits are read.

    Raises:
        UsageError: the file is empty, or there are several configurations and no default.
        HubError: the Hub cannot be reached, and its data set is not in the cache.
        InputError: the files cannot be read.
    """
    if source.kind == "hub":
        return _read_hub_splits(request, source), ()

    assert source.path is not None
    if source.path.is_file() and not source.path.stat().st_size:
        raise UsageError(f"{request.words}: empty file, no samples", hint=DATA_SET_FORMATS)
    hint = "Correct the file, or use a different format. Text is read as UTF-8."
    kind = _KIND_WORDS.get(source.kind, source.kind)
    with foreign_parser(f"{request.words}: cannot be read as {kind}", hint=hint, reason=_root_cause):
        if source.kind == "saved":
            return read_saved(source.path), ()
        cache = resources.enter_context(temporary_folder())
        if source.kind == "audio":
            from winml.modelkit.samples.local_files import read_audio_folder

            return read_audio_folder(source.path, cache), ()
        if source.path.is_file():
            options = {"sep": "\t"} if source.path.suffix.lower() == ".tsv" else {}
            return read_files(source.kind, {"train": [source.path]}, cache, options=options), ()
        layout = read_layout(source.path, request.config, request.words)
        # By default, datasets does not use the name of a single folder as a label.
        labels = {"drop_labels": False} if layout.kind == "images" and _is_one_class(source.path, layout) else {}
        # datasets cannot read the types of a table without rows.
        empty = [split for split, paths in layout.splits.items() if all(map(_has_header_only, paths))]
        filled = {split: paths for split, paths in layout.splits.items() if split not in empty} or layout.splits
        splits = read_files(layout.kind, filled, cache, options={**labels, **layout.options}, info=layout.info)
        ignored = tuple(f"{request.words}: split {split} has no rows" for split in empty)
        return splits, (*layout.notes, *ignored)


def _has_header_only(path: Path) -> bool:
    """Return True for a table of text with at most one line that is not blank."""
    if path.suffix.lower() not in (".csv", ".tsv"):
        return False
    with path.open("rb") as lines:
        return len(list(itertools.islice((line for line in lines if line.strip()), 2))) < 2


_KIND_WORDS = {"saved": "a folder written by save_to_disk", "images": "a folder of images"}


def _is_one_class(folder: Path, layout: FolderLayout) -> bool:
    """Return True if all images are in one folder, with the name of a label and not of a split."""
    files = [path for paths in layout.splits.values() for path in paths]
    folders = {path.parent for path in files}
    if any(path.stem == "metadata" for path in files) or len(folders) != 1:
        return False
    parts = folders.pop().relative_to(folder).parts
    return len(parts) in (1, 2) and not any(parts[-1].lower() in split_words for split_words in SPLIT_WORDS.values())


def _read_hub_splits(request: DataSetRequest, source: DataSource) -> Mapping[str, datasets.Dataset]:
    """Return the splits on the Hub, or the cached splits if the Hub cannot be reached.

    Raises:
        UsageError: there are several configurations, and no default.
        HubError: the Hub cannot be reached, and the data set is not in the cache.
        InputError: the data set cannot be read.
    """
    import datasets

    unreachable = _ask_hub(source.name, request.words)
    config = source.config or request.config
    try:
        with _forbid_network() if unreachable else nullcontext():
            names: list[str] = datasets.get_dataset_config_names(source.name) if config is None else []
            if len(names) > 1 and datasets.get_dataset_default_config_name(source.name) is None:
                raise UsageError(
                    f"{request.words}: several configurations: {', '.join(names)}",
                    hint=f"Choose one: {request.option} {source.name}:{names[0]}",
                )
            return prepared_splits(datasets.load_dataset_builder(source.name, config))
    except (OSError, ValueError, LookupError, ImportError, datasets.exceptions.DatasetsError) as error:
        if unreachable:
            raise HubError(
                f"{request.words}: no such file or folder, and {unreachable}",
                hint="Check the name and the connection, or pass a file or folder.",
            ) from error
        raise InputError(
            f"{request.words}: cannot be read: {_root_cause(error)}", hint="Use files in a different format."
        ) from error


def _choose_split(request: DataSetRequest, source: DataSource, splits: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Return the requested split, else the preferred one with a note.

    Raises:
        UsageError: there is no such split, no sample, or no preferred split among several.
    """
    names = list(splits)
    if request.split is not None:
        if request.split not in names:
            raise UsageError(
                f"{request.words}: no split {request.split!r}", hint=f"Its splits: {', '.join(names) or 'none'}."
            )
        return request.split, ()
    if not names:
        raise UsageError(f"{request.words}: no samples", hint=DATA_SET_FORMATS)
    if len(names) == 1:
        return names[0], ()
    split = next((name for name in _PREFERRED_SPLITS if name in names), None)
    if split is None:
        raise UsageError(f"{request.words}: several splits: {', '.join(names)}", hint=f"Choose one with {opt.split}.")
    other_names = ", ".join(name for name in names if name != split)
    return split, (f"split {split} of {source.name} is used by default; other splits: {other_names}",)


def _disable_decoding(table: datasets.Dataset) -> datasets.Dataset:
    """Disable decoding of images and audio by datasets: a cell that cannot be opened would end the iteration.

    Nested lists and records are included: datasets opens any file or address in a cell.
    """
    import datasets

    table = table.select_columns(table.column_names)  # a copy, with its own features
    table.info.features = datasets.Features({name: _skip_decoding(feature) for name, feature in table.features.items()})
    return table


def _skip_decoding(feature: Any) -> Any:
    """Return a feature, or nested features, with cells as they are stored."""
    if isinstance(feature, Mapping):
        return {name: _skip_decoding(child) for name, child in feature.items()}
    if isinstance(feature, list):
        return [_skip_decoding(child) for child in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_skip_decoding(feature.feature))
    # Json features are text; their values name no files.
    is_opened = hasattr(feature, "decode") and type(feature).__name__ != "Json"
    return replace(feature, decode=False) if is_opened else feature


def _draw_rows(request: DataSetRequest, available: int, besides: DataSetRequest | None) -> tuple[Sequence[int], bool]:
    """Return the numbers of random rows, ascending, and True if rows of another request are among them.

    Args:
        request: The request.
        available: Number of rows of the split.
        besides: Request for rows of the same split that are left out, if enough others remain.
    """
    rows: Sequence[int] = range(available)
    if besides is None:
        return _draw_numbers(request, rows), False
    taken = {*_draw_numbers(besides, rows)}
    others = [number for number in rows if number not in taken]
    is_shared = len(others) < _FEWEST_REMAINING
    return _draw_numbers(request, rows if is_shared else others), is_shared


def _draw_numbers(request: DataSetRequest, rows: Sequence[int]) -> Sequence[int]:
    """Return the requested number of random row numbers, ascending."""
    count = request.count_samples(len(rows))
    if count == len(rows):
        return rows
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(request.seed))
    return [rows[index] for index in np.sort(generator.choice(len(rows), count, replace=False))]


def _root_cause(error: BaseException) -> str:
    """Return the message of the first cause, which is more specific than the message of the error."""
    *_, error = error_chain(error, with_context=False)
    message = " ".join(str(error).split())
    return message[:_LONGEST_REASON] or type(error).__name__
