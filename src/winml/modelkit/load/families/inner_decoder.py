"""A decoder inside a model, which attends to what the rest of the model makes of a picture or a recording.

The forward of the model runs it and returns no cache; its own ``generate()`` runs the rest once and lets the decoder
generate. Found by running both on shapes: the module that generates by itself and is given states of an encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.graph.bundle import TextTokens
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.caches.arguments import DECODER_TOKENS, ENCODER_MASK, ENCODER_STATES, TOKENS
from winml.modelkit.load.caches.decision import cached_keywords
from winml.modelkit.load.caches.encoder_decoder import ENCODER_ANSWER, layout_of_both
from winml.modelkit.load.caches.finding import RUN_ROWS, RUN_TOKENS, is_of_tokens
from winml.modelkit.load.caches.layout import EncoderDecoderLayout
from winml.modelkit.load.inputs.decision import AxisMeanings, InputDecision, forward_parameters
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.runtime.shared_settings import attribute_replaced

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["InnerDecoder", "find_inner_decoder"]

_MASK = "attention_mask"
_WITH_CACHE = {"use_cache": True}
_SEQUENCE_KEY, _TOKENS_KEY = "sequence_length", "decoder_sequence_length"
_GIVEN = frozenset({TOKENS, _MASK, ENCODER_STATES, ENCODER_MASK})
"""What a decoder may be given: the first two say something of its own tokens, the others of what was encoded."""


@dataclass(frozen=True)
class _Call:
    """One call of the decoder in a run of the model."""

    named: Mapping[str, Any]
    answer: Any


@dataclass(frozen=True)
class InnerDecoder:
    """A decoder inside a model."""

    path: str
    """Where it is."""
    layout: EncoderDecoderLayout
    plain: InputDecision
    """The inputs of the model by the names that encoder-decoders have for them: media first, then its tokens."""
    keywords: Mapping[str, Any]
    """Fixed keywords of its calls."""
    text: TextTokens | None
    """How a text begins and ends, as the model's own ``generate()`` says it; None where it does not."""

    def encode(self, model: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward of the model as that of an encoder-decoder that returns its caches."""
        forward, decoder = model.forward, model.get_submodule(self.path)
        argument = self.layout.own.argument

        def encoded(**arguments: Any) -> dict[str, Any]:
            tokens = {TOKENS: arguments.pop(DECODER_TOKENS)}
            with _seen_calls(decoder) as calls:
                forward(**arguments, **tokens)
            return {ENCODER_ANSWER: calls[-1].named[ENCODER_STATES], argument: calls[-1].answer[argument]}

        return encoded


def find_inner_decoder(
    model: torch.nn.Module, plain: InputDecision, request: ModelRequest
) -> InnerDecoder | str | None:
    """Return the decoder inside a model, None where there is none, or as a clause why it cannot be divided from it.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        plain: What its forward takes, with sizes.
        request: What the user asked for.

    Raises:
        UsageError: its cache is of a kind that no graph can take; names layer and class.
    """
    from transformers import GenerationMixin

    named = [path for path, module in model.named_modules() if path and isinstance(module, GenerationMixin)]
    if not named or all(spec.name != TOKENS for spec in plain.inputs):
        return None
    specs = {spec.name: spec.model_copy(update={"shape": _sizes(spec)}) for spec in plain.inputs}
    for path in named:
        with _seen_calls(model.get_submodule(path)) as calls:
            run_on_shapes(model, {name: spec for name, spec in specs.items() if name != _MASK})
        if calls and isinstance(calls[-1].named.get(ENCODER_STATES), torch.Tensor):
            return _found(model, plain, path, calls[-1], request)
    return None


def _found(
    model: torch.nn.Module, plain: InputDecision, path: str, call: _Call, request: ModelRequest
) -> InnerDecoder | str:
    name = type(model).__name__
    beside = [key for key, value in call.named.items() if isinstance(value, torch.Tensor) and key not in _GIVEN]
    if beside:
        return f"{path} of {name} is given {beside[0]} beside tokens and what was encoded"
    mask = call.named.get(ENCODER_MASK)
    if mask is not None and (mask.is_meta or not bool(mask.all())):
        return f"{path} of {name} is told which parts of what was encoded count"
    if not isinstance(call.answer, Mapping):
        return f"{path} of {name} returns no names"
    encoded = call.named[ENCODER_STATES]
    layout = layout_of_both(name, {**call.answer, ENCODER_ANSWER: encoded})
    if isinstance(layout, str):
        return layout
    decoder = model.get_submodule(path)
    keywords = {**_constants(decoder, call.named), **cached_keywords(decoder, request)}
    return InnerDecoder(path, layout, _as_encoder_decoder(plain), keywords, _text_tokens(model, path, plain))


def _sizes(spec: InputTensorSpec) -> tuple[int | str, ...]:
    return (RUN_ROWS, RUN_TOKENS) if spec.name in (TOKENS, _MASK) else (RUN_ROWS, *spec.shape[1:])


def _constants(decoder: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, bool | int]:
    """Return the numbers and truth values the model gives its decoder that are not what stands there anyway."""
    own = forward_parameters(decoder)
    return {
        key: value
        for key, value in named.items()
        if isinstance(value, (bool, int)) and key in own and own[key].default != value
    }


def _as_encoder_decoder(plain: InputDecision) -> InputDecision:
    """Return inputs with tokens by the name that encoder-decoders have for those of the decoder, and without a mask."""
    media = tuple(spec for spec in plain.inputs if spec.name not in (TOKENS, _MASK) and not is_of_tokens(spec))
    tokens = next(spec for spec in plain.inputs if spec.name == TOKENS)
    named = tokens.model_copy(update={"name": DECODER_TOKENS})
    meanings = plain.meanings
    keys = {spec.name: meanings.keys[spec.name] for spec in media if spec.name in meanings.keys}
    keys[DECODER_TOKENS] = tuple(
        _TOKENS_KEY if key == _SEQUENCE_KEY else key for key in meanings.keys.get(TOKENS, (None, None))
    )
    sizes, bounds = (
        {_TOKENS_KEY if key == _SEQUENCE_KEY else key: value for key, value in values.items()}
        for values in (meanings.sizes, meanings.bounds)
    )
    return replace(plain, inputs=(*media, named), meanings=AxisMeanings(keys, sizes, bounds))  # type: ignore[arg-type]


def _text_tokens(model: Any, path: str, plain: InputDecision) -> TextTokens | None:
    """Return how a text begins and ends, as ``generate()`` of a model tells its decoder."""
    if not callable(getattr(model, "generate", None)):
        return None
    decoder = model.get_submodule(path)
    given: dict[str, Any] = {}
    media = {spec.name: spec for spec in plain.inputs if spec.name not in (TOKENS, _MASK)}

    def look(*args: Any, **named: Any) -> None:
        given.update({TOKENS: args[0]} if args else {}, **named)
        raise _Reached

    with attribute_replaced(decoder, "generate", look):
        run_on_shapes(lambda **tensors: _until_reached(model.generate, tensors), media)
    first, ends = given.get(TOKENS), given.get("eos_token_id")
    if not isinstance(first, torch.Tensor) or first.is_meta or first.dim() != 2 or first.shape[1] != 1:
        return None
    ids = ends if isinstance(ends, list) else [ends]
    return TextTokens(int(first[0, 0]), tuple(token for token in ids if isinstance(token, int)))


class _Reached(Exception):  # noqa: N818  # no error, and none of those that mean a refusal
    """A model told its decoder how to generate."""


def _until_reached(generate: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        generate(**tensors)
    except _Reached:
        return


@contextmanager
def _seen_calls(decoder: torch.nn.Module) -> Iterator[list[_Call]]:
    """Yield a list that takes the calls of a decoder, each of which is asked for a cache."""
    calls: list[_Call] = []
    forward = decoder.forward
    names = list(inspect.signature(forward).parameters)

    def call(*args: Any, **named: Any) -> Any:
        answer = forward(*args, **{**named, **_WITH_CACHE})
        calls.append(_Call({**dict(zip(names, args, strict=False)), **named}, answer))
        return answer

    with attribute_replaced(decoder, "forward", call):
        yield calls
