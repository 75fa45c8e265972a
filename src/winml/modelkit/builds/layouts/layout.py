"""The contract of a layout: names of finished models and companion files that readers expect, and supported models.

A layout places the results of a build; it changes no graph. Stages and their files are the same in every layout.
Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from winml.modelkit.errors import InputError, TaskError, UsageError, opt
from winml.modelkit.file_names import DECODER, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, built_part_name
from winml.modelkit.metadata_keys import MODEL_KEY
from winml.modelkit.onnx.bundle import model_record
from winml.modelkit.onnx.specs import PAST_PREFIX
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.registries import Registry


@dataclass(frozen=True)
class Dtype:
    """A data type of the weights by which a reader selects the file of a model."""

    suffix: str
    """End of the file name, before ``.onnx``."""
    precision: str | None = None
    """Precision of the quantization that makes the file; None: the file stays float32."""
    of: str = ""
    """Dtype whose file is converted; "": the float32 file."""
    unwritable: str = ""
    """Reason why winml does not write the file; "" if it does."""


@dataclass(frozen=True)
class LayoutFiles:
    """Input of ``describe``: files of a folder."""

    sources: Mapping[str, Path]
    """Files of the checkpoint to copy: name → file."""
    models: Mapping[str, tuple[Path, str]]
    """Part → its current ONNX file, and its final name in the folder."""
    data: Mapping[str, Sequence[str]]
    """Part → names of its data files in the folder; empty before the files are placed."""
    dtypes: Mapping[str, Path] = field(default_factory=dict)
    """Final name of each model file, one per part and dtype → its current ONNX file."""
    ep: str | None = None
    """Short name of the provider that the build is for; None: no provider is requested."""
    model: str = ""
    """Name of the source model, as the user wrote it."""


@dataclass(frozen=True)
class BuiltFolder:
    """The folder of a finished build, as its runtime opens it."""

    path: str
    task: str
    """Task of the model; "": a model without a task."""
    inputs: tuple[str, ...]
    """Inputs of the graph; of several parts, those of the decoder."""
    stem: str
    """Name of the model file, without ``.onnx``."""
    has_processors: bool
    """True if the folder has the tokenizer or processor for the inputs of the model."""

    @property
    def text(self) -> str:
        """The path as a string literal of Python and JavaScript."""
        return json.dumps(self.path, ensure_ascii=False)


@dataclass(frozen=True)
class Layout:
    """Arrangement of a folder for one kind of reader."""

    name: str
    model_name: Callable[[str, bool, str], str]
    """(Part, True if one of several, precision) → path of its file relative to the folder, with ``/``."""
    readers: str = ""
    """Name of the tools that open the folder, for messages."""
    tasks: frozenset[str] | None = None
    """Tasks that the readers support; None: any."""
    unknown: Callable[[Mapping[str, Any], str | None, bool], str] = lambda _config, _task, _has_cache: ""
    """(``config.json`` of the checkpoint, task or None if the checkpoint decides, True if a decoder has a cache) → kind
    of model that the readers have no class for, or "". Called before the export."""
    unknown_inputs: Mapping[str, str] = field(default_factory=dict)
    """Prefix of the name of a graph input → kind of model that the readers have no class for."""
    described: tuple[str, ...] = ()
    """Names of the files that ``describe`` may write."""
    describe: Callable[[LayoutFiles], Mapping[str, str]] = lambda _files: {}
    """Returns the files that describe the models to the readers: name → text. Raises UsageError if the readers have no
    type for a graph."""
    rewritten: tuple[str, ...] = ()
    """Names of the files of the checkpoint that ``rewrite`` may change."""
    rewrite: Callable[[Mapping[str, Path]], Mapping[str, str]] = lambda _sources: {}
    """Files of the checkpoint to copy → changed files: name → text."""
    note: Callable[[Path, Mapping[str, Sequence[int | str | None]]], str] = lambda _config, _inputs: ""
    """(``config.json`` of the checkpoint, name → sizes of the graph inputs) → note on a limitation of the readers, or
    ""."""
    usage: Callable[[BuiltFolder], Sequence[str]] = lambda _folder: ()
    """Returns lines of code that open a finished folder in its runtime."""
    with_card: bool = True
    """True if the folder has a model card and the licence of the checkpoint."""
    language: str = "python"
    """Language of the lines of ``usage``."""
    cross_keys: Literal["decoder"] | None = None
    """Part of an encoder-decoder that computes the keys and values of the encoded input; None: the encoder."""
    embedding_of: Literal["tokens", "features"] | None = None
    """Inputs of the embedding of a vision-language model: ``tokens`` if the readers insert the image features,
    ``features`` if they pass them with one row per image token; None: the model's own. Readers pass no token types:
    unless None, a last column of embeddings and image features marks image tokens for models with token types."""
    unread: tuple[str, ...] = ()
    """Tokenizer files that the readers cannot use alone."""
    dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    """Name → dtype that the readers select a file by; empty: they expect one file per part."""
    numbers_data: bool = False
    """True if readers expect data files by name: ``<model>_data``, ``<model>_data_1`` and so on."""
    for_browsers: bool = False
    """True if readers run on WebAssembly and WebGPU: embedding tables have one scale per row, for WebAssembly has no
    kernel for blocks, and the attention of decoders rotates queries and keys itself."""
    for_onnxruntime: bool = False
    """True if only ONNX Runtime runs the models: decoders with a cache get its operators unless a level is
    requested."""
    pads_right: bool = False
    """True if readers pad prompts on the right, so that the attention of decoders hides padding by lengths."""
    providers: frozenset[str] | None = None
    """Short names of the providers that ``describe`` can name to the readers; None: readers choose the provider."""

    @property
    def written(self) -> tuple[str, ...]:
        """Names of files written for the readers with new or changed content."""
        return (*self.described, *self.rewritten)


_ENCODER_STATES = "encoder_hidden_states"
"""Specified: decoder input of optimum and transformers.js for the encoder output."""

PLAIN: Final = Layout(
    "", lambda part, of_several, _precision: built_part_name(part, of_several=of_several), with_card=False
)
"""Layout of a build that requests none."""

PACKAGE_NAME: Final = "package"
"""Layout of several builds of one model (``package.py``)."""

LAYOUTS: Registry[Layout] = Registry(
    "layouts",
    "layout",
    {
        "genai": "winml.modelkit.builds.layouts.genai:GENAI",
        "optimum": "winml.modelkit.builds.layouts.optimum:OPTIMUM",
        PACKAGE_NAME: "winml.modelkit.builds.layouts.package:PACKAGE",
        "transformers.js": "winml.modelkit.builds.layouts.optimum:TRANSFORMERS_JS",
    },
    lambda: Layout,
    refuse=lambda name, layout: "" if layout.name == name else f"it calls itself {layout.name}",
)
"""Name → layout."""

LayoutName = Annotated[str, LAYOUTS]
"""Name of a layout, as a field of options."""


def rewritten_tokenizer(
    sources: Mapping[str, Path], change: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> dict[str, str]:
    """Return file name → text of a changed tokenizer config; ``{}`` if it is unchanged.

    Args:
        sources: Files of the checkpoint to copy: name → file.
        change: Returns the changed record.

    Raises:
        InputError: the config is damaged.
    """
    path = sources.get(TOKENIZER_CONFIG_NAME)
    if path is None or TOKENIZER_NAME not in sources:
        return {}
    record = read_source(path)
    if not isinstance(record, dict) or (new_record := change(record)) == record:
        return {}
    return {TOKENIZER_CONFIG_NAME: json.dumps(new_record, indent=2, ensure_ascii=False) + "\n"}


def read_source(path: Path) -> Any:
    """Read a JSON file of the checkpoint.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error


