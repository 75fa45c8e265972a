"""Which models do the names of an evaluation mean?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.evaluate.options import NO_BASELINE, PYTORCH, EvaluationOptions
from winml.modelkit.flows.evaluate.judged_models import Subject
from winml.modelkit.load.request import ModelRequest, resolve_source
from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["named_baseline", "named_subject"]


def named_baseline(name: str | None) -> Path | ModelRequest | None:
    """Return the baseline of a name; None for ``pytorch``, ``none`` and no name.

    Raises:
        UsageError: there is no such file, and no such checkpoint.
    """
    if name in (None, PYTORCH, NO_BASELINE):
        return None
    assert name is not None
    path = onnx_file(name)
    if path is not None:
        return path
    request = ModelRequest(model=name)
    resolve_source(request)
    return request


def named_subject(name: str, options: EvaluationOptions, run: RunOptions, **load: Any) -> Subject:
    """Return the models of an evaluation.

    Args:
        name: ONNX file, folder of a build, or a checkpoint.
        options: Name the baseline.
        run: Where an ONNX file runs.
        load: How a checkpoint is loaded.

    Raises:
        UsageError: a name means nothing.
    """
    path = onnx_file(name)
    model = ModelRequest(model=name, task=options.task, **load) if path is None else path
    has_baseline = None if options.baseline is None else options.baseline != NO_BASELINE
    return Subject(model, replace(run, shown=name), named_baseline(options.baseline), has_baseline)
