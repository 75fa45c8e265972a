"""Selection of the precision and block size of each module under a limit on bits, size or quality.

Each module is measured alone in each candidate format. The noise of several modules adds up, so a knapsack over the
measured noise selects the format of each module. Noise adds up only approximately. Mixtures on a fixed grid of sizes
are therefore measured as whole models up to the limit, together with uniform models and with raised versions of the
best smaller mixture. The best measured candidate is selected. A larger limit measures all candidates of a smaller
limit, so its result is never worse. The search uses separate samples: the file is judged on the samples of the other
commands.

Limits count as users see them: the bits of all parameters of the file, as ``winml inspect`` counts them, and the size
of the file including graph and metadata.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.compare.quality_samples import MOST_SAMPLES, SampleRequest, default_samples
from winml.modelkit.errors import QuantizeError, UsageError, VerificationError, opt
from winml.modelkit.evaluate.metrics import PERPLEXITY
from winml.modelkit.onnx.weights import to_weightless, weight_bytes
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.progress import part_of_step
from winml.modelkit.quantize import planning, quantized_variants
from winml.modelkit.quantize.calibration.calibration_data import Calibration, CalibrationStatistics
from winml.modelkit.quantize.calibration.layer_calibration import LayerCalibration
from winml.modelkit.quantize.declared_options import Algorithm
from winml.modelkit.quantize.engines.block_quantizers import SolvedWeight
from winml.modelkit.quantize.knapsack import Choice, allocate
from winml.modelkit.quantize.module_parts import ModulePart, list_parts, only_options
from winml.modelkit.quantize.options import BitBudget, QuantizeOptions
from winml.modelkit.quantize.pipeline import quantize
from winml.modelkit.quantize.placements import CPU_PLACEMENT, placement_for
from winml.modelkit.quantize.precisions import BFLOAT16, FLOAT32, INT4, MIXTURE, PRECISIONS, Precision
from winml.modelkit.quantize.preparation import PreparedGraph
from winml.modelkit.quantize.quantized_variants import Samples
from winml.modelkit.quantize.records import BudgetChoice, BudgetSearch, BudgetTrial
from winml.modelkit.quantize.sensitivity_records import FidelityTarget, MeasuredVariant
from winml.modelkit.quantize.unfinished_work import digest_of, graph_digest, samples_digest
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import escape
from winml.modelkit.version import __version__
from winml.modelkit.words import size_words


@dataclass(frozen=True)
class _Format:
    """Candidate format of a module: precision, block size and algorithm."""

    precision: str
    block_size: int | None = None
    algorithm: Algorithm | None = None
    """``None``: the requested algorithm."""

    @property
    def name(self) -> str:
        fmt = self.precision if self.block_size is None else f"{self.precision}/{self.block_size}"
        return fmt if self.algorithm is None else f"{fmt} {self.algorithm}"


def _list_searched_formats(*, with_activations: bool) -> tuple[_Format, ...]:
    """List the candidate formats by rising weight bits: with float activations, or with calibrated activations."""
    return tuple(
        _Format(precision.name, block_size)
        for precision in sorted(PRECISIONS.values(), key=lambda precision: precision.weight_bits)
        for block_size in precision.searched_blocks
        if precision.name == FLOAT32 or _has_fixed_ranges(precision) == with_activations
    )


def _has_fixed_ranges(precision: Precision) -> bool:
    """Return True if the default mode of a precision is ``qdq``, with calibrated activation ranges."""
    return precision.modes[:1] == ("qdq",)


_FORMATS = _list_searched_formats(with_activations=False)
"""Scales are as wide as the weights were: with float32, 2.3, 3.1, 4.3, 5.1 and 8.6 bits."""
_BY_OWN_OUTPUTS = (_Format(INT4, 64), _Format(INT4, 64, "hqq"), _Format(INT4, 16))
"""Additional formats if the algorithm is selected too. No module is run alone in these formats: their loss follows from
the error of the module's outputs relative to :data:`_COMPARED`. With ``hqq``, zero points have the type of the scales:
5 bits."""
_COMPARED = _Format(INT4, 32)
_SINGLE: tuple[Algorithm, ...] = ("gptq", "awq", "k_quant", "rtn", "hqq")
"""Algorithms applied to all modules of the best uniform format if each module may have a separate algorithm."""
_HALF = _Format(BFLOAT16)
"""Format of modules whose operators support no block quantization, such as convolutions."""
_WIDE_ACTIVATIONS = 16
"""16-bit activations add a fraction (one part in this number) to the cost of their weights. Chosen: they take no bytes
of the file, but time. 8 bits are therefore preferred if accurate enough, and 16 bits are preferred to a float
module. 8 or 16 bits by kind add half of it."""
_OTHER_SAMPLES = 700_001
"""Added to the seed: the samples of the search differ from the samples that the file is judged on."""
_FRONTIER = 6
"""Number of larger mixtures measured for the frontier. Chosen: enough for a curve."""
_GRID = ((6.0, 0.1), (10.0, 0.25), (32.0, 1.0))
"""(end, step): mixtures are measured in this step up to this number of bits. Chosen: users request tenths of a bit. 6
bits cost about 40 measurements of the whole model, less than all modules alone."""
_LOWERED = 1.25
"""Uniform formats up to this factor larger than a size are lowered to the size. Chosen: beyond the factor, hardly a
module keeps its format."""
_NAMED = 3
"""Number of weights listed in the error. Chosen: one line."""
_RETRIES = 4
"""Number of times a mixture is solved again if a weight shared by two modules made the mixture larger than its
limit."""
_MARGIN_DB = 1.0
"""Chosen: a file is judged on other samples than the variants of the search."""
_LEAST_NOISE = 1e-12
"""Noise of a module whose format has no measurable effect."""


@dataclass(frozen=True)
class FileBits:
    """Number of parameters of a float file, for mean bits as ``winml inspect`` counts them."""

    parameters: int
    uncounted_bytes: int
    """Bytes of shapes, indices and masks, which have no parameters."""

    @classmethod
    def of_model(cls, model: ir.Model) -> FileBits:
        """Count the parameters of a float graph."""
        from winml.modelkit.onnx.contents import read_contents
        from winml.modelkit.onnx.module_costs import weights_cost  # needed only by a search

        counted = weights_cost(read_contents(to_weightless(model).proto))
        return cls(counted.weight_parameters, weight_bytes(model) - counted.weight_bytes)

    def mean_bits(self, size: int) -> float:
        """Convert bytes of all weights of a variant to mean bits per parameter."""
        return 8 * (size - self.uncounted_bytes) / max(self.parameters, 1)


@dataclass(frozen=True)
class SampleTools:
    """Calibration samples of one quantization, statistics on the samples, and the output file."""

    data: Calibration
    """Holds samples out if the perplexity is a limit."""
    statistics: CalibrationStatistics | None
    """Activation statistics, if a mode needs statistics."""
    solver: LayerCalibration | None
    """Solver for the blocks of weights, if the algorithm needs samples."""
    unfinished: Path | None
    """Folder of measurements until the file is written, if bits or blocks are searched."""
    output: Path
    """Output file."""
    is_external: Callable[[ir.Model], bool | None]
    """model → True if the weights are stored in an external file; ``None`` if external data is mandatory."""


def choose_bits(
    graph: PreparedGraph,
    options: QuantizeOptions,
    run: RunOptions,
    tools: SampleTools,
    file_bytes: Callable[[ir.Model], int],
) -> tuple[QuantizeOptions, BudgetSearch]:
    """Select the format of each module with the least loss within the limit; return the options and the search.

    Args:
        graph: The float graph.
        options: Requested options, including a limit.
        run: Sizes and seed of samples.
        tools: Samples, and statistics on the samples.
        file_bytes: Returns the file size of a quantized graph after completing its metadata.

    Raises:
        UsageError: the limit is below the size of the smallest variant, or the graph names no modules.
        QuantizeError: no variant can be built and run.
        VerificationError: no variant of the model reaches the quality.
    """
    budget = options.bit_budget
    assert budget is not None  # the caller checks this
    chosen = {"precision": options.base.name, "mode": options.mode or "weight-only"}
    base = options.model_copy(update={"budget": None, "max_size": None, "max_drop": None, **chosen})
    if not base.needs_samples:  # only the perplexity used the data
        base = base.model_copy(update={"calibration_data": None, "split": None, "columns": {}})
    graph.refuse_no_modules(run.shown)
    study = _Study(graph, base, options, run, tools, file_bytes)
    study.measure()
    return study.choose(budget)


def measurement_identity(
    graph: PreparedGraph, options: QuantizeOptions, tools: SampleTools, samples: Samples, *, has_evaluator: bool
) -> dict[str, object]:
    """Identify the inputs of the measurements of a search other than the options of a variant."""
    return {
        "graph": graph_digest(graph.model),
        "options": options.model_dump(mode="json", exclude={"min_sqnr_db"}),
        "data": tools.data.request() if options.needs_samples or has_evaluator else {},
        "samples": samples_digest([values.feeds for values in samples.values]),
        "winml": __version__,
        "onnxruntime": onnxruntime_version(),
    }


@dataclass
class _Unit:
    """A module, and its cost and loss in each candidate format."""

    part: ModulePart
    choices: dict[_Format, Choice]
    alone: dict[str, float | None]
    parameters: int


class _Study:
    """Measurements of one model and its modules in the candidate formats."""

    def __init__(
        self,
        graph: PreparedGraph,
        base: QuantizeOptions,
        requested: QuantizeOptions,
        run: RunOptions,
        tools: SampleTools,
        file_bytes: Callable[[ir.Model], int],
    ) -> None:
        self._graph, self._base, self._requested, self._tools = graph, base, requested, tools
        self._bytes_of_file = file_bytes
        self._quantizer = functools.partial(quantize, calibration=tools.statistics, solver=tools.solver)
        plan = planning.plan_quantization(graph.model, base, graph.modules)
        self._in_blocks = {node.name for node in plan.nodes if node.mode is not None}
        parts = list_parts(plan if base.mode == "qdq" else self._add_half_nodes(plan), graph.modules, None, None)
        self._parts = [part for part in parts if part.is_unit and part.nodes]
        self._float_bytes = weight_bytes(graph.model)
        self._bits = FileBits.of_model(graph.model)
        judging = requested.judging_request(run.seed)
        samples = SampleRequest(
            replace(run, seed=run.seed + _OTHER_SAMPLES),
            tools.data.model_folder,
            None if judging is None else judging.others(MOST_SAMPLES),
            count=requested.samples or default_samples(self._float_bytes),
            model=tools.data.source,
        )
        self._samples = quantized_variants.take_samples(
            graph,
            samples,
            None,
            hint="Quantize a file with trained weights, with its processor in the folder of the model.",
        )
        self._evaluator, self._float_perplexity = None, None
        budget = requested.bit_budget
        if budget is not None and budget.max_drop is not None:
            from winml.modelkit.quantize.calibration.held_out_perplexity import held_out_evaluator  # imports the tasks

            session = graph.session(name=run.shown)
            self._evaluator, self._float_perplexity = held_out_evaluator(tools.data, session, budget.max_drop)
        assert tools.unfinished is not None  # always set for a search
        identity = measurement_identity(
            graph, requested, tools, self._samples, has_evaluator=self._evaluator is not None
        )
        self._stored = quantized_variants.MeasuredVariants(tools.unfinished / "measured.json", identity, overwrite=True)
        self._variants = quantized_variants.QuantizedVariants(
            graph, self._samples, self._quantizer, self._stored, evaluator=self._evaluator
        )
        self._units: list[_Unit] = []
        self._uniform: dict[_Format, MeasuredVariant] = {}
        self._trials: dict[tuple[_Format, ...], MeasuredVariant] = {}
        self._file_sizes: dict[tuple[_Format, ...], int] = {}

    def _add_half_nodes(self, plan: planning.QuantizationPlan) -> planning.QuantizationPlan:
        """Add nodes that only 16-bit floats support to the plan, such as convolutions with weights."""
        halves: dict[str, planning.PlannedNode] = {}
        with contextlib.suppress(UsageError):  # no node supports the format
            options = _set_format(self._base, _HALF)
            planned = planning.plan_quantization(self._graph.model, options, self._graph.modules).nodes
            halves = {node.name: node for node in planned if node.mode is not None and node.has_weight}
        nodes = (halves.get(node.name, node) if node.mode is None else node for node in plan.nodes)
        return planning.QuantizationPlan(tuple(nodes))

    def _measure_variant(self, options: QuantizeOptions, *, is_judged: bool = False) -> MeasuredVariant:
        """Measure a variant, or read the measurement of an interrupted run."""
        key = digest_of(options.model_dump(mode="json"), is_judged)
        if not self._variants.has_measured(key):
            self._variants.share_starts()
        return self._variants.measure(key, options, is_judged=is_judged)

    def measure(self) -> None:
        """Measure each module alone, and the whole model, in each lossy format."""
        lossy = [fmt for fmt in self._list_formats() if fmt.precision != FLOAT32]
        # The whole model first: the block solver walks through the model once for each format.
        for number, fmt in enumerate(lossy, 1):
            with self._report_step(1, f"format {number} of {len(lossy)}"):
                if self._tools.solver is not None and fmt.block_size is not None:
                    # Required even if an interrupted run measured the format: mixtures use these blocks.
                    options = self._make_options((fmt,) * len(self._parts))
                    with contextlib.suppress(QuantizeError):  # reported by the measurement
                        self._quantizer(self._graph.model.clone(), options, self._graph.modules)
                self._uniform[fmt] = self._measure_whole((fmt,) * len(self._parts))
        for number, part in enumerate(self._parts, 1):
            with self._report_step(2, f"module {number} of {len(self._parts)}"):
                self._units.append(self._measure_unit(part, lossy))

    def _report_step(self, number: int, step_text: str) -> contextlib.AbstractContextManager[None]:
        """Report the progress of a search step, such as the formats or the modules."""
        return part_of_step(f"step {number} of {self._step_count}, {step_text}")

    @property
    def _step_count(self) -> int:
        """Number of search steps, for progress messages."""
        budget = self._requested.bit_budget
        is_smallest = budget is not None and budget.is_smallest
        return 4 if is_smallest and self._evaluator is None else 3

    def _list_formats(self) -> tuple[_Format, ...]:
        """List the candidate formats of a module; 16-bit activations only if the selected provider supports 16 bits."""
        if self._base.mode != "qdq":
            return (*_FORMATS, *_BY_OWN_OUTPUTS) if self._compares_algorithms else _FORMATS
        placement = placement_for(self._base.ep)
        allowed = {8} if self._base.ep in (None, CPU_PLACEMENT) else {8, *placement.activation_bits}
        return tuple(
            fmt
            for fmt in _list_searched_formats(with_activations=True)
            if (PRECISIONS[fmt.precision].activation_bits or 8) in allowed
            and (placement.has_bits_by_kind or not PRECISIONS[fmt.precision].has_bits_by_kind)
        )

    def _measure_unit(self, part: ModulePart, formats: Sequence[_Format]) -> _Unit:
        """Measure a module alone in each candidate format; return cost and loss by format."""
        parameters = self._graph.parameters_of(part.node_names)
        size = sum(tensor.nbytes for tensor in self._graph.weights_of(part.node_names).values())
        choices = {_Format(FLOAT32): Choice(size, 0.0)}
        alone: dict[str, float | None] = {}
        for fmt in formats:
            if fmt in _BY_OWN_OUTPUTS or not self._supports_format(part, fmt):
                continue
            options = only_options(part, self._base, self._graph.modules)
            measured = self._measure_variant(_set_format(options, fmt))
            alone[fmt.name] = decibels = _read_decibels(measured)
            if decibels is not None:
                noise = max(10 ** (-decibels / 10), _LEAST_NOISE)
                cost = max(size - (self._float_bytes - measured.weight_bytes), 1)
                precision = PRECISIONS[fmt.precision]
                if precision.activation_bits == 16:
                    cost += cost // (_WIDE_ACTIVATIONS * (2 if precision.has_bits_by_kind else 1))
                choices[fmt] = Choice(cost, noise)
        if self._compares_algorithms:
            choices |= self._estimate_choices(part, choices)
        return _Unit(part, choices, alone, parameters)

    @property
    def _compares_algorithms(self) -> bool:
        """True if the search selects the algorithm of each module too."""
        return self._base.algorithm == "auto" and self._tools.solver is not None

    def _estimate_choices(self, part: ModulePart, choices: Mapping[_Format, Choice]) -> dict[_Format, Choice]:
        """Estimate cost and loss of formats that were not run for a module, from the error of the module's outputs."""
        compared, estimates = self._solved_blocks(part, _COMPARED), {}
        error = _own_error(compared)
        if _COMPARED not in choices or not error:
            return {}
        for fmt in _BY_OWN_OUTPUTS:
            if self._uniform[fmt].runs and len(solved := self._solved_blocks(part, fmt)) == len(compared):
                loss = choices[_COMPARED].loss * _own_error(solved) / error
                cost = _estimate_cost(choices[_COMPARED].cost, self._graph.parameters_of(part.node_names), fmt)
                estimates[fmt] = Choice(cost, max(loss, _LEAST_NOISE))
        return estimates

    def _supports_format(self, part: ModulePart, fmt: _Format) -> bool:
        """Return True if a module supports a format; modules of convolutions support no blocks."""
        return fmt in (_HALF, _Format(FLOAT32)) or not self._in_blocks.isdisjoint(part.node_names)

    def _solved_blocks(self, part: ModulePart, fmt: _Format) -> list[SolvedWeight]:
        """Blocks solved on samples for the weights of a module in a format; ``[]`` without a solver."""
        solver = self._tools.solver
        if solver is None or fmt.block_size is None:
            return []
        bits = PRECISIONS[fmt.precision].weight_bits
        names = self._graph.weights_of(part.node_names).keys()
        return solver.find_solved(names, bits, fmt.block_size, fmt.algorithm or self._base.algorithm)

    def choose(self, budget: BitBudget) -> tuple[QuantizeOptions, BudgetSearch]:
        """Select the best variant within the limit, and return its options and the search."""
        reached = 0
        if budget.is_smallest:
            formats = self._find_smallest()
        else:
            reached = self._compute_limit_bytes(budget)
            formats = self._select_best(reached, budget)
        for limit in self._frontier_limits():
            # Smaller mixtures were measured during the selection.
            if limit > reached and (mixed := self._solve_mixture(limit)) is not None:
                self._measure_whole(mixed)
        return self._make_options(formats), self._make_record(budget, formats)

    def _compute_limit_bytes(self, budget: BitBudget) -> int:
        """Maximum size of the modules' weights, in bytes."""
        if budget.mean_bits is not None:
            return self._bytes_at(budget.mean_bits)
        assert budget.max_bytes is not None
        return budget.max_bytes - self._least_graph_bytes - self._fixed_bytes

    def _bytes_at(self, mean_bits: float) -> int:
        """Convert mean bits per parameter of the file to bytes of the modules' weights."""
        counted = math.floor(mean_bits * self._bits.parameters / 8 + 1e-6)
        return counted + self._bits.uncounted_bytes - self._fixed_bytes

    def _mean_bits(self, size: int) -> float:
        """Convert bytes of the modules' weights to mean bits per parameter of the file."""
        return self._bits.mean_bits(size + self._fixed_bytes)

    @property
    def _unit_bytes(self) -> int:
        """Bytes of all units in float."""
        return sum(unit.choices[_Format(FLOAT32)].cost for unit in self._units)

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of the file's tensors that belong to no searched module."""
        return self._float_bytes - self._unit_bytes

    @property
    def _least_bytes(self) -> int:
        """Bytes of all units, each in its smallest format."""
        return sum(min(choice.cost for choice in unit.choices.values()) for unit in self._units)

    @functools.cached_property
    def _least_graph_bytes(self) -> int:
        """Approximate minimum size of graph and metadata: variants differ in added nodes and rules."""
        tried = [self._smallest_mixture, *[(fmt,) * len(self._parts) for fmt in self._uniform][:1]]
        run = [formats for formats in tried if self._measure_whole(formats).runs]
        return min(
            (self._file_bytes(formats) - self._measure_whole(formats).weight_bytes for formats in run), default=0
        )

    @property
    def _smallest_mixture(self) -> tuple[_Format, ...]:
        """Format with the smallest cost, for each unit."""
        return tuple(min(unit.choices, key=unit.choices.__getitem__) for unit in self._units)

    def _select_best(self, limit: int, budget: BitBudget) -> tuple[_Format, ...]:
        """Select the variant with the best quality within a limit: a mixture or a uniform variant.

        Raises:
            UsageError: the smallest variant exceeds the limit.
            QuantizeError: no variant can be built and run.
        """
        candidates = self._measure_candidates(limit)
        fitting = [formats for formats in candidates if self._bytes_of(formats) <= limit]
        for formats in sorted(fitting, key=lambda formats: (-self._measure_decibels(formats), self._bytes_of(formats))):
            if budget.max_bytes is None or self._file_bytes(formats) <= budget.max_bytes:
                return formats
        if not candidates:
            problem = next((trial.problem for trial in self._trials.values() if trial.problem), "")
            raise QuantizeError(f"no quantized variant can be measured: {problem}", hint=f"Use another {opt.mode}.")
        if (
            budget.max_bytes is not None
            and self._file_bytes(smallest := self._find_smallest_file(candidates)) <= budget.max_bytes
        ):
            return smallest  # its graph is smaller than the graphs that the limit of weights was computed from
        raise self._limit_error(budget, candidates)

    def _find_smallest_file(self, tried: Sequence[tuple[_Format, ...]]) -> tuple[_Format, ...]:
        """Find the variant with the smallest file; the variant with the smallest weights may have a larger graph."""
        smallest, *larger = sorted(tried, key=self._bytes_of)
        for formats in larger:
            if self._measure_whole(formats).weight_bytes + self._least_graph_bytes < self._file_bytes(smallest):
                smallest = min(smallest, formats, key=self._file_bytes)
        return smallest

    def _measure_candidates(
        self, limit: int, is_enough: Callable[[tuple[_Format, ...]], bool] | None = None
    ) -> list[tuple[_Format, ...]]:
        """Measured variants of the whole model: uniform variants, and mixtures on a grid of sizes up to a limit.

        Noise adds up only approximately, so each size is also derived from measurements of the whole model: modules of
        the best smaller variant are raised, and modules of a slightly larger uniform variant are lowered. Sizes
        increase; the search ends at the first size with a sufficient mixture.
        """
        uniform = [(fmt,) * len(self._parts) for fmt in (*self._uniform, *self._single_algorithm_formats(limit))]
        candidates = [formats for formats in uniform if self._measure_whole(formats).runs]
        candidates.append(self._smallest_mixture)
        smallest_bytes = self._least_bytes
        steps = [step for step in map(self._bytes_at, _iterate_mean_bits()) if smallest_bytes <= step <= limit]
        for number, step in enumerate(steps, 1):
            with self._report_step(self._step_count, f"size {number} of {len(steps)}"):
                mixed = self._solve_fitting(step)
                reached = -math.inf if mixed is None else self._measure_decibels(mixed)
                smaller = [formats for formats in candidates if self._bytes_of(formats) <= step]
                larger = [formats for formats in uniform if step < self._bytes_of(formats) <= _LOWERED * step]
                tried = [mixed]
                for beside, compared in ((smaller, operator.ge), (larger, operator.le)):
                    best = max(beside, key=self._measure_decibels, default=None)
                    if best is not None and self._measure_decibels(best) > reached:
                        tried.append(self._solve_fitting(step, [*self._filter_choices(best, compared)]))
                candidates += (measured_forms := [formats for formats in tried if formats is not None])
                if is_enough is not None and any(is_enough(formats) for formats in measured_forms):
                    break
        return [formats for formats in dict.fromkeys(candidates) if self._measure_whole(formats).runs]

    def _measure_decibels(self, formats: tuple[_Format, ...]) -> float:
        """Measure the SQNR of the whole graph in dB; minus infinity if not comparable."""
        decibels = _read_decibels(self._measure_whole(formats))
        return -math.inf if decibels is None else decibels

    def _filter_choices(
        self, formats: tuple[_Format, ...], compared: Callable[[int, int], bool]
    ) -> Iterator[dict[_Format, Choice]]:
        """Yield the choices of each module that cost at least (``ge``) or at most (``le``) as much as in a variant."""
        for unit, fmt in zip(self._units, formats, strict=True):
            current = unit.choices.get(fmt, unit.choices[_Format(FLOAT32)])
            yield {tried: choice for tried, choice in unit.choices.items() if compared(choice.cost, current.cost)}

    def _solve_fitting(
        self, limit: int, choices: Sequence[Mapping[_Format, Choice]] | None = None
    ) -> tuple[_Format, ...] | None:
        """Mixture with the smallest sum of noise whose measured weights fit the limit; ``None`` if no mixture fits.

        A weight shared by two modules may make a mixture larger than its solved size.
        """
        tried = limit
        for _ in range(_RETRIES):
            mixed = self._solve_mixture(tried, choices)
            if mixed is None:
                return None
            over = self._bytes_of(mixed) - limit
            if over <= 0:
                return mixed
            tried -= over
        return None

    def _file_bytes(self, formats: tuple[_Format, ...]) -> int:
        """File size of a variant, metadata included."""
        if formats not in self._file_sizes:
            reasons = {choice.tag: choice.why for choice in self._list_choices(formats)}
            model = self._graph.model.clone()
            result = self._quantizer(model, self._make_options(formats), self._graph.modules, reasons=reasons)
            self._file_sizes[formats] = self._bytes_of_file(result.model)
        return self._file_sizes[formats]

    def _limit_error(self, budget: BitBudget, tried: Sequence[tuple[_Format, ...]]) -> UsageError:
        """Build the error for a limit that no variant fits: the smallest variant and its largest weights."""
        if budget.max_bytes is None:
            smallest = min(tried, key=self._bytes_of)
            needed = self._mean_bits(self._bytes_of(smallest))
            return UsageError(
                f"{opt.budget} {budget.words}: the smallest variant has {needed:.2f} bits per parameter, scales and "
                f"floating-point weights included; {self._largest_words(smallest, budget.mean_bits or 0.0)}",
                hint=self._sufficient_words(
                    smallest,
                    tried,
                    lambda formats: f"{math.ceil(10 * self._mean_bits(self._bytes_of(formats))) / 10:g}bits",
                ),
            )
        smallest = self._find_smallest_file(tried)
        size, weights = self._file_bytes(smallest), self._measure_whole(smallest).weight_bytes
        return UsageError(
            f"{opt.max_size} {budget.words}: the smallest file has {size_words(size)}, of which weights take "
            f"{size_words(weights)}, graph and metadata the rest; {self._largest_words(smallest, 0.0)}",
            hint=self._sufficient_words(smallest, tried, lambda formats: _sufficient_size(self._file_bytes(formats))),
        )

    def _sufficient_words(
        self,
        lowest: tuple[_Format, ...],
        tried: Sequence[tuple[_Format, ...]],
        limit_of: Callable[[tuple[_Format, ...]], str],
    ) -> str:
        """Return the hint with the smallest limit whose variant also reaches the minimum SQNR.

        Args:
            lowest: The smallest variant.
            tried: All measured variants.
            limit_of: Returns the limit that a variant keeps.
        """
        reaching = [formats for formats in tried if self._minimum_of(formats).is_met(self._measure_whole(formats))]
        reached = min(reaching, key=self._bytes_of, default=None)
        quality = self._minimum_of(lowest).quality(self._measure_whole(lowest))
        # Without a finite quality the minimum does not apply.
        if lowest in reaching or not math.isfinite(quality):
            return f"Allow {limit_of(lowest)} or more."
        lowered = (
            f"{limit_of(lowest)} or more with {opt.min_sqnr} {math.floor(quality - _MARGIN_DB):g} (or {opt.no_verify})"
        )
        return f"Allow {lowered}." if reached is None else f"Allow {limit_of(reached)} or more, or {lowered}."

    def _minimum_of(self, formats: tuple[_Format, ...]) -> FidelityTarget:
        """Return the minimum SQNR of a variant, with the margin between the samples of the search and those judged."""
        least_db = self._requested.min_sqnr_db
        if least_db is None:
            used = [PRECISIONS[fmt.precision].least_sqnr_db for fmt in formats if fmt.precision != FLOAT32]
            least_db = min(used, default=-math.inf)
        return FidelityTarget("sqnr_db", least_db + _MARGIN_DB)

    def _largest_words(self, formats: tuple[_Format, ...], mean_bits: float) -> str:
        """Describe the weights that most exceed a number of bits, and the tensors that belong to no searched module."""
        choices = sorted(
            self._list_choices(formats), key=lambda choice: mean_bits * choice.parameters / 8 - choice.size_bytes
        )
        parts = [f"{choice.tag} {choice.form} {size_words(choice.size_bytes)}" for choice in choices[:_NAMED]]
        remaining_bytes = self._fixed_bytes - self._bits.uncounted_bytes
        if remaining_bytes > 0:
            parts.append(f"biases, normalizations and others that stay floating-point {size_words(remaining_bytes)}")
        return f"largest: {', '.join(parts)}"

    def _single_algorithm_formats(self, limit: int) -> Iterator[_Format]:
        """Yield the best uniform format within a limit with each single algorithm, if modules may differ."""
        formats = [fmt for fmt in self._uniform if fmt.block_size is not None and fmt.algorithm is None]
        fitting = [fmt for fmt in formats if self._bytes_of((fmt,) * len(self._parts)) <= limit]
        if self._compares_algorithms and fitting:
            best = max(fitting, key=lambda fmt: self._measure_decibels((fmt,) * len(self._parts)))
            for algorithm in _SINGLE:
                if algorithm != "hqq" or best.precision == INT4:
                    yield replace(best, algorithm=algorithm)

    def _find_smallest(self) -> tuple[_Format, ...]:
        """Find the smallest variant of sufficient quality, by bisection of the size.

        Quality does not rise with every size, and bisection may skip smaller variants of sufficient quality. All
        smaller mixtures of the grid are therefore measured too, unless the quality is a perplexity, which takes long to
        measure.
        """
        low = self._least_bytes
        high = self._unit_bytes
        best: tuple[_Format, ...] | None = None
        nearest, number = max(self._unit_bytes // 200, 1), 0
        while high - low > nearest:
            middle, number = (low + high) // 2, number + 1
            with self._report_step(
                3, f"bisection {number} of {number + math.ceil(math.log2((high - low) / nearest)) - 1}"
            ):
                mixed = self._solve_mixture(middle)
                if mixed is not None and self._is_sufficient(mixed):
                    best, high = mixed, min(middle, self._bytes_of(mixed))
                else:
                    low = middle
        if self._evaluator is None:
            self._measure_candidates(high if best is None else self._bytes_of(best), self._is_sufficient)
        for formats in list(self._trials):  # uniform variants, and mixtures outside the bisection
            if self._is_sufficient(formats) and (best is None or self._bytes_of(formats) < self._bytes_of(best)):
                best = formats
        if best is None:
            options = self._requested
            limit = (
                f"{opt.min_sqnr} {options.min_sqnr_db:g}"
                if options.max_drop is None
                else f"{opt.max_drop} {options.max_drop}"
            )
            raise VerificationError(
                f"{limit}: no variant smaller than the source reaches it",
                hint=f"Lower the requirement, or {opt.exclude} the most sensitive modules, which winml quantize "
                "--sensitivity lists.",
            )
        return best

    def _solve_mixture(
        self, limit: int, choices: Sequence[Mapping[_Format, Choice]] | None = None
    ) -> tuple[_Format, ...] | None:
        """Solve for the formats with the smallest sum of noise within a limit; ``None`` if no mixture fits."""
        if limit <= 0:
            return None
        choices = [unit.choices for unit in self._units] if choices is None else choices
        positions = allocate([list(of_unit.values()) for of_unit in choices], limit)
        if positions is None:
            return None
        return tuple([*of_unit][position] for of_unit, position in zip(choices, positions, strict=True))

    def _measure_whole(self, formats: tuple[_Format, ...]) -> MeasuredVariant:
        """Measure the whole model with a format for each unit; each variant is measured once."""
        if formats not in self._trials:
            if all(fmt.precision == FLOAT32 for fmt in formats):
                return MeasuredVariant(None, 0, self._float_bytes)
            self._trials[formats] = self._measure_variant(self._make_options(formats), is_judged=True)
        return self._trials[formats]

    def _bytes_of(self, formats: tuple[_Format, ...]) -> int:
        """Measured bytes of the modules' weights in a variant."""
        return self._unit_bytes - (self._float_bytes - self._measure_whole(formats).weight_bytes)

    def _is_sufficient(self, formats: tuple[_Format, ...]) -> bool:
        """Return True if a variant meets the requested quality; False for a variant without a quantized module."""
        if all(fmt.precision == FLOAT32 for fmt in formats):
            return False
        measured, least_db = self._measure_whole(formats), self._requested.min_sqnr_db
        if self._evaluator is not None and not self._evaluator.target.is_met(measured):
            return False
        return least_db is None or FidelityTarget("sqnr_db", least_db).is_met(measured)

    def _frontier_limits(self) -> Iterator[int]:
        """Yield the sizes of the frontier in bytes: geometric steps between the smallest and half the float size."""
        smallest_bytes = self._least_bytes
        for step in range(1, _FRONTIER + 1):
            yield round(smallest_bytes * (self._unit_bytes / 2 / smallest_bytes) ** (step / (_FRONTIER + 1)))

    def _make_options(self, formats: Sequence[_Format]) -> QuantizeOptions:
        """Options that assign each module its format."""
        if len(set(formats)) == 1:
            return _set_format(self._base, formats[0])
        pairs = sorted(zip(self._parts, formats, strict=True), key=lambda pair: -address.depth(pair[0].module.tag))
        rules = {escape(part.module.tag): fmt.precision for part, fmt in pairs}
        sizes = {escape(part.module.tag): fmt.block_size for part, fmt in pairs if fmt.block_size is not None}
        algorithms: dict[str, Algorithm] = {}
        if any(fmt.algorithm is not None for fmt in formats):  # for all modules then: a parent may have a separate one
            algorithms = {escape(part.module.tag): fmt.algorithm or self._base.algorithm for part, fmt in pairs}
        return self._base.model_copy(update={"per_module": rules, "block_sizes": sizes, "algorithms": algorithms})

    def _make_record(self, budget: BitBudget, chosen: tuple[_Format, ...]) -> BudgetSearch:
        """Return the record of the search: trials, chosen formats and sizes."""
        trials = [
            BudgetTrial(
                _format_name(formats),
                self._mean_bits(self._bytes_of(formats)),
                measured.weight_bytes,
                _read_decibels(measured),
                formats == chosen,
                measured.scores.get(PERPLEXITY.name),
                None if measured.worst is None or not measured.runs else measured.worst.lower_db,
                is_mixture=_is_mixture(formats),
            )
            for formats, measured in self._trials.items()
        ]
        return BudgetSearch(
            budget.words,
            self._mean_bits(self._bytes_of(chosen)),
            _format_name(chosen),
            self._list_choices(chosen),
            tuple(sorted(trials, key=lambda trial: trial.size_bytes)),
            len(self._stored),
            self._samples.about.count,
            self._samples.about.source,
            self._float_perplexity,
            self._stored.reused,
        )

    def _list_choices(self, formats: tuple[_Format, ...]) -> tuple[BudgetChoice, ...]:
        """Describe the format of every unit."""
        return tuple(self._describe_choice(unit, fmt) for unit, fmt in zip(self._units, formats, strict=True))

    def _describe_choice(self, unit: _Unit, fmt: _Format) -> BudgetChoice:
        """Describe the format of one unit, with the error of each algorithm if algorithms are compared."""
        if not self._supports_format(unit.part, fmt):
            fmt = _Format(FLOAT32)
        size = unit.choices[fmt].cost if fmt in unit.choices else 0
        tag, parameters = unit.part.module.tag, unit.parameters
        choice = BudgetChoice(tag, fmt.precision, fmt.block_size, parameters, size, unit.alone)
        solved = self._solved_blocks(unit.part, fmt) if self._compares_algorithms else []
        if not solved:
            return choice if fmt.algorithm is None else replace(choice, algorithm=fmt.algorithm)
        names = dict.fromkeys(name for weight in solved for name in weight.errors)
        errors = {name: sum(weight.errors.get(name, math.inf) for weight in solved) / len(solved) for name in names}
        own_db = {name: -10 * math.log10(error) for name, error in errors.items() if 0 < error < math.inf}
        algorithm = ", ".join(dict.fromkeys(weight.algorithm for weight in solved))
        return replace(choice, algorithm=algorithm, own_db=own_db)


def _estimate_cost(cost: int, parameters: int, fmt: _Format) -> int:
    """Bytes of weights in a 4-bit format; ``cost`` is their size in :data:`_COMPARED`."""
    assert _COMPARED.block_size is not None
    assert fmt.block_size is not None
    of_block = (cost - parameters / 2) * _COMPARED.block_size / parameters
    if fmt.algorithm == "hqq":
        of_block = 2 * (of_block - 0.5)  # the zero point has the type of the scale instead of half a byte
    return round(parameters / 2 + of_block * parameters / fmt.block_size)


def _own_error(solved: Sequence[SolvedWeight]) -> float:
    """Mean relative squared error of the outputs of solved weights."""
    errors = [weight.errors[weight.algorithm] for weight in solved if weight.algorithm in weight.errors]
    return sum(errors) / len(errors) if errors else 0.0


def _set_format(options: QuantizeOptions, fmt: _Format) -> QuantizeOptions:
    """Return options that assign all modules one format."""
    of_precision = "qdq" if _has_fixed_ranges(PRECISIONS[fmt.precision]) else None
    mode = "weight-only" if fmt.block_size is not None else of_precision
    changes: dict[str, object] = {"precision": fmt.precision, "mode": mode, "block_size": fmt.block_size}
    if fmt.algorithm is not None:
        # A rule, so that its blocks are solved and compared like the blocks of other rules.
        changes["algorithms"] = {"**": fmt.algorithm}
    return options.model_copy(update=changes)


def _iterate_mean_bits() -> Iterator[float]:
    """Yield mean bits in rising order; identical for every limit."""
    reached = 1.0
    for end, step in _GRID:
        while reached < end:
            reached = round(reached + step, 2)
            yield reached


def _sufficient_size(size_bytes: int) -> str:
    """Round a file size up for the option, with a margin: recorded export times vary in length.

    >>> _sufficient_size(58_727), _sufficient_size(1_234_567_890)
    ('58.8kB', '1234.6MB')
    """
    unit, name = (1e6, "MB") if size_bytes >= 1e6 else (1e3, "kB")
    return f"{math.ceil(10 * size_bytes / unit) / 10:g}{name}" if size_bytes < 1e5 * unit else f"{size_bytes}B"


def _is_mixture(formats: Sequence[_Format]) -> bool:
    """Return True if modules have different formats."""
    return len(set(formats)) > 1


def _format_name(formats: Sequence[_Format]) -> str:
    """Return the name of a single format, or ``mixed``."""
    return MIXTURE if _is_mixture(formats) else formats[0].name


def _read_decibels(measured: MeasuredVariant) -> float | None:
    """Return the SQNR of a variant's worst output in dB; ``None`` if not finite, or if the variant does not run."""
    decibels = measured.sqnr_db
    return decibels if decibels is not None and math.isfinite(decibels) else None
