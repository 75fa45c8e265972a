"""What does ``winml perf --by-module`` do? Profiles a session and charges the time of every kernel to its module.

ONNX Runtime rewrites a graph before it runs it, so its profile names nodes no file has. The graph as executed is
written by the same session, and ``hierarchy`` brings the tags over. A decoder with a cache is profiled twice: a prompt,
and a step after it. Works on ONNX files alone; measures nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from winml.modelkit.errors import MeasureError, UsageError
from winml.modelkit.flows.modules.kernel_work import charge_fused_kernels
from winml.modelkit.graph.contexts import refuse_compiled_modules
from winml.modelkit.graph.files.flat_files import flat_file
from winml.modelkit.graph.files.graph_reading import graph_of, reading_graph
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.files.temporary import temporary_folder
from winml.modelkit.graph.validity import refuse_cycles
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.carry.carrying import CarryReport, carry_tags
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import NodeTag, read_tag, write_tag
from winml.modelkit.inspect.onnx_tree import OnnxTree, read_tree
from winml.modelkit.measure.latency import LatencyOptions, measure_latency
from winml.modelkit.measure.module_profile import ModuleProfile, charge_modules
from winml.modelkit.results.perf_result import MemoryUse, PerfResult, perf_result
from winml.modelkit.results.profiled_modules import ProfiledDecoder, ProfiledModules
from winml.modelkit.runtime.decoder_inputs import DecoderRun, decoder_tokens, inputs_of_file
from winml.modelkit.runtime.kernel_times import RunProfile, read_profile
from winml.modelkit.runtime.memory import resident_bytes
from winml.modelkit.runtime.opened_model import RunOptions, prepared_model, run_at_fitting_sizes

__all__ = ["profile_model", "profile_modules"]


def profile_model(
    path: Path,
    options: RunOptions,
    latency: LatencyOptions,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> ProfiledModules | ProfiledDecoder:
    """Measure a model by module; of a decoder with a cache a prompt and a step, each in a session of its own.

    Args:
        path: The ONNX file.
        options: How it is run. Of a decoder, what they say of the sizes of tokens or cache is the length of the prompt;
            both sizes, or values from a file, are one run as for any model.
        latency: How often, each.
        progress: Called between runs with the number of counted ones and the share that is done.

    Raises:
        UsageError: as :func:`profile_modules`, or the prompt is longer than the model has positions.
        StageError: as :func:`profile_modules`.
    """
    tokens = None if options.input_data is not None else decoder_tokens(inputs_of_file(path), options.sizes)
    if tokens is None:
        return profile_modules(path, options, latency, progress=progress)
    prompt = profile_modules(path, replace(options, decoding=DecoderRun(tokens, 0)), latency, progress=progress)
    assert prompt.result.decoding is not None
    after = DecoderRun(1, prompt.result.decoding.tokens)
    return ProfiledDecoder(prompt, profile_modules(path, replace(options, decoding=after), latency, progress=progress))


def profile_modules(
    path: Path,
    options: RunOptions,
    latency: LatencyOptions,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> ProfiledModules:
    """Measure a model with ONNX Runtime's profiling on, and charge every kernel to its module.

    Args:
        path: The ONNX file.
        options: How it is run.
        latency: How often.
        progress: Called between runs with the number of counted ones and the share that is done.

    Raises:
        UsageError: the options do not fit the model, or nothing in the file says which module a node belongs to.
        StageError: ONNX Runtime cannot load or run the file, or its provider records no kernel.
    """
    before = read_structure(path)
    refuse_compiled_modules(before, path)
    refuse_cycles(before, path)
    tree = _module_tree(before, path)
    # ONNX Runtime gives the nodes of functions names of its own.
    with temporary_folder() as folder, flat_file(path) as flat:
        executed_path = folder / "executed.onnx"
        files = {"profile_prefix": folder / "profile", "optimized_path": executed_path}
        result, profile_path = run_at_fitting_sizes(
            flat, options, lambda fitting: _profiled_run(flat, fitting, latency, files, progress)
        )
        measured = read_profile(profile_path, counted_runs=len(result.latency.samples_ms))
        if not executed_path.is_file():
            raise MeasureError(
                "ONNX Runtime did not write the graph it executed, so its kernels cannot be named",
                hint="Profile on another execution provider: --ep cpu.",
            )
        executed = read_structure(executed_path)
    result = replace(result, model_bytes=path.stat().st_size)
    return _charge_to_modules(result, (before, executed), path, tree, measured)


def _profiled_run(
    path: Path,
    options: RunOptions,
    latency: LatencyOptions,
    files: Mapping[str, Path],
    progress: Callable[[int, float], None] | None,
) -> tuple[PerfResult, Path]:
    """Run the model; return what was measured and the profile. The session is closed with this function."""
    with prepared_model(path, options, options.choose_provider(), **files) as prepared:
        before = resident_bytes()
        measured = measure_latency(prepared.run, latency, progress)
        memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
        # Before the answers are looked at, which may take one more run.
        profile = prepared.opened.session.end_profile()
    return perf_result(prepared, latency, measured, memory), profile


def _module_tree(before: onnx.ModelProto, model_path: Path) -> OnnxTree:
    nodes = list(all_nodes(graph_of(before, model_path)))
    metadata = {entry.key: entry.value for entry in before.metadata_props}
    protos = reading_graph(model_path, lambda: [ir.serde.serialize_node(node) for node in nodes])
    tree = read_tree(protos, metadata, model_path.stem)
    if tree.source == "none":
        raise UsageError(
            f"{model_path}: nothing says which module its nodes came from",
            hint="Export it with winml export, or bring tags over from the file it was made of: winml retag.",
        )
    return tree


def _charge_to_modules(
    result: PerfResult,
    structures: tuple[onnx.ModelProto, onnx.ModelProto],
    path: Path,
    tree: OnnxTree,
    measured: RunProfile,
) -> ProfiledModules:
    """Charge the kernels of the executed graph to the modules of the measured one; ``structures`` are the two."""
    before, executed_proto = structures
    original, executed = graph_of(before, path), graph_of(executed_proto, path)
    paths = {module.tag: module.path for module in tree.modules}
    for node, tag in zip(all_nodes(original), tree.tags, strict=True):
        if tag and read_tag(node) is None:
            write_tag(node, NodeTag(tag, paths[tag], "direct"))
    carried = carry_tags(original, executed)
    modules = {module.path: module.tag for module in reversed(tree.modules)}
    sizes = result.measured_shapes
    fused = charge_fused_kernels(before, original, executed_proto, executed, modules=modules, sizes=sizes)
    profile = charge_modules(
        measured,
        _tags_by_name(executed, carried),
        [(module.tag, module.path, module.class_name) for module in tree.modules],
        fused,
    )
    profiled_on = "measured with profiling on, which takes time of its own: compare shares, not these times"
    notes = (*result.notes, profiled_on, *tree.notes, *_source_notes(tree), *carried.notes)
    return ProfiledModules(
        result=replace(result, notes=notes),
        profile=profile,
        tree_source=tree.source,
        carried=carried,
        graph_name=original.graph.name or "",
        node_ms=_node_times(original, executed, profile),
    )


def _source_notes(tree: OnnxTree) -> tuple[str, ...]:
    if tree.source == "winml tags":
        return ()
    return (f"the file bears no tags of winml; modules were read from its {tree.source}",)


def _tags_by_name(executed: ir.Model, carried: CarryReport) -> dict[str, str]:
    """Return the tag of every node by its name, which is all a profile says; equal names share what they have in
    common.
    """
    guessed = set(carried.last_resort)
    tags_of_name: dict[str, list[str]] = defaultdict(list)
    for node in all_nodes(executed):
        tag = read_tag(node)
        name = node.name or ""
        if tag is not None and name and name not in guessed:
            tags_of_name[name].append(tag.tag)
    return {name: address.common_ancestor(tags) for name, tags in tags_of_name.items()}


def _node_times(original: ir.Model, executed: ir.Model, profile: ModuleProfile) -> dict[str, float]:
    """Return the time per run of the nodes of the original's main graph.

    A kernel that is no node of it counts for the node that made the same value, else for the one its name begins with,
    else for the first of its module.
    """
    names = {node.name for node in original.graph if node.name}
    makers = {value.name: node.name for node in original.graph for value in node.outputs if value.name and node.name}
    firsts: dict[str, str] = {}
    for node in original.graph:
        tag = read_tag(node)
        if tag is not None and node.name:
            firsts.setdefault(tag.tag, node.name)
    outputs = {node.name: [value.name for value in node.outputs] for node in all_nodes(executed)}
    runs = len(profile.run_ms)
    times: dict[str, float] = defaultdict(float)
    for kernel in profile.profile.kernels:
        same_value = (makers[value] for value in outputs.get(kernel.node, ()) if value in makers)
        candidates = (kernel.node, *same_value, *_leading_parts(kernel.node))
        target = next((name for name in candidates if name in names), firsts.get(profile.tags.get(kernel.node, "")))
        if target is not None:
            times[target] += kernel.self_us / runs / 1000
    return dict(times)


def _leading_parts(name: str) -> list[str]:
    """Return what a name begins with, the longest first: fused nodes are called ``<source>/MatMulAddFusion``."""
    parts = name.split(address.SEPARATOR)
    return [address.SEPARATOR.join(parts[:length]) for length in range(len(parts) - 1, 1, -1)]
