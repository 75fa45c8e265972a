"""Prints the time of every module in a terminal: the module tree, or a table of modules or classes.

Renders a profile; computes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from winml.modelkit.hierarchy import address
from winml.modelkit.measure.module_profile import ClassTime, ModuleProfile, ModuleTime
from winml.modelkit.report.terminal import TextTable, print_rows

__all__ = ["fused_words", "operator_words", "print_module_times", "time_cells"]

SHOWN_OPERATORS = 3
"""Operators shown per module. Chosen: they fit on one line."""
SHOWN_FUSED = 3
"""Modules shown beside the one that a kernel is charged to. Chosen: as for operators."""
SHOWN_UNATTRIBUTED = 5
"""Nodes without a module that are shown. Chosen: enough to see what they have in common."""


def print_module_times(
    profile: ModuleProfile,
    console: Console,
    *,
    depth: int | None = None,
    top: int | None = None,
    by_class: bool = False,
) -> None:
    """Print the times of modules or classes, then the sums.

    Args:
        profile: The measured times.
        console: Where to print.
        depth: Levels of the tree to show; the totals include deeper modules. None: all.
        top: Show a list of this many modules with the longest self time, instead of the tree.
        by_class: Show classes instead of modules; with ``top``, those with the longest self time.
    """
    if by_class:
        _class_table(profile, top).print(console)
    elif top is not None:
        rows = ((module, 0) for module in _longest_running(profile, top))
        _module_table(profile, rows, is_flat=True).print(console)
    else:
        _module_table(profile, _tree_rows(profile.roots, depth)).print(console)
    console.print()
    print_rows(_time_sum_rows(profile), console)


def _tree_rows(modules: Sequence[ModuleTime], depth: int | None, level: int = 0) -> Iterator[tuple[ModuleTime, int]]:
    if depth is not None and level >= depth:
        return
    for module in modules:
        yield module, level
        yield from _tree_rows(module.children, depth, level + 1)


def _longest_running(profile: ModuleProfile, count: int) -> list[ModuleTime]:
    return sorted(profile.modules(), key=lambda module: module.self_ms, reverse=True)[:count]


def _module_table(
    profile: ModuleProfile, rows: Iterator[tuple[ModuleTime, int]], *, is_flat: bool = False
) -> TextTable:
    table = _empty_table("module", "total ms", "share", "self ms", "kernels", "operators of its own")
    for module, level in rows:
        segment = module.path or module.tag if is_flat else module.tag.rpartition(address.SEPARATOR)[2]
        table.add(
            "  " * level + segment,
            *time_cells(module.total_ms, module.self_ms, profile.kernel_ms),
            f"{module.kernels:g}",
            operator_words(module.operators, module.self_ms) + fused_words(module),
        )
    return table


def fused_words(module: ModuleTime) -> str:
    """Return which other modules have nodes in its kernels: `` (with BatchNorm2d, ReLU)``."""
    names = [tag.rpartition(address.SEPARATOR)[2] for tag in module.fused_with]
    hidden_count = len(names) - SHOWN_FUSED
    shown = [*names[:SHOWN_FUSED], *([f"{hidden_count} others"] if hidden_count > 0 else [])]
    return f" (with {', '.join(shown)})" if shown else ""


def _class_table(profile: ModuleProfile, top: int | None) -> TextTable:
    table = _empty_table("class", "total ms", "share", "self ms", "kernels", "operators of its own", "instances")
    classes: Sequence[ClassTime] = profile.by_class()
    if top is not None:
        classes = sorted(classes, key=lambda entry: entry.self_ms, reverse=True)[:top]
    for entry in classes:
        table.add(
            entry.class_name,
            *time_cells(entry.total_ms, entry.self_ms, profile.kernel_ms),
            f"{entry.kernels:g}",
            operator_words(entry.operators, entry.self_ms),
            str(entry.instances),
        )
    return table


def _empty_table(*columns: str) -> TextTable:
    texts = ("module", "class", "operators of its own")
    return TextTable(columns, numbers=frozenset(index for index, name in enumerate(columns) if name not in texts))


def time_cells(total_ms: float, self_ms: float, kernel_ms: float) -> tuple[str, str, str]:
    """Return total time, share of the kernel time and own time, as shown."""
    share = total_ms / kernel_ms if kernel_ms else 0.0
    return f"{total_ms:.3f}", f"{share:.1%}", f"{self_ms:.3f}"


def operator_words(operators: Mapping[str, float], self_ms: float) -> str:
    """Return the operators that take the most time, with their shares: ``MatMul 85%, Mul 15%``."""
    operator_shares = [
        f"{name} {milliseconds / self_ms:.0%}" for name, milliseconds in operators.items() if self_ms and milliseconds
    ]
    hidden_count = len(operator_shares) - SHOWN_OPERATORS
    more = [f"and {hidden_count} others"] if hidden_count > 0 else []
    return ", ".join([*operator_shares[:SHOWN_OPERATORS], *more])


def _time_sum_rows(profile: ModuleProfile) -> Iterator[tuple[str, str]]:
    mean_ms = sum(profile.run_ms) / len(profile.run_ms)
    yield "kernels", f"{profile.kernel_ms:.3f} ms of {mean_ms:.3f} ms per run, with profiling on"
    yield "outside", f"{profile.outside_ms:.3f} ms in which no kernel ran"
    share = f"{profile.unattributed_share:.2%} of kernel time"
    yield "unattributed", f"{profile.unattributed_ms:.3f} ms ({share})"
    for name, milliseconds in list(profile.unattributed.items())[:SHOWN_UNATTRIBUTED]:
        yield "", f"{name} {milliseconds:.3f} ms"
