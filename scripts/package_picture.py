"""Draws the picture of the documentation: every subpackage above the subpackages that it may import.

python scripts/package_picture.py
"""

from __future__ import annotations

from html import escape

from architecture_picture import REPOSITORY, Subpackage, read_subpackages

PICTURE = REPOSITORY / "docs" / "pictures" / "package.svg"

_WIDTH, _GAP, _HEIGHT = 980, 8, 34


def package() -> str:
    """Return the picture as SVG: a row for each subpackage, in the order of imports from bottom to top."""
    subpackages = read_subpackages()
    parts: list[str] = []
    top = _GAP
    for subpackage in reversed(subpackages.values()):
        parts.append(_box(subpackage, _GAP, top))
        top += _HEIGHT + _GAP
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" {style}>\n'
        f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _box(subpackage: Subpackage, left: float, top: float) -> str:
    fill = "#c5cae9" if subpackage.is_folder else "#eceff1"
    responsibility = escape(subpackage.responsibility.replace("``", ""))
    name = f'<text x="{left + 10:.0f}" y="{top + 21:.0f}" font-weight="bold" fill="#1a237e">{subpackage.label}</text>'
    words = f'<text x="{left + 150:.0f}" y="{top + 21:.0f}" fill="#37474f">{responsibility}</text>'
    box = f'x="{left:.0f}" y="{top:.0f}" width="{_WIDTH - 2 * _GAP}" height="{_HEIGHT}" rx="4"'
    return f'<g><title>{responsibility}</title><rect {box} fill="{fill}"/>{name}{words}</g>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(package(), encoding="utf-8", newline="\n")
