"""Plan and run of ``winml diff``: comparison of the structure and the weights of two ONNX files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.errors import ModelPathError
from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, PageAnswerRequest, plan_answer

if TYPE_CHECKING:
    from winml.modelkit.compare.records import StructureDiff


@dataclass(frozen=True, kw_only=True)
class DiffRequest(PageAnswerRequest):
    """Request of ``winml diff``."""

    before: Path = declare(None, MODEL, is_argument=True)
    """ONNX file or build folder before the change."""
    after: Path = declare(None, MODEL, is_argument=True)
    """ONNX file or build folder after the change."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """Also write the result to this file: JSON, or Markdown for .md."""


def plan_diff(request: DiffRequest) -> AnswerPlan[tuple[Path, Path]]:
    """Plan a structural comparison. Nothing is written.

    Raises:
        ModelPathError: a folder has no ONNX file.
        UsageError, OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    before, after = _find_file(request.before), _find_file(request.after)
    step = PlannedStep("comparing", f"{before} and {after}, by module, without running them")
    return plan_answer("diff", (before, after), request, reads=(before, after), steps=(step,))


def run_diff(plan: AnswerPlan[tuple[Path, Path]]) -> StructureDiff:
    """Recover files of killed commands, then compare.

    Raises:
        InputError: a file is no ONNX model, or its data is missing.
    """
    from winml.modelkit.compare.diff import diff_models

    plan.recover()
    return diff_models(*plan.subject)


def _find_file(path: Path) -> Path:
    """Return the ONNX file of a path; for a build folder, its model.

    Raises:
        ModelPathError: the folder has no ONNX file.
    """
    from winml.modelkit.builds.found_models import onnx_file

    if path.is_dir() and not any(path.glob("**/*.onnx")):
        raise ModelPathError(
            f"{path}: the folder contains no ONNX file",
            hint="Specify an ONNX file or a build folder; export checkpoints first.",
        )
    return onnx_file(str(path)) or path  # other errors are reported by the reader