def find_layout(name: str | None) -> Layout:
    """Return the layout of a name; the plain layout for None.

    Raises:
        UsageError: no layout has this name, for example after the removal of a plug-in.
    """
    return PLAIN if name is None else LAYOUTS.find(name, opt.layout)


_IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Specified by transformers: keys of the placeholder token for images. BLIP and GIT have none."""
_RECURRENT_LAYERS = frozenset({"mamba", "linear_attention", "recurrent"})
_RECURRENT_SIZES = ("state_size", "ssm_state_size", "mamba_d_state", "linear_num_value_heads", "lru_width")
"""Specified by transformers: entries of ``layer_types``, and keys of configs without that list."""
_TASKS_WITH_IMAGES = (None, "image-text-to-text", "image-to-text")


def is_vision_language(config: Mapping[str, Any], task: str | None) -> bool:
    """Return True for a language model with images as input, which becomes vision encoder, embedding and decoder.

    Args:
        config: ``config.json`` of the checkpoint.
        task: The task; None if the checkpoint decides.
    """
    return "vision_config" in config and any(key in config for key in _IMAGE_TOKENS) and task in _TASKS_WITH_IMAGES


def text_section(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the section of a config that describes the text decoder."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Return True for a decoder with states that are computed from token to token.

    Args:
        config: ``config.json`` of the checkpoint.
    """
    text = text_section(config)
    layers = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(layers, list):
        return any(isinstance(kind, str) and kind in _RECURRENT_LAYERS for kind in layers)
    return any(isinstance(text.get(key), int) for key in _RECURRENT_SIZES)


