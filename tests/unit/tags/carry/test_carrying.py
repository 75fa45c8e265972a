"""Transfer of tags after tools rewrite a graph, without invented tags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest

import graphs
from winml.modelkit.tags.carry.carrying import carry_tags
from winml.modelkit.tags.carry.original_graph import MOST_POSITIONS
from winml.modelkit.tags.tagging import NodeTag, all_nodes, clear_tag, measure_coverage, read_tag, write_tag

WEIGHTS = (
    f"<float[4, 4] w = {{{','.join('0' * 16)}}}, float[4] b = {{1,2,3,4}}, float[4, 4] w2 = {{{','.join('0' * 16)}}}>"
)
MLP = f"""agraph (float[2, 4] x) => (float[2, 4] z) {WEIGHTS} {{
    m = MatMul(x, w)
    a = Add(m, b)
    r = Relu(a)
    n = MatMul(r, w2)
    z = Add(n, x)
}}"""
"""The original: a first layer ``fc1``, its activation ``act``, a second layer ``fc2``, and an Add of the root."""
PLACES = ("fc1", "fc1", "act", "fc2", "")


def tag_of(module: str) -> NodeTag:
    """Return the tag of a module of the small hierarchy."""
    tags = {"": "/M", "fc1": "/M/Fc1", "act": "/M/Fc1/Act", "fc2": "/M/Fc2"}
    return NodeTag(tags[module], {"act": "fc1.act"}.get(module, module), "direct" if module else "root")


def original(text: str = MLP, places: tuple[str, ...] = PLACES) -> ir.Model:
    """Build the model before, tagged, with namespaces and torch's keys."""
    model = graphs.parse(text)
    for node, place in zip(all_nodes(model), places, strict=True):
        tag = tag_of(place)
        node.name = f"/{tag.module.replace('.', '/')}/{node.op_type}".replace("//", "/")
        write_tag(node, tag)
        levels = {"": "M", "fc1": "M/fc1: Fc1", "fc1.act": "M/fc1: Fc1/fc1.act: Act", "fc2": "M/fc2: Fc2"}
        node.metadata_props["namespace"] = levels[tag.module]
        node.metadata_props["pkg.torch.onnx.name_scopes"] = repr([tag.module, "x"])
    model.metadata_props["winml.model"] = "{}"
    return model


def rebuilt(text: str, names: dict[str, str]) -> ir.Model:
    """Build a model as a tool would write it: no metadata, nodes named by a table of output names."""
    text = text.replace("WEIGHTS", WEIGHTS)
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>\n{text}')
    for node in all_nodes(model):
        node.name = names.get(node.outputs[0].name or "", "")
    return model


def carried(after: ir.Model, before: ir.Model | None = None) -> dict[str, tuple[str, str]]:
    """Carry and return tag and source by first output."""
    report = carry_tags(before or original(), after)
    assert measure_coverage(after).is_complete
    assert report.nodes == report.tagged == sum(report.by_way.values())
    tags = {}
    for node in all_nodes(after):
        tag = read_tag(node)
        assert tag is not None
        tags[node.outputs[0].name or ""] = (tag.tag, tag.source)
    return tags


SAME = {"m": "/fc1/MatMul", "a": "/fc1/Add", "r": "/fc1/act/Relu", "n": "/fc2/MatMul", "z": "/Add"}


def test_carry_nodes_that_survived_get_all_their_keys_back() -> None:
    """A node of the same name, operator and value is the same node: tag, namespace and torch's keys return."""
    before, after = original(), rebuilt(MLP, SAME)
    report = carry_tags(before, after)
    assert {"name": 5} == report.by_way
    for old, new in zip(all_nodes(before), all_nodes(after), strict=True):
        assert old.metadata_props == new.metadata_props
    assert "{}" == after.metadata_props["winml.model"]


def test_carry_preserved_tags_stay_and_their_other_keys_are_repaired() -> None:
    """A tag left by the tool is kept; an outdated depth, module or namespace is replaced."""
    before, after = original(), original()
    node = after.graph.node(0)
    node.metadata_props.update(
        {"winml.hierarchy.depth": "9", "winml.hierarchy.module": "old", "namespace": "old", "mine": "1"}
    )
    assert {"kept": 5} == carry_tags(before, after).by_way
    assert {**before.graph.node(0).metadata_props, "mine": "1"} == node.metadata_props


