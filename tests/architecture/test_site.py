"""Pages and links of the documentation site, without a build of the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeGuard

import click
import pytest

import winml.modelkit
from architecture.sources import REPOSITORY
from docs_site import (
    DOCS,
    EXAMPLES,
    foreign_requests,
    made_pages,
    notebook_as_markdown,
    python_reference,
    site_path,
    with_site_links,
    without_roles,
)
from package_picture import PICTURE, package
from winml.modelkit.cli._help import grouped_options
from winml.modelkit.cli.main import COMMANDS, VERBS

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def _pages() -> dict[str, str]:
    files = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    del files[EXAMPLES.removeprefix("docs/")]  # the page of the Python interface begins with it
    return {**files, **made_pages()}


def test_navigation_holds_every_page_once() -> None:
    """Every page is listed in mkdocs.yml once."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(_pages()) == sorted(re.findall(r"[\w/-]+\.md", navigation))


def test_title_of_a_page_is_its_name_in_the_navigation() -> None:
    """A page without a name in the navigation is listed by its title."""
    pages = _pages()
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    names = {page: name for name, page in re.findall(r"- ([^:\n]+): ([\w/-]+\.md)", navigation)}
    titles = {page: text.partition("# ")[2].partition("\n")[0] for page, text in pages.items()}
    assert len(names) > 30
    assert names == {page: titles[page] for page in names}


def test_roles_of_docstrings_become_code() -> None:
    """A role of a public name becomes a link to its entry on the page; a role of a method becomes the name alone."""
    html = "see :func:<code>winml.modelkit.compare_models</code> and :meth:`~a.B.c`, not a:b"
    link = '<a href="#winml.modelkit.compare_models"><code>compare_models</code></a>'
    assert f"see {link} and <code>c</code>, not a:b" == without_roles(html, {"compare_models"})


def test_links_of_pages_lead_to_pages_or_files_of_the_site() -> None:
    """The links are checked after links to files of the repository were converted."""
    pages = _pages()
    lost = [
        f"{page}: {link}"
        for page, text in pages.items()
        for link in _LINK.findall(with_site_links(text, page))
        if (target := (Path("/") / Path(page).parent / link)).as_posix()
        and (path := str(target.resolve().relative_to("/"))) not in pages
        and not (DOCS / path).is_file()
    ]
    assert [] == lost


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](docs/guide/export.md#b)", "[a](guide/export.md#b)"),
        ("guide/export.md", "[a](../reference/formats.md)", "[a](../reference/formats.md)"),
        ("architecture.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("benchmarks.md", "![a](../docs/pictures/time_by_module.png)", "![a](pictures/time_by_module.png)"),
        ("guide/export.md", "[code](../../src/winml)", "code"),
        ("index.md", "[a](https://onnx.ai)", "[a](https://onnx.ai)"),
    ],
)
def test_link_of_the_repository_becomes_one_of_the_site(page: str, link: str, expected: str) -> None:
    """A link to a file that the site does not have becomes plain words."""
    assert expected == with_site_links(link, page)


def test_a_file_outside_of_the_documents_is_not_in_the_site() -> None:
    """Only documents have a path on the site."""
    assert site_path("src/winml/modelkit/errors.py") is None
    assert "index.md" == site_path("README.md")


def _is_listed(parameter: click.Parameter) -> TypeGuard[click.Option]:
    """Return True if a parameter is an option that the help lists."""
    return isinstance(parameter, click.Option) and not parameter.hidden


def test_reference_of_commands_has_every_option_of_every_verb() -> None:
    """The options stand in the groups of the verb's help."""
    page = (DOCS / "reference" / "verbs.md").read_text(encoding="utf-8")
    for verb in COMMANDS:
        section = page.partition(f"## winml {verb}\n")[2].partition("\n## ")[0]
        command = VERBS[verb]
        inner = command.commands.values() if isinstance(command, click.Group) else ()
        options = [option for found in (command, *inner) for option in found.params if _is_listed(option)]
        names = [re.search(rf"`{re.escape(option.opts[-1])}[` ]", section) for option in options]
        assert None not in names
        groups = grouped_options(command, click.Context(command, **command.context_settings))
        assert [*groups] == re.findall(r"^### (\w[\w ]*)$", re.sub(r"### winml.*", "", section), re.MULTILINE)


def test_reference_of_python_has_every_public_name() -> None:
    """Each public name has one entry for mkdocstrings."""
    entries = re.findall(r"^::: winml\.modelkit\.(\w+)$", python_reference(), re.MULTILINE)
    assert sorted(name for name in winml.modelkit.__all__ if not name.startswith("__")) == sorted(entries)


def test_architecture_picture_equals_the_output_of_its_script() -> None:
    """``make documents`` draws the picture anew."""
    assert package() == PICTURE.read_text(encoding="utf-8")


def test_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    """A text output becomes text, and a picture becomes an image."""
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [{"data": {"text/plain": ["2"]}}, {"data": {"image/svg+xml": ["<svg/>"], "text/plain": ["x"]}}],
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = notebook_as_markdown(tmp_path / "a.ipynb")
    assert page.startswith("# Title\n\n```python\n1 + 1\n```\n")
    assert "\n2\n```\n" in page
    assert page.endswith("<div><svg/></div>\n")


def test_requests_to_other_hosts_are_detected(tmp_path: Path) -> None:
    """Links that a reader may follow are not requests."""
    (tmp_path / "a.html").write_text('<a href="https://onnx.ai">a</a><script src="https://cdn.example/x.js"></script>')
    (tmp_path / "a.css").write_text(
        'body { background: url("a.png") } @font-face { src: url(https://fonts.example/x) }'
    )
    assert ["a.html: https://cdn.example/x.js", "a.css: https://fonts.example/x"] == foreign_requests(tmp_path)
