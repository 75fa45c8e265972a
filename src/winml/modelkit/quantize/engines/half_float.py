"""Computes nodes in float16, or keeps their weights in 16-bit floating point.

Works on the graph alone; each weight is converted when the result is written. Before / After, for a node in float16
between nodes that stay float32::

    x32 → MatMul → y32                      x32 → Cast → x16 → MatMul → y16 → Cast → y32
    weight32 → MatMul                       weight16 → MatMul

and for bfloat16, for which ONNX Runtime's CPU provider has few kernels::

    weight32 → MatMul                       weightb16 → Cast → weight32 → MatMul

The installed ONNX Runtime lists the types of each operator; without a kernel of the provider, it computes such an
operator in float32. Positions stay float32 up to the sine or the index that is computed from them. Inputs and outputs
of the graph stay as they are. ``onnxruntime.transformers.float16`` is not used: it needs the values
of the weights, and if two nodes that stay float32 read one value, it writes two nodes with one output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.quantize.engines.block_quantizers import values_in_file
from winml.modelkit.quantize.engines.integer_weights import WeightUse
from winml.modelkit.quantize.planning import EngineTask

_HALF_STEP = float(np.finfo(np.float16).smallest_subnormal)


class _HalfTensor(ir.LazyTensor):
    """A float32 tensor as float16 or bfloat16; nothing is read until it is written.

    A finite value beyond the range of float16 becomes the end of the range, and a value that would round to zero the
    smallest subnormal, so that masks stay finite and no divisor is zero. Infinity, which masks contain, stays; a weight
    with NaN is refused while it is written.
    """

    def __init__(self, tensor: ir.TensorProtocol, dtype: ir.DataType, name: str, use: WeightUse) -> None:
        """Refer to the tensor; ``use`` says of which weight, for messages."""
        super().__init__(self._read, dtype, ir.Shape(tensor.shape.numpy(), frozen=True), name=name)
        self._tensor32 = tensor
        self._use = use
        self.clipped = 0
        """How many values were beyond the range when the tensor was read last."""

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of all values, one piece in memory at a time where they lie in a file.

        Raises:
            QuantizeError: there is NaN among them.
        """
        self.clipped = 0
        for piece in self._pieces():
            file.write(np.ascontiguousarray(self._narrowed(piece)).view(np.uint8).data)

    def _pieces(self) -> Iterator[Array]:
        stored = values_in_file(self._tensor32)
        if stored is None:
            yield self._tensor32.numpy().reshape(-1)
        else:
            yield from (piece.astype(np.float32, copy=False) for piece in stored.pieces())

    def _read(self) -> ir.TensorProtocol:
        self.clipped = 0
        values = self._narrowed(self._tensor32.numpy())
        return ir.Tensor(np.ascontiguousarray(values), dtype=self.dtype, name=self.name)

    def _narrowed(self, values: Array) -> Array:
        if self._tensor32.size > 1:  # a single one may stand for what is missing
            self._use.refuse_nan(values)
        if self.dtype == ir.DataType.BFLOAT16:
            return values.astype(self.dtype.numpy())  # the range of float32
        beyond = np.isfinite(values) & (np.abs(values) > _HALF_END)
        self.clipped += int(np.count_nonzero(beyond))
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        halves[beyond] = np.copysign(_HALF_END, values[beyond])
        vanished = (halves == 0) & (values != 0)
        halves[vanished] = np.copysign(_HALF_STEP, values[vanished])
        return halves


def clipped_values(model: ir.Model) -> int:
    """Return how many weights of a model that was written were beyond the range of float16."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.clipped for tensor in tensors if isinstance(tensor, _HalfTensor))


_FLOAT, _HALF, _BRAIN = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
_SMALL_BYTES = 4096
"""Tensors below this size are stored twice where nodes of both kinds read them, and stay float32 beside bfloat16.
Chosen: a Cast costs more than they do."""


def convert_floats(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 16-bit floating point; the given model is not changed."""
    converted = model.clone()
    if ir.DataType[task.precision.float_type] == _BRAIN:
        _keep_weights_in_brain_floats(converted.graph, task.nodes)
    else:
        _Halving(converted, task.nodes).run()
    return converted


