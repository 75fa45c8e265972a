"""Captures a module's forward as a graph with torch's dynamo exporter.

Parameters are attached by reference, so capturing never copies a weight; the values of fake parameters are given by the
caller. Every node comes with its exact module stack and a name after its module; ``node_tagger`` writes the tags.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit.errors import ExportError
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.captured_names import name_by_module, name_open_sizes, place_operands
from winml.modelkit.export.complex_pairs import complex_as_pairs
from winml.modelkit.export.config import DYNAMO_OPSET
from winml.modelkit.export.dynamo.failures import export_error
from winml.modelkit.export.dynamo.inductor_cache import without_empty_inductor_cache
from winml.modelkit.export.dynamo.module_stacks import ModuleStacks, drop_exporter_metadata
from winml.modelkit.export.dynamo.time_limit import TimeIsUpError, time_limit
from winml.modelkit.export.dynamo.transformers_patches import library_repairs
from winml.modelkit.export.fake_parameters import fresh_shape_envs, is_fake, weight_by_reference
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.export.torch_messages import quiet_torch, unprinted_failures
from winml.modelkit.hierarchy.tree import ModuleTree

__all__ = ["capture_dynamo"]


def capture_dynamo(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    options: CaptureOptions,
) -> Capture:
    """Export a prepared module and return its graph.

    Args:
        model: The module, its forward replaced by ``forward``; its parameters may be fake tensors.
        inputs: Example tensors by input name, in order; their shapes become the graph's. Fake where the parameters are.
        forward: The flat forward, called at least once, so that its output names are known.
        tree: The modules of the model, for the names of nodes.
        options: Opset, open sizes, weights and time limit.

    Raises:
        ExportError: the module cannot be traced, a size cannot be left open, the exporter lacks an operator, or the
            time limit is exceeded; names operator and module where known.
    """
    stacks = ModuleStacks(model)
    try:
        with time_limit(options.time_limit_s), quiet_torch(), unprinted_failures(), without_empty_inductor_cache():
            captured = _export_with_torch(model, inputs, forward, stacks, options)
    except TimeIsUpError:
        raise ExportError(
            f"the dynamo exporter was stopped after {options.time_limit_s:.0f} s",
            hint="Use --dynamo to let it take as long as it wants; what takes it long are open sizes that are divided.",
        ) from None
    except Exception as error:
        raise export_error(error, model, stacks, _named_axes(forward, options.dynamic_axes)) from error
    # torch writes some operators as functions; inlined, every node has a module.
    ir.passes.common.InlinePass()(captured)
    return _as_capture(captured, model, tree, stacks, options)


def _export_with_torch(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    stacks: ModuleStacks,
    options: CaptureOptions,
) -> ir.Model:
    """Return the graph torch's dynamo exporter writes, with transformers' repairs applied."""
    with (
        _function_as_forward(model, forward),
        # torch traces in the fake mode of the parameters, and needs one that allows open sizes and contains none yet.
        fresh_shape_envs(model, are_sizes_open=True),
        stacks.patched_tracer(),
        library_repairs(model) as repairs,
    ):
        with complex_as_pairs():
            program = torch.export.export(
                model,
                # Not cloned here but in the forward: torch would return an input that is written to as one more output.
                tuple(inputs.values()),
                dynamic_shapes=_dynamic_shapes(inputs, options.dynamic_axes),
                strict=False,
            )
        repairs.repair_program(program)
        converted = torch.onnx.export(
            program,
            input_names=list(forward.input_names),
            output_names=list(forward.output_names),
            opset_version=max(options.opset_version, DYNAMO_OPSET),
            custom_translation_table=dict(repairs.translations),
            # torch's optimizer reads weights; our normalization does not.
            optimize=False,
            verbose=False,
        )
        assert converted is not None  # None only where a file is written
        repairs.repair_graph(converted)
    return converted.model


def _as_capture(
    captured: ir.Model, model: nn.Module, tree: ModuleTree, stacks: ModuleStacks, options: CaptureOptions
) -> Capture:
    """Attach weights, name nodes and open sizes, drop torch's own metadata, in place; return the capture."""
    scopes = {node: stacks.read(node) for node in captured.graph.all_nodes()}
    drop_exporter_metadata(captured, keep_stack_traces=options.keep_stack_traces)
    _attach_weights(captured.graph, model, options.weights)
    if options.dynamic_axes:
        name_open_sizes(captured.graph, options.dynamic_axes)
    unused_inputs = tuple(value.name or "" for value in captured.graph.inputs if not value.uses())
    place_operands(scopes)
    name_by_module(captured.graph, scopes, tree)
    return Capture(captured, scopes, unused_inputs)


