"""What are the sizes of the outputs, in terms of the sizes of the inputs?

Fits simple expressions to shapes that were observed: a dimension of the inputs, a multiple, a sum, a product, a
division rounded down. Runs nothing itself: where several expressions fit, it asks for the shapes at one more size. A
size no single expression explains gets a name of its own, readable and without a claim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["Ask", "Observation", "explain_output_shapes"]

Sizes = Mapping[str, int]
Shape = tuple[int | str, ...]

MOST_QUESTIONS = 24
"""Chosen: halving finds the offset of a stride below 2**16 in 16, with some left to find the stride."""
_REACH = 2
"""Chosen: how many times the traced size a question may ask for; strides show, and memory holds."""
_SAMPLES = 64
_NOT_OF_NAMES = re.compile(r"\W")


@dataclass(frozen=True)
class Observation:
    """What the model returned once."""

    sizes: Sizes
    """Size of every dimension of the inputs that is left open."""
    shapes: Mapping[str, tuple[int, ...]]
    """Output → its shape."""


Ask = Callable[[Sizes], Observation | None]
"""Runs the model at these sizes; None where it refuses them."""


@dataclass(frozen=True)
class _Division:
    """``(symbol + offset) // divisor`` with every offset from ``low`` to ``high``."""

    symbol: str
    divisor: int
    low: int
    high: int

    def at(self, sizes: Sizes, offset: int) -> int:
        return (sizes[self.symbol] + offset) // self.divisor

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    @property
    def text(self) -> str:
        return f"{_sum(self.symbol, self.low, is_operand=True)}//{self.divisor}"


def explain_output_shapes(observations: Sequence[Observation], ask: Ask | None = None) -> dict[str, Shape]:
    """Return the shape of every output: numbers, names of input dimensions, and simple expressions of them.

    Args:
        observations: At least one; every dimension should stand at two sizes or more, each time with the others as in
            the first, and all should have changed together once.
        ask: Called where the observations leave several expressions possible, at most ``MOST_QUESTIONS`` times.
    """
    notebook = _Notebook(list(observations), ask)
    names: dict[tuple[int, ...], str] = {}
    explained: dict[str, Shape] = {}
    for output, shape in observations[0].shapes.items():
        sizes: list[int | str] = []
        for axis in range(len(shape)):
            found = _explain(notebook, output, axis)
            if found is None:
                # What was equal in every observation bears one name.
                values = tuple(item.shapes[output][axis] for item in observations)
                found = names.setdefault(values, f"{_NOT_OF_NAMES.sub('_', output)}_dim_{axis}")
            sizes.append(found)
        explained[output] = tuple(sizes)
    return explained


class _Notebook:
    """The observations so far, and how to get more."""

    def __init__(self, observations: list[Observation], ask: Ask | None) -> None:
        self.observations = observations
        self._ask = ask
        self._left = MOST_QUESTIONS

    @property
    def traced(self) -> Sizes:
        return self.observations[0].sizes

    def points(self, output: str, axis: int) -> list[tuple[Sizes, int]]:
        return [(item.sizes, item.shapes[output][axis]) for item in self.observations]

    def look_at(self, symbol: str, size: int) -> bool:
        """Observe one more size; return whether something new is known."""
        sizes = {**self.traced, symbol: size}
        if self._ask is None or self._left == 0 or any(item.sizes == sizes for item in self.observations):
            return False
        self._left -= 1
        seen = self._ask(sizes)
        if seen is not None:
            self.observations.append(seen)
        return seen is not None


def _explain(notebook: _Notebook, output: str, axis: int) -> int | str | None:
    """Return the one expression for an output's axis, or None."""
    points = notebook.points(output, axis)
    values = {value for _, value in points}
    if len(values) == 1:
        return values.pop()
    for family in (_linear, _of_two):
        found = list(dict.fromkeys(family(points)))
        if found:
            return found[0] if len(found) == 1 else None
    return _divided(notebook, output, axis)


