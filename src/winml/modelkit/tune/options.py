"""The frozen options of a tuning: of the command and of Python alike.

Imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pydantic

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.options import EvaluationOptions, MetricLimits
from winml.modelkit.options import Options, nearest
from winml.modelkit.results.tuning import KINDS, CandidateKind, TuneTarget

__all__ = ["DEFAULT_MIN_SQNR_DB", "TuneOptions", "parse_kinds"]

DEFAULT_MIN_SQNR_DB = 30.0
"""Chosen: the noise is a thousandth of the signal's power; classifiers and embeddings hardly notice it."""
DRAWS = 4
"""Sets of random values. Chosen: as many as a sensitivity takes, so that both speak of the same values."""
Text = Annotated[str, pydantic.Field(min_length=1)]


class TuneOptions(Options):
    """What is looked for, among what, and how right it has to be."""

    target: TuneTarget = "latency"
    """`latency` of one run, `size` of the file, or `throughput`: samples in a second, with runs at a time."""
    min_sqnr_db: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    """Ratio of signal to error in decibels that every output has to reach beside the plain file. Null: 30, or none
    where `max_drop` says what is right."""
    max_drop: MetricLimits = pydantic.Field(default_factory=dict)
    """Metric of the task to the most by which it may be worse than that of the plain file, on `dataset`."""
    dataset: Text | None = None
    """Samples that `max_drop` is judged by: a file, a folder, or a name at the Hub."""
    split: Text | None = None
    """Split of the data set."""
    columns: dict[Text, Text] = pydantic.Field(default_factory=dict)
    """Role to column of the data set."""
    samples: pydantic.PositiveInt | None = None
    """Samples of the data set to draw. Null: all."""
    budget_minutes: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None
    """When this time is over, nothing new is begun. Null: the whole plan."""
    only: tuple[CandidateKind, ...] = ()
    """Kinds of candidates to try. Empty: all."""
    calibration_data: Text | None = None
    """Where the ranges of activations come from, for `qdq`. Null: random values."""
    input_data: Path | None = None
    """An .npz file with an array for each input, in place of random values."""
    sizes: dict[str, pydantic.PositiveInt] = pydantic.Field(default_factory=dict)
    """Sizes of open dimensions to run at, by name or by key of --shape-config."""
    batch_size: pydantic.PositiveInt | None = None
    """Batch size to run at, of an ONNX file."""
    seed: pydantic.NonNegativeInt = 0
    """Seed of the random values."""
    draws: pydantic.PositiveInt = DRAWS
    """Sets of random values that answers are compared on."""

    @property
    def least_sqnr_db(self) -> float | None:
        """The ratio that is asked for; None: none."""
        return DEFAULT_MIN_SQNR_DB if self.min_sqnr_db is None and not self.max_drop else self.min_sqnr_db

    @property
    def sizes_to_fix(self) -> dict[str, int]:
        """The sizes that are given for open dimensions of an ONNX file; where there are any, a file may fix them."""
        return {**self.sizes, **({} if self.batch_size is None else {"batch_size": self.batch_size})}

    @property
    def evaluation(self) -> EvaluationOptions | None:
        """What judges a candidate by the samples of a data set; None without one."""
        if self.dataset is None:
            return None
        return EvaluationOptions(
            dataset=self.dataset,
            split=self.split,
            columns=dict(self.columns),
            samples=self.samples,
            seed=self.seed,
            max_drop=dict(self.max_drop),
        )

    def refuse_contradictions(self) -> None:
        """Refuse options that do not go together.

        Raises:
            UsageError: a drop without a data set, or a data set without one; values of two kinds; a missing file.
        """
        if self.max_drop and self.dataset is None:
            name = next(iter(self.max_drop))
            raise UsageError(
                f"--max-drop {name}={self.max_drop[name]:g}: nothing says on which samples {name} is measured",
                hint="Add --dataset with a file, a folder or a name at the Hub.",
            )
        if self.dataset is not None and not self.max_drop:
            raise UsageError(
                f"--dataset {self.dataset}: nothing says what is to be reached on it",
                hint="Add --max-drop with a metric of the task, such as accuracy=0.01.",
            )
        if self.dataset is None and (
            passed := [name for name in ("split", "columns", "samples") if getattr(self, name)]
        ):
            raise UsageError(
                f"--{passed[0]} has no meaning without --dataset", hint="Leave it out, or give a data set."
            )
        if self.input_data is not None and (self.sizes or self.batch_size is not None):
            option = "--shape-config" if self.sizes else "--batch-size"
            raise UsageError(
                f"{option}: --input-data {self.input_data} has values, and their sizes", hint="Give one of the two."
            )
        self._refuse_missing_files()

    def _refuse_missing_files(self) -> None:
        if self.input_data is not None and not self.input_data.is_file():
            raise UsageError(f"--input-data {self.input_data}: no such file", hint="Give the path of an .npz file.")
        if self.calibration_data is not None:
            from winml.modelkit.flows.quantize.calibration_files import calibration_kind

            calibration_kind(self.calibration_data)


def parse_kinds(texts: tuple[str, ...]) -> tuple[CandidateKind, ...]:
    """Read the kinds of candidates, several of them in one text or in several.

    Raises:
        UsageError: there is no such kind.

    >>> parse_kinds(("dynamic,qdq", "level"))
    ('dynamic', 'qdq', 'level')
    """
    found: dict[CandidateKind, None] = {}
    for word in (part.strip() for text in texts for part in text.split(",")):
        kind = next((kind for kind in KINDS if kind == word), None)
        if kind is None:
            guess = nearest(word, KINDS)
            raise UsageError(
                f"--only {word!r}: there is no such kind of candidates",
                hint=f"{f'Did you mean {guess}? ' if guess else ''}Kinds: {', '.join(KINDS)}.",
            )
        found[kind] = None
    return tuple(found)
