"""Which files of a checkpoint do its tokenizer, its processors and pipelines read?

Goes by the names that transformers and sentence-transformers give their files, so that nothing else of a folder is ever
copied. None of the files is opened, but ``modules.json``, in which sentence-transformers names folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from winml.modelkit.file_names import is_plain_name
from winml.modelkit.graph.files.foreign_names import name_problem
from winml.modelkit.load.checkpoints.weight_files import FORMATS

__all__ = [
    "COMPANION_NAMES",
    "LARGEST_COMPANION",
    "LARGEST_MODULE_WEIGHTS",
    "MODULES_NAME",
    "card_files",
    "companion_files",
]

MODULES_NAME = "modules.json"
"""Names the modules of a sentence-transformers checkpoint and the folders they are in."""
_VOCABULARY_NAMES = frozenset(
    {
        "bpe.codes",
        "byte_maps.json",
        "dict.txt",
        "emoji.json",
        "entity_vocab.json",
        "merges.txt",
        "normalizer.json",
        "prophetnet.tokenizer",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "source.spm",
        "spiece.model",
        "spm.model",
        "spm_char.model",
        "target.spm",
        "target_vocab.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab-src.json",
        "vocab-tgt.json",
        "vocab.json",
        "vocab.txt",
        "word_pronunciation.json",
        "word_shape.json",
    }
)
"""Every file name in ``vocab_files_names`` of transformers' tokenizers; a test compares them with those installed."""
_TRANSFORMERS_NAMES = frozenset(
    {
        "added_tokens.json",
        "audio_tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "video_preprocessor_config.json",
    }
)
"""Constants in ``transformers.utils`` and ``transformers.tokenization_utils_base``; image processors and feature
extractors share a name."""
_SENTENCE_TRANSFORMERS_NAMES = frozenset(
    {
        MODULES_NAME,
        "config_sentence_transformers.json",
        "sentence_albert_config.json",
        "sentence_bert_config.json",
        "sentence_camembert_config.json",
        "sentence_distilbert_config.json",
        "sentence_roberta_config.json",
        "sentence_xlm-roberta_config.json",
        "sentence_xlnet_config.json",
    }
)
COMPANION_NAMES = _VOCABULARY_NAMES | _TRANSFORMERS_NAMES | _SENTENCE_TRANSFORMERS_NAMES
"""Names of files at the top of a checkpoint that go beside its ONNX file."""
_OF_A_VERSION = re.compile(r"(config|tokenizer)\.\d+(\.\d+)*\.json")
"""What transformers from that version on reads instead."""
_OF_CARD = re.compile(r"(README|LICEN[SC]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
"""How the Hub's checkpoints name their card, licence and what goes with it."""
_TEMPLATES_FOLDER = "additional_chat_templates"
_MODULES_WITH_WEIGHTS = frozenset({"CNN", "Dense", "LSTM", "LayerNorm", "WeightedLayerPooling"})
"""Classes of sentence-transformers that work on what the model returns, and so are no part of the ONNX file."""
_MODULE_SUFFIXES = frozenset({".json", ".txt"})
LARGEST_COMPANION = 200_000_000
"""Bytes. Chosen: vocabularies of 40 MB are usual, weights and data sets begin above."""
LARGEST_MODULE_WEIGHTS = 100_000_000
"""Bytes. Chosen: those of a layer on top of a model have a few millions."""
_LARGEST_MODULE_FILE = 10_000_000
"""Bytes. Chosen: configs, and the weights of words by name."""


def companion_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder that go beside its ONNX file: name, ``/`` between parts → file.

    Besides those at the top, these are the files of the folders that ``modules.json`` names, such as
    ``1_Pooling/config.json``. Files of other names, of more than 200 MB, and hidden ones stay behind. Empty for a path
    that is no folder.
    """
    if not folder.is_dir():
        return {}
    files = [path for path in folder.iterdir() if _is_companion(path)]
    templates = folder / _TEMPLATES_FOLDER
    if templates.is_dir():
        files += (
            path for path in templates.iterdir() if path.suffix == ".jinja" and _is_up_to(path, LARGEST_COMPANION)
        )
    for place, type_name in _modules(folder / MODULES_NAME):
        files += _module_files(folder / place, type_name)
    shown = (path for path in sorted(set(files)) if not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in shown}


def card_files(folder: Path) -> dict[str, Path]:
    """Return card and licence of a checkpoint folder: name → file. Empty for a path that is no folder."""
    if not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if _OF_CARD.fullmatch(path.name) and _is_small(path)}


def _is_small(path: Path) -> bool:
    return _is_up_to(path, _LARGEST_MODULE_FILE)


def _is_companion(path: Path) -> bool:
    is_known = path.name in COMPANION_NAMES or _OF_A_VERSION.fullmatch(path.name)
    return bool(is_known) and _is_up_to(path, LARGEST_COMPANION)


def _is_up_to(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size <= size_bytes


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the folders that ``modules.json`` names, each with its class; none where it is missing or damaged."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for entry in content if isinstance(content, list) else ():
        place, type_name = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        # "" is the transformer itself. Names that lead out of the folder are nobody's.
        if not isinstance(place, str) or not is_plain_name(place) or place.startswith("."):
            continue
        if name_problem(path.parent, place, kind="folder") is None:
            yield place, type_name.rpartition(".")[2] if isinstance(type_name, str) else ""


def _module_files(folder: Path, type_name: str) -> Iterator[Path]:
    indexes = {index for _, _, index in FORMATS}
    for path in folder.iterdir():
        is_small = path.suffix in _MODULE_SUFFIXES and _is_up_to(path, _LARGEST_MODULE_FILE)
        if path.name not in indexes and (is_small or _is_companion(path)):
            yield path
    if type_name in _MODULES_WITH_WEIGHTS:
        weights = (folder / single for _, single, _ in FORMATS)
        yield from [path for path in weights if _is_up_to(path, LARGEST_MODULE_WEIGHTS)][:1]
