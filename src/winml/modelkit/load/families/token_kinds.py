"""What is a language model that is shown images told of each token, besides its vector?

Its positions, counted from a first one of its own, and a mask that follows from the kinds of tokens: those of an image
see each other, also ahead. Found by running the model on shapes, in which masks and positions have their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.families.image_features import calls_of
from winml.modelkit.load.inputs.shape_run import run_on_shapes

__all__ = ["TokenKinds", "find_first_position", "find_kinds"]

_MASK, _POSITIONS = "attention_mask", "position_ids"
_VALUES = (0, 1)
"""Specified by transformers: kinds of tokens; which of them stands for text differs from model to model."""
_MARKED = 2
"""Chosen: fewer than the tokens that are traced, so that both kinds are among them."""


@dataclass(frozen=True)
class TokenKinds:
    """An input that says of each token whether it sees tokens ahead of it."""

    name: str
    plain: int
    """Kind of a token that sees only those before it: what each is where nothing is said."""

    @property
    def marked(self) -> int:
        """Kind of a token that sees others of its kind, also ahead."""
        return 1 - self.plain

    def spec(self, tokens: InputTensorSpec) -> InputTensorSpec:
        """Return the input that says it of these tokens."""
        return InputTensorSpec(
            name=self.name,
            shape=tokens.shape,
            dtype="int64",
            value_range=(self.plain, self.plain),
            first_values=((self.marked, _MARKED),),
        )


def find_kinds(model: Any, name: str, inputs: Mapping[str, InputTensorSpec]) -> TokenKinds | str:
    """Return what an input says of tokens, or as a clause why that is not known.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        name: The input.
        inputs: What the forward takes, with sizes.
    """
    # A mask would hide tokens for reasons of its own.
    others = {key: spec for key, spec in inputs.items() if key != _MASK}
    seen = {}
    for value in _VALUES:
        spec = inputs[name].model_copy(update={"first_values": (), "value_range": (value, value)})
        seen[value] = _sees_ahead(_last_call(model, {**others, name: spec}).get(_MASK))
    plain = [value for value, ahead in seen.items() if ahead is False]
    if None in seen.values() or len(plain) != 1:
        return f"{type(model).__name__} takes {name} beside tokens and images"
    return TokenKinds(name, plain[0])


def find_first_position(model: Any, inputs: Mapping[str, InputTensorSpec]) -> int | str:
    """Return what a model calls the position of its first token, or as a clause why it has no such number.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: What the forward takes, with sizes.
    """
    positions = _last_call(model, {name: spec for name, spec in inputs.items() if name != _MASK}).get(_POSITIONS)
    if positions is None:
        return 0
    if isinstance(positions, torch.Tensor) and not positions.is_meta and positions.dim() == 2:
        first = int(positions[0, 0])
        if torch.equal(positions - first, torch.arange(positions.shape[1]).expand_as(positions)):
            return first
    return f"positions of {type(model).__name__} are not counted token by token"


def _last_call(model: Any, inputs: Mapping[str, InputTensorSpec]) -> dict[str, Any]:
    """Return what the language model of a model is given; nothing where it is not reached."""
    with _masks_of_truth_values(model), calls_of(model.get_decoder()) as calls:
        run_on_shapes(model, inputs)
    return calls[-1] if calls else {}


@contextmanager
def _masks_of_truth_values(model: Any) -> Iterator[None]:
    """Let masks say what is seen, in place of what is added to scores, for the time of the block."""
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = own


def _sees_ahead(mask: Any) -> bool | None:
    """Say whether a mask, or one of several, lets a token see another after it; None where that is not known."""
    masks = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    known = [item for item in masks if isinstance(item, torch.Tensor) and item.dtype == torch.bool and not item.is_meta]
    if not masks or len(known) != len(masks):
        return None
    return any(bool(item.triu(1).any()) for item in known)
