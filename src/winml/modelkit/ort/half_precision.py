"""Conversion of the nodes of a graph to float16, or of its weights to bfloat16.

Works on the graph alone; each weight is converted when the result is written. Before / After, for a node in float16
between nodes that stay float32::

    x32 → MatMul → y32                      x32 → Cast → x16 → MatMul → y16 → Cast → y32
    weight32 → MatMul                       weight16 → MatMul

The schemas of the installed ONNX Runtime list the types of each operator. Without a float16 kernel of the provider,
ONNX Runtime computes an operator in float32. Positions stay float32 up to the sine or the index that is computed from
them. ``onnxruntime.transformers.float16`` is not used: it needs the values of the weights, and if two nodes that stay
float32 read one value, it writes two nodes with one output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.files.stored_tensors import values_in_file
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.onnx.widening import WidenedTensor

_HALF_STEP = float(np.finfo(np.float16).smallest_subnormal)


class NarrowTensor(ir.LazyTensor):
    """A float32 tensor as float16 or bfloat16, read lazily when written.

    A finite value beyond the range of float16 becomes the end of the range, so that masks stay finite. A value that
    would round to zero becomes the smallest subnormal, so that no divisor is zero. Infinity, which masks contain,
    stays; a weight with NaN may be refused while it is written.
    """

    def __init__(
        self, tensor: ir.TensorProtocol, dtype: ir.DataType, name: str, refuse_nan: Callable[[Array], None] | None
    ) -> None:
        """Store the reference to the tensor; ``refuse_nan`` raises an error for values that contain NaN."""
        super().__init__(self._read, dtype, ir.Shape(tensor.shape.numpy(), frozen=True), name=name)
        self._tensor32 = tensor
        self._refuse_nan = refuse_nan
        self.clipped = 0
        """Number of values beyond the range in the last read."""

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of all values; tensors stored in a file are read in pieces.

        Raises:
            WinMLError: a value is NaN, which ``refuse_nan`` refuses.
        """
        self.clipped = 0
        for piece in self._pieces():
            file.write(np.ascontiguousarray(self._narrow(piece)).view(np.uint8).data)

    def _pieces(self) -> Iterator[Array]:
        stored = values_in_file(self._tensor32)
        if stored is None:
            yield self._tensor32.numpy().reshape(-1)
        else:
            yield from (piece.astype(np.float32, copy=False) for piece in stored.pieces())

    def _read(self) -> ir.TensorProtocol:
        self.clipped = 0
        values = self._narrow(self._tensor32.numpy())
        return ir.Tensor(np.ascontiguousarray(values), dtype=self.dtype, name=self.name)

    def _narrow(self, values: Array) -> Array:
        if self._refuse_nan is not None and self._tensor32.size > 1:  # a single NaN may stand for a missing value
            self._refuse_nan(values)
        if self.dtype == ir.DataType.BFLOAT16:
            return values.astype(self.dtype.numpy())  # bfloat16 has the range of float32
        beyond = np.isfinite(values) & (np.abs(values) > _HALF_END)
        self.clipped += int(np.count_nonzero(beyond))
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        halves[beyond] = np.copysign(_HALF_END, values[beyond])
        vanished = (halves == 0) & (values != 0)
        halves[vanished] = np.copysign(_HALF_STEP, values[vanished])
        return halves


_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_HALF_SUFFIX = "_fp16"
"""End of the name of a weight or value that was converted to float16."""
SMALL_BYTES = 4096
"""Smaller tensors are stored twice if nodes of both types read them, and stay float32 in a bfloat16 file. Chosen: a
Cast costs more."""


def convert_to_half(
    model: ir.Model,
    names: Collection[str],
    *,
    interface: Collection[str] = (),
    unconditional: Collection[str] = (),
    refuse_nan: Callable[[ir.Value, ir.Node], Callable[[Array], None]] | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT16,
) -> None:
    """Convert nodes of a graph and its subgraphs to float16, in place; nodes that float16 does not suit stay float32.

    Values that a subgraph returns keep their type. A weight that was widened from float16 gets its original tensor
    back.

    Args:
        model: The graph; it computes in float32.
        names: Names of the nodes.
        interface: Names of the inputs and outputs of the graph that become float16; the others keep their type.
        unconditional: Names of nodes that become float16 even if float32 suits their operator better.
        refuse_nan: (weight, a node that reads it) → function that raises an error for values with NaN. Without it, NaN
            is converted.
        dtype: The type: float16, or bfloat16.
    """
    _Halving(model, names, unconditional, interface, refuse_nan, dtype).run()


