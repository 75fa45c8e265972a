"""Which data set does a path or a name mean, and in which form are its files?

Looks at names only and imports no library, so that a request is refused, and a result found again, before any data is
read. What is in the files is read elsewhere.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winml.modelkit.errors import HubError, UsageError
from winml.modelkit.evaluate.media import install_hint
from winml.modelkit.graph.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.runtime.shared_settings import shared_by_threads

SourceKind = Literal["text", "csv", "json", "parquet", "arrow", "images", "audio", "saved", "hub"]
"""``saved`` is a folder that ``save_to_disk`` of datasets wrote; the others name the files in it, or the one file."""

TABLE_SUFFIXES: dict[str, SourceKind] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
"""In the order in which they are looked for in a folder: a data set of parquet files may have a JSON file beside."""
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
AUDIO_SUFFIXES = frozenset({".aiff", ".flac", ".mp3", ".ogg", ".opus", ".wav"})
_SAVED_NAMES = ("dataset_dict.json", "state.json")
DESCRIPTION_NAMES = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "license.txt", "readme.txt"})
"""Files about a data set, with endings of data."""
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]*\w")
"""Specified: names of repositories of the Hub, ``name`` or ``owner/name``."""
_DRIVE = re.compile(r"[A-Za-z]:")
"""How a path with the letter of a drive begins."""
DATA_SET_FORMATS = (
    "Pass a .csv, .json, .jsonl, .parquet, .arrow or .txt file, a folder of such files, of images or of audio "
    "files, a folder written by save_to_disk, or the name of a dataset on the Hub."
)
"""What is read, for hints."""


@dataclass(frozen=True)
class DataSource:
    """Where a data set lies."""

    kind: SourceKind
    path: Path | None
    """The file or folder on this disk; None for a name of the Hub."""
    name: str
    """File name of a path, or the name at the Hub: for people and records, without a folder of this machine."""
    config: str | None = None
    """Configuration at the Hub, written after a colon: ``glue:stsb``."""

    @property
    def folder(self) -> Path | None:
        """The folder in which names of files in the data are looked for; None for a name of the Hub."""
        return self.path.parent if self.path is not None and self.path.is_file() else self.path


def find_source(text: str | os.PathLike[str], option: str = "--dataset") -> DataSource:
    """Return what data set a path or a name means. What lies on this disk is never looked for elsewhere.

    Args:
        text: A path; or ``name``, ``owner/name`` or ``owner/name:config`` at the Hub.
        option: What named it, for messages.

    Raises:
        UsageError: neither is possible, or the form of the files is not read.
    """
    passed = os.fspath(text)
    path = Path(passed)
    if passed and path.exists():
        return DataSource(_kind_of(path, option), path, path.absolute().name)
    name, _, config = passed.partition(":")
    suffix = Path(passed).suffix.lower()
    is_file_name = suffix in TABLE_SUFFIXES or suffix in IMAGE_SUFFIXES | AUDIO_SUFFIXES | {".npz", ".zip"}
    is_path = bool(_DRIVE.match(passed)) or "\\" in passed or "/" in config
    if is_file_name or is_path or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise UsageError(f"{option} {passed}: no such file or folder", hint=DATA_SET_FORMATS)
    return DataSource("hub", None, name, config or None)


def source_files(source: DataSource) -> tuple[Path, ...]:
    """Return the files on this disk that a data set consists of, in their order; none of one at the Hub."""
    if source.path is None:
        return ()
    return (source.path,) if source.path.is_file() else tuple(sorted(folder_files(source.path)[0]))


def _kind_of(path: Path, option: str) -> SourceKind:
    if path.is_file():
        kind = TABLE_SUFFIXES.get(path.suffix.lower())
        if kind is None:
            raise UsageError(
                f"{option} {path}: a file of type {path.suffix or 'none'} is not supported", hint=DATA_SET_FORMATS
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
        displayed = ", ".join(sorted(suffix or "no ending" for suffix in suffixes)[:5])
        what = f"files with {displayed} only, which are not supported" if suffixes else "empty folder, no samples"
        raise UsageError(f"{option} {path}: {what}", hint=DATA_SET_FORMATS)
    return kind


def folder_files(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the files in a folder and below that are not hidden, in their order, and those that are not to be read.

    Returns:
        Regular files and links to them within the folder; and file → why it is not read: a link that leads out of the
        folder or nowhere, a pipe, a socket, a device. Folders that are links are not entered.
    """
    files: list[Path] = []
    refused: dict[Path, str] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(place, name)
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    file_below(folder, path.relative_to(folder))
                files.append(path)
            except (OSError, ForeignNameError) as error:
                refused[path] = str(error)
    return files, refused


# --- Keeps the datasets library to this disk and from writing to the terminal, and asks the Hub before it does.


def refuse_missing_datasets(words: str) -> None:
    """Refuse a request that needs datasets where it is not installed; does not import it.

    Args:
        words: How messages begin.

    Raises:
        UsageError: says how it is installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"{words}: requires the package datasets, which is not installed", hint=install_hint())


@shared_by_threads
def local_data_only() -> Iterator[None]:
    """Keep datasets off the network: it would count every reading at its makers', of local files as well.

    What it tries all the same raises ConnectionError, as without a network.
    """
    from datasets import config
    from huggingface_hub import constants

    found = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = found


@shared_by_threads
def quiet_datasets() -> Iterator[None]:
    """Keep datasets and huggingface_hub from writing to stderr; what they say comes back as errors of ours."""
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


def hub_folders() -> tuple[Path, ...]:
    """Return the folders in which files of data sets of the Hub lie once they were fetched or unpacked."""
    from datasets import config
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE), Path(config.DOWNLOADED_DATASETS_PATH)


def ask_hub(name: str, words: str) -> str:
    """Ask the Hub for a data set, once: datasets itself asks again and again for half a minute.

    Args:
        name: The data set.
        words: How messages begin.

    Returns:
        Why it cannot be reached, in words; empty where it has the data set.

    Raises:
        HubError: it has no such data set, or does not show it to this account.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return "the Hub is not used in offline mode (HF_HUB_OFFLINE)"
    # The root error of the HTTP library under the Hub client, which has changed more than once.
    connection: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
    try:
        huggingface_hub.HfApi().dataset_info(name)
    except errors.GatedRepoError as error:
        raise HubError(
            f"{words}: is gated and this account has no access",
            hint="Request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise HubError(
            f"{words}: no such file or folder, and no such dataset on the Hub",
            hint="Check the spelling; for a private dataset, log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except connection as error:
        return f"the Hub cannot be reached: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""
