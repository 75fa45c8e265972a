"""Sweeps: each cell runs once, interrupted sweeps continue, and no model stops a sweep."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import psutil
import pytest

from sweep_models import write_models
from winml.modelkit import sweep_models
from winml.modelkit.errors import UsageError
from winml.modelkit.sweep.cells import Cell
from winml.modelkit.sweep.records import SweepResult
from winml.modelkit.sweep.sweep import SweepOptions
from winml.modelkit.sweep.work_queue import SweepListener, SweepStoppedError

OBEYING = """
import signal
# Tests that run in the background of a shell ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from winml.modelkit.__main__ import main
main()
"""
"""Runs the command with the default handler of Ctrl-C."""
LEVELS = {"optim.level": ["none", "full"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Expected outcome → model."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def swept(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """A sweep of a valid and a damaged model in two configurations."""
    names = [models[name] for name in ("first", "damaged")]
    record = {"models": names, "config": {"perf": {"iterations": 3}}, "max": {"relative_error": 1e-3}}
    folder = tmp_path_factory.mktemp("swept")
    result = sweep_models(record, folder, set=LEVELS, do=["build", "perf", "compare"])
    # Other tests sweep the folder again and rewrite the table.
    kept = first_table(result)
    kept.mkdir()
    for path in folder.glob("results.*"):
        shutil.copy(path, kept)
    return result


def first_table(swept: SweepResult) -> Path:
    """Return the folder of the table that the sweep wrote."""
    return Path(swept.folder).with_name("first table")


def is_running(group: int) -> bool:
    """Return True if a process of a group is running."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def begun(plan: dict[str, object], folder: str | Path, **options: object) -> tuple[list[Cell], SweepResult]:
    """Run a sweep, and return the cells that were not reused."""
    started: list[Cell] = []
    result = sweep_models(
        plan, folder, options=SweepOptions(**options), listener=SweepListener(on_start=started.append)  # type: ignore[arg-type]
    )  # fmt: skip
    return started, result


def test_sweep_measures_each_model_in_each_configuration(swept: SweepResult) -> None:
    """The optimizer removes nodes, and the outputs stay equal."""
    assert ["done"] * 2 + ["failed"] * 2 == [cell.state for cell in swept.cells]
    plain, full = swept.cells[:2]
    assert {"optim.level": "none"} == plain.settings
    assert plain.measures["nodes"] >= full.measures["nodes"]  # type: ignore[operator]
    for cell in swept.cells[:2]:
        assert cell.measures["latency_p50_ms"] > 0  # type: ignore[operator]
        assert cell.measures["sqnr_db"] > 100  # type: ignore[operator]  # float32 on both sides
        assert Path(cell.artifacts, "build", "model.onnx").is_file()
    assert swept.is_good_enough


def test_sweep_reports_the_first_failure_and_continues(swept: SweepResult) -> None:
    """A damaged model is a row with the message of the command."""
    failed = swept.cells[2]
    assert ("build", 1) == (failed.step, failed.exit_code)
    assert "damaged.onnx" in failed.problem
    assert failed.problem == swept.as_record()["first_failure"]["problem"]


def test_sweep_writes_one_table_in_three_forms(swept: SweepResult) -> None:
    """JSON, comma-separated values and a page contain the same rows."""
    folder = first_table(swept)
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(swept.as_record())) == record
    assert {"total": 4, "reused": 0, "done": 2, "failed": 2} == record["counts"]
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [cell.measures.get("nodes") for cell in swept.cells[:2]] == [int(row["nodes"]) for row in rows[:2]]
    assert rows[2]["problem"] == swept.cells[2].problem
    page = (folder / "results.html").read_text(encoding="utf-8")
    assert 4 == page.count("<tr data-item")
    assert not re.search(r"https?://(?!www\.w3\.org)", page)


def test_finished_cells_are_not_done_again(swept: SweepResult, models: dict[str, str], tmp_path: Path) -> None:
    """Failures run again on request, and changed cells run anew."""
    started, again = begun(dict(swept.plan), swept.folder)
    assert [] == started
    assert 4 == again.reused
    assert swept.cells == again.cells
    started, _ = begun(dict(swept.plan), swept.folder, retries_failed=True)
    assert ["failed"] * 2 == [swept.cells[2 + number].state for number in range(len(started))]
    assert {models["damaged"]} == {cell.model for cell in started}
    _, again = begun(dict(swept.plan), swept.folder, against=Path(swept.folder))
    assert swept.cells[0].cell_id == again.earlier(again.cells[0]).cell_id  # type: ignore[union-attr]
    later = {**swept.plan, "models": [models["first"]], "config": {"perf": {"iterations": 4}}}
    started, changed = begun(later, tmp_path / "later", against=Path(swept.folder))
    assert 2 == len(started)
    assert changed.earlier(changed.cells[0]) is None, "another configuration, though the same for all of its cells"


