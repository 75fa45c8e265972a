"""Writes docs/reference/benchmarks.md from the saved results below benchmarks/results.

python scripts/benchmark_page.py [--check]
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from written_document import write_or_check

REPOSITORY = Path(__file__).resolve().parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
TARGET = REPOSITORY / "docs" / "reference" / "benchmarks.md"
HEAD = """# Benchmarks

Saved results of the benchmarks, each with its machine, date and command. Written by `scripts/benchmark_page.py` from
`benchmarks/results`; a benchmark writes its result there with `--save`. How each one measures, and results that were
written by hand: [benchmark notes](../../benchmarks/README.md).

*Load at the start* is the load average of the minute before. If it is well above 0, other processes were running, and
absolute times are approximate.
"""
_LONGEST_LINE = 150


def benchmark_page(results: list[dict[str, Any]]) -> str:
    """Return the page: a section for each result, in the order of benchmark and case."""
    ordered = sorted(results, key=lambda result: (result["benchmark"], result["case"]))
    return "\n".join([HEAD, *(line for result in ordered for line in _section(result))])


def _section(result: dict[str, Any]) -> Iterator[str]:
    name, machine = result["benchmark"], result["machine"]
    yield f"## {name}{': ' if result['case'] else ''}{result['case'].replace('-', ' ')}\n"
    yield f"{_question(name)}\n"
    yield from result["table"]
    yield ""
    cores, gigabytes = machine["cores"], machine["memory_bytes"] / 1e9
    yield f"* Machine: {machine['processor']}, {cores} cores, {gigabytes:.0f} GB of memory, {machine['system']}"
    load = result["load_at_start"]
    yield f"* Date: {result['date']}, load at the start {'not known' if load is None else format(load, '.2f')}"
    yield f"* Versions: {', '.join(f'{library} {version}' for library, version in result['versions'].items())}\n"
    yield "<!-- not run: a benchmark takes minutes -->"
    yield f"```sh\n{_folded(result['command'])}\n```\n"


def _question(benchmark: str) -> str:
    """Return the first line of the docstring of a benchmark, code in single backticks."""
    tree = ast.parse((BENCHMARKS / f"{benchmark}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0].replace("``", "`")


def _folded(command: str) -> str:
    """Return a command whose lines are not longer than the limit."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) > _LONGEST_LINE - 3:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def saved_results() -> list[dict[str, Any]]:
    """Return every committed result."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((BENCHMARKS / "results").glob("*.json"))]


if __name__ == "__main__":
    write_or_check(TARGET, benchmark_page(saved_results()))
