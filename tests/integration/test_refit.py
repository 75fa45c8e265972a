"""Other weights in a build: the refitted folder equals a new build of the checkpoint."""

from __future__ import annotations

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
from winml.modelkit.builds.manifest_records import find_manifest
from winml.modelkit.errors import (
    CheckpointError,
    InputError,
    ModelPathError,
    OutputExistsError,
    UsageError,
    VerificationError,
)

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
    """A small BERT, its fine-tuned copy and its build: folders ``base``, ``tuned`` and ``built``."""
    folder = tmp_path_factory.mktemp("refit")
    save_checkpoint("bert", folder / "base")
    tuned(folder / "base", folder / "tuned")
    build_model(folder / "base", folder / "built", refittable=True)
    return folder


def test_refitted_build_equals_new_build_and_pytorch(bert: Path, tmp_path: Path) -> None:
    """Every graph and every weight is that of a new build; PyTorch has the same outputs."""
    result = refit_model(bert / "built", bert / "tuned", tmp_path / "refitted")
    build_model(bert / "tuned", tmp_path / "new", refittable=True)
    assert model_files(tmp_path / "refitted") == model_files(tmp_path / "new")
    assert "equals PyTorch" in result.manifest.stages[0].summary
    again = refit_model(tmp_path / "refitted" / "model.onnx", bert / "base", tmp_path / "again", verify=False)
    assert model_files(again.folder) == model_files(bert / "built")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("bert", {"precision": "int8", "mode": "dynamic"}),
        ("resnet", {"precision": "int8", "mode": "qdq"}),
        ("llama", {"precision": "int4"}),
        ("bert", {"exporter": "dynamo"}),
    ],
)
def test_recipe_runs_again_on_other_weights(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Folded, transposed, fused and quantized weights are computed again from the checkpoint."""
    base = save_checkpoint(architecture, tmp_path / "base", **one_layer(architecture))
    other = tuned(base, tmp_path / "tuned")
    options = {**options, "verify": False}
    build_model(base, tmp_path / "built", refittable=True, **options)
    refit_model(tmp_path / "built", other, tmp_path / "refitted")
    build_model(other, tmp_path / "new", refittable=True, **options)
    assert model_files(tmp_path / "refitted") == model_files(tmp_path / "new")


def test_codes_of_quantized_checkpoint_are_refitted(tmp_path: Path) -> None:
    """Codes and scales of a GPTQ checkpoint come from the other checkpoint; a float checkpoint does not fit."""
    base = save_gptq(tmp_path)
    other = tuned(base.folder, tmp_path / "tuned")
    build_model(base.folder, tmp_path / "built", refittable=True)
    refit_model(tmp_path / "built", other, tmp_path / "refitted")
    build_model(other, tmp_path / "new", refittable=True)
    assert model_files(tmp_path / "refitted") == model_files(tmp_path / "new")
    with pytest.raises(CheckpointError, match="float, not gptq"):
        refit_model(tmp_path / "built", base.reference, tmp_path / "float")


@pytest.mark.slow
def test_parts_are_refitted_together(tmp_path: Path) -> None:
    """Encoder and decoder of one checkpoint get its weights."""
    base = save_encoder_decoder(tmp_path / "base", "t5", num_layers=1)
    other = tuned(base, tmp_path / "tuned")
    build_model(base, tmp_path / "built", refittable=True, verify=False)
    refit_model(tmp_path / "built", other, tmp_path / "refitted")
    build_model(other, tmp_path / "new", refittable=True, verify=False)
    assert model_files(tmp_path / "refitted") == model_files(tmp_path / "new")


def test_adapter_is_merged_into_refitted_weights(bert: Path, tmp_path: Path) -> None:
    """A LoRA adapter gives the file of a build with the adapter; a refit without one leaves it out."""
    lora = save_adapter(tmp_path / "lora", small_model("bert"), ("query", "value"), seed=3)
    adapted = refit_model(bert / "built", bert / "base", tmp_path / "adapted", adapter=(str(lora),))
    build_model(bert / "base", tmp_path / "new", refittable=True, adapter=(str(lora),), verify=False)
    files, new_files = model_files(adapted.folder), model_files(tmp_path / "new")
    # The stored trace says which weights are trained; PEFT's are not.
    assert {name: files[name] for name in files if "refit" not in name} == {
        name: new_files[name] for name in new_files if "refit" not in name
    }
    plain = refit_model(adapted.folder, bert / "base", tmp_path / "plain", verify=False)
    assert any("adapters" in note for note in plain.notes)
    assert model_files(plain.folder) == model_files(bert / "built")


def test_stored_graph_has_no_weights(bert: Path) -> None:
    """The graph beside the export is a valid ONNX model whose weights are inputs, not values."""
    model = onnx.load(bert / "built" / "export_refit.onnx")
    sizes = [numpy_helper.to_array(tensor).size for tensor in model.graph.initializer]
    parameters = sum(parameter.numel() for parameter in AutoModel.from_pretrained(bert / "base").parameters())
    assert {"input_ids", "embeddings.word_embeddings.weight"} <= {value.name for value in model.graph.input}
    assert sum(sizes) < parameters / 100


def test_proof_of_refitted_build_is_made_anew(bert: Path, tmp_path: Path) -> None:
    """A proof records the other weights if it is requested; the proof of the build is left out with a note."""
    proven = refit_model(bert / "built", bert / "tuned", tmp_path / "proven", proof=True)
    assert proven.manifest.proof is not None
    dropped = refit_model(proven.folder, bert / "base", tmp_path / "dropped", verify=False)
    assert dropped.manifest.proof is None
    assert any("proof" in note for note in dropped.notes)


def test_build_after_refit_traces_the_model(bert: Path, tmp_path: Path) -> None:
    """The folder of a refit is a build folder; winml build makes its own graph there."""
    refitted = refit_model(bert / "built", bert / "tuned", tmp_path / "refitted", verify=False)
    built = build_model(bert / "tuned", refitted.folder, refittable=True, verify=False)
    assert built.manifest.stages[0].status == "run"
    assert "refitted" in built.manifest.stages[0].reason


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


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("bert", {"hidden_size": 64}, "hidden_size"),
        ("bert", {"hidden_act": "relu"}, "hidden_act"),
        ("gpt2", {}, "GPT2LMHeadModel"),
    ],
)
def test_other_architecture_is_refused(
    architecture: str, changes: Mapping[str, Any], named: str, bert: Path, tmp_path: Path
) -> None:
    """The refusal names the class, or the config key, also where every tensor fits."""
    other = save_checkpoint(architecture, tmp_path / "other", **changes)
    with pytest.raises(CheckpointError, match=named):
        refit_model(bert / "built", other, tmp_path / "out")


def test_training_keys_of_config_may_differ(bert: Path, tmp_path: Path) -> None:
    """Dropout and labels change no graph."""
    options = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2, "initializer_range": 0.5}
    other = save_checkpoint("bert", tmp_path / "other", seed=5, **options)
    assert refit_model(bert / "built", other, tmp_path / "out").manifest.status == "done"


def test_unusable_requests_are_refused(bert: Path, tmp_path: Path) -> None:
    """A build without a graph, a used folder, an ONNX file as weights, a damaged graph: each before any work."""
    built, base, out = bert / "built", bert / "tuned", tmp_path / "out"
    plain = build_model(bert / "base", tmp_path / "plain", verify=False).folder
    with pytest.raises(UsageError) as refusal:
        refit_model(plain, base, out)
    assert "refittable" in refusal.value.hint
    with pytest.raises(OutputExistsError):
        refit_model(built, base, plain)
    with pytest.raises(UsageError):
        refit_model(built, base, built, overwrite=True)
    with pytest.raises(UsageError, match="ONNX file"):
        refit_model(built, built / "model.onnx", out)
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

    def forward(self, x):
        return x * (self.scale.item() if self.reads else self.scale)

class Net(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), Scale(reads)

    def forward(self, x):
        return self.scale(self.linear(x))

def first():
    torch.manual_seed(1)
    return Net()

def second():
    torch.manual_seed(2)
    return Net()

def reading():
    return Net(reads=True)
"""


def test_weights_of_factory_and_weight_read_as_number(tmp_path: Path) -> None:
    """A factory may return the other weights; a module that reads a weight as a number is named by the build."""
    (tmp_path / "net.py").write_text(_FACTORIES)
    specs = {"x": {"shape": [2, 4], "dtype": "float32"}}
    build_model(f"{tmp_path}/net.py:first", tmp_path / "built", refittable=True, input_specs=specs)
    refit_model(tmp_path / "built", f"{tmp_path}/net.py:second", tmp_path / "refitted")
    stored = onnx.load(tmp_path / "refitted" / "export.onnx").graph.initializer
    torch.manual_seed(2)
    expected = torch.nn.Linear(4, 4).weight.detach().numpy()
    assert any(np.array_equal(numpy_helper.to_array(tensor), expected.T) for tensor in stored) or any(
        np.array_equal(numpy_helper.to_array(tensor), expected) for tensor in stored
    )
    with pytest.raises(UsageError, match="reads a weight as a number"):
        build_model(f"{tmp_path}/net.py:reading", tmp_path / "read", refittable=True, input_specs=specs)


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
