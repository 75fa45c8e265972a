"""Make the files of this folder with the tools they are named after: ``python make.py TOOL CHECKPOINTS``.

``CHECKPOINTS`` is a folder for the checkpoints of small models. Versions of the tools:

==============  ===========================================================================================
torch_dynamo    torch 2.13.0, ``torch.onnx.export(dynamo=True)``
torchscript     torch 2.13.0, ``torch.onnx.export(dynamo=False)``
transformers    ``transformers.exporters`` of transformers 5.24.0
optimum         optimum 2.1.0, optimum-onnx 0.1.0, transformers 4.57.6
genai           the model builder of onnxruntime-genai 0.18.0
skl2onnx        skl2onnx 1.20.0, scikit-learn 1.9.1; its names are no paths
winml           ``winml export`` of this project
mobius          mobius-onnx 0.1.0 with onnxscript 0.7.2, whose builder writes the metadata
==============  ===========================================================================================

Removed from the files: stack traces, FX nodes and the checkpoint of winml, which contain local paths, and types of
inner values.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import torch

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": 8,
}
REMOVED = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node", "pkg.torch.onnx.original_node_name")


def save_checkpoints(folder: Path) -> None:
    """Save the models, with a tokenizer, which onnxruntime-genai requires."""
    from tokenizers import Tokenizer, models
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        ViTConfig,
        ViTModel,
    )

    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL)).save_pretrained(folder / "bert")
    ViTModel(ViTConfig(**SMALL, image_size=8, patch_size=4)).save_pretrained(folder / "vit")
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "hidden_size": 16, "num_hidden_layers": 2})).save_pretrained(
        folder / "llama"
    )
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(8)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder / "llama")


def write_with(tool: str, checkpoints: Path, output: Path) -> Path:
    """Run a tool on its checkpoint; return the file that it wrote."""
    if tool in ("torch_dynamo", "torchscript"):
        from transformers import BertModel

        model = BertModel.from_pretrained(checkpoints / "bert", attn_implementation="eager").eval()
        forward, ids = model.forward, torch.arange(4)[None]
        model.forward = lambda input_ids: forward(input_ids=input_ids)[0]
        path = output / "model.onnx"
        opset = {"opset_version": 20, "dynamo": True} if tool == "torch_dynamo" else {"dynamo": False}
        torch.onnx.export(model, (ids,), path, input_names=["input_ids"], external_data=False, **opset)
        return path
    if tool == "transformers":
        from transformers import ViTModel
        from transformers.exporters import OnnxConfig, OnnxExporter

        model = ViTModel.from_pretrained(checkpoints / "vit").eval()
        OnnxExporter().export(
            model, {"pixel_values": torch.randn(2, 3, 8, 8)}, OnnxConfig(dynamic=True)
        ).save_pretrained(output)
    elif tool == "skl2onnx":
        from skl2onnx import to_onnx
        from sklearn.neural_network import MLPClassifier

        rows = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        network = MLPClassifier(hidden_layer_sizes=(8,), max_iter=5).fit(rows, rows.sum(1) > 0)
        onnx.save(to_onnx(network, rows[:1], options={"zipmap": False}), output / "model.onnx")
    elif tool == "optimum":
        from optimum.exporters.onnx import main_export

        main_export(
            checkpoints / "bert",
            output=output,
            task="feature-extraction",
            library_name="transformers",
            opset=17,
            do_validation=False,
            sequence_length=4,
        )
    else:
        python, output = [sys.executable, "-m"], output.absolute()
        command = {
            "genai": ["onnxruntime_genai.models.builder", "-m", "llama", "-o", output, "-p", "fp32", "-e", "cpu"],
            "winml": ["winml.modelkit", "export", "bert", "-o", output / "model.onnx", "--overwrite"],
            "mobius": ["mobius", "build", "--config", "llama", output],
        }[tool]
        subprocess.run([*python, *command], check=True, cwd=checkpoints)
    return output / "model.onnx"


def strip_file(source: Path, target: Path) -> None:
    """Copy a file with its weights, without the removed metadata."""
    model = onnx.load(source)
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key not in REMOVED]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.value_info[:]
    del model.graph.metadata_props[:]
    kept = [entry for entry in model.metadata_props if entry.key != "winml.model"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, target, save_as_external_data=False)


if __name__ == "__main__":
    name, base = sys.argv[1], Path(sys.argv[2])
    if not base.exists():
        save_checkpoints(base)
    written = base / f"written_{name}"
    written.mkdir(exist_ok=True)
    strip_file(write_with(name, base, written), Path(__file__).with_name(f"{name}.onnx"))
