"""In which module did each node of a TorchScript export run?

torch's exporter writes the module stack into node names, but shortened so that some modules cannot be told apart, and
drops it from scripted functions. Here every module gets a scope of its own for the time of one export, so a node's name
splits back into the exact stack of module paths. Knows nothing of tags.

NOTE: this reaches into private places of torch, whose exporter has no seam for it: the scope names it gives to modules,
the graph between tracing and conversion, the switch for inlining scripted functions, its shape inference and its log.
``tests/unit/export/torchscript/test_scopes.py`` fails when one of them moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import utils as exporter

__all__ = ["ModuleScopes", "operator_of_error"]

_SEGMENT = re.compile(r"m(\d+)(?:_\d+)?")
"""A scope as it comes back: the exporter appends a counter when a module is called again."""


class ModuleScopes:
    """Gives every module of a model its own scope, and reads scopes back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, str] = {}
        self._paths: list[str] = []
        for position, (path, module) in enumerate(model.named_modules()):
            # The class part of a scope name never reaches node names; the attribute part does.
            self._modules[module] = torch._C._jit_onnx_create_full_scope_name("Module", f"m{position}")
            self._paths.append(path)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make an export inside the block write these scopes, and print nothing."""
        trace_graph = torch.jit._get_trace_graph  # type: ignore[attr-defined]
        infer_shapes = torch._C._jit_pass_onnx_graph_shape_type_inference
        inlines = torch._C._jit_get_inline_everything_mode()

        def set_up_scopes(_model: nn.Module, _as_functions: Any) -> set[str]:
            torch.jit._trace._trace_module_map = self._modules
            return set()

        def trace_with_scopes(*args: Any, **kwargs: Any) -> Any:
            graph, *rest = trace_graph(*args, **kwargs)
            _inline_calls(graph)
            return (graph, *rest)

        def infer_without_weights(graph: torch._C.Graph, _weights: Any, opset_version: int) -> None:
            # With the weights, each pass over the graph serializes a copy of all of them; no shape depends on one.
            infer_shapes(graph, {}, opset_version)

        # Scripted functions stay calls, which carry the scope, until _inline_calls hands it on to their nodes.
        torch._C._jit_set_inline_everything_mode(False)
        try:
            with (
                _replaced(exporter, "_setup_trace_module_map", set_up_scopes),
                _replaced(torch.jit, "_get_trace_graph", trace_with_scopes),
                _replaced(torch._C, "_jit_pass_onnx_graph_shape_type_inference", infer_without_weights),
                _silence(),
            ):
                yield
        finally:
            torch._C._jit_set_inline_everything_mode(inlines)

    def read(self, node_name: str) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; empty where the exporter kept no scope.

        Args:
            node_name: Name the exporter gave the node, such as ``m0/m3/MatMul_1``.
        """
        scope, _, _operator = node_name.rpartition("/")
        return self.decode(scope.strip("/").split("/") if scope else ())

    def decode(self, segments: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths for the segments of a scope; unknown segments are passed over."""
        matches = (_SEGMENT.fullmatch(segment) for segment in segments)
        return tuple(self._paths[int(match[1])] for match in matches if match)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter from printing graphs on stdout, which it does when verbose and on every failure."""
    enabled = torch._C._jit_is_onnx_log_enabled()
    torch._C._jit_set_onnx_log_enabled(False)
    try:
        with _replaced(exporter, "setup_onnx_logging", lambda _verbose: nullcontext()):
            yield
    finally:
        torch._C._jit_set_onnx_log_enabled(enabled)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _inline_calls(graph: torch._C.Graph) -> None:
    """Inline scripted functions in place, handing each call's scope to the nodes that take its place."""
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


def _adopt_scope(node: Any, donor: Any) -> None:
    if not node.scopeName():
        node.copyMetadata(donor)
    for block in node.blocks():
        for inner in block.nodes():
            _adopt_scope(inner, donor)


def operator_of_error(error: BaseException, scopes: ModuleScopes) -> tuple[str, str] | None:
    """Return ``(operator, module path)`` of the traced node the exporter could not convert, or None if it was not that.

    Args:
        error: What the exporter raised.
        scopes: The scopes that were applied.
    """
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            if isinstance(value, torch._C.Node):
                names = (part.rpartition("::")[2] for part in value.scopeName().split("/"))
                found = (str(value.kind()), (scopes.decode(names) or ("",))[-1])
        traceback = traceback.tb_next
    return found
