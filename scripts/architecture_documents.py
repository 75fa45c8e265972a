"""Writes the table of architectures of the documentation from an evaluation.

The evaluation becomes a small summary, ``docs/reference/architectures.json``, and the Markdown is made from the summary
alone. A test can therefore compare the two without an export.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from winml.modelkit.sweep.records import Architecture, Attempt, CellResult, SweepResult

ExporterWish = Literal["auto", "torchscript", "dynamo"]
AUTO: ExporterWish = "auto"
EXPORTERS: tuple[ExporterWish, ...] = get_args(ExporterWish)

State = Literal["exported", "failed", "not built", "not run"]
"""``not built``: no small config makes a model. ``not run``: PyTorch cannot run the model on the resolved inputs."""

_FOLDER = Path("docs", "reference")
_CAUSAL = "ForCausalLM"
_EXPORTER_KEY = "export.exporter"
_TOOL = "winml-modelkit"
_FIRST: ExporterWish = "torchscript"
_OTHER_STATES = ("plain", "failed", "not run", "not built")
_GENERATION_HEAD = """Written by `scripts/architecture_eval.py --task text-generation --docs`; a type that an earlier
run verified is not run again. Each model type of transformers that has a class for text generation is tried, small and
random as above, an encoder with `is_decoder`, and exported with `--task text-generation`. *With a cache* means: the
graph takes and returns a cache, equals PyTorch on the random inputs, and gives the scores of `generate()` in each step
of a text, with its own cache, and of a second prompt after it. *Plain* is verified as well, and reads all tokens in
each run. *Not run* is refused with this message before anything is traced, by the export or by PyTorch."""
_NAMED: tuple[ExporterWish, ...] = ("torchscript", "dynamo")
_EXPORTER_HEAD = """Written by `scripts/architecture_eval.py --docs` from this sweep:

<!-- not run: takes hours, for all model types -->
```sh
winml sweep scripts/plans/architectures.json -o build/architectures --set export.exporter=torchscript,dynamo
```

The models above, exported with each of torch's exporters. `auto` is TorchScript, or dynamo if that fails; a type whose
result with TorchScript was known was not always run again. *Exported* means the same as above."""
_LISTS = ("architectures", "exporters", "generation")
"""Those of the summary, in their order in the file."""
_LONGEST_REASON = 160
"""Characters of a reason. Chosen; the results of a run have the whole reason."""

_HEAD = """# Architectures

Look for the `model_type` of your model's config in the tables below. On the site of the documentation, the search box
above lists the tables that have it.

Written by `scripts/architecture_eval.py --docs` from [architectures.json](architectures.json), the summary of one run.
Another run is `python scripts/architecture_eval.py`; on two cores it takes half an hour.

Each model type of transformers that has a base model is tried. Its default config is made small by rules that hold for
all types (narrower, fewer layers of each kind, a shorter vocabulary). If a class refuses its own default config, the
values that its checkpoints state are added. The model has seeded random weights, and the inputs that `winml export`
determines. If PyTorch runs it, it is *attempted*: exported with `--random-weights` in a process of its own (at most
{seconds:.0f} s, {gigabytes:g} GiB). *Exported* means: the file agrees with PyTorch in ONNX Runtime on two random inputs
(images keep their size and their position in the text, masks over audio frames hide nothing), every node has a tag, and
every tag is that of a module that ran. Heads add few operators, so base models are exported, as for a config without
`architectures`.
"""


class ExportedArchitecture(Architecture):
    """One model type with the states of its attempts."""

    def state(self, exporter: str = AUTO) -> State | None:
        """Return the state for a requested exporter; None where it was not requested."""
        if self.state_before:
            return self.state_before
        attempt = self.attempts.get(exporter)
        if attempt is None:
            return None
        return "exported" if attempt.is_verified else "failed"

    def tags_differ(self) -> bool:
        """Return True if two successful exporters give different sets of tags."""
        return len({attempt.tags for attempt in self.attempts.values() if attempt.is_verified}) > 1

    def with_attempt(self, exporter: str, attempt: Attempt) -> ExportedArchitecture:
        """Return a copy with one more attempt."""
        return replace(self, attempts={**self.attempts, exporter: attempt})


@dataclass(frozen=True)
class Evaluation:
    """All model types of one sweep."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Library → its version."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """``seconds`` and ``gigabytes`` that bound one export."""
    architectures: Mapping[str, ExportedArchitecture] = field(default_factory=dict)