def test_carry_tag_of_another_model_is_replaced() -> None:
    """A tag no module of the model before has is found anew."""
    after = original()
    write_tag(after.graph.node(2), NodeTag("/Other/Thing", "thing", "direct"))
    assert ("/M/Fc1/Act", "direct") == carried(after)["r"]


def test_carry_fused_node_gets_the_common_module_of_the_replaced_nodes() -> None:
    """A node between two values replaced all nodes between the values, and lists their modules."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[2, 4] z) WEIGHTS {
            r = com.microsoft.FusedGemm(x, w, b)
            n = MatMul(r, w2)
            z = Add(n, x)
        }""",
        {**SAME, "r": "fused_1"},
    )
    assert {"r": ("/M/Fc1", "merged"), "n": ("/M/Fc2", "direct"), "z": ("/M", "root")} == carried(after)
    fused = after.graph.node(0)
    assert ["fc1", "fc1.act"] == json.loads(fused.metadata_props["winml.hierarchy.modules"])
    assert "M/fc1: Fc1" == fused.metadata_props["namespace"]
    assert "pkg.torch.onnx.name_scopes" not in fused.metadata_props


def test_carry_shared_output_alone_shows_no_kinship() -> None:
    """A node between two original values is matched; a node that shares only the last value is not."""
    text = "agraph (float[2, 4] x) => (float[2, 4] z) { {} = Exp(x)  z = Tanh({}) }"
    kin, stranger = (rebuilt(text.replace("{}", name), {}) for name in ("r", "q"))
    assert (1, 0) == (carry_tags(original(), kin).matched, carry_tags(original(), stranger).matched)


def test_carry_node_with_a_foreign_value_replaces_two_nodes() -> None:
    """A node with the name of one original and the value of another replaced two nodes."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[2, 4] z) WEIGHTS {
            m = MatMul(x, w)
            r = Add(m, b)
            n = MatMul(r, w2)
            z = Add(n, x)
        }""",
        {**SAME, "r": "/fc1/Add"},
    )
    assert ("/M/Fc1", "merged") == carried(after)["r"]


def test_carry_fused_name_identifies_the_source_of_an_unknown_value() -> None:
    """ONNX Runtime names a fused node after its source; helpers beside it stand for the same nodes."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[2, 4] z) <float[4, 4] w_t, float[4] b_c, float[4, 4] w2, int64[2] s> {
            i = Reshape(x, s)
            g = Gemm(i, w_t, b_c)
            a = Reshape(g, s)
            r = Relu(a)
            n = MatMul(r, w2)
            z = Add(n, x)
        }""",
        {**SAME, "a": "gemm_output_reshape", "i": "gemm_input_reshape", "g": "/fc1/MatMul/MatMulAddFusion"},
    )
    tags = carried(after)
    assert {"/M/Fc1"} == {tags[name][0] for name in "iga"}
    assert ("/M/Fc1/Act", "direct") == tags["r"]


@pytest.mark.parametrize("name", ["/fc1/MatMul_1", "MatMul_token_3", "/fc1/MatMul_token_3"])
def test_carry_name_with_a_numeric_suffix_is_no_fused_name(name: str) -> None:
    """``MatMul_1`` is not made of ``MatMul``."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[2, 4] q) <float[4, 4] v> {
            q = MatMul(x, v)
        }""",
        {"q": name},
    )
    assert ("/M", "root") == carried(after)["q"]


def test_carry_weight_identifies_the_replaced_node() -> None:
    """A node between new values belongs to the module of the weight that it reads."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[2, 4] z) WEIGHTS {
            p = MatMul(x, w)
            q = Add(p, b)
            s = Relu(q)
            t = MatMul(s, w2)
            z = Add(t, x)
        }""",
        {},
    )
    tags = carried(after)
    assert {"p": "/M/Fc1", "q": "/M/Fc1", "t": "/M/Fc2", "z": "/M"} == {name: tags[name][0] for name in "pqtz"}