@contextmanager
def _function_as_forward(model: nn.Module, forward: FlatForward) -> Iterator[None]:
    """Replace the flat forward by a plain function with a signature torch can read, for the time of the block."""

    def forward_function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copies = tuple(tensor.clone() for tensor in tensors)
        return _distinct_outputs(forward(*copies), copies)

    forward_function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _argument_names(forward)]
    )
    model.forward = forward_function
    try:
        yield
    finally:
        model.forward = forward


def _distinct_outputs(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs, with copies of those that are returned twice or are inputs: an ONNX value has one name."""
    seen_ids = {id(tensor) for tensor in inputs}
    distinct = []
    for tensor in outputs:
        distinct.append(tensor.clone() if id(tensor) in seen_ids else tensor)
        seen_ids.add(id(tensor))
    return tuple(distinct)


def _argument_names(forward: FlatForward) -> list[str]:
    """Return the names of the inputs; those that are no valid Python parameter names are replaced by free ones."""
    taken = set(forward.input_names)
    names = []
    for position, name in enumerate(forward.input_names):
        if not name.isidentifier() or keyword.iskeyword(name):
            name = next(free for count in itertools.count(position) if (free := f"input_{count}") not in taken)
        taken.add(name)
        names.append(name)
    return names


def _named_axes(forward: FlatForward, axes: Mapping[str, Mapping[int, str]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return (argument name of torch, axis) → (name of the dimension, name of the input)."""
    return {
        (argument, axis): (dimension, name)
        for name, argument in zip(forward.input_names, _argument_names(forward), strict=True)
        for axis, dimension in axes.get(name, {}).items()
    }


def _dynamic_shapes(inputs: Mapping[str, torch.Tensor], axes: Mapping[str, Mapping[int, str]]) -> Any:
    """Return the open sizes in torch's form; torch finds itself which of them depend on each other."""
    if not axes:
        return None
    return tuple(dict.fromkeys(axes.get(name, {}), torch.export.Dim.DYNAMIC) or None for name in inputs)


def _attach_weights(graph: ir.Graph, model: nn.Module, weights: Mapping[str, ir.TensorProtocol] | None) -> None:
    """Attach the parameters to the initializers by reference, in place; tied parameters become one initializer.

    Raises:
        InternalError: a fake parameter has no values in ``weights``.
    """
    tensors = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    for name, value in list(graph.initializers.items()):
        tensor = tensors.get(name)
        first_name = name if tensor is None else first_names[id(tensor)]
        if first_name != name:
            value = _renamed_initializer(graph, value, first_name)
        if tensor is None:
            tensor = getattr(value.const_value, "raw", None)
            if not is_fake(tensor):
                continue
        elif tensor.is_complex() and not is_fake(tensor):
            # torch's graph holds complex numbers as pairs of real ones.
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        value.const_value = weight_by_reference(first_name, tensor, weights)


def _renamed_initializer(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Rename an initializer, or replace it by the initializer of that name if there is one; return the result."""
    assert value.name is not None  # an initializer has a name
    del graph.initializers[value.name]
    if name in graph.initializers:
        ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        return graph.initializers[name]
    value.name = name
    graph.register_initializer(value)
    return value
