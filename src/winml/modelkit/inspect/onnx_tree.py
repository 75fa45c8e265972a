"""Reads the module tree of an ONNX file, and the module of each node.

Tries, in this order: our tags, the metadata of torch's dynamo exporter, the namespace, the scopes in node names. The
first that any node has is used for the whole file and named in the result. A node without it belongs to no module;
nothing is guessed.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx

from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tagging import Coverage, name_scope, scope_path
from winml.modelkit.hierarchy.torch_modules import comes_with_torch, comes_with_transformers, hierarchy_paths
from winml.modelkit.metadata_keys import (
    CLASSES_KEY,
    MODULE_KEY,
    NAMESPACE_KEY,
    SCOPES_KEY,
    SOURCE_KEY,
    TAG_KEY,
    TREE_KEY,
)

__all__ = ["OnnxModule", "OnnxTree", "TreeSource", "read_tree"]

TreeSource = Literal["winml tags", "pkg.torch.onnx metadata", "namespace", "node names", "none"]


Scope = tuple[tuple[str, str], ...]
"""Module path and class of the modules a node ran in, outermost first. A class has its package before its name where
that is known, and is ``""`` where it is unknown itself."""
Metadata = Mapping[str, str]


@dataclass(frozen=True)
class OnnxModule:
    """One module of the tree; a hierarchy module as far as the file tells."""

    path: str
    """Dotted module path; ``""`` for the root, and for a module of which only the tag is known."""
    tag: str
    class_name: str
    """``""`` where the tree is read from node names, which do not contain it."""


@dataclass(frozen=True)
class OnnxTree:
    """The modules, and the one each node belongs to."""

    source: TreeSource
    modules: tuple[OnnxModule, ...]
    """Parents before children; in the execution order stored in the file, else in the order of the nodes."""
    tags: tuple[str, ...]
    """Tag of each node, in the order the nodes were given; ``""`` where it has none."""
    coverage: Coverage
    """By source of our tags; for any other tree by the tree's source."""
    notes: tuple[str, ...] = ()


def read_tree(nodes: Sequence[onnx.NodeProto], metadata: Metadata, root: str) -> OnnxTree:
    """Read the module tree of a file.

    Args:
        nodes: Every node.
        metadata: The model's metadata.
        root: Name of the root where the tree is read from node names.
    """
    properties = [{item.key: item.value for item in node.metadata_props} for node in nodes]
    if any(TAG_KEY in node_metadata for node_metadata in properties):
        return _tagged_tree(properties, metadata)
    readers: tuple[tuple[TreeSource, Callable[[onnx.NodeProto, Metadata], Scope]], ...] = (
        ("pkg.torch.onnx metadata", lambda _, node_metadata: _torch_scope(node_metadata)),
        ("namespace", lambda _, node_metadata: _namespace_scope(node_metadata.get(NAMESPACE_KEY, ""))),
        ("node names", lambda node, _: _name_scope(node)),
    )
    for tree_source, reader in readers:
        scopes = [reader(node, node_metadata) for node, node_metadata in zip(nodes, properties, strict=True)]
        if any(scopes) and (tree_source != "node names" or any(len(scope) > 1 for scope in scopes)):
            return _scoped_tree(tree_source, _hierarchy_scopes(scopes), root)
    return OnnxTree("none", (), ("",) * len(nodes), Coverage(len(nodes), 0, {}))


def _tagged_tree(properties: Sequence[Metadata], metadata: Metadata) -> OnnxTree:
    modules, notes = _recorded_modules(metadata.get(TREE_KEY))
    tags = []
    sources: Counter[str] = Counter()
    malformed = 0
    for node_metadata in properties:
        tag = node_metadata.get(TAG_KEY, "")
        if not _is_tag(tag):
            malformed += bool(tag)
            tag = ""
        tags.append(tag)
        if tag:
            sources[node_metadata.get(SOURCE_KEY) or "unknown"] += 1
            _add_module(modules, OnnxModule(node_metadata.get(MODULE_KEY, ""), tag, _class_of(tag)))
    if malformed:
        notes.append(f"{malformed} node(s) carry a text that is no tag; they count as untagged")
    coverage = Coverage(len(tags), sources.total(), dict(sources), _count_at_root(tags))
    return OnnxTree("winml tags", tuple(modules.values()), tuple(tags), coverage, tuple(notes))


