"""Imports of renderers and of records: renderers import records only, and records import no renderer.

A renderer must not be able to compute a result anew: a number on a page is the number of the record. A record that
imported a renderer would cost every reader of results the libraries of a page.
"""

from __future__ import annotations

import ast
import re

from architecture.sources import PACKAGE, Module, imports, modules

READ_BY_RENDERERS = {
    "version", "errors", "options", "records", "progress", "words", "metadata_keys", "file_names",
    "tags", "onnx", "ort", "report",
}  # fmt: skip
"""Modules of records: subpackages without imports, those about graphs, and the records and tables of a subject."""

SHOWN_TOO = {
    "compare.fidelity", "compare.outputs", "compare.words", "inspect.onnx_inspection",
    "inspect.provider_fit",
    "profile.latency", "profile.module_profile", "profile.statistics",
    "view.titles",
}  # fmt: skip
"""Modules of subjects that have a record, or words for a record, beside the work."""

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


def test_both_subpackages_are_read() -> None:
    """An empty list of modules would pass every test below."""
    assert len(RENDERERS) > 5
    assert len(RECORDS) > 5


def test_renderers_import_records_only() -> None:
    """Renderers import no work, verification, build or loading code, not even inside functions or for types."""
    shown = {each.name for each in (*RECORDS, *SUBJECTS)} | SHOWN_TOO
    assert [] == [
        f"{module.name} imports {name}"
        for module in RENDERERS
        for name in sorted(_imported(module) - shown)
        if name.split(".")[0] not in READ_BY_RENDERERS
    ]


def test_records_import_no_renderer() -> None:
    """Records import neither a table, nor a module of report/, nor a library that draws."""
    renderers = {each.name for each in RENDERERS}
    assert [] == [
        f"{module.name} imports {name}"
        for module in RECORDS
        for name in sorted((_imported(module) & renderers) | (_imported_libraries(module) & RENDERING_LIBRARIES))
    ]


def test_forms_read_the_document_only() -> None:
    """The renderers for a terminal, Markdown or HTML know no subject.

    They import neither a record nor a unit of its own.
    """
    assert [] == [
        f"{module.name} imports {found.target}"
        for module in FORMS
        for found in imports(module.tree)
        if found.target.startswith(f"{PACKAGE}.")
        and not found.target.startswith((f"{PACKAGE}.report.document", f"{PACKAGE}.words."))
    ]


def test_subjects_know_no_form() -> None:
    """A subject lists columns once for every format, and imports neither a drawing library nor markup."""
    forms = tuple(f"{PACKAGE}.{form.name}" for form in FORMS)
    assert [] == [
        f"{module.name} imports {found.target}"
        for module in SUBJECTS
        for found in imports(module.tree)
        if found.target.split(".")[0] in DRAWING_LIBRARIES or found.target.startswith(forms)
    ]


def test_renderer_rules_match_existing_imports() -> None:
    """Each renderer draws with a library of its own; a test that found no imports would miss these libraries."""
    assert {"report.terminal", "report.markdown", "report.html"} == {module.name for module in FORMS}
    libraries = {name for module in FORMS for name in _imported_libraries(module)}
    assert {"rich", "jinja2"} <= libraries & DRAWING_LIBRARIES


def test_messages_pass_the_printable_filter() -> None:
    """No module writes to stderr by itself; a verb calls ``tell``."""
    own = {"cli._streams"}
    assert [] == [
        f"{module.path.name}:{node.lineno} ({module.name}) calls {name}"
        for module in modules()
        if module.name not in own
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and (name := ast.unparse(node.func)) in {"click.echo", "print", "sys.stderr.write", "rich.print"}
        and (name != "click.echo" or any(keyword.arg == "err" for keyword in node.keywords))
    ]
