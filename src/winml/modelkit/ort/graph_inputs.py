"""Inputs of any ONNX graph, and their sample values.

Reads the inputs from an open session, chooses the sizes of dynamic dimensions, and draws values or reads them from a
file of arrays. Statements of the file about valid values (``winml.io.inputs``) are respected.
"""

from __future__ import annotations

import contextlib
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, refuse_special_file
from winml.modelkit.onnx.specs import (
    DTYPES,
    STATE_PREFIXES,
    CacheSlot,
    DynamicDimension,
    InputTensorSpec,
    counts_rows,
    graph_input,
    input_records,
    resolve_names,
    stated_bounds,
    summed_sizes,
)
from winml.modelkit.options import suggest
from winml.modelkit.ort.default_sizes import BATCH, IMAGE_EDGE, TOKENS, UNKNOWN_SIZE, default_size
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

Size = int | str | None


_ELEMENT_TYPES = {"float": "float32", "double": "float64"}
"""ONNX Runtime's words that are not numpy's."""
_IMAGE_RANK = 4
"""Batch, channels, height and width."""

DRAWN_DTYPES = frozenset({*DTYPES, "uint64", "uint32", "uint16", "string"})
"""Element types of tensors for which random values are drawn."""


@dataclass(frozen=True)
class Sizes:
    """Chosen sizes of the dynamic dimensions."""

    by_name: Mapping[str, int]
    notes: tuple[str, ...] = ()
    """Notes on sizes chosen by default, one sentence each."""
    chosen: Mapping[str, int] = field(default_factory=dict)
    """Sizes chosen by default."""


def array_words(array: Array) -> str:
    """Return type and shape of an array, for people.

    >>> array_words(np.zeros((2, 3), np.float32))
    'float32[2, 3]'
    """
    return f"{_dtype_of(array)}[{', '.join(map(str, array.shape))}]"


def takes_array(spec: InputTensorSpec, array: Array) -> bool:
    """Return True if the declared type and shape of an input allow an array."""
    return _dtype_of(array) == spec.dtype and spec.takes_sizes(array.shape)


def fitted_array(spec: InputTensorSpec, array: Array, graph: str, hint: str) -> Array:
    """Convert an array to the type of an input.

    Args:
        spec: The input.
        array: Its value.
        graph: Name of the graph, for messages.
        hint: Advice on another shape.

    Raises:
        UsageError: the shape does not fit.
    """
    array = np.ascontiguousarray(array.astype(spec.dtype, copy=False))
    if not spec.takes_sizes(array.shape):
        raise UsageError(
            f"input {spec.name!r} is {array_words(array)}, but {graph} was built for {spec.words}", hint=hint
        )
    return array


def _dtype_of(array: Array) -> str:
    return "string" if array.dtype.kind == "U" else str(array.dtype)


def graph_inputs(session: Session) -> tuple[InputTensorSpec, ...]:
    """Return the inputs of an open graph, in order."""
    shapes = {**session.input_shapes, **dict.fromkeys(session.unranked_inputs)}
    return described_inputs(session.inputs, shapes, session.metadata)


def described_inputs(
    types: Mapping[str, str], shapes: Mapping[str, Sequence[Size] | None], metadata: Mapping[str, str]
) -> tuple[InputTensorSpec, ...]:
    """Return the inputs of a graph.

    Args:
        types: Input → type as ONNX Runtime writes it, in order.
        shapes: Input → sizes; `None`: the graph declares no rank.
        metadata: That of the file.
    """
    records, bounds = input_records(metadata), stated_bounds(metadata)
    return tuple(
        _add_cache_kind(graph_input(name, element_type(type_name), shapes[name], records.get(name, {}), bounds))
        for name, type_name in types.items()
    )


def _add_cache_kind(spec: InputTensorSpec) -> InputTensorSpec:
    """Return an input with the kind of its cache tensor, read from the input name if the file states no kind."""
    if spec.cache is not None or not spec.name.startswith(tuple(STATE_PREFIXES)):
        return spec
    kind = spec.name.rpartition(".")[2].removesuffix("s")  # the exporters of transformers write keys and values
    return spec.model_copy(update={"cache": CacheSlot.model_construct(kind=kind)})


