"""Hierarchy of modules from a recorded forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from winml.modelkit.errors import UsageError
from winml.modelkit.tags.torch_modules import module_of_error, record_calls
from winml.modelkit.tags.tree import ModuleTree, build_tree


class Leaf(nn.Module):
    """A module with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.linear(values)


class Stack(nn.Module):
    """Two lists of leaves, a leaf called twice, one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Leaf() for _ in range(2))
        self.up = nn.ModuleList(Leaf() for _ in range(1))
        self.shared = Leaf()
        self.alias = self.shared
        self.idle = Leaf()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Run all layers but the idle one."""
        for block in [*self.down, *self.up, self.shared, self.alias]:
            values = block(values)
        return values


def traced(model: nn.Module, *torch_modules: str) -> ModuleTree:
    """Trace a model on a row of four numbers."""
    with record_calls(model) as trace:
        model(torch.ones(1, 4))
    return build_tree(trace, torch_modules)


def test_build_tree_lists_executed_custom_modules_in_order() -> None:
    """Containers, torch.nn classes and modules that never ran are left out; shared indices get their list's name."""
    tags = {node.path: node.tag for node in traced(Stack())}
    assert {
        "": "/Stack",
        "down.0": "/Stack/Leaf.down.0",
        "down.1": "/Stack/Leaf.1",
        "up.0": "/Stack/Leaf.up.0",
        "shared": "/Stack/Leaf",
    } == tags
    assert list(tags) == ["", "down.0", "down.1", "up.0", "shared"]


def test_build_tree_module_called_twice_keeps_one_tag() -> None:
    """The calls are counted, and the module has one tag."""
    shared = traced(Stack()).get("shared")
    assert shared is not None
    assert 2 == shared.calls


def test_build_tree_counts_parameters_once() -> None:
    """Parameters below a module belong to the module; a parameter registered twice counts once."""
    model = Stack()
    tree = traced(model)
    assert sum(p.numel() for p in model.parameters()) == tree.root.parameter_count
    leaf = tree.get("down.0")
    assert leaf is not None
    assert {"linear.weight": (4, 4), "linear.bias": (4,)} == leaf.parameter_shapes
    assert 20 == leaf.parameter_count
    assert leaf.is_leaf
    assert not tree.root.is_leaf


def test_build_tree_frozen_parameters_are_not_trainable() -> None:
    """Trainable parameters require a gradient."""
    model = Leaf()
    model.linear.bias.requires_grad_(False)
    assert (20, 16) == (traced(model).root.parameter_count, traced(model).root.trainable_count)


def test_build_tree_with_torch_modules_creates_segments() -> None:
    """A named torch.nn class becomes part of the hierarchy."""
    node = traced(Stack(), "Linear").get("up.0.linear")
    assert node is not None
    assert "/Stack/Leaf.up.0/Linear" == node.tag


def test_build_tree_unknown_torch_module_is_refused_with_nearest() -> None:
    """The error names classes of the model that run."""
    with pytest.raises(UsageError, match="'Linear'") as caught:
        traced(Stack(), "Linaer")
    assert "Linear" in caught.value.hint


def test_build_tree_listed_class_of_the_model_is_included_with_a_note() -> None:
    """The class is in the hierarchy without the option, and a note says so; a misspelled class is still refused."""
    tree = traced(Stack(), "Leaf", "Linear")
    assert "down.0.linear" in {node.path for node in tree}
    assert ("Leaf is not a class of torch.nn: it is in the hierarchy without --torch-module.",) == tree.notes
    with pytest.raises(UsageError, match="'Leav'"):
        traced(Stack(), "Leav", "Linear")


def test_build_tree_by_default_includes_modules_directly_below_the_root() -> None:
    """Modules of torch.nn inside a class of the model's own stay out; a note names the classes that are in."""
    model = nn.Sequential(nn.Linear(4, 4), Stack())
    with record_calls(model) as trace:
        model(torch.ones(1, 4))
    tree = build_tree(trace)
    assert ["0"] == [node.path for node in tree if node.class_name == "Linear"]
    assert tree.notes[0].startswith("Classes of torch.nn in the hierarchy: Linear (")


def test_build_tree_class_of_transformers_keeps_torch_modules_out() -> None:
    """A class derived from a transformers class names its own parts, even as the root."""
    derived = type("Mine", (Stack,), {"__module__": "transformers.models.mine"})
    model = type("Yours", (derived,), {})()
    model.head = nn.Linear(4, 4)
    model.forward = lambda values: model.head(Stack.forward(model, values))  # type: ignore[method-assign]
    with record_calls(model) as trace:
        model(torch.ones(1, 4))
    assert build_tree(trace, "none").as_record() == build_tree(trace).as_record()
    trace.modules = [replace(module, is_transformers=False) for module in trace.modules]
    assert build_tree(trace).get("head") is not None


def test_root_of_plain_torch_class_is_in_the_tree() -> None:
    """The root is in the tree regardless of its class."""
    assert ["/Sequential"] == [node.tag for node in traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))]


def test_scope_joins_uncalled_containers_by_dots() -> None:
    """Slashes separate called modules."""
    tree = traced(Stack())
    assert "/down.0/linear" == tree.scope("down.0.linear")
    assert "" == tree.scope("")


def test_record_calls_failing_forward_leaves_no_hooks() -> None:
    """Hooks are gone after an error, and the error tells its module."""
    model = Stack()
    with pytest.raises(RuntimeError) as caught, record_calls(model):
        model(torch.ones(1, 5))
    assert "down.0.linear" == module_of_error(caught.value, model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
