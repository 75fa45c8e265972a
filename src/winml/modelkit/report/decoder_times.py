"""Shows the time of every module of a decoder, in a prompt and in a step side by side: in a terminal, and as a page.

Renders two profiles; computes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from winml.modelkit.hierarchy import address
from winml.modelkit.measure.module_profile import ClassTime, ModuleProfile, ModuleTime
from winml.modelkit.report.module_page import ModulePage, Section, icicle_chart, profile_facts, render_page
from winml.modelkit.report.module_times import fused_words, operator_words, time_cells
from winml.modelkit.report.perf import provider_words, time_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.profiled_modules import ProfiledDecoder

__all__ = ["decoder_page", "print_decoder_times"]

_OPERATORS = "operators of its own in a step"
_COLUMNS = ("prompt ms", "share", "self ms", "step ms", "share", "self ms")
_PAGE_COLUMNS = ("prompt ms", "prompt share %", "prompt self ms", "step ms", "step share %", "step self ms")


@dataclass(frozen=True)
class _Row:
    """One module, or one class, in both phases."""

    name: str
    prompt: ModuleTime | ClassTime | None
    """None where nothing of it ran."""
    step: ModuleTime | ClassTime
    level: int = 0


def print_decoder_times(
    profiled: ProfiledDecoder,
    console: Console,
    *,
    depth: int | None = None,
    top: int | None = None,
    by_class: bool = False,
) -> None:
    """Print what was measured, the times of modules or classes in both phases, and the sums.

    Args:
        profiled: The measured times.
        console: Where to print.
        depth: Levels of the tree to show; the totals include deeper modules. None: all.
        top: Show a list of this many modules with the longest self time in a step, instead of the tree.
        by_class: Show classes instead of modules; with ``top``, those with the longest self time in a step.
    """
    print_rows(_summary_rows(profiled), console)
    console.print()
    columns = ("class" if by_class else "module", *_COLUMNS, _OPERATORS)
    table = TextTable(columns, numbers=frozenset(range(1, 1 + len(_COLUMNS))))
    for row in _class_rows(profiled, top) if by_class else _module_rows(profiled, depth, top):
        fused = fused_words(row.step) if isinstance(row.step, ModuleTime) else ""
        operators = operator_words(row.step.operators, row.step.self_ms) + fused
        table.add("  " * row.level + row.name, *_cells(row, profiled), operators)
    table.print(console)
    console.print()
    print_rows(_sum_rows(profiled), console)


def _summary_rows(profiled: ProfiledDecoder) -> Iterator[tuple[str, str]]:
    result = profiled.step.result
    yield "model", result.model
    yield "runs on", provider_words(result)
    for name, phase in profiled.phases.items():
        measured = phase.result
        what = measured.decoding.words if measured.decoding is not None else "as given"
        runs = f"p50 of {len(measured.latency.samples_ms)} runs, {measured.batch_size} row"
        rows = f"{runs}{'' if measured.batch_size == 1 else 's'}"
        yield name, f"{what}: {time_words(measured.latency.summary.p50)} ms ({rows})"
    notes = (note for phase in profiled.phases.values() for note in phase.result.notes)
    yield from (("note", note) for note in dict.fromkeys(notes))


def _module_rows(profiled: ProfiledDecoder, depth: int | None, top: int | None) -> Iterator[_Row]:
    of_prompt = {module.tag: module for module in profiled.prompt.profile.modules()}
    if top is not None:
        longest = sorted(profiled.step.profile.modules(), key=lambda module: module.self_ms, reverse=True)[:top]
        yield from (_Row(module.path or module.tag, of_prompt.get(module.tag), module) for module in longest)
        return
    yield from _tree_rows(profiled.step.profile.roots, of_prompt, depth, 0)


def _tree_rows(
    modules: Sequence[ModuleTime], of_prompt: Mapping[str, ModuleTime], depth: int | None, level: int
) -> Iterator[_Row]:
    if depth is not None and level >= depth:
        return
    for module in modules:
        yield _Row(module.tag.rpartition(address.SEPARATOR)[2], of_prompt.get(module.tag), module, level)
        yield from _tree_rows(module.children, of_prompt, depth, level + 1)


def _class_rows(profiled: ProfiledDecoder, top: int | None) -> Iterator[_Row]:
    of_prompt = {entry.class_name: entry for entry in profiled.prompt.profile.by_class()}
    classes: Sequence[ClassTime] = profiled.step.profile.by_class()
    if top is not None:
        classes = sorted(classes, key=lambda entry: entry.self_ms, reverse=True)[:top]
    yield from (_Row(entry.class_name, of_prompt.get(entry.class_name), entry) for entry in classes)


def _phase_times(row: _Row, profiled: ProfiledDecoder) -> Iterator[tuple[float, float, float]]:
    """Yield total, own and kernel time in milliseconds, of the prompt first."""
    for time, profile in ((row.prompt, profiled.prompt.profile), (row.step, profiled.step.profile)):
        yield (0.0, 0.0, profile.kernel_ms) if time is None else (time.total_ms, time.self_ms, profile.kernel_ms)


def _cells(row: _Row, profiled: ProfiledDecoder) -> Iterator[str]:
    for total_ms, self_ms, kernel_ms in _phase_times(row, profiled):
        yield from time_cells(total_ms, self_ms, kernel_ms)


def _sum_rows(profiled: ProfiledDecoder) -> Iterator[tuple[str, str]]:
    profiles = {name: phase.profile for name, phase in profiled.phases.items()}
    kernels = (f"{name} {item.kernel_ms:.3f} ms of {_run_ms(item):.3f} ms per run" for name, item in profiles.items())
    yield "kernels", f"{', '.join(kernels)}, with profiling on"
    outside = ", ".join(f"{name} {item.outside_ms:.3f} ms" for name, item in profiles.items())
    yield "outside", f"{outside}, in which no kernel ran"
    yield "unattributed", ", ".join(f"{name} {_unattributed_words(item)}" for name, item in profiles.items())


def _run_ms(profile: ModuleProfile) -> float:
    return sum(profile.run_ms) / len(profile.run_ms)


def _unattributed_words(profile: ModuleProfile) -> str:
    return f"{profile.unattributed_ms:.3f} ms ({profile.unattributed_share:.2%} of kernel time)"


def decoder_page(profiled: ProfiledDecoder) -> str:
    """Return the page of a decoder: a chart for each phase, and tables with both."""
    columns = (*((name, True) for name in _PAGE_COLUMNS), (_OPERATORS, False))
    modules = _module_rows(profiled, None, None)
    named = (("module", False), ("class", False), *columns)
    counted = (("class", False), ("instances", True), *columns)
    charts = [
        f"<h3>{phase.result.decoding.words if phase.result.decoding else name}</h3>\n"
        f"{icicle_chart(phase.profile, with_library=number == 0)}"
        for number, (name, phase) in enumerate(profiled.phases.items())
    ]
    page = ModulePage(
        title=Path(profiled.step.result.model).name,
        subject="time by module",
        introduction="Kernel times of ONNX Runtime in a prompt with an empty cache, and in a step after it, charged to "
        f"the PyTorch module each node came from; means over {len(profiled.step.profile.run_ms)} runs.",
        facts=[*profile_facts(profiled.step).items(), *_sum_rows(profiled)],
        chart_heading="Where the time goes",
        chart="\n".join(charts),
        sections=[
            Section("modules", "Modules", named, list(_page_modules(modules, profiled))),
            Section("classes", "Classes", counted, list(_page_classes(profiled))),
        ],
    )
    return render_page(page)


def _page_modules(rows: Iterable[_Row], profiled: ProfiledDecoder) -> Iterator[tuple[object, ...]]:
    for row in rows:
        assert isinstance(row.step, ModuleTime)  # they are of the tree
        module = row.step
        operators = ", ".join(module.operators) + fused_words(module)
        yield (module.path or module.tag, module.class_name, *_page_cells(row, profiled), operators)


def _page_classes(profiled: ProfiledDecoder) -> Iterator[tuple[object, ...]]:
    for row in _class_rows(profiled, None):
        assert isinstance(row.step, ClassTime)
        yield (row.name, row.step.instances, *_page_cells(row, profiled), ", ".join(row.step.operators))


def _page_cells(row: _Row, profiled: ProfiledDecoder) -> Iterator[float]:
    for total_ms, self_ms, kernel_ms in _phase_times(row, profiled):
        yield from (total_ms, 100.0 * total_ms / kernel_ms if kernel_ms else 0.0, self_ms)
