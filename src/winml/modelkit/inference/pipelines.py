"""What do transformers' pipelines ask of a model? So that they take a built one like any other.

A pipeline knows transformers' own classes by name, logs an error for every other class, and then works with it.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.inference.model_folder import config_beside

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["PipelineModel"]

_LOGGER = "transformers.pipelines.base"
"""Private seam: who logs the error, and the words it begins with."""
_COMPLAINT = "The model 'WinMLModel"


class PipelineModel:
    """What a pipeline reads of a model besides its answers.

    Attributes:
        path: The ONNX file.
        device: Where answers are: always the CPU, wherever the graph runs.
        input_modalities: What the model reads, as its transformers class says: ``text``, ``image`` and the like.
    """

    device = torch.device("cpu")
    input_modalities: Any = ()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the file; see :class:`~winml.modelkit.inference.built_model.WinMLModel`."""
        self.path = os.fspath(path)
        # Adding the same filter again changes nothing.
        logging.getLogger(_LOGGER).addFilter(_is_true)

    @functools.cached_property
    def config(self) -> PretrainedConfig | None:
        """The transformers config beside the file; None where there is none."""
        return config_beside(Path(self.path))

    def can_generate(self) -> bool:
        """Say that this model gives one answer, and no text token by token."""
        return False

    def to(self, *_places: Any) -> PipelineModel:
        """Return this model: ONNX Runtime runs it where it was opened, and takes tensors from any device."""
        return self

    def eval(self) -> PipelineModel:
        """Return this model, which cannot be trained."""
        return self


def _is_true(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_COMPLAINT)
