"""Normalization of a graph, by passes in a fixed order.

In memory and without ONNX Runtime. Passes come from onnx_ir and onnxscript if available there, else from the modules of
this package. Does not depend on the tool that made the graph.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants_ir

from winml.modelkit.errors import NormalizeError
from winml.modelkit.normalize.passes import (
    BFloat16WideningPass,
    GeluOrderingPass,
    IdentityRemovalPass,
    InferredShapesPass,
    PaddingSeparationPass,
    ScaleOrderPass,
    UniqueNodeNamesPass,
    UnusedInitializerRemovalPass,
    ValueNamesPass,
    WeightTranspositionPass,
)
from winml.modelkit.normalize.size_simplification import SizeSimplificationPass
from winml.modelkit.onnx.stage import DeclaredPass, StageResult, run_passes
from winml.modelkit.options import Options
from winml.modelkit.tags.tagging import all_nodes, measure_coverage, read_tag, write_tag

MAX_ROUNDS = 5
"""Chosen: two rounds settle every graph tried, the second without changes; further rounds guard against passes that
undo each other.
"""


class NormalizeOptions(Options):
    """Options of the normalization."""

    fold_constants: bool = True
    """Fold computations on constants or known sizes, and store weights in the layout of their use."""


def normalize(model: ir.Model, options: NormalizeOptions = NormalizeOptions()) -> StageResult:  # noqa: B008 - frozen
    """Normalize a model, in place.

    Afterwards there are no ``Constant`` nodes that could be initializers, no identities, no dead nodes; known values
    are computed; every value has a shape if onnx can infer it; node and value names are unique. Graph inputs and
    outputs are unchanged. A second call changes nothing, unless a note says that normalization did not converge.

    Args:
        model: The model. Weights are neither read nor copied.
        options: Options of the normalization.

    Returns:
        The same model, True if it changed, and its tag coverage. If a pass fails or makes the graph invalid,
        normalization is repeated without the pass on a copy of the graph (a new ``model.graph``), and noted.
    """
    passes = _ordered_passes(options)
    notes: tuple[str, ...] = ()
    while True:
        # Measured: 3 to 10 % of the time of the passes.
        original = model.clone()
        try:
            changed, is_settled = _run_until_settled(model, passes)
            break
        except NormalizeError as error:
            passes = tuple(declared for declared in passes if declared.name != error.failed_pass)
            notes = (*notes, f"Normalization without {error.failed_pass}: {error.message}.")
            model.graph = original.graph
            model.functions.clear()
            model.functions.update(original.functions)
    if not is_settled:
        notes = (*notes, f"Normalization did not converge after {MAX_ROUNDS} rounds.")
    return StageResult(model, changed, (*notes, *_shape_notes(model)), measure_coverage(model))


def _run_until_settled(model: ir.Model, passes: Sequence[DeclaredPass]) -> tuple[bool, bool]:
    """Run the passes until no pass changes the model; return True if any did, and True if the last round did not."""
    changed = False
    for _ in range(MAX_ROUNDS):
        # Shapes learned at the end of a round allow further folding in the next round.
        if not run_passes(model, passes, NormalizeError):
            return changed, True
        changed = True
    return changed, False


def _ordered_passes(options: NormalizeOptions) -> tuple[DeclaredPass, ...]:
    folding = (
        # Before folding, which would compute small transpositions; this one only refers to them.
        DeclaredPass(WeightTranspositionPass(), "keeps"),
        DeclaredPass(ConstantFoldingPass(), "merges"),
    )
    # It turns nodes into identities, which are removed before patterns are matched.
    simplification = (DeclaredPass(SizeSimplificationPass(), "keeps"), DeclaredPass(IdentityRemovalPass(), "keeps"))
    return (
        # First: later passes identify values by name.
        DeclaredPass(ValueNamesPass(), "keeps"),
        # Before folding, which computes casts of constants.
        DeclaredPass(BFloat16WideningPass(), "creates"),
        *(folding if options.fold_constants else ()),
        # After folding, which leaves computed values as Constant nodes, and no-ops as identities.
        DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
        DeclaredPass(IdentityRemovalPass(), "keeps"),
        *(simplification if options.fold_constants else ()),
        DeclaredPass(GeluOrderingPass(), "keeps"),
        DeclaredPass(ScaleOrderPass(), "keeps"),
        # After all operators between a padding and its reader are removed.
        DeclaredPass(PaddingSeparationPass(), "keeps"),
        # After all that takes uses away.
        DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
        DeclaredPass(UnusedInitializerRemovalPass(), "keeps"),
        DeclaredPass(common.RemoveUnusedFunctionsPass(), "keeps"),  # type: ignore[no-untyped-call]
        DeclaredPass(common.RemoveUnusedOpsetsPass(), "keeps"),
        # On the values that are left.
        DeclaredPass(InferredShapesPass(), "keeps"),
        # Last: passes above make values and nodes.
        DeclaredPass(ValueNamesPass(), "keeps"),
        DeclaredPass(UniqueNodeNamesPass(), "keeps"),
    )


def _shape_notes(model: ir.Model) -> Iterator[str]:
    values = [value for node in all_nodes(model) for value in node.outputs if value.name]
    shapeless = [
        value
        for value in values
        if value.shape is None and not isinstance(value.type, (ir.SequenceType, ir.OptionalType))
    ]
    if shapeless:
        yield f"{len(shapeless)} of {len(values)} values have no inferred shape, the first is {shapeless[0].name}."


_INPUT_LIMIT_ELEMENTS = 8192
"""Maximum size of an operand that is read. onnxscript's default: larger than any shape, index list or bias, smaller
than the weight matrices of real models, so that no weights are read.
"""
OUTPUT_LIMIT_ELEMENTS = 16_384
"""Maximum size of a stored result. Chosen: an attention mask at sequence length 128 (128 KiB of int64 at most). A mask
of length 512 would add 2 MiB to the file, and ONNX Runtime computes it once when it loads the graph.
"""

_SPLIT_INTO_EQUAL_PARTS = 18
_STACK_RANK = 3
"""Specified: axes of the weights of all experts, experts × rows × columns."""
_SIZES_AS_INPUTS = 13
_CONSTANT_INTEGERS = 12
"""Specified: the opsets in which ``Split`` got ``num_outputs``, sizes and axes became inputs, and ``Constant`` got
``value_ints``."""
_CONSTANT_ATTRIBUTES = {"Split": "split", "Squeeze": "axes", "Unsqueeze": "axes"}
"""Specified: operator → attribute with the values that are its second input from opset 13 on."""

_UNRELIABLE = frozenset({"GatherElements"})
"""Operators with a wrong reference implementation. Measured with onnx 1.23.2: GatherElements chooses among at most 64
rows, and its fallback returns another shape.
"""


class ConstantFoldingPass(ir.passes.InPlacePass):
    """Compute values that depend on constants only, with onnxscript's folding. Works in place.

    Before / After::

        x → Shape → Gather(0) → Unsqueeze → Concat(.., 64) → Reshape      [1, 16, 64] → Reshape
        x[1,16] → Reshape([1,16]) → y                                     x → y
        If(true) { then: Relu }                                           Relu

    Must not fire when:
        1. an operand has more than `_INPUT_LIMIT_ELEMENTS`: it is a weight, and weights are not read;
        2. the result has more than ``OUTPUT_LIMIT_ELEMENTS``: the file would grow;
        3. it transposes a weight with other readers: the file would hold it twice;
        4. the operator is random, or quantizes, so that its node is intended (checked by onnxscript);
        5. the reference implementation of the operator is unreliable (``UNRELIABLE``);
        6. it selects one matrix of a stack, such as that of an expert: a fusion needs the stack.

    Tags: merges. A node that produces the value of a removed node gets the removed node's tag, as does a node that
    reads a removed node's input. Further new nodes get the tag of the node they feed.

    Why it is safe: values are computed by ONNX's reference implementation from operands that cannot change at run time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold, then tag and name the nodes onnxscript created."""
        makers = {value.name: node for node in all_nodes(model) for value in node.outputs if value.name}
        readers = _map_first_readers(model)
        with _without_folding_warnings():
            result = fold_constants_ir(
                model,
                onnx_shape_inference=True,
                input_size_limit=_INPUT_LIMIT_ELEMENTS,
                output_size_limit=OUTPUT_LIMIT_ELEMENTS,
                should_fold=_should_fold,
            )
        _tag_new_nodes(model, makers, readers)
        _write_in_opset(model)
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
    """Return False for cases 2, 3, 5 and 6, True for a small ConstantOfShape, None if onnxscript decides."""
    shape = node.outputs[0].shape
    size = math.prod(shape.numpy()) if shape is not None and shape.is_static() else None
    # Checked before it is computed: an Expand to gigabytes is not tried.
    if size is not None and size > OUTPUT_LIMIT_ELEMENTS:
        return False
    if node.op_type in _UNRELIABLE:
        return False
    if node.op_type == "Transpose" and any(value is not None and len(value.uses()) > 1 for value in node.inputs):
        return False
    if node.op_type == "Gather" and _is_stack(node.inputs[0]):
        return False
    # onnxscript skips it because of its size, and then cannot fold the shapes computed from it.
    if node.op_type == "ConstantOfShape" and size is not None:
        return True
    return None


