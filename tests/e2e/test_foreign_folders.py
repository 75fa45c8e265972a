"""Foreign folders: no file outside is read, no code of theirs runs, and every damage is named."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import save_checkpoint, save_image_processor
from e2e.in_process import run_here
from evaluation_checkpoints import save_task_checkpoint, sentences, text_tokenizer

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need rights there")
pytestmark = pytest.mark.usefixtures("libraries_may_warn")

TEXT = sentences(1)[0]
CODE = """
open("RAN", "w")
from transformers import PreTrainedTokenizerFast
class Tokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a text classifier and an image classifier."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_task_checkpoint(
        folder / "text", "bert", "BertForSequenceClassification", text_tokenizer(), labels=["a", "b"],
        num_hidden_layers=1,
    )  # fmt: skip
    save_checkpoint("vit", folder / "image", num_hidden_layers=1)
    save_image_processor(folder / "image", 32)
    return folder


@pytest.fixture(scope="module")
def builds(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The builds of both checkpoints, with files of the checkpoint beside each model."""
    folder = tmp_path_factory.mktemp("builds")
    for name in ("text", "image"):
        built = run_here("build", "-m", checkpoints / name, "-o", folder / name, "--no-verify")
        assert 0 == built.code, built.err
    return folder


@pytest.fixture(name="text")
def copy_text(here: Path, checkpoints: Path) -> Path:
    """A copy of the text checkpoint beside a secret, to be changed."""
    (here / "id_rsa").write_text("SECRET")
    return Path(shutil.copytree(checkpoints / "text", here / "text"))


@pytest.fixture(name="built")
def copy_builds(here: Path, builds: Path) -> Path:
    """A copy of the builds, to be changed."""
    return Path(shutil.copytree(builds, here / "built"))


@needs_links
@pytest.mark.parametrize(
    ("name", "target"),
    [("vocab.txt", "../id_rsa"), ("chat_template.jinja", "/proc/self/environ"), ("tokenizer.json", "../id_rsa")],
)
def test_link_of_a_checkpoint_is_never_deployed(here: Path, text: Path, name: str, target: str) -> None:
    """The message names the link, and nothing is written."""
    (text / name).unlink(missing_ok=True)
    (text / name).symlink_to(target)
    for arguments in (("build", "-m", "text", "-o", "out"), ("export", "-m", "text", "-o", "out/model.onnx")):
        refused = run_here(*arguments)
        assert (1, "") == (refused.code, refused.out), refused.err
        assert name in refused.err
        assert "SECRET" not in refused.err
        assert not (here / "out").exists()


@needs_links
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_in_a_checkpoint_ends_at_once(text: Path, name: str) -> None:
    """Opening the pipe would wait for ever."""
    (text / name).unlink()
    os.mkfifo(text / name)
    refused = run_here("inspect", "-m", "text")
    assert 1 == refused.code
    assert name in refused.err


@needs_links
def test_link_to_outside_weights_is_refused_with_a_remedy(here: Path, text: Path) -> None:
    """A copy in place of the link is read."""
    (text / "model.safetensors").rename(here / "weights")
    (text / "model.safetensors").symlink_to("../weights")
    assert 1 == run_here("inspect", "-m", "text").code
    (text / "model.safetensors").unlink()
    shutil.copy(here / "weights", text / "model.safetensors")
    assert 0 == run_here("inspect", "-m", "text").code


@pytest.mark.parametrize("answer", ["y\n", ""])
def test_code_beside_a_gguf_file_never_runs(here: Path, answer: str) -> None:
    """No question is asked, stdout is JSON, and the tokenizer is the one in the file."""
    pytest.importorskip("gguf")
    import coded_checkpoints

    coded_checkpoints.save_gguf_of(here, "llama")
    (here / "evil.py").write_text(CODE)
    (here / "tokenizer_config.json").write_text(json.dumps(AUTO_MAP))
    shown = run_here("inspect", "-m", "model.gguf", "-f", "json", stdin=answer)
    assert 0 == shown.code, shown.err
    assert json.loads(shown.out)
    assert not (here / "RAN").exists()
    exported = run_here("export", "-m", "model.gguf", "-o", "out/model.onnx", "--no-verify", stdin=answer)
    assert 0 == exported.code, exported.err
    assert "auto_map" not in (here / "out" / "tokenizer_config.json").read_text()
    assert not (here / "RAN").exists()


def test_error_about_a_gguf_file_names_the_file(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names no temporary folder."""
    pytest.importorskip("gguf")
    import coded_checkpoints

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    coded_checkpoints.save_gguf_of(here, "llama", extra={"nodot": np.ones(16, np.float32)})
    refused = run_here("export", "-m", "model.gguf", "-o", "out.onnx")
    assert 1 == refused.code
    assert "model.gguf" in refused.err
    assert "nodot" in refused.err
    assert "temporary" not in refused.err


def test_code_beside_a_model_never_runs(here: Path, built: Path) -> None:
    """The class in the tokenizer's config is not needed: the tokenizer file is complete."""
    (built / "text" / "evil.py").write_text(CODE)
    path = built / "text" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **AUTO_MAP}))
    done = run_here("run", built / "text" / "model.onnx", "--text", TEXT, stdin="y\n")
    assert "internal error" not in done.err
    assert not (here / "RAN").exists()
    assert "[y/N]" not in done.out


