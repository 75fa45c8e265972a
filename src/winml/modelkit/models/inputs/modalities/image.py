"""Images and videos: a plane of pixels, tiles, or a row of patches with the size of their grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from winml.modelkit.models.inputs.drafts import (
    ALL_VALID,
    InputContext,
    InputDraft,
    InputLayout,
    input_shape,
    value_runs,
)
from winml.modelkit.models.inputs.modalities.modality import FRAMES_KEY, Modality, ShapeKey, is_position_name
from winml.modelkit.models.inputs.sizes import InputSize, SizeBounds, edge_pair, first_edge, first_int, sub_config
from winml.modelkit.ort.default_sizes import IMAGE_CHANNELS, IMAGE_EDGE, PATCH_EDGE, VIDEO_FRAMES

_PIXELS = "pixel_values"
_PATCHES = "hidden_states"
"""Carrier of vision towers that are separate models; an image only in combination with a grid."""
_GRIDS = ("image_grid_thw", "grid_thw")
_POSITIONS = ("image_position_ids", "pixel_position_ids")
_EDGES = ("spatial_shapes", "target_sizes")
"""Companions with the position of patches in a picture.

The formats are frames, rows and columns of each picture, the position of each patch, or rows and columns alone.
"""
_PATCH_MASK = "pixel_attention_mask"
_IMAGE_SIZES = "image_sizes"
_POINTS = "input_points"
"""Points in a picture, whose objects a model of mask generation segments."""
POINT_KEYS = {
    "point_batch_size": "Objects of an image that points mark.",
    "nb_points_per_image": "Points of each object.",
}
"""Specified by optimum: names of both numbers → description."""

_MERGED_PATCHES = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", "downsample_factor")
"""Config attributes: patches per edge that become one token; sizes of pictures are multiples."""
_CHANNELS = ("num_channels", "in_channels")
_TRACE_STEP = 32
"""Chosen: the product of strides of nearly all vision models."""
_MOST_TILES = 8
"""Chosen: more tiles than tiled models use for a square picture."""
_SPECIAL_POSITIONS = 2
"""Chosen: class and distillation tokens have separate positions."""


class Image(Modality):
    """Pictures of one size."""

    rows_key = "image_batch_size"
    shape_keys = (
        ShapeKey(rows_key, "Rows of images, where a model scores each with each text.", "batch"),
        ShapeKey("height", "Image height in pixels.", "image_size", _TRACE_STEP, IMAGE_EDGE),
        ShapeKey("width", "Image width in pixels.", "image_size", _TRACE_STEP, IMAGE_EDGE),
        ShapeKey("num_channels", "Image channels."),
        FRAMES_KEY,
        *(ShapeKey(key, description) for key, description in POINT_KEYS.items()),
    )
    description = "an image"
    carriers = (_PIXELS, _PATCHES)
    companions = (*_GRIDS, *_POSITIONS, *_EDGES, _PATCH_MASK, _IMAGE_SIZES, _POINTS)
    sub_config_name = "vision_config"
    feature_method = "get_image_features"
    place_token_names = ("image_token_id", "image_token_index")
    place_mask = "image_embeds_position_mask"
    place_kind = 1
    has_place_masks = True
    place_keys = ("height", "width")

    def media_parameters(self, context: InputContext) -> list[str]:
        """Return pixels or patches, with the companions that are required and not merely allowed.

        `[]` without both, or for patches without a grid.
        """
        names = super().media_parameters(context)
        if not context.takes("spatial_shapes"):
            names = [name for name in names if name != _PATCH_MASK]
        if context.task != "mask-generation":
            names = [name for name in names if name != _POINTS]
        return [] if names[:1] == [_PATCHES] and "grid_thw" not in names else names

    def layouts(self, context: InputContext, names: Sequence[str], *, has_places: bool) -> Iterator[InputLayout]:
        """Yield rows of patches if a grid describes them, else planes, tiles, and patches without a grid.

        Raises:
            UsageError: the user requests a size that the model does not take.
        """
        carrier, *companions = names
        if {*companions} & {*_GRIDS, *_POSITIONS, *_EDGES}:
            yield from _patch_layouts(context, carrier, companions)
            return
        plane = _image_plane(context)
        points: list[InputDraft] = []
        if _POINTS in companions:
            # [images, objects, points of an object, x and y]
            counts = (context.sizes.choose(key, 1) for key in POINT_KEYS)
            shape, edge = input_shape(context.batch, *counts, 2), min(size.value for size in plane[-2:])
            points = [InputDraft(_POINTS, shape, context.float_dtype, (0, edge))]
        yield _make_layout(context, carrier, context.batch, *plane, companions=points)
        if _IMAGE_SIZES in companions:
            edges = plane[-2:]
            sizes = InputDraft(
                name=_IMAGE_SIZES,
                shape=input_shape(context.batch, 2),
                dtype="int64",
                value_range=(1, max(edge.value for edge in edges)),
                first_values=value_runs(edges),
            )
            yield _make_layout(context, carrier, context.batch, *plane, companions=(sizes,))
            for tiles in range(2, _MOST_TILES + 1):
                yield _make_layout(context, carrier, context.batch, tiles, *plane, companions=(sizes,))
        if has_places:
            # Some models take several pictures per row, and some a row of patches.
            grid = _patch_grid(context)
            yield _make_layout(context, carrier, context.batch, 1, *plane, grid=grid)
            yield _make_layout(context, carrier, context.batch, grid.count, grid.values, grid=grid)


@dataclass(frozen=True)
class _PatchGrid:
    """A picture as a row of patches."""

    edges: tuple[InputSize, InputSize]
    """Height and width in pixels."""
    rows: int
    columns: int
    patch: int
    """Pixels per edge of a patch."""
    channels: int
    depth: int
    """Frames of a video in one patch; a picture is repeated as often."""

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.rows * self.columns

    @property
    def values(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.depth * self.patch * self.patch


def _make_layout(
    context: InputContext,
    carrier: str,
    *shape: InputSize | int,
    companions: Sequence[InputDraft] = (),
    grid: _PatchGrid | None = None,
) -> InputLayout:
    drafts = (InputDraft(carrier, input_shape(*shape), context.float_dtype), *companions)
    return InputLayout({draft.name: draft for draft in drafts}, grid.edges if grid else ())


def _patch_layouts(context: InputContext, carrier: str, companions: Sequence[str]) -> Iterator[InputLayout]:
    """Yield the layouts of patches with a companion."""
    grid = _patch_grid(context)
    rows = context.batch.value
    drafts = list(_grid_companions(context, companions, grid))
    shapes: list[tuple[InputSize | int, ...]]
    if {*companions} & {*_GRIDS}:
        shapes = [(rows * grid.count, grid.values), (rows * grid.count, grid.channels, grid.patch, grid.patch)]
    elif "target_sizes" in companions:
        # All patches are arranged in one horizontal strip.
        shapes = [(1, grid.channels, grid.patch, grid.patch * grid.count * rows)]
    else:
        shapes = [(context.batch, grid.count, grid.values)]
    is_one_row = bool({*companions} & {*_GRIDS, "target_sizes"})
    bounds = {"batch_size": SizeBounds(fixed="the patches of all images form one row")} if is_one_row else {}
    for shape in shapes:
        layout = _make_layout(context, carrier, *shape, companions=drafts, grid=grid)
        yield InputLayout(layout.drafts, (context.batch, *layout.underlying_sizes), bounds)


def _grid_companions(context: InputContext, names: Sequence[str], grid: _PatchGrid) -> Iterator[InputDraft]:
    """Yield the drafts of grids, positions, sizes and masks of the patches."""
    coordinates = [index for row in range(grid.rows) for column in range(grid.columns) for index in (column, row)]
    batch = context.batch
    for name in names:
        shape, numbers, value_range = input_shape(batch, grid.count), list[int](), (0, max(grid.columns, grid.rows))
        if name in _GRIDS:
            shape, numbers = input_shape(batch, 3), [1, grid.rows, grid.columns]
        elif name in _POSITIONS:
            shape, numbers = input_shape(batch, grid.count, 2), coordinates
        elif name in _EDGES:
            shape, numbers = input_shape(batch, 2), [grid.rows, grid.columns]
        elif name == _PATCH_MASK:
            value_range = ALL_VALID
        else:
            continue
        yield InputDraft(name, shape, "int64", value_range, first_values=value_runs(numbers))


def _vision_config(context: InputContext) -> Any:
    return sub_config(context.config, "vision_config", "image_config", "encoder")


def _image_plane(context: InputContext) -> tuple[InputSize, ...]:
    """Return channels, height and width, preceded by the frames for a video model.

    Raises:
        UsageError: the model takes one size only, and the user requests another.
    """
    vision, sizes = _vision_config(context), context.sizes
    backbone = sub_config(context.config, "backbone_config")
    edge_sources = [(vision, "image_size"), (backbone, "image_size"), (vision, "input_size")]
    pairs = (edge_pair(getattr(config, name, None)) for config, name in edge_sources)
    config_edges = next((pair for pair in pairs if pair), None)
    fixed = config_edges if _is_image_fixed(context, config_edges) else None
    height, width = fixed or context.processor.image_size or config_edges or (IMAGE_EDGE, IMAGE_EDGE)
    reason = f"the model takes images of {fixed[0]}x{fixed[1]} pixels only" if fixed else ""
    bounds = SizeBounds(fixed=reason) if fixed else None
    is_declared = config_edges is not None
    edges = (
        sizes.choose("height", height, bounds=bounds, is_declared=is_declared),
        sizes.choose("width", width, bounds=bounds, is_declared=is_declared),
    )
    if fixed is not None and (edges[0].value, edges[1].value) != fixed:
        sizes.refuse("height" if edges[0].value != fixed[0] else "width", reason)
    channels = sizes.choose_exactly("num_channels", first_int(vision, _CHANNELS), IMAGE_CHANNELS)
    frames = getattr(vision, "num_frames", None)
    if isinstance(frames, int) or context.task == "video-classification":
        return (sizes.choose("num_frames", frames or VIDEO_FRAMES), channels, *edges)
    return (channels, *edges)


def _is_image_fixed(context: InputContext, declared: tuple[int, int] | None) -> bool:
    """Return True if the model has one learned position per patch and interpolation is not requested."""
    patch = edge_pair(getattr(_vision_config(context), "patch_size", None))
    if declared is None or patch is None or not context.takes("interpolate_pos_encoding"):
        return False
    patches = (declared[0] // patch[0]) * (declared[1] // patch[1])
    return any(
        len(values.shape) >= 2 and patches <= values.shape[-2] <= patches + _SPECIAL_POSITIONS
        for name, values in context.structure.named_parameters()
        if is_position_name(name.removesuffix(".weight"))
    )


def _patch_grid(context: InputContext) -> _PatchGrid:
    """Return the picture of a model that takes a row of patches.

    Raises:
        UsageError: a height or width is no multiple of the merged patch size.
    """
    vision = _vision_config(context)
    patch = edge_pair(getattr(vision, "patch_size", None)) or (PATCH_EDGE, PATCH_EDGE)
    merges = (first_edge(config, _MERGED_PATCHES) for config in (vision, context.config))
    unit = patch[0] * next((merged for merged in merges if merged), 1)
    default_edge = max(IMAGE_EDGE // unit, 1) * unit
    height, width = context.sizes.choose("height", default_edge), context.sizes.choose("width", default_edge)
    for key, edge in (("height", height), ("width", width)):
        if edge.value % unit:
            context.sizes.refuse(key, f"the model takes multiples of {unit} only")
    channels = first_int(vision, (*_CHANNELS, "in_chans")) or IMAGE_CHANNELS
    depth = first_int(vision, ("temporal_patch_size", "patch_temporal")) or 1
    return _PatchGrid((height, width), height.value // patch[0], width.value // patch[0], patch[0], channels, depth)
