"""Continuation of an interrupted quantization, to the same file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse
from installed_versions import TWO_BITS
from weighted_graphs import weight
from winml.modelkit import quantize_onnx
from winml.modelkit.file_names import unfinished_work_path
from winml.modelkit.progress import StepEvent
from winml.modelkit.quantize.records import QuantizedFile

NET = f"""m (float[N, 64] x) => (float[N, 64] y)
    <{", ".join(weight(f"w{number}", 64, 64) for number in range(4))}, {weight("w_g", 64)}> {{
    n = Mul (x, w_g) a = MatMul (n, w0) b = Relu (a) c = MatMul (b, w1) d = Relu (c)
    e = MatMul (d, w2) f = Relu (e) y = Gemm (f, w3) }}"""
"""Four layers of a product each, in two modules."""
SOLVING = {"precision": "int4", "samples": 8, "min_sqnr_db": -100.0, "seed": 1}
SEARCH = {"budget": "4.5bits", "algorithm": "gptq", "samples": 4, "min_sqnr_db": -100.0}
KILLED = """
import json, os, signal, sys
from winml.modelkit import quantize_onnx

def on_step(event):
    if event.running is not None and sys.argv[3] in event.running.progress:
        os.kill(os.getpid(), signal.SIGKILL)

quantize_onnx(sys.argv[1], sys.argv[2], on_step=on_step, **json.loads(sys.argv[4]))
"""
"""Quantizes a file, and kills itself when it tells of something."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The net in a file."""
    ir.save(parse(NET), tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


def stopped_at(words: str) -> Callable[[StepEvent], None]:
    """Return a step callback that raises KeyboardInterrupt at a given progress text."""

    def on_step(event: StepEvent) -> None:
        if event.running is not None and words in event.running.progress:
            raise KeyboardInterrupt

    return on_step


def resumption_notes(result: QuantizedFile) -> list[str]:
    """Return the notes on results of an interrupted run."""
    return [note for note in result.notes if "interrupted" in note]


def written_by(source: Path, name: str, options: dict[str, Any]) -> tuple[bytes, QuantizedFile]:
    """Return the bytes of the written file and the result."""
    output = source.with_name(name)
    result = quantize_onnx(source, output, **options)
    assert not unfinished_work_path(output).exists()
    return output.read_bytes(), result


@TWO_BITS
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
@pytest.mark.parametrize(
    ("options", "moment", "note"),
    [
        ({**SOLVING, "algorithm": "gptq"}, "layer 2 of 4", "2 of 4 layers"),
        (SEARCH, "module 1 of", "20 of 20 layers"),
    ],
    ids=["walk", "search"],
)
def test_killed_run_is_continued_to_the_same_bytes(
    source: Path, options: dict[str, Any], moment: str, note: str
) -> None:
    """Finished work of a killed process is reused, a note names it, and its folder is removed."""
    command = [sys.executable, "-c", KILLED, source, source.with_name("out.onnx"), moment, json.dumps(options)]
    killed = subprocess.run(command, check=False)  # our own Python
    assert -signal.SIGKILL == killed.returncode
    assert not source.with_name("out.onnx").exists()
    assert unfinished_work_path(source.with_name("out.onnx")).is_dir()
    found, result = written_by(source, "out.onnx", options)
    assert note in resumption_notes(result)[0]
    whole, uninterrupted = written_by(source, "whole.onnx", options)
    assert not resumption_notes(uninterrupted)
    assert whole == found
    if result.budget is not None and uninterrupted.budget is not None:
        assert 0 < result.budget.resumed < result.budget.measured == uninterrupted.budget.measured


def cut_off(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(path: Path) -> None:
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("layers/*/state.json", cut_off),
        ("layers/*/state.json", lambda path: path.write_text("{}")),
        ("layers/*/blocks/*packed.npy", changed),
        ("layers/*/blocks/*scales.npy", cut_off),
        ("layers/*/values/*.npy", changed),
        ("layers/*/values/*.npy", Path.unlink),
    ],
)
def test_damaged_state_of_a_walk_is_not_used(source: Path, pattern: str, damage: Callable[[Path], Any]) -> None:
    """All layers are run again, with the result of an uninterrupted run."""
    options = {**SOLVING, "algorithm": "awq"}
    with pytest.raises(KeyboardInterrupt):
        quantize_onnx(source, source.with_name("out.onnx"), on_step=stopped_at("layer 2 of 4"), **options)
    state = unfinished_work_path(source.with_name("out.onnx"))
    damage(max(state.glob(pattern)))
    found, result = written_by(source, "out.onnx", options)
    assert not resumption_notes(result)
    assert written_by(source, "whole.onnx", options)[0] == found


@pytest.mark.parametrize("other", [{"seed": 2}, {"samples": 9}, {"algorithm": "awq"}, {"block_size": 64}])
def test_state_of_other_samples_or_options_is_not_used(source: Path, other: dict[str, Any]) -> None:
    """The state belongs to another result and is removed afterwards."""
    options = {**SOLVING, "algorithm": "gptq"}
    with pytest.raises(KeyboardInterrupt):
        quantize_onnx(source, source.with_name("out.onnx"), on_step=stopped_at("layer 3 of 4"), **options)
    assert not resumption_notes(written_by(source, "out.onnx", {**options, **other})[1])


def test_state_of_another_graph_is_not_used(source: Path) -> None:
    """Weights with other values under the same names are another model."""
    options = {**SOLVING, "algorithm": "gptq"}
    with pytest.raises(KeyboardInterrupt):
        quantize_onnx(source, source.with_name("out.onnx"), on_step=stopped_at("layer 3 of 4"), **options)
    model = ir.load(source)
    tensor = model.graph.initializers["w3"].const_value
    assert tensor is not None
    model.graph.initializers["w3"].const_value = ir.tensor(np.flip(tensor.numpy()).copy(), name="w3")
    ir.save(model, source)
    assert not resumption_notes(written_by(source, "out.onnx", options)[1])


@TWO_BITS
def test_damaged_measurements_are_not_used(source: Path) -> None:
    """All variants are measured again."""
    options = {**SEARCH, "algorithm": "rtn"}
    with pytest.raises(KeyboardInterrupt):
        quantize_onnx(source, source.with_name("out.onnx"), on_step=stopped_at("module 1 of"), **options)
    cut_off(unfinished_work_path(source.with_name("out.onnx")) / "measured.json")
    result = written_by(source, "out.onnx", options)[1]
    assert result.budget is not None
    assert 0 == result.budget.resumed


def test_refusal_leaves_no_files(source: Path) -> None:
    """A refused quantization leaves no work to continue."""
    with pytest.raises(Exception, match="dB"):
        quantize_onnx(source, source.with_name("out.onnx"), **{**SOLVING, "algorithm": "gptq", "min_sqnr_db": 200.0})
    assert [source] == list(source.parent.iterdir())
