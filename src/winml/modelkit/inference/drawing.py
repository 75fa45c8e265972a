"""Draws an answer: boxes and masks on the image, depth as an image. Pillow only."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.inference.answering import Answer

__all__ = ["drawn_image", "save_image"]

_GOLDEN = 0.618034
"""Chosen: steps of the golden ratio around the circle of hues keep neighbouring numbers apart."""
_OPACITY = 0.5
_LINE_SHARE = 0.004
"""Of the larger side of an image: width of a line. Chosen: seen in a photo and not hiding a small object."""


def drawn_image(answer: Answer, image: Any) -> Any:
    """Return an image of Pillow that displays an answer.

    Args:
        answer: Boxes, segments or depth.
        image: What the model was passed.
    """
    if answer.kind == "depth":
        return _depth_image(answer.arrays["depth"], image.size)
    drawn = image.convert("RGB")
    if answer.kind == "segments":
        return _with_segments(drawn, answer.arrays["segments"], len(answer.entries))
    return _with_boxes(drawn, answer)


def _with_boxes(image: Any, answer: Answer) -> Any:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(image)
    width = max(1, round(max(image.size) * _LINE_SHARE))
    labels = list(dict.fromkeys(entry.label for entry in answer.entries))
    for entry in answer.entries:
        assert entry.box is not None
        color = _color(labels.index(entry.label))
        draw.rectangle(entry.box, outline=color, width=width)
        words = f"{entry.label} {entry.score:.2f}"
        place = (entry.box[0] + width, entry.box[1] + width)
        draw.rectangle(draw.textbbox(place, words), fill=color)
        draw.text(place, words, fill=(0, 0, 0))
    return image


def _with_segments(image: Any, numbers: Array, count: int) -> Any:
    from PIL import Image

    palette = np.asarray([(0, 0, 0), *(_color(place) for place in range(count))], np.uint8)
    colors = Image.fromarray(palette[numbers]).resize(image.size, Image.Resampling.NEAREST)
    weight = Image.fromarray(np.where(numbers > 0, round(255 * _OPACITY), 0).astype(np.uint8))
    return Image.composite(colors, image, weight.resize(image.size, Image.Resampling.NEAREST))


def _depth_image(depth: Array, size: tuple[int, int]) -> Any:
    from PIL import Image

    low, high = float(depth.min()), float(depth.max())
    scaled = (depth - low) / max(high - low, 1e-12) * 255
    return Image.fromarray(scaled.astype(np.uint8)).resize(size)


def _color(place: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(place * _GOLDEN % 1, 0.75, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def save_image(image: Any, path: Path, suffix: str) -> None:
    """Write an image in the format of a suffix, whatever the file is called."""
    import PIL.Image

    image.save(path, format=PIL.Image.registered_extensions()[suffix])
