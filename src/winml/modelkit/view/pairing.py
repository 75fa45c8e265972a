"""Alignment of two models: changed modules by tag, and the nodes that replaced other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from winml.modelkit.compare.diff import diff_models
from winml.modelkit.compare.records import ChangedModule
from winml.modelkit.view.known import Measure
from winml.modelkit.view.structure import GraphFile, ModuleLevel
from winml.modelkit.view.titles import UNCHANGED
from winml.modelkit.words import count_noun, first_words, size_words

_MAX_LISTED = 8
"""Chosen: operators in a sentence about a module, which fit on two lines of a page, or sentences about inputs."""


@dataclass
class Pairing:
    """Changes between two models, for all parts that both have."""

    differing: int = 0
    """Number of modules that differ."""
    renamed: list[list[str]] = field(default_factory=list)
    """Part, tag after, and tag before."""
    changes: dict[str, list[str]] = field(default_factory=dict)
    """Part and tag after, or before if the module was removed → sentences."""
    statuses: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Of each side: part and tag → one word for the change of the module."""
    replaced: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Part → node after that is no node before → the nodes before that it replaced."""
    replaced_by: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Part → node before that is no node after → the nodes after that replaced it."""
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, before: tuple[GraphFile, ModuleLevel], after: tuple[GraphFile, ModuleLevel]) -> None:
        """Compare one part of both models.

        Raises:
            InputError: the data of a file is missing.
        """
        diff = diff_models(before[0].path, after[0].path)
        self.differing += len(diff.modules)
        self.notes += diff.notes
        bits = [{level.address.tag: level.own.bits for level in root.walk()} for _, root in (before, after)]
        replaced, replaced_by = _find_replaced_nodes(before[0].model, after[0].model)
        self.replaced[part], self.replaced_by[part] = replaced, replaced_by
        merged = {name for name, sources in replaced.items() if len(sources) > 1}
        nodes, tags = after[0].contents.nodes, after[0].tree.tags
        homes = {_node_key(node.proto): tag for node, tag in zip(nodes, tags, strict=True)}
        merging = {homes.get(name, "") for name in merged}
        for module in diff.modules:
            status = _status(module, bits[0], bits[1], merging)
            self.changes[f"{part} {module.tag}"] = list(_change_words(module))
            if module.renamed_from:
                self.renamed.append([part, module.tag, module.renamed_from])
            if module.status != "removed":
                self.statuses[1][f"{part} {module.tag}"] = status
            if module.status != "added":
                self.statuses[0][f"{part} {module.renamed_from or module.tag}"] = status
        root_key = f"{part} {after[1].address.tag}"
        if diff.interface or diff.is_rewired:
            wiring = ["nodes and weights are equal, but connected differently"] if diff.is_rewired else []
            interface = list(diff.interface)
            if (others := len(interface) - _MAX_LISTED) > 1:
                interface[_MAX_LISTED:] = [f"{others} other changes of inputs and outputs"]
            self.changes.setdefault(root_key, []).extend([*interface, *wiring])

    def add_placements(self, part: str, root: ModuleLevel, before: Measure, after: Measure) -> None:
        """Note the modules whose nodes moved: to another provider, or out of it.

        Args:
            part: Name of the part.
            root: Modules of the second model.
            before: Placement of the modules of the first model, from an earlier run.
            after: The same of the second model.
        """
        for level in root.walk():
            address = level.address
            places = [measure.value(address.tag, address.path) for measure in (before, after)]
            was, now = (f"{measure.title}: {place}" for measure, place in zip((before, after), places, strict=True))
            if None in places or level.is_group or was == now:
                continue
            self.changes.setdefault(f"{part} {address.tag}", []).append(f"moved; {now}; before, {was}")
            for statuses in self.statuses:
                statuses.setdefault(f"{part} {address.tag}", "moved")

    def as_data(self) -> dict[str, Any]:
        """Return the entries of the page."""
        return {
            "renamed": self.renamed,
            "changes": self.changes,
            "replaced": self.replaced,
            "replacedBy": self.replaced_by,
        }

    def status(self, side: int, part: str, level: ModuleLevel) -> str | None:
        """Return one word for the change of a module of a side; None for a group of items."""
        changed = self.statuses[side]
        if level.is_group:
            return None
        if status := changed.get(f"{part} {level.address.tag}"):
            return status
        return UNCHANGED[any(f"{part} {inner.address.tag}" in changed for inner in level.walk())]


