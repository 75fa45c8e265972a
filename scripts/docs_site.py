"""Hook of mkdocs that generates the pages without a file in docs/.

README, changelog and the other documents beside docs/ become pages, notebooks become Markdown, and the reference of
the Python interface is generated from the code. Links between files of the repository become links between pages.

    python scripts/docs_site.py build/site    # fails if a page of a built site requests another host
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(REPOSITORY / "scripts"))

from notebook_outputs import read_notebook, source_of  # noqa: E402

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Documents beside docs/ to their pages."""
LICENCE = ("LICENSE", "licence.md")
EXAMPLES = "docs/reference/python.md"
"""Document that the reference of the Python interface begins with."""
_API_PAGE = "reference/api.md"

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
_PICTURE = "pictures/package.svg"
_CAPTION = "Each subpackage imports only those drawn below it. `docs/architecture.md` shows the imports as arrows."
_API_GROUPS = {
    "Make a model": (
        "export_model", "build_model", "refit_model", "optimize_model", "quantize_model", "compile_model",
        "tune_model", "sweep_models",
    ),
    "Run a model": ("run_model", "WinMLAutoModel"),
    "Judge a model": (
        "profile_model", "compare_models", "verify_model", "diff_models", "evaluate_model", "inspect_model",
        "quantization_sensitivity",
    ),
    "Take a model apart": ("extract_modules", "retag_model"),
}  # fmt: skip
"""What stands first, in this order; every other name follows."""


def pages_of_notebooks() -> dict[str, str]:
    """Return path below the repository to page, of every notebook."""
    return {
        path.relative_to(REPOSITORY).as_posix(): path.relative_to(DOCS).with_suffix(".md").as_posix()
        for path in sorted(DOCS.glob("notebooks/*.ipynb"))
    }


def notebook_as_markdown(path: Path) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    parts = []
    for cell in read_notebook(path)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell))
            continue
        parts.append(f"```python\n{source_of(cell)}\n```")
        parts += [_output_as_markdown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _output_as_markdown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f"<div>{''.join(data['image/svg+xml'])}</div>"
    text = "".join(output.get("text") or data["text/plain"])
    return f'```{{ .text .output title="printed" }}\n{text.rstrip()}\n```'


def python_reference() -> str:
    """Return the page of all public names."""
    import winml.modelkit

    names = [name for name in winml.modelkit.__all__ if not name.startswith("__")]
    former = [name for name in names if name not in dir(winml.modelkit)]
    grouped = {name for group in _API_GROUPS.values() for name in group}
    errors = [name for name in names if name.endswith("Error")]
    others = [name for name in names if name not in (*grouped, *errors, *former)]
    groups = {**_API_GROUPS, "Other names": tuple(others), "Errors": tuple(errors), "Former names": tuple(former)}
    sections = [
        f"## {title}\n\n" + "\n\n".join(f"::: winml.modelkit.{name}" for name in members)
        for title, members in groups.items()
    ]
    examples = (REPOSITORY / EXAMPLES).read_text(encoding="utf-8").rstrip()
    return "\n\n".join([examples, *sections]) + "\n"


def made_pages() -> dict[str, str]:
    """Return every page that is no file of docs/: its path to its Markdown."""
    pages = {page: (REPOSITORY / name).read_text(encoding="utf-8") for name, page in OUTSIDE.items()}
    pages |= {page: notebook_as_markdown(REPOSITORY / name) for name, page in pages_of_notebooks().items()}
    source, page = LICENCE
    pages[page] = f"# Licence\n\n```text\n{(REPOSITORY / source).read_text(encoding='utf-8')}```\n"
    pages[_API_PAGE] = python_reference()
    return pages


def site_path(name: str) -> str | None:
    """Return where a file of the repository is in the site; None where it is not."""
    moved = {**OUTSIDE, LICENCE[0]: LICENCE[1], **pages_of_notebooks(), EXAMPLES: _API_PAGE}
    if name in moved:
        return moved[name]
    return name.removeprefix("docs/") if name.startswith("docs/") and (REPOSITORY / name).is_file() else None


def with_site_links(markdown: str, page: str) -> str:
    """Return the text of a page with its links turned from files of the repository to pages of the site.

    A link to a file that the site does not have becomes its text.
    """
    sources = {target: name for name, target in {**OUTSIDE, **pages_of_notebooks()}.items()}
    folder = Path(sources.get(page, f"docs/{page}")).parent.as_posix()

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        name = os.path.normpath(f"{folder}/{target}").replace(os.sep, "/")
        found = site_path(name)
        if found is None:
            return text.removeprefix("!")[1:-1]
        return f"{text}({os.path.relpath(found, Path(page).parent).replace(os.sep, '/')}{anchor or ''})"

    return _LINK.sub(replaced, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of docs/."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb") or f"docs/{file.src_uri}" == EXAMPLES]:
        files.remove(file)
    for page, content in made_pages().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001  # mkdocs' signature
    """Replace links by links of the site, and the diagram by the picture of the package."""
    path = page.file.src_uri
    picture = os.path.relpath(_PICTURE, Path(path).parent).replace(os.sep, "/")
    return _MERMAID.sub(
        f"![The subpackages of the package, each above those it may import]({picture})\n\n{_CAPTION}",
        with_site_links(markdown, path),
    )


_ROLE = re.compile(
    r":(?:py:)?(?:func|class|meth|attr|data|mod|exc|obj|const|ref|doc):(?:<code>~?([^<]+)</code>|`~?([^`]+)`)"
)
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_TABLES_OF_OPTIONS = ("reference/verbs.md", "reference/build_config.md")


def without_roles(html: str, names: Container[str]) -> str:
    """Return a page with the roles of docstrings as code, which leads to the entry of a public name.

    Args:
        html: The page.
        names: The public names, each an entry of the reference of the Python interface.
    """

    def replaced(role: re.Match[str]) -> str:
        target = (role[1] or role[2]).strip()
        name = target.removeprefix("winml.modelkit.")
        code = f"<code>{target.rpartition('.')[2]}</code>"
        return f'<a href="#winml.modelkit.{name}">{code}</a>' if name in names else code

    return _ROLE.sub(replaced, html)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001  # mkdocs' signature
    """Turn roles into code, and mark the tables of options for their style."""
    path = page.file.src_uri
    if path == _API_PAGE:
        import winml.modelkit

        html = without_roles(html, winml.modelkit.__all__)
    # In Markdown of GitHub, a pipe in code ends a cell, so pipes are escaped; Markdown of the site needs no escape.
    html = _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
    if path in _TABLES_OF_OPTIONS:
        html = html.replace("<table>", '<div class="options"><table>').replace("</table>", "</table></div>")
    return html


def foreign_requests(site: Path) -> list[str]:
    """Return the requests of a built site to other hosts: scripts, styles, fonts, pictures, frames."""
    fetched = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
    styled = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")
    found = []
    for pattern, kind in ((fetched, "*.html"), (styled, "*.css")):
        for path in sorted(site.rglob(kind)):
            found += [f"{path.relative_to(site)}: {url}" for url in pattern.findall(path.read_text(encoding="utf-8"))]
    return found


if __name__ == "__main__":
    strays = foreign_requests(Path(sys.argv[1]))
    if strays:
        raise SystemExit("pages ask other hosts:\n" + "\n".join(strays))
    print(f"built {sys.argv[1]}: every page works without a network")
