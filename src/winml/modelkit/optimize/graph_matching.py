"""Small questions that patterns ask of values and nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from winml.modelkit.hierarchy.tagging import Source, all_nodes, operator_name, read_tag, write_tag
from winml.modelkit.metadata_keys import MODULES_KEY
from winml.modelkit.optimize.capabilities import Capability

_SMALL = 16
"""Chosen: no constant a pattern asks for has more values."""
_WHOLE = 2**62
"""Chosen: exporters write an end that large where a slice has none."""


def is_operator(node: ir.Node, operator: str) -> bool:
    """Say whether a node is an operator of ONNX itself of this name."""
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def producer_of(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the node that makes a value where it is such an operator of ONNX itself."""
    node = value.producer() if value is not None else None
    return node if node is not None and is_operator(node, operator) else None


def rank_of(value: ir.Value) -> int | None:
    """Return the number of axes, or None where it is unknown."""
    return len(value.shape) if value.shape is not None else None


def permutation_of(node: ir.Node) -> tuple[int, ...]:
    """Return the permutation of a Transpose; empty where it has none."""
    return tuple(node.attributes.get_ints("perm", ()))


def constant_numbers(value: ir.Value | None) -> list[float] | None:
    """Return the values of a small constant, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size > _SMALL or tensor.dtype == ir.DataType.STRING:
        return None
    return [float(number) for number in tensor.numpy().reshape(-1)]


def constant_number(value: ir.Value | None) -> float | None:
    """Return the value of a constant of one element, or None."""
    numbers = constant_numbers(value)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def without_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the value before it is multiplied or divided by a constant, and the factor."""
    node = value.producer()
    if node is None or not (is_operator(node, "Mul") or is_operator(node, "Div")):
        return value, 1.0
    left, right = node.inputs
    factor = constant_number(right)
    if factor is None and is_operator(node, "Mul"):
        left, factor = right, constant_number(left)
    if factor is None or left is None or factor == 0.0:
        return value, 1.0
    return left, 1.0 / factor if is_operator(node, "Div") else factor


def without_full_slices(value: ir.Value) -> ir.Value:
    """Return the value before slices that take all of it."""
    while (node := producer_of(value, "Slice")) is not None and node.inputs[0] is not None:
        starts, ends, steps = (
            constant_numbers(node.inputs[place]) if len(node.inputs) > place else [1] for place in (1, 2, 4)
        )
        if starts != [0] or steps != [1] or ends is None or min(ends) < _WHOLE:
            return value
        value = node.inputs[0]
    return value


def has_one_use(value: ir.Value) -> bool:
    """Say whether one node reads a value, and it is no output of the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def only_user(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads a value; None where there are others, or it is an output of the graph."""
    return next(iter(value.consumers())) if has_one_use(value) else None


def same_shape(left: ir.Value, right: ir.Value) -> bool:
    """Say whether two shapes are known to be equal."""
    if left.shape is None or right.shape is None or len(left.shape) != len(right.shape):
        return False
    return all(same_size(left_size, right_size) for left_size, right_size in zip(left.shape, right.shape, strict=True))


def same_size(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    """Say whether two sizes are known to be equal; a size without a name is unknown."""
    return left == right and (isinstance(left, int) or left.value is not None)


def tag_like(node: ir.Node, original: ir.Node, source: Source) -> None:
    """Give a new node the tag of one of the nodes it stands for, in place; none where that has none."""
    tag = read_tag(original)
    if tag is None:
        return
    node.metadata_props.update(original.metadata_props)
    node.metadata_props.pop(MODULES_KEY, None)
    write_tag(node, replace(tag, source=source))


def behind_nan_guard(value: ir.Value) -> tuple[ir.Value, bool]:
    """Return the output of ``Where(IsNaN(x), 0, x)`` and True, or the value itself and False where there is none."""
    users = list(value.consumers())
    nan = next((user for user in users if is_operator(user, "IsNaN")), None)
    where = next((user for user in users if is_operator(user, "Where")), None)
    if len(users) != 2 or nan is None or where is None or value.is_graph_output():
        return value, False
    is_zero = constant_number(where.inputs[1]) == 0.0
    if where.inputs[0] is nan.outputs[0] and where.inputs[2] is value and is_zero and has_one_use(nan.outputs[0]):
        return where.outputs[0], True
    return value, False


# --- Counts operators and names of a graph, to tell how often a capability fired.


@dataclass(frozen=True)
class GraphCensus:
    """The operators and names of a graph."""

    operators: Counter[str]
    """Operator, with its domain where that is not ONNX itself (``com.microsoft:Gelu``) → number of nodes."""
    names: frozenset[str]
    """Names of nodes and initializers."""
    modules: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Tag → operators of its nodes; of nodes without a tag the empty text."""
    tag_of: Mapping[str, str] = field(default_factory=dict)
    """Name of a node, or of an initializer, → tag of the node, or of the first that reads it."""

    @classmethod
    def of(cls, model: ir.Model) -> GraphCensus:
        """Count a model, subgraphs and functions included."""
        nodes = list(all_nodes(model))
        names = {node.name or "" for node in nodes} | {name for graph in model.graphs() for name in graph.initializers}
        modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
        tag_of: dict[str, str] = {}
        for node in nodes:
            found = read_tag(node)
            tag = "" if found is None else found.tag
            modules[tag][operator_name(node)] += 1
            for name in (node.name, *(value.name for value in node.inputs if value is not None)):
                tag_of.setdefault(name or "", tag)
        return cls(Counter(map(operator_name, nodes)), frozenset(names), modules, tag_of)

    def fired(self, capability: Capability, before: GraphCensus) -> int | None:
        """Return how often a capability fired between ``before`` and this graph, or None where that is unknown."""
        if capability.makes:
            added = sum(self.operators[name] - before.operators[name] for name in capability.makes)
            return max(0, added)
        if capability.marks:
            return sum(any(mark in name for mark in capability.marks) for name in self.names - before.names)
        return None

    def fired_in(self, capability: Capability, before: GraphCensus) -> dict[str, int]:
        """Return in which modules it fired, by tag; of one that cannot be counted, which modules it made shorter."""
        found: Counter[str] = Counter()
        if capability.marks and not capability.makes:
            for name in sorted(self.names - before.names):
                if any(mark in name for mark in capability.marks):
                    found[self.tag_of.get(name, "")] += 1
            return dict(found)
        for tag in dict.fromkeys([*before.modules, *self.modules]):
            now, then = self.modules.get(tag, Counter()), before.modules.get(tag, Counter())
            if capability.makes:
                found[tag] = sum(now[name] - then[name] for name in capability.makes)
            else:
                found[tag] = then.total() - now.total()
        return {tag: count for tag, count in found.most_common() if count > 0}
