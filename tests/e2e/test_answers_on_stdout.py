"""Stdout holds the answer and nothing else, whatever the user's own code prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_json_is_alone_on_stdout_when_user_code_prints(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """What the user's code prints, or writes to the descriptor, goes to stderr."""
    (tmp_path / "noisy.py").write_text(NOISY, encoding="utf-8")
    command = [sys.executable, "-m", "winml.modelkit", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert (0, "") == (done.returncode, "" if done.returncode == 0 else done.stderr)
    answer = json.loads(done.stdout)
    assert "printed by the factory" in done.stderr
    if arguments[0] == "export":
        assert any("noisy.py:14 reads the value of a tensor" in note for note in answer["notes"])
