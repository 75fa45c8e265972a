"""A model of masks for prompts as two graphs: a vision encoder, and a prompt encoder with the mask decoder.

The vision encoder runs once per image, the second graph once per batch of points. Parts, inputs and outputs have the
names that optimum and transformers.js expect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.file_names import MASK_DECODER, VISION_ENCODER
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.families import family
from winml.modelkit.models.inputs.decision import select_inputs
from winml.modelkit.models.inputs.modalities.image import POINT_KEYS
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.bundle import PartFeed
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OpenSize
from winml.modelkit.ort.shared_settings import attribute_replaced

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest

_EMBEDDINGS, _POSITIONS = _FEATURES = "image_embeddings", "image_positional_embeddings"
_POINTS, _LABELS = "input_points", "input_labels"
_RESULTS = "iou_scores", "pred_masks"
_LABEL_RANGE = (0, 1)
"""Specified by transformers: a point outside of the object, or inside of it."""
_TRACED = (3, 2)
"""Chosen: numbers of objects and of their points at tracing, distinct and quick to run."""
_ENCODE, _POSITIONS_METHOD = "get_image_embeddings", "get_image_wide_positional_embeddings"
"""Specified by transformers: methods of the model that return the vectors of an image, and those of positions."""


def image_prompt_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> family.FoundParts:
    """Return the two parts of a model whose mask decoder reads one tensor of image vectors.

    for: SAM. Those of SAM 2 and SAM-HQ read several tensors.

    Raises:
        UsageError: the model does not take these sizes.
    """
    has_methods = all(hasattr(model, name) for name in (_ENCODE, _POSITIONS_METHOD))
    if task != "mask-generation" or request.input_specs is not None or not has_methods:
        return family.FoundParts()
    images = select_inputs(family.decide_model_inputs(model, checkpoint, task, request), frozenset({"pixel_values"}))
    sizes = {dimension.name: dimension.example or 1 for dimension in images.dimensions}
    (pixels,) = images.inputs
    traced = [int(sizes.get(str(size), size)) for size in pixels.shape]
    vectors = run_on_shapes(getattr(model, _ENCODE), {pixels.name: pixels.model_copy(update={"shape": tuple(traced)})})
    if not isinstance(vectors, torch.Tensor):
        return family.FoundParts()
    batch, *_ = pixels.shape
    fixed, wishes = request.fixed_sizes, request.left_open
    counts = {
        key: _open_count(key, size, wishes.get(key, OpenSize()))
        for key, size in zip(POINT_KEYS, _TRACED, strict=True)
        if key not in fixed
    }
    points = (batch, *(fixed[key] if key in fixed else counts[key].name for key in POINT_KEYS))
    shape = (batch, *vectors.shape[1:])
    inputs = (
        InputTensorSpec(name=_POINTS, shape=(*points, 2), dtype=pixels.dtype, value_range=(0, min(traced[-2:]))),
        InputTensorSpec(name=_LABELS, shape=points, dtype="int64", value_range=_LABEL_RANGE),
        *(InputTensorSpec(name=name, shape=shape, dtype=pixels.dtype) for name in _FEATURES),
    )
    feeds = tuple(PartFeed(name, MASK_DECODER, name) for name in _FEATURES)
    encoder = family.part_of_decision(
        model, images, {}, NestedArguments((pixels.name,), {}, dict), name=VISION_ENCODER, entry=_encoder, feeds=feeds
    )
    decoder = ModelPart(
        model,
        inputs,
        MASK_DECODER,
        entry=_decoder,
        arguments=NestedArguments(tuple(spec.name for spec in inputs), {}, dict),
        dimensions=(*(dim for dim in images.dimensions if dim.name == batch), *counts.values()),
        open_by_default={key: key for key in counts if key not in wishes},
    )
    return family.FoundParts((encoder, decoder))


def _open_count(key: str, size: int, wish: OpenSize) -> DynamicDimension:
    """Return a dynamic number with the bounds of the user."""
    count = DynamicDimension(name=wish.name or key, min=wish.min, max=wish.max)
    return count.model_copy(update={"example": wish.example or count.clamp(size)})


def _encoder(model: Any) -> Any:
    """Return the function that computes the vectors of images and of the positions in them."""

    def encode(pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors, positions = getattr(model, _ENCODE)(pixel_values), getattr(model, _POSITIONS_METHOD)()
        return {_EMBEDDINGS: vectors, _POSITIONS: positions.repeat(vectors.shape[0], 1, 1, 1)}

    return encode


def _decoder(model: Any) -> Any:
    """Return the function that computes the masks of points and their scores."""
    forward = model.forward  # an export replaces it

    def decode(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = tensors.pop(_POSITIONS)[:1]  # the forward repeats those of one image
        with attribute_replaced(model, _POSITIONS_METHOD, lambda: positions):
            outputs = forward(**tensors)
        return {name: outputs[name] for name in _RESULTS}

    return decode
