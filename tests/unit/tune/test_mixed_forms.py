"""Duration of the search for modules that stay float."""

from __future__ import annotations

import json
from itertools import chain, count, repeat
from pathlib import Path

from module_chains import save_chain
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.mixed_variants import MixedVariants
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.records import Candidate, CandidateFacts
from winml.modelkit.tune.state import SharedValues, TuneState

QUANT = {"precision": "int8", "mode": "dynamic"}
PART = Candidate("dynamic-int8-part", "dynamic", "", {"quant": QUANT}, part_of="dynamic-int8")
FACTS = CandidateFacts(100, 1.5, 10, 20, 30, 0.5, 200.0, "y")


def test_search_ends_at_the_time_limit_and_resumes(tmp_path: Path) -> None:
    """Finished measurements are reused, and an interrupted search counts as neither failed nor successful."""
    plain = save_chain(tmp_path / "chain.onnx", outlier="w2")
    state = TuneState(tmp_path, {}, overwrite=False)
    state.keep_facts(PLAIN, FACTS)
    state.keep_facts(PART.part_of, FACTS)
    state.keep_values(SharedValues({}, [], QualitySamples("random", 1, 0), 1, is_as_drawn=True, run_ms=1.0, block=1))
    judge = QualityLimits(TuneOptions(min_sqnr_db=40), tmp_path, "chain.onnx", Contestants(tmp_path), None)

    def measured() -> dict[str, object]:
        forms: dict[str, object] = json.loads((tmp_path / "dynamic-int8-part.measured.json").read_text())["measured"]
        return forms

    before = chain([False, False], repeat(True))
    cut = MixedVariants((PART,), state, judge, tmp_path, before.__next__)
    assert not cut.find_rules(PART, plain)
    assert (None, None) == (state.rules(PART.name), state.failure(PART.name))
    assert 2 == len(measured())
    asked = count()

    def never() -> bool:
        return next(asked) < 0

    assert MixedVariants((PART,), state, judge, tmp_path, never).find_rules(PART, plain)
    assert "fp32" in (state.rules(PART.name) or {}).values()
    assert len(measured()) - 2 == next(asked)
