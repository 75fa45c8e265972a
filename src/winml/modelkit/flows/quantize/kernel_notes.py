"""What a user has to know of how fast a quantized file runs: what was fused, and what the processor has.

Measured, on a processor with VNNI, 128 tokens, computing time of one thread: bert-base and MiniLM, quantized as they
were exported, are as fast within the spread as after ``winml optimize`` at any level and after the optimizer of
``onnxruntime.transformers``. ONNX Runtime does the fusions that integer operators need
(DynamicQuantizeMatMul, MatMulIntegerToFloat with its bias) when it creates a session, and does them in any graph whose
products still stand by themselves. So nothing is fused before, and a graph that was stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from winml.modelkit.quantize.precisions import Mode
from winml.modelkit.runtime.processor import has_integer_dot_products, is_x86

__all__ = ["kernel_notes"]

_INTEGER_MODES: frozenset[Mode] = frozenset({"dynamic", "qdq"})


def kernel_notes(modes: Collection[Mode], *, signed_weights: bool) -> Iterator[str]:
    """Yield what to say of a file that was quantized in these ways.

    Args:
        modes: Ways to fewer bits that were used.
        signed_weights: Whether weights became signed integers.
    """
    if "dynamic" in modes:
        yield "ONNX Runtime fuses integer products when it opens the file: winml optimize before gains no time."
    if _INTEGER_MODES.isdisjoint(modes):
        return
    has_dot_products = has_integer_dot_products()
    if has_dot_products and is_x86() and not signed_weights:
        yield (
            "Unsigned weights do not use this processor's 8-bit dot products (VNNI), signed ones do: --precision int8 "
            "is faster."
        )
    if has_dot_products is False:
        words = "This processor has no 8-bit dot products (VNNI): 8 bits gain less time here than where there are some."
        if is_x86() and signed_weights:
            words += (
                " Sums of signed weights may saturate on it; if answers suffer, set session.x64quantprecision to 1 in "
                "ONNX Runtime, or use --precision uint8."
            )
        yield words
