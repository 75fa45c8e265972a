"""Search for a small model of a model type, and export of a model with a check of the tags in the written file.

The search finds the smallest config that PyTorch runs, with the loading and inputs of the product. The model is then
handled like ``--random-weights -m config.json``. Runs in a separate process.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch

from winml.modelkit.compare.verification.reference_run import prepared_part
from winml.modelkit.errors import (
    CheckpointError,
    ExportError,
    InternalError,
    UsageError,
    WinMLError,
    WriteError,
    first_line,
    import_error,
)
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.export.records import ExportResult
from winml.modelkit.models.caches.decision import CACHED_TASKS
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.models.model import load_resolved
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model
from winml.modelkit.models.tensors import draw_tensors
from winml.modelkit.sweep.records import Architecture, Attempt
from winml.modelkit.sweep.small_configs import WAYS, Aspect, default_content, shrink
from winml.modelkit.tags.tagging import all_nodes, read_tag

_MOST_PARAMETERS = 160_000_000
"""Chosen: a model of 640 MB is exported in seconds; larger models do not count as small."""

ReportState = Callable[[Architecture], None]


def find_small_model(
    model_type: str, folder: Path, task: str | None, report_state: ReportState = lambda _state: None
) -> Architecture:
    """Write the smallest config of a model type that PyTorch runs; return the description of its model.

    Warnings and logs of libraries are suppressed in the process from then on.

    Args:
        model_type: The model type.
        folder: Folder of its config.
        task: Task of the model; None: the task of its default config.
        report_state: Called with the preliminary result before each longer step.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    architecture = _find_small_config(model_type, config, task, report_state)
    # The path of the temporary config is of no use to a reader.
    return replace(architecture, problem=architecture.problem.replace(str(config), config.name))


def _find_small_config(model_type: str, config: Path, task: str | None, report_state: ReportState) -> Architecture:
    """Write the smallest config that PyTorch runs, and describe the model."""
    unbuilt = Architecture(model_type, state_before="not built", problem="it did not finish")
    report_state(unbuilt)
    try:
        content = default_content(model_type)
        is_generating = task is not None and canonical_task(task) in CACHED_TASKS
    except Exception as error:
        return replace(unbuilt, problem=f"no default config: {error_line(error)}")
    if is_generating and "is_decoder" in content:
        # Encoders with this key can be used as decoders.
        content["is_decoder"] = True

    def write_config(aspects: Sequence[Aspect]) -> None:
        config.write_text(json.dumps(shrink(content, aspects)), encoding="utf-8", newline="\n")

    refusals: list[Architecture] = []
    fallback: Architecture | None = None
    for aspects in WAYS:
        write_config(aspects)
        retained_large = tuple(aspect for aspect in WAYS[0] if aspect not in aspects)
        start = replace(unbuilt, retained_large=retained_large)
        architecture, is_final = _try_config(
            start, ModelRequest(str(config), random_weights=True, task=task), report_state
        )
        if is_final or (architecture.is_attempted and (not is_generating or architecture.keeps_cache)):
            return architecture
        if architecture.is_attempted:
            # A smaller config may lack the layers with a KV cache.
            fallback = fallback or architecture
        else:
            refusals.append(architecture)
    if fallback is not None:
        write_config([aspect for aspect in WAYS[0] if aspect not in fallback.retained_large])
        return fallback
    # The reason of the config that progressed furthest; of several, the smallest.
    return max(refusals, key=lambda refusal: refusal.state_before == "not run")


def _try_config(
    architecture: Architecture, request: ModelRequest, report_state: ReportState
) -> tuple[Architecture, bool]:
    """Build a model from the written config and run it once.

    Returns:
        The description of the model, and True if other sizes would fail with the same error.
    """
    try:
        model = resolve_model(request)
    except CheckpointError as error:
        return replace(architecture, problem=error_line(error)), isinstance(error.__cause__, ImportError)
    except Exception as error:
        problem = error_line(error)
        is_final = isinstance(error, UsageError) or import_error(error) is not None
        return replace(architecture, state_before="not run", problem=problem), is_final
    architecture = replace(
        architecture,
        class_name=type(model.model).__name__,
        parameters=sum(parameter.numel() for parameter in model.model.parameters()),
        inputs=tuple(spec.name for part in model.parts for spec in part.inputs),
        keeps_cache=any(spec.cache is not None for part in model.parts for spec in part.inputs),
    )
    if architecture.parameters > _MOST_PARAMETERS:
        problem = f"too large: {architecture.parameters / 1e6:.0f} million parameters"
        return replace(architecture, problem=problem), False
    architecture = replace(architecture, state_before="not run")
    report_state(architecture)
    try:
        for part in load_resolved(model, request).parts:
            _run_forward(part)
    except Exception as error:
        return replace(architecture, problem=error_line(error)), False
    return replace(architecture, state_before="", problem=""), False


