"""Results of repeated operators: equal programs, and fewer inferences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

from winml.modelkit.export.dynamo.capturing import _unite_dimensions
from winml.modelkit.export.dynamo.shortcuts import shortcuts
from winml.modelkit.models.state_restoration import quiet_torch
from winml.modelkit.ort.shared_settings import attribute_replaced


class Layer(nn.Module):
    """Attention over a cache, with views, a dropout that returns its operand, and sizes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, states: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new states, and the cache with the states."""
        rows, columns, _ = states.shape
        heads = self.project(self.norm(states)).view(rows, columns, 2, 4).transpose(1, 2)
        cache = torch.cat([cache, heads], dim=2)
        attended = nn.functional.scaled_dot_product_attention(heads, cache, cache)
        flat = self.drop(attended.transpose(1, 2).reshape(-1, 8))
        flat = flat + torch.zeros(flat.shape[0], 1)
        return states + flat.view(rows, columns, 8), cache


class Decoder(nn.Module):
    """Three equal layers, and a call under autocast whose operands are those of a call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, states: torch.Tensor, caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states and the caches."""
        grown = []
        for layer, cache in zip(self.layers, caches.unbind(), strict=True):
            states, cache = layer(states, cache)
            grown.append(cache)
        product = states @ states.transpose(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = states @ states.transpose(1, 2)
        return states, product, half, *grown


def program_of(model: nn.Module, inputs: tuple[torch.Tensor, ...], sizes: Any) -> torch.export.ExportedProgram:
    """Trace a model."""
    with quiet_torch(), torch.no_grad():
        return torch.export.export(model.eval(), inputs, dynamic_shapes=sizes, strict=False)


def describe(program: torch.export.ExportedProgram) -> list[Any]:
    """Return the nodes with their operands, modules and layouts, and the first node that has the same storage."""
    storages: dict[int, str] = {}
    rows: list[Any] = []
    for module in program.graph_module.modules():
        for node in module.graph.nodes:
            value = node.meta.get("val")
            layout: Any = str(value)
            if isinstance(value, torch.Tensor):
                owner = storages.setdefault(value.untyped_storage()._cdata, node.name)
                layout = (value.dtype, str(value.shape), str(value.stride()), str(value.storage_offset()), owner)
            stack = [path for path, _class in node.meta.get("nn_module_stack", {}).values()]
            rows.append((str(node), node.op, str(node.target), str(node.args), str(node.kwargs), stack, layout))
    return [*rows, str(program.range_constraints)]


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_program_of_equal_layers_is_the_same_after_fewer_inferences(is_dynamic: bool) -> None:
    """Nodes, modules, layouts, shared storages and ranges equal those of torch."""
    inputs = (torch.randn(2, 3, 8), torch.randn(3, 2, 2, 5, 4))
    hint = torch.export.Dim.DYNAMIC
    sizes = ({0: hint, 1: hint}, {1: hint, 3: hint}) if is_dynamic else None
    inferred: list[object] = []
    infer = proxy_tensor.proxy_call

    def counted(mode: Any, operator: Any, *operands: Any) -> Any:
        inferred.append(operator)
        return infer(mode, operator, *operands)

    torch.manual_seed(0)
    model = Decoder()
    with attribute_replaced(proxy_tensor, "proxy_call", counted):
        expected, count = describe(program_of(model, inputs, sizes)), len(inferred)
        inferred.clear()
        with shortcuts(keep_stack_traces=False):
            actual = describe(program_of(model, inputs, sizes))
    assert actual == expected
    assert 4 * len(inferred) < 3 * count


class Branching(nn.Module):
    """The layout of a result follows the strides of the operand, and a size follows its values."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reshape equal sizes of two layouts, and select twice."""
        turned = values.t().contiguous().t()
        return values.reshape(-1), turned.reshape(-1), values[values > 0], values[values > 0]


def test_result_of_other_strides_or_of_values_is_inferred_each_time() -> None:
    """A reshaped transposition is a copy and no view; each selection has a size of its own."""
    expected = describe(program_of(Branching(), (torch.randn(3, 4),), None))
    with shortcuts(keep_stack_traces=False):
        actual = describe(program_of(Branching(), (torch.randn(3, 4),), None))
    assert actual == expected


class Apart(nn.Module):
    """Two inputs that meet in no operator."""

    def __init__(self, axes: dict[str, dict[int, str]]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Double both."""
        _unite_dimensions({"first": first, "second": second}, self.axes)
        return first * 2, second * 2


@pytest.mark.parametrize("is_shared", [True, False])
def test_sizes_of_one_dimension_have_one_symbol(is_shared: bool) -> None:
    """Also if no operator compares them; sizes of other dimensions have their own."""
    hint = torch.export.Dim.DYNAMIC
    rows = ("rows", "rows") if is_shared else ("rows", "other rows")
    model = Apart({"first": {0: rows[0], 1: "columns"}, "second": {0: rows[1], 1: "other columns"}})
    program = program_of(model, (torch.ones(3, 3), torch.ones(3, 3)), ({0: hint, 1: hint},) * 2)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    first, columns, second, other_columns = (str(size) for value in values for size in value.shape)
    assert is_shared == (first == second)
    assert len({first, columns, other_columns}) == 3
    assert not any("sym" in node.name for node in program.graph.nodes)
