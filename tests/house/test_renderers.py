"""Do renderers read records only, and do records know no renderer?

Whoever renders a result must not be able to compute it anew: a number on a page is the number of the record. A record
that imported a renderer would cost every reader of results the libraries of a page.
"""

from __future__ import annotations

import ast

import pytest

from house.sources import PACKAGE, Module, imports, modules

READ_BY_RENDERERS = {
    "version", "errors", "options", "records", "progress", "words", "metadata_keys", "file_names",
    "hierarchy", "graph", "runtime", "measure", "compare", "inspect", "results", "report",
}  # fmt: skip
"""The leaves, and the rooms whose records a renderer shows. No flow, no verification, no build, nothing that loads."""

RENDERING_LIBRARIES = {"rich", "jinja2", "click"}

DRAWING_LIBRARIES = {"rich", "jinja2", "html", "markdown_it"}

RENDERERS = [module for module in modules() if module.room == "report"]
FORMS = [module for module in RENDERERS if module.name in ("report.terminal", "report.markdown", "report.html")]
SUBJECTS = [module for module in RENDERERS if module not in FORMS]
RECORDS = [module for module in modules() if module.room == "results"]


def _imported_rooms(module: Module) -> set[str]:
    prefix = f"{PACKAGE}."
    return {
        found.target.removeprefix(prefix).split(".")[0]
        for found in imports(module.tree)
        if found.target.startswith(prefix)
    }


def _imported_libraries(module: Module) -> set[str]:
    return {found.target.split(".")[0] for found in imports(module.tree)}


def test_both_rooms_are_read() -> None:
    """An empty list of modules would pass every test below."""
    assert len(RENDERERS) > 5
    assert len(RECORDS) > 5


@pytest.mark.parametrize("module", RENDERERS, ids=lambda module: module.name)
def test_renderer_imports_records_only(module: Module) -> None:
    """No flow, verification, build or loading code, inside functions and for types neither."""
    assert set() == _imported_rooms(module) - READ_BY_RENDERERS


@pytest.mark.parametrize("module", RECORDS, ids=lambda module: module.name)
def test_record_imports_no_renderer(module: Module) -> None:
    """Neither a module of report/ nor a library that draws."""
    assert "report" not in _imported_rooms(module)
    assert set() == _imported_libraries(module) & RENDERING_LIBRARIES


@pytest.mark.parametrize("module", FORMS, ids=lambda module: module.name)
def test_form_reads_the_document_only(module: Module) -> None:
    """What renders for a terminal, Markdown or HTML knows no subject: neither a record nor a unit of its own."""
    prefix = f"{PACKAGE}."
    ours = {found.target.removeprefix(prefix) for found in imports(module.tree) if found.target.startswith(prefix)}
    strays = [name for name in ours if not name.startswith(("report.document", "words."))]
    assert [] == strays


@pytest.mark.parametrize("module", SUBJECTS, ids=lambda module: module.name)
def test_subject_knows_no_form(module: Module) -> None:
    """It lists its columns once, for every form: no library that draws, and no markup."""
    assert set() == _imported_libraries(module) & DRAWING_LIBRARIES
    rendered = {found.target for found in imports(module.tree) if found.target.startswith(f"{PACKAGE}.report.")}
    assert [] == [name for name in rendered if name.split(".")[3] in {form.name.split(".")[1] for form in FORMS}]


def test_rules_see_what_they_forbid() -> None:
    """Each form draws with a library of its own, which a test that reads no import would not see."""
    assert {"report.terminal", "report.markdown", "report.html"} == {module.name for module in FORMS}
    libraries = {name for module in FORMS for name in _imported_libraries(module)}
    assert {"rich", "jinja2"} <= libraries & DRAWING_LIBRARIES


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name or PACKAGE)
def test_messages_go_through_the_function_that_makes_them_printable(module: Module) -> None:
    """No module writes to stderr by itself; a verb calls ``tell``."""
    own = {"cli._streams"}
    calls = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"click.echo", "print", "sys.stderr.write", "rich.print"}
        and (ast.unparse(node.func) != "click.echo" or any(keyword.arg == "err" for keyword in node.keywords))
    ]
    assert [] == ([] if module.name in own else calls)
