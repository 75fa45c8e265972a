"""Which exporter makes the graph?

TorchScript is faster on what it can trace; dynamo takes any size of model, and most of what TorchScript does not trace.
Decided from the options and the size of the weights, before anything is loaded; undone by what an exporter fails on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from winml.modelkit.errors import VerificationError
from winml.modelkit.export.config import ExporterName, WinMLExportConfig
from winml.modelkit.words import size_words

__all__ = [
    "LARGE_WEIGHTS_BYTES",
    "SECOND_TRY_S",
    "ExporterUse",
    "first_choice",
    "parameter_bytes",
    "second_choice",
]

LARGE_WEIGHTS_BYTES = 2**31
"""Specified by issue and format alike: what one protobuf file can hold. TorchScript needs the weights in memory."""

SECOND_TRY_S = 120.0
"""How long dynamo may try what nobody asked it for. Chosen: ten times what a text encoder of 12 layers takes; with open
sizes that a forward divides it can take hours."""


@dataclass(frozen=True)
class ExporterUse:
    """Which exporter is used, and why."""

    name: ExporterName
    reason: str = ""
    """In a few words; empty where it is simply the first to be tried."""
    time_limit_s: float | None = None
    """How long it may take; None: as long as it wants."""


def first_choice(config: WinMLExportConfig, weight_bytes: int) -> ExporterUse:
    """Return the exporter to begin with.

    Args:
        config: Options of the export.
        weight_bytes: Size of the parameters in memory.
    """
    if config.exporter != "auto":
        return ExporterUse(config.exporter, "asked for")
    if weight_bytes > LARGE_WEIGHTS_BYTES:
        return ExporterUse("dynamo", f"{size_words(weight_bytes)} of weights, over {size_words(LARGE_WEIGHTS_BYTES)}")
    return ExporterUse("torchscript")


def second_choice(config: WinMLExportConfig, used: ExporterUse, error: VerificationError) -> ExporterUse | None:
    """Return the exporter to try when a file does not answer as the model does, or None if none is left to try.

    TorchScript writes some wrong graphs without a word; dynamo translates other operators, by other code.

    Args:
        config: Options of the export.
        used: Which exporter made the graph.
        error: What is wrong with the file.
    """
    if config.exporter != "auto" or used.name != "torchscript" or not error.is_graph_wrong:
        return None
    reason = error.message.removeprefix("cannot verify: ").partition(". ")[0]
    return ExporterUse("dynamo", f"the graph TorchScript made is wrong: {reason}", SECOND_TRY_S)


def parameter_bytes(model: nn.Module) -> int:
    """Return what the parameters take, tied ones once; they may be without storage."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
