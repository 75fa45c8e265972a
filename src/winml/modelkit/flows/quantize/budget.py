"""Chooses bits and block size of each module so that the file keeps a limit and loses least.

Each module is measured alone in each form; the noise of several adds up, so a knapsack over the measured noise says
which modules have which form. Mixtures and uniform files of at most the same size are then measured as a whole, and the
best is taken. Chosen by samples of their own: the file is judged on those of every verb.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.evaluate.metrics import PERPLEXITY
from winml.modelkit.file_names import files_folder
from winml.modelkit.flows.graph_file import CheckedSource, GraphFileTask
from winml.modelkit.flows.quality_samples import SampleRequest
from winml.modelkit.flows.quantize.calibration_data import Calibration, CalibrationStatistics, refuse_missing_data
from winml.modelkit.flows.quantize.layer_calibration import LayerCalibration
from winml.modelkit.flows.quantize.quantize import FoundBits, Quantization, quantize_file
from winml.modelkit.flows.quantize.quantized_variants import (
    FloatGraph,
    ModulePart,
    QuantizedVariants,
    float_graph,
    list_parts,
    only_options,
    take_samples,
    weight_bytes,
)
from winml.modelkit.graph.cutting import GraphModules
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.selector import escape
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.quantize.bit_allocation import Choice, allocate
from winml.modelkit.quantize.calibrated_quantizers import SolvedWeight
from winml.modelkit.quantize.options import BitBudget, QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult, quantize
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.planning import WeightKey, constant_weight, plan_quantization
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.quantize.weight_only_engine import BlockWeight
from winml.modelkit.results.quantization_budget import BudgetChoice, BudgetSearch, BudgetTrial
from winml.modelkit.results.quantization_sensitivity import FidelityTarget, MeasuredVariant
from winml.modelkit.results.transformed_file import QuantizedFile
from winml.modelkit.runtime.opened_model import RunOptions
from winml.modelkit.words import size_words

__all__ = ["quantize_within_budget"]


def quantize_within_budget(
    task: GraphFileTask,
    work: Quantization,
    on_step: Callable[[StepEvent], None] | None = None,
    checked: CheckedSource | None = None,
    *,
    processors: Path | None = None,
    statistics_folder: Path | None = None,
) -> QuantizedFile:
    """Quantize an ONNX file; where a limit is stated, with the bits for each module that keep it and lose least.

    Args:
        task: From which file to which.
        work: What is to be done.
        on_step: Called when a step starts and when it ends.
        checked: The source, where a plan has read it.
        processors: Folder of the tokenizer, image processor or feature extractor that makes samples; None: that of the
            source.
        statistics_folder: As of :func:`~winml.modelkit.flows.quantize.quantize.quantize_file`.

    Raises:
        UsageError: the limit is below what the fewest bits take, or the file names no modules.
        WinMLError: as :func:`~winml.modelkit.flows.quantize.quantize.quantize_file` raises.
    """
    options = work.options
    if options.bit_budget is None:
        return quantize_file(task, work, on_step, checked, processors=processors, statistics_folder=statistics_folder)
    options.refuse_contradictions()
    folder = processors or files_folder(task.source.absolute())
    is_judged = options.bit_budget.max_drop is not None
    data = Calibration(options, folder, work.sizes, task.seed, task.source, holds_out=is_judged)
    calibration = data if options.needs_samples else None
    if options.needs_samples or is_judged:
        refuse_missing_data(data)
    with temporary_folder() as blocks, contextlib.closing(data):

        def tell(words: str) -> None:
            if on_step is not None:
                on_step(StepEvent(1, 1, f"{_SEARCH}: {words}"))

        solver = None
        statistics = None
        if options.needs_ranges:
            statistics = CalibrationStatistics(data, task.source, statistics_folder)
        if options.solves_weights:
            solver = _SolvedOnce(LayerCalibration(data, options.algorithm, blocks, tell))
        clock = StepClock((_SEARCH,), on_step)

        request = _Request(task.source, options, work.sizes, task.seed, folder, data, solver, statistics, tell)
        with clock.step(_SEARCH) as step:
            chosen, search = _search(request)
            step.summary = f"{search.measured} forms measured: {search.form}, {search.mean_bits:.2f} bits"
        found = FoundBits(search, calibration, solver, statistics)
        reasons = {module.tag: module.why for module in search.modules}
        chosen_work = replace(work, options=chosen, reasons=reasons)
        return quantize_file(task, chosen_work, on_step, checked, processors=processors, found=found)


@dataclass(frozen=True)
class _Form:
    """A form that a module may have."""

    precision: str
    block_size: int | None = None

    @property
    def name(self) -> str:
        return self.precision if self.block_size is None else f"{self.precision}/{self.block_size}"


_BLOCKS = (("int2", 128), ("int2", 32), ("int4", 128), ("int4", 32), ("int8", 64))
FORMS = (*(_Form(*blocks) for blocks in _BLOCKS), _Form("bf16"), _Form(FLOAT32))
"""Chosen, from the fewest bits. Scales are as wide as the weights were: with float32, 2.3, 3.1, 4.3, 5.1 and 8.6
bits."""
_WITH_ACTIVATIONS = (_Form("w8a8"), _Form("w8a16"), _Form(FLOAT32))
"""Chosen, from the fewest bits, where activations are quantized, too."""
_WIDE_ACTIVATIONS = 16
"""Activations in 16 bits count as so many parts of their weights and one more. Chosen: they take no bytes of the file,
but time; so 8 bits are preferred where they are good enough, and 16 to a module in float."""
_SEARCH = "search for bits"
_OTHER_SAMPLES = 700_001
"""Added to the seed: forms are chosen by samples that the file is not judged on."""
_FRONTIER = 6
"""Mixtures of other sizes that are measured for the frontier. Chosen: enough for a curve."""
_RETRIES = 4
"""Mixtures that are solved again where a weight that two modules share made one larger than its limit."""
_LEAST_NOISE = 1e-12
"""Of a module whose form changes nothing that a measurement shows."""


@dataclass(frozen=True)
class _Request:
    """What is searched, and on which samples."""

    source: Path
    options: QuantizeOptions
    sizes: Mapping[str, int]
    seed: int
    processors: Path | None
    data: Calibration
    solver: _SolvedOnce | None
    """Finds blocks of weights, where the algorithm needs samples."""
    statistics: CalibrationStatistics | None
    """Of activations, where they are quantized."""
    on_progress: Callable[[str], None]
    """Called after each measurement."""


class _SolvedOnce:
    """Finds the blocks of each weight in each form once, for all graphs that are made of one file."""

    def __init__(self, calibration: LayerCalibration) -> None:
        """Hold nothing yet."""
        self.calibration = calibration
        self._solved: dict[tuple[WeightKey, object], SolvedWeight] = {}

    def solve(self, model: ir.Model, weights: Sequence[BlockWeight]) -> dict[WeightKey, SolvedWeight]:
        """Return the blocks of weights; only those not found before are looked for."""
        if missing := [weight for weight in weights if (weight.key, weight.form) not in self._solved]:
            found = self.calibration.solve(model, missing)
            self._solved.update({(weight.key, weight.form): found[weight.key] for weight in missing})
        return {weight.key: self._solved[weight.key, weight.form] for weight in weights}

    def as_record(self) -> dict[str, object]:
        """Return what the blocks come from, JSON-ready."""
        return self.calibration.as_record()


def _search(request: _Request) -> tuple[QuantizeOptions, BudgetSearch]:
    """Return the options that keep the limit, and how they were found.

    Raises:
        UsageError: the limit is below what the fewest bits take, or the file names no modules.
        QuantizeError: no form of the model reaches the quality.
    """
    budget = request.options.bit_budget
    assert budget is not None  # whoever calls has one
    options = request.options
    chosen = {"precision": options.base.name, "mode": options.mode or "weight-only"}
    base = options.model_copy(update={"budget": None, "max_size": None, "max_drop": None, **chosen})
    if not base.needs_samples:  # the data were for the perplexity alone
        base = base.model_copy(update={"calibration_data": None, "split": None, "columns": {}})
    with float_graph(request.source, base) as graph:
        if not graph.modules.modules:
            raise UsageError(
                f"{request.source}: nothing says which module its nodes came from",
                hint="Export it with winml export, or bring tags over from the file it was made of: winml retag.",
            )
        study = _Study(graph, base, request)
        study.measure()
        return study.choose(budget)


@dataclass
class _Unit:
    """A module, and what it is in each form."""

    part: ModulePart
    choices: dict[_Form, Choice]
    alone: dict[str, float | None]
    parameters: int


class _Study:
    """One model whose modules are measured."""

    def __init__(self, graph: FloatGraph, base: QuantizeOptions, request: _Request) -> None:
        self._graph, self._base, self._request = graph, base, request
        self._plan = plan_quantization(graph.model, base, graph.modules)
        parts = list_parts(self._plan, graph.modules, None, None)
        self._parts = [part for part in parts if part.is_unit and part.nodes]
        run = RunOptions(str(request.source), sizes=request.sizes, seed=request.seed + _OTHER_SAMPLES)
        samples = SampleRequest(
            run, request.processors, count=request.options.samples, tries_sizes=True, model=request.source
        )
        self._samples = take_samples(graph, samples, None)
        self._evaluator, self._float_perplexity = None, None
        budget = request.options.bit_budget
        if budget is not None and budget.max_drop is not None:
            from winml.modelkit.flows.quantize.held_out_perplexity import held_out_evaluator  # reads tasks

            self._evaluator, self._float_perplexity = held_out_evaluator(request.data, graph.path, budget.max_drop)
        self._variants = QuantizedVariants(graph, self._samples, self._quantizer, None, self._evaluator)
        self._variants.share_starts()
        self._float_bytes = weight_bytes(graph.model)
        self._units: list[_Unit] = []
        self._uniform: dict[_Form, MeasuredVariant] = {}
        self._trials: dict[tuple[_Form, ...], MeasuredVariant] = {}

    def _quantizer(self, model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> QuantizeResult:
        return quantize(model, options, modules, self._request.statistics, self._request.solver)

    def measure(self) -> None:
        """Measure each module alone in each form, and the whole in each."""
        lossy = [form for form in self._forms() if form.precision != FLOAT32]
        # The whole first: what finds blocks with samples walks through the model once for each form.
        for form in lossy:
            self._uniform[form] = self._measured((form,) * len(self._parts))
            self._request.on_progress(f"all modules in {form.name}")
        for number, part in enumerate(self._parts, 1):
            self._units.append(self._unit(part, lossy))
            self._request.on_progress(f"module {number} of {len(self._parts)}")

    def _forms(self) -> tuple[_Form, ...]:
        """Return the forms that a module may have; activations in 16 bits where a provider was named that has them."""
        if self._base.mode != "qdq":
            return FORMS
        has_wide = self._base.ep not in (None, "cpu") and 16 in placement_for(self._base.ep).activation_bits
        return tuple(form for form in _WITH_ACTIVATIONS if has_wide or form.precision != "w8a16")

    def _unit(self, part: ModulePart, forms: Sequence[_Form]) -> _Unit:
        parameters = self._parameters(part)
        size = sum(tensor for tensor in self._weights_of(part).values())
        choices = {_Form(FLOAT32): Choice(size, 0.0)}
        alone: dict[str, float | None] = {}
        for form in forms:
            options = only_options(part, self._base, self._graph.modules)
            measured = self._variants.measure(_with_form(options, form))
            alone[form.name] = decibels = _decibels(measured)
            if decibels is not None:
                noise = max(10 ** (-decibels / 10), _LEAST_NOISE)
                cost = max(size - (self._float_bytes - measured.weight_bytes), 1)
                if form.precision == "w8a16":
                    cost += cost // _WIDE_ACTIVATIONS
                choices[form] = Choice(cost, noise)
        return _Unit(part, choices, alone, parameters)

    def _weights_of(self, part: ModulePart) -> dict[str, int]:
        names = part.node_names
        weights = {constant_weight(node) for node in self._graph.model.graph if node.name in names}
        return {
            value.name or "": value.const_value.nbytes
            for value in weights
            if value is not None and value.const_value is not None
        }

    def _parameters(self, part: ModulePart) -> int:
        initializers = self._graph.model.graph.initializers
        tensors = (initializers[name].const_value for name in self._weights_of(part))
        return sum(tensor.size for tensor in tensors if tensor is not None)

    def choose(self, budget: BitBudget) -> tuple[QuantizeOptions, BudgetSearch]:
        """Return the options of the best form within the limit, and the search."""
        if budget.is_smallest:
            forms = self._smallest()
        else:
            forms = self._best(self._limit(budget), budget)
        for limit in self._frontier_limits():
            if (mixed := self._mixture(limit)) is not None:
                self._measured(mixed)
        return self._options(forms), self._record(budget, forms)

    def _limit(self, budget: BitBudget) -> int:
        """Return the bytes that the weights of the modules may take."""
        if budget.mean_bits is not None:
            return int(budget.mean_bits * self._all_parameters / 8)
        assert budget.max_bytes is not None
        return budget.max_bytes - (self._float_bytes - self._unit_bytes)

    @property
    def _all_parameters(self) -> int:
        return sum(unit.parameters for unit in self._units)

    @property
    def _unit_bytes(self) -> int:
        return sum(unit.choices[_Form(FLOAT32)].cost for unit in self._units)

    def _best(self, limit: int, budget: BitBudget) -> tuple[_Form, ...]:
        """Return the form of each module with the best whole within a limit: a mixture, or a uniform one."""
        found: list[tuple[_Form, ...]] = []
        tried = limit
        for _ in range(_RETRIES):
            mixed = self._mixture(tried)
            if mixed is None:
                break
            over = self._bytes_of(mixed) - limit
            if over <= 0:
                found.append(mixed)
                break
            tried -= over
        found += [(form,) * len(self._parts) for form in self._uniform]
        fitting = [forms for forms in found if self._bytes_of(forms) <= limit]
        if not fitting:
            least = min(map(self._bytes_of, found))
            if budget.max_bytes is not None:
                whole = least + self._float_bytes - self._unit_bytes
                raise UsageError(
                    f"--max-size {budget.words}: all weights take {size_words(whole)} with the fewest bits; those that "
                    "no form with few bits exists for are counted as they are",
                    hint=f"Allow {size_words(whole)} or more.",
                )
            raise UsageError(
                f"--budget {budget.words}: a weight takes {8 * least / self._all_parameters:.2f} bits with the fewest "
                f"bits, scales included ({size_words(least)})",
                hint="Allow more bits.",
            )
        return max(fitting, key=lambda forms: _quality(self._measured(forms)))

    def _smallest(self) -> tuple[_Form, ...]:
        """Return the smallest form that reaches a quality: the limit is halved as long as it does."""
        low = sum(min(choice.cost for choice in unit.choices.values()) for unit in self._units)
        high = self._unit_bytes
        best: tuple[_Form, ...] | None = None
        while high - low > max(self._unit_bytes // 200, 1):
            middle = (low + high) // 2
            mixed = self._mixture(middle)
            if mixed is not None and self._is_good(mixed):
                best, high = mixed, min(middle, self._bytes_of(mixed))
            else:
                low = middle
        for form in self._uniform:
            forms = (form,) * len(self._parts)
            if self._is_good(forms) and (best is None or self._bytes_of(forms) < self._bytes_of(best)):
                best = forms
        if best is None:
            options = self._request.options
            limit = (
                f"--min-sqnr {options.min_sqnr_db:g}" if options.max_drop is None else f"--max-drop {options.max_drop}"
            )
            raise QuantizeError(
                f"{limit}: no form of the model that is smaller than the source reaches it",
                hint="Ask for less, or --exclude the modules that lose most: winml quantize --sensitivity.",
            )
        return best

    def _mixture(self, limit: int) -> tuple[_Form, ...] | None:
        if limit <= 0:
            return None
        found = allocate([list(unit.choices.values()) for unit in self._units], limit)
        if found is None:
            return None
        return tuple([*unit.choices][place] for unit, place in zip(self._units, found, strict=True))

    def _measured(self, forms: tuple[_Form, ...]) -> MeasuredVariant:
        if forms not in self._trials:
            if all(form.precision == FLOAT32 for form in forms):
                return MeasuredVariant(None, 0, self._float_bytes)
            self._trials[forms] = self._variants.measure(self._options(forms), is_judged=True)
        return self._trials[forms]

    def _bytes_of(self, forms: tuple[_Form, ...]) -> int:
        """Return what the weights of the modules take, as it is in the file."""
        return self._unit_bytes - (self._float_bytes - self._measured(forms).weight_bytes)

    def _is_good(self, forms: tuple[_Form, ...]) -> bool:
        """Say whether forms reach what is to be reached; one in which nothing is quantized does not."""
        if all(form.precision == FLOAT32 for form in forms):
            return False
        measured, least_db = self._measured(forms), self._request.options.min_sqnr_db
        if self._evaluator is not None and not self._evaluator.target.is_met(measured):
            return False
        return least_db is None or FidelityTarget("sqnr_db", least_db).is_met(measured)

    def _frontier_limits(self) -> Iterator[int]:
        least = sum(min(choice.cost for choice in unit.choices.values()) for unit in self._units)
        for step in range(1, _FRONTIER + 1):
            yield round(least * (self._unit_bytes / 2 / least) ** (step / (_FRONTIER + 1)))

    def _options(self, forms: Sequence[_Form]) -> QuantizeOptions:
        """Return the options with which each module has its form."""
        if len(set(forms)) == 1:
            return _with_form(self._base, forms[0])
        pairs = sorted(zip(self._parts, forms, strict=True), key=lambda pair: -address.depth(pair[0].module.tag))
        rules = {escape(part.module.tag): form.precision for part, form in pairs}
        sizes = {escape(part.module.tag): form.block_size for part, form in pairs if form.block_size is not None}
        return self._base.model_copy(update={"per_module": rules, "block_sizes": sizes})

    def _record(self, budget: BitBudget, chosen: tuple[_Form, ...]) -> BudgetSearch:
        def bits(size: int) -> float:
            return 8 * size / self._all_parameters

        trials = [
            BudgetTrial(
                _name_of(forms),
                bits(self._bytes_of(forms)),
                form.weight_bytes,
                _decibels(form),
                forms == chosen,
                form.scores.get(PERPLEXITY.name),
            )
            for forms, form in self._trials.items()
        ]
        return BudgetSearch(
            budget.words,
            bits(self._bytes_of(chosen)),
            _name_of(chosen),
            tuple(
                BudgetChoice(
                    unit.part.module.tag,
                    form.precision,
                    form.block_size,
                    unit.parameters,
                    unit.choices[form].cost if form in unit.choices else 0,
                    unit.alone,
                )
                for unit, form in zip(self._units, chosen, strict=True)
            ),
            tuple(sorted(trials, key=lambda trial: trial.size_bytes)),
            self._variants.cost.measured,
            self._samples.about.count,
            self._samples.about.source,
            self._float_perplexity,
        )


def _with_form(options: QuantizeOptions, form: _Form) -> QuantizeOptions:
    """Return options with which everything has a form."""
    mode = "weight-only" if form.block_size is not None else "qdq" if form in _WITH_ACTIVATIONS[:2] else None
    changes = {"precision": form.precision, "mode": mode, "block_size": form.block_size}
    return options.model_copy(update=changes)


def _name_of(forms: Sequence[_Form]) -> str:
    return forms[0].name if len(set(forms)) == 1 else "mixed"


def _decibels(measured: MeasuredVariant) -> float | None:
    if measured.worst is None or not measured.runs or not math.isfinite(measured.worst.sqnr_db):
        return None
    return measured.worst.sqnr_db


def _quality(measured: MeasuredVariant) -> float:
    found = _decibels(measured)
    return -math.inf if found is None else found
