"""Knows the parameters that have a shape and a dtype and no values: fake tensors.

NOTE: fake tensors are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_capturing.py`` fails when they move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winml.modelkit.errors import InternalError


def is_fake(tensor: object) -> bool:
    """Say whether this is a tensor without values."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def fresh_shape_envs(model: nn.Module, *, are_sizes_open: bool) -> Iterator[None]:
    """Give the fake parameters of a model, if any, another shape environment for the time of the block.

    Args:
        model: The model.
        are_sizes_open: Whether it is a new one, in which sizes may be unknown, as ``torch.export`` needs it. Otherwise
            there is none: what has as many elements as some values say is refused, as are the values themselves.
    """
    modes = {parameter.fake_mode for parameter in model.parameters() if isinstance(parameter, FakeTensor)}
    saved_modes = [(mode, mode.shape_env, mode.static_shapes) for mode in modes]
    for mode in modes:
        mode.shape_env = ShapeEnv(tracked_fakes=[]) if are_sizes_open else None
        mode.static_shapes = not are_sizes_open
    try:
        yield
    finally:
        for mode, shape_env, static_shapes in saved_modes:
            mode.shape_env, mode.static_shapes = shape_env, static_shapes


def weight_by_reference(
    name: str, tensor: torch.Tensor, weights: Mapping[str, ir.TensorProtocol] | None
) -> ir.TensorProtocol:
    """Return the values of a parameter or buffer, by reference: from ``weights`` where they are, else the tensor's own.

    Raises:
        InternalError: they are in neither.
    """
    if weights is not None and name in weights:
        return weights[name]
    if isinstance(tensor, FakeTensor):
        raise InternalError(f"the values of {name!r} are neither in the model nor in its weights")
    return tensor_adapters.TorchTensor(tensor.detach(), name=name)
