"""Opens sessions of files and of graphs in memory, without copying weights.

Weights in data files and checkpoints are mapped. If a checkpoint has another type or order, the session converts
weights while reading, so that neither memory nor a file holds a converted copy. Other weights are computed once for all
variants of a graph. Writes no file.

onnx raises the IR version for every new tensor type, and ONNX Runtime refuses files with a newer version, even without
new types: a newer file is opened with the newest supported version.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.contexts import proto_graphs, proto_nodes
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_referring, read_structure, refer_to_data
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.onnx.random_numbers import FIXABLE_OPERATORS, fix_random_numbers
from winml.modelkit.onnx.weights import to_weightless
from winml.modelkit.onnx.widening import widen_floats
from winml.modelkit.ort.host import saturates_integer_sums
from winml.modelkit.ort.ort_values import to_ort_value
from winml.modelkit.ort.plug_ins import ORT_ERRORS
from winml.modelkit.ort.session_settings import SEVERITY_FATAL
from winml.modelkit.ort.sessions import CPU, Session

_READ = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
"""Types that ONNX Runtime's CPU provider casts; tensors stored in other types are converted in memory."""
_OLDEST = 3
"""Specified: the first with opsets."""
_COMMON_OPSET = 13
"""Chosen: an opset that every supported ONNX Runtime loads."""


@functools.cache
def newest_ir_version() -> int:
    """Return the newest IR version that the installed ONNX Runtime loads, found by loading small models."""
    versions = range(onnx.IR_VERSION, _OLDEST, -1)
    return next((version for version in versions if _is_loadable(version, _COMMON_OPSET)), _OLDEST)


@functools.cache
def newest_opset() -> int:
    """Return the newest opset that the installed onnx and ONNX Runtime support, found by loading small models."""
    opsets = range(onnx.defs.onnx_opset_version(), _COMMON_OPSET, -1)
    return next((opset for opset in opsets if _is_loadable(newest_ir_version(), opset)), _COMMON_OPSET)


