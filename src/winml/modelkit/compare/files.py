"""Comparison of the outputs of two ONNX files.

Files are opened in succession, so that two large models are never in memory at once, and receive the same values. Both
files run node by node as written: errors of ONNX Runtime's optimizations would be invisible if made in both files.
Files that compute in bfloat16 run in float32, which has kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples, measure_fidelity
from winml.modelkit.compare.outputs import (
    ROUNDING_FACTOR,
    Rounding,
    VerificationInfo,
    compare_outputs,
    silent_kinds,
    silent_words,
    tells_graphs_apart,
)
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.verification.single_rows import reads_consecutive_tokens, with_consecutive_tokens
from winml.modelkit.compare.words import difference_words, fidelity_words, samples_words
from winml.modelkit.errors import InputError, NoInputsError, StageError, UsageError, VerificationError, opt
from winml.modelkit.onnx.contexts import DROPOUT, proto_nodes, random_nodes, random_words
from winml.modelkit.onnx.files.reading import read_referring, read_structure
from winml.modelkit.onnx.weights import ROUNDING_OPERATORS
from winml.modelkit.ort.accepted_inputs import AcceptedInputs, accepted_inputs, notes_on_inputs
from winml.modelkit.ort.decoding.inputs import MASK
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.ort.graph_sessions import open_session, widened_graph
from winml.modelkit.ort.plug_ins import missing_kernel_hint
from winml.modelkit.ort.quantized_states import QuantizedStates
from winml.modelkit.ort.sessions import Session, refuse_crashing_file
from winml.modelkit.progress import counted
from winml.modelkit.words import percent_words

if TYPE_CHECKING:
    import onnx_ir as ir

_DRAWS = 2
"""Number of samples on which files must be equal; dynamic dimensions have another size in each."""

ReadSamples = Callable[[Session], tuple[Sequence[Arrays], QualitySamples]]
"""Returns the inputs of the opened reference (input name → array, per sample) and the description of the samples."""

_INTEGERS = 4
"""Specified by ONNX Runtime: accuracy level at which it rounds the activations of a product to 8 bits."""


def _bug_hint() -> str:
    return f"No file was written; {opt.no_verify} writes it anyway. Please report this."


def _nan_note(draws: Sequence[Arrays]) -> str:
    """Return a note on the inputs of samples that contain NaN; empty for none. Only the user's samples do."""
    floats = [(name, values) for feeds in draws for name, values in feeds.items() if values.dtype.kind == "f"]
    names = {name for name, values in floats if np.isnan(values).any()}
    return f"The specified inputs contain NaN: {', '.join(sorted(names))}." if names else ""


