"""Random sample arrays for input specifications.

Values are inside the valid range, reproducible, and chosen so that the outputs depend on them (masks hide positions,
end-of-sequence tokens are at the end of rows). Independent of the model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, numpy_dtype
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.onnx.specs import InputTensorSpec, summed_sizes

_LARGEST_BYTES = 2**47
"""Chosen: the address space of current processors. Smaller sizes may still exceed this machine's memory."""
_DRAWN_BYTES = 8
"""Specified: numpy draws integers and floats in this width before the cast."""

_MOST_BLOCKS = 5
"""Chosen: blocks of patches along an edge of a picture, enough for several windows."""
_DECODER_MASK = "attention_mask"
"""Specified by transformers: hides tokens in the cache and in a run, where zero."""
_LENGTHS_NAME = re.compile(r"(^|[_.])(len|lens|length|lengths)$")

_OFFSETS_NAME = re.compile(r"(^|[_.])(offsets?|ptr|indptr|rowptr|row_splits|cu_seqlens)$")
"""Names in torch.nn, of sparse rows in graph libraries, of ragged tensors in TensorFlow, and in flash attention."""
_DRAWN_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it")
"""Values of text inputs without stated values: common English words."""


@dataclass(frozen=True)
class FeedRules:
    """Rules for sample values found by observing a model, beyond its specifications."""

    masks: Mapping[str, int] = field(default_factory=dict)
    """Input that is a mask → the value with which it hides, 0 or 1. Else :func:`hiding_value`."""
    length_axes: Mapping[str, int] = field(default_factory=dict)
    """Input that holds the length of each row → the axis of the other inputs that it counts."""


def is_mask(spec: InputTensorSpec, rules: FeedRules | None = None) -> bool:
    """Return True if values are drawn for an input as for a mask."""
    is_named = spec.name.endswith("mask") or (rules is not None and spec.name in rules.masks)
    return is_named and "float" not in spec.dtype


def hiding_value(spec: InputTensorSpec, rules: FeedRules | None = None) -> int:
    """Return the hiding value of a mask: 1 for flags named ``…padding_mask``, as in ``torch.nn``, else 0."""
    by_name = int(spec.dtype == "bool" and spec.name.endswith("padding_mask"))
    return by_name if rules is None else rules.masks.get(spec.name, by_name)


def holds_lengths(spec: InputTensorSpec, rules: FeedRules | None = None) -> bool:
    """Return True if values are drawn for an input as for the lengths of rows."""
    is_named = _LENGTHS_NAME.search(spec.name) is not None or (rules is not None and spec.name in rules.length_axes)
    return is_named and len(spec.shape) == 1 and "int" in spec.dtype


def make_feeds(
    specs: Sequence[InputTensorSpec],
    seed: int,
    *,
    sizes: Mapping[str, int] | None = None,
    with_padding: bool = True,
    rules: FeedRules | None = None,
) -> dict[str, Array]:
    """Draw one array per input.

    The same seed gives the same values on every platform, and the values of an input do not depend on other inputs.
    Integers are uniform in the value range (0..1 without one), floats uniform in it (standard normal without one).
    Inputs with stated values take one of them each, text without stated values common words.
    An integer or bool input named ``…mask`` is a mask: each row a run of ones, then at least one zero if the row is
    longer than one; reversed for flags named ``…padding_mask``; constant if its value range is one value. The mask of a
    decoder whose cache has a sliding window hides the first tokens in the cache instead, so that its rows have no gaps:
    programs differ in whether a window counts hidden tokens. With several rows of other flags no row is constant, and a
    row of a single flag is false if rows have a dynamic length. A row of integers named ``…length`` or ``…lens``
    holds lengths: the largest possible length first, in descending order; an input named ``offsets`` beside another
    row of integers rises from 0 (bags of an ``nn.EmbeddingBag``). An input named ``bbox`` holds boxes,
    corners in order. Image grids have one frame, and the number of patches follows from them. First values are at the
    start of a row, and are not masked.

    Args:
        specs: The inputs.
        seed: Not negative.
        sizes: Sizes of the dynamic dimensions, by name.
        with_padding: If False, masks hide no position: all ones, or all zeros for padding masks.
        rules: Further rules for the values.

    Raises:
        UsageError: a dynamic dimension has no size, sizes are beyond any memory, or a value range holds no value of
            the dtype.
    """
    rules = rules or FeedRules()
    grids = {spec.name: _draw_grids(seed, spec, sizes or {}) for spec in specs if spec.grid is not None}
    patches = {spec.grid.patches: int(grids[spec.name].prod(-1).sum()) for spec in specs if spec.grid is not None}
    sizes = {**(sizes or {}), **patches}
    shapes = {spec.name: _insert_sizes(spec, sizes or {}) for spec in specs}
    feeds = {}
    for spec in specs:
        # One generator per input: a draw does not depend on the other inputs.
        generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
        if spec.name in grids:
            feeds[spec.name] = grids[spec.name]
        elif is_mask(spec, rules):
            feeds[spec.name] = _draw_mask_input(generator, spec, shapes[spec.name], with_padding, rules)
            if spec.name == _DECODER_MASK and (past := _windowed_tokens(specs, shapes)) is not None:
                feeds[spec.name] = _hide_first_tokens(feeds[spec.name], past)
        elif (longest := _find_largest_length(spec, shapes, rules)) is not None:
            feeds[spec.name] = _draw_lengths(generator, spec, shapes[spec.name], longest)
        elif (entries := _entries_of_bags(spec, specs, shapes)) is not None:
            feeds[spec.name] = _draw_offsets(generator, spec, shapes[spec.name], entries)
        else:
            feeds[spec.name] = _draw_input(generator, spec, shapes[spec.name])
        if spec.ascending and shapes[spec.name]:
            feeds[spec.name].sort(axis=-1)
    for spec in specs:
        mask = feeds.get(spec.name.removesuffix("input_ids") + "attention_mask")
        if spec.first_values:
            _write_row_starts(feeds[spec.name], spec.first_values, mask)
        if spec.last_value is not None:
            _write_row_ends(feeds[spec.name], spec.last_value, mask)
    return feeds


