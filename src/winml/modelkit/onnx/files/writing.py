"""Writing of a graph to a file without a second copy of its weights in memory.

Weights are read while they are written, one at a time, or two of a large file: peak memory is the graph plus the
largest tensors. Why weights travel by reference: docs/decisions/0006-weights-as-cargo.md. Temporary names are made by
``output_files``. Also writes a file that contains all its weights, a file whose data is split into numbered files, and
new metadata for a file whose weights stay where they are.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

import onnx
import onnx_ir as ir
from onnx_ir.external_data import CallbackInfo

from winml.modelkit.errors import InternalError, WinMLError, WriteError, error_chain, first_line
from winml.modelkit.file_names import DATA_DIGITS, data_path, numbered_data_path, unfinished_data_path
from winml.modelkit.onnx.contents import data_location
from winml.modelkit.onnx.contexts import context_file_attributes
from winml.modelkit.onnx.files import placing
from winml.modelkit.onnx.files.content_digest import REMEMBERED_BYTES, GrowingDigest, WrittenFileHash
from winml.modelkit.onnx.files.initializer_bytes import StoredBytes, locate_external
from winml.modelkit.onnx.files.output_files import write_error
from winml.modelkit.onnx.files.reading import refer_to_data
from winml.modelkit.onnx.files.wire_format import INLINE_LIMIT_BYTES, LENGTH_DELIMITED, varint, walk_fields
from winml.modelkit.onnx.map_types import serialize_model
from winml.modelkit.onnx.weights import placed_tensor, read_once, replaced_tensors, to_weightless
from winml.modelkit.progress import count_progress
from winml.modelkit.words import size_words

_SMALLEST_OUTSIDE_BYTES = 256
"""Tensors up to this size stay in the model. Chosen: a reference to a data file takes as much."""
_ALIGNMENT_BYTES = 65_536
"""Large tensors start at multiples of this in a data file. Specified: the granularity of Windows' memory maps, a
multiple of every page size."""
_ALIGNED_BYTES = 100 * _ALIGNMENT_BYTES
"""Tensors from this size on are aligned. Chosen: the gaps take less than 1 % of the file."""

WRITING_THREADS = 2
"""Tensors of a large file are computed and written side by side. Chosen: more hold more weights in memory, and two keep
the disk busy."""
_IN_FLIGHT_BYTES = 256_000_000
"""Total size of tensors in memory at a time; a larger tensor is written alone, beside others of this total. Chosen:
most weights are smaller.
"""

_REFERENCE_BYTES = 80
"""Size of an external data entry without the file name. Chosen: upper bound of its keys and numbers."""

# Specified: tags of the onnx.proto fields written by hand, (field number << 3) | 2 for a length-delimited field.
_MODEL_GRAPH = bytes([7 << 3 | 2])
_GRAPH_INITIALIZER = bytes([5 << 3 | 2])
_TENSOR_RAW_DATA = bytes([9 << 3 | 2])


class ReshapedTensor(ir.LazyTensor):
    """The values of a tensor with a different shape. In a data file, both tensors share a range of bytes."""

    def __init__(self, source: ir.TensorProtocol, sizes: Sequence[int], name: str) -> None:
        """Refer to the values without reading them."""
        shape = ir.Shape(sizes, frozen=True)
        super().__init__(self._read_values, source.dtype, shape, name=name)
        self.source = source

    def _read_values(self) -> ir.TensorProtocol:
        values = self.source.numpy().reshape(self.shape.numpy())
        return ir.Tensor(values, dtype=self.dtype, shape=self.shape, name=self.name)


def write_model(
    model: ir.Model, path: Path, *, external: bool | None = None, inline_limit_bytes: int = INLINE_LIMIT_BYTES
) -> tuple[Path, ...]:
    """Write a model; weights are embedded, or written to its ``data_path`` if the file would be too large.

    The model in memory is not changed. The model file names the data file without a folder, so both can be moved
    together; the data file is named after its content.

    Args:
        model: The model. Tensors that are computed on demand are computed here, once each.
        path: The file to write; replaced if it exists.
        external: Write weights outside (True) or inside (False), regardless of their size. None: decided by size.
        inline_limit_bytes: Largest file with weights inside.

    Returns:
        The files written, the model first.

    Raises:
        WriteError: the file cannot be written, or ``external`` is False and the weights do not fit inside.
        WinMLError: computing a tensor on demand failed.
    """
    try:
        with _untyped_initializers(model):
            framing = _frame_model(model, path)
            if external is False and framing.size_bytes > inline_limit_bytes:
                raise WriteError(
                    f"cannot write {path}: with embedded weights it needs {framing.size_bytes} bytes; "
                    f"the limit is {inline_limit_bytes}",
                    hint="Store the weights as external data.",
                )
            if not external and framing.size_bytes <= inline_limit_bytes:
                framing.write(path)
                return (path,)
            return _write_outside(model, path)
    except ir.serde.SerdeError as error:
        # onnx_ir wraps the error of a tensor once for each message around it.
        for cause in error_chain(error):
            if isinstance(cause, WinMLError):
                raise cause from cause.__cause__
        raise WriteError(
            f"cannot write {path}: the graph is invalid: {first_line(list(error_chain(error))[-1])}",
            hint="The source may be damaged: create it again.",
        ) from error
    except OSError as error:
        raise write_error(path, error) from error


def written_bytes(model: ir.Model, path: Path, *, external: bool | None = None) -> int:
    """Return the size of the files of :func:`write_model`, without reading weights or writing files.

    Exact for embedded weights. For external weights, up to some hundred bytes per tensor too large.

    Args:
        model: The model; not changed.
        path: The file to write.
        external: As of :func:`write_model`.

    Raises:
        WriteError: an attribute of a node is in another file.
    """
    with _untyped_initializers(model):
        framing = _frame_model(model, path)
    if not external and framing.size_bytes <= INLINE_LIMIT_BYTES:
        return framing.size_bytes
    tensors = _initializer_tensors(model)
    reference = len(data_path(path, "0" * DATA_DIGITS).name) + _REFERENCE_BYTES
    size, offset = framing.size_bytes + len(tensors) * reference, 0
    for tensor in _distinct_tensors(tensors.values()).values():
        if tensor.nbytes > _ALIGNED_BYTES:
            size += -offset % _ALIGNMENT_BYTES
            offset += -offset % _ALIGNMENT_BYTES
        offset += tensor.nbytes
    return size


def _frame_model(model: ir.Model, path: Path) -> _ModelFraming:
    """Split a model into the pieces of its file.

    Raises:
        WriteError: an attribute of a node is in another file.
    """
    weightless = to_weightless(model, reads_none=True)
    _refuse_foreign_data(weightless.proto, path)
    return _ModelFraming(weightless.proto, weightless.weights)


def _initializer_tensors(model: ir.Model) -> dict[ir.Value, ir.TensorProtocol]:
    """Return value → tensor of all initializers except strings, which cannot be in a data file."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    return {value: tensor for value, tensor in tensors.items() if tensor.dtype != ir.DataType.STRING}


