"""Ownership of stdout and stderr.

Stdout is reserved for the result: output of libraries and of user code is redirected to stderr, and their warnings are
dropped. A failed write to a stream never stops the command; the reason is reported at the end.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from winml.modelkit.onnx.files.named_paths import restored_working_directory
from winml.modelkit.words import json_printable, message_words

if TYPE_CHECKING:
    from winml.modelkit.report.document import Document, Linked

_READER_LEFT = (errno.EPIPE, *((errno.EINVAL,) if sys.platform == "win32" else ()))
"""Specified: errors of a pipe without a reader."""

_own: dict[str, TextIO] = {}
"""The stderr of the command while foreign code runs, which may close or replace ``sys.stderr``."""


class _EnduringFile(io.FileIO):
    """A file that drops data after a failed write, and stores the reason."""

    problem: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the data, or drop it after an error."""
        view = memoryview(data).cast("B")
        try:
            count = super().write(view)
            if count is None:
                # A parent process may have made the stream non-blocking: wait, so that no output is lost.
                select.select([], [self], [])
                return 0
        except OSError as error:
            # The error itself has a traceback that keeps the buffer alive.
            self.problem = self.problem or OSError(error.errno, error.strerror)
            return view.nbytes
        return count


class _SharedStream(io.TextIOWrapper):
    """A stream for foreign code; ``close`` only flushes, because other code also writes to the stream."""

    def close(self) -> None:
        """Flush the buffer."""
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def open_streams() -> None:
    """Create streams for the command, independent of the original streams and of changes by foreign code."""
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_RDWR)):
        if not _is_open(descriptor):
            # A closed descriptor would be reused by the next opened file. Stdout is opened read-only, so that a lost
            # result fails and is reported; stderr accepts and drops all output, since no report is possible.
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as long as the process
    sys.stdout = _own_stream(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _own_stream(sys.stderr, sys.__stderr__, 2)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _own_stream(stream: TextIO | None, original: TextIO | None, descriptor: int) -> TextIO:
    """Return a private stream on a descriptor, or the stream itself if it is not the process's original stream."""
    if stream is not None:
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # PYTHONUNBUFFERED leaves the buffer out
        # Exclude the console of Windows, and the streams of a test or a notebook.
        if stream is not original or type(raw) is not io.FileIO or raw.fileno() != descriptor:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
            return stream
        with contextlib.suppress(OSError):
            stream.flush()
    raw = _EnduringFile(os.dup(descriptor), "w")
    encoding = "utf-8" if stream is None else stream.encoding
    if sys.platform == "win32" and "PYTHONIOENCODING" not in os.environ:
        encoding = "utf-8"  # the code page lacks letters, and no reader of a file or a pipe knows it
    # A character that the terminal lacks is replaced; it never stops the command.
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="replace",
        newline="\n",
        line_buffering=descriptor == 2 or raw.isatty(),
    )


def finish_streams() -> OSError | None:
    """Flush the streams; return the write error of the result: None without error, or if the reader has left."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    problem = raw.problem if isinstance(raw, _EnduringFile) else None
    return None if problem is None or problem.errno in _READER_LEFT else problem


def own_stderr() -> TextIO:
    """Return the stderr of the command, also while foreign code runs."""
    return _own.get("stderr", sys.stderr)


def tell(message: str, *, start: str = "", end: str = "\n") -> None:
    """Write a message to stderr on one line, with printable characters only; very long texts are shortened.

    Args:
        message: A sentence; may contain foreign texts.
        start: Unescaped text before the message, such as a carriage return.
        end: Unescaped text after the message.
    """
    stream = own_stderr()
    with contextlib.suppress(OSError, ValueError):
        stream.write(f"{start}{message_words(message)}{end}")
        stream.flush()


@contextlib.contextmanager
def library_output_to_stderr() -> Iterator[None]:
    """Redirect output inside the block to stderr, including output of code that writes to the descriptor itself.

    Code inside the block gets separate stream objects, and may close or replace the streams. A change of the working
    directory is undone at the end of the block.
    """
    streams = sys.stdout, sys.stderr
    outer = dict(_own)
    sys.stdout.flush()
    _own.setdefault("stderr", sys.stderr)
    try:
        with restored_working_directory(), _redirected_descriptors() as stderr:
            sys.stdout = sys.stderr = streams[1] if stderr is None else stderr
            yield
    finally:
        sys.stdout, sys.stderr = streams
        _own.clear()
        _own.update(outer)


@contextlib.contextmanager
def _redirected_descriptors() -> Iterator[TextIO | None]:
    """Redirect descriptor 1 to stderr, and restore both; yields a stream for stderr, None without descriptors."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.fileno()
    except (io.UnsupportedOperation, ValueError, AttributeError):
        # Streams of a notebook have no descriptors.
        yield None
        return
    copies = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    raw = _EnduringFile(2, "w", closefd=False)
    stderr = _SharedStream(io.BufferedWriter(raw), encoding=sys.stderr.encoding, errors="replace", line_buffering=True)
    try:
        os.dup2(2, 1)
        yield stderr
    finally:
        stderr.close()
        for descriptor, copy in copies.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def print_json(record: Mapping[str, object]) -> None:
    """Write a record to stdout."""
    print_json_text(json_text(record))


