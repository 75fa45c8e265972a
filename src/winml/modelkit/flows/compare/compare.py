"""Runs two models on the same values, compares their answers, and finds the module where they part.

Inner values are recorded in groups, so that memory holds both models and one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.compare.divergence import ModuleErrors, first_divergence, own_error
from winml.modelkit.compare.fidelity import OutputFidelity, answer_fidelity, value_fidelity
from winml.modelkit.errors import UsageError
from winml.modelkit.flows.compare.onnx_side import OnnxSide
from winml.modelkit.flows.compare.value_matching import MatchedBoundary, match_files, match_with_torch
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.results.model_comparison import ComparedModule, ComparedOutput, ModelComparison
from winml.modelkit.runtime.graph_inputs import graph_inputs
from winml.modelkit.runtime.opened_model import RunOptions, Values, values_for

__all__ = ["CompareOptions", "Side", "compare_models"]

Array = NDArray[Any]

GROUP_BYTES = 256_000_000
"""Values recorded at a time. Chosen: small beside a model, large enough that few groups are needed."""
FIRST_GROUP = 16
"""Values recorded in the first group, whose size nobody knows yet."""
TOLERANCE = 1e-3
"""Relative error of a module that counts as rounding, where nothing else is asked for. Chosen: ten times the tolerance
of float32 outputs, since inner values may be small differences of large ones."""


@dataclass(frozen=True)
class CompareOptions:
    """How two models are compared."""

    run: RunOptions
    """What both are fed."""
    by_module: bool = False
    threshold: float | None = None
    """Largest accepted relative error of an output."""
    tolerance: float = TOLERANCE
    """Relative error of a module that counts as rounding."""
    draws: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the reference → name in the candidate, of inputs and outputs that are called otherwise there."""


