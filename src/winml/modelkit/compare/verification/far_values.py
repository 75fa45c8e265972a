"""Compares a file with PyTorch on floats far from 0, where an operator may overflow or lose its digits.

Random floats reach 4 or so. An operator whose ONNX form is right there only, such as the logarithm of a sigmoid, is
found by one more sample of larger values, if the graph has such operators. What PyTorch itself answers with NaN or
infinity is not compared, nor is a model that makes integers of its floats, which may be sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import ROUNDING_FACTOR, OutputComparison, Rounding, compare_outputs
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_in_float64, run_reference, with_values
from winml.modelkit.compare.verification.varied_sizes import Draw, WrittenGraph
from winml.modelkit.compare.verification.varied_values import Varied
from winml.modelkit.errors import ExportError, StageError, VerificationError
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.tags.tagging import read_tag

_FACTORS = (10.0, 100.0)
"""Chosen: a random value becomes 20 or so, where a float32 beside 1.0 is lost, up to a few hundred, whose exponential
overflows."""
_WORDS = "large values"
_DTYPES = (torch.float32, torch.float64)
"""Types that hold what is computed of such values; those of 16 bits overflow on either side."""
_SENSITIVE = frozenset(
    {
        "Acosh", "Asinh", "Atanh", "Cosh", "Exp", "Floor", "Log", "LogSoftmax", "Mod", "ReduceLogSum",
        "ReduceLogSumExp", "ReduceProd", "Round", "Sinh", "Softplus",
    }
)  # fmt: skip
"""Chosen: operators that overflow, cancel or jump far from 0. A graph of others is as right there as near 0: no run is
spent on it."""


def run_at_far_values(prepared: PreparedPart, written: WrittenGraph, inputs: InputDraws) -> Varied | None:
    """Run PyTorch on floats 10 to 100 times those of the smallest sample.

    Args:
        prepared: The part, with values.
        written: The file, and what was traced.
        inputs: What was learned of the values that the part takes.

    Returns:
        The sample and the outputs of PyTorch; `None` if no input can be larger, the graph has no operator that is
        sensitive to it, or PyTorch has no finite output.
    """
    smallest = min(
        (written.draw, *written.proof.draws), key=lambda draw: sum(value.numel() for value in draw.inputs.values())
    )
    retained = inputs.learned.kept | inputs.learned.as_traced
    generator = torch.Generator().manual_seed(inputs.seed)
    far = {}
    for spec in prepared.part.inputs:
        values = smallest.inputs[spec.name]
        # A cache holds what the model computed.
        if values.dtype in _DTYPES and values.device.type == "cpu" and spec.cache is None and spec.name not in retained:
            enlarged = _enlarged(values, spec, generator)
            if not torch.equal(enlarged, values):
                far[spec.name] = enlarged
    if not far or not _is_sensitive(written.model, far):
        return None
    tensors = {**smallest.inputs, **far}
    try:
        reference = run_reference(prepared, tensors)
    except ExportError:
        return None
    if not any(np.isfinite(value).any() for value in reference.values() if value.dtype.kind == "f"):
        return None
    return Varied(tuple(far), _WORDS, Draw(tensors, reference, smallest.sizes))


def _enlarged(values: torch.Tensor, spec: InputTensorSpec, generator: torch.Generator) -> torch.Tensor:
    low, high = map(math.log, _FACTORS)
    factors = torch.exp(low + (high - low) * torch.rand(values.shape, generator=generator))
    enlarged = values * factors.to(values.dtype)
    return enlarged if spec.value_range is None else enlarged.clamp(*spec.value_range)


def _is_sensitive(model: ir.Model, names: Collection[str]) -> bool:
    """Return True if an operator that overflows or cancels reads values of these inputs, and no float is cast to an
    integer.
    """
    reached = {value for value in model.graph.inputs if value.name in names}
    found = False
    for node in model.graph.all_nodes():
        if node.op_type in ("Shape", "Size") or reached.isdisjoint(node.inputs):
            continue
        is_cast = node.op_type == "Cast" and _is_float(node.inputs[0])
        if is_cast and ir.DataType(node.attributes["to"].as_int()).is_integer():
            return False
        found = found or node.op_type in _SENSITIVE
        reached.update(node.outputs)
    return found


def _is_float(value: ir.Value | None) -> bool:
    return value is None or value.dtype is None or value.dtype.is_floating_point()


def refuse_wrong_far_values(
    written: WrittenGraph,
    far: Varied,
    run_file: Callable[[Draw], Arrays],
    rounding: Rounding,
    is_rounding: Callable[[Varied, Collection[str]], bool],
) -> None:
    """Compare the written file with PyTorch at far values.

    Args:
        written: The file, and what was traced.
        far: The sample.
        run_file: Runs the file; raises VerificationError if it cannot.
        rounding: Rounding errors to accept.
        is_rounding: Returns True if rounding alone decides outputs at other values.

    Raises:
        VerificationError: an output differs; names the operator if one returns NaN or infinity.
    """
    answers = run_file(far.draw)
    if answers.keys() != far.draw.reference.keys():
        return
    expected, actual = _where_finite(far.draw.reference, answers)
    comparisons = compare_outputs([expected], [actual], rounding=rounding).comparisons
    wrong = [item for item in comparisons if _is_wrong(item)]
    if wrong and not is_rounding(far, [item.name for item in wrong]):
        raise _far_error(written, far, wrong)


def is_rounded_in_pytorch(prepared: PreparedPart, draw: Draw, outputs: Collection[str], rounding: Rounding) -> bool:
    """Return True if PyTorch in float64 answers a sample otherwise than in float32, beyond the tolerance.

    Then its float32 is no reference: `1 - sigmoid(20)` is all rounding.

    Args:
        prepared: The part.
        draw: The sample.
        outputs: Names of the outputs that the file answers otherwise.
        rounding: Rounding errors to accept.
    """
    with with_values(prepared) as weighted:
        precise = run_in_float64(weighted, draw.inputs)
    if precise is None:
        return False
    narrowed = {name: precise[name].astype(value.dtype) for name, value in draw.reference.items()}
    comparisons = compare_outputs([draw.reference], [narrowed], rounding=rounding).comparisons
    return {*outputs} <= {item.name for item in comparisons if not item.is_equal}


def _where_finite(reference: Arrays, answers: Arrays) -> tuple[Arrays, Arrays]:
    """Return both sides with 0 wherever the reference is NaN or infinite."""
    expected, actual = dict(reference), dict(answers)
    for name, value in reference.items():
        if value.dtype.kind == "f" and value.shape == answers[name].shape and not np.isfinite(value).all():
            expected[name], actual[name] = (np.where(np.isfinite(value), side, 0) for side in (value, answers[name]))
    return expected, actual


def _is_wrong(item: OutputComparison) -> bool:
    # Of values far apart, more is lost to rounding than of those near each other.
    return not item.is_equal and (bool(item.problem) or item.relative_diff > ROUNDING_FACTOR * item.threshold)


def _far_error(written: WrittenGraph, far: Varied, wrong: Sequence[OutputComparison]) -> VerificationError:
    worst = max(wrong, key=lambda item: (bool(item.problem), item.relative_diff))
    difference = worst.problem or f"relative difference {worst.relative_diff:.1e}, tolerance {worst.threshold:.0e}"
    low, high = _range_of([far.draw.inputs[name] for name in far.names])
    near_low, near_high = _range_of([written.draw.inputs[name] for name in far.names])
    operator = _first_infinite(written, far.draw)
    return VerificationError(
        f"the file differs from PyTorch for large values only: with {far.inputs_words} from {low:.3g} to {high:.3g}, "
        f"output {worst.name!r}: {difference}{operator}",
        hint=f"From {near_low:.3g} to {near_high:.3g} the outputs are equal. Compute it in a form that does not "
        "overflow (logsigmoid in place of log(sigmoid), logaddexp, log_softmax), or declare the range of the inputs: "
        "value_range in --input-specs (input_tensors in Python). --no-verify writes the file anyway.",
        is_graph_wrong=True,
        inputs=far.draw.inputs,
    )


def _range_of(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    return min(float(value.min()) for value in tensors), max(float(value.max()) for value in tensors)


def _first_infinite(written: WrittenGraph, draw: Draw) -> str:
    """Return the first operator that makes NaN or infinity of finite inputs, with their range; ``""`` if none does."""
    from winml.modelkit.ort.graph_sessions import session_of_graph

    tapped = written.model.clone()
    nodes = [node for node in tapped.graph if node.outputs and node.outputs[0].name]
    tapped.graph.outputs[:] = list(dict.fromkeys(value for node in nodes for value in node.outputs if value.name))
    try:
        values = {**draw.arrays, **session_of_graph(tapped, written.path).run(draw.arrays)}
    except StageError:
        return ""
    for node in nodes:
        read = [values[value.name] for value in node.inputs if value is not None and value.name in values]
        if _are_finite(read) and not _are_finite(
            [values[value.name] for value in node.outputs if value.name in values]
        ):
            tag, ends = read_tag(node), [end for value in read for end in _ends(value)]
            module = f" of module {tag.module}" if tag is not None and tag.module else ""
            range_words = f", of values from {min(ends):.3g} to {max(ends):.3g}" if ends else ""
            return f"; the first NaN or infinity is that of {node.op_type}{module} (node {node.name}){range_words}"
    return ""


def _are_finite(arrays: Sequence[Array]) -> bool:
    return all(bool(np.isfinite(value).all()) for value in arrays if value.dtype.kind == "f")


def _ends(value: Array) -> tuple[float, ...]:
    return (float(value.min()), float(value.max())) if value.dtype.kind == "f" and value.size else ()
