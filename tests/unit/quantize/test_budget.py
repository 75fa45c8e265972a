"""Choice of bits for each module within a limit of the whole, with the least loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from installed_versions import TWO_BITS
from weighted_graphs import weight
from winml.modelkit import quantize_onnx
from winml.modelkit.errors import UsageError, VerificationError, WinMLError
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.file_quantization import Quantization
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.records import BudgetSearch
from winml.modelkit.tags.tagging import NodeTag, write_tag
from winml.modelkit.transform.graph_file import GraphFileTask, make_file

_WEIGHTS = ", ".join([weight("w_1", 128, 128), weight("w_2", 128, 128), weight("w_b", 128)])
NET = f"""m (float[N, 128] x) => (float[N, 128] y) <{_WEIGHTS}, float[1] small = {{0.02}}> {{
    a = MatMul (x, w_1)
    r = Relu (a)
    s = Mul (r, small)
    b = Gemm (x, w_2, w_b)
    y = Add (s, b) }}"""
"""Two modules, of which the first hardly matters."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The net in a file."""
    ir.save(parse(NET), tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


def searched(source: Path, **options: Any) -> BudgetSearch:
    """Return the search of a quantization."""
    options = {"min_sqnr_db": -100.0, **options}
    result = quantize_onnx(source, source.with_name("out.onnx"), overwrite=True, **options)
    assert result.budget is not None
    return result.budget


@TWO_BITS
@pytest.mark.parametrize("bits", [2.5, 3.5, 4.5, 6.0, 9.0])
def test_budget_holds_and_is_never_worse_than_uniform(source: Path, bits: float) -> None:
    """Mean bits are below the limit, and no uniform file below it has better outputs on the samples of the search."""
    search = searched(source, budget=f"{bits}bits")
    assert search.mean_bits <= bits
    chosen = next(trial for trial in search.frontier if trial.is_chosen)
    assert chosen.sqnr_db is not None
    others = [trial.sqnr_db for trial in search.frontier if not trial.is_mixture and trial.mean_bits <= bits]
    assert all(chosen.sqnr_db >= other for other in others if other is not None)


@TWO_BITS
def test_module_that_matters_gets_the_bits(source: Path) -> None:
    """The module with little influence on the output has fewer bits; the metadata list bits and reasons per module."""
    search = searched(source, budget="6bits")
    sizes = {module.tag: module.size_bytes / module.parameters for module in search.modules}
    assert sizes["/M/MatMul"] < sizes["/M/Gemm"]
    written = onnx.load(source.with_name("out.onnx"))
    onnx.checker.check_model(written)
    record = json.loads({entry.key: entry.value for entry in written.metadata_props}[QUANTIZATION_KEY])
    assert {module.tag: module.precision for module in search.modules} == {
        module["tag"]: module["requested"] for module in record["modules"]
    }
    assert all(module["why"] for module in record["modules"])


def test_size_of_the_file_is_a_limit(source: Path) -> None:
    """The limit includes graph and metadata; the hint names the smallest possible size, which is reached exactly."""
    searched(source, max_size="30kB")
    assert source.with_name("out.onnx").stat().st_size <= 30_000
    source.with_name("out.onnx").unlink()
    with pytest.raises(UsageError) as refused:
        searched(source, max_size="5kB")
    assert not source.with_name("out.onnx").exists()
    named = re.findall(r"[\d.]+kB", refused.value.hint)[0]
    searched(source, max_size=named)
    smallest = source.with_name("out.onnx").stat().st_size
    assert smallest <= 1000 * float(named.removesuffix("kB"))
    searched(source, max_size=f"{smallest}B")
    assert source.with_name("out.onnx").stat().st_size == smallest
    with pytest.raises(UsageError):
        searched(source, max_size=f"{smallest - 1}B")


@pytest.fixture
def rough(tmp_path: Path) -> Path:
    """A net with one output, in a file: errors of few outputs cancel, so that noise measured alone does not add up."""
    weights = ", ".join([*(weight(f"w_{number}", 64, 64) for number in range(3)), weight("w_3", 64, 1)])
    layers = " ".join(f"a_{k} = MatMul (h_{k}, w_{k}) h_{k + 1} = Tanh (a_{k})" for k in range(3))
    model = parse(
        f"m (float[N, 64] x) => (float[N, 1] y) <{weights}> {{ h_0 = Relu (x) {layers} y = MatMul (h_3, w_3) }}"
    )
    generator = np.random.default_rng(2)
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        numbers = generator.standard_normal(value.const_value.shape.numpy()) / 4
        value.const_value = ir.tensor(numbers.astype(np.float32), name=name)
    for number, node in enumerate(model.graph):
        write_tag(node, NodeTag(f"/M/L.{number // 2}", f"l.{number // 2}", "direct"))
    ir.save(model, tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


@TWO_BITS
def test_larger_budget_is_never_worse(rough: Path) -> None:
    """Rising limits give outputs that are at least as near, on the samples of the search."""
    reached = []
    for bits in (4.0, 4.6, 5.3):
        search = searched(rough, budget=f"{bits}bits", samples=4)
        assert search.mean_bits <= bits
        reached.append(next(trial.sqnr_db for trial in search.frontier if trial.is_chosen))
    assert reached == sorted(reached)
    assert reached[-1] > reached[0]


@pytest.mark.parametrize("graph", ["net", "convolutions"])
def test_bits_of_a_budget_equal_inspect(tmp_path: Path, graph: str) -> None:
    """Biases and convolutions count, which stay floating-point or have 16 bits; so does a file without a mixture."""
    ir.save(parse(NET if graph == "net" else CONVOLUTIONS), tmp_path / "in.onnx")
    search = searched(tmp_path / "in.onnx", budget="20bits")
    inspected = inspect_onnx(tmp_path / "out.onnx").total.bits
    assert inspected == pytest.approx(search.mean_bits, abs=0.05)
    assert search.mean_bits <= 20


def test_budget_below_the_float_weights_names_the_weights(tmp_path: Path) -> None:
    """Convolutions are not quantized in blocks: they need at least 16 bits, and the refusal names them."""
    ir.save(parse(CONVOLUTIONS), tmp_path / "in.onnx")
    with pytest.raises(UsageError) as refused:
        searched(tmp_path / "in.onnx", budget="4bits")
    assert "/M/Conv bf16" in refused.value.message
    least = float(re.findall(r"([\d.]+)bits", refused.value.hint)[0])
    assert searched(tmp_path / "in.onnx", budget=f"{least}bits").mean_bits <= least


def test_mixture_without_4_bits_is_not_called_int4(source: Path) -> None:
    """The record has the precision common to all modules, else ``mixed``."""
    for bits in ("16bits", "6bits"):
        search = searched(source, budget=bits)
        written = onnx.load(source.with_name("out.onnx"))
        record = json.loads({entry.key: entry.value for entry in written.metadata_props}[QUANTIZATION_KEY])
        used = {module.precision for module in search.modules}
        assert record["requested"]["precision"] == ("mixed" if len(used) > 1 else next(iter(used)))


def test_smallest_reaches_the_quality(source: Path) -> None:
    """The file reaches the minimum on the samples of the search, and every smaller uniform one does not."""
    search = searched(source, budget="smallest", min_sqnr_db=25.0)
    chosen = next(trial for trial in search.frontier if trial.is_chosen)
    assert chosen.sqnr_db is not None
    assert chosen.sqnr_db >= 25.0
    smaller = [trial for trial in search.frontier if trial.size_bytes < chosen.size_bytes and not trial.is_mixture]
    assert all(trial.sqnr_db is None or trial.sqnr_db < 30 for trial in smaller)


@TWO_BITS
def test_smallest_result_is_no_larger_than_a_sufficient_budget(rough: Path) -> None:
    """A search with fewer mean bits does not reach the quality of the smallest result."""
    smallest = searched(rough, budget="smallest", min_sqnr_db=12.0, samples=4)
    below = searched(rough, budget=f"{smallest.mean_bits - 0.1:.2f}bits", samples=4)
    reached = [trial.sqnr_db for trial in smallest.frontier if trial.is_chosen]
    others = [trial.sqnr_db for trial in below.frontier if trial.is_chosen]
    assert reached[0] is not None
    assert reached[0] >= 12.0
    assert others[0] is not None
    assert others[0] < reached[0]


_CHANNELS = ", ".join([weight("w_k1", 16, 4, 3, 3), weight("w_k2", 16, 16, 3, 3), weight("w_c", 16, 8)])
CONVOLUTIONS = f"""m (float[N, 4, 8, 8] x) => (float[N, 8] y) <{_CHANNELS}> {{
    a = Conv <pads = [1, 1, 1, 1]> (x, w_k1)
    r = Relu (a)
    b = Conv <pads = [1, 1, 1, 1]> (r, w_k2)
    t = Relu (b)
    p = ReduceMean <axes = [2, 3], keepdims = 0> (t)
    y = MatMul (p, w_c) }}"""
"""A small CNN: a module of convolutions and a module with a MatMul."""


def test_activations_of_a_cnn_are_chosen_by_module(tmp_path: Path) -> None:
    """A limit of quality leaves as few modules in float as possible; a limit of size is kept."""
    ir.save(parse(CONVOLUTIONS), tmp_path / "in.onnx")
    source = tmp_path / "in.onnx"
    loose, strict = (searched(source, mode="qdq", budget="smallest", min_sqnr_db=decibels) for decibels in (15.0, 39.0))
    assert {"w8a8"} == {module.precision for module in loose.modules}
    assert {"w8a8", "fp32"} == {module.precision for module in strict.modules}
    assert {"w8a8"} == set(strict.modules[0].alone_db)
    wide = searched(source, mode="qdq", ep="qnn", budget="8.7bits")
    # Which of them is nearer depends on the kernels: ONNX Runtime 1.32 rounds products of 16 bits more than 1.31.
    assert all({"w8a8", "mixed", "w8a16"} == set(module.alone_db) for module in wide.modules)
    within = {trial.sqnr_db: trial.is_chosen for trial in wide.frontier if trial.mean_bits <= 8.7}
    assert within[max(within, key=lambda sqnr_db: sqnr_db or 0)]
    searched(source, mode="qdq", max_size="11kB")
    assert source.with_name("out.onnx").stat().st_size <= 11_000
    assert {"QuantizeLinear"} <= {node.op_type for node in onnx.load(source.with_name("out.onnx")).graph.node}


LANGUAGE = f"""m (int64[1, N] input_ids) => (float[1, N, 64] logits) <
    {weight("w_e", 64, 128)}, {weight("w_1", 128, 128)}, {weight("w_2", 128, 64)}, float[1] small = {{0.03}}> {{
    e = Gather (w_e, input_ids)
    a = MatMul (e, w_1)
    r = Relu (a)
    s = Mul (r, small)
    logits = MatMul (s, w_2) }}"""
"""A model that predicts the next token."""


@pytest.fixture
def language(tmp_path: Path) -> Path:
    """A language model in a file and, in ``texts``, texts generated by the model itself."""
    ir.save(parse(LANGUAGE), tmp_path / "language.onnx")
    (tmp_path / "texts").mkdir()
    session = Session(tmp_path / "language.onnx")
    for number in range(8):
        tokens = [number]
        while len(tokens) < 12:
            tokens.append(
                int(session.run({"input_ids": np.array([tokens])})["logits"][0, -1].argsort()[-1 - number % 2])
            )
        np.savez(tmp_path / "texts" / f"{number}.npz", input_ids=np.array([tokens]))
    return tmp_path / "language.onnx"


@TWO_BITS
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_smallest_within_a_drop_of_perplexity(language: Path, algorithm: str) -> None:
    """The perplexity on the samples that were held out is within the limit; a looser limit gives no larger file."""
    texts = str(language.with_name("texts"))
    strict, loose = (
        searched(language, max_drop=drop, calibration_data=texts, algorithm=algorithm)
        for drop in ("perplexity=0.1%", "perplexity=50%")
    )
    assert strict.float_perplexity is not None
    assert strict.perplexity is not None
    assert loose.perplexity is not None
    assert strict.perplexity <= strict.float_perplexity * 1.001
    assert loose.perplexity <= strict.float_perplexity * 1.5
    assert loose.mean_bits < strict.mean_bits


def test_halves_within_a_drop_of_perplexity(language: Path) -> None:
    """With a precision of 16 bits, the search compares modules in float32 by the perplexity."""
    texts = str(language.with_name("texts"))
    search = searched(language, precision="fp16", max_drop="perplexity=5%", calibration_data=texts)
    assert search.float_perplexity is not None
    assert search.perplexity is not None
    assert search.perplexity <= search.float_perplexity * 1.05
    assert ("fp16", {}) == (search.form, dict(search.rules))


def test_perplexity_is_measured_on_the_held_out_texts(language: Path) -> None:
    """The test computes the perplexity by hand, on every fourth file."""
    texts = language.with_name("texts")
    search = searched(language, max_drop="perplexity=5%", calibration_data=str(texts))
    session, losses = Session(language), []
    for path in sorted(texts.glob("*.npz"))[3::4]:
        tokens = np.load(path)["input_ids"]
        logits = session.run({"input_ids": tokens})["logits"][0, :-1].astype(np.float64)
        normalized = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.append(-normalized[np.arange(len(normalized)), tokens[0, 1:]])
    assert search.float_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)


def test_drop_without_a_perplexity_is_refused(source: Path, tmp_path: Path) -> None:
    """The message names the inputs and outputs of the model."""
    np.savez(tmp_path / "data.npz", x=np.ones((2, 128), np.float32))
    with pytest.raises(UsageError, match=r"takes x and returns y"):
        searched(source, max_drop="perplexity=2%", calibration_data=str(tmp_path / "data.npz"))


@pytest.mark.parametrize(
    ("budget", "meant"), [("3MB", "--max-size 3MB"), ("4", "--budget 4bits"), ("Smallest", "--budget smallest")]
)
def test_budget_in_other_units_names_the_meant_option(budget: str, meant: str) -> None:
    """A size belongs to another option, and a number lacks its unit."""
    with pytest.raises(UsageError) as refused:
        QuantizeOptions(budget=budget).refuse_contradictions()
    assert meant in refused.value.hint


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget": "4"}, UsageError),
        ({"budget": "3MB"}, UsageError),
        ({"budget": "4bits", "exclude": ("M",), "include": ("M",)}, UsageError),
        ({"budget": "-1bits"}, UsageError),
        ({"budget": "0bits"}, UsageError),
        ({"budget": "1bits"}, UsageError),
        ({"budget": "32bits"}, UsageError),
        ({"max_size": "100MB"}, UsageError),
        ({"max_size": "10"}, UsageError),
        ({"max_size": "1kB"}, UsageError),
        ({"max_size": "30kb"}, UsageError),
        ({"budget": "4bits", "max_size": "10MB"}, UsageError),
        ({"budget": "4bits", "precision": "int4"}, UsageError),
        ({"budget": "4bits", "mode": "dynamic"}, UsageError),
        ({"budget": "4bits", "per_module": {"x": "int8"}}, UsageError),
        ({"budget": "4bits", "block_size": 32}, UsageError),
        ({"budget": "smallest", "min_sqnr_db": None}, UsageError),
        ({"max_drop": "perplexity=2%"}, UsageError),
        ({"max_drop": "accuracy=2%", "calibration_data": "."}, UsageError),
        ({"max_drop": "perplexity=2%", "budget": "4bits"}, UsageError),
        ({"budget": "smallest", "min_sqnr_db": 500.0}, VerificationError),
    ],
    ids=str,
)
def test_unreachable_limits_are_refused(source: Path, options: dict[str, Any], error: type[WinMLError]) -> None:
    """No file is written after a refusal."""
    with pytest.raises(error):
        searched(source, **options)
    assert not source.with_name("out.onnx").exists()


