"""Extraction of modules of a file as separate, verified models.

The values at the boundaries of modules are recorded in one run, and compared with the outputs of the extracted models.
All files are committed together, or no file is. Modules unable to run alone are reported with the reason; the remaining
modules are written.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.files import refuse_random
from winml.modelkit.compare.outputs import CUT_MODULE_THRESHOLD, OutputComparison, compare_outputs
from winml.modelkit.errors import InputError, StageError, VerificationError, opt
from winml.modelkit.extract.records import ExtractedModule, ExtractResult, RefusedModule
from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME
from winml.modelkit.metadata_keys import CUT_KEY, EXPORT_KEY, INPUTS_KEY, MODEL_KEY, OUTPUTS_KEY, TREE_KEY
from winml.modelkit.onnx.contexts import refuse_compiled_modules
from winml.modelkit.onnx.cutting import Cut, GraphModules, ModuleParts, Refusal, cut_model, fused_error
from winml.modelkit.onnx.files.graph_reading import load_foreign
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.output_files import OutputFiles, files_of_model, recover, refuse_existing, refuse_inputs
from winml.modelkit.onnx.files.reading import read_structure, reading_graph
from winml.modelkit.onnx.files.recovery import State, file_state
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.validity import refuse_cycles
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.graph_sessions import open_session, widened_graph
from winml.modelkit.ort.opened_model import RunOptions, Values, refusals_explained, run_at_fitting_sizes, values_for
from winml.modelkit.progress import OnStep, StepClock
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.selector import select
from winml.modelkit.tags.tagging import read_tag
from winml.modelkit.transform.module_functions import (
    modules_of_tree,
    read_model_tree,
    source_notes,
    write_tree_tags,
)
from winml.modelkit.version import __version__

_LONGEST_STEM = 150
"""Longest file name in bytes, without suffixes. Chosen: names with any suffix stay below the file systems' limit of
255 bytes."""

_STEPS = ("modules cut", "activations recorded", "models written and checked")

_NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
"""Names that Windows reserves for devices."""


@dataclass(frozen=True)
class ExtractOptions:
    """Options of an extraction."""

    run: RunOptions
    """Options of the run of the whole model that records boundary values."""
    protected: tuple[Path, ...] = ()
    """Further files that may not be replaced: the sources of the model."""
    with_inputs: bool = False
    """Also write the recorded boundary values."""
    overwrite: bool = False
    """Replace existing files."""


@dataclass(frozen=True)
class PlannedCuts:
    """Modules cut out of a graph in memory, and the files to write."""

    cuts: ModuleCuts
    stems: tuple[str, ...]
    """File name of each call without suffix, aligned with ``cuts.calls``."""
    outputs: tuple[Path, ...]
    """The files to write, without the manifest."""
    state: State
    """Size and modification time of the model."""

    @property
    def is_current(self) -> bool:
        """True if the model has not changed since it was read."""
        return file_state(self.cuts.path) == self.state


def plan_cuts(path: Path, selector: str, folder: Path, options: ExtractOptions) -> PlannedCuts:
    """Cut modules out of a graph in memory; nothing is written.

    Raises:
        UsageError: the selector matches nothing, or an output is an input.
        OutputExistsError: a file exists already.
        InputError: the file is damaged or has no module information.
    """
    refuse_existing([folder / EXTRACT_MANIFEST_NAME], overwrite=options.overwrite)
    state = file_state(path)
    cuts = cut_modules(path, selector)
    stems = tuple(_file_stems([call.identity for call in cuts.calls]))
    endings = (".onnx", ".inputs.npz", ".outputs.npz") if options.with_inputs else (".onnx",)
    outputs = tuple(folder / f"{stem}{ending}" for stem in stems for ending in endings)
    refuse_inputs(outputs, (*files_of_model(path), *options.protected))
    refuse_existing(outputs, overwrite=options.overwrite)
    return PlannedCuts(cuts, stems, outputs, state)


def extract_from_file(
    path: Path,
    selector: str,
    folder: str | os.PathLike[str],
    options: ExtractOptions,
    *,
    on_step: OnStep | None = None,
    planned: PlannedCuts | None = None,
) -> ExtractResult:
    """Cut modules out of a model and write each as a separate model.

    Args:
        path: The ONNX file.
        selector: Selector of the modules.
        folder: Folder for the models and their manifest.
        options: Options of the extraction.
        on_step: Called when a step starts and when it ends.
        planned: The cuts of a plan, if any; made again if the file has changed since.

    Returns:
        The written and the refused modules; no file is written if no module could be cut out.

    Raises:
        UsageError: the selector matches nothing, sizes or values do not fit, or an output is an input.
        OutputExistsError: a file exists already.
        InputError: the file is damaged or has no module information.
        StageError: ONNX Runtime cannot run the whole model.
        VerificationError: outputs of a cut model differ from those inside the whole model; nothing was written.
    """
    folder = Path(folder)
    refuse_existing([folder / EXTRACT_MANIFEST_NAME], overwrite=options.overwrite)
    recover([folder / EXTRACT_MANIFEST_NAME])
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        if planned is None or not planned.is_current:
            planned = plan_cuts(path, selector, folder, options)
        cuts, stems = planned.cuts, planned.stems
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    result = ExtractResult(
        source=options.run.shown,
        selector=selector,
        folder=folder,
        tool_version=__version__,
        modules=(),
        refused=cuts.refused,
        without_nodes=cuts.without_nodes,
        notes=(),
    )
    if not cuts.calls:
        return result
    with clock.step(_STEPS[1]) as step:
        recording = run_at_fitting_sizes(cuts.path, options.run, partial(record_boundaries, cuts))
        step.summary = f"{len(recording.arrays)} values"
    with clock.step(_STEPS[2]) as step, OutputFiles() as files:
        files.reserve(folder / EXTRACT_MANIFEST_NAME)  # moved last
        writer = _CutWriter(cuts, recording, folder, files, options.with_inputs)
        outcomes = [writer.write(item, stem) for item, stem in zip(cuts.calls, stems, strict=True)]
        modules = tuple(outcome for outcome in outcomes if isinstance(outcome, ExtractedModule))
        failures = (outcome for outcome in outcomes if isinstance(outcome, RefusedModule))
        result = replace(
            result, modules=modules, refused=(*cuts.refused, *failures), notes=(*cuts.notes, *recording.fed.notes)
        )
        files.write_json(folder / EXTRACT_MANIFEST_NAME, result.as_record())
        if modules:
            written = files.commit(overwrite=options.overwrite)
            step.summary = f"{len(written)} files"
    return result


@dataclass(frozen=True)
class _CutWriter:
    """Write cut modules, and compare their outputs with the recording."""

    cuts: ModuleCuts
    recording: Recording
    folder: Path
    files: OutputFiles
    with_inputs: bool

    def write(self, call: CutCall, stem: str) -> ExtractedModule | RefusedModule:
        """Write one module, or return a refusal with the reason if ONNX Runtime cannot run the module alone.

        Raises:
            VerificationError: the outputs differ from those inside the whole model.
        """
        staged = self.files.reserve(self.folder / f"{stem}.onnx")
        written_cut = write_cut(self.cuts, call, self.recording, staged)
        try:
            worst = compare_with_recording(staged, call, self.recording)
        except StageError as error:
            for file in written_cut.files:
                remove_file(file)
            return RefusedModule(call.identity, error.message.replace(str(staged), f"{stem}.onnx"))
        if not worst.relative_diff <= CUT_MODULE_THRESHOLD:
            inputs = self.recording.of(call.cut.inputs)
            first, second = (open_session(staged, as_written=True).run(inputs) for _ in range(2))
            refuse_random(first, second, staged, call.identity.words)
            raise VerificationError(
                f"{call.identity.words}: output {worst.name} of the extracted module differs from the whole "
                f"model by {worst.relative_diff:.1e} of its largest value; tolerance {CUT_MODULE_THRESHOLD:.0e}",
                hint="No file was written. This is a bug in winml: please report it.",
            )
        return ExtractedModule(
            identity=call.identity,
            file=f"{stem}.onnx",
            inputs_file=self._write_recorded(f"{stem}.inputs.npz", call.cut.inputs),
            outputs_file=self._write_recorded(f"{stem}.outputs.npz", call.cut.outputs),
            inputs=written_cut.inputs,
            outputs=written_cut.outputs,
            nodes=len(call.cut.nodes),
            parameters=sum(value.const_value.size for value in call.cut.initializers if value.const_value is not None),
            size_bytes=sum(file.stat().st_size for file in written_cut.files),
            drawn_in=_node_names(call.cut.drawn_in),
            left_out=_node_names(call.cut.left_out),
            max_abs_diff=worst.max_abs_diff,
            relative_diff=worst.relative_diff,
        )

    def _write_recorded(self, name: str, values: Sequence[ir.Value]) -> str | None:
        """Write recorded arrays to an ``.npz`` file.

        Returns:
            The file name; `None` without ``with_inputs``.
        """
        if not self.with_inputs:
            return None
        _write_arrays(self.files.reserve(self.folder / name), self.recording.of(values))
        return name


def _write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an ``.npz`` file; unlike ``numpy.savez``, any name of an array is allowed."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _node_names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(node.name or node.op_type for node in nodes)


def _file_stems(identities: Sequence[ModuleIdentity]) -> Iterator[str]:
    """Yield unique, portable file names without suffix, aligned with ``identities``."""
    used_stems: set[str] = set()
    for identity in identities:
        base_stem = _plain_stem(identity)
        number, stem = 1, base_stem
        # ``block.A`` and ``block.a`` are one name on file systems that ignore case.
        while stem.lower() in used_stems:
            number += 1
            stem = f"{base_stem}-{number}"
        used_stems.add(stem.lower())
        yield stem


def _plain_stem(identity: ModuleIdentity) -> str:
    """Return the module path, or else the tag, as a file name without suffix; invalid characters become ``_``."""
    # The path is empty for the root, and for modules known by tag only.
    name = identity.module or ".".join(address.parse_tag(identity.tag))
    name = _NOT_IN_NAMES.sub("_", name)
    name = f"_{name}" if _RESERVED.match(name) or name.startswith(".") else name
    name = name.encode()[-_LONGEST_STEM:].decode(errors="ignore").rstrip(" .")
    return f"{name}.call{identity.call}" if identity.calls > 1 else name


@dataclass(frozen=True)
class CutCall:
    """One call of a module, cut out of the graph."""

    identity: ModuleIdentity
    cut: Cut


@dataclass(frozen=True)
class ModuleCuts:
    """Cuts of the selected modules of one file."""

    path: Path
    model: ir.Model
    calls: tuple[CutCall, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """Boundary values recorded in one run of the whole model."""

    arrays: Arrays
    """Name of a value → array."""
    fed: Values
    """Inputs of the whole model."""

    def of(self, values: Sequence[ir.Value]) -> dict[str, Array]:
        """Return the arrays of some values."""
        return {str(value.name): self.arrays[str(value.name)] for value in values}


@dataclass(frozen=True)
class _WrittenCut:
    """A written cut."""

    files: tuple[Path, ...]
    """Written files, the model first."""
    inputs: tuple[dict[str, Any], ...]
    """Records of the inputs (``winml.io.inputs``)."""
    outputs: tuple[dict[str, Any], ...]


def cut_modules(path: Path, selector: str) -> ModuleCuts:
    """Cut every selected module out of a file, each call separately; nothing is written.

    Args:
        path: An ONNX file with tags, or with modules named by another tool.
        selector: Selector as in :func:`~winml.modelkit.tags.selector.select`. Nested modules are each cut out.

    Raises:
        UsageError: the selector matches nothing, or only modules that are fused into others.
        InputError: the file is no ONNX file, or has no module information.
    """
    structure = read_structure(path)
    refuse_compiled_modules(structure, path)
    refuse_cycles(structure, path)
    # Other tools may have written the file; metadata of nodes that they damaged is repaired before it is written again.
    model = reading_graph(path, lambda: load_foreign(path))
    # Tools write nodes in any order, which ONNX Runtime allows; cuts require the order of computation.
    model.graph.sort()
    graph = _tagged_modules(model, path)
    modules = select(graph.modules, selector, graph.tag_of)
    parts = ModuleParts(model)
    calls, refused, without_nodes = [], [], []
    for module in modules:
        cut_calls = parts.cut(module.tag)
        if not cut_calls:
            without_nodes.append(ModuleIdentity(module.path, module.tag, module.class_name))
        for cut_call in cut_calls:
            identity = ModuleIdentity(module.path, module.tag, module.class_name, cut_call.call, cut_call.calls)
            if isinstance(cut_call.result, Refusal):
                refused.append(RefusedModule(identity, cut_call.result.reason))
            else:
                calls.append(CutCall(identity, cut_call.result))
    tags = {identity.tag for identity in without_nodes}
    if not (calls or refused) and (owners := graph.owners_of_fused(tags)):
        raise fused_error(f"{opt.module} {selector}", owners)
    return ModuleCuts(path, model, tuple(calls), tuple(refused), tuple(without_nodes), tuple(source_notes(graph)))


def _tagged_modules(model: ir.Model, path: Path) -> GraphModules:
    """Return the modules of a graph; if another tool named them, its nodes are tagged in place.

    Raises:
        InputError: the nodes have no module information.
    """
    tree = read_model_tree(model, path.stem)
    if tree.source == "none":
        raise InputError(
            f"{path}: the nodes have no module information",
            hint="Export the model with winml export, or transfer tags from the source file with winml retag.",
        )
    write_tree_tags(model, tree)
    return modules_of_tree(model, tree)


def record_boundaries(cuts: ModuleCuts, options: RunOptions) -> Recording:
    """Run the whole model once and record the values at the boundaries of the cuts.

    Undeclared types and shapes of boundary values are set in ``cuts.model``.

    Args:
        cuts: The modules.
        options: Inputs of the whole model: random values, or values of a file.

    Raises:
        UsageError: sizes or values do not fit the inputs of the whole model.
        StageError: ONNX Runtime cannot load or run the model.
    """
    values = dict.fromkeys(value for call in cuts.calls for value in (*call.cut.inputs, *call.cut.outputs))
    graph = cuts.model.graph
    names = [str(value.name) for value in values if value.producer() is not None]
    outputs = {value.name for value in graph.outputs}
    if any(value.dtype in (None, ir.DataType.BFLOAT16) for value in values) and widened_graph(cuts.path) is not None:
        raise StageError(
            f"{cuts.path} computes in bfloat16, for which ONNX Runtime has no kernels on the CPU",
            hint=f"Extract from a file that was exported with {opt.dtype} fp32.",
        )
    session = open_session(cuts.path, as_written=True, outputs=[name for name in names if name not in outputs])
    input_values = values_for(session, options)
    with refusals_explained(input_values):
        arrays = {**input_values.feeds, **(session.run(input_values.feeds, names) if names else {})}
    for value in values:
        name = str(value.name)
        _complete_type(value, arrays[name], session.output_shapes.get(name, ()))
    return Recording({str(value.name): arrays[str(value.name)] for value in values}, input_values)


def _complete_type(value: ir.Value, array: Array, shape: Sequence[int | str | None]) -> None:
    """Set the recorded type and the inferred shape of a value if the graph declares none; in place."""
    if value.dtype is None:
        value.dtype = ir.DataType.from_numpy(array.dtype)
    if value.shape is None:
        value.shape = ir.Shape(shape if len(shape) == array.ndim else [None] * array.ndim)


def write_cut(cuts: ModuleCuts, call: CutCall, recording: Recording, path: Path) -> _WrittenCut:
    """Write one cut as a separate model, with weights and metadata.

    Args:
        cuts: The model, and its cuts.
        call: The module call to write.
        recording: Recorded values at its boundary.
        path: The file to write.

    Raises:
        WriteError: the file cannot be written.
    """
    model = cut_model(cuts.model, call.cut)
    inputs, outputs = _io_records(model.graph, recording)
    model_metadata = cuts.model.metadata_props
    records: dict[str, object] = {
        CUT_KEY: call.identity.as_record(),
        INPUTS_KEY: inputs,
        OUTPUTS_KEY: outputs,
        TREE_KEY: _filter_tree(model_metadata.get(TREE_KEY, ""), call),
    }
    model.metadata_props.update({key: model_metadata[key] for key in (MODEL_KEY, EXPORT_KEY) if key in model_metadata})
    for key, value in records.items():
        model.metadata_props[key] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _WrittenCut(write_model(model, path), tuple(inputs), tuple(outputs))


def _io_records(graph: ir.Graph, recording: Recording) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return metadata records of the inputs, with the recorded range of integers, and of the outputs."""
    inputs = []
    for value in graph.inputs:
        entry = _io_record(value)
        array = recording.arrays[str(value.name)]
        if array.dtype.kind in "iu" and array.size:
            # Valid positions, masks and shapes cannot be guessed: the recorded range counts as valid.
            entry["value_range"] = [int(array.min()), int(array.max())]
        inputs.append(entry)
    return inputs, [_io_record(value) for value in graph.outputs]


