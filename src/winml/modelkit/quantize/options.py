"""The frozen options of the quantize stage: of the command, of the build config and of Python alike.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic

from winml.modelkit.errors import UsageError
from winml.modelkit.options import Options
from winml.modelkit.quantize.precisions import (
    MODES,
    PRECISIONS,
    CalibrationMethod,
    Mode,
    Precision,
    PrecisionName,
    mode_for,
)

__all__ = ["Algorithm", "QuantizeOptions"]

Algorithm = Literal["rtn", "hqq", "k_quant"]
BlockSize = Literal[16, 32, 64, 128, 256]
SelectorText = Annotated[str, pydantic.Field(min_length=1)]


class QuantizeOptions(Options):
    """How few bits the numbers of which modules take."""

    precision: PrecisionName | None = None
    """Bits of what is quantized. Null: `int8`."""
    mode: Mode | None = None
    """How: `dynamic`, `qdq`, `weight-only` or `float`. Null: the usual one of each precision."""
    exclude: tuple[SelectorText, ...] = ()
    """Selectors of modules that stay as they are, with all below them."""
    include: tuple[SelectorText, ...] = ()
    """Selectors of the only modules that change, with all below them. Empty: all."""
    per_module: dict[str, PrecisionName] = pydantic.Field(default_factory=dict)
    """Selector to precision; of several that match a module the first wins, and all win over `precision`."""
    per_channel: bool | None = None
    """A scale for each output channel of a weight rather than one for the weight. Null: yes."""
    symmetric: bool | None = None
    """Weights without a zero point. Null: as is usual for the precision."""
    block_size: BlockSize | None = None
    """Weight-only: values of a weight that share a scale. Null: 32 in 4 bits, 64 in 8 bits."""
    algorithm: Algorithm = "rtn"
    """Weight-only: how scales are found. `rtn` rounds to the nearest step; `hqq` (4 bits) and `k_quant` search for
    better ones, which takes 5 to 20 times as long."""
    calibration_data: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Where the ranges of activations come from, for `qdq`: an `.npz` file or a folder of them, one array per input of
    the graph, or a text file for the tokenizer beside the model. Null: random values."""
    samples: Annotated[int, pydantic.Field(ge=1)] | None = None
    """Samples to find the ranges with. Null: 128 of the data, or 16 random ones."""
    method: CalibrationMethod | None = None
    """How a range is made of the values seen: `minmax`, `entropy` or `percentile`. Null: `minmax`."""

    min_sqnr_db: float | None = None
    """Signal-to-quantization-noise ratio in decibels that every output has to reach. Null: that of the precision."""

    @property
    def base(self) -> Precision:
        """The precision of every module that nothing else is said of."""
        return PRECISIONS[self.precision or "int8"]

    @property
    def is_empty(self) -> bool:
        """Whether no bit is asked for."""
        return self.precision is None and not self.per_module

    def requested_modes(self) -> Iterator[tuple[Precision, Mode]]:
        """Yield each precision that is asked for with the way to it, each once.

        Raises:
            UsageError: a precision cannot be reached with the mode.
        """
        for precision in dict.fromkeys([self.base, *(PRECISIONS[name] for name in self.per_module.values())]):
            if (mode := self.mode_of(precision)) is not None:
                yield precision, mode

    @property
    def needs_ranges(self) -> bool:
        """Whether the ranges of activations have to be known.

        Raises:
            UsageError: a precision cannot be reached with the mode.
        """
        return any(MODES[mode].needs_ranges for _, mode in self.requested_modes())

    def refuse_contradictions(self) -> None:
        """Refuse options that go with none of the modes in use.

        Raises:
            UsageError: an option of the calibration where nothing is calibrated, or a zero point for each channel.
        """
        modes = [mode for _, mode in self.requested_modes()]
        given = {"--calibration-data": self.calibration_data, "--samples": self.samples, "--method": self.method}
        for option, value in given.items():
            if value is not None and not self.needs_ranges:
                raise UsageError(
                    f"{option} {value}: {', '.join(modes)} needs no calibration",
                    hint="Give --mode qdq, or leave it out.",
                )
        if self.symmetric is False and self.per_channel is not False and "qdq" in modes:
            raise UsageError(
                "--asymmetric: integer kernels take one zero point for a weight, and qdq gives each channel a scale",
                hint="Give --per-tensor with it, or leave it out.",
            )

    def mode_of(self, precision: Precision) -> Mode | None:
        """Return the way to a precision; None for float32.

        Raises:
            UsageError: the precision asked for everywhere cannot be reached with the mode.
        """
        # The mode is the way to the base precision; to those of single modules, where it leads there as well.
        wish = self.mode if precision == self.base or self.mode in precision.modes else None
        return mode_for(precision, wish)
