"""Where are the tokens of a text with pictures, for a decoder that is told rows and columns of each?

transformers' own code for the model says it, run without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from winml.modelkit.errors import UsageError

__all__ = ["KINDS", "ImagePositions"]

KINDS: Final = "mm_token_type_ids"
"""Specified by transformers: which tokens of a text stand for what kind of medium."""


class ImagePositions:
    """Makes the positions of tokens as the model of a config does."""

    def __init__(self, config: Any, rows: int) -> None:
        """Build the model, without its weights.

        Args:
            config: Of the model.
            rows: How many positions a token has.
        """
        from transformers import AutoModelForImageTextToText

        make: Any = AutoModelForImageTextToText
        with torch.device("meta"):
            self._model = make.from_config(config)
        self._rows = rows

    def of_prompt(self, tokens: torch.Tensor, passed: Mapping[str, Any]) -> torch.Tensor:
        """Return the positions of tokens, and remember by how much later ones are ahead of their number.

        Args:
            tokens: Of shape [batch, sequence].
            passed: What else ``generate()`` is given, such as the grids of pictures and the kinds of tokens.

        Returns:
            Integers of shape [rows, batch, sequence].

        Raises:
            UsageError: there are grids of pictures, and nothing says which tokens stand for them.
        """
        grids = [name for name in passed if name.endswith("grid_thw") and passed[name] is not None]
        if grids and passed.get(KINDS) is None:
            raise UsageError(
                f"{grids[0]} is given, and no {KINDS}: which tokens stand for pictures is not known",
                hint="Give all that the processor of the model makes of the text and the pictures.",
            )
        positions = self._model._prepare_position_ids_for_generation(tokens, dict(passed))
        several: torch.Tensor = positions[-self._rows :].expand(self._rows, *tokens.shape[:1], -1)
        return several
