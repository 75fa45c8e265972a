"""Which values of two models correspond to each other?

Values of two files are the same where they have one name, which exporters, optimizers and quantizers keep; else where a
module has as many outputs on both sides, in order. What a PyTorch module returns is what its nodes hand on, in order;
of two PyTorch models, what modules of one path take and return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import CallKey, ModuleBoundary, NamesOfBoth
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity

ValueCounts = Mapping[tuple[str, int, str], int]
"""Module path, number of the call, from 1, and ``input`` or ``output`` → floating-point tensors."""


@dataclass(frozen=True)
class MatchedBoundary:
    """The values at the boundary of one call of a module that both sides have."""

    identity: ModuleIdentity
    inputs: tuple[NamesOfBoth, ...]
    """Floating-point values it is fed that were computed before."""
    outputs: tuple[NamesOfBoth, ...]
    unknown_inputs: int = 0
    """Number of such values that are not on both sides."""
    reason: str = ""
    """Why there is no output to compare."""

    @property
    def taps(self) -> tuple[NamesOfBoth, ...]:
        """Inputs and outputs, to be recorded."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs)))

    @property
    def is_root(self) -> bool:
        """Whether it is the whole model, whose outputs are compared by themselves."""
        return address.depth(self.identity.tag) == 1


def value_name(path: str, call: int, kind: str, index: int) -> str:
    """Return the name of one tensor that a call of a PyTorch module takes (``input``) or returns (``output``)."""
    return f"{path}|{call}|{kind}|{index}"


def match_files(reference: OnnxSide, candidate: OnnxSide) -> list[MatchedBoundary]:
    """Match the boundaries of two files, in the order the reference computes them, inner modules first."""
    return [
        _matched(boundary, candidate.boundaries.get(boundary.key), reference, candidate)
        for boundary in _in_order(reference.boundaries)
    ]


def _in_order(boundaries: Mapping[CallKey, ModuleBoundary]) -> list[ModuleBoundary]:
    return sorted(boundaries.values(), key=lambda item: (item.position, -address.depth(item.identity.tag)))


def _matched(
    boundary: ModuleBoundary, other: ModuleBoundary | None, reference: OnnxSide, candidate: OnnxSide
) -> MatchedBoundary:
    common = reference.value_names & candidate.value_names
    inputs = tuple((name, name) for name in boundary.inputs if name in common)
    outputs = tuple((name, name) for name in boundary.outputs if name in candidate.value_names)
    ends_in = boundary.ends_in or (other.ends_in if other is not None else "")
    if not outputs and not ends_in and other is not None and len(other.outputs) == len(boundary.outputs):
        outputs = tuple(zip(boundary.outputs, other.outputs, strict=True))
    reason = _ends_in_words(ends_in) if ends_in and not outputs else ""
    if not outputs and not reason:
        reason = boundary.reason or (
            "not in the candidate" if other is None else other.reason or "outputs not in the candidate"
        )
    return MatchedBoundary(boundary.identity, inputs, outputs, len(boundary.inputs) - len(inputs), reason)


def _ends_in_words(node: str) -> str:
    return f"last operators fused with those of other modules in {node}"


def match_with_torch(counts: ValueCounts, file: OnnxSide) -> list[MatchedBoundary]:
    """Match the boundaries of a file with what the modules of a PyTorch model take and return, which is the reference.

    Args:
        counts: What the modules take and return.
        file: The file.
    """
    matched = []
    for boundary in _in_order(file.boundaries):
        identity = boundary.identity
        outputs = () if boundary.ends_in else _paired(boundary.outputs, counts, identity, "output")
        inputs = _paired(boundary.inputs, counts, identity, "input")
        reason = _ends_in_words(boundary.ends_in) if boundary.ends_in else boundary.reason
        reason = "" if outputs else reason or "PyTorch returns no matching outputs"
        unknown = len(boundary.inputs) - len(inputs)
        matched.append(MatchedBoundary(identity, inputs, outputs, unknown, reason))
    return matched


def turned(matched: Sequence[MatchedBoundary]) -> list[MatchedBoundary]:
    """Return the same boundaries with the reference and the candidate in each other's place."""

    def both(pairs: Sequence[NamesOfBoth]) -> tuple[NamesOfBoth, ...]:
        return tuple((right, left) for left, right in pairs)

    return [replace(item, inputs=both(item.inputs), outputs=both(item.outputs)) for item in matched]


def _paired(names: Sequence[str], counts: ValueCounts, identity: ModuleIdentity, kind: str) -> tuple[NamesOfBoth, ...]:
    """Return the tensors of a module with the values of the file; of one tensor returned, the value computed last."""
    count = counts.get((identity.module, identity.call, kind), 0)
    if not count or not names:
        return ()
    retained = names if count == len(names) else names[-1:] if count == 1 and kind == "output" else ()
    return tuple((value_name(identity.module, identity.call, kind, index), name) for index, name in enumerate(retained))


def match_calls(
    reference: Sequence[ModuleIdentity], counts: ValueCounts, candidate_counts: ValueCounts
) -> list[MatchedBoundary]:
    """Match the calls of modules of two PyTorch models.

    Args:
        reference: Calls of the reference's modules, in the order they return.
        counts: What they take and return.
        candidate_counts: What the modules of the candidate take and return.
    """
    matched = []
    for identity in reference:
        key = identity.module, identity.call
        inputs, outputs = (_both_named(key, kind, counts, candidate_counts) for kind in ("input", "output"))
        has_none = not any((*key, kind) in candidate_counts for kind in ("input", "output"))
        reason = "" if outputs else "not in the candidate" if has_none else "different outputs in the candidate"
        unknown = counts.get((*key, "input"), 0) - len(inputs)
        matched.append(MatchedBoundary(identity, inputs, outputs, unknown, reason))
    return matched


def _both_named(key: tuple[str, int], kind: str, *counts: ValueCounts) -> tuple[NamesOfBoth, ...]:
    left, right = (count.get((*key, kind), 0) for count in counts)
    names = [value_name(*key, kind, index) for index in range(left if left == right else 0)]
    return tuple((name, name) for name in names)
