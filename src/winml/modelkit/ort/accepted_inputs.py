"""Search for inputs that a graph accepts, if the user passes none.

Samples stored beside the model come first. A graph does not state which sizes and values it takes: edges that are
multiples of 32, indices below the length of a table, a sampling rate that it compares with a constant. Generated inputs
are therefore tried on the graph. If it refuses all sizes, or returns NaN, other values are tried, and the first
accepted ones are used from then on.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Arrays
from winml.modelkit.errors import NoInputsError, StageError, UsageError
from winml.modelkit.onnx.specs import InputTensorSpec, current_name
from winml.modelkit.ort.default_sizes import default_size
from winml.modelkit.ort.feeds import hiding_value, is_mask
from winml.modelkit.ort.graph_inputs import (
    bounds_by_name,
    draw_feeds,
    graph_inputs,
    insert_sums,
    named_sizes,
    sizes_by_key,
)
from winml.modelkit.ort.sessions import Session
from winml.modelkit.ort.stored_samples import origin_words, stored_samples, unused_note

_LARGE_DIMENSIONS = frozenset({"height", "width", "audio_length", "num_frames", "num_channels", "num_mel_bins"})
_EQUAL_SIZES = (4, 1, 8, 16, 32, 64)
"""Sizes tried for all dimensions at once, for graphs that need equal sizes, or multiples of up to 64."""
_LARGE_STEP = 32
"""Chosen: added to a large size for a second one; image encoders need multiples of up to 32."""
_MOST_ELEMENTS = 2**24
"""Chosen: elements of all inputs at guessed sizes, four dimensions of 64; 128 MiB while they are drawn."""
_SIZES_OF_VALUES = 4
"""Chosen: sizes at which other values are tried after all sizes failed; a value is rarely refused by size."""
_MOST_REPORTED = 6
"""Chosen: numbers in the reasons of refusals that are tried as sizes."""
_LARGEST_REPORTED = 4096
"""Chosen: larger numbers in a reason are counts of elements, as a rule."""
_NUMBER = re.compile(r"(?<![\w./-])\d+(?![\w./])")


@dataclass(frozen=True)
class AcceptedInputs:
    """Inputs that a graph accepted, and its outputs."""

    inputs: tuple[InputTensorSpec, ...]
    """Inputs of the graph, with the values that it accepts."""
    sizes: Mapping[str, int]
    feeds: Arrays
    outputs: Arrays
    note: str = ""
    """Sentence on values that differ from those drawn by default."""
    origin: str = ""
    """Name of the folder beside the model that the sample is stored in; empty for generated values."""
    unused: str = ""
    """Sentence on a sample stored beside the model that is not used so far."""


def notes_on_inputs(accepted: Sequence[AcceptedInputs]) -> str:
    """Return sentences on the origin of inputs, on their values, and on a sample beside the model that is not used."""
    names = [entry.origin for entry in accepted if entry.origin]
    stored = f"Inputs are those of {origin_words(names)}, beside the model." if names else ""
    if 0 < len(names) < len(accepted):
        stored += " The values of one more sample are generated."
    return " ".join(filter(None, (stored, accepted[0].note, accepted[-1].unused)))


def accepted_inputs(session: Session, seed: int, requested: Mapping[str, int]) -> Iterator[AcceptedInputs]:
    """Yield inputs of different sizes that a graph accepts; at least one. Stored samples precede generated values.

    Args:
        session: The opened graph.
        seed: Seed of the first values.
        requested: Dynamic dimension → size in the user's request; other sizes of it are not tried.

    Raises:
        NoInputsError: the graph accepts none of the generated inputs.
        StageError: the graph runs at no sizes with those of the user.
        UsageError: the user's sizes do not fit the graph.
    """
    search = _Search(session, seed, requested)
    count = 0
    for accepted in itertools.chain(search.stored() if not requested else (), search.accepted()):
        yield replace(accepted, unused=search.unused)
        count += 1
    if not count:
        refusal = search.refusals[0] if search.refusals else StageError("it has no inputs that can be generated")
        # The user's sizes are refused, which is no lack of samples.
        error = StageError if requested and isinstance(refusal, StageError) else NoInputsError
        raise error(refusal.message, hint=refusal.hint)


class _Search:
    """Search for sizes and values that a graph accepts."""

    def __init__(self, session: Session, seed: int, requested: Mapping[str, int]) -> None:
        self._session, self._seed = session, seed
        self._inputs = graph_inputs(session)
        self._requested = sizes_by_key(self._inputs, requested)
        free = [spec for spec in self._inputs if spec.value_range is None and not spec.values and spec.cache is None]
        self._cases = _compared_cases(free, session.source_path)
        """Values used in turn on top of others: those that the graph compares inputs with."""
        self._variants = [*([_NO_CHANGE] if self._cases else []), *_value_variants(free)]
        """Other values, the likeliest first; those of all inputs are stated in the file if empty."""
        self._checks_shapes = may_refuse_values(self._inputs)
        self._note = ""
        self._count = 0
        self.refusals: list[StageError | UsageError] = []
        self.unused = ""
        """Sentence on a stored sample that is not used."""

    def stored(self) -> Iterator[AcceptedInputs]:
        """Yield the samples stored beside the model that the graph accepts."""
        samples = stored_samples(self._session.source_path, self._inputs)
        self.unused = samples.unused
        for name, feeds in zip(samples.names, samples.feeds, strict=True):
            try:
                outputs = self._session.run(feeds)
            except StageError as error:
                self.unused = self.unused or unused_note(name, error.message)
                continue
            sizes = {key: size for _, key, size in named_sizes(self._inputs, feeds)}
            yield AcceptedInputs(self._inputs, sizes, feeds, outputs, origin=name)

    def accepted(self) -> Iterator[AcceptedInputs]:
        """Yield accepted inputs: with values as drawn by default at all sizes, else at sizes or values tried later."""
        found: AcceptedInputs | None = None
        for found in self._accepted_of(self._sizes()):
            yield found
        if found is None and not self._cannot_draw:
            found = next(self._accepted_of(self._reported_sizes()), None)
            if found is not None:
                yield found
        if found is not None:
            if self._count == 1:
                # Of a single size, two samples cannot differ in size: its double, or the size once more.
                yield from self._accepted_of([self._doubled(found.sizes), found.sizes])
            return
        originals, self._cases = self._inputs, []
        for variant in () if self._cannot_draw else self._variants:
            self._use(variant)
            for found in self._accepted_of(itertools.islice(self._sizes(), _SIZES_OF_VALUES)):
                yield found
            if found is not None:
                return
            self._inputs, self._note = originals, ""

    def _accepted_of(self, sizes: Iterable[Mapping[str, int]]) -> Iterator[AcceptedInputs]:
        """Yield the inputs of sizes that the graph accepts, until no values can be drawn for an input."""
        bounds = bounds_by_name(self._inputs)
        for tried in sizes:
            inside = {name: bounds[name].clamp(size) if name in bounds else size for name, size in tried.items()}
            if (found := self._try(inside)) is not None:
                yield found
            elif self._cannot_draw:
                return

    @property
    def _cannot_draw(self) -> bool:
        """True if no values of an input can be drawn, at any size."""
        return bool(self.refusals) and isinstance(self.refusals[-1], UsageError)

    def _use(self, variant: _Variant) -> None:
        """Draw values of a variant from now on."""
        self._inputs, self._note = variant.apply(self._inputs), variant.note

    def _try(self, sizes: Mapping[str, int]) -> AcceptedInputs | None:
        """Run the graph at sizes; `None` if it refuses. If it returns NaN, the first variant without NaN is used."""
        found = self._run(sizes)
        if found is None:
            return None
        if not self._count and _holds_nan(found.outputs):
            before, note = self._inputs, self._note
            for variant in self._variants:
                self._use(variant)
                other = self._run(sizes)
                if other is not None and not _holds_nan(other.outputs):
                    found = other
                    break
                self._inputs, self._note = before, note
        self._count += 1
        return found

    def _run(self, sizes: Mapping[str, int]) -> AcceptedInputs | None:
        """Run the graph with the case whose turn it is; with the first case if the graph refuses that one."""
        turn = self._count % max(1, len(self._cases))
        for case in (self._cases[turn], self._cases[0]) if turn else self._cases[:1] or [_NO_CHANGE]:
            inputs = case.apply(self._inputs)
            try:
                feeds = draw_feeds(inputs, sizes, self._seed + self._count)
                outputs = run_generated(self._session, feeds, as_declared=self._checks_shapes)
            except (StageError, UsageError) as error:
                self.refusals.append(error)
            else:
                note = " ".join(filter(None, (case.note, self._note)))
                return AcceptedInputs(inputs, sizes, feeds, outputs, note)
        return None

    def _sizes(self) -> Iterator[Mapping[str, int]]:
        """Yield sizes of the dynamic dimensions, the likeliest first; the same twice without dynamic dimensions."""
        return _usual_sizes(self._inputs, self._requested)

    def _doubled(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        return {name: size if name in self._requested else 2 * size for name, size in sizes.items()}

    def _reported_sizes(self) -> Iterator[Mapping[str, int]]:
        """Yield sizes named in the reasons of refusals, such as the traced length of a reshaped tensor.

        For: ``nn.TransformerEncoder`` exported by TorchScript, whose length is a constant of the graph.
        """
        names = [name for name in _dynamic_names(self._inputs) if name not in self._requested]
        texts = (error.message for error in self.refusals)
        reported = (int(number) for text in texts for number in _NUMBER.findall(text))
        numbers = [*dict.fromkeys(number for number in reported if 1 < number <= _LARGEST_REPORTED)][:_MOST_REPORTED]
        for number in numbers if names else ():
            for small in (1, 2):
                for name in names:
                    yield {**dict.fromkeys(names, small), name: number, **self._requested}
            equal = {**dict.fromkeys(names, number), **self._requested}
            if _count_elements(self._inputs, equal) <= _MOST_ELEMENTS:
                yield equal


def _dynamic_names(inputs: Sequence[InputTensorSpec]) -> list[str]:
    return list(dict.fromkeys(key for spec in inputs for key in spec.shape if isinstance(key, str)))


def _count_elements(inputs: Sequence[InputTensorSpec], sizes: Mapping[str, int]) -> int:
    """Return the number of elements of all inputs at sizes of the dynamic dimensions."""
    return sum(math.prod(sizes[key] if isinstance(key, str) else key for key in spec.shape) for spec in inputs)


def run_generated(session: Session, feeds: Arrays, *, as_declared: bool) -> Arrays:
    """Run a graph on generated values, and return its outputs.

    Args:
        session: The graph.
        feeds: The values.
        as_declared: Refuse outputs of other shapes than the graph declares: values may be sizes that it was not made
            for.

    Raises:
        StageError: the graph refuses the values, or the outputs are refused.
    """
    outputs = session.run(feeds)
    if as_declared:
        _refuse_other_shapes(session.output_shapes, outputs)
    return outputs


def may_refuse_values(inputs: Iterable[InputTensorSpec]) -> bool:
    """Return True if an input without stated values may hold sizes, positions or a setting: a model may refuse values.

    For: the shape of ``Reshape``, the lengths of ``Split``, the ratio of ``Dropout``.
    """
    return any(
        spec.has_rank
        and (len(spec.shape) <= 1 if "int" in spec.dtype else spec.shape in ((), (1,)))
        and spec.value_range is None
        and not spec.values
        for spec in inputs
    )


def _refuse_other_shapes(declared: Mapping[str, Sequence[int | str | None]], outputs: Arrays) -> None:
    """Refuse outputs of other shapes than the graph declares: the inputs hold other sizes than it was made for.

    Raises:
        StageError: names the output and both shapes.
    """
    for name, array in outputs.items():
        shape = tuple(declared.get(name, ()))  # elements of a sequence have no declared shape
        if shape and (
            len(shape) != array.ndim
            or any(isinstance(size, int) and size != found for size, found in zip(shape, array.shape, strict=True))
        ):
            raise StageError(f"output {name} has shape {[*array.shape]} for them, and the file declares {[*shape]}")


def _holds_nan(outputs: Arrays) -> bool:
    """Return True if an output contains NaN, as a softmax over a row without a visible position."""
    return any(bool(np.isnan(value).any()) for value in outputs.values() if value.dtype.kind == "f")


def _usual_sizes(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Yield sizes to try, before bounds are applied.

    Args:
        inputs: The inputs of the graph.
        requested: Dimension → size that is the same in all.
    """
    names = _dynamic_names(inputs)
    large = {name: size for name in names if (size := large_size(name)) is not None}
    fixed = {**large, **requested}
    for sizes in _cache_sizes(inputs):
        yield insert_sums(inputs, {**dict.fromkeys(names, 2), **sizes, **fixed})
    yield {**{name: position for position, name in enumerate(names, start=2)}, **fixed}
    if large:
        larger = {name: size + _LARGE_STEP for name, size in large.items()}
        # One row: attention over pixels, as in autoencoders, takes memory by the square of their number.
        yield {**{name: position for position, name in enumerate(names, start=1)}, **larger, **requested}
    yield {**{name: position for position, name in enumerate(names, start=5)}, **fixed}
    # Sizes that a graph requires to be equal without stating it.
    for size in _EQUAL_SIZES:
        sizes = {**dict.fromkeys(names, size), **fixed}
        if _count_elements(inputs, sizes) <= _MOST_ELEMENTS:
            yield sizes
    yield {**{name: default_size(name) or 1 for name in names}, **requested}


