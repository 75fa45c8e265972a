"""``winml diff``: changes by module, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from winml.modelkit import diff_models
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The first of both files."""
    return saved(build(), tmp_path / "before.onnx")


def build(change: Callable[[ir.Model], None] = lambda _: None) -> ir.Model:
    """Return a graph of two layers in modules ``first`` and ``second``, after a change."""
    generator = np.random.default_rng(0)
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2, 40])
    weights = {
        name: ir.val(name, const_value=ir.tensor(generator.standard_normal(shape).astype(np.float32), name=name))
        for name, shape in (("w_1", (40, 40)), ("b_1", (40,)), ("w_2", (40, 40)))
    }
    nodes = []
    value = x
    for operator, extra, tag, attributes in (
        ("MatMul", "w_1", "/M/First", {}),
        ("Add", "b_1", "/M/First", {}),
        ("Relu", "", "/M/First", {}),
        ("MatMul", "w_2", "/M/Second", {}),
        ("LeakyRelu", "", "/M/Second", {"alpha": 0.1}),
    ):
        inputs = [value, weights[extra]] if extra else [value]
        node = ir.node(operator, inputs, attributes=attributes, name=f"{tag}/{operator}_{len(nodes)}")
        write_tag(node, NodeTag(tag, tag.rpartition("/")[2].lower(), "direct"))
        nodes.append(node)
        value = node.outputs[0]
        value.name = f"v{len(nodes)}"
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([2, 40])
    graph = ir.Graph([x], [value], nodes=nodes, initializers=list(weights.values()), opset_imports={"": 17}, name="m")
    model = ir.Model(graph, ir_version=10)
    change(model)
    return model


def saved(model: ir.Model, path: Path, **options: object) -> Path:
    """Write a model and return its path."""
    ir.save(model, path, **options)  # type: ignore[arg-type]
    return path


def change_weight(model: ir.Model) -> None:
    """Change one number of the second layer's weight."""
    array = model.graph.initializers["w_2"].const_value.numpy().copy()  # type: ignore[union-attr]
    array[17, 3] += 1e-6
    model.graph.initializers["w_2"].const_value = ir.tensor(array, name="w_2")


def change_attribute(model: ir.Model) -> None:
    """Give LeakyRelu another slope."""
    list(model.graph)[-1].attributes["alpha"] = ir.AttrFloat32("alpha", 0.2)


def spell_default(model: ir.Model) -> None:
    """Remove the attribute: LeakyRelu then has the default slope."""
    del list(model.graph)[-1].attributes["alpha"]


def rename_weight(model: ir.Model) -> None:
    """Rename the second layer's weight."""
    value = model.graph.initializers.pop("w_2")
    value.name = "other"
    model.graph.register_initializer(value)


def rename_module(model: ir.Model) -> None:
    """Rename the second module."""
    for node in model.graph:
        tag = read_tag(node)
        assert tag is not None
        if tag.tag == "/M/Second":
            write_tag(node, NodeTag("/M/Third", "third", "direct"))


def half(model: ir.Model) -> None:
    """Store the second layer's weight in half precision, with a Cast."""
    value = model.graph.initializers["w_2"]
    reader = next(iter(value.uses())).node
    stored = ir.val("w_2_half", const_value=ir.tensor(value.const_value.numpy().astype(np.float16), name="w_2_half"))  # type: ignore[union-attr]
    cast = ir.node("Cast", [stored], attributes={"to": 1}, name="/M/Second/Cast")
    write_tag(cast, NodeTag("/M/Second", "second", "inherited"))
    cast.outputs[0].name = "w_2_cast"
    reader.replace_input_with(1, cast.outputs[0])
    del model.graph.initializers["w_2"]
    model.graph.register_initializer(stored)
    model.graph.insert_before(reader, cast)


def test_files_of_the_same_model_are_the_same(before: Path, tmp_path: Path) -> None:
    """The location and order of the weights make no difference."""
    outside = saved(build(), tmp_path / "outside.onnx", external_data="outside.data", size_threshold_bytes=0)

    diff = diff_models(before, outside)

    assert diff.is_same
    assert diff.same_modules == 3


