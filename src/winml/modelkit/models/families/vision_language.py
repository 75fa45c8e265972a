"""A vision-language model as three graphs: vision encoder, embedding of tokens and image features, decoder.

The vision encoder runs once per set of images. The embedding turns tokens into token embeddings, with image features in
place of placeholder tokens; without images, it only looks up tokens. The decoder has a cache and takes embeddings
instead of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.file_names import DECODER, EMBEDDING, VISION
from winml.modelkit.models.caches.arguments import arguments_with_cache
from winml.modelkit.models.caches.decision import (
    cached_keywords,
    decide_plain_inputs,
    no_cache_note,
    open_cached_inputs,
)
from winml.modelkit.models.caches.finding import find_cache, is_of_tokens, no_cache_hint
from winml.modelkit.models.caches.inputs import several_positions
from winml.modelkit.models.caches.layout import EMBEDDED, CacheLayout
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.families import family
from winml.modelkit.models.families.image_features import (
    FEATURES,
    FEATURES_METHOD,
    ImageCode,
    calls_of,
    find_image_code,
    has_image_code,
    with_whole_prompt,
)
from winml.modelkit.models.families.image_grids import fixed_grids, reads_grids, with_open_grids
from winml.modelkit.models.inputs.decision import InputDecision
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.bundle import PartFeed
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest

_TOKEN_TYPES = (0, 1)
"""Specified by transformers: token types; the type of text tokens differs among models."""
_MARK = 1
"""Chosen: last value in the vector of an image token; 0 for text."""
_MARKED_COUNT = 2
"""Chosen: fewer than the traced tokens, so that both types occur."""


@dataclass(frozen=True)
class _TokenKinds:
    """An input with the type of each token: whether it attends to later tokens."""

    name: str
    default_type: int
    """Type of a token that attends only to earlier tokens: the default for all tokens."""

    @property
    def marked_type(self) -> int:
        """Type of a token that attends to all tokens of its type, also later ones."""
        return 1 - self.default_type

    def unmark(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace embeddings with a mark by embeddings without it and the token types."""
        vectors = tensors[EMBEDDED]
        types = torch.where(vectors[..., -1] > _MARK / 2, self.marked_type, self.default_type)
        return {**tensors, EMBEDDED: vectors[..., :-1], self.name: types}

    def spec(self, tokens: InputTensorSpec) -> InputTensorSpec:
        """Return the input with the types of these tokens."""
        return InputTensorSpec(
            name=self.name,
            shape=tokens.shape,
            dtype="int64",
            value_range=(self.default_type, self.default_type),
            first_values=((self.marked_type, _MARKED_COUNT),),
        )


def _find_token_kinds(model: object, name: str, inputs: Mapping[str, InputTensorSpec]) -> _TokenKinds | str:
    """Return the meaning of a token type input, or the reason as a clause if the meaning is unknown.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        name: The input.
        inputs: Inputs of the forward, with sizes.
    """
    # An attention mask would hide further tokens.
    other_specs = {key: spec for key, spec in inputs.items() if key != _MASK}
    sees_later = {}
    for value in _TOKEN_TYPES:
        spec = inputs[name].model_copy(update={"first_values": (), "value_range": (value, value)})
        sees_later[value] = _sees_ahead(_last_call(model, {**other_specs, name: spec}).get(_MASK))
    plain_types = [value for value, ahead in sees_later.items() if ahead is False]
    if None in sees_later.values() or len(plain_types) != 1:
        return f"{type(model).__name__} takes {name} besides tokens and images"
    return _TokenKinds(name, plain_types[0])


def _find_first_position(model: object, inputs: Mapping[str, InputTensorSpec]) -> int | str:
    """Return the position that a model gives its first token, or the reason as a clause if it is unknown.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: Inputs of the forward, with sizes.
    """
    positions = _last_call(model, {name: spec for name, spec in inputs.items() if name != _MASK}).get(_POSITIONS)
    if positions is None:
        return 0
    if isinstance(positions, torch.Tensor) and not positions.is_meta and positions.dim() == 2:
        start = int(positions[0, 0])
        if torch.equal(positions - start, torch.arange(positions.shape[1]).expand_as(positions)):
            return start
    return f"the positions of {type(model).__name__} do not count tokens"


def _last_call(model: Any, inputs: Mapping[str, InputTensorSpec]) -> dict[str, object]:
    """Return the keywords of the last call of a model's language model; `{}` if it is not called."""
    with _use_boolean_masks(model), calls_of(model.get_decoder()) as calls:
        run_on_shapes(model, inputs)
    return calls[-1] if calls else {}


@contextmanager
def _use_boolean_masks(model: Any) -> Iterator[None]:
    """Make masks boolean instead of additive during the block."""
    config = model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = implementation


def _sees_ahead(mask: object) -> bool | None:
    """Return True if a mask, or one of several, lets a token attend to a later token; `None` if unknown."""
    masks = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    flags = [mask for mask in masks if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not mask.is_meta]
    if not masks or len(flags) != len(masks):
        return None
    return any(bool(mask.triu(1).any()) for mask in flags)


_TASKS = ("image-text-to-text", "image-to-text", "text-generation")
_TOKENS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"
_BATCH_KEY, _SEQUENCE_KEY = "batch_size", "sequence_length"
_IMAGE_RANK = 4
"""Rows, channels, height and width."""
_WITHOUT_IMAGES = "Without images, image_features is empty, and a run takes any number of tokens."
_IMAGES = "images"
"""Name of the number of images in the image features."""


def vision_language_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> family.FoundParts:
    """Return the three parts of a vision-language model.

    Raises:
        UsageError: no graph can take this kind of cache, or sizes do not fit.
    """
    if task not in _TASKS:
        return family.FoundParts()
    if not has_image_code(model):
        return family.FoundParts(notes=_undivided_notes(model, task, request))
    parts = _find_parts(model, checkpoint, task, request)
    # For a model that also reads text alone, the decoder family reports why there is no cache.
    return replace(parts, notes=()) if task == "text-generation" else parts


def _undivided_notes(model: Any, task: str, request: ModelRequest) -> tuple[str, ...]:
    """Return a note why a model of text from images is exported as one graph; `()` if reported elsewhere."""
    is_encoded = bool(getattr(model.config, "is_encoder_decoder", False))
    if task == "text-generation" or not request.cache or request.input_specs is not None:
        return ()
    if is_encoded or not callable(getattr(model, "generate", None)):
        return ()
    note = (
        f"Exported as one graph without KV cache: {type(model).__name__} has no {FEATURES_METHOD}() and no inner "
        f"decoder with cross-attention. Every run reads the images and all tokens; winml generate takes no {opt.image} "
        "with it."
    )
    return (note,)


def _find_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> family.FoundParts:
    """Return the three parts of a model, or notes with the reason for a single graph."""
    base = decide_plain_inputs(model, checkpoint, task, with_whole_prompt(request))
    inputs = {spec.name: spec for spec in base.inputs}
    if "decoder_input_ids" in inputs:
        return family.FoundParts()
    if not request.cache or request.input_specs is not None:
        origin = spell(request.specs_origin)
        manifest_note = f"Exported as one graph, as {origin} describes it: every run reads the images and all tokens."
        return family.FoundParts(notes=(manifest_note if request.cache else no_cache_note(),))
    divided = _divide_model(model, checkpoint.config, base, request)
    layout = divided if isinstance(divided, str) else divided.cache()
    if isinstance(divided, str) or isinstance(layout, str):
        reason = divided if isinstance(divided, str) else layout
        return family.FoundParts(
            notes=(f"Exported as one graph without KV cache, since {reason}: every run reads all tokens.",)
        )
    axes = [divided.vision_axes(), divided.embedding_axes(), divided.decoder_axes(layout)]
    vision, embedding, decoder = family.divided_axes(axes, request.dynamic)
    return family.FoundParts(
        (divided.vision_part(vision), divided.embedding_part(embedding), divided.decoder_part(decoder, layout))
    )


def _divide_model(
    model: torch.nn.Module, config: object, base: InputDecision, request: ModelRequest
) -> _DividedModel | str:
    """Return the properties of a model, or the reason as a clause if the model cannot be divided.

    Args:
        model: The whole model.
        config: Its config.
        base: Inputs of the whole model.
        request: The request of the user.

    Raises:
        UsageError: a fixed number of tokens per run would divide the tokens of an image.
    """
    inputs = {spec.name: spec for spec in base.inputs}
    code = find_image_code(model, inputs)
    if isinstance(code, str):
        return code
    other_names = [name for name in inputs if name not in (*code.parameters, _TOKENS, _MASK)]
    kinds: _TokenKinds | str | None = None
    positions = several_positions(inputs[name] for name in other_names)
    if positions is not None:
        other_names.remove(_POSITIONS)
    if other_names and is_of_tokens(inputs[other_names[0]]):
        kinds = _find_token_kinds(model, other_names.pop(0), inputs)
    if other_names:
        return f"{type(model).__name__} takes {other_names[0]} besides tokens and images"
    # Positions on an axis of their own are passed on unchanged.
    first_position = 0 if positions is not None else _find_first_position(model, inputs)
    if isinstance(kinds, str) or isinstance(first_position, str):
        return kinds if isinstance(kinds, str) else str(first_position)
    if reads_grids(model.get_submodule(code.owner)):
        # If the model takes a grid per image, the number of images is independent of the number of rows of tokens.
        bounds = {key: bound for key, bound in base.meanings.bounds.items() if key != _BATCH_KEY}
        base = replace(base, meanings=replace(base.meanings, bounds=bounds))
    if request.embedding_of == "features":
        *counts, width = code.feature_shape
        code = replace(code, feature_shape=(math.prod(counts), width))
    divided = _DividedModel(model, config, base, code, request, kinds, first_position, positions)
    divided.refuse_cut_images()
    return divided


@dataclass(frozen=True)
class _DividedModel:
    """Properties of a model with its own code for images."""

    model: torch.nn.Module
    config: Any
    base: InputDecision
    """The inputs of the whole model."""
    code: ImageCode
    request: ModelRequest
    kinds: _TokenKinds | None
    """Input with the types of tokens that attend to later tokens; `None` without such an input."""
    first_position: int
    """Position that the language model gives the first token."""
    positions: InputTensorSpec | None
    """Input with several positions per token, such as frame, row and column of a picture; `None`: one per token."""

    @property
    def decoder(self) -> torch.nn.Module:
        """Module that computes logits from embeddings: the whole model, or a language model with its own head."""
        return self.model.get_submodule(self.decoder_path)

    @property
    def decoder_path(self) -> str:
        """Path of the decoder; ``""`` if its scores are computed in the whole model."""
        language_model: Any = self.model.get_submodule(self.code.language_model)
        return self.code.language_model if language_model.get_output_embeddings() is not None else ""

    @property
    def keywords(self) -> dict[str, object]:
        """Fixed keywords of its calls."""
        return cached_keywords(self.decoder, self.request)

    def cache(self) -> CacheLayout | str:
        """Return the cache of the language model, or the reason as a clause if the model has no cache."""
        excluded = (_POSITIONS, *self.code.layered_names)
        # The language model itself takes no marks.
        plain = replace(self, request=replace(self.request, embedding_of=None))
        inputs = tuple(spec for spec in plain.decoder_inputs.inputs if spec.name not in excluded)
        return find_cache(self.decoder, inputs, self.keywords)

    def vision_axes(self) -> family.PartAxes:
        """Return the inputs of the vision encoder.

        Raises:
            UsageError: a requested axis has a fixed size.
        """
        decision = self._select_inputs([spec.name for spec in self.base.inputs if spec.name in self.code.parameters])
        # With several images per row, padding images are dropped: their number depends on values.
        has_one_in_each_row = all(len(spec.shape) <= _IMAGE_RANK for spec in decision.inputs)

        def open_decision(decision: InputDecision, dynamic: DynamicRequest) -> InputDecision:
            if reads_grids(self.model.get_submodule(self.code.owner)):
                is_size_stated = {"height", "width"} <= self.request.fixed_sizes.keys()
                is_open = not is_size_stated or dynamic.image_size or dynamic.axes
                return with_open_grids(decision, dynamic, self.code.feature_shape[0]) if is_open else decision
            if has_one_in_each_row:
                return self._open_sizes(decision, (_BATCH_KEY,), dynamic)
            return self._open_sizes(decision, (), dynamic.model_copy(update={"batch": False}))

        return family.PartAxes(replace(decision, notes=()), open_decision, {}, frozenset({FEATURES}))

    def vision_part(self, decision: InputDecision) -> ModelPart:
        """Return the vision encoder."""
        return family.part_of_decision(
            self.model,
            decision,
            {},
            NestedArguments(tuple(spec.name for spec in decision.inputs), {}, dict),
            name=VISION,
            path=self.code.owner,
            entry=partial(self._features, fixed_grids=fixed_grids(decision)),
            feeds=()
            if self.embeds_tokens_only
            else tuple(PartFeed(name, EMBEDDING, name) for name in (FEATURES, *self.code.feature_names)),
        )

    def _features(
        self, module: torch.nn.Module, fixed_grids: Mapping[str, torch.Tensor]
    ) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the function that computes image features in the shape of the embedding's input, with marks."""
        features = self.code.features(module, fixed_grids)
        if self.request.embedding_of is None:
            return features

        def image_features(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = features(**tensors)
            vectors = outputs[FEATURES]
            if self.request.embedding_of == "features":
                vectors = vectors.flatten(0, -2)
            if self.marks:
                vectors = torch.nn.functional.pad(vectors, (0, 1), value=_MARK)
            return {**outputs, FEATURES: vectors}

        return image_features

    def _embed(self, module: torch.nn.Module) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the function that computes token embeddings, with marks."""
        embed = self.code.plain_vectors(module) if self.embeds_tokens_only else self.code.token_vectors(module)
        if not self.marks:
            return embed
        ((image_token, _),) = next(spec for spec in self.base.inputs if spec.name == _TOKENS).first_values

        def inputs_embeds(input_ids: torch.Tensor, **features: torch.Tensor) -> dict[str, torch.Tensor]:
            vectors = embed(input_ids, **{name: vectors[..., :-1] for name, vectors in features.items()})[EMBEDDED]
            marks = (input_ids == image_token).to(vectors.dtype) * _MARK
            return {EMBEDDED: torch.cat((vectors, marks[..., None]), dim=-1)}

        return inputs_embeds

    @property
    def marks(self) -> bool:
        """True if embeddings and image features mark image tokens, in place of token types."""
        return self.request.embedding_of is not None and self.kinds is not None and self.code.layered is None

    @property
    def width(self) -> int:
        """Size of an embedding, with the mark."""
        return self.code.feature_shape[-1] + self.marks

    @property
    def embeds_tokens_only(self) -> bool:
        """True if the embedding takes tokens alone; features of several layers are always inserted by the model."""
        return self.request.embedding_of == "tokens" and self.code.layered is None

    def embedding_axes(self) -> family.PartAxes:
        """Return the token inputs of the embedding."""
        decision = self._select_inputs([_TOKENS])
        notes = (*self.base.notes, *(() if self.embeds_tokens_only else (_WITHOUT_IMAGES,)))

        def open_decision(decision: InputDecision, dynamic: DynamicRequest) -> InputDecision:
            fixed = {key for key in self.request.fixed_sizes if key != _SEQUENCE_KEY or not self._reads_single_tokens}
            by_default = (_BATCH_KEY, _SEQUENCE_KEY)
            return family.open_keys(decision, dynamic, by_default, fixed, self.request.left_open)

        return family.PartAxes(replace(decision, notes=notes), open_decision, {})

    def embedding_part(self, decision: InputDecision) -> ModelPart:
        """Return the embedding of tokens, with image features inserted unless it takes tokens alone."""
        if self.embeds_tokens_only:
            return family.part_of_decision(
                self.model,
                decision,
                {},
                NestedArguments((_TOKENS,), {}, dict),
                name=EMBEDDING,
                path=self.code.owner,
                entry=self._embed,
                smallest_sizes={str(size): 1 for size in decision.inputs[0].shape},
                feeds=(PartFeed(EMBEDDED, DECODER, EMBEDDED),),
            )
        # Without images, or with several images per row, the number of images differs from the number of rows.
        images, *feature_sizes = (*self.code.feature_shape[:-1], self.width)
        names = (FEATURES, *self.code.feature_names)
        features = tuple(
            InputTensorSpec(
                name=name,
                shape=(_IMAGES, *feature_sizes),
                dtype=self._dtype,
                sums={_IMAGES: (decision.inputs[0].shape[0],) * (images // self._rows)},
            )
            for name in names
        )
        return family.part_of_decision(
            self.model,
            replace(decision, inputs=(*decision.inputs, *features)),
            {},
            NestedArguments((_TOKENS, *names), {}, dict),
            name=EMBEDDING,
            path=self.code.owner,
            entry=self._embed,
            smallest_sizes={str(size): 1 for size in decision.inputs[0].shape},
            feeds=tuple(PartFeed(name, DECODER, name) for name in (EMBEDDED, *self.code.layered_names)),
        )

    def decoder_axes(self, layout: CacheLayout) -> family.PartAxes:
        """Return the inputs of the language model with its head: embeddings, and the cache."""
        text_config = self.config.get_text_config(decoder=True)

        def open_decision(decision: InputDecision, dynamic: DynamicRequest) -> InputDecision:
            request = replace(self.request, dynamic=dynamic)
            return open_cached_inputs(decision, layout, self.decoder, text_config, request)

        return family.PartAxes(replace(self.decoder_inputs, notes=()), open_decision, {_TOKENS: EMBEDDED})

    def decoder_part(self, decision: InputDecision, layout: CacheLayout) -> ModelPart:
        """Return the language model with its head."""
        names = [spec.name for spec in decision.inputs if spec.cache is None]
        kinds = self.kinds
        if kinds is not None and self.marks:
            names.append(kinds.name)
        return family.part_of_decision(
            self.model,
            replace(decision, notes=()),
            self.keywords,
            arguments_with_cache(
                layout,
                names,
                kinds=None if kinds is None else kinds.name,
                unmark=kinds.unmark if kinds is not None and self.marks else None,
                first_position=self.first_position,
            ),
            name=DECODER,
            path=self.decoder_path,
            entry=None if self.code.layered is None else partial(self.code.decode, path=self.decoder_path),
            first_position=self.first_position,
            feeds=layout.feeds_to(DECODER),
            cache=layout,
        )

    @property
    def decoder_inputs(self) -> InputDecision:
        """Inputs of the language model without a cache."""
        decision = self._select_inputs([_TOKENS, _MASK])
        tokens = decision.inputs[0]
        shape = (*tokens.shape, self.width)
        names = (EMBEDDED, *self.code.layered_names)
        vectors = tuple(InputTensorSpec(name=name, shape=shape, dtype=self._dtype) for name in names)
        kinds = () if self.kinds is None or self.marks else (self.kinds.spec(tokens),)
        keys: dict[str, tuple[str | None, ...]] = {
            **decision.meanings.keys,
            **{spec.name: decision.meanings.keys[_TOKENS] for spec in kinds},
            **dict.fromkeys(names, (*decision.meanings.keys[_TOKENS], None)),
        }
        del keys[_TOKENS]
        positions = () if self.positions is None else (self.positions,)
        keys |= {spec.name: (None, *decision.meanings.keys[_TOKENS]) for spec in positions}
        bounds = dict(decision.meanings.bounds)
        limit = bounds.get(_SEQUENCE_KEY)
        if limit is not None:
            # The minimum length of a prompt with image tokens does not apply to later steps.
            bounds[_SEQUENCE_KEY] = replace(limit, min=1)
        meanings = replace(decision.meanings, keys=keys, bounds=bounds)
        inputs = (*vectors, *decision.inputs[1:], *kinds, *positions)
        if self._reads_single_tokens:
            meanings = replace(meanings, sizes={**meanings.sizes, _SEQUENCE_KEY: 1})
            inputs = tuple(_with_one_token(spec, keys[spec.name]) for spec in inputs)
        return replace(decision, inputs=inputs, meanings=meanings)

    @property
    def _reads_single_tokens(self) -> bool:
        """True if the user requests a decoder of one token per run."""
        return self.request.fixed_sizes.get(_SEQUENCE_KEY) == 1

    def refuse_cut_images(self) -> None:
        """Refuse a fixed number of tokens per run if all tokens of an image must be in one run.

        Raises:
            UsageError: names the size.
        """
        sizes = self.request.fixed_sizes
        if self.kinds is not None and _SEQUENCE_KEY in sizes:
            raise UsageError(
                f"{opt.shape_config}: {_SEQUENCE_KEY} {sizes[_SEQUENCE_KEY]}: the tokens of an image attend to each "
                f"other in {type(self.model).__name__}, so each run takes any number of tokens",
                hint=f"Remove {_SEQUENCE_KEY}. {no_cache_hint()}",
            )

    @property
    def _rows(self) -> int:
        """Number of rows for which the images were counted."""
        return self.base.meanings.sizes.get(_BATCH_KEY, 1)

    @property
    def _dtype(self) -> str:
        """Element type of the embeddings."""
        model: Any = self.model
        return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")

    def _select_inputs(self, names: list[str]) -> InputDecision:
        """Return the decision for the inputs of these names, tokens first."""
        inputs = tuple(spec for spec in self.base.inputs if spec.name in names)
        # Tokens come first: their embeddings precede the mask and the token types.
        inputs = tuple(sorted(inputs, key=lambda spec: spec.name != _TOKENS))
        keys = {spec.name: self.base.meanings.keys[spec.name] for spec in inputs}
        return replace(self.base, inputs=inputs, meanings=replace(self.base.meanings, keys=keys))

    def _open_sizes(
        self, decision: InputDecision, by_default: tuple[str, ...], dynamic: DynamicRequest
    ) -> InputDecision:
        """Make default sizes dynamic unless the user gave a number, and all requested axes."""
        return family.open_keys(decision, dynamic, by_default, self.request.fixed_sizes, self.request.left_open)


def _with_one_token(spec: InputTensorSpec, keys: tuple[str | None, ...]) -> InputTensorSpec:
    """Return an input of the decoder for one token."""
    sizes = zip(spec.shape, keys, strict=True)
    return spec.model_copy(update={"shape": tuple(1 if key == _SEQUENCE_KEY else size for size, key in sizes)})
