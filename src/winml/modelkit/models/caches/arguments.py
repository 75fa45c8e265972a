"""Conversion of a graph's flat cache tensors into arguments of a forward, and of its caches into outputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from winml.modelkit.models.caches.custom_caches import held_tensors, with_tensors
from winml.modelkit.models.caches.layout import CacheLayout, EncoderDecoderLayout, ModuleState, cache_field
from winml.modelkit.models.inputs.nested_arguments import NestedArguments

_STATES = "states_of_modules"
"""Chosen: name of the argument that takes the states of modules, and of the output that returns the new states."""
_AttributePath = tuple[str, str]
"""Path of a module, and name of an attribute."""


@contextmanager
def assigned_states(model: nn.Module) -> Iterator[dict[_AttributePath, torch.Tensor]]:
    """Collect the tensors that a block assigns to attributes of modules, and restore the attributes.

    Yields:
        (module path, attribute) → tensor; filled at the end of the block.
    """
    old_attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    new_tensors: dict[_AttributePath, torch.Tensor] = {}
    try:
        yield new_tensors
    finally:
        for path, module in model.named_modules():
            for name, value in list(vars(module).items()):
                is_new = value is not old_attributes[path].get(name)
                if is_new and isinstance(value, torch.Tensor):
                    new_tensors[path, name] = value
                if is_new and name in old_attributes[path]:
                    vars(module)[name] = old_attributes[path][name]
                elif is_new:
                    del vars(module)[name]


def forward_with_states(states: tuple[ModuleState, ...], argument: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """Wrap a forward so that the states of modules are inputs and outputs, beside the cache.

    Args:
        states: The states.
        argument: Parameter of the forward that takes the cache; the forward changes the cache in place.
    """

    def wrap(model: nn.Module) -> Callable[..., Any]:
        forward = model.forward
        signature = inspect.signature(forward)
        states_parameter = inspect.Parameter(_STATES, inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = sorted([*signature.parameters.values(), states_parameter], key=lambda parameter: parameter.kind)

        @functools.wraps(forward)
        def call(*args: object, **arguments: Any) -> Any:
            module_states: Mapping[_AttributePath, torch.Tensor] | None = arguments.pop(_STATES, None)
            if module_states is None:
                # Called as by a user: the modules keep their states.
                return forward(*args, **arguments)
            for (path, name), tensor in module_states.items():
                setattr(model.get_submodule(path), name, tensor)
            outputs = forward(*args, **arguments)
            new_states = {
                (state.path, state.attribute): getattr(model.get_submodule(state.path), state.attribute)
                for state in states
            }
            return {**outputs, argument: arguments[argument], _STATES: new_states}

        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return wrap


DECODER_TOKENS, _MASK, _POSITIONS = "decoder_input_ids", "attention_mask", "position_ids"
"""Specified by transformers: names in encoder-decoders for the decoder's tokens, the encoder's mask, and positions."""
TOKENS, ENCODER_MASK = "input_ids", "encoder_attention_mask"
"""Specified: names of these inputs in a decoder graph, as other readers expect them."""
ENCODER_OUTPUT_STATES, ENCODER_STATES = "last_hidden_state", "encoder_hidden_states"
"""Specified: names of the encoder's hidden states as output of the encoder and as input of the decoder."""


def arguments_with_cache(
    layout: CacheLayout,
    names: Sequence[str],
    *,
    kinds: str | None = None,
    unmark: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None,
    first_position: int = 0,
) -> NestedArguments:
    """Convert inputs into the arguments of a forward with a cache, and its result into outputs.

    Args:
        layout: The cache.
        names: Names of the other inputs, each an argument.
        kinds: Input with the type of each token of a run. The forward also receives the types of cached tokens, from
            which it derives their number. `None`: no such input.
        unmark: Adds the token types, which another input contains; `None`: ``kinds`` is an input of its own.
        first_position: Position of the first token in the numbering of the forward.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return the arguments of the forward for the tensors of the graph's inputs."""
        cache = cache_of(layout, tensors)
        tensors = tensors if unmark is None else unmark(tensors)
        arguments = {**{name: tensors[name] for name in names}, layout.argument: cache}
        if layout.of_modules:
            arguments[_STATES] = {
                (entry.path, entry.attribute): tensors[entry.state.input] for entry in layout.of_modules
            }
        if first_position and _POSITIONS in arguments:
            arguments[_POSITIONS] = tensors[_POSITIONS] + first_position
        if kinds is not None:
            from winml.modelkit.models.caches.traced_layers import PromptCache

            arguments[kinds] = torch.nn.functional.pad(tensors[kinds], (cache.get_seq_length(), 0))
            arguments[layout.argument] = PromptCache()
            arguments[layout.argument].layers = cache.layers
        return arguments

    def results(outputs: Any) -> dict[str, object]:
        """Return the outputs of the graph, by name, from the result of the forward."""
        field = cache_field(outputs, layout.argument)
        other_outputs = {name: value for name, value in outputs.items() if name not in (field, _STATES)}
        return {**other_outputs, **_states_by_output(layout, outputs[field], outputs.get(_STATES, {}))}

    return NestedArguments((*names, layout.argument, *([_STATES] if layout.of_modules else [])), {}, build, results)


