"""Replacement of Python computations on image grids by tensor operators.

A model that takes the patches of all pictures in one row also takes the grid of each picture: frames, rows and columns.
Functions of ``transformers.vision_utils`` derive positions of patches, windows and attention masks from the grids; some
of them loop over numbers, and attention is computed per picture. A trace would fix the grid of one sample. The
replacements, active during a call, compute the same results with tensor operators.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.errors import UsageError
from winml.modelkit.models.inputs.decision import InputDecision
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, GridSlot

_LIBRARY = "transformers.vision_utils"
_ATTENTION: Final = "winml_flash_pictures"
"""Name of our attention function.

Specified by transformers: a function with ``flash`` in its name receives the bounds of all pictures at once.
"""


_PICTURES, _PATCHES = "images", "patches"
"""Names of the dynamic dimensions."""


def with_open_grids(decision: InputDecision, dynamic: DynamicRequest, vectors: int) -> InputDecision:
    """Make the number and the sizes of pictures dynamic in their patches and grids.

    Args:
        decision: Patches in one row, and the grid of each picture: of fixed sizes.
        dynamic: Request of the user.
        vectors: Number of image features computed from these patches.

    Raises:
        UsageError: a requested axis has a fixed size.
    """
    (patches, grids) = sorted(decision.inputs, key=lambda spec: spec.dtype.startswith("int"))
    for name in (patches.name, grids.name):
        if fixed := [axis for axis in dynamic.axes.get(name, {}) if axis != 0]:
            raise UsageError(
                f"{dynamic.origin_of('dynamic_axes', (name, fixed[0]))}: axis {fixed[0]} of {name} has a fixed size",
                hint=f"Axis 0 is dynamic: any number of images, of any size. Axes of {name} count from 0.",
            )
    requested_names = {name: dynamic.axes.get(name, {}).get(0) for name in (patches.name, grids.name)}
    all_patches, images = requested_names[patches.name] or _PATCHES, requested_names[grids.name] or _PICTURES
    slot = GridSlot(patches=all_patches, multiple=math.isqrt(int(patches.shape[0]) // vectors))
    open_specs = {
        patches.name: patches.model_copy(update={"shape": (all_patches, *patches.shape[1:])}),
        grids.name: grids.model_copy(update={"shape": (images, *grids.shape[1:]), "first_values": (), "grid": slot}),
    }
    bounds = next((dimension for dimension in dynamic.dimensions if dimension.name == images), None)
    return replace(
        decision,
        inputs=tuple(open_specs[spec.name] for spec in decision.inputs),
        dimensions=(bounds or DynamicDimension(name=images, example=2),),
    )


def fixed_grids(decision: InputDecision) -> dict[str, torch.Tensor]:
    """Return the grids of images of a fixed size, by input; ``{}`` if the sizes are dynamic, or no input is a grid."""
    return {
        spec.name: torch.tensor(spec.fixed_grid).expand([int(size) for size in spec.shape])
        for spec in decision.inputs
        if spec.fixed_grid and not decision.dimensions
    }


def reads_grids(module: torch.nn.Module) -> bool:
    """Return True if code of a module, or of a module inside it, computes with the grids of pictures."""
    return bool(_find_uses(module))


@contextmanager
def computed_grids(module: torch.nn.Module) -> Iterator[None]:
    """Replace computations on grids inside a module by tensor operators during the block.

    Args:
        module: A transformers model; without code that reads grids, nothing changes.
    """
    uses = _find_uses(module)
    if not uses:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    readers: list[Any] = [inner for inner in module.modules() if _is_reader(inner, uses)]
    configs = {id(inner.config): inner.config for inner in readers}
    implementations = {key: config._attn_implementation for key, config in configs.items()}
    with ExitStack() as stack:
        for namespace, name in uses:
            stack.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = _REPLACEMENTS[name]
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = _attention_in_images
        stack.callback(ALL_ATTENTION_FUNCTIONS.pop, _ATTENTION)
        for key, config in configs.items():
            stack.callback(setattr, config, "_attn_implementation", implementations[key])
            config._attn_implementation = _ATTENTION
        with _TensorRepeats():
            yield


def _find_uses(module: torch.nn.Module) -> list[tuple[dict[str, object], str]]:
    """Return the names in Python modules that refer to functions with a replacement."""
    library = sys.modules.get(_LIBRARY)
    names = {type(inner).__module__ for inner in module.modules()}
    namespaces = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
    return [
        (namespace, name)
        for namespace in namespaces
        for name in _REPLACEMENTS
        if library is not None and name in namespace and namespace[name] is getattr(library, name, None)
    ]


def _is_reader(module: torch.nn.Module, uses: list[tuple[dict[str, object], str]]) -> bool:
    """Return True if a config selects the attention of a module and the code of the module reads grids."""
    namespace = vars(sys.modules[type(module).__module__])
    is_of_readers = any(namespace is used for used, _ in uses)
    return is_of_readers and hasattr(getattr(module, "config", None), "_attn_implementation")


class UnsplitTensors(TorchFunctionMode):
    """Record split tensors and the pieces, during the block."""

    def __init__(self) -> None:
        """Start without records."""
        super().__init__()
        self._divided: list[tuple[tuple[torch.Tensor, ...], torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and record the tensor that it splits."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _SPLITS and len(args) == 2 and isinstance(args[1], (list, tuple)) and not kwargs.get("dim"):
            self._divided.append((tuple(output), args[0]))
        return output

    def is_divided(self, output: object) -> bool:
        """Return True if a list contains exactly the pieces of one tensor."""
        return self._find_whole(output) is not None

    def rejoin(self, output: Any) -> torch.Tensor:
        """Return the tensor that was split into the pieces in a list, or the output unchanged."""
        whole = self._find_whole(output)
        tensor: torch.Tensor = output if whole is None else whole
        return tensor

    def _find_whole(self, output: object) -> torch.Tensor | None:
        if not isinstance(output, (list, tuple)):
            return None
        ids = list(map(id, output))
        return next((whole for pieces, whole in self._divided if ids == list(map(id, pieces))), None)


_SPLITS = (torch.split, torch.Tensor.split)
_REPEATS = (torch.repeat_interleave, torch.Tensor.repeat_interleave)


class _UnreadCounts(list[int]):
    """Numbers without known values; a split by these numbers returns the tensor whole."""


class _TensorRepeats(TorchFunctionMode):
    """Replace ``repeat_interleave`` with a tensor of counts by operators of any exporter, without reading a value.

    A tensor that a method would split by numbers from a tensor stays one piece.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the repetition by counting the entries that end before each position."""
        kwargs = kwargs or {}
        # Both are of rank 1: torch flattens tensors of a higher rank before this call.
        are_rows = len(args) == 2 and all(isinstance(tensor, torch.Tensor) and tensor.dim() == 1 for tensor in args)
        if func in _REPEATS and not kwargs and are_rows:
            return args[0][_expand_counts(args[1])]
        if func is torch.Tensor.tolist and args[0].dim() == 1:
            return _UnreadCounts([0])
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], _UnreadCounts):
            return (args[0],)
        return func(*args, **kwargs)


def _expand_counts(counts: torch.Tensor) -> torch.Tensor:
    """Return the entry of each position, for entries that take the given counts of consecutive positions."""
    total: Any = counts.sum()  # a tensor, so that it stays dynamic in a trace
    positions = torch.arange(total, device=counts.device)
    entries: torch.Tensor = (positions[:, None] >= counts.cumsum(0)[None, :]).sum(1)
    return entries


class _PatchPositions:
    """Position of each patch: its frame, and row and column in blocks of patches that become one token."""

    def __init__(self, grid: torch.Tensor, merge: int | torch.Tensor) -> None:
        counts = grid[:, 1] * grid[:, 2]
        self.picture = _expand_counts(grid[:, 0] * counts)
        starts = ((grid[:, 0] * counts).cumsum(0) - grid[:, 0] * counts)[self.picture]
        local = torch.arange(self.picture.shape[0], device=grid.device) - starts
        self.merge = merge if isinstance(merge, int) else merge[self.picture]
        self.height, self.width = grid[:, 1][self.picture], grid[:, 2][self.picture]
        frame = _floor_div(local, self.height * self.width)
        within = local - frame * self.height * self.width
        self.frame = frame
        self.frame_start = starts + frame * self.height * self.width
        unit = self.merge * self.merge
        block = _floor_div(within, unit)
        inside = within - block * unit
        blocks = _floor_div(self.width, self.merge)
        row = _floor_div(block, blocks)
        column = block - row * blocks
        inside_row = _floor_div(inside, self.merge)
        self.row = row * self.merge + inside_row
        self.column = column * self.merge + inside - inside_row * self.merge


def _floor_div(number: torch.Tensor, divisor: Any) -> torch.Tensor:
    return torch.div(number, divisor, rounding_mode="floor")


def _compute_position_ids(
    grid_thw: torch.Tensor,
    spatial_merge_size: int | torch.Tensor,
    include_temporal: bool = False,
    kwargs: dict[str, object] | None = None,  # noqa: ARG001  # transformers' signature: precomputed values
) -> torch.Tensor:
    """Compute ``get_vision_position_ids``: row and column of each patch, preceded by its frame if requested."""
    positions = _PatchPositions(grid_thw, spatial_merge_size)
    frames = [positions.frame] if include_temporal else []
    return torch.stack([*frames, positions.row, positions.column], dim=-1)


def _compute_window_index(
    grid_thw: torch.Tensor,
    spatial_merge_size: int,
    window_size: int,
    patch_size: int,
    kwargs: dict[str, object] | None = None,  # noqa: ARG001  # transformers' signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``get_vision_window_index``: tokens in the order of their windows.

    Instead of the bounds of windows, returns the start of each patch's window: a larger number is another window.
    """
    edge = window_size // spatial_merge_size // patch_size
    # The grids count tokens from here on; each token stands for a block of patches.
    tokens = torch.stack([grid_thw[:, 0], *(_floor_div(grid_thw[:, axis], spatial_merge_size) for axis in (1, 2))], 1)
    positions = _PatchPositions(tokens, 1)
    rows, columns = _floor_div(positions.row, edge), _floor_div(positions.column, edge)
    row_length = _floor_div(positions.width + edge - 1, edge)
    window = rows * row_length + columns
    inside = (positions.row - rows * edge) * edge + positions.column - columns * edge
    span = (window.max() + 1) * edge * edge
    # Sort key: frame, window in the frame, position inside the window.
    window = positions.frame_start * span + window * edge * edge
    order = torch.argsort(window + inside)
    sorted_windows = window[order]
    starts = (sorted_windows[None, :] < sorted_windows[:, None]).sum(1) * spatial_merge_size**2
    return order, starts[:, None].expand(-1, spatial_merge_size**2).reshape(-1)


