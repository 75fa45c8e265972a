"""Description of a live module as a loaded model; example inputs of the caller define its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from winml.modelkit.errors import ConfigError, InputError, UsageError
from winml.modelkit.models.families.family import part_of_decision
from winml.modelkit.models.inputs.axis_names import accepts_shapes
from winml.modelkit.models.inputs.decision import (
    InputDecision,
    check_input_specs,
    decide_inputs,
    forward_keywords,
    forward_parameters,
    known_meanings,
)
from winml.modelkit.models.inputs.dynamic_axes import fitting_example, open_axes
from winml.modelkit.models.inputs.nested_arguments import NestedArguments, arguments_of_names, flatten_arguments
from winml.modelkit.models.parts import LoadedModel, ModelInfo, ModelPart
from winml.modelkit.onnx.specs import DTYPES, DynamicRequest, InputTensorSpec
from winml.modelkit.tags.torch_modules import unwrap_compiled

_MAX_LISTED_MODULES = 3

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""Example values: by name, in the order of the forward's parameters, or a single tensor.

Each value is a tensor, a container of tensors (list, tuple, dict, dataclass), or a constant.
"""


def loaded_from_module(
    model: nn.Module,
    inputs: ExampleInputs | None,
    *,
    input_tensors: tuple[InputTensorSpec, ...] | None = None,
    file_inputs: tuple[InputTensorSpec, ...] | None = None,
    dynamic: DynamicRequest | None = None,
) -> LoadedModel:
    """Describe a live module as a loaded model; the module itself is not changed.

    Args:
        model: The module.
        inputs: Example tensors; they take precedence.
        input_tensors: Specifications of the inputs without examples; a transformers model's own config comes next.
        file_inputs: Inputs of an ONNX file of the module, used last.
        dynamic: Requested dynamic dimensions; `None`: only dimensions named in shapes.

    Raises:
        UsageError: the inputs of the module are unknown, or a name is no parameter of its forward.
        InputError: a parameter has no values yet.
    """
    model, dynamic = unwrap_compiled(model), dynamic or DynamicRequest()
    refuse_uninitialized(model, type(model).__name__)
    refuse_without_values(model, type(model).__name__)
    if input_tensors is None and not _has_transformers_config(model):
        input_tensors = file_inputs
    if inputs is not None:
        example = name_examples(inputs, model, "inputs")
        specs, arguments = example.specs, example.arguments
        check_input_specs(model, specs, "inputs", example.argument_names)
    elif input_tensors is not None:
        example, specs = None, input_tensors
        check_input_specs(model, specs, "input_tensors")
        arguments = arguments_of_names(model, [spec.name for spec in specs], "input_tensors")
    elif _has_transformers_config(model):
        part = live_part(model, open_axes(decide_inputs(model, model.config), dynamic))
        return _make_loaded_model(part)
    else:
        raise UsageError(
            f"the inputs of {type(model).__name__} are unknown",
            hint="Pass inputs= with example tensors, or WinMLExportConfig(input_tensors=(InputTensorSpec(…),)).",
        )
    decision = InputDecision(specs, () if example is None else example.notes, requested_by="input_tensors")
    if _has_transformers_config(model):
        decision = replace(decision, meanings=known_meanings(model, model.config, specs))
    accepts = accepts_shapes(model, arguments)
    decision = open_axes(decision, dynamic, are_sizes_firm=True, accepts=accepts)
    return _make_loaded_model(live_part(model, decision, arguments, example))


def live_part(
    model: nn.Module,
    decision: InputDecision,
    arguments: NestedArguments | None = None,
    example: NamedExample | None = None,
) -> ModelPart:
    """Return a live module as the only part of a model.

    Args:
        model: The module.
        decision: Its inputs, with dynamic sizes.
        arguments: Conversion of the inputs into arguments of the forward; `None` if each input is one argument.
        example: Example tensors that define the inputs; `None` without an example.
    """
    return part_of_decision(
        model,
        decision,
        forward_keywords(model),
        arguments,
        example=fitting_example(None if example is None else example.tensors, decision),
        are_ranges_examples=example is not None,
    )


def _make_loaded_model(part: ModelPart) -> LoadedModel:
    notes = (*part.notes, *training_notes(part.model))
    return LoadedModel(_module_info(part.model), (replace(part, notes=notes),))


