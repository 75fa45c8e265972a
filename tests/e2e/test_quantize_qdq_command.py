"""``winml quantize --mode qdq`` from a shell: what it says, what it writes, how it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

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
    """Every node is tagged, an excluded module reads floats, and the file says where the ranges came from."""
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
def test_summary_without_data_says_so(workplace: Workplace) -> None:
    """Random values are no data."""
    outcome = workplace.winml("quantize", "-m", "model.onnx", "-o", "out.onnx", "--mode", "qdq", "--samples", "2")
    assert 0 == outcome.code, outcome.err
    words = " ".join(outcome.out.split())
    assert "random values" in words
    assert "Give --calibration-data before you use the result." in words


@pytest.mark.usefixtures("model")
def test_16_bit_activations_are_told_to_be_slow_here(workplace: Workplace) -> None:
    """ONNX Runtime's CPU provider computes them in float32; the answer is nearer."""
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
        (("--calibration-data", "samples"), 2, "--calibration-data samples"),
        (("--mode", "qdq", "--asymmetric"), 2, "zero point"),
        (("--mode", "qdq", "--calibration-data", "samples", "--samples", "9"), 2, "holds 2 samples"),
    ],
)
def test_failure_writes_nothing(workplace: Workplace, arguments: tuple[str, ...], code: int, words: str) -> None:
    """One sentence, one next step."""
    outcome = workplace.winml("quantize", "-m", "model.onnx", "-o", "out.onnx", *arguments)
    assert code == outcome.code, outcome.err
    assert words in outcome.complaint[0]
    assert 2 == len(outcome.complaint)
    assert "out.onnx" not in workplace.files()
