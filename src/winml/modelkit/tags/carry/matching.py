"""Matches every node of a graph that a tool wrote with the corresponding nodes of the original graph.

Works on one graph with its subgraphs, or on one function. Decides for every node its position in the hierarchy, the
rule that found the position, and the original nodes that the node replaced. Writes nothing; ``carrying`` writes the
tags. Why several anchors are tried, in this order: docs/decisions/0007-carry-by-anchors.md.

Original nodes and values are in the graph that the tool read; nodes and values *after the tool* are in the graph that
it wrote. An original node or value without a counterpart after the tool is *gone*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

import onnx_ir as ir

from winml.modelkit.metadata_keys import NAMESPACE_KEY, TAG_KEY
from winml.modelkit.tags import address
from winml.modelkit.tags.carry.original_graph import (
    CONVERTING,
    MOST_POSITIONS,
    NOTHING,
    GraphNames,
    OriginalModel,
    Position,
    Replaced,
    tags_of,
    walk,
)

_REORDERINGS = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"})
"""Operators that only reorder or convert values; if a tool removes one, no other node absorbs its work."""
_LAYOUT_CHANGES = frozenset({"ReorderInput", "ReorderOutput"})
"""Operators of ONNX Runtime that change the layout of a value and compute nothing."""
_LONGEST = 4
"""Maximum length of a path that is searched from a value back to an earlier one, in operators. Chosen: scale, shift and
two reorderings.
"""
_LARGEST_REGION = 32
"""Maximum number of original nodes searched for the values they read. Chosen: more than a fused layer replaces."""


def _find_absorbed_work(
    matching: _Matching, matched_nodes: Mapping[ir.Node, tuple[ir.Node | None, tuple[ir.Node, ...]]]
) -> dict[ir.Node, list[ir.Node]]:
    """Return node after the tool → original nodes whose work the node absorbed.

    A tool may fold a product with constants into the weights of the layer before or after the product. The reader of
    the product (the layer after it, or any reader if the layer is before it) then reads a value from further back in
    the original graph. The nodes in between now belong to the layer. If no weights changed, the removed nodes were
    no-ops.

    Args:
        matching: Both graphs, and the matches found so far.
        matched_nodes: Node after the tool → its surviving original node (or None), and the original producers of its
            outputs.
    """
    absorbed: dict[ir.Node, list[ir.Node]] = {}
    original_of = {after: original for original, after in matching.claimed.items()}
    for node, (survivor, makers) in matched_nodes.items():
        if survivor is not None and _has_equal_inputs(node, survivor):
            continue
        boundary = _find_boundary_values(matching, makers, is_same=survivor is not None)
        read_values = set(_values_read(matching, node, original_of))
        # Values that only the original nodes read, and values that only this node reads, from further back.
        nearer, further = boundary - read_values, read_values - boundary
        if not nearer or not further:
            continue
        for name in nearer:
            work, source = _find_work_between(matching, name, further)
            if not work:
                continue
            # If the layer before has new weights, the tool folded the work into it, otherwise into this node.
            takers = [] if name in matching.makers else _find_changed_nodes(matching, node, source, original_of)
            if not takers and (_has_other_weights(matching, node, survivor) or _is_new_with_factor(node, survivor)):
                takers = [node]
            for taker in (node for node in takers if node.op_type not in _LAYOUT_CHANGES):
                absorbed.setdefault(taker, []).extend(work)
    return absorbed


def _has_equal_inputs(node: ir.Node, survivor: ir.Node) -> bool:
    """Return True if both nodes read values of equal names."""
    return len(node.inputs) == len(survivor.inputs) and all(
        (value.name if value is not None else None) == (before.name if before is not None else None)
        for value, before in zip(node.inputs, survivor.inputs, strict=True)
    )


def _find_boundary_values(matching: _Matching, makers: Iterable[ir.Node], *, is_same: bool) -> set[str]:
    """Return the names of the values that a region of original nodes reads from the outside.

    Args:
        matching: Both graphs, and the matches found so far.
        makers: Original nodes of the region.
        is_same: The region is one node that still exists; otherwise, gone producers belong to the region, too.
    """
    names: set[str] = set()
    pending, visited = list(makers), set(makers)
    while pending and len(visited) <= _LARGEST_REGION:
        node = pending.pop()
        for value in _data_inputs(matching, node):
            maker = matching.gone_maker(value)
            if maker is None or is_same:
                names.add(value.name or "")
            elif maker not in visited:
                visited.add(maker)
                pending.append(maker)
    return names


def _data_inputs(matching: _Matching, node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of an original node that depend on an input of the model."""
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker is None or maker not in matching.original.static:
            yield value


