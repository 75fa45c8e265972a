"""Models for the tests of sweeps: small graphs, and scripts that hang or take all memory."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from graphs import parse

NET = """m (float[2, 8] x) => (float[2, 8] y) <float[8, 8] w_1 = {{{ones}}}, float[8, 8] w_2 = {{{ones}}}> {{
    a = MatMul(x, w_1)
    b = Relu(a)
    c = Identity(b)
    y = MatMul(c, w_2)
}}""".format(ones=", ".join(["1.0"] * 64))

SCRIPT = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def hangs():
    time.sleep(600)


def hoards():
    held = []
    while True:
        held.append(b"x" * 2**26)
        time.sleep(0.05)


def waits():
    (HERE / f"started-{len(list(HERE.glob('started-*')))}").touch()
    while not (HERE / "released").exists():
        time.sleep(0.1)
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.zeros(1, 4)
"""


def write_models(folder: Path) -> dict[str, str]:
    """Write two valid models, a damaged one and a script; return their names in a plan."""
    for name in ("first", "second"):
        ir.save(parse(NET), folder / f"{name}.onnx")
    (folder / "damaged.onnx").write_bytes((folder / "first.onnx").read_bytes()[:200])
    (folder / "models.py").write_text(SCRIPT, encoding="utf-8")
    files = {name: str(folder / f"{name}.onnx") for name in ("first", "second", "damaged")}
    return {**files, **{name: f"{folder / 'models.py'}:{name}" for name in ("hangs", "hoards", "waits")}}
