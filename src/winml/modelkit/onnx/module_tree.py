"""Reading of the module tree of an ONNX file, and of the module of each node.

Tries our tags, then the dialects of other tools. The first found on any node is used for the whole file and named in
the result. A node without it belongs to no module; modules are never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from winml.modelkit import metadata_keys
from winml.modelkit.onnx.files.reading import merge_node_keys
from winml.modelkit.tags import address
from winml.modelkit.tags.dialects import Metadata, NamedNode, Scope, TreeSource, read_scopes
from winml.modelkit.tags.selector import ModuleAddress, recorded_modules
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.tags.torch_modules import TracedModule, comes_with_torch, comes_with_transformers, hierarchy_paths


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
    """Read the module tree of a file; metadata keys that a node has several times are merged, in place.

    Args:
        nodes: Every node.
        metadata: The model's metadata.
        root: Name of the root of a tree read from node names.
    """
    merge_node_keys(nodes, metadata)
    properties = [{entry.key: entry.value for entry in node.metadata_props} for node in nodes]
    if any(metadata_keys.TAG_KEY in node_metadata for node_metadata in properties):
        return _build_tagged_tree(properties, metadata)
    tree_source, scopes = read_scopes(
        [NamedNode(node.name, node.op_type, metadata) for node, metadata in zip(nodes, properties, strict=True)]
    )
    if tree_source != "none":
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
