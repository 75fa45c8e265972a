"""Lines of code that open the folder of a layout in its runtime, for the end of a build.

A line that needs a file of the user names ``image.png`` or ``audio.wav``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from winml.modelkit.builds.layouts.layout import BuiltFolder
from winml.modelkit.builds.layouts.transformers_js_dtypes import DTYPES

_TEXT: Final = json.dumps("A dog runs.")
_IMAGE = json.dumps("image.png")

_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("text-classification", "token-classification", "feature-extraction", "text-generation",
         "text2text-generation"), _TEXT,
    ),
    **dict.fromkeys(
        ("image-classification", "object-detection", "image-segmentation", "depth-estimation",
         "image-feature-extraction"), _IMAGE,
    ),
}  # fmt: skip
"""Task of a pipeline in optimum and transformers.js → argument of a call."""

_EMBEDDING_TASKS = ("feature-extraction", "sentence-similarity", "image-feature-extraction")
_EMBEDDING_TASKS_BY_INPUT = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}
"""Input of a graph → task of the pipeline that returns its embeddings."""

_GENERATING_TASKS, _NEW_TOKENS = ("text-generation", "text2text-generation"), 20
"""Tasks that generate text, and the number of tokens: without it, runtimes generate more than small models accept."""

_WITH_IMAGE = 400
"""Chosen: tokens of an image (256 in Gemma 3), and of a short text."""

_AUDIO_TASKS = ("audio-classification", "automatic-speech-recognition")
"""Tasks whose pipeline takes the path of an audio file in Python; in JavaScript, it takes samples."""


def _pipeline_task(folder: BuiltFolder) -> str:
    """Return the task of the pipeline that runs the model; "" if the files for it are missing."""
    if not folder.has_processors:
        return ""
    if folder.task not in _EMBEDDING_TASKS:
        return folder.task
    return next((task for name, task in _EMBEDDING_TASKS_BY_INPUT.items() if name in folder.inputs), "")


def optimum_usage(folder: BuiltFolder) -> Sequence[str]:
    """Return lines of Python that run a folder with a pipeline of optimum, or open it with its class."""
    task = _pipeline_task(folder)
    argument = json.dumps("audio.wav") if task in _AUDIO_TASKS else _ARGUMENTS.get(task)
    if argument is not None:
        limit = f", max_new_tokens={_NEW_TOKENS}" if task in _GENERATING_TASKS else ""
        return (
            "from optimum.onnxruntime import pipeline",
            f'run = pipeline("{task}", model={folder.text})',
            f"print(run({argument}{limit}))",
        )
    from winml.modelkit.models.checkpoints.task import inference_class

    name = inference_class(folder.task or "feature-extraction").replace("WinMLModel", "ORTModel")
    return (f"from optimum.onnxruntime import {name}", f"model = {name}.from_pretrained({folder.text})")


def transformers_js_usage(folder: BuiltFolder) -> Sequence[str]:
    """Return lines of JavaScript that run a folder with a pipeline of transformers.js, or open its model."""
    suffixes = {name: entry.suffix for name, entry in DTYPES.items() if folder.stem.endswith(entry.suffix)}
    dtype = max(suffixes, key=lambda name: len(suffixes[name]))
    task, options = _pipeline_task(folder), f'{folder.text}, {{ dtype: "{dtype}" }}'
    root = "" if Path(folder.path).is_absolute() else "./"  # transformers.js joins it and the path with a slash
    names: tuple[str, ...] = ("AutoModel",)
    opened: tuple[str, ...] = (f"const model = await AutoModel.from_pretrained({options});",)
    if (argument := _ARGUMENTS.get(task)) is not None:
        limit = f", {{ max_new_tokens: {_NEW_TOKENS} }}" if task in _GENERATING_TASKS else ""
        names = ("pipeline",)
        opened = (f'const run = await pipeline("{task}", {options});', f"console.log(await run({argument}{limit}));")
    elif task == "image-text-to-text":
        names = ("AutoModelForImageTextToText", "AutoProcessor")
        opened = (
            f"const processor = await AutoProcessor.from_pretrained({folder.text});",
            f"const model = await AutoModelForImageTextToText.from_pretrained({options});",
        )
    return (
        f'import {{ {", ".join((*names, "env"))} }} from "@huggingface/transformers";',
        f'env.localModelPath = "{root}"; env.allowRemoteModels = false;',
        *opened,
    )


def genai_usage(folder: BuiltFolder) -> Sequence[str]:
    """Return lines of Python that generate text with onnxruntime-genai, or open a model of another task."""
    lines = ("import onnxruntime_genai as og", f"model = og.Model({folder.text})")
    if folder.task == "image-text-to-text" and folder.has_processors:
        return (
            *lines,
            "processor, params = model.create_multimodal_processor(), og.GeneratorParams(model)",
            f"params.set_search_options(max_length={_WITH_IMAGE})",
            "generator = og.Generator(model, params)",
            f'generator.set_inputs(processor("", images=og.Images.open({_IMAGE})))',
            "while not generator.is_done(): generator.generate_next_token()",
            "print(processor.decode(generator.get_sequence(0)))",
        )
    if folder.task != "text-generation" or not folder.has_processors:
        return lines
    return (
        *lines,
        "tokenizer, params = og.Tokenizer(model), og.GeneratorParams(model)",
        "params.set_search_options(max_length=50)",
        "generator = og.Generator(model, params)",
        f"generator.append_tokens(tokenizer.encode({_TEXT}))",
        "while not generator.is_done(): generator.generate_next_token()",
        "print(tokenizer.decode(generator.get_sequence(0)))",
    )