def _draw_grids(seed: int, spec: InputTensorSpec, sizes: Mapping[str, int]) -> Array:
    """Draw frames, rows and columns of image grids: one frame each, with different sizes per image."""
    assert spec.grid is not None
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
    (images, _), multiple = _insert_sizes(spec, sizes), spec.grid.multiple
    edges = generator.integers(1, _MOST_BLOCKS, (images, 2), dtype=np.int64, endpoint=True) * multiple
    return np.concatenate([np.ones((images, 1), np.int64), edges], axis=1).astype(numpy_dtype(spec.dtype))


def _draw_input(generator: np.random.Generator, spec: InputTensorSpec, shape: tuple[int, ...]) -> Array:
    """Draw the values of an input other than masks, lengths and offsets; boxes have sorted corners."""
    if spec.values or spec.dtype == "string":
        choices = np.asarray(spec.values or _DRAWN_WORDS)
        values = choices[generator.integers(0, len(choices), shape)]
        # numpy has no dtype of ONNX's name for text.
        return values if spec.dtype == "string" else values.astype(numpy_dtype(spec.dtype))
    dtype = numpy_dtype(spec.dtype)
    if "float" in spec.dtype:
        return _draw_floats(generator, shape, dtype, spec)
    values = _draw_integers(generator, shape, dtype, spec)
    if dtype == np.bool_ and len(shape) > 1 and shape[-1] and spec.value_range in (None, (0, 1)):
        # They may hide, by either value: of a row that is all hidden a softmax makes NaN.
        if shape[-1] > 1:
            values[..., -1] |= ~values.any(axis=-1)
        if shape[-1] > 1 or isinstance(spec.shape[-1], str):
            values[..., 0] &= ~values.all(axis=-1)
    holds_boxes = _last_name(spec) == "bbox" and shape[-1:] == (4,)
    return np.sort(values.reshape(*shape[:-1], 2, 2), axis=-2).reshape(shape) if holds_boxes else values


def _draw_mask_input(
    generator: np.random.Generator,
    spec: InputTensorSpec,
    shape: tuple[int, ...],
    with_padding: bool,
    rules: FeedRules,
) -> Array:
    """Draw a mask of the input's type; constant if the value range is a single value.

    Args:
        generator: Source of random numbers.
        spec: The input.
        shape: Its shape.
        with_padding: True to hide some positions.
        rules: Learned rules: values that hide positions.
    """
    dtype = numpy_dtype(spec.dtype)
    if spec.value_range is not None and spec.value_range[0] == spec.value_range[1]:
        return np.full(shape, spec.value_range[0], dtype)
    visible = np.ones(shape, dtype=np.int64)
    if with_padding:
        visible = _draw_mask(generator, shape, is_plane=_last_name(spec).startswith("pixel"))
    if spec.sums:
        # After a cache, the last token is the start of generation; models that read it alone ignore the mask.
        visible[..., -1] = 1
    return (1 - visible if hiding_value(spec, rules) == 1 else visible).astype(dtype)


