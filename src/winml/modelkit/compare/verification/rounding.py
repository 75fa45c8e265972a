"""Comparison of a file with PyTorch on inputs for which rounding does not determine the outputs.

If a model chooses between nearly equal values (the best boxes, the expert of a token), rounding decides, and two
correct outputs may differ completely. Such inputs are found with PyTorch alone: results of modules and ranked values
are changed by one unit in the last place, and the outputs are compared. Other inputs then replace them; the tolerance
does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import (
    HALF_UNITS,
    OutputComparison,
    Rounding,
    VerificationInfo,
    compare_outputs,
    find_channel_beyond_rounding,
)
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference, with_values
from winml.modelkit.compare.verification.sizes import Draw, run_draw
from winml.modelkit.compare.words import verification_words
from winml.modelkit.errors import ExportError, VerificationError, opt
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.ort.decoding.inputs import SCORES

_MOVED_RUNS = 4
"""Number of runs with changed results. Measured on RT-DETR, which ranks 1,029 boxes: rounding showed in seven of eight
samples, in six of them in the first two runs, in one in the third."""
MOST_SET_ASIDE = 6
"""Chosen: enough for RT-DETR, on which three samples of eight differ; a larger number would amount to searching for a
passing sample."""
_UNITS_OF_A_KERNEL = 4
"""Maximum difference of kernels with another order of additions, relative to a change by one unit in the last place.
Measured on ResNet-50 with random weights and one thread: one unit changes the output by 0.9e-4 of its largest value,
and the file differs by 1.7e-4."""

_MOST_ADDED_UP = 2
"""Chosen: a graph that is slightly wrong on every sample must not pass by sampling until two samples happen to pass."""

NOISE = 1e-3
"""Noise relative to the largest traced value. Chosen: far above rounding, far below values in use."""
_TIED_SHARE = 0.1
"""Chosen: if ranks decide, any two orders differ by about the same amount."""


def _no_file_hint() -> str:
    return f"No file was written; {opt.no_verify} writes it anyway."


def _wrong_graph_hint() -> str:
    return (
        "The graph differs from the model. Often forward branches on tensor values (if, .item(), numpy), and a trace "
        f"records one branch. {_no_file_hint()}"
    )


def compare_stable_draws(
    prepared: PreparedPart,
    draws: Sequence[Draw],
    *,
    rounding: Rounding,
    draw_inputs: Callable[[int, Draw], Mapping[str, torch.Tensor]],
    run_file: Callable[[Draw], Arrays],
) -> VerificationInfo:
    """Compare samples, excluding samples on which rounding changes PyTorch's outputs as much as the file's differ.

    Args:
        prepared: The part.
        draws: Samples with reference outputs, at the traced sizes.
        rounding: Rounding errors to accept.
        draw_inputs: (number, replaced sample) → further inputs.
        run_file: Runs the file.

    Returns:
        The comparison of as many samples as passed, and the excluded samples.

    Raises:
        VerificationError: there is no signal, a sample differs that rounding does not affect, or too many samples are
            excluded.
    """
    draws, aside = list(draws), dict[int, OutputComparison]()
    outputs = list(map(run_file, draws))
    while True:
        info = _compare_remaining_draws(draws, outputs, aside, rounding)
        failed = sorted({comparison.draw for comparison in info.comparisons if not comparison.is_equal})
        if not failed and info.has_signal:
            return replace(info, set_aside=tuple(aside.values()))
        with with_values(prepared) as weighted:
            if not info.has_signal:
                raise _explain_failure(info, weighted, draws)
            for number in failed:
                moved = _perturbed_outputs(weighted, draws[number - 1], rounding)
                differing = tuple(entry for entry in info.comparisons if entry.draw == number and not entry.is_equal)
                added_up = sum(entry.is_equal for entry in aside.values()) >= _MOST_ADDED_UP
                if not all(_is_rounding(entry, moved, decides=added_up) for entry in differing):
                    raise _explain_failure(replace(info, comparisons=differing), weighted, draws)
                uncertain = [moved[entry.name] for entry in differing]
                aside[number] = replace(max(uncertain, key=lambda entry: entry.relative_diff), draw=number)
            if len(aside) > MOST_SET_ASIDE:
                raise _uncertain_error(list(aside.values()))
            new_draws = []
            for number, replaced in enumerate(failed, start=len(draws) + 1):
                tensors = draw_inputs(number, draws[replaced - 1])
                new_draws.append(run_draw(weighted, Draw(tensors, {}, draws[0].sizes)))
        draws += new_draws
        outputs += map(run_file, new_draws)


def _explain_failure(
    verification: VerificationInfo, prepared: PreparedPart, draws: Sequence[Draw]
) -> VerificationError:
    """Create the error of a failed comparison, with its likely cause; runs PyTorch again on the first sample.

    The causes, in this order: PyTorch differs between two runs, damaged weights, outputs without a signal, padding, a
    wrong graph.

    Args:
        verification: The comparison.
        prepared: The part, with weights.
        draws: The compared samples.
    """
    first = draws[0]
    repeated = compare_outputs([first.reference], [run_reference(prepared, first.inputs)])
    if not all(comparison.is_equal for comparison in repeated.comparisons):
        return VerificationError(
            f"cannot verify: output {repeated.worst.name!r} of PyTorch differs between two runs on the same inputs",
            hint="Make the model deterministic (seed its random numbers, store no state between calls), or skip the "
            f"comparison with {opt.no_verify}.",
        )
    text = verification_words(verification)
    if place := _find_bad_parameter(prepared.model):
        return VerificationError(
            f"{text}; {place}",
            hint=f"The weights are damaged, or training diverged: download them again. {opt.no_verify} writes the "
            "file.",
        )
    if not verification.has_signal and all(entry.is_equal for entry in verification.comparisons):
        error = VerificationError(
            text,
            hint=f"Use real weights or other inputs ({opt.input_specs}), or skip the comparison with {opt.no_verify}.",
        )
        error.unchecked = verification
        return error
    failed = draws[verification.worst.draw - 1]
    # Samples are compared in order: the first was equal or had no signal.
    hint = _wrong_graph_hint()
    if first.has_padding != failed.has_padding:
        here, there = ("with", "without") if failed.has_padding else ("without", "with")
        hint = (
            f"It fails {here} padding: the model takes a different branch there than {there} padding, and a graph has "
            f"one branch only. {_no_file_hint()}"
        )
    return VerificationError(text, hint=hint, is_graph_wrong=True, inputs=failed.inputs)


def _find_bad_parameter(model: nn.Module) -> str:
    """Describe the first parameter with NaN or infinity; empty if all are finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            kind = "NaN" if torch.isnan(parameter).any() else "infinity"
            return f"parameter {name!r} contains {kind}"
    return ""