def refuse_unknown_type(layout: Layout, config: Path | None, task: str | None, *, has_cache: bool) -> None:
    """Refuse a model for which the readers of a layout have no class.

    Args:
        layout: The layout.
        config: ``config.json`` of the checkpoint; None: unknown, and no model is refused.
        task: The task; None if the checkpoint decides.
        has_cache: True if a decoder has a cache.

    Raises:
        TaskError: the readers have no class for the model; names the kind of model and the layout.
    """
    if config is None:
        return
    try:
        record = read_json_file(config)
    except (OSError, JsonError):
        return  # the loader of the model reports the error
    if isinstance(record, dict) and (unknown := layout.unknown(record, task, has_cache)):
        raise _unknown_model_error(layout, unknown)


def _unknown_model_error(layout: Layout, kind: str) -> TaskError:
    """Return the error for a kind of model that the readers have no class for."""
    return TaskError(
        f"{opt.layout} {layout.name}: no class of {layout.readers} is for {kind}",
        hint=f"Remove {opt.layout}: winml run, winml generate and WinMLAutoModel open the folder.",
    )


def refuse_provider(layout: Layout, ep: str) -> None:
    """Refuse a provider that the files of a layout cannot name to the readers.

    Args:
        layout: The layout.
        ep: Short name of the provider that the build is for.

    Raises:
        UsageError: names the supported providers.
    """
    if layout.providers is not None and ep not in layout.providers:
        raise UsageError(
            f"{opt.ep} {ep}: the layout {layout.name} has no options for this provider",
            hint=f"Use {opt.ep} {' or '.join(sorted(layout.providers))}, or omit {opt.layout} or {opt.ep}.",
        )


def refuse_models(layout: Layout, models: Sequence[Path], config: Path | None = None) -> None:
    """Refuse graphs that the readers of a layout do not support.

    Args:
        layout: The layout.
        models: The files of all parts.
        config: ``config.json`` of the checkpoint; None: there is none.

    Raises:
        UsageError: the readers expect another kind of decoder.
        TaskError: the readers have no class for the task or the model.
    """
    from winml.modelkit.onnx.files.reading import read_metadata, read_structure  # imports onnx

    computing = (path for path in models if layout.cross_keys == DECODER and _reads_cross_attention_cache(path))
    if decoder := next(computing, None):
        raise UsageError(
            f"{opt.layout} {layout.name}: {decoder.name} takes keys and values computed by the encoder, and "
            f"{layout.readers} lets the decoder compute them",
            hint=f"Build from the checkpoint, which exports a decoder for this layout, or omit {opt.layout}.",
        )
    inputs = [value.name for path in models for value in read_structure(path).graph.input]
    for start, kind in layout.unknown_inputs.items():
        if any(name.startswith(start) for name in inputs):
            raise _unknown_model_error(layout, kind)
    metadata = read_metadata(models[0])
    task = model_record(metadata).get("task")
    refuse_unknown_type(layout, config, task, has_cache=any(name.startswith("past_") for name in inputs))
    if MODEL_KEY in metadata:  # the task of another tool's file is unknown
        refuse_task(layout, task)


def _reads_cross_attention_cache(model: Path) -> bool:
    """Return True if a graph has inputs for keys and values that the encoder computes."""
    from winml.modelkit.onnx.files.reading import read_structure  # imports onnx

    names = [value.name for value in read_structure(model).graph.input]
    return _ENCODER_STATES not in names and any(
        re.fullmatch(rf"{re.escape(PAST_PREFIX)}\d+\.encoder\.(key|value)", name) for name in names
    )


def refuse_task(layout: Layout, task: str | None, *, takes_task: bool = False) -> None:
    """Refuse a model whose task the readers of a layout do not support.

    Args:
        layout: The layout.
        task: The task; None: the model has no task.
        takes_task: True if ``--task`` selects the task of the model, as it does for a checkpoint.

    Raises:
        TaskError: the task is not supported; names the supported tasks.
    """
    if layout.tasks is None or task in layout.tasks:
        return
    supported = tuple(sorted(layout.tasks))
    subject = f"task {task}"
    hint = f"Remove {opt.layout}: winml run opens the folder."
    if task is None:
        subject = "a model without a task"
        hint += " A transformers model has a task if it is saved with save_pretrained() and built from that folder."
    elif takes_task:
        hint = f"Remove {opt.layout}, or pass another {opt.task} that the model has: {', '.join(supported)}."
    raise TaskError(
        f"{opt.layout} {layout.name}: no class of {layout.readers} is for {subject}", hint=hint, candidates=supported
    )
