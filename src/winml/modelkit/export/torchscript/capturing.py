"""Capture of a module's forward as a graph with torch's TorchScript exporter.

Parameters are inputs of the trace and are attached by reference afterwards, so capturing never copies a weight. Every
node has the exact module stack and a name after the module; `tags.tagging` writes the tags. Operators that torch lacks
or converts wrongly are registered for one export. Why TorchScript is tried first:
docs/decisions/0003-torchscript-first.md.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnx_ir.passes import common
from torch import nn
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter import (
    symbolic_opset9,
    symbolic_opset11,
    symbolic_opset13,
    symbolic_opset14,
)
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType
from torch.onnx._internal.torchscript_exporter.registration import registry
from torch.onnx.errors import UnsupportedOperatorError

from winml.modelkit.errors import ExportError, InternalError, first_line, opt
from winml.modelkit.export import exact_forms
from winml.modelkit.export.capture import (
    Capture,
    CaptureOptions,
    Scope,
    accepted_names,
    name_by_module,
    name_open_sizes,
    place_operands,
)
from winml.modelkit.export.complex_pairs import complex_as_pairs
from winml.modelkit.export.torchscript.tracing import (
    ModuleScopes,
    NumberReads,
    TracedLoops,
    booleans_as_numbers,
    is_noted_elsewhere,
    masks_without_vmap,
    missing_value_error,
    operator_of_error,
    tensors_rounded_as_numbers,
    untraced_shape_computation,
)
from winml.modelkit.metadata_keys import STACK_TRACE_KEY
from winml.modelkit.models.fake_parameters import WEIGHT_ENTRY, fresh_shape_envs, weight_by_reference
from winml.modelkit.models.preparation import FlatForward
from winml.modelkit.models.source_lines import asserts_only
from winml.modelkit.models.state_restoration import quiet_torch
from winml.modelkit.onnx.assumptions import Assumption, assume_branch, assume_size, assume_values
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS
from winml.modelkit.tags.torch_modules import module_of_error, operator_remedy
from winml.modelkit.tags.tree import ModuleTree

_RANDOM = RANDOM_OPERATORS | {"Dropout"}
_APART = "winml_apart"
"""Temporary attribute during the pass; only nodes with equal values may be merged."""


def _merge_equal_nodes(
    model: ir.Model, scopes: Mapping[ir.Node, Scope], repeated_modules: Collection[str] = ()
) -> None:
    """Merge equal nodes with equal inputs within each module, in place.

    Nodes of different modules are not merged, so that equal modules have equal nodes and each module can be extracted.
    torch's pass merges across modules and calls.

    Args:
        model: A captured graph.
        scopes: The scope of each node.
        repeated_modules: Paths of modules that run more than once. Their nodes are not merged, so that each call has
            separate nodes.
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

_TAKING_ALL = ("to a NumPy array", "to a Python list")
"""Texts in torch's warnings when all values of a tensor are read, which torch's dispatcher does not see."""
_COUNTER = re.compile(r"\.\d+$")

