"""The module that does the work owns a fused node, in every command and after every stage."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from e2e.in_process import run_here
from winml.modelkit import (
    HTPExporter,
    WinMLExportConfig,
    compare_models,
    compile_onnx,
    diff_models,
    optimize_onnx,
    quantize_onnx,
)
from winml.modelkit.errors import UsageError
from winml.modelkit.extract.extraction import ExtractOptions, extract_from_file
from winml.modelkit.extract.records import ExtractResult
from winml.modelkit.metadata_keys import MODULES_KEY, TAG_KEY
from winml.modelkit.ort.opened_model import RunOptions

FORMS = ("plain", "optimized", "quantized", "both", "compiled")
FIRST, SECOND = "/Net/Sequential.0/Conv2d.0", "/Net/Sequential.1/Conv2d.0"


class Net(nn.Module):
    """Two convolutions with batch norm and activation, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for inputs in (3, 16)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


SCRIPT = """
import torch
from torch import nn

{source}

def net():
    torch.manual_seed(0)
    return Net().eval()

def example_inputs():
    return torch.ones(1, 3, 16, 16)
"""


@pytest.fixture(name="files", scope="module")
def make_files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Name of a form → its file, with tags on modules of torch.nn."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "net.py").write_text(SCRIPT.format(source=inspect.getsource(Net)), encoding="utf-8")
    torch.manual_seed(0)
    files = {name: folder / f"{name}.onnx" for name in FORMS}
    config = WinMLExportConfig(exporter="torchscript", verify=False, torch_module="all")
    HTPExporter(config).export(Net().eval(), files["plain"], {"x": torch.randn(1, 3, 16, 16)})
    optimize_onnx(files["plain"], files["optimized"], level="full")
    quantize_onnx(files["plain"], files["quantized"], mode="qdq")
    quantize_onnx(files["optimized"], files["both"], mode="qdq")
    compile_onnx(files["optimized"], files["compiled"], ep="cpu")
    return files


def layers(path: Path) -> dict[str, list[str]]:
    """Tag of each convolution → the modules fused into it."""
    found = {}
    for node in onnx.load(path).graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        if node.op_type in ("Conv", "FusedConv"):
            found[metadata[TAG_KEY]] = json.loads(metadata.get(MODULES_KEY, "[]"))
    return found


def extracted(path: Path, selector: str, folder: Path) -> ExtractResult:
    """Extract modules of a file."""
    return extract_from_file(path, selector, folder, ExtractOptions(RunOptions(str(path))))


@pytest.mark.parametrize(
    ("form", "fused"),
    [
        ("plain", []),
        ("optimized", ["blocks.0.0", "blocks.0.1", "blocks.0.2"]),
        ("quantized", ["blocks.0.0", "blocks.0.1"]),
        ("both", ["blocks.0.0", "blocks.0.1", "blocks.0.2"]),
        ("compiled", ["blocks.0.0", "blocks.0.1", "blocks.0.2"]),
    ],
)
def test_convolution_owns_its_node_after_every_stage(files: Mapping[str, Path], form: str, fused: list[str]) -> None:
    """The node has the tag of the convolution, and lists the modules fused into it."""
    found = layers(files[form])
    assert {FIRST, SECOND} == set(found)
    assert fused == found[FIRST]


@pytest.mark.parametrize("form", FORMS[1:])
def test_comparison_by_module_has_the_convolutions(files: Mapping[str, Path], form: str) -> None:
    """A convolution is compared where its fused node ends; a value in a blocked layout is not compared."""
    result = compare_models(files["plain"], files[form], by_module=True)
    rows = {module.identity.tag: module for module in result.modules or ()}
    if form == "compiled":
        assert result.divergence is None
        assert rows[FIRST].fidelity is None
        return
    assert rows[FIRST].own_error is not None
    assert rows[FIRST].own_error < 0.1
    assert "/Net/Sequential.0/BatchNorm2d.1" in rows[FIRST].fused_with


@pytest.mark.parametrize("form", ["optimized", "quantized", "both"])
def test_comparison_with_pytorch_has_the_convolutions(files: Mapping[str, Path], form: str) -> None:
    """The fused node is compared with the output of the module that is fused last."""
    fused = ("BatchNorm2d.1",) if form == "quantized" else ("BatchNorm2d.1", "ReLU.2")
    result = compare_models(f"{files['plain'].parent / 'net.py'}:net", files[form], by_module=True)
    rows = {module.identity.tag: module for module in result.modules or ()}
    for tag in (FIRST, SECOND):
        assert rows[tag].own_error is not None
        assert rows[tag].own_error < 0.1
        assert fused == tuple(name.rpartition("/")[2] for name in rows[tag].fused_with)


@pytest.mark.parametrize("form", FORMS[1:])
def test_kernels_are_charged_to_the_convolutions(files: Mapping[str, Path], form: str) -> None:
    """Each convolution has the time of its kernel."""
    outcome = run_here("perf", files[form], "--by-module", "--iterations", "2", "--warmup", "1", "--format", "json")
    assert 0 == outcome.code, outcome.err
    pending, charged = [json.loads(outcome.out)], {}
    while pending:
        item = pending.pop()
        pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if isinstance(item, dict) and "fused_with" in item:
            charged[item["tag"]] = set(item["operators_ms"])
    for tag in (FIRST, SECOND):
        assert any("Conv" in operator for operator in charged[tag]), charged


@pytest.mark.parametrize("form", ["plain", "optimized"])
@pytest.mark.parametrize("selector", ["blocks.0.0", "blocks.0", FIRST])
def test_selector_of_the_convolution_is_obeyed(
    files: Mapping[str, Path], form: str, selector: str, tmp_path: Path
) -> None:
    """Excluded, included, set by a rule or extracted: the same convolution, before and after fusion."""
    target = tmp_path / "q.onnx"
    for options in ({"exclude": (selector,)}, {"per_module": {selector: "fp32"}}):
        result = quantize_onnx(files[form], target, mode="qdq", overwrite=True, **options)
        assert [FIRST] == [module.tag for module in result.modules if module.left]
    result = quantize_onnx(files[form], target, mode="qdq", overwrite=True, include=(selector,))
    assert [FIRST] == [module.tag for module in result.modules if module.quantized]
    [part] = extracted(files[form], selector, tmp_path / "parts").modules
    assert {FIRST} == set(layers(tmp_path / "parts" / part.file))


@pytest.mark.parametrize("form", ["optimized", "quantized", "both"])
def test_fused_module_is_refused_with_its_owner(files: Mapping[str, Path], form: str, tmp_path: Path) -> None:
    """A batch norm that is fused into its convolution names the convolution."""
    with pytest.raises(UsageError, match=r"fused into blocks\.0\.0"):
        extracted(files[form], "blocks.0.1", tmp_path / "parts")


@pytest.mark.parametrize("form", ["optimized", "quantized", "both", "compiled"])
def test_difference_is_reported_with_the_modules_of_the_convolutions(files: Mapping[str, Path], form: str) -> None:
    """The convolution changed; its batch norm has no nodes any more."""
    changed = {module.tag: module for module in diff_models(files["plain"], files[form]).modules}
    assert FIRST in changed
    assert 0 == changed["/Net/Sequential.0/BatchNorm2d.1"].nodes[1]
