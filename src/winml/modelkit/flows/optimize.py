"""How does an ONNX file become a cheaper one with the same answer? The flow of ``winml optimize``.

Reads the file, brings it into its plain form unless its stamp says that it is, optimizes it, compares the result with
the file it was made from, and writes it. Knows no PyTorch and imports none.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.compare.files import refuse_different
from winml.modelkit.compare.words import equality_words
from winml.modelkit.errors import InputError, UsageError, first_line
from winml.modelkit.graph.files.output_files import OutputFiles, refuse_inputs
from winml.modelkit.graph.files.output_paths import ExportPaths
from winml.modelkit.graph.files.placing import external_files, place_copy
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.validity import refuse_invalid
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.metadata_keys import EXPORT_KEY, NORMALIZED_KEY
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.normalize.stamp import is_normalized, stamp
from winml.modelkit.optimize.capabilities import CAPABILITIES
from winml.modelkit.optimize.operator_counts import GraphCensus, operator_name
from winml.modelkit.optimize.opset_conversion import refuse_unknown_opset
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.options import parse_options
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.optimized_model import GraphSummary, OptimizationLoop, OptimizationRound, OptimizedFile
from winml.modelkit.results.written_file import WrittenFile
from winml.modelkit.runtime.ir_versions import newest_ir_version

__all__ = ["EXTERNAL_BYTES", "STEPS", "optimize_onnx", "run_optimize_analyze_loop"]

STEPS = ("reading", "normalization", "optimization", "writing and verification")

EXTERNAL_BYTES = 32_000_000
"""Weights of this size on are written to a file of their own, which ONNX Runtime maps where it would parse and copy
them: a session of bert-base is there 2.6 times as fast (measured). Chosen: below it, milliseconds are at stake."""

MAX_ROUNDS = 5
"""Chosen: two rounds settle every model tried, the second finding nothing."""

ALREADY_NORMALIZED = "already normalized, and nothing else was asked for: the result is the source under another name"


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
        on_step: Called when a step starts and when it ends.
        **flags: ``level``, ``ep``, ``opset``, and the names of capabilities (``gelu_fusion=True``).

    Returns:
        What was made. The file is in place.

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
    target = _Target.of(output, overwrite=overwrite, verify=verify, external_data=external_data, seed=seed)
    refuse_unknown_opset(options.opset)
    clock = StepClock(STEPS, on_step)
    work = _Work(lambda graph: optimize(graph, options), [options], may_ask_more=False)
    return _optimize_file(Path(model), target, work, clock, skip_normalization)


def run_optimize_analyze_loop(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_rounds: int = MAX_ROUNDS,
    analyze: Callable[[OptimizationRound], Mapping[str, Any] | None] | None = None,
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
        The file that was made, and the record of every round.

    Raises:
        UsageError: a flag nobody knows, an output that exists, or no round.
        WinMLError: as :func:`optimize_onnx` raises.
    """
    if max_rounds < 1:
        raise UsageError(f"max_rounds {max_rounds}: at least one round is needed", hint="Give a number from 1 up.")
    options = parse_options(OptimizeOptions, flags, "run_optimize_analyze_loop")
    target = _Target.of(output, overwrite=overwrite, verify=verify, external_data=external_data, seed=seed)
    refuse_unknown_opset(options.opset)
    rounds: list[OptimizationRound] = []
    asked = [options]
    work = _Work(
        lambda graph: _work_in_rounds(graph, asked, max_rounds, analyze, rounds),
        asked,
        may_ask_more=analyze is not None,
    )
    file = _optimize_file(Path(model), target, work, StepClock(STEPS, on_step), skip_normalization=False)
    return OptimizationLoop(file, tuple(rounds))


