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
    "CONTRACT",
    "Batch",
    "Capability",
    "Cell",
    "CellResult",
    "CheckpointConfig",
    "ConfigReader",
    "EngineTask",
    "Evaluator",
    "EvaluatorContext",
    "ExecutionProvider",
    "Family",
    "FoundParts",
    "GraphPass",
    "InputError",
    "Layout",
    "LayoutFiles",
    "Metric",
    "ModeRules",
    "ModelPart",
    "ModelRequest",
    "OperatorRule",
    "Place",
    "Placement",
    "Precision",
    "QueueKind",
    "SampleRows",
    "StageError",
    "SweepListener",
    "TaskDefinition",
    "UsageError",
    "WinMLCommand",
    "WinMLError",
    "WorkQueue",
    "debug_option",
    "decide_model_inputs",
    "do_cell",
    "format_option",
    "named_output",
    "part_of_decision",
    "print_json",
]

_HOMES = {
    "Batch": "samples.preprocessing",
    "Capability": "optimize.capabilities",
    "Cell": "sweep.cells",
    "CellResult": "sweep.records",
    "CheckpointConfig": "models.checkpoints.config",
    "ConfigReader": "builds.foreign_configs",
    "EngineTask": "quantize.planning",
    "ExecutionProvider": "ort.execution_providers",
    "Family": "models.families.family",
    "FoundParts": "models.families.family",
    "GraphPass": "onnx.stage",
    "InputError": "errors",
    "Evaluator": "evaluate.tasks.task",
    "EvaluatorContext": "evaluate.tasks.task",
    "Layout": "builds.layouts.layout",
    "LayoutFiles": "builds.layouts.layout",
    "Metric": "evaluate.metrics",
    "ModeRules": "quantize.precisions",
    "ModelPart": "models.parts",
    "ModelRequest": "models.request",
    "OperatorRule": "quantize.placements",
    "Place": "sweep.work_queue",
    "Placement": "quantize.placements",
    "Precision": "quantize.precisions",
    "QueueKind": "sweep.work_queue",
    "SampleRows": "evaluate.metrics",
    "StageError": "errors",
    "SweepListener": "sweep.work_queue",
    "TaskDefinition": "evaluate.tasks.task",
    "UsageError": "errors",
    "WinMLCommand": "cli._errors",
    "WinMLError": "errors",
    "WorkQueue": "sweep.work_queue",
    "debug_option": "cli._options",
    "decide_model_inputs": "models.families.family",
    "do_cell": "sweep.work_queue",
    "format_option": "cli._options",
    "named_output": "evaluate.tasks.task",
    "part_of_decision": "models.families.family",
    "print_json": "cli._streams",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; available: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__.rpartition('.')[0]}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
