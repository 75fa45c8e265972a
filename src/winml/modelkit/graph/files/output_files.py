"""Puts several output files in place together, or none of them.

A file is written under its own name in a hidden folder beside its target, so files that name one another (a model and
its external data) are consistent before and after they are moved. Standard library only: output paths are checked
before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from winml.modelkit.errors import OutputExistsError, UsageError, WriteError, first_line
from winml.modelkit.file_names import PARTIAL_PREFIX
from winml.modelkit.graph.files.committed import interruptions_held, record_committed

__all__ = ["OutputFiles", "refuse_existing", "refuse_inputs", "write_error"]

REPLACED = ".replaced"
"""Subfolder of the hidden folder that keeps the earlier files until all new ones are in place."""

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors of a full or failing disk while a file is written; they do not name the file."""

_REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EFBIG: "Raise the limit on file sizes",
    errno.EACCES: "Correct its permissions",
    errno.EPERM: "Correct its permissions",
    errno.ENOTDIR: "Move the file that has the name of a needed folder",
}
"""Error → remedy, where there is one besides another path."""


def refuse_existing(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse outputs that exist already, and directories that cannot be written.

    Args:
        paths: The files that may be written.
        overwrite: Accept files that exist.

    Raises:
        OutputExistsError: a file exists and may not be replaced, or a directory has its name.
        WriteError: the directory of a file, or the nearest that exists above it, cannot be written to.
    """
    paths = tuple(paths)
    for path in paths:
        if path.is_dir():
            raise OutputExistsError(f"output {path} is a directory", hint="Choose another output path.")
    if not overwrite:
        _refuse_files(paths)
    for directory in dict.fromkeys(path.parent for path in paths):
        _refuse_unwritable(directory)


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Refuse outputs that would replace one of the inputs, by whatever path.

    Args:
        outputs: The files that may be written.
        inputs: Files that are read; missing ones are ignored.

    Raises:
        UsageError: names the output and the input.
    """
    inputs = tuple(inputs)
    for output in outputs:
        for input_path in inputs:
            if _is_same_entry(output, input_path):
                raise UsageError(
                    f"output {output} is the input {input_path}, which must stay as it is",
                    hint="Choose another output path.",
                )


def _is_same_entry(output: Path, input_path: Path) -> bool:
    """Say whether replacing one path removes the other.

    Two hard links of one file under different names are different entries: the other name keeps its content.
    """
    try:
        if not output.samefile(input_path):
            return False
        has_one_name = input_path.stat().st_nlink == 1
        # On file systems that ignore case, ``A`` and ``a`` are one name.
        return has_one_name or str(output.resolve()).casefold() == str(input_path.resolve()).casefold()
    except OSError:
        return False


def _refuse_files(paths: Iterable[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise OutputExistsError(
                f"output {path} exists already", hint="Use --overwrite to replace it, or choose another output path."
            )


def _refuse_unwritable(directory: Path) -> None:
    nearest_existing = next(parent for parent in (directory, *directory.absolute().parents) if os.path.lexists(parent))
    try:
        # os.access is not enough: it ignores read-only file systems and Windows' access lists.
        with tempfile.TemporaryFile(dir=nearest_existing):
            pass
    except OSError as error:
        raise write_error(directory, error) from error


def write_error(path: Path, error: OSError) -> WriteError:
    """Return the error for ``path`` that cannot be written, with the reason and a remedy."""
    reason = error.strerror or first_line(error)
    remedy = _REMEDIES.get(error.errno or 0)
    hint = f"{remedy}, or choose another output path." if remedy else "Choose another output path."
    return WriteError(f"cannot write {path}: {reason}", hint=hint)


def _copy_aside(target: Path, aside: Path) -> None:
    try:
        # A second name for the same file: if the process is killed, the target is either the old or the new file.
        os.link(target, aside, follow_symlinks=False)
    except (OSError, NotImplementedError):
        # Without hard links, the target is missing for the instant between two renames.
        target.replace(aside)


class OutputFiles:
    """A transaction over output files: :meth:`commit` puts all written files in place, or none.

    Leaving the ``with`` block without a commit removes the written files and the directories created for them, and
    leaves earlier files unchanged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OutputFiles() as files:
    ...     _ = files.reserve(folder / "new" / "report.md").write_text("done")
    ...     [path.name for path in files.commit()]
    ['report.md']
    """

    def __init__(self) -> None:
        """Start an empty transaction."""
        self._reserved: list[Path] = []
        self._dropped: list[Path] = []
        self._folders: dict[Path, Path] = {}
        self._made_directories: list[Path] = []
        self._is_committed = False

    def __enter__(self) -> OutputFiles:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Return this transaction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove what was not committed; errors are told as by :meth:`explained_errors`."""
        self._remove_leftovers()
        if error is not None:
            self._explain(error)

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Let an error of the disk inside the block become a WriteError; all of these name the output.

        Raises:
            WriteError: a file could not be written.
        """
        try:
            yield
        except (WriteError, OSError) as error:
            self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        """Name the output in a WriteError, in place, and raise one for an error of the disk that is about an output."""
        if isinstance(error, WriteError):
            # The message names the hidden folder, which no longer exists.
            for directory, folder in self._folders.items():
                error.message = error.message.replace(str(folder), str(directory))
        if isinstance(error, OSError) and (target := self._target_of(error)) is not None:
            raise write_error(target, error) from error

    def reserve(self, path: Path) -> Path:
        """Return the temporary path to write the file for ``path`` to.

        It has the same file name in a hidden folder. Every other file written into that folder is put in place as well,
        such as the external data of a model.

        Raises:
            WriteError: the directory cannot be created or written to.
        """
        try:
            path = path.absolute()
            if path.parent not in self._folders:
                self._make_directory(path.parent)
                self._folders[path.parent] = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=path.parent))
        except OSError as error:
            raise write_error(path, error) from error
        self._reserved.append(path)
        return self._folders[path.parent] / path.name

    def drop(self, path: Path) -> None:
        """Delete an earlier file at the commit unless it is written again, such as the data of a replaced model."""
        self._dropped.append(path.absolute())

    def written_sizes(self) -> dict[Path, int]:
        """Return the files written so far: final path → size in bytes."""
        return {target: place.stat().st_size for target, place in self._reserved_places().items()}

    def commit(self, *, overwrite: bool = True) -> dict[Path, int]:
        """Put all written files in place, and return them: final path → size in bytes.

        Args:
            overwrite: Replace files that exist by now.

        Raises:
            OutputExistsError: another process created one of them meanwhile, and it may not be replaced.
            WriteError: a file could not be put in place; all earlier files are unchanged.
        """
        reserved_places = self._reserved_places()
        if not overwrite:
            _refuse_files(reserved_places)
        sizes = self.written_sizes()
        with contextlib.ExitStack() as undo:
            target = None
            try:
                for target in (path for path in self._dropped if path not in reserved_places and os.path.lexists(path)):
                    aside = self._place_aside(target)
                    target.replace(aside)
                    undo.callback(aside.replace, target)
                for target, place in reserved_places.items():
                    if os.path.lexists(target):
                        aside = self._place_aside(target)
                        _copy_aside(target, aside)
                        undo.callback(aside.replace, target)
                    place.replace(target)
                    undo.callback(target.replace, place)
            except OSError as error:
                # Leaving the stack undoes the moves, the last one first.
                raise write_error(target or Path(), error) from error
            with interruptions_held():
                undo.pop_all()
                self._is_committed = True
                record_committed(reversed(sizes))  # the model is moved last
        self._remove_leftovers()
        return sizes

    def _reserved_places(self) -> dict[Path, Path]:
        """Return final path → temporary path. The file reserved first is moved last, after the files it names."""
        places = {
            directory / place.name: place
            for directory, folder in self._folders.items()
            for place in sorted(folder.iterdir() if folder.exists() else ())
            if place.name != REPLACED
        }
        companions = [path for path in places if path not in self._reserved]
        return {path: places[path] for path in (*companions, *reversed(self._reserved)) if path in places}

    def _place_aside(self, target: Path) -> Path:
        if target.parent not in self._folders:
            self._folders[target.parent] = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=target.parent))
        aside = self._folders[target.parent] / REPLACED / target.name
        aside.parent.mkdir(exist_ok=True)
        return aside

    def _make_directory(self, directory: Path) -> None:
        missing_directories = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for parent in reversed(missing_directories):
            parent.mkdir(exist_ok=True)
            self._made_directories.append(parent)

    def _target_of(self, error: OSError) -> Path | None:
        """Return the output that a system error concerns, or None if it concerns something else."""
        if error.filename is not None:
            place = Path(os.fsdecode(error.filename))
            return next(
                (parent / place.name for parent, folder in self._folders.items() if folder == place.parent), None
            )
        return self._reserved[-1] if self._reserved and error.errno in _DISK_ERRORS else None

    def _remove_leftovers(self) -> None:
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        if self._is_committed:
            return
        for directory in reversed(self._made_directories):
            with contextlib.suppress(OSError):
                # Only while it is empty: another process may have put a file there.
                directory.rmdir()
