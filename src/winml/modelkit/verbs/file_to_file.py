"""Plan and run of commands that transform a file, or a build folder part by part.

The specific work of a command is its :class:`FileRequest`. Only the standard library is imported until options and
paths of a request are checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from winml.modelkit.errors import ConfigError, MissingOutputError, ModelPathError, UsageError, opt
from winml.modelkit.fields import MODEL, OUTPUT, VERIFICATION, declare
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, MODEL_SUFFIX, ONLY_PART
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep, interruptions_beside, planned_data, planned_file
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    import onnx_ir as ir

    from winml.modelkit.builds.found_models import ModelFolder
    from winml.modelkit.onnx.files.output_files import OutputFiles
    from winml.modelkit.options import Options
    from winml.modelkit.progress import OnStep
    from winml.modelkit.transform.graph_file import CheckedSource, FileWork, GraphFileTask
    from winml.modelkit.transform.records import RecordT, TransformedFolder
else:
    RecordT = TypeVar("RecordT")

OptionsT = TypeVar("OptionsT", bound="Options")

EXTERNAL_FROM_BYTES = 256
"""Specified by onnx_ir: size of the smallest weight that is stored externally."""


def read_sizes(text: str) -> dict[str, int]:
    """Return name or key of a dimension → size, read from JSON text or a JSON file. Names are defined by the ONNX file.

    Raises:
        ConfigError: the JSON is malformed, or a size is no positive whole number.
    """
    from winml.modelkit.options import read_json

    value, source = read_json(text, opt.shape_config)
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
class FileRequest(ABC, Generic[OptionsT, RecordT]):
    """Request of a command that transforms a file; each command derives its own request and defines the work."""

    verb: ClassVar[str]
    section: ClassVar[str]
    """Section of a build config that holds the options."""
    declaring: ClassVar[type]
    """The dataclass that declares the options."""

    options: OptionsT
    """Options of the work on the graph."""
    model: Path | None = declare(None, MODEL, short="-m", is_common=True, is_also_argument=True)
    """ONNX file or build folder. It is not modified. A file on the Hub is OWNER/NAME/PATH.onnx."""
    submodel: tuple[str, ...] = declare((), MODEL, metavar="PART", default_words="all")
    """Part of a folder with several parts, such as decoder."""
    freeze_inputs: bool = declare(False, MODEL)
    """Turn inputs that have a default value into constants, for a file whose weights are inputs."""
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
        """Return the options of a build config section as JSON values, and a note or an empty text."""
        return section.model_dump(mode="json", exclude_none=True), ""

    @classmethod
    def of_command(
        cls, section: Mapping[str, Any], options: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> FileRequest[OptionsT, RecordT]:
        """Return the request of a command line.

        Args:
            section: Options of the config.
            options: Options of the command line, which take precedence.
            fields: Other fields of the request.

        Raises:
            ConfigError: a value is wrong.
        """
        from winml.modelkit.options import parse_options

        return cls(options=parse_options(cls.options_record(), {**section, **options}, "options"), **fields)

    def refuse_options(self) -> None:
        """Refuse invalid options before paths are checked.

        Raises:
            UsageError: an option is invalid; the message names it.
        """

    def default_output(self, model: Path) -> Path | None:  # noqa: ARG002  # other verbs look at it
        """Return the output path if no output is specified; `None` if an output is required."""
        return None

    def task(self, source: Path, output: Path, folder: ModelFolder | None = None) -> GraphFileTask:
        """Return paths and settings for one file; ``folder`` is the build folder with the file, if any."""
        from winml.modelkit.transform.graph_file import GraphFileTask

        of_several = folder is not None and len(folder.chosen) > 1
        return GraphFileTask(
            source,
            output,
            overwrite=self.overwrite,
            verify=self.verify,
            seed=self.seed,
            of_several=of_several,
            freeze_inputs=self.freeze_inputs,
        )

    @abstractmethod
    def work(self, task: GraphFileTask, options: OptionsT) -> FileWork[Any, RecordT]:
        """Return the work on the graph.

        Args:
            task: Paths and settings.
            options: Options of the part.

        Raises:
            UsageError: the options do not fit any graph.
        """

    def data_condition(self, task: GraphFileTask) -> str | None:
        """Return the condition in words under which data files are written beside the model; `None` if never."""
        if task.external_data is False:
            return None
        if task.external_data:
            return f"a weight takes {size_words(EXTERNAL_FROM_BYTES)} or more"
        if task.external_from_bytes is not None:
            return f"the weights take {size_words(task.external_from_bytes)} or more"
        return "the weights do not fit into the model"

    def find_source(self) -> ModelFolder | Path:
        """Return the specified file, existing or not, or the build folder; a file on the Hub is fetched.

        Raises:
            UsageError: no model is specified, or the folder lacks a specified part.
            ModelPathError: the folder contains no ONNX model.
            HubError: the file cannot be fetched.
        """
        model = self.model
        if model is None:
            raise UsageError("no model is specified", hint="Specify an ONNX file or a build folder.")
        if model.is_dir():
            from winml.modelkit.builds.found_models import read_model_folder

            return read_model_folder(model, self.submodel)
        if self.submodel:
            raise UsageError(
                f"{opt.submodel} {self.submodel[0]} requires a build folder, and {model} is not one",
                hint="Omit it.",
            )
        if model.suffix.lower() != MODEL_SUFFIX or (model.exists() and not model.is_symlink()):
            return model
        from winml.modelkit.builds.found_models import readable_file

        return readable_file(model)

    def plan(self) -> FilePlan[RecordT]:
        """Plan the transformation of a file or a build folder. Writes nothing.

        Raises:
            UsageError: an option or a path is wrong, an output exists, or a selector names no module.
            InputError: a file is no valid ONNX model, or its data is missing.
            WriteError: the output cannot be written.
        """
        self.refuse_options()
        source = self.find_source()
        if isinstance(source, Path):
            if source == self.model:
                return self.plan_file()
            # A fetched file: without -o, the output is in the current folder, not in the cache.
            return replace(self, model=source, output=self.output or self.default_output(Path(source.name))).plan_file()
        if self.output is None or self.output.suffix.lower() != ".onnx":
            return self._plan_folder(source)
        model = source.only_part(f"-o {self.output} is one file")
        return replace(self, model=model, submodel=()).plan_file()

    def run(self, on_step: OnStep | None = None) -> RecordT:
        """Plan and transform, for a Python caller; the result for a build folder is the record of the folder.

        Raises:
            WinMLError: as :meth:`plan` and the run of the plan raise.
        """
        return cast("RecordT", self.plan().run(on_step))

    def plan_file(self) -> FilePlan[RecordT]:
        """Plan the transformation of one file; raises as :meth:`plan` does."""
        from winml.modelkit.onnx.files.output_files import ExportPaths, is_waiting, refuse_inputs

        assert self.model is not None
        model, (output, notes) = self.model, self._output_path(self.model)
        paths = ExportPaths.for_output(output, with_sidecar=False, with_report=False)
        refuse_inputs([paths.model], [model])
        paths.refuse_existing(overwrite=self.overwrite)
        is_recovered = is_waiting(model, [output])
        if not model.is_file() and not is_recovered:
            raise ModelPathError(f"{model}: no such file", hint="Pass the path of an ONNX file.")
        part = self._plan_part(self.task(model, output), self.options, is_recovered=is_recovered)
        reads = (model, *(part.checked.data if part.checked is not None else ()))
        return FilePlan(
            verb=self.verb,
            reads=reads,
            writes=part.files,
            steps=part.steps,
            notes=notes,
            removes=orphaned_data([output], reads),
            interrupted=interruptions_beside([output]),
            parts={ONLY_PART: part},
        )

    def _plan_folder(self, build: ModelFolder) -> FilePlan[RecordT]:
        """Plan the transformation of the parts of a build folder; raises as :meth:`plan` does."""
        from winml.modelkit.builds.folder_transformation import options_by_part, refuse_folder_outputs
        from winml.modelkit.onnx.files.placing import external_files

        folder, notes = self._output_path(build.path)
        refuse_folder_outputs(build, folder, overwrite=self.overwrite)
        part_options = options_by_part(build, self.options)
        parts: dict[str, _PlannedPart[RecordT]] = {}
        files: list[PlannedFile] = []
        steps: list[PlannedStep] = []
        reads = [*build.companions.values()]
        for part, source in build.parts.items():
            output = folder / build.name_of(part)
            reads += [source, *external_files(source)]
            if part not in part_options:
                steps.append(PlannedStep(f"{part}: copying", "as it is"))
                files += [planned_file(output), *([planned_data(output)] if external_files(source) else [])]
                continue
            parts[part] = part_plan = self._plan_part(self.task(source, output, build), part_options[part])
            prefix = f"{part}: " if len(build.parts) > 1 else ""
            steps += [replace(step, name=f"{prefix}{step.name}") for step in part_plan.steps]
            files += part_plan.files
        files += [planned_file(folder / name) for name in (*build.companions, BUILD_MANIFEST_NAME)]
        models = [folder / build.name_of(part) for part in build.parts]
        return FilePlan(
            verb=self.verb,
            reads=tuple(reads),
            writes=tuple(files),
            steps=tuple(steps),
            notes=notes,
            removes=orphaned_data(models, reads),
            interrupted=interruptions_beside([*models, folder / BUILD_MANIFEST_NAME]),
            parts=parts,
            folder=build,
            output=folder,
            overwrite=self.overwrite,
        )

    def _output_path(self, model: Path) -> tuple[Path, tuple[str, ...]]:
        """Return the output path, and a note if it is the default; raises UsageError without any output path."""
        if self.output is not None:
            return self.output, ()
        output = self.default_output(model)
        if output is None:
            raise MissingOutputError("no output is specified", hint="Specify the file or folder to write with -o.")
        return output, (f"Without -o, the output is {output}.",)

    def _plan_part(
        self, task: GraphFileTask, options: OptionsT, *, is_recovered: bool = False
    ) -> _PlannedPart[RecordT]:
        """Plan one file: check the source, and list the files to write and the steps."""
        from winml.modelkit.transform.graph_file import check_source, may_be_copy

        work = self.work(task, options)
        checked = None if is_recovered else check_source(task, work)
        is_copy = False
        condition = self.data_condition(task)
        if checked is not None and not work.may_be_requested and task.functions is None and may_be_copy(task, checked):
            is_copy, condition = True, "" if checked.data else None
        data = () if condition is None else (planned_data(task.output, only_if=condition),)
        steps = _plan_steps(task, work, checked, is_copy=is_copy)
        return _PlannedPart(task, work, checked, (planned_file(task.output), *data), steps)


@dataclass(frozen=True, kw_only=True)
class WeightsRequest(FileRequest[OptionsT, RecordT]):
    """Request of a command with an option for external weights."""

    external_data: bool | None = declare(None, OUTPUT, default_words="external if they are large, which loads faster")
    """Store the weights in an external data file, or inside the ONNX file."""

    def task(self, source: Path, output: Path, folder: ModelFolder | None = None) -> GraphFileTask:
        """Return the paths and settings, including the storage of weights."""
        from winml.modelkit.transform.graph_file import EXTERNAL_BYTES

        task = super().task(source, output, folder)
        return replace(task, external_data=self.external_data, external_from_bytes=EXTERNAL_BYTES)


@dataclass(frozen=True)
class _PlannedPart(Generic[RecordT]):
    """Planned transformation of one file."""

    task: GraphFileTask
    work: FileWork[Any, RecordT]
    checked: CheckedSource | None
    """The source as read for the plan; `None` if recovery replaces the file first, and a run checks the new file."""
    files: tuple[PlannedFile, ...]
    steps: tuple[PlannedStep, ...]

    def read_plain(self) -> ir.Model:
        """Read and normalize the source."""
        from winml.modelkit.transform.graph_file import read_plain

        model, _ = read_plain(self.task.source, folds_constants=self.work.folds_constants)
        return model


@dataclass(frozen=True, kw_only=True)
class FilePlan(Plan, Generic[RecordT]):
    """Plan of a command that transforms a file or a build folder."""

    parts: Mapping[str, _PlannedPart[RecordT]]
    """Name of a part → its planned transformation; a single file is one part."""
    folder: ModelFolder | None = None
    """The build folder with the parts; `None` for a single file."""
    output: Path = Path()
    """The folder to write; unused for a single file."""
    overwrite: bool = False

    def refuse_unrun(self) -> None:
        """Refuse graphs that a run would refuse after normalization, for a dry run.

        Raises:
            WinMLError: as :meth:`run` raises before a model runs.
        """
        for part in self.parts.values():
            if part.checked is not None:
                part.work.refuse_plain(part.read_plain)

    def run(self, on_step: OnStep | None = None) -> RecordT | TransformedFolder[RecordT]:
        """Execute the plan: recover partial results of killed commands, then write the file or the folder.

        Raises:
            WinMLError: the work failed, or the outputs differ from those of the source; nothing was written.
        """
        folder = self.folder
        if folder is None:
            return self.run_file(on_step)
        from winml.modelkit.builds.folder_transformation import transform_folder
        from winml.modelkit.transform.graph_file import make_file

        self.recover()

        def work_on_part(name: str, files: OutputFiles) -> RecordT:
            part, listener = self.parts[name], on_step
            if on_step is not None and len(folder.parts) > 1:
                listener = lambda event: on_step(replace(event, name=f"{name}: {event.name}"))  # noqa: E731
            return make_file(replace(part.task, transaction=files), part.work, listener, part.checked)

        return transform_folder(folder, self.output, self.parts, work_on_part, overwrite=self.overwrite)

    def run_file(self, on_step: OnStep | None = None) -> RecordT:
        """Execute the plan of one file; raises as :meth:`run` does."""
        from winml.modelkit.transform.graph_file import make_file

        self.recover()
        part = self.parts[ONLY_PART]
        return make_file(part.task, part.work, on_step, part.checked)


def _plan_steps(
    task: GraphFileTask, work: FileWork[Any, Any], checked: CheckedSource | None, *, is_copy: bool
) -> tuple[PlannedStep, ...]:
    """Return the steps for one file, each with its details."""
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
    read_step, *middle, write_step = work.steps()
    details = {work.step_name: work.request_words}
    return (
        PlannedStep(read_step, f"{task.source}: {reading}"),
        *(PlannedStep(name, details.get(name, normalization)) for name in middle),
        PlannedStep(write_step, writing),
    )


def orphaned_data(outputs: Iterable[Path], reads: Iterable[Path]) -> tuple[Path, ...]:
    """Return the data files of replaced models that become unreferenced; data files that are read are kept."""
    from winml.modelkit.onnx.files.placing import replaceable_data

    inputs = {path.absolute() for path in reads}
    data_files = [output.with_name(name) for output in outputs if output.is_file() for name in replaceable_data(output)]
    return tuple(path for path in dict.fromkeys(data_files) if path.is_file() and path.absolute() not in inputs)
