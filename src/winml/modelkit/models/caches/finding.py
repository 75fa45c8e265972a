"""Detection of a model's cache, by one run of its forward on shapes only.

The outputs of the forward name the cache: the parameter that takes the cache again, the layers and the tensors of
layers. No model is known by name. A cache that cannot be flattened is refused; the error names the layer or tensor and
its class.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.caches.arguments import (
    DECODER_TOKENS,
    assigned_states,
    cache_of,
)
from winml.modelkit.models.caches.custom_caches import held_tensors, held_values, unread, with_tensors
from winml.modelkit.models.caches.layout import (
    EMBEDDED,
    AccessPath,
    CacheLayout,
    CacheState,
    EncoderDecoderLayout,
    ModuleState,
    Side,
    argument_of,
    cache_argument,
    cache_field,
)
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.shared_settings import attribute_replaced, attributes_replaced

MASK = "attention_mask"
"""Specified by transformers: input that masks padding tokens."""
_OVERLAYS = ("sliding_window_overlay", "chunked_overlay")
"""Specified by transformers: functions that create the part of a mask that hides tokens beyond a window."""


_CONTRACTIONS = frozenset(
    {torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, nn.functional.linear}
)
"""Functions with other output columns than the columns of their inputs."""

_ALLOCATIONS = frozenset(getattr(torch.Tensor, f"new_{kind}") for kind in ("empty", "full", "ones", "tensor", "zeros"))
"""Functions that read only dtype and device of their tensor."""


class _CacheReached(Exception):  # noqa: N818  # a signal, not an error or a refusal
    """A forward put keys and values into the cache."""


class _MaskUse(TorchFunctionMode):
    """Track uses of the attention mask and of tensors derived from it.

    Independent of the function called: tensors are followed while their last axis counts the tokens of the mask. A
    tensor counts as widened if only the last axis becomes longer, or if written into a longer tensor.
    """

    def __init__(self) -> None:
        """Start without a mask."""
        super().__init__()
        self.is_widened = False
        """True if columns were appended to the mask."""
        self._followed: dict[int, torch.Tensor] = {}
        self._columns = 0

    def follow(self, mask: torch.Tensor | None) -> None:
        """Start to follow a mask of shape [rows, tokens]; `None`: no mask."""
        self._followed = {} if mask is None else {id(mask): mask}
        self._columns = 0 if mask is None else mask.shape[-1]

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and follow the tensors that it derives from the mask."""
        output = func(*args, **(kwargs or {}))
        masks = [value for value in tensors_in((args, kwargs)) if id(value) in self._followed]
        if masks and func not in _CONTRACTIONS | _ALLOCATIONS:
            for created in tensors_in((output, _find_written_tensor(func, args, output))):
                # A single column may be expanded by broadcasting, without further tokens.
                self.is_widened |= any(
                    created.shape[:-1] == mask.shape[:-1] and 1 < mask.shape[-1] < created.shape[-1] for mask in masks
                )
                if created.dim() and created.shape[-1] == self._columns:
                    # The reference keeps the tensor alive, so that no other tensor gets its id.
                    self._followed[id(created)] = created
        return output


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments or outputs of a function."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))


def _find_written_tensor(func: object, args: Any, output: object) -> torch.Tensor | None:
    """Return the tensor modified in place, directly or through a view; `None` if the function does not write."""
    if func is torch.Tensor.__setitem__:
        target: torch.Tensor = args[0]
        return target
    return output._base if isinstance(output, torch.Tensor) and args and output is args[0] else None


