"""Record of a quantized file, and of the search for the bits of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.transform.records import TransformedFile

if TYPE_CHECKING:
    from winml.modelkit.quantize.planning import ModulePrecision


@dataclass(frozen=True)
class BudgetChoice(Record):
    """The form that was chosen for one module."""

    tag: str
    precision: str
    block_size: int | None = field(metadata=entry(omit_none=True))
    """Values that share a scale; None where the weight stays floating-point."""
    parameters: int
    size_bytes: int
    """Of its weights in this form, scales included."""
    alone_db: dict[str, float | None]
    """Name of each form that was measured → SQNR of the worst output with this module alone in it; null where it was
    not run."""
    algorithm: str = field(default="", metadata=entry(omit_empty=True))
    """What found its blocks, where algorithms were compared."""
    own_db: dict[str, float] = field(default_factory=dict, metadata=entry(omit_empty=True))
    """Algorithm that was tried in this form → SQNR of the outputs of its own products."""

    @property
    def form(self) -> str:
        """The form, in a few words."""
        form = self.precision if self.block_size is None else f"{self.precision}/{self.block_size}"
        return f"{form} {self.algorithm}" if self.algorithm else form

    @property
    def why(self) -> str:
        """What the form and those with fewer and more bits cost alone, in a few words."""
        words = (f"{name} {db:.1f} dB" for name, db in self.alone_db.items() if db is not None)
        alone = f"alone: {', '.join(words)}"
        if not self.algorithm:
            return alone
        tried = ", ".join(f"{name} {db:.1f} dB" for name, db in self.own_db.items())
        return f"{alone}; {self.algorithm}, by its own outputs: {tried}"


@dataclass(frozen=True)
class BudgetTrial(Record):
    """One form of the whole model."""

    form: str
    """``mixed``, or the one form of all modules."""
    mean_bits: float = field(metadata=entry(digits=3))
    size_bytes: int
    """Of all weights of the model."""
    sqnr_db: float | None
    """Of the worst output, on the samples that forms are chosen by; null where it does not run."""
    is_chosen: bool = False
    perplexity: float | None = field(default=None, metadata=entry(digits=4, omit_none=True))
    """On the samples that were held out, where it is a limit."""


@dataclass(frozen=True)
class BudgetSearch(Record):
    """The search for bits by module that keep a limit."""

    limit: str
    """The limit, in words."""
    mean_bits: float = field(metadata=entry(digits=3))
    """Of all parameters of the file, scales included, as ``winml inspect`` counts them."""
    form: str
    """``mixed``, or the one form of all modules where no mixture was better."""
    modules: tuple[BudgetChoice, ...]
    frontier: tuple[BudgetTrial, ...]
    """Forms of the whole that were measured, by size."""
    measured: int
    """Forms that were made, run and compared."""
    samples: int
    """Samples that forms were chosen by; the file is judged on others."""
    source: str
    """Where these samples come from."""
    float_perplexity: float | None = field(default=None, metadata=entry(digits=4, omit_none=True))
    """Of the source, on the samples that were held out, where the perplexity is a limit."""

    resumed: int = 0
    """Of the forms measured, those that an interrupted run had measured."""

    @property
    def note(self) -> str:
        """The limit and what was found within it, as a sentence."""
        return f"Limit {self.limit}: {self.form}, {self.mean_bits:.2f} bits per parameter."

    @property
    def perplexity(self) -> float | None:
        """Of the form that was chosen; None where it is no limit."""
        return next((trial.perplexity for trial in self.frontier if trial.is_chosen), None)


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
