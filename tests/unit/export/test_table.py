"""Reports of an export: sidecar, Markdown, console and JSON record."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn

from hostile_modules import Leaf
from schemas import sidecar_schema
from winml.modelkit import ExportResult, export_pytorch
from winml.modelkit.compare.outputs import compare_outputs
from winml.modelkit.export.sidecar import DescribedFile, adapted_sidecar_json, sidecar_json
from winml.modelkit.export.table import export_document, export_report
from winml.modelkit.report.markdown import render_markdown
from winml.modelkit.report.module_tree import TreeLimits
from winml.modelkit.report.terminal import console_for, print_document
from winml.modelkit.tags.tagging import Coverage


class Model(nn.Module):
    """A model of two leaves, the first called twice, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Leaf(4) for _ in range(2))
        self.idle = Leaf(4)
        self.leaves[0].linear.bias.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the leaves."""
        return torch.relu(self.leaves[0](self.leaves[1](self.leaves[0](values))))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """One export for all reports."""
    torch.manual_seed(0)
    return export_pytorch(Model(), tmp_path_factory.mktemp("export") / "model.onnx", torch.randn(2, 4))


def change_part(result: ExportResult, **changes: Any) -> ExportResult:
    """Return the result with a changed part."""
    return replace(result, parts=(replace(result.only_part, **changes),))


def sidecar_of(result: ExportResult) -> dict[str, Any]:
    """Return the sidecar as parsed JSON."""
    sidecar: dict[str, Any] = json.loads(sidecar_json(result, result.only_part))
    return sidecar


def test_sidecar_satisfies_its_schema(result: ExportResult) -> None:
    """The shipped schema describes the sidecar with and without a verification."""
    jsonschema.Draft202012Validator.check_schema(sidecar_schema())
    jsonschema.validate(sidecar_of(result), sidecar_schema())
    assert ("schema_version", 2) == next(iter(sidecar_of(result).items()))
    jsonschema.validate(sidecar_of(change_part(result, verification=None)), sidecar_schema())


def test_sidecar_counts_equal_the_file(result: ExportResult) -> None:
    """Nodes, coverage and sources agree with each other and with the file."""
    sidecar = sidecar_of(result)
    statistics = sidecar["statistics"]
    assert {node.name: node.tag for node in result.only_part.nodes} == sidecar["nodes"]
    assert len(sidecar["nodes"]) == statistics["node_count"] == statistics["tagged_count"]
    assert 100.0 == statistics["coverage_percent"]
    assert 100.0 == pytest.approx(sum(each["percent"] for each in statistics["sources"].values()), abs=1e-3)
    assert statistics["node_count"] == sum(each["count"] for each in statistics["sources"].values())
    assert [node.name for node in result.only_part.nodes if node.op_type == "Relu"] == statistics["root_nodes"]


def test_sidecar_modules_are_nested_by_execution(result: ExportResult) -> None:
    """The tree has order, calls, parameters and depth of each module."""
    sidecar = sidecar_of(result)
    root = sidecar["modules"]
    assert ("Model", "/Model", "", 0, 1, "custom", False) == tuple(
        root[key] for key in ("class_name", "tag", "path", "execution_order", "depth", "module_type", "is_leaf")
    )
    first, second = root["children"]
    assert ("/Model/Leaf.0", 2, 1) == (first["tag"], first["calls"], first["execution_order"])
    assert ("/Model/Leaf.1", 1, 2) == (second["tag"], second["calls"], second["execution_order"])
    assert {"total": 20, "trainable": 16, "shapes": {"linear.weight": [4, 4], "linear.bias": [4]}} == first[
        "parameters"
    ]
    assert (8, 60) == (sidecar["model"]["total_modules"], sidecar["model"]["total_parameters"])
    assert 3 == sidecar["tracing"]["modules_traced"]
    # The root once, and three leaves with one layer each.
    assert 7 == sidecar["tracing"]["execution_steps"]


def test_sidecar_keeps_letters_of_every_language(result: ExportResult) -> None:
    """Text is not escaped, so people can read the file."""
    other = change_part(result, notes=("Größe: 模型",))
    text = sidecar_json(other, other.only_part)
    assert "Größe: 模型" in text
    assert text.endswith("}\n")


def _spoil(sidecar: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    spoiled = copy.deepcopy(sidecar)
    *parents, last = path.split(".")
    place: Any = spoiled
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return spoiled


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("modules", None),
        ("extra", 1),
        ("export_context.strategy", "other"),
        ("export_context.seconds", -1),
        ("modules.tag", "Model"),
        ("modules.children.0.tag", "/Model//Leaf"),
        ("modules.children.0.module_type", "torch"),
        ("modules.children.0.extra", 1),
        ("modules.depth", 0),
        ("nodes.Relu", ""),
        ("statistics.sources.guessed", {"count": 1, "percent": 1.0}),
        ("statistics.coverage_percent", 101),
        ("verification.outputs.0.is_equal", "yes"),
        ("outputs.files", []),
        ("outputs.inputs.0.shape", [-1]),
        ("tracing.task", 3),
    ],
)
def test_sidecar_schema_refuses_undocumented_keys(result: ExportResult, path: str, value: Any) -> None:
    """An unknown key, a missing key and a wrong value are found."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(_spoil(sidecar_of(result), path, value), sidecar_schema())