@TWO_BITS
@pytest.mark.parametrize(("option", "value"), [("budget", "2bits"), ("max_size", "10kB")])
def test_remedies_of_a_too_small_limit_work(source: Path, option: str, value: str) -> None:
    """The smallest variant does not reach the minimum SQNR: a larger limit or a lower minimum is needed."""
    with pytest.raises(UsageError) as refused:
        searched(source, **{option: value}, min_sqnr_db=25.0)
    hint = refused.value.hint
    remedies = re.fullmatch(r"Allow (\S+) or more, or (\S+) or more with min_sqnr_db (\S+) \(or verify=False\)\.", hint)
    assert remedies, hint
    larger, smallest, least_db = remedies.groups()
    assert searched(source, **{option: larger}, min_sqnr_db=25.0).mean_bits > 2
    assert searched(source, **{option: smallest}, min_sqnr_db=float(least_db)).mean_bits > 2


@pytest.mark.parametrize("options", [{"budget": "32bits"}, {"max_size": "1MB"}], ids=str)
def test_part_within_a_limit_stays_float_beside_larger_parts(source: Path, options: dict[str, str]) -> None:
    """The part alone is refused; with permission to stay float, no search is made."""
    task = GraphFileTask(source, source.with_name("out.onnx"))
    asked = QuantizeOptions(**options)
    with pytest.raises(UsageError):
        make_file(task, Quantization(source, asked, {}))
    assert not source.with_name("out.onnx").exists()
    result = make_file(task, Quantization(source, asked, {}, may_stay_float=True))
    assert ("fp32", (), None) == (result.precision, result.modes, result.budget)
    x = np.ones((2, 128), np.float32)
    before, after = (Session(path).run({"x": x})["y"] for path in (source, source.with_name("out.onnx")))
    assert np.array_equal(before, after)


