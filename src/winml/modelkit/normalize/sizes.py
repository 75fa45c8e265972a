"""Sizes as polynomials of the names of dynamic dimensions, so that two of them can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

_Monomial = tuple[str, ...]
"""Names that are multiplied, in order; a name stands as often as its power."""


@dataclass(frozen=True)
class Size:
    """A polynomial with whole coefficients, such as ``batch·heads`` or ``past + sequence``.

    Two sizes that are equal for every value of the names are equal here, for there is one way to write each.
    """

    terms: tuple[tuple[_Monomial, int], ...]
    """Products of names, each with its coefficient, which is not zero; in order."""

    @property
    def number(self) -> int | None:
        """The number it is; None where a name is in it."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def name(self) -> str | None:
        """The one name it is; None for anything else."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0][0]
        return None

    @property
    def is_natural(self) -> bool:
        """Whether it is at least zero for all sizes of the names; False also where that is not known."""
        return all(coefficient > 0 for _, coefficient in self.terms)

    def __add__(self, other: Size) -> Size:
        return _polynomial([*self.terms, *other.terms])

    def __sub__(self, other: Size) -> Size:
        return _polynomial([*self.terms, *((names, -coefficient) for names, coefficient in other.terms)])

    def __mul__(self, other: Size) -> Size:
        return _polynomial(
            (tuple(sorted((*left, *right))), a * b) for left, a in self.terms for right, b in other.terms
        )

    def divided_by(self, other: Size) -> Size | None:
        """Return the quotient where nothing remains, or None."""
        if not other.terms:
            return None
        lead, coefficient = other.terms[-1]
        rest, quotient = self, ZERO
        # Each round takes away the last term, and adds none behind it.
        while rest.terms:
            names, number = rest.terms[-1]
            left = _without(names, lead)
            if left is None or number % coefficient:
                return None
            part = Size(((left, number // coefficient),))
            rest, quotient = rest - part * other, quotient + part
        return quotient

    def __str__(self) -> str:
        return " + ".join(_term_words(names, coefficient) for names, coefficient in self.terms) or "0"


def constant(number: int) -> Size:
    """Return a number as a size."""
    return Size((((), number),)) if number else ZERO


def symbol(name: str) -> Size:
    """Return a name as a size."""
    return Size((((name,), 1),))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product; 1 of none."""
    return reduce(Size.__mul__, sizes, ONE)


def _polynomial(terms: Iterable[tuple[_Monomial, int]]) -> Size:
    sums: dict[_Monomial, int] = {}
    for names, coefficient in terms:
        sums[names] = sums.get(names, 0) + coefficient
    # By degree, then by names: an order that multiplication keeps, as division needs.
    ordered = sorted(((names, number) for names, number in sums.items() if number), key=_order)
    return Size(tuple(ordered))


def _order(term: tuple[_Monomial, int]) -> tuple[int, _Monomial]:
    return len(term[0]), term[0]


def _without(names: _Monomial, divisor: _Monomial) -> _Monomial | None:
    left = list(names)
    for name in divisor:
        if name not in left:
            return None
        left.remove(name)
    return tuple(left)


def _term_words(names: _Monomial, coefficient: int) -> str:
    factors = [*([] if coefficient == 1 and names else [str(coefficient)]), *names]
    return "*".join(factors)


ZERO = Size(())
ONE = constant(1)