def markdown_of(result: ExportResult) -> str:
    """Return the report of the only part."""
    return render_markdown(export_report(result, result.only_part))


def _section(report: str, title: str) -> str:
    return report.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0].strip()


def test_markdown_report_has_the_sections_of_formats(result: ExportResult) -> None:
    """The sections are, in this order: summary, steps, inputs and outputs, modules, statistics, nodes by module."""
    titles = re.findall(r"^##? (.+)$", markdown_of(result), re.MULTILINE)
    assert [
        "Export of Model",
        "Steps",
        "Inputs and outputs",
        "Modules",
        "How the tags were won",
        "Nodes by module",
    ] == titles


def test_markdown_report_contains_the_tree_with_counts(result: ExportResult) -> None:
    """Each module stands below its parent with path, own nodes, all nodes and parameters."""
    counts, nodes = result.only_part.node_counts(), len(result.only_part.nodes)
    expected = [
        "```text",
        f"Model · {nodes} nodes ({counts['']} own) · 60 parameters",
        f"  Leaf.0  leaves.0 · {node_words(counts['leaves.0'])} · 20 parameters",
        f"  Leaf.1  leaves.1 · {node_words(counts['leaves.1'])} · 20 parameters",
        "```",
    ]
    assert expected == _section(markdown_of(result), "Modules").splitlines()


def test_markdown_report_lists_every_node_once(result: ExportResult) -> None:
    """The table has each node below the tag of its module."""
    section = markdown_of(result).split("## Nodes by module", 1)[1]
    for tag in {node.tag for node in result.only_part.nodes}:
        part = section.split(f"### `{tag}`\n", 1)[1].split("###", 1)[0]
        names = re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)
        assert [node.name for node in result.only_part.nodes if node.tag == tag] == names


def test_markdown_report_tables_are_whole_rows(result: ExportResult) -> None:
    """A bar or a line break in a text does not end its cell."""
    spoiled = change_part(result, notes=("a | b\nc",))
    rows = [line for line in markdown_of(spoiled).splitlines() if line.startswith("|")]
    assert r"| note | a \| b\\nc |" in rows
    widths = {re.sub(r"\\\|", "", row).count("|") for row in rows}
    assert widths <= {3, 4, 5}


def node_words(count: int) -> str:
    """Return a number of nodes as printed in a tree."""
    return f"{count} node{'' if count == 1 else 's'}"


def printed_text(result: ExportResult, limits: TreeLimits | None = None) -> str:
    """Return the text printed into a pipe."""
    stream = io.StringIO()
    print_document(export_document(result, limits), console_for(stream))
    return stream.getvalue()


def test_console_tree_shows_modules_paths_and_counts(result: ExportResult) -> None:
    """A module is one line, indented by guides, without colour codes in a pipe."""
    text = printed_text(result, TreeLimits()).partition("\n\n")[0]
    counts = result.only_part.node_counts()
    lines = [re.sub(r"^[├└─│ ]+", "", line) for line in text.splitlines()]
    assert [
        f"Model · {len(result.only_part.nodes)} nodes ({counts['']} own) · 60 parameters",
        f"Leaf.0 leaves.0 · {node_words(counts['leaves.0'])} · 20 parameters",
        f"Leaf.1 leaves.1 · {node_words(counts['leaves.1'])} · 20 parameters",
    ] == lines


def test_trees_count_nested_modules_into_every_module_above(result: ExportResult) -> None:
    """The root counts all nodes of the file, an inner module its own nodes and those below it."""
    path, totals = result.only_part.tree.nodes[1].path, result.only_part.total_node_counts()
    assert len(result.only_part.nodes) == totals[""]
    deeper = replace(result.only_part.tree.nodes[2], parent=path)
    changed = copy.copy(result.only_part.tree)
    changed.nodes = (*result.only_part.tree.nodes[:2], deeper)
    counts = change_part(result, tree=changed).only_part.total_node_counts()
    assert (totals[path] + totals[deeper.path], totals[deeper.path]) == (counts[path], counts[deeper.path])