def refuse_different(
    reference: Path,
    candidate: Path,
    seed: int,
    *,
    has_fixed_sizes: bool = False,
    sizes: Mapping[str, int] | None = None,
    read_samples: ReadSamples | None = None,
) -> VerificationInfo:
    """Compare the outputs of two files on two random samples, or on samples of the user.

    Args:
        reference: The reference file.
        candidate: The file made from the reference.
        seed: Seed of the values.
        has_fixed_sizes: True if the candidate supports only some sizes of the reference; the values then have sizes of
            the candidate.
        sizes: Sizes of dynamic dimensions, by name in the reference, by ``input:axis``, or by key of
            ``--shape-config``; some sizes of other dimensions are tried.
        read_samples: Returns the samples of the user; ``None``: random samples.

    Returns:
        The comparison: every output equal within the threshold of its dtype.

    Raises:
        NoInputsError: the reference accepts none of the generated values.
        StageError: the reference cannot be run; or both cannot be run at the fixed sizes.
        VerificationError: the outputs differ, or the candidate cannot be run.
    """
    accepted: list[AcceptedInputs] = []
    if has_fixed_sizes:
        try:
            accepted = _accepted(candidate, seed, sizes or {})
            draws, outputs = [entry.feeds for entry in accepted], [entry.outputs for entry in accepted]
        except (StageError, UsageError) as error:
            # The model may not support these sizes, which is no error of the candidate.
            raise StageError(
                f"cannot verify: {error.message.replace(str(candidate), 'the result')}",
                hint=f"{opt.no_verify} writes the result without comparing it.",
            ) from error
        if accepted[0].note or accepted[0].origin:
            _refuse_narrower(reference, candidate, accepted[0].sizes, seed)
        expected = _reference_outputs(reference, draws)
    elif read_samples is not None:
        samples, expected, _ = reference_outputs(reference, read_samples)
        draws = [*samples]
        outputs = _candidate_outputs(candidate, draws)
    else:
        with _runs_of_reference(reference):
            accepted = _accepted(reference, seed, sizes or {})
            draws, expected = [entry.feeds for entry in accepted], [entry.outputs for entry in accepted]
            if MASK in draws[0] and reads_consecutive_tokens(_read_graph(candidate)):
                draws = list(map(with_consecutive_tokens, draws))
                expected = outputs_of_file(reference, draws)
        try:
            outputs = _candidate_outputs(candidate, draws)
        except VerificationError:
            for draw in draws:
                _refuse_stale_shapes(reference, draw)
            raise
    if set(outputs[0]) != set(expected[0]):
        raise VerificationError(
            f"the result has outputs {', '.join(outputs[0])}; {reference.name} has {', '.join(expected[0])}",
            hint=_bug_hint(),
        )

    def probabilities() -> frozenset[str]:
        from winml.modelkit.onnx.operators import probability_outputs

        return probability_outputs(_read_graph(reference).graph)

    rounding = Rounding(probabilities=probabilities)
    verification = compare_outputs(expected, outputs, rounding=rounding)
    different = [entry for entry in verification.comparisons if not entry.is_equal]
    # The graph is read only if a comparison fails.
    if different and _computes_in_float16(reference):
        rounding = replace(rounding, dtypes=("float16",))
        verification = compare_outputs(expected, outputs, rounding=rounding)
        different = [entry for entry in verification.comparisons if not entry.is_equal]
    # A small difference may be rounding in a deep graph with another order of operations.
    is_near = all(entry.relative_diff <= ROUNDING_FACTOR * entry.threshold for entry in different)
    if different and (is_near or rounds_activations(reference)):
        verification = compare_outputs(
            _reference_outputs(reference, draws, as_written=False),
            _candidate_outputs(candidate, draws, as_written=False),
            rounding=rounding,
        )
    if not all(entry.is_equal for entry in verification.comparisons):
        _refuse_random(reference, draws[verification.worst.draw - 1])
        _refuse_stale_shapes(reference, draws[verification.worst.draw - 1])
        raise VerificationError(
            f"the outputs of the result differ from those of {reference.name}: {difference_words(verification)}",
            hint=_bug_hint(),
            inputs=draws[verification.worst.draw - 1],
        )
    _refuse_crashing(reference, candidate)
    has_signal = tells_graphs_apart(expected, draws)
    note = notes_on_inputs(accepted) if accepted else _nan_note(draws)
    for entry, outputs_of_entry in zip(accepted, expected, strict=False) if has_signal else ():
        if entry.origin and (kinds := silent_kinds(outputs_of_entry.values())) is not None:
            note += f" For {entry.origin}, the source returns {silent_words(kinds)}, which shows no difference."
    return replace(
        verification,
        note=note,
        has_signal=has_signal,
        silent=None if has_signal else verification.silent,
        in_float32=widened_graph(reference) is not None,
    )


def _refuse_stale_shapes(reference: Path, feeds: Arrays) -> None:
    """Refuse a reference that declares another shape of a value than it computes; ONNX Runtime runs such a file.

    Raises:
        InputError: names the value, the declared sizes and the computed ones.
    """
    import onnx

    from winml.modelkit.onnx.contents import declared_shape

    model = read_referring(reference)
    outputs = {value.name for value in model.graph.output}
    declared = {
        value.name: shape
        for value in model.graph.value_info
        if value.name not in outputs
        and (shape := declared_shape(value.type))
        and all(isinstance(n, int) for n in shape)
    }
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in declared)
    try:
        session = Session(model.SerializeToString(), data_folder=reference.parent, name=reference.name, optimize=False)
        computed = session.run(feeds, [*declared])
    except (StageError, UsageError, InputError, ValueError):
        return  # the cause of the failure is another one
    for name, shape in declared.items():
        if name in computed and computed[name].shape != shape:
            raise InputError(
                f"{reference.name}: the file declares {[*shape]} for value {name}, which has "
                f"{[*computed[name].shape]} in a run",
                hint="Remove the entries of value_info from the file, or export the model again.",
            )


