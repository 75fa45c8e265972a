"""Comparison of outputs with reference outputs.

Compares computed outputs; runs neither side. Differences are relative to the scale of the reference, and a reference
that would hide a wrong output has no signal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.records import Record, entry, recorded

THRESHOLDS: Mapping[str, float] = {
    "float64": 1e-7,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Dtype of the computation → maximum difference relative to the largest reference value.

Chosen about a hundred times above the difference of correct exports (2e-6 for float32, measured over 36 architectures)
and a thousand times below the effect of a wrong mask or a stray input (0.9 to 1.4). Half precision: ten units in the
last place of ``float16`` (2**-11) and of ``bfloat16`` (2**-8), since both sides round after every operator, in
different orders. Integers and booleans must be equal.
"""

MINIMUM_SCALE = 1e-20
"""References below this are rounding only. Chosen far below any activation, above float32's smallest normal number."""

ROUNDING_FACTOR = 10
"""Maximum difference of two files run as written, in thresholds, for another comparison with ONNX Runtime's default
optimizations, under which both round alike. Measured: 2 on resnet-50 with random weights, 50 convolutions deep; a wrong
graph differs by a thousand thresholds and more (``THRESHOLDS``)."""

CUT_MODULE_THRESHOLD = 1e-6
"""Maximum difference of a cut-out module from the same module in the whole model, relative to the largest value. Chosen
far below the rounding of any dtype: both run the same kernels on the same values, and every tested model is
bit-identical."""


_CHANNEL_UNITS = 8
"""Difference in units in the last place of the largest value up to which no channel is refused: rounding of the largest
values affects other channels. Chosen: over 36 architectures the largest relative difference is 2e-6, or 17 units;
channels computed alike share it, and ``_OUTLIER_FACTOR`` separates them from a wrong channel."""

_OUTLIER_FACTOR = 30
"""Ratio of a channel's difference to the median over all channels above which the channel is wrong. Chosen: rounding of
channels computed alike has one order of magnitude; a wrong column among columns in pixels differs by thousands of times
the rounding of its neighbours."""

_PROBABILITY_UNITS = 8
"""Tolerance of probabilities in units in the last place of 1.0: kernels of Sigmoid and Softmax round relative to 1.
Measured: ONNX Runtime's Sigmoid is off by up to 1.1e-7, whatever its value."""

_CHANNEL_DTYPES = ("float32", "float64")
"""Dtypes whose rounding is far below their threshold; in 16 bits, see :func:`find_channel_beyond_rounding`."""

_Floats = NDArray[np.floating[Any]]

TEXT_KINDS = "USO"
"""Kinds of non-numeric arrays."""

_ZEROS, _FADED, _NAN, _INFINITIES = "zeros", f"values below {MINIMUM_SCALE:g}", "NaN", "infinities"


_LARGE_CONSTANT, _SHARE_OF_CONSTANT = 1e6, 1e-3
"""Minimum magnitude of a constant of a mask, such as the score of a blocked action, and maximum ratio of other values
to it. Chosen: masks are -1e9, -65504 in float16, or the minimum of the type. Beside smaller ones, a wrong value is
found by index."""
_FIRST_VALUES = 1024
"""Number of values of an output that are examined first. Chosen: most outputs carry information there, and the rest may
be large."""


def silent_kinds(arrays: Iterable[Array]) -> tuple[str, ...] | None:
    """Kinds of values of arrays without information; ``None`` if any value carries information.

    Kinds are zeros, values as small as rounding, NaN and infinities. A text carries information.
    """
    kinds: set[str] = set()
    for array in arrays:
        if array.dtype.kind in TEXT_KINDS:
            return None
        flat = np.asarray(array).ravel()
        for part in (slice(_FIRST_VALUES), slice(_FIRST_VALUES, None)):
            values = flat[part].astype(np.float64)
            places = {
                _ZEROS: values == 0,
                _FADED: (values != 0) & (np.abs(values) < MINIMUM_SCALE),
                _NAN: np.isnan(values),
                _INFINITIES: np.isinf(values),
            }
            if not np.any(list(places.values()), axis=0).all():
                return None
            kinds |= {kind for kind, is_there in places.items() if is_there.any()}
    return tuple(kind for kind in (_ZEROS, _FADED, _NAN, _INFINITIES) if kind in kinds)


