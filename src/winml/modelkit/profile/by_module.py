"""Kernel times by module (``winml perf --by-module``), and times of single modules (``--module``).

ONNX Runtime rewrites a graph before running it, so its profile contains node names that are not in the file. The same
session writes the executed graph, and tags are transferred to it. A decoder with a KV cache is profiled twice: with a
prompt, and with a following step. Works on ONNX files only.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from winml.modelkit.compare.outputs import CUT_MODULE_THRESHOLD
from winml.modelkit.errors import MeasureError, StageError, UsageError, WriteError, opt
from winml.modelkit.extract import extraction
from winml.modelkit.metadata_keys import MODULE_KEY, MODULES_KEY
from winml.modelkit.onnx.contents import ShapeTable, read_contents
from winml.modelkit.onnx.contexts import refuse_compiled_modules
from winml.modelkit.onnx.files.graph_reading import flat_file, graph_of
from winml.modelkit.onnx.files.reading import read_structure, reading_graph
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.macs import count_macs
from winml.modelkit.onnx.module_costs import read_shapes
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.onnx.validity import refuse_cycles
from winml.modelkit.ort import opened_model
from winml.modelkit.ort.decoding.inputs import DecoderRun, decoder_tokens, inputs_of_file
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.execution_providers import short_name
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.ort.kernel_times import KernelTime, RunProfile, read_device_profile, read_profile
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.latency import LatencyOptions, LatencyResult, Progress, measure_latency
from winml.modelkit.profile.module_profile import (
    ModuleProfile,
    NodeWork,
    charge_modules,
    kernel_times_ms,
    working_module,
)
from winml.modelkit.profile.module_records import MeasuredModule, ModulePerfResult, ProfiledDecoder, ProfiledModules
from winml.modelkit.profile.records import MemoryUse, PerfResult, busy_notes, perf_result, spread_notes
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.tags import address
from winml.modelkit.tags.carry.carrying import CarryReport, carry_tags
from winml.modelkit.tags.carry.matching import Way
from winml.modelkit.tags.tagging import NodeTag, all_nodes, clear_tag, listed_modules, read_tag, write_tag
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun, time_words

_LABEL = "#"
"""Prefix of node positions used in place of module paths, which never begin with it."""


def _charge_fused_kernels(
    measured_file: onnx.ModelProto,
    original: ir.Model,
    executed_file: onnx.ModelProto,
    executed: ir.Model,
    *,
    modules: Mapping[str, str],
    sizes: Mapping[str, Sequence[int]],
) -> dict[str, frozenset[str]]:
    """Assign each fused node to the module that does most of the work, in place.

    ONNX Runtime fuses across modules: a convolution absorbs the following batch norm and activation. The tag of the
    fused node is their common ancestor; here it becomes the tag of the convolution. No file contains these tags.

    Args:
        measured_file: The file that was run.
        original: The same graph, with a module tag on every node.
        executed_file: The graph as ONNX Runtime executed it.
        executed: The same graph, with transferred tags; changed in place.
        modules: Module path → tag.
        sizes: Input name → measured shape.

    Returns:
        Node name → tags of the other modules fused into it.
    """
    original_nodes = list(all_nodes(original))
    if not any(MODULES_KEY in node.metadata_props for node in (*original_nodes, *all_nodes(executed))):
        return {}
    works = _node_works(original_nodes, modules, _measured_shapes(measured_file, sizes))
    sources = _source_positions(original_nodes, measured_file, executed_file)
    fused_tags: dict[str, frozenset[str]] = {}
    for node in all_nodes(executed):
        node_tag = read_tag(node)
        positions = sources.get(node.name or "", ())
        paths = [path for holder in (node, *(original_nodes[p] for p in positions)) for path in _listed_modules(holder)]
        if node_tag is None or not paths or not node.name:
            continue
        fused = [work for position in positions if (work := works[position]) is not None]
        tag = working_module(fused) or node_tag.tag
        fused_tags[node.name] = frozenset(modules[path] for path in paths if path in modules) - {tag}
        path = next((path for path, module_tag in modules.items() if module_tag == tag), node_tag.module)
        write_tag(node, NodeTag(tag, path, "merged"))
    return fused_tags


def _listed_modules(node: ir.Node) -> list[str]:
    """Paths of the modules of a fused node; ``[]`` for one module or damaged metadata."""
    try:
        return listed_modules(node)
    except ValueError:
        return []


def _measured_shapes(file: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> ShapeTable:
    """Value name → shape, with measured sizes of dynamic dimensions."""
    shapes, _ = read_shapes(file, read_contents(file).nodes)
    measured: dict[str, int] = {}
    for name, actual in sizes.items():
        measured.update({str(size): length for size, length in zip(shapes.get(name, ()), actual, strict=False)})
    return {
        name: tuple(measured.get(size, size) if isinstance(size, str) else size for size in shape)
        for name, shape in shapes.items()
    }


def _node_works(nodes: Iterable[ir.Node], modules: Mapping[str, str], shapes: ShapeTable) -> list[NodeWork | None]:
    """Work of each node of the original graph; ``None`` for a node without a module."""
    works: list[NodeWork | None] = []
    for node in nodes:
        tag = read_tag(node)
        if tag is None:
            works.append(None)
            continue
        macs = count_macs(ir.serde.serialize_node(node), shapes)
        owner = _weight_owner(node, modules) if macs != 0 else None
        works.append(NodeWork(owner or tag.tag, macs, _count_elements(node, shapes)))
    return works


def _count_elements(node: ir.Node, shapes: ShapeTable) -> int | None:
    """Number of output elements of a node; ``None`` if unknown."""
    total = 0
    for value in node.outputs:
        sizes = shapes.get(value.name or "", (None,)) if value.name else ()
        if not all(isinstance(size, int) for size in sizes):
            return None
        total += math.prod(size for size in sizes if isinstance(size, int)) if value.name else 0
    return total


def _weight_owner(node: ir.Node, modules: Mapping[str, str]) -> str | None:
    """Module of the first weight of a fused node, found by name; ``None`` for other nodes.

    Tools prepend words to the name of a changed weight: ``ConvBnFusion_W_conv1.weight``.
    """
    listed = sorted((path for path in _listed_modules(node) if path and path in modules), key=len, reverse=True)
    weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
    owners = (path for name in weights for path in listed if re.search(rf"(^|_){re.escape(path)}\.", name))
    owner = next(owners, None)
    return None if owner is None else modules[owner]


def _source_positions(
    original_nodes: Iterable[ir.Node], measured_file: onnx.ModelProto, executed_file: onnx.ModelProto
) -> dict[str, tuple[int, ...]]:
    """Name of an executed node → positions of its original nodes.

    The transfer of tags finds the modules of a node. Here every node of a copy of the original is a separate module.

    Args:
        original_nodes: Nodes of the original graph, with tags.
        measured_file: The original graph.
        executed_file: The graph that ONNX Runtime executed.
    """
    labelled, executed = ir.serde.deserialize_model(measured_file), ir.serde.deserialize_model(executed_file)
    for position, (node, original_node) in enumerate(zip(all_nodes(labelled), original_nodes, strict=True)):
        tag = read_tag(original_node)
        clear_tag(node)
        if tag is not None:
            write_tag(node, NodeTag(f"{tag.tag}/{position}", f"{_LABEL}{position}", "direct"))
    for node in all_nodes(executed):
        clear_tag(node)
    carry_tags(labelled, executed)
    return {node.name: _read_labels(node) for node in all_nodes(executed) if node.name}


def _read_labels(node: ir.Node) -> tuple[int, ...]:
    """Return the positions in the labels of a node; ``()`` if another path is listed."""
    labels = _listed_modules(node) or [node.metadata_props.get(MODULE_KEY, "")]
    if not all(label.startswith(_LABEL) for label in labels):
        return ()
    return tuple(int(label.removeprefix(_LABEL)) for label in labels)


def profile_model(
    path: Path,
    options: opened_model.RunOptions,
    latency: LatencyOptions,
    *,
    progress: Progress | None = None,
) -> ProfiledModules | ProfiledDecoder:
    """Measure a model by module; a decoder with a KV cache with a prompt and a step, in separate sessions.

    Args:
        path: The ONNX file.
        options: Run options. For a decoder, the size of tokens or cache is the length of the prompt; both sizes, or
            values from a file, are run once as for other models.
        latency: Number of runs of each.
        progress: Called between runs with the number and the share of finished runs.

    Raises:
        UsageError: as in :func:`profile_modules`, or the prompt exceeds the positions of the model.
        StageError: as in :func:`profile_modules`.
    """
    tokens = None if options.input_data is not None else decoder_tokens(inputs_of_file(path), options.sizes)
    if tokens is None:
        return profile_modules(path, options, latency, progress=progress)
    prompt_run = replace(options, decoding=DecoderRun(tokens, 0))
    prompt = profile_modules(path, prompt_run, latency, progress=_scale_progress(progress, 0, 2, 0))
    assert prompt.result.decoding is not None
    step_run = replace(options, decoding=DecoderRun(1, prompt.result.decoding.tokens))
    runs = 2 * len(prompt.result.latency.samples_ms)
    return ProfiledDecoder(
        prompt, profile_modules(path, step_run, latency, progress=_scale_progress(progress, 1, 2, runs))
    )


def profile_modules(
    path: Path,
    options: opened_model.RunOptions,
    latency: LatencyOptions,
    *,
    progress: Progress | None = None,
) -> ProfiledModules:
    """Measure a model, then profile it with ONNX Runtime, and assign every kernel to its module.

    Args:
        path: The ONNX file.
        options: Run options.
        latency: Number of runs.
        progress: Called between runs with the number and the share of finished runs.

    Raises:
        UsageError: the options do not fit the model, or the file has no module information.
        StageError: ONNX Runtime cannot load or run the file, or its provider records no kernel.
    """
    before = read_structure(path)
    refuse_compiled_modules(before, path)
    refuse_cycles(before, path)
    tree = _read_module_tree(before, path)
    provider = options.choose_provider()
    if provider.provider.compiles:
        return _profile_on_device(path, options, latency, before, tree, provider, progress)
    # ONNX Runtime renames the nodes of functions.
    with temporary_folder() as folder, flat_file(path) as flat:
        executed_path = folder / "executed.onnx"
        files = {"profile_prefix": folder / "profile", "optimized_path": executed_path}
        result, profiled, profile_path = opened_model.run_at_fitting_sizes(
            flat, options, lambda fitting: _profiled_run(flat, fitting, latency, files, progress)
        )
        measured = read_profile(profile_path, counted_runs=len(profiled.samples_ms))
        if not executed_path.is_file():
            raise MeasureError(
                "ONNX Runtime did not write the graph it executed, so kernels cannot be matched to nodes",
                hint=f"Profile on a different execution provider: {opt.ep} cpu.",
            )
        executed = read_structure(executed_path)
    notes = (*result.notes, *busy_notes({"the model with profiling": profiled}))
    result = replace(result, model_bytes=path.stat().st_size, notes=notes)
    return _charge_to_modules(result, (before, executed), path, tree, measured)


_PROFILE = "device.csv"


def _profile_on_device(
    path: Path,
    options: opened_model.RunOptions,
    latency: LatencyOptions,
    structure: onnx.ModelProto,
    tree: OnnxTree,
    provider: ChosenProvider,
    progress: Progress | None,
) -> ProfiledModules:
    """Measure a model with the profiling of its provider, and assign node times to modules.

    The provider compiles the graph when the session is created, so that ONNX Runtime runs one kernel.

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
    with temporary_folder() as folder, flat_file(path) as flat:
        csv_path = folder / _PROFILE
        profiling = {key: value.format(file=csv_path) for key, value in provider.provider.node_profile.items()}
        recording = replace(provider, options={**provider.options, **profiling})
        with opened_model.prepared_model(flat, options, recording, profile_prefix=folder / "profile") as prepared:
            before = resident_bytes()
            measured = measure_latency(prepared.run, latency, progress)
            memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
            kernels = read_profile(prepared.opened.session.end_profile(), counted_runs=len(measured.samples_ms))
        result = perf_result(prepared, latency, measured, memory)
        del prepared  # the provider writes its profile when the session is closed, if not before
        profile = read_device_profile(csv_path, counted_runs=len(measured.samples_ms), provider=name)
    original = graph_of(structure, path)
    _write_tree_tags(original, tree)
    renamed, by_way = _rename_kernels(profile, original)
    tags = {node.name: tag.tag for node in all_nodes(original) if node.name and (tag := read_tag(node)) is not None}
    modules = [(module.tag, module.path, module.class_name) for module in tree.modules]
    charged = charge_modules(renamed, tags, modules)
    notes = (*result.notes, *_device_notes(charged, kernels, provider), *tree.notes, *_source_notes(tree))
    return ProfiledModules(
        result=replace(result, provider=provider, model_bytes=path.stat().st_size, notes=notes),
        profile=charged,
        tree_source=tree.source,
        carried=CarryReport(len({kernel.node for kernel in profile.kernels}), sum(by_way.values()), by_way),
        graph_name=original.graph.name or "",
        node_ms=_node_times(original, original, charged),
    )