def test_drop_in_a_number_is_above_the_perplexity_of_the_source(language: Path) -> None:
    """A share of the same size gives the same file."""
    texts = str(language.with_name("texts"))
    share = searched(language, max_drop="perplexity=10%", calibration_data=texts)
    assert share.float_perplexity is not None
    number = searched(language, max_drop=f"perplexity={0.1 * share.float_perplexity}", calibration_data=texts)
    assert number.mean_bits == share.mean_bits
    assert number.perplexity is not None
    assert number.perplexity <= 1.1 * share.float_perplexity


@TWO_BITS
def test_search_reports_step_number_and_total(source: Path) -> None:
    """Formats, modules and sizes, each with its number."""
    told: list[str] = []
    searched(source, budget="4bits", on_step=lambda event: told.append(event.running.progress if event.running else ""))
    steps = [re.findall(r"\d+", words) for words in told if words.startswith("step")]
    assert ["1", "2", "3"] == list(dict.fromkeys(step for step, *_ in steps))
    assert {"3"} == {total for _, total, *_ in steps}
    assert [["1", "2"], ["2", "2"]] == [rest for step, _, *rest in steps if step == "2"]


def test_algorithm_and_blocks_are_chosen_by_module(source: Path) -> None:
    """Each module has an algorithm and its output error, and all modules together keep the limit.

    Every algorithm alone is measured in the best uniform variant, and none is better within the limit.
    """
    weights = ", ".join([weight("w_1", 128, 16), weight("w_2", 128, 16), weight("w_b", 16)])
    net = f"""m (float[N, 128] x) => (float[N, 16] y) <{weights}> {{
        a = MatMul (x, w_1) b = Gemm (x, w_2, w_b) y = Add (a, b) }}"""
    ir.save(parse(net), source)
    search = searched(source, budget="5.4bits", algorithm="auto", samples=8)
    assert search.mean_bits <= 5.4
    chosen = next(trial for trial in search.frontier if trial.is_chosen)
    uniform = {trial.form: trial for trial in search.frontier if not trial.is_mixture}
    assert {"int4/64", "int4/64 hqq", "int4/16"} < uniform.keys()
    assert {"gptq", "awq", "k_quant", "rtn"} <= {form.partition(" ")[2] for form in uniform}
    fitting = [trial.sqnr_db for trial in uniform.values() if trial.mean_bits <= 5.4 and trial.sqnr_db is not None]
    assert chosen.sqnr_db is not None
    assert chosen.sqnr_db >= max(fitting)
    for module in (module for module in search.modules if module.block_size is not None):
        is_scaled = module.algorithm.startswith("awq")
        alike = [db for name, db in module.own_db.items() if name.startswith("awq") == is_scaled]
        assert module.own_db[module.algorithm] == max(alike)
        assert f"{module.algorithm}, by its own outputs: " in module.why
