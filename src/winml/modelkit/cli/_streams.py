"""Who may write on stdout? Only the answer: whatever libraries and the user's own code print goes to stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

__all__ = ["stdout_kept_for_the_answer"]


@contextlib.contextmanager
def stdout_kept_for_the_answer() -> Iterator[None]:
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
