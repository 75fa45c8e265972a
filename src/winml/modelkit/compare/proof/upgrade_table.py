"""Fields and table of an upgrade check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from winml.modelkit.compare.quality_minimum import ROUNDING_DB
from winml.modelkit.compare.records import BeforeAfter
from winml.modelkit.report import document as doc
from winml.modelkit.words import sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.upgrade import ModuleChange, UpgradeCheck


def upgrade_fields(check: UpgradeCheck) -> Iterator[doc.Field]:
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


def upgrade_table(check: UpgradeCheck) -> doc.Table:
    """Return the table of the modules that differ; equal layers are folded."""
    rows = [(module.tag or "no module", _change_cells(module)) for module in check.modules]
    return doc.Table(
        doc.columns(("module", "name"), "kernels", "own error", "ms", "nodes of the file", "providers"),
        [[name, *cells] for name, cells in rows],
        name="upgrade",
        heading="Modules that differ from the baseline",
        folds=doc.layer_folds(rows),
    )


def _change_cells(module: ModuleChange) -> list[doc.Cell]:
    error, times = module.own_error, module.ms
    return [
        _count_words(module.kernels),
        "" if error is None else f"{error[0]:.1e} → {error[1]:.1e}",
        "" if times is None else f"{times[0]:.3g} → {times[1]:.3g}",
        _count_words(module.nodes),
        _count_words(module.providers),
    ]


def _count_words(counts: Mapping[str, BeforeAfter]) -> str:
    """Format counts that differ: ``MatMul 4 → 0, FusedMatMul 0 → 4``."""
    return ", ".join(f"{name} {before} → {after}" for name, (before, after) in counts.items())
