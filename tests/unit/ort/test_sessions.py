"""Sessions of graphs of every dtype, and the reasons of their failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphs import run_onnx
from winml.modelkit.errors import InputError, StageError, UsageError
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.format_keys import product_key
from winml.modelkit.ort.probe_graphs import PROBES
from winml.modelkit.ort.sessions import Session, is_onnxruntime_at_least


def _one_node_model(op_type: str, dtype: Any, shape: list[int], domain: str = "") -> bytes:
    value_type = ir.DataType.from_numpy(np.dtype(dtype))
    x = ir.val("x", value_type, ir.Shape(shape))
    node = ir.node(op_type, [x], domain=domain, outputs=[ir.val("y", value_type, ir.Shape(shape))])
    graph = ir.Graph(
        [x], node.outputs, nodes=[node], name="g", opset_imports={"": 17, **({domain: 1} if domain else {})}
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int8, np.bool_])
@pytest.mark.parametrize("shape", [[], [2, 3], [0, 3]])
def test_session_returns_fed_values_unchanged(dtype: Any, shape: list[int]) -> None:
    """Values keep dtype, shape and content, scalars and empty arrays included."""
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    output = run_onnx(_one_node_model("Identity", dtype, shape), {"x": value})["y"]
    assert (value.dtype, value.shape, value.tolist()) == (output.dtype, output.shape, output.tolist())
    assert output.flags.writeable


def test_session_reads_views_in_logical_order() -> None:
    """An array that is not contiguous is fed in its logical order."""
    value = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert value.tolist() == run_onnx(_one_node_model("Identity", np.float32, [3, 2]), {"x": value})["y"].tolist()


def test_session_runs_again_and_again() -> None:
    """One session runs several times, with and without ONNX Runtime's optimizations."""
    for optimize in (True, False):
        session = Session(_one_node_model("Neg", np.float32, [1]), optimize=optimize)
        assert ({"x": "tensor(float)"}, ("y",)) == (session.inputs, session.outputs)
        outputs = [session.run({"x": np.array([number], np.float32)})["y"].item() for number in (1, 2)]
        assert [-1, -2] == outputs


def test_session_of_a_broken_file_names_file_and_reason(tmp_path: Path) -> None:
    """The message has the path of the model, or of the missing data file."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"broken\.onnx"):
        Session(path)
    model = onnx.load_model_from_string(_one_node_model("Identity", np.float32, [1]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "weight"))
    model.graph.node[0].input[0] = "weight"
    onnx.save(model, path, save_as_external_data=True, location="broken.data", size_threshold=0)
    (tmp_path / "broken.data").unlink()
    with pytest.raises(InputError, match=r"broken\.data"):
        Session(path)


def test_session_of_an_unknown_operator_names_the_operator() -> None:
    """The error names the operator."""
    with pytest.raises(StageError, match=r"memory: .*Nonsense"):
        Session(_one_node_model("Nonsense", np.float32, [1], domain="nowhere"))


def test_session_with_an_unknown_provider_lists_the_available_providers(capfd: pytest.CaptureFixture[str]) -> None:
    """The error is a usage error, and ONNX Runtime prints nothing."""
    with pytest.raises(UsageError, match=r"NopeExecutionProvider(.|\n)*CPUExecutionProvider"):
        Session(_one_node_model("Neg", np.float32, [1]), providers=["NopeExecutionProvider"])
    assert ("", "") == capfd.readouterr()


def test_session_with_wrong_values_names_the_expected_inputs() -> None:
    """A wrong name is a usage error; a wrong shape is reported in ONNX Runtime's words."""
    session = Session(_one_node_model("Neg", np.float32, [2]))
    with pytest.raises(UsageError, match="x; got z"):
        session.run({"z": np.zeros(2, np.float32)})
    with pytest.raises(StageError, match=r"cannot .*invalid dimensions"):
        session.run({"x": np.zeros(3, np.float32)})


