"""Small checkpoints of real architectures: seeded weights that are distinct and keep activations at scale."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TEXT: Mapping[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}

CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertModel", TEXT),
    "roberta": ("RobertaModel", TEXT),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": 120, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    ),
    "albert": ("AlbertModel", {**TEXT, "embedding_size": 16}),
    "electra": ("ElectraModel", {**TEXT, "embedding_size": 16}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 120,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 120,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 2], "layer_type": "basic"},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 24], "depths": [1, 2], "num_stages": 2, "image_size": 64},
    ),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 64}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "image_size": 32,
        },
    ),
    "yolos": (
        "YolosForObjectDetection",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": [32, 32],
            "patch_size": 8,
            "num_detection_tokens": 6,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**TEXT, "projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 16,
            },
            "projection_dim": 16,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16, 16],
            "conv_stride": [5, 4, 4],
            "conv_kernel": [10, 8, 4],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
}
"""Architecture → model class and the sizes that make it small."""

FAMILIES = ("bert", "gpt2", "t5", "vit", "resnet", "clip", "wav2vec2")
"""One architecture of each kind: text, text with a cache, encoder and decoder, images by attention and by convolution,
text beside images, audio."""


_LAYERS = {"num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"}


def one_layer(architecture: str) -> dict[str, Any]:
    """Return the sizes of an architecture with one layer of each kind, for tests that compare no layers."""
    return _one_layer_sizes(CONFIGS[architecture][1])


def _one_layer_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: _one_layer_sizes(value) for key, value in sizes.items() if isinstance(value, dict)}
    depths = {"depths": [1] * len(sizes["depths"])} if "depths" in sizes else {}
    return {**sizes, **inner, **dict.fromkeys(_LAYERS & sizes.keys(), 1), **depths}


def build_model(architecture: str, *, class_name: str | None = None, seed: int = 0, **changes: Any) -> Any:
    """Build a small model of an architecture in evaluation mode.

    Args:
        architecture: A key of :data:`CONFIGS`.
        class_name: Another model class of the same architecture.
        seed: Seed of the weights.
        changes: Further config values.
    """
    import torch
    import transformers

    default_class, sizes = CONFIGS[architecture]
    model_class = getattr(transformers, class_name or default_class)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**sizes, **changes}))
    make_distinct(model)
    return model.eval()


def make_distinct(model: Any) -> None:
    """Give every parameter distinct values, and batch norms the statistics of their inputs; in place."""
    import torch

    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=max(0.05, (2.0 / parameter[0].numel()) ** 0.5))
        else:
            # Scales stay around one and shifts around zero, with distinct values.
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.05)


def save_checkpoint(architecture: str, folder: Path, **options: Any) -> Path:
    """Build a small model, save it as a checkpoint folder and return the folder."""
    build_model(architecture, **options).save_pretrained(folder)
    return folder


def save_image_processor(folder: Path, size: int) -> None:
    """Write the config file of a ViT image processor."""
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")


Builder = Callable[..., Any]


def save_sam(path: Path) -> None:
    """Write a small SAM for images of 64 pixels."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32}
    picture = {"image_size": 64, "patch_size": 8}
    config = transformers.SamConfig(
        vision_config={**sizes, **picture, "output_channels": 32, "window_size": 4, "global_attn_indexes": [0],
                       "num_pos_feats": 16},
        prompt_encoder_config={**picture, "hidden_size": 32, "image_embedding_size": 8, "mask_input_channels": 4},
        mask_decoder_config={**sizes, "iou_head_hidden_dim": 32, "iou_head_depth": 2},
        initializer_range=0.5,
    )  # fmt: skip
    model = transformers.SamModel(config)
    make_distinct(model)
    for network in model.mask_decoder.output_hypernetworks_mlps:
        # The pipeline keeps masks whose edges are stable.
        network.get_parameter("proj_out.weight").data *= 100
    model.save_pretrained(path)
    transformers.SamImageProcessorPil(
        size={"longest_edge": 64}, pad_size={"height": 64, "width": 64}, mask_size={"longest_edge": 32},
        mask_pad_size={"height": 32, "width": 32},
    ).save_pretrained(path)  # fmt: skip
