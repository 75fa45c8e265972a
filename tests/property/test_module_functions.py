"""Conversion of modules to functions and back by inlining, for random tags."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from hypothesis import event, given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import InlinePass

from graphs import run_onnx
from property.test_cutting import SHAPE, TAGS, tagged_models
from winml.modelkit.metadata_keys import FUNCTIONS_KEY, TREE_KEY
from winml.modelkit.onnx.function_folding import FoldedModel, Sharing, fold_modules
from winml.modelkit.onnx.function_inlining import inline_module_functions
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.tagging import read_tag

CLASSES = {"/M": "M", "/M/A": "Block", "/M/A/B": "B", "/M/C": "Block"}
MODULES = [ModuleAddress(tag[3:].replace("/", "."), tag, CLASSES[tag]) for tag in TAGS]

_calls = st.sampled_from([None, 1, 2])
_sharing = st.sampled_from(["none", "class"])


def _folded(model: ir.Model, calls: int | None, sharing: Sharing) -> FoldedModel:
    if calls is not None:
        records = [{"tag": tag, "calls": 1 if tag == "/M" else calls} for tag in TAGS]
        model.metadata_props[TREE_KEY] = json.dumps(records)
    folded = fold_modules(model, MODULES, sharing)
    shared = sum(count > 1 for count in folded.functions.values())
    event(f"{len(folded.functions)} functions, {shared} of them shared, {len(folded.plan.left_out)} modules left out")
    return folded


@settings(max_examples=60)
@given(tagged_models(), _calls, _sharing)
def test_inlining_functions_gives_the_same_file_back(model: ir.Model, calls: int | None, sharing: Sharing) -> None:
    """The file is equal byte by byte: names, tags, shapes and order included."""
    folded = _folded(model, calls, sharing)
    before = ir.to_proto(model)
    written = onnx.ModelProto.FromString(ir.to_proto(folded.model).SerializeToString())
    assert len(written.functions) == inline_module_functions(written)
    assert before.SerializeToString(deterministic=True) == written.SerializeToString(deterministic=True)


@settings(max_examples=30)
@given(tagged_models(), _calls, _sharing)
def test_functions_equal_the_graph_and_are_valid(model: ir.Model, calls: int | None, sharing: Sharing) -> None:
    """ONNX Runtime runs the functions with equal outputs, and onnx finds no fault in them."""
    folded = ir.to_proto(_folded(model, calls, sharing).model)
    onnx.checker.check_model(folded, full_check=True)
    generator = np.random.default_rng(0)
    feeds = {str(value.name): generator.standard_normal(SHAPE).astype(np.float32) for value in model.graph.inputs[:2]}
    feeds["p"] = np.array(True)
    expected = run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)
    actual = run_onnx(folded.SerializeToString(), feeds, optimize=False)
    assert list(expected) == list(actual)
    assert all(np.array_equal(expected[name], actual[name], equal_nan=True) for name in expected)


@settings(max_examples=20)
@given(tagged_models())
def test_other_inliners_keep_operators_and_tags(model: ir.Model) -> None:
    """The inliners of onnx and onnx_ir restore the nodes with their tags, for modules that share no nodes."""
    folded = _folded(model, 1, "none")
    expected = sorted((node.op_type, tag.tag) for node in model.graph if (tag := read_tag(node)))
    inlined = folded.model.clone()
    InlinePass()(inlined)
    proto = onnx.inliner.inline_local_functions(ir.to_proto(folded.model))
    for graph in (inlined.graph, ir.from_proto(proto).graph):
        actual = sorted((node.op_type, tag.tag) for node in graph if (tag := read_tag(node)))
        assert expected == actual


@settings(max_examples=20)
@given(tagged_models(), _sharing)
def test_record_of_another_graph_is_not_used(model: ir.Model, sharing: Sharing) -> None:
    """A function that another tool changed is inlined as it is, and the graph stays valid."""
    folded = ir.to_proto(_folded(model, 1, sharing).model)
    for function in folded.functions:
        for node in function.node:
            if node.op_type == "Relu":
                node.op_type = "Tanh"
    inline_module_functions(folded)
    onnx.checker.check_model(folded, full_check=True)
    assert FUNCTIONS_KEY not in {entry.key for entry in folded.metadata_props} or not folded.functions
