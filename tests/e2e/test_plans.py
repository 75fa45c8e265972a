"""Plans of ``--dry-run``: exactly the files of the run, the refusals of the run, and no file written."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.in_process import run_here
from module_chains import save_chain
from winml.modelkit.file_names import OWNER_LOCK_NAME, PARTIAL_PREFIX
from winml.modelkit.onnx.files.recovery import STAGED, write_journal

FEW = ("--iterations", "2", "--warmup", "0")
ONES = f"x={json.dumps([[1.0] * 32])}"
"""An input of the model, as ``winml run`` accepts it."""
CASES = {
    "optimize": ("optimize", "-m", "models/model.onnx", "-o", "models/new.onnx", "--level", "basic"),
    "optimize, no output": ("optimize", "-m", "models/model.onnx"),
    "optimize, weights outside": ("optimize", "-m", "models/model.onnx", "-o", "out/new.onnx", "--external-data"),
    "optimize, replaced": ("optimize", "-m", "models/model.onnx", "-o", "models/earlier.onnx", "--overwrite"),
    "compile": ("compile", "-m", "models/model.onnx", "-o", "models/new.onnx", "--ep", "cpu"),
    "compile, weights inside": ("compile", "-m", "models/model.onnx", "-o", "out/new.onnx", "--ep", "cpu", "--embed"),
    "compile, a folder": ("compile", "-m", "built", "-o", "built-cpu", "--ep", "cpu"),
    "quantize": ("quantize", "-m", "models/model.onnx", "-o", "models/new.onnx", "--no-verify"),
    "quantize, a folder": ("quantize", "-m", "built", "-o", "built-int8", "--no-verify"),
    "quantize, sensitivity": ("quantize", "-m", "models/model.onnx", "-o", "out/answer.json", "--sensitivity"),
    "retag": ("retag", "models/model.onnx", "models/earlier.onnx", "-o", "models/new.onnx"),
    "retag, weights copied": ("retag", "models/model.onnx", "models/earlier.onnx", "-o", "out/new.onnx"),
    "config": ("config", "-m", "models/model.onnx", "-o", "out/config.json"),
    "config, a checkpoint": ("config", "-m", "checkpoint", "-p", "int8", "-o", "out/config.json"),
    "export": ("export", "-m", "net.py:build", "-o", "out/new.onnx", "--with-report"),
    "export, no tags": ("export", "-m", "net.py:build", "-o", "out/new.onnx", "--no-hierarchy", "--no-verify"),
    "export, a checkpoint": ("export", "-m", "checkpoint", "-o", "out/new.onnx", "--no-verify"),
    "export, replaced": ("export", "-m", "net.py:build", "-o", "models/earlier.onnx", "--overwrite"),
    "export, sizes fixed": ("export", "-m", "models/model.onnx", "-o", "out/new.onnx", "--batch-size", "2"),
    "extract": ("extract", "models/model.onnx", "--module", "B", "-o", "out", "--with-inputs"),
    "build": ("build", "-m", "models/model.onnx", "-o", "out", "--level", "basic"),
    "build, up to date": ("build", "-m", "models/model.onnx", "-o", "deployed"),
    "build, options changed": ("build", "-m", "models/model.onnx", "-o", "deployed", "--precision", "int8"),
    "build, a stage left out": ("build", "-m", "models/model.onnx", "-o", "quantized"),
    "build, all again": ("build", "-m", "models/model.onnx", "-o", "deployed", "--rebuild"),
    "build, deployed only": ("build", "-m", "models/model.onnx", "-o", "deployed", "--deploy-only"),
    "perf": ("perf", "models/model.onnx", *FEW, "-o", "out/perf.json"),
    "perf, only on stdout": ("perf", "models/model.onnx", *FEW),
    "perf, by module": (
        *("perf", "models/model.onnx", "--by-module", *FEW, "-o", "out/a.json"),
        *("--report", "out/a.html", "--node-data", "out/nodes.json", "--trace", "models/trace.json"),
    ),
    "perf, modules": ("perf", "built", "--module", "B", *FEW, "-o", "models/perf.json"),
    "compare": ("compare", "models/model.onnx", "models/earlier.onnx", "-o", "models/compared.json"),
    "compare, by module": (
        *("compare", "built", "models/earlier.onnx", "--by-module", "-o", "models/new.json"),
        *("--report", "out/compared.html", "--node-data", "out/nodes.json"),
    ),
    "diff": ("diff", "models/model.onnx", "models/earlier.onnx", "--exit-zero", "-o", "models/changes.md"),
    "tune": (
        *("tune", "-m", "models/model.onnx", "-o", "out", "--only", "dynamic", "--target", "size", "--min-sqnr", "20"),
    ),
    "sweep": ("sweep", "models/models.txt", "--set", "optim.level=none,basic", "-o", "out"),
    "run": ("run", "models/model.onnx", "--input", ONES, "-o", "out/answer.json", "--save", "models/arrays.npz"),
    "optimize, a folder": ("optimize", "-m", "built", "-o", "built-fast", "--level", "basic"),
}
"""Name → a command that writes; every verb with ``--dry-run`` has one."""


NET = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

def example_inputs():
    return {"input": torch.ones(2, 4)}
"""


