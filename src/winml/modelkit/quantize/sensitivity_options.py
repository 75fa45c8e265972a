"""Options of a sensitivity measurement, shared by the command and Python.

Imports nothing heavy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pydantic

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.options import Options, nearest
from winml.modelkit.quantize.declared_options import SensitivityFields
from winml.modelkit.quantize.sensitivity_records import FidelityTarget, Metric

_ITERATIONS = 30
"""Chosen: one run in each of the 30 block pairs of a latency comparison."""


class SensitivityOptions(SensitivityFields, Options):  # type: ignore[misc]  # Options is frozen by its config
    """Options of a sensitivity analysis: modules, samples and target."""

    sizes: dict[str, pydantic.PositiveInt] = pydantic.Field(default_factory=dict)
    """Sizes of dynamic dimensions, by name, by `input:axis`, or by key of --shape-config."""
    seed: pydantic.NonNegativeInt = 0
    """Seed of the random values."""
    iterations: pydantic.PositiveInt = _ITERATIONS
    """Timed runs, with a target: of the float model, of all modules quantized, and with those of the list in float."""
    processors: Path | None = None
    """Folder of the tokenizer or processor that makes samples. Null: that of the model."""
    measured: Path | None = None
    """File that keeps what was measured, until the answer is written. Null: nothing is kept."""
    overwrite: bool = False
    """Start anew where that file belongs to a run with other options."""

    def task_target(self, data_set: str | None) -> tuple[str, float] | None:
        """Return metric and value of a target of the task; ``None`` for a target of the outputs, or without a target.

        Args:
            data_set: The dataset; ``None``: no metric of a task can be measured.

        Raises:
            UsageError: the target is no metric with a number.
        """
        if self.target is None or data_set is None or self.target.partition("=")[0].strip() in get_args(Metric):
            return None
        from winml.modelkit.evaluate.options import parse_limits

        [target] = parse_limits([self.target], "target").items()
        return target

    def fidelity_target(self, data_set: str | None) -> FidelityTarget | None:
        """Return the target of the outputs; ``None`` for a target of the task, or without a target.

        Raises:
            UsageError: the metric is unknown, or the number is out of range.
        """
        is_of_outputs = self.target is not None and self.task_target(data_set) is None
        return parse_target(self.target) if self.target is not None and is_of_outputs else None


def parse_target(text: str) -> FidelityTarget:
    """Parse ``METRIC=NUMBER``.

    Raises:
        UsageError: the metric is unknown, or the number is out of range.

    >>> parse_target("sqnr_db=30").value
    30.0
    """
    metrics: tuple[Metric, ...] = get_args(Metric)
    name, equals, number = (part.strip() for part in text.partition("="))
    metric = next((metric for metric in metrics if metric == name), None)
    if metric is None or not equals:
        guess = nearest(name, metrics) if equals else None
        raise UsageError(
            f"{opt.target} {text!r}: {f'no metric is named {name!r}' if equals else 'expected METRIC=NUMBER'}",
            hint=f"{f'Did you mean {guess}? ' if guess else ''}Metrics: {', '.join(metrics)}, for example sqnr_db=30. "
            f"Task metrics such as accuracy=0.9 require {opt.dataset}.",
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if (
        not math.isfinite(value)
        or (metric == "cosine" and not -1 < value <= 1)
        or (metric == "relative_error" and value <= 0)
    ):
        expected = {"sqnr_db": "decibels", "cosine": "a number from -1 to 1", "relative_error": "a number above 0"}
        raise UsageError(
            f"{opt.target} {text!r}: expected {expected[metric]}", hint="For example sqnr_db=30 or cosine=0.99."
        )
    return FidelityTarget(metric, value)
