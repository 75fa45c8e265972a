"""How does an evaluation become the table in the documents?

First the small summary that is kept in the repository, ``docs/reference/architectures.json``, then the Markdown made
from it alone; so a test can compare the two without exporting anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from winml.modelkit.results.architecture_evaluation import AUTO, EXPORTERS, Architecture, Evaluation, State

__all__ = ["document", "summary", "write_documents"]

_FOLDER = Path("docs", "reference")
_LONGEST_REASON = 160
"""Chosen: characters of a reason; the whole one stands in the results of a run."""

_HEAD = """# Architectures

Written by `scripts/architecture_eval.py --docs` from [architectures.json](architectures.json), the summary of one run.
Another run is `python scripts/architecture_eval.py`; on two cores it takes half an hour.

Every model type transformers has a base model for is taken. Its default config is cut down by rules that know no
model – narrower, fewer layers of each kind, shorter vocabulary – and, where a class refuses its own default,
filled with what every checkpoint says; it is built with seeded random weights, and its inputs
are those `winml export` decides. What PyTorch runs then is *attempted*: it is exported with `--random-weights` on that
config, each in a process of its own (at most {seconds:.0f} s, {gigabytes:g} GiB). *Exported* means: the file agrees
with PyTorch in ONNX Runtime on two draws of inputs (images keep their size and place in the text, masks over audio
frames hide nothing), every node of it carries a tag, and every tag is that of a module
that ran. Base models are exported, as a config without `architectures` asks for; heads add few operators of their own.
"""


def write_documents(evaluation: Evaluation, repository: Path) -> None:
    """Write summary and table into the documents."""
    content = summary(evaluation)
    folder = repository / _FOLDER
    _write(folder / "architectures.json", f"{_json_lines(content)}\n")
    _write(folder / "architectures.md", document(content))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _json_lines(content: Mapping[str, Any]) -> str:
    """Return the summary as JSON, one architecture per line: a change of one is a change of one line."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["architectures"])
    head = {key: value for key, value in content.items() if key != "architectures"}
    return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "architectures": [\n{rows}\n ]\n}}'


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return what the documents say of an evaluation, ready for JSON."""
    architectures = sorted(evaluation.architectures.values(), key=lambda item: item.model_type)
    return {
        "versions": dict(evaluation.versions),
        "bounds": dict(evaluation.bounds),
        "architectures": [_summary_row(item) for item in architectures],
    }


def _summary_row(item: Architecture) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model_type": item.model_type,
        "class": item.class_name,
        "state": item.state() or "not asked",
    }
    if item.problem:
        row["reason"] = _short(item.problem)
    automatic = item.attempts.get(AUTO)
    if automatic is None:
        return row
    if automatic.is_verified:
        row |= {"exporter": automatic.exporter, "nodes": automatic.nodes, "tags": len(automatic.tags)}
        row["relative_diff"] = float(f"{automatic.relative_diff:.0e}")
    else:
        row |= {"reason": _short(automatic.problem), "exit_code": automatic.exit_code}
        row |= {key: value for key in ("module", "operator") if (value := getattr(automatic, key))}
    if automatic.note:
        row["why"] = _short(automatic.note)
    forced = {name: item.state(name) for name in EXPORTERS if name != AUTO and name in item.attempts}
    if forced:
        row["forced"] = forced
    if item.tags_differ():
        row["tags_differ"] = True
    return row


def _short(words: str) -> str:
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"


def document(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a summary."""
    rows: list[dict[str, Any]] = content["architectures"]
    of = {state: [row for row in rows if row["state"] == state] for state in get_args(State)}
    parts = [
        _HEAD.format(**content["bounds"]),
        f"Made with {', '.join(f'{name} {version}' for name, version in content['versions'].items())}.\n",
        _counts(of, len(rows)),
        "## Failed\n",
        _failures(of["failed"]),
        "## Exported\n",
        _exported(of["exported"]),
        "## Not attempted: PyTorch refuses the inputs\n",
        "The model is built, but nothing is known of inputs it needs, or it refuses those decided for it.\n",
        _reasons(of["not run"]),
        "## Not attempted: not built\n",
        "Its packages are not installed, its default config makes no model, or only a large one.\n",
        _reasons(of["not built"]),
    ]
    return "\n".join(parts)


def _counts(of: Mapping[str, Sequence[Mapping[str, Any]]], total: int) -> str:
    good, bad = len(of["exported"]), len(of["failed"])
    share = f"**{100 * good / (good + bad):.1f} %**" if good + bad else "none"
    made_by = Counter(row["exporter"] for row in of["exported"])
    makers = ", ".join(f"{count} by {name}" for name, count in sorted(made_by.items()))
    return (
        f"| | model types |\n| --- | --- |\n| attempted | {good + bad} |\n"
        f"| exported, verified and tagged by `auto` | {good} ({share} of the attempted): {makers} |\n"
        f"| failed | {bad} |\n| not attempted: PyTorch refuses the inputs | {len(of['not run'])} |\n"
        f"| not attempted: not built | {len(of['not built'])} |\n| all | {total} |\n"
    )


def _failures(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "None.\n"
    lines = [f"| {row['model_type']} | {row['exit_code']} | {_place(row)} | {_cell(row['reason'])} |" for row in rows]
    return "\n".join(["| model type | exit code | place | reason |", "| --- | --- | --- | --- |", *lines, ""])


def _place(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{row[key]}`" for key in ("module", "operator") if key in row)


def _exported(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| {row['model_type']} | `{row['class']}` | {row['exporter']} | {row['nodes']} | {row['tags']} "
        f"| {row['relative_diff']:.0e} | {_cell(row.get('why', ''))} | {_other(row)} |"
        for row in rows
    ]
    heads = ("model type", "class", "exporter", "nodes", "tags", "relative difference", "why this one", "the other one")
    return "\n".join([f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines, ""])


def _other(row: Mapping[str, Any]) -> str:
    """Say what came of the exporters that were asked for besides, and whether their tags are the same."""
    words = [f"{name} {state}" for name, state in row.get("forced", {}).items() if name != row["exporter"]]
    if not words:
        return ""
    tags = "other tags" if row.get("tags_differ") else "same tags"
    return f"{', '.join(words)}{f', {tags}' if 'exported' in row['forced'].values() else ''}"


def _reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| {row['model_type']} | {_cell(row.get('reason', ''))} |" for row in rows]
    return "\n".join(["| model type | reason |", "| --- | --- |", *lines, ""])


def _cell(words: str) -> str:
    """Return words as they may stand in a cell of a Markdown table."""
    return "".join(f"\\{letter}" if letter in "|<>[]*_`" else letter for letter in words)
