"""Exports of plain modules of many builds: verification, and tags compared with hooks, node by node."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from checkpoints import make_distinct
from graphs import run_onnx
from hostile_modules import Leaf
from oracle import observe
from tag_checks import COUNTED, check_order, load_nodes
from winml.modelkit import ExportError, ExportResult, VerificationError, WinMLExportConfig, export_pytorch
from winml.modelkit.onnx.specs import InputTensorSpec

ORDERED = COUNTED | {"Tanh", "Relu", "Sigmoid"}


class Parent(nn.Module):
    """Calls its child, then an activation."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the child."""
        return torch.relu(self.child(values)) + values


class SharedLeaf(nn.Module):
    """Calls one leaf twice, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf(4)
        self.again = self.first

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the leaf twice, with an operation of this module between."""
        return self.again(torch.sigmoid(self.first(values)))


class TwoParents(nn.Module):
    """Two parents of one child; the child is a plain torch.nn module or a leaf."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.left = Parent(child)
        self.right = Parent(child)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call both parents."""
        return self.right(torch.tanh(self.left(values)))


class NestedLists(nn.Module):
    """Lists of lists of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Leaf(4) for _ in range(2)) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the leaves in order."""
        for stage in self.stages:
            for leaf in stage:  # type: ignore[attr-defined]
                values = leaf(values) + values
        return values


class Siblings(nn.Module):
    """Two children of one class, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Leaf(4)
        self.key = Leaf(4)
        self.idle = Leaf(4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply the outputs of both children."""
        return torch.softmax(self.query(values) @ self.key(values).transpose(-1, -2), dim=-1)


class KeyedChildren(nn.Module):
    """Children with the separator of tags in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"a/b": Leaf(4), "a_b": Leaf(4), "a": Leaf(4)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call all children."""
        for branch in self.branches.values():
            values = branch(values)
        return values