_MINIMUM_IR_VERSION = 10
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
        inputs: Example tensors by input name, in order; their shapes become the graph's. Fake if the parameters are
            fake.
        forward: The flat forward, called at least once, so that its output names are known.
        tree: The modules of the model, for the names of nodes.
        options: Opset, dynamic sizes and weights; the time limit is not used.

    Raises:
        ExportError: the module cannot be traced, or needs values that its parameters do not have, or the exporter lacks
            an operator; the error names operator and module if known.
    """
    scopes = ModuleScopes(model)
    try:
        with quiet_torch(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", _TracerWarning)
            loops, numbers = TracedLoops(len(inputs)), NumberReads(tuple(inputs), options.dynamic_axes)
            with numbers.in_trace():
                serialized = loops.call(lambda: _export_with_torch(model, inputs, forward, scopes, options, loops))
    except ExportError:
        raise
    except Exception as error:
        raise missing_value_error(error, model) or _export_error(error, scopes, model, options.opset_version) from error
    captured = ir.serde.deserialize_model(onnx.load_model_from_string(serialized))
    captured.ir_version = max(captured.ir_version or 0, _MINIMUM_IR_VERSION)
    _mend_bfloat16_casts(captured)
    _attach_parameters(captured, model, _names_for_torch(forward), options.weights)
    _name_inputs(captured.graph, forward)
    unused_inputs = _restore_unused_inputs(captured.graph, inputs)
    if options.dynamic_axes:
        name_open_sizes(captured.graph, options.dynamic_axes)
    traced_scopes = {node: scopes.read(node.name or "") for node in captured.graph.all_nodes()}
    repeated_modules = {module.path for module in tree if module.calls > 1}
    _merge_equal_nodes(captured, traced_scopes, repeated_modules)
    node_scopes = {node: traced_scopes.get(node, ()) for node in captured.graph.all_nodes()}
    _move_stack_traces(captured.graph)
    place_operands(node_scopes)
    name_by_module(captured.graph, node_scopes, tree)
    counted = (assume_branch(source_line, value, names) for source_line, (value, names) in numbers.values.items())
    sizes = (assume_size(source_line, value, names) for source_line, (value, names) in numbers.sizes.items())
    by_line = {assumption.place: assumption for assumption in (*sizes, *_find_value_reads(caught), *counted)}
    return Capture(captured, node_scopes, unused_inputs, tuple(by_line.values()), notes=loops.notes)


def _export_with_torch(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    scopes: ModuleScopes,
    options: CaptureOptions,
    loops: TracedLoops,
) -> bytes:
    """Return the file torch's TorchScript exporter writes, with weights as inputs.

    Args:
        model: The prepared model.
        inputs: Input → example.
        forward: Its flat forward.
        scopes: Record the modules of operators.
        options: Options of the capture.
        loops: Record the loops over values in the forward.
    """
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


def _mend_bfloat16_casts(captured: ir.Model) -> None:
    """Replace casts to complex128 by casts to bfloat16, in place.

    torch writes torch's type number of bfloat16, which is ONNX's number of complex128; a graph holds complex numbers as
    pairs.
    """
    for node in captured.graph.all_nodes():
        target = node.attributes.get("to") if node.op_type == "Cast" else None
        if target is not None and target.as_int() == ir.DataType.COMPLEX128:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.BFLOAT16)
            node.outputs[0].dtype = ir.DataType.BFLOAT16


def _export_error(error: Exception, scopes: ModuleScopes, model: nn.Module, opset_version: int) -> ExportError:
    """Convert an exception of torch to an ExportError, with operator and module if known."""
    converted = operator_of_error(error, scopes)
    operator, module = converted or (None, module_of_error(error, model))
    scope = f" in module {module or '(the root)'}" if module is not None else ""
    if isinstance(error, UnsupportedOperatorError):
        # The exporter's message names a sufficient opset: "Support for this operator was added in version 18, …".
        newer = re.search(r"version (\d+), try", str(error))
        remedy = f"Use {opt.export_config} '{{\"opset_version\": {newer[1]}}}', or replace" if newer else "Replace"
        return ExportError(
            f"the TorchScript exporter has no ONNX form of {operator or error}{scope} at opset {opset_version}",
            hint=operator_remedy(module, f"{remedy} the operator in that module's forward by others."),
            operator=operator,
            module=module,
        )
    summary = f"operator {operator} could not be converted" if operator else "the model could not be traced"
    return ExportError(
        f"{summary}{scope}: {type(error).__name__}: {first_line(error)}",
        hint=f"The forward must run under torch.jit.trace with these inputs; {opt.debug} shows the full traceback.",
        operator=operator,
        module=module,
    )


def _find_value_reads(caught: Sequence[warnings.WarningMessage]) -> Iterator[Assumption]:
    """Yield the lines where the user's Python read a tensor's value during tracing.

    Lines of installed libraries are omitted: they mostly read shapes, and the user cannot change them. Lines that only
    assert are omitted too: they do not change the outputs.
    """
    for warning in caught:
        if not issubclass(warning.category, _TracerWarning) or "site-packages" in Path(warning.filename).parts:
            continue
        if not is_noted_elsewhere(warning.filename) and not asserts_only(warning.filename, warning.lineno):
            source_line = (Path(warning.filename).name, warning.lineno)
            takes_all = any(text in str(warning.message) for text in _TAKING_ALL)
            yield (assume_values if takes_all else assume_branch)(source_line)


def _attach_parameters(
    captured: ir.Model, model: nn.Module, input_names: Sequence[str], weights: Mapping[str, ir.TensorProtocol] | None
) -> None:
    """Turn the graph inputs that are parameters into initializers that refer to the model's tensors, in place.

    Raises:
        InternalError: a graph input is neither requested nor a tensor of the model.
    """
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
        value.meta[WEIGHT_ENTRY] = own_name
        graph.initializers[name] = value


def _names_for_torch(forward: FlatForward) -> list[str]:
    """Return the names of the inputs, without dots: torch counts a name that ends in a number on, past parameters'."""
    return accepted_names(forward.input_names, lambda name: "." not in name)


def _name_inputs(graph: ir.Graph, forward: FlatForward) -> None:
    """Restore the names of the inputs, in place; a parameter with the name of an input is renamed."""
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
    """Add the inputs that the exporter dropped as unused, in place; return their names."""
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


