"""Lets threads change a setting of the whole process together.

Each of two overlapping changes would otherwise put back what it found, the later one what the earlier had changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps

__all__ = ["shared_by_threads"]


def shared_by_threads(change: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Make a context manager of a change that the first to enter makes, and the last to leave takes back.

    Args:
        change: Changes settings, yields, and puts them back, as for :func:`contextlib.contextmanager`.
    """
    make, lock, made = contextmanager(change), threading.Lock(), ExitStack()
    users = 0

    @contextmanager
    @wraps(change)
    def shared() -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                made.enter_context(make())
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    made.close()

    return shared
