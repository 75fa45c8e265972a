"""The clock of a flow."""

from __future__ import annotations

import pytest

from winml.modelkit.errors import ExportError
from winml.modelkit.progress import StepClock, StepEvent

NAMES = ("load", "trace", "write")


def test_clock_tells_start_and_end_of_each_step() -> None:
    """A listener hears each step twice: with its number, and with what it did."""
    heard: list[StepEvent] = []
    clock = StepClock(NAMES, heard.append)
    with clock.step("load") as step:
        step.summary = "12 parameters"
    with clock.step("trace"):
        pass
    assert [("load", 1, 3), ("load", 1, 3), ("trace", 2, 3), ("trace", 2, 3)] == [
        (event.name, event.number, event.total) for event in heard
    ]
    assert [False, True, False, True] == [event.finished is not None for event in heard]
    assert "12 parameters" == heard[1].finished.summary  # type: ignore[union-attr]
    assert ["load", "trace"] == [timing.name for timing in clock.timings()]


def test_clock_running_step_is_timed_so_far() -> None:
    """A report written in the last step holds that step, too, as far as it has come."""
    clock = StepClock(NAMES)
    with clock.step("load"):
        pass
    with clock.step("trace") as step:
        step.summary = "so far"
        first = clock.timings()
        later = clock.timings()
    assert [(1, "load", ""), (2, "trace", "so far")] == [(each.number, each.name, each.summary) for each in first]
    assert first[0] == later[0], "a finished step stands still"
    assert first[1].seconds < later[1].seconds <= clock.timings()[1].seconds


def test_clock_error_learns_its_step() -> None:
    """An error that leaves a step says which of how many, and the step does not count as finished."""
    heard: list[StepEvent] = []
    clock = StepClock(NAMES, heard.append)
    with pytest.raises(ExportError) as caught, clock.step("trace"):
        raise ExportError("no")
    assert "step 2 of 3, trace" == caught.value.step
    assert [None] == [event.finished for event in heard]


def test_clock_unplanned_step_is_a_mistake_of_ours() -> None:
    """A step nobody planned has no number."""
    with pytest.raises(ValueError, match="not in tuple"), StepClock(NAMES).step("paint"):
        pass
