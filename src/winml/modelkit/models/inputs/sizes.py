"""Choice of the size of one axis: the requested size, else the model's size, else a default.

The result is a record with everything known about the size; no state is kept between two choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from winml.modelkit.errors import UsageError, opt


@dataclass(frozen=True)
class SizeBounds:
    """Bounds of the size of a key, as far as config and structure state them."""

    min: int = 1
    max: int | None = None
    fixed: str = ""
    """Reason why the size cannot vary at all, as a clause (``the model takes 80 only``); ``""`` if it can."""


@dataclass(frozen=True)
class InputSize:
    """The size of one axis of an input."""

    value: int
    key: str | None = None
    """Key of ``--shape-config``; `None` if the architecture decides the size."""
    bounds: SizeBounds | None = None
    """Bounds of the size; `None` if unknown."""
    is_declared: bool = False
    """True if config or processor files state the size."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on the size."""


@dataclass(frozen=True)
class InputSizes:
    """The sizes the user requested."""

    requested: Mapping[str, int]
    """Key of ``--shape-config`` → size."""

    def choose(
        self, key: str, default: int, *, bounds: SizeBounds | None = None, is_declared: bool = False
    ) -> InputSize:
        """Return the user's size for ``key``, else ``default``."""
        return InputSize(self.requested.get(key, default), key, bounds, is_declared)

    def choose_exactly(self, key: str, declared: int | None, default: int) -> InputSize:
        """Return the declared size, which the user may repeat but not change; else the user's size or a default.

        Raises:
            UsageError: the user requests another size than the declared one.
        """
        if declared is None:
            return self.choose(key, default)
        reason = f"the model takes {declared} only"
        size = self.choose(key, declared, bounds=SizeBounds(fixed=reason), is_declared=True)
        if size.value != declared:
            self.refuse(key, reason)
        return size

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Refuse a size of the user.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{opt.shape_config}: {key} {self.requested[key]}: {reason}",
            hint=f"Remove {key}, or set such a size.",
        )


_MIN_SIZE = 2
_SHARE_OF_LIMIT = 0.75
"""Chosen: leaves sizes above the traced size, at which a table cut to the traced size would fail."""
_MAX_STEPS = 1000
"""Chosen: many more sizes than a model has dimensions."""


@dataclass(frozen=True)
class SizeWish:
    """Constraints and preference for the size of one dimension."""

    name: str
    preferred: int
    is_firm: bool = False
    """True if the user requested this size; it is then used, unless it is 1."""
    min: int = 1
    max: int | None = None
    step: int = 1
    """Distance of other candidates: image sizes must often be multiples of the network's stride."""
    beside: frozenset[int] = frozenset()
    """Fixed sizes in the inputs with this dimension; the chosen size differs from them if possible."""


def choose_trace_sizes(wishes: Sequence[SizeWish]) -> dict[str, int]:
    """Return a size per dimension: in its bounds, at least 2 unless the bounds forbid it, distinct if possible.

    A size of 1 is traced as a constant, and equal sizes hide a confusion of two dimensions. Firm sizes are chosen
    first, and avoided by later dimensions.
    """
    sizes: dict[str, int] = {}
    for wish in sorted(wishes, key=lambda wish: not wish.is_firm):
        chosen_sizes = set(sizes.values())
        candidates = list(_candidate_sizes(wish))
        preferred_sizes = (size for size in candidates if size not in chosen_sizes and size not in wish.beside)
        distinct = (size for size in candidates if size not in chosen_sizes)
        default = candidates[0]
        sizes[wish.name] = default if wish.is_firm else next(preferred_sizes, next(distinct, default))
    return {wish.name: sizes[wish.name] for wish in wishes}


def _candidate_sizes(wish: SizeWish) -> Iterator[int]:
    """Yield sizes inside the bounds, the best first: the preferred size, then smaller sizes, then larger sizes."""
    top = wish.max if wish.max is not None else wish.preferred + _MAX_STEPS * wish.step
    bottom = min(max(wish.min, _MIN_SIZE), top)
    preferred = wish.preferred
    if not wish.is_firm and wish.max is not None:
        preferred = min(preferred, int(wish.max * _SHARE_OF_LIMIT))
    start = min(max(preferred, bottom), top)
    yield start
    yield from range(start - wish.step, bottom - 1, -wish.step)
    yield from range(start + wish.step, min(top, start + _MAX_STEPS * wish.step) + 1, wish.step)


def sub_config(config: object, *names: str) -> Any:
    """Return the first existing sub-config of these names, else the config itself."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if hasattr(value, "model_type")), config)


def first_int(config: object, names: tuple[str, ...]) -> int | None:
    """Return the first positive number under these names."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def first_int_anywhere(config: object, names: tuple[str, ...]) -> int | None:
    """Return the number under the first of these names in the config or in any config inside."""
    configs = [config]
    for current in configs:
        configs += [value for value in vars(current).values() if hasattr(value, "model_type")]
    return next((value for name in names for current in configs if (value := first_int(current, (name,)))), None)


def first_edge(config: object, names: tuple[str, ...]) -> int | None:
    """Return the first number, or the first of a pair of numbers, under these names."""
    pairs = (edge_pair(getattr(config, name, None)) for name in names)
    return next((pair[0] for pair in pairs if pair), None)


def edge_pair(value: object) -> tuple[int, int] | None:
    """Return height and width of a config's size: one number, a pair, or an object with both.

    `None` for other values.
    """
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    elif isinstance(value, int):
        value = (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(edge, int) for edge in value):
        return value[0], value[1]
    return None


SEPARATOR = "."
"""Separator of the names of containers and keys: ``features.input_ids``, ``images.0``."""


def argument_of(input_name: str) -> str:
    """Return the argument to which an input belongs.

    >>> argument_of("features.input_ids")
    'features'
    """
    return input_name.partition(SEPARATOR)[0]
