"""Selection of modules by a glob over tags, module paths or class names.

Works on any objects with the three attributes. Commands decide how to handle selected modules and their submodules.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.metadata_keys import TREE_KEY
from winml.modelkit.options import load_metadata
from winml.modelkit.tags.address import SEPARATOR, parse_tag

PATH_SEPARATOR = "."
_ANY_PARTS = "**"
_LEAST_SIMILAR = 0.4
"""Chosen: minimum share of common characters (difflib's ratio) for an address to be suggested."""
NEAREST = 5
"""Chosen: number of addresses listed in the error for a selector without a match."""
_MOST_CLASSES = 12
"""Chosen: number of classes listed in that error; a transformer has about as many."""


@dataclass(frozen=True)
class ModuleAddress:
    """The three addresses of a module."""

    path: str
    """Dotted module path; ``""`` is the root."""
    tag: str
    """Tag, such as ``/BertModel/BertEncoder``."""
    class_name: str
    """Class name; ``""`` if unknown."""


@dataclass(frozen=True)
class RecordedModule(ModuleAddress):
    """A module of the tree in the metadata of a file."""

    calls: int | None = None
    """Number of calls in the export, if recorded."""


def recorded_modules(metadata: Mapping[str, str]) -> list[RecordedModule] | None:
    """Return the module tree of a file; ``[]`` without a tree, `None` for a damaged tree."""
    try:
        modules = [
            RecordedModule(str(entry.get("path", "")), entry["tag"], str(entry.get("class", "")), entry.get("calls"))
            for entry in load_metadata(metadata.get(TREE_KEY, "[]"))
        ]
        return modules if all(parse_tag(module.tag) for module in modules) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


_TOKEN = re.compile(r"(?P<stars>\*+)|(?P<one>\?)|\[(?P<not>!?)(?P<set>[^\]]+)\]|.", re.DOTALL)
_AddressT = TypeVar("_AddressT", bound=ModuleAddress)


@dataclass(frozen=True)
class Selector:
    """A glob over module addresses.

    A selector with a slash is matched against tags; a selector without a slash is matched against class names, module
    paths and the last segment of tags, which a tree displays: ``BertLayer.0``. The whole address has to match. The
    separator is the slash in a tag and the dot in a module path and a segment; a class name has none.

    =========  ===================================================================================
    ``*``      any characters but the separator ``**``     any characters; as a whole part of the address, any number of
    parts, none included ``?``      one character but the separator ``[a-c]``  one of these characters, ``[!a-c]`` one
    of the others; the separator never
    =========  ===================================================================================

    Raises:
        UsageError: the text is empty.

    >>> Selector("encoder.layer.*.output").matches(ModuleAddress("encoder.layer.0.output", "/M/Output", "Output"))
    True
    >>> Selector("Output.1").matches(ModuleAddress("encoder.output.1", "/M/Output.1", "Output"))
    True
    >>> Selector("/M/**/Output").matches(ModuleAddress("encoder.layer.0.output", "/M/Output", "Output"))
    True
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise UsageError("the selector is empty", hint=_SELECTOR_HINT)

    def matches(self, module: ModuleAddress) -> bool:
        """Return True if the selector matches the module."""
        if SEPARATOR in self.text:
            return _matches_glob(self.text, module.tag, SEPARATOR)
        segment = module.tag.rpartition(SEPARATOR)[2]
        return (
            _matches_glob(self.text, module.class_name, "")
            or _matches_glob(self.text, module.path, PATH_SEPARATOR)
            or (self._names_a_class() and _matches_glob(self.text, segment, PATH_SEPARATOR))
        )

    def _names_a_class(self) -> bool:
        """Return True if the part before the first dot has no wildcard; ``*.0`` means a path, of any class."""
        return not set(self.text.partition(PATH_SEPARATOR)[0]) & set("*?[")


_SELECTOR_HINT = (
    "A selector is a class name, a module path, a name in the tree or a tag, with the wildcards * and **: "
    "BertAttention, encoder.layer.*.output, BertLayer.0, /BertModel/**/GELUActivation."
)


def select(
    modules: Iterable[_AddressT], selector: str, tag_of: Mapping[str, str] = MappingProxyType({})
) -> list[_AddressT]:
    """Return the modules matched by a selector, in the order of ``modules``.

    Args:
        modules: A module tree, or any records with path, tag and class name.
        selector: Text of a :class:`Selector`.
        tag_of: Node of the graph, such as ``/layer.0/dense/MatMul`` → tag of its module. The error for the name of a
            node states its module, and the error for a module without a tag the option that creates the tag.

    Raises:
        UsageError: the selector is empty or matches no module; the nearest addresses are listed.

    >>> layers = [ModuleAddress(f"layer.{n}", f"/M/Layer.{n}", "Layer") for n in range(3)]
    >>> [module.path for module in select(layers, "layer.[02]")]
    ['layer.0', 'layer.2']
    """
    modules = list(modules)
    glob = Selector(selector)
    selected = [module for module in modules if glob.matches(module)]
    if selected:
        return selected
    if selector in tag_of:
        owner = next((module for module in modules if module.tag == tag_of[selector]), None)
        address = (owner and owner.path) or tag_of[selector]
        raise UsageError(
            f"no module matches {selector!r}, which is a node of the module {address}",
            hint=f"Select the module, with all of its nodes: {escape(address)}.",
        )
    guesses = _nearest_addresses(selector, modules)
    hints = (
        (
            f"Nodes of this module are in the graph, and it has no tag: export the model with {opt.torch_module} all, "
            "which also tags modules of torch.nn."
        )
        if _is_in_names(glob, tag_of)
        else "",
        f"Nearest: {', '.join(guesses)}." if guesses else "",
        _list_classes(selector, modules),
        "" if guesses else _SELECTOR_HINT,
    )
    raise UsageError(f"no module matches {selector!r}", hint=" ".join(filter(None, hints)))


def _is_in_names(glob: Selector, node_names: Iterable[str]) -> bool:
    """Return True if a selector matches a module path in the names of nodes."""
    scopes = {tuple(name.split("/")[1:-1]) for name in node_names if name.startswith("/")}
    paths = {PATH_SEPARATOR.join(scope[:depth]) for scope in scopes for depth in range(1, len(scope) + 1)}
    return any(glob.matches(ModuleAddress(path, "", "")) for path in paths)


def nearest_paths(selector: str, modules: Iterable[ModuleAddress]) -> list[str]:
    """Return the paths most similar to a selector, the most similar first; the root is listed by its tag.

    >>> nearest_paths("layer.7", [ModuleAddress("head", "/M/Head", "Head"), ModuleAddress("layer.1", "/M/L", "L")])
    ['layer.1', 'head']
    """
    paths = [module.path or module.tag for module in modules]
    return sorted(paths, key=lambda path: -difflib.SequenceMatcher(None, selector, path).ratio())[:NEAREST]


def escape(text: str) -> str:
    """Return a selector for exactly the text.

    >>> escape("Block[0]")
    'Block[[]0]'
    """
    return re.sub(r"([*?[])", r"[\1]", text)


def _matches_glob(pattern: str, text: str, separator: str) -> bool:
    return _glob_pattern(pattern, separator).fullmatch(text) is not None


@functools.lru_cache(maxsize=256)
def _glob_pattern(pattern: str, separator: str) -> re.Pattern[str]:
    """Return the regular expression of a glob; every text is a valid glob."""
    parts = pattern.split(separator) if separator else [pattern]
    # Two ** in a row mean the same as one.
    parts = [part for index, part in enumerate(parts) if part != _ANY_PARTS or parts[index - 1 : index] != [_ANY_PARTS]]
    edge = re.escape(separator)
    expression = ""
    joint = ""
    for index, part in enumerate(parts):
        if part != _ANY_PARTS:
            expression += joint + _part_expression(part, edge)
            joint = edge
        elif index < len(parts) - 1:
            # The expression includes the following separator, so that ** can match zero parts.
            expression += f"{joint}(?:.*{edge})?"
            joint = ""
        else:
            expression += f"(?:{joint}.*)?"
    return re.compile(expression, re.DOTALL)


def _part_expression(part: str, edge: str) -> str:
    """Return the regular expression of one part of a glob; ``edge`` is the escaped separator, or empty."""
    within = f"[^{edge}]" if edge else "."
    expression = ""
    for token in _TOKEN.finditer(part):
        if stars := token["stars"]:
            expression += f"{within}*" if len(stars) == 1 else ".*"
        elif token["one"]:
            expression += within
        elif token["set"]:
            expression += (f"(?!{edge})" if edge else "") + _set_expression(token["set"], negated=bool(token["not"]))
        else:
            expression += re.escape(token[0])
    return expression


def _set_expression(characters: str, *, negated: bool) -> str:
    """Return the regular expression of a character set; a backward range matches no character."""
    members = [
        f"{re.escape(first_character)}-{re.escape(last_character)}" if last_character else re.escape(first_character)
        for first_character, last_character in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL)
        if not last_character or first_character <= last_character
    ]
    if not members:
        # Every range runs backwards and holds no character.
        return "." if negated else r"(?!)"
    return f"[{'^' if negated else ''}{''.join(members)}]"


def _list_classes(selector: str, modules: Sequence[ModuleAddress]) -> str:
    """List the model's classes in a sentence, most similar to the selector first; ``""`` without known classes."""
    classes = list(dict.fromkeys(module.class_name for module in modules if module.class_name))
    last = re.split(r"[/.]", selector)[-1].lower()
    classes.sort(key=lambda name: -difflib.SequenceMatcher(None, last, name.lower()).ratio())
    rest_words = f" and {len(classes) - _MOST_CLASSES} more" if len(classes) > _MOST_CLASSES else ""
    return f"Classes: {', '.join(classes[:_MOST_CLASSES])}{rest_words}." if classes else ""


def _nearest_addresses(selector: str, modules: Sequence[ModuleAddress]) -> list[str]:
    """Return the tags, or class names and paths, most similar to the selector, the most similar first."""
    if SEPARATOR in selector:
        addresses = [module.tag for module in modules]
    else:
        addresses = [name for module in modules for name in (module.class_name, module.path) if name]
    spelled = {name.lower(): name for name in reversed(addresses)}
    matches = difflib.get_close_matches(selector.lower(), spelled, n=NEAREST, cutoff=_LEAST_SIMILAR)
    return [spelled[match] for match in matches]
