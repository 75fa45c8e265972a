"""Small checkpoints with tokenizers and processors, and data sets labelled with the outputs of their pipelines."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import build_model

WORDS = tuple("".join(letters) for letters in itertools.product("bdgklmnrst", "aeio", "lnrst"))[:100]
"""Words of a made-up language."""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def sentences(count: int, *, seed: int = 0, longest: int = 12) -> list[str]:
    """Return distinct sentences of several words."""
    generator = np.random.default_rng(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[" ".join(generator.choice(WORDS, generator.integers(4, longest)))] = None
    return list(made)


def text_tokenizer() -> Any:
    """Return a tokenizer with one token a word and the special tokens of bert."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate((*_SPECIAL, *WORDS))}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


def save_task_checkpoint(
    folder: Path,
    architecture: str,
    class_name: str,
    *processors: Any,
    labels: Sequence[str] | None = None,
    **changes: Any,
) -> Path:
    """Save a small checkpoint with its processors; its outputs differ from sample to sample."""
    import torch

    if labels is not None:
        changes = {**changes, "id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    model = build_model(architecture, class_name=class_name, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("embed" in name or name.startswith(("classifier", "qa_outputs"))):
                parameter.mul_(8)  # differences between samples outweigh their common part
    model.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    return folder


def export_open(folder: Path, task: str) -> Path:
    """Export a checkpoint with dynamic sizes; config and processor files go beside the ONNX file."""
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.export.exporting import HTPExporter
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.specs import DynamicRequest

    is_image = task.startswith(("image", "object"))
    request = ModelRequest(model=str(folder), task=task, dynamic=DynamicRequest(batch=True, sequence=not is_image))
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir()
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, path)
    return path


def pipeline_of(folder: Path, task: str, **options: Any) -> Any:
    """Return the transformers pipeline of a checkpoint."""
    import transformers

    with contextlib.redirect_stderr(io.StringIO()):
        return transformers.pipeline(task, model=str(folder), device="cpu", **options)


def save_images(folder: Path, images: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Save images by name."""
    from PIL import Image

    for name, array in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / name)
