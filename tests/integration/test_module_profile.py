"""Times by module, from the export to the page, on models that ONNX Runtime rewrites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import graphs
from browser import Browser
from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.errors import UsageError
from winml.modelkit.metadata_keys import TAG_KEY
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.optimize.verb import optimize_onnx
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.profile.by_module import profile_modules
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.profile.module_records import ProfiledModules
from winml.modelkit.profile.module_table import profile_document
from winml.modelkit.report.html import render_html


class Block(nn.Module):
    """A product and a sum that ONNX Runtime fuses, followed by an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.norm(self.dense(x) + x))


class Net(nn.Module):
    """Two blocks, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[1](self.blocks[0](x)))


def _profiled(path: Path, iterations: int = 3, **feeds: NDArray[Any]) -> ProfiledModules:
    """Profile a file on these values."""
    values = path.with_suffix(".npz")
    np.savez(values, **feeds)  # type: ignore[arg-type]  # its stub takes the keywords for options
    options = LatencyOptions(iterations=iterations, warmup=1)
    return profile_modules(path, RunOptions(path.name, input_data=values), options)


X = {"x": np.random.default_rng(0).standard_normal((1, 16, 32)).astype(np.float32)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with nodes that ONNX Runtime fuses at load time."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    export_pytorch(Net(), path, torch.from_numpy(X["x"]))
    return path


@pytest.fixture(scope="module")
def profiled(exported: Path) -> ProfiledModules:
    """The profile of the exported file."""
    return _profiled(exported, 3, **X)


def test_profile_of_rewritten_graph_is_attributed_to_the_last_kernel(profiled: ProfiledModules) -> None:
    """Fused kernels belong to the module of the replaced nodes; the tree adds up to ONNX Runtime's own sum."""
    profile = profiled.profile
    executed = {kernel.node for kernel in profile.profile.kernels}
    operators = {kernel.op_type for kernel in profile.profile.kernels}
    assert operators & {"Gelu", "BiasGelu", "FusedMatMul", "Gemm", "SkipLayerNormalization"}, operators
    assert executed, "ONNX Runtime left the graph as it was, so this test shows nothing"
    assert profile.unattributed_share == 0
    assert profile.kernel_ms == pytest.approx(sum(module.self_ms for module in profile.modules()))
    assert profile.kernel_ms == pytest.approx(sum(kernel.self_us for kernel in profile.profile.kernels) / 3000)
    assert profile.kernel_ms + profile.outside_ms == pytest.approx(sum(profile.run_ms) / 3)


def test_profile_names_the_modules_of_the_model(profiled: ProfiledModules) -> None:
    """The tree is PyTorch's; a module called twice has twice the kernels of its twin."""
    kernels = {module.path: module.kernels for module in profiled.profile.modules()}
    assert {"", "blocks.0", "blocks.1"} == set(kernels)
    assert kernels["blocks.0"] > 0
    assert kernels["blocks.1"] == 2 * kernels["blocks.0"]


def test_profile_charges_the_nodes_of_the_file(exported: Path, profiled: ProfiledModules) -> None:
    """The nodes of the file share the whole time, for tools that show the file itself."""
    names = {node.name for node in onnx.load(exported).graph.node}
    assert set(profiled.node_ms) <= names
    assert profiled.profile.kernel_ms == pytest.approx(sum(profiled.node_ms.values()))


def test_profile_of_torch_modules_has_the_depth_of_the_tags(tmp_path: Path) -> None:
    """Layers of torch.nn have their own times after an export with --torch-module."""
    path = tmp_path / "net.onnx"
    config = WinMLExportConfig(torch_module=("all",))
    export_pytorch(Net(), path, torch.from_numpy(X["x"]), config=config)
    times = {module.path: module.self_ms for module in _profiled(path, 3, **X).profile.modules()}
    assert {"blocks.0.dense", "blocks.0.norm", "blocks.1.dense"} <= set(times)


