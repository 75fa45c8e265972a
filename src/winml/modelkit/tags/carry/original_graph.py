"""Index of the graph before a foreign tool: its nodes by name, by the values they produce and by position.

Does not read the nodes after the tool; ``matching`` does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.metadata_keys import MODULE_KEY, MODULES_KEY, NAMESPACE_KEY, OUR_PREFIX, TAG_KEY, TORCH_PREFIX
from winml.modelkit.tags import address
from winml.modelkit.tags.dialects import NamedNode, Scope, names_module, raise_module, read_scopes
from winml.modelkit.tags.selector import recorded_modules
from winml.modelkit.tags.tagging import all_nodes, listed_modules, node_graphs

MOST_POSITIONS = 64
"""Maximum number of modules listed for the nodes that one node replaced; beyond, only their common module is recorded.
Chosen: fused
operators replace nodes of a handful of modules. The limit keeps the work linear in the size of the graph.
"""

_JOINT = ";"
"""Separator of the values of merged nodes. Specified in docs/reference/formats.md."""
_UNTAGGED = "/-"
"""Prefix of temporary tags for the modules of a model without tags during matching; never written to a file."""

_COUNTS = frozenset({ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.STRING})
"""Types of shapes, axes and masks."""
_READS_SHAPE_ONLY = frozenset({"Shape", "Size"})
RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
"""Specified: ONNX's operators whose result differs from run to run."""


Pairs = tuple[tuple[str, str], ...]
"""Metadata keys with their values."""


@dataclass(frozen=True, eq=False)
class Position:
    """Position in the hierarchy: tag, module path, namespace, and metadata of other tools on the nodes there.

    One object per position, compared by identity.
    """

    tag: str
    module: str
    namespace: str
    foreign: Pairs = ()
    """Keys of other tools on the nodes, with their values."""
    index: int = 0
    """Index among the positions, in the order of the graph."""
    fused: tuple[str, ...] = ()
    """Paths of the modules of a fused node at this position; empty for the module alone."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules whose work a node at this position does."""
        return self.fused or (self.module,)


def is_foreign(key: str) -> bool:
    """Return True for a metadata key that names no module and was written neither by winml nor by torch."""
    return not names_module(key) and not key.startswith((OUR_PREFIX, TORCH_PREFIX))


def name_prefix(tag: str) -> str:
    """Return the start of the names of nodes in the module of a temporary tag: ``/encoder/layer.0``; else ``""``.

    >>> name_prefix("/-/-/encoder/encoder.layer.0"), name_prefix("/BertModel")
    ('/encoder/layer.0', '')
    """
    if not address.is_within(tag, _UNTAGGED):
        return ""
    paths = ["", *address.parse_tag(tag)[2:]]
    return address.format_tag(path.removeprefix(above).removeprefix(".") for above, path in pairwise(paths))


def split_values(text: str) -> list[str]:
    """Return the values of merged nodes in a metadata value."""
    return text.split(_JOINT)


def join_values(values: Iterable[str]) -> str:
    """Join the distinct values of merged nodes, at most :data:`MOST_POSITIONS`."""
    return _JOINT.join([*dict.fromkeys(values)][:MOST_POSITIONS])


def _fused_modules(node: ir.Node) -> tuple[str, ...]:
    """Return the paths of the modules of a fused node; ``()`` if the list is damaged."""
    try:
        return tuple(listed_modules(node))
    except ValueError:
        return ()


def walk(graph: ir.Graph | ir.Function) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """Yield every node in order, with the owner of its subgraph (`None` in the main graph)."""
    pending: list[tuple[Iterator[ir.Node], ir.Node | None]] = [(iter(graph), None)]
    while pending:
        nodes, enclosing = pending[-1]
        for node in nodes:
            yield node, enclosing
            if node.attributes.data and (inner := list(node_graphs(node))):
                pending += [(iter(subgraph), node) for subgraph in reversed(inner)]
                break
        else:
            pending.pop()


