"""Exports of large models: weights go from the checkpoint to the output through the disk, whole or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from checkpoints import TEXT
from e2e.workplace import WITH_A_LIMIT, Workplace

_POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="this system has no POSIX signals and limits to stop a process with"
)

_INTERRUPTED_WHILE_WRITING = """
import glob, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt_once_something_is_written():
    while not any(os.path.getsize(name) for name in glob.glob(".winml-partial-*/*/model.onnx*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt_once_something_is_written, daemon=True).start()
from winml.modelkit.cli.main import main
main()
"""


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT in bf16, in several shards, with embeddings, most of its 8 MB, that are also the output weights."""
    import torch

    from checkpoints import build_model

    folder = tmp_path_factory.mktemp("checkpoints") / "tied"
    # The number of positions is the exported one: the file holds no others.
    sizes = {"vocab_size": 120_000, "num_hidden_layers": 1, "max_position_embeddings": 8}
    model = build_model("bert", class_name="BertForMaskedLM", **sizes).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A Mixtral in float32."""
    from transformers import MixtralConfig, MixtralForCausalLM, set_seed

    set_seed(0)
    sizes = {**TEXT, "num_hidden_layers": 1, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


@pytest.fixture
def sharded(tied: Path, tmp_path: Path) -> Path:
    """A copy of the tied BERT, to be damaged."""
    return Path(shutil.copytree(tied, tmp_path / "sharded"))


def _export(folder: Path, *more: str) -> tuple[str, ...]:
    return ("-m", str(folder), "-o", "model.onnx", "--dynamo", "--shape-config", '{"sequence_length": 8}', *more)


def _weight_bytes(folder: Path) -> int:
    return int(json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"])


def test_export_without_weights_in_memory_is_verified(workplace: Workplace, tied: Path) -> None:
    """The weights of several shards are cast, and the file has the outputs of PyTorch with cast weights."""
    outcome = workplace.export(*_export(tied, "--dtype", "fp32", "--format", "json", "-q"))
    assert 0 == outcome.code, outcome.err
    result = json.loads(outcome.out)
    assert "dynamo" == result["exporter"]
    assert result["verification"]["is_verified"]
    proto = onnx.load(workplace.folder / "model.onnx")
    assert {onnx.TensorProto.FLOAT} == {t.data_type for t in proto.graph.initializer if len(t.dims) == 2}
    assert onnx.TensorProto.FLOAT == proto.graph.output[0].type.tensor_type.elem_type


def test_export_keeps_the_type_of_the_checkpoint_and_writes_tied_weights_once(workplace: Workplace, tied: Path) -> None:
    """The file has the weights of the checkpoint, and a graph."""
    outcome = workplace.export(*_export(tied, "--no-verify"))
    assert 0 == outcome.code, outcome.err
    proto = onnx.load(workplace.folder / "model.onnx")
    weights = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.BFLOAT16]
    assert 1 == sum(120_000 in t.dims for t in weights if len(t.dims) == 2)
    stored = _weight_bytes(tied)
    assert stored <= sum(len(t.raw_data) for t in weights) <= 1.01 * stored
    assert "are bfloat16" in outcome.out


def test_experts_are_exported_without_their_weights_in_memory(workplace: Workplace, experts: Path) -> None:
    """The kernel that multiplies all experts at once needs values, so an export uses another kernel."""
    outcome = workplace.export(*_export(experts, "--format", "json", "-q"))
    assert 0 == outcome.code, outcome.err
    assert "" == outcome.err
    result = json.loads(outcome.out)
    assert result["verification"]["is_verified"]
    assert ["Text generation was not compared: the number of tokens is fixed."] == result["notes"]


def test_bfloat16_is_verified_in_float32(workplace: Workplace, tied: Path) -> None:
    """Both sides compute in float32, and the file keeps its dtype.

    The CPU provider of ONNX Runtime cannot multiply bfloat16.
    """
    outcome = workplace.export(*_export(tied, "--format", "json", "-q"))
    assert 0 == outcome.code, outcome.err
    verification = json.loads(outcome.out)["verification"]
    assert verification["is_verified"]
    assert verification["in_float32"]
    proto = onnx.load(workplace.folder / "model.onnx")
    assert onnx.TensorProto.BFLOAT16 == proto.graph.output[0].type.tensor_type.elem_type


def test_bfloat16_parts_are_verified_separately(workplace: Workplace) -> None:
    """The parts are an encoder and its decoder; a note says that no text was generated."""
    import torch

    from checkpoints import build_model, one_layer

    build_model("t5", **one_layer("t5")).to(torch.bfloat16).save_pretrained(workplace.folder / "t5")
    outcome = workplace.export("-m", "t5", "-o", "out/model.onnx", "--format", "json", "-q")
    assert 0 == outcome.code, outcome.err
    parts = json.loads(outcome.out)["parts"]
    assert [True, True] == [part["verification"]["in_float32"] for part in parts]
    assert all(part["verification"]["is_verified"] for part in parts)
    assert any("No text was generated" in note for part in parts for note in part["notes"])


def test_export_with_weights_in_memory_casts_weights(workplace: Workplace, bert_tiny: Path) -> None:
    """The TorchScript exporter has the same option."""
    options = ("--no-dynamo", "--dtype", "fp16", "--no-verify", "-q", "--shape-config", '{"sequence_length": 8}')
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", *options)
    assert 0 == outcome.code, outcome.err
    proto = onnx.load(workplace.folder / "model.onnx")
    assert {onnx.TensorProto.FLOAT16} == {
        t.data_type for t in proto.graph.initializer if len(t.dims) == 2 and min(t.dims) > 1
    }


def test_dtype_of_a_factory_is_refused(workplace: Workplace, nets: Path) -> None:
    """The weights of a factory are cast by its author only."""
    words = ("--dtype fp16", "creates the weights")
    workplace.refuse("-m", f"{nets}:good", "-o", "model.onnx", "--dtype", "fp16", code=2, words=words)


def _remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def _falsify_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["bert.encoder.layer.7.made_up.weight"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))


def _truncate_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def _remove_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = folder / index["weight_map"].pop("bert.embeddings.LayerNorm.weight")
    tensors = load_file(shard)
    del tensors["bert.embeddings.LayerNorm.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    path.write_text(json.dumps(index))


def _convert_to_fp8(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shard = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if name.endswith("query.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, shard, metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "shard missing": (_remove_shard, ("index.json", "shards, 1 of them missing", "missing file with")),
    "index that lies": (_falsify_index, ("bert.encoder.layer.7.made_up.weight", "does not contain it")),
    "shard cut": (_truncate_shard, ("truncated", "ends at byte", "checkpoint again")),
    "tensor missing": (_remove_tensor, ("lacks 1 of the", "would be random", "bert.embeddings.LayerNorm.weight")),
    "fp8 with scales": (_convert_to_fp8, ("float8_e4m3fn", "with scales", "quantization_config")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_refused_in_one_sentence(workplace: Workplace, sharded: Path, damage: str) -> None:
    """The error comes before a trace and before a file is written."""
    spoil, words = DAMAGES[damage]
    spoil(sharded)
    workplace.refuse(*_export(sharded, "--no-verify"), code=1, words=(str(sharded), *words))


@_POSIX
def test_disk_filling_up_during_the_weights_changes_no_file(workplace: Workplace, tied: Path) -> None:
    """Some megabytes of the weights are written by then."""
    (workplace.folder / "model.onnx").write_bytes(b"earlier")
    limit = _weight_bytes(tied) // 2
    limited = replace(workplace, program=(sys.executable, "-c", WITH_A_LIMIT, str(limit)), is_warm=True)
    outcome = limited.refuse(
        *_export(tied, "--no-verify", "--overwrite"), code=1, words=("cannot write", str(Path("here") / "model.onnx"))
    )
    assert ".winml-partial" not in outcome.err


@_POSIX
def test_interruption_half_way_changes_no_file(workplace: Workplace, tied: Path) -> None:
    """Ctrl-C comes while the weights are written."""
    (workplace.folder / "model.onnx").write_bytes(b"earlier")
    interrupted = replace(workplace, program=(sys.executable, "-c", _INTERRUPTED_WHILE_WRITING), is_warm=True)
    outcome = interrupted.export(*_export(tied, "--dtype", "fp32", "--overwrite"))
    assert -signal.SIGINT == outcome.code, outcome.err
    assert outcome.err.endswith("interrupted: no file was changed\n")
    assert "Traceback" not in outcome.err
    assert {"model.onnx": b"earlier"} == workplace.files()
