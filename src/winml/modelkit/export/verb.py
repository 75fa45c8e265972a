"""Command ``winml export`` as a library function: an ONNX file from a model, or fixed sizes in an ONNX file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winml.modelkit.errors import ConfigError, UsageError, opt
from winml.modelkit.export.declared_options import ExportFields, ProofFields
from winml.modelkit.fields import EXPORT, OUTPUT, declare
from winml.modelkit.file_names import ADAPTER_SUFFIX, proof_paths, sidecar_path
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_data, planned_file
from winml.modelkit.verbs.file_to_file import FileRequest, orphaned_data
from winml.modelkit.verbs.named_models import keyword_options, model_request

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.export.records import ExportResult
    from winml.modelkit.models.live_module import ExampleInputs
    from winml.modelkit.models.request import ModelRequest, ModelSource
    from winml.modelkit.onnx.files.output_files import ExportPaths
    from winml.modelkit.options import Options
    from winml.modelkit.progress import OnStep
    from winml.modelkit.transform.graph_file import GraphFileTask
    from winml.modelkit.transform.pin import Pinning


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ProofFields):
    """Request of ``winml export`` for a PyTorch model."""

    section: ClassVar[str] = "export"
    declaring: ClassVar[type] = ExportFields

    model: ModelRequest
    config: WinMLExportConfig
    """Options of the export."""
    origin: str = "export.{}"
    """Format of the name of a config key, for messages."""

    output: Path = declare(None, OUTPUT, short="-o", is_required=True, is_common=True)
    """ONNX file to write."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Overwrite existing files."""
    functions: str | None = declare(None, EXPORT, metavar="SELECTOR")
    """Write modules as ONNX functions. all: every module; classes: one function for modules of a class with equal
    graphs; or the modules of a selector."""
    tokenizer: bool = declare(True, OUTPUT)
    """Copy the config, tokenizer and processor files of the checkpoint beside the model."""
    with_report: bool = declare(False, OUTPUT, is_common=True)
    """Also write a Markdown report."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """Plan of an export."""

    request: ExportRequest
    model: ModelRequest
    """The model request, with the inputs and dynamic dimensions of the config."""


def plan_export(request: ExportRequest) -> ExportPlan:
    """Plan an export. Imports no model library before the request is checked; downloads nothing.

    Raises:
        UsageError: options are incompatible, a path is wrong, or an output exists.
        ConfigError: an option has no valid value.
        InputError: the path of the model holds no model, or its weights are damaged.
        WriteError: the output cannot be written.
    """
    from winml.modelkit.export.config import configured_request
    from winml.modelkit.models.checkpoints.adapters import adapter_files, read_adapters
    from winml.modelkit.models.request import resolve_source
    from winml.modelkit.onnx.files.output_files import ExportPaths, refuse_existing
    from winml.modelkit.ort.execution_providers import refuse_dynamic

    config = request.config
    model = configured_request(request.model, config, request.origin)
    if request.functions is not None and not config.hierarchy:
        raise UsageError(
            f"{opt.functions} {request.functions} requires tags, which {opt.no_hierarchy} does not write",
            hint="Omit one of them.",
        )
    paths = ExportPaths.for_output(request.output, with_sidecar=config.hierarchy, with_report=request.with_report)
    paths.refuse_existing(overwrite=request.overwrite)
    refuse_dynamic(config.ep, is_dynamic=model.is_dynamic, allow_dynamic=config.allow_dynamic)
    source = resolve_source(model)
    folder, notes = _checkpoint_folder(source, model)
    companions, orphans = _plan_companions(request, paths, folder)
    proof = () if request.proof_request(model.seed) is None else proof_paths(paths.model.parent)
    refuse_existing(proof, overwrite=request.overwrite)
    adapters = read_adapters(model.adapter)
    reads = (*(path for path in source.files if path.is_file()), *adapter_files(adapters).values())
    adapter_names = (adapter.name for adapter in adapters if adapter.name is not None)
    beside = tuple(paths.model.with_name(f"{name}{ADAPTER_SUFFIX}") for name in adapter_names)
    refuse_existing(beside, overwrite=request.overwrite)
    return ExportPlan(
        verb="export",
        reads=reads,
        writes=(
            planned_file(paths.model),
            planned_data(paths.model, only_if="the weights do not fit into the model"),
            *map(planned_file, filter(None, (paths.sidecar, paths.report))),
            *map(planned_file, (*beside, *proof, *companions)),
        ),
        steps=_plan_steps(request, model),
        notes=notes,
        removes=(*orphaned_data([paths.model], reads), *orphans),
        interrupted=interruptions_beside([paths.model]),
        request=request,
        model=model,
    )


def refuse_unloadable(plan: ExportPlan) -> None:
    """Raise the errors of an export that precede the loading of weights, for a plan that is not run.

    A factory is not called. For a Hub id without local files, the small files are downloaded.

    Raises:
        WinMLError: as :func:`run_export` raises.
    """
    from winml.modelkit.models.request import CHECKPOINT_KINDS, resolve_source

    if resolve_source(plan.model).kind not in CHECKPOINT_KINDS:
        return
    from winml.modelkit.export.loading import resolve_for_export
    from winml.modelkit.transform.module_functions import refuse_unregistered

    resolved = resolve_for_export(plan.model, plan.request.config)
    if plan.request.functions is not None:
        refuse_unregistered(resolved.model, plan.request.functions)


def run_export(plan: ExportPlan, on_step: OnStep | None = None) -> ExportResult:
    """Recover from killed commands, then export.

    Raises:
        WinMLError: the model cannot be loaded, traced or converted, or outputs of ONNX Runtime and PyTorch differ; no
            file was written.
    """
    from winml.modelkit.export.exporting import HTPExporter

    plan.recover()
    request = plan.request
    proof = request.proof_request(plan.model.seed)
    exporter = HTPExporter(request.config, seed=plan.model.seed, on_step=on_step, proof=proof)
    return exporter.export_checkpoint(
        plan.model,
        request.output,
        overwrite=request.overwrite,
        with_report=request.with_report,
        with_companions=request.tokenizer,
        functions=request.functions,
    )


def _checkpoint_folder(source: ModelSource, model: ModelRequest) -> tuple[Path | None, tuple[str, ...]]:
    """Return the local folder of the checkpoint, if any, and notes on facts known only after loading."""
    from winml.modelkit.models.request import CHECKPOINT_KINDS, cached_checkpoint

    folder, notes = source.path, []
    if source.kind == "hub":
        folder = cached_checkpoint(source, model)
        if folder is None:
            notes.append(f"{source.name} is downloaded first; its files are read in addition to those listed.")
    if source.kind in CHECKPOINT_KINDS:
        notes.append(
            "The number of parts is known when the model is loaded; the files of one part are listed. With several, "
            "each is written as <stem>_<part>.onnx."
        )
    return folder, tuple(notes)


def _plan_companions(
    request: ExportRequest, paths: ExportPaths, folder: Path | None
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the checkpoint files to write beside the model, and files of an earlier export to remove.

    Up-to-date files are in neither. Files are removed only with ``overwrite``, also if ``folder`` is `None`; files are
    written only with ``tokenizer``.
    """
    from winml.modelkit.models.checkpoints.companion_files import companion_files
    from winml.modelkit.onnx.files.companions import earlier_companions, outdated_companions

    directory = paths.model.parent
    owned = earlier_companions(sidecar_path(paths.model)) if request.overwrite else ()
    sources = companion_files(folder) if request.tokenizer and folder is not None else {}
    written = tuple(directory / name for name in outdated_companions(directory, sources, owned=owned))
    orphans = tuple(path for name in owned if name not in sources and (path := directory / name).is_file())
    return written, orphans


