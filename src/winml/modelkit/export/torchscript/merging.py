"""Merges equal computations of one call of a module in a captured graph.

torch's exporter merges on its own graph across modules and calls, where nothing tells afterwards whose work was merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.export.node_tagger import Scope

__all__ = ["merge_equal_nodes"]

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Specified: operators of ONNX that answer otherwise each time."""
_APART = "winml_apart"
"""Attribute by whose value nodes are kept apart, for the time of the pass."""


def merge_equal_nodes(model: ir.Model, scopes: Mapping[ir.Node, Scope], repeated_modules: Collection[str] = ()) -> None:
    """Let one node stand for all that compute the same of the same values in the same module, in place.

    Each module keeps its own work, so that equal modules have equal nodes and each can be cut out.

    Args:
        model: A captured graph.
        scopes: The scope of each node.
        repeated_modules: Paths of modules that run more than once. Their nodes stay, so that each call has its own.
    """
    numbers: dict[Scope, int] = {}
    nodes = [node for node in model.graph if node.inputs]
    for position, node in enumerate(nodes):
        scope = scopes.get(node, ())
        # A random number is drawn for each; of an output, the pass would leave a copy that belongs to no module.
        is_own = node.op_type in _RANDOM or bool(node.domain) or any(value.is_graph_output() for value in node.outputs)
        is_own = is_own or not set(scope).isdisjoint(repeated_modules)
        number = len(nodes) + position if is_own else numbers.setdefault(scope, len(numbers))
        node.attributes.add(ir.AttrInt64(_APART, number))
    common.CommonSubexpressionEliminationPass()(model)
    for node in nodes:
        node.attributes.pop(_APART)
