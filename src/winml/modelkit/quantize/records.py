"""Records of a quantized file, and of the search for the bits of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.transform.records import TransformedFile
from winml.modelkit.words import sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.quantize.planning import ModulePrecision


class BudgetChoice(Record):
    """Selected format of one module."""

    tag: str
    precision: str
    block_size: int | None = field(metadata=entry(omit_none=True))
    """Number of values that share a scale; ``None`` for floating-point weights."""
    parameters: int
    size_bytes: int
    """Size of its weights in this format, scales included."""
    alone_db: dict[str, float | None]
    """Format → SQNR of the worst output with this module alone quantized; null if not run."""
    algorithm: str = field(default="", metadata=entry(omit_empty=True))
    """Algorithm of its blocks, if algorithms were compared."""
    own_db: dict[str, float] = field(default_factory=dict, metadata=entry(omit_empty=True))
    """Algorithm tried with this format → SQNR of the outputs of its products."""

    @property
    def form(self) -> str:
        """Short description of the format."""
        text = self.precision if self.block_size is None else f"{self.precision}/{self.block_size}"
        return f"{text} {self.algorithm}" if self.algorithm else text

    @property
    def why(self) -> str:
        """Short description of the SQNR of this module alone in each format."""
        words = (f"{name} {sqnr_words(db)}" for name, db in self.alone_db.items() if db is not None)
        alone = f"alone: {', '.join(words)}"
        if not self.algorithm:
            return alone
        tried = ", ".join(f"{name} {sqnr_words(db)}" for name, db in self.own_db.items())
        return f"{alone}; {self.algorithm}, by its own outputs: {tried}"


class BudgetTrial(Record):
    """Measurement of one variant of the whole model."""

    form: str
    """``mixed``, or the common format of all modules."""
    mean_bits: float = field(metadata=entry(digits=3))
    size_bytes: int
    """Size of all weights of the model."""
    sqnr_db: float | None
    """SQNR of the worst output, on the samples of the search; null if it does not run."""
    is_chosen: bool = False
    perplexity: float | None = field(default=None, metadata=entry(digits=4, omit_none=True))
    """Perplexity on the held-out samples, if it is a limit."""
    lower_sqnr_db: float | None = field(default=None, metadata=entry(before="is_chosen"))
    """Lower end of its interval over the samples, which the minimum applies to."""
    is_mixture: bool = False
    """True if modules have different formats: ``form`` may also be the precision ``mixed``."""


class BudgetSearch(Record):
    """Search for the bits of each module within a limit."""

    limit: str
    """The limit, in words."""
    mean_bits: float = field(metadata=entry(digits=3))
    """Mean bits of all parameters of the file, scales included, as ``winml inspect`` counts them."""
    form: str
    """``mixed``, or the common format of all modules if no mixture was better."""
    modules: tuple[BudgetChoice, ...]
    frontier: tuple[BudgetTrial, ...]
    """Measured variants of the whole model, by size."""
    measured: int
    """Number of variants created, run and compared."""
    samples: int
    """Number of samples of the search; the file is judged on other samples."""
    source: str
    """Origin of these samples."""
    float_perplexity: float | None = field(default=None, metadata=entry(digits=4, omit_none=True))
    """Perplexity of the source on the held-out samples, if the perplexity is a limit."""

    resumed: int = 0
    """Number of measurements reused from an interrupted run."""
    rules: Mapping[str, str] = field(default_factory=dict, metadata=entry(omit_empty=True))
    """Selector → precision of the modules that stay float32, if the precision of the others is stated."""

    @property
    def note(self) -> str:
        """Sentence with the limit and the selected variant."""
        return f"Limit {self.limit}: {self.form}, {self.mean_bits:.2f} bits per parameter."

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the selected variant; ``None`` if it is not a limit."""
        return next((trial.perplexity for trial in self.frontier if trial.is_chosen), None)


class ActivationCount(Record):
    """Number of quantized activations of one kind and one number of bits."""

    kind: str = field(metadata=entry(omit_empty=True))
    """Kind of the values; empty if all kinds have the same bits."""
    bits: int
    values: int


@dataclass(frozen=True)
class Calibrated:
    """Origin of the activation ranges."""

    words: str
    """Description."""
    record: Mapping[str, Any]
    """Record as written to the file."""


class QuantizedFile(TransformedFile, schema_version=1, document="quantize.table:quantization_document", rows="modules"):
    """Record of a quantized file."""

    precision: str
    """Requested precision of the whole model."""
    modes: tuple[str, ...]
    """Modes in use, in order."""
    calibration: Calibrated | None = field(metadata=entry(attribute="record", omit_none=True))
    """``None`` if no mode needed ranges."""
    modules: tuple[ModulePrecision, ...]
    """Modules with weights, in graph order."""
    budget: BudgetSearch | None = field(default=None, metadata=entry(omit_none=True))
    """Search for the bits of each module; ``None`` if the options state the bits."""
    kv_cache: str | None = field(default=None, metadata=entry(omit_none=True))
    """Precision of the KV cache, if quantized."""
    activations: tuple[ActivationCount, ...] = field(default=(), metadata=entry(omit_empty=True))
    """Numbers of quantized activations with calibrated ranges, by kind and bits."""

    @property
    @recorded(entry(before="calibration"))
    def quantized(self) -> int:
        """Number of quantized nodes with a weight."""
        return sum(module.quantized for module in self.modules)

    @property
    @recorded(entry(before="calibration"))
    def left(self) -> dict[str, int]:
        """Reason → number of unquantized nodes with a weight, in descending order."""
        reasons: Counter[str] = Counter()
        for module in self.modules:
            reasons.update(module.left)
        return dict(reasons.most_common())
