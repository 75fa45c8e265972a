"""Lookup of checkpoints and ONNX files of the Hub in the local cache, and download of missing files.

Uses the cache of transformers and fetches only files missing there. Returns a folder, so that no later step needs the
network. Imports ``huggingface_hub`` alone; independent of models.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from winml.modelkit.errors import CheckpointError, HubError, first_line
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, MODEL_CARD_NAME, MODEL_SUFFIX
from winml.modelkit.models.checkpoints.companion_files import LARGEST_COMPANION, LARGEST_MODULE_WEIGHTS
from winml.modelkit.models.checkpoints.weight_files import FORMATS, find_weights
from winml.modelkit.onnx.files.foreign_files import COMPANION_NAMES, MODULES_NAME
from winml.modelkit.progress import Tell
from winml.modelkit.words import first_words

_LOG = logging.getLogger(__name__)

_SMALL_SUFFIXES = frozenset(
    {".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".vocab", ".codes", ".bpe", ".dict"}
)
"""Suffixes of configs, vocabularies, merges, sentencepiece models and chat templates.

Code of a repository may read more such files than the names known to transformers.
"""


_FILE_NAME = re.compile(r"^(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^/@]+))?/(?P<path>.*[^/])$", re.ASCII)
_MAX_LISTED_NAMES = 8


@dataclass(frozen=True)
class HubFile:
    """An ONNX file of a repository, as ``owner/name/path/model.onnx`` or ``owner/name@revision/path/model.onnx``."""

    repository: str
    path: str
    """Path within the repository, with ``/`` between folders."""
    revision: str | None = None
    """Branch, tag or commit; `None` is the default branch."""

    def local_path(self) -> Path:
        """Return the file in the Hub cache; fetch the file with its data and the tokenizer's files if missing.

        Raises:
            HubError: offline, no such repository, revision or file, gated, or the connection failed.
        """
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(self.repository, self.path, revision=self.revision)
        # A cached file without its data comes from an interrupted download.
        if isinstance(cached, str) and not self._missing_data(Path(cached)):
            return Path(cached)
        if huggingface_hub.is_offline_mode():
            raise HubError(
                f"{self}: no such file here or in the Hub cache, and offline mode forbids the download",
                hint="Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or pass the path of an ONNX file.",
            )
        with _hub_errors(self.repository, self.revision, "file"):
            return self._fetch_files()

    def _fetch_files(self) -> Path:
        """Fetch the file, its data and the tokenizer's files into the cache; return the path of the file.

        Raises:
            HubError: the repository does not have the file.
        """
        sizes = _list_sizes(self.repository, self.revision)
        if self.path not in sizes:
            files = [name for name in sorted(sizes) if name.lower().endswith(MODEL_SUFFIX)]
            listing = first_words(files, _MAX_LISTED_NAMES)
            raise HubError(
                f"{self}: {self.repository} has no file {self.path}",
                hint=f"Its ONNX files are {listing}." if files else "It has no ONNX file: build one with winml build.",
            )
        names = [self.path, *_files_to_fetch(sizes, needs_weights=False, needs_code=False)]
        file = self._download_files(names) / self.path
        missing_data = self._missing_data(file)
        if missing_data:
            self._download_files([name for name in missing_data if name in sizes])
        return file

    def _download_files(self, names: Sequence[str]) -> Path:
        import huggingface_hub

        patterns = [glob.escape(name) for name in names]
        with _limit_progress_bars():
            folder = huggingface_hub.snapshot_download(self.repository, revision=self.revision, allow_patterns=patterns)
        return Path(folder)

    def _missing_data(self, file: Path) -> tuple[str, ...]:
        """Return the data files that the model names and that are missing, as named in the repository."""
        from winml.modelkit.onnx.files.placing import data_names

        folder = PurePosixPath(self.path).parent
        return tuple(str(folder / name) for name in data_names(file) if not (file.parent / name).is_file())

    def __str__(self) -> str:
        """Return the name in the syntax of ``-m``."""
        return f"{self.repository}{'' if self.revision is None else f'@{self.revision}'}/{self.path}"


@contextlib.contextmanager
def _limit_progress_bars() -> Iterator[None]:
    """Display the progress bars of the Hub's client on a terminal only, not in a log."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def hub_file(name: str | os.PathLike[str]) -> HubFile | None:
    """Return the ONNX file of the Hub that a name refers to; `None` for a local path.

    A name with a leading dot, or with an existing first folder, is a path.
    """
    path = Path(name)
    match = _FILE_NAME.match(path.as_posix())
    if (
        match is None
        or os.fspath(name).startswith(".")
        or path.suffix.lower() != MODEL_SUFFIX
        or Path(path.parts[0]).exists()
    ):
        return None
    return HubFile(match["repository"], match["path"], match["revision"])