def _run_forward(part: ModelPart) -> None:
    """Run a part in PyTorch on inputs of the same shapes as at export."""
    with torch.no_grad(), prepared_part(part) as prepared:
        prepared.model(*draw_tensors(part, seed=1).values())


def tried_export(request: ModelRequest, config: WinMLExportConfig, path: Path) -> Attempt:
    """Export a model, and check that every node of the written files has the tag of an executed module.

    Args:
        request: The model.
        config: Options of the export.
        path: Path of the written file.
    """
    start = time.perf_counter()
    try:
        attempt = _check_files(HTPExporter(config).export_checkpoint(request, path, overwrite=True))
    except WriteError:
        raise  # not caused by the model
    except WinMLError as error:
        attempt = Attempt(is_verified=False, problem=error_line(error), exit_code=error.exit_code, step=error.step)
        if isinstance(error, ExportError):
            attempt = replace(attempt, module=error.module or "", operator=error.operator or "")
    except Exception as error:
        attempt = Attempt(is_verified=False, problem=unforeseen_line(error), exit_code=1)
    return replace(attempt, seconds=round(time.perf_counter() - start, 2))


def _check_files(result: ExportResult) -> Attempt:
    """Read the written files, check the tag of every node, and return the combined result of all parts.

    Nodes and tags are of all parts; coverage, difference and generated tokens are of the worst part. A missing or wrong
    tag is a problem in the result, not an error.
    """
    tag_of_module = {node.path: node.tag for part in result.parts for node in part.tree}
    tags = set()
    problems = []
    nodes = [node for part in result.parts for node in all_nodes(ir.load(part.model_path))]
    for node in nodes:
        tag = read_tag(node)
        if tag is None:
            problems.append(f"node {node.name} has no tag")
        elif tag_of_module.get(tag.module) != tag.tag:
            problems.append(f"node {node.name}: no module {tag.module} has the tag {tag.tag}")
        else:
            tags.add(tag.tag)
    verifications = [part.verification for part in result.parts if part.verification is not None]
    assert len(verifications) == len(result.parts)  # verification is on
    exporters = {part.exporter: part.exporter_reason for part in result.parts}
    texts = [verification.generation for verification in verifications if verification.generation is not None]
    equal_tokens = [text.new_tokens if text.stopped_after is None else text.stopped_after for text in texts]
    caches = [spec.cache.kind for part in result.parts for spec in part.inputs if spec.cache is not None]
    assumptions = [assumption.words for verification in verifications for assumption in verification.assumed or ()]
    problem = f"equal, but not verified for other inputs: {', '.join(assumptions)}" if assumptions else ""
    if problems:
        problem = f"{len(problems)} of {len(nodes)} nodes: {problems[0]}"
    return Attempt(
        is_verified=all(verification.is_verified for verification in verifications) and not problems,
        exporter=" and ".join(exporters),
        note="; ".join(dict.fromkeys(exporters.values())),
        problem=problem,
        exit_code=1 if problems else 0,
        nodes=len(nodes),
        coverage_percent=min(part.coverage.percent for part in result.parts),
        tags=tuple(sorted(tags)),
        relative_diff=max(verification.worst.relative_diff for verification in verifications),
        cache=tuple(dict.fromkeys(caches)),
        generated_tokens=min(equal_tokens, default=0),
        remarks=result.notes,
    )


def error_line(error: BaseException) -> str:
    """Format an error on one line, as on the command line."""
    if isinstance(error, InternalError):
        return f"internal error: {error.message}"
    if isinstance(error, WinMLError):
        return next(iter(error.message.splitlines()), type(error).__name__)
    broken = import_error(error)
    return f"{type(error).__name__}: {first_line(error)}" if broken is None else broken.message


def unforeseen_line(error: Exception) -> str:
    """Format an error of foreign code on one line, as on the command line: a bug, or a broken package."""
    return error_line(error) if import_error(error) is not None else f"internal error: {error_line(error)}"
