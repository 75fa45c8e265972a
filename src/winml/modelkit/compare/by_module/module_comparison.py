"""Comparison of inputs and outputs of modules on two sides, and search for the first module that diverges.

Errors propagate: every module after a wrong module is wrong too. A module has an own error if its inputs agree and
its outputs differ.

Inner values are recorded in groups, so that memory holds both models and one group.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import GROUP_BYTES, NamesOfBoth, ValuePair
from winml.modelkit.compare.by_module.value_matching import MatchedBoundary
from winml.modelkit.compare.fidelity import FidelitySum, OutputFidelity
from winml.modelkit.compare.records import ComparedModule
from winml.modelkit.onnx.contents import PlacedNode, node_signature
from winml.modelkit.onnx.contexts import nested_nodes
from winml.modelkit.onnx.files.initializer_bytes import WeightEquality, weight_tensors
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS
from winml.modelkit.progress import count_progress
from winml.modelkit.tags import address

FIRST_GROUP = 16
"""Number of values recorded in the first group, while their sizes are unknown."""
TOLERANCE = 1e-3
"""Default relative error of a module that counts as rounding. Chosen: ten times the tolerance of float32 outputs, since
inner values may be small differences of large ones."""
FINEST = 0.01
"""Share of the tolerance. Chosen: if no module exceeds the tolerance, the search uses a hundredth of it."""


_OUTSTANDING = 6.0
"""Minimum ratio of an own error to the typical own error, if all modules have errors because of quantization. Chosen.
In int8 files without an inserted fault, own errors vary by a factor of 4."""


@dataclass(frozen=True)
class ModuleErrors:
    """Relative errors at the boundary of one module, as shares of the reference."""

    inputs: float | None
    """Largest error of its inputs; ``None`` if an input is unknown."""
    outputs: float
    """Largest error of its outputs; infinite for missing values, or NaN on one side."""
    before: tuple[tuple[float, float], ...] = ()
    """For a module with submodules, per submodule in order: (largest error of the inputs of its own nodes so far,
    largest error of the inputs of the submodule)."""
    last_fed: float | None = None
    """For a module with submodules: largest error of all inputs of its nodes. ``None``: equal to ``inputs``."""
    is_overflowing: bool = False
    """True if its outputs have NaN or infinity where the reference has not, and its inputs and submodules have not."""
    is_passing_on: bool = False
    """True if it computes the same on both sides, so that its error must come from elsewhere, even if larger."""

    @property
    def steps(self) -> tuple[tuple[float, float], ...]:
        """(input error, output error) of its own nodes; ``()`` if an input is unknown.

        An error inside a submodule counts as an input error of the own nodes after it.
        """
        if self.inputs is None:
            return ()
        return (*self.before, (self.inputs if self.last_fed is None else self.last_fed, self.outputs))


def own_error(errors: ModuleErrors) -> float | None:
    """Part of a module's error not explained by the inputs; ``None`` if an input is unknown.

    Squares of independent rounding errors add up: the result is the square root of error² - inputs². For a module with
    submodules, the result is the error of its own nodes: an error that vanishes before the outputs, such as before a
    scale near 0, does not count.
    """
    arising = _largest_step(errors)
    if arising is None or errors.inputs is None or not math.isfinite(arising):
        return arising
    return min(arising, _arising_error(errors.inputs, errors.outputs))


def _largest_step(errors: ModuleErrors) -> float | None:
    """Return the largest error that arises between two steps of a module; ``None`` if an input is unknown."""
    return max((_arising_error(*step) for step in errors.steps), default=None)


def _arising_error(fed: float, handed_on: float) -> float:
    """Return the part of an output error that the input error does not explain."""
    if not math.isfinite(fed):
        return 0.0
    return math.sqrt(max(0.0, handed_on**2 - fed**2)) if math.isfinite(handed_on) else handed_on


def first_divergence(modules: Sequence[ModuleErrors], tolerance: float, *, is_rounded: bool) -> int | None:
    """Find the first module with an error of its own: its position, or ``None``.

    Overflow is an error of the module, whatever the error of its inputs. If modules are rounded, the first overflow
    precedes modules with finite errors.

    Args:
        modules: Errors in the order the outputs are computed, submodules before their parents.
        tolerance: Relative error that counts as rounding.
        is_rounded: True if all modules have own errors because of quantization; the error must then exceed the typical
            own error and the error of the inputs, which a difference of large numbers amplifies.
    """
    steps = [_largest_step(errors) for errors in modules if not errors.is_passing_on]
    usual = [error for error in steps if error is not None and 0.0 < error < math.inf]
    typical = statistics.median_low(usual) if usual and is_rounded else 0.0
    limit = max(tolerance, _OUTSTANDING * typical)
    changed = [(position, errors) for position, errors in enumerate(modules) if not errors.is_passing_on]
    overflow = next((position for position, errors in changed if errors.is_overflowing), None)
    if overflow is not None and is_rounded:
        return overflow
    return next(
        (
            position
            for position, errors in changed
            # Wrong inputs may be amplified: a wrong value before a GELU is not an error of the GELU.
            if position == overflow
            or any(
                fed <= limit and _arising_error(fed, handed_on) > max(limit, _OUTSTANDING * fed * is_rounded)
                for fed, handed_on in errors.steps
            )
        ),
        None,
    )


@dataclass(frozen=True)
class ModuleComparison:
    """Result of the module comparison."""

    modules: tuple[ComparedModule, ...]
    """Modules in the order their outputs are computed."""
    errors: tuple[tuple[int, ModuleErrors], ...]
    """(position in ``modules``, errors) of the comparable modules."""
    is_rounded: bool
    """True if a side computes with fewer bits than float32."""

    def divergence(self, tolerance: float = TOLERANCE) -> int | None:
        """Find the first module with an error of its own: its position, or ``None``.

        Args:
            tolerance: Relative error that counts as rounding.
        """
        errors = [module_errors for _, module_errors in self.errors]
        index = first_divergence(errors, tolerance, is_rounded=self.is_rounded)
        return None if index is None else self.errors[index][0]


def compare_modules(
    pair: ValuePair,
    matched: Sequence[MatchedBoundary],
    whole: OutputFidelity,
    *,
    unchanged: Collection[str] | None,
    seconds: float = math.inf,
    are_rounded_alike: bool = False,
) -> ModuleComparison:
    """Compare modules.

    Args:
        pair: Values of both models.
        matched: Boundary values of each module, in the order they are computed.
        whole: The model output with the largest error.
        unchanged: Tags of the modules that are equal on both sides; ``None`` if unknown.
        seconds: Time after which no further values are recorded.
        are_rounded_alike: See :func:`are_quantized_alike`: no module has an error because of quantization.
    """
    taps = [names for call in matched if not call.is_root for names in call.taps]
    measured = _Measured(_measure_values(pair, taps, seconds), whole, matched, unchanged)
    modules: list[ComparedModule] = []
    compared: list[tuple[int, ModuleErrors]] = []
    for call in matched:
        outputs = measured.outputs_of(call)
        if not outputs:
            modules.append(ComparedModule(call.identity, None, reason=measured.reason_of(call)))
            continue
        # Of a reference of zeros, every error is infinite, too.
        worst = max(outputs, key=lambda output: (bool(output.problem), _value_error(output)))
        errors = measured.errors_of(call, worst)
        compared.append((len(modules), errors))
        is_unchanged = None if unchanged is None else call.identity.tag in unchanged
        modules.append(
            ComparedModule(
                call.identity,
                worst,
                errors.inputs,
                own_error(errors),
                is_unchanged=is_unchanged,
                fused_with=call.fused_with,
            )
        )
    return ModuleComparison(tuple(modules), tuple(compared), pair.is_rounded and not are_rounded_alike)


@dataclass(frozen=True)
class _Measured:
    """Measured similarity of each boundary value, queried by module."""

    values: Mapping[NamesOfBoth, OutputFidelity]
    whole: OutputFidelity
    matched: Sequence[MatchedBoundary]
    unchanged: Collection[str] | None

    def outputs_of(self, call: MatchedBoundary) -> list[OutputFidelity]:
        """Similarity of its outputs with the same meaning on both sides."""
        return [self.whole] if call.is_root else self._comparable_values(call.outputs)

    def reason_of(self, call: MatchedBoundary) -> str:
        """Reason why none of its outputs can be compared."""
        if call.reason:
            return call.reason
        if any(names not in self.values for names in call.outputs):
            return "no floating-point output, or the time limit was reached"
        return "outputs of different shapes"

    def input_error(self, call: MatchedBoundary) -> float | None:
        """Largest error of its inputs; ``None`` if an input is unknown."""
        if call.is_root:
            return 0.0
        fed = self._comparable_values(call.inputs)
        if len(fed) < len(call.inputs) + call.unknown_inputs:
            return None
        return max(map(_value_error, fed), default=0.0)

    def errors_of(self, call: MatchedBoundary, worst: OutputFidelity) -> ModuleErrors:
        """Errors at the boundary of a module, and at the boundaries of submodules around its own nodes."""
        inputs = self.input_error(call)
        fed, before = inputs or 0.0, []
        fed_problem = not call.is_root and any(value.problem for value in self._comparable_values(call.inputs))
        for inner in self._submodule_calls.get(call.identity.tag, ()):
            inner_error = self.input_error(inner)
            if inner_error is None:
                continue  # its output error may come from its inputs or from itself
            if inner.inputs:
                before.append((fed, inner_error))
            fed = max(fed, *map(_value_error, self.outputs_of(inner)))
            fed_problem = fed_problem or any(value.problem for value in self.outputs_of(inner))
        return ModuleErrors(
            inputs,
            _value_error(worst),
            tuple(before),
            fed,
            # Of a reference of zeros, every error is infinite, and no overflow.
            is_overflowing=bool(worst.problem) and inputs is not None and not fed_problem,
            is_passing_on=self.passes_on(call),
        )

    @cached_property
    def _submodule_calls(self) -> dict[str, list[MatchedBoundary]]:
        """Tag of a comparable module → calls of its direct submodules, in order."""
        seen = [call for call in self.matched if self.outputs_of(call)]
        tags = {call.identity.tag for call in seen}
        inside: dict[str, list[MatchedBoundary]] = defaultdict(list)
        for call in seen:
            if parent := address.nearest_ancestor(call.identity.tag, tags):
                inside[parent].append(call)
        return inside

    def passes_on(self, call: MatchedBoundary) -> bool:
        """Return True if a module's error comes from other modules: module and uncompared submodules are unchanged."""
        tag = call.identity.tag
        if self.unchanged is None or tag not in self.unchanged:
            return False
        return all(
            inner.identity.tag in self.unchanged or bool(self.outputs_of(inner))
            for inner in self.matched
            if inner.identity.tag != tag and address.is_within(inner.identity.tag, tag)
        )

    def _comparable_values(self, names: Sequence[NamesOfBoth]) -> list[OutputFidelity]:
        fidelities = [self.values[pair] for pair in names if pair in self.values]
        # Values of different shapes have different meanings.
        return [fidelity for fidelity in fidelities if not fidelity.problem.startswith("shape")]


