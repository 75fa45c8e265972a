"""Transformation of one ONNX file into another.

Reading, normalization, work, metadata, verification and commit are shared by every command that changes a graph, and
by ``winml build``. The work of a command is its :class:`GraphWork`. Independent of commands and of PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import onnx
import onnx_ir as ir

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.words import comparison_words
from winml.modelkit.errors import (
    InputError,
    NoInputsError,
    OptimizeError,
    StageError,
    UsageError,
    VerificationError,
    opt,
)
from winml.modelkit.metadata_keys import COMPILE_KEY, EXPORT_KEY, FLOAT_SOURCE_KEY, NORMALIZED_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.contexts import random_nodes, refuse_compiled
from winml.modelkit.onnx.files.content_digest import content_digest
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.graph_reading import graph_of, load_by_reference, merge_duplicate_keys
from winml.modelkit.onnx.files.output_files import ExportPaths, OutputFiles, recover, refuse_inputs
from winml.modelkit.onnx.files.placing import external_files, place_copy
from winml.modelkit.onnx.files.reading import inline_functions, read_structure, reading_graph, required_inputs
from winml.modelkit.onnx.files.recovery import State, file_state, temporary_folder
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.fingerprint import is_normalized, stamp
from winml.modelkit.onnx.random_numbers import FIXABLE_OPERATORS
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.onnx.validity import OLDEST_OPSET, refuse_cycles, refuse_invalid
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.graph_sessions import fixed_random_numbers, newest_ir_version
from winml.modelkit.progress import OnStep, StepClock
from winml.modelkit.tags.carry.carrying import carry_metadata, has_foreign_metadata, lost_metadata_notes
from winml.modelkit.tags.tagging import Coverage, all_nodes, measure_coverage, operator_name, read_tag
from winml.modelkit.transform.module_functions import find_function_targets, functions_of_modules
from winml.modelkit.transform.records import GraphSummary, ModuleFunctions, RecordT, TransformedFile, WrittenFile
from winml.modelkit.words import command_line, count_noun

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSetRequest

EXTERNAL_BYTES = 32_000_000
"""Smallest total size of weights that are written to an external data file. ONNX Runtime maps the file instead of
parsing and copying the weights: a session of bert-base opens 2.6 times as fast (measured). Chosen: smaller models save
milliseconds only."""

ALREADY_NORMALIZED = "already normalized, and no optimization was requested: the result is a copy of the source"

_READING, _NORMALIZATION, _WRITING = "reading", "normalization", "writing and verification"

ResultT = TypeVar("ResultT", bound=StageResult)

Comparison = VerificationInfo | FidelityInfo
"""Result of a comparison with the source: equal within rounding, or within the minimum SQNR of lower precision."""


@dataclass(frozen=True)
class GraphFileTask:
    """Paths and settings common to all works."""

    source: Path
    """The file to read; it is not changed."""
    output: Path
    """The ``.onnx`` file to write."""
    overwrite: bool = False
    verify: bool = True
    """Compare the result with the source in ONNX Runtime."""
    seed: int = 0
    """Seed of the inputs that outputs are compared on."""
    skip_normalization: bool = False
    """Treat the graph as normalized although it has no stamp; the result has no stamp either."""
    external_data: bool | None = None
    """True to store weights in an external data file, False to store them inside; `None` to decide by size."""
    functions: str | None = None
    """Modules stored as functions: ``all``, ``classes`` or a selector. `None` for no functions."""
    external_from_bytes: int | None = None
    """Smallest total size of weights stored in an external data file by default. `None` to store weights externally
    only if they are too large for the model file."""
    shares_files: bool = False
    """Allow a copy of the source to be a hard link and to reference the data files of the source; correct only if both
    are in one folder, and neither is changed later."""
    freeze_inputs: bool = False
    """Turn inputs that have a default value into constants."""
    copies_any_form: bool = False
    """Also copy a source that is not normalized, if normalization is skipped."""
    processors: Path | None = None
    """Folder of the tokenizer, image processor or feature extractor that makes samples; `None` for the folder of the
    source."""
    statistics: Path | None = None
    """Folder of activation statistics, with one file for each model and set of samples; `None` to use only a file that
    the options name."""
    of_several: bool = False
    """True if the source is one of several parts that are transformed."""
    transaction: OutputFiles | None = None
    """Transaction of the caller, which commits the result together with other files. `None` to commit the result
    alone."""

    @property
    def paths(self) -> ExportPaths:
        """The files to write.

        Raises:
            UsageError: the output is a directory, or does not end in ``.onnx``.
        """
        return ExportPaths.for_output(self.output, with_sidecar=False, with_report=False)

    def refuse_early(self) -> None:
        """Refuse an invalid output path before reading; writes nothing.

        Raises:
            UsageError: the output exists, is a directory or the source, or does not end in ``.onnx``.
            WriteError: its folder cannot be written to.
        """
        refuse_inputs([self.paths.model], [self.source])
        self.paths.refuse_existing(overwrite=self.overwrite)

    def is_external(self, model: ir.Model) -> bool | None:
        """Return True for external weights, False for inner weights, `None` to let the writer decide."""
        if self.external_data is not None or self.external_from_bytes is None:
            return self.external_data
        return is_external(model, self.external_from_bytes)

    def recover(self) -> None:
        """Complete or remove partial results of killed commands at the output path, unless a transaction is open."""
        if self.transaction is None:
            recover([self.paths.model])


class GraphWork(ABC, Generic[ResultT]):
    """Work of a command on a graph between reading and writing."""

    step_name: ClassVar[str]
    """Name of the work in the list of steps."""
    precedes_normalization: ClassVar[bool] = False
    """True if the graph is normalized after the work, False before it."""

    @property
    def is_requested(self) -> bool:
        """True if a request so far may change the graph; read again after the work."""
        return True

    @property
    def folds_constants(self) -> bool:
        """True if normalization may fold constants."""
        return True

    @property
    def may_be_requested(self) -> bool:
        """True if a request may change the graph, even a request made during the work; if False, no weight is read."""
        return self.is_requested

    def judging_request(self, seed: int) -> DataSetRequest | None:  # noqa: ARG002 - others read it
        """Return the request for the samples of a dataset that the result is compared on; ``None`` without a dataset.

        Args:
            seed: Seed of the selection.
        """
        return None

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse a graph whose structure the work does not support; weights are not loaded.

        Raises:
            UsageError: the request does not fit the graph.
        """

    def refuse_plain(self, read_model: Callable[[], ir.Model]) -> None:
        """Refuse a graph for reasons only visible after normalization; called for a dry run.

        Args:
            read_model: Reads and normalizes the source; the returned model may be modified.

        Raises:
            StageError: the work would refuse the graph.
            UsageError: the request does not fit the graph.
        """

    @property
    def runs_on(self) -> ChosenProvider | None:
        """The provider of a compiled result, whose modules are hidden; `None` if any provider runs the result."""
        return None

    @property
    def least_sqnr_db(self) -> float | None:
        """Minimum SQNR in decibels of every output, relative to the source; `None` if outputs must be equal."""
        return None

    @property
    def minimum(self) -> QualityMinimum | None:
        """Minimum quality of every output, relative to the source; `None` if outputs must be equal."""
        return None if self.least_sqnr_db is None else QualityMinimum(self.least_sqnr_db)

    @property
    def below_minimum_hint(self) -> str | None:
        """Hint for a result below the minimum SQNR; `None` for the general hint."""
        return None

    @property
    def request_words(self) -> str:
        """The request in a few words, for a plan."""
        return self.step_name

    @abstractmethod
    def apply(self, model: ir.Model) -> ResultT:
        """Do the work; the model may be modified, and the result contains the same model or a new one."""

    @abstractmethod
    def summary(self, result: ResultT) -> str:
        """Return a few words about the result for the list of steps."""

    def metadata(self, model: ir.Model) -> Mapping[str, Any]:  # noqa: ARG002 - other works look at it
        """Return changed metadata: key of the model's metadata → JSON value.

        Keys missing in the file are not added.
        """
        return {}

    def late_notes(self, model: ir.Model) -> tuple[str, ...]:  # noqa: ARG002 - other works look at it
        """Return notes for the user on the written model."""
        return ()

    def write(self, model: ir.Model, path: Path, *, external: bool | None) -> None:
        """Write the result, and companion files into the same folder.

        Args:
            model: The result.
            path: The file to write.
            external: True to store weights in an external data file, False to store them inside. `None` to store them
                externally only if they are too large.

        Raises:
            WriteError: the result cannot be written.
        """
        write_model(model, path, external=external)

    def refuse_written(self, size_bytes: int) -> None:
        """Refuse a written result larger than requested, before the commit.

        Args:
            size_bytes: Size of the model and its data.

        Raises:
            StageError: the result is larger than requested.
        """

    def compare(self, source: Path, written: Path, seed: int) -> Comparison | None:
        """Compare the written file with its source; `None` if the machine cannot run the comparison.

        Raises:
            StageError: the source itself cannot be run, so the result has no reference.
            VerificationError: the outputs differ by more than this work allows.
        """
        from winml.modelkit.compare.files import refuse_different

        return refuse_different(source, written, seed)

    @classmethod
    def steps(cls) -> tuple[str, ...]:
        """Return the names of the steps of :func:`transform_file` in order."""
        middle = (_NORMALIZATION, cls.step_name)
        return (_READING, *(reversed(middle) if cls.precedes_normalization else middle), _WRITING)


