"""Times by module, equal in a terminal, in JSON, in a trace and in a heat map."""

from __future__ import annotations

import io
import json

import pytest

from winml.modelkit.ort.kernel_times import KernelTime, RunProfile
from winml.modelkit.profile.chrome_trace import chrome_trace_record
from winml.modelkit.profile.module_profile import ModuleProfile, charge_modules
from winml.modelkit.profile.module_records import module_times_record
from winml.modelkit.profile.module_table import module_rows, times_document
from winml.modelkit.profile.node_data import node_data_record
from winml.modelkit.report.document import Table
from winml.modelkit.report.html import render_html
from winml.modelkit.report.terminal import console_for, print_document

TAGS = {"/a/MatMul": "/Net/A", "/b/MatMul": "/Net/B", "/b/Add": "/Net/B"}


def _profile() -> ModuleProfile:
    times = [("/a/MatMul", 10.0, 30.0), ("/b/MatMul", 50.0, 20.0), ("/b/Add", 70.0, 5.0), ("stray", 80.0, 5.0)]
    kernels = [
        KernelTime(node, node.rpartition("/")[2], run, 200.0 * run + start, duration, duration, 16, 0, "CPU")
        for run in (0, 1)
        for node, start, duration in times
    ]
    return charge_modules(RunProfile(tuple(kernels), (100.0, 100.0)), TAGS, [("/Net", "", "Net")])


def _printed(**options: bool | int) -> list[str]:
    stream = io.StringIO()
    print_document(times_document({"": _profile()}, **options), console_for(stream))  # type: ignore[arg-type]
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_terminal_prints_tree_with_shares_and_unattributed_nodes() -> None:
    """Each module has a line indented below its parent; nodes without a module follow by name."""
    lines = _printed()
    assert ["Net", "  A", "  B"] == [line[: len(line) - len(line.lstrip()) + 3].rstrip() for line in lines[1:4]]
    assert "91.7%" in lines[1]
    assert any("outside" in line and "0.040 ms" in line for line in lines)
    assert ["stray", "0.005"] == lines[lines.index("", 5) - 1].split()


def test_terminal_depth_top_and_classes_limit_the_rows() -> None:
    """A shallower tree keeps the totals; the list is ordered by a module's own time."""
    assert "91.7%" in _printed(depth=1)[1]
    assert len(_printed(depth=1)) == len(_printed()) - 2
    assert ["/Net/A", "/Net/B"] == [line.split()[0] for line in _printed(top=2)[1:3]]
    assert ["Net", "A", "B"] == [line.split()[0] for line in _printed(by_class=True)[1:4]]


def test_terminal_top_of_classes_has_the_most_own_time() -> None:
    """A class with inner modules but no kernels comes last, regardless of its total."""
    assert ["A", "B"] == [line.split()[0] for line in _printed(by_class=True, top=2)[1:3]]


def test_record_adds_up_and_survives_json() -> None:
    """The tree in JSON has the times of the terminal; its shares are of the kernel time."""
    record = json.loads(json.dumps(module_times_record(_profile())))
    root = record["tree"][0]
    assert pytest.approx(0.06) == record["kernel_ms"]
    assert pytest.approx(record["kernel_ms"]) == root["total_ms"] + record["unattributed_ms"]
    assert pytest.approx(1.0) == root["share"] + record["unattributed_share"]
    assert ["/Net/A", "/Net/B"] == [child["tag"] for child in root["children"]]
    assert [] == module_times_record(_profile(), depth=1)["tree"][0]["children"]


def test_trace_kernels_are_inside_the_frames_of_their_modules() -> None:
    """Every kernel is enclosed by one frame per segment of its tag; frames do not reach into the next run."""
    events = chrome_trace_record(_profile())["traceEvents"]
    frames = [event for event in events if event["cat"] == "module"]
    kernels = [event for event in events if event["cat"] == "kernel"]
    assert 8 == len(kernels)
    for kernel in kernels:
        around = [
            frame["name"]
            for frame in sorted(frames, key=lambda frame: -frame["dur"])
            if frame["ts"] <= kernel["ts"] and kernel["ts"] + kernel["dur"] <= frame["ts"] + frame["dur"]
        ]
        assert around == [part for part in kernel["args"]["tag"].split("/") if part]
    assert {"Net": 2, "A": 2, "B": 2} == {
        name: sum(frame["name"] == name for frame in frames) for name in ("Net", "A", "B")
    }


def test_node_data_has_the_layout_model_explorer_reads() -> None:
    """Graph, results, node, value; and colours from low to high."""
    record = node_data_record("main_graph", {"/a/MatMul": 0.03})
    assert {"/a/MatMul": {"value": 0.03}} == record["main_graph"]["results"]
    stops = [entry["stop"] for entry in record["main_graph"]["gradient"]]
    assert [0, 1] == [stops[0], stops[-1]]
    assert sorted(stops) == stops
    assert ["<main>"] == list(node_data_record("", {}))


def test_module_that_one_phase_of_a_decoder_lacks_has_a_row() -> None:
    """The row is in the tree and among the longest; modules that only the prompt runs come last."""
    prompt = _profile()
    step = charge_modules(prompt.profile, {**TAGS, "/b/MatMul": "/Net/C", "/b/Add": "/Net/C"}, [("/Net", "", "Net")])
    rows = [(row.name, row.level, *(time is not None for time in row.times)) for row in module_rows([prompt, step])]
    assert [("Net", 0, True, True), ("A", 1, True, True), ("C", 1, False, True), ("B", 1, True, False)] == rows
    assert ["/Net/A", "/Net/C", "/Net/B"] == [row.path for row in module_rows([prompt, step], top=3)]


def _three_layers() -> ModuleProfile:
    """Profile of three layers of 10, 11 and 12 ms, each with an inner module of 1 ms, and an embedding before them."""
    tags = {"embedding": "/Net/Embedding"}
    for layer in range(3):
        tags |= {f"own{layer}": f"/Net/Layer.{layer}", f"inner{layer}": f"/Net/Layer.{layer}/Inner"}
    kernels = [
        KernelTime(node, "MatMul", 0, 20_000.0 * number, duration, duration, 16, 8, "CPU")
        for number, (node, tag) in enumerate(tags.items())
        for duration in [
            1000.0 if tag.endswith("Inner") else 9000.0 + 1000 * int(node[-1:]) if node[-1:].isdigit() else 5.0
        ]
    ]
    modules = [("/Net", "", "Net")]
    for layer in range(3):
        tag = f"/Net/Layer.{layer}"
        modules += [(tag, f"layer.{layer}", "Layer"), (f"{tag}/Inner", f"layer.{layer}.inner", "Inner")]
    return charge_modules(RunProfile(tuple(kernels), (200_000.0,)), tags, modules)


def test_equal_layers_are_one_row_with_their_spread() -> None:
    """A terminal shows sums and spread; a list of the slowest and a page show every layer."""
    stream = io.StringIO()
    document = times_document({"": _three_layers()})
    print_document(document, console_for(stream))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    layers = next(row for row in rows if row and row[0] == "Layer.0")
    assert ["Layer.0", "…", ".2", "×", "3", "33.000"] == layers[:6]
    assert "10.000–12.000" in layers
    assert ["Inner", "×", "3", "3.000"] == next(row for row in rows if row and row[0] == "Inner")[:4]
    page = render_html(document)
    assert 2 == page.count('data-fold="0" data-place=')
    assert all(f"layer.{layer}" in page.replace("<wbr>", "") for layer in range(3))
    assert not any(row.folds for row in times_document({"": _three_layers()}, top=9).blocks if isinstance(row, Table))
