"""Says in words which tensors a graph takes and returns; those of a cache together, however many there are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from winml.modelkit.graph.bundle import PartDescription
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.words import shape_words

__all__ = ["input_words", "output_words"]

_MOST_SINGLE = 2
"""Tensors of a cache that are still told one by one."""


def input_words(inputs: Sequence[InputTensorSpec]) -> str:
    """Return the inputs of a graph: ``input_ids int64[batch, sequence], …``."""
    return _words(inputs, {spec.name for spec in inputs if spec.cache is not None})


def output_words(outputs: Sequence[OutputTensorSpec], description: PartDescription | None) -> str:
    """Return the outputs of a graph; what its description says that it feeds to itself is the cache."""
    own_feeds = [feed for feed in description.feeds if feed.part == description.name] if description else []
    return _words(outputs, {feed.output for feed in own_feeds})


def _words(specs: Sequence[InputTensorSpec] | Sequence[OutputTensorSpec], together: Collection[str]) -> str:
    single = [spec for spec in specs if spec.name not in together or len(together) <= _MOST_SINGLE]
    rest = [spec for spec in specs if spec not in single]
    words = [f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in single]
    if rest:
        shapes = list(dict.fromkeys(shape_words(spec.dtype, spec.shape) for spec in rest))
        others = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
        words.append(f"{rest[0].name} to {rest[-1].name} ({len(rest)} of the cache) {shapes[0]}{others}")
    return ", ".join(words)
