"""Graphs with weights large enough for blocks, and how near two of them answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphs import parse, run_onnx
from winml.modelkit.compare.fidelity import measure_fidelity
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import EngineTask
from winml.modelkit.quantize.precisions import PRECISIONS


def weighted(body: str, **shapes: tuple[int, ...]) -> ir.Model:
    """Return the model of a graph in words whose weights have other shapes, with random values.

    In the text a weight is ``float[1] name = {0}``.
    """
    model = parse(body)
    generator = np.random.default_rng(1)
    for name, shape in shapes.items():
        value = model.graph.initializers[name]
        array = generator.standard_normal(shape).astype(np.float32)
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(shape)
    return model


def task_for(model: ir.Model, precision: str, *operators: str, **options: Any) -> EngineTask:
    """Return the task of an engine: all nodes, or those of some operators."""
    names = frozenset(node.name or "" for node in model.graph if not operators or node.op_type in operators)
    return EngineTask(names, PRECISIONS[precision], QuantizeOptions(**options))


def sqnr_db(reference: ir.Model, model: ir.Model, **feeds: Any) -> float:
    """Return how near the answers of a model are to those of another, for the output that is farthest."""
    answers = [
        run_onnx(ir.to_proto(item).SerializeToString(), {name: np.asarray(value) for name, value in feeds.items()})
        for item in (reference, model)
    ]
    return measure_fidelity(answers[:1], answers[1:], 0.0).worst.sqnr_db


def floats(*shape: int) -> Any:
    """Return random activations."""
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)
