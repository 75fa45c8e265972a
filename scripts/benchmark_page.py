"""Writes docs/reference/benchmarks.md from the saved results below benchmarks/results.

The page first answers how much smaller and faster a model becomes, and at which quality; then come the saved results.

    python scripts/benchmark_page.py [--check]
"""

from __future__ import annotations

import ast
import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from written_document import write_or_check

REPOSITORY = Path(__file__).resolve().parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
TARGET = REPOSITORY / "docs" / "reference" / "benchmarks.md"
HEAD = """# Benchmarks

How much smaller and faster does a model become, at which quality? And how long does it take to make the files? First
the answers by model and target, then [how to read them](#how-to-read-the-numbers) and every
[saved result](#saved-results) with its machine, date and command.
**Bold** is what falls short: slower than what it is compared with, or an SQNR below 20 dB.
"""
READING = """## How to read the numbers

* *SQNR* is the ratio of the signal to the error of the worst output, in dB. At 20 dB, the RMS error is a tenth of the
  RMS of the output; each 6 dB halve it. An int8 file whose SQNR is low can still rank and classify as before: measure
  it with `winml eval` on your data.
* *Time* is relative to the plain export (below 1 is faster): the median of runs in alternation, in computing time,
  which depends little on what else the machine does.
* *Random weights*: size and time are those of a trained model. The SQNR is not: layers with random weights, above all
  of a ResNet or a deep decoder, enlarge each rounding error.
* The *simulated NPU* is Qualcomm's for x86-64. It shows the outputs of the device, not its speed.
* How each benchmark measures, and results that were written by hand: [benchmark notes](../../benchmarks/README.md).

## Saved results

Written by `scripts/benchmark_page.py` from `benchmarks/results`; a benchmark writes its result there with `--save`.
*Load at the start* is the load average of the minute before. If it is well above 0, other processes were running, and
absolute times are approximate.
"""
_LOW_SQNR_DB = 20.0
"""Below it, an SQNR is bold: the RMS error is more than a tenth of the signal. A rule of the page, not of winml."""
_REAL_WEIGHTS = ("minilm",)
_NPU_PRECISIONS = ("fp16", "w8a16", "mixed", "w8a8", "w4a16")
_LONGEST_LINE = 150


def benchmark_page(results: list[dict[str, Any]]) -> str:
    """Return the page: a section for each result, in the order of benchmark and case."""
    ordered = sorted(results, key=lambda result: (result["benchmark"], result["case"]))
    answers = [line for answer in (_on_cpu, _on_npu, _generation, _export) for line in answer(ordered)]
    return "\n".join([HEAD, *answers, READING, *(line for result in ordered for line in _section(result))])


