"""Document of a report: fields, tables, trees and charts of typed values, rendered in a terminal, Markdown or HTML.

A subject is described once, as a :class:`Document`. Blocks of the longer output formats are marked with a
:class:`Detail`. Numbers are formatted here, so every format prints the same text. Renders nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Literal, TypeVar

from winml.modelkit.words import command_line, count_words, decibel_words, size_words, time_words

MISSING = "–"
"""Text of a number that was not measured."""
EARLIER = "earlier run"
"""Reference of a comparison with :attr:`Number.earlier`."""


class Detail(IntEnum):
    """Output formats that render a part of a document; each level includes the levels before it."""

    ALWAYS = 0
    VERBOSE = 1
    """Also in terminals with ``--verbose``."""
    PAGE = 2
    """Also on HTML pages and in Markdown files, where space is not limited."""


Kind = Literal[
    "text", "name", "count", "parameters", "bytes", "latency", "ms", "whole", "seconds", "share", "error", "cosine",
    "decibels", "score", "difference", "bits",
]  # fmt: skip
"""Type of the values of a column. A ``name`` is an identifier, such as the name of a node."""


def _format_count(value: float) -> str:
    """Format a count; a mean of counts may have decimals."""
    return str(int(value)) if value == int(value) else f"{value:g}"


_WRITTEN: Mapping[Kind, Callable[[float], str]] = {
    "count": _format_count,
    "parameters": lambda value: count_words(int(value)),
    "bytes": lambda value: size_words(int(value)),
    "latency": time_words,
    "ms": "{:.3f}".format,
    "whole": "{:.0f}".format,
    "seconds": "{:.1f}".format,
    "share": "{:.1%}".format,
    "error": "{:.1e}".format,
    "cosine": "{:.6f}".format,
    "decibels": decibel_words,
    "score": "{:.4f}".format,
    "difference": "{:+.4f}".format,
    "bits": "{:.3g}".format,
}
"""Kind → format of its numbers. Shares are from 0 to 1, times in milliseconds except for ``seconds``."""


@dataclass(frozen=True)
class Number:
    """A number with a text or an earlier value."""

    value: float | None
    """Sort key on a page."""
    words: str = ""
    """Formatted value; empty: formatted by the kind of the column."""
    earlier: float | None = None
    """The same number of an earlier run, to compare with on a page."""
    share: float | None = None
    """Length of the bar behind the number on a page, 0 to 1; None: no bar, or that of a share."""


@dataclass(frozen=True)
class Nested:
    """The name of a module in a tree."""

    name: str
    """Name relative to the parent, indented by level: displayed in a terminal."""
    path: str
    """Full path: displayed on a page and in Markdown, where rows can be sorted."""
    level: int = 0


@dataclass(frozen=True)
class Shortened:
    """A long text, and its short text for a terminal without ``--verbose``."""

    short: str
    full: str


@dataclass(frozen=True)
class Linked:
    """A text, and a link to a file beside the page."""

    words: str
    label: str
    target: str
    """Path of the file, relative to the page."""


Cell = str | float | Number | Nested | Shortened | Linked | None


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    kind: Kind = "text"
    detail: Detail = Detail.ALWAYS
    key: str = ""
    """Name of the value in options and JSON; a page shows it as the tooltip of the heading."""
    is_dim: bool = False
    """True if a terminal prints the column dimmed."""
    tones: Mapping[str, Literal["good", "bad"]] = field(default_factory=dict)
    """Value → good or bad. A page can filter the rows by these values."""

    @property
    def is_number(self) -> bool:
        """True if the column is aligned to the right, never folded, and sorted by value."""
        return self.kind not in ("text", "name")

    def words(self, cell: Cell) -> str:
        """Format a cell of this column."""
        match cell:
            case str():
                return cell
            case Nested():
                return cell.path
            case Shortened():
                return cell.full
            case Linked():
                return cell.words
            case Number() if cell.words:
                return cell.words
            case Number():
                return self.words(cell.value)
            case None:
                return MISSING if self.is_number else ""
            case _ if not math.isfinite(cell):
                return {math.inf: "∞", -math.inf: "-∞"}.get(cell, MISSING)
            case _:
                return _WRITTEN.get(self.kind, _format_count)(cell)


def columns(*columns: str | tuple[str, Kind] | Column) -> list[Column]:
    """Make columns; a name, or a name and a kind, is enough for a plain column.

    >>> [column.kind for column in columns("module", ("nodes", "count"))]
    ['text', 'count']
    """
    return [
        column if isinstance(column, Column) else Column(column) if isinstance(column, str) else Column(*column)
        for column in columns
    ]


Field = tuple[str, str | Shortened | None] | tuple[str, str | Shortened | None, Detail]
"""Label, value, and the detail level if the field is not always rendered. A field with value None is not rendered."""


@dataclass(frozen=True)
class Fields:
    """Labels, each with a value."""

    rows: Sequence[Field]
    detail: Detail = Detail.ALWAYS

    def visible(self, detail: Detail) -> list[tuple[str, str]]:
        """Return label and value of the rows up to a detail level."""
        visible_rows = (row for row in self.rows if len(row) == 2 or row[2] <= detail)
        return [(row[0], _text_for_detail(row[1], detail)) for row in visible_rows if row[1] is not None]


@dataclass(frozen=True)
class Fold:
    """Consecutive rows of equal modules, and the rows that stand for them."""

    start: int
    stop: int
    """Position after the last row."""
    rows: Sequence[Sequence[Cell]]
    """Rows in place of the folded ones; a page opens the fold at the first of them."""


@dataclass(frozen=True)
class Table:
    """Rows of cells with named columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    name: str = ""
    """Anchor of the table on a page."""
    heading: str = ""
    """Heading on a page and in Markdown; not printed in a terminal."""
    detail: Detail = Detail.ALWAYS
    brief: Sequence[int] | None = None
    """Positions of the rows without ``--verbose``, in display order; None: all rows."""
    rest: str = ""
    """Line below brief rows if rows are omitted; ``{}`` stands for the number of omitted rows."""
    folds: Sequence[Fold] = ()
    """Folded rows in ascending order, without overlap. A terminal without ``--verbose`` shows their rows, a page opens
    and closes them."""
    page_folds: Sequence[Fold] = ()
    """Folded rows of a page only, in place of ``folds``."""
    is_searched: bool = False
    """True if a page filters the rows by a typed text; for one table of a document."""
    variants: Sequence[tuple[str, str]] = ()
    """Item and variant of each row, such as a model and a configuration. A page compares the numbers of two variants
    of an item."""
    references: Sequence[str] = ()
    """References that a page offers for a comparison: variants, or :data:`EARLIER`."""

    def visible(self, detail: Detail) -> Table:
        """Return the table with the columns and rows of a detail level; ``rest`` is empty if no row is omitted."""
        columns = [index for index, column in enumerate(self.columns) if column.detail <= detail]
        is_short = detail is Detail.ALWAYS
        brief = self.brief if is_short else None
        all_rows = list(_folded_rows(self.rows, self.folds)) if is_short and self.folds else self.rows
        rows = all_rows if brief is None else [all_rows[index] for index in brief if index < len(all_rows)]

        def cells(row: Sequence[Cell]) -> list[Cell]:
            return [_cell_for_detail(row[index], detail) for index in columns]

        folds = self.page_folds or self.folds if detail is Detail.PAGE else ()
        return replace(
            self,
            columns=[self.columns[index] for index in columns],
            rows=list(map(cells, rows)),
            folds=[replace(fold, rows=list(map(cells, fold.rows))) for fold in folds],
            page_folds=(),
            brief=None,
            rest=self.rest.replace("{}", str(len(all_rows) - len(rows))) if len(rows) < len(all_rows) else "",
        )


