"""Kernel times by module (``winml perf --by-module``), and times of single modules (``--module``).

ONNX Runtime rewrites a graph before running it, so its profile contains node names that are not in the file. The same
session writes the executed graph, and tags are transferred to it. A decoder with a KV cache is profiled twice: with a
prompt, and with a following step. Works on ONNX files only.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.outputs import CUT_MODULE_THRESHOLD
from winml.modelkit.errors import MeasureError, StageError, UsageError, WriteError, opt
from winml.modelkit.extract import extraction
from winml.modelkit.normalize.flat_files import flat_file
from winml.modelkit.onnx import module_costs
from winml.modelkit.onnx.contents import read_contents
from winml.modelkit.onnx.contexts import refuse_compiled_modules
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.reading import read_structure, reading_graph
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.onnx.validity import refuse_cycles
from winml.modelkit.ort import opened_model
from winml.modelkit.ort.decoding.inputs import DecoderRun, decoder_tokens, inputs_of_file
from winml.modelkit.ort.device_trace import (
    CompilationTrace,
    CompiledNode,
    DeviceTrace,
    read_compilation_trace,
    read_device_trace,
)
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.execution_providers import short_name
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.ort.kernel_memory import RunMemory, read_memory
from winml.modelkit.ort.kernel_times import KernelTime, RunProfile, read_device_profile, read_profile
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.latency import LatencyOptions, LatencyResult, measure_latency
from winml.modelkit.profile.memory import ExecutedGraph, charge_memory, measure_growth
from winml.modelkit.profile.memory_records import MemoryGrowth, ModuleMemory
from winml.modelkit.profile.module_profile import (
    ModuleProfile,
    charge_modules,
    kernel_times_ms,
)
from winml.modelkit.profile.module_records import (
    ComparedProfiles,
    MeasuredModule,
    ModulePerfResult,
    ModuleRatio,
    ProfiledDecoder,
    ProfiledModules,
    TorchModules,
    TorchPhase,
)
from winml.modelkit.profile.perf import PerfOptions, PyTorchRun, measured_model
from winml.modelkit.profile.records import MemoryUse, PerfResult, busy_notes, perf_result, spread_notes
from winml.modelkit.profile.torch_modules import (
    ModuleClock,
    charge_torch_modules,
    compare_modules,
    run_alternately,
    select_runs,
)
from winml.modelkit.progress import OnStep, Progress, StepClock, Tell
from winml.modelkit.tags import address
from winml.modelkit.tags.carry.carrying import CarryReport, carry_tags
from winml.modelkit.tags.carry.matching import Way
from winml.modelkit.tags.tagging import all_nodes, listed_modules, read_tag
from winml.modelkit.transform.module_functions import read_model_tree, write_tree_tags
from winml.modelkit.verdicts import DISTURBED
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun, time_words


def _fused_modules(executed: ir.Model, modules: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return name of a node → tags of the other modules fused into it.

    ONNX Runtime fuses across modules: a convolution absorbs the following batch norm and activation. The transfer of
    tags decides the module of the fused node, as it does for a file.

    Args:
        executed: The graph as ONNX Runtime executed it, with transferred tags.
        modules: Module path → tag.
    """
    fused: dict[str, frozenset[str]] = {}
    for node in all_nodes(executed):
        tag = read_tag(node)
        with contextlib.suppress(ValueError):  # a damaged list: the tag alone counts
            if tag is not None and node.name and (paths := listed_modules(node)):
                fused[node.name] = frozenset(modules[path] for path in paths if path in modules) - {tag.tag}
    return fused


def profile_by_module(
    path: Path, options: RunOptions, latency: LatencyOptions, *, memory: bool = False, progress: Progress | None = None
) -> ProfiledModules | ProfiledDecoder:
    """Measure a model by module; a decoder with a KV cache with a prompt and a step, in separate sessions.

    Args:
        path: The ONNX file.
        options: Run options. For a decoder, the size of tokens or cache is the length of the prompt; both sizes, or
            values from a file, are run once as for other models.
        latency: Number of runs of each.
        memory: Also measure the memory of each module.
        progress: Called between runs with the number and the share of finished runs.

    Raises:
        UsageError: as in :func:`profile_modules`, or the prompt exceeds the positions of the model.
        StageError: as in :func:`profile_modules`.
    """

    def profile_phase(run: RunOptions, phase_progress: Progress | None) -> ProfiledModules:
        return profile_modules(path, run, latency, memory=memory, progress=phase_progress)

    return _profile_phases(path, options, profile_phase, progress)


