"""Comparison of a written file with PyTorch: on traced inputs, random inputs, other values and other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnx.shape_inference
import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples, measure_fidelity
from winml.modelkit.compare.files import refuse_below_minimum_sqnr
from winml.modelkit.compare.outputs import VerificationInfo, compare_outputs, constant_outputs
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.verification import input_values
from winml.modelkit.compare.verification.file_run import WrittenFile
from winml.modelkit.compare.verification.fixed_numbers import FixedNumbers
from winml.modelkit.compare.verification.generated_text import GeneratedText, generate_reference, generates_alone
from winml.modelkit.compare.verification.generation import compare_generation
from winml.modelkit.compare.verification.input_draws import InputDraws, holds_nan
from winml.modelkit.compare.verification.python_reads import run_watched
from winml.modelkit.compare.verification.reference_run import PreparedPart, with_values
from winml.modelkit.compare.verification.rounding import compare_stable_draws, has_uncertain_scores
from winml.modelkit.compare.verification.single_rows import reads_consecutive_tokens, with_consecutive_tokens
from winml.modelkit.compare.verification.sizes import (
    Draw,
    WrittenGraph,
    compare_at_varied_sizes,
    run_draw,
    with_reference_outputs,
)
from winml.modelkit.compare.words import difference_words
from winml.modelkit.errors import ExportError, VerificationError, opt
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_torch
from winml.modelkit.onnx.assumptions import constant_output
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.random_numbers import FIXABLE_OPERATORS
from winml.modelkit.onnx.widening import computes_in
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS
from winml.modelkit.ort.graph_sessions import are_numbers_fixed, fixed_random_numbers
from winml.modelkit.tags.tagging import all_nodes

PIECE_BYTES = 1 << 28
"""Maximum weight of a piece, with bfloat16 counted as float32. Chosen: half the memory of the libraries, so that the
peak stays below 1.5 GB unless one weight is larger."""


def verify_written_file(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool = False
) -> VerificationInfo:
    """Compare a written file with PyTorch; both compute in float32 if the file computes in bfloat16.

    Args:
        written: The file, and the traced sample.
        prepared: The exported part.
        inputs: Generator of further inputs.
        is_streamed: Stream the weights on both sides, for a part traced without weights. No text is then generated,
            since each token would read all weights again.

    Raises:
        VerificationError: the outputs differ, or the comparison has no signal.
    """
    if is_streamed:
        from winml.modelkit.compare.verification.streamed_reference import with_streaming_loader  # imported on demand

        prepared = with_streaming_loader(prepared)
    if not are_numbers_fixed() and any(node.op_type in FIXABLE_OPERATORS for node in all_nodes(written.model)):
        with fixed_random_numbers(), FixedNumbers():
            fixed = _with_references(written, prepared)
            verification = verify_written_file(fixed, prepared, inputs, is_streamed=is_streamed)
        return replace(verification, fixes_numbers=True)
    if not computes_in(written.model, ir.DataType.BFLOAT16):
        return _verify_outputs(written, prepared, inputs, is_streamed=is_streamed)
    _refuse_mixed_types(written.path)
    with _widen_to_float32(written, prepared, inputs) as (written, prepared, inputs):
        try:
            verification = _verify_outputs(written, prepared, inputs, is_streamed=is_streamed)
        except VerificationError as error:
            # The module comparison does not run the file in float32.
            error.inputs = None
            raise
        return replace(verification, in_float32=True)


def _refuse_mixed_types(path: Path) -> None:
    """Refuse a file whose nodes mix float32 and bfloat16 inputs: run in float32, it would appear correct.

    Raises:
        VerificationError: names the node.
    """
    try:
        onnx.shape_inference.infer_shapes(read_structure(path), check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        if "inconsistent type" not in str(error):
            return  # failed inference is irrelevant here
        raise VerificationError(
            f"cannot verify: the file is not valid ONNX: {error}",
            hint=f"Export in another type: {opt.dtype} fp32. {opt.no_verify} writes the file as it is.",
            is_graph_wrong=True,
        ) from error


def _verify_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool
) -> VerificationInfo:
    """Compare a file at traced, random, varied and resized inputs, and a generated text.

    Args:
        written: The written graph, with the traced sample.
        prepared: The part.
        inputs: Samples of the inputs; learns rules, and receives notes.
        is_streamed: True to read the weights piece by piece.

    Raises:
        VerificationError: the outputs differ, or the comparison has no signal.
    """
    written, second, values, text = _add_reference_outputs(written, prepared, inputs, is_streamed=is_streamed)
    written = replace(written, assumed=tuple(input_values.settled_assumptions(written, values.reads)))
    _refuse_outputs_by_value((written.draw, second))
    file = WrittenFile(written, prepared, piece_bytes=PIECE_BYTES if is_streamed else None)
    known = [written.draw, second]
    if is_streamed:
        known += [*written.proof.draws, *(entry.draw for entry in values.varied)]
    else:
        file.hold_weights_once()
    file.run_beforehand(known)
    prepared, rounding = file.prepared, file.rounding
    try:
        second = _avoid_nan(file, inputs, second)
        verification = compare_stable_draws(
            prepared,
            (written.draw, second),
            rounding=rounding,
            # Number 3 is used for other sizes.
            draw_inputs=lambda number, replaced: inputs.draw(number + 1, with_padding=inputs.hides(replaced.inputs)),
            run_file=file.run,
        )
    except VerificationError as error:
        if error.is_graph_wrong:
            _name_deciding_inputs(error, file, second)
        raise
    compared = input_values.compare_at_varied_values(file, values)

    def outputs_at(sizes: Mapping[str, int]) -> Draw:
        with with_values(prepared) as weighted:
            return inputs.accepted(
                lambda drawing: drawing.draw(3, sizes),
                lambda tensors: run_draw(weighted, Draw(tensors, {}, sizes)),
            )

    at_other_sizes = compare_at_varied_sizes(file, outputs_at)
    # At other sizes, shapes differ: outputs that depend on sizes only are compared there.
    draws = (second, *written.proof.draws)
    answers = [draw.reference for draw in (written.draw, *draws, *(varied.draw for varied in values.varied))]
    constant = constant_outputs(answers)
    checked = tuple(input_values.checked_values(written, draws, values, compared))
    generation = None
    if text is not None:
        generation = compare_generation(
            prepared.part, text, file.run, rounding, lambda draw: has_uncertain_scores(prepared, draw, rounding)
        )
    return replace(
        verification,
        is_streamed=is_streamed,
        comparisons=(*verification.comparisons, *at_other_sizes),
        values=checked,
        generation=generation,
        assumed=(*written.assumed, *map(constant_output, constant)),
        constant=constant,
    )


def _refuse_outputs_by_value(draws: Sequence[Draw]) -> None:
    """Refuse a model whose set of outputs depends on the input values.

    Raises:
        VerificationError: names the outputs of both samples.
    """
    first, second = (", ".join(draw.reference) for draw in draws)
    if first != second:
        raise VerificationError(
            f"cannot verify: which outputs the model returns depends on the input values ({first}; then {second})",
            hint="Return the same outputs for all inputs; a graph has fixed outputs.",
        )


def measure_written_file(
    written: WrittenGraph,
    prepared: PreparedPart,
    inputs: InputDraws,
    minimum: QualityMinimum,
    piece_bytes: int,
    samples: tuple[Sequence[Arrays], QualitySamples] | None,
) -> FidelityInfo:
    """Measure the output error of a written file with lossy weights relative to PyTorch.

    The weights of a model traced without weights are not loaded: both sides hold one piece at a time.

    Args:
        written: The file, and the traced sample; its dynamic dimensions are tested at other sizes.
        prepared: The exported part.
        inputs: Generator of further inputs.
        minimum: Minimum quality of every output.
        piece_bytes: Weight size per piece when the file is run in pieces.
        samples: Samples for the quality in addition to those of the export, with their description; ``None``: only
            those of the export.

    Raises:
        VerificationError: an output is below the minimum, or ONNX Runtime cannot run the file.
    """
    is_streamed = prepared.part.with_references is not None
    arrays, about = samples or ((), None)
    judged = _accepted_samples(prepared, arrays, written.draw)
    answered = _compute_draws(written, prepared, inputs, judged, is_streamed=is_streamed)
    count = len(answered) - len(judged)
    draws = answered[:count]
    _refuse_outputs_by_value((draws[0], draws[-1]))
    file = WrittenFile(written, prepared, piece_bytes=piece_bytes if is_streamed else None)
    outputs = file.run_all(answered)

    def judge(compared: slice, about: QualitySamples | None) -> FidelityInfo:
        references = [draw.reference for draw in answered[compared]]
        # A few random inputs give no share of equal predictions.
        agreement = None if about is None else minimum.agreement
        feeds = [draw.arrays for draw in answered[compared]]
        fidelity = measure_fidelity(references, outputs[compared], minimum.sqnr_db, about, agreement, inputs=feeds)
        fidelity = replace(fidelity, is_streamed=is_streamed)
        refuse_below_minimum_sqnr(fidelity, "the model in PyTorch", answered[compared][0].inputs)
        return fidelity

    has_samples = bool(judged) and about is not None
    try:
        fidelity = judge(slice(count), None)
    except VerificationError as error:
        if _differs_at_other_sizes(draws, outputs, minimum.sqnr_db):
            error.is_graph_wrong, error.is_quality = True, False
            raise
        if not error.is_quality or not has_samples:
            raise
        # Samples of the model's processor decide, not random values.
    return judge(slice(count, None), about) if has_samples else fidelity


def _differs_at_other_sizes(draws: Sequence[Draw], outputs: Sequence[Arrays], least_sqnr_db: float) -> bool:
    """Return True if outputs reach the minimum at the traced sizes only, and fail at others: an axis is frozen."""
    at_traced = [draw.sizes == draws[0].sizes for draw in draws]

    def measured(is_traced: bool) -> FidelityInfo | None:  # for one of two groups
        places = [index for index, flag in enumerate(at_traced) if flag == is_traced]
        references = [draws[index].reference for index in places]
        return measure_fidelity(references, [outputs[index] for index in places], least_sqnr_db) if places else None

    traced, varied = measured(True), measured(False)
    return traced is not None and varied is not None and traced.is_near and varied.worst.sqnr_db < 0


def verify_with_adapter(
    written: WrittenGraph, weighted: PreparedPart, adapter: Path, name: str, least_sqnr_db: float | None
) -> None:
    """Compare a file with an active adapter with PyTorch, on the traced inputs.

    Args:
        written: The file, and the traced sample.
        weighted: The part with weights and the merged adapter.
        adapter: The adapter, in ONNX Runtime's format.
        name: Name of the adapter.
        least_sqnr_db: Minimum SQNR of every output in dB; ``None``: outputs must be equal.

    Raises:
        VerificationError: the outputs differ.
    """
    draw = run_draw(weighted, written.draw)
    file = WrittenFile(written, weighted, adapter=adapter)
    outputs = file.run(draw)
    if least_sqnr_db is not None:
        fidelity = measure_fidelity([draw.reference], [outputs], least_sqnr_db)
        refuse_below_minimum_sqnr(fidelity, f"the model in PyTorch with adapter {name} merged", draw.inputs)
        return
    verification = compare_outputs([draw.reference], [outputs], rounding=file.rounding)
    if not all(comparison.is_equal for comparison in verification.comparisons):
        raise VerificationError(
            f"with adapter {name}, the outputs of the file differ from PyTorch's with the adapter merged: "
            f"{difference_words(verification)}",
            hint=f"Merge it: {opt.adapter} PATH without {name}=. {opt.no_verify} writes the file anyway.",
        )


def _accepted_samples(prepared: PreparedPart, samples: Sequence[Arrays], traced: Draw) -> list[Draw]:
    """Convert samples to draws without outputs; ``[]`` if the model refuses the first."""
    draws = [
        Draw({name: to_torch(sample[name]) for name in traced.inputs}, {}, traced.sizes)
        for sample in samples
        if sample.keys() >= traced.inputs.keys()
    ]
    try:
        for draw in draws[:1]:
            run_draw(prepared, draw)
    except ExportError:
        return []
    return draws


def _make_second_draw(inputs: InputDraws, traced: Draw, run: Callable[[Draw], Draw]) -> Draw:
    """Create a second sample of the traced sizes that the model accepts, with its outputs.

    Masks contain padding if the traced masks do not, and vice versa: many models take a different path without padding.
    """
    return inputs.accepted(
        lambda drawing: _draw_second_inputs(drawing, traced),
        lambda tensors: run(Draw(tensors, {}, traced.sizes)),
    )


def _draw_second_inputs(drawing: InputDraws, traced: Draw) -> Mapping[str, torch.Tensor]:
    """Draw a second sample, with padding only if the traced masks hide no tokens."""
    return drawing.draw(2, with_padding=not drawing.hides(traced.inputs))


def _compute_draws(
    written: WrittenGraph,
    prepared: PreparedPart,
    inputs: InputDraws,
    samples: Sequence[Draw] = (),
    *,
    is_streamed: bool,
) -> list[Draw]:
    """Traced sample, samples at other sizes, a second sample and quality samples, all with the outputs of PyTorch."""
    traced, others = written.draw, list(written.proof.draws)

    def run(draw: Draw) -> Draw:
        return run_draw(prepared, _with_consecutive_tokens(draw) if is_consecutive else draw)

    is_consecutive = MASK in traced.inputs and reads_consecutive_tokens(written.model)
    if is_consecutive and not is_streamed:
        traced, *others = map(run, (traced, *others))
    elif is_consecutive:
        traced, *others = map(_with_consecutive_tokens, (traced, *others))
    # Without weights, the model can refuse the inputs, but not detect NaN outputs.
    second = _make_second_draw(inputs, traced, run)
    if not is_streamed:
        return [traced, *others, second, *(run_draw(prepared, draw) for draw in samples)]
    from winml.modelkit.compare.verification.streamed_reference import streamed_outputs  # imported on demand

    draws = streamed_outputs(prepared, [traced, *others, second, *samples])
    position = len(others) + 1
    if holds_nan(draws[position].reference):
        draws[position] = _make_second_draw(inputs, traced, lambda draw: streamed_outputs(prepared, [draw])[0])
    return draws


def _with_consecutive_tokens(draw: Draw) -> Draw:
    """Return a sample of a decoder without padding and with consecutive positions; its outputs are to be computed."""
    arrays = with_consecutive_tokens(draw.arrays)
    changed = {name: to_torch(arrays[name]) for name in (MASK, POSITIONS) if name in draw.inputs}
    return replace(draw, inputs={**draw.inputs, **changed})


def _add_reference_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool
) -> tuple[WrittenGraph, Draw, input_values.VariedValues, GeneratedText | None]:
    """Add PyTorch's outputs to all samples; return the file, a second sample, varied values and a generated text.

    The weights of a model traced without weights are in memory only here, so that ONNX Runtime finds memory free.
    Streamed weights are read once for all samples. Varied values are then tried only if Python read values, and no text
    is generated, since each token would read all weights again.

    Args:
        written: The written graph, with the traced sample.
        prepared: The part.
        inputs: Samples of the inputs; learns rules, and receives notes.
        is_streamed: True to read the weights piece by piece.
    """
    proof, values = written.proof, input_values.VariedValues()
    text: GeneratedText | None = None
    with ExitStack() as stack:
        weighted = prepared if is_streamed else stack.enter_context(with_values(prepared))
        if is_streamed:
            # A sample far from the traced sizes costs as much as all others together.
            proof = replace(proof, far_draws=())
        elif weighted is not prepared:
            proof = with_reference_outputs(proof, written.draw.sizes, partial(run_draw, weighted))
            outputs, reads = run_watched(weighted, written.draw.inputs)
            written = replace(written, draw=replace(written.draw, reference=outputs), reads=reads)
        written = replace(written, proof=proof)
        traced, *sized_draws, second = _compute_draws(written, weighted, inputs, is_streamed=is_streamed)
        written = replace(written, draw=traced, proof=replace(proof, draws=tuple(sized_draws)))
        reads_values, rules = bool(written.choices), inputs.learned.rules
        if reads_values or not is_streamed:
            with with_values(weighted) as computing:
                values = input_values.run_at_varied_values(
                    computing, traced, rules, reads_values=reads_values, reads=written.reads
                )
        if not is_streamed and not reads_values and not computes_in(written.model, ir.DataType.BFLOAT16):
            values = replace(values, far=input_values.run_at_far_values(weighted, written, inputs))
        if generates_alone(prepared.part):
            text = _reference_text(weighted, inputs, is_streamed=is_streamed)
    return written, _select_telling_draw(traced, second, values), values, text


def _reference_text(prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool) -> GeneratedText | None:
    """Generate a text in PyTorch; ``None`` if impossible, with the reason in the notes of the inputs."""
    text: GeneratedText | str = "the weights are read piece by piece"
    if not is_streamed:
        text = generate_reference(prepared, inputs.seed)
    if isinstance(text, str):
        inputs.notes.append(f"Text generation was not compared: {text}.")
        return None
    return text


def _avoid_nan(file: WrittenFile, inputs: InputDraws, second: Draw) -> Draw:
    """Return the second sample, with other masks if only the file returns NaN: masks may hide whole rows.

    The masks that work are used for further samples of ``inputs``.

    Args:
        file: The written file.
        inputs: Samples of the comparison.
        second: The sample after the traced one.
    """
    if holds_nan(second.reference) or not holds_nan(file.run(second)):
        return second
    traced = file.written.draw
    for tensors, learn in inputs.other_masks(lambda drawing: _draw_second_inputs(drawing, traced)):
        try:
            with with_values(file.prepared) as weighted:
                draw = run_draw(weighted, Draw(tensors, {}, traced.sizes))
        except ExportError:
            continue
        if not holds_nan(draw.reference) and not holds_nan(file.run(draw)):
            learn()
            return draw
    return second


def _select_telling_draw(traced: Draw, second: Draw, values: input_values.VariedValues) -> Draw:
    """Return a sample whose outputs differ from the traced outputs; else the second sample."""

    def tells(draw: Draw) -> bool:
        """Return True if outputs of a sample are comparable with the traced outputs, and differ."""
        is_comparable = list(draw.reference) == list(traced.reference)
        pair = [traced.reference, draw.reference]
        return is_comparable and compare_outputs(pair, pair).has_signal

    return next(filter(tells, (second, *(varied.draw for varied in values.varied))), second)


def _name_deciding_inputs(error: VerificationError, file: WrittenFile, second: Draw) -> None:
    """Add deciding inputs and the source lines that read values to the message of an error, if known."""
    written = file.written
    comparisons = compare_outputs([written.draw.reference], [file.run(written.draw)], rounding=file.rounding)
    if comparisons.worst.is_equal:
        names = input_values.deciding_inputs(file, second)
        error.message += f"; caused by the values of {' and '.join(names)}" if names else ""
    error.message += f"; {input_values.places_words(written.choices)}" if written.choices else ""


@contextmanager
def _widen_to_float32(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> Iterator[tuple[WrittenGraph, PreparedPart, InputDraws]]:
    """Yield a file, its part and its inputs, with PyTorch computing in float32 until the block ends.

    Args:
        written: A file that computes in bfloat16, and the traced sample.
        prepared: The exported part; its model is changed in place and restored at the end.
        inputs: Generator of further inputs.
    """
    with _convert_model(prepared.model):
        part = PreparedPart(_convert_part(prepared.part), prepared.forward)
        traced = None if inputs.traced is None else _convert_tensors(inputs.traced)
        yield (
            replace(_with_references(written, part, _convert_tensors), inputs=part.part.inputs),
            part,
            replace(inputs, part=part.part, traced=traced),
        )


def _with_references(
    written: WrittenGraph,
    prepared: PreparedPart,
    convert: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = dict,
) -> WrittenGraph:
    """Return a file with outputs of PyTorch that are computed again, on converted samples."""

    def run(draw: Draw) -> Draw:
        draw = replace(draw, inputs=convert(draw.inputs))
        # Without weights, PyTorch's outputs are computed later.
        return draw if prepared.part.stored is not None else run_draw(prepared, draw)

    proof = written.proof
    proof = replace(proof, draws=tuple(map(run, proof.draws)), far_draws=tuple(map(run, proof.far_draws)))
    return replace(written, draw=run(written.draw), proof=proof)


@contextmanager
def _convert_model(model: nn.Module) -> Iterator[None]:
    """Cast the bfloat16 parameters and buffers of a model to float32 until the block ends."""
    narrow_tensors = [
        (module, name, value)
        for module in model.modules()
        for values in (module.named_parameters, module.named_buffers)
        for name, value in values(recurse=False, remove_duplicate=False)
        if value.dtype == torch.bfloat16
    ]
    # Shared tensors stay shared.
    cast = {id(value): value for _, _, value in narrow_tensors}
    for key, value in cast.items():
        widened = value.detach().float()
        cast[key] = nn.Parameter(widened, requires_grad=False) if isinstance(value, nn.Parameter) else widened
    try:
        for module, name, value in narrow_tensors:
            setattr(module, name, cast[id(value)])
        yield
    finally:
        for module, name, value in narrow_tensors:
            setattr(module, name, value)


def _convert_part(part: ModelPart) -> ModelPart:
    """Return a part whose bfloat16 inputs, states and loaded weights are float32; see :func:`_convert_model`."""
    cache = part.cache
    if cache is not None:
        cache = replace(cache, states=tuple(replace(state, dtype=_widen_dtype(state.dtype)) for state in cache.states))
    return replace(
        part,
        inputs=tuple(spec.model_copy(update={"dtype": _widen_dtype(spec.dtype)}) for spec in part.inputs),
        example=None if part.example is None else _convert_tensors(part.example),
        cache=cache,
        with_weights=_load_in_float32(part.with_weights),
        with_references=_load_in_float32(part.with_references),
    )


def _load_in_float32(load: Callable[..., nn.Module] | None) -> Callable[..., nn.Module] | None:
    """Bind a loader of weights to float32; ``None`` without a loader."""
    return None if load is None else partial(load, dtype=torch.float32)


def _widen_dtype(dtype: str) -> str:
    """Return ``float32`` for ``bfloat16``; other dtypes are unchanged."""
    return "float32" if dtype == "bfloat16" else dtype


def _convert_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert bfloat16 tensors to float32; other tensors are unchanged."""
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
