"""Draws the rooms of the package, each above those it may import, as the picture of the documentation.

python scripts/house_picture.py
"""

from __future__ import annotations

import textwrap
from html import escape

from architecture_picture import REPOSITORY, Room, existing_groups, read_rooms

PICTURE = REPOSITORY / "docs" / "pictures" / "house.svg"

_WIDTH, _GAP, _ACROSS = 980, 8, 5
_TALL, _FLAT = 74, 34
_LINE_LENGTH = 27
"""Characters of a question in a box of a fifth of the width, by eye."""


def house() -> str:
    """Return the picture as SVG: one row for each step of the order, the room that imports all others on top."""
    rooms = read_rooms()
    parts: list[str] = []
    top = _GAP
    for group in reversed(existing_groups()):
        members = [rooms[name] for name in group]
        for start in range(0, len(members), _ACROSS):
            row = members[start : start + _ACROSS]
            height = _FLAT if len(members) == 1 else _TALL
            width = (_WIDTH - _GAP) / len(row) - _GAP
            parts += [_box(room, _GAP + number * (width + _GAP), top, width, height) for number, room in enumerate(row)]
            top += height + _GAP
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" {style}>\n'
        f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _box(room: Room, left: float, top: float, width: float, height: float) -> str:
    fill = "#c5cae9" if room.is_folder else "#eceff1"
    question = escape(room.question.replace("``", ""))
    name = f'<text x="{left + 10:.0f}" y="{top + 21:.0f}" font-weight="bold" fill="#1a237e">{room.label}</text>'
    if height == _FLAT:
        words = f'<text x="{left + 150:.0f}" y="{top + 21:.0f}" fill="#37474f">{question}</text>'
    else:
        lines = textwrap.wrap(room.question, _LINE_LENGTH, max_lines=3, placeholder=" …")
        small = f'x="{left + 10:.0f}" font-size="11" fill="#37474f"'
        words = "".join(
            f'<text {small} y="{top + 38 + 14 * number:.0f}">{escape(line)}</text>' for number, line in enumerate(lines)
        )
    box = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height}" rx="4"'
    return f'<g><title>{question}</title><rect {box} fill="{fill}"/>{name}{words}</g>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(house(), encoding="utf-8", newline="\n")
