"""Detection of damaged weight files before a library opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.checkpoints.weight_files import (
    check_index,
    check_safetensors,
    find_weights,
    stored_entries,
)

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _write(path: Path, header: Any, data_bytes: int = 24) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_safetensors_whole_file_passes_with_shapes(tmp_path: Path) -> None:
    """Shapes come from the header; the metadata entry is no tensor."""
    path = _write(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "a.weight": ENTRY})
    check_safetensors(path)
    assert {"a.weight": (2, 3)} == {name: entry.shape for name, entry in stored_entries([path]).items()}


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        ({"w": ENTRY}, 23, "'w'"),
        ({"w": {**ENTRY, "shape": [2, 4]}}, 24, "[2, 4]"),
        ({"w": {**ENTRY, "data_offsets": [24, 0]}}, 24, "tensor 'w'"),
        ({"w": {"dtype": "F32"}}, 24, "malformed"),
        ({"w": {**ENTRY, "shape": ["2"]}}, 24, "malformed"),
        ([], 0, "malformed"),
        (b"{not json", 0, "malformed"),
        (b"\xff\xfe", 0, "malformed"),
    ],
)
def test_safetensors_damaged_names_file_and_tensor(tmp_path: Path, header: Any, data_bytes: int, words: str) -> None:
    """Each kind of damage gives one sentence with the file."""
    path = _write(tmp_path / "model.safetensors", header, data_bytes)
    with pytest.raises(CheckpointError) as caught:
        check_safetensors(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"\x01\x02\x03", b"\xff" * 8, (99).to_bytes(8, "little") + b"{}"])
def test_safetensors_smaller_than_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file cut inside the header is not parsed at all."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="header"):
        check_safetensors(path)


def test_find_weights_prefers_safetensors(tmp_path: Path) -> None:
    """Safetensors files cannot contain code."""
    assert find_weights(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickle" == getattr(find_weights(tmp_path), "format", None)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "safetensors" == getattr(find_weights(tmp_path), "format", None)


def test_find_weights_index_without_entries_is_refused(tmp_path: Path) -> None:
    """An index that names no file is damaged."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}', encoding="utf-8")
    for look in (find_weights, check_index):
        with pytest.raises(CheckpointError, match="weight_map"):
            look(tmp_path)


def test_find_weights_sharded_lists_each_file_once(tmp_path: Path) -> None:
    """The index maps many tensors to few files."""
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(b"")
    found = find_weights(tmp_path)
    assert found is not None
    assert ["model-1.safetensors", "model-2.safetensors"] == [file.name for file in found.files]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "model-1.safetensors"}}', "1 of them missing: model-1.safetensors"),
        ('{"weight_map": {}', "line 1, column"),
        ('{"weights": {}}', "no weight_map"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "'a': names '../model.safetensors'"),
        ('{"weight_map": {"a": "sub/../../model.safetensors"}}', "leads out"),
        ('{"weight_map": {"a": "/elsewhere/model.safetensors"}}', "'/elsewhere/model.safetensors' (leads out"),
        ('{"weight_map": {"a": "C:\\\\model.safetensors"}}', "leads out"),
        ('{"weight_map": {"a": "..\\\\model.safetensors"}}', "leads out"),
    ],
)
def test_find_weights_broken_index_is_refused(tmp_path: Path, index: str, words: str) -> None:
    """The message names the missing shard or the position of the damage."""
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        find_weights(tmp_path)
    assert words in caught.value.message


def _sharded(folder: Path, weight_map: dict[str, str]) -> Path:
    _write(folder / "a.safetensors", {"x": ENTRY})
    _write(folder / "b.safetensors", {"y": ENTRY, "z": {**ENTRY, "data_offsets": [24, 48]}}, 48)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_index_that_agrees_with_its_shards_passes(tmp_path: Path) -> None:
    """Each tensor is in the shard named by the index; no index is read beside a single file."""
    check_index(_sharded(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"}))
    _write(tmp_path / "model.safetensors", {"x": ENTRY})
    (tmp_path / "model.safetensors.index.json").write_text("not read")
    check_index(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    """Index, tensor and shard are named."""
    with pytest.raises(CheckpointError, match=r"index\.json: .*'z' .*a\.safetensors"):
        check_index(_sharded(tmp_path, {"x": "a.safetensors", "z": "a.safetensors"}))


def test_stored_entries_have_the_offset_of_each_tensor(tmp_path: Path) -> None:
    """The bytes at the place are the tensor's; type names are everybody's."""
    _sharded(tmp_path, {})
    entries = stored_entries([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert ["x", "y", "z"] == list(entries)
    assert ("float32", (2, 3), tmp_path / "b.safetensors") == (
        entries["z"].dtype,
        entries["z"].shape,
        entries["z"].path,
    )
    assert entries["z"].offset + 24 == entries["z"].path.stat().st_size