def silent_words(kinds: Sequence[str]) -> str:
    """Describe outputs without information.

    >>> silent_words(("zeros", "NaN")), silent_words(())
    ('only zeros and NaN', 'no value')
    """
    return f"only {' and '.join(kinds)}" if kinds else "no value"


@dataclass(frozen=True)
class Rounding:
    """Rounding errors that a comparison of outputs accepts."""

    dtypes: tuple[str, ...] = ()
    """Dtypes of the computation: float32 that was cast from half precision is not exact."""
    probabilities: Callable[[], frozenset[str]] = frozenset
    """Returns the names of the outputs of Sigmoid or Softmax; called if a comparison fails."""

    @property
    def coarsest(self) -> str:
        """The dtype with the largest threshold; empty without dtypes."""
        return max(self.dtypes, key=lambda dtype: THRESHOLDS.get(dtype, 0.0), default="")


class OutputComparison(Record):
    """Comparison of one output of one sample."""

    name: str
    draw: int
    """Number of the sample, from 1."""
    dtype: str
    max_abs_diff: float
    """Largest absolute difference; NaN and infinities must match in position."""
    scale: float = field(metadata=entry(skip=True))
    """Largest finite absolute reference value."""
    relative_diff: float
    """``max_abs_diff / scale``; 0 if both are 0."""
    threshold: float
    """Maximum accepted ``relative_diff``."""
    is_equal: bool
    computed_in: str = field(default="", metadata=entry(omit_empty=True))
    """Dtype whose rounding sets the threshold, if coarser than the output's dtype."""
    nan_count: int = field(default=0, metadata=entry(omit_empty=True))
    """Number of values that are NaN on both sides."""
    problem: str = field(default="", metadata=entry(omit_empty=True))
    """Reason of inequality other than a difference: another shape, or NaN on one side only."""


class CheckedValue(Record):
    """An input that was varied alone, or could not be varied."""

    name: str
    traced: str
    """Traced values in words: ``3``, ``[5, 3]``."""
    compared: tuple[str, ...] = ()
    """Other values at which outputs were compared, in words."""
    refused: tuple[str, ...] = ()
    """Other values that the reference refuses, each with the reason."""
    is_fixed: bool = False
    """True if all comparisons have this one value, so that other values are not verified."""


