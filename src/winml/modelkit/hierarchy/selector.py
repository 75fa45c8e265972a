"""Which modules does a selector name?

A selector is a glob over one of the three ways to say which module: its tag, its module path, or its class name. Works
on anything that has those three; what is done with the modules found, and with what lies inside them, is up to the
caller.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from winml.modelkit.errors import UsageError
from winml.modelkit.hierarchy.address import SEPARATOR

__all__ = ["HasAddress", "ModuleAddress", "Selector", "escape", "select"]

PATH_SEPARATOR = "."
ANY_PARTS = "**"
LEAST_SIMILAR = 0.4
"""Chosen: below this share of common characters (difflib's ratio), an address is no likely meaning of a selector."""
NEAREST = 5
"""Chosen: how many addresses the error for a selector that matches nothing lists."""


class HasAddress(Protocol):
    """A module, as far as selectors look at it."""

    @property
    def path(self) -> str:
        """Dotted module path; ``""`` is the root."""

    @property
    def tag(self) -> str:
        """The tag, such as ``/BertModel/BertEncoder``."""

    @property
    def class_name(self) -> str:
        """Name of the class; ``""`` where nobody knows."""


@dataclass(frozen=True)
class ModuleAddress:
    """The three ways to say which module, and nothing else."""

    path: str
    tag: str
    class_name: str


_TOKEN = re.compile(r"(?P<stars>\*+)|(?P<one>\?)|\[(?P<not>!?)(?P<set>[^\]]+)\]|.", re.DOTALL)
_AddressT = TypeVar("_AddressT", bound=HasAddress)


@dataclass(frozen=True)
class Selector:
    """A glob, and what it is matched against.

    With a slash it is matched against tags; without one against class names, and against module paths. The whole
    address has to match. The separator of an address is the slash in a tag and the dot in a module path; a class name
    has none.

    =========  ===================================================================================
    ``*``      any characters but the separator
    ``**``     any characters; as a whole part of the address, any number of parts, none included
    ``?``      one character but the separator
    ``[a-c]``  one of these characters, ``[!a-c]`` one of the others; the separator never
    =========  ===================================================================================

    Raises:
        UsageError: the text is empty.

    >>> Selector("encoder.layer.*.output").matches(ModuleAddress("encoder.layer.0.output", "/M/Output", "Output"))
    True
    >>> Selector("/M/**/Output").matches(ModuleAddress("encoder.layer.0.output", "/M/Output", "Output"))
    True
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise UsageError("an empty selector names no module", hint=_SELECTOR_HINT)

    def matches(self, module: HasAddress) -> bool:
        """Say whether this names the module."""
        if SEPARATOR in self.text:
            return _matches(self.text, module.tag, SEPARATOR)
        return _matches(self.text, module.class_name, "") or _matches(self.text, module.path, PATH_SEPARATOR)


_SELECTOR_HINT = (
    "A selector is a class name, a module path or a tag, with * and ** for what may vary: "
    "BertAttention, encoder.layer.*.output, /BertModel/**/GELUActivation."
)


def select(modules: Iterable[_AddressT], selector: str) -> list[_AddressT]:
    """Return the modules a selector names, in the order given.

    Args:
        modules: A module tree, or any records with path, tag and class name.
        selector: As :class:`Selector` describes it.

    Raises:
        UsageError: it is empty or names none of them; the nearest addresses are listed.

    >>> layers = [ModuleAddress(f"layer.{n}", f"/M/Layer.{n}", "Layer") for n in range(3)]
    >>> [module.path for module in select(layers, "layer.[02]")]
    ['layer.0', 'layer.2']
    """
    modules = list(modules)
    wanted = Selector(selector)
    found = [module for module in modules if wanted.matches(module)]
    if found:
        return found
    guesses = _nearest(selector, modules)
    hint = f"Nearest: {', '.join(guesses)}." if guesses else f"The model has {len(modules)} modules. {_SELECTOR_HINT}"
    raise UsageError(f"no module matches {selector!r}", hint=hint)


def escape(text: str) -> str:
    """Return the selector that matches this text and nothing else.

    >>> escape("Block[0]")
    'Block[[]0]'
    """
    return re.sub(r"([*?[])", r"[\1]", text)


def _matches(pattern: str, text: str, separator: str) -> bool:
    return _compile(pattern, separator).fullmatch(text) is not None


@functools.lru_cache(maxsize=256)
def _compile(pattern: str, separator: str) -> re.Pattern[str]:
    """Turn a glob into a regular expression; there is no text that is not a glob."""
    parts = pattern.split(separator) if separator else [pattern]
    # Any number of parts, twice in a row, is any number of parts.
    parts = [part for index, part in enumerate(parts) if part != ANY_PARTS or parts[index - 1 : index] != [ANY_PARTS]]
    edge = re.escape(separator)
    expression = ""
    joint = ""
    for index, part in enumerate(parts):
        if part != ANY_PARTS:
            expression += joint + _part_expression(part, edge)
            joint = edge
        elif index < len(parts) - 1:
            # Takes the separator behind it along, so that it can stand for no part at all.
            expression += f"{joint}(?:.*{edge})?"
            joint = ""
        else:
            expression += f"(?:{joint}.*)?"
    return re.compile(expression, re.DOTALL)


def _part_expression(part: str, edge: str) -> str:
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
    members = [
        f"{re.escape(first)}-{re.escape(last)}" if last else re.escape(first)
        for first, last in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL)
        if not last or first <= last
    ]
    if not members:
        # Only ranges that run backwards, which hold no character.
        return "." if negated else r"(?!)"
    return f"[{'^' if negated else ''}{''.join(members)}]"


def _nearest(selector: str, modules: Sequence[HasAddress]) -> list[str]:
    """Return the addresses of the kind asked for that look most like the selector, the best first."""
    if SEPARATOR in selector:
        known = [module.tag for module in modules]
    else:
        known = [name for module in modules for name in (module.class_name, module.path) if name]
    spelled = {name.lower(): name for name in reversed(known)}
    matches = difflib.get_close_matches(selector.lower(), spelled, n=NEAREST, cutoff=LEAST_SIMILAR)
    return [spelled[match] for match in matches]
