"""Reading of the structure of an ONNX file without the values of its weights.

Walks the file field by field in its wire format and skips tensor data. Returns a ``ModelProto`` whose larger tensors
have name, type and shape but no values; or whose larger initializers refer to their values in the file itself, in the
form of external data. Neither memory nor time grows with the weights, and external data files are never opened.

Modules written as functions (``winml.module``) are inlined here, so that no other code needs to handle them. Otherwise
the model is not interpreted.
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from winml.modelkit import metadata_keys
from winml.modelkit.errors import InputError, ModelPathError, error_chain, first_line
from winml.modelkit.metadata_keys import FUNCTION_DOMAIN
from winml.modelkit.onnx.contents import VALUE_FIELDS
from winml.modelkit.onnx.files.foreign_names import name_problem
from winml.modelkit.onnx.files.named_paths import record_read
from winml.modelkit.onnx.files.wire_format import LENGTH_DELIMITED, WireError, varint, walk_fields
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import recorded_modules

MIN_SKIPPED_BYTES = 4096
"""Messages below this size are read completely, including values. Chosen: one page. Shapes and axes, which shape
inference needs, are far smaller; weights worth skipping are far larger.
"""

_T = TypeVar("_T")

_GRAPH_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""Errors of onnx_ir for an invalid graph: a SerdeError around the reason, or the reason alone. A graph that is nested
too deeply raises a RecursionError, which is a RuntimeError.
"""

_DEEPEST = 100
"""Specified: protobuf's own limit on nested messages."""
_MAX_VALUE_LENGTH = 60
"""Chosen: as much of a damaged text as finds it."""
_LFS_POINTER = b"version https://git-lfs"


def required_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a graph without a default; inputs with a default, such as adapters, are optional."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in stored]


def read_structure(path: Path, *, as_written: bool = False) -> onnx.ModelProto:
    """Read a model without the values of its larger tensors.

    Args:
        path: An ONNX file.
        as_written: Do not inline modules written as functions.

    Returns:
        The model; tensors of ``MIN_SKIPPED_BYTES`` or more have every field except the values.

    Raises:
        ModelPathError: the file is missing, is a directory or cannot be opened.
        InputError: the file is empty, cut off, or not an ONNX file.
    """
    return _read_model(path, lambda *_: b"", as_written=as_written)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a model file.

    Raises:
        ModelPathError: the file is missing, is a directory or cannot be opened.
        InputError: the file is empty, cut off, or not an ONNX file.
    """
    return {entry.key: entry.value for entry in read_structure(path).metadata_props}


def read_referring(path: Path, *, initializers_only: bool = False) -> onnx.ModelProto:
    """Read a model whose larger initializers refer to their bytes in the model file itself.

    The location of these references is the name of the model file.

    All other tensors have their values, or refer to their data file.

    Args:
        path: An ONNX file.
        initializers_only: Tensors of constants are references, too; omit the values of other large tensors.

    Raises:
        ModelPathError: the file is missing, is a directory or cannot be opened.
        InputError: the file is empty, cut off, or not an ONNX file.
    """

    def refer(role: str, field: str, byte_range: slice) -> bytes | None:
        """Replace values by a reference to their byte range in the file; `None`: the values remain."""
        if role != "initializer" and not (initializers_only and role == "t"):
            return b"" if initializers_only else None
        if field != "raw_data":
            return None
        tensor = onnx.TensorProto()
        refer_to_data(tensor, path.name, byte_range.start, byte_range.stop - byte_range.start)
        content: bytes = tensor.SerializeToString()
        return content

    return _read_model(path, refer)


def refer_to_data(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Replace the values of a tensor by a reference to a data file, in place."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


_Replacement = Callable[[str, str, slice], bytes | None]
"""Maps the role of a tensor, the field with its values, and the byte range of that field to a replacement; None:
unchanged.
"""


def _read_model(path: Path, replace: _Replacement, *, as_written: bool = False) -> onnx.ModelProto:
    """Read a model with replaced values, modules inlined unless ``as_written``."""
    model = _read_as_written(path, replace)
    if not as_written:
        inline_functions(model, path)
    return model


def inline_functions(model: onnx.ModelProto, path: Path) -> int:
    """Inline modules written as functions in a model that was read as written, in place.

    Returns:
        The number of inlined functions.

    Raises:
        InputError: the functions are damaged.
    """
    if not any(function.domain == FUNCTION_DOMAIN for function in model.functions):
        return 0
    # Such files are rare, and onnx_ir takes a second to import.
    from winml.modelkit.onnx.function_inlining import inline_module_functions

    return reading_graph(path, lambda: inline_module_functions(model))


def reading_graph(path: Path, read: Callable[[], _T]) -> _T:
    """Return the result of ``read``; convert its errors to errors that name ``path``.

    Raises:
        InputError: the file holds no usable graph; names the reason.
    """
    try:
        return read()
    except _GRAPH_ERRORS as error:
        # Each outer message adds its wrapper; the innermost message is the reason.
        *_, reason = error_chain(error, with_context=False)
        reason_words = "it is nested too deeply" if isinstance(reason, RecursionError) else first_line(reason)
        raise InputError(f"{path}: cannot be read as a graph: {reason_words}", hint="Export it again.") from error


def _read_as_written(path: Path, replace: _Replacement) -> onnx.ModelProto:
    """Read a model from a mapped file, with values replaced.

    Raises:
        ModelPathError: the path is no readable regular file.
        InputError: the file is empty, cut off or no ONNX file.
    """
    record_read(path)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # Opening a pipe would wait for a writer.
            problem = "is a directory, not an ONNX file" if stat.S_ISDIR(mode) else "is not a regular file"
            raise ModelPathError(f"{path} {problem}", hint="Pass the path of an ONNX file.")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InputError(f"{path} is empty, expected an ONNX file", hint="Export or download it again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_structure(data, path, replace)
    except FileNotFoundError:
        raise ModelPathError(f"{path}: no such file", hint="Pass the path of an ONNX file.") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{path} cannot be mapped") from error
        raise ModelPathError(
            f"{path} cannot be read: {error.strerror}", hint="Pass the path of an ONNX file."
        ) from None


def _parse_structure(data: mmap.mmap, path: Path, replace: _Replacement) -> onnx.ModelProto:
    """Parse a mapped file, with values replaced.

    Raises:
        InputError: the file is cut off, damaged or no ONNX file.
    """
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(
            _replace_values(data, slice(0, len(data)), onnx.ModelProto.DESCRIPTOR, replace)
        )
    except (WireError, DecodeError) as error:
        if isinstance(error, WireError) and error.cut_off:
            raise InputError(
                f"{path} is cut off: it ends after {len(data)} bytes, in the middle of the model",
                hint="Export or download it again.",
            ) from None
        raise _not_onnx(data, path) from None
    if not model.HasField("graph"):
        raise _not_onnx(data, path)
    if unreadable := next(_unreadable_texts(model), None):
        raise InputError(
            f"{path} is damaged: a field {unreadable[0]!r} holds {unreadable[1]!r:.{_MAX_VALUE_LENGTH}}, which is not "
            "UTF-8 text",
            hint="Export or download it again.",
        )
    _shorten_domain(model)
    return model


_LONG_DOMAIN = "ai.onnx"
"""Specified: another spelling of ONNX's own domain, which is empty."""


