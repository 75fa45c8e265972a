"""Finds weights that are no numbers, and those that stay in the file beside their quantized form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.errors import QuantizeError
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.quantize.planning import PlannedNode, constant_weight
from winml.modelkit.words import size_words

__all__ = ["WeightUse", "has_non_finite_scales", "refuse_non_finite_weights", "shared_weight_notes"]


@dataclass(frozen=True)
class WeightUse:
    """A weight and one node that reads it, for messages about values that are read while the result is written."""

    weight: str
    node: str
    tag: str
    """The node's; empty where it has none."""

    @classmethod
    def of(cls, weight: ir.Value, node: ir.Node) -> WeightUse:
        """Return the use of a weight by a node."""
        tag = read_tag(node)
        return cls(weight.name or "", node.name or "", tag.tag if tag is not None else "")

    def refuse_nan(self, values: NDArray[Any]) -> None:
        """Refuse values with NaN among them.

        Raises:
            QuantizeError: names weight, node and module.
        """
        if np.isnan(values).any():
            raise self._error("has values that are NaN")

    def refuse_non_finite(self, values: NDArray[Any]) -> None:
        """Refuse values with NaN or infinity among them.

        Raises:
            QuantizeError: names weight, node and module.
        """
        if not np.isfinite(values).all():
            raise self._error("has values that are NaN or infinite")

    def _error(self, fault: str) -> QuantizeError:
        return QuantizeError(
            f"weight {self.weight} {fault}: module {self.tag or '(unknown)'}, node {self.node}",
            hint="Repair the checkpoint it comes from, or leave the module as it is with --exclude.",
        )


def has_non_finite_scales(model: ir.Model, quantized: ir.Model) -> bool:
    """Say whether a scale is NaN or infinite, as that of a weight is that has such values; reads no weight.

    Args:
        model: The graph before.
        quantized: The graph after; scales that are computed when the file is written are not looked at.
    """
    known = model.graph.initializers
    for name, value in quantized.graph.initializers.items():
        tensor = value.const_value
        if name in known or tensor is None or not tensor.dtype.is_floating_point() or isinstance(tensor, ir.LazyTensor):
            continue
        if not np.isfinite(tensor.numpy().astype(np.float32)).all():
            return True
    return False


def refuse_non_finite_weights(model: ir.Model, planned: Sequence[PlannedNode]) -> None:
    """Refuse a weight with NaN or infinite values; reads one after the other, so for the case that something is wrong.

    Raises:
        QuantizeError: names weight, node and module.
    """
    nodes = {node.name: node for node in model.graph}
    checked: set[ir.Value] = set()
    for item in planned:
        weight = constant_weight(nodes[item.name]) if item.mode is not None else None
        if weight is None or weight in checked:
            continue
        checked.add(weight)
        assert weight.const_value is not None
        values = weight.const_value.numpy().astype(np.float32)
        if count := int(values.size - np.isfinite(values).sum()):
            raise QuantizeError(
                f"{count} of {values.size} values of weight {weight.name} are NaN or infinite: module "
                f"{item.tag or '(unknown)'}, node {item.name}",
                hint="Repair the checkpoint it comes from, or leave the module as it is with --exclude.",
            )


def shared_weight_notes(model: ir.Model, reached: Collection[str], quantized: ir.Model) -> tuple[str, ...]:
    """Return a sentence for each weight that the file now holds twice: quantized for some nodes, as it was for others.

    Args:
        model: The graph before.
        reached: Names of the nodes that were quantized.
        quantized: The graph after.
    """
    nodes = {node.name: node for node in model.graph}
    weights = {weight for name in reached if (weight := constant_weight(nodes[name])) is not None}
    notes = []
    for weight in sorted(weights, key=lambda value: value.name or ""):
        rest = quantized.graph.initializers.get(weight.name or "")
        if rest is None or rest.const_value is None or rest.dtype != weight.dtype or not rest.uses():
            continue
        readers = sorted({node.name or node.op_type for node, _ in rest.uses()})
        others = " and others" if len(readers) > 2 else ""
        size = size_words(rest.const_value.nbytes)
        notes.append(
            f"Weight {weight.name} ({size}) is kept as it was beside its quantized form, for "
            f"{', '.join(readers[:2])}{others}."
        )
    return tuple(notes)
