"""Displayed part of a module tree in ``inspect`` and ``export``: levels, and equal modules once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from graphs import parse
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.tags.tagging import NodeTag, write_tag

BODY = """layers (float[2] x) => (float[2] y) {
  a = Neg (x) b = Tanh (a) c = Neg (b) d = Tanh (c) e = Neg (d) f = Tanh (e) y = Abs (f)
}"""


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A file with three equal layers of two modules each."""
    model = parse(BODY)
    for number, node in enumerate(model.graph):
        layer = f"/M/Layer.{number // 2}"
        tag = "/M" if number == 6 else f"{layer}/Act" if number % 2 else layer
        write_tag(node, NodeTag(tag, tag[3:].lower().replace("/", "."), "direct"))
    write_model(ir.Model(model.graph, ir_version=10), tmp_path / "layers.onnx")
    return tmp_path / "layers.onnx"


def _modules(*arguments: str | Path) -> list[list[str]]:
    """Return name, path, nodes and own nodes of each line of the tree."""
    outcome = run_here("inspect", *arguments)
    assert 0 == outcome.code, outcome.err
    table = outcome.out.partition("module ")[2].splitlines()[1:]
    cells = [re.split(" {2,}", line.strip()) for line in table if line]
    return [[row[0], *row[-10:-8]] for row in cells]


def test_equal_layers_are_folded_unless_verbose_is_doubled(layers: Path) -> None:
    """Both counts of nodes are those of one layer; the root counts the nodes of the file."""
    folded = _modules(layers, "-H")
    assert [["M", "7", "1"], ["Layer.0 … .2 × 3, equal", "2", "1"], ["Act", "1", "1"]] == folded
    assert 7 == len(_modules(layers, "-H", "-vv"))


def test_depth_hides_deeper_levels_with_a_count(layers: Path) -> None:
    """Hidden modules are counted."""
    assert [["M · 6 more below", "7", "1"]] == _modules(layers, "-H", "--depth", "1")
    assert ["Layer.0 … .2 × 3, equal · 1 more below", "2", "1"] == _modules(layers, "-H", "--depth", "2")[-1]


def test_json_folds_nothing(layers: Path) -> None:
    """Programs get every module, with both counts."""
    outcome = run_here("inspect", layers, "-H", "--depth", "1", "--format", "json")
    modules = json.loads(outcome.out)["modules"]
    assert [(7, 1), *[(2, 1), (1, 1)] * 3] == [(item["total"]["nodes"], item["own"]["nodes"]) for item in modules]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(("inspect", "layers.onnx"), "-H"), (("export", "-m", "./net", "-o", "net.onnx"), "-v")],
)
def test_depth_of_no_tree_is_refused(arguments: tuple[str, ...], option: str) -> None:
    """Nothing is read; the message names the option that shows the tree."""
    outcome = run_here(*arguments, "--depth", "2")
    assert 2 == outcome.code
    assert all(word in outcome.err for word in ("--depth 2", option))


def test_functions_without_tags_are_refused_early() -> None:
    """Functions are made of tags."""
    outcome = run_here("export", "-m", "./net", "-o", "net.onnx", "--functions", "all", "--no-hierarchy")
    assert 2 == outcome.code
    assert "--no-hierarchy" in outcome.err
