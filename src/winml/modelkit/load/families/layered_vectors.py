"""Vectors of images that a language model adds to those of tokens after some of its layers, besides the first ones.

Beside the vectors of images, a method returns lists of further ones, each as many. The language model is given them
with a mask that says which tokens they belong to. The graphs hand them on as vectors of all tokens, zero where a token
stands for no image: so a decoder needs no mask, and a step without images is one with zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.load.families.picture_grids import WholeTensors
from winml.modelkit.runtime.shared_settings import attribute_replaced

__all__ = ["LayeredVectors", "ListedVectors", "SeenFeatures", "find_layered", "listed_vectors"]


@dataclass(frozen=True)
class SeenFeatures:
    """What a method makes of images, in a run on shapes."""

    pooled: Any
    """The vectors that take the place of tokens."""
    lists: Mapping[str, ListedVectors]
    """By field of the record."""


@dataclass(frozen=True)
class ListedVectors:
    """Vectors of images in a list of the record that a method returns."""

    items: tuple[torch.Tensor, ...]
    """Of all images each."""
    are_divided: bool
    """Whether each comes in pieces, one for each image."""


@dataclass(frozen=True)
class LayeredVectors:
    """How further vectors come from the images into the language model."""

    field: str
    """Of the record that the method returns: a list with an entry for each layer."""
    count: int
    """Entries of that list."""
    are_divided: bool
    """Whether each entry comes in pieces, one for each image."""
    argument: str
    """Parameter of the language model that takes the list."""
    mask: str
    """Parameter of the language model that says which tokens the vectors belong to."""

    @property
    def seen_names(self) -> tuple[str, ...]:
        """What they are called where images are seen."""
        return tuple(f"{self.field}.{number}" for number in range(self.count))

    @property
    def token_names(self) -> tuple[str, ...]:
        """What they are called as vectors of all tokens."""
        return tuple(f"{self.argument}.{number}" for number in range(self.count))

    def seen(self, answer: Any, whole: WholeTensors) -> dict[str, torch.Tensor]:
        """Return those in what the method returned, by name.

        Args:
            answer: What it returned.
            whole: Has seen what it divided.
        """
        return dict(zip(self.seen_names, map(whole.of, answer[self.field]), strict=True))

    def listed(self, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the field of the record with these vectors, each in one piece."""
        vectors = [given[name] for name in self.seen_names]
        return {self.field: [(item,) for item in vectors] if self.are_divided else vectors}

    def of_tokens(self, call: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return vectors of all tokens, by name, from what the language model is called with."""
        mask = call[self.mask]
        return {
            name: item.new_zeros((*mask.shape, item.shape[-1])).masked_scatter(mask[..., None], item)
            for name, item in zip(self.token_names, call[self.argument], strict=True)
        }

    def decode(self, module: torch.nn.Module, language_model: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward of what decodes, which takes vectors of all tokens and hands them to the language model.

        Args:
            module: What decodes.
            language_model: The module itself, or one inside it.
        """
        forward = module.forward

        def forward_of_all(*args: Any, **named: Any) -> Any:
            given = {name: named.pop(name) for name in self.token_names if name in named}
            if not given:
                # As its user calls it.
                return forward(*args, **named)
            mask = torch.ones_like(given[self.token_names[0]][..., 0], dtype=torch.bool)
            further = {self.mask: mask, self.argument: [given[name].flatten(0, 1) for name in self.token_names]}
            with _AllTokens(mask):
                if language_model is module:
                    return forward(*args, **{**named, **further})
                own = language_model.forward
                with attribute_replaced(
                    language_model, "forward", lambda *args, **named: own(*args, **{**named, **further})
                ):
                    return forward(*args, **named)

        forward_of_all.__signature__ = _with_any_name(inspect.signature(forward))  # type: ignore[attr-defined]
        return forward_of_all


def listed_vectors(answer: Any, whole: WholeTensors) -> dict[str, ListedVectors]:
    """Return the lists of vectors in the record of a method: each entry a tensor, or the pieces of one.

    Args:
        answer: What the method returned.
        whole: Has seen what it divided.
    """
    fields = answer.items() if isinstance(answer, Mapping) else ()
    found = {
        name: ListedVectors(tuple(map(whole.of, value)), any(map(whole.is_divided, value)))
        for name, value in fields
        if isinstance(value, list) and value and not whole.is_divided(value)
    }
    return {
        name: listed for name, listed in found.items() if all(isinstance(item, torch.Tensor) for item in listed.items)
    }


def find_layered(features: SeenFeatures, beside: Mapping[str, Any]) -> LayeredVectors | None:
    """Return how further vectors reach a language model; None where it is given others, or none.

    Args:
        features: What the method makes of images.
        beside: What the language model is given beside the vectors of tokens and what all are given.
    """
    masks = [name for name, value in beside.items() if isinstance(value, torch.Tensor) and value.dtype == torch.bool]
    lists = [name for name, value in beside.items() if isinstance(value, list)]
    if len(beside) != 2 or not masks or not lists:
        return None
    given, mask = beside[lists[0]], beside[masks[0]]
    shapes = [tuple(item.shape) for item in given if isinstance(item, torch.Tensor) and item.dim() == 2]
    marked = int(mask.sum()) if mask.dim() == 2 and not mask.is_meta else -1
    if len(shapes) != len(given) or any(shape[0] != marked for shape in shapes):
        return None
    for name, listed in features.lists.items():
        if [tuple(item.shape) for item in listed.items] == shapes:
            return LayeredVectors(name, len(shapes), listed.are_divided, lists[0], masks[0])
    return None


def _with_any_name(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that takes keywords of any name, since those of inputs are none of Python's."""
    kind = inspect.Parameter.VAR_KEYWORD
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not kind]
    return signature.replace(parameters=[*own, inspect.Parameter("further", kind)])


class _AllTokens(TorchFunctionMode):
    """Takes what a mask of all tokens chooses as all there is, so that no graph looks for it."""

    def __init__(self, mask: torch.Tensor) -> None:
        """Know the mask."""
        super().__init__()
        self._mask = mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Read and write all tokens where the mask says which."""
        if func is torch.Tensor.to and args[0] is self._mask:
            return self._mask
        if func is torch.Tensor.__getitem__ and self._chooses(args[1]):
            return args[0].flatten(0, 1)
        if func is torch.Tensor.__setitem__ and self._chooses(args[1]):
            return args[0].copy_(args[2].reshape(args[0].shape))
        return func(*args, **(kwargs or {}))

    def _chooses(self, index: Any) -> bool:
        first = index[0] if isinstance(index, tuple) and index else index
        return first is self._mask
