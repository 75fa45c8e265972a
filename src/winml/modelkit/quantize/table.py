"""Documents of a quantization and of a search for bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from winml.modelkit.compare.words import coverage_words, fidelity_words
from winml.modelkit.errors import opt
from winml.modelkit.quantize.records import BudgetSearch, QuantizedFile
from winml.modelkit.report import document as doc
from winml.modelkit.tags import address
from winml.modelkit.transform.table import written_fields
from winml.modelkit.words import size_change_words, size_words, sqnr_words

_MAX_MODULE_ROWS = 12
"""Default number of rows of the module table, modules with unquantized nodes first. Chosen: the summary fits on a
screen."""


def quantization_document(result: QuantizedFile) -> doc.Document:
    """Build the document of a quantization."""
    before, after = result.before, result.after
    quantized = f"{result.quantized} of {result.quantized + sum(result.left.values())}"
    change = size_change_words(before.size_bytes, after.size_bytes)
    fields: list[doc.Field] = [
        ("precision", f"{result.precision} ({', '.join(result.modes)})" if result.modes else None),
        ("KV cache", f"{result.kv_cache}, a scale for each channel" if result.kv_cache is not None else None),
        ("calibrated", result.calibration.words if result.calibration is not None else None),
        ("budget", _describe_budget(result.budget) if result.budget is not None else None),
        *((f"in {name}", selector) for selector, name in (result.budget.rules if result.budget else {}).items()),
        ("quantized", f"{quantized} nodes with weights{_mixture_words(result)}" if result.modes else None),
        ("activations", _activation_words(result) or None),
        *(("left", f"{count} {reason}") for reason, count in result.left.items()),
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)} ({change})"),
        ("opset", f"{before.opset} → {after.opset}" if before.opset != after.opset else None),
        ("hierarchy", coverage_words(result.coverage, is_tagged=result.is_tagged)),
        (
            "verified",
            "skipped: the files were not compared" if result.fidelity is None else fidelity_words(result.fidelity),
        ),
        *written_fields(result.files),
        *doc.note_fields(result.notes),
    ]
    # Modules with unquantized nodes first: they differ from the request.
    modules = sorted(result.modules, key=lambda module: (not module.left, module.quantized > 0 and bool(module.left)))
    rows: list[tuple[str, list[doc.Cell]]] = [
        (
            module.tag or "?",
            [
                module.requested,
                module.actual,
                module.quantized,
                ", ".join(f"{count} {reason}" for reason, count in module.left.items()),
            ],
        )
        for module in modules
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            *(_budget_blocks(result.budget) if result.budget is not None else ()),
            doc.Table(
                doc.columns(("module", "name"), "requested", "actual", ("quantized", "count"), "left"),
                [[name, *cells] for name, cells in rows],
                name="modules",
                heading="Precision by module",
                folds=doc.layer_folds(rows),
                brief=range(_MAX_MODULE_ROWS),
                rest=f"… and {{}} more rows ({opt.verbose} shows every module)",
            ),
        ]
    )


def budget_document(result: QuantizedFile) -> doc.Document:
    """Build the report of a search: selected bits, and results of other sizes."""
    document = quantization_document(result)
    return replace(
        document,
        title=result.model_path.name,
        subject="bits by module",
        introduction="Each module was quantized alone in each format; the formats were chosen so that the model is "
        "within the limit and its outputs change least. SQNR is the signal-to-quantization-noise ratio of the worst "
        "output.",
        figures=[*_budget_figures(result.budget), *_file_figures(result)] if result.budget is not None else (),
    )


def _budget_figures(search: BudgetSearch) -> Iterator[doc.Figure]:
    """Yield the figures of a search: mean bits, SQNR and perplexity."""
    meaning = f"for each parameter, scales included; limit: {search.limit}"
    yield doc.Figure("mean bits", f"{search.mean_bits:.2f} bits", meaning)
    chosen = next((trial for trial in search.frontier if trial.is_chosen), None)
    if chosen is not None and chosen.sqnr_db is not None:
        meaning = f"of the worst output on {search.samples} samples that the formats were chosen by; higher is better"
        yield doc.Figure("SQNR", sqnr_words(chosen.sqnr_db), meaning)
    if search.perplexity is not None and search.float_perplexity is not None:
        meaning = f"on held-out samples, {search.float_perplexity:.4g} before; lower is better"
        yield doc.Figure("perplexity", f"{search.perplexity:.4g}", meaning)


def _file_figures(result: QuantizedFile) -> Iterator[doc.Figure]:
    """Yield the figures of a file: size and number of quantized nodes."""
    before, after = result.before.size_bytes, result.after.size_bytes
    meaning = f"of the file, {size_words(before)} before ({size_change_words(before, after)})"
    yield doc.Figure("size", size_words(after), meaning)
    unchanged = sum(result.left.values())
    meaning = "nodes with weights" if not unchanged else f"nodes with weights; the table lists why {unchanged} are not"
    yield doc.Figure("quantized", f"{result.quantized} of {result.quantized + unchanged}", meaning)


def _describe_budget(search: BudgetSearch) -> str:
    """Describe limit, selected variant and measurements of a search."""
    perplexity = ""
    if search.perplexity is not None and search.float_perplexity is not None:
        perplexity = f"; perplexity {search.perplexity:.4g} on held-out samples, {search.float_perplexity:.4g} before"
    return (
        f"{search.limit}: {search.form}, {search.mean_bits:.2f} bits per parameter; {search.measured} variants "
        f"measured on {search.samples} samples{perplexity}"
    )


def _budget_blocks(search: BudgetSearch) -> Iterator[doc.Block]:
    """Yield chart, boxes and tables of a search for bits."""
    perplexity = [doc.Column("perplexity", "score")] if search.float_perplexity is not None else []
    formats = dict.fromkeys(name for module in search.modules for name in module.alone_db)
    algorithms = dict.fromkeys(name for module in search.modules for name in module.own_db)
    yield doc.Dots(
        [
            doc.Dot(
                name=f"{trial.form}, {trial.mean_bits:.2f} bits",
                grade="best" if trial.is_chosen else "fair" if not trial.is_mixture else "good",
                value=trial.sqnr_db,
                size=3.0 if trial.is_chosen else 1.0,
                bar=trial.size_bytes,
                bar_words=size_words(trial.size_bytes),
                value_words=sqnr_words(trial.sqnr_db),
            )
            for trial in search.frontier
            if trial.sqnr_db is not None
        ],
        heading="Size against quality: formats of the whole model, ★ is the chosen one",
        value_title="SQNR in dB, more is better",
        bar_title="size of the weights",
    )
    yield doc.Boxes(
        list(_bit_boxes(search)),
        heading="Bits by module",
        size_title="number of parameters",
        size_unit="parameters",
        shades=doc.Shades("bits of a weight", low=0.0),
        is_by_class=True,
        kind_title="format",
    )
    yield doc.Table(
        doc.columns(
            "format",
            ("mean bits", "bits"),
            ("weights", "bytes"),
            ("SQNR dB", "decibels"),
            ("lower end", "decibels"),
            *perplexity,
            "chosen",
        ),
        [
            [
                trial.form,
                trial.mean_bits,
                trial.size_bytes,
                trial.sqnr_db,
                trial.lower_sqnr_db,
                *([trial.perplexity] if perplexity else []),
                "chosen" if trial.is_chosen else "",
            ]
            for trial in search.frontier
        ],
        name="frontier",
        heading="Formats of the whole model",
        detail=doc.Detail.VERBOSE,
    )
    yield doc.Table(
        [
            *doc.columns(("module", "name"), "format", ("parameters", "parameters"), ("size", "bytes")),
            *(doc.Column(f"{name} dB", "decibels") for name in formats),
        ],
        [
            [
                module.tag,
                module.form,
                module.parameters,
                module.size_bytes,
                *(module.alone_db.get(name) for name in formats),
            ]
            for module in search.modules
        ],
        name="bits",
        heading="Format of each module; dB is the SQNR with this module alone in a format",
        is_searched=True,
        detail=doc.Detail.VERBOSE,
    )
    yield doc.Table(
        doc.columns(("module", "name"), "format", *(doc.Column(f"{name} dB", "decibels") for name in algorithms)),
        [
            [module.tag, module.form, *(module.own_db.get(name) for name in algorithms)]
            for module in search.modules
            if module.own_db
        ],
        name="algorithms",
        heading="Algorithms by module; dB of the outputs of its own products",
        detail=doc.Detail.VERBOSE,
    )


def _bit_boxes(search: BudgetSearch) -> Iterator[doc.Box]:
    """Yield a box for each searched module, and for its ancestors."""
    chosen = {module.tag: module for module in search.modules}
    tags = dict.fromkeys(tag for tag_below in chosen for tag in address.lineage(tag_below))
    for tag in sorted(tags, key=address.sort_key):
        module, name = chosen.get(tag), address.last_segment(tag)
        bits = 8 * module.size_bytes / max(module.parameters, 1) if module is not None else math.nan
        yield doc.Box(
            key=tag,
            parent=address.nearest_ancestor(tag, tags),
            label=name,
            size=0 if module is None else module.parameters,
            shade=bits,
            words="" if module is None else f"{module.form}, {bits:.1f} bits",
            lines=(tag,)
            if module is None
            else (tag, module.form, f"{bits:.2f} bits of a weight", f"{module.parameters:,} parameters", module.why),
            kind="" if module is None else module.form,
        )


def _mixture_words(result: QuantizedFile) -> str:
    """Describe the number of nodes by precision, if there are several precisions."""
    counts: Counter[str] = Counter()
    for module in result.modules:
        counts += Counter({module.requested: module.quantized})
    return f" ({', '.join(f'{precision} {count}' for precision, count in counts.items())})" if len(counts) > 1 else ""


def _activation_words(result: QuantizedFile) -> str:
    """Describe the number of quantized activations by bits and kind; empty if all have the same bits."""
    by_bits: dict[int, Counter[str]] = {}
    for count in result.activations:
        by_bits.setdefault(count.bits, Counter())[count.kind] += count.values
    total = sum(counts.total() for counts in by_bits.values())
    parts = []
    for bits, counts in sorted(by_bits.items()):
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items() if kind)
        share = f"{counts.total()} of {total} ({counts.total() / total:.0%}) in {bits} bits"
        parts.append(f"{share}: {kinds}" if kinds else share)
    return "; ".join(parts) if len(parts) > 1 else ""
