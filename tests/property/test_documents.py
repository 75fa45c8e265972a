"""Completeness of the three renderings of a document, and escaping of its texts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import markdown_it
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from winml.modelkit.report.document import (
    Block,
    Box,
    Boxes,
    Branch,
    Cell,
    Column,
    Detail,
    Document,
    Dot,
    Dots,
    Fields,
    Figure,
    Linked,
    Nested,
    Number,
    Paragraph,
    Section,
    Shades,
    Shortened,
    Table,
    Tree,
    visible,
)
from winml.modelkit.report.html import render_html
from winml.modelkit.report.markdown import render_markdown
from winml.modelkit.report.terminal import console_for, print_document
from winml.modelkit.words import printable

_OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except line ends, and marks of the writing direction."""

texts = st.one_of(
    st.text(
        st.one_of(st.sampled_from("[]|<>&`*_#\\-+=.1a \x1b\n\r\u202e\"'"), st.characters(codec="utf-8")),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(
        ["[red]x[/red]", "<img src=x onerror=alert(1)>", "a | b", "&amp;", "- a", "1. a", "://x", ":smile:"]
    ),
).filter(lambda text: text.strip() and text.strip() == text)
numbers = st.one_of(st.none(), st.integers(-(10**6), 10**9), st.floats(-1e6, 1e6), st.just(float("inf")))
cells: st.SearchStrategy[Cell] = st.one_of(
    texts,
    numbers,
    st.builds(Number, numbers, texts),
    st.builds(Nested, texts, texts, st.integers(0, 3)),
    st.builds(Shortened, texts, texts),
    st.builds(Linked, texts, texts, texts),
)
KINDS = ("text", "name", "count", "bytes", "latency", "share", "error", "cosine", "decibels", "score")


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables of one to four columns."""
    columns = draw(st.lists(st.builds(Column, texts, st.sampled_from(KINDS)), min_size=1, max_size=4))
    rows = draw(st.lists(st.tuples(*[cells for _ in columns]), max_size=4))
    brief = draw(st.one_of(st.none(), st.just(range(1))))
    return Table(columns, rows, name="t", heading=draw(texts), brief=brief, rest="more")


branches = st.recursive(
    st.builds(Branch, texts, texts), lambda inner: st.builds(Branch, texts, children=st.lists(inner)), max_leaves=4
)
leaves: st.SearchStrategy[Block] = st.one_of(
    st.builds(Fields, st.lists(st.tuples(texts, st.one_of(texts, st.builds(Shortened, texts, texts))))),
    tables(),
    st.builds(Tree, branches),
    st.builds(Paragraph, texts),
)
documents = st.builds(
    Document,
    st.lists(st.one_of(leaves, st.builds(Section, texts, st.lists(leaves, max_size=2), st.booleans())), max_size=3),
    st.builds(Fields, st.lists(st.tuples(texts, texts))),
    title=texts,
    introduction=texts,
)


def words_of(document: Document, detail: Detail) -> Iterator[str]:
    """Yield every text that a rendering with this detail has to contain, in printable form."""

    def make_document(blocks: Iterator[Block]) -> Iterator[str]:
        for block in blocks:
            match block:
                case Fields():
                    yield from (word for row in block.visible(detail) for word in row)
                case Table():
                    yield from (column.name for column in block.columns)
                    for row in block.rows:
                        yield from (column.words(cell) for column, cell in zip(block.columns, row, strict=True))
                case Tree():
                    yield from (word for branch, _ in block.root.walk() for word in (branch.name, branch.path))
                case Paragraph():
                    yield block.words
                case Section():
                    yield block.heading
                    yield from make_document(iter(block.blocks))

    yield from map(printable, make_document(visible([*document.blocks, document.summary], detail)))


def _joined(text: str) -> str:
    """Remove all whitespace: a rendering may wrap lines, and Markdown joins several spaces."""
    return re.sub(r"\s", "", text)


class _Texts(HTMLParser):
    """Collects the text a browser would display, and counts elements by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count an element."""
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        """Collect a text."""
        self.words.append(data)


@given(documents)
def test_terminal_prints_every_text_without_control_codes(document: Document) -> None:
    """Texts are complete in a pipe and wrapped at the width of a terminal, without control codes in either."""
    for verbose in (False, True):
        stream = io.StringIO()
        print_document(document, console_for(stream), verbose=verbose)
        printed = stream.getvalue()
        assert not _OBEYED.search(printed)
        for word in words_of(document, Detail(verbose)):
            assert word in printed


@given(documents, st.sampled_from([40, 80]))
def test_narrow_terminal_prints_lines_no_control_character_gets_into(document: Document, width: int) -> None:
    """Colour codes of ours are the only control characters."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system="standard", markup=False)
    print_document(document, console)
    assert not _OBEYED.search(re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()))


