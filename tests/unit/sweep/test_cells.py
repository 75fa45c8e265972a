"""Cells of a sweep, repeated if a dependency of the result has changed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from winml.modelkit.builds.cache import tool_versions
from winml.modelkit.errors import OutputExistsError
from winml.modelkit.sweep.bounded_processes import Bounds
from winml.modelkit.sweep.cells import cells_of, held_sweep, requests_of
from winml.modelkit.sweep.plan import plan_from_record
from winml.modelkit.sweep.ray_queue import RayQueue, _run_in_worker
from winml.modelkit.sweep.records import CellResult
from winml.modelkit.sweep.work_queue import LocalQueue, Place, preloaded

ALONE = {"threads": 2, "jobs": 1}


def request(folder: Path, model: str, conditions: dict[str, Any] = ALONE, **record: Any) -> dict[str, Any]:
    """Return the request of the only cell of a plan."""
    plan, _ = plan_from_record({"models": [str(folder / model)], **record}, "plan")
    (found,) = requests_of(cells_of(plan), conditions).values()
    return found


def test_libraries_and_parallel_work_are_part_of_a_request(tmp_path: Path) -> None:
    """A latency measured beside seven other processes differs, while the result of a build is the same."""
    built = request(tmp_path, "a.onnx")
    assert tool_versions() == built["versions"]
    assert "onnxruntime" in built["versions"]
    assert built == request(tmp_path, "a.onnx", LocalQueue(Bounds(1.0, 1), 8).conditions)
    measured = request(tmp_path, "a.onnx", do=["perf"])
    assert measured != request(tmp_path, "a.onnx", {"threads": 2, "jobs": 8}, do=["perf"])
    assert measured != request(tmp_path, "a.onnx", {"threads": 1, "jobs": 1}, do=["perf"])


@pytest.mark.parametrize("name", ["net.onnx.data", "checkpoint/encoder/weights", "texts.csv", "rows/1.npz"])
def test_files_that_a_result_depends_on_are_looked_at(tmp_path: Path, name: str) -> None:
    """The request has data files of a model, folders of a checkpoint and data sets, but not the files of the sweep."""
    value = ir.Value(name="w", const_value=ir.tensor(np.ones((64, 64), np.float32), name="w"))
    graph = ir.Graph([], [value], nodes=[], initializers=[value], opset_imports={"": 17})
    ir.save(
        ir.Model(graph, ir_version=10), tmp_path / "net.onnx", external_data="net.onnx.data", size_threshold_bytes=0
    )
    for made in ("checkpoint/encoder/weights", "texts.csv", "rows/1.npz", "checkpoint/swept/sweep.json"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    config = {
        "eval": {"dataset": str(tmp_path / "texts.csv")},
        "quant": {"precision": "int8", "calibration_data": str(tmp_path / "rows")},
    }

    def both() -> list[Any]:
        names = ("net.onnx", "checkpoint")
        return [request(tmp_path, model, config=config, do=["build", "eval"])["files"] for model in names]

    before = both()
    os.utime(tmp_path / "checkpoint/swept/sweep.json", (1, 1))
    assert before == both()
    os.utime(tmp_path / name, (1, 1))
    assert before != both()


@pytest.mark.parametrize("name", ["build_manifest.json", "extract_manifest.json", "tune_state.json"])
def test_folder_of_another_command_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is written into it."""
    (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(OutputExistsError, match="a different command"), held_sweep(tmp_path):
        pass
    assert [name] == [path.name for path in tmp_path.iterdir()]


def test_finished_cell_has_the_settings_of_this_plan(tmp_path: Path) -> None:
    """A setting with one value distinguishes no cells, and two values do: a single cell is now one of two."""
    plans = [plan_from_record({"models": ["a.onnx"], "set": {"optim.level": levels}}, "plan")[0]
             for levels in (["full"], ["full", "none"])]  # fmt: skip
    (alone,), (first, _) = (cells_of(plan) for plan in plans)
    with held_sweep(tmp_path) as folder:
        folder.keep(alone, {}, CellResult(alone.cell_id, alone.model, alone.settings, "done"))
        found = folder.finished(first, {})
    assert found is not None
    assert ({}, {"optim.level": "full"}) == (alone.settings, found.settings)


def test_preloaded_modules_of_cells_exist() -> None:
    """The fork server ignores missing modules silently; the modules of dynamo are imported only if requested."""
    record = {"models": ["random:bert"], "do": ["export", "build", "perf", "eval", "compare"]}
    record["config"] = {"eval": {"dataset": "texts.csv"}}
    names = {
        exporter: preloaded(cells_of(plan_from_record({**record, "set": {"export.exporter": [exporter]}}, "plan")[0]))
        for exporter in ("auto", "dynamo")
    }
    assert set(names["auto"]) < set(names["dynamo"])
    assert [] == [name for name in names["dynamo"] if importlib.util.find_spec(name) is None]


def test_worker_with_other_libraries_stops_the_sweep(tmp_path: Path) -> None:
    """Results of the worker would be stored under the versions of another machine."""
    (cell,) = cells_of(plan_from_record({"models": ["a.onnx"]}, "plan")[0])
    with held_sweep(tmp_path) as folder:
        asked = (None, {**tool_versions(), "onnxruntime": "0.1"})
        result = _run_in_worker(cell, Place(folder), RayQueue("auto", 1.0, None, None), asked)
    assert "stopped" == result.state
    assert "install onnxruntime==0.1 there" in result.problem