def test_trees_in_a_pipe_have_no_colour(result: ExportResult) -> None:
    """Colour codes are for terminals."""
    text = printed_text(result, TreeLimits())
    assert "\x1b" not in text


def test_console_tree_prints_brackets_literally(result: ExportResult) -> None:
    """A module path that looks like markup is printed as text."""
    tree = result.only_part.tree
    odd = replace(tree.nodes[1], path="a[red]b", tag="/Model/Leaf[bold].x")
    changed = copy.copy(tree)
    changed._children = {None: [tree.root], "": [odd]}  # type: ignore[assignment]
    assert "Leaf[bold].x a[red]b · 0 nodes" in printed_text(change_part(result, tree=changed), TreeLimits())


def test_console_summary_has_coverage_verification_and_files(result: ExportResult) -> None:
    """The result is printed in labelled lines, and long lines are not cut."""
    text = printed_text(change_part(result, notes=("A long note. " * 20,)))
    count = len(result.only_part.nodes)
    assert "Model · 60 parameters" in text
    assert f"3 modules (8 registered, with torch.nn layers) · {count} of {count} nodes tagged (100 %)" in text
    assert "ONNX Runtime equals PyTorch (largest relative difference" in text
    assert f"{result.only_part.model_path} (" in text
    assert ("A long note. " * 20).strip() in text


def test_console_summary_without_tags_names_no_sources(result: ExportResult) -> None:
    """A file without hierarchy has no sources."""
    bare = change_part(result, coverage=Coverage(nodes=len(result.only_part.nodes), tagged=0, sources={}))
    assert "sources" not in printed_text(bare)
    assert "sources" in printed_text(result)


def test_result_record_is_json(result: ExportResult) -> None:
    """The record of ``--format json`` is plain JSON, with sizes in bytes and times in milliseconds."""
    record = json.loads(json.dumps(result.as_record(), allow_nan=False))
    assert [{"path": str(file.path), "size_bytes": file.path.stat().st_size} for file in result.files] == record[
        "files"
    ]
    nodes, at_root = len(result.only_part.nodes), result.only_part.node_counts()[""]
    assert {
        "tagged": nodes,
        "percent": 100.0,
        "at_root": at_root,
        "at_root_percent": round(100 * at_root / nodes, 2),
        "sources": dict(result.only_part.coverage.sources),
    } == record["coverage"]
    assert record["verification"]["is_verified"] is True
    for step, timing in zip(record["steps"], result.steps, strict=True):
        assert step["milliseconds"] == pytest.approx(timing.seconds * 1000, abs=0.1)


def test_written_file_sizes_are_reported(result: ExportResult) -> None:
    """The sizes are those of the files, the model first."""
    assert [result.only_part.model_path, result.only_part.model_path.with_name("model_htp_metadata.json")] == [
        file.path for file in result.files
    ]
    assert [file.path.stat().st_size for file in result.files] == [file.size_bytes for file in result.files]


def test_sidecar_infinite_difference_is_null(result: ExportResult, tmp_path: Path) -> None:
    """JSON has no infinity; an infinite difference is null, and the sidecar still fits its schema."""
    draws = [{"y": np.float32([1.0])}, {"y": np.float32([2.0])}]
    wrong = compare_outputs(draws, [{"y": np.float32([[1.0]])}, {"y": np.float32([np.nan])}])
    wrong = replace(wrong, assumed=())
    sidecar = sidecar_of(change_part(result, verification=wrong))
    jsonschema.validate(sidecar, sidecar_schema())
    assert [None, None] == [item["relative_diff"] for item in sidecar["verification"]["outputs"]]
    failed = change_part(result, verification=wrong)
    json.loads(sidecar_json(failed, failed.only_part), parse_constant=pytest.fail)


def test_adapted_sidecar_prints_no_control_character() -> None:
    """Foreign names keep their value, but the text has no character that reverses a line."""
    earlier: dict[str, Any] = {"statistics": {}, "outputs": {}, "notes": []}
    file = DescribedFile("0", (("model.onnx", 1),), {"a\u202eb": "/Net"}, (), Coverage(1, 1, {}))
    text = adapted_sidecar_json(earlier, file)
    assert "\u202e" not in text
    assert {"a\u202eb": "/Net"} == json.loads(text)["nodes"]