def _values_read(
    matching: _Matching, node: ir.Node, original_of: Mapping[ir.Node, ir.Node], depth: int = _LONGEST
) -> Iterator[str]:
    """Yield the names of the original values that a node reads, directly or through new nodes.

    Args:
        matching: The matching.
        node: The node.
        original_of: Node → the same node in the original graph.
        depth: Largest number of new nodes in between.
    """
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker in matching.provided_values:
            yield matching.provided_values[maker]
        elif maker is None or value.name in matching.names.makers:
            yield value.name or ""
        elif maker in original_of:
            # The same node, whose value has another name.
            yield from (output.name or "" for output in original_of[maker].outputs)
        elif depth:
            yield from _values_read(matching, maker, original_of, depth - 1)


def _find_work_between(matching: _Matching, name: str, further: set[str]) -> tuple[list[ir.Node], str]:
    """Return the original nodes that compute a value from one of the values ``further``, and the name of that one.

    Reorderings are left out. If the path reaches a gone value, a value in ``further`` from an equal operator counts as
    the same. ``([], "")`` if no path of single inputs leads to ``further``.

    Args:
        matching: The matching; unchanged.
        name: Name of the value to start from.
        further: Names of the values at which the search ends.
    """
    makers = matching.names.makers
    path: list[ir.Node] = []
    while len(path) < _LONGEST and (maker := makers.get(name)) is not None:
        path.append(maker)
        sources = list(_data_inputs(matching, maker))
        if len(sources) != 1:
            break
        name = sources[0].name or ""
        work = [node for node in path if node.op_type not in _REORDERINGS]
        if name in further:
            return work, name
        # An equal computation may have replaced the value.
        gone = makers.get(name)
        if gone is not None and name not in matching.makers:
            equal = (
                value_name
                for value_name in further
                if value_name in makers and makers[value_name].op_type == gone.op_type
            )
            if (source := next(equal, None)) is not None:
                return work, source
    return [], ""


def _has_other_weights(matching: _Matching, node: ir.Node, survivor: ir.Node | None) -> bool:
    """Return True if a node reads floating-point weights that the original model does not have."""
    before = {value.name for value in survivor.inputs if value is not None} if survivor is not None else set()
    return any(
        value is not None
        and value.is_initializer()
        and value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and value.name not in before
        and value.name not in matching.original.initializers
        for value in node.inputs
    )


def _is_new_with_factor(node: ir.Node, survivor: ir.Node | None) -> bool:
    """Return True if a new node has a float attribute, such as the ``alpha`` of FusedMatMul."""
    kinds = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
    return survivor is None and any(attribute.type in kinds for attribute in node.attributes.values())


def _find_changed_nodes(
    matching: _Matching, node: ir.Node, name: str, original_of: Mapping[ir.Node, ir.Node]
) -> list[ir.Node]:
    """Return the nodes from the producer of an input of ``node`` back to the nearest node with new weights.

    ``[]`` without such a node.

    Args:
        matching: The matching.
        node: The node.
        name: Name of the input.
        original_of: Node → the same node in the original graph.
    """
    for value in node.inputs:
        if value is None or value.name != name:
            continue
        path: list[ir.Node] = []
        maker = value.producer()
        while maker is not None and len(path) < _LONGEST:
            path.append(maker)
            if _has_other_weights(matching, maker, original_of.get(maker)):
                return path
            if maker in original_of:
                break
            sources = [source for source in maker.inputs if source is not None and not source.is_initializer()]
            maker = sources[0].producer() if len(sources) == 1 else None
    return []


