"""Which values are known before the model runs?"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants_ir

from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import read_tag, write_tag

__all__ = ["ConstantFoldingPass"]

INPUT_LIMIT_ELEMENTS = 8192
"""Largest operand that is read. onnxscript's default: above every shape, index list and bias, below every weight matrix
of a real model, so that capturing and normalizing touch no weights."""
OUTPUT_LIMIT_ELEMENTS = 16_384
"""Largest result that is stored. Chosen: an attention mask at sequence length 128 (128 KiB of int64 at most). At 512 it
would add 2 MiB to the file, for something ONNX Runtime computes once when it loads the graph."""

UNRELIABLE = frozenset({"GatherElements"})
"""Measured with onnx 1.23.2: its reference implementation chooses among at most 64 rows, and falls back on code of
another shape."""


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
        4. the operator is random, or quantizes: that is the point of the node (onnxscript sees to this);
        5. the reference implementation of the operator is not to be relied on (``UNRELIABLE``).

    Tags: merges. A node that takes the place of another gets its tag; nodes it needs besides get that of the node they
    feed.

    Why it is safe: values are computed by ONNX's reference implementation from operands nothing can change at run time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold, then tag and name the nodes onnxscript made."""
        makers = {value.name: node for node in all_nodes(model) for value in node.outputs if value.name}
        with _failures_unsaid():
            result = fold_constants_ir(
                model,
                onnx_shape_inference=True,
                input_size_limit=INPUT_LIMIT_ELEMENTS,
                output_size_limit=OUTPUT_LIMIT_ELEMENTS,
                should_fold=_should_fold,
            )
        _settle_new_nodes(model, makers)
        _forget_sources(model)
        return ir.passes.PassResult(model, result.modified)


@contextlib.contextmanager
def _failures_unsaid() -> Iterator[None]:
    """Keep onnxscript from warning of a node the reference implementation cannot compute: it stays, and nobody need
    act.
    """

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger(fold_constants_ir.__module__)
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def _should_fold(node: ir.Node) -> bool | None:
    """Return False for cases 2, 3 and 5, True for a small ConstantOfShape, None to leave it to onnxscript."""
    size = _static_size(node.outputs[0])
    # Known before it is computed: an Expand to gigabytes need not be tried.
    if size is not None and size > OUTPUT_LIMIT_ELEMENTS:
        return False
    if node.op_type in UNRELIABLE:
        return False
    if node.op_type == "Transpose" and any(value is not None and len(value.uses()) > 1 for value in node.inputs):
        return False
    # onnxscript never folds it, because of its size; left alone it keeps every shape computed from it from being
    # folded.
    if node.op_type == "ConstantOfShape" and size is not None:
        return True
    return None


def _static_size(value: ir.Value) -> int | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return math.prod(value.shape.numpy())


def _settle_new_nodes(model: ir.Model, makers: Mapping[str, ir.Node]) -> None:
    """Give new nodes the metadata, and the place in names, of the node they replaced; it is found by the value it
    made.
    """
    known = set(makers.values())
    # Backwards, so that a node made for another one finds that one tagged.
    for node in reversed([node for node in all_nodes(model) if node not in known]):
        assert node.graph is not None
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            # An identity that onnxscript made and then went around.
            node.graph.remove(node, safe=True)
            continue
        replaced = next((makers[value.name] for value in node.outputs if value.name and value.name in makers), None)
        donor = replaced or next((user for value in node.outputs for user in value.consumers()), None)
        if donor is None:
            continue
        node.metadata_props.update(donor.metadata_props)
        node.name = f"{(donor.name or '').rpartition('/')[0]}/{node.op_type}"
        if (tag := read_tag(donor)) is not None:
            write_tag(node, replace(tag, source="merged"))


def _forget_sources(model: ir.Model) -> None:
    """Drop onnxscript's note on every folded value: it lists names that are gone."""
    for graph in model.graphs():
        for value in (
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
            *graph.inputs,
        ):
            value.metadata_props.pop(FOLDED_FROM_KEY, None)
            value.meta.pop(FOLDED_FROM_KEY, None)
