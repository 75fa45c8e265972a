"""Runs a forward pass on fake tensors, which have a shape and a dtype but no values.

Finds which modules run and the shapes of the outputs, at a cost that does not grow with the weights. A forward that
depends on values cannot run this way; the result says so. Does not know where the module came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from winml.modelkit.errors import first_line
from winml.modelkit.graph.specs import InputTensorSpec, summed_sizes
from winml.modelkit.hierarchy.tracing import CallTrace, module_of_error, record_calls

__all__ = ["WeightlessRun", "run_weightless"]

_TORCH_LOG = "torch._subclasses.fake_tensor"
"""Logger to which torch writes a traceback before it raises the error that is handled here."""

_SHOWN = 160
"""Characters kept of a message of torch."""


@dataclass(frozen=True)
class WeightlessRun:
    """The result of a forward on fake tensors."""

    trace: CallTrace | None
    """The module calls; None where the forward failed."""
    outputs: Mapping[str, torch.Tensor]
    """Fake tensors by output name; shapes and dtypes are those of a real run."""
    problem: str = ""
    """Why the forward failed, and in which module; empty where it succeeded."""


def run_weightless(
    model: nn.Module,
    inputs: Sequence[InputTensorSpec],
    named_outputs: Callable[[Any], Mapping[str, torch.Tensor]],
    sizes: Mapping[str, int] | None = None,
) -> WeightlessRun:
    """Run a module once on fake tensors.

    The module may be on the ``meta`` device or have real weights; weights are neither read nor written. The module is
    not changed.

    Args:
        model: In evaluation mode; called with the inputs by position.
        inputs: The inputs of the forward, in order.
        named_outputs: Returns the tensors by name in what the forward returned.
        sizes: Sizes of the open dimensions, by name.

    Returns:
        The calls and outputs. A forward that fails is not an error: its problem is in the result.
    """
    try:
        with _fake_tensors(), torch.no_grad():
            values = {name: _empty_like(value) for name, value in _named_tensors(model)}
            tensors = [torch.empty(_shape_of(spec, sizes or {}), dtype=getattr(torch, spec.dtype)) for spec in inputs]
            with record_calls(model) as trace:
                returned = torch.func.functional_call(model, values, tuple(tensors))
            outputs = named_outputs(returned)
    except Exception as error:
        path = module_of_error(error, model)
        where = "" if path is None else f" in module {path or '(the root)'}"
        return WeightlessRun(None, {}, f"{type(error).__name__}{where}: {first_line(error)[:_SHOWN]}")
    return WeightlessRun(trace, outputs)


@contextmanager
def _fake_tensors() -> Iterator[None]:
    log = logging.getLogger(_TORCH_LOG)
    was_disabled, log.disabled = log.disabled, True
    try:
        # Tensors that a module keeps outside its buffers are real, and allowed.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_disabled


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor on the CPU, the device of the tensors a forward creates."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _shape_of(spec: InputTensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    sizes = {**summed_sizes(spec.sums, sizes), **sizes}
    return tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)
