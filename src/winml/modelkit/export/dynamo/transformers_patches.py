"""What does transformers know about exporting its own models?

It carries repairs for single architectures and operators (``transformers.exporters``), which are put in place for the
time of one export. Models of other libraries, and a transformers without them, are exported as they are.

NOTE: ``OnnxExporter``, its public class, takes no prepared forward and gives no program, so its parts are used.
``tests/unit/export/dynamo/test_transformers_patches.py`` fails when one of them moves.
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
    attention = nn.functional.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(shared.apply_patches("onnx"))
        stack.enter_context(_attention_over_low_values(attention))
        stack.enter_context(shared.apply_patches("dynamo"))
        stack.enter_context(dynamo.reset_model_state(model))
        yield LibraryRepairs(
            translations=onnx._ONNX_TRANSLATION_TABLE,
            repair_program=lambda program: shared.apply_fx_node_fixes("onnx", program.graph_module),
            repair_graph=onnx.apply_onnx_ir_fixes,
        )


@contextmanager
def _attention_over_low_values(original: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let attention over nothing but very low values stay what it is in torch; patches torch for the block.

    transformers' patch answers a row of a mask of numbers, all of them the lowest, with zeros. torch does so for minus
    infinity only, and averages the values otherwise: padding outside a sliding window is such a row.

    Args:
        original: torch's attention, without that patch.
    """
    patched = nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *rest: Any,
        **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return patched(query, key, value, attn_mask, *rest, **named)
        answer = original(query, key, value, attn_mask, *rest, **named)
        attended = (attn_mask > -torch.inf).to(query.dtype).sum(-1, keepdim=True)
        return torch.where(attended < 1, torch.zeros((), dtype=answer.dtype, device=answer.device), answer)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = patched


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
