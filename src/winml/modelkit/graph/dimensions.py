"""Which sizes of a graph are left open, and which are meant to be?

Plain records and the texts they are read from; knows no model, so whether a name or an axis makes sense for one is
decided elsewhere (``load/dynamic_axes.py``). Imports nothing heavy: mistakes in the text are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.options import Options, nearest, parse_options, read_json

__all__ = [
    "CONVENTIONAL_NAMES",
    "DynamicAxes",
    "DynamicDimension",
    "DynamicRequest",
    "OpenSize",
    "parse_dynamic_axes",
    "resolve_names",
]

DYNAMIC_AXES_OPTION = "--dynamic-axes"

CONVENTIONAL_NAMES: Mapping[str, str] = {
    "batch_size": "batch",
    "sequence_length": "sequence",
    "decoder_sequence_length": "decoder_sequence",
    "num_choices": "choices",
    "height": "height",
    "width": "width",
    "num_channels": "channels",
    "num_frames": "frames",
    "num_mel_bins": "mel_bins",
    "audio_length": "samples",
}
"""Key of ``--shape-config`` → what its dimension is called in a file, unless the user calls it otherwise."""

_NAME = r"^[A-Za-z_]\w*$"
_INLINE = re.compile(r"^(?P<input>[^:=,\s]+):(?P<axes>.+)$")

Size = Annotated[int, pydantic.Field(ge=1)]
Name = Annotated[str, pydantic.Field(pattern=_NAME)]


class _Range(Options):
    min: Size = 1
    """Smallest size that will be asked for."""
    max: Size | None = None
    """Largest size that will be asked for; None where nothing bounds it."""
    example: Size | None = None
    """Size to trace with; None leaves it to us. At least 2: a size of 1 is traced as a constant."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> _Range:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.example is None:
            return self
        if self.example < self.min or (self.max is not None and self.example > self.max):
            raise ValueError(f"example {self.example} is outside of {self.min} to {self.max or 'any'}")
        if self.example == 1:
            raise ValueError("example 1: a size of 1 is traced as a constant; give 2 or more")
        return self


class OpenSize(_Range):
    """A size the user leaves open, as written in ``--shape-config``."""

    name: Name | None = None
    """What the dimension is called; None: its conventional name."""


class DynamicDimension(_Range):
    """A dimension of a graph that is left open, by its name."""

    name: Name
    """As in the shapes of the inputs."""


def _check_axes(axes: Mapping[str, Mapping[int, str]]) -> Mapping[str, Mapping[int, str]]:
    for name, named in axes.items():
        for axis, symbol in named.items():
            if axis < 0:
                raise ValueError(f"{name}: axis {axis} is negative; axes count from 0")
            if not re.match(_NAME, symbol):
                raise ValueError(
                    f"{name}: axis {axis} is named {symbol!r}; a name holds letters, digits and _ and starts with no "
                    "digit"
                )
    return axes


DynamicAxes = Annotated[Mapping[str, Mapping[int, str]], pydantic.AfterValidator(_check_axes)]
"""Input → axis, counted from 0 → name."""


