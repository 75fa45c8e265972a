"""Compilation of an ONNX file for one execution provider.

Commands that change a graph share reading, normalization and writing (``graph_file``). The compiled file is opened and
run on its provider before the commit. Independent of PyTorch.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare import files
from winml.modelkit.compare.fidelity import FidelityInfo, SourceFidelity, measure_fidelity
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.quality_minimum import TARGET_DB
from winml.modelkit.compare.quality_samples import JudgingData, judging_request, refuse_unfit_data
from winml.modelkit.compile.declared_options import DEFAULT_MIN_SQNR_DB, MARGIN_DB
from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.compile.pipeline import (
    CompileResult,
    OutsideNode,
    SharedContexts,
    compile_graph,
    refuse_open_sizes,
    save_for_provider,
    write_contexts,
)
from winml.modelkit.compile.records import CompilableProvider, CompiledFile
from winml.modelkit.errors import InputError, LimitError, NoInputsError, StageError, UsageError, VerificationError, opt
from winml.modelkit.file_names import files_folder
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.contexts import context_file_names, proto_nodes, rename_context_files
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.moving import move_file
from winml.modelkit.onnx.files.output_files import write_errors_of
from winml.modelkit.onnx.files.placing import name_data
from winml.modelkit.onnx.files.reading import read_metadata, read_structure
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.pinning import sizes_of_dimensions
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS
from winml.modelkit.options import load_metadata, load_metadata_record
from winml.modelkit.ort.decoding.inputs import inputs_of_file
from winml.modelkit.ort.devices import ChosenProvider, choose_compiler, present_providers, unreadable_reason
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, short_name
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.progress import counted
from winml.modelkit.samples.generated_samples import GENERATED_KINDS, has_processors
from winml.modelkit.samples.processors import missing_processors
from winml.modelkit.transform import graph_file
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSetRequest


@contextlib.contextmanager
def shared_contexts(sources: Sequence[Path], options: CompileOptions, beside: Path) -> Iterator[SharedContexts]:
    """Compile the parts of a model into one context; yield the compiled files.

    Args:
        sources: The files of the parts.
        options: Target and limits of the compilation.
        beside: A path in the folder of the results.

    Raises:
        UsageError: the provider is not installed or needs fixed sizes, or contexts are requested inside the models.
        StageError: the provider fails; see :func:`write_contexts`.
    """
    chosen = choose_compiler(options.ep, options.device, options.ep_options or {})
    if options.embed or not chosen.provider.compiles:
        reason = f"{opt.embed} writes" if options.embed else f"{chosen.provider.name} makes no contexts, it writes"
        raise UsageError(
            f"{opt.share_weights}: {reason} the weights of each part into its file", hint="Omit one of them."
        )
    with temporary_folder(beside=beside) as folder:
        files, compiled = {}, {}
        for number, source in enumerate(sources):
            model, _ = graph_file.read_plain(source)
            refuse_open_sizes(model, chosen, str(source))
            sent = folder / f"sent_{number}.onnx"
            save_for_provider(model, sent)
            files[sent] = compiled[source] = folder / f"returned_{number}.onnx"
        outcomes = write_contexts(files, chosen, embed=False)
        yield SharedContexts(folder, compiled, dict(zip(sources, outcomes.values(), strict=True)))


def compilation(
    task: graph_file.GraphFileTask,
    options: CompileOptions,
    sizes: Mapping[str, int],
    reference: Path | None = None,
    shared: SharedContexts | None = None,
    data: JudgingData | None = None,
) -> Compilation:
    """Return the requested compilation, without a folder yet.

    Args:
        task: Paths and settings.
        options: Target and limits of the compilation.
        sizes: Sizes of dynamic dimensions in the comparison.
        reference: The float source of a quantized file; `None` for the float source recorded in the file.
        shared: The compiled files of all parts, if they share weights.
        data: Samples of the comparison; `None` for generated samples.

    Raises:
        UsageError: the provider is unknown, not installed or compiles nothing.
        StageError: the installed ONNX Runtime does not load the provider, which is a plug-in.
    """
    provider = choose_compiler(options.ep, options.device, options.ep_options or {})
    name = graph_file.name_beside(task.source, task.output)
    data = data or JudgingData()
    return Compilation(options, provider, sizes, name, str(task.source), reference=reference, data=data, shared=shared)


def _find_reference(source: Path, metadata: Mapping[str, str]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the float file for the comparison of a quantized source, and a note if the float file is unknown.

    The result of a float source is compared with the source alone, and the file is `None`.
    """
    is_quantized = any(node.op_type in QUANTIZED_OPERATORS for node in proto_nodes(read_structure(source)))
    if QUANTIZATION_KEY not in metadata and not is_quantized:
        return None, ()
    float_file = graph_file.recorded_float_source(source, metadata)
    if float_file is not None:
        return float_file, ()
    note = (
        f"Compared with {source.name}, which is quantized, because its float source is unknown. With "
        f"{opt.reference} FLOAT.onnx, both are compared with the float source."
    )
    return None, (note,)


