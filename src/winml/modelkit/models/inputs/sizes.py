"""Chooses the size of one axis: the requested size, else that of the model, else a default.

An answer is a record that carries everything known about the size; nothing is remembered between two questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from winml.modelkit.errors import UsageError, opt


@dataclass(frozen=True)
class SizeBounds:
    """Between which sizes a key may vary, as far as config and structure say."""

    min: int = 1
    max: int | None = None
    fixed: str = ""
    """Why it cannot vary at all, as a clause (``the model takes 80 only``); empty where it can."""


@dataclass(frozen=True)
class InputSize:
    """The size of one axis of an input."""

    value: int
    key: str | None = None
    """Its key of ``--shape-config``; None where the architecture decides the size."""
    bounds: SizeBounds | None = None
    """How far it may vary; None where nothing is known about that."""
    is_declared: bool = False
    """Whether config or processor files say the size."""
    notes: tuple[str, ...] = ()
    """Sentences the user should hear about it."""


@dataclass(frozen=True)
class InputSizes:
    """The sizes the user asked for."""

    requested: Mapping[str, int]
    """Key of ``--shape-config`` → size."""

    def choose(
        self, key: str, default: int, *, bounds: SizeBounds | None = None, is_declared: bool = False
    ) -> InputSize:
        """Return the user's size for ``key``, else ``default``."""
        return InputSize(self.requested.get(key, default), key, bounds, is_declared)

    def choose_exactly(self, key: str, declared: int | None, default: int) -> InputSize:
        """Return the size the config declares, which the user may repeat but not change; else theirs or a default.

        Raises:
            UsageError: the user wants another size than the declared one.
        """
        if declared is None:
            return self.choose(key, default)
        reason = f"the model takes {declared} only"
        size = self.choose(key, declared, bounds=SizeBounds(fixed=reason), is_declared=True)
        if size.value != declared:
            self.refuse(key, reason)
        return size

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Refuse the size the user asked for.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{opt.shape_config}: {key} {self.requested[key]}: {reason}",
            hint=f"Remove {key}, or set such a size.",
        )


_SMALLEST = 2
_SHARE_OF_LIMIT = 0.75
"""Chosen: leaves room above the traced size, where a table cut to that size would show."""
_MOST_STEPS = 1000
"""Chosen: far more sizes than dimensions of one model."""


@dataclass(frozen=True)
class SizeWish:
    """What is wanted of the size of one dimension."""

    name: str
    preferred: int
    is_firm: bool = False
    """Whether the user asked for this size; it is taken then, unless it is 1."""
    min: int = 1
    max: int | None = None
    step: int = 1
    """Other sizes are tried this far apart: image sizes must often be multiples of what the network divides by."""
    beside: frozenset[int] = frozenset()
    """Fixed sizes of the inputs it is a dimension of; it differs from them where it can."""


def choose_trace_sizes(wishes: Sequence[SizeWish]) -> dict[str, int]:
    """Return a size per dimension: in its bounds, at least 2 unless the bounds forbid it, distinct if possible.

    A size of 1 is traced as a constant, and two dimensions of one size hide that one was taken for the other. Firm
    sizes are taken first, so that others make way for them.
    """
    chosen: dict[str, int] = {}
    for wish in sorted(wishes, key=lambda wish: not wish.is_firm):
        chosen_sizes = set(chosen.values())
        candidates = list(_candidate_sizes(wish))
        apart = (size for size in candidates if size not in chosen_sizes and size not in wish.beside)
        distinct = (size for size in candidates if size not in chosen_sizes)
        best = candidates[0]
        chosen[wish.name] = best if wish.is_firm else next(apart, next(distinct, best))
    return {wish.name: chosen[wish.name] for wish in wishes}


def _candidate_sizes(wish: SizeWish) -> Iterator[int]:
    """Yield sizes inside the bounds, the best first: the preferred one, then smaller ones, then larger ones."""
    top = wish.max if wish.max is not None else wish.preferred + _MOST_STEPS * wish.step
    bottom = min(max(wish.min, _SMALLEST), top)
    preferred = wish.preferred
    if not wish.is_firm and wish.max is not None:
        preferred = min(preferred, int(wish.max * _SHARE_OF_LIMIT))
    first = min(max(preferred, bottom), top)
    yield first
    yield from range(first - wish.step, bottom - 1, -wish.step)
    yield from range(first + wish.step, min(top, first + _MOST_STEPS * wish.step) + 1, wish.step)


def sub_config(config: object, *names: str) -> Any:
    """Return the first sub-config of one of these names, else the config itself."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if hasattr(value, "model_type")), config)


def first_int(config: object, names: tuple[str, ...]) -> int | None:
    """Return the first positive number under these names."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def first_int_anywhere(config: object, names: tuple[str, ...]) -> int | None:
    """Return the number under the first of these names that the config or any config in it has."""
    configs = [config]
    for current in configs:
        configs += [value for value in vars(current).values() if hasattr(value, "model_type")]
    return next((value for name in names for current in configs if (value := first_int(current, (name,)))), None)


def first_edge(config: object, names: tuple[str, ...]) -> int | None:
    """Return the first number, or the first of a pair of numbers, under these names."""
    pairs = (edge_pair(getattr(config, name, None)) for name in names)
    return next((pair[0] for pair in pairs if pair), None)


def edge_pair(value: object) -> tuple[int, int] | None:
    """Return height and width of a config's size: one number, a pair, or an object with both."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    elif isinstance(value, int):
        value = (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(edge, int) for edge in value):
        return value[0], value[1]
    return None


SEPARATOR = "."
"""Between the names of containers and keys: ``features.input_ids``, ``images.0``."""


def argument_of(input_name: str) -> str:
    """Return the argument an input belongs to.

    >>> argument_of("features.input_ids")
    'features'
    """
    return input_name.partition(SEPARATOR)[0]