def _profile_phases(
    path: Path,
    options: RunOptions,
    measure: Callable[[RunOptions, Progress | None], ProfiledModules],
    progress: Progress | None,
) -> ProfiledModules | ProfiledDecoder:
    """Profile a model once; a decoder with a KV cache with a prompt, then with a step."""
    tokens = None if options.input_data is not None else decoder_tokens(inputs_of_file(path), options.sizes)
    if tokens is None:
        return measure(options, progress)
    prompt_run = replace(options, decoding=DecoderRun(tokens, 0))
    prompt = measure(prompt_run, _scale_progress(progress, 0, 2, 0))
    assert prompt.result.decoding is not None
    step_run = replace(options, decoding=DecoderRun(1, prompt.result.decoding.tokens))
    runs = 2 * len(prompt.result.latency.samples_ms)
    return ProfiledDecoder(prompt, measure(step_run, _scale_progress(progress, 1, 2, runs)))


def profile_beside_pytorch(
    path: Path, options: PerfOptions, *, progress: Progress | None = None, tell: Tell | None = None
) -> ComparedProfiles:
    """Measure a model and its PyTorch model in alternation: the whole models, then their modules.

    Args:
        path: The ONNX file.
        options: Run options, number of runs, and the baseline: a PyTorch model.
        progress: Called between runs with the number and the share of finished runs.
        tell: Called with messages on the preparation of the PyTorch model.

    Raises:
        UsageError: as in :func:`profile_modules`, the model has other inputs, or it is not on this machine.
        StageError: as in :func:`profile_modules`, or the PyTorch model cannot be loaded or run.
    """
    phases: list[TorchPhase] = []

    def profile_phase(run: RunOptions, phase_progress: Progress | None) -> ProfiledModules:
        profiled, torch = _profile_torch_phase(path, replace(options, run=run), phase_progress, tell)
        phases.append(torch)
        return profiled

    model = _profile_phases(path, options.run, profile_phase, progress)
    named = model.phases
    torch = TorchModules(dict(zip(named, phases, strict=True)))
    ratios = {phase: measured.ratios for phase, measured in torch.phases.items()}
    return ComparedProfiles([*named.values()][-1].result, model, torch, {}, {}, ratios)


def profile_beside_file(
    path: Path, baseline: Path, result: PerfResult, options: PerfOptions, *, progress: Progress | None = None
) -> ComparedProfiles:
    """Measure the modules of a model and of a baseline in alternation.

    On a provider that compiles, both are profiled one after the other, and modules have no ratios.

    Args:
        path: The ONNX file.
        baseline: The file to compare with, which takes the same inputs.
        result: Measurement of both as a whole.
        options: Run options and number of runs; the baseline, for its name.
        progress: Called between runs with the number and the share of finished runs.

    Raises:
        UsageError, StageError: as in :func:`profile_modules`.
    """
    assert options.baseline is not None  # the file
    shown = options.baseline.name
    weights = _read_weight_bytes(path), _read_weight_bytes(baseline)
    if options.run.choose_provider().provider.compiles:
        sides = [
            profile_by_module(file, run, options.latency, progress=progress)
            for file, run in ((path, options.run), (baseline, replace(options.run, shown=shown)))
        ]
        return ComparedProfiles(result, sides[0], sides[1], *weights)
    others: list[ProfiledModules] = []
    ratios: list[tuple[ModuleRatio, ...]] = []

    def profile_phase(run: RunOptions, phase_progress: Progress | None) -> ProfiledModules:
        model, other, block = _profile_file_phase(path, baseline, shown, replace(options, run=run), phase_progress)
        others.append(other)
        ratios.append(compare_modules(model.profile, other.profile, block))
        return model

    model = _profile_phases(path, options.run, profile_phase, progress)
    profiled = others[0] if len(others) == 1 else ProfiledDecoder(*others)
    return ComparedProfiles(result, model, profiled, *weights, dict(zip(model.phases, ratios, strict=True)))


