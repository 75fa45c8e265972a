"""Captures a module's forward as a graph with torch's TorchScript exporter.

Parameters are inputs of the trace and are attached by reference afterwards, so capturing never copies a weight. Every
node comes with its exact module stack and a name after its module; ``node_tagger`` writes the tags. Why TorchScript is
tried first: docs/decisions/0003-torchscript-first.md.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnx_ir.passes import common
from torch import nn
from torch.onnx.errors import UnsupportedOperatorError

from winml.modelkit.errors import ExportError, InternalError, first_line
from winml.modelkit.export.capture import (
    Capture,
    CaptureOptions,
    Scope,
    name_by_module,
    name_open_sizes,
    place_operands,
)
from winml.modelkit.export.complex_pairs import complex_as_pairs
from winml.modelkit.export.fake_parameters import fresh_shape_envs, weight_by_reference
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.export.state_restoration import quiet_torch
from winml.modelkit.export.torchscript.missing_values import missing_value_error, untraced_shape_computation
from winml.modelkit.export.torchscript.operators import further_operators
from winml.modelkit.export.torchscript.scopes import ModuleScopes, operator_of_error
from winml.modelkit.export.torchscript.tracing import (
    TracedLoops,
    asserts_only,
    booleans_as_numbers,
    masks_without_vmap,
    tensors_rounded_as_numbers,
)
from winml.modelkit.hierarchy.tracing import module_of_error
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.metadata_keys import STACK_TRACE_KEY

__all__ = [
    "capture_torchscript",
    "merge_equal_nodes",
]


# --- Merges equal computations of one call of a module in a captured graph.
#
# torch's exporter merges on its own graph across modules and calls, where nothing tells afterwards whose work was
# merged.


_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Specified: operators of ONNX that answer otherwise each time."""
_APART = "winml_apart"
"""Attribute by whose value nodes are kept apart, for the time of the pass."""


def merge_equal_nodes(model: ir.Model, scopes: Mapping[ir.Node, Scope], repeated_modules: Collection[str] = ()) -> None:
    """Let one node stand for all that compute the same of the same values in the same module, in place.

    Each module keeps its own work, so that equal modules have equal nodes and each can be cut out.

    Args:
        model: A captured graph.
        scopes: The scope of each node.
        repeated_modules: Paths of modules that run more than once. Their nodes stay, so that each call has its own.
    """
    numbers: dict[Scope, int] = {}
    nodes = [node for node in model.graph if node.inputs]
    for position, node in enumerate(nodes):
        scope = scopes.get(node, ())
        # A random number is drawn for each; of an output, the pass would leave a copy that belongs to no module.
        is_own = node.op_type in _RANDOM or bool(node.domain) or any(value.is_graph_output() for value in node.outputs)
        is_own = is_own or not set(scope).isdisjoint(repeated_modules)
        number = len(nodes) + position if is_own else numbers.setdefault(scope, len(numbers))
        node.attributes.add(ir.AttrInt64(_APART, number))
    common.CommonSubexpressionEliminationPass()(model)
    for node in nodes:
        node.attributes.pop(_APART)


_TracerWarning: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]  # public, but not in its stub

_COUNTER = re.compile(r"\.\d+$")

MINIMUM_IR_VERSION = 10
"""Specified: the first ONNX IR version whose nodes have metadata."""


