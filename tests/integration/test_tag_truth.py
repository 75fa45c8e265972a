"""Tags of files from every tool, judged by values alone: each node has the tag of the module that does its work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from foreign_tools import onnxscript_fusions, onnxsim, onnxslim, optimized, ort_level, retagged
from hostile_modules import GROUPS, MODULES, group_inputs, make_group
from truth import judge, record
from winml.modelkit import WinMLExportConfig, export_pytorch

EVERYWHERE: Mapping[str, Callable[[Path, Path], object]] = {
    "level full, blocked layout": optimized(level="full", nchwc_layout=True),
    "onnxruntime, all": retagged(ort_level("ENABLE_ALL")),
}
FURTHER: Mapping[str, Callable[[Path, Path], object]] = {
    "level basic": optimized(level="basic"),
    "onnxslim": retagged(onnxslim),
    # onnxsim needs Python 3.11.
    **({"onnxsim": retagged(onnxsim)} if sys.version_info >= (3, 11) else {}),
    "onnxscript": retagged(onnxscript_fusions),
}
TOOLS: Mapping[str, Mapping[str, Callable[[Path, Path], object]]] = {
    "torchscript": {**EVERYWHERE, **FURTHER},
    "dynamo": EVERYWHERE,
}
"""Exporter → transformations of its file; scripts/truth_eval.py runs all with both exporters and with architectures."""


def test_the_zoo_has_sixty_modules() -> None:
    """Each module is in one group."""
    assert len(MODULES) >= 60
    assert sorted(MODULES) == sorted(name for group in GROUPS.values() for name in group)


@pytest.mark.parametrize("exporter", TOOLS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_node_belongs_to_its_working_module(group: str, exporter: Any, tmp_path: Path) -> None:
    """No tag is wrong, and none is higher than necessary, in exported and transformed files."""
    model, inputs = make_group(group), group_inputs()
    recording = record(model, inputs)
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    result = export_pytorch(model, source, inputs, config=WinMLExportConfig(exporter=exporter, verify=False))
    feeds = {result.only_part.inputs[0].name: inputs[0].numpy()}
    judged = {"as exported": judge(source, recording, feeds)}
    for name, tool in TOOLS[exporter].items():
        tool(source, target)
        judged[name] = judge(target, recording, feeds)
    assert [] == [
        (tool, verdict) for tool, verdicts in judged.items() for verdict in verdicts if verdict.judgement != "right"
    ]
    assert all(len(verdicts) > 60 for verdicts in judged.values()), "most nodes can be judged"
