"""Run of a model part in PyTorch, prepared as for the export.

A model without weight values computes shapes and dtypes only: enough to record the executed modules and the outputs.
For values, the same model is loaded with its weights. Independent of graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import ExportError, MeasureError, first_line, opt
from winml.modelkit.models.inputs.shape_run import REFUSALS, forward_on_meta
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.preparation import FlatForward, prepared_for_export
from winml.modelkit.models.state_restoration import AttributeState, quiet_torch, unchanged_attributes
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.onnx.files.wire_format import INLINE_LIMIT_BYTES
from winml.modelkit.tags.torch_modules import module_of_error
from winml.modelkit.words import shape_words, size_words


@dataclass(eq=False)
class PreparedPart:
    """A part whose model is ready to be traced: its inputs and outputs are tensors only."""

    part: ModelPart
    forward: FlatForward
    """Replacement of the forward of ``part.model``."""
    as_loaded: AttributeState | None = None
    """State of the model before the first run, if that run replaced modules, such as for short texts; references are
    computed from this state."""

    @property
    def model(self) -> nn.Module:
        """The whole model; calling it runs the part."""
        return self.part.model


@contextmanager
def prepared_part(
    part: ModelPart, names: Sequence[str] | None = None, *, plain_attention: bool = True
) -> Iterator[PreparedPart]:
    """Prepare the model of a part until the block ends; in place, undone at the end.

    Args:
        part: The part.
        names: Inputs of the call, in order; ``None``: the inputs of the part.
        plain_attention: Compute attention as exported; else with PyTorch's fast kernels.

    Raises:
        ExportError: a module is scripted, which no exporter supports.
    """
    all_names = [spec.name for spec in part.inputs]
    names = all_names if names is None else names
    with prepared_for_export(
        part.model,
        names,
        part.forward_kwargs,
        path=part.path,
        entry=part.entry,
        arguments=part.arguments if list(names) == all_names else None,
        plain_attention=plain_attention,
    ) as forward:
        yield PreparedPart(part, forward)


def run_on_arrays(prepared: PreparedPart, feeds: Arrays, shown: str, hint: str) -> Arrays:
    """Run the prepared part without gradients, and return its outputs by name.

    Args:
        prepared: The part.
        feeds: Arrays by name, in the order of its inputs.
        shown: Name of the model in messages.
        hint: Hint of the error.

    Raises:
        MeasureError: the module refuses the inputs.
    """
    try:
        with torch.inference_mode():
            outputs = prepared.model(*map(to_torch, feeds.values()))
    except Exception as error:
        shapes = ", ".join(f"{name} {shape_words(str(array.dtype), array.shape)}" for name, array in feeds.items())
        raise MeasureError(
            f"{shown} cannot run on {shapes}: {type(error).__name__}: {first_line(error)}", hint=hint
        ) from error
    return _name_outputs(prepared, outputs)


def run_reference(prepared: PreparedPart, tensors: Mapping[str, torch.Tensor], *, keeps_state: bool = False) -> Arrays:
    """Run the prepared part and return its outputs by name; without weight values, arrays without memory.

    Args:
        prepared: The part.
        tensors: Inputs by name.
        keeps_state: Run the modules in their current state, and keep attributes set by the forward; else the model runs
            as loaded, and is restored afterwards.

    Raises:
        ExportError: the module refuses the inputs; names the module in which it failed.
    """
    part, model = prepared.part, prepared.model
    try:
        # A forward may write into its inputs, which are used again.
        with (
            nullcontext() if keeps_state else _restore_loaded(prepared),
            unchanged_attributes(model) as state,
            _as_exported(model),
            conditions_as_python(),
        ):
            # Restoring the state must not change the outputs.
            outputs = state.separated(model(*copies_for(model, tensors).values()))
            if keeps_state:
                state.keep()
    except ExportError:
        raise
    except Exception as error:
        path = module_of_error(error, model)
        shapes = ", ".join(f"{spec.name} {shape_words(spec.dtype, tensors[spec.name].shape)}" for spec in part.inputs)
        raise ExportError(
            f"the model failed on {shapes}, in module {path or '(the root)'}: "
            f"{type(error).__name__}: {first_line(error)}",
            # Most loading notes describe the selection of inputs.
            hint=" ".join(
                [
                    f"Set valid shapes with {opt.shape_config}, or all inputs with {opt.input_specs}.",
                    *(f"Note: {note.removesuffix('.')}." for note in part.notes),
                ]
            ),
            module=path,
        ) from error
    return _name_outputs(prepared, outputs)


def run_for_shapes(prepared: PreparedPart, tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Run the prepared part for shapes and dtypes; with values if its parameters have values.

    On the ``meta`` device a model without values runs in a third of the time. Some models do not run there: CPU tensors
    created by the forward cannot be combined with ``meta`` tensors.

    Raises:
        ExportError: the module refuses the inputs; names the module in which it failed.
    """
    if _fake_mode(prepared.model) is None:
        return run_reference(prepared, tensors)

    def without_storage(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    with forward_on_meta():
        outputs = _run_with(prepared, without_storage, (tensor.to("meta") for tensor in tensors.values()))
    return run_reference(prepared, tensors) if outputs is None else outputs


def run_in_float64(prepared: PreparedPart, tensors: Mapping[str, torch.Tensor]) -> Arrays | None:
    """Run the prepared part with weights and inputs in float64; `None` if its forward does not support float64.

    Args:
        prepared: The part, with weights.
        tensors: Inputs by name.
    """
    return _run_with(prepared, _to_double, map(_to_double, copies_for(prepared.model, tensors).values()))


def _run_with(
    prepared: PreparedPart, change: Callable[[torch.Tensor], torch.Tensor], inputs: Iterable[torch.Tensor]
) -> Arrays | None:
    """Run the prepared part with changed parameters and buffers; `None` if its forward refuses them."""
    model = prepared.model
    try:
        with _restore_loaded(prepared), unchanged_attributes(model), _as_exported(model), conditions_as_python():
            state = {name: change(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
            outputs = functional_call(model, state, tuple(inputs))
    except REFUSALS:
        return None
    return _name_outputs(prepared, outputs)


@contextmanager
def _restore_loaded(prepared: PreparedPart) -> Iterator[None]:
    """Restore the model as loaded until the block ends; its log was shown in the first run."""
    if prepared.as_loaded is None:
        yield
        return
    with quiet_torch(), prepared.as_loaded.restored():
        yield


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def copies_for(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each input, without values if the model's parameters have none."""
    mode = _fake_mode(model)
    if mode is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    return {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in tensors.items()}


def dtypes_inside(model: nn.Module, outputs: Arrays) -> tuple[str, ...]:
    """Dtypes of a model's parameters and outputs, in which it computes."""
    parameters = (str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters())
    return tuple(dict.fromkeys([*parameters, *(str(value.dtype) for value in outputs.values())]))


@contextmanager
def with_values(prepared: PreparedPart) -> Iterator[PreparedPart]:
    """Yield the prepared part unchanged if its parameters hold values, or else the same part with loaded weights."""
    part = prepared.part
    if part.stored is None or part.with_weights is None:
        yield prepared
        return
    weighted_part = replace(part, model=part.with_weights(), stored=None, with_weights=None)
    with prepared_part(weighted_part) as weighted:
        weighted.forward.rename_outputs(prepared.forward.output_names)
        yield weighted


@contextmanager
def with_drawn_weights(prepared: PreparedPart, seed: int) -> Iterator[PreparedPart]:
    """Yield the prepared part with random weights, with which the outputs depend on the inputs.

    Matrices and kernels preserve the scale of their inputs, scales are near one, biases near zero. Weights of a model
    with values are restored at the end.

    Args:
        prepared: The part.
        seed: Seed of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with with_values(prepared) as weighted, torch.no_grad():
        originals = {
            name: value.clone()
            for name, value in weighted.model.named_parameters()
            if weighted is prepared and value.is_floating_point()
        }
        try:
            for name, value in weighted.model.named_parameters():
                if value.is_floating_point():
                    value.copy_(_random_weight(name, tuple(value.shape), generator))
            # The loaded state contains the values of small weights.
            yield replace(weighted, as_loaded=None)
        finally:
            for name, value in weighted.model.named_parameters():
                if name in originals:
                    value.copy_(originals[name])


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Create a weight that preserves the scale of its inputs: matrices by width, scales near 1, biases near 0."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / math.sqrt(max(math.prod(shape[1:]), 1))
    return 0.1 * noise + (0 if name.endswith("bias") else 1)


@contextmanager
def _as_exported(model: nn.Module) -> Iterator[None]:
    """Run a model without values on the path it takes under torch.export; its log is discarded.

    Forwards check whether they are exported, and skip kernels that require values.
    """
    if _fake_mode(model) is None:
        yield
        return
    # Slow to import, so imported only on use.
    from torch._export.utils import _compiling_state_context

    with quiet_torch(), _compiling_state_context():
        yield


@contextmanager
def conditions_as_python() -> Iterator[None]:
    """Run ``torch.cond`` and related functions uncompiled until the block ends.

    Outside an export torch compiles their branches, which fails for modules with hooks.
    """
    compile_function = torch.compile
    torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compile_function


def _uncompiled(model: object = None, **_options: object) -> Any:
    """Return the argument of ``torch.compile`` unchanged, or such a decorator if only options are passed."""
    return model if model is not None else lambda function: function


def _name_outputs(prepared: PreparedPart, outputs: Iterable[torch.Tensor]) -> Arrays:
    return {name: _output_array(value) for name, value in zip(prepared.forward.output_names, outputs, strict=True)}


def _output_array(tensor: torch.Tensor) -> Array:
    """Convert a tensor to an array; zeros without memory for a tensor without values."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        return to_numpy(tensor)
    dtype = to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))


def _fake_mode(model: nn.Module) -> FakeTensorMode | None:
    """Return the fake mode of a model without weight values; ``None`` for a model with values."""
    return next((tensor.fake_mode for tensor in model.parameters() if isinstance(tensor, FakeTensor)), None)


_INSIDE_FACTOR = 2.25
"""Memory relative to weights inside the file. Measured on 1.92 GB: ONNX Runtime holds the file and the weights in
kernel layout, 4.2 GB in total. PyTorch's copy is freed by then."""
_OUTSIDE_FACTOR = 1.25
"""Memory relative to weights in an external file. Measured on 4.40 GB, which is mapped: 5.4 GB in total, in PyTorch and
in ONNX Runtime."""


def verification_bytes(model: nn.Module) -> int:
    """Estimate the memory for the comparison of a model with its file, with all weights loaded.

    PyTorch and ONNX Runtime hold the weights one after the other, bfloat16 as float32.
    """
    weights = sum(
        parameter.numel() * (4 if parameter.dtype == torch.bfloat16 else parameter.element_size())
        for parameter in model.parameters()
    )
    return int(weights * (_INSIDE_FACTOR if weights < INLINE_LIMIT_BYTES else _OUTSIDE_FACTOR))


def refuse_verification_beyond_memory(model: nn.Module, available: int | None) -> None:
    """Refuse a comparison with PyTorch if the weights exceed memory.

    Args:
        model: The model; its parameters need no values.
        available: Available bytes of memory; ``None`` if unknown.

    Raises:
        ExportError: the weights do not fit.
    """
    needed = verification_bytes(model)
    if available is not None and needed > available:
        raise ExportError(
            f"comparing with PyTorch takes about {size_words(needed)} of memory for the weights, in PyTorch and then "
            f"in ONNX Runtime, and {size_words(available)} are available",
            hint=f"Use {opt.no_verify}: the export itself needs no memory for weights. Weights in safetensors are "
            "compared piece by piece and need no such memory.",
        )
