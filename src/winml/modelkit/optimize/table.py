"""Tables of an optimized file, and of a check of capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from winml.modelkit.compare.words import coverage_words, equality_words
from winml.modelkit.errors import opt
from winml.modelkit.optimize.records import CheckedCapability, OptimizationCheck, OptimizedFile
from winml.modelkit.report import document as doc
from winml.modelkit.transform.table import written_fields
from winml.modelkit.words import count_noun, size_words

_MAX_LISTED_MODULES = 3
"""Maximum number of modules per capability without ``--verbose``. Chosen: they fit on a line."""
_MAX_MODULE_ROWS = 12
"""Maximum number of rows of the module table without ``--verbose``. Chosen: the whole summary fits on a screen."""


def optimization_check_document(check: OptimizationCheck) -> doc.Document:
    """Describe the effect of an optimization, and the fusions prevented by dynamic sizes."""
    busy = [bool(entry.count or entry.removed or entry.blocked) for entry in check.capabilities]
    idle = f"{busy.count(False)} capabilities would do nothing"
    fields: list[doc.Field] = [
        ("nodes", f"{check.nodes_before} → {check.nodes_after}"),
        ("nothing", None if all(busy) else doc.Shortened(f"{idle} ({opt.verbose} shows them)", idle)),
        *doc.note_fields(check.notes),
        ("wrote", "nothing: this is a check"),
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns("capability", "would", "modules"),
                [[entry.name, _effect_words(entry), _module_list(entry.modules)] for entry in check.capabilities],
                brief=[number for number, is_busy in enumerate(busy) if is_busy],
            ),
            doc.Table(
                doc.columns("prevented by a dynamic size", ("times", "count"), ("module", "name"), "size"),
                [
                    [entry.name, fusion.count, fusion.module, _blocking_words(fusion.dimensions, fusion.only_at_one)]
                    for entry in check.capabilities
                    for fusion in entry.blocked
                ],
            ),
        ]
    )


def _effect_words(entry: CheckedCapability) -> str:
    if entry.count is None:
        return f"remove {count_noun(entry.removed or 0, 'node')}"
    return f"fire {count_noun(entry.count, 'time')}"


def _module_list(modules: Mapping[str, int]) -> doc.Shortened:
    return doc.first_of(
        [f"{tag or '(no tag)'} {count}" for tag, count in modules.items()], _MAX_LISTED_MODULES, "and {} more"
    )


def _blocking_words(dimensions: Mapping[str, Iterable[str]], only_at_one: bool) -> str:
    sizes = ", ".join(f"{name} ({', '.join(places)})" for name, places in dimensions.items())
    return f"{sizes}, at 1 only" if only_at_one else sizes


def optimization_document(result: OptimizedFile) -> doc.Document:
    """Describe nodes, operators, sizes and modules before and after."""
    before, after = result.before, result.after
    operators = [f"{name} {counts[0]} → {counts[1]}" for name, counts in result.operator_changes().items()]
    applied = ", ".join(f"{name} {count}" for name, count in result.fired.items() if count)
    fields: list[doc.Field] = [
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("operators", ", ".join(operators) or "as before"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)}"),
        ("opset", f"{before.opset} → {after.opset}" if before.opset != after.opset else None),
        ("applied", (applied or "none") if result.enabled else None),
        ("hierarchy", coverage_words(result.coverage, is_tagged=result.is_tagged)),
        ("functions", result.functions.words if result.functions else None),
        ("verified", "a copy of the source" if result.is_copy else equality_words(result.verification)),
        *written_fields(result.files),
        *doc.note_fields(result.notes),
    ]
    rows: list[tuple[str, list[doc.Cell]]] = [
        (
            change.tag,
            [
                f"{change.nodes_before} → {change.nodes_after}",
                ", ".join(f"{name} {count:+d}" for name, count in change.operators.items()),
            ],
        )
        for change in result.module_changes()
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns(("module", "name"), ("nodes", "count"), "operators"),
                [[tag, *cells] for tag, cells in rows],
                folds=doc.layer_folds(rows),
                brief=range(_MAX_MODULE_ROWS),
                rest=f"… and {{}} more rows ({opt.verbose} shows every module)",
            ),
        ]
    )


def capabilities_document(capabilities: Sequence[Mapping[str, Any]]) -> doc.Document:
    """List the capabilities of the optimizer.

    Args:
        capabilities: Capabilities in the JSON of ``winml optimize --list``.
    """
    # At the level ``none``, only capabilities enabled by name are on.
    levels = [level for level in capabilities[0]["defaults"] if level != "none"]
    return doc.Document(
        [
            doc.Table(
                [doc.Column(name) for name in ("capability", "on", *levels, "suits", "does")],
                [
                    [
                        entry["name"],
                        "yes" if entry["enabled"] else "",
                        *("on" if entry["defaults"][level] else "off" for level in levels),
                        _provider_words(entry),
                        entry["does"],
                    ]
                    for entry in capabilities
                ],
            )
        ]
    )


def _provider_words(entry: Mapping[str, Any]) -> str:
    providers = entry["execution_providers"]
    standard_words = " (others: with operators of ONNX)" if providers and entry["standard_operators"] else ""
    return f"{', '.join(providers) or 'any'}{standard_words}"