def _windowed_tokens(specs: Sequence[InputTensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of cached tokens if a layer has a sliding window; otherwise `None`."""
    windowed = (spec for spec in specs if spec.cache is not None and spec.cache.window and spec.cache.side is None)
    return next((shapes[spec.name][2] for spec in windowed if len(shapes[spec.name]) == 4), None)


def _hide_first_tokens(mask: Array, past: int) -> Array:
    """Return a mask with the same number of hidden tokens, moved to the start of rows.

    Only cached tokens are hidden, so that every token attends to at least one token.
    """
    hidden = np.minimum((mask == 0).sum(axis=-1, keepdims=True), past)
    padded: Array = (np.arange(mask.shape[-1]) >= hidden).astype(mask.dtype)
    return padded


def _find_largest_length(spec: InputTensorSpec, shapes: Mapping[str, tuple[int, ...]], rules: FeedRules) -> int | None:
    """Return the largest length for an input with lengths; `None` for other inputs."""
    shape = shapes[spec.name]
    if not holds_lengths(spec, rules):
        return None
    high = None if spec.value_range is None else math.floor(spec.value_range[1])
    axis = rules.length_axes.get(spec.name)
    if axis is None and high is not None:
        return high
    rows = (
        input_shape for input_shape in shapes.values() if len(input_shape) > (axis or 1) and input_shape[0] == shape[0]
    )
    size = next((input_shape[axis or 1] for input_shape in rows), None)
    return high if size is None else size


def _draw_lengths(generator: np.random.Generator, spec: InputTensorSpec, shape: tuple[int, ...], longest: int) -> Array:
    """Draw lengths in descending order from the longest:

    some forwards need sorted lengths, some a row of full length.
    """
    low = 1 if spec.value_range is None else math.ceil(spec.value_range[0])
    low = min(max(low, 1), longest) if longest > 0 else longest
    values = np.sort(generator.integers(low, longest, shape, dtype=np.int64, endpoint=True))[::-1].copy()
    values[0] = longest
    return values.astype(numpy_dtype(spec.dtype))


def _entries_of_bags(
    spec: InputTensorSpec, specs: Sequence[InputTensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Return the number of bag entries for an input with offsets; `None` for other inputs.

    For: ``nn.EmbeddingBag``.
    """
    rows = [candidate for candidate in specs if len(shapes[candidate.name]) == 1 and "int" in candidate.dtype]
    entries = [shapes[candidate.name][0] for candidate in rows if not _OFFSETS_NAME.search(candidate.name)]
    is_offsets = spec in rows and _OFFSETS_NAME.search(spec.name) is not None
    return entries[0] if is_offsets and entries else None


def _draw_offsets(generator: np.random.Generator, spec: InputTensorSpec, shape: tuple[int, ...], entries: int) -> Array:
    """Draw offsets in ascending order from 0; equal offsets enclose an empty bag."""
    values = np.sort(generator.integers(0, max(entries - 1, 0), shape, dtype=np.int64, endpoint=True))
    values[:1] = 0
    return values.astype(numpy_dtype(spec.dtype))


def _insert_sizes(spec: InputTensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with all sizes inserted.

    Raises:
        UsageError: a size is missing, or the tensor is too large.
    """
    sizes = {**summed_sizes(spec.sums, sizes), **sizes}
    missing = [dimension for dimension in spec.shape if isinstance(dimension, str) and dimension not in sizes]
    if missing:
        raise UsageError(
            f"input {spec.name!r}: no size for dynamic dimension {missing[0]!r}",
            hint=f"Set a size for {missing[0]!r}.",
        )
    shape = tuple(sizes[dimension] if isinstance(dimension, str) else dimension for dimension in spec.shape)
    if math.prod(shape) * _DRAWN_BYTES > _LARGEST_BYTES:
        axis = shape.index(max(shape))
        dimension = spec.shape[axis]
        dimension_words = (
            f"{dimension} {shape[axis]}" if isinstance(dimension, str) else f"size {shape[axis]} of axis {axis}"
        )
        raise UsageError(
            f"input {spec.name!r}: {dimension_words} requires {math.prod(shape)} values, which exceeds any memory",
            hint=f"Use a smaller size ({opt.shape_config})."
            if isinstance(dimension, str)
            else "The size is fixed: make the model with a smaller one, or with a dynamic one.",
        )
    return shape


def _draw_floats(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], spec: InputTensorSpec
) -> Array:
    """Draw floats in the value range, or else from the standard normal distribution."""
    if spec.value_range is None:
        return generator.standard_normal(shape).astype(dtype)
    low, high = spec.value_range
    share = generator.random(shape)
    # Each bound is scaled separately, so that a range wider than the largest float does not overflow. The nearest value
    # of a narrower dtype may lie outside the range, hence the second clip; it may be infinite before that.
    with np.errstate(over="ignore"):
        values = np.clip(low * (1.0 - share) + high * share, low, high).astype(dtype)
        inside: Array = np.clip(values, _nearest_inside(low, dtype, math.inf), _nearest_inside(high, dtype, -math.inf))
    return inside.astype(dtype)  # numpy widens foreign dtypes


def _nearest_inside(bound: float, dtype: np.dtype[Any], towards: float) -> Any:
    """Return the value of ``dtype`` nearest to ``bound``, but not beyond."""
    value = np.asarray(bound).astype(dtype)
    beyond = float(value) < bound if towards > 0 else float(value) > bound
    return np.nextafter(value, np.asarray(towards).astype(dtype)) if beyond else value


def _draw_integers(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], spec: InputTensorSpec
) -> Array:
    """Draw integers in the value range, without the value reserved for ends of rows.

    Raises:
        UsageError: the dtype does not hold the value range.
    """
    low, high = spec.value_range or (0, 1)
    low_integer, high_integer = math.ceil(low), math.floor(high)
    smallest, largest = (0, 1) if dtype == np.bool_ else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if low_integer > high_integer or low_integer < smallest or high_integer > largest:
        raise UsageError(
            f"input {spec.name!r}: value range [{low:g}, {high:g}] is not a range of {spec.dtype} values",
            hint=f"Use integers between {smallest} and {largest}.",
        )
    if spec.last_value is None or not low_integer <= spec.last_value <= high_integer or low_integer == high_integer:
        return generator.integers(low_integer, high_integer, shape, dtype=np.int64, endpoint=True).astype(dtype)
    # The value that ends a row occurs only at its end: some models refuse rows that end at different counts.
    values = generator.integers(low_integer, high_integer - 1, shape, dtype=np.int64, endpoint=True)
    return (values + (values >= spec.last_value)).astype(dtype)


def _draw_mask(generator: np.random.Generator, shape: tuple[int, ...], *, is_plane: bool) -> Array:
    """Draw rows of ones, then zeros; at least half of the positions are valid, at least one is hidden if possible."""
    if not shape:
        return np.ones(shape, dtype=np.int64)
    length = shape[-1]
    valid = generator.integers(max(1, length // 2), max(1, length - 1), shape[:-1], endpoint=True)
    if is_plane and len(shape) > 1:
        valid = np.broadcast_to(valid[..., :1], shape[:-1])  # an image is padded along its whole right edge
    return (np.arange(length) < valid[..., None]).astype(np.int64)


def _last_name(spec: InputTensorSpec) -> str:
    """Return the last component of an input name inside nested structures."""
    return spec.name.rsplit(".", 1)[-1]


def _write_row_starts(values: Array, runs: Sequence[tuple[int, int]], mask: Array | None) -> None:
    """Write the first values of all rows, and unmask their positions and the next position; in place."""
    first_values = np.repeat([value for value, _ in runs], [count for _, count in runs])
    rows = values.reshape(len(values), -1)
    rows[:, : len(first_values)] = first_values[: rows.shape[1]]
    if mask is not None and mask.shape == values.shape:
        mask.reshape(rows.shape)[:, : len(first_values) + 1] = 1


def _write_row_ends(values: Array, last_value: int, mask: Array | None) -> None:
    """Write ``last_value`` at the last valid position of every row with several valid positions; in place."""
    if mask is not None and mask.shape == values.shape:
        ends = mask.astype(np.int64).sum(axis=-1, keepdims=True) - 1
    else:
        ends = np.full((*values.shape[:-1], 1), values.shape[-1] - 1)
    # A row's only token is not replaced: equal in every draw, it would hide the dependence of the outputs.
    last_values = np.take_along_axis(values, ends, axis=-1)
    np.put_along_axis(values, ends, np.where(ends > 0, last_value, last_values).astype(values.dtype), axis=-1)
