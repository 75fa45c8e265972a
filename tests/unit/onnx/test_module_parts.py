"""Finding the nodes of a module and dividing them into its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.metadata_keys import TREE_KEY
from winml.modelkit.onnx.cutting import Cut, ModuleCall, ModuleParts, Refusal
from winml.modelkit.tags.tagging import NodeTag, clear_tag, write_tag

WEIGHTS = "{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}"
"""A constant of more elements than an operand may have."""


def _tagged_model(text: str, tags: Mapping[str, str], calls: Mapping[str, int] | None = None) -> ir.Model:
    """Return a model of nodes with tags, by output name; other nodes belong to the root.

    Args:
        text: The graph.
        tags: Value → tag below ``/M``.
        calls: Number of calls by tag below ``/M``, as in the metadata.
    """
    model = parse(text)
    for node in model.graph.all_nodes():
        clear_tag(node)
        tag = f"/M{tags.get(str(node.outputs[0].name), '')}"
        write_tag(node, NodeTag(tag, tag[3:].replace("/", "."), "direct"))
    if calls is not None:
        model.metadata_props[TREE_KEY] = json.dumps(
            [{"tag": f"/M{tag}", "calls": number} for tag, number in {"": 1, **calls}.items()]
        )
    return model


def _output_names(call: ModuleCall) -> list[str | None]:
    assert isinstance(call.result, Cut), call.result
    return [node.outputs[0].name for node in call.result.nodes]


def _values_by_call(model: ir.Model, tag: str) -> list[list[str | None]]:
    return [_output_names(call) for call in ModuleParts(model).cut(tag)]


def _refusal_reason(model: ir.Model, tag: str) -> str:
    (call,) = ModuleParts(model).cut(tag)
    assert isinstance(call.result, Refusal)
    return call.result.reason


NESTED = """
g (float[20] x) => (float[20] e)
{ a = Neg(x) \n b = Exp(a) \n c = Relu(b) \n d = Sin(c) \n e = Cos(d) }
"""


def test_module_is_cut_with_its_descendants() -> None:
    """The nodes of inner modules belong to the outer module as well."""
    model = _tagged_model(NESTED, {"b": "/A", "c": "/A/B", "d": "/A"})
    assert [["b", "c", "d"]] == _values_by_call(model, "/M/A")
    assert [["c"]] == _values_by_call(model, "/M/A/B")
    assert [["a", "b", "c", "d", "e"]] == _values_by_call(model, "/M")


def test_module_with_a_common_name_prefix_is_another_module() -> None:
    """``/M/A.1`` does not include ``/M/A.10``."""
    assert [["b"]] == _values_by_call(_tagged_model(NESTED, {"b": "/A.1", "c": "/A.10"}), "/M/A.1")


def test_module_without_nodes_has_no_calls() -> None:
    """A module without nodes in the graph has no calls."""
    assert [] == _values_by_call(_tagged_model(NESTED, {"b": "/A"}), "/M/B")


CHAINED = f"""
g (float[20] x) => (float[20] y)
<float[20] w = {WEIGHTS}, float one = {{1}}, float uno = {{1}}>
{{ a = Mul(x, w) \n b = Add(a, one) \n c = Mul(b, w) \n d = Add(c, uno) \n e = Mul(d, w) \n y = Add(e, one) }}
"""
LAYER = dict.fromkeys("abcdey", "/L")


@pytest.mark.parametrize("calls", [{"/L": 3}, None])
def test_module_called_in_a_chain_is_cut_once_per_call(calls: Mapping[str, int] | None) -> None:
    """Successive calls with no node between are divided by the weights common to all, with or without the number
    of calls in the metadata; small constants that an exporter repeated for each call do not count.
    """
    model = _tagged_model(CHAINED, LAYER, calls)
    assert [["a", "b"], ["c", "d"], ["e", "y"]] == _values_by_call(model, "/M/L")
    assert [(1, 3), (2, 3), (3, 3)] == [(call.call, call.calls) for call in ModuleParts(model).cut("/M/L")]


def test_module_called_once_is_one_cut_despite_loops() -> None:
    """A loop inside one call reads its weights in every iteration, and is still one call."""
    assert [["a", "b", "c", "d", "e", "y"]] == _values_by_call(_tagged_model(CHAINED, LAYER, {"/L": 1}), "/M/L")


BETWEEN = f"""
g (float[20] x) => (float[20] d)
<float[20] w = {WEIGHTS}>
{{ a = Mul(x, w) \n b = Relu(a) \n r = Exp(b) \n c = Mul(r, w) \n d = Sin(c) }}
"""


def test_interrupted_calls_are_divided_at_the_nodes_between() -> None:
    """Calls with different operators are divided at the nodes between them."""
    model = _tagged_model(BETWEEN, {"a": "/L", "b": "/L", "c": "/L"}, {"/L": 2})
    assert [["a", "b"], ["c"]] == _values_by_call(model, "/M/L")


def test_interleaved_calls_are_divided_by_connections() -> None:
    """Interleaved calls are divided by the values that connect their nodes."""
    model = _tagged_model(
        f"""
        g (float[20] x, float[20] y) => (float[20] e)
        <float[20] w = {WEIGHTS}>
        {{ a = Mul(x, w) \n b = Mul(y, w) \n c = Relu(b) \n d = Sin(a) \n e = Add(c, d) }}
        """,
        dict.fromkeys("abcd", "/L"),
        {"/L": 2},
    )
    assert [["a", "d"], ["b", "c"]] == _values_by_call(model, "/M/L")


def test_module_with_inseparable_calls_is_refused() -> None:
    """A guessed division would give a part that was never called."""
    model = _tagged_model(BETWEEN, dict.fromkeys("abrc", "/L"), {"/L": 2})
    assert "2 times" in _refusal_reason(model, "/M/L")


def test_module_parts_with_other_weights_are_not_two_calls() -> None:
    """Parts with different weights are not two calls of the module."""
    text = BETWEEN.replace("<float[20] w", f"<float[20] v = {WEIGHTS}, float[20] w").replace("Mul(r, w)", "Mul(r, v)")
    model = _tagged_model(text, dict.fromkeys("abc", "/L"), {"/L": 2})
    assert "2 times" in _refusal_reason(model, "/M/L")


def test_module_calling_a_shared_module_includes_its_nodes() -> None:
    """A module that is registered elsewhere and called here is part of the call it stands in."""
    tags = {"a": "/A", "b": "/F", "c": "/A", "d": "/F"}
    assert [["a", "b", "c"]] == _values_by_call(_tagged_model(NESTED, tags, {"/A": 1, "/F": 2}), "/M/A")
    assert "(Exp)" in _refusal_reason(_tagged_model(NESTED, tags, {"/A": 1, "/F": 1}), "/M/A")


IF = """
g (float[2] x, bool p) => (float[2] c)
{
    a = Neg(x)
    b = If (p) < then_branch = t () => (float[2] u) { u = Exp(a) }, else_branch = f () => (float[2] v) { v = Sin(a) } >
    c = Relu(b)
}
"""


def test_module_around_an_if_is_cut_with_its_branches() -> None:
    """Nodes in branches of a module's node belong to the cut."""
    assert [["b", "c"]] == _values_by_call(_tagged_model(IF, {"b": "/A", "u": "/A/B", "v": "/A", "c": "/A"}), "/M/A")


