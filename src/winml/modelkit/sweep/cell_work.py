"""Work of a cell: the steps of a model in a configuration. Runs in a separate process."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.builds.cache import digest, tool_versions
from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import (
    ExportError,
    InputError,
    UsageError,
    WinMLError,
    WriteError,
    error_chain,
    first_line,
    opt,
)
from winml.modelkit.file_names import BUILT_MODEL_NAME, SWEEP_LOG_NAME
from winml.modelkit.onnx.files.moving import move_file, remove_folder
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.onnx.files.output_files import FULL_DISK_ERRORS
from winml.modelkit.sweep.cells import Cell
from winml.modelkit.sweep.plan import RANDOM_PREFIX, request_of
from winml.modelkit.sweep.records import Architecture, CellResult, Measure

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest


def joined(location: str, name: str) -> str:
    """Return the path or URL of a folder below a place.

    >>> joined("s3://bucket/sweep/", "bert")
    's3://bucket/sweep/bert'
    """
    return f"{location.rstrip('/')}/{name}"


def refuse_unknown_place(location: str) -> None:
    """Refuse a URL without an installed implementation.

    Raises:
        UsageError: names the protocol of the URL.
    """
    import fsspec

    protocol = fsspec.core.split_protocol(location)[0]
    try:
        fsspec.get_filesystem_class(protocol or "file")
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{opt.artifacts} {location}: {first_line(error)}",
            hint="Install the fsspec package for it, or use a folder.",
        ) from error


def upload(folder: Path, names: Sequence[str], location: str) -> None:
    """Copy files and folders.

    Args:
        folder: Source folder.
        names: Names of files and folders in the source folder; missing names are skipped.
        location: Target folder or URL.

    Raises:
        WriteError: the target cannot be written to.
    """
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(location)
        system.makedirs(root, exist_ok=True)
        for name in names:
            files = [folder / name] if (folder / name).is_file() else sorted((folder / name).rglob("*"))
            for path in files:
                if path.is_file():
                    target = joined(root, path.relative_to(folder).as_posix())
                    system.makedirs(target.rpartition("/")[0], exist_ok=True)
                    system.put_file(str(path), target)
    except Exception as error:
        # Each protocol raises different errors.
        raise WriteError(
            f"{location}: {first_line(error)}", hint=f"Choose a different location with {opt.artifacts}."
        ) from error


PRELOAD = (
    "onnxruntime",
    "torch._dynamo",
    "torch.onnx._internal.exporter._core",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "winml.modelkit.export.exporting",
    "winml.modelkit.export.torchscript.capturing",
)
"""Modules that every export of a PyTorch model imports."""
PRELOAD_DYNAMO = (
    "torch.export._trace",
    "torch.onnx._internal.exporter._torchlib.ops",
    "winml.modelkit.export.dynamo.capturing",
    "winml.modelkit.sweep.dynamo_preload",
)
"""Additional modules that an export with dynamo imports."""

_BUILD = "build"
"""Folder of built files, in the folder of the cell."""
_SMALL_MODEL = "architecture.json"
_FULL_WORDS = tuple(os.strerror(number) for number in FULL_DISK_ERRORS)
"""Messages of C++ libraries for a full disk."""


@dataclass(frozen=True)
class CellOrder:
    """A cell, with folders and settings of the process."""

    cell: Cell
    folder: Path
    """Folder of the cell."""
    shared: Path
    """Folder of results shared by the cells of one model."""
    threads: int
    """Threads of each process, so that all processes together use each core once."""
    artifacts: str | None = None
    """Folder or URL for the files; None: the files stay in the folder of the cell."""
    keeps_files: bool = True
    directory: Path = field(default_factory=Path.cwd)
    """Working directory of the caller, to which paths of models are relative."""


def run_cell(order: CellOrder, report: Callable[[CellResult], None]) -> CellResult:
    """Run the steps of a cell, and return its result; a failure of any kind is a result.

    The process then ignores signals that end a command, and works in the directory of the caller.

    Args:
        order: The cell.
        report: Called with the preliminary result before each step.
    """
    # The parent process decides when the cell ends: Ctrl-C reaches every process of a terminal.
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):
        if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if order.directory.is_dir():
        os.chdir(order.directory)
    work = _CellWork(order, report)
    try:
        with _redirect_output(order.folder):
            work.run()
    except Exception as error:
        return work.failed(error)
    return work.result()


@contextmanager
def _redirect_output(folder: Path) -> Iterator[None]:
    """Redirect output to the log of the cell, and keep temporary files in its folder."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    with (folder / SWEEP_LOG_NAME).open("w", encoding="utf-8", newline="\n") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        try:
            yield
        finally:
            remove_folder(temporary)


