"""Compares inputs and outputs of modules on two sides, and finds the first module that diverges.

An error travels: every module behind a wrong one is wrong as well. A module's error is its own where its inputs agree
and its outputs do not.

Inner values are recorded in groups, so that memory holds both models and one group.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import GROUP_BYTES, NamesOfBoth, SidePair
from winml.modelkit.compare.by_module.value_matching import MatchedBoundary
from winml.modelkit.compare.fidelity import FidelitySum, OutputFidelity
from winml.modelkit.compare.records import ComparedModule
from winml.modelkit.onnx.contents import PlacedNode, node_signature
from winml.modelkit.onnx.files.initializer_bytes import WeightEquality, locate_initializers
from winml.modelkit.onnx.files.reading import VALUE_FIELDS
from winml.modelkit.progress import count_progress
from winml.modelkit.tags import address

FIRST_GROUP = 16
"""Values recorded in the first group, where nobody knows their sizes yet."""
TOLERANCE = 1e-3
"""Relative error of a module that counts as rounding, where nothing else is asked for. Chosen: ten times the tolerance
of float32 outputs, since inner values may be small differences of large ones."""


_OUTSTANDING = 6.0
"""Chosen: how many times the usual own error of a module one has to be, where all modules have some because numbers of
few bits are rounded everywhere. In int8 files with nothing planted, own errors spread over a factor of 4."""


@dataclass(frozen=True)
class ModuleErrors:
    """Relative errors at the boundary of one module, as shares of the reference."""

    inputs: float | None
    """Largest of its inputs; None where one of them is unknown."""
    outputs: float
    """Largest of its outputs; infinite where values are missing, or NaN on one side."""
    before: tuple[tuple[float, float], ...] = ()
    """Of a module around others: the largest error of what its own nodes were fed until then, and that of what they
    feed to a module inside, for each of these in order."""
    last_fed: float | None = None
    """Of a module around others: the largest error of what its nodes were fed until the end. None: as ``inputs``."""
    is_passing_on: bool = False
    """Whether it computes the same on both sides, so that its error has to come from elsewhere, larger as it may be."""

    @property
    def steps(self) -> tuple[tuple[float, float], ...]:
        """Errors of what its own nodes are fed, and of what they hand on; nothing where one of its inputs is unknown.

        What arises inside of another module is fed to it by that.
        """
        if self.inputs is None:
            return ()
        return (*self.before, (self.inputs if self.last_fed is None else self.last_fed, self.outputs))


def own_error(errors: ModuleErrors) -> float | None:
    """Return the part of a module's error that its inputs do not explain; None where nobody knows what it was fed.

    Errors of rounding are independent of each other, so that their squares add up: it is the square root of
    error² - inputs². Of a module around others it is what arises in its own nodes, and no more than that: an error that
    vanishes before its outputs, such as before a scale near 0, is not one of the module.
    """
    arising = _largest_step(errors)
    if arising is None or errors.inputs is None or not math.isfinite(arising):
        return arising
    return min(arising, _arising(errors.inputs, errors.outputs))


def _largest_step(errors: ModuleErrors) -> float | None:
    return max((_arising(*step) for step in errors.steps), default=None)


def _arising(fed: float, handed_on: float) -> float:
    if not math.isfinite(fed):
        return 0.0
    return math.sqrt(max(0.0, handed_on**2 - fed**2)) if math.isfinite(handed_on) else handed_on


def first_divergence(modules: Sequence[ModuleErrors], tolerance: float, *, is_rounded: bool) -> int | None:
    """Return the position of the first module whose error is its own, or None.

    Args:
        modules: In the order their outputs are computed, inner modules before those around them.
        tolerance: Relative error that is no error, being rounding of the type that is computed in.
        is_rounded: Whether all modules have errors of their own, since the graph computes with few bits; then one
            has to stand out from the others, and from what it was fed, of which a difference of large numbers makes
            more.
    """
    own = [_largest_step(errors) for errors in modules if not errors.is_passing_on]
    usual = [error for error in own if error is not None and 0.0 < error < math.inf]
    typical = statistics.median_low(usual) if usual and is_rounded else 0.0
    limit = max(tolerance, _OUTSTANDING * typical)
    return next(
        (
            position
            for position, errors in enumerate(modules)
            # What is fed something wrong may make more of it: a wrong value before a GELU is no fault of the GELU.
            if not errors.is_passing_on
            and any(
                fed <= limit and _arising(fed, handed_on) > max(limit, _OUTSTANDING * fed * is_rounded)
                for fed, handed_on in errors.steps
            )
        ),
        None,
    )


@dataclass(frozen=True)
class ModuleComparison:
    """What came of comparing modules."""

    modules: tuple[ComparedModule, ...]
    """In the order their outputs are computed."""
    errors: tuple[tuple[int, ModuleErrors], ...]
    """Position in ``modules`` and errors of those that can be compared."""
    is_rounded: bool
    """Whether one of the sides computes with fewer bits than float32."""

    def divergence(self, tolerance: float = TOLERANCE) -> int | None:
        """Return the position of the first module whose error is its own, or None.

        Args:
            tolerance: Relative error that counts as rounding.
        """
        errors = [found for _, found in self.errors]
        first = first_divergence(errors, tolerance, is_rounded=self.is_rounded)
        return None if first is None else self.errors[first][0]


def compare_modules(
    pair: SidePair,
    matched: Sequence[MatchedBoundary],
    complete: OutputFidelity,
    *,
    unchanged: Collection[str] | None,
    seconds: float = math.inf,
) -> ModuleComparison:
    """Compare modules.

    Args:
        pair: The sides, and what they are fed.
        matched: What is at the boundary of each module, in the order it is computed.
        complete: The output of the model that is farthest off.
        unchanged: Tags of modules that are on both sides as they were; None where nobody knows.
        seconds: Time after which no further values are recorded.
    """
    taps = [names for item in matched if not item.is_root for names in item.taps]
    measured = _Measured(_measure(pair, taps, seconds), complete, matched, unchanged)
    modules: list[ComparedModule] = []
    compared: list[tuple[int, ModuleErrors]] = []
    for item in matched:
        outputs = measured.outputs_of(item)
        if not outputs:
            modules.append(ComparedModule(item.identity, None, reason=measured.reason_of(item)))
            continue
        worst = max(outputs, key=_error_of)
        found = measured.errors_of(item, _error_of(worst))
        compared.append((len(modules), found))
        is_unchanged = None if unchanged is None else item.identity.tag in unchanged
        modules.append(ComparedModule(item.identity, worst, found.inputs, own_error(found), is_unchanged=is_unchanged))
    is_rounded = pair.candidate.is_rounded or pair.reference.is_rounded
    return ModuleComparison(tuple(modules), tuple(compared), is_rounded)


@dataclass(frozen=True)
class _Measured:
    """How near each value is, asked by module."""

    values: Mapping[NamesOfBoth, OutputFidelity]
    whole: OutputFidelity
    matched: Sequence[MatchedBoundary]
    unchanged: Collection[str] | None

    def outputs_of(self, item: MatchedBoundary) -> list[OutputFidelity]:
        """Return what it hands on, as far as it means the same on both sides."""
        return [self.whole] if item.is_root else self._comparable(item.outputs)

    def reason_of(self, item: MatchedBoundary) -> str:
        """Return why nothing of it can be compared."""
        if item.reason:
            return item.reason
        if any(names not in self.values for names in item.outputs):
            return "no floating-point output, or the time limit was reached"
        return "outputs of different shapes"

    def input_error(self, item: MatchedBoundary) -> float | None:
        """Return the largest error of what it is fed; None where some of that is unknown."""
        if item.is_root:
            return 0.0
        fed = self._comparable(item.inputs)
        if len(fed) < len(item.inputs) + item.unknown_inputs:
            return None
        return max(map(_error_of, fed), default=0.0)

    def errors_of(self, item: MatchedBoundary, outputs: float) -> ModuleErrors:
        """Return the errors at its boundary, and at those of the modules inside, between which its own nodes are."""
        inputs = self.input_error(item)
        fed, before = inputs or 0.0, []
        for inner in self._inside.get(item.identity.tag, ()):
            inner_error = self.input_error(inner)
            if inner_error is None:
                continue  # what it returns may be wrong by what it is fed, or by itself
            if inner.inputs:
                before.append((fed, inner_error))
            fed = max(fed, *map(_error_of, self.outputs_of(inner)))
        return ModuleErrors(inputs, outputs, tuple(before), fed, is_passing_on=self.passes_on(item))

    @cached_property
    def _inside(self) -> dict[str, list[MatchedBoundary]]:
        """Tag of a module that can be compared → calls of those next inside, in order."""
        seen = [item for item in self.matched if self.outputs_of(item)]
        tags = {item.identity.tag for item in seen}
        inside: dict[str, list[MatchedBoundary]] = defaultdict(list)
        for item in seen:
            if parent := address.nearest_ancestor(item.identity.tag, tags):
                inside[parent].append(item)
        return inside

    def passes_on(self, item: MatchedBoundary) -> bool:
        """Say whether its error has to come from elsewhere: it is unchanged, and so is what cannot be seen inside."""
        tag = item.identity.tag
        if self.unchanged is None or tag not in self.unchanged:
            return False
        return all(
            other.identity.tag in self.unchanged or bool(self.outputs_of(other))
            for other in self.matched
            if other.identity.tag != tag and address.is_within(other.identity.tag, tag)
        )

    def _comparable(self, names: Sequence[NamesOfBoth]) -> list[OutputFidelity]:
        found = [self.values[pair] for pair in names if pair in self.values]
        # Another shape is another value.
        return [fidelity for fidelity in found if not fidelity.problem.startswith("shape")]


def _error_of(fidelity: OutputFidelity) -> float:
    return math.inf if fidelity.problem else fidelity.relative_error


def _measure(pair: SidePair, taps: Sequence[NamesOfBoth], seconds: float) -> dict[NamesOfBoth, OutputFidelity]:
    """Return how near each value is, recording groups of them on both sides."""
    sums: dict[NamesOfBoth, FidelitySum] = {}
    waiting = list(dict.fromkeys(taps))
    sizes = dict(zip(waiting, pair.value_bytes(waiting), strict=True))
    count = FIRST_GROUP
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        length = _group_length([sizes[names] for names in waiting], count)
        group, waiting = waiting[:length], waiting[length:]
        held = 0
        for left, right in pair.recorded(group):
            held = max(held, sum(array.nbytes for array in (*left.values(), *right.values())))
            for names in group:
                if names[0] in left and all("float" in str(side.dtype) for side in (left[names[0]], right[names[1]])):
                    sums.setdefault(names, FidelitySum(names[1])).add(left[names[0]], right[names[1]])
            del left, right  # before the next draw is recorded
        count = max(1, int(len(group) * GROUP_BYTES / max(held, 1)))
        done = len(sizes) - len(waiting)
        count_progress(done, len(sizes), f"{done} of {len(sizes)} values")
    return {names: total.of_value() for names, total in sums.items()}


def _group_length(sizes: Sequence[int | None], count: int) -> int:
    """Return how many values are recorded together.

    Args:
        sizes: Bytes of each value that is left; None where nobody knows.
        count: Values that go together where a size is not known.
    """
    held = 0
    for number, size in enumerate(sizes):
        held += GROUP_BYTES // count if size is None else size
        if number and held > GROUP_BYTES:
            return number
    return len(sizes)


_Forms = Mapping[str, Counter[tuple[object, ...]]]
"""Tag of a module → its nodes, each as what tells it from others."""


def unchanged_modules(reference: OnnxSide, candidate: OnnxSide) -> frozenset[str]:
    """Return the tags of the modules whose nodes are the same in both files.

    Nodes are compared by operator, attributes, names of inputs and outputs, and content of weights; those of inner
    modules are left out. A module with other names counts as changed.

    Raises:
        InputError: data of a file is missing.
    """
    weights = [{tensor.name: tensor for tensor in side.structure.graph.initializer} for side in (reference, candidate)]
    places = [locate_initializers(side.path) for side in (reference, candidate)]
    equality = WeightEquality(*places)

    def is_same_weight(name: str) -> bool:
        left, right = (tensors[name] for tensors in weights)
        if (left.data_type, list(left.dims)) != (right.data_type, list(right.dims)):
            return False
        return equality.are_equal(name, name)

    forms = _forms_of(reference), _forms_of(candidate)
    read = _initializers_read(reference, weights[0]), _initializers_read(candidate, weights[1])
    tags = [module.tag for side in (reference, candidate) if side.tree is not None for module in side.tree.modules]
    return frozenset(
        tag
        for tag in dict.fromkeys(tags)
        if forms[0].get(tag) == forms[1].get(tag)
        and read[0][tag] == read[1][tag]
        and all(map(is_same_weight, read[0][tag]))
    )


def _forms_of(side: OnnxSide) -> _Forms:
    forms: defaultdict[str, Counter[tuple[object, ...]]] = defaultdict(Counter)
    for number, (item, tag) in enumerate(_tagged(side)):
        node = item.proto
        # The values of a large constant are not read, so that nobody knows whether it is the same.
        unknown = (id(side), number) if any(map(_is_without_values, node.attribute)) else ()
        forms[tag][node_signature(item), tuple(node.input), tuple(node.output), unknown] += 1
    return forms


def _is_without_values(attribute: onnx.AttributeProto) -> bool:
    tensor = attribute.t
    has_values = any(getattr(tensor, field) for field in (*VALUE_FIELDS, "string_data"))
    return attribute.HasField("t") and 0 not in tensor.dims and not has_values


def _initializers_read(side: OnnxSide, weights: Mapping[str, onnx.TensorProto]) -> defaultdict[str, frozenset[str]]:
    names: defaultdict[str, set[str]] = defaultdict(set)
    for item, tag in _tagged(side):
        names[tag].update(name for name in item.proto.input if name in weights)
    return defaultdict(frozenset, {tag: frozenset(found) for tag, found in names.items()})


def _tagged(side: OnnxSide) -> list[tuple[PlacedNode, str]]:
    return [] if side.tree is None else list(zip(side.nodes, side.tree.tags, strict=True))
