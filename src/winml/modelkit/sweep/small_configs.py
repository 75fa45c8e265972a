"""Makes the default config of a model type small: fewer and narrower layers, smaller images and vocabularies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Aspect = Literal["width", "heads", "head size", "depth", "kinds", "image", "tokens", "gaps"]

WAYS: tuple[tuple[Aspect, ...], ...] = (
    ("width", "heads", "head size", "depth", "kinds", "image", "tokens", "gaps"),
    # Some configs repeat the positions of image patches under another name, so the image stays large.
    ("width", "heads", "head size", "depth", "kinds", "tokens", "gaps"),
    # Layers may share weights with others of their kind.
    ("width", "heads", "head size", "depth", "image", "tokens", "gaps"),
    # The code may fix the number of heads; then each head gets narrower.
    ("width", "head size", "depth", "kinds", "tokens", "gaps"),
    ("width", "heads", "head size", "image", "tokens", "gaps"),
    # The code may fix the dimensions of a head; then there are fewer heads of the same size.
    ("width", "heads", "depth", "kinds", "image", "tokens", "gaps"),
    ("depth", "kinds", "image", "tokens", "gaps"),
    # Some default configs build no model, because they leave out values that every checkpoint has ("gaps").
    ("width", "heads", "head size", "depth", "kinds", "image", "tokens"),
    ("width", "heads", "head size", "tokens", "gaps"),
    ("depth", "kinds", "tokens", "gaps"),
    ("tokens", "gaps"),
    ("gaps",),
)
"""Aspects that are made small in each try, the smallest model first; with ``gaps``, missing values stay missing. The
last entry is the default config itself."""

_WIDTH_DIVISOR = 8
"""Chosen: 768 units in 12 heads become 96 in 3, 4096 in 32 heads become 512 in 4."""
_SMALLEST_WIDTH = 16
"""Chosen: smaller numbers are other counts, such as image channels or states."""
_MOST_KINDS = 4
_MOST_VOCABULARY = 512
_MOST_POSITIONS = 64
_MOST_POSITIONS_OF_PARTS = 4096
"""Chosen: images or audio use up to a thousand positions, alone or before the text."""
_MOST_QUERIES = 16
"""Chosen: object queries of a detector; a small image has few positions for them."""
_MOST_EXPERTS = 8
"""Chosen: the traced inputs leave some experts unused, which reveals a graph that has only the used ones."""
_EXPERT_STEP = 4
"""Specified by torch: rows of expert weights start at multiples of 16 bytes."""
_MOST_WINDOW = 16
"""Chosen: shorter than the sequence, which reveals a graph without the window."""
_IMAGE_PATCHES = 4
"""Chosen: patches per edge of a small image."""
_SMALL_IMAGE = 64
"""Chosen: pixels per edge if patches are small or absent; two pixels remain after five halvings."""
_COARSE_PATCH = 8

_LAYER_COUNT = re.compile(r"^(n_?layers?|depth|layers|(\w+_)?num_(\w+_)?layers|(en|de)coder_layers|\w+_layers)$")
_NO_LAYER_COUNT = re.compile(r"feat_extract|kv_shared|_lstm_|nextn|mtp|hash|dense_layers|window_layers|_levels")
_FIRST_LAYERS = re.compile(r"^(first_\w+|max_window_layers|\w*num_dense_layers|insert_layer_id)$")
_LAST_LAYERS = re.compile(r"^num_kv_shared_layers$")
_LAYER_INDICES = re.compile(r"(index|indexes|indices|idx|idxs|_layers|layer_ids?)$")
_LAYER_PERIOD = re.compile(r"_layer_period$")
_LAYER_OFFSET = re.compile(r"_layer_offset$")
_LAYERS_PER_STACK = re.compile(r"^num_layers_per_\w+$")
_BLOCKS_PER_STAGE = re.compile(
    r"^(depths|num_blocks|blocks_per_stage|stage_num\w*|\w*block_repeats|layers|num_layers)$"
)
_STAGES = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Names derived from the number of layers, where each layer counts as a stage."""