def _status(
    module: ChangedModule, before: Mapping[str, float | None], after: Mapping[str, float | None], merging: set[str]
) -> str:
    """Return one word for the change of a module."""
    if module.status != "changed":
        return module.status
    bits_before, bits_after = before.get(module.tag), after.get(module.tag)
    if bits_before and bits_after and bits_after < bits_before:
        return "quantized"
    return "fused" if module.tag in merging else "changed"


def _change_words(module: ChangedModule) -> Iterator[str]:
    """Yield sentences on nodes, weights and types of a changed module."""
    if module.status in ("added", "removed"):
        yield f"the module was {module.status}"
    if module.renamed_from:
        yield f"its tag was {module.renamed_from}"
    if module.operators:
        texts = [f"{name} {after - before:+d}" for name, (before, after) in module.operators.items()]
        yield f"nodes: {first_words(texts, _MAX_LISTED, 'others')}"
    if module.attributes_changed:
        yield f"attributes of {count_noun(module.attributes_changed, 'node')}"
    for dtype, (before, after) in module.dtypes.items():
        yield f"{dtype} weights: {size_words(before)} before, {size_words(after)} after"
    same_types = [weight for weight in module.weights if weight.before == weight.after]
    if same_types and not module.dtypes:
        yield f"{count_noun(len(same_types), 'weight')} with other values"


def _find_replaced_nodes(
    before: onnx.ModelProto, after: onnx.ModelProto
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Find the nodes of two graphs that stand for each other, by the values that both compute.

    A node after that computes a value of the graph before replaced the nodes before that made the value, as far back
    as values that both graphs have, except for nodes that an earlier node replaced.

    Args:
        before: The graph before a tool.
        after: The graph after it.

    Returns:
        Node after → the nodes before that it replaced, for nodes that are new or changed (`[]`: new); node before →
        the nodes after that replaced it, for nodes that are gone (`[]`: without replacement). Keys are those of
        :func:`_node_key`.
    """
    makers = {name: node for node in before.graph.node for name in node.output if name}
    present = {name for node in after.graph.node for name in node.output}
    present |= {value.name for value in after.graph.input} | {tensor.name for tensor in after.graph.initializer}
    replaced: dict[str, list[str]] = {}
    survivors: set[str] = set()
    claimed: set[str] = set()
    for node in after.graph.node:
        old_makers = [makers[name] for name in node.output if name in makers]
        same = next(
            (maker for maker in old_makers if maker.op_type == node.op_type and maker.domain == node.domain), None
        )
        if same is not None:
            survivors.add(_node_key(same))
        else:
            region = list(_region(old_makers, makers, present))
            replaced[_node_key(node)] = [name for name in region if name not in claimed]
            claimed.update(region)
    gone = [key for node in before.graph.node if (key := _node_key(node)) not in survivors]
    replaced_by: dict[str, list[str]] = {key: [] for key in gone}
    for name, sources in replaced.items():
        replaced[name] = [source for source in sources if source not in survivors]
        for source in replaced[name]:
            replaced_by.setdefault(source, []).append(name)
    return replaced, replaced_by


def _region(
    old_makers: Sequence[onnx.NodeProto], makers: Mapping[str, onnx.NodeProto], present: set[str]
) -> Iterable[str]:
    """Return the keys of the nodes behind some nodes, as far back as values in ``present``."""
    found: dict[str, None] = {}
    waiting = list(old_makers)
    while waiting:
        node = waiting.pop()
        if _node_key(node) in found:
            continue
        found[_node_key(node)] = None
        waiting += [makers[name] for name in node.input if name in makers and name not in present]
    return found


def _node_key(node: onnx.NodeProto) -> str:
    """Return the name of a node, or the name of its first output if it has none."""
    return node.name or next(filter(None, node.output), "")
