"""Results of other libraries on the decoder of ``lowbits.py``, which runs this file in their environment.

``ort``: ``MatMulNBitsQuantizer`` of ONNX Runtime, on the float ONNX file. ``inc``: the quantizer of the same name of
onnx-neural-compressor (neural-compressor itself has no ONNX from version 3 on), on the same file. ``inc-torch``:
neural-compressor, on the checkpoint in PyTorch. ``olive``: Olive's GPTQ, on the checkpoint in PyTorch.

The first two write ``model.onnx`` into a folder. The others write no ONNX file here, and print the perplexity in
PyTorch on the same windows (Olive 0.13.0 makes ONNX of its own checkpoints with a module that onnxruntime-genai 0.18.0
no longer has). The last line is JSON, and has the versions.

    python benchmarks/lowbits_peers.py ort|inc|inc-torch|olive --cache FOLDER --output FOLDER --algorithm rtn --bits 4
        --block-size 128 [--windows 64]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

CALIBRATION_WINDOWS = 64


def tokens_of_calibration(cache: Path) -> list[list[int]]:
    """Return the token ids of the calibration texts, all of the length of the shortest: some peers join them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cache / "decoder" / "tokenizer.json"))
    lines = (cache / "decoder" / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines[:CALIBRATION_WINDOWS]]
    return [ids[: min(map(len, texts))] for ids in texts]


class Reader:
    """Gives each text as one prompt, as both quantizers of ONNX files ask for it."""

    def __init__(self, model: Path, texts: list[list[int]]) -> None:
        """Make the inputs."""
        import numpy as np
        import onnxruntime as ort
        from lowbits import prompt_feeds

        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self._feeds = [prompt_feeds(session, np.asarray([text], np.int64)) for text in texts]
        self._left = iter(self._feeds)

    def get_next(self) -> dict[str, Any] | None:
        """Return the inputs of the next run."""
        return next(self._left, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the inputs of the runs that are left."""
        return self._left

    def rewind(self) -> None:
        """Begin anew."""
        self._left = iter(self._feeds)


def ort_quantizer(arguments: argparse.Namespace, source: Path) -> None:
    """Quantize the float file with ONNX Runtime's own class."""
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    bits, size = arguments.bits, arguments.block_size
    reader = Reader(source, tokens_of_calibration(arguments.cache)) if arguments.algorithm == "gptq" else None
    config = {
        "rtn": lambda: nbits.DefaultWeightOnlyQuantConfig(block_size=size, bits=bits),
        "hqq": lambda: nbits.HQQWeightOnlyQuantConfig(block_size=size, bits=bits),
        "k_quant": nbits.KQuantWeightOnlyQuantConfig,
        "gptq": lambda: nbits.GPTQWeightOnlyQuantConfig(reader, block_size=size),
    }[arguments.algorithm]()
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(source), bits=bits, block_size=size, algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(arguments.output / "model.onnx"), False)


def onnx_neural_compressor(arguments: argparse.Namespace, source: Path) -> None:
    """Quantize the float file with onnx-neural-compressor."""
    from onnx_neural_compressor.quantization import matmul_nbits_quantizer as nbits

    reader = Reader(source, tokens_of_calibration(arguments.cache))
    config = {
        "rtn": nbits.RTNWeightOnlyQuantConfig,
        "gptq": lambda: nbits.GPTQWeightOnlyQuantConfig(reader),
        "awq": lambda: nbits.AWQWeightOnlyQuantConfig(reader),
    }[arguments.algorithm]()
    quantizer = nbits.MatMulNBitsQuantizer(
        str(source), block_size=arguments.block_size, n_bits=arguments.bits, algo_config=config
    )
    quantizer.process()
    import onnx

    onnx.save(quantizer.model, arguments.output / "model.onnx")


def neural_compressor(arguments: argparse.Namespace) -> dict[str, Any]:
    """Quantize the checkpoint with neural-compressor in PyTorch, and return the perplexity."""
    import torch
    from neural_compressor.torch import quantization as inc
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.cache / "decoder", dtype=torch.float32).eval()
    model.config.use_cache = False
    texts = tokens_of_calibration(arguments.cache)
    kind = {"rtn": inc.RTNConfig, "gptq": inc.GPTQConfig, "awq": inc.AWQConfig}[arguments.algorithm]
    config = kind(bits=arguments.bits, group_size=arguments.block_size, use_sym=False, quant_lm_head=True)
    example = torch.tensor(texts[:1])
    model = inc.prepare(model, config, example_inputs=example)
    if arguments.algorithm != "rtn":
        with torch.no_grad():
            for text in texts:
                with contextlib.suppress(ValueError):  # its GPTQ ends a run behind the inputs of the first layer
                    model(torch.tensor([text]))
    model = inc.convert(model)
    return {"perplexity": perplexity(model, arguments)}


