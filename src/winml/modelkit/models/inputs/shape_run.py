"""Execution of a model's Python code on shapes only, without its weights.

Tensors have no storage. Only integers and booleans that follow from sizes are computed, because forwards derive further
sizes from such values (the grid of an image, the length of a recording). Independent of models.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from winml.modelkit.models.inputs.repeated_operators import infer_once
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.shared_settings import attributes_replaced

REFUSALS = (
    ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError,
)  # fmt: skip
"""Exceptions of model code that receives invalid inputs, or reads a value that does not exist."""

_META = torch.device("meta")
_CPU = torch.device("cpu")


def run_on_shapes(call: Callable[..., Any], inputs: Mapping[str, InputTensorSpec]) -> Any | None:
    """Call model code with inputs of these specifications, and return its result; `None` if the code fails.

    Integer tensors hold their first values, followed by the smallest valid value. A value that is not computed equals
    no other value; every other predicate on such a value is true.

    Args:
        call: Bound to a model; its parameters may be on the ``meta`` device, and none is written or read.
        inputs: Specifications of fixed sizes.
    """
    tensors = {name: _make_tensor(spec) for name, spec in inputs.items()}
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        # The warnings concern tensors without elements; only success or failure of the forward matters here.
        warnings.simplefilter("ignore")
        try:
            with _KeepPythonNumbers(), _ComputeShapesOnly():
                return call(**tensors)
        except REFUSALS:
            return None


def _make_tensor(spec: InputTensorSpec) -> torch.Tensor:
    """Return a tensor of a specification: integers with their first values, floats on ``meta``."""
    sizes = [int(size) for size in spec.shape]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.empty(sizes, dtype=dtype, device=_META)
    values = torch.full(sizes, int((spec.value_range or (0, 1))[0]), dtype=dtype)
    first_values = [value for value, count in spec.first_values for _ in range(count)]
    rows = values.view(sizes[0], -1) if sizes else values
    if first_values:
        rows[:, : len(first_values)] = torch.tensor(first_values[: rows.shape[1]], dtype=dtype)
    return values


class _UnknownCounts(list[int]):
    """Integers of unknown value; a split by these sizes returns the whole tensor as its first part."""


class _KeepPythonNumbers(TorchFunctionMode):
    """Keep the values of tensors created from Python numbers, and return lists of unknown integers from ``tolist``."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            kwargs.pop("device", None)
        if func is torch.Tensor.tolist and args[0].is_meta and args[0].dim() == 1 and not args[0].is_floating_point():
            return _UnknownCounts([0] * args[0].shape[0])
        if func in (torch.Tensor.split, torch.split) and isinstance(args[1], _UnknownCounts):
            tensor, sizes, axis = args[0], args[1], kwargs.get("dim", args[2] if len(args) > 2 else 0)
            return func(tensor, [tensor.shape[axis], *sizes[1:]], axis)
        return func(*args, **kwargs)


class RepeatOperators(TorchDispatchMode):
    """Compute each operator on the ``meta`` device once for equal arguments.

    Equal layers call the same operators on the same shapes: with 80 of them, a forward takes a third of the time
    (measured).
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevent torch from importing ``torch._dynamo`` for this mode: it takes seconds, and nothing is compiled
        here.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        # A view without values takes less time than its search among the results.
        if func.is_view:
            return func(*args, **(kwargs or {}))
        return infer_once(self._results, func, args, kwargs or {}, lambda: func(*args, **(kwargs or {})))[0]


@contextmanager
def forward_on_meta() -> Iterator[None]:
    """Compute equal operators once; forwards of transformers then read no values, as with fake tensors."""
    utils = sys.modules.get("transformers.utils.import_utils")
    replaced = [(utils, "is_fake_tensor", _is_on_meta)] if hasattr(utils, "is_fake_tensor") else []
    with attributes_replaced(*replaced), RepeatOperators():
        yield


def _is_on_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class _ComputeShapesOnly(RepeatOperators):
    """Compute integers on the CPU and leave other tensors without values."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Values of parameters are never read, even if present: results of parameters alone belong on ``meta`` as well.
        if any(tensor.is_meta or isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
            if func in _MASK_SELECTIONS:
                return _index_without_values(func, args)
            leaves = [_META if isinstance(leaf, torch.device) else _strip_values(leaf) for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, structure)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return tree_map(_fill_truth_values(func not in _EQUALITIES), result)
        leaves = [_CPU if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        result = func(*args, **kwargs)
        # An integer tensor created without inputs is a mask or a row of positions; a float tensor needs no values.
        return result if tensors else tree_map(_strip_floats, result)


_aten = torch.ops.aten
_EQUALITIES = (_aten.eq.Scalar, _aten.eq.Tensor)
_MASK_SELECTIONS = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
"""Operators that select by a boolean mask; the result or the written part has an entry per true value of the mask."""


def _fill_truth_values(truth: bool) -> Callable[[Any], Any]:
    """Return a function that replaces missing booleans by ``truth`` and returns other values unchanged."""

    def with_truth(leaf: object) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and leaf.dtype == torch.bool:
            return torch.full(leaf.shape, truth)
        return leaf

    return with_truth


def _index_without_values(func: Any, args: Any) -> Any:
    """Index a tensor on ``meta``, or write at the indices; masks of known values select exactly."""
    subject, *values = map(_strip_values, (args[0], *args[2:]))
    indices = [index for choice in args[1] for index in _selected_indices(choice)]
    if values:
        values[0].expand(_aten.index.Tensor(subject, indices).shape)  # raises if torch would raise with values
    return func(subject, indices, *values)


def _selected_indices(choice: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Convert a mask into the selected indices."""
    if choice is None or choice.is_meta or choice.dtype not in (torch.bool, torch.uint8):
        return [_strip_values(choice)]
    return choice.nonzero().to(_META).unbind(1)


def _strip_values(leaf: object) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) else leaf


def _strip_floats(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.to(_META) if is_float else leaf