def find_processors(*files: Path) -> Path:
    """Return the first folder of ONNX files with processors for the inputs of the first file; else its folder."""
    folders, inputs = [files_folder(path.absolute()) for path in files], inputs_of_file(files[0])
    return next((folder for folder in folders if has_processors(inputs, folder)), folders[0])


def _find_recorded_data(
    metadata: Mapping[str, str], folders: Sequence[Path], seed: int, is_fit: Callable[[DataSetRequest], bool]
) -> tuple[JudgingData, str]:
    """Return the data that a quantized source was calibrated on, if it is in one of the folders.

    Args:
        metadata: Metadata of the source.
        folders: Folders of the source and of its float file.
        seed: Seed of the sample selection.
        is_fit: Returns True if a dataset can be read and fits the inputs.

    Returns:
        The data, and the name of recorded data that was not found; empty data and name without recorded data.
    """
    try:
        record = load_metadata(metadata[QUANTIZATION_KEY])
        name, requested = record["calibration"]["data"], record["requested"]
        split, columns = requested.get("split"), dict(requested.get("columns") or {})
        if not isinstance(name, str) or not all(isinstance(value, str) for value in (split or "", *columns.values())):
            return JudgingData(), ""
    except (KeyError, TypeError, ValueError, AttributeError):
        return JudgingData(), ""
    if name in GENERATED_KINDS:
        return JudgingData(), ""
    for folder in folders:
        for kind in ("file", "folder"):
            with contextlib.suppress(ForeignNameError):
                path = file_below(folder, name, kind=kind)
                if path.suffix == ".npz" or any(path.glob("*.npz")):
                    return JudgingData(input_data=path), ""
                request = judging_request(str(path), split=split, columns=columns, seed=seed)
                if request is not None and is_fit(request):
                    return JudgingData(data_set=request), ""
    return JudgingData(), name


_LARGE_SHARE = 0.1
"""Share of the nodes outside of compiled parts from which a note lists their modules. Chosen: conversions of inputs and
outputs are fewer; the experts of a Mixtral are 26 % of its nodes, and 187 of the 190 nodes of its compiled file."""
_MAX_LISTED_MODULES = 4
"""Number of modules in a note. Chosen: the note stays readable."""


def _outside_notes(result: CompileResult, chosen: ChosenProvider, source_path: str) -> Iterator[str]:
    """Note the modules of the nodes outside of compiled parts, the most nodes first; none for a small share."""
    nodes = sum(placement.nodes for placement in result.modules)
    outside = nodes - sum(placement.on_device for placement in result.modules)
    if outside < _LARGE_SHARE * nodes or not outside:
        return
    affected = sorted(
        (placement for placement in result.modules if placement.reasons),
        key=lambda placement: placement.on_device - placement.nodes,
    )
    words = "; ".join(
        f"{placement.module or '(the root)'} {placement.reason_words}" for placement in affected[:_MAX_LISTED_MODULES]
    )
    rest_count = len(affected) - _MAX_LISTED_MODULES
    rest_words = f"; and {count_noun(rest_count, 'more module')}" if rest_count > 0 else ""
    yield (
        f"{outside} of {nodes} nodes run on the CPU, not on the {chosen.device}: {words}{rest_words}. winml inspect "
        f"{source_path} --ep {short_name(chosen.provider.name)} lists all modules, with remedies."
    )