def _compare_remaining_draws(
    draws: Sequence[Draw], outputs: Sequence[Arrays], aside: Mapping[int, object], rounding: Rounding
) -> VerificationInfo:
    """Compare the samples that were not excluded; each keeps its number."""
    numbers = [number for number in range(1, len(draws) + 1) if number not in aside]
    references = [draws[number - 1].reference for number in numbers]
    info = compare_outputs(references, [outputs[number - 1] for number in numbers], rounding=rounding)
    return replace(info, comparisons=tuple(replace(entry, draw=numbers[entry.draw - 1]) for entry in info.comparisons))


def is_decided_by_rounding(prepared: PreparedPart, draw: Draw, outputs: Collection[str], rounding: Rounding) -> bool:
    """Return True if a change by one unit in the last place, of inputs or module results, changes these outputs.

    Args:
        prepared: The part.
        draw: A sample with reference outputs.
        outputs: Names of outputs.
        rounding: Rounding errors to accept.
    """
    with with_values(prepared) as weighted:
        moved = {name for name, entry in _perturbed_outputs(weighted, draw, rounding).items() if not entry.is_equal}
        for seed in range(1, _MOVED_RUNS + 1):
            # Equal values are ranked in arbitrary order.
            tensors = {
                name: _perturb(value, torch.Generator().manual_seed(seed)) for name, value in draw.inputs.items()
            }
            output = run_reference(weighted, tensors)
            comparisons = compare_outputs([draw.reference], [output], rounding=rounding).comparisons
            moved |= {entry.name for entry in comparisons if not entry.is_equal and not entry.problem}
        return set(outputs) <= moved