def _on_cpu(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield size, time and quality of each variant on the CPU."""
    rows = []
    for result in sorted(_of(results, "variants"), key=lambda result: result["case"] not in _REAL_WEIGHTS):
        model = result["case"]
        variants = result["record"]["variants"]
        plain = variants["plain"]["size_bytes"]
        for variant, row in variants.items():
            if variant == "plain":
                continue
            rows.append(
                {
                    "model": model if model in _REAL_WEIGHTS else f"{model} (random weights)",
                    "file": variant,
                    "size": f"{_size(plain)} → {_size(row['size_bytes'])} (÷ {plain / row['size_bytes']:.1f})",
                    "time": _ratio(row["ratio"][1]),
                    "SQNR": _decibels(row["sqnr_db"]),
                    "cosine of two sentences off by": "" if row["cosine_off"] is None else f"{row['cosine_off']:.4f}",
                }
            )
    yield from _answer("On a CPU", "Each file beside the plain export in fp32; decoders: time of one token.", rows)


def _on_npu(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield size and quality of compiled models on a simulated NPU."""
    rows: dict[str, dict[str, str]] = {}
    for result in _of(results, "placements"):
        measured = result["record"]["rows"]
        sizes = {row["model"]: row["ours"]["context_mb"] for row in measured if row["precision"] == "fp16"}
        for row in measured:
            if row["precision"] in _NPU_PRECISIONS:
                ours, half = row["ours"], sizes[row["model"]]
                cells = rows.setdefault(row["model"], dict.fromkeys(("model", *_NPU_PRECISIONS), ""))
                cells["model"] = row["model"]
                cells[row["precision"]] = f"{_decibels(ours['npu_db'])}, {ours['context_mb'] / half:.2f}"
    sentence = (
        "SQNR on the simulated NPU of QNN, and size of the compiled content relative to fp16. MiniLM has its real "
        "weights; the others have two layers with random ones, so that their sizes say little."
    )
    yield from _answer("On an NPU", sentence, list(rows.values()))


def _generation(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield ratios of building a decoder and generating with it to those of onnxruntime-genai's builder."""
    rows = []
    for result in _of(results, "generation"):
        for row in result["record"]["rows"]:
            genai = row["genai"]
            ratios = {
                "time of the build": row["wall_s"],
                "peak memory of the build": row["peak_bytes"],
                "first token": genai["first_ms"],
                "later token": genai["step_ms"],
            }
            name = {"decoder": f"{row['billions']} B, {row['precision']}"}
            rows.append(name | {key: _ratio(_median_ratio(value, "winml", "genai")) for key, value in ratios.items()})
    sentence = (
        "`winml build --layout genai` relative to onnxruntime-genai's own builder on the CPU: the build, and both "
        "folders in onnxruntime-genai."
    )
    yield from _answer("Decoders beside onnxruntime-genai's builder", sentence, rows)


def _export(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield times of an export relative to a bare ``torch.onnx.export``."""
    rows = []
    for result in _of(results, "export", "side-by-side"):
        for row in result["record"]["rows"]:
            ratios = row["wall_ratio"]
            cells = {"model": row["model"], "bare export": "TorchScript" if "TorchScript" in ratios else "dynamo"}
            for kind in ("winml", "winml verified"):
                cells[kind] = _ratio(ratios[kind]["median"])
            peaks = row["peak_bytes"]
            cells["peak memory, verified"] = _ratio(_median_ratio(peaks, "winml verified", cells["bare export"]))
            others = {"dynamo": "torch.onnx.export(dynamo=True)", "optimum": "optimum"}
            cells |= {title: f"{ratios[kind]['median']:.2f}" for kind, title in others.items() if kind in ratios}
            rows.append(cells)
    sentence = "Time of the whole process relative to a bare `torch.onnx.export`, which verifies nothing."
    yield from _answer("Time of an export", sentence, rows)


def _answer(title: str, sentence: str, rows: list[dict[str, str]]) -> Iterator[str]:
    """Yield a section with a table, without the columns that have no value; nothing without rows."""
    if rows:
        columns = [column for column in rows[0] if any(row.get(column) for row in rows)]
        yield f"## {title}\n\n{textwrap.fill(sentence, _LONGEST_LINE)}\n"
        yield f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
        yield from (f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in rows)
        yield ""


def _of(results: list[dict[str, Any]], benchmark: str, case: str | None = None) -> list[dict[str, Any]]:
    """Return the results of a benchmark that have a record of rows."""
    return [
        result
        for result in results
        if result["benchmark"] == benchmark and case in (None, result["case"]) and result["record"]
    ]


def _median_ratio(measured: dict[str, dict[str, float]], ours: str, other: str) -> float:
    return measured[ours]["median"] / measured[other]["median"]


def _ratio(value: float) -> str:
    return f"**{value:.2f}**" if round(value, 2) > 1 else f"{value:.2f}"


def _decibels(value: float | None) -> str:
    if value is None:
        return ""
    return f"**{value:.1f} dB**" if value < _LOW_SQNR_DB else f"{value:.1f} dB"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _section(result: dict[str, Any]) -> Iterator[str]:
    name, machine = result["benchmark"], result["machine"]
    yield f"### {name}{': ' if result['case'] else ''}{result['case'].replace('-', ' ')}\n"
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
