"""Detection and handling of fake tensors: parameters with a shape and a dtype, but no values.

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

WEIGHT_ENTRY = "winml_weight_entry"
"""Key in ``meta`` of an initializer in memory: the entry of the model's state dict that it contains."""


def is_fake(tensor: object) -> bool:
    """Return True if an object is a tensor without values."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def fresh_shape_envs(model: nn.Module, *, are_sizes_open: bool) -> Iterator[None]:
    """Replace the shape environment of a model's fake parameters during the block.

    Args:
        model: The model.
        are_sizes_open: True for a new environment with unknown sizes, as ``torch.export`` requires. False for no
            environment: values are refused, and so are tensors of a size that depends on values.
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
    """Return the values of a parameter or buffer, by reference: from ``weights`` if present, else from the tensor.

    Raises:
        InternalError: neither has the values.
    """
    if weights is not None and name in weights:
        return weights[name]
    if isinstance(tensor, FakeTensor):
        raise InternalError(f"the values of {name!r} are neither in the model nor in its weights")
    return tensor_adapters.TorchTensor(tensor.detach(), name=name)