def _rename_kernels(profile: RunProfile, model: ir.Model) -> tuple[RunProfile, Counter[Way]]:
    """Rename kernels to graph nodes by name prefix, and count the matches by node name and output name.

    A provider appends to names of nodes and values: ``…/MatMul_output_0_convert``.
    """
    makers = {value.name: node for node in all_nodes(model) for value in node.outputs if value.name}
    nodes = {**makers, **{node.name: node for node in all_nodes(model) if node.name}}
    matches: dict[str, ir.Node | None] = {}
    for kernel in profile.kernels:
        if kernel.node not in matches:
            ends = (end for end in range(len(kernel.node), 0, -1) if not kernel.node[end : end + 1].isdigit())
            matches[kernel.node] = next((nodes[kernel.node[:end]] for end in ends if kernel.node[:end] in nodes), None)
    ways: Counter[Way] = Counter(
        "name" if node.name == name else "output" for name, node in matches.items() if node is not None
    )

    def rename(kernel: KernelTime) -> KernelTime:
        node = matches[kernel.node]
        return kernel if node is None else replace(kernel, node=node.name or kernel.node, op_type=node.op_type)

    return replace(profile, kernels=tuple(map(rename, profile.kernels))), ways


def _device_notes(profile: ModuleProfile, kernels: RunProfile, provider: ChosenProvider) -> Iterator[str]:
    """Note the unit of the device, and nodes run outside the compiled parts."""
    name, device = provider.provider.name, provider.device_words
    yield f"latency and module times were measured with the profiling of {name} on, which adds time to every run"
    if profile.profile.unit == "cycles":
        yield f"times are {profile.unit} of {name} ({device}), thousands of clock cycles: compare shares"
    outside = kernel_times_ms(replace(kernels, kernels=tuple(k for k in kernels.kernels if k.provider != name)))
    if outside:
        nodes, outside_ms = len({node for node, _ in outside}), sum(outside.values())
        yield (
            f"{count_noun(nodes, 'node')} ran outside the compiled parts ({outside_ms:.3f} ms per run), without being "
            "included in these times"
        )


