"""Describes a live module as a loaded model: its inputs are found in what the caller gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.specs import DynamicRequest, InputTensorSpec
from winml.modelkit.hierarchy.torch_modules import uncompiled
from winml.modelkit.load.inputs.axis_names import accepts_shapes
from winml.modelkit.load.inputs.decision import (
    InputDecision,
    check_input_specs,
    decide_inputs,
    forward_keywords,
    known_meanings,
)
from winml.modelkit.load.inputs.dynamic_axes import fitting_example, open_axes
from winml.modelkit.load.inputs.examples import name_examples, refuse_uninitialized, refuse_without_values
from winml.modelkit.load.inputs.nested_arguments import NestedArguments, arguments_of_names
from winml.modelkit.load.parts import LoadedModel, ModelInfo, ModelPart

__all__ = ["ExampleInputs", "loaded_from_module"]

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""Example values: by name, in the order of the forward's parameters, or a single tensor. Each is a tensor, a container
of tensors (list, tuple, dict, dataclass), or a constant."""


def loaded_from_module(
    model: nn.Module,
    inputs: ExampleInputs | None,
    *,
    input_tensors: tuple[InputTensorSpec, ...] | None = None,
    dynamic: DynamicRequest | None = None,
) -> LoadedModel:
    """Describe a live module as if it had been loaded; the module itself is not touched.

    Args:
        model: The module.
        inputs: Example tensors; they win over everything else.
        input_tensors: What it takes where there are no examples; a transformers model's own config comes last.
        dynamic: Which dimensions are to be open; None: only those named in shapes.

    Raises:
        UsageError: nothing says what the module takes, or a name is no parameter of its forward.
        InputError: a parameter holds no values yet.
    """
    model, dynamic = uncompiled(model), dynamic or DynamicRequest()
    refuse_uninitialized(model, type(model).__name__)
    refuse_without_values(model, type(model).__name__)
    if inputs is not None:
        example = name_examples(inputs, model, "inputs")
        specs, arguments = example.specs, example.arguments
        check_input_specs(model, specs, "inputs", example.argument_names)
    elif input_tensors is not None:
        example, specs = None, input_tensors
        check_input_specs(model, specs, "input_tensors")
        arguments = arguments_of_names(model, [spec.name for spec in specs], "input_tensors")
    elif _has_transformers_config(model):
        decision = open_axes(decide_inputs(model, model.config), dynamic)
        return _loaded(model, decision, None, None)
    else:
        raise UsageError(
            f"nothing says what inputs {type(model).__name__} takes",
            hint="Pass inputs= with example tensors, or WinMLExportConfig(input_tensors=(InputTensorSpec(…),)).",
        )
    decision = InputDecision(specs, () if example is None else example.notes, requested_by="input_tensors")
    if _has_transformers_config(model):
        decision = replace(decision, meanings=known_meanings(model, model.config, specs))
    accepts = accepts_shapes(model, arguments)
    decision = open_axes(decision, dynamic, are_sizes_firm=True, accepts=accepts)
    return _loaded(model, decision, None if example is None else example.tensors, arguments)


def _loaded(
    model: nn.Module,
    decision: InputDecision,
    example: Mapping[str, torch.Tensor] | None,
    arguments: NestedArguments | None,
) -> LoadedModel:
    part = ModelPart(
        model=model,
        inputs=decision.inputs,
        forward_kwargs=forward_keywords(model),
        arguments=arguments,
        example=fitting_example(example, decision),
        are_ranges_examples=example is not None,
        dimensions=decision.dimensions,
        output_axes=decision.output_axes,
        notes=decision.notes,
    )
    return LoadedModel(_module_info(model), (part,))


def _has_transformers_config(model: nn.Module) -> bool:
    # Only a process that imported transformers can hold one of its models; importing it here would cost a second.
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
