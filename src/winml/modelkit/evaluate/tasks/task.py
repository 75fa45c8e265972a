"""What a task is: what it reads of a sample, how outputs become predictions, and what is measured of them.

A prediction is what the pipeline of transformers answers for the same sample; tests compare the two.
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
    """What a task knows of the model and of the data before the first run."""

    preprocessor: Preprocessor
    config: Any
    """The config of the model, as transformers reads it; None where there is none."""
    folder: Path
    """Where config and processors lie."""
    data_set: DataSet
    columns: Mapping[str, str]
    """Role → column."""

    def processor(self, kind: ProcessorKind) -> Any:
        """Return a processor of the checkpoint, also one that makes no input of the graph.

        Raises:
            UsageError: there is none, or a package is missing.
            InputError: its files are damaged.
        """
        known = self.preprocessor.processors.get(kind)
        return known if known is not None else open_processor(kind, self.folder, self.data_set.request.option)

    def values(self, role: str) -> Iterator[Any]:
        """Yield the cells of the column of a role."""
        return (row[role] for row in self.data_set.rows({role: self.columns[role]}))


class Evaluator(ABC):
    """Makes predictions of outputs, and says which reference values they are compared with."""

    fed_per_sample = 1
    """What the model is fed for one sample: one text, or two of a pair that are fed by themselves."""
    notes: tuple[str, ...] = ()
    """What was decided because nobody said, one sentence each."""

    def fed(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield what the model is fed."""
        yield from samples

    @abstractmethod
    def reference(self, sample: Sample) -> Any:
        """Return what is right for a sample.

        Raises:
            UsageError: it is a label that the model does not have.
        """

    @abstractmethod
    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """Return what the model says of each row of a batch.

        Raises:
            InputError: an output that the task needs is not there.
        """

    def prediction(self, outputs: Sequence[Any], sample: Sample) -> Any:  # noqa: ARG002  # some need it
        """Return what the answers for one sample amount to: one for each row that was fed for it."""
        return outputs[0]

    def agreement(self, ours: Any, theirs: Any) -> float:
        """Return how far two predictions for one sample agree, 0 to 1."""
        return float(ours == theirs)

    def for_metrics(self, prediction: Any, reference: Any) -> Any:  # noqa: ARG002  # some need it
        """Return what metrics need of a prediction, which is all that is kept of it."""
        return prediction


@dataclass(frozen=True)
class TaskDefinition:
    """One task."""

    name: str
    roles: tuple[str, ...]
    """What it reads of a sample."""
    metrics: tuple[Metric, ...]
    """The most usual one first."""
    evaluator: Callable[[EvaluatorContext], Evaluator]
    agreement_words: str
    """When two predictions agree."""
    optional_roles: tuple[str, ...] = ()
    batch_size: int = 8
    """Samples in one run where nothing else is asked for, and the graph leaves it open."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return tuple(metric.name for metric in self.metrics)


def named_output(outputs: Outputs, *names: str) -> Array:
    """Return the first output of these names.

    Raises:
        InputError: there is none.
    """
    for name in names:
        if name in outputs:
            return outputs[name]
    raise InputError(
        f"the model returns {', '.join(outputs)}, but the task needs {' or '.join(names)}",
        hint=f"Set {opt.task}, or export the model again for this task.",
    )


def refuse_slow_tokenizer(context: EvaluatorContext, needed: str) -> None:
    """Refuse a tokenizer that does not say where in the text its tokens stand.

    Args:
        context: Of the model.
        needed: What its answers are of, for the message.

    Raises:
        UsageError: it is none of the tokenizers library.
    """
    tokenizer = context.processor("tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer of the checkpoint ({type(tokenizer).__name__}) does not provide token offsets, "
            f"which the predictions of the model require ({needed})",
            hint="Put a fast tokenizer (tokenizer.json) beside the model.",
        )


def token_masks(batch: Batch, tokenizer: Any) -> Array:
    """Return which tokens of each row are no padding: bool[rows, length], without rows that fill the batch up."""
    mask = batch.feeds.get("attention_mask")
    if mask is None:
        # A model without a mask reads the padding, too, but it is no part of the text.
        mask = batch.feeds["input_ids"] != (-1 if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    return batch.trimmed(np.asarray(mask > 0))