def _io_record(value: ir.Value) -> dict[str, object]:
    """Return the metadata record of an input or output: name, shape and dtype."""
    sizes = enumerate(value.shape or ())
    return {
        "name": value.name,
        "shape": [size if isinstance(size, int) else size.value or f"{value.name}_dim_{axis}" for axis, size in sizes],
        "dtype": str(value.dtype.numpy()) if value.dtype is not None else "undefined",
    }


def _filter_tree(text: str, call: CutCall) -> list[Any]:
    """Return the tree entries of the cut module, of submodules, and of other included nodes; `[]` if damaged."""
    tags = {tag.tag for node in call.cut.nodes if (tag := read_tag(node))}
    try:
        return [
            entry
            for entry in load_metadata(text or "[]")
            if entry["tag"] in tags or address.is_within(entry["tag"], call.identity.tag)
        ]
    except (ValueError, TypeError, KeyError):
        return []


def compare_with_recording(path: Path, call: CutCall, recording: Recording) -> OutputComparison:
    """Run a written cut on its recorded inputs, and return the output with the largest difference from the recording.

    Raises:
        StageError: ONNX Runtime cannot load or run the written model.
    """
    outputs = open_session(path, as_written=True).run(recording.of(call.cut.inputs))
    return compare_outputs([recording.of(call.cut.outputs)], [outputs]).worst
