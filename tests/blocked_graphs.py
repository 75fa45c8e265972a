"""Graphs with weights large enough for quantization blocks, and the SQNR between two graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphs import parse, run_onnx
from winml.modelkit.compare.fidelity import measure_fidelity
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.planning import EngineTask
from winml.modelkit.quantize.precisions import PRECISIONS


def weighted(body: str, **shapes: tuple[int, ...]) -> ir.Model:
    """Parse a graph and replace the named initializers by random values of the given shapes.

    The text declares a weight as ``float[1] name = {0}``.
    """
    model = parse(body)
    generator = np.random.default_rng(1)
    for name, shape in shapes.items():
        value = model.graph.initializers[name]
        array = generator.standard_normal(shape).astype(np.float32)
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(shape)
    return model


def task_for(model: ir.Model, precision: str, *operators: str, **options: Any) -> EngineTask:
    """Return the engine task for all nodes, or for the nodes of some operators."""
    names = frozenset(node.name or "" for node in model.graph if not operators or node.op_type in operators)
    provider = placement_for(options.get("ep"))
    return EngineTask(names, PRECISIONS[precision], QuantizeOptions(**options), provider=provider)


def sqnr_db(reference: ir.Model, model: ir.Model, **feeds: Any) -> float:
    """Return the lowest SQNR of the outputs of a model, in decibels."""
    answers = [
        run_onnx(ir.to_proto(item).SerializeToString(), {name: np.asarray(value) for name, value in feeds.items()})
        for item in (reference, model)
    ]
    return measure_fidelity(answers[:1], answers[1:], 0.0).worst.sqnr_db


def floats(*shape: int) -> Any:
    """Return random activations."""
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)
