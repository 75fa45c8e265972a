"""Inspection of an ONNX file, and its record, to be printed or written as JSON.

The JSON keys are the same for every file; values that do not apply are null or empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit.file_names import sidecar_path
from winml.modelkit.inspect.provider_fit import ProviderFit
from winml.modelkit.metadata_keys import OUR_PREFIX, TREE_KEY
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.onnx.contents import (
    Contents,
    DataLocation,
    PlacedNode,
    Shape,
    Weight,
    declared_shape,
    dtype_name,
    qualified_name,
    read_contents,
)
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.reading import check_data_file, inline_functions, read_structure
from winml.modelkit.onnx.module_costs import Cost, ModuleCost, charge_modules, count_node_macs, read_shapes
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.onnx.quantized_weights import count_parameters
from winml.modelkit.onnx.specs import DynamicDimension, damaged_bounds_notes, stated_bounds
from winml.modelkit.onnx.validity import cycle_words
from winml.modelkit.options import load_metadata, read_json_file
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags import address
from winml.modelkit.tags.dialects import TreeSource
from winml.modelkit.tags.selector import select
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.words import count_noun


class FileInfo(Record):
    """One file of the model."""

    path: Path
    size_bytes: int | None
    """None if the file is missing."""


class ValueInfo(Record):
    """One input or output of the model."""

    name: str
    dtype: str
    """Element type; ``sequence``, ``optional``, ``map`` or ``opaque`` if the value is no tensor."""
    shape: Shape | None = field(metadata=entry(before="dtype"))
    """None: the rank is unknown, or the value is no tensor."""


class WeightSummary(Record):
    """The weights of one element type."""

    count: int
    parameters: int
    size_bytes: int


class NodeInfo(Record):
    """One node of a selected module."""

    name: str
    operator: str
    tag: str
    macs: int | None
    """Multiply-accumulate operations of one run; None if unknown."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OnnxInspection(
    Result, Record, kind="onnx", document="inspect.onnx_table:onnx_inspection_document", rows="modules"
):
    """Inspection result of one ONNX file."""

    files: tuple[FileInfo, ...]
    """The model file first, then its external data files, and files of compiled content last."""
    ir_version: int
    opsets: Mapping[str, int]
    """Version of each operator set; the default domain is ``ai.onnx``."""
    producer_name: str = field(metadata=entry("name", within="producer"))
    producer_version: str = field(metadata=entry("version", within="producer"))
    graph_name: str
    inputs: tuple[ValueInfo, ...]
    """Graph inputs without the initializers, which older files list among the inputs."""
    outputs: tuple[ValueInfo, ...]
    dimensions: tuple[DynamicDimension, ...]
    """Dynamic dimensions with bounds stated in the file."""
    weights: tuple[Weight, ...] = field(metadata=entry(skip=True))
    weight_summaries: Mapping[str, WeightSummary] = field(metadata=entry(skip=True))
    """Summary by element type, the largest first; for quantized weights, the type of the packed values."""
    total: Cost = field(metadata=entry("nodes", attribute="nodes"))
    """Cost of the whole file."""
    subgraph_nodes: int
    """Number of nodes in subgraphs."""
    functions: Mapping[str, int]
    """Number of nodes per function defined in the file."""
    operators: Mapping[str, int]
    """Number of nodes per operator, the most frequent first; subgraphs and functions included."""
    records: Mapping[str, Any]
    """The parsed ``winml.*`` metadata, without the module tree, which is in ``modules``."""
    metadata: Mapping[str, str]
    """All other metadata."""
    tree_source: TreeSource
    coverage: Coverage
    modules: tuple[ModuleCost, ...]
    """The module tree, or the selected subtrees."""
    unclaimed: Cost
    """Cost of nodes and weights that belong to no module."""
    selector: str | None
    module_nodes: tuple[NodeInfo, ...] | None
    """Nodes of the selected modules; None without ``selector``."""
    assumed: tuple[Assumption, ...] | None
    """Assumptions of the graph on other inputs; None if no sidecar beside the file states them."""
    notes: tuple[str, ...]
    """Problems and limits of the inspection, one sentence each."""
    fit: ProviderFit | None = field(default=None, metadata=entry("execution_provider", last=True))
    """Support by an execution provider; None if not checked."""

    @property
    @recorded(entry("path", before="files", attribute="path"))
    def model_file(self) -> FileInfo:
        """The model file."""
        return self.files[0]

    @property
    @recorded(entry(before="files"))
    def size_bytes(self) -> int:
        """Size on disk, existing data files included."""
        return sum(file.size_bytes or 0 for file in self.files)

    @recorded(entry("initializers", before="nodes"))
    def initializers_entry(self) -> dict[str, object]:
        """Return the number and size of the initializers."""
        return {
            "count": len(self.weights),
            "parameters": self.total.parameters,
            "bits": self.total.bits,
            "size_bytes": self.total.size_bytes,
            "by_dtype": self.weight_summaries,
            "tensors": None,
        }

    @property
    @recorded(entry(before="records"))
    def macs(self) -> int | None:
        """Multiply-accumulate operations of one run; None if unknown."""
        return self.total.macs

    def as_record(self, *, with_hierarchy: bool = True, with_weights: bool = False) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes, unknown operations as null.

        Args:
            with_hierarchy: Fill ``modules``; else it is null.
            with_weights: Fill ``initializers.tensors``; else it is null.
        """
        record: dict[str, Any] = super().as_record()
        if not with_hierarchy:
            record["modules"] = None
        if with_weights:
            record["initializers"]["tensors"] = json_value(self.weights)
        return record


def _find_data_files(
    model_path: Path, weights: Iterable[Weight], compiled: Iterable[str]
) -> tuple[list[FileInfo], list[str]]:
    """Find the data files of a model.

    Args:
        model_path: The model file; data files are named relative to its folder.
        weights: Its initializers.
        compiled: Names of its files of compiled content.

    Returns:
        The data files in the order of their first reference, and a note for each problem.
    """
    locations: dict[str, list[DataLocation]] = defaultdict(list)
    for weight in weights:
        if weight.location is not None:
            locations[weight.location.file].append(weight.location)
    for name in compiled:
        locations.setdefault(name, [])
    files, notes = [], []
    for name, uses in locations.items():
        needed_bytes = max((use.end_bytes or 0 for use in uses), default=0)
        file = check_data_file(model_path.parent, name, needed_bytes)
        if file.problem == "outside":
            notes.append(f"data file {name!r} is outside the model's folder; it was not read")
            continue
        files.append(FileInfo(file.path, file.size_bytes))
        if file.problem == "missing":
            content = f"{len(uses)} of the weights" if uses else "compiled parts"
            notes.append(f"data file {file.path} is missing: it contains {content}")
        elif file.problem == "cut off":
            notes.append(f"data file {file.path} is cut off: it has {file.size_bytes} bytes and needs {needed_bytes}")
    return files, notes


_NO_TENSOR = {"sequence_type": "sequence", "optional_type": "optional", "map_type": "map", "opaque_type": "opaque"}


def inspect_onnx(path: Path, *, selector: str | None = None) -> OnnxInspection:
    """Inspect an ONNX file; no weight is read.

    Args:
        path: The file.
        selector: Modules whose subtrees are returned, with their nodes; None: the whole tree, without nodes.

    Raises:
        ModelPathError: the file does not exist, or is a directory.
        InputError: the file is empty, cut off, or not an ONNX file.
        UsageError: no module matches ``selector``.
    """
    model = read_structure(path, as_written=True)
    written_functions = {
        qualified_name(function.domain, function.name): len(function.node) for function in model.functions
    }
    inlined = inline_functions(model, path)
    contents = read_contents(model)
    count_parameters(contents)
    # Before the tree is read, which merges repeated keys.
    model_notes = tuple(_model_notes(model, inlined, contents.nodes))
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, model.graph.name.strip("/") or "graph")
    shapes, shape_notes = read_shapes(model, contents.nodes)
    macs = count_node_macs(contents, shapes)
    modules, unclaimed_cost = charge_modules(tree, contents, macs)
    tag_of = {node.proto.name: tag for node, tag in zip(contents.nodes, tree.tags, strict=True)}
    selection = _select_subtrees(modules, selector, tag_of)
    compiled: tuple[str, ...] = ()
    if any(node.operator == "com.microsoft.EPContext" for node in contents.nodes):
        from winml.modelkit.onnx.files.placing import compiled_files  # onnx_ir takes a second to import

        compiled = compiled_files(model)
    data_files, file_notes = _find_data_files(path, contents.weights, compiled)
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
        total=sum((module.own for module in modules), unclaimed_cost),
        records=_parse_own_metadata(metadata),
        metadata={key: value for key, value in metadata.items() if not key.startswith(OUR_PREFIX)},
        dimensions=tuple(stated_bounds(metadata).values()),
        tree_source=tree.source,
        coverage=tree.coverage,
        modules=selection,
        unclaimed=unclaimed_cost,
        selector=selector,
        module_nodes=_list_nodes(selection, tree, contents, macs) if selector is not None else None,
        assumed=_sidecar_assumptions(path),
        notes=(
            *model_notes,
            *tree.notes,
            *damaged_bounds_notes(metadata),
            *file_notes,
            *shape_notes,
        ),
    )


def _sidecar_assumptions(path: Path) -> tuple[Assumption, ...] | None:
    """Return the assumptions stated in the sidecar of a file; None without a sidecar for this file."""
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    try:
        record = read_json_file(sidecar)
        digest, entries = record["model_sha256"], record["verification"]["assumed"]
        assumptions = tuple(map(Assumption.from_fields, entries))
    except (OSError, LookupError, TypeError, ValueError):
        # The sidecar has version 1, the file was not compared, or another tool wrote the sidecar.
        return None
    return assumptions if digest == hash_file(path) else None


def _select_subtrees(
    modules: Sequence[ModuleCost], selector: str | None, tag_of: Mapping[str, str]
) -> tuple[ModuleCost, ...]:
    """Return the selected modules and their descendants, in the order of the tree."""
    if selector is None:
        return tuple(modules)
    roots = {module.tag for module in select(modules, selector, tag_of)}
    return tuple(module for module in modules if not roots.isdisjoint(address.lineage(module.tag)))


def _list_nodes(
    modules: Sequence[ModuleCost], tree: OnnxTree, contents: Contents, macs: Sequence[int | None]
) -> tuple[NodeInfo, ...]:
    """Return the nodes of some modules, in the order of the graph."""
    tags = {module.tag for module in modules}
    return tuple(
        NodeInfo(node.proto.name, node.operator, tag, operations, tuple(node.proto.input), tuple(node.proto.output))
        for node, tag, operations in zip(contents.nodes, tree.tags, macs, strict=True)
        if tag in tags
    )


def _graph_inputs(graph: onnx.GraphProto) -> tuple[ValueInfo, ...]:
    """Return the inputs of a graph that are no initializers."""
    initialized = {tensor.name for tensor in graph.initializer}
    return tuple(_value_info(value) for value in graph.input if value.name not in initialized)


def _value_info(value: onnx.ValueInfoProto) -> ValueInfo:
    """Describe an input or output of a graph, which may be no tensor."""
    kind = value.type.WhichOneof("value") or "tensor_type"
    if kind in _NO_TENSOR:
        return ValueInfo(value.name, _NO_TENSOR[kind], None)
    tensor = value.type.sparse_tensor_type if kind == "sparse_tensor_type" else value.type.tensor_type
    return ValueInfo(value.name, dtype_name(tensor.elem_type), declared_shape(value.type))


def _summarize_weights(weights: Iterable[Weight]) -> dict[str, WeightSummary]:
    """Return element type → number, parameters and bytes of its weights, the largest type first."""
    groups: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.kind or weight.dtype].append(weight)
    summaries = {
        dtype: WeightSummary(
            len(group), sum(weight.parameters for weight in group), sum(weight.size_bytes or 0 for weight in group)
        )
        for dtype, group in groups.items()
    }
    return dict(sorted(summaries.items(), key=lambda pair: (-pair[1].size_bytes, pair[0])))


def _parse_own_metadata(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the ``winml.*`` metadata, parsed if it is JSON."""
    values: dict[str, object] = {}
    for key, text in metadata.items():
        if key.startswith(OUR_PREFIX) and key != TREE_KEY:
            try:
                values[key] = load_metadata(text)
            except ValueError:
                values[key] = text
    return values


