"""How does a verb turn one ONNX file into another?

Read, plain form, work, metadata, verification, put in place: written once for every verb that changes a graph, in
``winml build`` as well. What a verb does itself is its :class:`GraphWork`. Knows no verb, and no PyTorch.
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
from typing import Any, ClassVar, Generic, TypeVar

import onnx
import onnx_ir as ir

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.words import comparison_words
from winml.modelkit.errors import InputError, StageError, VerificationError
from winml.modelkit.metadata_keys import COMPILE_KEY, EXPORT_KEY, FLOAT_SOURCE_KEY, NORMALIZED_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.contexts import refuse_compiled
from winml.modelkit.onnx.files.content_digest import content_digest
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.graph_reading import graph_of, load_by_reference, merge_duplicate_keys
from winml.modelkit.onnx.files.output_files import ExportPaths, OutputFiles, recover, refuse_inputs
from winml.modelkit.onnx.files.placing import external_files, place_copy
from winml.modelkit.onnx.files.reading import inline_functions, read_structure, reading_graph
from winml.modelkit.onnx.files.recovery import State, file_state, temporary_folder
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.fingerprint import is_normalized, stamp
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.onnx.validity import OLDEST_OPSET, refuse_cycles, refuse_invalid
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.graph_sessions import newest_ir_version
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.tags.tagging import Coverage, all_nodes, measure_coverage, operator_name, read_tag
from winml.modelkit.transform.module_functions import functions_of_modules, refuse_no_functions
from winml.modelkit.transform.records import GraphSummary, ModuleFunctions, RecordT, TransformedFile, WrittenFile
from winml.modelkit.words import count_noun

EXTERNAL_BYTES = 32_000_000
"""Weights of this size on are written to a file of their own, which ONNX Runtime maps where it would parse and copy
them: a session of bert-base is there 2.6 times as fast (measured). Chosen: below it, milliseconds are at stake."""

ALREADY_NORMALIZED = "already normalized, and no optimization was requested: the result is a copy of the source"

_READING, _NORMALIZATION, _WRITING = "reading", "normalization", "writing and verification"

ResultT = TypeVar("ResultT", bound=StageResult)

Comparison = VerificationInfo | FidelityInfo
"""What a comparison with the source says: equal within rounding, or near enough for fewer bits."""


@dataclass(frozen=True)
class GraphFileTask:
    """Which file is turned into which, and what is asked of the result whatever the work is."""

    source: Path
    """The file that is read; it stays as it is."""
    output: Path
    """The ``.onnx`` file to write."""
    overwrite: bool = False
    verify: bool = True
    """Compare the result with the source in ONNX Runtime."""
    seed: int = 0
    """Seed of the inputs that outputs are compared on."""
    skip_normalization: bool = False
    """Take the graph for normalized although no stamp says so; the result then bears no stamp either."""
    external_data: bool | None = None
    """Keep weights in a file of their own (True) or inside (False). None: decide by size."""
    functions: str | None = None
    """Modules that the result holds as functions: ``all``, ``classes`` or a selector. None: none."""
    external_from_bytes: int | None = None
    """Size of the weights from which they get a file of their own, where nothing else is asked. None: where they must,
    being too large for the model file."""
    shares_files: bool = False
    """Let a copy of the source be a hard link to it and name its data files; correct only if both are in one folder,
    and neither is changed later."""
    copies_any_form: bool = False
    """Also copy a source that is not in its plain form, if normalization is skipped."""
    processors: Path | None = None
    """Folder of the tokenizer, image processor or feature extractor that makes samples; None: that of the source."""
    statistics: Path | None = None
    """Folder where statistics of activations are stored, each model and set of samples in a file of its own; None:
    only a file that the options name."""
    of_several: bool = False
    """Whether the source is one of several parts that are transformed."""
    transaction: OutputFiles | None = None
    """Where the result is written to, to be put in place together with other files by who began it. None: the result is
    put in place by itself."""

    @property
    def paths(self) -> ExportPaths:
        """The files that may be written.

        Raises:
            UsageError: the output is a directory, or does not end in ``.onnx``.
        """
        return ExportPaths.for_output(self.output, with_sidecar=False, with_report=False)

    def refuse_early(self) -> None:
        """Refuse an output that cannot be, before anything is read; writes nothing.

        Raises:
            UsageError: the output exists, is a directory or the source, or does not end in ``.onnx``.
            WriteError: its place cannot be written to.
        """
        refuse_inputs([self.paths.model], [self.source])
        self.paths.refuse_existing(overwrite=self.overwrite)

    def is_external(self, model: ir.Model) -> bool | None:
        """Say whether the weights of a result go to a file of their own; None leaves it to the writer."""
        if self.external_data is not None or self.external_from_bytes is None:
            return self.external_data
        return is_external(model, self.external_from_bytes)

    def recover(self) -> None:
        """Complete or remove what killed commands left where the result goes, unless a transaction has begun there."""
        if self.transaction is None:
            recover([self.paths.model])


class GraphWork(ABC, Generic[ResultT]):
    """What a verb does with a graph between reading and writing."""

    step_name: ClassVar[str]
    """The work in the list of steps."""
    precedes_normalization: ClassVar[bool] = False
    """Whether the graph is brought into its plain form after the work rather than before it."""

    @property
    def is_requested(self) -> bool:
        """Whether anything was requested so far that may change the graph; asked again after the work."""
        return True

    @property
    def folds_constants(self) -> bool:
        """Whether what depends on constants only may be computed when the graph is brought into its plain form."""
        return True

    @property
    def may_be_requested(self) -> bool:
        """Whether anything was or still may be requested while the work runs. If not, no weight is read."""
        return self.is_requested

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse what the work cannot do with a graph, by its structure; weights are not there.

        Raises:
            UsageError: what is requested does not fit the graph.
        """

    def refuse_plain(self, read: Callable[[], ir.Model]) -> None:
        """Refuse what shows in the plain form of a graph only, for a plan that is not run.

        Args:
            read: Reads the source into its plain form; what it returns is used up.

        Raises:
            StageError: the work would refuse the graph.
            UsageError: what is requested does not fit the graph.
        """

    @property
    def runs_on(self) -> ChosenProvider | None:
        """The provider that alone runs the result, so that its modules are not seen in it; None: any runs it."""
        return None

    @property
    def least_sqnr_db(self) -> float | None:
        """Ratio in decibels that every output has to reach beside those before the work; None: they are the same."""
        return None

    @property
    def below_minimum_hint(self) -> str | None:
        """What to do about a result below this ratio; None: what helps any file."""
        return None

    @property
    def request_words(self) -> str:
        """What is requested, in a few words for a plan."""
        return self.step_name

    @abstractmethod
    def apply(self, model: ir.Model) -> ResultT:
        """Do the work; the model is used up, and the result may hold it or a new one."""

    @abstractmethod
    def summary(self, result: ResultT) -> str:
        """Return what was done, in a few words for the list of steps."""

    def metadata(self, model: ir.Model) -> Mapping[str, Any]:  # noqa: ARG002 - other works look at it
        """Return what the file says about itself that the work changed: JSON values by key of the model's metadata.

        A key that the file does not have is not added.
        """
        return {}

    def late_notes(self, model: ir.Model) -> tuple[str, ...]:  # noqa: ARG002 - other works look at it
        """Return what is known only once a model was written: sentences for the user."""
        return ()

    def write(self, model: ir.Model, path: Path, *, external: bool | None) -> None:
        """Write the result; what belongs beside it goes into the same folder.

        Args:
            model: The result.
            path: The file to write.
            external: Keep weights in a file of their own (True) or inside (False). None: where they must.

        Raises:
            WriteError: it cannot be written.
        """
        write_model(model, path, external=external)

    def refuse_written(self, size_bytes: int) -> None:
        """Refuse what was written by its size; it is not in its place yet.

        Args:
            size_bytes: Of the model and its data.

        Raises:
            StageError: it is larger than what was requested.
        """

    def compare(self, source: Path, written: Path, seed: int) -> Comparison | None:
        """Compare the file that was written with its source; None where that cannot be done here.

        Raises:
            StageError: the source itself cannot be run, so there is nothing to compare with.
            VerificationError: they differ by more than this work allows.
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
    """What came of turning one file into another."""

    result: ResultT
    """What the work returned, with the model in memory."""
    file: TransformedFile


class FileWork(GraphWork[ResultT], Generic[ResultT, RecordT]):
    """Work of a verb that makes one file from another."""

    @contextlib.contextmanager
    def prepared(self, task: GraphFileTask) -> Iterator[FileWork[ResultT, RecordT]]:  # noqa: ARG002 - others read it
        """Yield the work with the resources of one run, such as samples or a folder; they are released afterwards."""
        yield self

    @abstractmethod
    def record(self, done: Transformation[ResultT]) -> RecordT:
        """Return the record of the written file."""


def make_file(
    task: GraphFileTask,
    work: FileWork[ResultT, RecordT],
    on_step: Callable[[StepEvent], None] | None = None,
    checked: CheckedSource | None = None,
) -> RecordT:
    """Do the work on a file and return the record; arguments and errors are those of :func:`transform_file`."""
    with work.prepared(task) as prepared:
        return prepared.record(transform_file(task, prepared, on_step, checked))


def transform_file(
    task: GraphFileTask,
    work: GraphWork[ResultT],
    on_step: Callable[[StepEvent], None] | None = None,
    checked: CheckedSource | None = None,
) -> Transformation[ResultT]:
    """Read a graph, bring it into its plain form, do the work, and put the verified result in place.

    A source that is in its plain form, of which nothing is requested, is copied; its weights are not parsed.

    Args:
        task: From which file to which.
        work: What is done with the graph.
        on_step: Called when a step starts and when it ends.
        checked: The source, where a plan has read it; read again if it has changed since.

    Raises:
        UsageError: the output exists, is a directory, or is data that the source names.
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
        NormalizeError: the graph could not be normalized.
        StageError: the work failed; or the source itself does not run, so the result cannot be compared with it.
        VerificationError: the result does not answer as the source does; no file was written.
        WriteError: the output cannot be written.
    """
    task.refuse_early()
    task.recover()
    return _Run(task, work, StepClock(work.steps(), on_step)).transform(checked)


@dataclass(frozen=True)
class CheckedSource:
    """The structure of a source that can be worked on, as it was when it was read."""

    model: ir.Model
    """Valid, without its larger weights, every metadata key once."""
    notes: tuple[str, ...]
    """What was repaired while reading; a copy of the source would lack it."""
    data: tuple[Path, ...]
    """The data files that it names."""
    states: Mapping[Path, State]
    """Sizes and times of change of the source and its data files."""

    @property
    def is_current(self) -> bool:
        """Whether the files are still what they were."""
        return all(file_state(path) == state for path, state in self.states.items())


def check_source(task: GraphFileTask, work: GraphWork[ResultT]) -> CheckedSource:
    """Read the structure of a source, and refuse what shows in it; no weight is read, and nothing is written.

    Raises:
        UsageError: the output is data that the source names, or the work does not fit the graph.
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
    """
    source = task.source
    data = external_files(source)  # raises our errors, where a library would raise its own
    refuse_inputs([task.paths.model], data)
    states = {path: file_state(path) for path in (source, *data)}
    structure, notes = _checked_structure(source)
    model = graph_of(structure, source)
    refuse_compiled(model)
    if task.functions is not None:
        refuse_no_functions(model, task.functions)
    work.refuse_graph(model)
    return CheckedSource(model, notes, data, states)


def may_be_copy(task: GraphFileTask, checked: CheckedSource) -> bool:
    """Say whether the source can be the result as it is, where the work changes nothing."""
    if checked.notes:
        return False
    if task.copies_any_form and task.skip_normalization:
        return True
    is_readable = checked.model.ir_version <= newest_ir_version()
    return is_normalized(checked.model) and task.external_data is None and is_readable


def _checked_structure(source: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a valid file without its larger weights, every metadata key once, and what was repaired for that."""
    structure = read_structure(source, as_written=True)
    refuse_cycles(structure, source)
    inlined = inline_functions(structure, source)
    merged = merge_duplicate_keys(structure)
    refuse_invalid(structure, source)
    calls = (f"{count_noun(inlined, 'module function', 'were')} inlined.",) if inlined else ()
    return structure, (*merged.notes(), *calls)


