"""Code of a checkpoint: a model that changes a loaded weight when weights are tied."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel


class WritingConfig(BertConfig):
    """A config of its own type."""

    model_type = "writing"


class WritingModel(BertModel):
    """A model that sets a bias to zero in place."""

    config_class = WritingConfig

    def tie_weights(self, *arguments: Any, **keywords: Any) -> None:
        """Tie, and write."""
        super().tie_weights(*arguments, **keywords)
        with torch.no_grad():
            self.pooler.dense.bias.zero_()
