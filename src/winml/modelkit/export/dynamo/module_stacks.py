"""In which module did each node of a dynamo export run?

torch's dynamo exporter writes the stack of modules into the metadata of every node. Here it is read back as paths of
``named_modules()``. Knows nothing of tags.

NOTE: where two names lead to one module, torch's tracer takes whatever name it met on the way for the path. So it is
told the path, in a private place of torch. ``tests/unit/export/dynamo/test_capturing.py`` fails when that moves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from torch import nn
from torch.fx.experimental.proxy_tensor import _AttrProxy, _ModuleStackTracer

from winml.modelkit.metadata_keys import (
    CLASSES_KEY,
    FX_NODE_KEY,
    ONNXSCRIPT_PREFIX,
    SCOPES_KEY,
    STACK_TRACE_KEY,
    TORCH_PREFIX,
)

__all__ = ["CLASSES_KEY", "SCOPES_KEY", "ModuleStacks", "drop_exporter_metadata"]

_TORCH_PREFIXES = (TORCH_PREFIX, ONNXSCRIPT_PREFIX)
_CALL_COUNTER = re.compile(r"@\d+$")
"""torch appends it to the path of a module that is called again."""


class ModuleStacks:
    """Has stacks of module paths written, and reads them; each module under the one path it is known by."""

    def __init__(self, model: nn.Module) -> None:
        self._first: dict[nn.Module, str] = {}
        self._paths: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            # A module registered twice is known by its first path, whichever way it was called.
            self._paths[path] = self._first.setdefault(module, path)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make an export inside the block write the paths of this model."""
        path_of_module = _ModuleStackTracer.path_of_module

        def known_path(tracer: _ModuleStackTracer, module: Any) -> str:
            # Where modules are shared, torch hands around stand-ins of them.
            stood_in = isinstance(module, _AttrProxy)
            base: nn.Module = module.get_base() if stood_in else module
            # The root is torch's own affair: it wraps it, and leaves the wrapper out.
            return self._first.get(base) or path_of_module(tracer, module)

        _ModuleStackTracer.path_of_module = known_path  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            _ModuleStackTracer.path_of_module = path_of_module  # type: ignore[method-assign]

    def read(self, node: ir.Node) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; empty where the exporter kept none."""
        text = node.metadata_props.get(SCOPES_KEY)
        return self.decode(ast.literal_eval(text)[:-1]) if text else ()

    def decode(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths for what torch wrote; what is no module of the model is passed over."""
        plain = (_CALL_COUNTER.sub("", name).replace("._modules.", ".") for name in names)
        return tuple(self._paths[name] for name in plain if name in self._paths)


def drop_exporter_metadata(model: ir.Model, *, keep_stack_traces: bool) -> None:
    """Remove what torch wrote for its own debugging, in place; the scopes and classes of nodes stay.

    Args:
        model: A graph fresh from torch.
        keep_stack_traces: Leave the lines of Python a node came from; these are local paths.
    """
    kept = {SCOPES_KEY, CLASSES_KEY, *((STACK_TRACE_KEY, FX_NODE_KEY) if keep_stack_traces else ())}
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values += node.outputs
            _drop(node.metadata_props, kept)
            node.doc_string = None
        for value in values:
            _drop(value.metadata_props, set())
        _drop(graph.metadata_props, set())


def _drop(metadata: dict[str, str], kept: set[str]) -> None:
    for key in [key for key in metadata if key.startswith(_TORCH_PREFIXES) and key not in kept]:
        del metadata[key]
