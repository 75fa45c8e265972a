"""The frozen options of the quantize stage: of the command, of the build config and of Python alike.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import pydantic

from winml.modelkit.errors import UsageError
from winml.modelkit.options import Options

__all__ = [
    "FLOAT32",
    "MODES",
    "PRECISIONS",
    "Algorithm",
    "BlockSize",
    "CalibrationMethod",
    "Mode",
    "ModeRules",
    "Precision",
    "PrecisionName",
    "QuantizeOptions",
    "mode_for",
]


# --- The precisions there are, the ways to reach each of them, and the operators each way changes.
#
# Data: :data:`PRECISIONS` and :data:`MODES` are what the options, the help and the planner read. Imports nothing heavy.


Mode = Literal["dynamic", "qdq", "weight-only", "float"]
CalibrationMethod = Literal["minmax", "entropy", "percentile"]
"""How a range is made of the values seen: all of them; or those whose distribution 8 bits show best; or a share."""
PrecisionName = Literal["int8", "uint8", "w8a8", "w8a16", "int4", "fp16", "bf16", "fp32"]


@dataclass(frozen=True)
class Precision:
    """How many bits the numbers of a module take."""

    name: PrecisionName
    weight_bits: int
    modes: tuple[Mode, ...]
    """Ways to reach it, the default first; none for float32, which means: leave it."""
    words: str
    least_sqnr_db: float
    """Signal-to-quantization-noise ratio in decibels below which an output counts as wrong. Chosen, from what real
    weights reach: docs/reference/quantization.md."""
    activation_bits: int | None = None
    """Bits of activations with ranges that are fixed beforehand; None where they stay as they are or are found while
    running."""
    signed_weights: bool = True


@dataclass(frozen=True)
class ModeRules:
    """One way to fewer bits."""

    words: str
    operators: frozenset[str]
    """Operators it changes, where they have a weight."""
    least_opset: int
    """Oldest version of ONNX's operators that has those it makes."""
    needs_ranges: bool = False
    """Whether the ranges of activations have to be known."""
    options: frozenset[str] = frozenset()
    """Fields of the options that it reads, of those that only some ways read."""
    is_by_tensor: bool = False
    """Whether it reads one weight at a time while the result is written, and knows no other values."""
    changes_every_node: bool = False
    """Whether it changes what computes with floats, whatever the operator, with a weight or without."""

    def changes(self, operator: str) -> bool:
        """Say whether it changes nodes of an operator, where they have a weight."""
        return self.changes_every_node or operator in self.operators

    float_types: frozenset[str] = frozenset({"FLOAT", "FLOAT16", "BFLOAT16"})
    """ONNX's names of the types of weights it takes."""
    channel_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Operator to the numbers of dimensions its weight may have where each channel has a scale; absent: any."""
    fixed_attributes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Operator to the values its attributes need to have; absent: any."""


MODES: Mapping[Mode, ModeRules] = {
    "dynamic": ModeRules(
        "weights in 8 bits, activations in 8 bits by the range each run finds; needs no data",
        frozenset({"MatMul", "Gemm", "Gather"}),
        least_opset=13,
        options=frozenset({"per_channel", "symmetric"}),
        float_types=frozenset({"FLOAT"}),  # DynamicQuantizeLinear takes no other
        channel_ranks={"MatMul": (2,)},  # MatMulInteger takes the zero points of columns, not of matrices
        fixed_attributes={"Gemm": {"alpha": 1.0, "beta": 1.0, "transA": 0}},  # a product and a bias
    ),
    "qdq": ModeRules(
        "weights and activations in 8 or 16 bits by ranges from calibration data (QuantizeLinear, DequantizeLinear)",
        frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"}),
        least_opset=13,
        needs_ranges=True,
        float_types=frozenset({"FLOAT"}),  # what its integers are turned back into
        options=frozenset({"per_channel", "symmetric", "calibration_data", "split", "columns", "samples", "method"}),
    ),
    "weight-only": ModeRules(
        "weights in 4 or 8 bits by blocks, activations stay float (MatMulNBits)",
        frozenset({"MatMul", "Gemm", "Gather"}),
        least_opset=13,
        options=frozenset({"symmetric", "block_size", "algorithm"}),
        is_by_tensor=True,
    ),
    "float": ModeRules(
        "16-bit floating point: weights and activations in fp16, or weights in bf16 that are computed in float32",
        frozenset(),
        least_opset=13,
        is_by_tensor=True,
        changes_every_node=True,
    ),
}
"""Ways to fewer bits, in the order they work where one graph uses several."""

FLOAT32: PrecisionName = "fp32"

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("int8", 8, ("dynamic", "qdq", "weight-only"), "8-bit signed weights", 10.0, activation_bits=8),
        Precision(
            "uint8", 8, ("dynamic", "qdq"), "8-bit unsigned weights", 8.0, activation_bits=8, signed_weights=False
        ),
        Precision("w8a8", 8, ("qdq",), "8-bit weights and activations", 10.0, activation_bits=8),
        Precision("w8a16", 8, ("qdq",), "8-bit weights, 16-bit activations", 15.0, activation_bits=16),
        Precision("int4", 4, ("weight-only",), "4-bit weights by blocks", 8.0),
        Precision("fp16", 16, ("float",), "16-bit floating point", 40.0),
        Precision("bf16", 16, ("float",), "bfloat16", 30.0),
        Precision("fp32", 32, (), "left as it is", 100.0),
    )
}
"""By name, fewest surprises first."""

assert set(PRECISIONS) == set(get_args(PrecisionName))


