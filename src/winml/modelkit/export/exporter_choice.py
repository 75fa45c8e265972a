"""Chooses the exporter: TorchScript or dynamo.

TorchScript is faster where it can trace the model. dynamo exports models of any size, and most of those TorchScript
cannot trace. The first choice depends on the options and the size of the weights; a failure leads to the second choice.
Reasons: docs/decisions/0003-torchscript-first.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from winml.modelkit.errors import VerificationError
from winml.modelkit.export.config import ExporterName, WinMLExportConfig
from winml.modelkit.words import size_words

__all__ = [
    "LARGE_HANDED_OVER_BYTES",
    "LARGE_WEIGHTS_BYTES",
    "SECOND_TRY_S",
    "ExporterUse",
    "first_choice",
    "parameter_bytes",
    "second_choice",
]

LARGE_WEIGHTS_BYTES = 2**31
"""Specified: the largest protobuf file. Above it dynamo is chosen, since TorchScript needs the weights in memory."""

LARGE_HANDED_OVER_BYTES = 2**29
"""The same where the graph is changed in memory before it is written, so that the file may be small. Chosen: with
TorchScript the weights are in memory, and peak memory is to stay below 1.5 GB, of which 0.5 GB are the libraries."""

SECOND_TRY_S = 120.0
"""Time limit of dynamo as the second choice. Chosen: ten times what a text encoder of 12 layers takes; with open sizes
that a forward divides it can take hours."""


@dataclass(frozen=True)
class ExporterUse:
    """Which exporter is used, and why."""

    name: ExporterName
    reason: str = ""
    """In a few words; empty where it is the default."""
    time_limit_s: float | None = None
    """Longest time it may take; None: unlimited."""


def first_choice(config: WinMLExportConfig, weight_bytes: int, large_bytes: int = LARGE_WEIGHTS_BYTES) -> ExporterUse:
    """Return the exporter to try first.

    Args:
        config: Options of the export.
        weight_bytes: Size of the parameters in memory.
        large_bytes: Size above which they are not to be in memory.
    """
    if config.exporter != "auto":
        return ExporterUse(config.exporter, "asked for")
    if weight_bytes > large_bytes:
        return ExporterUse("dynamo", f"{size_words(weight_bytes)} of weights, over {size_words(large_bytes)}")
    return ExporterUse("torchscript")


def second_choice(config: WinMLExportConfig, current: ExporterUse, error: VerificationError) -> ExporterUse | None:
    """Return the exporter to try when verification failed, or None if there is none.

    TorchScript writes some wrong graphs without an error; dynamo converts operators by different code.

    Args:
        config: Options of the export.
        current: Which exporter made the graph.
        error: The failed verification.
    """
    if config.exporter != "auto" or current.name != "torchscript" or not error.is_graph_wrong:
        return None
    reason = error.message.removeprefix("cannot verify: ").partition(". ")[0]
    return ExporterUse("dynamo", f"the graph TorchScript made is wrong: {reason}", SECOND_TRY_S)


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of the parameters in bytes, tied ones once; they may be fake tensors."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
