"""Inspects an ONNX file, and holds the record, to be printed or written as JSON.

The JSON keys are the same for every file; values that do not apply are null or empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import onnx

from winml.modelkit.file_names import sidecar_path
from winml.modelkit.graph.assumptions import Assumption
from winml.modelkit.graph.files.content_digest import hash_file
from winml.modelkit.graph.files.reading import check_data_file, inline_functions, read_structure
from winml.modelkit.graph.specs import StatedBounds, damaged_bounds_notes, stated_bounds
from winml.modelkit.graph.validity import cycle_words
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.selector import select
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.inspect.module_costs import Cost, ModuleCost, Shape, charge_modules, count_node_macs
from winml.modelkit.inspect.node_facts import declared_shape, read_shapes
from winml.modelkit.inspect.onnx_tree import (
    Contents,
    DataLocation,
    OnnxTree,
    PlacedNode,
    TreeSource,
    Weight,
    dtype_name,
    qualified_name,
    read_contents,
    read_tree,
)
from winml.modelkit.metadata_keys import OUR_PREFIX, TREE_KEY
from winml.modelkit.options import load_metadata, read_json_file
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.words import count_noun


@dataclass(frozen=True)
class FileInfo(Record):
    """One file of the model."""

    path: Path
    size_bytes: int | None
    """None where it is missing."""


@dataclass(frozen=True)
class ValueInfo(Record):
    """One input or output of the model."""

    name: str
    dtype: str
    """Element type; ``sequence``, ``optional``, ``map`` or ``opaque`` where it is no tensor."""
    shape: Shape | None = field(metadata=entry(before="dtype"))
    """None: the rank is unknown, or it is no tensor."""


@dataclass(frozen=True)
class WeightSummary(Record):
    """The weights of one element type."""

    count: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True)
class NodeInfo(Record):
    """One node of a selected module."""

    name: str
    operator: str
    tag: str
    macs: int | None
    """Multiply-accumulate operations of one run; None where they are unknown."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxInspection:
    """Everything known about one ONNX file."""

    files: tuple[FileInfo, ...]
    """The model file first, then the data files it names."""
    ir_version: int
    producer_name: str
    producer_version: str
    graph_name: str
    opsets: Mapping[str, int]
    """Version of each operator set; ONNX's own is ``ai.onnx``."""
    inputs: tuple[ValueInfo, ...]
    """Without the initializers, which older files list among them."""
    outputs: tuple[ValueInfo, ...]
    weights: tuple[Weight, ...]
    weight_summaries: Mapping[str, WeightSummary]
    """By element type, the largest first; of quantized weights the type of the values that are packed."""
    operators: Mapping[str, int]
    """Number of nodes per operator, the most frequent first; subgraphs and functions included."""
    subgraph_nodes: int
    """Number of nodes in subgraphs."""
    functions: Mapping[str, int]
    """Number of nodes per function the file defines."""
    total: Cost
    """Cost of the whole file."""
    records: Mapping[str, Any]
    """The ``winml.*`` metadata, parsed; the module tree is in ``modules`` instead."""
    metadata: Mapping[str, str]
    """All other metadata."""
    dimensions: tuple[StatedBounds, ...]
    """Dynamic dimensions for which the file states bounds."""
    tree_source: TreeSource
    coverage: Coverage
    modules: tuple[ModuleCost, ...]
    """The module tree, or the selected subtrees."""
    unclaimed: Cost
    """Cost of nodes and weights that belong to no module."""
    selector: str | None
    module_nodes: tuple[NodeInfo, ...]
    """Nodes of the selected modules; empty without ``selector``."""
    assumed: tuple[Assumption, ...] | None
    """What the graph takes for granted of other inputs; None where no sidecar beside the file says."""
    notes: tuple[str, ...]
    """Problems and limits of the inspection, one sentence each."""

    @property
    def size_bytes(self) -> int:
        """Size on disk, existing data files included."""
        return sum(file.size_bytes or 0 for file in self.files)

    def as_record(self, *, with_hierarchy: bool = True, with_weights: bool = False) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes, unknown operations as null.

        Args:
            with_hierarchy: Fill ``modules``; else it is null.
            with_weights: Fill ``initializers.tensors``; else it is null.
        """
        return {
            "kind": "onnx",
            "path": str(self.files[0].path),
            "size_bytes": self.size_bytes,
            "files": [file.as_record() for file in self.files],
            "ir_version": self.ir_version,
            "opsets": dict(self.opsets),
            "producer": {"name": self.producer_name, "version": self.producer_version},
            "graph_name": self.graph_name,
            "inputs": [value.as_record() for value in self.inputs],
            "outputs": [value.as_record() for value in self.outputs],
            "dimensions": [item.as_record() for item in self.dimensions],
            "initializers": {
                "count": len(self.weights),
                "parameters": self.total.parameters,
                "bits": self.total.bits,
                "size_bytes": self.total.size_bytes,
                "by_dtype": {dtype: summary.as_record() for dtype, summary in self.weight_summaries.items()},
                "tensors": [weight.as_record() for weight in self.weights] if with_weights else None,
            },
            "nodes": self.total.nodes,
            "subgraph_nodes": self.subgraph_nodes,
            "functions": dict(self.functions),
            "operators": dict(self.operators),
            "macs": self.total.macs,
            "records": dict(self.records),
            "metadata": dict(self.metadata),
            "tree_source": self.tree_source,
            "coverage": self.coverage.as_record(),
            "modules": [module.as_record() for module in self.modules] if with_hierarchy else None,
            "unclaimed": self.unclaimed.as_record(),
            "selector": self.selector,
            "module_nodes": [node.as_record() for node in self.module_nodes] if self.selector is not None else None,
            "assumed": None if self.assumed is None else [item.as_record() for item in self.assumed],
            "notes": list(self.notes),
        }


# --- Lists the external data files of a model, with a note for each that is missing, cut off or outside the folder.


def _find_data_files(model_path: Path, weights: Iterable[Weight]) -> tuple[list[FileInfo], list[str]]:
    """Look for the data files of a model.

    Args:
        model_path: The model file; data files are named relative to its folder.
        weights: Its initializers.

    Returns:
        The data files in the order they are first named, and a note for each problem.
    """
    locations: dict[str, list[DataLocation]] = defaultdict(list)
    for weight in weights:
        if weight.location is not None:
            locations[weight.location.file].append(weight.location)
    files, notes = [], []
    for name, uses in locations.items():
        needed_bytes = max((use.end_bytes or 0 for use in uses), default=0)
        file = check_data_file(model_path.parent, name, needed_bytes)
        if file.problem == "outside":
            notes.append(f"data file {name!r} is outside the model's folder; it was not read")
            continue
        files.append(FileInfo(file.path, file.size_bytes))
        if file.problem == "missing":
            notes.append(f"data file {file.path} is missing: it contains {len(uses)} of the weights")
        elif file.problem == "cut off":
            notes.append(f"data file {file.path} is cut off: it has {file.size_bytes} bytes and needs {needed_bytes}")
    return files, notes


# --- Finds the weights of few bits in a file, and how many parameters of the floating-point model they stand for.
#
# A weight of 4 bits may be stored as bytes that hold two values, beside scales and zero points that are no parameters
# of the model. Which input of an operator is which is specified: https://onnx.ai/onnx/operators and
# https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.


FLOATS = ("float", "bfloat", "complex")
"""How the names of floating-point types begin."""


@dataclass(frozen=True)
class _Inputs:
    """What the inputs of an operator hold, by position."""

    weights: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    """Scales and zero points, tables of values, permutations of rows."""


_ACTIVATION_AND_WEIGHT = _Inputs((3,), (1, 2, 4, 5, 6, 7))
_PACKED = _Inputs((1,), (2, 3, 4))
_ONNX: Mapping[str, _Inputs] = {
    "DequantizeLinear": _Inputs((0,), (1, 2)),
    "QuantizeLinear": _Inputs((), (1, 2)),
    "MatMulInteger": _Inputs((1,), (2, 3)),
    "ConvInteger": _Inputs((1,), (2, 3)),
    "QLinearMatMul": _ACTIVATION_AND_WEIGHT,
    "QLinearConv": _ACTIVATION_AND_WEIGHT,
}
_MICROSOFT: Mapping[str, _Inputs] = {
    **_ONNX,
    "DynamicQuantizeMatMul": _Inputs((1,), (2, 3)),
    "GatherBlockQuantized": _Inputs((0,), (2, 3)),
    "MatMulBnb4": _PACKED,
    "MatMulIntegerToFloat": _Inputs((1,), (2, 3, 4, 5)),
    "MatMulNBits": _PACKED,
    "QAttention": _Inputs((1,), (3, 4, 6, 7)),
    "QGemm": _Inputs((3,), (1, 2, 4, 5, 7, 8)),
}
_SCALES_OF_BLOCKS = 2
"""Position of the scales among the inputs of ``GatherBlockQuantized`` and ``MatMulNBits``."""
_INPUTS: Mapping[str, Mapping[str, _Inputs]] = {"": _ONNX, "ai.onnx": _ONNX, "com.microsoft": _MICROSOFT}


def _count_parameters(contents: Contents) -> None:
    """Say of every weight how many parameters it stands for, and of which type, in place."""
    range_makers = {
        node.proto.output[1] for node in contents.nodes if node.proto.op_type == "DynamicQuantizeLinear"
    }  # the scales of activations, with which those of weights are multiplied
    reshaped = {
        node.proto.output[0]: index
        for node in contents.nodes
        for position, index in node.weight_inputs
        if node.proto.op_type == "Reshape" and position == 0
    }  # a table and a product may share packed values, in two shapes
    first_packed: dict[int, int] = {}  # scales → the weight of a block operator that is read with them first
    for node in contents.nodes:
        inputs = _INPUTS.get(node.proto.domain, {}).get(node.proto.op_type, _Inputs())
        for position, name in enumerate(node.proto.input):
            if position in inputs.weights and name in reshaped:
                contents.weights[reshaped[name]] = _quantized(contents.weights[reshaped[name]], node.proto)
        for position, index in node.weight_inputs:
            weight = contents.weights[index]
            if position in inputs.scales or _is_scale(node, range_makers):
                contents.weights[index] = replace(weight, parameters=0)
            elif position in inputs.weights:
                weight = _quantized(weight, node.proto)
                scales = dict(node.weight_inputs).get(_SCALES_OF_BLOCKS) if _is_block_operator(node) else None
                first = index if scales is None else first_packed.setdefault(scales, index)
                is_copy = first != index and weight.size_bytes == contents.weights[first].size_bytes
                contents.weights[index] = replace(weight, parameters=0) if is_copy else weight


def _is_block_operator(node: PlacedNode) -> bool:
    """Say whether a node reads a weight with scales of blocks.

    A table that is a product's weight as well, in a shape of its own, is stored twice where an execution provider takes
    constants only: one weight of the model, recognized by the scales that both read.
    """
    return node.proto.domain == "com.microsoft" and node.proto.op_type in ("GatherBlockQuantized", "MatMulNBits")


def _is_scale(node: PlacedNode, range_makers: set[str]) -> bool:
    """Say whether a node multiplies the scale of an activation with that of a weight."""
    return node.proto.op_type == "Mul" and any(name in range_makers for name in node.proto.input)


def _quantized(weight: Weight, node: onnx.NodeProto) -> Weight:
    """Return the weight of a quantized operator: of packed values, which type they have and how many there are."""
    if weight.dtype.startswith(FLOATS):
        return weight
    numbers = {item.name: item.i for item in node.attribute}
    if node.op_type in ("MatMulNBits", "MatMulBnb4"):
        bits = numbers.get("bits", 4)
        kind = f"uint{bits}" if node.op_type == "MatMulNBits" else "fp4 or nf4"
        return replace(weight, kind=kind, parameters=numbers.get("K", 0) * numbers.get("N", 0))
    bits = numbers.get("bits", 4)
    if node.op_type == "GatherBlockQuantized" and weight.dtype == "uint8" and bits < 8:
        return replace(weight, kind=f"uint{bits}", parameters=weight.elements * (8 // bits))
    return replace(weight, kind=weight.dtype, parameters=weight.elements)


_NO_TENSOR = {"sequence_type": "sequence", "optional_type": "optional", "map_type": "map", "opaque_type": "opaque"}


def inspect_onnx(path: Path, *, selector: str | None = None) -> OnnxInspection:
    """Inspect an ONNX file; no weight is read.

    Args:
        path: The file.
        selector: Modules whose subtrees are returned, with their nodes; None: the whole tree, without nodes.

    Raises:
        ModelPathError: there is no such file, or it is a directory.
        InputError: the file is empty, cut off, or not an ONNX file.
        UsageError: no module matches ``selector``.
    """
    model = read_structure(path, as_written=True)
    written_functions = {_function_name(function): len(function.node) for function in model.functions}
    inlined = inline_functions(model, path)
    contents = read_contents(model)
    _count_parameters(contents)
    metadata = {item.key: item.value for item in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, model.graph.name.strip("/") or "graph")
    shapes, shape_notes = read_shapes(model, contents.nodes)
    macs = count_node_macs(contents, shapes)
    modules, unclaimed = charge_modules(tree, contents, macs)
    selected = _select_subtrees(modules, selector, [node.proto.name for node in contents.nodes])
    data_files, file_notes = _find_data_files(path, contents.weights)
    size = path.stat().st_size
    return OnnxInspection(
        files=(FileInfo(path, size), *data_files),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        graph_name=model.graph.name,
        opsets={entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        inputs=_graph_inputs(model.graph),
        outputs=tuple(map(_value_info, model.graph.output)),
        weights=tuple(contents.weights),
        weight_summaries=_summarize_weights(contents.weights),
        operators=dict(Counter(node.operator for node in contents.nodes).most_common()),
        subgraph_nodes=sum(node.place == "subgraph" for node in contents.nodes),
        functions=written_functions,
        total=sum((module.own for module in modules), unclaimed),
        records=_parse_own_metadata(metadata),
        metadata={key: value for key, value in metadata.items() if not key.startswith(OUR_PREFIX)},
        dimensions=tuple(stated_bounds(metadata).values()),
        tree_source=tree.source,
        coverage=tree.coverage,
        modules=selected,
        unclaimed=unclaimed,
        selector=selector,
        module_nodes=_nodes_within(selected, tree, contents, macs) if selector is not None else (),
        assumed=_assumed_beside(path),
        notes=(
            *_function_notes(inlined),
            *_version_notes(model),
            *_cycle_notes(model),
            *_duplicate_notes(model, contents.nodes),
            *tree.notes,
            *damaged_bounds_notes(metadata),
            *file_notes,
            *shape_notes,
        ),
    )


def _assumed_beside(path: Path) -> tuple[Assumption, ...] | None:
    """Return what the sidecar of a file says that is assumed; None where there is none that describes it."""
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    try:
        record = read_json_file(sidecar)
        described, assumed = record["model_sha256"], record["verification"]["assumed"]
        found = tuple(map(Assumption.from_fields, assumed))
    except (OSError, LookupError, TypeError, ValueError):
        # Of version 1, of a file that was not compared, or of another tool.
        return None
    return found if described == hash_file(path) else None


def _select_subtrees(
    modules: Sequence[ModuleCost], selector: str | None, node_names: Iterable[str]
) -> tuple[ModuleCost, ...]:
    """Return the selected modules and all below them, in the order of the tree."""
    if selector is None:
        return tuple(modules)
    roots = {module.tag for module in select(modules, selector, node_names)}
    return tuple(module for module in modules if _is_below(module.tag, roots))


def _is_below(tag: str, roots: Iterable[str]) -> bool:
    segments = address.parse_tag(tag)
    return any(address.format_tag(segments[:depth]) in roots for depth in range(1, len(segments) + 1))


def _nodes_within(
    modules: Sequence[ModuleCost], tree: OnnxTree, contents: Contents, macs: Sequence[int | None]
) -> tuple[NodeInfo, ...]:
    tags = {module.tag for module in modules}
    return tuple(
        NodeInfo(node.proto.name, node.operator, tag, operations, tuple(node.proto.input), tuple(node.proto.output))
        for node, tag, operations in zip(contents.nodes, tree.tags, macs, strict=True)
        if tag in tags
    )


def _graph_inputs(graph: onnx.GraphProto) -> tuple[ValueInfo, ...]:
    initialized = {tensor.name for tensor in graph.initializer}
    return tuple(_value_info(value) for value in graph.input if value.name not in initialized)


def _value_info(value: onnx.ValueInfoProto) -> ValueInfo:
    kind = value.type.WhichOneof("value") or "tensor_type"
    if kind in _NO_TENSOR:
        return ValueInfo(value.name, _NO_TENSOR[kind], None)
    tensor = value.type.sparse_tensor_type if kind == "sparse_tensor_type" else value.type.tensor_type
    return ValueInfo(value.name, dtype_name(tensor.elem_type), declared_shape(value.type))


def _summarize_weights(weights: Iterable[Weight]) -> dict[str, WeightSummary]:
    groups: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.kind or weight.dtype].append(weight)
    summaries = {
        dtype: WeightSummary(
            len(group), sum(weight.parameters for weight in group), sum(weight.size_bytes or 0 for weight in group)
        )
        for dtype, group in groups.items()
    }
    return dict(sorted(summaries.items(), key=lambda item: (-item[1].size_bytes, item[0])))


def _parse_own_metadata(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return our own metadata, parsed where it is JSON."""
    parsed: dict[str, object] = {}
    for key, text in metadata.items():
        if key.startswith(OUR_PREFIX) and key != TREE_KEY:
            try:
                parsed[key] = load_metadata(text)
            except ValueError:
                parsed[key] = text
    return parsed


