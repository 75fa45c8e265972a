"""How a model encodes images, and how its code replaces placeholder tokens with their features.

Found by running the model on shapes: the method that makes the vectors of images, and the module that is given the
vectors of all tokens. No model is known by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS, EMBEDDED
from winml.modelkit.models.families.image_grids import UnsplitTensors, computed_grids
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.shared_settings import attribute_replaced


@dataclass(frozen=True)
class _ImageFeatures:
    """What a method makes of images, in a run on shapes."""

    pooled: Any
    """The vectors that take the place of tokens."""
    lists: Mapping[str, ListedVectors]
    """By field of the record."""


@dataclass(frozen=True)
class ListedVectors:
    """Vectors of images in a list of the record that a method returns."""

    items: tuple[torch.Tensor, ...]
    """Of all images each."""
    are_divided: bool
    """Whether each comes in pieces, one for each image."""


@dataclass(frozen=True)
class LayeredVectors:
    """Vectors of images that a language model adds to those of tokens after some of its layers.

    A method returns them in lists beside the vectors of images, and the language model is given them with a mask of the
    tokens they belong to. The graphs pass them on as vectors of all tokens, zero where a token stands for no image: so
    a decoder needs no mask, and a step without images is one with zeros.
    """

    field: str
    """Of the record that the method returns: a list with an entry for each layer."""
    count: int
    """Entries of that list."""
    are_divided: bool
    """Whether each entry comes in pieces, one for each image."""
    argument: str
    """Parameter of the language model that takes the list."""
    mask: str
    """Parameter of the language model that says which tokens the vectors belong to."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What they are called where images are seen."""
        return tuple(f"{self.field}.{number}" for number in range(self.count))

    @property
    def token_names(self) -> tuple[str, ...]:
        """What they are called as vectors of all tokens."""
        return tuple(f"{self.argument}.{number}" for number in range(self.count))

    def seen(self, output: Any, complete: UnsplitTensors) -> dict[str, torch.Tensor]:
        """Return those in what the method returned, by name.

        Args:
            output: What it returned.
            complete: Has seen what it divided.
        """
        return dict(zip(self.feature_names, map(complete.of, output[self.field]), strict=True))

    def listed(self, passed: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return the field of the record with these vectors, each in one piece."""
        vectors = [passed[name] for name in self.feature_names]
        return {self.field: [(item,) for item in vectors] if self.are_divided else vectors}

    def of_tokens(self, call: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return vectors of all tokens, by name, from what the language model is called with."""
        mask = call[self.mask]
        return {
            name: item.new_zeros((*mask.shape, item.shape[-1])).masked_scatter(mask[..., None], item)
            for name, item in zip(self.token_names, call[self.argument], strict=True)
        }

    def decode(self, module: torch.nn.Module, language_model: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward of what decodes, which takes vectors of all tokens and hands them to the language model.

        Args:
            module: What decodes.
            language_model: The module itself, or one inside it.
        """
        forward = module.forward

        def forward_of_all(*args: object, **named: Any) -> Any:
            passed = {name: named.pop(name) for name in self.token_names if name in named}
            if not passed:
                # As its user calls it.
                return forward(*args, **named)
            mask = torch.ones_like(passed[self.token_names[0]][..., 0], dtype=torch.bool)
            further = {self.mask: mask, self.argument: [passed[name].flatten(0, 1) for name in self.token_names]}
            with _AllTokens(mask):
                if language_model is module:
                    return forward(*args, **{**named, **further})
                own = language_model.forward
                with attribute_replaced(
                    language_model, "forward", lambda *args, **named: own(*args, **{**named, **further})
                ):
                    return forward(*args, **named)

        forward_of_all.__signature__ = _with_any_name(inspect.signature(forward))  # type: ignore[attr-defined]
        return forward_of_all


def _listed_vectors(output: object, complete: UnsplitTensors) -> dict[str, ListedVectors]:
    """Return the lists of vectors in the record of a method: each entry a tensor, or the pieces of one.

    Args:
        output: What the method returned.
        complete: Has seen what it divided.
    """
    fields = output.items() if isinstance(output, Mapping) else ()
    found = {
        name: ListedVectors(tuple(map(complete.of, value)), any(map(complete.is_divided, value)))
        for name, value in fields
        if isinstance(value, list) and value and not complete.is_divided(value)
    }
    return {
        name: listed for name, listed in found.items() if all(isinstance(item, torch.Tensor) for item in listed.items)
    }


def _find_layered(features: _ImageFeatures, beside: Mapping[str, Any]) -> LayeredVectors | None:
    """Return how further vectors reach a language model; None where it is given others, or none.

    Args:
        features: What the method makes of images.
        beside: What the language model is given beside the vectors of tokens and what all are given.
    """
    masks = [name for name, value in beside.items() if isinstance(value, torch.Tensor) and value.dtype == torch.bool]
    lists = [name for name, value in beside.items() if isinstance(value, list)]
    if len(beside) != 2 or not masks or not lists:
        return None
    passed, mask = beside[lists[0]], beside[masks[0]]
    shapes = [tuple(item.shape) for item in passed if isinstance(item, torch.Tensor) and item.dim() == 2]
    marked = int(mask.sum()) if mask.dim() == 2 and not mask.is_meta else -1
    if len(shapes) != len(passed) or any(shape[0] != marked for shape in shapes):
        return None
    for name, listed in features.lists.items():
        if [tuple(item.shape) for item in listed.items] == shapes:
            return LayeredVectors(name, len(shapes), listed.are_divided, lists[0], masks[0])
    return None


def _with_any_name(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that takes keywords of any name, since those of inputs are none of Python's."""
    kind = inspect.Parameter.VAR_KEYWORD
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not kind]
    return signature.replace(parameters=[*own, inspect.Parameter("further", kind)])


class _AllTokens(TorchFunctionMode):
    """Takes what a mask of all tokens chooses as all there is, so that no graph looks for it."""

    def __init__(self, mask: torch.Tensor) -> None:
        """Know the mask."""
        super().__init__()
        self._mask = mask

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Read and write all tokens where the mask says which."""
        if func is torch.Tensor.to and args[0] is self._mask:
            return self._mask
        if func is torch.Tensor.__getitem__ and self._chooses(args[1]):
            return args[0].flatten(0, 1)
        if func is torch.Tensor.__setitem__ and self._chooses(args[1]):
            return args[0].copy_(args[2].reshape(args[0].shape))
        return func(*args, **(kwargs or {}))

    def _chooses(self, index: object) -> bool:
        first = index[0] if isinstance(index, tuple) and index else index
        return first is self._mask


FEATURES_METHOD = "get_image_features"
"""Specified by transformers: the method that makes vectors of images, in place of which it is given them here."""
FEATURES = "image_features"
"""Specified: what transformers.js and onnxruntime-genai call the vectors of images."""
_CARRIERS = ("pixel_values", "image_patches")
"""Specified: what forwards call images."""
_POOLED = "pooler_output"
_PASSED_ON = frozenset({EMBEDDED, "attention_mask", "position_ids", *CACHE_ARGUMENTS})
"""What a language model is given besides constants, where its vectors say all that images do."""


@dataclass(frozen=True)
class _Divided:
    """Vectors of all images, which a method returns in pieces."""

    whole: torch.Tensor


@dataclass(frozen=True)
class ImageCode:
    """Where a model handles images."""

    owner: str
    """Path of the module that has the method and hands vectors to the language model."""
    language_model: str
    """Path of the module that is given the vectors of all tokens."""
    parameters: frozenset[str]
    """Of the method."""
    feature_shape: tuple[int, ...]
    """Of what it makes of one row of inputs: images, vectors, width; or vectors, width."""
    produced_by: str | None
    """Path of the module whose answer the method returns in pieces, one for each image; ``""``: it divides a tensor
    itself; None: it returns one tensor."""
    layered: LayeredVectors | None = None
    """Further vectors of images, which the language model adds after some of its layers; None: there are none."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Further vectors of images, as they are seen."""
        return () if self.layered is None else self.layered.feature_names

    @property
    def layered_names(self) -> tuple[str, ...]:
        """The same as vectors of all tokens."""
        return () if self.layered is None else self.layered.token_names

    def features(self, module: torch.nn.Module) -> Callable[..., dict[str, torch.Tensor]]:
        """Return what makes the vectors of images, each kind as one tensor, by name.

        Args:
            module: The owner.
        """
        method = getattr(module, FEATURES_METHOD)

        def image_features(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.produced_by:
                # What is compared with is computed by the library's own code.
                is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]  # public, and not in its __all__
                with computed_grids(module) if is_traced else nullcontext(), UnsplitTensors() as complete:
                    output = method(**tensors)
                    further = {} if self.layered is None else self.layered.seen(output, complete)
                    return {FEATURES: complete.of(_pooled(output)), **further}
            outputs: list[torch.Tensor] = []
            maker = module.get_submodule(self.produced_by)
            handle = maker.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            try:
                method(**tensors)
            finally:
                handle.remove()
            return {FEATURES: outputs[-1]}

        return image_features

    def token_vectors(self, module: torch.nn.Module) -> Callable[..., dict[str, torch.Tensor]]:
        """Return what makes the vectors of all tokens, those of images put in place by the model's own code, by name.

        Args:
            module: The owner.
        """
        language_model = module.get_submodule(self.language_model.removeprefix(f"{self.owner}.").lstrip("."))
        # The call through which this is reached may have another forward in its place.
        forward = module.forward
        carrier = next(name for name in _CARRIERS if name in inspect.signature(forward).parameters)

        def inputs_embeds(
            input_ids: torch.Tensor, image_features: torch.Tensor, **further: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            passed = [image_features.flatten(0, -2)] if self.produced_by is not None else image_features
            listed = {} if self.layered is None else self.layered.listed(further)
            with (
                attribute_replaced(module, FEATURES_METHOD, lambda *_args, **_named: _record_of(passed, listed)),
                calls_of(language_model) as calls,
            ):
                # That there are images is all that is asked of these.
                forward(**{"input_ids": input_ids, carrier: image_features})
            layered = {} if self.layered is None else self.layered.of_tokens(calls[-1])
            return {EMBEDDED: calls[-1][EMBEDDED], **layered}

        return inputs_embeds

    def decode(self, module: torch.nn.Module, path: str) -> Callable[..., Any]:
        """Return the forward of what decodes, which takes further vectors of tokens where there are any.

        Args:
            module: What decodes.
            path: Where it is in the model.
        """
        inner = self.language_model.removeprefix(path).lstrip(".")
        return module.forward if self.layered is None else self.layered.decode(module, module.get_submodule(inner))


def has_image_code(model: object) -> bool:
    """Say whether a model makes vectors of images that it puts in place of tokens."""
    return hasattr(_owner(model), FEATURES_METHOD) and callable(getattr(model, "get_decoder", None))


def find_image_code(model: Any, inputs: Mapping[str, InputTensorSpec]) -> ImageCode | str:
    """Return where a model handles images, or as a clause why that is not known.

    Args:
        model: One that has such code; its parameters may be on the ``meta`` device.
        inputs: What its forward takes, with sizes.
    """
    name = type(model).__name__
    owner = _owner(model)
    language_model = model.get_decoder()
    paths = {id(module): path for path, module in model.named_modules()}
    if language_model in (None, model, owner) or id(language_model) not in paths:
        return f"{name} has no separate language model"
    parameters = frozenset(inspect.signature(getattr(owner, FEATURES_METHOD)).parameters)
    media = {key: spec for key, spec in inputs.items() if key in parameters}
    features, outputs = _seen(owner, media)
    with calls_of(language_model) as calls:
        run_on_shapes(model, inputs)
    if features is None or not calls:
        return f"{name} fails on images"
    beside = {key: value for key, value in calls[-1].items() if _holds_tensors(value) and key not in _PASSED_ON}
    layered = _find_layered(features, beside)
    if beside and layered is None:
        return f"the language model of {name} takes {min(beside)} besides embeddings"
    if not isinstance(calls[-1].get(EMBEDDED), torch.Tensor):
        return f"the language model of {name} takes no embeddings"
    shape, produced_by = _vector_shape(features.pooled, outputs)
    if shape is None:
        return f"{FEATURES_METHOD}() of {name} returns a {type(features.pooled).__name__}"
    if produced_by and not _makes_all_at_once(owner, produced_by, media):
        return f"{produced_by} of {name} does not compute the features of all images in one call"
    if produced_by and layered is not None:
        return f"{FEATURES_METHOD}() of {name} splits the output of {produced_by} and also returns {layered.field}"
    places = (paths[id(owner)], paths[id(language_model)])
    return ImageCode(*places, parameters, shape, produced_by, layered)


def _owner(model: object) -> Any:
    base = getattr(model, "base_model", model)
    return base if hasattr(base, FEATURES_METHOD) else model


def _seen(owner: Any, media: Mapping[str, InputTensorSpec]) -> tuple[_ImageFeatures | None, Sequence[tuple[str, Any]]]:
    """Return what the method makes of images, None where it does not run, and the answer of each module in it.

    What it divides at last is returned as a whole, and as the answer of no module.
    """

    def run(**tensors: torch.Tensor) -> _ImageFeatures:
        with UnsplitTensors() as complete:
            output = getattr(owner, FEATURES_METHOD)(**tensors)
            created = _pooled(output)
            pooled = _Divided(complete.of(created)) if complete.is_divided(created) else created
            return _ImageFeatures(pooled, _listed_vectors(output, complete))

    with _module_outputs(owner) as outputs:
        features = run_on_shapes(run, media)
    return features, outputs


def _makes_all_at_once(owner: object, path: str, media: Mapping[str, InputTensorSpec]) -> bool:
    """Say whether a module runs once, whatever the number of images; asked with twice as many."""
    twice = {
        name: spec.model_copy(
            update={"shape": tuple(int(size) * (1 + (axis == 0)) for axis, size in enumerate(spec.shape))}
        )
        for name, spec in media.items()
    }
    features, outputs = _seen(owner, twice)
    return features is not None and [other for other, _ in outputs].count(path) == 1


def _vector_shape(features: object, outputs: Sequence[tuple[str, object]]) -> tuple[tuple[int, ...] | None, str | None]:
    """Return the shape of the vectors of images, and the module that made them where they come in pieces."""
    if isinstance(features, _Divided):
        return tuple(features.whole.shape), ""
    if isinstance(features, torch.Tensor):
        return tuple(features.shape), None
    pieces = list(features) if isinstance(features, (list, tuple)) else []
    if not pieces or not all(isinstance(piece, torch.Tensor) for piece in pieces):
        return None, None
    count, width = sum(piece.shape[:-1].numel() for piece in pieces), pieces[0].shape[-1]
    for path, output in reversed(outputs):
        if isinstance(output, torch.Tensor) and (output.shape[:-1].numel(), output.shape[-1]) == (count, width):
            return tuple(output.shape), path
    return None, None


def _pooled(output: object) -> Any:
    """Return the vectors of images in what the method returned: a record, or the vectors themselves."""
    if isinstance(output, Mapping):
        return output.get(_POOLED)
    return output


def _holds_tensors(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


@contextmanager
def _module_outputs(module: torch.nn.Module) -> Iterator[list[tuple[str, Any]]]:
    """Yield a list that takes path and answer of each module that runs inside another, in the order of their ends."""
    outputs: list[tuple[str, Any]] = []
    with ExitStack() as hooks:
        for path, inner in module.named_modules():

            def keep(_module: object, _args: object, output: object, path: str = path) -> None:
                outputs.append((path, output))

            hooks.callback(inner.register_forward_hook(keep).remove)
        yield outputs


def _record_of(vectors: Any, listed: Mapping[str, object]) -> Any:
    """Return vectors of images as the record that methods return; what else they were made of is None."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class Record(BaseModelOutputWithPooling):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return listed.get(name)

    return Record(pooler_output=vectors)


@contextmanager
def calls_of(language_model: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that takes the keywords a language model is called with; it returns the vectors it is given."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    calls: list[dict[str, Any]] = []

    def forward(*_args: object, **named: Any) -> Any:
        calls.append(named)
        return BaseModelOutputWithPast(last_hidden_state=named.get(EMBEDDED))

    with attribute_replaced(language_model, "forward", forward):
        yield calls
