"""Compares a written file with PyTorch: on the traced inputs, on random inputs, at different values and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnx.shape_inference
import torch
from torch import nn

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples, measure_fidelity
from winml.modelkit.compare.files import refuse_below_minimum_sqnr
from winml.modelkit.compare.outputs import VerificationInfo, compare_outputs, constant_outputs
from winml.modelkit.compare.verification import input_values
from winml.modelkit.compare.verification.file_run import WrittenFile
from winml.modelkit.compare.verification.generated_text import GeneratedText, generate_reference, generates_alone
from winml.modelkit.compare.verification.generation import compare_generation
from winml.modelkit.compare.verification.input_draws import InputDraws, holds_nan
from winml.modelkit.compare.verification.reference_run import PreparedPart, with_values
from winml.modelkit.compare.verification.rounding import compare_stable_draws, has_uncertain_scores
from winml.modelkit.compare.verification.sizes import Draw, WrittenGraph, compare_at_varied_sizes, run_draw
from winml.modelkit.compare.words import difference_words
from winml.modelkit.errors import ExportError, VerificationError, opt
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_torch
from winml.modelkit.onnx.assumptions import constant_output
from winml.modelkit.onnx.bfloat16 import computes_in_bfloat16
from winml.modelkit.onnx.files.reading import read_structure

PIECE_BYTES = 1 << 28
"""Weights of a piece, those of bfloat16 as float32. Chosen: half of what the libraries take, so that the peak remains
below 1.5 GB unless one weight is larger."""


def verify_written_file(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, advice: str = "", is_streamed: bool = False
) -> VerificationInfo:
    """Compare a written file with PyTorch; both compute in float32 where the file computes in bfloat16.

    Args:
        written: The file, and what was traced.
        prepared: The part it was made from.
        inputs: Further inputs.
        advice: What to try first where a dynamic dimension froze.
        is_streamed: Whether weights are read piece by piece on both sides, for a part that was traced without them. No
            text is generated then: each token would read all weights again.

    Raises:
        VerificationError: they disagree, or the comparison would show nothing.
    """
    if is_streamed:
        from winml.modelkit.compare.verification.streamed_reference import with_streaming_loader  # by need

        prepared = with_streaming_loader(prepared)
    if not computes_in_bfloat16(written.model):
        return _verify(written, prepared, inputs, advice, is_streamed=is_streamed)
    _refuse_mixed_types(written.path)
    with _in_float32(written, prepared, inputs) as (written, prepared, inputs):
        try:
            verification = _verify(written, prepared, inputs, advice, is_streamed=is_streamed)
        except VerificationError as error:
            # Module by module the file is not run in float32.
            error.inputs = None
            raise
        return replace(verification, in_float32=True)


def _refuse_mixed_types(path: Path) -> None:
    """Refuse a file whose nodes read float32 beside bfloat16: run in float32, it would look right.

    Raises:
        VerificationError: names the node.
    """
    try:
        onnx.shape_inference.infer_shapes(read_structure(path), check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        if "inconsistent type" not in str(error):
            return  # what it cannot infer is no matter here
        raise VerificationError(
            f"cannot verify: the file is not valid ONNX: {error}",
            hint=f"Export with {opt.dynamo}, or in another type: {opt.dtype} fp32. {opt.no_verify} writes the file as "
            "it is.",
            is_graph_wrong=True,
        ) from error


def _verify(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, advice: str, *, is_streamed: bool
) -> VerificationInfo:
    written, second, values, text = _with_reference_outputs(written, prepared, inputs, is_streamed=is_streamed)
    written = replace(written, assumed=input_values.settled_assumptions(written, values.reads))
    _refuse_outputs_by_value((written.draw, second))
    file = WrittenFile(written, prepared, piece_bytes=PIECE_BYTES if is_streamed else None)
    if is_streamed:
        file.run_beforehand([written.draw, second, *written.proof.draws, *(item.draw for item in values.varied)])
    else:
        file.close_before_weights()
    prepared, rounding = file.prepared, file.rounding
    try:
        second = _without_nan(file, inputs, second)
        verification = compare_stable_draws(
            prepared,
            (written.draw, second),
            rounding=rounding,
            # The third is for other sizes.
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

    at_other_sizes = compare_at_varied_sizes(file, outputs_at, advice=advice)
    # At other sizes, other shapes: an output that follows these alone is compared there.
    draws = (second, *written.proof.draws)
    answers = [draw.reference for draw in (written.draw, *draws, *(varied.draw for varied in values.varied))]
    constant = constant_outputs(answers)
    checked = input_values.checked_values(written, draws, values, compared)
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
    """Refuse to compare where it depends on the values of the inputs which outputs a model returns.

    Raises:
        VerificationError: names the outputs of both draws.
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
    least_sqnr_db: float,
    piece_bytes: int,
    samples: tuple[Sequence[Arrays], QualitySamples] | None,
) -> FidelityInfo:
    """Measure how much of PyTorch's answers is left in a written file that computes with fewer bits.

    The weights of a model that was traced without them are not loaded: both sides hold a piece of them at a time.

    Args:
        written: The file, and what was traced; its dynamic dimensions are tried at other sizes.
        prepared: The part it was made from.
        inputs: Further inputs.
        least_sqnr_db: Ratio in decibels that every output has to reach.
        piece_bytes: Size of the weights from which the file is run in pieces of so much, where they are not loaded.
        samples: What quality is judged on, beside the draws of the export, and what it is; None: the draws alone.

    Raises:
        VerificationError: an output does not reach the ratio, or ONNX Runtime cannot run the file.
    """
    is_streamed = prepared.part.with_references is not None
    arrays, about = samples or ((), None)
    judged = _accepted_samples(prepared, arrays, written.draw)
    answered = _draws_with_outputs(written, prepared, inputs, judged, is_streamed=is_streamed)
    count = len(answered) - len(judged)
    draws = answered[:count]
    _refuse_outputs_by_value((draws[0], draws[-1]))
    file = WrittenFile(written, prepared, piece_bytes=piece_bytes if is_streamed else None)
    outputs = file.run_all(answered)

    def judge(compared: slice, about: QualitySamples | None) -> FidelityInfo:
        references = [draw.reference for draw in answered[compared]]
        fidelity = measure_fidelity(references, outputs[compared], least_sqnr_db, about)
        fidelity = replace(fidelity, is_streamed=is_streamed)
        refuse_below_minimum_sqnr(fidelity, "the model in PyTorch", answered[compared][0].inputs)
        return fidelity

    try:
        fidelity = judge(slice(count), None)
    except VerificationError as error:
        if _differs_at_other_sizes(draws, outputs, least_sqnr_db):
            error.is_graph_wrong, error.is_quality = True, False
        raise
    return judge(slice(count, None), about) if judged and about is not None else fidelity


