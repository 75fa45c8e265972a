"""Modules of nodes, selection of nodes by module, and conversion of modules to functions of the written file.

The conversion is the last step before any command writes a file. Commands of winml read a file with functions as the
original graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.onnx.function_folding import FIRST_IR_VERSION, FoldedModel, fold_modules
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.ort.graph_sessions import newest_ir_version
from winml.modelkit.tags import address, selector
from winml.modelkit.tags.address import SEPARATOR, ModuleIdentity
from winml.modelkit.tags.tagging import NodeTag, all_nodes, listed_modules, read_tag, write_tag
from winml.modelkit.tags.torch_modules import comes_with_torch
from winml.modelkit.transform.records import LeftOutModule, ModuleFunctions, PartlyOutside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def graph_modules(model: ir.Model, root: str) -> GraphModules:
    """Return the modules of a graph with its subgraphs, from tags, or else from node names.

    Args:
        model: The model.
        root: Name of the root if modules are read from node names.
    """
    return modules_of_tree(model, read_model_tree(model, root))


def read_model_tree(model: ir.Model, root: str) -> OnnxTree:
    """Return the module tree of a graph with its subgraphs and functions; its nodes are those of ``all_nodes``.

    Args:
        model: The model.
        root: Name of the root if modules are read from node names.
    """
    return read_tree([ir.serde.serialize_node(node) for node in all_nodes(model)], model.metadata_props, root)


def modules_of_tree(model: ir.Model, tree: OnnxTree) -> GraphModules:
    """Return the modules of a graph with its tree."""
    nodes = list(all_nodes(model))
    tag_of = {node.name or "": tag for node, tag in zip(nodes, tree.tags, strict=True)}
    return GraphModules(tree.modules, tag_of, tree.source, _find_fused_tags(nodes, tree))


def write_tree_tags(model: ir.Model, tree: OnnxTree) -> None:
    """Tag each untagged node with its module, in place: the modules that another tool named become tags."""
    paths = {module.tag: module.path for module in tree.modules}
    for node, tag in zip(all_nodes(model), tree.tags, strict=True):
        if tag and read_tag(node) is None:
            write_tag(node, NodeTag(tag, paths[tag], "direct"))


def _find_fused_tags(nodes: Iterable[ir.Node], tree: OnnxTree) -> dict[str, frozenset[str]]:
    """Return name of a fused node → tags of all modules with a fused operator."""
    tags = {module.path: module.tag for module in tree.modules if module.path or address.depth(module.tag) == 1}
    tags_by_node = {}
    for node in nodes:
        with contextlib.suppress(ValueError):  # a damaged list: the tag alone counts
            if paths := listed_modules(node):
                tags_by_node[node.name or ""] = frozenset(tags[path] for path in paths if path in tags)
    return tags_by_node


def source_notes(modules: GraphModules) -> list[str]:
    """Return a note on the source of module names if the nodes have no tags; affects selection by module."""
    if modules.source == "winml tags":
        return []
    if not modules.modules:
        return ["The nodes have no module information: all nodes were treated alike."]
    return [f"No node has a tag: modules were read from {modules.source}, where names may differ from PyTorch."]


def selected_nodes(
    model: ir.Model, included: Sequence[str], excluded: Sequence[str]
) -> tuple[frozenset[str], list[str]]:
    """Return the names of the selected nodes of the main graph, and notes on the source of module names.

    Args:
        model: The model; every node has a unique name.
        included: Selectors of modules to include with all submodules; empty for all modules.
        excluded: Selectors of modules to leave out with all submodules.

    Raises:
        UsageError: a selector names no module, or no node is left.
    """
    modules = graph_modules(model, model.graph.name or "graph")
    included_tags = _select_tags(opt.module, included, modules)
    excluded_tags = _select_tags(opt.exclude, excluded, modules)

    names = frozenset(
        str(node.name)
        for node in model.graph
        if (not included_tags or modules.works_only_for(str(node.name), included_tags))
        and not modules.does_work_of(str(node.name), excluded_tags)
    )
    if not names:
        raise UsageError(
            f"no node remains of {', '.join(included) or 'the graph'} after excluding {', '.join(excluded)}",
            hint=f"Exclude fewer modules with {opt.exclude}, or select more with {opt.module}.",
        )
    return names, source_notes(modules)


def _select_tags(option: str, selectors: Sequence[str], modules: GraphModules) -> frozenset[str]:
    """Return the tags of the selected modules.

    Raises:
        UsageError: a selector matches no node.
    """
    selected_tags: frozenset[str] = frozenset()
    for text in selectors:
        modules.refuse_idle(option, text, modules.tag_of, "no node of the graph belongs to it")
        selected_tags |= modules.selected_tags(text)
    return selected_tags


ALL, CLASSES = "all", "classes"
"""Values of ``--functions`` besides selectors."""


def functions_of_modules(model: ir.Model, requested: str) -> tuple[ir.Model, ModuleFunctions]:
    """Return a copy of the model with modules as functions, and the record of the functions.

    Args:
        model: A tagged model; it is not changed.
        requested: ``all`` for every module, ``classes`` for every module with one function for all modules of a class
            with equal graphs, or a selector of modules.

    Raises:
        UsageError: the selector matches nothing, or none of the modules can become a function.
        InputError: no node has a tag, or ONNX Runtime does not support the required IR version.
    """
    targets = find_function_targets(model, requested)
    folded = fold_modules(model, targets, "class" if requested == CLASSES else "none")
    result = _functions_record(model, folded, requested)
    if not result.functions:
        raise _no_function_error(requested, result.left_out[0].reason)
    return folded.model, result


def find_function_targets(model: ir.Model, requested: str) -> Sequence[selector.ModuleAddress]:
    """Return the modules of a graph to convert to functions; the graph is not changed.

    Raises:
        UsageError: the selector matches nothing.
        InputError: no node has a tag, or ONNX Runtime does not support the required IR version.
    """
    refuse_old_runtime()
    modules = graph_modules(model, model.graph.name or "graph")
    if modules.source != "winml tags":
        raise InputError(
            "the nodes have no module information, so no module can become a function",
            hint="Export it with winml export, or transfer tags from its source file: winml retag.",
        )
    return chosen_modules(modules.modules, requested)


def refuse_old_runtime() -> None:
    """Refuse functions if the installed ONNX Runtime cannot read them.

    Raises:
        InputError: ONNX Runtime does not support the required IR version.
    """
    if newest_ir_version() < FIRST_IR_VERSION:
        raise InputError(
            f"functions require IR version {FIRST_IR_VERSION}, and the installed ONNX Runtime supports at most "
            f"{newest_ir_version()}",
            hint=f"Update ONNX Runtime, or omit {opt.functions}.",
        )


def refuse_unregistered(model: nn.Module, requested: str) -> None:
    """Refuse a selector that cannot match any module of a PyTorch model, before the model runs.

    Executed modules and tags are known later; :func:`chosen_modules` checks the selectors again.

    Args:
        model: The model; its parameters may have no values.
        requested: As for :func:`functions_of_modules`.

    Raises:
        UsageError: the selector is empty or matches nothing; the nearest addresses are listed.
    """
    if requested in (ALL, CLASSES) or SEPARATOR in requested:
        return
    glob = selector.Selector(requested)
    addresses = [
        (selector.ModuleAddress(path, "", type(module).__name__), comes_with_torch(type(module).__module__))
        for path, module in model.named_modules()
    ]
    # A name in the tree begins with the class and ends with the index among the modules of one parent.
    named_class = requested.partition(selector.PATH_SEPARATOR)[0]
    if not any(
        glob.matches(module_address) or module_address.class_name == named_class for module_address, _ in addresses
    ):
        selector.select([module_address for module_address, is_torch_nn in addresses if not is_torch_nn], requested)


def chosen_modules(modules: Iterable[selector.ModuleAddress], requested: str) -> Sequence[selector.ModuleAddress]:
    """Return the modules to convert to functions: the selected ones, or all modules below the root.

    Raises:
        UsageError: the selector matches nothing, or the model has no module except the root.
    """
    modules = list(modules)
    if requested not in (ALL, CLASSES):
        targets = selector.select(modules, requested)
        reason = "it is the root, which is the graph itself"
    else:
        targets = [module for module in modules if address.depth(module.tag) > 1]
        reason = "the model has no module but its root"
    if not any(address.depth(module.tag) > 1 for module in targets):
        raise _no_function_error(requested, reason)
    return targets


def _no_function_error(requested: str, reason: str) -> UsageError:
    return UsageError(
        f"{opt.functions} {requested}: no module can become a function: {reason}",
        hint="Select other modules; winml inspect -H shows the tree.",
    )


def _functions_record(model: ir.Model, folded: FoldedModel, requested: str) -> ModuleFunctions:
    """Return the record of folded modules: functions, node counts, and modules left out with reasons.

    Args:
        model: The model before folding.
        folded: The model with functions.
        requested: The user's selection of modules.
    """
    return ModuleFunctions(
        requested=requested,
        raised_from=model.ir_version if model.ir_version < folded.model.ir_version else None,
        functions=folded.functions,
        written_nodes=folded.written_nodes,
        graph_nodes=sum(1 for _ in folded.model.graph.all_nodes()),
        left_out=tuple(
            LeftOutModule(_module_identity(left_out.module), left_out.reason) for left_out in folded.plan.left_out
        ),
        partly_outside=tuple(
            PartlyOutside(_module_identity(part.module), tuple(node.name or node.op_type for node in part.outside))
            for part in folded.plan.all_parts
            if part.outside
        ),
    )


def _module_identity(module: selector.ModuleAddress) -> ModuleIdentity:
    return ModuleIdentity(module.path, module.tag, module.class_name)
