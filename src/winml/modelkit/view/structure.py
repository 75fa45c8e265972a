"""Reading of a model as nested modules with ports, in which equal modules are stored once.

A module is stored as a template: its weights, its items (nodes and inner modules), and the source of each item's
inputs. A template contains no name from outside the module: inputs are numbered, and names inside start with a
placeholder for the path of the module. Equal layers have equal templates, so a page contains one of them. The format
is described in ``docs/reference/formats.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from winml.modelkit.metadata_keys import (
    BUILDER_CLASSES_KEY,
    BUILDER_SCOPES_KEY,
    CLASSES_KEY,
    DEPTH_KEY,
    MODULE_KEY,
    NAMESPACE_KEY,
    SCOPES_KEY,
    SOURCE_KEY,
    TAG_KEY,
)
from winml.modelkit.onnx.contents import Contents, ValueTypes, Weight, dtype_name, read_contents, read_value_types
from winml.modelkit.onnx.files.reading import inline_functions, read_structure
from winml.modelkit.onnx.module_costs import Cost, charge_modules, count_node_macs, weight_owners
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.onnx.quantized_weights import count_parameters
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.tree import ModuleTree
from winml.modelkit.words import shape_words

LARGEST_LEVEL = 150
"""Chosen: maximum number of items of one level; a level of this size is laid out in 0.3 s (measured in Chromium)."""
LONGEST_TEXT = 200
"""Chosen: maximum length of the text of an attribute or a metadata entry; the file contains the rest."""
_OWN_KEYS = {
    TAG_KEY, DEPTH_KEY, MODULE_KEY, SOURCE_KEY, NAMESPACE_KEY, SCOPES_KEY, CLASSES_KEY, BUILDER_SCOPES_KEY,
    BUILDER_CLASSES_KEY,
}  # fmt: skip
"""Metadata of a node that its module states already."""

Template = dict[str, Any]
Reference = tuple[int, int]
"""Source of an input: position of an item and of its output; or a negative number of :class:`Origin`, and a
position."""


class Origin:
    """Negative first numbers of a :data:`Reference`."""

    MODULE_INPUT = -1
    WEIGHT = -2
    ABSENT = -3
    """An optional input that is not used, or a value that the file does not define."""


@dataclass(eq=False)
class ModuleLevel:
    """A module in the tree of a page, or a group of items of a module with many items."""

    address: ModuleAddress
    label: str
    parent: ModuleLevel | None
    own: Cost = field(default_factory=Cost)
    is_group: bool = False
    weights: list[int] = field(default_factory=list)
    items: list[ModuleLevel | int] = field(default_factory=list)
    """Inner modules and positions of nodes, in the order of the graph."""
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    """Values that are read outside."""

    @cached_property
    def chain(self) -> tuple[ModuleLevel, ...]:
        """The modules from the root to this one."""
        return (*(self.parent.chain if self.parent else ()), self)

    @property
    def total(self) -> Cost:
        """Cost including all modules below."""
        return sum((level.own for level in self.walk()), Cost())

    def walk(self) -> Iterator[ModuleLevel]:
        """Yield the module and the modules below it, in the order of the page."""
        yield self
        for item in self.items:
            if isinstance(item, ModuleLevel):
                yield from item.walk()


class GraphFile(NamedTuple):
    """The content of an ONNX file, without weights."""

    path: Path
    model: onnx.ModelProto
    contents: Contents
    tree: OnnxTree
    types: ValueTypes
    macs: Sequence[int | None]
    """Multiply-accumulate operations of each node; None: unknown."""
    notes: tuple[str, ...]

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the model."""
        return {entry.key: entry.value for entry in self.model.metadata_props}


def read_graph_file(path: Path) -> GraphFile:
    """Read nodes, module tree and types of a file.

    Raises:
        InputError: the file is damaged or no ONNX file.
    """
    model = read_structure(path, as_written=True)
    inline_functions(model, path)
    contents = read_contents(model)
    count_parameters(contents)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, model.graph.name.strip("/") or "graph")
    needed = {name for node in contents.nodes if node.place == "graph" for name in node.proto.output if name}
    types, notes = read_value_types(model, needed, "types and operations of some values are unknown")
    macs = count_node_macs(contents, types.shapes)
    return GraphFile(path, model, contents, tree, types, macs, (*tree.notes, *notes))