def _value_error(fidelity: OutputFidelity) -> float:
    """Return the relative error of a value; infinite for a value with a problem."""
    return math.inf if fidelity.problem else fidelity.relative_error


def _measure_values(pair: ValuePair, taps: Sequence[NamesOfBoth], seconds: float) -> dict[NamesOfBoth, OutputFidelity]:
    """Run both sides in groups of recorded values; return value → similarity.

    Values that the time does not suffice for, and values that are not floats, are left out.

    Args:
        pair: The two models.
        taps: Names of the values on both sides.
        seconds: Time after which no further group is run.
    """
    sums: dict[NamesOfBoth, FidelitySum] = {}
    for group, inputs, ours, theirs in recorded_groups(pair, taps, seconds):
        for names in group:
            if names[0] in ours and all("float" in str(side.dtype) for side in (ours[names[0]], theirs[names[1]])):
                sums.setdefault(names, FidelitySum(names[1])).add(ours[names[0]], theirs[names[1]], inputs)
    return {names: total.of_value() for names, total in sums.items()}


def recorded_groups(
    pair: ValuePair, taps: Sequence[NamesOfBoth], seconds: float = math.inf
) -> Iterator[tuple[Sequence[NamesOfBoth], Arrays, Arrays, Arrays]]:
    """Run both sides in groups of recorded values; yield each group with inputs and values of both sides, by sample.

    Args:
        pair: The two models.
        taps: Names of the values on both sides.
        seconds: Time after which no further group is run.
    """
    waiting = list(dict.fromkeys(taps))
    sizes = dict(zip(waiting, pair.value_bytes(waiting), strict=True))
    count = FIRST_GROUP
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        length = _group_length([sizes[names] for names in waiting], count)
        group, waiting = waiting[:length], waiting[length:]
        recorded_bytes = 0
        for inputs, ours, theirs in pair.recorded(group):
            recorded_bytes = max(recorded_bytes, sum(array.nbytes for array in (*ours.values(), *theirs.values())))
            yield group, inputs, ours, theirs
            del ours, theirs  # before the next sample is recorded
        count = max(1, int(len(group) * GROUP_BYTES / max(recorded_bytes, 1)))
        finished = len(sizes) - len(waiting)
        count_progress(finished, len(sizes), f"{finished} of {len(sizes)} values")