def convolutions() -> nn.Module:
    """Build a CNN of plain torch.nn modules."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def export(model: nn.Module, folder: Path, inputs: Any, **options: Any) -> ExportResult:
    """Export a module with distinct weights, and check verification and coverage."""
    config = WinMLExportConfig(**options)
    result = export_pytorch(model, folder / "model.onnx", inputs, config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert 100.0 == result.only_part.coverage.percent
    return result


def distinct(model: nn.Module) -> nn.Module:
    """Give a module distinct weights, and its batch norms the statistics of a forward pass."""
    torch.manual_seed(1)
    make_distinct(model)
    return model


def tags(result: ExportResult) -> dict[str, str]:
    """Return module path → tag."""
    return {node.path: node.tag for node in result.only_part.tree}


BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str]]] = {
    "shared twice": (SharedLeaf, (2, 4), {"": "/SharedLeaf", "first": "/SharedLeaf/Leaf"}),
    "plain child of two parents": (
        lambda: TwoParents(nn.Linear(4, 4)),
        (2, 4),
        {"": "/TwoParents", "left": "/TwoParents/Parent.left", "right": "/TwoParents/Parent.right"},
    ),
    "leaf of two parents": (
        lambda: TwoParents(Leaf(4)),
        (2, 4),
        {
            "": "/TwoParents",
            "left": "/TwoParents/Parent.left",
            "left.child": "/TwoParents/Parent.left/Leaf",
            "right": "/TwoParents/Parent.right",
        },
    ),
    "nested lists": (
        NestedLists,
        (2, 4),
        {
            "": "/NestedLists",
            "stages.0.0": "/NestedLists/Leaf.0.0",
            "stages.0.1": "/NestedLists/Leaf.0.1",
            "stages.1.0": "/NestedLists/Leaf.1.0",
            "stages.1.1": "/NestedLists/Leaf.1.1",
        },
    ),
    "siblings": (
        Siblings,
        (1, 3, 4),
        {"": "/Siblings", "query": "/Siblings/Leaf.query", "key": "/Siblings/Leaf.key"},
    ),
    "sequential": (
        convolutions,
        (1, 3, 8, 8),
        {
            "": "/Sequential",
            "0": "/Sequential/Conv2d.0",
            "1": "/Sequential/BatchNorm2d.1",
            "2": "/Sequential/ReLU.2",
            "3": "/Sequential/Sequential.3",
            "3.0": "/Sequential/Sequential.3/Conv2d.0",
            "3.1": "/Sequential/Sequential.3/ReLU.1",
            "4": "/Sequential/AdaptiveAvgPool2d.4",
            "5": "/Sequential/Flatten.5",
            "6": "/Sequential/Linear.6",
        },
    ),
    "keys with slashes": (
        KeyedChildren,
        (2, 4),
        {
            "": "/KeyedChildren",
            "branches.a/b": "/KeyedChildren/Leaf.a%2Fb",
            "branches.a_b": "/KeyedChildren/Leaf.a_b",
            "branches.a": "/KeyedChildren/Leaf.a",
        },
    ),
}


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("build", BUILDS)
def test_export_module_is_tagged_by_execution(build: str, exporter: str, tmp_path: Path) -> None:
    """Module and operator of every node with a weight equal those of the hooks in order, for both exporters."""
    make, shape, expected = BUILDS[build]
    model, values = distinct(make()), torch.randn(shape)
    result = export(model, tmp_path, values, exporter=exporter)
    assert exporter == result.only_part.exporter
    check_order(result, model.eval(), observe(model.eval(), values), ORDERED)
    assert expected == tags(result)
    assert len(set(tags(result).values())) == len(result.only_part.tree), "tags are unique"
    assert all(
        tag.count("/") == node.depth for node, tag in zip(result.only_part.tree, tags(result).values(), strict=True)
    )


def flip_or_shift(values: torch.Tensor) -> torch.Tensor:
    """Apply one of two operations, chosen by the values."""
    if bool(values.sum() > 0):
        values = torch.tanh(values) * 2
    else:
        values = torch.sigmoid(values) - 1
    return values


with warnings.catch_warnings():
    # torch deprecates scripting, which user models still contain.
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(flip_or_shift)


class Chooser(nn.Module):
    """Has an If of its own between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Branch by the values."""
        return self.linear(scripted(values))


class CallsChooser(nn.Module):
    """Calls a module with an If, twice registered, and has an If of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.choosers = nn.ModuleList([Chooser(), Chooser()])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Branch in the children, then in this module."""
        for chooser in self.choosers:
            values = chooser(values)
        return scripted(values)


def test_export_if_nodes_belong_to_the_calling_module_and_both_branches_are_correct(tmp_path: Path) -> None:
    """An If and its inner nodes have the caller's tag, and each branch has PyTorch's output."""
    model = distinct(CallsChooser()).eval()
    result = export(model, tmp_path, torch.full((1, 4), 0.5))
    nodes = [node for node in load_nodes(result) if node.op_type == "If"]
    assert ["choosers.0", "choosers.1", ""] == [node.metadata_props["winml.hierarchy.module"] for node in nodes]
    for node in nodes:
        inner = [each for attribute in node.attributes.values() for each in attribute.as_graph().all_nodes()]
        assert {"Tanh", "Sigmoid"} <= {each.op_type for each in inner}
        keys = {(each.metadata_props["winml.hierarchy.tag"], each.metadata_props["namespace"]) for each in inner}
        assert {(node.metadata_props["winml.hierarchy.tag"], node.metadata_props["namespace"])} == keys
    assert {node.name for node in load_nodes(result)} == {node.name for node in result.only_part.nodes}
    taken = set()
    for values in (torch.full((1, 4), 3.0), torch.full((1, 4), -3.0)):
        with torch.no_grad():
            expected = model(values)
        taken.add(bool(values.sum() > 0))
        (answer,) = run_onnx(result.only_part.model_path, {"values": values.numpy()}).values()
        np.testing.assert_allclose(expected.numpy(), answer, rtol=1e-5, atol=1e-6)
    assert {True, False} == taken


def gated_halves(values: torch.Tensor) -> torch.Tensor:
    """Split by a size, as scripted helpers of torchvision and fairseq do."""
    parts = values.split(4, 1)
    return parts[0] * torch.sigmoid(parts[1])


def stacked_frames(values: torch.Tensor) -> torch.Tensor:
    """Stack a list of parts."""
    return torch.stack([frame * 2 for frame in values.split(2, 1)], 1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_helpers = (torch.jit.script(gated_halves), torch.jit.script(stacked_frames))


class Helped(nn.Module):
    """Calls a scripted function after a linear layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the function."""
        return scripted_helpers[self.number](self.linear(values))


@pytest.mark.parametrize("number", range(len(scripted_helpers)))
def test_export_scripted_split_is_a_torchscript_graph(number: int, tmp_path: Path) -> None:
    """The default opset of TorchScript has no ``num_outputs``; the file loads, so dynamo is not tried."""
    result = export(distinct(Helped(number)), tmp_path, torch.randn(2, 8))
    assert "torchscript" == result.only_part.exporter
    assert {"Split"} == {node.op_type for node in load_nodes(result) if "Split" in node.op_type}


class BranchesByValue(nn.Module):
    """Has a branch that a trace fixes."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Branch by the sum."""
        if bool(values.sum() > 0):
            return values * 2
        return -values


