"""``winml tune``: candidates, results, files, resumption and refusals."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from e2e.in_process import run_here
from e2e.workplace import WITH_A_LIMIT, Workplace
from module_chains import SIZE, save_chain
from winml.modelkit.errors import UsageError
from winml.modelkit.tune import contest
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.tuning import tune_model

CHAIN = ("--only", "dynamic,compile", "--min-sqnr", "20", "--format", "json")


@dataclass(frozen=True)
class Tuned:
    """A finished tuning."""

    folder: Path
    record: dict[str, Any]
    arguments: tuple[str, ...]
    kept: dict[str, Any]
    """Record that the tuning wrote into its folder; a resumed tuning writes it anew."""


@pytest.fixture(scope="module")
def tuned(make_workplace: Callable[[], Workplace]) -> Tuned:
    """A file of nested modules, tuned for size; int8 is within the limit."""
    place = make_workplace()
    save_chain(place.folder / "chain.onnx", outlier="w2")
    arguments = ("tune", "-m", "chain.onnx", "-o", "tuned", "--target", "size", *CHAIN)
    done = place.winml(*arguments)
    assert 0 == done.code, done.err
    return Tuned(place.folder, json.loads(done.out), arguments, tune_record(place))


def tune_record(place: Workplace) -> dict[str, Any]:
    """Return the record that a tuning wrote into its folder."""
    record: dict[str, Any] = json.loads((place.folder / "tuned" / "tune.json").read_text(encoding="utf-8"))
    return record


def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the candidates of a record by name."""
    return {row["name"]: row for row in record["candidates"]}


def test_result_has_every_candidate_with_its_cost(tuned: Tuned) -> None:
    """Names of keys include units; all candidates are compared with the plain file."""
    record = tuned.record
    assert (1, "size", 20.0) == (record["schema_version"], record["target"], record["limits"]["min_sqnr_db"])
    assert ["plain", "dynamic-int8", "dynamic-int8-part"] == [row["name"] for row in record["candidates"]]
    assert [row["name"] for row in record["plan"]] == [row["name"] for row in record["candidates"]]
    plain, whole, mixed = record["candidates"]
    assert (200.0, None) == (plain["sqnr_db"], plain["latency_ms"]["ratio_to_plain"])
    assert 20.0 <= whole["sqnr_db"] < 60.0
    assert whole["size_bytes"] < plain["size_bytes"]
    for row in (plain, whole):
        assert row["latency_ms"]["low"] <= row["latency_ms"]["p50"] <= row["latency_ms"]["high"]
        assert row["session_creation_ms"] > 0
        # Python and ONNX Runtime take about 80 MB, the process of the export with PyTorch more than 300 MB.
        assert 0 < row["memory"]["peak_bytes"] < 200_000_000
    assert ("not needed", None) == (mixed["status"], mixed["latency_ms"])
    assert {**tuned.kept, "next": "winml run tuned --schema"} == record


