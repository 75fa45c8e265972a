"""Time limits of blocks."""

from __future__ import annotations

import contextlib
import time

import pytest

from winml.modelkit.export.dynamo.capturing import TimeIsUpError, time_limit


def test_work_beyond_the_limit_is_stopped_despite_broad_excepts() -> None:
    """A library that retries after any exception is stopped as well."""
    started = time.monotonic()

    def go_on() -> None:
        with time_limit(0.05):
            while time.monotonic() - started < 30:
                with contextlib.suppress(Exception):
                    sum(range(1000))

    with pytest.raises(TimeIsUpError):
        go_on()
    assert time.monotonic() - started < 30


def test_work_within_the_limit_is_left_alone_then_and_later() -> None:
    """The clock is stopped at the end of the block, with a limit or without."""
    for seconds in (0.05, None):
        with time_limit(seconds):
            result = sum(range(10))
        assert 45 == result
    time.sleep(0.1)


def test_late_time_limit_does_not_reach_beyond_the_block() -> None:
    """Either the block ends with the error, or the error never arrives."""
    for _ in range(50):
        with contextlib.suppress(TimeIsUpError), time_limit(0.001):
            time.sleep(0.001)
        sum(range(1000))