def _model_notes(model: onnx.ModelProto, inlined: int, nodes: Sequence[PlacedNode]) -> Iterator[str]:
    """Yield notes on inlined functions, newer versions, cycles, and repeated metadata keys."""
    if inlined:
        yield (
            f"{count_noun(inlined, 'function')} of the file represent modules; all other facts describe the inlined "
            "graph"
        )
    if model.ir_version > onnx.IR_VERSION:
        yield (
            f"IR version {model.ir_version} is newer than {onnx.IR_VERSION}, the newest that the installed onnx "
            "supports"
        )
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if not opset.domain and opset.version > newest:
            yield f"opset {opset.version} is newer than {newest}, the newest that the installed onnx supports"
    if cycle := cycle_words(model):
        yield f"The graph is not valid and cannot run: {cycle}."
    if repeated := _repeated_keys(model):
        yield (
            f"the model's metadata has {', '.join(repeated)} more than once, which onnx.checker rejects; the "
            "last one is used"
        )
    if affected := sum(bool(_repeated_keys(node.proto)) for node in nodes):
        yield (
            f"{affected} node(s) have a metadata key more than once; for tags, the module that contains all of "
            "them is used"
        )


def _repeated_keys(holder: onnx.ModelProto | onnx.NodeProto) -> list[str]:
    """Return the metadata keys that occur more than once, sorted."""
    return sorted(key for key, count in Counter(prop.key for prop in holder.metadata_props).items() if count > 1)