def _profile_file_phase(
    path: Path, baseline: Path, shown: str, options: PerfOptions, progress: Progress | None
) -> tuple[ProfiledModules, ProfiledModules, int]:
    """Profile two files in alternation at fixed sizes; the last value is the number of consecutive runs of each."""
    files = (path, baseline)
    with contextlib.ExitStack() as opened:
        folders = [opened.enter_context(temporary_folder()) for _ in files]
        sides = [opened.enter_context(_flat_graph(file)) for file in files]
        flats = [side.path for side in sides]

        def run_both(fitting: RunOptions) -> tuple[list[PerfResult], list[Path], list[int], int]:
            runs = (fitting, replace(fitting, shown=shown))
            results = [
                _unprofiled_run(flat, run, options.latency, _scale_progress(progress, number, 4, 0))
                for number, (flat, run) in enumerate(zip(flats, runs, strict=True))
            ]
            provider, count = options.run.choose_provider(), len(results[0].latency.samples_ms)
            with contextlib.ExitStack() as sessions:
                prepared = [
                    sessions.enter_context(
                        opened_model.prepared_model(
                            flat, run, provider, profile_prefix=folder / "profile", optimized_path=folder / _EXECUTED
                        )
                    )
                    for flat, run, folder in zip(flats, runs, folders, strict=True)
                ]
                half = _scale_progress(progress, 1, 2, count)
                counted, block = run_alternately([side.run for side in prepared], count, options.latency.warmup, half)
                return results, [side.opened.session.end_profile() for side in prepared], counted, block

        results, profiles, counted, block = opened_model.run_at_fitting_sizes(flats[0], options.run, run_both)
        model, other = (
            _charge_to_modules(
                replace(result, model_bytes=file.stat().st_size, fingerprint=file_fingerprint(file)),
                side,
                _read_executed(folder / _EXECUTED),
                select_runs(read_profile(profile), counted),
                None,
            )
            for file, result, side, folder, profile in zip(files, results, sides, folders, profiles, strict=True)
        )
    return model, other, block


_EXECUTED = "executed.onnx"


def _profile_torch_phase(
    path: Path, options: PerfOptions, progress: Progress | None, tell: Tell | None
) -> tuple[ProfiledModules, TorchPhase]:
    """Measure a model and its PyTorch model in alternation at fixed sizes, then the modules of both."""
    provider = options.run.choose_provider()
    if provider.provider.compiles:
        raise UsageError(
            f"{opt.by_module} {opt.baseline}: {provider.provider.name} "
            "compiles the graph, so that its times are not those of this processor",
            hint=f"Compare with PyTorch on the CPU: {opt.ep} cpu.",
        )
    refuse_compiled_modules(read_structure(path), path)
    clock = ModuleClock()
    with temporary_folder() as folder, _flat_graph(path) as flat:
        files = {"profile_prefix": folder / "profile", "optimized_path": folder / "executed.onnx"}

        def run_both(run: RunOptions) -> tuple[PerfResult, Path, list[int], int]:
            paths = {module.path for module in flat.tree.modules}
            with measured_model(flat.path, replace(options, run=run), _scale_progress(progress, 0, 2, 0), tell) as (
                result,
                torch_run,
            ):
                assert isinstance(torch_run, PyTorchRun)
                count = len(result.latency.samples_ms)
                with (
                    opened_model.prepared_model(flat.path, run, provider, **files) as prepared,
                    clock.timing(torch_run.model, paths),
                ):
                    half = _scale_progress(progress, 1, 2, count)
                    counted, block = run_alternately((prepared.run, torch_run), count, options.latency.warmup, half)
                return result, prepared.opened.session.end_profile(), counted, block

        result, profile_path, counted, block = opened_model.run_at_fitting_sizes(flat.path, options.run, run_both)
        measured = select_runs(read_profile(profile_path), counted)
        executed = _read_executed(files["optimized_path"])
    result = replace(result, model_bytes=path.stat().st_size, fingerprint=file_fingerprint(path))
    profiled = _charge_to_modules(result, flat, executed, measured, None)
    torch = charge_torch_modules(select_runs(clock.profile(), counted), profiled.profile)
    return profiled, TorchPhase(torch, compare_modules(profiled.profile, torch, block))