def _group_length(sizes: Sequence[int | None], count: int) -> int:
    """Select the number of values to record together.

    Args:
        sizes: Bytes of each remaining value; ``None`` if unknown.
        count: Number of values of unknown size per group.
    """
    group_bytes = 0
    for number, size in enumerate(sizes):
        group_bytes += GROUP_BYTES // count if size is None else size
        if number and group_bytes > GROUP_BYTES:
            return number
    return len(sizes)


_Signatures = Mapping[str, Counter[tuple[object, ...]]]
"""Tag of a module → counts of its node signatures."""


def unchanged_modules(reference: OnnxSide, candidate: OnnxSide) -> frozenset[str]:
    """Find the modules whose nodes are equal in both files.

    Nodes are compared by operator, attributes, names of inputs and outputs, and content of weights; nodes of submodules
    are not included. A module with other names counts as changed.

    Raises:
        InputError: data of a file is missing.
    """
    weights = [dict(weight_tensors(side.structure)) for side in (reference, candidate)]
    equality = WeightEquality(reference.path, candidate.path)

    def is_same_weight(name: str) -> bool:
        ours, theirs = (tensors[name] for tensors in weights)
        if (ours.data_type, list(ours.dims)) != (theirs.data_type, list(theirs.dims)):
            return False
        return equality.are_equal(name, name)

    forms = _node_signatures(reference), _node_signatures(candidate)
    used = _find_weights(reference, weights[0]), _find_weights(candidate, weights[1])
    tags = [module.tag for side in (reference, candidate) if side.tree is not None for module in side.tree.modules]
    return frozenset(
        tag
        for tag in dict.fromkeys(tags)
        if forms[0].get(tag) == forms[1].get(tag)
        and used[0][tag] == used[1][tag]
        and all(map(is_same_weight, used[0][tag]))
    )


