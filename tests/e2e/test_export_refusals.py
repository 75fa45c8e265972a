"""Refusals of wrong requests: before torch is imported, with the value, a remedy and exit code 2."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.workplace import Workplace

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "numpy")


@pytest.fixture
def light(workplace: Workplace, tmp_path: Path) -> Workplace:
    """A workplace in which the import of a model library fails."""
    traps = tmp_path / "traps"
    traps.mkdir()
    for name in HEAVY:
        (traps / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n", encoding="utf-8")
    folder = workplace.folder
    (folder / "model.onnx").write_bytes(b"earlier model")
    (folder / "script.py").write_text("raise AssertionError('the script runs')\n", encoding="utf-8")
    (folder / "half.json").write_text('{\n  "sequence_length": 128,\n', encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "parent" / "inner").mkdir(parents=True)
    (folder / "parent" / "inner" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "weightless").mkdir()
    (folder / "weightless" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    return replace(workplace, variables={"PYTHONPATH": os.pathsep.join([str(traps)])})


MODELS = {
    "a missing path": ("./chekpoint", ("./chekpoint", "no such file or folder")),
    "a missing path beside one of that name": ("./emty", ("./emty", "Did you mean", "empty")),
    "a folder without a config": ("./empty", ("empty", "config.json", "save_pretrained")),
    "a folder of checkpoints": ("./parent", ("parent", "config.json", "inner")),
    "a folder without weights": ("./weightless", ("has no weights", "model.safetensors", "--random-weights")),
    "a config alone": ("./weightless/config.json", ("without weights", "--random-weights")),
    "a missing script": ("net.py:build", ("net.py", "no such file")),
    "a script without factory": ("script.py", ("script.py", "script.py:NAME_OF_THE_FUNCTION")),
    "neither path nor id": ("what is this?", ("what is this?", "Hub id")),
    "an empty name": ("", ("-m", "the text is empty")),
}


@pytest.mark.parametrize(("model", "words"), MODELS.values(), ids=MODELS)
def test_invalid_model_is_refused_before_torch(light: Workplace, model: str, words: tuple[str, ...]) -> None:
    """A wrong ``-m`` costs no import, and the message lists the accepted forms."""
    light.refuse("-m", model, "-o", "out.onnx", code=2, words=words)


def test_onnx_file_without_a_size_is_refused(workplace: Workplace) -> None:
    """A damaged file is refused, too, since its dimensions are unknown."""
    (workplace.folder / "model.onnx").write_bytes(b"earlier model")
    workplace.refuse("-m", "./model.onnx", "-o", "out.onnx", code=2, words=("model.onnx",))


OPTIONS = {
    "malformed JSON": (
        ("--shape-config", '{"sequence_length": 64,\n "batch_size" 2}'),
        ("--shape-config", "line 2, column 15", "Correct it there"),
    ),
    "malformed JSON in a file": (
        ("--shape-config", "half.json"),
        ("half.json", "line 3, column 1"),
    ),
    "missing JSON file": (("--input-specs", "specs.json"), ("--input-specs specs.json", "no such file")),
    "unknown task": (("--task", "text-clasification"), ("text-clasification", "Did you mean 'text-classification'")),
    "task of no likeness": (("--task", "xyzzy"), ("xyzzy", "unknown task", "fill-mask", "image-classification")),
    "zero batch": (("--batch-size", "0"), ("--batch-size", "0 is not in the range", "--dynamic-batch")),
    "misspelled option": (("--batchsize", "2"), ("--batchsize", "no such option", "--batch-size 2")),
    "no class after all": (("--torch-module", ""), ("'--torch-module'", "the text is empty", "--help")),
    "a word beside classes": (("--torch-module", "Linear,all"), ("--torch-module Linear,all", "'all'")),
    "no inputs after all": (("--input-specs", " "), ("'--input-specs'", "the text is empty", "--help")),
    "revision of a folder": (("--revision", "main"), ("--revision main", "has no revisions")),
    "two batch sizes": (
        ("--batch-size", "2", "--shape-config", '{"batch_size": 3}'),
        ("--batch-size 2", "batch_size 3"),
    ),
}


@pytest.mark.parametrize(("options", "words"), OPTIONS.values(), ids=OPTIONS)
def test_wrong_option_is_refused_before_torch(
    light: Workplace, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """A wrong option costs no import; the message names the option, the value and the right one."""
    light.refuse("-m", "./weightless", "--random-weights", "-o", "out.onnx", *options, code=2, words=words)


KEYS = {
    "shape-config": ("--shape-config", '{"sequence_lenght": 64}', "sequence_length"),
    "export-config": ("--export-config", '{"opset": 17}', "opset_version"),
    "input-specs": ("--input-specs", '[{"name": "x", "shape": [1], "dtyp": "int64"}]', "dtype"),
}


@pytest.mark.parametrize(("option", "text", "known"), KEYS.values(), ids=KEYS)
def test_unknown_key_is_refused_with_the_nearest_known_key(
    light: Workplace, option: str, text: str, known: str
) -> None:
    """The message suggests the nearest key for every JSON option."""
    outcome = light.export("-m", "./weightless", "--random-weights", "-o", "out.onnx", option, text)
    assert 2 == outcome.code
    assert "" == outcome.out
    assert f"did you mean '{known}'?" in outcome.complaint[0]


OUTPUTS = {
    "a file that is there": ("model.onnx", 2, ("output model.onnx exists already", "--overwrite")),
    "a folder": ("empty", 2, ("output empty is a directory", "model.onnx")),
    "another ending": ("model.pt", 2, ("model.pt does not end in .onnx", "model.pt.onnx")),
    "a path below a file": (
        str(Path("script.py") / "model.onnx"), 1, ("cannot write", "script.py", "choose another output path"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("output", "code", "words"), OUTPUTS.values(), ids=OUTPUTS)
def test_output_that_cannot_be_is_refused_before_torch(
    light: Workplace, output: str, code: int, words: tuple[str, ...]
) -> None:
    """An impossible output is known before any work starts."""
    light.refuse("-m", "./weightless", "--random-weights", "-o", output, code=code, words=words)


def test_output_with_an_existing_companion_is_refused_before_torch(light: Workplace) -> None:
    """An existing sidecar is refused like an existing model."""
    (light.folder / "other_htp_metadata.json").write_text("{}", encoding="utf-8")
    words = ("other_htp_metadata.json exists already", "--overwrite")
    light.refuse("-m", "./weightless", "--random-weights", "-o", "other.onnx", code=2, words=words)


def test_read_only_folder_is_refused_before_torch(light: Workplace) -> None:
    """A folder without write permission is refused before any work starts."""
    closed = light.folder / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    try:
        (closed / "probe").touch()
    except OSError:
        words = ("cannot write", "closed", "permissions")
        light.refuse("-m", "./weightless", "--random-weights", "-o", "closed/m.onnx", code=1, words=words)
    else:
        pytest.skip("no read-only folder here: this user, or this system, may write into every folder")
    finally:
        closed.chmod(0o700)
