"""Structural comparison of two ONNX files (``winml diff``), module by module; neither is run.

Weights are compared in the files, piece by piece, so that memory use is constant.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import onnx

from winml.modelkit.compare import records
from winml.modelkit.onnx.contents import (
    Contents,
    Weight,
    declared_shape,
    node_signature,
    read_contents,
    stated_attributes,
)
from winml.modelkit.onnx.contexts import proto_nodes
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.initializer_bytes import WeightEquality
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.module_costs import weight_owners
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.python_functions import python_function
from winml.modelkit.words import shape_words

_NO_MODULE = "nodes without a module"


@python_function()
def diff_models(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> records.StructureDiff:
    """Compare the structure of two ONNX files, module by module, without running them.

    Operators, attributes, types, sizes and the content of weights are compared; of weights, only names, types and
    shapes are reported. Renamed modules are matched by their content.

    Args:
        before: An ONNX file.
        after: Another one.

    Returns:
        Added, removed, changed and renamed modules.

    Raises:
        ModelPathError: there is no such file.
        InputError: one is no ONNX file, or its data is missing.

    Example:
        ```python
        changes = diff_models("model.onnx", "fast.onnx")
        ```
    """
    old, new = _Side.read(Path(before)), _Side.read(Path(after))
    weights = WeightEquality(old.path, new.path)
    matches = _match_modules(old.modules, new.modules)
    changed = [module for match in matches if (module := _changed_module(match, weights)) is not None]
    interface = tuple(_interface_changes(old.structure, new.structure))
    is_rewired = not changed and old.fingerprint() != new.fingerprint()
    return records.StructureDiff(
        before=old.as_compared(),
        after=new.as_compared(),
        operators=records.changed_counts(old.operators, new.operators),
        interface=interface,
        modules=tuple(changed),
        same_modules=sum(None not in match for match in matches)
        - sum(module.status in ("changed", "renamed") for module in changed),
        is_rewired=is_rewired and not interface,
        notes=tuple(_source_notes(old.tree, new.tree)),
    )


@dataclass
class _Module:
    """Content of one module, without its submodules."""

    path: str = ""
    tag: str = ""
    class_name: str = _NO_MODULE
    operators: Counter[str] = field(default_factory=Counter)
    signatures: Counter[str] = field(default_factory=Counter)
    """Operator with attributes → number of nodes."""
    weights: list[Weight] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.operators.total()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(weight.parameters for weight in self.weights if weight.has_parameters)

    @property
    def bytes_by_dtype(self) -> Counter[str]:
        """Type of weights → bytes."""
        counts: Counter[str] = Counter()
        for weight in self.weights:
            counts[weight.dtype] += weight.size_bytes or 0
        return counts

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights."""
        return self.bytes_by_dtype.total()

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Sorted types and shapes of its weights."""
        return tuple(sorted(map(_type_words, self.weights)))


_Match = tuple[_Module | None, _Module | None]
"""(module before, module after); ``None`` if missing."""


@dataclass(frozen=True)
class _Side:
    """One file and its modules."""

    path: Path
    structure: onnx.ModelProto
    tree: OnnxTree
    modules: list[_Module]

    @classmethod
    def read(cls, path: Path) -> _Side:
        structure = read_structure(path)
        contents = read_contents(structure)
        metadata = {entry.key: entry.value for entry in structure.metadata_props}
        tree = read_tree([node.proto for node in contents.nodes], metadata, structure.graph.name.strip("/") or "graph")
        return cls(path, structure, tree, _read_modules(tree, contents, _imported(structure)))

    @property
    def operators(self) -> Counter[str]:
        return sum((module.operators for module in self.modules), Counter[str]())

    def fingerprint(self) -> str:
        """Return the fingerprint of the graph without default attributes."""
        plain = onnx.ModelProto()
        plain.CopyFrom(self.structure)
        opsets = _imported(plain)
        for node in proto_nodes(plain):
            stated = stated_attributes(node, opsets)
            if len(stated) < len(node.attribute):
                kept = [onnx.AttributeProto.FromString(entry.SerializeToString()) for entry in stated]
                del node.attribute[:]
                node.attribute.extend(kept)
        return fingerprint(graph_of(plain, self.path))

    def as_compared(self) -> records.ComparedFile:
        files = (self.path, *external_files(self.path))
        return records.ComparedFile(
            path=self.path,
            size_bytes=sum(file.stat().st_size for file in files),
            nodes=sum(module.nodes for module in self.modules),
            parameters=sum(module.parameters for module in self.modules),
            weight_bytes=sum(module.size_bytes for module in self.modules),
            opset=_read_opsets(self.structure).get("ai.onnx", 0),
            tree_source=self.tree.source,
        )


def _imported(structure: onnx.ModelProto) -> dict[str, int]:
    """Return domain → opset version."""
    return {entry.domain: entry.version for entry in structure.opset_import}


def _read_modules(tree: OnnxTree, contents: Contents, opsets: Mapping[str, int]) -> list[_Module]:
    """Sum nodes and weights by module, in the order of the tree; nodes without a module last."""
    by_tag: defaultdict[str, _Module] = defaultdict(_Module)
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        by_tag[tag].operators[node.operator] += 1
        by_tag[tag].signatures[node_signature(node, opsets)] += 1
    for weight, tag in zip(contents.weights, weight_owners(tree, contents), strict=True):
        by_tag[tag].weights.append(weight)
    identities = [(module.tag, module.path, module.class_name) for module in tree.modules]
    modules = [replace(by_tag[tag], tag=tag, path=path, class_name=class_name) for tag, path, class_name in identities]
    return [*modules, by_tag[""]] if by_tag[""].operators or by_tag[""].weights else modules


def _type_words(weight: Weight) -> str:
    """Format type and shape: ``float32[384, 384]``."""
    return shape_words(weight.dtype, weight.shape)


def _match_modules(before: Sequence[_Module], after: Sequence[_Module]) -> list[_Match]:
    """Pair the modules of two graphs, in the order of the second; removed modules follow their predecessor.

    Modules with the same tag are equal, then modules with the same path, then similar modules: the same class,
    operators and weight shapes, or at least the same weight shapes, if any.
    """
    partner = _match_tags(before, after)
    by_tag = {module.tag: module for module in before}
    matches: list[_Match] = [(by_tag.get(partner.get(module.tag, "")), module) for module in after]
    matched_tags = set(partner.values())
    for position, module in enumerate(before):
        if module.tag in matched_tags:
            continue
        previous = {earlier.tag for earlier in before[:position]}
        index = max((i + 1 for i, (old, _) in enumerate(matches) if old and old.tag in previous), default=0)
        matches.insert(index, (module, None))
    return matches


def _match_tags(before: Sequence[_Module], after: Sequence[_Module]) -> dict[str, str]:
    """Tag after → tag before, for the modules on both sides."""
    partner: dict[str, str] = {}
    keys: tuple[Callable[[_Module], object], ...] = (
        lambda module: module.tag,
        lambda module: module.path or None,
        lambda module: (module.class_name, tuple(sorted(module.operators.items())), module.weight_types),
        lambda module: module.weight_types or None,
    )
    for key in keys:
        waiting: defaultdict[object, list[_Module]] = defaultdict(list)
        for module in before:
            if module.tag not in partner.values() and key(module) is not None:
                waiting[key(module)].append(module)
        for module in after:
            if module.tag not in partner and waiting.get(key(module)):
                partner[module.tag] = waiting[key(module)].pop(0).tag
    return partner


def _match_weights(
    before: Sequence[Weight],
    after: Sequence[Weight],
    are_equal: Callable[[str, str], bool],
) -> Iterator[tuple[Weight | None, Weight | None]]:
    """Yield pairs of weights of one module that differ between the sides.

    Args:
        before: Its weights before.
        after: Its weights after.
        are_equal: (name before, name after) of equal type and shape → True if the values are equal.

    Yields:
        Pairs with one name and other values, type or shape; pairs of two names with equal values, or with one shape if
        the type changed and the name was extended; and unpaired weights. Weights with one name and equal values are
        omitted.
    """
    old, new = {weight.name: weight for weight in before}, {weight.name: weight for weight in after}
    for name in [name for name in new if name in old]:
        old_weight, new_weight = old.pop(name), new.pop(name)
        if _type_words(old_weight) != _type_words(new_weight) or not are_equal(name, name):
            yield (old_weight, new_weight)
    by_type: defaultdict[str, list[Weight]] = defaultdict(list)
    for weight in old.values():
        by_type[_type_words(weight)].append(weight)
    for weight in new.values():
        twin = next((older for older in by_type[_type_words(weight)] if are_equal(older.name, weight.name)), None)
        twin = twin or _find_retyped(weight, by_type)
        if twin is not None:
            by_type[_type_words(twin)].remove(twin)
        yield (twin, weight)
    yield from [(weight, None) for weights in by_type.values() for weight in weights]


def _find_retyped(weight: Weight, gone: Mapping[str, Sequence[Weight]]) -> Weight | None:
    """Find the weight with another type before: tools that change a type extend the name."""
    return next(
        (
            older
            for weights in gone.values()
            for older in weights
            if older.dtype != weight.dtype and older.shape == weight.shape and weight.name.startswith(older.name)
        ),
        None,
    )


def _changed_module(match: _Match, weights: WeightEquality) -> records.ChangedModule | None:
    """Describe the changes of a module; ``None`` without changes."""
    before, after = match
    old, new = before or _Module(), after or _Module()
    present = new if after else old
    operators = records.changed_counts(old.operators, new.operators)
    changes = [_weight_change(*pair) for pair in _match_weights(old.weights, new.weights, weights.are_equal)]
    attributes = _changed_attributes(old, new)
    status: records.ModuleStatus
    if before is None:
        status = "added"
    elif after is None:
        status = "removed"
    elif old.tag != new.tag:
        status = "renamed"
    elif operators or changes or attributes:
        status = "changed"
    else:
        return None
    return records.ChangedModule(
        status=status,
        module=present.path,
        tag=present.tag,
        class_name=present.class_name,
        nodes=(old.nodes, new.nodes),
        parameters=(old.parameters, new.parameters),
        size_bytes=(old.size_bytes, new.size_bytes),
        operators=operators,
        dtypes=records.changed_counts(old.bytes_by_dtype, new.bytes_by_dtype),
        weights=tuple(changes),
        attributes_changed=attributes,
        renamed_from=old.tag if status == "renamed" else "",
    )


def _weight_change(before: Weight | None, after: Weight | None) -> records.WeightChange:
    """Describe the change of a weight: added, removed, renamed or changed."""
    if before is None:
        assert after is not None  # a match has at least one side
        return records.WeightChange(after.name, "added", after=_type_words(after))
    if after is None:
        return records.WeightChange(before.name, "removed", before=_type_words(before))
    old, new = _type_words(before), _type_words(after)
    renamed_from = before.name if before.name != after.name else ""
    status: Literal["renamed", "changed"] = "renamed" if renamed_from and old == new else "changed"
    return records.WeightChange(after.name, status, old, new, renamed_from)


def _changed_attributes(before: _Module, after: _Module) -> int:
    """Number of nodes with an unchanged operator and changed attributes."""
    by_operator = [Counter[str](), Counter[str]()]
    exchanged = (before.signatures - after.signatures, after.signatures - before.signatures)
    for counts, signatures in zip(by_operator, exchanged, strict=True):
        for signature, count in signatures.items():
            counts[signature.rpartition(" ")[0]] += count
    return sum((by_operator[0] & by_operator[1]).values())


def _interface_changes(before: onnx.ModelProto, after: onnx.ModelProto) -> Iterator[str]:
    """Yield changes of inputs, outputs and opsets, one sentence each."""
    for kind in ("input", "output"):
        old, new = _declared_values(before.graph, kind), _declared_values(after.graph, kind)
        yield from [f"{kind} {name} {old[name]} was removed" for name in old if name not in new]
        yield from [f"{kind} {name} {new[name]} was added" for name in new if name not in old]
        yield from [
            f"{kind} {name} changed from {old[name]} to {new[name]}"
            for name in old
            if name in new and old[name] != new[name]
        ]
        if [name for name in old if name in new] != [name for name in new if name in old]:
            yield f"the order of the {kind}s changed"
    for domain, (left, right) in records.changed_counts(_read_opsets(before), _read_opsets(after)).items():
        yield f"opset of {domain} was {left or 'absent'}, is {right or 'absent'}"


def _read_opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}


def _declared_values(graph: onnx.GraphProto, kind: str) -> dict[str, str]:
    """Return name → type and shape of the inputs or outputs of a graph, without initializers."""
    initialized = {tensor.name for tensor in graph.initializer}
    values = (value for value in getattr(graph, kind) if value.name not in initialized)
    types = {value.name: value.type for value in values}
    return {
        name: shape_words(
            onnx.TensorProto.DataType.Name(declared.tensor_type.elem_type).lower(), declared_shape(declared) or ()
        )
        for name, declared in types.items()
    }


def _source_notes(before: OnnxTree, after: OnnxTree) -> Iterator[str]:
    """Note that the modules of both files come from different sources."""
    if before.source != after.source:
        yield (
            f"Modules come from {before.source} in the first file and from {after.source} in the second, so they may "
            "not match. winml retag transfers tags from the source file."
        )