EARLIER = {
    "deployed": ("build", "-m", "models/model.onnx", "-o", "deployed"),
    "quantized": ("build", "-m", "models/model.onnx", "-o", "quantized", "--precision", "int8", "--no-verify"),
}
"""Folder → command of its first build, for commands that build into the folder again."""


@pytest.fixture(scope="module")
def prepared(small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, one with weights to be replaced, and the folder of an export with a tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "net.py").write_text(NET, encoding="utf-8")
    shutil.copytree(small_bert, folder / "checkpoint")
    for name in ("models", "built"):
        (folder / name).mkdir()
        save_chain(folder / name / "model.onnx")
    (folder / "models" / "models.txt").write_text("models/model.onnx\n", encoding="utf-8")
    (folder / "built" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = run_here("optimize", "-m", "models/model.onnx", "-o", "models/earlier.onnx", "--external-data")
    assert 0 == first.code, first.err
    return folder


@pytest.fixture(name="place", autouse=True)
def make_place(here: Path, prepared: Path) -> Path:
    """A copy of the models as the current directory."""
    return Path(shutil.copytree(prepared, here, dirs_exist_ok=True))


def make_earlier_build(arguments: tuple[str, ...]) -> None:
    """Run the build of a folder that a command builds into again."""
    for folder in EARLIER.keys() & {*arguments}:
        assert 0 == run_here(*EARLIER[folder]).code


def leave_interrupted(folder: Path) -> None:
    """Leave the files of a killed command: a journal of finished files, and a folder of unfinished ones."""
    hidden = folder / f"{PARTIAL_PREFIX}x"
    (hidden / STAGED).mkdir(parents=True)
    (hidden / OWNER_LOCK_NAME).touch()
    save_chain(hidden / STAGED / "model.onnx", outlier="w2")
    (hidden / STAGED / "report.md").write_text("new", encoding="utf-8")
    write_journal(hidden, hidden / STAGED, folder, ["report.md", "model.onnx"], [])
    unfinished = folder / f"{PARTIAL_PREFIX}y"
    (unfinished / STAGED).mkdir(parents=True)
    (unfinished / OWNER_LOCK_NAME).touch()
    (unfinished / STAGED / "half.onnx").write_text("half", encoding="utf-8")


def states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, time of change and inode of everything in a folder, hidden entries included."""
    found = {path.relative_to(folder).as_posix(): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (state.st_size, state.st_mtime_ns, state.st_ino) for name, state in found.items()}


def planned(*arguments: str) -> dict[str, Any]:
    outcome = run_here(*arguments, "--dry-run", "-f", "json")
    assert 0 == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_plan_lists_exactly_the_files_of_the_run(place: Path, arguments: tuple[str, ...]) -> None:
    """Each file that appears or changes is in the plan, and each unconditional file of the plan is written."""
    make_earlier_build(arguments)
    before = states(place)
    plan = planned(*arguments)
    shown = run_here(*arguments, "--dry-run")
    assert (0, before) == (shown.code, states(place))
    assert all(step["name"] in shown.out and step["does"].split()[0] in shown.out for step in plan["steps"])
    outcome = run_here(*arguments, "-f", "json")
    assert 0 == outcome.code, outcome.err
    after = states(place)
    written = {name for name in after if after[name] != before.get(name) and (place / name).is_file()}
    patterns = {Path(os.path.relpath(file["path"], ".")).as_posix(): file for file in plan["writes"]}
    assert written == {name for name in written if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    for pattern, file in patterns.items():
        found = fnmatch.filter(written, pattern)
        assert found or file["only_if"], pattern
        assert file["replaces"] == any(name in before for name in found), pattern
    assert before.keys() - after.keys() <= set(plan["removes"])
    steps = None if arguments[0] in ("build", "config") else json.loads(outcome.out).get("steps")
    assert (
        steps is None
        or "--sensitivity" in arguments
        or [step["name"] for step in steps] == [step["name"] for step in plan["steps"]]
    )
    assert all(Path(path).is_file() for path in plan["reads"])


RECOVERED = {
    name: arguments for name, arguments in CASES.items() if name not in ("build", "tune", "perf, only on stdout")
}
"""Commands without folders of a build or a tuning, where recovery puts a foreign model, which is refused, and without
commands that write nothing.
"""


@pytest.mark.parametrize("arguments", RECOVERED.values(), ids=RECOVERED)
def test_plan_writes_nothing_beside_files_of_a_killed_command(place: Path, arguments: tuple[str, ...]) -> None:
    """The plan lists the recovery, and the run does it first."""
    make_earlier_build(arguments)
    output = Path(arguments[arguments.index("-o") + 1] if "-o" in arguments else "models/model_opt.onnx")
    folder = output.parent if output.suffix else output
    folder.mkdir(exist_ok=True)
    leave_interrupted(folder)
    overwriting = (*arguments, *(["--overwrite"] if "built" in arguments else []))
    before = states(place)
    plan = planned(*overwriting)
    assert 0 == run_here(*overwriting, "--dry-run").code
    assert before == states(place)
    finished = [str(folder / name) for name in ("report.md", "model.onnx")]
    assert [finished, []] == [found["completes"] for found in plan["recovery"]]
    outcome = run_here(*overwriting)
    assert 0 == outcome.code, outcome.err
    assert "put in place report.md, model.onnx" in outcome.err
    assert not list(place.rglob(f"{PARTIAL_PREFIX}*"))


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ("optimize", "-m", "models/model.onnx", "-o", "models/earlier.onnx")),
        (2, ("optimize", "-m", "built/model.onnx", "-o", "models/n.onnx", "--level", "full", "--module", "Nothing")),
        (2, ("optimize", "-m", "models/missing.onnx")),
        (2, ("optimize", "-m", "built/model.onnx", "-o", "models/n.onnx", "--shape-config", '{"nothing": 3}')),
        (1, ("optimize", "-m", "models/broken.onnx")),
        (2, ("config", "-m", "models/model.onnx", "-o", "models/model.onnx", "--overwrite")),
        (2, ("config", "-m", "checkpoint", "-o", "checkpoint/config.json")),
        (2, ("config", "-m", "checkpoint", "--no-quant", "-p", "int8")),
        (2, ("config", "--schema", "-o", "models/n.json")),
        (2, ("export", "-m", "net.py:build", "-o", "models/earlier.onnx")),
        (2, ("export", "-m", "net.py:build", "-o", "models/n.onnx", "--no-hierarchy", "--functions", "all")),
        (2, ("export", "-m", "net.py:build", "-o", "models/n.onnx", "--opset", "9")),
        (2, ("export", "-m", "./missing", "-o", "models/n.onnx")),
        (2, ("export", "-m", "net.py:build", "-o", "models/n.onnx", "--dynamic-batch", "--ep", "qnn")),
        (2, ("export", "-m", "built/model.onnx", "-o", "models/n.onnx", "--shape-config", '{"nothing": 3}')),
        (2, ("export", "-m", "models/model.onnx", "-o", "models/n.onnx", "--batch-size", "2", "--functions", "all")),
        (2, ("extract", "models/model.onnx", "--module", "Nothing", "-o", "out")),
        (2, ("retag", "models/model.onnx", "models/earlier.onnx")),
        (1, ("retag", "models/model.onnx", "models/broken.onnx", "-o", "models/n.onnx")),
        (2, ("quantize", "-m", "built/model.onnx", "-o", "models/n.onnx", "--exclude", "Nothing")),
        (2, ("quantize", "-m", "built/model.onnx", "-o", "models/n.onnx", "--depth", "1")),
        (2, ("quantize", "-m", "built/model.onnx", "-o", "models/n.onnx", "--precision", "int4", "--mode", "qdq")),
        (2, ("quantize", "-m", "built/model.onnx", "-o", "models/earlier.onnx", "--sensitivity")),
        (2, ("quantize", "-m", "built/model.onnx", "--sensitivity", "--module", "Nothing")),
        (2, ("quantize", "-m", "built/model.onnx", "--sensitivity", "--shape-config", '{"nothing": 3}')),
        (2, ("quantize", "-m", "built/model.onnx", "--sensitivity", "--input-data", "models/missing.npz")),
        (1, ("quantize", "-m", "models/broken.onnx", "--sensitivity")),
        (2, ("perf", "built/model.onnx", "--input-data", "models/missing.npz")),
        (2, ("extract", "built/model.onnx", "--module", "B", "-o", "out", "--input-data", "models/missing.npz")),
        (2, ("compile", "-m", "models/model.onnx", "-o", "models/new.onnx", "--ep", "qmn")),
        (2, ("compile", "-m", "models/model.onnx", "-o", "models/new.onnx", "--ep", "tensorrt")),
        (2, ("optimize", "-m", "built", "-o", "built", "--overwrite")),
        (2, ("perf", "built", "-o", "built/model.onnx", "--overwrite")),
        (2, ("perf", "built", "--by-module", "--report", "models/a", "--trace", "models/a")),
        (2, ("perf", "built", "--overwrite")),
        (2, ("perf", "built", "-o", "models/a.json", "--ep", "tensorrt")),
        (2, ("compare", "built", "models/earlier.onnx", "-o", "models/earlier.onnx", "--overwrite")),
        (2, ("compare", "built", "models/earlier.onnx", "-o", "models/report.md")),
        (2, ("eval", "built", "--dataset", "models/missing.csv")),
        (2, ("diff", "built", "models/earlier.onnx", "-o", "models/earlier.onnx")),
        (2, ("build", "-m", "built/model.onnx", "-o", "models")),
        (2, ("build", "-m", "built/model.onnx", "-o", "built")),
        (2, ("build", "-m", "built/model.onnx", "-o", "out", "--use-cache")),
        (2, ("build", "-m", "built/model.onnx", "--use-cache", "--deploy-only")),
        (2, ("build", "-m", "built/model.onnx", "-o", "out", "--no-optimize", "--level", "basic")),
        (1, ("build", "-m", "models/broken.onnx", "-o", "out")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_plan_refuses_as_the_run_does(place: Path, code: int, arguments: tuple[str, ...]) -> None:
    """Plan and run have the same message and exit code, and neither changes a file."""
    (place / "models" / "broken.onnx").write_bytes(b"no model")
    leave_interrupted(place / "models")
    before = states(place)
    planned, run = run_here(*arguments, "--dry-run"), run_here(*arguments)
    assert (code, "", before) == (planned.code, planned.out, states(place))
    # A command line to type repeats the options of the user.
    assert (run.code, run.err) == (planned.code, planned.err.replace(" --dry-run", ""))


def test_plan_of_a_build_has_the_state_of_each_stage(place: Path) -> None:
    """A stage is up to date, runs again with a reason, runs after a stage that makes another graph, or is skipped."""
    build = EARLIER["quantized"]
    make_earlier_build(build)
    made = {step["name"]: step["does"] for step in planned(*build)["steps"]}
    assert ["up to date"] * 2 == [made["optimize"], made["quantize"]]
    assert all(made[stage].startswith("skipped: ") for stage in ("export", "compile"))
    faster = planned(*build, "--level", "basic")
    again = {step["name"]: step["does"] for step in faster["steps"]}
    assert again["optimize"].startswith("runs: options changed: optim.level")
    assert again["quantize"].startswith("up to date, unless optimize")
    conditions = {Path(file["path"]).name: file["only_if"] for file in faster["writes"]}
    assert (None, True) == (conditions["optimized.onnx"], "optimize" in conditions["quantized.onnx"])
    without = planned(*build[:5])
    assert [str(Path("quantized/quantized.onnx"))] == [path for path in without["removes"] if path.endswith(".onnx")]


def test_plan_of_a_build_in_the_cache_changes_nothing_there(place: Path) -> None:
    """The plan names the new folder; a quantized build is optimized anew, without fusions that it does not support."""
    build = ("build", "-m", "models/model.onnx", "--use-cache")
    cache = Path(os.environ["WINML_CACHE"])
    first = planned(*build)
    assert not cache.exists() or not list(cache.rglob("*"))
    outcome = run_here(*build, "-f", "json")
    assert 0 == outcome.code, outcome.err
    assert {str(Path(json.loads(outcome.out)["folder"]))} == {
        str(Path(file["path"]).parent) for file in first["writes"]
    }
    before = states(cache)
    second = {step["name"]: step["does"] for step in planned(*build, "--precision", "int8")["steps"]}
    assert before == states(cache)
    assert all(second[stage].startswith("runs: ") for stage in ("optimize", "quantize"))
    equal = {step["name"]: step["does"] for step in planned(*build, "--precision", "fp16")["steps"]}
    assert "up to date, from the cache" == equal["optimize"]


@pytest.mark.parametrize(
    "arguments",
    [("perf", "net.py:build"), ("extract", "net.py:build", "--module", "B", "-o", "out")],
    ids=lambda arguments: arguments[0],
)
def test_cache_that_cannot_be_written_is_refused_by_the_plan_and_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """The export of the model would be stored there."""
    monkeypatch.setenv("WINML_CACHE", str(place / "net.py"))
    before = states(place)
    planned, run = run_here(*arguments, "--dry-run"), run_here(*arguments)
    assert (1, 1, before) == (planned.code, run.code, states(place))
    assert "WINML_CACHE" in planned.err
    assert planned.err == run.err


@pytest.mark.parametrize(
    ("code", "cache", "more"),
    [(1, "net.py", ()), (2, "empty", ("--ep-options", "threads=1")), (2, "empty", ("-d", "npu"))],
)
def test_inspect_for_a_provider_is_refused_before_the_model_is_exported(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int, cache: str, more: tuple[str, ...]
) -> None:
    """The cache cannot be written, or the provider does not accept the option."""
    monkeypatch.setenv("WINML_CACHE", str(place / cache))
    before = states(place)
    assert (code, before) == (run_here("inspect", "net.py:build", "--ep", "cpu", *more).code, states(place))


def test_dry_run_of_cache_clean_removes_nothing_and_lists_the_removals(place: Path) -> None:
    """The plan has each build with its size, and the total."""
    cache = Path(os.environ["WINML_CACHE"])
    assert 0 == run_here("build", "-m", "models/model.onnx", "--use-cache").code
    before = states(cache)
    plan = planned("cache", "clean")
    assert ("cache clean", before) == (plan["verb"], states(cache))
    assert [] == planned("cache", "clean", "--older-than", "1")["removes"]
    outcome = run_here("cache", "clean", "-f", "json")
    assert plan["removes"] == [build["folder"] for build in json.loads(outcome.out)["builds"]]
    assert [(step["name"], "models/model.onnx") for step in plan["steps"]] == [
        ("removing", build["model"]) for build in json.loads(outcome.out)["builds"]
    ]
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_plan_of_a_sweep_lists_finished_cells(place: Path) -> None:
    """Each cell is a step; a second configuration is an unfinished cell."""
    sweep = ("sweep", "models/models.txt", "-o", "out")
    assert 0 == run_here(*sweep, "--set", "optim.level=none").code
    before = states(place)
    steps = planned(*sweep, "--set", "optim.level=none,basic")["steps"]
    assert (["finished already", "build of models/model.onnx"], before) == (
        [step["does"] for step in steps],
        states(place),
    )