def _folded_rows(rows: Sequence[Sequence[Cell]], folds: Iterable[Fold]) -> Iterator[Sequence[Cell]]:
    """Yield the rows of a table with the rows of each fold in place of the folded ones."""
    start = 0
    for fold in folds:
        yield from rows[start : fold.start]
        yield from fold.rows
        start = fold.stop
    yield from rows[start:]


_LAYER_NUMBER = re.compile(r"\.\d+(?=/|$)")
"""Number of a module among its siblings, in a tag."""


def group_layers(rows: Iterable[tuple[str, Sequence[Cell]]]) -> list[tuple[list[str], str, Sequence[Cell]]]:
    """Group the rows of modules whose cells are equal, and whose tags differ in numbers only.

    Args:
        rows: Tag and other cells of each row.

    Returns:
        For each group its tags, its name, and its cells; the name of several modules has ``*`` for numbers.

    >>> group_layers([("/Net/Layer.0", [1]), ("/Net/Layer.1", [1]), ("/Net/Head", [1])])
    [(['/Net/Layer.0', '/Net/Layer.1'], '/Net/Layer.* × 2', [1]), (['/Net/Head'], '/Net/Head', [1])]
    """
    groups: dict[tuple[str, tuple[Cell, ...]], list[str]] = {}
    for tag, cells in rows:
        groups.setdefault((_LAYER_NUMBER.sub(".*", tag), tuple(cells)), []).append(tag)
    return [
        (tags, tags[0] if len(tags) == 1 else f"{kind} × {len(tags)}", list(cells))
        for (kind, cells), tags in groups.items()
    ]


