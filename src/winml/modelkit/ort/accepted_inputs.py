"""Search for inputs that a graph accepts, if the user passes none.

A graph does not state which sizes and values it takes: edges that are multiples of 32, indices below the length of a
table, a sampling rate that it compares with a constant. Generated inputs are therefore tried on the graph. If it
refuses all sizes, or returns NaN, other values are tried, and the first accepted ones are used from then on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Arrays
from winml.modelkit.errors import NoInputsError, StageError, UsageError
from winml.modelkit.onnx.specs import InputTensorSpec, current_name
from winml.modelkit.ort.default_sizes import default_size
from winml.modelkit.ort.feeds import hiding_value, is_mask
from winml.modelkit.ort.graph_inputs import bounds_by_name, draw_feeds, graph_inputs, insert_sums, sizes_by_key
from winml.modelkit.ort.sessions import Session

_LARGE_DIMENSIONS = frozenset({"height", "width", "audio_length", "num_frames", "num_channels", "num_mel_bins"})
_EQUAL_SIZES = (4, 1, 8, 16, 32, 64)
"""Sizes tried for all dimensions at once, for graphs that need equal sizes, or multiples of up to 64."""
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


def accepted_inputs(session: Session, seed: int, requested: Mapping[str, int]) -> Iterator[AcceptedInputs]:
    """Yield inputs of different sizes that a graph accepts; at least one.

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
    for accepted in search.accepted():
        count += 1
        yield accepted
    if not count:
        refusal = search.refusals[0] if search.refusals else StageError("it has no inputs that can be generated")
        # The user's sizes are refused, which is no lack of samples.
        error = StageError if requested and isinstance(refusal, StageError) else NoInputsError
        raise error(refusal.message, hint=refusal.hint)


class _Search:
    """Search for sizes and values that a graph accepts."""

    def __init__(self, session: Session, seed: int, requested: Mapping[str, int]) -> None:
        self._session, self._seed, self._requested = session, seed, requested
        self._inputs = graph_inputs(session)
        self._variants = [*_value_variants(self._inputs, session.source_path)]
        """Other values, the likeliest first; those of all inputs are stated in the file if empty."""
        self._note = ""
        self._count = 0
        self.refusals: list[StageError | UsageError] = []

    def accepted(self) -> Iterator[AcceptedInputs]:
        """Yield accepted inputs: with values as drawn by default at all sizes, else at sizes or values tried later."""
        if self._variants and self._variants[0].comes_first:
            self._use(self._variants.pop(0))
        has_sizes = False
        for found in self._accepted_of(self._sizes()):
            has_sizes = True
            yield found
        if has_sizes or self._cannot_draw:
            return
        for found in itertools.islice(self._accepted_of(self._reported_sizes()), 1):
            has_sizes = True
            yield found
            # The size is a constant of the graph.
            yield from self._accepted_of([found.sizes])
        originals = self._inputs
        for variant in () if has_sizes else self._variants:
            self._use(variant)
            for found in self._accepted_of(itertools.islice(self._sizes(), _SIZES_OF_VALUES)):
                has_sizes = True
                yield found
            if has_sizes:
                return
            self._inputs, self._note = originals, ""

    def _accepted_of(self, sizes: Iterable[Mapping[str, int]]) -> Iterator[AcceptedInputs]:
        """Yield the inputs of sizes that the graph accepts, until no values can be drawn for an input."""
        for tried in sizes:
            if (found := self._try(tried)) is not None:
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
        try:
            feeds = draw_feeds(self._inputs, sizes, self._seed + self._count)
            outputs = self._session.run(feeds)
        except (StageError, UsageError) as error:
            self.refusals.append(error)
            return None
        return AcceptedInputs(self._inputs, sizes, feeds, outputs, self._note)

    def _sizes(self) -> Iterator[Mapping[str, int]]:
        """Yield sizes of the dynamic dimensions, the likeliest first; the same twice without dynamic dimensions."""
        bounds = bounds_by_name(self._inputs)
        for sizes in _usual_sizes(self._inputs, self._requested):
            yield {name: bounds[name].clamp(size) if name in bounds else size for name, size in sizes.items()}

    def _reported_sizes(self) -> Iterator[Mapping[str, int]]:
        """Yield sizes named in the reasons of refusals, such as the traced length of a reshaped tensor.

        For: ``nn.TransformerEncoder`` exported by TorchScript, whose length is a constant of the graph.
        """
        requested = sizes_by_key(self._inputs, self._requested)
        names = [name for name in _dynamic_names(self._inputs) if name not in requested]
        texts = (error.message for error in self.refusals)
        reported = (int(number) for text in texts for number in _NUMBER.findall(text))
        numbers = [*dict.fromkeys(number for number in reported if 1 < number <= _LARGEST_REPORTED)][:_MOST_REPORTED]
        for number in numbers if names else ():
            for small in (1, 2):
                for name in names:
                    yield {**dict.fromkeys(names, small), name: number, **requested}
            yield {**dict.fromkeys(names, number), **requested}


def _dynamic_names(inputs: Sequence[InputTensorSpec]) -> list[str]:
    return list(dict.fromkeys(key for spec in inputs for key in spec.shape if isinstance(key, str)))


def _holds_nan(outputs: Arrays) -> bool:
    """Return True if an output contains NaN, as a softmax over a row without a visible position."""
    return any(bool(np.isnan(value).any()) for value in outputs.values() if value.dtype.kind == "f")


def _usual_sizes(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Yield sizes to try, before bounds are applied."""
    names = _dynamic_names(inputs)
    requested = sizes_by_key(inputs, requested)
    fixed = {**{name: size for name in names if (size := large_size(name)) is not None}, **requested}
    for sizes in _cache_sizes(inputs):
        yield insert_sums(inputs, {**dict.fromkeys(names, 2), **sizes, **fixed})
    yield {**{name: position for position, name in enumerate(names, start=2)}, **fixed}
    yield {**{name: position for position, name in enumerate(names, start=5)}, **fixed}
    # Sizes that a graph requires to be equal without stating it.
    for size in _EQUAL_SIZES:
        yield {**dict.fromkeys(names, size), **fixed}
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
    comes_first: bool = False
    """True if these values are tried before those drawn by default."""

    def apply(self, inputs: Sequence[InputTensorSpec]) -> tuple[InputTensorSpec, ...]:
        """Return the inputs with these values."""
        return tuple(spec.model_copy(update=dict(self.changes.get(spec.name, {}))) for spec in inputs)


def _value_variants(inputs: Sequence[InputTensorSpec], path: Path | None) -> Iterator[_Variant]:
    """Yield other values of the inputs without stated values, the likeliest first.

    Args:
        inputs: The inputs of a graph.
        path: Its file, which may compare inputs with constants; `None`: a graph in memory.
    """
    free = [spec for spec in inputs if spec.value_range is None and not spec.values and spec.cache is None]
    if path is not None and any(_may_be_compared(spec) for spec in free):
        from winml.modelkit.onnx.compared_values import compared_values

        names = {spec.name for spec in free if _may_be_compared(spec)}
        compared = {name: values for name, values in compared_values(path).items() if name in names}
        if compared:
            words = "; ".join(f"{name}: {', '.join(map(str, values[:4]))}" for name, values in compared.items())
            stated = {name: {"values": values} for name, values in compared.items()}
            yield _Variant(stated, f"Inputs take values that the graph compares them with: {words}.", comes_first=True)
            yield _Variant({name: {"values": ()} for name in compared}, "")
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
