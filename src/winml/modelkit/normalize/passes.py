"""The passes of normalization that onnx_ir and onnxscript do not have; ``pipeline`` has their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import tensor_adapters
from onnx_ir.passes.common import NameFixPass, _c_api_utils

from winml.modelkit.onnx.coded_weights import CodedTensor
from winml.modelkit.onnx.files.stored_tensors import StoredTensor
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.map_types import deserialize_model, restore_map_types
from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.weights import add_initializer, computed_tensor
from winml.modelkit.tags.tagging import all_nodes


class GeluOrderingPass(ir.passes.InPlacePass):
    """Multiply by one half last in a GELU. Works in place.

    Before / After::

        x · (0.5 · (1 + Erf(x / √2)))              (x · (1 + Erf(x / √2))) · 0.5

    torch's dynamo exporter writes the first, its TorchScript exporter the second; ONNX Runtime recognises the second
    only (measured with 1.31).

    Must not fire when:
        1. the factor is not one half: the order would change how the product is rounded;
        2. the inner product is used elsewhere, or is an output of the graph;
        3. the other factor is no sum with an ``Erf`` in it.

    Tags: keeps. Both nodes stay, with other inputs.

    Why it is safe: one half only lowers the exponent, so every number is rounded as before. Only products above the
    largest number, where GELU is far from its bend, or below the smallest normal one differ.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Order every GELU."""
        changed = False
        for node in list(all_nodes(model)):
            if is_operator(node, "Mul"):
                changed |= _multiply_half_last(node)
        return ir.passes.PassResult(model, changed)


def _multiply_half_last(outer: ir.Node) -> bool:
    """Reorder the products of a GELU, in place, if the node is the outer product; return True if reordered."""
    for value, product in (outer.inputs, outer.inputs[::-1]):
        inner = producer_of(product, "Mul")
        if inner is None or product is None or value is None:
            continue
        if len(product.uses()) != 1 or product.is_graph_output() or value is product or inner.graph is not outer.graph:
            continue
        for half, total in (inner.inputs, inner.inputs[::-1]):
            if half is not None and total is not None and _is_half(half, product) and _is_sum_with_erf(total):
                inner.replace_input_with(0, value)
                inner.replace_input_with(1, total)
                outer.replace_input_with(0, product)
                outer.replace_input_with(1, half)
                product.shape = outer.outputs[0].shape
                # It reads the tensor now, which may be made after the sum.
                graph = outer.graph
                assert graph is not None
                graph.remove(inner)
                graph.insert_before(outer, inner)
                return True
    return False


def _is_half(value: ir.Value, scaled: ir.Value) -> bool:
    """Return True if a value is one half, and has no more axes than the other factor."""
    tensor = value.const_value
    if tensor is None or tensor.size != 1 or scaled.shape is None or len(tensor.shape) > len(scaled.shape):
        return False
    return float(tensor.numpy().reshape(-1)[0]) == 0.5


def _is_sum_with_erf(value: ir.Value) -> bool:
    total = producer_of(value, "Add")
    return total is not None and any(producer_of(term, "Erf") is not None for term in total.inputs)


class ScaleOrderPass(ir.passes.InPlacePass):
    """Multiply by a constant vector from the right. Works in place.

    Before / After::

        weight · x              x · weight

    PyTorch's RMSNorm modules multiply from the left. QNN's plug-in then takes the nodes for its own RMSNorm and fails
    with ``QNN_COMMON_ERROR_MEM_ALLOC`` (measured with onnxruntime-qnn 2.7); from the right it compiles them.

    Must not fire when the other operand is constant as well.

    Tags: keeps. The node stays, its inputs are swapped.

    Why it is safe: a product of two numbers does not depend on their order.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Make the constant vector of every product the second operand."""
        changed = False
        for node in all_nodes(model):
            if is_operator(node, "Mul") and _is_vector(node.inputs[0]) and not _is_vector(node.inputs[1]):
                vector, factor = node.inputs
                node.replace_input_with(0, factor)
                node.replace_input_with(1, vector)
                changed = True
        return ir.passes.PassResult(model, changed)


def _is_vector(value: ir.Value | None) -> bool:
    """Return True if a value is a constant of one axis with several elements."""
    tensor = None if value is None else value.const_value
    return tensor is not None and len(tensor.shape) == 1 and tensor.size > 1


class IdentityRemovalPass(ir.passes.InPlacePass):
    """Remove ``Identity`` nodes and transpositions that move no axis, in all graphs. Works in place.

    Before / After::

        x → Identity → y → Relu              x → Relu
        Relu → x → Identity → (output y)     Relu → (output y)
        x → Transpose (0, 1) → y → Gemm      x → Gemm

    torch 2.10 writes the last around a boolean mask, and ONNX Runtime before 1.24 takes every ``Transpose`` before a
    ``Gemm`` for one that swaps the axes.

    Must not fire when ``y`` is an output of its graph and ``x``
        1. is an input or an initializer: the output would have no node that produces it;
        2. is itself an output: two outputs would become one (torch writes such an ``Identity`` for a tensor returned
           twice);
        3. is produced outside this graph: the output of a branch must be produced in the branch.

    onnx_ir's own pass fires in cases 2 and 3, hence this one.

    Tags: keeps. The ``Identity`` is removed; the node before it keeps its tag.

    Why it is safe: both names denote the same tensor.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every such node outside these cases."""
        modified = False
        for node in list(all_nodes(model)):
            if (is_operator(node, "Identity") or _moves_no_axis(node)) and _is_removable(node):
                _remove_identity(node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _moves_no_axis(node: ir.Node) -> bool:
    permutation = node.attributes.get_ints("perm", ()) if is_operator(node, "Transpose") else ()
    return bool(permutation) and list(permutation) == sorted(permutation)


def _is_removable(node: ir.Node) -> bool:
    """Return True unless the node is one of the cases in which it must stay."""
    input_value, output_value = node.inputs[0], node.outputs[0]
    if input_value is None:
        return False
    if not output_value.is_graph_output():
        return True
    producer = input_value.producer()
    return producer is not None and producer.graph is node.graph and not input_value.is_graph_output()


def _remove_identity(node: ir.Node) -> None:
    input_value, output_value = node.inputs[0], node.outputs[0]
    assert input_value is not None
    if input_value.type is None:
        input_value.type = output_value.type
    if input_value.shape is None:
        input_value.shape = output_value.shape
    is_output, name = output_value.is_graph_output(), output_value.name
    output_value.replace_all_uses_with(input_value, replace_graph_outputs=is_output)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    if is_output:
        input_value.name = name


_OMITTED_PREFIX = "\0left out "
"""Chosen: begins with a character that no name contains."""


class ValueNamesPass(ir.passes.InPlacePass):
    """Give every value a unique name, across subgraphs, except omitted outputs. Works in place.

    onnx_ir's ``NameFixPass`` makes names unique within one scope only: two branches of an ``If`` may share them. onnx
    infers shapes with constants found by name, and takes those of the other branch.

    ``NameFixPass`` also names omitted outputs, which in ONNX have an empty name (the second of ``Unique``). The next
    removal of unused outputs would remove the new names again, and never find the graph unchanged.

    Tags: keeps.

    Why it is safe: no node reads an omitted output.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Name values without a name, and rename all but one of several equal names."""
        omitted_outputs = [value for node in all_nodes(model) for value in node.outputs if value.name == ""]
        for position, value in enumerate(omitted_outputs):
            value.name = f"{_OMITTED_PREFIX}{position}"
        modified = NameFixPass()(model).modified
        modified |= _rename_shared_values(model)
        for value in omitted_outputs:
            value.name = ""
        return ir.passes.PassResult(model, modified)


def _rename_shared_values(model: ir.Model) -> bool:
    """Rename values of subgraphs with the name of a value of an earlier graph, in place; return True if renamed."""
    graphs = list(model.graphs())
    if len(graphs) < 2:
        return False
    fresh = FreshNames.of_graph(model.graph)
    assigned_names: set[str | None] = set()
    modified = False
    for graph in graphs:
        outputs = [value for node in graph for value in node.outputs]
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            if value.name in assigned_names and graph is not model.graph:
                value.name = fresh.take(value.name or "")
                modified = True
            assigned_names.add(value.name)
    return modified


class UniqueNodeNamesPass(ir.passes.InPlacePass):
    """Give every node a unique name, across subgraphs and functions. Works in place.

    onnx_ir's ``NameFixPass`` makes node names unique within one graph only. Profilers record only the name, which must
    be unique in the model.

    Before / After::

        "/a/Add", "/a/Add", ""  (a Mul)        "/a/Add", "/a/Add_1", "/Mul"

    Must not fire when a name is unique already: users find nodes by name.

    Tags: keeps.

    Why it is safe: ONNX gives node names no meaning.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename nodes without a unique name; the first of several equal names is unchanged."""
        nodes = list(all_nodes(model))
        fresh = FreshNames((node.name for node in nodes), first_number=1)
        assigned_names: set[str] = set()
        modified = False
        for node in nodes:
            if not node.name or node.name in assigned_names:
                node.name = fresh.take(node.name or f"/{node.op_type}")
                modified = True
            assigned_names.add(node.name)
        return ir.passes.PassResult(model, modified)


class PaddingSeparationPass(ir.passes.InPlacePass):
    """Pad the input of a ``MaxPool`` with -0.0 instead of 0.0, which ONNX Runtime does not fuse. Works in place.

    Before / After::

        Pad(x, pads, 0.0) → MaxPool          Pad(x, pads, -0.0) → MaxPool

    ONNX Runtime (1.31.1, on by default) fuses a ``Pad`` whose value has all bits zero into the pool. The pool pads with
    minus infinity, so the result is wrong where values are negative. BiT and models ported from TensorFlow pad like
    that.

    Must not fire when:
        1. the value is computed or not zero, or the padding mirrors or repeats values;
        2. the values are integers, which have no negative zero;
        3. the pool is not the only reader, or the padded axes are listed: ONNX Runtime does not fuse these.

    Tags: keeps. Nodes are not changed.

    Why it is safe: the two zeros are equal, and either may be the maximum.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Give every such ``Pad`` the value -0.0."""
        modified = False
        for graph in model.graphs():
            for node in graph:
                if _is_padded_pool(node) and _pads_zeros(node):
                    _pad_negative_zeros(graph, node)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _is_padded_pool(node: ir.Node) -> bool:
    """Return True if a node pads with a constant, and a ``MaxPool`` alone reads the result."""
    if not is_operator(node, "Pad") or not 2 <= len(node.inputs) <= 3:
        return False
    padded = node.outputs[0]
    readers = [reader.op_type for reader, _ in padded.uses()]
    is_constant = node.attributes.get_string("mode", "constant") == "constant"
    return is_constant and readers == ["MaxPool"] and not padded.is_graph_output()


def _pads_zeros(node: ir.Node) -> bool:
    """Return True if the value of a ``Pad`` is the positive zero of a floating point type."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    dtype = (value or node.inputs[0] or node.outputs[0]).dtype
    if dtype is None or not dtype.is_floating_point():
        return False
    if value is None:
        return True
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not any(tensor.tobytes())


