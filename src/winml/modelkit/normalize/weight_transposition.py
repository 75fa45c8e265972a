"""Replaces transpositions of weights by transposed weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import tensor_adapters

from winml.modelkit.graph.files.stored_tensors import StoredTensor

__all__ = ["WeightTranspositionPass"]


class WeightTranspositionPass(ir.passes.InPlacePass):
    """Replace ``Transpose(weight)`` by a transposed weight. Works in place.

    Before / After::

        weight[N,K] → Transpose(perm) → MatMul          weight.transposed[K,N] → MatMul

    Nothing is computed: the new initializer refers to the old one's memory and is transposed when the file is written.
    A weight used by several equal ``Transpose`` nodes (a module called twice) becomes one initializer.

    Must not fire when:
        1. something other than a ``Transpose`` of the same ``perm`` uses the weight (tied embeddings): the file would
           hold it twice;
        2. the weight is a graph input or output, or a ``Transpose`` produces a graph output, whose names are fixed;
        3. the weight holds strings or has no value here.

    Tags: keeps. The ``Transpose`` is removed, and no node is added.

    Why it is safe: a transposition moves values without changing them, and nothing else reads the weight.
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
    """Return the one permutation that all users of a weight apply, or None where the pass must not fire (cases 1-3)."""
    tensor = weight.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING or weight.is_graph_input() or weight.is_graph_output():
        return None
    permutations = {_permutation_of(node, len(tensor.shape)) for node, _ in weight.uses()}
    return permutations.pop() if len(permutations) == 1 else None


def _permutation_of(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    if node.op_type != "Transpose" or node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
        return None
    attribute = node.attributes.get("perm")
    if attribute is None:
        return tuple(reversed(range(rank)))
    return None if attribute.is_ref() else tuple(attribute.as_ints())


def _transpose_weight(graph: ir.Graph, weight: ir.Value, perm: tuple[int, ...]) -> None:
    tensor = weight.const_value
    assert tensor is not None
    shape = ir.Shape([tensor.shape.numpy()[axis] for axis in perm])
    name = f"{weight.name}.transposed"
    transposed = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=shape,
        const_value=_transposed_tensor(tensor, perm, shape, name),
        doc_string=weight.doc_string,
        metadata_props=dict(weight.metadata_props),
    )
    for node, _ in weight.uses():
        node.outputs[0].replace_all_uses_with(transposed)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    del graph.initializers[weight.name or ""]
    graph.register_initializer(transposed)


def _transposed_tensor(tensor: ir.TensorProtocol, perm: Sequence[int], shape: ir.Shape, name: str) -> ir.TensorProtocol:
    if isinstance(tensor, StoredTensor):
        return tensor.transposed(perm, name)
    if isinstance(tensor, tensor_adapters.TorchTensor):
        # A view. torch copies it when it is written, several times as fast as numpy.
        return tensor_adapters.TorchTensor(tensor.raw.permute(*perm), name=name)

    def evaluate() -> ir.TensorProtocol:
        values = np.ascontiguousarray(tensor.numpy().transpose(perm))
        return ir.Tensor(values, dtype=tensor.dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=tensor.dtype, shape=shape, name=name)
