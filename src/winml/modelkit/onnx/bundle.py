"""Parts of a model in several files, and connections from outputs to inputs of parts.

Reads and describes the ``winml.part`` metadata of FORMATS, and reads ``winml.model``. A file without ``winml.part`` is
a separate model. Neither creates parts nor runs parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.metadata_keys import MODEL_KEY, PART_KEY
from winml.modelkit.options import load_metadata, load_metadata_record
from winml.modelkit.records import Record, entry


class _NamedPart(Protocol):
    """Common fields of the records of a part."""

    @property
    def name(self) -> str:
        """``model`` for the only part of a model."""


PartT = TypeVar("PartT", bound=_NamedPart)


class PartFeed(Record):
    """An output of a part, connected to an input of another part, or of the same part in the next run."""

    output: str
    part: str
    """The part that takes it."""
    input: str


class TextTokens(Record):
    """Start and end tokens of a text, if the files next to a model do not state them."""

    first: int
    """The token fed to the first run."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""


class PartDescription(Record):
    """Description of the part that a file holds."""

    name: str
    part_names: tuple[str, ...] = field(metadata=entry("of"))
    """All parts of the model, in the order in which they run."""
    feeds: tuple[PartFeed, ...] = ()
    """Targets of the outputs of this part."""
    positions: int | None = field(default=None, metadata=entry(omit_none=True))
    """Maximum tokens per row, including tokens in the cache; None: unlimited or unknown."""
    text: TextTokens | None = field(default=None, metadata=entry(omit_none=True))
    """Start and end tokens of a text; None: stated by the files next to the model."""

    @property
    def is_one_of_several(self) -> bool:
        """True if the model has other parts."""
        return len(self.part_names) > 1


@dataclass(frozen=True)
class ModelBundle:
    """The files of one model of several parts, in execution order."""

    paths: Mapping[str, Path]
    """Name of the part → its file."""
    feeds: Mapping[str, tuple[PartFeed, ...]]
    """Part → targets of its outputs."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> ModelBundle:
        """Assemble the parts of one model from their files, in any order.

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
    """Read the description of the source model in a file (``winml.model``); ``{}`` without one.

    Raises:
        WinMLError: the file does not exist, or is no ONNX file.
    """
    # Only readers of files import onnx.
    from winml.modelkit.onnx.files.reading import read_metadata

    return model_record(read_metadata(path))


_FIELD_TYPES = {"adapters": list, "random_weights": bool, "seed": int}
"""Types of the fields of ``winml.model`` that are no text."""


def model_record(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return ``winml.model`` from the metadata of a file, without fields of a wrong type; ``{}`` if damaged."""
    fields = load_metadata_record(metadata.get(MODEL_KEY, "{}")).items()
    return {key: value for key, value in fields if isinstance(value, _FIELD_TYPES.get(key, str))}


def read_part_description(path: Path) -> PartDescription | None:
    """Read the description of the part in a file; `None` if the file holds a whole model.

    Raises:
        WinMLError: the file does not exist, or is no ONNX file.
        InputError: the description cannot be read.
    """
    # Only readers of files import onnx.
    from winml.modelkit.onnx.files.reading import read_metadata

    text = read_metadata(path).get(PART_KEY)
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
    """Return True if the metadata of a model state that the file is one of several parts."""
    try:
        return len(load_metadata(metadata.get(PART_KEY, "{}")).get("of", ())) > 1
    except (ValueError, AttributeError, TypeError):
        return False


def only_part(parts: Sequence[PartT]) -> PartT:
    """Return the only part of a model.

    Raises:
        UsageError: the model has several parts, or none.
    """
    if len(parts) != 1:
        names = f" ({', '.join(part.name for part in parts)})" if parts else ""
        raise UsageError(f"expected one part, got {len(parts)}{names}", hint="Use .parts.")
    return parts[0]
