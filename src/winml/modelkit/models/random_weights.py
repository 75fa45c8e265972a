"""Construction of a model with seeded random weights from a config alone.

Outputs of the model still reveal export errors: no two tensors are equal by being constant, and activations neither
vanish nor explode through a deep stack. Reads no checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from winml.modelkit.models.checkpoints.config import build_error
from winml.modelkit.models.inputs.shape_run import REFUSALS

_MODEL_ERRORS = (*REFUSALS, OSError)
"""Exceptions of model classes for an invalid config or invalid inputs."""
_CONSTANT_SPREAD = 0.02
"""Standard deviation added to constant parameters: the value of transformers' own initial weights."""
_CONSTANT_TOLERANCE = 1e-6
"""Chosen: closer values count as equal; SAM's config requests weights of 1e-10, which suppress every signal."""
_SMALLEST_SCALE = 0.5
"""Chosen: half of the scale of a trained normalization, ten times the initial scale of normalizations near zero."""
_VARIANCE_FLOOR = 0.01
"""Smallest running variance, as a share of the layer's mean: a dead channel would be scaled by a thousand."""
_MIN_VARIANCE = 1e-12


def build_random_model(
    model_class: Any, config: object, seed: int, *, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Build a model of ``model_class`` with seeded random weights, in evaluation mode.

    Weights are initialized by transformers, then constant parameters (zero biases, unit scales, tiny layer scales) get
    a spread: exporters merge equal constants, and a branch scaled by 1e-6 tests nothing. The caller's random state is
    left unchanged.

    Raises:
        CheckpointError: the config has values the class refuses, or the class needs a missing package.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = model_class._from_config(config, **({} if dtype is None else {"dtype": dtype}))
            _lift_scales(model)
            _spread_constants(model)
    except _MODEL_ERRORS as error:
        raise build_error(model_class, error) from error
    return model.eval()


@torch.no_grad()
def _lift_scales(model: torch.nn.Module) -> None:
    """Set the scales of normalizations that are near zero to about one, in place.

    Such scales suit training, but an untrained stack of them suppresses every signal.
    """
    for module in model.modules():
        scale = getattr(module, "weight", None)
        is_norm = isinstance(module, (torch.nn.LayerNorm, torch.nn.GroupNorm)) or _tracks_statistics(module)
        if is_norm and isinstance(scale, torch.Tensor) and float(scale.abs().mean()) < _SMALLEST_SCALE:
            scale.normal_(1.0, _CONSTANT_SPREAD)


@torch.no_grad()
def _spread_constants(model: torch.nn.Module) -> None:
    for tensor in (*model.parameters(), *_learned_tables(model)):
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if float((tensor - tensor.flatten()[0]).abs().max()) <= _CONSTANT_TOLERANCE:
            tensor.add_(torch.randn_like(tensor), alpha=_CONSTANT_SPREAD)


def _learned_tables(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that a checkpoint fills like parameters: codebooks with one entry per row."""
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in state and buffer.dim() > 1:
            yield buffer


@torch.no_grad()
def calibrate_batch_norms(
    model: torch.nn.Module, draws: Sequence[Mapping[str, torch.Tensor]], keywords: Mapping[str, object]
) -> None:
    """Set the running statistics of every batch norm, in place, to the statistics of its inputs in one forward.

    Activations of a deep random network vanish with the initial statistics (mean 0, variance 1). Activations of the
    next image explode with the statistics of a single one: the last layers see a handful of pixels. All samples form
    one batch; only the first sample is used if the model refuses the batch. A model that refuses this sample as well is
    left unchanged; a later run reports the reason.
    """
    norms = [module for module in model.modules() if _tracks_statistics(module)]
    if not norms:
        return
    joint_draw = {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}
    with contextlib.ExitStack() as hooks:
        for module in norms:
            hooks.enter_context(module.register_forward_pre_hook(_set_statistics))
        for feeds in (joint_draw, draws[0]):
            with contextlib.suppress(*_MODEL_ERRORS):
                model(**feeds, **keywords)
                return


def _tracks_statistics(module: torch.nn.Module) -> bool:
    """Return True if a module is a batch norm, frozen ones of a library's own class included."""
    return all(isinstance(getattr(module, name, None), torch.Tensor) for name in ("running_mean", "running_var"))


def _set_statistics(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    """Set mean and variance of a batch norm to the statistics of its input; a hook before its forward."""
    values: torch.Tensor = arguments[0].float()
    dimensions = [0, *range(2, values.dim())]
    mean, square = values.mean(dimensions), values.square().mean(dimensions)
    running_mean: Any = module.running_mean
    running_var: Any = module.running_var
    if values.numel() == values.shape[1]:
        # One value per channel: after subtraction of the mean nothing is left, so only the scale is used.
        mean, square = torch.zeros_like(mean), square.mean().expand_as(square)
    running_mean.copy_(mean)
    variance = (square - mean.square()).clamp_min(_MIN_VARIANCE)
    running_var.copy_(variance.clamp_min(_VARIANCE_FLOOR * float(variance.mean())))
