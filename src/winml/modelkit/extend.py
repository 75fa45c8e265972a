"""Contracts for plug-in packages, with a guarantee of stability.

Every name in ``__all__`` keeps its meaning and its fields as long as :data:`CONTRACT` is the same; a new field has a
default. Registration of a package's objects: docs/how_to/extend.md. Each name is imported on first use, so that a
plug-in imports only the modules it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from winml.modelkit.registries import CONTRACT

if TYPE_CHECKING:
    from winml.modelkit.builds.foreign_configs import ConfigReader
    from winml.modelkit.builds.layouts.layout import Layout, LayoutFiles
    from winml.modelkit.cli._errors import WinMLCommand
    from winml.modelkit.cli._options import debug_option, format_option
    from winml.modelkit.cli._streams import print_json
    from winml.modelkit.errors import InputError, StageError, UsageError, WinMLError
    from winml.modelkit.evaluate.metrics import Metric, SampleRows
    from winml.modelkit.evaluate.tasks.task import Evaluator, EvaluatorContext, TaskDefinition, named_output
    from winml.modelkit.models.checkpoints.config import CheckpointConfig
    from winml.modelkit.models.families.family import Family, FoundParts, decide_model_inputs, part_of_decision
    from winml.modelkit.models.parts import ModelPart
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.stage import GraphPass
    from winml.modelkit.optimize.capabilities import Capability
    from winml.modelkit.ort.execution_providers import ExecutionProvider
    from winml.modelkit.quantize.placements import OperatorRule, Placement
    from winml.modelkit.quantize.planning import EngineTask
    from winml.modelkit.quantize.precisions import ModeRules, Precision
    from winml.modelkit.samples.preprocessing import Batch
    from winml.modelkit.sweep.cells import Cell
    from winml.modelkit.sweep.records import CellResult
    from winml.modelkit.sweep.work_queue import Place, QueueKind, SweepListener, WorkQueue, do_cell

__all__ = [
    "CONTRACT", "Batch", "Capability", "Cell", "CellResult", "CheckpointConfig", "ConfigReader", "EngineTask",
    "Evaluator", "EvaluatorContext", "ExecutionProvider", "Family", "FoundParts", "GraphPass", "InputError", "Layout",
    "LayoutFiles", "Metric", "ModeRules", "ModelPart", "ModelRequest", "OperatorRule", "Place", "Placement",
    "Precision", "QueueKind", "SampleRows", "StageError", "SweepListener", "TaskDefinition", "UsageError",
    "WinMLCommand", "WinMLError", "WorkQueue", "debug_option", "decide_model_inputs", "do_cell", "format_option",
    "named_output", "part_of_decision", "print_json",
]  # fmt: skip

_NAMES = {
    "builds.foreign_configs": "ConfigReader",
    "builds.layouts.layout": "Layout LayoutFiles",
    "cli._errors": "WinMLCommand",
    "cli._options": "debug_option format_option",
    "cli._streams": "print_json",
    "errors": "InputError StageError UsageError WinMLError",
    "evaluate.metrics": "Metric SampleRows",
    "evaluate.tasks.task": "Evaluator EvaluatorContext TaskDefinition named_output",
    "models.checkpoints.config": "CheckpointConfig",
    "models.families.family": "Family FoundParts decide_model_inputs part_of_decision",
    "models.parts": "ModelPart",
    "models.request": "ModelRequest",
    "onnx.stage": "GraphPass",
    "optimize.capabilities": "Capability",
    "ort.execution_providers": "ExecutionProvider",
    "quantize.placements": "OperatorRule Placement",
    "quantize.planning": "EngineTask",
    "quantize.precisions": "ModeRules Precision",
    "samples.preprocessing": "Batch",
    "sweep.cells": "Cell",
    "sweep.records": "CellResult",
    "sweep.work_queue": "Place QueueKind SweepListener WorkQueue do_cell",
}
"""Module → its public names."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; available: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__.rpartition('.')[0]}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
