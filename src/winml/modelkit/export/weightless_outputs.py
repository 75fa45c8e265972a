"""What comes out where sizes are left open? Runs the model without weights at a few sizes and reads the outputs off.

How sizes become expressions is decided in ``export/output_shapes.py``, which an export asks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from winml.modelkit.export.output_shapes import Observation, explain_output_shapes
from winml.modelkit.graph.dimensions import DynamicDimension
from winml.modelkit.graph.specs import OutputTensorSpec

__all__ = ["output_specs_of"]

Sizes = Mapping[str, int]
Outputs = Mapping[str, torch.Tensor]


def output_specs_of(
    outputs: Outputs, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Outputs | None]
) -> tuple[OutputTensorSpec, ...]:
    """Describe the outputs of a model; sizes that depend on dimensions left open are said in terms of these.

    Args:
        outputs: What it returned with every dimension at its ``example``.
        dimensions: What is left open.
        run: Runs it with other sizes; None where it refuses them.
    """
    shapes: Mapping[str, tuple[int | str, ...]] = _shapes(outputs)
    if dimensions:
        shapes = explain_output_shapes(_observe(outputs, dimensions, run), lambda sizes: _observation(sizes, run))
    # As it is, sizes of 0 included: nothing is asked of it here.
    return tuple(
        OutputTensorSpec.model_construct(name=name, shape=shapes[name], dtype=str(value.dtype).removeprefix("torch."))
        for name, value in outputs.items()
    )


def _observe(
    outputs: Outputs, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Outputs | None]
) -> list[Observation]:
    """Return what comes out as traced, with each dimension at another size, and with all of them at other sizes."""
    traced = {dimension.name: dimension.example or 1 for dimension in dimensions}
    seen = [Observation(traced, _shapes(outputs))]
    others = dict(traced)
    for dimension in dimensions:
        attempts = (_observation({**traced, dimension.name: size}, run) for size in _other_sizes(dimension))
        found = next((attempt for attempt in attempts if attempt is not None), None)
        if found is not None:
            seen.append(found)
            others[dimension.name] = found.sizes[dimension.name]
    together = _observation(others, run) if len(seen) > 2 else None
    return seen if together is None else [*seen, together]


def _other_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes to try, those first that strides show in."""
    traced = dimension.example or 1
    for size in (2 * traced, traced // 2, traced + 1, traced - 1):
        if max(dimension.min, 1) <= size <= (dimension.max or size) and size != traced:
            yield size


def _observation(sizes: Sizes, run: Callable[[Sizes], Outputs | None]) -> Observation | None:
    outputs = run(sizes)
    return None if outputs is None else Observation(sizes, _shapes(outputs))


def _shapes(outputs: Outputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in outputs.items()}
