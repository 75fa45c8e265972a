"""An ONNX file as one side of a comparison: its modules, their boundary values, and a session for them.

Runs the graph node by node as written, so that every requested value exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.by_module.boundaries import CallKey, ModuleBoundary
from winml.modelkit.compare.by_module.sides import GROUP_BYTES, WITHOUT_NODES
from winml.modelkit.errors import InputError
from winml.modelkit.metadata_keys import MODULE_KEY, TAG_KEY
from winml.modelkit.onnx.contents import PlacedNode, read_contents
from winml.modelkit.onnx.contexts import random_nodes, refuse_compiled_modules
from winml.modelkit.onnx.cutting import ModuleParts, Refusal
from winml.modelkit.onnx.files.graph_reading import graph_of, merge_duplicate_keys
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.onnx.validity import refuse_cycles
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS
from winml.modelkit.onnx.widening import computes_in
from winml.modelkit.ort.decoding.inputs import state_feeds
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.quantized_states import QuantizedStates
from winml.modelkit.ort.sessions import CPU, Session
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.tagging import listed_modules

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, None})
"""Types of values with a numeric error; ``None`` is unknown before a run."""


_FLOAT_BYTES = 4
"""Bytes per element of most recorded values."""


class OnnxSide:
    """One ONNX file.

    Attributes:
        path: The file.
        structure: The file without its larger weights.
        output_names: Names of its outputs.
        shown: Name of the side in messages.
        boundaries: (tag, call number) → boundary of the module call.
        value_names: Values of the main graph.
        nodes: All nodes, including nodes of subgraphs.
        tree: The modules, and the module of each of ``nodes``; ``None`` without ``by_module``.
        is_by_node: True if each node counts as a module.
    """

    def __init__(
        self,
        path: Path,
        *,
        by_module: bool,
        shown: str = "",
        as_written: bool = True,
        provider: ChosenProvider | None = None,
    ) -> None:
        """Read the file; with ``by_module`` also its modules.

        Args:
            path: The file.
            by_module: Read the modules.
            shown: Name of the side in messages; default: the path.
            as_written: Run node by node as written; else with ONNX Runtime's default optimizations. Always as written
                if inner values are requested.
            provider: Execution provider; ``None``: the CPU provider.

        Raises:
            UsageError: modules are requested, but compiled by a provider.
            InputError: the file is no ONNX model, or its graph has a cycle.
        """
        self.path = path
        self.shown = shown or str(path)
        self.boundaries: dict[CallKey, ModuleBoundary] = {}
        self.value_names: frozenset[str] = frozenset()
        self.nodes: Sequence[PlacedNode] = ()
        self.tree: OnnxTree | None = None
        self.is_by_node = False
        self._session: Session | None = None
        self._as_written = as_written
        self._provider = provider
        self._states = QuantizedStates()
        self._tapped: frozenset[str] = frozenset()
        self._shapes: dict[str, tuple[int | str | None, ...]] = {}
        self.structure = read_structure(path)
        self.output_names = [value.name for value in self.structure.graph.output]
        if by_module:
            refuse_compiled_modules(self.structure, path)
            self._read_modules()

    @functools.cached_property
    def is_rounded(self) -> bool:
        """True if nodes compute with fewer bits than float32; a separate provider has the bits of its device."""
        is_separate = self._provider is not None and self._provider.names != CPU
        return is_separate or any(map(_has_few_bits, graph_of(self.structure, self.path).graph))

    @functools.cached_property
    def rounds_halves(self) -> bool:
        """True if float16 values are rounded that the CPU provider computes in float32."""
        return self._provider is None and computes_in(graph_of(self.structure, self.path), ir.DataType.FLOAT16)

    @functools.cached_property
    def module_classes(self) -> Mapping[str, str]:
        """Path of each module in the file → class, ``""`` if unknown; the root is ``""``."""
        tree = self.tree or self._read_tree(self._placed_nodes())
        return {item.path: item.class_name for item in tree.modules if item.path or address.depth(item.tag) == 1}

    @functools.cached_property
    def inputs(self) -> Sequence[InputTensorSpec]:
        """Inputs of the graph, as declared by its session."""
        return graph_inputs(self.session())

    @property
    def states(self) -> Mapping[str, str]:
        """Input of the KV cache → output that is its next value; `{}` without a cache."""
        return state_feeds(self.session())

    @property
    def input_shapes(self) -> Mapping[str, Sequence[int | str | None]]:
        """Input → sizes as declared in the file."""
        return self.session().input_shapes

    @property
    def declared_names(self) -> Sequence[str]:
        """Names of its inputs and outputs."""
        return [*self.input_names, *self.output_names]

    @property
    def input_names(self) -> Sequence[str]:
        """Names of its inputs."""
        initialized = {tensor.name for tensor in self.structure.graph.initializer}
        return [value.name for value in self.structure.graph.input if value.name not in initialized]

    @property
    def drawing_nodes(self) -> list[onnx.NodeProto]:
        """Random nodes, in any graph."""
        return random_nodes(self.structure)

    def session(self, tapped: Sequence[str] = ()) -> Session:
        """Return the session, opened on first use with these values as additional outputs.

        ONNX Runtime holds every output until a run ends. If these exceed memory, each group of values has a separate
        session, one at a time.

        Raises:
            UsageError: the file shares its weights with other parts, which a simulator does not support.
            StageError: ONNX Runtime cannot load the file.
        """
        return self._open_session(tapped) if self._session is None else self._session

    def value_bytes(self, names: Sequence[str], feeds: Arrays) -> Sequence[int | None]:
        """Sizes of inner values in bytes of float32; ``None`` if the shape is unknown before a run.

        Raises:
            StageError: ONNX Runtime cannot load the file.
        """
        lengths = {
            size: length
            for key, shape in self.session().input_shapes.items()
            for size, length in zip(shape, feeds[key].shape, strict=True)
            if isinstance(size, str)
        }

        def size_of(name: str) -> int | None:
            shape = self._shapes.get(name, (None,))
            sizes = [lengths.get(size) if isinstance(size, str) else size for size in shape]
            return None if None in sizes else _FLOAT_BYTES * math.prod(size for size in sizes if size is not None)

        return list(map(size_of, names))

    def outputs(self, feeds: Arrays) -> dict[str, Array]:
        """Run the model, and return its outputs."""
        session = self.session() if self._fits_memory_limit(feeds) else self._open_session(())
        return self._states.dequantized(session.run(self.quantized_feeds(feeds), self.output_names))

    def quantized_feeds(self, feeds: Arrays) -> Arrays:
        """Return values with quantized states as the file stores them."""
        return self._states.quantized(feeds)

    def values(self, feeds: Arrays, names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return inner values by name; `{}`, without a run, for no names."""
        if not names:
            return {}
        requested = frozenset(names).difference(self.output_names)
        is_ready = requested == self._tapped or (requested < self._tapped and self._fits_memory_limit(feeds))
        session = self.session() if is_ready else self._open_session(names)
        return self._states.dequantized(session.run(self.quantized_feeds(feeds), list(names)))

    def _fits_memory_limit(self, feeds: Arrays) -> bool:
        """Return True if the inner values of a run fit the memory limit of one side."""
        self.session()
        sizes = self.value_bytes(sorted(self._tapped), feeds)
        return None not in sizes and 2 * sum(size for size in sizes if size is not None) <= GROUP_BYTES

    def _open_session(self, tapped: Sequence[str]) -> Session:
        """Replace the open session by a session that also returns these values."""
        names = [name for name in dict.fromkeys(tapped) if name not in self.output_names]
        self._session = None  # two sessions would hold the weights twice
        is_as_written = self._as_written or bool(names)
        place = {} if self._provider is None else self._provider.session_options(self.path)
        self._session = open_session(self.path, as_written=is_as_written, outputs=names, **place)
        self._states = QuantizedStates.of(self.path, self._session)
        self._tapped = frozenset(names)
        self._shapes.update(self._session.output_shapes)
        return self._session

    def node_tags(self) -> dict[str, str]:
        """Name of a node → tag, for named nodes; `{}` without modules."""
        if self.tree is None:
            return {}
        return {
            placed.proto.name: tag
            for placed, tag in zip(self.nodes, self.tree.tags, strict=True)
            if placed.proto.name and tag
        }

    def _placed_nodes(self) -> Sequence[PlacedNode]:
        merge_duplicate_keys(self.structure)
        return read_contents(self.structure).nodes

    def _read_tree(self, nodes: Sequence[PlacedNode]) -> OnnxTree:
        metadata = {entry.key: entry.value for entry in self.structure.metadata_props}
        root = self.structure.graph.name.strip("/") or "graph"
        return read_tree([node.proto for node in nodes], metadata, root)

    @property
    def is_tagged(self) -> bool:
        """True if nodes have tags, in contrast to modules that are read from the names of nodes."""
        return self.tree is not None and self.tree.source == "winml tags"

    def read_nodes_as_modules(self) -> None:
        """Treat each node as a module, named after its first output, instead of the modules of the file, if any.

        Raises:
            InputError: the graph has a cycle.
        """
        root = self.structure.graph.name.strip("/") or "graph"
        for node in self.structure.graph.node:
            if not node.output or node.op_type == "Constant":
                continue
            path = node.output[0] or node.name
            tag = address.format_tag(map(address.escape_name, (root, f"{node.op_type}.{path}")))
            del node.metadata_props[:]
            _add_tag(node, tag, path)
        self.is_by_node = True
        self.boundaries.clear()
        self._read_modules()

    def _read_modules(self) -> None:
        """Read the module tree and the boundary of each module call into the attributes of this side.

        Raises:
            InputError: the metadata of a fused node is damaged, or the graph has a cycle.
        """
        refuse_cycles(self.structure, self.path)
        self.nodes = self._placed_nodes()
        self.tree = self._read_tree(self.nodes)
        tags = {module.path: module.tag for module in self.tree.modules}
        paths = {tag: path for path, tag in tags.items()}
        for placed, tag in zip(self.nodes, self.tree.tags, strict=True):
            if tag and not self.is_tagged:
                _add_tag(placed.proto, tag, paths.get(tag, ""))
        model = graph_of(self.structure, self.path)
        self.value_names = frozenset(
            str(value.name) for node in model.graph for value in node.outputs if not _is_blocked(value)
        )
        parts = ModuleParts(model)
        position = {node: number for number, node in enumerate(model.graph)}
        try:
            fused_ends = _find_fused_ends(model)
        except ValueError as error:
            raise InputError(f"{self.path}: {error}", hint="Write the file again.") from error
        for module in self.tree.modules:
            end = fused_ends.get(module.path, _FusedEnd("", frozenset()))
            others = tuple(sorted(tags[path] for path in end.others if path in tags))
            for boundary in _boundaries(module, parts, position):
                self.boundaries[boundary.key] = replace(boundary, ends_in=end.node, fused_with=others)