def _module_scope(path: str) -> str:
    """Return the prefix of the names of the nodes of a module, as torch's exporter writes it.

    >>> _module_scope("encoder.layer.0.attention")
    '/encoder/layer.0/attention'
    """
    return "/" + re.sub(r"\.(?!\d+(?:\.|$))", "/", path) if path else ""


def build_levels(file: GraphFile) -> ModuleLevel:
    """Build the nested modules of a file with their nodes, weights, inputs and outputs."""
    costs, outside = charge_modules(file.tree, file.contents, file.macs)
    levels: dict[str, ModuleLevel] = {}
    roots = [module for module in costs if address.depth(module.tag) == 1]
    if len(roots) == 1 and not outside.nodes:
        root = ModuleLevel(roots[0], address.last_segment(roots[0].tag), None)
    else:
        root = ModuleLevel(ModuleAddress("", "", ""), file.model.graph.name.strip("/") or "graph", None, outside)
    for module in costs:
        parent = levels.get(module.tag.rpartition(address.SEPARATOR)[0], root)
        is_root = module.tag == root.address.tag
        level = root if is_root else ModuleLevel(module, address.last_segment(module.tag), parent)
        level.own = module.own
        levels[module.tag] = level
    homes = [levels.get(tag, root) for tag in file.tree.tags]
    _place_items(root, levels.values(), homes)
    for index, tag in enumerate(weight_owners(file.tree, file.contents)):
        levels.get(tag, root).weights.append(index)
    for level in list(root.walk()):
        _group_items(level, homes)
    _find_ports(root, homes, file)
    return root


def _place_items(root: ModuleLevel, levels: Iterable[ModuleLevel], homes: Sequence[ModuleLevel]) -> None:
    """Append nodes and inner modules to their modules, in the order of the first node."""
    placed = {root}

    def place(level: ModuleLevel) -> None:
        if level not in placed:
            placed.add(level)
            assert level.parent is not None  # only the root has none
            place(level.parent)
            level.parent.items.append(level)

    for position, level in enumerate(homes):
        place(level)
        level.items.append(position)
    for level in levels:  # modules without nodes
        place(level)


def _group_items(level: ModuleLevel, homes: list[ModuleLevel]) -> None:
    """Divide the items of a large level into groups of consecutive items."""
    if len(level.items) <= LARGEST_LEVEL:
        return
    groups: list[ModuleLevel | int] = []
    for start in range(0, len(level.items), LARGEST_LEVEL):
        items = level.items[start : start + LARGEST_LEVEL]
        group = ModuleLevel(
            level.address, f"items {start + 1} … {start + len(items)}", level, is_group=True, items=items
        )
        for item in items:
            if isinstance(item, ModuleLevel):
                item.parent = group
            else:
                homes[item] = group
        groups.append(group)
    level.items = groups
    _group_items(level, homes)


def _find_ports(root: ModuleLevel, homes: Sequence[ModuleLevel], file: GraphFile) -> None:
    """Find the inputs and outputs of each module: values that cross its boundary."""
    makers: dict[str, ModuleLevel] = {}
    for level in root.walk():
        makers |= dict.fromkeys((file.contents.weights[index].name for index in level.weights), level)
    for node, level in zip(file.contents.nodes, homes, strict=True):
        if node.held_weight is None:
            makers |= dict.fromkeys(filter(None, node.proto.output), level)
    for value in file.model.graph.input:
        if value.name not in makers:
            root.inputs[value.name] = None
    for node, level in zip(file.contents.nodes, homes, strict=True):
        for name in filter(None, node.proto.input):
            maker = makers.get(name)
            origin_chain: tuple[ModuleLevel, ...] = maker.chain if maker else ()
            for depth, reader in enumerate(level.chain):
                if depth >= len(origin_chain) or origin_chain[depth] is not reader:
                    reader.inputs[name] = None
            for depth, module in enumerate(origin_chain):
                if depth >= len(level.chain) or level.chain[depth] is not module:
                    module.outputs[name] = None
    for value in file.model.graph.output:
        maker = makers.get(value.name)
        for module in maker.chain if maker else ():
            module.outputs[value.name] = None