def _keep_weights_in_brain_floats(graph: ir.Graph, names: frozenset[str]) -> None:
    """Store the weights that only the named nodes read in bfloat16, with a Cast behind each, in place."""
    first, fresh = next(iter(graph), None), FreshNames.of_graph(graph)
    for value in list(graph.initializers.values()):
        tensor, readers = value.const_value, [node for node, _ in value.uses()]
        if tensor is None or tensor.dtype != _FLOAT or tensor.nbytes < _SMALL_BYTES or _has_fixed_type(value):
            continue
        if first is None or not readers or any(node.name not in names for node in readers):
            continue
        use = WeightUse.of(value, readers[0])
        narrow = add_initializer(graph, _HalfTensor(tensor, _BRAIN, fresh.take(f"{value.name}_bf16"), use))
        cast = cast_node(narrow, _FLOAT, readers[0], fresh)
        graph.insert_before(first, cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.initializers.pop(value.name or "")


class _Halving:
    """One model whose nodes are to compute in float16, in place."""

    def __init__(self, model: ir.Model, names: frozenset[str]) -> None:
        self._graph = model.graph
        self._halves = _half_precision_nodes(model, names)
        self._first = next(iter(model.graph), None)
        self._fresh = FreshNames.of_graph(model.graph)

    def run(self) -> None:
        """Convert weights, inputs and outputs of the nodes, with a Cast wherever float32 and float16 meet."""
        values = {value: None for node in self._halves for value in node.inputs if value is not None}
        for node in self._halves:
            _set_attributes(node)
        for value in sorted(values, key=lambda value: value.name or ""):
            if value.dtype != _FLOAT or value.producer() in self._halves:
                continue
            if value.is_initializer() and not _has_fixed_type(value):
                self._convert_weight(value)
            else:
                self._redirect(value, _HALF, [node for node, _ in value.uses() if node in self._halves])
        for node in [node for node in self._graph if node in self._halves]:
            for value in node.outputs:
                if value.dtype == _FLOAT:
                    self._convert_output(value)

    def _convert_weight(self, value: ir.Value) -> None:
        tensor = value.const_value
        assert tensor is not None
        readers = [node for node, _ in value.uses()]
        inside = [node for node in readers if node in self._halves]
        if len(inside) < len(readers) and tensor.nbytes >= _SMALL_BYTES:
            self._redirect(value, _HALF, inside)  # stored once, in the precision that others need
            return
        use = WeightUse.of(value, inside[0])
        narrow = add_initializer(self._graph, _HalfTensor(tensor, _HALF, self._fresh.take(f"{value.name}_fp16"), use))
        _replace_uses(value, narrow, inside)
        if len(inside) == len(readers):
            self._graph.initializers.pop(value.name or "")

    def _convert_output(self, value: ir.Value) -> None:
        """Give an output of a node in float16 its type, and everything else that reads it a Cast of it."""
        value.type = ir.TensorType(_HALF)
        outside = [node for node, _ in value.uses() if node not in self._halves]
        maker = value.producer()
        assert maker is not None
        if not outside and not value.is_graph_output():
            return
        name = value.name or ""
        value.name = self._fresh.take(f"{name}_fp16")
        cast = cast_node(value, _FLOAT, maker, self._fresh, name)
        self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], outside)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = cast.outputs[0]

    def _redirect(self, value: ir.Value, dtype: ir.DataType, readers: list[ir.Node]) -> None:
        """Let nodes read a value in another type."""
        maker = value.producer()
        assert self._first is not None
        cast = cast_node(value, dtype, maker or readers[0], self._fresh)
        if maker is None:
            self._graph.insert_before(self._first, cast)
        else:
            self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], readers)


