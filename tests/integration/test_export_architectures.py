"""Every architecture exports verified and fully tagged, and each tag is what the forward pass really did."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema
import onnx
import onnx_ir as ir
import pytest
import torch

from checkpoints import CONFIGS, save_checkpoint
from oracle import OPERATOR_FAMILY, ForwardOracle, hierarchy_module
from winml.modelkit import HTPExporter
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.load.model import load_model
from winml.modelkit.load.source import ModelRequest
from winml.modelkit.report.export_result import ExportResult
from winml.modelkit.report.sidecar import sidecar_schema
from winml.modelkit.runtime.feeds import make_feeds

COUNTED = {"MatMul", "Softmax", "LayerNormalization", "Conv"}


def observe(folder: Path) -> tuple[torch.nn.Module, ForwardOracle]:
    """Run the model of a checkpoint once under the oracle."""
    loaded = load_model(ModelRequest(str(folder)))
    feeds = {name: torch.from_numpy(value) for name, value in make_feeds(loaded.inputs, seed=1).items()}
    oracle = ForwardOracle(loaded.model)
    with torch.no_grad(), oracle:
        loaded.model(**feeds, **loaded.forward_kwargs)
    oracle.close()
    return loaded.model, oracle


def check_file(result: ExportResult, model: torch.nn.Module, oracle: ForwardOracle) -> None:
    """Compare the written file with what the oracle saw."""
    onnx.checker.check_model(str(result.model_path), full_check=True)
    proto = onnx.load(result.model_path)
    graph = ir.serde.deserialize_model(proto).graph
    nodes = list(graph.all_nodes())

    # Every node is tagged, names are unique, keys too, and the tag and the module path say the same.
    tags = {node.path: node.tag for node in result.tree}
    assert len({node.name for node in nodes}) == len(nodes)
    for node in nodes:
        tag = read_tag(node)
        assert tag is not None, node.name
        assert tags[tag.module] == tag.tag
        keys = (
            [entry.key for entry in next(n for n in proto.graph.node if n.name == node.name).metadata_props]
            if node.graph is graph
            else []
        )
        assert len(set(keys)) == len(keys)

    # The tree is the modules that ran and are not plain torch.nn.
    assert {hierarchy_module(path, oracle, model) for path in oracle.called} == set(tags)

    # Each weighty operator ran in the module that is written on it.
    expected: Counter[tuple[str, str]] = Counter()
    for (path, operator), times in oracle.counts.items():
        expected[hierarchy_module(path, oracle, model), operator] += times
    found = Counter(
        (node.metadata_props["winml.hierarchy.module"], family)
        for node in nodes
        if (family := OPERATOR_FAMILY.get(node.op_type, node.op_type)) in COUNTED
    )
    assert expected == found

    # Each node that reads a parameter belongs to the module that owns it, unless another module shares it.
    owners = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    for node in nodes:
        for value in node.inputs:
            name = (value.name or "").removesuffix(".transposed") if value is not None else ""
            if name in owners and owners[name] in oracle.stacks and len(value.uses()) == 1:
                assert hierarchy_module(owners[name], oracle, model) == node.metadata_props["winml.hierarchy.module"]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_export_architecture_is_verified_and_tagged_as_it_ran(architecture: str, tmp_path: Path) -> None:
    """The file equals PyTorch on two draws, and its tags equal what hooks saw, node by node."""
    folder = save_checkpoint(architecture, tmp_path / "checkpoint")
    result = HTPExporter().export_checkpoint(ModelRequest(str(folder)), tmp_path / "model.onnx", with_report=True)

    assert result.verification is not None and result.verification.is_verified
    assert 100.0 == result.coverage.percent
    assert {"direct", "parent", "root"} >= set(result.coverage.sources)
    check_file(result, *observe(folder))
    assert [spec.name for spec in result.inputs] == [value.name for value in onnx.load(result.model_path).graph.input]

    sidecar = json.loads((tmp_path / "model_htp_metadata.json").read_text(encoding="utf-8"))
    jsonschema.validate(sidecar, sidecar_schema())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        "model.onnx",
        "model_htp_export_report.md",
        "model_htp_metadata.json",
    ]
