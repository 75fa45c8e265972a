"""Compares a written file with PyTorch: on the traced inputs, on random inputs, at different values and sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.shape_inference
import torch
from torch import nn

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples, measure_fidelity
from winml.modelkit.compare.files import refuse_below_minimum_sqnr
from winml.modelkit.compare.outputs import Rounding, VerificationInfo, compare_outputs, constant_outputs
from winml.modelkit.compare.verification.failure_explanation import refuse_outputs_by_value
from winml.modelkit.compare.verification.far_values import (
    is_rounded_in_pytorch,
    refuse_wrong_far_values,
    run_at_far_values,
)
from winml.modelkit.compare.verification.float32_sides import comparable_graph, in_float32
from winml.modelkit.compare.verification.generated_text import GeneratedText, generate_reference, generates_alone
from winml.modelkit.compare.verification.generation import compare_generation
from winml.modelkit.compare.verification.input_draws import InputDraws, holds_nan
from winml.modelkit.compare.verification.reference_run import PreparedPart, dtypes_inside, with_values
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.compare.verification.stable_draws import (
    compare_stable_draws,
    has_uncertain_scores,
    is_decided_by_rounding,
    is_decided_by_ties,
    rankings,
)
from winml.modelkit.compare.verification.varied_sizes import Draw, WrittenGraph, compare_at_varied_sizes, run_draw
from winml.modelkit.compare.verification.varied_values import (
    Varied,
    VariedValues,
    checked_values,
    deciding_inputs,
    places_words,
    refuse_frozen_values,
    refuse_unread_values,
    run_at_varied_values,
    settled_assumptions,
)
from winml.modelkit.compare.words import difference_words
from winml.modelkit.errors import ExportError, StageError, VerificationError
from winml.modelkit.models.tensors import to_torch
from winml.modelkit.onnx.assumptions import constant_output
from winml.modelkit.onnx.bfloat16 import computes_in_bfloat16
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.operators import probability_outputs

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

PIECE_BYTES = 1 << 28
"""Weights of a piece, those of bfloat16 as float32. Chosen: half of what the libraries take, so that the peak remains
below 1.5 GB unless one weight is larger."""

_BFLOAT16 = "bfloat16"
"""What float32 outputs are computed in if constants of the graph were rounded to bfloat16, as PyTorch in float32 rounds
none. Measured on Llamas with random weights: 5e-4 with 12 layers, 9e-3 with 32, by a scale of attention that is off by
1e-4."""


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
        return _verify(written, prepared, inputs, advice, (), is_streamed=is_streamed)
    _refuse_mixed_types(written.path)
    with in_float32(written, prepared, inputs) as (written, prepared, inputs):
        try:
            verification = _verify(written, prepared, inputs, advice, (_BFLOAT16,), is_streamed=is_streamed)
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
            hint="Export with --dynamo, or in another type: --dtype fp32. --no-verify writes the file as it is.",
            is_graph_wrong=True,
        ) from error


def _verify(
    written: WrittenGraph,
    prepared: PreparedPart,
    inputs: InputDraws,
    advice: str,
    computed_in: Sequence[str],
    *,
    is_streamed: bool,
) -> VerificationInfo:
    outputs_of = _with_streamed_outputs if is_streamed else _with_reference_outputs
    written, second, values, text = outputs_of(written, prepared, inputs)
    written = replace(written, assumed=settled_assumptions(written, values.reads))
    refuse_outputs_by_value((written.draw, second))
    dtypes = (*dtypes_inside(prepared.part.module, written.draw.reference), *computed_in)
    rounding = Rounding(dtypes, lambda: probability_outputs(written.model.graph))
    file = _File(written, prepared.model)
    if is_streamed:
        file.run_beforehand([written.draw, second, *written.proof.draws, *(item.draw for item in values.varied)])
    else:
        prepared = file.closed_before_weights(prepared)
    try:
        second = _without_nan(prepared, inputs, written.draw, second, file.run)
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
            _name_deciding_inputs(error, prepared, written, second, file.run, rounding)
        raise

    def is_rounding(varied: Varied, outputs: Collection[str]) -> bool:
        if is_decided_by_rounding(prepared, varied.draw, outputs, rounding):
            return True
        return varied.are_ties and is_decided_by_ties(
            prepared, varied.draw, written.draw, outputs, file.run(varied.draw)
        )

    compared = refuse_frozen_values(written, values, file.run, rounding, is_rounding)
    if values.far is not None:

        def is_rounding_far(varied: Varied, outputs: Collection[str]) -> bool:
            return is_rounded_in_pytorch(prepared, varied.draw, outputs, rounding) or is_rounding(varied, outputs)

        refuse_wrong_far_values(written, values.far, file.run, rounding, is_rounding_far)
    refuse_unread_values(written, values)

    def outputs_at(sizes: Mapping[str, int]) -> Draw:
        with with_values(prepared) as weighted:
            return inputs.accepted(
                lambda drawing: drawing.draw(3, sizes),
                lambda tensors: run_draw(weighted, Draw(tensors, {}, sizes)),
            )

    at_other_sizes = compare_at_varied_sizes(written, rounding, file.answer, outputs_at, advice=advice)
    checked = checked_values(written, (second, *written.proof.draws), values, compared)
    generation = None
    if text is not None:
        generation = compare_generation(
            prepared.part, text, file.run, rounding, lambda draw: has_uncertain_scores(prepared, draw, rounding)
        )
    comparisons = (*verification.comparisons, *at_other_sizes)
    # At other sizes, other shapes: an output that follows these alone is compared there.
    answers = [draw.reference for draw in (written.draw, second, *written.proof.draws)]
    constant = constant_outputs([*answers, *(varied.draw.reference for varied in values.varied)])
    return replace(
        verification,
        is_streamed=is_streamed,
        comparisons=comparisons,
        values=checked,
        generation=generation,
        assumed=(*written.assumed, *map(constant_output, constant)),
        constant=constant,
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
    answered = (_streamed_draws if is_streamed else _held_draws)(written, prepared, inputs, judged)
    count = len(answered) - len(judged)
    draws = answered[:count]
    refuse_outputs_by_value((draws[0], draws[-1]))
    file = _File(written, prepared.model)
    outputs = file.run_in_pieces(answered, piece_bytes) if is_streamed else [file.run(draw) for draw in answered]

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
    outputs = _File(written, weighted.model, adapter).run(draw)
    if least_sqnr_db is not None:
        fidelity = measure_fidelity([draw.reference], [outputs], least_sqnr_db)
        refuse_below_minimum_sqnr(fidelity, f"the model in PyTorch with adapter {name} merged", draw.inputs)
        return
    dtypes = dtypes_inside(weighted.part.module, draw.reference)
    rounding = Rounding(dtypes, lambda: probability_outputs(written.model.graph))
    verification = compare_outputs([draw.reference], [outputs], rounding=rounding)
    if not all(item.is_equal for item in verification.comparisons):
        raise VerificationError(
            f"with adapter {name}, the outputs of the file differ from PyTorch's with the adapter merged: "
            f"{difference_words(verification)}",
            hint=f"Merge it: --adapter PATH without {name}=. --no-verify writes the file anyway.",
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


def _held_draws(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, samples: Sequence[Draw]
) -> list[Draw]:
    """Return what the model answers to all draws of an export, a new one, and samples, where it has its values."""
    second = _second_draw(prepared, inputs, written.draw)
    return [written.draw, *written.proof.draws, second, *(run_draw(prepared, draw) for draw in samples)]


def _second_draw(prepared: PreparedPart, inputs: InputDraws, traced: Draw) -> Draw:
    """Return a draw of the traced sizes that the model takes, and its outputs.

    If masks hide something in the traced inputs they hide nothing here, and the other way round: many models take
    another path when there is no padding.
    """
    return inputs.accepted(
        lambda drawing: _draw_second(drawing, traced),
        lambda tensors: run_draw(prepared, Draw(tensors, {}, traced.sizes)),
    )


def _draw_second(drawing: InputDraws, traced: Draw) -> Mapping[str, torch.Tensor]:
    return drawing.draw(2, with_padding=not drawing.hides(traced.inputs))


def _streamed_draws(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, samples: Sequence[Draw]
) -> list[Draw]:
    """Return the same, where its parameters have no values."""
    traced = written.draw
    # Without values the model shows whether it takes the inputs, though not whether it answers with numbers.
    second = _second_draw(prepared, inputs, traced)
    from winml.modelkit.compare.verification.streamed_reference import streamed_outputs  # by need

    draws = streamed_outputs(prepared, [traced, *written.proof.draws, second, *samples])
    place = len(written.proof.draws) + 1
    if holds_nan(draws[place].reference):
        draws[place] = inputs.accepted(
            lambda drawing: _draw_second(drawing, traced),
            lambda tensors: streamed_outputs(prepared, [Draw(tensors, {}, traced.sizes)])[0],
        )
    return draws


def _with_reference_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> tuple[WrittenGraph, Draw, VariedValues, GeneratedText | None]:
    """Return the file with PyTorch's answer to every draw, a second draw at the traced sizes, other values and a text.

    The weights of a model that was traced without them are in memory only here, so that ONNX Runtime finds it free.
    """
    with with_values(prepared) as weighted:
        if weighted is not prepared:
            draws = tuple(run_draw(weighted, draw) for draw in written.proof.draws)
            far_draws = tuple(run_draw(weighted, draw) for draw in written.proof.far_draws)
            draw = run_draw(weighted, written.draw)
            written = replace(written, draw=draw, proof=replace(written.proof, draws=draws, far_draws=far_draws))
        second = _second_draw(weighted, inputs, written.draw)
        values = run_at_varied_values(
            weighted, written.draw, inputs.learned.rules, reads_values=bool(written.choices), reads=written.reads
        )
        if not written.choices and not computes_in_bfloat16(written.model):
            values = replace(values, far=run_at_far_values(weighted, written, inputs))
        text = None
        if generates_alone(prepared.part):
            generated = generate_reference(weighted, inputs.seed)
            if isinstance(generated, str):
                inputs.notes.append(f"Text generation was not compared: {generated}.")
            else:
                text = generated
    return written, _telling_draw(written.draw, second, values), values, text


def _with_streamed_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> tuple[WrittenGraph, Draw, VariedValues, None]:
    """Return the same where each weight is read once for all draws; no text, since each token reads all weights again.

    Other values of single inputs are tried where Python read values.
    """
    traced, *draws, second = _streamed_draws(written, prepared, inputs, ())
    # A draw far from the traced sizes costs as much as all others together.
    written = replace(written, draw=traced, proof=replace(written.proof, draws=tuple(draws), far_draws=()))
    values = VariedValues()
    if written.choices:
        with with_values(prepared) as streamed:
            values = run_at_varied_values(streamed, traced, inputs.learned.rules, reads_values=True)
    if generates_alone(prepared.part):
        inputs.notes.append("Text generation was not compared: the weights are read piece by piece.")
    return written, _telling_draw(traced, second, values), values, None


def _without_nan(
    prepared: PreparedPart,
    inputs: InputDraws,
    traced: Draw,
    second: Draw,
    run_file: Callable[[Draw], Arrays],
) -> Draw:
    """Return the second draw, with other masks where the file alone answers NaN to it: they may hide whole rows."""
    if holds_nan(second.reference) or not holds_nan(run_file(second)):
        return second
    for tensors, learn in inputs.other_masks(lambda drawing: _draw_second(drawing, traced)):
        try:
            with with_values(prepared) as weighted:
                draw = run_draw(weighted, Draw(tensors, {}, traced.sizes))
        except ExportError:
            continue
        if not holds_nan(draw.reference) and not holds_nan(run_file(draw)):
            learn()
            return draw
    return second


def _telling_draw(traced: Draw, second: Draw, values: VariedValues) -> Draw:
    """Return the second draw; where the model answers it as it does the traced one, another that it does not."""

    def tells(draw: Draw) -> bool:
        is_comparable = list(draw.reference) == list(traced.reference)
        pair = [traced.reference, draw.reference]
        return is_comparable and compare_outputs(pair, pair).has_signal

    return next(filter(tells, (second, *(varied.draw for varied in values.varied))), second)


def _name_deciding_inputs(
    error: VerificationError,
    prepared: PreparedPart,
    written: WrittenGraph,
    second: Draw,
    run_file: Callable[[Draw], Arrays],
    rounding: Rounding,
) -> None:
    """Add to an error which inputs the answers go apart by, and which lines read values, as far as that is known."""
    traced = written.draw
    if compare_outputs([traced.reference], [run_file(traced)], rounding=rounding).worst.is_equal:
        names = deciding_inputs(prepared, traced, second, run_file, rounding)
        error.message += f"; caused by the values of {' and '.join(names)}" if names else ""
    error.message += f"; {places_words(written.choices)}" if written.choices else ""


class _File:
    """A file in ONNX Runtime, opened when it is first run."""

    def __init__(self, written: WrittenGraph, model: nn.Module, adapter: Path | None = None) -> None:
        self._path, self._model, self._adapter = written.path, model, adapter
        self._has_single_rows = takes_single_rows(written.model)
        self._is_widened = adapter is None and computes_in_bfloat16(written.model)
        self._session: Session | None = None
        self._known: dict[int, tuple[Draw, Arrays]] = {}
        self._is_in_pieces = False
        self._weighted: Callable[[], AbstractContextManager[PreparedPart]] | None = None

    def closed_before_weights(self, prepared: PreparedPart) -> PreparedPart:
        """Return the part such that its weights are loaded only after the file is closed: one of both is in memory."""
        self._weighted = lambda: with_values(prepared)
        load = prepared.part.with_weights
        if load is None:
            return prepared

        def load_alone() -> nn.Module:
            self._session = None
            return load()

        return replace(prepared, part=replace(prepared.part, with_weights=load_alone))

    def answer(self, draw: Draw) -> Arrays:
        """Return the answers of the file to the inputs of a draw.

        Raises:
            StageError: ONNX Runtime cannot run it.
        """
        if (known := self._known.get(id(draw))) is not None:
            return known[1]
        if self._is_in_pieces:
            return self._as_ranked(draw, self._answers_in_pieces([draw], PIECE_BYTES)[0])
        return self._answer_whole(draw)

    def _answer_whole(self, draw: Draw) -> Arrays:
        from winml.modelkit.ort.graph_sessions import session_of_graph
        from winml.modelkit.ort.sessions import Session

        if self._session is None and self._is_widened:
            self._session = session_of_graph(comparable_graph(self._path), self._path)
        elif self._session is None:
            self._session = Session(self._path, adapter=self._adapter)
        return self._as_ranked(draw, joined_rows([self._session.run(feeds) for feeds in self._feeds(draw)]))

    def _as_ranked(self, draw: Draw, answers: Arrays) -> Arrays:
        """Return answers with PyTorch's places of ranked values where theirs lead to equal values, in another order."""
        differing = [
            name
            for name, expected in draw.reference.items()
            if expected.dtype.kind in "iu" and expected.shape == answers[name].shape
            if not np.array_equal(expected, answers[name])
        ]
        if not differing or self._weighted is None:
            return answers
        with self._weighted() as weighted:
            found = rankings(weighted, draw.inputs)
        return {
            name: draw.reference[name]
            if name in differing and any(item.leads_alike(draw.reference[name], value) for item in found)
            else value
            for name, value in answers.items()
        }

    def run(self, draw: Draw) -> Arrays:
        """Return the same.

        Raises:
            VerificationError: ONNX Runtime cannot run it.
        """
        with self._failures_as_unverified():
            return self.answer(draw)

    def run_beforehand(self, draws: Sequence[Draw]) -> None:
        """Run several draws in pieces, each piece once for all; further ones are run in pieces when they come."""
        self._is_in_pieces = True
        try:
            outputs = self.run_in_pieces(draws, PIECE_BYTES)
        except VerificationError:
            # Run one by one, the draw that fails is known.
            return
        self._known = {
            id(draw): (draw, self._as_ranked(draw, output)) for draw, output in zip(draws, outputs, strict=True)
        }

    def run_in_pieces(self, draws: Sequence[Draw], piece_bytes: int) -> list[Arrays]:
        """Return the answers to several draws, with no more weights in memory at a time than a piece has.

        Raises:
            VerificationError: ONNX Runtime cannot run it.
        """
        with self._failures_as_unverified():
            return self._answers_in_pieces(draws, piece_bytes)

    def _answers_in_pieces(self, draws: Sequence[Draw], piece_bytes: int) -> list[Arrays]:
        from winml.modelkit.compare.verification.file_pieces import FilePieces  # by need

        pieces = FilePieces(self._path, piece_bytes)
        if not pieces.count:
            return [self._answer_whole(draw) for draw in draws]
        fed = [self._feeds(draw) for draw in draws]
        outputs = iter(pieces.run([feeds for rows in fed for feeds in rows]))
        return [joined_rows(list(islice(outputs, len(rows)))) for rows in fed]

    def _feeds(self, draw: Draw) -> list[Arrays]:
        """Return what the file is fed for a draw, one after the other."""
        return feeds_by_rows(draw.arrays) if self._has_single_rows else [draw.arrays]

    @contextmanager
    def _failures_as_unverified(self) -> Iterator[None]:
        try:
            yield
        except StageError as error:
            raise VerificationError(
                f"cannot verify: {error.message.replace(str(self._path), 'the file')}",
                hint=f"{_failure_hint(error.message, self._model)}; --no-verify writes the file without comparing.",
                is_graph_wrong=True,
            ) from error


_MISSING_KERNEL = ("NOT_IMPLEMENTED", "Could not find an implementation", "Type Error", "not implemented")
"""Specified: how ONNX Runtime words that it has no kernel for an operator of these types."""


def _failure_hint(reason: str, model: nn.Module) -> str:
    """Return what may be wrong where ONNX Runtime fails, and what helps; kernels are named only where it lacks one."""
    if "Only 4b and 8b quantization is supported" in reason:
        return "2-bit weights need onnxruntime 1.24 or newer (Python 3.11 or newer)"
    if not any(words in reason for words in _MISSING_KERNEL):
        return (
            "A value or shape is not valid for the node: often a size or value that the trace recorded as a constant. "
            "Compute it with tensors in that module's forward"
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if small := " and ".join(sorted(dtypes & {"bfloat16", "float16", "float64"})):
        return f"The weights are {small}, for which its CPU has few kernels: --dtype fp32 casts them"
    return "Its CPU has no kernel for this operator with these dtypes"
