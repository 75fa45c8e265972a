"""Renders an exported graph as a document: the ``<stem>_htp_export_report.md`` of FORMATS.

Summary, steps, inputs and outputs, module tree with node counts, mapping statistics, node table by module. Reads the
result only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.dimension_words import dimension_words
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules, shown_rows
from winml.modelkit.results.export_result import ExportedPart, ExportResult, NodeRecord
from winml.modelkit.results.words import coverage_words, verification_words
from winml.modelkit.words import count_words, printable, shape_words, size_words

__all__ = ["code_span", "export_report", "markdown_text", "table_lines"]

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
