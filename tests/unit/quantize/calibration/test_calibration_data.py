"""Samples for ranges: read from a user's files, made of texts, or random; refusals of unusable data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from unit.quantize.qdq_graphs import tagged_graph
from winml.modelkit.errors import InputError, OutputExistsError, QuantizeError, UsageError, VerificationError
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.calibration.calibration_data import Calibration
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.records import QuantizedFile
from winml.modelkit.quantize.verb import quantize_onnx
from winml.modelkit.samples.data_sets import DataSet

BODY = "m (float[batch, 4] x) => (float[batch, 4] y) { h = MatMul (x, w1) a = Relu (h) y = MatMul (a, w2) }"
TEXT_BODY = """m (int64[batch, length] input_ids) => (float[batch, length, 4] y) {
    e = Gather (w1, input_ids) y = MatMul (e, w2) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tagged file of two products."""
    graph = tagged_graph(BODY, ("/M/Up", "/M", "/M/Down"), {"w1": (4, 4), "w2": (4, 4)})
    ir.save(graph, tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five samples of three rows."""
    folder = tmp_path / "samples"
    folder.mkdir()
    for seed in range(5):
        np.savez(folder / f"{seed}.npz", x=_rows(seed))
    return folder


def _rows(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)


def _quantize(model: Path, **options: Any) -> QuantizedFile:
    return quantize_onnx(model, model.with_name("out.onnx"), precision="int8", mode="qdq", overwrite=True, **options)


def _scale_of_x(path: Path) -> float:
    proto = onnx.load(path)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "x_scale")
    return float(onnx.numpy_helper.to_array(tensor))


def test_ranges_come_from_all_files_of_a_folder(model: Path, folder: Path) -> None:
    """The scale follows from the extremes of the five files; the metadata name the data without a path."""
    result = _quantize(model, calibration_data=str(folder))
    rows = np.concatenate([_rows(seed) for seed in range(5)])
    assert (rows.max() - rows.min()) / 255 == pytest.approx(_scale_of_x(result.model_path), rel=1e-5)
    written = {entry.key: entry.value for entry in onnx.load(result.model_path).metadata_props}[QUANTIZATION_KEY]
    assert {"data": "samples", "samples": 5, "method": "minmax"} == json.loads(written)["calibration"]
    assert str(folder) not in written
    assert result.calibration is not None
    assert "5 samples of samples, minmax" == result.calibration.words
    assert not any("random" in note for note in result.notes)
    assert result.fidelity is not None
    assert 5 == result.fidelity.draws, "the result is compared on the data"


def test_requested_number_of_samples_is_read(model: Path, folder: Path) -> None:
    """The first in the order of their names."""
    result = _quantize(model, calibration_data=str(folder), samples=1)
    assert (_rows(0).max() - _rows(0).min()) / 255 == pytest.approx(_scale_of_x(result.model_path), rel=1e-5)


def test_one_file_is_one_sample(model: Path, folder: Path) -> None:
    """The number of rows does not matter."""
    result = _quantize(model, calibration_data=str(folder / "3.npz"))
    assert result.calibration is not None
    assert 1 == result.calibration.record["samples"]


def test_random_values_without_data_are_noted(model: Path) -> None:
    """A note, the summary and the metadata name the random values; another seed gives other ranges."""
    result = _quantize(model, samples=3)
    assert any("random values" in note and "calibration_data" in note for note in result.notes)
    assert result.calibration is not None
    assert {"data": "random", "samples": 3, "method": "minmax"} == result.as_record()["calibration"]
    first = _scale_of_x(result.model_path)
    assert first == _scale_of_x(_quantize(model, samples=3).model_path)
    assert first != _scale_of_x(_quantize(model, samples=3, seed=1).model_path)


