"""What does ``winml optimize`` do, from file to file? Makes a graph cheaper with the same answer.

Reading, plain form, comparison and writing are those of every verb that changes a graph (``graph_file``). Knows no
PyTorch and imports none.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from winml.modelkit.compare.files import refuse_different
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import StageError, UsageError
from winml.modelkit.flows.graph_file import (
    EXTERNAL_BYTES,
    GraphFileTask,
    GraphWork,
    TransformedFile,
    summarize_graph,
    transform_file,
)
from winml.modelkit.flows.graph_modules import optimize_within
from winml.modelkit.graph.pinning import sizes_of_dimensions
from winml.modelkit.optimize.capabilities import CAPABILITIES
from winml.modelkit.optimize.opset_conversion import refuse_unknown_opset
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult
from winml.modelkit.options import parse_options
from winml.modelkit.progress import StepEvent
from winml.modelkit.results.optimized_model import OptimizationLoop, OptimizationRound, OptimizedFile

__all__ = ["SingleOptimization", "optimize_file", "optimize_onnx", "run_optimize_analyze_loop"]

MAX_ROUNDS = 5
"""Chosen: two rounds settle every model tried, the second finding nothing."""

AnalyzeRound = Callable[[OptimizationRound], Mapping[str, Any] | None]
"""Called after each round; returns the flags of the next in place of those so far, or None to go on with the same."""


def optimize_onnx(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    options: OptimizeOptions | None = None,
    overwrite: bool = False,
    verify: bool = True,
    skip_normalization: bool = False,
    external_data: bool | None = None,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    functions: str | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    **flags: Any,
) -> OptimizedFile:
    """Optimize an ONNX file; its nodes go on saying which module they came from.

    Without flags, a file in its plain form is copied by reference and any other is brought into it.

    Args:
        model: The file; it stays as it is.
        output: The ``.onnx`` file to write.
        options: What is to be done; None: as ``flags`` say.
        overwrite: Replace a file that is there already.
        verify: Compare the result with ``model`` in ONNX Runtime.
        skip_normalization: Take the graph for normalized although no stamp says so.
        external_data: Keep weights in a file of their own (True) or inside (False); None: those of
            ``EXTERNAL_BYTES`` or more in a file of their own.
        seed: Seed of the values compared on.
        sizes: Sizes of open dimensions to compare at, by name, by ``input:axis``, or by key of ``--shape-config``.
        functions: Modules that the file holds as functions: ``all``, ``classes`` (modules of one class whose graphs are
            equal share one) or a selector.
        on_step: Called when a step starts and when it ends.
        **flags: ``level``, ``ep``, ``opset``, ``module``, ``exclude``, names of capabilities (``gelu_fusion=True``).

    Returns:
        The record of the optimization. The file is in place.

    Raises:
        UsageError: a flag nobody knows or that goes with no other, or an output that exists.
        InputError: the file is no ONNX model, or its data is missing.
        NormalizeError: the graph could not be brought into its plain form.
        OptimizeError: an engine could not read the graph, or failed.
        StageError: ``model`` itself does not run, so the result cannot be compared with it.
        VerificationError: the result does not answer as ``model`` does; no file was written.
    """
    if options is None:
        options = parse_options(OptimizeOptions, flags, "optimize_onnx")
    task = GraphFileTask(
        Path(model),
        Path(output),
        overwrite=overwrite,
        verify=verify,
        seed=seed,
        skip_normalization=skip_normalization,
        external_data=external_data,
        external_from_bytes=EXTERNAL_BYTES,
        functions=functions,
    )
    return optimize_file(task, options, on_step, sizes=sizes)


def optimize_file(
    task: GraphFileTask,
    options: OptimizeOptions,
    on_step: Callable[[StepEvent], None] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> OptimizedFile:
    """Optimize an ONNX file as a task says; see :func:`optimize_onnx` for what is returned and raised."""
    task.refuse_early()
    refuse_unknown_opset(options.opset)
    options.refuse_whole_graph()
    work = SingleOptimization(options, sizes or {})
    return _optimized_file(task, work, transform_file(task, work, on_step))


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
    on_step: Callable[[StepEvent], None] | None = None,
    **flags: Any,
) -> OptimizationLoop:
    """Optimize an ONNX file in rounds, until a round finds nothing more to do.

    What one change leaves behind may be what another looks for, so that a second round can find more. After each round
    the graph is compared with the one before it, module by module; whoever wants to decide by that what is tried next
    gives ``analyze``. The graph stays in memory between rounds; the file is compared with ``model`` and written once.

    Args:
        model: The file; it stays as it is.
        output: The ``.onnx`` file to write.
        max_rounds: Rounds at most, from 1.
        analyze: Called after each round; returns the flags of the next in place of those so far (``{}`` for no flag at
            all), or None to go on with the same.
        overwrite: Replace a file that is there already.
        verify: Compare the result with ``model`` in ONNX Runtime.
        external_data: As for :func:`optimize_onnx`.
        seed: Seed of the values compared on.
        on_step: Called when a step starts and when it ends.
        **flags: As for :func:`optimize_onnx`; those of the first round.

    Returns:
        The record of the optimization, and that of every round. The file is in place.

    Raises:
        UsageError: a flag nobody knows, an output that exists, or no round.
        WinMLError: as :func:`optimize_onnx` raises.
    """
    if max_rounds < 1:
        raise UsageError(f"max_rounds {max_rounds}: at least one round is needed", hint="Give a number from 1 up.")
    options = parse_options(OptimizeOptions, flags, "run_optimize_analyze_loop")
    options.refuse_whole_graph()
    task = GraphFileTask(
        Path(model),
        Path(output),
        overwrite=overwrite,
        verify=verify,
        seed=seed,
        external_data=external_data,
        external_from_bytes=EXTERNAL_BYTES,
    )
    task.refuse_early()
    refuse_unknown_opset(options.opset)
    work = _OptimizationInRounds([options], max_rounds, analyze)
    file = _optimized_file(task, work, transform_file(task, work, on_step))
    return OptimizationLoop(file, tuple(work.rounds))


class _Optimization(GraphWork[OptimizeResult]):
    """What one optimization and several in rounds have in common."""

    step_name: ClassVar[str] = "optimization"

    @property
    @abstractmethod
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """What was asked for so far, in order."""

    @property
    def is_requested(self) -> bool:
        """Whether anything was asked for so far."""
        return not all(options.is_empty for options in self.requested_options)

    @property
    def folds_constants(self) -> bool:
        """Whether nobody has switched it off; asked before the work, so by the options of the first round."""
        return self.requested_options[0].folds_constants

    def enabled_names(self) -> tuple[str, ...]:
        """Return the capabilities that were on at some time, in the order of the registry."""
        return tuple(
            name
            for name, entry in CAPABILITIES.items()
            if any(options.is_enabled(entry) for options in self.requested_options)
        )

    def summary(self, result: OptimizeResult) -> str:
        """Return which capabilities fired."""
        if not self.is_requested:
            return "nothing was asked for"
        fired = ", ".join(f"{name} {count}" for name, count in result.fired.items() if count)
        return fired or "no fusion found its pattern"


@dataclass(frozen=True)
class SingleOptimization(_Optimization):
    """The optimizer, once."""

    options: OptimizeOptions
    sizes: Mapping[str, int]
    """Sizes of open dimensions to compare at; of the others, some are tried."""

    @property
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """The options."""
        return (self.options,)

    def apply(self, model: ir.Model) -> OptimizeResult:
        """Optimize the model.

        Raises:
            UsageError: it has no dimension that a size was given for, or a selector names no module.
        """
        sizes_of_dimensions(model.graph, self.sizes)
        return optimize_within(model, self.options)

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo:
        """Compare with the source, at the sizes that were given.

        Raises:
            StageError: the source itself does not run at these sizes.
            VerificationError: they differ.
        """
        try:
            return refuse_different(source, written, seed, sizes=self.sizes)
        except StageError as error:
            error.hint = f"Give sizes of open dimensions that it takes with --shape-config. {error.hint}"
            raise


@dataclass
class _OptimizationInRounds(_Optimization):
    """The optimizer, until a round changes nothing; options and rounds grow while it works."""

    options_by_round: list[OptimizeOptions]
    """The options of the first round, then those the analysis asked for."""
    max_rounds: int
    analyze: AnalyzeRound | None
    rounds: list[OptimizationRound] = field(default_factory=list)
    """A record for each round done."""

    @property
    def requested_options(self) -> Sequence[OptimizeOptions]:
        """The options of all rounds."""
        return self.options_by_round

    @property
    def may_be_requested(self) -> bool:
        """Whether anything is asked for, or the analysis may ask for it."""
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
        """Do one round and add its record."""
        options, started, before = self.options_by_round[-1], time.perf_counter(), summarize_graph(model)
        result = optimize_within(model, options)
        self.rounds.append(
            OptimizationRound(
                number=number,
                enabled=tuple(entry.name for entry in options.enabled()),
                fired=result.fired,
                changed=result.changed,
                before=before,
                after=summarize_graph(result.model),
                seconds=time.perf_counter() - started,
            )
        )
        return result


def _options_of_next_round(flags: Mapping[str, Any]) -> OptimizeOptions:
    if not isinstance(flags, Mapping):
        raise UsageError(
            f"analyze returned {flags!r}, a {type(flags).__name__}: a mapping of flags or None was expected",
            hint='Return the flags of the next round, such as {"level": "full"}, or None to go on with the same.',
        )
    options = parse_options(OptimizeOptions, dict(flags), "run_optimize_analyze_loop")
    refuse_unknown_opset(options.opset)
    return options


def _optimized_file(
    task: GraphFileTask, work: _Optimization, transformed: TransformedFile[OptimizeResult]
) -> OptimizedFile:
    return OptimizedFile(
        source=task.source,
        model_path=transformed.model_path,
        files=transformed.files,
        is_copy=transformed.is_copy,
        is_plain=transformed.is_plain,
        normalizations=transformed.normalizations,
        enabled=work.enabled_names(),
        fired=transformed.result.fired,
        before=transformed.before,
        after=transformed.after,
        coverage=transformed.coverage,
        is_tagged=any(transformed.before.modules.values()),
        verification=transformed.verification,
        functions=transformed.functions,
        steps=transformed.steps,
        notes=transformed.notes,
    )