class VerificationInfo(Record):
    """Result of the comparison of outputs with reference outputs on some samples."""

    comparisons: tuple[OutputComparison, ...] = field(metadata=entry("outputs"))
    has_signal: bool = field(metadata=entry(before="outputs"))
    """True if an output depends on the inputs by more than its threshold, so that a wrong output is detectable."""
    set_aside: tuple[OutputComparison, ...] = field(default=(), metadata=entry(skip=True))
    """Per excluded sample: the differing output that rounding changes most."""
    values: tuple[CheckedValue, ...] = field(default=(), metadata=entry(omit_empty=True))
    """Inputs varied alone, and inputs with only one compared value."""
    generation: GenerationInfo | None = field(default=None, metadata=entry(omit_none=True))
    """Comparison of a text generated with a KV cache; ``None`` without a text."""
    image: ImageInfo | None = field(default=None, metadata=entry(omit_none=True))
    """Comparison of an image made by all parts of a diffusers pipeline; ``None`` without an image."""
    assumed: tuple[Assumption, ...] | None = field(default=None, metadata=entry(before="outputs", omit_none=True))
    """Assumptions of the graph about other inputs; ``None`` without a trace, as for two files."""
    accepts_assumptions: bool = field(default=False, metadata=entry(skip=True))
    """True if the file counts as verified in spite of assumptions."""
    on_drawn_weights: bool = field(default=False, metadata=entry(before="outputs", omit_empty=True))
    """True if the graph was compared on a copy with random weights, since with its own weights no output depends on the
    inputs."""
    in_float32: bool = field(default=False, metadata=entry(before="outputs", omit_empty=True))
    """True if both sides computed in float32, since the file computes in bfloat16."""
    fixes_numbers: bool = field(default=False, metadata=entry(before="outputs", omit_empty=True))
    """True if random numbers were fixed on both sides: each normal number at 0.25 standard deviations above the mean,
    each uniform number at 0.25 of its range."""
    is_streamed: bool = field(default=False, metadata=entry(before="outputs", omit_empty=True))
    """True if the weights of both sides were streamed."""
    note: str = field(default="", metadata=entry(before="outputs", omit_empty=True))
    """Sentence on generated inputs whose values were found by trial."""
    constant: tuple[str, ...] = field(default=(), metadata=entry(skip=True))
    """Outputs of the reference that were equal for all inputs."""
    silent: tuple[str, ...] | None = field(default=None, metadata=entry("answers_only", omit_none=True))
    """Without a signal: kinds of values in the reference; see :func:`silent_kinds`."""

    @property
    @recorded(entry("set_aside", before="values", omit_empty=True))
    def moved_by_rounding(self) -> list[dict[str, object]]:
        """Per excluded sample: change by rounding of the output that rounding changes most."""
        names = {"name": "name", "draw": "draw", "moved_by_rounding": "relative_diff", "threshold": "threshold"}
        return [{key: getattr(entry, name) for key, name in names.items()} for entry in self.set_aside]

    @property
    def fixed(self) -> tuple[CheckedValue, ...]:
        """Inputs with only one compared value."""
        return tuple(value for value in self.values if value.is_fixed)

    @property
    @recorded(entry(before="has_signal"))
    def is_verified(self) -> bool:
        """True if every output agrees, there is a signal, and no unaccepted assumption exists."""
        return self.agrees and (self.accepts_assumptions or not self.assumed)

    @property
    def lacks_numbers(self) -> bool:
        """True if the reference returns NaN or infinities alone, as damaged weights do."""
        return self.silent is not None and bool({_NAN, _INFINITIES}.intersection(self.silent))

    @property
    def agrees(self) -> bool:
        """True if every output agrees and there is a signal."""
        return self.has_signal and all(comparison.is_equal for comparison in self.comparisons)

    @property
    def worst(self) -> OutputComparison:
        """The comparison with the largest difference relative to its threshold."""
        return max(
            self.comparisons,
            key=lambda entry: (not entry.is_equal, bool(entry.problem), entry.relative_diff / (entry.threshold or 1.0)),
        )


def compare_outputs(
    reference: Sequence[Arrays],
    answers: Sequence[Arrays],
    *,
    rounding: Rounding = Rounding(),
) -> VerificationInfo:
    """Compare outputs with reference outputs, sample by sample.

    A probability beyond its threshold is still equal within :data:`_PROBABILITY_UNITS`; changes of this size are then
    no signal either.

    Args:
        reference: Reference outputs by name, one mapping per sample: of PyTorch, or of another file.
        answers: Outputs of the file by name, in the same order of samples.
        rounding: Rounding errors to accept.
    """
    info = _compare_all(reference, answers, _Tolerance(rounding.coarsest))
    differing = {entry.name for entry in info.comparisons if not entry.is_equal}
    probabilities = rounding.probabilities() if differing else frozenset()
    if differing.isdisjoint(probabilities):
        return info
    return _compare_all(reference, answers, _Tolerance(rounding.coarsest, probabilities))


@dataclass(frozen=True)
class _Tolerance:
    """Accepted differences of outputs."""

    coarsest: str
    """Dtype of the computation with the largest threshold; empty: the dtype of each output."""
    probabilities: frozenset[str] = frozenset()
    """Names of outputs with an absolute tolerance."""

    def relative(self, dtype: str) -> float:
        """Relative threshold of an output; integers stay exact in any computation dtype."""
        limit = THRESHOLDS.get(dtype, 0.0)
        return max(limit, THRESHOLDS.get(self.coarsest, 0.0)) if limit else 0.0

    def absolute(self, name: str, expected: Array) -> float:
        """Absolute tolerance of an output."""
        dtype = str(expected.dtype)
        is_exact = dtype in _CHANNEL_DTYPES and self.relative(dtype) == THRESHOLDS[dtype]
        return _PROBABILITY_UNITS * float(np.finfo(dtype).eps) if name in self.probabilities and is_exact else 0.0


