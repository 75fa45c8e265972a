"""Binding of models built without weights to the tensors that from_pretrained would load."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from onnx_ir import tensor_adapters
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor

from checkpoints import CONFIGS, FAMILIES, TEXT, build_model, make_distinct
from winml.modelkit.errors import CheckpointError
from winml.modelkit.export.loading import load_weightless
from winml.modelkit.models.model import load_model
from winml.modelkit.models.parts import LoadedModel
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model
from winml.modelkit.onnx.files.stored_tensors import StoredTensor

_EXPERTS: Mapping[str, Any] = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4}
MERGED = {
    "mixtral": ("MixtralForCausalLM", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeForCausalLM",
                  {**_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}),
}  # fmt: skip
"""Architectures with separate experts in the checkpoint and merged experts in the model."""


def _save(architecture: str, folder: Path, **options: Any) -> Path:
    if architecture in MERGED:
        class_name, sizes = MERGED[architecture]
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**sizes))
        make_distinct(model)
    else:
        model = build_model(architecture)
    model.save_pretrained(folder, max_shard_size="40KB", **options)
    return folder


def _load(folder: Path, **wishes: Any) -> LoadedModel:
    request = ModelRequest(str(folder), **wishes)
    return load_weightless(resolve_model(request, needs_weights=True), request)


def _values(tensor: ir.TensorProtocol) -> torch.Tensor:
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    data = bytearray(np.ascontiguousarray(tensor.numpy()).tobytes())
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape.numpy())


def _ties(tensors: Mapping[str, Any]) -> set[frozenset[str]]:
    return {frozenset(name for name, other in tensors.items() if other is tensor) for tensor in tensors.values()}


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, None) for architecture in (*CONFIGS, *MERGED)),
        *((architecture, "bf16") for architecture in (*FAMILIES, *MERGED)),
        *((architecture, "fp16") for architecture in ("bert", "resnet", "mixtral")),
    ],
)
def test_weightless_model_is_bound_to_the_weights_of_from_pretrained(
    tmp_path: Path, architecture: str, dtype: str | None
) -> None:
    """Names, values, types, ties, buffers: all of the state dict, over several shards, cast or not."""
    folder = _save(architecture, tmp_path / "checkpoint")
    loaded = _load(folder, dtype=dtype)
    real = load_model(ModelRequest(str(folder), dtype=dtype)).model  # type: ignore[arg-type]  # a str here
    assert loaded.parts[0].stored is not None, loaded.notes
    expected, actual = (model.state_dict(keep_vars=True) for model in (real, loaded.model))
    assert list(expected) == list(actual) == list(loaded.parts[0].stored)
    for name, tensor in expected.items():
        bound = _values(loaded.parts[0].stored[name])
        assert (tensor.dtype, tensor.shape) == (bound.dtype, bound.shape) == (actual[name].dtype, actual[name].shape)
        assert torch.equal(tensor.detach(), bound), name
    assert _ties(expected) == _ties(actual) == _ties(loaded.parts[0].stored)
    assert all(isinstance(parameter, FakeTensor) for parameter in loaded.model.parameters())
    assert not loaded.model.training
    for (name, buffer), (other, kept) in zip(real.named_buffers(), loaded.model.named_buffers(), strict=True):
        assert (name, type(buffer)) == (other, type(kept))
        assert torch.equal(buffer, kept)


def test_weightless_model_reads_no_weight(tmp_path: Path) -> None:
    """The memory Python and numpy take while it is built is less than its largest tensor."""
    build_model("bert", vocab_size=200_000, hidden_size=64).save_pretrained(tmp_path / "checkpoint")
    loaded = _load(tmp_path / "checkpoint")
    assert loaded.parts[0].stored is not None
    assert {StoredTensor} == {type(tensor) for tensor in loaded.parts[0].stored.values()}
    largest = max(tensor.nbytes for tensor in loaded.parts[0].stored.values())
    tracemalloc.start()
    _load(tmp_path / "checkpoint", dtype="fp16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < largest / 4


def test_weightless_model_loads_its_weights_on_request(tmp_path: Path) -> None:
    """The model for verification equals the one of load_model and is called in the same manner."""
    folder = _save("llama", tmp_path / "checkpoint")
    loaded, real = _load(folder, dtype="bf16"), load_model(ModelRequest(str(folder), dtype="bf16"))
    assert (real.parts[0].inputs, real.info, real.notes) == (loaded.parts[0].inputs, loaded.info, loaded.notes)
    assert loaded.parts[0].with_weights is not None
    ids = torch.arange(6)[None]
    with torch.no_grad():
        answers = [model(input_ids=ids).logits for model in (real.model, loaded.parts[0].with_weights())]
    assert torch.equal(*answers)
    assert torch.bfloat16 == answers[0].dtype


def test_weightless_model_keeps_float32_parameters_of_the_class(tmp_path: Path) -> None:
    """T5 overflows in float16, and says so itself; integers are never cast."""
    stored = _load(_save("t5", tmp_path / "checkpoint"), dtype="fp16").parts[0].stored
    assert stored is not None
    assert {ir.DataType.FLOAT16, ir.DataType.FLOAT} == {tensor.dtype for tensor in stored.values()}
    assert all(".wo." in name for name, tensor in stored.items() if tensor.dtype == ir.DataType.FLOAT)
    norms = _load(_save("resnet", tmp_path / "resnet"), dtype="fp16").parts[0].stored
    assert norms is not None
    counts = {tensor.dtype for name, tensor in norms.items() if name.endswith("num_batches_tracked")}
    assert {ir.DataType.INT64} == counts


def test_weightless_model_of_old_names_is_bound_too(tmp_path: Path) -> None:
    """Checkpoints from before 2020 say gamma and beta, and lack the prefix of the head they are loaded with."""
    model = build_model("bert", class_name="BertForMaskedLM")
    model.save_pretrained(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(old, file, metadata={"format": "pt"})
    stored = _load(tmp_path / "checkpoint").parts[0].stored
    assert stored is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, _values(stored[name])), name


@pytest.mark.parametrize("request_of", ["pickle", "random"])
def test_weightless_model_without_files_to_refer_to_is_loaded_for_real(tmp_path: Path, request_of: str) -> None:
    """Pickles cannot be pointed into, random weights are nowhere."""
    folder = _save("bert", tmp_path / "checkpoint")
    if request_of == "pickle":
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for file in folder.glob("model*"):
            file.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    loaded = _load(folder, random_weights=request_of == "random")
    assert (None, None) == (loaded.parts[0].stored, loaded.parts[0].with_weights)
    assert not any(isinstance(parameter, FakeTensor) for parameter in loaded.model.parameters())


@pytest.mark.parametrize("damage", ["missing", "mismatched", "leftover", "scales"])
def test_weightless_model_has_the_messages_of_real_loading(tmp_path: Path, damage: str) -> None:
    """The same errors, word for word, and the same notes."""
    build_model("llama").save_pretrained(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "mismatched":
        tensors[name] = torch.zeros(3, 3)
    elif damage == "leftover":
        tensors["stray"] = torch.zeros(3)
    else:
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].to(torch.float8_e4m3fn), torch.ones(1)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "leftover":
        notes = _load(tmp_path / "checkpoint").notes
        assert load_model(ModelRequest(str(tmp_path / "checkpoint"))).notes == notes
        assert any("stray" in note for note in notes)
        return
    told = []
    for load in (_load, lambda folder: load_model(ModelRequest(str(folder)))):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "checkpoint")
        told.append((caught.value.message, caught.value.hint))
    assert told[0] == told[1]
    assert name in told[0][0]


def test_weightless_model_with_value_dependent_loading_is_loaded(tmp_path: Path) -> None:
    """Code of the checkpoint may write into loaded weights, so weights are held in memory, and a note says so."""
    folder = _save("bert", tmp_path / "checkpoint")
    shutil.copy(Path(__file__).with_name("writing_model.py"), folder / "writing_model.py")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "writing", "architectures": ["WritingModel"],
               "auto_map": {"AutoConfig": "writing_model.WritingConfig",
                            "AutoModel": "writing_model.WritingModel"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    loaded = _load(folder, trust_remote_code=True)
    assert loaded.parts[0].stored is None
    assert any("memory" in note for note in loaded.notes)
    assert 0 == loaded.model.get_parameter("pooler.dense.bias").abs().sum()
