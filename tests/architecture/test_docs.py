"""Statements of the documents about the code."""

from __future__ import annotations

import re

import click
import pytest
from PIL import Image

import winml.modelkit
from architecture.sources import REPOSITORY, defined_names, modules, package_folder, repository_files
from architecture.test_layers import ORDER
from architecture.test_private_seams import SEAMS
from winml.modelkit.cli.main import VERBS

_CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
_WORDS = REPOSITORY / "docs" / "words.md"
_CODE = re.compile(r"``.*?``|`[^`]*`|'[^']*'|\"[^\"]*\"", re.DOTALL)
_REMARKS = {"NOTE", "TODO"}
"""Remarks to the reader of a comment, which are no abbreviations."""
_ACRONYM = re.compile(r"\b[A-Z][A-Z0-9]+s?\b(?![_.(/])")


def _documents() -> list[str]:
    documents = (path.relative_to(REPOSITORY) for path in repository_files() if path.suffix == ".md")
    return [str(path) for path in documents if len(path.parts) == 1 or path.parts[0] == "docs"]


def test_contributing_lists_the_order_of_subpackages() -> None:
    """The arrow line names the subpackages that exist, in the order the layers test enforces."""
    there = {module.folder for module in modules()}
    assert " → ".join(subpackage for subpackage in ORDER if subpackage in there) in _CONTRIBUTING.read_text(
        encoding="utf-8"
    )


def test_make_commands_in_documents_are_targets() -> None:
    """Every ``make`` command in a document exists."""
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {
        target
        for document in _documents()
        for target in re.findall(
            r"(?:^ *|`|&& )make (?:[A-Z]+=\S+ )*([\w-]+)",
            (REPOSITORY / document).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    }
    assert {"demo", "test"} <= shown
    assert set() == shown - targets


def test_winml_commands_in_documents_use_real_options() -> None:
    """Every ``winml VERB --option`` in a document is an option of the verb."""
    unknown = []
    for document in _documents():
        text = (REPOSITORY / document).read_text(encoding="utf-8").replace("\\\n", " ")
        for verb, rest in re.findall(r"(?:^[ $]*|`)winml (\w+)([^`\n]*)", text, re.MULTILINE):
            command = VERBS[verb]
            if isinstance(command, click.Group) and (
                inner := command.commands.get(rest.split()[0] if rest.split() else "")
            ):
                command = inner
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
            used = re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)
            unknown += [f"{document}: winml {verb} {option}" for option in used if option not in known]
    assert [] == unknown


def test_acronyms_in_docstrings_are_in_the_table_of_words() -> None:
    """The table of words spells out each capital abbreviation of a docstring."""
    spelled = set(re.findall(r"^\| ([A-Z][A-Z0-9]+) \|", _WORDS.read_text(encoding="utf-8"), re.MULTILINE))
    constants = {name for module in modules() for name in defined_names(module)}
    used = {
        word.removesuffix("s")
        for module in modules()
        for word in _ACRONYM.findall(_CODE.sub("", module.docstring))
        if word not in constants and word not in _REMARKS
    }
    assert set() == used - spelled


def test_table_of_words_gives_each_acronym_once() -> None:
    """An acronym has one meaning."""
    acronyms = re.findall(r"^\| ([A-Z][A-Z0-9]+) \|", _WORDS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(set(acronyms)) == acronyms


def test_changelog_version_is_the_package_version() -> None:
    """The newest heading of the changelog is the version of the package."""
    versions = re.findall(
        r"^## (\d+\.\d+\.\d+)", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert winml.modelkit.__version__ == versions[0]


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "docs" / "pictures").glob("*.png")))
def test_picture_of_a_report_is_of_the_package_version(name: str) -> None:
    """``scripts/report_pictures.py`` draws the reports again, and signs them with the version."""
    with Image.open(REPOSITORY / "docs" / "pictures" / name) as picture:
        assert f"winml-modelkit {winml.modelkit.__version__}" == picture.info.get("Software")


def test_changelog_fragments_are_named_after_their_issue() -> None:
    """Each fragment is named ``NNN.change.md`` (or a sibling kind) and is not empty."""
    fragments = [path for path in repository_files() if path.parent.name == "changelog.d" and path.name != "README.md"]
    assert [] == [
        p.name for p in fragments if not re.fullmatch(r"\d+\.(change|breaking|deprecation|highlight)\.md", p.name)
    ]
    assert [] == [path.name for path in fragments if not path.read_text(encoding="utf-8").strip()]


@pytest.mark.parametrize("document", _documents())
def test_relative_links_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [] == [link for link in links if not (path.parent / link).exists()]


def test_decisions_are_listed_in_their_index() -> None:
    """The index has every decision."""
    folder = REPOSITORY / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [] == [path.name for path in sorted(folder.glob("[0-9]*.md")) if f"({path.name})" not in index]


def test_private_seams_are_explained_in_their_decision() -> None:
    """The page has a row for each file with private names of libraries, and the row has the tests of these names."""
    text = (REPOSITORY / "docs" / "decisions" / "0004-private-seams.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)\.py` \| .+? \| .+? \| (.+?) \|$", text, re.MULTILINE)
    explained = {file.replace("/", "."): set(re.findall(r"`(tests/[\w/]+\.py)`", tests)) for file, tests in rows}
    assert explained == {
        module: {test.partition("::")[0] for test in seams.values()} for module, seams in SEAMS.items()
    }


def test_package_is_marked_as_typed() -> None:
    """Type checkers of users read our annotations."""
    assert (package_folder() / "py.typed").is_file()


def test_namespace_package_has_no_init() -> None:
    """``winml`` is shared between distributions: an ``__init__`` there would hide their modules."""
    assert not (package_folder().parent / "__init__.py").exists()