def _compare_all(reference: Sequence[Arrays], answers: Sequence[Arrays], tolerance: _Tolerance) -> VerificationInfo:
    """Compare each output of each sample; a channel that is constant in the file alone makes an output unequal."""
    comparisons = tuple(
        _refuse_frozen_channels(
            _compare_one(name, draw, expected, output[name], tolerance), reference, answers, tolerance
        )
        for draw, (outputs, output) in enumerate(zip(reference, answers, strict=True), start=1)
        for name, expected in outputs.items()
    )
    has_signal = _has_signal(reference, tolerance)
    silent = None if has_signal else silent_kinds(value for outputs in reference for value in outputs.values())
    return VerificationInfo(comparisons, has_signal, silent=silent)


def tells_graphs_apart(reference: Sequence[Arrays], feeds: Sequence[Arrays]) -> bool:
    """Return True if a wrong graph would change outputs: one has a value, and changes between different inputs.

    An output that repeats the same values at another size has not changed.

    Args:
        reference: Reference outputs by name, one mapping per sample.
        feeds: The inputs of the samples.
    """
    if silent_kinds(value for outputs in reference for value in outputs.values()) is not None:
        return False
    are_inputs_equal = len(constant_outputs(feeds)) == len(feeds[0])
    first, *later = reference
    return are_inputs_equal or not all(
        name in outputs and _repeats_values(value, outputs[name]) for outputs in later for name, value in first.items()
    )


def _repeats_values(first: Array, later: Array) -> bool:
    """Return True if arrays are equal, or each repeats the same values along the axes whose sizes differ."""
    if first.ndim != later.ndim:
        return False
    sizes = zip(first.shape, later.shape, strict=True)
    place = tuple(slice(None) if size == other else slice(1) for size, other in sizes)
    equals = partial(np.array_equal, equal_nan=first.dtype.kind in "fc")
    return equals(first[place], later[place]) and all(
        equals(array, np.broadcast_to(array[place], array.shape)) for array in (first, later)
    )


def constant_outputs(reference: Sequence[Arrays]) -> tuple[str, ...]:
    """Names of the outputs that are bit-identical in all samples."""
    first, *later_draws = reference
    return tuple(
        name
        for name, value in first.items()
        if all(np.array_equal(draw.get(name, ()), value, equal_nan=value.dtype.kind in "fc") for draw in later_draws)
    )


def _compare_one(name: str, draw: int, expected: Array, actual: Array, tolerance: _Tolerance) -> OutputComparison:
    """Compare one output of one sample."""
    dtype = str(expected.dtype)
    threshold = tolerance.relative(dtype)
    computed_in = tolerance.coarsest if threshold > THRESHOLDS.get(dtype, 0.0) else ""
    unequal = partial(OutputComparison, name, draw, dtype, np.inf, 0.0, np.inf, threshold, is_equal=False)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        text = f"PyTorch returns {dtype}{list(expected.shape)}, ONNX Runtime {actual.dtype}{list(actual.shape)}"
        return unequal(problem=text)
    if (values := finite_values(expected, actual)) is None:
        return unequal(problem="NaN or infinity in different places")
    x, y = _without_large_constant(*values, dtype)
    is_integer, is_finite = expected.dtype.kind in "biu", x.size == expected.size
    difference = _integer_distance(expected, actual) if is_integer else float(_distances(x, y).max(initial=0.0))
    floor, scale = tolerance.absolute(name, expected), float(np.abs(x).max(initial=0.0))
    relative = difference / scale if scale else (0.0 if difference == 0 else np.inf)
    threshold = max(threshold, floor / scale) if scale else threshold
    nan_count, problem = 0 if is_finite else int(np.isnan(_as_floats(expected)).sum()), ""
    if relative <= threshold and not computed_in and dtype in _CHANNEL_DTYPES and is_finite:
        bound = max(floor, _CHANNEL_UNITS * float(np.finfo(dtype).eps) * scale)
        problem = _find_wrong_channel(x.reshape(expected.shape), y.reshape(expected.shape), threshold, bound)
    is_equal = relative <= threshold and not problem
    return OutputComparison(
        name, draw, dtype, difference, scale, relative, threshold, is_equal, computed_in, nan_count, problem
    )