class _Halving:
    """Conversion of the nodes of one model to float16, in place."""

    def __init__(
        self,
        model: ir.Model,
        names: Collection[str],
        unconditional: Collection[str],
        interface: Collection[str],
        refuse_nan: Callable[[ir.Value, ir.Node], Callable[[Array], None]] | None,
        dtype: ir.DataType,
    ) -> None:
        self._graph, self._dtype = model.graph, dtype
        self._suffix = _HALF_SUFFIX if dtype == _HALF else "_bf16"
        self._halves = _half_precision_nodes(model, names, unconditional, dtype)
        self._interface = interface
        self._refuse_nan = refuse_nan
        self._fresh = FreshNames.of_graph(model.graph)

    def run(self) -> None:
        """Convert weights, inputs and outputs of the nodes, with a Cast between float32 and float16."""
        self._convert_sources()
        values = {value: None for node in self._halves for value in node.inputs if value is not None}
        for node in self._halves:
            _set_attributes(node, self._dtype)
        for value in sorted(values, key=lambda value: value.name or ""):
            if value.dtype != _FLOAT or value.producer() in self._halves:
                continue
            if value.is_initializer() and not has_fixed_type(value):
                self._convert_weight(value)
            else:
                self._redirect_readers(value, self._dtype, self._split_readers(value)[0])
        for node in [node for node in self._graph.all_nodes() if node in self._halves]:
            for value in node.outputs:
                if value.dtype == _FLOAT:
                    self._convert_output(value)
        for value in list(self._graph.outputs):
            if value.name in self._interface and value.dtype == _FLOAT:
                self._rename_and_cast(value, self._dtype, [])

    def _convert_sources(self) -> None:
        """Convert the inputs of the graph that become float16, and the weights that were float16."""
        for value in (*self._graph.inputs, *self._graph.initializers.values()):
            tensor = value.const_value
            if isinstance(tensor, WidenedTensor) and tensor.original.dtype == self._dtype:
                value.const_value = tensor.original
            elif value.name not in self._interface or value.dtype != _FLOAT:
                continue
            value.type = ir.TensorType(self._dtype)
            if outside := self._split_readers(value)[1]:
                self._redirect_readers(value, _FLOAT, outside)

    def _split_readers(self, value: ir.Value) -> tuple[list[ir.Node], list[ir.Node]]:
        """Return the readers of a value that become float16, and the others."""
        readers = list(dict.fromkeys(node for node, _ in value.uses()))
        return [node for node in readers if node in self._halves], [
            node for node in readers if node not in self._halves
        ]

    def _convert_weight(self, value: ir.Value) -> None:
        tensor = value.const_value
        assert tensor is not None
        inside, outside = self._split_readers(value)
        if outside and tensor.nbytes >= SMALL_BYTES:
            # Stored once, in the precision that the other readers need.
            self._redirect_readers(value, self._dtype, inside)
            return
        refuse_nan = self._refuse_nan(value, inside[0]) if self._refuse_nan is not None else None
        own_name = value.name or ""
        if not outside and own_name.endswith(self._suffix):
            # A weight of an earlier conversion keeps its name, so that a second optimization changes nothing.
            value.const_value = NarrowTensor(tensor, self._dtype, own_name, refuse_nan)
            value.type = ir.TensorType(self._dtype)
            return
        name = self._fresh.take(f"{own_name}{self._suffix}")
        graph = self._graph_of(value)
        narrow = add_initializer(graph, NarrowTensor(tensor, self._dtype, name, refuse_nan))
        _replace_uses(value, narrow, inside)
        if not outside:
            graph.initializers.pop(own_name)

    def _convert_output(self, value: ir.Value) -> None:
        """Set the type of a float16 output, and insert a Cast for its float32 readers."""
        value.type = ir.TensorType(self._dtype)
        _, outside = self._split_readers(value)
        if value.is_graph_output() and value.name not in self._interface:
            self._rename_and_cast(value, _FLOAT, outside)
        elif outside:
            self._redirect_readers(value, _FLOAT, outside)

    def _rename_and_cast(self, value: ir.Value, dtype: ir.DataType, readers: list[ir.Node]) -> None:
        """Insert a Cast after a graph output, in place; its result becomes the graph output and takes over the name.

        Args:
            value: The graph output.
            dtype: Type of the new output.
            readers: Nodes that read the new output.
        """
        maker, name = value.producer(), value.name or ""
        assert maker is not None
        suffix = self._suffix if dtype == _FLOAT else "_fp32"
        value.name = self._fresh.take(name + suffix)
        cast = cast_node(value, dtype, maker, self._fresh, name)
        cast.outputs[0].doc_string, value.doc_string = value.doc_string, None
        graph = self._graph_of(value)
        graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], readers)
        for position, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[position] = cast.outputs[0]

    def _redirect_readers(self, value: ir.Value, dtype: ir.DataType, readers: list[ir.Node]) -> None:
        """Insert a Cast between a value and some readers."""
        maker, graph = value.producer(), self._graph_of(value)
        cast = cast_node(value, dtype, maker or readers[0], self._fresh)
        if maker is None:
            graph.insert_before(graph[0], cast)
        else:
            graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], readers)

    def _graph_of(self, value: ir.Value) -> ir.Graph:
        """Return the graph that a value belongs to."""
        return value.graph if isinstance(value.graph, ir.Graph) else self._graph


