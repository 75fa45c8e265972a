"""Opens the tokenizer, image processor or feature extractor beside a model.

Only local files are used; code in a checkpoint is not run. The input names of a graph, as in transformers, determine
its processors. Tokenizers are called without their warnings and with the sizes of the graph.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from winml.modelkit.errors import InputError, TaskError, UsageError, first_line, is_panic
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from winml.modelkit.onnx.files.foreign_files import foreign_parser, library_file
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.foreign_libraries import has_transformers, library_folder
from winml.modelkit.ort.shared_settings import shared_by_threads
from winml.modelkit.samples.media import require_pillow


class _FileConfig:
    """Values of a ``config.json`` as attributes, as in the configs of transformers; missing values are None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Store the values; names of classes are by number."""
        names = values.get("id2label") or dict(enumerate(("LABEL_0", "LABEL_1")))
        self.id2label = {int(number): str(name) for number, name in names.items()}
        self._values = values

    def __getattr__(self, name: str) -> Any:
        """Return a value of the file."""
        return self.__dict__.get("_values", {}).get(name)


def open_config(folder: Path) -> Any:
    """Return the config in a folder, of transformers if that is installed, or None if there is no config.

    Raises:
        InputError: the config is damaged.
    """
    path = library_file(folder, CHECKPOINT_CONFIG_NAME)
    if path is None:
        return None
    if not has_transformers():
        return _FileConfig(_read_json_object(folder, CHECKPOINT_CONFIG_NAME))
    with library_folder(folder, f"{path} cannot be read", hint="Correct or replace it."):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder)


_HIDDEN_STATES = "last_hidden_state"
"""Specified by transformers: output of a model without the head of a task."""


def architecture_task(folder: Path, outputs: Collection[str]) -> tuple[str, str] | None:
    """Return the task of the architecture in a folder's config, and the rule in words.

    None without a config that transformers reads, without a known architecture, and for a graph without its head.

    Args:
        folder: Folder with a ``config.json``.
        outputs: Names of the outputs of the graph.
    """
    if _HIDDEN_STATES in outputs or not has_transformers():
        return None
    from winml.modelkit.models.checkpoints.task import resolve_task

    try:
        config = open_config(folder)
        decision = resolve_task(config) if getattr(config, "architectures", None) else None
    except (InputError, TaskError):
        return None
    return (decision.task, decision.rule) if decision is not None else None


ProcessorKind = Literal["tokenizer", "image processor", "feature extractor"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
"""A tokenizer has at least one of these files."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""An image processor or feature extractor has one of these files."""


@dataclass(frozen=True)
class _KindInfo:
    data: str
    """Noun of its data, for messages."""
    class_name: str
    files: tuple[str, ...]
    input_names: frozenset[str]


_KINDS: dict[ProcessorKind, _KindInfo] = {
    "tokenizer": _KindInfo(
        "texts", "AutoTokenizer", _TOKENIZER_FILES, frozenset({"input_ids", "attention_mask", "token_type_ids"})
    ),
    "image processor": _KindInfo(
        "pictures", "AutoImageProcessor", _PROCESSOR_FILES, frozenset({"pixel_values", "pixel_mask"})
    ),
    "feature extractor": _KindInfo(
        "recordings", "AutoFeatureExtractor", _PROCESSOR_FILES, frozenset({"input_values", "input_features"})
    ),
}


def kinds_for(input_names: Iterable[str]) -> tuple[ProcessorKind, ...]:
    """Return the kinds of processors for inputs with these names.

    An attention mask beside audio inputs belongs to the feature extractor, not to a tokenizer.
    """
    names = set(input_names)
    if "input_ids" not in names and names & _KINDS["feature extractor"].input_names:
        return ("feature extractor",)
    return tuple(kind for kind, info in _KINDS.items() if names & info.input_names)


def missing_processors(
    input_names: Iterable[str], folder: Path, unread: Collection[str] = ()
) -> tuple[tuple[ProcessorKind, str, tuple[str, ...]], ...]:
    """Return the missing processors for inputs with these names, each with its data and its files.

    Args:
        input_names: The names.
        folder: The folder.
        unread: Files that the program opening the folder does not read, and so are not sufficient.
    """
    processors = (
        (kind, _KINDS[kind].data, tuple(name for name in _KINDS[kind].files if name not in unread))
        for kind in kinds_for(input_names)
    )
    return tuple(processor for processor in processors if not any((folder / name).is_file() for name in processor[2]))


def processor_files(folder: Path) -> tuple[Path, ...]:
    """Return the files in a folder that configure its processors."""
    files = (folder / name for name in (*_TOKENIZER_FILES, *_PROCESSOR_FILES))
    return tuple(path for path in files if path.is_file())


def open_processor(kind: ProcessorKind, folder: Path, option: str, *, instead: str = "or use .npz files") -> Any:
    """Open the transformers object of a processor, or one with the same calls if transformers is not installed.

    Args:
        kind: Kind of the processor.
        folder: Checkpoint folder, or the folder of an ONNX file with the files beside it.
        option: Option with the data, for messages.
        instead: Alternative without a processor, for messages.

    Raises:
        UsageError: the folder has no such processor, or a package is missing.
        InputError: its files are damaged.
    """
    info = _KINDS[kind]
    if not any((folder / name).is_file() for name in info.files):
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(
            f"{option}: {info.data} require {article} {kind}, but there is none beside the model in {folder}",
            hint=f"Copy the checkpoint's {kind} files there ({', '.join(info.files)}), {instead}.",
        )
    if kind == "image processor":
        require_pillow(f"{option}: ")
    if not has_transformers():
        return _open_file_processor(kind, folder, option)
    with library_folder(folder, f"the {kind} in {folder} cannot be read", hint="Correct or replace its files."):
        import transformers

        with tokenizer_call(folder):
            return getattr(transformers, info.class_name).from_pretrained(folder)