def _recorded_modules(text: str | None) -> tuple[dict[str, OnnxModule], list[str]]:
    """Return the modules in the model's metadata by tag, and notes on a damaged list."""
    if text is None:
        return {}, []
    modules: dict[str, OnnxModule] = {}
    try:
        for entry in json.loads(text):
            if not _is_tag(entry["tag"]):
                raise ValueError("not a tag")
            _add_module(modules, OnnxModule(str(entry["path"]), entry["tag"], str(entry["class"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}, [f"{TREE_KEY} of the model is damaged; the tree is made of the tags of its nodes"]
    return modules, []


def _add_module(modules: dict[str, OnnxModule], module: OnnxModule) -> None:
    """Add a module, after the missing ones above it."""
    segments = address.parse_tag(module.tag)
    for depth in range(1, len(segments)):
        above = address.format_tag(segments[:depth])
        modules.setdefault(above, OnnxModule("", above, _class_of(above)))
    modules.setdefault(module.tag, module)


def _class_of(tag: str) -> str:
    return tag.rpartition(address.SEPARATOR)[2].partition(".")[0]


def _is_tag(text: Any) -> bool:
    return isinstance(text, str) and address.is_tag(text)


@dataclass(frozen=True)
class _ScopedModule:
    """A module as the scopes of nodes show it."""

    path: str
    qualified_class: str
    stack: tuple[str, ...]
    calls: int = 0

    @property
    def class_name(self) -> str:
        return self.qualified_class.rpartition(".")[2]

    @property
    def callers(self) -> tuple[str, ...]:
        return self.stack[-1:]

    @property
    def is_torch_nn(self) -> bool:
        return comes_with_torch(self.qualified_class.rpartition(".")[0])

    @property
    def is_transformers(self) -> bool:
        return comes_with_transformers(self.qualified_class.rpartition(".")[0])


def _hierarchy_scopes(scopes: Sequence[Scope]) -> list[Scope]:
    """Return the scopes without the modules that an export would not take into the hierarchy, and without packages."""
    modules: dict[str, _ScopedModule] = {}
    for scope in scopes:
        for position, (path, qualified_class) in enumerate(scope):
            stack = tuple(outer for outer, _ in scope[:position])
            modules.setdefault(path, _ScopedModule(path, qualified_class, stack))
    chosen = hierarchy_paths(modules.values(), "auto")
    return [tuple((path, modules[path].class_name) for path, _ in scope if path in chosen) for scope in scopes]


def _scoped_tree(tree_source: TreeSource, scopes: Sequence[Scope], root: str) -> OnnxTree:
    """Build the tree from scopes, by the same rules as tags."""
    classes: dict[str, str] = {}
    parents: dict[str, str | None] = {}
    for scope in scopes:
        above = None
        for path, class_name in scope:
            # The first call decides, as in a trace; a parent always comes before its children.
            classes.setdefault(path, class_name)
            parents.setdefault(path, above)
            above = path
    tags = _assign_tags(classes, parents, root)
    modules = tuple(OnnxModule(path, tags[path], class_name) for path, class_name in classes.items())
    node_tags = tuple(tags[scope[-1][0]] if scope else "" for scope in scopes)
    tagged = sum(map(bool, node_tags))
    sources: dict[str, int] = {tree_source: tagged} if tagged else {}
    coverage = Coverage(len(node_tags), tagged, sources, _count_at_root(node_tags))
    return OnnxTree(tree_source, modules, node_tags, coverage)


def _count_at_root(tags: Iterable[str]) -> int:
    return sum(address.depth(tag) == 1 for tag in tags if tag)


def _assign_tags(classes: Mapping[str, str], parents: Mapping[str, str | None], root: str) -> dict[str, str]:
    families: dict[str | None, list[str]] = defaultdict(list)
    for path in classes:
        families[parents[path]].append(path)
    tags: dict[str, str] = {}
    for parent in [None, *classes]:
        family = families[parent]
        if all(classes[path] for path in family):
            segments = address.sibling_segments([(path, classes[path]) for path in family])
        else:
            # Without a class, the segment is the module's own name, which is unique under one parent.
            segments = [path.removeprefix(f"{parent}.").replace(address.SEPARATOR, "_") or root for path in family]
        for path, segment in zip(family, segments, strict=True):
            tags[path] = (tags[parent] if parent is not None else "") + address.format_tag([segment])
    return tags


def _torch_scope(metadata: Metadata) -> Scope:
    """Read torch's two lists; the last entry is the node itself."""
    paths, classes = _python_list(metadata.get(SCOPES_KEY, "")), _python_list(metadata.get(CLASSES_KEY, ""))
    if len(paths) != len(classes):
        return ()
    return tuple(zip(paths, classes, strict=True))[:-1]


def _python_list(text: str) -> list[str]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []


def _namespace_scope(namespace: str) -> Scope:
    """Read ``BertModel/encoder: BertEncoder``, or torch's ``: package.BertModel/…``, whose last level is the node."""
    if not namespace:
        return ()
    levels = namespace.split(address.SEPARATOR)
    scope = [
        (path, class_name) for path, separator, class_name in (level.partition(": ") for level in levels) if separator
    ]
    if levels[0].startswith(": "):
        return tuple(scope[:-1])
    return (("", levels[0]), *scope) if len(scope) == len(levels) - 1 else ()


def _name_scope(node: onnx.NodeProto) -> Scope:
    """Read ``/encoder/layer.0/Gelu`` as the modules ``encoder`` and ``encoder.layer.0``, under the root."""
    if address.SEPARATOR not in node.name:
        return ()
    segments = name_scope(node.name, node.op_type)
    return (("", ""), *((scope_path(segments[: depth + 1]), "") for depth in range(len(segments))))
