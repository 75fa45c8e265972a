"""The picture of the package against its code, and the files that the picture's document names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, package_folder
from architecture_picture import (
    LINES_STEP,
    Subpackage,
    generated_parts,
    part_of,
    picture,
    read_subpackages,
    reduced_imports,
)

_LINES = re.compile(r" ([\d,]+) \|$", re.MULTILINE)
_SOURCE_FILE = re.compile(r"`((?:\w+/)+\w*(?:\.py)?)`")
"""A file or folder of the package or the repository, as documents name it: with a slash, and without a glob."""

_CREATED = re.compile(r"^Create `([^`]+)`:$", re.MULTILINE)
"""A file that a recipe creates: the file need not exist."""

_PARTS = generated_parts()


def _remove_lines(part: str) -> str:
    return _LINES.sub(" |", part)


def _line_counts(part: str) -> list[int]:
    return [int(found.replace(",", "")) for found in _LINES.findall(part)]


@pytest.mark.parametrize(("document", "name"), _PARTS, ids=lambda value: getattr(value, "stem", value))
def test_generated_part_equals_the_output_of_its_script(document: Path, name: str) -> None:
    """``python scripts/architecture_picture.py --write`` writes the generated parts."""
    expected, actual = _PARTS[document, name], part_of(document.read_text(encoding="utf-8"), name)
    assert _remove_lines(expected) == _remove_lines(actual)


def test_line_counts_of_subpackages_are_approximately_correct() -> None:
    """A count may be off by a fifth or by three hundred lines; an exact count would fail with every commit."""
    document = REPOSITORY / "docs" / "architecture.md"
    actual = _line_counts(part_of(document.read_text(encoding="utf-8"), "subpackages"))
    expected = _line_counts(_PARTS[document, "subpackages"])
    assert len(read_subpackages()) == len(expected) == len(actual)
    assert [] == [
        (was, now) for was, now in zip(actual, expected, strict=True) if abs(was - now) > max(now // 5, 3 * LINES_STEP)
    ]


def test_reduced_imports_omit_transitive_arrows() -> None:
    """The arrow a → c is not drawn beside a → b → c."""
    subpackages = {
        name: Subpackage(name, "", 1, frozenset(imported), is_folder=True)
        for name, imported in (("c", ()), ("b", ("c",)), ("a", ("b", "c")))
    }
    assert {"c": (), "b": ("c",), "a": ("b",)} == reduced_imports(subpackages)


def test_picture_shows_every_subpackage() -> None:
    subpackages = read_subpackages()
    drawn = picture(subpackages)
    assert [] == [
        name
        for name, subpackage in subpackages.items()
        if drawn.count(f'    {name}_subpackage["{subpackage.label}"]\n') != 1
    ]


def _documents_about_code() -> list[str]:
    documents = (REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md"))
    return [str(path.relative_to(REPOSITORY)) for path in documents]


@pytest.mark.parametrize("document", _documents_about_code())
def test_source_files_named_in_documents_exist(document: str) -> None:
    """A document that names ``onnx/stage.py`` or ``cli/`` names a path of the package or the repository."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    named = {found for found in _SOURCE_FILE.findall(text) if found.endswith((".py", "/"))}
    named -= set(_CREATED.findall(text))
    assert [] == sorted(
        name
        for name in named
        if not (package_folder() / name.removeprefix("src/winml/modelkit/")).exists()
        and not (REPOSITORY / name).exists()
    )
