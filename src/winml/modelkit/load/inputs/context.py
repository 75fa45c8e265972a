"""What every decision about the inputs of one model is made from: one frozen record, passed on as it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from winml.modelkit.load.checkpoints.processor_files import ProcessorInfo
from winml.modelkit.load.inputs.sizes import InputSize, InputSizes
from winml.modelkit.runtime.default_sizes import BATCH

if TYPE_CHECKING:
    import torch

__all__ = ["InputContext"]

_DECODER_TASKS = frozenset(
    {"feature-extraction", "text2text-generation", "automatic-speech-recognition", "image-to-text", "pretraining",
     "fill-mask", "text-to-audio", "image-text-to-text", "document-question-answering", "visual-question-answering"}
)  # fmt: skip
"""Tasks in which an encoder-decoder model is given the decoder's tokens; in the others it makes them itself."""


@dataclass(frozen=True, eq=False)
class InputContext:
    """A model and what the user wants of its inputs."""

    model: torch.nn.Module | type[torch.nn.Module]
    """The model, or its class where there are no weights."""
    config: Any
    """Its transformers config."""
    processor: ProcessorInfo
    """What tokenizer and processor files say."""
    sizes: InputSizes
    """The sizes the user asked for."""
    parameters: Mapping[str, inspect.Parameter]
    """Those of the forward, in the order of its signature."""
    task: str | None
    """Canonical task."""
    float_dtype: str
    """Dtype of inputs that are not indices: that of the weights they meet."""

    def takes(self, parameter: str) -> bool:
        """Say whether the forward has a parameter."""
        return parameter in self.parameters

    @property
    def has_text(self) -> bool:
        """Whether the model reads tokens."""
        return self.takes("input_ids")

    @property
    def batch(self) -> InputSize:
        """Rows of every input."""
        return self.sizes.choose("batch_size", BATCH)

    def gives_decoder_input(self, name: str) -> bool:
        """Say whether a decoder's own input is given, where the forward has it."""
        if not self.takes(name):
            return False
        is_required = self.parameters[name].default is inspect.Parameter.empty
        is_decoder_task = self.task is None or self.task in _DECODER_TASKS
        return is_required or (bool(getattr(self.config, "is_encoder_decoder", False)) and is_decoder_task)

    @functools.cached_property
    def structure(self) -> torch.nn.Module:
        """The model, or one without storage if there is only its class."""
        if not isinstance(self.model, type):
            return self.model
        import torch

        with torch.device("meta"):
            model: torch.nn.Module = self.model(self.config).eval()
        return model

    @property
    def token_width(self) -> int | None:
        """The size of the vector of a token, where the model says."""
        structure: Any = self.structure
        try:
            return int(structure.get_input_embeddings().weight.shape[-1])
        except (AttributeError, NotImplementedError):
            return None