Way = Literal["kept", "name", "output", "fused", "replaced", "neighbours", "root"]
"""Rule that found the position of a node, in the order tried.

* ``kept``: the node still carries its tag.
* ``name``: an original node has the same name and operator.
* ``output``: the node produces a value that one original node produced.
* ``fused``: the node's name starts with the name of an original node.
* ``replaced``: the node stands for the original nodes between the values that still exist.
* ``neighbours``: the node is new and gets the position of the nodes around it.
* ``root``: no other rule applies.
"""

_UNRELATED_SUFFIX = re.compile(r"(_token)?_?\d")
"""Suffix of an unrelated node's name: ``MatMul_1`` does not come from ``MatMul``, nor ``Cast_token_3`` (ORT's)
from ``Cast``."""
_FUSED_PREFIX = "fused "
"""Prefix of ONNX Runtime on the name of the node into which an activation is fused."""
_LAYOUT_SUFFIX = re.compile(r"(_bn|_mul)?_nchwc$")
"""ONNX Runtime's NchwcTransformer names a node after the value it produces in blocked layout, with this suffix:
``Conv_output_0_nchwc``. The values of such nodes get new names: ``reorder_token_3``."""
_LONGEST_FUSION = 8
"""Maximum number of original nodes that a convolution in blocked layout may replace. Chosen: a convolution absorbs a
batch norm, a product, a sum and an activation.
"""
_SEPARATORS = re.compile(r"[/_:.]")


class Match(NamedTuple):
    """Match of a node. A tuple for speed: every node gets a match."""

    way: Way
    position: Position
    survivor: ir.Node | None = None
    """The original node that this node still is; its inputs may have changed."""
    replaced: Replaced = NOTHING
    """The original nodes that the node replaced."""
    upstream: Replaced = NOTHING
    """The original nodes that new nodes before this node may replace."""


def match_nodes(
    graph: ir.Graph | ir.Function,
    names: GraphNames,
    original: OriginalModel,
    outside: Callable[[], Position],
    *,
    trusts_tags: bool = True,
) -> dict[ir.Node, Match]:
    """Match the nodes of a graph with its subgraphs, or of a function.

    Args:
        graph: The graph after the tool.
        names: The names of the same graph before the tool.
        original: The model before the tool.
        outside: Returns the position of the graph as a whole; called for nodes without any other match.
        trusts_tags: A node that still has a tag has its position; otherwise names and values alone decide.
    """
    matching = _Matching(graph, names, original)
    _match_survivors(matching, trusts_tags=trusts_tags)
    _match_by_layout_names(matching)
    _match_by_values(matching)
    _match_by_readers(matching)
    _add_absorbed_work(matching)
    _match_by_neighbours(matching, outside)
    return matching.matches


