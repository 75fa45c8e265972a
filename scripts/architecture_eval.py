"""Exports a small model of every architecture of transformers, and counts the verified exports.

python scripts/architecture_eval.py [MODEL_TYPE ...] [--exporters auto,dynamo] [--jobs 2] [--output build/architectures]
python scripts/architecture_eval.py --task text-generation --output build/generation

Each export has a process of its own, with a bound on time and memory. A run that was interrupted is resumed;
``--retry-failed`` also repeats the failed exports. Writes ``results.json`` and ``results.html`` into the output
folder; ``--docs`` makes the table in the documents from ``results.json`` instead of exporting. With ``--task``, the
models are those of that task, in place of base models, each with the inputs of the task: a cache, where it generates.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from architecture_documents import write_documents
from winml.modelkit.report.architecture_page import results_page
from winml.modelkit.results.architecture_evaluation import (
    AUTO,
    EXPORTERS,
    Architecture,
    Attempt,
    Evaluation,
    ExporterWish,
    count_states,
)
from winml.modelkit.sweep.bounded_processes import Bounds, Call, Ending, run_bounded

if TYPE_CHECKING:
    from winml.modelkit.sweep.architecture_export import ExportOrder

REPOSITORY = Path(__file__).resolve().parents[1]
KILLED = -9
"""Exit code of a killed process. Specified: the negative number of the signal, as in ``subprocess``."""
LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def main() -> int:
    """Evaluate, or write the documents; return 0 unless the run was interrupted."""
    options = _parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    evaluation = Evaluation.open(options.output / "results.json")
    if options.docs:
        write_documents(evaluation, REPOSITORY, options.task)
        return 0
    # SIGTERM counts as an interruption: running processes end and their folders are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Set before the first process starts: each uses one core, and no process uses the network.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    evaluation.versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    evaluation.bounds = {"seconds": options.seconds, "gigabytes": options.gigabytes}
    model_types = options.model_types or _all_model_types(options.task)
    console = Console(stderr=True)
    try:
        for exporter in options.exporters:
            _evaluate_exporter(evaluation, model_types, exporter, options, console)
    except KeyboardInterrupt:
        console.print(f"Interrupted; {evaluation.path} holds what is finished. Run it again to go on.")
        return 130
    _print_summary(evaluation, model_types, options.exporters)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="such as bert; default: all")
    parser.add_argument("--exporters", type=_parse_exporters, default=(AUTO,), help="of auto, torchscript, dynamo")
    parser.add_argument("--task", choices=("text-generation",), help="default: base models")
    parser.add_argument("--output", type=Path, default=Path("build", "architectures"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="exports at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="time bound of one export")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory bound of one export")
    parser.add_argument("--retry-failed", action="store_true", help="ask again for what did not work")
    parser.add_argument("--docs", action="store_true", help="write docs/reference/architectures.md and end")
    return parser.parse_args()


def _parse_exporters(text: str) -> tuple[ExporterWish, ...]:
    names = text.split(",")
    if unknown := set(names) - set(EXPORTERS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(EXPORTERS)}")
    return tuple(name for name in EXPORTERS if name in names)


def _all_model_types(task: str | None) -> list[str]:
    """Return every model type with a base model, or with a model of the task."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_MAPPING_NAMES if task is None else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(names)