def profile_modules(
    path: Path, options: RunOptions, latency: LatencyOptions, *, memory: bool = False, progress: Progress | None = None
) -> ProfiledModules:
    """Measure a model, then profile it with ONNX Runtime, and assign every kernel to its module.

    Args:
        path: The ONNX file.
        options: Run options.
        latency: Number of runs.
        memory: Also measure the memory of each module, on a provider that records it.
        progress: Called between runs with the number and the share of finished runs.

    Raises:
        UsageError: the options do not fit the model, or the file has no module information.
        StageError: ONNX Runtime cannot load or run the file, or its provider records no kernel.
    """
    before = read_structure(path)
    metadata = {entry.key: entry.value for entry in before.metadata_props}
    trace, provider = read_compilation_trace(metadata), options.choose_provider()
    if trace is None or not provider.provider.node_profile:
        refuse_compiled_modules(before, path)
    if provider.provider.compiles:
        return _profile_on_device(path, options, latency, trace, provider, progress)
    with temporary_folder() as folder, _flat_graph(path) as flat:
        executed_path = folder / "executed.onnx"
        files = {"profile_prefix": folder / "profile", "optimized_path": executed_path}
        if memory:
            files["memory_path"] = folder / "memory.csv"
        result, profiled, profile_path, growth = opened_model.run_at_fitting_sizes(
            flat.path, options, lambda fitting: _profiled_run(flat.path, fitting, latency, files, progress)
        )
        measured = read_profile(profile_path, counted_runs=len(profiled.samples_ms))
        executed = _read_executed(executed_path)
        run_memory = None if growth is None else (read_memory(profile_path, files["memory_path"]), growth)
    notes = (*result.notes, *busy_notes({"the model with profiling": profiled}))
    result = replace(result, model_bytes=path.stat().st_size, fingerprint=file_fingerprint(path), notes=notes)
    return _charge_to_modules(result, flat, executed, measured, run_memory)


def _read_executed(path: Path) -> onnx.ModelProto:
    """Read the graph that a session executed.

    Raises:
        MeasureError: the session did not write it.
    """
    if not path.is_file():
        raise MeasureError(
            "ONNX Runtime did not write the graph it executed, so kernels cannot be matched to nodes",
            hint=f"Profile on a different execution provider: {opt.ep} cpu.",
        )
    return read_structure(path)


def _read_weight_bytes(path: Path) -> dict[str, int]:
    """Return tag of a module → size of its weights and those of its submodules, as stored in the file."""
    model = read_structure(path)
    contents = read_contents(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, path.stem)
    modules, _ = module_costs.charge_modules(tree, contents, [None] * len(contents.nodes))
    return {module.tag: module.total.size_bytes for module in modules}


_PROFILE = "device.csv"
_LEAST_CYCLE_RUNS = 10
"""Number of runs from which the minimum of cycle counts is a stable measure. Measured: a thread that waits adds up to
three times the cycles of a model in single runs of QNN's simulator."""


def _profile_on_device(
    path: Path,
    options: RunOptions,
    latency: LatencyOptions,
    trace: CompilationTrace | None,
    provider: ChosenProvider,
    progress: Progress | None,
) -> ProfiledModules:
    """Measure a model with the profiling of its provider, and assign node times to modules.

    The provider compiles the graph when the session is created, so that ONNX Runtime runs one kernel.

    Args:
        path: The ONNX file.
        options: Run options.
        latency: Number of runs.
        trace: Trace of the compilation of a compiled file; `None` for a file that the session compiles.
        provider: The provider, which compiles.
        progress: Listener to the runs.

    Raises:
        UsageError: the provider records no node times.
        StageError: the provider cannot load or run the file, or its profile names no node.
    """
    name = provider.provider.name
    if not provider.provider.node_profile:
        raise UsageError(
            f"{opt.by_module}: {name} runs each compiled part as one kernel and records no times of nodes",
            hint=f"Measure extracted modules on the device: winml perf {options.shown} --module SELECTOR --ep "
            f"{short_name(name)}",
        )
    with temporary_folder() as folder, _flat_graph(path) as flat:
        csv_path = folder / _PROFILE
        profiling = {key: value.format(file=csv_path) for key, value in provider.provider.node_profile.items()}
        tracing = provider.provider.trace_options(folder) if trace is None else {}
        recording = replace(provider, options={**provider.options, **profiling, **tracing})
        with opened_model.prepared_model(flat.path, options, recording, profile_prefix=folder / "profile") as prepared:
            before = resident_bytes()
            measured = measure_latency(prepared.run, latency, progress)
            memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
            kernels = read_profile(prepared.opened.session.end_profile(), counted_runs=len(measured.samples_ms))
        result = perf_result(prepared, latency, measured, memory)
        del prepared  # the provider writes its profile when the session is closed, if not before
        profile = read_device_profile(csv_path, counted_runs=len(measured.samples_ms), provider=name)
        device_trace = read_device_trace(folder)
    original, tree = graph_of(flat.structure, path), flat.tree
    write_tree_tags(original, tree)
    makers: Mapping[str, CompiledNode] = {}
    if trace is None:
        trace, makers = _trace_session(original, device_trace)
    renamed, by_way = _rename_kernels(profile, trace, makers)
    modules = [(module.tag, module.path, module.class_name) for module in tree.modules]
    charged = charge_modules(renamed, {node.name: node.tag for node in trace.nodes}, modules)
    notes = (*result.notes, *_device_notes(charged, kernels, provider), *tree.notes, *_source_notes(tree))
    return ProfiledModules(
        result=replace(
            result, provider=provider, model_bytes=path.stat().st_size, fingerprint=file_fingerprint(path), notes=notes
        ),
        profile=charged,
        tree_source=tree.source,
        carried=CarryReport(len({kernel.node for kernel in profile.kernels}), sum(by_way.values()), by_way),
        graph_name=original.graph.name or "",
        node_ms=_node_times(original, original, charged) if makers else {},
        placement=trace.place_modules({module.tag: module.path for module in tree.modules}),
    )