def finite_values(expected: Array, actual: Array) -> tuple[_Floats, _Floats] | None:
    """Finite values of two arrays of equal shape; `None` if NaN or infinity are in different positions.

    NaN equals NaN, and an infinity equals the same infinity: both are part of the output.
    """
    x, y = _as_floats(expected).ravel(), _as_floats(actual).ravel()
    finite = np.isfinite(x)
    if finite.all() and np.isfinite(y).all():
        return x, y
    are_same = np.array_equal(x[~finite], y[~finite], equal_nan=True) and np.isfinite(y[finite]).all()
    return (x[finite], y[finite]) if are_same else None


def _without_large_constant(x: _Floats, y: _Floats, dtype: str) -> tuple[_Floats, _Floats]:
    """Replace a large constant that both arrays have in the same places by 0, if other values remain.

    Differences are relative to the largest value: beside -1e9 in a mask of actions, wrong scores would count as equal.
    """
    least = float(np.finfo(np.float16).max) if dtype == "float16" else _LARGE_CONSTANT
    if max(x.max(initial=0.0), -x.min(initial=0.0)) < least:
        return x, y
    is_large = (x == y) & (np.abs(x) >= least)
    if not is_large.any() or (constant := x[is_large]).min() != constant.max():
        return x, y
    others = float(np.abs(x[~is_large]).max(initial=0.0))
    if not 0 < others <= _SHARE_OF_CONSTANT * abs(float(constant[0])):
        return x, y
    return np.where(is_large, 0, x), np.where(is_large, 0, y)


