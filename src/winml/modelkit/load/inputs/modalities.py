"""Which tensors carry an image or a recording into this model, and how many of its tokens hold a place for them?

Models agree on names, but not on how a picture is laid out: whole, in tiles, or as a row of patches with the size of
their grid beside it. Where the names leave several layouts open, the first one is taken that the model's own code runs
on (``shape_run.py``); that run tells the number of tokens, too. Goes by names of parameters and config attributes,
never by the name of a model. Which text goes with it is decided in ``inputs.py``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.inputs.options import INPUT_SPECS_OPTION
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSizes, KeyedSize, PatchGrid, SizeBounds

__all__ = ["AUDIO", "IMAGE", "MODALITIES", "SAMPLES", "Modality", "TakenMedium", "find_method", "take_medium"]

Draft = dict[str, Any]
"""What an :class:`InputTensorSpec` is made from; its sizes still know which keys they are."""

_MOST_TILES = 8
"""Chosen: more than the largest set of resolutions of a tiled model has for a square picture."""
_MOST_COUNTS = 4
"""Chosen: after the vectors of a medium only those of tokens and their positions are made."""
_ALL_VALID = (1, 1)
"""Values of a mask that hides nothing: what is hidden takes no tokens, and their number is fixed."""


@dataclass(frozen=True)
class Modality:
    """Names of one kind of medium."""

    carriers: tuple[str, ...]
    """Parameters that hold it; the first one a forward has is used."""
    companions: tuple[str, ...]
    """Parameters that describe it."""
    method: str
    """What a model calls its code that turns the medium into what stands in place of tokens."""
    tokens: tuple[str, ...]
    """Config attributes that name the token which holds a place."""
    part: str
    """Sub-config; a model whose sub-config is None lacks the modality."""
    words: str
    """For people."""
    varying: tuple[str, ...]
    """Keys of the sizes that the number of places follows from."""
    place_mask: str = ""
    """Parameter that says which tokens hold a place for it, where no token of its own does."""

    def is_absent(self, config: Any) -> bool:
        """Say whether a config switches the modality off."""
        return getattr(config, self.part, self) is None

    def token(self, config: Any) -> int | None:
        """Return the token that holds a place for it, if the config names one."""
        found = (getattr(config, name, None) for name in self.tokens)
        return next((token for token in found if isinstance(token, int) and token >= 0), None)


_GRIDS = ("image_grid_thw", "grid_thw")
_POSITIONS = ("image_position_ids", "pixel_position_ids")
_EDGES = ("spatial_shapes", "target_sizes")
"""Companions that say how a row of patches was a picture: frames, rows and columns of each, the
place of each patch, or rows and columns alone."""
_FEATURES_MASK = "input_features_mask"

IMAGE = Modality(
    carriers=("pixel_values", "hidden_states"),
    companions=(*_GRIDS, *_POSITIONS, *_EDGES, "pixel_attention_mask", "image_sizes"),
    method="get_image_features",
    tokens=("image_token_id", "image_token_index"),
    part="vision_config",
    words="an image",
    varying=("height", "width"),
    place_mask="image_embeds_position_mask",
)
AUDIO = Modality(
    carriers=("input_features", "audio_mel"),
    companions=(_FEATURES_MASK, "feature_attention_mask", "audio_mel_mask", "is_longer"),
    method="get_audio_features",
    tokens=("audio_token_id", "audio_token_index"),
    part="audio_config",
    words="a recording",
    varying=("num_frames", "audio_length"),
)
SAMPLES = Modality(
    carriers=("input_values",),
    companions=(),
    method="get_audio_features",
    tokens=AUDIO.tokens,
    part="audio_config",
    words="a recording",
    varying=("num_frames", "audio_length"),
)
MODALITIES = (IMAGE, AUDIO, SAMPLES)


@dataclass(frozen=True)
class TakenMedium:
    """One medium as the model takes it."""

    modality: Modality
    drafts: Mapping[str, Draft]
    """Parameter → what its specification is made from."""
    token: int | None = None
    """The token that holds a place for it; None where any does."""
    count: int = 0
    """How many of them each row of text has; 0 where the model needs none, or that is not known."""


def take_medium(
    modality: Modality,
    config: Any,
    sizes: InputSizes,
    names: Sequence[str],
    others: Callable[..., Mapping[str, Draft]],
    *,
    task: str | None,
    floats: str,
) -> TakenMedium:
    """Decide the tensors of one modality.

    Args:
        modality: Which one.
        config: The model's config.
        sizes: Sizes of its inputs.
        names: Its parameters that are given of this modality.
        others: Makes the drafts of its other inputs, for a forward that has to run as a whole, where it holds places
            for the media it is given.
        task: Canonical task.
        floats: Dtype of what is no index.

    Raises:
        UsageError: a size the model does not take.
    """
    token = modality.token(config) if sizes.has_text else None
    has_places = token is not None or sizes.takes(modality.place_mask)
    layouts = _layouts(names, sizes, has_places, task, floats)
    first = next(layouts)
    second = next(layouts, None)
    if second is None and not has_places:
        return TakenMedium(modality, first)
    method = find_method(sizes.structure(), modality.method) if sizes.has_text else None
    for drafts in itertools.chain([first], [second] if second else [], layouts):
        if method is not None:
            features = _run(method, drafts)
            count = None if features is None else _places(features, sizes, config) if has_places else 0
        else:
            medium = TakenMedium(modality, drafts, token)
            count = _count_places(medium, config, sizes, others, has_places=has_places)
        if count is not None:
            _fix_sizes(modality, sizes, drafts, count)
            return TakenMedium(modality, _over_features(drafts, method, count), token, count)
    if has_places:
        sizes.tell(
            f"{names[0]}: in which layout the model takes it, and how many tokens hold a place for it, is not known; "
            f"{INPUT_SPECS_OPTION} says it"
        )
    return TakenMedium(modality, first)


def find_method(model: torch.nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method of a model, else of the first part of it that has one; None where none has.

    One that passes on whatever it is given does not say what it takes; that of the part it passes it to does.
    """
    found = [getattr(module, name) for module in model.modules() if hasattr(module, name)]
    return next((method for method in found if not _takes_anything(method)), next(iter(found), None))