def snapshot_folder(
    repository: str, revision: str | None, *, needs_weights: bool, needs_code: bool, progress: Tell | None = None
) -> Path:
    """Return the folder of the Hub cache that holds ``repository`` at ``revision``, fetching missing files.

    A complete cached snapshot is used without asking the network whether the Hub has a newer one. ``HF_HUB_OFFLINE``
    and ``TRANSFORMERS_OFFLINE`` forbid fetching.

    Args:
        repository: ``owner/name``.
        revision: Branch, tag or commit; `None` is the default branch.
        needs_weights: Whether a snapshot without weights is incomplete.
        needs_code: Whether Python files are part of the snapshot.
        progress: Receives a text about the download.

    Raises:
        HubError: offline, no such repository or revision, gated, or the connection failed.
    """
    import huggingface_hub

    cached = cached_snapshot(repository, revision, needs_weights=needs_weights, needs_code=needs_code)
    if cached is not None:
        _LOG.debug("using cached snapshot %s", cached)
        return cached
    if huggingface_hub.is_offline_mode():
        source_name = repository if revision is None else f"{repository} at revision {revision}"
        raise HubError(
            f"{source_name}: no such folder here, not in the Hub cache, and offline mode forbids the download",
            hint="Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or pass a local checkpoint folder.",
        )
    return _fetch_snapshot(repository, revision, needs_weights, needs_code, progress)


def cached_snapshot(repository: str, revision: str | None, *, needs_weights: bool, needs_code: bool) -> Path | None:
    """Return the folder in the Hub cache if it is complete, else `None`; fetch nothing."""
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(repository, CHECKPOINT_CONFIG_NAME, revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        if needs_weights and find_weights(folder) is None:
            return None
    except CheckpointError:
        return None  # shards are missing: an interrupted download
    # Only the Hub can list the files of the code: offline, the cached files are used.
    if needs_code and not any(folder.glob("*.py")) and not huggingface_hub.is_offline_mode():
        return None
    return folder


def _fetch_snapshot(
    repository: str, revision: str | None, needs_weights: bool, needs_code: bool, progress: Tell | None
) -> Path:
    import huggingface_hub

    with _hub_errors(repository, revision, "folder"):
        file_names = _files_to_fetch(_list_sizes(repository, revision), needs_weights, needs_code)
        if progress is not None:
            progress(f"downloading {len(file_names)} files of {repository}")
        # Pass the name of the revision, not the commit of the listing: otherwise the cache has no entry for the name.
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=file_names))


def _list_sizes(repository: str, revision: str | None) -> dict[str, int]:
    """Return file of a repository → bytes; 0 if the server does not state the size."""
    import huggingface_hub

    listing = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    return {sibling.rfilename: sibling.size or 0 for sibling in listing.siblings or ()}


@contextlib.contextmanager
def _hub_errors(repository: str, revision: str | None, kind: str) -> Iterator[None]:
    """Convert errors of the Hub's client into :class:`HubError`; ``kind`` is the local meaning of the name."""
    from huggingface_hub import errors

    # OSError and the root error of the client's HTTP library, which has changed more than once.
    connection_errors: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repository}: is gated and this account has no access",
            hint=f"Request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN ({repository}).",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{repository}: has no revision {revision!r}", hint="Pass a branch, tag or commit of the repository."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{repository}: no such {kind} here and no such model on the Hub",
            hint="Check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.HFValidationError as error:
        raise HubError(f"{repository}: not a valid Hub id", hint="Pass owner/name, or an existing path.") from error
    except connection_errors as error:
        raise HubError(
            f"{repository}: no such {kind} here, and the Hub could not be reached: {first_line(error)}",
            hint=f"Check the connection, or pass the path of a local {kind}.",
        ) from error


def _files_to_fetch(sizes: Mapping[str, int], needs_weights: bool, needs_code: bool) -> list[str]:
    """Choose the files to fetch: small files at the top of the repository, one format of weights, and code if allowed.

    Files of modules are included for a sentence-transformers repository.

    Args:
        sizes: File of the repository → bytes; 0 if unknown.
        needs_weights: Whether to include weights.
        needs_code: Whether to include Python files.
    """
    top_names = [name for name in sizes if "/" not in name]
    weights: list[str] = []
    for _, single, index in FORMATS if needs_weights else ():
        stem, suffix = PurePosixPath(single).stem, PurePosixPath(single).suffix
        shards = [name for name in top_names if name.startswith(f"{stem}-") and name.endswith(suffix)]
        weights = [single] if single in top_names else [index, *shards] if index in top_names else []
        if weights:
            break
    indexes = {index for _, _, index in FORMATS}
    small = [
        name
        for name in top_names
        if (name in COMPANION_NAMES or PurePosixPath(name).suffix in _SMALL_SUFFIXES)
        and name not in indexes
        and sizes[name] <= LARGEST_COMPANION
    ]
    code = [name for name in sizes if name.endswith(".py")] if needs_code else []
    card = [MODEL_CARD_NAME] if MODEL_CARD_NAME in top_names else []
    modules = [name for name in sizes if _is_module_file(name, sizes[name])] if MODULES_NAME in top_names else []
    return [*small, *card, *code, *weights, *modules]


def _is_module_file(name: str, size_bytes: int) -> bool:
    """Return True if a file is in a module folder of sentence-transformers, such as ``1_Pooling``."""
    path = PurePosixPath(name)
    if len(path.parts) != 2 or not re.match(r"\d+_\w", path.parts[0]) or path.name.startswith("."):
        return False
    is_small = path.suffix in _SMALL_SUFFIXES and size_bytes <= LARGEST_COMPANION
    return is_small or (path.name in {single for _, single, _ in FORMATS} and 0 < size_bytes <= LARGEST_MODULE_WEIGHTS)
