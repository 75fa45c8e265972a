"""Renders an export: console, Markdown, and the ``<stem>_htp_metadata.json`` sidecar."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from winml.modelkit.graph.bundle import PartDescription
from winml.modelkit.graph.files.companions import Companions
from winml.modelkit.graph.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules, shown_rows
from winml.modelkit.report.terminal import label, print_rows
from winml.modelkit.results.export_result import ExportedPart, ExportResult, NodeRecord
from winml.modelkit.results.words import coverage_words, verification_words
from winml.modelkit.words import count_words, json_printable, printable, shape_words, size_words

__all__ = [
    "SIDECAR_VERSION",
    "DescribedFile",
    "adapted_sidecar_json",
    "code_span",
    "dimension_words",
    "export_report",
    "input_words",
    "markdown_text",
    "output_words",
    "print_export",
    "print_tree",
    "sidecar_json",
    "sidecar_schema",
    "table_lines",
]


# --- Describes an open dimension in words: its bounds, the traced size and the checked sizes.


def dimension_words(dimension: DynamicDimension, checked: Sequence[int]) -> str:
    """Return the bounds of an open dimension, the size of the trace, and the sizes the file was checked at.

    >>> dimension_words(DynamicDimension(name="sequence", max=64, example=48), (1, 55))
    'sequence 1 to 64 (traced 48; checked 1, 55)'
    """
    bounds = f"{dimension.min} to {dimension.max}" if dimension.max is not None else f"from {dimension.min}"
    checked_words = f"; checked {', '.join(map(str, checked))}" if checked else "; not checked"
    return f"{dimension.name} {bounds} (traced {dimension.example}{checked_words})"


# --- Says in words which tensors a graph takes and returns; those of a cache together, however many there are.


_MOST_SINGLE = 2
"""Tensors of a cache that are still told one by one."""


def input_words(inputs: Sequence[InputTensorSpec]) -> str:
    """Return the inputs of a graph: ``input_ids int64[batch, sequence], …``."""
    return _words(inputs, {spec.name for spec in inputs if spec.cache is not None})


def output_words(outputs: Sequence[OutputTensorSpec], description: PartDescription | None) -> str:
    """Return the outputs of a graph; what its description says that it feeds to itself is the cache."""
    own_feeds = [feed for feed in description.feeds if feed.part == description.name] if description else []
    return _words(outputs, {feed.output for feed in own_feeds})


def _words(specs: Sequence[InputTensorSpec] | Sequence[OutputTensorSpec], together: Collection[str]) -> str:
    single = [spec for spec in specs if spec.name not in together or len(together) <= _MOST_SINGLE]
    rest = [spec for spec in specs if spec not in single]
    words = [f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in single]
    if rest:
        shapes = list(dict.fromkeys(shape_words(spec.dtype, spec.shape) for spec in rest))
        others = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
        words.append(f"{rest[0].name} to {rest[-1].name} ({len(rest)} of the cache) {shapes[0]}{others}")
    return ", ".join(words)


# --- Prints an export in a terminal: its summary and its module tree.
#
# Renders with rich.


def print_tree(result: ExportResult, console: Console, limits: TreeLimits | None = None) -> None:
    """Print the module tree of each part with the nodes and parameters of each module.

    Args:
        result: The export.
        console: Where to print.
        limits: How much of the tree is shown; None shows all levels, and equal modules once.
    """
    for part in result.parts:
        if part.description is not None and part.description.is_one_of_several:
            console.print(label((part.name, "bold")))
        _print_part_tree(part, console, limits or TreeLimits())


def _print_part_tree(part: ExportedPart, console: Console, limits: TreeLimits) -> None:
    size_of = part.module_sizes()

    def node_label(shown: ShownModule[ModuleNode]) -> Text:
        segment = shown.name(lambda node: node.tag.rpartition("/")[2])
        path = f" {shown.name(lambda node: node.path)}" if shown.item.path else ""
        size = size_of(shown.item).words
        return label((segment, "bold"), (path, "dim"), f"{shown.count_words} · {size}")

    def add_children(branch: Tree, shown: ShownModule[ModuleNode]) -> None:
        for child in shown.children:
            add_children(branch.add(node_label(child)), child)

    (root,) = shown_modules(
        [part.tree.root],
        lambda node: part.tree.children(node.path),
        lambda node: (node.class_name, size_of(node)),
        limits,
    )
    tree = Tree(node_label(root), guide_style="dim")
    add_children(tree, root)
    console.print(tree)


def print_export(result: ExportResult, console: Console) -> None:
    """Print what was exported: the model, its inputs and outputs, coverage, verification and files, part by part."""
    root = result.parts[0].tree.root
    rows = [
        ("model", f"{result.model.class_name} · {count_words(root.parameter_count)} parameters"),
        *([("task", f"{result.model.task} ({result.model.task_rule})")] if result.model.task else []),
    ]
    for part in result.parts:
        if part.description is not None and part.description.is_one_of_several:
            rows.append(("part", part.name))
        rows += _part_rows(part)
    rows += [("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files]
    rows += [("beside it", _companion_words(result.companions))] if result.companions.names else []
    rows += [("note", note) for note in result.notes]
    print_rows(rows, console)


def _companion_words(companions: Companions) -> str:
    return f"{', '.join(companions.names)} ({size_words(companions.size_bytes)})"


def _part_rows(part: ExportedPart) -> list[tuple[str, str]]:
    """Return what is told of one graph: a word, and what it says."""
    coverage, checked = part.coverage, part.checked_sizes
    open_dimensions = ", ".join(dimension_words(item, checked.get(item.name, ())) for item in part.dimensions)
    sources = ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items()))
    modules = f"{len(part.tree)} modules traced of {part.tree.registered} registered"
    return [
        ("inputs", input_words(part.inputs)),
        ("outputs", output_words(part.outputs, part.description)),
        *([("open", open_dimensions)] if part.dimensions else []),
        ("exporter", part.exporter_words),
        ("hierarchy", f"{modules} · {_coverage_words(coverage)}"),
        *([("sources", sources)] if coverage.tagged else []),
        *([("functions", part.functions.words)] if part.functions else []),
        ("verified", verification_words(part.verification)),
    ]


def _coverage_words(coverage: Coverage) -> str:
    if coverage.nodes and not coverage.tagged:
        return "not written (--no-hierarchy)"
    return coverage_words(coverage)


# --- Renders an exported graph as a document: the ``<stem>_htp_export_report.md`` of FORMATS.
#
# Summary, steps, inputs and outputs, module tree with node counts, mapping statistics, node table by module. Reads the
# result only.


_MEANINGFUL = re.compile(r"[\\`*\[\]|#~<>&]|(?<!\w)_|_(?!\w)")
"""What Markdown reads as more than itself; an underscore only at the edge of a word."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def export_report(result: ExportResult, part: ExportedPart) -> str:
    """Return the report of one part of an export as Markdown text."""
    part_sections = (_step_lines, _tensor_lines, _tree_lines, _statistics_lines, _node_lines)
    sections = (_summary_lines(result, part), *(section(part) for section in part_sections))
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _summary_lines(result: ExportResult, part: ExportedPart) -> Iterator[str]:
    is_one_of_several = part.description is not None and part.description.is_one_of_several
    part_words = f", part {part.name}" if is_one_of_several else ""
    yield f"# Export of {markdown_text(result.model.name_or_path + part_words)}"
    yield ""
    yield from table_lines(
        ("", "value"),
        [
            ("Class", result.model.class_name),
            ("Task", f"{result.model.task} ({result.model.task_rule})" if result.model.task else "none"),
            ("Parameters", count_words(part.tree.root.parameter_count)),
            ("Exporter", part.exporter_words),
            ("Modules", f"{len(part.tree)} traced of {part.tree.registered} registered"),
            ("Coverage", coverage_words(part.coverage)),
            *(("Open", dimension_words(item, part.checked_sizes.get(item.name, ()))) for item in part.dimensions),
            *((("Functions", part.functions.words),) if part.functions else ()),
            ("Verification", verification_words(part.verification)),
            ("Started", result.started.isoformat(timespec="seconds")),
            ("Tool", f"winml-modelkit {result.tool_version}"),
            *((("SHA-256", part.model_sha256),) if part.model_sha256 else ()),
            *(("File", f"{file.path.name} ({size_words(file.size_bytes)})") for file in part.files),
            *(("Note", note) for note in (*result.model_notes, *part.notes)),
        ],
    )