_HEADS = re.compile(r"(^|_)(heads(_per_\w+)?|n_head)$")
_PER_HEAD = re.compile(
    r"head_?dims?$|head_size$|^d_(kv|head)$|dim_head$|^rotary_dim$|mrope_section$|kv_channels$|d_head$"
)
_SURE_WIDTH = re.compile(
    r"hidden_(size|dim)|embed_dim|embedding_dim|intermediate_(size|dim)|projection_(size|dim)|ffn|feedforward"
    r"|num_filters|num_pos_feats|upsample_groups|d_ssm|channels_list|channel_list|embed_proj_dim|hidden_channels"
)
_INNER_WIDTH = re.compile(r"intermediate_size$")
_NO_WIDTH = re.compile(
    r"vocab|image|img|patch|kernel|window|chunk|crop|codebook_size|spec_size|merge|grid|mask_size|batch|cache|block"
    r"|frame|^max_|^min_|state|^num_|frequency|mel|feat_size|input_feat|feature_size|quantile|multiplier|hop|sampl|shape"
    r"|in_chans|spectrogram|cluster|flow_size|base_channels|pos_emb_"
)
_MEL_WIDTH = re.compile(r"in_dim$|in_channels$")
"""Widths of layers that read a spectrogram."""
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


_CHECKPOINT_VALUES: dict[str, int] = {
    "vocab_size": _MOST_VOCABULARY,
    "n_routed_experts": _MOST_EXPERTS,
    "n_shared_experts": 1,
    "num_experts": _MOST_EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "pad_token_id": 0,
    "image_token_id": 5,
    "image_token_index": 5,
    "sliding_window": _MOST_WINDOW,
}
_USUAL_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_USUAL_CLIP = 8
_LAYER_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


def default_content(model_type: str) -> dict[str, object]:
    """Return the content of ``config.json`` of a model type with default values.

    Raises:
        Exception: any error of the config class without arguments.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content: dict[str, object] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return {**content, "model_type": model_type}


def shrink(content: Mapping[str, object], aspects: Sequence[Aspect]) -> dict[str, object]:
    """Return a smaller copy of a config.

    Args:
        content: A config as JSON, with its sub-configs.
        aspects: The aspects to make small.
    """
    config = content if "gaps" in aspects else _fill_gaps(content)
    return _shrink_config(config, aspects, _ConfigFacts.read_from(config))


@dataclass(frozen=True)
class _ConfigFacts:
    """Facts of a whole config, used to cut its sub-configs."""

    replaced_tokens: Mapping[int, int]
    """Token beyond the small vocabularies → token within them; the same in every sub-config."""
    has_sub_configs: bool
    """True if there are sub-configs: images or audio then use positions among the tokens."""
    mel_bins: frozenset[int]
    """Numbers of audio features per frame."""

    @classmethod
    def read_from(cls, content: Mapping[str, object]) -> _ConfigFacts:
        """Read a config and its sub-configs."""
        configs = list(_nested_configs(content))
        tokens = {
            token
            for config in configs
            for key, value in config.items()
            if _TOKEN.search(key)
            for token in _list_counts(value)
        }
        large_tokens = sorted(token for token in tokens if token >= _MOST_VOCABULARY)
        replaced_tokens = {token: _MOST_VOCABULARY - 1 - position for position, token in enumerate(large_tokens)}
        mel_bins = (number for config in configs for number in _list_counts(config.get("num_mel_bins")))
        return cls(replaced_tokens, len(configs) > 1, frozenset(mel_bins))


def _nested_configs(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and all its sub-configs."""
    yield content
    for value in content.values():
        if _is_config(value):
            yield from _nested_configs(value)


def _shrink_config(content: Mapping[str, Any], aspects: Sequence[Aspect], facts: _ConfigFacts) -> dict[str, object]:
    """Return a smaller copy of a config, sub-configs included; ``facts`` are those of the whole config."""
    smaller = {
        key: _shrink_config(value, aspects, facts) if _is_config(value) else value for key, value in content.items()
    }
    if "depth" in aspects:
        smaller = _cut_depth(smaller, alike=1 if "kinds" in aspects else 2)
    if "width" in aspects:
        smaller = _cut_width(smaller, aspects, facts)
    if "image" in aspects:
        smaller = _cut_image(smaller)
    if "tokens" in aspects:
        smaller = _cut_tokens(smaller, facts)
    return smaller


def _is_config(value: object) -> bool:
    """Return True for a sub-config, which states a model type."""
    return isinstance(value, dict) and "model_type" in value