def are_quantized_alike(reference: OnnxSide, candidate: OnnxSide, unchanged: Collection[str]) -> bool:
    """Return True if most modules with quantized nodes are equal in both files, so that the others are not rounded.

    Args:
        reference: A file.
        candidate: The other file.
        unchanged: Tags of the modules that are equal in both.
    """
    tags = {
        tag
        for side in (reference, candidate)
        for placed, tag in _tagged_nodes(side)
        if placed.proto.op_type in QUANTIZED_OPERATORS
    }
    return 2 * len(tags.intersection(unchanged)) > len(tags)


def _node_signatures(side: OnnxSide) -> _Signatures:
    forms: defaultdict[str, Counter[tuple[object, ...]]] = defaultdict(Counter)
    opsets = {entry.domain: entry.version for entry in side.structure.opset_import}
    for placed, tag in _tagged_nodes(side):
        node = placed.proto
        forms[tag][node_signature(placed, opsets), tuple(node.input), tuple(node.output)] += 1
    return forms


def _find_weights(side: OnnxSide, weights: Mapping[str, onnx.TensorProto]) -> defaultdict[str, frozenset[str]]:
    """Return tag of a module → names of the weights that its nodes, and those of their subgraphs, read or hold."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for placed, tag in _tagged_nodes(side):
        for node in nested_nodes([placed.proto]):
            names[tag].update(weights.keys() & {*node.input, *node.output})
    return defaultdict(frozenset, {tag: frozenset(read_names) for tag, read_names in names.items()})


def _tagged_nodes(side: OnnxSide) -> list[tuple[PlacedNode, str]]:
    """Return the nodes of a side with their tags; ``[]`` without modules."""
    return [] if side.tree is None else list(zip(side.nodes, side.tree.tags, strict=True))
