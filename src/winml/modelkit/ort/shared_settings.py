"""Temporary changes to process settings or attributes of foreign objects, restored after a block.

Threads share a change of the same setting: of two overlapping changes, the later would restore the value set by the
earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps


@contextmanager
def attribute_replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of an object, a class or a Python module for the time of the block.

    An attribute that the owner inherits from its class is inherited again afterwards.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def attributes_replaced(*replacements: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes for the time of the block: the owner, the name and the value of each."""
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(attribute_replaced(owner, name, value))
        yield


def shared_by_threads(change: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Turn a change into a context manager that the first thread applies and the last thread reverts.

    Args:
        change: Changes settings, yields, and restores them, as for :func:`contextlib.contextmanager`.
    """
    make, lock, created = contextmanager(change), threading.Lock(), ExitStack()
    users = 0

    @contextmanager
    @wraps(change)
    def shared() -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                created.enter_context(make())
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    created.close()

    return shared
