"""Says where each layout wants the finished models, what stands beside them, and which models it is for.

A layout places what a build has made; it changes no graph. Stages and their files are the same in every one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from winml.modelkit.errors import TaskError, UsageError
from winml.modelkit.file_names import (
    AUDIO_PROCESSOR_NAME,
    CHECKPOINT_CONFIG_NAME,
    DECODER,
    GENAI_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    built_part_name,
)
from winml.modelkit.metadata_keys import MODEL_KEY
from winml.modelkit.options import load_json
from winml.modelkit.quantize.options import FLOAT32

__all__ = ["LAYOUTS", "PLAIN", "Layout", "LayoutName", "find_layout", "refuse_models", "refuse_task"]

LayoutName = Literal["genai", "optimum", "transformers.js"]


@dataclass(frozen=True)
class Layout:
    """How a folder looks for one kind of readers."""

    name: str
    model_name: Callable[[str, bool, str], str]
    """Part, whether it is one of several, precision → name of its file in the folder, ``/`` between parts."""
    readers: str = ""
    """Who opens it."""
    tasks: frozenset[str] | None = None
    """Tasks the readers know; None: any."""
    written: tuple[str, ...] = ()
    """Names of the files that are written for it, where they differ from those of the checkpoint."""
    with_card: bool = True
    """Whether licence and card of the checkpoint come along."""
    cross_keys: Literal["decoder"] | None = None
    """Which part of an encoder-decoder computes the keys and values of what was encoded; None: the encoder."""
    unread: tuple[str, ...] = ()
    """Files of a tokenizer that alone are none to the readers."""
    numbers_data: bool = False
    """Whether readers look for weights outside by name: ``<model>_data``, ``<model>_data_1`` and so on."""


_ONE_ANSWER = frozenset(
    {
        "feature-extraction", "fill-mask", "text-classification", "token-classification", "question-answering",
        "multiple-choice", "image-classification", "image-segmentation", "object-detection", "depth-estimation",
        "zero-shot-image-classification", "audio-classification", "automatic-speech-recognition", "image-to-image",
        "text-generation", "text2text-generation", "image-to-text", "image-text-to-text", "sentence-similarity",
        "zero-shot-object-detection", "zero-shot-audio-classification", "image-feature-extraction", "text-to-audio",
        "audio-frame-classification", "audio-xvector", "document-question-answering", "visual-question-answering",
        "keypoint-detection", "mask-generation", "zero-shot-classification",
    }
)  # fmt: skip
"""Specified: tasks of optimum's ``ORTModelFor…`` classes and of transformers.js' pipelines and ``AutoModelFor…``."""

_JS_SUFFIXES: Mapping[str, str] = {
    FLOAT32: "", "fp16": "_fp16", "int8": "_quantized", "uint8": "_uint8", "int4": "_q4",
}  # fmt: skip
"""Specified: ``DEFAULT_DTYPE_SUFFIX_MAPPING`` of transformers.js; the others of ours have no name there."""

_OTHER_TOOLS: Mapping[str, str] = {
    "model": "model", "encoder": "encoder_model", "decoder": "decoder_model_merged", "vision": "vision_encoder",
    "embedding": "embed_tokens", "text": "text_model",
}  # fmt: skip
"""Specified: part → how transformers.js calls the file of it; optimum's are the same for encoders and decoders."""


_ENCODED = "encoder_hidden_states"
"""Specified: how both call what the encoder answered, at the decoder."""


def _part_name(part: str, of_several: bool) -> str:
    return _OTHER_TOOLS.get(part, part) if of_several else "model"


def _js_name(part: str, of_several: bool, precision: str) -> str:
    if precision not in _JS_SUFFIXES:
        raise UsageError(
            f"--layout transformers.js has no name for precision {precision}",
            hint=f"It knows {', '.join(_JS_SUFFIXES)}.",
        )
    return f"onnx/{_part_name(part, of_several)}{_JS_SUFFIXES[precision]}.onnx"


PLAIN: Final = Layout(
    "", lambda part, of_several, _precision: built_part_name(part, of_several=of_several), with_card=False
)
"""The folder of a build as it is without any of them."""

LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "genai",
            lambda part, of_several, _precision: built_part_name(part, of_several=of_several),
            readers="onnxruntime-genai",
            tasks=frozenset({"text-generation", "automatic-speech-recognition"}),
            written=(GENAI_CONFIG_NAME, AUDIO_PROCESSOR_NAME, TOKENIZER_CONFIG_NAME),
        ),
        Layout(
            "optimum",
            lambda part, of_several, _precision: f"{_part_name(part, of_several)}.onnx",
            readers="optimum and sentence-transformers",
            tasks=_ONE_ANSWER,
            cross_keys="decoder",
            written=(TOKENIZER_CONFIG_NAME,),
        ),
        Layout(
            "transformers.js",
            _js_name,
            readers="transformers.js",
            tasks=_ONE_ANSWER,
            cross_keys="decoder",
            written=(CHECKPOINT_CONFIG_NAME,),
            unread=("vocab.txt", TOKENIZER_CONFIG_NAME),
            numbers_data=True,
        ),
    )
}
"""By name."""


def find_layout(name: str | None) -> Layout:
    """Return the layout of a name; the plain one for None."""
    return PLAIN if name is None else LAYOUTS[name]


def refuse_models(layout: Layout, models: Sequence[Path]) -> None:
    """Refuse graphs that the readers of a layout do not know.

    Args:
        layout: The layout.
        models: The files of all parts.

    Raises:
        UsageError: they have another decoder in mind.
        TaskError: they do not know the task.
    """
    from winml.modelkit.graph.files.reading import read_structure  # imports onnx

    computing = (path for path in models if layout.cross_keys == DECODER and _reads_encoded_cache(path))
    if decoder := next(computing, None):
        raise UsageError(
            f"--layout {layout.name}: {decoder.name} takes keys and values that the encoder computed, and "
            f"{layout.readers} lets the decoder compute them",
            hint="Build from the checkpoint, whose decoder is then made for them, or leave --layout out.",
        )
    texts = [entry.value for entry in read_structure(models[0]).metadata_props if entry.key == MODEL_KEY]
    try:
        task = load_json(texts[0]).get("task") if texts else None
    except (ValueError, AttributeError):
        task = None
    refuse_task(layout, task, is_described=bool(texts))


def _reads_encoded_cache(model: Path) -> bool:
    """Say whether a graph takes keys and values that another part computes."""
    from winml.modelkit.graph.files.reading import read_structure  # imports onnx

    names = [value.name for value in read_structure(model).graph.input]
    return _ENCODED not in names and any(
        re.fullmatch(r"past_key_values\.\d+\.encoder\.(key|value)", name) for name in names
    )


def refuse_task(layout: Layout, task: str | None, *, is_described: bool = True) -> None:
    """Refuse a model whose task the readers of a layout do not know.

    Args:
        layout: The layout.
        task: The task; None: it has none.
        is_described: Whether the file says what it is for; of one that does not, the task is not known.

    Raises:
        TaskError: names the task and those that are known.
    """
    if layout.tasks is None or task in layout.tasks or not is_described:
        return
    what = f"task {task}" if task is not None else "a model without a task"
    known = tuple(sorted(layout.tasks))
    raise TaskError(
        f"--layout {layout.name}: {layout.readers} has no class for {what}",
        hint=f"It knows {', '.join(known)}. Leave --layout out, or name another --task.",
        candidates=known,
    )
