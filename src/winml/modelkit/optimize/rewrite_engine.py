"""Runs the optimizer's own passes on a graph and carries the tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import OptimizeError
from winml.modelkit.graph.stage import DeclaredPass, run_passes
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.optimize.attention_fusion import AttentionFusionPass
from winml.modelkit.optimize.capabilities import Capability
from winml.modelkit.optimize.decoders.grouped_attention_fusion import GroupQueryAttentionFusionPass
from winml.modelkit.optimize.decoders.norm_fusions import RootMeanSquareNormFusionPass, SkipNormFusionPass

__all__ = ["PASSES", "rewrite_with_passes"]

TAGGING_PASSES: Mapping[str, Callable[[], ir.passes.PassBase]] = {
    # First: what turns queries by position reads their normalization as one operator.
    "simplified_layer_norm_fusion": RootMeanSquareNormFusionPass,
    "group_query_attention_fusion": GroupQueryAttentionFusionPass,
    # Last: sizes that two sides of a sum have in common are known again once attentions are fused.
    "skip_simplified_layer_norm_fusion": SkipNormFusionPass,
}
"""Capability → its pass, in the order they run; these tag what they create themselves."""

PASSES: Mapping[str, Callable[[], ir.passes.PassBase]] = {"attention_fusion": AttentionFusionPass}
"""Capability → its pass, in the order they run after those; the tags of what they create are carried."""

_CLEANUP = (
    # A module that is called twice has two attentions with one name.
    DeclaredPass(common.NameFixPass(), "keeps"),
    DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
    DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
)


def rewrite_with_passes(
    model: ir.Model,
    capabilities: Sequence[Capability],  # noqa: ARG001 - one signature for every engine
    contrib: Sequence[Capability],
) -> tuple[ir.Model, tuple[str, ...]]:
    """Run the passes of capabilities, in place; return the model and notes on its tags.

    Args:
        model: The model.
        capabilities: The enabled capabilities.
        contrib: Those of them that may create operators of ONNX Runtime; all passes here do.

    Raises:
        OptimizeError: a pass failed, or changed the inputs or outputs of the model.
    """
    names = {entry.name for entry in contrib}
    if run_passes(
        model,
        [DeclaredPass(make(), "creates") for name, make in TAGGING_PASSES.items() if name in names],
        OptimizeError,
    ):
        run_passes(model, _CLEANUP, OptimizeError)
    # Tags are carried below, so passes need not keep them.
    steps = [DeclaredPass(make(), "drops") for name, make in PASSES.items() if name in names]
    original = model.clone()
    if not run_passes(model, steps, OptimizeError):
        return model, ()
    # The replaced nodes must be removed before the tags of the new nodes are determined.
    run_passes(model, _CLEANUP, OptimizeError)
    return model, carry_tags(original, model).notes