def test_export_scripted_branch_names_no_file_of_this_package(tmp_path: Path) -> None:
    """The forward of a scripted module has no source line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(BranchesByValue())
    with pytest.raises(VerificationError, match="scripted module reads") as refusal:
        export(scripted, tmp_path, torch.randn(2, 8))
    assert ".py" not in f"{refusal.value.message} {refusal.value.hint}"


def test_export_operator_of_a_parametrization_names_the_call_that_removes_it(tmp_path: Path) -> None:
    """The operator computes a weight, whose value can be stored; the module has no forward to change."""
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))).eval()
    with pytest.raises(ExportError) as refusal:
        export(model, tmp_path, torch.randn(2, 8))
    assert 'remove_parametrizations(model.get_submodule("0"), "weight")' in refusal.value.hint
    torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule("0"), "weight")
    export(model, tmp_path, torch.randn(2, 8))


class NamesakeParameter(nn.Module):
    """Has a parameter and a buffer under the names of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor([1.5, 2.5, -1.0, 3.0]))
        self.register_buffer("other", torch.tensor([0.25, -0.5, 2.0, 1.0]))

    def forward(self, values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Combine inputs, parameter and buffer."""
        return values * self.values + torch.tanh(other) * self.other


def test_export_parameters_named_like_inputs_are_renamed(tmp_path: Path) -> None:
    """The name belongs to the graph input, and the parameter gets another one."""
    result = export(NamesakeParameter(), tmp_path, (torch.randn(2, 4), torch.randn(2, 4)))
    graph = ir.load(result.only_part.model_path).graph
    assert ["values", "other"] == [value.name for value in graph.inputs]
    assert not {"values", "other"} & set(graph.initializers)


class TiedWeights(nn.Module):
    """Embeds and scores with one shared matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed, activate and score."""
        return self.head(torch.tanh(self.embedding(ids)))


def test_export_tied_weights_are_written_once(tmp_path: Path) -> None:
    """The file holds one copy of a matrix shared by two modules, and counts it once."""
    model = distinct(TiedWeights())
    result = export(model, tmp_path, torch.arange(6).reshape(1, 6))
    matrix = 500 * 64 * 4
    assert matrix < result.only_part.model_path.stat().st_size < 1.5 * matrix
    assert 500 * 64 == result.only_part.tree.root.parameter_count


class Buffered(nn.Module):
    """Reads a non-persistent and a saved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.5, -2.0, 0.5, 3.0]), persistent=False)
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Scale and shift."""
        return torch.tanh(values * self.scale) + self.shift


class Scaled(nn.Module):
    """Takes a number beside a tensor."""

    def forward(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return torch.tanh(values) * factor


class Summed(nn.Module):
    """Takes any number of tensors."""

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Add them up."""
        return torch.tanh(torch.stack(values).sum(0)) - values[0]


