"""A decoder unknown to any library: a cache, a sliding window in every other layer, and experts chosen by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

EXPERTS, HEADS, WIDTH = 3, 2, 16


class UnknownConfig(PretrainedConfig):
    """Config of the decoder."""

    model_type = "unknown_decoder"

    def __init__(self, **options: Any) -> None:
        self.hidden_size, self.num_hidden_layers, self.vocab_size = WIDTH, 2, 40
        self.num_attention_heads = self.num_key_value_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.sliding_window = 4
        self.layer_types = ["sliding_attention", "full_attention"]
        self.max_position_embeddings = 64
        super().__init__(**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options})


class Attention(nn.Module):
    """Attention with a cache and a distance bias in place of positions."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Return the attention output of the tokens."""
        rows, tokens, _ = hidden.shape
        heads = self.projection(hidden).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        # Each token attends to all earlier tokens if there is no mask.
        is_causal = mask is None and tokens > 1
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return self.output(seen.transpose(1, 2).reshape(rows, tokens, WIDTH))


class Experts(nn.Module):
    """Routes each token to its highest-scored expert, in a loop over the chosen experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply the tokens of each expert by its matrix."""
        flat = hidden.reshape(-1, WIDTH)
        chosen = nn.functional.one_hot(self.router(flat).argmax(-1), EXPERTS).T
        answers = torch.zeros_like(flat)
        for place in (chosen.sum(-1) > 0).nonzero():
            expert = place[0]
            (members,) = torch.where(chosen[expert])
            answers.index_add_(0, members, flat[members] @ self.matrices[expert])
        return answers.view(hidden.shape)


class Layer(nn.Module):
    """Attention and experts, each with a residual."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention, self.experts = Attention(layer), Experts()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Apply attention and experts."""
        hidden = hidden + self.attention(hidden, mask, cache)
        normalized = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        return hidden + self.experts(normalized)


class UnknownForCausalLM(PreTrainedModel, GenerationMixin):
    """Scores the next token."""

    config_class = UnknownConfig
    _supports_sdpa = True

    def __init__(self, config: UnknownConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(config.num_hidden_layers))
        self.head = nn.Linear(WIDTH, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_options: Any,
    ) -> CausalLMOutputWithPast:
        """Return the scores and the cache, if any."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden = self.embedding(input_ids)
        # Positional, because transformers 5.24 names the last argument differently.
        arguments = (self.config, hidden, attention_mask, past_key_values)
        masks = {
            "full_attention": create_causal_mask(*arguments),
            "sliding_attention": create_sliding_window_causal_mask(*arguments),
        }
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden = layer(hidden, masks[kind], past_key_values)
        return CausalLMOutputWithPast(logits=self.head(hidden), past_key_values=past_key_values)
