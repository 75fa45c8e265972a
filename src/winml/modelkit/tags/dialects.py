"""Dialects: the ways in which tools name the modules of a node, in its metadata or in its name.

A dialect is declared once. Files of others are read by the declarations, and their keys are transferred by them. For
users: docs/reference/tags.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Literal, NamedTuple

import onnx

from winml.modelkit import metadata_keys
from winml.modelkit.tags import address

TreeSource = Literal[
    "winml tags",
    "pkg.torch.onnx metadata",
    "pkg.onnxscript metadata",
    "namespace",
    "onnxruntime-genai names",
    "node names",
    "none",
]
"""Names of the dialects; ``none`` for a file without modules."""

Scope = tuple[tuple[str, str], ...]
"""Module path and class of the modules a node ran in, outermost first. A class name includes its package if known, and
is ``""`` if the class is unknown.
"""
Metadata = Mapping[str, str]


class NamedNode(NamedTuple):
    """The parts of a node in which tools name modules."""

    name: str
    op_type: str
    metadata: Metadata


@dataclass(frozen=True)
class Dialect:
    """How one family of tools names the modules of nodes."""

    name: TreeSource
    keys: tuple[str, ...]
    """Metadata keys of the dialect; ``()`` if modules are named in the names of nodes."""
    read: Callable[[Sequence[NamedNode]], list[Scope]]
    """Returns the scope of each node; ``()`` for a node without module. A file is not of the dialect if no node has a
    scope."""


def read_scopes(nodes: Sequence[NamedNode]) -> tuple[TreeSource, list[Scope]]:
    """Read the scope of each node by the first dialect that applies to any node.

    Returns:
        The name of the dialect, and the scopes; ``"none"`` and empty scopes if no dialect applies.
    """
    for dialect in DIALECTS:
        scopes = dialect.read(nodes)
        if any(scopes):
            return dialect.name, scopes
    return "none", [()] * len(nodes)


def raise_module(key: str, text: str, levels: int) -> str:
    """Return the value of a key that names a module such that it names an ancestor of the module.

    Args:
        key: A metadata key of a dialect.
        text: Its value.
        levels: Number of innermost modules to omit.

    >>> raise_module("namespace", ": pkg.M/a: pkg.A/a.b: pkg.B/relu: aten.relu", 1)
    ': pkg.M/a: pkg.A/relu: aten.relu'
    >>> raise_module("pkg.onnxscript.name_scopes", "['', 'a', 'b']", 1)
    "['', 'a']"
    """
    is_namespace = key == metadata_keys.NAMESPACE_KEY
    names = text.split(address.SEPARATOR) if is_namespace else listed_names(text)
    root_name, root_class = _namespace_level(names[0]) if is_namespace and names else (None, "")
    # torch names the node itself last.
    ends_in_node = key in (metadata_keys.SCOPES_KEY, metadata_keys.CLASSES_KEY) or (not root_name and "." in root_class)
    end = len(names) - ends_in_node
    names = [*names[: max(0, end - levels)], *names[end:]]
    return address.SEPARATOR.join(names) if is_namespace else repr(names)


def names_module(key: str) -> bool:
    """Return True for a metadata key in which a tool names the module of a node."""
    return key in _MODULE_KEYS


def _read_torch(nodes: Sequence[NamedNode]) -> list[Scope]:
    """Read torch's lists of scopes and classes; the last entry is the node itself."""
    scopes = (_listed_scope(node.metadata, metadata_keys.SCOPES_KEY, metadata_keys.CLASSES_KEY)[:-1] for node in nodes)
    return [tuple(level for level in scope if level[0] != _NO_MODULE) for scope in scopes]


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""Specified: placeholder of torch's passes for an unknown module of a node (torch/_export/passes)."""


def _read_onnxscript(nodes: Sequence[NamedNode]) -> list[Scope]:
    """Read the lists of onnxscript's builder: the name of each module relative to its parent, and its class."""
    keys = (metadata_keys.BUILDER_SCOPES_KEY, metadata_keys.BUILDER_CLASSES_KEY)
    return _absolute_scopes(_listed_scope(node.metadata, *keys) for node in nodes)


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


def _read_namespaces(nodes: Sequence[NamedNode]) -> list[Scope]:
    """Read the namespaces of torch or winml, which have paths, or of onnxscript's builder, which have names."""
    namespaces = [node.metadata.get(metadata_keys.NAMESPACE_KEY, "") for node in nodes]
    levels = [
        [_namespace_level(level) for level in text.split(address.SEPARATOR)] if text else [] for text in namespaces
    ]
    outermost = [node_levels[0] for node_levels in levels if node_levels]
    # torch writes the package before the class of the root, winml the class alone.
    is_relative = bool(outermost) and not any(
        name in (None, _NO_MODULE) or (not name and "." in kind) for name, kind in outermost
    )
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
    if not levels or levels[0][0] in ("", _NO_MODULE):
        return tuple(level for level in scope[:-1] if level[0] != _NO_MODULE)
    return (("", levels[0][1]), *scope) if len(scope) == len(levels) - 1 else ()