def _is_stack(value: ir.Value | None) -> bool:
    """Return True for a float weight of stacked matrices that several nodes read."""
    if value is None or value.shape is None or value.dtype is None:
        return False
    return len(value.shape) == _STACK_RANK and value.dtype.is_floating_point() and len(value.uses()) > 1


def _write_in_opset(model: ir.Model) -> None:
    """Convert nodes that onnxscript wrote for opset 18 to the model's opset, in place.

    onnxscript writes sequences as ``Split``, ``Squeeze`` and ``Unsqueeze`` of opset 18, regardless of the model's
    opset. Computed sizes and axes are not supported before opset 13: such a node is unchanged.
    """
    opset = model.opset_imports.get("", 18)
    for node in all_nodes(model) if opset < _SPLIT_INTO_EQUAL_PARTS else ():
        if node.domain:
            continue
        if node.op_type == "Constant" and opset < _CONSTANT_INTEGERS and "value" not in node.attributes:
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
            if tensor is not None:
                node.attributes.clear()
                node.attributes["value"] = ir.AttrTensor("value", tensor)
        if (name := _CONSTANT_ATTRIBUTES.get(node.op_type)) is None:
            continue
        # The parts are equal, as made by a Split without sizes.
        node.attributes.pop("num_outputs", None)
        operand = node.inputs[1] if len(node.inputs) > 1 else None
        constant = None if operand is None else ir.convenience.get_const_tensor(operand)
        if opset < _SIZES_AS_INPUTS and constant is not None:
            node.attributes[name] = ir.AttrInt64s(name, constant.numpy().reshape(-1).tolist())
            node.resize_inputs(1)


def _map_first_readers(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """Return the nodes that read each value as their first input."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in all_nodes(model):
        if node.inputs and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return readers


def _tag_new_nodes(
    model: ir.Model, makers: Mapping[str, ir.Node], readers: Mapping[ir.Value, Sequence[ir.Node]]
) -> None:
    """Copy metadata and name prefix of replaced nodes to the new nodes, in place.

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
    """Remove onnxscript's note on every folded value, in place: the note lists removed names."""
    for graph in model.graphs():
        for value in (
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
            *graph.inputs,
        ):
            value.metadata_props.pop(FOLDED_FROM_KEY, None)
            value.meta.pop(FOLDED_FROM_KEY, None)
