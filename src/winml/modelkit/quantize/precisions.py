"""Registry of precisions and quantization modes.

Data only: options, help and planner read :data:`PRECISIONS` and :data:`MODES`. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, TypeAlias

from winml.modelkit.compare.quality_minimum import LEAST_AGREEMENT, QualityMinimum
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.registries import Names, Registry

LEAST_CACHE_SQNR_DB = 20.0
"""Minimum SQNR of every output with only the KV cache in 8 bits, in dB. Chosen. Measured on small decoders: 33 dB and
more."""
Mode: TypeAlias = str
"""Name of a quantization mode, a key of :data:`MODES`."""
CalibrationMethod = Literal["minmax", "entropy", "percentile", "mse"]
"""Method of a range: all values; the range of the smallest divergence (entropy) or squared error (mse) in 8 bits; or a
share of the values."""

ValueKind = Literal[
    "attention", "projection", "position", "residual", "normalization", "function", "intermediate", "convolution",
    "other",
]  # fmt: skip
"""Kind of the values that a node computes, as ``value_kinds`` reads it from the graph."""
ActivationBits = Literal[8, 16]


class _KindRule(NamedTuple):
    """Bits of the activations of one kind in ``mixed``."""

    bits: ActivationBits
    words: str


KIND_RULES: Mapping[ValueKind, _KindRule] = {
    "attention": _KindRule(8, "queries, keys, values, scores, softmax and context of an attention"),
    "projection": _KindRule(16, "products and biases that make queries, keys and values"),
    "position": _KindRule(16, "angles, sines and cosines of rotary positions"),
    "residual": _KindRule(16, "sums of two branches, with the products, biases and table rows that are added"),
    "normalization": _KindRule(16, "normalizations"),
    "function": _KindRule(16, "GELU, SiLU, Tanh, Sigmoid, and products with their results"),
    "intermediate": _KindRule(16, "other products of matrices, such as those before a GELU"),
    "convolution": _KindRule(8, "convolutions that are not added to another branch"),
    "other": _KindRule(16, "all other values"),
}
"""Kind → bits in ``mixed``. Measured on MiniLM with real sentences, one kind in 8 bits and all others in 16:
docs/reference/quantization.md."""


@dataclass(frozen=True)
class Precision:
    """Number formats of a module's weights and activations."""

    name: str
    weight_bits: int
    modes: tuple[Mode, ...]
    """Quantization modes, the default first; empty for float32, which is unchanged."""
    words: str
    least_sqnr_db: float
    """Minimum SQNR of an output in dB, at the lower end of the interval over the samples. Chosen from results of real
    weights: docs/reference/quantization.md."""
    activation_bits: int | None = None
    """Bits of activations with calibrated ranges; ``None``: float, or ranges computed in each run."""
    signed_weights: bool = True
    ways: Mapping[Mode, ModeRules] = field(default_factory=dict, hash=False)
    """Rules of modes missing in :data:`MODES`: those of plug-ins."""
    float_type: str = ""
    """ONNX's name of the 16-bit float type of its weights, such as ``FLOAT16``; empty for integers."""
    searched_blocks: tuple[int | None, ...] = ()
    """Block sizes that a search for bits tries, the largest first; ``None``: no blocks."""
    auto_device: str = ""
    """Kind of device with this automatic precision; empty: no device."""
    transformers_js_suffix: str | None = None
    """Suffix of file names for transformers.js, from ``DEFAULT_DTYPE_SUFFIX_MAPPING``; ``None``: not
    specified."""
    older_names: tuple[str, ...] = ()
    """Names in configs of earlier versions."""
    has_bits_by_kind: bool = False
    """True if the bits of an activation depend on its kind: 8, or ``activation_bits`` (``value_kinds``)."""
    least_agreement: float | None = LEAST_AGREEMENT
    """Minimum top-1 agreement of an output with scores, which replaces the SQNR; ``None``: the SQNR applies, as for
    weights of few bits, which change more predictions of small models than of large ones."""
    default_block: int | None = None
    """Number of values of a weight that share a scale in mode ``qdq``; ``None``: one scale per channel."""

    @property
    def minimum(self) -> QualityMinimum:
        """Default quality limit of outputs."""
        return QualityMinimum(self.least_sqnr_db, self.least_agreement)

    @property
    def range_bits(self) -> int:
        """Bits of activations with calibrated ranges."""
        return self.activation_bits or 8


