"""Optimization from file to file: optimizes a graph, or reports the effect of each capability.

Reading, normalization, comparison and writing are common to all commands that change a graph (``graph_file``). Imports
no PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from winml.modelkit.compare.files import ReadSamples, refuse_different
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.quality_samples import JudgingData
from winml.modelkit.errors import OptimizeError, StageError, UsageError, opt, spell
from winml.modelkit.file_names import files_folder
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.onnx.bundle import is_one_of_several
from winml.modelkit.onnx.pinning import open_dimensions, pin_dimensions, sizes_of_dimensions
from winml.modelkit.onnx.specs import stated_sums, summed_sizes
from winml.modelkit.optimize import records
from winml.modelkit.optimize.capabilities import CAPABILITIES, Capability
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.options import options_of, parse_options
from winml.modelkit.ort.default_sizes import default_size
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.progress import OnStep
from winml.modelkit.python_functions import python_function
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.tags.tagging import all_nodes, operator_name
from winml.modelkit.transform import graph_file
from winml.modelkit.transform.module_functions import graph_modules, selected_nodes

_LISTED_CAPABILITIES = 4
"""Maximum number of capabilities that a plan lists by name. Chosen: they fit on a line; ``--list`` shows all."""

MAX_ROUNDS = 5
"""Chosen: two rounds settle every model tried, the second finding nothing."""

AnalyzeRound = Callable[[records.OptimizationRound], Mapping[str, Any] | None]
"""Called after each round; returns the flags of the next round, or None to keep the same flags."""


def optimization(
    options: OptimizeOptions, sizes: Mapping[str, int], data: JudgingData | None = None
) -> SingleOptimization:
    """Create the requested optimization.

    Args:
        options: Options of the optimization.
        sizes: Sizes of dynamic dimensions to compare at.
        data: Data that outputs are compared on; None: samples beside the source, or random values.

    Raises:
        UsageError: the options contradict each other.
    """
    options.refuse_whole_graph_options()
    return SingleOptimization(options, sizes, data or JudgingData())


@python_function(opset="opset")
def run_optimize_analyze_loop(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_rounds: int = MAX_ROUNDS,
    analyze: AnalyzeRound | None = None,
    overwrite: bool = False,
    verify: bool = True,
    external_data: bool | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
    **flags: Any,
) -> records.OptimizationLoop:
    """Optimize an ONNX file in rounds, until a round changes nothing.

    A change may enable further changes in the next round. After each round the changes by module are
    reported to ``analyze``, which may choose the flags of the next round. The graph stays in memory between rounds; the
    file is compared with ``model`` and written once.

    Args:
        model: The file; it is not changed.
        output: The ``.onnx`` file to write.
        max_rounds: Maximum number of rounds, at least 1.
        analyze: Called after each round; returns the flags of the next round (``{}``: none), or None to keep the
            current flags.
        overwrite: Replace an existing file.
        verify: Compare the result with ``model`` in ONNX Runtime.
        external_data: As for :func:`~winml.modelkit.optimize_model`.
        seed: Seed of the inputs that outputs are compared on.
        on_step: Called when a step starts and when it ends.
        **flags: As for :func:`~winml.modelkit.optimize_model`; the flags of the first round.

    Returns:
        The record of the optimization and of every round; the file is written.

    Raises:
        UsageError: an unknown flag, an output that exists, or no round.
        WinMLError: as :func:`~winml.modelkit.optimize_model` raises.

    Example:
        ```python
        loop = run_optimize_analyze_loop("model.onnx", "looped.onnx", level="full")
        print([(item.number, item.changed) for item in loop.rounds])
        ```
    """
    if max_rounds < 1:
        raise UsageError(f"max_rounds {max_rounds}: at least one round is needed", hint="Set it to 1 or more.")
    options = parse_options(OptimizeOptions, flags, "run_optimize_analyze_loop")
    options.refuse_whole_graph_options()
    task = graph_file.GraphFileTask(
        Path(model),
        Path(output),
        overwrite=overwrite,
        verify=verify,
        seed=seed,
        external_data=external_data,
        external_from_bytes=graph_file.EXTERNAL_BYTES,
    )
    work = _OptimizationInRounds([options], max_rounds, analyze)
    return records.OptimizationLoop(graph_file.make_file(task, work, on_step), tuple(work.rounds))


class _Optimization(graph_file.FileWork[OptimizeResult, records.OptimizedFile]):
    """Common base of a single optimization and of several rounds."""

    step_name: ClassVar[str] = "optimization"

    @property
    @abstractmethod
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """Options requested so far, in order."""

    @property
    def is_requested(self) -> bool:
        """True if any optimization was requested so far."""
        return not all(options.is_empty for options in self.requested_options)

    @property
    def folds_constants(self) -> bool:
        """True unless constant folding is off; read before the work, so from the options of the first round."""
        return self.requested_options[0].folds_constants

    def enabled_names(self) -> tuple[str, ...]:
        """Return the capabilities enabled in any round, in the order of the registry."""
        return tuple(
            name
            for name, entry in CAPABILITIES.items()
            if any(options.is_enabled(entry) for options in self.requested_options)
        )

    def summary(self, result: OptimizeResult) -> str:
        """List the capabilities that fired."""
        if not self.is_requested:
            return "no optimization requested"
        fired = ", ".join(f"{name} {count}" for name, count in result.fired.items() if count)
        return fired or "no fusion applied"

    def record(self, transformation: graph_file.Transformation[OptimizeResult]) -> records.OptimizedFile:
        """Return the record with enabled capabilities, and the number of matches of each."""
        return records.OptimizedFile(
            **vars(transformation.file), enabled=self.enabled_names(), fired=transformation.result.fired
        )


@dataclass(frozen=True)
class SingleOptimization(_Optimization):
    """The optimizer, once."""

    options: OptimizeOptions
    sizes: Mapping[str, int]
    """Sizes of dynamic dimensions to compare at; for other dimensions, several sizes are tried."""
    data: JudgingData = field(default_factory=JudgingData)
    """Data that outputs are compared on."""

    @property
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """The options."""
        return (self.options,)

    def judging_request(self, seed: int) -> DataSetRequest | None:  # noqa: ARG002 - the data has its seed
        """Return the request for the samples of the dataset; ``None`` without a dataset."""
        return self.data.data_set

    def _sample_reader(self, source: Path, seed: int) -> ReadSamples | None:
        """Return the function that reads the samples of the user; ``None`` without data."""
        run = RunOptions(str(source), sizes=self.sizes, seed=seed)
        request = self.data.request(run, files_folder(source.absolute()), source)
        return request.read if self.data.is_stated else None

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse a graph that lacks a dimension with a requested size, or a selected module.

        Raises:
            UsageError: names it, or a capability without operators at the opset of the graph.
        """
        sizes_of_dimensions(model.graph, self.sizes)
        opset = self.options.opset_after(model.opset_imports.get(""))
        if opset is not None:
            self.options.refuse_older_opset(opset)
        if self.options.is_limited:
            modules = graph_modules(model, model.graph.name or "graph")
            for selector in (*self.options.module, *self.options.exclude):
                modules.selected_tags(selector)

    def refuse_plain(self, read_model: Callable[[], ir.Model]) -> None:
        """Refuse selectors of modules without nodes, and selectors that exclude all nodes.

        Raises:
            UsageError: names them.
        """
        if self.options.is_limited and not self.options.is_empty:
            selected_nodes(read_model(), self.options.module, self.options.exclude)

    @property
    def request_words(self) -> str:
        """The level, the opset and the enabled capabilities."""
        if not self.is_requested:
            return "nothing requested"
        target = self.options.opset_after(None)
        opset = () if target is None else (f"opset {target}",)
        enabled = self.enabled_names()
        capability_words = enabled if len(enabled) <= _LISTED_CAPABILITIES else (f"{len(enabled)} capabilities",)
        return ", ".join((f"level {self.options.level}", *opset, *capability_words))

    def apply(self, model: ir.Model) -> OptimizeResult:
        """Optimize the model; notes explain why capabilities enabled by name changed nothing.

        Raises:
            UsageError: a selector names no module, or only modules that the optimization does not change.
        """
        requested = [entry for entry in self.options.named() if entry.makes or entry.marks]
        original = model.clone() if requested or self.options.is_limited else model
        result = optimize_within(model, self.options)
        result = replace(result, notes=(*_idle_selector_notes(original, result.model, self.options), *result.notes))
        idle = [entry for entry in requested if not result.fired.get(entry.name)]
        return replace(result, notes=(*result.notes, *_explain_idle(original, idle, self.options)))

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo:
        """Compare with the source, at the requested sizes.

        Raises:
            StageError: the source itself does not run at these sizes.
            VerificationError: the outputs differ.
        """
        try:
            read_samples = self._sample_reader(source, seed)
            return refuse_different(source, written, seed, sizes=self.sizes, read_samples=read_samples)
        except StageError as error:
            error.hint = f"Set supported sizes of dynamic dimensions with {opt.shape_config}. {error.hint}"
            raise


