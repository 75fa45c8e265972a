"""Modules and operators of a forward pass, observed without sharing code with the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FAMILIES = {
    "linear": {"MatMul": 1},
    "matmul": {"MatMul": 1},
    "__matmul__": {"MatMul": 1},
    "bmm": {"MatMul": 1},
    "addmm": {"MatMul": 1},
    "scaled_dot_product_attention": {"MatMul": 2, "Softmax": 1},
    "softmax": {"Softmax": 1},
    "layer_norm": {"LayerNormalization": 1},
    "conv1d": {"Conv": 1},
    "conv2d": {"Conv": 1},
    "_conv_forward": {},
    "conv_transpose2d": {"ConvTranspose": 1},
    "batch_norm": {"BatchNormalization": 1},
    "gru": {"GRU": 1},
    "lstm": {"LSTM": 1},
    "tanh": {"Tanh": 1},
    "relu": {"Relu": 1},
    "sigmoid": {"Sigmoid": 1},
}
"""torch function → the ONNX operators one call of it becomes."""

OPERATOR_FAMILY = {"Gemm": "MatMul"}
"""ONNX operators counted as another operator: the exporter chooses between them by rank."""


class ForwardOracle(TorchFunctionMode):
    """Records the operators that run and the modules around them; its own hooks keep the module stack."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[tuple[tuple[str, ...], str]] = []
        """``(module stack, operator)`` in execution order."""
        self.called: list[str] = []
        self.stacks: dict[str, tuple[str, ...]] = {}
        self._stack: list[str] = []
        self._is_inside = False
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(path)))
            self._handles.append(module.register_forward_hook(self._leave))

    def _enter(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._stack.append(path)
            self.stacks.setdefault(path, tuple(self._stack))
            if path not in self.called:
                self.called.append(path)

        return hook

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the outermost call of a family; nested calls are part of it."""
        operators = FAMILIES.get(getattr(func, "__name__", ""))
        if operators and not self._is_inside:
            for operator, times in operators.items():
                self.events += [(tuple(self._stack), operator)] * times
            self._is_inside = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._is_inside = False
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def observe(model: nn.Module, *tensors: Any, **keywords: Any) -> ForwardOracle:
    """Run a model once under the oracle."""
    oracle = ForwardOracle(model)
    try:
        with torch.no_grad(), oracle:
            model(*tensors, **keywords)
    finally:
        oracle.close()
    return oracle


def hierarchy_module(stack: Sequence[str], model: nn.Module, first_stacks: Mapping[str, Sequence[str]]) -> str:
    """Return the innermost module on a stack that is in the default hierarchy of a model.

    Args:
        stack: Paths, outermost first.
        model: The root.
        first_stacks: Module path → stack of its first call, itself included; the first call decides.
    """
    has_named_parts = any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)
    for path in reversed(stack[1:]):
        between = first_stacks[path][1:-1]
        # A module of torch.nn counts only if the root alone has another class, and no classes for its parts.
        is_shown = not has_named_parts and all(_is_plain(model, outer) for outer in between)
        if not _is_plain(model, path) or is_shown:
            return path
    return ""


def _is_plain(model: nn.Module, path: str) -> bool:
    return type(model.get_submodule(path)).__module__.startswith("torch.nn.")
