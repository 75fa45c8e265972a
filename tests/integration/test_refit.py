"""Other weights in a build: the refitted folder equals a new build of the checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from adapters import save_adapter
from checkpoints import build_model as small_model
from checkpoints import one_layer, save_checkpoint
from coded_checkpoints import save_gptq
from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from winml.modelkit import build_model, refit_model
from winml.modelkit.builds.config import WinMLBuildConfig
from winml.modelkit.builds.manifest_records import find_manifest
from winml.modelkit.builds.plan import plan_build
from winml.modelkit.builds.recipes import plan_refit, recipe_of
from winml.modelkit.errors import (
    CheckpointError,
    InputError,
    ModelPathError,
    OutputExistsError,
    UsageError,
    VerificationError,
)
from winml.modelkit.export.refit_graph import describe_source
from winml.modelkit.models.request import ModelRequest

Tensors = dict[str, torch.Tensor]


def tuned(checkpoint: Path, folder: Path, change: Callable[[Tensors], object] = lambda _tensors: None) -> Path:
    """Copy a checkpoint with other weights, as fine-tuning leaves it; then ``change`` its tensors."""
    shutil.copytree(checkpoint, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for name, value in tensors.items():
        if value.is_floating_point():
            # Scales of codes and variances stay positive.
            noise = torch.rand(value.shape, generator=generator) * 0.1
            tensors[name] = (value * (1 + noise)).to(value.dtype)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def model_files(folder: Path) -> Mapping[str, bytes]:
    """Return name → content of every ONNX file of a build, and of its data files."""
    files = (path for path in folder.rglob("*") if ".onnx" in path.name)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT ``base``, its fine-tuned copy ``tuned``, builds ``built`` of the one and ``new`` of the other.

    ``unchecked`` is ``built`` as if it had not been compared.
    """
    folder = tmp_path_factory.mktemp("refit")
    tuned(save_checkpoint("bert", folder / "base", **one_layer("bert")), folder / "tuned")
    build_model(folder / "base", folder / "built", refittable=True)
    build_model(folder / "tuned", folder / "new", verify=False)
    manifest = Path(shutil.copytree(folder / "built", folder / "unchecked")) / "build_manifest.json"
    record = json.loads(manifest.read_text(encoding="utf-8"))
    record["recipe"]["verify"] = record["recipe"]["config"]["export"]["verify"] = False
    manifest.write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_refitted_build_equals_new_build_and_pytorch(bert: Path, tmp_path: Path) -> None:
    """Every graph and every weight is that of a new build; PyTorch has the same outputs."""
    result = refit_model(bert / "built", bert / "tuned", tmp_path / "refitted")
    built, new = model_files(bert / "built"), model_files(bert / "new")
    assert model_files(result.folder) == {**new, "export_refit.onnx": built["export_refit.onnx"]}
    assert new["model.onnx"] != built["model.onnx"]
    assert "equals PyTorch" in result.manifest.stages[0].summary
    again = refit_model(result.folder / "model.onnx", bert / "base", tmp_path / "again", verify=False)
    assert model_files(again.folder) == built
    traced = build_model(bert / "base", again.folder, refittable=True, verify=False)
    assert traced.manifest.stages[0].status == "run"
    assert "refitted" in traced.manifest.stages[0].reason


def test_folded_weights_are_computed_again(tmp_path: Path) -> None:
    """Batch norms are folded into convolutions with the other weights."""
    base = save_checkpoint("resnet", tmp_path / "base", hidden_sizes=[16], depths=[1])
    other = tuned(base, tmp_path / "tuned")
    build_model(base, tmp_path / "built", refittable=True, verify=False)
    refitted = refit_model(tmp_path / "built", other, tmp_path / "refitted", verify=False)
    new = build_model(other, tmp_path / "new", verify=False)
    assert refitted.model_path.read_bytes() == new.model_path.read_bytes()


