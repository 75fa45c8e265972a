"""Compares two models that are given by name, as files or as live modules. A name becomes a file or a request here."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.errors import ConfigError
from winml.modelkit.load.request import ModelRequest, resolve_source
from winml.modelkit.options import unknown_key_message

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.flows.compare.compare import Comparable, CompareOptions
    from winml.modelkit.load.live_module import ExampleInputs
    from winml.modelkit.results.model_comparison import ModelComparison

__all__ = ["compare_models", "found_side"]


def compare_models(
    reference: str | os.PathLike[str] | ModelRequest | nn.Module,
    candidate: str | os.PathLike[str] | ModelRequest | nn.Module,
    options: CompareOptions | None = None,
    *,
    inputs: ExampleInputs | None = None,
    **changes: Any,
) -> ModelComparison:
    """Run two models on the same values, and compare their answers; with ``by_module`` module by module.

    Args:
        reference: What is right: an ONNX file, the folder of a build, a checkpoint or Hub id, or a live module.
        candidate: What is compared with it.
        options: What both are fed, and what is compared; None: the defaults.
        inputs: Example inputs of a live module, where its own config does not say what it takes.
        **changes: Fields of :class:`CompareOptions`, on top of ``options``: ``by_module=True``.

    Returns:
        How near the outputs are and, by module, where the models part.

    Raises:
        UsageError: an unknown field, inputs or outputs do not match, values do not fit, no module is on both sides, or
            a model answers otherwise each time.
        InputError: a file is damaged.
        StageError: one of them cannot be run.
    """
    from winml.modelkit.flows.compare import compare as flow

    known = [field.name for field in fields(flow.CompareOptions)]
    for name in changes:
        if name not in known:
            raise ConfigError(unknown_key_message(name, known, "compare_models"))
    asked = replace(options or flow.CompareOptions(), **changes)
    return flow.compare_models(_side(reference), _side(candidate), asked, inputs=inputs)


def _side(model: str | os.PathLike[str] | ModelRequest | nn.Module) -> Comparable:
    return found_side(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model


def found_side(name: str) -> Path | ModelRequest:
    """Return what a name means: an ONNX file, also in the folder of a build, or a PyTorch model.

    Raises:
        UsageError: the name means nothing that can be used.
        CheckpointError: weight files are truncated, or an index names missing shards.
    """
    if (path := onnx_file(name)) is not None:
        return path
    request = ModelRequest(model=name)
    resolve_source(request)
    return request
