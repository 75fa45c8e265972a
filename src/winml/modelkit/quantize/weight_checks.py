"""Checks the weights of planned nodes before they are quantized, and finds those that stay beside their short form."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from winml.modelkit.errors import QuantizeError
from winml.modelkit.quantize.planning import PlannedNode, constant_weight
from winml.modelkit.quantize.precisions import Mode
from winml.modelkit.words import size_words

__all__ = ["refuse_non_finite_weights", "shared_weight_notes"]

CHECKED_MODES: frozenset[Mode] = frozenset({"dynamic", "qdq"})
"""Ways that read whole weights to find their range, which has no meaning where a value has none."""


def refuse_non_finite_weights(model: ir.Model, planned: Sequence[PlannedNode]) -> None:
    """Refuse a weight with NaN or infinite values, one after the other; each is read once.

    Raises:
        QuantizeError: names weight, node and module.
    """
    nodes = {node.name: node for node in model.graph}
    checked: set[ir.Value] = set()
    for item in planned:
        weight = constant_weight(nodes[item.name]) if item.mode in CHECKED_MODES else None
        if weight is None or weight in checked:
            continue
        checked.add(weight)
        assert weight.const_value is not None
        values = weight.const_value.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):  # in one pass and without a copy; any NaN or infinity stays in a sum
                continue
        if count := int(values.size - np.isfinite(values).sum()):
            raise QuantizeError(
                f"{count} of {values.size} values of weight {weight.name} are NaN or infinite: module "
                f"{item.tag or '(unknown)'}, node {item.name}",
                hint="Repair the checkpoint it comes from, or leave the module as it is with --exclude.",
            )


def shared_weight_notes(
    model: ir.Model, planned: Sequence[PlannedNode], reached: Collection[str], quantized: ir.Model
) -> tuple[str, ...]:
    """Return a sentence for each weight that the file now holds twice: quantized for some nodes, as it was for others.

    Args:
        model: The graph before.
        planned: What was to become of its nodes.
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
        notes.append(
            f"Weight {weight.name} is kept as it was beside its quantized form ({size_words(rest.const_value.nbytes)}), "
            f"since {', '.join(readers[:2])}{' and others' if len(readers) > 2 else ''} read{'s'[: len(readers) < 2]} "
            "it as well."
        )
    return tuple(notes)