@dataclass(frozen=True)
class Transformation(Generic[ResultT]):
    """Result of the transformation of one file into another."""

    result: ResultT
    """Result of the work, with the model in memory."""
    file: TransformedFile


class FileWork(GraphWork[ResultT], Generic[ResultT, RecordT]):
    """Work of a command that writes one file from one source."""

    @contextlib.contextmanager
    def acquire_resources(self, task: GraphFileTask) -> Iterator[FileWork[ResultT, RecordT]]:  # noqa: ARG002 - others read it
        """Yield the work with the resources of a run, such as samples or a folder; release the resources afterwards."""
        yield self

    @abstractmethod
    def record(self, transformation: Transformation[ResultT]) -> RecordT:
        """Return the record of the written file."""


def make_file(
    task: GraphFileTask,
    work: FileWork[ResultT, RecordT],
    on_step: OnStep | None = None,
    checked: CheckedSource | None = None,
) -> RecordT:
    """Do the work on a file and return the record; arguments and errors are those of :func:`transform_file`."""
    with work.acquire_resources(task) as ready_work:
        return ready_work.record(transform_file(task, ready_work, on_step, checked))


def transform_file(
    task: GraphFileTask, work: GraphWork[ResultT], on_step: OnStep | None = None, checked: CheckedSource | None = None
) -> Transformation[ResultT]:
    """Read and normalize a graph, do the work, and commit the verified result.

    A normalized source without requested changes is copied; its weights are not parsed.

    Args:
        task: Paths and settings.
        work: The work on the graph.
        on_step: Called when a step starts and when it ends.
        checked: The source as read for a plan, if any; read again if the file has changed since.

    Raises:
        UsageError: the output exists, is a directory, or is data that the source names.
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
        StageError: the work failed; or the source itself does not run, so the result cannot be compared with it.
        VerificationError: the outputs of the result differ from those of the source; no file was written.
        WriteError: the output cannot be written.
    """
    task.refuse_early()
    task.recover()
    return _TransformationRun(task, work, StepClock(work.steps(), on_step)).transform(checked)