def build_checkpoint_levels(tree: ModuleTree) -> ModuleLevel:
    """Build the nested modules of a checkpoint before its export, with their parameters and without nodes."""
    levels: dict[str | None, ModuleLevel] = {}
    for node in tree:
        level = ModuleLevel(node, address.last_segment(node.tag), levels.get(node.parent))
        level.own = Cost(parameters=sum(map(math.prod, node.parameter_shapes.values())))
        levels[node.path] = level
        if level.parent is not None:
            level.parent.items.append(level)
    return levels[tree.root.path]


@dataclass
class TemplateStore:
    """Templates of all modules of a page, each once, and the texts that they share."""

    templates: list[Template] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Types, operators and classes."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, template: Template) -> int:
        """Return the number of a template; equal templates have one number."""
        key = json.dumps(template, ensure_ascii=False)
        if key not in self._numbers:
            self._numbers[key] = len(self.templates)
            self.templates.append(template)
        return self._numbers[key]

    def text(self, text: str) -> int:
        """Return the number of a shared text."""
        key = f"text {text}"
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(text)
        return self._numbers[key]


@dataclass
class TemplateWriter:
    """Writes the modules of one file as templates."""

    file: GraphFile | None
    """None: the modules have no nodes."""
    store: TemplateStore

    def add(self, level: ModuleLevel) -> int:
        """Return the number of the template of a module."""
        sources: dict[str, Reference] = {name: (Origin.MODULE_INPUT, index) for index, name in enumerate(level.inputs)}
        weights = self.file.contents.weights if self.file else []
        nodes = self.file.contents.nodes if self.file else []
        sources |= {weights[index].name: (Origin.WEIGHT, place) for place, index in enumerate(level.weights)}
        for place, item in enumerate(level.items):
            outputs = item.outputs if isinstance(item, ModuleLevel) else nodes[item].proto.output
            sources |= {name: (place, port) for port, name in enumerate(outputs) if name and name not in sources}
        template: Template = {
            "c": self.store.text(level.address.class_name),
            "n": [level.own.nodes, level.own.parameters, level.own.size_bytes, level.own.macs],
            "w": [self._weight_entry(weights[index], level) for index in level.weights],
            "i": [self._type_number(name) for name in level.inputs],
            "o": [_reference(sources, name) for name in level.outputs],
            "x": [
                self._module_entry(item, level, sources)
                if isinstance(item, ModuleLevel)
                else self._node_entry(item, level, sources)
                for item in level.items
            ],
        }
        if level.own.weight_parameters:
            template["b"] = [level.own.weight_bytes, level.own.weight_parameters]
        if level.is_group:
            template["g"] = 1
        return self.store.add({key: value for key, value in template.items() if value != []})

    def _module_entry(self, module: ModuleLevel, level: ModuleLevel, sources: dict[str, Reference]) -> list[Any]:
        path = _relative_path(module.address.path, level.address.path)
        return [module.label, path, self.add(module), [_reference(sources, name) for name in module.inputs]]

    def _node_entry(self, position: int, level: ModuleLevel, sources: dict[str, Reference]) -> list[Any]:
        """Return name, operator, inputs, outputs and, if any, further facts of a node."""
        assert self.file is not None  # a node is a node of a file
        node, macs = self.file.contents.nodes[position], self.file.macs[position]
        metadata = {entry.key: entry.value for entry in node.proto.metadata_props}
        facts: dict[str, Any] = {
            "a": [[entry.name, _attribute_words(entry)] for entry in node.proto.attribute],
            "s": metadata.get(SOURCE_KEY, ""),
            "m": [[key, _cut(_relative_json(text, level))] for key, text in metadata.items() if key not in _OWN_KEYS],
            "f": macs if macs is not None else "?",
            "p": "" if node.place == "graph" else node.place,
        }
        inputs = [(Origin.ABSENT, 0) if not name else _reference(sources, name) for name in node.proto.input]
        outputs = [[self._output_name(name, level), self._type_number(name)] for name in node.proto.output]
        entry = [relative_name(node.proto.name, level), self.store.text(node.operator), inputs, outputs]
        facts = {key: value for key, value in facts.items() if value}
        return [*entry, facts] if facts else entry

    @cached_property
    def _graph_outputs(self) -> frozenset[str]:
        assert self.file is not None  # outputs are outputs of a file
        return frozenset(value.name for value in self.file.model.graph.output)

    @cached_property
    def _read_values(self) -> frozenset[str]:
        assert self.file is not None  # values are values of a file
        return frozenset(name for node in self.file.contents.nodes for name in node.proto.input)

    def _output_name(self, name: str, level: ModuleLevel) -> str:
        """Return the name of an output of a node; of an output of the graph, its number among those of the module.

        A value without a reader has no name: tools number such values, and equal layers would differ.
        """
        if name in self._graph_outputs and name in level.outputs:
            return f"~^{list(level.outputs).index(name)}"
        return relative_name(name, level) if name in self._read_values else ""

    def _type_number(self, name: str) -> int:
        assert self.file is not None  # a value is a value of a file
        types = self.file.types
        shape = types.shapes.get(name)
        dtype = types.dtypes.get(name, "")
        if shape is None:
            return self.store.text(f"{dtype}[…]" if dtype else "")
        return self.store.text(shape_words(dtype or "?", shape))

    def _weight_entry(self, weight: Weight, level: ModuleLevel) -> list[Any]:
        """Return name, type, kind of the packed values and bytes of a weight."""
        type_number = self.store.text(shape_words(weight.dtype, weight.shape))
        return [relative_name(weight.name, level), type_number, weight.kind, weight.size_bytes, weight.parameters]