def _replace_uses(value: ir.Value, other: ir.Value, readers: Iterable[ir.Node]) -> None:
    """Replace a value by another value in some of its readers."""
    chosen = set(readers)
    for node, position in list(value.uses()):
        if node in chosen:
            node.replace_input_with(position, other)


def has_fixed_type(value: ir.Value) -> bool:
    """Return True for inputs and outputs of the graph; they are not converted like other values."""
    return value.is_graph_input() or value.is_graph_output()


def _set_attributes(node: ir.Node, dtype: ir.DataType) -> None:
    """Set the type attribute of a node."""
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(dtype))
    elif node.op_type == "ConstantOfShape":
        fill_value = node.attributes.get("value")
        values = fill_value.as_tensor().numpy() if fill_value is not None else np.zeros(1, np.float32)
        limit = _HALF_END if dtype == _HALF else math.inf
        half = np.clip(values, -limit, limit).astype(dtype.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(half))


_HALF_END = float(np.finfo(np.float16).max)
"""Largest value of float16."""
_WIDE_OPERATORS = frozenset({
    "Cos", "CumSum", "Exp", "Log", "MeanVarianceNormalization", "Pow", "Range", "Reciprocal", "ReduceL2",
    "ReduceLogSumExp", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sin", "Sqrt", "Tan",
})  # fmt: skip
"""Operators that stay float32. Chosen: the square of 256 exceeds float16, norms square activations, and angles and
counts beyond 2048 are not exact. ``MeanVarianceNormalization`` has a float32 constant in its definition."""
_CARRYING = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that stay float32 if all their inputs come from nodes that do, such as the sum of a square and epsilon, or
the difference of two converted positions, which float16 would lose."""
_EXACT_OPERATORS = frozenset({"Cos", "Sin"})
"""Operators that stay float32 together with the nodes that compute their operand. Measured: with positions up to 2047
in float16, the cosine of rotary embeddings is wrong by up to 0.32."""
_MOVING = frozenset({
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_POSITIONAL = _CARRYING | _MOVING | {"Abs", "Einsum", "Floor", "MatMul", "Max", "Min", "Mod", "Neg", "Where"}
"""Operators that compute positions and angles; they stay float32 in this role."""
_LARGEST_POSITIONAL_BYTES = 1 << 16
"""Chosen: an operator with a larger constant is a layer. Frequencies of a head take a few hundred bytes."""
_TYPED_BY_ATTRIBUTE = frozenset({
    "Bernoulli", "BitCast", "BlackmanWindow", "Constant", "EyeLike", "HammingWindow", "HannWindow", "If", "Loop",
    "MelWeightMatrix", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Scan",
    "SequenceEmpty",
})  # fmt: skip
"""Operators whose types are set by an attribute, or that contain a graph. They stay float32."""
_CASTS = ("Cast", "CastLike")
"""Conversions. Their input stays float32 if the result has another type: indices need exact values."""
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})


def _half_precision_nodes(
    model: ir.Model, names: Collection[str], unconditional: Collection[str], dtype: ir.DataType
) -> frozenset[ir.Node]:
    """Select the named nodes of the graph and its subgraphs that support float16 and compute safely in it.

    Missing value types are inferred from the operators, in place: onnx does not know the operators of other domains.
    """
    complete_types(model)
    halves: set[ir.Node] = set()
    wide = _positional_nodes(model.graph)
    for node in model.graph.all_nodes():
        if node.name not in names or node.op_identifier() in model.functions:
            continue
        is_unconditional = node.name in unconditional
        if (node in wide and not is_unconditional) or _crashes_in_half(node) or _combines_elements(node):
            continue
        if not is_unconditional and (
            node.op_type in _WIDE_OPERATORS
            or _converts_integers(node)
            or (node.op_type in _CARRYING and _is_all_wide(node, wide))
        ):
            wide.add(node)
        elif _supports(dtype, node, model.opset_imports):
            halves.add(node)
    return frozenset(halves)


def _crashes_in_half(node: ir.Node) -> bool:
    """Return True for a Transpose before a MatMul, if it only moves the first axis to a later position.

    Measured: in float16, ONNX Runtime 1.31 fuses the two into a FusedMatMul with ``transBatchA`` and crashes.
    """
    if node.op_type != "Transpose" or not any(user.op_type == "MatMul" for user, _ in node.outputs[0].uses()):
        return False
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    others = [axis for axis in order if axis != 0]
    return len(order) > 2 and order[0] != 0 and others == sorted(others)


def _combines_elements(node: ir.Node) -> bool:
    """Return True for a scatter that combines elements, which ONNX Runtime's CPU provider refuses in float16."""
    return (
        node.op_type in ("ScatterElements", "ScatterND") and node.attributes.get_string("reduction", "none") != "none"
    )


