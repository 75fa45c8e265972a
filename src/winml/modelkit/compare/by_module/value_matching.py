"""Matching of the values of two models.

Values of two files match by name, which exporters, optimizers and quantizers preserve; else by position, if a module
has equally many outputs on both sides. Return values of a PyTorch module match the outputs of its nodes, by position;
in two PyTorch models, inputs and outputs match for modules of the same path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from winml.modelkit.compare.by_module.boundaries import CallKey, ModuleBoundary
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import WITHOUT_NODES, NamesOfBoth, Side, SidePair
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity

if TYPE_CHECKING:
    from winml.modelkit.arrays import Arrays
    from winml.modelkit.compare.by_module.torch_side import TorchSide


@dataclass(frozen=True)
class MatchedBoundary:
    """Boundary values of one module call that exist on both sides."""

    identity: ModuleIdentity
    inputs: tuple[NamesOfBoth, ...]
    """Floating-point inputs that were computed before."""
    outputs: tuple[NamesOfBoth, ...]
    unknown_inputs: int = 0
    """Number of such inputs that do not exist on both sides."""
    reason: str = ""
    """Reason for missing outputs."""
    fused_with: tuple[str, ...] = ()
    """Tags of the other modules whose work the outputs include."""

    @property
    def taps(self) -> tuple[NamesOfBoth, ...]:
        """Inputs and outputs to record."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs)))

    @property
    def is_root(self) -> bool:
        """True for the whole model, whose outputs are compared separately."""
        return address.depth(self.identity.tag) == 1


class BoundedSide(Protocol):
    """A side whose boundary values have names: a file, or a proof made with a file."""

    @property
    def boundaries(self) -> Mapping[CallKey, ModuleBoundary]:
        """(tag, call number) → boundary of the module call."""

    @property
    def value_names(self) -> frozenset[str]:
        """Names of the values."""


_NOT_THERE = ModuleBoundary(ModuleIdentity("", "", ""), reason="not in the candidate")


def match_files(reference: BoundedSide, candidate: BoundedSide) -> list[MatchedBoundary]:
    """Match the boundaries of two files, in the order the reference computes them, submodules first."""
    matched = []
    for boundary in sort_boundaries(reference.boundaries):
        twin = candidate.boundaries.get(boundary.key, _NOT_THERE)
        inputs, outputs = (
            tuple((name, name) for name in names if name in candidate.value_names and name in reference.value_names)
            for names in (boundary.inputs, boundary.outputs)
        )
        if not outputs and not _last_node(boundary, twin):
            outputs = _pair_names(boundary.outputs, twin.outputs)
        elif not outputs and twin.fused_with:
            # The module that does the work of a fused node is compared where that node ends.
            outputs = tuple((name, name) for name in twin.outputs if name in reference.value_names)
        matched.append(_create_match(boundary, twin, inputs, outputs, "outputs not in the candidate"))
    return matched


def match_with_torch(pair: SidePair) -> list[MatchedBoundary]:
    """Run the PyTorch models of a pair on its first sample, and match the boundaries of both sides.

    In the order of the file, submodules first; for two PyTorch models, in the order in which modules return.
    """
    reference_feeds, candidate_feeds = pair.reference_feeds(pair.draws[0]), pair.candidate_feeds(pair.draws[0])
    if isinstance(pair.candidate, OnnxSide):
        return _match_in_file(pair.candidate.boundaries, _record_calls(pair.reference, reference_feeds))
    result = _record_calls(pair.candidate, candidate_feeds)
    if isinstance(pair.reference, OnnxSide):
        return _match_in_file(pair.reference.boundaries, result, is_candidate=False)
    matched = []
    for key, boundary in _record_calls(pair.reference, reference_feeds).items():
        twin = result.get(key, _NOT_THERE)
        # A call without floating-point inputs and outputs counts as missing.
        twin = twin if twin.inputs or twin.outputs else _NOT_THERE
        if boundary.identity.tag:
            inputs, outputs = _pair_names(boundary.inputs, twin.inputs), _pair_names(boundary.outputs, twin.outputs)
            matched.append(_create_match(boundary, twin, inputs, outputs, "different outputs in the candidate"))
    return matched