def mode_for(precision: Precision, mode: Mode | None) -> Mode | None:
    """Return the way to a precision: the one asked for, or its default. None for float32.

    Raises:
        UsageError: the precision cannot be reached that way.
    """
    if not precision.modes:
        return None
    if mode is None or mode in precision.modes:
        return mode or precision.modes[0]
    others = ", ".join(name for name, other in PRECISIONS.items() if mode in other.modes)
    raise UsageError(
        f"--precision {precision.name} cannot be reached with --mode {mode}",
        hint=f"{precision.name} goes with --mode {' or '.join(precision.modes)}; {mode} with {others}.",
    )


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
    """Weight-only: how scales are found. `rtn` rounds to the nearest step; `hqq` and `k_quant` search for better ones,
    which takes 5 to 20 times as long. With `hqq`, tables that rows are looked up in and weights in 8 bits are rounded:
    their kernels take no zero point between the steps."""
    calibration_data: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Where the ranges of activations come from, for `qdq`: an `.npz` file or a folder of them, one array per input of
    the graph; or a data set for the tokenizer or image processor beside the model: a file, a folder, or a name at the
    Hub. Null: random values."""
    split: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Split of the data set. Null: the validation split, else the test split, else the training split."""
    columns: dict[str, str] = pydantic.Field(default_factory=dict)
    """Role to column of the data set, such as `text` or `image`, where names of columns do not say it."""
    samples: Annotated[int, pydantic.Field(ge=1)] | None = None
    """Samples to find the ranges with. Null: 128 of the data, or 16 random ones."""
    method: CalibrationMethod | None = None
    """How a range is made of the values seen: `minmax`, `entropy` or `percentile`. Null: `minmax`."""

    min_sqnr_db: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    """Signal-to-quantization-noise ratio in decibels that every output has to reach. Null: that of the precision."""

    @property
    def base(self) -> Precision:
        """The precision of every module that nothing else is said of."""
        return PRECISIONS[self.precision or "int8"]

    def requested_modes(self) -> Iterator[tuple[Precision, Mode]]:
        """Yield each precision that is asked for with the way to it, each once.

        Raises:
            UsageError: a precision cannot be reached with the mode.
        """
        for precision in dict.fromkeys([self.base, *(PRECISIONS[name] for name in self.per_module.values())]):
            if (mode := self.mode_of(precision)) is not None:
                yield precision, mode

    def modes(self) -> tuple[Mode, ...]:
        """Return the ways that are used, each once.

        Raises:
            UsageError: a precision cannot be reached with the mode.
        """
        return tuple(dict.fromkeys(mode for _, mode in self.requested_modes()))

    @property
    def needs_ranges(self) -> bool:
        """Whether the ranges of activations have to be known.

        Raises:
            UsageError: a precision cannot be reached with the mode.
        """
        return any(MODES[mode].needs_ranges for _, mode in self.requested_modes())

    def refuse_contradictions(self) -> None:
        """Refuse options that go with none of the modes in use, or not with each other.

        Raises:
            UsageError: an option that no mode in use reads, a zero point for each channel, or an algorithm that cannot
                do what is asked of it.
        """
        requested = list(self.requested_modes())
        modes = self.modes()
        if not modes:
            return  # nothing is quantized, which the caller says
        self._refuse_unread(modes)
        if self.symmetric is False and self.per_channel is not False and "qdq" in modes:
            raise UsageError(
                "--asymmetric: integer kernels take one zero point for a weight, and qdq gives each channel a scale",
                hint="Give --per-tensor with it, or leave it out.",
            )
        if self.symmetric and self.algorithm != "rtn" and "dynamic" not in modes and "qdq" not in modes:
            raise UsageError(
                f"--symmetric: --algorithm {self.algorithm} finds a zero point for each block",
                hint="Give --algorithm rtn with it, or leave it out.",
            )
        if self.algorithm == "hqq" and all(way.weight_bits != 4 for way, mode in requested if mode == "weight-only"):
            raise UsageError(
                "--algorithm hqq: ONNX Runtime has a form of it for weights in 4 bits only",
                hint="Give --algorithm k_quant, or --precision int4.",
            )

    def _refuse_unread(self, modes: Sequence[Mode]) -> None:
        for name in dict.fromkeys(name for rules in MODES.values() for name in sorted(rules.options)):
            value = getattr(self, name)
            readers = [mode for mode, rules in MODES.items() if name in rules.options]
            default = type(self).model_fields[name].get_default(call_default_factory=True, validated_data={})
            if value != default and not set(readers) & set(modes):
                raise UsageError(
                    f"{_words_of(name, value)} has no meaning for {' and '.join(modes)}",
                    hint=f"Give --mode {' or '.join(readers)}, or leave it out.",
                )

    def mode_of(self, precision: Precision) -> Mode | None:
        """Return the way to a precision; None for float32.

        Raises:
            UsageError: the precision asked for everywhere cannot be reached with the mode.
        """
        # The mode is the way to the base precision; to those of single modules, where it leads there as well.
        wish = self.mode if precision == self.base or self.mode in precision.modes else None
        return mode_for(precision, wish)


def _words_of(name: str, value: object) -> str:
    """Return an option as it is given to the command."""
    switches = {"per_channel": ("--per-tensor", "--per-channel"), "symmetric": ("--asymmetric", "--symmetric")}
    if name in switches:
        return switches[name][bool(value)]
    if isinstance(value, dict):
        value = ",".join(f"{key}={entry}" for key, entry in value.items())
    return f"--{name.replace('_', '-')} {value}"
