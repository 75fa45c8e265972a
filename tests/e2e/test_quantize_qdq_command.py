"""``winml quantize --mode qdq``: output, files and exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import to_array

from e2e.workplace import Workplace


@pytest.fixture(scope="module")
def exported(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> Path:
    """An export of bert-tiny."""
    workplace = make_workplace()
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", "-q")
    assert 0 == outcome.code, outcome.err
    return workplace.folder / "model.onnx"


@pytest.fixture
def model(exported: Path, workplace: Workplace) -> Path:
    """The export in the current folder of the commands, and a folder of two samples."""
    folder = workplace.folder / "samples"
    folder.mkdir()
    shapes = {
        value.name: [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        for value in onnx.load(exported).graph.input
    }
    for seed in range(2):
        drawn = np.random.default_rng(seed)
        rows = {name: np.ones(shape, np.int64) for name, shape in shapes.items()}
        rows["input_ids"] = drawn.integers(0, 90, shapes["input_ids"])
        rows["token_type_ids"] = drawn.integers(0, 2, shapes["token_type_ids"])
        np.savez(folder / f"{seed}.npz", **rows)
    return Path(shutil.copyfile(exported, workplace.folder / "model.onnx"))


@pytest.mark.usefixtures("model")
def test_layers_between_conversions_keep_their_modules(workplace: Workplace) -> None:
    """Every node is tagged, an excluded module computes with floats, and the record has the source of the ranges."""
    outcome = workplace.winml(
        "quantize", "-m", "model.onnx", "-o", "out.onnx", "--mode", "qdq", "--precision", "w8a8", "--format", "json",
        "--calibration-data", "samples", "--exclude", "BertPooler", "--min-sqnr", "15",
    )  # fmt: skip
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert {"data": "samples", "samples": 2, "method": "minmax"} == record["calibration"]
    assert (100.0, True) == (record["coverage"]["percent"], record["verification"]["is_verified"])
    assert {"excluded by BertPooler": 1} == record["left"]
    written = onnx.load(workplace.folder / "out.onnx")
    onnx.checker.check_model(written)
    for node in written.graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        assert metadata["winml.hierarchy.tag"], node.name
        if node.op_type.endswith("Linear"):
            assert "w8a8" == json.loads(metadata["winml.quantization"])["precision"]
            assert not metadata["winml.hierarchy.tag"].endswith("BertPooler")


@pytest.mark.usefixtures("model")
def test_summary_without_data_has_a_note(workplace: Workplace) -> None:
    """Random values do not count as data."""
    outcome = workplace.winml("quantize", "-m", "model.onnx", "-o", "out.onnx", "--mode", "qdq", "--samples", "2")
    assert 0 == outcome.code, outcome.err
    words = " ".join(outcome.out.split())
    assert "random values" in words
    assert "Use --calibration-data or --dataset for a result that you deploy." in words


@pytest.mark.usefixtures("model")
def test_16_bit_activations_have_a_note_on_speed(workplace: Workplace) -> None:
    """ONNX Runtime's CPU provider computes them in float32; the outputs are more exact."""
    outcome = workplace.winml(
        "quantize", "-m", "model.onnx", "-o", "out.onnx", "--precision", "w8a16", "--calibration-data", "samples"
    )
    assert 0 == outcome.code, outcome.err
    assert "16-bit activations" in " ".join(outcome.out.split())


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--mode", "qdq", "--calibration-data", "gone.npz"), 2, "--calibration-data gone.npz"),
        (("--mode", "dynamic", "--calibration-data", "samples"), 2, "--calibration-data samples"),
        (("--mode", "qdq", "--asymmetric"), 2, "zero point"),
        (("--mode", "qdq", "--calibration-data", "samples", "--samples", "9"), 2, "2 samples, but --samples"),
    ],
)
def test_failure_writes_nothing(workplace: Workplace, arguments: tuple[str, ...], code: int, words: str) -> None:
    """The error is one sentence with a remedy."""
    outcome = workplace.winml("quantize", "-m", "model.onnx", "-o", "out.onnx", *arguments)
    assert code == outcome.code, outcome.err
    assert words in outcome.complaint[0]
    assert 2 == len(outcome.complaint)
    assert "out.onnx" not in workplace.files()