class _Matching:
    """The graph, the original model, and the matches so far. The ``_match_*`` functions add to ``matches`` in place."""

    def __init__(self, graph: ir.Graph | ir.Function, names: GraphNames, original: OriginalModel) -> None:
        self.matches: dict[ir.Node, Match] = {}
        self.names = names
        self.original = original
        self.nodes = list(walk(graph))
        self.graph = graph
        self.claimed: dict[ir.Node, ir.Node] = {}
        """Original node → the same node after the tool."""
        self.absorbed_readers: dict[ir.Node, list[ir.Node]] = {}
        """New node in another layout → original nodes behind the value in its name that it also computes, in order."""
        self.copied_positions: dict[ir.Node, Position] = {}
        """New node that produces an original value → position of the tag on the node, which a tool may have copied."""
        self.relaid_makers: set[ir.Node] = set()
        """Original nodes replaced by new nodes in another layout."""

    @cached_property
    def makers(self) -> dict[str, ir.Node]:
        """Value name → producer after the tool."""
        return {value.name: node for node, _ in self.nodes for value in node.outputs if value.name}

    @cached_property
    def relaid_values(self) -> dict[ir.Node, str]:
        """New node → name of the original value produced in another layout."""
        relaid_values = {}
        for node, _ in self.nodes:
            name = node.name or ""
            if name not in self.names.by_name and (suffix := _LAYOUT_SUFFIX.search(name)) is not None:
                value_name = name[: suffix.start()]
                if value_name in self.names.makers:
                    relaid_values[node] = value_name
        return relaid_values

    @cached_property
    def present(self) -> set[str]:
        """Names of the values after the tool, including values in another layout."""
        present = self._named_values | set(self.provided_values.values())
        return present | self.graph.initializers.keys() if isinstance(self.graph, ir.Graph) else present

    @cached_property
    def _named_values(self) -> set[str]:
        """Names of inputs and produced values after the tool, and of the values in the names of nodes in another
        layout.
        """
        names = {value.name for value in self.graph.inputs if value.name} | self.makers.keys()
        return names | set(self.relaid_values.values())

    @cached_property
    def provided_values(self) -> dict[ir.Node, str]:
        """New node → name of the original value that the node provides in another layout, after absorbed operators."""
        provided = dict(self.relaid_values)
        for node in self.relaid_values:
            absorbed = self._find_absorbed_readers(node, provided)
            if absorbed:
                self.absorbed_readers[node] = absorbed
                provided[node] = absorbed[-1].outputs[0].name or ""
        return provided

    def _find_absorbed_readers(self, node: ir.Node, provided: Mapping[ir.Node, str]) -> list[ir.Node]:
        """Return the original nodes behind the value in a node's name that the node also computes.

        A convolution in blocked layout may add another input and apply the activation named by an attribute.
        """
        maker = self.names.makers[self.relaid_values[node]]
        inner = _find_fused_originals(self, node, maker, self._named_values)
        operands = {name for value in node.inputs for name in _provided_names(value, provided)}
        operands -= {value.name or "" for original in inner for value in original.inputs if value is not None}
        activations = {
            attribute.as_string() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.STRING
        } - {original.op_type for original in inner}
        absorbed: list[ir.Node] = []
        while len(absorbed) < _LONGEST_FUSION:
            uses = maker.outputs[0].uses()
            reader = next(iter(uses)).node if len(uses) == 1 else None
            if reader is None or len(reader.outputs) != 1 or not self._is_gone_into(reader, node):
                break
            side_inputs = {value.name for value in reader.inputs if value is not None} - {maker.outputs[0].name}
            is_sum = bool(side_inputs) and side_inputs <= operands
            if not (is_sum or reader.op_type in activations):
                break
            absorbed.append(reader)
            maker = reader
        return absorbed

    def _is_gone_into(self, original: ir.Node, node: ir.Node) -> bool:
        """Return True if an original node is gone, and its value is gone or only a copy of the output of ``node``."""
        name = original.outputs[0].name or ""
        successor = self.makers.get(name)
        if original in self.claimed or (successor is None and name in self._named_values):
            return False
        return successor is None or any(value is node.outputs[0] for value in successor.inputs)

    def gone_maker(self, value: ir.Value | None, present: Container[str] | None = None) -> ir.Node | None:
        """Return the producer of a value if both are gone and the producer depends on model inputs; otherwise None.

        Args:
            value: A value of the original.
            present: Names of the existing values; default: all values the tool wrote.
        """
        if value is None or value.name in (self.present if present is None else present):
            return None
        maker = value.producer()
        return None if maker is None or maker in self.claimed or maker in self.original.static else maker

    def replaced_by_maker_of(self, value: ir.Value | None) -> Replaced:
        """Return the original nodes replaced up to a gone value; ``NOTHING`` for an existing value."""
        maker = self.gone_maker(value)
        return self.replaced_by(maker) if maker is not None else NOTHING

    def replaced_by(self, node: ir.Node) -> Replaced:
        """Return the original nodes that are replaced by a new producer of the outputs of ``node``.

        The result contains the original ``node`` and all gone producers of needed values. The walk stops at existing
        values and nodes, and at nodes independent of model inputs: a tool may precompute constants and shapes, so they
        do not indicate a module.
        """
        regions = self.original.regions
        pending, started = [node], set[ir.Node]()
        while pending:
            current = pending[-1]
            if current in regions:
                pending.pop()
                continue
            started.add(current)
            makers = [maker for value in current.inputs if (maker := self.gone_maker(value)) is not None]
            # A started but unfinished node depends on itself: the graph has a cycle.
            unvisited = [maker for maker in makers if maker not in regions and maker not in started]
            pending += unvisited
            if not unvisited:
                regions[current] = self._join_region(current, makers)
        return regions[node]

    def _join_region(self, node: ir.Node, makers: list[ir.Node]) -> Replaced:
        """Return the region of a node joined with the finished regions of its gone producers."""
        positions = self.original.positions_among([node])
        owners = self.original.owners_among([node])
        if not makers:
            return Replaced(positions, 1, node, owners)
        regions = [self.original.regions.get(maker, NOTHING) for maker in makers]
        for region in regions:
            # A node that only converts a value of another module does no work of that module.
            if region.only is None or region.only.op_type not in CONVERTING or not positions:
                positions |= region.positions
                owners |= region.owners
        if len(positions) > MOST_POSITIONS:
            positions = frozenset({self.original.positions.common(positions)})
        return Replaced(positions, 1 + sum(region.nodes for region in regions), owners=owners)


