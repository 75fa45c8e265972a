"""Loading of a model for an export: small models with their weights, large models without.

No exporter reads a weight unless the forward reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winml.modelkit.compare.verification import reference_run
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.errors import ExportError, opt
from winml.modelkit.export.config import ExporterUse, WinMLExportConfig, configured_request, first_choice
from winml.modelkit.file_names import EMBEDDING
from winml.modelkit.models.caches.inputs import PAST_KEY
from winml.modelkit.models.checkpoints.deferred_tensors import DeferredTensor, NotDeferrableError
from winml.modelkit.models.checkpoints.merging import merge_adapters, swappable_branches
from winml.modelkit.models.checkpoints.weights import load_checkpoint
from winml.modelkit.models.model import dtype_notes, load_resolved
from winml.modelkit.models.parts import LoadedModel, ModelPart
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import ResolvedModel, model_info, resolve_model, with_plain_outputs
from winml.modelkit.onnx.specs import DynamicDimension
from winml.modelkit.ort.default_sizes import default_size
from winml.modelkit.ort.execution_providers import find_execution_provider
from winml.modelkit.ort.foreign_libraries import local_files_only, local_libraries
from winml.modelkit.ort.host import available_bytes


def load_weightless(resolved: ResolvedModel, request: ModelRequest) -> LoadedModel:
    """Build a resolved model with fake parameters that refer to their stored values.

    transformers loads the checkpoint as usual, with tensors that hold only their position in a file
    (``checkpoints/deferred_tensors.py``). The same code as for real values thus decides names, merged experts, casts,
    ties and missing weights. Afterwards the parameters are fake tensors, each with a reference into the files. A
    factory, pickled weights and random weights have no such reference: these are loaded with values, as are checkpoints
    that transformers cannot load without values; a note reports it.

    Args:
        resolved: The resolved model.
        request: The user's request.

    Raises:
        CheckpointError: the weights cannot be read or do not belong to the model.
    """
    if resolved.checkpoint is None or not _reads_by_reference(resolved, request):
        return load_resolved(resolved, request)
    try:
        with local_libraries():
            model, weight_notes = _load_weights(resolved, request, deferred=True)
            # Codes stay codes: LoRA over them is a branch of the graph.
            branches = merge_adapters(model, resolved.adapters, retains_codes=True)
            branches += swappable_branches(model, resolved.adapters)
            stored = _stored_entries(model)
            _take_values_out(model)
    except NotDeferrableError as reason:
        loaded = load_resolved(resolved, request)
        note = f"the weights are loaded into memory: transformers needs their values ({reason})"
        return replace(loaded, model_notes=(*loaded.model_notes, note))

    def with_weights(dtype: torch.dtype | None = None) -> nn.Module:
        with local_libraries():
            weighted = _load_weights(resolved, request, deferred=False, dtype=dtype)[0]
            merge_adapters(weighted, resolved.adapters)
        return weighted

    def with_references(dtype: torch.dtype | None = None) -> nn.Module:
        with local_libraries():
            referring = _load_weights(resolved, request, deferred=True, dtype=dtype)[0]
            merge_adapters(referring, resolved.adapters)
        _read_buffers(referring)
        return referring

    parts = resolved.parts_with(
        model,
        stored=stored,
        with_weights=with_weights,
        with_references=with_references,
        branches=tuple(branches),
        adapters=resolved.swappable,
    )
    notes = (*resolved.notes_on_codes, *weight_notes, *dtype_notes(model, request))
    info = model_info(resolved, request)
    return LoadedModel.of_parts(info, parts, resolved.checkpoint.notes, notes, requested_names=request.submodel)


def _reads_by_reference(resolved: ResolvedModel, request: ModelRequest) -> bool:
    weights = resolved.source.weights
    is_readable = weights is not None and (weights.format == "safetensors" or resolved.coded is not None)
    return resolved.checkpoint is not None and is_readable and not request.random_weights


def _load_weights(
    resolved: ResolvedModel, request: ModelRequest, *, deferred: bool, dtype: torch.dtype | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Load the checkpoint, with values or with references to values; return also notes."""
    weights, checkpoint = resolved.source.weights, resolved.checkpoint
    # A checkpoint has both.
    assert weights is not None
    assert checkpoint is not None
    model, notes = load_checkpoint(
        resolved.model_class,
        checkpoint.config,
        weights,
        dtype=dtype or resolved.dtype,
        trust_remote_code=request.trust_remote_code,
        coded=resolved.coded,
        is_deferred=deferred,
        seed=request.seed,
    )
    return with_plain_outputs(model), notes


