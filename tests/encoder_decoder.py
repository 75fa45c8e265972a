"""Checkpoints of small encoder-decoders with a tokenizer or a feature extractor, and their PyTorch outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import CONFIGS, build_model, make_distinct
from generating import save_tokenizer

WHISPER = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""One second of sound in 100 frames."""


OTHERS = {
    "pegasus_x": (
        "PegasusXForConditionalGeneration",
        {
            **{key: WHISPER[key] for key in ("vocab_size", "d_model", "pad_token_id", "bos_token_id", "eos_token_id")},
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "decoder_start_token_id": 0,
            "block_size": 8,
            "num_global_tokens": 4,
        },
    ),
    "moonshine": (
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "intermediate_size": 48,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
        },
    ),
    "moonshine_streaming": (
        "MoonshineStreamingForConditionalGeneration",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "sliding_windows": [[16, 4]],
            },
        },
    ),
}
"""Rare architectures: an encoder of one length (pegasus_x), a model with its own mask (moonshine), and a decoder with
changes of its arguments in place (moonshine_streaming).
"""


def build_whisper(**changes: Any) -> Any:
    """Build a small Whisper in evaluation mode."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config: Any = WhisperConfig(**{**WHISPER, **changes})  # type: ignore[arg-type]  # declared one by one
    model = WhisperForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def save_encoder_decoder(
    folder: Path, architecture: str, *, seconds: int = 1, has_mask: bool = True, **sizes: Any
) -> Path:
    """Write the checkpoint of a small encoder-decoder with its preprocessor, and return the folder.

    ``seconds`` is the length of a Whisper recording; ``has_mask`` tells whether other recordings have a mask; ``sizes``
    are further config values of Whisper and of architectures of :data:`CONFIGS`.
    """
    model: Any
    if architecture in CONFIGS:
        model = build_model(architecture, **sizes)
    elif architecture in OTHERS:
        model = _build_other(architecture)
        if model.main_input_name == "input_values":
            from transformers import Wav2Vec2FeatureExtractor

            Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=has_mask).save_pretrained(folder)
    else:
        from transformers import WhisperFeatureExtractor

        model = build_whisper(max_source_positions=50 * seconds, **sizes)
        WhisperFeatureExtractor(feature_size=8, chunk_length=seconds).save_pretrained(folder)
    model.save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder


def _build_other(architecture: str) -> Any:
    import torch
    import transformers

    class_name, sizes = OTHERS[architecture]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes))
    make_distinct(model)
    return model.eval()