def _evaluate_exporter(
    evaluation: Evaluation,
    model_types: Sequence[str],
    exporter: ExporterWish,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Export the unfinished model types with one exporter; each result is saved when it is there."""
    unfinished = evaluation.unfinished_model_types(model_types, exporter, retry_failed=options.retry_failed)
    unfinished = [name for name in unfinished if not _derive_attempt(evaluation, name, exporter)]
    evaluation.save()
    bounds = Bounds(options.seconds, int(options.gigabytes * 2**30))
    from winml.modelkit.sweep.architecture_export import PRELOAD, export_architecture

    with (
        tempfile.TemporaryDirectory(prefix="winml-architectures-") as scratch,
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress,
    ):
        bar = progress.add_task(exporter, total=len(unfinished))
        previous = {} if options.retry_failed else evaluation.architectures
        orders = _export_orders(previous, unfinished, exporter, Path(scratch))
        calls = (Call(export_architecture, replace(order, task=options.task)) for order in orders)
        for ending in run_bounded(calls, bounds, options.jobs, PRELOAD):
            architecture = _finished_architecture(ending, bounds)
            _save_architecture(evaluation, architecture)
            shutil.rmtree(ending.call.argument.folder, ignore_errors=True)
            progress.update(bar, advance=1, description=f"{exporter}: {architecture.model_type}")
    _write_page(evaluation)


def _derive_attempt(evaluation: Evaluation, model_type: str, exporter: ExporterWish) -> bool:
    """Derive the attempt of an exporter from that of ``auto`` where both would be equal; return whether it did."""
    architecture = evaluation.architectures.get(model_type)
    automatic = architecture.attempts.get(AUTO) if architecture else None
    if architecture is None or automatic is None or not automatic.is_verified:
        return False
    if automatic.exporter == exporter:
        evaluation.architectures[model_type] = architecture.with_attempt(exporter, automatic)
        return True
    if exporter == "torchscript" and automatic.note:
        # ``auto`` tries TorchScript first on models of this size.
        passed_over = Attempt(is_verified=False, exporter=exporter, problem=automatic.note, exit_code=1)
        evaluation.architectures[model_type] = architecture.with_attempt(exporter, passed_over)
        return True
    return False


def _export_orders(
    architectures: Mapping[str, Architecture], model_types: Sequence[str], exporter: ExporterWish, scratch: Path
) -> Iterator[ExportOrder]:
    """Yield one export per model type; with an earlier result the config search is skipped."""
    from winml.modelkit.sweep.architecture_export import ExportOrder

    for model_type in model_types:
        previous = architectures.get(model_type)
        if previous is not None and not previous.is_attempted:
            previous = None
        yield ExportOrder(model_type, exporter, scratch / model_type, previous)


def _finished_architecture(ending: Ending, bounds: Bounds) -> Architecture:
    """Return the result of a model type whose process ended, also where it was killed or died."""
    order = ending.call.argument
    if ending.reason == "returned":
        architecture: Architecture = ending.result
        attempt = architecture.attempts.get(order.exporter)
        if attempt is None:
            return architecture
        return architecture.with_attempt(order.exporter, replace(attempt, peak_bytes=ending.peak_bytes))
    problem = {
        "time": f"took more than {bounds.seconds:.0f} s",
        "memory": f"took more than {bounds.resident_bytes / 2**30:.1f} GiB",
        "died": "the process died",
    }[ending.reason]
    architecture = ending.last_message or Architecture(order.model_type, state_before="not built")
    if not architecture.is_attempted:
        return replace(architecture, problem=problem)
    seconds = round(ending.seconds, 2)
    attempt = Attempt(
        is_verified=False, problem=problem, exit_code=KILLED, seconds=seconds, peak_bytes=ending.peak_bytes
    )
    return architecture.with_attempt(order.exporter, attempt)


def _save_architecture(evaluation: Evaluation, architecture: Architecture) -> None:
    evaluation.architectures[architecture.model_type] = architecture
    evaluation.save()


def _write_page(evaluation: Evaluation) -> None:
    page = evaluation.path.with_suffix(".html")
    page.write_text(results_page(evaluation), encoding="utf-8", newline="\n")


def _print_summary(evaluation: Evaluation, model_types: Sequence[str], exporters: Sequence[ExporterWish]) -> None:
    architectures = [evaluation.architectures[name] for name in model_types]
    for exporter in exporters:
        counts = count_states(architectures, exporter)
        attempted = counts["exported"] + counts["failed"]
        share = f"{100 * counts['exported'] / attempted:.1f} %" if attempted else "none"
        print(
            f"{exporter}: {counts['exported']} of {attempted} attempted exported and verified ({share}); "
            f"{counts['not run']} not run by PyTorch on the inputs decided for them, {counts['not built']} not built"
        )
    if differing := [item.model_type for item in architectures if item.tags_differ()]:
        print(f"tags differ between exporters: {', '.join(differing)}")


if __name__ == "__main__":
    sys.exit(main())
