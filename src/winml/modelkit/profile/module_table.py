"""Documents of module times: in a run of the whole model, and of each module alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from winml.modelkit.errors import opt
from winml.modelkit.profile import table
from winml.modelkit.profile.memory_table import memory_blocks
from winml.modelkit.profile.module_profile import ModuleProfile, ModuleTime
from winml.modelkit.profile.module_records import (
    ComparedProfiles,
    ModulePerfResult,
    ModuleRatio,
    ProfiledDecoder,
    ProfiledModules,
    TorchModules,
    TorchPhase,
)
from winml.modelkit.profile.module_rows_table import (
    TimedRow,
    TimeT,
    class_rows,
    fold_layers,
    folded_rows,
    in_phase,
    module_rows,
    module_table,
)
from winml.modelkit.profile.records import PerfResult
from winml.modelkit.profile.statistics import summarize
from winml.modelkit.report import document as doc
from winml.modelkit.report.placements import placement_table
from winml.modelkit.tags import address
from winml.modelkit.words import count_noun, size_words, time_words

MAX_LISTED_OPERATORS = 3
"""Maximum number of operators per module in a terminal. Chosen: they fit on one line."""
_MAX_LISTED_FUSED = 3
"""Maximum number of fused modules listed with a module. Chosen: as for operators."""
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
    phases = profiled.phases
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
    charts = [block for block in times.blocks if isinstance(block, doc.Boxes)]
    tables: list[doc.Block] = [block for block in times.blocks if not isinstance(block, doc.Boxes)]
    for name, phase in phases.items():
        if phase.memory is not None:
            tables += memory_blocks(phase, phase.memory, name, depth=depth, top=top)
    if main.placement:
        tables.append(placement_table(main.placement, main.result.provider.device))
    return doc.Document(
        [blocks[0], *charts, *blocks[1:], *tables],
        doc.Fields([*times.summary.rows, *origin]),
        title=Path(main.result.model).name,
        subject="time by module",
        answer=_largest_words(main.profile),
        introduction=f"{_clock_words(main)}{where}, charged to the PyTorch module each node came from; of each kernel "
        f"{_measure_words(main.profile)} of {len(main.profile.run_ms)} runs with profiling on.",
        figures=[figure for name, phase in phases.items() for figure in _phase_figures(name, phase.profile)],
    )


def compared_document(
    compared: ComparedProfiles, *, depth: int | None = None, top: int | None = None, by_class: bool = False
) -> doc.Document:
    """Build the document of the times of a model's modules beside those of a baseline.

    Args:
        compared: The measured times.
        depth: As in :func:`profile_document`.
        top: As in :func:`profile_document`, by the time that a module gained or lost.
        by_class: As in :func:`profile_document`.
    """
    result = compared.result
    assert result.baseline is not None  # two models were profiled
    names = table.side_names(result)
    fields, *latencies = table.perf_blocks(result)
    charts: list[doc.Block] = [fields]
    tables: list[doc.Block] = []
    order = "in alternation" if compared.ratios else "one model after the other"
    for phase, sides in compared.phases.items():
        profiles = [side.profile for side in sides]
        if isinstance(sides[0], TorchPhase):
            tables.append(_ratio_table(sides[0], sides[1].profile, phase, depth, top))
            continue
        tables.append(_compared_table(compared, profiles, names, phase, depth, top, is_hidden=by_class))
        tables.append(_compared_classes(profiles, names, phase, top, is_hidden=not by_class))
    return doc.Document(
        [*charts, *latencies, *tables],
        doc.Fields(
            [*_overhead_fields(compared.phases)]
            if isinstance(compared.baseline, TorchModules)
            else [
                ("modules", f"profiled {order}; profiling slows down every kernel"),
                doc.view_field(result.baseline.name, result.model),
            ]
        ),
        title=f"{result.baseline.name} → {result.model}",
        subject="time by module",
        answer=table.perf_document(result).answer,
        introduction="The latency was measured in alternation, without profiling. Compare the times of modules with "
        "each other, not with the latency.",
        figures=list(table.latency_figures(result)),
    )


def _overhead_fields(phases: Mapping[str, tuple[ProfiledModules | TorchPhase, ProfiledModules]]) -> Iterator[doc.Field]:
    """Yield how both were measured, with the time that hooks and profiling add to a run."""
    yield "modules", "measured in alternation: PyTorch with forward hooks, ONNX Runtime with profiling on"
    for phase, (torch, model) in phases.items():
        assert model.result.baseline is not None  # two models were measured
        words = [
            f"{name} {time_words(summarize(profile.run_ms).p50)} ms ({time_words(latency.summary.p50)} ms without)"
            for name, profile, latency in (
                ("with hooks", torch.profile, model.result.baseline.latency),
                ("with profiling", model.profile, model.result.latency),
            )
        ]
        yield in_phase("a run", phase), ", ".join(words)
    yield "fused", "modules without a kernel of their own are charged to the module that they were fused into, in both"


def _ratio_table(torch: TorchPhase, model: ModuleProfile, phase: str, depth: int | None, top: int | None) -> doc.Table:
    """Build the table of the modules in ONNX Runtime beside PyTorch, the largest ratio first."""
    ratios = {ratio.tag: ratio for ratio in torch.ratios}
    rows: list[tuple[float, list[doc.Cell]]] = []
    for module in folded_rows(module_rows([model], depth=depth)):
        times = ModuleRatio.of_layers([ratios[tag] for tag in module.tags])
        if not (times.baseline_ms or times.model_ms):
            continue
        ratio = times.ratio
        value = None if ratio is None else ratio.value
        is_bounded = ratio is not None and ratio.low is not None and ratio.high is not None
        cells: list[doc.Cell] = [
            module.names[1],
            module.row.entry.class_name,
            times.baseline_ms,
            times.model_ms,
            None if value is None or (ratio and ratio.is_disturbed) else doc.Number(value, f"{value:.2f}"),
            f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio is not None and is_bounded else "",
            times.verdict_words,
        ]
        rows.append((-1.0 if value is None else value, cells))
    rows.sort(key=lambda row: -row[0])
    return doc.Table(
        doc.columns(
            (in_phase("module", phase), "name"),
            doc.Column("class", detail=doc.Detail.PAGE),
            doc.Column("PyTorch ms", "ms", key="total of the modules inside and its own"),
            doc.Column("ONNX Runtime ms", "ms", key="total of the modules inside and its own"),
            ("ratio", "score"),
            "95 % interval",
            _VERDICT,
        ),
        [cells for _, cells in rows][:top],
        name=f"ratios{phase}",
        heading=in_phase("Modules in ONNX Runtime beside PyTorch", phase),
        is_searched=phase in ("", "step"),
    )


def _compared_table(
    compared: ComparedProfiles,
    profiles: Sequence[ModuleProfile],
    names: Sequence[str],
    phase: str,
    depth: int | None,
    top: int | None,
    *,
    is_hidden: bool,
) -> doc.Table:
    """Build the table of the modules of two profiles, side by side."""
    rows = module_rows(profiles, depth=depth)
    ratios = {ratio.tag: ratio for ratio in compared.ratios.get(phase, ())}
    if top is not None:
        rows = sorted(rows, key=lambda row: -abs(_ends(row)[1] - _ends(row)[0]))[:top]
    return module_table(
        rows,
        [] if top is not None else list(fold_layers(rows)),
        [
            *_compared_columns(profiles, names),
            *([_VERDICT] if ratios else []),
            doc.Column("weights", "bytes", key="weights in the file, with those of the modules inside"),
        ],
        lambda module: [
            *_compared_cells(module.row),
            *([_verdict_cell(ratios, module.tags)] if ratios else []),
            _weights_cell(compared, module.tags),
        ],
        is_tree=top is None,
        is_hidden=is_hidden,
        phase=phase,
    )


def _compared_classes(
    profiles: Sequence[ModuleProfile], names: Sequence[str], phase: str, top: int | None, *, is_hidden: bool
) -> doc.Table:
    """Build the table of the classes of two profiles, side by side."""
    return doc.Table(
        doc.columns("class", *_compared_columns(profiles, names)),
        [[row.entry.class_name, *_compared_cells(row)] for row in class_rows(profiles, top)],
        name=f"classes{phase}",
        heading=in_phase("Classes", phase),
        detail=doc.Detail.PAGE if is_hidden else doc.Detail.ALWAYS,
    )


def _compared_columns(profiles: Sequence[ModuleProfile], names: Sequence[str]) -> list[doc.Column]:
    """Build the columns of two profiles: total time of each, ratio and change."""
    unit = profiles[-1].unit
    return [
        *(doc.Column(f"{name} {unit}", "ms", key="total of the modules inside and its own") for name in names),
        doc.Column("ratio", "score"),
        doc.Column(f"change {unit}", "ms"),
    ]


def _ends(row: TimedRow[TimeT]) -> tuple[float, float]:
    """Return the total time of a row in both profiles."""
    before, after = (0.0 if time is None else time.total_ms for time in row.times)
    return before, after


def _compared_cells(row: TimedRow[TimeT]) -> Iterator[doc.Cell]:
    before, after = _ends(row)
    yield from (before, after)
    yield doc.Number(after / before, f"{after / before:.2f}") if before else None
    yield doc.Number(after - before, f"{after - before:+.3f}")


_VERDICT = doc.Column("verdict", tones={"slower": "bad", "faster": "good"})


def _verdict_cell(ratios: Mapping[str, ModuleRatio], tags: Iterable[str]) -> str:
    """Answer whether modules are faster than in the baseline; empty for modules that only one of both has."""
    layers = [ratios[tag] for tag in tags if tag in ratios]
    return ModuleRatio.of_layers(layers).verdict_words if layers else ""


def _weights_cell(compared: ComparedProfiles, tags: Iterable[str]) -> doc.Number:
    """Format the size of the weights of modules in both files: ``1.8 MB → 452.7 kB``."""
    sides = (compared.baseline_weights, compared.model_weights)
    sizes = [sum(weights.get(tag, 0) for tag in tags) for weights in sides]
    words = list(map(size_words, sizes))
    return doc.Number(sizes[-1], words[0] if words[0] == words[1] else " → ".join(words))


def _largest_words(profile: ModuleProfile) -> str:
    """Name the class with the longest self time, and its share; empty without kernels."""
    longest = max(profile.by_class(), key=lambda entry: entry.self_ms, default=None)
    if longest is None:
        return ""
    return f"{longest.class_name} takes {_share(longest.self_ms, profile):.0%} of the kernel time."


def _phase_figures(phase: str, profile: ModuleProfile) -> Iterator[doc.Figure]:
    """Yield the figures of one phase: kernel time, largest class, slowest module, unattributed share.

    Times that other load slowed have no figure, only shares.
    """
    unit, run = profile.unit, profile.whole_ms
    of_phase = f" ({phase})" if phase else ""
    is_doubtful = summarize(profile.run_ms).is_disturbed
    if not is_doubtful:
        meaning = f"of {run:.3f} {unit} for a run with profiling on; in the rest no kernel ran"
        yield doc.Figure(f"kernel time{of_phase}", f"{profile.kernel_ms:.3f} {unit}", meaning)
    longest = max(profile.by_class(), key=lambda entry: entry.self_ms, default=None)
    if longest is not None:
        instances = count_noun(longest.instances, "module")
        meaning = f"of the kernel time is self time of {instances} of {longest.class_name}"
        yield doc.Figure(f"largest class{of_phase}", f"{_share(longest.self_ms, profile):.1%}", meaning)
    slowest = max(profile.modules(), key=lambda module: module.self_ms, default=None)
    if slowest is not None:
        value = f"{_share(slowest.self_ms, profile):.1%}" if is_doubtful else f"{slowest.self_ms:.3f} {unit}"
        meaning = f"self time of {slowest.path or slowest.tag}, a {slowest.class_name}"
        yield doc.Figure(f"slowest module{of_phase}", value, f"{'of the kernel time is ' * is_doubtful}{meaning}")
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
    modules, classes = module_rows(runs, depth=depth, top=top), class_rows(runs, top)
    folds = [] if top is not None else list(fold_layers(modules))
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
        module_table(
            modules,
            folds,
            [
                *times,
                *([doc.Column(f"each {runs[-1].unit}", key="total of each")] if folds else []),
                doc.Column("output bytes", "bytes", doc.Detail.PAGE),
                operators,
            ],
            lambda module: [
                *_time_cells(module.row, runs),
                *([module.each] if folds else []),
                module.row.entry.output_bytes,
                _operator_cell(module.row),
            ],
            is_tree=top is None,
            is_hidden=by_class,
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


def _time_columns(phases: Sequence[str], unit: str) -> list[doc.Column]:
    """Build the columns of each phase: total, share and self time; kernels for a single phase."""
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


def _time_cells(row: TimedRow[TimeT], profiles: Sequence[ModuleProfile]) -> Iterator[doc.Cell]:
    for time, profile in zip(row.times, profiles, strict=True):
        total_ms, self_ms = (0.0, 0.0) if time is None else (time.total_ms, time.self_ms)
        yield from (total_ms, _share(total_ms, profile), self_ms)
    if len(profiles) == 1:
        yield row.entry.total_kernels


def _share(milliseconds: float, profile: ModuleProfile) -> float:
    """Share of the kernel time, 0 to 1."""
    return milliseconds / profile.kernel_ms if profile.kernel_ms else 0.0


def _operator_cell(row: TimedRow[TimeT]) -> doc.Cell:
    """Format the operators with their shares of the self time in the last phase: ``MatMul 85%, Mul 15%``."""
    time = row.times[-1]
    if time is None:
        return ""
    operators = [f"{name} {ms / time.self_ms:.0%}" for name, ms in time.operators.items() if time.self_ms and ms]
    fused = [address.last_segment(tag) for tag in time.fused_with] if isinstance(time, ModuleTime) else []
    listed = doc.first_of(operators, MAX_LISTED_OPERATORS, "and {} others")
    if not fused:
        return listed
    merged = doc.first_of(fused, _MAX_LISTED_FUSED, "{} others")
    return doc.Shortened(f"{listed.short} (fused with {merged.short})", f"{listed.full} (fused with {merged.full})")


def _measure_words(profile: ModuleProfile) -> str:
    """Name the measure of a kernel over the runs."""
    return "the minimum" if profile.unit == "kcycles" else "the mean over the middle half"


def _sum_fields(profiles: Mapping[str, ModuleProfile]) -> Iterator[doc.Field]:
    """Yield the totals over all modules, and the time not included."""

    def words(of: Callable[[ModuleProfile], str]) -> str:
        return ", ".join(f"{name} {of(profile)}".strip() for name, profile in profiles.items())

    def kernel_words(profile: ModuleProfile) -> str:
        unit = profile.unit
        return f"{profile.kernel_ms:.3f} {unit} of {profile.whole_ms:.3f} {unit} per run"

    longest = max(profiles.values(), key=lambda profile: len(profile.run_ms))
    yield "times", f"of each kernel, {_measure_words(longest)} of {len(longest.run_ms)} runs with profiling on"
    yield "kernels", words(kernel_words)
    yield "outside", f"{words(lambda profile: f'{profile.outside_ms:.3f} {profile.unit}')} in which no kernel ran"

    def unattributed_words(profile: ModuleProfile) -> str:
        return f"{profile.unattributed_ms:.3f} {profile.unit} ({profile.unattributed_share:.2%} of kernel time)"

    yield "unattributed", words(unattributed_words)


def _time_boxes(profile: ModuleProfile, caption: str) -> doc.Boxes:
    """Build the boxes of all modules, sized and shaded by self time."""
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
        *(("no nodes", f"{module.words}: nothing of it is left in the graph") for module in result.without_nodes),
        *(("failed", f"{instance.identity.words}: {instance.error}") for instance in result.failed),
        *doc.note_fields(result.notes),
    ]
    instances: list[list[doc.Cell]] = [
        [
            instance.identity.words,
            instance.identity.class_name,
            *(getattr(instance.latency.summary, name) for name in table.SUMMARY),
        ]
        for instance in result.instances
        if instance.latency is not None
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