def _cache_sizes(inputs: Sequence[InputTensorSpec]) -> Iterator[Mapping[str, int]]:
    """Yield sizes of a graph with a KV cache: a prompt with an empty cache, and a following step; nothing for
    others.
    """
    past, tokens = next((terms for spec in inputs for terms in spec.sums.values() if len(terms) == 2), (None, None))
    for size_past, size_tokens in ((0, 5), (6, 1)) if past is not None else ():
        sizes = {past: size_past, tokens: size_tokens}
        yield {name: size for name, size in sizes.items() if isinstance(name, str)}


def large_size(name: str) -> int | None:
    """Default size of a dimension for which models refuse small sizes; ``None`` for other dimensions."""
    return default_size(name) if current_name(name) in _LARGE_DIMENSIONS else None


_Changes = Mapping[str, Mapping[str, object]]
"""Input → changed fields of its specification."""


@dataclass(frozen=True)
class _Variant:
    """Other values of some inputs."""

    changes: _Changes
    note: str

    def apply(self, inputs: Sequence[InputTensorSpec]) -> tuple[InputTensorSpec, ...]:
        """Return the inputs with these values."""
        return tuple(spec.model_copy(update=dict(self.changes.get(spec.name, {}))) for spec in inputs)


_NO_CHANGE = _Variant({}, "")