def encoder_arguments(
    layout: EncoderDecoderLayout, names: Sequence[str], start: int, *, with_cross: bool
) -> NestedArguments:
    """Convert the inputs of an encoder into the arguments of the whole forward, and its result into outputs.

    The decoder runs on one token, to compute the cross-attention keys and values from the encoder's hidden states. No
    further result of the decoder is an output, and the graph contains no further decoder nodes.

    Args:
        layout: The caches of the model.
        names: Names of the inputs, each an argument.
        start: A token of the decoder.
        with_cross: True if the cross-attention keys and values are outputs.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return the arguments of the forward for the tensors of the graph's inputs."""
        first_input = tensors[names[0]]
        tokens = torch.full((first_input.shape[0], 1), start, dtype=torch.int64, device=first_input.device)
        return {**{name: tensors[name] for name in names}, DECODER_TOKENS: tokens}

    def results(outputs: Any) -> dict[str, object]:
        """Return the outputs of the graph, by name, from the result of the forward."""
        cross = outputs[cache_field(outputs, layout.cross.argument)].cross_attention_cache
        cross_states = _states_by_output(layout.cross, cross) if with_cross else {}
        mask = {ENCODER_MASK: outputs[ENCODER_MASK]} if layout.mask_dtype is not None else {}
        return {ENCODER_OUTPUT_STATES: outputs["encoder_last_hidden_state"], **mask, **cross_states}

    return NestedArguments((*names, DECODER_TOKENS), {}, build, results)


_OWN_ARGUMENTS = {_MASK: "decoder_attention_mask", _POSITIONS: "decoder_position_ids"}
"""Specified: names of the decoder's own mask and positions as graph inputs → arguments of transformers."""


def own_decoder_arguments(parameters: Collection[str]) -> dict[str, str]:
    """Return input of the graph → argument of the forward, for mask and positions of the decoder's own tokens."""
    return {name: argument for name, argument in _OWN_ARGUMENTS.items() if argument in parameters}


def decoder_arguments(
    layout: EncoderDecoderLayout, *, has_mask: bool, own_inputs: Mapping[str, str], takes_encoder_states: bool
) -> NestedArguments:
    """Convert the inputs of a decoder into the arguments of the whole forward, and its result into outputs.

    A decoder that takes the encoder's hidden states in every run computes the cross-attention keys and values that are
    missing in the cache: all keys and values in the first run, and no more later. For any other decoder, these keys and
    values are in the cache, and the hidden states are zeros that only state sizes.

    Args:
        layout: The caches of the model.
        has_mask: True if the forward takes a mask over the tokens of the encoder.
        own_inputs: Input for the decoder's own tokens, such as their mask → argument of the forward.
        takes_encoder_states: True if the encoder's hidden states are an input.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return the arguments of the forward for the tensors of the graph's inputs."""
        keys = tensors[layout.cross.states[0].input]
        mask = tensors[ENCODER_MASK] if has_mask else None
        if takes_encoder_states:
            hidden = tensors[ENCODER_STATES][:, keys.shape[2] :]
            mask = None if mask is None else _mask_over_keys(mask, keys, hidden.dtype)
        else:
            hidden = keys.new_zeros((keys.shape[0], keys.shape[2], layout.hidden_size))
        return {
            **_encoder_result(layout, hidden, mask),
            DECODER_TOKENS: tensors[TOKENS],
            **{argument: tensors[name] for name, argument in own_inputs.items()},
            layout.own.argument: _make_both_caches(layout, tensors, has_cross=not takes_encoder_states),
        }

    def results(outputs: Any) -> dict[str, object]:
        """Return the outputs of the graph, by name, from the result of the forward."""
        caches = outputs[cache_field(outputs, layout.own.argument)]
        states = _states_by_output(layout.own, caches.self_attention_cache)
        if takes_encoder_states:
            states |= _states_by_output(layout.cross, caches.cross_attention_cache)
        return {"logits": outputs["logits"], **states}

    mask_name = [_MASK] if has_mask and layout.mask_dtype is None else []
    names = (*mask_name, DECODER_TOKENS, "encoder_outputs", layout.own.argument, *own_inputs.values())
    return NestedArguments(names, {}, build, results)


