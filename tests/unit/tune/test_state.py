"""State of a tuning in its folder, and ownership of the folder."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from module_chains import save_chain
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import InputError, MeasureError, OutputExistsError, UsageError
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.contestants import Contestant, Contestants
from winml.modelkit.tune.racing import Race
from winml.modelkit.tune.records import Candidate, CandidateFacts
from winml.modelkit.tune.state import Failure, SharedValues, TuneState, held_tune_folder, refuse_foreign_folder

REQUEST = {"identity": {"files": {"model.onnx": "0" * 64}}, "target": "latency"}
FACTS = CandidateFacts(100, 1.5, 10, 20, 30, 0.5, 31.5, "y")


def test_measurements_are_reused_by_the_same_request(tmp_path: Path) -> None:
    """Facts, rules, failures and turns are read again and counted."""
    state = TuneState(tmp_path, REQUEST, overwrite=False)
    state.keep_facts("int8", FACTS)
    state.keep_rules("int8-part", {"b": "fp32", "a": "fp32"})
    state.keep_failure("qdq", Failure("wrong", "5 dB"))
    state.keep_turns("right", {"plain": [1.0], "int8": [0.5]})
    again = TuneState(tmp_path, REQUEST, overwrite=False)
    assert (FACTS, 1) == (again.facts("int8"), again.resumed)
    assert ["b", "a"] == list(again.rules("int8-part") or ())
    assert Failure("wrong", "5 dB") == again.failure("qdq")
    assert {"plain": [1.0], "int8": [0.5]} == again.turns("right")
    assert (None, None, {}) == (again.facts("full"), again.failure("full"), again.turns("forms"))


def test_measurements_of_another_request_are_refused_with_the_difference(tmp_path: Path) -> None:
    """Measurements and builds are replaced with ``overwrite``."""
    TuneState(tmp_path, REQUEST, overwrite=False).keep_facts("int8", FACTS)
    (tmp_path / "best").mkdir()
    other = {**REQUEST, "target": "size"}
    with pytest.raises(UsageError, match="target changed"):
        TuneState(tmp_path, other, overwrite=False)
    anew = TuneState(tmp_path, other, overwrite=True)
    assert (0, None) == (anew.resumed, anew.facts("int8"))
    assert not (tmp_path / "best").exists()


def test_state_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A truncated file is refused."""
    (tmp_path / "tune_state.json").write_text('{"request": {', encoding="utf-8")
    with pytest.raises(UsageError, match="be read"):
        TuneState(tmp_path, REQUEST, overwrite=False)


@pytest.mark.parametrize("name", ["../../secret.onnx", "/etc/passwd", ""])
def test_export_outside_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    """A state may only name an export below its folder."""
    (tmp_path / "secret.onnx").touch()
    folder = tmp_path / "tuned"
    (folder / "exported").mkdir(parents=True)
    TuneState(folder, REQUEST, overwrite=False).keep_exported(folder / "exported" / "model.onnx")
    state = folder / "tune_state.json"
    record = json.loads(state.read_text(encoding="utf-8"))
    assert TuneState(folder, REQUEST, overwrite=False).exported is None  # it is not there
    state.write_text(json.dumps({**record, "exported": name}), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        _ = TuneState(folder, REQUEST, overwrite=False).exported
    assert str(state) in refused.value.message
    assert repr(name) in refused.value.message
    for no_name in (7, ["a"]):
        state.write_text(json.dumps({**record, "exported": no_name}), encoding="utf-8")
        with pytest.raises(UsageError):
            TuneState(folder, REQUEST, overwrite=False)


def test_folder_with_foreign_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    """Files of other origin are never replaced or removed."""
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputExistsError, match=r"thesis\.txt"), held_tune_folder(tmp_path):
        pass
    assert "mine" == (tmp_path / "thesis.txt").read_text(encoding="utf-8")
    with pytest.raises(OutputExistsError, match="a file"):
        refuse_foreign_folder(tmp_path / "thesis.txt")


def test_folder_is_held_by_one_tuning(tmp_path: Path) -> None:
    """A second tuning is refused while the first runs."""
    refused = pytest.raises(UsageError, match="tuning")
    with held_tune_folder(tmp_path), refused, held_tune_folder(tmp_path):
        pass
    with held_tune_folder(tmp_path):
        pass


def raced(state: TuneState, **medians: float) -> Race:
    """Return a race of 24 turns that was run before."""
    candidates = [Candidate(name, "plain" if name == PLAIN else "level", name) for name in medians]
    state.keep_turns("right", {name: [median] * 24 for name, median in medians.items()})
    return Race("right", candidates, state, 1)


def test_finished_comparison_is_not_repeated(tmp_path: Path) -> None:
    """The dropped candidates follow from the stored times; no model file is requested."""
    state = TuneState(tmp_path, REQUEST, overwrite=False)
    race = raced(state, plain=10.0, level=5.0, other=5.01)

    def model_of(candidate: Candidate) -> Path:
        raise AssertionError(candidate)

    race.run(Contestants(tmp_path), model_of)
    assert ["level", "other"] == [item.name for item in race.standing]
    race = raced(state, plain=10.0, level=5.0, other=9.0)
    race.run(Contestants(tmp_path), model_of)
    assert ["level"] == [item.name for item in race.standing]


