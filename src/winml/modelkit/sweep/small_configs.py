"""How does the default config of any model type become a small one that still makes sense?

Goes by the names of the values and by how they depend on each other, never by the name of a model. Widths are divided
by one factor everywhere, so that what had to be equal stays equal; of a stack of layers one of each kind stays. Not
every class can be cut in every way: :data:`WAYS` lists what to try, the smallest first. Builds nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["WAYS", "Aspect", "default_content", "shrink"]

Aspect = Literal["width", "heads", "head size", "depth", "image", "tokens", "gaps"]

WAYS: tuple[tuple[Aspect, ...], ...] = (
    ("width", "heads", "head size", "depth", "image", "tokens", "gaps"),
    # Positions of image patches are sometimes written down a second time, under a name of their own.
    ("width", "heads", "head size", "depth", "tokens", "gaps"),
    # The number of heads may be fixed by the code; then each gets narrower.
    ("width", "head size", "depth", "tokens", "gaps"),
    ("width", "heads", "head size", "image", "tokens", "gaps"),
    # What is said of single dimensions of a head may stand in the code; then there are fewer of the same size.
    ("width", "heads", "depth", "image", "tokens", "gaps"),
    ("depth", "image", "tokens", "gaps"),
    # Some defaults leave out what every checkpoint has, and make no model as they are.
    ("width", "heads", "head size", "depth", "image", "tokens"),
    ("width", "heads", "head size", "tokens", "gaps"),
    ("depth", "tokens", "gaps"),
    ("tokens", "gaps"),
    ("gaps",),
)
"""What is made small, or left open, in each try, the smallest model first. The last is the default config itself."""

WIDTH_DIVISOR = 8
"""Chosen: of 768 units in 12 heads it leaves 96 in 3, of 4096 in 32 heads 512 in 4."""
SMALLEST_WIDTH = 16
"""Chosen: smaller numbers are counts of something else, such as image channels or states."""
MOST_LAYERS = 4
MOST_VOCABULARY = 512
MOST_POSITIONS = 64
MOST_POSITIONS_OF_PARTS = 4096
"""Chosen: an image or a recording takes places, a thousand in some, alone or in front of the text."""
MOST_QUERIES = 16
"""Chosen: as many things are looked for in an image, and a small one has few places for them."""
MOST_EXPERTS = 8
"""Chosen: some are not chosen by the traced inputs, so that a loop over those that were shows."""
MOST_WINDOW = 16
"""Chosen: shorter than the sequence, so that a window that is forgotten shows."""
IMAGE_PATCHES = 4
"""Chosen: patches per edge of a small image."""
SMALL_IMAGE = 64
"""Chosen: pixels per edge where patches are small or none: five halvings leave two."""
COARSE_PATCH = 8

_LAYER_COUNT = re.compile(r"^(n_?layers?|depth|layers|(\w+_)?num_(\w+_)?layers|(en|de)coder_layers|\w+_layers)$")
_NO_LAYER_COUNT = re.compile(r"feat_extract|kv_shared|_lstm_|nextn|mtp|hash|dense_layers|window_layers|_levels")
_FIRST_LAYERS = re.compile(r"^(first_\w+|max_window_layers|\w*num_dense_layers|insert_layer_id)$")
_LAST_LAYERS = re.compile(r"^num_kv_shared_layers$")
_LAYER_INDICES = re.compile(r"(index|indexes|indices|idx|idxs|_layers|layer_ids?)$")
_BLOCKS_PER_STAGE = re.compile(
    r"^(depths|num_blocks|blocks_per_stage|stage_num\w*|\w*block_repeats|layers|num_layers)$"
)
_STAGES = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Names that follow from the number of layers, where each layer counts as a stage."""

