"""Renders an exported graph as a document: the ``<stem>_htp_export_report.md`` of FORMATS.

Summary, steps, inputs and outputs, module tree with node counts, mapping statistics, node table by module. Reads the
result only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.dimension_words import dimension_words
from winml.modelkit.results.export_result import ExportedPart, ExportResult, NodeRecord
from winml.modelkit.results.words import verification_words
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = ["export_report"]


def export_report(result: ExportResult, part: ExportedPart) -> str:
    """Return the report of one part of an export as Markdown text."""
    part_sections = (_step_lines, _tensor_lines, _tree_lines, _statistics_lines, _node_lines)
    sections = (_summary_lines(result, part), *(section(part) for section in part_sections))
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _summary_lines(result: ExportResult, part: ExportedPart) -> Iterator[str]:
    part_words = "" if part.description is None else f", part {part.name}"
    yield f"# Export of {result.model.name_or_path}{part_words}"
    yield ""
    yield from _table_lines(
        ("", "value"),
        [
            ("Class", result.model.class_name),
            ("Task", f"{result.model.task} ({result.model.task_rule})" if result.model.task else "none"),
            ("Parameters", count_words(part.tree.root.parameter_count)),
            ("Exporter", part.exporter_words),
            ("Modules", f"{len(part.tree)} traced of {part.tree.registered} registered"),
            (
                "Coverage",
                f"{part.coverage.tagged} of {part.coverage.nodes} nodes ({part.coverage.percent:.2f} %)",
            ),
            *(("Open", dimension_words(item, part.checked_sizes.get(item.name, ()))) for item in part.dimensions),
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
    yield from _table_lines(
        ("#", "step", "seconds", "what it did"),
        [(str(step.number), step.name, f"{step.seconds:.2f}", step.summary) for step in part.steps],
    )


def _tensor_lines(part: ExportedPart) -> Iterator[str]:
    yield "## Inputs and outputs"
    yield ""
    yield from _table_lines(
        ("", "name", "type"),
        [
            *(("input", spec.name, shape_words(spec.dtype, spec.shape)) for spec in part.inputs),
            *(("output", spec.name, shape_words(spec.dtype, spec.shape)) for spec in part.outputs),
        ],
    )


def _tree_lines(part: ExportedPart) -> Iterator[str]:
    counts = part.node_counts()

    def lines(node: ModuleNode, indent: str) -> Iterator[str]:
        yield f"{indent}{node.tag.rpartition('/')[2]}  {node.path}  ({counts.get(node.path, 0)} nodes)".replace(
            "    (", "  ("
        )
        for child in part.tree.children(node.path):
            yield from lines(child, indent + "  ")

    yield "## Modules"
    yield ""
    yield "```text"
    yield from lines(part.tree.root, "")
    yield "```"


def _statistics_lines(part: ExportedPart) -> Iterator[str]:
    yield "## How the tags were won"
    yield ""
    yield from _table_lines(
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
        yield f"### `{module.tag}`"
        yield ""
        yield from _table_lines(
            ("node", "operator", "source"),
            [(f"`{node.name}`", node.op_type, node.source or "") for node in by_tag[module.tag]],
        )


def _table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row_text(header)
    yield _row_text(["---"] * len(header))
    yield from map(_row_text, rows)


def _row_text(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
