"""Which original nodes does each node after a foreign tool stand for?

Looks at one graph with its subgraphs, or at one function, and decides for every node its place, how that was won and
what is known of the nodes it replaced. Writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Literal, NamedTuple, Protocol

import onnx_ir as ir

from winml.modelkit.hierarchy.carry.original_graph import NOTHING, Origins, Place, Replaced, Scope, walk
from winml.modelkit.metadata_keys import NAMESPACE_KEY, TAG_KEY

__all__ = ["Match", "Way", "match_nodes"]

Way = Literal["kept", "name", "output", "fused", "replaced", "neighbours", "root"]
"""How the place of a node was won, in the order tried. ``kept``: it still carries its tag. ``name``: it is the node of
that name and operator. ``output``: it makes the value one original node made. ``fused``: its name starts with that of
an original node. ``replaced``: it stands for the original nodes between the values that are still there.
``neighbours``: it is new. ``root``: nothing is known."""

_SUFFIX_OF_ANOTHER = re.compile(r"(_token)?_?\d")
"""What follows a name in that of an unrelated node: ``MatMul`` and ``MatMul_1``, ``Cast`` and ORT's ``Cast_token_3``.
"""
_FUSED_FRONT = "fused "
"""What ONNX Runtime puts before the name of the node it fuses an activation into."""
_IN_LAYOUT = re.compile(r"(_bn|_mul)?_nchwc$")
"""What follows the name of a value in that of the node that makes it in blocked layout: ``Conv_output_0_nchwc``. So
ONNX Runtime's NchwcTransformer names its nodes; their own values bear new names, ``reorder_token_3``."""
_LONGEST_FUSION = 8
"""Most original nodes a convolution in blocked layout is looked through for. Chosen: it takes in a batch norm, a
product, a sum and an activation."""
_SEPARATORS = re.compile(r"[/_:.]")


class _Usage(Protocol):
    """Which input of which node reads a value; onnx_ir's own type has no public name."""

    @property
    def node(self) -> ir.Node: ...
    @property
    def idx(self) -> int: ...


class Match(NamedTuple):
    """What is known of one node; a tuple, since one is made for every node."""

    way: Way
    place: Place
    survivor: ir.Node | None = None
    """The original node, where the node is that node."""
    replaced: Replaced = NOTHING
    """What it stands for, where it replaced others."""
    behind: Replaced = NOTHING
    """What new nodes that feed it may stand for, as far as it tells."""


def match_nodes(
    graph: ir.Graph | ir.Function, scope: Scope, origins: Origins, outside: Callable[[], Place]
) -> dict[ir.Node, Match]:
    """Match the nodes of a graph with its subgraphs, or of a function.

    Args:
        graph: The graph after the tool.
        scope: The names of the same graph before.
        origins: The original.
        outside: Where the graph as a whole belongs; asked where nothing in it says more.
    """
    matching = _Matching(graph, scope, origins)
    matching.match_survivors()
    matching.match_by_layout_names()
    matching.match_by_values()
    matching.match_by_readers()
    matching.match_by_neighbours(outside)
    return matching.found


