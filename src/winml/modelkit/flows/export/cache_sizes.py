"""Which sizes close a graph with a cache, whose sizes are open by default, or those of them that it does not follow?"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from winml.modelkit.graph.specs import DynamicDimension
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.runtime.default_sizes import default_size

__all__ = ["fixed_cache_hint", "frozen_by_default", "frozen_notes"]

_PAST = "past_sequence_length"
_CACHED = 127
"""Chosen: tokens in the cache, so that a mask over them and one more has 128."""
_KEYS = frozenset({
    "batch_size", "sequence_length", "past_sequence_length", "decoder_sequence_length", "num_choices",
    "height", "width", "num_channels", "num_frames", "num_mel_bins", "audio_length",
})  # fmt: skip
"""Dimensions that a key of ``--shape-config`` of the same name fixes."""


def fixed_cache_hint(parts: Sequence[ModelPart], passed: Mapping[str, int]) -> str:
    """Return what to do where the execution provider needs fixed sizes, and a graph with a cache leaves some open.

    Args:
        parts: What is to be exported.
        passed: Sizes the user gave, by key of ``--shape-config``: those that are named stand beside them.
    """
    sizes = _closing_sizes(parts)
    opening = "A graph with a cache is open by default."
    if sizes is None:
        return f"{opening} Give --no-cache, or add --allow-dynamic and fix the sizes later."
    text = json.dumps({**passed, **sizes})
    return (
        f"{opening} Fix its sizes with --shape-config '{text}', give --no-cache, or add --allow-dynamic and fix them "
        "later."
    )


def _closing_sizes(parts: Sequence[ModelPart]) -> dict[str, int] | None:
    """Return a size for every open dimension, by key of ``--shape-config``: those of one step over a filled cache.

    None where a dimension has no key.
    """
    bounds: dict[str, list[DynamicDimension]] = {}
    for part in parts:
        for dimension in part.dimensions:
            bounds.setdefault(dimension.name, []).append(dimension)
    if not bounds.keys() <= _KEYS:
        return None
    step = "decoder_sequence_length" if "decoder_sequence_length" in bounds else "sequence_length"
    usual = {name: default_size(name) or 1 for name in bounds}
    requested = {**usual, step: 1, _PAST: _CACHED}
    sizes = {name: _within(requested[name], usual[name], items) for name, items in bounds.items()}
    for item in bounds.get(_PAST, ()):
        if item.max is not None:  # which leaves room for one token of a step
            sizes[_PAST] = max(1, min(sizes[_PAST], item.max + 1 - sizes.get(step, 1)))
    return sizes


def _within(requested: int, usual: int, bounds: Sequence[DynamicDimension]) -> int:
    """Return the size that is wanted, or the usual one where a part takes no size as small, within what all take."""
    least = max(item.min for item in bounds)
    most = [item.max for item in bounds if item.max is not None]
    return min([requested if requested >= least else max(least, usual), *most])


def frozen_by_default(names: Collection[str], parts: Sequence[ModelPart]) -> dict[str, int]:
    """Return a size for each of the open dimensions that no option asked for, by key of ``--shape-config``.

    One row, one new token in a decoder, and as many tokens or frames as the first part that takes them is traced with.

    Args:
        names: Dimensions that a graph does not follow.
        parts: The parts of the model, in the order in which they run.
    """
    if any(part.open_by_default.get(name) == _PAST for part in parts for name in names):
        return {}  # a decoder whose cache has one length writes no text
    closing = _closing_sizes(parts) or {}
    steps = ("batch_size", "decoder_sequence_length")
    sizes: dict[str, int] = {}
    for part in parts:
        for name in (name for name in names if name in part.open_by_default):
            traced = part.trace_sizes[name]
            sizes.setdefault(part.open_by_default[name], closing.get(name, traced) if name in steps else traced)
    return sizes


def frozen_notes(sizes: Mapping[str, int], parts: Sequence[ModelPart]) -> list[str]:
    """Return what to tell of sizes that were fixed since a graph does not follow them.

    Args:
        sizes: By key of ``--shape-config``.
        parts: The parts, in which they are open.
    """
    notes = []
    for key, size in sizes.items():
        names = {(part.name, name) for part in parts for name, own in part.open_by_default.items() if own == key}
        axes = [
            f"axis {axis} of {spec.name}"
            for part in parts
            for spec in part.inputs
            if spec.cache is None
            for axis, name in enumerate(spec.shape)
            if (part.name, name) in names
        ]
        # Within the positions of any model that takes the first.
        other = json.dumps({key: size // 2 if size > 1 else 2})
        notes.append(
            f"{key} ({', '.join(dict.fromkeys(axes))}) is fixed to {size}: left open, it froze in the export. "
            f"Another size: --shape-config '{other}'."
        )
    return notes
