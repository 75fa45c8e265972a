"""Chooses bits and block size of each module so that the file keeps a limit and loses least.

Each module is measured alone in each form; the noise of several adds up, so a knapsack over the measured noise says
which modules have which form. Mixtures and uniform files of at most the same size are then measured as a whole, and the
best is taken. Chosen by samples of their own: the file is judged on those of every verb.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.evaluate.metrics import PERPLEXITY
from winml.modelkit.flows.quality_samples import SampleRequest, default_samples
from winml.modelkit.flows.quantize.calibration_data import Calibration, CalibrationStatistics
from winml.modelkit.flows.quantize.layer_calibration import LayerCalibration
from winml.modelkit.flows.quantize.quantized_variants import (
    FloatGraph,
    MeasuredVariants,
    ModulePart,
    QuantizedVariants,
    list_parts,
    only_options,
    take_samples,
    weight_bytes,
)
from winml.modelkit.flows.quantize.unfinished_work import digest_of, graph_digest, samples_digest
from winml.modelkit.graph.cutting import GraphModules
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.selector import escape
from winml.modelkit.quantize.bit_allocation import Choice, allocate
from winml.modelkit.quantize.block_quantizers import BlockForm
from winml.modelkit.quantize.calibrated_quantizers import SolvedWeight
from winml.modelkit.quantize.declared_options import Algorithm
from winml.modelkit.quantize.options import BitBudget, QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult, quantize
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.planning import WeightKey, constant_weight, plan_quantization
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS
from winml.modelkit.quantize.weight_only_engine import BlockWeight
from winml.modelkit.results.quantization_budget import BudgetChoice, BudgetSearch, BudgetTrial
from winml.modelkit.results.quantization_sensitivity import FidelityTarget, MeasuredVariant
from winml.modelkit.runtime.opened_model import RunOptions
from winml.modelkit.runtime.sessions import onnxruntime_version
from winml.modelkit.version import __version__
from winml.modelkit.words import size_words

__all__ = ["SearchTools", "SolvedOnce", "choose_bits"]


@dataclass(frozen=True)
class _Form:
    """A form that a module may have."""

    precision: str
    block_size: int | None = None
    algorithm: Algorithm | None = None
    """None: the one that is requested."""

    @property
    def name(self) -> str:
        form = self.precision if self.block_size is None else f"{self.precision}/{self.block_size}"
        return form if self.algorithm is None else f"{form} {self.algorithm}"


_BLOCKS = (("int2", 128), ("int2", 32), ("int4", 128), ("int4", 32), ("int8", 64))
FORMS = (*(_Form(*blocks) for blocks in _BLOCKS), _Form("bf16"), _Form(FLOAT32))
"""Chosen, from the fewest bits. Scales are as wide as the weights were: with float32, 2.3, 3.1, 4.3, 5.1 and 8.6
bits."""
_BY_OWN_OUTPUTS = (_Form("int4", 64), _Form("int4", 64, "hqq"), _Form("int4", 16))
"""Chosen from as well where the algorithm is: a module alone in them is not run, since the error of its own outputs
says what they lose beside :data:`_COMPARED`. With ``hqq``, zero points are as wide as scales: 5 bits."""
_COMPARED = _Form("int4", 32)
_SINGLE: tuple[Algorithm, ...] = ("gptq", "awq", "k_quant", "rtn", "hqq")
"""Algorithms that all modules may have in the best uniform form, where each module may have its own."""
_WITH_ACTIVATIONS = (_Form("w8a8"), _Form("w8a16"), _Form(FLOAT32))
"""Chosen, from the fewest bits, where activations are quantized, too."""
_WIDE_ACTIVATIONS = 16
"""Activations in 16 bits count as so many parts of their weights and one more. Chosen: they take no bytes of the file,
but time; so 8 bits are preferred where they are good enough, and 16 to a module in float."""
_OTHER_SAMPLES = 700_001
"""Added to the seed: forms are chosen by samples that the file is not judged on."""
_FRONTIER = 6
"""Mixtures of other sizes that are measured for the frontier. Chosen: enough for a curve."""
_RETRIES = 4
"""Mixtures that are solved again where a weight that two modules share made one larger than its limit."""
_LEAST_NOISE = 1e-12
"""Of a module whose form changes nothing that a measurement shows."""


class SolvedOnce:
    """Finds the blocks of each weight in each form once, for all graphs that are made of one file."""

    def __init__(self, calibration: LayerCalibration) -> None:
        """Hold nothing yet."""
        self.calibration = calibration
        self._solved: dict[tuple[WeightKey, BlockForm, str], SolvedWeight] = {}

    def solve(self, model: ir.Model, weights: Sequence[BlockWeight]) -> dict[WeightKey, SolvedWeight]:
        """Return the blocks of weights; only those not found before are looked for."""
        if missing := [weight for weight in weights if _as_asked(weight) not in self._solved]:
            found = self.calibration.solve(model, missing)
            self._solved.update({_as_asked(weight): found[weight.key] for weight in missing})
        return {weight.key: self._solved[_as_asked(weight)] for weight in weights}

    def found(self, names: Collection[str], bits: int, block_size: int, algorithm: str) -> list[SolvedWeight]:
        """Return what was found for weights of these names in a form."""
        return [
            solved
            for (key, form, asked), solved in self._solved.items()
            if key.name in names and (form.bits, form.block_size, asked) == (bits, block_size, algorithm)
        ]

    def as_record(self) -> dict[str, object]:
        """Return what the blocks come from, JSON-ready."""
        return self.calibration.as_record()


def _as_asked(weight: BlockWeight) -> tuple[WeightKey, BlockForm, str]:
    return weight.key, weight.form, weight.algorithm


@dataclass(frozen=True)
class SearchTools:
    """What a search measures with."""

    data: Calibration
    """Holds samples out, where the perplexity is a limit."""
    solver: SolvedOnce | None
    """Finds blocks of weights, where the algorithm needs samples."""
    statistics: CalibrationStatistics | None
    """Of activations, where they are quantized."""
    processors: Path | None
    """Folder of what makes samples; None: they are random."""
    float_file: Path | None
    """File of the float graph; None: it is in memory only."""
    unfinished: Path
    """Folder of what was measured, until the file is written."""
    tell: Callable[[str], None]
    """Called after each measurement."""


def choose_bits(
    graph: FloatGraph, options: QuantizeOptions, run: RunOptions, tools: SearchTools
) -> tuple[QuantizeOptions, BudgetSearch]:
    """Return the options with which each module has the bits that keep a limit and lose least, and the search.

    Args:
        graph: The float graph.
        options: What is asked for; they state a limit.
        run: Sizes and seed of samples.
        tools: What is measured with.

    Raises:
        UsageError: the limit is below what the fewest bits take, or the graph names no modules.
        QuantizeError: no form of the model reaches the quality.
    """
    budget = options.bit_budget
    assert budget is not None  # whoever calls has one
    chosen = {"precision": options.base.name, "mode": options.mode or "weight-only"}
    base = options.model_copy(update={"budget": None, "max_size": None, "max_drop": None, **chosen})
    if not base.needs_samples:  # the data were for the perplexity alone
        base = base.model_copy(update={"calibration_data": None, "split": None, "columns": {}})
    if not graph.modules.modules:
        raise UsageError(
            f"{run.shown}: the nodes have no module information",
            hint="Export it with winml export, or bring tags over from the file it was made of: winml retag.",
        )
    study = _Study(graph, base, _Request(options, run, tools))
    study.measure()
    return study.choose(budget)


@dataclass(frozen=True)
class _Request:
    """What is searched, and on which samples."""

    options: QuantizeOptions
    """As they were stated."""
    run: RunOptions
    tools: SearchTools


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
        self._float_bytes = weight_bytes(graph.model)
        samples = SampleRequest(
            replace(request.run, seed=request.run.seed + _OTHER_SAMPLES),
            request.tools.processors,
            count=request.options.samples or default_samples(self._float_bytes),
            tries_sizes=True,
            model=request.tools.float_file,
        )
        self._samples = take_samples(graph, samples, None)
        self._evaluator, self._float_perplexity = None, None
        budget = request.options.bit_budget
        if budget is not None and budget.max_drop is not None:
            from winml.modelkit.flows.quantize.held_out_perplexity import held_out_evaluator  # reads tasks

            session = graph.session(name=request.run.shown)
            self._evaluator, self._float_perplexity = held_out_evaluator(request.tools.data, session, budget.max_drop)
        self._variants = QuantizedVariants(graph, self._samples, self._quantizer, None, self._evaluator)
        self._starts_are_shared = False
        self._measurements = MeasuredVariants(
            request.tools.unfinished / "measured.json", self._depends_on(), overwrite=True
        )
        self._reused: set[str] = set()
        self._units: list[_Unit] = []
        self._uniform: dict[_Form, MeasuredVariant] = {}
        self._trials: dict[tuple[_Form, ...], MeasuredVariant] = {}

    def _quantizer(self, model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> QuantizeResult:
        return quantize(model, options, modules, self._request.tools.statistics, self._request.tools.solver)

    def _depends_on(self) -> dict[str, object]:
        """Return what a measurement depends on, beside the options of the form."""
        request = self._request
        return {
            "graph": graph_digest(self._graph.model),
            "options": request.options.model_dump(mode="json", exclude={"min_sqnr_db"}),
            "data": request.tools.data.request() if request.options.needs_samples or self._evaluator else {},
            "samples": samples_digest([values.feeds for values in self._samples.values]),
            "winml": __version__,
            "onnxruntime": onnxruntime_version(),
        }

    def _variant(self, options: QuantizeOptions, *, is_judged: bool = False) -> MeasuredVariant:
        """Measure a form; what an interrupted run measured is taken over."""
        key = digest_of(options.model_dump(mode="json"), is_judged)
        if (found := self._measurements.get(key)) is not None:
            self._reused.add(key)
            return found
        if not self._starts_are_shared:
            self._variants.share_starts()
            self._starts_are_shared = True
        measured = self._variants.measure(options, is_judged=is_judged)
        self._measurements.put(key, measured)
        return measured

    def measure(self) -> None:
        """Measure each module alone in each form, and the whole in each."""
        lossy = [form for form in self._forms() if form.precision != FLOAT32]
        # The whole first: what finds blocks with samples walks through the model once for each form.
        for form in lossy:
            if self._request.tools.solver is not None and form.block_size is not None:
                # Also where the form was measured by an interrupted run: a mixture takes these blocks.
                options = self._options((form,) * len(self._parts))
                with contextlib.suppress(QuantizeError):  # told where it is measured
                    self._quantizer(self._graph.model.clone(), options, self._graph.modules)
            self._uniform[form] = self._measured((form,) * len(self._parts))
            self._request.tools.tell(f"all modules in {form.name}")
        for number, part in enumerate(self._parts, 1):
            self._units.append(self._unit(part, lossy))
            self._request.tools.tell(f"module {number} of {len(self._parts)}")

    def _forms(self) -> tuple[_Form, ...]:
        """Return the forms that a module may have; activations in 16 bits where a provider was named that has them."""
        if self._base.mode != "qdq":
            return (*FORMS, *_BY_OWN_OUTPUTS) if self._compares_algorithms else FORMS
        has_wide = self._base.ep not in (None, "cpu") and 16 in placement_for(self._base.ep).activation_bits
        return tuple(form for form in _WITH_ACTIVATIONS if has_wide or form.precision != "w8a16")

    def _unit(self, part: ModulePart, forms: Sequence[_Form]) -> _Unit:
        parameters = self._parameters(part)
        size = sum(tensor for tensor in self._weights_of(part).values())
        choices = {_Form(FLOAT32): Choice(size, 0.0)}
        alone: dict[str, float | None] = {}
        for form in forms:
            if form in _BY_OWN_OUTPUTS:
                continue
            options = only_options(part, self._base, self._graph.modules)
            measured = self._variant(_with_form(options, form))
            alone[form.name] = decibels = _decibels(measured)
            if decibels is not None:
                noise = max(10 ** (-decibels / 10), _LEAST_NOISE)
                cost = max(size - (self._float_bytes - measured.weight_bytes), 1)
                if form.precision == "w8a16":
                    cost += cost // _WIDE_ACTIVATIONS
                choices[form] = Choice(cost, noise)
        if self._compares_algorithms:
            choices |= self._by_own_outputs(part, choices)
        return _Unit(part, choices, alone, parameters)

    @property
    def _compares_algorithms(self) -> bool:
        return self._base.algorithm == "auto" and self._request.tools.solver is not None

    def _by_own_outputs(self, part: ModulePart, choices: Mapping[_Form, Choice]) -> dict[_Form, Choice]:
        """Return forms that a module was not run in, by the error of its own outputs beside that in a form it was."""
        compared, found = self._found_blocks(part, _COMPARED), {}
        error = _own_error(compared)
        if _COMPARED not in choices or not error:
            return {}
        for form in _BY_OWN_OUTPUTS:
            if self._uniform[form].runs and len(solved := self._found_blocks(part, form)) == len(compared):
                loss = choices[_COMPARED].loss * _own_error(solved) / error
                cost = _cost_beside(choices[_COMPARED].cost, self._parameters(part), form)
                found[form] = Choice(cost, max(loss, _LEAST_NOISE))
        return found

    def _found_blocks(self, part: ModulePart, form: _Form) -> list[SolvedWeight]:
        """Return what was found for the weights of a module in a form, where its algorithm needs samples."""
        solver = self._request.tools.solver
        if solver is None or form.block_size is None:
            return []
        bits = PRECISIONS[form.precision].weight_bits
        return solver.found(
            self._weights_of(part).keys(), bits, form.block_size, form.algorithm or self._base.algorithm
        )

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
        found += [(form,) * len(self._parts) for form in (*self._uniform, *self._of_one_algorithm(limit))]
        fitting = [forms for forms in found if self._bytes_of(forms) <= limit]
        if not fitting:
            least = min(map(self._bytes_of, found))
            if budget.max_bytes is not None:
                whole = least + self._float_bytes - self._unit_bytes
                raise UsageError(
                    f"--max-size {budget.words}: all weights take {size_words(whole)} with the fewest bits; "
                    "weights that cannot be quantized are counted in their present size",
                    hint=f"Allow {size_words(whole)} or more.",
                )
            raise UsageError(
                f"--budget {budget.words}: a weight takes {8 * least / self._all_parameters:.2f} bits with the fewest "
                f"bits, scales included ({size_words(least)})",
                hint="Allow more bits.",
            )
        return max(fitting, key=lambda forms: _quality(self._measured(forms)))

    def _of_one_algorithm(self, limit: int) -> Iterator[_Form]:
        """Yield the best uniform form within a limit by each algorithm, where each module may have its own."""
        forms = [form for form in self._uniform if form.block_size is not None and form.algorithm is None]
        fitting = [form for form in forms if self._bytes_of((form,) * len(self._parts)) <= limit]
        if self._compares_algorithms and fitting:
            best = max(fitting, key=lambda form: _quality(self._measured((form,) * len(self._parts))))
            for algorithm in _SINGLE:
                if algorithm != "hqq" or best.precision == "int4":
                    yield replace(best, algorithm=algorithm)

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
                f"{limit}: no variant smaller than the source reaches it",
                hint="Lower the requirement, or --exclude the most sensitive modules, which winml quantize "
                "--sensitivity lists.",
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
            self._trials[forms] = self._variant(self._options(forms), is_judged=True)
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
        algorithms: dict[str, Algorithm] = {}
        if any(form.algorithm is not None for form in forms):  # then of all: the module around one may have its own
            algorithms = {escape(part.module.tag): form.algorithm or self._base.algorithm for part, form in pairs}
        return self._base.model_copy(update={"per_module": rules, "block_sizes": sizes, "algorithms": algorithms})

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
            tuple(self._choice(unit, form) for unit, form in zip(self._units, chosen, strict=True)),
            tuple(sorted(trials, key=lambda trial: trial.size_bytes)),
            len(self._measurements),
            self._samples.about.count,
            self._samples.about.source,
            self._float_perplexity,
            len(self._reused),
        )

    def _choice(self, unit: _Unit, form: _Form) -> BudgetChoice:
        size = unit.choices[form].cost if form in unit.choices else 0
        tag, parameters = unit.part.module.tag, unit.parameters
        choice = BudgetChoice(tag, form.precision, form.block_size, parameters, size, unit.alone)
        solved = self._found_blocks(unit.part, form) if self._compares_algorithms else []
        if not solved:
            return choice if form.algorithm is None else replace(choice, algorithm=form.algorithm)
        names = dict.fromkeys(name for found in solved for name in found.errors)
        errors = {name: sum(found.errors.get(name, math.inf) for found in solved) / len(solved) for name in names}
        own_db = {name: -10 * math.log10(error) for name, error in errors.items() if 0 < error < math.inf}
        algorithm = ", ".join(dict.fromkeys(found.algorithm for found in solved))
        return replace(choice, algorithm=algorithm, own_db=own_db)


def _cost_beside(cost: int, parameters: int, form: _Form) -> int:
    """Return the bytes of weights in a form of 4 bits; ``cost`` is what they take in :data:`_COMPARED`."""
    assert _COMPARED.block_size is not None
    assert form.block_size is not None
    of_block = (cost - parameters / 2) * _COMPARED.block_size / parameters
    if form.algorithm == "hqq":
        of_block = 2 * (of_block - 0.5)  # the zero point is as wide as the scale, and not half a byte
    return round(parameters / 2 + of_block * parameters / form.block_size)


def _own_error(solved: Sequence[SolvedWeight]) -> float:
    """Return the squared error of the outputs of some products over their squared size, on average."""
    errors = [found.errors[found.algorithm] for found in solved if found.algorithm in found.errors]
    return sum(errors) / len(errors) if errors else 0.0


def _with_form(options: QuantizeOptions, form: _Form) -> QuantizeOptions:
    """Return options with which everything has a form."""
    mode = "weight-only" if form.block_size is not None else "qdq" if form in _WITH_ACTIVATIONS[:2] else None
    changes: dict[str, object] = {"precision": form.precision, "mode": mode, "block_size": form.block_size}
    if form.algorithm is not None:
        # A rule, so that its blocks are found and compared as those of the others.
        changes["algorithms"] = {"**": form.algorithm}
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
