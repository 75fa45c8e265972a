"""Runs several functions side by side, such that all of them wait for the same value at the same time.

Each function has a thread of its own, but only one is ever at work: a run goes on until it asks for a value, and the
value is given to every run that waits for the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar


class Request(Protocol):
    """What a run waits for."""

    @property
    def key(self) -> object:
        """Equal for requests that are answered together."""

    @property
    def position(self) -> int:
        """How far the run has come, so that those behind the others are answered first."""


_Request = TypeVar("_Request", bound=Request)
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")
Ask = Callable[[_Request], _Answer]


def run_in_lock_step(
    works: Sequence[Callable[[Ask[_Request, _Answer]], _Result]],
    serve: Callable[[Sequence[_Request]], Sequence[_Answer]],
) -> list[_Result]:
    """Run every work, and return what they return.

    Args:
        works: Functions that call what they are given to ask for something.
        serve: Answers requests of one key; called in this thread.

    Raises:
        Exception: what the first of the works raised, or ``serve``; the others are ended.
    """
    with ThreadPoolExecutor(len(works)) as threads:
        runs: list[_Run[_Request, _Answer, _Result]] = [_Run(work, threads) for work in works]
        try:
            for run in runs:
                run.go_on()
            while waiting := [(run, run.request) for run in runs if run.request is not None]:
                first = min((request for _, request in waiting), key=lambda request: request.position)
                group = [(run, request) for run, request in waiting if request.key == first.key]
                outputs = serve([request for _, request in group])
                for (run, _), output in zip(group, outputs, strict=True):
                    run.go_on(output)
        finally:
            for run in runs:
                run.end()
    return [run.future.result() for run in runs]


class _EndedError(Exception):
    """Ends a run whose result nobody waits for."""


class _Run(Generic[_Request, _Answer, _Result]):
    """One function that stops whenever it asks for something."""

    def __init__(self, work: Callable[[Ask[_Request, _Answer]], _Result], threads: Executor) -> None:
        """Take a function; it begins with the first :meth:`go_on`."""
        self.request: _Request | None = None
        """What it waits for; None before it began and after it ended."""
        self._answers: list[_Answer] = []
        self._is_ending = False
        self._error: BaseException | None = None
        self._turn, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self.future: Future[_Result] = threads.submit(self._main, work)

    def go_on(self, *outputs: _Answer) -> None:
        """Let it work until it asks for something or ends; with an answer, where it asked.

        Raises:
            BaseException: what its function raised.
        """
        self._answers, self.request = list(outputs), None
        self._turn.release()
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End it, if it is still at work."""
        self._is_ending = True
        self._turn.release()

    def _main(self, work: Callable[[Ask[_Request, _Answer]], _Result]) -> _Result:
        try:
            self._turn.acquire()
            if self._is_ending:
                raise _EndedError
            return work(self._ask)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._stop.release()

    def _ask(self, request: _Request) -> _Answer:
        if not self._is_ending:
            self.request = request
            self._stop.release()
            self._turn.acquire()
        if self._is_ending:
            raise _EndedError
        return self._answers.pop()