@dataclass
class _CellWork:
    """The steps of a cell, and the results so far."""

    order: CellOrder
    report: Callable[[CellResult], None]
    measures: dict[str, Measure] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)
    step: str = ""
    request: ModelRequest | None = None
    """The PyTorch model; None: the model is an ONNX file already."""
    path: Path | None = None
    """The latest ONNX file."""

    def run(self) -> None:
        """Run all steps."""
        self._start_step("model")
        self._find_model()
        for name in self.order.cell.do:
            self._start_step(name)
            start = time.perf_counter()
            getattr(self, f"_run_{name}")()
            self.measures[f"{name}_seconds"] = round(time.perf_counter() - start, 3)
        if self.order.artifacts is not None:
            self._start_step("upload")
            names = [SWEEP_LOG_NAME, *([_BUILD] if self.order.keeps_files else [])]
            upload(self.order.folder, names, self.order.artifacts)

    def result(self) -> CellResult:
        """Return the result of a completed cell."""
        return replace(self._current_result(), state="done", step="", artifacts=self._artifact_location())

    def failed(self, error: Exception) -> CellResult:
        """Return the result of a cell with a failed step; an export error also notes its module and operator."""
        from winml.modelkit.sweep.architecture_export import error_line, unforeseen_line

        result = replace(self._current_result(), artifacts=self._artifact_location())
        if message := _full_disk_words(error):
            return replace(result, state="stopped", problem=f"the disk is full: {message}")
        if not isinstance(error, WinMLError):
            return replace(result, problem=unforeseen_line(error), exit_code=1)
        if isinstance(error, ExportError):
            self.details |= {"module": error.module, "operator": error.operator}
        return replace(result, problem=error_line(error), exit_code=error.exit_code, details=self.details)

    def _current_result(self) -> CellResult:
        """Return the result so far, which counts as failed until the cell is completed."""
        return replace(
            self.order.cell.result("failed"),
            measures=self.measures,
            notes=self.notes,
            details=self.details,
            step=self.step,
        )

    def _artifact_location(self) -> str:
        """Return the folder or URL of the kept files; empty if files are removed."""
        if not self.order.keeps_files:
            return ""
        return self.order.artifacts or str(self.order.folder)

    def _start_step(self, step: str) -> None:
        """Set the current step, and report the result so far."""
        self.step = step
        self.report(self._current_result())

    def _find_model(self) -> None:
        """Set the ONNX file or the PyTorch request of the cell; a small random model is made first."""
        model, work = self.order.cell.model, self.order.cell.work
        if is_onnx_path(model):
            self.path = named_path(model)
        elif model.startswith(RANDOM_PREFIX):
            config = self._small_model(model.removeprefix(RANDOM_PREFIX))
            self.request = replace(request_of(str(config), work), random_weights=True)
        else:
            self.request = request_of(model, work)

    def _small_model(self, model_type: str) -> Path:
        """Return the config of a small model of a type; made once, in a folder that all cells share.

        Raises:
            InputError: PyTorch runs no config of this type.
        """
        from winml.modelkit.sweep.architecture_export import find_small_model

        task = request_of(model_type, self.order.cell.work).task
        name = f"{model_type}{f'-{task}' if task else ''}-{digest(tool_versions())[:12]}"
        folder = self.order.shared / "models" / name
        if (description := folder / _SMALL_MODEL).is_file():
            architecture = Architecture.from_fields(json.loads(description.read_text(encoding="utf-8")))
        else:
            own_folder = self.order.folder / "tmp" / "model"
            architecture = find_small_model(model_type, own_folder, task, self._report_small_model)
            (own_folder / _SMALL_MODEL).write_text(json.dumps(asdict(architecture)), encoding="utf-8", newline="\n")
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(own_folder.iterdir(), key=lambda path: path.name == _SMALL_MODEL):
                # The description is moved last, so that its presence means completeness. All cells write equal files.
                move_file(path, folder / path.name)
        self._report_small_model(architecture)
        if not architecture.is_attempted:
            raise InputError(architecture.problem, hint="Remove it from the plan.")
        return folder / "config.json"

    def _report_small_model(self, architecture: Architecture) -> None:
        """Add the description of a small model to the details and measures, and report the result so far."""
        self.details["architecture"] = asdict(architecture)
        if architecture.parameters:
            self.measures["parameters"] = architecture.parameters
        self.report(self._current_result())

    def _run_export(self) -> None:
        """Export the model and add measures of the export; raises an error for an export that is not verified."""
        from winml.modelkit.sweep.architecture_export import tried_export

        if self.request is None:
            raise InputError(f"{self.order.cell.model}: already an ONNX file", hint=f"Remove export from {opt.do}.")
        config = self.order.cell.work.build.export
        assert config is not None  # refused with the plan
        attempt = tried_export(self.request, config, self.order.folder / "tmp" / BUILT_MODEL_NAME)
        self.details["attempt"] = asdict(attempt)
        self.measures |= {
            "exporter": attempt.exporter or None, "nodes": attempt.nodes or None, "tags": len(attempt.tags) or None,
            "coverage_percent": attempt.coverage_percent if attempt.is_verified else None,
            "relative_diff": attempt.relative_diff if attempt.is_verified else None,
            "generated_tokens": attempt.generated_tokens if attempt.cache else None,
        }  # fmt: skip
        if not attempt.is_verified:
            raise _UnsuccessfulStepError(attempt.problem, attempt.exit_code)

    def _run_build(self) -> None:
        """Build the model without evaluation, with stages shared among cells; set the file and the measures."""
        from winml.modelkit.builds.build import BuildCache, identify_plan, run_build
        from winml.modelkit.builds.plan import plan_build
        from winml.modelkit.builds.stage_walk import StageStore
        from winml.modelkit.models.request import ModelRequest
        from winml.modelkit.onnx.files.named_paths import pause_recording

        config = self.order.cell.work.build.model_copy(update={"eval": None})
        plan = plan_build(config, self.request or ModelRequest(str(self.path)))
        cache = BuildCache(identify_plan(plan), StageStore(self.order.shared))
        with pause_recording():
            result = run_build(plan, self.order.folder / _BUILD, cache=cache)
        self.notes = result.notes
        parts = result.manifest.parts
        final_stages = [next(stage for stage in reversed(part.stages) if stage.files) for part in parts]
        shares = [stage.coverage.percent for stage in final_stages if stage.coverage is not None]
        self.measures |= {
            "model_bytes": sum(file.size_bytes for part in parts for file in part.model),
            "nodes": sum(stage.nodes or 0 for stage in final_stages),
            "coverage_percent": min((share for share in shares if share is not None), default=None),
            "parts": len(parts),
        }
        self.path = result.model_path if len(parts) == 1 else None

    def _one_file(self) -> Path:
        """Return the latest ONNX file; raises InputError for a model of several parts."""
        if self.path is None:
            raise InputError(
                f"the model has several parts, but {self.step} takes one file", hint="Choose one with loader.submodel."
            )
        return self.path

    def _run_perf(self) -> None:
        """Measure the latency of the file, and add the measures."""
        from winml.modelkit.ort.opened_model import RunOptions
        from winml.modelkit.profile.latency import LatencyOptions
        from winml.modelkit.profile.perf import PerfOptions, measure_model

        section = self.order.cell.work.perf
        run = RunOptions(
            self.order.cell.model,
            sizes=section.sizes,
            ep=section.ep,
            threads=section.threads or self.order.threads,
        )
        result = measure_model(self._one_file(), PerfOptions(run, LatencyOptions(section.iterations, section.warmup)))
        summary = result.latency.summary
        self.measures |= {
            "latency_p50_ms": round(summary.p50, 4),
            "latency_p90_ms": round(summary.p90, 4),
            "samples_per_sec": round(result.samples_per_sec, 3),
            "session_creation_ms": round(result.session_creation_ms, 3),
        }

    def _run_eval(self) -> None:
        """Evaluate the file on the dataset and add its metrics; raises an error if a limit is missed."""
        from winml.modelkit.builds.evaluated_models import evaluate_build
        from winml.modelkit.evaluate.records import evaluation_words

        section = self.order.cell.work.build.eval
        assert section is not None  # refused with the plan
        result = evaluate_build(self._one_file(), section, self.request)
        self.measures |= {metric.name: metric.value for metric in result.metrics}
        self.measures |= {"agreement": result.agreement, "samples": result.data.samples}
        if not result.is_good_enough:
            raise _UnsuccessfulStepError(evaluation_words(result), 3)

    def _run_compare(self) -> None:
        """Compare the file with its source and add the measures; raises an error if no output can be compared."""
        from winml.modelkit.compare.comparing import CompareOptions, compare_models
        from winml.modelkit.ort.opened_model import RunOptions

        section = self.order.cell.work.compare
        run = RunOptions(self.order.cell.model, sizes=section.sizes, seed=section.seed)
        reference = self.request or named_path(self.order.cell.model)
        worst = compare_models(reference, self._one_file(), CompareOptions(run, draws=section.samples)).worst
        fidelity = worst.fidelity
        self.measures |= {
            "sqnr_db": round(fidelity.sqnr_db, 2),
            "relative_error": fidelity.relative_error,
            "cosine": fidelity.cosine,
            "top1_agreement": worst.top1_agreement,
        }
        if fidelity.problem:
            raise _UnsuccessfulStepError(f"output {fidelity.name}: {fidelity.problem}", 3)


class _UnsuccessfulStepError(WinMLError):
    """A step that completed without an exception, but with a negative result."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # of the verb that does this alone


def _full_disk_words(error: BaseException | None) -> str:
    """Return the system's message for a full disk if an error was caused by a full disk; else empty."""
    for link in error_chain(error):
        number = getattr(link, "errno", None)
        if isinstance(number, int) and number in FULL_DISK_ERRORS:
            return os.strerror(number)
        if text := next((message for message in _FULL_WORDS if message in str(link)), ""):
            return text
    return ""
