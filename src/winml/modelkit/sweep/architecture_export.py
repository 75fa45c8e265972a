"""Finds a small model of a model type, and exports a model with a check of the tags in the written file.

The smallest config that PyTorch runs is found with the loading and the inputs of the product; then it is a model like
``--random-weights -m config.json``. Runs in a process of its own.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch

from winml.modelkit.compare.generation import GenerationInfo
from winml.modelkit.errors import (
    CheckpointError,
    ExportError,
    InternalError,
    UsageError,
    WinMLError,
    WriteError,
    first_line,
)
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.tensors import to_torch
from winml.modelkit.flows.export.export import HTPExporter
from winml.modelkit.hierarchy.tagging import all_nodes, read_tag
from winml.modelkit.load.caches.decision import CACHED_TASKS
from winml.modelkit.load.checkpoints.task import canonical_task
from winml.modelkit.load.model import load_resolved
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.load.resolution import resolve_model
from winml.modelkit.results.export_result import ExportResult
from winml.modelkit.results.sweep import Architecture, Attempt
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.sweep.small_configs import WAYS, Aspect, default_content, shrink
from winml.modelkit.verify.reference_run import prepared_part

__all__ = ["ExportOrder", "error_line", "find_small_model", "tried_export"]

MOST_PARAMETERS = 160_000_000
"""Chosen: a model of 640 MB is exported in seconds; a larger one does not count as small."""

ReportState = Callable[[Architecture], None]


@dataclass(frozen=True)
class ExportOrder:
    """A small model to find."""

    model_type: str
    folder: Path
    """Folder of its config."""
    task: str | None = None
    """What the model is for; None: whatever its default config says."""


def find_small_model(order: ExportOrder, report_state: ReportState = lambda _state: None) -> Architecture:
    """Write the smallest config of a model type that PyTorch runs; return the description of its model.

    Args:
        order: Which model type.
        report_state: Called with the preliminary result before each longer step.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    order.folder.mkdir(parents=True, exist_ok=True)
    architecture = _find_small_config(order, report_state)
    if not architecture.is_attempted:
        # The path of the temporary config is of no use to a reader.
        return replace(architecture, problem=architecture.problem.replace(str(_config_path(order)), "config.json"))
    if not architecture.keeps_cache:
        aspects = [aspect for aspect in WAYS[0] if aspect not in architecture.retained_large]
        _write_config(order, _content(order), aspects)
    return architecture


def _find_small_config(order: ExportOrder, report_state: ReportState) -> Architecture:
    """Write the smallest config that PyTorch runs, and return the description of its model."""
    unbuilt = Architecture(order.model_type, state_before="not built", problem="it did not end")
    report_state(unbuilt)
    try:
        content = _content(order)
    except Exception as error:
        return replace(unbuilt, problem=f"no default config: {error_line(error)}")
    refusals: list[Architecture] = []
    plain: Architecture | None = None
    for aspects in WAYS:
        _write_config(order, content, aspects)
        retained_large = tuple(aspect for aspect in WAYS[0] if aspect not in aspects)
        start = replace(unbuilt, retained_large=retained_large)
        architecture, is_final = _try_config(start, _model_request(order), report_state)
        if is_final or (architecture.is_attempted and (not _is_generating(order) or architecture.keeps_cache)):
            return architecture
        if architecture.is_attempted:
            # A smaller config may lack the layers that keep a cache.
            plain = plain or architecture
        else:
            refusals.append(architecture)
    if plain is not None:
        return plain
    # The reason of the config that came farthest; of several, that of the smallest.
    return max(refusals, key=lambda refusal: refusal.state_before == "not run")


def _content(order: ExportOrder) -> dict[str, object]:
    """Return the default config; of an encoder that can be a decoder, as one where text is to be generated."""
    content = default_content(order.model_type)
    return {**content, "is_decoder": True} if _is_generating(order) and "is_decoder" in content else content


def _is_generating(order: ExportOrder) -> bool:
    return order.task is not None and canonical_task(order.task) in CACHED_TASKS


