"""How is a built model called like the transformers model it was made from?

Takes tensors by name, fits them to the graph, runs it in ONNX Runtime, and returns the record that the model's own
forward returns. Does not build: ``auto_model.py`` does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.generic import ModelOutput

from winml.modelkit.build.model_metadata import MODEL_KEY
from winml.modelkit.errors import UsageError
from winml.modelkit.export.tensors import to_numpy, to_torch
from winml.modelkit.graph.reading import read_structure
from winml.modelkit.runtime.devices import choose_provider
from winml.modelkit.runtime.graph_inputs import GraphInput, graph_inputs
from winml.modelkit.runtime.sessions import Session

__all__ = ["WinMLModel", "described_model"]

_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Tokens → the mask that hides positions of theirs."""

_FILLERS = {"attention_mask": 1, "decoder_attention_mask": 1, "token_type_ids": 0}
"""Inputs a caller may leave out → what transformers' models put in their place."""

_PER_TOKEN_RANKS = {
    "last_hidden_state": 3, "logits": 3, "prediction_logits": 3, "encoder_last_hidden_state": 3,
    "start_logits": 2, "end_logits": 2,
}  # fmt: skip
"""Outputs with one entry for each token, along the second axis → their rank."""


@dataclass(frozen=True)
class _Padding:
    """How far the tokens of one side were filled up."""

    given: int
    wanted: int


class WinMLModel:
    """An ONNX model that is called like the transformers model it was made from.

    Attributes:
        path: The ONNX file.
        inputs: What the graph takes, in order.
        task: What the model is for; None where the file does not say.
        pad_token_id: Fills short rows up where the graph takes a fixed number of tokens; None: they are refused.
    """

    main_task: ClassVar[str | None] = None
    """The task of the class; None for any."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ep: str | None = None,
        device: typing.Literal["cpu", "gpu", "npu"] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        """Load an ONNX file.

        Args:
            path: The file.
            ep: Execution provider to run it on, such as ``openvino``; None: the one for the device.
            device: Kind of processor; None: the provider's own, the CPU without one.
            pad_token_id: See the attribute of that name.

        Raises:
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load the file.
        """
        self.path = os.fspath(path)
        self._session = Session(self.path, providers=choose_provider(ep, device, {}).names)
        self.inputs: tuple[GraphInput, ...] = graph_inputs(self._session)
        described = described_model(Path(path))
        self.task: str | None = described.get("task")
        self.pad_token_id = pad_token_id
        self._output_class = _output_class(described.get("class", ""))

    def __call__(self, *tensors: Any, **named: Any) -> ModelOutput:
        """Answer one set of inputs.

        Args:
            *tensors: Inputs in the order of :attr:`inputs`, or one mapping of them, such as a tokenizer returns.
            **named: Inputs by name: tensors, arrays, or nested lists.

        Returns:
            What the model's forward returns, as torch tensors on the CPU.

        Raises:
            UsageError: an input is missing or unknown, or has a shape or type the graph does not take.
            StageError: ONNX Runtime fails.
        """
        given = self._named(tensors, named)
        padding = self._padding(given)
        feeds = {item.name: self._fitted(item, given, padding) for item in self.inputs}
        answers = {name: to_torch(value) for name, value in self._session.run(feeds).items()}
        return self._output({name: _cut(name, value, padding) for name, value in answers.items()})

    forward = __call__

    def _named(self, tensors: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the inputs as arrays, by name; those that may be left out are filled in.

        Raises:
            UsageError: an input is missing or unknown.
        """
        names = [item.name for item in self.inputs]
        if len(tensors) == 1 and isinstance(tensors[0], Mapping):
            return self._named((), {**tensors[0], **named})
        if len(tensors) > len(names):
            raise UsageError(f"{len(tensors)} inputs were given, and the model takes {len(names)}: {', '.join(names)}")
        values = {**dict(zip(names, tensors, strict=False)), **named}
        unknown = [name for name in values if name not in names]
        if unknown:
            raise UsageError(
                f"the model has no input {unknown[0]!r}: it takes {', '.join(names)}", hint="Leave it out."
            )
        arrays = {name: _array(value) for name, value in values.items()}
        for name in names:
            if name in _FILLERS and name not in arrays and (tokens := _tokens_of(name, arrays)) is not None:
                arrays[name] = np.full_like(tokens, _FILLERS[name])
        missing = [name for name in names if name not in arrays]
        if missing:
            raise UsageError(f"input {missing[0]!r} is missing: the model takes {', '.join(names)}")
        return arrays

    def _padding(self, given: Mapping[str, NDArray[Any]]) -> dict[str, _Padding]:
        """Return which tokens are to be filled up, and how far."""
        shapes = {item.name: item.shape for item in self.inputs}
        found = {}
        for tokens, mask in _MASKS.items():
            if tokens not in shapes or mask not in shapes or self.pad_token_id is None or given[tokens].ndim != 2:
                continue
            wanted = shapes[tokens][1]
            if isinstance(wanted, int) and given[tokens].shape[1] < wanted:
                found[tokens] = _Padding(given[tokens].shape[1], wanted)
        return found

    def _fitted(self, item: GraphInput, given: Mapping[str, NDArray[Any]], padding: Mapping[str, _Padding]) -> Any:
        """Return an input in the type and shape the graph takes.

        Raises:
            UsageError: it cannot be brought into them.
        """
        array = given[item.name]
        side = padding.get(_side(item.name))
        if side is not None and array.ndim == 2 and array.shape[1] == side.given:
            fill = (self.pad_token_id or 0) if item.name in _MASKS else 0
            array = np.pad(array, ((0, 0), (0, side.wanted - side.given)), constant_values=fill)
        fits = len(array.shape) == len(item.shape) and all(
            not isinstance(size, int) or size == have for size, have in zip(item.shape, array.shape, strict=True)
        )
        if not fits:
            raise UsageError(
                f"input {item.name!r} is {_words(given[item.name])}, and the model was built for {item.words}",
                hint="Bring it to this size (tokenizers: padding='max_length', max_length=…), or build the model for "
                "another, or with that dimension left open.",
            )
        return _cast(array, item)

    def _output(self, answers: dict[str, torch.Tensor]) -> ModelOutput:
        known = inspect.signature(self._output_class).parameters if self._output_class is not None else {}
        if self._output_class is None or not set(answers) <= set(known):
            return ModelOutput(answers)  # type: ignore[no-untyped-call]
        record: ModelOutput = self._output_class(**answers)
        return record


