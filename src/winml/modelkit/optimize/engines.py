"""The engines of the optimizer: its own passes, ONNX Runtime's transformers, and either on selected nodes."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import OptimizeError, StageError, first_line
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.graph.cutting import Cutter, cut_model
from winml.modelkit.graph.files.graph_reading import load_foreign
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.graph.stage import DeclaredPass, GraphPass, restore_description, run_passes
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.optimize.capabilities import CAPABILITIES, UNUSED_TRANSFORMERS, Capability
from winml.modelkit.runtime.sessions import rewrite_file

# --- Runs the optimizer's own passes on a graph and carries the tags.


ORDER = (
    # First: what turns queries by position reads their normalization as one operator.
    "simplified_layer_norm_fusion",
    "group_query_attention_fusion",
    # Last: sizes that two sides of a sum have in common are known again once attentions are fused.
    "skip_simplified_layer_norm_fusion",
)
"""Capabilities whose passes run in this order before those of all others, which run in the order of the registry."""

_CLEANUP = (
    # A module that is called twice has two attentions with one name.
    DeclaredPass(common.NameFixPass(), "keeps"),
    DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
    DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
)


def rewrite_with_passes(
    model: ir.Model,
    capabilities: Sequence[Capability],
    contrib: Sequence[Capability],  # noqa: ARG001 - one signature for every engine; a pass makes what its level says
) -> tuple[ir.Model, tuple[str, ...]]:
    """Run the passes of capabilities, in place; return the model and notes on its tags.

    Args:
        model: The model.
        capabilities: The enabled capabilities.
        contrib: Those of them that may create operators of ONNX Runtime.

    Raises:
        OptimizeError: a pass failed, or changed the inputs or outputs of the model.
        UsageError: the pass of a plug-in cannot be imported.
    """
    last = len(ORDER)
    steps = [
        DeclaredPass(effect, effect.tags)
        for entry in sorted(capabilities, key=lambda entry: ORDER.index(entry.name) if entry.name in ORDER else last)
        if entry.sets is None  # else it changes the pass of another
        for effect in [_pass_of(entry, capabilities)]
    ]
    if run_passes(model, [step for step in steps if step.tags != "drops"], OptimizeError):
        run_passes(model, _CLEANUP, OptimizeError)
    original = model.clone()
    if not run_passes(model, [step for step in steps if step.tags == "drops"], OptimizeError):
        return model, ()
    # The replaced nodes must be removed before the tags of the new nodes are determined.
    run_passes(model, _CLEANUP, OptimizeError)
    return model, carry_tags(original, model).notes


def _pass_of(capability: Capability, enabled: Sequence[Capability]) -> GraphPass:
    """Return the pass of a capability, with the keywords that other enabled ones set."""
    keywords = {entry.sets[1]: True for entry in enabled if entry.sets and entry.sets[0] == capability.name}
    created: GraphPass = CAPABILITIES.part(capability.name, capability.implementation)(**keywords)
    return created


# --- Runs selected graph transformers of ONNX Runtime on a graph.
#
# Writes the graph to a temporary file, runs ONNX Runtime's offline optimizer on it, reads the result and carries the
# tags across. Weights that ONNX Runtime did not change stay the same tensors, by reference.


_SENT, _RETURNED = "sent.onnx", "returned.onnx"

_DISK_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota error

_DUPLICATE_BYTES = 1_000_000
"""Weights from this size on are not stored twice, once transposed. Chosen: the size of smaller ones is negligible."""


def rewrite_with_onnxruntime(
    model: ir.Model, capabilities: Sequence[Capability], contrib: Sequence[Capability]
) -> tuple[ir.Model, tuple[str, ...]]:
    """Return the model rewritten by ONNX Runtime, and notes on its tags; the given model is not changed.

    Args:
        model: The model.
        capabilities: The enabled capabilities; all other transformers are disabled.
        contrib: Those of them that may create operators of ONNX Runtime.

    Raises:
        OptimizeError: ONNX Runtime cannot load the graph; gives its reason.
    """
    enabled = {name for entry in capabilities for name in entry.transformers}
    enabled |= {name for entry in contrib for name in entry.contrib_transformers}
    with temporary_folder() as folder:
        sent, returned = folder / _SENT, folder / _RETURNED
        try:
            with _shared_weights_as_inputs(model):
                ir.save(model, sent, external_data=unfinished_data_path(sent).name)
            rewrite_file(
                sent,
                returned,
                disabled=_all_transformers() - enabled,
                with_layouts=any(entry.needs_layouts for entry in capabilities),
                config={key: value for entry in capabilities for key, value in entry.config},
            )
        except StageError as error:
            # The message names the temporary file, which the user does not know.
            reason = error.message.replace(f"Load model from {sent} failed:", "")
            raise OptimizeError(reason, hint=error.hint or _HINT) from error
        except OSError as error:
            raise _write_failure(error) from error
        rewritten = load_foreign(returned)
        _restore_shared_weights(rewritten, model)
        _keep_weights(rewritten, model, ir.load(sent))
    report = carry_tags(model, rewritten)
    restore_description(rewritten, model)
    return rewritten, report.notes


_HINT = "Omit the level and the enabled optimizations, or convert the unsupported operators."


def _write_failure(error: OSError) -> OptimizeError:
    """Return the error for a graph that could not be written to the temporary file."""
    reason = error.strerror or first_line(error)
    if error.errno not in _DISK_FULL:
        return OptimizeError(
            f"the graph could not be written for ONNX Runtime: {reason}",
            hint=f"Its weights must be readable, and {tempfile.gettempdir()} writable. Set TMPDIR to use a different "
            "folder.",
        )
    return OptimizeError(
        f"no disk space to pass the graph to ONNX Runtime: {reason}",
        hint=f"It needs twice the size of the weights in {tempfile.gettempdir()}. Set TMPDIR to use a different "
        "folder.",
    )


def _all_transformers() -> set[str]:
    used = {name for entry in CAPABILITIES.values() for name in (*entry.transformers, *entry.contrib_transformers)}
    return used | set(UNUSED_TRANSFORMERS)


def _is_shared_weight(value: ir.Value) -> bool:
    """Say whether constant folding would store a weight twice: unchanged, and transposed (tied embeddings)."""
    tensor = value.const_value
    if tensor is None or tensor.nbytes < _DUPLICATE_BYTES or value.is_graph_input() or value.is_graph_output():
        return False
    return len(value.uses()) > 1 and any(user.op_type == "Transpose" for user in value.consumers())


@contextlib.contextmanager
def _shared_weights_as_inputs(model: ir.Model) -> Iterator[None]:
    """Turn weights that must not be folded into inputs for the time of the block: ONNX Runtime folds no inputs."""
    values = [value for value in model.graph.initializers.values() if _is_shared_weight(value)]
    for value in values:
        del model.graph.initializers[value.name or ""]
        model.graph.inputs.append(value)
    try:
        yield
    finally:
        for value in values:
            model.graph.inputs.remove(value)
            model.graph.register_initializer(value)


def _restore_shared_weights(rewritten: ir.Model, original: ir.Model) -> None:
    """Turn the weights that were written as inputs into initializers again, in place."""
    names = [value.name for value in original.graph.inputs]
    for value in [value for value in rewritten.graph.inputs if value.name not in names]:
        rewritten.graph.inputs.remove(value)
        value.const_value = original.graph.initializers[value.name or ""].const_value
        rewritten.graph.register_initializer(value)


def _keep_weights(rewritten: ir.Model, original: ir.Model, sent: ir.Model) -> None:
    """Replace unchanged tensors by the original ones, and load the others into memory; in place."""
    original_weights = original.graph.initializers
    as_sent = sent.graph.initializers
    for graph in rewritten.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            sent_tensor = as_sent[name].const_value if graph is rewritten.graph and name in as_sent else None
            if sent_tensor is not None and _is_same(sent_tensor, tensor):
                value.const_value = original_weights[name].const_value
            else:
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name)


def _is_same(left: ir.TensorProtocol, right: ir.TensorProtocol) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # Bytes, so that NaN equals itself.
    return np.array_equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: ir.TensorProtocol) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)


# --- Lets an engine change a part of a graph: the selected nodes are cut out, rewritten as a graph, and put back.
#
# What is outside is not given to the engine, so that it stays as it is.


Rewrite = Callable[[ir.Model], tuple[ir.Model, tuple[str, ...]]]
"""Takes a model and returns it changed, in place or not, and notes."""


def rewrite_selected(model: ir.Model, names: Collection[str], rewrite: Rewrite) -> tuple[str, ...]:
    """Rewrite the selected nodes of the main graph, in place; return notes.

    Nodes with subgraphs, and calls of functions, stay as they are.

    Args:
        model: The model; every node has a name of its own.
        names: Names of the selected nodes.
        rewrite: Rewrites a model.

    Raises:
        OptimizeError: the type of a value that the selected nodes read is unknown, or rewriting fails.
    """
    nodes = [node for node in model.graph if node.name in names and _can_be_cut(node, model)]
    if not nodes:
        return ()
    part = _Part.cut(model, nodes)
    rewritten, notes = rewrite(part.model)
    part.put_back(rewritten)
    return notes


def _can_be_cut(node: ir.Node, model: ir.Model) -> bool:
    if node.op_identifier() in model.functions:
        return False
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return not any(attribute.type in kinds for attribute in node.attributes.values())


@dataclass
class _Part:
    """Some nodes of a graph as a model of their own."""

    original: ir.Model
    nodes: list[ir.Node]
    read: Mapping[str, ir.Value]
    """Values of the original that the nodes read and do not make: inputs and weights of the part."""
    made: Mapping[str, ir.Value]
    """Values of the original that the nodes make and others read: outputs of the part."""
    model: ir.Model

    @classmethod
    def cut(cls, original: ir.Model, nodes: list[ir.Node]) -> _Part:
        """Copy nodes into a model; its weights are the same tensors."""
        cut = Cutter(original).cut_exactly(nodes)
        for value in cut.inputs:
            if value.type is None:
                raise OptimizeError(
                    f"the type of {value.name} is unknown, so the selected modules cannot be optimized separately",
                    hint="Optimize without --module and --exclude.",
                )
        model = cut_model(original, cut, keeps_sizes=True)
        model.metadata_props.update(original.metadata_props)
        read = {str(value.name): value for value in (*cut.inputs, *cut.initializers)}
        return cls(original, nodes, read, {str(value.name): value for value in cut.outputs}, model)

    def put_back(self, rewritten: ir.Model) -> None:
        """Put the rewritten nodes in the place of the original ones, in place."""
        graph = self.original.graph
        outside = FreshNames(_names_outside(graph, set(self.nodes)))
        values: dict[ir.Value, ir.Value] = {}
        for name, value in rewritten.graph.initializers.items():
            values[value] = self._weight(name, value, outside)
        values |= {value: self.read[str(value.name)] for value in rewritten.graph.inputs if value not in values}
        new_nodes = []
        for node in rewritten.graph:
            outputs = [_copy(value) for value in node.outputs]
            for value in outputs:
                if value.name and value.name not in self.made:
                    value.name = outside.take(value.name)
            values.update(zip(node.outputs, outputs, strict=True))
            new = _copied_node(node, [value and values[value] for value in node.inputs], outputs)
            new.name = outside.take(node.name or node.op_type)
            new_nodes.append(new)
        graph.insert_after(self.nodes[-1], new_nodes)
        for value in rewritten.graph.outputs:
            _take_over(self.made[str(value.name)], values[value], graph)
        graph.remove(self.nodes, safe=True)
        self._remove_unread()
        for domain, version in rewritten.opset_imports.items():
            self.original.opset_imports.setdefault(domain, version)

    def _weight(self, name: str, value: ir.Value, outside: FreshNames) -> ir.Value:
        """Return the weight of the original where it is the same tensor, or a new one."""
        original = self.read.get(name)
        if original is not None and original.const_value is value.const_value:
            return original
        graph = self.original.graph
        # The tensor bears the name that is written.
        new = ir.Value(name=outside.take(name), type=value.type, shape=value.shape, const_value=value.const_value)
        if new.const_value is not None:
            new.const_value.name = new.name
        graph.register_initializer(new)
        return new

    def _remove_unread(self) -> None:
        graph = self.original.graph
        for name, value in self.read.items():
            is_free = not value.uses() and not value.is_graph_input() and not value.is_graph_output()
            if is_free and name in graph.initializers:
                del graph.initializers[name]


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)


def _copied_node(node: ir.Node, inputs: list[ir.Value | None], outputs: list[ir.Value]) -> ir.Node:
    return ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes=list(node.attributes.values()),
        overload=node.overload,
        outputs=outputs,
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )


def _names_outside(graph: ir.Graph, inside: set[ir.Node]) -> list[str | None]:
    names: list[str | None] = [value.name for value in graph.inputs]
    names += graph.initializers
    for part in (graph, *graph.subgraphs()):
        for node in part:
            if node not in inside:
                names += [node.name, *(value.name for value in node.outputs)]
        if part is not graph:
            names += [*part.initializers, *(value.name for value in part.inputs)]
    return names


def _take_over(old: ir.Value, new: ir.Value, graph: ir.Graph) -> None:
    """Let everything that reads a value of the original read the new one, which bears its name."""
    name = str(old.name)
    if new.producer() is None or new.name != name:
        # What was computed is a value there was before: an output of a graph still needs a name of its own.
        if not old.is_graph_output():
            old.replace_all_uses_with(new)
            return
        identity = ir.node("Identity", [new], name=f"{name}_Identity")
        graph.append(identity)
        new = identity.outputs[0]
    new.type, new.shape = old.type, old.shape
    old.name = f"{name}_before"
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())