def _distinct_tensors(tensors: Iterable[ir.TensorProtocol]) -> dict[object, ir.TensorProtocol]:
    """Return key of the bytes → first tensor with the bytes."""
    distinct: dict[object, ir.TensorProtocol] = {}
    for tensor in tensors:
        distinct.setdefault(_bytes_key(tensor), tensor)
    return distinct


def _bytes_key(tensor: ir.TensorProtocol) -> object:
    """Return a key equal for tensors with the same bytes."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.path, tensor.offset, tensor.length, tensor.dtype)
    return id(tensor.source if isinstance(tensor, ReshapedTensor) else tensor)


def _write_outside(model: ir.Model, path: Path) -> tuple[Path, ...]:
    """Write a model with large weights in a data file; return the model and the data file."""
    tensors = _initializer_tensors(model)
    outside = {value: tensor for value, tensor in tensors.items() if tensor.nbytes > _SMALLEST_OUTSIDE_BYTES}
    replaced: dict[ir.Value, ir.TensorProtocol] = {
        value: ir.Tensor(read_once(tensor), dtype=tensor.dtype, name=tensor.name)
        for value, tensor in tensors.items()
        if value not in outside and isinstance(tensor, ir.ExternalTensor)
    }
    files = [path]
    if outside:
        distinct = _distinct_tensors(outside.values())
        data, references = _write_data(list(distinct.values()), path)
        reference_of = dict(zip(distinct, references, strict=True))
        for value, tensor in outside.items():
            reference = reference_of[_bytes_key(tensor)]
            replaced[value] = placed_tensor(value, tensor, data.name, reference.offset, reference.length)
        files.append(data)
    with replaced_tensors(replaced):
        path.write_bytes(serialize_model(model).SerializeToString())
    return tuple(files)


def _write_data(tensors: Sequence[ir.TensorProtocol], path: Path) -> tuple[Path, list[ir.ExternalTensor]]:
    """Write the data file of a model; return its path and a reference for each tensor."""
    unfinished = unfinished_data_path(path)
    with GrowingDigest(unfinished) as digest:
        count, written_tensors = _counting_bytes(tensors), _WrittenTensors(digest.complete_up_to)
        growing: list[Path | None] = []

        def before_each(tensor: ir.TensorProtocol, info: CallbackInfo) -> None:
            count(tensor)
            if not growing:
                growing.append(_find_growing_file(unfinished))
                digest.set_temporary_path(growing[0] or unfinished)
            if growing[0] is not None:
                written_tensors.begin(info.index, info.offset)

        references = ir.external_data.convert_tensors_to_external(
            tensors,
            path.parent,
            unfinished.name,
            callback=before_each,
            max_workers=WRITING_THREADS,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            alignment=_ALIGNMENT_BYTES,
            align_threshold=_ALIGNED_BYTES,
        )
        return placing.name_data(unfinished, path, digest.finish()), references


def _find_growing_file(data: Path) -> Path | None:
    """Return the path of an incomplete data file in a hidden folder of onnx_ir; `None` if not found."""
    if sys.platform == "win32":  # renames no file that is being read
        return None
    name = glob.escape(data.name)
    paths = list(data.parent.glob(f".{name}.*/{name}"))
    return paths[0] if len(paths) == 1 else None


class _WrittenTensors:
    """Tracks the completely written tensors of a data file.

    onnx_ir reports only the start of each tensor, one at a time and from any thread.
    """

    def __init__(self, on_written: Callable[[int], None]) -> None:
        """Begin with none.

        Args:
            on_written: Called with the number of bytes from the start of the file that are written.
        """
        self._on_written = on_written
        self._offsets: dict[int, int] = {}
        self._begun: defaultdict[int, list[int]] = defaultdict(list)
        """Thread → the last two tensors it began."""
        self._written: set[int] = set()
        self._next = 0
        """The first tensor that may be unwritten."""

    def begin(self, index: int, offset: int) -> None:
        """Record that the current thread starts a tensor at an offset of the file; tensors are written in order."""
        self._offsets[index] = offset
        begun = self._begun[threading.get_ident()]
        begun.append(index)
        if len(begun) > 2:
            # The last bytes of the previous tensor leave the buffer when this tensor is written.
            self._written.add(begun.pop(0))
        while self._next in self._written:
            self._next += 1
        if self._next in self._offsets:
            self._on_written(self._offsets[self._next])


def _counting_bytes(tensors: Iterable[ir.TensorProtocol]) -> Callable[[ir.TensorProtocol], None]:
    """Return a callback that reports progress; writing threads call it for each tensor."""
    total = sum(tensor.nbytes for tensor in tensors)
    written, context = 0, copy_context()

    def count(tensor: ir.TensorProtocol) -> None:
        nonlocal written
        written += tensor.nbytes
        context.run(count_progress, written, total, f"{size_words(written)} of {size_words(total)} written")

    return count


@contextlib.contextmanager
def _untyped_initializers(model: ir.Model) -> Iterator[None]:
    """Remove type and shape of initializers inside the block, since tensors state both.

    Initializers with metadata, and graph inputs, are unchanged.

    onnx_ir would write a ``value_info`` for each initializer. A tool such as ``onnxruntime.quantization``, which
    changes a weight but not the entry, leaves an inconsistent file.
    """
    typed_values = [
        (value, value.type, value.shape)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and not (value.is_graph_input() or value.metadata_props or value.doc_string)
    ]
    try:
        for value, _, _ in typed_values:
            value.type = value.shape = None
        yield
    finally:
        for value, tensor_type, shape in typed_values:
            value.type, value.shape = tensor_type, shape


def _refuse_foreign_data(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse a model with node attributes in another file: the written file would be incomplete.

    Raises:
        WriteError: names the node.
    """
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.t.data_location == onnx.TensorProto.EXTERNAL:
                raise WriteError(
                    f"cannot write {path}: attribute {attribute.name} of node {node.name} is in another file",
                    hint="Normalize the model first, which makes it an initializer.",
                )


