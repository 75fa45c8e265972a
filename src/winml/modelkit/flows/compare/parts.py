"""Compares models of several parts: every part with that of the same name, each on values of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from winml.modelkit.errors import UsageError
from winml.modelkit.flows.compare.compare import CompareOptions, compare_models
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.results.comparison import ModelComparison
from winml.modelkit.runtime.decoding.inputs import inputs_of_file
from winml.modelkit.runtime.graph_inputs import GraphInput, sizes_by_key

__all__ = ["NamedSide", "compare_parts"]

NamedSide: TypeAlias = "Path | ModelRequest"
"""What a name means: an ONNX file, or what says which PyTorch model to load."""


def compare_parts(
    parts: Mapping[str, tuple[NamedSide, NamedSide]],
    displayed: tuple[str, str],
    options: CompareOptions,
    notes: Sequence[str] = (),
) -> ModelComparison:
    """Compare every part of a model with that of the same name.

    Args:
        parts: Name of the part → reference and candidate, in the order the parts run; one of the two is a file.
        displayed: Both models, for people.
        options: What both are fed, and what is compared; a size counts in the parts that have its name.
        notes: Sentences on what is not compared.

    Raises:
        UsageError: no part has a dimension of that name, or a part cannot be compared.
        InputError: a file is damaged.
        StageError: a part cannot be run.
    """
    sizes = _sizes_by_part(parts, options.run.sizes)
    compared = {
        name: compare_models(*sides, replace(options, run=replace(options.run, sizes=sizes[name])))
        for name, sides in parts.items()
    }
    return ModelComparison.of_parts(*displayed, compared, notes)


def _sizes_by_part(
    parts: Mapping[str, tuple[NamedSide, NamedSide]], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return the sizes that each part has a dimension for.

    Raises:
        UsageError: no part has a dimension of that name.
    """
    if not sizes:
        return {name: {} for name in parts}
    inputs = {name: _inputs_of(sides) for name, sides in parts.items()}
    fitting = {name: {key: size for key, size in sizes.items() if _has(inputs[name], key)} for name in parts}
    for key, size in sizes.items():
        if not any(key in known for known in fitting.values()):
            sizes_by_key([item for items in inputs.values() for item in items], {key: size})  # says what there is
    return fitting


def _inputs_of(sides: tuple[NamedSide, NamedSide]) -> tuple[GraphInput, ...]:
    # What the candidate leaves open may be fixed in the reference, as in the comparison of two files.
    return next(inputs_of_file(side) for side in reversed(sides) if isinstance(side, Path))


def _has(inputs: Sequence[GraphInput], key: str) -> bool:
    try:
        sizes_by_key(inputs, {key: 1})
    except UsageError:
        return False
    return True