def _read_genai(nodes: Sequence[NamedNode]) -> list[Scope]:
    """Read the names of onnxruntime-genai's builder; its own parts belong to the module around them."""
    if not any(_GENAI_NAME.match(node.name) for node in nodes):
        return [()] * len(nodes)
    names = {node.name for node in nodes}
    scopes = [name_scope(node.name, node.op_type, names) for node in nodes]
    return [_scope_levels(tuple(takewhile(lambda part: not _GENAI_PART.match(part), scope))) for scope in scopes]


_GENAI_PART = re.compile(r"(constant_nodes|\w+_reformat|\w+_subgraph)$")
"""Specified: parts of names of onnxruntime-genai's builder that are no module: constants, and the computation of masks
and rotary caches."""
_GENAI_NAME = re.compile(rf"/model/{_GENAI_PART.pattern[:-1]}/")
"""Start of the name of a node that only that builder writes; each of its decoders has some."""


def _read_names(nodes: Sequence[NamedNode]) -> list[Scope]:
    """Read ``/encoder/layer.0/Gelu`` as the modules ``encoder`` and ``encoder.layer.0``, under the root.

    ``()`` for a name without ``/``. Names with one level in the whole file are no paths.
    """
    names = {node.name for node in nodes}
    scopes = [
        _scope_levels(name_scope(node.name, node.op_type, names)) if address.SEPARATOR in node.name else ()
        for node in nodes
    ]
    return scopes if any(len(scope) > 1 for scope in scopes) else [()] * len(nodes)


def _scope_levels(segments: tuple[str, ...]) -> Scope:
    """Return the root and the modules of the segments of a name, all of unknown class."""
    return (("", ""), *((scope_path(segments[: depth + 1]), "") for depth in range(len(segments))))


def listed_names(text: str) -> list[str]:
    """Parse a Python list of scopes or classes as torch and onnxscript write it; ``[]`` for other text.

    >>> listed_names("['', 'encoder']"), listed_names("encoder")
    (['', 'encoder'], [])
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
    return [str(name) for name in value] if isinstance(value, list) else []


_COUNTER = re.compile(r"_\d+$")
_FUSED_PREFIX = re.compile(r"^fused (?=/)")
"""Prefix of ONNX Runtime on the name of the first node fused with an activation."""


def name_scope(name: str, op_type: str, node_names: Container[str] = ()) -> tuple[str, ...]:
    """Return the module segments of a node's name, outermost first; ``()`` if the name is no path.

    Exporters name a node after its scope and operator. An operator as segment identifies a node; later segments were
    added by a fusing tool.

    Args:
        name: The node's name.
        op_type: Its operator.
        node_names: Names of nodes, which are no modules.

    >>> name_scope("/encoder/layer.0/Gelu_1", "Gelu")
    ('encoder', 'layer.0')
    >>> name_scope("/encoder/layer.0/MatMul/MatMulAddFusion", "Gemm")
    ('encoder', 'layer.0')
    >>> name_scope("Gemm_7", "Gemm")
    ()
    """
    name = _FUSED_PREFIX.sub("", name)
    if address.SEPARATOR not in name:
        return ()
    *scope, label = [segment for segment in name.split(address.SEPARATOR) if segment] or [""]
    # A last segment equal to the operator shows that no tool changed the name: a module may then be called Conv.
    if _COUNTER.sub("", label) != op_type and scope:
        outer = name.rpartition(address.SEPARATOR)[0]
        if outer in node_names or _is_operator(_COUNTER.sub("", scope[-1])):
            scope.pop()
    return tuple(scope)


def scope_path(scope: tuple[str, ...]) -> str:
    """Return the dotted module path of a scope.

    >>> scope_path(("encoder", "layer.0"))
    'encoder.layer.0'
    """
    return ".".join(scope)


@lru_cache(maxsize=4096)
def _is_operator(name: str) -> bool:
    return bool(onnx.defs.has(name))


DIALECTS: tuple[Dialect, ...] = (
    Dialect("pkg.torch.onnx metadata", (metadata_keys.SCOPES_KEY, metadata_keys.CLASSES_KEY), _read_torch),
    Dialect(
        "pkg.onnxscript metadata",
        (metadata_keys.BUILDER_SCOPES_KEY, metadata_keys.BUILDER_CLASSES_KEY),
        _read_onnxscript,
    ),
    Dialect("namespace", (metadata_keys.NAMESPACE_KEY,), _read_namespaces),
    Dialect("onnxruntime-genai names", (), _read_genai),
    Dialect("node names", (), _read_names),
)
"""The dialects of other tools, in the order tried: a later one is less exact. Tags of winml precede them."""
_MODULE_KEYS = frozenset(key for dialect in DIALECTS for key in dialect.keys)
