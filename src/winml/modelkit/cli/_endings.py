"""How does the command end? Every way out of a verb becomes a message on stderr and an exit status."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from winml.modelkit.cli import _errors
from winml.modelkit.cli._streams import finish_streams, tell
from winml.modelkit.errors import (
    InputError,
    UsageError,
    WinMLError,
    WriteError,
    ended_by_foreign_code,
    first_line,
    import_error,
    missing_name,
)
from winml.modelkit.registries import damaged_package

_SIGNALS = tuple(name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C; a polite request to end, from a job scheduler or a container; a terminal that is gone."""
_received: list[int] = []
"""Signals that were received, in order."""
_earlier: dict[int, Any] = {}
"""Signal to what was done before on receiving it."""
_last: list[int] = []
"""The signal by which the process ends."""
_status: list[int] = []
"""The status with which the process ends."""
_TALKS_AT_THE_END = "triton"
"""Comes with torch for CUDA. Version 3.9 lists objects that live to the end on stderr when Python frees its modules."""


class Interrupted(KeyboardInterrupt):
    """An interruption whose message states what the verb left behind."""


def catch_signals() -> None:
    """Let a signal that asks the process to end raise KeyboardInterrupt, so that the verb tidies up."""
    for name in _SIGNALS:
        number = getattr(signal, name)
        # A shell that starts a command in the background, or nohup, may have it ignore one.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _earlier[number] = signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def exit_status(run: Callable[[], Any], *, debug: bool) -> int:
    """Run a command, tell what went wrong, and return the exit status.

    Args:
        run: Runs the verb, without the exits and messages of click.
        debug: Show the traceback of an error that nobody foresaw.
    """
    try:
        return run() or 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        return _errors.report_click_error(error)
    except WinMLError as error:
        # Before the verb runs, or in one of a plug-in that is no WinMLCommand.
        return _errors.report_error(error)
    except BaseException as error:
        # Click turns an interruption into an error of its own.
        cause = error.__cause__ if isinstance(error, click.Abort) and error.__cause__ is not None else error
        if _received and isinstance(cause, (KeyboardInterrupt, Exception)):
            # A library may turn it into an error of its own, as extensions do while they are imported.
            tell(f"interrupted: {cause if isinstance(cause, Interrupted) else _committed_words()}")
            return 128 + _received[0]
        if debug:
            traceback.print_exception(cause)
        # An ending that is no Exception is none of ours: only code that is not ours ends the process like that.
        named = _named_error(cause) if isinstance(cause, Exception) else ended_by_foreign_code(cause)
        if named is not None:
            return _errors.report_error(named)
        tell(f"internal error: {type(cause).__name__}: {first_line(cause)}")
        hint = "" if debug else " Run it again with --debug for the traceback."
        tell(f"This is a bug in winml, not in your command. Please report it.{hint}")
        return WinMLError.exit_code


def _named_error(error: Exception) -> WinMLError | None:
    """Return the error of ours that says what the system or an installed package lacks; None: a bug in winml."""
    if _errors.is_out_of_memory(error):
        return _errors.out_of_memory_error(error)
    if isinstance(error, OSError) and (named := _system_error(error)) is not None:
        return named
    if damaged := damaged_package(error):
        package, file = damaged
        return InputError(
            f"the installed package {package} is damaged: {file} cannot be read",
            hint=f"Reinstall it (pip install --force-reinstall {package}), or delete the folder {file.parent}.",
        )
    if missing := missing_name(error):
        library = missing.partition(" ")[0]
        works = " Commands on ONNX files still work." if library in ("torch", "transformers") else ""
        return InputError(
            f"{missing}, which this command requires",
            hint=f"Install another version of {library}{_declared_versions(library)}.{works}",
        )
    return import_error(error)