def _refuse_random(reference: Path, feeds: Arrays) -> None:
    """Refuse a reference that computes other outputs in a second run, which no file made from it can equal.

    Raises:
        VerificationError: an output differs between two runs on the same inputs.
    """
    # In one session: the first runs of two sessions generate equal numbers.
    first, second = outputs_of_file(reference, [feeds, feeds])
    refuse_random(first, second, reference, reference.name, f"or skip the comparison with {opt.no_verify}")


def refuse_random(first: Arrays, second: Arrays, path: Path, name: str, remedy: str = "") -> None:
    """Refuse a graph whose outputs differ between two runs on the same inputs.

    Args:
        first: Outputs of a run.
        second: Outputs of another run on the same inputs.
        path: File of the graph.
        name: Name of the graph, for the message.
        remedy: A further remedy besides a graph without random numbers.

    Raises:
        VerificationError: an output differs.
    """
    repeated = compare_outputs([first], [second])
    if not all(entry.is_equal for entry in repeated.comparisons):
        nodes = random_nodes(read_structure(path))
        is_training = not nodes or any(node.op_type == DROPOUT for node in nodes)
        how = "Export the model in evaluation mode" if is_training else "Make the random numbers inputs of the graph"
        remedies = ", ".join(filter(None, (how, remedy)))
        raise VerificationError(
            f"cannot verify: output {repeated.worst.name!r} of {name} differs between two runs on the same inputs"
            + (f", since it generates random numbers: {random_words(nodes)}" if nodes else ""),
            hint=f"No file was written. {remedies}.",
        )


def _refuse_narrower(reference: Path, candidate: Path, sizes: Mapping[str, int], seed: int) -> None:
    """Refuse a result that does not run on values drawn by default, if the reference does.

    Raises:
        VerificationError: only the result refuses the values.
    """
    session = open_session(candidate, as_written=True)
    draw = draw_feeds(graph_inputs(session), sizes, seed)
    del session
    try:
        outputs_of_file(reference, [draw])
    except (StageError, UsageError):
        return
    _candidate_outputs(candidate, [draw])


def refuse_unopenable(reference: Path, candidate: Path) -> None:
    """Refuse a result that ONNX Runtime cannot open, if no values are known to run it on.

    Raises:
        VerificationError: the result cannot be opened, and the reference can.
        StageError: the reference cannot be opened either.
    """
    _candidate_outputs(candidate, [])
    _refuse_crashing(reference, candidate)


def _refuse_crashing(reference: Path, candidate: Path) -> None:
    """Refuse a result that runs node by node but crashes ONNX Runtime with default optimizations.

    Raises:
        StageError: the reference crashes too.
        VerificationError: only the result crashes.
    """
    try:
        refuse_crashing_file(candidate)
    except StageError as error:
        refuse_crashing_file(reference)
        message = error.message.replace(str(candidate), "the result")
        raise VerificationError(f"the result does not run: {message}", hint=_bug_hint()) from error


def refuse_unfaithful(
    reference: Path, candidate: Path, minimum: QualityMinimum, read_samples: ReadSamples, hint: str | None = None
) -> FidelityInfo:
    """Compare the outputs of a lossy file with those of its source.

    The candidate runs with ONNX Runtime's default optimizations, like in production, since its kernels depend on them.

    Args:
        reference: The reference file.
        candidate: The lossy file.
        minimum: Minimum quality of every output.
        read_samples: Returns the inputs of both.
        hint: Hint for a result below the minimum; ``None``: the generic hint.

    Raises:
        StageError: the reference cannot be run.
        VerificationError: an output is below the minimum, or the candidate cannot be run.
    """
    draws, expected, samples = reference_outputs(reference, read_samples)
    outputs = _candidate_outputs(candidate, draws, as_written=False)
    fidelity = measure_fidelity(expected, outputs, minimum.sqnr_db, samples, minimum.agreement, inputs=draws)
    if fidelity.is_refused:
        _refuse_random(reference, draws[0])
    refuse_below_minimum_sqnr(fidelity, reference.name, draws[0], hint)
    _refuse_unopenable_halves(candidate)
    return fidelity


