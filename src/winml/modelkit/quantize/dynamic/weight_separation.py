"""Gives nodes that are quantized weights of their own where other nodes read the same ones.

ONNX Runtime's quantizers replace a weight for all its readers: those that are to stay would read what is left of it,
and a lookup and a product, which need scales along other axes, would share those of whichever comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import onnx

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.graph.weightless_proto import WeightlessProto

__all__ = ["with_own_weights"]

_STAYS = "kept"


def with_own_weights(sent: WeightlessProto, names: Collection[str]) -> WeightlessProto:
    """Let the named nodes read initializers that nodes of another kind do not read, in place.

    Before / After::

        w → Gather (named), MatMul (named), Transpose        w → Transpose, w.lookup → Gather, w.product → MatMul

    A new initializer refers to the values of the old one; nothing is copied that travels without values.

    Args:
        sent: The model, without values.
        names: Names of the nodes of the main graph that are quantized.

    Returns:
        The same proto, with the tensors of the new initializers.
    """
    graph = sent.proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    weights = dict(sent.weights)
    fresh = FreshNames.of_proto(graph)
    for name, readers in _readers_by_kind(graph, names).items():
        if len(readers) < 2 or name not in initializers or len(initializers[name].dims) < 2:
            continue
        # The first kind keeps the name; those that stay always do.
        kinds = sorted(readers, key=lambda kind: kind != _STAYS)
        for kind in kinds[1:]:
            own = fresh.take(f"{name}.{kind}")
            copied = onnx.TensorProto()
            copied.CopyFrom(initializers[name])
            copied.name = own
            graph.initializer.append(copied)
            if name in weights:
                weights[own] = weights[name]
            for node, position in readers[kind]:
                node.input[position] = own
    return WeightlessProto(sent.proto, weights)


def _readers_by_kind(
    graph: onnx.GraphProto, names: Collection[str]
) -> dict[str, dict[str, list[tuple[onnx.NodeProto, int]]]]:
    """Return who reads each value, and at which input: those that stay, lookups and products."""
    readers: defaultdict[str, dict[str, list[tuple[onnx.NodeProto, int]]]] = defaultdict(dict)
    for output in graph.output:
        readers[output.name].setdefault(_STAYS, [])
    for node in graph.node:
        kind = _STAYS if node.name not in names else "lookup" if node.op_type == "Gather" else "product"
        for position, name in enumerate(node.input):
            readers[name].setdefault(kind, []).append((node, position))
        for name in _read_by_subgraphs(node):
            readers[name].setdefault(_STAYS, [])
    return readers


def _read_by_subgraphs(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from inner.input
                yield from _read_by_subgraphs(inner)
