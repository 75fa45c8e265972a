"""Expression of output sizes in terms of input sizes.

Fits simple expressions to observed shapes: a dimension of the inputs, a multiple, a sum, a product, a division rounded
down. Runs no model itself: if several expressions fit, calls ``ask`` for the shapes at one more size. A size without a
unique expression gets a new name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec

Sizes = Mapping[str, int]
Shape = tuple[int | str, ...]

MOST_QUESTIONS = 24
"""Maximum number of calls of ``ask``. Chosen: 16 find the offset of a stride below 2**16 by bisection; the others find
the stride."""
_LARGEST_RATIO = 2
"""Largest size to ask for, as a multiple of the traced size. Chosen: reveals strides and still fits into memory."""
_SAMPLE_COUNT = 64
_NON_WORD = re.compile(r"\W")


@dataclass(frozen=True)
class Observation:
    """The output shapes of one run of the model."""

    sizes: Sizes
    """Size of every dynamic dimension of the inputs."""
    shapes: Mapping[str, tuple[int, ...]]
    """Output → its shape."""


Ask = Callable[[Sizes], Observation | None]
"""Runs the model at these sizes; returns `None` if the model refuses them."""


@dataclass(frozen=True)
class _Division:
    """Set of expressions ``(symbol + offset) // divisor``, one for each offset from ``low`` to ``high``."""

    symbol: str
    divisor: int
    low: int
    high: int

    def divide(self, sizes: Sizes, offset: int) -> int:
        return (sizes[self.symbol] + offset) // self.divisor

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    @property
    def text(self) -> str:
        return f"{_sum_text(self.symbol, self.low, is_operand=True)}//{self.divisor}"


def explain_output_shapes(observations: Sequence[Observation], ask: Ask | None = None) -> dict[str, Shape]:
    """Return the shape of every output: numbers, names of input dimensions, and simple expressions of them.

    Args:
        observations: At least one. For each dimension, one more should differ from the first in the size of this
            dimension only, and one more in the sizes of all dimensions.
        ask: Called if several expressions fit, at most ``MOST_QUESTIONS`` times.
    """
    observed = _Observations(list(observations), ask)
    names: dict[tuple[int, ...], str] = {}
    shapes: dict[str, Shape] = {}
    for output, shape in observations[0].shapes.items():
        sizes: list[int | str] = []
        for axis in range(len(shape)):
            expression = _explain_axis(observed, output, axis)
            if expression is None:
                # Sizes that are equal in every observation get one name.
                values = tuple(observation.shapes[output][axis] for observation in observations)
                expression = names.setdefault(values, f"{_NON_WORD.sub('_', output)}_dim_{axis}")
            sizes.append(expression)
        shapes[output] = tuple(sizes)
    return shapes


def with_named_sums(shapes: Mapping[str, Shape], inputs: Sequence[InputTensorSpec]) -> dict[str, Shape]:
    """Replace sums of sizes in shapes by their names in the inputs, such as ``total_sequence_length``.

    Args:
        shapes: Output → its shape, with expressions.
        inputs: The inputs; their ``sums`` define the names.
    """
    names = {
        frozenset(map(str, terms)): name
        for spec in inputs
        for name, terms in spec.sums.items()
        if 1 < len(set(terms)) == len(terms)
    }

    def name_sum(size: int | str) -> int | str:
        return names.get(frozenset(size.split(" + ")), size) if isinstance(size, str) else size

    return {output: tuple(map(name_sum, shape)) for output, shape in shapes.items()}


class _Observations:
    """The observations so far, and the function that returns more."""

    def __init__(self, observations: list[Observation], ask: Ask | None) -> None:
        self.observations = observations
        self._ask = ask
        self._remaining_questions = MOST_QUESTIONS

    @property
    def traced(self) -> Sizes:
        return self.observations[0].sizes

    def list_points(self, output: str, axis: int) -> list[tuple[Sizes, int]]:
        """Return the sizes of the inputs and the size of an output's axis, for each observation."""
        return [(observation.sizes, observation.shapes[output][axis]) for observation in self.observations]

    def observe(self, symbol: str, size: int) -> bool:
        """Observe one more size; return True if an observation was added."""
        sizes = {**self.traced, symbol: size}
        if (
            self._ask is None
            or self._remaining_questions == 0
            or any(previous.sizes == sizes for previous in self.observations)
        ):
            return False
        self._remaining_questions -= 1
        observation = self._ask(sizes)
        if observation is not None:
            self.observations.append(observation)
        return observation is not None


def _explain_axis(observed: _Observations, output: str, axis: int) -> int | str | None:
    """Return the unique expression for an output's axis, or `None`; may run the model at further sizes."""
    points = observed.list_points(output, axis)
    values = {value for _, value in points}
    if len(values) == 1:
        return values.pop()
    for family in (_linear_expressions, _two_symbol_expressions):
        expressions = list(dict.fromkeys(family(points)))
        if expressions:
            return expressions[0] if len(expressions) == 1 else None
    return _explain_division(observed, output, axis)


