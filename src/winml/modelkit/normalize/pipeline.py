"""Brings a graph into its plain form, by passes in an order that matters.

In memory and without ONNX Runtime. Passes come from onnx_ir and onnxscript where they have them, and from the files
beside this one where they do not. Does not know who made the graph.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import NormalizeError
from winml.modelkit.graph.stage import DeclaredPass, StageResult, run_passes
from winml.modelkit.hierarchy.tagging import all_nodes, measure_coverage
from winml.modelkit.normalize.bfloat16_widening import BFloat16WideningPass
from winml.modelkit.normalize.constant_folding import ConstantFoldingPass
from winml.modelkit.normalize.passes import (
    GeluOrderingPass,
    IdentityRemovalPass,
    InferredShapesPass,
    PaddingSeparationPass,
    UniqueNodeNamesPass,
    UnusedInitializerRemovalPass,
    ValueNamesPass,
    WeightTranspositionPass,
)
from winml.modelkit.normalize.size_simplification import SizeSimplificationPass
from winml.modelkit.options import Options

__all__ = ["NormalizeOptions", "normalize"]

MAX_ROUNDS = 5
"""Chosen: two rounds settle every graph tried, the second finding nothing; more guard against passes that undo each
other."""


class NormalizeOptions(Options):
    """What normalizing may do."""

    fold_constants: bool = True
    """Compute what depends on constants or known sizes only, and store weights the way round they are used."""


def normalize(model: ir.Model, options: NormalizeOptions = NormalizeOptions()) -> StageResult:  # noqa: B008 - frozen
    """Bring a model into its plain form, in place.

    Afterwards there are no ``Constant`` nodes that could be initializers, no identities, no dead nodes; what is known
    is computed; every value onnx can infer has a shape; node and value names are unique. Graph inputs and outputs stay
    as they are. A second call changes nothing.

    Args:
        model: The model. Weights are neither read nor copied.
        options: What may be done.

    Returns:
        The same model, whether it changed, and its coverage.

    Raises:
        NormalizeError: a pass failed or did not keep its promise; names the pass.
    """
    passes = _ordered_passes(options)
    changed = False
    notes: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        # Shapes learned at the end of a round let more be folded in the next.
        if not run_passes(model, passes, NormalizeError):
            break
        changed = True
    else:
        notes = (f"Normalization still found something to do after {MAX_ROUNDS} rounds.",)
    return StageResult(model, changed, (*notes, *_shape_notes(model)), measure_coverage(model))


def _ordered_passes(options: NormalizeOptions) -> tuple[DeclaredPass, ...]:
    folding = (
        # Before folding, which would compute small transpositions; this one only refers to them.
        DeclaredPass(WeightTranspositionPass(), "keeps"),
        DeclaredPass(ConstantFoldingPass(), "merges"),
    )
    # It makes nodes identities, which are removed before anything reads a pattern.
    simplification = (DeclaredPass(SizeSimplificationPass(), "keeps"), DeclaredPass(IdentityRemovalPass(), "keeps"))
    return (
        # First: what follows finds values again by name.
        DeclaredPass(ValueNamesPass(), "keeps"),
        # Before folding, which computes casts of constants.
        DeclaredPass(BFloat16WideningPass(), "creates"),
        *(folding if options.fold_constants else ()),
        # After folding, which leaves what it computed as Constant nodes, and no-ops as identities.
        DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
        DeclaredPass(IdentityRemovalPass(), "keeps"),
        *(simplification if options.fold_constants else ()),
        DeclaredPass(GeluOrderingPass(), "keeps"),
        # Where nothing stands between a padding and its reader any more.
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


def _shape_notes(model: ir.Model) -> tuple[str, ...]:
    values = [value for node in all_nodes(model) for value in node.outputs if value.name]
    shapeless = [
        value
        for value in values
        if value.shape is None and not isinstance(value.type, (ir.SequenceType, ir.OptionalType))
    ]
    if not shapeless:
        return ()
    return (
        f"{len(shapeless)} of {len(values)} values have no shape that onnx could infer, {shapeless[0].name} first.",
    )
