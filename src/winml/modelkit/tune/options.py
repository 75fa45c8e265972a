"""Frozen options of a tuning, for the command and Python.

Imports nothing heavy.
"""

from __future__ import annotations

import pydantic

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.fields import refuse_stated
from winml.modelkit.onnx.files.named_paths import refuse_missing_values
from winml.modelkit.options import Options, drop_words, parse_size
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.execution_providers import checked_short_name
from winml.modelkit.tune.declared_options import TuneFields


class TuneOptions(TuneFields, Options):  # type: ignore[misc]  # Options is frozen by its config
    """Options of a tuning: candidates, limits and measurement."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False)

    sizes: dict[str, pydantic.PositiveInt] = pydantic.Field(default_factory=dict)
    """Sizes of dynamic dimensions to run at, by name or by key of --shape-config."""
    batch_size: pydantic.PositiveInt | None = None
    """Batch size to run an ONNX file at."""
    seed: pydantic.NonNegativeInt = 0
    """Seed of the random values."""
    draws: pydantic.PositiveInt | None = None
    """Samples that outputs are compared on. Null: 16, fewer for large models."""

    @property
    def uses_default_limit(self) -> bool:
        """True if no quality limit is requested, so that the minimum of each precision applies."""
        return self.min_sqnr_db is None and not self.max_drop

    _short_ep = pydantic.field_validator("ep")(checked_short_name)

    @property
    def max_peak_bytes(self) -> int | None:
        """The maximum peak memory in bytes; ``None`` without a limit."""
        return None if self.max_peak is None else parse_size(self.max_peak, opt.max_peak)

    @property
    def is_simulated(self) -> bool:
        """True if the device is simulated, with meaningless times."""
        return self.ep is not None and bool(choose_provider(self.ep, None, self.ep_options).stand_in)

    @property
    def decides_by_size(self) -> bool:
        """True if the smallest file wins: on request, or because times on a simulated device are meaningless."""
        return self.target == "size" or self.is_simulated

    @property
    def sizes_to_fix(self) -> dict[str, int]:
        """The specified sizes of dynamic dimensions of an ONNX file, which a candidate may fix; ``{}``: none."""
        return {**self.sizes, **({} if self.batch_size is None else {"batch_size": self.batch_size})}

    @property
    def evaluation(self) -> EvaluationOptions | None:
        """Options of the evaluation of a candidate on the dataset; None without a limit on a metric."""
        if self.dataset is None or not self.max_drop:
            return None
        return EvaluationOptions(
            dataset=self.dataset,
            split=self.split,
            columns=dict(self.columns),
            samples=self.samples,
            seed=self.seed,
            max_drop=dict(self.max_drop),
        )

    def refuse_contradictions(self) -> None:
        """Refuse contradictory options.

        Raises:
            UsageError: a maximum drop without a dataset; a dataset and other inputs; two sources of sizes; a missing
                file; a provider that is not installed.
        """
        if self.max_drop and self.dataset is None:
            name = next(iter(self.max_drop))
            raise UsageError(
                f"{opt.max_drop} {name}={drop_words(self.max_drop[name])}: no samples to measure {name} on",
                hint=f"Add {opt.dataset} with a file, a folder or a name on the Hub.",
            )
        if self.dataset is None:
            refuse_stated(
                self,
                ("split", "columns", "samples"),
                f"{{}} requires {opt.dataset}",
                "Omit it, or pass a dataset.",
                declaring=TuneFields,
            )
        if self.dataset is not None and not self.max_drop and self.input_data is not None:
            raise UsageError(
                f"{opt.dataset} {self.dataset}: {opt.input_data} {self.input_data} already determines the samples",
                hint=f"Use one of the two, or add {opt.max_drop} with a metric of the task.",
            )
        _ = self.max_peak_bytes
        if self.input_data is not None and (self.sizes or self.batch_size is not None):
            option = spell("shape_config" if self.sizes else "batch_size")
            raise UsageError(
                f"{option}: {opt.input_data} {self.input_data} already determines the sizes", hint="Use one of the two."
            )
        if "placement" in self.only and not {"dynamic", "qdq"} & set(self.only):
            raise UsageError(
                f"{opt.only} placement: it moves modules of quantized candidates back to float, but no quantized "
                "candidate is tried",
                hint=f"Add dynamic or qdq: {opt.only} qdq,placement.",
            )
        if self.ep_options and self.ep is None:
            raise UsageError(
                f"{opt.ep_options} {next(iter(self.ep_options))}: no execution provider",
                hint=f"Add {opt.ep}, or omit it.",
            )
        if self.ep is not None:
            choose_provider(self.ep, None, self.ep_options)
        self._refuse_missing_data()

    def _refuse_missing_data(self) -> None:
        """Refuse input or calibration data that does not exist; raises UsageError."""
        refuse_missing_values(self.input_data)
        if self.calibration_data is not None:
            from winml.modelkit.quantize.calibration.calibration_files import calibration_kind

            calibration_kind(self.calibration_data)
