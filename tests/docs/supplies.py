"""Checkpoints, exports and data for the pages of the documentation, each made once for all pages.

Checkpoints are small, of seeded random weights; the Hub id on the pages resolves to MiniLM's real weights, of which
half of the layers are enough where a file is compared with PyTorch at many sizes.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from adapters import save_adapter
from checkpoints import save_checkpoint, save_image_processor
from coded_checkpoints import save_awq
from e2e.in_process import run_here
from e2e.workplace import Outcome
from encoder_decoder import save_encoder_decoder
from evaluation_checkpoints import pipeline_of, save_images, save_task_checkpoint, sentences, text_tokenizer
from generating import save_decoder
from vision_language import save_image, save_vision_language

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
_TEXT: Mapping[str, Any] = {"vocab_size": 30522, "max_position_embeddings": 512}
_LABELS = ("negative", "positive")
_OPEN = ("--dynamic-batch", "--dynamic-seq-len")


class Supplies:
    """Makes the supplies of a page and places them into its folder."""

    def __init__(self, folder: Path, minilm: Path) -> None:
        """Set the folder of all supplies; ``minilm`` is the checkpoint that the Hub id resolves to."""
        self._folder = folder
        self._minilm = minilm
        self._exports: dict[tuple[str, ...], tuple[Path, Outcome]] = {}

    def place(self, name: str, target: Path) -> None:
        """Place a supply in the folder of a page: a folder or a file; the target "." keeps its own name."""
        source = self._create(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=_link)
        else:
            _link(source, target / source.name if target.is_dir() else target)

    def run(self, *words: str, stdin: str = "") -> Outcome:
        """Run a command of a page in its folder; equal exports of MiniLM run once for all pages."""
        if HUB_ID not in words:
            return run_here(*words, stdin=stdin)
        is_open = {"--layout", "--dynamic-batch"} & {*words}
        hub = self._create("half-minilm") if is_open else self._minilm
        told = tuple(str(hub) if word == HUB_ID else word for word in words)
        if words[0] != "export":
            return run_here(*told, stdin=stdin)
        if told not in self._exports:
            folder = self._folder / f"minilm-{len(self._exports)}"
            folder.mkdir()
            with _inside(folder):
                self._exports[told] = folder, run_here(*told)
        folder, outcome = self._exports[told]
        shutil.copytree(folder, Path.cwd(), dirs_exist_ok=True, copy_function=_link)
        return outcome

    def _create(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            kind, _, source = name.rpartition(" of ")
            if kind:
                self._command(_FROM[kind], self._create(source), path)
            else:
                _MAKERS[name](path) if name in _MAKERS else _DATA[name](self, path)
        return path

    def _command(self, arguments: tuple[str, ...], source: Path, path: Path) -> None:
        path.mkdir()
        with _inside(path):
            outcome = run_here(*(word.replace("SOURCE", str(source)) for word in arguments), "-q")
        assert 0 == outcome.code, outcome.err

    def _reviews(self, path: Path) -> None:
        """Write the sentences with the checkpoint's most certain predictions, which are their labels."""
        answers = pipeline_of(self._create("classifier"), "text-classification")
        judged = sorted(((answers(text)[0], text) for text in sentences(120)), key=lambda row: -row[0]["score"])
        _write_table(path, [("text", "label"), *((text, answer["label"]) for answer, text in judged[:40])])

    def _half(self, path: Path) -> None:
        """Write MiniLM with the first three of its six layers."""
        import transformers

        shutil.copytree(self._minilm, path)
        transformers.AutoModel.from_pretrained(self._minilm, num_hidden_layers=3).save_pretrained(path)

    def _optimized(self, path: Path) -> None:
        """Write MiniLM after ONNX Runtime's offline optimizer, without tags."""
        import onnxruntime

        told = ("export", "-m", HUB_ID, "-o", "model.onnx")
        folder = path.parent / "before_onnxruntime"
        folder.mkdir()
        with _inside(folder):
            self.run(*told)
            options = onnxruntime.SessionOptions()
            options.optimized_model_filepath = str(path)
            options.log_severity_level = 3
            onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])

    def _sample(self, path: Path) -> None:
        """Write values for the inputs of an exported text model."""
        generator = np.random.default_rng(0)
        ids = generator.integers(5, 100, (1, 64))
        np.savez(path, input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def _link(source: str | Path, target: str | Path) -> str | Path:
    """Link or copy a file if the target does not exist: tools replace files and never change them in place."""
    if not Path(target).exists():
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy2(source, target)
    return target


def _write_table(path: Path, rows: list[tuple[Any, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


def _save_vit(folder: Path) -> None:
    save_checkpoint("vit", folder)
    save_image_processor(folder, 32)


def _save_pictures(folder: Path) -> None:
    generator = np.random.default_rng(0)
    pictures = {f"{number}.png": generator.integers(0, 255, (40, 48, 3), dtype=np.uint8) for number in range(8)}
    save_images(folder, pictures)


def _save_sentences(path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"review": sentences(8)}).to_parquet(path)


def _save_lines(path: Path) -> None:
    path.write_text("\n".join(sentences(8)), encoding="utf-8")


def _save_pairs(path: Path) -> None:
    """Write pairs of sentences; the second sentence shares fewer and fewer words with the first."""
    rows: list[tuple[Any, ...]] = [("sentence1", "sentence2", "score")]
    for text in _SENTENCES:
        words = text.split()
        for left in range(10):
            kept, other = words[: len(words) - left], _OTHER.split()[:left]
            rows.append((text, " ".join([*kept, *other]), round(1 - left / 10, 1)))
    _write_table(path, rows)


def _save_net(path: Path) -> None:
    path.write_text(_NET, encoding="utf-8")


def _save_lecture(path: Path) -> None:
    import soundfile

    sound = np.random.default_rng(0).standard_normal(40_000).astype(np.float32) / 4
    soundfile.write(path, sound, 16_000)


def _save_llava(path: Path) -> None:
    save_vision_language(path, num_hidden_layers=2)


def _save_awq(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(save_awq(Path(folder), num_hidden_layers=2).folder, path)


def _save_adapter(path: Path, seed: int) -> None:
    """Write an adapter of the model that pages call llama."""
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(save_decoder(Path(folder) / "llama", max_position_embeddings=1024))
    save_adapter(path, model, ("q_proj", "v_proj", "down_proj"), seed=seed, rank=2 * seed)


def _save_whisper(folder: Path) -> None:
    """Write a Whisper checkpoint with timestamps: its tokens from 60 on are times."""
    save_encoder_decoder(folder, "whisper", encoder_layers=2, decoder_layers=2)
    told = '{"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "no_timestamps_token_id": 60}'
    (folder / "generation_config.json").write_text(told, encoding="utf-8")


_SENTENCES = (
    "the old man reads a long book in the quiet garden every morning",
    "a red train leaves the small station at noon and carries fresh bread",
    "two children build a large boat from wood beside the cold river",
    "the new engine needs less fuel than the one it replaces at night",
    "our neighbour sells sweet apples and dark honey on the busy market",
)
_NET = """
import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())


def example_inputs():
    return torch.randn(1, 3, 32, 32)
"""
_OTHER = "stocks fell sharply after banks raised their rates again"

_MAKERS: Mapping[str, Callable[[Path], object]] = {
    "bert": lambda path: save_task_checkpoint(path, "bert", "BertModel", text_tokenizer(), **_TEXT),
    "classifier": lambda path: save_task_checkpoint(
        path, "bert", "BertForSequenceClassification", text_tokenizer(), labels=_LABELS, **_TEXT
    ),
    "llama": lambda path: save_decoder(path, max_position_embeddings=1024),
    "llama-awq": _save_awq,
    "french adapter": lambda path: _save_adapter(path, 1),
    "polite adapter": lambda path: _save_adapter(path, 2),
    "gpt2": lambda path: save_decoder(path, "gpt2"),
    "t5": lambda path: save_encoder_decoder(path, "t5", num_layers=1),
    "whisper": _save_whisper,
    "llava": _save_llava,
    "clip": lambda path: save_checkpoint("clip", path),
    "resnet": lambda path: save_checkpoint("resnet", path),
    "vit": _save_vit,
    "pictures": _save_pictures,
    "sentences.parquet": _save_sentences,
    "net.py": _save_net,
    "sentences.txt": _save_lines,
    "pairs.csv": _save_pairs,
    "photo.jpg": save_image,
    "lecture.wav": _save_lecture,
}
_DATA: Mapping[str, Callable[[Supplies, Path], None]] = {
    "reviews.csv": Supplies._reviews,
    "half-minilm": Supplies._half,
    "optimized.onnx": Supplies._optimized,
    "sample.npz": Supplies._sample,
}
"""Supplies made from other supplies."""
_FROM: Mapping[str, tuple[str, ...]] = {
    "export": ("export", "-m", "SOURCE", "-o", "model.onnx"),
    "open export": ("export", "-m", "SOURCE", "-o", "model.onnx", *_OPEN),
    "build": ("build", "-m", "SOURCE", "-o", ".", "--no-verify"),
    # TorchScript as in the tests: dynamo takes half a minute for a Whisper.
    "quick build": ("build", "-m", "SOURCE", "-o", ".", "--no-verify", "-c", '{"export": {"exporter": "torchscript"}}'),
}
"""Supply name, for example ``export of bert`` → command that makes the folder."""