def _weight_notes(result: CompileResult, chosen: ChosenProvider) -> Iterator[str]:
    """Warn of quantized weights dequantized outside the compiled parts."""
    weights = [node for node in result.outside if node.expands_weight]
    if not weights:
        return
    modules = list(dict.fromkeys(node.tag for node in weights))
    module_words = ", ".join(name or "(no tag)" for name in modules[:3])
    rest_words = f" and {len(modules) - 3} more modules" if len(modules) > 3 else ""
    ep = short_name(chosen.provider.name)
    requested = load_metadata_record(result.model.metadata_props.get(QUANTIZATION_KEY, "{}")).get("requested")
    if isinstance(requested, Mapping) and requested.get("ep") == ep:
        remedy = f"{ep} does not run the nodes that read them: quantize without these modules ({opt.exclude})"
    else:
        command = f"winml quantize -m FLOAT.onnx -o QUANTIZED.onnx --mode qdq --ep {ep}"
        remedy = f"Quantize the float file for this provider: {command}"
    yield (
        f"{count_noun(len(weights), 'quantized weight', 'are')} outside the compiled parts and dequantized on the CPU "
        f"in every run (DequantizeLinear in {module_words}{rest_words}). {remedy}."
    )


def compilable_providers() -> tuple[CompilableProvider, ...]:
    """Return every provider with support for compilation, installed or not."""
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


SIMULATED_SAMPLES = 4
"""Number of samples on a simulated device. Chosen: a simulated NPU takes seconds for each."""