def _try_config(
    architecture: Architecture, request: ModelRequest, report_state: ReportState
) -> tuple[Architecture, bool]:
    """Build a model from the written config and run it once; also return whether other sizes would fail alike."""
    try:
        resolved = resolve_model(request)
    except CheckpointError as error:
        return replace(architecture, problem=error_line(error)), isinstance(error.__cause__, ImportError)
    except Exception as error:
        problem = error_line(error)
        return replace(architecture, state_before="not run", problem=problem), isinstance(error, UsageError)
    architecture = replace(
        architecture,
        class_name=type(resolved.model).__name__,
        parameters=sum(parameter.numel() for parameter in resolved.model.parameters()),
        inputs=tuple(spec.name for part in resolved.parts for spec in part.inputs),
        keeps_cache=any(spec.cache is not None for part in resolved.parts for spec in part.inputs),
    )
    if architecture.parameters > MOST_PARAMETERS:
        problem = f"too large: {architecture.parameters / 1e6:.0f} million parameters"
        return replace(architecture, problem=problem), False
    architecture = replace(architecture, state_before="not run")
    report_state(architecture)
    try:
        for part in load_resolved(resolved, request).parts:
            _run_forward(part)
    except Exception as error:
        return replace(architecture, problem=error_line(error)), False
    return replace(architecture, state_before="", problem=""), False


def _run_forward(part: ModelPart) -> None:
    """Run a part in PyTorch on inputs of the same shapes as at export."""
    feeds = make_feeds(part.inputs, seed=1, sizes=part.trace_sizes)
    with torch.no_grad(), prepared_part(part) as prepared:
        prepared.model(*(to_torch(value) for value in feeds.values()))


def tried_export(request: ModelRequest, config: WinMLExportConfig, path: Path) -> Attempt:
    """Export a model, and check that every node of what was written has the tag of a module that ran.

    Args:
        request: The model.
        config: How it is exported.
        path: Where the file goes.
    """
    started = time.perf_counter()
    try:
        attempt = _checked_attempt(HTPExporter(config).export_checkpoint(request, path, overwrite=True))
    except WinMLError as error:
        if isinstance(error, WriteError):
            raise  # nothing of the model
        attempt = _failed_attempt(error)
    except Exception as error:
        # The command reports it in the same words: an error of this project.
        attempt = Attempt(is_verified=False, problem=f"internal error: {error_line(error)}", exit_code=1)
    return replace(attempt, seconds=round(time.perf_counter() - started, 2))


def _checked_attempt(result: ExportResult) -> Attempt:
    """Read the written files and check the tag of every node; several parts count together, by the worst of them."""
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
    assert len(verifications) == len(result.parts)  # The export was asked to verify.
    exporters = {part.exporter: part.exporter_reason for part in result.parts}
    texts = [verification.generation for verification in verifications if verification.generation is not None]
    caches = [spec.cache.kind for part in result.parts for spec in part.inputs if spec.cache is not None]
    return Attempt(
        is_verified=all(verification.is_verified for verification in verifications) and not problems,
        exporter=" and ".join(exporters),
        note="; ".join(dict.fromkeys(exporters.values())),
        problem=f"{len(problems)} of {len(nodes)} nodes: {problems[0]}" if problems else "",
        exit_code=1 if problems else 0,
        nodes=len(nodes),
        coverage_percent=min(part.coverage.percent for part in result.parts),
        tags=tuple(sorted(tags)),
        relative_diff=max(verification.worst.relative_diff for verification in verifications),
        cache=tuple(dict.fromkeys(caches)),
        generated_tokens=min((_compared_tokens(text) for text in texts), default=0),
        remarks=result.notes,
    )


def _failed_attempt(error: WinMLError) -> Attempt:
    export_error = error if isinstance(error, ExportError) else None
    return Attempt(
        is_verified=False,
        problem=error_line(error),
        exit_code=error.exit_code,
        module=(export_error.module or "") if export_error else "",
        operator=(export_error.operator or "") if export_error else "",
        step=error.step,
    )


def error_line(error: BaseException) -> str:
    """Return an error in one line, as the command says it."""
    if isinstance(error, InternalError):
        return f"internal error: {error.message}"
    if isinstance(error, WinMLError):
        return error.message.splitlines()[0]
    return f"{type(error).__name__}: {first_line(error)}"


def _write_config(order: ExportOrder, content: Mapping[str, object], aspects: Sequence[Aspect]) -> None:
    _config_path(order).write_text(json.dumps(shrink(content, aspects)), encoding="utf-8")


def _config_path(order: ExportOrder) -> Path:
    return order.folder / "config.json"


def _model_request(order: ExportOrder) -> ModelRequest:
    return ModelRequest(str(_config_path(order)), random_weights=True, task=order.task)


def _compared_tokens(text: GenerationInfo) -> int:
    """Return how many tokens of a text were the same."""
    return text.new_tokens if text.stopped_after is None else text.stopped_after