def _with_mask_use(layout: CacheLayout, rows: int, past: int, run: Callable[..., object]) -> CacheLayout | None:
    """Record in a layout how the forward uses the mask after cached tokens.

    Args:
        layout: The cache, with layers of transformers' own classes.
        rows: Rows of a run.
        past: Tokens in the cache.
        run: (rows, tokens, tokens in the cache, observer of the mask, further arguments) → outputs of the forward.

    Returns:
        The layout; `None` if the forward reads only one token after cached tokens, so that a single graph cannot serve
        the prompt and the steps.
    """
    if not layout.grows:
        return layout

    def find_mask_use(tokens: int) -> _MaskUse | None:
        """Return the use of the mask in a run of tokens after cached ones; `None` if the forward fails."""
        use = _MaskUse()
        try:
            outputs = run(rows, tokens, past=past, use=use, **{layout.argument: _stopping_cache(layout, rows, past)})
        except _CacheReached:
            return use
        return None if outputs is None else use

    use = find_mask_use(1 if layout.is_recurrent else past)
    if use is None:
        # A run of one token fails as well if the forward reads values; the exported file is then compared with PyTorch.
        return layout if layout.is_recurrent or find_mask_use(1) is None else None
    return replace(layout, is_masked=not use.is_widened)


def _stopping_cache(layout: CacheLayout, rows: int, past: int) -> Any:
    """Return a cache that ends a run at the first layer: masks are created before that, once for all layers."""

    def stop(*_args: object, **_arguments: object) -> Any:
        raise _CacheReached

    states = {
        state.input: torch.empty(state.shape(rows, past), dtype=getattr(torch, state.dtype), device="meta")
        for state in layout.states
    }
    cache = cache_of(layout, states)
    for layer in cache.layers:
        layer.update = stop
    return cache


