"""Compares a written file with PyTorch: on the traced inputs, on a second draw, and at other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.verify.failure_explanation import refuse_outputs_by_value
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.other_sizes import Draw, WrittenGraph, compare_at_other_sizes, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, dtypes_inside, run_reference, with_values
from winml.modelkit.verify.stable_draws import compare_stable_draws

__all__ = ["verify_written_file"]


def verify_written_file(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws, *, advice: str = ""
) -> VerificationInfo:
    """Compare a written file with PyTorch.

    Args:
        written: The file, and what was traced.
        prepared: The part it was made from.
        inputs: Further inputs.
        advice: What to try first where an open dimension froze.

    Raises:
        VerificationError: they disagree, or the comparison would show nothing.
    """
    written, second = _with_reference_outputs(written, prepared, inputs)
    draws = (written.draw, second)
    refuse_outputs_by_value(draws)
    dtypes = dtypes_inside(prepared.part.module, written.draw.reference)
    verification = compare_stable_draws(
        prepared,
        draws,
        computed_in=dtypes,
        # The third is for other sizes.
        draw_inputs=lambda number, replaced: inputs.draw(number + 1, with_padding=replaced.has_padding),
        run_file=lambda new_draws: _run_file(written.path, new_draws, prepared.model),
    )
    at_other_sizes = compare_at_other_sizes(written, dtypes, advice=advice)
    return replace(verification, comparisons=(*verification.comparisons, *at_other_sizes))


def _with_reference_outputs(
    written: WrittenGraph, prepared: PreparedPart, inputs: InputDraws
) -> tuple[WrittenGraph, Draw]:
    """Return the file with PyTorch's answer to every draw, and a second draw at the traced sizes.

    Where masks hide something in the traced inputs they hide nothing in the second draw, and the other way round: many
    models take another path when there is no padding.

    The weights of a model that was traced without them are in memory only here, so that ONNX Runtime finds it free.
    """
    tensors = inputs.draw(2, with_padding=not written.draw.has_padding)
    with with_values(prepared) as weighted:
        if weighted is not prepared:
            draws = tuple(_answered_draw(weighted, draw) for draw in written.proof.draws)
            draw = _answered_draw(weighted, written.draw)
            written = replace(written, draw=draw, proof=replace(written.proof, draws=draws))
        return written, Draw(tensors, run_reference(weighted, tensors), written.draw.sizes)


def _answered_draw(weighted: PreparedPart, draw: Draw) -> Draw:
    with unchanged_attributes(weighted.model):
        return replace(draw, reference=run_reference(weighted, draw.inputs))


def _run_file(path: Path, draws: Sequence[Draw], model: nn.Module) -> list[Mapping[str, NDArray[Any]]]:
    """Run the file in ONNX Runtime.

    Raises:
        VerificationError: ONNX Runtime cannot run it.
    """
    # ONNX Runtime is loaded by those who verify only.
    from winml.modelkit.runtime.sessions import Session

    try:
        session = Session(path)
        return [session.run({name: to_numpy(value) for name, value in draw.inputs.items()}) for draw in draws]
    except StageError as error:
        raise VerificationError(
            f"cannot verify: {error.message.replace(str(path), 'the file')}",
            hint=f"{_kernel_words(model)}; --no-verify writes the file without comparing.",
            is_graph_wrong=True,
        ) from error


def _kernel_words(model: nn.Module) -> str:
    """Return what ONNX Runtime may lack for a model, and what helps."""
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if small := " and ".join(sorted(dtypes & {"bfloat16", "float16", "float64"})):
        return f"The weights are {small}, for which its CPU has few kernels: --dtype fp32 casts them"
    return "Its CPU kernels do not take every dtype and operator"
