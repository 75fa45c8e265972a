"""Writing of the run-time adapters of a built graph, in ONNX Runtime's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.models.checkpoints.adapters import Adapter, adapter_values
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.ort.adapters import adapter_inputs_of, adapter_name, write_adapter


def write_adapters(adapters: Sequence[Adapter], model: Path, reserve: Callable[[str], Path]) -> tuple[str, ...]:
    """Write adapters for a graph that has inputs for them.

    Args:
        adapters: Adapters that are switched at run time.
        model: The file of the graph, which defines the names and types of its inputs.
        reserve: Maps the name of a file next to the model to the path to write.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: an adapter does not fit the graph.
        StageError: ONNX Runtime fails to write the file.
    """
    if not adapters:
        return ()
    structure = read_structure(model)
    inputs = adapter_inputs_of({entry.key: entry.value for entry in structure.metadata_props})
    modules = {} if inputs is None else inputs.modules
    types = {value.name: value.type.tensor_type.elem_type for value in structure.graph.input}
    dtype = next((types[name] for pair in modules.values() for name in pair if name in types), int(ir.DataType.FLOAT))
    names = []
    for adapter in adapters:
        assert adapter.name is not None  # such are switched
        names.append(adapter_name(adapter.name))
        write_adapter(reserve(names[-1]), adapter_values(adapter, modules, ir.DataType(dtype).numpy()))
    return tuple(names)
