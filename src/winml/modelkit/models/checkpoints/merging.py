"""Application of LoRA adapters to a PyTorch model: merging into its weights, or a list of branches for the graph.

The formulas are peft's published ones: W + scaling · B · A, transposed for tables and for transformers' ``Conv1D``;
with DoRA, each row is scaled to its magnitude afterwards. Sums are computed in float32 and cast once. Deferred weights
stay unread: operations are recorded (``deferred_tensors.py``) and computed one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from winml.modelkit.errors import opt
from winml.modelkit.models.checkpoints.adapters import Adapter, LoraPair
from winml.modelkit.models.checkpoints.deferred_tensors import DeferredTensor, deferred_entries
from winml.modelkit.onnx.coded_weights import CodedTensor
from winml.modelkit.onnx.lora_branches import LoraBranch, lora_names
from winml.modelkit.options import nearest

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_adapters(model: nn.Module, adapters: Sequence[Adapter]) -> None:
    """Refuse adapters that do not fit a model; its parameters need no values.

    Raises:
        CheckpointError: a module is missing, of a class without LoRA support, or of other sizes; or a matrix has NaN or
            infinite values.
    """
    for adapter in adapters:
        from winml.modelkit.models.checkpoints.quantized.stored import stored_values  # only with an adapter

        for path, pair in adapter.pairs.items():
            _check_pair(adapter, model, path, pair)
        for name, tensor in adapter.replaced.items():
            _check_replacement(adapter, model, name, tensor)
        for pair in adapter.pairs.values():
            for name in filter(None, (pair.a, pair.b, pair.bias, pair.magnitude)):
                if not np.isfinite(stored_values(adapter.tensors[name], name).read().astype(np.float32)).all():
                    raise adapter.error(f"tensor {name!r} contains NaN or infinite values", "Train or save it again.")
        if adapter.name is not None:
            _check_swappable(adapter, model)


def merge_adapters(model: nn.Module, adapters: Sequence[Adapter], *, retains_codes: bool = False) -> list[LoraBranch]:
    """Merge the adapters without a name into the weights of a model, in place.

    A parameter shared by several modules becomes separate for a module changed by an adapter.

    Args:
        model: The model, with values or with tensors that refer to files.
        adapters: All adapters of the request, in the order of merging; they fit the model.
        retains_codes: Keep quantized weights unchanged.

    Returns:
        A branch for each unchanged quantized weight.

    Raises:
        CheckpointError: a weight that must stay quantized cannot have a branch.
    """
    branches = []
    for adapter in adapters:
        if adapter.name is not None:
            continue
        tensors = deferred_entries(adapter.tensors)
        for name, tensor in adapter.replaced.items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(_module_path(model, path) or "")
            _set_tensor(module, attribute, tensors[tensor].to(getattr(module, attribute).dtype))
        for path, pair in adapter.pairs.items():
            module, attribute = _find_weight(model, path)
            weight: Any = getattr(module, attribute)
            if retains_codes and isinstance(weight, DeferredTensor) and isinstance(weight.origin, CodedTensor):
                branches.append(_make_branch(adapter, module, _module_path(model, path) or "", pair, tensors))
            else:
                _set_tensor(module, attribute, _merge_weight(module, weight, pair, tensors))
            if pair.bias is not None:
                bias: Any = module.bias
                _set_tensor(
                    module,
                    "bias",
                    (_to_float(bias) + _load_value(tensors[pair.bias], bias) * pair.scaling).to(bias.dtype),
                )
    return branches


@contextmanager
def adapter_merged(model: nn.Module, adapter: Adapter) -> Iterator[None]:
    """Merge a swappable adapter into the weights of a model during the block.

    Args:
        model: The model, with values.
        adapter: The adapter.

    Raises:
        CheckpointError: the adapter does not fit a weight.
    """
    targets = [_find_weight(model, path) for path in adapter.pairs]
    old_weights = [(module, attribute, getattr(module, attribute)) for module, attribute in targets]
    try:
        merge_adapters(model, [replace(adapter, requested=replace(adapter.requested, name=None))])
        yield
    finally:
        for module, attribute, weight in old_weights:
            setattr(module, attribute, weight)


def swappable_branches(model: nn.Module, adapters: Sequence[Adapter]) -> Iterator[LoraBranch]:
    """Yield a branch without weights for each module that a named adapter changes."""
    paths = {
        module_path: pair.is_embedding
        for adapter in adapters
        if adapter.name is not None
        for path, pair in adapter.pairs.items()
        if (module_path := _module_path(model, path)) is not None
    }
    for path, module in model.named_modules():  # in the order of the model, not of the files
        if path in paths:
            yield LoraBranch(path, *_count_channels(module), is_table=paths[path])


def _make_branch(
    adapter: Adapter, module: nn.Module, path: str, pair: LoraPair, tensors: dict[str, DeferredTensor]
) -> LoraBranch:
    """Return a branch beside a quantized weight; its matrices are read when the graph is written.

    Args:
        adapter: The adapter, for messages.
        module: The module with the weight.
        path: Path of the module.
        pair: Names of the adapter's matrices.
        tensors: Name → tensor of the adapter.

    Raises:
        CheckpointError: the adapter is a DoRA, which no branch can express.
    """
    if pair.magnitude is not None:
        raise adapter.error(
            f"the weight of {path} is quantized, and a DoRA scales the rows of the weight",
            "Merge it into the model that was quantized, or use an adapter without DoRA.",
        )
    # In the layout of a branch's multiplications, with the scaling in the second matrix.
    down: Any = tensors[pair.a].to(torch.float32).t()
    up: Any = tensors[pair.b].to(torch.float32).t() * pair.scaling
    a, b = (matrix.by_reference(name) for matrix, name in zip((down, up), lora_names(path), strict=True))
    return LoraBranch(path, *_count_channels(module), is_table=pair.is_embedding, a=a, b=b)


def _merge_weight(
    module: nn.Module, weight: torch.Tensor, pair: LoraPair, tensors: dict[str, DeferredTensor]
) -> torch.Tensor:
    """Return a weight with an adapter merged, in the element type of the weight.

    Args:
        module: The module with the weight.
        weight: The weight; unchanged.
        pair: Names of the adapter's matrices.
        tensors: Name → tensor of the adapter.
    """
    a, b = _to_float(_load_value(tensors[pair.a], weight)), _to_float(_load_value(tensors[pair.b], weight))
    delta = b.reshape(-1, pair.rank) @ a.reshape(pair.rank, -1)
    if pair.is_embedding or _is_transposed(module):
        delta = delta.t()
    merged = _to_float(weight) + delta.reshape(weight.shape) * pair.scaling
    if pair.magnitude is not None:
        rows = 0 if _is_transposed(module) else 1
        length = torch.linalg.vector_norm(merged, dim=rows, keepdim=True)
        magnitude = _to_float(_load_value(tensors[pair.magnitude], weight)).reshape(length.shape)
        merged = merged * (magnitude / length)
    return merged.to(weight.dtype)


def _load_value(tensor: DeferredTensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the adapter: unread if the weight is unread, else with values."""
    return tensor if isinstance(like, DeferredTensor) else tensor.realized()


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32)


