"""Keeps stdout for the answer: what libraries and the user's own code print goes to stderr, their warnings nowhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator

__all__ = ["library_output_to_stderr", "silence_library_warnings"]


def silence_library_warnings(*, debug: bool) -> None:
    """Silence Python's warnings for the rest of the command, unless ``--debug`` was given.

    Libraries warn about their own future; what a user can act on comes as a note or an error of ours.
    """
    if not debug:
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def library_output_to_stderr() -> Iterator[None]:
    """Send what is printed inside the block to stderr, also by code that writes to the descriptor itself."""
    sys.stdout.flush()
    try:
        answer = sys.stdout.fileno()
        words = sys.stderr.fileno()
    except (io.UnsupportedOperation, ValueError):
        # Streams without descriptors, as a notebook has them.
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(answer)
    try:
        os.dup2(words, answer)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, answer)
        os.close(kept)