@pytest.mark.parametrize(
    ("make", "inputs", "names"),
    [
        (Buffered, torch.randn(2, 4), ["values"]),
        (Scaled, (torch.randn(2, 4), torch.tensor(2.5)), ["values", "factor"]),
        (Scaled, {"factor": torch.tensor(2.5), "values": torch.randn(2, 4)}, ["factor", "values"]),
        (Summed, (torch.randn(3), torch.randn(3), torch.randn(3)), ["values_0", "values_1", "values_2"]),
    ],
    ids=["buffers", "scalar", "by name", "variable"],
)
def test_export_inputs_equal_the_passed_inputs(
    make: Callable[[], nn.Module], inputs: Any, names: list[str], tmp_path: Path
) -> None:
    """The graph has the given inputs in their order, and no others."""
    result = export(make(), tmp_path, inputs)
    graph = ir.load(result.only_part.model_path).graph
    assert names == [value.name for value in graph.inputs]
    shapes = {spec.name: spec.shape for spec in result.only_part.inputs}
    assert shapes == {value.name: tuple(value.shape or ()) for value in graph.inputs}


def test_export_unread_input_stays_with_a_note(tmp_path: Path) -> None:
    """An input without a reader stays an input of the graph in its position, and a note names it."""

    class Deaf(nn.Module):
        def forward(self, first: torch.Tensor, unheard: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return torch.tanh(first) * last

    result = export(Deaf(), tmp_path, (torch.randn(2), torch.randn(3), torch.randn(2)))
    assert ["first", "unheard", "last"] == [value.name for value in ir.load(result.only_part.model_path).graph.inputs]
    assert any("unheard" in note for note in result.notes)
    assert not any("first" in note for note in result.notes)


@dataclasses.dataclass
class Record:
    """A result with named fields."""

    scores: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    nothing: None = None


class Pair(NamedTuple):
    """A named tuple."""

    left: torch.Tensor
    right: torch.Tensor


class Returning(nn.Module):
    """Returns the result of a function of two tensors."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, values: torch.Tensor) -> Any:
        """Call the function."""
        return self.make(torch.tanh(values), torch.sigmoid(values))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda a, b: {"a": a, "more": {"b": b, "none": None}}, ["a", "more.b"]),
        (lambda a, b: (a, (b, a + b)), ["output_0", "output_1.0", "output_1.1"]),
        (lambda a, b: [a * b], ["output_0"]),
        (lambda a, b: Record(a, (b, a - b)), ["scores", "hidden.0", "hidden.1"]),
        (lambda a, b: Pair(b, a), ["left", "right"]),
        (lambda a, b: (c := a + b, c), ["output_0", "output_1"]),
        (lambda a, b: {"values": a - b}, ["values_output"]),
    ],
    ids=["mapping", "tuple", "list", "dataclass", "namedtuple", "same twice", "named as the input"],
)
def test_export_outputs_are_named_after_the_forward_result(
    make: Callable[[Any, Any], Any], names: list[str], tmp_path: Path
) -> None:
    """Nested results become flat outputs in order, equal to PyTorch's."""
    result = export(Returning(make), tmp_path, torch.randn(2, 3))
    assert names == [value.name for value in ir.load(result.only_part.model_path).graph.outputs]
    assert names == [spec.name for spec in result.only_part.outputs]


def test_export_returned_input_is_an_output(tmp_path: Path) -> None:
    """A returned input is an output under another name with equal values."""

    class Through(nn.Module):
        def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return values, torch.tanh(values)

    result = export(Through(), tmp_path, torch.randn(2, 3))
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    answers = run_onnx(result.only_part.model_path, {"values": values})
    assert ["output_0", "output_1"] == list(answers)
    np.testing.assert_array_equal(values, answers["output_0"])


def test_export_half_precision_module_keeps_its_dtype(tmp_path: Path) -> None:
    """A float16 module becomes a float16 graph, verified at the threshold of float16."""
    model = distinct(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))
    result = export(model.half(), tmp_path, torch.randn(2, 8).half())
    assert ("float16", "float16") == (result.only_part.inputs[0].dtype, result.only_part.outputs[0].dtype)
    initializers = ir.load(result.only_part.model_path).graph.initializers.values()
    assert {ir.DataType.FLOAT16} == {value.dtype for value in initializers if (value.name or "").endswith("weight")}
    assert result.only_part.verification is not None
    assert 1e-2 == result.only_part.verification.worst.threshold


