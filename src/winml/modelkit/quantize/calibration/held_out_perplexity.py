"""Perplexity of a language model on held-out calibration samples.

The samples are held out by :class:`~winml.modelkit.quantize.calibration.calibration_data.Calibration`; each is one
prompt. Task and metric are those of ``winml eval``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.evaluate.metrics import PERPLEXITY
from winml.modelkit.evaluate.tasks.texts import predicted_text
from winml.modelkit.options import Drop, drop_at
from winml.modelkit.ort.decoding.inputs import MASK, SCORES, TOKEN_IDS
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.calibration.calibration_data import Calibration
from winml.modelkit.quantize.quantized_variants import VariantEvaluator
from winml.modelkit.quantize.sensitivity_records import MetricTarget


def held_out_evaluator(calibration: Calibration, session: Session, max_drop: Drop) -> tuple[VariantEvaluator, float]:
    """Create the evaluator of variants by perplexity; return it with the perplexity of the float model.

    Args:
        calibration: Holds samples out.
        session: The float graph.
        max_drop: Maximum increase of the perplexity.

    Raises:
        UsageError: the model has no perplexity, the data does not fit its inputs, or no sample is held out.
        InputError: a file is damaged, or the model has no finite perplexity on the data.
        StageError: the model does not run.
    """

    def scores(session: Session) -> dict[str, float]:
        """Measure the perplexity of a session on the held-out texts."""
        texts = itertools.starmap(predicted_text, _score_texts(session, calibration))
        rows = [(text.surprise, len(text.best)) for text in texts]
        return {PERPLEXITY.name: PERPLEXITY.measured(rows, []).value}

    _refuse_unscored_graph(session)
    if next(calibration.held_out_samples(graph_inputs(session)), None) is None:
        raise UsageError(
            f"{opt.max_drop} perplexity: {calibration.words.partition(',')[0]} are too few to hold out a quarter",
            hint=f"Pass at least four samples with {opt.calibration_data}.",
        )
    value = scores(session)[PERPLEXITY.name]
    if not math.isfinite(value):
        raise InputError(
            f"{session.name}: its perplexity on the data is {value}",
            hint=f"Pass texts of several tokens in the language of the model with {opt.calibration_data}.",
        )
    target = MetricTarget(PERPLEXITY.name, value + drop_at(max_drop, value), PERPLEXITY.is_higher_better)
    return VariantEvaluator(target, scores, {"max_drop": max_drop, "data": calibration.request()}), value


def _refuse_unscored_graph(session: Session) -> None:
    """Refuse a graph without token ids as input or scores as output.

    Raises:
        UsageError: names inputs and outputs.
    """
    inputs, outputs = session.inputs, session.outputs
    if TOKEN_IDS not in inputs or SCORES not in outputs:
        raise UsageError(
            f"{opt.max_drop} perplexity: {session.name} takes {', '.join(inputs)} and returns {', '.join(outputs)}; "
            f"perplexity requires {TOKEN_IDS} and {SCORES}",
            hint=f"Use {opt.budget} smallest with {opt.min_sqnr}, such as 25.",
        )


def _score_texts(session: Session, calibration: Calibration) -> Iterator[tuple[Array, Array]]:
    """Run the held-out texts; yield scores and tokens of each text, without padding.

    Raises:
        UsageError: the model does not return scores of every token.
    """
    for feeds in calibration.held_out_samples(graph_inputs(session)):
        scores = session.run(feeds, [SCORES])[SCORES]
        if scores.shape[:2] != feeds[TOKEN_IDS].shape:
            raise UsageError(
                f"{opt.max_drop} perplexity: {TOKEN_IDS} is {list(feeds[TOKEN_IDS].shape)}, and {SCORES} is "
                f"{list(scores.shape)}; perplexity requires scores of every token",
                hint=f"Export the model with {opt.logits} all, or use {opt.budget} smallest with {opt.min_sqnr}.",
            )
        yield from zip(*_remove_padding(scores, feeds), strict=True)


def _remove_padding(scores: Array, feeds: Arrays) -> tuple[list[Array], list[Array]]:
    """Return scores and tokens of each row without padding."""
    tokens = feeds[TOKEN_IDS]
    length = tokens.shape[1]
    masks = feeds[MASK][:, -length:] > 0 if MASK in feeds else np.ones(tokens.shape, bool)
    return (
        [row[mask] for row, mask in zip(scores, masks, strict=True)],
        [row[mask] for row, mask in zip(tokens, masks, strict=True)],
    )
