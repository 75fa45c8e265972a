"""Runs the PyTorch model that an ONNX file was exported from, on the same values.

Loads it as the export does and calls it with the same tensors, gradients off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from winml.modelkit.errors import MeasureError, UsageError, first_line
from winml.modelkit.load.request import ModelRequest

__all__ = ["pytorch_run"]


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

    model = load_model(request, tell)
    loaded = model.only_part if len(model.parts) == 1 else model.part_taking(feeds)
    if loaded is None:
        raise UsageError(
            f"--baseline pytorch: no part of {request.model} takes {', '.join(feeds)}",
            hint="Export the file again from this model.",
        )
    names = [spec.name for spec in loaded.inputs]
    if missing := [name for name in names if name not in feeds]:
        raise UsageError(
            f"--baseline pytorch: {request.model} takes {', '.join(names)}, the ONNX file has no input {missing[0]!r}",
            hint="Export the file again from this model.",
        )
    if threads is not None:
        torch.set_num_threads(threads)
    # As fast as PyTorch is by itself.
    place: dict[str, Any] = {"path": loaded.path, "entry": loaded.entry, "arguments": loaded.arguments}
    prepared = prepared_for_export(loaded.model, names, loaded.forward_kwargs, **place, plain_attention=False)
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
