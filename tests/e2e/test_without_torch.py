"""Commands on ONNX files and build folders without torch and transformers, as on Windows on Arm.

The environment of OpenVINO's ONNX Runtime has the packages that pip installs there, and Pillow. The other tests refuse
the import of both libraries in a process of the environment of the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from checkpoints import save_image_processor
from e2e.in_process import run_here
from e2e.other_environment import run_elsewhere
from evaluation_checkpoints import WORDS, export_open, save_task_checkpoint, text_tokenizer
from generating import build_decoder, save_decoder
from readers import python_of
from winml.modelkit.cli.main import COMMANDS

READER = "openvino-onnxruntime"
TEXT = " ".join(WORDS[:4])
LIBRARIES = ("torch", "transformers")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint ``texts`` of a classifier, exported."""
    path = tmp_path_factory.mktemp("device")
    name = "BertForSequenceClassification"
    save_task_checkpoint(path / "texts", "bert", name, text_tokenizer(), labels=("a", "b"), num_hidden_layers=1)
    export_open(path / "texts", "text-classification")
    return path


@pytest.fixture(scope="module")
def folder(classifier: Path) -> Path:
    """The folder with a classifier of images, a decoder, texts and an image as well."""
    path, name = classifier, "ViTForImageClassification"
    save_task_checkpoint(path / "images", "vit", name, labels=("ant", "bee"), num_hidden_layers=1)
    save_image_processor(path / "images", 32)
    export_open(path / "images", "image-classification")
    build_decoder(save_decoder(path / "llama"), path / "decoder", config={"optim": None})
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path / "photo.png")
    (path / "texts.txt").write_text(f"{TEXT}\n" * 8, encoding="utf-8")
    return path


CLASSIFIER, PICTURES = "texts/onnx/model.onnx", "images/onnx/model.onnx"
SAME_RESULTS = (
    ["run", CLASSIFIER, "--text", TEXT, "-f", "json"],
    ["run", PICTURES, "--image", "photo.png", "-f", "json"],
    ["generate", "decoder", "--chat", "-p", "hello", "--max-new-tokens", "4", "-f", "json"],
)
"""Commands with equal results in PyTorch's environment."""


def _results(printed: str) -> Any:
    record = json.loads(printed)
    if "entries" not in record:
        return record["prompt"], record["tokens"]
    return [(entry["label"], pytest.approx(entry["score"], abs=1e-5)) for entry in record["entries"]]


def test_classes_equal_those_with_torch_and_checkpoints_are_refused(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal has the exit code of a usage error and names PyTorch; nothing is a bug of winml."""
    monkeypatch.chdir(classifier)
    refused = (
        ["export", "-m", "texts", "-o", "exported.onnx"], ["build", "-m", "texts", "-o", "built"], ["inspect", "texts"],
        ["perf", "texts"], ["run", "texts", "--text", TEXT], ["compare", "texts", CLASSIFIER],
        ["run", CLASSIFIER, "--text", TEXT, "--reference"],
    )  # fmt: skip
    (code, printed, messages), *refusals = run_elsewhere(
        sys.executable, classifier, [SAME_RESULTS[0], *refused], without=LIBRARIES
    )
    assert 0 == code, messages
    assert _results(printed) == _results(run_here(*SAME_RESULTS[0]).out)
    for code, _, messages in refusals:
        assert (2, True, False) == (code, "PyTorch" in messages, "internal error" in messages), messages


WORK = (
    ["optimize", "-m", CLASSIFIER, "-o", "optimized.onnx", "--level", "full"],
    ["quantize", "-m", CLASSIFIER, "-o", "int8.onnx"],
    ["quantize", "-m", CLASSIFIER, "-o", "w8a8.onnx", "-p", "w8a8", "--mode", "qdq", "--calibration-data", "texts.txt"],
    ["quantize", "-m", PICTURES, "-o", "w8a16.onnx", "-p", "w8a16"],
    ["quantize", "-m", "decoder", "-o", "int4", "-p", "int4"],
    ["quantize", "-m", CLASSIFIER, "-o", "fp16.onnx", "-p", "fp16"],
    ["compile", "-m", CLASSIFIER, "-o", "compiled.onnx", "--ep", "cpu"],
    ["perf", CLASSIFIER, "--iterations", "2", "--by-module"],
    ["perf", "decoder", "--iterations", "2"],
    ["compare", CLASSIFIER, "w8a8.onnx", "--by-module"],
    ["inspect", "decoder", "-H"],
    ["extract", CLASSIFIER, "--module", "BertLayer", "-o", "extracted"],
    ["retag", CLASSIFIER, "optimized.onnx", "-o", "retagged.onnx"],
    ["build", "-m", CLASSIFIER, "-o", "rebuilt", "-p", "int8"],
    ["config", "-m", CLASSIFIER],
    ["sys"],
)
"""Commands that succeed on ONNX files and build folders."""


@pytest.mark.reader(READER)
def test_every_verb_works_in_an_environment_without_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, images and prompts have the results of the environment with torch."""
    monkeypatch.chdir(folder)
    helps = [[verb, "--help"] for verb in COMMANDS]
    done = run_elsewhere(python_of(READER), folder, [*SAME_RESULTS, *helps, *WORK], without=LIBRARIES)
    for code, _, messages in done:
        assert 0 == code, messages
    for command, (_, printed, _) in zip(SAME_RESULTS, done, strict=False):
        assert _results(printed) == _results(run_here(*command).out)
    beams = ["generate", "decoder", "-p", "a", "--num-beams", "2"]
    ((code, _, messages),) = run_elsewhere(python_of(READER), folder, [beams], without=LIBRARIES)
    assert (2, True) == (code, "num_beams" in messages)
