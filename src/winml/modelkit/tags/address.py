"""Parsing, formatting and comparison of tags.

A tag (``/BertModel/BertEncoder/BertLayer.0``) is a path of segments, one per hierarchy module from the root down.
Treats tags and module paths as text only; ``tree`` decides which modules exist.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import takewhile
from typing import TypeVar

from winml.modelkit.records import Record, entry

SEPARATOR = "/"
_T = TypeVar("_T")


def parse_tag(tag: str) -> tuple[str, ...]:
    """Return the segments of a tag; ``()`` for the empty text.

    Raises:
        ValueError: the text is not a tag (no leading slash, or an empty segment).

    >>> parse_tag("/BertModel/BertLayer.0")
    ('BertModel', 'BertLayer.0')
    """
    if not tag:
        return ()
    head, *segments = tag.split(SEPARATOR)
    if head or not segments or not all(segments):
        raise ValueError(f"not a tag: {tag!r}; expected a form such as '/BertModel/BertLayer.0'")
    return tuple(segments)


def is_tag(text: str) -> bool:
    """Return True if a text is a tag.

    >>> is_tag("/BertModel/BertLayer.0"), is_tag("BertLayer")
    (True, False)
    """
    try:
        return bool(parse_tag(text))
    except ValueError:
        return False


def format_tag(segments: Iterable[str]) -> str:
    """Join segments to a tag; the inverse of :func:`parse_tag`."""
    return "".join(SEPARATOR + segment for segment in segments)


def lineage(tag: str) -> list[str]:
    """Return the tags of the modules from the root down to the module of a tag.

    >>> lineage("/Model/Block.1")
    ['/Model', '/Model/Block.1']
    """
    segments = parse_tag(tag)
    return [format_tag(segments[:depth]) for depth in range(1, len(segments) + 1)]


def last_segment(tag: str) -> str:
    """Return the last segment of a tag.

    >>> last_segment("/Model/Block.1")
    'Block.1'
    """
    return tag.rpartition(SEPARATOR)[2]


def depth(tag: str) -> int:
    """Return the number of segments.

    >>> depth("/BertModel/BertEncoder/BertLayer.0/BertAttention")
    4
    """
    return len(parse_tag(tag))


def sort_key(tag: str) -> tuple[int, list[tuple[str, int]]]:
    """Return a key that sorts parents before their children, and siblings by name and number, so ``Layer.10`` follows
    ``Layer.9``.

    >>> sort_key("/Layer.10") > sort_key("/Layer.9")
    True
    """
    return depth(tag), [(name, int(number or 0)) for name, number in re.findall(r"(\D+)(\d*)", tag)]


def is_within(tag: str, ancestor: str) -> bool:
    """Return True if ``tag`` is ``ancestor`` or is below ``ancestor``.

    >>> is_within("/Model/Block.1", "/Model"), is_within("/Model/Block.10", "/Model/Block.1")
    (True, False)
    """
    return tag == ancestor or tag.startswith(ancestor + SEPARATOR)


def nearest_ancestor(tag: str, tags: Collection[str]) -> str:
    """Return the nearest ancestor of a tag among ``tags``; ``""`` if no ancestor is there.

    >>> nearest_ancestor("/M/Layer.0/Attention", {"/M", "/M/Layer.0/Attention"})
    '/M'
    """
    while tag := tag.rpartition(SEPARATOR)[0]:
        if tag in tags:
            return tag
    return ""


def common_ancestor(tags: Iterable[str]) -> str:
    """Return the deepest common ancestor of ``tags``, or the tag itself if all are equal; ``""`` without an ancestor.

    >>> common_ancestor(["/M/Layer.0/Attention", "/M/Layer.0/Output", "/M/Layer.0"])
    '/M/Layer.0'
    """
    return format_tag(common_start(map(parse_tag, tags)))


def common_start(paths: Iterable[Sequence[_T]]) -> list[_T]:
    """Return the longest common start of all paths; ``[]`` without paths."""
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return [level[0] for level in levels]


def sibling_segments(siblings: Sequence[tuple[str, str]]) -> list[str]:
    """Name the modules under one parent tag so that no two share a segment.

    A segment is the class name, with ``.INDEX`` when the module's own name is a number. If siblings share this segment,
    the shortest distinct suffix of the module path replaces the index.

    Args:
        siblings: ``(module path, class name)`` of each module; paths are distinct.

    Returns:
        The segments, aligned with ``siblings``.

    >>> sibling_segments([("layer.0", "Layer"), ("query", "Linear"), ("key", "Linear")])
    ['Layer.0', 'Linear.query', 'Linear.key']
    >>> sibling_segments([("down.0", "Block"), ("up.0", "Block")])
    ['Block.down.0', 'Block.up.0']

    Raises:
        ValueError: two modules have equal paths.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for position, (path, class_name) in enumerate(siblings):
        groups[_plain_segment(path, class_name)].append(position)
    segments = [""] * len(siblings)
    for plain_segment, positions in groups.items():
        suffixes = _separating_suffixes([siblings[position][0] for position in positions])
        for position, suffix in zip(positions, suffixes, strict=True):
            segments[position] = (
                f"{escape_name(siblings[position][1])}.{escape_name(suffix)}" if suffix else plain_segment
            )
    return segments


