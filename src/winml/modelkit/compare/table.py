"""Document of a comparison: similarity of two models, and first diverging module."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.compare import records
from winml.modelkit.compare.fidelity import ROUNDING_DB, OutputFidelity
from winml.modelkit.compare.words import interval_words, nearness_words, samples_words
from winml.modelkit.errors import opt
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import FEWEST_FOLDED
from winml.modelkit.tags import address
from winml.modelkit.version import __version__
from winml.modelkit.words import MOST_DB, count_noun, percent_words, sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.records import ProofPart

MAX_MODULE_ROWS = 12
"""Default number of rows of the module table. Chosen: the output fits on a screen."""
LEAST, MOST = 1e-8, 1.0
"""Chosen: ends of the color scale: below rounding of float32, and an error as large as the value."""

_ERRORS = (
    doc.Column("error", "error"),
    doc.Column("SQNR dB", "decibels"),
    doc.Column("cosine", "cosine"),
    doc.Column("largest difference", "error", doc.Detail.PAGE),
)


def comparison_document(result: records.ModelComparison, *, depth: int | None = None) -> doc.Document:
    """Build the document of a comparison; for several parts the worst output first, then each part.

    Args:
        result: The comparison.
        depth: Levels of the module tree. ``None``: all.
    """
    upgrade = result.upgrade if isinstance(result, records.ProofReplay) else None
    parts = [doc.Section(name, comparison_document(part, depth=depth).blocks) for name, part in result.parts.items()]
    return doc.Document(
        [
            doc.Fields([*_comparison_fields(result), *_view_fields(result)]),
            *parts,
            *([] if upgrade is None or not upgrade.modules else [_upgrade_table(upgrade)]),
            *(_module_blocks(result, depth) if result.modules is not None else ()),
            doc.Table(
                doc.columns(("output", "name"), *_ERRORS, ("same top-1", "share"), "remark"),
                list(map(_output_row, result.outputs)),
                name="outputs",
                heading="Outputs",
                detail=doc.Detail.PAGE,
            ),
        ],
        title=f"{Path(result.candidate).name} compared with {Path(result.reference).name}",
        subject="error by module",
        answer=_answer_words(result),
        introduction="Both models were run on the same inputs. The own error of a module is the part of its relative "
        "error that does not come from its inputs.",
        figures=list(_comparison_figures(result)),
    )


def _view_fields(result: records.ModelComparison) -> Iterator[doc.Field]:
    """Yield the command that shows both models, if their modules were compared."""
    if result.modules is not None and result.fingerprint:
        yield doc.view_field(result.reference, result.candidate)


def _answer_words(result: records.ModelComparison) -> str:
    """Answer the comparison in one sentence: the threshold, the worst output, and the module that diverges first."""
    limit = "limit" if isinstance(result, records.ProofReplay) else "threshold"
    verdict = "" if result.verdict is None else f"{'Within' if result.verdict.is_yes else 'Beyond'} the {limit}. "
    fidelity, first = result.worst.fidelity, result.first_divergence
    if fidelity.problem:
        words = f"Output {fidelity.name}: {fidelity.problem}"
    elif fidelity.sqnr_db >= MOST_DB:
        return f"{verdict}The outputs are equal."
    else:
        words = f"The worst output, {fidelity.name}, has an SQNR of {sqnr_words(fidelity.sqnr_db)}"
    if result.modules is None:
        return f"{verdict}{words}."
    module = "No single module diverges" if first is None else f"{first.identity.words} diverges first"
    return f"{verdict}{module}. {words}."


def _comparison_figures(result: records.ModelComparison) -> Iterator[doc.Figure]:
    worst = result.worst
    fidelity, diverging = worst.fidelity, result.first_divergence
    if diverging is not None:
        own = diverging.own_error
        error = f"own error {own:.1e}" if own is not None and math.isfinite(own) else "its own error is not finite"
        value = address.last_segment(diverging.identity.tag)
        yield doc.Figure("diverges first", value, f"{diverging.identity.words}: {error}", "bad")
    elif result.modules is not None:
        yield doc.Figure("diverges first", "none", _first_words(result))
    of_part = f" of {worst.part}" if worst.part else ""
    where = f"{'output' if len(result.outputs) == 1 else 'worst output,'} {fidelity.name}{of_part}"
    if fidelity.problem:
        value = "not finite" if "finity" in fidelity.problem else "not comparable"
        yield doc.Figure("outputs", value, f"{where}: {fidelity.problem}", "bad")
    else:
        meaning = f"{where}: power of the signal over that of the error; 20 dB more is a tenth of the error"
        yield doc.Figure("SQNR", sqnr_words(fidelity.sqnr_db), meaning)
        meaning = "size of the error over the size of the reference"
        if result.threshold is not None:
            meaning += f"; {'within' if result.is_within else 'above'} the threshold of {result.threshold:g}"
        tone: doc.Tone = "" if result.threshold is None else "good" if result.is_within else "bad"
        yield doc.Figure("relative error", f"{fidelity.relative_error:.1e}", meaning, tone)
    if worst.top1_agreement is not None:
        meaning = "of the positions have their largest value at the same index"
        yield doc.Figure("top-1 agreement", percent_words(worst.top1_agreement), meaning)
    if result.modules is not None:
        compared = sum(module.fidelity is not None for module in result.modules)
        is_all = compared == len(result.modules)
        meaning = "every module" if is_all else "the others are fused, or have no value that both models compute"
        yield doc.Figure("modules compared", f"{compared} of {len(result.modules)}", meaning)


def _comparison_fields(result: records.ModelComparison) -> Iterator[doc.Field]:
    yield "reference", result.reference
    yield "candidate", result.candidate
    if result.provider is not None:
        yield "candidate runs on", f"{result.provider.provider.name} on {result.provider.device_words}"
    yield "inputs", samples_words(result.samples)
    if result.parts:
        yield "worst", output_words(result.worst)
    for output in result.outputs if not result.parts else ():
        yield "output", output_words(output)
    if isinstance(result, records.ProofReplay):
        if result.recorded is not None:
            yield from _replay_fields(result, result.recorded)
    elif (verdict := result.verdict) is not None:
        yield "threshold", f"{'met' if verdict.is_yes else 'exceeded'}: {verdict.reason}; {verdict.question}"
    if result.modules is not None or result.first_divergence is not None:
        yield "first", _first_words(result)
    if result.modules is not None:
        reasons = [module.reason for module in result.modules if module.fidelity is None]
        for reason in dict.fromkeys(reasons):
            yield "not compared", f"{count_noun(reasons.count(reason), 'module')}: {reason}"
    yield "made by", f"winml {__version__}", doc.Detail.PAGE
    yield from doc.note_fields(result.notes)


def _replay_fields(result: records.ProofReplay, recorded: ProofPart) -> Iterator[doc.Field]:
    """Yield the limit, and quality and time when the proof was made."""
    yield "limit", f"{'met' if result.is_within else 'not met'}: {result.limit_words}"
    quality = {output.name: sqnr_words(output.sqnr_db) for output in recorded.outputs}
    name, file = result.worst.fidelity.name, "this file" if result.is_recorded_file else recorded.file
    where = f"{file} on {recorded.provider}"
    yield "recorded", f"{quality.get(name, 'nothing')} for {name} of {where}, with {result.versions_words}"
    if result.run_ms is not None and recorded.run_ms is not None:
        yield "time", f"{result.run_ms:.3g} ms a run; {recorded.run_ms:.3g} ms when it was recorded"
    if result.upgrade is not None:
        yield from _upgrade_fields(result.upgrade)


def _upgrade_fields(check: records.UpgradeCheck) -> Iterator[doc.Field]:
    """Yield versions, verdicts, and the outputs that differ beyond rounding."""
    versions = (
        f"{name} {before or 'missing'} → {after or 'missing'}" for name, (before, after) in check.versions.items()
    )
    yield "upgrade", ", ".join(versions) or "equal versions"
    for name, verdict in check.verdicts.items():
        yield f"{name} since", f"{verdict.question}: {verdict.words}"
    for name, values in check.outputs.items():
        if any(value is None or value < ROUNDING_DB for value in values):
            before, after = ("not comparable" if value is None else sqnr_words(value) for value in values)
            yield "output since", f"{name}: {before} → {after}"


def _upgrade_table(check: records.UpgradeCheck) -> doc.Table:
    """Return the table of the modules that differ; equal layers are folded."""
    rows = [(module.tag or "no module", _change_cells(module)) for module in check.modules]
    return doc.Table(
        doc.columns(("module", "name"), "kernels", "own error", "ms", "nodes of the file", "providers"),
        [[name, *cells] for name, cells in rows],
        name="upgrade",
        heading="Modules that differ from the baseline",
        folds=doc.layer_folds(rows),
    )


def _change_cells(module: records.ModuleChange) -> list[doc.Cell]:
    error, times = module.own_error, module.ms
    # An infinite error is that of values that cannot be compared.
    after = "" if error is None else f"{error[1]:.1e}" if math.isfinite(error[1]) else "NaN or infinity"
    return [
        _change_words(module.kernels),
        "" if error is None else f"{error[0]:.1e} → {after}",
        "" if times is None else f"{times[0]:.3g} → {times[1]:.3g}",
        _change_words(module.nodes),
        _change_words(module.providers),
    ]


def _change_words(counts: Mapping[str, records.BeforeAfter]) -> str:
    """Format counts that differ: ``MatMul 4 → 0, FusedMatMul 0 → 4``."""
    return ", ".join(f"{name} {before} → {after}" for name, (before, after) in counts.items())


def output_words(output: records.ComparedOutput) -> str:
    """Describe the similarity of one output."""
    fidelity = output.fidelity
    name = f"{fidelity.name} of {output.part}" if output.part else fidelity.name
    if fidelity.problem:
        return f"{name}: {fidelity.problem}"
    if fidelity.equal_share is not None:
        return f"{name}: {nearness_words(fidelity)}, largest difference {fidelity.max_abs_diff:g}"
    if fidelity.sqnr_db >= MOST_DB:
        return f"{name}: equal"
    text = (
        f"{name}: relative error {fidelity.relative_error:.1e}, SQNR {fidelity.sqnr_db:.1f} dB"
        f"{interval_words(fidelity)}, cosine {fidelity.cosine:.6f}, largest difference {fidelity.max_abs_diff:.1e}"
    )
    if output.top1_agreement is None:
        return text
    return f"{text}, top-1 agreement {100 * output.top1_agreement:.1f} %"


def _first_words(result: records.ModelComparison) -> str:
    """Describe the first diverging module, or the largest errors that add up."""
    diverging = result.first_divergence
    if diverging is None or diverging.fidelity is None:
        modules = result.modules or ()
        largest = max(modules, key=lambda module: module.own_error or 0.0, default=None)
        if largest is None or (largest.own_error or 0.0) <= result.tolerance:
            return f"no module has an own error above the tolerance of {result.tolerance:g}"
        text = f"{largest.own_error:.1e} in {largest.identity.words}"
        return f"no single module diverges: the error builds up; largest own error {text}"
    problem = f": {diverging.fidelity.problem}" if diverging.fidelity.problem else ""
    return f"{diverging.identity.words} diverges first{problem} ({diverging.identity.tag})"


def _module_blocks(result: records.ModelComparison, depth: int | None) -> Iterator[doc.Block]:
    modules, first = result.modules_within(depth), result.first_divergence
    is_upgraded = isinstance(result, records.ProofReplay) and result.upgrade is not None
    compared = [module for module in modules if module.fidelity is not None]
    wrong = [module for module in compared if module.own_error or (module.fidelity and module.fidelity.problem)]
    worst = sorted(wrong, key=lambda module: -(module.own_error or 0.0))[:MAX_MODULE_ROWS]
    places = {id(module): number for number, module in enumerate(compared)}
    brief = list(dict.fromkeys(places[id(module)] for module in (*worst, first) if id(module) in places))
    outline = "" if first is None else "; ▶ and an outline mark the first module that diverges"
    yield doc.Boxes(
        list(_boxes(modules, first)),
        heading=f"Own error by module{outline}",
        size_title="number of modules",
        size_unit="modules",
        shades=doc.Shades("own error", LEAST, MOST, is_logarithmic=True),
    )
    names = (doc.Column("module", "name"), doc.Column("class", detail=doc.Detail.PAGE))
    error, *remaining = _ERRORS
    numbers = (doc.Column("own error", "error"), error, doc.Column("input error", "error"), *remaining)
    rows = [_module_row(module, is_first=module is first) for module in compared]
    yield doc.Table(
        doc.columns(*names, *numbers, "remark"),
        rows,
        name="modules",
        # Without a divergence, the changes since the baseline are the result.
        detail=doc.Detail.VERBOSE if is_upgraded and first is None else doc.Detail.ALWAYS,
        page_folds=list(_fold_layers(compared, rows, numbers, first)),
        heading="Modules, in the order they are computed",
        brief=brief,
        rest=f"{len(brief)} of {len(modules)} modules, those with the largest own error ({opt.verbose} lists all in "
        "the order of computation, and the reasons for those that are not compared)",
        is_searched=True,
    )
    yield doc.Table(
        doc.columns(*names, "reason"),
        [
            (module.identity.words, module.identity.class_name, module.reason)
            for module in modules
            if module.fidelity is None
        ],
        name="missing",
        heading="Modules that are not compared",
        detail=doc.Detail.VERBOSE,
    )


def _module_row(module: records.ComparedModule, *, is_first: bool) -> list[doc.Cell]:
    error, *cells = _error_cells(module.fidelity)
    own_error = None if error is None else module.own_error
    numbers = (own_error, error, module.input_error, *cells)
    return [module.identity.words, module.identity.class_name, *numbers, _module_remark(module, is_first=is_first)]


_LAYER = re.compile(r"(.*?)\.\d+(?=/|$)")
"""Tag of a layer: up to the first number."""
_NUMBER = re.compile(r"\.\d+(?=[./]|$)")
"""Number in a tag or a path."""


def _fold_layers(
    modules: Sequence[records.ComparedModule],
    rows: Sequence[Sequence[doc.Cell]],
    numbers: Sequence[doc.Column],
    first: records.ComparedModule | None,
) -> Iterator[doc.Fold]:
    """Yield a fold for each run of equal layers; no run contains the first diverging module.

    Args:
        modules: Modules in the order of computation.
        rows: Their rows: path, class, numbers, remark.
        numbers: Columns of the numbers.
        first: The first diverging module.
    """
    layers = [
        (tag, [place for place, _ in members])
        for tag, members in itertools.groupby(enumerate(modules), lambda member: _layer_tag(member[1]))
    ]

    def likeness(layer: tuple[str, list[int]]) -> object:
        kinds = [(_NUMBER.sub(".*", modules[place].identity.tag, count=1), rows[place][1]) for place in layer[1]]
        return layer[0] if not layer[0] or any(modules[place] is first for place in layer[1]) else tuple(kinds)

    for _, group in itertools.groupby(layers, likeness):
        run = [places for _, places in group]
        if len(run) < FEWEST_FOLDED:
            continue
        folded = []
        for members in zip(*run, strict=True):
            path = _NUMBER.sub(".*", str(rows[members[0]][0]), count=1)
            spreads = [
                _spread_cell(column, [rows[place][2 + index] for place in members])
                for index, column in enumerate(numbers)
            ]
            folded.append([f"{path} × {len(run)}", rows[members[0]][1], *spreads, ""])
        yield doc.Fold(run[0][0], run[-1][-1] + 1, folded)


def _layer_tag(module: records.ComparedModule) -> str:
    """Tag of the layer of a module; empty outside of numbered layers."""
    match = _LAYER.match(module.identity.tag)
    return match[0] if match else ""


def _spread_cell(column: doc.Column, cells: Sequence[doc.Cell]) -> doc.Number:
    """Format the smallest and the largest number of several cells: ``1.0e-01–1.8e-01``."""
    values = sorted(cell for cell in cells if isinstance(cell, float | int))
    if not values:
        return doc.Number(None)
    ends = dict.fromkeys(map(column.words, (values[0], values[-1])))
    return doc.Number(values[-1], "–".join(ends))


def _error_cells(fidelity: OutputFidelity | None) -> tuple[float | None, ...]:
    """Cells of the columns :data:`_ERRORS`."""
    if fidelity is None or fidelity.problem:
        return (None,) * len(_ERRORS)
    return fidelity.relative_error, fidelity.sqnr_db, fidelity.cosine, fidelity.max_abs_diff


def _module_remark(module: records.ComparedModule, *, is_first: bool) -> str:
    """Join the remarks on a module: first to diverge, unchanged, problem."""
    problem = module.fidelity.problem if module.fidelity is not None else module.reason
    fused = ", ".join(map(address.last_segment, module.fused_with))
    marks = (
        "first to diverge" if is_first else "",
        "own nodes unchanged" if module.is_unchanged else "",
        f"with {fused}" if fused else "",
        problem,
    )
    return ", ".join(filter(None, marks))


def _output_row(output: records.ComparedOutput) -> list[doc.Cell]:
    fidelity = output.fidelity
    return [fidelity.name, *_error_cells(fidelity), output.top1_agreement, fidelity.problem]


def _boxes(modules: Sequence[records.ComparedModule], diverging: records.ComparedModule | None) -> Iterator[doc.Box]:
    """Yield a box for each module, dark for a large own error; calls share a box."""

    def size(module: records.ComparedModule) -> float:
        return -1.0 if module.own_error is None else module.own_error

    worst: dict[str, records.ComparedModule] = {}
    for module in modules:
        previous = worst.get(module.identity.tag)
        if previous is None or module is diverging or (previous is not diverging and size(module) > size(previous)):
            worst[module.identity.tag] = module
    for tag in sorted(worst, key=address.depth):
        module = worst[tag]
        is_first = diverging is not None and tag == diverging.identity.tag
        text = _box_words(module)
        yield doc.Box(
            key=tag,
            parent=address.nearest_ancestor(tag, worst),
            label=address.last_segment(tag),
            size=1,
            shade=math.nan if module.own_error is None else module.own_error,
            words=text,
            lines=(module.identity.words, f"own error {text}", _module_remark(module, is_first=is_first)),
            is_marked=is_first,
            kind=module.identity.class_name,
        )


def _box_words(module: records.ComparedModule) -> str:
    if module.fidelity is not None and module.fidelity.problem:
        return "not finite" if "finity" in module.fidelity.problem else module.fidelity.problem
    return "–" if module.own_error is None else f"{module.own_error:.1e}"
