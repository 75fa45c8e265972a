"""Compiles a graph for one execution provider.

For a provider that compiles, the parts it takes become ``EPContext`` nodes. For the CPU provider, the graph is written
as ONNX Runtime runs it. Either way every node keeps its module, and an ``EPContext`` node those of all it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common

from winml.modelkit.compile.absorbed_modules import write_absorbed_modules
from winml.modelkit.compile.context_engine import compile_context
from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.errors import CompileError, UsageError
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.graph.contexts import context_nodes, is_context, refuse_compiled
from winml.modelkit.graph.files.foreign_reading import load_foreign
from winml.modelkit.graph.foreign_metadata import restore_description
from winml.modelkit.graph.pinning import open_dimensions, stated_sums
from winml.modelkit.graph.stage import StageResult
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.hierarchy.coverage import all_nodes, measure_coverage
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.metadata_keys import COMPILE_KEY, MODULES_KEY
from winml.modelkit.runtime.default_sizes import fixing_command
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.offline_optimization import rewrite_file
from winml.modelkit.runtime.processor import instruction_sets
from winml.modelkit.runtime.provider_versions import provider_version
from winml.modelkit.runtime.sessions import onnxruntime_version

__all__ = ["UNNAMED_FILE", "CompileResult", "CompiledPart", "OutsideNode", "compile_graph"]

_SENT, _RETURNED = "sent.onnx", "returned.onnx"

LAYOUT_DOMAIN = "com.microsoft.nchwc"
"""Specified by ONNX Runtime: its operators for a layout whose block has the width of the processor's registers."""


@dataclass(frozen=True)
class CompiledPart:
    """One node that stands for what a provider compiled."""

    name: str
    modules: tuple[str, ...]
    """Paths of the modules whose nodes it absorbed."""
    tag: str
    """The tag of the deepest module that contains them; empty where the source has no tags."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"name": self.name, "tag": self.tag, "modules": list(self.modules)}


@dataclass(frozen=True)
class OutsideNode:
    """A node that the provider left to ONNX Runtime's CPU provider."""

    name: str
    operator: str
    tag: str

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"name": self.name, "operator": self.operator, "tag": self.tag}


@dataclass(frozen=True)
class CompileResult(StageResult):
    """What came of compiling."""

    parts: tuple[CompiledPart, ...]
    """Empty for the CPU provider, whose graph stays a graph."""
    outside: tuple[OutsideNode, ...]
    """Beside compiled parts, the nodes that stayed; empty for the CPU provider."""
    record: Mapping[str, Any]
    """What the file says of it (``winml.compile``)."""


UNNAMED_FILE = "MODEL.onnx"
"""What messages call the file of the graph, whose path is not known here."""


def compile_graph(
    model: ir.Model, options: CompileOptions, chosen: ChosenProvider, folder: Path, *, source: str = ""
) -> CompileResult:
    """Return the model compiled for a provider; the given model is not changed.

    Args:
        model: The model, in its plain form.
        options: What it is compiled for.
        chosen: The provider and its options, as ``options`` say.
        folder: Folder for files that the result refers to until it is written; has to stay until then.
        source: What the result calls the file that it is made from; empty: it does not say.

    Raises:
        UsageError: dimensions are open and the provider needs fixed sizes, or it does not take its options.
        InputError: the model is compiled already.
        CompileError: the provider fails or compiles nothing, or ONNX Runtime cannot load the graph.
    """
    refuse_compiled(model)
    _refuse_open_sizes(model, chosen)
    sent, written = folder / _SENT, folder / _RETURNED
    ir.save(model, sent, external_data=unfinished_data_path(sent).name)
    is_processor = not chosen.provider.compiles
    if is_processor:
        rewrite_file(sent, written, disabled=(), with_layouts=True)
    else:
        compile_context(sent, written, chosen, embed=bool(options.embed))
    compiled = load_foreign(written)
    carried = carry_tags(model, compiled)
    restore_description(compiled, model)
    contexts = context_nodes(compiled)
    # What one node absorbed may be the whole graph: more than carrying looks through.
    write_absorbed_modules(contexts, model)
    parts = tuple(map(_compiled_part, contexts))
    if not is_processor and not parts:
        raise CompileError(
            f"{chosen.provider.name} compiled none of the {sum(1 for _ in all_nodes(model))} nodes",
            hint="winml inspect shows the operators and types of the file; some devices take float16 or integers only.",
        )
    outside = () if is_processor else tuple(map(_outside_node, _nodes_outside(compiled)))
    record = {**_record(compiled, options, chosen), **({"source": source} if source else {})}
    compiled.metadata_props[COMPILE_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return CompileResult(compiled, True, carried.notes, measure_coverage(compiled), parts, outside, record)


def _refuse_open_sizes(model: ir.Model, chosen: ChosenProvider) -> None:
    places = open_dimensions(model.graph)
    if places and not chosen.provider.takes_dynamic:
        name, where = next(iter(places.items()))
        raise UsageError(
            f"{chosen.provider.name} needs fixed sizes, and {name} is open in {', '.join(where)}",
            hint=f"Fix the sizes first: {fixing_command(UNNAMED_FILE, _independent(model, places))}; then compile "
            "fixed.onnx.",
        )


def _independent(model: ir.Model, names: Iterable[str]) -> list[str]:
    """Return the names of sizes that are no sums of others."""
    sums = stated_sums(model)
    return [name for name in names if name not in sums]


def _compiled_part(node: ir.Node) -> CompiledPart:
    tag = read_tag(node)
    listed = node.metadata_props.get(MODULES_KEY)
    modules = json.loads(listed) if listed else [] if tag is None else [tag.module]
    return CompiledPart(node.name or "", tuple(modules), "" if tag is None else tag.tag)


def _nodes_outside(model: ir.Model) -> list[ir.Node]:
    return [node for node in all_nodes(model) if not is_context(node)]


def _outside_node(node: ir.Node) -> OutsideNode:
    tag = read_tag(node)
    return OutsideNode(node.name or "", node.op_type, "" if tag is None else tag.tag)


def _record(model: ir.Model, options: CompileOptions, chosen: ChosenProvider) -> dict[str, Any]:
    """Return what the file says of how it was compiled, and where it may be run."""
    record: dict[str, Any] = {
        "provider": chosen.provider.name,
        "provider_version": provider_version(chosen.provider),
        "onnxruntime": onnxruntime_version(),
        "device": chosen.device,
        "options": dict(chosen.options),
        "embedded": bool(options.embed),
    }
    if any(node.domain == LAYOUT_DOMAIN for node in all_nodes(model)):
        record["processor"] = instruction_sets()
    if chosen.stand_in:
        record["simulated_on"] = chosen.stand_in
    return record
