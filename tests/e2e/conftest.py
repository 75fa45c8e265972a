"""Fixtures of the tests of commands: workplaces, and models for success and failure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.workplace import Workplace


def _workplace(root: Path) -> Workplace:
    for name in ("here", "home", "temporary"):
        (root / name).mkdir()
    return Workplace(root, runs_here=True)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """An empty workplace that runs commands in the process of the test."""
    return _workplace(tmp_path)


@pytest.fixture
def apart(workplace: Workplace) -> Workplace:
    """An empty workplace with a process for each command: for tests of streams, signals, limits and imports."""
    return replace(workplace, runs_here=False)


@pytest.fixture(scope="session")
def make_workplace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Workplace]:
    """A function that makes empty workplaces, for exports shared by several tests."""
    return lambda: _workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="session")
def bert_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a BERT of the shape of bert-tiny: hidden size 128, two layers."""
    from checkpoints import save_checkpoint

    sizes = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512, "max_position_embeddings": 512}
    return save_checkpoint("bert", tmp_path_factory.mktemp("checkpoints") / "bert-tiny", **sizes)


@pytest.fixture
def checkpoint(bert_tiny: Path, tmp_path: Path) -> Path:
    """A copy of the bert-tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(bert_tiny, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def nets() -> Path:
    """A script with factories of models for success and failure."""
    return Path(__file__).with_name("nets.py")


@pytest.fixture(scope="session")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a BERT with 64 positions, exported in about a second."""
    from checkpoints import save_checkpoint

    return save_checkpoint("bert", tmp_path_factory.mktemp("checkpoints") / "small-bert")


@pytest.fixture(scope="session")
def small_file(small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the small BERT, with dynamic batch and sequence."""
    from winml.modelkit import HTPExporter, WinMLExportConfig
    from winml.modelkit.models.request import ModelRequest

    path = tmp_path_factory.mktemp("exported") / "small.onnx"
    config = WinMLExportConfig(dynamic_batch=True, dynamic_sequence=True, verify=False)
    HTPExporter(config).export_checkpoint(ModelRequest(str(small_bert)), path)
    return path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, built with its cache."""
    from generating import build_decoder, save_decoder

    return build_decoder(save_decoder(tmp_path_factory.mktemp("llama") / "checkpoint"), tmp_path_factory.mktemp("b"))


@pytest.fixture
def llama_copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of the built Llama, to be changed."""
    return Path(shutil.copytree(llama, tmp_path / "built"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, with a cache beside it, for commands that run in this process."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    return folder
