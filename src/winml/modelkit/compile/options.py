"""What is a graph compiled for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import pydantic

from winml.modelkit.options import Options
from winml.modelkit.runtime.execution_providers import Device

__all__ = ["DEFAULT_MIN_SQNR_DB", "CompileOptions"]

DEFAULT_MIN_SQNR_DB = 30.0
"""Ratio of signal to error that is asked for where a provider computes with fewer bits than the graph says, as NPUs
do. Chosen: float16 graphs kept 49 to 63 dB on QNN (measured); a wrong graph keeps nothing."""


class CompileOptions(Options):
    """What a graph is compiled for."""

    ep: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Execution provider that compiles it, such as `qnn`; sections of a build config that name none are for it, too.
    Null: a build does not compile."""
    device: Device | None = None
    """Kind of device. Null: the provider's default."""
    ep_options: Mapping[str, str] | None = None
    """Options of the provider."""
    embed: bool | None = None
    """Keep what the provider compiled, and weights, inside the model. Null: in files beside it."""
    min_sqnr_db: float | None = None
    """Ratio in decibels that every output has to reach beside the source. Null: 30. Outputs of the CPU provider must be
    equal."""
