"""Cuts the modules that a selector names out of a graph, and records what flows over their boundaries.

Finds the modules by their tags, cuts each call out of the graph, records what crosses the boundaries in one run of the
whole model, and writes and checks the pieces. ``extract`` keeps them, ``perf`` measures them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import OutputComparison, compare_outputs
from winml.modelkit.errors import InputError
from winml.modelkit.graph.contexts import refuse_compiled_modules
from winml.modelkit.graph.cutting import Cut, ModuleParts, Refusal, cut_model
from winml.modelkit.graph.files.graph_reading import load_foreign
from winml.modelkit.graph.files.reading import read_structure, reading_graph
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.validity import refuse_cycles
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.address import ModuleIdentity
from winml.modelkit.hierarchy.selector import select
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.inspect.onnx_tree import OnnxModule, read_contents, read_tree
from winml.modelkit.metadata_keys import CUT_KEY, EXPORT_KEY, INPUTS_KEY, MODEL_KEY, OUTPUTS_KEY, TREE_KEY
from winml.modelkit.results.transformed_file import RefusedModule
from winml.modelkit.runtime.ir_versions import open_with_outputs
from winml.modelkit.runtime.opened_model import RunOptions, Values, refusals_explained, values_for

__all__ = [
    "CutCall",
    "ModuleCuts",
    "Recording",
    "WrittenCut",
    "compare_with_recording",
    "cut_modules",
    "record_boundaries",
    "write_cut",
]


@dataclass(frozen=True)
class CutCall:
    """One call of a module, cut out."""

    identity: ModuleIdentity
    cut: Cut


@dataclass(frozen=True)
class ModuleCuts:
    """What a selector named in one file."""

    path: Path
    model: ir.Model
    calls: tuple[CutCall, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]


@dataclass(frozen=True)
class Recording:
    """What flowed over the boundaries in one run of the whole model."""

    arrays: Arrays
    """By the name of the value."""
    fed: Values
    """What the whole model was fed."""

    def of(self, values: Sequence[ir.Value]) -> dict[str, Array]:
        """Return the arrays of some values."""
        return {str(value.name): self.arrays[str(value.name)] for value in values}


@dataclass(frozen=True)
class WrittenCut:
    """A cut that became a file."""

    files: tuple[Path, ...]
    """The model first."""
    inputs: tuple[dict[str, Any], ...]
    """Its entries of ``winml.io.inputs``."""
    outputs: tuple[dict[str, Any], ...]


def cut_modules(path: Path, selector: str) -> ModuleCuts:
    """Cut every module a selector names out of a file, each call by itself; nothing is written.

    Args:
        path: An ONNX file with tags.
        selector: As :func:`~winml.modelkit.hierarchy.selector.select` takes it. Of modules inside one another, each is
            cut.

    Raises:
        UsageError: the selector names nothing.
        InputError: the file is no ONNX file, or bears no tags.
    """
    modules = select(_tagged_modules(path), selector)
    # Other tools may have written it; what they broke in the metadata of nodes would be written again.
    model = reading_graph(path, lambda: load_foreign(path))
    # Tools write nodes in any order and ONNX Runtime takes them so; what is cut out follows the order of the nodes.
    model.graph.sort()
    parts = ModuleParts(model)
    calls, refused, without_nodes = [], [], []
    for module in modules:
        cut_calls = parts.cut(module.tag)
        if not cut_calls:
            without_nodes.append(ModuleIdentity(module.path, module.tag, module.class_name))
        for item in cut_calls:
            identity = ModuleIdentity(module.path, module.tag, module.class_name, item.call, item.calls)
            if isinstance(item.result, Refusal):
                refused.append(RefusedModule(identity, item.result.reason))
            else:
                calls.append(CutCall(identity, item.result))
    return ModuleCuts(path, model, tuple(calls), tuple(refused), tuple(without_nodes))


def _tagged_modules(path: Path) -> tuple[OnnxModule, ...]:
    structure = read_structure(path)
    refuse_compiled_modules(structure, path)
    refuse_cycles(structure, path)
    metadata = {entry.key: entry.value for entry in structure.metadata_props}
    tree = read_tree([node.proto for node in read_contents(structure).nodes], metadata, path.stem)
    if tree.source != "winml tags":
        raise InputError(
            f"{path}: its nodes bear no tags, so nothing says which module they came from",
            hint="Export the model with winml export, or bring tags over from the file it was made of: winml retag.",
        )
    return tree.modules


def record_boundaries(cuts: ModuleCuts, options: RunOptions) -> Recording:
    """Run the whole model once and keep what crosses the boundaries of the cuts.

    Types of values there that the graph does not declare are completed, in place.

    Args:
        cuts: The modules.
        options: What the whole model is fed: random values, or those of a file.

    Raises:
        UsageError: sizes or values do not fit the inputs of the whole model.
        StageError: ONNX Runtime cannot load or run it.
    """
    values = dict.fromkeys(value for item in cuts.calls for value in (*item.cut.inputs, *item.cut.outputs))
    graph = cuts.model.graph
    computed = [str(value.name) for value in values if value.producer() is not None]
    declared = {value.name for value in graph.outputs}
    session = open_with_outputs(cuts.path, [name for name in computed if name not in declared])
    fed = values_for(session, options)
    with refusals_explained(fed):
        arrays = {**fed.feeds, **(session.run(fed.feeds, computed) if computed else {})}
    for value in values:
        name = str(value.name)
        _complete_type(value, arrays[name], session.output_shapes.get(name, ()))
    return Recording({str(value.name): arrays[str(value.name)] for value in values}, fed)


def _complete_type(value: ir.Value, array: Array, shape: Sequence[int | str | None]) -> None:
    """Give a value the type that was recorded and the shape ONNX Runtime inferred, where the graph says none; in
    place.
    """
    if value.dtype is None:
        value.dtype = ir.DataType.from_numpy(array.dtype)
    if value.shape is None:
        value.shape = ir.Shape(shape if len(shape) == array.ndim else [None] * array.ndim)


def write_cut(cuts: ModuleCuts, item: CutCall, recording: Recording, path: Path) -> WrittenCut:
    """Write one cut as a model of its own, with its weights.

    Raises:
        WriteError: the file cannot be written.
    """
    model = cut_model(cuts.model, item.cut)
    inputs, outputs = _io_records(model.graph, recording)
    model_metadata = cuts.model.metadata_props
    records: dict[str, object] = {
        CUT_KEY: item.identity.as_record(),
        INPUTS_KEY: inputs,
        OUTPUTS_KEY: outputs,
        TREE_KEY: _tree_part(model_metadata.get(TREE_KEY, ""), item),
    }
    model.metadata_props.update({key: model_metadata[key] for key in (MODEL_KEY, EXPORT_KEY) if key in model_metadata})
    for key, value in records.items():
        model.metadata_props[key] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return WrittenCut(write_model(model, path), tuple(inputs), tuple(outputs))


def _io_records(graph: ir.Graph, recording: Recording) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    inputs = []
    for value in graph.inputs:
        entry = _io_record(value)
        array = recording.arrays[str(value.name)]
        if array.dtype.kind in "iu" and array.size:
            # Positions, masks and shapes: values nobody could guess, so those that were seen count as valid.
            entry["value_range"] = [int(array.min()), int(array.max())]
        inputs.append(entry)
    return inputs, [_io_record(value) for value in graph.outputs]


def _io_record(value: ir.Value) -> dict[str, object]:
    sizes = enumerate(value.shape or ())
    return {
        "name": value.name,
        "shape": [size if isinstance(size, int) else size.value or f"{value.name}_dim_{axis}" for axis, size in sizes],
        "dtype": str(value.dtype.numpy()) if value.dtype is not None else "undefined",
    }


def _tree_part(text: str, item: CutCall) -> list[Any]:
    """Return the recorded modules that the cut holds: those below its own, and those whose nodes came along."""
    used = {tag.tag for node in item.cut.nodes if (tag := read_tag(node))}
    try:
        return [
            entry
            for entry in json.loads(text or "[]")
            if entry["tag"] in used or address.is_within(entry["tag"], item.identity.tag)
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def compare_with_recording(path: Path, item: CutCall, recording: Recording) -> OutputComparison:
    """Run a written cut on its recorded inputs, and return the output that differs most from what was recorded.

    Raises:
        StageError: ONNX Runtime cannot load or run it.
    """
    outputs = open_with_outputs(path, ()).run(recording.of(item.cut.inputs))
    return compare_outputs([recording.of(item.cut.outputs)], [outputs]).worst
