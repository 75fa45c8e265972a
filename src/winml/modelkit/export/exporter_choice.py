"""Chooses the exporter: TorchScript or dynamo.

TorchScript is faster where it can trace the model. dynamo exports most of those TorchScript cannot trace. The first
choice depends on the options; a failure leads to the second choice.
Reasons: docs/decisions/0003-torchscript-first.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from winml.modelkit.errors import VerificationError
from winml.modelkit.export.config import ExporterName, WinMLExportConfig

__all__ = [
    "SECOND_TRY_S",
    "ExporterUse",
    "first_choice",
    "second_choice",
]

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


def first_choice(config: WinMLExportConfig) -> ExporterUse:
    """Return the exporter to try first."""
    return ExporterUse("torchscript") if config.exporter == "auto" else ExporterUse(config.exporter, "asked for")


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
