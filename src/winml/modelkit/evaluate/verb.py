"""Plan and run of ``winml eval``: evaluation of a model and its baseline on a dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.evaluate.declared_options import DataSetFields, data_set_files, declare_limits
from winml.modelkit.fields import DATASET, LIMITS, declare, refuse_stated
from winml.modelkit.options import Drop
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, PageAnswerRequest, plan_answer
from winml.modelkit.verbs.running import ProviderFields

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.evaluate.options import EvaluationOptions
    from winml.modelkit.evaluate.records import Evaluation
    from winml.modelkit.progress import OnStep, Progress


@dataclass(frozen=True, kw_only=True)
class EvalRequest(PageAnswerRequest, ProviderFields, DataSetFields):
    """Request of ``winml eval``."""

    model: NamedModel
    task: str | None = None
    load: dict[str, object] = field(default_factory=dict)
    """Option name → value for loading a checkpoint."""

    dataset: str | None = declare(None, DATASET, metavar="PATH|NAME", is_required=True, is_common=True)
    """Dataset: a file, a folder, or NAME[:CONFIG] on the Hub."""
    batch_size: int | None = declare(None, DATASET, minimum=1, default_words="by task")
    """Samples per run."""
    seed: int = declare(0, DATASET, minimum=0)
    """Seed of the sample selection and of the confidence intervals."""
    metrics: tuple[str, ...] = declare(
        (), LIMITS, spelling="--metric", metavar="NAME", default_words="all", is_common=True
    )
    """Metric to report."""
    baseline: str | None = declare(
        None,
        LIMITS,
        metavar="pytorch|FILE|none",
        default_words="the checkpoint that the file was exported from, if it is local",
        is_common=True,
    )
    """Model to compare with."""
    min: dict[str, float] = declare_limits("min", is_common=True)
    """Minimum value of a metric. If it is missed, the exit code is 3."""
    max: dict[str, float] = declare_limits("max")
    """Maximum of a metric where less is better. If it is exceeded, the exit code is 3."""
    max_drop: dict[str, Drop] = declare_limits("max_drop", is_common=True)
    """Maximum drop of a metric from the baseline, such as accuracy=0.01 (absolute) or accuracy=1% (relative). If it is
    exceeded, the exit code is 3."""


def plan_evaluation(request: EvalRequest) -> AnswerPlan[EvaluationOptions]:
    """Plan an evaluation. Nothing is written, and no model is loaded.

    Raises:
        UsageError: a name is unknown, options contradict each other, or a limit does not belong to the task.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    from winml.modelkit.builds.evaluated_models import named_baseline, refuse_named_adapters, refuse_unfit_limits
    from winml.modelkit.evaluate.options import EvaluationOptions
    from winml.modelkit.onnx.bundle import described_model
    from winml.modelkit.samples.data_sources import find_source

    request.refuse_unknown_provider()
    if request.model.path is None:
        refuse_stated(
            request,
            request.provider_options,
            "{} requires an ONNX file, and the model is a checkpoint, which PyTorch runs",
            "Omit it, or export the checkpoint first.",
        )
        refuse_named_adapters(request.load)
    find_source(str(request.dataset))
    options = EvaluationOptions(**{name: getattr(request, name) for name in EvaluationOptions.model_fields})
    path = request.model.path
    recorded = None if path is None or not path.is_file() else described_model(path).get("task")
    refuse_unfit_limits(options, recorded, is_section=False)
    baseline = named_baseline(options.baseline)
    plan = plan_answer(
        "eval",
        options,
        request,
        reads=(
            *request.model.files_read(),
            *([baseline] if isinstance(baseline, Path) else []),
            *data_set_files(request),
        ),
        steps=(PlannedStep("evaluating", f"{request.model.name} on {request.dataset}"),),
    )
    request.choose_provider()
    return plan


def run_evaluation(
    plan: AnswerPlan[EvaluationOptions],
    request: EvalRequest,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Recover files of killed commands, then evaluate.

    Raises:
        WinMLError: as :func:`winml.modelkit.evaluate.evaluation.evaluate` raises.
    """
    plan.recover()
    from winml.modelkit.builds.evaluated_models import named_subject
    from winml.modelkit.evaluate.evaluation import evaluate
    from winml.modelkit.ort.opened_model import RunOptions

    run = RunOptions(request.model.name, **request.provider_options)
    subject = named_subject(request.model.name, plan.subject, run, **request.load)
    return evaluate(subject, plan.subject, on_step=on_step, progress=progress)