def test_folder_of_a_tuning_runs_its_winner(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that take a build folder take that of the tuning; the file is that of the winner."""
    monkeypatch.chdir(tuned.folder)
    done = run_here(*tuned.record["next"].split()[1:])
    assert 0 == done.code, done.err
    for verb in ("inspect", "perf"):
        assert 0 == run_here(verb, "tuned", *(("--iterations", "2") if verb == "perf" else ())).code


def test_smallest_sufficient_file_wins_and_is_a_build(tuned: Tuned) -> None:
    """The files of the other candidates are removed; their measurements stay."""
    assert ("won", "dynamic-int8") == (rows(tuned.record)["dynamic-int8"]["status"], tuned.record["winner"]["name"])
    folder = tuned.folder / "tuned"
    # Some versions of filelock remove the lock file.
    left = {path.name for path in folder.iterdir()} - {".winml-tune.lock"}
    assert {"best", "tune.json", "tune.html", "tune_state.json"} == left
    assert rows(tuned.record)["dynamic-int8"]["size_bytes"] == (folder / "best" / "model.onnx").stat().st_size
    assert str(folder / "best") == tuned.record["winner"]["folder"]


def test_candidate_above_the_peak_cannot_win(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is applied to the peaks measured before; if no candidate is within it, the error names the least."""
    shutil.copytree(tuned.folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    peaks = {name: row["memory"]["peak_bytes"] for name, row in rows(tuned.record).items() if row["memory"]}
    forms = [name for name, row in rows(tuned.record).items() if row["status"] in ("won", "right") and "+" not in name]
    least = min(forms, key=lambda name: peaks[name])

    refused = run_here(*tuned.arguments, "--max-peak", "1kB")
    done = run_here(*tuned.arguments, "--max-peak", f"{peaks[least]}B")

    assert 1 == refused.code
    assert min(peaks, key=lambda name: peaks[name]) in refused.err
    assert "best is the winner of an earlier tuning" in refused.err
    assert 0 == done.code, done.err
    record = json.loads(done.out)
    assert peaks[record["winner"]["name"].partition("+")[0]] <= peaks[least]
    assert peaks[least] == record["limits"]["max_peak_bytes"]
    over = [row["status"] for name, row in rows(record).items() if name in forms and peaks[name] > peaks[least]]
    assert ["wrong"] * len(over) == over


def test_config_of_the_winner_reproduces_its_files(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are equal byte by byte."""
    monkeypatch.chdir(tuned.folder)
    done = run_here("build", "-c", tuned.record["winner"]["config"], "-o", "again", "-q")
    assert 0 == done.code, done.err
    made, best = (tuned.folder / name / "model.onnx" for name in ("again", "tuned/best"))
    assert made.read_bytes() == best.read_bytes()
    shutil.rmtree(tuned.folder / "again")


def test_page_shows_all_candidates_without_a_network(tuned: Tuned) -> None:
    """The page has a chart, and a table to sort and filter."""
    page = (tuned.folder / "tuned" / "tune.html").read_text(encoding="utf-8")
    assert "fastest variant" in page
    for name in rows(tuned.record):
        assert f">{name}</td>" in page.replace("<wbr>", "")
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', page)


def test_plan_lists_existing_measurements(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed; other options are refused as in the run, and start anew with --overwrite."""
    monkeypatch.chdir(tuned.folder)
    before = {path: path.stat().st_mtime_ns for path in tuned.folder.rglob("*")}
    done = run_here(*tuned.arguments, "--dry-run")
    steps = {step["name"]: step["does"] for step in json.loads(done.out)["steps"]}
    assert steps["plain file"].startswith("plain (")
    assert steps["plain file"].endswith("; already measured)")
    assert steps["forms"].startswith("dynamic-int8 (")
    assert steps["forms"].endswith("; already measured)")
    other = (*tuned.arguments, "--seed", "7")
    assert [2, 0] == [run_here(*other, "--dry-run", *more).code for more in ([], ["--overwrite"])]
    assert before == {path: path.stat().st_mtime_ns for path in tuned.folder.rglob("*")}


def test_repeated_command_reuses_measurements(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate is made or measured again, and candidates and winner stay equal."""
    monkeypatch.chdir(tuned.folder)
    best = tuned.folder / "tuned" / "best" / "model.onnx"
    before = best.stat().st_mtime_ns
    done = run_here(*tuned.arguments)
    assert 0 == done.code, done.err
    again = json.loads(done.out)
    assert 2 == again["resumed"]
    assert tuned.record["candidates"] == again["candidates"]
    assert tuned.record["winner"] == again["winner"]
    assert before == best.stat().st_mtime_ns


def test_other_options_are_refused_and_measurements_stay(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the changed options."""
    monkeypatch.chdir(tuned.folder)
    state = (tuned.folder / "tuned" / "tune_state.json").read_bytes()
    done = run_here("tune", "-m", "chain.onnx", "-o", "tuned", "--target", "size", "--only", "dynamic", "-q")
    assert 2 == done.code
    assert "min_sqnr_db, only" in done.err.replace("plan, ", "")
    assert state == (tuned.folder / "tuned" / "tune_state.json").read_bytes()


@pytest.fixture(scope="module")
def mixed(make_workplace: Callable[[], Workplace]) -> Tuned:
    """A tuning with a limit that int8 of the whole model misses, and a budget that ends at once."""
    place = make_workplace()
    save_chain(place.folder / "chain.onnx", outlier="w2")
    arguments = ("tune", "-m", "chain.onnx", "-o", "tuned", "--target", "size", "--only", "dynamic", "--min-sqnr", "40")
    done = place.winml(*arguments, "--budget", "1e-9", "--format", "json")
    assert 0 == done.code, done.err
    return Tuned(place.folder, json.loads(done.out), arguments, tune_record(place))


def test_exhausted_budget_keeps_measurements_and_a_larger_budget_resumes(
    mixed: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain file wins if nothing else was tried; later the failed whole candidate is mended by its modules."""
    assert ("plain", "not tried") == (mixed.record["winner"]["name"], rows(mixed.record)["dynamic-int8"]["status"])
    assert any("--budget" in note for note in mixed.record["notes"])
    assert ("undecided", "more time (--budget)") == tuple(
        mixed.record["verdict"][key] for key in ("answer", "decided_by")
    )
    monkeypatch.chdir(mixed.folder)
    done = run_here(*mixed.arguments)
    assert 0 == done.code, done.err
    record = json.loads((mixed.folder / "tuned" / "tune.json").read_text(encoding="utf-8"))
    found = rows(record)
    assert ("wrong", "right", "won") == tuple(found[name]["status"] for name in candidate_order(record))
    assert "minimum 40" in found["dynamic-int8"]["reason"]
    assert found["dynamic-int8-part"]["sqnr_db"] >= 40
    assert found["dynamic-int8"]["size_bytes"] < found["dynamic-int8-part"]["size_bytes"] < found["plain"]["size_bytes"]
    assert "winner   dynamic-int8-part: " in done.out
    assert "yes" == record["verdict"]["answer"]
    config = json.loads((mixed.folder / "tuned" / "best" / "winml_build_config.json").read_text(encoding="utf-8"))
    assert "fp32" in config["quant"]["per_module"].values()


def candidate_order(record: dict[str, Any]) -> list[str]:
    """Return the names with the whole candidate first, the plain file second, the mixed one last."""
    return sorted(rows(record), key=["dynamic-int8", "plain", "dynamic-int8-part"].index)


def test_winner_refused_by_its_build_leaves_the_other_candidates(here: Path) -> None:
    """An input a thousand times as large gets integers of one step.

    The error is within the limit of the tuning, but not of its build.
    """
    weights = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    weights[0] = 0
    scales = np.array([3000, *[1] * 255], np.float32)
    text = (
        '<ir_version: 10, opset_import: ["" : 17]> g (float[4,256] x) => (float[4,256] y)'
        " { a = Mul (x, s)  y = MatMul (a, w) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend([numpy_helper.from_array(scales, "s"), numpy_helper.from_array(weights, "w")])
    onnx.save(model, here / "scaled.onnx")
    arguments = ("--target", "size", "--only", "dynamic", "--min-sqnr", "-5", "--format", "json")
    done = run_here("tune", "-m", "scaled.onnx", "-o", "tuned", *arguments)
    assert 0 == done.code, done.err
    found = {row["name"]: row["status"] for row in json.loads(done.out)["candidates"]}
    assert ("won", "wrong") == (found["plain"], found["dynamic-int8"])


def test_fastest_candidate_is_selected_in_few_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates are measured in few rounds; other values in the data file make another tuning."""
    monkeypatch.setattr(contest, "RUNGS", (1, 2))
    monkeypatch.setattr(contest, "FIRST_RUNG", (1,))
    model, values = save_chain(tmp_path / "chain.onnx"), tmp_path / "values.npz"
    np.savez(values, x=np.ones((1, SIZE), np.float32))
    options = TuneOptions(only=("dynamic",), input_data=values, min_sqnr_db=10)
    result = tune_model(model, tmp_path / "tuned", options=options)
    assert {"plain", "dynamic-int8"} == {row.candidate.name for row in result.candidates if row.latency is not None}
    # Two rounds distinguish no candidates.
    assert ("plain", "winml perf") == (result.winner.name, str(result.winner.perf_command)[:10])
    assert Path(result.winner.folder, "model.onnx").is_file()
    np.savez(values, x=np.zeros((1, SIZE), np.float32))
    with pytest.raises(UsageError, match="files changed"):
        tune_model(model, tmp_path / "tuned", options=options)


def test_factory_is_exported_once_and_its_tuning_resumes(here: Path) -> None:
    """The factory returns other weights each time; with other options the export is kept, and refused."""
    lines = ("import torch", "def factory():", "    return torch.nn.Linear(64, 64).eval()", "")
    (here / "model.py").write_text("\n".join(lines), encoding="utf-8")
    specs = '[{"name": "input", "shape": [1, 64], "dtype": "float32"}]'
    asked = ("tune", "-m", "model.py:factory", "-o", "tuned", "--target", "size", "--input-specs", specs, "-q")
    done = run_here(*asked, "--only", "level")
    assert 0 == done.code, done.err
    exported = next((here / "tuned" / "exported").glob("*.onnx"))
    before = exported.stat().st_mtime_ns
    assert 0 == run_here(*asked, "--only", "level").code
    assert 2 == run_here(*asked, "--only", "dynamic").code
    assert before == exported.stat().st_mtime_ns
    assert 0 == run_here(*asked, "--only", "compile", "--overwrite").code
    assert before != exported.stat().st_mtime_ns


def test_plan_lists_each_candidate_and_builds_nothing(here: Path) -> None:
    """The plan is the same each time, as text and as JSON."""
    save_chain(here / "chain.onnx")
    arguments = ("tune", "-m", "chain.onnx", "-o", "tuned", "--dry-run", "--only", "dynamic")
    planned = run_here(*arguments)
    assert 0 == planned.code, planned.err
    record = json.loads(run_here(*arguments, "--format", "json").out)
    steps = {step["name"]: step["does"] for step in record["steps"]}
    candidates = {"plain file": "plain", "forms": "dynamic-int8", "modules in float": "dynamic-int8-part"}
    assert all(steps[step].startswith(f"{name} (") and f"{name} (" in planned.out for step, name in candidates.items())
    assert record == json.loads(run_here(*arguments, "--format", "json").out)
    assert ["chain.onnx"] == [path.name for path in here.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "missing.onnx"), "missing.onnx:"),
        (("--only", "dynmic"), "dynamic"),
        (("--max-drop", "accuracy=0.1"), "no samples"),
        (("--max-drop", "accuracy"), "METRIC=NUMBER"),
        (("--dataset", "missing.csv", "--max-drop", "accuracy=0.1"), "missing.csv"),
        (("--input-data", "missing.npz"), "--input-data missing.npz:"),
        (("--calibration-data", "missing.csv"), "missing.csv"),
        (("--task", "fill-mask"), "--task"),
        (("-o", "full"), "thesis.txt"),
    ],
)
def test_wrong_usage_is_refused_before_any_work(here: Path, arguments: tuple[str, ...], words: str) -> None:
    """The exit code is 2, and the folder is not made."""
    save_chain(here / "chain.onnx")
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("mine", encoding="utf-8")
    defaults = [] if "-m" in arguments else ["-m", "chain.onnx"]
    defaults += [] if "-o" in arguments else ["-o", "tuned"]
    done = run_here("tune", *defaults, *arguments)
    assert 2 == done.code
    assert words in done.err
    assert not (here / "tuned").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limits to stop writing with")
def test_full_disk_names_the_file_and_leaves_no_partial_file(make_workplace: Callable[[], Workplace]) -> None:
    """The values of the runs exceed the limit; the process of a candidate names the file."""
    place = make_workplace()
    wide = '<ir_version: 10, opset_import: ["" : 17]> g (float[1,100000] x) => (float[1,100000] y) { y = Abs(x) }'
    onnx.save(onnx.parser.parse_model(wide), place.folder / "wide.onnx")
    limited = replace(place, program=(sys.executable, "-c", WITH_A_LIMIT, "100000"))

    done = limited.winml("tune", "-m", "wide.onnx", "-o", "tuned", "--only", "dynamic", "--min-sqnr", "20")

    assert 1 == done.code
    assert "sample0.npz" in done.complaint[0]
    assert 2 == len(done.complaint)
    # Some versions of filelock remove the lock file.
    assert {path.name for path in (place.folder / "tuned").iterdir()} <= {".winml-tune.lock"}