class Positions:
    """All positions of the original hierarchy, by tag."""

    def __init__(self, model: ir.Model) -> None:
        self._modules: dict[str, str] = {}
        self._namespaces: dict[str, str] = {}
        self._positions: dict[tuple[str, str, Pairs, tuple[str, ...]], Position] = {}
        self._of_tags: dict[str, Position] = {}
        for module in recorded_modules(model.metadata_props) or ():
            self._modules.setdefault(module.tag, module.path)

    def __contains__(self, tag: str) -> bool:
        return tag in self._modules

    def add(self, tag: str, module: str, namespace: str, foreign: Pairs = (), fused: tuple[str, ...] = ()) -> Position:
        """Return the position with this tag, namespace, foreign metadata and fused modules; add it if new."""
        key = (tag, namespace, foreign, fused)
        position = self._positions.get(key)
        if position is None:
            position = self._positions[key] = Position(tag, module, namespace, foreign, len(self._positions), fused)
            self._modules.setdefault(tag, module)
            for path, scope in _enclosing_scopes(namespace):
                self._namespaces.setdefault(path, scope)
        return position

    def add_ancestors(self, tag: str) -> None:
        """Add the ancestors of a temporary tag, so that a node can be in a module without nodes of its own."""
        for above in address.lineage(tag):
            self._modules.setdefault(above, "")

    def find_by_tag(self, tag: str) -> Position:
        """Return the position of the module of a tag, or of its nearest known ancestor."""
        while tag and tag not in self._modules:
            tag = address.format_tag(address.parse_tag(tag)[:-1])
        position = self._of_tags.get(tag)
        if position is None:
            module = self._modules.get(tag, "")
            position = self._of_tags[tag] = Position(tag, module, self._namespaces.get(module, ""))
        return position

    def root(self) -> Position:
        """Return the position of the root; if several models are composed, of the first root.

        A root that no node has is added to the modules.
        """
        for tag, module in self._modules.items():
            if module == "" and address.depth(tag) == 1:
                return self.find_by_tag(tag)
        shared = address.common_ancestor(self._modules)
        if shared:
            self._modules.setdefault(shared, "")
            return self.find_by_tag(shared)
        # Several roots: a file composed of several models. The first root is used for all.
        first_root = address.format_tag(address.parse_tag(next(iter(self._modules)))[:1])
        self._modules.setdefault(first_root, "")
        return self.find_by_tag(first_root)

    def common(self, positions: Iterable[Position]) -> Position:
        """Return the deepest common position; a single position is returned unchanged."""
        distinct = set(positions)
        if len(distinct) == 1:
            return distinct.pop()
        tags = {position.tag for position in distinct}
        position = self.find_by_tag(tags.pop() if len(tags) == 1 else address.common_ancestor(tags))
        return self.merge_foreign(position if position.tag else self.root(), distinct)

    def merge_foreign(self, position: Position, sources: Iterable[Position]) -> Position:
        """Return a position with the foreign metadata of several positions; a new position is added.

        Different values of a key are joined by ``;``.
        """
        values: dict[str, dict[str, None]] = {}
        for source in sorted(sources, key=lambda source: source.index):
            for key, text in source.foreign:
                values.setdefault(key, {}).update(dict.fromkeys(split_values(text)))
        foreign = tuple((key, join_values(texts)) for key, texts in sorted(values.items()))
        return (
            position
            if foreign == position.foreign
            else self.add(position.tag, position.module, position.namespace, foreign)
        )


def _enclosing_scopes(namespace: str) -> Iterator[tuple[str, str]]:
    """Yield module path and partial namespace for each level of a namespace: ``BertModel/encoder: BertEncoder``."""
    namespace_so_far = ""
    for level in namespace.split(address.SEPARATOR):
        namespace_so_far = f"{namespace_so_far}/{level}" if namespace_so_far else level
        path, separator, _ = level.partition(": ")
        yield (path if separator else ""), namespace_so_far


