"""What a layout means for the folder of one build: names, files that come along, files that are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.layouts.layout import PLAIN, Layout, find_layout, refuse_models
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stage_runs import BuiltPart
from winml.modelkit.builds.stages import built_name
from winml.modelkit.errors import InputError
from winml.modelkit.evaluate.processors import missing_processors
from winml.modelkit.file_names import (
    CHECKPOINT_CONFIG_NAME,
    GENAI_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    is_data_of,
    numbered_data_path,
)
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.load.checkpoints.companion_files import companion_files
from winml.modelkit.options import JsonError, read_json_file

__all__ = [
    "FolderLayout",
    "config_naming_data",
    "rewritten_companions",
    "unfit_cache_words",
]


# --- Tells transformers.js in ``config.json`` which models keep weights in files of their own.
#
# A browser knows no folder: it fetches the files that the config counts. Everything else of the config stays as it is.


_SECTION, _COUNTS = "transformers.js_config", "use_external_data_format"
"""Specified: what transformers.js reads for itself; model file → number of its data files."""


def config_naming_data(source: Path, counts: Mapping[str, int]) -> str:
    """Return the text of a config; that of the checkpoint itself where all weights are inside the models.

    Args:
        source: ``config.json`` of the checkpoint.
        counts: Name of each model file → number of its data files.

    Raises:
        InputError: it is damaged.
    """
    try:
        record = read_json_file(source)
        text = source.read_text(encoding="utf-8")
    except JsonError as error:
        raise InputError(f"{source}: {error}", hint=error.hint) from error
    outside = {name: count for name, count in counts.items() if count}
    if not isinstance(record, dict) or not isinstance(record.get(_SECTION, {}), dict):
        raise InputError(f"{source}: is no config: {_SECTION!r} or the whole is no JSON object")
    section = {key: value for key, value in record.get(_SECTION, {}).items() if key != _COUNTS}
    if outside:
        section[_COUNTS] = outside
    if section == record.get(_SECTION, {}):
        return text
    return json.dumps({**record, _SECTION: section}, indent=2, ensure_ascii=False) + "\n"


# --- Does optimum make an empty cache of the sizes that a graph takes?
#
# Before the first token, optimum gives a decoder keys and values of no token. Their number of heads and the size of one
# come from ``config.json``, by a rule of optimum's own: models whose heads have a size of their own are a list of types
# there. Reads JSON and the inputs of graphs only.


_WITH_HEAD_SIZE = frozenset({"gemma", "gemma3_text", "gemma3", "gpt_oss", "nemotron"})
_WITH_KEY_HEADS = frozenset(
    {
        "arcee", "cohere", "gemma", "gemma3", "gemma3_text", "glm", "granite", "gpt_oss", "helium", "mistral", "llama",
        "nemotron", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    }
)  # fmt: skip
"""Specified by optimum-onnx 0.1: model types of which it reads ``head_dim`` and ``num_key_value_heads``."""
_OF_ITS_OWN = frozenset({"deepseek_v3", "bloom", "gpt_bigcode", "falcon"})
"""Specified by the same: types with a rule for themselves."""
_WIDTHS, _HEADS = ("hidden_size", "d_model", "n_embd"), (
    "num_attention_heads", "num_heads", "n_head", "encoder_attention_heads",
)  # fmt: skip
"""Specified by transformers: how configs call the width of a model, and its number of heads."""
_SECTIONS = ("decoder", "text_config")


def unfit_cache_words(config: Path, inputs: Mapping[str, Sequence[int | str | None]]) -> str:
    """Say which cache optimum gives and which one a graph takes; empty where both are the same, or nobody knows.

    Args:
        config: ``config.json`` of the checkpoint.
        inputs: Name → sizes of what the graphs take.
    """
    try:
        record = read_json_file(config)
    except (OSError, JsonError):
        return ""
    shapes = [shape for name, shape in inputs.items() if name.startswith("past_key_values.") and name.endswith(".key")]
    if not isinstance(record, dict) or not shapes or len(shapes[0]) != 4 or record.get("model_type") in _OF_ITS_OWN:
        return ""
    is_encoded = any(".encoder." in name for name in inputs)
    given = _given_by_optimum(record, is_encoded=is_encoded)
    heads, size = shapes[0][1], shapes[0][3]
    if given is None or not isinstance(heads, int) or not isinstance(size, int) or given == (heads, size):
        return ""
    decoder = "model.decoder" if is_encoded else "model"
    names = f"{decoder}.{'num_attention_heads' if is_encoded else 'num_key_value_heads'}"
    return (
        f"optimum-onnx 0.1 makes an empty cache of {given[0]} heads of {given[1]} values from {config.name}, and the "
        f"graph takes {heads} heads of {size}: its generate() fails. After loading, set {names} = {heads} and "
        f"{decoder}.embed_size_per_head = {size}; or generate with WinMLAutoModel."
    )


def _given_by_optimum(record: Mapping[str, Any], *, is_encoded: bool) -> tuple[int, int] | None:
    """Return the heads and their size in the cache that it makes; None where the config does not say it."""
    model_type = record.get("model_type")
    section = next((record[name] for name in _SECTIONS if isinstance(record.get(name), dict)), record)
    width, heads = (_first(section, keys) for keys in (_WIDTHS, _HEADS))
    if width is None or not heads:
        return None
    if is_encoded:
        return heads, width // heads
    size = _first(section, ("head_dim",)) if model_type in _WITH_HEAD_SIZE else None
    key_heads = _first(section, ("num_key_value_heads",)) if model_type in _WITH_KEY_HEADS else None
    return key_heads or heads, size or width // heads


def _first(record: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    return next((record[key] for key in keys if isinstance(record.get(key), int)), None)


# --- Writes files of a checkpoint as readers with code of their own take them; what they hold stays the same.


_CLASS = "tokenizer_class"
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""Specified: how transformers 5 calls what reads ``tokenizer.json``, and how earlier ones and itself do."""