def _is_loadable(ir_version: int, opset: int) -> bool:
    """Return True if ONNX Runtime loads a small model of an IR version and an opset."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [output])
    model = onnx.helper.make_model(graph, ir_version=ir_version, opset_imports=[onnx.helper.make_opsetid("", opset)])
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_FATAL
    try:
        ort.InferenceSession(model.SerializeToString(), sess_options=options, providers=list(CPU))
    except ORT_ERRORS:
        return False
    return True


class GraphSessions:
    """Opens a graph, and derived graphs with shared tensors."""

    def __init__(self, model: ir.Model) -> None:
        """Keep the tensors of a graph alive as long as the object."""
        tensors = (value.const_value for value in model.graph.initializers.values())
        self._shared = {id(tensor): tensor for tensor in tensors if tensor is not None}
        self._computed: dict[int, Array] = {}
        self._lock = threading.Lock()

    def open(
        self,
        model: ir.Model,
        *,
        threads: int | None = None,
        name: str = "the graph",
        prepack: bool = True,
        optimize: bool = True,
        in_written_order: bool = False,
        as_device: bool = True,
    ) -> Session:
        """Open a session of a model; the model is not changed.

        Args:
            model: The graph, or a graph derived from it.
            threads: As of :class:`~winml.modelkit.ort.sessions.Session`.
            name: Name for messages.
            prepack: As of :class:`~winml.modelkit.ort.sessions.Session`.
            optimize: As of :class:`~winml.modelkit.ort.sessions.Session`.
            in_written_order: As of :class:`~winml.modelkit.ort.sessions.Session`.
            as_device: As of :class:`~winml.modelkit.ort.sessions.Session`.

        Raises:
            StageError: ONNX Runtime cannot load the graph, or a data file was truncated.
        """
        sent = to_weightless(model)
        folder = _folder_of(sent.weights.values())
        readers: list[onnx.NodeProto] = []
        arrays: dict[str, Array] = {}
        for initializer in sent.proto.graph.initializer:
            if (tensor := sent.weights.get(initializer.name)) is None:
                continue
            if tensor.dtype.itemsize < 1:  # several values in a byte
                initializer.raw_data = tensor.tobytes()
                continue
            initializer.data_location = onnx.TensorProto.EXTERNAL
            stored = None if folder is None else _find_stored_tensor(tensor)
            if stored is None:
                initializer.external_data.add(key="location", value=initializer.name)
                arrays[initializer.name] = self._computed_values(tensor)
                continue
            values = stored.source
            nodes = list(_reading_nodes(initializer.name, stored))
            if nodes:
                readers += nodes
                initializer.name = nodes[0].input[0]
                initializer.data_type = values.dtype.value
                initializer.dims[:] = values.shape
            assert folder is not None  # a stored one was found
            refer_to_data(initializer, values.path.relative_to(folder).as_posix(), values.offset, values.size_bytes)
        if readers:
            graph_nodes = list(sent.proto.graph.node)
            del sent.proto.graph.node[:]
            sent.proto.graph.node.extend([*readers, *graph_nodes])
        return Session(
            sent.proto.SerializeToString(),
            threads=threads,
            data_folder=folder,
            name=name,
            prepack=prepack,
            optimize=optimize,
            in_written_order=in_written_order,
            as_device=as_device,
            weights={key: to_ort_value(array) for key, array in arrays.items()},
            # With folding, the outputs of the reading nodes would be held in memory.
            folds_constants=not readers,
        )

    def _computed_values(self, tensor: ir.TensorProtocol) -> Array:
        """Return the values of a tensor; of a shared tensor, computed once."""
        if id(tensor) not in self._shared:
            return np.ascontiguousarray(tensor.numpy())
        with self._lock:
            if id(tensor) not in self._computed:
                self._computed[id(tensor)] = np.ascontiguousarray(tensor.numpy())
            return self._computed[id(tensor)]


def _find_stored_tensor(tensor: ir.TensorProtocol) -> StoredTensor | None:
    """Return a tensor readable by a session from its file, with links resolved; `None` for other tensors.

    ONNX Runtime follows no link out of a folder.
    """
    if isinstance(tensor, StoredTensor) and tensor.stored.dtype in _READ:
        stored = replace(tensor.stored, path=tensor.stored.path.resolve())
        return StoredTensor(stored, dtype=tensor.dtype, permutation=tensor.permutation)
    if isinstance(tensor, ir.ExternalTensor):
        path, shape = Path(tensor.path).resolve(), tuple(tensor.shape.numpy())
        return StoredTensor(StoredValues(path, tensor.offset or 0, tensor.dtype, shape))
    return None


def _folder_of(tensors: Iterable[ir.TensorProtocol]) -> Path | None:
    """Return the common parent folder of all stored values; `None` without one."""
    paths = {stored.source.path.parent for tensor in tensors if (stored := _find_stored_tensor(tensor)) is not None}
    try:
        return Path(os.path.commonpath(paths)) if paths else None
    except ValueError:  # on several drives
        return None


def _reading_nodes(name: str, tensor: StoredTensor) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that cast and transpose stored values to a tensor with a name."""
    steps: list[tuple[str, dict[str, Any]]] = []
    if tensor.source.dtype != tensor.dtype:
        steps.append(("Cast", {"to": tensor.dtype.value}))
    if tensor.permutation is not None:
        steps.append(("Transpose", {"perm": list(tensor.permutation)}))
    value = f"{name}:stored"
    for number, (operator, attributes) in enumerate(steps, 1):
        output = name if number == len(steps) else f"{name}:{operator}"
        yield onnx.helper.make_node(operator, [value], [output], f"{name}:{operator}", **attributes)
        value = output


def session_of_graph(model: ir.Model, path: Path, *, prepack: bool = True, optimize: bool = True) -> Session:
    """Open a graph whose weights are in ``path`` and its data files.

    Args:
        model: The graph.
        path: The file of the graph.
        prepack: Store a second copy of weights in the order that kernels read them.
        optimize: Optimize the graph first.

    Raises:
        StageError: ONNX Runtime cannot load the graph.
    """
    model.ir_version = min(model.ir_version, newest_ir_version())
    return GraphSessions(model).open(model, name=str(path), prepack=prepack, optimize=optimize)


_fixes_numbers: ContextVar[bool] = ContextVar("fixes_numbers", default=False)


@contextmanager
def fixed_random_numbers() -> Iterator[None]:
    """Fix the random numbers of graphs that :func:`open_session` opens on the CPU until the block ends."""
    token = _fixes_numbers.set(True)
    try:
        yield
    finally:
        _fixes_numbers.reset(token)


def are_numbers_fixed() -> bool:
    """Return True in a block of :func:`fixed_random_numbers`."""
    return _fixes_numbers.get()


def draws_numbers(path: Path) -> bool:
    """Return True if a graph draws random numbers that can be fixed."""
    return any(node.op_type in FIXABLE_OPERATORS for node in proto_nodes(read_structure(path)))


