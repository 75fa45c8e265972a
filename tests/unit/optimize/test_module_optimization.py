"""Optimization of selected modules only, and a check of its effect without writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit import optimize_onnx
from winml.modelkit.errors import UsageError
from winml.modelkit.metadata_keys import MODULE_KEY, TAG_KEY
from winml.modelkit.optimize.file_optimization import check_optimization
from winml.modelkit.tags.tagging import NodeTag, write_tag

TWO_GELUS = """m (float[2, 4] x) => (float[2, 4] y) <float root = {1.4142135}, float one = {1}, float half = {0.5}>
    { a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) e = Mul (d, half)
      f = Div (e, root) g = Erf (f) h = Add (g, one) i = Mul (e, h) y = Mul (i, half) }"""
TWO_CONVOLUTIONS = """m (float[1, 4, 6, 6] x) => (float[1, 4, 2, 2] y)
    <float[4] w3 = {1, 2, 3, 4}, float[4] w4 = {4, 3, 2, 1},
     float[4] mean = {0.1, 0.2, 0.3, 0.4}, float[4] var = {1, 2, 3, 4}>
    { s = Constant <value_ints = [4, 4, 3, 3]> () w1 = ConstantOfShape <value = float[1] {0.1}> (s)
      a = Conv (x, w1) b = BatchNormalization (a, w3, w4, mean, var)
      c = Conv (b, w1) y = BatchNormalization (c, w3, w4, mean, var) }"""
SKIPPED = """m (float[batch, 3, 4] x) => (float[batch, 3, 4] y)
    <float[1, 1, 4] w0 = {1, 2, 3, 4}, float[4] w1 = {1, 2, 3, 4}, float[4] w2 = {4, 3, 2, 1}, int64[3] s = {1, 3, 4}>
    { r = Expand (w0, s) a = Add (x, r) y = LayerNormalization (a, w1, w2) }"""

TWO_NAMES = """m (float[batch, rows, 4] x, float[batch, lines, 4] r) => (float[batch, rows, 4] y)
    <float[4] w1 = {1, 2, 3, 4}, float[4] w2 = {4, 3, 2, 1}>
    { a = Add (x, r) y = LayerNormalization (a, w1, w2) }"""


def save(path: Path, body: str, modules: Sequence[str], domains: str = "") -> Path:
    """Write a graph with one of these modules per node, in order."""
    model = parse(body, domains=domains)
    for node, module in zip(model.graph, modules, strict=True):
        write_tag(node, NodeTag(f"/M/{module.title()}", module, "direct"))
        node.name = f"/{module}/{node.name.rpartition('/')[2]}" if node.name else module
    ir.save(model, path)
    return path


def operators(path: Path) -> dict[str, Counter[str]]:
    """Return the operators of each module."""
    found: dict[str, Counter[str]] = {}
    for node in onnx.load(path).graph.node:
        module = {entry.key: entry.value for entry in node.metadata_props}[MODULE_KEY]
        found.setdefault(module, Counter())[node.op_type] += 1
    return found


PLAIN = Counter({"Mul": 2, "Div": 1, "Erf": 1, "Add": 1})
FUSED = Counter({"Gelu": 1})


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({"module": ["first"]}, {"first": FUSED, "second": PLAIN}),
        ({"exclude": ["first"]}, {"first": PLAIN, "second": FUSED}),
        ({"module": ["first", "Second"], "exclude": ["second"]}, {"first": FUSED, "second": PLAIN}),
    ],
    ids=["only there", "everywhere but there", "both"],
)
def test_only_selected_modules_change(tmp_path: Path, selected: dict[str, Any], expected: dict[str, Any]) -> None:
    """The outputs are those of the source, and the other module keeps every node."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 5)
    result = optimize_onnx(source, tmp_path / "out.onnx", gelu_fusion=True, **selected)
    assert expected == operators(tmp_path / "out.onnx")
    assert (1, True, 100.0) == (
        result.fired["gelu_fusion"],
        result.verification is not None and result.verification.is_verified,
        result.coverage.percent,
    )