def _has_transformers_config(model: nn.Module) -> bool:
    # transformers must be imported already if the process has one of its models; an import here would cost a second.
    return hasattr(model, "config") and any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def _module_info(model: nn.Module) -> ModelInfo:
    library = "transformers" if _has_transformers_config(model) else "torch"
    version = str(torch.__version__)
    if library == "transformers":
        import transformers

        version = transformers.__version__
    return ModelInfo(
        name_or_path=str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__),
        class_name=type(model).__name__,
        library=library,
        library_version=version,
        model_type=getattr(getattr(model, "config", None), "model_type", None),
    )


def training_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note on modules in training mode inside a model in evaluation mode; `()` without such modules.

    The export sets all modules to evaluation mode, so outputs differ from the outputs of the given model.
    """
    modules = [] if model.training else [path for path, module in model.named_modules() if module.training]
    if not modules:
        return ()
    names = ", ".join(modules[:_MAX_LISTED_MODULES]) + (", …" if len(modules) > _MAX_LISTED_MODULES else "")
    verb = "is" if len(modules) == 1 else "are"
    return (f"{names} {verb} in training mode inside a model in evaluation mode: exported in evaluation mode.",)


def refuse_uninitialized(model: torch.nn.Module, requested_by: str) -> None:
    """Refuse a live module with a parameter that has no shape yet.

    Raises:
        InputError: names the first such parameter.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise InputError(
                f"{requested_by}: {name!r} is not initialized; the first call determines its shape",
                hint="Call the model once on example inputs before it is returned.",
            )


def refuse_without_values(model: torch.nn.Module, requested_by: str) -> None:
    """Refuse a live module with a parameter that has a shape but no values.

    Raises:
        InputError: names the first such parameter.
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
    """Input name, such as ``images`` or ``features.input_ids`` → tensor."""
    arguments: NestedArguments | None
    """Conversion of the tensors into arguments of the forward; `None` if each tensor is one argument."""
    specs: tuple[InputTensorSpec, ...]
    """Specifications derived from the tensors."""

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the arguments in the example, constants included."""
        return tuple(self.tensors) if self.arguments is None else self.arguments.names

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the example."""
        return () if self.arguments is None else self.arguments.notes


def name_examples(examples: object, model: torch.nn.Module, requested_by: str) -> NamedExample:
    """Name the tensors of an example after the parameters of ``forward``.

    Args:
        examples: Values by name, in the order of the parameters, or a single one. A value is a tensor, a container of
            tensors, or a constant.
        model: The module that takes the examples.
        requested_by: Origin of the examples, for messages.

    Raises:
        InputError: there is no tensor, there are more values than ``forward`` takes, or one cannot be an argument.
        UsageError: the shape or dtype of a tensor is invalid for a graph input.
    """
    if isinstance(examples, Mapping):
        by_name = {str(name): value for name, value in examples.items()}
    else:
        values = list(examples) if isinstance(examples, (tuple, list)) else [examples]
        by_name = dict(zip(_positional_parameters(model, len(values), requested_by), values, strict=True))
    tensors, arguments = flatten_arguments(by_name, requested_by)
    specs = tuple(_describe_example(name, tensor, requested_by) for name, tensor in tensors.items())
    return NamedExample(tensors, arguments, specs)


def _describe_example(name: str, value: torch.Tensor, requested_by: str) -> InputTensorSpec:
    """Describe an example tensor; indices are valid between the smallest and the largest of the example.

    A mask that hides nothing in the example may hide positions.

    Args:
        name: Name of the input.
        value: The example.
        requested_by: Source of the example, for messages.

    Raises:
        UsageError: the shape or dtype is invalid for a graph input.
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
            hint=f"Pass tensors of dtype {', '.join(DTYPES)}.",
        ) from error


def _positional_parameters(model: torch.nn.Module, count: int, requested_by: str) -> list[str]:
    """Return the names for values passed by position; values of ``*args`` are numbered.

    Raises:
        InputError: there are more values than ``forward`` takes.
    """
    kinds = inspect.Parameter
    names = []
    for name, parameter in forward_parameters(model).items():
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            names.append(name)
        elif parameter.kind is kinds.VAR_POSITIONAL:
            names.extend(f"{name}_{position}" for position in range(count - len(names)))
    if count > len(names):
        raise InputError(
            f"{requested_by}: {count} values, but forward takes {len(names)} by position",
            hint="Pass a dict from parameter names to values; wrap a list that is one argument in a tuple: ([…],).",
        )
    return names[:count]