def _record_calls(side: Side, feeds: Arrays) -> dict[CallKey, ModuleBoundary]:
    """Run a PyTorch model, and return the boundary of each module call."""
    assert not isinstance(side, OnnxSide)  # a side is a file or a model in PyTorch
    return cast("TorchSide", side).calls(feeds)


def sort_boundaries(boundaries: Mapping[CallKey, ModuleBoundary]) -> list[ModuleBoundary]:
    """Sort boundaries by the order of computation, submodules first."""
    return sorted(boundaries.values(), key=lambda call: (call.position, -address.depth(call.identity.tag)))


def _match_in_file(
    boundaries: Mapping[CallKey, ModuleBoundary],
    calls: Mapping[CallKey, ModuleBoundary],
    *,
    is_candidate: bool = True,
) -> list[MatchedBoundary]:
    """Match the boundaries of a file with calls in PyTorch, in the order the file computes them, submodules first.

    A single returned tensor matches the last computed value.

    Args:
        boundaries: Module calls in the file.
        calls: Module and number of call → call in PyTorch, in the order in which calls end.
        is_candidate: True if the file is the candidate, so that its names come second in a pair.
    """
    matched = []
    for boundary in sort_boundaries(boundaries):
        call = calls.get((boundary.identity.module, boundary.identity.call), ModuleBoundary(boundary.identity))
        end = _find_last_fused(boundary, boundaries, calls) if boundary.ends_in else call
        outputs: tuple[NamesOfBoth, ...] = ()
        if end is not None:
            outputs = _pair_names(boundary.outputs, end.outputs) or _pair_names(boundary.outputs[-1:], end.outputs)
        inputs = _pair_names(boundary.inputs, call.inputs)
        if is_candidate:
            inputs, outputs = (tuple((theirs, ours) for ours, theirs in pairs) for pairs in (inputs, outputs))
        matched.append(_create_match(boundary, call, inputs, outputs, "PyTorch returns no matching outputs"))
    return matched


def _find_last_fused(
    owner: ModuleBoundary, boundaries: Mapping[CallKey, ModuleBoundary], calls: Mapping[CallKey, ModuleBoundary]
) -> ModuleBoundary | None:
    """Return the PyTorch call with the outputs of a fused node: of the fused module that ends last.

    `None` if the node belongs to another module, or that module computes more than the node.

    Args:
        owner: Call of the module that the node belongs to.
        boundaries: Module calls in the file.
        calls: Module and number of call → call in PyTorch, in the order in which calls end.
    """
    number = owner.identity.call
    fused = [boundary for tag in owner.fused_with if (boundary := boundaries.get((tag, number))) is not None]
    in_file = {(boundary.identity.module, number): boundary for boundary in (owner, *fused)}
    last = next((key for key in reversed([*calls]) if key in in_file), None) if fused else None
    if last is None:
        return None
    # A module without nodes of its own is fused completely.
    is_complete = in_file[last].reason == WITHOUT_NODES or in_file[last].outputs == owner.outputs
    return calls[last] if is_complete else None


def _pair_names(names: Sequence[str], partners: Sequence[str]) -> tuple[NamesOfBoth, ...]:
    """Pair names by position; ``()`` for different numbers of names."""
    return tuple(zip(names, partners, strict=True)) if len(names) == len(partners) else ()


def _create_match(
    boundary: ModuleBoundary,
    twin: ModuleBoundary,
    inputs: tuple[NamesOfBoth, ...],
    outputs: tuple[NamesOfBoth, ...],
    without_outputs: str,
) -> MatchedBoundary:
    """Create the match of two boundaries, with the reason if no outputs match."""
    reason = ""
    if not outputs:
        node = _last_node(boundary, twin)
        fused = f"last operators fused with those of other modules in {node}" if node else ""
        reason = fused or boundary.reason or twin.reason or without_outputs
    fused_with = boundary.fused_with or twin.fused_with if outputs else ()
    return MatchedBoundary(boundary.identity, inputs, outputs, len(boundary.inputs) - len(inputs), reason, fused_with)


def _last_node(boundary: ModuleBoundary, twin: ModuleBoundary) -> str:
    """Node that fuses the last operators of a module with operators of other modules; `""` without such a node."""
    return boundary.ends_in or twin.ends_in
