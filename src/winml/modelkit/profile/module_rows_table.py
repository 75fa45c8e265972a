"""Rows and tables of modules: as a tree, as a list, and with equal layers folded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from winml.modelkit.profile.memory_records import sum_memory
from winml.modelkit.profile.module_profile import ClassTime, ModuleProfile, ModuleTime, sum_operators
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import FEWEST_FOLDED
from winml.modelkit.tags import address

TimeT = TypeVar("TimeT", bound=ModuleTime | ClassTime)


@dataclass(frozen=True)
class TimedRow(Generic[TimeT]):
    """A module or a class, with its time in each phase."""

    times: tuple[TimeT | None, ...]
    """Time per phase; ``None`` for a phase without kernels."""
    level: int = 0

    @property
    def entry(self) -> TimeT:
        """The module or class in the last phase with kernels."""
        return next(time for time in reversed(self.times) if time is not None)

    @property
    def name(self) -> str:
        """Last segment of the module's tag, or the class."""
        entry = self.entry
        return address.last_segment(entry.tag) if isinstance(entry, ModuleTime) else entry.class_name

    @property
    def path(self) -> str:
        """Dotted path or tag of the module, or the class."""
        entry = self.entry
        return entry.path or entry.tag if isinstance(entry, ModuleTime) else entry.class_name


def module_rows(
    profiles: Sequence[ModuleProfile], *, depth: int | None = None, top: int | None = None
) -> list[TimedRow[ModuleTime]]:
    """List a row for each module with kernels in any phase, as a tree, or the modules with the longest self time.

    Args:
        profiles: Times in each phase; the last determines the order.
        depth: Levels of the tree. ``None``: all.
        top: Number of modules with the longest self time, instead of the tree.
    """
    by_tag = [{module.tag: module for module in profile.modules()} for profile in profiles]

    def rows(of_phases: Sequence[Sequence[ModuleTime]], level: int) -> Iterator[TimedRow[ModuleTime]]:
        """Yield a tree; modules that run only in other phases follow those of the last phase."""
        if depth is not None and level >= depth:
            return
        below = [module.tag for module in of_phases[-1]]
        below += [module.tag for modules in of_phases[:-1] for module in modules if module.tag not in by_tag[-1]]
        for tag in dict.fromkeys(below):
            times = tuple(modules.get(tag) for modules in by_tag)
            yield TimedRow(times, level)
            yield from rows([() if time is None else time.children for time in times], level + 1)

    if top is None:
        return list(rows([profile.roots for profile in profiles], 0))
    return _flat_rows(by_tag, top)


@dataclass(frozen=True)
class ModuleRow:
    """A module, or the same module of several equal layers."""

    row: TimedRow[ModuleTime]
    """Times; sums over the layers."""
    names: tuple[str, str]
    """Short and full name; for layers with their range."""
    tags: tuple[str, ...]
    """Tag of the module, or its tags in the layers."""
    each: str = ""
    """Smallest and largest total time of one layer; empty for a single module."""


@dataclass(frozen=True)
class FoldedLayers:
    """Equal layers in a list of rows."""

    start: int
    stop: int
    layers: Sequence[ModuleRow]


def fold_layers(
    rows: Sequence[TimedRow[ModuleTime]], start: int = 0, stop: int | None = None
) -> Iterator[FoldedLayers]:
    """Yield runs of consecutive modules with equal classes and equal inner modules, outermost first.

    Args:
        rows: Rows of a tree in preorder.
        start: First row: a module, whose siblings are examined with their inner modules.
        stop: Position after the last row. ``None``: all rows.
    """
    stop = len(rows) if stop is None else stop
    if start == stop:
        return
    starts = [place for place in range(start, stop) if rows[place].level == rows[start].level]
    ends = [*starts[1:], stop]
    likeness = [
        [(row.level, row.entry.class_name) for row in rows[begin:end]] for begin, end in zip(starts, ends, strict=True)
    ]
    first = 0
    while first < len(starts):
        last = first
        while last + 1 < len(starts) and likeness[last + 1] == likeness[first]:
            last += 1
        if last - first + 1 >= FEWEST_FOLDED:
            inner = range(ends[first] - starts[first])
            layers = [_join_layers([rows[begin + offset] for begin in starts[first : last + 1]]) for offset in inner]
            yield FoldedLayers(starts[first], ends[last], layers)
        else:
            for place in range(first, last + 1):
                yield from fold_layers(rows, starts[place] + 1, ends[place])
        first = last + 1


def folded_rows(rows: Sequence[TimedRow[ModuleTime]]) -> Iterator[ModuleRow]:
    """Yield the rows of a tree, with one row for the same module of equal layers."""
    folds = {fold.start: fold for fold in fold_layers(rows)}
    end = 0
    for place, row in enumerate(rows):
        if place in folds:
            yield from folds[place].layers
            end = folds[place].stop
        elif place >= end:
            yield _single_row(row)


