"""A small graph of nested modules with matrices, for commands that work by module on a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphs import parse
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.tags.tagging import NodeTag, write_tag

SIZE = 32
_ZEROS = f"{{{', '.join(['0'] * SIZE**2)}}}"
_WEIGHT = f"float[{SIZE},{SIZE}]"
_BODY = f"""chain (float[batch, {SIZE}] x) => (float[batch, {SIZE}] y)
<{_WEIGHT} w1 = {_ZEROS}, {_WEIGHT} w2 = {_ZEROS}, {_WEIGHT} w3 = {_ZEROS}, {_WEIGHT} w4 = {_ZEROS}> {{
  a = MatMul (x, w1)
  b = MatMul (a, w2)
  c = Tanh (b)
  d = MatMul (c, w3)
  e = Tanh (d)
  f = MatMul (e, w4)
  y = Tanh (f)
}}"""

MODULES = (
    ("/M", ""),
    ("/M/A.0", "a.0"),
    ("/M/A.0", "a.0"),
    ("/M/A.0/B", "a.0.b"),
    ("/M/C", "c"),
    ("/M/A.1", "a.1"),
    ("/M/A.1", "a.1"),
)
"""Tag and module path of each node: the root and A.0 have their own matrix beside modules; C has none."""


def save_chain(path: Path, *, outlier: str = "", tagged: bool = True) -> Path:
    """Write the graph and return its path.

    Args:
        path: The file.
        outlier: Weight with a first column 80 times as large as its other columns.
        tagged: Whether nodes have tags; their names have the scopes of their modules either way.
    """
    model = parse(_BODY)
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        array = value.const_value.numpy() / np.float32(SIZE**0.5)
        array[:, 0] *= 80 if name == outlier else 1
        value.const_value = ir.tensor(array, name=name)
    for number, (node, (tag, module)) in enumerate(zip(model.graph, MODULES, strict=True)):
        node.name = f"/{module.replace('a.0.b', 'a.0/b')}/{node.op_type}_{number}".replace("//", "/")
        node.metadata_props.clear()
        if tagged:
            write_tag(node, NodeTag(tag, module, "direct"))
    write_model(model, path)
    return path


def save_groups(path: Path, *, groups: int, members: int) -> Path:
    """Write a chain of groups of modules; each module is a random matrix with its own scale and a tanh."""
    count = groups * members
    weights = ", ".join(f"{_WEIGHT} w{number} = {_ZEROS}" for number in range(count))
    steps = "".join(
        f"m{number} = MatMul ({f't{number - 1}' if number else 'x'}, w{number}) t{number} = Tanh (m{number}) "
        for number in range(count)
    )
    model = parse(
        f"groups (float[batch, {SIZE}] x) => (float[batch, {SIZE}] y) <{weights}> {{ {steps} y = Neg (t{count - 1}) }}"
    )
    draw = np.random.default_rng(5)
    for number in range(count):
        scale = draw.uniform(0.6, 1.6) / SIZE**0.5
        values = draw.normal(scale=scale, size=(SIZE, SIZE)).astype(np.float32)
        model.graph.initializers[f"w{number}"].const_value = ir.tensor(values, name=f"w{number}")
    for place, node in enumerate(model.graph):
        group, member = divmod(min(place // 2, count - 1), members)
        write_tag(node, NodeTag(f"/M/Group.{group}/Member.{member}", f"{group}.{member}", "direct"))
    write_model(model, path)
    return path