def read_plain(source: Path, *, folds_constants: bool = True) -> tuple[ir.Model, tuple[str, ...]]:
    """Read a file as :func:`transform_file` does, and return its plain form, and what was done for it.

    Weights stay in the file until they are read.

    Args:
        source: The file.
        folds_constants: Compute what depends on constants only.

    Raises:
        InputError: the file is no ONNX model or not a valid one, its data is missing, or it is compiled already.
        NormalizeError: the graph could not be normalized.
    """
    external_files(source)  # raises our errors, where a library would raise its own
    _, repairs = _checked_structure(source)
    model = reading_graph(source, lambda: load_by_reference(source))
    refuse_compiled(model)
    notes = (*repairs, *_lower_ir_version(model), *_release_weights(model))
    if is_normalized(model):
        return model, notes
    return model, (*notes, *_normalize(model, folds_constants=folds_constants))


def _normalize(model: ir.Model, *, folds_constants: bool) -> tuple[str, ...]:
    # Imported where it is needed: a copy by reference need not wait for the libraries of the passes.
    from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize

    return normalize(model, NormalizeOptions(fold_constants=folds_constants)).notes


_FREE_INITIALIZERS = 4
"""Specified by ONNX: the first IR version in which an initializer need not be an input."""


def _release_weights(model: ir.Model) -> tuple[str, ...]:
    """Remove initializers from the inputs of a graph of IR version 3 or older, in place; returns a note.

    These versions require every initializer to be an input. ONNX Runtime takes them for constants.
    """
    weights = [value for value in model.graph.inputs if value.is_initializer()]
    if model.ir_version >= _FREE_INITIALIZERS or not weights:
        return ()
    for value in weights:
        model.graph.inputs.remove(value)
    note = (
        f"{count_noun(len(weights), 'weight', 'are')} no longer in the inputs: IR version {model.ir_version} "
        f"required it, and version {_FREE_INITIALIZERS}, which the result has, does not."
    )
    model.ir_version = _FREE_INITIALIZERS
    return (note,)


