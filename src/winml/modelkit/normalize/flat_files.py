"""Files for sessions: ONNX Runtime and providers report nodes by name, and rename the nodes of functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from winml.modelkit.normalize.passes import UniqueNodeNamesPass
from winml.modelkit.onnx.files.graph_reading import graph_of, load_by_reference
from winml.modelkit.onnx.files.reading import inline_functions, read_structure, reading_graph
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.files.writing import write_model


def flatten(model: ir.Model) -> bool:
    """Inline functions, and give every node a unique name, in place; functions of other opsets than the model stay.

    Returns:
        True if the model was changed.
    """
    opsets = model.opset_imports
    inlining = InlinePass(
        criteria=lambda function: all(opsets.get(domain, v) == v for domain, v in function.opset_imports.items())
    )
    is_inlined = inlining(model).modified
    return UniqueNodeNamesPass()(model).modified or is_inlined


@contextmanager
def flat_file(path: Path) -> Iterator[Path]:
    """Yield the file itself, or a temporary copy without functions and with unique names; weights are copied as well.

    Raises:
        InputError: the file is no ONNX model, or damaged.
        WriteError: the disk has no space for the copy.
    """
    structure = read_structure(path, as_written=True)
    has_modules = inline_functions(structure, path) > 0
    if not reading_graph(path, lambda: flatten(graph_of(structure, path))) and not has_modules:
        yield path
        return
    with temporary_folder() as folder:
        flat = folder / path.name
        model = reading_graph(path, lambda: load_by_reference(path))
        reading_graph(path, lambda: flatten(model))
        write_model(model, flat)
        yield flat
