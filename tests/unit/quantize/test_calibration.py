"""Ranges over all samples, in bounded memory, and refusals of values without a range."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from unit.quantize.qdq_graphs import measure_ranges, tagged_graph
from winml.modelkit.errors import QuantizeError
from winml.modelkit.quantize.calibration import activation_statistics
from winml.modelkit.quantize.calibration.activation_statistics import (
    ValueStatistics,
    measure_statistics,
    range_of,
)

BODY = "m (float[N, 4] x) => (float[N, 4] y) { h = MatMul (x, w1) y = Log (h) }"
TAGS = ("/M/Up", "/M/Log")
SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((seed + 50, 4)).astype(np.float32)} for seed in range(5)]


@pytest.fixture
def model() -> ir.Model:
    """A product with random weights, and its logarithm."""
    return tagged_graph(BODY, TAGS, {"w1": (4, 4)})


def _product(model: ir.Model, sample: dict[str, Any]) -> Any:
    weight = model.graph.initializers["w1"].const_value
    assert weight is not None
    return sample["x"] @ weight.numpy()


def test_extremes_cover_all_samples(model: ir.Model) -> None:
    """Ranges of graph inputs and of inner values are correct, and the model is not changed."""
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    ranges = measure_ranges(model, ("x", "h"), lambda _: SAMPLES, "minmax")
    products = np.concatenate([_product(model, sample) for sample in SAMPLES])
    assert (pytest.approx(products.min(), rel=1e-5), pytest.approx(products.max(), rel=1e-5)) == ranges["h"]
    assert min(sample["x"].min() for sample in SAMPLES) == ranges["x"][0]
    assert before == ir.to_proto(model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_methods_that_drop_the_rare_stay_inside_the_extremes(method: Any, model: ir.Model) -> None:
    """One value far out stretches the smallest and largest, not the range they choose."""
    outlier = {"x": np.random.default_rng(9).standard_normal((50_000, 4)).astype(np.float32)}
    outlier["x"][0, 0] = 60.0
    samples = [*SAMPLES, outlier]
    low, high = measure_ranges(model, ("x",), lambda _: samples, method)["x"]
    assert -8 < low < -2
    assert 2 < high < 59
    assert 60.0 == measure_ranges(model, ("x",), lambda _: samples, "minmax")["x"][1]


def test_size_of_the_groups_changes_no_range(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is larger than a group is alone in its own."""
    whole = measure_ranges(model, ("x", "h"), lambda _: SAMPLES, "percentile")
    monkeypatch.setattr(activation_statistics, "GROUP_BYTES", 100)
    assert whole == measure_ranges(model, ("x", "h"), lambda _: SAMPLES, "percentile")
    groups = activation_statistics._group_values({"a": 90, "b": 50, "c": 50, "d": 500})
    assert [["a"], ["b", "c"], ["d"]] == list(groups)


@pytest.mark.parametrize(("value", "words"), [(np.nan, "NaN"), (np.inf, "infinite")])
@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_non_finite_value_names_module_value_and_sample(value: float, words: str, method: Any, model: ir.Model) -> None:
    """The message names the first such value in the order of the graph."""
    bad = SAMPLES[1]["x"].copy()
    bad[2, 1] = value
    with pytest.raises(QuantizeError) as caught:
        measure_ranges(model, ("h",), lambda _: [SAMPLES[0], {"x": bad}], method)
    for part in ("value h", "module /M/Up", words, "sample 2"):
        assert part in caught.value.message


def test_overflowing_sum_is_no_error(model: ir.Model) -> None:
    """Large values are finite, though their sum is not."""
    large = {"x": np.array([[3e38, 3e38, -3e38, -3e38], [3e38, 0, 0, -3e38]], np.float32)}
    assert (pytest.approx(-3e38), pytest.approx(3e38)) == measure_ranges(model, ("x",), lambda _: [large], "minmax")[
        "x"
    ]


def test_activations_do_not_outlive_their_readers(model: ir.Model) -> None:
    """No value is an output of the file that finds extremes, and each reduction stands behind its maker."""
    observed = activation_statistics._add_reductions(model, ("x", "h"), with_sizes=False)
    assert ["x"] * 3 + ["h"] * 3 == [str(value.name).split("/")[0] for value in observed.graph.outputs]
    assert [*["Reduce"] * 3, "MatMul", *["Reduce"] * 3, "Log"] == [
        node.op_type.removesuffix(end) if node.op_type.startswith("Reduce") else node.op_type
        for node in observed.graph
        for end in [node.op_type[6:]]
    ]


@pytest.mark.parametrize("method", ["minmax", "entropy"])
def test_value_that_no_sample_has_is_refused(method: Any, model: ir.Model) -> None:
    """Empty samples give no range; one sample with elements is enough."""
    empty = {"x": np.zeros((0, 4), np.float32)}
    with pytest.raises(QuantizeError, match="/M/Up"):
        measure_ranges(model, ("h",), lambda _: [empty, empty], method)
    assert measure_ranges(model, ("h",), lambda _: [SAMPLES[0]], method) == measure_ranges(
        model, ("h",), lambda _: [empty, SAMPLES[0]], method
    )


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_no_method_clips_at_16_bits(model: ir.Model, method: Any) -> None:
    """The range has a margin for other data; at 8 bits, the outlier is outside the range of the other methods."""
    values = np.random.default_rng(9).standard_normal((50_000, 4)).astype(np.float32)
    values[0, 0] = 60.0
    low, high = measure_ranges(model, ("x",), lambda _: [{"x": values}], method, bits=16)["x"]
    assert pytest.approx((1.25 * values.min(), 75.0)) == (low, high)


def test_least_squared_error_clips_an_outlier_at_8_bits(model: ir.Model) -> None:
    """An outlier three times as large as other values costs less if clipped than a larger step."""
    values = np.random.default_rng(0).standard_normal((100_000, 4)).astype(np.float32)
    values[0, 0] = 12
    samples = [{"x": part} for part in np.split(values, 4)]
    low, high = measure_ranges(model, ("x",), lambda _: samples, "mse")["x"]
    full = measure_ranges(model, ("x",), lambda _: samples, "minmax")["x"]
    assert high < 0.85 * full[1]

    def error(bounds: tuple[float, float]) -> float:
        step = (bounds[1] - bounds[0]) / 255
        rounded = np.clip(np.rint(values / step) * step, *bounds)
        return float(((rounded - values) ** 2).sum())

    assert error((low, high)) < error(full)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_statistics_read_back_give_the_same_ranges(model: ir.Model, method: Any) -> None:
    """JSON keeps every count, so that a stored file replaces the calibration."""
    for statistics in measure_statistics(model, ("x", "h"), lambda _: SAMPLES, with_histograms=True).values():
        again = ValueStatistics.from_record(json.loads(json.dumps(statistics.as_record())))
        assert range_of(statistics, method, 8) == range_of(again, method, 8)
