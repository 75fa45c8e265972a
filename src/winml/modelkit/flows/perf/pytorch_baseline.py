"""Runs the PyTorch model that an ONNX file was exported from, on the same values.

Loads it as the export does and calls it with the same tensors, gradients off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from winml.modelkit.errors import MeasureError, UsageError, WinMLError, first_line
from winml.modelkit.load.request import ModelRequest, resolve_source
from winml.modelkit.metadata_keys import MODEL_KEY

__all__ = ["exported_from", "pytorch_run"]


def exported_from(metadata: Mapping[str, str], shown: str) -> ModelRequest:
    """Return the checkpoint a file says it was exported from.

    Args:
        metadata: What the file says about itself.
        shown: The file, for messages.

    Raises:
        UsageError: it does not say, or what it names is no checkpoint on this machine. A file never makes us ask a
            network or run code it names.
    """
    hint = "Give the model itself: -m with a Hub id, checkpoint folder or file.py:factory, and --baseline pytorch."
    try:
        record = json.loads(metadata.get(MODEL_KEY, ""))
        request = ModelRequest(
            model=str(record["name_or_path"]),
            task=record.get("task"),
            random_weights=bool(record.get("random_weights")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"--baseline pytorch: {shown} does not say which model it was exported from", hint=hint
        ) from None
    try:
        kind = resolve_source(request).kind
    except WinMLError:
        kind = "type"
    if kind not in ("folder", "config"):
        raise UsageError(
            f"--baseline pytorch: {shown} was exported from {request.model}, which is no checkpoint at this place",
            hint=hint,
        )
    return request


@contextmanager
def pytorch_run(
    request: ModelRequest,
    feeds: Mapping[str, NDArray[Any]],
    *,
    threads: int | None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Callable[[], object]]:
    """Return a call of the PyTorch model on these values, inside the block.

    Args:
        request: Which model.
        feeds: Values by the name of the input.
        threads: Threads that share the work of one operator; None: as many as PyTorch chooses.
        tell: Told in words what is done before the model can be called.

    Raises:
        UsageError: the model takes other inputs.
        MeasureError: it refuses the values.
    """
    import torch

    from winml.modelkit.export.preparation import prepared_for_export
    from winml.modelkit.export.tensors import to_torch
    from winml.modelkit.load.model import load_model

    loaded = load_model(request, tell).only_part
    names = [spec.name for spec in loaded.inputs]
    if missing := [name for name in names if name not in feeds]:
        raise UsageError(
            f"--baseline pytorch: {request.model} takes {', '.join(names)}, the ONNX file has no input {missing[0]!r}",
            hint="Export the file again from this model.",
        )
    if threads is not None:
        torch.set_num_threads(threads)
    # As fast as PyTorch is by itself.
    prepared = prepared_for_export(
        loaded.model, names, loaded.forward_kwargs, arguments=loaded.arguments, plain_attention=False
    )
    with prepared, torch.inference_mode():
        tensors = [to_torch(feeds[name]) for name in names]

        def run() -> object:
            return loaded.model(*tensors)

        try:
            run()
        except Exception as error:
            given = ", ".join(f"{name} {feeds[name].dtype}{list(feeds[name].shape)}" for name in names)
            raise MeasureError(
                f"--baseline pytorch: the model refused {given}: {type(error).__name__}: {first_line(error)}",
                hint="Give sizes it takes with --shape-config.",
            ) from error
        yield run