def _work_in_rounds(
    graph: ir.Model,
    asked: list[OptimizeOptions],
    max_rounds: int,
    analyze: Callable[[OptimizationRound], Mapping[str, Any] | None] | None,
    rounds: list[OptimizationRound],
) -> OptimizeResult:
    """Optimize until nothing changes; adds a record per round to ``rounds``.

    What is asked of the first round is the last of ``asked``, to which that of later ones is added.
    """
    fired: Counter[str] = Counter()
    notes: dict[str, None] = {}
    for number in range(1, max_rounds + 1):
        started = time.perf_counter()
        before = _summary(graph, 0)
        options = asked[-1]
        result = optimize(graph, options)
        graph = result.model
        fired.update(result.fired)
        notes |= dict.fromkeys(result.notes)
        seconds = time.perf_counter() - started
        enabled = tuple(entry.name for entry in options.enabled())
        done = OptimizationRound(number, enabled, result.fired, result.changed, before, _summary(graph, 0), seconds)
        rounds.append(done)
        wishes = analyze(done) if analyze is not None else None
        if wishes is not None and number < max_rounds:
            asked.append(_next_options(wishes))
        elif not result.changed:
            break
    return replace(result, fired=dict(fired), notes=tuple(notes), changed=any(item.changed for item in rounds))


def _next_options(wishes: Mapping[str, Any]) -> OptimizeOptions:
    if not isinstance(wishes, Mapping):
        raise UsageError(
            f"analyze returned {wishes!r}, a {type(wishes).__name__}: a mapping of flags or None was expected",
            hint='Return the flags of the next round, such as {"level": "full"}, or None to go on with the same.',
        )
    options = parse_options(OptimizeOptions, dict(wishes), "run_optimize_analyze_loop")
    refuse_unknown_opset(options.opset)
    return options


@dataclass(frozen=True)
class _Work:
    """What is done with the graph in its plain form."""

    run: Callable[[ir.Model], OptimizeResult]
    asked: list[OptimizeOptions]
    """What was asked for so far; grows while the work runs."""
    may_ask_more: bool

    @property
    def may_change(self) -> bool:
        """Whether the graph may come out another one."""
        return self.may_ask_more or self.is_asked

    @property
    def is_asked(self) -> bool:
        """Whether anything was asked for so far."""
        return not all(options.is_empty for options in self.asked)

    def enabled(self) -> tuple[str, ...]:
        """Return the capabilities that were on at some time, in the order of the registry."""
        return tuple(name for name, entry in CAPABILITIES.items() if any(o.is_enabled(entry) for o in self.asked))


@dataclass(frozen=True)
class _Target:
    """Where the result goes, and what is asked of it."""

    paths: ExportPaths
    overwrite: bool
    verify: bool
    external_data: bool | None
    seed: int

    @classmethod
    def of(cls, output: str | os.PathLike[str], **wishes: Any) -> _Target:
        paths = ExportPaths.for_output(output, with_sidecar=False, with_report=False)
        paths.refuse_existing(overwrite=wishes["overwrite"])
        return cls(paths, **wishes)


