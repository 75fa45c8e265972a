"""How does a module's forward become a graph, with torch's dynamo exporter?

Parameters are attached by reference, so capturing never copies a weight; those of a model built without storage are
taken from the caller. The graph comes back with the exact module stack of every node and with names of our making; tags
are put on by ``node_tagger``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winml.modelkit.errors import ExportError, InternalError
from winml.modelkit.export.capture import Capture
from winml.modelkit.export.captured_names import leave_open, name_by_module, place_operands
from winml.modelkit.export.config import DYNAMO_OPSET
from winml.modelkit.export.dynamo.failures import export_error
from winml.modelkit.export.dynamo.module_stacks import ModuleStacks, drop_exporter_metadata
from winml.modelkit.export.dynamo.time_limit import TimeIsUpError, time_limit
from winml.modelkit.export.dynamo.transformers_patches import library_repairs
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.export.torch_messages import quiet_torch
from winml.modelkit.hierarchy.tree import ModuleTree

__all__ = ["capture_dynamo"]


def capture_dynamo(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    *,
    opset_version: int = DYNAMO_OPSET,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    keep_stack_traces: bool = False,
    weights: Mapping[str, ir.TensorProtocol] | None = None,
    time_limit_s: float | None = None,
) -> Capture:
    """Export a prepared module and return its graph.

    Args:
        model: The module, its forward replaced by ``forward``; its parameters may be fake tensors.
        inputs: Example tensors by input name, in order; their shapes become the graph's. Fake where the parameters are.
        forward: The flat forward; it has been called before, so its output names are known.
        tree: The modules of the model, for the names of nodes.
        opset_version: Default opset of the graph; 18 is the oldest it gets.
        dynamic_axes: Input → axis → name, for the sizes that are to be left open; the others become the graph's.
        keep_stack_traces: Leave on every node the lines of Python it came from; these are local paths.
        weights: Parameter or buffer → its values, for a model that has none itself.
        time_limit_s: How long torch may take; None: as long as it wants.

    Raises:
        ExportError: the module cannot be traced, a size cannot be left open, the exporter lacks an operator, or the
        time is up; names operator and module where known.
    """
    stacks = ModuleStacks(model)
    try:
        with (
            time_limit(time_limit_s),
            quiet_torch(),
            _plain_forward(model, forward),
            _unused_sizes(model),
            stacks.applied(),
            library_repairs(model) as repairs,
        ):
            program = torch.export.export(
                model,
                # Cloned in the forward itself: torch takes what is written into an input for one more output.
                tuple(inputs.values()),
                dynamic_shapes=_dynamic_shapes(inputs, dynamic_axes or {}),
                strict=False,
            )
            repairs.repair_program(program)
            converted = torch.onnx.export(
                program,
                input_names=list(forward.input_names),
                output_names=list(forward.output_names),
                opset_version=max(opset_version, DYNAMO_OPSET),
                custom_translation_table=dict(repairs.translations),
                # Its optimizer reads weights; ours, later on, does not.
                optimize=False,
                verbose=False,
            )
            assert converted is not None  # no file was asked for
            repairs.repair_graph(converted)
    except TimeIsUpError:
        raise ExportError(
            f"the dynamo exporter was stopped after {time_limit_s:.0f} s",
            hint="Use --dynamo to let it take as long as it wants; what takes it long are open sizes that are divided.",
        ) from None
    except Exception as error:
        raise export_error(error, model, stacks, _named_axes(forward, dynamic_axes or {})) from error
    # torch leaves functions where an operator has a body; inlined, every node has a module.
    ir.passes.common.InlinePass()(converted.model)
    return _settle(converted.model, model, tree, stacks, dynamic_axes, keep_stack_traces, weights)


def _settle(
    captured: ir.Model,
    model: nn.Module,
    tree: ModuleTree,
    stacks: ModuleStacks,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None,
    keep_stack_traces: bool,
    weights: Mapping[str, ir.TensorProtocol] | None,
) -> Capture:
    """Bring what torch made into the form of every capture, in place."""
    scopes = {node: stacks.read(node) for node in captured.graph.all_nodes()}
    drop_exporter_metadata(captured, keep_stack_traces=keep_stack_traces)
    _attach_weights(captured.graph, model, weights)
    if dynamic_axes:
        leave_open(captured.graph, dynamic_axes)
    unused = tuple(value.name or "" for value in captured.graph.inputs if not value.uses())
    place_operands(scopes)
    name_by_module(captured.graph, scopes, tree)
    return Capture(captured, scopes, unused)


@contextmanager
def _plain_forward(model: nn.Module, forward: FlatForward) -> Iterator[None]:
    """Give the module, for the time of the block, a function for a forward, whose signature torch reads; in place."""

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copies = tuple(tensor.clone() for tensor in tensors)
        return _each_its_own(forward(*copies), copies)

    plain.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _argument_names(forward)]
    )
    model.forward = plain
    try:
        yield
    finally:
        model.forward = forward


def _each_its_own(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs, those that are returned twice or are an input copied: an ONNX value has one name."""
    taken = {id(tensor) for tensor in inputs}
    own = []
    for tensor in outputs:
        own.append(tensor.clone() if id(tensor) in taken else tensor)
        taken.add(id(tensor))
    return tuple(own)