class Replaced(NamedTuple):
    """Original nodes replaced by a node after the tool. A tuple for speed: many are created."""

    positions: frozenset[Position]
    nodes: int
    """Number of nodes; a node reached on two paths may count twice."""
    only: ir.Node | None = None
    """The replaced node, if there is exactly one."""
    owners: frozenset[Position] = frozenset()
    """Positions of the products among the replaced nodes, which do the work: see :data:`PRODUCTS`."""


def tags_of(positions: Iterable[Position]) -> set[str]:
    """Return the tags of positions; positions with equal tags differ in the namespace."""
    return {position.tag for position in positions}


PRODUCTS = frozenset({
    "Conv", "ConvTranspose", "ConvInteger", "DeformConv", "MatMul", "MatMulInteger", "Gemm", "Einsum",
    "LSTM", "GRU", "RNN", "Attention", "FusedConv", "NhwcFusedConv", "FusedMatMul", "FusedGemm", "QLinearConv",
    "QLinearMatMul", "QGemm", "MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MultiHeadAttention",
    "GroupQueryAttention",
})  # fmt: skip
"""Operators that determine the module of a fused node: operators fused into a product (a bias, a batch norm, an
activation, a transposition) cost little compared with the product. A node that replaced products of one module belongs
to that module.
"""
CONVERTING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Specified: ONNX's operators between floating point and integers; they change values by rounding only."""

NOTHING = Replaced(frozenset(), 0)


@dataclass(frozen=True)
class GraphNames:
    """The names of a graph with its subgraphs, or of one function."""

    by_name: dict[str, ir.Node] = field(default_factory=dict)
    makers: dict[str, ir.Node] = field(default_factory=dict)
    """Value → the node that produces it."""
    enclosing: dict[ir.Node, ir.Node] = field(default_factory=dict)
    """Node of a subgraph → the node the subgraph belongs to."""


