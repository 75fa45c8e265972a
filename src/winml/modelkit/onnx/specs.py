"""Specifications of graph inputs and outputs, exchanged by all stages.

Plain records; nothing here reads a model or generates values (``ort/feeds.py`` does).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

import pydantic

from winml.modelkit.errors import ConfigError, UsageError, opt, spell
from winml.modelkit.metadata_keys import DIMENSIONS_KEY, INPUTS_KEY
from winml.modelkit.options import Options, load_metadata, parse_options, read_json, suggest
from winml.modelkit.words import shape_words

DTYPES = (
    "float32", "float16", "bfloat16", "float64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Names accepted for ``dtype``: numpy's, plus ``bfloat16``."""

PAST_PREFIX, PRESENT_PREFIX = "past_key_values.", "present."
"""Specified: start of the names of KV caches among inputs and outputs, in optimum, transformers.js and
onnxruntime-genai."""
STATE_PREFIXES = {
    PAST_PREFIX: PRESENT_PREFIX,
    "input.cache.layers.": "output.cache.layers.",
    "input.past_key_values.layers.": "output.past_key_values.layers.",
}
"""Prefix of the keys and values that a decoder takes → prefix of their next values; the last two are written by the
exporters of transformers (5.24, and before)."""

OPEN_SIZE = -1
"""Placeholder for a size, as in the shapes of other tools: dynamic, and named by the export."""


Dimension = Annotated[int, pydantic.Field(ge=OPEN_SIZE)] | Annotated[str, pydantic.Field(pattern=r"^[A-Za-z_]\w*$")]


def is_open(size: int | str) -> bool:
    """Return True if a size of a shape is left open."""
    return isinstance(size, str) or size == OPEN_SIZE