@pytest.mark.parametrize("outside", [False, True])
def test_changed_weight_is_detected_by_content(before: Path, tmp_path: Path, *, outside: bool) -> None:
    """A change of one number is reported as a change of the weight and the module, wherever the weight is stored.

    No value is shown.
    """
    options = {"external_data": "after.data", "size_threshold_bytes": 0} if outside else {}
    diff = diff_models(before, saved(build(change_weight), tmp_path / "after.onnx", **options))

    (module,) = diff.modules
    assert (module.status, module.module, module.tag) == ("changed", "second", "/M/Second")
    assert [(weight.name, weight.status) for weight in module.weights] == [("w_2", "changed")]
    assert not module.operators
    assert module.weights[0].as_record() == {
        "name": "w_2", "status": "changed", "before": "float32[40, 40]", "after": "float32[40, 40]",
        "renamed_from": None,
    }  # fmt: skip


def test_changed_attribute_is_counted_and_a_written_default_is_not(before: Path, tmp_path: Path) -> None:
    """An attribute is compared by its value, whether it is written or a default."""
    diff = diff_models(before, saved(build(change_attribute), tmp_path / "after.onnx"))
    assert [(module.tag, module.attributes_changed) for module in diff.modules] == [("/M/Second", 1)]

    def write_out(model: ir.Model) -> None:
        list(model.graph)[-1].attributes["alpha"] = ir.AttrFloat32("alpha", 0.01)

    left_out, written = tmp_path / "default.onnx", tmp_path / "written.onnx"
    diff = diff_models(saved(build(spell_default), left_out), saved(build(write_out), written))
    assert not diff.modules
    assert not diff.is_rewired


def test_renamed_weights_and_modules_are_matched(before: Path, tmp_path: Path) -> None:
    """A renamed weight or module has no other change."""
    diff = diff_models(before, saved(build(rename_weight), tmp_path / "weight.onnx"))
    assert [(item.name, item.status, item.renamed_from) for item in diff.modules[0].weights] == [
        ("other", "renamed", "w_2")
    ]

    diff = diff_models(before, saved(build(rename_module), tmp_path / "module.onnx"))
    assert [(module.status, module.renamed_from, module.tag) for module in diff.modules] == [
        ("renamed", "/M/Second", "/M/Third")
    ]


def test_types_operators_and_interface_are_compared(before: Path, tmp_path: Path) -> None:
    """A weight of another type changes the operators, the types and the bytes of its module."""
    (module,) = diff_models(before, saved(build(half), tmp_path / "half.onnx")).modules
    assert [(item.status, item.renamed_from, item.before, item.after) for item in module.weights] == [
        ("changed", "w_2", "float32[40, 40]", "float16[40, 40]")
    ]
    assert dict(module.operators) == {"Cast": (0, 1)}
    assert dict(module.dtypes) == {"float32": (6400, 0), "float16": (0, 3200)}
    assert module.size_bytes == (6400, 3200)

    def open_batch(model: ir.Model) -> None:
        model.graph.inputs[0].shape = ir.Shape(["batch", 40])

    diff = diff_models(before, saved(build(open_batch), tmp_path / "open.onnx"))
    (change,) = diff.interface
    assert re.search(r"\bx\b.*float\[2, 40\].*float\[batch, 40\]", change)


def test_command_compares_for_people_programs_and_comments(before: Path, tmp_path: Path) -> None:
    """Exit code 3 means a difference; 0 means no difference, or ``--exit-zero``."""
    after = saved(build(change_weight), tmp_path / "after.onnx")

    table = run_here("diff", before, after)
    assert table.code == 3
    assert "/M/Second" in table.out
    assert run_here("diff", before, before).code == 0

    answer = run_here("diff", before, after, "--format", "json", "--exit-zero", "-o", tmp_path / "changes.md")
    assert answer.code == 0
    record = json.loads(answer.out)
    assert record["schema_version"] == 1
    assert [module["tag"] for module in record["modules"]] == ["/M/Second"]
    assert "| changed | `/M/Second` |" in (tmp_path / "changes.md").read_text()