def _lower_ir_version(model: ir.Model) -> tuple[str, ...]:
    """Let the model bear a version of the format that ONNX Runtime takes, in place; returns what to say of it.

    Newer versions add kinds of tensors only, which ONNX Runtime refuses by themselves where a model has them.
    """
    newest, version = newest_ir_version(), model.ir_version
    if version <= newest:
        return ()
    model.ir_version = newest
    return (f"IR version {version} was lowered to {newest}, the newest that the installed ONNX Runtime supports.",)


class _Run(Generic[ResultT]):
    """One run of a work on a file."""

    def __init__(self, task: GraphFileTask, work: GraphWork[ResultT], clock: StepClock) -> None:
        self._task, self._work, self._clock = task, work, clock
        self._is_plain = False
        """Whether the graph is in its plain form by now."""
        self._normalizations = 0

    def transform(self, checked: CheckedSource | None) -> Transformation[ResultT]:
        """Do the steps; ``checked`` is the source, where a plan has read it."""
        task, work = self._task, self._work
        with self._clock.step(_READING) as step:
            if checked is None or not checked.is_current:
                checked = check_source(task, work)
            # The structure only: a copy by reference never reads the weights.
            model = checked.model
            before = summarize_graph(model, sum(file.stat().st_size for file in (task.source, *checked.data)))
            is_plain, copies = is_normalized(model), may_be_copy(task, checked) and task.functions is None
            if work.may_be_requested or not copies:
                model = reading_graph(task.source, lambda: load_by_reference(task.source))
            step.summary = f"{before.nodes} nodes, opset {before.opset}"
        if work.precedes_normalization:
            result = self._apply(model)
            notes = self._normalize(result.model, is_plain=False)
        else:
            notes = self._normalize(model, is_plain=is_plain)
            result = self._apply(model)
        # The one place that decides it; asked after the work, which may have requested more.
        is_copy = copies and not work.is_requested
        if is_copy:
            notes = (ALREADY_NORMALIZED,) if is_plain else ()
        written = self._write(None if is_copy else result.model)
        functions = written.functions
        file = TransformedFile(
            source=task.source,
            model_path=task.paths.model,
            files=written.files,
            is_copy=is_copy,
            is_plain=self._is_plain,
            normalizations=self._normalizations,
            before=before,
            after=written.summary,
            coverage=written.coverage,
            comparison=written.comparison,
            steps=self._clock.timings(),
            functions=functions,
            notes=(
                *checked.notes,
                *notes,
                *result.notes,
                *(functions.notes() if functions else ()),
                *written.notes,
            ),
        )
        return Transformation(result, file)

    def _normalize(self, model: ir.Model, *, is_plain: bool) -> tuple[str, ...]:
        """Bring the graph into its plain form, in place, unless it is or that is skipped; return what was done."""
        with self._clock.step(_NORMALIZATION) as step:
            notes = (*_lower_ir_version(model), *_release_weights(model))
            self._is_plain = is_plain
            if is_plain or self._task.skip_normalization:
                step.summary = "already normalized" if is_plain else "left out"
                return notes
            notes += _normalize(model, folds_constants=self._work.folds_constants)
            step.summary = f"normalized to {sum(1 for _ in all_nodes(model))} nodes"
            self._is_plain, self._normalizations = True, 1
            return notes

    def _apply(self, model: ir.Model) -> ResultT:
        with self._clock.step(self._work.step_name) as step:
            result = self._work.apply(model)
            step.summary = self._work.summary(result)
        return result

    def _write(self, model: ir.Model | None) -> _Written:
        """Write the model, or the source under another name where there is none; compare, count and put in place."""
        task, work, output = self._task, self._work, self._task.paths.model
        with self._clock.step(_WRITING) as step, _output_files(task) as files:
            others = files.written_sizes()
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
                work.refuse_written(sum(size for path, size in files.written_sizes().items() if path not in others))
                try:
                    comparison, compared_with = _compare(task, work, staged) if task.verify else (None, ())
                except VerificationError as error:
                    from winml.modelkit.compare.by_module.first_wrong_module import name_first_wrong_module

                    name_first_wrong_module(error, task.source, staged, work.runs_on)
                    raise
                step.summary = comparison_words(comparison)
            # Counted in the file that ships, not in the graph it was written from.
            shipped = graph_of(read_structure(staged), staged)
            written = {path: size for path, size in files.written_sizes().items() if path not in others}
            coverage, summary = measure_coverage(shipped), summarize_graph(shipped, sum(written.values()))
            if task.transaction is None:
                files.commit(overwrite=task.overwrite)
        # As the user named them, the model first.
        named = [WrittenFile(output.with_name(path.name), size) for path, size in written.items()]
        ordered = sorted(named, key=lambda file: (file.path != output, file.path.name))
        return _Written(tuple(ordered), summary, coverage, comparison, functions, compared_with)