def layer_folds(rows: Sequence[tuple[str, Sequence[Cell]]]) -> list[Fold]:
    """Fold a table into the groups of :func:`group_layers`; ``[]`` if no rows are equal.

    Args:
        rows: Tag and other cells of each row.
    """
    groups = group_layers(rows)
    if len(groups) == len(rows):
        return []
    return [Fold(0, len(rows), [[name, *cells] for _, name, cells in groups])]


def _text_for_detail(text: str | Shortened, detail: Detail) -> str:
    """Return the short text in a terminal without ``--verbose``, else the full text."""
    if isinstance(text, Shortened):
        return text.short if detail is Detail.ALWAYS else text.full
    return text


def _cell_for_detail(cell: Cell, detail: Detail) -> Cell:
    """Return a cell as a detail level displays it: module names indented or as paths, texts short or full."""
    match cell:
        case Nested():
            return cell.path if detail is Detail.PAGE else "  " * cell.level + cell.name
        case Shortened():
            return _text_for_detail(cell, detail)
        case _:
            return cell


@dataclass(frozen=True)
class Branch:
    """One entry of a tree."""

    name: str
    path: str = ""
    """A second name, printed dimmed."""
    words: str = ""
    """Text after the name, with a leading space."""
    children: Sequence[Branch] = ()
    is_dim: bool = False

    def walk(self, level: int = 0) -> Iterator[tuple[Branch, int]]:
        """Yield the branch and its descendants, each with its level."""
        yield self, level
        for child in self.children:
            yield from child.walk(level + 1)


@dataclass(frozen=True)
class Tree:
    """Entries inside entries."""

    root: Branch
    heading: str = ""
    detail: Detail = Detail.ALWAYS


@dataclass(frozen=True)
class Paragraph:
    """A sentence on a separate line."""

    words: str
    detail: Detail = Detail.ALWAYS


@dataclass(frozen=True)
class Section:
    """Blocks below a heading."""

    heading: str
    blocks: Sequence[Block]
    is_name: bool = False
    """True if the heading is an identifier."""
    detail: Detail = Detail.ALWAYS


@dataclass(frozen=True)
class Box:
    """One module of a chart of boxes inside boxes."""

    key: str
    parent: str
    """Key of the enclosing box; empty for the outermost box."""
    label: str
    size: float
    """Size of the box itself, without its inner boxes."""
    shade: float
    words: str = ""
    """Text below the label; empty: size including the inner boxes, and its share of the whole."""
    lines: Sequence[str] = ()
    """Details of the selected box; the first line is the name of the module in the tables."""
    is_marked: bool = False
    """True if an outline and a sign mark the box."""
    kind: str = ""
    """Class of the module. Boxes can be coloured by class; equal neighbours of one class are folded into one box."""


@dataclass(frozen=True)
class Shades:
    """Meaning of the colours of boxes. Without bounds, the colours span the range of the values."""

    title: str
    low: float | None = None
    high: float | None = None
    is_logarithmic: bool = False
    is_dark_low: bool = False
    """True if small values are dark; else large values are dark."""
    folded: Literal["sum", "max", "min"] = "max"
    """Aggregation of the values of folded boxes."""
    limit: float | None = None
    """Value that the legend marks; None: no mark."""
    limit_words: str = ""
    """Text of the mark."""


@dataclass(frozen=True)
class Boxes:
    """Modules as boxes inside boxes: width is size, colour is shade or class."""

    boxes: Sequence[Box]
    heading: str = ""
    caption: str = ""
    """Text above the chart if a heading has several charts."""
    size_title: str = "size"
    """Meaning of the width of a box."""
    size_unit: str = ""
    shades: Shades | None = None
    """None: colours stand for classes only."""
    is_by_class: bool = False
    """True if the chart is initially coloured by class; else by shade."""
    kind_title: str = "class"
    """Meaning of the kinds of boxes."""
    detail: Detail = Detail.PAGE


Grade = Literal["best", "good", "fair", "bad"]