def _changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


_DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a size of text": ("image/preprocessor_config.json", lambda path: _changed(path, size={"height": "x"})),
    "a size of 2^40": ("image/preprocessor_config.json", lambda path: _changed(path, size=2**40)),
    "a mean of text": ("image/preprocessor_config.json", lambda path: _changed(path, image_mean="x")),
    "a scale of 10^400": ("image/preprocessor_config.json", lambda path: _changed(path, rescale_factor=10**400)),
    "no JSON": ("image/preprocessor_config.json", lambda path: path.write_text("{")),
    "labels of the image": ("image/config.json", lambda path: _changed(path, id2label=3)),
    "a number for a config": ("image/config.json", lambda path: path.write_text("3")),
    "10^9 labels": ("text/config.json", lambda path: _changed(path, num_labels=10**9)),
    "a dropout of text": ("text/config.json", lambda path: _changed(path, hidden_dropout_prob="x")),
    "a length of text": ("text/tokenizer_config.json", lambda path: _changed(path, model_max_length="x")),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_file_beside_a_model_is_reported_in_words(here: Path, built: Path, damage: str) -> None:
    """The damage is not reported as a bug of winml."""
    from PIL import Image

    Image.new("RGB", (40, 50)).save(here / "photo.png")
    name, change = _DAMAGES[damage]
    change(built / name)
    passed = ("--text", TEXT) if name.startswith("text") else ("--image", "photo.png")
    refused = run_here("run", built / Path(name).parts[0] / "model.onnx", *passed)
    assert 1 == refused.code, refused.err
    assert "internal error" not in refused.err


@needs_links
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_file_beside_a_model_is_refused(built: Path, name: str, kind: str) -> None:
    """The refusal is immediate, and names the file."""
    path = built / "text" / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    refused = run_here("run", built / "text" / "model.onnx", "--text", TEXT)
    assert 1 == refused.code
    assert name in refused.err


def _saved_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


_INPUTS: dict[str, Callable[[Path], object]] = {
    "cut.npy": lambda path: path.write_bytes(_saved_header((2**40,))),
    "archive.npy": lambda path: np.savez(path.open("wb"), a=np.ones(3)),
    "text.npy": lambda path: path.write_text("1"),
    "empty.npy": lambda path: path.write_bytes(b""),
    "object.npy": lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
    "deep.json": lambda path: path.write_text("[" * 10**5),
    "half.json": lambda path: path.write_bytes(b"[\xff]"),
    "missing.npy": Path.absolute,
} | (
    {}
    if sys.platform == "win32"
    else {
        "pipe.npy": os.mkfifo,
        "pipe.json": os.mkfifo,
        "zero.npy": lambda path: path.symlink_to("/dev/zero"),
        "zero.json": lambda path: path.symlink_to("/dev/zero"),
    }
)


@pytest.mark.parametrize("name", _INPUTS)
def test_input_file_that_holds_no_array_is_refused(here: Path, builds: Path, name: str) -> None:
    """The refusal is immediate for every kind of file, and names it."""
    _INPUTS[name](here / name)
    refused = run_here("run", builds / "text" / "model.onnx", "--input", f"input_ids=@{name}")
    assert refused.code in (1, 2)
    assert name in refused.err
    assert "internal error" not in refused.err


def test_input_file_is_read(here: Path, builds: Path) -> None:
    """The file is one of numpy, or JSON."""
    np.save(here / "tokens.npy", np.array([[2, 5, 3]]))
    (here / "mask.json").write_text("[[1, 1, 1]]")
    named = ("--input", "input_ids=@tokens.npy", "--input", "attention_mask=@mask.json")
    assert 0 == run_here("run", builds / "text" / "model.onnx", *named).code