def _add_tag(node: onnx.NodeProto, tag: str, path: str) -> None:
    """Tag a node of a structure, in place."""
    node.metadata_props.add(key=TAG_KEY, value=tag)
    node.metadata_props.add(key=MODULE_KEY, value=path)


class _FusedEnd(NamedTuple):
    """A node that fuses the last operators of a module with those of other modules."""

    node: str
    others: frozenset[str]
    """Paths of the other modules, if the node belongs to the module."""


def _find_fused_ends(model: ir.Model) -> dict[str, _FusedEnd]:
    """Module path → node that fuses its last operators with those of other modules."""
    ends: dict[str, _FusedEnd] = {}
    for node in model.graph:
        listed = listed_modules(node)
        if not listed:
            continue
        owner = node.metadata_props.get(MODULE_KEY, "")
        common = ".".join(address.common_start(path.split(".") for path in (owner, *listed)))
        makers = [value.producer() for value in node.inputs if value is not None]
        sources = [maker.metadata_props.get(MODULE_KEY, "") for maker in makers if maker is not None]
        for path in {owner, *listed}:
            # Up to the common module: modules that own the node, or produced one of its inputs, end in it.
            while path and path != common:
                if any(_is_inside(source, path) for source in (owner, *sources)):
                    others = frozenset(listed) - {owner} if path == owner else frozenset[str]()
                    ends[path] = _FusedEnd(node.name or node.op_type, others)
                path = path.rpartition(".")[0]
    return ends


