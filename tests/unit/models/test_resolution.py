"""Decisions and refusals before weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import save_checkpoint
from winml.modelkit.errors import CheckpointError, RemoteCodeError, TaskError, UsageError
from winml.modelkit.models.checkpoints.weight_files import StoredSize, stored_sizes
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_checkpoint, resolve_model

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A small checkpoint folder."""
    return save_checkpoint("bert", tmp_path / "bert")


def test_resolve_model_takes_no_storage_and_no_weights(bert: Path) -> None:
    """Parameters are on the meta device, in evaluation mode, and no weight file is needed."""
    (bert / "model.safetensors").unlink()
    resolved = resolve_model(ModelRequest(str(bert)))
    assert {"meta"} == {parameter.device.type for parameter in resolved.model.parameters()}
    assert not resolved.model.training
    assert torch.float32 is resolved.dtype


def test_resolve_model_that_will_be_loaded_needs_its_weights(bert: Path) -> None:
    """The same folder is refused if the weights are needed."""
    (bert / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        resolve_model(ModelRequest(str(bert)), needs_weights=True)


def test_resolve_model_without_a_dtype_notes_the_default(bert: Path) -> None:
    """A note says that float32 is assumed if neither config nor weights declare a type."""
    (bert / "model.safetensors").unlink()
    content = json.loads((bert / "config.json").read_text(encoding="utf-8"))
    content.pop("dtype")
    (bert / "config.json").write_text(json.dumps(content), encoding="utf-8")
    resolved = resolve_model(ModelRequest(str(bert)))
    assert None is resolved.dtype
    assert any("float32 is assumed" in note for note in resolved.notes)


def test_resolve_model_unknown_task_lists_the_supported_tasks(bert: Path) -> None:
    """A task of another kind is refused before anything is built."""
    with pytest.raises(TaskError, match="image-classification"):
        resolve_model(ModelRequest(str(bert), task="image-classification"))


def test_resolve_model_config_refused_by_the_class_is_reported(bert: Path) -> None:
    """The refusal names the class of the model."""
    content = json.loads((bert / "config.json").read_text(encoding="utf-8"))
    (bert / "config.json").write_text(json.dumps({**content, "hidden_size": 33}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="BertModel cannot"):
        resolve_model(ModelRequest(str(bert)))


@pytest.mark.parametrize("resolve", [resolve_model, resolve_checkpoint])
def test_resolve_own_code_is_not_run_without_the_flag(resolve: object, tmp_path: Path) -> None:
    """Neither function executes the code without the flag."""
    (tmp_path / "config.json").write_text(json.dumps(OWN_CODE), encoding="utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit('run')", encoding="utf-8")
    with pytest.raises(RemoteCodeError, match="custom code"):
        resolve(ModelRequest(str(tmp_path)))  # type: ignore[operator]


def test_resolve_checkpoint_of_a_factory_is_empty(tmp_path: Path) -> None:
    """A factory has no config, and is not called to find that out."""
    (tmp_path / "net.py").write_text("def build():\n    raise RuntimeError\n", encoding="utf-8")
    assert None is resolve_checkpoint(ModelRequest(f"{tmp_path / 'net.py'}:build"))


def test_stored_sizes_equal_the_headers(bert: Path) -> None:
    """Counts and bytes per dtype agree with the tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(bert / "model.safetensors")
    first = next(iter(sorted(tensors)))
    save_file({**tensors, first: tensors[first].to(torch.bfloat16)}, bert / "model.safetensors")
    count = tensors[first].numel()
    others = sum(value.numel() for value in tensors.values()) - count
    expected = {StoredSize("bfloat16", count, 2 * count), StoredSize("float32", others, 4 * others)}
    assert expected == set(stored_sizes([bert / "model.safetensors"]))
