"""The optimizer: requested changes, in every kind of graph, with all tags kept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.errors import ConfigError, OptimizeError, UsageError
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVELS, UNUSED_TRANSFORMERS
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import GraphCensus, optimize, order_nodes
from winml.modelkit.options import parse_options
from winml.modelkit.tags.tagging import NodeTag, all_nodes, clear_tag, write_tag

X = np.array([[1, -2, 3], [4, 5, -6]], np.float32)

MESSY = """m (float[2, 3] x) => (float[2, 3] y) <float zero = {0}, float two = {2}>
    { a = Relu (x) b = Relu (x) c = Add (a, zero) d = Mul (b, two) e = Add (c, d)
      f = Transpose <perm = [1, 0]> (e) g = Abs (f) y = Transpose <perm = [1, 0]> (g) }"""


def test_registry_names_every_transformer_of_onnxruntime(tmp_path: Path) -> None:
    """Every transformer of ONNX Runtime is part of a capability or listed as unused, so that none runs unrequested."""
    onnx.save(ir.to_proto(parse(MESSY)), tmp_path / "m.onnx")
    program = (
        "import onnxruntime as o, sys; s = o.SessionOptions(); s.log_severity_level = 0;"
        "s.add_session_config_entry('optimization.enable_gelu_approximation', '1');"
        "o.InferenceSession(sys.argv[1], s, providers=['CPUExecutionProvider'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=True
    )
    ran = set(re.findall(r"GraphTransformer (\w+) modified", done.stderr))
    assert "GeluFusionL2" in ran
    known = {name for entry in CAPABILITIES.values() for name in (*entry.transformers, *entry.contrib_transformers)}
    needed = {
        # These transformers make the graph runnable, and run at every level.
        "CastFloat16Transformer", "FreeDimensionOverrideTransformer", "FuseFp16InitializerToFp32NodeTransformer",
        "Level1_RuleBasedTransformer", "Level2_RuleBasedTransformer", "MemcpyTransformer",
        "RemoveDuplicateCastTransformer",
    }  # fmt: skip
    assert set() == ran - known - set(UNUSED_TRANSFORMERS) - needed


def test_empty_request_changes_nothing() -> None:
    """Level none returns the same model, unchanged."""
    model = parse(MESSY)
    before = [node.name for node in model.graph]
    result = optimize(model, OptimizeOptions())
    assert result.model is model
    assert not result.changed
    assert before == [node.name for node in model.graph]


@pytest.mark.parametrize("level", LEVELS)
def test_level_keeps_outputs_interface_and_tags_and_settles(level: str) -> None:
    """Outputs, names and tags stay at every level, and a second optimization changes nothing."""
    options = OptimizeOptions.model_validate({"level": level})
    result = optimize(parse(MESSY), options)
    assert result.changed == (level != "none")
    assert answer(parse(MESSY), x=X) == answer(result.model, x=X)
    assert ["x"] == [value.name for value in result.model.graph.inputs]
    assert ["y"] == [value.name for value in result.model.graph.outputs]
    assert all(tags(result.model))
    assert not optimize(result.model, options).changed


def test_basic_level_makes_operators_of_onnx_only() -> None:
    """Operators of ONNX Runtime appear from level extended on, unless the execution provider lacks them."""
    body = (
        "m (float[2, 3] x) => (float[2, 3] y) { a = Transpose <perm = [1, 0]> (x) b = MatMul (x, a) y = MatMul (b, x) }"
    )
    foreign = {
        name: [operator for operator in GraphCensus.of(result.model).operators if ":" in operator]
        for name, options in {
            "basic": OptimizeOptions(level="basic"),
            "extended": OptimizeOptions(level="extended"),
            "extended for qnn": OptimizeOptions(level="extended", ep="qnn"),
        }.items()
        if (result := optimize(parse(body), options))
    }
    assert {"basic": [], "extended": ["com.microsoft:FusedMatMul"], "extended for qnn": []} == foreign


def test_untagged_model_stays_untagged_with_a_note() -> None:
    """A model without modules gets no tag."""
    model = parse(MESSY)
    for node in all_nodes(model):
        clear_tag(node)
    result = optimize(model, OptimizeOptions(level="full"))
    assert result.coverage.tagged == 0
    assert any("no tags" in note for note in result.notes)


def test_subgraph_is_optimized_and_tagged() -> None:
    """Branches are optimized, and keep the names of outer values."""
    model = parse(
        """m (float[2, 3] x, bool c) => (float[2, 3] y) <float zero = {0}>
        { z = Relu (x)
          y = If (c) <then_branch = t () => (float[2, 3] p) { q = Identity (z) r = Relu (q) p = Abs (r) },
                      else_branch = e () => (float[2, 3] s) { u = Abs (x) s = Neg (u) }> }"""
    )
    expected = answer(model, x=X, c=True)
    result = optimize(model, OptimizeOptions(level="full"))
    assert "Identity" not in operators(result.model)
    assert all(tags(result.model))
    assert expected == answer(result.model, x=X, c=True)


def test_unknown_operator_is_refused_with_its_name() -> None:
    """A graph that ONNX Runtime cannot read is not optimized in part; the error names the operator."""
    model = parse("m (float[2, 3] x) => (float[2, 3] y) { y = f.Unheard (x) }", domains=', "f" : 1')
    with pytest.raises(OptimizeError, match="Unheard") as raised:
        optimize(model, OptimizeOptions(level="basic"))
    assert "sent.onnx" not in raised.value.message


def test_tied_weight_is_not_stored_a_second_time() -> None:
    """A large weight that is read by Gather and, transposed, by MatMul stays one initializer, by reference."""
    table = np.arange(600 * 500, dtype=np.float32).reshape(600, 500) / 1e5
    model = parse(
        """m (int64[2, 4] i) => (float[2, 4, 600] y) <float[1] table = {0}>
        { a = Gather (table, i) t = Transpose <perm = [1, 0]> (table) y = MatMul (a, t) }"""
    )
    tensor = ir.tensor(table, name="table")
    value = model.graph.initializers["table"]
    value.const_value, value.shape = tensor, ir.Shape(table.shape)
    result = optimize(model, OptimizeOptions(level="full"))
    assert ["Gather", "FusedMatMul"] == operators(result.model)
    assert [tensor] == [value.const_value for value in result.model.graph.initializers.values()]


def test_new_nodes_are_named_after_their_module() -> None:
    """The name of a new node begins with the scope of its module, since profilers keep only the name."""
    model = parse(
        """m (float[2, 3, 4] x) => (float[2, 3, 4] y) <float[4] g = {1, 2, 3, 4}, float[4] b = {4, 3, 2, 1}>
        { a = Relu (x) s = Add (x, a) y = LayerNormalization (s, g, b) }"""
    )
    for node, name in zip(model.graph, ("act/Relu", "out/Add", "out/norm/LayerNormalization"), strict=True):
        node.name = f"/layer.0/{name}"
        module = f"layer.0.{name.split('/')[0]}"
        write_tag(node, NodeTag(f"/M/{module}", module, "direct"))
    result = optimize(model, OptimizeOptions(level="extended"))
    assert ["/layer.0/act/Relu", "/layer.0/out/SkipLayerNormalization"] == [node.name for node in result.model.graph]


def test_order_follows_from_the_graph_alone() -> None:
    """Two graphs that differ in the order of their nodes only give the same result."""
    shuffled = parse(MESSY)
    nodes = list(shuffled.graph)
    swapped = [nodes[1], nodes[0], nodes[3], nodes[2], *nodes[4:]]
    shuffled.graph.remove(nodes)
    shuffled.graph.extend(swapped)
    ordered = parse(MESSY)
    for model in (shuffled, ordered):
        order_nodes(model)
    assert [node.name for node in ordered.graph] == [node.name for node in shuffled.graph]
    assert answer(parse(MESSY), x=X) == answer(shuffled, x=X)


@pytest.mark.parametrize("target", [15, 21])
def test_opset_conversion_carries_tags_both_ways(target: int) -> None:
    """Upwards and downwards, every node keeps a tag and the outputs stay."""
    model = parse(MESSY, opset=17)
    result = optimize(model, OptimizeOptions(opset=target))
    assert target == result.model.opset_imports[""]
    assert all(tags(result.model))
    assert answer(parse(MESSY), x=X) == answer(result.model, x=X)


def test_unreachable_opset_is_refused_with_the_reason() -> None:
    """The error names both opsets and the missing operator."""
    model = parse(
        "m (float[2, 4] x) => (float[2, 4] y) <float[4] g = {1, 2, 3, 4}> { y = LayerNormalization (x, g) }", opset=17
    )
    with pytest.raises(OptimizeError, match=r"opset 17 to 13: .*LayerNormalization"):
        optimize(model, OptimizeOptions(opset=13))


def test_options_name_the_nearest_capability() -> None:
    """The error suggests the nearest capability."""
    with pytest.raises(ConfigError, match="'gelu_fusion'"):
        parse_options(OptimizeOptions, {"gelu_fuson": True}, "test")


def test_unsupported_capability_is_refused_by_name_only() -> None:
    """A level leaves the capability out; by name it is an error, since it would have no effect."""
    assert not [entry.name for entry in OptimizeOptions(level="full", ep="qnn").enabled() if not entry.transformers]
    with pytest.raises(UsageError, match="attention-fusion:"):
        list(OptimizeOptions.model_validate({"attention_fusion": True, "ep": "qnn"}).enabled())
    with pytest.raises(UsageError, match="execution provider"):
        OptimizeOptions(ep="qmn")