class _ModelFraming:
    """Serialized pieces of a model file in order, and its exact length.

    Protobuf accepts fields in any order, but every message starts with its length. All lengths are computed before a
    weight is read.
    """

    def __init__(self, proto: onnx.ModelProto, streamed: Mapping[str, ir.TensorProtocol]) -> None:
        """Split the model into pieces; clears ``proto``.

        Args:
            proto: The model, without the values of the streamed tensors.
            streamed: Name of an initializer of the main graph → its values.
        """
        initializers = list(proto.graph.initializer)
        proto.graph.ClearField("initializer")
        self._graph = proto.graph.SerializeToString()
        proto.ClearField("graph")
        self._model = proto.SerializeToString()
        self._tensors = [_FramedTensor(tensor, streamed.get(tensor.name)) for tensor in initializers]
        self._graph_bytes = len(self._graph) + sum(tensor.size_bytes for tensor in self._tensors)
        self.size_bytes = len(self._model) + len(_MODEL_GRAPH + varint(self._graph_bytes)) + self._graph_bytes

    def write(self, path: Path) -> None:
        """Write the whole model; write and hash the tensors of a large model side by side.

        Raises:
            InternalError: the file has another size than announced.
        """
        head = self._model + _MODEL_GRAPH + varint(self._graph_bytes) + self._graph
        path.write_bytes(head)
        starts = accumulate((tensor.size_bytes for tensor in self._tensors), initial=len(head))
        pending = iter([*zip(starts, self._tensors, strict=False)])
        if self.size_bytes < REMEMBERED_BYTES:
            _write_tensors(path, pending)
        else:
            workers = range(WRITING_THREADS)
            begun = dict.fromkeys(workers, 0)
            with WrittenFileHash(path) as file_hash, ThreadPoolExecutor(WRITING_THREADS) as threads:

                def write_next(worker: int) -> None:
                    def begin(start: int) -> None:
                        begun[worker] = start
                        file_hash.complete_up_to(min(begun.values()))  # tensors are begun in order

                    _write_tensors(path, pending, begin)

                list(threads.map(write_next, workers))
                file_hash.remember()
        if path.stat().st_size != self.size_bytes:
            raise InternalError(f"a model of {self.size_bytes} bytes was written as {path.stat().st_size} bytes")


