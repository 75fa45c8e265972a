"""Finds the work that a node took over from its neighbours although it kept its name or its value.

A tool may fold a product with constants into the weights of a layer before or after it. The layer then reads, or its
reader then reads, an original value from further up. What lies between is work of the layer now. Where nobody's weights
changed, it was work of no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import onnx_ir as ir

from winml.modelkit.hierarchy.carry.original_graph import GraphNames, OriginalModel

__all__ = ["REORDERINGS", "Comparison", "absorbed_work"]

REORDERINGS = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"})
"""Operators that give values another place or form; where one is gone, nobody need do its work."""
_LAYOUT_CHANGES = frozenset({"ReorderInput", "ReorderOutput"})
"""Operators of ONNX Runtime that change the layout of a value and compute nothing."""
_LONGEST = 4
"""Most operators on the way between two values of which a node reads one in place of the other. Chosen: scale, shift
and two reorderings."""
_LARGEST_REGION = 32
"""Most original nodes that are looked through for the values they read. Chosen: more than a fused layer replaces."""


class Comparison(Protocol):
    """A graph after a tool beside the original."""

    names: GraphNames
    original: OriginalModel
    graph: ir.Graph | ir.Function
    claimed: dict[ir.Node, ir.Node]

    @property
    def makers(self) -> dict[str, ir.Node]: ...
    @property
    def provided_values(self) -> dict[ir.Node, str]: ...
    def gone_maker(self, value: ir.Value | None) -> ir.Node | None: ...


def absorbed_work(
    comparison: Comparison, known: Mapping[ir.Node, tuple[ir.Node | None, tuple[ir.Node, ...]]]
) -> dict[ir.Node, list[ir.Node]]:
    """Return, for nodes after the tool, the original nodes whose work they took over.

    Args:
        comparison: Both graphs.
        known: Node after the tool → the same node before it, where it is one, and the original makers of its values.
    """
    absorbed: dict[ir.Node, list[ir.Node]] = {}
    before = {after: original for original, after in comparison.claimed.items()}
    for node, (survivor, makers) in known.items():
        if survivor is not None and _reads_the_same(node, survivor):
            continue
        boundary = _values_before(comparison, makers, is_same=survivor is not None)
        read = set(_values_read(comparison, node, before))
        nearer, further = boundary - read, read - boundary
        if not nearer or not further:
            continue
        for name in nearer:
            work, source = _work_between(comparison, name, further)
            if not work:
                continue
            # Into the layer before, as tools do it, unless that is as it was.
            takers = [] if name in comparison.makers else _changed_before(comparison, node, source, before)
            if not takers and (_has_other_weights(comparison, node, survivor) or _is_new_with_factor(node, survivor)):
                takers = [node]
            for taker in (node for node in takers if node.op_type not in _LAYOUT_CHANGES):
                absorbed.setdefault(taker, []).extend(work)
    return absorbed


def _reads_the_same(node: ir.Node, survivor: ir.Node) -> bool:
    return len(node.inputs) == len(survivor.inputs) and all(
        (value.name if value is not None else None) == (before.name if before is not None else None)
        for value, before in zip(node.inputs, survivor.inputs, strict=True)
    )


def _values_before(comparison: Comparison, makers: Iterable[ir.Node], *, is_same: bool) -> set[str]:
    """Return the names of the values that original nodes read; with those that they replaced, unless ``is_same``."""
    found: set[str] = set()
    pending, seen = list(makers), set(makers)
    while pending and len(seen) <= _LARGEST_REGION:
        node = pending.pop()
        for value in _data_inputs(comparison, node):
            maker = comparison.gone_maker(value)
            if maker is None or is_same:
                found.add(value.name or "")
            elif maker not in seen:
                seen.add(maker)
                pending.append(maker)
    return found


def _data_inputs(comparison: Comparison, node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of an original node that depend on an input of the model."""
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker is None or maker not in comparison.original.static:
            yield value


def _values_read(
    comparison: Comparison, node: ir.Node, before: Mapping[ir.Node, ir.Node], depth: int = _LONGEST
) -> Iterator[str]:
    """Yield the names of the original values that a node reads, through new nodes as well."""
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker in comparison.provided_values:
            yield comparison.provided_values[maker]
        elif maker is None or value.name in comparison.names.makers:
            yield value.name or ""
        elif maker in before:
            # The same node, whose value has another name.
            yield from (output.name or "" for output in before[maker].outputs)
        elif depth:
            yield from _values_read(comparison, maker, before, depth - 1)


def _work_between(comparison: Comparison, name: str, further: set[str]) -> tuple[list[ir.Node], str]:
    """Return the original nodes from a value up to one of ``further`` that compute something, and that value.

    Empty where no way leads there.
    """
    makers = comparison.names.makers
    way: list[ir.Node] = []
    while len(way) < _LONGEST and (maker := makers.get(name)) is not None:
        way.append(maker)
        sources = list(_data_inputs(comparison, maker))
        if len(sources) != 1:
            break
        name = sources[0].name or ""
        work = [node for node in way if node.op_type not in REORDERINGS]
        if name in further:
            return work, name
        # An equal computation may have taken its place.
        gone = makers.get(name)
        if gone is not None and name not in comparison.makers:
            equal = (other for other in further if other in makers and makers[other].op_type == gone.op_type)
            if (source := next(equal, None)) is not None:
                return work, source
    return [], ""


def _has_other_weights(comparison: Comparison, node: ir.Node, survivor: ir.Node | None) -> bool:
    """Say whether a node reads weights that the original has not."""
    before = {value.name for value in survivor.inputs if value is not None} if survivor is not None else set()
    return any(
        value is not None
        and value.is_initializer()
        and value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and value.name not in before
        and not comparison.original.has_initializer(value.name or "")
        for value in node.inputs
    )


def _is_new_with_factor(node: ir.Node, survivor: ir.Node | None) -> bool:
    """Say whether a node that the original has not keeps a number as an attribute, as the ``alpha`` of FusedMatMul."""
    kinds = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
    return survivor is None and any(attribute.type in kinds for attribute in node.attributes.values())


def _changed_before(
    comparison: Comparison, node: ir.Node, name: str, before: Mapping[ir.Node, ir.Node]
) -> list[ir.Node]:
    """Return the nodes that make the value of this name for ``node``, up to the one with new weights that did more."""
    for value in node.inputs:
        if value is None or value.name != name:
            continue
        path: list[ir.Node] = []
        maker = value.producer()
        while maker is not None and len(path) < _LONGEST:
            path.append(maker)
            if _has_other_weights(comparison, maker, before.get(maker)):
                return path
            if maker in before:
                break
            sources = [source for source in maker.inputs if source is not None and not source.is_initializer()]
            maker = sources[0].producer() if len(sources) == 1 else None
    return []