def _match_survivors(matching: _Matching, *, trusts_tags: bool) -> None:
    """Match the nodes that retain their tag, if trusted, or their name and operator."""
    original = matching.original
    for node, _ in matching.nodes:
        survivor = _find_survivor(matching, node)
        if survivor is not None:
            matching.claimed.setdefault(survivor, node)
        position = original.position_of.get(survivor) if survivor is not None else None
        tag = node.metadata_props.get(TAG_KEY) if trusts_tags else None
        if tag and tag in original.positions:
            if position is None or position.tag != tag:
                position = _previous_position(matching, node, tag)
            if survivor is None and any(value.name in matching.names.makers for value in node.outputs):
                # A tool that fuses may have copied the tag of one node only.
                matching.copied_positions[node] = position
            else:
                matching.matches[node] = Match("kept", position, survivor)
        elif position is not None:
            matching.matches[node] = Match("name", position, survivor)


def _previous_position(matching: _Matching, node: ir.Node, tag: str) -> Position:
    """Return the position named by the tag of a node after the tool, with the node's namespace."""
    positions = matching.original.positions
    position = positions.find_by_tag(tag)
    namespace = node.metadata_props.get(NAMESPACE_KEY)
    return positions.add(tag, position.module, namespace, position.foreign) if namespace else position


def _find_survivor(matching: _Matching, node: ir.Node) -> ir.Node | None:
    """Return the original node of the same name and operator; `None` if the values prove a different node."""
    original = matching.names.by_name.get(node.name or "")
    if original is None or original.op_type != node.op_type or original.domain != node.domain:
        return None
    outputs = node.outputs
    if len(outputs) == 1 and outputs[0].name and outputs[0].name in {value.name for value in original.outputs[:1]}:
        return original
    shares_output = False
    for value in outputs:
        maker = matching.names.makers.get(value.name or "")
        if maker is original:
            shares_output = True
        elif maker is not None and not (
            _is_enclosed_by(matching.names, original, maker) or _is_reordered(original, maker, node)
        ):
            # It now produces the output of another node, as a convolution does that absorbed its batch norm.
            return None
    if shares_output:
        return original
    for value in original.outputs:
        successor = matching.makers.get(value.name or "")
        if successor is not None and successor is not node and successor.op_type == original.op_type:
            # The tool renumbered the names: the original node continues under another name.
            return None
    return original


def _is_reordered(original: ir.Node, maker: ir.Node, node: ir.Node) -> bool:
    """Return True if ``node`` produces the value of ``maker`` only because a reordering in between was removed.

    Args:
        original: Original node that ``node`` stands for.
        maker: Original producer of the value that ``node`` produces.
        node: Node of the new graph.
    """
    if node.op_type in _REORDERINGS:
        return False
    while maker is not original:
        source = maker.inputs[0] if maker.inputs and maker.op_type in _REORDERINGS else None
        earlier = source.producer() if source is not None else None
        if earlier is None:
            return False
        maker = earlier
    return True


