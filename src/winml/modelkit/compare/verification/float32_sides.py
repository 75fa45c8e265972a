"""Compares models that compute in bfloat16 in float32: ONNX Runtime's CPU provider has few bfloat16 kernels.

Both sides keep their weights: the graph is rewritten in memory (``onnx/bfloat16.py``), and parameters of the model in
PyTorch are cast for the time of the comparison. The file is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.reference_run import PreparedPart
from winml.modelkit.compare.verification.varied_sizes import Draw, WrittenGraph, run_draw
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.bfloat16 import widen_bfloat16
from winml.modelkit.onnx.files.graph_reading import load_by_reference


def comparable_graph(path: Path) -> ir.Model:
    """Return the graph of a file as it is run for a comparison: in float32 where it computes in bfloat16.

    No weight is read.
    """
    model = load_by_reference(path)
    widen_bfloat16(model)
    return model


@contextmanager
def in_float32(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> Iterator[tuple[WrittenGraph, PreparedPart, InputDraws]]:
    """Yield a file, its part and its inputs such that PyTorch computes in float32, for the time of the block.

    Args:
        written: A file that computes in bfloat16, and what was traced.
        prepared: The part it was made from; its model is changed in place and restored at the end.
        inputs: Further inputs.
    """
    with _float32_model(prepared.model):
        part = PreparedPart(_float32_part(prepared.part), prepared.forward)

        def widened(draw: Draw) -> Draw:
            draw = replace(draw, inputs=_float32_tensors(draw.inputs))
            # Without values, what PyTorch answers is computed later.
            return draw if part.part.stored is not None else run_draw(part, draw)

        proof = written.proof
        proof = replace(proof, draws=tuple(map(widened, proof.draws)), far_draws=tuple(map(widened, proof.far_draws)))
        traced = None if inputs.traced is None else _float32_tensors(inputs.traced)
        yield (
            replace(written, inputs=part.part.inputs, draw=widened(written.draw), proof=proof),
            part,
            replace(inputs, part=part.part, traced=traced),
        )


@contextmanager
def _float32_model(model: nn.Module) -> Iterator[None]:
    """Cast the bfloat16 parameters and buffers of a model to float32 for the time of the block."""
    held = [
        (module, name, value)
        for module in model.modules()
        for values in (module.named_parameters, module.named_buffers)
        for name, value in values(recurse=False, remove_duplicate=False)
        if value.dtype == torch.bfloat16
    ]
    # What is shared is shared still.
    cast = {id(value): value for _, _, value in held}
    for key, value in cast.items():
        widened = value.detach().float()
        cast[key] = nn.Parameter(widened, requires_grad=False) if isinstance(value, nn.Parameter) else widened
    try:
        for module, name, value in held:
            setattr(module, name, cast[id(value)])
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _float32_part(part: ModelPart) -> ModelPart:
    """Return a part whose bfloat16 inputs, states and loaded weights are float32; see :func:`_float32_model`."""
    cache = part.cache
    if cache is not None:
        cache = replace(cache, states=tuple(replace(state, dtype=_float32_name(state.dtype)) for state in cache.states))
    return replace(
        part,
        inputs=tuple(spec.model_copy(update={"dtype": _float32_name(spec.dtype)}) for spec in part.inputs),
        example=None if part.example is None else _float32_tensors(part.example),
        cache=cache,
        with_weights=_loading_float32(part.with_weights),
        with_references=_loading_float32(part.with_references),
    )


def _loading_float32(load: Callable[..., nn.Module] | None) -> Callable[..., nn.Module] | None:
    return None if load is None else partial(load, dtype=torch.float32)


def _float32_name(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _float32_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
