"""Generation of the inputs of the trace and the comparison: example inputs first, then seeded random values.

Valid values are not always known in advance. Inputs that the model refuses, or for which it returns NaN, are therefore
drawn by other rules: inverted masks, rows of integers as lengths, floats in the traced range, or traced values. Learned
rules apply to all later samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.verification.sizes import Draw
from winml.modelkit.errors import ExportError, opt
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_torch
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import FeedRules, hiding_value, is_mask, make_feeds

Tensors = Mapping[str, torch.Tensor]

_MOST_MASKS = 3
"""Chosen: with more masks, only all of them are inverted together; otherwise also each alone."""
_MOST_AXES = 3
"""Chosen: rows are counted along one of the first axes after the batch, or the last."""


@dataclass(frozen=True)
class _Learned:
    """Learned rules of valid inputs."""

    rules: FeedRules = field(default_factory=FeedRules)
    as_traced: frozenset[str] = frozenset()
    """Floats that are drawn between the smallest and the largest traced value."""
    kept: frozenset[str] = frozenset()
    """Inputs that keep their traced values."""


@dataclass
class InputDraws:
    """Random inputs of one part, and their learned rules."""

    part: ModelPart
    seed: int
    traced: Tensors | None = None
    """The traced inputs, once known."""
    notes: list[str] = field(default_factory=list)
    """Learned rules, one sentence each."""
    learned: _Learned = field(default_factory=_Learned)

    def draw(
        self, number: int, sizes: Mapping[str, int] | None = None, *, with_padding: bool = True
    ) -> dict[str, torch.Tensor]:
        """Create one sample of inputs, on the device of the model.

        Args:
            number: Number of the sample, from 1; the first is the user's example if any.
            sizes: Size of every dynamic dimension; ``None``: as traced.
            with_padding: Let random masks hide positions.

        Raises:
            UsageError: an input has no size, or its range holds no value of its type.
        """
        part = self.part
        if self.is_example(number):
            tensors = dict(part.example or {})
        else:
            feeds = make_feeds(
                [self._drawn_spec(spec) for spec in part.inputs],
                seed=self.seed + number,
                sizes=sizes or part.trace_sizes,
                with_padding=with_padding,
                rules=self.learned.rules,
            )
            tensors = {name: to_torch(value) for name, value in feeds.items()}
        for name in self.learned.kept:
            if self.traced is not None and self.traced[name].shape == tensors[name].shape:
                tensors[name] = self.traced[name]
        device = next((parameter.device for parameter in part.model.parameters()), torch.device("cpu"))
        return {spec.name: tensors[spec.name].to(device) for spec in part.inputs}

    def is_example(self, number: int) -> bool:
        """Return True if this sample is the user's example."""
        return number == 1 and self.part.example is not None

    def hides(self, inputs: Tensors) -> bool:
        """Return True if a mask among these inputs hides a position."""
        rules = self.learned.rules
        masks = [spec for spec in self.part.inputs if is_mask(spec, rules)]
        return any(bool((inputs[spec.name] == hiding_value(spec, rules)).any()) for spec in masks)

    def accepted(self, make: Callable[[InputDraws], Tensors], run: Callable[[Tensors], Draw]) -> Draw:
        """Create a sample that the model accepts without returning NaN, changing the rules if necessary.

        Args:
            make: Creates inputs by the learned rules.
            run: Runs the model; raises ExportError if the model refuses the inputs.

        Raises:
            ExportError: the model refuses inputs of all rules.
        """
        tensors = make(self)
        refusal, first_draw = None, None
        try:
            first_draw = run(tensors)
        except ExportError as error:
            refusal = error
        else:
            if not holds_nan(first_draw.reference):
                return first_draw
        for learned in self._untried_rules(tensors, refusal):
            candidate = replace(self, learned=learned)
            other_tensors = make(candidate)
            if _are_equal(tensors, other_tensors):
                continue
            try:
                draw = run(other_tensors)
            except ExportError:
                continue
            if not holds_nan(draw.reference):
                self._learn_rules(learned, refusal)
                return draw
        if first_draw is not None:
            return first_draw
        assert refusal is not None  # there is an output or a refusal
        raise self._drawn_refusal(refusal, tensors)

    def other_masks(self, make: Callable[[InputDraws], Tensors]) -> Iterator[tuple[Tensors, Callable[[], None]]]:
        """Yield (inputs with some masks inverted, function that makes this rule permanent).

        For files that return NaN for a sample without NaN in PyTorch.
        """
        rules = self.learned.rules
        for turned in self._inverted_masks():
            learned = replace(self.learned, rules=replace(rules, masks={**rules.masks, **turned}))
            yield make(replace(self, learned=learned)), partial(self._learn_rules, learned, None, "the file")

    def _drawn_spec(self, spec: InputTensorSpec) -> InputTensorSpec:
        """Restrict the range of a specification to the traced values if learned."""
        if self.traced is None or spec.name not in self.learned.as_traced:
            return spec
        values = self.traced[spec.name].double()
        return spec.model_copy(update={"value_range": (float(values.min()), float(values.max()))})

    def _untried_rules(self, tensors: Tensors, refusal: ExportError | None) -> Iterator[_Learned]:
        """Yield untried rules, those with the fewest traced values first."""
        traced = self.traced
        is_traced_size = traced is None or all(traced[name].shape == value.shape for name, value in tensors.items())
        masks = list(self._inverted_masks()) if is_traced_size or refusal is None else []
        lengths = list(self._length_axes(tensors)) if is_traced_size or refusal is not None else []
        rules = self.learned.rules
        for turned, axes in itertools.product([{}, *masks], [{}, *lengths]):
            if turned or axes:
                both = FeedRules({**rules.masks, **turned}, {**rules.length_axes, **axes})
                yield replace(self.learned, rules=both)
        if traced is None or not is_traced_size:
            return
        floats = frozenset(name for name, value in traced.items() if value.is_floating_point())
        integers = [name for name in traced if name not in floats]
        ways = [frozenset({name}) for name in integers] + ([frozenset(integers)] if len(integers) > 1 else [])
        yield replace(self.learned, as_traced=floats)
        for names in ways:
            yield replace(self.learned, kept=self.learned.kept | names)
        for names in ways:
            yield replace(self.learned, kept=self.learned.kept | names, as_traced=floats)

    def _inverted_masks(self) -> Iterator[dict[str, int]]:
        """Yield masks with the opposite hiding value, the largest combinations first."""
        rules = self.learned.rules
        turned = {
            # Boolean inputs not named as a mask are random flags at first.
            spec.name: 1 - hiding_value(spec)
            for spec in self.part.inputs
            if spec.name not in rules.masks and (is_mask(spec) or spec.dtype == "bool") and spec.shape
        }
        counts = range(len(turned), 0, -1) if len(turned) <= _MOST_MASKS else [len(turned)]
        for count in counts:
            for names in itertools.combinations(turned, count):
                yield {name: turned[name] for name in names}

    def _length_axes(self, tensors: Tensors) -> Iterator[dict[str, int]]:
        """Yield, for each candidate axis, 1-D integer input → axis: they may count the row lengths of other inputs."""
        names = [
            name
            for name, value in tensors.items()
            if value.dim() == 1 and not value.is_floating_point() and value.dtype != torch.bool
        ]
        rows = {tensors[name].shape[0] for name in names}
        sizes = [value.shape for value in tensors.values() if value.dim() > 1 and value.shape[0] in rows]
        axes = range(1, max((len(shape) for shape in sizes), default=1))
        for axis in list(axes)[:_MOST_AXES]:
            yield dict.fromkeys(names, axis)

    def _learn_rules(self, learned: _Learned, refusal: ExportError | None, who: str = "PyTorch") -> None:
        """Make the rules permanent for further samples, with a note.

        Args:
            learned: The rules.
            refusal: Error of PyTorch without the rules; `None`: the outputs were NaN.
            who: Source of the NaN, for the note.
        """
        before, self.learned = self.learned, learned
        why = (
            f"{who} returns NaN for others"
            if refusal is None
            else f"PyTorch rejects others ({_refusal_cause(refusal)})"
        )
        for name in learned.rules.masks.keys() - before.rules.masks.keys():
            hiding = "ones" if learned.rules.masks[name] else "zeros"
            self.notes.append(f"Input {name} is drawn as a mask in which {hiding} hide tokens: {why}.")
        for name in learned.rules.length_axes.keys() - before.rules.length_axes.keys():
            axis = learned.rules.length_axes[name]
            self.notes.append(f"Input {name} is drawn as lengths along axis {axis}, the first row in full: {why}.")
        for name in sorted(learned.as_traced - before.as_traced):
            self.notes.append(f"Input {name} is drawn between its smallest and largest traced value: {why}.")
        for name in sorted(learned.kept - before.kept):
            self.notes.append(f"Input {name} has its traced values in every random input: {why}.")

    def _drawn_refusal(self, refusal: ExportError, tensors: Tensors) -> ExportError:
        """Explain a refusal of automatically chosen values; a refusal of the user's values is unchanged."""
        if self.is_example(1) and self.traced is None:
            return refusal
        integers = [name for name, value in tensors.items() if not value.is_floating_point()]
        advice = f", above all for {' and '.join(integers)}" if integers else ""
        notes = "\n".join(line for line in refusal.hint.splitlines() if line.startswith("Note: "))
        refusal.message = f"{refusal.message} (random values, chosen by winml)"
        refusal.hint = (
            f"Shapes and values were chosen automatically. Specify valid values{advice}: value_range in "
            f"{opt.input_specs}, or example values (example_inputs() beside a factory, inputs= in Python). For shapes: "
            f"{opt.shape_config}.\n{notes}"
        ).rstrip()
        return refusal


def holds_nan(outputs: Arrays) -> bool:
    """Return True if an output contains NaN."""
    return any(bool(np.isnan(value).any()) for value in outputs.values() if value.dtype.kind not in "biu")


def _are_equal(a: Tensors, b: Tensors) -> bool:
    return all(value.shape == b[name].shape and torch.equal(value, b[name]) for name, value in a.items())


def _refusal_cause(refusal: ExportError) -> str:
    """Error message of PyTorch without the inputs."""
    cause = refusal.__cause__
    text = f"{type(cause).__name__}: {cause}" if cause is not None else refusal.message
    return text.strip().splitlines()[0][:120]