@dataclass(frozen=True)
class Compilation(graph_file.FileWork[CompileResult, CompiledFile]):
    """Compilation for one provider."""

    step_name: ClassVar[str] = "compilation"

    options: CompileOptions
    chosen: ChosenProvider
    sizes: Mapping[str, int]
    """Sizes of dynamic dimensions in the comparison; several sizes are tried for other dimensions."""
    source: str
    """Name of the source in the metadata of the compiled model."""
    source_path: str
    """Path of the source, for messages."""
    folder: Path = Path()
    """Folder of context files until the compiled model is written; empty in a plan."""
    reference: Path | None = None
    """The float file that the source was quantized from; `None` to compare the result with the source alone."""
    data: JudgingData = field(default_factory=JudgingData)
    """Samples of the comparison."""
    processors: Path | None = None
    """Folder of the tokenizer or processor for samples; `None` in a plan."""
    notes: tuple[str, ...] = ()
    """Notes on the reference and the samples."""
    shared: SharedContexts | None = None
    """Compiled files of all parts, if they share weights; `None` to compile the part alone."""

    @contextlib.contextmanager
    def acquire_resources(self, task: graph_file.GraphFileTask) -> Iterator[Compilation]:
        """Yield the work with its reference and samples, and a temporary folder for compiled parts.

        Raises:
            WriteError: the folder cannot be created.
        """
        task.refuse_early()  # before the folder of compiled parts is created
        task.recover()
        is_compared_on_samples = self.chosen.provider.compiles or self.data.is_stated
        work = self._with_comparison(task) if task.verify and is_compared_on_samples else self
        with write_errors_of(task.output), temporary_folder(beside=task.output) as folder:
            yield replace(work, folder=folder)

    def _with_comparison(self, task: graph_file.GraphFileTask) -> Compilation:
        """Return the work with its reference and samples."""
        source, reference, data = task.source, self.reference, self.data
        notes: list[str] = []
        metadata = read_metadata(source)
        if reference is None and self.chosen.provider.compiles:
            reference, reference_notes = _find_reference(source, metadata)
            notes += reference_notes
        files = (source,) if reference is None else (source, reference)
        folder = task.processors or find_processors(*files)

        def is_fit(request: DataSetRequest) -> bool:
            with contextlib.suppress(UsageError, InputError):
                refuse_unfit_data(request, source, folder)
                return True
            return False

        if not data.is_stated and self.chosen.provider.compiles:
            places = [path.absolute().parent for path in files]
            found, missing = _find_recorded_data(metadata, places, task.seed, is_fit)
            data = replace(found, count=data.count)
            if missing:
                notes.append(
                    f"{source.name} was calibrated on {missing}, which cannot be read beside it, and is compared on "
                    f"other samples: name the data with {opt.dataset} or {opt.input_data}."
                )
            absent = missing_processors((spec.name for spec in inputs_of_file(source) if spec.cache is None), folder)
            if absent and not data.is_stated:
                notes.append(
                    f"Compared on random values, since {source.name} has no {absent[0][0]} beside it: on real inputs "
                    f"the SQNR may differ. Put its files there, or pass inputs with {opt.input_data}."
                )
        return replace(self, reference=reference, processors=folder, data=data, notes=tuple(notes))

    def record(self, transformation: graph_file.Transformation[CompileResult]) -> CompiledFile:
        """Return the record with the compiled parts and the nodes outside."""
        result, comparison = transformation.result, transformation.file.comparison
        samples = comparison.samples if isinstance(comparison, FidelityInfo) else None
        notes = (
            *transformation.file.notes,
            *self.notes,
            *([samples.note] if samples is not None and samples.note else []),
            *_outside_notes(result, self.chosen, self.source_path),
            *_weight_notes(result, self.chosen),
            *_machine_notes(result.record),
        )
        file = {**vars(transformation.file), "notes": notes}
        return CompiledFile(
            **file, compiled=result.record, parts=result.parts, outside=result.outside, modules=result.modules
        )

    def judging_request(self, seed: int) -> DataSetRequest | None:  # noqa: ARG002 - the data has its seed
        """Return the request for the samples of the dataset; `None` without a dataset."""
        return self.data.data_set

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse sizes of dimensions that the graph lacks.

        Raises:
            UsageError: the graph has no such dimension; the message names the size.
        """
        sizes_of_dimensions(model.graph, self.sizes)

    @property
    def request_words(self) -> str:
        """The provider and its device."""
        return f"for {self.chosen.provider.name} ({self.chosen.device_words})"

    def apply(self, model: ir.Model) -> CompileResult:
        """Compile the model.

        Raises:
            LimitError: more nodes are outside, or there are more parts, than the options allow.
        """
        result = compile_graph(
            model,
            self.options,
            self.chosen,
            self.folder,
            source_path=self.source_path,
            source=self.source,
            shared=self.shared,
        )
        self._refuse_beyond_limits(result)
        return result

    def _refuse_beyond_limits(self, result: CompileResult) -> None:
        """Refuse a result with more outside nodes, or more parts, than the options allow.

        Raises:
            LimitError: the message names the most frequent operators outside.
        """
        advice = (
            f"winml inspect {self.source_path} --ep {short_name(self.chosen.provider.name)} shows why nodes are not "
            "supported"
        )
        outside, parts = self.options.max_outside, self.options.max_parts
        if outside is not None and len(result.outside) > outside:
            raise LimitError(
                f"{self.chosen.provider.name} does not support {count_noun(len(result.outside), 'node')}, more than "
                f"{opt.max_outside} {outside}: {_outside_words(result.outside)}",
                hint=f"No file was written. {advice}.{_weight_hint(result, self.chosen)}",
            )
        if parts is not None and len(result.parts) > parts:
            raise LimitError(
                f"{self.chosen.provider.name} compiles {count_noun(len(result.parts), 'part')}, more than "
                f"{opt.max_parts} {parts}; between them: {_outside_words(result.outside) or 'no node'}",
                hint=f"No file was written. {advice}.{_weight_hint(result, self.chosen)}",
            )

    @property
    def runs_on(self) -> ChosenProvider | None:
        """The provider; `None` for the CPU provider, since any provider runs its results."""
        return self.chosen if self.chosen.provider.compiles else None

    def summary(self, result: CompileResult) -> str:
        """Return the numbers of compiled parts and outside nodes in words."""
        target = f"for {self.chosen.provider.name} ({self.chosen.device_words})"
        if not result.parts:
            return f"{result.coverage.nodes} nodes {target}"
        parts = f"{len(result.parts)} compiled part{'' if len(result.parts) == 1 else 's'}"
        return f"{parts} {target}, {len(result.outside)} nodes outside"

    def write(self, model: ir.Model, path: Path, *, external: bool | None) -> None:
        """Write the model, and move its context files beside the model under names made from their content.

        Raises:
            WriteError: a file cannot be written.
        """
        names, folder = ({}, self.folder) if self.shared is None else (self.shared.placed, self.shared.folder)
        for name in context_file_names(model):
            if name not in names:
                context_file = path.with_name(f"{path.name}.context")
                move_file(folder / name, context_file)
                names[name] = name_data(context_file, path).name
        rename_context_files(model, names)
        # ONNX Runtime maps external weights and would copy inner ones: sessions open faster.
        write_model(model, path, external=not self.options.embed if external is None else external)

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo | FidelityInfo:
        """Open the result, run samples on its provider, and compare outputs with the source or the float reference.

        Raises:
            VerificationError: the provider cannot run the result, or outputs differ beyond tolerance.
            UsageError: the float reference has other inputs or outputs.
        """
        run = RunOptions(str(source), sizes=self.sizes, seed=seed)
        most = SIMULATED_SAMPLES if self.chosen.stand_in else None
        # The float file generates the texts that serve as samples for a decoder.
        request = self.data.request(run, self.processors, self.reference or source, most=most)
        if not self.chosen.provider.compiles:
            read_samples = request.read if self.data.is_stated else None
            return files.refuse_different(source, written, seed, sizes=self.sizes, read_samples=read_samples)
        if self.shared is not None and self.chosen.stand_in:
            written = self._compile_alone(source)
        try:
            sample_feeds, expected, samples = files.reference_outputs(source, request.read)
        except NoInputsError:
            self._run_result(written, ())
            raise
        outputs = self._run_result(written, sample_feeds)
        minimum_db = DEFAULT_MIN_SQNR_DB if self.options.min_sqnr_db is None else self.options.min_sqnr_db
        measure = partial(measure_fidelity, least_sqnr_db=minimum_db, samples=samples, inputs=sample_feeds)
        if self.reference is None:
            fidelity = measure(expected, outputs)
            files.refuse_below_minimum_sqnr(fidelity, source.name, sample_feeds[0], _minimum_sqnr_hint(None))
            return fidelity
        float_outputs = _run_reference(self.reference, source, sample_feeds, expected)
        source_fidelity = measure(float_outputs, expected)
        margin = MARGIN_DB if self.options.min_sqnr_db is None else None
        comparison = SourceFidelity(self.reference.name, source.name, source_fidelity.outputs, margin)
        fidelity = replace(measure(float_outputs, outputs), beside=comparison)
        files.refuse_below_minimum_sqnr(
            fidelity, self.reference.name, sample_feeds[0], _minimum_sqnr_hint(self.reference)
        )
        return fidelity

    def _run_result(self, written: Path, sample_feeds: Sequence[Arrays]) -> list[Arrays]:
        """Open the result on its provider, and return its outputs for the samples.

        Raises:
            VerificationError: the provider cannot run the result.
        """
        provider = self.chosen
        try:
            session = provider.open(written)
            return [session.run(feeds) for feeds in counted(sample_feeds, "sample")]
        except (StageError, UsageError) as error:
            reason = unreadable_reason(provider)
            raise VerificationError(
                f"{provider.provider.name} cannot run the compiled model: "
                f"{error.message.replace(str(written), 'the result')}{f' ({reason})' if reason else ''}",
                hint=f"No file was written. If the file is for a different machine, use {opt.no_verify} to write it "
                "anyway.",
            ) from error

    def _compile_alone(self, source: Path) -> Path:
        """Compile the source without the other parts: a simulator opens no context with shared weights."""
        sent, compiled = self.folder / "sent.onnx", self.folder / "alone.onnx"
        save_for_provider(graph_file.read_plain(source)[0], sent)
        write_contexts({sent: compiled}, self.chosen, embed=False)
        return compiled


def _minimum_sqnr_hint(reference: Path | None) -> str:
    """Return the hint for a result below the minimum; ``reference`` is the float file of a quantized source."""
    hint = (
        f"No file was written. Set the processor with {opt.ep_options}, lower {opt.min_sqnr}, or write it anyway with "
        f"{opt.no_verify}."
    )
    if reference is None:
        return hint
    return (
        f"{hint} The modules to keep in float are found by winml quantize {reference} --sensitivity --target "
        f"sqnr_db={TARGET_DB:g}, with the options of the quantization."
    )


def _run_reference(
    reference: Path, source: Path, sample_feeds: Sequence[Arrays], expected: Sequence[Arrays]
) -> list[Arrays]:
    """Return the outputs of the float file for the samples.

    Args:
        reference: The float file.
        source: The quantized file, for messages.
        sample_feeds: The samples.
        expected: Outputs of the quantized file.

    Raises:
        UsageError: the inputs or outputs differ from those of the quantized file.
    """
    try:
        outputs = files.outputs_of_file(reference, sample_feeds)
    except (StageError, UsageError) as error:
        raise UsageError(
            f"{opt.reference} {reference}: not the source of {source.name}: {error.message}",
            hint=f"Pass its float source file, or omit {opt.reference}.",
        ) from error
    if set(outputs[0]) != set(expected[0]):
        raise UsageError(
            f"{opt.reference} {reference} returns {', '.join(outputs[0])}, but {source.name} returns "
            f"{', '.join(expected[0])}",
            hint=f"Pass its float source file, or omit {opt.reference}.",
        )
    return outputs


def _outside_words(outside: Sequence[OutsideNode]) -> str:
    """Return the three most frequent outside operators in words, each with its first module and the reason.

    The summary has a table of all outside nodes.
    """
    counts = Counter((node.operator, node.dtype, node.reason) for node in outside)
    first_tags = {(node.operator, node.dtype, node.reason): node.tag for node in reversed(outside)}
    phrases = []
    for key, count in counts.most_common(_MAX_LISTED_OUTSIDE):
        operator, dtype, reason = key
        module_words = f"{'in' if count == 1 else 'first in'} {first_tags[key] or '(no tag)'}"
        phrases.append(
            f"{count} {operator}{f' of {dtype}' if dtype else ''}, {module_words}{f' ({reason})' if reason else ''}"
        )
    rest_count = len(counts) - _MAX_LISTED_OUTSIDE
    return "; ".join([*phrases, *([f"and {rest_count} more"] if rest_count > 0 else [])])


_MAX_LISTED_OUTSIDE = 3
"""Number of outside operators in a message. Chosen: the message stays readable."""


def _weight_hint(result: CompileResult, chosen: ChosenProvider) -> str:
    """Return the notes of `_weight_notes` as text to append to a hint; empty without notes."""
    return "".join(f" {note}" for note in _weight_notes(result, chosen))


def _machine_notes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the required processor, and on a simulated device."""
    if "processor" in record:
        opened_for = f"{record['processor']} and ONNX Runtime {record['onnxruntime']}"
        yield f"The weight layout is for {opened_for}: compile again on a different kind of processor."
    if "simulated_on" in record:
        device, simulator = record["device"], record["simulated_on"]
        if record.get("shares_weights"):
            yield (
                f"The parts share their weights in one file, which opens on an {device} only: each part was compared "
                "in a file of its own."
            )
        yield f"This machine has no {device}: {record['provider']} simulates it on the {simulator}."