def _takes_anything(method: Callable[..., Any]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _over_features(drafts: Mapping[str, Draft], method: Callable[..., Any] | None, count: int) -> dict[str, Draft]:
    """Return the drafts with a mask over what is made of a recording, where the code that makes it takes no mask.

    The forward then chooses among the features by it.
    """
    mask = drafts.get(_FEATURES_MASK)
    if mask is None or method is None or not count or _FEATURES_MASK in _taken(method, drafts):
        return {**drafts}
    return {**drafts, _FEATURES_MASK: Draft(mask, shape=(mask["shape"][0], count), dtype="bool")}


def _run(method: Callable[..., Any], drafts: Mapping[str, Draft]) -> Any | None:
    """Return what a method makes of tensors laid out in this way, as shapes; None where it does not take them."""
    return run_on_shapes(method, _specs(_taken(method, drafts)))


def _taken(method: Callable[..., Any], drafts: Mapping[str, Draft]) -> dict[str, Draft]:
    known = drafts if _takes_anything(method) else inspect.signature(method).parameters
    return {name: draft for name, draft in drafts.items() if name in known}


def _count_places(
    medium: TakenMedium,
    config: Any,
    sizes: InputSizes,
    others: Callable[..., Mapping[str, Draft]],
    *,
    has_places: bool,
) -> int | None:
    """Return how many vectors a forward as a whole puts in place of tokens; None where it does not take the medium.

    One that misses places has made the vectors by then: they are what one of the last parts to run made, that with
    which it runs.
    """
    model, made = sizes.structure(), list[Any]()
    hooks = [part.register_forward_hook(lambda _, __, out: made.append(out)) for part in model.modules()]
    try:
        if run_on_shapes(model, _specs({**others(), **medium.drafts})) is not None:
            return 0
    finally:
        for hook in hooks:
            hook.remove()
    vectors = (out[0] if isinstance(out, tuple) and out else out for out in reversed(made if has_places else []))
    counts = dict.fromkeys(count for out in vectors if (count := _places(out, sizes, config)))
    for count in itertools.islice(counts, _MOST_COUNTS):
        with suppress(UsageError):  # more than a row takes
            inputs = _specs({**others(replace(medium, count=count)), **medium.drafts})
            if run_on_shapes(model, inputs) is not None:
                return count
    return None


def _fix_sizes(modality: Modality, sizes: InputSizes, drafts: Mapping[str, Draft], count: int) -> None:
    """Say which sizes cannot be left open."""
    if count:
        sizes.tell(f"input_ids: each row begins with {count} tokens that hold the place of {modality.words}")
        reason = f"each row of tokens holds {count} places for {modality.words} of one size"
        keys = {size.key for draft in drafts.values() for size in draft["shape"] if isinstance(size, KeyedSize)}
        sizes.bounds |= {key: SizeBounds(fixed=reason) for key in keys & {*modality.varying}}
    if set(drafts) & {*_GRIDS, "target_sizes"}:
        sizes.bounds["batch_size"] = SizeBounds(fixed="the patches of all images stand in one row")


def _specs(drafts: Mapping[str, Draft]) -> dict[str, InputTensorSpec]:
    return {name: InputTensorSpec(**draft) for name, draft in drafts.items()}


def _places(features: Any, sizes: InputSizes, config: Any) -> int:
    """Return how many vectors stand in place of tokens in each row.

    They are as wide as those of tokens; where the model makes others of the medium first, a config may name the number.
    """
    named = (getattr(features, name, None) for name in ("pooler_output", "last_hidden_state"))
    found = next((value for value in named if value is not None), features)
    parts = [
        part for part in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(part, torch.Tensor)
    ]
    if {part.shape[-1] for part in parts if part.dim()} <= {sizes.token_width()}:
        return sum(part.shape[:-1].numel() for part in parts) // sizes.size("batch_size", 1)
    return int(getattr(config, "num_query_tokens", None) or 0)


def _layouts(
    names: Sequence[str], sizes: InputSizes, has_token: bool, task: str | None, floats: str
) -> Iterator[dict[str, Draft]]:
    """Yield the ways in which the tensors may be laid out, the likeliest first."""
    rows = sizes.size("batch_size", 1)
    carrier = names[0]

    def layout(shape: Sequence[int], **companions: Draft) -> dict[str, Draft]:
        return {carrier: Draft(name=carrier, shape=tuple(shape), dtype=floats), **companions}

    if carrier in AUDIO.carriers:
        for shape in sizes.audio_feature_layouts():
            yield layout((rows, *shape), **_audio_companions(names, rows, shape))
    elif carrier in SAMPLES.carriers:
        for shape in sizes.audio_layouts():
            yield layout((rows, *shape))
    elif set(names) & {*_GRIDS, *_POSITIONS, *_EDGES}:
        grid = sizes.patch_grid()
        companions = _grid_companions(names, rows, grid)
        if set(names) & set(_GRIDS):
            yield layout((rows * grid.count, grid.values), **companions)
            yield layout((rows * grid.count, grid.channels, grid.patch, grid.patch), **companions)
        elif "target_sizes" in names:
            # Patches stand side by side, in one strip of an image.
            yield layout((1, grid.channels, grid.patch, grid.patch * grid.count * rows), **companions)
        else:
            yield layout((rows, grid.count, grid.values), **companions)
    else:
        plane = sizes.image(task)
        yield layout((rows, *plane))
        if "image_sizes" in names:
            edges = Draft(
                name="image_sizes", shape=(rows, 2), dtype="int64", value_range=(1, max(plane[-2:])),
                first_values=_runs(plane[-2:]),
            )  # fmt: skip
            yield layout((rows, *plane), image_sizes=edges)
            for tiles in range(2, _MOST_TILES + 1):
                yield layout((rows, tiles, *plane), image_sizes=edges)
        if has_token:
            # Some take several pictures per row, and some a row of patches.
            grid = sizes.patch_grid()
            yield layout((rows, 1, *plane))
            yield layout((rows, grid.count, grid.values))


def _grid_companions(names: Sequence[str], rows: int, grid: PatchGrid) -> dict[str, Draft]:
    """Return what says how a row of patches was a picture."""
    columns, lines = grid.columns, grid.rows
    places = [place for line in range(lines) for column in range(columns) for place in (column, line)]
    table = {
        **{name: Draft(shape=(rows, 3), first_values=_runs((1, lines, columns))) for name in _GRIDS},
        **{name: Draft(shape=(rows, grid.count, 2), first_values=_runs(places)) for name in _POSITIONS},
        **{name: Draft(shape=(rows, 2), first_values=_runs((lines, columns))) for name in _EDGES},
        "pixel_attention_mask": Draft(shape=(rows, grid.count), value_range=_ALL_VALID),
    }
    plain = Draft(dtype="int64", value_range=(0, max(columns, lines)))
    return {name: Draft(name=name, **{**plain, **table[name]}) for name in names if name in table}


def _audio_companions(names: Sequence[str], rows: int, shape: Sequence[int]) -> dict[str, Draft]:
    """Return what says how long the recording in the features is."""
    frames = next((size for size in shape if getattr(size, "key", "") == "num_frames"), shape[0])
    table = {
        _FEATURES_MASK: Draft(shape=(rows, frames), dtype="int64"),
        "feature_attention_mask": Draft(shape=(rows, frames), dtype="int64"),
        # The other way around: true is what is hidden.
        "audio_mel_mask": Draft(shape=(rows, frames), dtype="bool", value_range=(0, 0)),
        "is_longer": Draft(shape=(rows, 1), dtype="bool"),
    }
    return {name: Draft(**{"name": name, "value_range": _ALL_VALID, **table[name]}) for name in names if name in table}


def _runs(values: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return values as runs of a value and how often it comes."""
    return tuple((int(value), len(list(group))) for value, group in itertools.groupby(values))
