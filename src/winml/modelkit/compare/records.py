"""The records of ``winml compare`` and ``winml diff``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.compare.fidelity import OutputFidelity, QualitySamples, judged_outputs, quality_record
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity


@dataclass(frozen=True)
class ComparedOutput(Record):
    """One output of both models."""

    fidelity: OutputFidelity = field(metadata=entry(inline=True))
    part: str = field(default="", metadata=entry(before="fidelity", omit_empty=True))
    """The part that answers it, in the comparison of a model of several parts."""

    @property
    @recorded()
    def top1_agreement(self) -> float | None:
        """Share of positions at which the largest value along the last axis is at the same place; None where that
        means nothing.
        """
        return self.fidelity.top1_agreement


@dataclass(frozen=True)
class ComparedModule(Record):
    """One call of one module."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    fidelity: OutputFidelity | None = field(metadata=entry(skip=True))
    """Of its output that is farthest off; None where no value of it is on both sides."""
    input_error: float | None = None
    """Largest relative error of what it was fed; None where nothing is known of it."""
    own_error: float | None = None
    """Relative error that it was not fed."""
    reason: str = field(default="", metadata=entry(last=True, null_if_empty=True))
    """Why nothing of it can be compared."""
    is_unchanged: bool | None = field(default=None, metadata=entry("unchanged"))
    """Whether its own nodes are the same on both sides: operators, what they read and weights. None where that is
    unknown."""

    @property
    @recorded(entry(before="input_error", inline=True))
    def measures(self) -> dict[str, Any]:
        """How near its output is, and its name as ``value``."""
        measures = {} if self.fidelity is None else self.fidelity.as_record()
        name = measures.pop("name", None)
        return {**measures, "value": name}


@dataclass(frozen=True)
class ModelComparison:
    """Everything there is to tell about two models on the same values."""

    reference: str
    candidate: str
    samples: QualitySamples
    """What both were fed."""
    outputs: tuple[ComparedOutput, ...]
    threshold: float | None
    """Largest accepted relative error of an output; None where nothing is asked for."""
    modules: tuple[ComparedModule, ...] | None = None
    """In the order their outputs are computed; None where they were not compared."""
    divergence: int | None = None
    """Position in ``modules`` of the first whose error is its own."""
    tolerance: float = 0.0
    """Relative error of a module that is considered rounding."""
    step: int | None = None
    """Token of a text at which decoders were compared; None: not at one."""
    notes: tuple[str, ...] = ()
    graph_name: str = ""
    """Name of the graph in the file of the candidate; empty where it is no file, or was not read by module."""
    node_tags: Mapping[str, str] = field(default_factory=dict)
    """Tag of each node of the candidate by its name, for tools that show the file."""
    parts: Mapping[str, ModelComparison] = field(default_factory=dict)
    """Of a model of several parts, the comparison of each by its name, in the order they run; ``outputs`` are those of
    all of them then, and ``modules`` are told part by part."""

    @classmethod
    def of_parts(
        cls, reference: str, candidate: str, parts: Mapping[str, ModelComparison], notes: Sequence[str] = ()
    ) -> ModelComparison:
        """Return the one answer for a model of several parts.

        Args:
            reference: What is right, for people.
            candidate: What was compared with it.
            parts: The comparison of each part by its name, in the order they run; at least one.
            notes: Sentences on the whole.
        """
        first = next(iter(parts.values()))
        outputs = (replace(output, part=name) for name, part in parts.items() for output in part.outputs)
        return cls(
            reference=reference,
            candidate=candidate,
            samples=first.samples,
            outputs=tuple(outputs),
            threshold=first.threshold,
            tolerance=first.tolerance,
            notes=tuple(notes),
            parts=dict(parts),
        )

    @property
    def quality(self) -> dict[str, object]:
        """The quality record, the same in every verb."""
        return quality_record(self.samples, [output.fidelity for output in self.outputs])

    @property
    def worst(self) -> ComparedOutput:
        """The output that is farthest off, of those that are judged."""
        judged = {id(output) for output in judged_outputs([output.fidelity for output in self.outputs])}
        outputs = (output for output in self.outputs if id(output.fidelity) in judged)
        return min(outputs, key=lambda output: (not output.fidelity.problem, output.fidelity.sqnr_db))

    @property
    def first_divergence(self) -> ComparedModule | None:
        """The first module whose error is its own; of several parts, that of the first part that has one."""
        if self.parts:
            return next((part.first_divergence for part in self.parts.values() if part.first_divergence), None)
        return self.modules[self.divergence] if self.modules is not None and self.divergence is not None else None

    def modules_within(self, depth: int | None) -> tuple[ComparedModule, ...]:
        """Return the compared modules of the first levels of the tree, and the first to diverge wherever it lies.

        Args:
            depth: Number of levels; None: all.
        """
        modules, first = self.modules or (), self.first_divergence
        if depth is None:
            return modules
        return tuple(module for module in modules if address.depth(module.identity.tag) <= depth or module is first)

    def arising_errors(self) -> dict[str, float]:
        """Return the error that arises in the nodes of each module, by its tag; none does where they are unchanged.

        Modules that were not compared, or whose error is no number, are left out.
        """
        errors: dict[str, float] = {}
        for module in self.modules or ():
            own, tag = module.own_error, module.identity.tag
            if own is not None and math.isfinite(own):
                errors[tag] = max(errors.get(tag, 0.0), 0.0 if module.is_unchanged else own)
        return errors

    @property
    def is_within(self) -> bool:
        """Whether every output is as near as was asked for."""
        return self.threshold is None or all(
            not output.fidelity.problem and output.fidelity.relative_error <= self.threshold for output in self.outputs
        )

    def as_record(self, *, depth: int | None = None) -> dict[str, Any]:
        """Return a JSON-ready record; errors are shares of the reference, SQNR is in decibels.

        Args:
            depth: Levels of the module tree to tell; None: all.
        """
        first = self.first_divergence
        return {
            "schema_version": 1,
            "reference": self.reference,
            "candidate": self.candidate,
            "draws": self.samples.count,
            "input_source": "data set" if self.samples.source == "dataset" else self.samples.source,
            "step": self.step,
            "threshold": self.threshold,
            "is_within": self.is_within,
            "outputs": [output.as_record() for output in self.outputs],
            **({} if self.parts else {"quality": self.quality}),
            "first_divergence": None
            if first is None
            else {**first.identity.as_record(), "metric": "own_error", "value": json_value(first.own_error)},
            "modules": None if self.modules is None else [module.as_record() for module in self.modules_within(depth)],
            **(
                {"parts": {name: part.as_record(depth=depth) for name, part in self.parts.items()}}
                if self.parts
                else {}
            ),
            "notes": list(self.notes),
        }