@dataclass(frozen=True)
class ModeRules:
    """Rules of one quantization mode."""

    words: str
    operators: frozenset[str]
    """Operators it changes, if they have a weight."""
    least_opset: int
    """Minimum opset of the operators it creates."""
    engine: str = ""
    """``module:function`` of the engine: (model, ``EngineTask``) → new model; the model is not changed. Tags are
    transferred afterwards. Imported when it runs."""
    needs_ranges: bool = False
    """True if the ranges of activations are required."""
    options: frozenset[str] = frozenset()
    """Option fields it reads, among fields read by some modes only."""
    is_by_tensor: bool = False
    """True if it reads one weight at a time while the result is written, and no other values."""
    changes_subgraphs: bool = False
    """True if it changes nodes of subgraphs, such as the branches of an ``If``."""
    changes_every_node: bool = False
    """True if it changes all float nodes, regardless of operator and weight."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Option field → its effect on the outputs, as listed in a hint."""

    def changes(self, operator: str) -> bool:
        """Return True if it changes nodes of an operator that have a weight."""
        return self.changes_every_node or operator in self.operators

    bits: tuple[tuple[int, int | None], ...] = ()
    """(bits of weights, bits of activations) written by its engine; `None`: activations stay float, or get a range in
    each run. Empty: any."""
    float_types: frozenset[str] = frozenset({"FLOAT", "FLOAT16", "BFLOAT16"})
    """ONNX's names of the supported types of weights."""
    channel_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Operator → supported numbers of dimensions of its weight with per-channel scales; absent: any."""
    fixed_attributes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Operator → required attribute values; absent: any."""


CALIBRATION_OPTIONS = frozenset({"calibration_data", "split", "columns", "samples", "method", "calibration_cache"})
"""Option fields that determine activation statistics."""

