"""Drawing of predictions: boxes and masks on the image, depth as an image. Uses Pillow only."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array

Box = tuple[float, float, float, float]
_GOLDEN = 0.618034
"""Chosen: golden-ratio steps around the hue circle give neighbouring numbers distinct colors."""
_OPACITY = 0.5
_LINE_SHARE = 0.004
"""Line width relative to the larger side of an image. Chosen: visible in a photo without hiding small objects."""


def with_boxes(image: Any, boxes: Sequence[tuple[str, Box]]) -> Any:
    """Return a copy of an image with boxes drawn on it.

    Args:
        image: A Pillow image.
        boxes: Label and (left, top, right, bottom) of each box; all words of the label except the last determine the
            color.
    """
    from PIL import ImageDraw

    drawn = image.convert("RGB").copy()
    canvas = ImageDraw.Draw(drawn)
    width = max(1, round(max(image.size) * _LINE_SHARE))
    names = list(dict.fromkeys(label.rpartition(" ")[0] for label, _ in boxes))
    for label, box in boxes:
        color = _choose_color(names.index(label.rpartition(" ")[0]))
        canvas.rectangle(box, outline=color, width=width)
        corner = (box[0] + width, box[1] + width)
        canvas.rectangle(canvas.textbbox(corner, label), fill=color)
        canvas.text(corner, label, fill=(0, 0, 0))
    return drawn


def with_segments(image: Any, numbers: Array, count: int) -> Any:
    """Return a copy of an image with colored segments.

    Args:
        image: A Pillow image.
        numbers: Segment number of each pixel; 0: no segment.
        count: Number of segments.
    """
    from PIL import Image

    palette = np.asarray([(0, 0, 0), *(_choose_color(index) for index in range(count))], np.uint8)
    colors = Image.fromarray(palette[numbers]).resize(image.size, Image.Resampling.NEAREST)
    weight = Image.fromarray(np.where(numbers > 0, round(255 * _OPACITY), 0).astype(np.uint8))
    return Image.composite(colors, image.convert("RGB"), weight.resize(image.size, Image.Resampling.NEAREST))


def image_of_pixels(pixels: Array) -> Any:
    """Convert pixels to an image.

    Args:
        pixels: Red, green and blue, from 0 to 255, of shape [height, width, 3].
    """
    from PIL import Image

    return Image.fromarray(pixels)


def depth_image(distances: Array, size: tuple[int, int]) -> Any:
    """Convert depth to a grayscale image: the smallest depth is black, the largest white.

    Args:
        distances: Depth of each pixel.
        size: Width and height of the image.
    """
    from PIL import Image

    low, high = float(distances.min()), float(distances.max())
    scaled = (distances - low) / max(high - low, 1e-12) * 255
    return Image.fromarray(scaled.astype(np.uint8)).resize(size)


def _choose_color(index: int) -> tuple[int, int, int]:
    """Return the RGB color of a segment or class number."""
    red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN % 1, 0.75, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def save_image(image: Any, path: Path, suffix: str) -> None:
    """Write an image in the format of a suffix, independent of the file name."""
    import PIL.Image

    image.save(path, format=PIL.Image.registered_extensions()[suffix])
