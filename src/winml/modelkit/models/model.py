"""Loading of the weights of a resolved model: from the checkpoint, or seeded random weights.

``resolution.py`` decides all other properties of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from winml.modelkit.errors import opt
from winml.modelkit.models.checkpoints.merging import merge_adapters, swappable_branches
from winml.modelkit.models.checkpoints.pipeline_files import PipelineFiles
from winml.modelkit.models.checkpoints.weights import load_checkpoint
from winml.modelkit.models.families.input_decisions import decide_parts
from winml.modelkit.models.live_module import refuse_without_values
from winml.modelkit.models.parts import LoadedModel, ModelPart
from winml.modelkit.models.pipelines import load_modules
from winml.modelkit.models.random_weights import build_random_model, calibrate_batch_norms
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import (
    ResolvedModel,
    model_info,
    requested_dtype,
    resolve_model,
    with_plain_outputs,
)
from winml.modelkit.models.tensors import draw_tensors
from winml.modelkit.ort.foreign_libraries import local_libraries
from winml.modelkit.progress import Tell

_CALIBRATION_DRAWS = 8
"""Measured on EfficientNet, in which the last layers see four pixels of an image.

Activations of the next sample grow to 1e10 with one calibration sample and lose all precision; with eight samples, a
change of the input grows a hundredfold.
"""


def load_model(request: ModelRequest, progress: Tell | None = None) -> LoadedModel:
    """Load the requested model.

    Args:
        request: Request of the user.
        progress: Receives a text for each step.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: files, the Hub, or the user's code failed.
    """
    resolved = resolve_model(request, needs_weights=not request.random_weights, progress=progress)
    return load_resolved(resolved, request, progress)


def load_resolved(resolved: ResolvedModel, request: ModelRequest, progress: Tell | None = None) -> LoadedModel:
    """Load the weights of a resolved model: random ones if requested, else the weights of the checkpoint.

    Raises:
        CheckpointError: the weights cannot be read or do not fit the model.
        InputError: a factory returned a model without values.
    """
    if resolved.pipeline is not None:
        return _load_pipeline(resolved, resolved.pipeline, request, progress)
    if resolved.checkpoint is None or resolved.decision is None:
        refuse_without_values(resolved.model, resolved.source.name)
        return LoadedModel(model_info(resolved, request), resolved.parts)
    with local_libraries():
        if request.random_weights:
            parts, weight_notes = _build_random_parts(resolved, request, progress)
        else:
            parts, weight_notes = _load_parts(resolved, request, progress)
    notes = (*resolved.notes_on_codes, *weight_notes, *dtype_notes(parts[0].model, request))
    if branches := tuple(swappable_branches(parts[0].model, resolved.adapters)):
        parts = tuple(replace(part, branches=branches, adapters=resolved.swappable) for part in parts)
    info = model_info(resolved, request)
    return LoadedModel.of_parts(info, parts, resolved.checkpoint.notes, notes, requested_names=request.submodel)


def _load_pipeline(
    resolved: ResolvedModel, files: PipelineFiles, request: ModelRequest, progress: Tell | None
) -> LoadedModel:
    """Load the weights of all modules of a diffusers pipeline."""
    if progress is not None:
        progress(f"loading {files.class_name}")
    assert resolved.dtype is not None  # decided by the request
    parts = resolved.parts_with(load_modules(files, resolved.dtype))
    is_mixed = resolved.dtype == torch.float16 and files.upcasts_vae
    vae_notes = ("vae stays float32, as in diffusers: its config says that it overflows (force_upcast)",) * is_mixed
    notes = (*resolved.model_notes, *dtype_notes(parts[0].model, request), *vae_notes)
    return LoadedModel(model_info(resolved, request), parts, notes, request.submodel)


def _build_random_parts(
    resolved: ResolvedModel, request: ModelRequest, progress: Tell | None
) -> tuple[tuple[ModelPart, ...], tuple[str, ...]]:
    """Build the model with seeded random weights; return its parts and notes on the weights."""
    assert resolved.checkpoint is not None  # a factory brings its weights
    if progress is not None:
        progress(f"building {resolved.model_class.__name__} with random weights")
    model = with_plain_outputs(
        build_random_model(
            resolved.model_class, resolved.checkpoint.config, request.seed, dtype=requested_dtype(request)
        )
    )
    merge_adapters(model, resolved.adapters)
    if len(resolved.parts) == 1:
        # With several parts, the forwards of the parts are no calls of the model itself.
        part = resolved.parts[0]
        seeds = range(request.seed, request.seed + _CALIBRATION_DRAWS)
        draws = [draw_tensors(part, seed) for seed in seeds]
        calibrate_batch_norms(model, draws, part.forward_kwargs)
    explanation = " instead of those in the checkpoint" if resolved.source.kind in ("folder", "hub") else ""
    return resolved.parts_with(model), (f"the weights are random{explanation}: outputs are meaningless",)


def _load_parts(
    resolved: ResolvedModel, request: ModelRequest, progress: Tell | None
) -> tuple[tuple[ModelPart, ...], tuple[str, ...]]:
    """Load the weights of the checkpoint; return the parts and notes on the weights."""
    source, checkpoint = resolved.source, resolved.checkpoint
    assert checkpoint is not None  # a factory brings its weights
    assert resolved.decision is not None
    assert source.weights is not None  # checked with the folder
    if progress is not None:
        progress(f"loading {resolved.model_class.__name__}")
    model, notes = load_checkpoint(
        resolved.model_class,
        checkpoint.config,
        source.weights,
        dtype=resolved.dtype,
        trust_remote_code=request.trust_remote_code,
        coded=resolved.coded,
        seed=request.seed,
    )
    merge_adapters(model, resolved.adapters)
    model = with_plain_outputs(model)
    if resolved.dtype is None:
        # The dtype of pickled weights is known only now, and inputs that are not indices have the same dtype.
        return decide_parts(model, checkpoint, resolved.decision.task, request), notes
    return resolved.parts_with(model), notes


def dtype_notes(model: torch.nn.Module, request: ModelRequest) -> Iterator[str]:
    """Yield a note if floating point parameters are not float32, with the reason."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    reason = "as in the checkpoint" if request.dtype is None else f"as requested by {opt.dtype} {request.dtype}"
    cpu = f"; ONNX Runtime's CPU provider has few bfloat16 kernels, {opt.dtype} fp32 or fp16 is for the CPU"
    if dtypes not in ([], ["float32"]):
        yield f"the weights are {' and '.join(dtypes)}, {reason}{cpu if 'bfloat16' in dtypes else ''}"
