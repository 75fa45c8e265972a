"""Reads the module stack of every node of a TorchScript export.

torch's exporter writes the module stack into node names, but shortens it so that some modules have equal names, and
drops it for scripted functions. Here every module gets a unique scope for the time of one export, so that a node's name
splits into the exact stack of module paths. Knows nothing of tags.

NOTE: patches private names of torch: the scope names of modules, the graph between tracing and conversion, the inlining
of scripted functions, shape inference and the log. Why: docs/decisions/0003-torchscript-first.md and
0004-private-seams.md. ``tests/unit/export/torchscript/test_scopes.py`` fails when one of them moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import utils as exporter

from winml.modelkit.export.forward_hooks import has_hooks
from winml.modelkit.export.torchscript.missing_values import refuse_missing_constants
from winml.modelkit.runtime.shared_settings import attribute_replaced

__all__ = ["ModuleScopes", "operator_of_error"]

_SEGMENT = re.compile(r"m(\d+)(?:_\d+)?")
"""A scope in a node's name; the exporter appends a counter when a module is called again."""


class ModuleScopes:
    """Gives every module of a model a unique scope, and reads scopes from node names."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, str] = {}
        self._paths: list[str] = []
        for position, (path, module) in enumerate(model.named_modules()):
            # The class part of a scope name never reaches node names; the attribute part does.
            self._modules[module] = torch._C._jit_onnx_create_full_scope_name("Module", f"m{position}")
            self._paths.append(path)

    @contextmanager
    def patched_exporter(self) -> Iterator[None]:
        """Patch torch's exporter, so that an export inside the block writes these scopes and prints nothing."""
        trace_graph = torch.jit._get_trace_graph  # type: ignore[attr-defined]
        infer_shapes = torch._C._jit_pass_onnx_graph_shape_type_inference
        was_inlining = torch._C._jit_get_inline_everything_mode()

        def set_up_scopes(_model: nn.Module, _as_functions: object) -> set[str]:
            torch.jit._trace._trace_module_map = self._modules
            return set()

        def trace_with_scopes(*args: object, **kwargs: object) -> Any:
            graph, *others = trace_graph(*args, **kwargs)
            refuse_missing_constants(graph)
            _inline_calls(graph)
            return (graph, *others)

        def infer_without_weights(graph: torch._C.Graph, _weights: object, opset_version: int) -> None:
            # With the weights, each pass would serialize a copy of all of them; no shape depends on a weight.
            infer_shapes(graph, {}, opset_version)

        # Scripted functions stay calls, which have a scope, until _inline_calls copies it to their nodes.
        torch._C._jit_set_inline_everything_mode(False)
        try:
            with (
                attribute_replaced(exporter, "_setup_trace_module_map", set_up_scopes),
                attribute_replaced(torch.jit, "_get_trace_graph", trace_with_scopes),
                attribute_replaced(torch._C, "_jit_pass_onnx_graph_shape_type_inference", infer_without_weights),
                # Equal computations are merged later, where their scopes can be kept.
                attribute_replaced(torch._C, "_jit_pass_cse", lambda _graph: False),
                _silence_exporter_log(),
                _scopes_around_hooks(self._modules),
            ):
                yield
        finally:
            torch._C._jit_set_inline_everything_mode(was_inlining)

    def read(self, node_name: str) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; empty where the exporter recorded no scope.

        Args:
            node_name: Name the exporter gave the node, such as ``m0/m3/MatMul_1``.
        """
        scope, _, _operator = node_name.rpartition("/")
        return self.decode(scope.strip("/").split("/") if scope else ())

    def decode(self, segments: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths for the segments of a scope; unknown segments are skipped."""
        matches = (_SEGMENT.fullmatch(segment) for segment in segments)
        paths = (self._paths[int(match[1])] for match in matches if match)
        # Twice in a row where hooks are around a module: theirs and torch's own.
        return tuple(path for path, _ in groupby(paths))


@contextmanager
def _scopes_around_hooks(scopes: Mapping[nn.Module, str]) -> Iterator[None]:
    """Open the scope of a module before its hooks, and close it after them, where torch has it for the forward only."""
    entered: list[nn.Module] = []

    def enter(module: nn.Module, _args: object) -> None:
        if (tracing := torch._C._get_tracing_state()) is not None:
            tracing.push_scope(scopes[module])
            entered.append(module)

    def leave(module: nn.Module, _args: object, _outputs: object) -> None:
        # Called after a failure as well, which may have been before the module was entered.
        if entered and entered[-1] is module:
            entered.pop()
            if (tracing := torch._C._get_tracing_state()) is not None:
                tracing.pop_scope()

    with ExitStack() as handles:
        for module in filter(has_hooks, scopes):
            handles.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            handles.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _silence_exporter_log() -> Iterator[None]:
    """Suppress the graphs that the exporter prints on stdout when verbose and on every failure."""
    enabled = torch._C._jit_is_onnx_log_enabled()
    torch._C._jit_set_onnx_log_enabled(False)
    try:
        with attribute_replaced(exporter, "setup_onnx_logging", lambda _verbose: nullcontext()):
            yield
    finally:
        torch._C._jit_set_onnx_log_enabled(enabled)


def _inline_calls(graph: torch._C.Graph) -> None:
    """Inline scripted functions in place, and copy the scope of each call to the nodes that replace it."""
    markers = []
    for node in list(graph.nodes()):
        if node.kind() in ("prim::CallFunction", "prim::CallMethod"):
            marker = graph.create("prim::Constant", 1)  # type: ignore[call-arg]  # the stub misses this overload
            marker.copyMetadata(node)
            marker.insertBefore(node)
            markers.append(marker)
    if not markers:
        return
    names = {marker.output().debugName() for marker in markers}
    torch._C._jit_pass_inline(graph)
    donor = None
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and node.output().debugName() in names:
            donor = node
        elif node.scopeName():
            donor = None
        if donor is not None:
            _adopt_scope(node, donor)
    for marker in markers:
        marker.destroy()


def _adopt_scope(node: Any, donor: object) -> None:
    if not node.scopeName():
        node.copyMetadata(donor)
    for block in node.blocks():
        for inner in block.nodes():
            _adopt_scope(inner, donor)


def operator_of_error(error: BaseException, scopes: ModuleScopes) -> tuple[str, str] | None:
    """Return ``(operator, module path)`` of the node the exporter could not convert, or None for other errors.

    Args:
        error: What the exporter raised.
        scopes: The scopes of the export.
    """
    failed_operator = None
    traceback = error.__traceback__
    while traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            if isinstance(value, torch._C.Node):
                names = (segment.rpartition("::")[2] for segment in value.scopeName().split("/"))
                failed_operator = (str(value.kind()), (scopes.decode(names) or ("",))[-1])
        traceback = traceback.tb_next
    return failed_operator