def _compute_attention_bounds(
    grid_thw: torch.Tensor,
    config: object,  # noqa: ARG001  # transformers' signature
    merge_temporal: bool = False,
    kwargs: dict[str, object] | None = None,
) -> tuple[torch.Tensor, int]:
    """Compute ``get_vision_attention_seqlens`` without the largest length, which only kernels read."""
    library = sys.modules[_LIBRARY]
    return library.get_vision_cu_seqlens(grid_thw, merge_temporal=merge_temporal, kwargs=kwargs), 1


_REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "get_vision_position_ids": _compute_position_ids,
    "get_vision_window_index": _compute_window_index,
    "get_vision_attention_seqlens": _compute_attention_bounds,
}


def _attention_in_images(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001  # transformers' signature
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention among the patches of each picture.

    Args:
        module: Module that calls its attention.
        query: Tensor of shape [1, heads, patches, width].
        key: Tensor of the same rank.
        value: Tensor of the same rank.
        attention_mask: `None`: the bounds define the mask.
        **keywords: ``cu_seq_lens_q``: starts of pictures, in rising order, numbers may repeat; ``scaling`` of scores.

    Returns:
        Attention output of shape [1, patches, heads, width], and `None` for the weights.
    """
    patches = torch.arange(query.shape[2], device=query.device)
    image = (patches[:, None] >= keywords["cu_seq_lens_q"][None, 1:]).sum(1)
    mask = (image[:, None] == image[None, :])[None, None]
    # The attribute of transformers, not a ratio of sizes: a trace would fix the sizes.
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scale = keywords.get("scaling")
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return output.transpose(1, 2).contiguous(), None