def _refuse_unopenable_halves(candidate: Path) -> None:
    """Refuse a float16 result that ONNX Runtime cannot open: compared was its graph in float32, with rounded values.

    Raises:
        VerificationError: ONNX Runtime cannot open the file, or crashes.
    """
    if widened_graph(candidate) is not None or widened_graph(candidate, rounds_halves=True) is None:
        return
    try:
        Session(candidate)
    except StageError as error:
        message = error.message.replace(str(candidate), "the result")
        raise VerificationError(f"the result does not run: {message}", hint=below_minimum_hint(())) from error


def reference_outputs(
    reference: Path, read_samples: ReadSamples
) -> tuple[Sequence[Arrays], list[Arrays], QualitySamples]:
    """Run a file as written on samples; return samples, outputs and the description of the samples.

    Args:
        reference: The file.
        read_samples: Returns its inputs.

    Raises:
        NoInputsError: the file refuses random values.
        StageError: the file cannot be run.
    """
    with _runs_of_reference(reference):
        session = open_session(reference, as_written=True)
        draws, samples = read_samples(session)
        try:
            return draws, [session.run(draw) for draw in counted(draws, "sample of the source")], samples
        except StageError as error:
            if not samples.may_be_refused:
                raise
            raise NoInputsError(error.message, hint=error.hint) from error