_HEADS = re.compile(r"(^|_)(heads(_per_\w+)?|n_head)$")
_PER_HEAD = re.compile(
    r"head_?dims?$|head_size$|^d_(kv|head)$|dim_head$|^rotary_dim$|mrope_section$|kv_channels$|d_head$"
)
_SURE_WIDTH = re.compile(
    r"hidden_(size|dim)|embed_dim|embedding_dim|intermediate_(size|dim)|projection_(size|dim)|ffn|feedforward"
    r"|num_filters|num_pos_feats|upsample_groups|d_ssm|channels_list|channel_list|embed_proj_dim|hidden_channels"
)
_NO_WIDTH = re.compile(
    r"vocab|image|img|patch|kernel|window|chunk|crop|codebook_size|spec_size|merge|grid|mask_size|batch|cache|block"
    r"|frame|^max_|^min_|state|^num_|frequency|mel|feat_size|input_feat|feature_size|quantile|multiplier|hop|sampl|shape"
    r"|in_chans|spectrogram|cluster|flow_size|base_channels|pos_emb_"
)
_MEL_WIDTH = re.compile(r"in_dim$|in_channels$")
"""Widths of what a spectrogram goes into."""
_WIDTH = re.compile(
    r"(_sizes?|_dims?|_channels?|_rank|_width|_units|_features)$|^(dim|dims|d_model|d_ff|dff|d_inner|dim_ff|n_embd"
    r"|n_inner|units|width|emb_dim|channels)$"
)
_EXPERTS = re.compile(
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|zero_expert_num)$"
)
_EXPERTS_CHOSEN = re.compile(r"(experts?_per_tok(en)?|moe_top_?k|^top_k_experts|^num_selected_experts|moe_k)$")
_EXPERT_GROUPS = {"n_group": 2, "num_expert_group": 2, "topk_group": 1}
_VOCABULARY = re.compile(r"vocab(ulary)?_size|_vocab$")
_TOKEN = re.compile(r"(token|_bos|_eos|_pad|boi|eoi)\w*_(ids?|index)$|^(im|image|video|audio)_\w+_id$")
_POSITIONS = re.compile(r"position_embeddings$|^n_(positions|ctx)$|^max_(source|target|text|speech)_positions$")
_QUERIES = re.compile(r"^num_queries$")
_WINDOWS = re.compile(r"^(sliding_window(_size)?|attention_window(_size)?|local_attention)$")
_IMAGE_TOKENS = re.compile(r"^(mm_tokens_per_image|num_image_tokens|image_seq_len(gth)?|num_vision_tokens)$")
_IMAGE_SIZES = re.compile(r"^(image_size|img_size|input_size|pretrain_image_size)$")


_LEFT_OUT: dict[str, int] = {
    "vocab_size": MOST_VOCABULARY,
    "n_routed_experts": MOST_EXPERTS,
    "n_shared_experts": 1,
    "num_experts": MOST_EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "pad_token_id": 0,
    "image_token_id": 5,
    "image_token_index": 5,
    "sliding_window": MOST_WINDOW,
}
_LAYER_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


def default_content(model_type: str) -> dict[str, Any]:
    """Return what ``config.json`` of a model type holds where nothing is set.

    Raises:
        Exception: whatever the config class raises when it is made without arguments.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return {**content, "model_type": model_type}


def shrink(content: Mapping[str, Any], aspects: Sequence[Aspect]) -> dict[str, Any]:
    """Return a smaller config; ``content`` is left as it is.

    Args:
        content: A config as JSON, sub-configs within it.
        aspects: What to make small.
    """
    complete = content if "gaps" in aspects else _filled(content)
    return _shrink(complete, aspects, _Whole.of(complete))


@dataclass(frozen=True)
class _Whole:
    """What has to be known of all parts to cut one of them."""

    places: Mapping[int, int]
    """Token beyond the small vocabularies → where it goes; the same in every part."""
    has_parts: bool
    """Whether there are sub-configs: something else then takes a place among the tokens."""
    mel_bins: frozenset[int]
    """Numbers of audio features per frame."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> _Whole:
        """Look through a config and those within it."""
        parts = list(_parts(content))
        tokens = {
            number for part in parts for key, value in part.items() if _TOKEN.search(key) for number in _numbers(value)
        }
        beyond = sorted(token for token in tokens if token >= MOST_VOCABULARY)
        places = {token: MOST_VOCABULARY - 1 - position for position, token in enumerate(beyond)}
        bins = (number for part in parts for number in _numbers(part.get("num_mel_bins")))
        return cls(places, len(parts) > 1, frozenset(bins))


