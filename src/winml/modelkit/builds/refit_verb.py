"""Plan and run of ``winml refit``: other weights in a build, from its traced graph and its recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import (
    CheckpointError,
    InputError,
    ModelPathError,
    OutputExistsError,
    UsageError,
    opt,
    spell_options,
)
from winml.modelkit.export.declared_options import ProofFields
from winml.modelkit.fields import MODEL, OUTPUT, VERIFICATION, declare, fields_of
from winml.modelkit.file_names import BUILD_CONFIG_NAME, BUILD_MANIFEST_NAME, CHECKPOINT_CONFIG_NAME, refit_path
from winml.modelkit.metadata_keys import REFIT_KEY
from winml.modelkit.models.load_options import DTYPE_NAMES, Dtype
from winml.modelkit.python_functions import python_function
from winml.modelkit.verbs.named_models import model_name, stated_keywords

if TYPE_CHECKING:
    from winml.modelkit.builds.build import BuildListener
    from winml.modelkit.builds.manifest_records import BuildManifest, BuildResult
    from winml.modelkit.builds.planned_build import PlannedBuild


@dataclass(frozen=True, kw_only=True)
class RefitRequest(ProofFields):
    """Options of ``winml refit``."""

    model: str | None = declare(None, MODEL, short="-m", metavar="BUILD", is_common=True, is_also_argument=True)
    """Folder of a build made with winml build --refittable, or its ONNX file."""
    weights: str = declare("", MODEL, short="-w", metavar="CHECKPOINT", is_required=True, is_common=True)
    """Checkpoint with the other weights: a folder or a Hub id. Its architecture is that of the build."""
    adapter: tuple[str, ...] = declare((), MODEL, metavar="[NAME=]PATH", is_common=True)
    """Folder of a LoRA adapter (PEFT format), which is merged into the weights. With NAME=PATH it remains separate and
    is selected at run time."""
    dtype: Dtype | None = declare(None, MODEL, default_words="that of the build")
    """Convert floating-point weights to this type, such as for a build that was made with --dtype."""
    revision: str | None = declare(None, MODEL, default_words="main")
    """Branch, tag or commit of the checkpoint on the Hub."""
    trust_remote_code: bool = declare(False, MODEL)
    """Allow Python code from the checkpoint to run."""
    output: Path | None = declare(None, OUTPUT, short="-o", metavar="FOLDER", is_required=True, is_common=True)
    """Folder to write."""
    overwrite: bool = declare(False, OUTPUT)
    """Replace a build in the output folder. Files that were not written by a build are preserved."""
    verify: bool = declare(True, VERIFICATION, is_common=True)
    """Verify the outputs: PyTorch with the other weights is the reference."""


def plan_requested_refit(request: RefitRequest) -> PlannedBuild:
    """Plan a refit: stages and files. Writes nothing, fetches nothing.

    Raises:
        UsageError: the build cannot be refitted, or an option or a path is wrong.
        OutputExistsError: the output folder has a build, or a file that no build wrote.
        InputError: a file of the build or of the checkpoint is missing or invalid.
        WriteError: the folder cannot be written.
    """
    from winml.modelkit.builds.folder import refuse_input_as_output
    from winml.modelkit.builds.planned_build import planned_build
    from winml.modelkit.builds.recipes import plan_refit

    name = model_name({"model": request.model}, "the folder of a build")
    _refuse_other_weights(request.weights)
    if request.output is None:
        raise UsageError("no output folder is specified", hint="Use -o FOLDER.")
    folder, manifest = _find_build(name)
    if manifest.recipe is None:
        raise _missing_recipe(folder, manifest, request)
    graphs = _find_graphs(folder, manifest)
    dtype_of_build = _check_checkpoint(Path(request.weights), graphs)
    dtype = request.dtype or dtype_of_build
    refuse_input_as_output(request.output, [folder], ())
    if (request.output / BUILD_MANIFEST_NAME).exists() and not request.overwrite:
        raise OutputExistsError(
            f"output {request.output} holds a build already",
            hint=f"Choose another folder, or replace the build with {opt.overwrite}.",
        )
    recipe = manifest.recipe
    changes = {
        "model": request.weights,
        "adapter": request.adapter,
        "revision": request.revision,
        "trust_remote_code": request.trust_remote_code,
        "random_weights": False,
        **({} if dtype is None else {"dtype": dtype}),
    }
    seed = int(recipe.request.get("seed", 0))
    plan = plan_refit(recipe, folder, graphs, changes, verify=request.verify, proof=request.proof_request(seed))
    with spell_options({"random_weights": ""}):
        planned = planned_build(plan, request.output, rebuild=request.overwrite)
    notes = []
    if dtype != request.dtype:
        notes.append(f"The weights of {request.weights} are converted to {dtype}, the type of the build.")
    if manifest.proof is not None and plan.proof is None:
        notes.append(f"The proof of {folder} is of its own weights, and is left out; {opt.proof} makes another.")
    if recipe.request.get("adapter") and not request.adapter:
        notes.append(f"The adapters of {folder} are left out; {opt.adapter} adds some.")
    return replace(planned, verb="refit", reads=(*planned.reads, *graphs.values()), notes=tuple(notes))


def _refuse_other_weights(name: str) -> None:
    """Refuse weights that are no checkpoint.

    Raises:
        UsageError: no weights are named, or an ONNX file, the folder of a build or an adapter.
    """
    from winml.modelkit.builds.plan import is_onnx_path
    from winml.modelkit.models.checkpoints.adapters import ADAPTER_CONFIG_NAME
    from winml.modelkit.models.checkpoints.weight_files import find_weights

    if not name:
        raise UsageError(f"no checkpoint is specified: {opt.weights}", hint="Pass the checkpoint with the weights.")
    files, hint = Path(name), "Pass the checkpoint that the weights are saved in."
    if is_onnx_path(name):
        raise UsageError(f"{opt.weights} {name}: is an ONNX file, not a checkpoint", hint=hint)
    if (files / BUILD_MANIFEST_NAME).is_file() and find_weights(files) is None:
        raise UsageError(f"{opt.weights} {name}: is the folder of a build, not a checkpoint", hint=hint)
    if (files / ADAPTER_CONFIG_NAME).is_file() and not (files / CHECKPOINT_CONFIG_NAME).is_file():
        raise UsageError(
            f"{opt.weights} {name}: is an adapter, not a checkpoint",
            hint=f"Pass its base model with {opt.weights}, and the adapter with {opt.adapter} {name}.",
        )


def _missing_recipe(folder: Path, manifest: BuildManifest, request: RefitRequest) -> UsageError:
    """Return the error of a folder without a recipe: of a build, or made of a build by another command."""
    if not any(part.stages for part in manifest.parts):
        source = str(manifest.input.get("model"))
        return UsageError(
            f"{folder}: was made from {source} by a command such as winml quantize, and has no graph that other "
            "weights can be put into",
            hint=f"Refit {source}, and run that command on the result.",
        )
    config = folder / BUILD_CONFIG_NAME
    options = f"the options of {config}" if config.is_file() else "the same options"
    return UsageError(
        f"{folder}: was built without {opt.refittable}, so it has no graph that other weights can be put into",
        hint=f"Build {request.weights} instead, with {options} and {opt.refittable}.",
    )


def _check_checkpoint(folder: Path, graphs: Mapping[str, Path]) -> Dtype | None:
    """Compare a checkpoint on this disk with the graphs of a build before anything is loaded.

    Returns:
        The type to which weights have to be converted; ``None`` if they have the types of the build, are quantized, or
        are unknown.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another kind of model.
    """
    import onnx_ir as ir

    from winml.modelkit.models.checkpoints import weight_files
    from winml.modelkit.models.checkpoints.config import read_json_config
    from winml.modelkit.models.checkpoints.quantized.formats import folder_format
    from winml.modelkit.onnx.files.reading import read_structure

    config = folder / CHECKPOINT_CONFIG_NAME
    if not config.is_file():
        return None
    kind, types = read_json_config(config).get("model_type"), set[str]()
    for path in graphs.values():
        graph = read_structure(path)
        record = json.loads(next(entry.value for entry in graph.metadata_props if entry.key == REFIT_KEY))
        source = record["source"]
        expected = source["config"].get("model_type")
        if kind is not None and not source["config"]:
            raise CheckpointError(
                f"{folder}: its model type is {kind}, and the build is of {source['class']}, a class of Python code",
                hint="Only weights may differ. winml build builds another architecture.",
            )
        if None not in (kind, expected) and kind != expected:
            raise CheckpointError(
                f"{folder}: is a {kind} model, and the build is of a {expected} model",
                hint="Only weights may differ. winml build builds another architecture.",
            )
        inputs = {value.name: value.type.tensor_type.elem_type for value in graph.graph.input}
        types |= {str(ir.DataType(inputs[name]).numpy()) for name in record["weights"] if name in inputs}
    weights = weight_files.find_weights(folder)
    if weights is None or weights.format != "safetensors" or folder_format(folder) is not None:
        return None
    stored = {entry.dtype for entry in weight_files.stored_entries(weights.files).values()}
    of_build, of_checkpoint = types & DTYPE_NAMES.keys(), stored & {*DTYPE_NAMES, "float64"}
    is_other = len(of_build) == 1 and bool(of_checkpoint) and of_build != of_checkpoint
    return DTYPE_NAMES[of_build.pop()] if is_other else None


def _find_build(name: str) -> tuple[Path, BuildManifest]:
    """Return the folder of a build, named itself or by one of its files, and its manifest.

    Raises:
        ModelPathError: there is no such path.
        UsageError: the folder has no finished build.
    """
    from winml.modelkit.builds.manifest_records import find_manifest

    path = Path(name)
    if not path.exists():
        raise ModelPathError(f"{name}: no such file or folder", hint="Pass the folder of a build.")
    candidates = [path] if path.is_dir() else [path.parent, path.parent.parent]
    folder = next((folder for folder in candidates if (folder / BUILD_MANIFEST_NAME).is_file()), candidates[0])
    manifest = find_manifest(folder)
    if manifest is None:
        raise UsageError(
            f"{name}: has no build (no {BUILD_MANIFEST_NAME} {'in it' if path.is_dir() else 'beside it'})",
            hint=f"Pass the folder of a build made with {opt.refittable}.",
        )
    if manifest.status != "done":
        raise UsageError(f"{folder}: its build is not finished", hint="Finish it: run the same winml build again.")
    return folder, manifest


def _find_graphs(folder: Path, manifest: BuildManifest) -> dict[str, Path]:
    """Return part → file with its traced graph.

    Raises:
        InputError: a graph is missing or changed.
    """
    from winml.modelkit.onnx.files.content_digest import hash_file

    graphs = {}
    for part in manifest.parts:
        for stage in part.stages:
            names = {refit_path(Path(file.name)).as_posix() for file in stage.files[:1]}
            for file in (file for file in stage.files if file.name in names):
                graphs[part.name] = folder / file.name
                if not graphs[part.name].is_file() or hash_file(graphs[part.name]) != file.sha256:
                    raise InputError(
                        f"{graphs[part.name]} is missing or changed since the build",
                        hint=f"Build {manifest.input.get('model')} again: winml build repairs its folder.",
                    )
    if graphs.keys() != {part.name for part in manifest.parts}:
        raise InputError(
            f"{folder}: a part has no graph for winml refit", hint=f"Build it again, with {opt.refittable}."
        )
    return graphs


def run_planned_refit(plan: PlannedBuild, request: RefitRequest, listener: BuildListener) -> BuildResult:
    """Recover files of killed commands, then refit.

    Args:
        plan: The plan.
        request: The request of the plan.
        listener: Receives the progress.

    Raises:
        CheckpointError: the checkpoint is of another architecture.
        WinMLError: see :func:`winml.modelkit.builds.build.run_build`.
    """
    from winml.modelkit.builds.build import run_build

    plan.recover()
    with spell_options({"random_weights": "", "rebuild": str(opt.overwrite)}):
        result = run_build(plan.build, plan.folder, rebuild=request.overwrite, listener=listener)
    return replace(result, notes=(*result.notes, *plan.notes))


@python_function()
def refit_model(
    model: str | os.PathLike[str],
    weights: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    listener: BuildListener | None = None,
    **options: Any,
) -> BuildResult:
    """Put other weights into a build without tracing the model again (``winml refit``).

    Args:
        model: Folder of a build made with ``refittable=True``, or its ONNX file.
        weights: Checkpoint with the other weights.
        output: Folder to write.
        listener: Receives the progress.
        **options: Options of ``winml refit``: ``adapter``, ``overwrite``, ``verify``, ``proof`` and the like.

    Returns:
        The files of the refitted build, as of :func:`build_model`.

    Raises:
        UsageError: the build was made without ``refittable``, the output exists, or an option is wrong.
        CheckpointError: the checkpoint is of another architecture.
        InputError: a file is missing or damaged.
        StageError: a stage failed.
        VerificationError: the outputs differ from those of PyTorch.

    Example:
        ```python
        build_model("checkpoint", "from_python", refittable=True)
        result = refit_model("from_python", "fine-tuned", "refitted_here")
        ```
    """
    from winml.modelkit.builds.build import BuildListener

    stated: Mapping[str, Any] = {name: options.pop(name) for name in stated_keywords(RefitRequest, options)}
    if options:
        names = ", ".join(field.name for field in fields_of(RefitRequest))
        raise UsageError(f"refit_model has no option {next(iter(options))!r}", hint=f"Options: {names}.")
    request = RefitRequest(
        **{**stated, "model": os.fspath(model), "weights": os.fspath(weights), "output": Path(output)}
    )
    return run_planned_refit(plan_requested_refit(request), request, listener or BuildListener())