def _shorten_domain(model: onnx.ModelProto) -> None:
    """Replace ONNX's long domain name by ``""`` throughout a model, in place."""
    holders: list[Any] = [
        *model.opset_import,
        *(entry for function in model.functions for entry in function.opset_import),
    ]
    graphs: list[Any] = [model.graph, *model.functions]
    while graphs:
        nodes = graphs.pop().node
        holders += nodes
        for attribute in (attribute for node in nodes for attribute in node.attribute):
            graphs += [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs
    for holder in holders:
        if holder.domain == _LONG_DOMAIN:
            holder.domain = ""


def _unreadable_texts(message: Message) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every invalid string field, which protobuf returns as bytes."""
    for field, value in message.ListFields():
        # Told by the value: protobuf 6.31 changed the words of the descriptor.
        if field.type == FieldDescriptor.TYPE_STRING:
            texts = (value,) if isinstance(value, (str, bytes)) else value
            yield from ((field.name, text) for text in texts if isinstance(text, bytes))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from _unreadable_texts(inner)


def _not_onnx(data: mmap.mmap, path: Path) -> InputError:
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        return InputError(f"{path} is a Git LFS pointer, not the model itself", hint="Download it: git lfs pull")
    return InputError(
        f"{path} is not an ONNX file, or damaged: its {len(data)} bytes contain no model",
        hint="Pass a file written by an ONNX exporter.",
    )


def _replace_values(
    data: mmap.mmap, byte_range: slice, message: object, replace: _Replacement, role: str = "", depth: int = 0
) -> bytes:
    """Return the bytes of a message in a range of the file, with the values of large tensors replaced.

    Args:
        data: The file.
        byte_range: Start and end of the message.
        message: Its protobuf descriptor.
        replace: Returns the replacement of values.
        role: Name of the field that contains the message.
        depth: Number of enclosing messages.

    Raises:
        WireError: the bytes are no such message.
    """
    start, end = byte_range.start, byte_range.stop
    if depth > _DEEPEST:
        raise WireError
    fields = _fields_of(message)
    is_tensor = message is onnx.TensorProto.DESCRIPTOR
    pieces = []
    replacements = []
    copied = start
    for number, wire_type, at, value, stop in walk_fields(data, start, end):
        if stop > end:
            raise WireError(cut_off=depth == 0 and number in fields)
        field = fields.get(number)
        if field is None:
            continue
        if is_tensor and field.name in VALUE_FIELDS:
            if (replaced := replace(role, field.name, slice(value, stop))) is not None:
                pieces.append(data[copied:at])
                replacements.append(replaced)
                copied = stop
        elif wire_type == LENGTH_DELIMITED and field.message_type is not None and stop - value >= MIN_SKIPPED_BYTES:
            inner = _replace_values(data, slice(value, stop), field.message_type, replace, field.name, depth + 1)
            pieces += [
                data[copied:at],
                varint(number << 3 | LENGTH_DELIMITED),
                varint(len(inner)),
                inner,
            ]
            copied = stop
    # At the end: the last occurrence of a field counts, and some tools write data_location.
    return b"".join((*pieces, data[copied:end], *replacements))


@functools.cache
def _fields_of(message: Any) -> Mapping[int, Any]:
    """Return number → field of a protobuf descriptor."""
    return {field.number: field for field in message.fields}


DataProblem = Literal["outside", "missing", "cut off"]
"""Problem of a data file.

``outside``: its name leads out of the folder of the model, directly or by a link. ``missing``: there is no such regular
file. ``cut off``: the file ends before the data does.
"""


@dataclass(frozen=True)
class DataFile:
    """A data file referenced by a model."""

    path: Path
    size_bytes: int | None
    """Size of the file; None if it is missing or was not looked up."""
    problem: DataProblem | None


def check_data_file(folder: Path, name: str, needed_bytes: int = 0) -> DataFile:
    """Check one data file of a model by its name and size; the file is not opened.

    Args:
        folder: The folder of the model file.
        name: File name as written in the model. A name that leads out of the folder is not looked up: it could be any
            file of the machine.
        needed_bytes: Smallest size of the file that holds all the data.
    """
    path = folder / name
    problem = name_problem(folder, name)
    if problem is not None:
        return DataFile(path, None, "outside" if problem in ("no name", "outside") else "missing")
    size_bytes = path.stat().st_size
    return DataFile(path, size_bytes, "cut off" if size_bytes < needed_bytes else None)


def merge_node_keys(nodes: Iterable[onnx.NodeProto], metadata: Mapping[str, str]) -> int:
    """Merge the duplicate metadata keys of nodes, in place; return the number of nodes that had any.

    Args:
        nodes: The nodes.
        metadata: Metadata of the model.
    """
    repeated = [node for node in nodes if len({entry.key for entry in node.metadata_props}) < len(node.metadata_props)]
    modules = {module.tag: module.path for module in recorded_modules(metadata) or ()} if repeated else {}
    for node in repeated:
        replace_metadata(node, _merge_metadata(node, modules))
    return len(repeated)


def replace_metadata(holder: onnx.ModelProto | onnx.NodeProto, metadata: Mapping[str, str]) -> None:
    """Replace all metadata of a model or a node, in place."""
    del holder.metadata_props[:]
    for key, value in metadata.items():
        holder.metadata_props.add(key=key, value=value)


def _merge_metadata(node: onnx.NodeProto, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a node with each key once; different tags become the tag of the common module."""
    values: dict[str, list[str]] = defaultdict(list)
    for entry in node.metadata_props:
        values[entry.key].append(entry.value)
    merged = {
        key: key_values[-1]
        for key, key_values in values.items()
        if len(set(key_values)) == 1 or not key.startswith(metadata_keys.TORCH_PREFIX)
    }
    if len(set(values[metadata_keys.TAG_KEY])) < 2:
        return merged
    try:
        tag = merged[metadata_keys.TAG_KEY] = address.common_ancestor(values[metadata_keys.TAG_KEY])
    except ValueError:
        # Not a valid tag; carrying the tags later finds the node untagged.
        del merged[metadata_keys.TAG_KEY]
        return merged
    merged[metadata_keys.SOURCE_KEY] = "merged"
    merged[metadata_keys.MODULES_KEY] = json.dumps(sorted(set(values[metadata_keys.MODULE_KEY])), ensure_ascii=False)
    for key in (metadata_keys.DEPTH_KEY, metadata_keys.MODULE_KEY, metadata_keys.NAMESPACE_KEY):
        merged.pop(key, None)
    if tag in modules:
        # If the file does not record it, the transfer of tags writes it from the original model.
        merged[metadata_keys.MODULE_KEY] = modules[tag]
        merged[metadata_keys.DEPTH_KEY] = str(address.depth(tag))
    return merged