def _step_lines(part: ExportedPart) -> Iterator[str]:
    yield "## Steps"
    yield ""
    yield from table_lines(
        ("#", "step", "seconds", "what it did"),
        [(str(step.number), step.name, f"{step.seconds:.2f}", step.summary) for step in part.steps],
    )


def _tensor_lines(part: ExportedPart) -> Iterator[str]:
    yield "## Inputs and outputs"
    yield ""
    yield from table_lines(
        ("", "name", "type"),
        [
            *(("input", spec.name, shape_words(spec.dtype, spec.shape)) for spec in part.inputs),
            *(("output", spec.name, shape_words(spec.dtype, spec.shape)) for spec in part.outputs),
        ],
    )


def _tree_lines(part: ExportedPart) -> Iterator[str]:
    size_of = part.module_sizes()
    shown = shown_modules(
        [part.tree.root],
        lambda node: part.tree.children(node.path),
        lambda node: (node.class_name, size_of(node)),
        TreeLimits(),
    )

    def line(module: ShownModule[ModuleNode], level: int) -> str:
        segment = module.name(lambda node: node.tag.rpartition("/")[2])
        names = filter(None, (segment, module.name(lambda node: node.path)))
        return printable(f"{'  ' * level}{'  '.join(names)} {module.count_words} · {size_of(module.item).words}")

    yield "## Modules"
    yield ""
    tree = [line(module, level) for module, level in shown_rows(shown)]
    fence = _longer_than_any("`", "\n".join(tree), least=3)
    yield f"{fence}text"
    yield from tree
    yield fence


