"""Tells in a terminal how two models agree, and which module is the first to part."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.compare.words import decibel_words, nearness_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.model_comparison import ComparedModule, ComparedOutput, ModelComparison
from winml.modelkit.words import count_noun

__all__ = ["first_words", "output_words", "print_comparison"]

SHOWN_MODULES = 12
"""Rows of the module table unless all are asked for. Chosen: the answer fits on a screen."""


def print_comparison(result: ModelComparison, console: Console, *, verbose: bool, depth: int | None = None) -> None:
    """Print the answer; of several parts what is farthest off in all of them first, then each part by itself.

    Args:
        result: The comparison.
        console: Where to.
        verbose: Whether to show every module, in the order they are computed.
        depth: Levels of the module tree to show; None: all.
    """
    print_rows(list(_rows(result)), console)
    for name, part in result.parts.items():
        console.print(f"\n{name}")
        print_comparison(part, console, verbose=verbose, depth=depth)
    if result.modules is None:
        return
    modules = result.modules_within(depth)
    known = [module for module in modules if module.fidelity is not None]
    wrong = [module for module in known if module.own_error or (module.fidelity and module.fidelity.problem)]
    worst = sorted(wrong, key=lambda module: -(module.own_error or 0.0))[:SHOWN_MODULES]
    first = result.first_divergence
    shown = list(modules) if verbose else [module for module in known if module in worst or module is first]
    if not shown:
        return
    console.print()
    table = TextTable(
        ("", "module", "own error", "error", "of inputs", "SQNR dB", "cosine", "nodes"),
        numbers=frozenset({2, 3, 4, 5, 6}),
    )
    for module in shown:
        mark = "first" if module is first else ""
        table.add(mark, module.identity.words, *_cells(module), "unchanged" if module.is_unchanged else "")
    table.print(console)
    if len(shown) < len(modules):
        console.print(f"the {len(shown)} with the largest own error of {len(modules)} (--verbose shows all)")


def _rows(result: ModelComparison) -> Iterator[tuple[str, str]]:
    yield "reference", result.reference
    yield "candidate", result.candidate
    yield "inputs", f"{result.input_source}, {result.draws} {'set' if result.draws == 1 else 'sets'}"
    if result.parts:
        yield "worst", output_words(result.worst)
    for output in result.outputs if not result.parts else ():
        yield "output", output_words(output)
    if result.threshold is not None:
        verdict = "within" if result.is_within else "beyond"
        yield "threshold", f"{verdict} a relative error of {result.threshold:g}"
    if result.modules is not None or result.first_divergence is not None:
        yield "first", first_words(result)
    if result.modules is not None:
        missing = [module for module in result.modules if module.fidelity is None]
        reasons = dict.fromkeys(module.reason for module in missing)
        yield from (
            ("not seen", f"{count_noun(sum(module.reason == reason for module in missing), 'module')}: {reason}")
            for reason in reasons
        )
    yield from (("note", note) for note in result.notes)


def output_words(output: ComparedOutput) -> str:
    """Return how near one output is."""
    fidelity = output.fidelity
    name = f"{fidelity.name} of {output.part}" if output.part else fidelity.name
    if fidelity.problem:
        return f"{name}: {fidelity.problem}"
    if fidelity.equal_share is not None:
        return f"{name}: {nearness_words(fidelity)}, largest difference {fidelity.max_abs_diff:g}"
    words = (
        f"{name}: relative error {fidelity.relative_error:.1e}, SQNR {fidelity.sqnr_db:.1f} dB, "
        f"cosine {fidelity.cosine:.6f}, largest difference {fidelity.max_abs_diff:.1e}"
    )
    if output.top1_agreement is None:
        return words
    return f"{words}, largest at the same place {100 * output.top1_agreement:.1f} %"


def first_words(result: ModelComparison) -> str:
    """Return which module is the first whose error is its own."""
    first = result.first_divergence
    if first is None or first.fidelity is None:
        return f"no module has an error of its own beyond rounding ({result.tolerance:g}) and what all of them have"
    problem = f": {first.fidelity.problem}" if first.fidelity.problem else ""
    return f"{first.identity.words} is the first whose error is its own{problem} ({first.identity.tag})"


def _cells(module: ComparedModule) -> tuple[str, str, str, str, str]:
    fidelity = module.fidelity
    if fidelity is None:
        return (module.reason, "", "", "", "")
    if fidelity.problem:
        return (fidelity.problem, "", _number(module.input_error), "", "")
    return (
        _number(module.own_error),
        _number(fidelity.relative_error),
        _number(module.input_error),
        decibel_words(fidelity.sqnr_db),
        f"{fidelity.cosine:.6f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