def _function_name(function: onnx.FunctionProto) -> str:
    return qualified_name(function.domain, function.name)


def _function_notes(inlined: int) -> list[str]:
    if not inlined:
        return []
    return [
        f"{count_noun(inlined, 'function')} of the file represent modules; all other facts describe the inlined graph"
    ]


def _cycle_notes(model: onnx.ModelProto) -> list[str]:
    words = cycle_words(model)
    return [f"The graph is not valid and cannot run: {words}."] if words else []


def _version_notes(model: onnx.ModelProto) -> list[str]:
    notes = []
    if model.ir_version > onnx.IR_VERSION:
        notes.append(
            f"IR version {model.ir_version} is newer than {onnx.IR_VERSION}, the newest that the installed onnx "
            "supports"
        )
    newest = onnx.defs.onnx_opset_version()
    notes += [
        f"opset {entry.version} is newer than {newest}, the newest that the installed onnx supports"
        for entry in model.opset_import
        if entry.domain in ("", "ai.onnx") and entry.version > newest
    ]
    return notes


def _duplicate_notes(model: onnx.ModelProto, nodes: Sequence[PlacedNode]) -> list[str]:
    notes = []
    if repeated := _repeated_keys(model):
        notes.append(
            f"the model's metadata has {', '.join(repeated)} more than once, which onnx.checker rejects; the "
            "last one is used"
        )
    affected = sum(bool(_repeated_keys(node.proto)) for node in nodes)
    if affected:
        notes.append(
            f"{affected} node(s) have a metadata key more than once; for tags, the module that contains all of "
            "them is used"
        )
    return notes


