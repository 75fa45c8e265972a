"""Results of tuning for known times, which are written into its state before the command runs again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from module_chains import save_chain
from winml.modelkit.profile.statistics import IDLE_MACHINE
from winml.modelkit.tune import contest
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.records import TuneResult
from winml.modelkit.tune.tuning import tune_model

QUIET = [10.0, 10.2, 10.1, 10.3] * 6
BUSY = [10.0] * 4 + [16.0] * 20
"""More than half of the rounds took more than 1.5 times the fastest."""
FORM = "dynamic-int8"
OPTIONS = TuneOptions(only=("dynamic", "compile"), min_sqnr_db=10)


class KnownTimes:
    """A finished tuning; its result is computed again for given times."""

    def __init__(self, folder: Path, options: TuneOptions = OPTIONS) -> None:
        self._model, self.folder, self._options = save_chain(folder / "chain.onnx"), folder / "tuned", options
        self.first = self._answer()

    def _answer(self) -> TuneResult:
        return tune_model(self._model, self.folder, options=self._options)

    def answer(self, **races: Mapping[str, Sequence[float]]) -> TuneResult:
        """Return the result for these times of comparisons in milliseconds; nothing is measured again."""
        path = self.folder / "tune_state.json"
        state = json.loads(path.read_text(encoding="utf-8"))
        state["races"] = {**state["races"], **races}
        path.write_text(json.dumps(state), encoding="utf-8")
        return self._answer()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnownTimes]:
    """A file of nested modules, tuned in comparisons of two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "RUNGS", (1, 2))
        patch.setattr(contest, "FIRST_RUNG", (1,))
        yield KnownTimes(tmp_path_factory.mktemp("tuning"))


def scale(factor: float, plain: Sequence[float]) -> list[float]:
    """Return the times of the plain file multiplied by a factor."""
    return [factor * time for time in plain]


def variations(plain: Sequence[float], form: str, factor: float) -> dict[str, list[float]]:
    """Return the comparison of a candidate with its compiled file, which is equally fast."""
    rest = {} if form == "plain" else {form: scale(factor, plain)}
    return {"plain": list(plain), **rest, f"{form}+compiled": scale(factor, plain)}


def test_faster_candidate_on_a_busy_machine_is_undecided(known: KnownTimes) -> None:
    """The whole interval lies below 1, so the reason does not call the two indistinguishable."""
    result = known.answer(right={"plain": BUSY, FORM: scale(0.88, BUSY)}, variations=variations(BUSY, "plain", 1.0))
    form, winner = result.candidate(FORM), result.as_record()["winner"]
    assert ("undecided", IDLE_MACHINE) == (result.verdict.answer, result.verdict.decided_by)
    assert ("plain", "right") == (winner["name"], form.status)
    assert form.ratio_to_winner is not None
    assert "undecided" == form.ratio_to_winner.verdict
    assert form.ratio_to_winner.high == pytest.approx(0.88)
    assert "busy" in form.reason
    assert "distinguishable" not in form.reason


def test_winner_over_the_plain_file_survives_the_comparison_of_variations(known: KnownTimes) -> None:
    """The comparison of variations ran on a busy machine, and the deciding comparison did not."""
    right = {"plain": QUIET, FORM: scale(0.5, QUIET)}
    result = known.answer(right=right, variations=variations(BUSY, FORM, 0.5))
    assert (FORM, "yes") == (result.winner.name, result.verdict.answer)
    plain = result.candidate("plain")
    assert plain.ratio_to_winner is not None
    assert ("slower", "slower") == (plain.status, plain.ratio_to_winner.verdict)


def test_gain_of_the_winner_has_numbers(known: KnownTimes) -> None:
    """Ratio with its interval, quality and size accompany the text."""
    result = known.answer(right={"plain": QUIET, FORM: scale(0.5, QUIET)}, variations=variations(QUIET, FORM, 0.5))
    winner = result.as_record()["winner"]
    ratio = winner["ratio_to_plain"]
    assert (0.5, 0.5, 0.5, "faster") == tuple(ratio[name] for name in ("value", "low", "high", "verdict"))
    facts = result.won.facts
    assert facts is not None
    assert facts.sqnr_db is not None
    assert (round(facts.sqnr_db, 3), facts.size_bytes) == (winner["sqnr_db"], winner["size_bytes"])
    assert winner == json.loads((known.folder / "tune.json").read_text(encoding="utf-8"))["winner"]
    assert (None, None) == (winner["fastest"], winner["fastest_to_winner"])


