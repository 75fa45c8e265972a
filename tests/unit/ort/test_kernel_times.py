"""Kernel times of ONNX Runtime's profile, nested kernels included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winml.modelkit.errors import MeasureError, WriteError
from winml.modelkit.ort.kernel_times import RunProfile, read_device_profile, read_profile

Event = dict[str, Any]


def _run_event(start: int, duration: int) -> Event:
    return {"cat": "Session", "name": "model_run", "ph": "X", "tid": 1, "ts": start, "dur": duration, "args": {}}


def _kernel_event(node: str, start: int, duration: int, tid: int = 1, **details: str) -> Event:
    arguments = {"op_name": node.rpartition("/")[2], "provider": "CPUExecutionProvider", **details}
    name = f"{node}_kernel_time"
    return {"cat": "Node", "name": name, "ph": "X", "tid": tid, "ts": start, "dur": duration, "args": arguments}


def _read_events(tmp_path: Path, *events: Event, counted_runs: int | None = None) -> RunProfile:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(list(events)), encoding="utf-8")
    return read_profile(path, counted_runs=counted_runs)


def test_kernel_inside_control_flow_is_charged_once(tmp_path: Path) -> None:
    """An If of 100 µs with a branch of 60 µs has 40 µs of its own, and the sum is 100 µs."""
    profile = _read_events(
        tmp_path,
        _run_event(0, 120),
        _kernel_event("/If", 10, 100),
        _kernel_event("/branch/MatMul", 20, 50),
        _kernel_event("/branch/Add", 75, 10),
    )
    own = {kernel.node: kernel.self_us for kernel in profile.kernels}
    assert {"/If": 40, "/branch/MatMul": 50, "/branch/Add": 10} == own
    assert sum(own.values()) == 100


def test_kernel_two_levels_inside_is_charged_to_the_nearest(tmp_path: Path) -> None:
    """Each kernel has its time less the time of the next inner kernel: an Add in a Loop in an If."""
    profile = _read_events(
        tmp_path,
        _run_event(0, 100),
        _kernel_event("/If", 0, 90),
        _kernel_event("/Loop", 0, 80),
        _kernel_event("/Add", 0, 70),
    )
    assert [10, 10, 70] == [kernel.self_us for kernel in profile.kernels]


def test_kernels_one_after_the_other_keep_their_times(tmp_path: Path) -> None:
    """Kernels that touch, or take no measurable time, are not nested."""
    profile = _read_events(
        tmp_path,
        _run_event(0, 40),
        _kernel_event("/A", 0, 10),
        _kernel_event("/B", 10, 0),
        _kernel_event("/C", 10, 20),
        _kernel_event("/D", 30, 5),
    )
    assert {"/A": 10, "/B": 0, "/C": 20, "/D": 5} == {kernel.node: kernel.self_us for kernel in profile.kernels}


def test_kernels_of_other_threads_are_not_inside(tmp_path: Path) -> None:
    """Two kernels in parallel both count."""
    profile = _read_events(tmp_path, _run_event(0, 12), _kernel_event("/A", 0, 10), _kernel_event("/B", 1, 9, tid=2))
    assert [kernel.self_us for kernel in profile.kernels] == [10, 9]


@pytest.mark.parametrize(
    "name",
    ['a"b', "a\\b", "a\nb", "a\r\nb\x1b[31m", 'a"}, {"x', "a\\u0041\n", 'a","args" :'],
    ids=["quote", "backslash", "line end", "escape sequence", "object", "escape", "key"],
)
def test_unescaped_name_is_read_literally(tmp_path: Path, name: str) -> None:
    """ONNX Runtime 1.23 writes names of nodes without escaping them, so that the file is no valid JSON."""
    head = '{"cat" : "Node","pid" :1,"tid" :1,"dur" :5,"ts" :%d,"ph" : "X","name" :"%s","args" : {%s}}'
    kernels = [
        head % (start, f"{node}_kernel_time", '"op_name" : "Sin","input_type_shape" : [{"float":[2]}]')
        for start, node in ((1, name), (7, "'\""), (13, "plain"))
    ]
    path = tmp_path / "profile.json"
    events = ",\n".join([head % (0, "model_run", ""), *kernels])
    path.write_bytes(f"[\n{events}\n]\n".encode())
    assert [name, "'\"", "plain"] == [kernel.node for kernel in read_profile(path).kernels]


def test_invalid_profile_json_is_an_error(tmp_path: Path) -> None:
    """A value other than a name is not escaped."""
    path = tmp_path / "profile.json"
    path.write_text('[{"ph" : "X","name" :"a","args" : {"b" : "c"d"}}]', encoding="utf-8")
    with pytest.raises(MeasureError, match="not valid JSON: "):
        read_profile(path)


@pytest.mark.parametrize("text", ["", '[{"ph" : "X"'])
def test_truncated_profile_is_an_error(tmp_path: Path, text: str) -> None:
    """A full disk truncates the profile; the error names the file."""
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WriteError, match=path.name):
        read_profile(path)


def test_warm_up_runs_are_left_out(tmp_path: Path) -> None:
    """Runs are counted from the first measured one."""
    events = [
        _run_event(0, 50),
        _kernel_event("/A", 5, 40),
        _run_event(100, 20),
        _kernel_event("/A", 105, 10),
        _run_event(200, 22),
        _kernel_event("/A", 205, 12),
    ]
    profile = _read_events(tmp_path, *events, counted_runs=2)
    assert (20.0, 22.0) == profile.run_us
    assert [(0, 10), (1, 12)] == [(kernel.run, kernel.self_us) for kernel in profile.kernels]


def test_sizes_are_read_if_the_profile_has_them(tmp_path: Path) -> None:
    """Sizes are stored as text; an event without sizes has None, not zero."""
    profile = _read_events(
        tmp_path,
        _run_event(0, 9),
        _kernel_event("/A", 0, 2, output_size="196608", parameter_size="0"),
        _kernel_event("/B", 3, 2),
    )
    assert [(196608, 0), (None, None)] == [(kernel.output_bytes, kernel.parameter_bytes) for kernel in profile.kernels]


def test_profile_without_kernels_is_refused(tmp_path: Path) -> None:
    """An execution provider that records no kernel is an error, not an empty table."""
    with pytest.raises(MeasureError, match="no kernel"):
        _read_events(tmp_path, _run_event(0, 9))


DEVICE_HEADER = "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier"


def device_run(*cycles: int, prefix: str = "/layer") -> list[str]:
    """Return the events of one run of a part, as QNN 2.7 writes them, with a tenth of the time in no node."""
    nodes = [
        f"0,NODE,{count},CYCLES,BACKEND,SUB-EVENT,{prefix}.{n}/Add:OpId_{n} (cycles)" for n, count in enumerate(cycles)
    ]
    whole = f"0,BACKEND,{sum(cycles) * 1.1:.0f},CYCLES,BACKEND,ROOT,Accelerator (execute) time (cycles)"
    return [whole, *nodes, "0,EXECUTE,29326,US,BACKEND,ROOT,QNN (execute) time"]


def test_device_profile_has_the_counted_runs_of_all_parts(tmp_path: Path) -> None:
    """Warm-up runs are left out; a run is the sum of its parts, including time in no node."""
    path = tmp_path / "device.csv"
    runs = [
        line
        for scale in (9, 1, 2)
        for line in (*device_run(10 * scale, 20 * scale), *device_run(70 * scale, prefix="/head"))
    ]
    path.write_text(
        "\n".join([DEVICE_HEADER, "0,FINALIZE,1,US,BACKEND,ROOT,QNN (finalize) time", *runs]), encoding="utf-8"
    )
    profile = read_device_profile(path, counted_runs=2, provider="QNNExecutionProvider")
    assert ("cycles", (110.0, 220.0)) == (profile.unit, profile.run_us)
    found = [(kernel.node, kernel.run, kernel.self_us) for kernel in profile.kernels]
    expected = [("/layer.0/Add", 10.0), ("/layer.1/Add", 20.0), ("/head.0/Add", 70.0)]
    assert [(name, run, cycles * (run + 1)) for run in (0, 1) for name, cycles in expected] == found


@pytest.mark.parametrize("lines", [None, [DEVICE_HEADER], ["no table", "at, all"]])
def test_device_profile_without_a_node_is_refused(tmp_path: Path, lines: list[str] | None) -> None:
    """A provider may compile for its processor without counters."""
    path = tmp_path / "device.csv"
    if lines is not None:
        path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(MeasureError):
        read_device_profile(path, counted_runs=1, provider="QNNExecutionProvider")