def element_type(type_name: str) -> str:
    """Convert ONNX Runtime's ``tensor(float)`` to numpy's name of the type; other text is returned unchanged.

    An optional tensor has the type of the tensor.
    """
    if type_name.startswith("optional(tensor("):
        type_name = type_name.removeprefix("optional(")[:-1]
    if not type_name.startswith("tensor("):
        return type_name
    name = type_name.removeprefix("tensor(").removesuffix(")")
    return _ELEMENT_TYPES.get(name, name)


def sizes_by_key(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int]) -> dict[str, int]:
    """Return sizes by the keys of the inputs.

    Args:
        inputs: The inputs of the graph.
        requested: Sizes by name in the file, by ``input:axis``, or by key of ``--shape-config``.

    Raises:
        UsageError: an unknown name, two sizes for one dimension, or a size out of the graph's bounds.
    """
    keys = [(f"{spec.name}:{axis}", key) for spec in inputs for axis, key in enumerate(spec.shape)]
    places = {axis_name: key for axis_name, key in keys if isinstance(key, str)}
    sizes = resolve_names(requested, dict.fromkeys(places.values()), places)
    for name, bounds in bounds_by_name(inputs).items():
        if name in sizes and (refusal := bounds.refusal(sizes[name])):
            raise UsageError(f"{opt.shape_config}: {refusal}", hint=f"Use one of the sizes {bounds.words}.")
    return sizes


def bounds_by_name(inputs: Sequence[InputTensorSpec]) -> dict[str, DynamicDimension]:
    """Return dynamic dimension → bounds, for all inputs with bounds."""
    return {name: bounds for spec in inputs for name, bounds in spec.bounds.items()}


def settle_sizes(
    inputs: Sequence[InputTensorSpec], requested: Mapping[str, int], *, batch_size: int | None = None
) -> Sizes:
    """Choose a size for every dynamic dimension.

    Args:
        inputs: The inputs of the graph.
        requested: Sizes by name in the file, by ``input:axis``, or by key of ``--shape-config``.
        batch_size: Size of the batch dimension: the dimension of that name, or an unnamed first dimension.

    Raises:
        UsageError: an unknown name, or an unsupported batch size.
    """
    names = list(dict.fromkeys(key for spec in inputs for key in spec.shape if isinstance(key, str)))
    by_name = sizes_by_key(inputs, requested)
    if batch_size is not None:
        for name in _batch_names(inputs, batch_size):
            if by_name.setdefault(name, batch_size) != batch_size:
                raise UsageError(
                    f"{opt.batch_size} {batch_size}: {opt.shape_config} sets {name} to {by_name[name]}",
                    hint="Use one of the two.",
                )
    chosen: dict[str, int] = {}
    sums = _all_sums(inputs)
    patches = {spec.grid.patches: spec.name for spec in inputs if spec.grid is not None}
    if determined := [name for name in patches if name in by_name]:
        raise UsageError(
            f"{opt.shape_config}: {determined[0]} {by_name[determined[0]]}: it is determined by the image sizes in "
            f"{patches[determined[0]]}",
            hint=f"Omit {determined[0]}, or pass values with {opt.input_data} file.npz.",
        )
    for name in names:
        if name not in by_name and name not in sums and name not in patches:
            chosen[name] = _default_size(name, inputs)
    by_name |= _compute_sums({**by_name, **chosen}, sums)
    return Sizes({**by_name, **chosen}, default_size_notes(chosen), chosen)


