"""Hash of a large file just written, without a second reading unless the file changed."""

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from winml.modelkit.onnx.files.content_digest import REMEMBERED_BYTES, WrittenFileHash, hash_file
from winml.modelkit.onnx.files.writing import write_model


def _model(*sizes: int) -> ir.Model:
    generator = np.random.default_rng(0)
    arrays = {f"weight {number}": generator.integers(0, 255, size, np.uint8) for number, size in enumerate(sizes)}
    weights = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()]
    passed = ir.node("Identity", [weights[0]])
    graph = ir.Graph([], passed.outputs, nodes=[passed], initializers=weights, opset_imports={"": 17}, name="g")
    return ir.Model(graph, ir_version=10)


_LARGE = REMEMBERED_BYTES + 12_345


@pytest.mark.parametrize("sizes", [(10,), (_LARGE,), (_LARGE // 2, *[1, 70_000] * 20, _LARGE // 2, 3)])
def test_hash_of_written_model(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path = tmp_path / "model.onnx"
    model = _model(*sizes)
    write_model(model, path, external=False)
    assert hash_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    written = {tensor.name: tensor.raw_data for tensor in onnx.load(path).graph.initializer}
    assert {name: value.const_value.tobytes() for name, value in model.graph.initializers.items()} == written
    os.link(path, tmp_path / "link.onnx")
    renamed = path.rename(tmp_path / "renamed.onnx")
    assert hash_file(renamed) == hash_file(tmp_path / "link.onnx")

    with renamed.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(renamed, ns=(0, renamed.stat().st_mtime_ns + 1_000_000))  # as a later write does
    assert hash_file(renamed) == hashlib.sha256(renamed.read_bytes()).hexdigest()


def test_large_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with WrittenFileHash(path) as file_hash:
        with path.open("wb") as file:
            for _ in range(REMEMBERED_BYTES >> 24):
                file.write(bytes(1 << 24))
                file.flush()
                file_hash.complete_up_to(file.tell())
        file_hash.remember()
    state = path.stat()
    digest = hash_file(path)
    assert digest == hashlib.sha256(bytes(REMEMBERED_BYTES)).hexdigest()
    # Only size and times are looked at: what leaves both as they were would not be seen.
    path.write_bytes(b"\x01" * REMEMBERED_BYTES)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert hash_file(path) == digest


def test_file_truncated_during_its_hash_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with WrittenFileHash(path) as file_hash:
        path.write_bytes(bytes(REMEMBERED_BYTES))
        file_hash.complete_up_to(REMEMBERED_BYTES)
        file_hash._runs[-1].result()
        path.write_bytes(bytes(10))
        file_hash.remember()
    assert hash_file(path) == hashlib.sha256(bytes(10)).hexdigest()
