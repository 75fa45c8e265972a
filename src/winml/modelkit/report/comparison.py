"""How two models agree, and which module is the first to part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from winml.modelkit.compare.words import nearness_words
from winml.modelkit.hierarchy import address
from winml.modelkit.report import document as doc
from winml.modelkit.results.comparison import ComparedModule, ComparedOutput, ModelComparison
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun

__all__ = ["comparison_document", "first_words", "output_words"]

SHOWN_MODULES = 12
"""Rows of the module table unless all are asked for. Chosen: the answer fits on a screen."""
LEAST, MOST = 1e-8, 1.0
"""Chosen: ends of the colour scale: below rounding of float32, and an error as large as the value."""

_ERRORS = (
    doc.Column("error", "error"),
    doc.Column("SQNR dB", "decibels"),
    doc.Column("cosine", "cosine"),
    doc.Column("largest difference", "error", doc.Detail.PAGE),
)


def comparison_document(result: ModelComparison, *, depth: int | None = None) -> doc.Document:
    """Describe a comparison; of several parts what is farthest off in all of them first, then each part by itself.

    Args:
        result: The comparison.
        depth: Levels of the module tree. None: all.
    """
    parts = [doc.Section(name, comparison_document(part, depth=depth).blocks) for name, part in result.parts.items()]
    return doc.Document(
        [
            doc.Fields(list(_fields(result))),
            *parts,
            *(_module_blocks(result, depth) if result.modules is not None else ()),
            doc.Table(
                doc.columns(("output", "name"), *_ERRORS, ("same top-1", "share"), "remark"),
                list(map(_output_row, result.outputs)),
                name="outputs",
                heading="Outputs",
                detail=doc.Detail.PAGE,
            ),
        ],
        title=f"{Path(result.candidate).name} beside {Path(result.reference).name}",
        subject="where two models part",
        introduction="Both were run on the same values. The own error of a module is the part of its relative error "
        "that it was not fed.",
    )


def _fields(result: ModelComparison) -> Iterator[doc.Field]:
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
        reasons = [module.reason for module in result.modules if module.fidelity is None]
        for reason in dict.fromkeys(reasons):
            yield "not seen", f"{count_noun(reasons.count(reason), 'module')}: {reason}"
    yield "made by", f"winml {__version__}", doc.Detail.PAGE
    yield from doc.note_fields(result.notes)


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


def _module_blocks(result: ModelComparison, depth: int | None) -> Iterator[doc.Block]:
    modules, first = result.modules_within(depth), result.first_divergence
    compared = [module for module in modules if module.fidelity is not None]
    wrong = [module for module in compared if module.own_error or (module.fidelity and module.fidelity.problem)]
    worst = sorted(wrong, key=lambda module: -(module.own_error or 0.0))[:SHOWN_MODULES]
    brief = [number for number, module in enumerate(compared) if module in worst or module is first]
    outline = "" if first is None else ", and ▶ with a blue outline is the first module to part"
    yield doc.Boxes(
        list(_boxes(modules, first)),
        heading=f"Where errors arise: colour is own error{outline}",
        shades=doc.Shades("own error", LEAST, MOST, is_logarithmic=True),
    )
    names = (doc.Column("module", "name"), doc.Column("class", detail=doc.Detail.PAGE))
    error, *others = _ERRORS
    numbers = (doc.Column("own error", "error"), error, doc.Column("of inputs", "error"), *others)
    yield doc.Table(
        doc.columns(*names, *numbers, "remark"),
        [_module_row(module, is_first=module is first) for module in compared],
        name="modules",
        heading="Modules, in the order they are computed",
        brief=brief,
        rest=f"the {len(brief)} with the largest own error of {len(modules)} (--verbose shows all)",
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


def _module_row(module: ComparedModule, *, is_first: bool) -> list[doc.Cell]:
    fidelity = module.fidelity
    names = (module.identity.words, module.identity.class_name)
    if fidelity is None or fidelity.problem:
        numbers: tuple[float | None, ...] = (None, None, module.input_error, None, None, None)
    else:
        numbers = (
            module.own_error,
            fidelity.relative_error,
            module.input_error,
            fidelity.sqnr_db,
            fidelity.cosine,
            fidelity.max_abs_diff,
        )
    return [*names, *numbers, _remark(module, is_first=is_first)]


def _remark(module: ComparedModule, *, is_first: bool) -> str:
    problem = module.fidelity.problem if module.fidelity is not None else module.reason
    marks = ("first to part" if is_first else "", "unchanged" if module.is_unchanged else "", problem)
    return ", ".join(filter(None, marks))


def _output_row(output: ComparedOutput) -> list[doc.Cell]:
    fidelity = output.fidelity
    numbers = (fidelity.relative_error, fidelity.sqnr_db, fidelity.cosine, fidelity.max_abs_diff)
    measured = [None] * 4 if fidelity.problem else numbers
    return [fidelity.name, *measured, output.top1_agreement, fidelity.problem]


def _boxes(modules: Sequence[ComparedModule], first: ComparedModule | None) -> Iterator[doc.Box]:
    """Yield a box for each module, dark where its own error is large; calls share a box."""

    def size(module: ComparedModule) -> float:
        return -1.0 if module.own_error is None else module.own_error

    worst: dict[str, ComparedModule] = {}
    for module in modules:
        known = worst.get(module.identity.tag)
        if known is None or module is first or (known is not first and size(module) > size(known)):
            worst[module.identity.tag] = module
    for tag in sorted(worst, key=address.depth):
        module = worst[tag]
        is_first = first is not None and tag == first.identity.tag
        words = _box_words(module)
        yield doc.Box(
            key=tag,
            parent=address.nearest_ancestor(tag, worst),
            label=tag.rpartition(address.SEPARATOR)[2],
            size=1,
            shade=module.own_error or 0.0,
            words=words,
            lines=(module.identity.words, f"own error {words}", _remark(module, is_first=is_first)),
            is_marked=is_first,
        )


def _box_words(module: ComparedModule) -> str:
    if module.fidelity is not None and module.fidelity.problem:
        return "not finite" if "finity" in module.fidelity.problem else module.fidelity.problem
    return "–" if module.own_error is None else f"{module.own_error:.1e}"