def _positional_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that compute inputs of sines, cosines and conversions to integers, excluding these operators."""
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
    """Return True if a node converts floats to integers, such as an index."""
    read, created = node.inputs[0] if node.inputs else None, node.outputs[0].dtype if node.outputs else None
    return node.op_type == "Cast" and read is not None and read.dtype == ir.DataType.FLOAT and created in _INTEGERS


def _is_layer(node: ir.Node) -> bool:
    """Return True if a node has a weight larger than a set of frequencies."""
    tensors = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    return any(tensor is not None and tensor.nbytes > _LARGEST_POSITIONAL_BYTES for tensor in tensors)


def complete_types(model: ir.Model) -> None:
    """Infer missing types of values of the graph and its subgraphs from the operators, in place."""
    for node in model.graph.all_nodes():
        if all(value.dtype is not None for value in node.outputs):
            continue
        if node.op_type == "Cast":
            node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
            continue
        schema = _find_schema(node, model.opset_imports)
        if schema is None:
            continue
        known = {name: value.dtype for name, value in _formal_types(node, schema) if value.dtype is not None}
        for name, value in _formal_types(node, schema):
            if value.dtype is None and (dtype := known.get(name)) is not None:
                value.type = ir.TensorType(dtype)


def _converts_integers(node: ir.Node) -> bool:
    """Return True if a node converts integers, such as positions, to floats; float16 may not hold them."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype in _INTEGERS


def _is_all_wide(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Return True if all inputs of a node come from wide nodes, and float16 holds its constants.

    The lowest float32, used in masks, becomes the lowest float16 as a constant of a float16 node. As the result of a
    float32 node, a Cast to float16 turns the value into minus infinity.
    """
    constants = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    if any(tensor is None or _is_beyond_half(tensor) for tensor in constants):
        return False
    makers = [value.producer() for value in node.inputs if value is not None and not value.is_initializer()]
    return bool(makers) and all(maker in wide for maker in makers)


def _is_beyond_half(tensor: ir.TensorProtocol) -> bool:
    """Return True if a tensor has values beyond float16, or is too large to check."""
    if tensor.nbytes > _LARGEST_POSITIONAL_BYTES:
        return True
    return bool((np.abs(tensor.numpy().astype(np.float32)) > _HALF_END).any())


def _supports(dtype: ir.DataType, node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Return True if all float32 inputs and outputs of a node may be of a 16-bit type."""
    makes_other_type = node.op_type in _CASTS and node.outputs[0].dtype != ir.DataType.FLOAT
    if node.op_type in _TYPED_BY_ATTRIBUTE or _has_float_attribute(node) or makes_other_type:
        return False
    if any(
        isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in (*node.inputs, *node.outputs) if value
    ):
        return False
    schema = _find_schema(node, opsets)
    if schema is None:
        return False
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}
    types = {name for name, value in _formal_types(node, schema) if value.dtype == ir.DataType.FLOAT}
    return bool(types) and all(f"tensor({dtype.name.lower()})" in allowed.get(name, {name}) for name in types)


def _has_float_attribute(node: ir.Node) -> bool:
    """Return True if a tensor in an attribute has the type of the values, as the splits of a ``TreeEnsemble``."""
    return node.op_type != "ConstantOfShape" and any(
        attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT
        for attribute in node.attributes.values()
    )


def _formal_types(node: ir.Node, schema: Any) -> Iterator[tuple[str, ir.Value]]:
    """Yield (type parameter of the schema, value) for the inputs and outputs of a node."""
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for position, value in enumerate(values):
            if value is not None and formals:
                yield formals[min(position, len(formals) - 1)].typeStr, value


def _find_schema(node: ir.Node, opsets: Mapping[str, int]) -> Any:
    version = opsets.get(node.domain, 1)
    versions = _schemas().get((node.domain, node.op_type), {})
    return versions.get(max((since for since in versions if since <= version), default=0))


@functools.cache
def _schemas() -> Mapping[tuple[str, str], Mapping[int, Any]]:
    """(domain, operator) → since_version → schema."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in onnxruntime_pybind11_state.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    return schemas
