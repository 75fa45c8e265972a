"""Which files of a checkpoint do its tokenizer, its processors and pipelines read?

Looks at names only: none of the files is opened, but ``modules.json``, in which sentence-transformers names folders.
Weights are no companions, nor is what a training left behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from winml.modelkit.file_names import BUILD_CONFIG_NAME, BUILD_MANIFEST_NAME, EXTRACT_MANIFEST_NAME, SIDECAR_SUFFIX
from winml.modelkit.load.checkpoints.weight_files import FORMATS

__all__ = ["COMPANION_SUFFIXES", "companion_files"]

COMPANION_SUFFIXES = frozenset(
    {".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".vocab", ".codes", ".bpe", ".dict"}
)
"""Endings of configs, vocabularies, merges, sentencepiece models and chat templates, as transformers' classes name
theirs in ``vocab_files_names``."""
_OF_A_TRAINING = ("trainer_state.json", "*_results.json")
"""What transformers' Trainer writes beside a checkpoint."""
_OURS = (f"*{SIDECAR_SUFFIX}", BUILD_CONFIG_NAME, BUILD_MANIFEST_NAME, EXTRACT_MANIFEST_NAME)
_MODULES_FILE = "modules.json"


def companion_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder that go beside its ONNX file: name, ``/`` between parts → file.

    Besides those at the top, these are the files of the folders that ``modules.json`` names, such as
    ``1_Pooling/config.json``. Empty for a path that is no folder.
    """
    if not folder.is_dir():
        return {}
    skipped = (*_OF_A_TRAINING, *_OURS, *(index for _, _, index in FORMATS))
    top = (path for path in folder.iterdir() if path.suffix in COMPANION_SUFFIXES and not path.name.startswith("."))
    files = [path for path in top if not any(fnmatch(path.name, pattern) for pattern in skipped)]
    for place in _module_folders(folder / _MODULES_FILE):
        files += (folder / place).iterdir()
    return {path.relative_to(folder).as_posix(): path for path in sorted(files) if path.is_file()}


def _module_folders(path: Path) -> Iterator[str]:
    """Yield the folders that ``modules.json`` names; none where it is missing or damaged."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for entry in content if isinstance(content, list) else ():
        place = entry.get("path") if isinstance(entry, dict) else None
        # "" is the transformer itself. Names that lead out of the folder are nobody's.
        if not isinstance(place, str) or not place or PurePosixPath(place).name != place:
            continue
        if (path.parent / place).is_dir():
            yield place
