"""Which class of the model does a label of a data set mean?

Labels are matched by name. Numbers are the numbers of classes. Where the names of one side say nothing
(``LABEL_0``, ``LABEL_1``), the order of the other decides, which is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winml.modelkit.errors import UsageError

__all__ = ["LabelMap", "label_names", "match_labels", "model_labels"]

_GENERIC = re.compile(r"label[_ ]?\d+", re.IGNORECASE)
"""Specified: how transformers calls a class whose name nobody wrote down."""
_SHOWN = 12
"""Labels in a message. Chosen: two lines."""


@dataclass(frozen=True)
class LabelMap:
    """Labels of a data set → numbers of classes."""

    classes: Mapping[Any, int]
    model: tuple[str, ...]
    """Names of the model's classes, by number."""
    column: str
    notes: tuple[str, ...] = ()

    def number(self, label: Any) -> int:
        """Return the class a label means.

        Raises:
            UsageError: the model has no such class.
        """
        found = self.classes.get(label)
        if found is None:
            raise _unknown_labels([label], self)
        return found

    def name(self, label: Any) -> str:
        """Return the name the model has for the class a label means.

        Raises:
            UsageError: the model has no such class.
        """
        return self.model[self.number(label)]


def model_labels(config: Any) -> tuple[str, ...]:
    """Return the names of a model's classes, by number, of its transformers config; empty where there is none."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[key]) for key in sorted(names, key=int))


def label_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the labels of a column, or of the labels in its lists; None where its type knows none."""
    while feature is not None and not hasattr(feature, "names"):
        feature = getattr(feature, "feature", None)
    return tuple(map(str, feature.names)) if feature is not None and feature.names else None


def match_labels(model: Sequence[str], names: Sequence[str] | None, values: Iterable[Any], column: str) -> LabelMap:
    """Match the labels of a column with the classes of a model.

    Args:
        model: Names of the model's classes, by number.
        names: Names of the labels, by number, where the type of the column knows them.
        values: Every label that occurs.
        column: Name of the column, for messages.

    Raises:
        UsageError: they are not the same labels; shows both.
    """
    found = LabelMap({}, tuple(model), column)
    occurring = list(dict.fromkeys(values))
    spoken: dict[Any, str] = dict(enumerate(names)) if names is not None else {}
    if names is None:
        spoken = {value: value for value in occurring if isinstance(value, str)}
    numbers = {value: int(value) for value in occurring if not isinstance(value, str) and value not in spoken}
    classes = _by_name(model, spoken)
    notes: tuple[str, ...] = ()
    if classes is None and names is not None and _says_nothing(model) and len(names) <= len(model):
        classes = dict(zip(spoken, range(len(names)), strict=True))
        notes = (f"The config names no classes, so labels of {column} are taken in their order: {_listed(names)}.",)
    if classes is None:
        raise _unknown_labels(list(spoken.values()), found)
    classes = {**classes, **{value: number for value, number in numbers.items() if 0 <= number < len(model)}}
    if unknown := [value for value in occurring if value not in classes]:
        raise _unknown_labels(unknown, found)
    return LabelMap(classes, tuple(model), column, notes)


def _says_nothing(model: Sequence[str]) -> bool:
    return all(_GENERIC.fullmatch(name) for name in model)


def _by_name(model: Sequence[str], spoken: Mapping[Any, str]) -> dict[Any, int] | None:
    """Return the classes of labels that all have a name, or a number, that the model has; None where one has not."""
    for spelled in (str, _plain):
        numbers = {spelled(name): number for number, name in enumerate(model)}
        found = {label: numbers[spelled(name)] for label, name in spoken.items() if spelled(name) in numbers}
        if len(found) == len(spoken):
            return found
    if all(name.strip().isdecimal() and int(name) < len(model) for name in spoken.values()):
        return {label: int(name) for label, name in spoken.items()}
    return None


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def _unknown_labels(labels: Sequence[Any], found: LabelMap) -> UsageError:
    if list(labels) == [-1]:
        return UsageError(
            f"column {found.column} holds the label -1: the labels of this split are kept back",
            hint="Give another --split.",
        )
    return UsageError(
        f"labels of column {found.column} are not those of the model: {_listed(labels)}; the config has "
        f"{_listed(found.model) or 'none'}",
        hint="Give the data set the names of the config's id2label, or the config those of the data set.",
    )


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(str, names[:_SHOWN]))}{more}"
