"""Completeness of the saved results of benchmarks, and their sections on the page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmark_page import BENCHMARKS, TARGET, benchmark_page, saved_results

_RESULT = {
    "benchmark": "perf", "case": "two-words", "command": "python benchmarks/perf.py --save", "date": "2026-01-02",
    "load_at_start": None, "table": ["| a |", "| --- |", "| 1 |"], "record": {},
    "machine": {"processor": "P", "cores": 2, "memory_bytes": 8_000_000_000, "system": "S"},
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


def test_page_has_table_machine_date_and_command_of_a_result() -> None:
    """The section begins with the first line of the benchmark's docstring."""
    section = benchmark_page([_RESULT]).partition("## perf: two words\n")[2]
    question = (BENCHMARKS / "perf.py").read_text(encoding="utf-8")[3:].partition("\n")[0].replace("``", "`")
    assert question in section
    for part in ("| 1 |", "P, 2 cores, 8 GB", "2026-01-02, load at the start not known", "torch 2.13.0", "--save\n```"):
        assert part in section


@pytest.mark.parametrize("result", saved_results(), ids=lambda result: f"{result['benchmark']}-{result['case']}")
def test_saved_result_names_an_existing_benchmark_and_its_circumstances(result: dict[str, object]) -> None:
    """A result without its circumstances cannot be judged."""
    assert set(_RESULT) == set(result)
    assert (BENCHMARKS / f"{result['benchmark']}.py").is_file()
    assert result["table"]


def test_every_block_of_a_command_is_marked_as_not_run() -> None:
    """The tests of the pages run no benchmark."""
    text = TARGET.read_text(encoding="utf-8")
    assert text.count("```sh") == text.count("<!-- not run:") == len(saved_results())


def test_saved_result_has_the_command_without_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copied module writes its results beside itself, and replaces absolute paths in the recorded command."""
    copy = shutil.copy(BENCHMARKS / "results.py", tmp_path / "results.py")
    spec = importlib.util.spec_from_file_location("copied_results", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = ["--save", f"--folder={tmp_path}", "--python", str(tmp_path / "python"), "--runs", "1"]
    monkeypatch.setattr(sys, "argv", ["perf.py", *arguments])
    table = module.markdown_table([{"a": "1", "b": "2"}, {"a": "3"}])
    module.publish(argparse.Namespace(save=True), {"value": 1}, table, "small")
    result = json.loads((tmp_path / "results" / "perf-small.json").read_text(encoding="utf-8"))
    assert set(_RESULT) == set(result)
    assert result["command"] == "python benchmarks/perf.py --save --folder=PATH --python PATH --runs 1"
    assert result["table"] == ["| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 |  |"]
    assert result["machine"]["memory_bytes"] > 0
