"""Verbs on data sets: a folder of images for a ViT, a table of sentences for a BERT."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import onnx
import pytest
from PIL import Image

from checkpoints import save_checkpoint, save_image_processor
from e2e.in_process import run_here
from e2e.workplace import Outcome
from winml.modelkit.arrays import Arrays
from winml.modelkit.compare import quality_samples
from winml.modelkit.compare.quality_samples import SampleValues
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.data_sets import DataSetRequest

SENTENCES = ["the dog saw a ball", "a red ball", "the ball saw the dog", "a dog", "the red dog saw a red ball"]


def _save_pictures(folder: Path) -> None:
    """Save six images of two classes and of three sizes, one of them damaged."""
    drawn = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(3):
            pixels = drawn.integers(0, 256, (20 + number, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    (folder / "dog" / "2.png").write_bytes(b"no picture")


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "the", "dog", "saw", "a", "red", "ball"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]  # typed as its base
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of a ViT and a BERT, each with its preprocessing files, and data for both."""
    root = tmp_path_factory.mktemp("place")
    vit = save_checkpoint("vit", root / "vit-checkpoint", num_hidden_layers=1)
    save_image_processor(vit, 32)
    bert = save_checkpoint("bert", root / "bert-checkpoint", num_hidden_layers=1)
    _save_tokenizer(bert)
    for checkpoint, folder in ((vit, "vit"), (bert, "bert")):
        (root / folder).mkdir()
        done = run_here("export", "-m", checkpoint, "-o", root / folder / "model.onnx", "--no-verify", "-q")
        assert 0 == done.code, done.err
    _save_pictures(root / "pictures")
    rows = [{"id": number, "sentence": text} for number, text in enumerate(SENTENCES)]
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:3])}
    datasets.DatasetDict(splits).save_to_disk(str(root / "saved"))
    splits["train"].to_parquet(root / "sentences.parquet")
    return root


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands in the folder with the models and the data."""
    monkeypatch.chdir(place)


def _answer(done: Outcome) -> dict[str, Any]:
    assert 0 == done.code, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


def _calibration_of(model: Path) -> dict[str, Any]:
    metadata = {entry.key: entry.value for entry in onnx.load(model, load_external_data=False).metadata_props}
    record: dict[str, Any] = json.loads(metadata["winml.quantization"])["calibration"]
    return record


def test_pictures_calibrate_a_vit() -> None:
    """Its image processor resizes the images; a damaged one is counted and named."""
    record = _answer(
        run_here(
            "quantize", "-m", "vit/model.onnx", "-o", "vit/int8.onnx", "--mode", "qdq", "--format", "json",
            "--calibration-data", "pictures",
        )
    )  # fmt: skip
    assert {"data": "pictures", "split": "train", "samples": 5, "method": "minmax"} == record["calibration"]
    assert any("dog/2.png" in note for note in record["notes"])
    assert record["verification"]["is_verified"]
    assert _calibration_of(Path("vit/int8.onnx")) == record["calibration"]
    again = _answer(run_here("compare", "vit/model.onnx", "vit/int8.onnx", "--dataset", "pictures", "--format", "json"))
    assert ("data set", 5) == (again["input_source"], again["draws"])
    assert any("dog/2.png" in note for note in again["notes"])


def test_sentences_calibrate_a_bert_and_are_compared_on() -> None:
    """A table is read by the column with a known name, a saved data set by its test split."""
    record = _answer(
        run_here(
            "quantize", "-m", "bert/model.onnx", "-o", "bert/int8.onnx", "--mode", "qdq", "--format", "json",
            "--calibration-data", "sentences.parquet", "--samples", "4",
        )
    )  # fmt: skip
    assert (4, "train") == (record["calibration"]["samples"], record["calibration"]["split"])
    assert any("text is sentence" in note for note in record["notes"])
    command = ("compare", "bert-checkpoint", "bert/int8.onnx", "--dataset", "saved", "--format", "json")
    found = _answer(run_here(*command, "--columns", "text=sentence"))
    assert 3 == found["draws"]
    assert any(note.startswith("Split test") for note in found["notes"])
    assert found["outputs"][0]["cosine"] > 0.9
    assert 5 == _answer(run_here(*command, "--split", "train", "--by-module"))["draws"]


def test_build_of_a_file_prepares_arrays_with_the_processors_beside_the_file() -> None:
    """The tokenizer of the source is used and copied; another tokenizer makes another result."""
    command = ("build", "-m", "bert/model.onnx", "-o", "built", "-p", "w8a8", "--calibration-data", "sentences.parquet")
    done = run_here(*command, "-q")
    assert 0 == done.code, done.err
    assert 5 == _calibration_of(Path("built/model.onnx"))["samples"]
    assert Path("bert/tokenizer.json").read_bytes() == Path("built/tokenizer.json").read_bytes()
    assert not {"model.safetensors", "export.json"} & {path.name for path in Path("built").iterdir()}
    assert "reused" in run_here(*command).err
    text = Path("bert/tokenizer.json").read_text("utf-8")
    Path("bert/tokenizer.json").write_text(text.replace('"dog"', '"cat"'), "utf-8")
    again = run_here(*command)
    Path("bert/tokenizer.json").write_text(text, "utf-8")
    assert "options changed" in again.err, again.err


def test_build_of_a_checkpoint_makes_arrays_by_its_own() -> None:
    """The processor is used even if it is not copied into the build."""
    done = run_here(
        "build", "-m", "vit-checkpoint", "-o", "built-vit", "-p", "w8a8", "--calibration-data", "pictures", "-q",
        "--no-tokenizer",
    )  # fmt: skip
    assert 0 == done.code, done.err
    assert 5 == _calibration_of(Path("built-vit/model.onnx"))["samples"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("sentences.parquet", "--split", "dev"), 2, "'dev'"),
        (("sentences.parquet", "--samples", "9"), 2, "5 samples"),
        (("sentences.parquet", "--columns", "text=id"), 2, "has int"),
        (("pictures",), 2, "image, label"),
        (("bert/model.onnx",), 2, " .onnx "),
    ],
)
def test_data_that_does_not_fit_is_refused(arguments: tuple[str, ...], code: int, words: str) -> None:
    """The message names the option of the data; nothing is written."""
    done = run_here(
        "quantize", "-m", "bert/model.onnx", "-o", "no.onnx", "--mode", "qdq", "--calibration-data", *arguments
    )
    assert code == done.code, done.err
    assert words in done.err
    assert "--calibration-data" in done.err
    assert not Path("no.onnx").exists()


def test_data_set_options_without_a_data_set_are_refused() -> None:
    """The options do not apply to random values, to arrays, or beside other values."""
    np.savez("one.npz", x=np.zeros(1))
    quantize = ("quantize", "-m", "bert/model.onnx", "-o", "no.onnx", "--mode", "qdq")
    compare = ("compare", "bert/model.onnx", "bert/model.onnx")
    for command, words in (
        ((*quantize, "--split", "test"), "--split test does not apply to random values"),
        ((*quantize, "--columns", "text=a", "--calibration-data", "one.npz"), "which contains arrays by input"),
        ((*compare, "--split", "test"), "--split requires --dataset"),
        ((*compare, "--dataset", "pictures", "--input-data", "one.npz"), "--dataset and --input-data"),
        ((*compare, "--samples", "5", "--input-data", "one.npz"), "--samples 5: --input-data one.npz"),
        (
            (*compare, "--dataset", "sentences.parquet", "-o", "sentences.parquet", "--overwrite"),
            "is the input",
        ),
    ):
        done = run_here(*command)
        assert (2, True) == (done.code, words in done.err), done.err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_foreign_images_run_no_program_and_the_other_images_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EPS named .png, a pipe and a link to a file of the machine are skipped; the images beside them count."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        Image.fromarray(np.full((20, 40, 3), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n")
    os.mkfifo(folder / "3.png")
    (folder / "4.png").symlink_to("/etc/passwd")
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path / 'started'}\ncat > /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    record = _answer(run_here("compare", "vit-checkpoint", "vit/model.onnx", "--dataset", folder, "--format", "json"))
    assert 2 == record["draws"]
    for name in ("2.png", "3.png", "4.png"):
        assert any(name in note for note in record["notes"])
    assert not (tmp_path / "started").exists()


def test_foreign_card_of_a_data_set_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The files that the card names are not opened."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "a.csv").write_text("text\nthe dog\n")
    for name in ("http://127.0.0.1:9/x.csv", "/etc/passwd", "../**", "!!python/name:os.system"):
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: {name}\n---\n")
        done = run_here("compare", "bert-checkpoint", "bert/model.onnx", "--dataset", folder)
        assert (1, "") == (done.code, done.out)
        assert str(folder) in done.err
        assert "README.md" in done.err


@pytest.mark.parametrize("verb", ["quantize", "build", "tune"])
def test_result_is_judged_on_the_samples_of_the_user(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quality record names the dataset; ``--samples`` selects from it. A build keeps no quality record."""
    requests: list[DataSetRequest] = []

    def read(inputs: Any, sizes: Any, request: DataSetRequest, folder: Path, model: Path | None) -> SampleValues:
        requests.append(request)
        return all_values(inputs, sizes, request, folder, model)

    all_values = quality_samples.data_set_values
    monkeypatch.setattr(quality_samples, "data_set_values", read)
    asked = ("--dataset", "sentences.parquet", "--samples", "3", "--format", "json")
    if verb == "quantize":
        output = tmp_path / "int8.onnx"
        record = _answer(run_here("quantize", "-m", "bert/model.onnx", "-o", output, *asked))
        samples = record["verification"]["quality"]["samples"]
    elif verb == "build":
        _answer(run_here("build", "-m", "bert-checkpoint", "-o", tmp_path / "built", "-p", "int8", *asked))
        assert [("sentences.parquet", 3)] == [(request.source, request.samples) for request in requests]
        return
    else:
        only = ("--target", "size", "--only", "dynamic")
        record = _answer(run_here("tune", "-m", "bert/model.onnx", "-o", tmp_path / "tuned", *only, *asked))
        assert (None, 0.85) == (record["limits"]["min_sqnr_db"], record["limits"]["min_agreement"])
        samples = record["candidates"][1]["quality"]["samples"]
        assert "dynamic-int8" == record["winner"]["name"]
        ran = run_here("run", tmp_path / "tuned" / "best", SENTENCES[0])
        assert 0 == ran.code, ran.err
    assert ("dataset", 3) == (samples["source"], samples["count"])


