"""Localization of an error planted in one module, for transformed files and several references."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from checkpoints import build_model, save_checkpoint
from e2e.in_process import run_here
from winml.modelkit import CompareOptions, WinMLExportConfig, compare_models, optimize_onnx, quantize_onnx
from winml.modelkit.compare.records import ModelComparison
from winml.modelkit.errors import UsageError
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.metadata_keys import MODEL_KEY, MODULE_KEY
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.opened_model import RunOptions

SIZES = {"bert": {"num_hidden_layers": 3}, "gpt2": {"n_layer": 3}, "vit": {"num_hidden_layers": 3}}
"""Three layers each, so that the planted module is neither the first nor the last."""


@pytest.fixture(scope="module", params=SIZES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint and its export, optimized and quantized."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    checkpoint = save_checkpoint(request.param, folder / "checkpoint", **SIZES[request.param])
    exporter = HTPExporter(WinMLExportConfig(verify=False))
    exporter.export_checkpoint(ModelRequest(model=str(checkpoint), cache=False), folder / "plain.onnx")
    optimize_onnx(folder / "plain.onnx", folder / "optimized.onnx", level="full")
    # Small random layers lose more than trained ones, and the loss is not tested here.
    quantize_onnx(folder / "plain.onnx", folder / "quantized.onnx", verify=False)
    return folder


def planted(source: Path, target: Path, change: Callable[[np.ndarray], np.ndarray]) -> str:
    """Change a weight in the middle of a model, write the model and return the module path of the weight.

    In a quantized layer the scale is changed.
    """
    model = onnx.load(source)
    readers = [
        (node, name)
        for node in model.graph.node
        for name in node.input
        if node.op_type in ("MatMul", "Gemm", "MatMulInteger", "Mul", "FusedMatMul", "FusedGemm", "Attention")
    ]
    weights = {item.name: item for item in model.graph.initializer}
    fitting = [
        (node, weights[name])
        for node, name in readers
        if name in weights
        and weights[name].data_type == onnx.TensorProto.FLOAT
        and (name.endswith("_scale") if node.op_type == "Mul" else len(weights[name].dims) == 2)
    ]
    node, weight = fitting[len(fitting) // 2]
    array = change(numpy_helper.to_array(weight).copy())
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, target)
    return next(entry.value for entry in node.metadata_props if entry.key == MODULE_KEY)


def compared(reference: Any, candidate: Any) -> ModelComparison:
    """Compare two models module by module."""
    return compare_models(reference, candidate, by_module=True)


def first_erring_module(result: ModelComparison) -> str | None:
    """Return the path of the first module with an error of its own."""
    return None if result.first_divergence is None else result.first_divergence.identity.module


@pytest.mark.parametrize("kind", ["plain", "optimized", "quantized"])
def test_planted_error_is_located_in_its_module(exported: Path, kind: str, tmp_path: Path) -> None:
    """The first module with an error of its own is the changed one, despite rounding in all modules."""
    module = planted(exported / f"{kind}.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(4.0))

    assert first_erring_module(compared(exported / "plain.onnx", tmp_path / "wrong.onnx")) == module


@pytest.mark.parametrize("kind", ["plain", "optimized", "quantized"])
@pytest.mark.parametrize("exported", ["bert", "gpt2"], indirect=True)
def test_wrong_mask_is_located_in_its_attention(exported: Path, kind: str, tmp_path: Path) -> None:
    """An attention with a flipped mask is named although its weights are correct."""
    model = onnx.load(exported / f"{kind}.onnx")
    readers = [(node, index) for node in model.graph.node for index in _mask_inputs(node)]
    node, index = readers[len(readers) // 2]
    # The mask of a batch of sentences, reversed along the attended positions.
    flipped = onnx.helper.make_node(
        "Slice", [node.input[index], "start", "end", "axis", "step"], ["flipped"], "flipping"
    )
    flipped.metadata_props.extend(node.metadata_props)
    for name, value in (("start", -1), ("end", np.iinfo(np.int64).min), ("axis", -1), ("step", -1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
    model.graph.node.insert(list(model.graph.node).index(node), flipped)
    node.input[index] = "flipped"
    onnx.save(model, tmp_path / "wrong.onnx")

    assert first_erring_module(compared(exported / "plain.onnx", tmp_path / "wrong.onnx")) == _module_of(node)


def _mask_inputs(node: onnx.NodeProto) -> list[int]:
    """Return the positions of the attention mask among the inputs of a node."""
    if node.op_type == "MultiHeadAttention":
        return [5] if len(node.input) > 5 and node.input[5] else []
    is_sum_with_mask = node.op_type == "Add" and any(name.endswith("/Where_output_0") for name in node.input)
    return [list(node.input).index(name) for name in node.input if is_sum_with_mask and "/Where" in name]


def test_float16_overflow_is_located_in_its_module(exported: Path, tmp_path: Path) -> None:
    """Products of large weights are infinite in float16 only; the first such module is named."""
    large = {name: tmp_path / f"{name}.onnx" for name in ("plain", "half")}

    def enlarged(array: np.ndarray) -> np.ndarray:
        return (array * (6e4 / np.abs(array).max())).astype(array.dtype)

    module = planted(exported / "plain.onnx", large["plain"], enlarged)
    quantize_onnx(large["plain"], large["half"], precision="fp16", verify=False)

    result = compared(large["plain"], large["half"])

    assert any("half.onnx are rounded as on a device" in note for note in result.notes)
    first = result.first_divergence
    assert first is not None
    assert first.identity.module == module
    assert first.fidelity is not None
    assert "first at [" in first.fidelity.problem


def test_rounding_is_not_attributed_to_a_module(exported: Path) -> None:
    """Rounding by optimization or quantization of all modules is not attributed to a module."""
    for kind in ("optimized", "quantized"):
        result = compared(exported / "plain.onnx", exported / f"{kind}.onnx")
        assert result.first_divergence is None, kind
        assert result.modules is not None
        seen = [module for module in result.modules if module.fidelity is not None]
        assert len(seen) >= 0.8 * len(result.modules)


def test_file_is_compared_with_the_pytorch_model(exported: Path, tmp_path: Path) -> None:
    """Outputs of PyTorch's modules equal the node values of the file, except for the planted module."""
    request = ModelRequest(model=str(exported / "checkpoint"))
    right = compared(request, exported / "plain.onnx")
    assert first_erring_module(right) is None
    assert max(output.fidelity.relative_error for output in right.outputs) < 1e-4
    assert right.modules is not None
    assert sum(module.fidelity is not None for module in right.modules) >= 0.8 * len(right.modules)

    module = planted(exported / "plain.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(4.0))
    assert first_erring_module(compared(request, tmp_path / "wrong.onnx")) == module


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_live_modules_are_compared_with_each_other_and_with_a_file(exported: Path) -> None:
    """Outputs of modules are compared by path, and no hook stays on the modules."""
    import torch

    right, wrong = (build_model("bert", **SIZES["bert"]) for _ in range(2))
    with torch.no_grad():
        wrong.encoder.layer[1].intermediate.dense.weight *= 1.5

    for reference, candidate in ((right, wrong), (exported / "plain.onnx", wrong), (wrong, exported / "plain.onnx")):
        assert first_erring_module(compared(reference, candidate)) == "encoder.layer.1.intermediate"
    assert first_erring_module(compared(right, exported / "optimized.onnx")) is None
    assert not any(module._forward_hooks for module in wrong.modules())
    with pytest.raises(UsageError, match="same BertModel"):
        compared(right, right)


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_unchanged_modules_are_marked(exported: Path, tmp_path: Path) -> None:
    """Weights are compared by content; a module behind a wrong one counts as unchanged, even with another output."""
    module = planted(exported / "plain.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(1.01))
    records = compared(exported / "plain.onnx", tmp_path / "wrong.onnx").as_record()["modules"]
    assert [module] == [record["module"] for record in records if not record["unchanged"]]
    quantized = compared(exported / "plain.onnx", exported / "quantized.onnx")
    assert quantized.modules is not None
    assert {True, False} == {entry.is_unchanged for entry in quantized.modules}


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_command_names_the_wrong_module_and_the_difference(exported: Path, tmp_path: Path) -> None:
    """An output beyond the threshold gives exit code 3; the record names the module."""
    module = planted(exported / "plain.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(4.0))
    plain, wrong = exported / "plain.onnx", tmp_path / "wrong.onnx"

    assert run_here("compare", plain, plain, "--threshold", "1e-6").code == 0
    answer = run_here("compare", plain, wrong, "--by-module", "--threshold", "1e-6", "--format", "json")

    assert answer.code == 3
    record = json.loads(answer.out)
    assert record["first_divergence"]["module"] == module
    assert record["first_divergence"]["value"] > record["threshold"]
    files = [tmp_path / name for name in ("page.html", "nodes.json")]
    told = run_here("compare", plain, wrong, "--by-module", "--report", files[0], "--node-data", files[1])
    assert f"{module} diverges first" in told.out
    page = files[0].read_text(encoding="utf-8")
    assert "first to diverge" in page
    assert f'<a href="{files[1].name}">' in page
    (values,) = json.loads(files[1].read_text(encoding="utf-8")).values()
    wrong_nodes = {name for name, entry in values["results"].items() if entry["value"] > record["threshold"]}
    assert wrong_nodes == {node.name for node in onnx.load(wrong).graph.node if _module_of(node) == module}
    assert run_here("compare", plain, wrong, "--report", files[0], "--overwrite").code == 2


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_depth_shows_the_first_levels_and_the_first_module_to_part(exported: Path, tmp_path: Path) -> None:
    """The terminal, JSON and the page show the first levels and the named module at any depth."""
    module = planted(exported / "plain.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(4.0))
    plain, wrong, page = exported / "plain.onnx", tmp_path / "wrong.onnx", tmp_path / "page.html"
    asked = ("compare", plain, wrong, "--by-module", "--depth", "2")

    whole = json.loads(run_here("compare", plain, wrong, "--by-module", "-f", "json").out)
    record = json.loads(run_here(*asked, "--report", page, "-f", "json").out)
    shown = [item for item in whole["modules"] if item["tag"].count("/") <= 2 or item["module"] == module]
    assert len(shown) < len(whole["modules"])
    assert shown == record["modules"]
    assert whole["first_divergence"] == record["first_divergence"]
    assert len(shown) == len(walk_rows(page, "modules")) + len(walk_rows(page, "missing"))
    told = run_here(*asked, "--verbose").out
    assert all(item["module"] in told for item in shown)
    assert 2 == run_here("compare", plain, wrong, "--depth", "2").code


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_page_links_an_existing_outline_and_begins_with_numbers(exported: Path, tmp_path: Path) -> None:
    """Modules that were not compared have no numbers; a separate table lists them with the reason."""
    planted(exported / "plain.onnx", tmp_path / "wrong.onnx", lambda array: array * np.float32(4.0))
    wrong, fused = (
        (exported / "plain.onnx", tmp_path / "wrong.onnx"),
        (exported / "checkpoint", exported / "optimized.onnx"),
    )
    for pair, has_first in ((wrong, True), (fused, False)):
        page = tmp_path / f"{pair[1].stem}.html"
        asked = ("compare", *pair, "--by-module", "--report", page, "-f", "json")
        modules = json.loads(run_here(*asked).out)["modules"]
        assert has_first == ("outline mark the first module" in page.read_text(encoding="utf-8"))
        without = [item["reason"] for item in modules if item["value"] is None]
        assert without == [row[-1] for row in walk_rows(page, "missing")]
        assert not any("–" in row for row in walk_rows(page, "modules")[:3])
    assert without


def walk_rows(page: Path, table: str) -> list[list[str]]:
    """Return the cells of a table on a page; `[]` if the page has no such table."""
    text = page.read_text(encoding="utf-8").replace("<wbr>", "")
    body = text.partition(f'<table id="{table}">')[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.splitlines() if row.startswith("<tr><td")]


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_size_fixed_on_one_side_is_used_for_both(exported: Path, tmp_path: Path) -> None:
    """A file with a dynamic batch is compared at the other file's fixed batch; a conflicting size is refused."""
    request = ModelRequest(model=str(exported / "checkpoint"))
    exporter = HTPExporter(WinMLExportConfig(verify=False, dynamic_batch=True, dynamic_sequence=True))
    exporter.export_checkpoint(request, tmp_path / "open.onnx")
    result = compare_models(exported / "plain.onnx", tmp_path / "open.onnx", threshold=1e-4)
    assert result.is_within
    assert any("fixed sizes" in note for note in result.notes), result.notes
    with pytest.raises(UsageError, match="takes 1 only"):
        compare_models(exported / "plain.onnx", tmp_path / "open.onnx", run=RunOptions("open.onnx", sizes={"batch": 3}))


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_differently_named_inputs_are_refused_without_a_mapping(exported: Path, tmp_path: Path) -> None:
    """Differently named inputs need a mapping; the message names both inputs."""
    model = onnx.load(exported / "plain.onnx")
    name = model.graph.input[0].name
    for node in model.graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = "renamed"
    model.graph.input[0].name = "renamed"
    onnx.save(model, tmp_path / "renamed.onnx")

    run = RunOptions("renamed.onnx")
    with pytest.raises(UsageError, match="with names ") as refusal:
        compare_models(exported / "plain.onnx", tmp_path / "renamed.onnx", CompareOptions(run))
    assert name in refusal.value.message
    with pytest.raises(UsageError) as turned:
        compare_models(exported / "plain.onnx", tmp_path / "renamed.onnx", names={"renamed": name})
    assert f"names {name}=renamed" in turned.value.hint
    mapped = CompareOptions(run, names={name: "renamed"}, threshold=1e-6)
    assert compare_models(exported / "plain.onnx", tmp_path / "renamed.onnx", mapped).is_within


def test_module_with_wrong_inputs_is_not_blamed(exported: Path, tmp_path: Path) -> None:
    """An activation may amplify a wrong input value; the module that computed the value is named."""
    model = onnx.load(exported / "plain.onnx")
    weights = {item.name: item for item in model.graph.initializer}
    modules = {node.name: _module_of(node) for node in model.graph.node}
    for node in model.graph.node:
        inner = [path for path in modules.values() if path.startswith(f"{modules[node.name]}.")]
        names = [name for name in node.input if name in weights and len(weights[name].dims) == 2]
        # A product in a module that also calls an activation on the result.
        if names and any(path.endswith(("act", "act_fn", "activation_fn")) for path in inner):
            break
    else:
        pytest.skip("no module of this model calls an activation of its own")
    scaled = numpy_helper.to_array(weights[names[0]]) * np.float32(1.3)
    weights[names[0]].CopyFrom(numpy_helper.from_array(scaled, names[0]))
    onnx.save(model, tmp_path / "wrong.onnx")

    for reference in (exported / "plain.onnx", exported / "checkpoint"):
        assert first_erring_module(compared(reference, tmp_path / "wrong.onnx")) == modules[node.name]


def _module_of(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), "")


def test_checkpoint_without_pooler_is_compared_with_the_recorded_seed(tmp_path: Path) -> None:
    """The random pooler of an export is drawn again from the recorded seed, for the file on either side."""
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint", class_name="BertForMaskedLM")
    request = ModelRequest(model=str(checkpoint), task="feature-extraction", seed=3)
    file = tmp_path / "model.onnx"
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, file)
    named = ModelRequest(model=str(checkpoint), task="feature-extraction")
    for pair in ((named, file), (file, named)):
        outputs = {output.fidelity.name: output.fidelity for output in compare_models(*pair).outputs}
        assert outputs["pooler_output"].sqnr_db > 80
    unrecorded = onnx.load(file)
    entry = next(entry for entry in unrecorded.metadata_props if entry.key == MODEL_KEY)
    entry.value = json.dumps({key: value for key, value in json.loads(entry.value).items() if key != "seed"})
    onnx.save(unrecorded, file)
    outputs = {output.fidelity.name: output.fidelity for output in compare_models(named, file).outputs}
    assert outputs["pooler_output"].sqnr_db < 10
