"""Are the outputs of two ONNX files equal?

Opens one after the other, so that two large models are never held at once, and feeds both the same values. Both are run
node by node as they are written: the optimizations of ONNX Runtime have mistakes of their own, which would not show
where they are made in both files alike. Files that compute in bfloat16 are run in float32, for which there are kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples, measure_fidelity
from winml.modelkit.compare.outputs import ROUNDING_FACTOR, TEXT_KINDS, Rounding, VerificationInfo, compare_outputs
from winml.modelkit.compare.words import difference_words, fidelity_words, samples_words
from winml.modelkit.errors import StageError, UsageError, VerificationError, opt
from winml.modelkit.onnx.contexts import proto_nodes
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.specs import InputTensorSpec, current_name
from winml.modelkit.onnx.weights import ROUNDING_OPERATORS
from winml.modelkit.ort.default_sizes import default_size
from winml.modelkit.ort.graph_inputs import (
    bounds_by_name,
    draw_feeds,
    graph_inputs,
    sizes_by_key,
    with_sums,
)
from winml.modelkit.ort.graph_sessions import open_session, widened_graph
from winml.modelkit.ort.plug_ins import missing_kernel_hint
from winml.modelkit.ort.quantized_states import QuantizedStates
from winml.modelkit.ort.sessions import Session, refuse_crashing_file
from winml.modelkit.progress import counted

_DRAWS = 2
"""Sets of values on which files have to be equal; dynamic dimensions have another size in each."""

ReadSamples = Callable[[Session], tuple[Sequence[Arrays], QualitySamples]]
"""Returns what the opened reference is to be fed, one array per input for each sample, and what that is."""

_INTEGERS = 4
"""Specified by ONNX Runtime: the level at which it rounds the activations of a product to 8 bits."""


def _bug_hint() -> str:
    return f"No file was written; {opt.no_verify} writes it anyway. Please report this."


def refuse_different(
    reference: Path,
    candidate: Path,
    seed: int,
    *,
    has_fixed_sizes: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> VerificationInfo:
    """Compare the answers of two files to two draws of values.

    Args:
        reference: The file that is right.
        candidate: The file that was made from it.
        seed: Seed of the values.
        has_fixed_sizes: Whether the candidate takes only some of the sizes that the reference takes; the values then
            have sizes of the candidate.
        sizes: Sizes of open dimensions, by name in the reference, by ``input:axis``, or by key of ``--shape-config``;
            of the others, some are tried.

    Returns:
        The comparison: every output equal within the threshold of its dtype.

    Raises:
        StageError: the reference itself cannot be run, so there is nothing to compare with; or neither can, at the
            sizes that were fixed.
        VerificationError: they differ, or the candidate cannot be run.
    """
    if has_fixed_sizes:
        try:
            draws, outputs = _draws_and_outputs(candidate, seed, sizes or {})
        except (StageError, UsageError) as error:
            # The sizes may be none that the model takes: that is no fault of the candidate.
            raise StageError(
                f"cannot verify: {error.message.replace(str(candidate), 'the result')}",
                hint=f"{opt.no_verify} writes the result without comparing it.",
            ) from error
        expected = _reference_outputs(reference, draws)
    else:
        with _runs_of_reference(reference):
            draws, expected = _draws_and_outputs(reference, seed, sizes or {})
        outputs = _candidate_outputs(candidate, draws)
    if set(outputs[0]) != set(expected[0]):
        raise VerificationError(
            f"the result has outputs {', '.join(outputs[0])}; {reference.name} has {', '.join(expected[0])}",
            hint=_bug_hint(),
        )

    def probabilities() -> frozenset[str]:
        # Read where a comparison fails only.
        from winml.modelkit.onnx.files.graph_reading import graph_of
        from winml.modelkit.onnx.operators import probability_outputs

        return probability_outputs(graph_of(read_structure(reference), reference).graph)

    rounding = Rounding(probabilities=probabilities)
    verification = compare_outputs(expected, outputs, rounding=rounding)
    different = [item for item in verification.comparisons if not item.is_equal]
    # So little may be rounding in a deep graph, done in another order.
    is_near = all(item.relative_diff <= ROUNDING_FACTOR * item.threshold for item in different)
    if different and (is_near or _rounds_activations(reference)):
        verification = compare_outputs(
            _reference_outputs(reference, draws, as_written=False),
            _candidate_outputs(candidate, draws, as_written=False),
            rounding=rounding,
        )
    if not all(item.is_equal for item in verification.comparisons):
        raise VerificationError(
            f"the outputs of the result differ from those of {reference.name}: {difference_words(verification)}",
            hint=_bug_hint(),
            inputs=draws[verification.worst.draw - 1],
        )
    _refuse_crashing(reference, candidate)
    # A model that ignores its inputs was found out when it was exported; here only equality is asked, also of zeros.
    has_signal = any(
        value.dtype.kind in TEXT_KINDS or bool(np.isfinite(value).any()) for draw in expected for value in draw.values()
    )
    return replace(
        verification,
        has_signal=has_signal,
        silent=None if has_signal else verification.silent,
        in_float32=widened_graph(reference) is not None,
    )


def _refuse_crashing(reference: Path, candidate: Path) -> None:
    """Refuse a result that runs node by node and crashes ONNX Runtime if it is opened by default.

    Raises:
        StageError: the reference crashes as well.
        VerificationError: it does not.
    """
    try:
        refuse_crashing_file(candidate)
    except StageError as error:
        refuse_crashing_file(reference)
        message = error.message.replace(str(candidate), "the result")
        raise VerificationError(f"the result does not run: {message}", hint=_bug_hint()) from error


def refuse_unfaithful(
    reference: Path, candidate: Path, least_sqnr_db: float, read_samples: ReadSamples, hint: str | None = None
) -> FidelityInfo:
    """Compare the answers of a file of fewer bits with those of the file it was made from.

    The candidate is run as users run it, with the optimizations of ONNX Runtime, since its form depends on them.

    Args:
        reference: The file that is right.
        candidate: The file of fewer bits.
        least_sqnr_db: Ratio in decibels that every output has to reach.
        read_samples: Returns what both are fed.
        hint: What to do about a result that is too far; None: what helps any file of fewer bits.

    Raises:
        StageError: the reference itself cannot be run, so there is nothing to compare with.
        VerificationError: an output does not reach the ratio, or the candidate cannot be run.
    """
    draws, expected, samples = reference_outputs(reference, read_samples)
    outputs = _candidate_outputs(candidate, draws, as_written=False)
    fidelity = measure_fidelity(expected, outputs, least_sqnr_db, samples)
    refuse_below_minimum_sqnr(fidelity, reference.name, draws[0], hint)
    return fidelity


def reference_outputs(
    reference: Path, read_samples: ReadSamples
) -> tuple[Sequence[Arrays], list[Arrays], QualitySamples]:
    """Return samples, what a file answers to them, run node by node as it is written, and what the samples are.

    Args:
        reference: The file.
        read_samples: Returns what it is fed.

    Raises:
        StageError: the file cannot be run, so there is nothing to compare with.
    """
    with _runs_of_reference(reference):
        session = open_session(reference, as_written=True)
        draws, samples = read_samples(session)
        return draws, [session.run(draw) for draw in counted(draws, "sample of the source")], samples


def outputs_of_file(path: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    """Return what a file answers to values.

    Args:
        path: The file.
        draws: The values.
        as_written: Run it node by node as it is written, or else as ONNX Runtime does by default.

    Raises:
        UsageError: it takes other inputs.
        StageError: it cannot be run.
    """
    session = open_session(path, as_written=as_written)
    states = QuantizedStates.of(path, session)
    return [states.dequantized(session.run(states.quantized(draw))) for draw in counted(draws, "sample")]


def below_minimum_hint(remedies: Sequence[str], *, budget: str | None = None) -> str:
    """Return what to do about a file of fewer bits whose outputs are below the minimum.

    Args:
        remedies: What else gives a file nearer to the reference.
        budget: The option that limits bits or size, which chose the precision of each module; None: none did.
    """
    exclude = f"exclude the modules that lose most ({opt.exclude})"
    ways = [exclude, *remedies, f"choose another {opt.precision} or {opt.mode}"]
    if budget is not None:
        # A module that is excluded takes the bits of the others.
        ways = [f"allow more with {budget}", *remedies]
    listed = ", ".join(ways)
    listed = f"{listed[0].upper()}{listed[1:]}"
    return f"No file was written. {listed}, lower {opt.min_sqnr}, or write it anyway with {opt.no_verify}."


def refuse_below_minimum_sqnr(
    fidelity: FidelityInfo, reference: str, inputs: Mapping[str, object], hint: str | None = None
) -> None:
    """Refuse a file that answers too unlike what it was made from.

    Args:
        fidelity: What was measured.
        reference: What it was made from, in words.
        inputs: Values both were fed.
        hint: What to do about it; None: what helps any file of fewer bits.

    Raises:
        VerificationError: an output does not reach the ratio.
    """
    if fidelity.has_signal and not fidelity.is_near:
        error = VerificationError(
            _below_minimum_words(fidelity, reference),
            hint=below_minimum_hint(()) if hint is None else hint,
            inputs=inputs,
        )
        error.is_quality = True
        raise error


def _below_minimum_words(fidelity: FidelityInfo, reference: str) -> str:
    """Return by how much the worst output misses its minimum; all there is to say where that is not the reason."""
    worst = fidelity.worst
    if not fidelity.outputs or worst.problem or fidelity.judged_db(worst) >= fidelity.limit_db(worst):
        return f"the outputs of {reference} lost too much precision: {fidelity_words(fidelity)}"
    where = "" if fidelity.samples is None else f" (lower end of 90 % of {samples_words(fidelity.samples)})"
    reached, least = fidelity.judged_db(worst), fidelity.limit_db(worst)
    return f"{worst.name} has an SQNR of {reached:.2f} dB beside {reference}{where}; the minimum is {least:.4g} dB"


def _rounds_activations(path: Path) -> bool:
    """Say whether a graph rounds its activations to integers: there, the last bit of a float changes whole steps.

    Measured: 18 dB between all-MiniLM-L6-v2 in int8 as written and as ONNX Runtime runs it, which both are right.
    """
    return any(
        node.op_type in ROUNDING_OPERATORS
        or (
            node.op_type == "MatMulNBits"
            and any(item.name == "accuracy_level" and item.i == _INTEGERS for item in node.attribute)
        )
        for node in proto_nodes(read_structure(path))
    )


def _draws_and_outputs(path: Path, seed: int, passed: Mapping[str, int]) -> tuple[list[Arrays], list[Arrays]]:
    """Return sets of values that a file takes, and its answers.

    Raises:
        StageError: it takes none.
        UsageError: one of its inputs takes values that nobody can draw.
    """
    session = open_session(path, as_written=True)
    found = list(itertools.islice(_accepted(session, seed, passed), _DRAWS))
    return [feeds for _, feeds, _ in found], [outputs for _, _, outputs in found]


def _accepted(
    session: Session, seed: int, passed: Mapping[str, int]
) -> Iterator[tuple[Mapping[str, int], Arrays, Arrays]]:
    """Yield sizes that a file takes, values of these sizes, and its answers: as many as are found, at least one.

    Raises:
        StageError: it takes none.
        UsageError: one of its inputs takes values that nobody can draw.
    """
    refusal: StageError | UsageError = StageError("no sizes were tried")
    inputs, count = graph_inputs(session), 0
    for sizes in _sizes_to_try(inputs, passed):
        try:
            feeds = draw_feeds(inputs, sizes, seed + count)
            outputs = session.run(feeds)
        except StageError as error:
            refusal = error  # these sizes do not go together; others may
            continue
        except UsageError as error:
            refusal = error  # no values can be drawn, whatever the sizes
            break
        count += 1
        yield sizes, feeds, outputs
    if not count:
        raise refusal


def accepted_sizes(session: Session, passed: Mapping[str, int]) -> Mapping[str, int]:
    """Return sizes of all dynamic dimensions that a file takes, whatever their names.

    Args:
        session: The file.
        passed: Sizes that somebody gave, as for :func:`refuse_different`.

    Raises:
        StageError: it takes none of those that are tried.
        UsageError: one of its inputs takes values that nobody can draw.
    """
    return next(sizes for sizes, _, _ in _accepted(session, 0, passed))


def _sizes_to_try(inputs: Sequence[InputTensorSpec], passed: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Yield sizes of the dynamic dimensions, the likeliest to be accepted first; twice the same where none is open."""
    bounds = bounds_by_name(inputs)
    for sizes in _usual_sizes(inputs, passed):
        yield {name: bounds[name].clamp(size) if name in bounds else size for name, size in sizes.items()}


