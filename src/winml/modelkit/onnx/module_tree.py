"""Reading of the module tree of an ONNX file, and of the module of each node.

Tries, in this order: our tags, the metadata of torch's dynamo exporter, of onnxscript's builder, the namespace, the
scopes in node names. The first source found on any node is used for the whole file and named in the result. A node
without it belongs to no module; modules are never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from winml.modelkit import metadata_keys
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress, recorded_modules
from winml.modelkit.tags.tagging import Coverage, listed_names, name_scope, scope_path
from winml.modelkit.tags.torch_modules import TracedModule, comes_with_torch, comes_with_transformers, hierarchy_paths

TreeSource = Literal[
    "winml tags", "pkg.torch.onnx metadata", "pkg.onnxscript metadata", "namespace", "node names", "none"
]


Scope = tuple[tuple[str, str], ...]
"""Module path and class of the modules a node ran in, outermost first. A class name includes its package if known, and
is ``""`` if the class is unknown.
"""
Metadata = Mapping[str, str]


@dataclass(frozen=True)
class OnnxTree:
    """The modules of a file, and the module of each node."""

    source: TreeSource
    modules: tuple[ModuleAddress, ...]
    """Parents before children; in the execution order stored in the file, else in the order of the nodes. A path is
    ``""`` for the root, and for a module of which only the tag is known; a class is ``""`` if the tree is read from
    node names.
    """
    tags: tuple[str, ...]
    """Tag of each node, aligned with the nodes; ``""`` without a tag."""
    coverage: Coverage
    """By source of our tags; for another tree by the tree's source."""
    notes: tuple[str, ...] = ()


def read_tree(nodes: Sequence[onnx.NodeProto], metadata: Metadata, root: str) -> OnnxTree:
    """Read the module tree of a file.

    Args:
        nodes: Every node.
        metadata: The model's metadata.
        root: Name of the root of a tree read from node names.
    """
    properties = [{entry.key: entry.value for entry in node.metadata_props} for node in nodes]
    if any(metadata_keys.TAG_KEY in node_metadata for node_metadata in properties):
        return _build_tagged_tree(properties, metadata)
    readers: tuple[tuple[TreeSource, Callable[[], list[Scope]]], ...] = (
        ("pkg.torch.onnx metadata", lambda: [_torch_scope(node_metadata) for node_metadata in properties]),
        ("pkg.onnxscript metadata", lambda: _absolute_scopes(map(_onnxscript_scope, properties))),
        (
            "namespace",
            lambda: _namespace_scopes(
                [node_metadata.get(metadata_keys.NAMESPACE_KEY, "") for node_metadata in properties]
            ),
        ),
        ("node names", lambda: list(map(_name_scope, nodes))),
    )
    for tree_source, reader in readers:
        scopes = reader()
        if any(scopes) and (tree_source != "node names" or any(len(scope) > 1 for scope in scopes)):
            return _build_scoped_tree(tree_source, _hierarchy_scopes(scopes), root)
    return OnnxTree("none", (), ("",) * len(nodes), Coverage(len(nodes), 0, {}))


def _build_tagged_tree(properties: Sequence[Metadata], metadata: Metadata) -> OnnxTree:
    """Build the tree from the tags of nodes, and the tree recorded in the metadata; invalid tags are noted."""
    modules: dict[str, ModuleAddress] = {}
    notes: list[str] = []
    tags = []
    recorded = recorded_modules(metadata)
    if recorded is None:
        notes.append(f"{metadata_keys.TREE_KEY} of the model is damaged; the tree was built from the node tags")
    for module in recorded or ():
        _add_module(modules, module)
    sources: Counter[str] = Counter()
    malformed = 0
    for node_metadata in properties:
        tag = node_metadata.get(metadata_keys.TAG_KEY, "")
        if not address.is_tag(tag):
            malformed += bool(tag)
            tag = ""
        tags.append(tag)
        if tag:
            sources[node_metadata.get(metadata_keys.SOURCE_KEY) or "unknown"] += 1
            _add_module(modules, ModuleAddress(node_metadata.get(metadata_keys.MODULE_KEY, ""), tag, _class_of(tag)))
    if malformed:
        notes.append(f"{malformed} node(s) have an invalid tag and count as untagged")
    coverage = Coverage(len(tags), sources.total(), dict(sources), _count_at_root(tags))
    return OnnxTree("winml tags", tuple(modules.values()), tuple(tags), coverage, tuple(notes))


def _add_module(modules: dict[str, ModuleAddress], module: ModuleAddress) -> None:
    """Add a module, after its missing ancestors."""
    for above in address.lineage(module.tag)[:-1]:
        modules.setdefault(above, ModuleAddress("", above, _class_of(above)))
    modules.setdefault(module.tag, module)


def _class_of(tag: str) -> str:
    """Return the class in the last segment of a tag."""
    return address.last_segment(tag).partition(".")[0]


def _hierarchy_scopes(scopes: Sequence[Scope]) -> list[Scope]:
    """Shorten each scope to its hierarchy modules, with class names without packages; in the order of the scopes."""
    modules: dict[str, TracedModule] = {}
    for scope in scopes:
        for position, (path, qualified_class) in enumerate(scope):
            if path not in modules:
                package, _, class_name = qualified_class.rpartition(".")
                stack = tuple(outer for outer, _ in scope[:position])
                modules[path] = TracedModule(
                    path,
                    class_name,
                    is_torch_nn=comes_with_torch(package),
                    is_transformers=comes_with_transformers(package),
                    stack=stack,
                    callers=frozenset(stack[-1:]),
                )
    chosen = hierarchy_paths(modules.values(), "auto")
    return [tuple((path, modules[path].class_name) for path, _ in scope if path in chosen) for scope in scopes]


