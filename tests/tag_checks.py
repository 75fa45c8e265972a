"""Comparison of the tags of a written file with the modules that an oracle saw in a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx
import onnx_ir as ir
from torch import nn

from oracle import OPERATOR_FAMILY, ForwardOracle, hierarchy_module
from winml.modelkit.export.records import ExportResult
from winml.modelkit.tags.tagging import read_tag

COUNTED = frozenset({"MatMul", "Softmax", "LayerNormalization", "Conv"})
"""Operators with equal counts in the graph and in the forward pass, for any architecture."""


def check_file(
    result: ExportResult, model: nn.Module, oracle: ForwardOracle, counted: Collection[str] = COUNTED
) -> None:
    """Compare the written file with the forward pass that the oracle saw.

    Args:
        result: Result of the export.
        model: The exported module.
        oracle: Record of a forward pass of the module.
        counted: Operators to count in the graph and in the forward pass.
    """
    onnx.checker.check_model(str(result.only_part.model_path), full_check=True)
    nodes = load_nodes(result)
    _check_every_node_is_tagged(result, nodes)
    called = {hierarchy_module(oracle.stacks[path], model, oracle.stacks) for path in oracle.called}
    assert called == {node.path for node in result.only_part.tree}, "the tree is the modules that ran and belong to it"
    assert Counter(events(oracle, model, counted)) == Counter(tagged_operators(nodes, counted))
    _check_parameters_are_read_by_their_owner(nodes, model, oracle)


def check_order(result: ExportResult, model: nn.Module, oracle: ForwardOracle, counted: Collection[str]) -> None:
    """Compare module and operator of the written file and the forward pass, node by node in execution order."""
    check_file(result, model, oracle, counted)
    assert list(events(oracle, model, counted)) == tagged_operators(load_nodes(result), counted)


def load_nodes(result: ExportResult) -> list[ir.Node]:
    """Return every node of the written file, subgraphs included."""
    return list(ir.load(result.only_part.model_path).graph.all_nodes())


def events(oracle: ForwardOracle, model: nn.Module, counted: Collection[str]) -> list[tuple[str, str]]:
    """Return ``(hierarchy module, operator)`` of the forward pass, in execution order."""
    return [(hierarchy_module(stack, model, oracle.stacks), name) for stack, name in oracle.events if name in counted]


def tagged_operators(nodes: Collection[ir.Node], counted: Collection[str]) -> list[tuple[str, str]]:
    """Return ``(module on the tag, operator)`` of the nodes, in order."""
    families = [(node, OPERATOR_FAMILY.get(node.op_type, node.op_type)) for node in nodes]
    return [(node.metadata_props["winml.hierarchy.module"], family) for node, family in families if family in counted]


def _check_every_node_is_tagged(result: ExportResult, nodes: list[ir.Node]) -> None:
    """Names and keys are unique, and tag and module path of a node agree."""
    tags = {node.path: node.tag for node in result.only_part.tree}
    assert len({node.name for node in nodes}) == len(nodes)
    for node in nodes:
        tag = read_tag(node)
        assert tag is not None, node.name
        assert tags[tag.module] == tag.tag
    for proto in onnx.load(result.only_part.model_path).graph.node:
        keys = [entry.key for entry in proto.metadata_props]
        assert len(set(keys)) == len(keys)


def _check_parameters_are_read_by_their_owner(nodes: list[ir.Node], model: nn.Module, oracle: ForwardOracle) -> None:
    """A node that reads a parameter belongs to the owner of the parameter, unless it has other readers."""
    owners = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    for node in nodes:
        for value in node.inputs:
            name = (value.name or "").removesuffix(".transposed") if value is not None else ""
            if value is not None and name in owners and owners[name] in oracle.stacks and len(value.uses()) == 1:
                owner = hierarchy_module(oracle.stacks[owners[name]], model, oracle.stacks)
                assert owner == node.metadata_props["winml.hierarchy.module"]