@dataclass(frozen=True)
class _Written:
    """The result in its place."""

    files: tuple[WrittenFile, ...]
    summary: GraphSummary
    coverage: Coverage
    comparison: Comparison | None
    functions: ModuleFunctions | None
    notes: tuple[str, ...]
    """About the comparison."""


def _compare(task: GraphFileTask, work: GraphWork[ResultT], staged: Path) -> tuple[Comparison | None, tuple[str, ...]]:
    """Compare a written result with its source, converted to an opset that ONNX Runtime runs if its own is older.

    Returns:
        The comparison, and a note if the source was converted.
    """
    try:
        return work.compare(task.source, staged, task.seed), ()
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
        comparison = work.compare(path, staged, task.seed)
    note = (
        f"Compared with the source at opset {OLDEST_OPSET}, to which it was converted: ONNX Runtime does not run it "
        f"at opset {opset}."
    )
    return comparison, (note,)


@contextlib.contextmanager
def _output_files(task: GraphFileTask) -> Iterator[OutputFiles]:
    """Yield the transaction of a task, which stays open, or one that ends with the block."""
    if task.transaction is not None:
        yield task.transaction
        return
    with OutputFiles() as files:
        yield files


def refresh_metadata(model: ir.Model, work: GraphWork[ResultT], *, is_plain: bool) -> None:
    """Bring what the file says about itself up to date, in place; a key that the file does not have is not added.

    The stamp is: every graph that is in its plain form bears one. A compiled one is in it no more.
    """
    records = dict(work.metadata(model))
    # Not where the file says nothing of an export, or what it says is damaged.
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
    """Let a model that was quantized now name the float file that it was made from, in place."""
    if QUANTIZATION_KEY not in model.metadata_props or FLOAT_SOURCE_KEY in model.metadata_props:
        return
    before = {item.key for item in read_structure(task.source).metadata_props}
    if QUANTIZATION_KEY not in before:
        record_float_source(model, name_beside(task.source, task.paths.model), _digest_of_model(task.source))