def open_session(
    path: Path,
    *,
    as_written: bool,
    outputs: Sequence[str] = (),
    providers: Sequence[str] = CPU,
    provider_options: Mapping[str, str] = {},
    shares_contexts: bool = False,
    as_device: bool = True,
    copies_tables: bool = True,
) -> Session:
    """Open a file, to run node by node as written, or optimized as ONNX Runtime does by default.

    On the CPU, and node by node, the weights are mapped in place, so that memory holds one copy while the session is
    created (measured on 0.5 GB: 0.7 s instead of 1.15, 0.7 GB instead of 1.06). Node by node, only integer products are
    optimized, if they saturate on this processor. A bfloat16 file is computed in float32 on the CPU, which has no
    bfloat16 kernels.

    Args:
        path: An ONNX file, its data beside it. It is not changed.
        as_written: Run it node by node.
        outputs: Values of the main graph that are returned as well; only of a file that runs as it is written.
        providers: Execution providers, the preferred one first.
        provider_options: Options of the preferred one.
        shares_contexts: Share compiled contexts with other sessions of this process.
        as_device: Compute on the CPU as a device with float16 kernels and 16-bit activations: float16 values round and
            overflow, and activations of products are not rounded to 8 bits. False: as in an application on the CPU.
        copies_tables: Hold a copy for each memory layout in which a table is read, such as of tied embeddings. False:
            one, as in the file (measured on 0.5 GB: 0.5 GB less, opened 0.4 s faster, and each run 20 ms slower).

    Raises:
        ModelPathError: the file cannot be read.
        InputError: it, or a data file it names, is damaged or missing.
        StageError: ONNX Runtime cannot load the graph.
    """
    changed = widened_graph(path, rounds_halves=as_device) if tuple(providers) == CPU else None
    if are_numbers_fixed() and tuple(providers) == CPU and draws_numbers(path):
        changed = changed or load_by_reference(path)
        fix_random_numbers(changed)
    if changed is not None:
        values = {value.name: value for node in changed.graph for value in node.outputs}
        changed.graph.outputs.extend(values[name] for name in outputs)
        return session_of_graph(changed, path, optimize=not as_written)
    session_arguments: dict[str, Any] = {
        "name": str(path),
        "providers": providers,
        "provider_options": provider_options,
        "shares_contexts": shares_contexts,
        "as_device": as_device,
    }
    # Windows replaces no mapped file, and a verified file is moved to its name while its session may be open.
    maps = tuple(providers) == CPU and os.name != "nt"
    if not as_written and not maps:
        structure = read_structure(path)
        changes = onnx.ModelProto()
        if structure.ir_version > newest_ir_version():
            changes.ir_version = newest_ir_version()
        if not copies_tables:
            changes.graph.input.extend(_tables_read_transposed(structure.graph))
        # Specified: of two messages in a row, protobuf joins repeated fields and takes other fields from the second.
        model = path.read_bytes() + changes.SerializeToString() if changes.ByteSize() else path
        return Session(
            model, data_folder=None if model is path else path.absolute().parent, source=path, **session_arguments
        )
    # ONNX Runtime maps no weights through a symbolic link: embedded weights are in the target of the link.
    file = path.absolute() if external_files(path) else path.resolve()
    referring = read_referring(file)
    referring.ir_version = min(referring.ir_version, newest_ir_version())
    if not copies_tables:
        # ONNX Runtime neither folds nor prepacks an initializer that is also an input, whose default it is.
        referring.graph.input.extend(_tables_read_transposed(referring.graph))
    for name in outputs:
        # ONNX Runtime infers the type.
        referring.graph.output.add().name = name
    optimize = not as_written or (
        saturates_integer_sums() and any("Integer" in node.op_type for node in referring.graph.node)
    )
    return Session(
        referring.SerializeToString(), optimize=optimize, data_folder=file.parent, source=file, **session_arguments
    )


def _tables_read_transposed(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield name, type and shape of the initializers that a transposition and another node read."""
    readers = Counter(name for node in graph.node for name in node.input)
    transposed = {node.input[0] for node in graph.node if node.op_type == "Transpose"}
    for tensor in graph.initializer:
        if tensor.name in transposed and readers[tensor.name] > 1:
            yield onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)


def _value_types(path: Path) -> set[int]:
    """Return the types of the values and initializers of a file, subgraphs included."""
    graphs = [*proto_graphs(read_structure(path))]
    values = (value for graph in graphs for value in (*graph.input, *graph.output, *graph.value_info))
    stored = {tensor.data_type for graph in graphs for tensor in graph.initializer}
    return {value.type.tensor_type.elem_type for value in values} | stored


def widened_graph(path: Path, *, rounds_halves: bool = False) -> ir.Model | None:
    """Return the graph of a bfloat16 file, converted to float32; `None` for other files.

    Args:
        path: The file.
        rounds_halves: Also return the graph of a float16 file, in float32 with its values rounded to float16.
    """
    types = _value_types(path)
    has_brains, has_halves = (dtype in types for dtype in (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16))
    if not has_brains and not (has_halves and rounds_halves):
        return None
    model = load_by_reference(path)
    is_widened = has_brains and widen_floats(model, ir.DataType.BFLOAT16)
    if has_halves and rounds_halves:
        from winml.modelkit.ort.half_rounding import round_half_values  # needed only by float16 files

        return model if round_half_values(model) or is_widened else None
    return model if is_widened else None
