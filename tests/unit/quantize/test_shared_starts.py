"""Runs of the changed end of a graph on stored values of the float graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.quantized_variants import SharedStarts, feeds_of

LAYERS = 6


def _graph(second: str = "Relu") -> ir.Model:
    """Return a graph of layers of MatMul and activation; the second activation is a graph output too."""
    weights = ", ".join(f"float[4, 4] w{number} = {{{', '.join(['0.0'] * 16)}}}" for number in range(LAYERS))
    body, previous = "", "x"
    for number in range(LAYERS):
        body += f"p{number} = MatMul({previous}, w{number}) "
        body += f"h{number} = {second if number == 1 else 'Relu'}(p{number}) "
        previous = f"h{number}"
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 17]>
        g (float[2, 4] x) => (float[2, 4] h1, float[2, 4] {previous}) <{weights}> {{ {body} }}"""
    )
    generator = np.random.default_rng(0)
    for node in model.graph:
        node.name = node.outputs[0].name
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(generator.standard_normal((4, 4), dtype=np.float32), name=value.name)
    return model


def _form(model: ir.Model, number: int) -> ir.Model:
    """Return a copy with rounded values, under another name, in the weight of one layer."""
    form = model.clone()
    (node,) = (node for node in form.graph if node.name == f"p{number}")
    rounded = ir.tensor(np.round(node.inputs[1].const_value.numpy()), name="rounded")
    value = ir.val("rounded", const_value=rounded, dtype=ir.DataType.FLOAT, shape=ir.Shape((4, 4)))
    form.graph.register_initializer(value)
    node.replace_input_with(1, value)
    return form


def _opened(model: ir.Model) -> Session:
    return Session(ir.to_proto(model).SerializeToString(), name="the form")


@pytest.fixture
def samples() -> list[dict[str, np.ndarray]]:
    """Two sets of inputs."""
    generator = np.random.default_rng(1)
    return [{"x": generator.standard_normal((2, 4), dtype=np.float32)} for _ in range(2)]


def test_remaining_nodes_equal_the_whole_variant(samples: list[dict[str, np.ndarray]]) -> None:
    """Only nodes after the changed fifth layer run, on the stored values of each sample."""
    model = _graph()
    starts = SharedStarts(model, GraphSessions(model), samples, threads=1)
    form = _form(model, 4)
    start = starts.last_before(form)
    assert start is not None
    assert {"p0", "h1", "p3"} <= start.names
    rest = SharedStarts.cut_remaining(form, start)
    assert rest is not None
    assert ["p4", "h4", "p5", "h5"] == [node.name for node in rest.graph]
    session, whole = _opened(rest), _opened(form)
    for number, feeds in enumerate(samples):
        expected = whole.run(feeds)
        found = session.run(feeds_of(session, start, number, feeds))
        assert {"h5"} == found.keys()
        np.testing.assert_array_equal(expected["h5"], found["h5"])
        assert np.any(_opened(model).run(feeds)["h5"] != found["h5"])


def test_form_that_differs_from_the_first_node_on_is_run_from_its_inputs(samples: list[dict[str, np.ndarray]]) -> None:
    """Other values under the same name are a difference as well."""
    model = _graph()
    starts = SharedStarts(model, GraphSessions(model), samples, threads=1)
    assert starts.last_before(_form(model, 0)) is None
    form = model.clone()
    first = form.graph.initializers["w0"]
    first.const_value = ir.tensor(np.ones((4, 4), np.float32), name="w0")
    assert starts.last_before(form) is None


def test_random_graph_has_no_shared_values(samples: list[dict[str, np.ndarray]]) -> None:
    """Two runs of the graph give different values."""
    model = _graph("RandomNormalLike")
    assert SharedStarts(model, GraphSessions(model), samples, threads=1).last_before(_form(model, 4)) is None
