"""Definition of a task: roles of a sample, predictions from outputs, and metrics.

A prediction equals the result of the transformers pipeline for the same sample; tests compare both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.evaluate.metrics import Metric
from winml.modelkit.samples.data_sets import DataSet
from winml.modelkit.samples.preprocessing import Batch, Preprocessor
from winml.modelkit.samples.processors import ProcessorKind, open_processor

Outputs = Arrays
"""Output → array, one row for each row of the batch."""
Sample = Mapping[str, Any]
"""Role → value."""


@dataclass(frozen=True)
class EvaluatorContext:
    """Model and data of a task before the first run."""

    preprocessor: Preprocessor
    config: Any
    """Transformers config of the model; ``None`` without a config."""
    folder: Path
    """Folder of config and processors."""
    data_set: DataSet
    columns: Mapping[str, str]
    """Role → column."""

    def processor(self, kind: ProcessorKind) -> Any:
        """Return a processor of the checkpoint, even if it creates no input of the graph.

        Raises:
            UsageError: the processor or a package is missing.
            InputError: its files are damaged.
        """
        processor = self.preprocessor.processors.get(kind)
        return processor if processor is not None else open_processor(kind, self.folder, self.data_set.request.option)

    def values(self, role: str) -> Iterator[Any]:
        """Yield the cells of the column of a role."""
        return (row[role] for row in self.data_set.rows({role: self.columns[role]}))


class Evaluator(ABC):
    """Converts outputs to predictions, and provides the reference values."""

    fed_per_sample = 1
    """Number of model inputs per sample: one text, or two texts of a pair processed separately."""
    notes: tuple[str, ...] = ()
    """Notes on defaults, one sentence each."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by index if each prediction is the index of one class; else ``()``."""
        return ()

    def fed(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples fed to the model."""
        yield from samples

    @abstractmethod
    def reference(self, sample: Sample) -> Any:
        """Return the reference value of a sample.

        Raises:
            UsageError: the label is unknown to the model.
        """

    @abstractmethod
    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """Convert the outputs of a batch to a prediction per row.

        Raises:
            InputError: an output required by the task is missing.
        """

    def prediction(self, outputs: Sequence[Any], sample: Sample) -> Any:  # noqa: ARG002  # some need it
        """Combine the predictions of all rows of one sample."""
        return outputs[0]

    def agreement(self, ours: Any, theirs: Any) -> float:
        """Agreement of two predictions for one sample, 0 to 1."""
        return float(ours == theirs)

    def words(self, value: Any) -> str | None:
        """Format a prediction or a reference value on one line; ``None`` if it has no text, such as an image."""
        return value if isinstance(value, str) else None

    def for_metrics(self, prediction: Any, reference: Any) -> Any:  # noqa: ARG002  # some need it
        """Part of a prediction that metrics need; the rest is not stored."""
        return prediction


@dataclass(frozen=True)
class TaskDefinition:
    """One task."""

    name: str
    roles: tuple[str, ...]
    """Roles that it reads from a sample."""
    metrics: tuple[Metric, ...]
    """Metrics, the most common first."""
    evaluator: Callable[[EvaluatorContext], Evaluator]
    agreement_words: str
    """Definition of agreement, in words."""
    optional_roles: tuple[str, ...] = ()
    batch_size: int = 8
    """Default number of samples in one run, if dynamic in the graph."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return tuple(metric.name for metric in self.metrics)


def named_output(outputs: Outputs, *names: str) -> Array:
    """Return the first output with one of these names.

    Raises:
        InputError: no output has such a name.
    """
    for name in names:
        if name in outputs:
            return outputs[name]
    raise InputError(
        f"the model returns {', '.join(outputs)}, but the task needs {' or '.join(names)}",
        hint=f"Set {opt.task}, or export the model again for this task.",
    )


def refuse_slow_tokenizer(context: EvaluatorContext, needed: str) -> None:
    """Refuse a tokenizer without token offsets.

    Args:
        context: Context of the model.
        needed: Subject of the offsets, for the message.

    Raises:
        UsageError: the tokenizer is not from the tokenizers library.
    """
    tokenizer = context.processor("tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer of the checkpoint ({type(tokenizer).__name__}) does not provide token offsets, "
            f"which the predictions of the model require ({needed})",
            hint="Put a fast tokenizer (tokenizer.json) beside the model.",
        )


def token_masks(batch: Batch, tokenizer: Any) -> Array:
    """Mask of the non-padding tokens of each row: bool[rows, length], without rows that pad the batch."""
    mask = batch.feeds.get("attention_mask")
    if mask is None:
        # A model without a mask processes the padding too, but it is not part of the text.
        mask = batch.feeds["input_ids"] != (-1 if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    return batch.trimmed(np.asarray(mask > 0))
