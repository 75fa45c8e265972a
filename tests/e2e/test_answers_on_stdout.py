"""Stdout of the command: the result alone, although the user's code prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import onnx
import onnx.parser
import pytest

from e2e.in_process import run_here
from e2e.workplace import PROGRAM, Workplace

NOISY = """
import os
import torch

print("printed while imported")

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, values):
        os.write(1, b"written to the descriptor\\n")
        if values.sum() > -1000:
            values = self.linear(values)
        return values

def build():
    print("printed by the factory")
    return Noisy()

def example_inputs():
    return torch.ones(2, 4)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "-m", "noisy.py:build", "-o", "noisy.onnx", "--format", "json"),
        ("inspect", "-m", "noisy.py:build", "--format", "json"),
        ("config", "-m", "noisy.py:build"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_alone_on_stdout_when_user_code_prints(arguments: tuple[str, ...], apart: Workplace) -> None:
    """Text that the user's code prints, or writes to the descriptor, goes to stderr."""
    (apart.folder / "noisy.py").write_text(NOISY, encoding="utf-8")
    done = apart.winml(*arguments)
    assert (0, "") == (done.code, "" if done.code == 0 else done.err)
    answer = json.loads(done.out)
    assert "printed by the factory" in done.err
    if arguments[0] == "export":
        assert any("noisy.py:14" in note for note in answer["notes"])


_NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[2, 4] x) => (float[2, 4] y) <float[4, 4] w = {1, 0.5, 3, 4, 5, 6, 0.25, 8, 9, 10, 11, 12, 1.3, 14, 15, 16}>
{
    product = MatMul (x, w)
    same = Relu (product)
    y = Neg (same)
}
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the working directory."""
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(_NET), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "-m", "net.onnx", "-o", "q.onnx", "--precision", "int8", "--min-sqnr", "500"),
        ("quantize", "-m", "net.onnx", "-o", "q.onnx", "--precision", "fp16", "--min-sqnr", "500"),
    ],
)
def test_refused_result_is_a_json_object(arguments: tuple[str, ...], net: Path) -> None:
    """Exit code 3 is a result, so a program reads it from stdout."""
    done = run_here(*arguments, "--format", "json")
    record = json.loads(done.out)
    assert (3, 3, 1) == (done.code, record["exit_code"], record["schema_version"])
    assert record["error"] in done.err
    assert not Path("q.onnx").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("sys",), ("cache", "ls"), ("inspect", "net.onnx"), ("diff", "net.onnx", "net.onnx"),
        ("compare", "net.onnx", "net.onnx"), ("perf", "net.onnx", "--iterations", "2"), ("run", "net.onnx", "--schema"),
        ("optimize", "-m", "net.onnx", "-o", "o.onnx"), ("optimize", "-m", "net.onnx", "-o", "o.onnx", "--dry-run"),
        ("optimize", "-m", "net.onnx", "--level", "full", "--check"), ("optimize", "--list"), ("compile", "--list"),
        ("quantize", "-m", "net.onnx", "-o", "q.onnx", "-p", "fp16"), ("inspect", "--list-tasks"),
    ],
)  # fmt: skip
def test_json_object_has_a_schema_version(arguments: tuple[str, ...], net: Path) -> None:
    """The JSON object of every command has a schema version."""
    done = run_here(*arguments, "--format", "json")
    assert 0 == done.code, done.err
    assert json.loads(done.out)["schema_version"] in (1, 2)


def test_json_is_ascii_if_stdout_has_a_code_page(workplace: Workplace) -> None:
    """Programs read JSON as UTF-8, and a code page lacks letters."""
    name = "größe-模型.onnx"
    onnx.save(onnx.parser.parse_model(_NET), workplace.folder / name)
    done = subprocess.run(
        [*PROGRAM, "inspect", name, "--format", "json"], cwd=workplace.folder, capture_output=True, check=False,
        env={**workplace.environment(), "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    assert done.stdout.isascii()
    assert name == Path(json.loads(done.stdout)["path"]).name
