"""Compilation of a graph for one execution provider.

Parts that a provider compiles become ``EPContext`` nodes. The CPU provider has no compiled form: the graph is written
as ONNX Runtime optimizes it. In both cases every node keeps its module, and an ``EPContext`` node lists the modules of
all replaced nodes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common

from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.errors import CompileError, InputError, UsageError, opt
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.metadata_keys import COMPILE_KEY, COMPILE_TRACE_KEY, MODULES_KEY
from winml.modelkit.onnx.contexts import context_nodes, is_context, refuse_compiled
from winml.modelkit.onnx.files.graph_reading import load_foreign
from winml.modelkit.onnx.map_types import save_model
from winml.modelkit.onnx.pinning import open_dimensions
from winml.modelkit.onnx.specs import stated_sums
from winml.modelkit.onnx.stage import StageResult, restore_description
from winml.modelkit.ort.default_sizes import fixing_command
from winml.modelkit.ort.device_trace import CompilationTrace, CompiledNode, ModulePlacement
from winml.modelkit.ort.devices import ChosenProvider, missing_option_hint, provider_version
from winml.modelkit.ort.host import instruction_sets
from winml.modelkit.ort.kernels import CompiledByProvider, compile_to_files
from winml.modelkit.ort.sessions import onnxruntime_version, rewrite_file
from winml.modelkit.records import Record, entry
from winml.modelkit.tags.address import common_ancestor
from winml.modelkit.tags.carry.carrying import carry_tags
from winml.modelkit.tags.tagging import (
    NodeTag,
    all_nodes,
    listed_modules,
    measure_coverage,
    read_tag,
    write_tag,
)

_SENT, _RETURNED = "sent.onnx", "returned.onnx"

_LAYOUT_DOMAIN = "com.microsoft.nchwc"
"""Specified by ONNX Runtime: domain of operators with a block layout as wide as the registers of the processor."""


class CompiledPart(Record):
    """One node that replaces a compiled part of the graph."""

    name: str
    modules: tuple[str, ...]
    """Paths of the modules of the replaced nodes."""
    tag: str = field(metadata=entry(before="modules"))
    """Tag of the deepest module that contains these modules; empty if the source has no tags."""


class OutsideNode(Record):
    """A node that the provider left to ONNX Runtime's CPU provider."""

    name: str
    operator: str
    tag: str
    dtype: str = ""
    """numpy name of the element type of the first input; empty if unknown."""
    reason: str = ""
    """Reason given by the provider, if any."""
    expands_weight: bool = False
    """True if the node dequantizes a weight, on the CPU and in each run."""


@dataclass(frozen=True)
class CompileResult(StageResult):
    """Result of a compilation."""

    parts: tuple[CompiledPart, ...]
    """Compiled parts; empty for the CPU provider, which compiles none."""
    outside: tuple[OutsideNode, ...]
    """Nodes outside of compiled parts; empty for the CPU provider."""
    modules: tuple[ModulePlacement, ...]
    """Nodes of each module in compiled parts, and the reasons of the others; empty for the CPU provider."""
    record: Mapping[str, Any]
    """Record in the metadata of the file (``winml.compile``)."""


@dataclass(frozen=True)
class SharedContexts:
    """Compiled files of several parts of a model, with one context that stores common weights once."""

    folder: Path
    """Folder of the files; exists until the results are written."""
    files: Mapping[Path, Path]
    """Source of a part → its compiled file."""
    outcomes: Mapping[Path, CompiledByProvider]
    """Source of a part → reasons of its nodes outside of the context, and its operators on the device."""
    placed: dict[str, str] = field(default_factory=dict)
    """Name of a file of compiled content → its name beside the written models; filled with the first model."""


