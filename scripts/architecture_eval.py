"""Exports a small model of every architecture of transformers, and counts the verified exports.

python scripts/architecture_eval.py [MODEL_TYPE ...] [--exporters auto,dynamo] [--jobs 2] [--output build/architectures]
python scripts/architecture_eval.py --task text-generation --output build/generation

It is a sweep: ``winml sweep scripts/plans/architectures.json`` does the same, ``generation.json`` beside it that of the
task. A run that was interrupted is resumed; ``--retry-failed`` also repeats the failed exports. ``--docs`` makes the
table in the documents from ``results.json`` instead of exporting. With ``--task``, the models are those of that task,
in place of base models, each with the inputs of the task: a cache, where it generates.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from architecture_documents import (
    EXPORTERS,
    Evaluation,
    ExporterWish,
    count_states,
    evaluation_of,
    write_documents,
)
from winml.modelkit.sweep.records import CellResult
from winml.modelkit.sweep.sweep import SweepOptions, read_results, sweep_models
from winml.modelkit.sweep.work_queue import SweepListener

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    """Evaluate, or write the documents; return 0 unless the run was interrupted."""
    options = _parse_options()
    if options.docs:
        write_documents(evaluation_of(read_results(options.output)), REPOSITORY, options.task)
        return 0
    # SIGTERM counts as an interruption: running processes end and their folders are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Set before the first process starts: every process uses one core and no network.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    requested = SweepOptions(
        seconds=options.seconds,
        resident_bytes=int(options.gigabytes * 2**30),
        jobs=options.jobs,
        keeps_files=False,
        retries_failed=options.retry_failed,
    )
    try:
        result = sweep_models(
            _plan(options), options.output, options=requested, listener=SweepListener(on_end=_show_end)
        )
    except KeyboardInterrupt:
        print(f"Interrupted; {options.output} holds what is finished. Run it again to go on.", file=sys.stderr)
        return 130
    _print_summary(evaluation_of(result), options.exporters)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="such as bert; default: all")
    parser.add_argument("--exporters", type=_parse_exporters, help="of auto, torchscript, dynamo; default: the plan's")
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


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of base models or of the task, with the model types and exporters that were named."""
    name = "architectures" if options.task is None else "generation"
    plan: dict[str, Any] = json.loads((REPOSITORY / "scripts" / "plans" / f"{name}.json").read_text(encoding="utf-8"))
    if options.model_types:
        own = {} if options.task is None else {"loader.task": options.task}
        plan["models"] = [{"model": f"random:{model_type}", "set": own} for model_type in options.model_types]
    if options.exporters:
        plan["set"]["export.exporter"] = list(options.exporters)
    return plan


def _show_end(cell: CellResult) -> None:
    print(f"{cell.model} {cell.settings.get('export.exporter', '')}: {cell.state} {cell.problem}", file=sys.stderr)


def _print_summary(evaluation: Evaluation, exporters: Sequence[ExporterWish] | None) -> None:
    architectures = list(evaluation.architectures.values())
    for exporter in exporters or EXPORTERS:
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
