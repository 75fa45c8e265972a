"""Do renderers read records only, and do records know no renderer?

Whoever renders a result must not be able to compute it anew: a number on a page is the number of the record. A record
that imported a renderer would cost every reader of results the libraries of a page.
"""

from __future__ import annotations

import ast
import re

import pytest

from house.sources import PACKAGE, Module, imports, modules

READ_BY_RENDERERS = {
    "version", "errors", "options", "records", "progress", "words", "metadata_keys", "file_names",
    "tags", "onnx", "ort", "report",
}  # fmt: skip
"""The leaves, and the rooms about graphs. Of a subject, its records and tables."""

SHOWN_TOO = {
    "compare.fidelity", "compare.outputs", "compare.words", "inspect.onnx_inspection",
    "inspect.provider_fit",
    "profile.latency", "profile.module_profile", "profile.statistics",
}  # fmt: skip
"""Modules of subjects that have a record, or words for one, beside the work."""

RENDERING_LIBRARIES = {"rich", "jinja2", "click"}

DRAWING_LIBRARIES = {"rich", "jinja2", "html", "markdown_it"}

RECORDS = [module for module in modules() if re.search(r"(^|[._])records$", module.name) and "." in module.name]
SUBJECTS = [module for module in modules() if re.fullmatch(r"\w+\.(\w+_)?table", module.name)]
FORMS = [module for module in modules() if module.name in ("report.terminal", "report.markdown", "report.html")]
RENDERERS = [
    *FORMS,
    *SUBJECTS,
    *(module for module in modules() if module.name in ("report.document", "report.module_tree")),
]


def _imported(module: Module) -> set[str]:
    """Return the modules of ours that a module imports."""
    names = {each.name for each in modules()}
    found = (
        target.target.removeprefix(f"{PACKAGE}.")
        for target in imports(module.tree)
        if target.target.startswith(f"{PACKAGE}.")
    )
    return {name if name in names else name.rpartition(".")[0] for name in found}


def _imported_libraries(module: Module) -> set[str]:
    return {found.target.split(".")[0] for found in imports(module.tree)}


def test_both_rooms_are_read() -> None:
    """An empty list of modules would pass every test below."""
    assert len(RENDERERS) > 5
    assert len(RECORDS) > 5


@pytest.mark.parametrize("module", RENDERERS, ids=lambda module: module.name)
def test_renderer_imports_records_only(module: Module) -> None:
    """No work, verification, build or loading code, inside functions and for types neither."""
    shown = {each.name for each in (*RECORDS, *SUBJECTS)} | SHOWN_TOO
    strays = {name for name in _imported(module) - shown if name.split(".")[0] not in READ_BY_RENDERERS}
    assert set() == strays


@pytest.mark.parametrize("module", RECORDS, ids=lambda module: module.name)
def test_record_imports_no_renderer(module: Module) -> None:
    """Neither a table, nor a module of report/, nor a library that draws."""
    assert set() == _imported(module) & {each.name for each in RENDERERS}
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