def test_missing_data_and_invalid_files_are_refused(before: Path, tmp_path: Path) -> None:
    """A file that cannot be read is an error, not a difference."""
    outside = saved(build(), tmp_path / "outside.onnx", external_data="outside.data", size_threshold_bytes=0)
    (tmp_path / "outside.data").unlink()
    assert run_here("diff", before, outside).code == 1
    assert run_here("diff", before, tmp_path / "none.onnx").code == 2
    (tmp_path / "text.onnx").write_text("no model")
    assert run_here("diff", before, tmp_path / "text.onnx").code == 1


def test_graph_without_modules_is_compared_as_a_whole(before: Path, tmp_path: Path) -> None:
    """Nodes without a module are one row."""
    proto = onnx.load(before)
    for node in proto.graph.node:
        node.ClearField("metadata_props")
        node.name = ""
    onnx.save(proto, tmp_path / "bare.onnx")
    proto.graph.node[2].op_type = "Tanh"
    onnx.save(proto, tmp_path / "other.onnx")

    (module,) = diff_models(tmp_path / "bare.onnx", tmp_path / "other.onnx").modules

    assert (module.tag, dict(module.operators)) == ("", {"Relu": (1, 0), "Tanh": (0, 1)})


def test_order_of_outputs_is_compared_despite_other_changes(tmp_path: Path) -> None:
    """Inputs and outputs are compared separately, in the order of the names that both files have."""

    def second_output(model: ir.Model) -> None:
        relu = model.graph.node(2).outputs[0]
        relu.dtype, relu.shape = ir.DataType.FLOAT, ir.Shape([2, 40])
        model.graph.outputs.append(relu)

    def turned_round(model: ir.Model) -> None:
        second_output(model)
        model.graph.outputs[:] = [*reversed(model.graph.outputs)]

    def turned_round_with_another_input(model: ir.Model) -> None:
        turned_round(model)
        model.graph.inputs[0].name = "pixels"

    def and_with_another_output(model: ir.Model) -> None:
        turned_round_with_another_input(model)
        other = model.graph.node(0).outputs[0]
        other.dtype, other.shape = ir.DataType.FLOAT, ir.Shape([2, 40])
        model.graph.outputs.insert(0, other)

    before = saved(build(second_output), tmp_path / "before.onnx")
    for number, change in enumerate((turned_round, turned_round_with_another_input, and_with_another_output)):
        after = saved(build(change), tmp_path / f"after{number}.onnx")
        assert any("order of the" in line for line in diff_models(before, after).interface)
    only_input = build(lambda model: (second_output(model), setattr(model.graph.inputs[0], "name", "pixels"))[0])
    told = diff_models(before, saved(only_input, tmp_path / "named.onnx")).interface
    assert not any("order of the" in words for words in told)


def test_page_has_a_row_for_each_module_and_links_to_the_json(before: Path, tmp_path: Path) -> None:
    """Page and JSON are written together; an existing page is not replaced without ``--overwrite``."""
    after = saved(build(change_weight), tmp_path / "after.onnx")
    (tmp_path / "pages").mkdir()
    asked = ("diff", before, after, "--report", tmp_path / "pages" / "diff.html", "-o", tmp_path / "diff.json")
    done = run_here(*asked)
    assert 3 == done.code, done.err
    assert "diff.html" in done.out
    page = (tmp_path / "pages" / "diff.html").read_text(encoding="utf-8")
    assert ['<a href="../diff.json">diff.json</a>'] == re.findall(r"<a href=.*?</a>", page)
    changed = [module["tag"] for module in json.loads((tmp_path / "diff.json").read_text(encoding="utf-8"))["modules"]]
    table = page.partition('<table id="modules">')[2].partition("</table>")[0].replace("<wbr>", "")
    assert ["/M/Second"] == changed
    assert changed == re.findall(r'<td class="[^"]*title"[^>]*>(.*?)</td>', table)
    assert 2 == run_here(*asked).code
