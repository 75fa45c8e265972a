"""Runs that wait for the same thing get it together, one of them at work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from winml.modelkit.compare.verification.streamed_reference import run_in_lock_step


@dataclass(frozen=True)
class _Page:
    """A page somebody wants to read."""

    position: int

    @property
    def key(self) -> int:
        """The page."""
        return self.position


class _Book:
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def serve(self, requests: list[_Page]) -> list[str]:
        """Return the page as often as it was asked for."""
        self.read.append((requests[0].position, len(requests)))
        return [f"page {requests[0].position}"] * len(requests)


def _reader(*pages: int):
    def read(ask: Callable[[_Page], str]) -> list[str]:
        return [ask(_Page(page)) for page in pages]

    return read


def test_each_page_is_read_once_and_a_reader_who_is_behind_catches_up() -> None:
    """One leaves a page out, one reads a page again: the others wait where they have to."""
    book = _Book()
    answers = run_in_lock_step([_reader(1, 2, 3), _reader(1, 3), _reader(), _reader(2, 1, 3)], book.serve)
    assert [["page 1", "page 2", "page 3"], ["page 1", "page 3"], [], ["page 2", "page 1", "page 3"]] == answers
    assert [(1, 2), (2, 2), (1, 1), (3, 3)] == book.read


def test_error_of_one_reader_is_raised_and_no_thread_is_left() -> None:
    """The others are ended: what they wait for is not read any more."""
    before, book = threading.active_count(), _Book()

    def fail(ask: Callable[[_Page], str]) -> list[str]:
        ask(_Page(1))
        raise ValueError("torn page")

    with pytest.raises(ValueError, match="torn page"):
        run_in_lock_step([_reader(1, 2, 3), fail, _reader(3)], book.serve)
    assert [(1, 2)] == book.read
    assert before == threading.active_count()


def test_error_of_the_book_ends_every_reader() -> None:
    """Nobody waits for a page that never comes."""
    before = threading.active_count()

    def serve(_requests: list[_Page]) -> list[str]:
        raise OSError("no such book")

    with pytest.raises(OSError, match="no such book"):
        run_in_lock_step([_reader(1, 2), _reader(1)], serve)
    assert before == threading.active_count()