def _plan_steps(request: ExportRequest, model: ModelRequest) -> tuple[PlannedStep, ...]:
    from winml.modelkit.export.config import EXPORTER_ORDER, EXPORTER_WORDS, first_choice
    from winml.modelkit.export.records import STEPS

    config = request.config
    first_name, second_name = (EXPORTER_WORDS[name] for name in EXPORTER_ORDER)
    exporters = {
        "auto": f"{first_name}, or {second_name} if that fails",
        **{str(name): EXPORTER_WORDS[name] for name in EXPORTER_ORDER},
    }
    opset = config.opset_for(first_choice(config).name)
    weights = f"random weights, seed {model.seed}" if model.random_weights else "with its weights"
    compared = "compared with PyTorch in ONNX Runtime" if config.verify else "not compared"
    texts = (
        f"{model.model}: {weights}",
        f"random values with seed {model.seed}, "
        + ("as the inputs are stated" if model.input_specs is not None else "for inputs decided from the model"),
        "modules are recorded in one run of the model",
        f"{exporters[config.exporter]}, opset {opset}",
        "scopes of the trace matched with modules",
        f"nodes get the tags of their modules ({config.torch_module} of torch.nn)",
        "tags written to nodes" if config.hierarchy else f"left out: {opt.no_hierarchy}",
        f"{request.output}: {compared}",
    )
    return tuple(PlannedStep(name, text) for name, text in zip(STEPS, texts, strict=True))