def _optimize_file(
    source: Path,
    target: _Target,
    work: _Work,
    clock: StepClock,
    skip_normalization: bool,
) -> OptimizedFile:
    """Run the steps."""
    paths = target.paths
    with clock.step("reading") as step:
        data = external_files(source)  # whatever is wrong with the files is told in words of ours
        if paths.model.resolve() != source.resolve():
            # The data of an earlier output goes when that is replaced.
            refuse_inputs([paths.data], data)
        # Nothing is asked of the weights yet, which a copy by reference never reads.
        structure = read_structure(source)
        refuse_invalid(structure, source)
        graph = _as_graph(source, lambda: ir.serde.deserialize_model(structure))
        before = _summary(graph, sum(file.stat().st_size for file in (source, *data)))
        step.summary = f"{before.nodes} nodes, opset {before.opset}"
    with clock.step("normalization") as step:
        is_plain = is_normalized(graph)
        is_as_asked = is_plain and target.external_data is None and structure.ir_version <= newest_ir_version()
        is_skipped = is_plain or skip_normalization
        if work.may_change or not is_as_asked:
            graph = _as_graph(source, lambda: ir.load(source))
        notes = _lower_ir_version(graph)
        if not is_skipped:
            notes += normalize(graph).notes
        step.summary = "already normalized" if is_plain else "left out" if is_skipped else _node_words(graph)
    with clock.step("optimization") as step:
        result = work.run(graph)
        graph = result.model
        is_copy = is_as_asked and not work.is_asked
        _refresh_metadata(graph, is_normal=is_plain or not skip_normalization)
        step.summary = _fired_words(result.fired) if work.is_asked else "nothing was asked for"
    with clock.step("writing and verification") as step, OutputFiles() as files:
        staged = files.stage(paths.model)
        files.drop(paths.data)
        if is_copy:
            place_copy(source, staged)
        else:
            write_model(graph, staged, external=_is_external(graph, target.external_data))
        verification = refuse_different(source, staged, target.seed) if target.verify and not is_copy else None
        step.summary = "a copy by reference" if is_copy else equality_words(verification)
        written = files.commit(overwrite=target.overwrite)
    return OptimizedFile(
        source=source,
        model_path=paths.model,
        files=_files_of(paths.model, written),
        is_copy=is_copy,
        normalizations=0 if is_skipped else 1,
        enabled=work.enabled(),
        fired=result.fired,
        before=before,
        after=_summary(graph, sum(written.values())),
        coverage=result.coverage,
        is_tagged=any(before.modules.values()),
        verification=verification,
        steps=clock.timings(),
        notes=(*([ALREADY_NORMALIZED] if is_copy else []), *notes, *result.notes),
    )


def _as_graph(source: Path, read: Callable[[], ir.Model]) -> ir.Model:
    try:
        return read()
    except (OSError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{source}: cannot be read as a graph: {first_line(error)}", hint="Export it again."
        ) from error


def _lower_ir_version(graph: ir.Model) -> tuple[str, ...]:
    """Let the model bear a version of the format that ONNX Runtime takes, in place; returns what to say of it.

    Newer versions add kinds of tensors only, which ONNX Runtime refuses by themselves where a model has them.
    """
    newest, version = newest_ir_version(), graph.ir_version
    if version <= newest:
        return ()
    graph.ir_version = newest
    return (f"IR version {version} was lowered to {newest}, the newest that the installed ONNX Runtime takes.",)


def _summary(graph: ir.Model, size_bytes: int) -> GraphSummary:
    modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in all_nodes(graph):
        if tag := read_tag(node):
            modules[tag.tag][operator_name(node)] += 1
    return GraphSummary(
        operators=GraphCensus.of(graph).by_count(),
        modules={tag: dict(counts) for tag, counts in modules.items()},
        size_bytes=size_bytes,
        opset=graph.opset_imports.get("", 0),
    )


def _files_of(model: Path, written: Mapping[Path, int]) -> tuple[WrittenFile, ...]:
    model = model.absolute()
    ordered = sorted(written.items(), key=lambda item: (item[0] != model, item[0]))
    return tuple(WrittenFile(path, size) for path, size in ordered)


def _node_words(graph: ir.Model) -> str:
    return f"normalized to {sum(1 for _ in all_nodes(graph))} nodes"


def _fired_words(fired: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in fired.items() if count) or "no fusion found its pattern"


def _is_external(graph: ir.Model, wanted: bool | None) -> bool | None:
    """Say whether weights go to a file of their own; None leaves it to the writer, which asks whether they must."""
    weights = (value.const_value for value in graph.graph.initializers.values())
    size_bytes = sum(tensor.nbytes for tensor in weights if tensor is not None)
    return True if wanted is None and size_bytes >= EXTERNAL_BYTES else wanted


def _refresh_metadata(graph: ir.Model, *, is_normal: bool) -> None:
    """Bring what the file says about itself up to date, in place; a file that says nothing goes on saying nothing."""
    if is_normal:
        stamp(graph)
    else:
        graph.metadata_props.pop(NORMALIZED_KEY, None)
    try:
        record = json.loads(graph.metadata_props[EXPORT_KEY])
        record["opset_produced"] = graph.opset_imports[""]
    except (KeyError, TypeError, json.JSONDecodeError):
        return
    graph.metadata_props[EXPORT_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
