"""Request, plan and run of ``winml extract``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_file

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.extract.extraction import ExtractOptions, PlannedCuts
    from winml.modelkit.extract.records import ExtractResult
    from winml.modelkit.progress import StepEvent


@dataclass(frozen=True, kw_only=True)
class ExtractRequest:
    """Request of ``winml extract`` for one graph."""

    model: NamedModel
    run: Mapping[str, Any]
    """Fields of ``RunOptions`` for the run of the whole model."""
    protected: tuple[Path, ...]
    """Files that are read and may not be replaced."""
    module: str = declare(None, MODEL, metavar="SELECTOR", is_required=True, is_common=True)
    """Modules to extract, by class, module path or tag."""
    output: Path = declare(None, OUTPUT, short="-o", is_required=True, is_common=True)
    """Folder to write to."""
    with_inputs: bool = declare(False, OUTPUT, is_common=True)
    """Also write the inputs and outputs of each module (.npz)."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Overwrite existing files."""

    def options(self) -> ExtractOptions:
        """Return the options of the extraction."""
        from winml.modelkit.extract.extraction import ExtractOptions
        from winml.modelkit.ort.opened_model import RunOptions

        return ExtractOptions(
            RunOptions(**self.run), protected=self.protected, with_inputs=self.with_inputs, overwrite=self.overwrite
        )


@dataclass(frozen=True, kw_only=True)
class ExtractPlan(Plan):
    """Plan of an extraction."""

    request: ExtractRequest
    planned: PlannedCuts | None
    """The cuts; `None` if the model must be exported first."""


def plan_extraction(request: ExtractRequest) -> ExtractPlan:
    """Plan an extraction: cut modules out in memory, and write nothing.

    The modules of a model are read from its graph. If the model must be exported first, the plan lists the manifest
    only.

    Raises:
        UsageError: the selector matches nothing, or an output exists or is an input.
        InputError: the file is damaged or has no tags.
        WriteError: the folder cannot be written.
    """
    from winml.modelkit.onnx.files.output_files import refuse_existing

    manifest = request.output / EXTRACT_MANIFEST_NAME
    refuse_existing([manifest], overwrite=request.overwrite)
    path, planned = request.model.path, None
    outputs: tuple[Path, ...] = ()
    export = None
    notes: tuple[str, ...] = ()
    cut_words = f"those of {request.module}"
    if path is None:
        from winml.modelkit.builds.cache import plan_cached_export

        assert request.model.request is not None
        export = plan_cached_export(request.model.request)
        notes = ("The modules are known after the export, so their files are not listed.",)
    else:
        from winml.modelkit.extract.extraction import plan_cuts

        planned = plan_cuts(path, request.module, request.output, request.options())
        outputs = planned.outputs
        cut_words += f": {len(planned.cuts.calls)}" + "".join(
            f"; {refused.identity.words} cannot be extracted: {refused.reason}" for refused in planned.cuts.refused
        )
    files = (*outputs, *((manifest,) if outputs or path is None else ()))
    return ExtractPlan(
        verb="extract",
        reads=tuple(path for path in request.protected if path.exists()),
        writes=(*(export.writes if export else ()), *map(planned_file, files)),
        steps=(
            *(export.steps if export else ()),
            PlannedStep("modules cut", cut_words),
            PlannedStep("activations recorded", "the whole model is run once"),
            PlannedStep("models written and checked", f"each compared with the whole model, in {request.output}"),
        ),
        notes=notes,
        interrupted=interruptions_beside([manifest]),
        request=request,
        planned=planned,
    )


def run_extraction(plan: ExtractPlan, path: Path, on_step: Callable[[StepEvent], None] | None = None) -> ExtractResult:
    """Recover partial results of killed commands, and write the modules.

    Args:
        plan: The plan.
        path: The ONNX file of the model, exported if necessary.
        on_step: Called when a step starts and when it ends.

    Raises:
        WinMLError: the model does not run, or outputs of a cut module differ from those inside the model.
    """
    from winml.modelkit.extract.extraction import extract_modules

    plan.recover()
    request = plan.request
    return extract_modules(
        path, request.module, request.output, request.options(), on_step=on_step, planned=plan.planned
    )
