"""Steps and progress of a flow."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from winml.modelkit.errors import ExportError
from winml.modelkit.progress import (
    StepClock,
    StepEvent,
    count_progress,
    count_share,
    counted,
    notebook_progress,
    part_of_step,
)

NAMES = ("load", "trace", "write")


def test_clock_reports_start_and_end_of_each_step() -> None:
    """A listener hears each step twice: at its start with the number, at its end with the summary."""
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


def test_clock_running_step_has_its_elapsed_time() -> None:
    """A report written in the last step includes the time of that step so far."""
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
    """An error that leaves a step gets its number and total, and the step does not count as finished."""
    heard: list[StepEvent] = []
    clock = StepClock(NAMES, heard.append)
    with pytest.raises(ExportError) as caught, clock.step("trace"):
        raise ExportError("no")
    assert "step 2 of 3, trace" == caught.value.step
    assert [None] == [event.finished for event in heard]


def test_clock_unplanned_step_is_an_internal_error() -> None:
    """A step outside of the plan has no number."""
    with pytest.raises(ValueError, match="not in tuple"), StepClock(NAMES).step("paint"):
        pass


def test_counted_work_is_reported_for_the_innermost_step() -> None:
    """Progress has an estimate of the remaining time; progress outside of steps, or after a step, changes nothing."""
    heard: list[StepEvent] = []
    outer, inner = StepClock(NAMES, heard.append), StepClock(NAMES, heard.append)
    count_progress(1, 2, "piece 1 of 2")
    with outer.step("load"):
        with inner.step("trace"):
            count_progress(1, 4, "layer 1 of 4")
        count_progress(3, 6, "half")
    steps = [event.running for event in heard if event.running is not None]
    assert [0.5, 0.25] == [step.done for step in steps]
    assert "0 s, layer 1 of 4, about 0 s left" == steps[1].words
    assert all(step.is_over for step in steps)


def test_parts_of_a_step_are_reported_with_their_progress() -> None:
    """The outer step reports the parts as well, and its progress is empty after them."""
    heard: list[str] = []
    outer = StepClock(NAMES, lambda event: heard.append(event.running.progress if event.running else "over"))
    with outer.step("load"), StepClock(NAMES).step("trace"):
        for number in (1, 2):
            with part_of_step(f"part {number} of 2"):
                count_progress(1, 2, "layer 1 of 2", notifies_listeners=True)
    one, two = "part 1 of 2", "part 2 of 2"
    assert ["", one, f"{one}, layer 1 of 2", two, f"{two}, layer 1 of 2", "over"] == heard


def test_step_that_failed_is_over() -> None:
    """No progress of a failed step is shown any more."""
    heard: list[StepEvent] = []
    with pytest.raises(ExportError), StepClock(NAMES, heard.append).step("load"):
        raise ExportError("no")
    assert heard[0].running is not None
    assert heard[0].running.is_over


def test_items_are_counted_until_all_are_done() -> None:
    """The first of four items has no estimate yet, and the work after the last item counts no progress."""
    with StepClock(NAMES).step("trace") as step:
        seen = [(step.counted, step.done) for _ in counted("abcd", "draw")]
        after = (step.counted, step.done)
    assert [(f"draw {number + 1} of 4", number / 4) for number in range(4)] == seen
    assert ("", 0) == after


@pytest.mark.parametrize(("done", "is_estimated"), [(1e-6, False), (0.019, False), (0.5, True)])
def test_rest_is_estimated_once_a_share_of_the_work_is_done(done: float, is_estimated: bool) -> None:
    """Start-up time would turn an estimate of a minute into days."""
    heard: list[StepEvent] = []
    with StepClock(("load",), heard.append).step("load"):
        count_progress(done, 1, "a part", notifies_listeners=True)
        (words,) = {event.running.words for event in heard if event.running is not None and event.running.done}
    assert is_estimated == ("left" in words)


@pytest.fixture
def cell_output(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook cell displays: each drawing of a bar. Stands for the kernel of IPython."""
    drawn: list[str] = []

    def display(bar: str, *, display_id: bool) -> Any:
        assert display_id
        drawn.append(bar)
        return SimpleNamespace(update=drawn.append)

    package, displays = ModuleType("IPython"), ModuleType("IPython.display")
    vars(package)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(displays).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    monkeypatch.setattr("winml.modelkit.progress._REDRAW_S", 0)
    return drawn


def test_notebook_shows_a_bar_of_the_outermost_steps(cell_output: list[str]) -> None:
    clock = StepClock(NAMES)
    with clock.step("load"):
        count_share("samples")(3, 0.5)
        with StepClock(["inner"]).step("inner"):
            pass
    assert any("3 samples" in bar and 'value="0.167"' in bar for bar in cell_output)
    assert 'value="0.333"' in cell_output[-1]
    assert not any("inner" in bar for bar in cell_output)


def test_listener_replaces_the_bar_of_a_notebook(cell_output: list[str]) -> None:
    with StepClock(NAMES, lambda _event: None).step("load"):
        count_progress(1, 2, "one")
    assert not cell_output


def test_measurement_in_a_notebook_has_a_bar(cell_output: list[str]) -> None:
    progress = notebook_progress("runs")
    assert progress is not None
    progress(5, 0.25)
    assert "5 runs" in cell_output[-1]


def test_program_without_a_notebook_has_no_bar() -> None:
    assert notebook_progress("runs") is None