def _pad_negative_zeros(graph: ir.Graph, node: ir.Node) -> None:
    dtype = (node.inputs[0] or node.outputs[0]).dtype
    assert dtype is not None  # The type is a floating point type here.
    tensor = ir.tensor(np.array(-0.0, dtype.numpy()), dtype=dtype, name=f"{node.outputs[0].name}.zero")
    zero = add_initializer(graph, tensor)
    node.resize_inputs(3)
    node.replace_input_with(2, zero)


class InferredShapesPass(ir.passes.InPlacePass):
    """Set shape and type of every value as inferred by onnx, with constant propagation. Works in place.

    Weights are not serialized. onnx_ir's pass of this name is not used: it logs a failure and continues, while this
    pass raises, and it sets the type of a tensor on a sequence returned by a ``Loop`` or an ``If``.

    Before / After::

        x[1,16] → Reshape([4,4]) → y          x[1,16] → Reshape([4,4]) → y[4,4]

    Must not fire when onnx infers nothing beyond the stated shapes and types. An operator unknown to onnx does not stop
    the inference of the others.

    Tags: keeps. Nodes are not changed.

    Why it is safe: shapes describe values and do not affect their computation.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer shapes; an error of onnx is raised unchanged."""
        # Not strict: one operator without an inference function would stop the inference of all others.
        options = {"check_type": False, "strict_mode": False, "data_prop": True}

        def infer(proto: onnx.ModelProto) -> onnx.ModelProto:
            return onnx.shape_inference.infer_shapes(restore_map_types(proto, model), **options)

        for node in all_nodes(model):
            for value in node.outputs:
                if value.type is None:
                    # Known from folding. ONNX has no shape without a type, and onnx_ir warns about it.
                    value.shape = None
        inferred = deserialize_model(_c_api_utils.call_onnx_api(infer, model))
        modified = False
        for graph, inferred_graph in zip(model.graphs(), inferred.graphs(), strict=True):
            inferred_values = ir.convenience.create_value_mapping(inferred_graph)
            for name, value in ir.convenience.create_value_mapping(graph).items():
                if name in inferred_values:
                    modified |= _set_inferred_type(value, inferred_values[name])
        return ir.passes.PassResult(model, modified)


