"""Loading of a model from every kind of source."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints import CONFIGS, save_checkpoint
from winml.modelkit.errors import (
    CheckpointError,
    ModelPathError,
    RemoteCodeError,
    TaskError,
    UsageError,
    WinMLError,
)
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.model import load_model
from winml.modelkit.models.parts import LoadedModel, ModelInfo
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds

OWN_CODE = """
from transformers import BertConfig, BertModel

class MyConfig(BertConfig):
    model_type = "my_type"

class MyModel(BertModel):
    config_class = MyConfig
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BERT with the head of its training."""
    return save_checkpoint("bert", tmp_path_factory.mktemp("saved") / "bert-mlm", class_name="BertForMaskedLM")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "bert-copy"))


@pytest.fixture(autouse=True)
def _no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test at every network access, even if the caller catches OSError."""

    def refuse(*address: Any, **others: Any) -> None:
        pytest.fail(f"the network was asked for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _load(model: Path | str, **others: Any) -> LoadedModel:
    return load_model(ModelRequest(str(model), **others))


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


def _run(loaded: LoadedModel) -> Any:
    part = loaded.only_part
    feeds = make_feeds(part.inputs, 0, sizes=part.trace_sizes)
    tensors = {name: torch.from_numpy(values) for name, values in feeds.items()}
    arguments = tensors if part.arguments is None else part.arguments.build(tensors)
    with torch.no_grad():
        return loaded.model(**arguments, **part.forward_kwargs)


def _refused(error: type[WinMLError], model: Path | str, **others: Any) -> str:
    with pytest.raises(error) as caught:
        _load(model, **others)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return str(caught.value)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_load_folder_gives_the_saved_model(architecture: str, tmp_path: Path) -> None:
    """Class, weights and inputs are those of the checkpoint; the network is not touched."""
    class_name, _ = CONFIGS[architecture]
    folder = save_checkpoint(architecture, tmp_path / architecture)
    loaded = _load(folder, cache=False)
    expected = getattr(transformers, class_name).from_pretrained(folder)
    assert class_name == loaded.info.class_name == type(loaded.model).__name__
    assert (str(folder), "folder", "transformers") == (
        loaded.info.name_or_path,
        loaded.info.source_kind,
        loaded.info.library,
    )
    assert f"from the architecture {class_name}" in (loaded.info.task_rule or "")
    assert not loaded.model.training
    weights = loaded.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in expected.state_dict().items())
    assert torch.isfinite(_run(loaded)[0]).all()


def test_load_real_weights(minilm_folder: Path) -> None:
    """The output for fixed values equals the output of transformers."""
    loaded = _load(minilm_folder, task="sentence-similarity", shape_config=ShapeConfig(sequence_length=16))
    assert ("BertModel", "feature-extraction", ()) == (loaded.info.class_name, loaded.info.task, loaded.notes)
    assert ["input_ids", "attention_mask", "token_type_ids"] == [spec.name for spec in loaded.only_part.inputs]
    assert (1, 16, 384) == tuple(_run(loaded).last_hidden_state.shape)


def test_load_task_of_the_base_model_drops_the_head_with_a_note(saved: Path) -> None:
    """The pooler was never trained with this head; a note warns of the pooled output."""
    loaded = _load(saved, task="feature-extraction")
    assert "BertModel" == loaded.info.class_name
    assert any("pooled output" in note for note in loaded.notes)
    assert any("cls." in note for note in loaded.notes)