def described_model(path: Path) -> dict[str, Any]:
    """Return what a file says about the model it was made from (``winml.model``); empty where it says nothing.

    Raises:
        WinMLError: there is no such file, or it is no ONNX file.
    """
    texts = [entry.value for entry in read_structure(path).metadata_props if entry.key == MODEL_KEY]
    try:
        record = json.loads(texts[0]) if texts else {}
    except json.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}


def _output_class(class_name: str) -> type[ModelOutput] | None:
    """Return the record a transformers class says its forward returns, or None where it says nothing."""
    model_class = getattr(importlib.import_module("transformers"), class_name, None) if class_name else None
    if not isinstance(model_class, type):
        return None
    try:
        returned = typing.get_type_hints(model_class.forward).get("return")  # type: ignore[attr-defined]
    except (NameError, TypeError, AttributeError):
        return None
    choices = typing.get_args(returned) or (returned,)
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, ModelOutput)), None)


def _array(value: Any) -> NDArray[Any]:
    return to_numpy(value if isinstance(value, torch.Tensor) else torch.as_tensor(value))


def _side(name: str) -> str:
    """Return the tokens whose positions an input goes along with."""
    return "decoder_input_ids" if name.startswith("decoder_") else "input_ids"


def _tokens_of(name: str, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    return arrays.get(_side(name))


def _words(array: NDArray[Any]) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _cast(array: NDArray[Any], item: GraphInput) -> NDArray[Any]:
    """Return the values in the graph's type; kinds of numbers are not mixed.

    Raises:
        UsageError: whole numbers are wanted and others were given, or the other way round.
    """
    wanted = _numpy_dtype(item.dtype)
    if array.dtype == wanted:
        return array
    if _is_float(array.dtype) != _is_float(wanted):
        raise UsageError(f"input {item.name!r} is {_words(array)}, and the model takes {item.words}")
    return array.astype(wanted)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return dtype


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "iub"


def _cut(name: str, value: torch.Tensor, padding: Mapping[str, _Padding]) -> torch.Tensor:
    """Take away what stands at positions that were filled up."""
    rank = _PER_TOKEN_RANKS.get(name)
    is_decoded = "decoder_input_ids" in padding and not name.startswith("encoder_")
    side = padding.get("decoder_input_ids" if is_decoded else "input_ids")
    if rank is None or side is None or value.dim() != rank or value.shape[1] != side.wanted:
        return value
    return value[:, : side.given]
