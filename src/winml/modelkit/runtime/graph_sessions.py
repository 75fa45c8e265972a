"""Opens sessions of graphs in memory, whose weights stay where they lie.

Weights in data files and checkpoints are mapped. Where a checkpoint has them in another type or order, the session
computes that when it reads them, so that neither memory nor a file holds a converted copy. Other weights are computed
once, those of one graph for all graphs that are made of it. Writes no file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.graph.files.stored_tensors import StoredTensor
from winml.modelkit.graph.weights import to_weightless
from winml.modelkit.runtime.ort_values import to_ort_value
from winml.modelkit.runtime.sessions import Session

__all__ = ["GraphSessions"]

_MAPPED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
"""Types that ONNX Runtime's CPU provider casts; tensors that are stored in another one are converted in memory."""


class GraphSessions:
    """Opens a graph, and graphs that are made of it and share tensors with it."""

    def __init__(self, model: ir.Model) -> None:
        """Refer to the tensors of a graph, which stay as long as this object."""
        tensors = (value.const_value for value in model.graph.initializers.values())
        self._shared = {id(tensor): tensor for tensor in tensors if tensor is not None}
        self._computed: dict[int, Array] = {}
        self._lock = threading.Lock()

    def open(
        self, model: ir.Model, *, threads: int | None = None, name: str = "the graph", prepack: bool = True
    ) -> Session:
        """Return a session of a model, which stays as it is.

        Args:
            model: The graph, or one that is made of it.
            threads: As of :class:`~winml.modelkit.runtime.sessions.Session`.
            name: For messages.
            prepack: As of :class:`~winml.modelkit.runtime.sessions.Session`.

        Raises:
            StageError: ONNX Runtime cannot load the graph.
            CheckpointError: a checkpoint became shorter.
        """
        sent = to_weightless(model)
        readers: list[onnx.NodeProto] = []
        arrays: dict[str, Array] = {}
        for initializer in sent.proto.graph.initializer:
            if (tensor := sent.weights.get(initializer.name)) is None:
                continue
            if tensor.dtype.itemsize < 1:  # several values in a byte
                initializer.raw_data = tensor.tobytes()
                continue
            read = self._read(tensor)
            nodes = list(_reading_nodes(initializer.name, tensor.dtype, read))
            if nodes:
                readers += nodes
                initializer.name = nodes[0].input[0]
                initializer.data_type = read.dtype.value
                initializer.dims[:] = read.array.shape
            initializer.data_location = onnx.TensorProto.EXTERNAL
            initializer.external_data.add(key="location", value=initializer.name)
            arrays[initializer.name] = read.array
        if readers:
            written = list(sent.proto.graph.node)
            del sent.proto.graph.node[:]
            sent.proto.graph.node.extend([*readers, *written])
        return Session(
            sent.proto.SerializeToString(),
            threads=threads,
            name=name,
            prepack=prepack,
            weights={key: to_ort_value(array) for key, array in arrays.items()},
            # Folded, what the readers make would be held in memory.
            folds_constants=not readers,
        )

    def _read(self, tensor: ir.TensorProtocol) -> _Read:
        if isinstance(tensor, StoredTensor) and tensor.stored.dtype in _MAPPED:
            return _Read(tensor.stored.mapped(), tensor.stored.dtype, tensor.permutation)
        if isinstance(tensor, ir.ExternalTensor):
            return _Read(tensor.numpy(), tensor.dtype, None)
        if id(tensor) not in self._shared:
            return _Read(np.ascontiguousarray(tensor.numpy()), tensor.dtype, None)
        with self._lock:
            if id(tensor) not in self._computed:
                self._computed[id(tensor)] = np.ascontiguousarray(tensor.numpy())
            return _Read(self._computed[id(tensor)], tensor.dtype, None)


class _Read(NamedTuple):
    """The values of a tensor as a session gets them."""

    array: Array
    dtype: ir.DataType
    permutation: tuple[int, ...] | None
    """Order of its axes in the tensor; None: as they are."""


def _reading_nodes(name: str, dtype: ir.DataType, read: _Read) -> Iterator[onnx.NodeProto]:
    """Yield what makes the tensor of this name and type of what is stored."""
    steps: list[tuple[str, dict[str, object]]] = []
    if read.dtype != dtype:
        steps.append(("Cast", {"to": dtype.value}))
    if read.permutation is not None:
        steps.append(("Transpose", {"perm": list(read.permutation)}))
    value = f"{name}:stored"
    for number, (operator, attributes) in enumerate(steps, 1):
        made = name if number == len(steps) else f"{name}:{operator}"
        yield onnx.helper.make_node(operator, [value], [made], f"{name}:{operator}", **attributes)
        value = made