class Convolution(nn.Module):
    """A convolution with fused batch norm and activation; the activation is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn1(self.conv1(x))).flatten(1)


IMAGE = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module", params=["static", "open", "optimized"])
def convolution(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a convolution before a batch norm and an activation, or with both fused into it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("convolution") / "net.onnx"
    config = WinMLExportConfig(dynamic_axes={"x": {0: "batch"}} if request.param == "open" else {})
    export_pytorch(Convolution(), path, torch.from_numpy(IMAGE), config=config)
    if request.param == "optimized":
        source, path = path, path.with_name("optimized.onnx")
        optimize_onnx(source, path, level="extended")
    return path


def test_profile_charges_a_fused_kernel_to_the_module_that_does_the_work(convolution: Path) -> None:
    """The convolution, which has the products, is charged; batch norm and owner of the activation are named."""
    profile = _profiled(convolution, 3, x=IMAGE).profile
    found = {module.path: module for module in profile.modules()}
    assert found["conv1"].self_ms > 0
    assert {"/Convolution", "/Convolution/BatchNorm2d"} == set(found["conv1"].fused_with)
    assert "Conv" not in " ".join(found[""].operators)
    assert profile.kernel_ms == pytest.approx(sum(module.self_ms for module in profile.modules()))


def test_profile_of_untagged_file_reads_node_names(exported: Path, tmp_path: Path) -> None:
    """Without tags, scopes in node names are the modules."""
    proto = onnx.load(exported)
    for node in proto.graph.node:
        del node.metadata_props[:]
    del proto.metadata_props[:]
    path = tmp_path / "untagged.onnx"
    onnx.save(proto, path)
    profiled = _profiled(path, 2, **X)
    assert "node names" == profiled.tree_source
    assert any("node names" in note for note in profiled.result.notes)
    assert profiled.profile.unattributed_share < 0.01
    assert {"blocks.0", "blocks.1"} <= {module.path for module in profiled.profile.modules()}


def test_profile_of_file_without_any_scope_is_refused(tmp_path: Path) -> None:
    """Without any module name there is nothing to charge, and the hint names winml retag."""
    proto = ir.to_proto(graphs.parse("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    for node in proto.graph.node:
        node.name = "relu"
        del node.metadata_props[:]
    path = tmp_path / "bare.onnx"
    onnx.save(proto, path)
    with pytest.raises(UsageError, match="module information") as refusal:
        _profiled(path, x=np.ones(4, np.float32))
    assert "winml retag" in refusal.value.hint


def test_profile_charges_the_branch_that_ran(tmp_path: Path) -> None:
    """Kernels inside an If belong to their own modules, and their time is not counted twice."""
    body = """g (bool flag, float[64,64] x) => (float[64,64] y) {
      y = If (flag) <then_branch = t () => (float[64,64] a) { a = MatMul (x, x) },
                     else_branch = e () => (float[64,64] b) { b = Neg (x) }>
    }"""
    path = tmp_path / "branches.onnx"
    write_model(graphs.parse(body), path)
    profile = _profiled(path, flag=np.array(True), x=np.ones((64, 64), np.float32)).profile
    found = {module.tag: module for module in profile.modules()}
    assert found["/M/MatMul"].self_ms > 0
    assert found["/M/Neg"].self_ms == 0
    assert profile.kernel_ms == pytest.approx(sum(module.self_ms for module in profile.modules()))
    assert profile.kernel_ms <= sum(profile.run_ms) / len(profile.run_ms)


def test_profile_tells_nodes_of_equal_names_apart(tmp_path: Path) -> None:
    """Two loops with equal bodies are two modules."""
    body = "(int64 i, bool c, float[8, 8] a) => (bool d, float[8, 8] r) { d = Identity (c) r = MatMul (a, a) }"
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]> net (float[8, 8] x) => (float[8, 8] z) {{
            n = Constant <value_int = 2> ()
            go = Constant <value = bool {{1}}> ()
            y = Loop (n, go, x) <body = b {body}>
            z = Loop (n, go, y) <body = b {body}>
        }}
    """)
    for number, loop in enumerate(model.graph.node[2:]):
        for node in (loop, *loop.attribute[0].g.node):
            node.name = f"/{node.op_type}"
            node.metadata_props.add(key=TAG_KEY, value=f"/Net/Block.{number}")
    onnx.save(model, tmp_path / "loops.onnx")
    profiled = _profiled(tmp_path / "loops.onnx", x=np.ones((8, 8), np.float32))
    assert {"/Net/Block.0": 5.0, "/Net/Block.1": 5.0} == {
        module.tag: module.kernels for module in profiled.profile.modules() if module.kernels
    }


@pytest.mark.reader("chromium")
def test_page_opens_in_a_browser_without_network(profiled: ProfiledModules, tmp_path: Path, browser: Browser) -> None:
    """The chart has a box per module with time, and the table sorts by column heads and filters by its field."""
    path = tmp_path / "page.html"
    path.write_text(render_html(replace(profile_document(profiled), title="<net> & co")), encoding="utf-8")
    browser.open(path)
    assert [] == browser.problems
    assert "<net> & co" in browser.run("document.querySelector('h1').textContent")
    browser.run("document.querySelector('.fold').click()")
    boxes = browser.run("[...document.querySelectorAll('.plot button')].map(box => box.textContent)")
    modules = [module for module in profiled.profile.modules() if module.total_ms > 0.01 * profiled.profile.kernel_ms]
    names = {module.tag.rpartition("/")[2] for module in modules}
    assert [] == [name for name in names if not any(box.startswith(name) for box in boxes)]
    browser.run("document.getElementById('filter').focus()")
    browser.press(*"blocks")
    assert all("blocks" in name for name in browser.column("modules", 0))
    for _ in range(2):
        browser.run("document.querySelectorAll('#modules th button')[4].click()")
    times = [float(value) for value in browser.column("modules", 4)]
    assert sorted(times) == times
    assert all(count.isdecimal() for count in browser.column("modules", 5))


@pytest.mark.reader("chromium")
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_page_fits_its_window(profiled: ProfiledModules, tmp_path: Path, width: int, browser: Browser) -> None:
    """The page fits each width without scrolling, the last column included."""
    path = tmp_path / "page.html"
    path.write_text(render_html(profile_document(profiled)), encoding="utf-8")
    browser.open(path, width=width)
    cells = "[...document.querySelectorAll('#modules td:last-child')]"
    assert browser.run(f"Math.max(...{cells}.map(cell => cell.getBoundingClientRect().right))") <= width
    assert [] == browser.wider_elements()
