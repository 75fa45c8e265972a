"""Memory by module: values in memory at the peak, and weights of the executed graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphs
from installed_versions import KERNEL_MEMORY
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.profile.by_module import profile_modules
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.profile.memory_records import ModuleMemory

pytestmark = KERNEL_MEMORY

SIZE = 128
VALUE_BYTES = 4 * SIZE * SIZE
BODY = f"""g (float[{SIZE},{SIZE}] x, float[{SIZE},{SIZE}] w, float[{SIZE},{2 * SIZE}] wide) => (float y)
<int64[1] flat = {{{SIZE * SIZE}}}, int64[2] square = {{{SIZE}, {SIZE}}}> {{
  a = MatMul (x, w)
  b = Reshape (a, flat)
  c = Neg (b)
  d = Reshape (c, square)
  e = MatMul (d, wide)
  y = ReduceSum <keepdims = 0> (e)
}}"""


BRANCHES = f"""g (float[{SIZE},{SIZE}] x, float[{SIZE},{SIZE}] w, float[{SIZE},{2 * SIZE}] wide, bool c) => (float y) {{
  a = MatMul (x, w)
  b = If (c) <then_branch = then () => (float[{SIZE},{2 * SIZE}] p) {{ n = MatMul (a, w)  p = MatMul (n, wide) }},
              else_branch = other () => (float[{SIZE},{2 * SIZE}] q) {{ q = MatMul (a, wide) }}>
  y = ReduceSum <keepdims = 0> (b)
}}"""
"""One branch of the two computes a value, and both read one of the main graph."""


def _measure(folder: Path, body: str) -> ModuleMemory:
    path = folder / "net.onnx"
    model = graphs.parse(body)
    write_model(model, path)
    values = path.with_suffix(".npz")
    square = np.ones((SIZE, SIZE), np.float32)
    feeds = {"x": square, "w": square, "wide": np.ones((SIZE, 2 * SIZE), np.float32), "c": np.array(True)}
    np.savez(values, **{str(value.name): feeds[str(value.name)] for value in model.graph.inputs})
    run = RunOptions(path.name, input_data=values)
    memory = profile_modules(path, run, LatencyOptions(iterations=2, warmup=1), memory=True).memory
    assert memory is not None
    return memory


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModuleMemory:
    """A negation between two views, and a product of twice its size."""
    return _measure(tmp_path_factory.mktemp("memory"), BODY)


def test_values_of_a_branch_are_in_memory_with_those_that_it_reads(tmp_path: Path) -> None:
    """A value of the main graph stays until the branch ends; the other branch has no values."""
    peak = _measure(tmp_path, BRANCHES).peak
    assert ("MatMul", 4 * VALUE_BYTES, 0) == (peak.operator, peak.activation_bytes, peak.reserved_bytes)
    assert {"a": VALUE_BYTES, "n": VALUE_BYTES, "p": 2 * VALUE_BYTES} == {
        value.value: value.size_bytes for value in peak.values
    }


def test_values_in_the_same_memory_count_once(memory: ModuleMemory) -> None:
    """At the peak, the negation is listed as its last view, and what it was computed from is freed."""
    peak = memory.peak
    assert ("MatMul", 3 * VALUE_BYTES, 0) == (peak.operator, peak.activation_bytes, peak.reserved_bytes)
    assert {("d", VALUE_BYTES), ("e", 2 * VALUE_BYTES)} == {(value.value, value.size_bytes) for value in peak.values}
    assert 3 * VALUE_BYTES == sum(module.peak_bytes for module in memory.modules.values())


def test_weights_are_those_of_the_executed_graph(memory: ModuleMemory) -> None:
    assert 24 == memory.weights_bytes == sum(module.weights_bytes for module in memory.modules.values())
