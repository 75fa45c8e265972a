"""Outputs of a model in PyTorch whose weights remain in the checkpoint.

All inputs are answered side by side: each weight is read once for all of them, and dropped before the next is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from winml.modelkit.compare.verification.lock_step import Ask, run_in_lock_step
from winml.modelkit.compare.verification.reference_run import PreparedPart, conditions_as_python, prepared_part
from winml.modelkit.compare.verification.streamed_parameters import (
    WeightRequest,
    asking,
    stream_parameters,
    streamed_slices,
)
from winml.modelkit.compare.verification.varied_sizes import Draw, run_draw


def with_streaming_loader(prepared: PreparedPart) -> PreparedPart:
    """Return a part whose weights, where they are loaded, are read whenever something is computed with them."""
    load_references = prepared.part.with_references
    assert load_references is not None  # the parameters have no values

    def load(dtype: torch.dtype | None = None) -> nn.Module:
        model = load_references(dtype)
        stream_parameters(model)
        return model

    return replace(prepared, part=replace(prepared.part, with_weights=load))


@contextmanager
def with_streamed_values(prepared: PreparedPart) -> Iterator[PreparedPart]:
    """Yield the prepared part as it is where its parameters hold values, else one that reads them as it goes.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
    """
    if prepared.part.with_references is None:
        yield prepared
        return
    with _streamed(prepared, 1) as parts:
        yield parts[0]


@contextmanager
def _streamed(prepared: PreparedPart, count: int) -> Iterator[list[PreparedPart]]:
    """Yield the prepared part as often as asked for, with parameters that are read when something is computed.

    Each has modules of its own, since a forward may write on them; parameters are shared.

    Args:
        prepared: A part whose parameters have no values.
        count: How many of them.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
    """
    part = prepared.part
    assert part.with_references is not None  # the parameters have no values
    model = part.with_references()
    stream_parameters(model)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(count - 1))]
    with ExitStack() as entered:
        parts = [
            entered.enter_context(
                prepared_part(replace(part, model=model, stored=None, with_weights=None, with_references=None))
            )
            for model in models
        ]
        for item in parts:
            item.forward.rename_outputs(prepared.forward.output_names)
        yield parts


def streamed_outputs(prepared: PreparedPart, draws: Sequence[Draw]) -> list[Draw]:
    """Return the draws with what the model answers in PyTorch.

    Args:
        prepared: A part whose parameters have no values.
        draws: Inputs that it takes.

    Raises:
        ExportError: the model refuses one of them; names the module.
        CheckpointError: the weights cannot be read or are not those of the model.
    """

    def answer(weighted: PreparedPart, draw: Draw, ask: Ask[WeightRequest, torch.Tensor]) -> Draw:
        # Gradients are a matter of the thread.
        with torch.no_grad(), asking(ask):
            return run_draw(weighted, draw)

    with _streamed(prepared, len(draws)) as parts, conditions_as_python():
        works = [partial(answer, weighted, draw) for weighted, draw in zip(parts, draws, strict=True)]
        return run_in_lock_step(works, streamed_slices)