def test_module_inside_an_if_of_another_is_refused() -> None:
    """Values inside a branch cannot be recorded; the node it runs in is named."""
    model = _tagged_model(IF, {"b": "/A", "u": "/A/B", "v": "/A", "c": "/A"})
    assert "/if/If_1" in _refusal_reason(model, "/M/A/B")


def test_module_that_also_runs_inside_an_if_of_another_is_refused() -> None:
    """A cut with the nodes outside of the branch alone would be half of the module."""
    assert "/if/If_1" in _refusal_reason(_tagged_model(IF, {"a": "/B", "u": "/B"}), "/M/B")


def test_module_inside_a_function_is_refused() -> None:
    """The body of a function has no position in the graph."""
    model = parse(
        "g (float[2] x) => (float[2] b) { a = local.Twice(x) \n b = Neg(a) }",
        domains=', "local" : 1',
        functions='<domain: "local", opset_import: ["" : 17]> Twice (i) => (o) { o = Add(i, i) }',
    )
    assert "a function" in _refusal_reason(model, "/M/Add")


def test_damaged_record_of_calls_is_ignored() -> None:
    """An unreadable tree says nothing about calls."""
    model = _tagged_model(CHAINED, LAYER)
    model.metadata_props[TREE_KEY] = '[{"tag": '
    assert 3 == len(ModuleParts(model).cut("/M/L"))