def _write_tensors(
    path: Path, pending: Iterator[tuple[int, _FramedTensor]], begin: Callable[[int], None] = lambda _start: None
) -> None:
    """Write tensors into an existing file.

    Args:
        path: The file.
        pending: First byte of each tensor, and the tensor, in order; several threads may take from it.
        begin: Called with the first byte of the next tensor; earlier tensors of this call have left the buffers.
    """
    with path.open("r+b") as file:
        for start, tensor in pending:
            file.seek(start)
            begin(start)
            tensor.write(file)
            file.flush()


class _FramedTensor:
    """An initializer; data is read during writing."""

    def __init__(self, proto: onnx.TensorProto, data: ir.TensorProtocol | None) -> None:
        self._data = data
        if data is not None:
            proto.ClearField("data_location")
            proto.ClearField("external_data")
        head = proto.SerializeToString()
        length = len(head)
        if data is not None:
            head += _TENSOR_RAW_DATA + varint(data.nbytes)
            length = len(head) + data.nbytes
        self._head = _GRAPH_INITIALIZER + varint(length) + head
        self.size_bytes = len(self._head) + (data.nbytes if data is not None else 0)

    def write(self, file: BinaryIO) -> None:
        """Write the tensor with its values.

        Raises:
            InternalError: the values have another size than announced.
        """
        file.write(self._head)
        if self._data is None:
            return
        start = file.tell()
        cast("ir.Tensor[Any]", self._data).tofile(file)  # every tensor class has it, and the protocol does not
        if (written_bytes := file.tell() - start) != self._data.nbytes:
            raise InternalError(
                f"tensor {self._data.name} of {self._data.nbytes} bytes was written as {written_bytes} bytes"
            )


