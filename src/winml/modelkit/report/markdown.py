"""How is an export told in a document? The ``<stem>_htp_export_report.md`` of FORMATS.

Summary, steps, inputs and outputs, module tree with node counts, mapping statistics, node table by module. Reads the
result only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.dimension_words import dimension_words
from winml.modelkit.results.export_result import ExportResult, NodeRecord
from winml.modelkit.results.words import verification_words
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = ["export_report"]


def export_report(result: ExportResult) -> str:
    """Return the report of an export as Markdown text."""
    sections = (_summary, _steps, _tensors, _tree, _statistics, _nodes)
    return "\n\n".join("\n".join(section(result)) for section in sections) + "\n"


def _summary(result: ExportResult) -> Iterator[str]:
    yield f"# Export of {result.model.name_or_path}"
    yield ""
    yield from _table(
        ("", "value"),
        [
            ("Class", result.model.class_name),
            ("Task", f"{result.model.task} ({result.model.task_rule})" if result.model.task else "none"),
            ("Parameters", count_words(result.tree.root.parameter_count)),
            ("Exporter", result.exporter_words),
            ("Modules", f"{len(result.tree)} traced of {result.tree.registered} registered"),
            (
                "Coverage",
                f"{result.coverage.tagged} of {result.coverage.nodes} nodes ({result.coverage.percent:.2f} %)",
            ),
            *(("Open", dimension_words(item, result.checked_sizes.get(item.name, ()))) for item in result.dimensions),
            ("Verification", verification_words(result.verification)),
            ("Started", result.started.isoformat(timespec="seconds")),
            ("Tool", f"winml-modelkit {result.tool_version}"),
            *(("File", f"{file.path.name} ({size_words(file.size_bytes)})") for file in result.files),
            *(("Note", note) for note in result.notes),
        ],
    )


def _steps(result: ExportResult) -> Iterator[str]:
    yield "## Steps"
    yield ""
    yield from _table(
        ("#", "step", "seconds", "what it did"),
        [(str(step.number), step.name, f"{step.seconds:.2f}", step.summary) for step in result.steps],
    )


def _tensors(result: ExportResult) -> Iterator[str]:
    yield "## Inputs and outputs"
    yield ""
    yield from _table(
        ("", "name", "type"),
        [
            *(("input", spec.name, shape_words(spec.dtype, spec.shape)) for spec in result.inputs),
            *(("output", spec.name, shape_words(spec.dtype, spec.shape)) for spec in result.outputs),
        ],
    )


def _tree(result: ExportResult) -> Iterator[str]:
    counts = result.node_counts()

    def lines(node: ModuleNode, indent: str) -> Iterator[str]:
        yield f"{indent}{node.tag.rpartition('/')[2]}  {node.path}  ({counts.get(node.path, 0)} nodes)".replace(
            "    (", "  ("
        )
        for child in result.tree.children(node.path):
            yield from lines(child, indent + "  ")

    yield "## Modules"
    yield ""
    yield "```text"
    yield from lines(result.tree.root, "")
    yield "```"


def _statistics(result: ExportResult) -> Iterator[str]:
    yield "## How the tags were won"
    yield ""
    yield from _table(
        ("source", "nodes", "share"),
        [
            (source, str(count), f"{100 * count / result.coverage.nodes:.1f} %")
            for source, count in sorted(result.coverage.sources.items())
        ],
    )


def _nodes(result: ExportResult) -> Iterator[str]:
    by_tag: dict[str, list[NodeRecord]] = defaultdict(list)
    for node in result.nodes:
        by_tag[node.tag].append(node)
    yield "## Nodes by module"
    for module in result.tree:
        if module.tag not in by_tag:
            continue
        yield ""
        yield f"### `{module.tag}`"
        yield ""
        yield from _table(
            ("node", "operator", "source"),
            [(f"`{node.name}`", node.op_type, node.source or "") for node in by_tag[module.tag]],
        )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
