"""Is what is finished kept, and nothing done twice?"""

from __future__ import annotations

from pathlib import Path

from architecture_documents import document, summary
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
    made = evaluation(tmp_path / "results.json")
    made.save()
    assert made == Evaluation.open(tmp_path / "results.json")
    assert ["results.json"] == [path.name for path in tmp_path.iterdir()]
    assert {} == Evaluation.open(tmp_path / "other.json").architectures


def test_evaluation_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    """Failures are asked for again only on request; another exporter is asked for what PyTorch ran."""
    made = evaluation(tmp_path / "results.json")
    names = ["good", "bad", "unknown", "absent", "new"]
    assert ["new"] == made.missing(names, "auto", retry_failed=False)
    assert ["bad", "unknown", "absent", "new"] == made.missing(names, "auto", retry_failed=True)
    assert ["good", "bad", "new"] == made.missing(names, "dynamo", retry_failed=False)


def test_states_count_what_was_attempted_apart(tmp_path: Path) -> None:
    """What PyTorch does not run is no failure of the export."""
    items = list(evaluation(tmp_path / "results.json").architectures.values())
    assert {"exported": 1, "failed": 1, "not run": 1, "not built": 1} == count_states(items)
    assert {"not run": 1, "not built": 1} == count_states(items, "dynamo")


def test_tags_differ_only_between_exports_that_worked() -> None:
    """A failed export has no tags to compare."""
    other = Attempt(is_verified=True, exporter="dynamo", tags=("/A",))
    assert not Architecture("a", attempts={"auto": GOOD, "dynamo": BAD}).tags_differ()
    assert not Architecture("a", attempts={"auto": GOOD, "torchscript": GOOD}).tags_differ()
    assert Architecture("a", attempts={"auto": GOOD, "dynamo": other}).tags_differ()


def test_page_and_document_name_every_architecture_and_reason(tmp_path: Path) -> None:
    """Reasons are told as they are, with what a page or a table cannot hold written otherwise."""
    made = evaluation(tmp_path / "results.json")
    page, text = results_page(made), document(summary(made))
    for name in made.architectures:
        assert f"<td>{name}</td>" in page
        assert f"| {name} |" in text
    assert "no &lt;form&gt; of aten::diff" in page
    assert r"| bad | 1 | `decoder`, `aten::diff` | no \<form\> of aten::diff |" in text
    assert r"its forward needs \| grids" in text
    assert "| exported, verified and tagged by `auto` | 1 (**50.0 %** of the attempted): 1 by torchscript |" in text