def _open_file_processor(kind: ProcessorKind, folder: Path, option: str) -> Any:
    """Open a processor from its JSON files.

    Raises:
        UsageError: only transformers reads these files.
        InputError: the files are damaged.
    """
    path, hint = library_file(folder, TOKENIZER_NAME), "Correct or replace its files."
    with foreign_parser(f"the {kind} in {folder} cannot be read", hint=hint), tokenizer_call(folder):
        if kind == "tokenizer" and path is not None:
            from winml.modelkit.samples.file_tokenizer import FileTokenizer

            names = ("special_tokens_map.json", TOKENIZER_CONFIG_NAME)
            values = [_read_json_object(folder, name) for name in names]
            return FileTokenizer(path, {**values[0], **values[1]})
        if kind == "image processor":
            from winml.modelkit.samples.file_image_processor import FileImageProcessor, is_readable

            config = _read_json_object(folder, "preprocessor_config.json")
            config = config or _read_json_object(folder, "processor_config.json").get("image_processor", {})
            if is_readable(config):
                return FileImageProcessor(config)
    raise UsageError(
        f"{option}: the {kind} in {folder} is read by transformers, which is not installed",
        hint="Install it: pip install transformers. It reads them without PyTorch.",
    )


def position_count(folder: Path) -> int | None:
    """Return the number of token positions stated in the config of a folder; None if not stated.

    Raises:
        InputError: the config is damaged.
    """
    config = _read_json_object(folder, CHECKPOINT_CONFIG_NAME)
    values = (config.get(name) for name in ("max_position_embeddings", "n_positions"))
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def sentence_length(folder: Path) -> int | None:
    """Return the maximum number of tokens in the sentence-transformers file of a folder; None without such a file.

    Raises:
        InputError: the file is damaged.
    """
    value = _read_json_object(folder, "sentence_bert_config.json").get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None


def _read_json_object(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file of a folder; ``{}`` if the file does not exist.

    Raises:
        InputError: the file is damaged.
    """
    path, hint = library_file(folder, name), "Correct or replace it."
    if path is None:
        return {}
    with foreign_parser(f"{path} cannot be read", hint=hint):
        content = read_json_file(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} contains no JSON object", hint=hint)
    return content


LONGEST_TEXT_CHARACTERS: Final = 4_000_000
"""Maximum number of characters of one call. Measured: 200 bytes of memory per character. Chosen: a million tokens of
four letters."""
_PANIC_TEXT = b" panicked at "
"""Specified: text on stderr of a Rust panic, between the name of the thread and the source location."""


@contextlib.contextmanager
def tokenizer_call(source: Path | object, *texts: object, label: str = "") -> Iterator[None]:
    """Refuse texts that are too long; convert failures of a tokenizers call to an InputError that names the file.

    Args:
        source: Folder of the tokenizer, or the transformers tokenizer.
        *texts: Encoded texts: a text, or lists of texts.
        label: Source of the texts, for messages.

    Raises:
        InputError: the texts are too long, or the library fails on them or on its file.
    """
    start = f"{label}: " if label else ""
    characters = sum(map(_count_characters, texts))
    if characters > LONGEST_TEXT_CHARACTERS:
        raise InputError(
            f"{start}the text has {characters} characters; the maximum is {LONGEST_TEXT_CHARACTERS}",
            hint="Shorten it.",
        )
    try:
        with _suppress_panics():
            yield
    except BaseException as error:
        # The library itself raises no subclass of Exception.
        if type(error) is not Exception and not is_panic(error):
            raise
        raise InputError(
            f"{start}{_tokenizer_file(source)}: the tokenizers library cannot use it: {first_line(error)}",
            hint="Correct or replace the file, or build the model again.",
        ) from error


def _count_characters(texts: object) -> int:
    if isinstance(texts, str):
        return len(texts)
    return sum(map(_count_characters, texts)) if isinstance(texts, Iterable) else 0


def _tokenizer_file(source: Path | object) -> Path:
    folder = source if isinstance(source, Path) else Path(str(getattr(source, "name_or_path", "")))
    path = folder / TOKENIZER_NAME
    return path if path.is_file() else folder


@shared_by_threads
def _suppress_panics() -> Iterator[None]:
    """Buffer output to descriptor 2, and write it afterwards unless it contains a panic message."""
    try:
        stderr_copy, buffer = os.dup(2), tempfile.TemporaryFile()  # noqa: SIM115  # closed below
    except OSError:
        # Without a stderr, or without space for a temporary file, no output is buffered.
        yield
        return
    os.dup2(buffer.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        buffer.seek(0)
        output = buffer.read()
        buffer.close()
        with contextlib.suppress(OSError):
            if output and _PANIC_TEXT not in output:
                os.write(stderr_copy, output)
        os.close(stderr_copy)
