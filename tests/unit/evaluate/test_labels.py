"""Matching of a data set's labels with a model's classes: by name, number or order, or refusal."""

from __future__ import annotations

import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.labels import match_labels

MODEL = ("negative", "positive")


def test_names_are_matched_in_any_order() -> None:
    labels = match_labels(MODEL, ("Positive", "NEGATIVE"), [0, 1], "label")

    assert [labels.number(0), labels.number(1)] == [1, 0]


def test_texts_are_matched_by_name() -> None:
    assert match_labels(MODEL, None, ["positive"], "label").number("positive") == 1


def test_numbers_are_classes() -> None:
    assert match_labels(MODEL, None, [0, 1, 1], "label").number(1) == 1


def test_numeric_names_are_classes() -> None:
    """Folders named 0, 1, 10, 2 are sorted as text; the number counts."""
    model = tuple(f"LABEL_{number}" for number in range(11))

    assert match_labels(model, ("0", "1", "10", "2"), [2], "label").number(2) == 10


def test_label_order_is_used_with_a_note_if_the_config_has_no_names() -> None:
    labels = match_labels(("LABEL_0", "LABEL_1"), ("cat", "dog"), [0, 1], "label")

    assert labels.number(1) == 1
    assert "cat, dog" in labels.notes[0]


@pytest.mark.parametrize(
    ("names", "values", "shown"),
    [
        (("good", "bad"), [0], "good"),
        (None, ["good"], "good"),
        (None, [0, 7], "7"),
    ],
    ids=["names", "texts", "numbers"],
)
def test_unknown_labels_are_refused_with_both_lists(
    names: tuple[str, ...] | None, values: list[object], shown: str
) -> None:
    with pytest.raises(UsageError) as raised:
        match_labels(MODEL, names, values, "stars")

    assert raised.value.message == (
        f"the labels of column stars do not match the model: {shown}; the config has negative, positive"
    )


def test_withheld_labels_are_reported() -> None:
    with pytest.raises(UsageError, match="not public"):
        match_labels(MODEL, MODEL, [-1], "label")


def test_names_that_no_sample_has_do_not_count() -> None:
    assert match_labels(MODEL, ("positive", "neutral"), [0], "label").number(0) == 1


def test_digits_are_class_numbers_only_without_names_in_the_config() -> None:
    labels = match_labels(("LABEL_0", "LABEL_1"), None, ["1", "0"], "label")

    assert labels.number("1") == 1
    assert "class indices" in labels.notes[0]
    with pytest.raises(UsageError, match=r"1, 0; .* negative, positive"):
        match_labels(MODEL, None, ["1", "0"], "label")


def test_numbers_are_names_if_the_model_has_digits_as_names() -> None:
    labels = match_labels(("1", "2", "3"), None, [1, 3.0], "stars")

    assert [labels.number(1), labels.number(3.0)] == [0, 2]
    assert "class names" in labels.notes[0]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "column stars .*without"),
        (float("nan"), "column stars .*without"),
        (0.5, "column stars .* 0.5"),
        ([0, 1], r"column stars .* \[0, 1\]"),
    ],
    ids=["missing", "nan", "fraction", "list"],
)
def test_invalid_labels_are_refused(value: object, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        match_labels(MODEL, None, [0, value], "stars")
