"""Measures each candidate once, in a separate process, and checks the quality limits.

The limits are set by the options: fidelity to the plain file, or a maximum drop of a metric. Runs no race.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.evaluated_models import evaluate_model
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compile.declared_options import MARGIN_DB
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.evaluate.declared_options import requested_samples
from winml.modelkit.evaluate.metrics import needed_samples
from winml.modelkit.evaluate.options import NO_BASELINE
from winml.modelkit.evaluate.records import SLACK
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.options import drop_at, drop_words, parse_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import BFLOAT16, PRECISIONS
from winml.modelkit.quantize.sensitivity import quantization_sensitivity
from winml.modelkit.quantize.sensitivity_options import SensitivityOptions
from winml.modelkit.quantize.sensitivity_records import ExcludeList, FidelityTarget, QuantizationSensitivity
from winml.modelkit.quantize.variant_evaluation import variant_evaluator
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.contestants import Contestant, Contestants
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.records import Candidate, CandidateFacts
from winml.modelkit.tune.worker import sample_path
from winml.modelkit.words import MOST_DB, percent_words, size_words

_MARGIN_DB = 0.1
"""Margin on the minimum SQNR in the search for modules in float. Chosen: other kernels change the SQNR of the
measured form by less."""


@dataclass(frozen=True)
class QualityLimits:
    """Quality limits of a tuning, with the folder of its values."""

    options: TuneOptions
    folder: Path
    """Folder of the values."""
    model_name: str
    """The model as written by the user."""
    contestants: Contestants
    processors: Path | None
    """Folder of the processors that convert samples to arrays; None: no processors."""
    plain_facts: Callable[[], CandidateFacts | None] = lambda: None
    """Returns the measurements of the plain file, once it is measured."""

    def record_values(self, plain_model: Path) -> dict[str, Any]:
        """Draw the values for all candidates, and store the outputs of the plain file.

        Raises:
            MeasureError: the plain file does not run on the values, or its outputs cannot reveal a wrong candidate.
        """
        options = self.options
        input_options = {
            "sizes": dict(options.sizes),
            "batch_size": options.batch_size,
            "seed": options.seed,
            "input_data": None if options.input_data is None else str(options.input_data.absolute()),
        }
        with closing(Contestant(self.model_name)) as process:
            return process.ask(
                "record",
                data_set=None if (request := self._judging_request()) is None else asdict(request),
                path=str(plain_model),
                model_name=self.model_name,
                processors=None if self.processors is None else str(self.processors),
                folder=str(self.folder),
                samples=options.draws,
                input_options=input_options,
            )

    def _judging_request(self) -> DataSetRequest | None:
        """Return the request for samples of the dataset; None if it is for a metric, or missing.

        Raises:
            UsageError: no processor converts the samples.
        """
        options = self.options
        if options.dataset is None or options.max_drop:
            return None
        if self.processors is None:
            raise UsageError(
                f"{opt.dataset} {options.dataset}: samples require a tokenizer or image processor, and "
                f"{self.model_name} is not in a folder",
                hint="Put the tokenizer or processor files of the model beside it.",
            )
        return requested_samples(options, seed=options.seed)

    def measure(self, candidate: Candidate, model: Path, samples: QualitySamples) -> tuple[CandidateFacts, float]:
        """Measure a candidate; return its measurements and the time of one run in milliseconds.

        Raises:
            MeasureError: the candidate does not run, or needs fixed sizes.
        """
        measurements = self.contestants.measure(candidate, model, samples)
        run_ms: float = measurements.pop("run_ms")
        size = sum(file.stat().st_size for file in (model, *external_files(model)))
        return CandidateFacts(size_bytes=size, **measurements), run_ms

    def measure_same(self, candidate: Candidate, model: Path, evaluated: CandidateFacts) -> CandidateFacts:
        """Measure a candidate with other run settings of an evaluated file; quality is copied.

        Raises:
            MeasureError: the candidate does not run.
        """
        measurements = self.contestants.measure(candidate, model, None)
        del measurements["run_ms"]
        return replace(evaluated, **measurements)

    def with_scores(
        self, facts: CandidateFacts, candidate: Candidate, model: Path, plain_facts: CandidateFacts | None
    ) -> CandidateFacts:
        """Add the metrics on the dataset to the measurements, if a dataset is specified.

        Args:
            facts: Earlier measurements of the candidate.
            candidate: The candidate.
            model: Its file.
            plain_facts: Measurements of the plain file; None if the candidate is the plain file.

        Raises:
            WinMLError: as :func:`~winml.modelkit.evaluate_model`.
        """
        options = self.options.evaluation
        if options is None:
            return facts
        changes = {"max_drop": {}, "metrics": tuple(self.options.max_drop), "baseline": NO_BASELINE}
        evaluation = evaluate_model(
            model, options=options.model_copy(update=changes), ep=candidate.ep, ep_options=dict(candidate.ep_options)
        )
        scores = {metric.name: metric.value for metric in evaluation.metrics}
        resolved = {metric.name: metric.least_difference for metric in evaluation.metrics if metric.least_difference}
        is_higher_better = {metric.name: metric.is_higher_better for metric in evaluation.metrics}
        plain_scores = scores if plain_facts is None else plain_facts.scores
        drops = {
            name: plain_scores[name] - value if is_higher_better[name] else value - plain_scores[name]
            for name, value in scores.items()
        }
        return replace(facts, scores=scores, drops=drops, is_higher_better=is_higher_better, least_drops=resolved)

    def minimum(self, candidate: Candidate) -> QualityMinimum | None:
        """Return the minimum of a candidate's outputs: the requested SQNR, or the default of its precision.

        On a provider that computes with fewer bits than the CPU, the plain file itself may miss that default: the
        minimum is then as much below the plain file as a compiled file may be below its source.

        Returns:
            ``None`` if only a metric on the dataset is limited.
        """
        if self.options.min_sqnr_db is not None:
            return QualityMinimum(self.options.min_sqnr_db)
        if not self.options.uses_default_limit:
            return None
        # A float candidate may run in 16 bits, as on a provider.
        name = str(candidate.sections.get("quant", {}).get("precision", BFLOAT16))
        minimum, plain = PRECISIONS[name].minimum, self.plain_facts()
        if plain is None or plain.problem or plain.sqnr_db is None:
            return minimum
        reached = plain.sqnr_db if plain.lower_sqnr_db is None else plain.lower_sqnr_db
        return replace(minimum, sqnr_db=min(minimum.sqnr_db, max(reached - MARGIN_DB, reached / 2)))

    def reason_wrong(self, candidate: Candidate, facts: CandidateFacts) -> str:
        """Return why a candidate is outside the quality limits; empty if within."""
        if facts.problem or facts.sqnr_db is None:
            return f"{facts.output} {facts.problem}"
        minimum = self.minimum(candidate)
        lower = facts.sqnr_db if facts.lower_sqnr_db is None else facts.lower_sqnr_db
        agreement = facts.prediction_agreement
        if minimum is not None and not minimum.is_met(lower, agreement):
            if minimum.is_by_agreement(agreement):
                assert agreement is not None
                assert minimum.agreement is not None
                shares = f"{percent_words(agreement)} for {facts.output}, minimum {percent_words(minimum.agreement)}"
                return f"top-1 agreement {shares}"
            interval = "" if lower == facts.sqnr_db else f" (lower bound {lower:.1f} dB)"
            return f"SQNR {facts.sqnr_db:.1f} dB{interval} for {facts.output}, minimum {minimum.sqnr_db:g}"
        for metric, limit in self.options.max_drop.items():
            drop = facts.drops.get(metric)
            if drop is None:
                return f"{metric} drops by an unknown amount, maximum {drop_words(limit)}"
            baseline = facts.scores[metric] + (drop if facts.is_higher_better[metric] else -drop)
            if not drop <= drop_at(limit, baseline) + SLACK:
                return f"{metric} drops by {drop:.4f}, maximum {drop_words(limit)}"
        return ""

    def reason_too_large(self, facts: CandidateFacts) -> str:
        """Return why a candidate takes too much memory; empty if it does not."""
        limit = self.options.max_peak_bytes
        if limit is None or facts.peak_bytes <= limit:
            return ""
        return f"peak memory {size_words(facts.peak_bytes)}, maximum {size_words(limit)}"

    def reason_excluded(self, candidate: Candidate, facts: CandidateFacts) -> str:
        """Return why a candidate cannot win: quality, except of the plain file, or memory; empty if it can."""
        return (candidate.name != PLAIN and self.reason_wrong(candidate, facts)) or self.reason_too_large(facts)

    def unresolved_words(self, facts: CandidateFacts) -> tuple[str, str]:
        """Return why the samples do not resolve a limit that a candidate meets, and what would; empty if they do.

        Equal outputs have equal metrics on any samples.
        """
        if facts.sqnr_db is not None and facts.sqnr_db >= MOST_DB:
            return "", ""
        for metric, limit in self.options.max_drop.items():
            drop, least = facts.drops.get(metric), facts.least_drops.get(metric)
            if drop is None or least is None:
                continue
            value = facts.scores[metric]
            allowed = drop_at(limit, value + (drop if facts.is_higher_better[metric] else -drop))
            most = min(max(drop, 0.0) + least, 1.0)  # of a share
            if most > allowed + SLACK:
                bound = f"the samples bound the drop of {metric} by {most:.4f} only"
                needed = f"about {needed_samples(allowed - drop)} samples" if allowed > drop else "a higher limit"
                return f"{bound}, maximum {drop_words(limit)}", needed
        return "", ""

    def find_rules(
        self,
        candidate: Candidate,
        model: Path,
        measured: Path,
        before_each: Callable[[], None],
        *,
        plain_facts: CandidateFacts,
        candidate_facts: CandidateFacts,
        is_as_drawn: bool,
    ) -> QuantizationSensitivity:
        """Find the modules of a candidate that must stay in float; measurements are stored until the search ends.

        Args:
            candidate: The candidate.
            model: The plain file.
            measured: File of the measurements.
            before_each: Called before each measurement; an exception ends the search.
            plain_facts: Measurements of the plain file.
            candidate_facts: Measurements of the candidate with all modules quantized.
            is_as_drawn: True if the values of this tuning are those drawn by the seed.

        Raises:
            WinMLError: as :func:`~winml.modelkit.quantization_sensitivity`.
        """
        options = parse_options(QuantizeOptions, dict(candidate.sections["quant"]), candidate.name)
        minimum = self.minimum(candidate)
        target_db = None if minimum is None else minimum.searched_db(candidate_facts.prediction_agreement)
        sensitivity = SensitivityOptions(
            samples=self.options.draws,
            sizes=dict(self.options.sizes) if is_as_drawn else {},
            seed=self.options.seed,
            input_data=None if is_as_drawn else sample_path(self.folder, 0),
            target=None if target_db is None else f"sqnr_db={target_db + _MARGIN_DB:g}",
            processors=self.processors,
            iterations=1,  # times are measured in the race
            measured=measured,
            overwrite=True,
        )
        if target_db is not None:
            return quantization_sensitivity(model, options=options, sensitivity=sensitivity, before_each=before_each)
        evaluation = self.options.evaluation
        assert evaluation is not None  # a maximum drop requires a dataset
        with variant_evaluator(
            model, evaluation.model_copy(update={"max_drop": {}}), self._metric_target(plain_facts)
        ) as evaluator:
            return quantization_sensitivity(
                model, options=options, sensitivity=sensitivity, evaluator=evaluator, before_each=before_each
            )

    def _metric_target(self, plain_facts: CandidateFacts) -> tuple[str, float]:
        """Return the first limited metric, and its required value."""
        metric, limit = next(iter(self.options.max_drop.items()))
        value = plain_facts.scores[metric]
        max_drop = drop_at(limit, value)
        return metric, value - max_drop if plain_facts.is_higher_better[metric] else value + max_drop

    def unmet_words(self, exclude_list: ExcludeList) -> str:
        """Describe the best result if no list of modules reaches the target."""
        variant, target = exclude_list.form, exclude_list.target.words
        if isinstance(exclude_list.target, FidelityTarget):
            target = f"{exclude_list.target.value - _MARGIN_DB:g} dB"
        if variant.worst is None:
            return f"no choice of float modules reaches {target}"
        best = f"{variant.worst.lower_db:.1f} dB (lower bound) with {len(exclude_list.excluded)} modules in float"
        return f"no choice of float modules reaches {target}: {best}"
