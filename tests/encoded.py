"""Small encoder-decoders: checkpoints with a tokenizer or a feature extractor, and what PyTorch makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import CONFIGS, build_model
from generating import save_tokenizer

__all__ = ["build_whisper", "save_encoder_decoder"]

WHISPER = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
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
"""One second of sound, of 100 frames."""


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


def save_encoder_decoder(folder: Path, architecture: str, *, seconds: int = 1) -> Path:
    """Write the checkpoint of a small encoder-decoder, what prepares its inputs, and return the folder.

    ``seconds`` is how long a recording of Whisper is.
    """
    if architecture in CONFIGS:
        model = build_model(architecture)
    else:
        from transformers import WhisperFeatureExtractor

        model = build_whisper(max_source_positions=50 * seconds)
        WhisperFeatureExtractor(feature_size=8, chunk_length=seconds).save_pretrained(folder)
    model.save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder
