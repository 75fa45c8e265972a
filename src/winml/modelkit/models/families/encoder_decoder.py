"""Parts of a generating encoder-decoder: the encoder runs once per text, the decoder once per token.

The encoder's graph outputs the keys and values for cross-attention, which no step then computes again. Such models are
detected by running the forward on shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.errors import spell
from winml.modelkit.file_names import DECODER, ENCODER
from winml.modelkit.models.caches import finding
from winml.modelkit.models.caches.arguments import (
    DECODER_TOKENS,
    ENCODER_MASK,
    ENCODER_OUTPUT_STATES,
    ENCODER_STATES,
    TOKENS,
    decoder_arguments,
    encoder_arguments,
    inner_decoder_arguments,
    own_decoder_arguments,
)
from winml.modelkit.models.caches.decision import cached_keywords, decide_plain_inputs, no_cache_note
from winml.modelkit.models.caches.inputs import PAST_KEY, refuse_beyond_positions
from winml.modelkit.models.caches.layout import CacheLayout, EncoderDecoderLayout, cache_field
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.families.family import FoundParts, PartAxes, divided_axes, open_keys, part_of_decision
from winml.modelkit.models.families.image_features import has_image_code, with_whole_prompt
from winml.modelkit.models.inputs.decision import (
    AxisMeanings,
    InputDecision,
    forward_keywords,
    forward_parameters,
)
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.inputs.sizes import SizeBounds
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.bundle import PartFeed, TextTokens
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, InputTensorSpec, OpenSize
from winml.modelkit.ort.shared_settings import attribute_replaced

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest

_MASK = "attention_mask"
_STEP_ARGUMENTS = frozenset({TOKENS, _MASK, ENCODER_STATES, ENCODER_MASK})
"""Tensor arguments of a decoder: the first two describe its own tokens, the others the encoder's outputs."""


@dataclass(frozen=True)
class _Call:
    """One call of the decoder in a run of the model."""

    arguments: Mapping[str, Any]
    answer: Any


@dataclass(frozen=True)
class _InnerDecoder:
    """A decoder inside a model, which attends to the encoded picture or recording.

    The forward of the model runs the decoder and returns no cache; the model's own ``generate()`` runs the rest once
    and lets the decoder generate. Detected by a run on shapes: a module that can generate and receives encoder states.
    """

    path: str
    """Path of the decoder."""
    layout: EncoderDecoderLayout
    base: InputDecision
    """Inputs of the model under the names of encoder-decoders: media first, then the decoder's tokens."""
    keywords: Mapping[str, Any]
    """Fixed keywords of its calls."""
    text: TextTokens | None
    """First and last tokens of a text as passed by the model's own ``generate()``; `None` if unknown."""

    def encode(self, model: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward of the model as the forward of an encoder-decoder that returns its caches."""
        forward, decoder = model.forward, model.get_submodule(self.path)
        argument = self.layout.own.argument

        def forward_caches(**arguments: object) -> dict[str, object]:
            """Run the model; return the encoder's hidden states and the decoder's caches."""
            tokens = {TOKENS: arguments.pop(DECODER_TOKENS)}
            with _record_decoder_calls(decoder) as calls:
                forward(**arguments, **tokens)
            answer = calls[-1].answer
            return {
                finding.ENCODER_OUTPUT: calls[-1].arguments[ENCODER_STATES],
                argument: answer[cache_field(answer, argument)],
            }

        return forward_caches


def _find_inner_decoder(
    model: torch.nn.Module, base: InputDecision, request: ModelRequest
) -> _InnerDecoder | str | None:
    """Return the decoder inside a model, `None` without a decoder, or the reason as a clause against a separation.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        base: Inputs of its forward, with sizes.
        request: Request of the user.

    Raises:
        UsageError: no graph can take this kind of cache; names layer and class.
    """
    from transformers import GenerationMixin

    decoder_paths = [path for path, module in model.named_modules() if path and isinstance(module, GenerationMixin)]
    if not decoder_paths or all(spec.name != TOKENS for spec in base.inputs):
        return None
    specs = {spec.name: spec.model_copy(update={"shape": _run_shape(spec)}) for spec in base.inputs}
    for path in decoder_paths:
        with _record_decoder_calls(model.get_submodule(path)) as calls:
            run_on_shapes(model, {name: spec for name, spec in specs.items() if name != _MASK})
        if calls and isinstance(calls[-1].arguments.get(ENCODER_STATES), torch.Tensor):
            return _make_inner_decoder(model, base, path, calls[-1], request)
    return None


def _make_inner_decoder(
    model: torch.nn.Module, base: InputDecision, path: str, call: _Call, request: ModelRequest
) -> _InnerDecoder | str:
    """Return the decoder of a recorded call, or the reason as a clause if the decoder cannot be separated.

    Args:
        model: The whole model.
        base: Inputs of the whole model.
        path: Path of the decoder in the model.
        call: The recorded call of the decoder.
        request: The request of the user.
    """
    name = type(model).__name__
    other_tensors = [
        key for key, value in call.arguments.items() if isinstance(value, torch.Tensor) and key not in _STEP_ARGUMENTS
    ]
    if other_tensors:
        return f"{path} of {name} takes {other_tensors[0]} besides tokens and encoder outputs"
    mask = call.arguments.get(ENCODER_MASK)
    if mask is not None and (mask.is_meta or not bool(mask.all())):
        return f"{path} of {name} takes a mask of the encoder outputs"
    if not isinstance(call.answer, Mapping):
        return f"{path} of {name} returns outputs without names"
    encoded = call.arguments[ENCODER_STATES]
    decoder = model.get_submodule(path)
    layout = finding.layout_of_both(name, {**call.answer, finding.ENCODER_OUTPUT: encoded}, forward_parameters(decoder))
    if isinstance(layout, str):
        return layout
    keywords = {**_changed_keywords(decoder, call.arguments), **cached_keywords(decoder, request)}
    return _InnerDecoder(path, layout, _rename_tokens(base), keywords, _find_text_tokens(model, path, base))


def _run_shape(spec: InputTensorSpec) -> tuple[int | str, ...]:
    """Return the shape of an input in the run on shapes."""
    return (
        (finding.RUN_ROWS, finding.RUN_TOKENS) if spec.name in (TOKENS, _MASK) else (finding.RUN_ROWS, *spec.shape[1:])
    )


def _changed_keywords(decoder: torch.nn.Module, arguments: Mapping[str, object]) -> dict[str, bool | int]:
    """Return the numbers and booleans passed to the decoder that differ from its defaults."""
    parameters = forward_parameters(decoder)
    return {
        key: value
        for key, value in arguments.items()
        if isinstance(value, (bool, int)) and key in parameters and parameters[key].default != value
    }


def _rename_tokens(base: InputDecision) -> InputDecision:
    """Rename the tokens to the decoder tokens of encoder-decoders, and remove the mask."""
    media = tuple(spec for spec in base.inputs if spec.name not in (TOKENS, _MASK) and not finding.is_of_tokens(spec))
    tokens = next(spec for spec in base.inputs if spec.name == TOKENS)
    target = tokens.model_copy(update={"name": DECODER_TOKENS})
    meanings = base.meanings
    keys = {spec.name: meanings.keys[spec.name] for spec in media if spec.name in meanings.keys}
    keys[DECODER_TOKENS] = tuple(
        _TOKENS_KEY if key == _TEXT_KEY else key for key in meanings.keys.get(TOKENS, (None, None))
    )
    sizes, bounds = (
        {_TOKENS_KEY if key == _TEXT_KEY else key: value for key, value in values.items()}
        for values in (meanings.sizes, meanings.bounds)
    )
    return replace(base, inputs=(*media, target), meanings=AxisMeanings(keys, sizes, bounds))  # type: ignore[arg-type]


def _find_text_tokens(model: Any, path: str, base: InputDecision) -> TextTokens | None:
    """Return first and last tokens of a text, as ``generate()`` of a model passes them to its decoder.

    `None` if the model has no ``generate()``, or passes no single first token.

    Args:
        model: The model.
        path: Path of its inner decoder.
        base: Inputs of the whole model.
    """
    if not callable(getattr(model, "generate", None)):
        return None
    decoder = model.get_submodule(path)
    call_arguments: dict[str, object] = {}
    media = {spec.name: spec for spec in base.inputs if spec.name not in (TOKENS, _MASK)}

    def record_call(*args: object, **keywords: object) -> None:
        call_arguments.update({TOKENS: args[0]} if args else {}, **keywords)
        raise _GenerateReached

    def generate(**tensors: torch.Tensor) -> None:
        with suppress(_GenerateReached):
            model.generate(**tensors)

    with attribute_replaced(decoder, "generate", record_call):
        run_on_shapes(generate, media)
    start, end_ids = call_arguments.get(TOKENS), call_arguments.get("eos_token_id")
    if not isinstance(start, torch.Tensor) or start.is_meta or start.dim() != 2 or start.shape[1] != 1:
        return None
    ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return TextTokens(int(start[0, 0]), tuple(token for token in ids if isinstance(token, int)))


class _GenerateReached(Exception):  # noqa: N818  # a signal, not an error or a refusal
    """The model has called ``generate()`` of its decoder."""


@contextmanager
def _record_decoder_calls(decoder: torch.nn.Module) -> Iterator[list[_Call]]:
    """Yield a list that collects the calls of a decoder; each call requests a cache."""
    calls: list[_Call] = []
    forward = decoder.forward
    names = list(inspect.signature(forward).parameters)

    def call(*args: object, **keywords: object) -> Any:
        output = forward(*args, **{**keywords, "use_cache": True})
        calls.append(_Call({**dict(zip(names, args, strict=False)), **keywords}, output))
        return output

    with attribute_replaced(decoder, "forward", call):
        yield calls


_TASKS = ("text2text-generation", "automatic-speech-recognition", "image-to-text", "image-text-to-text")

_BATCH_KEY, _TEXT_KEY, _TOKENS_KEY = "batch_size", "sequence_length", "decoder_sequence_length"
_AUDIO_KEYS = ("audio_length", "num_frames")
_ENCODER_LENGTH_NAME = "encoder_sequence_length"
"""Name of the length of the encoder's outputs if it is not the length of an input."""
_ENCODER_CACHE_LENGTH = DynamicDimension(name="past_encoder_sequence_length", min=0, example=3)
"""Length of the cross-attention keys and values if the decoder computes the missing ones."""
_USUAL_POSITIONS = 2048
"""Chosen: number of positions if the model states none."""
_TRACE_SIZES: Mapping[str, int] = {_TEXT_KEY: 11, _TOKENS_KEY: 5, PAST_KEY: 7}
"""Chosen: small, different from each other, and neither powers of two nor usual numbers of heads."""


def encoder_decoder_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> FoundParts:
    """Return encoder and decoder of a model that caches the encoder's outputs.

    Raises:
        UsageError: no graph can take this kind of cache, or sizes do not fit.
    """
    if task not in _TASKS:
        return FoundParts()
    whole = with_whole_prompt(request) if has_image_code(model) else request
    base = decide_plain_inputs(model, checkpoint, task, whole)
    inner: _InnerDecoder | str | None = None
    if all(spec.name != DECODER_TOKENS for spec in base.inputs):
        inner = _find_inner_decoder(model, base, whole)
        if inner is None:
            return FoundParts()
    if whole is not request:
        base = decide_plain_inputs(model, checkpoint, task, request)  # refuses fewer tokens than an image takes
    if not request.cache or request.input_specs is not None:
        origin = spell(request.specs_origin)
        manifest_note = f"Exported as one graph, as {origin} describes it: every run encodes and reads all tokens."
        return FoundParts(notes=(manifest_note if request.cache else no_cache_note(),))
    layout: EncoderDecoderLayout | str
    if inner is None:
        layout = finding.find_encoder_decoder(model, base.inputs, cached_keywords(model, request))
    else:
        layout = inner if isinstance(inner, str) else inner.layout
    if isinstance(layout, str):
        return FoundParts(notes=(f"The graph has no cache, since {layout}: every run reads all tokens.",))
    assert not isinstance(inner, str)  # a reason has been returned above
    return FoundParts(_DividedModel(model, base if inner is None else inner.base, layout, request, inner).parts())


@dataclass(frozen=True)
class _DividedModel:
    """A model that encodes once and decodes token by token."""

    model: torch.nn.Module
    base: InputDecision
    """Inputs without a cache; for an inner decoder under the names of encoder-decoders."""
    layout: EncoderDecoderLayout
    request: ModelRequest
    inner: _InnerDecoder | None
    """Decoder module that generates by itself; `None` if the forward of the model decodes."""

    def parts(self) -> tuple[ModelPart, ...]:
        """Return encoder and decoder.

        Raises:
            UsageError: sizes do not fit.
        """
        sizes = _RequestSizes.of(self.request, (_TEXT_KEY, _TOKENS_KEY) if self.inner is not None else None)
        encoder_axes = _encoder_axes(self.base, self.layout, sizes)
        open_encoder = encoder_axes.open(encoder_axes.decision, DynamicRequest())
        decoder_axes = _decoder_axes(
            self.base, self.layout, open_encoder, sizes, self._own_arguments,
            takes_encoder_states=self._takes_encoder_states,
        )  # fmt: skip
        encoder, decoder = divided_axes([encoder_axes, decoder_axes], self.request.dynamic)
        return self._encoder_part(encoder), self._decoder_part(decoder)

    @property
    def _own_arguments(self) -> Mapping[str, str]:
        """Inputs for the decoder's own tokens if the length of its cache is fixed: input → argument; else `{}`.

        A mask hides cache entries without a token yet, and positions cannot be derived from the length of the cache.
        """
        if PAST_KEY not in self.request.fixed_sizes or self.inner is not None or self._takes_encoder_states:
            return {}
        return own_decoder_arguments(forward_parameters(self.model))

    @property
    def _takes_encoder_states(self) -> bool:
        """True if the decoder computes the cross-attention keys and values."""
        return self.request.cross_keys == DECODER

    def _encoder_part(self, decision: InputDecision) -> ModelPart:
        layout, model, inner = self.layout, self.model, self.inner
        names = [spec.name for spec in decision.inputs]
        start = _start_token(model, self.base)
        states = (PartFeed(ENCODER_OUTPUT_STATES, DECODER, ENCODER_STATES),)
        has_mask = layout.mask_dtype is not None
        masks = (PartFeed(ENCODER_MASK, DECODER, ENCODER_MASK),) if has_mask else ()
        entry = inner.encode if inner is not None else _with_encoder_mask if has_mask else None
        return part_of_decision(
            model,
            decision,
            forward_keywords(model) if inner is not None else cached_keywords(model, self.request),
            encoder_arguments(layout, names, start, with_cross=not self._takes_encoder_states),
            name=ENCODER,
            entry=entry,
            feeds=(*masks, *(states if self._takes_encoder_states else layout.cross.feeds_to(DECODER))),
        )

    def _decoder_part(self, decision: InputDecision) -> ModelPart:
        layout, inner = self.layout, self.inner
        cache = layout.both if self._takes_encoder_states else layout.own
        has_mask = any(spec.name == _MASK for spec in self.base.inputs)
        arguments = decoder_arguments(
            layout, has_mask=has_mask, own_inputs=self._own_arguments, takes_encoder_states=self._takes_encoder_states
        )
        return part_of_decision(
            self.model,
            decision,
            cached_keywords(self.model, self.request) if inner is None else inner.keywords,
            arguments if inner is None else inner_decoder_arguments(layout, arguments),
            name=DECODER,
            path="" if inner is None else inner.path,
            text=None if inner is None else inner.text,
            feeds=cache.feeds_to(DECODER),
            cache=cache,
        )


def _with_encoder_mask(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward of a model with the encoder's own output mask among the outputs.

    for: Moonshine. Its decoder reads the mask of the shorter sequence after the convolutions over a recording.
    """
    forward = model.forward

    @functools.wraps(forward)
    def call(*args: object, **arguments: object) -> dict[str, object]:
        with finding.recorded_encoder_outputs(model) as records:
            outputs = forward(*args, **arguments)
        return {**outputs, ENCODER_MASK: records[-1][_MASK]}

    return call


@dataclass(frozen=True)
class _RequestSizes:
    """Sizes in the user's request, by key of ``--shape-config``."""

    fixed: Mapping[str, int]
    left_open: Mapping[str, OpenSize]
    renamed: Mapping[str, str]
    """Key of the user → key used here."""

    @classmethod
    def of(cls, request: ModelRequest, renamed: tuple[str, str] | None = None) -> _RequestSizes:
        """Read the sizes of a request.

        Args:
            request: Request of the user.
            renamed: Key of the user, and the key used here.
        """
        sizes, left_open = request.fixed_sizes, request.left_open
        if renamed is not None:
            user_key, part_key = renamed
            for values in (sizes, left_open):
                values.update({part_key: values.pop(user_key)} if user_key in values else {})  # type: ignore[dict-item]
        return cls(sizes, left_open, dict([renamed] if renamed is not None else []))

    def open_sizes(self, keys: tuple[str, ...], decision: InputDecision, dynamic: DynamicRequest) -> InputDecision:
        """Make the sizes of these keys dynamic unless the user gave a number, and all requested axes."""
        open_decision = open_keys(decision, dynamic, keys, self.fixed, self.left_open)
        user_keys = {part_key: key for key, part_key in self.renamed.items()}
        names = {name: user_keys.get(key, key) for name, key in open_decision.open_by_default.items()}
        return replace(open_decision, open_by_default=names)


def _encoder_axes(base: InputDecision, layout: EncoderDecoderLayout, sizes: _RequestSizes) -> PartAxes:
    """Return the axes of the encoder's inputs, and of its cross-attention outputs.

    ``base`` has the inputs of the whole model.
    """
    inputs = tuple(spec for spec in base.inputs if spec.name != DECODER_TOKENS)
    keys = {spec.name: base.meanings.keys.get(spec.name, ()) for spec in inputs}
    decision = replace(base, inputs=inputs, meanings=replace(base.meanings, keys=keys))
    outputs = frozenset(state.output for state in layout.cross.states)
    # A decoder with a mask from the encoder accepts encoder outputs of any length, of any recording.
    audio_keys = _AUDIO_KEYS if layout.mask_dtype is not None else ()
    return PartAxes(decision, partial(sizes.open_sizes, (_BATCH_KEY, _TEXT_KEY, *audio_keys)), {}, outputs)


def _decoder_axes(
    base: InputDecision,
    layout: EncoderDecoderLayout,
    encoder: InputDecision,
    sizes: _RequestSizes,
    own_inputs: Collection[str],
    *,
    takes_encoder_states: bool,
) -> PartAxes:
    """Return the axes of the tokens, the encoder's mask, the decoder's cache, and the cross-attention keys and values.

    If the decoder computes the cross-attention keys and values, the encoder's hidden states are an input as well.

    Args:
        base: Inputs of the whole model.
        layout: Layout of the caches.
        encoder: Inputs of the encoder part.
        sizes: Sizes in the user's request.
        own_inputs: Further inputs of the decoder over its tokens: positions, a mask.
        takes_encoder_states: True if the decoder computes the cross-attention keys and values.
    """
    specs = {spec.name: spec for spec in base.inputs}
    start = {key: sizes.fixed.get(key, size) for key, size in _TRACE_SIZES.items()}
    batch = sizes.fixed.get(_BATCH_KEY, 1)
    bounds = {key: base.meanings.bounds[key] for key in (_TEXT_KEY, _TOKENS_KEY) if key in base.meanings.bounds}
    positions = bounds.get(_TOKENS_KEY, SizeBounds()).max
    refuse_beyond_positions(positions, sizes.fixed, _TOKENS_KEY)
    bounds[PAST_KEY] = SizeBounds(min=0, max=None if positions is None else positions - 1)

    mask = specs.get(_MASK)
    has_own_mask = mask is not None and layout.mask_dtype is not None
    is_masked_length = mask is not None and mask.shape[1] == layout.encoder_length
    mask_key = base.meanings.keys[_MASK][1] if mask is not None else None
    cross_key = mask_key if is_masked_length else None
    is_open = any(isinstance(size, str) for spec in encoder.inputs for size in spec.shape[1:])
    encoder_length: int | str = layout.encoder_length if not is_open else _ENCODER_LENGTH_NAME
    if cross_key is not None:
        encoder_length = start.get(cross_key, layout.encoder_length)

    tokens = specs[DECODER_TOKENS].model_copy(update={"name": TOKENS, "shape": (batch, start[_TOKENS_KEY])})
    inputs = [tokens]
    keys: dict[str, tuple[str | None, ...]] = {TOKENS: (_BATCH_KEY, _TOKENS_KEY)}
    if mask is not None:
        length = encoder_length if is_masked_length or has_own_mask else mask.shape[1]
        dtype = layout.mask_dtype or mask.dtype
        inputs.append(mask.model_copy(update={"name": ENCODER_MASK, "shape": (batch, length), "dtype": dtype}))
        keys[ENCODER_MASK] = (_BATCH_KEY, None if has_own_mask else mask_key)
    for name in own_inputs:
        is_mask = name == _MASK
        length = start[_TOKENS_KEY] + (start[PAST_KEY] if is_mask else 0)
        highest = 1 if is_mask else (_USUAL_POSITIONS if positions is None else positions) - 1
        inputs.append(InputTensorSpec(name=name, shape=(batch, length), dtype="int64", value_range=(0, highest)))
        keys[name] = (_BATCH_KEY, None if is_mask else _TOKENS_KEY)
    cross: tuple[int | str, str | None] = (encoder_length, cross_key)
    if takes_encoder_states:
        cross = (_ENCODER_CACHE_LENGTH.name, None)
        shape, dtype = (batch, encoder_length, layout.hidden_size), layout.cross.states[0].dtype
        inputs.append(InputTensorSpec(name=ENCODER_STATES, shape=shape, dtype=dtype))
        keys[ENCODER_STATES] = (_BATCH_KEY, cross_key, None)
    for cache, length, key in ((layout.own, start[PAST_KEY], PAST_KEY), (layout.cross, *cross)):
        for spec in _state_specs(cache, batch, length):
            inputs.append(spec)
            keys[spec.name] = (_BATCH_KEY, None, key, None)
    # The caches of one layer side by side, the decoder's own first.
    sorted_inputs = sorted(inputs, key=lambda spec: -1 if spec.cache is None else spec.cache.layer or 0)
    key_sizes = {**base.meanings.sizes, **start, _BATCH_KEY: batch}
    decision = InputDecision(tuple(sorted_inputs), meanings=AxisMeanings(keys, key_sizes, bounds))
    # In the whole model, `input_ids` and `attention_mask` belong to the encoder.
    renamed = {DECODER_TOKENS: TOKENS, _MASK: ENCODER_MASK}
    hidden = {TOKENS, _MASK} & {spec.name for spec in encoder.inputs}
    keys_open = (_BATCH_KEY, _TEXT_KEY, _TOKENS_KEY, PAST_KEY)
    cache_dimensions = (_ENCODER_CACHE_LENGTH,) if takes_encoder_states else ()

    def open_decoder(decision: InputDecision, dynamic: DynamicRequest) -> InputDecision:
        extended = dynamic.model_copy(update={"dimensions": (*dynamic.dimensions, *cache_dimensions)})
        return sizes.open_sizes(keys_open, decision, extended)

    return PartAxes(decision, open_decoder, renamed, hidden=frozenset(hidden))


def _state_specs(cache: CacheLayout, batch: int, length: int | str) -> list[InputTensorSpec]:
    return [
        InputTensorSpec(
            name=state.input,
            shape=tuple(
                length if axis == state.token_axis else size for axis, size in enumerate(state.shape(batch, 1))
            ),
            dtype=state.dtype,
            cache=state.slot,
        )
        for state in cache.states
    ]


def _start_token(model: Any, base: InputDecision) -> int:
    """Return the first token of the decoder, or any token: the encoder's graph does not depend on it."""
    start = getattr(model.config, "decoder_start_token_id", None)
    tokens = next(spec for spec in base.inputs if spec.name == DECODER_TOKENS)
    return start if isinstance(start, int) else int((tokens.value_range or (0, 1))[0])
