"""Reads the module stack of every node of a dynamo export.

torch's dynamo exporter writes the stack into the metadata of every node; it is read back as paths of
``named_modules()``. Knows nothing of tags.

NOTE: patches a private class of torch, whose tracer would give a module that is registered twice either path
(docs/decisions/0004-private-seams.md). ``tests/unit/export/dynamo/test_capturing.py`` fails when that moves.
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

__all__ = ["ModuleStacks", "drop_exporter_metadata"]

_TORCH_PREFIXES = (TORCH_PREFIX, ONNXSCRIPT_PREFIX)
_CALL_COUNTER = re.compile(r"@\d+$")
"""torch appends it to the path of a module that is called again."""


class ModuleStacks:
    """Makes torch write stacks of module paths, and reads them; each module has one path, its first."""

    def __init__(self, model: nn.Module) -> None:
        self._first_paths: dict[nn.Module, str] = {}
        self._paths: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            # A module registered twice has its first path, by whichever name it was called.
            self._paths[path] = self._first_paths.setdefault(module, path)

    @contextmanager
    def patched_tracer(self) -> Iterator[None]:
        """Patch torch's tracer, so that an export inside the block writes the paths of this model."""
        path_of_module = _ModuleStackTracer.path_of_module

        def first_path(tracer: _ModuleStackTracer, module: Any) -> str:
            # torch passes proxies of modules that are shared.
            is_stand_in = isinstance(module, _AttrProxy)
            base: nn.Module = module.get_base() if is_stand_in else module
            # torch wraps the root and leaves the wrapper out of the path itself.
            return self._first_paths.get(base) or path_of_module(tracer, module)

        _ModuleStackTracer.path_of_module = first_path  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            _ModuleStackTracer.path_of_module = path_of_module  # type: ignore[method-assign]

    def read(self, node: ir.Node) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; empty where the exporter recorded none."""
        text = node.metadata_props.get(SCOPES_KEY)
        return self.decode(ast.literal_eval(text)[:-1]) if text else ()

    def decode(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths of torch's names; names that are no module of the model are skipped."""
        plain_names = (_CALL_COUNTER.sub("", name).replace("._modules.", ".") for name in names)
        return tuple(self._paths[name] for name in plain_names if name in self._paths)


def drop_exporter_metadata(model: ir.Model, *, keep_stack_traces: bool) -> None:
    """Remove torch's debugging metadata, in place; the scopes and classes of nodes are kept.

    Args:
        model: A graph torch exported.
        keep_stack_traces: Keep the lines of Python a node came from; these contain local paths.
    """
    kept_keys = {SCOPES_KEY, CLASSES_KEY, *((STACK_TRACE_KEY, FX_NODE_KEY) if keep_stack_traces else ())}
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values += node.outputs
            _drop_torch_keys(node.metadata_props, kept_keys)
            node.doc_string = None
        for value in values:
            _drop_torch_keys(value.metadata_props, set())
        _drop_torch_keys(graph.metadata_props, set())


def _drop_torch_keys(metadata: dict[str, str], kept_keys: set[str]) -> None:
    for key in [key for key in metadata if key.startswith(_TORCH_PREFIXES) and key not in kept_keys]:
        del metadata[key]