def _set_inferred_type(value: ir.Value, inferred: ir.Value) -> bool:
    """Set inferred type and shape of a value; return True if either is new."""
    has_type = inferred.type is not None and inferred.type != value.type
    has_shape = inferred.shape is not None and inferred.shape != value.shape
    if has_type:
        value.type = inferred.type
    if has_shape:
        value.shape = inferred.shape
    return has_type or has_shape


class UnusedInitializerRemovalPass(ir.passes.InPlacePass):
    """Remove unused initializers, including subgraphs, where onnx_ir's pass keeps them. Works in place.

    Before / After::

        {a, b} Add(x, a)          {a} Add(x, a)

    Must not fire when the initializer is an input or an output of its graph: the names are the caller's.

    Tags: keeps. Nodes are not changed.

    Why it is safe: no node reads the value.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every unused initializer."""
        modified = False
        for graph in model.graphs():
            for name, value in list(graph.initializers.items()):
                if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                    del graph.initializers[name]
                    modified = True
        return ir.passes.PassResult(model, modified)


class WeightTranspositionPass(ir.passes.InPlacePass):
    """Replace ``Transpose(weight)`` by a transposed weight. Works in place.

    Before / After::

        weight[N,K] → Transpose(perm) → MatMul          weight.transposed[K,N] → MatMul

    No values are computed: the new initializer refers to the old initializer's memory and is transposed when the file
    is written. A weight used by several equal ``Transpose`` nodes (a module called twice) becomes one initializer.

    Must not fire when:
        1. a node other than a ``Transpose`` of the same ``perm`` reads the weight (tied embeddings): the file would
        hold it twice;
        2. the weight is a graph input or output, or a ``Transpose`` produces a graph output, whose names are fixed;
        3. the weight holds strings or has no value here.

    Tags: keeps. The ``Transpose`` is removed, and no node is added.

    Why it is safe: a transposition moves values without changing them, and no other node reads the weight.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Transpose every weight that only transpositions use."""
        modified = False
        for graph in model.graphs():
            for weight in list(graph.initializers.values()):
                perm = _only_permutation(weight)
                if perm is not None:
                    _transpose_weight(graph, weight, perm)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _only_permutation(weight: ir.Value) -> tuple[int, ...] | None:
    """Return the permutation applied by all readers of a weight; `None` if the pass must not fire (cases 1-3)."""
    tensor = weight.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING or weight.is_graph_input() or weight.is_graph_output():
        return None
    permutations = {_read_permutation(node, len(tensor.shape)) for node, _ in weight.uses()}
    return permutations.pop() if len(permutations) == 1 else None


