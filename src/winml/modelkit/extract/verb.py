"""Request, plan and run of ``winml extract``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import MODEL, OUTPUT, declare, fields_of
from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_file
from winml.modelkit.tags.selector import Selector
from winml.modelkit.verbs.named_models import (
    files_read,
    keyword_options,
    named_parts,
    options_of_part,
    runnable_model,
)

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.extract.extraction import ExtractOptions, PlannedCuts
    from winml.modelkit.extract.records import ExtractResult
    from winml.modelkit.progress import OnStep


WHOLE = ""
"""Part name for a model with one graph, and for a single specified part."""


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

    Modules are read from the graph. If the model must be exported first, the plan lists the manifest only.

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


def run_extraction(plan: ExtractPlan, path: Path, on_step: OnStep | None = None) -> ExtractResult:
    """Recover partial results of killed commands, and write the modules.

    Args:
        plan: The plan.
        path: The ONNX file of the model, exported if necessary.
        on_step: Called when a step starts and when it ends.

    Raises:
        WinMLError: the model does not run, or outputs of a cut module differ from those inside the model.
    """
    from winml.modelkit.extract.extraction import extract_from_file

    plan.recover()
    request = plan.request
    return extract_from_file(
        path, request.module, request.output, request.options(), on_step=on_step, planned=plan.planned
    )


def extract_requests(options: Mapping[str, Any]) -> dict[str, ExtractRequest]:
    """Return part with a selected module → request; a model of one graph has the part name :data:`WHOLE`.

    Args:
        options: Values of all options by name, with ``model``.

    Raises:
        UsageError: no model is specified, nothing exists at its path, or no part has a selected module.
    """
    Selector(options["module"])
    parts = named_parts(options)
    if len(parts) < 2:
        return {WHOLE: _request(next((options_of_part(options, path) for path in parts.values()), options))}
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module

    return {
        part: _request({**options_of_part(options, parts[part]), "output": options["output"] / part})
        for part in parts_with_module(part_modules(parts), options["module"])
    }


def _request(options: Mapping[str, Any]) -> ExtractRequest:
    """Return the request for one graph; refuse invalid names and paths before heavy imports."""
    model, run = runnable_model(options)
    protected = tuple(files_read(model, options))
    fields = {field.name: options[field.name] for field in fields_of(ExtractRequest)}
    return ExtractRequest(model=model, run=run, protected=protected, **fields)


@python_function(shape_config="sizes")
def extract_modules(
    model: str | os.PathLike[str],
    module: str,
    output: str | os.PathLike[str],
    *,
    on_step: OnStep | None = None,
    **options: Any,
) -> Any:
    """Extract modules of a model as separate ONNX models (``winml extract``).

    Args:
        model: ONNX file, build folder, checkpoint, Hub id or factory; a checkpoint is exported into the cache first.
        module: Modules to extract, by class, module path or tag: ``BertAttention``, ``encoder.layer.0.*``.
        output: Folder to write to.
        on_step: Called when a step starts and when it ends.
        **options: Options of ``winml extract``: ``with_inputs``, ``overwrite``, ``input_data``, ``sizes``, and options
            of loading.

    Returns:
        The written models and their comparison with the modules inside the model; for a folder of several parts,
        part → result.

    Raises:
        ConfigError: an option is unknown.
        UsageError: no module matches, or a file exists.
        VerificationError: outputs of an extracted model differ from those inside the model.

    Example:
        ```python
        extract_modules("model.onnx", "BertAttention", "attention")
        ```
    """
    from winml.modelkit.builds.build_model import exported_file

    given = {**options, "module": module, "output": Path(output)}
    more: dict[str, Any] = {"input_data": None, "dynamic_axes": (), "export_config": None}
    values = keyword_options("extract_modules", model, given, ExtractRequest, DynamicFields, **more)
    requests = extract_requests(values)
    plans = {part: plan_extraction(request) for part, request in requests.items()}
    results = {
        part: run_extraction(plan, exported_file(plan.request.model, on_step), on_step) for part, plan in plans.items()
    }
    return results.get(WHOLE, results)
