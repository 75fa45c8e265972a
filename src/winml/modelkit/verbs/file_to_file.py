"""How does a verb that makes a file of a file plan and run? Also a folder of the folder of a build, part by part.

Written once for these verbs: what a verb does itself is its :class:`FileVerb`. Standard library only until a request is
found fit by its options and paths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from winml.modelkit.errors import ConfigError, ModelPathError, UsageError
from winml.modelkit.fields import MODEL, OUTPUT, VERIFICATION, declare
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, MODEL_SUFFIX, ONLY_PART
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep, interruptions_beside, planned_data, planned_file
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    import onnx_ir as ir

    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.options import Options
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.transform.graph_file import CheckedSource, GraphFileTask, GraphWork
    from winml.modelkit.transform.records import RecordT, TransformedFolder
else:
    RecordT = TypeVar("RecordT")

OptionsT = TypeVar("OptionsT", bound="Options")
RequestT = TypeVar("RequestT", bound="FileRequest[Any]")
WorkT = TypeVar("WorkT", bound="GraphWork[Any]")

EXTERNAL_FROM_BYTES = 256
"""Specified by onnx_ir: the smallest weight that goes to a file of weights."""


def read_sizes(text: str) -> dict[str, int]:
    """Return sizes by name or key, of JSON text or the path of a JSON file. Names are an ONNX file's own.

    Raises:
        ConfigError: it is malformed, or a size is no whole number.
    """
    from winml.modelkit.options import read_json

    value, source = read_json(text, "--shape-config")
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {type(value).__name__}")
    for name, size in value.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"{source}: {name}: expected a whole number of at least 1 (got {size!r})",
                hint="Omit a dimension to leave it dynamic.",
            )
    return value


@dataclass(frozen=True, kw_only=True)
class FileRequest(ABC, Generic[OptionsT]):
    """What is requested of a verb that makes a file of a file."""

    section: ClassVar[str]
    """Section of a build config that holds the options."""
    declaring: ClassVar[type]
    """The dataclass that declares them."""

    options: OptionsT
    """What is done with the graph."""
    model: Path | None = declare(None, MODEL, short="-m", is_common=True)
    """ONNX file or build folder. It is not modified. A file on the Hub is OWNER/NAME/PATH.onnx."""
    submodel: tuple[str, ...] = declare((), MODEL, metavar="PART", default_words="all")
    """Part of a folder with several parts, such as decoder."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """File to write; for a build folder, the folder."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Overwrite existing files."""
    verify: bool = declare(True, VERIFICATION, is_common=True)
    """Compare the result with the source in ONNX Runtime."""
    sizes: Mapping[str, int] | None = declare(
        None, VERIFICATION, spelling="--shape-config", metavar="JSON", read=read_sizes, default_words="several sizes"
    )
    """Sizes of dynamic dimensions in the comparison, such as {"batch_size": 4}. By name or input:axis; a file or JSON
    text."""
    seed: int = declare(0, VERIFICATION)
    """Seed of the random inputs of the comparison."""

    @classmethod
    @abstractmethod
    def options_record(cls) -> type[OptionsT]:
        """Return the validated record of the options."""

    @classmethod
    def section_values(cls, section: Options) -> tuple[dict[str, object], str]:
        """Return the options that a section of a build config states, as JSON values, and a note on them or nothing."""
        return section.model_dump(mode="json", exclude_none=True), ""

    @classmethod
    def of_command(
        cls, section: Mapping[str, Any], options: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> FileRequest[OptionsT]:
        """Return the request of a command line.

        Args:
            section: Options of the config.
            options: Options that the command line states; they win.
            fields: All else that it states.

        Raises:
            ConfigError: a value is wrong.
        """
        from winml.modelkit.options import parse_options

        return cls(options=parse_options(cls.options_record(), {**section, **options}, "options"), **fields)


@dataclass(frozen=True, kw_only=True)
class WeightsRequest(FileRequest[OptionsT]):
    """What is requested of a verb that also says where the weights go."""

    external_data: bool | None = declare(None, OUTPUT, default_words="external if they are large, which loads faster")
    """Store the weights in an external data file, or inside the ONNX file."""


@dataclass(frozen=True)
class PlannedPart(Generic[WorkT]):
    """One file that would become another."""

    task: GraphFileTask
    work: WorkT
    checked: CheckedSource | None
    """The source as it was read; None where recovery would replace it first, so that it is read and checked then."""
    folder: FoundFolder | None
    """The folder of a build that the file is a part of, if it is."""


@dataclass(frozen=True, kw_only=True)
class FilePlan(Plan, Generic[RequestT, WorkT]):
    """What a verb that makes a file of a file would do."""

    request: RequestT
    parts: Mapping[str, PlannedPart[WorkT]]
    """Name of the part → what would become of it; of a file there is one."""
    folder: FoundFolder | None = None
    """The folder whose parts they are."""


class FileVerb(ABC, Generic[RequestT, OptionsT, WorkT, RecordT]):
    """A verb that makes a file of a file: what it does itself between reading and writing."""

    name: ClassVar[str]

    def refuse_options(self, request: RequestT) -> None:
        """Refuse what the options alone show to be wrong, before a path is looked at.

        Raises:
            UsageError: names it.
        """

    def default_output(self, model: Path) -> Path | None:  # noqa: ARG002  # other verbs look at it
        """Return what is written where no output is named; None where one has to be."""
        return None

    def task(self, request: RequestT, source: Path, output: Path) -> GraphFileTask:
        """Return from which file to which, and how."""
        from winml.modelkit.transform.graph_file import EXTERNAL_BYTES, GraphFileTask

        task = GraphFileTask(source, output, overwrite=request.overwrite, verify=request.verify, seed=request.seed)
        if not isinstance(request, WeightsRequest):
            return task
        return replace(task, external_data=request.external_data, external_from_bytes=EXTERNAL_BYTES)

    @abstractmethod
    def work(self, request: RequestT, task: GraphFileTask, options: OptionsT) -> WorkT:
        """Return what is done with the graph.

        Args:
            request: What is requested.
            task: From which file to which.
            options: Those of the part.

        Raises:
            UsageError: it cannot be done with any.
        """

    def data_condition(self, task: GraphFileTask, work: WorkT) -> str | None:  # noqa: ARG002  # other verbs look at it
        """Return on which condition files of data are written beside the model; None: never."""
        if task.external_data is False:
            return None
        if task.external_data:
            return f"a weight takes {size_words(EXTERNAL_FROM_BYTES)} or more"
        if task.external_from_bytes is not None:
            return f"the weights take {size_words(task.external_from_bytes)} or more"
        return "the weights do not fit into the model"

    @abstractmethod
    def transform(self, part: PlannedPart[WorkT], on_step: Callable[[StepEvent], None] | None) -> RecordT:
        """Make the file of one part, and return the record of it.

        Args:
            part: From which file to which, and what is done.
            on_step: Called when a step starts and when it ends.

        Raises:
            WinMLError: the work failed; no file was written.
        """

    def plan(self, request: RequestT) -> FilePlan[RequestT, WorkT]:
        """Return what would be done, for a file or for the folder of a build. Writes nothing.

        Raises:
            UsageError: an option or a path is wrong, an output exists, or a selector names no module.
            InputError: a file is no ONNX model or not a valid one, or its data is missing.
            WriteError: the output cannot be written.
        """
        self.refuse_options(request)
        source = find_source(request)
        if isinstance(source, Path):
            return self.plan_file(request if source == request.model else self._of_hub(request, source))
        if request.output is None or request.output.suffix.lower() != ".onnx":
            return self._plan_folder(request, source)
        model = only_part(source, f"-o {request.output} is one file")
        return self.plan_file(replace(request, model=model, submodel=()))

    def _of_hub(self, request: RequestT, fetched: Path) -> RequestT:
        """Return the request for a fetched file; without ``-o`` the output is in the current folder, not the cache."""
        return replace(request, model=fetched, output=request.output or self.default_output(Path(fetched.name)))

    def plan_file(self, request: RequestT) -> FilePlan[RequestT, WorkT]:
        """Return what would be done with one file; raises as :meth:`plan` does."""
        from winml.modelkit.onnx.files.output_files import ExportPaths, is_waiting, refuse_inputs

        assert request.model is not None
        model, (output, notes) = request.model, self._output(request, request.model)
        paths = ExportPaths.for_output(output, with_sidecar=False, with_report=False)
        refuse_inputs([paths.model], [model])
        paths.refuse_existing(overwrite=request.overwrite)
        is_recovered = is_waiting(model, [output])
        if not model.is_file() and not is_recovered:
            raise ModelPathError(f"{model}: no such file", hint="Pass the path of an ONNX file.")
        part, files, steps = self._plan_part(request, model, output, request.options, None, is_recovered=is_recovered)
        reads = (model, *(part.checked.data if part.checked is not None else ()))
        return FilePlan(
            verb=self.name,
            reads=reads,
            writes=files,
            steps=steps,
            notes=notes,
            removes=orphaned_data([output], reads),
            interrupted=interruptions_beside([output]),
            request=request,
            parts={ONLY_PART: part},
        )

    def _plan_folder(self, request: RequestT, found: FoundFolder) -> FilePlan[RequestT, WorkT]:
        from winml.modelkit.builds.folder_transformation import options_by_part, refuse_folder_outputs
        from winml.modelkit.onnx.files.placing import external_files

        folder, notes = self._output(request, found.path)
        refuse_folder_outputs(found, folder, overwrite=request.overwrite)
        requested = options_by_part(found, request.options)
        parts: dict[str, PlannedPart[WorkT]] = {}
        files: list[PlannedFile] = []
        steps: list[PlannedStep] = []
        reads = [*found.companions.values()]
        for part, source in found.parts.items():
            output = folder / found.name_of(part)
            reads += [source, *external_files(source)]
            if part not in requested:
                steps.append(PlannedStep(f"{part}: copying", "as it is"))
                files += [planned_file(output), *([planned_data(output)] if external_files(source) else [])]
                continue
            parts[part], outputs, own = self._plan_part(request, source, output, requested[part], found)
            prefix = f"{part}: " if len(found.parts) > 1 else ""
            steps += [replace(step, name=f"{prefix}{step.name}") for step in own]
            files += outputs
        files += [planned_file(folder / name) for name in (*found.companions, BUILD_MANIFEST_NAME)]
        models = [folder / found.name_of(part) for part in found.parts]
        return FilePlan(
            verb=self.name,
            reads=tuple(reads),
            writes=tuple(files),
            steps=tuple(steps),
            notes=notes,
            removes=orphaned_data(models, reads),
            interrupted=interruptions_beside([*models, folder / BUILD_MANIFEST_NAME]),
            request=request,
            parts=parts,
            folder=found,
        )

    def _output(self, request: RequestT, model: Path) -> tuple[Path, tuple[str, ...]]:
        """Return what is written, and what is said where nobody named it."""
        if request.output is not None:
            return request.output, ()
        output = self.default_output(model)
        if output is None:
            raise UsageError("no output is specified", hint="Specify the file or folder to write with -o.")
        return output, (f"Without -o, the output is {output}.",)

    def _plan_part(
        self,
        request: RequestT,
        source: Path,
        output: Path,
        options: OptionsT,
        folder: FoundFolder | None,
        *,
        is_recovered: bool = False,
    ) -> tuple[PlannedPart[WorkT], tuple[PlannedFile, ...], tuple[PlannedStep, ...]]:
        """Return what would become of one file, what would be written of it, and in which steps."""
        from winml.modelkit.transform.graph_file import check_source

        task = self.task(request, source, output)
        work = self.work(request, task, options)
        checked = None if is_recovered else check_source(task, work)
        is_copy = checked is not None and _is_copy(task, work, checked)
        if is_copy:
            condition = "" if checked is not None and checked.data else None
        else:
            condition = self.data_condition(task, work)
        data = () if condition is None else (planned_data(output, only_if=condition),)
        steps = _planned_steps(task, work, checked, is_copy=is_copy)
        return PlannedPart(task, work, checked, folder), (planned_file(output), *data), steps

    def refuse_unrun(self, plan: FilePlan[RequestT, WorkT]) -> None:
        """Refuse a plan that is not run for what its run would refuse in the plain form of a graph.

        Raises:
            WinMLError: as :meth:`run` does before a model runs.
        """
        for part in plan.parts.values():
            if part.checked is not None:
                part.work.refuse_plain(partial(_read_plain, part))

    def run(
        self, plan: FilePlan[RequestT, WorkT], on_step: Callable[[StepEvent], None] | None = None
    ) -> RecordT | TransformedFolder[RecordT]:
        """Do what a plan says: recover what killed commands left, then make the file, or the folder.

        Raises:
            WinMLError: the work failed, or the result does not compute what its source does; nothing was written.
        """
        if plan.folder is None:
            return self.run_file(plan, on_step)
        from winml.modelkit.builds.folder_transformation import transform_folder

        folder = plan.folder
        output, _ = self._output(plan.request, folder.path)
        plan.recover()

        def work_on_part(name: str, task: GraphFileTask, part: PlannedPart[WorkT]) -> RecordT:
            return self.transform(replace(part, task=task), _named_steps(name, folder, on_step))

        return transform_folder(folder, self.task(plan.request, folder.path, output), plan.parts, work_on_part)

    def run_file(self, plan: FilePlan[RequestT, WorkT], on_step: Callable[[StepEvent], None] | None = None) -> RecordT:
        """Do what the plan of one file says; raises as :meth:`run` does."""
        plan.recover()
        return self.transform(plan.parts[ONLY_PART], on_step)


def _read_plain(part: PlannedPart[Any]) -> ir.Model:
    from winml.modelkit.transform.graph_file import read_plain

    model, _ = read_plain(part.task.source, folds_constants=part.work.folds_constants)
    return model


def find_source(request: FileRequest[Any]) -> FoundFolder | Path:
    """Return the file that a request names, there or not, or the folder of a build; a file of the Hub is fetched.

    Raises:
        UsageError: it names none, or the folder has no part of a name.
        ModelPathError: the folder holds no ONNX model.
        HubError: the file cannot be fetched.
    """
    model = request.model
    if model is None:
        raise UsageError("no model is specified", hint="Specify an ONNX file with --model.")
    if model.is_dir():
        from winml.modelkit.builds.found_models import found_folder

        return found_folder(model, request.submodel)
    if request.submodel:
        raise UsageError(
            f"--submodel {request.submodel[0]} requires a build folder, and {model} is not one",
            hint="Omit it.",
        )
    if model.suffix.lower() != MODEL_SUFFIX or (model.exists() and not model.is_symlink()):
        return model
    from winml.modelkit.builds.found_models import readable_file

    return readable_file(model)


def only_part(found: FoundFolder, words: str) -> Path:
    """Return the file of the only part that is meant.

    Args:
        found: The folder.
        words: Why there can be one only.

    Raises:
        UsageError: several are.
    """
    if len(found.chosen) > 1:
        raise UsageError(
            f"{words}, and {found.path} contains {', '.join(found.chosen)}",
            hint=f"Select one: --submodel {found.chosen[-1]}.",
        )
    return found.parts[found.chosen[0]]


def _named_steps(
    part: str, folder: FoundFolder, on_step: Callable[[StepEvent], None] | None
) -> Callable[[StepEvent], None] | None:
    """Return what is told the steps of a part, with its name where there are several."""
    if on_step is None or len(folder.parts) == 1:
        return on_step
    return lambda event: on_step(replace(event, name=f"{part}: {event.name}"))


def _is_copy(task: GraphFileTask, work: GraphWork[Any], checked: CheckedSource) -> bool:
    from winml.modelkit.transform.graph_file import may_be_copy

    return not work.may_be_requested and task.functions is None and may_be_copy(task, checked)


def _planned_steps(
    task: GraphFileTask, work: GraphWork[Any], checked: CheckedSource | None, *, is_copy: bool
) -> tuple[PlannedStep, ...]:
    if checked is None:
        reading, normalization = "recovery puts it in place first; it is checked then", "unless it is normalized"
    else:
        from winml.modelkit.onnx.fingerprint import is_normalized
        from winml.modelkit.tags.tagging import all_nodes

        opset = checked.model.opset_imports.get("", 0)
        reading = f"{sum(1 for _ in all_nodes(checked.model))} nodes, opset {opset}"
        normalization = "the graph is normalized"
        if is_normalized(checked.model) or task.skip_normalization:
            normalization = "none: already normalized" if is_normalized(checked.model) else "left out"
    comparison = f"compared with {task.source} in ONNX Runtime" if task.verify else "not compared"
    writing = f"{task.output}: {'a copy of the source' if is_copy else comparison}"
    read, *middle, written = work.steps()
    words = {work.step_name: work.request_words}
    return (
        PlannedStep(read, f"{task.source}: {reading}"),
        *(PlannedStep(name, words.get(name, normalization)) for name in middle),
        PlannedStep(written, writing),
    )


def orphaned_data(outputs: Iterable[Path], reads: Iterable[Path]) -> tuple[Path, ...]:
    """Return the weights of models that would be replaced, which go with them unless something is made of them."""
    from winml.modelkit.onnx.files.placing import replaceable_data

    retained = {path.absolute() for path in reads}
    named = [output.with_name(name) for output in outputs if output.is_file() for name in replaceable_data(output)]
    return tuple(path for path in dict.fromkeys(named) if path.is_file() and path.absolute() not in retained)
