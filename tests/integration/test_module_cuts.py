"""Modules cut out of an exported model, compared with PyTorch's modules call by call."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from checkpoints import build_model, one_layer, save_checkpoint
from winml.modelkit.errors import InputError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.extract.extraction import ExtractOptions, extract_from_file
from winml.modelkit.extract.records import ExtractedModule, ExtractResult
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.tags.carry.carrying import carry_tags

Exporter = Callable[..., Path]

ARCHITECTURES = ("bert", "albert", "gpt2", "t5", "bart", "resnet")
CALLED_TWICE = {"albert": 4}
"""Number of modules called once for each of the two layers, which share weights."""
_OF_TWO_LAYERS = {"bert", "albert"}
"""Architectures with two layers, which must differ; one layer is enough for the others."""
CLOSE = 1e-4
"""Chosen tolerance between an export and PyTorch."""


def _sizes(architecture: str) -> dict[str, Any]:
    return {} if architecture in _OF_TWO_LAYERS else one_layer(architecture)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """Return the function that exports a small model of an architecture, once."""
    files: dict[tuple[str, bool], Path] = {}

    def export(architecture: str, *, dynamic: bool = False) -> Path:
        key = (architecture, dynamic)
        if key not in files:
            folder = tmp_path_factory.mktemp(architecture)
            checkpoint = save_checkpoint(architecture, folder / "checkpoint", **_sizes(architecture))
            request = ModelRequest(
                model=str(checkpoint), cache=False, dynamic=DynamicRequest(batch=dynamic, sequence=dynamic)
            )
            HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, folder / "model.onnx")
            files[key] = folder / "model.onnx"
        return files[key]

    return export


def _extract(path: Path, folder: Path, selector: str = "**", **options: Any) -> ExtractResult:
    run = RunOptions(shown=path.name, **options)
    return extract_from_file(path, selector, folder, ExtractOptions(run, with_inputs=True))


def _draw(path: Path, folder: Path) -> dict[str, Any]:
    """Draw inputs for a file with fixed sizes and write them for ``--input-data``."""
    texts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    specs = [InputTensorSpec.model_validate_json(json.dumps(entry)) for entry in json.loads(texts["winml.io.inputs"])]
    feeds = make_feeds(specs, 3)
    np.savez(folder / "feeds.npz", **feeds)
    return feeds


def _record_pytorch(model: Any, feeds: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Return module path → output tensors of each call."""
    seen: dict[str, list[list[Any]]] = defaultdict(list)

    def keep(path: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            seen[path].append([tensor.clone().numpy() for tensor in _tensors(output)])

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(keep(path))
    with torch.no_grad():
        model(**{name: torch.from_numpy(array) for name, array in feeds.items()}, return_dict=True)
    return seen


def _tensors(output: Any) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else []
    return [tensor for value in values for tensor in _tensors(value)]


def _is_among(array: Any, others: list[Any]) -> bool:
    scale = max(float(np.abs(array).max(initial=0)), 1e-6)
    return any(array.shape == other.shape and np.abs(array - other).max(initial=0) <= CLOSE * scale for other in others)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_cut_module_equals_pytorch(architecture: str, exported: Exporter, tmp_path: Path) -> None:
    """Outputs of each call of each module equal the whole file's bit for bit, and PyTorch's within the tolerance.

    Each file is valid, has its metadata, and runs optimized as well.
    """
    path = exported(architecture)
    feeds = _draw(path, tmp_path)
    result = _extract(path, tmp_path / "cut", input_data=tmp_path / "feeds.npz")
    assert () == result.refused
    seen = _record_pytorch(build_model(architecture, **_sizes(architecture)), feeds)
    for module in result.modules:
        assert 0 == module.max_abs_diff
        assert module.identity.calls == len(seen[module.identity.module]), module.identity
        given = seen[module.identity.module][module.identity.call - 1]
        answers = _run_as_others_do(tmp_path / "cut", module)
        assert any(_is_among(array, given) for array in answers), module.identity
        _check_metadata(tmp_path / "cut" / module.file, module)
    assert CALLED_TWICE.get(architecture, 0) == sum(module.identity.call == 2 for module in result.modules)


def _run_as_others_do(folder: Path, module: ExtractedModule) -> list[Any]:
    """Run a cut module on its recorded inputs, and check that the outputs are close to the recorded ones."""
    session = onnxruntime.InferenceSession(folder / module.file)
    with np.load(folder / str(module.inputs_file)) as inputs, np.load(folder / str(module.outputs_file)) as recorded:
        answers = session.run(list(recorded), dict(inputs))
        for array, expected in zip(answers, recorded.values(), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-4)
    return list(answers)


def _check_metadata(file: Path, module: ExtractedModule) -> None:
    onnx.checker.check_model(str(file), full_check=True)
    texts = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert module.identity.as_record() == json.loads(texts["winml.module"])
    assert list(module.inputs) == json.loads(texts["winml.io.inputs"])
    tags = {entry["tag"] for entry in json.loads(texts["winml.hierarchy.tree"])}
    assert {node.metadata_props["winml.hierarchy.tag"] for node in ir.load(file).graph.all_nodes()} <= tags


def test_open_dimensions_stay_open(exported: Exporter, tmp_path: Path) -> None:
    """A module of a file with dynamic sizes accepts other sizes."""
    sizes = {"batch": 2, "sequence": 17}
    result = _extract(exported("bert", dynamic=True), tmp_path, "encoder.layer.0.output", sizes=sizes)
    (module,) = result.modules
    assert [[str, str, int]] * 2 == [[type(size) for size in value["shape"]] for value in module.inputs]
    with np.load(tmp_path / str(module.inputs_file)) as inputs, np.load(tmp_path / str(module.outputs_file)) as outputs:
        feeds = {name: array[:1, :9] for name, array in inputs.items()}
        (expected,) = (array[:1, :9] for array in outputs.values())
    (answer,) = onnxruntime.InferenceSession(tmp_path / module.file).run(None, feeds)
    np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "resnet"])