def _fill_gaps(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with values that some default configs omit and every checkpoint has."""
    config: dict[str, Any] = {key: _fill_gaps(value) if _is_config(value) else value for key, value in content.items()}
    heads, width = content.get("num_attention_heads"), content.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        if width % heads:
            heads = max(count for count in range(1, heads) if width % count == 0)
            config["num_attention_heads"] = heads
        _set_if_none(config, "head_dim", width // heads)
        _set_if_none(config, "moe_intermediate_size", content.get("intermediate_size"))
        config.setdefault("num_key_value_heads", heads)
        _set_if_none(config, "num_key_value_heads", heads)
        head_size: int = config.get("head_dim") or width // heads
        _fill_rotary_sections(config, content.get("rope_parameters"), head_size)
    depth = content.get("num_hidden_layers")
    if isinstance(depth, int):
        _set_if_none(config, "attn_layer_indices", [depth // 2])
        if content.get("rope_parameters") == {} and content.get("layer_types"):
            config["rope_parameters"] = {kind: dict(_USUAL_ROTATION) for kind in content["layer_types"]}
        for key, kind in _LAYER_KINDS.items():
            _set_if_none(config, key, [kind] * depth)
    attention = content.get("attn_config")
    if isinstance(attention, dict) and "kv_n_heads" in attention:
        config["attn_config"] = {"rope_theta": _USUAL_ROTATION["rope_theta"], **attention}
        _set_if_none(config["attn_config"], "clip_qkv", _USUAL_CLIP)
    kinds = content.get("layer_types")
    if isinstance(kinds, list) and {*kinds} == {"linear_attention"}:
        # Every checkpoint has at least one attention layer.
        config["layer_types"] = [*kinds[:-1], "full_attention"]
    languages = content.get("languages")
    if isinstance(languages, list) and languages:
        _set_if_none(config, "default_language", languages[0])
    text = content.get("text_config")
    if isinstance(text, dict) and "hidden_size" in text:
        _fill_text_width(config, text["hidden_size"])
    for key, value in _CHECKPOINT_VALUES.items():
        _set_if_none(config, key, value)
    return config


def _fill_text_width(config: dict[str, Any], text_width: object) -> None:
    """Set the width of embeddings inserted among the text tokens to the width of the text, in place."""
    for part in (config, config.get("vision_config") or {}):
        for key in ("out_hidden_size", "hidden_size"):
            if key in part and (key == "out_hidden_size" or part is config or "embed_dim" in part):
                part[key] = text_width


def _fill_rotary_sections(config: dict[str, object], rotary: object, head_size: int) -> None:
    """Divide the rotary dimensions of a head among time, height and width as the checkpoints do, in place."""
    if isinstance(rotary, dict) and "rope_theta" in rotary:
        quarter = int(head_size * rotary.get("partial_rotary_factor", 1.0)) // 8
        config["rope_parameters"] = {"mrope_section": [quarter, 3 * quarter // 2, 3 * quarter // 2], **rotary}


def _set_if_none(content: dict[str, object], key: str, value: object) -> None:
    """Replace a null value in place; a missing key stays missing."""
    if key in content and content[key] is None:
        content[key] = value


def _cut_depth(content: Mapping[str, Any], alike: int) -> dict[str, object]:
    """Keep ``alike`` layers of each kind, at least two, and the first blocks of each stage."""
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
        remaining_layers = _layers_to_keep(content, depth, alike)
        smaller |= {key: len(remaining_layers) for key, value in counts.items() if value == depth}
        smaller |= {
            key: _cut_layer_setting(key, value, depth, remaining_layers)
            for key, value in content.items()
            if key not in counts
        }
    if counts:
        smaller = {key: value for key, value in smaller.items() if key not in _STAGES}
        smaller |= _cut_repetitions(content, counts)
    for key, value in content.items():
        if _BLOCKS_PER_STAGE.search(key) and _is_counts(value):
            smaller[key] = [min(count, 2) for count in value]
    return smaller


def _cut_repetitions(content: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, object]:
    """Return the settings of repeated layers: layers with a period, or stacks that run several times."""
    smaller: dict[str, object] = {}
    smaller |= {key: min(value, 2) for key, value in content.items() if _LAYER_PERIOD.search(key) and _is_count(value)}
    smaller |= {key: min(value, 1) for key, value in content.items() if _LAYER_OFFSET.search(key) and _is_count(value)}
    pattern = content.get("block_types")
    if isinstance(pattern, list) and all(isinstance(kind, str) for kind in pattern):
        smaller["block_types"] = sorted({*pattern}, key=pattern.index)
    for key, layers in content.items():
        if _LAYERS_PER_STACK.search(key) and _is_count(layers) and layers > 2:
            smaller |= {key: 2, **{name: 2 * (all_ // layers) for name, all_ in counts.items() if all_ % layers == 0}}
    return smaller


def _layers_to_keep(content: Mapping[str, Any], depth: int, alike: int) -> list[int]:
    """Return the first layers of each kind, at least two layers; layers of one kind have equal settings."""
    layers_of_kind: dict[tuple[str, ...], list[int]] = {}
    for layer in range(depth):
        layers_of_kind.setdefault(tuple(_layer_settings(content, depth, layer)), []).append(layer)
    remaining_layers = {layer for layers in list(layers_of_kind.values())[:_MOST_KINDS] for layer in layers[:alike]}
    return sorted(remaining_layers | set(range(depth)[:2])) if len(remaining_layers) < 2 else sorted(remaining_layers)


def _layer_settings(content: Mapping[str, Any], depth: int, layer: int) -> Iterator[str]:
    """Yield the settings of a layer, from all values that differ between layers."""
    for key, value in content.items():
        if _is_list_per_layer(value, depth):
            yield repr(value[layer])
        elif _is_object_by_layer(value, depth):
            yield repr({int(key): setting for key, setting in value.items()}.get(layer))
        elif _is_indices(key, value, depth):
            yield repr(layer in value)
        elif _FIRST_LAYERS.search(key) and _is_count(value):
            yield repr(layer < value)
        elif _LAST_LAYERS.search(key) and _is_count(value):
            yield repr(layer >= depth - value)


def _cut_layer_setting(key: str, value: Any, depth: int, remaining_layers: Sequence[int]) -> Any:
    """Return the setting of ``depth`` layers, reduced to the kept layers; other values are returned unchanged.

    Args:
        key: Key of the setting.
        value: Its value.
        depth: Number of all layers.
        remaining_layers: Numbers of the kept layers, in order.
    """
    if _is_list_per_layer(value, depth):
        return [value[layer] for layer in remaining_layers]
    if _is_object_by_layer(value, depth):
        return {
            str(remaining_layers.index(int(key))): entry for key, entry in value.items() if int(key) in remaining_layers
        }
    if _is_indices(key, value, depth):
        return [remaining_layers.index(layer) for layer in value if layer in remaining_layers]
    if _FIRST_LAYERS.search(key) and _is_count(value) and value <= depth:
        return sum(layer < value for layer in remaining_layers)
    if _LAST_LAYERS.search(key) and _is_count(value):
        return sum(layer >= depth - value for layer in remaining_layers)
    return value


def _is_list_per_layer(value: object, depth: int) -> bool:
    """Return True if a value is a list with one setting for each layer."""
    return isinstance(value, list) and len(value) == depth and not any(isinstance(element, dict) for element in value)


def _is_object_by_layer(value: object, depth: int) -> bool:
    """Return True if a value is an object of layer settings, with layer numbers (also ``05``) as keys."""
    if not isinstance(value, dict) or not value:
        return False
    return all(key.isdecimal() and int(key) < depth and isinstance(setting, dict) for key, setting in value.items())


def _is_indices(key: str, value: Any, depth: int) -> bool:
    """Return True if a value is a sorted list of layer indices below ``depth``."""
    return bool(_LAYER_INDICES.search(key)) and _is_counts(value) and value == sorted(set(value)) and value[-1] < depth


def _cut_width(content: dict[str, object], aspects: Sequence[Aspect], facts: _ConfigFacts) -> dict[str, object]:
    """Divide widths by :data:`_WIDTH_DIVISOR`, partly with fewer heads and partly with narrower heads."""
    head_counts = [number for key, value in _named_values(content) if _is_heads(key) for number in _list_counts(value)]
    if "head size" not in aspects:
        head_counts = [count for count in head_counts if count >= _WIDTH_DIVISOR]
    head_count_divisor = math.gcd(_WIDTH_DIVISOR, *head_counts) if head_counts and "heads" in aspects else 1
    width_divisor = _WIDTH_DIVISOR if "head size" in aspects or not head_counts else head_count_divisor
    head_size_divisor = width_divisor // head_count_divisor

    def cut_value(key: str, value: object) -> Any:
        """Return the reduced value of a key that counts widths, heads or experts; other values are unchanged."""
        if _PER_HEAD.search(key):
            return _map_counts(value, lambda width: max(width // head_size_divisor, min(width, 1)))
        if _is_heads(key):
            return _map_counts(value, lambda count: max(count // head_count_divisor, 1))
        if _EXPERTS.search(key):
            return _map_counts(value, lambda count: min(count, _MOST_EXPERTS))
        if _EXPERTS_CHOSEN.search(key):
            return _map_counts(value, lambda count: min(count, 2))
        if key in _EXPERT_GROUPS:
            return _map_counts(value, lambda count: min(count, _EXPERT_GROUPS[key]))
        if _MEL_WIDTH.search(key) and _is_count(value) and value in facts.mel_bins:
            return value
        if _is_width(key):
            step = _EXPERT_STEP if _INNER_WIDTH.search(key) else 1
            return _map_counts(value, lambda width: _divide_width(width, width_divisor, step))
        if isinstance(value, dict) and not _is_config(value):
            return {name: cut_value(name, inner) for name, inner in value.items()}
        return value

    return {key: cut_value(key, value) for key, value in content.items()}


def _divide_width(width: int, divisor: int, step: int) -> int:
    """Return a width divided, rounded up to a multiple of ``step``; small numbers are unchanged."""
    return width if width < _SMALLEST_WIDTH else -(-width // (divisor * step)) * step


def _named_values(content: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config, including plain nested objects and excluding sub-configs."""
    for key, value in content.items():
        if isinstance(value, dict) and not _is_config(value):
            yield from _named_values(value)
        else:
            yield key, value


def _is_heads(key: str) -> bool:
    """Return True if a key counts attention heads, not the size of a head."""
    return bool(_HEADS.search(key)) and not _PER_HEAD.search(key)


def _is_width(key: str) -> bool:
    """Return True if a key is the width of a layer, by patterns of known names."""
    if _SURE_WIDTH.search(key):
        return True
    return bool(_WIDTH.search(key)) and not _NO_WIDTH.search(key)


def _cut_image(content: dict[str, object]) -> dict[str, object]:
    """Limit image sizes to a few patches, and the number of image tokens to match."""
    patch = max(_list_counts(content.get("patch_size")), default=0)
    edge = _IMAGE_PATCHES * patch if patch >= _COARSE_PATCH else _SMALL_IMAGE
    return _cap_counts(content, {_IMAGE_SIZES: edge, _IMAGE_TOKENS: _IMAGE_PATCHES**2})


def _cut_tokens(content: dict[str, object], facts: _ConfigFacts) -> dict[str, object]:
    """Shorten vocabularies and sequences; a token beyond the vocabulary is replaced by a token within it."""
    has_vocabulary = any(_VOCABULARY.search(key) for key in content)
    positions = _MOST_POSITIONS if has_vocabulary and not facts.has_sub_configs else _MOST_POSITIONS_OF_PARTS
    limits = {
        _VOCABULARY: _MOST_VOCABULARY,
        _POSITIONS: positions,
        _QUERIES: _MOST_QUERIES,
        _WINDOWS: _MOST_WINDOW,
    }
    tokens = {
        key: _map_counts(value, lambda token: facts.replaced_tokens.get(token, token))
        for key, value in content.items()
        if _TOKEN.search(key)
    }
    return {**_cap_counts(content, limits), **tokens}


def _cap_counts(content: Mapping[str, object], limits: Mapping[re.Pattern[str], int]) -> dict[str, object]:
    """Return a config with each count capped at the limit of the first matching pattern of its key."""
    capped = dict(content)
    for key, value in content.items():
        limit = next((limit for pattern, limit in limits.items() if pattern.search(key)), None)
        if limit is not None:
            capped[key] = _map_counts(value, partial(min, limit))
    return capped


def _map_counts(value: object, change: Any) -> Any:
    """Apply ``change`` to a count, or to every count in nested lists; other values are unchanged."""
    if _is_count(value):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_map_counts(element, change) for element in value]
    return value


def _list_counts(value: Any) -> list[int]:
    """Return a count, or all counts in nested lists; `[]` for other values."""
    if isinstance(value, (list, tuple)):
        return [number for element in value for number in _list_counts(element)]
    return [value] if _is_count(value) else []


def _is_count(value: Any) -> bool:
    """Return True for an integer other than a Boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))