def accept_half_precision(
    prepared: PreparedPart, draw: Draw, outputs: Arrays, comparisons: Sequence[OutputComparison]
) -> tuple[OutputComparison, ...]:
    """Judge differences of a computation in 16 bits by the rounding error of PyTorch, which runs in float32, too.

    An output is accepted if it is at most :data:`_UNITS_OF_HALF` times as far from PyTorch in float32 as PyTorch in 16
    bits is, and each of its channels is as near. A wrong graph, such as one with a frozen size, is far from both.

    Args:
        prepared: The part, with parameters in 16 bits.
        draw: A sample with reference outputs of PyTorch in 16 bits.
        outputs: Outputs of the file.
        comparisons: Comparison of the outputs with the reference outputs.
    """
    try:
        with with_values(prepared) as weighted, _widened_to_float32(weighted.model):
            inputs = {name: value.float() if value.dtype in _HALVES else value for name, value in draw.inputs.items()}
            exact = run_reference(weighted, inputs)
    except ExportError:
        return tuple(comparisons)  # a forward for one dtype only
    accepted = []
    for entry in comparisons:
        name = entry.name
        spread = _largest_distance(draw.reference[name], exact[name])
        distance = _largest_distance(outputs[name], exact[name])
        unit = HALF_UNITS.get(entry.computed_in or entry.dtype)
        arrays = (draw.reference[name], outputs[name], exact[name])
        problem = "" if unit is None or entry.problem else find_channel_beyond_rounding(*arrays, unit)
        if problem:
            accepted.append(replace(entry, is_equal=False, problem=problem))
            continue
        is_rounding = not entry.is_equal and not entry.problem and distance <= _UNITS_OF_HALF * spread < math.inf
        limit = (1 + _UNITS_OF_HALF) * spread / entry.scale if is_rounding else entry.threshold
        accepted.append(replace(entry, is_equal=True, threshold=limit) if is_rounding else entry)
    return tuple(accepted)


def accept_rounding(
    prepared: PreparedPart, draw: Draw, comparisons: Sequence[OutputComparison], rounding: Rounding
) -> tuple[OutputComparison, ...]:
    """Accept differences that are hardly larger than those that one unit in the last place makes in PyTorch.

    Of a thousand tokens, rounding sends one to another expert. An output is accepted up to
    :data:`_UNITS_OF_A_KERNEL` times such a change. A wrong graph differs by more, or in shape or single channels.

    Args:
        prepared: The part.
        draw: A sample with reference outputs.
        comparisons: Comparison of the file's outputs with the reference outputs.
        rounding: Rounding errors to accept.
    """
    if any(entry.problem or not np.isfinite(entry.relative_diff) for entry in comparisons):
        return tuple(comparisons)
    with with_values(prepared) as weighted:
        moved = _perturbed_outputs(weighted, draw, rounding)
    limits = {name: _UNITS_OF_A_KERNEL * change.relative_diff for name, change in moved.items() if not change.is_equal}
    return tuple(
        replace(entry, is_equal=True, threshold=limits[entry.name])
        if not entry.is_equal and entry.relative_diff <= limits.get(entry.name, 0.0)
        else entry
        for entry in comparisons
    )


_HALVES = (torch.float16, torch.bfloat16)
_UNITS_OF_HALF = 2
"""Chosen: kernels that round in another order are about as far from float32."""