def _quantized(workplace: Workplace, output: str, *arguments: str) -> dict[str, Any]:
    common = ("-m", "model.onnx", "-o", output, "--mode", "qdq", "--min-sqnr", "-50", "--overwrite", "--format", "json")
    outcome = workplace.winml("quantize", *common, *arguments)
    assert 0 == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


@pytest.mark.usefixtures("model")
def test_second_placement_reads_the_statistics_of_the_first(workplace: Workplace) -> None:
    """Another placement or method extends the file of statistics by module, and the file changes no result."""
    cache = workplace.folder / "statistics.json"
    data = ("--calibration-data", "samples", "--calibration-cache", "statistics.json")
    for number, arguments in enumerate((("-p", "w8a8"), ("-p", "w8a8", "--ep", "qnn"), ("-p", "w8a16", "--ep", "qnn"))):
        before = cache.read_text("utf-8") if cache.exists() else ""
        _quantized(workplace, f"cached{number}.onnx", *arguments, *data)
        # With 16 bits QNN needs no value that it does not need with 8: the last run measures nothing.
        assert (number == 2) == (before == cache.read_text("utf-8"))
        _quantized(workplace, f"fresh{number}.onnx", *arguments, "--calibration-data", "samples")
        cached, fresh = (onnx.load(workplace.folder / f"{kind}{number}.onnx") for kind in ("cached", "fresh"))
        assert list(cached.graph.node) == list(fresh.graph.node)
        for one, other in zip(cached.graph.initializer, fresh.graph.initializer, strict=True):
            if one.name.endswith("_scale"):
                # One value of two graphs, with and without fusions, differs by rounding.
                assert np.allclose(to_array(one), to_array(other), rtol=1e-4), one.name
    modules = json.loads(cache.read_text("utf-8"))["modules"]
    assert any(tag.endswith("BertSelfAttention") for tag in modules)


@pytest.mark.usefixtures("model")
def test_statistics_of_other_samples_are_refused(workplace: Workplace) -> None:
    """The file names its samples; another file is not replaced."""
    cache = workplace.folder / "statistics.json"
    _quantized(workplace, "one.onnx", "--calibration-cache", "statistics.json", "--calibration-data", "samples")
    stored = cache.read_bytes()
    other = ("quantize", "-m", "model.onnx", "-o", "two.onnx", "--mode", "qdq", "--calibration-cache")
    outcome = workplace.winml(*other, "statistics.json")
    assert 2 == outcome.code
    assert "different samples" in outcome.err
    (workplace.folder / "notes.json").write_text('{"a": 1}', "utf-8")
    assert 2 == workplace.winml(*other, "notes.json").code
    assert 2 == workplace.winml(*other, "model.onnx").code
    assert (stored, False) == (cache.read_bytes(), (workplace.folder / "two.onnx").exists())


@pytest.mark.usefixtures("model")
def test_smoothed_model_is_quantized_by_both_ways(workplace: Workplace) -> None:
    """SmoothQuant measures activations in dynamic mode, too, and new nodes have a module."""
    for mode in ("dynamic", "qdq"):
        record = _quantized(workplace, f"{mode}.onnx", "--mode", mode, "--smooth-quant", "0.5")
        assert 100.0 == record["coverage"]["percent"]
        assert any("SmoothQuant" in note for note in record["notes"])
    refused = ("quantize", "-m", "model.onnx", "-o", "x.onnx", "--mode", "dynamic", "--calibration-data", "samples")
    outcome = workplace.winml(*refused)
    assert (2, True) == (outcome.code, "--smooth-quant" in outcome.err)
    assert 2 == workplace.winml("quantize", "-m", "model.onnx", "-o", "x.onnx", "--smooth-quant", "1.5").code