def test_export_integer_outputs_are_compared_exactly(tmp_path: Path) -> None:
    """Integer and boolean outputs are verified, and must be equal."""

    class Ranking(nn.Module):
        def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return values.argsort(-1), values > 0

    result = export(Ranking(), tmp_path, torch.randn(2, 6))
    assert result.only_part.verification is not None
    assert {0.0} == {item.threshold for item in result.only_part.verification.comparisons}
    assert ["int64", "bool"] == [spec.dtype for spec in result.only_part.outputs]


def test_export_with_input_specs_uses_valid_values(tmp_path: Path) -> None:
    """Specifications suffice in place of examples, and the drawn values stay in their ranges."""
    spec = InputTensorSpec(name="ids", shape=(1, 6), dtype="int64", value_range=(0, 499))
    result = export(distinct(TiedWeights()), tmp_path, None, input_tensors=(spec,))
    assert (spec,) == result.only_part.inputs


def test_export_uses_a_forward_replaced_on_the_instance(tmp_path: Path) -> None:
    """A module with a replaced forward is exported with it, and keeps it."""
    model = distinct(Leaf(4))
    original = model.forward

    def patched(values: torch.Tensor) -> torch.Tensor:
        return original(values) * 10

    model.forward = patched  # type: ignore[method-assign]
    result = export(model, tmp_path, torch.randn(2, 4))
    assert model.forward is patched
    values = torch.randn(2, 4)
    (answer,) = run_onnx(result.only_part.model_path, {"values": values.numpy()}).values()
    np.testing.assert_allclose(model(values).detach().numpy(), answer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_export_requested_torch_modules_become_segments(exporter: str, tmp_path: Path) -> None:
    """The nodes of a plain layer have the layer's tag if ``torch_module`` names its class."""
    model = distinct(Siblings())
    result = export(model, tmp_path, torch.randn(1, 3, 4), torch_module=("Linear",), exporter=exporter)
    assert "/Siblings/Leaf.query/Linear" == tags(result)["query.linear"]
    readers = {node.module for node in result.only_part.nodes if node.op_type in ("MatMul", "Gemm") and node.module}
    assert {"query.linear", "key.linear"} == readers


def test_export_without_hierarchy_has_no_hierarchy_keys(tmp_path: Path) -> None:
    """Nodes and model have no keys of winml or torch, and there is no sidecar."""
    path = tmp_path / "model.onnx"
    export_pytorch(distinct(CallsChooser()), path, torch.randn(1, 4), config=WinMLExportConfig(hierarchy=False))
    written = ir.load(path)
    assert [{}] * len(nodes := list(written.graph.all_nodes())) == [dict(node.metadata_props) for node in nodes]
    assert [path] == list(tmp_path.iterdir())
    assert {} == dict(written.metadata_props)


class SizesBesideTensors(nn.Module):
    """Returns a tensor, its sizes, and another tensor, as MaskFormerSwin does."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
        """Return the sizes as numbers."""
        return values + 1, tuple(values.shape), values * 2


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_returned_sizes_are_no_outputs(tmp_path: Path, exporter: Any) -> None:
    """TorchScript traces sizes as tensors; PyTorch returns numbers, and later outputs keep their names."""
    values, path = torch.arange(6.0).reshape(2, 3), tmp_path / "model.onnx"
    config = WinMLExportConfig(exporter=exporter)
    export_pytorch(SizesBesideTensors().eval(), path, {"values": values}, config=config)
    first, second = run_onnx(path, {"values": values.numpy()}).values()
    np.testing.assert_array_equal(first, values.numpy() + 1)
    np.testing.assert_array_equal(second, values.numpy() * 2)