def _write_tree_tags(model: ir.Model, tree: OnnxTree) -> None:
    """Tag each untagged node with its module, in place."""
    paths = {module.tag: module.path for module in tree.modules}
    for node, tag in zip(all_nodes(model), tree.tags, strict=True):
        if tag and read_tag(node) is None:
            write_tag(node, NodeTag(tag, paths[tag], "direct"))


def _profiled_run(
    path: Path,
    options: opened_model.RunOptions,
    latency: LatencyOptions,
    files: Mapping[str, Path],
    progress: Progress | None,
) -> tuple[PerfResult, LatencyResult, Path]:
    """Run the model without profiling, then with profiling.

    Returns:
        Measurement without profiling, latency with profiling, and path of the profile. Both sessions are closed.
    """
    provider = options.choose_provider()
    with opened_model.prepared_model(path, options, provider) as prepared:
        before = resident_bytes()
        measured = measure_latency(prepared.run, latency, _scale_progress(progress, 0, 2, 0))
        memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
        result = perf_result(prepared, latency, measured, memory)
    counted = len(measured.samples_ms)
    del prepared  # two sessions would hold the weights twice
    with opened_model.prepared_model(path, options, provider, **files) as prepared:
        profiled = measure_latency(prepared.run, latency, _scale_progress(progress, 1, 2, counted))
        profile = prepared.opened.session.end_profile()
    return result, profiled, profile