def _is_enclosed_by(names: GraphNames, node: ir.Node, outer: ir.Node) -> bool:
    enclosing = names.enclosing.get(node)
    while enclosing is not None and enclosing is not outer:
        enclosing = names.enclosing.get(enclosing)
    return enclosing is outer


def _match_by_layout_names(matching: _Matching) -> None:
    """Match nodes named after a value produced in another layout."""
    original = matching.original
    for node, value_name in matching.relaid_values.items():
        fused = _find_fused_originals(matching, node, matching.names.makers[value_name], matching.present)
        fused = [*reversed(matching.absorbed_readers.get(node, ())), *fused]
        matching.relaid_makers.update(fused)
        positions = original.positions_among(fused)
        if node in matching.matches or not positions:
            continue
        upstream = _unite_regions([matching.replaced_by_maker_of(value) for value in fused[-1].inputs])
        replaced = Replaced(positions, len(fused), owners=original.owners_among(fused))
        position = original.owner(replaced)
        if len(fused) > 1:
            matching.matches[node] = Match("fused", position, None, replaced, upstream)
            continue
        (only,) = fused
        survivor = only if only.op_type == node.op_type and only not in matching.claimed else None
        matching.matches[node] = Match("output", position, survivor, Replaced(positions, 1, only), upstream)


def _provided_names(value: ir.Value | None, provided: Mapping[ir.Node, str]) -> Iterator[str]:
    """Yield the names of the original values that a value may hold in another layout."""
    if value is None:
        return
    yield value.name or ""
    maker = value.producer()
    if maker is not None and maker in provided:
        yield provided[maker]
    elif maker is not None and len(maker.inputs) == 1 and maker.inputs[0] is not None:
        # A separate node converts the value into the layout.
        yield maker.inputs[0].name or ""


def _find_fused_originals(matching: _Matching, node: ir.Node, maker: ir.Node, present: Container[str]) -> list[ir.Node]:
    """Return the original nodes from ``maker`` back to the one with the operator of ``node``; else ``maker`` alone.

    A convolution that absorbed its activation produces the activation's output and keeps its own operator.

    Args:
        matching: The matching.
        node: The fused node.
        maker: Original node to start from.
        present: Names of the values that still exist.
    """
    fused = [maker]
    while fused[-1].op_type != node.op_type:
        gone_makers = [matching.gone_maker(value, present) for value in fused[-1].inputs]
        earlier = [gone_maker for gone_maker in gone_makers if gone_maker is not None]
        if len(earlier) != 1 or len(fused) == _LONGEST_FUSION:
            return [maker]
        fused += earlier
    return fused


def _match_by_values(matching: _Matching) -> None:
    """Match nodes that produce an original value with the original producers."""
    original = matching.original
    for node, _ in matching.nodes:
        if node in matching.matches:
            continue
        makers = _find_original_makers(matching, node)
        region = _unite_regions([_find_region(matching, maker, node) for maker in makers])
        copied = matching.copied_positions.get(node)
        if copied is not None and not _is_above(original.positions.common(region.positions or {copied}), copied):
            matching.matches[node] = Match("kept", copied)
            continue
        if not region.positions:
            continue
        only = makers[0] if region.nodes == 1 and len(makers) == 1 else None
        if only is not None and only.op_type == node.op_type and only not in matching.claimed:
            matching.matches[node] = Match("output", original.position_of[only], only)
            continue
        # New nodes before this node share the replaced region; the makers certainly belong to this node.
        maker_positions = [position for maker in makers if (position := original.position_of.get(maker)) is not None]
        ends_region = bool(maker_positions) and any(_is_new(matching, feeder) for feeder in _feeding_nodes(node))
        replaced = region
        if ends_region:
            replaced = Replaced(frozenset(maker_positions), len(maker_positions), owners=original.owners_among(makers))
        position = original.owner(replaced)
        way: Way = "output" if region.nodes == 1 else "replaced"
        matching.matches[node] = Match(way, position, None, replaced, region if region.nodes > 1 else NOTHING)