def assign_tags(
    paths: Iterable[str],
    parents: Mapping[str, str | None],
    name_family: Callable[[str | None, list[str]], list[str]],
) -> dict[str, str]:
    """Return module path → tag: the parent's tag and a segment that is unique among the parent's children.

    Args:
        paths: The modules, each after its parent.
        parents: Module path → path of the parent; None for the root.
        name_family: Returns the segments of the modules under one parent.
    """
    paths = list(paths)
    families: dict[str | None, list[str]] = defaultdict(list)
    for path in paths:
        families[parents[path]].append(path)
    tags: dict[str, str] = {}
    for parent in [None, *paths]:
        family = families[parent]
        for path, segment in zip(family, name_family(parent, family), strict=True):
            tags[path] = (tags[parent] if parent is not None else "") + format_tag([segment])
    return tags


def _plain_segment(path: str, class_name: str) -> str:
    """Return the segment of a module without siblings: the class name, with ``.INDEX`` for a numbered module."""
    own_name = path.rpartition(".")[2]
    return f"{escape_name(class_name)}.{own_name}" if own_name.isdecimal() else escape_name(class_name)


def _separating_suffixes(paths: list[str]) -> list[str]:
    """Return the last k parts of each path, for the smallest k with distinct results; k is 0 for a single path.

    Raises:
        ValueError: two paths are equal.
    """
    if len(paths) == 1:
        return [""]
    split_paths = [path.split(".") for path in paths]
    for length in range(1, max(map(len, split_paths)) + 1):
        suffixes = [".".join(split_path[-length:]) for split_path in split_paths]
        if len(set(suffixes)) == len(suffixes):
            return suffixes
    raise ValueError(f"module paths are not distinct: {paths}")


def escape_name(name: str) -> str:
    """Escape the separator in a name, so that a tag splits into its segments."""
    # A ModuleDict key or the name of a class created at run time may contain the separator. The tag must still split
    # into its segments, and different names must stay different.
    return name.replace("%", "%25").replace(SEPARATOR, "%2F")


class ModuleIdentity(Record):
    """Identity of one call of a module."""

    module: str
    """Dotted module path; ``""`` is the root."""
    tag: str
    class_name: str = field(metadata=entry("class"))
    call: int = 1
    """Number of the call, from 1."""
    calls: int = 1
    """Number of calls in the graph."""

    @property
    def words(self) -> str:
        """Display name: ``encoder.layer.0``, ``head, call 2 of 3``."""
        name = self.module or self.tag
        return name if self.calls == 1 else f"{name}, call {self.call} of {self.calls}"
