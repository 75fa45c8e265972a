"""What an engine is asked to do with some nodes of a graph."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import Precision
from winml.modelkit.quantize.qdq_placement import QdqPlacement

__all__ = ["EngineTask", "quiet_quantizer"]


@dataclass(frozen=True)
class EngineTask:
    """Nodes of one graph that get one precision."""

    nodes: frozenset[str]
    """Names of nodes of the main graph."""
    precision: Precision
    options: QuantizeOptions
    placement: QdqPlacement = field(default_factory=QdqPlacement)
    """Which values become numbers of few bits, where their ranges have to be known."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Name of a value → its smallest and largest value; those of the placement that have their own."""

    @property
    def is_per_channel(self) -> bool:
        """Whether each output channel of a weight has a scale of its own."""
        return self.options.per_channel is not False

    @property
    def is_symmetric(self) -> bool | None:
        """Whether weights have no zero point; None: as is usual for the precision."""
        return self.options.symmetric


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[None]:
    """Keep ONNX Runtime's quantizers from writing to the log: they warn of what is no fault of the user's."""
    root = logging.getLogger()

    def is_foreign(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    root.addFilter(is_foreign)
    try:
        yield
    finally:
        root.removeFilter(is_foreign)
