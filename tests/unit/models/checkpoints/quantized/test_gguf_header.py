"""Limits of numbers in the header of a GGUF file, checked before loops and allocations."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError

pytest.importorskip("gguf")

from winml.modelkit.models.checkpoints.quantized.gguf_header import read_header

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6


def _text(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + sizes + struct.pack("<IQ", kind, offset)


def _file(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    tensor_count: int | None = None,
    tail: int = 256,
) -> bytes:
    count = len(tensors) if tensor_count is None else tensor_count
    header = b"GGUF" + struct.pack("<IQQ", 3, count, len(entries)) + b"".join((*entries, *tensors))
    return header + bytes(-len(header) % 32) + bytes(256)


def test_header_is_read(tmp_path: Path) -> None:
    """Metadata by key, arrays without values; tensors with the last axis first."""
    path = tmp_path / "model.gguf"
    words = struct.pack("<IQ", STRING, 2) + _text("a") + _text("b")
    entries = (
        _entry("general.architecture", STRING, _text("llama")),
        _entry("llama.block_count", UINT32, struct.pack("<I", 2)),
        _entry("tokenizer.ggml.tokens", ARRAY, words),
    )
    path.write_bytes(_file(entries, (_tensor("a.weight", (4, 2)), _tensor("b", (8,), kind=1, offset=32))))
    header = read_header(path)
    assert {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": None} == header.metadata
    first, second = header.tensors
    assert ("a.weight", (2, 4), "F32", 32) == (first.name, first.shape, first.type_name, first.size_bytes)
    assert (second.offset - first.offset, second.size_bytes) == (32, 16)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + bytes(40), "begins with"),
        (_file(tensor_count=2**40), "number of tensors is 1099511627776"),
        (_file((_entry("a", ARRAY, struct.pack("<IQ", STRING, 2**40)),)), "length of metadata key 'a'"),
        (_file((_entry("a", ARRAY, struct.pack("<IQ", UINT32, 2**62)),)), "length of metadata key 'a'"),
        (_file((_entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1)),)), "array of the type 9"),
        (_file((_entry("a", STRING, struct.pack("<Q", 2**63)),)), "metadata key 'a' takes"),
        (_file((_entry("a", STRING, _text(b"\xff\xfe")),)), "not UTF-8"),
        (_file((_entry("a", 77, b""),)), "unknown type 77"),
        (_file((_entry("a", UINT32, bytes(4)),) * 2), "occurs twice"),
        (_file((_entry("general.alignment", UINT32, bytes(4)),)), "general.alignment is 0"),
        (_file(tensors=(_tensor("w", (2**33, 2**33)),)), "truncated: tensor 'w'"),
        (_file(tensors=(_tensor("w", (0, 4)),)), "tensor 'w' of shape [4, 0]"),
        (_file(tensors=(_tensor("w", (33, 4), kind=8),)), "does not consist of Q8_0"),
        (_file(tensors=(_tensor("w", (2,), kind=99),)), "unknown type 99"),
        (_file(tensors=(_tensor("w", (1,) * 9),)), "9 axes"),
        (_file(tensors=(_tensor(b"\xff", (2,)),)), "not UTF-8"),
        (_file(tensors=(_tensor("w", (2,), offset=2**60),)), "truncated"),
    ],
)
def test_number_beyond_the_file_size_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """The message names the file and the key or tensor."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert words in caught.value.message
