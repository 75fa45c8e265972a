"""Models of images and text, small and with seeded weights, as checkpoints with their processors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from checkpoints import make_distinct

__all__ = ["PLACE", "save_picture", "save_shown"]

PLACE = 3
"""The token that stands for an image."""
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_CHAT_TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} "
    "{% endif %}{% endfor %}{% endfor %}w1"
)


def save_shown(folder: Path) -> Path:
    """Write the checkpoint of a llava, whose processor takes words from ``w0`` to ``w79``, and return the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = ["<s>", "</s>", "<pad>", "<image>", *(f"w{number}" for number in range(80))]
    words_of = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    words_of.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # typed as its base
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_of, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={**_SIZES, "model_type": "llama", "vocab_size": 84, "max_position_embeddings": 128},
        vision_config={**_SIZES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        image_token_id=PLACE,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    make_distinct(model)
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_picture(path: Path, seed: int = 0) -> Path:
    """Write a picture of noise and return its path."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path