def test_fusion_with_a_node_outside_does_not_fire(tmp_path: Path) -> None:
    """One of the five nodes belongs to another module: selected alone, the first module is refused."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first", "other"] + ["first"] * 3 + ["second"] * 5)
    with pytest.raises(UsageError, match="module first"):
        optimize_onnx(source, tmp_path / "out.onnx", gelu_fusion=True, module=["first"])
    optimize_onnx(source, tmp_path / "out.onnx", gelu_fusion=True, exclude=["first"])
    assert {"first": PLAIN - Counter({"Erf": 1}), "other": Counter({"Erf": 1}), "second": FUSED} == operators(
        tmp_path / "out.onnx"
    )


@pytest.mark.parametrize("option", ["module", "exclude"])
def test_selector_of_a_module_without_optimization_is_refused(tmp_path: Path, option: str) -> None:
    """Nothing of the module would be fused, with or without the selector; no file is written."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 2 + ["third"] + ["second"] * 2)
    with pytest.raises(UsageError, match="changes none") as refusal:
        optimize_onnx(
            source, tmp_path / "out.onnx", skip_layer_norm_fusion=True, gelu_fusion=False, **{option: ["third"]}
        )
    assert "third" in refusal.value.message
    assert not (tmp_path / "out.onnx").exists()


def test_module_whose_weights_are_only_written_again_is_refused(tmp_path: Path) -> None:
    """The optimizer returns small weights as other tensors."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 5)
    model = onnx.load(source)
    model.graph.node.append(onnx.helper.make_node("Gemm", ["y", "weight", "bias"], ["z"], "gemm"))
    write = onnx.numpy_helper.from_array
    model.graph.initializer.extend(
        [write(np.ones((4, 64), np.float32), "weight"), write(np.ones(64, np.float32), "bias")]
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 64]))
    for key, value in ((TAG_KEY, "/M/Third"), (MODULE_KEY, "third")):
        model.graph.node[-1].metadata_props.add(key=key, value=value)
    onnx.save(model, source)
    with pytest.raises(UsageError, match="changes none"):
        optimize_onnx(source, tmp_path / "out.onnx", level="full", module=["third"])


def test_exclusion_of_an_operator_that_onnx_runtime_lacks_is_no_idle_selector(tmp_path: Path) -> None:
    """Without the exclusion nothing could be optimized at all."""
    body = TWO_GELUS.replace("y = Mul (i, half)", "j = Mul (i, half) k = my.ops.Unknown (j) y = Relu (k)")
    modules = ["first"] * 5 + ["second"] * 5 + ["third"] * 2
    source = save(tmp_path / "in.onnx", body, modules, domains=', "my.ops" : 1')
    optimize_onnx(source, tmp_path / "out.onnx", gelu_fusion=True, exclude=["third"], verify=False)
    assert {"first": FUSED, "second": FUSED, "third": Counter({"Unknown": 1, "Relu": 1})} == operators(
        tmp_path / "out.onnx"
    )


def test_module_with_a_table_of_texts_is_optimized(tmp_path: Path) -> None:
    """The optimizer writes the texts again, and they remain one initializer."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 5)
    model = onnx.load(source)
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["y"], ["best"], "best", axis=1, keepdims=0))
    model.graph.node.append(onnx.helper.make_node("Gather", ["texts", "best"], ["label"], "label"))
    for node in model.graph.node[-2:]:
        node.metadata_props.extend(model.graph.node[-3].metadata_props)
    model.graph.initializer.append(onnx.helper.make_tensor("texts", onnx.TensorProto.STRING, [4], list("abcd")))
    model.graph.output.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.STRING, [2]))
    onnx.save(model, source)
    optimize_onnx(source, tmp_path / "out.onnx", gelu_fusion=True, module=["second"])
    texts = [tensor for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer if tensor.string_data]
    assert [("texts", [b"a", b"b", b"c", b"d"])] == [(tensor.name, [*tensor.string_data]) for tensor in texts]