def _differs_at_other_sizes(draws: Sequence[Draw], outputs: Sequence[Arrays], least_sqnr_db: float) -> bool:
    """Return True if outputs reach the minimum at the traced sizes only, and are wrong at others: an axis is frozen."""
    at_traced = [draw.sizes == draws[0].sizes for draw in draws]

    def measured(is_traced: bool) -> FidelityInfo | None:  # of two groups
        places = [place for place, item in enumerate(at_traced) if item == is_traced]
        references = [draws[place].reference for place in places]
        return measure_fidelity(references, [outputs[place] for place in places], least_sqnr_db) if places else None

    traced, others = measured(True), measured(False)
    return traced is not None and others is not None and traced.is_near and others.worst.sqnr_db < 0


def verify_with_adapter(
    written: WrittenGraph, weighted: PreparedPart, adapter: Path, name: str, least_sqnr_db: float | None
) -> None:
    """Compare a file in which an adapter is active with PyTorch, on the traced inputs.

    Args:
        written: The file, and what was traced.
        weighted: The part with its values, the adapter merged.
        adapter: The adapter, in ONNX Runtime's format.
        name: What it is called.
        least_sqnr_db: Ratio in decibels that every output has to reach; None: it has to be equal.

    Raises:
        VerificationError: they disagree.
    """
    draw = run_draw(weighted, written.draw)
    file = WrittenFile(written, weighted, adapter=adapter)
    outputs = file.run(draw)
    if least_sqnr_db is not None:
        fidelity = measure_fidelity([draw.reference], [outputs], least_sqnr_db)
        refuse_below_minimum_sqnr(fidelity, f"the model in PyTorch with adapter {name} merged", draw.inputs)
        return
    verification = compare_outputs([draw.reference], [outputs], rounding=file.rounding)
    if not all(item.is_equal for item in verification.comparisons):
        raise VerificationError(
            f"with adapter {name}, the outputs of the file differ from PyTorch's with the adapter merged: "
            f"{difference_words(verification)}",
            hint=f"Merge it: {opt.adapter} PATH without {name}=. {opt.no_verify} writes the file anyway.",
        )


