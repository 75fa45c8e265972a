"""What is a report made of? Fields, tables, trees and charts of typed values, rendered in a terminal, Markdown or HTML.

A subject is described once, as a :class:`Document`. What it tells only in its longer forms is marked with a
:class:`Detail`. Numbers are written here, so that they read the same everywhere. Knows no form of output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Literal, TypeVar

from winml.modelkit.words import count_words, decibel_words, size_words, time_words

MISSING = "–"
"""Written where a number was not measured."""
EARLIER = "earlier run"
"""The reference that stands for :attr:`Number.earlier`."""


class Detail(IntEnum):
    """In which forms a part of a document is rendered; each form includes those before it."""

    ALWAYS = 0
    VERBOSE = 1
    """In a terminal with ``--verbose``."""
    PAGE = 2
    """On HTML pages and in Markdown files, where room is not short."""


Kind = Literal[
    "text", "name", "count", "parameters", "bytes", "latency", "ms", "whole", "seconds", "share", "error", "cosine",
    "decibels", "score", "difference", "bits",
]  # fmt: skip
"""What the values of a column are. A ``name`` is a text that a program knows, such as that of a node."""


def _count(value: float) -> str:
    """Write a count; a mean of counts may have decimals."""
    return str(int(value)) if value == int(value) else f"{value:g}"


_WRITTEN: Mapping[Kind, Callable[[float], str]] = {
    "count": _count,
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
"""Kind → how a number of it is written. Shares are from 0 to 1, times in milliseconds but for ``seconds``."""


@dataclass(frozen=True)
class Number:
    """A number with more to it than its value."""

    value: float | None
    """What a page sorts by."""
    words: str = ""
    """How it is written; empty: as the kind of its column says."""
    earlier: float | None = None
    """The same number of an earlier run, to compare with on a page."""


@dataclass(frozen=True)
class Nested:
    """The name of a module in a tree."""

    name: str
    """Below its parent, indented by its level: in a terminal."""
    path: str
    """Where it stands alone: on a page and in Markdown, where rows can be sorted."""
    level: int = 0


@dataclass(frozen=True)
class Shortened:
    """A long text, and what a terminal without ``--verbose`` displays of it."""

    short: str
    full: str


@dataclass(frozen=True)
class Linked:
    """A text, and a file beside the page that tells more."""

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
    """The name by which options and JSON know it; a page tells it of the heading."""
    is_dim: bool = False
    """Displayed less brightly in a terminal."""
    tones: Mapping[str, Literal["good", "bad"]] = field(default_factory=dict)
    """Values of few kinds, and whether each is good; a page can display the rows of one of them only."""

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right, never folded, and sorted by value."""
        return self.kind not in ("text", "name")

    def words(self, cell: Cell) -> str:
        """Return how a cell of this column is written."""
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
                return _WRITTEN.get(self.kind, _count)(cell)


def columns(*columns: str | tuple[str, Kind] | Column) -> list[Column]:
    """Return columns of which a name, or a name and a kind, is enough.

    >>> [column.kind for column in columns("module", ("nodes", "count"))]
    ['text', 'count']
    """
    return [
        column if isinstance(column, Column) else Column(column) if isinstance(column, str) else Column(*column)
        for column in columns
    ]


Field = tuple[str, str | Shortened | None] | tuple[str, str | Shortened | None, Detail]
"""A label, its value, and in which forms it is rendered where not in all. A field whose value is None is not rendered.
"""


@dataclass(frozen=True)
class Fields:
    """Labels, each with a value."""

    rows: Sequence[Field]
    detail: Detail = Detail.ALWAYS

    def visible(self, detail: Detail) -> list[tuple[str, str]]:
        """Return the label and value of the rows with at most this detail."""
        displayed = (row for row in self.rows if len(row) == 2 or row[2] <= detail)
        return [(row[0], _text_for(row[1], detail)) for row in displayed if row[1] is not None]