def _parts(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and all configs within it."""
    yield content
    for value in content.values():
        if _is_config(value):
            yield from _parts(value)


def _shrink(content: Mapping[str, Any], aspects: Sequence[Aspect], whole: _Whole) -> dict[str, Any]:
    smaller = {key: _shrink(value, aspects, whole) if _is_config(value) else value for key, value in content.items()}
    if "depth" in aspects:
        smaller = _cut_depth(smaller)
    if "width" in aspects:
        smaller = _cut_width(smaller, aspects, whole)
    if "image" in aspects:
        smaller = _cut_image(smaller)
    if "tokens" in aspects:
        smaller = _cut_tokens(smaller, whole)
    return smaller


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the numbers that some defaults leave to the checkpoint, which always has them."""
    whole = {key: _filled(value) if _is_config(value) else value for key, value in content.items()}
    heads, width = content.get("num_attention_heads"), content.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        if width % heads:
            heads = max(count for count in range(1, heads) if width % count == 0)
            whole["num_attention_heads"] = heads
        _fill(whole, "head_dim", width // heads)
        _fill(whole, "moe_intermediate_size", content.get("intermediate_size"))
        whole.setdefault("num_key_value_heads", heads)
    depth = content.get("num_hidden_layers")
    if isinstance(depth, int):
        for key, kind in _LAYER_KINDS.items():
            _fill(whole, key, [kind] * depth)
    text = content.get("text_config")
    if isinstance(text, dict) and "hidden_size" in text:
        # What takes a place among the tokens is as wide as they are.
        for part in (whole, whole.get("vision_config") or {}):
            for key in ("out_hidden_size", "hidden_size"):
                if key in part and (key == "out_hidden_size" or part is whole or "embed_dim" in part):
                    part[key] = text["hidden_size"]
    rotary = content.get("rope_parameters")
    if isinstance(rotary, dict) and "rope_theta" in rotary and isinstance(heads, int) and isinstance(width, int):
        size = whole.get("head_dim") or width // heads
        quarter = int(size * rotary.get("partial_rotary_factor", 1.0)) // 8
        # Time, height and width, as the checkpoints divide a head among them.
        whole["rope_parameters"] = {"mrope_section": [quarter, 3 * quarter // 2, 3 * quarter // 2], **rotary}
    for key, value in _LEFT_OUT.items():
        _fill(whole, key, value)
    return whole


def _fill(content: dict[str, Any], key: str, value: Any) -> None:
    if key in content and content[key] is None:
        content[key] = value


def _cut_depth(content: dict[str, Any]) -> dict[str, Any]:
    """Keep one layer of each kind, at least two, and the first blocks of each stage."""
    stages = {len(value) for key, value in content.items() if _BLOCKS_PER_STAGE.search(key) and _is_counts(value)}
    counts = {
        key: value
        for key, value in content.items()
        if _LAYER_COUNT.search(key)
        and not _NO_LAYER_COUNT.search(key)
        and _is_count(value)
        and value > 2
        and value not in stages
    }
    smaller = dict(content)
    for depth in sorted(set(counts.values())):
        kept = _layers_to_keep(content, depth)
        smaller |= {key: len(kept) for key, value in counts.items() if value == depth}
        smaller |= {key: _of_layers(key, value, depth, kept) for key, value in content.items() if key not in counts}
    if counts:
        smaller = {key: value for key, value in smaller.items() if key not in _STAGES}
    for key, value in content.items():
        if _BLOCKS_PER_STAGE.search(key) and _is_counts(value):
            smaller[key] = [min(count, 2) for count in value]
    return smaller


def _layers_to_keep(content: Mapping[str, Any], depth: int) -> list[int]:
    """Return the first layer of each kind; a kind is what everything said per layer says of it."""
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kinds.setdefault(tuple(_said_of_layer(content, depth, layer)), layer)
    kept = set(list(kinds.values())[:MOST_LAYERS])
    return sorted(kept | set(range(depth)[:2])) if len(kept) < 2 else sorted(kept)


def _said_of_layer(content: Mapping[str, Any], depth: int, layer: int) -> Iterator[str]:
    for key, value in content.items():
        if _is_per_layer(value, depth):
            yield repr(value[layer])
        elif _is_by_layer(value, depth):
            yield repr({int(key): item for key, item in value.items()}.get(layer))
        elif _is_indices(key, value, depth):
            yield repr(layer in value)
        elif _FIRST_LAYERS.search(key) and _is_count(value):
            yield repr(layer < value)
        elif _LAST_LAYERS.search(key) and _is_count(value):
            yield repr(layer >= depth - value)


def _of_layers(key: str, value: Any, depth: int, kept: Sequence[int]) -> Any:
    """Return a value that speaks of ``depth`` layers as it speaks of those that are kept."""
    if _is_per_layer(value, depth):
        return [value[layer] for layer in kept]
    if _is_by_layer(value, depth):
        return {str(kept.index(int(key))): item for key, item in value.items() if int(key) in kept}
    if _is_indices(key, value, depth):
        return [kept.index(layer) for layer in value if layer in kept]
    if _FIRST_LAYERS.search(key) and _is_count(value) and value <= depth:
        return sum(layer < value for layer in kept)
    if _LAST_LAYERS.search(key) and _is_count(value):
        return sum(layer >= depth - value for layer in kept)
    return value


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth and not any(isinstance(item, dict) for item in value)


def _is_by_layer(value: Any, depth: int) -> bool:
    """Say whether a value is an object of settings for some layers, with their numbers (``05``, too) as keys."""
    if not isinstance(value, dict) or not value:
        return False
    return all(key.isdecimal() and int(key) < depth and isinstance(item, dict) for key, item in value.items())


def _is_indices(key: str, value: Any, depth: int) -> bool:
    return bool(_LAYER_INDICES.search(key)) and _is_counts(value) and value == sorted(set(value)) and value[-1] < depth


def _cut_width(content: dict[str, Any], aspects: Sequence[Aspect], whole: _Whole) -> dict[str, Any]:
    """Divide widths by :data:`WIDTH_DIVISOR`: in part by fewer heads, in part by narrower ones."""
    heads = [number for key, value in _named_values(content) if _is_heads(key) for number in _numbers(value)]
    if "head size" not in aspects:
        heads = [number for number in heads if number >= WIDTH_DIVISOR]
    fewer = math.gcd(WIDTH_DIVISOR, *heads) if heads and "heads" in aspects else 1
    divisor = WIDTH_DIVISOR if "head size" in aspects or not heads else fewer
    narrower = divisor // fewer

    def cut(key: str, value: Any) -> Any:
        if _PER_HEAD.search(key):
            return _each(value, lambda width: max(width // narrower, min(width, 1)))
        if _is_heads(key):
            return _each(value, lambda count: max(count // fewer, 1))
        if _EXPERTS.search(key):
            return _each(value, lambda count: min(count, MOST_EXPERTS))
        if _EXPERTS_CHOSEN.search(key):
            return _each(value, lambda count: min(count, 2))
        if key in _EXPERT_GROUPS:
            return _each(value, lambda count: min(count, _EXPERT_GROUPS[key]))
        if _MEL_WIDTH.search(key) and _is_count(value) and value in whole.mel_bins:
            return value
        if _is_width(key):
            return _each(value, lambda width: width if width < SMALLEST_WIDTH else -(-width // divisor))
        if isinstance(value, dict) and not _is_config(value):
            return {name: cut(name, inner) for name, inner in value.items()}
        return value

    return {key: cut(key, value) for key, value in content.items()}


def _named_values(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config with their keys, those in plain objects included, those of sub-configs not."""
    for key, value in content.items():
        if isinstance(value, dict) and not _is_config(value):
            yield from _named_values(value)
        else:
            yield key, value


def _is_heads(key: str) -> bool:
    return bool(_HEADS.search(key)) and not _PER_HEAD.search(key)


def _is_width(key: str) -> bool:
    if _SURE_WIDTH.search(key):
        return True
    return bool(_WIDTH.search(key)) and not _NO_WIDTH.search(key)


def _cut_image(content: dict[str, Any]) -> dict[str, Any]:
    patch = max(_numbers(content.get("patch_size")), default=0)
    edge = IMAGE_PATCHES * patch if patch >= COARSE_PATCH else SMALL_IMAGE

    def cut(key: str, value: Any) -> Any:
        if _IMAGE_SIZES.search(key):
            return _each(value, lambda size: min(size, edge))
        if _IMAGE_TOKENS.search(key):
            return _each(value, lambda count: min(count, IMAGE_PATCHES**2))
        return value

    return {key: cut(key, value) for key, value in content.items()}


def _cut_tokens(content: dict[str, Any], whole: _Whole) -> dict[str, Any]:
    """Shorten vocabularies and sequences; a token beyond a vocabulary becomes another one within it."""
    has_vocabulary = any(_VOCABULARY.search(key) for key in content)
    positions = MOST_POSITIONS if has_vocabulary and not whole.has_parts else MOST_POSITIONS_OF_PARTS

    def cut(key: str, value: Any) -> Any:
        if _TOKEN.search(key):
            return _each(value, lambda token: whole.places.get(token, token))
        if _VOCABULARY.search(key):
            return _each(value, lambda size: min(size, MOST_VOCABULARY))
        if _POSITIONS.search(key):
            return _each(value, lambda count: min(count, positions))
        if _QUERIES.search(key):
            return _each(value, lambda count: min(count, MOST_QUERIES))
        if _WINDOWS.search(key):
            return _each(value, lambda size: min(size, MOST_WINDOW))
        return value

    return {key: cut(key, value) for key, value in content.items()}


def _each(value: Any, change: Any) -> Any:
    """Apply ``change`` to a number, or to every number in a list of lists; anything else stays."""
    if _is_count(value):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_each(item, change) for item in value]
    return value


def _numbers(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    return [value] if _is_count(value) else []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))
