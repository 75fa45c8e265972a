"""Sweeps on a real cluster of two nodes: the table of a local sweep, even after a node is killed half-way."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from readers import folder_of
from sweep_models import write_models
from winml.modelkit import sweep_models
from winml.modelkit.errors import StageError, UsageError
from winml.modelkit.sweep.records import SweepResult
from winml.modelkit.sweep.sweep import SweepOptions, read_results

pytestmark = [
    pytest.mark.reader("ray"),
    # Ray closes its threads and sockets when the process ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ray importable, here and in the processes of the cluster."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_of("ray"))])
    monkeypatch.setenv("PYTHONPATH", str(folder_of("ray")))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sizes = {"num_cpus": 1, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    made.second = made.add_node(**sizes)
    yield made
    made.shutdown()


def rows(result: SweepResult) -> list[tuple[Any, ...]]:
    """Return the machine-independent entries of the cells."""
    names = ("model_bytes", "nodes", "coverage_percent", "sqnr_db", "relative_error")
    return [
        (cell.model, dict(cell.settings), cell.state, cell.problem, *(cell.measures.get(name) for name in names))
        for cell in result.cells
    ]


@pytest.mark.slow
def test_cluster_returns_the_local_table_despite_a_killed_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is killed while both work; only its model is tried again, on the other node."""
    # Names are relative to this folder, which differs from the workers' folder.
    models = {name: Path(path).name for name, path in write_models(tmp_path).items()}
    monkeypatch.chdir(tmp_path)
    # Each model occupies a node and waits.
    plan = {
        "models": [{"model": models["waits"], "set": {"loader.seed": seed}} for seed in (1, 2)] + [models["first"]],
        "set": {"optim.level": ["none"]},
        "do": ["build", "compare"],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [sys.executable, "-m", "winml.modelkit", "sweep", "plan.json", "-o", "far", "--ray", cluster.address]
    with (
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run,
        contextlib.ExitStack() as failing,
    ):
        failing.callback(run.kill)  # leaving the process would wait for it
        assert run.stderr is not None
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("started-*"))) < 2:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.1)
        cluster.remove_node(cluster.second, allow_graceful=False)
        # A worker released earlier might answer before it notices the loss of its node.
        lost = next((line for line in run.stderr if "its worker was lost" in line), "")
        (tmp_path / "released").touch()
        words = run.stderr.read()
        failing.pop_all()
    assert 0 == run.wait(), words
    far = read_results(tmp_path / "far")
    near = sweep_models(plan, tmp_path / "near", options=SweepOptions(seconds=120.0))
    assert ["done"] * 3 == [cell.state for cell in far.cells]
    assert rows(near) == rows(far)
    assert [1, 1, 2] == sorted(cell.tries for cell in far.cells)
    assert 1 == len({cell.node for cell in far.cells})
    assert lost


def test_absent_cluster_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Ray itself would wait for minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "a.onnx").touch()
    with pytest.raises(StageError, match=f"{address}: no response"):
        sweep_models([str(tmp_path / "a.onnx")], tmp_path / "swept", options=SweepOptions(ray=address))
    with pytest.raises(UsageError, match="HOST:PORT"):
        sweep_models([str(tmp_path / "a.onnx")], tmp_path / "swept", options=SweepOptions(ray="nowhere"))
