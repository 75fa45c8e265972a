"""Calls of a built model like its source transformers model.

Takes tensors of PyTorch by name and returns the output record of the model's forward; ``graph_model.py`` runs the
graph. ``auto_model.py`` builds models.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import typing
from typing import Any, ClassVar

import torch
from transformers.utils.generic import ModelOutput

from winml.modelkit.arrays import Array
from winml.modelkit.generate.graph_model import GraphModel
from winml.modelkit.models.tensors import to_numpy, to_torch

_LOGGER = "transformers.pipelines.base"
"""Private seam: the logger of the error, and the start of its message."""
_COMPLAINT = "The model 'WinMLModel"


class WinMLModel(GraphModel):
    """An ONNX model that is called like its source transformers model, also by a pipeline of transformers.

    Attributes:
        path: The ONNX file.
        inputs: Inputs of the graph, in order.
        task: Task of the model; None if the file does not state it.
        device: Device of the outputs: always the CPU, for any provider.
        dtype: Floating-point type for passing inputs; cast to the type of the graph.
        input_modalities: Modalities of the model, as stated by its transformers class: ``text``, ``image`` and the
            like.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    main_task: ClassVar[str | None] = None
    """The task of the class; None for any."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Load an ONNX file.

        Args:
            path: The file.
            **options: As for :class:`~winml.modelkit.generate.graph_model.GraphModel`.

        Raises:
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load the file.
        """
        super().__init__(path, **options)
        # A pipeline logs an error for every class that is not one of transformers, and then works with it. Adding the
        # same filter again has no effect.
        logging.getLogger(_LOGGER).addFilter(_keep_log_record)
        self.main_input_name = self.inputs[0].name if self.inputs else ""
        model_class = _model_class(self._described.get("class", ""))
        self._output_class = _output_class(model_class)
        self.input_modalities: Any = getattr(model_class, "input_modalities", ())
        self._forward_parameters &= _forward_parameters(model_class)

    def can_generate(self) -> bool:
        """Return False: the model generates no text."""
        return False

    def to(self, *_places: Any) -> WinMLModel:
        """Return this model: ONNX Runtime runs it on its provider, and accepts tensors from any device."""
        return self

    def eval(self) -> WinMLModel:
        """Return this model, which cannot be trained."""
        return self

    def __call__(self, *tensors: Any, **by_name: Any) -> ModelOutput:
        """Run the model on one set of inputs.

        Args:
            *tensors: Inputs in the order of :attr:`inputs`, or one mapping of them, such as a tokenizer returns.
            **by_name: Inputs by name: tensors, arrays, or nested lists.

        Returns:
            The output record of the model's forward, as torch tensors on the CPU.

        Raises:
            UsageError: an input is missing or unknown, or has an unsupported shape or type; or rows need padding that
                affects the outputs.
            StageError: ONNX Runtime fails.
        """
        return self._output_record({name: to_torch(value) for name, value in self.run(*tensors, **by_name).items()})

    forward = __call__

    @staticmethod
    def _to_array(value: Any) -> Array:
        return as_array(value)

    def _output_record(self, outputs: dict[str, torch.Tensor]) -> ModelOutput:
        """Return the outputs as the record of the model's forward, or a plain ``ModelOutput`` if a field is missing."""
        fields = inspect.signature(self._output_class).parameters if self._output_class is not None else {}
        if self._output_class is None or not set(outputs) <= set(fields):
            return ModelOutput(outputs)  # type: ignore[no-untyped-call]
        record: ModelOutput = self._output_class(**outputs)
        return record


def _keep_log_record(record: logging.LogRecord) -> bool:
    """Return False for transformers' error about a class unknown to a pipeline."""
    return not record.getMessage().startswith(_COMPLAINT)


def _model_class(class_name: str) -> Any:
    """Return the transformers class of a name, or None."""
    model_class = getattr(importlib.import_module("transformers"), class_name, None) if class_name else None
    return model_class if isinstance(model_class, type) else None


def _forward_parameters(model_class: Any) -> frozenset[str]:
    """Return the names of the parameters of a transformers class's forward."""
    forward = getattr(model_class, "forward", None)
    return frozenset() if forward is None else frozenset(inspect.signature(forward).parameters)


def _output_class(model_class: Any) -> type[ModelOutput] | None:
    """Return the output record class annotated on a transformers class's forward, or None without annotation."""
    try:
        returned = typing.get_type_hints(model_class.forward).get("return")
    except (NameError, TypeError, AttributeError):
        return None
    choices = typing.get_args(returned) or (returned,)
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, ModelOutput)), None)


def as_array(value: Any) -> Array:
    """Return a tensor, an array or a nested list as an array."""
    return to_numpy(torch.as_tensor(value))
