"""How does an error become words on stderr, once, with the next thing to do?"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import math
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

from winml.modelkit.cli._completion import complete_arguments, complete_values
from winml.modelkit.cli._help import HELP_SETTINGS, GroupedOption, help_all_option, write_help
from winml.modelkit.cli._streams import finish_streams, print_json, tell
from winml.modelkit.errors import (
    InputError,
    UsageError,
    WinMLError,
    WriteError,
    ended_by_foreign_code,
    error_chain,
    first_line,
    import_error,
    missing_name,
)
from winml.modelkit.fields import DEVICE
from winml.modelkit.registries import damaged_package
from winml.modelkit.words import printable

_MEMORY_HINT = (
    "Use smaller inputs (--shape-config, --input-specs), raise the limit of the process (ulimit -v), or use a "
    "machine with more memory."
)
_MEMORY_WORDS = ("bad_alloc", "bad allocation", "failed to map segment", "allocate memory", "out of memory")
"""How loaders of libraries, C++ and torch say it, none of them as a MemoryError."""
_LOST_ERROR = "error return without exception set"
"""What is left of an error in a C extension for which there was no memory either."""


_LARGEST_INT = 2**63 - 1
"""Specified: what tensors and C libraries take."""
_named_paths: list[str] = []
"""What the command was given to read, for an error that names no file itself."""


def _problem_of(value: object) -> str:
    """Return what is wrong with a value whatever its option means; empty where nothing is."""
    if isinstance(value, str) and not value.strip():
        return "the text is empty."
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number."
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        return f"{value} exceeds the maximum of {_LARGEST_INT}."
    if isinstance(value, (str, os.PathLike)):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return f"{printable(str(value))} is not UTF-8 text."
    return ""


class WinMLCommand(click.Command):
    """A verb: the errors we name end it with their sentence and exit code."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take what any command of click takes."""
        super().__init__(*arguments, **settings)
        self._add_libraries()
        self.params.append(help_all_option())
        self.context_settings = {**HELP_SETTINGS, **self.context_settings}
        complete_values(self.params)

    def _add_libraries(self) -> None:
        """Let a verb that names an execution provider take the library of its plug-in, too."""
        place = next((number for number, param in enumerate(self.params) if param.name == "ep"), None)
        if place is None:
            return
        option = GroupedOption(
            ["--ep-library"],
            group=DEVICE,
            multiple=True,
            metavar="NAME=PATH",
            help="Library of a plug-in execution provider. The variable WINML_EP_LIBRARY also takes it.",
        )
        self.params.insert(place + 1, option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        An empty text, as an unset variable of a shell leaves it, is no value of any option: who wrote it meant one.
        """
        if ctx.resilient_parsing:
            return super().parse_args(ctx, complete_arguments(self.params, args))
        remaining = super().parse_args(ctx, args)
        self._take_from_group(ctx)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            for number, one in enumerate(texts, 1):
                if problem := _problem_of(one):
                    where = f"value {number} of {len(texts)}: " if len(texts) > 1 else ""
                    raise click.BadParameter(f"{where}{problem}", ctx, param)
        _named_paths[:] = self._named_files(ctx)
        return remaining

    def _named_files(self, ctx: click.Context) -> list[str]:
        """Return what the command line names and is there; outputs are left out."""
        values = [ctx.params.get(param.name or "") for param in self.params if param.name != "output"]
        return [str(value) for value in values if isinstance(value, (str, os.PathLike)) and os.path.lexists(value)]

    @staticmethod
    def _take_from_group(ctx: click.Context) -> None:
        """Take the options that stood before all verbs as if they stood behind it."""
        passed = ctx.find_root().params
        for name in ("quiet", "verbose"):
            if passed.get(name) and name not in ctx.params:
                raise click.UsageError(
                    f"-{name[0]} (--{name}) stands before the verb, and {ctx.command_path!r} does not take it. "
                    "Omit it.",
                    ctx,
                )
            if passed.get(name):
                ctx.params[name] = True

    @staticmethod
    def _name_libraries(ctx: click.Context) -> None:
        """Name the libraries of plug-ins in the environment until the verb ends, for the processes it starts as well.

        Raises:
            UsageError: one is not ``NAME=PATH``, or is no file.
        """
        if not (libraries := ctx.params.pop("ep_library", ())):
            return
        from winml.modelkit.runtime.execution_providers import LIBRARY_VARIABLE, with_library

        before = os.environ.get(LIBRARY_VARIABLE, "")
        named = functools.reduce(lambda value, text: with_library(text, value), libraries, before)
        os.environ[LIBRARY_VARIABLE] = named
        ctx.call_on_close(lambda: os.environ.update({LIBRARY_VARIABLE: before}))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: the common options in groups, or all of them for ``--help-all``."""
        write_help(self, ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            self._name_libraries(ctx)
            return super().invoke(ctx)
        except WinMLError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if error.exit_code == NEGATIVE_RESULT and ctx.params.get("format_") == "json":
                print_json({"exit_code": error.exit_code, **error.as_record()})
            ctx.exit(report_error(error))


class WinMLGroup(click.Group):
    """A verb of several commands, with the same help."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take what any group of click takes."""
        super().__init__(*arguments, **settings)
        self.params.append(help_all_option())
        self.context_settings = {**HELP_SETTINGS, **self.context_settings}

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: the commands; for ``--help-all`` with the options of each."""
        write_help(self, ctx, formatter)


def report_error(error: WinMLError) -> int:
    """Tell an error that we name: its sentence, and what to do next; returns the exit status."""
    where = f" ({error.step})" if error.step else ""
    tell(f"error{where}: {error.message}")
    # Whatever could not be read or run for lack of memory, no advice about files helps.
    hint = _MEMORY_HINT if is_out_of_memory(error.__cause__) else error.hint
    if hint:
        tell(hint)
    return error.exit_code


def report_click_error(error: click.ClickException) -> int:
    """Tell a wrong use of the command line, with the verb whose help shows the right one."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # Nothing is requested: the help is the whole output.
        for line in click.unstyle(error.format_message()).splitlines():
            tell(line)
        return error.exit_code
    context = getattr(error, "ctx", None)
    tell(f"error: {error.format_message()}")
    if context is not None:
        tell(f"'{context.command_path} --help' shows its options.")
    return error.exit_code


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or one that it came of, is that of a process which gets no more memory."""
    for link in error_chain(error):
        words = str(link)
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, (ImportError, OSError, RuntimeError)) and any(word in words for word in _MEMORY_WORDS):
            return True
        if isinstance(link, SystemError) and _LOST_ERROR in words:
            return True
    return False


def report_out_of_memory(error: BaseException) -> int:
    """Tell that there is no more memory, with what the failing step says of it."""
    reason = first_line(error)
    files = f" for {', '.join(_named_paths)}" if _named_paths else ""
    tell(f"error: not enough memory{files}{'' if reason == type(error).__name__ else f': {reason}'}")
    tell(_MEMORY_HINT)
    return WinMLError.exit_code


def report_unexpected(error: Exception, *, debug: bool) -> int:
    """Tell an error nobody foresaw; it is ours to mend, so ask for a report."""
    if debug:
        traceback.print_exception(error)
    tell(f"internal error: {type(error).__name__}: {first_line(error)}")
    hint = "" if debug else " Run it again with --debug for the traceback."
    tell(f"This is a bug in winml, not in your command. Please report it.{hint}")
    return WinMLError.exit_code


# --- What does a verb end with that has an answer, and the answer is no?


NEGATIVE_RESULT = 3
"""Specified: exit code of a valid negative answer: a limit is not met, or two files are not the same."""


# --- How does the command end? Every way out of a verb becomes words on stderr and an exit status.


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

_DIRECTORY_GONE = InputError(
    "the working directory was deleted, by code of the model or by another process",
    hint="Run it in an existing folder, or use absolute paths.",
)
_NO_TEMPORARY_FOLDER = InputError(
    "no temporary file can be written: every temporary folder is full, read-only or missing",
    hint="Free disk space, or set TMPDIR (on Windows TEMP) to a different folder.",
)


class Interrupted(KeyboardInterrupt):
    """An interruption of which a verb says itself what it left behind.

    Attributes:
        words: What is there now.
    """

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


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
        return report_click_error(error)
    except WinMLError as error:
        # Before the verb runs, or in one of a plug-in that is no WinMLCommand.
        return report_error(error)
    except (KeyboardInterrupt, click.Abort) as error:
        # Click turns these two into one.
        cause = error.__cause__ if isinstance(error, click.Abort) and error.__cause__ is not None else error
        return _report_interruption(cause) if _received else _report_without_signal(cause, debug=debug)
    except Exception as error:
        if _received:
            # A library may turn it into an error of its own, as extensions do while they are imported.
            return _report_interruption(error)
        if is_out_of_memory(error):
            return report_out_of_memory(error)
        if isinstance(error, OSError) and not _has_working_directory():
            return report_error(_DIRECTORY_GONE)
        if isinstance(error, OSError) and not _has_temporary_folder():
            # Some packages make a temporary file while they are imported.
            return report_error(_NO_TEMPORARY_FOLDER)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return report_error(_disk_full(error))
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return report_error(_name_too_long(error))
        if damaged := damaged_package(error):
            return _report_damaged_package(*damaged, error, debug=debug)
        if missing := missing_name(error):
            return _report_missing_name(missing, error, debug=debug)
        if (broken := import_error(error)) is not None:
            if debug:
                traceback.print_exception(error)
            return report_error(broken)
        return report_unexpected(error, debug=debug)
    except BaseException as error:
        # No ending of ours: only code that is not ours ends the process like that.
        return _report_foreign_ending(error, debug=debug)


def _disk_full(error: OSError) -> WriteError:
    file = error.filename2 or error.filename
    return WriteError(
        f"cannot write {file if file is not None else 'a file'}: {error.strerror}",
        hint="Free some space, or choose another output path.",
    )


def _name_too_long(error: OSError) -> UsageError:
    return UsageError(
        f"the name is too long for this file system: {error.filename or error.strerror}",
        hint="Use a shorter name: the names of further files begin with it.",
    )


def _report_missing_name(missing: str, error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    library = missing.partition(" ")[0]
    works = " Commands on ONNX files still work." if library in ("torch", "transformers") else ""
    hint = f"Install another version of {library}{_declared_versions(library)}.{works}"
    return report_error(InputError(f"{missing}, which this command requires", hint=hint))


def _declared_versions(library: str) -> str:
    """Return which versions of a library winml declares, in brackets; empty where it is not installed as a package."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("winml-modelkit") or ():
            if re.split(r"[^\w-]", requirement)[0].replace("-", "_") == library:
                return f" (winml requires {requirement})"
    return ""


def _report_damaged_package(package: str, file: Path, error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    hint = f"Reinstall it (pip install --force-reinstall {package}), or delete the folder {file.parent}."
    return report_error(InputError(f"the installed package {package} is damaged: {file} cannot be read", hint=hint))


def _report_foreign_ending(error: BaseException, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    return report_error(ended_by_foreign_code(error))


def _report_interruption(error: BaseException) -> int:
    """Say what is there now; the status is that of a process the signal ended."""
    tell(f"interrupted: {error.words if isinstance(error, Interrupted) else _committed_words()}")
    return 128 + _received[0]


def _report_without_signal(error: BaseException, *, debug: bool) -> int:
    """Tell what looks like an interruption, but no signal was received."""
    if isinstance(error, Exception):
        return report_unexpected(error, debug=debug)
    return _report_foreign_ending(error, debug=debug)


def resuming_words() -> str:
    """Return where an interrupted search saved its measurements; empty if nothing was saved."""
    from winml.modelkit.graph.files.named_paths import committed_files

    saved = next(filter(None, map(_unfinished_folder, committed_files())), None)
    return "" if saved is None else f"measurements are saved in {_shown(saved)}; the same command resumes there"


def _unfinished_folder(file: Path) -> Path | None:
    """Return the folder of an interrupted search that a file lies in, however deep; None where it lies in none."""
    from winml.modelkit.file_names import UNFINISHED_PREFIX

    return next((folder for folder in file.parents if folder.name.startswith(UNFINISHED_PREFIX)), None)


def _committed_words() -> str:
    from winml.modelkit.graph.files.named_paths import committed_files

    files = [file for file in committed_files() if _unfinished_folder(file) is None]
    if not files:
        return resuming_words() or "no file was changed"
    others = f" and {len(files) - 1} more file{'' if len(files) == 2 else 's'}" if len(files) > 1 else ""
    return f"{_shown(files[0])}{others} {'were' if others else 'was'} written before"


def tell_settled() -> None:
    """Tell what became of files that a command which was killed had left unfinished, and which are still so."""
    from winml.modelkit.graph.files.named_paths import taken_read, taken_settled

    notes = taken_settled()
    if paths := taken_read():
        from winml.modelkit.graph.files.recovery import unfinished_notes

        notes += unfinished_notes(paths)
    for words in notes:
        tell(f"note: {words}")


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _has_temporary_folder() -> bool:
    try:
        tempfile.gettempdir()
    except OSError:
        return False
    return True


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
    from winml.modelkit.graph.files.named_paths import committed_files

    problem = finish_streams()
    # Who closes stdout wants no words of a work that was to write files.
    is_dispensable = problem is not None and problem.errno == errno.EBADF and bool(committed_files())
    if problem is not None and not is_dispensable:
        done = f"; {_committed_words()}" if committed_files() else ""
        tell(f"error: the result cannot be written to stdout: {problem.strerror}{done}")
        tell("Redirect stdout to a writable location with free space.")
        # An answer that is lost is none, whatever it was.
        status = WinMLError.exit_code if status in (0, NEGATIVE_RESULT) else status
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
