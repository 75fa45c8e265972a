"""Candidates for a machine and their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.quantize.precisions import PRECISIONS
from winml.modelkit.tune.candidates import (
    INSTEAD_OF,
    PLAIN,
    TuningMachine,
    look_at_tuning_machine,
    placed_candidate,
    plan_candidates,
    plan_variations,
    smaller_forms,
)
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.declared_options import parse_kinds
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.records import KINDS, Candidate, CandidateFacts
from winml.modelkit.words import MOST_DB

MACHINE = TuningMachine(8, "x86_64 avx512f", True, ("cpu",), "1.31.1")


def names(options: TuneOptions, machine: TuningMachine = MACHINE) -> list[str]:
    """Return the names of a plan."""
    return [candidate.name for candidate in plan_candidates(options, machine)]


def test_plan_is_the_same_each_time_and_begins_with_the_plain_file() -> None:
    """No candidate is random, and no name occurs twice."""
    first = plan_candidates(TuneOptions(), MACHINE)
    assert first == plan_candidates(TuneOptions(), MACHINE)
    assert PLAIN == first[0].name
    assert len(first) == len({candidate.name for candidate in first})


def test_mixed_forms_follow_their_uniform_forms() -> None:
    """The simpler of two equal candidates comes first."""
    plan = names(TuneOptions())
    mixed = [candidate for candidate in plan_candidates(TuneOptions(), MACHINE) if candidate.part_of]
    assert mixed
    for candidate in mixed:
        assert plan.index(candidate.part_of) < plan.index(candidate.name)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_kind_leaves_that_kind_and_the_plain_file(kind: str) -> None:
    """Every plan begins with the plain file, for comparison."""
    plan = plan_candidates(TuneOptions(only=parse_kinds((kind,))), MACHINE)
    assert {PLAIN, kind} >= {candidate.kind for candidate in plan}
    assert PLAIN == plan[0].kind


def test_precisions_that_only_save_size_are_tried_if_size_counts() -> None:
    """16-bit floats are computed in float32 on a CPU, and gain no time there."""
    added = {*names(TuneOptions(target="size"))} - {*names(TuneOptions())}
    small = {"weights-int4", "fp16", "bf16"}
    assert {*small, *(f"{name}-part" for name in small)} == added


def test_installed_provider_runs_the_export_and_its_own_candidates() -> None:
    """OpenVINO has a candidate in bfloat16 by its own option, a GPU one in float16."""
    machine = replace(MACHINE, providers=("cpu", "openvino", "cuda"))
    plan = {candidate.name: candidate for candidate in plan_candidates(TuneOptions(), machine)}
    assert {"openvino", "openvino-bf16", "openvino-qdq-int8", "cuda", "cuda-fp16"} <= set(plan)
    assert ("openvino", {}) == (plan["openvino-bf16"].ep, dict(plan["openvino-bf16"].sections))
    assert "bf16" in plan["openvino-bf16"].ep_options["load_config"]


def test_variations_of_a_float_form_are_lower_levels_threads_and_a_compiled_file() -> None:
    """The highest level is a candidate itself."""
    plain, full, *_ = plan_candidates(TuneOptions(), MACHINE)
    assert ("plain", "full") == (plain.name, full.name)
    for best in (plain, full):
        variations = plan_variations(best, TuneOptions(), MACHINE)
        assert ["basic", "extended"] == [item.name for item in variations[:2]]
        assert [("threads", 4), ("threads", 2), ("threads", 1), ("compile", None)] == [
            (item.kind, item.threads) for item in variations[2:]
        ]


def test_variations_for_throughput_use_all_cores() -> None:
    """Threads of a run times parallel runs equal the cores."""
    options = TuneOptions(target="throughput", only=("threads",))
    plain = plan_candidates(options, MACHINE)[0]
    assert 2 == plain.callers
    for item in plan_variations(plain, options, MACHINE):
        assert item.threads is not None
        assert MACHINE.cores == item.threads * item.callers


def test_quantized_variation_has_the_highest_level_below() -> None:
    """The optimizer works before the quantizer."""
    best = Candidate("dynamic-int8", "dynamic", "int8", {"quant": {"precision": "int8"}})
    (level,) = [item for item in plan_variations(best, TuneOptions(), MACHINE) if item.kind == "level"]
    assert "dynamic-int8+full" == level.name
    assert {"quant": {"precision": "int8"}, "optim": {"level": "full"}} == dict(level.sections)


def test_stated_sizes_may_be_fixed_in_the_file() -> None:
    """The plan has such a candidate only if sizes are given; the batch size is one of the sizes."""
    options = TuneOptions(sizes={"sequence": 128}, batch_size=2, only=("fixed",))
    plain = plan_candidates(options, MACHINE)[0]
    (fixed,) = plan_variations(plain, options, MACHINE)
    assert ("plain+fixed", {"sequence": 128, "batch_size": 2}) == (fixed.name, fixed.fixed_sizes)
    assert "128, batch_size 2" in fixed.words
    assert () == plan_variations(plain, TuneOptions(only=("fixed",)), MACHINE)


def test_this_machine_has_the_cpu_provider_and_a_core() -> None:
    """Providers and cores, which decide the plan, are known on every machine."""
    machine = look_at_tuning_machine()
    assert "cpu" == machine.providers[0]
    assert machine.cores >= 1
    assert machine == look_at_tuning_machine()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_drop": {"accuracy": 0.01}}, "no samples"),
        ({"dataset": "reviews.csv", "input_data": "x.npz"}, "--input-data"),
        ({"samples": 5}, "--samples .*--dataset"),
        ({"input_data": "x.npz", "sizes": {"batch": 2}}, "--shape-config"),
    ],
)
def test_conflicting_options_are_refused(flags: dict[str, object], words: str) -> None:
    """The message names the option."""
    given = {name: Path(str(value)) if name == "input_data" else value for name, value in flags.items()}
    with pytest.raises(UsageError, match=words):
        TuneOptions.model_validate(given).refuse_contradictions()


INT8_FORM = Candidate("dynamic-int8", "dynamic", "", {"quant": {"precision": "int8"}})
DROPS = {"max_drop": {"accuracy": 0.01}, "dataset": "reviews.csv"}


@pytest.mark.parametrize(
    ("stated", "candidate", "minimum"),
    [
        ({}, INT8_FORM, PRECISIONS["int8"].minimum),
        ({}, Candidate("full", "level", ""), PRECISIONS["bf16"].minimum),  # a provider may compute in 16 bits
        ({"dataset": "reviews.csv"}, INT8_FORM, PRECISIONS["int8"].minimum),
        ({"min_sqnr_db": 20.0}, INT8_FORM, QualityMinimum(20.0)),
        (DROPS, INT8_FORM, None),
        ({**DROPS, "min_sqnr_db": 20.0}, INT8_FORM, QualityMinimum(20.0)),
    ],
)
def test_default_limit_is_that_of_quantize_unless_another_is_stated(
    tmp_path: Path, stated: dict[str, object], candidate: Candidate, minimum: QualityMinimum | None
) -> None:
    """Metrics replace the default limit; an explicit limit applies beside them."""
    limits = QualityLimits(TuneOptions.model_validate(stated), tmp_path, "model.onnx", Contestants(tmp_path), None)
    assert minimum == limits.minimum(candidate)


@pytest.mark.parametrize(("plain_db", "minimum_db"), [(None, 30.0), (60.0, 30.0), (29.0, 23.0), (4.0, 2.0)])
def test_default_limit_is_below_the_plain_file_on_the_provider(
    tmp_path: Path, plain_db: float | None, minimum_db: float
) -> None:
    """A provider that computes with fewer bits than the CPU runs the float file with an error, too."""
    plain = CandidateFacts(1, 1, 1, 1, 1, 1, plain_db, "y")
    limits = QualityLimits(TuneOptions(), tmp_path, "model.onnx", Contestants(tmp_path), None, lambda: plain)
    assert minimum_db == pytest.approx(limits.minimum(Candidate("full", "level", "")).sqnr_db)


def test_classifier_is_judged_by_its_predictions(tmp_path: Path) -> None:
    """Equal predictions at 3 dB are within the default limit; disagreeing ones at 20 dB are not."""
    limits = QualityLimits(TuneOptions(), tmp_path, "model.onnx", Contestants(tmp_path), None)

    def reason(sqnr_db: float, agreement: float | None) -> str:
        outputs = {"logits": {} if agreement is None else {"top1_agreement": agreement}}
        facts = CandidateFacts(1, 1, 1, 1, 1, 1, sqnr_db, "logits", sqnr_db, quality={"outputs": outputs})
        return limits.reason_wrong(INT8_FORM, facts)

    assert not reason(3, 1.0)
    assert "top-1 agreement 50.00 %" in reason(20, 0.5)
    assert not reason(20, None)
    assert "minimum 6" in reason(3, None)


@pytest.mark.parametrize(("sqnr_db", "is_resolved"), [(MOST_DB, True), (60.0, False)])
def test_equal_outputs_resolve_a_limit_that_few_samples_do_not(
    tmp_path: Path, sqnr_db: float, is_resolved: bool
) -> None:
    """Equal outputs have equal metrics on any samples; 25 samples without a difference leave a drop of 0.12 open."""
    limits = QualityLimits(TuneOptions.model_validate(DROPS), tmp_path, "model.onnx", Contestants(tmp_path), None)
    measured = {"scores": {"accuracy": 0.9}, "is_higher_better": {"accuracy": True}}
    facts = CandidateFacts(
        1, 1, 1, 1, 1, 1, sqnr_db, "logits", drops={"accuracy": 0.0}, least_drops={"accuracy": 0.12}, **measured
    )
    assert is_resolved == (limits.unresolved_words(facts) == ("", ""))


def test_unknown_kind_suggests_the_nearest() -> None:
    """The hint suggests the nearest kind, as for other misspelled names."""
    with pytest.raises(UsageError, match="dynamc") as error:
        parse_kinds(("dynamc",))
    assert "dynamic" in error.value.hint
    with pytest.raises(ConfigError):
        TuneOptions(budget_minutes=-1.0)


def test_named_provider_gets_its_placement_in_each_supported_precision() -> None:
    """Every candidate runs on the provider with the given options, in both precisions if the provider has 16 bits."""
    machine = replace(look_at_tuning_machine(), providers=("cpu", "qnn"))
    # The record is not validated: nothing of a provider that may be absent is opened for a plan.
    options = TuneOptions().model_copy(update={"ep": "qnn", "ep_options": {"soc_model": "60"}})
    plan = plan_candidates(options, machine)
    assert {("qnn", "60")} == {(item.ep, item.ep_options["soc_model"]) for item in plan}
    quantized = {item.name: item.sections["quant"] for item in plan if "quant" in item.sections and not item.part_of}
    integers = ["qdq-w8a8", "qdq-w8a8-smooth", "qdq-mixed", "qdq-w8a16", "qdq-w8a16-blocks", "qdq-w16a16"]
    assert [*integers, "fp16"] == list(quantized)
    assert {"qnn"} == {quantized[name]["ep"] for name in integers}
    assert {*integers[1:]} == {name for name in integers if INSTEAD_OF.get(name) in integers}
    smallest = {item.name for item in plan_candidates(options.model_copy(update={"target": "size"}), machine)}
    assert {"qdq-w4a16", "qdq-w4a8"} <= smallest
    tensorrt = plan_candidates(options.model_copy(update={"ep": "tensorrt", "ep_options": {}}), machine)
    assert {"qdq-w8a8", "qdq-w8a8-part"} == {item.name for item in tensorrt if item.kind == "qdq"}


def test_form_is_not_needed_beside_any_smaller_form() -> None:
    """A form that was not measured, because a smaller one suffices, makes no form necessary."""
    assert ["qdq-w8a16", "qdq-w8a8"] == list(smaller_forms("qdq-w16a16"))
    assert [] == list(smaller_forms("qdq-w8a8"))


def test_float_groups_have_the_rules_of_the_next_candidate() -> None:
    """The first matching rule of a module wins, so modules kept in float for quality stay float."""
    best = Candidate("qdq", "qdq", "int8", {"quant": {"precision": "int8"}}, part_of="whole")
    placed = placed_candidate(best, {"pooler": "fp32"}, {"a.*": "fp32", "b": "fp32"}, "qdq~placed")
    assert ["a.*", "b", "pooler"] == list(placed.sections["quant"]["per_module"])
    assert ("placement", "") == (placed.kind, placed.part_of)
