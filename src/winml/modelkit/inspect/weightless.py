"""What would a forward pass do, without a single weight?

Runs a module on tensors that have a shape and a dtype but no values, so that which modules run, and what comes out, is
known at a cost that does not grow with the weights. What depends on a value cannot be known this way, and is said to be
so. Does not know where the module came from.
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
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.hierarchy.tracing import CallTrace, module_of_error, record_calls

__all__ = ["WeightlessRun", "run_weightless"]

_TORCH_LOG = "torch._subclasses.fake_tensor"
"""Where torch writes a traceback before it raises the error that is handled here."""

_SHOWN = 160
"""Characters kept of a foreign message."""


@dataclass(frozen=True)
class WeightlessRun:
    """What a forward on weightless tensors showed."""

    trace: CallTrace | None
    """Which modules ran; None where the forward did not come to its end."""
    outputs: Mapping[str, torch.Tensor]
    """By name; shapes and dtypes are real, values there are none."""
    problem: str = ""
    """Why it did not come to its end, and in which module; empty where it did."""


def run_weightless(
    model: nn.Module,
    inputs: Sequence[InputTensorSpec],
    named_outputs: Callable[[Any], Mapping[str, torch.Tensor]],
    sizes: Mapping[str, int] | None = None,
) -> WeightlessRun:
    """Run a module once on tensors without values.

    The module may have been built on the ``meta`` device or hold real weights; neither is read or written. Its own
    parameters are in place again afterwards.

    Args:
        model: In evaluation mode; called with the inputs by position.
        inputs: What it is given, in this order.
        named_outputs: Names the tensors in what it returned.
        sizes: Sizes of the dimensions that are left open, by name.

    Returns:
        What happened. A forward that cannot run like this is no error: its problem is in the result.
    """
    try:
        with _fake_tensors(), torch.no_grad():
            values = {name: _like(value) for name, value in _tensors(model)}
            tensors = [torch.empty(_numbers(spec, sizes or {}), dtype=getattr(torch, spec.dtype)) for spec in inputs]
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
        # Tensors a module keeps outside of its buffers are real; they are taken as they are.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_disabled


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values; as if on the CPU, where those that a forward makes are too."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _numbers(spec: InputTensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)
