"""Matching of dataset labels and model classes.

Labels are matched by name; numbers are class indices. If the model has no meaningful names (``LABEL_0``, ``LABEL_1``,
or digits), the order of the dataset's labels is used, or digits are class indices; both cases are noted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.words import first_words

_GENERIC = re.compile(r"label[_ ]?\d+", re.IGNORECASE)
"""Specified: default class name of transformers."""
_MAX_LISTED_LABELS = 12
"""Maximum number of labels in a message. Chosen: two lines."""
_LONGEST_VALUE = 60
"""Maximum characters of a value in a message. Chosen: half a line."""


@dataclass(frozen=True)
class LabelMap:
    """Label of a dataset → class index."""

    classes: Mapping[Any, int]
    model: tuple[str, ...]
    """Names of the model's classes, by index."""
    column: str
    notes: tuple[str, ...] = ()

    def number(self, label: object) -> int:
        """Return the class index of a label.

        Raises:
            UsageError: the model has no such class.
        """
        index = self.classes.get(_check_label(label, self.column))
        if index is None:
            raise _unknown_labels_error([label], self)
        return index

    def name(self, label: object) -> str:
        """Return the model's class name of a label.

        Raises:
            UsageError: the model has no such class.
        """
        return self.model[self.number(label)]


def model_labels(config: object) -> tuple[str, ...]:
    """Names of a model's classes by index, from its transformers config; ``()`` without a config."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[key]) for key in sorted(names, key=int))


def label_names(feature: object) -> tuple[str, ...] | None:
    """Names of the labels of a column, or of the labels in its lists; ``None`` if its type has no names."""
    while feature is not None and not hasattr(feature, "names"):
        feature = getattr(feature, "feature", None)
    return tuple(map(str, feature.names)) if feature is not None and feature.names else None


def match_labels(model: Sequence[str], names: Sequence[str] | None, values: Iterable[object], column: str) -> LabelMap:
    """Match the labels of a column with the classes of a model.

    Args:
        model: Names of the model's classes, by index.
        names: Names of the labels by index, if the type of the column has names.
        values: Every label that occurs.
        column: Name of the column, for messages.

    Raises:
        UsageError: the labels differ (shows both), or a label is missing, a list, or not an integer.
    """
    label_map = LabelMap({}, tuple(model), column)
    occurring = list(dict.fromkeys(_check_label(value, column) for value in values))
    if names is not None:
        # Only names of occurring labels count.
        spoken = {value: names[int(value)] for value in occurring if _is_number(value) and 0 <= value < len(names)}
    else:
        spoken = {value: value for value in occurring if isinstance(value, str)}
        if all(name.strip().isdecimal() for name in model):
            spoken |= {value: str(int(value)) for value in occurring if _is_number(value) and value >= 0}
    numbers = {value: int(value) for value in occurring if _is_number(value) and value not in spoken}
    classes, notes = _match_named_labels(model, names, spoken, column)
    if classes is None:
        raise _unknown_labels_error(list(spoken.values()), label_map)
    classes = {**classes, **{value: number for value, number in numbers.items() if 0 <= number < len(model)}}
    if unknown := [value for value in occurring if value not in classes]:
        raise _unknown_labels_error(unknown, label_map)
    return LabelMap(classes, tuple(model), column, notes)


def _match_named_labels(
    model: Sequence[str], names: Sequence[str] | None, spoken: Mapping[Any, str], column: str
) -> tuple[dict[Any, int] | None, tuple[str, ...]]:
    """Match named labels: label → class index, or ``None`` if a name is unknown to the model; and notes.

    Args:
        model: Names of the model's classes.
        names: Names of the dataset's classes in order, if declared.
        spoken: Label → its name.
        column: The column, for notes.
    """
    classes = _match_by_name(model, spoken)
    if classes is not None:
        moved = any(_is_number(label) and label != number for label, number in classes.items())
        reported = f"Numbers in column {column} are used as class names, since the model's class names are digits."
        return classes, (reported,) if names is None and moved else ()
    if not all(_GENERIC.fullmatch(name) or name.strip().isdecimal() for name in model):
        return None, ()
    if all(name.strip().isdecimal() and int(name) < len(model) for name in spoken.values()):
        reported = f"The config names no classes: digits in column {column} are used as class indices."
        return {label: int(name) for label, name in spoken.items()}, (reported,)
    if names is not None and len(names) <= len(model):
        listed = first_words(names, _MAX_LISTED_LABELS)
        reported = f"The config names no classes: the labels of column {column} are used in their order: {listed}."
        return {label: int(label) for label in spoken}, (reported,)
    return None, ()


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _check_label(value: object, column: str) -> Any:
    """Check a label, and return it unchanged.

    Raises:
        UsageError: the label is missing, a list, or not an integer.
    """
    if isinstance(value, str) or (isinstance(value, Real) and float(value).is_integer()):
        return value
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        raise UsageError(
            f"column {column} has a sample without a label",
            hint=f"Remove such samples from the dataset, or choose a different column with {opt.columns}.",
        )
    problem = f"{type(value).__name__} {str(value)[:_LONGEST_VALUE]} instead of one label"
    if isinstance(value, Real):
        problem = f"the number {value}, but class indices are integers"
    raise UsageError(
        f"column {column} contains {problem}", hint="Provide one label per sample: the name or index of a class."
    )


def _match_by_name(model: Sequence[str], spoken: Mapping[object, str]) -> dict[Any, int] | None:
    """Match labels by name: label → class index; ``None`` if a name is unknown to the model."""
    for spelled in (str, _normalize_name):
        numbers = {spelled(name): number for number, name in enumerate(model)}
        indices = {label: numbers[spelled(name)] for label, name in spoken.items() if spelled(name) in numbers}
        if len(indices) == len(spoken):
            return indices
    return None


def _normalize_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def _unknown_labels_error(labels: Sequence[object], label_map: LabelMap) -> UsageError:
    """Create the error about labels unknown to a model."""
    if list(labels) == [-1]:
        return UsageError(
            f"column {label_map.column} contains the label -1: the labels of this split are not public",
            hint=f"Use a different {opt.split}.",
        )
    return UsageError(
        f"the labels of column {label_map.column} do not match the model: {first_words(labels, _MAX_LISTED_LABELS)}; "
        f"the config has {first_words(label_map.model, _MAX_LISTED_LABELS) or 'none'}",
        hint="Use the names of id2label in the dataset, or the names of the dataset in the config.",
    )