_SHORT_INTEGERS = (JitScalarType.BOOL, JitScalarType.UINT8, JitScalarType.INT8, JitScalarType.INT16, JitScalarType.INT)
"""Specified: integer types whose sums torch computes in 64 bits."""

_AXIS_END = torch.iinfo(torch.int64).max
"""Specified: the value Slice accepts as the end of any axis."""


@contextmanager
def further_operators(opset_version: int) -> Iterator[None]:
    """Register the symbolics below inside the block, except for operators registered by the user.

    Args:
        opset_version: The opset of the export.
    """
    registered_names = registry.all_functions()
    names = [name for name in _SYMBOLICS if not _is_user_operator(name, opset_version)]
    for name in names:
        registry.register(name, opset_version, _SYMBOLICS[name], custom=True)
    try:
        yield
    finally:
        for name in names:
            registry.unregister(name, opset_version)
            if name not in registered_names:
                # torch would leave an entry without symbolics, on which its own error message fails.
                del registry._registry[name]


def _is_user_operator(name: str, opset_version: int) -> bool:
    group = registry.get_function_group(name)
    symbolic = group.get(opset_version) if group is not None else None
    return symbolic is not None and not symbolic.__module__.startswith("torch.onnx.")


@symbolic_helper.parse_args("v", "i", "i", "v", "v")
def _diff_symbolic(graph: Any, values: object, times: int, axis: int, before: Any, after: object) -> Any:
    """``torch.diff``: differences of neighbouring values, ``times`` times; XOR for booleans.

    ``before`` and ``after`` are tensors joined to the values at both ends, as ``prepend`` and ``append`` of torch.
    """
    operands = [operand for operand in (before, values, after) if not symbolic_helper._is_none(operand)]
    differences = graph.op("Concat", *operands, axis_i=axis) if len(operands) > 1 else values
    operator = "Xor" if symbolic_helper._is_bool(values) else "Sub"
    for _ in range(times):
        later_values = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[1], ends=[_AXIS_END])
        earlier_values = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[0], ends=[-1])
        differences = graph.op(operator, later_values, earlier_values)
    return differences


def _cumsum_symbolic(graph: Any, values: Any, axis: object, dtype: object = None) -> Any:
    """Torch's symbolic, with sums of booleans and short integers in 64 bits, as torch computes them."""
    kind = JitScalarType.from_value(values, JitScalarType.UNDEFINED)
    if (dtype is None or symbolic_helper._is_none(dtype)) and kind in _SHORT_INTEGERS:
        values = graph.op("Cast", values, to_i=JitScalarType.INT64.onnx_type())
    return symbolic_opset11.cumsum(graph, values, axis, dtype)


class _TorchScriptBuilder:
    """Adds nodes to a graph of torch's exporter."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def op(self, operator: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node; torch wants the type of an attribute in its name."""
        return self._graph.op(operator, *inputs, **{f"{name}_i": value for name, value in attributes.items()})

    def number(self, value: float, like: Any, /) -> Any:
        """Return a constant of the dtype of a value."""
        return _float_constant(self._graph, value, like)

    def index(self, value: int) -> Any:
        """Return a constant of 64 bits."""
        return self._graph.op("Constant", value_t=torch.tensor(value))