def count_states(architectures: Sequence[ExportedArchitecture], exporter: str = AUTO) -> Counter[str]:
    """Count the states for an exporter; a model type it was not requested for is not counted."""
    return Counter(state for item in architectures if (state := item.state(exporter)) is not None)


def evaluation_of(result: SweepResult) -> Evaluation:
    """Return the result of each model type in a sweep with the step ``export``."""
    architectures: dict[str, ExportedArchitecture] = {}
    # A setting with one value is in the plan and in no cell.
    (only, *_) = result.plan.get("set", {}).get(_EXPORTER_KEY, (AUTO,))
    for cell in result.cells:
        model_type = cell.model.partition(":")[2]
        architecture = _architecture(cell, model_type, cell.settings.get(_EXPORTER_KEY, only))
        earlier = architectures.get(model_type)
        attempts = {**(earlier.attempts if earlier else {}), **architecture.attempts}
        architectures[model_type] = replace(architecture, attempts=attempts)
    gigabytes = result.bounds["memory_bytes"] / 2**30
    bounds = {"seconds": result.bounds["seconds"], "gigabytes": gigabytes}
    versions = {name: version for name, version in result.versions.items() if name != _TOOL}
    return Evaluation(versions, bounds, {name: _with_forced(item) for name, item in architectures.items()})


def _architecture(cell: CellResult, model_type: str, exporter: ExporterWish) -> ExportedArchitecture:
    """Return the model type of a cell with the attempt of its exporter, also where its process was killed."""
    record = cell.details.get("architecture")
    architecture = (
        ExportedArchitecture.from_fields(record)
        if record
        else ExportedArchitecture(model_type, state_before="not built")
    )
    if not architecture.is_attempted:
        return replace(architecture, problem=cell.problem)
    record = cell.details.get("attempt")
    attempt = (
        Attempt.from_fields(record)
        if record
        else Attempt(is_verified=False, problem=cell.problem, exit_code=cell.exit_code, seconds=cell.seconds)
    )
    return architecture.with_attempt(exporter, replace(attempt, peak_bytes=cell.peak_bytes))


def _with_forced(item: ExportedArchitecture) -> ExportedArchitecture:
    """Add the attempt of TorchScript where ``auto`` shows it: it tries TorchScript first on models of this size."""
    automatic = item.attempts.get(AUTO)
    if automatic is None or not automatic.is_verified or len(item.attempts) == 1 or _FIRST in item.attempts:
        return item
    if automatic.exporter == _FIRST:
        return item.with_attempt(_FIRST, automatic)
    passed_over = Attempt(is_verified=False, exporter=_FIRST, problem=automatic.note, exit_code=1)
    return item.with_attempt(_FIRST, passed_over) if automatic.note else item