@python_function(shape_config="sizes")
def export_model(
    model: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    inputs: ExampleInputs | None = None,
    *,
    config: WinMLExportConfig | None = None,
    overwrite: bool = False,
    with_report: bool = False,
    functions: str | None = None,
    proof: bool = False,
    proof_inputs: str | os.PathLike[str] | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> ExportResult:
    """Export a checkpoint or a module to ONNX; every node is tagged with its module (``winml export``).

    Args:
        model: Hub id, checkpoint, ``file.py:function`` or a ``torch.nn.Module``, which is not changed.
        output: Path of the ``.onnx`` file; sidecar and companion files are written beside it.
        inputs: Example inputs of a module; see :func:`~winml.modelkit.export_pytorch`.
        config: Options of the export; ``options`` override it.
        overwrite: Replace existing files.
        with_report: Also write the Markdown report.
        functions: Modules to write as ONNX functions: ``all``, ``classes`` or a selector.
        proof: Store a proof beside the model, for :func:`~winml.modelkit.verify_model`.
        proof_inputs: Inputs to store in the proof: an .npz file, or a folder of such files.
        on_step: Called when a step starts and when it ends.
        **options: Options of ``winml export``: ``opset_version``, ``exporter``, ``dynamic_batch``, ``ep`` and so on; of
            a checkpoint also ``task``, ``dtype``, ``sizes``, ``input_specs`` and the other options of loading.

    Returns:
        The record of the export; the files are written.

    Raises:
        ConfigError: an option is unknown.
        UsageError: an option or the model is wrong, or an output exists.
        ExportError: the model cannot be traced or converted.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ; no file was written.

    Example:
        ```python
        exported = export_model("checkpoint", "model.onnx", sizes={"sequence_length": 32}, opset_version=18)
        ```
    """
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.export.exporting import HTPExporter
    from winml.modelkit.options import unknown_key_message

    of_checkpoints = keyword_options("export_model", "", {}, sizes=None).keys() - {"model", "input_data"}
    known = of_checkpoints | WinMLExportConfig.model_fields.keys()
    for name in options:
        if name not in known:
            raise ConfigError(unknown_key_message(name, known, "export_model"))
    base = {} if config is None else config.stated_options()
    stated = {name: options.pop(name) for name in [*options] if name in WinMLExportConfig.model_fields}
    merged = WinMLExportConfig(**{**base, **stated})
    files: dict[str, Any] = {"overwrite": overwrite, "with_report": with_report, "functions": functions}
    proving = ProofFields(proof=proof, proof_inputs=None if proof_inputs is None else Path(proof_inputs))
    if not isinstance(model, (str, os.PathLike)):
        seed = options.pop("seed", 0)
        if options:
            raise UsageError(
                f"{next(iter(options))} applies to a checkpoint, and the model is a module", hint="Omit it."
            )
        exporter = HTPExporter(merged, seed=seed, on_step=on_step, proof=proving.proof_request(seed))
        return exporter.export(model, output, inputs, **files)
    if inputs is not None:
        raise UsageError("inputs are those of a module, and the model is a checkpoint", hint="Pass sizes instead.")
    request = model_request(keyword_options("export_model", model, options, dynamic_axes=()))
    exporter = HTPExporter(merged, seed=request.seed, on_step=on_step, proof=proving.proof_request(request.seed))
    return exporter.export_checkpoint(request, output, **files)


@dataclass(frozen=True, kw_only=True)
class PinRequest(FileRequest["Options", Any]):
    """Request of ``winml export`` for an ONNX file; ``sizes`` are the sizes to fix."""

    verb: ClassVar[str] = "export"

    @classmethod
    def options_record(cls) -> type[Options]:
        """Return the validated record of the options, which is empty."""
        from winml.modelkit.options import Options

        return Options

    def work(self, task: GraphFileTask, options: Options) -> Pinning:  # noqa: ARG002
        """Return the work that fixes the sizes."""
        from winml.modelkit.transform.pin import Pinning

        return Pinning(self.sizes or {})