@dataclass
class _OptimizationInRounds(_Optimization):
    """Optimization in rounds until a round changes nothing; options and rounds are added during the work."""

    options_by_round: list[OptimizeOptions]
    """The options of the first round, then the options returned by the analysis."""
    max_rounds: int
    analyze: AnalyzeRound | None
    rounds: list[records.OptimizationRound] = field(default_factory=list)
    """A record for each round done."""

    @property
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """The options of all rounds."""
        return self.options_by_round

    @property
    def may_be_requested(self) -> bool:
        """True if an optimization is requested, or the analysis may request one."""
        return self.analyze is not None or self.is_requested

    def apply(self, model: ir.Model) -> OptimizeResult:
        """Optimize until nothing changes."""
        fired: Counter[str] = Counter()
        notes: dict[str, None] = {}
        for number in range(1, self.max_rounds + 1):
            result = self._optimize_once(model, number)
            model = result.model
            fired.update(result.fired)
            notes |= dict.fromkeys(result.notes)
            flags = self.analyze(self.rounds[-1]) if self.analyze is not None else None
            if flags is not None and number < self.max_rounds:
                self.options_by_round.append(_options_of_next_round(flags))
            elif not result.changed:
                break
        changed = any(finished.changed for finished in self.rounds)
        return replace(result, fired=dict(fired), notes=tuple(notes), changed=changed)

    def _optimize_once(self, model: ir.Model, number: int) -> OptimizeResult:
        """Run one round, and append its record to ``rounds``."""
        options, started, before = self.options_by_round[-1], time.perf_counter(), graph_file.summarize_graph(model)
        result = optimize_within(model, options)
        self.rounds.append(
            records.OptimizationRound(
                number=number,
                enabled=tuple(entry.name for entry in options.enabled()),
                fired=result.fired,
                changed=result.changed,
                before=before,
                after=graph_file.summarize_graph(result.model),
                seconds=time.perf_counter() - started,
            )
        )
        return result


