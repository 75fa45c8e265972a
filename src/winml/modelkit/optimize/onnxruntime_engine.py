"""Runs selected graph transformers of ONNX Runtime on a graph.

Writes the graph to a temporary file, runs ONNX Runtime's offline optimizer on it, reads the result and transfers the
tags. Unchanged weights stay the same tensors, by reference.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, StageError, first_line
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.onnx.files.graph_reading import load_foreign
from winml.modelkit.onnx.files.output_files import FULL_DISK_ERRORS
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.map_types import save_model
from winml.modelkit.onnx.stage import restore_description
from winml.modelkit.optimize.capabilities import CAPABILITIES, UNUSED_TRANSFORMERS, Capability
from winml.modelkit.ort.sessions import rewrite_file
from winml.modelkit.tags.carry.carrying import carry_tags

_SENT, _RETURNED = "sent.onnx", "returned.onnx"

_DUPLICATE_BYTES = 1_000_000
"""Minimum size of weights that are not stored twice, once transposed. Chosen: the size of smaller weights is
negligible.
"""


def rewrite_with_onnxruntime(
    model: ir.Model, capabilities: Sequence[Capability], contrib: Sequence[Capability]
) -> tuple[ir.Model, tuple[str, ...]]:
    """Rewrite a model with ONNX Runtime; return the new model and notes on its tags. The original is not changed.

    Args:
        model: The model.
        capabilities: The enabled capabilities; all other transformers are disabled.
        contrib: The capabilities that may create operators of ONNX Runtime.

    Raises:
        OptimizeError: ONNX Runtime cannot load the graph; states its reason.
    """
    enabled = {name for entry in capabilities for name in entry.transformers}
    enabled |= {name for entry in contrib for name in entry.contrib_transformers}
    all_transformers = {
        name for entry in CAPABILITIES.values() for name in (*entry.transformers, *entry.contrib_transformers)
    }
    with temporary_folder() as folder:
        sent_file, returned_file = folder / _SENT, folder / _RETURNED
        try:
            with _shared_weights_as_inputs(model):
                save_model(model, sent_file, unfinished_data_path(sent_file).name)
            rewrite_file(
                sent_file,
                returned_file,
                disabled=(all_transformers | set(UNUSED_TRANSFORMERS)) - enabled,
                with_layouts=any(entry.needs_layouts for entry in capabilities),
                config={key: value for entry in capabilities for key, value in entry.config},
            )
        except StageError as error:
            # The message names the temporary file, which the user does not know.
            reason = error.message.replace(f"Load model from {sent_file} failed:", "")
            raise OptimizeError(reason, hint=error.hint or _HINT) from error
        except OSError as error:
            raise _write_failure(error) from error
        rewritten = load_foreign(returned_file)
        _restore_shared_weights(rewritten, model)
        _keep_weights(rewritten, model, load_foreign(sent_file))
    report = carry_tags(model, rewritten)
    restore_description(rewritten, model)
    return rewritten, report.notes


_HINT = "Omit the level and the enabled optimizations, or convert the unsupported operators."


def _write_failure(error: OSError) -> OptimizeError:
    """Return the error for a graph that could not be written to the temporary file."""
    reason = error.strerror or first_line(error)
    if error.errno not in FULL_DISK_ERRORS:
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


def _is_shared_weight(value: ir.Value) -> bool:
    """Return True if constant folding would store a weight twice: unchanged, and transposed (tied embeddings)."""
    tensor = value.const_value
    if tensor is None or tensor.nbytes < _DUPLICATE_BYTES or value.is_graph_input() or value.is_graph_output():
        return False
    return len(value.uses()) > 1 and any(user.op_type == "Transpose" for user in value.consumers())


@contextlib.contextmanager
def _shared_weights_as_inputs(model: ir.Model) -> Iterator[None]:
    """Make shared weights inputs of the graph inside the block, so that ONNX Runtime does not fold them."""
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
    """Convert shared weights from inputs back to initializers, in place."""
    names = [value.name for value in original.graph.inputs]
    for value in [value for value in rewritten.graph.inputs if value.name not in names]:
        rewritten.graph.inputs.remove(value)
        value.const_value = original.graph.initializers[value.name or ""].const_value
        rewritten.graph.register_initializer(value)


def _keep_weights(rewritten: ir.Model, original: ir.Model, sent_model: ir.Model) -> None:
    """Replace unchanged tensors by the original tensors, and load changed tensors into memory; in place."""
    original_weights = original.graph.initializers
    as_sent = sent_model.graph.initializers
    for graph in rewritten.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            sent_tensor = as_sent[name].const_value if graph is rewritten.graph and name in as_sent else None
            if sent_tensor is not None and _has_equal_bytes(sent_tensor, tensor):
                value.const_value = original_weights[name].const_value
            else:
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name)


def _has_equal_bytes(left: ir.TensorProtocol, right: ir.TensorProtocol) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # Bytes, so that NaN equals itself.
    left_bytes, right_bytes = (
        np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8) for tensor in (left, right)
    )
    return np.array_equal(left_bytes, right_bytes)
