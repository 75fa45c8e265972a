"""What a model has to reach: refused where the task has no such metric, and judged at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.options import AGREEMENT, EvaluationOptions
from winml.modelkit.evaluate.tasks.table import chosen_metrics
from winml.modelkit.evaluate.tasks.task import TaskDefinition
from winml.modelkit.flows.evaluate.sides import Side
from winml.modelkit.results.evaluation import Limit, MetricResult

__all__ = ["check_limits", "judged_limits", "limited_metrics", "refuse_limits_without_baseline"]


def check_limits(task: TaskDefinition, options: EvaluationOptions) -> None:
    """Refuse metrics and limits that the task does not have.

    Raises:
        UsageError: a metric is not of the task, or its limit is on the wrong side, or nothing can reach it.
    """
    chosen_metrics(task, options.metrics)
    directions = {metric.name: metric.is_higher_better for metric in task.metrics}
    for option, limits in (("--min", options.min), ("--max", options.max), ("--max-drop", options.max_drop)):
        names = [name for name in limits if name != AGREEMENT or option != "--min"]
        chosen_metrics(task, tuple(names), option)
        wrong = [name for name in names if directions[name] is (option == "--max")]
        if wrong and option != "--max-drop":
            other, words = ("--min", "more") if option == "--max" else ("--max", "less")
            raise UsageError(
                f"{option} {wrong[0]}={limits[wrong[0]]:g}: of {wrong[0]}, {words} is better",
                hint=f"Write {other} {wrong[0]}={limits[wrong[0]]:g}.",
            )
        _refuse_unreachable(option, limits)


def _refuse_unreachable(option: str, limits: Mapping[str, float]) -> None:
    """Refuse shares above one, which nothing reaches, and a drop below zero."""
    for name, value in limits.items():
        # Every metric of which more is better is a share, or a correlation.
        if option == "--min" and value > 1:
            raise UsageError(
                f"{option} {name}={value:g}: {name} is at most 1",
                hint=f"Write it as a share: {option} {name}={value / 100:g}." if value <= 100 else "Give a share.",
            )
        if option == "--max-drop" and value < 0:
            raise UsageError(
                f"{option} {name}={value:g}: is less than zero", hint="Write by how much worse it may be, such as 0.01."
            )


def limited_metrics(options: EvaluationOptions) -> tuple[str, ...]:
    """Return the metrics that a limit names."""
    return tuple(name for name in options.limited if name != AGREEMENT)


def refuse_limits_without_baseline(options: EvaluationOptions, baseline: Side | None) -> None:
    """Refuse limits that compare with a baseline where there is none.

    Raises:
        UsageError: names the first of them.
    """
    limits = {"--max-drop": options.max_drop, "--min": {k: v for k, v in options.min.items() if k == AGREEMENT}}
    for option, given in limits.items():
        if given and baseline is None:
            name = next(iter(given))
            raise UsageError(
                f"{option} {name}={given[name]:g} compares with a baseline, and there is none",
                hint="Name one with --baseline: pytorch, an ONNX file, or a checkpoint folder.",
            )


def judged_limits(
    options: EvaluationOptions, metrics: Sequence[MetricResult], agreement: float | None
) -> tuple[Limit, ...]:
    """Return every limit with what was measured."""
    values = {metric.name: metric.value for metric in metrics}
    if agreement is not None:
        values[AGREEMENT] = agreement
    drops = {metric.name: metric.drop for metric in metrics if metric.drop is not None}
    return (
        *(Limit("min", name, limit, values[name]) for name, limit in options.min.items()),
        *(Limit("max", name, limit, values[name]) for name, limit in options.max.items()),
        *(Limit("max_drop", name, limit, drops[name]) for name, limit in options.max_drop.items()),
    )