def _usual_sizes(inputs: Sequence[InputTensorSpec], passed: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    names = list(dict.fromkeys(key for item in inputs for key in item.shape if isinstance(key, str)))
    passed = sizes_by_key(inputs, passed)
    known = {**{name: size for name in names if (size := large_size(name)) is not None}, **passed}
    for sizes in _cache_sizes(inputs):
        yield with_sums(inputs, {**dict.fromkeys(names, 2), **sizes, **known})
    yield {**{name: position for position, name in enumerate(names, start=2)}, **known}
    yield {**{name: position for position, name in enumerate(names, start=5)}, **known}
    # Sizes that a graph ties together without saying so.
    for size in (4, 1, 8, 16, 32):
        yield {**dict.fromkeys(names, size), **known}
    yield {**{name: default_size(name) or 1 for name in names}, **passed}


def _cache_sizes(inputs: Sequence[InputTensorSpec]) -> Iterator[Mapping[str, int]]:
    """Yield sizes of a graph with a cache: a prompt, which finds it empty, and a step after it; none of others."""
    past, tokens = next((terms for item in inputs for terms in item.sums.values() if len(terms) == 2), (None, None))
    for size_past, size_tokens in ((0, 5), (6, 1)) if past is not None else ():
        sizes = {past: size_past, tokens: size_tokens}
        yield {name: size for name, size in sizes.items() if isinstance(name, str)}


_LARGE_DIMENSIONS = frozenset({"height", "width", "audio_length", "num_frames", "num_channels", "num_mel_bins"})


def large_size(name: str) -> int | None:
    """Return the default size of a dimension that models refuse small sizes of; None for any other."""
    return default_size(name) if current_name(name) in _LARGE_DIMENSIONS else None


def _reference_outputs(reference: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    with _runs_of_reference(reference):
        return outputs_of_file(reference, draws, as_written=as_written)


@contextmanager
def _runs_of_reference(reference: Path) -> Iterator[None]:
    """Explain that a reference does not run; errors about requested sizes, which are at fault then, stay as is."""
    try:
        yield
    except (StageError, UsageError) as error:
        if error.message.startswith(opt.shape_config):
            raise
        remedies = (missing_kernel_hint(error.message), f"{opt.no_verify} writes the result without comparing it.")
        raise StageError(
            f"cannot verify: {reference.name} does not run: {error.message}", hint=" ".join(filter(None, remedies))
        ) from error


def _candidate_outputs(candidate: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    try:
        return outputs_of_file(candidate, draws, as_written=as_written)
    except (StageError, UsageError) as error:
        message = error.message.replace(str(candidate), "the result")
        remedy = missing_kernel_hint(error.message)
        hint = f"No file was written. {remedy}" if remedy else _bug_hint()
        raise VerificationError(f"the result does not run: {message}", hint=hint) from error
