"""Small graphs for tests, written as text, and their outputs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.onnx.stage import all_nodes
from winml.modelkit.ort.sessions import Session
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag


def parse(body: str, opset: int = 17, functions: str = "", domains: str = "") -> ir.Model:
    """Return the model of an ONNX text graph; every node is tagged ``/M/<op type>`` and named after its operator.

    Weights in the text are made distinct: an initializer named ``w…`` gets random values of its shape.
    """
    header = f'<ir_version: 10, opset_import: ["" : {opset}{domains}]>'
    model = ir.from_onnx_text(f"{header}\n{body}\n{functions}")
    generator = np.random.default_rng(0)
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if name.startswith("w") and tensor is not None:
                array = generator.standard_normal(tensor.shape.numpy()).astype(tensor.dtype.numpy())
                value.const_value = ir.tensor(array, name=name)
    for number, node in enumerate(all_nodes(model)):
        node.name = f"/{node.op_type.lower()}/{node.op_type}_{number}"
        write_tag(node, NodeTag(f"/M/{node.op_type}", node.op_type.lower(), "direct"))
    return model


def operators(model: ir.Model) -> list[str]:
    """Return the operator of every node in order, subgraphs and functions included."""
    return [node.op_type for node in all_nodes(model)]


def tags(model: ir.Model) -> list[tuple[str, str] | None]:
    """Return tag and source of every node in order."""
    return [(tag.tag, tag.source) if (tag := read_tag(node)) else None for node in all_nodes(model)]


def run_onnx(model: str | os.PathLike[str] | bytes, feeds: Arrays, *, optimize: bool = True) -> dict[str, Array]:
    """Load a graph and run it once."""
    return Session(model, optimize=optimize).run(feeds)


def answer(model: ir.Model, **feeds: Any) -> list[Any]:
    """Run a model without graph optimization and return its outputs as lists."""
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    outputs = run_onnx(ir.to_proto(model).SerializeToString(), arrays, optimize=False)
    return [value.tolist() for value in outputs.values()]