def print_json_text(text: str) -> None:
    """Write JSON to stdout; non-ASCII letters are escaped on Windows, and if stdout is not UTF-8.

    PowerShell decodes the output of programs in the code page of the console.
    """
    encoding = getattr(sys.stdout, "encoding", None)
    if sys.platform == "win32" or (encoding is not None and codecs.lookup(encoding).name != "utf-8"):
        import json

        text = json.dumps(json.loads(text), indent=2)
    click.echo(text)


def json_text(record: Mapping[str, object]) -> str:
    """Return a record as indented JSON, with ``schema_version`` first if the record has none."""
    return plain_json_text(record if "schema_version" in record else {"schema_version": 1, **record})


def plain_json_text(value: Mapping[str, object]) -> str:
    """Return indented JSON with letters of all languages unescaped and control characters escaped."""
    import json

    return json_printable(json.dumps(value, indent=2, ensure_ascii=False))


def show_answer(
    record: Mapping[str, object],
    files: Mapping[str, Sequence[Path]],
    options: Mapping[str, Any],
    describe: Callable[[], Document],
    **texts: Callable[[Path], str],
) -> None:
    """Write the files of a result, all or none of them, and print the result in the requested format.

    Args:
        record: The result.
        files: Option → its files.
        options: Options of the command, with ``overwrite`` and ``format_``.
        describe: Makes the document of the result.
        texts: Option other than ``output`` → function that returns the text of one of its files.

    Raises:
        OutputExistsError: a file exists, and may not be overwritten.
        WriteError: a file cannot be written.
    """
    texts = {"output": lambda _path: f"{json_text(record)}\n", **texts}
    paths = write_answer(files, texts, overwrite=options["overwrite"])
    show_result(record, options, lambda: describe().with_files(paths), is_answer=True)


def show_result(
    record: Mapping[str, object],
    options: Mapping[str, object],
    describe: Callable[[], Document],
    *,
    is_answer: bool = False,
    warnings: Iterable[str] = (),
) -> None:
    """Print a result: as JSON if requested, else as text.

    Args:
        record: The result as JSON-ready values.
        options: Options of the verb: ``format_`` and, if present, ``quiet`` and ``verbose``.
        describe: Makes the document of the result.
        is_answer: True if printing the result is the purpose of the verb, so that ``--quiet`` does not suppress it;
            else the printed result only describes files.
        warnings: Notes that change the meaning of the result; printed on stderr if the text is not printed.
    """
    is_json = options["format_"] == "json"
    if is_json:
        print_json(record)
    if is_json or (options.get("quiet") and not is_answer):
        for warning in warnings:
            tell(f"Warning: {warning}")
        return
    from winml.modelkit.report.terminal import console_for, print_document

    print_document(describe(), console_for(sys.stdout), verbose=bool(options.get("verbose")))


def write_answer(
    files: Mapping[str, Sequence[Path]], texts: Mapping[str, Callable[[Path], str | bytes]], *, overwrite: bool
) -> list[Path]:
    """Write the files of a result, all or none of them; return their paths.

    Args:
        files: Option → its files.
        texts: Option → function that returns the content of one of these files.
        overwrite: Replace existing files.

    Raises:
        OutputExistsError: a file exists, and may not be overwritten.
        WriteError: a file cannot be written.
    """
    return write_files(
        {path: partial(texts[option], path) for option, paths in files.items() for path in paths}, overwrite=overwrite
    )


def write_files(texts: Mapping[Path, Callable[[], str | bytes]], *, overwrite: bool) -> list[Path]:
    """Write files, all or none of them; return their paths.

    Args:
        texts: Path → function that returns the text of the file, or its bytes.
        overwrite: Replace existing files.

    Raises:
        OutputExistsError: a file exists, and ``overwrite`` is False.
        WriteError: a file cannot be written.
    """
    from winml.modelkit.onnx.files.output_files import OutputFiles

    with OutputFiles() as files:
        for path, text in texts.items():
            content = text()
            if isinstance(content, bytes):
                files.reserve(path).write_bytes(content)
            else:
                files.write_text(path, content)
        files.commit(overwrite=overwrite)
    return list(texts)


_OPENED_BY = {
    "output": "– the results as JSON",
    "trace": "– kernels and modules over time, for ui.perfetto.dev or chrome://tracing",
    "node_data": "– numbers of the nodes, for Model Explorer beside the model",
    "model": "– the ONNX model, for Netron or Model Explorer",
    "exclude_list": "– the modules that stay in float, for --per-module",
}
"""Option that names a file → content of the file, and its viewers."""


def page_text(document: Document, page: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """Render a report as an HTML page.

    Args:
        document: The report.
        page: Path of the page.
        files: Option → its files, which are written with the page; options without a viewer, such as the page, get no
            link.
    """
    from winml.modelkit.report.html import render_html

    return render_html(replace(document, links=list(_page_links(page, files))))


def _page_links(page: Path, files: Mapping[str, Sequence[Path]]) -> Iterator[Linked]:
    """Yield a link, relative to the page, for each file with a viewer."""
    from winml.modelkit.report.document import Linked

    folder = page.absolute().parent
    for option, description in _OPENED_BY.items():
        for path in files.get(option, ()):
            try:
                target = Path(os.path.relpath(path.absolute(), folder)).as_posix()
            except ValueError:  # on another drive of Windows
                continue
            yield Linked(description, path.name, target)
