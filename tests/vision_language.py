"""Checkpoints of small vision-language models with seeded weights and processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import make_distinct

PLACE = 3
"""The token that stands for an image."""
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_CHAT_TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} "
    "{% endif %}{% endfor %}{% endfor %}w1"
)


_TEXT = {**_SIZES, "model_type": "llama", "vocab_size": 96, "max_position_embeddings": 128}
_VISION = {**_SIZES, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
_GEMMA = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 2}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32}
_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": _TEXT, "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_id": PLACE, "vision_feature_layer": -1,
        },
    ),
    # Tokens of an image attend to each other, also to later ones, inside a window and beyond.
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_GEMMA, "model_type": "gemma3_text", "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": PLACE, "image_token_id": PLACE,
        },
    ),
    # All tokens of the prompt attend to each other; positions count from 1.
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**_GEMMA, "model_type": "gemma", "num_hidden_layers": 1}, "vision_config": _SIGLIP,
            "projection_dim": 32, "hidden_size": 32, "image_token_index": PLACE, "image_token_id": PLACE,
        },
    ),
    # An image is split into several images of one batch row.
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "num_hidden_layers": 1, "pad_token_id": 2},
            "vision_config": {**_VISION, "model_type": "idefics3_vision"},
            "image_token_id": PLACE, "scale_factor": 2, "pad_token_id": 2,
        },
    ),
    # Images of any size, with window attention; their tokens have rows and columns as positions.
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "model_type": "qwen2_5_vl_text", "num_hidden_layers": 1, "num_key_value_heads": 1,
                "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
            },
            "image_token_id": PLACE, "video_token_id": 95, "vision_start_token_id": 4, "vision_end_token_id": 5,
        },
    ),
    # Also adds features of vision layers after layers of the language model.
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "model_type": "qwen3_vl_text", "num_key_value_heads": 1, "head_dim": 16,
                "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            "image_token_id": PLACE, "video_token_id": 95, "vision_start_token_id": 4, "vision_end_token_id": 5,
        },
    ),
    # An inner decoder attends to the image features, and generates by itself.
    "blip": (
        "BlipForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "model_type": "blip_text_model", "projection_dim": 32, "bos_token_id": 0,
                "eos_token_id": 1, "sep_token_id": 4, "pad_token_id": 2, "initializer_range": 0.2,
            },
            "vision_config": {**_VISION, "model_type": "blip_vision_model", "initializer_range": 0.2},
            "projection_dim": 32,
        },
    ),
    # The language model has its own head, and generates for the whole model.
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "opt", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 48,
                "num_attention_heads": 2, "word_embed_proj_dim": 32, "max_position_embeddings": 128,
                "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
            },
            "vision_config": {**_VISION, "model_type": "blip_2_vision_model"},
            "qformer_config": {
                **_SIZES, "num_hidden_layers": 1, "model_type": "blip_2_qformer", "encoder_hidden_size": 32,
                "vocab_size": 96, "cross_attention_frequency": 1,
            },
            "num_query_tokens": 4, "image_token_index": PLACE, "image_token_id": PLACE,
        },
    ),
}  # fmt: skip


def save_vision_language(folder: Path, kind: str = "llava", **vision: Any) -> Path:
    """Write a checkpoint of a model type with a processor for the words ``w0`` to ``w77``, and return the folder.

    ``vision`` are further config values of the vision model.
    """
    import torch
    import transformers

    class_name, config = _CONFIGS[kind]
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, class_name)
    config = {**config, "vision_config": {**config["vision_config"], **vision}}
    model = model_class(model_class.config_class(**config))
    make_distinct(model)
    model.save_pretrained(folder)
    vision_language_processor(kind).save_pretrained(folder)
    return folder


def vision_language_processor(kind: str) -> Any:
    """Return the processor of a model type."""
    from transformers import (
        Blip2Processor,
        BlipProcessor,
        Gemma3Processor,
        Idefics3Processor,
        LlavaProcessor,
        PaliGemmaProcessor,
        Qwen2_5_VLProcessor,
        Qwen3VLProcessor,
    )  # fmt: skip
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    # The processor of BLIP-2 adds the image token itself, and BLIP has none.
    tokenizer = _tokenizer() if kind in ("blip", "blip-2") else _tokenizer("<image>", "<boi>", "<eoi>")
    size = {"height": 16, "width": 16}
    if kind == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, _CHAT_TEMPLATE, image_seq_length=4)
    if kind == "paligemma":
        seeing = SiglipImageProcessorPil(size=size, image_seq_length=16)
        return PaliGemmaProcessor(seeing, tokenizer, _CHAT_TEMPLATE)
    if kind == "idefics3":
        edges = {"longest_edge": 16}
        return Idefics3Processor(
            Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size=edges), tokenizer, 4, _CHAT_TEMPLATE
        )
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        # The part for videos is left out: it needs torchvision.
        halves = classmethod(lambda _class: ["image_processor", "tokenizer"])
        whole: Any = Qwen2_5_VLProcessor if kind == "qwen2_5_vl" else Qwen3VLProcessor
        make = type(whole.__name__, (whole,), {"get_attributes": halves})
        edges = {"shortest_edge": 28**2, "longest_edge": 12 * 28**2}
        return make(Qwen2VLImageProcessorPil(size=edges), tokenizer, chat_template=_CHAT_TEMPLATE)
    if kind == "blip":
        return BlipProcessor(BlipImageProcessorPil(size=size), tokenizer)
    if kind == "blip-2":
        return Blip2Processor(BlipImageProcessorPil(size=size), tokenizer, num_query_tokens=4)
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    )


GENAI_MARKS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    },
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>", "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        "video_token": "<|video_pad|>",
    },
}  # fmt: skip
"""Model type → special tokens from number 3 on. onnxruntime-genai writes these names into prompts."""


def save_with_genai_marks(folder: Path, kind: str) -> Path:
    """Write a checkpoint with the tokens and the number of image tokens that onnxruntime-genai expects."""
    import torch
    import transformers

    tokenizer = _byte_tokenizer(GENAI_MARKS[kind])
    class_name, config = _CONFIGS[kind]
    text = {**config["text_config"], "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    further: dict[str, Any] = {"video_token_id": 6}
    if kind == "gemma3":
        further = {"mm_tokens_per_image": 256, "vision_config": {**config["vision_config"], "image_size": 64}}
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**{**config, "text_config": text, **further}))
    make_distinct(model)
    # Trained models write no placeholder of an image either: it would have no features.
    model.get_output_embeddings().weight.data[PLACE] = 0
    model.save_pretrained(folder)
    genai_processor(kind).save_pretrained(folder)
    return folder


def genai_processor(kind: str) -> Any:
    """Return the processor of a checkpoint with the marks of onnxruntime-genai."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _byte_tokenizer(GENAI_MARKS[kind])
    if kind == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 64, "width": 64}), tokenizer)
    processor = vision_language_processor(kind)
    return type(processor)(processor.image_processor, tokenizer)


def _byte_tokenizer(roles: Mapping[str, str]) -> Any:
    """Return a tokenizer of bytes, which every reader knows, with special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>", *roles.values()]
    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    of_bytes = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    of_bytes.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    of_bytes.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=dict(roles),
    )  # fmt: skip


def _tokenizer(*names: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", "<image>", "<boi>", "<eoi>", *(f"w{number}" for number in range(78))]
    words_of = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    words_of.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # typed as its base
    return PreTrainedTokenizerFast(
        tokenizer_object=words_of, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left",
        extra_special_tokens=dict(zip(("image_token", "boi_token", "eoi_token"), names, strict=False)),
    )  # fmt: skip


def save_image(path: Path, seed: int = 0) -> Path:
    """Write a noise image and return its path."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path
