"""Proofs of builds and exports: made from PyTorch when a folder is written, replayed where the folder is used."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.compared_models import compare_models, resolve_pairs
from winml.modelkit.builds.executions import measure_execution
from winml.modelkit.compare.proof.records import Proof, ProofPart, read_proof
from winml.modelkit.compare.proof.replay import RECORDED_PYTORCH, replay_part
from winml.modelkit.compare.proof.upgrade import check_upgrade, read_baseline, refuse_other_baseline
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.records import ProofReplay
from winml.modelkit.errors import ModelPathError, StageError, UsageError, VerificationError, first_line, opt
from winml.modelkit.file_names import ONLY_PART, PROOF_RECORD_NAME, files_folder
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import read_part_description
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.ort.host import available_cores, processor_name
from winml.modelkit.ort.machine import installed_versions
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.file_minimum import file_minimum
from winml.modelkit.words import count_noun, sqnr_words

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.builds.config import CompileSection
    from winml.modelkit.builds.plan import BuildPlan
    from winml.modelkit.compare.comparing import CompareOptions
    from winml.modelkit.compare.proof.execution import MeasureExecution
    from winml.modelkit.compare.proof.recording import ProofMaker
    from winml.modelkit.compare.proof.records import ProofRequest
    from winml.modelkit.compare.records import ModelComparison
    from winml.modelkit.ort.devices import ChosenProvider


def record_build(
    plan: BuildPlan, deployed: Mapping[str, Path], exported: Mapping[str, Path], request: ProofRequest
) -> ProofMaker:
    """Run the PyTorch model of a finished build on samples, and record its values and the quality of the files.

    The modules are those of the exported file if the folder has it: its values have the most names.

    Args:
        plan: The build.
        deployed: Part → the finished file.
        exported: Part → the exported file.
        request: Samples of the proof.

    Raises:
        UsageError: the user's values do not fit the inputs.
        InputError: a file is damaged.
        StageError: a file cannot be run.
    """
    from winml.modelkit.compare.by_module.onnx_side import OnnxSide
    from winml.modelkit.compare.comparing import open_in_torch
    from winml.modelkit.compare.proof.recording import ProofMaker
    from winml.modelkit.export.config import configured_request
    from winml.modelkit.models.request import processor_folder

    model = plan.request if plan.config.export is None else configured_request(plan.request, plan.config.export)
    maker = ProofMaker(request, "", len(deployed), processor_folder(plan.request))
    for name, path in deployed.items():
        tagged = exported.get(name, path)
        with open_in_torch(model, None, OnnxSide(tagged, by_module=False), {}) as reference:
            maker.model_class = type(reference.part.module).__name__
            provider = _built_provider(plan)
            try:
                maker.add(name, reference, tagged, path, file_minimum(path, provider), provider)
            except (StageError, UsageError) as error:
                if path == tagged or not _may_lack_device(plan.config.compile, provider):
                    raise
                maker.add(name, reference, tagged, tagged, file_minimum(tagged))
                reason = first_line(error)
                maker.notes.append(f"{path.name} cannot be opened here ({reason}): the proof uses {tagged.name}.")
        if plan.verify:
            _refuse_other_model(plan.request.model, maker.parts[-1], file_minimum(path, provider))
    return maker


_OTHER_MODEL_DB = 3.0
"""Chosen: independent outputs have an SQNR of -3 to 0 dB; no verified file is below."""


def _refuse_other_model(name: str, part: ProofPart, minimum: QualityMinimum) -> None:
    """Refuse a model that was loaded again with other weights, such as that of a factory without a seed.

    States of a KV cache, and scores whose agreement meets the minimum, may differ more.

    Raises:
        VerificationError: the outputs have nothing in common with those of the verified file.
    """
    states = part.states.values()
    judged = [
        output
        for output in part.outputs
        if output.name not in states
        and not (minimum.is_by_agreement(output.top1_agreement) and minimum.is_met(-math.inf, output.top1_agreement))
    ]
    worst = min(judged, key=lambda output: output.sqnr_db, default=None)
    if worst is not None and worst.sqnr_db < _OTHER_MODEL_DB:
        raise VerificationError(
            f"no proof was made: {name}, loaded again, returns other outputs than {part.file}, which was verified "
            f"({worst.name}: {sqnr_words(worst.sqnr_db)})",
            hint="If a factory makes the model, let it create the same weights in every call: torch.manual_seed(0).",
        )


def _built_provider(plan: BuildPlan) -> ChosenProvider | None:
    """Return the provider that a build compiled for; `None` for the CPU, or if it is missing on this machine."""
    from winml.modelkit.ort.devices import choose_provider

    section = plan.config.compile
    if section is None or section.ep is None:
        return None
    try:
        return choose_provider(section.ep, section.device, section.ep_options or {})
    except (UsageError, StageError):
        return None


def _may_lack_device(section: CompileSection | None, provider: ChosenProvider | None) -> bool:
    """Return True if a compiled file may not open on this machine: its provider is missing, or simulates its device."""
    is_compiled = section is not None and section.ep is not None
    return is_compiled and (provider is None or bool(provider.stand_in))


def find_proof(model: str) -> Path | None:
    """Return the folder with ``proof/`` of a model: the folder itself, or that of a file; `None` without a proof."""
    return next((folder for folder in _proof_folders(model) if (folder / PROOF_RECORD_NAME).is_file()), None)


def proof_folder(model: str) -> Path:
    """Return the folder with ``proof/`` of a model: the folder itself, or that of a file.

    Raises:
        UsageError: there is no proof, or no such file.
    """
    if not Path(model).exists():
        raise ModelPathError(f"{model}: no such file or folder", hint="Pass a build folder or an ONNX file.")
    if (folder := find_proof(model)) is not None:
        return folder
    raise UsageError(
        f"{model}: has no proof ({_proof_folders(model)[0] / PROOF_RECORD_NAME})",
        hint=f"Write one when the model is exported or built: winml export CHECKPOINT -o FILE.onnx {opt.proof}. "
        "To compare with PyTorch itself: winml compare CHECKPOINT FILE.onnx",
    )


def _proof_folders(model: str) -> list[Path]:
    """Return the folders that may contain the proof of a model."""
    path = Path(model)
    return [path] if path.is_dir() else [path.parent, files_folder(path)]


def resolve_verified(model: str, against: str | None, submodel: Sequence[str] = ()) -> Mapping[str, Path]:
    """Return part → file that is compared with the proof of a model.

    Args:
        model: Build folder or ONNX file with the proof.
        against: Folder or file that is compared in its place; ``None``: the model itself.
        submodel: Names of the parts; empty: all.

    Raises:
        UsageError: a name is no ONNX model, the part of a file is unknown, or a part is in one model only.
        InputError: a file is damaged.
    """
    pairs = resolve_pairs(model, against or model, submodel)
    if pairs.notes:
        raise UsageError(
            " ".join(pairs.notes), hint=f"Check some parts alone: {opt.submodel} {next(iter(pairs.parts))}"
        )
    parts = {}
    for part, (_, file) in pairs.parts.items():
        if not isinstance(file, Path):
            raise UsageError(f"{against or model}: is no ONNX model", hint="Pass a build folder or an ONNX file.")
        description = read_part_description(file) if part == ONLY_PART else None
        parts[description.name if description is not None and description.is_one_of_several else part] = file
    return parts


def replay_model(
    model: str,
    parts: Mapping[str, Path],
    *,
    by_module: bool = False,
    provider: ChosenProvider | None = None,
    min_sqnr_db: float | None = None,
    measures_execution: bool = False,
    baseline: Path | None = None,
) -> ProofReplay:
    """Run files on the inputs of a proof, and compare them with the recorded values of PyTorch.

    Args:
        model: Build folder or ONNX file with the proof.
        parts: Part → file, as :func:`resolve_verified` returns.
        by_module: Compare all modules, also of files within their limits.
        provider: Execution provider; ``None``: the CPU provider.
        min_sqnr_db: Minimum SQNR of every output, in dB; ``None``: the recorded limits, or those of the precisions of
            another file.
        measures_execution: Also measure kernels and times by module, and compare all modules that can be compared: the
            result is to be compared with that of another environment.
        baseline: JSON of a verification in another environment, to compare with.

    Raises:
        UsageError: there is no proof, a file has other inputs, outputs or parts, or the baseline is of another build or
            provider.
        InputError: a file is damaged.
        StageError: a file cannot be run.
    """
    proof = read_proof(proof_folder(model))
    earlier = None if baseline is None else read_baseline(baseline)
    measure = measure_execution if measures_execution or baseline is not None else None

    def replay(name: str, path: Path) -> ProofReplay:
        of_part = None if earlier is None else earlier.parts.get(name, earlier)
        if of_part is not None and baseline is not None:
            refuse_other_baseline(of_part, proof.part(name), provider, baseline.name)
        result = _replay_file(proof, name, path, by_module, provider, min_sqnr_db, measure)
        if of_part is None or baseline is None:
            return result
        if of_part.sha256 not in ("", result.sha256):
            note = f"{baseline.name} is the result of another file than {path.name}: differences may come from it."
            result = replace(result, notes=(*result.notes, note))
        return replace(result, upgrade=check_upgrade(result, of_part))

    replays = {name: replay(name, path) for name, path in parts.items()}
    if len(replays) == 1:
        return next(iter(replays.values()))
    whole = ProofReplay.of_parts(RECORDED_PYTORCH, model, replays)
    assert isinstance(whole, ProofReplay)
    return replace(whole, versions=proof.record.versions, environment=next(iter(replays.values())).environment)


def _replay_file(
    proof: Proof,
    name: str,
    path: Path,
    by_module: bool,
    provider: ChosenProvider | None,
    min_sqnr_db: float | None,
    measure: MeasureExecution | None,
) -> ProofReplay:
    part, sha256 = proof.part(name), hash_file(path)
    minimum = file_minimum(path, provider) if min_sqnr_db is None else QualityMinimum(min_sqnr_db)
    if part.sha256 == sha256 and min_sqnr_db is None:
        agreements = [value for value in (minimum.agreement, part.min_agreement) if value is not None]
        lowest = min(agreements) if len(agreements) > 1 else minimum.agreement
        minimum = QualityMinimum(min(minimum.sqnr_db, part.min_sqnr_db), lowest)
    result = replay_part(
        part,
        proof.arrays,
        path,
        minimum,
        by_module=by_module,
        provider=provider,
        sha256=sha256,
        measure=measure,
    )
    result = replace(
        result,
        versions=proof.record.versions,
        environment={name: version for name, version in installed_versions().items() if version is not None},
        machine=f"{processor_name()}, {count_noun(available_cores(), 'core')}",
    )
    return replace(result, notes=(*_change_notes(result), *result.notes))


def _change_notes(result: ProofReplay) -> Iterator[str]:
    """Note a changed file, or outputs that are worse than recorded with the module in which the error has grown."""
    words = ", ".join(
        f"{output} from {sqnr_words(before)} to {result.quality_words(output)}"
        for output, (before, _) in result.losses.items()
    )
    if words and result.is_loss_hidden:
        words += (
            ". The difference does not show in the first sample, the one whose modules are recorded: winml diff names "
            "the modules with other weights than an unchanged copy"
        )
    elif words and (origin := result.origin_of_loss) is not None:
        words += f". The error begins in {origin.identity.words} ({origin.identity.tag})"
    if result.is_changed_file:
        change = f"{Path(result.candidate).name} differs from the file that the proof was made of"
        yield f"{change}, and its quality is lower: {words}." if words else f"{change}."
    elif words:
        yield f"The quality of the same file is lower than when the proof was made: {words}."


_PROOF_KEYWORDS = {"by_module", "ep", "device", "ep_options"}
"""Keywords of :func:`verify_model` that also apply to a proof."""


@python_function(shape_config="run.sizes")
def verify_model(
    model: str | os.PathLike[str],
    reference: str | os.PathLike[str] | ModelRequest | nn.Module | None = None,
    options: CompareOptions | None = None,
    *,
    against: str | os.PathLike[str] | None = None,
    min_sqnr_db: float | None = None,
    submodel: Sequence[str] = (),
    baseline: str | os.PathLike[str] | None = None,
    **changes: Any,
) -> ModelComparison:
    """Compare an ONNX file with its proof, the recorded outputs of PyTorch (``winml verify``), or with PyTorch itself.

    With a proof, PyTorch is not needed.

    Args:
        model: ONNX file or build folder.
        reference: The PyTorch model or its checkpoint, to compare with PyTorch itself; None: the proof beside the file.
        options: As for :func:`compare_models`; of a proof, the samples and their sizes are recorded.
        against: File or folder that is compared with the proof in place of ``model``.
        min_sqnr_db: Minimum SQNR of every output, with a proof; None: the recorded limits.
        submodel: Names of the parts of a build folder to compare; empty: all.
        baseline: JSON of ``winml verify`` in another environment, to compare with: ``upgrade`` of the result.
        **changes: As for :func:`compare_models`, ``ep``, ``device`` and ``ep_options`` of the file included.

    Returns:
        The differences of outputs and, by module, where they begin; ``is_within`` of a proof: all outputs are within
        their limits.

    Raises:
        UsageError: there is neither a proof nor a reference; an argument does not apply to a proof; or as
            :func:`compare_models` raises.
        InputError: a file is damaged.
        StageError: one of the models cannot be run.

    Example:
        ```python
        result = verify_model("built")
        assert result.is_within, result.first_divergence
        ```
    """
    name = os.fspath(model)
    proof_options = {"against": against, "min_sqnr_db": min_sqnr_db, "baseline": baseline}
    stated = [key for key, value in proof_options.items() if value is not None]
    if reference is not None and not stated:
        return compare_models(reference, model, options, submodel=submodel, **changes)
    unread = [key for key, value in {"reference": reference, "options": options}.items() if value is not None]
    unread += [key for key in changes if key not in _PROOF_KEYWORDS]
    folder = proof_folder(name)
    if unread:
        other = f"omit {' and '.join(stated)}" if stated else "pass the module or its checkpoint as reference"
        raise UsageError(
            f"{unread[0]} does not apply to the proof in {folder}: its samples and reference outputs are recorded",
            hint=f"Omit {unread[0]}, or {other}.",
        )
    from winml.modelkit.ort.opened_model import RunOptions

    run = RunOptions(name, **{key: value for key, value in changes.items() if key != "by_module"})
    by_module = bool(changes.get("by_module"))
    return replay_model(
        name,
        resolve_verified(name, None if against is None else os.fspath(against), submodel),
        by_module=by_module,
        provider=run.stated_provider,
        min_sqnr_db=min_sqnr_db,
        measures_execution=by_module,
        baseline=None if baseline is None else Path(baseline),
    )