def place_self_contained(
    original: Path,
    target: Path,
    *,
    may_link: bool = False,
    inline_limit_bytes: int = INLINE_LIMIT_BYTES,
    placed: dict[Path, Path] | None = None,
) -> tuple[Path, ...]:
    """Copy a model with its data under a new name.

    A model with embedded weights is linked or copied. External weights are written into the new file, or copied under
    the names of ``data_path`` if the file would exceed the limit. Compiled contexts of execution providers stay
    external.

    Args:
        original: The model; not changed.
        target: The new name; must not exist.
        may_link: Allow a hard link; see ``place_copy``.
        inline_limit_bytes: Largest file with weights inside.
        placed: See ``place_copy``.

    Returns:
        The new files, the model first.

    Raises:
        ModelPathError: the model file does not exist.
        InputError: the file is no ONNX file, or a data file is missing, too short or outside the model's folder.
        OSError: a file cannot be created.
    """
    if not placing.external_files(original) or not _write_inside(original, target, inline_limit_bytes):
        return placing.place_copy(original, target, may_link=may_link, placed=placed)
    return (target,)


def _write_inside(original: Path, target: Path, limit_bytes: int) -> bool:
    """Write a model with all weights embedded.

    Returns:
        False, without a file, for a model beyond the limit or with compiled contexts.
    """
    # Small: the large tensors are in the data files.
    model = onnx.load(original, load_external_data=False)
    if sum(map(placing.stored_bytes, placing.external_tensors(model))) > limit_bytes or any(
        context_file_attributes(model)
    ):
        return False
    return write_embedded(model, original, target, limit_bytes)


def write_embedded(
    model: onnx.ModelProto,
    original: Path,
    target: Path,
    limit_bytes: int = INLINE_LIMIT_BYTES,
    *,
    external: Collection[str] = (),
) -> bool:
    """Write a model with the values of its references embedded.

    Args:
        model: The model, with references to its weights; changed in place.
        original: The ONNX file that the references are relative to.
        target: The new file.
        limit_bytes: Largest file.
        external: Names of the data files that the new file refers to as well.

    Returns:
        False, without a file, for a model beyond the limit.

    Raises:
        InputError: a data file is missing, too short or outside the model's folder.
        OSError: the file cannot be created.
    """
    streamed = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL and data_location(tensor).file not in external:
            streamed[tensor.name] = _file_tensor(locate_values(original, tensor), tensor.name)
            tensor.ClearField("data_location")
    for tensor in placing.external_tensors(model):  # tensors of subgraphs, functions and attributes are small
        if data_location(tensor).file not in external:
            tensor.raw_data = b"".join(locate_values(original, tensor).read())
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    framing = _ModelFraming(model, streamed)
    if framing.size_bytes > limit_bytes:
        return False
    framing.write(target)
    return True


def locate_values(model: Path, tensor: onnx.TensorProto) -> StoredBytes:
    """Return the exact byte range of a tensor's values; a model may state a longer range of its data file."""
    stored = locate_external(model, tensor)
    needed = 0 if 0 in tensor.dims else placing.stored_bytes(tensor) or stored.length
    return replace(stored, length=min(needed, stored.length))


def _file_tensor(stored: StoredBytes, name: str) -> ir.ExternalTensor:
    """Return bytes of a file as a tensor."""
    byte_range = (str(stored.path), stored.start, stored.length)
    return ir.ExternalTensor(*byte_range, ir.DataType.UINT8, shape=ir.Shape([stored.length]), name=name)


_CHUNK_BYTES = 1 << 24
"""Bytes copied at a time. Chosen: larger chunks are no faster."""

