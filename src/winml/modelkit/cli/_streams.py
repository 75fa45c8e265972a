"""Who may write on stdout? Only the answer: whatever libraries and the user's own code print goes to stderr.

Their warnings go nowhere, unless somebody looks for a mistake.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator

__all__ = ["hear_no_warnings", "stdout_kept_for_the_answer"]


def hear_no_warnings(*, debug: bool) -> None:
    """Keep Python's warnings from the user for the rest of the command.

    Libraries warn about their own future; what a user can act on comes as a note or an error of ours.
    """
    if not debug:
        warnings.simplefilter("ignore")


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
