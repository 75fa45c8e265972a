"""Models of sentence-transformers whose encoder is the graph of a build."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.generate.answering import TEXT
from winml.modelkit.generate.auto_model import WinMLAutoModel
from winml.modelkit.onnx.files.foreign_files import MODULES_NAME, foreign_parser, library_file, read_record
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.python_functions import python_function
from winml.modelkit.samples.preprocessing import text_limit
from winml.modelkit.samples.processors import open_processor, tokenizer_call

_SETTINGS_NAME, _ENCODER_NAME = "config_sentence_transformers.json", "sentence_bert_config.json"
"""Specified by sentence-transformers: settings of a model, and those of its encoder."""
_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name")
"""Specified: keys of the settings that are arguments of ``SentenceTransformer``."""
_PACKAGE = "sentence_transformers."
_POOLED = "sentence_embedding"
"""Specified: name of the pooled embedding, also as the output of a graph that pools."""
_OF_TOKENS = ("last_hidden_state", "token_embeddings")
"""Specified by transformers and by sentence-transformers: names of the output with the embeddings of tokens."""
_UNLIMITED = 1 << 20
"""Chosen: maximum tokens of a text that states no limit."""


@python_function()
def load_sentence_transformer(folder: str | os.PathLike[str], *, ep: str | None = None) -> Any:
    """Open a build folder as a model of sentence-transformers whose encoder runs in ONNX Runtime.

    Pooling, normalization and prompts are those of the checkpoint, and no weights of the encoder are read.

    Args:
        folder: Folder of the build, with the files of the checkpoint.
        ep: Execution provider; None: the CPU.

    Returns:
        A ``SentenceTransformer``: ``load_sentence_transformer("built").encode(["A dog runs."])``.

    Raises:
        UsageError: a module is not of sentence-transformers, or the provider is unknown.
        InputError: sentence-transformers 6 is not installed, a file is damaged, or the graph embeds no tokens.
        StageError: ONNX Runtime cannot load the graph.

    Example:
        ```python
        model = load_sentence_transformer("sentences")
        print(model.encode(["A dog runs.", "A puppy is running."]).shape)
        ```
    """
    try:
        from sentence_transformers import SentenceTransformer

        importlib.import_module("sentence_transformers.sentence_transformer.modules")
    except ImportError as error:
        raise InputError(
            "load_sentence_transformer needs sentence-transformers 6 or later",
            hint="Install the extra sentences: pip install '.[sentences]' in the folder of winml's source code.",
        ) from error
    path = Path(folder)
    encoder = _make_encoder(path, ep)
    with foreign_parser(
        f"{path}: its modules of sentence-transformers cannot be loaded", hint="Build the model again."
    ):
        modules = [] if _POOLED in encoder.outputs else _load_modules(path, encoder.width)
        settings = read_record(path, _SETTINGS_NAME)
        options = {key: settings[key] for key in _SETTINGS if settings.get(key) is not None}
        return SentenceTransformer(modules=[encoder, *modules], device="cpu", **options)


def _make_encoder(folder: Path, ep: str | None) -> Any:
    """Return the module of sentence-transformers that tokenizes texts and runs the graph."""
    from sentence_transformers.base.modules import Module

    model = WinMLAutoModel.from_pretrained(folder, ep=ep)
    tokenizer = open_processor("tokenizer", folder, "texts")
    tokenizer.model_max_length = text_limit(folder, tokenizer, at_most=_UNLIMITED)
    is_lower = bool(read_record(folder, _ENCODER_NAME).get("do_lower_case"))
    names = [spec.name for spec in model.inputs]
    output_names = [value.name for value in read_structure(Path(model.path)).graph.output]
    tokens_name = next((name for name in _OF_TOKENS if name in output_names), "")
    if not tokens_name and _POOLED not in output_names:
        raise InputError(
            f"{folder}: no output of the graph is an embedding of tokens: {', '.join(output_names)}",
            hint="Build it with task='feature-extraction'.",
        )

    class GraphEncoder(Module):
        """Encoder of texts in ONNX Runtime."""

        outputs = tuple(output_names)
        width = int(getattr(model.config, "hidden_size", 0))

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.tokenizer = tokenizer

        @property
        def max_seq_length(self) -> int:
            return int(tokenizer.model_max_length)

        def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_options: Any) -> dict[str, Any]:
            features = self._tokenize([f"{prompt or ''}{text}" for text in inputs])
            if prompt:
                tokens = self._tokenize([prompt])[TEXT][0].tolist()
                # Pooling may exclude the prompt, of which a special token at the end is no part.
                features["prompt_length"] = len(tokens) - (tokens[-1] in tokenizer.all_special_ids)
            return features

        def _tokenize(self, texts: list[str]) -> dict[str, Any]:
            texts = [text.lower() for text in texts] if is_lower else texts
            with tokenizer_call(tokenizer, *texts):
                return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        def forward(self, features: dict[str, Any], **_options: Any) -> dict[str, Any]:
            outputs = model(**{name: features[name] for name in names if name in features})
            if _POOLED in outputs:
                return {**features, _POOLED: outputs[_POOLED]}
            return {**features, "token_embeddings": outputs[tokens_name]}

        def get_embedding_dimension(self) -> int:
            return self.width

        def save(self, *_arguments: Any, **_options: Any) -> None:
            raise UsageError(f"{folder}: a built model is not saved by sentence-transformers", hint="Copy the folder.")

    return GraphEncoder()


def _load_modules(folder: Path, width: int) -> list[Any]:
    """Load the modules after the encoder; mean pooling if the folder has no ``modules.json``.

    Raises:
        UsageError: a module is not of sentence-transformers: it would be code of the checkpoint.
        InputError: ``modules.json`` is damaged.
    """
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.util import import_from_string

    path = library_file(folder, MODULES_NAME)
    if path is None:
        return [Pooling(width, "mean")]
    try:
        entries = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error
    modules = []
    for entry in entries:
        if not entry["path"]:
            continue  # the encoder
        if not entry["type"].startswith(_PACKAGE):
            raise UsageError(
                f"{path}: module {entry['type']} is not of sentence-transformers",
                hint="Load the model with SentenceTransformer, which can run code of the checkpoint.",
            )
        module_class: Any = import_from_string(entry["type"])
        modules.append(module_class.load(str(folder), subfolder=entry["path"]))
    return modules