FLOAT_SOURCE_DIGITS = 64
"""Of the digest of a float file. Specified: SHA-256."""


def record_float_source(model: ir.Model, name: str, digest: str) -> None:
    """Let a model name the float file that it was made from, in place.

    Args:
        model: The model.
        name: Of the file, from the folder of the model.
        digest: Of the file and its data.
    """
    record = {"file": name, "digest": digest}
    model.metadata_props[FLOAT_SOURCE_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def recorded_float_source(path: Path, metadata: Mapping[str, str]) -> Path | None:
    """Return the float file that a quantized one was made from; None where it names none, or that is not there now.

    Args:
        path: The quantized file, from whose folder the name leads.
        metadata: Its metadata.
    """
    try:
        record = load_metadata(metadata[FLOAT_SOURCE_KEY])
        found = file_below(path.absolute().parent, record["file"])
        return found if _digest_of_model(found) == record["digest"] else None
    except (KeyError, TypeError, ValueError, OSError, ForeignNameError, InputError):
        return None


def _digest_of_model(path: Path) -> str:
    """Return a digest of a file, and of the names and sizes of its data: ours are called after their content."""
    data = sorted((file.name, file.stat().st_size) for file in external_files(path))
    return hashlib.sha256(f"{content_digest(path)} {data}".encode()).hexdigest()


def name_beside(source: Path, output: Path) -> str:
    """Return the path of a file from the folder of another, or its name where it is not below: no path of a machine."""
    try:
        return source.resolve().relative_to(output.parent.resolve()).as_posix()
    except ValueError:
        return source.name


def is_external(model: ir.Model, from_bytes: int) -> bool | None:
    """Say whether weights go to a file of their own; None leaves it to the writer, which asks whether they must.

    Args:
        model: The model to write.
        from_bytes: Size of all weights from which they do.
    """
    weights = (value.const_value for value in model.graph.initializers.values())
    return True if sum(tensor.nbytes for tensor in weights if tensor is not None) >= from_bytes else None


def summarize_graph(model: ir.Model, size_bytes: int = 0) -> GraphSummary:
    """Return a graph in numbers: its operators, those of each module, its size and its opset."""
    operators: Counter[str] = Counter()
    modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in all_nodes(model):
        operators[operator_name(node)] += 1
        if tag := read_tag(node):
            modules[tag.tag][operator_name(node)] += 1
    return GraphSummary(
        operators=dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        modules={tag: dict(counts) for tag, counts in modules.items()},
        size_bytes=size_bytes,
        opset=model.opset_imports.get("", 0),
    )


PIECE_BYTES = 1 << 27
"""Chosen: some 30 pieces of seven billion parameters in 4 bits, each small beside what the libraries take."""


@dataclass(frozen=True)
class HandedGraph:
    """A graph after the works."""

    model: ir.Model
    works: tuple[GraphWork[Any], ...]
    summaries: tuple[str, ...]
    """What each work did, in a few words."""
    notes: tuple[str, ...]

    @property
    def least_sqnr_db(self) -> float:
        """Ratio in decibels that every output has to reach beside PyTorch."""
        return min(least for work in self.works if (least := work.least_sqnr_db) is not None)

    @property
    def below_minimum_hint(self) -> str | None:
        """What to do about a result below this ratio; None: what helps any file."""
        return next((hint for work in self.works if (hint := work.below_minimum_hint) is not None), None)

    def refuse_written(self, size_bytes: int) -> None:
        """Refuse what was written by its size.

        Raises:
            StageError: it is larger than what was requested.
        """
        for work in self.works:
            work.refuse_written(size_bytes)

    def late_notes(self) -> tuple[str, ...]:
        """Return what is known only once the model was written."""
        return tuple(note for work in self.works for note in work.late_notes(self.model))


@dataclass(frozen=True)
class GraphHandover:
    """The works on an exported graph before it is written."""

    works: Callable[[Path, ir.Model], Sequence[GraphWork[Any]]]
    """Returns them in order, for the path and the graph that goes there."""
    external_from_bytes: int
    """Size of the weights from which they get a file of their own."""
    processors: Path | None = None
    """Folder of what makes arrays of the samples that are compared; None: there is none."""
    piece_bytes: int = PIECE_BYTES
    """Weights of the written file in memory at a time, while it is compared with a model whose weights are not."""
    lowers_precision: bool = True
    """Whether the graph gets fewer bits, or has them; weights of 16 bits are then read as float32."""

    def apply(self, model: ir.Model, path: Path) -> HandedGraph:
        """Do the works; the model is used up.

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
        """Say whether weights go to a file of their own; None leaves it to the writer, which asks whether they must."""
        return is_external(model, self.external_from_bytes)
