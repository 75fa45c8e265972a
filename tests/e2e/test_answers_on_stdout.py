"""Stdout holds the answer and nothing else, whatever the user's own code prints."""

from __future__ import annotations

import json

import pytest

from e2e.workplace import Workplace

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
def test_json_is_alone_on_stdout_when_user_code_prints(arguments: tuple[str, ...], workplace: Workplace) -> None:
    """What the user's code prints, or writes to the descriptor, goes to stderr."""
    (workplace.folder / "noisy.py").write_text(NOISY, encoding="utf-8")
    done = workplace.winml(*arguments)
    assert (0, "") == (done.code, "" if done.code == 0 else done.err)
    answer = json.loads(done.out)
    assert "printed by the factory" in done.err
    if arguments[0] == "export":
        assert any("noisy.py:14" in note for note in answer["notes"])
