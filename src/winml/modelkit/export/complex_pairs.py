"""Computation with complex numbers as pairs of real numbers, for which ONNX has operators.

Rotary tables are made with ``torch.polar`` or ``torch.view_as_complex``, multiplied, and read with
``torch.view_as_real``. During a capture, such a tensor is a pair of real and imaginary part. An operator without a
rule for pairs receives the complex tensor, and the exporter accepts or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from winml.modelkit.ort.shared_settings import attributes_replaced


def complex_as_pairs() -> AbstractContextManager[None]:
    """Replace complex tensors by pairs inside the block; patches torch. Buffers of a module stay unchanged."""
    return attributes_replaced((torch, "polar", _polar_as_pair), (torch, "view_as_complex", _view_as_pair))


_OPERATORS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__rpow__", "__matmul__", "__rmatmul__", "__neg__", "__pos__", "__abs__", "__eq__", "__ne__",
)  # fmt: skip


class _Pair:
    """A complex tensor as its real and imaginary part, of equal shape."""

    def __init__(self, real: torch.Tensor, imag: torch.Tensor) -> None:
        self.real, self.imag = real, imag

    @classmethod
    def __torch_function__(cls, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply_operator(getattr(func, "__name__", ""), func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch.Tensor, name)
        if name.endswith("_") and not name.startswith("_"):
            raise NotImplementedError(f"{name}() writes into complex numbers, which are kept as pairs of real ones")
        if not callable(value):
            return _SHARED[name](self) if name in _SHARED else getattr(self.as_complex(), name)
        return lambda *args, **kwargs: _apply_operator(name, value, (self, *args), kwargs)

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, places: Any) -> _Pair:
        return _Pair(self.real[places], self.imag[places])

    def as_complex(self) -> torch.Tensor:
        """Return the complex tensor."""
        return _AS_COMPLEX(torch.stack([self.real, self.imag], dim=-1))


def _make_operator(name: str) -> Callable[..., Any]:
    """Return a method for an operator of Python, which is looked up in the class alone."""
    function = getattr(torch.Tensor, name)

    def operator(self: _Pair, *operands: object) -> Any:
        return _apply_operator(name, function, (self, *operands), {})

    return operator


for _name in _OPERATORS:
    setattr(_Pair, _name, _make_operator(_name))


def _polar_as_pair(abs: torch.Tensor, angle: torch.Tensor, *, out: Any = None) -> Any:
    if out is not None:
        return _POLAR(abs, angle, out=out)
    return _Pair(abs * torch.cos(angle), abs * torch.sin(angle))


def _view_as_pair(input: torch.Tensor) -> _Pair:
    return _Pair(input[..., 0], input[..., 1])


_AS_COMPLEX, _POLAR = torch.view_as_complex, torch.polar

_SHARED: Mapping[str, Callable[[_Pair], Any]] = {
    "shape": lambda pair: pair.real.shape,
    "device": lambda pair: pair.real.device,
    "ndim": lambda pair: pair.real.ndim,
    "requires_grad": lambda pair: pair.real.requires_grad,
}
"""Attributes that are equal for both parts."""

_LAYOUT = frozenset({
    "unsqueeze", "squeeze", "reshape", "view", "transpose", "permute", "flatten", "unflatten", "expand", "contiguous",
    "clone", "detach", "repeat", "repeat_interleave", "index_select", "narrow", "size", "dim", "numel",
})  # fmt: skip
"""Operators that only move values; the last three return the same for both parts."""


def _apply_operator(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator on pairs; without a rule for pairs, on the complex tensors."""
    subject = args[0] if args else None
    if isinstance(subject, _Pair) and name in _LAYOUT:
        real, imag = (func(part, *args[1:], **kwargs) for part in (subject.real, subject.imag))
        return _Pair(real, imag) if isinstance(real, torch.Tensor) else real
    if isinstance(subject, _Pair) and name == "view_as_real":
        return torch.stack([subject.real, subject.imag], dim=-1)
    if name in _COMPUTED and not kwargs:
        return _COMPUTED[name](*args)
    if isinstance(subject, _Pair) and name == "to" and not kwargs and isinstance(args[1], (str, torch.device)):
        return _Pair(subject.real.to(args[1]), subject.imag.to(args[1]))
    return func(*map(_convert_pairs, args), **{key: _convert_pairs(value) for key, value in kwargs.items()})


def _convert_pairs(value: object) -> Any:
    """Return an argument, or a list of operands, with complex tensors in place of pairs."""
    if isinstance(value, (list, tuple)):
        return [_convert_pairs(operand) for operand in value]
    return value.as_complex() if isinstance(value, _Pair) else value


def _multiply_pairs(left: object, right: object) -> _Pair:
    (real, imag), (other_real, other_imag) = _split_parts(left), _split_parts(right)
    if other_imag is None:
        return _Pair(real * other_real, imag * other_real)
    if imag is None:
        return _Pair(real * other_real, real * other_imag)
    return _Pair(real * other_real - imag * other_imag, real * other_imag + imag * other_real)


def _add_pairs(left: object, right: object) -> _Pair:
    (real, imag), (other_real, other_imag) = _split_parts(left), _split_parts(right)
    sums = [part for part in (imag, other_imag) if part is not None]
    total = real + other_real
    # A real summand may have more rows than the pair.
    return _Pair(total, sum(sums[1:], sums[0]) + torch.zeros_like(total))


def _divide_pairs(left: object, right: object) -> Any:
    real, imag = _split_parts(right)
    if imag is not None:
        return torch.div(_convert_pairs(left), _convert_pairs(right))
    return _multiply_pairs(left, 1 / real)


_COMPUTED: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _multiply_pairs),
    **dict.fromkeys(("add", "__add__", "__radd__"), _add_pairs),
    **dict.fromkeys(("sub", "subtract", "__sub__"), lambda left, right: _add_pairs(left, -right)),
    **dict.fromkeys(("rsub", "__rsub__"), lambda right, left: _add_pairs(left, -right)),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divide_pairs),
    **dict.fromkeys(("neg", "negative", "__neg__"), lambda value: _Pair(-value.real, -value.imag)),
}
"""Operators that are computed on pairs."""


def _split_parts(value: object) -> tuple[Any, Any]:
    """Return real and imaginary part; the imaginary part of a real number is `None`."""
    if isinstance(value, _Pair):
        return value.real, value.imag
    if isinstance(value, torch.Tensor) and value.is_complex():
        pair = torch.view_as_real(value)
        return pair[..., 0], pair[..., 1]
    return (value.real, value.imag) if isinstance(value, complex) else (value, None)