@contextmanager
def _widened_to_float32(model: nn.Module) -> Iterator[None]:
    """Convert 16-bit parameters and buffers to float32 for the time of the block."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _HALVES]
    narrow = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data


def has_uncertain_scores(prepared: PreparedPart, draw: Draw, rounding: Rounding) -> bool:
    """Return True if rounding alone determines PyTorch's scores for the inputs of a sample."""
    with with_values(prepared) as weighted:
        return is_decided_by_rounding(weighted, run_draw(weighted, draw), [SCORES], rounding)


def is_decided_by_ties(
    prepared: PreparedPart, tied: Draw, traced: Draw, outputs: Collection[str], output: Arrays
) -> bool:
    """Return True if the order of equal values explains the difference from PyTorch on equal inputs.

    Outputs for two sets of inputs that are equal except for noise then differ by a similar amount.

    Args:
        prepared: The part.
        tied: A sample of equal inputs, with reference outputs.
        traced: The traced sample, which sets the scale of the noise.
        outputs: Names of the outputs that differ.
        output: The compared outputs.
    """
    noisy = []
    with with_values(prepared) as weighted:
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            tensors = {name: _add_noise(value, traced.inputs[name], generator) for name, value in tied.inputs.items()}
            try:
                noisy.append(run_reference(weighted, tensors))
            except ExportError:
                return False
    return all(
        _largest_distance(noisy[0][name], noisy[1][name])
        >= _TIED_SHARE * _largest_distance(tied.reference[name], output[name])
        for name in outputs
    )


@dataclass(frozen=True)
class Ranking:
    """Values that PyTorch ranked along an axis, and their indices. Equal values may have any order."""

    values: torch.Tensor
    axis: int
    places: torch.Tensor
    """Indices with as many axes as the values."""

    def leads_alike(self, expected: Array, actual: Array) -> bool:
        """Return True if PyTorch's output contains these indices, and the other output indices of equal values.

        Args:
            expected: Integers of PyTorch's output.
            actual: Integers of the other output, of the same shape.
        """
        places = to_numpy(self.places)
        if places.size != expected.size or not np.array_equal(places.reshape(expected.shape), expected):
            return False
        indices = actual.reshape(places.shape)
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= self.values.shape[self.axis]:
            return False
        ordered = np.sort(indices, axis=self.axis)
        if (np.diff(ordered, axis=self.axis) == 0).any():
            return False
        values = to_numpy(self.values)
        x, y = (np.take_along_axis(values, item, self.axis) for item in (places, indices))
        return np.array_equal(x, y)


def rankings(prepared: PreparedPart, inputs: Mapping[str, torch.Tensor]) -> tuple[Ranking, ...]:
    """Record the values that PyTorch ranks while a part runs.

    Args:
        prepared: The part, with weights.
        inputs: Its inputs.
    """
    mode = _Rankings()
    with mode:
        run_reference(prepared, inputs)
    return tuple(mode.found)


class _Rankings(TorchFunctionMode):
    """Records ranked values with their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Ranking] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record ranked values."""
        result = func(*args, **(kwargs or {}))
        values = args[0] if args else (kwargs or {}).get("input")
        if getattr(func, "__name__", "") in _RANKING and isinstance(values, torch.Tensor) and values.dim():
            places = getattr(result, "indices", result)
            if isinstance(places, torch.Tensor) and places.dtype == torch.int64:
                self._record_ranking(values.detach().clone(), places.detach().clone())
        return result

    def _record_ranking(self, values: torch.Tensor, places: torch.Tensor) -> None:
        """Record indices along each axis that they may refer to."""
        for axis in range(values.dim()):
            sizes = [size for dim, size in enumerate(values.shape) if dim != axis]
            along = places if places.dim() == values.dim() else None
            if along is None and places.numel() == math.prod(sizes):
                along = places.reshape([1 if dim == axis else size for dim, size in enumerate(values.shape)])
            if along is not None and [size for dim, size in enumerate(along.shape) if dim != axis] == sizes:
                self.found.append(Ranking(values, axis, along))


_RANKING = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "mode"})
"""Specified by torch: functions that return indices by rank."""