@given(documents)
def test_markdown_prints_every_text_literally(document: Document) -> None:
    """Texts produce no HTML, emphasis, link or list: only headings, tables, paragraphs and code are Markdown."""
    text = render_markdown(document)
    assert not _OBEYED.search(text)
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    blocks = {token.type.removesuffix("_open").removesuffix("_close") for token in tokens}
    assert blocks <= {"heading", "paragraph", "inline", "table", "thead", "tbody", "tr", "th", "td", "fence"}
    assert {child.type for child in inline} <= {"text", "code_inline", "text_special"}
    shown = _joined("".join(token.content for token in (*inline, *tokens) if token.type != "inline"))
    for word in words_of(document, Detail.PAGE):
        assert _joined(word) in shown


@given(documents)
def test_page_prints_every_text_literally(document: Document) -> None:
    """Texts of a document add no element to the template."""
    page = render_html(document)
    own = page.partition("<body>")[2].partition("<script>")[0]
    assert not _OBEYED.search(own)
    texts_of_page = _Texts()
    texts_of_page.feed(own)
    assert not {"img", "script", "iframe"} & {*texts_of_page.elements}
    shown = _joined("".join(texts_of_page.words))
    for word in words_of(document, Detail.PAGE):
        assert _joined(word) in shown


figures = st.lists(st.builds(Figure, texts, texts, texts), max_size=3)
boxes = st.lists(
    st.builds(
        Box, texts, st.just(""), texts, st.floats(0, 9), st.one_of(st.floats(0, 9), st.just(float("nan"))), texts,
        st.tuples(texts), st.booleans(), texts,
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip
dots = st.lists(
    st.builds(
        Dot, texts, st.sampled_from(["best", "good", "fair", "bad"]), st.floats(0, 9), st.none(), st.none(),
        st.integers(0, 9), st.floats(-9, 9), texts, st.tuples(texts),
    ),
    max_size=3,
)  # fmt: skip
shades = st.sampled_from([None, Shades("error", 1e-8, 1.0, is_logarithmic=True), Shades("dB", high=60.0)])


@settings(max_examples=20)
@given(boxes, figures, dots, shades)
def test_charts_contain_their_texts_as_data(
    boxes: list[Box], figures: list[Figure], dots: list[Dot], scale: Shades | None
) -> None:
    """Dots are elements of the template; boxes are JSON in the page, which their texts cannot end."""
    charts: list[Block] = [
        Boxes(boxes, "modules", "caption", shades=scale),
        Dots(dots, "times", "time", "dB", 1.0, 30.0),
    ]
    own = render_html(Document(charts, figures=figures)).partition("<body>")[2].rpartition("<script>")[0]
    assert not _OBEYED.search(own)
    page = _Texts()
    page.feed(own)
    assert not {"img", "iframe"} & {*page.elements}
    assert 1 == page.elements.count("script")
    data = json.loads(re.findall(r'<script type="application/json">(.*)</script>', own)[0])
    assert [[box.label, box.kind, box.words] for box in boxes] == [row[1:4] for row in data["boxes"]] or any(
        printable(text) != text for box in boxes for text in (box.label, box.kind, box.words)
    )
    shown = _joined("".join(page.words))
    texts = [text for figure in figures for text in (figure.label, figure.value, figure.meaning)]
    texts += [text for dot in dots for text in (dot.name, dot.bar_words)]
    assert [] == [text for text in texts if _joined(printable(text)) not in shown]