def _statistics_lines(part: ExportedPart) -> Iterator[str]:
    yield "## How the tags were won"
    yield ""
    yield from table_lines(
        ("source", "nodes", "share"),
        [
            (source, str(count), f"{100 * count / part.coverage.nodes:.1f} %")
            for source, count in sorted(part.coverage.sources.items())
        ],
    )


def _node_lines(part: ExportedPart) -> Iterator[str]:
    by_tag: dict[str, list[NodeRecord]] = defaultdict(list)
    for node in part.nodes:
        by_tag[node.tag].append(node)
    yield "## Nodes by module"
    for module in part.tree:
        if module.tag not in by_tag:
            continue
        yield ""
        yield f"### {code_span(module.tag)}"
        yield ""
        yield from table_lines(
            ("node", "operator", "source"),
            [(node.name, node.op_type, node.source or "") for node in by_tag[module.tag]],
            code_columns={0},
        )


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, code_columns: Collection[int] = ()
) -> Iterator[str]:
    """Yield the lines of a table of foreign texts; those in ``code_columns`` are shown as code."""
    yield _row_text(header)
    yield _row_text(["---"] * len(header))
    for row in rows:
        # A table ends a cell at a pipe, in code as well.
        yield _row_text(
            code_span(cell).replace("|", "\\|") if index in code_columns else markdown_text(cell)
            for index, cell in enumerate(row)
        )


def _row_text(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_text(text: str) -> str:
    r"""Return a foreign text as Markdown that shows it as it is, on one line.

    >>> markdown_text("<b>layer_0|__init__</b>")
    '&lt;b&gt;layer_0\\|\\__init_\\_&lt;/b&gt;'
    """
    return _MEANINGFUL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(text))


def code_span(text: str) -> str:
    """Return a foreign text as a span of code, which shows it as it is, on one line.

    >>> code_span("a`b")
    '`` a`b ``'
    """
    text = printable(text)
    fence = _longer_than_any("`", text, least=1)
    space = " " if "`" in text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _longer_than_any(sign: str, text: str, *, least: int) -> str:
    """Return as many signs that the text holds no run of so many."""
    longest = max((len(run) for run in re.findall(f"{re.escape(sign)}+", text)), default=0)
    return sign * max(least, longest + 1)


# --- Renders an exported graph for programs: the ``<stem>_htp_metadata.json`` of FORMATS.
#
# Its JSON Schema ships beside this file. Reads the result only.


SIDECAR_VERSION = 1
"""``schema_version``: raised when a key changes its name or meaning. Older sidecars have none and are else as 1."""


def sidecar_json(result: ExportResult, part: ExportedPart) -> str:
    """Return the sidecar of one part of an export as JSON text."""
    return json_printable(json.dumps(_sidecar_record(result, part), indent=2, ensure_ascii=False)) + "\n"


@dataclass(frozen=True)
class DescribedFile:
    """A file that a later stage made of an exported one."""

    sha256: str
    """Of the model file."""
    files: tuple[tuple[str, int], ...]
    """Name and size in bytes, the model first."""
    nodes: Mapping[str, str]
    """Node → tag."""
    root_nodes: tuple[str, ...]
    """Nodes whose tag is the root's for want of another."""
    coverage: Coverage


