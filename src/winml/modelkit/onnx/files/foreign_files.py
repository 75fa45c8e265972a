"""Reading of folders made by others: files that may be opened, and conversion of parser errors.

Libraries such as transformers open files of a folder by fixed names. Each of these files has to pass
:func:`check_library_files` before a library gets the folder: a link could lead to any file of the machine, and reading
a pipe or a device would never end. Files that are copied out of a folder pass the same check. No other library is
needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from winml.modelkit.errors import (
    InputError,
    WinMLError,
    failed_import,
    first_line,
    import_error,
    is_panic,
    missing_library,
)
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below, file_within
from winml.modelkit.options import JsonError, read_json_file

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
"""Every file name in ``vocab_files_names`` of transformers' tokenizers; a test compares them with the installed
tokenizers.
"""
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
"""Names of files at the top of a checkpoint that are copied next to its ONNX file."""
_NOT_COPIED = frozenset({"adapter_config.json", "tekken.json", "tiktoken.model"})
"""Further names that transformers opens."""
_OF_A_VERSION = re.compile(r"(config|tokenizer)\.\d+(\.\d+)*\.json")
"""Files that transformers reads instead, from the version in the name on."""
_VERSION_LISTS = {"config.json": "configuration_files", "tokenizer_config.json": "fast_tokenizer_files"}
"""Specified by transformers: file → key with the paths of files for other versions, which transformers opens at any
listed path.
"""
TEMPLATES_FOLDER = "additional_chat_templates"
"""Specified by transformers: folder of further chat templates, ``*.jinja``."""

_REMEDY = "Put a copy of the file there instead, or remove it."


def is_companion_name(name: str) -> bool:
    """Return True for the name of a file to copy next to an ONNX file."""
    return name in COMPANION_NAMES or _OF_A_VERSION.fullmatch(name) is not None


def library_file(folder: Path, name: str, *, error: type[InputError] = InputError) -> Path | None:
    """Return a file of a folder by its name; `None` for a missing file or a folder.

    Args:
        folder: The folder.
        name: Path below it, with ``/`` between parts.
        error: Type of the error to raise.

    Raises:
        InputError: the name is a link to another folder or to a missing file, a pipe, a device or a socket.
    """
    try:
        return file_below(folder, name)
    except ForeignNameError as problem:
        path = folder / name
        if problem.problem == "missing" and path.is_symlink():
            hint = "Restore the file that it leads to, or delete the link."
            raise error(f"{path}: is a link to {path.readlink()}, which does not exist", hint=hint) from None
        if problem.problem == "missing" or path.is_dir():
            return None
        raise error(f"{path}: {problem}", hint=_REMEDY) from None


def check_library_files(folder: Path, *, error: type[InputError] = InputError) -> tuple[Path, ...]:
    """Check the files of a folder that libraries open by name; return the files. `()` for a path that is no folder.

    Raises:
        InputError: a file is a link to another folder, a pipe, a device or a socket; or a config lists a file outside
            of the folder for another version of transformers.
    """
    if not folder.is_dir():
        return ()
    names = {entry.name for entry in folder.iterdir() if is_companion_name(entry.name) or entry.name in _NOT_COPIED}
    templates = folder / TEMPLATES_FOLDER
    if templates.is_dir():
        names |= {f"{TEMPLATES_FOLDER}/{entry.name}" for entry in templates.iterdir() if entry.suffix == ".jinja"}
    paths = {name: library_file(folder, name, error=error) for name in sorted(names)}
    for holder, key in _VERSION_LISTS.items():
        if (config := paths.get(holder)) is not None:
            for name in _listed_names(config, key):
                paths[name] = file_within(folder, name, f"{config}: {key}", missing_ok=True, error=error)
    return tuple(path for path in paths.values() if path is not None)


def _listed_names(config: Path, key: str) -> list[str]:
    """Return the file names under a key of a config; `[]` for a damaged config, reported by its reader."""
    from winml.modelkit.options import JsonError, read_json_file  # imports pydantic

    try:
        content = read_json_file(config)
    except (JsonError, OSError):
        return []
    names = content.get(key) if isinstance(content, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@contextmanager
def foreign_parser(
    words: str,
    *,
    error: type[InputError] = InputError,
    hint: str = "",
    reason: Callable[[BaseException], str] = first_line,
    spared: type[Exception] | tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Replace any error of a parser of foreign files by an error that names the file.

    Args:
        words: Subject and verb of the message, such as ``FILE cannot be read``; empty: the reason alone.
        error: Type of the error to raise.
        hint: What the user can do.
        reason: Returns the reason from the error of the parser.
        spared: Errors that the caller handles.

    Raises:
        InputError: the parser failed, or a package that it imports is broken. Errors of this package pass unchanged.
    """
    try:
        yield
    except BaseException as failure:
        if isinstance(failure, (WinMLError, spared)):
            raise
        if not isinstance(failure, Exception) and not is_panic(failure):
            raise
        if (missing := missing_library(failure)) is not None:
            raise missing from failure
        broken = import_error(failure)
        # Modules of transformers also fail on the requests of a file.
        if broken is not None and failed_import(failure) != "transformers":
            raise broken from failure
        text = reason(failure)[:_LONGEST_REASON]
        if isinstance(failure, KeyError):
            text = f"key {text} is missing"
        raise error(f"{words}: {text}" if words else text, hint=hint) from failure


_LONGEST_REASON = 400
"""Characters of a message of a library. Chosen: some print the whole value that they reject."""


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in a file next to a model; ``{}`` if the file does not exist.

    Raises:
        InputError: the file is damaged, or a link that leads out of the folder.
    """
    path = library_file(folder, name)
    if path is None:
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint or "Build the model again.") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}: not a JSON object", hint="Build the model again.")
    return record
