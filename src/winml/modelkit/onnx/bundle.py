"""Which files are the parts of one model, and which output of one feeds which input of another?

Reads and describes the ``winml.part`` metadata of FORMATS, and reads ``winml.model``. A file without it is a model of
its own. Knows nothing of how the parts were made, and runs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.metadata_keys import MODEL_KEY, PART_KEY
from winml.modelkit.options import JsonError, load_metadata
from winml.modelkit.records import Record, entry


class _NamedPart(Protocol):
    """What the records of a part have in common."""

    @property
    def name(self) -> str:
        """``model`` for the only part of a model."""


PartT = TypeVar("PartT", bound=_NamedPart)


@dataclass(frozen=True)
class PartFeed(Record):
    """An output of one part that becomes an input of another, or of the same part in its next run."""

    output: str
    part: str
    """The part that takes it."""
    input: str


@dataclass(frozen=True)
class TextTokens(Record):
    """How a text begins and ends, where the files beside a model do not say it."""

    first: int
    """The token that is given to the first run."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""


@dataclass(frozen=True)
class PartDescription(Record):
    """What a file says about the part it holds."""

    name: str
    part_names: tuple[str, ...] = field(metadata=entry("of"))
    """All parts of the model, in the order in which they run."""
    feeds: tuple[PartFeed, ...] = ()
    """Where the outputs of this part go."""
    positions: int | None = field(default=None, metadata=entry(omit_none=True))
    """Tokens per row that it has positions for, those in the cache included; None: any number, or nobody knows."""
    text: TextTokens | None = field(default=None, metadata=entry(omit_none=True))
    """How a text begins and ends; None: the files beside the model say it."""

    @property
    def is_one_of_several(self) -> bool:
        """Whether the model has other parts."""
        return len(self.part_names) > 1


@dataclass(frozen=True)
class ModelBundle:
    """The files of one model of several parts, in the order in which they run."""

    paths: Mapping[str, Path]
    """Name of the part → its file."""
    feeds: Mapping[str, tuple[PartFeed, ...]]
    """Name of the part → where its outputs go."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> ModelBundle:
        """Put together the parts of one model from their files, given in any order.

        Raises:
            InputError: a file is no part of a model, or the files are not all the parts of one model.
        """
        described: dict[str, tuple[Path, PartDescription]] = {}
        for path in paths:
            description = read_part_description(path)
            if description is None:
                raise InputError(f"{path}: does not record which part of a model it is", hint="Export the model again.")
            described[description.name] = (path, description)
        models = {description.part_names for _, description in described.values()}
        if len(described) != len(paths) or len(models) != 1 or set(described) != set(next(iter(models))):
            raise InputError(
                f"{', '.join(map(str, paths))}: these are not all parts of one model", hint="Export the model again."
            )
        (names,) = models
        return cls(
            paths={name: described[name][0] for name in names},
            feeds={name: described[name][1].feeds for name in names},
        )


def described_model(path: Path) -> dict[str, Any]:
    """Return what a file says about the model it was made from (``winml.model``); empty where it says nothing.

    Raises:
        WinMLError: there is no such file, or it is no ONNX file.
    """
    # onnx is loaded by those who read files only.
    from winml.modelkit.onnx.files.reading import read_structure

    return model_record({entry.key: entry.value for entry in read_structure(path).metadata_props})


_FIELD_TYPES = {"adapters": list, "random_weights": bool, "seed": int}
"""Types of the fields of ``winml.model`` that are no text."""


def model_record(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return ``winml.model`` of the metadata of a file, without fields of another type; empty if it is damaged."""
    try:
        record = load_metadata(metadata.get(MODEL_KEY, "{}"))
    except JsonError:
        return {}
    fields = record.items() if isinstance(record, dict) else ()
    return {key: value for key, value in fields if isinstance(value, _FIELD_TYPES.get(key, str))}


def read_part_description(path: Path) -> PartDescription | None:
    """Return which part of a model a file holds; None where it holds a model of its own.

    Raises:
        WinMLError: there is no such file, or it is no ONNX file.
        InputError: what it says about the part cannot be read.
    """
    # onnx is loaded by those who read files only.
    from winml.modelkit.onnx.files.reading import read_structure

    text = next((entry.value for entry in read_structure(path).metadata_props if entry.key == PART_KEY), None)
    if text is None:
        return None
    try:
        record = load_metadata(text)
        feeds = tuple(PartFeed.from_fields(feed) for feed in record["feeds"])
        positions = record.get("positions")
        if positions is not None and (type(positions) is not int or positions < 1):
            raise ValueError(f"{positions} positions")
        text_tokens = None if record.get("text") is None else TextTokens.from_fields(record["text"])
        return PartDescription(record["name"], tuple(record["of"]), feeds, positions, text_tokens)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {PART_KEY} is damaged", hint="Export the model again.") from error


def is_one_of_several(metadata: Mapping[str, str]) -> bool:
    """Return True if the metadata of a model state that it is one of several parts."""
    try:
        return len(load_metadata(metadata.get(PART_KEY, "{}")).get("of", ())) > 1
    except (ValueError, AttributeError, TypeError):
        return False


def only_part(parts: Sequence[PartT]) -> PartT:
    """Return the one part of a model.

    Raises:
        UsageError: there are several, or none.
    """
    if len(parts) != 1:
        names = f" ({', '.join(part.name for part in parts)})" if parts else ""
        raise UsageError(f"expected one part, got {len(parts)}{names}", hint="Use .parts.")
    return parts[0]
