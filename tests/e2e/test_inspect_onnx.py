"""``winml inspect`` on ONNX files, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from e2e.in_process import run_here


def _run(*arguments: object, program: str | None = None) -> tuple[int, str, str]:
    words = [*map(str, arguments)]
    if program is None:
        outcome = run_here(*words)
        return outcome.code, outcome.out, outcome.err
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network, exported by this package."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "net.py").write_text(
        "import torch\n"
        "class Block(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return torch.tanh(self.fc(x))\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = torch.nn.ModuleList([Block(), Block()])\n"
        "    def forward(self, x):\n"
        "        for block in self.blocks:\n"
        "            x = block(x)\n"
        "        return x\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    return Net()\n"
        "def example_inputs():\n"
        "    return {'x': torch.randn(2, 4)}\n",
        encoding="utf-8",
    )
    path = folder / "net.onnx"
    code, _, words = _run("export", "-m", f"{folder / 'net.py'}:build", "-o", path, "--no-verify", "-q")
    assert 0 == code, words
    return path


def test_inspect_of_our_export_in_both_formats_agrees(exported: Path) -> None:
    """The table and the JSON have the tree of the export, and stderr stays empty."""
    code, table, words = _run("inspect", "-m", exported, "-H")
    assert (0, "") == (code, words)
    assert "Block.1" in table
    code, text, words = _run("inspect", exported, "-H", "--format", "json")
    assert (0, "") == (code, words)
    record = json.loads(text)
    assert "winml tags" == record["tree_source"]
    assert 100.0 == record["coverage"]["percent"]
    blocks = {module["tag"]: module for module in record["modules"]}
    assert ["/Net", "/Net/Block.0", "/Net/Block.1"] == list(blocks)
    assert {"nodes": 2, "parameters": 20, "size_bytes": 80, "macs": 32} == blocks["/Net/Block.0"]["own"]
    assert 64 == record["macs"] == blocks["/Net"]["total"]["macs"]


def test_inspect_of_an_export_folder_equals_that_of_its_file(exported: Path) -> None:
    """The folder is accepted as by every verb that reads ONNX files."""
    code, text, words = _run("inspect", exported.parent, "--format", "json")
    assert (0, "") == (code, words)
    assert json.loads(_run("inspect", exported, "--format", "json")[1]) == json.loads(text)


def test_inspect_module_lists_the_selected_nodes(exported: Path) -> None:
    """A selector over paths gives one block, and the JSON has its nodes."""
    code, text, _ = _run("inspect", exported, "--module", "blocks.1", "--format", "json")
    assert 0 == code
    record = json.loads(text)
    assert ["/Net/Block.1"] == [module["tag"] for module in record["modules"]]
    assert {"/Net/Block.1"} == {node["tag"] for node in record["module_nodes"]}
    assert ["/blocks.1/fc/Gemm", "/blocks.1/Tanh"] == [node["name"] for node in record["module_nodes"]]


def test_inspect_unknown_selector_lists_the_nearest(exported: Path) -> None:
    """A wrong name is a usage error, and stdout stays empty in JSON mode."""
    code, text, words = _run("inspect", exported, "--module", "Blokc", "--format", "json")
    assert (2, "") == (code, text)
    assert "error: no module matches 'Blokc'\nNearest: Block, blocks.1, blocks.0. Classes: Block, Net.\n" == words


def test_inspect_of_an_onnx_file_imports_no_model_library(exported: Path) -> None:
    """Neither torch nor transformers nor ONNX Runtime is imported to read a file."""
    program = (
        "import sys\n"
        "from winml.modelkit.cli.main import main\n"
        "sys.argv = ['winml', *sys.argv[1:]]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'onnxruntime', 'onnxscript', 'onnx_ir', 'safetensors', 'huggingface_hub'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    for options in ([], ["-H"], ["--format", "json"]):
        code, _, words = _run("inspect", exported, *options, program=program)
        assert (0, "") == (code, words)


def _broken(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.onnx"
    whole = helper.make_model(
        helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            "main",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5000])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5000])],
            [helper.make_tensor("w", TensorProto.FLOAT, [5000], [1.0] * 5000)],
        )
    )
    contents = {
        "empty": b"",
        "text": b"not a model",
        "truncated": whole.SerializeToString()[:9000],
    }
    if kind == "directory":
        path.mkdir()
    elif kind in contents:
        path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize("format_", ["table", "json"])
@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("empty", 1, "is empty"),
        ("text", 1, "ONNX file"),
        ("truncated", 1, "cut off"),
        ("directory", 2, "directory"),
        ("missing", 2, "no such"),
    ],
)
def test_inspect_of_a_broken_file_is_one_sentence(
    tmp_path: Path, kind: str, code: int, reason: str, format_: str
) -> None:
    """Each error names the file and a remedy; stdout stays empty."""
    path = _broken(tmp_path, kind)
    found = _run("inspect", "-m", path, "--format", format_)
    assert (code, "") == found[:2]
    assert found[2].startswith(f"error: {path}")
    assert reason in found[2]
    assert 2 == len(found[2].splitlines())


def test_inspect_with_missing_data_file_succeeds(tmp_path: Path) -> None:
    """An inspection does not need the weights."""
    path = tmp_path / "model.onnx"
    onnx.save(
        helper.make_model(helper.make_graph([], "main", [], [], [numpy_helper.from_array(np.ones(500), "w")])),
        path,
        save_as_external_data=True,
        location="w.data",
        size_threshold=0,
        convert_attribute=False,
    )
    (tmp_path / "w.data").unlink()
    code, text, _ = _run("inspect", path, "--format", "json")
    record: dict[str, Any] = json.loads(text)
    assert 0 == code
    assert {"path": str(tmp_path / "w.data"), "size_bytes": None} == record["files"][1]
    assert f"data file {tmp_path / 'w.data'} is missing" in record["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no model"),
        (["a.onnx", "-m", "b.onnx"], "two models"),
        (["a.onnx", "--task", "fill-mask"], "--task"),
        (["a.onnx", "--list-tasks"], "--list-tasks"),
        (["a.onnx", "--batch-size", "2"], "--batch-size"),
        (["folder", "--module", "Block"], "--module"),
        (["a.onnx", "--model-type", "bert"], "--model-type bert"),
        (["a.onnx", "--nonsense"], "such option"),
    ],
)
def test_inspect_wrong_usage_is_refused(arguments: list[str], reason: str) -> None:
    """The exit code is 2, before any file is read."""
    code, text, words = _run("inspect", *arguments)
    assert (2, "") == (code, text)
    assert reason in words
