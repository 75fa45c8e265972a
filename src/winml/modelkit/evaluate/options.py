"""Options of an evaluation, shared by the command, the build config and Python.

Imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import pydantic

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.options import Drop, Options, drop_words, read_drop

PYTORCH = "pytorch"
NO_BASELINE = "none"
AGREEMENT = "agreement"
"""Share of the samples with equal predictions of model and baseline; usable in limits like a metric."""
Text = Annotated[str, pydantic.Field(min_length=1)]
MetricLimits = dict[Text, Annotated[float, pydantic.Field(allow_inf_nan=False)]]


class EvaluationOptions(Options):
    """On which samples a model is judged, by which metrics, and what it has to reach."""

    dataset: Text
    """File or folder on this disk; or `name`, `owner/name` or `owner/name:config` at the Hub."""
    task: Text | None = None
    """Task whose metrics are meant. Null: the model's own."""
    split: Text | None = None
    """Split to read. Null: `validation`, else `test`, else `train`, else the only one."""
    columns: dict[Text, Text] = pydantic.Field(default_factory=dict)
    """Role to column, where the names of the columns do not say which is which."""
    samples: pydantic.PositiveInt | None = None
    """Samples to draw. Null: all."""
    batch_size: pydantic.PositiveInt | None = None
    """Samples in one run. Null: the fixed size of the model, else 8."""
    seed: pydantic.NonNegativeInt = 0
    """Seed of the draw and of the intervals."""
    metrics: tuple[Text, ...] = pydantic.Field(default=(), strict=False)
    """Metrics to report. Empty: all of the task."""
    baseline: Text | None = None
    """`pytorch`, an ONNX file or `none`. Null: `pytorch` where the checkpoint of the model is known, else none."""
    min: MetricLimits = pydantic.Field(default_factory=dict)
    """Metric, or `agreement`, to the least it has to reach."""
    max: MetricLimits = pydantic.Field(default_factory=dict)
    """Metric of which less is better, such as `wer`, to the most it may be."""
    max_drop: dict[Text, Drop] = pydantic.Field(default_factory=dict)
    """Metric to the most by which it may be worse than that of the baseline: a number, or a share such as `"5%"`."""

    @property
    def limited(self) -> tuple[str, ...]:
        """Metrics with a limit."""
        return tuple(dict.fromkeys((*self.min, *self.max, *self.max_drop)))


def parse_limits(texts: Iterable[str], option: str) -> dict[str, float]:
    """Parse repeated ``METRIC=VALUE`` options.

    Raises:
        UsageError: a text is malformed, or a metric has two values.

    >>> parse_limits(["accuracy=0.9"], "min")
    {'accuracy': 0.9}
    """
    limits: dict[str, float] = {}
    option = spell(option)
    for text in texts:
        name, equals, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not equals or not math.isfinite(value):
            raise UsageError(f"{option} {text!r}: expected METRIC=NUMBER", hint=f"For example {option} accuracy=0.9.")
        if limits.setdefault(name, value) != value:
            raise UsageError(f"{option}: {name} has two values, {limits[name]:g} and {value:g}", hint="Set it once.")
    return limits


def parse_drops(texts: Iterable[str]) -> dict[str, Drop]:
    """Parse repeated ``--max-drop METRIC=NUMBER`` or ``METRIC=PERCENT%`` options.

    Raises:
        UsageError: a text is malformed, or a metric has two values.
    """
    drops: dict[str, Drop] = {}
    for name, drop in map(read_drop, texts):
        if drops.setdefault(name, drop) != drop:
            values = f"{drop_words(drops[name])} and {drop_words(drop)}"
            raise UsageError(f"{opt.max_drop}: {name} has two values, {values}", hint="Set it once.")
    return drops