def _options_of_next_round(flags: Mapping[str, Any]) -> OptimizeOptions:
    """Validate the flags returned by ``analyze``.

    Raises:
        UsageError: no mapping, an unknown flag or an unsupported opset was returned.
    """
    if not isinstance(flags, Mapping):
        raise UsageError(
            f"analyze returned {flags!r}, a {type(flags).__name__}; expected a mapping of flags, or None",
            hint='Return the flags of the next round, such as {"level": "full"}, or None to keep the current flags.',
        )
    return parse_options(OptimizeOptions, dict(flags), "run_optimize_analyze_loop")


def _explain_idle(model: ir.Model, idle: Sequence[Capability], options: OptimizeOptions) -> Iterator[str]:
    """Yield a note for each capability enabled by name that changed nothing: dynamic sizes, or no matching nodes."""
    for entry in idle:
        blocked, _ = _find_blocked(model, _enable_only(entry, options), {})
        dynamic = [fusion for fusion in blocked.get(entry.name, ()) if not fusion.only_at_one]
        reason = "the graph has no nodes that it fuses"
        if dynamic:
            sizes = ", ".join(dict.fromkeys(name for fusion in dynamic for name in fusion.dimensions))
            count = sum(fusion.count for fusion in dynamic)
            reason = (
                f"dynamic sizes ({sizes}) prevent it in {count} place{'' if count == 1 else 's'}. Fix them first "
                "(winml export -m FILE.onnx --shape-config); winml optimize --check shows the modules"
            )
        yield f"{spell('enable_' + entry.name)} changed nothing: {reason}."