class DynamicRequest(Options):
    """Which dimensions the user wants left open, besides those named in shapes."""

    batch: bool = False
    """The rows of every input."""
    sequence: bool = False
    """The sequences the model reads: tokens of the text and of the decoder, or frames or samples of audio."""
    image_size: bool = False
    """Height and width of images."""
    axes: DynamicAxes = pydantic.Field(default_factory=dict)
    """Input → axis → name."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Bounds, and sizes to trace with, of names; leaves nothing open by itself."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.batch or self.sequence or self.image_size or self.axes)

    def joined(self, other: DynamicRequest) -> DynamicRequest:
        """Return what either asks for; an axis both name bears the name given here."""
        inputs = dict.fromkeys([*self.axes, *other.axes])
        return DynamicRequest(
            batch=self.batch or other.batch,
            sequence=self.sequence or other.sequence,
            image_size=self.image_size or other.image_size,
            axes={name: {**other.axes.get(name, {}), **self.axes.get(name, {})} for name in inputs},
            dimensions=self.dimensions or other.dimensions,
        )


class _AxesOption(Options):
    axes: DynamicAxes


def parse_dynamic_axes(texts: Sequence[str]) -> dict[str, dict[int, str]]:
    """Read ``--dynamic-axes``, given any number of times.

    Args:
        texts: Each ``input_ids:0=batch,1=sequence`` (several inputs separated by spaces or semicolons), or a JSON
            object ``{"input_ids": {"0": "batch", "1": "sequence"}}``, or the path of a file that holds one.

    Returns:
        Input → axis → name.

    Raises:
        ConfigError: a text that is neither, an axis that is no number or negative, a name that is none, or an axis
            with two names.
    """
    merged: dict[str, dict[int, str]] = {}
    for text in texts:
        for name, axis, symbol in _pairs(text):
            known = merged.setdefault(name, {}).setdefault(axis, symbol)
            if known != symbol:
                raise ConfigError(
                    f"{DYNAMIC_AXES_OPTION}: axis {axis} of {name} is named both {known!r} and {symbol!r}",
                    hint="Give it one name.",
                )
    return merged


def _pairs(text: str) -> list[tuple[str, int, str]]:
    parts = [part for part in re.split(r"[;\s]+", text.strip()) if part]
    if not text.lstrip().startswith("{") and parts and all(_INLINE.match(part) for part in parts) and "=" in text:
        return [pair for part in parts for pair in _inline_pairs(part)]
    value, source = read_json(text, DYNAMIC_AXES_OPTION)
    return [
        (name, axis, symbol)
        for name, named in parse_options(_AxesOption, {"axes": _with_numbers(value, source)}, source).axes.items()
        for axis, symbol in named.items()
    ]


def _with_numbers(value: Any, source: str) -> Any:
    """Check that the axes of a JSON object are numbers, with words for where one is not."""
    if not isinstance(value, dict) or not all(isinstance(named, dict) for named in value.values()):
        raise ConfigError(
            f"{source}: expected an object of objects",
            hint='Write {"input_ids": {"0": "batch", "1": "sequence"}}, or input_ids:0=batch,1=sequence.',
        )
    for name, named in value.items():
        for axis in named:
            if not re.fullmatch(r"-?\d+", axis):
                raise ConfigError(f"{source}: {name}: axis {axis!r} is no number", hint="Axes count from 0.")
    return value


def _inline_pairs(part: str) -> list[tuple[str, int, str]]:
    match = _INLINE.match(part)
    assert match is not None  # _pairs saw to it
    pairs = []
    for item in match["axes"].split(","):
        axis, equals, symbol = item.partition("=")
        if not equals or not re.fullmatch(r"-?\d+", axis):
            raise ConfigError(
                f"{DYNAMIC_AXES_OPTION}: {item!r} in {part!r} is not AXIS=NAME",
                hint="Write it like input_ids:0=batch,1=sequence.",
            )
        pairs.append((int(axis), symbol))
    try:
        _check_axes({match["input"]: dict(pairs)})
    except ValueError as error:
        raise ConfigError(f"{DYNAMIC_AXES_OPTION}: {error}") from None
    return [(match["input"], axis, symbol) for axis, symbol in pairs]


def resolve_names(wanted: Mapping[str, int], known: Iterable[str]) -> dict[str, int]:
    """Return sizes by the names in the graph.

    Args:
        wanted: Sizes by name, or by key of ``--shape-config`` where the graph has its conventional name.
        known: Names in the graph.

    Raises:
        UsageError: a name the graph does not have (tells the nearest), or two sizes for one name.
    """
    names = list(known)
    found: dict[str, int] = {}
    for name, size in wanted.items():
        resolved = name if name in names else CONVENTIONAL_NAMES.get(name, name)
        if resolved not in names:
            guess = nearest(name, names)
            hint = f"Did you mean {guess!r}? " if guess else ""
            raise UsageError(
                f"--shape-config: the graph has no open dimension {name!r}",
                hint=f"{hint}Its open dimensions: {', '.join(names) or 'none; all sizes are fixed'}.",
            )
        if found.setdefault(resolved, size) != size:
            raise UsageError(
                f"--shape-config: {resolved} is to be both {found[resolved]} and {size}", hint="Give it one size."
            )
    return found
