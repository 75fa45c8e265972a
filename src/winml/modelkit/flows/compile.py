"""Compiles an ONNX file for one execution provider.

Reading, plain form and writing are those of every verb that changes a graph (``graph_file``). What was compiled is
opened and run on its provider before it is put in place. Knows no PyTorch and imports none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from winml.modelkit.compare.fidelity import FidelityInfo, measure_fidelity
from winml.modelkit.compare.files import reference_outputs, refuse_below_minimum_sqnr, refuse_different
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compile.declared_options import DEFAULT_MIN_SQNR_DB
from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.compile.pipeline import UNNAMED_FILE, CompileResult, compile_graph
from winml.modelkit.errors import StageError, UsageError, VerificationError, rename_options
from winml.modelkit.flows.graph_file import CheckedSource, GraphFileTask, GraphWork, transform_file
from winml.modelkit.flows.quality_samples import SampleRequest
from winml.modelkit.graph.contexts import context_file_names, rename_context_files
from winml.modelkit.graph.files.output_files import write_error
from winml.modelkit.graph.files.placing import name_data
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.pinning import sizes_of_dimensions
from winml.modelkit.progress import StepEvent
from winml.modelkit.results.transformed_file import CompilableProvider, CompiledFile
from winml.modelkit.runtime.devices import ChosenProvider, choose_compiler, present_providers, unreadable_reason
from winml.modelkit.runtime.execution_providers import EXECUTION_PROVIDERS
from winml.modelkit.runtime.opened_model import RunOptions
from winml.modelkit.runtime.sessions import Session

__all__ = ["Compilation", "compilable_providers", "compilation", "compile_file"]


def compile_file(
    task: GraphFileTask,
    work: Compilation,
    on_step: Callable[[StepEvent], None] | None = None,
    checked: CheckedSource | None = None,
) -> CompiledFile:
    """Compile an ONNX file as a task says; see :func:`~winml.modelkit.compile_onnx`.

    Args:
        task: From which file to which.
        work: What it is compiled for, of :func:`compilation`.
        on_step: Called when a step starts and when it ends.
        checked: The source, where a plan has read it.
    """
    task.refuse_early()  # before the folder of compiled parts is made
    task.recover()
    try:
        with temporary_folder(beside=task.output) as folder, rename_options({UNNAMED_FILE: str(task.source)}):
            done = transform_file(task, replace(work, folder=folder), on_step, checked)
    except OSError as error:
        raise write_error(task.output, error) from error
    file = replace(done.file, notes=(*done.file.notes, *_place_notes(done.result.record)))
    return CompiledFile(**vars(file), compiled=done.result.record, parts=done.result.parts, outside=done.result.outside)


def compilation(task: GraphFileTask, options: CompileOptions, sizes: Mapping[str, int]) -> Compilation:
    """Return the work that options request, without a folder yet.

    Args:
        task: From which file to which.
        options: What it is compiled for.
        sizes: Sizes of open dimensions to compare at.

    Raises:
        UsageError: the provider is unknown, not installed or compiles nothing.
        StageError: it is a plug-in that the installed ONNX Runtime does not load.
    """
    chosen = choose_compiler(options.ep, options.device, options.ep_options or {})
    return Compilation(options, chosen, sizes, _name_beside(task.source, task.output))


def _name_beside(source: Path, output: Path) -> str:
    """Return the path of a file from the folder of another, or its name where it is not below: no path of a machine."""
    try:
        return source.resolve().relative_to(output.parent.resolve()).as_posix()
    except ValueError:
        return source.name


def compilable_providers() -> tuple[CompilableProvider, ...]:
    """Return every provider that a file can be compiled for, those that are here and others."""
    present = present_providers()
    return tuple(
        CompilableProvider(
            short=short,
            name=provider.name,
            is_present=provider.name in present,
            devices=provider.devices,
            makes="EPContext nodes" if provider.compiles else "the optimized graph",
            package=provider.packages.get(sys.platform),
        )
        for short, provider in EXECUTION_PROVIDERS.items()
        if provider.has_compiled_form
    )


SAMPLES = 4
"""Samples that the result is compared with its source on. Chosen: a simulated NPU takes seconds for each."""


@dataclass(frozen=True)
class Compilation(GraphWork[CompileResult]):
    """Compiling for one provider."""

    step_name: ClassVar[str] = "compilation"

    options: CompileOptions
    chosen: ChosenProvider
    sizes: Mapping[str, int]
    """Sizes of open dimensions to compare at; of the others, some are tried."""
    source: str
    """What the compiled model calls the file that it is made from."""
    folder: Path = Path()
    """Folder for files that the compiled model refers to until it is written; a plan has none."""

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse a graph without a dimension that has a size.

        Raises:
            UsageError: names the size.
        """
        sizes_of_dimensions(model.graph, self.sizes)

    @property
    def request_words(self) -> str:
        """The provider and its device."""
        return f"for {self.chosen.provider.name} ({self.chosen.device_words})"

    def apply(self, model: ir.Model) -> CompileResult:
        """Compile the model."""
        return compile_graph(model, self.options, self.chosen, self.folder, source=self.source)

    def summary(self, result: CompileResult) -> str:
        """Return what the provider took."""
        place = f"for {self.chosen.provider.name} ({self.chosen.device_words})"
        if not result.parts:
            return f"{result.coverage.nodes} nodes {place}"
        parts = f"{len(result.parts)} compiled part{'' if len(result.parts) == 1 else 's'}"
        return f"{parts} {place}, {len(result.outside)} nodes outside"

    def write(self, model: ir.Model, path: Path, *, external: bool | None) -> None:
        """Write the model, and beside it the files of what was compiled, which are called after their content."""
        names = {}
        for name in context_file_names(model):
            written = path.with_name(f"{path.name}.context")
            (self.folder / name).replace(written)
            names[name] = name_data(written, path).name
        rename_context_files(model, names)
        # ONNX Runtime maps weights of a file of their own, where it would read and copy others: a session opens faster.
        write_model(model, path, external=not self.options.embed if external is None else external)

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo | FidelityInfo:
        """Open the result, run it on its provider, and compare."""
        if not self.chosen.provider.compiles:
            return refuse_different(source, written, seed, sizes=self.sizes)
        run = RunOptions(str(source), sizes=self.sizes, seed=seed)
        request = SampleRequest(run, source.absolute().parent, count=SAMPLES, tries_sizes=True)
        draws, expected, samples = reference_outputs(source, request.read)
        provider = self.chosen
        try:
            session = Session(written, providers=provider.names, provider_options=provider.options)
            outputs = [session.run(draw) for draw in draws]
        except (StageError, UsageError) as error:
            reason = unreadable_reason(provider)
            raise VerificationError(
                f"{provider.provider.name} does not run what it compiled: "
                f"{error.message.replace(str(written), 'the result')}{f' ({reason})' if reason else ''}",
                hint="No file was written. Where it is for another machine, --no-verify writes it all the same.",
            ) from error
        least = DEFAULT_MIN_SQNR_DB if self.options.min_sqnr_db is None else self.options.min_sqnr_db
        fidelity = measure_fidelity(expected, outputs, least, samples)
        refuse_below_minimum_sqnr(fidelity, source.name, draws[0])
        return fidelity


def _place_notes(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Say where alone the file runs, and where it ran here."""
    notes = []
    if "processor" in record:
        opened_for = f"{record['processor']} and ONNX Runtime {record['onnxruntime']}"
        notes.append(f"The weights are laid out for {opened_for}: on another kind of processor, compile again.")
    if "simulated_on" in record:
        device, place = record["device"], record["simulated_on"]
        notes.append(f"There is no {device} here: {record['provider']} simulates it on the {place}.")
    return tuple(notes)