def test_random_values_have_the_requested_sizes(model: Path) -> None:
    """More rows have a wider range."""
    one, many = (
        _scale_of_x(_quantize(model, samples=1, sizes={"batch": size}, verify=False).model_path) for size in (1, 4096)
    )
    assert many > one


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": _rows(0)}, "'z'"),
        ({"x": _rows(0)[:, :3]}, "float32[batch, 4]"),
        ({"x": _rows(0).astype(np.float64)}, "float64[3, 4]"),
        ({}, "'x'"),
    ],
)
def test_array_that_does_not_fit_is_refused(
    model: Path, folder: Path, arrays: dict[str, np.ndarray[Any, Any]], words: str
) -> None:
    """The message names the option, the file and the expected inputs; no file is written."""
    np.savez(folder / "2.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle
    with pytest.raises(UsageError) as caught:
        _quantize(model, calibration_data=str(folder))
    assert caught.value.message.startswith(f"calibration_data {folder / '2.npz'}: ")
    assert words in caught.value.message
    assert not model.with_name("out.onnx").exists()


def test_too_few_samples_are_refused(model: Path, folder: Path) -> None:
    """Fewer samples than requested, or no samples, are refused."""
    with pytest.raises(UsageError, match=r"5 samples.*samples.* 6"):
        _quantize(model, calibration_data=str(folder), samples=6)
    empty = folder.with_name("empty")
    empty.mkdir()
    with pytest.raises(UsageError, match="no sample"):
        _quantize(model, calibration_data=str(empty))


@pytest.mark.parametrize(("name", "error"), [("data.bin", UsageError), ("gone", UsageError), ("bad.npz", InputError)])
def test_data_of_another_form_is_refused(model: Path, name: str, error: type[Exception]) -> None:
    """Missing, damaged and unsupported files are refused by name."""
    if name != "gone":
        model.with_name(name).write_bytes(b"PAR1")
    with pytest.raises(error, match=name):
        _quantize(model, calibration_data=str(model.with_name(name)))


def test_non_finite_data_names_the_module(model: Path, folder: Path) -> None:
    """A range cannot contain infinity."""
    rows = _rows(2)
    rows[0, 0] = 3e38
    rows[0, 1] = 3e38
    np.savez(folder / "2.npz", x=rows * np.float32(1.1))
    with pytest.raises(QuantizeError, match=r"value (a|h) .*/M.* infinite .*sample 3") as caught:
        _quantize(model, calibration_data=str(folder), include=("Down",))
    assert "exclude the" in caught.value.hint


def test_options_of_the_calibration_need_a_mode_that_calibrates(model: Path, folder: Path) -> None:
    """Dynamic ranges have no use for data; without a mode, the data select the mode that calibrates."""
    with pytest.raises(UsageError, match="to dynamic"):
        quantize_onnx(
            model, model.with_name("out.onnx"), precision="int8", mode="dynamic", calibration_data=str(folder)
        )
    there = model.with_name("there.onnx")
    there.write_bytes(b"")
    with pytest.raises(OutputExistsError):
        quantize_onnx(model, there, precision="int8", mode="qdq", calibration_data=str(folder))


def test_result_is_refused_on_its_calibration_data(model: Path, folder: Path) -> None:
    """The comparison is on the user's samples."""
    with pytest.raises(VerificationError, match="SQNR"):
        _quantize(model, calibration_data=str(folder), min_sqnr_db=150.0)


def test_batch_normalization_is_folded_into_the_convolution(tmp_path: Path) -> None:
    """No integer kernel computes batch normalization; a note mentions the fold."""
    body = """m (float[1, 2, 8, 8] x) => (float[1, 4, 6, 6] y) <float[4] s = {1, 2, 1, 0.5}, float[4] b = {0, 1, -1, 2},
        float[4] m = {0.1, 0.2, 0, -0.3}, float[4] v = {1, 0.5, 2, 1}> {
        c = Conv (x, w1) y = BatchNormalization (c, s, b, m, v) }"""
    graph = tagged_graph(body, ("/M/Conv", "/M/Norm"), {"w1": (4, 2, 3, 3)})
    ir.save(graph, tmp_path / "in.onnx")
    result = _quantize(tmp_path / "in.onnx", samples=2)
    assert any("1 batch normalization" in note for note in result.notes)
    assert "BatchNormalization" not in result.after.operators
    assert result.fidelity is not None
    assert result.fidelity.worst.sqnr_db > 25
    assert 100.0 == result.coverage.percent


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A table of 8 words and a product, with the tokenizer of the words beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "the", "dog", "saw", "a", "red", "ball"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]  # typed as its base
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path)
    graph = tagged_graph(TEXT_BODY, ("/M/Table", "/M/Head"), {"w1": (8, 4), "w2": (4, 4)})
    ir.save(graph, tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "the dog\n\nsaw a red ball\n"),
        ("a.csv", "label,text\n1,the dog\n2,saw a red ball\n"),
        ("a.jsonl", '{"sentence": "the dog"}\n{"sentence": "saw a red ball"}\n'),
    ],
)
def test_texts_are_tokenized_with_the_tokenizer_beside_the_model(text_model: Path, name: str, content: str) -> None:
    """Each text is a sample."""
    text_model.with_name(name).write_text(content, encoding="utf-8")
    result = _quantize(text_model, calibration_data=str(text_model.with_name(name)))
    assert result.calibration is not None
    assert f"2 samples of {name}, minmax" == result.calibration.words


