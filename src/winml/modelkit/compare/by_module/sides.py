"""Contract of the two sides of a comparison, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from winml.modelkit.arrays import Array, Arrays, numpy_dtype
from winml.modelkit.compare.fidelity import FidelitySum
from winml.modelkit.compare.records import ComparedOutput
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.progress import counted

NamesOfBoth = tuple[str, str]
"""(name in the reference, name in the candidate) of a value."""
GROUP_BYTES = 256_000_000
"""Maximum bytes of values recorded at a time, on both sides. Chosen: small relative to a model, large enough that few
groups are needed."""


WITHOUT_NODES = "it has no nodes: fused into another, or a container only"
"""Reason for the missing boundary of a module of a file."""


class Side(Protocol):
    """One of the two models."""

    @property
    def shown(self) -> str:
        """Name of the side in messages."""

    @property
    def is_rounded(self) -> bool:
        """True if it computes with fewer bits than float32."""

    @property
    def inputs(self) -> Sequence[InputTensorSpec]:
        """Inputs of the model."""

    @property
    def declared_names(self) -> Sequence[str]:
        """Names of inputs and outputs known before a run."""

    @property
    def states(self) -> Mapping[str, str]:
        """Input of the KV cache → output that is its next value; `{}` without a cache."""

    @property
    def input_shapes(self) -> Mapping[str, Sequence[int | str | None]]:
        """Input → sizes as declared by the model."""

    @property
    def module_classes(self) -> Mapping[str, str]:
        """Path of each known module → class, ``""`` if unknown; the root is ``""``."""

    def value_bytes(self, names: Sequence[str], feeds: Arrays) -> Sequence[int | None]:
        """Sizes of inner values in bytes; ``None`` if unknown before a run."""

    def outputs(self, feeds: Arrays) -> dict[str, Array]:
        """Run the model, and return its outputs."""

    def values(self, feeds: Arrays, names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return inner values by name."""


class ValuePair(Protocol):
    """Values of two models on the same inputs."""

    @property
    def is_rounded(self) -> bool:
        """True if a model computes with fewer bits than float32."""

    def value_bytes(self, taps: Sequence[NamesOfBoth]) -> Sequence[int | None]:
        """Bytes of recording each value, in one sample; ``None`` if unknown."""

    def recorded(self, group: Sequence[NamesOfBoth]) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Yield for each sample the inputs whose padding is left out, and the inner values of a group by side."""


@dataclass(frozen=True)
class SidePair:
    """Two sides and their inputs."""

    reference: Side
    candidate: Side
    draws: Sequence[Arrays]
    """Samples, named as in the candidate."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the reference → name in the candidate, of inputs and outputs with different names."""
    counts_padding: bool = False
    """True if values of padding are compared, too, as in the verification of an equal file: PyTorch defines them."""

    @property
    def is_rounded(self) -> bool:
        """True if a side computes with fewer bits than float32."""
        return self.candidate.is_rounded or self.reference.is_rounded

    def compared_outputs(self) -> tuple[tuple[ComparedOutput, ...], tuple[Sequence[str], Sequence[str]]]:
        """Run both on all samples, and compare their outputs; also return the unmatched outputs of each side.

        Raises:
            UsageError: the models have no output in common.
        """
        compared: dict[str, tuple[str, FidelitySum]] = {}
        missing: tuple[Sequence[str], Sequence[str]] = ((), ())
        for feeds in counted(self.draws, "sample"):
            expected = self.reference.outputs(self.reference_feeds(feeds))
            outputs = self.candidate.outputs(self.candidate_feeds(feeds))
            if not compared:
                common, missing = self._common_names(expected, outputs)
                compared = {name: (target, FidelitySum(name)) for name, target in common.items()}
            for name, (target, total) in compared.items():
                total.add(expected[name], outputs[target], self._judged_inputs(feeds))
        return tuple(ComparedOutput(total.of_output()) for _, total in compared.values()), missing

    def _common_names(
        self, expected: Arrays, outputs: Arrays
    ) -> tuple[dict[str, str], tuple[Sequence[str], Sequence[str]]]:
        """Match output names: name in the reference → name in the candidate; and the unmatched outputs of each side.

        Raises:
            UsageError: no output has a counterpart.
        """
        names = {name: self.names.get(name, name) for name in expected}
        common = {name: target for name, target in names.items() if target in outputs}
        if not common:
            raise UsageError(
                f"the models have no output in common: {self.reference.shown} has {', '.join(expected)}, "
                f"{self.candidate.shown} {', '.join(outputs)}",
                hint=f"Map names with {opt.map} reference=candidate.",
            )
        theirs = set(common.values())
        alone = [name for name in names if name not in common], [name for name in outputs if name not in theirs]
        return common, alone

    def value_bytes(self, taps: Sequence[NamesOfBoth]) -> list[int | None]:
        """Bytes of recording each value on both sides, in one sample; ``None`` if unknown."""
        feeds = max(self.draws, key=lambda sample: sum(array.nbytes for array in sample.values()))
        reference_sizes = self.reference.value_bytes([name for name, _ in taps], self.reference_feeds(feeds))
        right = self.candidate.value_bytes([name for _, name in taps], self.candidate_feeds(feeds))
        known = (ours if ours is not None else theirs for ours, theirs in zip(reference_sizes, right, strict=True))
        return [None if size is None else 2 * size for size in known]

    def _judged_inputs(self, feeds: Arrays) -> Arrays:
        return {} if self.counts_padding else feeds

    def recorded(self, group: Sequence[NamesOfBoth]) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Run both on each sample; see :meth:`ValuePair.recorded`."""
        left, right = (list(dict.fromkeys(names[side] for names in group)) for side in (0, 1))
        for feeds in self.draws:
            yield (
                self._judged_inputs(feeds),
                self.reference.values(self.reference_feeds(feeds), left),
                self.candidate.values(self.candidate_feeds(feeds), right),
            )

    def reference_feeds(self, feeds: Arrays) -> dict[str, Array]:
        """Convert a sample to the names and types of the reference."""
        original = {target: name for name, target in self.names.items()}
        return cast_feeds({original.get(name, name): array for name, array in feeds.items()}, self.reference)

    def candidate_feeds(self, feeds: Arrays) -> dict[str, Array]:
        """Convert a sample to the types of the candidate."""
        return cast_feeds(feeds, self.candidate)


def cast_feeds(feeds: Arrays, side: Side) -> dict[str, Array]:
    """Cast floating-point values to the input types of a side, which may compute in another type."""
    dtypes = {spec.name: spec.dtype for spec in side.inputs}

    def typed(name: str, array: Array) -> Array:
        is_other = name in dtypes and "float" in dtypes[name] and str(array.dtype) != dtypes[name]
        return array.astype(numpy_dtype(dtypes[name])) if is_other and "float" in str(array.dtype) else array

    return {name: typed(name, array) for name, array in feeds.items()}
