"""Words of names in the code: rows in docs/words.md or docs/guide/words.md, classes of variables, empty words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from architecture.sources import REPOSITORY, modules

MOST_USED = 65
"""Number of nouns that must have a row. Chosen: each of them is in names of about ten files or more."""

_PROGRAMMING = """
    any arg array attribute bool bound bytes callable change child class cls code column console content context
    copy count counts data dict end entry event example exception file flag float for frozenset function get group
    has head index info init int is item iter kind left length level library limit line list main mapping max
    message min ms name none number object order other own parent percent position prefix property re reason right
    row seconds self sequence set stack start state std str suffix table target text thread time total tuple type
    us width
"""
"""Words of Python and of programming in general."""
_PLAIN = """
    add after again all answer as at before by changed check chosen compare declared default described dynamic
    earlier ending external fail failed find first fixed from guess in inner known largest last least listed load loaded
    make missing most named needs new no not of on one only open optimize out overwrite parse prepared present print
    problem random read refuse refused requested resolve resolved running same short show started stored tagged take
    tell to total unknown unused use used waiting what where whole with without worst write written
"""
"""Verbs, adjectives and small words in names such as ``read_subpackages``, ``is_known``, ``named_by``."""
_EMPTY = "asked given passed kept retained said shown displayed told made found taken wanted"
"""Participles that tell how a thing came about, not what the thing is. No name contains them, apart from exceptions."""
_NAMES_WITH_EMPTY_WORDS = {
    "FoundParts": "public, in winml.modelkit.extend",
    "retained_large": "a key in the JSON of a sweep",
    **dict.fromkeys(
        ["displayed", "found", "given", "kept", "passed", "retained", "shown", "taken", "told"], "variables"
    ),
}
"""Name → reason of the exception."""
_LIBRARIES = "click epilog ir json np nn onnx os ort proto torch transformers"
COMMON = frozenset(re.findall(r"\w+", f"{_PROGRAMMING} {_PLAIN} {_EMPTY} {_LIBRARIES}"))
"""Words with no meaning of their own here, or with the meaning known to every reader of Python."""

_CLASS_ROW = re.compile(r"^\| `(\w+)` \| (`.+`) \|$", re.MULTILINE)
_CLASSLESS = {"Any", "object"}
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ROW = re.compile(r"^\| ([a-z][a-z ]*) \|", re.MULTILINE)
_HEADS = {"word", "acronym"}
_IRREGULAR = {"axes": "axis", "indices": "index", "cls": "cls", "as": "as", "has": "has", "ms": "ms", "os": "os"}


def rows_of_words() -> list[str]:
    """Return the first cells of the tables of words, without acronyms."""
    return [row for row in _ROW.findall(_documented_words()) if row not in _HEADS]


def _acronyms() -> list[str]:
    return [acronym.lower() for acronym in re.findall(r"^\| ([A-Z]+) \|", _documented_words(), re.MULTILINE)]


def _documented_words() -> str:
    documents = (REPOSITORY / "docs" / "words.md", REPOSITORY / "docs" / "guide" / "words.md")
    return "\n".join(document.read_text(encoding="utf-8") for document in documents)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name of a function, class, parameter, variable or field in a file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _annotated_names(tree: ast.Module) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield name, line and annotation of every annotated parameter, variable and field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.lineno, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno, node.annotation


def _classes_of(annotation: ast.expr) -> set[str]:
    """Return the class names of an annotation; type arguments, type variables, ``Any`` and ``None`` are left out."""
    if isinstance(annotation, ast.BinOp):
        return _classes_of(annotation.left) | _classes_of(annotation.right)
    if isinstance(annotation, ast.Subscript):
        return _classes_of(annotation.value)
    if isinstance(annotation, ast.Constant):
        is_quoted = isinstance(annotation.value, str)
        return _classes_of(ast.parse(annotation.value, mode="eval").body) if is_quoted else set()
    name = ast.unparse(annotation).rpartition(".")[2]
    is_type_variable = re.fullmatch(r"_?T|\w+[a-z]T", name) is not None
    return set() if is_type_variable or name in _CLASSLESS else {"str" if name == "Literal" else name}


def words_in(name: str) -> list[str]:
    """Return the words of a name in snake or camel case, in the singular."""
    return [_singular(word.lower()) for word in _PARTS.findall(name)]


def _singular(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for ending, single in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("shes", "sh"), ("ches", "ch")):
        if word.endswith(ending):
            return word[: -len(ending)] + single
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def used_nouns() -> Counter[str]:
    """Return word → number of files with a name that contains the word, without common words."""
    counts: Counter[str] = Counter()
    for module in modules():
        counts.update({word for name in _defined_names(module.tree) for word in words_in(name)})
    common = {_singular(word) for word in COMMON}
    return Counter({word: count for word, count in counts.items() if word not in common and len(word) > 1})


def test_most_used_nouns_of_the_code_have_a_row() -> None:
    """Each of these nouns has one documented meaning."""
    explained = {_singular(word) for row in (*rows_of_words(), *_acronyms()) for word in row.split()}
    most_used = [word for word, _ in used_nouns().most_common(MOST_USED)]
    assert [] == [word for word in most_used if word not in explained]


def test_each_word_has_one_row() -> None:
    """A word stands for one concept."""
    rows = rows_of_words()
    assert [] == [row for row, count in Counter(rows).items() if count > 1]


def test_formerly_ambiguous_words_have_one_meaning() -> None:
    """Stage, source, scope, origin, record, step and part have a row each."""
    assert {"stage", "source", "scope", "origin", "record", "step", "part"} <= set(rows_of_words())


def test_names_contain_no_empty_participles() -> None:
    """A name says what a thing is."""
    empty = set(_EMPTY.split())
    names = {name for module in modules() for name in _defined_names(module.tree) if empty & set(words_in(name))}
    assert set() == names - set(_NAMES_WITH_EMPTY_WORDS)


def test_documented_variables_have_documented_classes() -> None:
    """A variable of a documented name has one of the classes in its row."""
    allowed = {name: re.findall(r"`(.+?)`", cell) for name, cell in _CLASS_ROW.findall(_documented_words())}
    assert len(allowed) >= 20
    unexpected = [
        f"{module.name}:{line}: {name}: {class_name}"
        for module in modules()
        for name, line, annotation in _annotated_names(module.tree)
        for class_name in _classes_of(annotation)
        if name in allowed and not any(fnmatchcase(class_name, pattern) for pattern in allowed[name])
    ]
    assert [] == unexpected


@pytest.mark.parametrize(
    ("annotation", "classes"),
    [
        ("Path | None", {"Path"}),
        ("'ir.Node'", {"Node"}),
        ("Mapping[str, Any]", {"Mapping"}),
        ("Literal['a', 'b'] | PlanT | object", {"str"}),
    ],
)
def test_classes_of_annotations_are_read(annotation: str, classes: set[str]) -> None:
    """Unions and quoted annotations are resolved; arguments of generic classes are not read."""
    assert classes == _classes_of(ast.parse(annotation, mode="eval").body)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_draw_feeds", ["draw", "feed"]),
        ("ONNXProgram", ["onnx", "program"]),
        ("ModuleStacks", ["module", "stack"]),
        ("axes_by_class", ["axis", "by", "class"]),
    ],
)
def test_names_are_split_into_words(name: str, words: list[str]) -> None:
    """Snake case and camel case are split alike."""
    assert words == words_in(name)
