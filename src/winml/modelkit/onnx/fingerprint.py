"""Computes a digest of a graph's structure, and stamps a normalized graph with it.

Structure, shapes, attributes and the names of inputs and outputs count. Weights, metadata, doc strings, and the names
of nodes and inner values do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from winml.modelkit.metadata_keys import NORMALIZED_KEY
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.options import load_metadata
from winml.modelkit.tags.tagging import all_nodes

OPERAND_LIMIT_ELEMENTS = 16
"""Maximum size of integer initializers of rank 0 or 1 that count with their values: axes, shapes and bounds, which
older opsets hold as attributes. Chosen: more than any rank, less than any lookup table.
"""


def fingerprint(model: ir.Model) -> str:
    """Return a digest of a model's structure: 64 hexadecimal digits, the same before and after a save.

    No weights are read except integer operands of at most ``OPERAND_LIMIT_ELEMENTS`` elements. The order of nodes
    counts; the order of initializers does not.
    """
    digest = hashlib.sha256()
    for line in _model_lines(model):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Return the fingerprint of a file, by which results of earlier runs are recognized as results of this model.

    Raises:
        InputError: the file is damaged or no ONNX file.
    """
    return fingerprint(graph_of(read_structure(path), path))


def _model_lines(model: ir.Model) -> Iterator[str]:
    """Yield the lines that describe the structure of a model."""
    yield f"opsets {sorted(model.opset_imports.items())}"
    yield from _LineWriter().graph_lines(model.graph, with_names=True)
    for identifier, function in sorted(model.functions.items()):
        yield f"function {identifier} opsets {sorted(function.opset_imports.items())}"
        line_writer = _LineWriter()
        for name, attribute in sorted(function.attributes.items()):
            yield from line_writer.attribute_lines(name, attribute)
        yield from line_writer.graph_lines(function, with_names=False)


class _LineWriter:
    """Writes the text lines of a graph; numbers values in the order of occurrence, so that names do not count."""

    def __init__(self) -> None:
        self._numbers: dict[ir.Value, int] = {}

    def graph_lines(self, graph: ir.Graph | ir.Function, *, with_names: bool) -> Iterator[str]:
        """Yield the lines of a graph or function with its subgraphs; ``with_names`` adds the names of inputs and
        outputs.
        """
        yield f"inputs {[self._declared_text(value, with_names) for value in graph.inputs]}"
        for node in graph:
            operator = f"{node.domain}:{node.op_type}:{node.overload}"
            input_texts = [self._used_text(value) for value in _trim_trailing_gaps(node.inputs)]
            output_texts = [self._declared_text(value, with_name=False) for value in node.outputs]
            yield f"node {operator} {input_texts} {_trim_trailing_gaps(output_texts)}"
            for name, attribute in sorted(node.attributes.items()):
                yield from self.attribute_lines(name, attribute)
        # Their shapes were written with the nodes that produce them.
        yield f"outputs {[(self._used_text(value), value.name if with_names else '') for value in graph.outputs]}"

    def attribute_lines(self, name: str, attribute: ir.Attr) -> Iterator[str]:
        """Yield the lines of an attribute, including the lines of subgraphs."""
        kind = attribute.type.name
        if attribute.is_ref():
            yield f"attribute {name} {kind} refers to {attribute.ref_attr_name}"
        elif attribute.type == ir.AttributeType.GRAPH:
            yield f"attribute {name} {kind}"
            yield from self.graph_lines(attribute.as_graph(), with_names=False)
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield f"attribute {name} {kind}"
                yield from self.graph_lines(graph, with_names=False)
        else:
            yield f"attribute {name} {kind} {_attribute_text(attribute)}"

    def _declared_text(self, value: ir.Value, with_name: bool) -> str | None:
        """Number a produced value; return number, type and name. `None` for an unused optional output."""
        if not value.name and not value.uses():
            # An unused optional output; a saved file does not keep it.
            return None
        self._numbers[value] = len(self._numbers)
        return f"{self._numbers[value]} {_type_text(value)}{f' {value.name}' if with_name else ''}"

    def _used_text(self, value: ir.Value | None) -> str | None:
        """Return the number of a read value; an initializer is numbered and described at its first use.

        `None` for an omitted input.
        """
        if value is None:
            return None
        if value not in self._numbers:
            # An initializer is numbered at its first use, so the order of initializers does not count.
            self._numbers[value] = len(self._numbers)
            return f"{self._numbers[value]} {_initializer_text(value)}"
        return str(self._numbers[value])


def _type_text(value: ir.Value) -> str:
    """Return element type and shape of a value."""
    if value.shape is None:
        return f"{value.type}"
    return f"{value.type}{[dim if isinstance(dim, int) else dim.value for dim in value.shape]}"


def _initializer_text(value: ir.Value) -> str:
    """Return type and shape of an initializer, with the values of small integer operands."""
    tensor = value.const_value
    if tensor is None:
        return _type_text(value)
    text = f"{tensor.dtype.name}{list(tensor.shape.numpy())}"
    is_operand = tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32) and len(tensor.shape) <= 1
    if is_operand and tensor.size <= OPERAND_LIMIT_ELEMENTS:
        text += f"={tensor.numpy().tolist()}"
    return text


def _attribute_text(attribute: ir.Attr) -> str:
    """Return the value of an attribute as text; tensors count by digest."""
    if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        # Files store attributes as 32-bit floats.
        return str(np.asarray(attribute.value, dtype=np.float32).tolist())
    if attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
        tensors: Iterable[ir.TensorProtocol] = (
            [attribute.as_tensor()] if attribute.type == ir.AttributeType.TENSOR else attribute.as_tensors()
        )
        return str([_tensor_text(tensor) for tensor in tensors])
    if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
        return str(list(attribute.value))
    return str(attribute.value)


def _tensor_text(tensor: ir.TensorProtocol) -> str:
    if tensor.dtype == ir.DataType.STRING:
        content = repr(tensor.numpy().tolist()).encode()
    else:
        content = tensor.tobytes()
    return f"{tensor.dtype.name}{list(tensor.shape.numpy())} {hashlib.sha256(content).hexdigest()}"


def _trim_trailing_gaps(values: Iterable[ir.Value | None] | Iterable[str | None]) -> list:  # type: ignore[type-arg]
    """Return values without trailing `None`."""
    trimmed = list(values)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return trimmed


NORMALIZER_VERSION = 5
"""Increased when the normalized format changes, so that graphs in an older format are normalized again."""


def stamp(model: ir.Model) -> None:
    """Stamp a model as normalized with the present structure and names; in place."""
    model.metadata_props[NORMALIZED_KEY] = json.dumps(_stamp_record(model))


def is_normalized(model: ir.Model) -> bool:
    """Return True for a model with a stamp of the current version, and unchanged structure and names."""
    try:
        record = load_metadata(model.metadata_props.get(NORMALIZED_KEY, "null"))
    except ValueError:
        return False
    return bool(record == _stamp_record(model))


def _stamp_record(model: ir.Model) -> dict[str, str | int]:
    """Return the stamp of a model: version, and digests of structure and names."""
    return {"version": NORMALIZER_VERSION, "fingerprint": fingerprint(model), "names": _digest_of_names(model)}


def _digest_of_names(model: ir.Model) -> str:
    """Return a digest of properties of a normalized graph that the structure omits: unique names, no unused weight."""
    names = [node.name or "" for node in all_nodes(model)]
    unused = sorted(
        name
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if not (value.uses() or value.is_graph_output())
    )
    return hashlib.sha256(json.dumps([names, unused]).encode()).hexdigest()
