"""Intermediate records from which an :class:`InputTensorSpec` of a model is created."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.models.checkpoints.processor_files import ProcessorInfo
from winml.modelkit.models.inputs.sizes import InputSize, InputSizes, SizeBounds
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.default_sizes import BATCH

if TYPE_CHECKING:
    import torch

ALL_VALID = (1, 1)
"""Value range of a mask that hides nothing: hidden content has no placeholder tokens, and their number is fixed."""


@dataclass(frozen=True)
class InputDraft:
    """One input; unlike a specification, its sizes have their keys of ``--shape-config``."""

    name: str
    shape: tuple[InputSize, ...]
    dtype: str
    value_range: tuple[float, float] | None = None
    """Smallest and largest valid value; `None`: standard normal for floats, 0 and 1 for integers."""
    last_value: int | None = None
    """Value of the last unmasked position of each row."""
    first_values: tuple[tuple[int, int], ...] = ()
    """Values at the start of each row, as pairs of value and count."""

    @property
    def keys(self) -> tuple[str | None, ...]:
        """Key of ``--shape-config`` of each axis."""
        return tuple(size.key for size in self.shape)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the sizes."""
        return tuple(note for size in self.shape for note in size.notes)

    def as_spec(self) -> InputTensorSpec:
        """Return the specification."""
        return InputTensorSpec(
            name=self.name,
            shape=tuple(size.value for size in self.shape),
            dtype=self.dtype,
            value_range=self.value_range,
            last_value=self.last_value,
            first_values=self.first_values,
        )


@dataclass(frozen=True)
class InputLayout:
    """One possible layout of the tensors of an image or a recording."""

    drafts: Mapping[str, InputDraft]
    """Parameter → its draft."""
    underlying_sizes: tuple[InputSize, ...] = ()
    """Sizes used to compute shapes but absent from them, such as the height of a row of patches."""
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key → bounds that hold once the model has accepted this layout."""

    @property
    def sizes(self) -> tuple[InputSize, ...]:
        """All sizes that determine the layout."""
        return (*self.underlying_sizes, *(size for draft in self.drafts.values() for size in draft.shape))


def input_shape(*sizes: InputSize | int) -> tuple[InputSize, ...]:
    """Return a shape; a plain number is a size the architecture decides."""
    return tuple(size if isinstance(size, InputSize) else InputSize(size) for size in sizes)


def index_range(count: int) -> tuple[float, float]:
    """Return the value range of indices into a table with a number of entries."""
    return (0, max(count, 1) - 1)


def value_runs(values: Iterable[int | InputSize]) -> tuple[tuple[int, int], ...]:
    """Return values as pairs of value and count.

    >>> value_runs([1, 4, 4])
    ((1, 1), (4, 2))
    """
    numbers = (value.value if isinstance(value, InputSize) else value for value in values)
    return tuple((value, len(list(group))) for value, group in itertools.groupby(numbers))


_DECODER_TASKS = frozenset(
    {"feature-extraction", "text2text-generation", "automatic-speech-recognition", "image-to-text", "pretraining",
     "fill-mask", "text-to-audio", "image-text-to-text", "document-question-answering", "visual-question-answering"}
)  # fmt: skip
"""Tasks in which an encoder-decoder model takes the decoder's tokens; in other tasks the model creates these tokens."""


@dataclass(frozen=True, eq=False)
class InputContext:
    """A model and the user's request for its inputs."""

    model: torch.nn.Module | type[torch.nn.Module]
    """The model, or its class if there are no weights."""
    config: Any
    """Its transformers config."""
    processor: ProcessorInfo
    """Content of tokenizer and processor files."""
    sizes: InputSizes
    """The sizes the user requested."""
    parameters: Mapping[str, inspect.Parameter]
    """Parameters of the forward, in the order of its signature."""
    task: str | None
    """Canonical task."""
    float_dtype: str
    """Dtype of inputs that are not indices: the dtype of the model's weights."""

    def takes(self, parameter: str) -> bool:
        """Return True if the forward has a parameter."""
        return parameter in self.parameters

    @property
    def has_text(self) -> bool:
        """True if the model reads tokens."""
        return self.takes("input_ids")

    @property
    def batch(self) -> InputSize:
        """Rows of every input."""
        return self.sizes.choose("batch_size", BATCH)

    def gives_decoder_input(self, name: str) -> bool:
        """Return True if a decoder's own parameter is an input of the graph."""
        if not self.takes(name):
            return False
        is_required = self.parameters[name].default is inspect.Parameter.empty
        is_decoder_task = self.task is None or self.task in _DECODER_TASKS
        return is_required or (bool(getattr(self.config, "is_encoder_decoder", False)) and is_decoder_task)

    @functools.cached_property
    def structure(self) -> torch.nn.Module:
        """The model; if only its class is given, an instance without storage."""
        if not isinstance(self.model, type):
            return self.model
        import torch

        with torch.device("meta"):
            model: torch.nn.Module = self.model(self.config).eval()
        return model

    @property
    def token_width(self) -> int | None:
        """Width of token embeddings; `None` if unknown."""
        structure: Any = self.structure
        try:
            return int(structure.get_input_embeddings().weight.shape[-1])
        except (AttributeError, NotImplementedError):
            return None