def _read_permutation(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """Return the permutation of a ``Transpose``; `None` if the node must stay, or is another operator."""
    if not is_operator(node, "Transpose") or node.outputs[0].is_graph_output():
        return None
    attribute = node.attributes.get("perm")
    if attribute is None:
        return tuple(reversed(range(rank)))
    return None if attribute.is_ref() else tuple(attribute.as_ints())


def _transpose_weight(graph: ir.Graph, weight: ir.Value, perm: tuple[int, ...]) -> None:
    tensor = weight.const_value
    assert tensor is not None
    transposed = add_initializer(graph, _transpose_tensor(tensor, perm, f"{weight.name}.transposed"))
    transposed.doc_string = weight.doc_string
    transposed.metadata_props.update(weight.metadata_props)
    for node, _ in weight.uses():
        node.outputs[0].replace_all_uses_with(transposed)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    del graph.initializers[weight.name or ""]


def _transpose_tensor(tensor: ir.TensorProtocol, perm: Sequence[int], name: str) -> ir.TensorProtocol:
    """Return a tensor with permuted axes; its values are permuted when the file is written."""
    if isinstance(tensor, (StoredTensor, CodedTensor)):
        return tensor.transposed(perm, name)
    if isinstance(tensor, tensor_adapters.TorchTensor):
        # A view. torch copies it when the file is written, several times as fast as numpy.
        return tensor_adapters.TorchTensor(tensor.raw.permute(*perm), name=name)
    shape = [tensor.shape.numpy()[axis] for axis in perm]
    return computed_tensor(lambda: tensor.numpy().transpose(perm), tensor.dtype, shape, name)


_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


class BFloat16WideningPass(ir.passes.InPlacePass):
    """Compute operators on bfloat16 in float32 and round their results to bfloat16. Works in place.

    Before / After::

        Cast(x, bfloat16) → Mul → Cast(float)      Cast(x, bfloat16) → Cast(float) → Mul → Cast(bfloat16) → Cast(float)

    For: Falcon with ALiBi, which computes its biases in bfloat16 for any type of the model.

    Must not fire when:
        1. the model takes or returns bfloat16, or most of its weights are bfloat16;
        2. the node is a ``Cast``, which has kernels for bfloat16, or is not in the ONNX domain.

    Tags: creates. A new ``Cast`` inherits from the node whose input or output it converts.

    Why it is safe: PyTorch computes each of these operators in float32 on a CPU, and rounds the result.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Widen every such node."""
        if not _uses_bfloat16(model) or _is_bfloat16_model(model):
            return ir.passes.PassResult(model, modified=False)
        modified = False
        for graph in model.graphs():
            # Producers precede readers, so that the type of a node's inputs is known when it is reached.
            for node in [node for node in graph if not node.domain]:
                if node.op_type == "Cast":
                    node.outputs[0].dtype = ir.DataType(node.attributes.get_int("to"))
                else:
                    modified |= _widen_operator(node, graph, model.opset_imports.get("", 1))
        return ir.passes.PassResult(model, modified)


def _uses_bfloat16(model: ir.Model) -> bool:
    """Return True if a node makes or reads bfloat16; sums up no sizes of weights."""
    for node in (node for graph in model.graphs() for node in graph):
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == _NARROW:
            return True
        if any(value is not None and _read_dtype(value) == _NARROW for value in (*node.inputs, *node.outputs)):
            return True
    return False


def _is_bfloat16_model(model: ir.Model) -> bool:
    """Return True if inputs, outputs or most weights of a model are bfloat16."""
    if any(value.dtype == _NARROW for value in (*model.graph.inputs, *model.graph.outputs)):
        return True
    sizes = {_NARROW: 0, _WIDE: 0}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in sizes:
                sizes[value.const_value.dtype] += value.const_value.size
    return sizes[_NARROW] > sizes[_WIDE]


def _widen_operator(node: ir.Node, graph: ir.Graph | ir.Function, opset: int) -> bool:
    """Compute a node that reads bfloat16 in float32, between casts, in place; return True if changed."""
    narrow = [
        position for position, value in enumerate(node.inputs) if value is not None and _read_dtype(value) == _NARROW
    ]
    if not narrow:
        return False
    outputs = [output for output in node.outputs if _is_narrow_output(output, node, narrow, opset)]
    fresh = FreshNames.of_graph(graph) if isinstance(graph, ir.Graph) else FreshNames(())
    for position in narrow:
        value = node.inputs[position]
        assert value is not None
        cast = cast_node(value, _WIDE, node, fresh)
        graph.insert_before(node, cast)
        node.replace_input_with(position, cast.outputs[0])
    for output in outputs:
        readers = list(output.uses())
        output.dtype = _WIDE
        cast = cast_node(output, _NARROW, node, fresh)
        graph.insert_after(node, cast)
        for reader, position in readers:
            reader.replace_input_with(position, cast.outputs[0])
    return True


def _is_narrow_output(output: ir.Value, node: ir.Node, narrow: list[int], opset: int) -> bool:
    """Return True if an output is bfloat16, by its own type or by the schema from the types of its inputs."""
    if output.dtype is not None:
        return output.dtype == _NARROW
    schema = onnx.defs.get_schema(node.op_type, opset)
    kinds = [parameter.type_str for parameter in schema.inputs]
    # The last input or output of a schema may stand for any number.
    kind = schema.outputs[min(node.outputs.index(output), len(schema.outputs) - 1)].type_str
    return any(kinds[min(position, len(kinds) - 1)] == kind for position in narrow)


def _read_dtype(value: ir.Value) -> ir.DataType | None:
    return value.dtype if value.dtype is not None or value.const_value is None else value.const_value.dtype