def _idle_selector_notes(original: ir.Model, optimized: ir.Model, options: OptimizeOptions) -> tuple[str, ...]:
    """Refuse selectors without effect; in one of several parts, return a note, since other parts may have the nodes.

    Raises:
        UsageError: names the selector; only if the model is not one of several parts.
    """
    if not options.is_limited:
        return ()
    modules = graph_modules(original, original.graph.name or "graph")
    everything = options.model_copy(update={"module": (), "exclude": ()})
    changed = _changed_nodes(original, optimized)

    def refuse_idle() -> None:
        for option, texts in ((opt.module, options.module), (opt.exclude, options.exclude)):
            for text in texts:
                modules.refuse_idle(option, text, changed, "the optimization changes none of its nodes")

    try:
        # Nodes count that change without the exclusion: also for selected modules, of which it may leave out all nodes.
        # The excluded modules by themselves decide, as a rule; if not, fusions with other modules do.
        for excluded in (options.exclude, ()) if options.exclude else ():
            selected = selected_nodes(original, excluded, ())[0] if excluded else None
            changed |= _changed_nodes(original, optimize(original.clone(), everything, selected).model)
            with contextlib.suppress(UsageError):
                refuse_idle()
                return ()
        refuse_idle()
    except OptimizeError:
        return ()  # only the exclusion makes it possible
    except UsageError as error:
        if not is_one_of_several(original.metadata_props):
            raise
        return (f"{error.message}.",)
    return ()


def _changed_nodes(original: ir.Model, optimized: ir.Model) -> frozenset[str]:
    """Return the names of the nodes of the main graph that an optimization removed, replaced or connected anew."""
    unchanged = set(map(_describe_node, optimized.graph))
    return frozenset(str(node.name) for node in original.graph if _describe_node(node) not in unchanged)


def _describe_node(node: ir.Node) -> tuple[object, ...]:
    """Return name, operator and connections of a node."""
    inputs, outputs = (tuple(value and value.name for value in values) for values in (node.inputs, node.outputs))
    return node.name, operator_name(node), inputs, outputs


def _enable_only(entry: Capability, options: OptimizeOptions) -> OptimizeOptions:
    """Return the options with a single capability enabled."""
    alone = {**dict.fromkeys(CAPABILITIES), "level": "none", "opset": None, entry.name: True}
    return options.model_copy(update=alone)


_OTHER_SIZE = 16
"""Chosen: a size for a dimension that no convention names."""

_OTHER_THAN_ONE = 2
"""Chosen: with a size of 1, axes broadcast that do not with any other."""

_FiredIn = Mapping[str, Mapping[str, int]]
"""Capability → tag → how often it fired."""


@python_function(opset="opset")
def check_optimization(
    model: str | os.PathLike[str], *, options: OptimizeOptions | None = None, **flags: Any
) -> records.OptimizationCheck:
    """Report the effect of optimizing a file, without writing or comparing.

    Args:
        model: The file.
        options: Options; None: the options in ``flags``. Without any option, the level ``full``.
        **flags: As for :func:`~winml.modelkit.optimize_model`.

    Raises:
        UsageError: an unknown flag, or contradictory flags, or a selector names no module.
        InputError: the file is no ONNX model, its data is missing, or it is compiled already.
        OptimizeError: an engine could not read the graph, or failed.

    Example:
        ```python
        check = check_optimization("model.onnx", level="full")
        print([(entry.name, entry.count) for entry in check.capabilities if entry.name == "gelu_fusion"])
        ```
    """
    options = options_of(OptimizeOptions, options, flags, "check_optimization")
    notes = []
    if options.is_empty:
        options = options.model_copy(update={"level": "full"})
        notes.append(f"No level or optimization was requested: this is the result of {opt.level} full.")
    options.refuse_whole_graph_options()
    path = Path(model)
    normalized, read_notes = graph_file.read_plain(path, folds_constants=options.folds_constants)
    result = optimize_within(normalized.clone(), options)
    blocked, blocked_notes = _find_blocked(normalized, options, result.fired_in)
    return records.OptimizationCheck(
        source=path,
        nodes_before=_node_count(normalized),
        nodes_after=_node_count(result.model),
        capabilities=tuple(
            records.CheckedCapability(
                name, result.fired[name], None, result.fired_in.get(name, {}), blocked.get(name, ())
            )
            if (name := entry.name) in result.fired
            else _check_removal(entry, normalized, options)
            for entry in options.enabled()
        ),
        notes=(*notes, *read_notes, *result.notes, *blocked_notes),
    )


def count_fusible_nodes(path: Path) -> tuple[int, int]:
    """Return the number of nodes of a file, and the number after ``--level full``; writes and compares nothing.

    Raises:
        InputError: the file is no ONNX model, its data is missing, or it is compiled already.
        OptimizeError: an engine could not read the graph, or failed.
    """
    options = OptimizeOptions(level="full")
    plain, _ = graph_file.read_plain(path, folds_constants=options.folds_constants)
    before = _node_count(plain)
    return before, _node_count(optimize_within(plain, options).model)


def _node_count(model: ir.Model) -> int:
    return sum(1 for _ in all_nodes(model))


