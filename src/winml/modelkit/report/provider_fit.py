"""Prints in a terminal whether a provider runs a file, what keeps nodes from it, and what to do."""

from __future__ import annotations

from rich.console import Console

from winml.modelkit.inspect.provider_fit import Finding, ProviderFit
from winml.modelkit.report.terminal import TextTable, print_rows

__all__ = ["print_provider_fit"]

SHOWN_MODULES = 3
"""Modules of a finding unless ``verbose``. Chosen: they fit on a line."""

_SAID_BY = {
    "provider": "the provider itself",
    "kernels": "its list of kernels",
    "document": "its documentation",
}


def print_provider_fit(fit: ProviderFit, console: Console, *, verbose: bool = False) -> None:
    """Print the answer; with ``verbose`` every module and node of a finding."""
    verb = "lists" if fit.basis == "document" else "takes"
    answer = f"{verb} all {fit.nodes} nodes" if fit.runs_all else f"{verb} {fit.taken} of {fit.nodes} nodes"
    rows = [
        ("provider", f"{fit.name}, for the {fit.device}: {answer}"),
        ("said by", f"{_SAID_BY[fit.basis]} ({fit.source})"),
        *(("limit", f"{limit.count} {limit.operator}: {limit.limit}") for limit in fit.limits),
        *(("note", note) for note in fit.notes),
    ]
    print_rows(rows, console)
    if fit.findings:
        console.print()
        table = TextTable(("keeps nodes from it", "nodes", "why", "modules"), numbers=frozenset({1}))
        for finding in fit.findings:
            count = str(sum(finding.modules.values()) or "all")
            table.add(f"{finding.kind} {finding.what}", count, finding.reason, _module_words(finding, verbose=verbose))
        table.print(console)
        console.print()
        remedies = dict.fromkeys(finding.remedy for finding in fit.findings)
        print_rows((("do", remedy) for remedy in remedies), console)
    if verbose:
        for finding in fit.findings:
            print_rows((("node", f"{name} ({finding.what})") for name in finding.nodes), console)


def _module_words(finding: Finding, *, verbose: bool) -> str:
    modules = list(finding.modules.items())
    shown = modules if verbose else modules[:SHOWN_MODULES]
    words = [f"{module or '(the root)'} {count}" for module, count in shown]
    more = [f"and {len(modules) - len(shown)} more"] if len(shown) < len(modules) else []
    return ", ".join([*words, *more])
