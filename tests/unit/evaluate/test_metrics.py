"""Metrics, compared with libraries, both directly and by resampling of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap
from sklearn.metrics import jaccard_score

from winml.modelkit.evaluate.evaluation import Scores
from winml.modelkit.evaluate.metrics import (
    ACCURACY,
    CHARACTER_ERROR_RATE,
    CLASS_METRICS,
    CONFIDENCE,
    EXACT_MATCH,
    OVERLAP_F1,
    PEARSON,
    PERPLEXITY,
    RESAMPLES,
    SPAN_METRICS,
    SPEARMAN,
    TAG_ACCURACY,
    WORD_ERROR_RATE,
    Metric,
    Resamples,
    intervals,
    spans_of,
)
from winml.modelkit.evaluate.tasks.box_metrics import BOX_METRICS, Boxes
from winml.modelkit.evaluate.tasks.pixel_metrics import IGNORED, MEAN_IOU, PIXEL_ACCURACY, count_pairs

SAMPLES = 60


def _classes(generator: np.random.Generator) -> tuple[list[int], list[int]]:
    right = generator.integers(0, 5, SAMPLES)
    return np.where(generator.random(SAMPLES) < 0.6, right, generator.integers(0, 6, SAMPLES)).tolist(), right.tolist()


def _scores(generator: np.random.Generator) -> tuple[list[float], list[float]]:
    right = generator.random(SAMPLES).round(1)  # with ties
    return (right + generator.random(SAMPLES)).tolist(), right.tolist()


def _texts(generator: np.random.Generator) -> tuple[list[str], list[str]]:
    sides = [[" ".join(generator.choice(list("abc"), generator.integers(0, 6))) for _ in range(SAMPLES)] for _ in "12"]
    return sides[0], sides[1]


def _answers(generator: np.random.Generator) -> tuple[list[str], list[list[str]]]:
    predicted, right = _texts(generator)
    return predicted, [[text, predicted[number]] if number % 3 else [] for number, text in enumerate(right)]


def _surprises(generator: np.random.Generator) -> tuple[list[tuple[float, int]], list[None]]:
    return [(float(value) * 9, 9) for value in generator.random(SAMPLES)], [None] * SAMPLES


def _tags(generator: np.random.Generator) -> tuple[list[list[str]], list[list[str]]]:
    right = [generator.choice(["O", "B-A", "I-A", "B-B", "I-B"], 9).tolist() for _ in range(SAMPLES)]
    return [[tag if generator.random() < 0.9 else "O" for tag in tags] for tags in right], right


def _maps(generator: np.random.Generator) -> tuple[list[Any], list[None]]:
    def drawn(classes: int) -> Any:
        return generator.integers(0, classes, (8, 8))

    right = [np.where(drawn(10) == 0, IGNORED, drawn(4)) for _ in range(SAMPLES)]
    return [count_pairs(drawn(5), reference) for reference in right], [None] * SAMPLES


def _boxes(generator: np.random.Generator) -> tuple[list[Boxes], list[Boxes]]:
    def drawn(count: int) -> Boxes:
        places = generator.random((count, 2)) * 50
        corners = np.concatenate([places, places + 10 + generator.random((count, 2)) * 40], axis=1)
        return Boxes(corners, generator.integers(0, 3, count))

    right = [drawn(int(generator.integers(0, 5))) for _ in range(SAMPLES)]
    found = []
    for boxes in right:
        more = drawn(2)
        corners = np.concatenate([boxes.corners + generator.normal(0, 3, boxes.corners.shape), more.corners])
        classes = np.concatenate([boxes.classes, more.classes])
        found.append(Boxes(corners, classes, generator.random(len(classes))))
    return found, right


CASES = {
    _classes: CLASS_METRICS,
    _scores: (SPEARMAN, PEARSON),
    _texts: (WORD_ERROR_RATE, CHARACTER_ERROR_RATE),
    _answers: (EXACT_MATCH, OVERLAP_F1),
    _surprises: (PERPLEXITY,),
    _tags: (*SPAN_METRICS, TAG_ACCURACY),
    _maps: (MEAN_IOU, PIXEL_ACCURACY),
    _boxes: BOX_METRICS,
}


@pytest.mark.parametrize(("drawn", "metrics"), CASES.items(), ids=[drawn.__name__[1:] for drawn in CASES])
def test_resampled_value_of_all_samples_is_the_librarys(drawn: Any, metrics: Sequence[Metric]) -> None:
    """The resampled value equals the library's if each sample is used once."""
    predictions, references = drawn(np.random.default_rng(0))
    for metric in metrics:
        measured = metric.measured(predictions, references)
        once = measured.resampled(Resamples(np.arange(SAMPLES)[None]))
        [[interval]] = intervals([(measured, None)], SAMPLES, seed=0)
        assert once[0] == pytest.approx(measured.value), metric.name
        assert interval[0] < measured.value < interval[1]