@contextmanager
def _unused_sizes(model: nn.Module) -> Iterator[None]:
    """Let the fake parameters of a model, if it has any, be traced as if for the first time; undone at the end.

    torch takes the mode of the parameters for its own, and wants one that can hold open sizes and holds none yet.
    """
    modes = {parameter.fake_mode for parameter in model.parameters() if isinstance(parameter, FakeTensor)}
    before = [(mode, mode.shape_env, mode.static_shapes) for mode in modes]
    for mode in modes:
        mode.shape_env, mode.static_shapes = ShapeEnv(tracked_fakes=[]), False
    try:
        yield
    finally:
        for mode, shape_env, static_shapes in before:
            mode.shape_env, mode.static_shapes = shape_env, static_shapes


def _argument_names(forward: FlatForward) -> list[str]:
    """Return the names of the inputs, those that Python does not take as a parameter's replaced."""
    return [name if name.isidentifier() else f"input_{position}" for position, name in enumerate(forward.input_names)]


def _named_axes(forward: FlatForward, axes: Mapping[str, Mapping[int, str]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return, for every argument torch knows and its axis, the name of the dimension and that of the input."""
    return {
        (argument, axis): (dimension, name)
        for name, argument in zip(forward.input_names, _argument_names(forward), strict=True)
        for axis, dimension in axes.get(name, {}).items()
    }


def _dynamic_shapes(inputs: Mapping[str, torch.Tensor], axes: Mapping[str, Mapping[int, str]]) -> Any:
    """Return what is to be left open, as torch wants it: it finds out itself which sizes depend on each other."""
    if not axes:
        return None
    return tuple(dict.fromkeys(axes.get(name, {}), torch.export.Dim.DYNAMIC) or None for name in inputs)


def _attach_weights(graph: ir.Graph, model: nn.Module, weights: Mapping[str, ir.TensorProtocol] | None) -> None:
    """Let every initializer refer to the one tensor it stands for, in place; tied parameters become one initializer.

    Raises:
        InternalError: a tensor without values has none in ``weights`` either.
    """
    tensors = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    for name, value in list(graph.initializers.items()):
        tensor = tensors.get(name)
        first = name if tensor is None else first_names[id(tensor)]
        if first != name:
            value = _moved(graph, value, first)
        if weights is not None and first in weights:
            value.const_value = weights[first]
        elif tensor is not None and not isinstance(tensor, FakeTensor):
            value.const_value = tensor_adapters.TorchTensor(tensor.detach(), name=first)
        elif isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            raise InternalError(f"the values of {name!r} are neither in the model nor in its weights")


def _moved(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Give an initializer another name, or its uses to the initializer that has it; return the one that stays."""
    assert value.name is not None  # an initializer has a name
    del graph.initializers[value.name]
    if name in graph.initializers:
        ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        return graph.initializers[name]
    value.name = name
    graph.register_initializer(value)
    return value