@dataclass(frozen=True)
class Dot:
    """One row of a chart of dots and bars."""

    name: str
    grade: Grade
    value: float
    low: float | None = None
    high: float | None = None
    """Ends of the interval of the value; None: no interval."""
    size: float = 0.0
    """Size of the mark, at least 0."""
    bar: float = 0.0
    bar_words: str = ""
    value_words: str = ""
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Dots:
    """Rows with a dot in an interval on the left and a bar on the right; no bars if the bars have no title."""

    dots: Sequence[Dot]
    heading: str
    value_title: str
    bar_title: str = ""
    value_line: float | None = None
    """Position of a line that separates better from worse values."""
    bar_line: float | None = None
    """Minimum length of a bar; None: no limit."""
    detail: Detail = Detail.PAGE


@dataclass(frozen=True)
class ModelView:
    """The modules and the graph of one or two models, in which a page zooms, searches and opens modules."""

    names: Sequence[str]
    """Name of each model."""
    data: Mapping[str, object]
    """Templates of the modules, and numbers of earlier runs; ``docs/reference/formats.md`` describes the object."""
    detail: Detail = Detail.PAGE


Block = Fields | Table | Tree | Paragraph | Section | Boxes | Dots | ModelView


Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Figure:
    """A key number of a report. Its value is also in the fields or a table: only pages display the figure."""

    label: str
    value: str
    """Value with unit."""
    meaning: str
    """Meaning of the number, in one sentence or less."""
    tone: Tone = ""


@dataclass(frozen=True)
class Document:
    """A report."""

    blocks: Sequence[Block]
    summary: Fields = Fields(())
    """Overall result: printed last in a terminal, where the reader looks, and first on a page."""
    title: str = ""
    """Title of a page or a file. Not printed in a terminal, where the command precedes the result."""
    subject: str = ""
    """Name of the measured model, in the title of the window."""
    answer: str = ""
    """Answer of the report in one sentence, below the title of a page. A terminal prints it in the blocks."""
    introduction: str = ""
    """Text below the title and the answer."""
    figures: Sequence[Figure] = ()
    """Key numbers at the top of a page."""
    links: Sequence[Linked] = ()
    """Files that were written with the page."""

    @property
    def page_blocks(self) -> list[Block]:
        """Blocks in the order of a page: the summary follows the first block of fields."""
        first, *blocks = [*self.blocks, self.summary]
        if isinstance(first, Fields) and blocks:
            return [Fields([*first.rows, *self.summary.rows]), *blocks[:-1]]
        return [self.summary, *self.blocks]

    def with_rows(self, rows: Iterable[Field]) -> Document:
        """Return the document with additional rows at the end of the summary."""
        return replace(self, summary=replace(self.summary, rows=[*self.summary.rows, *rows]))

    def with_next(self, command: str) -> Document:
        """Return the document with the command that acts on the result in the summary; empty: none."""
        return self.with_rows([("next", command)] if command else [])

    def with_files(self, paths: Iterable[Path]) -> Document:
        """Return the document with the paths of additionally written files in the summary."""
        return self.with_rows(("wrote", str(path)) for path in paths)


def visible(blocks: Iterable[Block], detail: Detail) -> Iterator[Block]:
    """Yield the blocks of a detail level with their texts for this level; empty blocks are omitted."""
    for block in blocks:
        if block.detail > detail:
            continue
        match block:
            case Fields():
                if rows := block.visible(detail):
                    yield Fields(rows)
            case Table():
                if (table := block.visible(detail)).rows:
                    yield table
            case Paragraph(words=""):
                pass
            case Section():
                yield replace(block, blocks=list(visible(block.blocks, detail)))
            case _:
                yield block


def first_of(texts: Sequence[str], count: int, ending: str) -> Shortened:
    """Shorten a list for a terminal to its first words; a single remaining word is not cut off.

    >>> first_of(["Add", "Mul", "Exp"], 1, "and {} others")
    Shortened(short='Add, and 2 others', full='Add, Mul, Exp')
    """
    brief = texts if len(texts) <= count + 1 else [*texts[:count], ending.format(len(texts) - count)]
    return Shortened(", ".join(brief), ", ".join(texts))


def note_fields(notes: Iterable[str]) -> list[Field]:
    """Make a field of each note."""
    return [("note", note) for note in notes]


def view_field(*models: str) -> Field:
    """Return the field of a page with the command that shows its models side by side."""
    return "view", command_line(["winml", "view", *models, "-o", "view.html"]), Detail.PAGE


_Part = TypeVar("_Part")


def joined(*documents: Document) -> Document:
    """Concatenate documents."""
    return Document([block for document in documents for block in (*document.blocks, document.summary)])


def parts_document(parts: Mapping[str, _Part], document_of: Callable[[_Part], Document]) -> Document:
    """Make one document of several parts, each in a section with the name of the part."""
    return Document([Section(name, joined(document_of(part)).blocks) for name, part in parts.items()])