def _compared_cases(free: Iterable[InputTensorSpec], path: Path | None) -> list[_Variant]:
    """Return cases of the values that a graph compares its inputs with; `[]` without such inputs.

    Each case has one value of an integer. If a graph compares an integer with a single constant, a second case has a
    different integer: both branches of the graph run. Each case has all values of a text.

    Args:
        free: The inputs without stated values.
        path: The file of the graph; `None`: a graph in memory, whose constants are unknown.
    """
    candidates = {spec.name for spec in free if _may_be_compared(spec)}
    if path is None or not candidates:
        return []
    from winml.modelkit.onnx.compared_values import compared_values

    compared = {name: values for name, values in compared_values(path).items() if name in candidates}
    words = "; ".join(f"{name}: {', '.join(map(str, values[:4]))}" for name, values in compared.items())
    note = f"Inputs take values that the graph compares them with: {words}."
    cases = {
        name: [values] if isinstance(values[0], str) else [(value,) for value in _with_another(values)]
        for name, values in compared.items()
    }
    count = max(map(len, cases.values()), default=0)
    return [
        _Variant({name: {"values": of_input[turn % len(of_input)]} for name, of_input in cases.items()}, note)
        for turn in range(count)
    ]


def _with_another(values: Sequence[int | str]) -> Sequence[int | str]:
    """Return the integers, and another one if there is one integer only."""
    return values if len(values) > 1 else (*values, 1 if values[0] == 0 else 0)


