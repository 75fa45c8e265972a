"""Computes values that depend on constants only, and stores them as initializers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants_ir

from winml.modelkit.hierarchy.tagging import all_nodes, read_tag, write_tag

__all__ = ["ConstantFoldingPass"]

INPUT_LIMIT_ELEMENTS = 8192
"""Largest operand that is read. onnxscript's default: larger than any shape, index list or bias, smaller than the
weight matrices of real models, so that no weights are read."""
OUTPUT_LIMIT_ELEMENTS = 16_384
"""Largest result that is stored. Chosen: an attention mask at sequence length 128 (128 KiB of int64 at most). A mask of
length 512 would add 2 MiB to the file, and ONNX Runtime computes it once when it loads the graph."""

UNRELIABLE = frozenset({"GatherElements"})
"""Operators whose reference implementation is wrong. Measured with onnx 1.23.2: GatherElements chooses among at most 64
rows, and its fallback returns another shape."""


class ConstantFoldingPass(ir.passes.InPlacePass):
    """Compute what depends on constants only, with onnxscript's folding. Works in place.

    Before / After::

        x → Shape → Gather(0) → Unsqueeze → Concat(.., 64) → Reshape      [1, 16, 64] → Reshape
        x[1,16] → Reshape([1,16]) → y                                     x → y
        If(true) { then: Relu }                                           Relu

    Must not fire when:
        1. an operand has more than ``INPUT_LIMIT_ELEMENTS``: it is a weight, and weights are not read;
        2. the result has more than ``OUTPUT_LIMIT_ELEMENTS``: the file would grow;
        3. it transposes a weight that something else uses too: the file would hold it twice;
        4. the operator is random, or quantizes, so that its node is intended (checked by onnxscript);
        5. the reference implementation of the operator is unreliable (``UNRELIABLE``).

    Tags: merges. A node that makes the value of another gets its tag, as does one that reads what a removed node read.
    Further new nodes get the tag of the node they feed.

    Why it is safe: values are computed by ONNX's reference implementation from operands that cannot change at run time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold, then tag and name the nodes onnxscript created."""
        makers = {value.name: node for node in all_nodes(model) for value in node.outputs if value.name}
        readers = _readers_of_values(model)
        with _without_folding_warnings():
            result = fold_constants_ir(
                model,
                onnx_shape_inference=True,
                input_size_limit=INPUT_LIMIT_ELEMENTS,
                output_size_limit=OUTPUT_LIMIT_ELEMENTS,
                should_fold=_should_fold,
            )
        _tag_new_nodes(model, makers, readers)
        _drop_folding_notes(model)
        return ir.passes.PassResult(model, result.modified)


@contextlib.contextmanager
def _without_folding_warnings() -> Iterator[None]:
    """Suppress onnxscript's warnings about nodes it could not compute: such a node stays, and no action is needed."""

    def is_error(log_record: logging.LogRecord) -> bool:
        return log_record.levelno >= logging.ERROR

    logger = logging.getLogger(fold_constants_ir.__module__)
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def _should_fold(node: ir.Node) -> bool | None:
    """Return False for cases 2, 3 and 5, True for a small ConstantOfShape, None to let onnxscript decide."""
    size = _static_size(node.outputs[0])
    # Checked before it is computed: an Expand to gigabytes is not tried.
    if size is not None and size > OUTPUT_LIMIT_ELEMENTS:
        return False
    if node.op_type in UNRELIABLE:
        return False
    if node.op_type == "Transpose" and any(value is not None and len(value.uses()) > 1 for value in node.inputs):
        return False
    # onnxscript never folds it because of its size, and then cannot fold the shapes computed from it either.
    if node.op_type == "ConstantOfShape" and size is not None:
        return True
    return None


def _static_size(value: ir.Value) -> int | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return math.prod(value.shape.numpy())


def _readers_of_values(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """Return the nodes that read each value as their first input."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in all_nodes(model):
        if node.inputs and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return readers


def _tag_new_nodes(
    model: ir.Model, makers: Mapping[str, ir.Node], readers: Mapping[ir.Value, Sequence[ir.Node]]
) -> None:
    """Give new nodes the metadata and the name prefix of the node they replace, in place.

    Args:
        model: The graph after folding.
        makers: Value → the node that produced it before.
        readers: Value → the nodes that read it before, as their first input.
    """
    original_nodes = set(makers.values())
    # Backwards, so that the node that reads a new node is tagged first.
    for node in reversed([node for node in all_nodes(model) if node not in original_nodes]):
        assert node.graph is not None
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            # An Identity that onnxscript created and then bypassed.
            node.graph.remove(node, safe=True)
            continue
        replaced_node = next(
            (makers[value.name] for value in node.outputs if value.name and value.name in makers), None
        )
        if replaced_node is None and node.inputs and node.inputs[0] is not None:
            # A SplitToSequence that became a Split.
            replaced_node = next((reader for reader in readers.get(node.inputs[0], ()) if reader.graph is None), None)
        template = replaced_node or next((user for value in node.outputs for user in value.consumers()), None)
        if template is None:
            continue
        node.metadata_props.update(template.metadata_props)
        node.name = f"{(template.name or '').rpartition('/')[0]}/{node.op_type}"
        if (tag := read_tag(template)) is not None:
            write_tag(node, replace(tag, source="merged"))


def _drop_folding_notes(model: ir.Model) -> None:
    """Remove onnxscript's note on every folded value, in place: it lists names that no longer exist."""
    for graph in model.graphs():
        for value in (
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
            *graph.inputs,
        ):
            value.metadata_props.pop(FOLDED_FROM_KEY, None)
            value.meta.pop(FOLDED_FROM_KEY, None)