class _Matching:
    def __init__(self, graph: ir.Graph | ir.Function, scope: Scope, origins: Origins) -> None:
        self.found: dict[ir.Node, Match] = {}
        self._scope = scope
        self._origins = origins
        self._nodes = list(walk(graph))
        self._graph = graph
        self._claimed: dict[ir.Node, ir.Node] = {}
        """Original node → the node it is now."""

    @cached_property
    def _makers(self) -> dict[str, ir.Node]:
        return {value.name: node for node, _ in self._nodes for value in node.outputs if value.name}

    @cached_property
    def _laid_out(self) -> dict[ir.Node, str]:
        """New nodes that make a value of the original in another layout, with the name of that value."""
        found = {}
        for node, _ in self._nodes:
            name = node.name or ""
            if name not in self._scope.by_name and (suffix := _IN_LAYOUT.search(name)) is not None:
                value = name[: suffix.start()]
                if value in self._scope.makers:
                    found[node] = value
        return found

    @cached_property
    def _present(self) -> set[str]:
        """Names of the values after the tool, those in another layout included."""
        present = {value.name for value in self._graph.inputs if value.name} | self._makers.keys()
        present.update(self._laid_out.values())
        return present | self._graph.initializers.keys() if isinstance(self._graph, ir.Graph) else present

    def match_survivors(self) -> None:
        """Find the nodes that still are what they were."""
        place_of = self._origins.place_of
        for node, _ in self._nodes:
            survivor = self._survivor(node)
            if survivor is not None:
                self._claimed.setdefault(survivor, node)
            place = place_of.get(survivor) if survivor is not None else None
            tag = node.metadata_props.get(TAG_KEY)
            if tag and tag in self._origins.places:
                if place is None or place.tag != tag:
                    place = self._kept_place(node, tag)
                self.found[node] = Match("kept", place, survivor)
            elif place is not None:
                self.found[node] = Match("name", place, survivor)

    def _kept_place(self, node: ir.Node, tag: str) -> Place:
        known = self._origins.places.of_tag(tag)
        namespace = node.metadata_props.get(NAMESPACE_KEY)
        return self._origins.places.add(tag, known.module, namespace) if namespace else known

    def _survivor(self, node: ir.Node) -> ir.Node | None:
        """Return the original node of the same name and operator, unless the values say it is another."""
        original = self._scope.by_name.get(node.name or "")
        if original is None or original.op_type != node.op_type or original.domain != node.domain:
            return None
        outputs = node.outputs
        if len(outputs) == 1 and outputs[0].name and outputs[0].name == original.outputs[0].name:
            return original
        shares = False
        for value in outputs:
            maker = self._scope.makers.get(value.name or "")
            if maker is original:
                shares = True
            elif maker is not None and not self._encloses(maker, original):
                # It took over what another node made: a convolution that swallowed its batch norm.
                return None
        if shares:
            return original
        for value in original.outputs:
            heir = self._makers.get(value.name or "")
            if heir is not None and heir is not node and heir.op_type == original.op_type:
                # Names were dealt anew: the original goes on under another.
                return None
        return original

    def _encloses(self, outer: ir.Node, node: ir.Node) -> bool:
        enclosing = self._scope.enclosing.get(node)
        while enclosing is not None and enclosing is not outer:
            enclosing = self._scope.enclosing.get(enclosing)
        return enclosing is outer

    def match_by_layout_names(self) -> None:
        """Match nodes whose names tell which value they make in another layout."""
        for node, value in self._laid_out.items():
            fused = self._fused_into(node, self._scope.makers[value])
            places = frozenset(place for part in fused if (place := self._origins.place_of.get(part)) is not None)
            if node in self.found or not places:
                continue
            gone_at = partial(self._origins.replaced_by_maker_of, present=self._present, claimed=self._claimed)
            behind = _union([gone_at(value) for value in fused[-1].inputs])
            place = self._origins.places.common(places)
            if len(fused) > 1:
                self.found[node] = Match("fused", place, None, Replaced(places, len(fused)), behind)
                continue
            (only,) = fused
            survivor = only if only.op_type == node.op_type and only not in self._claimed else None
            self.found[node] = Match("output", place, survivor, Replaced(places, 1, only), behind)

    def _fused_into(self, node: ir.Node, maker: ir.Node) -> list[ir.Node]:
        """Return the original nodes from a maker back to the one of the operator of ``node``; else the maker alone.

        A convolution made the activation it took in, and is still one.
        """
        fused = [maker]
        while fused[-1].op_type != node.op_type:
            inputs = fused[-1].inputs
            gone = [self._origins.gone_maker(value, self._present, self._claimed) for value in inputs]
            earlier = [part for part in gone if part is not None]
            if len(earlier) != 1 or len(fused) == _LONGEST_FUSION:
                return [maker]
            fused += earlier
        return fused

    def match_by_values(self) -> None:
        """Match nodes that make a value of the original by what made it there."""
        for node, _ in self._nodes:
            if node in self.found:
                continue
            makers = self._original_makers(node)
            if not makers:
                continue
            replaced = _union([self._behind(maker, node) for maker in makers])
            if not replaced.places:
                continue
            only = makers[0] if replaced.nodes == 1 and len(makers) == 1 else None
            if only is not None and only.op_type == node.op_type and only not in self._claimed:
                self.found[node] = Match("output", self._origins.place_of[only], only)
                continue
            # Where new nodes come before it, they share what was replaced with it; the makers are surely its part.
            last = [place for maker in makers if (place := self._origins.place_of.get(maker)) is not None]
            is_end = bool(last) and any(self._is_new(feeder) for feeder in _feeders(node))
            own = Replaced(frozenset(last), len(last)) if is_end else replaced
            place = self._origins.places.common(own.places)
            way: Way = "output" if replaced.nodes == 1 else "replaced"
            self.found[node] = Match(way, place, None, own, replaced if replaced.nodes > 1 else NOTHING)

    def _original_makers(self, node: ir.Node) -> list[ir.Node]:
        """Return the original nodes that made the values this one makes."""
        makers = self._scope.makers
        found = [makers[value.name] for value in node.outputs if value.name in makers]
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def _is_new(self, node: ir.Node) -> bool:
        """Say whether a node works on data and makes none of the original's values."""
        if node in self.found or any(value.name in self._scope.makers for value in node.outputs):
            return False
        return any(value is not None and not value.is_initializer() for value in node.inputs)

    def _behind(self, maker: ir.Node, node: ir.Node) -> Replaced:
        if self._claimed.get(maker, node) is not node:
            # The maker is still there under its name; this node only brings its value into the form it had.
            place = self._origins.place_of.get(maker)
            return Replaced(frozenset({place}) if place is not None else frozenset(), 1)
        return self._origins.replaced_by(maker, self._present, self._claimed)

    def match_by_readers(self) -> None:
        """Match nodes whose values are new by the names they bear, and by what their readers needed."""
        for node, _ in reversed(self._nodes):
            if node in self.found:
                continue
            region = own = self._needed_by_readers(node)
            source = self._fused_source(node.name or "")
            named = self._origins.place_of.get(source) if source is not None else None
            if owners := self._weight_owners(node, region):
                own = Replaced(owners, max(len(owners), region.nodes))
            elif named is not None and {named.tag} != {place.tag for place in region.places}:
                own = Replaced(frozenset({named}), 1)
            if own.places:
                way: Way = "fused" if named in own.places else "replaced"
                place = self._origins.places.common(own.places)
                self.found[node] = Match(way, place, None, own, region if region.nodes > 1 else NOTHING)

    def _weight_owners(self, node: ir.Node, replaced: Replaced) -> frozenset[Place]:
        """Return where the weights a node reads are used in the original; narrows down what it may have replaced."""
        owners: frozenset[Place] = frozenset()
        for value in node.inputs:
            if value is not None and value.name and value.is_initializer():
                owners |= self._origins.readers_of_weight(value.name)
        if not owners:
            return owners
        if replaced.places:
            return owners & replaced.places
        return owners if len({place.tag for place in owners}) == 1 else frozenset()

    def _needed_by_readers(self, node: ir.Node) -> Replaced:
        """Return what stood in the original where the readers of a node get their values from now."""
        found = []
        for output in node.outputs:
            for use in output.uses():
                match = self.found.get(use.node)
                if match is None:
                    continue
                if match.behind.nodes:
                    found.append(match.behind)
                elif match.survivor is not None:
                    found.append(self._gone_at(match.survivor, use))
        return _union(found)

    def _gone_at(self, survivor: ir.Node, use: _Usage) -> Replaced:
        if use.idx >= len(survivor.inputs) or len(survivor.inputs) != len(use.node.inputs):
            return NOTHING
        return self._origins.replaced_by_maker_of(survivor.inputs[use.idx], self._present, self._claimed)

    def _fused_source(self, name: str) -> ir.Node | None:
        """Return the original node whose name the longest part of ``name`` is: ``<source>/MatMulAddFusion``."""
        name = name.removeprefix(_FUSED_FRONT)
        if name in self._scope.by_name:
            return self._scope.by_name[name]
        for separator in reversed(list(_SEPARATORS.finditer(name))):
            source = self._scope.by_name.get(name[: separator.start()])
            if source is not None and not _SUFFIX_OF_ANOTHER.match(name, separator.start()):
                return source
        return None

    def match_by_neighbours(self, outside: Callable[[], Place]) -> None:
        """Give new nodes the place of those that read them, or else of those that feed them."""
        for node, _ in reversed(self._nodes):
            if node not in self.found:
                self._inherit(node, [_readers(node)])
        for node, enclosing in self._nodes:
            if node in self.found:
                continue
            if self._inherit(node, [_feeders(node), _readers(node)]) or self._inherit_common(node):
                continue
            if enclosing is not None and enclosing in self.found:
                self.found[node] = Match("neighbours", self.found[enclosing].place)
            else:
                self.found[node] = Match("root", outside())

    def _inherit(self, node: ir.Node, sides: Iterable[Iterator[ir.Node]]) -> bool:
        """Take the place all neighbours on one side share."""
        for side in sides:
            places = {match.place for other in side if (match := self.found.get(other)) is not None}
            if places and len({place.tag for place in places}) == 1:
                self.found[node] = Match("neighbours", self._origins.places.common(places))
                return True
        return False

    def _inherit_common(self, node: ir.Node) -> bool:
        """Take the place all neighbours lie in."""
        for side in (_readers(node), _feeders(node)):
            places = {match.place for other in side if (match := self.found.get(other)) is not None}
            if places:
                self.found[node] = Match("neighbours", self._origins.places.common(places))
                return True
        return False


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    for output in node.outputs:
        for use in output.uses():
            yield use.node


def _feeders(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        if value is not None and (maker := value.producer()) is not None:
            yield maker


def _union(parts: list[Replaced]) -> Replaced:
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    distinct = list({id(part): part for part in parts}.values())
    if len(distinct) == 1:
        return distinct[0]
    return Replaced(frozenset().union(*(part.places for part in distinct)), sum(part.nodes for part in distinct))
