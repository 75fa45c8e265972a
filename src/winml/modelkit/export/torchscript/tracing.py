"""Adapts Python while TorchScript traces: loops over values, bools, masks, rounding, assertions."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from winml.modelkit.runtime.shared_settings import attribute_replaced

__all__ = [
    "TracedLoops",
    "asserts_only",
    "booleans_as_numbers",
    "masks_without_vmap",
    "tensors_rounded_as_numbers",
]


# --- Which lines of a script only assert something? A value that is read there decides nothing in the graph.


def asserts_only(file: str, line: int) -> bool:
    """Say whether a line belongs to an ``assert`` and to no other statement; False where the source is not at hand."""
    return line in _lines_of_assertions(file)


@cache
def _lines_of_assertions(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    asserting: set[int] = set()
    deciding: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            # ``assert (size := int(n)) > 0`` keeps what it read.
            keeps = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
            (asserting if isinstance(node, ast.Assert) and not keeps else deciding).update(lines)
    return frozenset(asserting - deciding)


# --- Replaces Python bools by numbers in calls of torch functions during tracing.
#
# TorchScript's tracer records a bool as an operand of a signature that does not exist, and fails with an internal
# error. Where the result is the same, such a bool is replaced by 1 or 0.


_OF_TENSORS = (
    *("fill_", "fill_diagonal_", "index_fill", "index_fill_", "masked_fill", "masked_fill_", "new_full"),
    *("scatter", "scatter_"),
)
_OF_TORCH = ("full", "full_like", "index_fill", "masked_fill", "scatter")
"""Specified, with those above: functions that write a number into a tensor; all but ``full`` use the tensor's dtype."""
_NAMES_OF_NUMBERS = ("fill_value", "value")


@contextmanager
def booleans_as_numbers() -> Iterator[None]:
    """Pass 1 and 0 instead of True and False to the functions above, for the time of the block; patches torch."""
    with ExitStack() as stack:
        for name in _OF_TENSORS:
            stack.enter_context(_taking_numbers(torch.Tensor, name))
        for name in _OF_TORCH:
            stack.enter_context(_taking_numbers(torch, name))
        yield


@contextmanager
def _taking_numbers(owner: object, name: str) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: object, **options: object) -> Any:
        numbers = {key: options[key] for key in _NAMES_OF_NUMBERS if key in options}
        if name == "full" and any(isinstance(value, bool) for value in (*args, *numbers.values())):
            # The only one whose dtype follows from the number.
            options["dtype"] = options.get("dtype") or torch.bool
        return original(
            *map(_as_number, args), **{**options, **{key: _as_number(value) for key, value in numbers.items()}}
        )

    with attribute_replaced(owner, name, call):
        yield


def _as_number(value: object) -> Any:
    return int(value) if isinstance(value, bool) else value


# --- Lets transformers make masks of several conditions in a form that TorchScript records.
#
# Where a mask joins conditions of its own, transformers asks them for one pair of tokens and maps that over all pairs
# with ``torch.vmap``, which the tracer cannot record. The same conditions, asked for all pairs at once, give the same.


_MODULE = "transformers.masking_utils"
_MAPPED, _INDEXING = "_vmap_expansion_sdpa", "TransformGetItemToIndex"
"""Not public: what maps conditions over tokens, and how their tensors are indexed meanwhile."""


@contextmanager
def masks_without_vmap() -> Iterator[None]:
    """Ask conditions of masks for all pairs of tokens at once, for the time of the block; patches transformers."""
    module: Any = sys.modules.get(_MODULE)
    own = {name: getattr(module, name) for name in (_MAPPED, _INDEXING) if hasattr(module, name)}
    for name, replacement in {_MAPPED: _mask_conditions, _INDEXING: nullcontext}.items():
        if name in own:
            setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(module, name, value)