def _accepted_samples(prepared: PreparedPart, samples: Sequence[Arrays], traced: Draw) -> list[Draw]:
    """Return samples as draws without answers; none where the model does not take the first."""
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


def _second_draw(inputs: InputDraws, traced: Draw, run: Callable[[Draw], Draw]) -> Draw:
    """Return a draw of the traced sizes that the model takes, and its outputs.

    If masks hide something in the traced inputs they hide nothing here, and the other way round: many models take
    another path when there is no padding.
    """
    return inputs.accepted(
        lambda drawing: _draw_second(drawing, traced),
        lambda tensors: run(Draw(tensors, {}, traced.sizes)),
    )


def _draw_second(drawing: InputDraws, traced: Draw) -> Mapping[str, torch.Tensor]:
    return drawing.draw(2, with_padding=not drawing.hides(traced.inputs))


def _draws_with_outputs(
    written: WrittenGraph,
    prepared: PreparedPart,
    inputs: InputDraws,
    samples: Sequence[Draw] = (),
    *,
    is_streamed: bool,
) -> list[Draw]:
    """Return the traced draw, draws at other sizes, a second draw and samples, all with the outputs of PyTorch."""
    traced = written.draw
    # Without values the model shows whether it takes the inputs, though not whether it answers with numbers.
    second = _second_draw(inputs, traced, partial(run_draw, prepared))
    if not is_streamed:
        return [traced, *written.proof.draws, second, *(run_draw(prepared, draw) for draw in samples)]
    from winml.modelkit.compare.verification.streamed_reference import streamed_outputs  # by need

    draws = streamed_outputs(prepared, [traced, *written.proof.draws, second, *samples])
    place = len(written.proof.draws) + 1
    if holds_nan(draws[place].reference):
        draws[place] = _second_draw(inputs, traced, lambda draw: streamed_outputs(prepared, [draw])[0])
    return draws


def _with_reference_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool
) -> tuple[WrittenGraph, Draw, input_values.VariedValues, GeneratedText | None]:
    """Return the file with PyTorch's answer to every draw, a second draw at the traced sizes, other values and a text.

    The weights of a model that was traced without them are in memory only here, so that ONNX Runtime finds it free.
    Where they are streamed, each weight is read once for all draws. Other values of single inputs are tried then where
    Python read values, and no text is generated: each token would read all weights again.
    """
    proof, values = written.proof, input_values.VariedValues()
    text: GeneratedText | None = None
    with ExitStack() as stack:
        weighted = prepared if is_streamed else stack.enter_context(with_values(prepared))
        if is_streamed:
            # A draw far from the traced sizes costs as much as all others together.
            proof = replace(proof, far_draws=())
        elif weighted is not prepared:
            draws, far_draws = (
                [run_draw(weighted, draw) for draw in several] for several in (proof.draws, proof.far_draws)
            )
            proof = replace(proof, draws=tuple(draws), far_draws=tuple(far_draws))
            written = replace(written, draw=run_draw(weighted, written.draw))
        written = replace(written, proof=proof)
        traced, *others, second = _draws_with_outputs(written, weighted, inputs, is_streamed=is_streamed)
        written = replace(written, draw=traced, proof=replace(proof, draws=tuple(others)))
        reads_values, rules = bool(written.choices), inputs.learned.rules
        if reads_values or not is_streamed:
            with with_values(weighted) as computing:
                values = input_values.run_at_varied_values(
                    computing, traced, rules, reads_values=reads_values, reads=written.reads
                )
        if not is_streamed and not reads_values and not computes_in_bfloat16(written.model):
            values = replace(values, far=input_values.run_at_far_values(weighted, written, inputs))
        if generates_alone(prepared.part):
            text = _generated_text(weighted, inputs, is_streamed=is_streamed)
    return written, _telling_draw(traced, second, values), values, text


def _generated_text(prepared: PreparedPart, inputs: InputDraws, *, is_streamed: bool) -> GeneratedText | None:
    text: GeneratedText | str = "the weights are read piece by piece"
    if not is_streamed:
        text = generate_reference(prepared, inputs.seed)
    if isinstance(text, str):
        inputs.notes.append(f"Text generation was not compared: {text}.")
        return None
    return text