def _add_noise(value: torch.Tensor, traced: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Add noise of the traced scale to floats that differ from the traced ones; other values are unchanged."""
    if not value.is_floating_point() or torch.equal(value, traced):
        return value
    return value + NOISE * traced.abs().max() * torch.randn(value.shape, generator=generator).to(value)


def _largest_distance(a: Array, b: Array) -> float:
    """Largest absolute difference of the values that are finite in both arrays; infinity for different shapes."""
    if a.shape != b.shape:
        return math.inf
    x, y = a.astype(np.float64), b.astype(np.float64)
    is_finite = np.isfinite(x) & np.isfinite(y)
    return float(np.abs(x[is_finite] - y[is_finite]).max(initial=0.0))


def _is_rounding(different: OutputComparison, moved: Mapping[str, OutputComparison], *, decides: bool) -> bool:
    """Return True if rounding explains a difference: it determines the output, or accumulates to the difference.

    Args:
        different: Difference of the output.
        moved: Output → change by one unit in the last place.
        decides: Accept only outputs that rounding determines.
    """
    change = moved.get(different.name)
    if change is None or not np.isfinite(different.relative_diff):
        return False
    if different.problem:
        # Single channel: explained by rounding if rounding changes a channel as much relative to the others.
        return not change.is_equal
    adds_up = different.relative_diff <= _UNITS_OF_A_KERNEL * change.relative_diff
    return not change.is_equal or (adds_up and not decides)


def _perturbed_outputs(prepared: PreparedPart, draw: Draw, rounding: Rounding) -> dict[str, OutputComparison]:
    """Run PyTorch with results of modules moved by one unit in the last place; return output → largest change.

    ``{}`` if PyTorch is not deterministic without changes: then rounding is not the cause.
    """
    largest: dict[str, OutputComparison] = {}
    for seed in range(_MOVED_RUNS + 1):
        with _perturb_results(prepared.model, seed):
            moved = run_reference(prepared, draw.inputs)
        comparisons = compare_outputs([draw.reference], [moved], rounding=rounding).comparisons
        if seed == 0 and not all(diff.is_equal for diff in comparisons):
            return {}
        for diff in comparisons:
            prior = largest.get(diff.name)
            if prior is None or (prior.is_equal, -prior.relative_diff) > (diff.is_equal, -diff.relative_diff):
                largest[diff.name] = diff
    return largest


@contextmanager
def _perturb_results(model: nn.Module, seed: int) -> Iterator[None]:
    """Change results of modules without children, and ranked values, by one unit in the last place; not for seed 0."""
    generator = torch.Generator().manual_seed(seed)

    def hook(_module: nn.Module, _inputs: object, result: object) -> Any:
        return pytree.tree_map(lambda value: _perturb(value, generator), result)

    leaves = [module for module in model.modules() if seed and next(module.children(), None) is None]
    handles = [module.register_forward_hook(hook) for module in leaves]
    try:
        with _MovedRanks(generator) if seed else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _MovedRanks(TorchFunctionMode):
    """Changes values before ranking: no module returns results rounded by a function, such as a softmax (for: Zaya)."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with changed values if it ranks them."""
        if args and getattr(func, "__name__", "") in _RANKING:
            args = (_perturb(args[0], self._generator), *args[1:])
        return func(*args, **(kwargs or {}))


def _perturb(value: object, generator: torch.Generator) -> Any:
    """Change floats by one unit in the last place, up or down; other values are unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    directions = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    return value * (1 + directions.to(value) * torch.finfo(value.dtype).eps)


def _uncertain_error(aside: Sequence[OutputComparison]) -> VerificationError:
    """Create the error for a model whose outputs rounding determines on too many samples."""
    worst = aside[-1]
    return VerificationError(
        f"cannot verify: on {len(aside)} random inputs, rounding alone determines the outputs of PyTorch: "
        f"{worst.name!r} changes (relative difference {worst.relative_diff:.1e}) if the result of each module changes "
        "by one unit in the last place",
        hint="Often a choice between nearly equal values, such as the best of many boxes or the expert of a token. Try "
        f"real weights or another {opt.seed}; {opt.no_verify} writes the file without comparing.",
    )