def _mask_conditions(condition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what makes the mask of a condition from the numbers of rows, heads, tokens and tokens they may see."""

    def mask(*numbers: torch.Tensor) -> torch.Tensor:
        placed = [
            item[(*[None] * axis, slice(None), *[None] * (len(numbers) - axis - 1))]
            for axis, item in enumerate(numbers)
        ]
        return condition(*placed).expand(*(item.shape[0] for item in numbers))

    return mask


# --- Supports ``round()`` of numbers computed from sizes during a TorchScript trace.
#
# In a trace a size is a tensor, and tensors have no ``__round__``; it is added for the time of the block.


_DIGITS = 6
"""Specified: how many decimal digits 32 bits keep for certain (``FLT_DIG``)."""


@contextmanager
def tensors_rounded_as_numbers() -> Iterator[None]:
    """Let ``round()`` accept tensors of one element inside the block; patches torch.

    The result is a Python number, as without a trace: it becomes a constant of the graph, as with ``int()``.
    """
    if hasattr(torch.Tensor, "__round__"):
        yield
        return
    torch.Tensor.__round__ = _round_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.__round__  # type: ignore[attr-defined]


def _round_tensor(values: torch.Tensor, digits: int | None = None) -> int | float:
    number = values.item()
    if values.dtype == torch.float32:
        # Python computes in 64 bits, the trace in 32: drop the digits that 32 bits do not have.
        number = float(f"{number:.{_DIGITS}g}")
    return round(number, digits)


# --- Traces loops whose rounds depend on values: over the places of a tensor that are not zero.
#
# A trace keeps the rounds that were made while tracing, such as those of the experts that were chosen. Here a loop has
# a round for every place; one that nothing belongs to computes on no rows. Whether such a round adds nothing is for the
# comparison with PyTorch on other values to say.
#
# NOTE: asks the tracer what a tensor is computed from (docs/decisions/0004-private-seams.md).
# ``tests/unit/export/torchscript/test_traced_loops.py`` fails when that moves.


_ROUNDS, _COUNTED = "_winml_rounds", "_winml_counted"
"""Attributes of tensors: how many rounds a loop over one has; that its length is the number of places not zero."""
_INDEX = re.compile(r"\bindex (\d+)\b")
"""How torch and its lists of modules name the index that lies past the end."""


@dataclass
class TracedLoops:
    """The loops of one trace, and how many rounds they have."""

    input_count: int
    """How many inputs the model has."""
    _shortened: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Which loop of the trace → how many places there are, and how many rounds can be made."""
    _loops: int = 0
    """How many loops the trace has begun."""
    _last_round: tuple[int, int, int] | None = None
    """Which loop was in a round last, its places, and the one it was at; none once it came to its end."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of loops that have fewer rounds than places."""
        counts = Counter(self._shortened.values())
        return tuple(
            f"A loop over {places} places has {rounds} rounds in the graph{f' ({loops} times)' if loops > 1 else ''}: "
            f"PyTorch finds nothing at {'those' if places - rounds > 1 else 'the one'} behind."
            for (places, rounds), loops in counts.items()
        )

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Trace a round for every place inside the block; patches torch."""
        self._loops, self._last_round = 0, None
        with ExitStack() as stack:
            for owner, name, patch in (
                (torch.Tensor, "nonzero", self._places),
                (torch, "nonzero", self._places),
                (torch.Tensor, "__iter__", self._rounds),
                (torch, "where", _counted),
                (torch.Tensor, "numel", _taken_as_filled),
            ):
                stack.enter_context(_replaced(owner, name, patch))
            yield

    def call(self, trace: Callable[[], bytes]) -> bytes:
        """Return what a trace returns, made with fewer rounds where a place lies past the end of what it chooses from.

        PyTorch would fail there as well: there is never such a place. Any other error of the trace comes out as it is.
        """
        try:
            return trace()
        except IndexError as error:
            _drop_stale_index()
            if not self._shorten(str(error)):
                raise
        return self.call(trace)

    def _shorten(self, error: str) -> bool:
        """Leave out the place that the trace failed at, and those behind it; return whether it failed at one."""
        index = _INDEX.search(error)
        if index is None or self._last_round is None:
            return False
        loop, places, place = self._last_round
        if not place or place != int(index[1]):
            return False
        # Which loop comes after this one may change with its rounds.
        self._shortened = {other: sizes for other, sizes in self._shortened.items() if other < loop}
        self._shortened[loop] = (places, place)
        return True

    def _places(self, original: Callable[..., object], *args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        values = args[0] if args else options["input"]
        if isinstance(found, torch.Tensor) and values.dim() == 1 and self._depends_on_inputs(values):
            setattr(found, _ROUNDS, len(_values(values)))
        return _marked(found)

    def _rounds(self, original: Callable[..., object], values: torch.Tensor) -> Any:
        places = getattr(values, _ROUNDS, None)
        return original(values) if places is None else self._round_by_round(places, values.device)

    def _round_by_round(self, places: int, device: torch.device) -> Iterator[torch.Tensor]:
        around, loop = self._last_round, self._loops
        self._loops += 1
        _, rounds = self._shortened.get(loop, (places, places))
        for place in range(rounds):
            self._last_round = (loop, places, place)
            yield torch.full((1,), place, dtype=torch.int64, device=device)
        self._last_round = around

    def _depends_on_inputs(self, values: torch.Tensor) -> bool:
        """Say whether a tensor is computed from an input of the model, and not from weights and constants alone."""
        tracing: Any = torch._C._get_tracing_state()
        if tracing is None:
            return False
        # The exporter lists the inputs of the model first, and the weights after them.
        inputs = {value.unique() for value in list(tracing.graph().inputs())[: self.input_count]}
        pending: list[Any] = [torch._C._get_value_trace(values)]  # type: ignore[attr-defined]  # its stub misses it
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            if value.unique() in inputs:
                return True
            if value.unique() not in seen:
                seen.add(value.unique())
                pending += value.node().inputs()
        return False


def _drop_stale_index() -> None:
    """Drop the index that torch keeps of a failed trace, and would put into the next one."""
    with suppress(RuntimeError), warnings.catch_warnings():
        # That it is outdated, as the exporter is.
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda values: values[0], torch.zeros(1), check_trace=False)


@contextmanager
def _replaced(owner: object, name: str, patch: Callable[..., object]) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: object, **options: object) -> Any:
        return patch(original, *args, **options)

    with attribute_replaced(owner, name, call):
        yield


def _counted(original: Callable[..., object], *args: object, **options: object) -> Any:
    found = original(*args, **options)
    # Of two tensors it returns one, which holds no places.
    return found if isinstance(found, torch.Tensor) else _marked(found)


def _marked(found: Any) -> Any:
    for tensor in (found,) if isinstance(found, torch.Tensor) else found:
        setattr(tensor, _COUNTED, True)
    return found


def _taken_as_filled(original: Callable[..., object], values: torch.Tensor) -> Any:
    # Asked whether there is anything to do: a graph does it always, on no rows where there is nothing.
    return max(1, len(_values(values))) if getattr(values, _COUNTED, False) else original(values)


def _values(values: torch.Tensor) -> list[Any]:
    """Return the values of a tensor, none of which is kept in the graph."""
    tracing: Any = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # its stub misses it
    try:
        return list(values.detach().cpu().numpy().tolist())
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
