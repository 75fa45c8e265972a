"""Ends the command: every exit of a verb becomes a message on stderr and an exit status."""

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
    missing_library,
    missing_name,
)
from winml.modelkit.registries import damaged_package

_SIGNALS = tuple(name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C; a termination request of a job scheduler or a container; a closed terminal."""
_received: list[int] = []
"""Received signals, in order."""
_earlier: dict[int, Any] = {}
"""Signal → its previous handler."""
_last: list[int] = []
"""The signal that ends the process."""
_status: list[int] = []
"""The exit status of the process."""
_TALKS_AT_THE_END = "triton"
"""Part of torch for CUDA. Version 3.9 prints leaked objects on stderr when Python frees its modules."""


class Interrupted(KeyboardInterrupt):
    """An interruption with a message on the files that the verb has written."""


def catch_signals() -> None:
    """Make termination signals raise KeyboardInterrupt, so the verb cleans up."""
    for name in _SIGNALS:
        number = getattr(signal, name)
        # A shell that starts a command in the background, or nohup, may have set a signal to be ignored.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _earlier[number] = signal.signal(number, _raise_interruption)


def _raise_interruption(number: int, _frame: object) -> None:
    """Record a signal, and raise KeyboardInterrupt; the handler of termination signals."""
    _received.append(number)
    raise KeyboardInterrupt


def exit_status(run: Callable[[], Any], *, debug: bool) -> int:
    """Run a command, report errors on stderr, and return the exit status.

    Args:
        run: Runs the verb, without exits and messages of click.
        debug: Print the traceback of an unexpected error.
    """
    try:
        return run() or 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        return _errors.report_click_error(error)
    except WinMLError as error:
        # Raised before the verb runs, or in a plug-in verb that is no WinMLCommand.
        return _errors.report_error(error)
    except BaseException as error:
        # Click replaces an interruption by an Abort.
        cause = error.__cause__ if isinstance(error, click.Abort) and error.__cause__ is not None else error
        if _received and isinstance(cause, (KeyboardInterrupt, Exception)):
            # A library may convert the interruption into a different error, as extension modules do on import.
            tell(f"interrupted: {cause if isinstance(cause, Interrupted) else _committed_words()}")
            return 128 + _received[0]
        if debug:
            traceback.print_exception(cause)
        # Our code raises subclasses of Exception only: any other BaseException comes from foreign code.
        winml_error = _convert_error(cause) if isinstance(cause, Exception) else ended_by_foreign_code(cause)
        if winml_error is not None:
            return _errors.report_error(winml_error)
        tell(f"internal error: {type(cause).__name__}: {first_line(cause)}")
        hint = "" if debug else " Run it again with --debug for the traceback."
        tell(f"This is a bug in winml, not in your command. Please report it.{hint}")
        return WinMLError.exit_code


def _convert_error(error: Exception) -> WinMLError | None:
    """Convert an error of the system or of an installed package into a WinMLError; None: a bug in winml."""
    if _errors.is_out_of_memory(error):
        return _errors.out_of_memory_error(error)
    if isinstance(error, OSError) and (converted := _convert_system_error(error)) is not None:
        return converted
    if (lacking := missing_library(error)) is not None:
        return lacking
    if damage := damaged_package(error):
        package, file = damage
        return InputError(
            f"the installed package {package} is damaged: {file} cannot be read",
            hint=f"Reinstall it (pip install --force-reinstall {package}), or delete the folder {file.parent}.",
        )
    if missing := missing_name(error):
        library = missing.partition(" ")[0]
        note = " Commands on ONNX files still work." if library in ("torch", "transformers") else ""
        return InputError(
            f"{missing}, which this command requires",
            hint=f"Install another version of {library}{_declared_versions(library)}.{note}",
        )
    return import_error(error)


def _convert_system_error(error: OSError) -> WinMLError | None:
    """Convert an error of the operating system with a known cause; None for other causes."""
    from winml.modelkit.onnx.files.moving import is_held
    from winml.modelkit.onnx.files.output_files import write_error

    if _raises_os_error(Path.cwd):
        return InputError(
            "the working directory was deleted, by code of the model or by another process",
            hint="Run it in an existing folder, or use absolute paths.",
        )
    if _raises_os_error(tempfile.gettempdir):
        # Some packages make a temporary file while they are imported.
        return InputError(
            "no temporary file can be written: every temporary folder is full, read-only or missing",
            hint="Free disk space, or set TMPDIR (on Windows TEMP) to a different folder.",
        )
    file = error.filename2 or error.filename
    if isinstance(file, (str, bytes)) and is_held(error, held := Path(os.fsdecode(file))):
        return write_error(held, error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
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


def _raises_os_error(query: Callable[[], object]) -> bool:
    try:
        query()
    except OSError:
        return True
    return False


def _declared_versions(library: str) -> str:
    """Return the required versions of a library in parentheses; empty if winml is not an installed package."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("winml-modelkit") or ():
            if re.split(r"[^\w-]", requirement)[0].replace("-", "_") == library:
                return f" (winml requires {requirement})"
    return ""


def resuming_words() -> str:
    """Return a note on the folder with the saved measurements of an interrupted search; empty if nothing was saved."""
    from winml.modelkit.onnx.files.named_paths import committed_files

    folder = next(filter(None, map(_unfinished_folder, committed_files())), None)
    return "" if folder is None else f"measurements are saved in {_short_path(folder)}; the same command resumes there"


def _unfinished_folder(file: Path) -> Path | None:
    """Return the folder of the interrupted search that contains a file at any depth; else None."""
    from winml.modelkit.file_names import UNFINISHED_PREFIX

    return next((folder for folder in file.parents if folder.name.startswith(UNFINISHED_PREFIX)), None)


def _committed_words() -> str:
    """Describe the files that the command had written before it ended."""
    from winml.modelkit.onnx.files.named_paths import committed_files

    files = [file for file in committed_files() if _unfinished_folder(file) is None]
    if not files:
        return resuming_words() or "no file was changed"
    rest_words = f" and {len(files) - 1} more file{'' if len(files) == 2 else 's'}" if len(files) > 1 else ""
    return f"{_short_path(files[0])}{rest_words} {'were' if rest_words else 'was'} written before"


def tell_settled() -> None:
    """Report how leftovers of killed commands were settled, and leftovers that remain."""
    from winml.modelkit.onnx.files.named_paths import take_recorded_reads, take_settled_changes

    notes = take_settled_changes()
    if paths := take_recorded_reads():
        from winml.modelkit.onnx.files.recovery import unfinished_notes

        notes += unfinished_notes(paths)
    for note in notes:
        tell(f"note: {note}")


def _short_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def end_process(status: int, *, is_own_process: bool) -> None:
    """Flush the streams and exit with a status; a result that cannot be written is a failure.

    Args:
        status: The status of the command.
        is_own_process: True if nothing else runs in this process. A process that was asked to end by a signal then ends
            by this signal, so that a loop in a shell ends, too.
    """
    from winml.modelkit.onnx.files.named_paths import committed_files

    problem = finish_streams()
    # A user who closes stdout does not need the result of a command that writes files.
    is_dispensable = problem is not None and problem.errno == errno.EBADF and bool(committed_files())
    if problem is not None and not is_dispensable:
        remark = f"; {_committed_words()}" if committed_files() else ""
        tell(f"error: the result cannot be written to stdout: {problem.strerror}{remark}")
        tell("Redirect stdout to a writable location with free space.")
        # A lost result counts as a failure, whatever the result was.
        status = WinMLError.exit_code if status in (0, _errors.NEGATIVE_RESULT) else status
    for number, handler in _earlier.items():
        # Cleanup is complete, and Python would print a traceback of the interruption.
        signal.signal(number, signal.SIG_DFL if is_own_process else handler)
    if _received and status == 128 + _received[0] and is_own_process and os.name == "posix":
        _last.append(_received[0])
    elif is_own_process:
        _status.append(status)
    sys.exit(status)


@atexit.register
def _end_by_signal() -> None:
    """End the process by the received signal; registered first, to run after the cleanup of the libraries."""
    if _last:
        signal.signal(_last[0], signal.SIG_DFL)
        os.kill(os.getpid(), _last[0])
    if _status and _TALKS_AT_THE_END in sys.modules and finish_streams() is None:
        os._exit(_status[0])