def test_rows_without_a_text_are_left_out_and_counted(text_model: Path) -> None:
    texts = text_model.with_name("c.csv")
    texts.write_text("label,text\n1,the dog\n2,\n3,saw a\n", encoding="utf-8")
    result = _quantize(text_model, calibration_data=str(texts))
    assert result.calibration is not None
    assert "2 samples of c.csv, minmax" == result.calibration.words
    assert any("1 of 3 rows" in note for note in result.notes)


def test_values_that_the_model_refuses_are_named(text_model: Path) -> None:
    data = text_model.with_name("far.npz")
    np.savez(data, input_ids=np.full((1, 3), 99))
    with pytest.raises(QuantizeError, match=r"^calibration_data far\.npz"):
        _quantize(text_model, calibration_data=str(data))


def test_texts_without_a_tokenizer_or_a_column_are_refused(text_model: Path) -> None:
    """The message names the missing tokenizer or the existing columns."""
    texts = text_model.with_name("b.csv")
    texts.write_text("label,score\n1,2\n", encoding="utf-8")
    with pytest.raises(UsageError, match="label, score"):
        _quantize(text_model, calibration_data=str(texts))
    other = text_model.parent / "other"
    other.mkdir()
    lonely = other / "in.onnx"
    lonely.write_bytes(text_model.read_bytes())
    (other / "b.txt").write_text("the dog\n", encoding="utf-8")
    with pytest.raises(UsageError, match="beside the"):
        _quantize(lonely, calibration_data=str(other / "b.txt"))


def test_data_set_is_closed_when_the_work_is_done(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of samples is not left open."""
    (tmp_path / "texts.json").write_text('{"text": "the dog"}\n', encoding="utf-8")
    closed: list[DataSet] = []
    close = DataSet.close
    monkeypatch.setattr(DataSet, "close", lambda data: (closed.append(data), close(data)))
    _quantize(text_model, calibration_data=str(tmp_path / "texts.json"))
    assert ["texts.json"] == [data.name for data in closed]


def test_range_dependencies_are_the_read_files(text_model: Path, folder: Path) -> None:
    """Only files of the samples read count; the tokenizer's files count for texts."""
    texts = text_model.with_name("texts.txt")
    texts.write_text("the dog\n", encoding="utf-8")

    def names(data: Path, **options: Any) -> list[str]:
        asked = QuantizeOptions(mode="qdq", calibration_data=str(data), **options)
        calibration = Calibration(asked, text_model.parent, {}, 0, text_model)
        return [path.name for path in calibration.files]

    assert ["0.npz", "1.npz"] == names(folder, samples=2)
    assert ["3.npz"] == names(folder / "3.npz")
    assert ["texts.txt", "tokenizer.json", "tokenizer_config.json"] == names(texts)