def test_carry_weight_identifies_its_module_in_a_graph_without_equal_values() -> None:
    """Also behind more modules than a node lists: a tool renamed every value of a deep network."""
    layers = MOST_POSITIONS + 6
    weights = ", ".join(f"float[2, 2] w{number} = {{0,0,0,0}}" for number in range(layers))

    def network(operator: str, value: str) -> str:
        names = ["x", *(f"{value}{number}" for number in range(layers - 1)), "z"]
        body = "\n".join(f"{names[n + 1]} = {operator}({names[n]}, w{n})" for n in range(layers))
        return f"agraph (float[2, 2] x) => (float[2, 2] z) <{weights}> {{\n{body}\n}}"

    before = graphs.parse(network("MatMul", "v"))
    for number, node in enumerate(all_nodes(before)):
        write_tag(node, NodeTag(f"/M/Layer.{number}", f"layer.{number}", "direct"))
    after = rebuilt(network("com.microsoft.FusedMatMul", "u"), {})
    assert [f"/M/Layer.{number}" for number in range(layers)] == [tag for tag, _ in carried(after, before).values()]


def test_carry_new_node_inherits_from_its_readers() -> None:
    """Inserted casts belong to the node that reads them, else to the preceding node."""
    after = rebuilt(
        """agraph (float[2, 4] x) => (float16[2, 4] y) WEIGHTS {
            m = MatMul(x, w)
            a = Add(m, b)
            c = Cast <to = 10> (a)
            d = Cast <to = 1> (c)
            r = Relu(d)
            n = MatMul(r, w2)
            z = Add(n, x)
            y = Cast <to = 10> (z)
        }""",
        SAME,
    )
    tags = carried(after)
    assert ("/M/Fc1/Act", "inherited") == tags["c"] == tags["d"]
    assert ("/M", "inherited") == tags["y"]


def test_carry_constants_computed_ahead_do_not_pull_a_node_to_the_root() -> None:
    """Constants computed in advance from shapes do not tell where the work is done."""
    before = original(
        """agraph (float[2, 4] x) => (float[8] z) {
            s = Shape(x)
            p = ReduceProd <keepdims = 1> (s)
            r = Reshape(x, p)
            z = Relu(r)
        }""",
        ("", "", "fc1", "act"),
    )
    after = rebuilt(
        """agraph (float[2, 4] x) => (float[8] z) <int64[1] k = {8}> {
            z = com.microsoft.Fused(x, k)
        }""",
        {},
    )
    assert {"z": ("/M/Fc1", "merged")} == carried(after, before)


def test_carry_merged_identical_nodes_keep_the_tag_of_the_remaining_node() -> None:
    """A node with an input from another module is still the same node."""
    after = rebuilt(MLP, {**SAME, "m": ""})
    assert ("/M/Fc1", "direct") == carried(after)["m"]


def test_carry_untagged_model_has_no_tags() -> None:
    """A model without tags gives a result without tags, and the report says so."""
    before, after = original(), rebuilt(MLP, SAME)
    for node in all_nodes(before):
        clear_tag(node)
    report = carry_tags(before, after)
    assert not report.is_known
    assert (5, 0) == (report.nodes, report.tagged)
    assert 0 == measure_coverage(after).tagged
    assert "no tags" in report.notes[0]


def test_carry_unrelated_graph_ends_at_the_root_with_a_note() -> None:
    """Nodes with no match belong to the root, and a note counts them."""
    after = rebuilt("agraph (float[2] u) => (float[2] v) { v = Relu(u) }", {})
    report = carry_tags(original(), after)
    assert {"root": 1} == report.by_way
    assert "1 node(s)" in report.notes[0]


IF = """agraph (float[2] x, bool c) => (float[2] z) {
    y = If (c) <
        then_branch = g () => (float[2] p) { u = Relu(x)  p = Neg(u) },
        else_branch = h () => (float[2] q) { q = Abs(x) }
    >
    z = Exp(y)
}"""
IF_PLACES = ("fc1", "act", "fc2", "fc2", "")


