"""Parts of a model that are quantized alone, and rules that exclude some of them.

A part is a module with all submodules, or the nodes of a module outside its selected submodules. Reads the plan of a
quantization; runs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import PlannedNode, QuantizationPlan, plan_quantization
from winml.modelkit.quantize.precisions import FLOAT32, PrecisionName
from winml.modelkit.quantize.preparation import PreparedGraph
from winml.modelkit.quantize.sensitivity_records import Part
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import PATH_SEPARATOR, ModuleAddress, Selector, escape, select


@dataclass(frozen=True)
class ModulePart:
    """Nodes quantized together."""

    module: ModuleAddress
    part: Part
    nodes: tuple[PlannedNode, ...]
    """Nodes to quantize; ``()`` without any."""
    is_unit: bool
    """True if all other parts either contain all of these nodes or none: the units together are the model."""
    inner: tuple[str, ...] = ()
    """Tags of the submodules that are separate parts, for a part of own nodes."""

    @property
    def node_names(self) -> frozenset[str]:
        """Names of the nodes."""
        return frozenset(node.name for node in self.nodes)

    @property
    def precision(self) -> str:
        """Requested precision of its weights."""
        return ", ".join(dict.fromkeys(node.requested.name for node in self.nodes))


def list_parts(
    plan: QuantizationPlan, modules: GraphModules, depth: int | None, selector: str | None
) -> tuple[ModulePart, ...]:
    """List the parts of a model, in tree order.

    Args:
        plan: Decisions for its nodes.
        modules: Its modules.
        depth: Levels of the tree; modules below count towards their ancestor. ``None``: all.
        selector: Selected modules. ``None``: all.

    Raises:
        UsageError: the tree has fewer levels, or the selector names no module or none with a node to quantize.
    """
    chosen = _select_modules(modules, depth, selector)
    planned = [node for node in plan.nodes if node.mode is not None]
    tags = list(chosen)
    owners = {node.name: _find_owner(node.tag, tags) for node in planned}
    parts: list[ModulePart] = []
    for tag, module in chosen.items():
        nodes = tuple(node for node in planned if address.is_within(node.tag, tag))
        own_nodes = tuple(node for node in nodes if owners[node.name] == tag)
        parts.append(ModulePart(module, "module", nodes, is_unit=bool(own_nodes) and len(own_nodes) == len(nodes)))
        if own_nodes and len(own_nodes) < len(nodes):
            inner = dict.fromkeys(owners[node.name] for node in nodes if owners[node.name] != tag)
            parts.append(ModulePart(module, "own nodes", own_nodes, is_unit=True, inner=tuple(inner)))
    if not any(part.nodes for part in parts):
        if depth is not None and selector is not None:
            deeper = _select_modules(modules, None, selector)
            measurable = [tag for tag in deeper if any(address.is_within(node.tag, tag) for node in planned)]
            if measurable:
                least = min(map(address.depth, measurable))
                raise UsageError(
                    f"{opt.module} {selector}: has no module with a node to quantize up to {opt.depth} {depth}",
                    hint=f"Set {opt.depth} {least} or more, or omit it.",
                )
        raise UsageError(
            (f"{opt.module} {selector}" if selector else "the modules of the file") + ": no node can be quantized",
            hint="Select modules with weights; winml inspect shows the tree.",
        )
    return tuple(parts)


def _select_modules(modules: GraphModules, depth: int | None, selector: str | None) -> dict[str, ModuleAddress]:
    """Return tag → module for the selected modules up to a depth.

    Raises:
        UsageError: the tree has fewer levels.
    """
    levels = max((address.depth(module.tag) for module in modules.modules), default=0)
    if depth is not None and depth > levels:
        raise UsageError(
            f"{opt.depth} {depth}: the module tree has {levels} level(s)",
            hint=f"Set 1 to {levels}, or omit it for all levels.",
        )
    chosen = select(modules.modules, selector, modules.tag_of) if selector is not None else modules.modules
    return {module.tag: module for module in chosen if depth is None or address.depth(module.tag) <= depth}


def _find_owner(tag: str, chosen: Sequence[str]) -> str:
    """Deepest of some modules that contains a node with this tag; empty if none does."""
    return max((ancestor for ancestor in chosen if address.is_within(tag, ancestor)), key=len, default="")


def only_options(part: ModulePart, options: QuantizeOptions, modules: GraphModules) -> QuantizeOptions:
    """Options that quantize only one part, as in the whole model."""
    tag = part.module.tag
    included = [other_tag for text in options.include for other_tag in modules.selected_tags(text)]
    within = [tag] if not included or any(address.is_within(tag, other_tag) for other_tag in included) else [
        other_tag for other_tag in included if address.is_within(other_tag, tag)
    ]  # fmt: skip
    inner: dict[str, PrecisionName] = {escape(other_tag): FLOAT32 for other_tag in part.inner}
    include = tuple(escape(other_tag) for other_tag in within)
    return options.model_copy(update={"include": include, "per_module": _put_first(inner, options)})


def excluding_options(
    excluded: Collection[ModulePart], units: Sequence[ModulePart], options: QuantizeOptions
) -> QuantizeOptions:
    """Options that keep some units float.

    The first match wins, so rules of inner modules precede those of their ancestors. An inner module that is quantized
    inside an excluded module gets a separate rule.
    """
    rules: dict[str, PrecisionName] = {unit.module.tag: FLOAT32 for unit in excluded}
    excluded_tags = set(rules)
    for unit in units:
        tag = unit.module.tag
        if tag not in excluded_tags and any(address.is_within(tag, excluded_tag) for excluded_tag in excluded_tags):
            rules |= {tag: unit.nodes[0].requested.name}
            if len({node.requested for node in unit.nodes}) > 1:
                rules |= {node.tag: node.requested.name for node in unit.nodes}
    ordered = sorted(rules.items(), key=lambda rule: -address.depth(rule[0]))
    added = {escape(tag): precision for tag, precision in ordered}
    return options.model_copy(update={"per_module": _put_first(added, options)})


def _put_first(rules: Mapping[str, PrecisionName], options: QuantizeOptions) -> dict[str, PrecisionName]:
    """Put rules before those of the user; a user's rule for the same selector is replaced."""
    return {**rules, **{text: name for text, name in options.per_module.items() if text not in rules}}


