"""What does ``winml diff`` do? Compares the structure of two ONNX files module by module; neither is run.

Weights are compared in the files, piece by piece, so that memory does not grow with them.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from winml.modelkit.compare.records import ChangedModule, ComparedFile, ModuleStatus, StructureDiff, WeightChange
from winml.modelkit.compare.structure import (
    MatchedModule,
    ModuleStructure,
    StoredWeight,
    changed_counts,
    match_modules,
    match_weights,
)
from winml.modelkit.onnx.contents import Contents, node_signature, read_contents
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.initializer_bytes import StoredBytes, WeightEquality, locate_initializers
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.module_costs import weight_owners
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree

_NO_MODULE = "nodes without a module"


def diff_models(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> StructureDiff:
    """Compare the structure of two ONNX files, module by module, without running them.

    Operators, attributes, types, sizes and the content of weights are compared; of weights, only names, types and
    shapes are reported. Renamed modules are matched by their content.

    Args:
        before: An ONNX file.
        after: Another one.

    Returns:
        What was added, removed, changed and renamed.

    Raises:
        ModelPathError: there is no such file.
        InputError: one is no ONNX file, or its data is missing.
    """
    old, new = _Side.read(Path(before)), _Side.read(Path(after))
    weights = WeightEquality(old.places, new.places)
    matches = match_modules(old.modules, new.modules)
    changed = [module for match in matches if (module := _changed_module(match, weights)) is not None]
    interface = _interface_changes(old.structure, new.structure)
    is_rewired = not changed and fingerprint(graph_of(old.structure, old.path)) != fingerprint(
        graph_of(new.structure, new.path)
    )
    return StructureDiff(
        before=old.as_compared(),
        after=new.as_compared(),
        operators=changed_counts(old.operators, new.operators),
        interface=interface,
        modules=tuple(changed),
        same_modules=sum(match.before is not None and match.after is not None for match in matches)
        - sum(module.status in ("changed", "renamed") for module in changed),
        is_rewired=is_rewired and not interface,
        notes=_notes(old.tree, new.tree),
    )


@dataclass(frozen=True)
class _Side:
    """One file as it was read."""

    path: Path
    structure: onnx.ModelProto
    tree: OnnxTree
    modules: tuple[ModuleStructure, ...]
    places: Mapping[str, StoredBytes]

    @classmethod
    def read(cls, path: Path) -> _Side:
        structure = read_structure(path)
        contents = read_contents(structure)
        metadata = {item.key: item.value for item in structure.metadata_props}
        tree = read_tree([node.proto for node in contents.nodes], metadata, structure.graph.name.strip("/") or "graph")
        return cls(path, structure, tree, _module_structures(tree, contents), locate_initializers(path))

    @property
    def operators(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for module in self.modules:
            counts.update(module.operators)
        return counts

    def as_compared(self) -> ComparedFile:
        files = (self.path, *external_files(self.path))
        opsets = {entry.domain or "ai.onnx": entry.version for entry in self.structure.opset_import}
        return ComparedFile(
            path=self.path,
            size_bytes=sum(file.stat().st_size for file in files),
            nodes=sum(module.nodes for module in self.modules),
            parameters=sum(module.parameters for module in self.modules),
            weight_bytes=sum(module.size_bytes for module in self.modules),
            opset=opsets.get("ai.onnx", 0),
            tree_source=self.tree.source,
        )


def _module_structures(tree: OnnxTree, contents: Contents) -> tuple[ModuleStructure, ...]:
    operators: defaultdict[str, Counter[str]] = defaultdict(Counter)
    signatures: defaultdict[str, Counter[str]] = defaultdict(Counter)
    weights: defaultdict[str, list[StoredWeight]] = defaultdict(list)
    parameters: Counter[str] = Counter()
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        operators[tag][node.operator] += 1
        signatures[tag][node_signature(node)] += 1
    for weight, tag in zip(contents.weights, weight_owners(tree, contents), strict=True):
        weights[tag].append(StoredWeight(weight.name, weight.dtype, weight.shape, weight.size_bytes or 0))
        parameters[tag] += weight.parameters if weight.has_parameters else 0
    known = [(module.path, module.tag, module.class_name) for module in tree.modules]
    if operators[""] or weights[""]:
        known.append(("", "", _NO_MODULE))
    return tuple(
        ModuleStructure(
            path,
            tag,
            class_name,
            operators[tag],
            signatures[tag],
            tuple(weights[tag]),
            parameters[tag],
            sum(weight.size_bytes for weight in weights[tag]),
        )
        for path, tag, class_name in known
    )


def _changed_module(match: MatchedModule, weights: WeightEquality) -> ChangedModule | None:
    """Return what changed of a module; None where nothing did."""
    before, after = match.before, match.after
    displayed = after or before
    assert displayed is not None  # a match has one side at least
    old_operators = before.operators if before else {}
    new_operators = after.operators if after else {}
    operators = changed_counts(old_operators, new_operators)
    changes = [
        _weight_change(left, right)
        for left, right in match_weights(
            before.weights if before else (), after.weights if after else (), weights.are_equal
        )
    ]
    attributes = _changed_attributes(before, after) if before and after else 0
    is_changed = bool(operators or changes or attributes)
    status: ModuleStatus
    if before is None:
        status = "added"
    elif after is None:
        status = "removed"
    elif match.is_renamed:
        status = "renamed"
    elif is_changed:
        status = "changed"
    else:
        return None
    return ChangedModule(
        status=status,
        module=displayed.path,
        tag=displayed.tag,
        class_name=displayed.class_name,
        nodes=(before.nodes if before else 0, after.nodes if after else 0),
        parameters=(before.parameters if before else 0, after.parameters if after else 0),
        size_bytes=(before.size_bytes if before else 0, after.size_bytes if after else 0),
        operators=operators,
        dtypes=changed_counts(_bytes_by_dtype(before), _bytes_by_dtype(after)),
        weights=tuple(changes),
        attributes_changed=attributes,
        renamed_from=before.tag if before is not None and match.is_renamed else "",
    )


def _weight_change(before: StoredWeight | None, after: StoredWeight | None) -> WeightChange:
    if before is None:
        assert after is not None  # a match has one side at least
        return WeightChange(after.name, "added", after=after.words)
    if after is None:
        return WeightChange(before.name, "removed", before=before.words)
    renamed_from = before.name if before.name != after.name else ""
    status: Literal["renamed", "changed"] = "renamed" if renamed_from and before.words == after.words else "changed"
    return WeightChange(after.name, status, before.words, after.words, renamed_from)


def _changed_attributes(before: ModuleStructure, after: ModuleStructure) -> int:
    """Return how many nodes have an operator as before with other attributes."""
    gone = Counter(before.signatures) - Counter(after.signatures)
    come = Counter(after.signatures) - Counter(before.signatures)
    by_operator = [Counter[str](), Counter[str]()]
    for counts, signatures in zip(by_operator, (gone, come), strict=True):
        for signature, count in signatures.items():
            counts[signature.rpartition(" ")[0]] += count
    return sum((by_operator[0] & by_operator[1]).values())


def _bytes_by_dtype(module: ModuleStructure | None) -> Counter[str]:
    counts: Counter[str] = Counter()
    for weight in module.weights if module else ():
        counts[weight.dtype] += weight.size_bytes
    return counts


def _interface_changes(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[str, ...]:
    """Return what changed of inputs, outputs, opsets and functions, a sentence each."""
    changes = []
    for kind in ("input", "output"):
        old, new = _declared_values(before.graph, kind), _declared_values(after.graph, kind)
        changes += [f"{kind} {name} {old[name]} was removed" for name in old if name not in new]
        changes += [f"{kind} {name} {new[name]} was added" for name in new if name not in old]
        changes += [
            f"{kind} {name} changed from {old[name]} to {new[name]}"
            for name in old
            if name in new and old[name] != new[name]
        ]
        if [name for name in old if name in new] != [name for name in new if name in old]:
            changes.append(f"the order of the {kind}s changed")
    old_opsets = {entry.domain or "ai.onnx": entry.version for entry in before.opset_import}
    new_opsets = {entry.domain or "ai.onnx": entry.version for entry in after.opset_import}
    for domain, (left, right) in changed_counts(old_opsets, new_opsets).items():
        changes.append(f"opset of {domain} was {left or 'absent'}, is {right or 'absent'}")
    return tuple(changes)


def _declared_values(graph: onnx.GraphProto, kind: str) -> dict[str, str]:
    initialized = {tensor.name for tensor in graph.initializer}
    values = {}
    for value in getattr(graph, kind):
        tensor = value.type.tensor_type
        if value.name in initialized:
            continue
        sizes = [
            str(size.dim_value) if size.HasField("dim_value") else size.dim_param or "?" for size in tensor.shape.dim
        ]
        values[value.name] = f"{onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{', '.join(sizes)}]"
    return values


def _notes(before: OnnxTree, after: OnnxTree) -> tuple[str, ...]:
    if before.source == after.source:
        return ()
    where = (
        f"Modules come from {before.source} in the first file and from {after.source} in the second, so they may "
        "not match."
    )
    return (f"{where} winml retag transfers tags from the source file.",)