PRODUCT_AND_SUM: Mapping[str, float] = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attribute values of a Gemm that is a plain product plus bias."""

_ENGINES = "winml.modelkit.quantize.engines"
_BUILT_IN_MODES: Mapping[Mode, ModeRules] = {
    "dynamic": ModeRules(
        "8-bit weights, and activations that are quantized to 8 bits at run time; needs no calibration",
        frozenset({"MatMul", "Gemm", "Gather", "LSTM"}),
        least_opset=13,
        engine=f"{_ENGINES}.dynamic:quantize_dynamically",
        changes_subgraphs=True,
        options=frozenset({"per_channel", "symmetric", "smooth_quant", "cross_layer_equalization"})
        | CALIBRATION_OPTIONS,
        remedies={"smooth_quant": "balance channels ({})"},
        float_types=frozenset({"FLOAT"}),  # DynamicQuantizeLinear takes no other
        bits=((8, 8), (8, None)),
        channel_ranks={"MatMul": (2,)},  # MatMulInteger takes zero points of columns, not of matrices
        fixed_attributes={"Gemm": PRODUCT_AND_SUM, "LSTM": {"layout": 0}},
    ),
    "qdq": ModeRules(
        "weights in 4, 8 or 16 bits and activations in 8 or 16, with ranges from calibration (QuantizeLinear, "
        "DequantizeLinear)",
        frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"}),
        least_opset=13,
        engine=f"{_ENGINES}.qdq:quantize_statically",
        needs_ranges=True,
        bits=((8, 8), (8, 16), (16, 16), (4, 8), (4, 16)),
        float_types=frozenset({"FLOAT"}),  # the type of the dequantized values
        options=frozenset({"per_channel", "symmetric", "smooth_quant", "cross_layer_equalization"})
        | frozenset({"activation_bits", "block_size", "block_sizes", "algorithm", "algorithms"})
        | frozenset({"budget", "max_size", "max_drop"})
        | CALIBRATION_OPTIONS,
        remedies={
            "smooth_quant": "balance channels ({})",
            "algorithm": "find weights with calibration samples ({} gptq)",
        },
    ),
    "weight-only": ModeRules(
        "weights in 2, 4 or 8 bits by block, float activations (MatMulNBits)",
        frozenset({"MatMul", "Gemm", "Gather", "com.microsoft:MoE"}),
        least_opset=13,
        engine=f"{_ENGINES}.weight_only:quantize_weights",
        options=frozenset(
            {"symmetric", "block_size", "block_sizes", "algorithm", "algorithms", "budget", "max_size", "max_drop"}
            | {"tables", "weight_operators"}
        ),
        bits=((2, None), (4, None), (8, None)),
        is_by_tensor=True,
        changes_subgraphs=True,
        remedies={"algorithm": "find weights with calibration samples ({} auto)"},
    ),
    "bnb4": ModeRules(
        "weights in 4-bit normal floats (NF4) of bitsandbytes, float activations (MatMulBnb4)",
        frozenset({"MatMul"}),
        least_opset=13,
        engine=f"{_ENGINES}.normal_floats:quantize_to_normal_floats",
        bits=((4, None),),
        is_by_tensor=True,
        changes_subgraphs=True,
    ),
    "float": ModeRules(
        "16-bit floating point: fp16 weights and activations, or bf16 weights and float32 computation",
        frozenset(),
        least_opset=13,
        engine=f"{_ENGINES}.half_float:convert_floats",
        is_by_tensor=True,
        changes_subgraphs=True,
        changes_every_node=True,
    ),
}

BLOCK_OPSET = 21
"""Specified: first opset whose DequantizeLinear takes blocks and 4-bit integers."""

INTEGER_ACTIVATIONS: frozenset[Mode] = frozenset({"dynamic", "qdq"})
"""Modes with integer activations."""
SOLVED_MODES: frozenset[Mode] = frozenset({"weight-only", "qdq"})
"""Modes whose weights can be computed from samples."""

INT8, INT4, W8A8, W8A16, FLOAT16, BFLOAT16, FLOAT32 = "int8", "int4", "w8a8", "w8a16", "fp16", "bf16", "fp32"
"""Precisions with a special role: :data:`INT8` is the default, :data:`INT4` the default of a search for bits of
weights, and :data:`W8A8` the default of a search for bits of weights and activations."""
MIXED = "mixed"
"""Precision with activation bits by kind."""
MIXTURE = "mixed"
"""Mark of modules with several precisions in a record, which had this name before there was a precision of it."""

_BUILT_IN = {
    precision.name: precision
    for precision in (
        Precision(
            INT8, 8, ("dynamic", "qdq", "weight-only"), "8-bit signed weights", 6.0, activation_bits=8,
            searched_blocks=(64,), transformers_js_suffix="_quantized",
        ),
        Precision(
            "uint8", 8, ("dynamic", "qdq"), "8-bit unsigned weights", 5.0, activation_bits=8, signed_weights=False,
            transformers_js_suffix="_uint8",
        ),
        Precision(
            W8A8, 8, ("qdq",), "8-bit weights and activations", 6.0, activation_bits=8, searched_blocks=(None,)
        ),
        Precision(
            MIXED, 8, ("qdq",), "8-bit weights, activations in 8 or 16 bits by kind", 12.0, activation_bits=16,
            searched_blocks=(None,), has_bits_by_kind=True,
        ),
        Precision(
            W8A16, 8, ("qdq",), "8-bit weights, 16-bit activations", 12.0, activation_bits=16,
            searched_blocks=(None,), auto_device="npu",
        ),
        Precision("w16a16", 16, ("qdq",), "16-bit weights and activations", 20.0, activation_bits=16),
        Precision(
            "w4a16", 4, ("qdq",), "4-bit weights by block, 16-bit activations", 4.0, activation_bits=16,
            least_agreement=None, default_block=32,
        ),
        Precision(
            "w4a8", 4, ("qdq",), "4-bit weights by block, 8-bit activations", 4.0, activation_bits=8,
            least_agreement=None, default_block=32,
        ),
        Precision(
            INT4, 4, ("weight-only",), "4-bit weights by block", 4.0, least_agreement=None,
            searched_blocks=(128, 32), transformers_js_suffix="_q4",
        ),
        Precision(
            "int2", 2, ("weight-only",), "2-bit weights by block", 0.0, least_agreement=None, searched_blocks=(128, 32)
        ),
        Precision(
            "nf4", 4, ("bnb4",), "4-bit normal floats by block", 4.0, least_agreement=None,
            transformers_js_suffix="_bnb4",
        ),
        Precision(
            FLOAT16, 16, ("float",), "16-bit floating point", 40.0, float_type="FLOAT16",
            auto_device="gpu", transformers_js_suffix="_fp16",
        ),
        Precision(BFLOAT16, 16, ("float",), "bfloat16", 30.0, float_type="BFLOAT16", searched_blocks=(None,)),
        Precision(
            FLOAT32, 32, (), "not quantized", 100.0,
            searched_blocks=(None,), auto_device="cpu", transformers_js_suffix="",
        ),
    )
}  # fmt: skip


_ways: dict[Mode, ModeRules] = {**_BUILT_IN_MODES}
"""Modes including those of plug-ins, once found."""


def _unwritable_words(precision: Precision) -> str:
    """Reason why a built-in mode cannot write a precision; empty if all of its modes can."""
    has_ranges = any(mode in INTEGER_ACTIVATIONS for mode in precision.modes)
    for mode in precision.modes:
        rules = _BUILT_IN_MODES.get(mode)
        if rules is None:
            continue
        if rules.changes_every_node:
            return f"{mode} writes {' and '.join(name for name, entry in _BUILT_IN.items() if entry.float_type)} only"
        weights, activations = precision.weight_bits, precision.activation_bits
        if mode not in INTEGER_ACTIVATIONS and has_ranges:
            activations = None  # they belong to its other modes
        pairs = ", ".join(f"{of} and {'float' if to is None else to}" for of, to in rules.bits)
        if (weights, activations) not in rules.bits:
            bits_text = f"{weights} and {'float' if activations is None else activations}"
            return f"{mode} does not write weights and activations of {bits_text} bits; expected {pairs}"
        if weights == 16 and not precision.signed_weights:
            return f"{mode} writes signed weights of 16 bits only"
    return ""


def problem_of(name: str, precision: Precision) -> str:
    """Reason why a precision of a plug-in is invalid; empty if valid."""
    if precision.name != name:
        return f"it calls itself {precision.name}"
    if conflicting := [mode for mode, rules in precision.ways.items() if _ways.get(mode, rules) != rules]:
        return f"its way {conflicting[0]} has the name of another"
    if unknown := [mode for mode in precision.modes if mode not in {**_BUILT_IN_MODES, **precision.ways}]:
        return f"it has no way {unknown[0]}; expected in ways"
    if not precision.modes or not all(rules.engine for rules in precision.ways.values()):
        return "it has no engine"
    return _unwritable_words(precision)


PRECISIONS: Registry[Precision] = Registry("precisions", "precision", _BUILT_IN, lambda: Precision, problem_of)
"""By name, in the order of --help."""
PrecisionName = Annotated[str, PRECISIONS]
"""Name of a precision, as a field of options."""

for _precision in PRECISIONS.values():
    _ways.update(_precision.ways)
MODES: Names[ModeRules] = Names("mode", _ways)
"""Quantization modes, in the order of execution within one graph; plug-ins come last."""
ModeName = Annotated[str, MODES]
"""Name of a mode, as a field of options."""


def mode_for(precision: Precision, mode: Mode | None) -> Mode | None:
    """Select the mode of a precision: the requested mode, or its default. ``None`` for float32.

    Raises:
        UsageError: the precision does not support the mode.
    """
    if not precision.modes:
        return None
    if mode is None or mode in precision.modes:
        return mode or precision.modes[0]
    supporting = ", ".join(name for name, candidate in PRECISIONS.items() if mode in candidate.modes)
    raise UsageError(
        f"{opt.precision} {precision.name} is not available with {opt.mode} {mode}",
        hint=f"Use {precision.name} with {opt.mode} {' or '.join(precision.modes)}, and {mode} with {supporting}.",
    )