def _stored_entries(model: nn.Module) -> dict[str, ir.TensorProtocol]:
    """Return every entry of the state dict; entries that share values share their tensor."""
    tensors: dict[int, ir.TensorProtocol] = {}
    stored = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in tensors:
            tensors[id(value)] = (
                value.by_reference(name)
                if isinstance(value, DeferredTensor)
                else tensor_adapters.TorchTensor(value.detach(), name=name)
            )
        stored[name] = tensors[id(value)]
    return stored


def _take_values_out(model: nn.Module) -> None:
    """Make every parameter a fake tensor, and every buffer a real tensor; in place. Shared tensors stay shared."""
    # Created as by torch.export, which then continues with this mode; its sizes may be dynamic.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]), export=True)
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                with mode:
                    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
                fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            module._parameters[name] = fakes[id(parameter)]
    _read_buffers(model)


def _read_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.realized()


ModelCheck = Callable[[ResolvedModel], None]
"""Refuses a resolved model by an error, before its weights are loaded."""

LARGE_WEIGHTS_BYTES = 2**30
"""Chosen: larger weights are in memory for the comparison with PyTorch alone, and gone before ONNX Runtime opens the
file. Measured on 0.8 GB: 1.5 GB at most instead of 2.4, in 1.1 times the processor time."""

_LARGE_UNREAD_BYTES = 2**27
"""Limit for weights that no run in PyTorch reads: the graph is changed in memory before it is written, or no comparison
is made. Chosen: peak memory is to stay below 1.5 GB, of which the libraries take 0.5 GB; with half a gigabyte of
weights held, a build peaked at 1.7 GB.
"""


def resolve_for_export(
    request: ModelRequest, config: WinMLExportConfig, check: ModelCheck | None = None
) -> ResolvedModel:
    """Resolve a model as an export does before it loads weights, to raise the same errors early.

    Args:
        request: The model.
        config: Options of the export.
        check: Called with the model; None: no further check.

    Raises:
        UsageError: the request is invalid, or states a task or size that the model does not have.
        InputError: config files cannot be read or downloaded, the model needs its own code, or quantized weights are
            missing.
    """
    resolved = resolve_model(configured_request(request, config))
    if check is not None:
        check(resolved)
    return resolved


def load_for_export(
    request: ModelRequest,
    config: WinMLExportConfig,
    *,
    is_handed_over: bool = False,
    check: ModelCheck | None = None,
) -> tuple[LoadedModel, ExporterUse]:
    """Load a model, with its weights unless they are large.

    Args:
        request: The user's request.
        config: Options of the export.
        is_handed_over: True if the graph is quantized before it is written. 16-bit weights are then read as float32,
            which the quantizers read and no file ever holds; and the limit for large weights is lower.
        check: Called with the model before its weights are loaded; None: no further check.

    Returns:
        The model, and the exporter to begin with. For a model with a cache, sizes that are dynamic only by default are
        fixed if the execution provider requires it; a note reports it.

    Raises:
        UsageError: the request is invalid.
        InputError: files, the Hub, or the user's code failed.
        ExportError: the outputs are to be compared with PyTorch's, and memory cannot hold the weights.
    """
    loaded, use = _resolve_and_load(request, config, is_handed_over=is_handed_over, check=check)
    takes_dynamic = config.ep is None or config.allow_dynamic or find_execution_provider(config.ep).takes_dynamic
    closing = {} if takes_dynamic else _closing_sizes_by_default(loaded)
    if not closing:
        return loaded, use
    fixed = request.with_sizes({**closing, **request.fixed_sizes})
    loaded, use = _resolve_and_load(fixed, config, is_handed_over=is_handed_over, check=check)
    prompts = ",".join(map(str, request.prompt_lengths))
    options = f"{opt.prompt_length} {prompts} {opt.shape_config}" if prompts else f"{opt.shape_config}"
    note = (
        f"Sizes are fixed, as {opt.ep} {config.ep} requires. To change them, change the numbers in: {options} "
        f"'{json.dumps(closing)}'."
    )
    return replace(loaded, model_notes=(note, *loaded.model_notes)), use