def _without_nan(file: WrittenFile, inputs: InputDraws, second: Draw) -> Draw:
    """Return the second draw, with other masks where the file alone answers NaN to it: they may hide whole rows."""
    if holds_nan(second.reference) or not holds_nan(file.run(second)):
        return second
    traced = file.written.draw
    for tensors, learn in inputs.other_masks(lambda drawing: _draw_second(drawing, traced)):
        try:
            with with_values(file.prepared) as weighted:
                draw = run_draw(weighted, Draw(tensors, {}, traced.sizes))
        except ExportError:
            continue
        if not holds_nan(draw.reference) and not holds_nan(file.run(draw)):
            learn()
            return draw
    return second


def _telling_draw(traced: Draw, second: Draw, values: input_values.VariedValues) -> Draw:
    """Return the second draw; where the model answers it as it does the traced one, another that it does not."""

    def tells(draw: Draw) -> bool:
        is_comparable = list(draw.reference) == list(traced.reference)
        pair = [traced.reference, draw.reference]
        return is_comparable and compare_outputs(pair, pair).has_signal

    return next(filter(tells, (second, *(varied.draw for varied in values.varied))), second)


def _name_deciding_inputs(error: VerificationError, file: WrittenFile, second: Draw) -> None:
    """Add to an error which inputs the answers go apart by, and which lines read values, as far as that is known."""
    written = file.written
    comparisons = compare_outputs([written.draw.reference], [file.run(written.draw)], rounding=file.rounding)
    if comparisons.worst.is_equal:
        names = input_values.deciding_inputs(file, second)
        error.message += f"; caused by the values of {' and '.join(names)}" if names else ""
    error.message += f"; {input_values.places_words(written.choices)}" if written.choices else ""


@contextmanager
def _in_float32(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> Iterator[tuple[WrittenGraph, PreparedPart, InputDraws]]:
    """Yield a file, its part and its inputs such that PyTorch computes in float32, for the time of the block.

    Args:
        written: A file that computes in bfloat16, and what was traced.
        prepared: The part it was made from; its model is changed in place and restored at the end.
        inputs: Further inputs.
    """
    with _float32_model(prepared.model):
        part = PreparedPart(_float32_part(prepared.part), prepared.forward)

        def widened(draw: Draw) -> Draw:
            draw = replace(draw, inputs=_float32_tensors(draw.inputs))
            # Without values, what PyTorch answers is computed later.
            return draw if part.part.stored is not None else run_draw(part, draw)

        proof = written.proof
        proof = replace(proof, draws=tuple(map(widened, proof.draws)), far_draws=tuple(map(widened, proof.far_draws)))
        traced = None if inputs.traced is None else _float32_tensors(inputs.traced)
        yield (
            replace(written, inputs=part.part.inputs, draw=widened(written.draw), proof=proof),
            part,
            replace(inputs, part=part.part, traced=traced),
        )


@contextmanager
def _float32_model(model: nn.Module) -> Iterator[None]:
    """Cast the bfloat16 parameters and buffers of a model to float32 for the time of the block."""
    held = [
        (module, name, value)
        for module in model.modules()
        for values in (module.named_parameters, module.named_buffers)
        for name, value in values(recurse=False, remove_duplicate=False)
        if value.dtype == torch.bfloat16
    ]
    # What is shared is shared still.
    cast = {id(value): value for _, _, value in held}
    for key, value in cast.items():
        widened = value.detach().float()
        cast[key] = nn.Parameter(widened, requires_grad=False) if isinstance(value, nn.Parameter) else widened
    try:
        for module, name, value in held:
            setattr(module, name, cast[id(value)])
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _float32_part(part: ModelPart) -> ModelPart:
    """Return a part whose bfloat16 inputs, states and loaded weights are float32; see :func:`_float32_model`."""
    cache = part.cache
    if cache is not None:
        cache = replace(cache, states=tuple(replace(state, dtype=_float32_name(state.dtype)) for state in cache.states))
    return replace(
        part,
        inputs=tuple(spec.model_copy(update={"dtype": _float32_name(spec.dtype)}) for spec in part.inputs),
        example=None if part.example is None else _float32_tensors(part.example),
        cache=cache,
        with_weights=_loading_float32(part.with_weights),
        with_references=_loading_float32(part.with_references),
    )


def _loading_float32(load: Callable[..., nn.Module] | None) -> Callable[..., nn.Module] | None:
    return None if load is None else partial(load, dtype=torch.float32)


def _float32_name(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _float32_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