def _adapt_exact_form(form: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt an exact form for float operands of one dtype to torch's symbolic signature."""

    def symbolic(graph: Any, *operands: Any) -> Any:
        return form(_TorchScriptBuilder(graph), *operands)

    return symbolic


def _log_symbolic(graph: Any, values: Any) -> Any:
    """Torch's symbolic, except for the log of a sigmoid: the sigmoid itself is rounded to 0 from -18 on."""
    node = values.node()
    if node.kind() == "onnx::Sigmoid":
        return exact_forms.log_sigmoid(_TorchScriptBuilder(graph), node.inputsAt(0))
    return symbolic_opset9.log(graph, values)


def _unflatten_symbolic(graph: Any, values: Any, axis: Any, sizes: Any) -> Any:
    """Torch's symbolic, with a 0 for each size before the axis, which ``Reshape`` copies.

    torch slices the shape of the tensor, and its shape inference then treats dynamic sizes as constants.
    """
    rank, position = symbolic_helper._get_tensor_rank(values), symbolic_helper._maybe_get_const(axis, "i")
    if rank is None or not isinstance(position, int):
        return symbolic_opset13.unflatten(graph, values, axis, sizes)
    position %= rank
    parts = [sizes]
    if position:
        parts.insert(0, graph.op("Constant", value_t=torch.zeros(position, dtype=torch.int64)))
    for later in range(position + 1, rank):
        size = symbolic_helper._size_helper(graph, values, graph.op("Constant", value_t=torch.tensor(later)))
        parts.append(symbolic_helper._unsqueeze_helper(graph, size, [0]))
    return graph.op("Reshape", values, graph.op("Concat", *parts, axis_i=0) if len(parts) > 1 else sizes)


def _cross_entropy_symbolic(graph: Any, x: Any, target: Any, weight: Any, positive_weight: Any, reduction: Any) -> Any:
    """``(1 - y) * x - w * log_sigmoid(x)`` with ``w = 1 + (positive_weight - 1) * y``; torch's form has sigmoids."""
    one, logarithm = _float_constant(graph, 1.0, x), exact_forms.log_sigmoid(_TorchScriptBuilder(graph), x)
    if not symbolic_helper._is_none(positive_weight):
        surplus = graph.op("Mul", graph.op("Sub", positive_weight, one), target)
        logarithm = graph.op("Mul", graph.op("Add", surplus, one), logarithm)
    loss = graph.op("Sub", graph.op("Mul", graph.op("Sub", one, target), x), logarithm)
    if not symbolic_helper._is_none(weight):
        loss = graph.op("Mul", loss, weight)
    mean, total = 1, 2
    kind = symbolic_helper._get_const(reduction, "i", "reduction")
    if kind == mean:
        return graph.op("ReduceMean", loss, keepdims_i=0)
    return symbolic_helper._reducesum_helper(graph, loss, keepdims_i=0) if kind == total else loss


def _softplus_symbolic(graph: Any, values: Any, beta: Any, threshold: Any) -> Any:
    """Torch's symbolic with a threshold; from the default of 20 on, the threshold has no effect in float32."""
    result = symbolic_opset9.softplus(graph, values, beta, threshold)
    factor, limit = (symbolic_helper._get_const(constant, "f", "number") for constant in (beta, threshold))
    if limit >= _SOFTPLUS_THRESHOLD:
        return result
    scaled = graph.op("Mul", values, _float_constant(graph, factor, values))
    return graph.op("Where", graph.op("Greater", scaled, _float_constant(graph, limit, values)), values, result)


_SOFTPLUS_THRESHOLD = 20
"""Specified by torch: the default of ``softplus``."""


_torch_prod = symbolic_helper._reduce_with_dtype_helper("ReduceProd", "prod", allow_multi_dim_support=False)


def _prod_symbolic(graph: Any, values: Any, *options: Any) -> Any:
    """Torch's symbolic; an integer product of known size wraps on overflow as torch's does."""
    axis = symbolic_helper._maybe_get_const(options[0], "i") if len(options) > 1 else None
    rank = symbolic_helper._get_tensor_rank(values)
    size = symbolic_helper._get_tensor_dim_size(values, axis) if rank and isinstance(axis, int) else None
    is_integer = JitScalarType.from_value(values, JitScalarType.UNDEFINED) == JitScalarType.INT64
    if not rank or axis is None or not size or size > exact_forms.MOST_FACTORS or not is_integer:
        return _torch_prod(graph, values, *options)
    result = exact_forms.product(_TorchScriptBuilder(graph), values, axis % rank, size)
    keeps_axis = symbolic_helper._maybe_get_const(options[1], "i")
    return symbolic_helper._unsqueeze_helper(graph, result, [axis % rank]) if keeps_axis else result


@symbolic_helper.parse_args("v", "v", "i", "f")
def _cosine_similarity_symbolic(graph: Any, x1: object, x2: object, axis: int, eps: float) -> Any:
    """Product of two unit vectors; torch's symbolic compares the product of both norms with ``eps``."""
    units = []
    for values in (x1, x2):
        norm = graph.op(
            "Sqrt", symbolic_helper._reducesum_helper(graph, graph.op("Mul", values, values), axes_i=[axis])
        )
        units.append(graph.op("Div", values, graph.op("Max", norm, _float_constant(graph, eps, values))))
    return symbolic_helper._reducesum_helper(graph, graph.op("Mul", *units), axes_i=[axis], keepdims_i=0)


_INTEGERS = (JitScalarType.UINT8, JitScalarType.INT8, JitScalarType.INT16, JitScalarType.INT, JitScalarType.INT64)
"""Ordered by number of bits."""


def _exact_division(form: Callable[..., Any], of_integers: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a symbolic of two operands of any dtypes.

    Args:
        form: Exact form for two floats of one dtype.
        of_integers: Symbolic for two integers.
    """

    def symbolic(graph: Any, values: Any, divisor: Any) -> Any:
        if symbolic_helper._is_fp(values) or symbolic_helper._is_fp(divisor):
            return form(_TorchScriptBuilder(graph), *_cast_to_floats(graph, values, divisor))
        return of_integers(graph, values, divisor)

    return symbolic


def _cast_to_floats(graph: Any, *operands: Any) -> list[Any]:
    """Return operands in the dtype in which torch computes with them: a number does not widen a tensor."""
    kinds = [JitScalarType.from_value(term, JitScalarType.FLOAT) for term in operands]
    tensors = [kind for term, kind in zip(operands, kinds, strict=True) if symbolic_helper._get_tensor_rank(term) != 0]
    floats = [kind for kind in tensors or kinds if kind in _FLOATS]
    kind = max(floats, key=_FLOATS.index) if floats else JitScalarType.FLOAT
    return [
        term if own_kind == kind else graph.op("Cast", term, to_i=kind.onnx_type())
        for term, own_kind in zip(operands, kinds, strict=True)
    ]


_FLOATS = (JitScalarType.BFLOAT16, JitScalarType.HALF, JitScalarType.FLOAT, JitScalarType.DOUBLE)
"""Ordered by precision."""


def _floor_divide_integers(graph: Any, values: Any, divisor: Any) -> Any:
    """``a // b`` towards minus infinity; torch's own form rounds towards zero.

    Raises:
        UnsupportedOperatorError: an operand is no integer tensor.
    """
    kinds = [JitScalarType.from_value(term, JitScalarType.INT64) for term in (values, divisor)]
    if not set(kinds) <= {*_INTEGERS}:
        raise UnsupportedOperatorError("aten::floor_divide", graph.opset, None)
    ranks = [symbolic_helper._get_tensor_rank(term) for term in (values, divisor)]
    kind = max(kinds, key=_INTEGERS.index)
    if 0 in ranks and ranks != [0, 0]:  # a number does not widen a tensor
        kind = kinds[ranks.index(0) - 1]
    values, divisor = (
        term if own_kind == kind else graph.op("Cast", term, to_i=kind.onnx_type())
        for term, own_kind in zip((values, divisor), kinds, strict=True)
    )
    quotient = graph.op("Div", values, divisor)
    if kind == JitScalarType.UINT8 or (_is_never_negative(values) and _is_never_negative(divisor)):
        return quotient
    zero = graph.op("Constant", value_t=torch.tensor(0, dtype=kind.dtype()))
    remainder = graph.op("Sub", values, graph.op("Mul", quotient, divisor))
    is_below = graph.op("Xor", graph.op("Less", remainder, zero), graph.op("Less", divisor, zero))
    is_over = graph.op("And", graph.op("Not", graph.op("Equal", remainder, zero)), is_below)
    return graph.op("Sub", quotient, graph.op("Cast", is_over, to_i=kind.onnx_type()))


def _is_never_negative(value: Any) -> bool:
    """Return True if a number is made of sizes and of constants that are not negative, by sums and products alone."""
    node = value.node()
    kind = node.kind()
    if kind == "onnx::Constant":
        return bool((node.t("value") >= 0).all()) if "value" in node.attributeNames() else False
    if kind in ("onnx::Shape", "onnx::Size"):
        return True
    if kind in ("onnx::Gather", "onnx::Cast", "onnx::Squeeze", "onnx::Unsqueeze", "onnx::Slice"):
        return _is_never_negative(node.inputsAt(0))
    return kind in ("onnx::Add", "onnx::Mul", "onnx::Div") and all(map(_is_never_negative, node.inputs()))


_floor_divide_symbolic = _exact_division(exact_forms.floor_divide, _floor_divide_integers)
_trunc_divide_symbolic = _exact_division(exact_forms.trunc_divide, symbolic_opset9._trunc_divide)
_remainder_symbolic = _exact_division(exact_forms.remainder, symbolic_opset11.remainder)


def _divide_symbolic(graph: Any, values: Any, divisor: Any, *rounding: Any) -> Any:
    """Divide, and round the quotient if a mode is passed."""
    mode = symbolic_helper._get_const(rounding[0], "s", "rounding_mode") if rounding else None
    if mode is None:
        return symbolic_opset9.true_divide(graph, values, divisor)
    return (_floor_divide_symbolic if mode == "floor" else _trunc_divide_symbolic)(graph, values, divisor)


def _rshift_symbolic(graph: Any, values: Any, places: Any) -> Any:
    """``a >> b``, as a floor division by a power of two; torch's own form rounds towards zero."""
    kind = JitScalarType.from_value(values)
    powers = graph.op("Pow", graph.op("Constant", value_t=torch.tensor(2.0)), graph.op("Cast", places, to_i=_FLOAT))
    return _floor_divide_symbolic(graph, values, graph.op("Cast", powers, to_i=kind.onnx_type()))


_FLOAT = JitScalarType.FLOAT.onnx_type()


def _as_strided_symbolic(graph: Any, values: Any, *places: object) -> Any:
    """Like torch's own form, which assumes contiguous memory, applied to the values in memory order."""
    strides, sizes = values.type().strides(), values.type().sizes()
    if strides is None:
        return symbolic_opset9.as_strided(graph, values, *places)
    # An axis of size 1 may have any position; sizes are unknown if the forward computes them.
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    if sizes is not None and not _fills_memory([(sizes[axis], strides[axis]) for axis in order]):
        raise UnsupportedOperatorError("aten::as_strided", graph.opset, None)
    ordered = values if order == sorted(order) else graph.op("Transpose", values, perm_i=order)
    return symbolic_opset9.as_strided(graph, ordered, *places)


def _fills_memory(axes: Sequence[tuple[int, int]]) -> bool:
    """Return True if axes of ``(size, stride)``, outermost first, cover memory without gaps and overlaps."""
    expected = 1
    for size, stride in reversed(axes):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@symbolic_helper.parse_args("v", "is")
def _permute_symbolic(graph: object, values: object, axes: Sequence[int]) -> Any:
    """Torch's symbolic with non-negative axes; ONNX does not allow negative axes in Transpose."""
    return symbolic_opset9.permute(graph, values, [axis % len(axes) for axis in axes])


@symbolic_helper.quantized_args(True)
def _reshape_symbolic(graph: Any, values: object, shape: Any) -> Any:
    """Like torch's own form, in which a size of 0 always copies the input's size; here 0 means 0 (``allowzero``)."""
    sizes = symbolic_helper._maybe_get_const(shape, "is")
    if symbolic_helper._is_value(sizes):
        size_values = symbolic_helper._unpack_list(sizes) if symbolic_helper._is_packed_list(sizes) else ()
        sizes = [symbolic_helper._maybe_get_const(size_value, "i") for size_value in size_values]
    return symbolic_helper._reshape_helper(graph, values, shape, allowzero=int(graph.opset >= 14 and 0 in sizes))


def _repeat_interleave_symbolic(graph: Any, values: object, repeats: Any, axis: object = None, *size: Any) -> Any:
    """Torch's symbolic, corrected for negative axes: torch's changes every constant with that value."""
    torch_symbolics = symbolic_opset13 if graph.opset >= 13 else symbolic_opset9
    number = None if axis is None or symbolic_helper._is_none(axis) else symbolic_helper._get_const(axis, "i", "dim")
    if (symbolic_helper._get_tensor_sizes(repeats) or [None])[0] not in (None, 1):
        return _repeat_by_counts(graph, values, repeats, number)
    axis = axis if number is None else graph.op("Constant", value_t=torch.tensor(number))
    return torch_symbolics.repeat_interleave(graph, values, repeats, axis, *size)


def _repeat_by_counts(graph: Any, values: object, counts: Any, axis: int | None) -> Any:
    """Repeat each position by its count; torch's symbolic repeats a position of count 0 once."""
    integer = JitScalarType.INT64.onnx_type()
    zero, one = (graph.op("Constant", value_t=torch.tensor(number)) for number in (0, 1))
    counts = graph.op("Cast", counts, to_i=integer)
    total = symbolic_helper._reducesum_helper(graph, counts, axes_i=[0], keepdims_i=0)
    column = symbolic_helper._unsqueeze_helper(graph, graph.op("Range", zero, total, one), [1])
    is_over = graph.op("Not", graph.op("Greater", graph.op("CumSum", counts, zero), column))
    places = symbolic_helper._reducesum_helper(graph, graph.op("Cast", is_over, to_i=integer), axes_i=[1], keepdims_i=0)
    flat = symbolic_helper._reshape_helper(graph, values, [-1]) if axis is None else values
    return graph.op("Gather", flat, places, axis_i=axis or 0)


def _index_put_symbolic(graph: Any, values: object, places: Any, new_values: Any, adds: Any = None) -> Any:
    """Torch's symbolic, except for empty values, for which torch's crashes the process by a division by zero."""
    indices = symbolic_helper._unpack_list(places)
    if 0 not in (new_values.type().sizes() or ()):
        return symbolic_opset11.index_put(graph, values, places, new_values, *(() if adds is None else (adds,)))
    kind = JitScalarType.from_value(indices[0], JitScalarType.UNDEFINED)
    is_plain = len(indices) == 1 and symbolic_helper._get_tensor_rank(indices[0]) == 1 and kind == JitScalarType.INT64
    if not is_plain or symbolic_helper._maybe_get_const(adds, "b"):
        raise UnsupportedOperatorError("aten::index_put", graph.opset, None)
    return graph.op("ScatterND", values, symbolic_helper._unsqueeze_helper(graph, indices[0], [-1]), new_values)


def _attention_symbolic(graph: Any, query: Any, key: object, value: Any, *options: object) -> Any:
    """Torch's symbolic, extended by grouped-query attention (``enable_gqa``).

    For 16-bit scores, masks stay in 16 bits: torch's symbolic converts a boolean or causal mask, and so the scores, to
    float32, while the weights after the scores have 16 bits.
    """
    kind = JitScalarType.from_value(query, JitScalarType.UNDEFINED)
    if kind in (JitScalarType.HALF, JitScalarType.BFLOAT16):
        graph = _WithMasksOf(graph, kind.dtype())
    if symbolic_helper._get_const(options[-1], "b", "enable_gqa"):
        heads = symbolic_helper._get_tensor_dim_size(query, -3)
        key, value = (_repeat_heads(graph, operand, heads) for operand in (key, value))
    return symbolic_opset14.scaled_dot_product_attention(graph, query, key, value, *options[:-1])


class _WithMasksOf:
    """A graph in which constants of masks have a chosen dtype."""

    def __init__(self, graph: Any, dtype: torch.dtype) -> None:
        self._graph = graph
        self._dtype = dtype

    def op(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        """Add a node."""
        value = attributes.get("value_t")
        # These are exact in every dtype.
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.tolist() in ([0], [1], [-math.inf])
        ):
            attributes["value_t"] = value.to(self._dtype)
        return self._graph.op(name, *inputs, **attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _repeat_heads(graph: Any, values: Any, heads: int | None) -> Any:
    """Repeat each head equally often, up to ``heads`` heads."""
    rank, own_heads = symbolic_helper._get_tensor_rank(values), symbolic_helper._get_tensor_dim_size(values, -3)
    if rank is None or own_heads is None or heads is None:
        raise UnsupportedOperatorError("aten::scaled_dot_product_attention", graph.opset, None)
    places = torch.arange(own_heads).repeat_interleave(heads // own_heads)
    return graph.op("Gather", values, graph.op("Constant", value_t=places), axis_i=rank - 3)


@symbolic_helper.parse_args("v", "i", "f", "f")
def _histc_symbolic(graph: Any, values: Any, bins: int, lowest: float, highest: float) -> Any:
    """``torch.histc`` over a constant range: count the values in each of ``bins`` equal bins, rounded as in torch."""
    if lowest >= highest:
        # torch then takes the range from the values.
        raise UnsupportedOperatorError("aten::histc", graph.opset, None)
    column = symbolic_helper._reshape_helper(graph, values, [-1, 1])
    bottom, top = (_float_constant(graph, end, values) for end in (lowest, highest))
    scaled_offsets = graph.op("Mul", graph.op("Sub", column, bottom), _float_constant(graph, float(bins), values))
    scaled = graph.op("Div", scaled_offsets, _float_constant(graph, highest - lowest, values))
    # The end of the range belongs to the last bin.
    last_bin, no_bin = (_float_constant(graph, number, values) for number in (bins - 1.0, -1.0))
    bin_index = graph.op("Where", graph.op("Equal", column, top), last_bin, graph.op("Floor", scaled))
    bin_index = graph.op("Where", graph.op("Greater", column, top), no_bin, bin_index)
    numbers = graph.op("Constant", value_t=torch.arange(bins).to(JitScalarType.from_value(values).dtype()))
    matches = graph.op("Cast", graph.op("Equal", bin_index, numbers), to_i=JitScalarType.from_value(values).onnx_type())
    return symbolic_helper._reducesum_helper(graph, matches, axes_i=[0], keepdims_i=0)


def _grouped_product_symbolic(graph: Any, rows: Any, matrices: Any, ends: Any, *options: Any) -> Any:
    """Multiply each row by the matrix of its group; rows are sorted by group, ``ends`` has the end of each group."""
    groups = symbolic_helper._get_tensor_dim_size(matrices, 0)
    ranks = [symbolic_helper._get_tensor_rank(operand) for operand in (rows, matrices)]
    if ranks != [2, 3] or groups is None or not all(map(symbolic_helper._is_none, options)):
        # Groups of columns, batched groups, or an explicit dtype.
        raise UnsupportedOperatorError("aten::_grouped_mm", graph.opset, None)
    zero = graph.op("Constant", value_t=torch.tensor([0]))
    bounds = graph.op("Concat", zero, graph.op("Cast", ends, to_i=JitScalarType.INT64.onnx_type()), axis_i=0)
    positions = [graph.op("Constant", value_t=torch.tensor([position])) for position in range(groups + 1)]
    bounds = [graph.op("Gather", bounds, position, axis_i=0) for position in positions]
    products = []
    for group in range(groups):
        members = graph.op("Slice", rows, bounds[group], bounds[group + 1], zero)
        matrix = graph.op("Gather", matrices, graph.op("Constant", value_t=torch.tensor(group)), axis_i=0)
        products.append(graph.op("MatMul", members, matrix))
    return graph.op("Concat", *products, axis_i=0)


def _antialiased_resize_symbolic(kind: str) -> Callable[..., Any]:
    """Return the symbolic of torch's antialiased resizing between constant sizes.

    Resizing is linear: a product with one matrix for the rows and one for the columns. torch computes each matrix by
    resizing the identity.
    """
    name = f"_upsample_{kind}2d_aa"

    @symbolic_helper.parse_args("v", "is", "b", "fs")
    def resize(
        graph: Any, images: Any, sizes: Sequence[int] | None, aligned: bool, factors: Sequence[float] | None
    ) -> Any:
        operator, dtype = getattr(torch.ops.aten, name), JitScalarType.from_value(images).dtype()
        matrices = []
        for axis in (-2, -1):
            size = symbolic_helper._get_tensor_dim_size(images, axis)
            if size is None:
                raise UnsupportedOperatorError(f"aten::{name}", graph.opset, None)
            output_size, factor = ([sizes[axis], size] if sizes else None), ([factors[axis], 1.0] if factors else None)
            matrix = operator(torch.eye(size)[None, None], output_size, aligned, factor)[0, 0]
            matrices.append(matrix.to(dtype))
        rows, columns = (graph.op("Constant", value_t=matrix) for matrix in (matrices[0], matrices[1].T.contiguous()))
        return graph.op("MatMul", rows, graph.op("MatMul", images, columns))

    return resize


def _float_constant(graph: Any, value: float, reference: Any) -> Any:
    return graph.op("Constant", value_t=torch.tensor(value, dtype=JitScalarType.from_value(reference).dtype()))


_SYMBOLICS: Mapping[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_product_symbolic,
    "aten::_upsample_bicubic2d_aa": _antialiased_resize_symbolic("bicubic"),
    "aten::_upsample_bilinear2d_aa": _antialiased_resize_symbolic("bilinear"),
    "aten::__rshift_": _rshift_symbolic,
    "aten::as_strided": _as_strided_symbolic,
    "aten::atan2": _adapt_exact_form(exact_forms.atan2),
    "aten::binary_cross_entropy_with_logits": _cross_entropy_symbolic,
    "aten::cosine_similarity": _cosine_similarity_symbolic,
    "aten::cumsum": _cumsum_symbolic,
    "aten::diff": _diff_symbolic,
    "aten::div": _divide_symbolic,
    "aten::erfc": _adapt_exact_form(exact_forms.erfc),
    "aten::erfinv": _adapt_exact_form(exact_forms.erfinv),
    "aten::expm1": _adapt_exact_form(exact_forms.expm1),
    "aten::floor_divide": _floor_divide_symbolic,
    "aten::histc": _histc_symbolic,
    "aten::index_put": _index_put_symbolic,
    "aten::log": _log_symbolic,
    "aten::log1p": _adapt_exact_form(exact_forms.log1p),
    "aten::log_sigmoid": _adapt_exact_form(exact_forms.log_sigmoid),
    "aten::logaddexp": _adapt_exact_form(exact_forms.logaddexp),
    "aten::logaddexp2": _adapt_exact_form(exact_forms.logaddexp2),
    "aten::permute": _permute_symbolic,
    "aten::prod": _prod_symbolic,
    "aten::remainder": _remainder_symbolic,
    "aten::repeat_interleave": _repeat_interleave_symbolic,
    "aten::reshape": _reshape_symbolic,
    "aten::scaled_dot_product_attention": _attention_symbolic,
    "aten::softplus": _softplus_symbolic,
    "aten::special_erfc": _adapt_exact_form(exact_forms.erfc),
    "aten::special_erfcx": _adapt_exact_form(exact_forms.erfcx),
    "aten::special_erfinv": _adapt_exact_form(exact_forms.erfinv),
    "aten::unflatten": _unflatten_symbolic,
    "aten::view": _reshape_symbolic,
    "transformers::grouped_mm_fallback": _grouped_product_symbolic,
}