def _resolve_and_load(
    request: ModelRequest, config: WinMLExportConfig, *, is_handed_over: bool, check: ModelCheck | None
) -> tuple[LoadedModel, ExporterUse]:
    """Resolve and load a model, without weights if they are large; return also the exporter to begin with.

    Args:
        request: The request of the user.
        config: Options of the export.
        is_handed_over: True if the graph is quantized before it is written.
        check: Called with the resolved model before its weights are loaded.

    Raises:
        ExportError: the comparison needs the weights, and they do not fit into memory.
    """
    resolved = resolve_model(request, needs_weights=not request.random_weights, widens_halves=is_handed_over)
    if check is not None:
        check(resolved)
    if resolved.is_widened:
        request = replace(request, dtype="fp32")
    weight_bytes, use = parameter_bytes(resolved.model), first_choice(config)
    is_handed_over = is_handed_over or resolved.coded is not None
    are_read = config.verify and not is_handed_over
    are_large = weight_bytes > (LARGE_WEIGHTS_BYTES if are_read else _LARGE_UNREAD_BYTES)
    # Low-bit codes are transferred by reference, regardless of their size.
    if use.name == "torchscript" and not are_large and resolved.coded is None:
        return load_resolved(resolved, request), use
    # A graph that is handed over is compared without them.
    if are_read and not _reads_by_reference(resolved, request):
        reference_run.refuse_verification_beyond_memory(resolved.model, available_bytes())
    loaded = load_weightless(resolved, request)
    for part in loaded.parts:
        if part.stored is not None and (refusal := _refusal_without_values(part)) is not None:
            if config.verify:
                reference_run.refuse_verification_beyond_memory(resolved.model, available_bytes())
            note = f"The weights were loaded: the forward fails without them in {refusal.module or 'the root'}."
            weighted = load_resolved(resolved, request)
            parts = tuple(
                replace(full, notes=fake.notes) for full, fake in zip(weighted.parts, loaded.parts, strict=True)
            )
            return LoadedModel.of_parts(
                loaded.info, parts, loaded.model_notes, [note], requested_names=loaded.requested_names
            ), use
    return loaded, use


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of the parameters in bytes, tied parameters counted once; meta and fake tensors count too."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _refusal_without_values(part: ModelPart) -> ExportError | None:
    """Return the error of a part that runs without values, as of a forward that reads values; `None` without error."""
    with local_files_only(), reference_run.prepared_part(part) as prepared:
        try:
            reference_run.run_for_shapes(prepared, InputDraws(part, seed=0).draw(0))
        except ExportError as error:
            return error
    return None


_CACHED = 127
"""Chosen: tokens in the cache, so that a mask over them and one more token has 128."""
_KEYS = frozenset({
    "batch_size", "sequence_length", "past_sequence_length", "decoder_sequence_length", "num_choices",
    "height", "width", "num_channels", "num_frames", "num_mel_bins", "audio_length", "point_batch_size",
    "nb_points_per_image",
})  # fmt: skip
"""Dimensions that a key of ``--shape-config`` of the same name fixes."""


def _closing_sizes_by_default(loaded: LoadedModel) -> dict[str, int]:
    """Return the fixed sizes of a decoder for providers without dynamic sizes, by key of ``--shape-config``.

    ``{}`` if the model has no cache and is one part, or no dynamic size, or if the user requested a dynamic size.
    """
    parts = loaded.requested_parts
    is_size_requested = any(
        dimension.name not in part.open_by_default for part in parts for dimension in part.dimensions
    )
    is_plain = len(loaded.parts) == 1 and parts[0].cache is None
    if is_size_requested or is_plain or all(not part.dimensions for part in parts):
        return {}
    return closing_sizes(parts) or {}


def closing_sizes(parts: Sequence[ModelPart]) -> dict[str, int] | None:
    """Return a fixed size for every dynamic dimension, by key of ``--shape-config``: one step over a filled cache.

    The embedding of a vision-language model keeps its sizes: it reads a prompt with its images in one run, on the CPU.

    None if a dimension has no key.
    """
    bounds: dict[str, list[DynamicDimension]] = {}
    for part in parts:
        for dimension in () if part.name == EMBEDDING else part.dimensions:
            bounds.setdefault(dimension.name, []).append(dimension)
    if not bounds.keys() <= _KEYS:
        return None
    step = "decoder_sequence_length" if "decoder_sequence_length" in bounds else "sequence_length"
    usual = {name: default_size(name) or 1 for name in bounds}
    requested = {**usual, step: 1, PAST_KEY: _CACHED}
    sizes = {name: _clamp_size(requested[name], usual[name], dimensions) for name, dimensions in bounds.items()}
    for cache_dimension in bounds.get(PAST_KEY, ()):
        if cache_dimension.max is not None:  # which reserves space for one token of a step
            sizes[PAST_KEY] = max(1, min(sizes[PAST_KEY], cache_dimension.max + 1 - sizes.get(step, 1)))
    return sizes


def _clamp_size(requested: int, usual: int, bounds: Sequence[DynamicDimension]) -> int:
    """Return the requested size, or the usual size if a part's minimum is larger, within the bounds of all parts."""
    minimum = max(bound.min for bound in bounds)
    limits = [bound.max for bound in bounds if bound.max is not None]
    return min([requested if requested >= minimum else max(minimum, usual), *limits])
