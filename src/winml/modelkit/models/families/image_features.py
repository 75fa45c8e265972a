"""Image processing of a model: image features, and their insertion in place of placeholder tokens.

Detected by running the model on shapes: the method that computes image features, and the module that receives the
embeddings of all tokens. No model is known by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS, EMBEDDED
from winml.modelkit.models.families.image_grids import UnsplitTensors, computed_grids
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.shared_settings import attribute_replaced

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest


@dataclass(frozen=True)
class _ImageFeatures:
    """Image features returned by a method in a run on shapes."""

    pooled: Any
    """Features that replace the embeddings of placeholder tokens."""
    lists: Mapping[str, ListedVectors]
    """Field of the record → list of features."""


@dataclass(frozen=True)
class ListedVectors:
    """Image features in a list of the record that a method returns."""

    parts: tuple[torch.Tensor, ...]
    """One tensor per entry of the list, with all images."""
    are_divided: bool
    """True if each entry is split into one piece per image."""


@dataclass(frozen=True)
class LayeredVectors:
    """Image features that a language model adds to token states after some of its layers.

    A method returns these features in lists beside the image features, and the language model receives them with a
    mask of their tokens. The graphs pass them as tensors over all tokens, zero for text tokens: so a decoder needs no
    mask, and a step without images receives zeros.
    """

    field: str
    """Field of the method's record: a list with an entry per layer."""
    count: int
    """Entries of the list."""
    are_divided: bool
    """True if each entry is split into one piece per image."""
    argument: str
    """Parameter of the language model that takes the list."""
    mask: str
    """Parameter of the language model that takes the mask of the image tokens."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features as outputs of the vision encoder."""
        return tuple(f"{self.field}.{number}" for number in range(self.count))

    @property
    def token_names(self) -> tuple[str, ...]:
        """Names of the features as tensors over all tokens."""
        return tuple(f"{self.argument}.{number}" for number in range(self.count))

    def name_features(self, output: Any, unsplit: UnsplitTensors) -> dict[str, torch.Tensor]:
        """Return the features in the output of the method, by name.

        Args:
            output: Output of the method.
            unsplit: Active during the call of the method; restores split tensors.
        """
        return dict(zip(self.feature_names, map(unsplit.rejoin, output[self.field]), strict=True))

    def make_lists(self, features: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return the field of the record with these features, each in one piece."""
        vectors = [features[name] for name in self.feature_names]
        return {self.field: [(vector,) for vector in vectors] if self.are_divided else vectors}

    def spread_over_tokens(self, keywords: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return tensors over all tokens, by name, from the keywords of a call of the language model."""
        mask = keywords[self.mask]
        return {
            name: vector.new_zeros((*mask.shape, vector.shape[-1])).masked_scatter(mask[..., None], vector)
            for name, vector in zip(self.token_names, keywords[self.argument], strict=True)
        }

    def decode(self, module: torch.nn.Module, language_model: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward of the decoder, which takes tensors over all tokens and passes them to the language model.

        Args:
            module: The decoder.
            language_model: The decoder itself, or a module inside it.
        """
        forward = module.forward

        def forward_of_all(*args: object, **kwargs: Any) -> Any:
            layered = {name: kwargs.pop(name) for name in self.token_names if name in kwargs}
            if not layered:
                # Called as by a user.
                return forward(*args, **kwargs)
            mask = torch.ones_like(layered[self.token_names[0]][..., 0], dtype=torch.bool)
            additions = {self.mask: mask, self.argument: [layered[name].flatten(0, 1) for name in self.token_names]}
            with _AllTokens(mask):
                if language_model is module:
                    return forward(*args, **{**kwargs, **additions})
                inner_forward = language_model.forward
                with attribute_replaced(
                    language_model, "forward", lambda *args, **kwargs: inner_forward(*args, **{**kwargs, **additions})
                ):
                    return forward(*args, **kwargs)

        forward_of_all.__signature__ = _accept_keywords(inspect.signature(forward))  # type: ignore[attr-defined]
        return forward_of_all


def _find_lists(output: object, unsplit: UnsplitTensors) -> dict[str, ListedVectors]:
    """Return the lists of features in the record of a method: each entry a tensor, or the pieces of one tensor.

    Args:
        output: Output of the method.
        unsplit: Active during the call of the method; restores split tensors.
    """
    fields = output.items() if isinstance(output, Mapping) else ()
    lists = {
        name: ListedVectors(tuple(map(unsplit.rejoin, value)), any(map(unsplit.is_divided, value)))
        for name, value in fields
        if isinstance(value, list) and value and not unsplit.is_divided(value)
    }
    return {
        name: listed for name, listed in lists.items() if all(isinstance(part, torch.Tensor) for part in listed.parts)
    }


def _find_layered(features: _ImageFeatures, arguments: Mapping[str, Any]) -> LayeredVectors | None:
    """Return how layered features reach a language model; `None` if the language model takes further tensors, or no
    layered features.

    Args:
        features: Image features returned by the method.
        arguments: Arguments of the language model other than embeddings and the usual arguments.
    """
    masks = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.dtype == torch.bool]
    lists = [name for name, value in arguments.items() if isinstance(value, list)]
    if len(arguments) != 2 or not masks or not lists:
        return None
    vectors, mask = arguments[lists[0]], arguments[masks[0]]
    shapes = [tuple(vector.shape) for vector in vectors if isinstance(vector, torch.Tensor) and vector.dim() == 2]
    mask_count = int(mask.sum()) if mask.dim() == 2 and not mask.is_meta else -1
    if len(shapes) != len(vectors) or any(shape[0] != mask_count for shape in shapes):
        return None
    for name, listed in features.lists.items():
        if [tuple(part.shape) for part in listed.parts] == shapes:
            return LayeredVectors(name, len(shapes), listed.are_divided, lists[0], masks[0])
    return None


def _accept_keywords(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that accepts any keyword, because names of inputs need not be Python identifiers."""
    kind = inspect.Parameter.VAR_KEYWORD
    other_parameters = [parameter for parameter in signature.parameters.values() if parameter.kind is not kind]
    return signature.replace(parameters=[*other_parameters, inspect.Parameter("further", kind)])


class _AllTokens(TorchFunctionMode):
    """Treat a mask over all tokens as selecting everything, so that no graph contains the selection."""

    def __init__(self, mask: torch.Tensor) -> None:
        """Remember the mask."""
        super().__init__()
        self._mask = mask

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Replace indexing with the mask by all tokens."""
        if func is torch.Tensor.to and args[0] is self._mask:
            return self._mask
        if func is torch.Tensor.__getitem__ and self._is_mask_index(args[1]):
            return args[0].flatten(0, 1)
        if func is torch.Tensor.__setitem__ and self._is_mask_index(args[1]):
            return args[0].copy_(args[2].reshape(args[0].shape))
        return func(*args, **(kwargs or {}))

    def _is_mask_index(self, index: object) -> bool:
        leading = index[0] if isinstance(index, tuple) and index else index
        return leading is self._mask


FEATURES_METHOD = "get_image_features"
"""Specified by transformers: the method that computes image features; the graphs take its result as an input."""
FEATURES = "image_features"
"""Specified: name of the image features in transformers.js and onnxruntime-genai."""
_IMAGE_ARGUMENTS = ("pixel_values", "image_patches")
"""Specified: names of images as arguments of a forward."""
_POOLED = "pooler_output"
_USUAL_ARGUMENTS = frozenset({EMBEDDED, "attention_mask", "position_ids", *CACHE_ARGUMENTS})
"""Arguments of a language model besides constants if the embeddings contain all information on images."""


@dataclass(frozen=True)
class _DividedFeatures:
    """Features of all images that a method returns in pieces."""

    whole: torch.Tensor


@dataclass(frozen=True)
class ImageCode:
    """The modules of a model that process images."""

    owner: str
    """Path of the module that has the method and passes embeddings to the language model."""
    language_model: str
    """Path of the module that receives the embeddings of all tokens."""
    parameters: frozenset[str]
    """Parameters of the method."""
    feature_shape: tuple[int, ...]
    """Shape of the features for one row of inputs: [images, tokens, width] or [tokens, width]."""
    produced_by: str | None
    """Path of the module with the output that the method splits into one piece per image.

    ``""``: the method splits a tensor of its own; `None`: it returns one tensor.
    """
    layered: LayeredVectors | None = None
    """Image features added after some layers of the language model; `None` without such features."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the layered features as outputs of the vision encoder; `()` without layered features."""
        return () if self.layered is None else self.layered.feature_names

    @property
    def layered_names(self) -> tuple[str, ...]:
        """Names of the layered features as tensors over all tokens; `()` without layered features."""
        return () if self.layered is None else self.layered.token_names

    def features(
        self, module: torch.nn.Module, fixed_grids: Mapping[str, torch.Tensor]
    ) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the function that computes image features, each kind as one tensor, by name.

        Args:
            module: The owner.
            fixed_grids: Inputs that are constants of the graph.
        """
        method = getattr(module, FEATURES_METHOD)

        def image_features(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.produced_by:
                # Reference outputs are computed by the library's own code.
                is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]  # public, and not in its __all__
                if is_traced:
                    tensors = {**tensors, **fixed_grids}
                with computed_grids(module) if is_traced else nullcontext(), UnsplitTensors() as unsplit:
                    output = method(**tensors)
                    further = {} if self.layered is None else self.layered.name_features(output, unsplit)
                    return {FEATURES: unsplit.rejoin(_pooled_features(output)), **further}
            outputs: list[torch.Tensor] = []
            producer = module.get_submodule(self.produced_by)
            with producer.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
                method(**tensors)
            return {FEATURES: outputs[-1]}

        return image_features

    def token_vectors(self, module: torch.nn.Module) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the function that computes token embeddings with image features inserted by the model's own code.

        Args:
            module: The owner.
        """
        language_model = module.get_submodule(self.language_model.removeprefix(f"{self.owner}.").lstrip("."))
        # A wrapper may replace the forward while this function runs.
        forward = module.forward
        carrier = next(name for name in _IMAGE_ARGUMENTS if name in inspect.signature(forward).parameters)

        def inputs_embeds(
            input_ids: torch.Tensor, image_features: torch.Tensor, **further: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            features = [image_features.flatten(0, -2)] if self.produced_by is not None else image_features
            fields = {} if self.layered is None else self.layered.make_lists(further)
            with (
                attribute_replaced(module, FEATURES_METHOD, lambda *_args, **_named: _make_record(features, fields)),
                calls_of(language_model) as calls,
            ):
                # The code only checks that images are present.
                forward(**{"input_ids": input_ids, carrier: image_features})
            layered = {} if self.layered is None else self.layered.spread_over_tokens(calls[-1])
            return {EMBEDDED: calls[-1][EMBEDDED], **layered}

        return inputs_embeds

    def plain_vectors(self, module: torch.nn.Module) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the function that computes token embeddings without images by the model's own code.

        Args:
            module: The owner.
        """
        language_model = module.get_submodule(self.language_model.removeprefix(f"{self.owner}.").lstrip("."))
        forward = module.forward

        def inputs_embeds(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            with calls_of(language_model) as calls:
                forward(input_ids=input_ids)
            return {EMBEDDED: calls[-1][EMBEDDED]}

        return inputs_embeds

    def decode(self, module: torch.nn.Module, path: str) -> Callable[..., Any]:
        """Return the forward of the decoder, which also takes layered features of a model with such features.

        Args:
            module: The decoder.
            path: Path of the decoder in the model.
        """
        inner_path = self.language_model.removeprefix(path).lstrip(".")
        return module.forward if self.layered is None else self.layered.decode(module, module.get_submodule(inner_path))


def has_image_code(model: object) -> bool:
    """Return True if a model computes image features that replace placeholder tokens."""
    return hasattr(_find_owner(model), FEATURES_METHOD) and callable(getattr(model, "get_decoder", None))


def with_whole_prompt(request: ModelRequest) -> ModelRequest:
    """Return a request without the number of tokens if it is one: the decoder then reads single tokens.

    The embeddings of a prompt with images are computed before, in one run.
    """
    shape = request.shape_config
    if shape is None or request.fixed_sizes.get("sequence_length") != 1:
        return request
    return replace(request, shape_config=shape.model_copy(update={"sequence_length": None}))


def find_image_code(model: Any, inputs: Mapping[str, InputTensorSpec]) -> ImageCode | str:
    """Return the modules of a model that process images, or the reason as a clause if the modules are unknown.

    Args:
        model: A model with such code; its parameters may be on the ``meta`` device.
        inputs: Inputs of its forward, with sizes.
    """
    name = type(model).__name__
    owner = _find_owner(model)
    language_model = model.get_decoder()
    paths = {id(module): path for path, module in model.named_modules()}
    if language_model in (None, model, owner) or id(language_model) not in paths:
        return f"{name} has no separate language model"
    parameters = frozenset(inspect.signature(getattr(owner, FEATURES_METHOD)).parameters)
    media = {key: spec for key, spec in inputs.items() if key in parameters}
    features, outputs = _probe_features(owner, media)
    with calls_of(language_model) as calls:
        run_on_shapes(model, inputs)
    if features is None or not calls:
        return f"{name} fails on images"
    extra = {key: value for key, value in calls[-1].items() if _holds_tensors(value) and key not in _USUAL_ARGUMENTS}
    layered = _find_layered(features, extra)
    if extra and layered is None:
        return f"the language model of {name} takes {min(extra)} besides embeddings"
    if not isinstance(calls[-1].get(EMBEDDED), torch.Tensor):
        return f"the language model of {name} takes no embeddings"
    shape, produced_by = _vector_shape(features.pooled, outputs)
    if shape is None:
        return f"{FEATURES_METHOD}() of {name} returns a {type(features.pooled).__name__}"
    if produced_by and not _runs_once(owner, produced_by, media):
        return f"{produced_by} of {name} does not compute the features of all images in one call"
    if produced_by and layered is not None:
        return f"{FEATURES_METHOD}() of {name} splits the output of {produced_by} and also returns {layered.field}"
    module_paths = (paths[id(owner)], paths[id(language_model)])
    return ImageCode(*module_paths, parameters, shape, produced_by, layered)


def _find_owner(model: object) -> Any:
    """Return the module that has the method of image features: the base model, else the model itself."""
    base = getattr(model, "base_model", model)
    return base if hasattr(base, FEATURES_METHOD) else model


def _probe_features(
    owner: Any, media: Mapping[str, InputTensorSpec]
) -> tuple[_ImageFeatures | None, Sequence[tuple[str, Any]]]:
    """Return the image features of the method (`None` if it fails) and the output of each module inside.

    A tensor that the method itself splits is returned as a whole, and as the output of no module.
    """

    def run(**tensors: torch.Tensor) -> _ImageFeatures:
        with UnsplitTensors() as unsplit:
            output = getattr(owner, FEATURES_METHOD)(**tensors)
            created = _pooled_features(output)
            pooled = _DividedFeatures(unsplit.rejoin(created)) if unsplit.is_divided(created) else created
            return _ImageFeatures(pooled, _find_lists(output, unsplit))

    with _record_outputs(owner) as outputs:
        features = run_on_shapes(run, media)
    return features, outputs


def _runs_once(owner: object, path: str, media: Mapping[str, InputTensorSpec]) -> bool:
    """Return True if a module runs once for any number of images; runs ``owner`` with twice as many images.

    Args:
        owner: The module whose forward computes the image features.
        path: Path of the module in ``owner``.
        media: Inputs of one image.
    """
    twice = {
        name: spec.model_copy(
            update={"shape": tuple(int(size) * (1 + (axis == 0)) for axis, size in enumerate(spec.shape))}
        )
        for name, spec in media.items()
    }
    features, outputs = _probe_features(owner, twice)
    return features is not None and [module_path for module_path, _ in outputs].count(path) == 1


def _vector_shape(features: object, outputs: Sequence[tuple[str, object]]) -> tuple[tuple[int, ...] | None, str | None]:
    """Return the shape of image features (`None`: unknown), and the module that computes them if returned in pieces."""
    if isinstance(features, _DividedFeatures):
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


def _pooled_features(output: object) -> Any:
    """Return the image features in the output of the method: a record, or the features themselves."""
    if isinstance(output, Mapping):
        return output.get(_POOLED)
    return output


def _holds_tensors(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


@contextmanager
def _record_outputs(module: torch.nn.Module) -> Iterator[list[tuple[str, Any]]]:
    """Yield a list of (path, output) of each module that runs inside a module, in the order in which modules end."""
    outputs: list[tuple[str, Any]] = []
    with ExitStack() as hooks:
        for path, submodule in module.named_modules():

            def record_output(_module: object, _args: object, output: object, path: str = path) -> None:
                outputs.append((path, output))

            hooks.callback(submodule.register_forward_hook(record_output).remove)
        yield outputs


def _make_record(vectors: Any, listed: Mapping[str, object]) -> Any:
    """Return image features as the record that methods return; other fields are `None`."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class Record(BaseModelOutputWithPooling):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return listed.get(name)

    return Record(pooler_output=vectors)


@contextmanager
def calls_of(language_model: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that collects the keywords of calls of a language model, which returns its embeddings unchanged."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    calls: list[dict[str, Any]] = []

    def forward(*_args: object, **keywords: Any) -> Any:
        calls.append(keywords)
        return BaseModelOutputWithPast(last_hidden_state=keywords.get(EMBEDDED))

    with attribute_replaced(language_model, "forward", forward):
        yield calls
