"""Refuses a baseline that would read other numbers out of the same samples, or mean other classes by the same numbers.

Both models are fed the arrays that the judged model's tokenizer makes, and both answers are read with its labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.model_config import open_config
from winml.modelkit.evaluate.processors import kinds_for, open_processor, processor_files

__all__ = ["refuse_other_labels", "refuse_other_vocabulary"]

_LABELED_TASKS = frozenset(
    {"image-classification", "image-segmentation", "object-detection", "text-classification", "token-classification"}
)
"""Tasks whose answers are numbers of classes."""
_HINT = "Give a baseline of the same checkpoint or fine-tuning, or judge each by itself: --baseline none."
_OPTION = "--baseline"
_SHOWN = 6
"""Labels of one side in a message. Chosen: enough to see which they are."""


def refuse_other_labels(task: str, config: Any, folder: Path, shown: str) -> None:
    """Refuse a baseline whose config gives the classes other names or numbers.

    Args:
        task: Canonical name.
        config: That of the judged model; None where it has none.
        folder: Where the config of the baseline lies.
        shown: The baseline, for people.

    Raises:
        UsageError: shows the labels of both.
        InputError: the config of the baseline is damaged.
    """
    if task not in _LABELED_TASKS:
        return
    ours, theirs = _labels(config), _labels(open_config(folder))
    if not ours or not theirs or ours == theirs:
        return
    are_unnamed = any(all(name == f"label_{number}" for number, name in labels.items()) for labels in (ours, theirs))
    if are_unnamed and ours.keys() == theirs.keys():
        return
    raise UsageError(
        f"{_OPTION} {shown}: its labels are {_label_words(theirs)}, and those of the model {_label_words(ours)}",
        hint=_HINT,
    )


def refuse_other_vocabulary(names: Sequence[str], model: Path, baseline: Path, shown: str) -> None:
    """Refuse a baseline whose tokenizer gives texts other numbers.

    Args:
        names: Of the inputs of the judged model.
        model: Folder of its tokenizer.
        baseline: Folder of the baseline's.
        shown: The baseline, for people.

    Raises:
        UsageError: says how many tokens are other ones.
        InputError: a tokenizer is damaged.
    """
    if "tokenizer" not in kinds_for(names):
        return
    if not all(any(map(_is_of_tokenizer, processor_files(folder))) for folder in (model, baseline)):
        return
    fast = [folder / "tokenizer.json" for folder in (model, baseline)]
    if all(path.is_file() for path in fast) and fast[0].read_bytes() == fast[1].read_bytes():
        return
    ours, theirs = (open_processor("tokenizer", folder, _OPTION).get_vocab() for folder in (model, baseline))
    if other := sum(ours.get(token) != number for token, number in theirs.items()) or abs(len(ours) - len(theirs)):
        raise UsageError(
            f"{_OPTION} {shown}: its tokenizer has {len(theirs)} tokens, {other} of them not as the model's "
            f"{len(ours)}: both are fed what the model's tokenizer makes",
            hint=_HINT,
        )


def _labels(config: Any) -> dict[int, str]:
    named = getattr(config, "id2label", None) or {}
    return {int(number): str(name).casefold() for number, name in named.items()}


def _label_words(labels: Mapping[int, str]) -> str:
    words = ", ".join(f"{number} {name}" for number, name in sorted(labels.items())[:_SHOWN])
    return words if len(labels) <= _SHOWN else f"{words} and {len(labels) - _SHOWN} more"


def _is_of_tokenizer(path: Path) -> bool:
    return path.name.startswith(("tokenizer", "vocab"))
