"""Prints a quantization in a terminal: precision by module, what was left and why, sizes, and what it costs."""

from __future__ import annotations

from rich.console import Console

from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.quantized_model import QuantizedFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

__all__ = ["print_quantization"]

SHOWN_MODULES = 12
"""Rows of the module table unless ``verbose``, modules that keep bits first. Chosen: the summary fits on a screen."""


def print_quantization(result: QuantizedFile, console: Console, *, verbose: bool) -> None:
    """Print what was quantized; with ``verbose`` every module."""
    before, after = result.before, result.after
    left = sum(result.left.values())
    ratio = before.size_bytes / max(after.size_bytes, 1)
    rows = [
        ("precision", f"{result.precision} ({', '.join(result.modes)})"),
        *([("ranges", result.calibration.words)] if result.calibration is not None else []),
        ("quantized", f"{result.quantized} of {result.quantized + left} nodes with weights{_mixture_words(result)}"),
        *(("left", f"{count} {reason}") for reason, count in result.left.items()),
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)} (÷ {ratio:.1f})"),
        *([("opset", f"{before.opset} → {after.opset}")] if before.opset != after.opset else []),
        ("hierarchy", _coverage_words(result)),
        ("verified", "skipped: the files were not compared" if result.fidelity is None
                     else fidelity_words(result.fidelity)),
        *(("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files),
        *(("note", note) for note in result.notes),
    ]  # fmt: skip
    print_rows(rows, console)
    # Those that keep bits first: they are what the user did not get.
    ordered = sorted(result.modules, key=lambda module: (not module.left, module.quantized > 0 and bool(module.left)))
    shown = ordered if verbose else ordered[:SHOWN_MODULES]
    table = TextTable(("module", "requested", "actual", "quantized", "left"), numbers=frozenset({3}))
    for module in shown:
        reasons = ", ".join(f"{count} {reason}" for reason, count in module.left.items())
        table.add(module.tag or "?", module.requested, module.actual, str(module.quantized), reasons)
    console.print()
    table.print(console)
    if len(shown) < len(result.modules):
        console.print(f"… and {len(result.modules) - len(shown)} more modules (--verbose shows all)")


def _mixture_words(result: QuantizedFile) -> str:
    """Return how many nodes have which precision, where there are several."""
    counts: dict[str, int] = {}
    for module in result.modules:
        if module.quantized:
            counts[module.requested] = counts.get(module.requested, 0) + module.quantized
    if len(counts) < 2:
        return ""
    return f" ({', '.join(f'{precision} {count}' for precision, count in counts.items())})"


def _coverage_words(result: QuantizedFile) -> str:
    if not result.is_tagged:
        return "unknown: the source does not say which module its nodes came from"
    return coverage_words(result.coverage)
