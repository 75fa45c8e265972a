"""Finished exports are kept between runs, counted by state, and shown with their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from architecture_documents import document, generation_summary, summary
from winml.modelkit.report.architecture_page import results_page
from winml.modelkit.results.architecture_evaluation import Architecture, Attempt, Evaluation, count_states

GOOD = Attempt(is_verified=True, exporter="torchscript", nodes=9, coverage_percent=100.0, tags=("/A", "/A/B"))
BAD = Attempt(
    is_verified=False, problem="no <form> of aten::diff", exit_code=1, module="decoder", operator="aten::diff"
)


def evaluation(path: Path) -> Evaluation:
    """Return one with an architecture of each state."""
    items = (
        Architecture("good", "GoodModel", attempts={"auto": GOOD}),
        Architecture("bad", "BadModel", attempts={"auto": BAD}),
        Architecture("unknown", "UnknownModel", state_before="not run", problem="its forward needs | grids"),
        Architecture("absent", state_before="not built", problem="needs the timm library"),
    )
    bounds = {"seconds": 300.0, "gigabytes": 6.0}
    return Evaluation(path, {"torch": "2.13.0"}, bounds, {item.model_type: item for item in items})


def test_evaluation_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    """Nothing is lost between runs, and no part of a file is left."""
    saved = evaluation(tmp_path / "results.json")
    saved.save()
    assert saved == Evaluation.open(tmp_path / "results.json")
    assert ["results.json"] == [path.name for path in tmp_path.iterdir()]
    assert {} == Evaluation.open(tmp_path / "other.json").architectures


def test_evaluation_names_only_unfinished_model_types(tmp_path: Path) -> None:
    """Failures are retried only on request; another exporter gets the model types that PyTorch ran."""
    stored = evaluation(tmp_path / "results.json")
    names = ["good", "bad", "unknown", "absent", "new"]
    assert ["new"] == stored.unfinished_model_types(names, "auto", retry_failed=False)
    assert ["bad", "unknown", "absent", "new"] == stored.unfinished_model_types(names, "auto", retry_failed=True)
    assert ["good", "bad", "new"] == stored.unfinished_model_types(names, "dynamo", retry_failed=False)


def test_states_count_attempted_exports_separately(tmp_path: Path) -> None:
    """A model that PyTorch does not run is no failed export."""
    items = list(evaluation(tmp_path / "results.json").architectures.values())
    assert {"exported": 1, "failed": 1, "not run": 1, "not built": 1} == count_states(items)
    assert {"not run": 1, "not built": 1} == count_states(items, "dynamo")


def test_tags_differ_only_between_exports_that_worked() -> None:
    """A failed export has no tags to compare."""
    dynamo_attempt = Attempt(is_verified=True, exporter="dynamo", tags=("/A",))
    assert not Architecture("a", attempts={"auto": GOOD, "dynamo": BAD}).tags_differ()
    assert not Architecture("a", attempts={"auto": GOOD, "torchscript": GOOD}).tags_differ()
    assert Architecture("a", attempts={"auto": GOOD, "dynamo": dynamo_attempt}).tags_differ()


def test_page_and_document_name_every_architecture_and_reason(tmp_path: Path) -> None:
    """Reasons are shown in full, escaped for the page and for the table."""
    shown = evaluation(tmp_path / "results.json")
    page, text = results_page(shown), document(summary(shown))
    for name in shown.architectures:
        assert f"<td>{name}</td>" in page
        assert f"| {name} |" in text
    assert "no &lt;form&gt; of aten::diff" in page
    assert r"| bad | 1 | `decoder`, `aten::diff` | no \<form\> of aten::diff |" in text
    assert r"its forward needs \| grids" in text
    assert "| exported, verified and tagged by `auto` | 1 (**50.0 %** of the attempted): 1 by torchscript |" in text


def test_summary_of_generation_tells_states_and_shares(tmp_path: Path) -> None:
    """Counted is what generated with its cache; the rest says why not."""
    stored = evaluation(tmp_path / "results.json")
    text = replace(GOOD, cache=("key", "value"), generated_tokens=32)
    plain = replace(GOOD, remarks=("The graph takes no cache, since it keeps none",))
    stored.architectures["good"] = Architecture("good", "GoodForCausalLM", attempts={"auto": text})
    stored.architectures["plain"] = Architecture("plain", "PlainForCausalLM", attempts={"auto": plain})
    rows = generation_summary(stored)["generation"]
    assert {"with cache": 1, "plain": 1, "failed": 1, "not run": 1, "not built": 1} == Counter(
        row["state"] for row in rows
    )
    page = document({**summary(stored), **generation_summary(stored)})
    assert "1 of 5 (**20.0 %**)" in page
    assert "1 of 2 (**50.0 %**)" in page
    assert "| plain | plain | The graph takes no cache, since it keeps none |" in page