_METADATA = "metadata_props"
_HOLDS_NODES = {
    onnx.ModelProto.DESCRIPTOR: ("graph", "functions"),
    onnx.GraphProto.DESCRIPTOR: ("node",),
    onnx.FunctionProto.DESCRIPTOR: ("node",),
    onnx.NodeProto.DESCRIPTOR: ("attribute",),
    onnx.AttributeProto.DESCRIPTOR: ("g", "graphs"),
}
"""Message → fields that contain nodes."""
_HOLDS_LOCATIONS = {
    onnx.GraphProto.DESCRIPTOR: ("initializer", "sparse_initializer"),
    onnx.AttributeProto.DESCRIPTOR: ("t", "tensors", "sparse_tensor", "sparse_tensors"),
    onnx.SparseTensorProto.DESCRIPTOR: ("values", "indices"),
    onnx.TensorProto.DESCRIPTOR: ("external_data",),
}
"""Message → fields that contain names of data files."""
_LOCATION = "location"
"""Specified: the key of a data file's name."""

Metadata = Mapping[str, str]
_Span = bytes | range
"""Bytes of our own, or a range of the file."""


def rewrite_metadata(
    original: Path,
    target: Path,
    model: Metadata,
    nodes: Iterable[Metadata],
    function_nodes: Iterable[Metadata] = (),
    *,
    locations: Mapping[str, str] | None = None,
) -> None:
    """Copy a model file and replace its metadata.

    Args:
        original: A file that ``read_structure`` reads.
        target: The file to write.
        model: The metadata of the model.
        nodes: Metadata of every node of the graph, each before the nodes of its subgraphs.
        function_nodes: Metadata of the nodes of functions, in the order of the file.
        locations: Name of a data file → its new name; None retains all names.

    Raises:
        OSError: a file cannot be read or written.
    """
    with original.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        rewriting = _Rewriting(data, model, iter(nodes), iter(function_nodes), locations or {})
        pieces = rewriting.pieces(0, len(data), onnx.ModelProto.DESCRIPTOR)
        if next(rewriting.nodes, None) is not None or next(rewriting.function_nodes, None) is not None:
            raise InternalError(f"{original} has fewer nodes than metadata was given for")
        with target.open("wb") as out:
            for piece in pieces:
                _copy_span(data, piece, out)


def _copy_span(data: mmap.mmap, piece: _Span, out: BinaryIO) -> None:
    """Write bytes, or a range of the original file in chunks."""
    if isinstance(piece, bytes):
        out.write(piece)
        return
    for start in range(piece.start, piece.stop, _CHUNK_BYTES):
        out.write(data[start : min(start + _CHUNK_BYTES, piece.stop)])


class _Rewriting:
    """A model file in pieces, with new metadata of model and nodes, and new names of data files."""

    def __init__(
        self,
        data: mmap.mmap,
        model: Metadata,
        nodes: Iterator[Metadata],
        function_nodes: Iterator[Metadata],
        locations: Mapping[str, str],
    ) -> None:
        self.nodes = nodes
        self.function_nodes = function_nodes
        self._data = data
        self._model = model
        self._locations = locations

    def pieces(self, start: int, end: int, message: Any, *, in_function: bool = False) -> list[_Span]:
        """Return the pieces of a message between two positions, with new metadata.

        Takes the metadata of the next nodes from ``nodes`` and ``function_nodes``.

        Raises:
            InternalError: the file has more nodes than metadata.
            WireError: the bytes are no message.
        """
        if message is onnx.StringStringEntryProto.DESCRIPTOR:
            return [self._rename_entry(start, end)]
        new_metadata = self._new_metadata(message, in_function)
        holders = _HOLDS_NODES.get(message, ())
        if self._locations:
            holders += _HOLDS_LOCATIONS.get(message, ())
        fields = message.fields_by_number
        spans: list[_Span] = []
        copied = start
        for number, wire_type, at, value, stop in walk_fields(self._data, start, end):
            field = fields.get(number)
            if field is None or wire_type != LENGTH_DELIMITED:
                continue
            if new_metadata is not None and field.name == _METADATA:
                spans.append(range(copied, at))
                copied = stop
            elif field.name in holders:
                inner = self.pieces(
                    value, stop, field.message_type, in_function=in_function or field.name == "functions"
                )
                size = sum(map(len, inner))
                spans += [range(copied, at), varint(number << 3 | LENGTH_DELIMITED) + varint(size), *inner]
                copied = stop
        spans.append(range(copied, end))
        if new_metadata is not None:
            spans.append(new_metadata)
        return [span for span in spans if len(span)]

    def _rename_entry(self, start: int, end: int) -> bytes:
        """Return an entry of a tensor's external data, with the new name of its file."""
        entry = onnx.StringStringEntryProto.FromString(self._data[start:end])
        if entry.key == _LOCATION:
            entry.value = self._locations.get(entry.value, entry.value)
        return bytes(entry.SerializeToString())

    def _new_metadata(self, message: object, in_function: bool) -> bytes | None:
        """Return the new metadata of a message in wire format; `None` for unchanged metadata.

        Raises:
            InternalError: the file has more nodes than metadata.
        """
        if message is onnx.ModelProto.DESCRIPTOR:
            return _serialize_metadata(onnx.ModelProto(), self._model)
        if message is not onnx.NodeProto.DESCRIPTOR:
            return None
        metadata = next(self.function_nodes if in_function else self.nodes, None)
        if metadata is None:
            raise InternalError("the file has more nodes than metadata was given for")
        return _serialize_metadata(onnx.NodeProto(), metadata)


