"""Builds a model that can be traced while its weights stay in their files.

transformers loads the checkpoint as usual, with tensors that know only their place in a file
(``checkpoints/deferred_tensors.py``). So the same code as with values decides names, merged experts, casts, ties and
what is missing. Afterwards the parameters are fake tensors, each with a reference into the files. A model without
such files is loaded with its values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winml.modelkit.load.checkpoints.deferred_tensors import DeferredTensor, NotDeferrableError, deferred_entries
from winml.modelkit.load.checkpoints.weight_files import stored_entries
from winml.modelkit.load.checkpoints.weights import load_checkpoint
from winml.modelkit.load.library_access import local_libraries
from winml.modelkit.load.model import dtype_notes, load_resolved, model_info
from winml.modelkit.load.parts import LoadedModel
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.load.resolution import ResolvedModel, with_plain_outputs

__all__ = ["load_weightless"]

Progress = Callable[[str], None]


def load_weightless(resolved: ResolvedModel, request: ModelRequest, progress: Progress | None = None) -> LoadedModel:
    """Build a resolved model whose parameters hold no values, and say where these lie.

    A factory, pickled weights and random ones have none to refer to: those are loaded for real, as are checkpoints that
    transformers reads in a way that needs the values; a note says so.

    Args:
        resolved: What was decided about the model.
        request: What the user asked for.
        progress: Told in words which step is being done.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
    """
    weights = resolved.source.weights
    if resolved.checkpoint is None or request.random_weights or weights is None or weights.format != "safetensors":
        return load_resolved(resolved, request, progress)
    try:
        with local_libraries():
            model, weight_notes = _load_weights(resolved, request, deferred=True)
            stored = _stored_entries(model)
            _take_values_out(model)
    except NotDeferrableError as reason:
        loaded = load_resolved(resolved, request, progress)
        note = f"the weights are held in memory: transformers needs their values to load them ({reason})"
        return dataclasses.replace(loaded, model_notes=(*loaded.model_notes, note))

    def with_weights() -> nn.Module:
        with local_libraries():
            return _load_weights(resolved, request, deferred=False)[0]

    def with_references() -> nn.Module:
        with local_libraries():
            referring = _load_weights(resolved, request, deferred=True)[0]
        _read_buffers(referring)
        return referring

    parts = resolved.parts_with(model, stored=stored, with_weights=with_weights, with_references=with_references)
    notes = (*weight_notes, *dtype_notes(model, request))
    info = model_info(resolved, request)
    return LoadedModel.of_parts(info, parts, resolved.checkpoint.notes, notes, wanted=request.submodel)


def _load_weights(
    resolved: ResolvedModel, request: ModelRequest, *, deferred: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """Load the checkpoint, with values or with tensors that refer to them; return also what is to be said of it."""
    weights, checkpoint = resolved.source.weights, resolved.checkpoint
    # A checkpoint has both.
    assert weights is not None
    assert checkpoint is not None
    model, notes = load_checkpoint(
        resolved.model_class,
        checkpoint.config,
        weights,
        dtype=resolved.dtype,
        trust_remote_code=request.trust_remote_code,
        tensors=deferred_entries(stored_entries(weights.files)) if deferred else None,
    )
    return with_plain_outputs(model), notes


def _stored_entries(model: nn.Module) -> dict[str, ir.TensorProtocol]:
    """Return every entry of the state dict; those that share their values share their tensor."""
    tensors: dict[int, ir.TensorProtocol] = {}
    stored = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in tensors:
            is_deferred = isinstance(value, DeferredTensor)
            tensors[id(value)] = value.by_reference(name) if is_deferred else _held_tensor(value, name)
        stored[name] = tensors[id(value)]
    return stored


def _held_tensor(value: torch.Tensor, name: str) -> ir.TensorProtocol:
    return tensor_adapters.TorchTensor(value.detach(), name=name)


def _take_values_out(model: nn.Module) -> None:
    """Make every parameter a fake tensor, and every buffer a real one; in place. What was shared is shared still."""
    # As torch.export makes its own, which it goes on with then; its sizes may be left open.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]), export=True)
    fakes: dict[int, nn.Parameter] = {}
    for module, name, parameter in _parameter_places(model):
        if id(parameter) not in fakes:
            with mode:
                fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
            fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        module._parameters[name] = fakes[id(parameter)]
    _read_buffers(model)


def _read_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.realized()


def _parameter_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every place a parameter is held at, shared ones more than once."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter
