"""Measurement of each module of a graph alone, and search for the modules that stay float in the smallest file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from winml.modelkit.compare.quality_samples import MOST_SAMPLES, SampleRequest
from winml.modelkit.onnx.weights import file_bytes, weight_bytes
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.progress import Progress
from winml.modelkit.quantize.knapsack import Choice, allocate
from winml.modelkit.quantize.module_parts import ModulePart, excluding_options, only_options, shorten_rules
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import QuantizationPlan
from winml.modelkit.quantize.preparation import PreparedGraph
from winml.modelkit.quantize.quantized_variants import QuantizedVariants, Samples, variant_key
from winml.modelkit.quantize.sensitivity_records import (
    ExcludeList,
    FidelityTarget,
    MeasuredVariant,
    MetricTarget,
    ModuleSensitivity,
    TimedVariant,
    Trial,
)
from winml.modelkit.tags import address
from winml.modelkit.words import count_noun


@dataclass(frozen=True, eq=False)
class _Unit:
    """Part that may stay float."""

    part: ModulePart
    cost_bytes: int
    """Additional size of the file if the part stays float, at least 1."""
    loss: float
    """Noise power of the part quantized alone, relative to the signal."""
    is_saving: bool
    """True if the part saves bytes of weights when quantized."""

    @property
    def name(self) -> str:
        """Name in the description of a trial."""
        return f"{self.part.module.path or self.part.module.tag}{' (own nodes)' if self.part.inner else ''}"


@dataclass(frozen=True)
class _ExcludeTrial:
    """Result of a search for excluded modules."""

    excluded: tuple[_Unit, ...]
    """In descending order of sensitivity."""
    variant: MeasuredVariant
    is_met: bool


_NEAREST = 200
"""Sizes are bisected to one part in this number, and count as equal within it: the shorter list is then selected.
Chosen: half a percent of the file."""
_OVERFLOW_LOSS = 1e9
"""Noise power, relative to the signal, of a module whose outputs cannot be compared. Chosen: above that of all others
together."""


@dataclass
class _ExcludeSearch:
    """Search for the modules that must stay float in the smallest file; all measurements are stored in :attr:`trials`.

    The noise of several modules adds up approximately, so a knapsack over the noise of each module alone selects the
    modules that stay float within a size, and bisection finds the size. Modules are then quantized again, in descending
    order of size, if the target is still met.
    """

    units: Sequence[_Unit]
    """In descending order of sensitivity; at least one that saves bytes is quantized."""
    target: FidelityTarget | MetricTarget
    """Target of the search, which may be stricter than :attr:`requested`."""
    requested: FidelityTarget | MetricTarget
    """Target that the trials are recorded with."""
    measure: Callable[[Sequence[ModulePart]], MeasuredVariant]
    """Measures the model with some parts in float."""
    trials: list[Trial] = field(default_factory=list)
    where: str = ""
    """Samples of the measurements in the description of a trial, if not those of the search."""
    _lists: list[_ExcludeTrial] = field(default_factory=list)

    def find(self) -> _ExcludeTrial:
        """Find the list with the smallest file that meets the target; else the list of best quality."""
        self._lists.clear()  # of an earlier search with another target
        whole = self._try_units((), "all modules quantized")
        least = min(self._saving, key=lambda unit: unit.loss, default=None)
        if whole.is_met or least is None:
            return whole
        most = tuple(unit for unit in self.units if unit is not least)
        if not most or not self._try_units(most, f"all but {least.name} in float").is_met:
            return max(self._lists, key=lambda exclusion: self.target.quality(exclusion.variant))
        self._remove_needless(self._bisect_size())
        return self._select_smallest()

    def shorten(self, excluded: tuple[_Unit, ...], variant: MeasuredVariant) -> _ExcludeTrial:
        """Quantize modules of a list that meets the target again, while it is met."""
        self._lists[:] = [_ExcludeTrial(excluded, variant, is_met=True)]
        self._remove_needless(self._lists[0])
        return self._select_smallest()

    def _select_smallest(self) -> _ExcludeTrial:
        """Select the smallest file that meets the target; of nearly equal files, the shortest list."""
        reaching = [exclusion for exclusion in self._lists if exclusion.is_met]
        smallest = min(exclusion.variant.file_bytes for exclusion in reaching)
        near = (tried for tried in reaching if tried.variant.file_bytes <= smallest * (1 + 1 / _NEAREST))
        return min(near, key=lambda exclusion: (len(exclusion.excluded), exclusion.variant.file_bytes))

    @functools.cached_property
    def _saving(self) -> list[_Unit]:
        """Units of which at least one is quantized: those that save bytes, else all."""
        return [unit for unit in self.units if unit.is_saving] or [*self.units]

    def _bisect_size(self) -> _ExcludeTrial:
        """Find the additional size within which some modules in float meet the target, by bisection."""
        best = self._lists[1]  # all but one module in float
        low, high = 0, sum(unit.cost_bytes for unit in best.excluded)
        nearest = max(best.variant.file_bytes // _NEAREST, 1)
        choices = [[Choice(0, unit.loss), Choice(unit.cost_bytes, 0.0)] for unit in self.units]
        while high - low > nearest:
            middle = (low + high) // 2
            positions = allocate(choices, middle) or [0] * len(self.units)
            excluded = tuple(unit for unit, is_float in zip(self.units, positions, strict=True) if is_float)
            tried = self._try_units(excluded, f"{count_noun(len(excluded), 'module')} in float") if excluded else None
            if tried is not None and tried.is_met:
                best, high = tried, min(middle, sum(unit.cost_bytes for unit in excluded))
            else:
                low = middle
        return best

    def _remove_needless(self, best: _ExcludeTrial) -> None:
        """Quantize excluded modules again, the largest first and in halving groups, while the target is met."""
        # Among modules of equal size, the less sensitive module is removed first.
        ranked = sorted(enumerate(best.excluded), key=lambda pair: (pair[1].cost_bytes, pair[0]), reverse=True)
        waiting = [[unit for _, unit in ranked]]
        while waiting:
            group = waiting.pop()
            fewer = tuple(unit for unit in best.excluded if unit not in group)
            names = group[0].name if len(group) == 1 else f"{len(group)} modules"
            if (tried := self._try_units(fewer, f"{names} quantized again{self.where}")).is_met:
                best = tried
                continue
            if len(group) > 1:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]

    def _try_units(self, excluded: tuple[_Unit, ...], description: str) -> _ExcludeTrial:
        """Measure the model with some units in float, and record the trial, or return an earlier one."""
        if (earlier := next((tried for tried in self._lists if tried.excluded == excluded), None)) is not None:
            return earlier
        variant = self.measure([unit.part for unit in excluded])
        # The float model meets every target, and is no answer.
        is_float = bool(excluded) and all(unit in excluded for unit in self._saving)
        exclusion = _ExcludeTrial(excluded, variant, not is_float and self.target.is_met(variant))
        self._lists.append(exclusion)
        is_met = not is_float and self.requested.is_met(variant)
        self.trials.append(Trial(len(excluded), description, variant, is_met))
        return exclusion


_OTHER_SAMPLES = 500_009
"""Added to the seed: the search uses these samples, and the result is judged on the samples of the other commands."""
_JUDGED = ", on the samples of the result"
_SEARCHES = 5
"""Maximum number of searches, each with a stricter target, until the list meets the target on the samples that it is
judged on. Chosen: earlier measurements are reused, and most lists meet the target at the first or second search."""
_SHARING = 6
"""Minimum number of variants for an additional run of the float graph, so that each variant starts at its first
difference. Chosen: a variant that starts in the middle saves half of its runs."""
FEW_SAMPLES = 4
"""Default number of samples of the first pass. Chosen: all variants are compared on the same samples, so that few
suffice to rank them (rank correlation with all samples: bert-base 0.98, MiniLM 0.999)."""
_MANY_VALUES = 4096
"""Minimum number of output values per sample for a first pass. Chosen: few samples of a classifier are a handful of
numbers, which rank modules by chance."""
_MANY_VARIANTS = 16
"""Minimum number of variants for a first pass. Chosen: fewer are measured on all samples in a minute."""
_MEASURED_FULLY = 8
"""Number of variants of the most sensitive modules that are measured on all samples afterwards. Chosen: the rows shown
first in the table."""


def other_samples(request: SampleRequest) -> SampleRequest:
    """Request for samples of the same kind and number, on which modules are selected."""
    data_set = None if request.data_set is None else request.data_set.others(request.data_set.samples or MOST_SAMPLES)
    return replace(request, run=replace(request.run, seed=request.run.seed + _OTHER_SAMPLES), data_set=data_set)


def first_samples(samples: Samples) -> int | None:
    """Number of samples of the first ranking; ``None``: all samples, if these are few or have few values."""
    values = max(array.size for array in samples.answers[0].values())
    return FEW_SAMPLES if len(samples.values) >= 2 * FEW_SAMPLES and values >= _MANY_VALUES else None


@dataclass
class ModuleStudy:
    """Measurements of one model and its modules."""

    graph: PreparedGraph
    options: QuantizeOptions
    plan: QuantizationPlan
    parts: tuple[ModulePart, ...]
    variants: QuantizedVariants
    """Measures on the samples that results are judged on."""
    selecting: QuantizedVariants
    """Measures on the samples that select modules."""
    float_scores: Mapping[str, float] = field(default_factory=dict)
    """Metric name → score of the float graph, if a target was not met."""
    _estimates: dict[str, MeasuredVariant] = field(default_factory=dict)
    _done: int = 0
    _total: int = 1

    @property
    def planned(self) -> frozenset[str]:
        """Names of the nodes quantized in the whole model."""
        return frozenset(node.name for node in self.plan.nodes if node.mode is not None)

    @property
    def whole(self) -> MeasuredVariant:
        """Measurement with all modules quantized."""
        return self.variants.stored[variant_key(self.planned)]

    def find_measurement(self, part: ModulePart) -> MeasuredVariant | None:
        """Measurement or estimate of a part; ``None`` without nodes to quantize."""
        if not part.nodes:
            return None
        variant = self.variants.stored.get(variant_key(part.node_names))
        return self._estimates[variant_key(part.node_names)] if variant is None else variant

    def measure_modules(self, jobs: int, progress: Progress | None, few: int | None) -> None:
        """Measure the whole model and each part; parts with the same nodes are measured once.

        Args:
            jobs: Number of parallel measurements.
            progress: Called after each measurement.
            few: Number of samples to rank parts on; the most sensitive parts are then measured on all samples.
                ``None``: all parts are measured on all samples.
        """
        whole = variant_key(self.planned)
        requested = {whole: self.options}
        for part in self.parts:
            if part.nodes:
                requested.setdefault(variant_key(part.node_names), only_options(part, self.options, self.graph.modules))
        self._total = sum(self.variants.stored.get(key) is None for key in requested) or 1
        if few is None or len(requested) < _MANY_VARIANTS:
            self._measure_variants(requested, jobs, progress, None)
            return
        composed = self._composed_parts()
        composed.pop(whole, None)
        separate = {key: options for key, options in requested.items() if key != whole and key not in composed}
        self._total = sum(self.variants.stored.get(key) is None for key in separate) + _MEASURED_FULLY
        self._measure_variants(separate, jobs, progress, few)
        float_bytes = weight_bytes(self.graph.model)
        for key, parts in composed.items():
            variants = [variant for part in parts if (variant := self.find_measurement(part)) is not None]
            if (estimate := MeasuredVariant.estimated(variants, float_bytes)) is not None:
                self._estimates[key] = estimate
        unknown = {key: requested[key] for key in composed if key not in self._estimates}
        self._measure_variants({whole: self.options}, jobs, progress, None)
        self._measure_variants(unknown, jobs, progress, few)
        ranked = dict.fromkeys(variant_key(part.node_names) for part in self._rank_parts(self.parts) if part.nodes)
        certain = {key: requested[key] for key in list(ranked)[:_MEASURED_FULLY]}
        self._measure_variants(certain, jobs, progress, None)

    def _composed_parts(self) -> dict[str, tuple[ModulePart, ...]]:
        """Key of a part → the units with the same nodes in total, for parts of several units."""
        units = [part for part in self.parts if part.is_unit]
        composed = {}
        for part in self.parts:
            inner = tuple(unit for unit in units if unit.node_names <= part.node_names)
            if len(inner) > 1 and frozenset().union(*(unit.node_names for unit in inner)) == part.node_names:
                composed[variant_key(part.node_names)] = inner
        return composed

    def _measure_variants(
        self, requested: Mapping[str, QuantizeOptions], jobs: int, progress: Progress | None, count: int | None
    ) -> None:
        """Measure the variants without a measurement on ``count`` samples; ``None``: on all samples."""
        missing = {key: setup for key, setup in requested.items() if not self.variants.has_measured(key, count=count)}
        if len(missing) >= _SHARING:
            self.variants.share_starts()
        measure = functools.partial(self.variants.measure, count=count)
        with contextlib.ExitStack() as stack:
            run: Callable[..., Iterable[MeasuredVariant]] = map
            if jobs > 1:
                run = stack.enter_context(ThreadPoolExecutor(jobs)).map
            for _ in run(measure, missing, missing.values()):
                self._done += 1
                if progress is not None:
                    progress(self._done, min(self._done / self._total, 1.0))

    def search(self, target: FidelityTarget | MetricTarget) -> ExcludeList:
        """Find the modules that must stay float, without timing."""
        units = [part for part in self._rank_parts(self.parts) if part.is_unit and self._count_nodes(part)]
        search = _ExcludeSearch(
            units=[
                _Unit(unit, self._float_cost(unit), self._noise_power(unit), self.bytes_saved(unit) > 0)
                for unit in units
            ],
            target=target,
            requested=target,
            measure=lambda some: self._measure_excluding(some, units, self.selecting),
        )
        exclusion = search.find()
        excluded = self._add_weightless([unit.part for unit in exclusion.excluded], units)
        judged = self._measure_excluding(excluded, units, self.variants)
        for _ in range(_SEARCHES - 1):
            if not exclusion.is_met or isinstance(target, MetricTarget) or isinstance(search.target, MetricTarget):
                break
            if not (missing := target.shortfall(judged)):
                break
            # The judging samples are harder: search again with a target stricter by the difference.
            search.target = search.target.stricter(missing)
            exclusion = search.find()
            excluded = self._add_weightless([unit.part for unit in exclusion.excluded], units)
            judged = self._measure_excluding(excluded, units, self.variants)
        if self.variants is not self.selecting and target.is_met(judged):
            # The search was stricter than requested, or its samples harder.
            final = replace(
                search,
                target=target,
                measure=lambda some: self._measure_excluding(self._add_weightless(some, units), units, self.variants),
                where=_JUDGED,
            )
            exclusion = final.shorten(exclusion.excluded, judged)
            excluded = self._add_weightless([unit.part for unit in exclusion.excluded], units)
            judged = exclusion.variant
        return ExcludeList(
            target=target,
            is_met=target.is_met(judged),
            rules=self._list_rules(excluded, units),
            excluded=tuple(unit.module.tag for unit in excluded),
            form=judged,
            trials=tuple(search.trials),
        )

    def _list_rules(self, excluded: Sequence[ModulePart], units: Sequence[ModulePart]) -> Mapping[str, str]:
        """Selector → precision for some units in float; in the fewest selectors that mean the same nodes."""
        if not excluded:
            return self.options.per_module
        excluding = excluding_options(excluded, units, self.options)
        indifferent = [part.node_names for part in self.parts if part.is_unit and not self._count_nodes(part)]
        return shorten_rules(self.graph, self.options, excluding, self.planned.difference(*indifferent))

    def _add_weightless(self, excluded: Sequence[ModulePart], units: Sequence[ModulePart]) -> tuple[ModulePart, ...]:
        """Also exclude the units without weights inside an excluded module, so that one selector means all of it.

        In float16, normalizations and activations are units. Excluded, they cost no bytes and save conversions.
        """
        tags, listed = {unit.module.tag for unit in units}, {unit.module.tag for unit in excluded}
        added: list[ModulePart] = []
        for unit in sorted(units, key=lambda unit: address.depth(unit.module.tag)):
            around = address.nearest_ancestor(unit.module.tag, tags)
            if unit in excluded or around not in listed or self.graph.parameters_of(unit.node_names):
                continue
            added.append(unit)
            listed.add(unit.module.tag)
        return (*excluded, *added) if len(excluded) + len(added) < len(units) else tuple(excluded)

    def timed(self, listed: ExcludeList, timing: LatencyOptions) -> tuple[ExcludeList, TimedVariant | None]:
        """Add the latency of a list, and measure the fully quantized variant.

        A list that misses its target and a whole model that does not run are not timed.
        """
        if not listed.is_met:
            self.float_scores = self.variants.float_scores()
            return listed, None
        rules = self.options.model_copy(update={"per_module": dict(listed.rules)})
        whole = self.variants.timed(self.options, timing) if self.whole.runs else None
        return replace(listed, latency=self.variants.timed(rules, timing) if listed.excluded else whole), whole

    def _count_nodes(self, part: ModulePart) -> int:
        """Number of quantized nodes of a part; 0 without nodes to quantize."""
        variant = self.find_measurement(part)
        return variant.nodes if variant is not None else 0

    def _rank_parts(self, parts: Iterable[ModulePart]) -> list[ModulePart]:
        """Sort parts by descending error; parts without quantized nodes come last."""

        def damage(part: ModulePart) -> tuple[int, float]:
            """Sort key of a part: whether nodes were quantized, then SQNR in dB."""
            variant = self.find_measurement(part)
            if variant is None or not variant.nodes:
                return (2 if variant is None else 1), 0.0
            return 0, variant.worst.sqnr_db if variant.worst is not None else float("-inf")

        return sorted(parts, key=damage)

    def _measure_excluding(
        self, excluded: Sequence[ModulePart], units: Sequence[ModulePart], variants: QuantizedVariants
    ) -> MeasuredVariant:
        """Measure the variant in which some units stay float, using the equivalent rules."""
        prefix = "" if variants is self.variants else "selecting "
        key = prefix + variant_key(self.planned.difference(*(unit.node_names for unit in excluded)))
        return variants.measure(key, excluding_options(excluded, units, self.options), is_judged=True)

    def rows(self) -> tuple[ModuleSensitivity, ...]:
        """Rows of the ranking."""
        return tuple(map(self._make_row, self._rank_parts(self.parts)))

    def _make_row(self, part: ModulePart) -> ModuleSensitivity:
        """Create the record of a part."""
        return ModuleSensitivity(
            path=part.module.path,
            tag=part.module.tag,
            class_name=part.module.class_name,
            part=part.part,
            precision=part.precision,
            parameters=self.graph.parameters_of(part.node_names),
            form=self.find_measurement(part),
            size_bytes_saved=self.bytes_saved(part),
        )

    def _noise_power(self, part: ModulePart) -> float:
        """Noise power of a part quantized alone, relative to the signal."""
        decibels = None if (variant := self.find_measurement(part)) is None else variant.sqnr_db
        return _OVERFLOW_LOSS if decibels is None else min(10 ** (-decibels / 10), _OVERFLOW_LOSS)

    def _float_cost(self, part: ModulePart) -> int:
        """Additional bytes of the file if a part stays float: its weights, and conversions around it."""
        variant, conversions = self.find_measurement(part), 0
        if variant is not None and variant.file_bytes:
            conversions = max(variant.file_bytes - variant.weight_bytes - self._float_graph_bytes, 0)
        return max(self.bytes_saved(part) + conversions, 1)

    @functools.cached_property
    def _float_graph_bytes(self) -> int:
        """Bytes of the float file without weights."""
        return file_bytes(self.graph.model) - weight_bytes(self.graph.model)

    def bytes_saved(self, part: ModulePart) -> int:
        """Bytes of weights saved by quantizing a part alone; 0 if not measured."""
        variant = self.find_measurement(part)
        return (
            weight_bytes(self.graph.model) - variant.weight_bytes if variant is not None and variant.weight_bytes else 0
        )