def _serialize_metadata(message: onnx.ModelProto | onnx.NodeProto, metadata: Metadata) -> bytes:
    """Return metadata in wire format, as fields of an empty ``message``, which is changed."""
    for key, value in metadata.items():
        message.metadata_props.add(key=key, value=value)
    return bytes(message.SerializeToString())


PIECE_BYTES = 2_000_000_000
"""Maximum size of a data file, unless a tensor is larger. Chosen: browsers read a file into one array, which some limit
to 2**31 bytes.
"""


def place_numbered(
    original: Path, target: Path, *, may_link: bool = False, piece_bytes: int = PIECE_BYTES
) -> tuple[Path, ...]:
    """Copy a model under a new name, with external weights in ``<name>.onnx_data``, ``<name>.onnx_data_1`` and so on.

    Args:
        original: The model; not changed.
        target: The new name; must not exist.
        may_link: Allow a hard link to a model with embedded weights; see ``place_copy``.
        piece_bytes: Largest data file.

    Returns:
        The new files, the model first.

    Raises:
        ModelPathError: the model file does not exist.
        InputError: the file is no ONNX file, or a data file is missing, too short or outside the model's folder.
        OSError: a file cannot be created.
    """
    data = placing.external_files(original)
    if not data:
        return placing.place_copy(original, target, may_link=may_link)
    # Small: the large tensors are in the data files.
    model = onnx.load(original, load_external_data=False)
    if len(data) == 1 and data[0].stat().st_size <= piece_bytes:
        piece = numbered_data_path(target, 0)
        placing.copy_data(data[0], piece)
        placing.rename_locations(model, dict.fromkeys(placing.data_names(original), piece.name))
        pieces = [piece]
    else:
        pieces = _write_pieces(model, original.parent, target, piece_bytes)
    target.write_bytes(model.SerializeToString())
    return (target, *pieces)


def aligned_offset(end_bytes: int, length: int) -> int:
    """Return the offset of a tensor in a data file: the end of the previous one, aligned if the tensor is large."""
    return -(-end_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES if length >= _ALIGNED_BYTES else end_bytes


def _write_pieces(model: onnx.ModelProto, folder: Path, target: Path, piece_bytes: int) -> list[Path]:
    """Copy the bytes of each tensor to numbered data files beside the target, and update the tensors' references.

    Args:
        model: The model; its tensors are updated.
        folder: Folder of its present data files.
        target: The ONNX file; its name numbers the pieces.
        piece_bytes: Largest size of a piece, unless one tensor is larger.
    """
    pieces: list[Path] = []
    new_locations: dict[tuple[str, int, int], tuple[str, int]] = {}
    size = 0
    for tensor in placing.external_tensors(model):
        location = data_location(tensor)
        length = placing.stored_bytes(tensor) if location.length is None else location.length
        source = (location.file, location.start, length)
        if source not in new_locations:
            begin = aligned_offset(size, length)
            if not pieces or (begin and begin + length > piece_bytes):
                pieces.append(numbered_data_path(target, len(pieces)))
                begin = 0
            with pieces[-1].open("r+b" if begin else "wb") as piece_file:
                piece_file.seek(begin)
                piece_file.writelines(StoredBytes(folder / location.file, location.start, length).read())
            new_locations[source] = (pieces[-1].name, begin)
            size = begin + length
        refer_to_data(tensor, *new_locations[source], length)
    return pieces
