"""Size limits of images and recordings."""

from __future__ import annotations

import struct
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest

from winml.modelkit.samples.media import Recording, Unreadable, media_name, open_image, open_recording


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def save_png(path: Path, width: int, height: int, content: bytes) -> Path:
    """Write a PNG of a given size, with compressed content as its pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(content)) + _chunk(b"IEND", b""))
    return path


def save_wav(path: Path, rate_hz: int) -> Path:
    """Write a second of silence."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(bytes(2 * min(rate_hz, 16000)))
    return path


def test_image_of_absurd_size_is_not_decoded(tmp_path: Path) -> None:
    """The header is enough: 169 million pixels would be 3.3 GB on their way to a model."""
    opened = open_image(save_png(tmp_path / "a.png", 13000, 13000, b""), None, "a.png")
    assert isinstance(opened, Unreadable)
    assert "13000 x 13000 pixels" in opened.reason


def test_image_of_usual_size_is_opened(tmp_path: Path) -> None:
    """The image has all its pixels."""
    opened = open_image(save_png(tmp_path / "a.png", 3, 2, bytes(2 * (1 + 9))), None, "a.png")
    assert not isinstance(opened, Unreadable)
    assert (3, 2) == opened.size


@pytest.mark.parametrize("rate_hz", [1, 100, 2_000_000])
def test_recording_of_absurd_rate_is_refused(tmp_path: Path, rate_hz: int) -> None:
    """Resampled to 16 kHz, each of its samples would become thousands."""
    pytest.importorskip("soundfile")
    opened = open_recording(save_wav(tmp_path / "a.wav", rate_hz), None, "a.wav")
    assert isinstance(opened, Unreadable)
    assert f"{rate_hz} Hz" in opened.reason


def test_recording_of_usual_rate_is_opened(tmp_path: Path) -> None:
    """A telephone's."""
    pytest.importorskip("soundfile")
    assert isinstance(open_recording(save_wav(tmp_path / "a.wav", 8000), None, "a.wav"), Recording)


def test_opened_image_keeps_the_name_of_its_file(tmp_path: Path) -> None:
    """A file in a dataset is named below its folder; an image without a file has no name."""
    (tmp_path / "dark").mkdir()
    path = save_png(tmp_path / "dark" / "a.png", 3, 2, bytes(2 * (1 + 9)))
    assert "dark/a.png" == media_name(open_image({"bytes": None, "path": str(path)}, [tmp_path], "row 0"))
    assert "" == media_name(open_image({"bytes": path.read_bytes(), "path": None}, [tmp_path], "row 0"))
    assert "speech.wav" == media_name(Recording(np.zeros(4, np.float32), 16_000, "speech.wav"))
