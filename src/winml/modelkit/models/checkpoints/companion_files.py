"""Selection of the checkpoint files read by tokenizers, processors and pipelines.

Files are selected by the names that transformers and sentence-transformers use, and no further file of a folder is ever
copied. Only ``modules.json`` is opened, in which sentence-transformers names folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.file_names import CARD_NAME, is_pipeline_folder, is_plain_name
from winml.modelkit.models.checkpoints.weight_files import FORMATS
from winml.modelkit.onnx.files import foreign_files
from winml.modelkit.onnx.files.foreign_names import name_problem
from winml.modelkit.options import read_text_file

_MODULES_WITH_WEIGHTS = frozenset({"CNN", "Dense", "LSTM", "LayerNorm", "WeightedLayerPooling"})
"""Classes of sentence-transformers that process the model's outputs, and so are no part of the ONNX file."""
_MODULE_SUFFIXES = frozenset({".json", ".txt"})
LARGEST_COMPANION = 200_000_000
"""Bytes. Chosen: vocabularies of 40 MB are usual, weights and data sets are larger."""
LARGEST_MODULE_WEIGHTS = 100_000_000
"""Bytes. Chosen: weights of a layer on top of a model have a few million bytes."""
_LARGEST_MODULE_FILE = 10_000_000
"""Bytes. Chosen: configs, and word weights by name."""


def companion_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder that accompany its ONNX file: name, ``/`` between parts → file.

    Included are files at the top, ``.jinja`` files of the folder of chat templates, and files of folders that
    ``modules.json`` names, such as ``1_Pooling/config.json``. Excluded are files with other names, files of more than
    200 MB, and hidden files. `{}` for a path that is no folder. A diffusers pipeline has index, configs, tokenizers and
    scheduler.

    Raises:
        CheckpointError: a file is a link that leads out of the folder, a pipe, a device or a socket.
    """
    if not folder.is_dir():
        return {}
    if is_pipeline_folder(folder):
        from winml.modelkit.models.checkpoints.pipeline_files import read_pipeline_files  # only for pipelines

        return read_pipeline_files(folder).companions()
    names = [path.name for path in folder.iterdir() if foreign_files.is_companion_name(path.name)]
    if (templates := folder / foreign_files.TEMPLATES_FOLDER).is_dir():
        names += [
            f"{foreign_files.TEMPLATES_FOLDER}/{path.name}" for path in templates.iterdir() if path.suffix == ".jinja"
        ]
    files = _find_files(folder, names, LARGEST_COMPANION)
    if foreign_files.MODULES_NAME in files:
        for subfolder, type_name in _read_modules(files[foreign_files.MODULES_NAME]):
            files |= _module_files(folder, subfolder, type_name)
    visible = (name for name in sorted(files) if not files[name].name.startswith("."))
    return {name: files[name] for name in visible}


def module_names(companions: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the classes of the modules of sentence-transformers that follow the transformer, in order.

    Args:
        companions: Name → companion file of a model.
    """
    path = companions.get(foreign_files.MODULES_NAME)
    return () if path is None else tuple(type_name or folder for folder, type_name in _read_modules(path))


def card_files(folder: Path) -> dict[str, Path]:
    """Return card and licence of a checkpoint folder: name → file. `{}` for a path that is no folder.

    Raises:
        CheckpointError: a file is a link that leads out of the folder, a pipe, a device or a socket.
    """
    if not folder.is_dir():
        return {}
    names = sorted(path.name for path in folder.iterdir() if CARD_NAME.fullmatch(path.name))
    return _find_files(folder, names, _LARGEST_MODULE_FILE)


def _find_files(folder: Path, names: Iterable[str], size_bytes: int) -> dict[str, Path]:
    """Return the existing files of these names up to a size: name → file."""
    paths = ((name, foreign_files.library_file(folder, name, error=CheckpointError)) for name in names)
    return {name: path for name, path in paths if path is not None and path.stat().st_size <= size_bytes}


def _read_modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield folder and class of each module in ``modules.json``; nothing if the file is missing or damaged."""
    try:
        content: Any = json.loads(read_text_file(path))
    except (OSError, ValueError, RecursionError):
        return
    for entry in content if isinstance(content, list) else ():
        subfolder, type_name = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        # "" is the transformer itself. Paths that leave the folder are ignored.
        if not isinstance(subfolder, str) or not is_plain_name(subfolder) or subfolder.startswith("."):
            continue
        if name_problem(path.parent, subfolder, kind="folder") is None:
            yield subfolder, type_name.rpartition(".")[2] if isinstance(type_name, str) else ""


def _module_files(folder: Path, subfolder: str, type_name: str) -> dict[str, Path]:
    """Return the files of one folder named in ``modules.json``."""
    indexes = {index for _, _, index in FORMATS}
    names = {path.name for path in (folder / subfolder).iterdir()} - indexes
    small = [f"{subfolder}/{name}" for name in names if Path(name).suffix in _MODULE_SUFFIXES]
    large = [f"{subfolder}/{name}" for name in names if foreign_files.is_companion_name(name)]
    files = _find_files(folder, small, _LARGEST_MODULE_FILE) | _find_files(folder, large, LARGEST_COMPANION)
    if type_name in _MODULES_WITH_WEIGHTS:
        weights = _find_files(folder, [f"{subfolder}/{single}" for _, single, _ in FORMATS], LARGEST_MODULE_WEIGHTS)
        files |= dict(list(weights.items())[:1])
    return files
