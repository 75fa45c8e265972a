"""Converts tensors between numpy and torch, by reference where possible, ``bfloat16`` included, and draws them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from winml.modelkit.arrays import Array
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.ort.feeds import make_feeds


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor with the array's values, on the CPU."""
    # Not ascontiguousarray, which gives a scalar a dimension.
    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return an array with the tensor's values."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def draw_tensors(part: ModelPart, seed: int) -> dict[str, torch.Tensor]:
    """Draw a tensor for each input of a part, in the sizes that it is traced with."""
    feeds = make_feeds(part.inputs, seed, sizes=part.trace_sizes)
    return {name: to_torch(values) for name, values in feeds.items()}
