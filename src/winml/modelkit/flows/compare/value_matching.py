"""Which values of one side are the same as which of the other?

Values of two files are the same where they have one name, which exporters, optimizers and quantizers keep; else where a
module has as many outputs on both sides, in order. What a PyTorch module returns is what its nodes hand on, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from winml.modelkit.flows.compare.onnx_side import CallKey, ModuleBoundary, OnnxSide
from winml.modelkit.flows.compare.torch_side import TorchSide, ValueKind
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.module_identity import ModuleIdentity

__all__ = ["MatchedBoundary", "match_files", "match_with_torch"]

NamesOfBoth = tuple[str, str]
"""Name of a value in the reference and in the candidate."""


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
    if not outputs and other is not None and other.outputs and len(other.outputs) == len(boundary.outputs):
        outputs = tuple(zip(boundary.outputs, other.outputs, strict=True))
    reason = ""
    if not outputs:
        reason = boundary.reason or (
            "the candidate has no such module" if other is None else other.reason or "none of its outputs is kept there"
        )
    return MatchedBoundary(boundary.identity, inputs, outputs, len(boundary.inputs) - len(inputs), reason)


def match_with_torch(counts: Mapping[tuple[str, int, ValueKind], int], candidate: OnnxSide) -> list[MatchedBoundary]:
    """Match the boundaries of a file with what the modules of a PyTorch model take and return.

    Args:
        counts: Module path, call and kind → floating-point tensors.
        candidate: The file.
    """
    matched = []
    for boundary in _in_order(candidate.boundaries):
        identity = boundary.identity
        outputs = _paired(boundary.outputs, counts, identity, "output")
        inputs = _paired(boundary.inputs, counts, identity, "input")
        reason = "" if outputs else boundary.reason or "PyTorch returns nothing like its outputs"
        unknown = len(boundary.inputs) - len(inputs)
        matched.append(MatchedBoundary(identity, inputs, outputs, unknown, reason))
    return matched


def _paired(
    names: Sequence[str],
    counts: Mapping[tuple[str, int, ValueKind], int],
    identity: ModuleIdentity,
    kind: ValueKind,
) -> tuple[NamesOfBoth, ...]:
    """Return the tensors of a module with the values of the file; of one tensor returned, the value computed last."""
    count = counts.get((identity.module, identity.call, kind), 0)
    if not count or not names:
        return ()
    kept = names if count == len(names) else names[-1:] if count == 1 and kind == "output" else ()
    return tuple(
        (TorchSide.value_name(identity.module, identity.call, kind, index), name) for index, name in enumerate(kept)
    )
