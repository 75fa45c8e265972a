"""Similarity of the outputs of a lossy graph to reference outputs.

Compares computed outputs over all samples together: the power of the signal relative to the error
(signal-to-quantization-noise ratio), the direction (cosine), and the error relative to the signal. Wide integers and
booleans are symbols, such as indices and labels, measured by the share of equal values. Positions of padding are left
out. Runs neither side.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import TEXT_KINDS, finite_values, silent_kinds, silent_words
from winml.modelkit.compare.quality_minimum import PREDICTIONS, QualityMinimum
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.words import MOST_DB

_SYMBOL_BYTES = 4
"""Chosen: integers of at least this size are symbols. Specified by ONNX: indices are int64; images are uint8."""

QualitySource = Literal["processor", "dataset", "random", "file"]
"""Origin of samples: the tokenizer or processor of the model, a dataset, random values, or arrays of the user."""
LOWER, UPPER = 5, 95
"""Percentiles over the samples that bound the interval of an SQNR."""
SCORE_RANKS = (2, 3)
"""Numbers of dimensions of scores: samples, positions if any, classes. Scores of pixels have their classes first."""
_NORMAL_95 = 1.96
"""Specified: quantile of the normal distribution for intervals of 95 %."""
_CLOSE_AGREEMENT = 0.95
"""Chosen: share of equal predictions from which the time of a quantized model is the next question."""
_CLOSE_DB = 20.0
"""Chosen: the same for outputs that are no scores."""
_SECOND_TEXT = "decoder_"
"""Specified by transformers: prefix of the inputs of the second text of an encoder-decoder, which has an own mask."""
_RANK_OF_TOKENS = 3
"""Dimensions of an output with a vector for each token. Of two dimensions, [batch, hidden] may have the sizes of
[batch, sequence]; of four, an attention may have as many heads as tokens."""
_MASKING = np.float32(-1e9)
"""Values at or below this hide positions from a Softmax. Chosen: masks of float32 are -1e9, its minimum or infinity; no
other value is as low."""
_OF_TOKENS = ("start_logits", "end_logits")
"""Specified by transformers: outputs with one score for each token."""
_STATE_PREFIXES = ("present", "past_key_values")
"""Specified by transformers, optimum and onnxruntime-genai: prefixes of KV cache outputs."""


LOSS_DB = 6.0
"""Loss of an output between two runs of a file. Chosen: the error has doubled."""
ROUNDING_DB = 100.0
"""SQNR of rounding. Chosen: float32 sums in another order have 110 dB and more."""
ROUNDING = 10 ** (-ROUNDING_DB / 20)
"""The same as a relative error."""


def is_loss(before_db: float, after_db: float, loss_db: float = LOSS_DB) -> bool:
    """Return True if an output lost more than so many dB, beyond rounding."""
    return after_db < before_db - loss_db and after_db < ROUNDING_DB


class QualitySamples(Record):
    """Samples of a comparison of two files."""

    source: QualitySource
    count: int
    seed: int
    note: str = field(default="", metadata=entry(omit_empty=True))
    """Reason for random samples in spite of a tokenizer or processor beside the model; empty if it is used."""
    data: str = field(default="", metadata=entry(omit_empty=True))
    """Name of the dataset, with its split if it has several; empty for other samples."""
    may_be_refused: bool = field(default=False, metadata=entry(skip=True))
    """True for random values at sizes that no user stated: a file that refuses them may accept others."""


class SampleSpread(Record, digits=2):
    """Distribution of the SQNR of an output over the samples, in dB."""

    median: float
    min: float
    p05: float
    """Lower end of the interval: at most 5 % of the samples are lower. Limits apply to this value."""
    p95: float

    @classmethod
    def of(cls, ratios: Sequence[float], total_db: float = MOST_DB) -> SampleSpread:
        """Compute the distribution from the SQNR of at least one sample.

        The ends are values of samples, since one between two samples may hide the only wrong sample of few.

        Args:
            ratios: SQNR of each sample, in dB.
            total_db: SQNR over all samples together, which the lower end does not exceed.
        """
        low = float(np.percentile(ratios, LOWER, method="lower"))
        high = float(np.percentile(ratios, UPPER, method="higher"))
        return cls(float(np.median(ratios)), min(ratios), min(low, total_db), high)


class OutputFidelity(Record):
    """Similarity of one output to the reference, over all samples."""

    name: str
    sqnr_db: float
    """Power of the reference relative to the error, in dB; at most 200, which means equal."""
    cosine: float
    """Cosine of the angle between both, with all values as one vector; 1 if both are zero."""
    relative_error: float
    """Root mean square of the error, relative to that of the reference."""
    max_abs_diff: float
    problem: str = field(default="", metadata=entry(omit_empty=True))
    """Reason why it cannot be compared: missing, another shape or text, NaN or infinity elsewhere, or no finite
    values."""
    equal_share: float | None = field(default=None, metadata=entry(before="problem", omit_none=True))
    """Share of equal symbols; the other measures are those of one-hot vectors. ``None`` for numbers."""
    has_signal: bool = field(default=True, metadata=entry(skip=True))
    """True if the reference has a value other than zero, and changes between several samples."""
    spread: SampleSpread | None = field(default=None, metadata=entry(skip=True))
    """Distribution of the SQNR over the samples; ``None`` if not comparable."""
    by_sample_db: tuple[float, ...] = field(default=(), metadata=entry(skip=True))
    """SQNR of each sample, up to the first that cannot be compared; ``()`` for texts."""
    top1_agreement: float | None = field(default=None, metadata=entry(skip=True))
    """For scores: share of positions with the same index of the largest value along the last axis."""

    @property
    def lower_db(self) -> float:
        """Lower end of the interval of the SQNR over the samples, in dB, to which limits apply."""
        return self.sqnr_db if self.spread is None else self.spread.p05

    @property
    def differing_sample(self) -> int:
        """Position of the first sample if it has an error beyond rounding; else of the one with the largest error."""
        ratios = self.by_sample_db
        return ratios.index(min(ratios)) if ratios and ratios[0] >= ROUNDING_DB else 0

    @property
    def prediction_agreement(self) -> float | None:
        """Share of equal predictions of classes or tokens, which limits may apply to; ``None`` for other outputs."""
        return self.top1_agreement if self.name == PREDICTIONS else None

    @property
    def is_close(self) -> bool:
        """True if the output is so similar that the quality of a quantized model is no question any more."""
        agreement = self.prediction_agreement
        is_near = self.sqnr_db >= _CLOSE_DB if agreement is None else agreement >= _CLOSE_AGREEMENT
        return is_near and not self.problem

    @property
    def is_state(self) -> bool:
        """True for a KV cache state, which is reported but not judged next to the scores computed from it."""
        return self.name.startswith(_STATE_PREFIXES)


class SourceFidelity(Record):
    """Similarity of the quantized source of a compiled file to the float file of both."""

    reference: str
    """Name of the float file, the reference of both."""
    source: str
    """Name of the quantized file."""
    outputs: tuple[OutputFidelity, ...]
    margin_db: float | None
    """Maximum loss of an output relative to the quantized file, in dB; ``None``: only the minimum applies."""


class FidelityInfo(Record):
    """Result of the comparison of a lossy graph with its source."""

    outputs: tuple[OutputFidelity, ...] = field(metadata=entry(last=True))
    """Empty if only the output of all parts together was compared."""
    least_sqnr_db: float = field(metadata=entry("min_sqnr_db"))
    """Minimum SQNR in dB."""
    has_signal: bool = field(metadata=entry(before="min_sqnr_db"))
    """True if the reference contains values that a wrong graph would change: neither zeros, NaN nor the same value for
    all samples."""
    draws: int
    is_streamed: bool = field(default=False, metadata=entry(omit_empty=True))
    """True if the weights were streamed on both sides: the whole model was compared without being in memory."""
    is_part_alone: bool = field(default=False, metadata=entry(omit_empty=True))
    """True if the source is one of several parts, compared without the others."""
    together: OutputFidelity | None = field(default=None, metadata=entry(omit_none=True))
    """Similarity of the output of all parts run together; ``None`` if not compared."""
    parts: int = field(default=2, metadata=entry(skip=True))
    """Number of parts run together."""
    least_agreement: float | None = field(
        default=None, metadata=entry("min_agreement", before="together", omit_none=True)
    )
    """Minimum top-1 agreement, which replaces the SQNR for outputs with scores; ``None``: the SQNR applies to all."""
    has_encoder_of_source: bool = field(default=False, metadata=entry(before="together", omit_empty=True))
    """True if the first of these parts was that of the source, since only the second was requested."""
    silent: tuple[str, ...] | None = field(default=None, metadata=entry("answers_only", omit_none=True))
    """Without a signal: kinds of values in the reference; see :func:`silent_kinds`."""
    samples: QualitySamples | None = field(default=None, metadata=entry(skip=True))
    """Samples of the comparison; ``None`` for the samples of a verification."""
    beside: SourceFidelity | None = field(default=None, metadata=entry("source", omit_none=True))
    """Similarity of the quantized source to the float file, for a compiled file compared with that float file; else
    ``None``."""

    @classmethod
    def of_text(cls, text: OutputFidelity, least_sqnr_db: float, parts: int) -> FidelityInfo:
        """Return the result of a comparison of the text of all parts alone.

        Args:
            text: Similarity of the scores of all parts.
            least_sqnr_db: Minimum SQNR of each part in dB.
            parts: Number of parts.
        """
        # Of scores that are zero everywhere, a wrong graph would give the same.
        silent = None if text.has_signal else ("zeros",)
        return cls((), least_sqnr_db, text.has_signal, draws=1, together=text, parts=parts, silent=silent)

    @property
    def worst(self) -> OutputFidelity:
        """The judged output with the lowest quality relative to its limit."""
        compared = self.outputs or ((self.together,) if self.together is not None else ())
        return min(
            judged_outputs(compared),
            key=lambda output: (
                not output.problem,
                self._meets_limit(output),
                self.judged_db(output) - self.limit_db(output),
            ),
        )

    @property
    def is_verified(self) -> bool:
        """True if every judged output meets its limit and there is a signal."""
        return self.has_signal and self._are_within

    @property
    def _are_within(self) -> bool:
        return all(map(self._meets_limit, judged_outputs(self.outputs)))

    @property
    def is_refused(self) -> bool:
        """True if an output is beyond its limit, unless the reference has no values that limits apply to."""
        return self.silent is None and not (self._are_within and self.are_verified_together)

    def is_by_agreement(self, output: OutputFidelity) -> bool:
        """Return True if the agreement of the task decides for an output, not its SQNR."""
        return QualityMinimum(self.least_sqnr_db, self.least_agreement).is_by_agreement(output.prediction_agreement)

    def _meets_limit(self, output: OutputFidelity) -> bool:
        minimum = QualityMinimum(self.limit_db(output), self.least_agreement)
        return not output.problem and minimum.is_met(self.judged_db(output), output.prediction_agreement)

    def limit_db(self, output: OutputFidelity) -> float:
        """Limit of an output: the minimum, or less if the source of a compiled file is lower.

        With a source, the limit is the source's SQNR minus the margin, but at least half of it: an output of zeros has
        0 dB.
        """
        beside = self.beside
        if beside is None or beside.margin_db is None:
            return self.least_sqnr_db
        source_db = next((self.judged_db(entry) for entry in beside.outputs if entry.name == output.name), math.inf)
        return min(self.least_sqnr_db, max(source_db - beside.margin_db, source_db / 2))

    def judged_db(self, output: OutputFidelity) -> float:
        """SQNR that the limit applies to: the lower end of the interval over samples; without samples the total."""
        return output.sqnr_db if self.samples is None else output.lower_db

    @property
    @recorded(entry("quality", before="has_signal", omit_none=True))
    def quality(self) -> dict[str, object] | None:
        """Quality record, equal in all commands; ``None`` if only the output of all parts together was compared."""
        if self.samples is None or not self.outputs:
            return None
        return quality_record(self.samples, self.outputs)

    @property
    def are_verified_together(self) -> bool:
        """True if the output of all parts together meets its limit or was not compared."""
        text = self.together
        return text is None or (not text.problem and text.sqnr_db >= self.least_together_db)

    @property
    @recorded(entry("is_verified", before="has_signal"))
    def is_near(self) -> bool:
        """True if every output and the output of all parts together meet their limits."""
        return self.is_verified and self.are_verified_together

    @property
    def least_together_db(self) -> float:
        """Minimum SQNR of the output of all parts together in dB: each part may reach only the minimum, and errors add
        up.
        """
        return self.least_sqnr_db - 10 * math.log10(self.parts)


def judged_outputs(outputs: Sequence[OutputFidelity]) -> Sequence[OutputFidelity]:
    """Outputs that limits apply to: without KV cache states of a decoder, unless a state cannot be compared."""
    if not any(PREDICTIONS in output.name for output in outputs):
        return outputs
    return [output for output in outputs if output.problem or not output.is_state]


def quality_order(output: OutputFidelity) -> tuple[bool, float]:
    """Sort key of outputs: those that cannot be compared, then the lowest end of an interval over samples first."""
    return not output.problem, output.lower_db


def quality_record(samples: QualitySamples, outputs: Sequence[OutputFidelity]) -> dict[str, object]:
    """Build the quality record of one file relative to another; see ``docs/reference/formats.md``.

    Args:
        samples: Samples of both.
        outputs: All outputs; at least one.
    """
    return {
        "samples": samples.as_record(),
        "outputs": {output.name: _quality_of(output) for output in outputs},
        "worst_output": min(judged_outputs(outputs), key=quality_order).name,
    }


def _quality_of(output: OutputFidelity) -> dict[str, object]:
    """Return the entry of an output in a quality record."""
    spread = None if output.spread is None else {"all": output.sqnr_db, **output.spread.as_record()}
    return {
        "sqnr_db": spread,
        "cosine": output.cosine,
        "relative_error": json_value(output.relative_error),
        **({} if output.top1_agreement is None else {"top1_agreement": output.top1_agreement}),
        **({"problem": output.problem} if output.problem else {}),
    }


def measure_fidelity(
    reference: Sequence[Arrays],
    answers: Sequence[Arrays],
    least_sqnr_db: float,
    samples: QualitySamples | None = None,
    least_agreement: float | None = None,
    *,
    inputs: Sequence[Arrays] = (),
) -> FidelityInfo:
    """Measure the similarity of outputs to reference outputs.

    Args:
        reference: Reference outputs by name, one mapping per sample.
        answers: Outputs of the other graph by name, in the same order of samples.
        least_sqnr_db: Minimum SQNR of every output in dB.
        samples: Description of the samples.
        least_agreement: Minimum top-1 agreement of outputs with scores; ``None``: the SQNR applies to them.
        inputs: Inputs of the samples, whose padding is left out; ``()``: all positions count.
    """
    outputs = []
    for name in reference[0]:
        total, is_there = FidelitySum(name), True
        for ours, theirs, feeds in zip(reference, answers, inputs or [{}] * len(reference), strict=True):
            # Of a sequence, a sample may lack elements.
            if name in ours and (is_there := is_there and name in theirs):
                total.add(ours[name], theirs[name], feeds)
        outputs.append(total.of_output() if is_there else _incomparable_output(name, "is missing"))
    has_signal = any(output.has_signal for output in outputs)
    silent = None if has_signal else silent_kinds(values for sample in reference for values in sample.values())
    return FidelityInfo(
        tuple(outputs),
        least_sqnr_db,
        has_signal,
        len(reference),
        silent=silent,
        samples=samples,
        least_agreement=least_agreement,
    )


def output_fidelity(name: str, reference: Sequence[Array], outputs: Sequence[Array]) -> OutputFidelity:
    """Measure the similarity of an output to its reference, over all samples; see :meth:`FidelitySum.of_output`.

    Args:
        name: Name of the output.
        reference: Reference output of each sample.
        outputs: Compared output of each sample.
    """
    total = FidelitySum(name)
    for expected, actual in zip(reference, outputs, strict=True):
        total.add(expected, actual)
    return total.of_output()


class FidelitySum:
    """Similarity of one value to its reference, accumulated sample by sample without storing samples."""

    def __init__(self, name: str) -> None:
        """Start without samples.

        Args:
            name: Name of the value.
        """
        self._name = name
        self._problem = ""
        self._signal = self._noise = self._other = self._product = self._largest = 0.0
        self._are_symbols = self._has_numbers = self._has_finite = False
        self._silent: set[str] = set()
        self._has_value = False
        self._samples = 0
        self._digests: set[int] = set()
        """Digests of different reference values; two suffice to know that the output changes."""
        self._ratios: list[float] = []
        self._noises: list[float] = []
        self._are_single = True
        self._has_scores = PREDICTIONS in name
        self._agreeing: list[float] = []

    def add(self, expected: Array, actual: Array, inputs: Arrays = MappingProxyType({})) -> None:
        """Add one sample.

        Args:
            expected: The reference value.
            actual: The compared value.
            inputs: Inputs of the sample, whose padding is left out; without them, all positions count.
        """
        visible = visible_positions(self._name, expected, inputs) if expected.shape == actual.shape else None
        self.add_visible(expected, actual, visible)

    def add_visible(self, expected: Array, actual: Array, visible: Array | None) -> None:
        """Add one sample, of which only some positions count.

        Args:
            expected: The reference value.
            actual: The compared value.
            visible: Positions along the first axes that count, as booleans; ``None``: all.
        """
        scores = (expected, actual)
        if visible is not None:
            if visible.ndim == expected.ndim:  # a score of padding is never the largest
                scores = (np.where(visible, expected, -np.inf), np.where(visible, actual, -np.inf))
                expected, actual = expected[visible], actual[visible]
            else:
                expected, actual = scores = (expected[visible], actual[visible])
        if expected.size and expected.dtype.kind not in TEXT_KINDS:
            self._has_numbers = True
            self._has_finite = self._has_finite or bool(np.isfinite(expected).any())
            self._silent.update(silent_kinds([expected]) or () if not self._has_finite else ())
        self._has_value = self._has_value or silent_kinds([expected]) is None
        self._samples += 1
        if len(self._digests) < 2:
            is_text = expected.dtype.kind in TEXT_KINDS
            self._digests.add(zlib.crc32(repr(expected.tolist()).encode() if is_text else expected.tobytes()))
        if self._problem:
            return
        if expected.shape != actual.shape:
            self._problem = f"shape {list(actual.shape)} instead of {list(expected.shape)}"
        elif _is_symbol(expected.dtype):
            self._add_symbols(expected, actual)
        elif expected.dtype.kind in TEXT_KINDS:
            self._problem = "" if np.array_equal(expected, actual) else "different texts"
        else:
            self._add_amounts(expected, actual)
        first, second = scores
        self._has_scores = self._has_scores and first.ndim in SCORE_RANKS and first.shape[-1] > 1
        if self._has_scores and not self._problem:
            self._agreeing.append(float(np.mean(first.argmax(-1) == second.argmax(-1))))

    def of_value(self) -> OutputFidelity:
        """Similarity of the value over all samples."""
        if self._problem:
            by_sample = (*self._ratios, -MOST_DB)
            return replace(_incomparable_output(self._name, self._problem), by_sample_db=by_sample)
        signal, noise, power = self._signal, self._noise, self._other
        ratios = self._ratios
        if self._are_single and len(ratios) > 1:
            # A single number may be near zero: its error is measured relative to the mean signal of all samples.
            ratios = [_to_decibels(_error_ratio(value, signal / len(ratios))) for value in self._noises]
        relative, has_top1 = _error_ratio(noise, signal), self._has_scores and not self._are_symbols
        cosine = self._product / math.sqrt(signal * power) if signal and power else float(signal == power)
        return OutputFidelity(
            self._name,
            _to_decibels(relative),
            cosine,
            relative,
            self._largest,
            equal_share=cosine if self._are_symbols else None,
            has_signal=self._has_value and (self._samples == 1 or len(self._digests) > 1),
            spread=SampleSpread.of(ratios, _to_decibels(relative)) if ratios else None,
            by_sample_db=tuple(ratios),
            top1_agreement=float(np.mean(self._agreeing)) if has_top1 and self._agreeing else None,
        )

    def of_output(self) -> OutputFidelity:
        """Similarity of the output over all samples; an output without finite values has a problem.

        Inside a graph, a value that is infinite everywhere may be a mask. An output without comparable values has a
        problem: equal NaN prove nothing.
        """
        if self._has_numbers and not self._has_finite:
            problem = f"the reference returns {silent_words(sorted(self._silent))}"
            return replace(_incomparable_output(self._name, problem), has_signal=False)
        return self.of_value()

    def _add_symbols(self, expected: Array, actual: Array) -> None:
        """Add one-hot vectors: each wrong symbol has an error of the square root of 2."""
        self._are_symbols, self._are_single = True, False
        size, equal = expected.size, int(np.count_nonzero(expected == actual))
        self._add_sums(size, 2 * (size - equal), size, equal, expected.astype(np.float64) - actual.astype(np.float64))

    def _add_amounts(self, expected: Array, actual: Array) -> None:
        is_masking = expected <= _MASKING if expected.dtype.kind == "f" else np.zeros(expected.shape, bool)
        # A file for integers has a mask in the range of the scores: lower than all of them, it hides as well.
        if is_masking.any() and np.all(actual[is_masking] < expected[~is_masking].min(initial=0)):
            expected, actual = expected[~is_masking], actual[~is_masking]
        values = finite_values(expected, actual)
        if values is None:
            self._problem = _place_words(expected, actual)
            return
        # Sums of squares exceed float32.
        x, y = (value.astype(np.float64) for value in values)
        difference = y - x
        self._are_single = self._are_single and expected.size == 1
        products = (_dot(x, x), _dot(difference, difference), _dot(y, y), _dot(x, y))
        self._add_sums(*products, difference)

    def _add_sums(self, signal: float, noise: float, power: float, product: float, difference: Array) -> None:
        """Add the sums of one sample."""
        self._ratios.append(_to_decibels(_error_ratio(noise, signal)))
        self._noises.append(noise)
        self._signal += signal
        self._noise += noise
        self._other += power
        self._product += product
        self._largest = max(self._largest, float(np.abs(difference).max(initial=0.0)))


def visible_positions(name: str, value: Array, inputs: Arrays) -> Array | None:
    """Return the positions of a value that an attention mask shows, as booleans [batch, sequence]; ``None`` for all.

    Nothing reads a value of padding. The mask of a decoder includes cached tokens; its last positions are those of the
    run. A mask of other numbers than 0 and 1 is added to scores, and one of zeros shows nothing to compare.

    Args:
        name: Name of the value.
        value: The value: [batch, sequence, …] with vectors, or [batch, sequence] of integers or scores of tokens.
        inputs: Inputs of the sample.
    """
    from winml.modelkit.ort.decoding.inputs import MASK, TOKEN_IDS, TOKEN_VECTORS  # a diff compares no values

    mask, shape = inputs.get(MASK), value.shape
    has_token_values = len(shape) == 2 and (name in _OF_TOKENS or _is_symbol(value.dtype))
    if mask is None or mask.ndim != 2 or not (len(shape) == _RANK_OF_TOKENS or has_token_values):
        return None
    if any(name.startswith(_SECOND_TEXT) for name in inputs):
        return None
    tokens = next((inputs[name] for name in (TOKEN_IDS, TOKEN_VECTORS) if name in inputs), mask)
    visible = mask[:, -shape[1] :] == 1
    if tokens.shape[:2] != shape[:2] or visible.shape != shape[:2] or not np.isin(mask, (0, 1)).all():
        return None
    return visible if visible.any() and not visible.all() else None


def _error_ratio(noise: float, signal: float) -> float:
    """Return the root of noise over signal; infinite for noise without signal."""
    if not signal:
        return math.inf if noise else 0.0
    return math.sqrt(noise / signal)


def _dot(a: Array, b: Array) -> float:
    """Compute the inner product in this thread: threads of a BLAS would wait for threads of ONNX Runtime."""
    return float(np.einsum("i,i->", a, b))


def _place_words(expected: Array, actual: Array) -> str:
    """Describe the number of non-finite values that differ, and the first of them."""
    x, y = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    are_same = (x == y) | (np.isnan(x) & np.isnan(y))
    places = np.flatnonzero(~are_same & ~(np.isfinite(x) & np.isfinite(y)))
    first = places[0]
    index = [int(position) for position in np.unravel_index(first, expected.shape)]
    return (
        f"NaN or infinity in different places: {len(places)} of {x.size} values, "
        f"first at {index}: {y[first]:.4g} instead of {x[first]:.4g}"
    )


def _is_symbol(dtype: np.dtype[Any]) -> bool:
    """Return True for booleans and wide integers, which are symbols."""
    return dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize >= _SYMBOL_BYTES)


def _incomparable_output(name: str, problem: str) -> OutputFidelity:
    """Create the record of an output that cannot be compared."""
    return OutputFidelity(name, -MOST_DB, 0.0, math.inf, math.inf, problem)


def _to_decibels(relative: float) -> float:
    """Convert a relative error to an SQNR in dB, limited to ±200."""
    if not relative:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, -20.0 * math.log10(relative))) if math.isfinite(relative) else -MOST_DB


def share_interval(share: float, samples: int) -> tuple[float, float]:
    """Return the interval that contains the true share with a probability of 95 % (Wilson).

    >>> [round(end, 2) for end in share_interval(1.0, 16)]
    [0.81, 1.0]
    """
    share = min(max(share, 0.0), 1.0)  # a record may hold any number
    spread = _NORMAL_95**2 / samples
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