def _reference(sources: dict[str, Reference], name: str) -> Reference:
    return sources.get(name, (Origin.ABSENT, 1))


def _relative_path(path: str, outer: str) -> str:
    """Return a module path relative to that of the enclosing module; a foreign path starts with ``=``."""
    if path == outer:
        return ""
    if not outer:
        return f".{path}"
    return path[len(outer) :] if path.startswith(f"{outer}.") else f"={path}"


def relative_name(name: str, level: ModuleLevel) -> str:
    """Replace the path of a module, or of a module around it, at the start of a name by a placeholder.

    The placeholder is ``~``, the number of levels up, and the separator of the name. A name that starts with ``~``
    gets a second one.
    """
    paths = dict.fromkeys(module.address.path for module in reversed(level.chain) if module.address.path)
    for up, path in enumerate(paths):
        for start in (_module_scope(path) + "/", f"{path}."):
            if name.startswith(start):
                return f"~{up}{name[len(start) - 1 :]}"
    return f"~{name}" if name.startswith("~") else name


def _relative_json(text: str, level: ModuleLevel) -> str:
    """Replace module paths in a JSON array of paths; other texts are unchanged."""
    try:
        paths = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return text
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return text
    return ", ".join(relative_name(f"{path}.", level).rstrip(".") for path in paths)


def _attribute_words(attribute: onnx.AttributeProto) -> str:
    """Format the value of an attribute; long values are cut off."""
    if attribute.HasField("t") or attribute.HasField("sparse_tensor"):
        tensor = attribute.t if attribute.HasField("t") else attribute.sparse_tensor.values
        return shape_words(dtype_name(tensor.data_type), tuple(tensor.dims))
    if attribute.HasField("g") or attribute.graphs:
        graphs = [attribute.g] if attribute.HasField("g") else attribute.graphs
        return ", ".join(f"graph {graph.name} of {len(graph.node)} nodes" for graph in graphs)
    if attribute.name == "to" and attribute.HasField("i"):  # of a Cast
        return dtype_name(attribute.i)
    single = [getattr(attribute, name) for name in ("i", "f", "s") if attribute.HasField(name)]
    values = single or [*attribute.ints, *attribute.floats, *attribute.strings]
    return _cut(", ".join(map(_value_words, values[:LONGEST_TEXT])))


def _value_words(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