def summed_sizes(sums: Mapping[str, Sequence[int | str]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that are sums of other sizes, if all terms are known.

    >>> summed_sizes({"total": ("past", "tokens"), "other": ("unknown", 1)}, {"past": 7, "tokens": 2})
    {'total': 9}
    """
    terms_by_name = {
        name: [sizes.get(term) if isinstance(term, str) else term for term in terms] for name, terms in sums.items()
    }
    known_terms = {name: [term for term in terms if term is not None] for name, terms in terms_by_name.items()}
    return {name: sum(terms) for name, terms in known_terms.items() if len(terms) == len(terms_by_name[name])}


def _check_dtype(name: str) -> str:
    """Refuse an unknown element type.

    Raises:
        ValueError: the message lists the types.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype; expected one of {', '.join(DTYPES)}")
    return name


_DType = Annotated[str, pydantic.AfterValidator(_check_dtype)]


_DYNAMIC_SIZES_HINT = (
    'For a dynamic dimension, write a name or -1 in place of the size: "shape": ["batch", 16]; or use '
    "{dynamic_batch}, {dynamic_seq_len} or {dynamic_axes}."
)


def is_array_type(dtype: str) -> bool:
    """Return False for the type of a value that is no array: ``sequence`` in ONNX, ``seq(tensor(float))`` in a session.

    Types of arrays have the names of numpy, and are empty if a file states none.
    """
    return "(" not in dtype and dtype not in ("sequence", "map", "sparse_tensor", "opaque")


class _TensorSpec(Options):
    """Name, shape and element type of an input or output."""

    ways_out: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("shape", "dynamic", "dynamic_axes", "dynamic_dims", "dynamic_shapes", "dynamic_shape"), _DYNAMIC_SIZES_HINT
    )

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Name of the graph input or output."""
    shape: tuple[Dimension, ...]
    """Sizes, 0 for an empty cache; a name stands for a dynamic dimension, and -1 for one that the export names. ``()``
    is a scalar."""
    dtype: _DType
    """Element type, one of :data:`DTYPES`."""

    @property
    def named_shape(self) -> tuple[int | str | None, ...]:
        """The shape, with `None` for each dynamic dimension without a name (``x:0`` in the shape of ``x``)."""
        return tuple(None if size == _axis_key(self.name, axis) else size for axis, size in enumerate(self.shape))

    @property
    def words(self) -> str:
        """The type, for people."""
        return shape_words(self.dtype, self.named_shape)


class CacheSlot(Options):
    """Tensor of a KV cache that an input takes: the value of an output of the previous run."""

    layer: Annotated[int, pydantic.Field(ge=0)] | None = None
    """Layer of the cache, from 0; None if a file of another tool does not state it."""
    kind: Annotated[str, pydantic.Field(min_length=1)]
    """``key`` and ``value`` hold an entry for every token; ``conv`` and ``recurrent`` are states of one size."""
    window: Annotated[int, pydantic.Field(ge=1)] | None = None
    """Number of last tokens the layer attends to; None: all tokens."""
    side: Literal["encoder", "decoder"] | None = None
    """Of an encoder-decoder: whose tokens it holds an entry for; None for any other model."""


class GridSlot(Options):
    """Grid of image patches in an input: frames, rows and columns of each image."""

    patches: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z_]\w*$")]
    """Name of the number of patches of all pictures together, in the shape of another input."""
    multiple: Annotated[int, pydantic.Field(ge=1)] = 1
    """Rows and columns are whole multiples of it."""


class InputTensorSpec(_TensorSpec):
    """One graph input: name, shape, element type and valid values."""

    value_range: tuple[float, float] | None = None
    """Smallest and largest valid value, both included. None: standard normal for floats, 0..1 for integers."""
    last_value: int | None = None
    """Value of the last unmasked position of each row, for models that search for it (an end-of-sequence token)."""
    first_values: tuple[tuple[int, Annotated[int, pydantic.Field(ge=1)]], ...] = ()
    """Values at the start of each entry of the first axis, as runs of (value, count): image placeholder tokens, or all
    values, such as the size of a grid. The values do not occur elsewhere, unless in ``value_range``."""
    values: tuple[int | float | str, ...] = ()
    """The valid values, if the input takes no others: sampling rates, or the categories of a column of text."""
    ascending: bool = False
    """True if the values of each row ascend, such as offsets or indices of sparse rows."""
    cache: CacheSlot | None = None
    """The tensor of the KV cache that it takes; None for other inputs."""
    sums: Mapping[str, tuple[Dimension, ...]] = {}
    """Name in the shape → the sizes whose sum it is: a mask is as long as the cache and the tokens together."""
    grid: GridSlot | None = None
    """Number of patches, if the input contains the grids of images."""
    _bounds: Mapping[str, DynamicDimension] = pydantic.PrivateAttr(default_factory=dict)
    _is_typed: bool = pydantic.PrivateAttr(default=True)
    """False for a patch that leaves the element type to the model."""
    _has_rank: bool = pydantic.PrivateAttr(default=True)

    @classmethod
    def read_patch(cls, entry: Any, label: str) -> InputTensorSpec:
        """Read the description of one input, whose element type may be left to the model.

        Raises:
            ConfigError: an unknown key or a wrong value.
        """
        is_typed = not isinstance(entry, dict) or "dtype" in entry
        spec = parse_options(cls, entry if is_typed else {"dtype": "float32", **entry}, label)
        spec._is_typed = is_typed
        return spec

    @property
    def is_typed(self) -> bool:
        """True if the element type is stated."""
        return self._is_typed

    def completed_by(self, own: InputTensorSpec) -> InputTensorSpec:
        """Return the description with the type and values of the model's own input where it states none."""
        stated = self.model_fields_set if self.is_typed else self.model_fields_set - {"dtype"}
        names = [name for name in ("dtype", "value_range", "last_value", "values", "ascending") if name not in stated]
        completed = self.model_copy(update={name: getattr(own, name) for name in names})
        completed._is_typed = True
        return completed

    @property
    def fixed_grid(self) -> tuple[int, ...]:
        """Frames, rows and columns of patches of each image, if the input has no other values; else ``()``."""
        values = tuple(value for value, count in self.first_values for _ in range(count))
        return values if len(values) == 3 and self.shape[1:] == (3,) else ()

    @property
    def has_rank(self) -> bool:
        """False for an input of a file that declares no rank; its shape here is ``()``, and it takes any sizes."""
        return self._has_rank

    @property
    def is_array(self) -> bool:
        """False for a value that no option passes to a graph, such as a sequence."""
        return is_array_type(self.dtype)

    @property
    def bounds(self) -> Mapping[str, DynamicDimension]:
        """Name in the shape → the sizes for which the graph was made, if its file states them."""
        return self._bounds

    def takes_sizes(self, sizes: Sequence[int]) -> bool:
        """Return True if the declared shape allows these sizes."""
        return not self.has_rank or (
            len(sizes) == len(self.shape)
            and all(
                not isinstance(declared, int) or declared == size
                for declared, size in zip(self.shape, sizes, strict=True)
            )
        )

    @pydantic.field_validator("value_range")
    @classmethod
    def _check_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("the first value must not be larger than the second")
        return value

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.io.inputs`` entry of FORMATS: name, shape, dtype and, where set, value_range,
        first_values, values, ascending, cache, sums and grid.
        """
        record: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        if self.value_range is not None:
            is_float = "float" in self.dtype
            record["value_range"] = [bound if is_float else int(bound) for bound in self.value_range]
        if self.first_values:
            record["first_values"] = [list(run) for run in self.first_values]
        if self.values:
            record["values"] = list(self.values)
        if self.ascending:
            record["ascending"] = True
        if self.cache is not None:
            record["cache"] = self.cache.model_dump(exclude_none=True)
        if self.sums:
            record["sums"] = {name: list(terms) for name, terms in self.sums.items()}
        if self.grid is not None:
            record["grid"] = self.grid.model_dump()
        return record


def input_records(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the entries of ``winml.io.inputs`` in the metadata of a file, by name; ``{}`` if damaged."""
    try:
        records = load_metadata(metadata.get(INPUTS_KEY, "[]"))
        return {record["name"]: record for record in records if isinstance(record["name"], str)}
    except (ValueError, KeyError, TypeError):
        return {}


STATED_FIELDS = ("value_range", "first_values", "values", "ascending", "cache", "sums", "grid")
"""Fields of an input beside its name, shape and type, as the metadata of a file states them."""


@functools.cache
def _field_reader(name: str) -> pydantic.TypeAdapter[Any]:
    """Return the validator of a field of an input."""
    return pydantic.TypeAdapter(InputTensorSpec.model_fields[name].rebuild_annotation())


def graph_input(
    name: str,
    dtype: str,
    shape: Iterable[int | str | None] | None,
    record: Mapping[str, Any] = {},
    bounds: Mapping[str, DynamicDimension] = {},
) -> InputTensorSpec:
    """Return the specification of an input of any graph, including foreign names and types.

    Args:
        name: Its name.
        dtype: Element type in numpy's words (``float32``), ``string``, or ONNX Runtime's words for what is no tensor.
        shape: Its sizes; None for a dynamic dimension without a name. `None`: the graph declares no rank.
        record: Its entry in the metadata of the file; a damaged field is ignored.
        bounds: Bounds of the dynamic dimensions of the graph, by name.
    """
    fields = {}
    for field in STATED_FIELDS:
        with contextlib.suppress(pydantic.ValidationError):
            if (value := record.get(field)) is not None:
                if field == "cache" and isinstance(value, dict):  # a later version may write more keys
                    value = {key: value[key] for key in CacheSlot.model_fields if key in value}
                fields[field] = _field_reader(field).validate_python(value)
    sizes = tuple(size if _is_stated(size) else _axis_key(name, axis) for axis, size in enumerate(shape or ()))
    spec = InputTensorSpec.model_construct(name=name, dtype=dtype, shape=sizes, **fields)
    spec._has_rank = shape is not None
    spec._bounds = {size: bounds[size] for size in sizes if isinstance(size, str) and size in bounds}
    return spec


def _is_stated(size: int | str | None) -> TypeGuard[int | str]:
    """Return True for a size or name; False for a missing or negative size."""
    # Some exporters write -1 for a size they leave open.
    return size >= 0 if isinstance(size, int) else bool(size)


def _axis_key(name: str, axis: int) -> str:
    """Return the key of an axis without a name, ``input:axis``."""
    return f"{name}:{axis}"


def stated_inputs(metadata: Mapping[str, str]) -> dict[str, InputTensorSpec]:
    """Return the inputs stated in the metadata of a file, by name, without shapes and types."""
    return {name: graph_input(name, "", (), record) for name, record in input_records(metadata).items()}


def stated_sums(metadata: Mapping[str, str]) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes that are sums of other sizes, as stated in the metadata of a file."""
    return {name: terms for spec in stated_inputs(metadata).values() for name, terms in spec.sums.items()}


class OutputTensorSpec(_TensorSpec):
    """One graph output: name, shape and element type."""

    def disagreement(self, actual: OutputTensorSpec) -> str:
        """Describe how the actual output differs from this specification, or return ``""``.

        A dynamic size matches any size.
        """
        agrees = len(self.shape) == len(actual.shape) and all(
            isinstance(expected_size, str) or expected_size in (OPEN_SIZE, size)
            for expected_size, size in zip(self.shape, actual.shape, strict=False)
        )
        if agrees and self.dtype == actual.dtype:
            return ""
        return f"expected {self.dtype}{list(self.shape)}, the model returns {actual.dtype}{list(actual.shape)}"

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.io.outputs`` entry of FORMATS."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}


_OPTION_OF_KEY: Mapping[str, str] = {"dynamic_sequence": "dynamic_seq_len"}

_OLDER_NAMES: Mapping[str, str] = {
    "batch": "batch_size",
    "sequence": "sequence_length",
    "past_sequence": "past_sequence_length",
    "total_sequence": "total_sequence_length",
    "decoder_sequence": "decoder_sequence_length",
    "encoder_sequence": "encoder_sequence_length",
    "past_encoder_sequence": "past_encoder_sequence_length",
    "choices": "num_choices",
    "channels": "num_channels",
    "frames": "num_frames",
    "mel_bins": "num_mel_bins",
    "samples": "audio_length",
}
"""Dimension name in files of winml 0.2 → current name: the name in optimum and transformers.js, and its key in
``--shape-config`` if it has one.
"""

_NAME = r"^[A-Za-z_]\w*$"
_INLINE = re.compile(r"^(?P<input>[^:=,\s]+):(?P<axes>.+)$")

Size = Annotated[int, pydantic.Field(ge=1)]
Name = Annotated[str, pydantic.Field(pattern=_NAME)]


ROWS_OF_ONE_KIND = frozenset({"text_batch_size", "image_batch_size", "audio_batch_size"})
"""Rows of texts, images and recordings, where a model scores each with each."""


class OpenSize(Options):
    """A size the user leaves open, as written in ``--shape-config``."""

    min: Size = 1
    """Smallest size the model will be run with."""
    max: Size | None = None
    """Largest size the model will be run with; None: unbounded."""
    example: Size | None = None
    """Size to trace with; None: chosen by the export. At least 2: a size of 1 is traced as a constant."""
    name: Name | None = None
    """Name of the dimension; None: its key."""

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> OpenSize:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.example is None:
            return self
        if self.example < self.min or (self.max is not None and self.example > self.max):
            raise ValueError(f"example {self.example} is outside of {self.min} to {self.max or 'any'}")
        if self.example == 1:
            raise ValueError("example 1: a size of 1 is traced as a constant; set 2 or more")
        return self


class DynamicDimension(OpenSize):
    """A dynamic dimension of a graph, by its name."""

    name: Name
    """As in the shapes of the inputs."""
    min: Annotated[int, pydantic.Field(ge=0)] = 1
    """Smallest size the model will be run with; 0 for a cache that may be empty."""

    def clamp(self, size: int) -> int:
        """Return the nearest size within the bounds."""
        return max(self.min, size if self.max is None else min(size, self.max))

    def refusal(self, size: int) -> str:
        """Return the reason to refuse a size; ``""`` if it is within the bounds.

        >>> DynamicDimension(name="T", max=64).refusal(65)
        'T 65: the graph was made for sizes 1 to 64'
        """
        return "" if self.clamp(size) == size else f"{self.name} {size}: the graph was made for sizes {self.words}"

    @property
    def words(self) -> str:
        """The sizes.

        >>> DynamicDimension(name="T", max=64).words, DynamicDimension(name="T", min=2).words
        ('1 to 64', 'from 2')
        """
        return f"from {self.min}" if self.max is None else f"{self.min} to {self.max}"

    def as_record(self) -> dict[str, Any]:
        """Return the ``winml.io.dimensions`` entry of FORMATS: name, min and, if bounded, max."""
        return {"name": self.name, **self.model_dump(exclude_none=True, include={"min", "max"})}


def stated_bounds(metadata: Mapping[str, str]) -> dict[str, DynamicDimension]:
    """Return the bounds of dynamic dimensions stated in the metadata of a file, by name; damaged bounds are omitted."""
    bounds = {}
    with contextlib.suppress(ValueError, TypeError):
        for record in load_metadata(metadata.get(DIMENSIONS_KEY, "[]")):
            with contextlib.suppress(pydantic.ValidationError):
                bound = DynamicDimension.model_validate(record)
                bounds[bound.name] = bound
    return bounds


def damaged_bounds_notes(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield a note if the metadata of a file has damaged bounds of dimensions, which are ignored."""
    try:
        records = load_metadata(metadata.get(DIMENSIONS_KEY, "[]"))
        is_damaged = not isinstance(records, list) or len(stated_bounds(metadata)) != len(records)
    except ValueError:
        is_damaged = True
    if is_damaged:
        yield (
            f"{DIMENSIONS_KEY} of the file is damaged: bounds of dynamic dimensions that cannot be read are ignored, "
            "and outputs for other sizes may be wrong. Export the model again."
        )


UNNAMED = ""
"""Placeholder for the name of an axis: dynamic, and named by the export."""


def _normalize_axes(axes: object) -> Any:
    """Convert axes to a mapping of axis to name; torch also accepts a list of axes, to be named automatically."""
    if not isinstance(axes, Mapping):
        return axes
    return {name: _normalize_axis_names(axis_names) for name, axis_names in axes.items()}


def _normalize_axis_names(axes: Any) -> Any:
    """Convert a list or mapping of axes to axis → name; other values are left to the validator."""
    if isinstance(axes, Mapping):
        # Keys of JSON are text.
        numbers = {axis: int(axis) if re.fullmatch(r"-?\d+", str(axis)) else axis for axis in axes}
        return {numbers[axis]: UNNAMED if symbol is None else symbol for axis, symbol in axes.items()}
    # For other items than numbers, the validator reports the expected type.
    is_list = isinstance(axes, (list, tuple)) and all(isinstance(axis, (int, str)) for axis in axes)
    return dict.fromkeys(axes, UNNAMED) if is_list else axes


def _check_axes(axes: Mapping[str, Mapping[int, str]]) -> Mapping[str, Mapping[int, str]]:
    """Refuse negative axes, and names that are no identifiers.

    Raises:
        ValueError: the message has the input and the axis.
    """
    for name, axis_names in axes.items():
        for axis, symbol in axis_names.items():
            if axis < 0:
                raise ValueError(f"{name}: axis {axis} is negative; axes count from 0")
            if symbol != UNNAMED and not re.match(_NAME, symbol):
                raise ValueError(
                    f"{name}: axis {axis} has the name {symbol!r}; expected letters, digits and _, not starting with a "
                    "digit"
                )
    return axes


DynamicAxes = Annotated[
    Mapping[str, Mapping[int, str]], pydantic.BeforeValidator(_normalize_axes), pydantic.AfterValidator(_check_axes)
]
"""Input or output → axis, counted from 0 → name, as ``dynamic_axes`` of torch.onnx.export; or a list of axes."""


@dataclass(frozen=True)
class OutputAxis:
    """A requested dynamic axis of an output; it is dynamic only if it depends on dynamic axes of the inputs."""

    output: str
    axis: int
    name: str
    """Name of the axis; ``UNNAMED``: named after the inputs."""
    requested_by: str
    """The option, for messages."""


def fixed_size_words(openable: Mapping[str, Mapping[str, int]]) -> str:
    """List fixed sizes and the options that make them dynamic.

    Args:
        openable: Option → key of ``--shape-config`` → fixed size.
    """
    sizes = ", ".join(f"{key} {size}" for by_key in openable.values() for key, size in by_key.items())
    return f"{sizes} (dynamic with {' '.join(map(spell, openable))})"


class DynamicRequest(Options):
    """Dimensions that the user requests as dynamic, besides those named in shapes."""

    batch: bool = False
    """The rows of every input."""
    sequence: bool = False
    """The sequences the model reads: tokens of the text and of the decoder, or frames or samples of audio."""
    image_size: bool = False
    """Height and width of images."""
    axes: DynamicAxes = pydantic.Field(default_factory=dict)
    """Input → axis → name."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Bounds, and sizes to trace with, of names; leaves nothing open by itself."""
    origins: Mapping[str, str] = pydantic.Field(default_factory=dict, exclude=True)
    """Where it was said, for messages: key of a config, or axis as ``input:axis`` → words; else the option's name."""

    @property
    def is_empty(self) -> bool:
        """True if no dimension is requested to be open."""
        return not (self.batch or self.sequence or self.image_size or self.axes)

    def joined(self, defaults: DynamicRequest) -> DynamicRequest:
        """Return the union of both requests; the axis names of ``self`` have priority."""
        inputs = dict.fromkeys([*self.axes, *defaults.axes])
        return DynamicRequest(
            batch=self.batch or defaults.batch,
            sequence=self.sequence or defaults.sequence,
            image_size=self.image_size or defaults.image_size,
            axes={name: {**defaults.axes.get(name, {}), **self.axes.get(name, {})} for name in inputs},
            dimensions=self.dimensions or defaults.dimensions,
            origins={**defaults.origins, **self.origins},
        )

    def requested_by(self, origin: str) -> DynamicRequest:
        """Return a copy of the request with its origin, for messages.

        Args:
            origin: Origin with ``{}`` for the key: ``export.{}``.
        """
        flags = {"dynamic_batch": self.batch, "dynamic_sequence": self.sequence, "dynamic_image_size": self.image_size}
        origins = {key: origin.format(key) for key, is_not_default in flags.items() if is_not_default}
        axes = {
            f"{name}:{axis}": origin.format("dynamic_axes")
            for name, axis_names in self.axes.items()
            for axis in axis_names
        }
        return self.model_copy(update={"origins": {**origins, **axes}})

    def origin_of(self, key: str, input_axis: tuple[str, int] | None = None) -> str:
        """Return the origin of a key or an axis, for messages."""
        return self.origins.get(
            key if input_axis is None else f"{input_axis[0]}:{input_axis[1]}", spell(_OPTION_OF_KEY.get(key, key))
        )


class _AxesOption(Options):
    axes: DynamicAxes


def parse_dynamic_axes(texts: Sequence[str]) -> dict[str, dict[int, str]]:
    """Parse the values of ``--dynamic-axes``, a repeatable option.

    Args:
        texts: Each ``input_ids:0=batch_size,1=sequence_length`` (several inputs separated by spaces or semicolons), or
            a JSON object ``{"input_ids": {"0": "batch_size", "1": "sequence_length"}, "pixel_values": [0]}``, or the
            path of a file that holds such an object.

    Returns:
        Input or output → axis → name; ``UNNAMED`` if only the axis is stated.

    Raises:
        ConfigError: a text in another format, an axis that is not a number or is negative, an invalid name, or an
            axis with two names.
    """
    merged: dict[str, dict[int, str]] = {}
    for text in texts:
        for name, axis, symbol in _parse_axes(text):
            first_symbol = merged.setdefault(name, {}).get(axis, UNNAMED) or symbol
            merged[name][axis] = first_symbol
            if symbol not in (first_symbol, UNNAMED):
                raise ConfigError(
                    f"{opt.dynamic_axes}: axis {axis} of {name} is named both {first_symbol!r} and {symbol!r}",
                    hint="Use one name.",
                )
    return merged


def _parse_axes(text: str) -> list[tuple[str, int, str]]:
    """Parse a value of ``--dynamic-axes`` to input, axis and name of each axis.

    Raises:
        ConfigError: the text has another format.
    """
    entries = [entry for entry in re.split(r"[;\s]+", text.strip()) if entry]
    if not text.lstrip().startswith("{") and entries and all(_INLINE.match(entry) for entry in entries) and "=" in text:
        return [pair for entry in entries for pair in _parse_inline_axes(entry)]
    value, label = read_json(text, opt.dynamic_axes)
    return [
        (name, axis, symbol)
        for name, axis_names in parse_options(
            _AxesOption, {"axes": _check_axis_numbers(value, label)}, label
        ).axes.items()
        for axis, symbol in axis_names.items()
    ]


def _check_axis_numbers(value: object, label: str) -> Any:
    """Return ``value`` if it is an object of lists of axes, or of objects whose keys are axis numbers.

    Raises:
        ConfigError: another value; names the input and the axis.
    """
    if not isinstance(value, dict) or not all(isinstance(axis_names, (dict, list)) for axis_names in value.values()):
        raise ConfigError(
            f"{label}: expected an object of objects or of lists",
            hint='Write {"input_ids": {"0": "batch_size", "1": "sequence_length"}}, {"input_ids": [0, 1]}, or '
            "input_ids:0=batch_size,1=sequence_length.",
        )
    for name, axis_names in value.items():
        for axis in axis_names:
            if isinstance(axis, bool) or not re.fullmatch(r"-?\d+", str(axis)):
                raise ConfigError(f"{label}: {name}: axis {axis!r} is not a number", hint="Axes count from 0.")
    return value


def _parse_inline_axes(text: str) -> list[tuple[str, int, str]]:
    """Parse ``input:axis=name,…``.

    Raises:
        ConfigError: an axis or a name is invalid.
    """
    match = _INLINE.match(text)
    assert match is not None  # _parse_axes checked it
    axis_names = []
    for pair in match["axes"].split(","):
        axis, equals, symbol = pair.partition("=")
        if not equals or not re.fullmatch(r"-?\d+", axis):
            raise ConfigError(
                f"{opt.dynamic_axes}: {pair!r} in {text!r} is not AXIS=NAME",
                hint="Write it like input_ids:0=batch_size,1=sequence_length.",
            )
        if not symbol:
            raise ConfigError(
                f"{opt.dynamic_axes}: {pair!r} in {text!r} has no name",
                hint="Write it like input_ids:0=batch_size.",
            )
        axis_names.append((int(axis), symbol))
    try:
        _check_axes({match["input"]: dict(axis_names)})
    except ValueError as error:
        raise ConfigError(f"{opt.dynamic_axes}: {error}") from None
    return [(match["input"], axis, symbol) for axis, symbol in axis_names]


def current_name(name: str) -> str:
    """Return the current name of a dimension, also for a name in files of winml 0.2.

    >>> current_name("batch"), current_name("height")
    ('batch_size', 'height')
    """
    return _OLDER_NAMES.get(name, name)


def counts_rows(name: str) -> bool:
    """Return True if a dimension is the number of rows: of all inputs, or of texts, images or recordings."""
    return current_name(name) == "batch_size" or name in ROWS_OF_ONE_KIND


def names_among(name: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of a dimension among ``names``; the name itself without a match.

    The name may be the older or the newer name. ``batch_size`` also matches separate row dimensions of texts and
    images.
    """
    if name in names:
        return (name,)
    alike = tuple(graph_name for graph_name in names if current_name(graph_name) == current_name(name))
    is_general = current_name(name) == "batch_size"
    return alike or tuple(graph_name for graph_name in names if is_general and counts_rows(graph_name)) or (name,)


def resolve_names(
    sizes: Mapping[str, int], graph_names: Iterable[str], places: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Resolve sizes to the names in the graph.

    Args:
        sizes: Sizes by older or newer dimension name, or by ``input:axis``.
        graph_names: Names in the graph.
        places: ``input:axis``, counted from 0 → name in the graph.

    Raises:
        UsageError: an unknown name (suggests the nearest), or two sizes for one name.
    """
    names, places = list(graph_names), places or {}
    resolved_sizes: dict[str, int] = {}
    for name, size in sizes.items():
        meant = (places[name],) if name in places and name not in names else names_among(name, names)
        if meant[0] not in names:
            listing = f"Its dynamic dimensions: {_dimension_words(names, places)}."
            raise UsageError(
                f"{opt.shape_config}: the graph has no dynamic dimension {name!r}",
                hint=suggest(name, [*names, *places], also=listing),
            )
        for resolved in meant:
            if len(meant) > 1 and resolved in sizes:
                continue  # ``batch_size`` applies to row dimensions without a size of their own
            if resolved_sizes.setdefault(resolved, size) != size:
                raise UsageError(
                    f"{opt.shape_config}: {resolved} has two sizes, {resolved_sizes[resolved]} and {size}",
                    hint="Set one size.",
                )
    return resolved_sizes


def _dimension_words(names: Sequence[str], places: Mapping[str, str]) -> str:
    """List every name with its axes, for messages."""
    phrases = []
    for name in names:
        axis_names = [axis_name for axis_name, at_place in places.items() if at_place == name != axis_name]
        phrases.append(f"{name} ({', '.join(axis_names)})" if axis_names else name)
    return ", ".join(phrases) or "none; all sizes are fixed"
