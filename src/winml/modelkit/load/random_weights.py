"""What stands in for weights when there is only a config?

Builds a seeded model whose outputs still show mistakes: no two tensors equal by being constant, and activations that
neither fade nor explode through a deep stack. Reads no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from winml.modelkit.load.config import build_error

__all__ = ["build_random_model", "calibrate_batch_norms"]

_CONSTANT_SPREAD = 0.02
"""Standard deviation added to constant parameters: that of transformers' own initial weights."""
_VARIANCE_FLOOR = 0.01
"""Smallest running variance set, as a share of the layer's mean: a dead channel would be scaled by a thousand."""
_TINY = 1e-12


def build_random_model(model_class: Any, config: Any, seed: int) -> torch.nn.Module:
    """Build a model of ``model_class`` with seeded random weights, in evaluation mode.

    Initialized as transformers does for training, then constant parameters (zero biases, unit scales, tiny layer
    scales) get a spread: exporters merge equal constants, and a branch scaled by 1e-6 proves nothing. The caller's
    random state is left as it was.

    Raises:
        CheckpointError: the config holds values the class refuses, or the class needs a missing package.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = model_class._from_config(config)
            _spread_constants(model)
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise build_error(model_class, error) from error
    return model.eval()


@torch.no_grad()
def _spread_constants(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if (
            parameter.is_floating_point()
            and parameter.numel() > 1
            and bool((parameter == parameter.flatten()[0]).all())
        ):
            parameter.add_(torch.randn_like(parameter), alpha=_CONSTANT_SPREAD)


@torch.no_grad()
def calibrate_batch_norms(
    model: torch.nn.Module, feeds: Mapping[str, torch.Tensor], keywords: Mapping[str, Any]
) -> None:
    """Set the running statistics of every batch norm, in place, to those of the values that reach it in one forward.

    With the initial statistics (mean 0, variance 1) a deep random network fades to nothing.
    """
    norms = [module for module in model.modules() if _tracks_statistics(module)]
    if not norms:
        return
    handles = [module.register_forward_pre_hook(_take_statistics) for module in norms]
    try:
        model(**feeds, **keywords)
    finally:
        for handle in handles:
            handle.remove()


def _tracks_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def _take_statistics(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    values: torch.Tensor = arguments[0].float()
    dimensions = [0, *range(2, values.dim())]
    mean, square = values.mean(dimensions), values.square().mean(dimensions)
    running_mean: Any = module.running_mean
    running_var: Any = module.running_var
    if values.numel() == values.shape[1]:
        # One value per channel: subtracting it would leave nothing, so only the scale is kept.
        mean, square = torch.zeros_like(mean), square.mean().expand_as(square)
    running_mean.copy_(mean)
    variance = (square - mean.square()).clamp_min(_TINY)
    running_var.copy_(variance.clamp_min(_VARIANCE_FLOOR * float(variance.mean())))