def _is_inside(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _boundaries(module: ModuleAddress, parts: ModuleParts, position: Mapping[ir.Node, int]) -> Iterator[ModuleBoundary]:
    """Yield the boundary of each call of a module, or one boundary with the reason for missing nodes."""
    calls = parts.cut(module.tag)
    if not calls:
        identity = ModuleIdentity(module.path, module.tag, module.class_name)
        yield ModuleBoundary(identity, reason=WITHOUT_NODES)
    for call in calls:
        identity = ModuleIdentity(module.path, module.tag, module.class_name, call.call, call.calls)
        if isinstance(call.result, Refusal):
            yield ModuleBoundary(identity, reason=call.result.reason)
            continue
        fed = dict.fromkeys(map(_find_float_source, call.result.inputs))
        # Inputs of the model are equal on both sides; integers are positions and masks.
        inputs = [value for value in fed if value.dtype in _FLOATS and value.producer() is not None]
        outputs = [
            value
            for value in dict.fromkeys(map(_find_float_source, call.result.outputs))
            if value.dtype in _FLOATS and not _is_blocked(value)
        ]
        makers = [maker for value in outputs if (maker := value.producer()) is not None]
        yield ModuleBoundary(
            identity,
            tuple(str(value.name) for value in inputs),
            tuple(str(value.name) for value in outputs),
            max((position[maker] for maker in makers if maker in position), default=0),
            "" if outputs else _reason_without_outputs(call.result.outputs),
        )


def _is_blocked(value: ir.Value) -> bool:
    """Return True if a value is in the blocked layout of ONNX Runtime's convolutions, with its channels reordered."""
    producer = value.producer()
    return producer is not None and producer.domain == _BLOCKED_DOMAIN and producer.op_type != "ReorderOutput"


def _reason_without_outputs(outputs: Iterable[ir.Value]) -> str:
    if any(map(_is_blocked, outputs)):
        return "its output is in a blocked layout (NCHWc)"
    return "it computes no floating-point value that is read outside"


_BLOCKED_DOMAIN = "com.microsoft.nchwc"


def _find_float_source(value: ir.Value) -> ir.Value:
    """Find the floating-point source of a quantized value, scale or zero point.

    A value without such a source, such as rows of a quantized table, is floating-point after its DequantizeLinear.
    """
    source = value
    while (producer := value.producer()) is not None and producer.op_type in _QUANTIZING:
        quantized = producer.inputs[0]
        if quantized is None or quantized.is_initializer():
            break
        value = quantized
        source = source if producer.op_type == "DequantizeLinear" else value
    return source


_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Operators that change the representation of a value, not its meaning."""


def _has_few_bits(node: ir.Node) -> bool:
    """Return True if a node is quantized, or reads a weight in half precision."""
    return node.op_type in QUANTIZED_OPERATORS or any(
        value is not None and value.const_value is not None and value.const_value.dtype in _HALVES
        for value in node.inputs
    )


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
