"""Convert a graph to another opset."""

from __future__ import annotations

import logging
import re

import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, first_line
from winml.modelkit.normalize.passes import InferredShapesPass
from winml.modelkit.onnx.map_types import attach_maps, detach_maps
from winml.modelkit.tags.carry.carrying import carry_tags

_ASSERTION = re.compile(r"^\S+:\d+: (?:\w+: )?(?:Assertion `.*` failed: )?")
"""Location of an error in onnx's own source, which does not help the user."""
_FREE_BROADCASTS = 7
"""Specified by ONNX: the first opset in which operators broadcast as numpy does, without ``axis``."""
_UNBATCHED_SCAN = 9
"""Specified by ONNX: the first opset whose Scan has no batch axis; onnx's converter retains the axis."""


def convert_opset(model: ir.Model, target: int) -> tuple[ir.Model, tuple[str, ...]]:
    """Convert a model to a newer or older opset; return the new model and notes on its tags.

    onnxscript converts supported operators, and onnx's converter the rest. onnx's converter drops all metadata, so tags
    are transferred. Local functions are inlined. The original model is not changed.

    Args:
        model: The model.
        target: Version of the ONNX operators.

    Raises:
        OptimizeError: an operator cannot be converted.
    """
    current_opset = model.opset_imports.get("")
    if current_opset == target:
        return model, ()
    if current_opset is not None and (current_opset < _UNBATCHED_SCAN) != (target < _UNBATCHED_SCAN):
        _refuse_scans(model, current_opset, target)
    converted = model.clone()
    if current_opset is not None and current_opset < _FREE_BROADCASTS <= target:
        _align_broadcasts(converted)
    reason = convert_in_place(converted, target)
    if converted.opset_imports.get("") != target:
        raise OptimizeError(
            f"cannot convert opset {current_opset} to {target}: {reason}",
            hint="Choose an opset nearer to that of the model, or export the model with the requested opset.",
        )
    return converted, carry_tags(model, converted).notes


def _refuse_scans(model: ir.Model, current_opset: int, target: int) -> None:
    """Refuse to convert a Scan between opset 8, where it has a batch axis, and later ones.

    Raises:
        OptimizeError: names the node.
    """
    for node in model.graph.all_nodes():
        if node.op_type == "Scan" and not node.domain:
            raise OptimizeError(
                f"cannot convert opset {current_opset} to {target}: Scan has a batch axis in opset 8 only "
                f"(node {node.name!r})",
                hint=f"Export the model with opset {_UNBATCHED_SCAN} or newer.",
            )


def _align_broadcasts(model: ir.Model) -> None:
    """Append sizes of 1 to inputs that an old operator broadcasts along an axis, in place.

    onnx's converter appends them as if the axis were 0, and appends none to the slopes of PRelu, which has one for each
    channel.

    Raises:
        OptimizeError: the number of dimensions of an input is not known.
    """
    waiting = [node for node in model.graph.all_nodes() if _broadcast_axis(node) is not None]
    while waiting:
        InferredShapesPass()(model)
        aligned = [node for node in waiting if all(value and value.shape is not None for value in node.inputs)]
        if not aligned:
            raise OptimizeError(
                f"node {waiting[0].name or waiting[0].op_type}: broadcasts along axis {_broadcast_axis(waiting[0])}, "
                "and the number of dimensions of its inputs is not known",
                hint="Declare the shapes of the inputs of the graph.",
            )
        for node in aligned:
            _align_broadcast(node)
        waiting = [node for node in waiting if node not in aligned]


def _broadcast_axis(node: ir.Node) -> int | None:
    """Return the axis of the first input at which the dimensions of the second begin; None if they end at the last."""
    if node.op_type == "PRelu":
        return 1
    return node.attributes.get_int("axis", None) if node.attributes.get_int("broadcast", 0) else None


def _align_broadcast(node: ir.Node) -> None:
    """Append sizes of 1 to the second input of a node, so that its dimensions begin at an axis of the first."""
    first, second = node.inputs
    assert first is not None  # checked by the caller
    assert first.shape is not None
    assert second is not None
    assert second.shape is not None
    axis, rank = _broadcast_axis(node), len(second.shape)
    assert axis is not None
    is_single = rank == 1 and second.shape[0] == 1  # one slope for all channels
    if (missing := len(first.shape) - axis % len(first.shape) - rank) > 0 and not is_single:
        unsqueeze = ir.node("Unsqueeze", [second], {"axes": [*range(rank, rank + missing)]})
        unsqueeze.outputs[0].name = f"{node.outputs[0].name}:{second.name}"
        node.prepend(unsqueeze)
        node.replace_input_with(1, unsqueeze.outputs[0])
    node.attributes.pop("axis", None)
    # onnx infers no shape of these operators before opset 7.
    node.outputs[0].shape, node.outputs[0].type = first.shape, first.type


def convert_in_place(model: ir.Model, target: int) -> str:
    """Convert in place as far as possible; return the last failure, in case the opset was not reached.

    Metadata of nodes that onnx's converter has to convert is lost.
    """
    # Imported on demand: most graphs retain their opset, and the import takes a third of a second.
    from onnxscript import version_converter

    failures: list[str] = []

    def collect_failure(log_record: logging.LogRecord) -> bool:
        # The library only logs its failure and returns the model unchanged.
        if log_record.exc_info and log_record.exc_info[1]:
            failures.append(_failure_reason(log_record.exc_info[1]))
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(collect_failure)
    # The converters read no types of maps.
    detached, imports = detach_maps(model), dict(model.opset_imports)
    try:
        version_converter.convert_version(model, target, fallback=True)
    except (ValueError, RuntimeError) as error:
        failures.append(_failure_reason(error))
    finally:
        logger.removeFilter(collect_failure)
        attach_maps(model, detached, imports)
    return failures[-1] if failures else "no converter supports both versions"


def _failure_reason(error: BaseException) -> str:
    return _ASSERTION.sub("", first_line(error)) or type(error).__name__
