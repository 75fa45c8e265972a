"""Documents of module times: in a run of the whole model, and of each module alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from winml.modelkit.errors import opt
from winml.modelkit.profile import table
from winml.modelkit.profile.module_profile import ClassTime, ModuleProfile, ModuleTime
from winml.modelkit.profile.module_records import ModulePerfResult, ProfiledDecoder, ProfiledModules
from winml.modelkit.profile.records import PerfResult
from winml.modelkit.report import document as doc
from winml.modelkit.tags import address
from winml.modelkit.words import count_noun

MAX_LISTED_OPERATORS = 3
"""Maximum number of operators per module in a terminal. Chosen: they fit on one line."""
_MAX_LISTED_FUSED = 3
"""Maximum number of fused modules listed with a module. Chosen: as for operators."""
MAX_BARS = 10
"""Number of classes in the bar chart. Chosen: it fits on a screen below the figures."""
_LEAST_SHARE = 0.0005
"""Minimum share of the kernel time for a bar of a class. Chosen: smaller shares are printed as 0.0 %."""
_MAX_UNATTRIBUTED_ROWS = 5
"""Maximum number of nodes without a module in a terminal. Chosen: enough to see a common cause."""


def profile_document(
    profiled: ProfiledModules | ProfiledDecoder,
    *,
    depth: int | None = None,
    top: int | None = None,
    by_class: bool = False,
) -> doc.Document:
    """Build the document of the time of every module.

    Args:
        profiled: The measured times.
        depth: Levels of the module tree; the totals include deeper modules. ``None``: all.
        top: List this many modules with the longest self time, in a step where a decoder is measured, instead of the
            tree. ``None``: the tree.
        by_class: In a terminal, list classes instead of modules; with ``top``, those with the longest self time.
    """
    phases = profiled.phases if isinstance(profiled, ProfiledDecoder) else {"": profiled}
    main = [*phases.values()][-1]
    where = " in a prompt with an empty cache, and in a step after it" if len(phases) > 1 else ""
    blocks: list[doc.Block] = table.perf_blocks(main.result)
    if len(phases) > 1:
        latencies = table.latency_table({name: phase.result.latency for name, phase in phases.items()})
        blocks = [doc.Fields(list(_phase_fields(phases))), latencies]
    origin: list[doc.Field] = [
        ("modules from", main.tree_source, doc.Detail.PAGE),
        ("made by", f"winml {main.result.tool_version}", doc.Detail.PAGE),
    ]
    times = times_document(
        {name: phase.profile for name, phase in phases.items()},
        captions={name: _phase_words(phase.result) for name, phase in phases.items()} if len(phases) > 1 else {},
        depth=depth,
        top=top,
        by_class=by_class,
    )
    charts = [block for block in times.blocks if isinstance(block, doc.Boxes | doc.Bars)]
    tables = [block for block in times.blocks if not isinstance(block, doc.Boxes | doc.Bars)]
    return doc.Document(
        [blocks[0], *charts, *blocks[1:], *tables],
        doc.Fields([*times.summary.rows, *origin]),
        title=Path(main.result.model).name,
        subject="time by module",
        introduction=f"{_clock_words(main)}{where}, charged to the PyTorch module each node came from; of each kernel "
        f"the mean over the middle half of {len(main.profile.run_ms)} runs with profiling on.",
        figures=[figure for name, phase in phases.items() for figure in _phase_figures(name, phase.profile)],
    )


def _phase_figures(phase: str, profile: ModuleProfile) -> Iterator[doc.Figure]:
    unit, run = profile.unit, profile.whole_ms
    of_phase = f" ({phase})" if phase else ""
    meaning = f"of {run:.3f} {unit} for a run with profiling on; in the rest no kernel ran"
    yield doc.Figure(f"kernel time{of_phase}", f"{profile.kernel_ms:.3f} {unit}", meaning)
    longest = max(profile.by_class(), key=lambda entry: entry.self_ms, default=None)
    if longest is not None:
        instances = count_noun(longest.instances, "module")
        meaning = f"of the kernel time is self time of {instances} of {longest.class_name}"
        yield doc.Figure(f"largest class{of_phase}", f"{_share(longest.self_ms, profile):.1%}", meaning)
    slowest = max(profile.modules(), key=lambda module: module.self_ms, default=None)
    if slowest is not None:
        meaning = f"self time of {slowest.path or slowest.tag}, a {slowest.class_name}"
        yield doc.Figure(f"slowest module{of_phase}", f"{slowest.self_ms:.3f} {unit}", meaning)
    meaning = "of the kernel time belongs to nodes without a module"
    yield doc.Figure(f"unattributed{of_phase}", f"{profile.unattributed_share:.1%}", meaning)


def _clock_words(profiled: ProfiledModules) -> str:
    provider = profiled.result.provider
    if profiled.profile.unit == "ms":
        return "Kernel times of ONNX Runtime"
    return f"Thousands of clock cycles that {provider.provider.name} counted ({provider.device_words})"


def _phase_fields(phases: Mapping[str, ProfiledModules]) -> Iterator[doc.Field]:
    result = [*phases.values()][-1].result
    yield "model", result.model
    yield "runs on", table.provider_words(result)
    yield "runs", table.runs_words(result)
    for name, phase in phases.items():
        measured = phase.result
        rows = f", {measured.batch_size} rows" if measured.batch_size > 1 else ""
        yield name, f"{_phase_words(measured)}{rows}: {table.throughput_words(measured)}"
    notes = {name: phase.result.notes for name, phase in phases.items()}
    of_all = [note for note in notes["step"] if all(note in of_phase for of_phase in notes.values())]
    yield from doc.note_fields(of_all)
    yield from doc.note_fields(
        f"{name}: {note}" for name, of_phase in notes.items() for note in of_phase if note not in of_all
    )


def _phase_words(result: PerfResult) -> str:
    return result.decoding.words if result.decoding is not None else "as given"


def times_document(
    profiles: Mapping[str, ModuleProfile],
    *,
    captions: Mapping[str, str] = MappingProxyType({}),
    depth: int | None = None,
    top: int | None = None,
    by_class: bool = False,
) -> doc.Document:
    """Build the document of the times in profiles of one model; see :func:`profile_document`.

    Args:
        profiles: Name of a phase → its times; empty name for a single phase.
        captions: Name of a phase → caption of its chart.
        depth: As in :func:`profile_document`.
        top: As in :func:`profile_document`.
        by_class: As in :func:`profile_document`.
    """
    runs = [*profiles.values()]
    modules, classes = module_rows(runs, depth=depth, top=top), _class_rows(runs, top)
    charts = [
        replace(
            _time_boxes(profile, captions.get(name, "")),
            heading=f"Time by module in a {name}" if name else "Time by module",
        )
        for name, profile in profiles.items()
    ]
    times = _time_columns([*profiles], runs[-1].unit)
    operators = doc.Column("operators of its own" if len(runs) == 1 else f"operators of its own in a {[*profiles][-1]}")
    blocks: list[doc.Block] = [
        *charts,
        *(_class_bars(profile, name, captions.get(name, "")) for name, profile in profiles.items()),
        doc.Table(
            doc.columns(
                ("module", "name"),
                doc.Column("class", detail=doc.Detail.PAGE),
                *times,
                doc.Column("output bytes", "bytes", doc.Detail.PAGE),
                operators,
            ),
            [
                [
                    row.path if top is not None else doc.Nested(row.name, row.path, row.level),
                    row.entry.class_name,
                    *_time_cells(row, runs),
                    row.entry.output_bytes,
                    _operator_cell(row),
                ]
                for row in modules
            ],
            name="modules",
            heading="Modules",
            detail=doc.Detail.PAGE if by_class else doc.Detail.ALWAYS,
            is_searched=True,
        ),
        doc.Table(
            doc.columns("class", ("instances", "count"), *times, operators),
            [
                [row.entry.class_name, row.entry.instances, *_time_cells(row, runs), _operator_cell(row)]
                for row in classes
            ],
            name="classes",
            heading="Classes",
            detail=doc.Detail.ALWAYS if by_class else doc.Detail.PAGE,
        ),
        *(
            doc.Table(
                doc.columns(("node without a module", "name"), (f"{name} {profile.unit}".strip(), "ms")),
                [*profile.unattributed.items()],
                name=f"unattributed{name}",
                heading="Nodes without a module",
                brief=range(_MAX_UNATTRIBUTED_ROWS),
                rest=f"… and {{}} more nodes ({opt.report} lists all)",
            )
            for name, profile in profiles.items()
        ),
    ]
    return doc.Document(blocks, doc.Fields(list(_sum_fields(profiles))))


_TimeT = TypeVar("_TimeT", bound=ModuleTime | ClassTime)


@dataclass(frozen=True)
class TimedRow(Generic[_TimeT]):
    """A module or a class, with its time in each phase."""

    times: tuple[_TimeT | None, ...]
    """Time per phase; ``None`` for a phase without kernels."""
    level: int = 0

    @property
    def entry(self) -> _TimeT:
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
        below += [item.tag for modules in of_phases[:-1] for item in modules if item.tag not in by_tag[-1]]
        for tag in dict.fromkeys(below):
            times = tuple(modules.get(tag) for modules in by_tag)
            yield TimedRow(times, level)
            yield from rows([() if time is None else time.children for time in times], level + 1)

    if top is None:
        return list(rows([profile.roots for profile in profiles], 0))
    return _flat_rows(by_tag, top)


def _class_rows(profiles: Sequence[ModuleProfile], top: int | None) -> list[TimedRow[ClassTime]]:
    return _flat_rows([{entry.class_name: entry for entry in profile.by_class()} for profile in profiles], top)


def _flat_rows(phases: Sequence[Mapping[str, _TimeT]], top: int | None) -> list[TimedRow[_TimeT]]:
    """List a row for each name, or the rows with the longest self time in the last phase."""
    names = dict.fromkeys(name for times in reversed(phases) for name in times)
    rows = [TimedRow(tuple(times.get(name) for times in phases)) for name in names]

    def self_ms(row: TimedRow[_TimeT]) -> list[float]:
        return [0.0 if time is None else time.self_ms for time in reversed(row.times)]

    return rows if top is None else sorted(rows, key=self_ms, reverse=True)[:top]


def _time_columns(phases: Sequence[str], unit: str) -> list[doc.Column]:
    columns = [
        column
        for phase in phases
        for column in (
            doc.Column(f"{phase or 'total'} {unit}", "ms"),
            doc.Column("share", "share", key=f"{phase} share".strip()),
            doc.Column(f"self {unit}", "ms", key=f"{phase} self {unit}".strip()),
        )
    ]
    return columns if len(phases) > 1 else [*columns, doc.Column("kernels", "count", key="total kernels")]


def _time_cells(row: TimedRow[_TimeT], profiles: Sequence[ModuleProfile]) -> Iterator[doc.Cell]:
    for time, profile in zip(row.times, profiles, strict=True):
        total_ms, self_ms = (0.0, 0.0) if time is None else (time.total_ms, time.self_ms)
        yield from (total_ms, _share(total_ms, profile), self_ms)
    if len(profiles) == 1:
        yield row.entry.total_kernels


def _share(milliseconds: float, profile: ModuleProfile) -> float:
    return milliseconds / profile.kernel_ms if profile.kernel_ms else 0.0


def _operator_cell(row: TimedRow[_TimeT]) -> doc.Cell:
    """Format the operators with their shares of the self time in the last phase: ``MatMul 85%, Mul 15%``."""
    time = row.times[-1]
    if time is None:
        return ""
    operators = [f"{name} {ms / time.self_ms:.0%}" for name, ms in time.operators.items() if time.self_ms and ms]
    fused = [address.last_segment(tag) for tag in time.fused_with] if isinstance(time, ModuleTime) else []
    listed = doc.first_of(operators, MAX_LISTED_OPERATORS, "and {} others")
    if not fused:
        return listed
    others = doc.first_of(fused, _MAX_LISTED_FUSED, "{} others")
    return doc.Shortened(f"{listed.short} (fused with {others.short})", f"{listed.full} (fused with {others.full})")


def _sum_fields(profiles: Mapping[str, ModuleProfile]) -> Iterator[doc.Field]:
    """Yield the totals over all modules, and the time not included."""

    def words(of: Callable[[ModuleProfile], str]) -> str:
        return ", ".join(f"{name} {of(profile)}".strip() for name, profile in profiles.items())

    def kernel_words(profile: ModuleProfile) -> str:
        unit = profile.unit
        return f"{profile.kernel_ms:.3f} {unit} of {profile.whole_ms:.3f} {unit} per run"

    runs = max(len(profile.run_ms) for profile in profiles.values())
    yield "times", f"of each kernel, the mean over the middle half of {runs} runs with profiling on"
    yield "kernels", words(kernel_words)
    yield "outside", f"{words(lambda profile: f'{profile.outside_ms:.3f} {profile.unit}')} in which no kernel ran"

    def unattributed_words(profile: ModuleProfile) -> str:
        return f"{profile.unattributed_ms:.3f} {profile.unit} ({profile.unattributed_share:.2%} of kernel time)"

    yield "unattributed", words(unattributed_words)


def _time_boxes(profile: ModuleProfile, caption: str) -> doc.Boxes:
    roots = {root.tag for root in profile.roots}
    boxes = [
        doc.Box(
            key=module.tag,
            parent="" if module.tag in roots else module.tag.rpartition(address.SEPARATOR)[0],
            label=address.last_segment(module.tag),
            size=module.self_ms,
            shade=module.self_ms,
            kind=module.class_name,
            lines=(
                module.path or module.tag,
                f"total {module.total_ms:.3f} {profile.unit} ({_share(module.total_ms, profile):.1%})",
                f"self {module.self_ms:.3f} {profile.unit}",
            ),
        )
        for module in profile.modules()
    ]
    return doc.Boxes(
        boxes,
        caption=caption,
        size_title="time with the modules inside",
        size_unit=profile.unit,
        shades=doc.Shades(f"self time in {profile.unit}", low=0.0, folded="sum"),
        is_by_class=True,
    )


def _class_bars(profile: ModuleProfile, phase: str, caption: str) -> doc.Bars:
    longest = sorted(profile.by_class(), key=lambda entry: entry.self_ms, reverse=True)
    longest = [entry for entry in longest if _share(entry.self_ms, profile) >= _LEAST_SHARE]
    others = len(longest[MAX_BARS:])
    words = ["self time: without the modules inside", caption, f"the table has {others} more" if others > 0 else ""]
    return doc.Bars(
        [
            doc.Bar(
                entry.class_name,
                entry.self_ms,
                f"{entry.self_ms:.3f} {profile.unit}, {_share(entry.self_ms, profile):.1%}",
                f"× {entry.instances}" if entry.instances > 1 else "",
            )
            for entry in longest[:MAX_BARS]
        ],
        heading=f"Self time by class in a {phase}" if phase else "Self time by class",
        caption="; ".join(filter(None, words)),
    )


def module_perf_document(result: ModulePerfResult) -> doc.Document:
    """Build the document of each instance, each class, and the failed instances."""
    options = result.options
    runs = f"{options.iterations} counted" if options.duration_s is None else f"{options.duration_s:g} s of them"
    input_words = "the values of the file" if result.input_source == "file" else "random values"
    fields: list[doc.Field] = [
        ("model", result.model),
        ("modules", f"{result.selector} · {len(result.instances)} instances"),
        ("runs on", table.provider_words(result)),
        ("inputs", f"recorded at the boundary of each, in one run of the whole model on {input_words}"),
        ("runs", f"{runs} for each, after {options.warmup} to warm up"),
        *(("no nodes", f"{item.words}: nothing of it is left in the graph") for item in result.without_nodes),
        *(("failed", f"{item.identity.words}: {item.error}") for item in result.failed),
        *doc.note_fields(result.notes),
    ]
    instances: list[list[doc.Cell]] = [
        [
            item.identity.words,
            item.identity.class_name,
            *(getattr(item.latency.summary, name) for name in table.SUMMARY),
        ]
        for item in result.instances
        if item.latency is not None
    ]
    class_columns = [doc.Column(f"p50: {name}", "latency") for name in ("mean", "fastest", "slowest", "sum")]
    classes: list[list[doc.Cell]] = [
        [entry.class_name, entry.instances, entry.mean_ms, entry.min_ms, entry.max_ms, entry.total_ms]
        for entry in result.classes()
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(doc.columns(("latency in ms", "name"), "class", *table.LATENCIES), instances),
            doc.Table(doc.columns("class", ("instances", "count"), *class_columns), classes),
        ]
    )
