"""The record of what was asked for and what came of it in one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.quantize.precisions import FLOAT32

__all__ = ["ModulePrecision", "float_name"]

_FLOAT_NAMES = {"FLOAT16": "fp16", "BFLOAT16": "bf16"}


def float_name(dtype: str) -> str:
    """Return the name of the precision of weights of a type, by ONNX's name of it."""
    return _FLOAT_NAMES.get(dtype, FLOAT32)


@dataclass(frozen=True)
class ModulePrecision:
    """What was asked for and what came of it in one module, those below it not included."""

    tag: str
    requested: str
    """Name of the precision."""
    quantized: int
    """Nodes with a weight that have the precision."""
    left: Mapping[str, int]
    """Why others keep theirs → how many."""
    kept: tuple[str, ...] = (FLOAT32,)
    """Names of the precisions of the weights of those others, as they stand in the file."""

    @property
    def actual(self) -> str:
        """Return the precision its weights have now: one name, or several where some nodes were left."""
        names = [self.requested] * bool(self.quantized) + list(self.kept) * bool(self.left)
        return ", ".join(dict.fromkeys(names)) or FLOAT32

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "tag": self.tag,
            "requested": self.requested,
            "actual": self.actual,
            "quantized": self.quantized,
            "left": dict(self.left),
        }