def test_weights_missing_in_the_checkpoint_follow_the_seed(saved: Path) -> None:
    """Two exports are equal for the same seed, and so are the weights of a comparison."""
    before = torch.random.get_rng_state()
    first, again, other = (_load(saved, task="feature-extraction", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    poolers = [loaded.model.get_parameter("pooler.dense.weight") for loaded in (first, again, other)]
    assert torch.equal(poolers[0], poolers[1])
    assert not torch.equal(poolers[0], poolers[2])
    assert any("seed 1" in note for note in other.notes)


def test_load_task_with_an_untrained_head_is_refused(saved: Path) -> None:
    """Random outputs are not worth a file, unless --random-weights asks for them."""
    words = _refused(CheckpointError, saved, task="text-classification")
    assert "lacks 2" in words
    assert "classifier.bias, classifier.weight" in words
    assert "BertForMaskedLM" in words
    assert (
        "BertForSequenceClassification" == _load(saved, task="text-classification", random_weights=True).info.class_name
    )


def test_load_task_unknown_or_lacking_is_refused(saved: Path) -> None:
    """Both errors list the candidates."""
    assert "'fill-mask'" in _refused(TaskError, saved, task="fill-maks")
    assert "token-classification" in _refused(TaskError, saved, task="image-classification")


def test_load_random_weights_from_config_is_seeded(folder: Path) -> None:
    """A config is enough; the seed decides; the outputs are marked as meaningless."""
    config = folder / "config.json"
    (folder / "model.safetensors").unlink()
    _refused(UsageError, config)
    assert "--random-weights" in _refused(ModelPathError, folder)
    first, again, other = (_load(config, random_weights=True, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(_run(first).logits, _run(again).logits)
    assert not torch.equal(_run(first).logits, _run(other).logits)
    assert ("config", True) == (first.info.source_kind, first.info.random_weights)
    assert any("random" in note for note in first.notes)


def test_load_random_cnn_carries_signal(tmp_path: Path) -> None:
    """A deep network with fresh batch norms would give equal outputs for all inputs."""
    transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=64).save_pretrained(tmp_path)
    loaded = _load(tmp_path, random_weights=True)
    assert float(_run(loaded).last_hidden_state.std()) > 0.1


def test_load_pickle_of_tensors_equals_safetensors(folder: Path) -> None:
    """Old checkpoints are read, with weights_only."""
    expected = _load(folder)
    torch.save(expected.model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(_run(expected).logits, _run(_load(folder)).logits)


class _Touch:
    """An object with a pickle that runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("raw", [False, True], ids=["torch.save", "pickle"])
def test_load_pickle_with_code_is_refused_and_not_run(folder: Path, raw: bool) -> None:
    """Code in a pickle is never executed."""
    (folder / "model.safetensors").unlink()
    path, trap = folder / "pytorch_model.bin", folder / "trap"
    if raw:
        path.write_bytes(pickle.dumps({"weight": _Touch(trap)}))
    else:
        torch.save({"weight": _Touch(trap)}, path)
    words = _refused(CheckpointError, folder)
    assert "run code" in words
    assert str(path) in words
    assert not trap.exists()


@pytest.mark.parametrize("damage", ["half", "garbage"])
def test_load_damaged_pickle_is_refused(folder: Path, damage: str) -> None:
    """The message has the path of the truncated or replaced file."""
    path = folder / "pytorch_model.bin"
    torch.save(_load(folder).model.state_dict(), path)
    (folder / "model.safetensors").unlink()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "half" else b"garbage")
    assert str(path) in _refused(CheckpointError, folder)


def test_load_sharded_checkpoint_needs_every_shard(folder: Path) -> None:
    """All shards together are the model; a missing one is named."""
    expected = _load(folder)
    (folder / "model.safetensors").unlink()
    expected.model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    assert torch.equal(_run(expected).logits, _run(_load(folder)).logits)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in _refused(CheckpointError, folder)


def test_load_weights_of_other_shape_name_file_and_tensor(folder: Path) -> None:
    """The message has the file, the tensor and both shapes."""
    _edit(folder, intermediate_size=96)
    words = _refused(CheckpointError, folder)
    assert str(folder / "model.safetensors") in words
    assert "intermediate.dense" in words
    assert "[48]" in words
    assert "[96]" in words


def _store(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the stored tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_load_incomplete_checkpoint_is_reported_as_such(folder: Path) -> None:
    """Another task cannot help if the class is the saved one; otherwise the message gives both reasons."""
    lost = [f"bert.encoder.layer.0.{part}.dense.weight" for part in ("intermediate", "output")]

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in lost:
            del tensors[name]

    _store(folder, drop)
    words = _refused(CheckpointError, folder)
    assert "lacks 2" in words
    assert ", ".join(lost) in words
    assert "saved from BertForMaskedLM" in words
    assert "--task" not in words
    words = _refused(CheckpointError, folder, task="feature-extraction")
    assert "BertForMaskedLM: choose" in words


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_load_weights_stored_too_small_are_cast_and_noted(dtype: torch.dtype, folder: Path) -> None:
    """A weight stored without its scale is used unchanged, and a note warns the user."""
    name = "bert.embeddings.word_embeddings.weight"
    _store(folder, lambda tensors: tensors.update({name: (tensors[name] * 100).to(dtype)}))
    stored = load_file(folder / "model.safetensors")[name]
    loaded = _load(folder)
    weight = loaded.model.get_parameter(name)
    assert torch.equal(stored.to(weight.dtype), weight)
    shown = str(dtype).removeprefix("torch.")
    assert [f"1 tensor is stored as {shown} and cast without a scale, so 100 stays 100: {name}"] == [
        note for note in loaded.notes if "stored as" in note
    ]


def test_load_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    """Weights under other names leave everything random."""
    other = save_checkpoint("vit", tmp_path / "vit")
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert "lacks" in _refused(CheckpointError, folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "bert",\n "hidden_size": }', "line 2, column 17"),
        ("[]", "JSON object"),
        ('{"model_type": "bertt"}', "model_type 'bertt'"),
        ('{"model_type": "bertt"}', "'bert'"),
        ('{"model_type": 3}', "model_type 3 is unknown"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "bert", "hidden_size": 33}', "33"),
    ],
)
def test_load_config_that_cannot_be_read_is_refused(folder: Path, text: str, words: str) -> None:
    """Each fault of a config gives one sentence with the file."""
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert words in _refused(CheckpointError, folder, random_weights=True)


def test_load_config_without_model_type_is_reported_by_name(folder: Path, tmp_path: Path) -> None:
    """Old checkpoints are named after their type; a note names the type used."""
    _edit(folder, model_type=None, architectures=None)
    loaded = _load(folder, task="fill-mask")
    assert any("'bert' is assumed" in note for note in loaded.notes)
    nameless = folder.rename(tmp_path / "unnamed")
    assert "has no model_type" in _refused(CheckpointError, nameless)
    # As a tokenizer.json looks: no config, whatever numbers are in it.
    (nameless / "config.json").write_text('{"vocab": {"depths": 11143}}', encoding="utf-8")
    assert "has no model_type" in _refused(CheckpointError, nameless)


def test_load_own_code_is_refused_then_run_and_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the checkpoint runs only if allowed, and a note announces the run."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    (folder / "my_code.py").write_text(OWN_CODE + f"\nopen({str(folder / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    auto_map = {"AutoConfig": "my_code.MyConfig", "AutoModel": "my_code.MyModel"}
    _edit(folder, model_type="my_type", architectures=["MyModel"], auto_map=auto_map)
    words = _refused(RemoteCodeError, folder)
    assert "my_code.MyConfig, my_code.MyModel" in words
    assert "--trust-remote-code" in words
    assert not (folder / "ran").exists()
    loaded = _load(folder, trust_remote_code=True)
    assert ("MyModel", "feature-extraction") == (loaded.info.class_name, loaded.info.task)
    assert any("running code" in note for note in loaded.notes)
    assert "MyModel" == _load(folder, trust_remote_code=True, random_weights=True).info.class_name
    _edit(folder, auto_map={**auto_map, "AutoModel": "owner/name--my_code.MyModel"})
    assert "another repository" in _refused(RemoteCodeError, folder, trust_remote_code=True)
    _edit(folder, auto_map={**auto_map, "AutoModel": "no_code.MyModel"})
    assert "be imported" in _refused(RemoteCodeError, folder, trust_remote_code=True)


def test_load_own_code_that_transformers_has_too_is_not_run(folder: Path) -> None:
    """The code that comes with such a checkpoint is not needed."""
    _edit(folder, auto_map={"AutoModelForMaskedLM": "my_code.BertForMaskedLM"})
    loaded = _load(folder)
    assert any("not run" in note for note in loaded.notes)


def test_load_manifest_overrides_options_with_a_note(saved: Path) -> None:
    """A note names the options that --input-specs overrides."""
    specs = (InputTensorSpec(name="input_ids", shape=(2, 5), dtype="int64", value_range=(0, 9)),)
    loaded = _load(saved, input_specs=specs, shape_config=ShapeConfig(height=3), batch_size=7)
    assert specs == loaded.only_part.inputs
    assert any("--shape-config and --batch-size" in note for note in loaded.notes)
    assert (2, 5, 120) == tuple(_run(loaded).logits.shape)
    wrong = (InputTensorSpec(name="input_idz", shape=(2, 5), dtype="int64"),)
    assert "'input_ids'" in _refused(UsageError, saved, input_specs=wrong)


def test_load_keeps_and_reports_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    """Half-precision weights stay in half precision, and the inputs have the same type."""
    folder = save_checkpoint("vit", tmp_path / "vit")
    model = transformers.ViTForImageClassification.from_pretrained(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    loaded = _load(folder)
    assert ("bfloat16", torch.bfloat16) == (loaded.only_part.inputs[0].dtype, next(loaded.model.parameters()).dtype)
    assert any("bfloat16" in note for note in loaded.notes)
    assert "bfloat16" == _load(folder, random_weights=True).only_part.inputs[0].dtype


def test_load_returns_no_cache_and_named_outputs(tmp_path: Path) -> None:
    """The outputs have names and, without a requested cache, no cache, even if the config enables one."""
    folder = save_checkpoint("gpt2", tmp_path / "gpt2")
    _edit(folder, use_cache=True, return_dict=False)
    outputs = _run(_load(folder, cache=False))
    assert ["logits"] == list(outputs.keys())


def test_load_reports_progress_and_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Progress goes to the callback; neither we nor the libraries write to the terminal."""
    told: list[str] = []
    level = transformers.utils.logging.get_verbosity()
    load_model(ModelRequest(str(saved), task="feature-extraction"), told.append)
    assert ["reading the config", "loading BertModel"] == told
    assert ("", "") == tuple(capfd.readouterr())
    assert level == transformers.utils.logging.get_verbosity()


def test_load_emits_no_warnings(saved: Path) -> None:
    """Messages for the user are in the notes, not in warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _load(saved)
    assert [] == caught


def test_model_info_record_omits_unknown_fields() -> None:
    """Unknown fields are omitted from the metadata entry."""
    info = ModelInfo("folder", "BertModel", "transformers", "5.0", task="fill-mask", random_weights=True)
    assert {
        "name_or_path": "folder",
        "class": "BertModel",
        "task": "fill-mask",
        "library": "transformers",
        "library_version": "5.0",
        "random_weights": True,
    } == info.as_record()
