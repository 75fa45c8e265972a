"""Reads ONNX files as graphs, and says of which file it is that one cannot be read.

The one place where the errors of ``onnx_ir`` about a file become ours. Weights are left where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from winml.modelkit.errors import InputError, first_line
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import drop_damaged_tags

__all__ = ["checked_graph", "graph_of", "reading_graph"]

_T = TypeVar("_T")

_GRAPH_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""What onnx_ir raises at a message that is no graph: a SerdeError around the reason, or the reason alone. A graph that
is nested too deeply ends in a RecursionError, which is a RuntimeError."""


def graph_of(structure: onnx.ModelProto, path: Path) -> ir.Model:
    """Return the graph of a structure that was read from ``path``.

    Raises:
        InputError: it is no graph.
    """
    return reading_graph(path, lambda: checked_graph(ir.serde.deserialize_model(structure)))


def checked_graph(model: ir.Model) -> ir.Model:
    """Return the model after a look at what is read lazily: a tensor fails there and not inside some pass.

    In place, tags that are none are taken off.

    Raises:
        ValueError: a tensor has a type or a size that no tensor has.
    """
    nodes = list(all_nodes(model))
    for graph in model.graphs():
        for value in graph.initializers.values():
            _check_tensor(value.const_value)
    for node in nodes:
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                _check_tensor(attribute.value)
            elif attribute.type == ir.AttributeType.TENSORS:
                for tensor in attribute.value:
                    _check_tensor(tensor)
    drop_damaged_tags(nodes)
    return model


def _check_tensor(tensor: Any) -> None:
    if tensor is None:
        return
    name, dtype, sizes = tensor.name, tensor.dtype, tuple(tensor.shape)
    if dtype == ir.DataType.UNDEFINED:
        raise ValueError(f"tensor {name!r} has no element type")
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(f"tensor {name!r} has the shape {list(sizes)}")
    stored = tensor.raw.raw_data if isinstance(tensor, ir.TensorProtoTensor) else b""
    if stored and len(stored) != tensor.nbytes:
        raise ValueError(f"tensor {name!r} has {len(stored)} bytes, and its shape {list(sizes)} needs {tensor.nbytes}")
    if isinstance(tensor, ir.ExternalTensor) and ((tensor.offset or 0) < 0 or (tensor.length or 0) < 0):
        raise ValueError(f"tensor {name!r} lies at byte {tensor.offset} of its data file, with length {tensor.length}")


def reading_graph(path: Path, read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns, and blame ``path`` for what it raises.

    Raises:
        InputError: the file holds no graph, or one that cannot be used; names the reason.
    """
    try:
        return read()
    except _GRAPH_ERRORS as error:
        reason: BaseException = error
        # Each message around another one adds its wrapper, the innermost is the reason.
        while reason.__cause__ is not None:
            reason = reason.__cause__
        words = "it is nested too deeply" if isinstance(reason, RecursionError) else first_line(reason)
        raise InputError(f"{path}: cannot be read as a graph: {words}", hint="Export it again.") from error
