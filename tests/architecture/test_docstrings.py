"""Phrasing of the docstrings of the package, and existence of the names in them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from architecture.sources import functions, modules

MOST_QUESTION_WORDS = 0.03
"""Largest share of docstrings with a question word as a noun. Chosen: 0.004 to 0.06 in comparable libraries."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_OPENERS = re.compile(r"(?:Say whether|Return what|What|Which|Of|Where|Let|Pass a)\b")
_QUESTION_WORDS = re.compile(r"\b(?:what|whatever|whoever)\b|(?:^|[.,;:(] *)who\b", re.IGNORECASE)
_POINTING = frozenset(
    re.findall(
        r"\w+",
        "it its they them their that those these this which what one ones who whose such so there whatever whoever "
        "others other another both none",
    )
)
_MOST_POINTING = 0.25
"""Largest share of pointing words in a sentence with at least five such words."""
_QUOTED = re.compile(r"(?<!`)`{1,2}([^`]+)`{1,2}(?!`)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\(\))?")
_FOREIGN = frozenset(
    {"Add_123_dim_0", "ConvBnFusion_W_conv1", "LABEL_0", "LABEL_1", "QNN_COMMON_ERROR_MEM_ALLOC", "_data_1"}
    | {"bos_token", "expert_3", "height_2", "past_conv", "present_conv", "quantize_dynamic", "fuse_for_onnxruntime"}
    | {"use_attribute_docstrings", "_kcycles"}
)
"""Examples of values, and names of libraries that our code does not spell."""


class Docstring(NamedTuple):
    """The docstring of a module, class or function."""

    folder: str
    where: str
    text: str
    owner: _Documented


def _docstrings() -> Iterator[Docstring]:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
                where = f"{module.name or '__init__'}: {getattr(node, 'name', 'module')}"
                yield Docstring(module.folder, where, text, node)


def points_only(sentence: str) -> bool:
    """Return True if a quarter of the words, and at least five, are pronouns and other pointing words."""
    words = re.findall(r"[A-Za-z']+", sentence)
    pointing = sum(word.lower() in _POINTING for word in words)
    return pointing >= 5 and pointing / len(words) >= _MOST_POINTING


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Neither with a question word nor with a preposition."""
    assert [] == [f"{doc.where}: {doc.text.splitlines()[0]}" for doc in _docstrings() if _OPENERS.match(doc.text)]


def test_sentences_contain_nouns_instead_of_pronouns() -> None:
    """A sentence of pronouns is understood only by a reader of the body."""
    assert [] == [
        f"{doc.where}: {sentence}"
        for doc in _docstrings()
        for sentence in re.split(r"(?<=[.;:])\s+", doc.text)
        if points_only(sentence)
    ]


def test_question_words_are_no_nouns() -> None:
    """A question word as a noun says less than a noun (*kind of node*). The share is held for each package."""
    texts: dict[str, list[Docstring]] = {}
    for docstring in _docstrings():
        texts.setdefault(docstring.folder, []).append(docstring)
    found = {folder: [doc for doc in docs if _QUESTION_WORDS.search(doc.text)] for folder, docs in texts.items()}
    assert {} == {
        folder: [f"{doc.where}: {doc.text.splitlines()[0]}" for doc in docs]
        for folder, docs in found.items()
        if len(docs) > MOST_QUESTION_WORDS * len(texts[folder])
    }


def _spelled_names() -> set[str]:
    """Return all identifiers of the package, of its paths, and the words of its strings other than docstrings."""
    names: set[str] = set()
    for module in modules():
        names.update(module.name.split("."))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, (ast.arg, ast.keyword)):
                names.add(node.arg or "")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.update(node.name.split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                names.update(re.findall(r"\w+", node.value))
    return names


def test_quoted_names_exist() -> None:
    """A backquoted name with an underscore is an identifier or a string of the code."""
    names = _spelled_names() | _FOREIGN
    assert [] == [
        f"{doc.where}: {quoted}"
        for doc in _docstrings()
        for quoted in _QUOTED.findall(doc.text)
        if _IDENTIFIER.fullmatch(quoted)
        and not all(name in names for name in quoted.rstrip("()").split(".") if "_" in name)
    ]


def test_documented_arguments_are_parameters() -> None:
    """Each entry of `Args:` is a parameter of the function, or of the class's constructor."""
    wrong = []
    for module in modules():
        for name, function in functions(module.tree):
            section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", ast.get_docstring(function) or "", re.MULTILINE)
            entries = re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", section[1], re.MULTILINE) if section else []
            arguments = function.args
            parameters = Counter(
                argument.arg
                for argument in (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    *filter(None, (arguments.vararg, arguments.kwarg)),
                )
            )
            wrong += [f"{module.name}: {name}: {entry}" for entry in entries if entry not in parameters]
    assert [] == wrong


@pytest.mark.parametrize(
    ("sentence", "points"),
    [
        ("What it is that those who passed it want of this.", True),
        ("Return the nodes that read a weight of the module.", False),
        ("It is this.", False),
    ],
)
def test_pointing_sentences_are_recognized(sentence: str, points: bool) -> None:
    """A sentence points if at least five words, and a quarter of all, are pointing words."""
    assert points is points_only(sentence)
