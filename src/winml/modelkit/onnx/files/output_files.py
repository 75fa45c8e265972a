"""Writing of several output files together, or none of them.

A file is written under its final name in a hidden folder beside its target, so files with references (a model and its
external data) are consistent before and after the move. After a kill between two moves, the next command
that writes there completes the commit (``recovery``). Standard library only: output paths are checked before any heavy
import.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit import file_names
from winml.modelkit.errors import InputError, OutputExistsError, UsageError, WriteError, first_line, opt
from winml.modelkit.onnx.files.moving import is_held, link_file, move_file, remove_file
from winml.modelkit.onnx.files.named_paths import named_path, record_committed
from winml.modelkit.onnx.files.recovery import (
    MOVED_ASIDE,
    STAGED,
    OwnedFolder,
    State,
    file_state,
    interrupted_in,
    interruptions_held,
    remove_journal,
    settle_interrupted,
    write_journal,
)

EARLIER = "earlier"
"""Subfolder of the hidden folder for hard links to the earlier files, until all new files are moved."""

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""Error numbers of a disk, or a quota, that is full."""
DISK_ERRORS = frozenset({*FULL_DISK_ERRORS, errno.EIO, errno.EROFS})
"""Errors of a full or failing disk while a file is written; they do not name the file."""

_SPECIAL_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
}

_REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EFBIG: "Raise the limit on file sizes",
    errno.EACCES: "Correct its permissions",
    errno.EPERM: "Correct its permissions",
    errno.ENOTDIR: "Move the file that has the name of a needed folder",
}
"""Error number → remedy, unless the only remedy is another path."""


