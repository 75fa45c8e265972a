"""What do example tensors say about a module's inputs? Their names, shapes, dtypes, and the range of indices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from winml.modelkit.errors import ConfigError, InputError, UsageError
from winml.modelkit.graph.specs import DTYPES, InputTensorSpec
from winml.modelkit.load.inputs.decision import forward_parameters
from winml.modelkit.load.inputs.nested_arguments import NestedArguments, flatten_arguments

__all__ = ["NamedExample", "name_examples", "refuse_uninitialized", "refuse_without_values", "spec_of_example"]


def refuse_uninitialized(model: torch.nn.Module, requested_by: str) -> None:
    """Refuse a live module some of whose parameters have no shape yet.

    Raises:
        InputError: names the first of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise InputError(
                f"{requested_by}: {name!r} is not initialized; its shape comes with the first call",
                hint="Call the model once before it is returned, with inputs like those it will get.",
            )


def refuse_without_values(model: torch.nn.Module, requested_by: str) -> None:
    """Refuse a live module some of whose parameters have a shape but no values.

    Raises:
        InputError: names the first of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"{requested_by}: {name!r} is on the meta device, where tensors have no values",
                hint="Build the model on the CPU, or move it with to_empty() and load its weights.",
            )


@dataclass(frozen=True)
class NamedExample:
    """The tensors of an example, each with the name of its input."""

    tensors: Mapping[str, torch.Tensor]
    """By input name, such as ``images`` or ``features.input_ids``."""
    arguments: NestedArguments | None
    """How they become the arguments of the forward; None where each is one."""
    specs: tuple[InputTensorSpec, ...]
    """What they say about the inputs."""

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the arguments that are given, constants included."""
        return tuple(self.tensors) if self.arguments is None else self.arguments.names

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should hear about it."""
        return () if self.arguments is None else self.arguments.notes


def name_examples(examples: object, model: torch.nn.Module, requested_by: str) -> NamedExample:
    """Name the tensors of an example after the parameters of ``forward`` they are for.

    Args:
        examples: Values by name, in the order of the parameters, or a single one. A value is a tensor, a container of
            tensors, or a constant.
        model: The module they are for.
        requested_by: What gave the examples, for messages.

    Raises:
        InputError: there is no tensor, there are more values than ``forward`` takes, or one cannot be an argument.
        UsageError: the shape or dtype of a tensor cannot be that of a graph input.
    """
    if isinstance(examples, Mapping):
        named = {str(name): value for name, value in examples.items()}
    else:
        values = list(examples) if isinstance(examples, (tuple, list)) else [examples]
        named = dict(zip(_positional_parameters(model, len(values), requested_by), values, strict=True))
    tensors, arguments = flatten_arguments(named, requested_by)
    specs = tuple(spec_of_example(name, tensor, requested_by) for name, tensor in tensors.items())
    return NamedExample(tensors, arguments, specs)


def spec_of_example(name: str, value: torch.Tensor, requested_by: str) -> InputTensorSpec:
    """Describe an example tensor; indices are valid between the smallest and the largest of the example.

    A mask that hides nothing may hide something.

    Raises:
        UsageError: its shape or dtype cannot be that of a graph input.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    is_index = dtype in DTYPES and not value.is_floating_point() and dtype != "bool" and value.numel() > 0
    value_range = (float(value.min()), float(value.max())) if is_index else None
    if name.endswith("mask") and value_range == (1.0, 1.0):
        value_range = (0.0, 1.0)
    try:
        return InputTensorSpec(name=name, shape=tuple(value.shape), dtype=dtype, value_range=value_range)
    except ConfigError as error:
        reason = error.message.removeprefix(f"{InputTensorSpec.__name__}: ")
        raise UsageError(
            f"{requested_by}: {name!r} of shape {list(value.shape)} and dtype {dtype} cannot be an input: {reason}",
            hint=f"Give tensors without empty dimensions, of one of: {', '.join(DTYPES)}.",
        ) from error


def _positional_parameters(model: torch.nn.Module, count: int, requested_by: str) -> list[str]:
    kinds = inspect.Parameter
    names = []
    for name, parameter in forward_parameters(model).items():
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            names.append(name)
        elif parameter.kind is kinds.VAR_POSITIONAL:
            names.extend(f"{name}_{position}" for position in range(count - len(names)))
    if count > len(names):
        raise InputError(
            f"{requested_by} gave {count} values, forward takes {len(names)} by position",
            hint="Give a dict from parameter names to values; a list that is one argument stands in a tuple: ([…],).",
        )
    return names[:count]
