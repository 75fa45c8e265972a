"""Options of the quantize stage and of the sensitivity analysis, declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winml.modelkit.fields import CALIBRATION, DEVICE, QUANTIZATION, VERIFICATION, declare, read_columns
from winml.modelkit.quantize.precisions import (
    INT8,
    KIND_RULES,
    MODES,
    PRECISIONS,
    ActivationBits,
    CalibrationMethod,
    ModeName,
    PrecisionName,
    ValueKind,
)

Algorithm = Literal["rtn", "hqq", "k_quant", "gptq", "awq", "auto"]
BlockSize = Literal[16, 32, 64, 128, 256]
DATA_ALGORITHMS: frozenset[Algorithm] = frozenset({"gptq", "awq", "auto"})
"""Algorithms that run the model on samples."""
INTEGER_ALGORITHMS: frozenset[Algorithm] = frozenset({"gptq"})
"""Algorithms for the integers of mode ``qdq`` besides ``rtn``; the others scale inputs or have zero points."""

SENSITIVITY = "Sensitivity"
"""Group of the options that measure modules."""
_MOST_JOBS = 64
"""Chosen: each job holds a session of the whole model."""


def _json_reader(option: str) -> Callable[[str], object]:
    """Return a function that reads the JSON text or file of an option."""

    def read(text: str) -> object:
        from winml.modelkit.options import read_json

        return read_json(text, option)[0]

    return read


@dataclass(kw_only=True)
class QuantizeFields:
    """The options of the quantize stage."""

    precision: PrecisionName | None = declare(
        None,
        QUANTIZATION,
        short="-p",
        only=tuple(name for name, precision in PRECISIONS.items() if precision.modes),
        default_words=INT8,
        is_common=True,
    )
    """Precision of the quantized modules."""
    mode: ModeName | None = declare(
        None,
        QUANTIZATION,
        text=f"Quantization mode. {'. '.join(f'`{name}`: {rules.words}' for name, rules in MODES.items())}.",
        only=MODES.names,
        default_words="that of the precision, or another that quantizes most of the weights",
        is_common=True,
    )
    exclude: tuple[str, ...] = declare((), QUANTIZATION, metavar="SELECTOR", min_length=1, is_common=True)
    """Do not quantize these modules. Submodules are included."""
    include: tuple[str, ...] = declare((), QUANTIZATION, metavar="SELECTOR", min_length=1, default_words="all")
    """Quantize only these modules. Submodules are included."""
    per_module: dict[str, PrecisionName] = declare({}, QUANTIZATION, metavar="JSON", read=_json_reader("--per-module"))
    """Precision by selector, such as {"BertLayer.0": "fp32"}. The first selector that matches a module applies, before
    `precision`. The command takes JSON text, a file or pairs: BertLayer.0=fp32,BertLayer.1=int4."""
    activation_bits: dict[ValueKind, ActivationBits] = declare(
        {},
        QUANTIZATION,
        metavar="JSON",
        read=_json_reader("--activation-bits"),
        default_words=", ".join(f"{kind} {rule.bits}" for kind, rule in KIND_RULES.items()),
    )
    """Precision `mixed`: bits of activations by kind of value, such as {"attention": 16}; other kinds have the
    defaults. The
    command takes JSON text, a file or pairs."""
    per_channel: bool | None = declare(
        None, QUANTIZATION, spelling="--per-channel/--per-tensor", default_words="per channel"
    )
    """Scales of weights: one per output channel, or one per tensor."""
    symmetric: bool | None = declare(
        None, QUANTIZATION, spelling="--symmetric/--asymmetric", default_words="by precision"
    )
    """Quantize weights without zero points, or with zero points."""
    block_size: BlockSize | None = declare(
        None, QUANTIZATION, default_words="32 with 4 bits; with 8 bits 64, and a scale per channel with `qdq`"
    )
    """Weight-only and `qdq`: number of values of a weight that share a scale. If a file uses both modes,
    it applies to weight-only."""
    block_sizes: dict[str, BlockSize] = declare({}, QUANTIZATION, metavar="JSON", read=_json_reader("--block-sizes"))
    """Weight-only and `qdq`: block size by selector, such as {"BertLayer.0": 128}. The first selector that matches a
    module applies, before `block_size`. The command takes JSON text, a file or pairs."""
    algorithm: Algorithm = declare("rtn", QUANTIZATION)
    """How weights are rounded, in mode `weight-only`, and in `qdq` (`rtn` and `gptq`). `rtn`: round to nearest. `hqq`
    and `k_quant`: search for better scales, 5 to 20 times as slow. `gptq` and `awq`: minimize the output error of each
    layer on calibration samples. `auto`: for each module, the algorithm with the smallest output error. Embedding
    tables and convolutions are rounded to nearest; with `hqq`, 8-bit weights are, too, since their kernels take integer
    zero points only."""
    algorithms: dict[str, Algorithm] = declare({}, QUANTIZATION, metavar="JSON", read=_json_reader("--algorithms"))
    """Algorithm by selector, such as {"lm_head": "gptq"}. The first selector that matches a module
    applies, before `algorithm`. The command takes JSON text, a file or pairs."""
    tables: Literal["blocks", "rows"] | None = declare(
        None, QUANTIZATION, default_words="rows for transformers.js on any provider, else blocks"
    )
    """Weight-only: format of embedding tables. `blocks`: the bits of the precision, by block (GatherBlockQuantized of
    ONNX Runtime). `rows`: 8 bits and one scale per row, in operators of ONNX; for runtimes without a kernel for blocks,
    such as ONNX Runtime in WebAssembly."""
    weight_operators: Literal["onnxruntime", "standard"] | None = declare(
        None, QUANTIZATION, default_words="standard beside standard operators of the optimizer, else onnxruntime"
    )
    """Weight-only: operators with weights in 4 or 8 bits. `onnxruntime`: MatMulNBits. `standard`: DequantizeLinear with
    blocks, of opset 21, before a MatMul, and tables in rows; for other readers, such as OpenVINO."""
    calibration_data: str | None = declare(
        None,
        QUANTIZATION,
        metavar="DATA",
        min_length=1,
        default_words="samples generated for the tokenizer or processor beside the model, else random values",
        is_common=True,
    )
    """Calibration samples: arrays or a dataset. For activation ranges (`qdq`) and for the algorithms that run the
    model. Arrays: an `.npz` file with one array per graph input, or a folder of such files, one per sample. Dataset:
    .txt, .csv, .jsonl, .parquet, a folder of images, or a name on the Hub; it requires the tokenizer or image processor
    beside the model."""
    split: str | None = declare(
        None, CALIBRATION, metavar="NAME", min_length=1, default_words="validation, else test, else train"
    )
    """Split of the dataset."""
    columns: dict[str, str] = declare({}, CALIBRATION, metavar="ROLE=COLUMN", is_repeatable=True, read=read_columns)
    """Column of the dataset by role, such as `text` or `image`, if its name is not recognized."""
    samples: int | None = declare(
        None,
        CALIBRATION,
        minimum=1,
        default_words="128 of a dataset, 16 generated or random ones; fewer for large models",
    )
    """Samples to calibrate on. The result is compared with the source on the same samples. With `--dataset` alone:
    samples to compare on."""
    method: CalibrationMethod | None = declare(None, CALIBRATION, default_words="minmax")
    """How activation ranges are computed. `minmax`: all values, always with 16-bit activations. `percentile`: all
    but the largest 0.001 %. `entropy` and `mse`: clip outliers where this reduces the divergence or the squared error
    in 8 bits."""
    calibration_cache: str | None = declare(None, CALIBRATION, metavar="FILE", min_length=1)
    """File of activation statistics by module, which is created or extended. Later runs with the same model and samples
    read it and skip calibration, whatever their execution provider, method or precision."""
    smooth_quant: float | None = declare(
        None, CALIBRATION, metavar="STRENGTH", minimum=0, maximum=1, default_words="off"
    )
    """SmoothQuant: scale outliers of activation channels into the weights before 8-bit quantization. Strength from 0
    (weights only) to 1 (activations only), usually 0.5. It requires calibration, also with `--mode dynamic`."""
    cross_layer_equalization: bool = declare(False, CALIBRATION, spelling="--cross-layer-equalization")
    """Equalize the channel ranges of consecutive layers before 8-bit quantization. Applies to Conv, MatMul and Gemm
    with ReLU or pooling between them, and does not change float outputs."""
    kv_cache: Literal["int8"] | None = declare(None, QUANTIZATION)
    """Store the KV cache of a decoder in 8 bits. Each channel of each head has a scale from calibration. Without
    further quantization options, weights are not quantized. Requires fused attention (`GroupQueryAttention`), as a
    build makes it."""
    budget: str | None = declare(None, QUANTIZATION, metavar="BITS", min_length=1, is_common=True)
    """Choose bits by module: `4.5bits`, or `smallest`. The number is the maximum mean of bits per parameter, scales
    included, as `winml inspect` prints it. Modules get 2, 4, 8, 16 or 32 bits and a block size by their measured
    sensitivity. `smallest`: the smallest file that reaches `--min-sqnr`. With `--mode qdq`, the choice is between 8
    bits, 16-bit activations (if `--ep` supports them) and float. With `--precision fp16` or `bf16`, `smallest` keeps
    modules in float32 where the quality needs them."""
    max_size: str | None = declare(None, QUANTIZATION, metavar="SIZE", min_length=1)
    """Choose bits by module, as `--budget`, for a file size such as `1.2GB` or `900MB`. The size includes graph,
    metadata and data files. In a build with several parts, it limits each model file, not their sum."""
    max_drop: str | None = declare(None, QUANTIZATION, metavar="METRIC=VALUE", min_length=1)
    """Choose bits by module for the smallest language model within a perplexity limit. `perplexity=2%`: at most 2 %
    above that of the source; `perplexity=0.5`: at most 0.5 above it. Perplexity is measured on a held-out quarter of
    `--calibration-data`."""
    ep: str | None = declare(None, DEVICE, metavar="NAME", min_length=1, default_words="any", is_common=True)
    """Target execution provider. Q/DQ nodes are placed as it requires; a note reports an unsupported mode."""
    dataset: str | None = declare(
        None,
        VERIFICATION,
        metavar="PATH|NAME",
        min_length=1,
        default_words="samples generated for the tokenizer or processor beside the model, else random values",
        is_common=True,
    )
    """Dataset for quality: file, folder or Hub name. Without `--calibration-data`, it also calibrates, on other
    samples: those of the split train if it has one, else the rest of its split; `--split`, `--columns` and `--samples`
    select the samples for quality. With `--sensitivity`, modules are ranked on it, and `--target` may be a metric of
    its task, as in winml eval."""
    min_sqnr_db: float | None = declare(
        None,
        VERIFICATION,
        spelling="--min-sqnr",
        metavar="DB",
        default_words="a top-1 agreement of 85 %; for outputs without scores and 4 bits or fewer, an SQNR by precision",
        is_common=True,
    )
    """Minimum SQNR (dB) of every output. SQNR: signal-to-quantization-noise ratio relative to the source model."""


@dataclass(frozen=True, kw_only=True)
class SensitivityFields:
    """Options of a sensitivity analysis: modules, samples and target."""

    depth: int | None = declare(None, SENSITIVITY, minimum=1, default_words="all")
    """Levels of the module tree to measure."""
    module: str | None = declare(None, SENSITIVITY, metavar="SELECTOR", min_length=1, default_words="all")
    """Measure only these modules."""
    samples: int | None = declare(
        None, SENSITIVITY, minimum=1, in_command=False, default_words="16, fewer for large models"
    )
    """Samples to compare on."""
    input_data: Path | None = declare(None, SENSITIVITY, metavar="FILE", default_words="random values")
    """Inputs to compare on: an .npz file with one array per input."""
    target: str | None = declare(None, SENSITIVITY, metavar="METRIC=NUMBER")
    """Find the modules to exclude for this quality: sqnr_db=30 or, with `--dataset`, accuracy=0.9."""
    jobs: int = declare(1, SENSITIVITY, minimum=1, maximum=_MOST_JOBS)
    """Modules to measure in parallel."""
