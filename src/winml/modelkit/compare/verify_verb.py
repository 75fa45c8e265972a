"""Plan and run of ``winml verify``: the proof of a model, replayed on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.fields import LIMITS, MODEL, OUTPUT, declare
from winml.modelkit.file_names import proof_paths
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, ModuleAnswerRequest, plan_answer
from winml.modelkit.verbs.named_models import model_name
from winml.modelkit.verbs.running import DeviceFields

if TYPE_CHECKING:
    from winml.modelkit.compare.records import ProofReplay


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(ModuleAnswerRequest, DeviceFields):
    """Request of ``winml verify``."""

    model: str | None = declare(None, MODEL, short="-m", metavar="MODEL", is_common=True, is_also_argument=True)
    """Build folder, or ONNX file, with a proof beside it."""
    against: str | None = declare(None, MODEL, metavar="OTHER", is_common=True)
    """Check this folder or file in place of MODEL: a file that another tool wrote, or another variant of the model."""
    baseline: Path | None = declare(None, MODEL, metavar="JSON", is_common=True)
    """JSON result of winml verify in another environment. Changes are listed by module, and larger errors fail."""
    submodel: tuple[str, ...] = declare((), MODEL, metavar="PART")
    """Check only this part of a folder."""
    by_module: bool = declare(False, OUTPUT, is_common=True)
    """Compare every module, also if all outputs are within their limits."""
    min_sqnr: float | None = declare(
        None, LIMITS, metavar="DB", default_words="recorded, or that of the precision of another file", is_common=True
    )
    """Minimum SQNR (dB) of every output."""
    depth: int | None = declare(None, OUTPUT, minimum=1, default_words="all")
    """Levels of the module tree to show."""
    junit: Path | None = declare(None, OUTPUT, is_common=True)
    """Also write a JUnit report: a test case for each output and each compared module."""

    @property
    def named_model(self) -> str:
        """The model.

        Raises:
            UsageError: no model is specified.
        """
        return model_name({"model": self.model}, "a build folder or an ONNX file")


def plan_verification(request: VerifyRequest) -> AnswerPlan[Mapping[str, Path]]:
    """Plan a verification. Nothing is written, and no model is opened.

    Raises:
        UsageError: a name is no ONNX model, there is no proof, or options contradict each other.
        InputError: a file of a folder is damaged.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    from winml.modelkit.builds.found_models import source_files
    from winml.modelkit.builds.proofs import proof_folder, resolve_verified

    request.refuse_unknown_provider()
    model = request.named_model
    folder = proof_folder(model)
    parts = resolve_verified(model, request.against, request.submodel)
    return plan_answer(
        "verify",
        parts,
        request,
        reads=(
            *proof_paths(folder),
            *([] if request.baseline is None else [request.baseline]),
            *(file for path in parts.values() for file in source_files(path)),
        ),
        steps=[PlannedStep("verifying", f"{path} with the proof of {model}") for path in parts.values()],
        parts=list(parts),
    )


def run_verification(
    plan: AnswerPlan[Mapping[str, Path]], request: VerifyRequest, *, measures_execution: bool = False
) -> ProofReplay:
    """Recover files of killed commands, then replay the proof.

    Args:
        plan: The plan.
        request: The request.
        measures_execution: Also measure kernels and times by module, for the baseline of another environment.

    Raises:
        WinMLError: as :func:`winml.modelkit.builds.proofs.replay_model` raises.
    """
    plan.recover()
    from winml.modelkit.builds.proofs import replay_model
    from winml.modelkit.ort.opened_model import RunOptions

    return replay_model(
        request.named_model,
        plan.subject,
        by_module=request.by_module,
        provider=RunOptions(request.named_model, **request.provider_options).stated_provider,
        min_sqnr_db=request.min_sqnr,
        measures_execution=measures_execution,
        baseline=request.baseline,
    )
