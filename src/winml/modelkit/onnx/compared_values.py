"""Constants that a graph compares its inputs with, or finds in tables: their valid values, as a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from winml.modelkit.onnx.files.reading import read_structure

_UNCHANGED = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Gather", "Concat"})
"""Operators whose outputs have the values of their first input."""
_MOST_VALUES = 64
"""Chosen: as many categories of a column as samples use."""


def compared_values(path: Path) -> dict[str, tuple[int | str, ...]]:
    """Return input → integers that it is compared with for equality, or texts of the tables that it is looked up in.

    For: silero-vad (sampling rate), columns of categories in pipelines of scikit-learn.
    """
    graph = read_structure(path).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    origins = {value.name: value.name for value in graph.input if value.name not in constants}
    values: dict[str, dict[int | str, None]] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
        read = [origins[name] for name in node.input if name in origins]
        if not read:
            continue
        if node.op_type in _UNCHANGED and (node.op_type == "Concat" or node.input[0] in origins):
            origins[node.output[0]] = read[0]
        elif node.op_type == "Equal":
            tensors = [constants[name] for name in node.input if name in constants]
            values.setdefault(read[0], {}).update(dict.fromkeys(_integers(tensors)))
        texts = [text.decode("utf-8", "replace") for text in _texts(node)]
        values.setdefault(read[0], {}).update(dict.fromkeys(texts))
    return {name: tuple(found)[:_MOST_VALUES] for name, found in values.items() if found}


def _integers(tensors: list[onnx.TensorProto]) -> Iterator[int]:
    """Yield the integers of constants; floats that are none are left out."""
    for tensor in tensors:
        if tensor.data_type != onnx.TensorProto.STRING and not tensor.external_data:
            values = np.ravel(onnx.numpy_helper.to_array(tensor))[:_MOST_VALUES]
            yield from (int(value) for value in values if np.isfinite(value) and value == int(value))


def _texts(node: onnx.NodeProto) -> Iterator[bytes]:
    """Yield the texts in the tables of a node of ``ai.onnx.ml``."""
    if node.domain == "ai.onnx.ml":
        for attribute in node.attribute:
            if attribute.name in ("keys_strings", "cats_strings"):
                yield from attribute.strings