def test_dataset_that_does_not_exist_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    sources = {"quantize": "bert/model.onnx", "build": "bert-checkpoint", "tune": "bert/model.onnx"}
    for verb, source in {**sources, "optimize": "bert/model.onnx"}.items():
        precision = ("-p", "int8") if verb == "build" else ()
        done = run_here(verb, "-m", source, "-o", tmp_path / verb, *precision, "--dataset", "missing.csv")
        assert (2, True) == (done.code, "missing.csv" in done.err), done.err


def test_written_file_is_compared_on_the_samples_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source runs on the texts, each in its length; compilation also takes arrays."""
    lengths: list[int] = []

    def run(session: Session, feeds: Arrays) -> Arrays:
        lengths.append(feeds["input_ids"].shape[1])
        return whole_run(session, feeds)

    exported = run_here("export", "-m", "bert-checkpoint", "-o", tmp_path / "bert.onnx", "--dynamic-seq-len", "-q")
    assert 0 == exported.code, exported.err
    whole_run = Session.run
    monkeypatch.setattr(Session, "run", run)
    for number, options in enumerate((("optimize", "--level", "full"), ("compile", "--ep", "cpu"))):
        written, data = tmp_path / f"{number}.onnx", ("--dataset", "sentences.parquet")
        done = run_here(*options, "-m", tmp_path / "bert.onnx", "-o", written, *data)
        assert 0 == done.code, done.err
        assert sorted({len(text.split()) for text in SENTENCES}) == sorted({*lengths})
        lengths.clear()
    names = ("input_ids", "attention_mask", "token_type_ids")
    np.savez(tmp_path / "7.npz", **{name: np.ones((1, 7), np.int64) for name in names})  # type: ignore[arg-type]
    done = run_here(*options, "-m", tmp_path / "bert.onnx", "-o", tmp_path / "2.onnx", "--input-data", tmp_path)
    assert (0, {7}) == (done.code, {*lengths}), done.err


def _save_splits(folder: Path, counts: dict[str, int]) -> None:
    """Save distinct images of one size, by split."""
    drawn = np.random.default_rng(1)
    for split, count in counts.items():
        (folder / split / "cat").mkdir(parents=True)
        for number in range(count):
            pixels = drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / "cat" / f"{number}.png")


def test_named_dataset_calibrates_on_other_samples_than_it_judges_on(tmp_path: Path) -> None:
    """The split train calibrates; without it, or if it is named, the samples that do not judge."""
    _save_splits(tmp_path / "three", {"train": 24, "validation": 18})
    expected = {("--split", "validation"): ("train", 24), (): ("train", 24)}
    for number, (split, (calibrating, count)) in enumerate(expected.items()):
        output = tmp_path / f"{number}.onnx"
        asked = ("--mode", "qdq", "--dataset", tmp_path / "three", *split, "--format", "json")
        record = _answer(run_here("quantize", "vit/model.onnx", "-o", output, *asked))
        assert (calibrating, count) == (record["calibration"]["split"], record["calibration"]["samples"])
        samples = record["verification"]["quality"]["samples"]
        assert ("dataset", 16, "three, split validation") == (samples["source"], samples["count"], samples["data"])
    asked = ("--mode", "qdq", "--dataset", tmp_path / "three", "--split", "train", "--samples", "6", "--format", "json")
    record = _answer(run_here("quantize", "vit/model.onnx", "-o", tmp_path / "train.onnx", *asked))
    assert ("train", 18) == (record["calibration"]["split"], record["calibration"]["samples"])
    assert 6 == record["verification"]["quality"]["samples"]["count"]


def test_equal_splits_are_noted(tmp_path: Path) -> None:
    """A copied split calibrates on the samples that judge."""
    _save_splits(tmp_path / "copied", {"train": 18})
    shutil.copytree(tmp_path / "copied" / "train", tmp_path / "copied" / "validation")
    asked = ("--mode", "qdq", "--dataset", tmp_path / "copied", "--format", "json")
    record = _answer(run_here("quantize", "vit/model.onnx", "-o", tmp_path / "int8.onnx", *asked))
    assert any("splits train and validation have equal samples" in note for note in record["notes"])


def test_few_samples_of_a_dataset_calibrate_and_judge_with_a_note(tmp_path: Path) -> None:
    asked = ("--mode", "qdq", "--dataset", "sentences.parquet", "--format", "json")
    record = _answer(run_here("quantize", "bert/model.onnx", "-o", tmp_path / "int8.onnx", *asked))
    assert 5 == record["calibration"]["samples"] == record["verification"]["quality"]["samples"]["count"]
    assert any("also judge the result" in note for note in record["notes"])


def test_sensitivity_ranks_on_the_samples_of_the_dataset(tmp_path: Path) -> None:
    """A target of the outputs is measured on them too; the printed command selects the same samples."""
    asked = ("--sensitivity", "--depth", "2", "--dataset", "saved", "--split", "train", "--samples", "4")
    more = ("--columns", "text=sentence", "--target", "sqnr_db=1", "--format", "json")
    record = _answer(run_here("quantize", "bert/model.onnx", *asked, *more))
    assert (4, "dataset", "saved, split train") == (record["samples"], record["input_source"], record["data"])
    words = shlex.split(record["next"])
    assert {"--split", "train", "--samples", "4", "--dataset", "saved"} < {*words}
    done = run_here(*words[1:], "--format", "json")
    assert 4 == _answer(done)["verification"]["quality"]["samples"]["count"]


@pytest.mark.parametrize("verb", ["quantize", "optimize", "build", "compile"])
def test_column_that_no_role_takes_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text("review_body,stars\n" + "the dog,1\n" * 20)
    options = {"build": ("-p", "int8"), "compile": ("--ep", "cpu")}.get(verb, ())
    done = run_here(verb, "bert/model.onnx", "-o", tmp_path / f"{verb}.onnx", *options, "--dataset", table)
    assert (2, True) == (done.code, "--columns text=COLUMN" in done.err), done.err
    planned = run_here("quantize", "bert/model.onnx", "-o", tmp_path / "planned.onnx", "--dataset", table, "--dry-run")
    assert 2 == planned.code, planned.out


def test_command_after_a_measurement_in_a_build_names_the_folder(tmp_path: Path) -> None:
    """Beside the model of a finished build, another model would have no place."""
    built = run_here("build", "bert/model.onnx", "-o", tmp_path / "built", "-q")
    assert 0 == built.code, built.err
    record = _answer(
        run_here("quantize", tmp_path / "built" / "model.onnx", "--sensitivity", "--depth", "1", "--format", "json")
    )
    command = shlex.split(record["next"])
    assert [str(tmp_path / "built"), "-o", str(tmp_path / "built_int8")] == command[2:5]
    done = run_here(*command[1:], "-q")
    assert 0 == done.code, done.err
    assert (tmp_path / "built_int8" / "tokenizer.json").is_file()


def test_build_in_half_precision_is_not_quantized_to_it_again(tmp_path: Path) -> None:
    done = run_here("build", "bert-checkpoint", "-o", tmp_path / "half", "--dtype", "fp16", "-p", "fp16", "-f", "json")
    stages = {stage["name"]: stage for stage in _answer(done)["parts"][0]["stages"]}
    assert ("skipped", True) == (stages["quantize"]["status"], "fp16 already" in stages["quantize"]["reason"])
