"""Renders an evaluation of architectures as one self-contained HTML page.

A click on a column head sorts the table; each row shows the reason of its failure. Computes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_html

from winml.modelkit.results.architecture_evaluation import EXPORTERS, Architecture, Attempt, Evaluation, count_states
from winml.modelkit.words import printable

__all__ = ["results_page"]

_HEAD = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Architectures</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; }
th, td { padding: 0.2em 0.7em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: #f4f4f4; cursor: pointer; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.exported { color: #06682c; }
.failed { color: #a40e26; font-weight: 600; }
.not { color: #666; }
</style>
"""

_SORT = """<script>
for (const [column, head] of document.querySelectorAll("th").entries())
  head.onclick = () => {
    const body = document.querySelector("tbody");
    const falling = head.dataset.order === "rising";
    head.dataset.order = falling ? "falling" : "rising";
    const key = row => row.cells[column].textContent;
    body.append(...[...body.rows].sort((a, b) =>
      (falling ? -1 : 1) * key(a).localeCompare(key(b), "en", { numeric: true })));
  };
</script>
"""


def _shown(text: str) -> str:
    """Return a foreign text for the page."""
    return escape_html(printable(text))


def results_page(evaluation: Evaluation) -> str:
    """Return the page."""
    architectures = sorted(evaluation.architectures.values(), key=lambda item: item.model_type)
    requested = [name for name in EXPORTERS if any(name in item.attempts for item in architectures)]
    column_heads = ["model type", "class", "parameters", "kept large"]
    for name in requested:
        column_heads += [name, f"{name}: made by", "nodes", "tags", "relative difference", "seconds", "peak MB"]
    column_heads += ["tags", "reason"]
    versions = ", ".join(f"{_shown(name)} {_shown(version)}" for name, version in evaluation.versions.items())
    return "".join(
        [
            _HEAD,
            f"<h1>{len(architectures)} architectures</h1>\n<p>{versions}</p>\n<ul>\n",
            *(f"<li>{name}: {_state_counts(architectures, name)}</li>\n" for name in requested),
            "</ul>\n<table>\n<thead><tr>",
            *(f"<th>{_shown(head)}</th>" for head in column_heads),
            "</tr></thead>\n<tbody>\n",
            *(_architecture_row(item, requested) for item in architectures),
            "</tbody>\n</table>\n",
            _SORT,
            "</html>\n",
        ]
    )


def _state_counts(architectures: list[Architecture], exporter: str) -> str:
    counts = count_states(architectures, exporter)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _architecture_row(item: Architecture, requested: Sequence[str]) -> str:
    cells = [
        _text_cell(item.model_type),
        _text_cell(item.class_name),
        _number_cell(f"{item.parameters}" if item.parameters else ""),
    ]
    cells.append(_text_cell(", ".join(item.kept_large)))
    for name in requested:
        state = item.state(name) or ""
        style = "not" if state.startswith("not") else state
        cells.append(f'<td class="{style}">{_shown(state)}</td>')
        cells += _attempt_cells(item.attempts.get(name))
    cells += [_text_cell("differ" if item.tags_differ() else ""), _text_cell(_reason_words(item))]
    return f"<tr>{''.join(cells)}</tr>\n"


def _attempt_cells(attempt: Attempt | None) -> list[str]:
    if attempt is None:
        return [_text_cell("")] * 6
    is_verified = attempt.is_verified
    return [
        _text_cell(attempt.exporter),
        _number_cell(f"{attempt.nodes}" if is_verified else ""),
        _number_cell(f"{len(attempt.tags)}" if is_verified else ""),
        _number_cell(f"{attempt.relative_diff:.1e}" if is_verified else ""),
        _number_cell(f"{attempt.seconds:.1f}"),
        _number_cell(f"{attempt.peak_bytes / 1e6:.0f}"),
    ]


def _reason_words(item: Architecture) -> str:
    """Return why nothing was exported, or why an exporter failed or was not chosen."""
    reasons = [item.problem]
    for name, attempt in item.attempts.items():
        place = f" [exit code {attempt.exit_code}, {attempt.step or 'no step'}]" if attempt.problem else ""
        reasons += [f"{name}: {words}{place}" for words in (attempt.problem, attempt.note) if words]
    return "; ".join(filter(None, reasons))


def _text_cell(words: str) -> str:
    return f"<td>{_shown(words)}</td>"


def _number_cell(words: str) -> str:
    return f'<td class="number">{words}</td>'
