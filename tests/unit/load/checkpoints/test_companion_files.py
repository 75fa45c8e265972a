"""Which files of a checkpoint go beside its ONNX file?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.load.checkpoints.companion_files import companion_files


def write(folder: Path, *names: str) -> None:
    """Write files that hold their own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def test_config_tokenizer_and_processor_files_are_companions(tmp_path: Path) -> None:
    """Weights and their index, logs of a training, hidden files and files of ours are none."""
    wanted = {"config.json", "tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja", "merges.txt"}
    others = ("model.safetensors", "model.safetensors.index.json", "trainer_state.json", "eval_results.json", ".x.json")
    write(tmp_path, *wanted, *others, "model_htp_metadata.json", "README.md", "onnx/config.json")
    assert {name: tmp_path / name for name in wanted} == companion_files(tmp_path)


def test_folders_that_modules_json_names_come_along(tmp_path: Path) -> None:
    """sentence-transformers reads them; a name that leads out of the checkpoint is left alone."""
    outside = tmp_path / "outside"
    folder = tmp_path / "checkpoint"
    write(outside, "secret.json")
    write(folder, "config.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "other/config.json")
    paths = ["", "1_Pooling", "2_Dense", "../outside", str(outside), "missing", 3]
    modules = [{"path": path} for path in paths]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    expected = {"config.json", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"}
    assert expected == set(companion_files(folder))


@pytest.mark.parametrize("text", ["{", "[[]]", "3", "[" * 100_000])
def test_damaged_modules_json_names_no_folder(tmp_path: Path, text: str) -> None:
    """It is copied like any other file; who reads it says what is wrong with it."""
    write(tmp_path, "1_Pooling/config.json")
    (tmp_path / "modules.json").write_text(text, encoding="utf-8")
    assert {"modules.json"} == set(companion_files(tmp_path))


def test_path_that_is_no_folder_has_no_companions(tmp_path: Path) -> None:
    """A config file alone, or nothing."""
    write(tmp_path, "config.json")
    assert {} == companion_files(tmp_path / "config.json") == companion_files(tmp_path / "missing")