def refuse_existing(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse existing outputs, irregular files, and directories that cannot be written.

    Changes nothing. Files finished by a killed command count as existing: :func:`recover` moves them.

    Args:
        paths: The files that may be written.
        overwrite: Accept files that exist.

    Raises:
        OutputExistsError: a file exists and may not be replaced, or a directory has its name.
        UsageError: the path is a link, a device, a pipe or a socket.
        WriteError: the directory of a file, or the nearest that exists above it, cannot be written to.
    """
    paths = tuple(paths)
    for path in paths:
        if path.is_dir():
            raise OutputExistsError(f"output {path} is a directory", hint=f"Choose {opt.another_output}.")
    refuse_special(paths)
    if not overwrite:
        _refuse_existing_files(paths, waiting_files(paths))
    for directory in dict.fromkeys(path.parent for path in paths):
        _refuse_unwritable(directory)


def waiting_files(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the files finished and not moved by a killed command, next to the paths; changes nothing."""
    directories = dict.fromkeys(path.parent for path in paths)
    return frozenset(
        directory / name
        for directory in directories
        for interruption in interrupted_in(directory)
        for name in interruption.completes
    )


def is_waiting(path: Path, outputs: Iterable[Path]) -> bool:
    """Return True if recovery next to the outputs would first move a file to a path."""
    return path.absolute() in {waiting.absolute() for waiting in waiting_files(outputs)}


def recover(paths: Iterable[Path]) -> None:
    """Complete or remove unfinished work of killed commands in the directories of files to write.

    Readers of the directories also call this function first. Changes are reported to the user.
    """
    for directory in dict.fromkeys(path.parent for path in paths):
        settle_interrupted(directory)


def refuse_special(paths: Iterable[Path]) -> None:
    """Refuse irregular output files: replacing a device or a pipe would remove it.

    Links are refused as well: a write through a link changes another file, and a replacement destroys the link.

    Raises:
        UsageError: names the output and its type.
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # missing, or reported when it is written
        if stat.S_ISLNK(mode):
            raise UsageError(
                f"output {path} is a symbolic link to {path.readlink()}",
                hint=f"Pass the file it leads to, or {opt.another_output}.",
            )
        if not stat.S_ISREG(mode):
            kind = next((words for is_kind, words in _SPECIAL_KINDS.items() if is_kind(mode)), "not a regular file")
            raise UsageError(f"output {path} is {kind}", hint="Pass the path of a regular file.")


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Refuse outputs that would replace an input, by any path.

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
                    f"output {output} is the input {input_path}",
                    hint=f"Choose {opt.another_output}.",
                )


def _is_same_entry(output: Path, input_path: Path) -> bool:
    """Return True if replacing one path removes the other.

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


def _refuse_existing_files(paths: Iterable[Path], waiting: Collection[Path] = ()) -> None:
    """Refuse existing files, and files finished by a killed command.

    Raises:
        OutputExistsError: the message names the first file.
    """
    for path in paths:
        if os.path.lexists(path) or path in waiting:
            finished = " (finished by a command that was killed; the next command that writes here puts it in place)"
            is_built = (
                path.parent / file_names.BUILD_MANIFEST_NAME
            ).is_file() and path.suffix.lower() == file_names.MODEL_SUFFIX
            raise OutputExistsError(
                f"output {path} exists already{finished if path in waiting else ''}",
                hint=f"It belongs to a build, whose other files are of its model: choose {opt.another_output}."
                if is_built
                else f"Use {opt.overwrite} to replace it, or choose {opt.another_output}.",
            )


def _refuse_unwritable(directory: Path) -> None:
    """Refuse a directory without permission to create files, in it or in its nearest existing parent.

    Raises:
        WriteError: the reason is in the message.
    """
    absolute = directory.absolute()
    nearest_existing = next((parent for parent in (directory, *absolute.parents) if os.path.lexists(parent)), None)
    if nearest_existing is None:
        # Windows: a drive or a share that is not connected.
        raise WriteError(
            f"cannot write {directory}: {absolute.anchor} does not exist",
            hint=f"Connect it, or choose {opt.another_output}.",
        )
    # os.access is not enough: it ignores read-only file systems and Windows' access lists.
    with write_errors_of(directory), tempfile.TemporaryFile(dir=nearest_existing):
        pass


def write_error(path: Path, error: OSError) -> WriteError:
    """Return the error for an unwritable path, with reason and remedy."""
    if is_held(error, path):
        reason, remedy = "another program has it open", "Close that program"
    else:
        reason, remedy = error.strerror or first_line(error), _REMEDIES.get(error.errno or 0, "")
    is_temporary = any(part.startswith(file_names.TEMPORARY_PREFIX) for part in path.parts)
    alternative = "set another folder with TMPDIR (on Windows TEMP)" if is_temporary else f"choose {opt.another_output}"
    hint = f"{remedy}, or {alternative}." if remedy else f"{alternative[0].upper()}{alternative[1:]}."
    return WriteError(f"cannot write {path}: {reason}", hint=hint)


@contextlib.contextmanager
def write_errors_of(path: Path) -> Iterator[None]:
    """Convert errors of the operating system in the block into write errors of a path.

    Raises:
        WriteError: the reason is in the message.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def _link_aside(target: Path, aside: Path) -> bool:
    """Create a hard link ``aside`` to a file, in a new folder if needed; False if links are not supported.

    After a kill, the file is still at its path.
    """
    try:
        aside.parent.mkdir(exist_ok=True)
        return link_file(target, aside)
    except OSError:
        return False


def _put_aside(folder: Path, target: Path) -> Path:
    """Link or move an earlier file into a hidden folder until the commit is complete; return its path there."""
    aside = folder / EARLIER / target.name
    if _link_aside(target, aside):
        return aside
    # Without links, the target is missing for the instant between two renames.
    if not (folder / file_names.JOURNAL_NAME).exists():
        write_journal(folder, folder / STAGED, target.parent, [target.name], [])
    aside = folder / MOVED_ASIDE / target.name
    aside.parent.mkdir(exist_ok=True)
    move_file(target, aside)
    return aside


def _undo_move(folder: Path, target: Path, temporary_path: Path, aside: Path) -> None:
    """Undo a move.

    The folder of the earlier file distinguishes a kill during the undo from a deletion by the user. An earlier file
    that cannot be restored stays in the hidden folder for the next command. No error is raised: the reason of the undo
    is reported.
    """
    with contextlib.suppress(OSError):
        if os.path.lexists(target) and aside.samefile(target):
            remove_file(aside)  # second name of a file still at its path, which another program may have open
            return
        _put_back(folder, target, temporary_path, aside)


def _undo_creation(target: Path, temporary_path: Path) -> None:
    """Move a new file back to its temporary path, if possible."""
    with contextlib.suppress(OSError):
        move_file(target, temporary_path)


def _put_back(folder: Path, target: Path, temporary_path: Path, aside: Path) -> None:
    """Exchange a moved file and the earlier file: the moved file returns to its temporary path."""
    if not os.path.lexists(temporary_path):
        moved = folder / MOVED_ASIDE / target.name
        moved.parent.mkdir(exist_ok=True)
        move_file(aside, moved)
        move_file(target, temporary_path)
        aside = moved
    move_file(aside, target)


def _is_torn(folder: Path, directory: Path) -> bool:
    """Return True if an earlier file is not restored at its path, or if this cannot be determined."""
    asides = [folder / name for name in (EARLIER, MOVED_ASIDE)]
    try:
        targets = {path: directory / path.name for aside in asides if aside.exists() for path in aside.iterdir()}
        return any(not target.exists() or not aside.samefile(target) for aside, target in targets.items())
    except OSError:
        return True


def _drop_outdated(temporary_paths: Mapping[Path, Path], giving_way: Mapping[Path, State]) -> set[Path]:
    """Remove written files whose target has changed since they were reserved; return their targets."""
    lost = {target for target, state in giving_way.items() if target in temporary_paths and file_state(target) != state}
    for target in lost:
        remove_file(temporary_paths[target])
    return lost


class OutputFiles:
    """A transaction over output files: :meth:`commit` moves all written files to their targets, or none.

    Leaving the ``with`` block without a commit removes the written files and the directories created for them, and
    leaves earlier files unchanged. Weights of a replaced model are removed with it unless another model refers to them.
    After a kill during a commit, the next transaction in the directory completes the commit; each model is complete
    meanwhile, because data is moved before the model, under a unique name. After an error, files in several directories
    are all unchanged; after a kill, each directory is consistent by itself.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OutputFiles() as files:
    ...     _ = files.reserve(folder / "new" / "report.md").write_text("done")
    ...     [path.name for path in files.commit()]
    ['report.md']
    """

    def __init__(self) -> None:
        """Start an empty transaction."""
        self._reserved: dict[Path, None] = {}
        """In the order of reservation."""
        self._giving_way, self.gave_way = dict[Path, State](), set[Path]()
        self._protected: set[Path] = set()
        self._folders: dict[Path, OwnedFolder] = {}
        self._unused: dict[Path, list[str]] = {}
        self._created_directories: list[Path] = []
        self._is_committed = False

    def __enter__(self) -> OutputFiles:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Return this transaction."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Remove uncommitted files; errors are reported as by :meth:`explained_errors`."""
        self._remove_temporary_files()
        if error is not None:
            self._explain_error(error)

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Convert disk errors inside the block to a WriteError that names the output.

        Raises:
            WriteError: a file could not be written.
        """
        try:
            yield
        except (WriteError, OSError) as error:
            self._explain_error(error)
            raise

    def _explain_error(self, error: BaseException) -> None:
        """Name the output in a WriteError, in place; convert a disk error about an output to a WriteError."""
        if isinstance(error, WriteError):
            # The message names the hidden folder, which no longer exists.
            for directory, folder in self._folders.items():
                error.message = error.message.replace(str(folder.path / STAGED), str(directory))
        if isinstance(error, OSError) and (target := self._target_of(error)) is not None:
            raise write_error(target, error) from error

    def write_text(self, path: Path, text: str) -> None:
        """Write a text to be committed to ``path``; in UTF-8, with Unix line ends.

        Raises:
            WriteError: the directory cannot be created or written to.
        """
        self.reserve(path).write_text(text, encoding="utf-8", newline="\n")

    def write_json(self, path: Path, record: Mapping[str, object]) -> None:
        """Write a JSON object for people to read; raises as :meth:`write_text` does."""
        self.write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def reserve(self, path: Path, *, gives_way: bool = False) -> Path:
        """Return the temporary path to write the file for ``path`` to; repeated calls return the same path.

        The path has the same file name in a hidden folder. The first call for a directory settles interrupted writes
        there, and creates the hidden folder. Every other file written into that folder is moved as well, such as the
        external data of a model. With ``gives_way``, the commit skips the file if another file exists at ``path`` by
        then, and lists it in ``gave_way``.

        Raises:
            WriteError: the directory cannot be created or written to.
        """
        try:
            path = path.absolute()
            if path.parent not in self._folders:
                self._make_directory(path.parent)
                settle_interrupted(path.parent)
                self._folders[path.parent] = OwnedFolder.make(path.parent, file_names.PARTIAL_PREFIX)
                (self._folders[path.parent].path / STAGED).mkdir()
            self._giving_way.update({path: file_state(path)} if gives_way and path not in self._giving_way else {})
        except OSError as error:
            raise write_error(path, error) from error
        self._reserved.setdefault(path)
        return self._folders[path.parent].path / STAGED / path.name

    def keep(self, paths: Iterable[Path]) -> None:
        """Retain files that a replaced model refers to, such as the weights of an input."""
        self._protected.update(path.absolute() for path in paths)

    def written_sizes(self) -> dict[Path, int]:
        """Return the files written so far: final path → size in bytes."""
        return {target: temporary_path.stat().st_size for target, temporary_path in self._temporary_paths().items()}

    def commit(self, *, overwrite: bool = True) -> dict[Path, int]:
        """Move all written files to their targets; return target → size in bytes.

        Args:
            overwrite: Replace existing files.

        Raises:
            OutputExistsError: another process has created a target, and ``overwrite`` is False.
            UsageError: a target has become a link, a device, a pipe or a socket.
            WriteError: a file could not be moved; all earlier files are unchanged.
        """
        self.gave_way |= _drop_outdated(self._temporary_paths(), self._giving_way)
        reserved_places = self._temporary_paths()
        refuse_special(reserved_places)
        if not overwrite:
            _refuse_existing_files(
                path for path in reserved_places if path in self._reserved and path not in self._giving_way
            )
        sizes = self.written_sizes()
        unused = self._orphaned_data(reserved_places)
        with contextlib.ExitStack() as undo:
            target = None
            try:
                for directory, folder in self._folders.items():
                    names = [path.name for path in reserved_places if path.parent == directory]
                    target = directory / names[-1] if names else target
                    # A single move is atomic, if hard links are supported.
                    if len(names) + len(unused.get(directory, ())) > 1:
                        write_journal(folder.path, folder.path / STAGED, directory, names, unused.get(directory, ()))
                for target, temporary_path in reserved_places.items():
                    self._move_file(target, temporary_path, undo)
            except OSError as error:
                # Leaving the stack undoes the moves, the last one first.
                raise write_error(target or Path(), error) from error
            with interruptions_held():
                self._unused = unused
                undo.pop_all()
                self._is_committed = True
                record_committed(reversed(sizes))  # the model is moved last
        self._remove_temporary_files()
        return sizes

    def _move_file(self, target: Path, temporary_path: Path, undo: contextlib.ExitStack) -> None:
        """Move a file to its target, and register the undo; a replaced file is put aside until then.

        Args:
            target: The target.
            temporary_path: The written file.
            undo: Receives the undo.
        """
        is_there = os.path.lexists(target)
        if is_there and target in self._reserved:
            folder = self._folders[target.parent].path
            undo.callback(_undo_move, folder, target, temporary_path, _put_aside(folder, target))
        move_file(temporary_path, target)
        if not is_there:
            # Data is named after its content: the replaced file was equal.
            undo.callback(_undo_creation, target, temporary_path)

    def _orphaned_data(self, targets: Iterable[Path]) -> dict[Path, list[str]]:
        """Return directory → weight files of the replaced models that may be removed."""
        orphans: dict[Path, list[str]] = {}
        for target in targets:
            if target.suffix.lower() != file_names.MODEL_SUFFIX or not os.path.lexists(target):
                continue
            from winml.modelkit.onnx.files.placing import replaceable_data

            paths = {target.with_name(name) for name in replaceable_data(target)} - {*self._protected, *self._reserved}
            orphans.setdefault(target.parent, []).extend(path.name for path in paths if os.path.lexists(path))
        return orphans

    def _temporary_paths(self) -> dict[Path, Path]:
        """Return final path → temporary path. The file reserved first is moved last, after the files it names."""
        temporary_paths = {
            directory / staged_path.name: staged_path
            for directory, folder in self._folders.items()
            for staged_path in sorted((folder.path / STAGED).iterdir() if (folder.path / STAGED).exists() else ())
        }
        companions = [path for path in temporary_paths if path not in self._reserved]
        return {
            path: temporary_paths[path] for path in (*companions, *reversed(self._reserved)) if path in temporary_paths
        }

    def _make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, and remember the created directories."""
        missing_directories = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for parent in reversed(missing_directories):
            parent.mkdir(exist_ok=True)
            self._created_directories.append(parent)

    def _target_of(self, error: OSError) -> Path | None:
        """Return the output concerned by a system error; `None` for other files."""
        # Of a copy, the second one is the file that is written.
        names = [name for name in (error.filename2, error.filename) if isinstance(name, (str, bytes))]
        if names:
            staged_path = Path(os.fsdecode(names[0]))
            staged = {folder.path / STAGED: directory for directory, folder in self._folders.items()}
            return staged[staged_path.parent] / staged_path.name if staged_path.parent in staged else None
        return next(reversed(self._reserved), None) if error.errno in DISK_ERRORS else None

    def _remove_temporary_files(self) -> None:
        """Remove temporary files; repeated after an interruption."""
        for directory, names in self._unused.items():
            from winml.modelkit.onnx.files.placing import remove_unused

            remove_unused(directory, names)
        for directory, folder in self._folders.items():
            if not self._is_committed and _is_torn(folder.path, directory):
                folder.release()  # earlier files could not be put back: the next command completes the journal
                continue
            with contextlib.suppress(OSError):
                remove_journal(folder.path)
            folder.remove()
        if self._is_committed:
            return
        for directory in reversed(self._created_directories):
            with contextlib.suppress(OSError):
                # Only if empty: another process may have written a file there.
                directory.rmdir()


@dataclass(frozen=True)
class ExportPaths:
    """The files written by an export."""

    model: Path
    sidecar: Path | None
    """``<stem>_htp_metadata.json``; None without a hierarchy."""
    report: Path | None
    """``<stem>_htp_export_report.md``; None if not requested."""

    @classmethod
    def for_output(cls, output: str | os.PathLike[str], *, with_sidecar: bool, with_report: bool) -> ExportPaths:
        """Return the paths of the files beside a model.

        Raises:
            UsageError: the path is a directory, is none at all, or does not end in ``.onnx``.
        """
        model = Path(output)
        named_path(model)
        if model.is_dir():
            raise UsageError(
                f"output {model} is a directory", hint=f"Pass the file: {model / file_names.BUILT_MODEL_NAME}"
            )
        if model.suffix.lower() != file_names.MODEL_SUFFIX:
            inside = "" if model.suffix else f", or {model / file_names.BUILT_MODEL_NAME} for a folder of that name"
            raise UsageError(
                f"output {model} does not end in .onnx",
                hint=f"Name it {model.with_name(model.name + '.onnx')}{inside}",
            )
        return cls(
            model=model,
            sidecar=file_names.sidecar_path(model) if with_sidecar else None,
            report=file_names.report_path(model) if with_report else None,
        )

    def refuse_existing(self, *, overwrite: bool) -> None:
        """Refuse existing files that may not be replaced, and directories that cannot be written.

        Raises:
            OutputExistsError: names the first file that exists.
            UsageError: names the first irregular file.
        """
        outputs = (self.model, self.sidecar, self.report)
        refuse_existing([path for path in outputs if path], overwrite=overwrite)


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the ONNX file, its data files, and the paths of sidecar and report, existing or not."""
    from winml.modelkit.onnx.files.placing import external_files

    try:
        data = external_files(path)
    except InputError:
        data = ()  # running the model reports the error
    return (path, *data, file_names.sidecar_path(path), file_names.report_path(path))