def test_codes_of_quantized_checkpoint_are_refitted(tmp_path: Path) -> None:
    """Codes and scales of a GPTQ checkpoint come from the other checkpoint; a float checkpoint does not fit."""
    base = save_gptq(tmp_path)
    other = tuned(base.folder, tmp_path / "tuned")
    built = build_model(base.folder, tmp_path / "built", refittable=True, verify=False)
    refitted = refit_model(built.folder, other, tmp_path / "refitted", verify=False)
    assert not any("converted" in note for note in refitted.notes)
    assert (
        refitted.model_path.read_bytes() == build_model(other, tmp_path / "new", verify=False).model_path.read_bytes()
    )
    with pytest.raises(CheckpointError, match="float, not gptq"):
        refit_model(tmp_path / "built", base.reference, tmp_path / "float")


def test_parts_are_refitted_together(tmp_path: Path) -> None:
    """Encoder and decoder of one checkpoint get its embedding, which is one tensor for both."""
    base = save_encoder_decoder(tmp_path / "base", "bart", encoder_layers=1, decoder_layers=1)
    other = tuned(base, tmp_path / "tuned")
    build_model(base, tmp_path / "built", refittable=True, verify=False, optimize=False)
    refitted = refit_model(tmp_path / "built", other, tmp_path / "refitted", verify=False).folder
    embedding = load_file(other / "model.safetensors")["model.shared.weight"].numpy()
    for part in ("encoder", "decoder"):
        weights = [numpy_helper.to_array(weight) for weight in onnx.load(refitted / f"{part}.onnx").graph.initializer]
        assert any(np.array_equal(weight, embedding) for weight in weights)


def test_adapter_and_proof_are_made_anew(bert: Path, tmp_path: Path) -> None:
    """A LoRA adapter gives the file of a build with the adapter; a refit without adapter and proof leaves them out."""
    lora = save_adapter(tmp_path / "lora", small_model("bert", **one_layer("bert")), ("query", "value"), seed=3)
    adapted = refit_model(bert / "built", bert / "base", tmp_path / "adapted", adapter=(str(lora),), proof=True)
    assert adapted.manifest.proof is not None
    new = build_model(bert / "base", tmp_path / "new", adapter=(str(lora),), verify=False)
    assert adapted.model_path.read_bytes() == new.model_path.read_bytes()
    plain = refit_model(adapted.folder, bert / "base", tmp_path / "plain", verify=False)
    assert plain.manifest.proof is None
    assert all(any(word in note for note in plain.notes) for word in ("adapters", "proof"))
    assert model_files(plain.folder) == model_files(bert / "built")


def test_stored_graph_has_no_weights(bert: Path) -> None:
    """The graph beside the export is a valid ONNX model whose weights are inputs, not values."""
    model = onnx.load(bert / "built" / "export_refit.onnx")
    sizes = [numpy_helper.to_array(tensor).size for tensor in model.graph.initializer]
    parameters = sum(parameter.numel() for parameter in AutoModel.from_pretrained(bert / "base").parameters())
    assert {"input_ids", "embeddings.word_embeddings.weight"} <= {value.name for value in model.graph.input}
    assert sum(sizes) < parameters / 100


