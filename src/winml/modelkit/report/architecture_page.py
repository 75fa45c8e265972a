"""How is an evaluation shown to people? One HTML page that needs nothing but itself.

Columns sort by a click; the reasons of failures stand in the rows. Reads records, decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from winml.modelkit.results.architecture_evaluation import EXPORTERS, Architecture, Attempt, Evaluation, count_states

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


def results_page(evaluation: Evaluation) -> str:
    """Return the page."""
    architectures = sorted(evaluation.architectures.values(), key=lambda item: item.model_type)
    asked = [name for name in EXPORTERS if any(name in item.attempts for item in architectures)]
    heads = ["model type", "class", "parameters", "kept large"]
    for name in asked:
        heads += [name, f"{name}: made by", "nodes", "tags", "relative difference", "seconds", "peak MB"]
    heads += ["tags", "reason"]
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in evaluation.versions.items())
    return "".join(
        [
            _HEAD,
            f"<h1>{len(architectures)} architectures</h1>\n<p>{versions}</p>\n<ul>\n",
            *(f"<li>{name}: {_counts(architectures, name)}</li>\n" for name in asked),
            "</ul>\n<table>\n<thead><tr>",
            *(f"<th>{escape(head)}</th>" for head in heads),
            "</tr></thead>\n<tbody>\n",
            *(_row(item, asked) for item in architectures),
            "</tbody>\n</table>\n",
            _SORT,
            "</html>\n",
        ]
    )


def _counts(architectures: list[Architecture], exporter: str) -> str:
    counts = count_states(architectures, exporter)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _row(item: Architecture, asked: Sequence[str]) -> str:
    cells = [_text(item.model_type), _text(item.class_name), _number(f"{item.parameters}" if item.parameters else "")]
    cells.append(_text(", ".join(item.kept_large)))
    for name in asked:
        state = item.state(name) or ""
        style = "not" if state.startswith("not") else state
        cells.append(f'<td class="{style}">{escape(state)}</td>')
        cells += _attempt(item.attempts.get(name))
    cells += [_text("differ" if item.tags_differ() else ""), _text(_reasons(item))]
    return f"<tr>{''.join(cells)}</tr>\n"


def _attempt(attempt: Attempt | None) -> list[str]:
    if attempt is None:
        return [_text("")] * 6
    worked = attempt.is_verified
    return [
        _text(attempt.exporter),
        _number(f"{attempt.nodes}" if worked else ""),
        _number(f"{len(attempt.tags)}" if worked else ""),
        _number(f"{attempt.relative_diff:.1e}" if worked else ""),
        _number(f"{attempt.seconds:.1f}"),
        _number(f"{attempt.peak_bytes / 1e6:.0f}"),
    ]


def _reasons(item: Architecture) -> str:
    """Return why nothing was exported, or why an exporter failed or was passed over."""
    reasons = [item.problem]
    for name, attempt in item.attempts.items():
        place = f" [exit code {attempt.exit_code}, {attempt.step or 'no step'}]" if attempt.problem else ""
        reasons += [f"{name}: {words}{place}" for words in (attempt.problem, attempt.note) if words]
    return "; ".join(filter(None, reasons))


def _text(words: str) -> str:
    return f"<td>{escape(words)}</td>"


def _number(words: str) -> str:
    return f'<td class="number">{words}</td>'
