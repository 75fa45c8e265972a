"""Exports small models of every architecture transformers has, and tells how many come out right.

python scripts/architecture_eval.py [MODEL_TYPE ...] [--exporters auto,dynamo] [--jobs 2] [--output build/architectures]

Each export has a process of its own, with a bound on time and memory. A run that was interrupted is taken up again;
``--retry-failed`` asks once more for what did not work. Writes ``results.json`` and ``results.html`` into the output
folder; ``--docs`` makes the table in the documents from ``results.json`` instead of exporting.
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

REPOSITORY = Path(__file__).resolve().parents[1]
KILLED = -9
"""Exit code of what was stopped; specified: the number of the signal, negative as ``subprocess`` writes it."""
LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def main() -> int:
    """Evaluate, or write the documents; exit code 0 if everything that was asked for is done."""
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    evaluation = Evaluation.open(options.output / "results.json")
    if options.docs:
        write_documents(evaluation, REPOSITORY)
        return 0
    # A stop asked for politely is an interruption, too: what runs is ended and its folders are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Before the first process starts: each has one core, and nothing is fetched.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    evaluation.versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    evaluation.bounds = {"seconds": options.seconds, "gigabytes": options.gigabytes}
    model_types = options.model_types or _all_model_types()
    console = Console(stderr=True)
    try:
        for exporter in options.exporters:
            _evaluate(evaluation, model_types, exporter, options, console)
    except KeyboardInterrupt:
        console.print(f"Interrupted; {evaluation.path} holds what is finished. Run it again to go on.")
        return 130
    _print_summary(evaluation, model_types, options.exporters)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="such as bert; default: all")
    parser.add_argument("--exporters", type=_exporters, default=(AUTO,), help="of auto, torchscript, dynamo")
    parser.add_argument("--output", type=Path, default=Path("build", "architectures"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="exports at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="time bound of one export")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory bound of one export")
    parser.add_argument("--retry-failed", action="store_true", help="ask again for what did not work")
    parser.add_argument("--docs", action="store_true", help="write docs/reference/architectures.md and end")
    return parser.parse_args()


def _exporters(text: str) -> tuple[ExporterWish, ...]:
    wanted = text.split(",")
    if unknown := set(wanted) - set(EXPORTERS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(EXPORTERS)}")
    return tuple(name for name in EXPORTERS if name in wanted)


def _all_model_types() -> list[str]:
    """Return every model type with a base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def _evaluate(
    evaluation: Evaluation,
    model_types: Sequence[str],
    exporter: ExporterWish,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Ask one exporter for every model type it was not asked for yet; the results are kept as they come."""
    missing = evaluation.missing(model_types, exporter, retry_failed=options.retry_failed)
    missing = [name for name in missing if not _derive(evaluation, name, exporter)]
    evaluation.save()
    bounds = Bounds(options.seconds, int(options.gigabytes * 2**30))
    with (
        tempfile.TemporaryDirectory(prefix="winml-architectures-") as scratch,
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress,
    ):
        bar = progress.add_task(exporter, total=len(missing))
        known = {} if options.retry_failed else evaluation.architectures
        calls = _calls(known, missing, exporter, Path(scratch))
        from winml.modelkit.sweep.architecture_export import PRELOAD

        for ending in run_bounded(calls, bounds, options.jobs, PRELOAD):
            architecture = _finished(ending, bounds)
            _keep(evaluation, architecture)
            shutil.rmtree(ending.call.argument.folder, ignore_errors=True)
            progress.update(bar, advance=1, description=f"{exporter}: {architecture.model_type}")
    _write_page(evaluation)


def _derive(evaluation: Evaluation, model_type: str, exporter: ExporterWish) -> bool:
    """Take what ``auto`` found out about an exporter, in place of doing the same again; say whether it did."""
    known = evaluation.architectures.get(model_type)
    automatic = known.attempts.get(AUTO) if known else None
    if known is None or automatic is None or not automatic.is_verified:
        return False
    if automatic.exporter == exporter:
        evaluation.architectures[model_type] = known.with_attempt(exporter, automatic)
        return True
    if exporter == "torchscript" and automatic.note:
        # It is always the first to be tried on models of this size.
        passed_over = Attempt(is_verified=False, exporter=exporter, problem=automatic.note, exit_code=1)
        evaluation.architectures[model_type] = known.with_attempt(exporter, passed_over)
        return True
    return False


def _calls(
    architectures: Mapping[str, Architecture], model_types: Sequence[str], exporter: ExporterWish, scratch: Path
) -> Iterator[Call]:
    """Yield an export of each model type; with what is known of one its config is not looked for again."""
    from winml.modelkit.sweep.architecture_export import ExportOrder, carry_out

    for model_type in model_types:
        known = architectures.get(model_type)
        if known is not None and not known.is_attempted:
            known = None
        yield Call(carry_out, ExportOrder(model_type, exporter, scratch / model_type, known))


def _finished(ending: Ending, bounds: Bounds) -> Architecture:
    """Return what is known of a model type now that its process ended, one way or another."""
    order = ending.call.argument
    if ending.reason == "returned":
        known: Architecture = ending.result
        attempt = known.attempts.get(order.exporter)
        if attempt is None:
            return known
        return known.with_attempt(order.exporter, replace(attempt, peak_bytes=ending.peak_bytes))
    problem = {
        "time": f"took more than {bounds.seconds:.0f} s",
        "memory": f"took more than {bounds.resident_bytes / 2**30:.1f} GiB",
        "died": "the process died",
    }[ending.reason]
    known = ending.said_last or Architecture(order.model_type, state_before="not built")
    if not known.is_attempted:
        return replace(known, problem=problem)
    seconds = round(ending.seconds, 2)
    attempt = Attempt(
        is_verified=False, problem=problem, exit_code=KILLED, seconds=seconds, peak_bytes=ending.peak_bytes
    )
    return known.with_attempt(order.exporter, attempt)


def _keep(evaluation: Evaluation, architecture: Architecture) -> None:
    evaluation.architectures[architecture.model_type] = architecture
    evaluation.save()


def _write_page(evaluation: Evaluation) -> None:
    page = evaluation.path.with_suffix(".html")
    page.write_text(results_page(evaluation), encoding="utf-8", newline="\n")


def _print_summary(evaluation: Evaluation, model_types: Sequence[str], exporters: Sequence[ExporterWish]) -> None:
    asked = [evaluation.architectures[name] for name in model_types]
    for exporter in exporters:
        counts = count_states(asked, exporter)
        attempted = counts["exported"] + counts["failed"]
        share = f"{100 * counts['exported'] / attempted:.1f} %" if attempted else "none"
        print(
            f"{exporter}: {counts['exported']} of {attempted} attempted exported and verified ({share}); "
            f"{counts['not run']} not run by PyTorch on the inputs decided for them, {counts['not built']} not built"
        )
    if differing := [item.model_type for item in asked if item.tags_differ()]:
        print(f"tags differ between exporters: {', '.join(differing)}")


if __name__ == "__main__":
    sys.exit(main())