def compile_graph(
    model: ir.Model,
    options: CompileOptions,
    chosen: ChosenProvider,
    folder: Path,
    *,
    source_path: str,
    source: str = "",
    shared: SharedContexts | None = None,
) -> CompileResult:
    """Return the compiled model; the original model is not changed.

    Args:
        model: The normalized model.
        options: Target and limits.
        chosen: The provider and its options, as chosen from ``options``.
        folder: Folder of context files; must exist until the result is written.
        source_path: Path of the source, for messages.
        source: Name of the source for the metadata of the result; empty to record no source.
        shared: The compiled files of all parts, if they share weights; `None` to compile the model alone.

    Raises:
        UsageError: the provider requires fixed sizes and a dimension is dynamic, or refuses its options.
        InputError: the model is compiled already.
        CompileError: the provider fails or compiles nothing, or ONNX Runtime cannot load the graph.
        StageError: the provider ended its process, or did not finish in time.
    """
    refuse_compiled(model)
    refuse_open_sizes(model, chosen, source_path)
    input_file, output_file = folder / _SENT, folder / _RETURNED
    is_processor = not chosen.provider.compiles
    outcome = CompiledByProvider()
    if shared is None:
        save_for_provider(model, input_file)
    if is_processor:
        rewrite_file(input_file, output_file, disabled=(), with_layouts=True)
    elif shared is None:
        outcome = write_contexts({input_file: output_file}, chosen, embed=bool(options.embed))[input_file]
    else:
        output_file, outcome = shared.files[Path(source_path)], shared.outcomes[Path(source_path)]
    dtypes = {value.name: value.dtype for node in all_nodes(model) for value in node.inputs if value is not None}
    compiled = load_foreign(output_file)
    report = carry_tags(model, compiled)
    restore_description(compiled, model)
    contexts = context_nodes(compiled)
    # One node may replace the whole graph, more than the transfer of tags searches.
    absorbed = _write_absorbed_modules(contexts, model)
    parts = tuple(_describe_part(node, source_path) for node in contexts)
    if not is_processor and not parts:
        raise CompileError(
            f"{chosen.provider.name} compiled none of the {sum(1 for _ in all_nodes(model))} nodes",
            hint="winml inspect shows the operators and types of the file; some devices support float16 or integers "
            "only.",
        )
    outside: tuple[OutsideNode, ...] = ()
    modules: tuple[ModulePlacement, ...] = ()
    if not is_processor:
        outside_nodes = (node for node in all_nodes(compiled) if not is_context(node))
        outside = tuple(
            _describe_outside_node(node, outcome.reasons.get(node.name or "", ""), dtypes) for node in outside_nodes
        )
        trace = _trace_nodes(model, absorbed, outcome)
        compiled.metadata_props[COMPILE_TRACE_KEY] = trace.as_metadata()
        tags = filter(None, map(read_tag, all_nodes(model)))
        modules = trace.place_modules({tag.tag: tag.module for tag in tags})
    record = {**_metadata_record(compiled, options, chosen), **({"source": source} if source else {})}
    if shared is not None:
        record["shares_weights"] = True
    compiled.metadata_props[COMPILE_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return CompileResult(compiled, True, report.notes, measure_coverage(compiled), parts, outside, modules, record)


def save_for_provider(model: ir.Model, path: Path) -> None:
    """Write a model as the input of a provider, with its data beside it."""
    save_model(model, path, unfinished_data_path(path).name)


def _trace_nodes(model: ir.Model, absorbed: Collection[ir.Node], outcome: CompiledByProvider) -> CompilationTrace:
    """Return the trace of a compilation.

    Args:
        model: The model before compilation.
        absorbed: Its nodes in compiled parts.
        outcome: Reasons and operators of the provider.
    """
    nodes = []
    for node in all_nodes(model):
        tag, name = read_tag(node), node.name or next((value.name for value in node.outputs if value.name), "")
        reason = None if node in absorbed else outcome.reasons.get(name, "")
        nodes.append(CompiledNode(name, node.op_type, "" if tag is None else tag.tag, reason))
    return CompilationTrace(tuple(nodes), outcome.operators)


def write_contexts(
    files: Mapping[Path, Path], chosen: ChosenProvider, *, embed: bool
) -> dict[Path, CompiledByProvider]:
    """Write the ``EPContext`` models of files: a node for each compiled part, and the remaining nodes.

    Return file → result.

    The provider runs in a separate process, because its log is searched for reasons, and it may end its process.

    Args:
        files: ONNX file, with its data beside it → file to write. Compiled contexts go to files beside it, unless they
            are embedded; several files share one context.
        chosen: The provider and its options.
        embed: Store the compiled contexts inside the model.

    Raises:
        UsageError: the provider refuses its options.
        StageError: the provider ended its process, or did not finish in time.
        CompileError: the provider fails, or ONNX Runtime cannot load the graph; the message states the reason.
    """
    outcomes = compile_to_files(files, chosen, embed=embed)
    for outcome in outcomes.values():
        if outcome.refused_options:
            raise UsageError(
                f"{opt.ep_options}: {outcome.refused_options}",
                hint="Omit unsupported options; the documentation of the provider lists them.",
            )
        if outcome.problem:
            raise CompileError(
                f"{chosen.provider.name} cannot compile the graph: {outcome.problem}",
                hint=missing_option_hint(chosen, outcome.problem)
                or "winml inspect shows the operators and types of the file. Some devices support float16 or integers "
                f"only (see winml quantize); others need different {opt.ep_options}.",
            )
    return outcomes


def _write_absorbed_modules(contexts: Iterable[ir.Node], original: ir.Model) -> set[ir.Node]:
    """Set the tag and the module list of ``EPContext`` nodes, in place; return the replaced nodes.

    The tag is the deepest common module of the replaced nodes. Providers keep the names of the values at the borders of
    a part, so the replaced nodes are known exactly. ``EPContext`` nodes of a part without tags are not changed.

    Args:
        contexts: The ``EPContext`` nodes.
        original: The model before compilation.
    """
    producers = {value.name: node for node in original.graph for value in node.outputs}
    module_of = {tag.tag: tag.module for node in all_nodes(original) if (tag := read_tag(node)) is not None}
    root = min(module_of, key=len, default="")
    absorbed: set[ir.Node] = set()
    for context in contexts:
        nodes = [inner for node in _find_absorbed_nodes(context, producers) for inner in _walk_subgraphs(node)]
        absorbed.update(nodes)
        tags = [tag for node in nodes if (tag := read_tag(node)) is not None]
        if not tags:
            continue
        common_tag = common_ancestor(tag.tag for tag in tags)
        common_tag = common_tag if common_tag in module_of else root
        write_tag(context, NodeTag(common_tag, module_of[common_tag], "merged"))
        modules = sorted({tag.module for tag in tags})
        context.metadata_props[MODULES_KEY] = json.dumps(modules, ensure_ascii=False)
    return absorbed


def _find_absorbed_nodes(context: ir.Node, producers: dict[str | None, ir.Node]) -> list[ir.Node]:
    """Return the original nodes between the inputs and the outputs of an ``EPContext`` node."""
    input_names = {value.name for value in context.inputs if value is not None}
    nodes: dict[ir.Node, None] = {}
    queue = [value.name for value in context.outputs]
    while queue:
        node = producers.get(queue.pop())
        if node is not None and node not in nodes:
            nodes[node] = None
            queue += [value.name for value in node.inputs if value is not None and value.name not in input_names]
    return list(nodes)


def _walk_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    """Yield a node, then all nodes of its subgraphs."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def refuse_open_sizes(model: ir.Model, chosen: ChosenProvider, source_path: str) -> None:
    """Refuse dynamic dimensions if the provider requires fixed sizes.

    Raises:
        UsageError: the hint has the command that fixes the sizes.
    """
    open_axes = open_dimensions(model.graph)
    if open_axes and not chosen.provider.takes_dynamic:
        name, axes = next(iter(open_axes.items()))
        sums = stated_sums(model.metadata_props)
        command = fixing_command(source_path, [dimension for dimension in open_axes if dimension not in sums])
        raise UsageError(
            f"{chosen.provider.name} requires fixed sizes, but {name} is dynamic in {', '.join(axes)}",
            hint=f"Fix the sizes first: {command}; then compile fixed.onnx.",
        )


def _describe_part(node: ir.Node, source_path: str) -> CompiledPart:
    """Return the record of an ``EPContext`` node.

    Raises:
        InputError: the module list in the node's metadata is damaged.
    """
    tag = read_tag(node)
    try:
        modules = listed_modules(node) or ([] if tag is None else [tag.module])
    except ValueError as error:
        raise InputError(f"{source_path}: {error} (node {node.name})", hint="Create the file again.") from error
    return CompiledPart(node.name or "", tuple(modules), "" if tag is None else tag.tag)


def _describe_outside_node(node: ir.Node, reason: str, types: Mapping[str | None, ir.DataType | None]) -> OutsideNode:
    """Return the record of a node outside the compiled parts; ``types`` maps value names to element types."""
    tag = read_tag(node)
    tensor = next((value for value in node.inputs if value is not None), None)
    dtype = None if tensor is None else tensor.dtype or types.get(tensor.name)
    is_weight = tensor is not None and (tensor.is_initializer() or tensor.const_value is not None)
    is_tensor = tensor is not None and tensor.shape is not None and len(tensor.shape) > 0
    return OutsideNode(
        node.name or "",
        node.op_type,
        "" if tag is None else tag.tag,
        "" if dtype is None else str(dtype.numpy()),
        reason,
        expands_weight=node.op_type == "DequantizeLinear" and is_weight and is_tensor,
    )


def _metadata_record(model: ir.Model, options: CompileOptions, chosen: ChosenProvider) -> dict[str, object]:
    """Return the metadata record: provider, versions, device and options."""
    record: dict[str, object] = {
        "provider": chosen.provider.name,
        "provider_version": provider_version(chosen.provider),
        "onnxruntime": onnxruntime_version(),
        "device": chosen.device,
        "options": dict(chosen.options),
        "embedded": bool(options.embed),
    }
    if any(node.domain == _LAYOUT_DOMAIN for node in all_nodes(model)):
        record["processor"] = instruction_sets()
    if chosen.stand_in:
        record["simulated_on"] = chosen.stand_in
    return record