def _linear_expressions(points: Sequence[tuple[Sizes, int]]) -> Iterator[str]:
    """Yield every fitting ``factor * symbol + offset``."""
    for symbol in points[0][0]:
        (smallest, low), (largest, high) = (
            min(points, key=_size_of_symbol(symbol)),
            max(points, key=_size_of_symbol(symbol)),
        )
        distance = largest[symbol] - smallest[symbol]
        if distance == 0 or (high - low) % distance or high <= low:
            continue
        factor = (high - low) // distance
        offset = low - factor * smallest[symbol]
        if all(value == factor * sizes[symbol] + offset for sizes, value in points):
            yield _sum_text(symbol if factor == 1 else f"{factor}*{symbol}", offset)


def _size_of_symbol(symbol: str) -> Callable[[tuple[Sizes, int]], int]:
    return lambda point: point[0][symbol]


def _two_symbol_expressions(points: Sequence[tuple[Sizes, int]]) -> Iterator[str]:
    """Yield every fitting product (times a number) and sum (plus a number) of two dimensions."""
    for left, right in combinations(points[0][0], 2):
        factor, remainder = divmod(points[0][1], points[0][0][left] * points[0][0][right])
        if factor and not remainder and all(value == factor * sizes[left] * sizes[right] for sizes, value in points):
            yield f"{left}*{right}" if factor == 1 else f"{factor}*{left}*{right}"
        offset = points[0][1] - points[0][0][left] - points[0][0][right]
        if all(value == sizes[left] + sizes[right] + offset for sizes, value in points):
            yield _sum_text(f"{left} + {right}", offset)


def _sum_text(term: str, offset: int, *, is_operand: bool = False) -> str:
    if offset == 0:
        return term
    text = f"{term} {'+' if offset > 0 else '-'} {abs(offset)}"
    return f"({text})" if is_operand else text


def _explain_division(observed: _Observations, output: str, axis: int) -> str | None:
    """Return the fitting division, running the model at further sizes until one is left.

    `None` if there is no fit, or several remain.
    """
    while candidates := [*_fitting_divisions(observed.list_points(output, axis))]:
        if len(candidates) == 1 and candidates[0].is_exact:
            return candidates[0].text
        if not any(
            observed.observe(symbol, size) for symbol, size in _distinguishing_sizes(candidates, observed.traced)
        ):
            return None
    return None


def _fitting_divisions(points: Sequence[tuple[Sizes, int]]) -> Iterator[_Division]:
    """Yield every division of one dimension that fits all points."""
    for symbol in points[0][0]:
        for divisor in range(2, max(sizes[symbol] for sizes, _ in points) + 1):
            low = max(divisor * value - sizes[symbol] for sizes, value in points)
            high = min(divisor * value + divisor - 1 - sizes[symbol] for sizes, value in points)
            if low <= high:
                yield _Division(symbol, divisor, low, high)