def perplexity(model: Any, arguments: argparse.Namespace) -> float:
    """Return the perplexity of a model in PyTorch on windows of the held-out text."""
    import numpy as np
    import torch

    total = count = 0.0
    windows = np.load(arguments.cache / "decoder" / "held_out.npy")[: arguments.windows]
    with torch.no_grad():
        for window in torch.from_numpy(windows):
            scores = model(window[None]).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(scores, window[1:], reduction="sum"))
            count += len(scores)
    return math.exp(total / count)


def olive(arguments: argparse.Namespace) -> dict[str, Any]:
    """Quantize the checkpoint with Olive's GPTQ, and return the perplexity."""
    from olive.data.template import huggingface_data_config_template
    from olive.workflows import run

    data = huggingface_data_config_template(
        model_name=str(arguments.cache / "decoder"),
        task="text-generation",
        load_dataset_config={
            "data_name": "json",
            "data_files": str(arguments.cache / "decoder" / "calibration.jsonl"),
            "split": "train",
        },
        pre_process_data_config={
            "text_cols": ["text"],
            "strategy": "line-by-line",
            "add_special_tokens": False,
            "max_seq_len": 256,
            "max_samples": CALIBRATION_WINDOWS,
            "pad_to_max_len": False,
        },
        dataloader_config={"batch_size": 1},
    ).to_json()
    run(
        {
            "input_model": {"type": "HfModel", "model_path": str(arguments.cache / "decoder")},
            "passes": {
                "quantized": {
                    "type": "Gptq",
                    "bits": arguments.bits,
                    "group_size": arguments.block_size,
                    "sym": False,
                    "lm_head": True,
                    "data_config": data,
                }
            },
            "output_dir": str(arguments.output),
            "cache_dir": str(arguments.output / "cache"),
        }
    )
    written = max(arguments.output.rglob("model.safetensors"), key=lambda path: path.stat().st_mtime)
    return {"perplexity": perplexity(olive_model(arguments.cache / "decoder", written, arguments.bits), arguments)}


def olive_model(checkpoint: Path, written: Path, bits: int) -> Any:
    """Return the float model with the values that the codes of Olive represent.

    Codes and zero points of an output channel are packed in bytes, the first in the lowest bits.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    tensors = load_file(written)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)

    def unpacked(packed: Any) -> Any:
        return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(1).float()

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    state = model.state_dict()
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        scales = tensors[f"{name}.scales"].float()
        codes = unpacked(tensors[f"{name}.qweight"])
        groups = codes.shape[1] // scales.shape[1]
        zeros = unpacked(tensors[f"{name}.qzeros"])[:, : scales.shape[1]]
        state[f"{name}.weight"] = (codes - zeros.repeat_interleave(groups, 1)) * scales.repeat_interleave(groups, 1)
    state.update({name: value.float() for name, value in tensors.items() if name in state})
    model.load_state_dict(state)
    return model


PACKAGES = {
    "ort": ("onnxruntime",),
    "inc": ("onnx-neural-compressor", "onnxruntime"),
    "inc-torch": ("neural-compressor", "torch"),
    "olive": ("olive-ai", "torch"),
}


def main() -> None:
    """Quantize and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=PACKAGES)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--algorithm", choices=["rtn", "hqq", "k_quant", "gptq", "awq"], default="rtn")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--windows", type=int, default=64)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    source = arguments.cache / "float" / "model.onnx"
    if arguments.tool == "ort":
        ort_quantizer(arguments, source)
    elif arguments.tool == "inc":
        onnx_neural_compressor(arguments, source)
    elif arguments.tool == "inc-torch":
        found = neural_compressor(arguments)
    else:
        found = olive(arguments)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES[arguments.tool]}
    print(json.dumps({**found, "versions": versions}))


if __name__ == "__main__":
    main()
