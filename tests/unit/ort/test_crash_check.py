"""Models that crash ONNX Runtime: refused without a crash of the process that opens them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from winml.modelkit import optimize_onnx
from winml.modelkit.compare.files import refuse_different
from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.onnx.files.wire_format import has_half_floats
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session, rewrite_file

OPENING = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""
"""Opens a file as any program does."""


BRANCHES = """g (bool c) => (float[2] y) {
    y = If (c) <then_branch = t () => (float[2] u) { u = A <dtype = 10> () },
                else_branch = f () => (float[2] v) { v = B () }>
}"""
"""A branch with a node that makes float16."""


def transposed_product(order: list[int], dtype: str = "float16") -> ir.Model:
    """Return ``y = Transpose(x) W`` with a small weight."""
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({dtype}[5,2,16] x) => ({dtype}[A,B,8] y) <{dtype}[1] w = {{0}}> {{
            t = Transpose <perm = {order}> (x)
            y = MatMul (t, w)
        }}"""
    )
    weight = model.graph.initializers["w"]
    values = np.random.default_rng(0).standard_normal((16, 8)).astype({"float": "float32"}.get(dtype, dtype))
    weight.const_value, weight.shape = ir.tensor(values, name="w"), ir.Shape([16, 8])
    return model


def saved(model: ir.Model, path: Path) -> Path:
    """Write a model and return its path."""
    ir.save(model, path)
    return path


@pytest.fixture(scope="module")
def crashing_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that crashes the installed ONNX Runtime, as 1.31 does with a batch transposed in float16."""
    path = saved(transposed_product([1, 0, 2]), tmp_path_factory.mktemp("crashing") / "half.onnx")
    if subprocess.run([sys.executable, "-c", OPENING, path], capture_output=True, check=False).returncode in (0, 1):
        pytest.skip("the installed ONNX Runtime opens this file")
    return path


def test_model_that_crashes_onnxruntime_is_refused(crashing_file: Path) -> None:
    """Each attempt is refused in this process, and models without the fault are opened afterwards."""
    for _ in range(2):
        with pytest.raises(StageError, match="crashes while it opens"):
            Session(crashing_file)
    written = Session(crashing_file, optimize=False).run({"x": np.ones((5, 2, 16), np.float16)})
    good = Session(saved(transposed_product([0, 1, 2]), crashing_file.with_name("good.onnx")))
    assert (2, 5, 8) == written["y"].shape
    assert (5, 2, 8) == good.run({"x": np.ones((5, 2, 16), np.float16)})["y"].shape


@pytest.mark.usefixtures("crashing_file")
def test_model_in_memory_that_crashes_onnxruntime_is_refused() -> None:
    """The check needs the types and shapes of weights, not their values."""
    model = transposed_product([1, 0, 2])
    assert isinstance(GraphSessions(model).open(model, optimize=False), Session)
    with pytest.raises(StageError, match="the graph"):
        GraphSessions(model).open(model)


def test_optimizer_that_crashes_is_refused(crashing_file: Path, tmp_path: Path) -> None:
    """No graph is written."""
    with pytest.raises(StageError, match="crashes while it opens"):
        rewrite_file(crashing_file, tmp_path / "rewritten.onnx", disabled=(), with_layouts=True)
    assert not (tmp_path / "rewritten.onnx").exists()
    rewrite_file(crashing_file, tmp_path / "rewritten.onnx", disabled=())
    assert (tmp_path / "rewritten.onnx").is_file()


def test_file_that_crashes_is_optimized_to_a_file_that_opens(crashing_file: Path, tmp_path: Path) -> None:
    """The transposition that ONNX Runtime cannot fuse in float16 is computed in float32."""
    optimize_onnx(crashing_file, tmp_path / "optimized.onnx", level="basic")
    Session(tmp_path / "optimized.onnx")


def test_result_that_crashes_is_refused(crashing_file: Path, tmp_path: Path) -> None:
    """The source opens, so that the error is in the result."""
    model = ir.load(crashing_file)
    transpose, product = model.graph
    first = ir.node("Neg", transpose.outputs)
    second = ir.node("Neg", first.outputs)
    model.graph.insert_before(product, [first, second])
    product.replace_input_with(0, second.outputs[0])
    source = saved(model, tmp_path / "source.onnx")
    with pytest.raises(VerificationError, match="ONNX Runtime"):
        refuse_different(source, crashing_file, 0)


def test_float32_model_is_opened_once(tmp_path: Path) -> None:
    """A model without 16-bit floats is not checked in a second process; one with them is checked once per process."""
    single = Session(saved(transposed_product([1, 0, 2], "float"), tmp_path / "single.onnx"))
    path = saved(transposed_product([0, 1, 2]), tmp_path / "half.onnx")
    first, second = Session(path), Session(path)
    assert single.check_seconds < 0.1  # starting a process and importing ONNX Runtime takes longer
    assert second.check_seconds < 0.1
    assert (5, 2, 8) == first.run({"x": np.ones((5, 2, 16), np.float16)})["y"].shape


@pytest.mark.parametrize(
    ("body", "is_half"),
    [
        ("g (float[2] x) => (float[2] y) { y = Relu (x) }", False),
        ("g (float16[2] x) => (float16[2] y) { y = Relu (x) }", True),
        ("g (float[2] x) => (float[2] y) { h = Cast <to = 10> (x) y = Cast <to = 1> (h) }", True),
        ("g (float[2] x) => (float[2] y) { h = Cast <to = 16> (x) y = Cast <to = 1> (h) }", True),
        ("g (float[2] x) => (float[2] y) { y = Unknown <num_heads = 16, axis = 10> (x) }", False),
        ("g (float[2] x) => (float[2] y) { h = Constant <value = float16[1] {0}> () y = Relu (x) }", True),
        ("g (float[2] x) => (float[2] y) <float16[1] w = {0}> { y = Relu (x) }", True),
        (BRANCHES, True),
    ],
)
def test_half_floats_are_detected_in_every_position(body: str, is_half: bool, tmp_path: Path) -> None:
    """A file and its bytes are searched alike; a damaged file may count as having none."""
    content = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {body}').SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content)
    (tmp_path / "cut.onnx").write_bytes(content[: len(content) // 3])
    assert is_half == has_half_floats(content) == has_half_floats(str(tmp_path / "model.onnx"))
    assert not has_half_floats(str(tmp_path / "missing.onnx"))
    assert has_half_floats(str(tmp_path / "cut.onnx")) in (False, is_half)