def write_documents(evaluation: Evaluation, repository: Path, task: str | None = None) -> None:
    """Write the summary and the table into the documentation; summaries and tables of other runs stay.

    Args:
        evaluation: The run, of base models or of a task.
        repository: Where the documentation is.
        task: The task; None for base models.
    """
    folder = repository / _FOLDER
    path = folder / "architectures.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if task is None and any(AUTO in item.attempts for item in evaluation.architectures.values()):
        content |= summary(evaluation)
    elif task is None:
        content |= exporter_summary(evaluation, content)
    else:
        content |= generation_summary(evaluation)
    _write_text(path, f"{_json_lines(content)}\n")
    _write_text(folder / "architectures.md", document(content))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _json_lines(content: Mapping[str, Any]) -> str:
    """Return the summary as JSON with one line per architecture, so that the diff of one is one line."""
    lists = [key for key in _LISTS if key in content]
    entries = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key not in lists]
    for key in lists:
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content[key])
        entries.append(f" {json.dumps(key)}: [\n{rows}\n ]")
    return "{\n" + ",\n".join(entries) + "\n}"


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the summary of an evaluation as a JSON-ready mapping."""
    architectures = sorted(evaluation.architectures.values(), key=lambda item: item.model_type)
    return {
        "versions": dict(evaluation.versions),
        "bounds": dict(evaluation.bounds),
        "architectures": [_summary_row(item) for item in architectures],
    }


def _summary_row(item: ExportedArchitecture) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model_type": item.model_type,
        "class": item.class_name,
        "state": item.state() or "not asked",
    }
    if item.problem:
        row["reason"] = _shorten_reason(item.problem)
    automatic = item.attempts.get(AUTO)
    if automatic is None:
        return row
    if automatic.is_verified:
        row |= {"exporter": automatic.exporter, "nodes": automatic.nodes, "tags": len(automatic.tags)}
        row["relative_diff"] = float(f"{automatic.relative_diff:.0e}")
    else:
        row |= {"reason": _shorten_reason(automatic.problem), "exit_code": automatic.exit_code}
        row |= {key: value for key in ("module", "operator") if (value := getattr(automatic, key))}
    if automatic.note:
        row["why"] = _shorten_reason(automatic.note)
    forced = {name: item.state(name) for name in EXPORTERS if name != AUTO and name in item.attempts}
    if forced:
        row["forced"] = forced
    if item.tags_differ():
        row["tags_differ"] = True
    return row


def _shorten_reason(words: str) -> str:
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"


def document(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a summary."""
    rows: list[dict[str, Any]] = content["architectures"]
    rows_by_state = {state: [row for row in rows if row["state"] == state] for state in get_args(State)}
    sections = [
        _HEAD.format(**content["bounds"]),
        f"Made with {', '.join(f'{name} {version}' for name, version in content['versions'].items())}.\n",
        _count_table(rows_by_state, len(rows)),
        *_generation_sections(content),
        *_exporter_sections(content),
        "## Failed\n",
        _failure_table(rows_by_state["failed"]),
        "## Exported\n",
        _exported_table(rows_by_state["exported"]),
        "## Not attempted: PyTorch refuses the inputs\n",
        "The model is built, but nothing is known of inputs it needs, or it refuses those decided for it.\n",
        _reason_table(rows_by_state["not run"]),
        "## Not attempted: not built\n",
        "Its packages are not installed, its default config makes no model, or only a large one.\n",
        _reason_table(rows_by_state["not built"]),
    ]
    return "\n".join(sections)


