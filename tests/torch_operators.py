"""How do many dynamo exports of one process share torch's table of ONNX operators? It is built once and copied.

torch builds the table anew for each export, from the source text of 500 functions: half the time of a small export.
"""

from __future__ import annotations

import functools
import sys


def share_operator_table() -> None:
    """Let ``ONNXRegistry.from_torchlib`` copy a table that it built before, once torch has imported the class."""
    if (module := sys.modules.get("torch.onnx._internal.exporter._registration")) is not None:
        _share(module.ONNXRegistry)


@functools.cache
def _share(registry: type) -> None:
    built = functools.cache(registry.from_torchlib)  # type: ignore[attr-defined]

    def from_torchlib(**options: int) -> object:
        first, copied = built(**options), registry()
        copied._opset_version = first._opset_version
        # An export adds operators of its own to these lists.
        copied.functions = {target: [*forms] for target, forms in first.functions.items()}
        return copied

    registry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[attr-defined]