def _is_above(position: Position, descendant: Position) -> bool:
    """Return True if a position contains another one with a different tag."""
    return position.tag != descendant.tag and address.is_within(descendant.tag, position.tag)


def _find_original_makers(matching: _Matching, node: ir.Node) -> list[ir.Node]:
    """Return the original producers of the values produced by a node."""
    makers = matching.names.makers
    node_makers = [makers[value.name] for value in node.outputs if value.name in makers]
    return node_makers if len(node_makers) < 2 else list(dict.fromkeys(node_makers))


def _is_new(matching: _Matching, node: ir.Node) -> bool:
    """Return True if a node depends on data and produces no value of the original."""
    if node in matching.matches or any(value.name in matching.names.makers for value in node.outputs):
        return False
    return any(value is not None and not value.is_initializer() for value in node.inputs)


def _find_region(matching: _Matching, maker: ir.Node, node: ir.Node) -> Replaced:
    """Return the original nodes replaced by ``node``, which produces the value that ``maker`` produced originally."""
    if matching.claimed.get(maker, node) is not node or maker in matching.relaid_makers:
        # The maker still exists, under its name or in another layout; this node only converts its value back.
        return Replaced(matching.original.positions_among([maker]), 1)
    return matching.replaced_by(maker)


def _match_by_readers(matching: _Matching) -> None:
    """Match nodes with new values by name, by weights, and by the inputs of readers."""
    original = matching.original
    for node, _ in reversed(matching.nodes):
        if node in matching.matches:
            continue
        region = replaced = _find_needed_region(matching, node)
        fused_original = _find_original_in_name(matching.names, node.name or "")
        named_position = original.position_of.get(fused_original) if fused_original is not None else None
        upstream = region if region.nodes > 1 else NOTHING
        if readers := _find_weight_readers(original, node, region):
            owners = original.positions_among(readers)
            replaced = Replaced(owners, max(len(owners), region.nodes), owners=region.owners & owners)
            # New nodes before this one replace nodes before the readers of its weight.
            upstream = _unite_regions(
                [matching.replaced_by_maker_of(value) for reader in readers for value in reader.inputs]
            )
        elif named_position is not None and {named_position.tag} != {position.tag for position in region.positions}:
            replaced = Replaced(frozenset({named_position}), 1)
        if replaced.positions:
            way: Way = "fused" if named_position in replaced.positions else "replaced"
            position = original.owner(replaced)
            matching.matches[node] = Match(way, position, None, replaced, upstream)


def _find_weight_readers(original: OriginalModel, node: ir.Node, region: Replaced) -> list[ir.Node]:
    """Return the nodes that read a node's weights in the original, restricted to the replaced region.

    Without a region, the nodes are returned if they have one tag.
    """
    readers: dict[ir.Node, None] = {}
    for value in node.inputs:
        if value is not None and value.name and value.is_initializer():
            readers |= dict.fromkeys(original.readers_of_weight(value.name))
    if region.positions:
        inside = [reader for reader in readers if original.position_of.get(reader) in region.positions]
        # The positions of a large region are one ancestor of them.
        return inside or [reader for reader in readers if _is_inside(original.position_of.get(reader), region)]
    return list(readers) if len(tags_of(original.positions_among(readers))) == 1 else []


def _is_inside(position: Position | None, region: Replaced) -> bool:
    """Return True if a position is below a position of a region."""
    return position is not None and any(_is_above(outer, position) for outer in region.positions)


def _find_needed_region(matching: _Matching, node: ir.Node) -> Replaced:
    """Return the original nodes that produced the inputs of the readers of ``node``."""
    regions = []
    for output in node.outputs:
        for use in output.uses():
            match = matching.matches.get(use.node)
            if match is None:
                continue
            if match.upstream.nodes:
                regions.append(match.upstream)
            elif match.survivor is not None:
                inputs = match.survivor.inputs
                # With another number of inputs, their positions do not correspond.
                if use.idx < len(inputs) == len(use.node.inputs):
                    regions.append(matching.replaced_by_maker_of(inputs[use.idx]))
    return _unite_regions(regions)