def _set_tensor(module: nn.Module, attribute: str, values: torch.Tensor) -> None:
    """Replace a tensor of a module; a parameter stays a parameter, and an ordinary tensor gets values."""
    old_value = getattr(module, attribute)
    if isinstance(values, DeferredTensor) and not isinstance(old_value, DeferredTensor):
        values = values.realized()
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    setattr(module, attribute, nn.Parameter(values, requires_grad=False) if is_parameter else values)


def _module_path(model: nn.Module, path: str) -> str | None:
    """Return the path of an adapter's module in the model; the adapter may be trained with or without the head."""
    prefix = getattr(model, "base_model_prefix", "") or ""
    candidates = [path]
    if prefix:
        candidates += [path.removeprefix(f"{prefix}.")] if path.startswith(f"{prefix}.") else [f"{prefix}.{path}"]
    modules = dict(model.named_modules(remove_duplicate=False))
    return next((name for name in candidates if name in modules), None)


def _find_weight(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module changed by an adapter, and the name of its weight."""
    module = model.get_submodule(_module_path(model, path) or "")
    return module, "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"


def _is_transposed(module: nn.Module) -> bool:
    """Return True if the weight of a module is input × output channels, as in transformers' ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _count_channels(module: nn.Module) -> tuple[int, int]:
    """Return the input and output channels of a module, or the rows and columns of a table."""
    weight: Any = module.in_proj_weight if isinstance(module, nn.MultiheadAttention) else module.weight
    rows, columns = weight.shape[0], weight.shape[1]
    is_direct = isinstance(module, nn.Embedding) or _is_transposed(module)
    return (rows, columns) if is_direct else (columns, rows)


def _check_pair(adapter: Adapter, model: nn.Module, path: str, pair: LoraPair) -> None:
    """Refuse matrices that do not fit the module of their path.

    Raises:
        CheckpointError: the module is missing, has no LoRA support, or other sizes.
    """
    target = _module_path(model, path)
    if target is None:
        base = f", which names {adapter.base_name} as its base model," * bool(adapter.base_name)
        guess = nearest(path, [name for name, _ in model.named_modules()])
        raise adapter.error(
            f"{type(model).__name__} has no module {path!r}{f'; the nearest is {guess!r}' if guess else ''}",
            f"The adapter{base} was trained on a model with this module: pass the model as it was then, or an adapter "
            "of this one.",
        )
    module, attribute = _find_weight(model, path)
    kinds = (nn.Linear, nn.Embedding, nn.MultiheadAttention, *_CONVOLUTIONS)
    if not isinstance(module, kinds) and not _is_transposed(module):
        raise adapter.error(
            f"{target} is a {type(module).__name__}, expected Linear, Embedding, Conv1D, Conv2d or MultiheadAttention",
            "Merge the adapter with peft, and pass the result with -m.",
        )
    if getattr(module, "groups", 1) != 1:
        raise adapter.error(
            f"{target} is a {type(module).__name__} of {module.groups} groups, expected 1",
            "Remove the module from the adapter.",
        )
    weight = getattr(module, attribute)
    a, b = adapter.tensors[pair.a].shape, adapter.tensors[pair.b].shape
    expected = _expected_shapes(module, weight, pair.rank)
    if (a, b) != expected:
        raise adapter.error(
            f"{pair.a} and {pair.b} have shapes {list(a)} and {list(b)}, expected {list(expected[0])} and "
            f"{list(expected[1])} by {target}",
            "The adapter was trained on a model of different sizes.",
        )
    if pair.bias is not None and getattr(module, "bias", None) is None:
        raise adapter.error(f"{target} has no bias that lora_bias could be added to", "Train it without lora_bias.")
    if pair.magnitude is not None and not (isinstance(module, nn.Linear) or _is_transposed(module)):
        raise adapter.error(
            f"{target} is a {type(module).__name__} with DoRA, which is applied to Linear and Conv1D",
            "Merge the adapter with peft, and pass the result with -m.",
        )


def _expected_shapes(module: nn.Module, weight: torch.Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the two matrices of a module."""
    if isinstance(module, _CONVOLUTIONS):
        output, inputs, *kernel = weight.shape
        return (rank, inputs, *kernel), (output, rank, *(1,) * len(kernel))
    inputs, output = _count_channels(module)
    return (rank, inputs), (output, rank)


def _check_replacement(adapter: Adapter, model: nn.Module, name: str, tensor: str) -> None:
    """Refuse a saved parameter that the model does not have, or has in another shape.

    Raises:
        CheckpointError: names the tensor and the parameter.
    """
    path, _, attribute = name.rpartition(".")
    module_path = _module_path(model, path)
    parameter = None if module_path is None else getattr(model.get_submodule(module_path), attribute, None)
    if not isinstance(parameter, torch.Tensor):
        raise adapter.error(
            f"tensor {tensor!r} is not a LoRA, and {type(model).__name__} has no parameter {name!r} to replace",
            f"The adapter was trained on another model, or for another {opt.task}.",
        )
    shape = adapter.tensors[tensor].shape
    if tuple(parameter.shape) != shape:
        raise adapter.error(
            f"tensor {tensor!r} has shape {list(shape)}, expected {list(parameter.shape)} by {name}",
            "The adapter was trained with another vocabulary or number of labels; change the base model accordingly.",
        )


def _check_swappable(adapter: Adapter, model: nn.Module) -> None:
    """Refuse a swappable adapter with a change that only merging can apply.

    Raises:
        CheckpointError: names the module or the parameter.
    """
    remedy = f"Merge it: {opt.adapter} {adapter.requested.folder}."
    if adapter.replaced:
        name = next(iter(adapter.replaced))
        raise adapter.error(f"replaces the parameter {name}, which cannot be switched at run time", remedy)
    for path, pair in adapter.pairs.items():
        module, _ = _find_weight(model, path)
        if pair.bias is not None or pair.magnitude is not None:
            kind = "DoRA" if pair.magnitude is not None else "lora_bias"
            raise adapter.error(f"{path} has {kind}, which cannot be switched at run time", remedy)
        if not isinstance(module, (nn.Linear, nn.Embedding)) and not _is_transposed(module):
            raise adapter.error(f"{path} is a {type(module).__name__}, which cannot be switched at run time", remedy)