def _value_variants(free: Sequence[InputTensorSpec]) -> Iterator[_Variant]:
    """Yield other values of the inputs without stated values, the likeliest first."""
    masks = [spec for spec in free if is_mask(spec) or spec.dtype == "bool"]
    integers = [spec for spec in free if "int" in spec.dtype and spec not in masks]
    floats = [spec for spec in free if "float" in spec.dtype]

    def constant(specs: Sequence[InputTensorSpec], value: Callable[[InputTensorSpec], int]) -> _Changes:
        return {spec.name: {"value_range": (value(spec), value(spec)), "values": ()} for spec in specs}

    visible = constant(masks, lambda spec: 1 - hiding_value(spec))
    hidden = constant(masks, hiding_value)
    zeros, ones = constant(integers, lambda _: 0), constant(integers, lambda _: 1)
    shares: _Changes = {spec.name: {"value_range": (0.0, 1.0)} for spec in floats}
    options: tuple[tuple[_Changes, str], ...] = (
        (visible, "masks that hide nothing"),
        (hidden, "masks of the opposite value"),
        (zeros, "integers that are 0"),
        (ones, "integers that are 1"),
        ({**ones, **visible}, "integers that are 1, and masks that hide nothing"),
        (shares, "floats from 0 to 1"),
        ({**shares, **zeros, **visible}, "floats from 0 to 1, integers that are 0, and masks that hide nothing"),
    )
    seen: list[_Changes] = [{}]
    for changes, words in options:
        if changes not in seen:
            seen.append(changes)
            yield _Variant(changes, f"Compared on {words}: the model refuses others, or returns NaN for them.")


def _may_be_compared(spec: InputTensorSpec) -> bool:
    """Return True for text, and for one integer, such as a sampling rate."""
    return spec.dtype == "string" or ("int" in spec.dtype and all(size == 1 for size in spec.shape))
