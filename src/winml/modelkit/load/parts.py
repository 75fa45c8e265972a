"""What is a loaded model, to the stages after it?

Plain records; other rooms read them without knowing how a model was loaded. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.graph.dimensions import DynamicDimension
from winml.modelkit.graph.specs import InputTensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

__all__ = ["LoadedModel", "ModelInfo"]


@dataclass(frozen=True)
class ModelInfo:
    """What is known about a model besides its weights."""

    name_or_path: str
    """As the user wrote it."""
    class_name: str
    """Class of the model."""
    library: str
    """``transformers``, or ``torch`` for a model that is no transformers model."""
    library_version: str
    task: str | None = None
    """Canonical task; None where the model has none."""
    task_rule: str | None = None
    """The rule that decided the task, as a sentence."""
    model_type: str | None = None
    """transformers' model type."""
    source_kind: str = "live"
    """``folder``, ``config``, ``script``, ``hub`` or ``type`` (no checkpoint); ``live`` for a module handed over."""
    revision: str | None = None
    """Revision of a Hub id that was asked for."""
    random_weights: bool = False
    """Whether the weights mean nothing."""

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.model`` entry of FORMATS; what is unknown is left out."""
        record = {
            "name_or_path": self.name_or_path,
            "class": self.class_name,
            "task": self.task,
            "library": self.library,
            "library_version": self.library_version,
            "model_type": self.model_type,
            "revision": self.revision,
            "random_weights": self.random_weights or None,
        }
        return {key: value for key, value in record.items() if value is not None}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be called."""

    model: torch.nn.Module
    """In evaluation mode."""
    inputs: tuple[InputTensorSpec, ...]
    """What its forward is to be given, in this order."""
    info: ModelInfo
    forward_kwargs: Mapping[str, bool] = field(default_factory=dict)
    """Fixed keywords of every call: no cache, named outputs."""
    example: Mapping[str, torch.Tensor] | None = None
    """Values to try first, where the user gave some; they fit ``inputs``."""
    notes: tuple[str, ...] = ()
    """Sentences the user should hear."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The names in the shapes of ``inputs``, each with the size to trace with; empty where all sizes are fixed."""
    stored: Mapping[str, ir.TensorProtocol] | None = None
    """Parameters and persistent buffers by path, by reference into the weight files, where the parameters of ``model``
    hold no values; None where they do."""
    with_weights: Callable[[], torch.nn.Module] | None = None
    """Loads the same model with its weights, where ``model`` has none."""

    @property
    def trace_sizes(self) -> dict[str, int]:
        """Return the size of every dimension that is left open, as it is traced."""
        return {dimension.name: dimension.example or 1 for dimension in self.dimensions}
