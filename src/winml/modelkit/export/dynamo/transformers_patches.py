"""Application of transformers' own patches for exporting its models with dynamo.

``transformers.exporters`` patches single architectures and operators; the patches are applied during one export.
Models of other libraries are exported without patches.

NOTE: ``OnnxExporter``, its public class, accepts no prepared forward and returns no program, so its internal functions
are used (docs/decisions/0004-private-seams.md). ``tests/unit/export/dynamo/test_transformers_patches.py`` fails when
they change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit.ort.shared_settings import attribute_replaced, attributes_replaced

_MODEL_FILES = "transformers.models."
_STACK = "nn_module_stack"
"""Key under which torch keeps the modules of a node."""


def _do_nothing(_subject: object) -> None:
    return


@dataclass(frozen=True)
class LibraryRepairs:
    """The repairs that the caller applies during the export."""

    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    """ONNX forms of torch operators that replace torch's."""
    repair_program: Callable[[torch.export.ExportedProgram], None] = _do_nothing
    """Rewrites operators without an ONNX form, in place."""
    repair_graph: Callable[[torch.onnx.ONNXProgram], None] = _do_nothing
    """Rewrites nodes that ONNX Runtime does not accept, in place."""


@contextmanager
def library_repairs(model: nn.Module) -> Iterator[LibraryRepairs]:
    """Apply transformers' patches inside the block.

    Args:
        model: The model; without a transformers model in it, no patch is applied.
    """
    if not _has_transformers_model(model):
        yield LibraryRepairs()
        return
    onnx, dynamo, shared = import_exporters()
    attention = nn.functional.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(_apply_patches(shared, "onnx"))
        stack.enter_context(_attention_over_low_values(attention))
        stack.enter_context(attribute_replaced(torch.Tensor, "masked_scatter", _masked_scatter))
        own_forwards = _attention_with_norms(model)
        stack.enter_context(_apply_patches(shared, "dynamo"))
        for attention_class, forward in own_forwards.items():
            stack.enter_context(attribute_replaced(attention_class, "forward", forward))
        stack.enter_context(dynamo.reset_model_state(model))
        fix_nodes = stack.enter_context(_keep_stacks_in_fixes(onnx))
        yield LibraryRepairs(
            translations=_allow_empty_sources(onnx._ONNX_TRANSLATION_TABLE),
            repair_program=lambda program: fix_nodes("onnx", program.graph_module),
            repair_graph=onnx.apply_onnx_ir_fixes,
        )


@contextmanager
def _apply_patches(shared: Any, backend: str) -> Iterator[None]:
    """Apply transformers' patches inside the block, except patches of files that are not imported.

    transformers imports the files of some 35 architectures to patch them, which takes longer than a small export.
    Versions before 5.23 have no such function; then all files are imported.
    """
    import_path = getattr(shared, "import_dotted_path", None)
    if import_path is None:
        with shared.apply_patches(backend):
            yield
        return

    def imported_path(path: str, missing_ok: bool = False) -> Any:
        # transformers.models.<architecture>.<file>.<class>
        is_absent = path.startswith(_MODEL_FILES) and ".".join(path.split(".")[:4]) not in sys.modules
        return None if is_absent else import_path(path, missing_ok)

    with ExitStack() as stack:
        with attribute_replaced(shared, "import_dotted_path", imported_path):
            stack.enter_context(shared.apply_patches(backend))
        yield


@contextmanager
def _keep_stacks_in_fixes(exporter: Any) -> Iterator[Callable[[str, torch.fx.GraphModule], None]]:
    """Make transformers' node fixes copy the module stack of a replaced node to the new nodes, inside the block.

    Most fixes drop this metadata. The fixes also run inside torch's exporter, after the decompositions.
    """
    apply_fixes = exporter.apply_fx_node_fixes

    def apply_keeping_stacks(backend: str, module: torch.fx.GraphModule) -> None:
        with _inherit_stacks():
            apply_fixes(backend, module)

    with attribute_replaced(exporter, "apply_fx_node_fixes", apply_keeping_stacks):
        yield apply_keeping_stacks