def inner_decoder_arguments(layout: EncoderDecoderLayout, arguments: NestedArguments) -> NestedArguments:
    """Convert the inputs of a decoder module that is called directly and has its own argument names.

    Args:
        layout: The caches of the model.
        arguments: Conversion for the forward of the encoder-decoder.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of the forward for the tensors of the graph's inputs."""
        model_arguments = arguments.build(tensors)
        return {
            TOKENS: model_arguments[DECODER_TOKENS],
            ENCODER_STATES: model_arguments["encoder_outputs"].last_hidden_state,
            layout.own.argument: model_arguments[layout.own.argument],
        }

    return NestedArguments((TOKENS, ENCODER_STATES, layout.own.argument), {}, build, arguments.results)


def _encoder_result(layout: EncoderDecoderLayout, hidden: torch.Tensor, mask: torch.Tensor | None) -> dict[str, object]:
    """Return the arguments for the encoder's outputs, with the mask over the outputs if there is a mask."""
    if layout.mask_dtype is not None:
        return {"encoder_outputs": layout.answer_class(last_hidden_state=hidden, attention_mask=mask)}
    mask_argument = {} if mask is None else {_MASK: mask}
    return {**mask_argument, "encoder_outputs": layout.answer_class(last_hidden_state=hidden)}


def _mask_over_keys(mask: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask of encoder tokens into an additive mask over the keys, which forwards use unchanged.

    A forward would make a mask of the length of the states encoded in this run. Keys beyond the mask are hidden.
    """
    padding = torch.zeros_like(keys[:, 0, mask.shape[1] :, 0], dtype=dtype)
    extended_mask = torch.cat([mask.to(dtype), padding], dim=1)
    return (1 - extended_mask[:, None, None, :]) * torch.finfo(dtype).min


def empty_states(layout: CacheLayout, batch: int, past: int = 0) -> dict[str, torch.Tensor]:
    """Return the cache before the first token: input → tensor of zeros.

    Args:
        layout: The cache.
        batch: Rows.
        past: Tokens in the cache of every run if their number is fixed; 0: no keys and values.
    """
    return {
        state.input: torch.zeros(state.shape(batch, past), dtype=getattr(torch, state.dtype)) for state in layout.states
    }


def cache_of(layout: CacheLayout, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a new cache that holds the tensors.

    Args:
        layout: The cache.
        tensors: Input → state.
    """
    from transformers.cache_utils import DynamicCache

    from winml.modelkit.models.caches.traced_layers import EMPTY_LAYER, LAYER_CLASSES, DroppingLayer, EmptyLayer

    classes = {EMPTY_LAYER: EmptyLayer, **{kind.__name__: traced for kind, traced in LAYER_CLASSES.items()}}
    outer_states = {*(state for _, state in layout.held), *(entry.state for entry in layout.of_modules)}
    layers: list[Any] = []
    for layer, name in enumerate(layout.layer_classes):
        states = [state for state in layout.states if state.layer == layer and state not in outer_states]
        values = {(state.kind, state.index): tensors[state.input] for state in states}
        window = next((state.window for state in states if state.window), None)
        if window in layout.dropping_windows:
            layers.append(DroppingLayer(values, window))
        else:
            layers.append(classes[name](values))
    if layout.template is not None:
        return with_tensors(layout.template, {path: tensors[state.input] for path, state in layout.held}, layers)
    cache = DynamicCache()
    cache.layers = layers
    return cache


def _make_both_caches(layout: EncoderDecoderLayout, tensors: Mapping[str, torch.Tensor], *, has_cross: bool) -> Any:
    """Return a new cache of an encoder-decoder that holds the tensors.

    Args:
        layout: The caches of the model.
        tensors: Input → state.
        has_cross: True if the tensors include all cross-attention keys and values; otherwise the forward appends them.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
    cache.self_attention_cache = cache_of(layout.own, tensors)
    cache.cross_attention_cache = cache_of(layout.cross, tensors)
    # Otherwise transformers reads sizes, which would be constants in a trace.
    cache.is_updated = dict.fromkeys(range(len(layout.cross.layer_classes)), has_cross)
    return cache


def _states_by_output(
    layout: CacheLayout, cache: object, of_modules: Mapping[tuple[str, str], torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Return the states of a cache and of modules: output → tensor."""
    from winml.modelkit.models.caches.traced_layers import layer_tensors

    tensors = held_tensors(cache) if layout.held else {}
    outer_states = {state: tensors[path] for path, state in layout.held}
    outer_states |= {entry.state: of_modules[entry.path, entry.attribute] for entry in layout.of_modules}
    layers = [layer_tensors(layer) for layer in getattr(cache, "layers", ())]
    return {
        state.output: outer_states[state] if state in outer_states else layers[state.layer][state.kind, state.index]
        for state in layout.states
    }