def test_carry_reaches_subgraphs() -> None:
    """Nodes of branches are matched too, and a new node in a branch belongs to its neighbours."""
    before = original(IF, IF_PLACES)
    after = rebuilt(IF, {name: node.name or "" for node in all_nodes(before) for name in [str(node.outputs[0].name)]})
    tags = {name: tag for name, (tag, _) in carried(after, before).items()}
    assert {"y": "/M/Fc1", "u": "/M/Fc1/Act", "p": "/M/Fc2", "q": "/M/Fc2", "z": "/M"} == tags


def test_carry_flattened_branch_keeps_the_tags_of_its_nodes() -> None:
    """A branch node that now makes the output of the ``If`` is still the same node."""
    before = original(IF, IF_PLACES)
    after = rebuilt(
        "agraph (float[2] x, bool c) => (float[2] z) { u = Relu(x)  y = Neg(u)  z = Exp(y) }",
        {"u": "/fc1/act/Relu", "y": "/fc2/Neg", "z": "/Exp"},
    )
    assert {"u": "/M/Fc1/Act", "y": "/M/Fc2", "z": "/M"} == {
        name: tag for name, (tag, _) in carried(after, before).items()
    }


CALL = """agraph (float[2] x) => (float[2] z) {
    y = mine.Block(x)
    z = Exp(y)
}
<domain: "mine", opset_import: ["" : 17]>
Block (v) => (s) { t = Relu(v)  s = Neg(t) }"""
WITH_DOMAIN = '<ir_version: 10, opset_import: ["" : 17, "mine" : 1]>\n'


def called(places: tuple[str, ...] = ("fc1", "", "act", "fc1")) -> ir.Model:
    """Build a model that calls a function, tagged."""
    model = ir.from_onnx_text(WITH_DOMAIN + CALL)
    for node, place in zip(all_nodes(model), places, strict=True):
        node.name = f"/{place}/{node.op_type}"
        write_tag(node, tag_of(place))
    return model


def test_carry_reaches_functions() -> None:
    """Nodes of a function are matched within the function; unknown nodes get the tag of the call."""
    after = ir.from_onnx_text(WITH_DOMAIN + CALL.replace("t = Relu(v)", "o = Abs(v)  t = Relu(o)"))
    tags = carried(after, called())
    assert {"y": "/M/Fc1", "z": "/M", "t": "/M/Fc1/Act", "s": "/M/Fc1"} == {name: tags[name][0] for name in "yzts"}
    assert ("/M/Fc1/Act", "inherited") == tags["o"]


def test_carry_inlined_function_belongs_to_its_call() -> None:
    """Nodes that replaced a call have the tag of the call."""
    after = rebuilt("agraph (float[2] x) => (float[2] z) { k = Relu(x)  y = Neg(k)  z = Exp(y) }", {})
    assert {"k": "/M/Fc1", "y": "/M/Fc1", "z": "/M"} == {n: t for n, (t, _) in carried(after, called()).items()}


def test_carry_new_function_belongs_to_its_callers() -> None:
    """Nodes moved into a new function belong to the module of its call."""
    after = ir.from_onnx_text(
        WITH_DOMAIN
        + """agraph (float[2] x) => (float[2] r) { r = mine.New(x) }
        <domain: "mine", opset_import: ["" : 17]>
        New (v) => (s) { t = Sin(v)  s = Cos(t) }"""
    )
    tags = carried(after)
    assert ("/M/Fc1", "merged") == tags["r"]
    assert "/M/Fc1" == tags["s"][0] == tags["t"][0]


def test_carry_twice_has_no_further_effect() -> None:
    """Transferred tags and the list of modules are kept in the second transfer."""
    before, after = original(), rebuilt(MLP.replace("r = Relu(a)", "r = Elu(a)"), {})
    carry_tags(before, after)
    first = [dict(node.metadata_props) for node in all_nodes(after)]
    assert {"kept": 5} == carry_tags(before, after).by_way
    assert first == [node.metadata_props for node in all_nodes(after)]


def damaged_tree(model: ir.Model) -> None:
    """Write a tree that cannot be read."""
    model.metadata_props["winml.hierarchy.tree"] = '[{"tag": "no tag", "path": 1}]'


def half_tagged(model: ir.Model) -> None:
    """Remove the tag of one node."""
    clear_tag(model.graph.node(1))


