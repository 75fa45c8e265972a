"""Vision-language models of onnxruntime-genai: its types, and the image processor that they read.

A type has a fixed signature of vision encoder, embedding and decoder, and fixed marks for images in a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_Operation = tuple[str, Mapping[str, object]]
"""Type of an operation of onnxruntime-extensions, and its attributes."""


@dataclass(frozen=True)
class VisionType:
    """A vision-language type of onnxruntime-genai."""

    name: str
    vision_inputs: tuple[str, ...]
    """Inputs of the vision encoder."""
    settings: Mapping[str, object]
    """Settings of the image processor that a checkpoint may omit; the defaults of transformers."""
    tokens: tuple[str, ...] = ()
    """Token numbers of ``config.json`` that the type reads."""
    sizes: tuple[str, ...] = ()
    """Sizes of ``vision_config`` that the type reads."""
    cuts_patches: bool = False
    """True if images of any size are resized to whole patches, and passed as patches."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Key of ``config.json`` → the only number that the type supports."""


_QWEN = VisionType(
    "qwen2_5_vl",
    ("pixel_values", "image_grid_thw"),
    {"resample": 3, "rescale_factor": 1 / 255},
    ("image_token_id", "video_token_id", "vision_start_token_id"),
    ("spatial_merge_size", "patch_size"),
    cuts_patches=True,
)
VISION_TYPES: Mapping[str, VisionType] = {
    "gemma3": VisionType(
        "gemma3", ("pixel_values",), {"resample": 2, "rescale_factor": 1 / 255}, fixed={"mm_tokens_per_image": 256}
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
}
"""Specified by onnxruntime-genai 0.18: model type of a checkpoint → type."""

_RESAMPLING: Mapping[int, str] = {0: "NEAREST", 1: "LANCZOS", 2: "LINEAR", 3: "CUBIC"}
"""Filter number of Pillow → its name in onnxruntime-extensions, whose code for it is that of Pillow."""


def image_processor(kind: VisionType, settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the description of an image processor for onnxruntime-genai; ``{}`` if settings are missing.

    Args:
        kind: The type of the model.
        settings: Settings of the image processor of the checkpoint.
    """
    settings = {**kind.settings, **settings}
    try:
        operations: list[_Operation] = [
            ("DecodeImage", {"color_space": "RGB"}),
            ("Resize", {"interpolation": _RESAMPLING[settings["resample"]], **_resize_attributes(kind, settings)}),
            ("Rescale", {"rescale_factor": settings["rescale_factor"]}),
            ("Normalize", {"mean": settings["image_mean"], "std": settings["image_std"]}),
            _last_operation(kind, settings),
        ]
    except KeyError:
        return {}
    transforms = [
        {"operation": {"name": name, "type": name, "attrs": dict(attributes)}}
        for name, attributes in operations
        if settings.get(f"do_{name.lower()}") is not False
    ]
    return {"processor": {"name": "image_processor", "transforms": transforms}}


def _resize_attributes(kind: VisionType, settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the size of an image after resizing: fixed, or a number of pixels in whole patches."""
    size = settings.get("size") or {}
    if not kind.cuts_patches:
        return {"height": size["height"], "width": size["width"], "keep_aspect_ratio": 0}
    return {
        "smart_resize": 1,
        "min_pixels": settings.get("min_pixels") or size["shortest_edge"],
        "max_pixels": settings.get("max_pixels") or size["longest_edge"],
        "patch_size": settings["patch_size"],
        "merge_size": settings["merge_size"],
    }


def _last_operation(kind: VisionType, settings: Mapping[str, Any]) -> _Operation:
    """Return the operation that brings pixels into the order of the vision encoder."""
    if not kind.cuts_patches:
        return "Permute3D", {"dims": [2, 0, 1]}
    return "PatchImage", {name: settings[name] for name in ("patch_size", "temporal_patch_size", "merge_size")}