def _check_removal(entry: Capability, model: ir.Model, options: OptimizeOptions) -> records.CheckedCapability:
    """Run a capability that removes nodes by itself, because removals leave no mark."""
    result = optimize_within(model.clone(), _enable_only(entry, options))
    removed = _node_count(model) - _node_count(result.model)
    return records.CheckedCapability(entry.name, None, max(0, removed), result.fired_in.get(entry.name, {}))


def _find_blocked(
    model: ir.Model, options: OptimizeOptions, open_fired: _FiredIn
) -> tuple[dict[str, tuple[records.BlockedFusion, ...]], tuple[str, ...]]:
    """Return capability → fusions that fire only at fixed sizes; and a note if this could not be determined.

    The model is optimized again with fixed sizes for that; ``model`` stays.

    Args:
        model: The model before the optimization.
        options: Options of the optimization.
        open_fired: Fusions that fire at dynamic sizes, by capability and module.
    """
    dimensions = open_dimensions(model.graph)
    if not dimensions:
        return {}, ()
    sizes = _apply_sums(model, {name: default_size(name) or _OTHER_SIZE for name in dimensions})
    size_words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    try:
        missing = _count_additional(_fusions_with_sizes(model, options, sizes), open_fired)
        larger = _apply_sums(model, {name: _OTHER_THAN_ONE if size == 1 else size for name, size in sizes.items()})
        is_larger = bool(missing) and larger != sizes
        lasting = _count_additional(_fusions_with_sizes(model, options, larger), open_fired) if is_larger else missing
        by_dimension = {
            name: _count_additional(_fusions_with_sizes(model, options, {name: size}), open_fired) if missing else {}
            for name, size in sizes.items()
        }
    except StageError as error:
        return {}, (f"The effect of fixed sizes could not be determined: {error.message}",)
    blocked: defaultdict[str, list[records.BlockedFusion]] = defaultdict(list)
    for (capability, tag), count in missing.items():
        alone = [name for name in dimensions if (capability, tag) in by_dimension[name]]
        causes = alone or list(dimensions)
        places = {name: tuple(dimensions[name]) for name in causes}
        if lasting_count := min(count, lasting.get((capability, tag), 0)):
            blocked[capability].append(records.BlockedFusion(tag, lasting_count, places, only_at_one=False))
        if count > lasting_count:
            blocked[capability].append(records.BlockedFusion(tag, count - lasting_count, places, only_at_one=True))
    note = (
        f"Optimizations that dynamic dimensions prevent were found by fixing the sizes: {size_words}; sizes of 1 to "
        f"{_OTHER_THAN_ONE}."
    )
    return {name: tuple(fusions) for name, fusions in blocked.items()}, (note,)


def _fusions_with_sizes(model: ir.Model, options: OptimizeOptions, sizes: Mapping[str, int]) -> _FiredIn:
    """Optimize a copy of the model with fixed sizes; return capability → tag → number of matches."""
    pinned = model.clone()
    pin_dimensions(pinned, sizes)
    normalize(pinned, NormalizeOptions(fold_constants=options.folds_constants))
    return optimize_within(pinned, options).fired_in


def _apply_sums(model: ir.Model, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes, with recorded sums of sizes corrected."""
    sums = summed_sizes(stated_sums(model.metadata_props), sizes)
    return {**sizes, **{name: size for name, size in sums.items() if name in sizes}}


def _count_additional(fixed: _FiredIn, opened: _FiredIn) -> dict[tuple[str, str], int]:
    """Return (capability, tag) → number of additional matches with fixed sizes, of countable capabilities."""
    counted = [name for name in fixed if CAPABILITIES[name].makes or CAPABILITIES[name].marks]
    additional = {
        (name, tag): count - opened.get(name, {}).get(tag, 0) for name in counted for tag, count in fixed[name].items()
    }
    return {key: count for key, count in additional.items() if count > 0}


def optimize_within(model: ir.Model, options: OptimizeOptions) -> OptimizeResult:
    """Optimize a model, or the selected modules only.

    Raises:
        UsageError: a selector names no module.
        OptimizeError: an engine failed.
    """
    if not options.is_limited or options.is_empty:
        return optimize(model, options)
    names, notes = selected_nodes(model, options.module, options.exclude)
    before = len(model.graph)
    result = optimize(model, options, names)
    note = f"Only the {len(names)} of {before} nodes in the selected modules were optimized."
    return replace(result, notes=(*notes, note, *result.notes))