def test_shared_weights_stay_for_other_modules(tmp_path: Path) -> None:
    """The second convolution gets its own weights; the first reads the previous ones."""
    source = save(tmp_path / "in.onnx", TWO_CONVOLUTIONS, ["first"] * 4 + ["second"] * 2)
    optimize_onnx(source, tmp_path / "out.onnx", conv_batch_norm_fusion=True, module=["second"])
    assert {"first": Counter({"Conv": 1, "BatchNormalization": 1}), "second": Counter({"Conv": 1})} == operators(
        tmp_path / "out.onnx"
    )
    names = [tensor.name for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer]
    assert {"w1", "w3", "w4", "mean", "var"} < set(names)
    assert len(names) == len(set(names)) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"level": "full", "module": ["nobody"]}, "'nobody'"),
        ({"level": "full", "module": ["first"], "exclude": ["first"]}, "no node"),
        ({"module": ["first"]}, "selects modules"),
        ({"level": "full", "opset": 18, "exclude": ["first"]}, "converts the"),
        ({"group_query_attention_fusion": True, "module": ["first"]}, "reads the"),
    ],
)
def test_meaningless_selection_is_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    """A selector without a match, a selector without capabilities, and work that cannot be limited are refused."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 5)
    with pytest.raises(UsageError, match=message):
        optimize_onnx(source, tmp_path / "out.onnx", **flags)


def test_check_counts_by_module_and_writes_nothing(tmp_path: Path) -> None:
    """Some capabilities are counted by how often they fire, others by the removed nodes."""
    source = save(tmp_path / "in.onnx", TWO_GELUS, ["first"] * 5 + ["second"] * 5)
    check = check_optimization(source, gelu_fusion=True, constant_folding=True)
    found = {entry.name: (entry.count, entry.removed, dict(entry.modules)) for entry in check.capabilities}
    assert {
        "constant_folding": (None, 0, {}),
        "gelu_fusion": (2, None, {"/M/First": 1, "/M/Second": 1}),
    } == found
    assert (10, 2, ["in.onnx"]) == (check.nodes_before, check.nodes_after, [path.name for path in tmp_path.iterdir()])
    limited = check_optimization(source, gelu_fusion=True, module=["first"])
    assert [{"/M/First": 1}] == [dict(entry.modules) for entry in limited.capabilities]
    whole = check_optimization(source)
    assert any("level full" in note for note in whole.notes)
    assert "attention_fusion" in {entry.name for entry in whole.capabilities}


def test_check_names_module_and_axis_of_a_blocking_open_size(tmp_path: Path) -> None:
    """The sum broadcasts unless there is one row: the fused operator needs equal shapes."""
    source = save(tmp_path / "in.onnx", SKIPPED, ["pick", "sum", "norm"])
    (entry,) = check_optimization(source, skip_layer_norm_fusion=True).capabilities
    assert 0 == entry.count
    assert [("/M", 1, {"batch": ("x:0",)}, True)] == [
        (item.module, item.count, item.dimensions, item.only_at_one) for item in entry.blocked
    ]


def test_check_distinguishes_any_fixed_size_from_one_size(tmp_path: Path) -> None:
    """The dynamic sizes of two inputs have different names, but are equal once both are fixed, at any batch size."""
    source = save(tmp_path / "in.onnx", TWO_NAMES, ["sum", "norm"])
    (entry,) = check_optimization(source, skip_layer_norm_fusion=True).capabilities
    assert (0, [(1, False)]) == (entry.count, [(item.count, item.only_at_one) for item in entry.blocked])


def test_disabled_constant_folding_folds_nothing(tmp_path: Path) -> None:
    """Constants are folded neither by normalization nor by ONNX Runtime."""
    body = "m (float[2] x) => (float[2] y) <float[2] w1 = {1, 2}, float[2] w2 = {3, 4}>"
    body += " { c = Add (w1, w2) y = Mul (x, c) }"
    source = save(tmp_path / "in.onnx", body, ["first", "first"])
    for number, flags in enumerate(({}, {"level": "full"})):
        folded = optimize_onnx(source, tmp_path / f"folded{number}.onnx", **flags)
        kept = optimize_onnx(source, tmp_path / f"kept{number}.onnx", constant_folding=False, **flags)
        assert (1, 2) == (folded.after.nodes, kept.after.nodes)
    assert 2 == check_optimization(source, level="full", constant_folding=False).nodes_after
