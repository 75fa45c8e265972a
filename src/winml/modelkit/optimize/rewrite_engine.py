"""How do passes of our own change a graph, and how do the tags come along?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import OptimizeError
from winml.modelkit.graph.stage import DeclaredPass, run_passes
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.optimize.attention_fusion import AttentionFusionPass
from winml.modelkit.optimize.capabilities import Capability

__all__ = ["PASSES", "rewrite_with_passes"]

PASSES: Mapping[str, Callable[[], ir.passes.PassBase]] = {"attention_fusion": AttentionFusionPass}
"""Capability → its pass, in the order they run."""

_CLEANING = (
    # A module that is called twice has two attentions of one name.
    DeclaredPass(common.NameFixPass(), "keeps"),
    DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
    DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
)


def rewrite_with_passes(
    model: ir.Model,
    wanted: Sequence[Capability],  # noqa: ARG001 - one signature for every engine; these passes make nothing else
    contrib: Sequence[Capability],
) -> tuple[ir.Model, tuple[str, ...]]:
    """Run the passes of capabilities, in place; return the model, and what is to be known about its tags.

    Args:
        model: The model.
        wanted: Capabilities that may act.
        contrib: Those of them that may make operators of ONNX Runtime, as all these passes do.

    Raises:
        OptimizeError: a pass failed, or changed what goes in or comes out.
    """
    names = {entry.name for entry in contrib}
    # Tags are carried below, so a pass need not see to them.
    steps = [DeclaredPass(make(), "drops") for name, make in PASSES.items() if name in names]
    original = model.clone()
    if not run_passes(model, steps, OptimizeError):
        return model, ()
    # What the new nodes replaced must be gone before it is asked which nodes they stand for.
    run_passes(model, _CLEANING, OptimizeError)
    return model, carry_tags(original, model).notes