@dataclass(frozen=True)
class CheckedSource:
    """The structure of a valid source, at the time of reading."""

    model: ir.Model
    """Valid model without its larger weights and without duplicate metadata keys."""
    notes: tuple[str, ...]
    """Repairs made while reading; a copy of the source would lack them."""
    data: tuple[Path, ...]
    """The data files that the source references."""
    states: Mapping[Path, State]
    """Sizes and modification times of the source and its data files."""

    @property
    def is_current(self) -> bool:
        """True if the files have not changed since they were read."""
        return all(file_state(path) == state for path, state in self.states.items())


def check_source(task: GraphFileTask, work: GraphWork[ResultT]) -> CheckedSource:
    """Read the structure of a source, and refuse unsuitable structures; no weight is read, and nothing is written.

    Raises:
        UsageError: the output is a data file of the source, or the work or its dataset does not fit the graph.
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
    """
    source = task.source
    data = external_files(source)  # raises our errors, where a library would raise its own
    refuse_inputs([task.paths.model], data)
    states = {path: file_state(path) for path in (source, *data)}
    structure, notes = _read_valid_structure(source)
    model = graph_of(structure, source)
    refuse_compiled(model)
    if task.freeze_inputs and not any(value.is_initializer() for value in model.graph.inputs):
        raise UsageError(f"{opt.freeze_inputs}: no input of {source} has a default value", hint="Omit it.")
    if task.functions is not None:
        find_function_targets(model, task.functions)
    work.refuse_graph(model)
    _refuse_unfit_data(task, work, is_remote=False)
    return CheckedSource(model, notes, data, states)


