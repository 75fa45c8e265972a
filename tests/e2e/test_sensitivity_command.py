"""``winml quantize --sensitivity``: output, files and refusals."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from e2e.workplace import Workplace
from module_chains import SIZE, save_chain


@pytest.fixture
def model(workplace: Workplace) -> Path:
    """A file of nested modules with an outlier in one of its weights."""
    return save_chain(workplace.folder / "chain.onnx", outlier="w2")


_PER_TENSOR = ("--per-tensor", "--samples", "2")


def test_ranking_is_printed_and_nothing_is_written(workplace: Workplace, model: Path) -> None:
    """The module with the outlier is first, apart from modules that contain it."""
    done = workplace.winml("quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR)
    assert 0 == done.code, done.err
    rows = [line.split("  ")[0] for line in done.out.splitlines() if re.match(r"(a\.|c |/M)", line)]
    assert {"a.0", "a.0 (own nodes)"} < set(rows[:3])
    assert rows.index("a.0 (own nodes)") < rows.index("a.0.b")
    assert "nothing to quantize" in done.out
    assert [model.name] == [path.name for path in workplace.folder.iterdir()]
    conclusion = next(line for line in done.out.splitlines() if line.startswith("conclusion "))
    assert "a.0 (own nodes)" in conclusion or "a.0 causes" in conclusion
    command = next(line.split(maxsplit=1)[1] for line in done.out.splitlines() if line.startswith("next "))
    assert "-o chain_int8.onnx" in command  # all modules in int8 meet the default limit
    following = workplace.winml(*shlex.split(command)[1:])
    assert 0 == following.code, following.err


def test_json_and_page_are_written_together(workplace: Workplace, model: Path) -> None:
    """JSON on stdout equals the file, the page needs no network, and no measurements are left."""
    done = workplace.winml(
        "quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR, "-o", "r.json", "--report", "r.html",
        "--format", "json", "--jobs", "2",
    )  # fmt: skip
    assert 0 == done.code, done.err
    assert json.loads(done.out) == json.loads((workplace.folder / "r.json").read_text(encoding="utf-8"))
    page = (workplace.folder / "r.html").read_text(encoding="utf-8")
    assert "quantization" in page
    assert "a.0 (own nodes)" in page.replace("<wbr>", "")
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', page)
    assert {"chain.onnx", "r.json", "r.html"} == {path.name for path in workplace.folder.iterdir()}


def test_exclude_list_reaches_its_target_with_per_module(workplace: Workplace, model: Path) -> None:
    """``--per-module`` accepts the file; without it, the same minimum ratio is missed."""
    found = workplace.winml(
        "quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR, "--target", "sqnr_db=14",
        "--exclude-list", "rules.json", "-o", "r.json",
    )  # fmt: skip
    assert 0 == found.code, found.err
    rules = json.loads((workplace.folder / "rules.json").read_text(encoding="utf-8"))
    assert "fp32" == rules["a.0"]
    record = json.loads((workplace.folder / "r.json").read_text(encoding="utf-8"))
    assert record["exclude_list"]["is_met"]
    assert record["exclude_list"]["latency"]["p50_ms"] > 0
    assert "yes" == record["exclude_list"]["verdict"]["answer"]
    assert record["next"] in found.out
    following = workplace.winml(*shlex.split(record["next"])[1:])
    assert 0 == following.code, following.err
    quantize = ("quantize", "-m", model.name, "--per-tensor", "--min-sqnr", "12", "-o")
    with_rules = workplace.winml(*quantize, "with.onnx", "--per-module", "rules.json", "--format", "json")
    assert 0 == with_rules.code, with_rules.err
    assert 12 <= min(output["sqnr_db"] for output in json.loads(with_rules.out)["verification"]["outputs"])
    assert 3 == workplace.winml(*quantize, "without.onnx").code


def test_target_out_of_reach_ends_with_3_and_writes_no_list(workplace: Workplace, model: Path) -> None:
    """The record holds the best result."""
    done = workplace.winml(
        "quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR, "--target", "sqnr_db=190",
        "--exclude-list", "rules.json", "-o", "r.json",
    )  # fmt: skip
    assert 3 == done.code
    assert "not met" in done.out
    assert not (workplace.folder / "rules.json").exists()
    assert not json.loads((workplace.folder / "r.json").read_text(encoding="utf-8"))["exclude_list"]["is_met"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process there")
def test_interrupted_command_resumes(workplace: Workplace, model: Path) -> None:
    """Ctrl-C leaves the measurements beside the result; the next run makes the missing ones, and removes all."""
    arguments = ("quantize", "-m", model.name, "--sensitivity", "-o", "r.json", "--samples", "3000")
    process = subprocess.Popen(
        [*workplace.program, *arguments], cwd=workplace.folder, env=workplace.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        # A background process of a shell ignores the signal, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    measured = workplace.folder / "r.json.measured.json"
    deadline = time.monotonic() + 60
    while not measured.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert measured.exists()
    assert not (workplace.folder / "r.json").exists()
    refused = workplace.winml(*arguments, "--precision", "uint8")
    assert (2, True) == (refused.code, "precision was 'int8', now 'uint8'" in refused.err)
    done = workplace.winml(*arguments)
    assert 0 == done.code, done.err
    cost = json.loads((workplace.folder / "r.json").read_text(encoding="utf-8"))["cost"]
    assert 1 <= cost["resumed"] < 6
    assert 6 == cost["resumed"] + cost["measured"]
    assert not measured.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--report", "r.html", "-o", "o.onnx"), "--report requires --sensitivity"),
        ((), "no output"),
        (("--sensitivity", "--no-verify"), "--no-verify"),
        (("--sensitivity", "--min-sqnr", "3"), "--min-sqnr"),
        (("--sensitivity", "-o", "r.html"), "--sensitivity is JSON"),
        (("--sensitivity", "--exclude-list", "rules.json"), "--exclude-list"),
        (("--sensitivity", "--target", "psnr=3"), "'psnr'"),
        (("--sensitivity", "--input-data", "a.npz", "--samples", "2"), "--samples 2"),
        (("--sensitivity", "--input-data", "a.npz"), "no such"),
        (("--sensitivity", "-o", "r.json", "--report", "r.json"), "--exclude-list"),
        (("--sensitivity", "-o", "chain.onnx.json", "--depth", "9"), "3 level"),
    ],
)
def test_wrong_use_is_refused(workplace: Workplace, model: Path, arguments: tuple[str, ...], words: str) -> None:
    """One line names the conflict."""
    done = workplace.winml("quantize", "-m", model.name, *arguments)
    assert 2 == done.code, done.err
    assert any(words in line for line in done.complaint), done.err
    assert [model.name] == [path.name for path in workplace.folder.iterdir()]


def test_sensitivity_never_replaces_its_inputs(workplace: Workplace) -> None:
    """Neither the data file of the weights nor the calibration data is replaced, even with --overwrite."""
    folder = workplace.folder
    onnx.save(onnx.load(save_chain(folder / "inline.onnx")), folder / "chain.onnx", save_as_external_data=True,
              location="chain.weights", size_threshold=0)  # fmt: skip
    np.savez(folder / "values.npz", x=np.ones((1, SIZE), np.float32))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = ("quantize", "-m", "chain.onnx", "--sensitivity", "--mode", "qdq", "--overwrite")
    for output in ("chain.weights", "values.npz"):
        done = workplace.winml(*command, "--calibration-data", "values.npz", "-o", output)
        assert 2 == done.code, done.err
        assert f"{output} is the input" in done.err
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_quiet_run_prints_nothing(workplace: Workplace, model: Path) -> None:
    """The result is in its file; JSON is printed only on request."""
    quiet = workplace.winml("quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR, "-q", "-o", "r.json")
    assert (0, "", "") == (quiet.code, quiet.out, quiet.err)
    answer = json.loads((workplace.folder / "r.json").read_text(encoding="utf-8"))
    asked = workplace.winml("quantize", "-m", model.name, "--sensitivity", *_PER_TENSOR, "-q", "--format", "json")
    assert answer["quantized"]["sqnr_db"] == json.loads(asked.out)["quantized"]["sqnr_db"]


def test_existing_result_is_not_replaced(workplace: Workplace, model: Path) -> None:
    """The command is refused before a measurement."""
    (workplace.folder / "r.json").write_text("{}", encoding="utf-8")
    done = workplace.winml("quantize", "-m", model.name, "--sensitivity", "-o", "r.json")
    assert (2, "{}") == (done.code, (workplace.folder / "r.json").read_text(encoding="utf-8"))