def test_model_changed_during_its_sweep_is_repeated(models: dict[str, str], tmp_path: Path) -> None:
    """The results belong to the files at the start of the sweep."""
    model = shutil.copy(models["first"], tmp_path / "model.onnx")

    def save(_cell: Cell) -> None:
        os.utime(model, (1, 1))

    sweep_models([str(model)], tmp_path / "swept", listener=SweepListener(on_start=save))
    started, _ = begun({"models": [str(model)]}, tmp_path / "swept")
    assert 1 == len(started)


def test_limit_that_a_cell_misses_is_named(swept: SweepResult) -> None:
    """No cell runs again: the limit is compared with stored measures."""
    started, result = begun({**swept.plan, "max": {"latency_p50_ms": 0}, "min": {"nodes": 1}}, swept.folder)
    assert [] == started
    assert not result.is_good_enough
    assert [2, 0] == [len(limit.missed) for limit in sorted(result.limits, key=lambda limit: limit.kind)]


def test_second_sweep_in_one_folder_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    """The lock belongs to the process that holds it."""
    with filelock.FileLock(tmp_path / ".winml-sweep.lock"), pytest.raises(UsageError, match="another sweep"):
        sweep_models([models["first"]], tmp_path)


def test_model_that_hangs_is_a_row(models: dict[str, str], tmp_path: Path) -> None:
    """The process is killed at its time limit, and the row names the step."""
    (hanging,) = sweep_models([models["hangs"]], tmp_path, options=SweepOptions(seconds=4.0)).cells
    assert ("failed", "build", "took more than 4 s", -9) == (
        hanging.state, hanging.step, hanging.problem, hanging.exit_code,
    )  # fmt: skip


def test_model_that_takes_all_memory_is_a_row(models: dict[str, str], tmp_path: Path) -> None:
    """The process is killed at its memory limit, which the row names, and the next model runs."""
    options = SweepOptions(seconds=120.0, resident_bytes=1_000_000_000)
    hoarding, good = sweep_models([models["hoards"], models["first"]], tmp_path, options=options).cells
    assert ("failed", "done") == (hoarding.state, good.state)
    assert "1.0 GB" in hoarding.problem


def test_full_disk_stops_the_sweep_without_a_row(models: dict[str, str], tmp_path: Path) -> None:
    """A full disk is not the fault of a model: the cell runs again."""
    script = tmp_path / "full.py"
    script.write_text("import errno, os\ndef make():\n    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n")
    with pytest.raises(SweepStoppedError, match=r"No space.*1 of 2"):
        sweep_models([models["first"], f"{script}:make"], tmp_path / "swept", options=SweepOptions(jobs=1))
    record = json.loads((tmp_path / "swept" / "results.json").read_text(encoding="utf-8"))
    assert [models["first"]] == [cell["model"] for cell in record["cells"]]


def test_artifacts_are_uploaded_to_a_url(models: dict[str, str], tmp_path: Path) -> None:
    """The folder of the sweep contains results only."""
    place = f"file://{tmp_path / 'bucket'}"
    result = sweep_models([models["first"]], tmp_path / "swept", options=SweepOptions(artifacts=place))
    (cell,) = result.cells
    assert cell.artifacts == f"{place}/{cell.cell_id}"
    assert (tmp_path / "bucket" / cell.cell_id / "build" / "model.onnx").is_file()
    assert ["cell.json"] == [path.name for path in (tmp_path / "swept" / "cells" / cell.cell_id).iterdir()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process")
def test_interrupted_sweep_leaves_no_process_and_resumes(models: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal; finished cells are stored."""
    (tmp_path / "plan.txt").write_text(f"{models['first']}\n{models['waits']}\n", encoding="utf-8")
    command = [sys.executable, "-c", OBEYING, "sweep", "plan.txt", "-o", "swept", "--jobs", "1"]
    place = Path(models["first"]).parent
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stderr is not None
        until = time.monotonic() + 60
        while not (place / "started-0").exists():
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        cells = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        words = run.stderr.read()
    assert run.wait() in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "run: 1" in words
    assert "Traceback" not in words
    # The fork server ends when no process is left.
    until = time.monotonic() + 20
    while is_running(run.pid) or any(cell.is_running() for cell in cells):
        assert time.monotonic() < until
        time.sleep(0.1)
    started: list[Cell] = []
    listener = SweepListener(on_start=started.append)
    (place / "released").touch()
    result = sweep_models(tmp_path / "plan.txt", tmp_path / "swept", listener=listener)
    assert [models["waits"]] == [cell.model for cell in started]
    assert "first.onnx" in result.cells[0].model