def _single_row(row: TimedRow[ModuleTime]) -> ModuleRow:
    """Return the row of one module."""
    return ModuleRow(row, (row.name, row.path), (row.entry.tag,))


def _join_layers(rows: Sequence[TimedRow[ModuleTime]]) -> ModuleRow:
    """Sum the times of the same module in several layers, phase by phase."""
    phases = [[time for time in times if time is not None] for times in zip(*(row.times for row in rows), strict=True)]
    totals = [time.total_ms for time in phases[-1]]
    first, last = rows[0], rows[-1]
    return ModuleRow(
        TimedRow(tuple(_sum_times(times) if times else None for times in phases), first.level),
        (f"{_range_words(first.name, last.name)} × {len(rows)}", _range_words(first.path, last.path)),
        tuple(row.entry.tag for row in rows),
        f"{min(totals):.3f}–{max(totals):.3f}" if totals else "",
    )


def _sum_times(times: Sequence[ModuleTime]) -> ModuleTime:
    output_bytes = [time.output_bytes for time in times if time.output_bytes is not None]
    return replace(
        times[0],
        self_ms=sum(time.self_ms for time in times),
        total_ms=sum(time.total_ms for time in times),
        kernels=sum(time.kernels for time in times),
        total_kernels=sum(time.total_kernels for time in times),
        operators=sum_operators(times),
        output_bytes=sum(output_bytes) if output_bytes else None,
        memory=sum_memory(time.memory for time in times),
    )


def _range_words(first: str, last: str) -> str:
    """Format the names of the first and the last of equal modules; for inner modules, as a selector.

    >>> _range_words("encoder.layer.0", "encoder.layer.5"), _range_words("Dense", "Dense")
    ('encoder.layer.0 … .5', 'Dense')
    >>> _range_words("encoder.layer.0.attention", "encoder.layer.5.attention")
    'encoder.layer.*.attention'
    """
    if first == last:
        return first
    starts, ends = first.split("."), last.split(".")
    if len(starts) != len(ends) or len(starts) == 1:
        return f"{first} … {last}"
    if starts[:-1] == ends[:-1]:
        return f"{first} … .{ends[-1]}"
    return ".".join(start if start == end else "*" for start, end in zip(starts, ends, strict=True))


def class_rows(profiles: Sequence[ModuleProfile], top: int | None) -> list[TimedRow[ClassTime]]:
    """List a row for each class, or the classes with the longest self time in the last phase."""
    return _flat_rows([{entry.class_name: entry for entry in profile.by_class()} for profile in profiles], top)


def _flat_rows(phases: Sequence[Mapping[str, TimeT]], top: int | None) -> list[TimedRow[TimeT]]:
    """List a row for each name, or the rows with the longest self time in the last phase."""
    names = dict.fromkeys(name for times in reversed(phases) for name in times)
    rows = [TimedRow(tuple(times.get(name) for times in phases)) for name in names]

    def self_ms(row: TimedRow[TimeT]) -> list[float]:
        return [0.0 if time is None else time.self_ms for time in reversed(row.times)]

    return rows if top is None else sorted(rows, key=self_ms, reverse=True)[:top]


def in_phase(heading: str, phase: str) -> str:
    """Add the phase of a decoder to a heading."""
    return f"{heading} in a {phase}" if phase else heading


def module_table(
    rows: Sequence[TimedRow[ModuleTime]],
    folds: Sequence[FoldedLayers],
    columns: Sequence[doc.Column | tuple[str, doc.Kind]],
    cells_of: Callable[[ModuleRow], Sequence[doc.Cell]],
    *,
    is_tree: bool,
    is_hidden: bool,
    phase: str = "",
    name: str = "modules",
    heading: str = "Modules",
) -> doc.Table:
    """Build a table of modules.

    Args:
        rows: The modules.
        folds: Equal layers among them.
        columns: Columns after name and class.
        cells_of: Returns the cells of these columns.
        is_tree: True if names are indented; else the rows are a list of paths.
        is_hidden: True if a terminal does not show the table.
        phase: Phase of a decoder with a table of its own.
        name: Anchor of the table on a page, without the phase.
        heading: Heading of the table, without the phase.
    """

    def cells(module: ModuleRow) -> list[doc.Cell]:
        name = doc.Nested(*module.names, module.row.level) if is_tree else module.names[1]
        return [name, module.row.entry.class_name, *cells_of(module)]

    return doc.Table(
        doc.columns((in_phase("module", phase), "name"), doc.Column("class", detail=doc.Detail.PAGE), *columns),
        [cells(_single_row(row)) for row in rows],
        name=f"{name}{phase}",
        heading=in_phase(heading, phase),
        folds=[doc.Fold(fold.start, fold.stop, list(map(cells, fold.layers))) for fold in folds],
        is_searched=name == "modules" and phase in ("", "step"),
        detail=doc.Detail.PAGE if is_hidden else doc.Detail.ALWAYS,
    )
