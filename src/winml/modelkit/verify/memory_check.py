"""Can memory hold what a comparison with PyTorch takes?"""

from __future__ import annotations

from winml.modelkit.errors import ExportError
from winml.modelkit.graph.files.writing import INLINE_LIMIT_BYTES
from winml.modelkit.words import size_words

__all__ = ["refuse_verification_beyond_memory"]

INSIDE_FACTOR = 2.25
"""Measured on 1.92 GB of weights inside the file: ONNX Runtime holds the file and the weights as its kernels want them,
4.2 GB with all else. PyTorch's copy is gone by then."""
OUTSIDE_FACTOR = 1.25
"""Measured on 4.40 GB in a file of their own, which is mapped: 5.4 GB with all else, in PyTorch and in ONNX Runtime."""


def refuse_verification_beyond_memory(weight_bytes: int, available: int | None) -> None:
    """Refuse to compare with PyTorch a model whose weights memory cannot hold.

    Args:
        weight_bytes: Size of the parameters in memory.
        available: Bytes of memory to be had; None where nobody knows.

    Raises:
        ExportError: they do not fit.
    """
    needed = int(weight_bytes * (INSIDE_FACTOR if weight_bytes < INLINE_LIMIT_BYTES else OUTSIDE_FACTOR))
    if available is not None and needed > available:
        raise ExportError(
            f"comparing with PyTorch takes about {size_words(needed)} of memory ({size_words(weight_bytes)} of "
            f"weights, in PyTorch and then in ONNX Runtime), and {size_words(available)} are available",
            hint="Use --no-verify: the export itself needs no memory for weights.",
        )