@pytest.mark.parametrize("damage", [damaged_tree, half_tagged])
def test_carry_from_a_damaged_original_still_covers_every_node(damage: Callable[[ir.Model], None]) -> None:
    """Missing tags of the original are inferred from its other nodes."""
    before = original()
    damage(before)
    tags = carried(rebuilt(MLP, {name: node for name, node in SAME.items() if name != "a"}), before)
    assert ("/M/Fc1/Act", "direct") == tags["r"]


KERNEL = ",".join(["0.5"] * 16 * 16)
CONVOLUTIONS = f"""agraph (float[1, 16, 6, 6] x) => (float[1, 16, 6, 6] z)
<float[16, 16, 1, 1] w = {{{KERNEL}}}, float[16] b = {{{",".join("0" * 16)}}}, float[16, 16, 1, 1] w2 = {{{KERNEL}}},
float root = {{1.4142135}}, float one = {{1}}, float half = {{0.5}}> {{
    c = Conv(x, w, b)
    s = Div(c, root)
    e = Erf(s)
    o = Add(e, one)
    p = Mul(c, o)
    g = Mul(p, half)
    d = Conv(g, w2, b)
    r = Relu(d)
    z = Exp(r)
}}"""
"""Convolution, GELU, convolution with a ReLU of the root, and the root's own end."""
CONVOLUTION_PLACES = ("fc1", *["act"] * 5, "fc2", "", "")


def test_carry_blocked_layout_names_the_value_a_node_makes() -> None:
    """ONNX Runtime names a node in blocked layout after the value it stands for: an anchor like the value itself."""
    after = rebuilt(
        """agraph (float[1, 16, 6, 6] x) => (float[1, 16, 6, 6] z)
        <float[16, 16, 1, 1] v, float[16] b, float[16, 16, 1, 1] v2> {
            i = com.microsoft.nchwc.ReorderInput(x)
            k = com.microsoft.nchwc.Conv(i, v, b)
            h = com.microsoft.Gelu(k)
            l = com.microsoft.nchwc.Conv(h, v2, b)
            r = com.microsoft.nchwc.ReorderOutput(l)
            z = Exp(r)
        }""",
        {"i": "ReorderInput", "k": "c_nchwc", "h": "Gelu", "l": "r_nchwc", "r": "ReorderOutput", "z": "/Exp"},
    )
    tags = carried(after, original(CONVOLUTIONS, CONVOLUTION_PLACES))
    assert {"i": "/M/Fc1", "k": "/M/Fc1", "h": "/M/Fc1/Act", "l": "/M/Fc2", "r": "/M", "z": "/M"} == {
        name: tag for name, (tag, _) in tags.items()
    }
    assert ("direct", "merged", "merged") == tuple(tags[name][1] for name in "khl")
    swallowed = next(node for node in all_nodes(after) if node.name == "r_nchwc")
    assert ["", "fc2"] == json.loads(swallowed.metadata_props["winml.hierarchy.modules"])


def test_carry_convolutions_in_the_layout_of_this_machine(tmp_path: Path) -> None:
    """An activation alone between convolutions keeps its module in every layout of ONNX Runtime for this processor."""
    before = original(CONVOLUTIONS, CONVOLUTION_PLACES)
    for node in all_nodes(before):
        node.name = f"{node.name}_{node.outputs[0].name}"
    ir.save(before, tmp_path / "before.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "after.onnx")
    onnxruntime.InferenceSession(tmp_path / "before.onnx", options, providers=["CPUExecutionProvider"])
    after = ir.load(tmp_path / "after.onnx")
    carried(after, before)
    tags = [(node, tag.tag) for node in all_nodes(after) if (tag := read_tag(node)) is not None]
    convolutions = [tag for node, tag in tags if node.op_type in ("Conv", "FusedConv")]
    assert ["/M/Fc1/Act"] == [tag for node, tag in tags if node.op_type == "Gelu"]
    assert "/M/Fc1" == convolutions[0]
    # One, or where the activation is computed in the common layout, one before each convolution.
    reordered = [tag for node, tag in tags if node.op_type == "ReorderInput"]
    assert convolutions[: len(reordered)] == reordered
