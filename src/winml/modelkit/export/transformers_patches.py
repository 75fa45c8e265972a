"""What does transformers know about exporting its own models?

It carries repairs for single architectures and operators (``transformers.exporters``), which are put in place for the
time of one export. Models of other libraries, and a transformers without them, are exported as they are.

NOTE: ``OnnxExporter``, its public class, takes no prepared forward and gives no program, so its parts are used.
``tests/unit/export/test_transformers_patches.py`` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["LibraryRepairs", "library_repairs"]


def _nothing(_subject: Any) -> None:
    return


@dataclass(frozen=True)
class LibraryRepairs:
    """What is left to do by hand while the patches are in place."""

    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    """ONNX forms of torch operators, instead of torch's own."""
    repair_program: Callable[[torch.export.ExportedProgram], None] = _nothing
    """Rewrites in place what ONNX has no form of."""
    repair_graph: Callable[[torch.onnx.ONNXProgram], None] = _nothing
    """Rewrites in place what ONNX Runtime does not take."""


@contextmanager
def library_repairs(model: nn.Module) -> Iterator[LibraryRepairs]:
    """Put transformers' patches in place for an export of ``model``, and take them away again.

    Args:
        model: The model; where no part of it is a transformers model, nothing is patched.
    """
    parts = _transformers_models(model)
    exporters = _exporters() if parts else None
    if exporters is None:
        yield LibraryRepairs()
        return
    onnx, dynamo, shared = exporters
    for part in parts:
        dynamo.register_cache_pytrees_for_model(part)
    with ExitStack() as stack:
        stack.enter_context(shared.apply_patches("onnx"))
        stack.enter_context(shared.apply_patches("dynamo"))
        stack.enter_context(dynamo.reset_model_state(model))
        yield LibraryRepairs(
            translations=onnx._ONNX_TRANSLATION_TABLE,
            repair_program=lambda program: shared.apply_fx_node_fixes("onnx", program.graph_module),
            repair_graph=onnx.apply_onnx_ir_fixes,
        )


def _transformers_models(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are transformers models, none below another one."""
    import sys

    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or outer == "" for outer, _ in found)
        if not inside and isinstance(module, library.PreTrainedModel):
            found.append((path, module))
    return [module for _, module in found]


def _exporters() -> tuple[Any, Any, Any] | None:
    try:
        from transformers.exporters import exporter_dynamo, exporter_onnx, utils
    except ImportError:
        # transformers before 5.2 has none.
        return None
    return exporter_onnx, exporter_dynamo, utils
