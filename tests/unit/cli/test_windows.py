"""Drives, open files and code pages of Windows; `make windows` runs these tests under Wine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx.parser
import pytest

from e2e.in_process import run_here

pytestmark = pytest.mark.skipif(sys.platform != "win32", reason="this system has no drives and no code page")

_NET = """<ir_version: 10, opset_import: ["" : 17]>
net (float[1, 4] x) => (float[1, 4] y) <float[4, 4] w = {%s}> { h = MatMul (x, w) y = Relu (h) }"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the model ``net.onnx``."""
    onnx.save(onnx.parser.parse_model(_NET % ", ".join("1" * 16)), tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "root"),
    [("Q:\\x.onnx", "Q:"), ("Q:x.onnx", "Q:"), ("Q:\\folder\\x.onnx", "Q:"), ("\\\\absent\\share\\x.onnx", "absent")],
)
@pytest.mark.parametrize("verb", [("optimize",), ("quantize", "-p", "fp16")], ids=lambda words: words[0])
def test_absent_drive_or_share_is_an_error_of_the_output(
    here: Path, verb: tuple[str, ...], place: str, root: str
) -> None:
    done = run_here(*verb, "-m", "net.onnx", "-o", place)
    assert 1 == done.code
    assert root in done.err
    assert "internal error" not in done.err


def test_file_held_by_another_program_is_named_and_unchanged(here: Path) -> None:
    """The same command succeeds after the program has closed the file, and removes what could not be removed."""
    held, command = here / "held.onnx", ("optimize", "-m", "net.onnx", "-o", "held.onnx", "--overwrite")
    held.write_bytes(b"earlier")
    before = sorted(here.iterdir())
    with held.open("rb"):
        done = run_here(*command)
    assert (1, b"earlier") == (done.code, held.read_bytes())
    assert "held.onnx" in done.err
    assert 0 == run_here(*command).code
    assert b"earlier" != held.read_bytes()
    assert before == sorted(here.iterdir())


def test_redirected_text_is_utf8_with_unix_line_ends(here: Path) -> None:
    """A code page lacks letters. JSON is ASCII, since PowerShell decodes it in the code page of the console."""
    name = "größe-模型.onnx"
    (here / "net.onnx").rename(here / name)
    texts = [
        subprocess.run([sys.executable, "-m", "winml.modelkit", *words, name], capture_output=True, check=True).stdout
        for words in (("inspect",), ("inspect", "-f", "json"))
    ]
    assert name in texts[0].decode("utf-8")
    assert texts[1].isascii()
    assert name == Path(json.loads(texts[1])["path"]).name
    assert [False, False] == [b"\r" in text for text in texts]
