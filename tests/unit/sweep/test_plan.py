"""Checks of a plan before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.sweep.cells import cells_of
from winml.modelkit.sweep.plan import SweepPlan, parse_settings, plan_from_record, read_plan, refuse_unusable


def plan(**record: Any) -> SweepPlan:
    """Return a plan of one checkpoint, after changes."""
    return plan_from_record({"models": ["checkpoint"], **record}, "plan")[0]


def test_list_of_models_ignores_comments_and_notes_duplicates(tmp_path: Path) -> None:
    """Each line names a model; a second mention is ignored with a note."""
    path = tmp_path / "models.txt"
    path.write_text("# all of them\nfirst  # small\n\nowner/second\nfirst\n", encoding="utf-8")
    read, notes = read_plan(path)
    assert ("first", "owner/second") == read.models
    assert ("the list of models lists first twice; duplicates are ignored (1)",) == notes


def test_cells_are_all_combinations_model_by_model() -> None:
    """Keys with one value are not named in cells; a model's own value wins."""
    asked = plan(
        models=["a", {"model": "b", "set": {"optim.level": "basic"}}],
        set={"optim.level": ["none", "full"], "quant.precision": ["fp32", "int8"], "export.opset_version": [17]},
    )
    cells = cells_of(asked)
    assert ["a"] * 4 + ["b"] * 2 == [cell.model for cell in cells]
    assert {"optim.level": "none", "quant.precision": "fp32"} == cells[0].settings
    assert [17] * 6 == [cell.work.build.export and cell.work.build.export.opset_version for cell in cells]
    assert "basic" == cells[4].work.build.optim.level  # type: ignore[union-attr]
    assert len({cell.cell_id for cell in cells}) == 6


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[1,[2,3]],4", ([1, [2, 3]], 4)),
        ('{"a": [1, {"b": 2}]}, none', ({"a": [1, {"b": 2}]}, "none")),
        ("17x,[1,true", ("17x", "[1", True)),
    ],
)
def test_comma_inside_json_separates_no_values(text: str, values: tuple[Any, ...]) -> None:
    """Text that is not JSON ends at the next comma."""
    assert {"a": values} == parse_settings([f"a={text}"])


def test_settings_of_an_export_make_no_cells_of_an_onnx_file() -> None:
    """An ONNX file is not exported, so both cells would be equal."""
    asked = plan(models=["a.onnx"], set={"export.opset_version": [17, 18], "optim.level": ["none", "full"]})
    assert [{"optim.level": "none"}, {"optim.level": "full"}] == [dict(cell.settings) for cell in cells_of(asked)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, "no model"),
        ({"sett": {}}, "'set'"),
        ({"set": {"optim.level": []}}, "optim.level"),
        ({"set": {"optim.levl": ["none"]}}, "'level'"),
        ({"set": {"optimm.level": ["none"]}}, "'optim'"),
        ({"set": {"perf.iteration": [3]}}, "'iterations'"),
        ({"set": {"quant.precision": ["int3"]}}, "quant.precision"),
        ({"do": ["perf"]}, "ONNX"),
        ({"do": ["compare"]}, "to compare"),
        ({"do": ["build", "eval"]}, "no dataset"),
        ({"max": {"latency_p50_ms": 3}}, "latency_p50_ms"),
        ({"do": []}, "no step"),
    ],
    ids=str,
)
def test_plan_with_a_mistake_is_refused_with_its_place(changes: dict[str, Any], words: str) -> None:
    """The plan is refused before a model is opened."""
    with pytest.raises(UsageError, match=words):
        refuse_unusable(plan(**changes))


def test_set_reads_json_values_and_texts() -> None:
    """A comma inside a list does not separate values."""
    given = parse_settings(["a.b=1,null,full", 'a.c=["x","y"],[]', "a.d=true"])
    assert {"a.b": (1, None, "full"), "a.c": (["x", "y"], []), "a.d": (True,)} == given
    with pytest.raises(UsageError, match="set twice"):
        parse_settings(["a=1", "a=2"])


def test_plan_of_a_file_survives_a_round_trip(tmp_path: Path) -> None:
    """The plan that a sweep writes is read as an equal plan."""
    asked = plan(set={"optim.level": ["none", "full"]}, do=["perf", "build"], min={"sqnr_db": 20})
    assert ("build", "perf") == asked.do
    path = tmp_path / "plan.json"
    path.write_text(asked.model_dump_json(), encoding="utf-8")
    assert asked == read_plan(path)[0]
    path.write_text(json.dumps({"models": "a"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="models"):
        read_plan(path)