def _read_module_tree(before: onnx.ModelProto, model_path: Path) -> OnnxTree:
    """Read the module tree of a graph.

    Raises:
        UsageError: the nodes have no module information.
    """
    nodes = list(all_nodes(graph_of(before, model_path)))
    metadata = {entry.key: entry.value for entry in before.metadata_props}
    protos = reading_graph(model_path, lambda: [ir.serde.serialize_node(node) for node in nodes])
    tree = read_tree(protos, metadata, model_path.stem)
    if tree.source == "none":
        raise UsageError(
            f"{model_path}: the nodes have no module information",
            hint="Export it with winml export, or transfer tags from its source file: winml retag.",
        )
    return tree


def _charge_to_modules(
    result: PerfResult,
    structures: tuple[onnx.ModelProto, onnx.ModelProto],
    path: Path,
    tree: OnnxTree,
    measured: RunProfile,
) -> ProfiledModules:
    """Assign the kernels of the executed graph to modules.

    Args:
        result: The measurement.
        structures: The measured and the executed graph.
        path: The measured file.
        tree: Its modules.
        measured: Times of the kernels.
    """
    before, executed_proto = structures
    original, executed = graph_of(before, path), graph_of(executed_proto, path)
    _write_tree_tags(original, tree)
    report = carry_tags(original, executed)
    modules = {module.path: module.tag for module in reversed(tree.modules)}
    sizes = result.measured_shapes
    fused = _charge_fused_kernels(before, original, executed_proto, executed, modules=modules, sizes=sizes)
    profile = charge_modules(
        measured,
        _tags_by_name(executed, report),
        [(module.tag, module.path, module.class_name) for module in tree.modules],
        fused,
    )
    notes = (*result.notes, _overhead_note(result, profile), *tree.notes, *_source_notes(tree), *report.notes)
    return ProfiledModules(
        result=replace(result, notes=notes),
        profile=profile,
        tree_source=tree.source,
        carried=report,
        graph_name=original.graph.name or "",
        node_ms=_node_times(original, executed, profile),
    )


def _overhead_note(result: PerfResult, profile: ModuleProfile) -> str:
    p50 = result.latency.summary.p50
    times = f"{time_words(profile.whole_ms)} ms each ({time_words(p50)} ms without)"
    text = f"module times are from separate runs with profiling on, {times}"
    if profile.whole_ms <= p50:
        return text
    return f"{text}: profiling adds time to every kernel, so that the share of short kernels is too large"


def _source_notes(tree: OnnxTree) -> tuple[str, ...]:
    """Note another source of the module tree than winml tags."""
    if tree.source == "winml tags":
        return ()
    return (f"the file has no winml tags; modules were read from its {tree.source}",)


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
    options: opened_model.RunOptions,
    latency: LatencyOptions,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
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
            notes = recording.fed.notes
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
    options: opened_model.RunOptions
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