class Side(Protocol):
    """One of the two models."""

    @property
    def shown(self) -> str:
        """The side, for people."""

    def outputs(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, and return what it answers."""

    def values(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return inner values by name."""


def compare_models(reference: Path | ModelRequest, candidate: Path, options: CompareOptions) -> ModelComparison:
    """Run two models on the same values, and compare their answers; with ``by_module`` module by module.

    Args:
        reference: An ONNX file, or a PyTorch model: what is right.
        candidate: An ONNX file.
        options: What both are fed, and what is compared.

    Raises:
        UsageError: inputs or outputs do not match, or values do not fit.
        InputError: a file is damaged.
        StageError: one of them cannot be run.
    """
    file = OnnxSide(candidate, by_module=options.by_module)
    matched: list[Any] = []
    if isinstance(reference, Path):
        other = OnnxSide(reference, by_module=options.by_module)
        matched = match_files(other, file) if options.by_module else []
        other.session([name for item in matched for name, _ in item.taps])
    taps = [name for item in matched for _, name in item.taps]
    if options.by_module and not isinstance(reference, Path):
        taps = [name for boundary in file.boundaries.values() for name in (*boundary.inputs, *boundary.outputs)]
    session = file.session(list(dict.fromkeys(taps)))
    opened: Any
    if isinstance(reference, Path):
        opened = nullcontext(other)
    else:
        from winml.modelkit.flows.compare.torch_side import opened_torch_side

        opened = opened_torch_side(reference, lambda name: options.names.get(name, name) in session.inputs)
    draws = _draws(session, options)
    with opened as side:
        if isinstance(side, OnnxSide):
            _refuse_other_inputs(side, file, options)
        elif options.by_module:
            matched = match_with_torch(side.value_counts(draws[0].feeds), file)
        comparison = _Comparison(side, file, [draw.feeds for draw in draws], options)
        result = comparison.whole(draws[0])
        if options.by_module:
            result = comparison.by_module(result, matched)
    return replace(result, notes=(*result.notes, *_tree_notes(file, options)))


def _draws(session: Any, options: CompareOptions) -> list[Values]:
    count = 1 if options.run.input_data is not None else options.draws
    return [values_for(session, replace(options.run, seed=options.run.seed + number)) for number in range(count)]


def _refuse_other_inputs(reference: OnnxSide, candidate: OnnxSide, options: CompareOptions) -> None:
    theirs = [options.names.get(name, name) for name in reference.session().inputs]
    ours = list(candidate.session().inputs)
    if set(theirs) != set(ours):
        raise UsageError(
            f"{reference.shown} takes {', '.join(reference.session().inputs)}, {candidate.shown} {', '.join(ours)}",
            hint="Say which is which with --map reference=candidate; inputs of one side only cannot be compared.",
        )


def _tree_notes(file: OnnxSide, options: CompareOptions) -> tuple[str, ...]:
    if not options.by_module or file.tree_source == "winml tags":
        return ()
    return (f"The nodes of {file.shown} bear no tags, so nothing can be said of its modules; see winml retag.",)


@dataclass(frozen=True)
class _Comparison:
    """Two sides and what they are fed; feeds have the names of the candidate."""

    reference: Side
    candidate: OnnxSide
    draws: Sequence[Mapping[str, Array]]
    options: CompareOptions

    def whole(self, values: Values) -> ModelComparison:
        """Compare what both answer."""
        expected = [self.reference.outputs(self._reference_feeds(feeds)) for feeds in self.draws]
        answers = [self.candidate.outputs(feeds) for feeds in self.draws]
        names = {name: self.options.names.get(name, name) for name in expected[0]}
        common = {name: other for name, other in names.items() if other in answers[0]}
        if not common:
            raise UsageError(
                f"no output is on both sides: {self.reference.shown} answers {', '.join(expected[0])}, "
                f"{self.candidate.shown} {', '.join(answers[0])}",
                hint="Say which is which with --map reference=candidate.",
            )
        missing = [*(name for name in names if name not in common), *(set(answers[0]) - set(common.values()))]
        outputs = tuple(
            _compared_output(name, [draw[name] for draw in expected], [draw[other] for draw in answers])
            for name, other in common.items()
        )
        notes = (f"Outputs of one side only: {', '.join(missing)}.",) if missing else ()
        return ModelComparison(
            reference=self.reference.shown,
            candidate=self.candidate.shown,
            draws=len(self.draws),
            input_source="random" if values.file is None else "file",
            outputs=outputs,
            threshold=self.options.threshold,
            tolerance=self.options.tolerance,
            notes=(*values.notes, *notes),
        )

    def by_module(self, whole: ModelComparison, matched: Sequence[MatchedBoundary]) -> ModelComparison:
        """Return the comparison with that of every module."""
        measured = self._measure([names for item in matched if not item.is_root for names in item.taps])
        modules: list[ComparedModule] = []
        compared: list[tuple[int, ModuleErrors]] = []
        for item in matched:
            if item.is_root:
                outputs, errors = [whole.worst.fidelity], [0.0]
            else:
                outputs = [measured[names] for names in item.outputs if _is_comparable(measured.get(names))]
                errors = [_error_of(measured[names]) for names in item.inputs if _is_comparable(measured.get(names))]
            if not outputs:
                reason = item.reason or "what it returns has other shapes, or is no floating-point number"
                modules.append(ComparedModule(item.identity, None, reason=reason))
                continue
            worst = max(outputs, key=_error_of)
            is_known = item.is_root or len(errors) == len(item.inputs) + item.unknown_inputs
            found = ModuleErrors(max(errors, default=0.0) if is_known else None, _error_of(worst))
            compared.append((len(modules), found))
            modules.append(ComparedModule(item.identity, worst, found.inputs, own_error(found)))
        is_rounded = self.candidate.is_rounded
        first = first_divergence([found for _, found in compared], self.options.tolerance, is_rounded=is_rounded)
        return replace(whole, modules=tuple(modules), divergence=None if first is None else compared[first][0])

    def _measure(self, taps: Sequence[tuple[str, str]]) -> dict[tuple[str, str], OutputFidelity]:
        """Return how near each value is, recording groups of them on both sides."""
        measured: dict[tuple[str, str], OutputFidelity] = {}
        waiting, size = list(dict.fromkeys(taps)), FIRST_GROUP
        while waiting:
            group, waiting = waiting[:size], waiting[size:]
            recorded = list(self._record(group))
            for names in group:
                pairs = [(left[names[0]], right[names[1]]) for left, right in recorded if names[0] in left]
                if pairs and pairs[0][0].dtype.kind == "f":
                    measured[names] = value_fidelity(names[1], *map(list, zip(*pairs, strict=True)))
            held = sum(array.nbytes for left, right in recorded for array in (*left.values(), *right.values()))
            size = max(1, int(len(group) * GROUP_BYTES / max(held, 1)))
        return measured

    def _record(self, group: Sequence[tuple[str, str]]) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        for feeds in self.draws:
            yield (
                self.reference.values(self._reference_feeds(feeds), list(dict.fromkeys(name for name, _ in group))),
                self.candidate.values(feeds, list(dict.fromkeys(name for _, name in group))),
            )

    def _reference_feeds(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values under the names and in the types of the reference."""
        original = {other: name for name, other in self.options.names.items()}
        named = {original.get(name, name): array for name, array in feeds.items()}
        if not isinstance(self.reference, OnnxSide):
            return named
        dtypes = {item.name: item.dtype for item in graph_inputs(self.reference.session())}
        return {
            name: array.astype(dtypes[name]) if str(array.dtype) != dtypes[name] and array.dtype.kind == "f" else array
            for name, array in named.items()
        }


def _is_comparable(fidelity: OutputFidelity | None) -> bool:
    """Say whether a value was measured on both sides, and means the same there; another shape is another value."""
    return fidelity is not None and not fidelity.problem.startswith("shape")


def _error_of(fidelity: OutputFidelity) -> float:
    return math.inf if fidelity.problem else fidelity.relative_error


def _compared_output(name: str, expected: Sequence[Array], answers: Sequence[Array]) -> ComparedOutput:
    fidelity = answer_fidelity(name, expected, answers)
    is_scores = "logits" in name and expected[0].ndim >= 2 and expected[0].shape[-1] > 1
    if fidelity.problem or not is_scores:
        return ComparedOutput(fidelity)
    agreeing = [np.mean(left.argmax(-1) == right.argmax(-1)) for left, right in zip(expected, answers, strict=True)]
    return ComparedOutput(fidelity, float(np.mean(agreeing)))
