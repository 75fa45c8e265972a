"""A family: models of adaptive computation, which repeat a block until every token has halted.

The number of rounds depends on the values, and a graph that is traced has those of the example. All rounds that the
config allows give the same answer: a token that has halted keeps its state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from winml.modelkit.extend import FoundParts, decide_model_inputs, part_of_decision

if TYPE_CHECKING:
    import torch

    from winml.modelkit.extend import CheckpointConfig, ModelRequest


def adaptive_computation(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> FoundParts:
    """Return the model as one part that runs all rounds; nothing of a model that never halts."""
    rounds = getattr(checkpoint.config, "max_rounds", None)
    if rounds is None or not hasattr(model, "halting"):
        return FoundParts()
    decision = decide_model_inputs(model, checkpoint, task, request)
    return FoundParts((part_of_decision(model, decision, {"rounds": rounds}, None),))
