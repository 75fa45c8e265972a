"""Transfer of tags by ``winml retag`` from a source to a file made from the source by other tools.

Reads the structure of both files, transfers the tags, and copies the second file byte by byte except for its metadata
and, in another folder, the names of its data files. No weight is read and no graph is serialized again, so
``graph_file`` is not used. Independent of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.errors import InputError, MissingOutputError, opt
from winml.modelkit.onnx.files import output_files
from winml.modelkit.onnx.files.graph_reading import MergedKeys, read_foreign
from winml.modelkit.onnx.files.placing import data_names, external_files, place_data
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.files.recovery import State, file_state
from winml.modelkit.onnx.files.writing import rewrite_metadata
from winml.modelkit.onnx.function_inlining import module_functions
from winml.modelkit.tags.carry.carrying import CarryReport, carry_tags
from winml.modelkit.tags.carry.original_graph import walk
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.transform.records import RetaggedModel
from winml.modelkit.words import count_noun

_RELATED_SHARE = 0.1
"""Smallest share of nodes that must match nodes of the source. Chosen: a third matches in a model quantized with every
weight and activation wrapped; none match in two models that share input names only."""


@dataclass(frozen=True)
class CarriedTags:
    """The structure of a file with transferred tags, before writing."""

    before: Path
    after: Path
    target: Path
    model: ir.Model
    """Structure of ``after``, with the tags."""
    merged: MergedKeys
    report: CarryReport
    original_data: tuple[Path, ...]
    data: tuple[Path, ...]
    """Data files that ``after`` references."""
    states: Mapping[Path, State]
    """Sizes and modification times of ``before`` and ``after``."""

    @property
    def is_current(self) -> bool:
        """True if the files have not changed since they were read."""
        return all(file_state(path) == state for path, state in self.states.items())

    @property
    def shares_data(self) -> bool:
        """True if the result is in the folder of ``after`` and references the same data files."""
        return self.target.absolute().parent.resolve() == self.after.absolute().parent.resolve()


def carry_between(before: Path, after: Path, target: Path, *, overwrite: bool) -> CarriedTags:
    """Transfer tags in memory, so that every node has the tag of its original module; nothing is written.

    Args:
        before: The tagged file that the tool read; it is not changed.
        after: The file that the tool wrote.
        target: The ``.onnx`` file to write, which may be ``after`` itself. Everything but the metadata of model and
            nodes is copied byte by byte; data files get new names in another folder.
        overwrite: Replace an existing file; required to write ``after`` itself.

    Raises:
        UsageError: the output exists, is ``before`` or a data file, or does not end in ``.onnx``; or an input is
            missing.
        InputError: a file is no ONNX model, ``before`` has no tags, ``after`` was not made from ``before``, or a data
            file is missing.
        WriteError: the output cannot be written.
    """
    _refuse_output(before, after, target, overwrite=overwrite)
    states = {path: file_state(path) for path in (before, after)}
    original, _ = read_foreign(before)
    _refuse_module_functions(after)
    model, merged = read_foreign(after)
    data, original_data = external_files(after), external_files(before)
    output_files.refuse_inputs([target], [*original_data, *data])
    report = carry_tags(original, model)
    _refuse_unrelated(before, after, report)
    return CarriedTags(before, after, target, model, merged, report, tuple(original_data), tuple(data), states)


def write_transfer(transfer: CarriedTags, *, overwrite: bool) -> RetaggedModel:
    """Write the file with the transferred tags.

    Raises:
        OutputExistsError: the output exists by now.
        WriteError: the output cannot be written.
    """
    target, after, model = transfer.target, transfer.after, transfer.model
    with output_files.OutputFiles() as files:
        with output_files.write_errors_of(target):
            staged = files.reserve(target)
            copies = {} if transfer.shares_data else place_data(transfer.data, staged)
            names = {name: copies[after.parent / name].name for name in data_names(after)} if copies else {}
            rewrite_metadata(after, staged, model.metadata_props, *_node_metadata(model), locations=names)
            files.keep(transfer.original_data)
        file_sizes = files.commit(overwrite=overwrite)
    return RetaggedModel(
        model_path=target,
        before=transfer.before,
        after=after,
        report=transfer.report,
        coverage=measure_coverage(model),
        repaired=transfer.merged.nodes,
        size_bytes=sum(file_sizes.values()),
        notes=(
            *MergedKeys(0, transfer.merged.model_keys).notes(),
            *transfer.report.notes,
            *_sharing_notes(target, after, transfer.data if transfer.shares_data else ()),
        ),
    )


def _refuse_output(before: Path, after: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse an output that is an input, exists, or is no ``.onnx`` path.

    Args:
        before: The tagged file.
        after: The file without its tags.
        target: The output.
        overwrite: True if an existing output may be replaced.

    Raises:
        UsageError: the output cannot be used; to change ``after`` in place, ``overwrite`` is required.
    """
    output_files.ExportPaths.for_output(target, with_sidecar=False, with_report=False)
    output_files.refuse_inputs([target], [before])
    if target == after and not overwrite and after.exists():
        raise MissingOutputError(
            f"no output file; {after} is only changed in place with {opt.overwrite}",
            hint=f"Set an output file with -o, or use {opt.overwrite}.",
        )
    output_files.refuse_existing([target], overwrite=overwrite)


def _refuse_module_functions(after: Path) -> None:
    """Refuse a file with modules as functions, since a node of a function may stand for several modules.

    Raises:
        InputError: the file contains such functions.
    """
    if functions := module_functions(read_structure(after, as_written=True)):
        raise InputError(
            f"{after} contains {count_noun(len(functions), 'module')} as functions, and the nodes of functions "
            "already have tags",
            hint=f"Inline them first: winml optimize -m {after} -o flat.onnx",
        )


def _refuse_unrelated(before: Path, after: Path, report: CarryReport) -> None:
    """Refuse a source without tags, and a file with too few matching nodes.

    Args:
        before: The tagged file.
        after: The file without its tags.
        report: The result of the transfer of tags.

    Raises:
        InputError: the tags cannot be transferred; the message states the reason.
    """
    if not report.is_known:
        raise InputError(
            f"{before} has no tags to transfer",
            hint="Pass the file that winml export wrote, before any other tool changed it.",
        )
    matched_nodes = report.matched
    if report.nodes and matched_nodes < _RELATED_SHARE * report.nodes:
        raise InputError(
            f"{after} does not match {before}: only {matched_nodes} of its {report.nodes} nodes correspond to "
            "nodes there, by name or by value",
            hint="Pass the source file it was made from.",
        )


def _node_metadata(model: ir.Model) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    """Return the metadata of the nodes of the graph, and of the nodes of functions, both in the order of the file."""
    functions = [node.metadata_props for function in model.functions.values() for node, _ in walk(function)]
    return [node.metadata_props for node, _ in walk(model.graph)], list(functions)


def _sharing_notes(target: Path, after: Path, shared: tuple[Path, ...]) -> Iterator[str]:
    """Yield a note on the data files that the output shares with ``after``."""
    if shared and target != after:
        names = ", ".join(file.name for file in shared)
        yield f"its weights remain in {names}, which {after.name} also references"
