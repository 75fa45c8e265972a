"""Is a candidate right, and what does it take? Measures each once, in a process of its own.

Right is what the options say: near enough to the plain file, or no worse at its task. Times no race.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.evaluated_models import evaluate_model, variant_evaluator
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.evaluate.options import NO_BASELINE
from winml.modelkit.evaluate.records import SLACK
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.options import drop_at, drop_words, parse_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.sensitivity import quantization_sensitivity
from winml.modelkit.quantize.sensitivity_options import SensitivityOptions
from winml.modelkit.quantize.sensitivity_records import ExcludeList, QuantizationSensitivity
from winml.modelkit.tune.contestants import Contestant, Contestants
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.records import Candidate, CandidateFacts
from winml.modelkit.tune.worker import sample_path

_MARGIN_DB = 0.1
"""By how much more is asked for when modules are looked for that stay in float. Chosen: a file that is run by other
kernels than the form that was measured differs by less."""


@dataclass(frozen=True)
class QualityLimits:
    """What a tuning takes for right, and the values it is judged on."""

    options: TuneOptions
    folder: Path
    """Folder of the values."""
    shown: str
    """The model as the user wrote it."""
    contestants: Contestants
    processors: Path | None
    """Folder of what makes arrays of samples; None: there is none."""

    def record_values(self, plain: Path) -> dict[str, Any]:
        """Draw the values that all candidates are run on, and keep the answers of the plain file.

        Raises:
            MeasureError: it does not run on them, or answers with nothing that a wrong file would get wrong.
        """
        requested = self.options
        fed = {
            "sizes": dict(requested.sizes),
            "batch_size": requested.batch_size,
            "seed": requested.seed,
            "input_data": None if requested.input_data is None else str(requested.input_data.absolute()),
        }
        with closing(Contestant(self.shown)) as process:
            return process.ask(
                "record",
                path=str(plain),
                displayed=self.shown,
                processors=None if self.processors is None else str(self.processors),
                folder=str(self.folder),
                samples=requested.draws,
                fed=fed,
            )

    def measure(self, candidate: Candidate, model: Path, samples: QualitySamples) -> tuple[CandidateFacts, float]:
        """Return what a candidate takes and how near its answers are, and the time of one run in milliseconds.

        Raises:
            MeasureError: it does not run, or takes no fixed sizes.
        """
        measured = self.contestants.measure(candidate, model, samples)
        run_ms: float = measured.pop("run_ms")
        size = sum(file.stat().st_size for file in (model, *external_files(model)))
        return CandidateFacts(size_bytes=size, **measured), run_ms

    def measure_same(self, candidate: Candidate, model: Path, same: CandidateFacts) -> CandidateFacts:
        """Return what a candidate takes whose file was judged before, run in another way; its quality is that.

        Raises:
            MeasureError: it does not run.
        """
        measured = self.contestants.measure(candidate, model, None)
        del measured["run_ms"]
        return replace(same, **measured)

    def with_scores(
        self, facts: CandidateFacts, candidate: Candidate, model: Path, plain: CandidateFacts | None
    ) -> CandidateFacts:
        """Return facts with the metrics on the samples of the data set, where one is given.

        Args:
            facts: What was measured before.
            candidate: Whose they are.
            model: Its file.
            plain: What was measured of the plain file; None where this is it.

        Raises:
            WinMLError: as :func:`~winml.modelkit.evaluate_model`.
        """
        requested = self.options.evaluation
        if requested is None:
            return facts
        changed = {"max_drop": {}, "metrics": tuple(self.options.max_drop), "baseline": NO_BASELINE}
        evaluated = evaluate_model(
            model, options=requested.model_copy(update=changed), ep=candidate.ep, ep_options=dict(candidate.ep_options)
        )
        scores = {metric.name: metric.value for metric in evaluated.metrics}
        is_higher_better = {metric.name: metric.is_higher_better for metric in evaluated.metrics}
        before = scores if plain is None else plain.scores
        drops = {
            name: before[name] - value if is_higher_better[name] else value - before[name]
            for name, value in scores.items()
        }
        return replace(facts, scores=scores, drops=drops, is_higher_better=is_higher_better)

    def reason_wrong(self, facts: CandidateFacts) -> str:
        """Return why a candidate is not right; empty where it is."""
        if facts.problem or facts.sqnr_db is None:
            return f"{facts.output} {facts.problem}"
        least = self.options.least_sqnr_db
        lower = facts.sqnr_db if facts.lower_sqnr_db is None else facts.lower_sqnr_db
        if least is not None and lower < least:
            interval = "" if lower == facts.sqnr_db else f" (lower bound {lower:.1f} dB)"
            return f"SQNR {facts.sqnr_db:.1f} dB{interval} for {facts.output}, minimum {least:g}"
        for metric, limit in self.options.max_drop.items():
            drop = facts.drops.get(metric)
            if drop is None:
                return f"{metric} drops by an unknown amount, maximum {drop_words(limit)}"
            before = facts.scores[metric] + (drop if facts.is_higher_better[metric] else -drop)
            if not drop <= drop_at(limit, before) + SLACK:
                return f"{metric} drops by {drop:.4f}, maximum {drop_words(limit)}"
        return ""

    def find_rules(
        self,
        candidate: Candidate,
        plain: Path,
        measured: Path,
        before_each: Callable[[], None],
        *,
        plain_facts: CandidateFacts,
        is_as_drawn: bool,
    ) -> QuantizationSensitivity:
        """Find the modules of a candidate that must stay in float; what is measured is kept until it ends.

        Args:
            candidate: Which.
            plain: The plain file.
            measured: Where measurements are kept.
            before_each: Called before each measurement; what it raises ends the search.
            plain_facts: What was measured of the plain file.
            is_as_drawn: Whether the values of this tuning are those a seed draws.

        Raises:
            WinMLError: as :func:`~winml.modelkit.quantization_sensitivity`.
        """
        options = parse_options(QuantizeOptions, dict(candidate.sections["quant"]), candidate.name)
        least = self.options.least_sqnr_db
        sensitivity = SensitivityOptions(
            samples=self.options.draws,
            sizes=dict(self.options.sizes) if is_as_drawn else {},
            seed=self.options.seed,
            input_data=None if is_as_drawn else sample_path(self.folder, 0),
            target=None if least is None else f"sqnr_db={least + _MARGIN_DB:g}",
            processors=self.processors,
            iterations=1,  # the race times what comes of it
            measured=measured,
            overwrite=True,
        )
        if least is not None:
            return quantization_sensitivity(plain, options=options, sensitivity=sensitivity, before_each=before_each)
        requested = self.options.evaluation
        assert requested is not None  # a drop is asked for, and that needs a data set
        with variant_evaluator(
            plain, requested.model_copy(update={"max_drop": {}}), self._metric_target(plain_facts)
        ) as evaluator:
            return quantization_sensitivity(
                plain, options=options, sensitivity=sensitivity, evaluator=evaluator, before_each=before_each
            )

    def _metric_target(self, plain: CandidateFacts) -> tuple[str, float]:
        """Return the first metric that is limited, and what it has to reach."""
        metric, limit = next(iter(self.options.max_drop.items()))
        value = plain.scores[metric]
        most = drop_at(limit, value)
        return metric, value - most if plain.is_higher_better[metric] else value + most

    def unmet_words(self, listed: ExcludeList) -> str:
        """Return how near the best came, where no list of modules is enough."""
        form, least = listed.form, self.options.least_sqnr_db
        wanted = listed.target.words if least is None else f"{least:g} dB"
        if form.worst is None:
            return f"no choice of float modules reaches {wanted}"
        found = f"{form.worst.lower_db:.1f} dB (lower bound) with {len(listed.excluded)} modules in float"
        return f"no choice of float modules reaches {wanted}: {found}"
