"""Evaluation of quantized variants of a model on its task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from winml.modelkit.evaluate.evaluated_models import Subject, opened_model
from winml.modelkit.evaluate.evaluation import prepared_data
from winml.modelkit.evaluate.metrics import least_difference
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.evaluate.sides import CachedBatches, onnx_side
from winml.modelkit.evaluate.tasks.table import chosen_metrics, task_definition
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.quantized_variants import VariantEvaluator
from winml.modelkit.quantize.sensitivity_records import MetricTarget
from winml.modelkit.samples.data_sources import content_digests


@contextmanager
def variant_evaluator(model: Path, options: EvaluationOptions, target: tuple[str, float]) -> Iterator[VariantEvaluator]:
    """Yield an evaluator of quantized variants of an ONNX file.

    Args:
        model: The file, with config and processors in the same folder.
        options: Options with the samples.
        target: Metric of the model's task, and its required value.

    Raises:
        UsageError: the task has no evaluation or no such metric, a column is missing, or labels are not those of the
            model.
        InputError: a file is missing or damaged.
    """
    name, value = target
    with ExitStack() as stack:
        evaluated = opened_model(Subject(model, RunOptions(str(model))), options.task, stack)
        task = evaluated.task
        metrics = chosen_metrics(task_definition(task), (name,), "target")
        metric_options = options.model_copy(update={"metrics": (name,)})
        prepared = prepared_data(evaluated, metric_options, stack)
        prepared = replace(prepared, preprocessor=CachedBatches.keeping(prepared.preprocessor))
        del evaluated  # its session holds the weights, and only variants are run

        def measure_scores(session: Session) -> dict[str, float]:
            scores = prepared.scores([onnx_side(session, session.name, "cpu")])
            return {metric.name: scores.measured(metric)[0].value for metric in metrics}

        content = content_digests(options.dataset)
        request = {**metric_options.model_dump(mode="json"), "content": content, "task": task}
        least = least_difference(len(prepared.data_set)) if metrics[0].resolution == "each" else None
        yield VariantEvaluator(MetricTarget(name, value, metrics[0].is_higher_better, least), measure_scores, request)