@dataclass(frozen=True)
class Table:
    """Rows of cells under the names of their columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    name: str = ""
    """Its anchor on a page."""
    heading: str = ""
    """On a page and in Markdown; in a terminal the columns say it."""
    detail: Detail = Detail.ALWAYS
    brief: Sequence[int] | None = None
    """Positions of the rows without ``--verbose``, in their order there; None: all."""
    rest: str = ""
    """The line below brief rows where some are left out; ``{}`` in it is how many."""
    is_searched: bool = False
    """Whether a page displays only the rows that hold a typed text; one table of a document."""
    variants: Sequence[tuple[str, str]] = ()
    """For each row an item and a variant of it, such as a model and a configuration: a page sets the numbers of one
    variant beside those of another."""
    references: Sequence[str] = ()
    """What a page offers to compare with: variants, or :data:`EARLIER`."""

    def visible(self, detail: Detail) -> Table:
        """Return the table with the columns and rows of this detail; ``rest`` is empty where no row is left out."""
        columns = [index for index, column in enumerate(self.columns) if column.detail <= detail]
        brief = None if detail is not Detail.ALWAYS else self.brief
        rows = self.rows if brief is None else [self.rows[index] for index in brief if index < len(self.rows)]
        return replace(
            self,
            columns=[self.columns[index] for index in columns],
            rows=[[_cell_for(row[index], detail) for index in columns] for row in rows],
            brief=None,
            rest=self.rest.replace("{}", str(len(self.rows) - len(rows))) if len(rows) < len(self.rows) else "",
        )


def _text_for(text: str | Shortened, detail: Detail) -> str:
    if isinstance(text, Shortened):
        return text.short if detail is Detail.ALWAYS else text.full
    return text


def _cell_for(cell: Cell, detail: Detail) -> Cell:
    match cell:
        case Nested():
            return cell.path if detail is Detail.PAGE else "  " * cell.level + cell.name
        case Shortened():
            return _text_for(cell, detail)
        case _:
            return cell


@dataclass(frozen=True)
class Branch:
    """One entry of a tree."""

    name: str
    path: str = ""
    """A second name, less bright."""
    words: str = ""
    """What is told of it; begins with the space before it."""
    children: Sequence[Branch] = ()
    is_dim: bool = False

    def walk(self, level: int = 0) -> Iterator[tuple[Branch, int]]:
        """Yield the branch and those below it, each with its level."""
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
    """A sentence on a line of its own."""

    words: str
    detail: Detail = Detail.ALWAYS


@dataclass(frozen=True)
class Section:
    """Blocks below a heading."""

    heading: str
    blocks: Sequence[Block]
    is_name: bool = False
    """Whether the heading is a name that a program knows."""
    detail: Detail = Detail.ALWAYS


@dataclass(frozen=True)
class Box:
    """One module of a chart of boxes inside boxes."""

    key: str
    parent: str
    """Key of the box around it; empty for the outermost."""
    label: str
    size: float
    """Its own, besides those inside it."""
    shade: float
    words: str = ""
    """Below the label; empty: its size with those inside it, and its share of the whole."""
    lines: Sequence[str] = ()
    """Details of the box that is selected; the first is its name in the tables."""
    is_marked: bool = False
    """Whether an outline and a sign make it stand out."""
    kind: str = ""
    """Class of the module: boxes can be coloured by it, and equal neighbours of one class folded into one box."""


@dataclass(frozen=True)
class Shades:
    """What the colours of boxes stand for. Without bounds, they span the values."""

    title: str
    low: float | None = None
    high: float | None = None
    is_logarithmic: bool = False
    is_dark_low: bool = False
    """Whether a small value is dark; else a large one."""
    folded: Literal["sum", "max", "min"] = "max"
    """The value of several boxes folded into one."""


@dataclass(frozen=True)
class Boxes:
    """Modules as boxes inside boxes: width is size, colour is shade or class."""

    boxes: Sequence[Box]
    heading: str = ""
    caption: str = ""
    """Above one of several charts below a heading."""
    size_title: str = "size"
    """What the width of a box stands for."""
    size_unit: str = ""
    shades: Shades | None = None
    """None: colours stand for classes only."""
    is_by_class: bool = False
    """Whether the chart is coloured by class first; else by shade."""
    kind_title: str = "class"
    """What the kinds of boxes are."""
    detail: Detail = Detail.PAGE


@dataclass(frozen=True)
class Bar:
    """One row of a chart of bars."""

    name: str
    value: float
    words: str
    """Beside the bar: its value with a unit."""
    detail: str = ""
    """Below the name, less bright."""


@dataclass(frozen=True)
class Bars:
    """Names with a bar each, the largest first; bars below 0 lie left of the others."""

    bars: Sequence[Bar]
    heading: str
    caption: str = ""
    """What the bars stand for."""
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
    """Ends of the interval of the value; None where there is none."""
    size: float = 0.0
    """Of the mark, at least 0."""
    bar: float = 0.0
    bar_words: str = ""
    value_words: str = ""
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Dots:
    """Rows with a dot in an interval on the left and a bar on the right; no bars where they have no title."""

    dots: Sequence[Dot]
    heading: str
    value_title: str
    bar_title: str = ""
    value_line: float | None = None
    """Where a line divides better from worse."""
    bar_line: float | None = None
    """The least bar that is accepted; None: no limit."""
    detail: Detail = Detail.PAGE


Block = Fields | Table | Tree | Paragraph | Section | Boxes | Bars | Dots


Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Figure:
    """One number that sums up a report. Its value stands in the fields or a table as well: only pages display it."""

    label: str
    value: str
    """With its unit."""
    meaning: str
    """What the number says, in one sentence or less."""
    tone: Tone = ""


@dataclass(frozen=True)
class Document:
    """A report."""

    blocks: Sequence[Block]
    summary: Fields = Fields(())
    """What it says as a whole: the last in a terminal, where the eye is, and the first on a page."""
    title: str = ""
    """Of a page or a file. A terminal has none: the command stands above the answer."""
    subject: str = ""
    """What was measured, in the title of a window."""
    introduction: str = ""
    """Below the title."""
    figures: Sequence[Figure] = ()
    """The few numbers that a page begins with."""
    links: Sequence[Linked] = ()
    """Files that were written with the page."""

    @property
    def page_blocks(self) -> list[Block]:
        """The blocks in the order of a page: the summary is below the fields that it begins with."""
        first, *others = [*self.blocks, self.summary]
        if isinstance(first, Fields) and others:
            return [Fields([*first.rows, *self.summary.rows]), *others[:-1]]
        return [self.summary, *self.blocks]

    def with_files(self, paths: Iterable[Path]) -> Document:
        """Return the document with the files that were written besides, if there are any."""
        rows = [*self.summary.rows, *(("wrote", str(path)) for path in paths)]
        return replace(self, summary=Fields(rows))


def visible(blocks: Iterable[Block], detail: Detail) -> Iterator[Block]:
    """Yield the blocks that a form renders, with the texts for it, and without those in which nothing is left."""
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


def first_of(words: Sequence[str], count: int, more: str) -> Shortened:
    """Return a list of which a terminal displays the first, and one more where that one alone would be left.

    >>> first_of(["Add", "Mul", "Exp"], 1, "and {} others")
    Shortened(short='Add, and 2 others', full='Add, Mul, Exp')
    """
    short = words if len(words) <= count + 1 else [*words[:count], more.format(len(words) - count)]
    return Shortened(", ".join(short), ", ".join(words))


def note_fields(notes: Iterable[str]) -> list[Field]:
    """Return a field for each note."""
    return [("note", note) for note in notes]


_Part = TypeVar("_Part")


def joined(*documents: Document) -> Document:
    """Return one document of several, one after another."""
    return Document([block for document in documents for block in (*document.blocks, document.summary)])


def parts_document(parts: Mapping[str, _Part], document_of: Callable[[_Part], Document]) -> Document:
    """Return one document of several parts, each below its name."""
    return Document([Section(name, joined(document_of(part)).blocks) for name, part in parts.items()])