def test_candidate_faster_within_the_noise_is_named_with_its_ratio(known: KnownTimes) -> None:
    """The simpler candidate wins, and the JSON names the faster one and its ratio."""
    compiled = {"plain": QUIET, "plain+compiled": scale(0.99, QUIET)}
    result = known.answer(right={"plain": QUIET, FORM: QUIET}, variations=compiled)
    winner = result.as_record()["winner"]
    assert ("plain", True, "plain+compiled") == tuple(winner[name] for name in ("name", "is_within_noise", "fastest"))
    assert (0.99, "no difference found") == tuple(winner["fastest_to_winner"][name] for name in ("value", "verdict"))


@pytest.mark.parametrize(
    ("factors", "words"),
    [([0.99], "within 2 %"), ([0.9, 0.99], "below 2 %"), ([0.9, 1.1], "not distinguishable")],
)
def test_words_on_two_equal_candidates_follow_the_interval(known: KnownTimes, factors: list[float], words: str) -> None:
    """Only an interval that contains 1 leaves the faster candidate open."""
    times = [factors[turn % len(factors)] * time for turn, time in enumerate(QUIET)]
    result = known.answer(right={"plain": QUIET, FORM: times}, variations=variations(QUIET, "plain", 1.0))
    assert words in result.candidate(FORM).reason
    assert (words != "within 2 %") == result.verdict.is_undecided


def test_group_faster_in_float_stays_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is tried alone; a group faster by more than the noise wins, and its config lists the modules."""
    monkeypatch.setattr(contest, "RUNGS", (1, 2))
    monkeypatch.setattr(contest, "FIRST_RUNG", (1,))
    known = KnownTimes(tmp_path, TuneOptions(only=("dynamic", "placement"), min_sqnr_db=10, ep="cpu"))
    form = {"plain": QUIET, FORM: scale(0.5, QUIET)}
    tried = known.answer(right=form)
    groups = [row.candidate for row in tried.candidates if row.candidate.kind == "placement"]
    assert ["a.*", "a.*.b"] == [selector for group in groups for selector in group.sections["quant"]["per_module"]]
    alone = {group.name: scale(0.499, QUIET) for group in groups}  # within the noise
    assert FORM == known.answer(placement={**form, **alone}).winner.name
    inner = groups[1].name
    alone[inner] = scale(0.4, QUIET)
    result = known.answer(placement={**form, **alone}, placed={**form, inner: scale(0.4, QUIET)})
    assert inner == result.winner.name
    config = json.loads(Path(result.winner.config).read_text(encoding="utf-8"))
    assert {"a.*.b": "fp32"} == config["quant"]["per_module"]
    # A separate race decides, so that a group faster by chance alone gains nothing.
    assert FORM == known.answer(placed={**form, inner: scale(0.5, QUIET)}).winner.name


def test_winner_is_the_first_row_and_has_a_row_of_its_own_in_the_chart(known: KnownTimes) -> None:
    """Two marks at one position stay visible in separate rows; equal outputs are labelled without a number."""
    result = known.answer(right={"plain": QUIET, FORM: scale(0.5, QUIET)}, variations=variations(QUIET, FORM, 0.5))
    page = (known.folder / "tune.html").read_text(encoding="utf-8")
    table = page[page.index('<table id="candidates"') :]
    names = re.findall(r"<tr><td[^>]*>(.*?)</td>", table.replace("<wbr>", ""))
    assert FORM == names[0] == result.winner.name
    rows = re.findall(r'<b style="left:[^"]*">(.)</b>', page)  # the marks of the chart, in the order of its rows
    assert len({item.candidate.name for item in result.candidates if item.latency is not None}) == len(rows)
    assert "★" in rows[0]
    assert not any("★" in row for row in rows[1:])
    assert "equal" in table
    assert "200.0<" not in table
