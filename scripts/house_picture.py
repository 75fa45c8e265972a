"""Draws the rooms of the package, each above those it may import, as the picture of the documentation.

python scripts/house_picture.py
"""

from __future__ import annotations

from html import escape

from architecture_picture import REPOSITORY, Room, read_rooms

PICTURE = REPOSITORY / "docs" / "pictures" / "house.svg"

_WIDTH, _GAP, _HEIGHT = 980, 8, 34


def house() -> str:
    """Return the picture as SVG: a row for each room, the one that imports all others on top."""
    rooms = read_rooms()
    parts: list[str] = []
    top = _GAP
    for room in reversed(rooms.values()):
        parts.append(_box(room, _GAP, top))
        top += _HEIGHT + _GAP
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" {style}>\n'
        f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _box(room: Room, left: float, top: float) -> str:
    fill = "#c5cae9" if room.is_folder else "#eceff1"
    question = escape(room.question.replace("``", ""))
    name = f'<text x="{left + 10:.0f}" y="{top + 21:.0f}" font-weight="bold" fill="#1a237e">{room.label}</text>'
    words = f'<text x="{left + 150:.0f}" y="{top + 21:.0f}" fill="#37474f">{question}</text>'
    box = f'x="{left:.0f}" y="{top:.0f}" width="{_WIDTH - 2 * _GAP}" height="{_HEIGHT}" rx="4"'
    return f'<g><title>{question}</title><rect {box} fill="{fill}"/>{name}{words}</g>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(house(), encoding="utf-8", newline="\n")