def adapted_sidecar_json(sidecar: Mapping[str, Any], file: DescribedFile) -> str:
    """Return the sidecar of an export as JSON text, with what it says of the file as it is for another."""
    names = ", ".join(name for name, _ in file.files[:1])
    note = f"Nodes, coverage and files are those of {names}; all else was written down by the export."
    own = Counter(file.nodes.values())
    record = {
        **sidecar,
        "model_sha256": file.sha256,
        **{key: _with_node_counts(module, own) for key, module in sidecar.items() if key == "modules"},
        "nodes": dict(file.nodes),
        "statistics": {**sidecar["statistics"], **_coverage_record(file.coverage), "root_nodes": list(file.root_nodes)},
        "outputs": {**sidecar["outputs"], "files": [{"name": name, "size_bytes": size} for name, size in file.files]},
        "notes": [*sidecar["notes"], note],
    }
    return json_printable(json.dumps(record, indent=2, ensure_ascii=False)) + "\n"


def sidecar_schema() -> dict[str, Any]:
    """Return the JSON Schema every sidecar satisfies."""
    text = resources.files(__package__).joinpath("htp_metadata.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _sidecar_record(result: ExportResult, part: ExportedPart) -> dict[str, Any]:
    return {
        "schema_version": SIDECAR_VERSION,
        "model_sha256": part.model_sha256,
        "export_context": {
            "timestamp": result.started.isoformat(timespec="seconds"),
            "tool_version": result.tool_version,
            "exporter": part.exporter,
            "exporter_reason": part.exporter_reason,
            "strategy": "htp",
            "opset_requested": part.opset_requested,
            "opset_produced": part.opset_produced,
            "seconds": round(part.seconds, 3),
        },
        "model": {
            "name_or_path": result.model.name_or_path,
            "class_name": result.model.class_name,
            "framework": "pytorch",
            "total_modules": part.tree.registered,
            "total_parameters": part.tree.root.parameter_count,
        },
        **({"part": part.description.as_record()} if part.description is not None else {}),
        "tracing": {
            "modules_traced": len(part.tree),
            "execution_steps": part.tree.execution_steps,
            "task": result.model.task,
            "inputs": [spec.as_record() for spec in part.inputs],
        },
        "modules": _with_node_counts(_module_record(part, part.tree.root), Counter(node.tag for node in part.nodes)),
        "nodes": {node.name: node.tag for node in part.nodes},
        "statistics": _statistics_record(part),
        "verification": part.verification.as_record() if part.verification else None,
        "outputs": {
            "files": [{"name": file.path.name, "size_bytes": file.size_bytes} for file in part.files],
            "companions": list(result.companions.names),
            "companions_sha256": dict(result.companions.sha256),
            "inputs": [spec.as_record() for spec in part.inputs],
            "outputs": [spec.as_record() for spec in part.outputs],
        },
        "notes": [*result.model_notes, *part.notes],
    }


def _module_record(part: ExportedPart, node: ModuleNode) -> dict[str, Any]:
    return {
        "class_name": node.class_name,
        "tag": node.tag,
        "path": node.path,
        "execution_order": node.execution_order,
        "calls": node.calls,
        "depth": node.depth,
        "module_type": "torch.nn" if node.is_torch_nn else "custom",
        "is_leaf": node.is_leaf,
        "parameters": {
            "total": node.parameter_count,
            "trainable": node.trainable_count,
            "shapes": {name: list(shape) for name, shape in node.parameter_shapes.items()},
        },
        "children": [_module_record(part, child) for child in part.tree.children(node.path)],
    }


def _with_node_counts(module: Mapping[str, Any], own: Mapping[str, int]) -> dict[str, Any]:
    """Return the record of a module and those inside it with the nodes of each, counted by tag."""
    children = [_with_node_counts(child, own) for child in module["children"]]
    count = own.get(module["tag"], 0)
    nodes = {"total": count + sum(child["nodes"]["total"] for child in children), "own": count}
    return {**module, "nodes": nodes, "children": children}


def _statistics_record(part: ExportedPart) -> dict[str, Any]:
    return {
        "steps": [{"name": step.name, "seconds": round(step.seconds, 4)} for step in part.steps],
        **_coverage_record(part.coverage),
        # FORMATS: the nodes that ran in the root's own forward, so that "root" can be checked.
        "root_nodes": [node.name for node in part.nodes if node.source == "root"],
    }


def _coverage_record(coverage: Coverage) -> dict[str, Any]:
    return {
        "node_count": coverage.nodes,
        "tagged_count": coverage.tagged,
        "coverage_percent": round(coverage.percent, 4),
        "at_root_count": coverage.at_root,
        "at_root_percent": round(coverage.at_root_percent, 4),
        "sources": {
            source: {"count": count, "percent": round(100 * count / coverage.nodes, 4)}
            for source, count in coverage.sources.items()
        },
    }
