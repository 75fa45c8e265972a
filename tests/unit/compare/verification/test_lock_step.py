"""Runs in lock step: equal requests are served together, and one run works at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from winml.modelkit.compare.verification.streamed_reference import run_in_lock_step


@dataclass(frozen=True)
class _Page:
    """A page, as a request."""

    position: int

    @property
    def key(self) -> int:
        """Return the page number."""
        return self.position


class _Book:
    """Counter of served pages."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def serve(self, requests: list[_Page]) -> list[str]:
        """Return the page once for each request."""
        self.read.append((requests[0].position, len(requests)))
        return [f"page {requests[0].position}"] * len(requests)


def _reader(*pages: int):
    def read(ask: Callable[[_Page], str]) -> list[str]:
        return [ask(_Page(page)) for page in pages]

    return read


def test_each_page_is_read_once_and_slow_readers_catch_up() -> None:
    """One reader skips a page, one reads a page again: the others wait if necessary."""
    book = _Book()
    answers = run_in_lock_step([_reader(1, 2, 3), _reader(1, 3), _reader(), _reader(2, 1, 3)], book.serve)
    assert [["page 1", "page 2", "page 3"], ["page 1", "page 3"], [], ["page 2", "page 1", "page 3"]] == answers
    assert [(1, 2), (2, 2), (1, 1), (3, 3)] == book.read


def test_error_of_one_reader_is_raised_and_no_thread_is_left() -> None:
    """The other readers are ended, because their pages are not read any more."""
    before, book = threading.active_count(), _Book()

    def fail(ask: Callable[[_Page], str]) -> list[str]:
        ask(_Page(1))
        raise ValueError("torn page")

    with pytest.raises(ValueError, match="torn page"):
        run_in_lock_step([_reader(1, 2, 3), fail, _reader(3)], book.serve)
    assert [(1, 2)] == book.read
    assert before >= threading.active_count()


def test_error_of_the_book_ends_every_reader() -> None:
    """No reader waits for a page that never comes."""
    before = threading.active_count()

    def serve(_requests: list[_Page]) -> list[str]:
        raise OSError("no such book")

    with pytest.raises(OSError, match="no such book"):
        run_in_lock_step([_reader(1, 2), _reader(1)], serve)
    assert before >= threading.active_count()
