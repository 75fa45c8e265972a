"""States of the exports of a sweep, and their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from architecture_documents import (
    Evaluation,
    ExportedArchitecture,
    count_states,
    document,
    evaluation_of,
    exporter_summary,
    generation_summary,
    summary,
)
from winml.modelkit.sweep.records import Attempt, CellResult, SweepResult

GOOD = Attempt(is_verified=True, exporter="torchscript", nodes=9, coverage_percent=100.0, tags=("/A", "/A/B"))
BAD = Attempt(
    is_verified=False, problem="no <form> of aten::diff", exit_code=1, module="decoder", operator="aten::diff"
)


def evaluation() -> Evaluation:
    """Return an evaluation with an architecture of each state."""
    items = (
        ExportedArchitecture("good", "GoodModel", attempts={"auto": GOOD}),
        ExportedArchitecture("bad", "BadModel", attempts={"auto": BAD}),
        ExportedArchitecture("unknown", "UnknownModel", state_before="not run", problem="its forward needs | grids"),
        ExportedArchitecture("absent", state_before="not built", problem="needs the timm library"),
    )
    bounds = {"seconds": 300.0, "gigabytes": 6.0}
    return Evaluation({"torch": "2.13.0"}, bounds, {item.model_type: item for item in items})


def cell(model_type: str, exporter: str, architecture: ExportedArchitecture, **changes: Any) -> CellResult:
    """Return the row of a sweep for one model type and one exporter."""
    attempt = architecture.attempts.get(exporter)
    details = {"architecture": asdict(replace(architecture, attempts={}))}
    found = {"details": {**details, "attempt": asdict(attempt)} if attempt else details, **changes}
    return CellResult(exporter, f"random:{model_type}", {"export.exporter": exporter}, "failed", **found)


def test_evaluation_is_read_from_the_rows_of_a_sweep() -> None:
    """``auto`` tries TorchScript first, so that attempt is known; a killed process has no attempt."""
    items = evaluation().architectures
    rows = [
        *(cell(name, "auto", item) for name, item in items.items()),
        cell("good", "dynamo", ExportedArchitecture("good"), problem="took more than 9 s", exit_code=-9),
    ]
    result = SweepResult("swept", {}, tuple(rows), len(rows), bounds={"seconds": 9.0, "memory_bytes": 2**31})
    read = evaluation_of(result).architectures
    assert {"auto", "dynamo", "torchscript"} == set(read["good"].attempts)
    assert ("failed", "exported") == (read["good"].state("dynamo"), read["good"].state("torchscript"))
    assert ("failed", "not run", "not built") == tuple(read[name].state() for name in ("bad", "unknown", "absent"))
    assert items["bad"].attempts == read["bad"].attempts


def test_states_count_attempted_exports_separately() -> None:
    """A model that PyTorch does not run is no failed export."""
    items = list(evaluation().architectures.values())
    assert {"exported": 1, "failed": 1, "not run": 1, "not built": 1} == count_states(items)
    assert {"not run": 1, "not built": 1} == count_states(items, "dynamo")


def test_tags_differ_only_between_exports_that_worked() -> None:
    """The tags of a failed export are not compared."""
    dynamo_attempt = Attempt(is_verified=True, exporter="dynamo", tags=("/A",))
    assert not ExportedArchitecture("a", attempts={"auto": GOOD, "dynamo": BAD}).tags_differ()
    assert not ExportedArchitecture("a", attempts={"auto": GOOD, "torchscript": GOOD}).tags_differ()
    assert ExportedArchitecture("a", attempts={"auto": GOOD, "dynamo": dynamo_attempt}).tags_differ()


def test_document_names_every_architecture_and_reason() -> None:
    """Reasons are shown in full, escaped for the table."""
    shown = evaluation()
    text = document(summary(shown))
    for name in shown.architectures:
        assert f"| {name} |" in text
    assert r"| bad | 1 | `decoder`, `aten::diff` | no \<form\> of aten::diff |" in text
    assert r"its forward needs \| grids" in text
    assert "| exported, verified and tagged by `auto` | 1 (**50.0 %** of the attempted): 1 by torchscript |" in text


def test_summary_of_generation_counts_states_and_shares() -> None:
    """The share counts models that generated text with a cache; other rows state the reason."""
    stored = evaluation()
    text = replace(GOOD, cache=("key", "value"), generated_tokens=32)
    plain = replace(GOOD, remarks=("The graph takes no cache, since it keeps none",))
    generating = {
        "good": ExportedArchitecture("good", "GoodForCausalLM", attempts={"auto": text}),
        "plain": ExportedArchitecture("plain", "PlainForCausalLM", attempts={"auto": plain}),
    }
    stored = replace(stored, architectures={**stored.architectures, **generating})
    rows = generation_summary(stored)["generation"]
    assert {"with cache": 1, "plain": 1, "failed": 1, "not run": 1, "not built": 1} == Counter(
        row["state"] for row in rows
    )
    page = document({**summary(stored), **generation_summary(stored)})
    assert "1 of 5 (**20.0 %**)" in page
    assert "1 of 2 (**50.0 %**)" in page
    assert "| plain | plain | The graph takes no cache, since it keeps none |" in page


def test_summary_of_each_exporter_counts_attempts_of_auto() -> None:
    """TorchScript within ``auto`` counts; an architecture without an attempt of either exporter is left out."""
    attempts = {
        "good": {"dynamo": BAD},
        "both": {"torchscript": GOOD, "dynamo": replace(GOOD, tags=("/A",))},
        "half": {"dynamo": GOOD},
    }
    items = {name: ExportedArchitecture(name, "Model", attempts=tried) for name, tried in attempts.items()}
    named = replace(
        evaluation(), architectures={**items, "absent": ExportedArchitecture("absent", state_before="not built")}
    )
    content = summary(evaluation())
    content |= exporter_summary(named, content)
    assert ["both", "good", "half"] == [row["model_type"] for row in content["exporters"]]
    page = document(content)
    assert "| run with both | 2 |" in page
    assert "| by TorchScript alone | 1 (50.0 %) |" in page
    assert "of 1 types that both export; of 1 the sets of tags differ" in page
    assert r"| good | `Model` | 9 nodes, 2 tags, 0e+00 | failed: no \<form\> of aten::diff |  |" in page
    assert "| half | `Model` | not run | 9 nodes, 2 tags, 0e+00 |  |" in page


def test_single_exporter_of_a_sweep_is_in_its_plan() -> None:
    """A setting with one value distinguishes no cells, so rows omit the setting."""
    row = replace(cell("good", "auto", evaluation().architectures["good"]), settings={})
    plan = {"set": {"export.exporter": ["dynamo"]}}
    result = SweepResult("swept", plan, (row,), 1, bounds={"seconds": 9.0, "memory_bytes": 2**31})
    assert {"dynamo"} == set(evaluation_of(result).architectures["good"].attempts)
