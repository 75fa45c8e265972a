"""Draws the inputs a part is traced with and compared on: the user's own first, then seeded random ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from winml.modelkit.export.tensors import to_torch
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.runtime.feeds import make_feeds

__all__ = ["InputDraws"]


@dataclass(frozen=True)
class InputDraws:
    """All inputs drawn for one part."""

    part: ModelPart
    seed: int

    def draw(
        self, number: int, sizes: Mapping[str, int] | None = None, *, with_padding: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return one set of inputs, on the device of the model.

        Args:
            number: Which set, from 1; the first is the user's example where there is one.
            sizes: Size of every open dimension; None: as traced.
            with_padding: Whether random masks hide something.
        """
        part = self.part
        if number == 1 and part.example is not None:
            tensors = dict(part.example)
        else:
            feeds = make_feeds(
                part.inputs, seed=self.seed + number, sizes=sizes or part.trace_sizes, with_padding=with_padding
            )
            tensors = {name: to_torch(value) for name, value in feeds.items()}
        device = next((parameter.device for parameter in part.model.parameters()), torch.device("cpu"))
        return {spec.name: tensors[spec.name].to(device) for spec in part.inputs}
