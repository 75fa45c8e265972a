"""How do modules become files of their own? Cut, recorded, written and compared with the whole; all or nothing of it.

A module that cannot stand alone is told with its reason, and costs the others nothing.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME, data_path
from winml.modelkit.flows.modules.cuts import (
    EXACT,
    CutCall,
    ModuleCuts,
    Recording,
    compare_with_whole,
    cut_modules,
    record,
    write_cut,
)
from winml.modelkit.graph.files.output_files import OutputFiles, refuse_existing, refuse_inputs
from winml.modelkit.graph.files.output_paths import files_of_model
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.module_identity import ModuleIdentity
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.extract_result import ExtractedModule, ExtractResult, RefusedModule
from winml.modelkit.runtime.opened_model import RunOptions
from winml.modelkit.version import __version__

__all__ = ["extract_modules"]

LONGEST_STEM = 150
"""Chosen: with every ending, names stay below the 255 bytes that file systems take."""

_STEPS = ("modules cut", "activations recorded", "models written and checked")

_NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
"""Names Windows keeps for devices."""


def extract_modules(
    path: Path,
    selector: str,
    folder: str | os.PathLike[str],
    *,
    options: RunOptions,
    protected: Iterable[Path] = (),
    with_inputs: bool = False,
    overwrite: bool = False,
    on_step: Callable[[StepEvent], None] | None = None,
) -> ExtractResult:
    """Cut modules out of a model and write each as a model of its own.

    Args:
        path: The ONNX file.
        selector: Which modules.
        folder: Where the models and their manifest go.
        options: How the whole model is run while the boundaries are recorded.
        protected: Files, besides those of the model, that may not be replaced: what it was made from.
        with_inputs: Also write what was recorded at the boundaries.
        overwrite: Replace files that are there.
        on_step: Called when a step starts and when it ends.

    Returns:
        What was written and what was refused; nothing is written where nothing could be cut.

    Raises:
        UsageError: the selector names nothing, sizes or values do not fit, or an output is what is read.
        OutputExistsError: a file is there already.
        InputError: the file is damaged or bears no tags.
        StageError: ONNX Runtime cannot run the whole model.
        VerificationError: a cut model does not answer as the whole does; nothing was written.
    """
    folder = Path(folder)
    refuse_existing([folder / EXTRACT_MANIFEST_NAME], overwrite=overwrite)
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        cuts = cut_modules(path, selector)
        names = _file_names([item.identity for item in cuts.calls])
        planned = _planned(folder, names, with_inputs=with_inputs)
        refuse_inputs(planned, (*files_of_model(path), *protected))
        refuse_existing(planned, overwrite=overwrite)
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    if not cuts.calls:
        return _result(options.shown, selector, folder, cuts, (), (), ())
    with clock.step(_STEPS[1]) as step:
        recording = record(cuts, options)
        step.summary = f"{len(recording.arrays)} values"
    with clock.step(_STEPS[2]) as step, OutputFiles() as files:
        manifest = files.stage(folder / EXTRACT_MANIFEST_NAME)
        modules, failed = _write_all(cuts, names, recording, folder, files, with_inputs=with_inputs)
        result = _result(options.shown, selector, folder, cuts, modules, failed, recording.whole.notes)
        manifest.write_text(json.dumps(result.as_record(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if modules:
            written = files.commit(overwrite=overwrite)
            step.summary = f"{len(written)} files"
    return result


def _planned(folder: Path, names: Iterable[str], *, with_inputs: bool) -> list[Path]:
    # Data that an earlier model of this name kept outside would be left without it.
    models = (".onnx", data_path(Path(".onnx")).name)
    endings = (*models, ".inputs.npz", ".outputs.npz") if with_inputs else models
    return [folder / f"{name}{ending}" for name in names for ending in endings]


def _write_all(
    cuts: ModuleCuts,
    names: Sequence[str],
    recording: Recording,
    folder: Path,
    files: OutputFiles,
    *,
    with_inputs: bool,
) -> tuple[list[ExtractedModule], list[RefusedModule]]:
    modules, failed = [], []
    for item, name in zip(cuts.calls, names, strict=True):
        staged = files.stage(folder / f"{name}.onnx")
        files.drop(data_path(folder / f"{name}.onnx"))
        written = write_cut(cuts, item, recording, staged)
        try:
            worst = compare_with_whole(staged, item, recording)
        except StageError as error:
            for file in written.files:
                file.unlink()
            failed.append(RefusedModule(item.identity, error.message.replace(str(staged), f"{name}.onnx")))
            continue
        if not worst.relative_diff <= EXACT:
            raise VerificationError(
                f"{item.identity.words}: cut out, output {worst.name} differs from the whole model by "
                f"{worst.relative_diff:.1e} of scale; accepted {EXACT:.0e}",
                hint="Nothing was written. Please report it.",
            )
        recorded: dict[str, str | None] = {"inputs": None, "outputs": None}
        if with_inputs:
            for kind, values in (("inputs", item.cut.inputs), ("outputs", item.cut.outputs)):
                recorded[kind] = f"{name}.{kind}.npz"
                _write_arrays(files.stage(folder / f"{name}.{kind}.npz"), recording.of(values))
        modules.append(
            ExtractedModule(
                identity=item.identity,
                file=f"{name}.onnx",
                inputs_file=recorded["inputs"],
                outputs_file=recorded["outputs"],
                inputs=written.inputs,
                outputs=written.outputs,
                nodes=len(item.cut.nodes),
                parameters=_parameters(item),
                size_bytes=sum(file.stat().st_size for file in written.files),
                drawn_in=_names(item.cut.drawn_in),
                left_out=_names(item.cut.left_out),
                max_abs_diff=worst.max_abs_diff,
                relative_diff=worst.relative_diff,
            )
        )
    return modules, failed


def _result(
    shown: str,
    selector: str,
    folder: Path,
    cuts: ModuleCuts,
    modules: Sequence[ExtractedModule],
    failed: Sequence[RefusedModule],
    notes: Sequence[str],
) -> ExtractResult:
    return ExtractResult(
        source=shown,
        selector=selector,
        folder=folder,
        tool_version=__version__,
        modules=tuple(modules),
        refused=(*cuts.refused, *failed),
        without_nodes=cuts.without_nodes,
        notes=tuple(notes),
    )


def _names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(node.name or node.op_type for node in nodes)


def _parameters(item: CutCall) -> int:
    return sum(value.const_value.size for value in item.cut.initializers if value.const_value is not None)


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an ``.npz`` file; unlike ``numpy.savez``, whatever the arrays are called."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _file_names(identities: Sequence[ModuleIdentity]) -> list[str]:
    """Return a name without ending for each, that every file system takes and that no two share."""
    taken: set[str] = set()
    names = []
    for identity in identities:
        plain = _plain_name(identity)
        number, name = 1, plain
        # File systems that ignore case see one name in ``block.A`` and ``block.a``.
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names


def _plain_name(identity: ModuleIdentity) -> str:
    # The root has no path, nor has a module of which the file says no more than its tag.
    name = identity.module or ".".join(address.parse_tag(identity.tag))
    name = _NOT_IN_NAMES.sub("_", name)
    name = f"_{name}" if _RESERVED.match(name) or name.startswith(".") else name
    name = name.encode()[-LONGEST_STEM:].decode(errors="ignore").rstrip(" .")
    return f"{name}.call{identity.call}" if identity.calls > 1 else name
