"""Explains why the outputs of a file differ from the model's, after a comparison failed.

Looks for causes other than the graph: a model that answers differently each time, weights that are not numbers, or
outputs that depend on values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from winml.modelkit.compare.outputs import VerificationInfo, compare_outputs
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference
from winml.modelkit.compare.verification.varied_sizes import Draw
from winml.modelkit.compare.verification_words import verification_words
from winml.modelkit.errors import VerificationError

_NO_FILE = "No file was written; --no-verify writes it anyway."
_WRONG_GRAPH = (
    "The graph differs from the model. Often forward branches on tensor values (if, .item(), numpy), and a trace "
    f"records one branch. {_NO_FILE}"
)


def refuse_outputs_by_value(draws: Sequence[Draw]) -> None:
    """Refuse to compare where it depends on the values of the inputs which outputs a model returns.

    Raises:
        VerificationError: names the outputs of both draws.
    """
    first, second = (", ".join(draw.reference) for draw in draws)
    if first != second:
        raise VerificationError(
            f"cannot verify: which outputs the model returns depends on the input values ({first}; then {second})",
            hint="Return the same outputs for all inputs; a graph has fixed outputs.",
        )


def explained_failure(
    verification: VerificationInfo, prepared: PreparedPart, draws: Sequence[Draw]
) -> VerificationError:
    """Return the error that tells why a comparison failed, as far as that can be found out.

    Args:
        verification: The comparison.
        prepared: The part, with values.
        draws: What was compared.
    """
    first = draws[0]
    repeated = compare_outputs([first.reference], [run_reference(prepared, first.inputs)])
    if not all(comparison.is_equal for comparison in repeated.comparisons):
        return VerificationError(
            f"cannot verify: output {repeated.worst.name!r} of PyTorch differs between two runs on the same inputs",
            hint="Make the model deterministic (seed its random numbers, store no state between calls), or skip the "
            "comparison with --no-verify.",
        )
    words = verification_words(verification)
    if place := _not_a_number(prepared.model):
        return VerificationError(
            f"{words}; {place}",
            hint="The weights are damaged, or training diverged: download them again. --no-verify writes the file.",
        )
    if not verification.has_signal and all(item.is_equal for item in verification.comparisons):
        error = VerificationError(
            words, hint="Use real weights or other inputs (--input-specs), or skip the comparison with --no-verify."
        )
        error.is_silent = True
        return error
    failed = draws[verification.worst.draw - 1]
    # Draws are looked at in order: the first was equal, or said nothing.
    hint = _WRONG_GRAPH
    if first.has_padding != failed.has_padding:
        here, there = ("with", "without") if failed.has_padding else ("without", "with")
        hint = (
            f"It fails {here} padding: the model takes a different branch there than {there} padding, and a graph has "
            f"one branch only. {_NO_FILE}"
        )
    return VerificationError(words, hint=hint, is_graph_wrong=True, inputs=failed.inputs)


def _not_a_number(model: nn.Module) -> str:
    """Return which parameter holds NaN or infinity, the first one, in words; empty where none does."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            what = "NaN" if torch.isnan(parameter).any() else "infinity"
            return f"parameter {name!r} contains {what}"
    return ""
