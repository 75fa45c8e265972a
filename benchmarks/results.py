"""Output of a benchmark: one line of JSON on the console; with ``--save``, a file below ``results``.

A saved result states its circumstances: command, date, machine, versions, and the load at the start. It is
committed, and ``scripts/benchmark_page.py`` renders all of them as docs/reference/benchmarks.md. At import only the
standard library is loaded, since benchmarks measure processes that import this file.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"
LOAD_AT_START = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
"""Load average of the last minute before this benchmark computes anything; Windows has none."""
VERSIONS = ("winml-modelkit", "python", "torch", "transformers", "onnxruntime")


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--save`` to the options of a benchmark."""
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results, for the docs")


def markdown_table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table; the keys of the first row are its columns."""
    columns = list(rows[0])
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in rows),
    ]


def publish(options: argparse.Namespace, record: dict[str, object], table: list[str], case: str = "") -> None:
    """Print a record as one line of JSON; with ``--save``, write it to a file that replaces the earlier result.

    Args:
        options: The parsed command line, with ``save``.
        record: Everything that was measured.
        table: The result as lines of Markdown.
        case: What distinguishes this result from others of the same benchmark.
    """
    print(json.dumps(record))
    if not options.save:
        return
    from winml.modelkit.ort.machine import look_at_machine

    benchmark, machine = Path(sys.argv[0]).stem, look_at_machine()
    result = {
        "benchmark": benchmark,
        "case": case,
        "command": shlex.join(["python", f"benchmarks/{benchmark}.py", *map(_without_path, sys.argv[1:])]),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "load_at_start": LOAD_AT_START,
        "machine": {
            "processor": machine.processor,
            "cores": machine.usable_cores or machine.logical_cores,
            "memory_bytes": machine.total_bytes,
            "system": machine.system.partition(", kernel")[0],
        },
        "versions": {name: machine.versions.get(name) for name in VERSIONS},
        "table": table,
        "record": record,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{'-'.join(part for part in (benchmark, case) if part)}.json"
    path.write_text(f"{json.dumps(result, indent=1, ensure_ascii=False)}\n", encoding="utf-8", newline="\n")
    print(f"saved {path.relative_to(FOLDER.parent.parent)}; render the page: python scripts/benchmark_page.py")


def _without_path(argument: str) -> str:
    """Return an argument with a local absolute path replaced by ``PATH``."""
    name, separator, value = argument.rpartition("=")
    return f"{name}{separator}PATH" if Path(value).is_absolute() else argument