def _build_scoped_tree(tree_source: TreeSource, scopes: Sequence[Scope], root: str) -> OnnxTree:
    """Build the tree from scopes, by the same rules as tags."""
    classes: dict[str, str] = {}
    parents: dict[str, str | None] = {}
    for scope in scopes:
        above = None
        for path, class_name in scope:
            # The first call decides, as in a trace; a parent always precedes its children.
            classes.setdefault(path, class_name)
            parents.setdefault(path, above)
            above = path

    def name_family(parent: str | None, family: list[str]) -> list[str]:
        """Name the modules under one parent by class, or by module name without a class."""
        if all(classes[path] for path in family):
            return address.sibling_segments([(path, classes[path]) for path in family])
        # Without a class, the segment is the module's own name, which is unique under one parent.
        return [path.removeprefix(f"{parent}.").replace(address.SEPARATOR, "_") or root for path in family]

    tags = address.assign_tags(classes, parents, name_family)
    modules = tuple(ModuleAddress(path, tags[path], class_name) for path, class_name in classes.items())
    node_tags = tuple(tags[scope[-1][0]] if scope else "" for scope in scopes)
    tagged = sum(map(bool, node_tags))
    sources: dict[str, int] = {tree_source: tagged} if tagged else {}
    coverage = Coverage(len(node_tags), tagged, sources, _count_at_root(node_tags))
    return OnnxTree(tree_source, modules, node_tags, coverage)


def _count_at_root(tags: Iterable[str]) -> int:
    return sum(address.depth(tag) == 1 for tag in tags if tag)


def _torch_scope(metadata: Metadata) -> Scope:
    """Parse torch's lists of scopes and classes; the last entry is the node itself."""
    scope = _listed_scope(metadata, metadata_keys.SCOPES_KEY, metadata_keys.CLASSES_KEY)[:-1]
    return tuple(level for level in scope if level[0] != _NO_MODULE)


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""Specified: placeholder of torch's passes for an unknown module of a node (torch/_export/passes)."""


def _onnxscript_scope(metadata: Metadata) -> Scope:
    """Parse the lists of onnxscript's builder: the name of each module relative to its parent, and its class."""
    return _listed_scope(metadata, metadata_keys.BUILDER_SCOPES_KEY, metadata_keys.BUILDER_CLASSES_KEY)


def _listed_scope(metadata: Metadata, paths_key: str, classes_key: str) -> Scope:
    """Parse two lists, of paths and of classes; ``()`` if absent, damaged or of different length."""
    paths, classes = (listed_names(metadata.get(key, "")) for key in (paths_key, classes_key))
    return tuple(zip(paths, classes, strict=True)) if len(paths) == len(classes) else ()


def _absolute_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    """Return scopes with module paths instead of names; an outermost module common to all nodes is the root."""
    scopes = list(scopes)
    has_root = len({scope[0] for scope in scopes if scope}) == 1
    absolute_scopes: list[Scope] = []
    for scope in scopes:
        path, levels = "", [("", scope[0][1] if has_root else "")] if scope else []
        for name, class_name in scope[1:] if has_root else scope:
            path = f"{path}.{name}" if path and name else path or name
            if path and path != levels[-1][0]:
                levels.append((path, class_name))
        absolute_scopes.append(tuple(levels))
    return absolute_scopes


def _namespace_scopes(namespaces: Sequence[str]) -> list[Scope]:
    """Read the namespaces of torch or winml, which have paths, or of onnxscript's builder, which have names."""
    levels = [
        [_namespace_level(level) for level in text.split(address.SEPARATOR)] if text else [] for text in namespaces
    ]
    outermost = [node_levels[0] for node_levels in levels if node_levels]
    # torch writes the package before the class of the root, winml the class alone.
    is_relative = bool(outermost) and not any(name is None or (not name and "." in kind) for name, kind in outermost)
    if is_relative:
        return _absolute_scopes(tuple((name or "", kind) for name, kind in node_levels) for node_levels in levels)
    return list(map(_namespace_scope, levels))


def _namespace_level(text: str) -> tuple[str | None, str]:
    """Split a level such as ``encoder: BertEncoder`` into name and class; the name is `None` without a colon."""
    name, separator, class_name = text.partition(": ")
    return (name, class_name) if separator else (None, text)


def _namespace_scope(levels: Sequence[tuple[str | None, str]]) -> Scope:
    """Parse ``BertModel/encoder: BertEncoder``, or torch's ``: package.BertModel/…``, whose last level is the node."""
    scope = tuple((path, class_name) for path, class_name in levels if path is not None)
    if not levels or levels[0][0] == "":
        return tuple(level for level in scope[:-1] if level[0] != _NO_MODULE)
    return (("", levels[0][1]), *scope) if len(scope) == len(levels) - 1 else ()


def _name_scope(node: onnx.NodeProto) -> Scope:
    """Read ``/encoder/layer.0/Gelu`` as the modules ``encoder`` and ``encoder.layer.0``, under the root.

    `()` for a name without ``/``.
    """
    if address.SEPARATOR not in node.name:
        return ()
    segments = name_scope(node.name, node.op_type)
    return (("", ""), *((scope_path(segments[: depth + 1]), "") for depth in range(len(segments))))
