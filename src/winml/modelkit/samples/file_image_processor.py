"""Image processor of a ``preprocessor_config.json`` with the calls of a transformers processor that this package uses.

Used if transformers is not installed: Pillow resizes, numpy crops, rescales and normalizes. Only processors of this
chain are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array

if TYPE_CHECKING:
    from PIL.Image import Image

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_BILINEAR, _BICUBIC = 2, 3
_SQUARE, _SHORTEST = {"height": 224, "width": 224}, {"shortest_edge": 224}


def _defaults(
    means: Sequence[Sequence[float]], size: Mapping[str, int], resample: int, **others: Any
) -> dict[str, Any]:
    return {"image_mean": means[0], "image_std": means[1], "size": size, "resample": resample, **others}


_CROP = {"do_center_crop": True, "crop_size": _SQUARE}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "BitImageProcessor": _defaults(_OPENAI, _SHORTEST, _BICUBIC, **_CROP),
    "BlipImageProcessor": _defaults(_OPENAI, {"height": 384, "width": 384}, _BICUBIC),
    "CLIPImageProcessor": _defaults(_OPENAI, _SHORTEST, _BICUBIC, **_CROP),
    "ConvNextImageProcessor": _defaults(_HALF, {"shortest_edge": 384}, _BICUBIC, crop_pct=224 / 256),
    "DeiTImageProcessor": _defaults(_HALF, {"height": 256, "width": 256}, _BICUBIC, **_CROP),
    "MobileNetV1ImageProcessor": _defaults(_HALF, {"shortest_edge": 256}, _BILINEAR, **_CROP),
    "MobileNetV2ImageProcessor": _defaults(_HALF, {"shortest_edge": 256}, _BILINEAR, **_CROP),
    "SiglipImageProcessor": _defaults(_HALF, _SQUARE, _BICUBIC),
    "ViTImageProcessor": _defaults(_HALF, _SQUARE, _BILINEAR),
}
"""Specified by transformers: class of an image processor → values of its keys that a file may omit."""


def processor_class(config: Mapping[str, Any]) -> str:
    """Return the class of the image processor of a config, without the suffix of its implementation."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    name = name.removesuffix("Fast").removesuffix("Pil")
    return name.replace("FeatureExtractor", "ImageProcessor")


def is_readable(config: Mapping[str, Any]) -> bool:
    """Return True if :class:`FileImageProcessor` computes what a config states: no padding, one known kind of size."""
    size = config.get("size")
    edges = {edge for edge, length in size.items() if length} if isinstance(size, Mapping) else {"shortest_edge"}
    is_known_size = edges in ({"height", "width"}, {"shortest_edge"})
    return processor_class(config) in DEFAULTS and is_known_size and not config.get("do_pad")


class FileImageProcessor:
    """Image processor of a config.

    Attributes:
        size: Size of a resized image: ``height`` and ``width``, or ``shortest_edge``.
        do_center_crop: True if the centre of the resized image is cut out.
    """

    do_pad = False
    """Specified by transformers: images are padded to the largest of a batch."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Store a config that :func:`is_readable` accepts."""
        name = processor_class(config)
        values = {**DEFAULTS[name], **{key: value for key, value in config.items() if value is not None}}
        self._values = values
        self._is_convnext = name == "ConvNextImageProcessor"
        self.size = self._read_size(values["size"])
        self.do_center_crop = bool(values.get("do_center_crop", False))

    def _read_size(self, size: Any) -> Mapping[str, int]:
        """Return the size of a config, which is a number or a list in older ones."""
        if isinstance(size, Mapping):
            return {edge: int(length) for edge, length in size.items() if length}
        if not isinstance(size, int):
            return {"height": int(size[0]), "width": int(size[1])}
        is_shortest = "shortest_edge" in DEFAULTS[processor_class(self._values)]["size"]
        return {"shortest_edge": size} if is_shortest else {"height": size, "width": size}

    def __call__(
        self,
        images: Sequence[Image],
        *,
        size: Mapping[str, int] | None = None,
        do_center_crop: bool | None = None,
        return_tensors: str = "np",  # noqa: ARG002  # of transformers
    ) -> dict[str, Array]:
        """Return the pixels of images: ``pixel_values`` float32[images, channels, height, width]."""
        is_cropped = self.do_center_crop if do_center_crop is None else do_center_crop
        pixels = [self._process(image.convert("RGB"), size or self.size, is_cropped=is_cropped) for image in images]
        return {"pixel_values": np.stack(pixels)}

    def _process(self, image: Image, size: Mapping[str, int], *, is_cropped: bool) -> Array:
        values = self._values
        if values.get("do_resize", True):
            image = self._resize(image, size)
        pixels = np.asarray(image).transpose(2, 0, 1)
        if is_cropped:
            pixels = _crop_center(pixels, _edges(values["crop_size"]))
        if values.get("do_rescale", True):
            pixels = (pixels.astype(np.float64) * values.get("rescale_factor", 1 / 255)).astype(np.float32)
        if values.get("do_normalize", True):
            mean, std = (np.asarray(values[key], np.float32)[:, None, None] for key in ("image_mean", "image_std"))
            pixels = (pixels.astype(np.float32) - mean) / std
        return pixels

    def _resize(self, image: Image, size: Mapping[str, int]) -> Image:
        """Resize an image; the processor of ConvNeXt crops images of less than 384 pixels, too."""
        resample = int(self._values["resample"])
        shortest = size.get("shortest_edge")
        if shortest is None:
            return image.resize((size["width"], size["height"]), resample)
        if not self._is_convnext:
            return image.resize(_scaled_edges(image, shortest), resample)
        if shortest >= _LARGE:
            return image.resize((shortest, shortest), resample)
        image = image.resize(_scaled_edges(image, int(shortest / self._values["crop_pct"])), resample)
        left, top = (image.width - shortest) // 2, (image.height - shortest) // 2
        return image.crop((left, top, left + shortest, top + shortest))


_LARGE = 384
"""Specified by ConvNeXt: images of this size and larger are not cropped."""


def _scaled_edges(image: Image, shortest: int) -> tuple[int, int]:
    """Return width and height of an image with the specified shortest edge."""
    short, long = sorted((image.width, image.height))
    longest = int(shortest * long / short)
    return (shortest, longest) if image.width <= image.height else (longest, shortest)


def _edges(size: Any) -> tuple[int, int]:
    """Return height and width of a size in a config."""
    return (size["height"], size["width"]) if isinstance(size, Mapping) else (int(size), int(size))


def _crop_center(pixels: Array, edges: tuple[int, int]) -> Array:
    """Return the centre of an image, with zeros where the image is smaller."""
    margins = [max(0, edge - size) for edge, size in zip(edges, pixels.shape[1:], strict=True)]
    if any(margins):
        # As transformers places a smaller image.
        pads = [((margin + 1) // 2, margin // 2) for margin in margins]
        pixels = np.pad(pixels, [(0, 0), *pads])
    top, left = ((size - edge) // 2 for size, edge in zip(pixels.shape[1:], edges, strict=True))
    return pixels[:, top : top + edges[0], left : left + edges[1]]
