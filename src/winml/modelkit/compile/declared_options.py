"""What is a graph compiled for? Each option is declared here, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from winml.modelkit.fields import COMPARISON, declare
from winml.modelkit.runtime.execution_providers import Device, parse_ep_options

__all__ = ["DEFAULT_MIN_SQNR_DB", "MARGIN_DB", "CompileFields"]

DEFAULT_MIN_SQNR_DB = 30.0
"""Ratio of signal to error that is required where a provider computes with fewer bits than the graph says, as NPUs do.
Chosen: float16 graphs kept 49 to 63 dB on QNN (measured); a wrong graph keeps nothing."""

MARGIN_DB = 6.0
"""How much nearer to the float file a quantized one may be than what was compiled of it: its error may be twice as
large. Chosen: rounding of a device as large as that of the quantized file makes 3."""

_GROUP = "Compilation"


@dataclass(kw_only=True)
class CompileFields:
    """The options of the compile stage."""

    ep: str | None = declare(
        None,
        "Execution provider that compiles, such as `qnn`; `--list` shows them. In a build config, sections that name "
        "none are for it, too, and without one a build does not compile.",
        _GROUP,
        metavar="NAME",
        min_length=1,
    )
    device: Device | None = declare(None, "Kind of device. The provider's default where left out.", _GROUP, short="-d")
    ep_options: Mapping[str, str] | None = declare(
        None,
        "Option of the provider; repeatable.",
        _GROUP,
        metavar="KEY=VALUE",
        is_repeatable=True,
        read=parse_ep_options,
    )
    embed: bool | None = declare(
        None,
        "Keep what the provider compiled, and weights, inside the model, or in files beside it. Beside it where left "
        "out.",
        _GROUP,
    )
    max_outside: int | None = declare(
        None,
        "Most nodes that the provider may leave to the CPU provider; with more, nothing is written. Any number where "
        "left out.",
        _GROUP,
        metavar="N",
        minimum=0,
    )
    max_parts: int | None = declare(
        None,
        "Most parts that the provider may compile the graph in; with more, nothing is written. Any number where left "
        "out.",
        _GROUP,
        metavar="N",
        minimum=1,
    )
    min_sqnr_db: float | None = declare(
        None,
        f"Ratio of signal to error in decibels that every output has to reach, where the provider computes with fewer "
        f"bits. {DEFAULT_MIN_SQNR_DB:.0f} where left out; of a quantized file beside its float source "
        f"{MARGIN_DB:.0f} dB less than it reaches itself, if that is less.",
        COMPARISON,
        spelling="--min-sqnr",
        metavar="DB",
    )