def _channel_axes(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (other axes, description of the axis) for each axis of several channels; the last axis first."""
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            remaining = tuple(index for index in range(len(shape)) if index != axis)
            yield remaining, "the last axis" if axis == len(shape) - 1 else f"axis {axis}"


def _find_wrong_channel(expected: _Floats, actual: _Floats, threshold: float, floor: float) -> str:
    """Describe a slice with a difference beyond the tolerance of its own values; empty if all slices agree.

    Slices of one output may have different units, such as boxes in pixels next to a score: the error of a small slice
    vanishes relative to the values of a large one.

    Args:
        expected: The reference; finite.
        actual: The compared output, of the same shape; finite.
        threshold: Maximum difference of a slice, relative to its largest value.
        floor: Difference below which no slice is refused.
    """
    if expected.ndim < 2 or float((differences := _distances(expected, actual)).max(initial=0.0)) <= floor:
        return ""
    values = np.abs(expected)
    for axes, label in _channel_axes(expected.shape):
        largest, scales = differences.max(axis=axes), values.max(axis=axes)
        # The lower middle for an even number: with two slices, one may be wrong.
        middle = (largest.size - 1) // 2
        bound = max(floor, _OUTLIER_FACTOR * float(np.partition(largest, middle)[middle]))
        wrong = np.flatnonzero((largest > threshold * scales) & (largest > bound))
        if wrong.size:
            worst = int(wrong[largest[wrong].argmax()])
            return (
                f"index {worst} of {label} differs by {largest[worst]:.1e} where its values "
                f"reach {scales[worst]:.1e}, and those of the output {float(values.max()):.1e}"
            )
    return ""


HALF_UNITS: Mapping[str, float] = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Dtype of a computation in 16 bits → its unit in the last place of 1.0."""
_LEAST_VALUES = 8
"""Chosen: the errors of fewer values of a channel may all be small by chance."""


def find_channel_beyond_rounding(expected: Array, actual: Array, exact: Array, unit: float) -> str:
    """Describe a channel of a computation in 16 bits whose error is not rounding; empty if there is none.

    In 16 bits, rounding of the largest values exceeds the values of small channels. Each channel is therefore judged by
    the error that the reference has there itself.

    Args:
        expected: The reference, computed in 16 bits.
        actual: The compared output, of the same shape.
        exact: The reference, computed in float32; ``expected`` itself for a bound that needs no such run.
        unit: Unit in the last place of 1.0.
    """
    x, y, z = map(_as_floats, (expected, actual, exact))
    if x.ndim < 2 or not x.shape == y.shape == z.shape or not all(np.isfinite(array).all() for array in (x, y, z)):
        return ""
    for axes, label in _channel_axes(x.shape):
        if prod(x.shape[axis] for axis in axes) < _LEAST_VALUES:
            continue
        scales, own, distances = (np.abs(array).max(axis=axes) for array in (x, x - z, y - z))
        bounds = _OUTLIER_FACTOR * np.maximum(own, unit * scales)
        wrong = np.flatnonzero((distances > bounds) & (scales > MINIMUM_SCALE))
        if wrong.size:
            worst = int(wrong[(distances[wrong] / bounds[wrong]).argmax()])
            return (
                f"index {worst} of {label} differs by {distances[worst]:.1e} from float32, PyTorch in 16 bits by "
                f"{own[worst]:.1e}"
            )
    return ""


def _refuse_frozen_channels(
    comparison: OutputComparison, reference: Sequence[Arrays], answers: Sequence[Arrays], tolerance: _Tolerance
) -> OutputComparison:
    """Mark a comparison as unequal if a channel of the file equals the first sample while the reference's changes.

    Next to large values such a constant may be within the threshold of each sample.
    """
    name, index = comparison.name, comparison.draw - 1
    if name not in reference[0] or name not in answers[0]:  # an element of a sequence that was shorter
        return comparison
    first, expected, first_actual, actual = (runs[at][name] for runs in (reference, answers) for at in (0, index))
    is_comparable = index and comparison.is_equal and expected.ndim > 1 and expected.dtype.kind == "f"
    if not is_comparable or len({array.shape for array in (first, expected, first_actual, actual)}) > 1:
        return comparison
    unmoved = actual == first_actual
    if not unmoved.any() or not (np.isfinite(first).all() and np.isfinite(expected).all()):
        return comparison
    threshold, bound = tolerance.relative(comparison.dtype), max(MINIMUM_SCALE, tolerance.absolute(name, expected))
    for axes, label in _channel_axes(expected.shape):
        is_frozen = unmoved.all(axis=axes)
        if not is_frozen.any():
            continue
        change = _distances(_as_floats(expected), _as_floats(first)).max(axis=axes, initial=0)
        scales = np.abs(_as_floats(first)).max(axis=axes, initial=0)
        frozen = np.flatnonzero(is_frozen & (change > threshold * scales) & (change > bound))
        if frozen.size:
            problem = (
                f"index {frozen[0]} of {label} ({frozen.size} of {change.size}) is equal in "
                f"samples 1 and {comparison.draw}, while that of the reference changes by {change[frozen[0]]:.1e}"
            )
            return replace(comparison, is_equal=False, problem=problem)
    return comparison


def _integer_distance(expected: Array, actual: Array) -> float:
    """Return the largest difference of two integer arrays, exact for all integers."""
    # In float64, different integers beyond 2**53 may be equal; unsigned subtraction is exact.
    x, y = expected.astype(np.int64), actual.astype(np.int64)
    distances = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    return float(distances.max(initial=0))


def _has_signal(reference: Sequence[Arrays], tolerance: _Tolerance) -> bool:
    """Return True if an output changes between the samples by more than the tolerance."""
    first, *later_draws = reference
    for name, value in first.items() if later_draws else ():
        values = _as_floats(value)
        if np.abs(values[np.isfinite(values)]).max(initial=0.0) < MINIMUM_SCALE:
            continue
        for draw in later_draws:
            if name not in draw:
                return True
            later_values = _as_floats(draw[name])
            if later_values.shape != values.shape:
                return True
            both = np.isfinite(values) & np.isfinite(later_values)
            x, y = _without_large_constant(values[both], later_values[both], str(value.dtype))
            bound = max(
                tolerance.absolute(name, value), tolerance.relative(str(value.dtype)) * np.abs(x).max(initial=0)
            )
            if _distances(x, y).max(initial=0.0) > bound:
                return True
    return False


def _as_floats(value: Array) -> _Floats:
    """Return the values as float32 if they are, without a copy; else as float64.

    float64 represents every dtype in use, except the largest int64, whose differences are measured separately.
    """
    if value.dtype.kind in TEXT_KINDS:
        # Texts are equal or not; a checksum of 32 bits tells them apart.
        checksums: NDArray[np.float64] = np.vectorize(
            lambda text: float(zlib.crc32(str(text).encode())), otypes=[np.float64]
        )(value)
        return checksums
    return np.asarray(value) if value.dtype == np.float32 else np.asarray(value).astype(np.float64)


def _distances(x: _Floats, y: _Floats) -> _Floats:
    """Return the absolute differences of two arrays of finite values."""
    with np.errstate(over="ignore"):  # of the largest float32 of both signs
        differences = x - y
    return np.abs(differences, out=differences)


class GenerationInfo(Record):
    """Comparison of a prompt, greedy steps and a second prompt, each with the KV cache of the previous run."""

    rows: int
    """Number of texts generated at once."""
    prompt_tokens: int
    """Tokens of the longest prompt; other rows are padded on the left, if the model has a mask."""
    new_tokens: int
    """Number of generated tokens in each row."""
    second_prompt_tokens: int
    """Number of tokens of the second prompt."""
    ties: int
    """Number of choices between two tokens with equal scores within the tolerance, which rounding decides."""
    largest_relative_diff: float
    """Largest difference of the scores of any step, relative to their scale."""
    stopped_after: int | None = None
    """Number of steps after which rounding alone determines the reference output; ``None`` if there is no such step."""
    differs_in_pieces: float | None = field(default=None, metadata=entry(omit_none=True))
    """Relative difference of the scores after a prompt that the reference reads in two runs; ``None``: equal, or not
    tested."""
    padded_rows: int = 0
    """Number of rows padded on the left; 0 if the model has no mask or its padded outputs differ."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Note that prompts must be read in one run; `()` if two runs give equal logits."""
        if self.differs_in_pieces is None:
            return ()
        difference = f"{self.differs_in_pieces:.1e}"
        text = f"differ in PyTorch itself (relative difference {difference})"
        return (f"Read a prompt in one run: the logits after two runs {text}.",)

    @property
    def words(self) -> str:
        """Short description of the result."""
        if self.stopped_after is not None:
            return (
                f"the logits of {self.stopped_after} of {self.new_tokens} generated tokens are equal; in PyTorch, the "
                "next ones depend on rounding"
            )
        choices = self.rows * self.new_tokens
        if self.ties * 2 > choices:
            return f"the logits of {self.new_tokens} generated tokens are equal; the best token is a tie"
        ties = f", {self.ties} of {choices} of them ties" if self.ties else ""
        return f"generate() returns the same {self.new_tokens} tokens{ties}"


class ImageInfo(Record):
    """Comparison of an image that a pipeline makes in PyTorch and with the files of all parts."""

    steps: int
    height: int
    width: int
    max_abs_diff: float
    """Largest difference of a channel of a pixel; the range of values is 1."""
    tolerance: float

    @property
    def words(self) -> str:
        """Short description of the result."""
        return (
            f"an image of {self.height}x{self.width} pixels in {self.steps} steps equals PyTorch's (largest difference "
            f"{self.max_abs_diff:.1e} of 1, tolerance {self.tolerance:.0e})"
        )
