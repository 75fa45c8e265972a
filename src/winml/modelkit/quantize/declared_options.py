"""How few bits do the numbers of which modules take? Each option of the quantize stage is declared here, once.

So is each option of measuring which modules lose accuracy with fewer bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winml.modelkit.fields import COMPARISON, declare, read_columns
from winml.modelkit.quantize.precisions import FLOAT32, MODES, PRECISIONS, CalibrationMethod, ModeName, PrecisionName

__all__ = ["BUDGET", "DATA_ALGORITHMS", "SENSITIVITY", "Algorithm", "BlockSize", "QuantizeFields", "SensitivityFields"]

Algorithm = Literal["rtn", "hqq", "k_quant", "gptq", "awq", "auto"]
BlockSize = Literal[16, 32, 64, 128, 256]
DATA_ALGORITHMS: frozenset[Algorithm] = frozenset({"gptq", "awq", "auto"})
"""Those that run the model on samples."""

_GROUP, _RANGES = "Quantization", "Calibration"
BUDGET = "Budget"
"""Heading in the help of what chooses bits by module."""
SENSITIVITY = "Sensitivity"
"""Heading in the help of what is measured."""
_MOST_JOBS = 64
"""Chosen: each holds a session of the whole model."""


def _read_rules(text: str) -> object:
    from winml.modelkit.options import read_json

    return read_json(text, "--per-module")[0]


def _read_block_sizes(text: str) -> object:
    from winml.modelkit.options import read_json

    return read_json(text, "--block-sizes")[0]


@dataclass(kw_only=True)
class QuantizeFields:
    """The options of the quantize stage."""

    precision: PrecisionName | None = declare(
        None,
        "Bits of what is quantized. `int8` where left out.",
        _GROUP,
        short="-p",
        only=tuple(name for name in PRECISIONS if name != FLOAT32),
    )
    mode: ModeName | None = declare(
        None,
        "How; the usual way of each precision where left out. "
        f"{'; '.join(f'`{name}`: {rules.words}' for name, rules in MODES.items())}.",
        _GROUP,
        only=MODES.names,
    )
    exclude: tuple[str, ...] = declare(
        (),
        "Modules that stay as they are, with all below them, as selectors.",
        _GROUP,
        metavar="SELECTOR",
        min_length=1,
    )
    include: tuple[str, ...] = declare(
        (),
        "The only modules that change, with all below them, as selectors. All where left out.",
        _GROUP,
        metavar="SELECTOR",
        min_length=1,
    )
    per_module: dict[str, PrecisionName] = declare(
        {},
        'Precision by selector, such as {"BertPooler": "fp32"}; of several that match a module the first wins, and all '
        "win over `precision`. On the command line a file or text.",
        _GROUP,
        metavar="JSON",
        read=_read_rules,
    )
    per_channel: bool | None = declare(
        None,
        "A scale for each output channel of a weight, or one for the weight. For each channel where left out.",
        _GROUP,
        spelling="--per-channel/--per-tensor",
    )
    symmetric: bool | None = declare(
        None,
        "Weights without a zero point, or with one. As is usual for the precision where left out.",
        _GROUP,
        spelling="--symmetric/--asymmetric",
    )
    block_size: BlockSize | None = declare(
        None,
        "Weight-only: values of a weight that share a scale. 32 in 4 bits and 64 in 8 bits where left out.",
        _GROUP,
    )
    block_sizes: dict[str, BlockSize] = declare(
        {},
        'Weight-only: block size by selector, such as {"BertPooler": 128}; of several that match a module the first '
        "wins, and all win over `block_size`. On the command line a file or text.",
        _GROUP,
        metavar="JSON",
        read=_read_block_sizes,
    )
    algorithm: Algorithm = declare(
        "rtn",
        "Weight-only: how scales are found. `rtn` rounds to the nearest step; `hqq` and `k_quant` search for better "
        "ones, which takes 5 to 20 times as long. With `hqq`, tables that rows are looked up in and weights in 8 bits "
        "are rounded: their kernels take no zero point between the steps. `gptq` and `awq` run the model on samples, "
        "layer by layer, and keep the error of the outputs of each product small; `auto` takes, for each module, the "
        "algorithm with the smallest such error. Tables are rounded.",
        _GROUP,
    )
    calibration_data: str | None = declare(
        None,
        "Samples for `qdq`, which finds the ranges of activations with them, and for the algorithms that need samples: "
        "an `.npz` file or a folder of them, one array per input "
        "of the graph and one file a sample; or a dataset for the tokenizer or image processor beside the model: .txt, "
        ".csv, .jsonl, .parquet, a folder of images, or a name at the Hub. Where left out, samples made for the "
        "tokenizer or processor beside the model, else random values.",
        _RANGES,
        metavar="DATA",
        min_length=1,
    )
    split: str | None = declare(
        None,
        "Split of the dataset. The validation split, else the test split, else the training split where left out.",
        _RANGES,
        metavar="NAME",
        min_length=1,
    )
    columns: dict[str, str] = declare(
        {},
        "Column of the dataset by role, such as `text` or `image`, where names of columns do not say it.",
        _RANGES,
        metavar="ROLE=COLUMN",
        is_repeatable=True,
        read=read_columns,
    )
    samples: int | None = declare(
        None,
        "Samples to calibrate with, and to compare the result on. 128 of the data and 16 that are made or random "
        "(fewer of large models) where left out.",
        _RANGES,
        minimum=1,
    )
    method: CalibrationMethod | None = declare(
        None,
        "How a range is computed from the calibration samples. `minmax` (default): all values. `percentile`: without "
        "the largest 0.001 %. `entropy` and `mse`: clip large values where 8 bits gain by it (smallest divergence, "
        "smallest squared error).",
        _RANGES,
    )
    calibration_cache: str | None = declare(
        None,
        "File of activation statistics by module, created or extended: another provider, method or precision of the "
        "same model and samples reads it and does not run the calibration again.",
        _RANGES,
        metavar="FILE",
        min_length=1,
    )
    smooth_quant: float | None = declare(
        None,
        "SmoothQuant: move outliers of activation channels into the weights before 8-bit quantization. Strength from 0 "
        "(weights only) to 1 (activations only), usually 0.5; off where left out. Measures activations, also with "
        "`--mode dynamic`.",
        _RANGES,
        metavar="STRENGTH",
        minimum=0,
        maximum=1,
    )
    cross_layer_equalization: bool = declare(
        False,
        "Balance the channel ranges of consecutive layers (convolutions, products) through ReLU and pooling before "
        "8-bit quantization, which changes no output in float.",
        _RANGES,
        spelling="--cross-layer-equalization",
    )
    kv_cache: Literal["int8"] | None = declare(
        None,
        "Store the KV cache of a decoder in 8 bits, a scale for each channel of each head, measured on samples. Alone, "
        "it leaves weights as they are. For attention that is fused (`GroupQueryAttention`), as a build does.",
        _GROUP,
    )
    budget: str | None = declare(
        None,
        "Choose 2, 4, 8, 16 or 32 bits and the block size of each module by measured sensitivity: mean bits of a "
        "quantized weight, scales included, such as `4.5bits`; or `smallest`, the smallest file that reaches "
        "`--min-sqnr`. With `--mode qdq`, between 8 bits, 16-bit activations (where `--ep` has them) and float.",
        BUDGET,
        metavar="BITS",
        min_length=1,
    )
    max_size: str | None = declare(
        None,
        "As `--budget`, with the size of all weights as the limit, such as `1.2GB` or `900MB`.",
        BUDGET,
        metavar="SIZE",
        min_length=1,
    )
    max_drop: str | None = declare(
        None,
        "As `--budget smallest`, for language models: the smallest file whose perplexity is larger than that of the "
        "source by at most this share, such as `perplexity=2%`. Measured on a quarter of `--calibration-data` that no "
        "algorithm sees.",
        BUDGET,
        metavar="METRIC=SHARE",
        min_length=1,
    )
    ep: str | None = declare(
        None,
        "Execution provider that the result is for, by its short name: Q/DQ stands where it takes it, and a note says "
        "if it does not take the mode. Any where left out.",
        _GROUP,
        metavar="NAME",
        min_length=1,
    )
    min_sqnr_db: float | None = declare(
        None,
        "Signal-to-quantization-noise ratio in decibels that every output has to reach. That of the precision where "
        "left out.",
        COMPARISON,
        spelling="--min-sqnr",
        metavar="DB",
    )


@dataclass(frozen=True, kw_only=True)
class SensitivityFields:
    """Which modules are quantized alone, on which inputs, and what is looked for."""

    depth: int | None = declare(
        None, "Levels of the module tree to measure. All where left out.", SENSITIVITY, minimum=1
    )
    module: str | None = declare(
        None, "The only modules to measure. All where left out.", SENSITIVITY, metavar="SELECTOR", min_length=1
    )
    samples: int | None = declare(
        None,
        "Samples compared on. 16, or fewer of large models, where left out.",
        SENSITIVITY,
        minimum=1,
        in_command=False,
    )
    input_data: Path | None = declare(
        None, "An .npz file with an array for each input, in place of random values.", SENSITIVITY, metavar="FILE"
    )
    target: str | None = declare(
        None,
        "Find the modules that must stay in float for sqnr_db=30 or, with `--dataset`, accuracy=0.9.",
        SENSITIVITY,
        metavar="METRIC=NUMBER",
    )
    jobs: int = declare(1, "Modules measured at a time.", SENSITIVITY, minimum=1, maximum=_MOST_JOBS)