def shorten_rules(
    graph: PreparedGraph, options: QuantizeOptions, excluding: QuantizeOptions, names: Collection[str]
) -> Mapping[str, PrecisionName]:
    """Return the rules that exclude modules as few selectors by module path, which all exports of a model share.

    Equal modules share a selector with wildcards, such as ``encoder.layer.*.output``, if the rule applies to all of
    them.

    Args:
        graph: The graph.
        options: Requested options.
        excluding: The same options with the rules of :func:`excluding_options`.
        names: Names of the nodes that the options quantize.

    Returns:
        Selector → precision; the rules of ``excluding`` if selectors by path cannot express them.
    """
    precisions = _plan_precisions(graph, excluding, names)
    rules = _list_module_rules(graph.modules, precisions, options.base.name)
    shortened = _put_first(_fold_rules(rules, graph.modules), options)
    tried = _plan_precisions(graph, options.model_copy(update={"per_module": shortened}), names)
    return shortened if tried == precisions else excluding.per_module


def _plan_precisions(graph: PreparedGraph, options: QuantizeOptions, names: Collection[str]) -> dict[str, str]:
    """Name of a node → its precision with some options."""
    plan = plan_quantization(graph.model, options, graph.modules)
    quantized = {node.name: node.requested.name for node in plan.nodes if node.mode is not None}
    return {name: quantized.get(name, FLOAT32) for name in names}


def _list_module_rules(
    modules: GraphModules, precisions: Mapping[str, str], base: str
) -> Iterator[tuple[ModuleAddress, str]]:
    """Yield each module whose precision differs from the precision that it inherits, and its precision.

    Args:
        modules: Modules of the graph.
        precisions: Name of a node → its precision.
        base: Precision of modules without a rule.
    """
    own: dict[str, set[str]] = {}
    inside: dict[str, set[str]] = {}
    for name, precision in precisions.items():
        tag = modules.tag_of.get(name, "")
        own.setdefault(tag, set()).add(precision)
        for around in address.lineage(tag):
            inside.setdefault(around, set()).add(precision)
    reached: dict[str, str] = {}
    for module in sorted(modules.modules, key=lambda module: address.depth(module.tag)):
        inherited = reached.get(address.nearest_ancestor(module.tag, reached), base)
        if module.tag in reached:
            continue  # a second module with the tag
        # A module without nodes of its own decides for its submodules if they agree.
        candidates = inside.get(module.tag, set())
        if len(candidates) > 1:
            candidates = own.get(module.tag, set())
        reached[module.tag] = next(iter(candidates)) if len(candidates) == 1 else inherited
        if reached[module.tag] != inherited:
            yield module, reached[module.tag]


def _fold_rules(rules: Iterable[tuple[ModuleAddress, str]], modules: GraphModules) -> dict[str, str]:
    """Selector → precision, inner modules first; modules with the same precision share a selector with wildcards."""
    remaining = {module.tag: (module, precision) for module, precision in rules}
    folded: list[tuple[int, str, str]] = []
    while remaining:
        tag, (module, precision) = next(iter(remaining.items()))
        for text in _wildcard_selectors(module.path) if module.path else ():
            tags = {other.tag for other in modules.modules if Selector(text).matches(other)}
            is_single = len(tags) == 1 and text != escape(module.path)
            if not is_single and all(precision == remaining.get(other, (module, ""))[1] for other in tags):
                break
        else:
            text, tags = escape(tag), {tag}
        folded.append((address.depth(tag), text, precision))
        for other in tags:
            del remaining[other]
    return {text: precision for _, text, precision in sorted(folded, key=lambda rule: -rule[0])}


def _wildcard_selectors(path: str) -> Iterator[str]:
    """Yield a path with its numbers replaced by wildcards, the most wildcards first; the last has none.

    >>> list(_wildcard_selectors("block.3.layer.1.wo"))
    ['block.*.layer.*.wo', 'block.*.layer.1.wo', 'block.3.layer.*.wo', 'block.3.layer.1.wo']
    """
    segments = path.split(PATH_SEPARATOR)
    numbers = [index for index, segment in enumerate(segments) if segment.isdigit()]
    for count in range(len(numbers), -1, -1):
        for chosen in itertools.combinations(numbers, count):
            yield PATH_SEPARATOR.join(
                "*" if index in chosen else escape(segment) for index, segment in enumerate(segments)
            )