def streams_of(inputs: Sequence[InputTensorSpec]) -> Mapping[str, int]:
    """Return input → its number of token streams: its rows per row of the input with the fewest rows."""
    fewest = min((int(spec.shape[0]) for spec in inputs), default=1)
    return {spec.name: int(spec.shape[0]) // fewest for spec in inputs}


@contextmanager
def _collect_masked_windows(model: nn.Module) -> Iterator[set[int]]:
    """Collect the windows beyond which masks hide tokens, from calls of transformers' mask functions.

    Args:
        model: Its modules may have imported the mask functions by name.
    """
    from transformers import masking_utils

    windows: set[int] = set()
    funcs = {name: getattr(masking_utils, name) for name in _OVERLAYS}

    def wrap_mask_function(name: str) -> Callable[..., Any]:
        """Return a mask function that also records its window."""

        def call(*args: object, **arguments: Any) -> Any:
            # Specified: the first parameter of each function is the number of visible tokens.
            windows.add(int(next(iter((*args, *arguments.values())))))
            return funcs[name](*args, **arguments)

        return call

    files = dict.fromkeys([masking_utils, *(sys.modules.get(type(module).__module__) for module in model.modules())])
    bindings = [(file, name) for file in files for name in funcs if getattr(file, name, None) is funcs[name]]
    with attributes_replaced(*((file, name, wrap_mask_function(name)) for file, name in bindings)):
        yield windows


def no_cache_hint() -> str:
    """Return the hint for a cache that a graph cannot represent."""
    return f"{opt.no_cache} exports a graph that reads all tokens in every run."


_OuterStates = tuple[tuple[AccessPath, CacheState], ...]
"""States outside of layers, each with its access path."""

_DROPPING_LAYER = "DynamicSlidingWindowLayer"
"""Specified by transformers: the layer class that keeps only the keys and values of a window."""
_SUM_RANGE = (0.0, 1.0)
"""Chosen: value range of states of unknown meaning. Some are sums of exponentials that other states are divided by."""
RUN_ROWS, RUN_TOKENS = 2, 3
"""Chosen: the smallest sizes that are neither 1 nor equal."""


def find_cache(
    model: torch.nn.Module, inputs: tuple[InputTensorSpec, ...], keywords: Mapping[str, object]
) -> CacheLayout | str:
    """Return the layout of a model's cache, or the reason as a clause if the model has none.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: Inputs of its forward without a cache.
        keywords: Further arguments of the forward, among them the switch of the cache.

    Raises:
        UsageError: no graph can take this kind of cache; names layer and class.
    """
    name = type(model).__name__
    other_names = [spec.name for spec in inputs if spec.name != EMBEDDED and not is_of_tokens(spec)]
    if other_names:
        return f"{name} takes {other_names[0]} besides tokens"
    parameters = inspect.signature(model.forward).parameters
    run = _make_shape_run(model, inputs, keywords)

    def outputs_of(rows: int, tokens: int, **further: object) -> Any:
        with assigned_states(model):
            return run(rows, tokens, **further)

    with _collect_masked_windows(model) as masked:
        outputs = outputs_of(RUN_ROWS, RUN_TOKENS)
    if outputs is None:
        return f"{name} fails with a cache"
    if not isinstance(outputs, Mapping):
        return f"{name} returns outputs without names"
    for field, value in outputs.items():
        argument = argument_of(field, parameters)
        if argument is None or value is None or isinstance(value, torch.Tensor):
            continue
        outer_states = _find_outer_states(name, argument, value, outputs_of)
        layout = _derive_layout(name, argument, value, outer_states=outer_states)
        if layout is None:
            return f"the cache of {name} remains empty"
        if not outer_states:
            layout = _with_dropping_windows(name, layout, masked)
            mask_layout = _with_mask_use(layout, RUN_ROWS, RUN_TOKENS, outputs_of)
            if mask_layout is None:
                raise _cache_refusal(name, "its forward reads only one token after cached ones")
            return mask_layout
        step_outputs = outputs_of(RUN_ROWS, 1, **{argument: with_tensors(value, {})})
        # Logits of one token per row, unless the forward mixes the rows.
        logits = None if step_outputs is None else step_outputs.get("logits")
        is_mixed = isinstance(logits, torch.Tensor) and tuple(logits.shape[:2]) != (RUN_ROWS, 1)
        return replace(layout, is_of_one_row=is_mixed)
    if layout := _find_module_states(model, parameters, run):
        return layout
    # transformers' generate() passes these arguments to a forward with a cache.
    takes_cache = cache_argument(parameters) is not None or "use_cache" in parameters
    return f"{name} returns no cache" if takes_cache else f"transformers has no cache for {name} either"


def _with_dropping_windows(model_name: str, layout: CacheLayout, masked: Collection[int]) -> CacheLayout:
    """Mark sliding windows that the attention mask does not encode.

    Args:
        model_name: Class of the model, for messages.
        layout: The cache.
        masked: Windows beyond which masks hide tokens.

    Raises:
        UsageError: a layer with such a window keeps other states as well.
    """
    dropping = {item.window: item for item in layout.states if item.window is not None and item.window not in masked}
    for window, state in dropping.items():
        if (class_name := layout.class_of(state.layer)) != _DROPPING_LAYER:
            raise _cache_refusal(
                model_name,
                f"layer {state.layer} of {layout.argument} ({class_name}) drops tokens beyond {window}",
            )
    return replace(layout, dropping_windows=frozenset(dropping))


def _make_shape_run(
    model: torch.nn.Module, inputs: Sequence[InputTensorSpec], keywords: Mapping[str, object]
) -> Callable[..., Any]:
    """Return a function (rows, tokens, cached tokens, observer of the mask, arguments) → outputs of the forward."""
    streams = streams_of(inputs)

    def run(rows: int, tokens: int, past: int = 0, use: _MaskUse | None = None, **further: object) -> Any:
        lengths = {spec.name: past + tokens if spec.name == MASK else tokens for spec in inputs}
        shapes = {spec.name: (rows * streams[spec.name], lengths[spec.name], *spec.shape[2:]) for spec in inputs}
        specs = {spec.name: spec.model_copy(update={"shape": shapes[spec.name]}) for spec in inputs}

        def call(**tensors: torch.Tensor) -> Any:
            if use is None:
                return model(**tensors, **keywords, **further)
            use.follow(tensors.get(MASK))
            with use:
                return model(**tensors, **keywords, **further)

        return run_on_shapes(call, specs)

    return run


def is_of_tokens(spec: InputTensorSpec) -> bool:
    """Return True if an input has one integer per token."""
    return len(spec.shape) == 2 and spec.dtype == "int64"


def _find_module_states(
    model: torch.nn.Module, parameters: Mapping[str, object], run: Callable[..., object]
) -> CacheLayout | None:
    """Return the cache of a model if its modules keep states and its forward changes the cache argument in place.

    `None` for other models. Runs the model twice.

    Raises:
        UsageError: a module keeps a tensor without one state per row, or a layer cannot be expressed.
    """
    from transformers.cache_utils import DynamicCache

    from winml.modelkit.models.caches.traced_layers import EMPTY_LAYER

    argument = cache_argument(parameters)
    if argument is None:
        return None
    runs = []
    for extra in range(2):
        cache = DynamicCache(config=getattr(model, "config", None))
        with assigned_states(model) as tensors:
            outputs = run(RUN_ROWS + extra, RUN_TOKENS + extra, **{argument: cache})
        if outputs is None or not tensors:
            return None
        runs.append((cache, tensors))
    (cache, tensors), (_, other_tensors) = runs
    name = type(model).__name__
    states: list[ModuleState] = []
    for (path, attribute), value in tensors.items():
        layer = next((int(part) for part in path.split(".") if part.isdecimal()), 0)
        index = sum(module_state.state.layer == layer for module_state in states)
        state = _make_row_state(name, f"{path}.{attribute}", value, other_tensors.get((path, attribute)), layer, index)
        states.append(ModuleState(path, attribute, type(model.get_submodule(path)).__name__, state))
    cache_layout = _derive_layout(name, argument, cache)
    layers = cache_layout or CacheLayout(argument, (EMPTY_LAYER,) * len(cache.layers), ())
    all_states = (*(module_state.state for module_state in states), *layers.states)
    return replace(layers, states=all_states, of_modules=tuple(states))


def _make_row_state(
    model_name: str, label: str, value: torch.Tensor, larger_value: torch.Tensor | None, layer: int, index: int | None
) -> CacheState:
    """Derive the state held by a tensor from its values after a run and after a run of one more row.

    Raises:
        UsageError: the sizes depend on the tokens, or the tensor is missing after one of the runs.
    """
    shapes = [list(tensor.shape) for tensor in (value, larger_value) if tensor is not None]
    sizes = shapes[0][1:]
    if shapes != [[RUN_ROWS, *sizes], [RUN_ROWS + 1, *sizes]]:
        raise _cache_refusal(model_name, f"{label} has shape {shapes[0]}, expected one state per row")
    dtype = str(value.dtype).removeprefix("torch.")
    return CacheState(layer, "recurrent", tuple(sizes), dtype, index=index, value_range=_SUM_RANGE)


def _find_outer_states(model_name: str, argument: str, cache: object, outputs_of: Callable[..., Any]) -> _OuterStates:
    """Return the tensors of a custom cache class outside of layers as states, with their access paths.

    `()` without such tensors.

    Args:
        model_name: Class of the model, for messages.
        argument: Parameter of the forward that takes the cache.
        cache: Cache in the outputs of the forward.
        outputs_of: (rows, tokens, further arguments) → outputs of the forward.

    Raises:
        UsageError: a tensor has no fixed size per row, or a count decides the computation.
    """
    tensors = held_tensors(cache)
    if not tensors:
        return ()
    other_outputs = outputs_of(RUN_ROWS + 1, RUN_TOKENS + 1)
    if other_outputs is None:
        raise _cache_refusal(model_name, f"{argument} is a {type(cache).__name__}")
    other_cache = other_outputs[cache_field(other_outputs, argument)]
    other_tensors = held_tensors(other_cache)
    counts = _differing_values(cache, other_cache)
    states: list[tuple[AccessPath, CacheState]] = []
    for path, value in tensors.items():
        rerun = other_tensors.get(path)
        if rerun is not None and value.shape == rerun.shape and not (value.is_meta or rerun.is_meta):
            if not torch.equal(value, rerun):
                counts[path] = value
            # Otherwise the value is constant: it does not depend on the tokens.
            continue
        state = _make_row_state(model_name, _name_path(argument, path, cache), value, rerun, *_layer_and_index(path))
        states.append((path, state))
    if counts:
        # A forward may have a separate branch for the single token of a step.
        for tokens in (RUN_TOKENS, 1):
            unread_cache = with_tensors(cache, {path: unread(value) for path, value in counts.items()})
            if outputs_of(RUN_ROWS, tokens, **{argument: unread_cache}) is None:
                count_label = _name_path(argument, next(iter(counts)), cache)
                raise _cache_refusal(model_name, f"{count_label} depends on the tokens read, but is not a state")
    return tuple(states)


def _differing_values(cache: object, other_cache: object) -> dict[AccessPath, Any]:
    """Return the numbers and other values, tensors excepted, that differ between two runs."""
    values, other_values = held_values(cache), held_values(other_cache)
    keys = dict.fromkeys([*values, *other_values])
    return {
        key: values.get(key)
        for key in keys
        if key not in values or key not in other_values or values[key] != other_values[key]
    }


def _name_path(argument: str, path: AccessPath, cache: object) -> str:
    return f"{'.'.join(map(str, (argument, *path)))} of a {type(cache).__name__}"


def _layer_and_index(path: AccessPath) -> tuple[int, int | None]:
    """Return layer and index of a tensor: the first two positions in its path; a bare list has only the index."""
    numbers = [key for key in path if isinstance(key, int)]
    if len(path) == 1:
        numbers = [0, *numbers]
    layer, index, *_ = (*numbers, None, None)
    return layer or 0, index


def _derive_layout(
    model_name: str,
    argument: str,
    cache: object,
    *,
    tokens: int = RUN_TOKENS,
    side: Side | None = None,
    outer_states: _OuterStates = (),
) -> CacheLayout | None:
    """Return the layout of a cache after one run; `None` if the cache is empty.

    Args:
        model_name: Class of the model, for messages.
        argument: Parameter of the forward that takes the cache.
        cache: Cache in the outputs of the forward.
        tokens: Number of tokens in the cache.
        side: Side of an encoder-decoder; its tokens are in the cache.
        outer_states: States of the cache outside of layers.

    Raises:
        UsageError: a layer cannot be expressed.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from winml.modelkit.models.caches.traced_layers import EMPTY_LAYER, LAYER_CLASSES, layer_tensors

    if isinstance(cache, EncoderDecoderCache) and not any(map(layer_tensors, cache.cross_attention_cache.layers)):
        # A decoder without an encoder also accepts the self-attention cache alone.
        cache = cache.self_attention_cache
    if type(cache) is not DynamicCache and not outer_states:
        raise _cache_refusal(model_name, f"{argument} is a {type(cache).__name__}")
    states = [state for _, state in outer_states]
    classes = {layer_class: layer_class.__name__ for layer_class in LAYER_CLASSES}
    names: list[str] = []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        tensors = layer_tensors(layer)
        if type(layer) not in classes:
            raise _cache_refusal(model_name, f"layer {number} of {argument} is a {type(layer).__name__}")
        # A layer without tensors keeps nothing.
        names.append(classes[type(layer)] if tensors else EMPTY_LAYER)
        window = getattr(layer, "sliding_window", None)
        for (kind, index), value in tensors.items():
            state = _complete_state(CacheState(number, kind, (), "", window, index, side), value, tokens)
            if state is None:
                shape = list(value.shape)
                raise _cache_refusal(
                    model_name, f"layer {number} of {argument} ({type(layer).__name__}) holds {kind} {shape}"
                )
            states.append(state)
    inputs = [state.input for state in states]
    if len({*inputs}) < len(inputs):
        raise _cache_refusal(model_name, f"{argument} is a {type(cache).__name__}")
    template = cache if outer_states else None
    return CacheLayout(argument, tuple(names), tuple(states), template, outer_states) if states else None


def _complete_state(state: CacheState, value: torch.Tensor, tokens: int) -> CacheState | None:
    """Complete a state with sizes and dtype of its tensor; `None` if rows and tokens are not on their usual axes."""
    dtype = str(value.dtype).removeprefix("torch.")
    sizes = list(value.shape)
    is_attended = state.kind in ("key", "value")
    if len(sizes) < 2 or (is_attended and len(sizes) != 4) or sizes.pop(0) != RUN_ROWS:
        return None
    if state.token_axis is not None and sizes.pop(state.token_axis - 1) != tokens:
        return None
    return replace(state, sizes=tuple(sizes), dtype=dtype, window=state.window if is_attended else None)


def _cache_refusal(model_name: str, reason: str) -> UsageError:
    """Return the error for a cache that cannot be flattened, with the reason."""
    return UsageError(f"{model_name} has a cache that a graph cannot represent: {reason}", hint=no_cache_hint())


ENCODER_OUTPUT = "encoder_last_hidden_state"
"""Specified by transformers: output of the whole model that holds the encoder's hidden states."""


def find_encoder_decoder(
    model: torch.nn.Module, inputs: tuple[InputTensorSpec, ...], keywords: Mapping[str, object]
) -> EncoderDecoderLayout | str:
    """Return the caches of an encoder-decoder, or the reason as a clause if the model cannot be divided.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: Inputs of its forward without a cache, of fixed sizes.
        keywords: Further arguments of the forward, among them the switch of the cache.

    Raises:
        UsageError: no graph can take this kind of cache; names layer and class.
    """
    name = type(model).__name__
    specs = {spec.name: spec.model_copy(update={"shape": (RUN_ROWS, *spec.shape[1:])}) for spec in inputs}
    specs[DECODER_TOKENS] = specs[DECODER_TOKENS].model_copy(update={"shape": (RUN_ROWS, RUN_TOKENS)})
    with recorded_encoder_outputs(model) as encoder_outputs:
        outputs = run_on_shapes(lambda **tensors: model(**tensors, **keywords), specs)
    if not isinstance(outputs, Mapping):
        return f"{name} fails with a cache"
    layout = layout_of_both(name, outputs, inspect.signature(model.forward).parameters)
    if isinstance(layout, str) or not encoder_outputs:
        return layout
    mask = encoder_outputs[-1].get(MASK)
    dtype = str(mask.dtype).removeprefix("torch.") if isinstance(mask, torch.Tensor) else None
    return replace(layout, answer_class=type(encoder_outputs[-1]), mask_dtype=dtype)


@contextmanager
def recorded_encoder_outputs(model: torch.nn.Module) -> Iterator[list[Mapping[str, Any]]]:
    """Yield a list that collects the output records of a model's encoder."""
    outputs: list[Mapping[str, Any]] = []
    get_encoder: Any = getattr(model, "get_encoder", None)
    encoder = get_encoder() if callable(get_encoder) else None
    forward = getattr(encoder, "forward", None)
    if not isinstance(encoder, nn.Module) or forward is None:
        yield outputs
        return

    @functools.wraps(forward)
    def call(*args: object, **keywords: object) -> Any:
        output = forward(*args, **keywords)
        outputs.extend([output] if isinstance(output, Mapping) else [])
        return output

    with attribute_replaced(encoder, "forward", call):
        yield outputs


def layout_of_both(name: str, outputs: Mapping[str, object], parameters: Collection[str]) -> EncoderDecoderLayout | str:
    """Return the caches in the outputs of an encoder-decoder, or the reason as a clause if the model cannot be divided.

    Args:
        name: Class of the model, for messages.
        outputs: Outputs of a run on shapes, with :data:`~winml.modelkit.models.caches.finding.RUN_ROWS` rows and
            :data:`~winml.modelkit.models.caches.finding.RUN_TOKENS` tokens.
        parameters: Parameters of the forward that takes the caches.

    Raises:
        UsageError: no graph can take this kind of cache; names layer and class.
    """
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    caches = ((key, value) for key, value in outputs.items() if isinstance(value, EncoderDecoderCache))
    field, cache = next(caches, ("", None))
    encoded = outputs.get(ENCODER_OUTPUT)
    if cache is None or not isinstance(encoded, torch.Tensor) or encoded.dim() != 3:
        return f"{name} stores none of the outputs of its encoder"
    argument = argument_of(field, parameters) or field
    length, hidden_size = encoded.shape[1:]
    own = _derive_layout(name, argument, cache.self_attention_cache, side="decoder")
    cross = _derive_layout(name, argument, cache.cross_attention_cache, tokens=length, side="encoder")
    if own is None or cross is None:
        raise _cache_refusal(name, f"{argument} remains empty")
    return EncoderDecoderLayout(own, cross, int(hidden_size), int(length), BaseModelOutput)
