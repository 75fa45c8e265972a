"""Writes the parts of docs/architecture.md and CONTRIBUTING.md that are made from the code.

The subpackages, their responsibilities and sizes, and a diagram of their imports. The package is read as syntax
trees; none of it is imported.

python scripts/architecture_picture.py [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# The tests know how to read the package and in which order its subpackages stand.
sys.path.insert(0, str(REPOSITORY / "tests"))

from architecture.sources import PACKAGE, imports, modules, subpackage_of  # noqa: E402
from architecture.test_layers import ORDER  # noqa: E402

ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"

LINES_STEP = 100
"""Line counts are rounded to this. Chosen: an exact number would change with every commit."""


@dataclass(frozen=True)
class Subpackage:
    """A folder of the package, or a module beside the folders."""

    name: str
    responsibility: str
    """First line of its docstring."""
    lines: int
    imports: frozenset[str]
    """The subpackages it imports, imports inside functions and for types included."""
    is_folder: bool

    @property
    def label(self) -> str:
        """The name in the file system."""
        return f"{self.name}/" if self.is_folder else f"{self.name}.py"


def read_subpackages() -> dict[str, Subpackage]:
    """Return the subpackages in the order of the layers test; subpackages without imports are first."""
    there = {module.folder for module in modules()}
    return {name: _read_subpackage(name) for name in ORDER if name in there}


def _read_subpackage(name: str) -> Subpackage:
    files = [module for module in modules() if module.folder == name]
    first = next(module for module in files if module.name == name)
    targets = (found.target for module in modules() if module.subpackage == name for found in imports(module.tree))
    subpackages = {subpackage_of(target[len(PACKAGE) + 1 :]) for target in targets if target.startswith(f"{PACKAGE}.")}
    return Subpackage(
        name,
        responsibility=first.docstring.split("\n", 1)[0],
        lines=sum(module.line_count for module in files),
        imports=frozenset(subpackages - {name}),
        is_folder=first.path.name == "__init__.py",
    )


def reduced_imports(subpackages: Mapping[str, Subpackage]) -> dict[str, tuple[str, ...]]:
    """Return the imports of each subpackage, without transitive imports."""
    reach: dict[str, set[str]] = {}
    for name, subpackage in subpackages.items():
        # A subpackage comes after all of its imports, so the reach of the imports is known.
        reach[name] = set(subpackage.imports).union(*(reach[imported] for imported in subpackage.imports))
    return {
        name: tuple(
            imported
            for imported in subpackages
            if imported in subpackage.imports and not any(imported in reach[between] for between in subpackage.imports)
        )
        for name, subpackage in subpackages.items()
    }


def picture(subpackages: Mapping[str, Subpackage]) -> str:
    """Return the subpackages and the arrows between them as a Mermaid diagram, the command at the top."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {_box(name)}["{subpackage.label}"]' for name, subpackage in reversed(list(subpackages.items()))]
    for name, found in reversed(reduced_imports(subpackages).items()):
        lines += [f"    {_box(name)} --> {_box(imported)}" for imported in reversed(found)]
    return "\n".join([*lines, "```"])


def _box(name: str) -> str:
    # "graph" alone is a word of Mermaid's.
    return f"{name}_subpackage"


def subpackage_table(subpackages: Mapping[str, Subpackage]) -> str:
    """Return a Markdown table of the subpackages, their responsibilities and lines."""
    rows = (
        f"| `{subpackage.label}` | {subpackage.responsibility} | {rounded_lines(subpackage.lines):,} |"
        for subpackage in subpackages.values()
    )
    return "\n".join(["| subpackage | responsibility | lines |", "| --- | --- | ---: |", *rows])


def rounded_lines(lines: int) -> int:
    """Return a number of lines as the table shows it.

    >>> rounded_lines(8), rounded_lines(2_949)
    (100, 2900)
    """
    return max(LINES_STEP, round(lines / LINES_STEP) * LINES_STEP)


def order_line() -> str:
    """Return the order of the subpackages in one line."""
    return f"    {' → '.join(read_subpackages())}"


def generated_parts() -> dict[tuple[Path, str], str]:
    """Return document → name of the marked part → its generated text."""
    subpackages = read_subpackages()
    return {
        (ARCHITECTURE, "picture"): picture(subpackages),
        (ARCHITECTURE, "subpackages"): subpackage_table(subpackages),
        (CONTRIBUTING, "order"): order_line(),
    }


def part_of(text: str, name: str) -> str:
    """Return the text between the marks of a part."""
    start, end = _marks(name)
    return text.split(start, 1)[1].split(end, 1)[0].strip("\n")


def with_part(text: str, name: str, content: str) -> str:
    """Return a document with a part in place of the one it has."""
    start, end = _marks(name)
    before, rest = text.split(start, 1)
    return f"{before}{start}\n\n{content}\n\n{end}{rest.split(end, 1)[1]}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: scripts/architecture_picture.py -->", f"<!-- end of {name} -->"


def main() -> None:
    """Print the parts, or write them into the documents."""
    is_written = "--write" in sys.argv[1:]
    for (document, name), content in generated_parts().items():
        if not is_written:
            print(f"{content}\n")
            continue
        text = with_part(document.read_text(encoding="utf-8"), name, content)
        document.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