def outputs_of_file(path: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    """Run a file on samples.

    Args:
        path: The file.
        draws: The samples.
        as_written: Run the file node by node as written instead of with ONNX Runtime's default optimizations.

    Raises:
        UsageError: the file has other inputs.
        StageError: the file cannot be run.
    """
    session = open_session(path, as_written=as_written)
    states = QuantizedStates.of(path, session)
    return [states.dequantized(session.run(states.quantized(draw))) for draw in counted(draws, "sample")]


def below_minimum_hint(remedies: Sequence[str], *, budget: str | None = None) -> str:
    """Build the hint for a lossy file whose outputs are below the minimum.

    Args:
        remedies: Other ways to reduce the error.
        budget: The option with the limit on bits or size that selected the precisions; ``None`` without such a limit.
    """
    exclude = f"exclude the modules that lose most ({opt.exclude})"
    ways = [exclude, *remedies, f"choose another {opt.precision} or {opt.mode}"]
    if budget is not None:
        # An excluded module uses the bits of the others.
        ways = [f"allow more with {budget}", *remedies]
    listed = ", ".join(ways)
    listed = f"{listed[0].upper()}{listed[1:]}"
    return f"No file was written. {listed}, lower {opt.min_sqnr}, or write it anyway with {opt.no_verify}."


def refuse_below_minimum_sqnr(
    fidelity: FidelityInfo, reference: str, inputs: Mapping[str, object], hint: str | None = None
) -> None:
    """Refuse a file unless all outputs meet their limits; a reference without a signal refuses nothing.

    Args:
        fidelity: The measurement.
        reference: Description of the reference.
        inputs: Inputs of both.
        hint: Hint of the error; ``None``: the generic hint.

    Raises:
        VerificationError: an output is below the minimum.
    """
    if fidelity.is_refused:
        error = VerificationError(
            _below_minimum_words(fidelity, reference),
            hint=below_minimum_hint(()) if hint is None else hint,
            inputs=inputs,
        )
        error.is_quality = True
        raise error


def _below_minimum_words(fidelity: FidelityInfo, reference: str) -> str:
    """Describe the SQNR and minimum of the worst output, or all results if the SQNR is not the reason."""
    worst = fidelity.worst
    if fidelity.outputs and not worst.problem and fidelity.is_by_agreement(worst):
        assert worst.prediction_agreement is not None
        assert fidelity.least_agreement is not None
        where = "" if fidelity.samples is None else f" on {samples_words(fidelity.samples)}"
        shares = [percent_words(share) for share in (worst.prediction_agreement, fidelity.least_agreement)]
        return (
            f"the largest value of {worst.name} is at the same index as in {reference} in {shares[0]} of its "
            f"positions{where}; the minimum is {shares[1]}"
        )
    if not fidelity.outputs or worst.problem or fidelity.judged_db(worst) >= fidelity.limit_db(worst):
        return f"the outputs of {reference} lost too much precision: {fidelity_words(fidelity)}"
    where = "" if fidelity.samples is None else f" (lower end of 90 % of {samples_words(fidelity.samples)})"
    reached, limit = fidelity.judged_db(worst), fidelity.limit_db(worst)
    return f"{worst.name} has an SQNR of {reached:.2f} dB beside {reference}{where}; the minimum is {limit:.4g} dB"


def _read_graph(path: Path) -> ir.Model:
    from winml.modelkit.onnx.files.graph_reading import graph_of

    return graph_of(read_structure(path), path)


def _computes_in_float16(path: Path) -> bool:
    """Return True if a graph computes in float16: float32 outputs then have the rounding errors of float16."""
    import onnx_ir as ir

    from winml.modelkit.onnx.widening import computes_in

    return computes_in(_read_graph(path), ir.DataType.FLOAT16)


def rounds_activations(path: Path) -> bool:
    """Return True if a graph rounds activations to integers: the last bit of a float then changes whole steps.

    Measured: 18 dB between all-MiniLM-L6-v2 in int8 as written and as ONNX Runtime optimizes it; both are correct.
    """
    return any(
        node.op_type in ROUNDING_OPERATORS
        or (
            node.op_type == "MatMulNBits"
            and any(attribute.name == "accuracy_level" and attribute.i == _INTEGERS for attribute in node.attribute)
        )
        for node in proto_nodes(read_structure(path))
    )


def _accepted(path: Path, seed: int, requested: Mapping[str, int]) -> list[AcceptedInputs]:
    """Create samples that a file accepts, and compute its outputs.

    Args:
        path: The ONNX file.
        seed: Seed of the first sample.
        requested: Dynamic dimension → size in the user's request.

    Raises:
        NoInputsError: the file accepts none of the generated samples.
        StageError: the file cannot be opened.
    """
    session = open_session(path, as_written=True)
    return list(itertools.islice(accepted_inputs(session, seed, requested), _DRAWS))


def _reference_outputs(reference: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    """Run the reference on the samples.

    Raises:
        StageError: the reference does not run.
    """
    with _runs_of_reference(reference):
        return outputs_of_file(reference, draws, as_written=as_written)


@contextmanager
def _runs_of_reference(reference: Path) -> Iterator[None]:
    """Report that a reference does not run; errors about requested sizes, the cause then, are unchanged.

    Raises:
        StageError: the reference does not run, with a remedy.
    """
    try:
        yield
    except (StageError, UsageError) as error:
        if error.message.startswith((opt.shape_config, opt.input_data)) or isinstance(error, NoInputsError):
            raise
        remedies = (missing_kernel_hint(error.message), f"{opt.no_verify} writes the result without comparing it.")
        raise StageError(
            f"cannot verify: {reference.name} does not run: {error.message}", hint=" ".join(filter(None, remedies))
        ) from error


def _candidate_outputs(candidate: Path, draws: Sequence[Arrays], *, as_written: bool = True) -> list[Arrays]:
    """Run the candidate on the samples.

    Raises:
        VerificationError: the candidate does not run.
    """
    try:
        return outputs_of_file(candidate, draws, as_written=as_written)
    except (StageError, UsageError) as error:
        message = error.message.replace(str(candidate), "the result")
        remedy = missing_kernel_hint(error.message)
        hint = f"No file was written. {remedy}" if remedy else _bug_hint()
        raise VerificationError(f"the result does not run: {message}", hint=hint) from error
