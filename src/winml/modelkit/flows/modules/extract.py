"""What does ``winml extract`` do? Cuts modules out of a file, and writes each as a model that is checked.

All files appear together, or none. A module that cannot stand alone is named with its reason; the others are written.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.outputs import CUT_MODULE_THRESHOLD
from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME
from winml.modelkit.flows.modules.cuts import (
    CutCall,
    ModuleCuts,
    Recording,
    compare_with_recording,
    cut_modules,
    record_boundaries,
    write_cut,
)
from winml.modelkit.graph.files.output_files import OutputFiles, files_of_model, recover, refuse_existing, refuse_inputs
from winml.modelkit.graph.files.recovery import State, file_state
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.address import ModuleIdentity
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.transformed_file import ExtractedModule, ExtractResult, RefusedModule
from winml.modelkit.runtime.opened_model import RunOptions
from winml.modelkit.version import __version__

__all__ = ["ExtractOptions", "PlannedCuts", "extract_modules", "plan_cuts"]

LONGEST_STEM = 150
"""Chosen: with every ending, names stay below the 255 bytes that file systems take."""

_STEPS = ("modules cut", "activations recorded", "models written and checked")

_NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
"""Names Windows keeps for devices."""


@dataclass(frozen=True)
class ExtractOptions:
    """How modules are cut out and written."""

    run: RunOptions
    """How the whole model is run while the values at the boundaries are recorded."""
    protected: tuple[Path, ...] = ()
    """Files, besides those of the model, that may not be replaced: what it was made from."""
    with_inputs: bool = False
    """Also write what was recorded at the boundaries."""
    overwrite: bool = False
    """Replace files that are there."""


@dataclass(frozen=True)
class PlannedCuts:
    """Modules that were cut out of a graph in memory, and the files they would become."""

    cuts: ModuleCuts
    stems: tuple[str, ...]
    """Name of the file of each call, without its ending."""
    outputs: tuple[Path, ...]
    """The files, without the manifest."""
    state: State
    """Size and time of change of the model."""

    @property
    def is_current(self) -> bool:
        """Whether the model is still what it was."""
        return file_state(self.cuts.path) == self.state


def plan_cuts(path: Path, selector: str, folder: Path, options: ExtractOptions) -> PlannedCuts:
    """Cut modules out of a graph in memory; nothing is written.

    Raises:
        UsageError: the selector names nothing, or an output is what is read.
        OutputExistsError: a file is there already.
        InputError: the file is damaged or bears no tags.
    """
    refuse_existing([folder / EXTRACT_MANIFEST_NAME], overwrite=options.overwrite)
    state = file_state(path)
    cuts = cut_modules(path, selector)
    stems = tuple(_file_stems([item.identity for item in cuts.calls]))
    outputs = tuple(_output_paths(folder, stems, with_inputs=options.with_inputs))
    refuse_inputs(outputs, (*files_of_model(path), *options.protected))
    refuse_existing(outputs, overwrite=options.overwrite)
    return PlannedCuts(cuts, stems, outputs, state)


def extract_modules(
    path: Path,
    selector: str,
    folder: str | os.PathLike[str],
    options: ExtractOptions,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
    planned: PlannedCuts | None = None,
) -> ExtractResult:
    """Cut modules out of a model and write each as a model of its own.

    Args:
        path: The ONNX file.
        selector: Which modules.
        folder: Where the models and their manifest go.
        options: How they are cut out and written.
        on_step: Called when a step starts and when it ends.
        planned: The cuts, where a plan has made them; made again if the file has changed since.

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
    refuse_existing([folder / EXTRACT_MANIFEST_NAME], overwrite=options.overwrite)
    recover([folder / EXTRACT_MANIFEST_NAME])
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        if planned is None or not planned.is_current:
            planned = plan_cuts(path, selector, folder, options)
        cuts, stems = planned.cuts, planned.stems
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    result = _result_without_modules(options.run.shown, selector, folder, cuts)
    if not cuts.calls:
        return result
    with clock.step(_STEPS[1]) as step:
        recording = record_boundaries(cuts, options.run)
        step.summary = f"{len(recording.arrays)} values"
    with clock.step(_STEPS[2]) as step, OutputFiles() as files:
        manifest = files.reserve(folder / EXTRACT_MANIFEST_NAME)
        writer = _CutWriter(cuts, recording, folder, files, options.with_inputs)
        outcomes = [writer.write(item, stem) for item, stem in zip(cuts.calls, stems, strict=True)]
        modules = tuple(outcome for outcome in outcomes if isinstance(outcome, ExtractedModule))
        failed = (outcome for outcome in outcomes if isinstance(outcome, RefusedModule))
        result = replace(result, modules=modules, refused=(*cuts.refused, *failed), notes=recording.fed.notes)
        manifest.write_text(json.dumps(result.as_record(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if modules:
            written = files.commit(overwrite=options.overwrite)
            step.summary = f"{len(written)} files"
    return result


def _result_without_modules(displayed: str, selector: str, folder: Path, cuts: ModuleCuts) -> ExtractResult:
    """Return the result as far as it is known before anything is written."""
    return ExtractResult(
        source=displayed,
        selector=selector,
        folder=folder,
        tool_version=__version__,
        modules=(),
        refused=cuts.refused,
        without_nodes=cuts.without_nodes,
        notes=(),
    )


def _output_paths(folder: Path, stems: Iterable[str], *, with_inputs: bool) -> list[Path]:
    endings = (".onnx", ".inputs.npz", ".outputs.npz") if with_inputs else (".onnx",)
    return [folder / f"{stem}{ending}" for stem in stems for ending in endings]


@dataclass(frozen=True)
class _CutWriter:
    """Writes cut modules into a folder, and checks each."""

    cuts: ModuleCuts
    recording: Recording
    folder: Path
    files: OutputFiles
    with_inputs: bool

    def write(self, item: CutCall, stem: str) -> ExtractedModule | RefusedModule:
        """Write one module; one that ONNX Runtime does not run alone is refused with its reason.

        Raises:
            VerificationError: it does not answer as it does in the whole model.
        """
        staged = self.files.reserve(self.folder / f"{stem}.onnx")
        written = write_cut(self.cuts, item, self.recording, staged)
        try:
            worst = compare_with_recording(staged, item, self.recording)
        except StageError as error:
            for file in written.files:
                file.unlink()
            return RefusedModule(item.identity, error.message.replace(str(staged), f"{stem}.onnx"))
        if not worst.relative_diff <= CUT_MODULE_THRESHOLD:
            raise VerificationError(
                f"{item.identity.words}: cut out, output {worst.name} differs from the whole model by "
                f"{worst.relative_diff:.1e} of scale; tolerance {CUT_MODULE_THRESHOLD:.0e}",
                hint="Nothing was written. Please report it.",
            )
        return ExtractedModule(
            identity=item.identity,
            file=f"{stem}.onnx",
            inputs_file=self._write_recorded(f"{stem}.inputs.npz", item.cut.inputs),
            outputs_file=self._write_recorded(f"{stem}.outputs.npz", item.cut.outputs),
            inputs=written.inputs,
            outputs=written.outputs,
            nodes=len(item.cut.nodes),
            parameters=_parameter_count(item),
            size_bytes=sum(file.stat().st_size for file in written.files),
            drawn_in=_node_names(item.cut.drawn_in),
            left_out=_node_names(item.cut.left_out),
            max_abs_diff=worst.max_abs_diff,
            relative_diff=worst.relative_diff,
        )

    def _write_recorded(self, name: str, values: Sequence[ir.Value]) -> str | None:
        """Write what was recorded of some values; returns the name of the file, or None where it is not asked for."""
        if not self.with_inputs:
            return None
        _write_arrays(self.files.reserve(self.folder / name), self.recording.of(values))
        return name


def _node_names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(node.name or node.op_type for node in nodes)


def _parameter_count(item: CutCall) -> int:
    return sum(value.const_value.size for value in item.cut.initializers if value.const_value is not None)


def _write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an ``.npz`` file; unlike ``numpy.savez``, whatever the arrays are called."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _file_stems(identities: Sequence[ModuleIdentity]) -> list[str]:
    """Return a name without ending for each, that every file system takes and that no two share."""
    taken: set[str] = set()
    stems = []
    for identity in identities:
        plain = _plain_stem(identity)
        number, stem = 1, plain
        # File systems that ignore case see one name in ``block.A`` and ``block.a``.
        while stem.lower() in taken:
            number += 1
            stem = f"{plain}-{number}"
        taken.add(stem.lower())
        stems.append(stem)
    return stems


def _plain_stem(identity: ModuleIdentity) -> str:
    # The root has no path, nor has a module of which the file says no more than its tag.
    name = identity.module or ".".join(address.parse_tag(identity.tag))
    name = _NOT_IN_NAMES.sub("_", name)
    name = f"_{name}" if _RESERVED.match(name) or name.startswith(".") else name
    name = name.encode()[-LONGEST_STEM:].decode(errors="ignore").rstrip(" .")
    return f"{name}.call{identity.call}" if identity.calls > 1 else name