def _linear(points: Sequence[tuple[Sizes, int]]) -> Iterator[str]:
    """Yield every ``factor * symbol + offset`` that fits."""
    for symbol in points[0][0]:
        (first, low), (second, high) = min(points, key=_by(symbol)), max(points, key=_by(symbol))
        distance = second[symbol] - first[symbol]
        if distance == 0 or (high - low) % distance or high <= low:
            continue
        factor = (high - low) // distance
        offset = low - factor * first[symbol]
        if all(value == factor * sizes[symbol] + offset for sizes, value in points):
            yield _sum(symbol if factor == 1 else f"{factor}*{symbol}", offset)


def _by(symbol: str) -> Callable[[tuple[Sizes, int]], int]:
    return lambda point: point[0][symbol]


def _of_two(points: Sequence[tuple[Sizes, int]]) -> Iterator[str]:
    """Yield every product (times a number) and sum (plus a number) of two dimensions that fits."""
    for left, right in combinations(points[0][0], 2):
        factor, rest = divmod(points[0][1], points[0][0][left] * points[0][0][right])
        if factor and not rest and all(value == factor * sizes[left] * sizes[right] for sizes, value in points):
            yield f"{left}*{right}" if factor == 1 else f"{factor}*{left}*{right}"
        offset = points[0][1] - points[0][0][left] - points[0][0][right]
        if all(value == sizes[left] + sizes[right] + offset for sizes, value in points):
            yield _sum(f"{left} + {right}", offset)


def _sum(term: str, offset: int, *, is_operand: bool = False) -> str:
    if offset == 0:
        return term
    text = f"{term} {'+' if offset > 0 else '-'} {abs(offset)}"
    return f"({text})" if is_operand else text


def _divided(notebook: _Notebook, output: str, axis: int) -> str | None:
    """Return the one division that fits, asking until it is the only one; None if there is none, or more stay."""
    while candidates := _divisions(notebook.points(output, axis)):
        if len(candidates) == 1 and candidates[0].is_exact:
            return candidates[0].text
        if not any(notebook.look_at(symbol, size) for symbol, size in _questions(candidates, notebook.traced)):
            return None
    return None


def _divisions(points: Sequence[tuple[Sizes, int]]) -> list[_Division]:
    found = []
    for symbol in points[0][0]:
        for divisor in range(2, max(sizes[symbol] for sizes, _ in points) + 1):
            low = max(divisor * value - sizes[symbol] for sizes, value in points)
            high = min(divisor * value + divisor - 1 - sizes[symbol] for sizes, value in points)
            if low <= high:
                found.append(_Division(symbol, divisor, low, high))
    return found


def _questions(candidates: Sequence[_Division], traced: Sizes) -> list[tuple[str, int]]:
    """Return sizes at which the candidates disagree, the most telling first; a refused one is followed by the next."""
    first = candidates[0]
    if len(candidates) == 1:
        # The middle offset is reached exactly where the numerator becomes a multiple of the divisor.
        middle = (first.low + first.high + 1) // 2
        nearest_multiple = -(-(traced[first.symbol] + middle) // first.divisor)
        return [(first.symbol, first.divisor * (nearest_multiple + step) - middle) for step in (0, 1, 2)]
    symbols = sorted({item.symbol for item in candidates})
    told = [(_answers(candidates, traced, symbol, size), symbol, size) for symbol in symbols
            for size in _samples(traced[symbol])]  # fmt: skip
    return [(symbol, size) for answers, symbol, size in sorted(told, key=lambda item: -item[0]) if answers > 1]


def _samples(traced: int) -> list[int]:
    low, high = max(2, traced // _REACH), traced * _REACH
    # Odd steps, so that sizes are seldom multiples of strides.
    return sorted({low + (high - low) * step // _SAMPLES | 1 for step in range(_SAMPLES + 1)})


def _answers(candidates: Sequence[_Division], traced: Sizes, symbol: str, size: int) -> int:
    """Return how many different sizes the candidates predict."""
    sizes = {**traced, symbol: size}
    return len({item.at(sizes, offset) for item in candidates for offset in (item.low, item.high)})
