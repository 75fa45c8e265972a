"""Specifications of graph inputs and outputs, exchanged by all stages.

Plain records; nothing here reads a model or generates values (``runtime/feeds.py`` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from winml.modelkit.options import Options

__all__ = [
    "DTYPES",
    "OPEN_SIZE",
    "CacheSlot",
    "GridSlot",
    "InputTensorSpec",
    "OutputTensorSpec",
    "is_open",
    "summed_sizes",
]

DTYPES = (
    "float32", "float16", "bfloat16", "float64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Names accepted for ``dtype``: numpy's, plus ``bfloat16``."""

OPEN_SIZE = -1
"""In place of a size, as in the shapes of other tools: left open, and named by the export."""


def _check_size(size: int) -> int:
    if size == 0:
        raise ValueError("a size is at least 1, or -1 where it is open")
    return size


Dimension = (
    Annotated[int, pydantic.Field(ge=OPEN_SIZE), pydantic.AfterValidator(_check_size)]
    | Annotated[str, pydantic.Field(pattern=r"^[A-Za-z_]\w*$")]
)


def is_open(size: int | str) -> bool:
    """Say whether a size of a shape is left open."""
    return isinstance(size, str) or size == OPEN_SIZE


def summed_sizes(sums: Mapping[str, Sequence[int | str]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that are sums of others, as far as these are known.

    >>> summed_sizes({"total": ("past", "tokens"), "other": ("unknown", 1)}, {"past": 7, "tokens": 2})
    {'total': 9}
    """
    terms_by_name = {
        name: [sizes.get(term) if isinstance(term, str) else term for term in terms] for name, terms in sums.items()
    }
    known = {name: [term for term in terms if term is not None] for name, terms in terms_by_name.items()}
    return {name: sum(terms) for name, terms in known.items() if len(terms) == len(terms_by_name[name])}


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype; expected one of {', '.join(DTYPES)}")
    return name


DType = Annotated[str, pydantic.AfterValidator(_check_dtype)]


_OPEN_SIZES = (
    'A name in the place of a size leaves it open, or -1: "shape": ["batch", 16]. Beside shapes of numbers, '
    "--dynamic-batch, --dynamic-seq-len and --dynamic-axes do."
)


class _TensorSpec(Options):
    ways_out: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("shape", "dynamic", "dynamic_axes", "dynamic_dims", "dynamic_shapes", "dynamic_shape"), _OPEN_SIZES
    )

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Name of the graph input or output."""
    shape: tuple[Dimension, ...]
    """Sizes; a name stands for an open dimension, and -1 for one that the export names. ``()`` is a scalar."""
    dtype: DType
    """Element type, one of :data:`DTYPES`."""


class CacheSlot(Options):
    """Which tensor of a cache an input takes: what an output of the run before holds."""

    layer: Annotated[int, pydantic.Field(ge=0)]
    """Layer of the cache, from 0."""
    kind: Annotated[str, pydantic.Field(min_length=1)]
    """``key`` and ``value`` hold an entry for every token; ``conv`` and ``recurrent`` are states of one size."""
    window: Annotated[int, pydantic.Field(ge=1)] | None = None
    """How many of the last tokens the layer attends to; None: all of them."""
    side: Literal["encoder", "decoder"] | None = None
    """Of an encoder-decoder: whose tokens it holds an entry for; None for any other model."""


class GridSlot(Options):
    """What an input says of the patches of pictures: a row of frames, rows and columns for each picture."""

    patches: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z_]\w*$")]
    """Name of the number of patches of all pictures together, in the shape of another input."""
    multiple: Annotated[int, pydantic.Field(ge=1)] = 1
    """Rows and columns are whole multiples of it."""


class InputTensorSpec(_TensorSpec):
    """One graph input: name, shape, element type and valid values."""

    value_range: tuple[float, float] | None = None
    """Smallest and largest valid value, both included. None: standard normal for floats, 0..1 for integers."""
    last_value: int | None = None
    """Value of the last unmasked position of each row, for models that search for it (an end-of-sequence token)."""
    first_values: tuple[tuple[int, Annotated[int, pydantic.Field(ge=1)]], ...] = ()
    """Values at the start of each entry of the first axis, as runs of (value, count): image placeholder tokens, or all
    values, such as the size of a grid. The values do not occur elsewhere, unless in ``value_range``."""
    cache: CacheSlot | None = None
    """Which tensor of a cache it takes; None for any other input."""
    sums: Mapping[str, tuple[Dimension, ...]] = {}
    """Name in the shape → the sizes whose sum it is: a mask is as long as the cache and the tokens together."""
    grid: GridSlot | None = None
    """How many patches it tells of, where it holds the grids of pictures."""

    @pydantic.field_validator("value_range")
    @classmethod
    def _check_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("the first value must not be larger than the second")
        return value

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.io.inputs`` entry of FORMATS: name, shape, dtype and, where set, value_range,
        first_values, cache, sums and grid.
        """
        record: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        if self.value_range is not None:
            is_float = "float" in self.dtype
            record["value_range"] = [bound if is_float else int(bound) for bound in self.value_range]
        if self.first_values:
            record["first_values"] = [list(run) for run in self.first_values]
        if self.cache is not None:
            record["cache"] = self.cache.model_dump(exclude_none=True)
        if self.sums:
            record["sums"] = {name: list(terms) for name, terms in self.sums.items()}
        if self.grid is not None:
            record["grid"] = self.grid.model_dump()
        return record


class OutputTensorSpec(_TensorSpec):
    """One graph output: name, shape and element type."""

    def disagreement(self, actual: OutputTensorSpec) -> str:
        """Return how the actual output differs from this specification, or ``""``; an open size agrees with any."""
        agrees = len(self.shape) == len(actual.shape) and all(
            isinstance(expected_size, str) or expected_size in (OPEN_SIZE, size)
            for expected_size, size in zip(self.shape, actual.shape, strict=False)
        )
        if agrees and self.dtype == actual.dtype:
            return ""
        return f"expected {self.dtype}{list(self.shape)}, the model gives {actual.dtype}{list(actual.shape)}"

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.io.outputs`` entry of FORMATS."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
