"""Describes the outputs of a model with open sizes, from runs on fake tensors at a few sizes.

The expressions for sizes are fitted in ``output_shapes``, as for an export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from winml.modelkit.export.output_shapes import Observation, explain_output_shapes, with_named_sums
from winml.modelkit.graph.dimensions import DynamicDimension
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec

__all__ = ["output_specs_of"]

Sizes = Mapping[str, int]
Outputs = Mapping[str, torch.Tensor]


def output_specs_of(
    outputs: Outputs,
    dimensions: Sequence[DynamicDimension],
    run: Callable[[Sizes], Outputs | None],
    inputs: Sequence[InputTensorSpec] = (),
) -> tuple[OutputTensorSpec, ...]:
    """Describe the outputs of a model; sizes that depend on open dimensions are expressions of these.

    Args:
        outputs: The outputs with every dimension at its ``example``.
        dimensions: The open dimensions.
        run: Runs the model at other sizes; returns None where it refuses them.
        inputs: The inputs, which may have names for sums of sizes.
    """
    shapes: Mapping[str, tuple[int | str, ...]] = _shapes_of(outputs)
    if dimensions:
        shapes = explain_output_shapes(_observe_sizes(outputs, dimensions, run), lambda sizes: _observe_at(sizes, run))
        shapes = with_named_sums(shapes, inputs)
    # Not validated: a size may be 0 here.
    return tuple(
        OutputTensorSpec.model_construct(name=name, shape=shapes[name], dtype=str(value.dtype).removeprefix("torch."))
        for name, value in outputs.items()
    )


def _observe_sizes(
    outputs: Outputs, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Outputs | None]
) -> list[Observation]:
    """Return the shapes at the traced sizes, with each dimension at another size, and with all at other sizes."""
    traced = {dimension.name: dimension.example or 1 for dimension in dimensions}
    observations = [Observation(traced, _shapes_of(outputs))]
    other_sizes = dict(traced)
    for dimension in dimensions:
        attempts = (_observe_at({**traced, dimension.name: size}, run) for size in _other_sizes(dimension))
        observation = next((attempt for attempt in attempts if attempt is not None), None)
        if observation is not None:
            observations.append(observation)
            other_sizes[dimension.name] = observation.sizes[dimension.name]
    joint_observation = _observe_at(other_sizes, run) if len(observations) > 2 else None
    return observations if joint_observation is None else [*observations, joint_observation]


def _other_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes to try, those first that reveal strides."""
    traced = dimension.example or 1
    for size in (2 * traced, traced // 2, traced + 1, traced - 1):
        if max(dimension.min, 1) <= size <= (dimension.max or size) and size != traced:
            yield size


def _observe_at(sizes: Sizes, run: Callable[[Sizes], Outputs | None]) -> Observation | None:
    outputs = run(sizes)
    return None if outputs is None else Observation(sizes, _shapes_of(outputs))


def _shapes_of(outputs: Outputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in outputs.items()}