def capture_torchscript(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    options: CaptureOptions,
) -> Capture:
    """Trace a prepared module and return its graph.

    Args:
        model: The module, its forward replaced by ``forward``; its parameters may be fake tensors.
        inputs: Example tensors by input name, in order; their shapes become the graph's. Fake where the parameters are.
        forward: The flat forward, called at least once, so that its output names are known.
        tree: The modules of the model, for the names of nodes.
        options: Opset, open sizes and weights; the time limit is not used.

    Raises:
        ExportError: the module cannot be traced, or needs values that its parameters do not have, or the exporter lacks
            an operator; names operator and module where known.
    """
    scopes = ModuleScopes(model)
    try:
        with quiet_torch(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", _TracerWarning)
            loops = TracedLoops(len(inputs))
            serialized = loops.call(lambda: _export_with_torch(model, inputs, forward, scopes, options, loops))
    except ExportError:
        raise
    except Exception as error:
        raise missing_value_error(error, model) or _export_error(error, scopes, model, options.opset_version) from error
    captured = ir.serde.deserialize_model(onnx.load_model_from_string(serialized))
    captured.ir_version = max(captured.ir_version or 0, MINIMUM_IR_VERSION)
    _attach_parameters(captured, model, _names_for_torch(forward), options.weights)
    _name_inputs(captured.graph, forward)
    unused_inputs = _restore_unused_inputs(captured.graph, inputs)
    if options.dynamic_axes:
        name_open_sizes(captured.graph, options.dynamic_axes)
    traced_scopes = {node: scopes.read(node.name or "") for node in captured.graph.all_nodes()}
    repeated_modules = {module.path for module in tree if module.calls > 1}
    merge_equal_nodes(captured, traced_scopes, repeated_modules)
    node_scopes = {node: traced_scopes.get(node, ()) for node in captured.graph.all_nodes()}
    _move_stack_traces(captured.graph)
    place_operands(node_scopes)
    name_by_module(captured.graph, node_scopes, tree)
    return Capture(captured, node_scopes, unused_inputs, _fixed_choices(caught), loops.notes)


def _export_with_torch(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    scopes: ModuleScopes,
    options: CaptureOptions,
    loops: TracedLoops,
) -> bytes:
    """Return the file torch's TorchScript exporter writes, with weights as inputs."""
    buffer = io.BytesIO()
    names = dict(zip(forward.input_names, _names_for_torch(forward), strict=True))
    axes = {names[name]: dict(axis_names) for name, axis_names in options.dynamic_axes.items()}
    with (
        scopes.patched_exporter(),
        fresh_shape_envs(model, are_sizes_open=False),
        untraced_shape_computation(),
        further_operators(options.opset_version),
        booleans_as_numbers(),
        masks_without_vmap(),
        tensors_rounded_as_numbers(),
        loops.in_trace(),
        complex_as_pairs(),
    ):
        torch.onnx.export(
            model,
            tuple(tensor.clone() for tensor in inputs.values()),
            buffer,  # type: ignore[arg-type]  # it writes into anything with write()
            input_names=list(names.values()),
            output_names=list(forward.output_names),
            opset_version=options.opset_version,
            dynamic_axes=axes or None,
            dynamo=False,
            # Weights become named graph inputs, are never folded or compared by value, and are attached afterwards.
            export_params=False,
            do_constant_folding=False,
            keep_initializers_as_inputs=True,
            # The exporter's name for: write the source lines into the nodes' doc strings.
            verbose=options.keep_stack_traces,
        )
    return buffer.getvalue()


def _export_error(error: Exception, scopes: ModuleScopes, model: nn.Module, opset_version: int) -> ExportError:
    converted = operator_of_error(error, scopes)
    operator, module = converted or (None, module_of_error(error, model))
    place = f" in module {module or '(the root)'}" if module is not None else ""
    if isinstance(error, UnsupportedOperatorError):
        # The exporter's message names a sufficient opset: "Support for this operator was added in version 18, …".
        newer = re.search(r"version (\d+), try", str(error))
        remedy = "No opset has one: let dynamo try (without --no-dynamo), or replace"
        if newer:
            remedy = f"Use --export-config '{{\"opset_version\": {newer[1]}}}', or replace"
        return ExportError(
            f"the TorchScript exporter has no ONNX form of {operator or error}{place} at opset {opset_version}",
            hint=f"{remedy} the operator in that module's forward by others.",
            operator=operator,
            module=module,
        )
    summary = f"operator {operator} could not be converted" if operator else "the model could not be traced"
    return ExportError(
        f"{summary}{place}: {type(error).__name__}: {first_line(error)}",
        hint="The forward must run under torch.jit.trace with these inputs; --debug shows the full traceback.",
        operator=operator,
        module=module,
    )


def _fixed_choices(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return the lines where the user's Python read a tensor's value during tracing.

    Lines of installed libraries are left out: they mostly read shapes, and the user cannot change them. So are those
    that only assert something: the answer is the same wherever there is one.
    """
    places = (
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if issubclass(warning.category, _TracerWarning) and "site-packages" not in Path(warning.filename).parts
        if not asserts_only(warning.filename, warning.lineno)
    )
    return tuple(dict.fromkeys(places))


def _attach_parameters(
    captured: ir.Model, model: nn.Module, input_names: Sequence[str], weights: Mapping[str, ir.TensorProtocol] | None
) -> None:
    """Turn the graph inputs that are parameters into initializers that refer to their values, in place."""
    tensors = model.state_dict(keep_vars=True)
    graph = captured.graph
    for value in [value for value in graph.inputs if value.name not in input_names]:
        name = value.name or ""
        # torch appends a counter to a parameter that has the name of an input.
        own_name = name if name in tensors else _COUNTER.sub("", name)
        if own_name not in tensors:
            raise InternalError(
                f"the traced graph has an input {name!r} that is neither requested nor a tensor of the model"
            )
        graph.inputs.remove(value)
        value.const_value = weight_by_reference(own_name, tensors[own_name], weights)
        graph.initializers[name] = value


def _names_for_torch(forward: FlatForward) -> list[str]:
    """Return the names of the inputs, without dots: torch counts a name that ends in a number on, past parameters'."""
    taken = set(forward.input_names)
    names = []
    for position, name in enumerate(forward.input_names):
        if "." in name:
            name = next(free for count in itertools.count(position) if (free := f"input_{count}") not in taken)
        taken.add(name)
        names.append(name)
    return names


def _name_inputs(graph: ir.Graph, forward: FlatForward) -> None:
    """Give the inputs their own names again, in place; a parameter of such a name gets another."""
    names = dict(zip(_names_for_torch(forward), forward.input_names, strict=True))
    for name in forward.input_names:
        if name in graph.initializers and "." in name:
            parameter = graph.initializers.pop(name)
            parameter.name = next(
                free for count in itertools.count(1) if (free := f"{name}_{count}") not in graph.initializers
            )
            graph.initializers[parameter.name] = parameter
    for value in graph.inputs:
        value.name = names.get(value.name or "", value.name)


def _restore_unused_inputs(graph: ir.Graph, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Add the inputs that the exporter dropped because nothing reads them, in place; return their names."""
    present = {value.name: value for value in graph.inputs}
    unused = tuple(name for name in inputs if name not in present)
    for name in unused:
        tensor = inputs[name]
        dtype = tensor_adapters.from_torch_dtype(tensor.dtype)
        present[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(tensor.shape))
    graph.inputs[:] = [present[name] for name in inputs]
    return unused


def _move_stack_traces(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.doc_string:
            node.metadata_props[STACK_TRACE_KEY] = node.doc_string
            node.doc_string = None