def exporter_summary(evaluation: Evaluation, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run of each exporter by name as a JSON-ready mapping.

    Args:
        evaluation: The run.
        content: The summary of the run of ``auto``, which has tried TorchScript as well.
    """
    automatic = {row["model_type"]: row for row in content.get("architectures", ())}
    attempted = [item for item in evaluation.architectures.values() if item.attempts]
    rows = []
    for item in sorted(attempted, key=lambda item: item.model_type):
        tried: dict[str, Any] = {_FIRST: _within_auto(automatic.get(item.model_type, {})), "dynamo": None}
        tried |= {name: _attempt_record(attempt) for name, attempt in item.attempts.items()}
        row = {"model_type": item.model_type, "class": item.class_name, **tried}
        rows.append({**row, "tags_differ": True} if item.tags_differ() else row)
    verified = [sum(attempt.is_verified for attempt in item.attempts.values()) for item in attempted]
    return {
        "exporter_run": {
            "versions": dict(evaluation.versions),
            "bounds": dict(evaluation.bounds),
            "model_types": len(evaluation.architectures),
            "compared": sum(count == len(_NAMED) for count in verified),
        },
        "exporters": rows,
    }


def _attempt_record(attempt: Attempt) -> dict[str, Any]:
    if not attempt.is_verified:
        return {"state": "failed", "reason": _shorten_reason(attempt.problem), "exit_code": attempt.exit_code}
    created = {"state": "exported", "nodes": attempt.nodes, "tags": len(attempt.tags)}
    return {**created, "relative_diff": float(f"{attempt.relative_diff:.0e}")}


def _within_auto(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attempt of TorchScript that the row of ``auto`` tells of; None where it tells of none."""
    if row.get("exporter") == _FIRST:
        return {name: row[name] for name in ("state", "nodes", "tags", "relative_diff")}
    return {"state": "failed", "reason": row["why"], "exit_code": 1} if "why" in row else None


def generation_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the summary of a run of the task text-generation as a JSON-ready mapping."""
    architectures = sorted(evaluation.architectures.values(), key=lambda item: item.model_type)
    return {
        "generation_versions": dict(evaluation.versions),
        "generation_bounds": dict(evaluation.bounds),
        "generation": [_generation_row(item) for item in architectures],
    }


def _generation_row(item: ExportedArchitecture) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASS_NAMES

    row: dict[str, Any] = {
        "model_type": item.model_type,
        "class": item.class_name or CLASS_NAMES.get(item.model_type, ""),
    }
    attempt = item.attempts.get(AUTO)
    if attempt is None:
        return {**row, "state": item.state() or "not asked", "reason": _shorten_reason(item.problem)}
    if not attempt.is_verified:
        return {**row, "state": "failed", "reason": _shorten_reason(attempt.problem)}
    created = {"exporter": attempt.exporter, "relative_diff": float(f"{attempt.relative_diff:.0e}")}
    if attempt.cache and attempt.generated_tokens > 0:
        tokens = {"cache": list(attempt.cache), "tokens": attempt.generated_tokens}
        return {**row, "state": "with cache", **tokens, **created}
    reason = next((remark for remark in attempt.remarks if "no cache" in remark or "No text" in remark), "")
    return {**row, "state": "plain", "reason": _shorten_reason(reason), **created}


def _generation_sections(content: Mapping[str, Any]) -> list[str]:
    """Return the lines on generating models; empty before the first run."""
    rows: Sequence[Mapping[str, Any]] = content.get("generation", ())
    if not rows:
        return []
    created = [row for row in rows if row["state"] == "with cache"]
    missing = [row for row in rows if row["state"] != "with cache"]
    named = [row for row in rows if row["class"].endswith(_CAUSAL)]
    share = 100 * len(created) / len(rows)
    share_of_named = 100 * sum(row in created for row in named) / max(len(named), 1)
    counts = Counter(row["state"] for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in content["generation_versions"].items())
    return [
        "## Generation with a cache\n",
        f"{_GENERATION_HEAD}\n\nMade with {versions}.\n",
        "| | model types |\n| --- | --- |\n"
        f"| with a cache, the text that of PyTorch | {len(created)} of {len(rows)} (**{share:.1f} %**) |\n"
        f"| of those whose class is called …{_CAUSAL} | {sum(row in created for row in named)} of {len(named)} "
        f"(**{share_of_named:.1f} %**) |\n"
        + "".join(f"| {state} | {counts[state]} |\n" for state in _OTHER_STATES if counts[state]),
        "| model type | class | cache | tokens | exporter | relative difference |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        + "".join(
            f"| {row['model_type']} | `{row['class']}` | {', '.join(row['cache'])} | {row['tokens']} "
            f"| {row['exporter']} | {row['relative_diff']:.0e} |\n"
            for row in created
        ),
        "Without a cache, and why:\n",
        "| model type | state | reason |\n| --- | --- | --- |\n"
        + "".join(f"| {row['model_type']} | {row['state']} | {_escape_cell(row['reason'])} |\n" for row in missing),
    ]


def _exporter_sections(content: Mapping[str, Any]) -> list[str]:
    """Return the lines on each exporter; empty before the first run."""
    rows: Sequence[Mapping[str, Any]] = content.get("exporters", ())
    if not rows:
        return []
    run = content["exporter_run"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    known = [row for row in rows if all(row[name] for name in _NAMED)]
    states = Counter(tuple(row[name]["state"] == "exported" for name in _NAMED) for row in known)
    differing = sum("tags_differ" in row for row in known)
    counts = {
        "run with both": len(known),
        "exported, verified and tagged by TorchScript": states[True, True] + states[True, False],
        "exported, verified and tagged by dynamo": states[True, True] + states[False, True],
        "by both": states[True, True],
        "by TorchScript alone": states[True, False],
        "by dynamo alone": states[False, True],
        "by neither": states[False, False],
    }
    return [
        "## Each exporter by name\n",
        f"{_EXPORTER_HEAD}\n",
        f"Made with {versions}, at most {run['bounds']['seconds']:.0f} s each.\n{_how_far(content)}\n",
        "| | attempted model types |\n| --- | --- |\n"
        + "".join(
            f"| {words} | {count}{'' if count == len(known) else f' ({100 * count / max(len(known), 1):.1f} %)'} |\n"
            for words, count in counts.items()
        ),
        f"Both were run here of {run['compared']} types that both export; of {differing} the sets of tags differ.\n",
        "| model type | class | TorchScript | dynamo | tags |\n| --- | --- | --- | --- | --- |\n"
        + "".join(
            f"| {row['model_type']} | `{row['class']}` | {' | '.join(_attempt_words(row[name]) for name in _NAMED)} "
            f"| {'differ' if 'tags_differ' in row else ''} |\n"
            for row in rows
        ),
    ]


def _how_far(content: Mapping[str, Any]) -> str:
    """Return of how many model types a run was, where it was not of all."""
    count, total = content["exporter_run"]["model_types"], len(content["architectures"])
    if count == total:
        return "All model types were run."
    return f"The run came to {count} of {total} model types, in the order of their names."


def _attempt_words(record: Mapping[str, Any] | None) -> str:
    """Return the table cell with the result of one attempt."""
    if record is None:
        return "not run"
    if record["state"] == "failed":
        return f"failed: {_escape_cell(record['reason'])}"
    return f"{record['nodes']} nodes, {record['tags']} tags, {record['relative_diff']:.0e}"


def _count_table(rows_by_state: Mapping[str, Sequence[Mapping[str, Any]]], total: int) -> str:
    exported_count, failed_count = len(rows_by_state["exported"]), len(rows_by_state["failed"])
    attempted_count = exported_count + failed_count
    share = f"**{100 * exported_count / attempted_count:.1f} %**" if attempted_count else "none"
    count_by_exporter = Counter(row["exporter"] for row in rows_by_state["exported"])
    makers = ", ".join(f"{count} by {name}" for name, count in sorted(count_by_exporter.items()))
    return (
        f"| | model types |\n| --- | --- |\n| attempted | {attempted_count} |\n"
        f"| exported, verified and tagged by `auto` | {exported_count} ({share} of the attempted): {makers} |\n"
        f"| failed | {failed_count} |\n"
        f"| not attempted: PyTorch refuses the inputs | {len(rows_by_state['not run'])} |\n"
        f"| not attempted: not built | {len(rows_by_state['not built'])} |\n| all | {total} |\n"
    )


def _failure_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "None.\n"
    lines = [
        f"| {row['model_type']} | {row['exit_code']} | {_failure_place(row)} | {_escape_cell(row['reason'])} |"
        for row in rows
    ]
    return "\n".join(["| model type | exit code | place | reason |", "| --- | --- | --- | --- |", *lines, ""])


def _failure_place(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{row[key]}`" for key in ("module", "operator") if key in row)


def _exported_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| {row['model_type']} | `{row['class']}` | {row['exporter']} | {row['nodes']} | {row['tags']} "
        f"| {row['relative_diff']:.0e} | {_escape_cell(row.get('why', ''))} | {_forced_words(row)} |"
        for row in rows
    ]
    column_heads = (
        "model type",
        "class",
        "exporter",
        "nodes",
        "tags",
        "relative difference",
        "why this one",
        "the other one",
    )
    return "\n".join([f"| {' | '.join(column_heads)} |", f"|{' --- |' * len(column_heads)}", *lines, ""])


def _forced_words(row: Mapping[str, Any]) -> str:
    """Return the states of the other requested exporters, and whether their tags are equal."""
    words = [f"{name} {state}" for name, state in row.get("forced", {}).items() if name != row["exporter"]]
    if not words:
        return ""
    tags = "other tags" if row.get("tags_differ") else "same tags"
    return f"{', '.join(words)}{f', {tags}' if 'exported' in row['forced'].values() else ''}"


def _reason_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| {row['model_type']} | {_escape_cell(row.get('reason', ''))} |" for row in rows]
    return "\n".join(["| model type | reason |", "| --- | --- |", *lines, ""])


def _escape_cell(words: str) -> str:
    """Return words escaped for a cell of a Markdown table."""
    return "".join(f"\\{letter}" if letter in "|<>[]*_`" else letter for letter in words)