class OriginalModel:
    """The original model, indexed by node name and by value."""

    def __init__(self, original: ir.Model, *, with_foreign: bool = False) -> None:
        """Index a model.

        Args:
            original: The model; it is not changed.
            with_foreign: Positions include the metadata of other tools.
        """
        self.positions = Positions(original)
        self._with_foreign = with_foreign
        self.position_of: dict[ir.Node, Position] = {}
        nodes = list(all_nodes(original))
        self.is_tagged = any(node.metadata_props.get(TAG_KEY) for node in nodes)
        """True if nodes have tags; otherwise only the metadata of other tools is carried."""
        self._module_keys: dict[str, Pairs] = {}
        """For a model without tags: temporary tag of a module → keys in which another tool names the module."""
        self._scopes = {} if self.is_tagged else _scopes_of(nodes)
        self.main = self._index_names(original.graph)
        self.functions = {name: self._index_names(function) for name, function in original.functions.items()}
        self.initializers = original.graph.initializers
        self.regions: dict[ir.Node, Replaced] = {}
        """Node → the original nodes replaced by a node with the same outputs; filled on demand."""
        self._model = original
        self._readers: dict[str, tuple[ir.Node, ...]] = {}

    def _index_names(self, graph: ir.Graph | ir.Function) -> GraphNames:
        """Index the nodes and values of a graph by name; positions of the nodes are added to ``position_of``."""
        names = GraphNames()
        by_name, makers, positions = names.by_name, names.makers, self.positions
        ambiguous: set[str] = set()
        for node, enclosing in walk(graph):
            if enclosing is not None:
                names.enclosing[node] = enclosing
            if (name := node.name) and by_name.setdefault(name, node) is not node:
                ambiguous.add(name)
            for output in node.outputs:
                if output.name:
                    makers[output.name] = node
            metadata = node.metadata_props
            if tag := metadata.get(TAG_KEY):
                module, namespace = metadata.get(MODULE_KEY, ""), metadata.get(NAMESPACE_KEY, "")
                fused = _fused_modules(node) if MODULES_KEY in metadata else ()
                self.position_of[node] = positions.add(tag, module, namespace, self._foreign_pairs(metadata), fused)
            elif node in self._scopes:
                self.position_of[node] = self._untagged_position(metadata, self._scopes[node])
        for name in ambiguous:
            del by_name[name]
        return names

    def _foreign_pairs(self, metadata: Mapping[str, str]) -> Pairs:
        return tuple((key, text) for key, text in metadata.items() if is_foreign(key)) if self._with_foreign else ()

    def _untagged_position(self, metadata: Mapping[str, str], scope: Scope) -> Position:
        """Add and return the position of a node of a model without tags, in the modules named by another tool."""
        tag = _UNTAGGED + "".join(f"/{path.replace(address.SEPARATOR, '_') or '-'}" for path, _ in scope)
        self._module_keys.setdefault(tag, tuple((key, text) for key, text in metadata.items() if names_module(key)))
        self.positions.add_ancestors(tag)
        return self.positions.add(tag, "", "", self._foreign_pairs(metadata))

    def module_keys(self, tag: str) -> Pairs:
        """Return the keys in which another tool names the module of a temporary tag; ``()`` for other tags."""
        if tag not in self._module_keys:
            # No node is in the module itself: the keys of a node below are raised to it.
            below = next((below for below in self._module_keys if address.is_within(below, tag)), None)
            levels = 0 if below is None else address.depth(below) - address.depth(tag)
            pairs = self._module_keys.get(below or "", ())
            self._module_keys[tag] = tuple((key, raise_module(key, text, levels)) for key, text in pairs)
        return self._module_keys[tag]

    def owner(self, replaced: Replaced) -> Position:
        """Return the position of a node that replaced several nodes:

        of products with a common tag, else of all nodes.
        """
        if len(tags_of(replaced.owners)) != 1:
            return self.positions.common(replaced.positions)
        return self.positions.merge_foreign(self.positions.common(replaced.owners), replaced.positions)

    def owners_among(self, nodes: Iterable[ir.Node]) -> frozenset[Position]:
        """Return the positions of the products among original nodes."""
        return self.positions_among(node for node in nodes if node.op_type in PRODUCTS)

    def positions_among(self, nodes: Iterable[ir.Node]) -> frozenset[Position]:
        """Return the positions of original nodes."""
        return frozenset(position for node in nodes if (position := self.position_of.get(node)) is not None)

    def readers_of_weight(self, name: str) -> tuple[ir.Node, ...]:
        """Return the nodes that compute with the weight of this name; conversions of the weight are followed.

        Scalars and shapes do not count as weights: tools merge equal constants, so unrelated nodes share a constant.
        """
        readers = self._readers.get(name)
        if readers is None:
            weight = self.initializers.get(name)
            found: dict[ir.Node, None] = {}
            pending = [weight] if weight is not None and _is_weight(weight) else []
            while pending:
                for node in pending.pop().consumers():
                    if node in self.static:
                        pending += node.outputs
                    else:
                        found[node] = None
            readers = self._readers[name] = tuple(found)
        return readers

    @cached_property
    def static(self) -> set[ir.Node]:
        """Nodes independent of the values of model inputs: constants, shapes, and nodes computed from either."""
        static: set[ir.Node] = set()
        for node in all_nodes(self._model):
            if _is_static(node, static):
                static.add(node)
        return static


def _scopes_of(nodes: Sequence[ir.Node]) -> dict[ir.Node, Scope]:
    """Return node → modules named by another tool."""
    _, scopes = read_scopes([NamedNode(node.name or "", node.op_type, node.metadata_props) for node in nodes])
    return dict(zip(nodes, scopes, strict=True))


def _is_static(node: ir.Node, static: Container[ir.Node]) -> bool:
    """Return True if a node depends only on constants, shapes and nodes in ``static``, and is not random."""
    if node.op_type in _READS_SHAPE_ONLY:
        return True
    if node.op_type in RANDOM_OPERATORS or next(node_graphs(node), None) is not None:
        return False
    return all(
        value is None or (value.is_initializer() if (maker := value.producer()) is None else maker in static)
        for value in node.inputs
    )


def _is_weight(value: ir.Value) -> bool:
    """Return True for a constant that is no scalar, shape or mask."""
    tensor = value.const_value
    return tensor is not None and tensor.dtype not in _COUNTS and any(size != 1 for size in tensor.shape)