def _refuse_unfit_data(task: GraphFileTask, work: GraphWork[Any], *, is_remote: bool) -> None:
    """Refuse a dataset that does not fit the source, before the work.

    Args:
        task: The task.
        work: The work, which is compared on the dataset.
        is_remote: True for a dataset on the Hub, which a plan does not fetch; False for one on this disk.

    Raises:
        UsageError: the dataset does not fit the inputs.
    """
    request = work.judging_request(task.seed)
    if request is None:
        return
    from winml.modelkit.compare.quality_samples import refuse_unfit_data
    from winml.modelkit.file_names import files_folder
    from winml.modelkit.samples.data_sources import find_source

    if (find_source(request.source).path is None) is is_remote:
        folder = task.processors or files_folder(task.source.absolute())
        refuse_unfit_data(request, task.source, folder)


def may_be_copy(task: GraphFileTask, checked: CheckedSource) -> bool:
    """Return True if work without changes can copy the source, which has the form of an output.

    The work is not examined.
    """
    if checked.notes or task.freeze_inputs:
        return False
    if task.copies_any_form and task.skip_normalization:
        return True
    is_readable = checked.model.ir_version <= newest_ir_version()
    return is_normalized(checked.model) and task.external_data is None and is_readable


def _read_valid_structure(source: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a valid model without its larger weights and without duplicate metadata keys, and notes on repairs.

    Raises:
        InputError: the graph is invalid or has a cycle.
    """
    structure = read_structure(source, as_written=True)
    refuse_cycles(structure, source)
    inlined = inline_functions(structure, source)
    merged = merge_duplicate_keys(structure)
    refuse_invalid(structure, source)
    calls = (f"{count_noun(inlined, 'module function', 'were')} inlined.",) if inlined else ()
    return structure, (*merged.notes(), *calls)


def read_plain(source: Path, *, folds_constants: bool = True) -> tuple[ir.Model, tuple[str, ...]]:
    """Read a file as :func:`transform_file` does, and return the normalized model and notes on changes.

    Weights are read from the file on first use.

    Args:
        source: The file.
        folds_constants: Fold constants.

    Raises:
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
    """
    external_files(source)  # raises our errors, where a library would raise its own
    _, repairs = _read_valid_structure(source)
    model, raised = _raise_opset(reading_graph(source, lambda: load_by_reference(source)))
    refuse_compiled(model)
    notes = (*repairs, *raised, *_lower_ir_version(model), *_release_weights(model))
    if is_normalized(model):
        return model, notes
    return model, (*notes, *_normalize(model, folds_constants=folds_constants))


def _normalize(model: ir.Model, *, folds_constants: bool) -> tuple[str, ...]:
    """Normalize the model in place; return notes on the changes."""
    # A late import: a copy by reference does not wait for the libraries of the passes.
    from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize

    return normalize(model, NormalizeOptions(fold_constants=folds_constants)).notes


_FREE_INITIALIZERS = 4
"""Specified by ONNX: the first IR version in which an initializer need not be an input."""


def _release_weights(model: ir.Model, *, freezes_inputs: bool = False) -> tuple[str, ...]:
    """Remove initializers from the inputs of a graph, in place; returns a note.

    IR version 3 and older require every initializer to be an input, and ONNX Runtime treats it as a constant. In newer
    versions it is the default value of an input, and stays one unless it is to be frozen.
    """
    weights = [value for value in model.graph.inputs if value.is_initializer()]
    version, is_old = model.ir_version, model.ir_version < _FREE_INITIALIZERS
    # Also without weights: constants become initializers later.
    model.ir_version = max(version, _FREE_INITIALIZERS)
    if not weights or not (is_old or freezes_inputs):
        return ()
    for value in weights:
        model.graph.inputs.remove(value)
    if not is_old:
        return (f"{count_noun(len(weights), 'input')} with a default value: now constants ({opt.freeze_inputs}).",)
    note = (
        f"{count_noun(len(weights), 'weight', 'are')} no longer in the inputs: IR version {version} required it, and "
        f"version {_FREE_INITIALIZERS}, which the result has, does not."
    )
    return (note,)


def _lower_ir_version(model: ir.Model) -> tuple[str, ...]:
    """Lower the IR version to the newest supported by ONNX Runtime, in place; returns a note.

    Newer versions only add kinds of tensors. ONNX Runtime refuses a model with an unknown kind by itself.
    """
    newest, version = newest_ir_version(), model.ir_version
    if version <= newest:
        return ()
    model.ir_version = newest
    return (f"IR version {version} was lowered to {newest}, the newest that the installed ONNX Runtime supports.",)


def _raise_opset(model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """Convert a model whose opset is too old for ONNX Runtime; return the model and notes.

    A model that cannot be converted is returned unchanged: ONNX Runtime runs some operators of these opsets.
    """
    opset = model.opset_imports.get("", OLDEST_OPSET)
    if opset >= OLDEST_OPSET:
        return model, ()
    from winml.modelkit.normalize.opset_conversion import convert_opset

    try:
        converted, notes = convert_opset(model, OLDEST_OPSET)
    except OptimizeError:
        return model, ()
    return converted, (*notes, f"Opset {opset} was raised to {OLDEST_OPSET}, the oldest that ONNX Runtime runs.")


class _TransformationRun(Generic[ResultT]):
    """State of one transformation: clock, normalization and notes."""

    def __init__(self, task: GraphFileTask, work: GraphWork[ResultT], clock: StepClock) -> None:
        self._task, self._work, self._clock = task, work, clock
        self._is_plain = False
        """True if the graph is normalized by now."""
        self._normalizations = 0

    def transform(self, checked: CheckedSource | None) -> Transformation[ResultT]:
        """Do the steps; ``checked`` is the source as read for a plan, if any.

        Raises:
            WinMLError: as :func:`check_source` and the work raise.
            StageError: the result is larger than requested.
            VerificationError: the result differs from the source.
        """
        task, work = self._task, self._work
        with self._clock.step(_READING) as step:
            if checked is None or not checked.is_current:
                checked = check_source(task, work)
            _refuse_unfit_data(task, work, is_remote=True)
            # The structure only: a copy by reference never reads the weights.
            model = checked.model
            raised: tuple[str, ...] = ()
            before = summarize_graph(model, sum(file.stat().st_size for file in (task.source, *checked.data)))
            is_plain, can_copy = is_normalized(model), may_be_copy(task, checked) and task.functions is None
            if work.may_be_requested or not can_copy:
                model, raised = _raise_opset(reading_graph(task.source, lambda: load_by_reference(task.source)))
            step.summary = f"{before.nodes} nodes, opset {before.opset}"
        original = model.clone() if has_foreign_metadata(model) else None
        if work.precedes_normalization:
            result = self._apply_work(model)
            notes = self._normalize(result.model, is_plain=False)
        else:
            notes = self._normalize(model, is_plain=is_plain)
            result = self._apply_work(model)
        if original is not None:
            carry_metadata(original, result.model)
            notes = (*notes, *lost_metadata_notes(original, result.model))
        # Decided after the work, which may have requested more.
        is_copy = can_copy and not work.is_requested
        if is_copy:
            notes = (ALREADY_NORMALIZED,) if is_plain else ()
        written_result = self._write_result(None if is_copy else result.model)
        functions = written_result.functions
        file = TransformedFile(
            source=task.source,
            model_path=task.paths.model,
            files=written_result.files,
            is_copy=is_copy,
            is_plain=self._is_plain,
            normalizations=self._normalizations,
            before=before,
            after=written_result.summary,
            coverage=written_result.coverage,
            comparison=written_result.comparison,
            steps=self._clock.timings(),
            functions=functions,
            notes=(
                *checked.notes,
                *raised,
                *notes,
                *result.notes,
                *(functions.notes() if functions else ()),
                *written_result.notes,
            ),
        )
        return Transformation(result, file)

    def _normalize(self, model: ir.Model, *, is_plain: bool) -> tuple[str, ...]:
        """Normalize the graph in place, unless it is normalized already or normalization is skipped; return notes."""
        with self._clock.step(_NORMALIZATION) as step:
            freezes = self._task.freeze_inputs
            notes = (*_lower_ir_version(model), *_release_weights(model, freezes_inputs=freezes))
            self._is_plain = is_plain
            if is_plain or self._task.skip_normalization:
                step.summary = "already normalized" if is_plain else "left out"
                return notes
            notes += _normalize(model, folds_constants=self._work.folds_constants)
            step.summary = f"normalized to {sum(1 for _ in all_nodes(model))} nodes"
            self._is_plain, self._normalizations = True, 1
            return notes

    def _apply_work(self, model: ir.Model) -> ResultT:
        """Do the work as one step of the clock."""
        with self._clock.step(self._work.step_name) as step:
            result = self._work.apply(model)
            step.summary = self._work.summary(result)
        return result

    def _write_result(self, model: ir.Model | None) -> _WrittenResult:
        """Write the model, or a copy of the source if there is no model; compare, summarize and commit the result.

        Within a ``transaction`` the caller commits.

        Raises:
            StageError: the result is larger than requested.
            VerificationError: the result differs from the source; the message names the first wrong module.
        """
        task, work, output = self._task, self._work, self._task.paths.model
        with self._clock.step(_WRITING) as step, _output_files(task) as files:
            earlier = files.written_sizes()
            staged = files.reserve(output)
            files.keep(external_files(task.source))
            comparison = functions = None
            compared_with: tuple[str, ...] = ()
            if model is None:
                place_copy(task.source, staged, share_data=task.shares_files, may_link=task.shares_files)
                step.summary = "a copy of the source"
            else:
                refresh_metadata(model, work, is_plain=self._is_plain)
                _record_float_source(model, task)
                if task.functions is not None:
                    model, functions = functions_of_modules(model, task.functions)
                work.write(model, staged, external=task.is_external(model))
                work.refuse_written(sum(size for path, size in files.written_sizes().items() if path not in earlier))
                try:
                    comparison, compared_with = _compare_with_source(task, work, staged) if task.verify else (None, ())
                except VerificationError as error:
                    from winml.modelkit.compare.by_module.first_wrong_module import name_first_wrong_module

                    name_first_wrong_module(error, task.source, staged, work.runs_on)
                    raise
                step.summary = comparison_words(comparison)
            # Counted in the written file, not in the graph in memory.
            written_graph = graph_of(read_structure(staged), staged)
            new_sizes = {path: size for path, size in files.written_sizes().items() if path not in earlier}
            coverage, summary = measure_coverage(written_graph), summarize_graph(written_graph, sum(new_sizes.values()))
            if task.transaction is None:
                files.commit(overwrite=task.overwrite)
        # Paths as the user named them, the model first.
        file_records = [WrittenFile(output.with_name(path.name), size) for path, size in new_sizes.items()]
        sorted_files = sorted(file_records, key=lambda file: (file.path != output, file.path.name))
        return _WrittenResult(tuple(sorted_files), summary, coverage, comparison, functions, compared_with)


@dataclass(frozen=True)
class _WrittenResult:
    """The written result, committed or in the transaction of the caller."""

    files: tuple[WrittenFile, ...]
    summary: GraphSummary
    coverage: Coverage
    comparison: Comparison | None
    functions: ModuleFunctions | None
    notes: tuple[str, ...]
    """Notes on the comparison."""


def _compare_with_source(
    task: GraphFileTask, work: GraphWork[ResultT], staged: Path
) -> tuple[Comparison | None, tuple[str, ...]]:
    """Compare a written result with its source; a source with an opset too old for ONNX Runtime is converted first.

    Args:
        task: The transformation of a file, with the source.
        work: Its work, which compares.
        staged: The result, at its temporary path.

    Returns:
        The comparison, `None` if the source accepts no generated inputs, and notes on the inputs and the source.
    """
    try:
        return _compare_if_fed(task.source, work, staged, task)
    except StageError:
        source = load_by_reference(task.source)
        opset = source.opset_imports.get("", OLDEST_OPSET)
        if opset >= OLDEST_OPSET:
            raise
    from winml.modelkit.normalize.opset_conversion import convert_opset

    with temporary_folder() as folder:
        converted, _ = convert_opset(source, OLDEST_OPSET)
        path = folder / task.source.name
        write_model(converted, path)
        comparison, notes = _compare_if_fed(path, work, staged, task)
    note = (
        f"Compared with the source at opset {OLDEST_OPSET}, to which it was converted: ONNX Runtime does not run it "
        f"at opset {opset}."
    )
    return comparison, ((note, *notes) if comparison is not None else notes)


def _compare_if_fed(
    source: Path, work: GraphWork[ResultT], staged: Path, task: GraphFileTask
) -> tuple[Comparison | None, tuple[str, ...]]:
    """Compare a result with its source, and return notes on the inputs; `None` if no generated inputs are accepted."""
    try:
        with fixed_random_numbers():
            comparison = work.compare(source, staged, task.seed)
    except NoInputsError as error:
        if work.runs_on is None:  # compiled content opens on its provider only
            from winml.modelkit.compare.files import refuse_unopenable

            refuse_unopenable(source, staged)
        reason = error.message.replace(str(source), source.name).rstrip(".")
        note = f"Not checked: the source accepts none of the generated inputs: {reason}."
        if all(value.type.HasField("tensor_type") for value in required_inputs(read_structure(source).graph)):
            files = command_line([str(task.source), str(task.paths.model)])
            note += f" To compare on inputs that it accepts: winml compare {files} --input-data file.npz"
        return None, (note,)
    verified = (comparison.note,) if isinstance(comparison, VerificationInfo) else ()
    return comparison, (*filter(None, verified), *_random_notes(source))


def _random_notes(source: Path) -> Iterator[str]:
    """Note a source whose outputs differ from run to run."""
    if operators := {node.op_type for node in random_nodes(read_structure(source))}:
        is_fixed = operators <= FIXABLE_OPERATORS
        ending = "they are fixed in the comparison" if is_fixed else "the comparison includes the difference"
        yield f"The source generates random numbers, and its outputs differ from run to run; {ending}."


@contextlib.contextmanager
def _output_files(task: GraphFileTask) -> Iterator[OutputFiles]:
    """Yield the transaction of a task, which stays open; without a transaction, open one for the block."""
    if task.transaction is not None:
        yield task.transaction
        return
    with OutputFiles() as files:
        yield files


def refresh_metadata(model: ir.Model, work: GraphWork[ResultT], *, is_plain: bool) -> None:
    """Update the metadata of a model in place; no key is added except the stamp.

    The stamp of normalization is set on every normalized graph, and removed from compiled and other graphs.

    Args:
        model: The model.
        work: The transformation, with its records.
        is_plain: True if the graph is normalized.
    """
    records = dict(work.metadata(model))
    # The record of the export may be missing or damaged.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        export = load_metadata(model.metadata_props[EXPORT_KEY])
        records[EXPORT_KEY] = {**export, "opset_produced": model.opset_imports[""]}
    for key in records.keys() & model.metadata_props.keys():
        model.metadata_props[key] = json.dumps(records[key], ensure_ascii=False, separators=(",", ":"))
    if is_plain and COMPILE_KEY not in model.metadata_props:
        stamp(model)
    else:
        model.metadata_props.pop(NORMALIZED_KEY, None)


def _record_float_source(model: ir.Model, task: GraphFileTask) -> None:
    """Record the source as the float file of a model quantized by the run, in place."""
    if QUANTIZATION_KEY not in model.metadata_props or FLOAT_SOURCE_KEY in model.metadata_props:
        return
    source_keys = {item.key for item in read_structure(task.source).metadata_props}
    if QUANTIZATION_KEY not in source_keys:
        record_float_source(model, name_beside(task.source, task.paths.model), _digest_of_model(task.source))


FLOAT_SOURCE_DIGITS = 64
"""Number of hexadecimal digits of the digest of a float file. Specified: SHA-256."""


def record_float_source(model: ir.Model, name: str, digest: str) -> None:
    """Record the float source of a model in its metadata, in place.

    Args:
        model: The model.
        name: Path of the float file, relative to the folder of the model.
        digest: Digest of the float file and its data.
    """
    record = {"file": name, "digest": digest}
    model.metadata_props[FLOAT_SOURCE_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def recorded_float_source(path: Path, metadata: Mapping[str, str]) -> Path | None:
    """Return the float source of a quantized file; `None` if no source is recorded, or the file is missing or changed.

    Args:
        path: The quantized file; the recorded path is relative to its folder.
        metadata: Metadata of the quantized file.
    """
    try:
        record = load_metadata(metadata[FLOAT_SOURCE_KEY])
        float_file = file_below(path.absolute().parent, record["file"])
        return float_file if _digest_of_model(float_file) == record["digest"] else None
    except (KeyError, TypeError, ValueError, OSError, ForeignNameError, InputError):
        return None


def _digest_of_model(path: Path) -> str:
    """Return a digest of a file, and of names and sizes of its data; data files of winml are named by content."""
    data = sorted((file.name, file.stat().st_size) for file in external_files(path))
    return hashlib.sha256(f"{content_digest(path)} {data}".encode()).hexdigest()


def name_beside(source: Path, output: Path) -> str:
    """Return the path of a source relative to the folder of an output; the file name if the source is not below it.

    Absolute paths of a machine are not recorded.
    """
    try:
        return source.resolve().relative_to(output.parent.resolve()).as_posix()
    except ValueError:
        return source.name


def is_external(model: ir.Model, from_bytes: int) -> bool | None:
    """Return True if weights go to an external data file; `None` if the writer decides by the size limit of the format.

    Args:
        model: The model to write.
        from_bytes: Smallest total size of external weights.
    """
    weights = (value.const_value for value in model.graph.initializers.values())
    return True if sum(tensor.nbytes for tensor in weights if tensor is not None) >= from_bytes else None


def summarize_graph(model: ir.Model, size_bytes: int = 0) -> GraphSummary:
    """Return the operators of a graph, the operators of each module, the size and the opset."""
    operators: Counter[str] = Counter()
    modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in all_nodes(model):
        operators[operator_name(node)] += 1
        if tag := read_tag(node):
            modules[tag.tag][operator_name(node)] += 1
    return GraphSummary(
        operators=dict(sorted(operators.items(), key=lambda count: (-count[1], count[0]))),
        modules={tag: dict(counts) for tag, counts in modules.items()},
        size_bytes=size_bytes,
        opset=model.opset_imports.get("", 0),
    )


PIECE_BYTES = 1 << 27
"""Size of weights in memory at a time. Chosen: some 30 pieces of seven billion parameters in 4 bits, each small
compared with the memory of the libraries."""


@dataclass(frozen=True)
class HandedGraph:
    """A graph after all works, with their summaries and notes."""

    model: ir.Model
    works: tuple[GraphWork[Any], ...]
    summaries: tuple[str, ...]
    """Summary of each work in a few words, aligned with ``works``."""
    notes: tuple[str, ...]

    @property
    def minimum(self) -> QualityMinimum:
        """Minimum quality of every output, relative to PyTorch."""
        return QualityMinimum.least_of(minimum for work in self.works if (minimum := work.minimum) is not None)

    @property
    def below_minimum_hint(self) -> str | None:
        """Hint for a result below the minimum SQNR; `None` for the general hint."""
        return next((hint for work in self.works if (hint := work.below_minimum_hint) is not None), None)

    def refuse_written(self, size_bytes: int) -> None:
        """Refuse a written result that is too large.

        Raises:
            StageError: the result is larger than requested.
        """
        for work in self.works:
            work.refuse_written(size_bytes)

    def late_notes(self) -> tuple[str, ...]:
        """Return the notes of all works on the written model."""
        return tuple(note for work in self.works for note in work.late_notes(self.model))


@dataclass(frozen=True)
class GraphHandover:
    """Works and settings for an exported graph before it is written."""

    works: Callable[[Path, ir.Model], Sequence[GraphWork[Any]]]
    """Returns the works in order, for an output path and its graph."""
    external_from_bytes: int
    """Smallest total size of weights stored in an external data file."""
    processors: Path | None = None
    """Folder of the tokenizer or processor for the samples of the comparison, if any."""
    data_set: DataSetRequest | None = None
    """Dataset of the samples of the comparison; `None`: samples generated for the processor."""
    piece_bytes: int = PIECE_BYTES
    """Bytes of weights of the written file in memory at a time during the comparison with the exported model, whose
    weights are not in memory."""
    lowers_precision: bool = True
    """True if the graph is or becomes quantized; 16-bit weights are then read as float32."""

    def apply(self, model: ir.Model, path: Path) -> HandedGraph:
        """Do the works; the model may be modified.

        Raises:
            StageError: a work failed.
        """
        works = tuple(self.works(path, model))
        summaries: list[str] = []
        notes: list[str] = []
        for work in works:
            result = work.apply(model)
            model = result.model
            refresh_metadata(model, work, is_plain=True)
            summaries.append(work.summary(result))
            notes += result.notes
        return HandedGraph(model, works, tuple(summaries), tuple(notes))

    def is_external(self, model: ir.Model) -> bool | None:
        """Return True if weights go to an external data file; `None` if the writer decides by the format's limit."""
        return is_external(model, self.external_from_bytes)
