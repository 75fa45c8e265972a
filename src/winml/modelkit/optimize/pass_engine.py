"""Runs the optimizer's own passes on a graph and carries the tags."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import OptimizeError
from winml.modelkit.onnx.stage import DeclaredPass, GraphPass, run_passes
from winml.modelkit.optimize.capabilities import CAPABILITIES, Capability
from winml.modelkit.tags.carry.carrying import carry_tags

_ORDER = (
    # First: what turns queries by position reads their normalization as one operator.
    "simplified_layer_norm_fusion",
    "group_query_attention_fusion",
    # Last: sizes that two sides of a sum have in common are known again once attentions are fused.
    "skip_simplified_layer_norm_fusion",
)
"""Capabilities whose passes run in this order before those of all others, which run in the order of the registry."""

_CLEANUP = (
    # A module that is called twice has two attentions with one name.
    DeclaredPass(common.NameFixPass(), "keeps"),
    DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
    DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
)


def rewrite_with_passes(model: ir.Model, capabilities: Sequence[Capability]) -> tuple[ir.Model, tuple[str, ...]]:
    """Run the passes of capabilities, in place; return the model and notes on its tags.

    Args:
        model: The model.
        capabilities: The enabled capabilities.

    Raises:
        OptimizeError: a pass failed, or changed the inputs or outputs of the model.
        UsageError: the pass of a plug-in cannot be imported.
    """
    steps = []
    for entry in sorted(capabilities, key=lambda entry: [*_ORDER, entry.name].index(entry.name)):
        if entry.sets is None:  # else it changes the pass of another
            keywords = {other.sets[1]: True for other in capabilities if other.sets and other.sets[0] == entry.name}
            effect: GraphPass = CAPABILITIES.part(entry.name, entry.implementation)(**keywords)
            steps.append(DeclaredPass(effect, effect.tags))
    if run_passes(model, [step for step in steps if step.tags != "drops"], OptimizeError):
        run_passes(model, _CLEANUP, OptimizeError)
    original = model.clone()
    if not run_passes(model, [step for step in steps if step.tags == "drops"], OptimizeError):
        return model, ()
    # The replaced nodes must be removed before the tags of the new nodes are determined.
    run_passes(model, _CLEANUP, OptimizeError)
    return model, carry_tags(original, model).notes