def test_modules_of_an_optimized_file_are_cut(architecture: str, exported: Exporter, tmp_path: Path) -> None:
    """Modules can be cut despite fused operators and nodes shared between modules."""
    optimized = _optimized(exported(architecture), tmp_path)
    result = _extract(optimized, tmp_path / "cut")
    assert () == result.refused
    assert all(module.max_abs_diff == 0 for module in result.modules)
    assert len(result.modules) >= 10


def test_modules_of_a_file_in_any_order_of_nodes_are_cut(exported: Exporter, tmp_path: Path) -> None:
    """Other tools write nodes in any order, and ONNX Runtime accepts it."""
    model = onnx.load(exported("bert"))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "reversed.onnx")
    result, expected = (_extract(path, tmp_path / path.stem) for path in (tmp_path / "reversed.onnx", exported("bert")))
    assert () == result.refused
    assert [(module.file, module.nodes) for module in expected.modules] == [
        (module.file, module.nodes) for module in result.modules
    ]


def test_calls_an_optimizer_mixed_are_refused(exported: Exporter, tmp_path: Path) -> None:
    """A module is refused if its calls cannot be told apart, and other modules are cut."""
    result = _extract(_optimized(exported("albert"), tmp_path), tmp_path / "cut")
    assert {"AlbertAttention", "AlbertLayer", "AlbertLayerGroup"} == {
        item.identity.class_name for item in result.refused
    }
    assert all("called 2 times" in item.reason for item in result.refused)
    assert {"AlbertModel", "AlbertEmbeddings", "AlbertTransformer"} <= {
        item.identity.class_name for item in result.modules
    }


def _optimized(path: Path, folder: Path) -> Path:
    """Optimize a file with ONNX Runtime, and transfer the lost tags."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "raw.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options)
    before, after = ir.load(path), ir.load(folder / "raw.onnx")
    assert len(after.graph) < len(before.graph)
    carry_tags(before, after)
    after.metadata_props.update(before.metadata_props)
    ir.save(after, folder / "optimized.onnx")
    return folder / "optimized.onnx"


def test_untagged_file_is_refused_with_advice(exported: Exporter, tmp_path: Path) -> None:
    """A file whose nodes have no names either has no modules."""
    model = onnx.load(exported("resnet"))
    for node in model.graph.node:
        del node.metadata_props[:]
        node.name = ""
    onnx.save(model, tmp_path / "bare.onnx")
    with pytest.raises(InputError, match=r"bare\.onnx: (.|\n)*winml retag"):
        _extract(tmp_path / "bare.onnx", tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
