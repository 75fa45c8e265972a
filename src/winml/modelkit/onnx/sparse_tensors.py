"""Conversion of the sparse tensors of a model to dense ones: onnx_ir has no sparse tensors.

ONNX Runtime stores them densely in memory as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from winml.modelkit.onnx.contents import VALUE_FIELDS, subgraphs

_MOST_BYTES = 2**31
"""Specified: protobuf's limit on a message, which a tensor inside a model is part of."""


def make_dense(model: onnx.ModelProto) -> None:
    """Replace sparse initializers, and sparse values of ``Constant``, by dense tensors, in place.

    Raises:
        ValueError: a tensor is damaged or, stored densely, larger than protobuf allows.
    """
    _make_graph_dense(model.graph)
    for function in model.functions:
        _make_constants_dense(function.node)


def _make_graph_dense(graph: onnx.GraphProto) -> None:
    graph.initializer.extend(_dense_tensor(sparse) for sparse in graph.sparse_initializer)
    graph.ClearField("sparse_initializer")
    _make_constants_dense(graph.node)


def _make_constants_dense(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for graph in subgraphs(node):
            _make_graph_dense(graph)
        if node.op_type == "Constant" and any(attribute.HasField("sparse_tensor") for attribute in node.attribute):
            tensor = _dense_tensor(node.attribute[0].sparse_tensor)
            node.attribute[0].CopyFrom(helper.make_attribute("value", tensor))


def _dense_tensor(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """Return a tensor with all values; one whose values were not read has none."""
    name, dtype = sparse.values.name, helper.tensor_dtype_to_np_dtype(sparse.values.data_type)
    if math.prod(sparse.dims) * dtype.itemsize >= _MOST_BYTES:
        raise ValueError(f"the sparse tensor {name!r} of shape {[*sparse.dims]} has 2 GB or more, stored densely")
    if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        raise ValueError(f"the sparse tensor {name!r} has its values in a data file")
    if not {field.name for field, _ in sparse.values.ListFields()}.intersection(VALUE_FIELDS):
        return onnx.TensorProto(name=name, data_type=sparse.values.data_type, dims=sparse.dims)
    dense = np.zeros(sparse.dims, dtype)
    indices = numpy_helper.to_array(sparse.indices)
    places = np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)
    dense[places] = numpy_helper.to_array(sparse.values)
    return numpy_helper.from_array(dense, name)
