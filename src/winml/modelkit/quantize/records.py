"""Record of a quantized file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.records import entry, recorded
from winml.modelkit.transform.records import TransformedFile

if TYPE_CHECKING:
    from winml.modelkit.quantize.budget_records import BudgetSearch
    from winml.modelkit.quantize.planning import ModulePrecision


@dataclass(frozen=True)
class Calibrated:
    """Where the ranges of activations came from."""

    words: str
    """For people."""
    record: Mapping[str, Any]
    """As it stands in the file."""


@dataclass(frozen=True)
class QuantizedFile(TransformedFile, schema_version=1):
    """A file some of whose weights have fewer bits."""

    precision: str
    """The one requested for the whole model."""
    modes: tuple[str, ...]
    """The ways that were used, in order."""
    calibration: Calibrated | None = field(metadata=entry(attribute="record", omit_none=True))
    """None where no mode needed ranges."""
    modules: tuple[ModulePrecision, ...]
    """Modules that have nodes with weights, in the order of the graph."""
    budget: BudgetSearch | None = field(default=None, metadata=entry(omit_none=True))
    """How bits were chosen for each module; None where the options say them."""
    kv_cache: str | None = field(default=None, metadata=entry(omit_none=True))
    """Precision of the KV cache, where it was quantized."""

    @property
    @recorded(entry(before="calibration"))
    def quantized(self) -> int:
        """Number of nodes with a weight that were quantized."""
        return sum(module.quantized for module in self.modules)

    @property
    @recorded(entry(before="calibration"))
    def left(self) -> dict[str, int]:
        """Why nodes with a weight keep theirs → how many, the most frequent first."""
        reasons: Counter[str] = Counter()
        for module in self.modules:
            reasons.update(module.left)
        return dict(reasons.most_common())