def _replace_uses(value: ir.Value, other: ir.Value, readers: Iterable[ir.Node]) -> None:
    chosen = set(readers)
    for node, position in list(value.uses()):
        if node in chosen:
            node.replace_input_with(position, other)


def _has_fixed_type(value: ir.Value) -> bool:
    return value.is_graph_input() or value.is_graph_output()


def _set_attributes(node: ir.Node) -> None:
    """Let a node whose type an attribute says make float16."""
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(_HALF))
    elif node.op_type == "ConstantOfShape":
        passed = node.attributes.get("value")
        values = passed.as_tensor().numpy() if passed is not None else np.zeros(1, np.float32)
        half = np.clip(values, np.finfo(np.float16).min, np.finfo(np.float16).max).astype(np.float16)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(half))


_HALF_END = float(np.finfo(np.float16).max)
"""Largest value of float16."""
_WIDE_OPERATORS = frozenset({
    "Cos", "CumSum", "Exp", "Log", "Pow", "Range", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceMean",
    "ReduceSum", "ReduceSumSquare", "Sin", "Sqrt",
})  # fmt: skip
"""Operators that stay float32. Chosen: the square of 256 is more than float16 holds, norms square activations, and
angles and counts beyond 2048 are no whole numbers any more."""
_CARRYING = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that stay float32 between those, such as the sum with epsilon before a square root, and behind the
conversion of positions, whose differences float16 would lose."""
_EXACT_OPERATORS = frozenset({"Cos", "Sin"})
"""Operators that stay float32 with what computes their operand. Measured: of positions up to 2047 in float16, the
cosine of rotary embeddings is wrong by up to 0.32."""
_MOVING = frozenset({
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_POSITIONAL = _CARRYING | _MOVING | {"Abs", "Einsum", "Floor", "MatMul", "Max", "Min", "Mod", "Neg", "Where"}
"""Operators that compute positions and angles, and stay float32 where that is what they do."""
_LARGEST_POSITIONAL_BYTES = 1 << 16
"""Chosen: an operator with a larger constant is a layer. Frequencies of a head take a few hundred bytes."""
_TYPED_BY_ATTRIBUTE = frozenset({
    "Bernoulli", "Constant", "EyeLike", "If", "Loop", "Multinomial", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike", "Scan", "SequenceEmpty",
})  # fmt: skip
"""Operators whose types an attribute says, or a graph inside. They stay float32."""
_CASTS = ("Cast", "CastLike")
"""Operators that stay float32 unless that is what they make: one that makes indices is to read exact numbers."""
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_HALF_NAME = "tensor(float16)"


def _half_precision_nodes(model: ir.Model, names: frozenset[str]) -> frozenset[ir.Node]:
    """Return the nodes of the main graph, among the named ones, that can compute in float16 and do so safely.

    Values without a type get the one that follows from the operators, in place: onnx knows no operators of others.
    """
    _complete_types(model)
    halves: set[ir.Node] = set()
    wide = _positional_nodes(model.graph)
    for node in model.graph:
        if node.name not in names or node.op_identifier() in model.functions:
            continue
        if node in wide or _crashes_in_half(node):
            continue
        if node.op_type in _WIDE_OPERATORS or _counts(node) or (node.op_type in _CARRYING and _is_all_wide(node, wide)):
            wide.add(node)
        elif _has_half_form(node, model.opset_imports):
            halves.add(node)
    return frozenset(halves)


def _crashes_in_half(node: ir.Node) -> bool:
    """Return True for a Transpose that moves the first axis back, before a MatMul.

    Measured: in float16, ONNX Runtime 1.31 fuses the two into a FusedMatMul with ``transBatchA`` and crashes.
    """
    if node.op_type != "Transpose" or not any(user.op_type == "MatMul" for user, _ in node.outputs[0].uses()):
        return False
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    others = [axis for axis in order if axis != 0]
    return len(order) > 2 and order[0] != 0 and others == sorted(others)


def _positional_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that compute what a sine, a cosine or a conversion to integers reads, these not included."""
    waiting = [
        node.inputs[0] for node in graph.all_nodes() if node.op_type in _EXACT_OPERATORS or _makes_integers(node)
    ]
    positional: set[ir.Node] = set()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or value is None or value.dtype != ir.DataType.FLOAT or node in positional:
            continue
        if node.op_type in _POSITIONAL and not _is_layer(node):
            positional.add(node)
            waiting += node.inputs
    return positional


