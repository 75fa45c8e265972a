"""How do several output files appear together, or not at all?

A file is written under its own name in a hidden folder beside its target, so files that name one another (a model and
its external data) are right before and after they are put in place. Standard library only: asked before anything heavy
is imported.
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
from winml.modelkit.file_names import STAGING_PREFIX

__all__ = ["OutputFiles", "refuse_existing", "refuse_inputs", "write_error"]

REPLACED = ".replaced"
"""Where the earlier files wait, inside the hidden folder, until all new ones are in place."""

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""What a full or failing disk says while a file is written; such errors do not name the file."""

_REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EFBIG: "Raise the limit on file sizes",
    errno.EACCES: "Mend its permissions",
    errno.EPERM: "Mend its permissions",
    errno.ENOTDIR: "Move away the file that stands where a folder is needed",
}
"""What helps, where something other than another path does."""


def refuse_existing(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse outputs that are there already, and places that cannot be written.

    Args:
        paths: The files that may be written.
        overwrite: Accept files that exist.

    Raises:
        OutputExistsError: a file is there and may not be replaced, or a directory bears its name.
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
    """Refuse outputs that would replace what they are made from, whatever path leads there.

    Args:
        outputs: The files that may be written.
        inputs: Files that are read; those that are not there do not matter.

    Raises:
        UsageError: names the output and the input it is.
    """
    inputs = tuple(inputs)
    for output in outputs:
        for source in inputs:
            if _is_same_entry(output, source):
                raise UsageError(
                    f"output {output} is the input {source}, which must stay as it is",
                    hint="Choose another output path.",
                )


def _is_same_entry(output: Path, source: Path) -> bool:
    """Say whether replacing one takes the other away.

    It does not where both are hard links of one file under names of their own: the other name keeps what it has.
    """
    try:
        if not output.samefile(source):
            return False
        has_one_name = source.stat().st_nlink == 1
        # File systems that ignore case know one name in ``A`` and ``a``.
        return has_one_name or str(output.resolve()).casefold() == str(source.resolve()).casefold()
    except OSError:
        return False


def _refuse_files(paths: Iterable[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise OutputExistsError(
                f"output {path} exists already", hint="Use --overwrite to replace it, or choose another output path."
            )


def _refuse_unwritable(directory: Path) -> None:
    existing = next(parent for parent in (directory, *directory.absolute().parents) if os.path.lexists(parent))
    try:
        # Asking os.access is not enough: it knows neither read-only file systems nor Windows' access lists.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise write_error(directory, error) from error


def write_error(path: Path, error: OSError) -> WriteError:
    """Return the error that tells why ``path`` cannot be written, and what helps."""
    reason = error.strerror or first_line(error)
    remedy = _REMEDIES.get(error.errno or 0)
    hint = f"{remedy}, or choose another output path." if remedy else "Choose another output path."
    return WriteError(f"cannot write {path}: {reason}", hint=hint)


def _copy_aside(target: Path, aside: Path) -> None:
    try:
        # A second name for the same file: a kill at any moment finds a whole file at the target, the old or the new
        # one.
        os.link(target, aside, follow_symlinks=False)
    except (OSError, NotImplementedError):
        # Some file systems have no links; there the target is missing for the instant between two renames.
        target.replace(aside)


class OutputFiles:
    """A transaction: what is staged is put in place by :meth:`commit`, all of it or nothing.

    Leaving the ``with`` block without a commit, by any way, removes what was staged and the directories made for it,
    and leaves earlier files as they were.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OutputFiles() as files:
    ...     _ = files.stage(folder / "new" / "report.md").write_text("done")
    ...     [path.name for path in files.commit()]
    ['report.md']
    """

    def __init__(self) -> None:
        """Start with nothing staged."""
        self._staged: list[Path] = []
        self._dropped: list[Path] = []
        self._folders: dict[Path, Path] = {}
        self._made: list[Path] = []
        self._is_committed = False

    def __enter__(self) -> OutputFiles:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Return this transaction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove what was not committed; errors are told as by :meth:`explained_errors`."""
        self._tidy()
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
            # Whoever wrote knew the hidden place only, and that is gone.
            for directory, folder in self._folders.items():
                error.message = error.message.replace(str(folder), str(directory))
        if isinstance(error, OSError) and (target := self._target_of(error)) is not None:
            raise write_error(target, error) from error

    def stage(self, path: Path) -> Path:
        """Return where to write the file that is to become ``path``.

        The place has the same name in a hidden folder. Whatever else is written into that folder is put in place as
        well: a model may bring an external data file.

        Raises:
            WriteError: the directory cannot be made or written to.
        """
        path = path.absolute()
        try:
            if path.parent not in self._folders:
                self._make_directory(path.parent)
                self._folders[path.parent] = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=path.parent))
        except OSError as error:
            raise write_error(path, error) from error
        self._staged.append(path)
        return self._folders[path.parent] / path.name

    def drop(self, path: Path) -> None:
        """Let an earlier file go at the commit, unless it is staged: the data of a model that is replaced."""
        self._dropped.append(path.absolute())

    def staged(self) -> dict[Path, int]:
        """Return what is written so far: final path to size in bytes."""
        return {target: place.stat().st_size for target, place in self._written().items()}

    def commit(self, *, overwrite: bool = True) -> dict[Path, int]:
        """Put everything written in place, and return it: final path to size in bytes.

        Args:
            overwrite: Replace files that are there by now.

        Raises:
            OutputExistsError: somebody else wrote one of them meanwhile, and it may not be replaced.
            WriteError: a file could not be put in place; all earlier files are as they were.
        """
        written = self._written()
        if not overwrite:
            _refuse_files(written)
        sizes = self.staged()
        with contextlib.ExitStack() as undo:
            target = None
            try:
                for target in (path for path in self._dropped if path not in written and os.path.lexists(path)):
                    aside = self._place_aside(target)
                    target.replace(aside)
                    undo.callback(aside.replace, target)
                for target, place in written.items():
                    if os.path.lexists(target):
                        aside = self._place_aside(target)
                        _copy_aside(target, aside)
                        undo.callback(aside.replace, target)
                    place.replace(target)
                    undo.callback(target.replace, place)
            except OSError as error:
                # Leaving the stack puts the earlier files back, newest step first.
                raise write_error(target or Path(), error) from error
            undo.pop_all()
        self._is_committed = True
        self._tidy()
        return sizes

    def _written(self) -> dict[Path, Path]:
        """Return final path to present place; the file staged first comes last, so who sees it finds its companions."""
        found = {
            directory / place.name: place
            for directory, folder in self._folders.items()
            for place in sorted(folder.iterdir() if folder.exists() else ())
            if place.name != REPLACED
        }
        companions = [path for path in found if path not in self._staged]
        return {path: found[path] for path in (*companions, *reversed(self._staged)) if path in found}

    def _place_aside(self, target: Path) -> Path:
        if target.parent not in self._folders:
            self._folders[target.parent] = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=target.parent))
        aside = self._folders[target.parent] / REPLACED / target.name
        aside.parent.mkdir(exist_ok=True)
        return aside

    def _make_directory(self, directory: Path) -> None:
        missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made.append(parent)

    def _target_of(self, error: OSError) -> Path | None:
        """Return the output an error of the system is about, or None if it is about something else."""
        if error.filename is not None:
            place = Path(os.fsdecode(error.filename))
            return next(
                (parent / place.name for parent, folder in self._folders.items() if folder == place.parent), None
            )
        return self._staged[-1] if self._staged and error.errno in _DISK_ERRORS else None

    def _tidy(self) -> None:
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        if self._is_committed:
            return
        for directory in reversed(self._made):
            with contextlib.suppress(OSError):
                # Only where it is still empty: somebody else may have put a file there.
                directory.rmdir()
