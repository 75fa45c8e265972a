"""One capture: options of an exporter, the returned graph, and the tags and names of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import onnx_ir as ir

from winml.modelkit.export.config import DEFAULT_OPSETS
from winml.modelkit.metadata_keys import NAMESPACE_KEY
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.tags.address import common_start
from winml.modelkit.tags.tagging import NodeTag, write_tag
from winml.modelkit.tags.tree import ModuleTree


@dataclass(frozen=True)
class CaptureOptions:
    """Options of the capture of a prepared module; the same record for both exporters."""

    opset_version: int = DEFAULT_OPSETS["torchscript"]
    """Opset of the default domain of the graph. The dynamo exporter raises it to at least 18."""
    dynamic_axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Input → axis → name of each dynamic size; all other sizes become fixed."""
    keep_stack_traces: bool = False
    """Retain the Python source lines of each node; these contain local paths."""
    weights: Mapping[str, ir.TensorProtocol] | None = None
    """Parameter or buffer → its values, for a model with fake parameters."""
    time_limit_s: float | None = None
    """Longest time torch may take; None: unlimited. dynamo only."""
    takes_example_values: bool = False
    """If the forward branches on values, follow the branch of the example inputs, as TorchScript does. dynamo only."""


@dataclass(frozen=True)
class Capture:
    """The graph returned by an exporter."""

    model: ir.Model
    """The graph, weights attached by reference."""
    scopes: Mapping[ir.Node, tuple[str, ...]]
    """Node → paths of the modules it ran in, outermost first; empty if the exporter recorded none."""
    unused_inputs: tuple[str, ...]
    """Names of the graph inputs that nothing reads."""
    assumed: tuple[Assumption, ...] = ()
    """Lines of the user's Python that read a tensor's value, or took a dynamic size for a number."""
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Dynamic size → smallest and largest size the graph was made for, if the exporter reports bounds."""
    notes: tuple[str, ...] = ()
    """Further notes on the capture."""


Scope = tuple[str, ...]
"""Paths of the modules on the call stack, outermost first; the root is ``("",)``, an unknown scope ``()``."""


@dataclass(frozen=True)
class NodeTagger:
    """Tags captured nodes by their traced scope; a node without a scope by its neighbours, if requested."""

    tree: ModuleTree
    operation_fallback: bool = False
    """Assign a node without scope the longest scope shared by its neighbours, instead of the root."""

    def tag_nodes(self, scopes: Mapping[ir.Node, Scope]) -> None:
        """Write a tag and a namespace on every node, in place.

        Args:
            scopes: The scope of each node, in execution order.
        """
        known_scopes = dict(scopes)
        for node in scopes:
            source: Literal["operation"] | None = None
            if not known_scopes[node] and self.operation_fallback:
                known_scopes[node] = shared_scope(known_scopes, neighbours(node))
                source = "operation" if known_scopes[node] else None
            write_tag(node, self.tag_for(known_scopes[node], source))
            node.metadata_props[NAMESPACE_KEY] = self.namespace(known_scopes[node])

    def tag_for(self, scope: Scope, source: Literal["operation"] | None = None) -> NodeTag:
        """Return the tag of a node that ran in ``scope``: the tag of the innermost hierarchy module in it.

        Args:
            scope: The call stack.
            source: Origin of the scope, if not read from the trace.
        """
        for path in reversed(scope):
            module = self.tree.get(path)
            if module is None:
                continue
            if source is None and path == scope[-1]:
                return NodeTag(module.tag, path, "root" if path == "" else "direct")
            return NodeTag(module.tag, path, source or "parent")
        return NodeTag(self.tree.root.tag, "", "root")

    def namespace(self, scope: Scope) -> str:
        """Return the scope as torch writes it: ``BertModel/encoder: BertEncoder/encoder.layer.0: BertLayer``."""
        return "/".join(
            f"{path}: {self.tree.class_name(path)}" if path else self.tree.class_name(path) for path in scope or ("",)
        )


def neighbours(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that produce the inputs of ``node`` and the nodes that read its outputs."""
    producers = (value.producer() for value in node.inputs if value is not None)
    readers = (use.node for output in node.outputs for use in output.uses())
    return [*(producer for producer in producers if producer is not None), *readers]


def shared_scope(scopes: Mapping[ir.Node, Scope], nodes: Iterable[ir.Node]) -> Scope:
    """Return the longest common scope of the nodes that have a scope."""
    return tuple(common_start(scopes[node] for node in nodes if scopes.get(node)))


def accepted_names(names: Sequence[str], is_accepted: Callable[[str], bool]) -> list[str]:
    """Return the names of inputs, with an unused ``input_<number>`` in place of each name that torch does not take."""
    used_names = set(names)
    accepted = []
    for position, name in enumerate(names):
        if not is_accepted(name):
            name = next(free for number in count(position) if (free := f"input_{number}") not in used_names)
        used_names.add(name)
        accepted.append(name)
    return accepted


def place_operands(scopes: dict[ir.Node, Scope]) -> None:
    """Assign constants added by the exporter (axes, shapes) the scope shared by their readers, in place."""
    for node in [node for node, scope in scopes.items() if not scope and not node.inputs]:
        scopes[node] = shared_scope(scopes, neighbours(node))


def name_by_module(graph: ir.Graph, scopes: Mapping[ir.Node, Scope], tree: ModuleTree) -> None:
    """Name nodes and outputs after the module, ``/encoder/layer.0/MatMul_1``, in place."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)} | set(graph.initializers)
    name_counts: Counter[str] = Counter()
    for node in graph.all_nodes():
        scope = scopes[node]
        stem = f"{tree.scope(scope[-1]) if scope else ''}/{node.op_type}"
        node.name = f"{stem}_{name_counts[stem]}" if name_counts[stem] else stem
        name_counts[stem] += 1
        for position, value in enumerate(node.outputs):
            if value.name and value.name not in fixed:
                value.name = f"{node.name}_output_{position}"


def name_open_sizes(graph: ir.Graph, dynamic_axes: Mapping[str, Mapping[int, str]]) -> None:
    """Name the dynamic sizes of the inputs, and remove the shapes of all computed values, in place.

    Exporters use internal names for sizes they cannot compute (``Add_123_dim_0``, ``s77``), and may state some dynamic
    sizes as fixed. Shape inference derives the inner shapes from the inputs again.
    """
    for value in graph.inputs:
        axis_names = dynamic_axes.get(value.name or "", {})
        value.shape = ir.Shape([axis_names.get(axis, size) for axis, size in enumerate(value.shape or ())])
    for node in graph.all_nodes():
        for value in node.outputs:
            value.shape = None