def _makes_integers(node: ir.Node) -> bool:
    """Say whether a node converts floats to integers, as where an index is computed."""
    read, created = node.inputs[0] if node.inputs else None, node.outputs[0].dtype if node.outputs else None
    return node.op_type == "Cast" and read is not None and read.dtype == ir.DataType.FLOAT and created in _INTEGERS


def _is_layer(node: ir.Node) -> bool:
    """Say whether a node has a weight, rather than some frequencies."""
    tensors = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    return any(tensor is not None and tensor.nbytes > _LARGEST_POSITIONAL_BYTES for tensor in tensors)


def _complete_types(model: ir.Model) -> None:
    for node in model.graph:
        if all(value.dtype is not None for value in node.outputs):
            continue
        if node.op_type == "Cast":
            node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
            continue
        schema = _schema_of(node, model.opset_imports)
        if schema is None:
            continue
        known = {name: value.dtype for name, value in _formal_types(node, schema) if value.dtype is not None}
        for name, value in _formal_types(node, schema):
            if value.dtype is None and (dtype := known.get(name)) is not None:
                value.type = ir.TensorType(dtype)


def _counts(node: ir.Node) -> bool:
    """Say whether a node converts integers that may be too many for float16, such as positions, to floats."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype in _INTEGERS


def _is_all_wide(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Say whether what a node computes from comes from wide nodes only, and float16 can hold what it computes with.

    The lowest number of float32, which masks are made of, becomes that of float16 in a node that computes in it, and
    minus infinity behind one that does not.
    """
    constants = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    if any(tensor is None or _is_beyond_half(tensor) for tensor in constants):
        return False
    makers = [value.producer() for value in node.inputs if value is not None and not value.is_initializer()]
    return bool(makers) and all(maker in wide for maker in makers)


def _is_beyond_half(tensor: ir.TensorProtocol) -> bool:
    """Say whether a tensor has values that float16 does not hold, or too many to look at."""
    if tensor.nbytes > _LARGEST_POSITIONAL_BYTES:
        return True
    return bool((np.abs(tensor.numpy().astype(np.float32)) > _HALF_END).any())


def _has_half_form(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Say whether every float32 value that a node reads or makes may be float16."""
    if node.op_type in _TYPED_BY_ATTRIBUTE or (node.op_type in _CASTS and node.outputs[0].dtype != ir.DataType.FLOAT):
        return False
    schema = _schema_of(node, opsets)
    if schema is None:
        return False
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}
    types = {name for name, value in _formal_types(node, schema) if value.dtype == ir.DataType.FLOAT}
    return bool(types) and all(_HALF_NAME in allowed.get(name, {name}) for name in types)


def _formal_types(node: ir.Node, schema: Any) -> Iterator[tuple[str, ir.Value]]:
    """Yield the values of a node with the type its operator's description gives them."""
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for position, value in enumerate(values):
            if value is not None and formals:
                yield formals[min(position, len(formals) - 1)].typeStr, value


def _schema_of(node: ir.Node, opsets: Mapping[str, int]) -> Any:
    version = opsets.get(node.domain, 1)
    versions = _schemas().get((node.domain, node.op_type), {})
    return versions.get(max((since for since in versions if since <= version), default=0))


@functools.cache
def _schemas() -> Mapping[tuple[str, str], Mapping[int, Any]]:
    """Return the descriptions of operators: by domain and name, those since each version."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in onnxruntime_pybind11_state.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    return schemas