def default_size_notes(chosen: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on the sizes chosen by default; ``()`` without such sizes.

    Args:
        chosen: Size of each dimension by its name.
    """
    size_words = ", ".join(f"{name} {size}" for name, size in chosen.items())
    return (f"default sizes: {size_words} (change them with {opt.shape_config})",) if chosen else ()


def _all_sums(inputs: Iterable[InputTensorSpec]) -> dict[str, tuple[int | str, ...]]:
    """Return dimension → terms of its sum, of all inputs."""
    return {name: terms for spec in inputs for name, terms in spec.sums.items()}


def insert_sums(inputs: Sequence[InputTensorSpec], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes by name, with the sums stated by the inputs computed."""
    return {**sizes, **summed_sizes(_all_sums(inputs), sizes)}


def _compute_sums(sizes: Mapping[str, int], sums: Mapping[str, Sequence[int | str]]) -> dict[str, int]:
    """Compute the sizes stated as sums: name → size.

    Raises:
        UsageError: a requested size contradicts its sum.
    """
    summed = summed_sizes(sums, sizes)
    for name, total in summed.items():
        if sizes.get(name, total) != total:
            terms = " + ".join(map(str, sums[name]))
            raise UsageError(
                f"{opt.shape_config}: {name} {sizes[name]}: it is {terms}, {total} here", hint=f"Omit {name}."
            )
    return summed


def _batch_names(inputs: Sequence[InputTensorSpec], batch_size: int) -> list[str]:
    """Return the dynamic batch dimensions; ``[]`` if the fixed size is the requested size.

    Raises:
        UsageError: the batch has another fixed size.
    """
    first_sizes = [spec.shape[0] for spec in inputs if spec.shape]
    batch_names = [key for key in first_sizes if isinstance(key, str) and counts_rows(key)]
    nameless = [key for key in first_sizes if isinstance(key, str) and ":" in key]
    if batch_names or nameless:
        return list(dict.fromkeys(batch_names or nameless))
    if first_sizes and all(size == batch_size for size in first_sizes):
        return []
    shapes = ", ".join(f"{spec.name} {spec.words}" for spec in inputs)
    raise UsageError(
        f"{opt.batch_size} {batch_size}: the graph has no dynamic batch dimension: {shapes}",
        hint=f"Omit it, set the dimension in {opt.shape_config}, or export with this size or with {opt.dynamic_batch}.",
    )


_SEQUENCE_NAME = re.compile(r"(^|_)(seq|sequence|tokens?|time|t|frames|words|len|length)(_|$)", re.IGNORECASE)
_COUNTS_NAME = re.compile(r"^(num|n)_", re.IGNORECASE)


def _default_size(name: str, inputs: Sequence[InputTensorSpec]) -> int:
    """Return the default size of a dimension, within its bounds: by its name, else by its place in an input.

    A name without a known meaning is a batch on the first axis, and an edge of an image on other axes of four
    dimensions of floats.
    """
    bounds = bounds_by_name(inputs).get(name)
    size = default_size(name) or _size_by_place(name, inputs)
    return size if bounds is None else bounds.clamp(size)


def _size_by_place(name: str, inputs: Sequence[InputTensorSpec]) -> int:
    """Return a likely size of a dimension that has no known name."""
    owner = next(spec for spec in inputs if name in spec.shape)
    if _COUNTS_NAME.search(name):
        return UNKNOWN_SIZE
    if any(spec.shape[:1] == (name,) for spec in inputs):
        return BATCH  # the first dimension of an input is its batch, as a rule
    if len(owner.shape) == _IMAGE_RANK and "float" in owner.dtype:
        return IMAGE_EDGE
    return TOKENS if _SEQUENCE_NAME.search(name) else UNKNOWN_SIZE


def draw_feeds(
    inputs: Sequence[InputTensorSpec], sizes: Mapping[str, int], seed: int, *, with_padding: bool = True
) -> dict[str, Array]:
    """Draw one array per input, by the rules of :func:`~winml.modelkit.ort.feeds.make_feeds`.

    Sizes that are sums of other sizes are computed, regardless of ``sizes``.

    Raises:
        UsageError: an input takes values that cannot be drawn, such as a sequence, or more values than any memory
            holds.
    """
    _refuse_other_than_arrays(inputs)
    for spec in inputs:
        if spec.dtype not in DRAWN_DTYPES:
            raise UsageError(
                f"input {spec.name} takes {spec.dtype}, for which no random values can be generated",
                hint=f"Pass values with {opt.input_data} file.npz.",
            )
    return make_feeds(inputs, seed, sizes=insert_sums(inputs, sizes), with_padding=with_padding)


def _refuse_other_than_arrays(inputs: Sequence[InputTensorSpec]) -> None:
    """Refuse inputs whose values are no arrays.

    Raises:
        UsageError: names the input and its type.
    """
    for spec in inputs:
        if not spec.is_array:
            raise UsageError(
                f"input {spec.name} takes {spec.dtype}, and only arrays can be generated or passed as inputs",
                hint="Export the model with tensors as inputs, such as the elements of a sequence in one tensor.",
            )


def load_feeds(path: Path, inputs: Sequence[InputTensorSpec], option: str = "input_data") -> dict[str, Array]:
    """Read one array per input from an ``.npz`` file.

    Args:
        path: The file.
        inputs: The inputs of the graph.
        option: Option that names the file, for messages.

    Raises:
        UsageError: the file does not exist, or a name, dtype or shape does not match the graph's input.
        InputError: the file is damaged, or holds Python objects.
    """
    _refuse_other_than_arrays(inputs)
    source = f"{spell(option)} {path}"
    arrays = _read_arrays(path, source)
    names = [spec.name for spec in inputs]
    for name in arrays:
        if name not in names:
            raise UsageError(
                f"{source}: the graph has no input {name!r}",
                hint=suggest(name, names, also=f"Its inputs: {', '.join(names) or 'none'}."),
            )
    if missing := [name for name in names if name not in arrays]:
        raise UsageError(
            f"{source}: no array for input {missing[0]!r}",
            hint=f"The graph takes {', '.join(f'{spec.name} {spec.words}' for spec in inputs)}.",
        )
    feeds = {spec.name: _check_array(spec, arrays[spec.name], source) for spec in inputs}
    _check_shared_names(inputs, feeds, source)
    return feeds


def _check_array(spec: InputTensorSpec, array: Array, source: str) -> Array:
    """Return an array with the dtype and shape of the input.

    bfloat16 values and strings, stored untyped in numpy files, are restored; no dtype is converted.

    Raises:
        UsageError: dtype or shape does not fit.
    """
    array = restore_dtype(spec.dtype, array)
    if takes_array(spec, array):
        return array
    hint = (
        f'Convert it: array.astype("{spec.dtype}").'
        if spec.takes_sizes(array.shape) and spec.dtype in DRAWN_DTYPES
        else "Pass an array with this dtype and shape."
    )
    raise UsageError(
        f"{source}: input {spec.name!r} takes {spec.words}, the file has {array_words(array)}",
        hint=hint,
    )


def restore_dtype(dtype: str, array: Array) -> Array:
    """Restore bfloat16 values and strings stored untyped or as objects; return other arrays unchanged."""
    if dtype == "bfloat16" and array.dtype.kind == "V" and array.dtype.itemsize == 2:
        import ml_dtypes

        # numpy files do not support bfloat16 and return its bytes without a type name.
        return array.view(ml_dtypes.bfloat16)
    if dtype == "string" and array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    if dtype == "string" and array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        return array.astype(str)
    return array


def _check_shared_names(inputs: Sequence[InputTensorSpec], feeds: Arrays, source: str) -> None:
    """Refuse arrays with different sizes of a dimension.

    Raises:
        UsageError: the message names the dimension and both inputs.
    """
    first_sizes: dict[str, tuple[int, str]] = {}
    for input_name, name, size in named_sizes(inputs, feeds):
        first_size, first_input = first_sizes.setdefault(name, (size, input_name))
        if first_size != size:
            raise UsageError(
                f"{source}: dimension {name} is {first_size} in {first_input!r} and {size} in {input_name!r}",
                hint="Dimensions with the same name must have equal sizes.",
            )


def named_sizes(inputs: Iterable[InputTensorSpec], feeds: Arrays) -> Iterator[tuple[str, str, int]]:
    """Yield input, dimension and size for each named dimension."""
    for spec in inputs:
        for key, size in zip(spec.shape, feeds[spec.name].shape, strict=spec.has_rank):
            if isinstance(key, str):
                yield spec.name, key, size


def batch_of(inputs: Sequence[InputTensorSpec], feeds: Arrays, outputs: Mapping[str, Array | None]) -> tuple[int, str]:
    """Return the number of samples in a run, and the source of the number in words.

    The source is a dimension named batch. Without such a dimension, or if texts and images differ in number, the source
    is the first size shared by all inputs and outputs; without a shared size, a run counts as one sample.
    """
    rows = {name: size for _, name, size in named_sizes(inputs, feeds) if counts_rows(name)}
    if len(set(rows.values())) == 1:
        return next(iter(rows.values())), f"dimension {' and '.join(rows)}"
    shapes = [array.shape for array in (*feeds.values(), *outputs.values()) if array is not None and array.ndim]
    first_sizes = {shape[0] for shape in shapes}
    if feeds and len(first_sizes) == 1 and (size := first_sizes.pop()) > 0:
        return size, "first dimension of all inputs and outputs"
    return 1, "no common first dimension: a run counts as one sample"


_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Specified by numpy; a version 3 is for names of fields that are not Latin, which no tensor has."""
_SAVE_ARRAYS = (
    "Pass a file written by numpy.savez with numbers or text (dtype U; of objects: array.astype(str))."
)
_SAVE_ARRAY = "Pass a file written by numpy.save with numbers or text (dtype U; of objects: array.astype(str))."


def read_array(path: Path, source: str) -> Array:
    """Read the array of a file written by ``numpy.save``.

    Args:
        path: The file.
        source: Option and path, for messages.

    Raises:
        UsageError: the file does not exist.
        InputError: the file is damaged, holds several arrays or Python objects, or declares more data than it holds.
    """
    with _open_file(path, source, _SAVE_ARRAY) as file, _damage_explained(source, "not an .npy file", _SAVE_ARRAY):
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            raise InputError(f"{source}: does not begin as an .npy file", hint=_SAVE_ARRAY)
        file.seek(0)
        declared = _declared_bytes(file)
        size = path.stat().st_size - file.tell()
        if declared > size:
            raise InputError(
                f"{source}: the array declares {size_words(declared)} and has {size_words(size)}", hint=_SAVE_ARRAY
            )
        file.seek(0)
        array: Array = np.load(file, allow_pickle=False)
        return array


def _read_arrays(path: Path, source: str) -> dict[str, Array]:
    """Read the arrays of a file by name.

    Args:
        path: The file.
        source: Option and path, for messages.

    Raises:
        UsageError: the file does not exist, or holds one unnamed array.
        InputError: the file is damaged, holds Python objects, or declares more data than it holds.
    """
    with _open_file(path, source, "Pass a file written by numpy.savez.") as file:
        is_single = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        file.seek(0)
        if not is_single:
            with _damage_explained(source, "not an .npz file", _SAVE_ARRAYS):
                content = np.load(file, allow_pickle=False)
                _refuse_oversized(content.zip, source)
                return {name: content[name] for name in content.files}
    raise UsageError(
        f"{source}: contains one array without a name",
        hint='Save it with the name of the input: numpy.savez("inputs.npz", input_ids=array).',
    )


@contextlib.contextmanager
def _open_file(path: Path, source: str, hint: str) -> Iterator[IO[bytes]]:
    """Open a regular file inside the block.

    Raises:
        UsageError: the file is missing, a folder, a pipe or a device.
    """
    try:
        refuse_special_file(path)
        file = path.open("rb")
    except ForeignNameError as error:
        problem = "not a regular file" if error.problem == "not regular" else str(error)
        raise UsageError(f"{source}: {problem}", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}", hint=hint) from None
    with file:
        yield file


def _damage_explained(source: str, kind: str, hint: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns errors of numpy into an InputError about a damaged file."""
    return foreign_parser(f"{source}: {kind}, or damaged, or contains Python objects", hint=hint)


def _declared_bytes(file: IO[bytes]) -> int:
    """Read the header of an array, and return the declared size in bytes.

    Raises:
        ValueError: the file has no header of an array.
    """
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"an array of the version {version}")
    shape, _, dtype = _HEADER_READERS[version](file)
    return math.prod(shape) * int(dtype.itemsize)


def _refuse_oversized(archive: zipfile.ZipFile, source: str) -> None:
    """Refuse arrays whose headers declare more data than their files or the memory hold.

    Raises:
        InputError: names the array.
        ValueError: a member of the archive is no array.
    """
    free = available_bytes()
    total = 0
    for member in archive.infolist():
        with archive.open(member) as file:
            declared = _declared_bytes(file)
        total += declared
        name = member.filename.removesuffix(".npy")
        if declared > member.file_size:
            raise InputError(
                f"{source}: array {name!r} declares {size_words(declared)} and has {size_words(member.file_size)}",
                hint="Save it again with numpy.savez.",
            )
        if total > free:
            raise InputError(
                f"{source}: the arrays up to {name!r} need {size_words(total)}, but {size_words(free)} of "
                "memory are free",
                hint="Use fewer or smaller samples per file.",
            )