def _system_error(error: OSError) -> WinMLError | None:
    if _fails(Path.cwd):
        return InputError(
            "the working directory was deleted, by code of the model or by another process",
            hint="Run it in an existing folder, or use absolute paths.",
        )
    if _fails(tempfile.gettempdir):
        # Some packages make a temporary file while they are imported.
        return InputError(
            "no temporary file can be written: every temporary folder is full, read-only or missing",
            hint="Free disk space, or set TMPDIR (on Windows TEMP) to a different folder.",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        file = error.filename2 or error.filename
        return WriteError(
            f"cannot write {file if file is not None else 'a file'}: {error.strerror}",
            hint="Free some space, or choose another output path.",
        )
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(
            f"the name is too long for this file system: {error.filename or error.strerror}",
            hint="Use a shorter name: the names of further files begin with it.",
        )
    return None


def _fails(query: Callable[[], object]) -> bool:
    try:
        query()
    except OSError:
        return True
    return False


def _declared_versions(library: str) -> str:
    """Return which versions of a library winml declares, in brackets; empty where it is not installed as a package."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("winml-modelkit") or ():
            if re.split(r"[^\w-]", requirement)[0].replace("-", "_") == library:
                return f" (winml requires {requirement})"
    return ""


def resuming_words() -> str:
    """Return where an interrupted search saved its measurements; empty if nothing was saved."""
    from winml.modelkit.onnx.files.named_paths import committed_files

    saved = next(filter(None, map(_unfinished_folder, committed_files())), None)
    return "" if saved is None else f"measurements are saved in {_shown(saved)}; the same command resumes there"


def _unfinished_folder(file: Path) -> Path | None:
    """Return the folder of an interrupted search that a file lies in, however deep; None where it lies in none."""
    from winml.modelkit.file_names import UNFINISHED_PREFIX

    return next((folder for folder in file.parents if folder.name.startswith(UNFINISHED_PREFIX)), None)


def _committed_words() -> str:
    from winml.modelkit.onnx.files.named_paths import committed_files

    files = [file for file in committed_files() if _unfinished_folder(file) is None]
    if not files:
        return resuming_words() or "no file was changed"
    others = f" and {len(files) - 1} more file{'' if len(files) == 2 else 's'}" if len(files) > 1 else ""
    return f"{_shown(files[0])}{others} {'were' if others else 'was'} written before"


def tell_settled() -> None:
    """Tell what became of files that a command which was killed had left unfinished, and which are still so."""
    from winml.modelkit.onnx.files.named_paths import taken_read, taken_settled

    notes = taken_settled()
    if paths := taken_read():
        from winml.modelkit.onnx.files.recovery import unfinished_notes

        notes += unfinished_notes(paths)
    for words in notes:
        tell(f"note: {words}")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def end_process(status: int, *, is_own_process: bool) -> None:
    """Leave with a status, after the streams are written; an answer that cannot be written is a failure.

    Args:
        status: What the command ended with.
        is_own_process: Whether nothing else runs in this process. Then one that a signal asked to end, ends by it, so
            that a shell's loop ends, too.
    """
    from winml.modelkit.onnx.files.named_paths import committed_files

    problem = finish_streams()
    # Who closes stdout wants no words of a work that was to write files.
    is_dispensable = problem is not None and problem.errno == errno.EBADF and bool(committed_files())
    if problem is not None and not is_dispensable:
        done = f"; {_committed_words()}" if committed_files() else ""
        tell(f"error: the result cannot be written to stdout: {problem.strerror}{done}")
        tell("Redirect stdout to a writable location with free space.")
        # An answer that is lost is none, whatever it was.
        status = WinMLError.exit_code if status in (0, _errors.NEGATIVE_RESULT) else status
    for number, handler in _earlier.items():
        # Nothing is left to tidy up, and Python would show where it was interrupted.
        signal.signal(number, signal.SIG_DFL if is_own_process else handler)
    if _received and status == 128 + _received[0] and is_own_process and os.name == "posix":
        _last.append(_received[0])
    elif is_own_process:
        _status.append(status)
    sys.exit(status)


@atexit.register
def _end_last() -> None:
    """End as the signal would have ended the process; registered first, so libraries have tidied up by then."""
    if _last:
        signal.signal(_last[0], signal.SIG_DFL)
        os.kill(os.getpid(), _last[0])
    if _status and _TALKS_AT_THE_END in sys.modules and finish_streams() is None:
        os._exit(_status[0])