def _inherit_stacks() -> AbstractContextManager[None]:
    """Copy a node's module stack to nodes inserted before or after it; patches torch inside the block."""
    graph_class = torch.fx.Graph
    create_originally: Any = graph_class.create_node
    anchors: dict[torch.fx.Graph, torch.fx.Node | None] = {}

    def remember_anchor(insert: Callable[..., object]) -> Callable[..., Any]:
        def insert_and_remember(graph: torch.fx.Graph, node: torch.fx.Node | None = None) -> Any:
            anchors[graph] = node
            return insert(graph, node)

        return insert_and_remember

    def create_node(graph: torch.fx.Graph, *args: object, **options: object) -> torch.fx.Node:
        created: torch.fx.Node = create_originally(graph, *args, **options)
        anchor = anchors.get(graph)
        if created.op == "call_function" and anchor is not None and _STACK in anchor.meta:
            created.meta.setdefault(_STACK, anchor.meta[_STACK])
        return created

    return attributes_replaced(
        (graph_class, "inserting_before", remember_anchor(graph_class.inserting_before)),
        (graph_class, "inserting_after", remember_anchor(graph_class.inserting_after)),
        (graph_class, "create_node", create_node),
    )


def _attention_over_low_values(original: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
    """Restore torch's result for rows whose mask values are all very low; patches torch inside the block.

    With transformers' patch, such a row of a float mask gives zeros. torch gives zeros only if all values are minus
    infinity, and otherwise the mean of the values. Padding outside a sliding window leads to such rows.

    Args:
        original: torch's attention, without transformers' patch.
    """
    patched = nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *options: Any,
        **named_options: Any,
    ) -> torch.Tensor:
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return patched(query, key, value, attn_mask, *options, **named_options)
        attended_values = original(query, key, value, attn_mask, *options, **named_options)
        visible_count = (attn_mask > -torch.inf).to(query.dtype).sum(-1, keepdim=True)
        return torch.where(
            visible_count < 1,
            torch.zeros((), dtype=attended_values.dtype, device=attended_values.device),
            attended_values,
        )

    return attribute_replaced(nn.functional, "scaled_dot_product_attention", attention)


def _masked_scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write the elements of a source at the set positions of a mask, in order.

    As in transformers' patch, unset positions select the first element; here also of an empty source: a text without
    images (for: Higgs Audio).
    """
    is_set = mask.expand_as(self).reshape(-1)
    places = (is_set.to(torch.int64).cumsum(0) - 1).clamp(min=0)
    elements = torch.cat([source.reshape(-1), source.new_zeros(1)])
    return torch.where(is_set, elements[places], self.reshape(-1)).reshape(self.shape)


def _allow_empty_sources(translations: Mapping[Any, Callable[..., Any]]) -> Mapping[Any, Callable[..., Any]]:
    """Extend the ONNX form of ``index_put`` with a mask by empty sources, as in ``_masked_scatter``."""
    from onnxscript import opset18 as op

    operator = torch.ops.aten.index_put.default
    library_form = translations[operator]

    def index_put(self: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
        mask = indices[0]
        is_mask = mask is not None and mask.dtype == ir.DataType.BOOL
        is_of_known_size = values.shape is not None and all(isinstance(size, int) for size in values.shape)
        if is_mask and not accumulate and not is_of_known_size:
            zero: Any = op.Constant(value_floats=[0.0])
            in_a_row: Any = op.Constant(value_ints=[-1])
            values = op.Concat(op.Reshape(values, in_a_row), op.CastLike(zero, values), axis=0)
        return library_form(self, indices, values, accumulate)

    return {**translations, operator: index_put}


def _attention_with_norms(model: nn.Module) -> dict[type[nn.Module], Callable[..., Any]]:
    """Return attention class → its original forward, for classes that normalize queries and keys of one projection.

    transformers' patch of vision attention omits these norms (for: GLM-OCR); branches on values in the original forward
    follow the example inputs.
    """
    return {
        type(module): type(module).forward
        for module in model.modules()
        if hasattr(module, "qkv") and hasattr(module, "q_norm")
    }


def _has_transformers_model(model: nn.Module) -> bool:
    """Return True if a module of a model is a transformers model."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and any(isinstance(module, library.PreTrainedModel) for module in model.modules())


def import_exporters() -> tuple[Any, Any, Any]:
    """Return the used modules of ``transformers.exporters``."""
    with warnings.catch_warnings():
        # Model files of transformers warn about torch on import, such as about the removal of torch.jit.script.
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformers.exporters import exporter_dynamo, exporter_onnx, utils
    return exporter_onnx, exporter_dynamo, utils