def test_rounds_of_all_candidates_count_in_the_next_comparison(tmp_path: Path) -> None:
    """A turn compares files side by side, so turns with new or dropped candidates do not count."""
    state = TuneState(tmp_path, REQUEST, overwrite=False)
    plain, level, wrong = (Candidate(name, "level", name) for name in (PLAIN, "level", "wrong"))
    forms = {PLAIN: [10.0] * 6, "level": [5.0] * 6, "wrong": [1.0] * 6, "out": [2.0] * 3}
    for candidates, begun in (([plain, level], 6), ([plain, Candidate("new", "level", "")], 0)):
        state.keep_turns("forms", forms)
        state.keep_turns("right", {})
        race = Race("right", candidates, state, 1, is_over=lambda: True, rungs=(begun,), begun="forms")
        with closing(Contestants(tmp_path)) as running:
            race.run(running, lambda candidate: tmp_path / candidate.name)
        assert {item.name: begun for item in candidates} == {name: len(turns) for name, turns in race.times.items()}
    race = Race("forms", [wrong, Candidate("out", "level", "")], state, 1, rungs=(0,))
    with closing(Contestants(tmp_path)) as running:
        race.run(running, lambda candidate: tmp_path / candidate.name)
    assert {"wrong": [], "out": []} == race.times


def test_unopenable_candidate_is_dropped_unless_plain(tmp_path: Path) -> None:
    """The race needs the plain file for comparison."""
    state = TuneState(tmp_path, REQUEST, overwrite=False)
    race = Race("right", [Candidate("level", "level", ""), Candidate(PLAIN, "plain", "")], state, 1)
    with closing(Contestants(tmp_path)) as running, pytest.raises(MeasureError, match=r"nothing\.onnx"):
        race.run(running, lambda _: tmp_path / "nothing.onnx")
    failure = state.failure("level")
    assert failure is not None
    assert "failed" == failure.status


def test_race_sessions_stay_open_all_together_or_not_at_all(tmp_path: Path) -> None:
    """A warm session would win against a cold one; memory of open sessions is not counted twice."""
    save_chain(tmp_path / "chain.onnx")
    running = Contestants(tmp_path)
    candidates = [Candidate(PLAIN, "plain", ""), Candidate("level", "level", "")]
    with closing(running), closing(Contestant("chain")) as process:
        inputs = {"sizes": {}, "batch_size": None, "seed": 0, "input_data": None}
        model, folder = tmp_path / "chain.onnx", str(tmp_path)
        settings = {"processors": None, "folder": folder, "samples": 1, "input_options": inputs}
        process.ask("record", path=str(model), model_name="chain", **settings)

        def left_open(peak_bytes: int) -> set[str]:
            running.begin_race({item.name: peak_bytes for item in candidates})
            for item in candidates:
                running.block(item, lambda _: model, 1)
            return set(running.open_names)

        assert {PLAIN, "level"} == left_open(1)
        assert {PLAIN, "level"} == left_open(2**60)
        running.drop("level")
        assert set() == left_open(2**60)


@pytest.mark.parametrize(
    "damage",
    [
        {"facts": []},
        {"facts": {"int8": 3}},
        {"facts": {"int8": {"size_bytes": "much"}}},
        {"failed": {"qdq": "wrong"}},
        {"failed": {"qdq": {"status": "odd", "reason": ""}}},
        {"rules": {"int8-part": ["a"]}},
        {"races": {"right": {"plain": "1.0"}}},
        {"races": {"right": {"plain": [0.0, -1.0]}}},
        {"races": {"right": [1.0]}},
        {"values": 3},
        {"values": {"samples": "two"}},
        {"exported": 3},
        {"request": None},
        {"unknown": {}},
    ],
    ids=str,
)
def test_damaged_state_is_refused_as_a_whole(tmp_path: Path, damage: dict[str, Any]) -> None:
    """Damage is detected before any measurement is used; ``overwrite`` starts the tuning anew."""
    state = TuneState(tmp_path, REQUEST, overwrite=False)
    state.keep_facts("int8", FACTS)
    state.keep_values(SharedValues({}, [], QualitySamples("random", 2, 0), 1, is_as_drawn=True, run_ms=0.5, block=4))
    path = tmp_path / "tune_state.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert FACTS == TuneState(tmp_path, REQUEST, overwrite=False).facts("int8")
    path.write_text(json.dumps({**whole, **damage}), encoding="utf-8")
    with pytest.raises(UsageError, match="be read"):
        TuneState(tmp_path, REQUEST, overwrite=False)
    assert 0 == TuneState(tmp_path, REQUEST, overwrite=True).resumed