_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
"""Specified: where transformers 5 lists special tokens without a role, and where earlier ones and itself look for them.
"""


def rewritten_companions(layout: Layout, sources: Mapping[str, Path]) -> dict[str, str]:
    """Return the files that go into the folder with other words than the checkpoint has: name → text.

    Args:
        layout: For whom the folder is laid out. optimum pins a transformers before version 5; onnxruntime-genai
            expects a text wherever there is an entry.
        sources: Files that come along: name → file.

    Raises:
        InputError: one is damaged.
    """
    path = sources.get(TOKENIZER_CONFIG_NAME)
    if TOKENIZER_CONFIG_NAME not in layout.written or path is None or TOKENIZER_NAME not in sources:
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error
    if not isinstance(record, dict):
        return {}
    if GENAI_CONFIG_NAME in layout.written:
        changed = {key: value for key, value in record.items() if value is not None}
    else:
        changed = _as_before_transformers_5(record)
    if changed == record:
        return {}
    return {TOKENIZER_CONFIG_NAME: json.dumps(changed, indent=2, ensure_ascii=False) + "\n"}


def _as_before_transformers_5(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a tokenizer in the words that earlier versions read, which version 5 reads as well."""
    changed = {**record, **({_CLASS: _OLD_CLASS} if record.get(_CLASS) == _NEW_CLASS else {})}
    if isinstance(changed.get(_EXTRA), list):
        # A list; as an object, which both know, the key names the role of each token.
        changed[_OLD_EXTRA] = [*(changed.get(_OLD_EXTRA) or ()), *changed.pop(_EXTRA)]
    return changed


class FolderLayout:
    """The layout of one build.

    Attributes:
        copied: Files that come along as they are: name in the folder → file.
        written_names: What is written for the readers besides the models; known once the parts are.
    """

    def __init__(self, plan: BuildPlan, identity: ModelIdentity) -> None:
        """Decide what comes along.

        Raises:
            InputError: a file that is written anew for the readers is damaged.
        """
        self._plan = plan
        self._layout = find_layout(plan.config.layout)
        self._sources = self._found_sources(identity)
        self._rewritten = rewritten_companions(self._layout, self._sources)
        self._config = self._sources.get(CHECKPOINT_CONFIG_NAME) if self._layout.numbers_data else None
        rewritten = {*self._rewritten, *([] if self._config is None else [CHECKPOINT_CONFIG_NAME])}
        self.copied = {name: source for name, source in self._sources.items() if name not in rewritten}
        self.written_names: tuple[str, ...] = ()

    def _found_sources(self, identity: ModelIdentity) -> dict[str, Path]:
        if not self._plan.with_companions:
            return {}
        if self._plan.onnx_path is not None:
            # Without a layout nothing is known of a reader who looks for them.
            return {} if self._layout is PLAIN else companion_files(self._plan.onnx_path.parent)
        return {**identity.companions, **(identity.card if self._layout.with_card else {})}

    def model_name(self, part: BuiltPart) -> str:
        """Return the name of a finished part in the folder, ``/`` between parts."""
        return built_name(part.name, of_several=part.of_several, config=self._plan.config)

    def place(self, part: BuiltPart, folder: Path, files: OutputFiles) -> tuple[str, ...]:
        """Write a finished part under its name, to be put in place with other files.

        Args:
            part: The part.
            folder: The folder of the build.
            files: Where it is written to.

        Returns:
            The names of the files in the folder, the model first; without data that the part shares with its stages,
            where nobody takes the model out of the folder.
        """
        from winml.modelkit.graph.files.numbered_data import place_numbered  # imports onnx
        from winml.modelkit.graph.files.placing import place_copy
        from winml.modelkit.graph.files.self_contained import place_self_contained

        assert part.current is not None  # an export ran, or the model was an ONNX file
        path = folder / self.model_name(part)
        staged = files.reserve(path)
        # A stage's result is ours and stays beside it; the model a build starts from is neither.
        is_ours = bool(part.current_files)
        if self._layout.numbers_data:
            made = place_numbered(part.current, staged, may_link=is_ours)
            for data in made[1:]:
                files.reserve(path.with_name(data.name))  # replaces that of an earlier build, which has the same name
        elif self._plan.is_deployed:
            made = place_self_contained(part.current, staged, may_link=is_ours)
        else:
            shares = is_ours and path.parent == folder  # a model names data files of its own folder only
            made = place_copy(part.current, staged, share_data=shares, may_link=is_ours)
        return tuple(path.with_name(file.name).relative_to(folder).as_posix() for file in made)

    def names_data_of(self, names: Sequence[str]) -> bool:
        """Say whether data is called after its model, and as the readers look for it; the model comes first."""
        model, data = Path(names[0]), names[1:]
        if self._layout.numbers_data:
            return list(data) == [numbered_data_path(model, number).as_posix() for number in range(len(data))]
        return not self._plan.is_deployed or all(is_data_of(model.name, Path(name).name) for name in data)

    def refuse(self, parts: Sequence[BuiltPart]) -> None:
        """Refuse graphs that the readers do not know, before anything else is done with them.

        Raises:
            UsageError: names what they do not know.
        """
        models = [part.current for part in parts if part.current is not None]
        if self._layout is not PLAIN and models:
            refuse_models(self._layout, models)
            self.written(parts, {})

    def notes(self, parts: Sequence[BuiltPart], folder: Path) -> tuple[str, ...]:
        """Return what readers of a finished folder miss, where it is laid out for some.

        Args:
            parts: The finished parts.
            folder: The folder of the build.
        """
        if self._layout is PLAIN or not self._plan.with_companions:
            return ()
        from winml.modelkit.runtime.decoder_inputs import inputs_of_file

        models = [part.current for part in parts if part.current is not None]
        inputs = {item.name: item.shape for model in models for item in inputs_of_file(model)}
        missing = [
            f"{self._layout.readers} cannot prepare {data}: no {kind} came along with the model. Put its files into "
            f"the folder of the build ({' or '.join(files)})."
            for kind, data, files in missing_processors(inputs, folder, self._layout.unread)
        ]
        config = self._sources.get(CHECKPOINT_CONFIG_NAME)
        unfit = unfit_cache_words(config, inputs) if self._layout.name == "optimum" and config is not None else ""
        return (*missing, *([f"{unfit[0].upper()}{unfit[1:]}"] if unfit else []))

    def written(self, parts: Sequence[BuiltPart], placed: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return what is written for the readers: name → text.

        Args:
            parts: The finished parts.
            placed: Part → names of its files in the folder, the model first.

        Raises:
            UsageError: the readers have no type for the graph.
            InputError: a config is damaged.
        """
        texts = {**self._rewritten, **self._described(parts, placed)}
        self.written_names = tuple(texts)
        return texts

    def _described(self, parts: Sequence[BuiltPart], placed: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return what tells the readers about the models: name → text."""
        if self._config is not None:
            counts = {Path(model).name: len(data) for model, *data in placed.values()}
            return {CHECKPOINT_CONFIG_NAME: config_naming_data(self._config, counts)}
        if GENAI_CONFIG_NAME not in self._layout.written:
            return {}
        from winml.modelkit.builds.layouts.genai import genai_texts  # imports onnx

        models = {part.name: (part.current, self.model_name(part)) for part in parts if part.current is not None}
        return genai_texts(models, self._sources)
