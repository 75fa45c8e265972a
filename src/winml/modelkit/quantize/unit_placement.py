"""Decides which values of a graph become integers where a provider computes whole units of operators with integers.

A unit is an operator with a DequantizeLinear before each of its inputs and a QuantizeLinear behind each of its outputs.
Reads the structure and the provider's record only; knows no ranges. Where modules of two precisions meet, the reader
converts: its pair stands behind that of the maker.
"""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from winml.modelkit.onnx.cutting import Cutter
from winml.modelkit.onnx.weights import constant_tensor
from winml.modelkit.quantize.placements import OperatorRule, Placement
from winml.modelkit.quantize.qdq_placement import QdqPlacement, QuantizedConstant, QuantizedValue


def place_units(model: ir.Model, names: frozenset[str], placement: Placement, bits: int) -> QdqPlacement:
    """Return what becomes an integer so that every named node that the provider takes is a unit.

    Args:
        model: Its main graph is sorted, and each of its nodes has a name of its own.
        names: Names of the nodes of the modules that get this precision.
        placement: What the provider takes.
        bits: Bits of activations.
    """
    return _PlacingUnits(model, names, placement, bits).place()


class _PlacingUnits:
    def __init__(self, model: ir.Model, names: frozenset[str], placement: Placement, bits: int) -> None:
        self._model = model
        self._graph = model.graph
        self._names = names
        self._placement = placement
        self._bits = bits
        self._made: dict[ir.Value, QuantizedValue] = {}
        """Values that units make."""
        self._read: defaultdict[ir.Value, set[str]] = defaultdict(set)
        """Values that units read → their names."""
        self._constants: list[QuantizedConstant] = []
        self._companions: set[str] = set()
        self._merged: set[ir.Value] = set()
        """Values between a unit and the activation that is part of it."""

    def place(self) -> QdqPlacement:
        # What depends on no input is computed once, when the file is loaded, and may reach to infinity on the way.
        cutter = Cutter(self._model)
        for node in self._graph:
            rule = None if cutter.is_constant(node) else self._placement.rule(node)
            if rule is not None and node.name in self._names and self._is_unit(node, rule):
                self._place(node, rule)
        values = []
        order = dict.fromkeys([*self._graph.inputs, *(value for node in self._graph for value in node.outputs)])
        for value in order:
            made = self._made.get(value)
            readers = frozenset(self._read.get(value, ()))
            if made is not None:
                values.append(made)
            elif readers and value not in self._merged:
                values.append(QuantizedValue(value.name or "", readers))
        return QdqPlacement(
            tuple(values), frozenset(self._companions), constants=tuple(self._constants), is_by_unit=True
        )

    def _is_unit(self, node: ir.Node, rule: OperatorRule) -> bool:
        """Say whether a node computes floats of what it reads, and not of constants alone."""
        read = [value for index in rule.indices(node) if (value := node.inputs[index]) is not None]
        if not read or any(value.dtype != ir.DataType.FLOAT for value in read):
            return False
        if rule.result in ("table", "rows"):
            return constant_tensor(read[0]) is not None and len(read[0].shape or ()) >= 2
        if rule.is_residual and not _is_residual(node):
            return False
        return not all(constant_tensor(value) is not None for value in read)

    def _place(self, node: ir.Node, rule: OperatorRule) -> None:
        name = node.name or ""
        for index in rule.indices(node):
            value = node.inputs[index]
            assert value is not None
            if constant_tensor(value) is not None:
                role = rule.role(index)
                if role == "bias" and not self._placement.integer_bias:
                    continue
                axis = self._placement.channel_axis(node, index) if role == "weight" else None
                self._constants.append(QuantizedConstant(name, index, role, axis))
            elif value not in self._merged:
                self._read[value].add(name)
        self._companions.add(name)
        if not self._placement.quantizes_outputs or rule.result == "rows":
            return
        for value in node.outputs:
            if value.name and value.dtype in (ir.DataType.FLOAT, None) and (value.uses() or value.is_graph_output()):
                self._make(node, value, rule)

    def _make(self, node: ir.Node, value: ir.Value, rule: OperatorRule) -> None:
        first = node.inputs[0]
        name = value.name or ""
        if rule.result != "own" and first is not None:
            source = self._made.get(first)
            known = source.same_as or source.name if source is not None else first.name or ""
            self._made[value] = QuantizedValue(name, None, same_as=known)
            return
        uses = list(value.uses())
        if len(uses) == 1 and not value.is_graph_output() and rule.takes_activation:
            reader = uses[0].node
            activation = self._placement.rule(reader)
            if activation is not None and activation.is_range and reader.name in self._names and uses[0].idx == 0:
                self._merged.add(value)
                return
        limits = self._placement.limits(node.op_type, self._bits)
        self._made[value] = QuantizedValue(name, None, limits=limits)


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def _is_residual(node: ir.Node) -> bool:
    """Say whether an addition joins a branch that ends in a product, its bias included, with another value."""
    values = [value for value in node.inputs if value is not None]
    if any(constant_tensor(value) is not None for value in values) or _makes_scores(node):
        return False
    makers = [value.producer() for value in values]
    biased = [
        value.producer()
        for maker in makers
        if maker is not None
        and maker.op_type == "Add"
        and any(constant_tensor(item) is not None for item in maker.inputs)
        for value in maker.inputs
        if value is not None
    ]
    return any(maker is not None and maker.op_type in _PRODUCTS for maker in (*makers, *biased))


def _makes_scores(node: ir.Node) -> bool:
    """Say whether a node adds to the scores of an attention, such as its mask."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type == "Softmax" or (reader.op_type == "Add" and _makes_scores(reader)) for reader in readers)