def test_interval_equals_scipy() -> None:
    """The percentiles of the same draws, which scipy computes for one metric at a time."""
    predictions, references = _classes(np.random.default_rng(1))
    measured = CLASS_METRICS[0].measure(predictions, references)
    expected = bootstrap(
        (np.arange(SAMPLES),),
        lambda drawn, axis: measured.resampled(Resamples(drawn)) if drawn.ndim > 1 else measured.value,  # noqa: ARG005
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(5),
    ).confidence_interval

    [[found]] = intervals([(measured, None)], SAMPLES, seed=5)

    assert tuple(expected) == pytest.approx(found)


def test_interval_of_a_difference_excludes_common_variation() -> None:
    """A model with one more wrong sample is worse by one sample in every resample."""
    right = [0, 1] * 200
    baseline = [1 - label if number < 100 else label for number, label in enumerate(right)]
    model = [1 - label if number <= 100 else label for number, label in enumerate(right)]
    accuracy = CLASS_METRICS[0]

    [found] = intervals([(accuracy.measure(model, right), accuracy.measure(baseline, right))], len(right), seed=1)

    assert found[0][1] - found[0][0] > 0.07
    assert found[2][0] >= -0.011
    assert found[2][1] == 0


@pytest.mark.parametrize(
    ("name", "ends", "value", "expected"),
    [
        ("accuracy", (1.0, 1.0), 1.0, (0.94, 1.0)),
        ("accuracy", (0.0, 0.0), 0.0, (0.0, 0.06)),
        ("accuracy", (0.3, 0.7), 0.5, (0.3, 0.7)),  # wider than the resolution
        ("accuracy", (0.94, 1.0), 0.98, (0.92, 1.0)),  # one of 50 samples is wrong
        ("spearman", (0.97, 0.99), 0.98, (0.97, 0.99)),  # each sample has a part of it
        ("perplexity", (20.0, 20.0), 20.0, (20.0, 20.0)),
    ],
)
def test_interval_is_not_narrower_than_samples_resolve(
    name: str, ends: tuple[float, float], value: float, expected: tuple[float, float]
) -> None:
    """An event that none of 50 samples shows has at most the probability 3/50, at 95 %."""
    metric = {item.name: item for item in (ACCURACY, SPEARMAN, PERPLEXITY)}[name]
    assert expected == pytest.approx(metric.resolved(ends, value, 50))


def test_equal_predictions_bound_the_difference() -> None:
    assert (-0.01, 0.01) == pytest.approx(ACCURACY.resolved((0.0, 0.0), 0.0, 300, is_difference=True))
    assert (-0.5, 1.0) == ACCURACY.resolved((0.5, 0.5), 0.5, 2, is_difference=True)


