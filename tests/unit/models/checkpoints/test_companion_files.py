"""Files of a checkpoint that are copied beside its ONNX file."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers import tokenization_utils_base, utils

from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.checkpoints.companion_files import (
    LARGEST_COMPANION,
    LARGEST_MODULE_WEIGHTS,
    card_files,
    companion_files,
)
from winml.modelkit.onnx.files.foreign_files import COMPANION_NAMES


def write(folder: Path, *names: str) -> None:
    """Write files with their own name as content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def write_modules(folder: Path, *modules: object) -> None:
    """Write modules.json, in which sentence-transformers names its modules."""
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


def test_config_tokenizer_and_processor_files_are_companions(tmp_path: Path) -> None:
    """Weights, their index, training logs, hidden files and files of this tool are not companions."""
    wanted = {"config.json", "tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja", "merges.txt"}
    wanted |= {"additional_chat_templates/rag.jinja", "tokenizer.4.0.0.json", "sentence_bert_config.json"}
    others = ("model.safetensors", "model.safetensors.index.json", "trainer_state.json", "eval_results.json", ".x.json")
    write(tmp_path, *wanted, *others, "model_htp_metadata.json", "README.md", "onnx/config.json")
    assert {name: tmp_path / name for name in wanted} == companion_files(tmp_path)


def test_files_of_the_user_stay_behind(tmp_path: Path) -> None:
    """Files that no reader of a checkpoint asks for by name may be private."""
    write(tmp_path, "config.json", "aws_credentials.json", "train.json", "corpus.txt", "requirements.txt")
    assert {"config.json"} == set(companion_files(tmp_path))


def test_file_above_the_limit_stays_behind(tmp_path: Path) -> None:
    """A large vocabulary is below it."""
    for name, size_bytes in (("tokenizer.json", 40_000_000), ("vocab.txt", LARGEST_COMPANION + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size_bytes)  # takes no room
    assert {"tokenizer.json"} == set(companion_files(tmp_path))


def vocabulary_names(source: str) -> Iterator[str]:
    """Yield the file names a tokenizer's source assigns to ``VOCAB_FILES_NAMES``."""
    if "VOCAB_FILES_NAMES" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            targets = {target.id.upper() for target in node.targets if isinstance(target, ast.Name)}
            for value in node.value.values if "VOCAB_FILES_NAMES" in targets else ():
                if isinstance(value, ast.Constant):
                    yield value.value


def test_every_vocabulary_of_transformers_has_a_known_name() -> None:
    """Fails when transformers gets a tokenizer with files of another name."""
    # Read, not imported: many of them need libraries that are not here.
    sources = (path.read_text(encoding="utf-8") for path in Path(transformers.__file__).parent.rglob("token*.py"))
    names = {name for source in sources for name in vocabulary_names(source)}
    assert {"vocab.txt", "spiece.model"} <= names
    assert not names - COMPANION_NAMES


def test_every_config_of_transformers_has_a_known_name() -> None:
    """Constants of transformers, by its own names."""
    names = {utils.CONFIG_NAME, utils.GENERATION_CONFIG_NAME, utils.FEATURE_EXTRACTOR_NAME, utils.IMAGE_PROCESSOR_NAME}
    names |= {utils.PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME, utils.CHAT_TEMPLATE_FILE}
    names |= {tokenization_utils_base.SPECIAL_TOKENS_MAP_FILE, tokenization_utils_base.ADDED_TOKENS_FILE}
    assert not names - COMPANION_NAMES


def test_folders_named_in_modules_json_are_copied(tmp_path: Path) -> None:
    """sentence-transformers reads them; a name that leads out of the checkpoint is left alone."""
    outside = tmp_path / "outside"
    folder = tmp_path / "checkpoint"
    write(tmp_path, "secret.json")
    write(outside, "secret.json")
    write(
        folder, "config.json", "1_Pooling/config.json", "2_Dense/config.json", "other/config.json", ".git/config.json"
    )
    paths = [
        "",
        "1_Pooling",
        "2_Dense",
        "../outside",
        str(outside),
        "missing",
        3,
        "..",
        ".",
        "C:",
        "..\\..",
        "a\0",
        "\ud800",
    ]
    write_modules(folder, *({"path": path} for path in [*paths, ".git"]))
    expected = {"config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"}
    assert expected == set(companion_files(folder))


def test_of_a_module_only_small_layers_bring_their_weights(tmp_path: Path) -> None:
    """The weights of the transformer are in the ONNX file; hidden files and training notes stay behind."""
    transformer = ("config.json", "vocab.txt", "sentencepiece.bpe.model", "pytorch_model.bin", "model.safetensors")
    write(tmp_path, *(f"0_Transformer/{name}" for name in transformer))
    write(tmp_path, "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "2_Dense/.env", "2_Dense/data.csv")
    write(tmp_path, "3_Dense/pytorch_model.bin", "4_Dense/config.json")
    with (tmp_path / "4_Dense/model.safetensors").open("wb") as file:
        file.truncate(LARGEST_MODULE_WEIGHTS + 1)
    kinds = {"0_Transformer": "Transformer", "2_Dense": "Dense", "3_Dense": "Dense", "4_Dense": "Dense"}
    write_modules(
        tmp_path, *({"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items())
    )
    expected = {f"0_Transformer/{name}" for name in transformer[:3]}
    expected |= {"modules.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "4_Dense/config.json"}
    assert expected == set(companion_files(tmp_path))


@pytest.mark.parametrize("text", ["{", "[[]]", "3", "[" * 100_000])
def test_damaged_modules_json_names_no_folder(tmp_path: Path, text: str) -> None:
    """A damaged modules.json is copied like any other file; its reader reports the damage."""
    write(tmp_path, "1_Pooling/config.json")
    (tmp_path / "modules.json").write_text(text, encoding="utf-8")
    assert {"modules.json"} == set(companion_files(tmp_path))


def test_path_without_a_folder_has_no_companions(tmp_path: Path) -> None:
    """A config file alone, or nothing."""
    write(tmp_path, "config.json")
    assert {} == companion_files(tmp_path / "config.json") == companion_files(tmp_path / "missing")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "1_Pooling/config.json", "README.md"])
def test_link_that_leads_out_of_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """Its target would be deployed."""
    folder = tmp_path / "checkpoint"
    write(tmp_path, "id_rsa")
    write(folder, "config.json", name)
    write_modules(folder, {"path": "1_Pooling"} if "/" in name else {})
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(CheckpointError) as caught:
        card_files(folder) if name == "README.md" else companion_files(folder)
    assert str(folder / name) in caught.value.message
