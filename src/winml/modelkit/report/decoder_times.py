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
from winml.modelkit.results.module_perf import ProfiledDecoder

__all__ = ["DecoderRow", "decoder_page", "module_rows", "print_decoder_times"]

_OPERATORS = "operators of its own in a step"
_COLUMNS = ("prompt ms", "share", "self ms", "step ms", "share", "self ms")
_PAGE_COLUMNS = ("prompt ms", "prompt share %", "prompt self ms", "step ms", "step share %", "step self ms")


@dataclass(frozen=True)
class DecoderRow:
    """One module, or one class, in both phases."""

    name: str
    prompt: ModuleTime | ClassTime | None
    """None where nothing of it ran."""
    step: ModuleTime | ClassTime | None
    """The same; one of the two is there."""
    level: int = 0

    @property
    def operators(self) -> str:
        """Its operators in a step, for people."""
        if self.step is None:
            return ""
        fused = fused_words(self.step) if isinstance(self.step, ModuleTime) else ""
        return operator_words(self.step.operators, self.step.self_ms) + fused

    @property
    def self_ms(self) -> tuple[float, float]:
        """Own time in a step, and in a prompt."""
        step, prompt = (0.0 if time is None else time.self_ms for time in (self.step, self.prompt))
        return step, prompt


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
    profiles = (profiled.prompt.profile, profiled.step.profile)
    for row in _class_rows(profiled, top) if by_class else module_rows(*profiles, depth=depth, top=top):
        table.add("  " * row.level + row.name, *_cells(row, profiled), row.operators)
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


def module_rows(
    prompt: ModuleProfile, step: ModuleProfile, *, depth: int | None = None, top: int | None = None
) -> list[DecoderRow]:
    """Return a row for each module that ran in one of the two, as a tree, or those with the longest own time.

    Args:
        prompt: The times in a prompt.
        step: The times in a step.
        depth: Levels of the tree. None: all.
        top: How many of the longest, in place of the tree.
    """
    times = _ModuleTimes(*({module.tag: module for module in profile.modules()} for profile in (prompt, step)))
    if top is None:
        return list(times.rows(prompt.roots, step.roots, depth, 0))
    tags = dict.fromkeys((*times.step, *times.prompt))
    rows = (DecoderRow(_name(times.either(tag)), times.prompt.get(tag), times.step.get(tag)) for tag in tags)
    return sorted(rows, key=lambda row: row.self_ms, reverse=True)[:top]


@dataclass(frozen=True)
class _ModuleTimes:
    """The times of all modules by tag, in both phases."""

    prompt: Mapping[str, ModuleTime]
    step: Mapping[str, ModuleTime]

    def either(self, tag: str) -> ModuleTime:
        """Return a module as it ran in a step, else as it ran in a prompt."""
        return self.step.get(tag) or self.prompt[tag]

    def rows(
        self, prompt: Sequence[ModuleTime], step: Sequence[ModuleTime], depth: int | None, level: int
    ) -> Iterator[DecoderRow]:
        """Yield a tree; behind the modules of a step come those beside them that only a prompt runs."""
        if depth is not None and level >= depth:
            return
        own = [module.tag for module in step]
        for tag in (*own, *(module.tag for module in prompt if module.tag not in self.step)):
            in_prompt, in_step = self.prompt.get(tag), self.step.get(tag)
            yield DecoderRow(tag.rpartition(address.SEPARATOR)[2], in_prompt, in_step, level)
            below, below_step = (() if module is None else module.children for module in (in_prompt, in_step))
            yield from self.rows(below, below_step, depth, level + 1)


def _name(module: ModuleTime) -> str:
    return module.path or module.tag


def _class_rows(profiled: ProfiledDecoder, top: int | None) -> list[DecoderRow]:
    prompt, step = (
        {entry.class_name: entry for entry in phase.profile.by_class()} for phase in profiled.phases.values()
    )
    rows = [DecoderRow(name, prompt.get(name), step.get(name)) for name in dict.fromkeys((*step, *prompt))]
    return rows if top is None else sorted(rows, key=lambda row: row.self_ms, reverse=True)[:top]


def _phase_times(row: DecoderRow, profiled: ProfiledDecoder) -> Iterator[tuple[float, float, float]]:
    """Yield total, own and kernel time in milliseconds, of the prompt first."""
    for time, profile in ((row.prompt, profiled.prompt.profile), (row.step, profiled.step.profile)):
        yield (0.0, 0.0, profile.kernel_ms) if time is None else (time.total_ms, time.self_ms, profile.kernel_ms)


def _cells(row: DecoderRow, profiled: ProfiledDecoder) -> Iterator[str]:
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
    modules = module_rows(profiled.prompt.profile, profiled.step.profile)
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


def _page_modules(rows: Iterable[DecoderRow], profiled: ProfiledDecoder) -> Iterator[tuple[object, ...]]:
    for row in rows:
        module = row.step or row.prompt
        assert isinstance(module, ModuleTime)  # they are of the tree
        operators = "" if row.step is None else ", ".join(module.operators) + fused_words(module)
        yield (module.path or module.tag, module.class_name, *_page_cells(row, profiled), operators)


def _page_classes(profiled: ProfiledDecoder) -> Iterator[tuple[object, ...]]:
    for row in _class_rows(profiled, None):
        entry = row.step or row.prompt
        assert isinstance(entry, ClassTime)
        operators = "" if row.step is None else ", ".join(entry.operators)
        yield (row.name, entry.instances, *_page_cells(row, profiled), operators)


def _page_cells(row: DecoderRow, profiled: ProfiledDecoder) -> Iterator[float]:
    for total_ms, self_ms, kernel_ms in _phase_times(row, profiled):
        yield from (total_ms, 100.0 * total_ms / kernel_ms if kernel_ms else 0.0, self_ms)