ModuleStatus = Literal["added", "removed", "changed", "renamed"]
BeforeAfter = tuple[int, int]
"""A number before and after."""


def changed_counts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return what differs between two counts: before and after, the largest change first."""
    difference = Counter(after)
    difference.subtract(before)
    ordered = sorted(difference.items(), key=lambda item: (-abs(item[1]), item[0]))
    return {name: (before.get(name, 0), after.get(name, 0)) for name, change in ordered if change}


@dataclass(frozen=True)
class ComparedFile(Record):
    """One side in numbers."""

    path: Path
    size_bytes: int
    """With its data files."""
    nodes: int
    parameters: int
    weight_bytes: int
    opset: int
    tree_source: str
    """What says which module a node belongs to."""


@dataclass(frozen=True)
class WeightChange(Record):
    """One weight that is not on both sides as it was; its values are not told."""

    name: str
    status: Literal["added", "removed", "changed", "renamed"]
    before: str = field(default="", metadata=entry(null_if_empty=True))
    """Type and shape before: ``float32[384, 384]``; empty where it is new."""
    after: str = field(default="", metadata=entry(null_if_empty=True))
    renamed_from: str = field(default="", metadata=entry(null_if_empty=True))


@dataclass(frozen=True)
class ChangedModule(Record):
    """One module that is not on both sides as it was; nodes and weights of modules below it not included."""

    status: ModuleStatus
    module: str
    """Module path."""
    tag: str
    class_name: str = field(metadata=entry("class", null_if_empty=True))
    nodes: BeforeAfter
    parameters: BeforeAfter
    size_bytes: BeforeAfter
    operators: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Operator → nodes before and after, where they differ."""
    dtypes: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Type of weights → bytes before and after, where they differ."""
    weights: tuple[WeightChange, ...] = field(default=(), metadata=entry(last=True))
    attributes_changed: int = 0
    """Nodes whose operator is as before and whose attributes are not."""
    renamed_from: str = field(default="", metadata=entry(before="nodes", null_if_empty=True))
    """Tag it had before."""

    @property
    @recorded(entry(before="attributes_changed"))
    def fusions(self) -> dict[str, int]:
        """Operators that came while others went → how many more there are."""
        if not any(after < before for before, after in self.operators.values()):
            return {}
        return {name: after - before for name, (before, after) in self.operators.items() if after > before}


@dataclass(frozen=True)
class StructureDiff(Record, schema_version=1):
    """Everything that changed from one file to another."""

    before: ComparedFile
    after: ComparedFile
    operators: Mapping[str, BeforeAfter]
    """Operator → nodes before and after, where they differ; the largest change first."""
    interface: tuple[str, ...]
    """What changed of inputs, outputs and opsets, a sentence each."""
    modules: tuple[ChangedModule, ...]
    """Those that changed, in the order of the file after, removed ones where they stood."""
    same_modules: int
    """Modules that are as they were."""
    is_rewired: bool = False
    """Whether nodes and weights of all modules are as they were and yet the graph is another one."""
    notes: tuple[str, ...] = ()

    @property
    @recorded(entry(before="before"))
    def is_same(self) -> bool:
        """Whether both compute the same with the same weights, as far as the structure tells."""
        return not (self.modules or self.interface or self.is_rewired)