def _find_original_in_name(names: GraphNames, name: str) -> ir.Node | None:
    """Return the original node whose name is the longest prefix of ``name``, such as ``<original>/MatMulAddFusion``.

    `None` without such a node.
    """
    name = name.removeprefix(_FUSED_PREFIX)
    if name in names.by_name:
        return names.by_name[name]
    for separator in reversed(list(_SEPARATORS.finditer(name))):
        original = names.by_name.get(name[: separator.start()])
        if original is not None and not _UNRELATED_SUFFIX.match(name, separator.start()):
            return original
    return None


def _add_absorbed_work(matching: _Matching) -> None:
    """Add the modules of absorbed nodes to the matches of the absorbing nodes."""
    matches, original = matching.matches, matching.original
    matched_nodes = {
        node: (match.survivor, makers)
        for node, match in matches.items()
        if match.way != "kept"
        and (
            makers := (match.survivor,) if match.survivor is not None else tuple(_find_original_makers(matching, node))
        )
    }
    for node, work in _find_absorbed_work(matching, matched_nodes).items():
        match = matches.get(node)
        if match is None:
            continue
        positions = original.positions_among(work) | (match.replaced.positions or {match.position})
        owners = match.replaced.owners | original.owners_among(work)
        if match.survivor is not None:
            owners |= original.owners_among([match.survivor])
        replaced = Replaced(positions, len(positions), owners=owners)
        position = original.owner(replaced)
        is_moved = position.tag != match.position.tag or (owners and len(tags_of(positions)) > 1)
        if is_moved or position.foreign != match.position.foreign:
            matches[node] = Match("replaced", position, None, replaced, match.upstream)


def _match_by_neighbours(matching: _Matching, outside: Callable[[], Position]) -> None:
    """Assign new nodes the common position of their readers, else of their producers, else of the whole graph.

    (De)QuantizeLinear gets the position of its input's producer, regardless of its readers.
    """
    matches = matching.matches
    for node, _ in matching.nodes:
        if node not in matches and node.op_type in CONVERTING and node.inputs and node.inputs[0] is not None:
            maker = node.inputs[0].producer()
            if maker in matches:
                matches[node] = Match("neighbours", matches[maker].position)
    for node, _ in reversed(matching.nodes):
        if node not in matches and len(tags_of(positions := _matched_positions(matching, _reader_nodes(node)))) == 1:
            matches[node] = Match("neighbours", matching.original.positions.common(positions))
    for node, enclosing in matching.nodes:
        if node in matches:
            continue
        feeding_positions, reading_positions = (
            _matched_positions(matching, neighbours) for neighbours in (_feeding_nodes(node), _reader_nodes(node))
        )
        shared = next(
            (positions for positions in (feeding_positions, reading_positions) if len(tags_of(positions)) == 1),
            reading_positions or feeding_positions,
        )
        if shared:
            matches[node] = Match("neighbours", matching.original.positions.common(shared))
        elif enclosing is not None and enclosing in matches:
            matches[node] = Match("neighbours", matches[enclosing].position)
        else:
            matches[node] = Match("root", outside())


def _matched_positions(matching: _Matching, nodes: Iterable[ir.Node]) -> set[Position]:
    return {match.position for node in nodes if (match := matching.matches.get(node)) is not None}


def _reader_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the readers of a node's outputs."""
    for output in node.outputs:
        for use in output.uses():
            yield use.node


def _feeding_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the producers of a node's inputs."""
    for value in node.inputs:
        if value is not None and (maker := value.producer()) is not None:
            yield maker


def _unite_regions(regions: list[Replaced]) -> Replaced:
    """Join several regions into one."""
    if len(regions) < 2:
        return regions[0] if regions else NOTHING
    distinct = list({id(region): region for region in regions}.values())
    if len(distinct) == 1:
        return distinct[0]
    positions = frozenset().union(*(region.positions for region in distinct))
    owners = frozenset().union(*(region.owners for region in distinct))
    return Replaced(positions, sum(region.nodes for region in distinct), owners=owners)
