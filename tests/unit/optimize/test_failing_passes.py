"""Capabilities of another package whose passes fail: each is omitted, and named in a note."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from winml.modelkit.registries import CONTRACT

_PASSES = """
import onnx_ir as ir
from winml.modelkit.extend import GraphPass

class FailingPass(GraphPass):
    tags = "keeps"

    def call(self, model):
        raise RuntimeError("no such pattern")

class UnloadablePass(GraphPass):
    tags = "creates"

    def call(self, model):
        model.graph[0].op_type, model.graph[0].domain = "Unheard", "f"
        model.opset_imports["f"] = 1
        return ir.passes.PassResult(model, modified=True)
"""
_CAPABILITIES = """
from winml.modelkit.extend import Capability

FAILING = Capability("failing", "fail", "basic", "winml", implementation="broken_passes:FailingPass")
UNLOADABLE = Capability("unloadable", "make a node", "basic", "winml", implementation="broken_passes:UnloadablePass")
"""
_PROGRAM = """
import json
import onnx_ir as ir
from graphs import operators, parse
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize

model = parse("m (float[2, 3] x) => (float[2, 3] y) { a = Relu (x) b = Relu (x) y = Add (a, b) }")
result = optimize(model, OptimizeOptions(level="full"))
print(json.dumps([list(result.notes), operators(result.model)]))
"""


def test_failing_capabilities_are_omitted_with_a_note(tmp_path: Path) -> None:
    """The pass that fails, and the one whose graph does not load, are named; the other capabilities work."""
    described = tmp_path / "broken-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    entries = "failing = broken_capabilities:FAILING\nunloadable = broken_capabilities:UNLOADABLE\n"
    contract = f"[winml.contract]\n{CONTRACT} = winml.modelkit.extend:CONTRACT\n"
    (described / "entry_points.txt").write_text(f"{contract}[winml.passes]\n{entries}", encoding="utf-8")
    (tmp_path / "broken_passes.py").write_text(_PASSES, encoding="utf-8")
    (tmp_path / "broken_capabilities.py").write_text(_CAPABILITIES, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    notes, operators = json.loads(done.stdout)
    assert ["Relu", "Add"] == operators
    for name, reason in (("failing", "no such pattern"), ("unloadable", "Unheard")):
        assert 1 == sum(note.startswith(f"{name} was omitted") and reason in note for note in notes), notes
