"""Calls into the ``tokenizers`` library: loading, encoding and decoding, each behind one guard.

The library is written in Rust. It panics on damaged files and on patterns it gives up on: an exception that is no
``Exception``, after a traceback of its own on stderr. Memory that it does not get ends the process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from winml.modelkit.errors import InputError, first_line, is_panic
from winml.modelkit.file_names import TOKENIZER_NAME
from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = ["LONGEST_TEXT_CHARACTERS", "tokenizer_call"]

LONGEST_TEXT_CHARACTERS: Final = 4_000_000
"""Characters of one call. Measured: 200 bytes of memory for each. Chosen: a million tokens of four letters."""
_PANIC = b" panicked at "
"""Specified: what Rust writes to stderr when it panics, between the name of the thread and the place."""


@contextlib.contextmanager
def tokenizer_call(source: Path | object, *texts: object, label: str = "") -> Iterator[None]:
    """Turn what goes wrong in a call of the tokenizers library into an error that names its file.

    Args:
        source: Folder of the tokenizer, or the tokenizer of transformers.
        *texts: What is encoded: a text, or texts in lists.
        label: What the texts come from, for messages.

    Raises:
        InputError: the texts are too long, or the library fails on them or on its file.
    """
    start = f"{label}: " if label else ""
    characters = sum(map(_characters, texts))
    if characters > LONGEST_TEXT_CHARACTERS:
        raise InputError(
            f"{start}the text has {characters} characters, and at most {LONGEST_TEXT_CHARACTERS} are tokenized",
            hint="Shorten it.",
        )
    try:
        with _panics_off_stderr():
            yield
    except BaseException as error:
        # The library itself raises nothing more narrow than Exception.
        if type(error) is not Exception and not is_panic(error):
            raise
        raise InputError(
            f"{start}{_file(source)}: the tokenizers library cannot use it: {first_line(error)}",
            hint="Mend or replace the file, or build the model again.",
        ) from error


def _characters(texts: object) -> int:
    if isinstance(texts, str):
        return len(texts)
    return sum(map(_characters, texts)) if isinstance(texts, Iterable) else 0


def _file(source: Path | object) -> Path:
    folder = source if isinstance(source, Path) else Path(str(getattr(source, "name_or_path", "")))
    path = folder / TOKENIZER_NAME
    return path if path.is_file() else folder


@shared_by_threads
def _panics_off_stderr() -> Iterator[None]:
    """Hold back what is written to descriptor 2, and write it afterwards unless it tells of a panic."""
    try:
        retained, held = os.dup(2), tempfile.TemporaryFile()  # noqa: SIM115  # closed below
    except OSError:
        # No stderr, or no place for a temporary file: then nothing is held back.
        yield
        return
    os.dup2(held.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(retained, 2)
        held.seek(0)
        words = held.read()
        held.close()
        with contextlib.suppress(OSError):
            if words and _PANIC not in words:
                os.write(retained, words)
        os.close(retained)