def _distinguishing_sizes(candidates: Sequence[_Division], traced: Sizes) -> list[tuple[str, int]]:
    """Return several (dimension, size) that tell the candidates apart, the best first; the model may refuse some."""
    candidate = candidates[0]
    if len(candidates) == 1:
        # Bisection: from the middle offset on, the result at these sizes is one larger than below it.
        middle = (candidate.low + candidate.high + 1) // 2
        quotient = -(-(traced[candidate.symbol] + middle) // candidate.divisor)
        return [(candidate.symbol, candidate.divisor * (quotient + extra) - middle) for extra in (0, 1, 2)]
    symbols = sorted({division.symbol for division in candidates})
    predictions = [(_prediction_count(candidates, traced, symbol, size), symbol, size) for symbol in symbols
            for size in _sample_sizes(traced[symbol])]  # fmt: skip
    return [
        (symbol, size)
        for prediction_count, symbol, size in sorted(predictions, key=lambda prediction: -prediction[0])
        if prediction_count > 1
    ]


def _sample_sizes(traced: int) -> list[int]:
    """Return odd sizes from half to twice the traced size."""
    low, high = max(2, traced // _LARGEST_RATIO), traced * _LARGEST_RATIO
    # Odd sizes are seldom multiples of strides.
    return sorted({low + (high - low) * number // _SAMPLE_COUNT | 1 for number in range(_SAMPLE_COUNT + 1)})


def _prediction_count(candidates: Sequence[_Division], traced: Sizes, symbol: str, size: int) -> int:
    """Return the number of distinct sizes predicted by the candidates."""
    sizes = {**traced, symbol: size}
    return len({division.divide(sizes, offset) for division in candidates for offset in (division.low, division.high)})


Outputs = Mapping[str, "torch.Tensor | Array"]


def output_specs_of(
    outputs: Outputs,
    dimensions: Sequence[DynamicDimension],
    run: Callable[[Sizes], Outputs | None],
    inputs: Sequence[InputTensorSpec] = (),
) -> tuple[OutputTensorSpec, ...]:
    """Describe the outputs of a model; sizes that depend on dynamic dimensions are expressions.

    Args:
        outputs: The outputs with every dimension at its ``example``.
        dimensions: The dynamic dimensions.
        run: Runs the model at other sizes; returns `None` if the model refuses them.
        inputs: The inputs, which may have names for sums of sizes.
    """
    shapes: Mapping[str, tuple[int | str, ...]] = _output_shapes(outputs)
    if dimensions:
        observed = find_simple_shapes(outputs, dimensions, run)
        if observed is None:
            observations = _observe_sizes(outputs, dimensions, run)
            observed = explain_output_shapes(observations, lambda sizes: _observe_at(sizes, run))
        shapes = with_named_sums(observed, inputs)
    # Not validated: a size may be 0 here.
    return tuple(
        OutputTensorSpec.model_construct(name=name, shape=shapes[name], dtype=str(value.dtype).removeprefix("torch."))
        for name, value in outputs.items()
    )


def find_simple_shapes(
    outputs: Outputs, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Outputs | None]
) -> dict[str, Shape] | None:
    """Run the model once more; return output shapes of numbers, dimensions and sums of two dimensions.

    All dimensions change at once, each by another amount, so that no two dimensions or sums are confused. `None` if an
    axis has another expression, or the model refuses these sizes.

    Args:
        outputs: Outputs at the traced sizes.
        dimensions: The dynamic dimensions.
        run: Sizes → outputs; `None` if the model refuses them.
    """
    traced = {dimension.name: dimension.example or 1 for dimension in dimensions}
    varied = {dimension.name: 2 * traced[dimension.name] + position for position, dimension in enumerate(dimensions)}
    if any(dimension.max is not None and varied[dimension.name] > dimension.max for dimension in dimensions):
        return None
    first_run, second_run = Observation(traced, _output_shapes(outputs)), _observe_at(varied, run)
    if second_run is None or {name: len(shape) for name, shape in first_run.shapes.items()} != {
        name: len(shape) for name, shape in second_run.shapes.items()
    }:
        return None
    texts: dict[tuple[int, int], list[str]] = {}
    for name in traced:
        texts.setdefault((traced[name], varied[name]), []).append(name)
    for left, right in combinations(traced, 2):
        texts.setdefault((traced[left] + traced[right], varied[left] + varied[right]), []).append(f"{left} + {right}")
    shapes: dict[str, Shape] = {}
    for output, sizes in first_run.shapes.items():
        candidates = [
            [before] if before == after else texts.get((before, after), [])
            for before, after in zip(sizes, second_run.shapes[output], strict=True)
        ]
        if any(len(explanations) != 1 for explanations in candidates):
            return None
        shapes[output] = tuple(explanation for (explanation,) in candidates)
    return shapes


def _observe_sizes(
    outputs: Outputs, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Outputs | None]
) -> list[Observation]:
    """Run the model at other sizes; return the output shapes of each run.

    The observations are, in this order: all dimensions at their traced sizes; for each dimension, only this one at
    another size; all dimensions at other sizes. Refused sizes are left out.

    Args:
        outputs: Outputs at the traced sizes.
        dimensions: The dynamic dimensions.
        run: Sizes → outputs; `None` if the model refuses them.
    """
    traced = {dimension.name: dimension.example or 1 for dimension in dimensions}
    observations = [Observation(traced, _output_shapes(outputs))]
    other_sizes = dict(traced)
    for dimension in dimensions:
        attempts = (_observe_at({**traced, dimension.name: size}, run) for size in _candidate_sizes(dimension))
        observation = next((attempt for attempt in attempts if attempt is not None), None)
        if observation is not None:
            observations.append(observation)
            other_sizes[dimension.name] = observation.sizes[dimension.name]
    joint_observation = _observe_at(other_sizes, run) if len(observations) > 2 else None
    return observations if joint_observation is None else [*observations, joint_observation]


def _candidate_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield candidate sizes, beginning with sizes that reveal strides."""
    traced = dimension.example or 1
    for size in (2 * traced, traced // 2, traced + 1, traced - 1):
        if max(dimension.min, 1) <= size <= (dimension.max or size) and size != traced:
            yield size


def _observe_at(sizes: Sizes, run: Callable[[Sizes], Outputs | None]) -> Observation | None:
    outputs = run(sizes)
    return None if outputs is None else Observation(sizes, _output_shapes(outputs))


def _output_shapes(outputs: Outputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in outputs.items()}