def test_prepared_run_equals_a_run() -> None:
    """The prepared run can be repeated with the bound values, bfloat16 and scalars included."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int64):
        for shape in ([], [2, 3]):
            value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            session = Session(_one_node_model("Identity", dtype, shape))
            run = session.prepare({"x": value})
            for _ in range(3):
                run()
            output = run.outputs()["y"]
            assert run.is_bound
            assert output is not None
            assert (value.dtype, value.tolist()) == (output.dtype, output.tolist())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_prepared_run_without_io_binding_has_equal_outputs(dtype: type) -> None:
    """A change of the arrays between two runs has an effect, since no copy stays on a device."""
    value = np.arange(6).reshape(2, 3).astype(dtype)
    session = Session(_one_node_model("Identity", dtype, [2, 3]))
    run, bound = session.prepare({"x": value}, io_binding=False), session.prepare({"x": value})
    run()
    bound()
    assert (False, ("cpu",), True, ("cpu",)) == (run.is_bound, run.output_memory, bound.is_bound, bound.output_memory)
    expected, output = bound.outputs()["y"], run.outputs()["y"]
    assert expected is not None
    assert output is not None
    assert (expected.dtype, expected.tolist()) == (output.dtype, output.tolist())
    value *= 2
    run()
    output = run.outputs()["y"]
    assert output is not None
    assert value.tolist() == output.tolist()


def test_prepared_run_without_io_binding_names_the_refused_value() -> None:
    """The error is that of a bound run."""
    run = Session(_one_node_model("Neg", np.float32, [2])).prepare({"x": np.ones(3, np.float32)}, io_binding=False)
    with pytest.raises(StageError, match=r"memory: .*invalid dimensions"):
        run()


def test_prepared_run_on_refused_values_gives_the_reason() -> None:
    """The shape is checked during the run."""
    run = Session(_one_node_model("Neg", np.float32, [2])).prepare({"x": np.ones(3, np.float32)})
    with pytest.raises(StageError, match=r"memory: .*invalid dimensions"):
        run()


def test_node_that_refuses_its_values_is_named() -> None:
    """The message has our words, not those of ONNX Runtime's source."""
    text = "g (float[N] x, float[M] z) => (float[K] y) { [inner] y = Add(x, z) }"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}')
    feeds = {"x": np.ones(3, np.float32), "z": np.ones(2, np.float32)}
    with pytest.raises(StageError, match=r"node inner \(Add\): .* 2 by 3"):
        Session(ir.to_proto(model).SerializeToString()).run(feeds)


def test_prepared_run_accepts_text() -> None:
    """Text is passed in every run, and a text output has no array."""
    text = "g (string[2] x) => (string[2] y) { y = Identity(x) }"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}')
    run = Session(ir.to_proto(model).SerializeToString()).prepare({"x": np.array(["a", "b"])})
    run()
    assert not run.is_bound
    assert {"y": None} == run.outputs()


def test_prepared_run_leaves_sequences_alone() -> None:
    """An output that is no tensor is computed but not read."""
    text = "g (float[N, 2] x) => (seq(float[M, 2]) y) { y = SplitToSequence(x) }"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}')
    session = Session(ir.to_proto(model).SerializeToString())
    for io_binding in (True, False):
        run = session.prepare({"x": np.ones((3, 2), np.float32)}, io_binding=io_binding)
        run()
        assert {"y": None} == run.outputs()


def test_session_has_shapes_and_metadata() -> None:
    """A session has the names of dynamic dimensions, and the metadata of the file."""
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 17], metadata_props: ["key": "value"]>\n'
        "g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }"
    )
    session = Session(ir.to_proto(model).SerializeToString(), threads=1)
    assert {"x": ("N", 2)} == session.input_shapes
    assert {"key": "value"} == session.metadata


def test_missing_kernel_names_the_dtype_to_export_with() -> None:
    """A bfloat16 file does not run on the CPU; another failure has no such hint."""
    with pytest.raises(StageError) as caught:
        Session(_one_node_model("Erf", ml_dtypes.bfloat16, [2]))
    assert "--dtype fp32" in (caught.value.hint or "")
    with pytest.raises(StageError) as caught:
        Session(_one_node_model("Erf", np.float32, [2], domain="unknown.domain"))
    assert "--dtype" not in (caught.value.hint or "")


@pytest.mark.parametrize("io_binding", [True, False])
def test_output_of_another_shape_than_declared_is_computed_in_every_run(io_binding: bool) -> None:
    """The output buffer of the previous run has another shape than declared, so ONNX Runtime refuses it."""
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Neg", ["x"], ["y"])],
            "stale",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 2])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 2])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    run = Session(model.SerializeToString()).prepare({"x": np.ones((1, 2), np.float32)}, io_binding=io_binding)
    for _ in range(3):
        run()
        output = run.outputs()["y"]
        assert output is not None
        assert [[-1, -1]] == output.tolist()


def test_products_of_16_bit_activations_are_not_rounded_to_8_bits() -> None:
    """ONNX Runtime 1.32 computes these products with 8-bit activations by default."""
    graph = PROBES[product_key(8, 16, "channel")].make().SerializeToString()
    feeds = {"x": np.random.default_rng(0).uniform(-4, 4, (1, 8, 64)).astype(np.float32)}
    written, optimized = (Session(graph, optimize=optimize).run(feeds)["y"] for optimize in (False, True))
    # Steps of 16 bits; steps of 8 bits are 0.03.
    np.testing.assert_allclose(optimized, written, atol=2e-3)


def test_chosen_provider_computes_as_in_an_application(tmp_path: Path) -> None:
    """Times of such a session are those of an application, whose options winml does not set."""
    path = tmp_path / "model.onnx"
    path.write_bytes(PROBES[product_key(8, 16, "channel")].make().SerializeToString())
    feeds = {"x": np.random.default_rng(0).uniform(-4, 4, (1, 8, 64)).astype(np.float32)}
    [expected] = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], feeds)
    np.testing.assert_array_equal(expected, choose_provider("cpu", None, {}).open(path).run(feeds)["y"])
    if is_onnxruntime_at_least("1.32"):  # measured with this version
        assert not np.array_equal(expected, Session(path).run(feeds)["y"])
