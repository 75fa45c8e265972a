"""What does ``winml retag`` do? Carries the tags of a file to the one that another tool wrote from it.

Reads the structure of both, carries the tags, and copies the file byte by byte but for its metadata and, in another
folder, the names of its data files. No weight is read and no graph is written anew, so this is no call of
``graph_file``. Knows no PyTorch and imports none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.graph.files.graph_reading import MergedKeys, read_foreign
from winml.modelkit.graph.files.metadata_rewriting import rewrite_metadata
from winml.modelkit.graph.files.output_files import (
    ExportPaths,
    OutputFiles,
    refuse_existing,
    refuse_inputs,
    write_error,
)
from winml.modelkit.graph.files.placing import data_names, external_files, place_data
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.function_inlining import module_functions
from winml.modelkit.hierarchy.carry.carrying import CarryReport, carry_tags
from winml.modelkit.hierarchy.carry.original_graph import walk
from winml.modelkit.hierarchy.tagging import measure_coverage
from winml.modelkit.results.written_file import RetaggedModel
from winml.modelkit.words import count_noun

__all__ = ["retag_model"]

RELATED_SHARE = 0.1
"""Smallest share of nodes that must be found again in the model before. Chosen: a model quantized with every weight and
activation wrapped keeps a third; two models that only share input names have none."""


def retag_model(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> RetaggedModel:
    """Give every node of a file the tag of the module it came from.

    Args:
        before: The tagged file a tool was given; stays as it is.
        after: The file the tool wrote from it.
        output: The ``.onnx`` file to write; None writes ``after`` itself. Everything but the metadata of model and
            nodes is copied byte by byte; in another folder, its data files get names of their own.
        overwrite: Replace a file that is there already; needed to write ``after`` itself.

    Raises:
        UsageError: an output that exists, is ``before`` or data of either, or does not end in ``.onnx``; or a path with
            no file.
        InputError: a file is no ONNX model, ``before`` bears no tags, ``after`` was not made from it, or its data is
            missing.
        WriteError: the output cannot be written.
    """
    before, after = Path(before), Path(after)
    target = after if output is None else Path(output)
    _refuse_output(before, after, target, overwrite=overwrite)
    original, _ = read_foreign(before)
    _refuse_module_functions(after)
    model, merged = read_foreign(after)
    data = external_files(after)
    refuse_inputs([target], [*external_files(before), *data])
    shares_data = target.absolute().parent.resolve() == after.absolute().parent.resolve()
    report = carry_tags(original, model)
    _refuse_unrelated(before, after, report)
    with OutputFiles() as files:
        try:
            staged = files.reserve(target)
            copies = {} if shares_data else place_data(data, staged)
            names = {name: copies[after.parent / name].name for name in data_names(after)} if copies else {}
            rewrite_metadata(after, staged, model.metadata_props, *_node_metadata(model), locations=names)
            files.keep(external_files(before))
        except OSError as error:
            raise write_error(target, error) from error
        written = files.commit(overwrite=overwrite)
    return RetaggedModel(
        model_path=target,
        before=before,
        after=after,
        report=report,
        coverage=measure_coverage(model),
        repaired=merged.nodes,
        size_bytes=sum(written.values()),
        notes=(
            *MergedKeys(0, merged.model_keys).notes(),
            *report.notes,
            *_sharing_notes(target, after, data if shares_data else ()),
        ),
    )


def _refuse_output(before: Path, after: Path, target: Path, *, overwrite: bool) -> None:
    ExportPaths.for_output(target, with_sidecar=False, with_report=False)
    refuse_inputs([target], [before])
    if target == after and not overwrite and after.exists():
        raise UsageError(
            f"no output was given, and {after} itself is changed only when that is asked for",
            hint="Name an output with -o, or use --overwrite.",
        )
    refuse_existing([target], overwrite=overwrite)


def _refuse_module_functions(after: Path) -> None:
    """Refuse a file whose modules are functions: a node of theirs may stand for several modules.

    Raises:
        InputError: it is one.
    """
    if functions := module_functions(read_structure(after, as_written=True)):
        raise InputError(
            f"{after} holds {count_noun(len(functions), 'module')} as functions, whose nodes bear their tags already",
            hint=f"Put them back into the graph first: winml optimize -m {after} -o flat.onnx",
        )


def _refuse_unrelated(before: Path, after: Path, report: CarryReport) -> None:
    """Refuse what cannot be carried, or would be guesswork.

    Raises:
        InputError: says which of the two it is.
    """
    if not report.is_known:
        raise InputError(
            f"{before} bears no tags, so there are none to carry",
            hint="Give the file that winml export wrote, before any other tool changed it.",
        )
    matched_nodes = report.found_again
    if report.nodes and matched_nodes < RELATED_SHARE * report.nodes:
        raise InputError(
            f"{after} has hardly anything in common with {before}: {matched_nodes} of its {report.nodes} nodes were "
            "found again, by name or by value",
            hint="Give the file it was made from.",
        )


def _node_metadata(model: ir.Model) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    """Return the metadata of every node in the order of the file: those of the graph, and those of functions."""
    functions = [node.metadata_props for function in model.functions.values() for node, _ in walk(function)]
    return [node.metadata_props for node, _ in walk(model.graph)], list(functions)


def _sharing_notes(target: Path, after: Path, shared: tuple[Path, ...]) -> tuple[str, ...]:
    if not shared or target == after:
        return ()
    names = ", ".join(file.name for file in shared)
    return (f"its weights stay in {names}, which {after.name} names too",)
