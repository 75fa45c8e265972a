"""What comes of exporting one model type? Runs in a process of its own.

Finds a config small enough that PyTorch runs, by the product's own loading and choice of inputs, then exports it as
``winml export --random-weights -m config.json`` does and reads the tags back from the file.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from winml.modelkit.errors import CheckpointError, ExportError, InternalError, UsageError, WinMLError, first_line
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.tensors import to_torch
from winml.modelkit.flows.export.export import HTPExporter
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.load.model import load_resolved
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.load.resolution import resolve_model
from winml.modelkit.results.export_result import ExportResult
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.sweep.evaluation_records import Architecture, Attempt, ExporterWish
from winml.modelkit.sweep.small_configs import WAYS, Aspect, default_content, shrink

__all__ = ["PRELOAD", "ExportOrder", "carry_out"]

PRELOAD = (
    "onnxruntime",
    "torch._dynamo",
    "torch.onnx._internal.exporter._core",
    "transformers.generation",
    "winml.modelkit.flows.export.export",
)
"""What exports import sooner or later."""

MOST_PARAMETERS = 80_000_000
"""Chosen: a model of 320 MB is exported in seconds; larger ones are not what "small config" means."""

Tell = Callable[[Architecture], None]


@dataclass(frozen=True)
class ExportOrder:
    """One export to make."""

    model_type: str
    exporter: ExporterWish
    folder: Path
    """Where the config and, while it is looked at, the model are written."""
    known: Architecture | None = None
    """What an earlier export found out; its config is taken again."""


def carry_out(order: ExportOrder, tell: Tell) -> Architecture:
    """Make one export and return what is known after it; ``tell`` hears what is known before each longer step."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    order.folder.mkdir(parents=True, exist_ok=True)
    known = order.known or _find_small(order, tell)
    if not known.is_attempted:
        # Where the config lay for a moment is of no use to a reader.
        return replace(known, problem=known.problem.replace(str(_config_path(order)), "config.json"))
    if order.known is not None:
        way = [aspect for aspect in WAYS[0] if aspect not in known.kept_large]
        _write_config(order, default_content(order.model_type), way)
    tell(known)
    return known.with_attempt(order.exporter, _attempt(order))


def _find_small(order: ExportOrder, tell: Tell) -> Architecture:
    """Write the smallest config that PyTorch runs, and return what is known then."""
    known = Architecture(order.model_type, state_before="not built", problem="it did not end")
    tell(known)
    try:
        content = default_content(order.model_type)
    except Exception as error:
        return replace(known, problem=f"no default config: {_words(error)}")
    refusals: list[Architecture] = []
    for way in WAYS:
        _write_config(order, content, way)
        kept_large = tuple(aspect for aspect in WAYS[0] if aspect not in way)
        tried, is_final = _try(replace(known, kept_large=kept_large), _request(order), tell)
        if tried.is_attempted or is_final:
            return tried
        refusals.append(tried)
    # The reason of the one that came farthest; of several, the smallest.
    return max(refusals, key=lambda refusal: refusal.state_before == "not run")


def _try(known: Architecture, request: ModelRequest, tell: Tell) -> tuple[Architecture, bool]:
    """Build a model from the written config and run it once; also say whether other sizes would change nothing."""
    try:
        resolved = resolve_model(request)
    except CheckpointError as error:
        return replace(known, problem=_words(error)), isinstance(error.__cause__, ImportError)
    except Exception as error:
        return replace(known, state_before="not run", problem=_words(error)), isinstance(error, UsageError)
    known = replace(
        known,
        class_name=type(resolved.model).__name__,
        parameters=sum(parameter.numel() for parameter in resolved.model.parameters()),
        inputs=tuple(spec.name for spec in resolved.inputs),
    )
    if known.parameters > MOST_PARAMETERS:
        return replace(known, problem=f"too large: {known.parameters / 1e6:.0f} million parameters"), False
    known = replace(known, state_before="not run")
    tell(known)
    try:
        _run(load_resolved(resolved, request).only_part)
    except Exception as error:
        return replace(known, problem=_words(error)), False
    return replace(known, state_before="", problem=""), False


def _run(loaded: ModelPart) -> None:
    """Run the model in PyTorch on inputs as they will be at export."""
    feeds = make_feeds(loaded.inputs, seed=1, sizes=loaded.trace_sizes)
    with torch.no_grad():
        loaded.model(**{name: to_torch(value) for name, value in feeds.items()}, **loaded.forward_kwargs)


def _attempt(order: ExportOrder) -> Attempt:
    started = time.perf_counter()
    try:
        attempt = _outcome(_export(order))
    except WinMLError as error:
        attempt = _failure(error)
    except Exception as error:
        # As the command tells it: a mistake of ours.
        attempt = Attempt(is_verified=False, problem=f"internal error: {_words(error)}", exit_code=1)
    return replace(attempt, seconds=round(time.perf_counter() - started, 2))


def _export(order: ExportOrder) -> ExportResult:
    exporter = HTPExporter(WinMLExportConfig(exporter=order.exporter))
    return exporter.export_checkpoint(_request(order), order.folder / "model.onnx", overwrite=True)


def _outcome(result: ExportResult) -> Attempt:
    """Read the written file back and say what is wrong with its tags, if anything."""
    assert result.verification is not None  # it was asked for
    tags = {node.path: node.tag for node in result.tree}
    seen = set()
    problems = []
    nodes = list(all_nodes(ir.load(result.model_path)))
    for node in nodes:
        tag = read_tag(node)
        if tag is None:
            problems.append(f"node {node.name} has no tag")
        elif tags.get(tag.module) != tag.tag:
            problems.append(f"node {node.name}: no module {tag.module} has the tag {tag.tag}")
        else:
            seen.add(tag.tag)
    worst = result.verification.worst
    return Attempt(
        is_verified=result.verification.is_verified and not problems,
        exporter=result.exporter,
        note=result.exporter_reason,
        problem=f"{len(problems)} of {len(nodes)} nodes: {problems[0]}" if problems else "",
        exit_code=1 if problems else 0,
        nodes=len(nodes),
        coverage_percent=result.coverage.percent,
        tags=tuple(sorted(seen)),
        relative_diff=worst.relative_diff,
    )


def _failure(error: WinMLError) -> Attempt:
    place = error if isinstance(error, ExportError) else None
    return Attempt(
        is_verified=False,
        problem=_words(error),
        exit_code=error.exit_code,
        module=(place.module or "") if place else "",
        operator=(place.operator or "") if place else "",
        step=error.step,
    )


def _words(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, InternalError):
        return f"internal error: {error.message}"
    if isinstance(error, WinMLError):
        return error.message.splitlines()[0]
    return f"{type(error).__name__}: {first_line(error)}"


def _write_config(order: ExportOrder, content: Mapping[str, Any], way: Sequence[Aspect]) -> None:
    _config_path(order).write_text(json.dumps(shrink(content, way)), encoding="utf-8")


def _config_path(order: ExportOrder) -> Path:
    return order.folder / "config.json"


def _request(order: ExportOrder) -> ModelRequest:
    return ModelRequest(str(_config_path(order)), random_weights=True)