def _trace_session(model: ir.Model, trace: DeviceTrace) -> tuple[CompilationTrace, Mapping[str, CompiledNode]]:
    """Return the trace of a compilation by a session, and value → node that computes it.

    Args:
        model: The graph, with tags.
        trace: Trace of the provider.
    """
    nodes: list[CompiledNode] = []
    makers: dict[str, CompiledNode] = {}
    for node in all_nodes(model):
        tag, name = read_tag(node), node.name or ""
        nodes.append(CompiledNode(name, node.op_type, "" if tag is None else tag.tag, trace.reasons.get(name)))
        makers |= {value.name: nodes[-1] for value in node.outputs if value.name}
    return CompilationTrace(tuple(nodes), trace.operators), makers


_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Operators that a device fuses into the operator between them."""


def _rename_kernels(
    profile: RunProfile, trace: CompilationTrace, makers: Mapping[str, CompiledNode]
) -> tuple[RunProfile, Counter[Way]]:
    """Rename kernels to graph nodes by trace, else by name prefix, and count the matches by node name and output name.

    A provider appends to names of nodes and values: ``…/MatMul_output_0_convert``.

    Args:
        profile: The measured kernels.
        trace: Nodes, and operators on the device.
        makers: Value → node that computes it.
    """
    nodes = {**makers, **{node.name: node for node in trace.nodes if node.name}}
    matches: dict[str, CompiledNode | None] = {}
    for kernel in profile.kernels:
        if kernel.node in matches:
            continue
        sources = [nodes[name] for name in trace.operators.get(kernel.node, ()) if name in nodes]
        computing = [node for node in sources if node.op_type not in _CONVERSIONS]
        ends = (end for end in range(len(kernel.node), 0, -1) if not kernel.node[end : end + 1].isdigit())
        by_prefix = (nodes[kernel.node[:end]] for end in ends if kernel.node[:end] in nodes)
        matches[kernel.node] = next(iter((*computing, *sources)), None) or next(by_prefix, None)
    ways: Counter[Way] = Counter(
        "name" if node.name == name else "output" for name, node in matches.items() if node is not None
    )

    def rename(kernel: KernelTime) -> KernelTime:
        node = matches[kernel.node]
        return kernel if node is None else replace(kernel, node=node.name or kernel.node, op_type=node.op_type)

    return replace(profile, kernels=tuple(map(rename, profile.kernels))), ways


def _device_notes(profile: ModuleProfile, kernels: RunProfile, provider: ChosenProvider) -> Iterator[str]:
    """Note the unit of the device, too few runs, and nodes run outside the compiled parts."""
    name, device = provider.provider.name, provider.device_words
    yield f"latency and module times were measured with the profiling of {name} on, which adds time to every run"
    if profile.profile.unit == "cycles":
        yield f"times are {profile.unit} of {name} ({device}), thousands of clock cycles: compare shares"
        if (runs := len(profile.run_ms)) < _LEAST_CYCLE_RUNS:
            yield (
                f"the minimum of {count_noun(runs, 'run')} may include cycles of waiting threads: use {opt.iterations} "
                f"{_LEAST_CYCLE_RUNS} or more"
            )
    outside = kernel_times_ms(replace(kernels, kernels=tuple(k for k in kernels.kernels if k.provider != name)))
    if outside:
        nodes, outside_ms = len({node for node, _ in outside}), sum(outside.values())
        yield (
            f"{count_noun(nodes, 'node')} ran outside the compiled parts ({outside_ms:.3f} ms per run), without being "
            "included in these times"
        )


def _profiled_run(
    path: Path, options: RunOptions, latency: LatencyOptions, files: Mapping[str, Path], progress: Progress | None
) -> tuple[PerfResult, LatencyResult, Path, MemoryGrowth | None]:
    """Run the model without profiling, then with profiling, and again for the growth of the process.

    Returns:
        Measurement without profiling, latency with profiling, path of the profile, and growth of the process if the
        memory of nodes is written. All sessions are closed.
    """
    result = _unprofiled_run(path, options, latency, _scale_progress(progress, 0, 2, 0))
    counted = len(result.latency.samples_ms)
    with opened_model.prepared_model(path, options, options.choose_provider(), **files) as prepared:
        profiled = measure_latency(prepared.run, latency, _scale_progress(progress, 1, 2, counted))
        profile = prepared.opened.session.end_profile()
    del prepared
    return result, profiled, profile, measure_growth(path, options) if "memory_path" in files else None


def _unprofiled_run(path: Path, options: RunOptions, latency: LatencyOptions, progress: Progress | None) -> PerfResult:
    """Run the model without profiling; the session is closed, since two would hold the weights twice."""
    with opened_model.prepared_model(path, options, options.choose_provider()) as prepared:
        before = resident_bytes()
        measured = measure_latency(prepared.run, latency, progress)
        memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
        return perf_result(prepared, latency, measured, memory)


class _FlatGraph(NamedTuple):
    """A graph without functions and with unique names of nodes, as sessions report them."""

    path: Path
    structure: onnx.ModelProto
    tree: OnnxTree
    """Its modules."""


@contextlib.contextmanager
def _flat_graph(path: Path) -> Iterator[_FlatGraph]:
    """Yield the flat graph of a file.

    Raises:
        UsageError: the nodes have no module information.
    """
    refuse_cycles(read_structure(path), path)
    with flat_file(path) as flat:
        structure = read_structure(flat)
        tree = reading_graph(path, lambda: read_model_tree(graph_of(structure, path), path.stem))
        if tree.source == "none":
            raise UsageError(
                f"{path}: the nodes have no module information",
                hint="Export it with winml export, or transfer tags from its source file: winml retag.",
            )
        yield _FlatGraph(flat, structure, tree)


def _charge_to_modules(
    result: PerfResult,
    flat: _FlatGraph,
    executed: onnx.ModelProto,
    measured: RunProfile,
    run_memory: tuple[RunMemory, MemoryGrowth] | None,
) -> ProfiledModules:
    """Assign the kernels of the executed graph to modules.

    Args:
        result: The measurement.
        flat: The measured graph.
        executed: The executed graph.
        measured: Times of the kernels.
        run_memory: Memory of the kernels, and growth of the process.
    """
    charged, tree = _charge_kernels(flat, executed, measured, run_memory), flat.tree
    original, profile, report = charged.original, charged.profile, charged.report
    notes = (*result.notes, _overhead_note(result, profile), *tree.notes, *_source_notes(tree), *report.notes)
    return ProfiledModules(
        result=replace(result, notes=notes),
        profile=profile,
        tree_source=tree.source,
        carried=report,
        graph_name=original.graph.name or "",
        node_ms=_node_times(original, charged.executed, profile),
        memory=charged.memory,
    )


class _ChargedKernels(NamedTuple):
    """Kernels by module, and the graphs with their tags."""

    original: ir.Model
    executed: ir.Model
    profile: ModuleProfile
    report: CarryReport
    memory: ModuleMemory | None


def _charge_kernels(
    flat: _FlatGraph,
    executed_proto: onnx.ModelProto,
    measured: RunProfile,
    run_memory: tuple[RunMemory, MemoryGrowth] | None = None,
) -> _ChargedKernels:
    """Transfer the tags of a file to its executed graph, and assign the kernels to modules.

    Args:
        flat: The measured graph.
        executed_proto: The executed graph.
        measured: Times of the kernels.
        run_memory: Memory of the kernels, and growth of the process; ``None``: not measured.
    """
    original, executed = (graph_of(structure, flat.path) for structure in (flat.structure, executed_proto))
    tree = flat.tree
    write_tree_tags(original, tree)
    report = carry_tags(original, executed)
    modules = {module.path: module.tag for module in reversed(tree.modules)}
    tags = _tags_by_name(executed, report)
    graph = ExecutedGraph(executed_proto, tags, tree)
    memory = None if run_memory is None else charge_memory(graph, *run_memory)
    profile = charge_modules(
        measured,
        tags,
        [(module.tag, module.path, module.class_name) for module in tree.modules],
        _fused_modules(executed, modules),
        None if memory is None else memory.modules,
    )
    return _ChargedKernels(original, executed, profile, report, memory)


class ProfiledKernels(NamedTuple):
    """Kernels of a file by module."""

    profile: ModuleProfile
    nodes: Mapping[str, Counter[str]]
    """Tag → operator → nodes in the file."""


def profile_kernels(path: Path, feeds: Arrays, provider: ChosenProvider, runs: int) -> ProfiledKernels:
    """Run a file with profiling, and assign its kernels to modules.

    On a provider that compiles, each compiled part is one kernel without a module; nodes that run outside have theirs.

    Args:
        path: The ONNX file.
        feeds: Values of its inputs.
        provider: The execution provider.
        runs: Number of counted runs.

    Raises:
        UsageError: the file has no module information.
        StageError: ONNX Runtime cannot load or run the file, or its provider records no kernel.
    """
    with temporary_folder() as folder, _flat_graph(path) as flat:
        executed_path = folder / "executed.onnx"
        files = {} if provider.provider.compiles else {"optimized_path": executed_path}
        session = provider.open(flat.path, profile_prefix=folder / "profile", **files)
        measure_latency(session.prepare(feeds), LatencyOptions(runs, warmup=_KERNEL_WARMUP))
        measured = read_profile(session.end_profile(), counted_runs=runs)
        executed = read_structure(executed_path) if executed_path.is_file() else flat.structure
    charged = _charge_kernels(flat, executed, measured)
    nodes: dict[str, Counter[str]] = defaultdict(Counter)
    for node in all_nodes(charged.original):
        if (tag := read_tag(node)) is not None:
            nodes[tag.tag][node.op_type] += 1
    return ProfiledKernels(charged.profile, nodes)


_KERNEL_WARMUP = 2
"""Chosen: caches are filled, and memory is planned."""


def _overhead_note(result: PerfResult, profile: ModuleProfile) -> str:
    p50 = result.latency.summary.p50
    text = "module times are from separate runs with profiling on"
    if DISTURBED * profile.whole_ms < p50:
        return f"{text}; other load slowed the runs without profiling, so that both are not compared"
    text += f", {time_words(profile.whole_ms)} ms each ({time_words(p50)} ms without)"
    if profile.whole_ms <= p50:
        return text
    return f"{text}: profiling adds time to every kernel, so that the share of short kernels is too large"


def _source_notes(tree: OnnxTree) -> Iterator[str]:
    """Note another source of the module tree than winml tags."""
    if tree.source != "winml tags":
        yield f"the file has no winml tags; modules were read from its {tree.source}"


def _tags_by_name(executed: ir.Model, report: CarryReport) -> dict[str, str]:
    """Name of a node → tag, since profiles contain names only; nodes of equal name get their common ancestor."""
    guessed = set(report.last_resort)
    tags_of_name: dict[str, list[str]] = defaultdict(list)
    for node in all_nodes(executed):
        tag = read_tag(node)
        name = node.name or ""
        if tag is not None and name and name not in guessed:
            tags_of_name[name].append(tag.tag)
    return {name: address.common_ancestor(tags) for name, tags in tags_of_name.items()}


def _node_times(original: ir.Model, executed: ir.Model, profile: ModuleProfile) -> dict[str, float]:
    """Name of a node in the original main graph → time per run.

    A kernel that is not such a node counts for the node with the same output, else for the node whose name is its
    prefix, else for the first node of its module.
    """
    names = {node.name for node in original.graph if node.name}
    makers = {value.name: node.name for node in original.graph for value in node.outputs if value.name and node.name}
    firsts: dict[str, str] = {}
    for node in original.graph:
        tag = read_tag(node)
        if tag is not None and node.name:
            firsts.setdefault(tag.tag, node.name)
    outputs = {node.name: [value.name for value in node.outputs] for node in all_nodes(executed)}
    times: dict[str, float] = defaultdict(float)
    for (kernel, _), milliseconds in profile.node_ms.items():
        same_value = (makers[value] for value in outputs.get(kernel, ()) if value in makers)
        candidates = (kernel, *same_value, *_leading_parts(kernel))
        target = next((name for name in candidates if name in names), firsts.get(profile.tags.get(kernel, "")))
        if target is not None:
            times[target] += milliseconds
    return dict(times)


def _leading_parts(name: str) -> list[str]:
    """Prefixes of a name, the longest first: fused nodes are called ``<source>/MatMulAddFusion``."""
    parts = name.split(address.SEPARATOR)
    return [address.SEPARATOR.join(parts[:length]) for length in range(len(parts) - 1, 1, -1)]


_STEPS = ("modules extracted", "activations recorded", "modules measured")


def measure_modules(
    path: Path,
    selector: str,
    options: RunOptions,
    latency: LatencyOptions,
    *,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
) -> ModulePerfResult:
    """Measure every selected module alone.

    Args:
        path: The ONNX file.
        selector: Selector of modules.
        options: Run options, and inputs of the whole model.
        latency: Number of runs of each module.
        on_step: Called when a step starts and when it ends.
        progress: Called between runs with the number of finished runs and the share of finished work.

    Raises:
        UsageError: the selector names no module, the execution provider is missing, or values do not fit.
        InputError: the file is damaged or has no tags.
        StageError: ONNX Runtime cannot run the whole model.
    """
    provider = options.choose_provider()
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        cuts = extraction.cut_modules(path, selector)
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    refused = [MeasuredModule(call.identity, {}, 0, None, None, call.reason) for call in cuts.refused]
    measured: list[MeasuredModule] = []
    notes: tuple[str, ...] = ()
    if cuts.calls:
        with clock.step(_STEPS[1]) as step:
            recording = extraction.record_boundaries(cuts, options)
            opened_model.refuse_dynamic_inputs(provider, recording.fed.inputs, options)
            notes = (*cuts.notes, *recording.fed.notes)
            step.summary = f"{len(recording.arrays)} values"
        with clock.step(_STEPS[2]) as step:
            measurement = _CutMeasurement(cuts, recording, options, provider, latency)
            for number, call in enumerate(cuts.calls):
                share = _scale_progress(progress, number, len(cuts.calls), len(measured) * latency.iterations)
                measured.append(measurement.measure(call, share))
            step.summary = f"{len(measured)} instances"
    return ModulePerfResult(
        model=options.shown,
        selector=selector,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        provider=provider,
        threads=options.threads,
        seed=options.seed,
        input_source="random" if options.input_data is None else "file",
        options=latency,
        instances=(*measured, *refused),
        without_nodes=cuts.without_nodes,
        notes=(*notes, *spread_notes({m.identity.words: m.latency for m in measured if m.latency is not None})),
    )


def _scale_progress(progress: Progress | None, number: int, count: int, runs_before: int) -> Progress | None:
    """Map one module's progress to progress of the whole; `None` without a listener.

    Args:
        progress: Listener to the whole.
        number: Number of finished modules.
        count: Number of all modules.
        runs_before: Runs of the finished modules.
    """
    if progress is None:
        return None
    return lambda runs, share: progress(runs_before + runs, (number + share) / count)


@dataclass(frozen=True)
class _CutMeasurement:
    """Measurement of cut modules."""

    cuts: extraction.ModuleCuts
    recording: extraction.Recording
    options: RunOptions
    provider: ChosenProvider
    latency: LatencyOptions

    def measure(self, call: extraction.CutCall, progress: Progress | None) -> MeasuredModule:
        """Measure one module; a module that does not run alone or returns other outputs has an error instead of times.

        Raises:
            WriteError: the cut model cannot be written.
        """
        feeds = self.recording.of(call.cut.inputs)
        failed = MeasuredModule(
            identity=call.identity,
            inputs={name: (str(array.dtype), array.shape) for name, array in feeds.items()},
            nodes=len(call.cut.nodes),
            latency=None,
            session_creation_ms=None,
        )
        with temporary_folder() as folder:
            path = folder / "module.onnx"
            try:
                extraction.write_cut(self.cuts, call, self.recording, path)
                worst = extraction.compare_with_recording(path, call, self.recording)
                if not worst.relative_diff <= CUT_MODULE_THRESHOLD:
                    reason = f"run alone, output {worst.name} differs by {worst.relative_diff:.1e} of its largest value"
                    return replace(failed, error=reason)
                cut = opened_model.open_model(path, self.options, self.provider)
                run = cut.session.prepare(feeds, io_binding=self.options.io_binding)
                measured = measure_latency(run, self.latency, progress)
            except WriteError:
                raise
            except StageError as error:
                return replace(failed, error=error.message.replace(str(path), "the module"))
        return replace(failed, latency=measured, session_creation_ms=cut.creation_ms)