def test_intervals_depend_on_the_seed() -> None:
    predictions, references = _classes(np.random.default_rng(2))
    measured = CLASS_METRICS[1].measure(predictions, references)
    ends = [intervals([(measured, None)], SAMPLES, seed) for seed in (3, 3, 4)]

    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


def test_mean_iou_is_the_jaccard_score_of_all_pixels() -> None:
    """Counted pairs say the same as the pixels themselves; pixels that are left out count on neither side."""
    generator = np.random.default_rng(4)
    right, predicted = generator.integers(0, 4, (2, 3, 6, 6))
    right[0, 0] = IGNORED
    pairs = [count_pairs(*maps) for maps in zip(predicted, right, strict=True)]
    counted = right != IGNORED

    expected = jaccard_score(right[counted], predicted[counted], average="macro")

    assert MEAN_IOU.measure(pairs, [None] * 3).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "predictions", "references"),
    [
        (SPEARMAN, [0.5, 0.5], [1.0, 2.0]),
        (SPAN_METRICS[0], [["O"]], [["O"]]),
        (BOX_METRICS[0], [Boxes(np.zeros((0, 4)), np.zeros(0), np.zeros(0))], [Boxes(np.zeros((0, 4)), np.zeros(0))]),
    ],
    ids=["no spread", "no span", "no object"],
)
def test_metric_without_samples_is_undefined(metric: Metric, predictions: Any, references: Any) -> None:
    assert np.isnan(metric.measured(predictions, references).value)


@pytest.mark.parametrize(("last", "single"), [("E", "S"), ("L", "U")], ids=["IOBES", "BILOU"])
def test_spans_are_the_same_in_every_scheme(last: str, single: str) -> None:
    tags = ["B-A", "I-A", f"{last}-A", "B-A", f"{last}-A", f"{single}-A", f"{single}-A", "O", f"{single}-B"]
    iob2 = ["B-A", "I-A", "I-A", "B-A", "I-A", "B-A", "B-A", "O", "B-B"]

    assert spans_of(tags) == spans_of(iob2)
    assert len(spans_of(tags)) == 5


def test_images_are_matched_once_for_all_metrics_of_boxes() -> None:
    predictions, references = _boxes(np.random.default_rng(6))
    prepared: dict[Any, Any] = {}
    first = BOX_METRICS[0].measured(predictions, references, prepared)
    evaluation = next(iter(prepared.values()))
    second = BOX_METRICS[1].measured(predictions, references, prepared)

    assert list(prepared.values()) == [evaluation]
    assert second.value == BOX_METRICS[1].measured(predictions, references).value > first.value


def test_pairs_of_many_classes_are_counted_like_pairs_of_few() -> None:
    generator = np.random.default_rng(7)
    right, predicted = generator.integers(0, 3, (2, 9, 9))
    few, many = count_pairs(predicted, right), count_pairs(predicted, right * 2_000_000)

    assert few[:, 2].sum() == 81
    assert (few * [2_000_000, 1, 1]).tolist() == many.tolist()


def test_confusion_of_many_classes_folds_those_without_errors() -> None:
    """Classes 3 and 7 are confused; of the others, the first eight have rows of their own."""
    labels = [*range(15), 3, 7]
    sides: Any = (SimpleNamespace(predictions=[*range(15), 7, 3]), SimpleNamespace(predictions=labels))
    confusion = Scores(sides, references=labels).confusion([f"c{number}" for number in range(20)])
    assert confusion is not None
    assert ([f"c{number}" for number in range(10)], 5) == ([*confusion.classes], confusion.folded)
    assert (1, 1, 1) == (confusion.model[3][3], confusion.model[3][7], confusion.model[7][3])
    assert confusion.baseline is not None
    assert (2, 0, 5) == (confusion.baseline[3][3], confusion.baseline[3][7], confusion.baseline[10][10])
    assert [17, 17] == [sum(map(sum, matrix)) for matrix in (confusion.model, confusion.baseline)]
    assert Scores(sides, references=labels).confusion(()) is None