_QUERY = "encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop(_QUERY), CheckpointError),
        (lambda tensors: tensors.update({_QUERY: torch.ones(16, 32)}), CheckpointError),
        (lambda tensors: tensors.update({_QUERY: tensors[_QUERY] * float("nan")}), VerificationError),
    ],
)
def test_damaged_weights_are_refused_by_name(
    change: Callable[[Tensors], object], error: type[Exception], bert: Path, tmp_path: Path
) -> None:
    """A missing tensor, one of another shape and NaN are named, and no folder is left."""
    damaged = tuned(bert / "base", tmp_path / "damaged", change)
    with pytest.raises(error, match=r"attention\.self\.query\.weight"):
        refit_model(bert / "built", damaged, tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_refit_compares_though_the_build_did_not(bert: Path, tmp_path: Path) -> None:
    """The build ``new`` was made without a comparison, and for its graph alone."""
    result = refit_model(bert / "unchecked", bert / "tuned", tmp_path / "refitted")
    assert "equals PyTorch" in result.manifest.stages[0].summary
    plain = refit_model(bert / "unchecked", bert / "tuned", tmp_path / "plain", verify=False)
    assert "equals PyTorch" not in plain.manifest.stages[0].summary
    assert plain.manifest.recipe == result.manifest.recipe


def test_paths_of_a_recipe_are_relative_to_its_build(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refit runs in another folder than the build, and on a moved copy of it with its data."""
    texts = tmp_path / "data/texts.jsonl"
    texts.parent.mkdir()
    texts.write_text("a\n")
    monkeypatch.chdir(tmp_path)
    plan = plan_build(
        WinMLBuildConfig.model_validate({"quant": {"precision": "w8a8", "calibration_data": "data/texts.jsonl"}}),
        ModelRequest(str(bert / "base")),
    )
    recipe = recipe_of(plan, tmp_path / "built")
    assert recipe.config["quant"]["calibration_data"] == "../data/texts.jsonl"
    (tmp_path / "moved/built").mkdir(parents=True)
    shutil.copytree(texts.parent, tmp_path / "moved/data")
    monkeypatch.chdir(tmp_path / "moved/built")
    refit = plan_refit(recipe, tmp_path / "moved/built", {}, {"model": str(bert / "tuned")})
    assert refit.config.quant is not None
    assert refit.config.quant.calibration_data == "../data/texts.jsonl"
    assert recipe_of(refit, tmp_path / "moved/built").config["quant"] == recipe.config["quant"]


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("bert", {"hidden_size": 64}, "hidden_size"),
        ("bert", {"hidden_act": "relu"}, "hidden_act"),
        ("gpt2", {}, "gpt2 model"),
    ],
)
def test_other_architecture_is_refused(
    architecture: str, changes: Mapping[str, Any], named: str, bert: Path, tmp_path: Path
) -> None:
    """The refusal names the class, or the config key, also where every tensor fits."""
    other = save_checkpoint(architecture, tmp_path / "other", **changes)
    with pytest.raises(CheckpointError, match=named):
        refit_model(bert / "built", other, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_checkpoint_of_another_type_is_converted_to_the_type_of_the_build(
    dtype: torch.dtype, bert: Path, tmp_path: Path
) -> None:
    """Fine-tuned weights are often saved in 16 bits; a requested type is not changed."""
    AutoModel.from_pretrained(bert / "tuned", dtype=dtype).save_pretrained(tmp_path / "half")
    result = refit_model(bert / "built", tmp_path / "half", tmp_path / "out", verify=False)
    assert any("fp32" in note for note in result.notes)
    weights = {tensor.data_type for tensor in onnx.load(result.model_path).graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in weights
    with pytest.raises(CheckpointError) as refusal:
        refit_model(bert / "built", tmp_path / "half", tmp_path / "other", dtype="fp16")
    assert "fp32" in refusal.value.hint


def test_config_may_differ_in_training_and_tools(bert: Path, tmp_path: Path) -> None:
    """Dropout, labels and keys of other programs change no graph."""
    other = changed_config(bert / "tuned", tmp_path / "other", hidden_dropout_prob=0.3, tool_version="1", id2label={})
    assert (
        model_files(refit_model(bert / "built", other, tmp_path / "out", verify=False).folder).keys()
        == model_files(bert / "built").keys()
    )


def changed_config(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """Copy a checkpoint with other values in its config."""
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with tied embeddings ``base``, and its build ``built`` with weights of 4 bits."""
    folder = tmp_path_factory.mktemp("gpt2")
    base = save_checkpoint("gpt2", folder / "base", bos_token_id=1, eos_token_id=2, **one_layer("gpt2"))
    build_model(base, folder / "built", refittable=True, precision="int4", verify=False)
    return folder


def test_decoder_is_fused_and_quantized_again(gpt2: Path, tmp_path: Path) -> None:
    """The decoder of other weights has other tokens of generation, too: the folder has those of the checkpoint."""
    other = changed_config(tuned(gpt2 / "base", tmp_path / "tuned"), tmp_path / "other", eos_token_id=3, pad_token_id=4)
    refitted = refit_model(gpt2 / "built", other, tmp_path / "refitted", verify=False)
    new = build_model(other, tmp_path / "new", precision="int4", verify=False)
    assert refitted.model_path.read_bytes() == new.model_path.read_bytes()
    config = json.loads((refitted.folder / "config.json").read_text())
    assert (3, 4) == (config["eos_token_id"], config["pad_token_id"])


def test_head_apart_from_embedding_is_refused(gpt2: Path, tmp_path: Path) -> None:
    """The graph of tied weights has one tensor for both; training may have separated them."""

    def separate(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    with pytest.raises(CheckpointError, match="lm_head"):
        refit_model(gpt2 / "built", tuned(gpt2 / "base", tmp_path / "untied", separate), tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "class_name", "keys"),
    [
        ("llama", "LlamaForCausalLM", set()),
        ("llama", "LlamaForSequenceClassification", {"pad_token_id"}),
        ("roberta", "RobertaModel", {"pad_token_id"}),
        ("clip", "CLIPModel", {"text_config.eos_token_id"}),
    ],
)
def test_tokens_that_forwards_read_are_compared(architecture: str, class_name: str, keys: set[str]) -> None:
    """A forward that pools the last token, or counts positions after padding, depends on the token."""
    model = small_model(architecture, class_name=class_name, **one_layer(architecture))
    config = describe_source(model, class_name, None)["config"]
    assert {key for key in config if key.endswith("_token_id")} == keys


def test_unusable_requests_are_refused(bert: Path, tmp_path: Path) -> None:
    """A build without a graph, a used folder, an ONNX file as weights, a damaged graph: each before any work."""
    built, base, out = bert / "built", bert / "tuned", tmp_path / "out"
    plain = Path(shutil.copytree(bert / "new", tmp_path / "plain"))
    with pytest.raises(UsageError) as refusal:
        refit_model(plain, base, out)
    assert "refittable" in refusal.value.hint
    with pytest.raises(OutputExistsError):
        refit_model(built, base, plain)
    with pytest.raises(UsageError):
        refit_model(built, base, built, overwrite=True)
    with pytest.raises(UsageError, match="ONNX file"):
        refit_model(built, built / "model.onnx", out)
    lora = save_adapter(tmp_path / "lora", small_model("bert", **one_layer("bert")), ("query",), seed=3)
    with pytest.raises(UsageError, match="is an adapter"):
        refit_model(built, lora, out)
    with pytest.raises(UsageError, match="folder of a build"):
        refit_model(built, plain, out)
    (tmp_path / "config_alone").mkdir()
    shutil.copy(base / "config.json", tmp_path / "config_alone")
    with pytest.raises(ModelPathError) as refusal:
        refit_model(built, tmp_path / "config_alone", out)
    assert "random" not in refusal.value.hint
    (tmp_path / "config_alone/config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        refit_model(built, tmp_path / "config_alone", out)
    assert run_here("quantize", "-m", built, "-p", "bf16", "-o", tmp_path / "quantized", "--no-verify", "-q").code == 0
    with pytest.raises(UsageError) as refusal:
        refit_model(tmp_path / "quantized", base, out)
    assert f"Refit {built}" in refusal.value.hint
    with pytest.raises(ModelPathError):
        refit_model(tmp_path / "missing", base, out)
    with pytest.raises(UsageError, match="has no build"):
        refit_model(base, base, out)
    with pytest.raises(UsageError, match="deploy_only"):
        build_model(bert / "base", out, refittable=True, deploy_only=True)
    with pytest.raises(UsageError, match="ONNX file"):
        build_model(built / "model.onnx", out, refittable=True)
    shutil.copytree(built, tmp_path / "damaged")
    (tmp_path / "damaged" / "export_refit.onnx").write_bytes(b"")
    with pytest.raises(InputError, match=r"export_refit\.onnx"):
        refit_model(tmp_path / "damaged", base, out)
    assert not out.exists()
    assert refit_model(built, base, plain, overwrite=True, verify=False).manifest.recipe is not None


_FACTORIES = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.scale, self.reads = nn.Parameter(torch.rand(()) + 1), reads
        self.register_buffer("gain", torch.rand(()) + 1)

    def forward(self, x):
        scale = self.scale.item() if self.reads == "scale" else self.scale
        return x * scale * (self.gain.item() if self.reads == "gain" else self.gain)

class Net(nn.Module):
    def __init__(self, seed=1, reads="", stride=1, factor=1.0, offset=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.scale = nn.Conv1d(4, 4, 1, stride=stride), Scale(reads)
        self.factor, self.offset = factor, torch.tensor(offset)

    def forward(self, x):
        return self.scale(self.conv(x)) * self.factor + self.offset

def first(): return Net()
def second(): return Net(2)
def reading_scale(): return Net(reads="scale")
def reading_gain(): return Net(reads="gain")
def strided(): return Net(stride=2)
def scaled(): return Net(factor=2.0)
def shifted(): return Net(offset=1.0)
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script of factories ``net.py``, and the build ``built`` of its first."""
    folder = tmp_path_factory.mktemp("factories")
    (folder / "net.py").write_text(_FACTORIES)
    build_model(f"{folder}/net.py:first", folder / "built", refittable=True, input_specs=_SPECS, exporter="dynamo")
    return folder


_SPECS = {"x": {"shape": [2, 4, 4], "dtype": "float32"}}


def test_factory_brings_other_weights(factories: Path, tmp_path: Path) -> None:
    """A factory may return the other weights; dynamo's graph is refitted like any other."""
    result = refit_model(factories / "built", f"{factories}/net.py:second", tmp_path / "refitted")
    new = build_model(
        f"{factories}/net.py:second", tmp_path / "new", input_specs=_SPECS, exporter="dynamo", verify=False
    )
    assert result.model_path.read_bytes() == new.model_path.read_bytes()


def test_model_of_another_class_is_refused_by_the_class(bert: Path, factories: Path, tmp_path: Path) -> None:
    """Not by an option of the build that the other model does not support."""
    script = tmp_path / "other.py"
    script.write_text(
        "import torch\ndef load(): return torch.nn.Linear(4, 4)\n"
        "def example_inputs(): return {'input': torch.randn(2, 4)}\n"
    )
    with pytest.raises(CheckpointError, match="Bert"):
        refit_model(bert / "built", f"{script}:load", tmp_path / "out", verify=False)
    with pytest.raises(CheckpointError, match="Net, a class of Python code"):
        refit_model(factories / "built", bert / "tuned", tmp_path / "out", verify=False)


@pytest.mark.parametrize(("name", "named"), [("strided", "stride"), ("scaled", "factor"), ("shifted", "offset")])
def test_other_constants_of_factory_are_refused(name: str, named: str, factories: Path, tmp_path: Path) -> None:
    """Equal weights in a module with another number, or another constant tensor, make another graph."""
    with pytest.raises(CheckpointError, match=named):
        refit_model(factories / "built", f"{factories}/net.py:{name}", tmp_path / "out", verify=False)


@pytest.mark.parametrize("name", ["reading_scale", "reading_gain"])
def test_weight_read_as_number_is_refused(name: str, factories: Path, tmp_path: Path) -> None:
    """The build names the module that reads a parameter or buffer as a number."""
    with pytest.raises(UsageError, match="module scale: its forward reads a weight as a number"):
        build_model(f"{factories}/net.py:{name}", tmp_path / "read", refittable=True, input_specs=_SPECS)


def test_command_plans_and_refits(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run lists the graph and writes nothing; the remedy for an old build is a command that works."""
    monkeypatch.chdir(bert)
    out = str(tmp_path / "out")
    planned = run_here("refit", "built", "--weights", "tuned", "-o", out, "--dry-run", "-f", "json")
    assert planned.code == 0
    assert "export_refit.onnx" in planned.out
    assert not Path(out).exists()
    done = run_here("refit", "built", "--weights", "tuned", "-o", out, "-q")
    assert done.code == 0
    manifest = find_manifest(Path(out))
    assert manifest is not None
    assert manifest.recipe is not None
