"""Picture of the modules of one or two models, for a document: boxes inside boxes, as the chart of the page."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

from winml.modelkit.report.html import STYLE, read_resource
from winml.modelkit.report.module_tree import TreeRow
from winml.modelkit.view.titles import BITS, CLASS, PARAMETERS, STRUCTURE, UNCHANGED
from winml.modelkit.words import count_words, size_words

_WIDTH, _MARGIN, _ROW, _LINE = 1000, 8, 38, 15
"""Chosen: pixels. The text of a README is about 1,000 pixels wide."""
_LETTER = 6.8
"""Measured: mean pixels of a letter of the sans-serif fonts of browsers, at 12 pixels."""
_MOST_LETTERS = 60
"""Chosen: letters of a kind in the legend, so that a line has two of them."""
_NARROWEST = 1.5
"""Chosen: pixels of the narrowest drawn box, as on a page."""
_COLOURS = 8
"""Colours of kinds in the style of pages; further kinds share a grey."""
_MERGES: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
_SCALE = 2
"""Chosen: pixels of a PNG for one of the picture, as most screens have."""


@dataclass(frozen=True)
class _Box:
    """A module, or consecutive equal modules."""

    label: str
    kind: str
    """Class, or the text that is the colour."""
    size: float
    """Width without the modules inside."""
    shade: float | None
    """Number that is the colour."""
    inner: Sequence[_Box]
    likeness: object
    """Equal for modules that can be drawn as one box."""
    weights: tuple[int, int] = (0, 0)
    """Bytes and parameters of the weights, including the modules inside."""
    count: int = 1

    @cached_property
    def total(self) -> float:
        """Width including the modules inside."""
        return self.size + sum(box.total for box in self.inner)

    def walk(self) -> Iterator[_Box]:
        """Yield the box and the boxes inside it."""
        yield self
        for box in self.inner:
            yield from box.walk()


class _Shape(NamedTuple):
    """A rectangle with lines of text."""

    left: float
    top: float
    width: float
    height: float
    fill: int | float | None
    """Number of a colour of kinds; a float is a position on the scale from cold to hot; None: transparent."""
    lines: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class _Chart:
    """The boxes of one model, and the meaning of width and colour."""

    data: Mapping[str, Any]
    side: int

    @cached_property
    def _measures(self) -> Mapping[str, Mapping[str, Any]]:
        return {measure["title"]: measure for measure in self.data["models"][self.side]["measures"]}

    @property
    def _width(self) -> str:
        """Title of the width: parameters for a model without the chosen number."""
        title: str = self.data["width"]
        has_graph = any(part["file"] for part in self.data["models"][self.side]["parts"])
        return title if (has_graph and title in STRUCTURE) or title in self._measures else PARAMETERS

    @property
    def _colour(self) -> Mapping[str, Any]:
        """Description of the colour; empty for numbers and texts of the file."""
        return self._measures.get(self.data["colour"], {})

    @property
    def _is_text(self) -> bool:
        """True if kinds are the colour, not numbers."""
        return self.data["colour"] == CLASS or bool(self._colour.get("isText"))

    def _value(self, title: str, part_data: Mapping[str, Any], template: Mapping[str, Any], index: int) -> Any:
        """Return the own number or text of a module; None if unknown."""
        if title == CLASS:
            return self.data["texts"][template["c"]]
        if title in STRUCTURE and (part_data["file"] or title == PARAMETERS):
            return template["n"][STRUCTURE.index(title)]
        measure = self._measures.get(title)
        values = part_data["measures"].get(measure["key"]) if measure else None
        return values[index] if values else None

    @cached_property
    def root(self) -> _Box:
        """The outermost box; the parts of a folder are boxes of one that stands for the folder."""
        model = self.data["models"][self.side]
        parts = [self._expand(part) for part in model["parts"]]
        if len(parts) == 1:
            return parts[0]
        parts = [
            replace(root, label=f"{part['name']}: {root.label}")
            for root, part in zip(parts, model["parts"], strict=True)
        ]
        return _Box(model["name"], "", 0, None, parts, None)

    def _expand(self, part_data: Mapping[str, Any]) -> _Box:
        """Build the boxes of a part from the templates of the page; equal modules are one box."""
        counter = itertools.count()

        def expand(number: int, label: str) -> _Box:
            template, index = self.data["templates"][number], next(counter)
            modules = [item for item in template.get("x", ()) if isinstance(item[1], str)]
            inner = [expand(item[2], item[0]) for item in modules]
            size = self._value(self._width, part_data, template, index) or 0
            colour = self._value(self.data["colour"], part_data, template, index)
            own_weights = template.get("b", (0, 0))
            weights = tuple(map(sum, zip(own_weights, *(box.weights for box in inner), strict=True)))
            if self.data["colour"] == BITS:
                colour = 8 * weights[0] / weights[1] if weights[1] else None
            kind, shade = (str(colour or ""), None) if self._is_text else ("", colour)
            class_name = self._value(CLASS, part_data, template, index)
            likeness = (class_name or label, kind, *(box.likeness for box in inner))
            groups = itertools.groupby(inner, lambda box: box.likeness)
            boxes = [self._join(list(group)) for _, group in groups]
            return _Box(label, kind, size, shade, boxes, likeness, (weights[0], weights[1]))

        return expand(part_data["template"], part_data["label"])

    def _join(self, group: Sequence[_Box]) -> _Box:
        """Return one box for equal modules: sizes add up, and the colour is that of their sum or worst number."""
        first, count = group[0], sum(box.count for box in group)
        if len(group) == 1:
            return first
        label = TreeRow(first, group[-1], count, (), 0).name(lambda box: box.label)
        shades = [box.shade for box in group if box.shade is not None]
        merge = _MERGES[self._colour.get("folded", "max" if self.data["colour"] == BITS else "sum")]
        inner = [self._join(same) for same in zip(*(box.inner for box in group), strict=True)]
        size, shade = sum(box.size for box in group), merge(shades) if shades else None
        return replace(first, label=label, size=size, shade=shade, inner=inner, count=count)

    def shapes(self, top: float, kinds: Mapping[str, int], ends: tuple[float, float]) -> Iterator[_Shape]:
        """Yield the boxes below a position, and the legend below them.

        Args:
            top: The position in pixels.
            kinds: Kind → number of its colour.
            ends: Ends of the numbers that are colours.
        """

        def fill(box: _Box) -> int | float:
            if self._is_text:
                return kinds.get(box.kind, _COLOURS)
            return _COLOURS if box.shade is None else self._position(box.shade, ends)

        def place(box: _Box, left: float, width: float, level: int) -> Iterator[_Shape]:
            name = box.label if box.count == 1 else f"{box.label} ({box.count} ×)"
            words = self._words(self._width, box.total)
            if not self._is_text and box.shade is not None and self.data["colour"] != self._width:
                words = f"{self._words(self.data['colour'], box.shade)} · {words}"
            yield _Shape(left, top + level * _ROW, width, _ROW, fill(box), (name, words), f"{name} {words}")
            for inner in box.inner:
                part = inner.total / box.total if box.total else 1 / len(box.inner)
                if width * part >= _NARROWEST:
                    yield from place(inner, left, width * part, level + 1)
                left += width * part

        boxes = list(place(self.root, _MARGIN, _WIDTH - 2 * _MARGIN, 0))
        yield from boxes
        yield from self._legend(max(box.top for box in boxes) + _ROW + _MARGIN, kinds, ends)

    def _legend(self, top: float, kinds: Mapping[str, int], ends: tuple[float, float]) -> Iterator[_Shape]:
        """Yield the swatches of the colours with their meaning."""
        words = [f"width: {self._width}", f"colour: {self.data['colour']}"]
        entries: list[tuple[int | float | None, str]] = [(None, text) for text in dict.fromkeys(words)]
        if self._is_text:
            found = {box.kind: kinds[box.kind] for box in self.root.walk() if box.kind}
            named = [
                (number, kind if len(kind) <= _MOST_LETTERS else f"{kind[: _MOST_LETTERS - 1]}…")
                for kind, number in found.items()
                if number < _COLOURS or kind == UNCHANGED[0]
            ]
            entries += [*sorted(named), *([(_COLOURS, "others")] if len(named) < len(found) else [])]
        elif all(box.shade is None for box in self.root.walk()):
            entries.append((_COLOURS, "unknown"))
        else:
            low, high = (self._words(self.data["colour"], end) for end in ends)
            low = f"≤ {low}" if self._colour.get("logarithmic") else low
            steps = [(0.0, low), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, high)]
            entries += [(1 - step if self._colour.get("darkLow") else step, text) for step, text in steps]
        left = float(_MARGIN)
        for number, text in entries:
            width = min((len(text) + 2) * _LETTER, _WIDTH - 2 * _MARGIN - _LINE)
            if left + _LINE + width > _WIDTH - _MARGIN:
                left, top = float(_MARGIN), top + 1.5 * _LINE
            if number is not None:
                yield _Shape(left, top, _LINE, _LINE, number, ())
                left += _LINE
            if text:
                yield _Shape(left, top - 3, width, _LINE + 3, None, (text,))
                left += width

    def _words(self, title: str, value: float) -> str:
        unit = self._measures[title]["unit"] if title in self._measures else ""
        if title == STRUCTURE[2] or unit == "bytes":
            return size_words(int(value))
        if title in STRUCTURE:
            return count_words(int(value))
        return f"{value:.3g} {unit}".strip()

    def shades(self) -> list[float]:
        """Return the numbers that the scale of colours covers: on a logarithmic scale the positive ones."""
        least = 0.0 if self._colour.get("logarithmic") else -math.inf
        return [box.shade for box in self.root.walk() if box.shade is not None and least < box.shade < math.inf]

    def _position(self, shade: float, ends: tuple[float, float]) -> float:
        """Return the position of a number between the ends, from 0.0 to 1.0."""
        low, high, value = *ends, min(max(shade, ends[0]), ends[1])
        if high <= low:
            return 0.0
        if self._colour.get("logarithmic"):
            low, high, value = math.log(low), math.log(high), math.log(value)
        position = (value - low) / (high - low)
        return 1 - position if self._colour.get("darkLow") else position


def _colour_kinds(charts: Iterable[_Chart]) -> dict[str, int]:
    """Return kind → number of its colour in all charts, the widest kinds first; equal modules are grey."""
    sizes: dict[str, float] = {}
    for box in (box for chart in charts for box in chart.root.walk() if box.kind):
        sizes[box.kind] = sizes.get(box.kind, 0) + box.size
    grey = dict.fromkeys(sizes.keys() & {UNCHANGED[0]}, _COLOURS)
    kinds = sorted(sizes.keys() - grey.keys(), key=lambda kind: (-sizes[kind], kind))
    return {kind: min(number, _COLOURS) for number, kind in enumerate(kinds)} | grey


def _draw(data: Mapping[str, Any], headings: Sequence[str]) -> tuple[list[_Shape], int]:
    """Return the shapes of a picture, and its height in pixels.

    Args:
        data: Data of a page.
        headings: Heading of each model.
    """
    shapes: list[_Shape] = []
    charts = [_Chart(data, side) for side in range(len(headings))]
    kinds, shades = _colour_kinds(charts), [shade for chart in charts for shade in chart.shades()]
    ends = (min(shades, default=0.0), max(shades, default=0.0))
    for chart, heading in zip(charts, headings, strict=True):
        top = max((shape.top + shape.height for shape in shapes), default=0.0) + _MARGIN
        shapes.append(_Shape(_MARGIN, top, _WIDTH - 2 * _MARGIN, _LINE + 6, None, (heading,)))
        shapes += chart.shapes(top + _LINE + 10, kinds, ends)
    return shapes, math.ceil(max(shape.top + shape.height for shape in shapes) + _MARGIN)


def _palettes() -> tuple[dict[str, str], dict[str, str]]:
    """Return name → colour of pages, in light and in dark."""
    light, dark = read_resource(STYLE).split("@media", 2)[:2]
    find = re.compile(r"--([\w-]+): (#[0-9a-f]{3,6})")
    return dict(find.findall(light)), dict(find.findall(dark))


def _visible_text(text: str, width: float) -> str:
    """Return as much of a text as fits into a width in pixels."""
    letters = int((width - 6) / _LETTER)
    return text if len(text) <= letters else f"{text[: letters - 1]}…" if letters > 2 else ""


def draw_svg(data: Mapping[str, Any], headings: Sequence[str]) -> str:
    """Draw the modules of models as an SVG, with width and colour of their page; light or dark as its reader.

    Args:
        data: Data of the page.
        headings: Heading of each model.
    """
    shapes, height = _draw(data, headings)

    def rules(palette: Mapping[str, str]) -> str:
        fills = "".join(f".c{number}{{fill:{palette[f'c{number}']}}}" for number in range(_COLOURS + 1))
        return (
            f".page{{fill:{palette['page']}}}text{{fill:{palette['ink']}}}.box{{stroke:{palette['page']}}}"
            f".cold{{fill:{palette['cold']}}}.hot{{fill:{palette['hot']}}}{fills}"
        )

    def drawn(shape: _Shape) -> str:
        place = f'x="{shape.left:.1f}" y="{shape.top:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
        texts = "".join(
            f'<text x="4" y="{_LINE * (number + 1)}">{escape(text)}</text>'
            for number, line in enumerate(shape.lines)
            if (text := _visible_text(line, shape.width))
        )
        boxes = ""
        if isinstance(shape.fill, float):
            boxes = f'<rect class="box cold" {size}/><rect class="box hot" fill-opacity="{shape.fill:.2f}" {size}/>'
        elif shape.fill is not None:
            boxes = f'<rect class="box c{shape.fill}" {size}/>'
        title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        return f"<svg {place}>{boxes}{texts}{title}</svg>"

    light, dark = map(rules, _palettes())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f"<style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>\n' + "\n".join(map(drawn, shapes)) + "\n</svg>\n"
    )


def draw_png(data: Mapping[str, Any], headings: Sequence[str]) -> bytes:
    """Draw the modules of models as a light PNG; see :func:`draw_svg`.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    shapes, height = _draw(data, headings)
    palette = {name: ImageColor.getrgb(colour) for name, colour in _palettes()[0].items()}
    image = Image.new("RGB", (_WIDTH * _SCALE, height * _SCALE), palette["page"])
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(12 * _SCALE)
    for shape in shapes:
        left, top = shape.left * _SCALE, shape.top * _SCALE
        if shape.fill is not None:
            part = shape.fill
            mixed = tuple(
                round(cold + part * (hot - cold)) for cold, hot in zip(palette["cold"], palette["hot"], strict=True)
            )
            fill = mixed if isinstance(part, float) else palette[f"c{part}"]
            corner = (left + shape.width * _SCALE, top + shape.height * _SCALE)
            canvas.rectangle((left, top, *corner), fill=fill, outline=palette["page"])
        for number, line in enumerate(shape.lines):
            place = (left + 4 * _SCALE, top + (_LINE * number + 2) * _SCALE)
            text = _visible_text(line, shape.width).replace("×", "x")  # the font lacks the sign
            canvas.text(place, text, fill=palette["ink"], font=font)
    written = io.BytesIO()
    image.save(written, format="PNG", optimize=True)
    return written.getvalue()