def _repeated_keys(holder: onnx.ModelProto | onnx.NodeProto) -> list[str]:
    return sorted(key for key, count in Counter(item.key for item in holder.metadata_props).items() if count > 1)


Basis = Literal["provider", "kernels", "document"]
"""Who said it: the provider itself, when a session was opened; the list of its kernels in the installed ONNX Runtime;
or its documentation."""

FindingKind = Literal["open size", "unknown size", "operator", "dtype", "refused", "graph"]
"""What keeps nodes from the provider: a size it needs fixed, one that depends on data, an operator or an element type
it lacks, something else about the nodes, or the graph as a whole."""


@dataclass(frozen=True)
class Finding(Record):
    """One thing that keeps nodes from the provider."""

    kind: FindingKind
    what: str
    """The dynamic dimension, the operator, or operator and element type."""
    reason: str
    """Why, in the words of who said it where there are some."""
    remedy: str
    """What to do about it."""
    modules: Mapping[str, int]
    """Module → its nodes that are concerned, the most first: dotted path, the tag where that is unknown."""
    nodes: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True)
class ListedLimit(Record):
    """An operator that the documentation lists with a condition, which is not checked."""

    operator: str
    limit: str
    count: int
    """Nodes that have this operator."""


@dataclass(frozen=True)
class ProviderFit(Record):
    """Whether a provider runs a file."""

    provider: str
    """Short name."""
    name: str
    """Its name in ONNX Runtime."""
    device: str
    basis: Basis
    source: str
    """Version of the provider or of ONNX Runtime, or address and version of the document."""
    nodes: int
    """Nodes that were judged: those a session still has when it asks its providers, else all of the file."""
    taken: int
    """Those of them that the provider runs."""
    findings: tuple[Finding, ...]
    """What keeps nodes from the provider, the most nodes first."""
    limits: tuple[ListedLimit, ...]
    notes: tuple[str, ...]

    @property
    @recorded(entry(before="nodes"))
    def runs_all(self) -> bool:
        """Whether nothing keeps a node from the provider, as far as it is known."""
        return not self.findings
