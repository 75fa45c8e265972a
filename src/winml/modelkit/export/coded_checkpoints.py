"""Transfer of the integer codes of a quantized checkpoint to the exported graph.

The graph is processed in memory: no file holds the weights as floating-point numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.request import ModelRequest, processor_folder
from winml.modelkit.quantize.carried_codes import CarriedCodes, NearestWeight, carry_codes, loss_notes
from winml.modelkit.transform.graph_file import EXTERNAL_BYTES, GraphHandover, GraphWork

_LEAST_SQNR_DB = 20.0
"""Chosen: activations in 8 bits leave 30 dB of a model with random weights (measured), and codes in a wrong order leave
none."""


@dataclass
class _CodesWork(GraphWork[CarriedCodes]):
    """Carrying codes over, once."""

    step_name: ClassVar[str] = "codes"

    config: WinMLExportConfig
    nearest: tuple[NearestWeight, ...] = ()
    """Weights in the nearest supported format because no operator takes their codes; empty before the work."""

    @property
    def least_sqnr_db(self) -> float:
        """As of activations in 8 bits."""
        return _LEAST_SQNR_DB

    def apply(self, model: ir.Model) -> CarriedCodes:
        """Replace the readers of coded weights."""
        result = carry_codes(model, self.config.ep, self.config.activations)
        self.nearest = result.nearest
        return result

    def summary(self, result: CarriedCodes) -> str:
        """Return the number of nodes that use codes, as text."""
        count = sum(module.quantized for module in result.modules)
        return f"{count} nodes use the quantized weights of the checkpoint"

    def late_notes(self, model: ir.Model) -> tuple[str, ...]:
        """Return notes on the loss of weights converted to the nearest format."""
        del model
        return tuple(loss_notes(self.nearest))


def handover_of_codes(request: ModelRequest, config: WinMLExportConfig) -> GraphHandover:
    """Return the processing of a quantized checkpoint's graph before it is written."""

    def works(path: Path, model: ir.Model) -> list[_CodesWork]:
        del path, model
        return [_CodesWork(config)]

    processors = processor_folder(request)
    return GraphHandover(works, external_from_bytes=EXTERNAL_BYTES, processors=processors)
