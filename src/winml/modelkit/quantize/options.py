"""Options of the quantize stage, shared by the command, the build config and Python.

Declared in ``declared_options.py``. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pydantic

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.fields import fields_of
from winml.modelkit.options import NUMBER_WITH_UNIT, SIZE_UNITS, Drop, Options, drop_words, parse_size, read_drop
from winml.modelkit.ort.execution_providers import checked_short_name
from winml.modelkit.quantize import precisions
from winml.modelkit.quantize.declared_options import DATA_ALGORITHMS, INTEGER_ALGORITHMS, Algorithm, QuantizeFields
from winml.modelkit.quantize.placements import BLOCK_OPERATORS, CPU_PLACEMENT, PLACEMENTS, placement_for
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSetRequest


@dataclass(frozen=True)
class BitBudget:
    """Limit for the selection of bits per module; without a limit, the smallest variant of sufficient quality."""

    mean_bits: float | None = None
    """Maximum mean bits of all parameters of a file, as ``winml inspect`` counts them; scales and zero points
    included."""
    max_bytes: int | None = None
    """Maximum size of a file including graph, metadata and data files."""
    max_drop: Drop | None = None
    """Maximum increase of the perplexity relative to the source."""

    @property
    def is_smallest(self) -> bool:
        """True for the smallest variant of sufficient quality."""
        return self.mean_bits is None and self.max_bytes is None

    @property
    def option(self) -> str:
        """Option that states the limit."""
        return spell("max_drop" if self.max_drop is not None else "budget" if self.max_bytes is None else "max_size")

    def within_limit_words(self, size_bytes: Callable[[], int], mean_bits: Callable[[], float | None]) -> str:
        """Describe the size or bits of a file within the limit; empty if it exceeds the limit or no limit is stated.

        Args:
            size_bytes: Returns the size of the file.
            mean_bits: Returns the mean bits per parameter; ``None`` without parameters.
        """
        if self.max_bytes is not None:
            return f"{size} bytes" if (size := size_bytes()) <= self.max_bytes else ""
        bits = None if self.mean_bits is None else mean_bits()
        return f"{bits:.2f} bits per parameter" if bits and bits <= (self.mean_bits or 0) else ""

    def refuse_met_limit(self, sizes: Sequence[str]) -> NoReturn:
        """Refuse a limit that every source is within already.

        Args:
            sizes: Size or bits of each source.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.option} {self.words}: the source has {', '.join(sizes)}, within the limit: nothing to quantize",
            hint=f"Use a lower limit, or {opt.budget} smallest with {opt.min_sqnr}.",
        )

    @property
    def words(self) -> str:
        """Description of the limit."""
        if self.max_drop is not None:
            return f"the smallest with a perplexity at most {drop_words(self.max_drop)} larger"
        if self.mean_bits is not None:
            return f"{self.mean_bits:g} bits"
        return "the smallest" if self.max_bytes is None else size_words(self.max_bytes)


def _read_budget(text: str) -> BitBudget:
    """Parse a limit in bits per parameter, or ``smallest``.

    Raises:
        UsageError: the text is neither.
    """
    if text == "smallest":
        return BitBudget()
    match = NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in ("bit", "bits") or not float(match[1]):
        example = f"For example {opt.budget} 4.5bits."
        if match is not None and match[2] in SIZE_UNITS:
            example = f"A size is {opt.max_size} {text.strip()}."
        elif re.fullmatch(r"\d+(\.\d+)?", text.strip()) and float(text) <= 32:  # bits of float32
            example = f"Did you mean {opt.budget} {text.strip()}bits?"
        elif text.strip().lower() == "smallest":
            example = f"Did you mean {opt.budget} smallest?"
        raise UsageError(f"{opt.budget} {text!r}: expected bits per parameter, or smallest", hint=example)
    return BitBudget(mean_bits=float(match[1]))


def _read_drop(text: str) -> Drop:
    """Parse the maximum increase of the perplexity.

    Raises:
        UsageError: the limit is invalid, or for another metric.
    """
    name, drop = read_drop(text)
    if name != "perplexity":
        raise UsageError(
            f"{opt.max_drop} {text}: a search for bits limits the perplexity alone",
            hint=f"For example {opt.max_drop} perplexity=2%. For other outputs, use {opt.min_sqnr}.",
        )
    return drop


_OF_SAMPLES = ("calibration_data", "split", "columns", "samples")
"""Options that select the samples."""
_OF_RANGES = ("calibration_data", "split", "columns", "method", "calibration_cache")
"""Options of calibrated ranges; only the mode ``qdq`` always reads them."""


class QuantizeOptions(QuantizeFields, Options):
    """Options of the quantize stage."""

    _short_ep = pydantic.field_validator("ep")(checked_short_name)

    @property
    def takes_constant_tables(self) -> bool:
        """True if rows can be looked up in constants only, not in computed tables."""
        return placement_for(self.ep).takes_constant_tables

    @property
    def base(self) -> precisions.Precision:
        """Precision of modules without a rule."""
        if self.bit_budget is not None:
            return precisions.PRECISIONS[self.precision or (precisions.W8A8 if self.mode == "qdq" else precisions.INT4)]
        if self.precision is None and self.kv_cache is not None:
            return precisions.PRECISIONS[precisions.FLOAT32]
        return precisions.PRECISIONS[self.precision or precisions.INT8]

    @property
    def bit_budget(self) -> BitBudget | None:
        """Limit for the selection of bits per module; ``None`` without a limit.

        Raises:
            UsageError: the limit cannot be parsed.
        """
        if self.max_drop is not None and self.budget in (None, "smallest") and self.max_size is None:
            return BitBudget(max_drop=_read_drop(self.max_drop))
        if self.budget is not None:
            return _read_budget(self.budget)
        return None if self.max_size is None else BitBudget(max_bytes=parse_size(self.max_size, opt.max_size))

    def refuse_files_within_limit(self, sources: Sequence[Path]) -> None:
        """Refuse a limit that every source file is within already.

        Raises:
            UsageError: names the sizes or bits of the files.
        """
        if (budget := self.bit_budget) is None:
            return
        from winml.modelkit.onnx.contents import read_contents
        from winml.modelkit.onnx.files.placing import external_files
        from winml.modelkit.onnx.files.reading import read_structure
        from winml.modelkit.onnx.module_costs import weights_cost

        def describe(source: Path) -> str:
            return budget.within_limit_words(
                lambda: sum(path.stat().st_size for path in (source, *external_files(source))),
                lambda: weights_cost(read_contents(read_structure(source))).bits,
            )

        if sources and all(sizes := [describe(source) for source in sources]):
            budget.refuse_met_limit(sizes)

    @property
    def words(self) -> str:
        """Description of the request: the limit, or precisions with modes, and the KV cache."""
        cache = [f"KV cache {self.kv_cache}"] if self.kv_cache is not None else []
        budget = self.bit_budget
        if budget is not None and self.precision is not None:
            return f"{self.precision}, with modules in float32 for the smallest file"
        if budget is not None:
            return ", ".join((f"to {budget.words}: bits of each module chosen by measured sensitivity", *cache))
        modes = [f"{precision.name} ({mode})" for precision, mode in self.requested_modes()]
        return ", ".join((*modes, *cache)) or precisions.FLOAT32

    @property
    def has_bits_by_kind(self) -> bool:
        """True if a requested precision has activations in 8 or 16 bits by kind."""
        return any(precisions.PRECISIONS[name].has_bits_by_kind for name in (self.base.name, *self.per_module.values()))

    def bits_of_kind(self, kind: precisions.ValueKind) -> int:
        """Bits of the activations of a kind, as requested or by default."""
        return self.activation_bits.get(kind, precisions.KIND_RULES[kind].bits)

    def requested_modes(self) -> Iterator[tuple[precisions.Precision, precisions.Mode]]:
        """Yield each requested (precision, mode), without duplicates.

        Raises:
            UsageError: a precision does not support the mode.
        """
        for precision in dict.fromkeys(
            [self.base, *(precisions.PRECISIONS[name] for name in self.per_module.values())]
        ):
            if (mode := self.mode_of(precision)) is not None:
                yield precision, mode

    @property
    def selectors(self) -> tuple[str, ...]:
        """Every selector of modules."""
        return tuple(
            dict.fromkeys((*self.exclude, *self.include, *self.per_module, *self.block_sizes, *self.algorithms))
        )

    @property
    def qdq_block_size(self) -> int | None:
        """Block size of all weights in ``qdq``; ``None`` beside ``weight-only``: it then applies to that mode alone.

        Raises:
            UsageError: a precision does not support the mode.
        """
        return None if "weight-only" in self.modes() else self.block_size

    def least_opset(self, rules: precisions.ModeRules) -> int:
        """Return the minimum opset of the operators that a mode creates with these options."""
        if not rules.needs_ranges:
            has_standard_blocks = self.weight_operators == "standard" and "weight_operators" in rules.options
            return precisions.BLOCK_OPSET if has_standard_blocks else rules.least_opset
        has_blocks = self.qdq_block_size is not None or bool(self.block_sizes)
        has_few_bits = any(precision.default_block is not None for precision, _ in self.requested_modes())
        return precisions.BLOCK_OPSET if has_blocks or has_few_bits else rules.least_opset

    def plug_ins(self) -> dict[str, str]:
        """Precision of a plug-in → its package and version, for requested precisions."""
        sources = {name: precisions.PRECISIONS.source(name) for name in (self.base.name, *self.per_module.values())}
        return {name: source for name, source in sources.items() if source}

    def modes(self) -> tuple[precisions.Mode, ...]:
        """Modes in use, without duplicates.

        Raises:
            UsageError: a precision does not support the mode.
        """
        return tuple(dict.fromkeys(mode for _, mode in self.requested_modes()))

    def remedies(self) -> list[str]:
        """Suggestions of unused options that reduce the error of the modes in use.

        Raises:
            UsageError: a precision does not support the mode.
        """
        of_modes = {name: remedy for mode in self.modes() for name, remedy in precisions.MODES[mode].remedies.items()}
        fields = type(self).model_fields
        of_cache = [f"use data or more samples for the KV cache ({opt.calibration_data}, {opt.samples})"]
        return [
            *(
                remedy.format(spell(name))
                for name, remedy in of_modes.items()
                if getattr(self, name) == fields[name].default
            ),
            *(of_cache if self.kv_cache is not None and self.calibrating_data is None else []),
        ]

    @property
    def needs_ranges(self) -> bool:
        """True if activations are measured, for ranges or channel maxima.

        Raises:
            UsageError: a precision does not support the mode.
        """
        is_smoothed = self.smooth_quant is not None and bool(precisions.INTEGER_ACTIVATIONS.intersection(self.modes()))
        return is_smoothed or any(precisions.MODES[mode].needs_ranges for _, mode in self.requested_modes())

    @property
    def solving_algorithms(self) -> tuple[str, ...]:
        """Requested algorithms that compute the quantized weights from samples."""
        return tuple(name for name in self._requested_algorithms if name in DATA_ALGORITHMS)

    @property
    def _requested_algorithms(self) -> tuple[Algorithm, ...]:
        """All requested algorithms, the default first."""
        return tuple(dict.fromkeys([self.algorithm, *self.algorithms.values()]))

    @property
    def solves_weights(self) -> bool:
        """True if the quantized weights are computed from samples.

        Raises:
            UsageError: a precision does not support the mode.
        """
        modes = self.modes()
        return bool(self.solving_algorithms) and (
            "weight-only" in modes or ("qdq" in modes and not INTEGER_ALGORITHMS.isdisjoint(self._requested_algorithms))
        )

    @property
    def needs_samples(self) -> bool:
        """True if the quantization runs the model on samples.

        Raises:
            UsageError: a precision does not support the mode.
        """
        return self.needs_ranges or self.solves_weights or self.kv_cache is not None

    @property
    def has_judging_data_alone(self) -> bool:
        """True if split, columns and samples belong to the dataset that the result is judged on."""
        return self.dataset is not None and self.calibration_data is None

    @property
    def calibrating_data(self) -> str | None:
        """Data of the calibration: its own, else the dataset that the result is judged on."""
        return self.calibration_data or self.dataset

    @property
    def calibrating_samples(self) -> int | None:
        """Requested number of samples of the calibration."""
        return None if self.has_judging_data_alone else self.samples

    def judging_request(self, seed: int) -> DataSetRequest | None:
        """Return the request for the samples that the result is judged on; ``None`` without a dataset.

        Args:
            seed: Seed of the selection.
        """
        from winml.modelkit.compare.quality_samples import judging_request

        if not self.has_judging_data_alone:
            return judging_request(self.dataset, seed=seed)
        return judging_request(self.dataset, split=self.split, columns=self.columns, samples=self.samples, seed=seed)

    def calibration_request(self, most: int, seed: int) -> DataSetRequest | None:
        """Return the request for the samples of the calibration; ``None`` without data.

        Samples of the dataset that the result is judged on are others than the judging ones.

        Args:
            most: Maximum number of samples, unless a number is requested.
            seed: Seed of the selection.
        """
        if self.calibration_data is None:
            judging = self.judging_request(seed)
            return None if judging is None else judging.others(most)
        from winml.modelkit.samples.data_sets import DataSetRequest

        return DataSetRequest(
            self.calibration_data,
            split=self.split,
            columns=self.columns,
            samples=self.samples,
            most=most,
            seed=seed,
            option=opt.calibration_data,
        )

    def refuse_contradictions(self) -> None:
        """Refuse options that contradict the modes in use or each other.

        Raises:
            UsageError: an option that no mode in use reads, a zero point per channel, or an algorithm with unsupported
                options.
        """
        self._refuse_beside_budget()
        if both := [text for text in self.include if text in self.exclude]:
            raise UsageError(
                f"{opt.include} {both[0]}: {opt.exclude} {both[0]} excludes the same modules", hint="Omit one of them."
            )
        requested = list(self.requested_modes())
        modes = self.modes()
        if not modes and self.kv_cache is None:
            return  # nothing is quantized, which the caller reports
        self._refuse_unread(modes)
        self._refuse_idle_activation_bits()
        self._refuse_unmeasured(modes)
        self._refuse_bits(requested)
        if self.symmetric is False and self.per_channel is not False and "qdq" in modes:
            raise UsageError(
                f"{opt.asymmetric}: integer kernels take one zero point per weight, and qdq uses one scale per channel",
                hint=f"Add {opt.per_tensor}, or omit it.",
            )
        if self.block_size is not None and self.per_channel is False and set(modes) == {"qdq"}:
            raise UsageError(
                f"{opt.block_size} {self.block_size}: {opt.per_tensor} gives each weight one scale",
                hint=f"Use {opt.block_size} or {opt.per_tensor}.",
            )
        few_bits = [precision.name for precision, mode in requested if precision.weight_bits < 4]
        if self.weight_operators == "standard" and few_bits:
            raise UsageError(
                f"{opt.precision} {few_bits[0]} with {opt.weight_operators} standard: DequantizeLinear has no integers "
                f"of 2 bits in opset {precisions.BLOCK_OPSET}",
                hint=f"Use {opt.precision} {precisions.INT4}, or {opt.weight_operators} onnxruntime.",
            )
        asymmetric_algorithm = next((name for name in self._requested_algorithms if name in ("hqq", "k_quant")), None)
        if self.symmetric and asymmetric_algorithm and "dynamic" not in modes and "qdq" not in modes:
            raise UsageError(
                f"{opt.symmetric}: {opt.algorithm} {asymmetric_algorithm} uses a zero point for every block",
                hint=f"Use {opt.algorithm} rtn, or omit {opt.symmetric}.",
            )
        others = [name for name in self._requested_algorithms if name not in INTEGER_ALGORITHMS | {"rtn"}]
        if others and "qdq" in modes and "weight-only" not in modes:
            raise UsageError(
                f"{opt.algorithm} {others[0]} does not apply to qdq, whose integers have one zero point",
                hint=f"Use {opt.algorithm} {' or '.join(sorted(INTEGER_ALGORITHMS))}, or omit it.",
            )
        has_wide_weights = all(precision.weight_bits > 8 for precision, _ in requested)
        if self.solves_weights and modes == ("qdq",) and (self.per_channel is False or has_wide_weights):
            kind = "weights of 16 bits" if has_wide_weights else "weights with one scale"
            raise UsageError(
                f"{opt.algorithm} {self.solving_algorithms[0]} does not apply to {kind}, which are rounded to nearest",
                hint=f"Use {opt.precision} w8a8 or w8a16 with a scale for each channel, or omit it.",
            )
        has_four_bits = any(precision.weight_bits == 4 for precision, mode in requested if mode == "weight-only")
        if "hqq" in self._requested_algorithms and self.weight_operators == "standard":
            raise UsageError(
                f"{opt.algorithm} hqq with {opt.weight_operators} standard: DequantizeLinear has no fractional zero "
                "points",
                hint=f"Use {opt.algorithm} k_quant, or {opt.weight_operators} onnxruntime.",
            )
        if "hqq" in self._requested_algorithms and not has_four_bits:
            raise UsageError(
                f"{opt.algorithm} hqq: ONNX Runtime supports it for 4-bit weights only",
                hint=f"Use {opt.algorithm} k_quant, or {opt.precision} int4.",
            )

    def _refuse_beside_budget(self) -> None:
        """Refuse options that contradict a limit, and limits that lack calibration data or a quality limit.

        Raises:
            UsageError: there is such an option or limit, which the message names.
        """
        budget = self.bit_budget
        if budget is None:
            return
        if self.budget is not None and self.max_size is not None:
            raise UsageError(
                f"{opt.budget} {self.budget} and {opt.max_size} {self.max_size} are two limits", hint="Use one of them."
            )
        if self.precision is not None and not self.base.float_type:
            floats = " or ".join(name for name, precision in precisions.PRECISIONS.items() if precision.float_type)
            raise UsageError(
                f"{opt.precision} {self.precision}: {budget.option} chooses the bits of each module",
                hint=f"Use one of them. {opt.sensitivity} with {opt.target} finds the modules to exclude from "
                f"{self.precision}; {opt.budget} smallest does so for {floats}.",
            )
        if self.precision is not None and not budget.is_smallest:
            raise UsageError(
                f"{opt.precision} {self.precision}: {budget.option} {budget.words} chooses the bits of each module",
                hint=f"Use one of them, or {opt.budget} smallest, which keeps modules in float32 for the quality.",
            )
        chosen = {
            f"{opt.mode} {self.mode}": self.precision is None and self.mode not in (None, "weight-only", "qdq"),
            opt.per_module: bool(self.per_module),
            opt.block_size: self.block_size is not None or bool(self.block_sizes),
            opt.algorithms: bool(self.algorithms),
        }
        for flag, is_stated in chosen.items():
            if is_stated:
                names = {opt.budget: self.budget, opt.max_size: self.max_size, opt.max_drop: self.max_drop}
                name = next(name for name, value in names.items() if value is not None)
                raise UsageError(
                    f"{flag}: {name} chooses the bits and block size of each module", hint="Use one of them."
                )
        if self.max_drop is not None and budget.max_drop is None:
            limit_option = spell("budget" if self.budget is not None else "max_size")
            raise UsageError(
                f"{opt.max_drop} {self.max_drop}: {limit_option} is also a limit",
                hint=f"Omit it, or use {opt.budget} smallest.",
            )
        if budget.max_drop is not None and self.calibrating_data is None:
            raise UsageError(
                f"{opt.max_drop} {self.max_drop}: no text to measure the perplexity on",
                hint=f"Pass {opt.calibration_data} or {opt.dataset}, such as texts.jsonl; a quarter of it is held out.",
            )
        if budget.is_smallest and budget.max_drop is None and self.min_sqnr_db is None:
            raise UsageError(
                f"{opt.budget} smallest: no quality limit",
                hint=f"Add {opt.min_sqnr}, such as 25, or {opt.max_drop}, such as perplexity=2%.",
            )

    def _refuse_idle_activation_bits(self) -> None:
        """Refuse bits by kind without a precision that reads them.

        Raises:
            UsageError: names the option.
        """
        is_searched = self.bit_budget is not None and self.mode == "qdq"
        names = [name for name, precision in precisions.PRECISIONS.items() if precision.has_bits_by_kind]
        if self.activation_bits and not self.has_bits_by_kind and not is_searched:
            raise UsageError(
                f"{opt.activation_bits} does not apply to {opt.precision} {self.base.name}: its values have the same "
                "bits, whatever their kind",
                hint=f"Use {opt.precision} {' or '.join(names)}, or omit it.",
            )

    def _refuse_bits(self, requested: Sequence[tuple[precisions.Precision, precisions.Mode]]) -> None:
        """Refuse activation bits and blocks of weights that the provider does not support.

        Raises:
            UsageError: bits are unsupported; the message names the fitting precisions. Or no product has blocks.
        """
        placement = placement_for(self.ep)
        block_options = {
            f"{opt.block_size} {self.block_size}": self.qdq_block_size is not None,
            opt.block_sizes: bool(self.block_sizes) and "weight-only" not in self.modes(),
        }
        stated = next((name for name, is_stated in block_options.items() if is_stated), None)
        for precision, mode in requested:
            if not precisions.MODES[mode].needs_ranges:
                continue
            if reason := placement.refusal(precision, mode):
                fitting = [
                    name
                    for name, candidate in precisions.PRECISIONS.items()
                    if mode in candidate.modes and not placement.refusal(candidate, mode)
                ]
                of_kinds = [name for name, candidate in PLACEMENTS.items() if candidate.has_bits_by_kind]
                provider = f"{opt.ep} {' or '.join(of_kinds)}, or " if precision.has_bits_by_kind else ""
                raise UsageError(
                    f"{opt.precision} {precision.name}: {self.ep or CPU_PLACEMENT} does not run it: {reason}",
                    hint=f"Use {provider}one of {', '.join(fitting)}.",
                )
            bits = precision.weight_bits, precision.range_bits
            refusals = [placement.product_refusal(*bits, "block", operator) for operator in BLOCK_OPERATORS]
            if stated is not None and all(refusals):
                raise UsageError(
                    f"{stated}: {self.ep} does not run weights by blocks in {precision.name}: {refusals[0]}",
                    hint="Omit it: weights then have a scale for each channel.",
                )

    def _refuse_unmeasured(self, modes: Sequence[precisions.Mode]) -> None:
        """Refuse calibration options if no mode needs calibration: dynamic ranges are computed in each run.

        Raises:
            UsageError: there is such an option, which the message names.
        """
        if self.needs_ranges or "dynamic" not in modes:
            return
        for name in self._stated_range_options():
            raise UsageError(
                f"{_spell_flag(name, getattr(self, name))} does not apply to {' and '.join(modes)}",
                hint=f"Use {opt.mode} qdq, or {opt.smooth_quant}, which calibrates activations too; or omit it.",
            )

    def _stated_range_options(self) -> list[str]:
        """Return the names of stated options of calibrated ranges, without those of the dataset that judges."""
        names = [name for name in _OF_RANGES if getattr(self, name)]
        return [name for name in names if not (name in ("split", "columns") and self.has_judging_data_alone)]

    def _refuse_unread(self, modes: Sequence[precisions.Mode]) -> None:
        """Refuse options that no requested mode reads.

        Raises:
            UsageError: there is such an option; the message names it and the modes that read it.
        """
        # samples is always read: in modes without calibration, it is the number of samples of the comparison.
        for name in dict.fromkeys(
            name for rules in precisions.MODES.values() for name in sorted(rules.options) if name != "samples"
        ):
            value = getattr(self, name)
            readers = [mode for mode, rules in precisions.MODES.items() if name in rules.options]
            is_read = self.solves_weights or self.kv_cache is not None or self.max_drop is not None
            if name in ("budget", "max_drop") and self.precision is not None:
                continue  # a search for modules in float32
            if (is_read and name in _OF_SAMPLES) or (name in ("split", "columns") and self.has_judging_data_alone):
                continue
            default = type(self).model_fields[name].get_default(call_default_factory=True, validated_data={})
            if value != default and not set(readers) & set(modes):
                flag = _spell_flag(name, value)
                raise UsageError(
                    f"{flag} does not apply to " + (" and ".join(modes) or f"{opt.kv_cache} alone"),
                    hint=self._suggest_use(name, flag, readers),
                )

    def _suggest_use(self, name: str, flag: str, readers: Sequence[precisions.Mode]) -> str:
        """Suggest options that make an unread option effective."""
        hints = []
        if name in _OF_SAMPLES and "weight-only" in self.modes():
            hints.append(f"{opt.algorithm} gptq, awq or auto, which use calibration samples")
        if self.bit_budget is None:
            modes = ["qdq"] if name in precisions.CALIBRATION_OPTIONS else readers
            fitting = [mode for mode in modes if mode in self.base.modes]
            names = [spec.name for spec in precisions.PRECISIONS.values() if spec.modes and spec.modes[0] in modes]
            hints.append(f"{opt.mode} {' or '.join(fitting)}" if fitting else f"{opt.precision} {' or '.join(names)}")
        return f"Use {', or '.join(hints)}; or omit {flag}." if hints else "Omit it."

    @property
    def has_open_mode(self) -> bool:
        """True if the graph decides the mode: no option states one, and a requested precision has several modes."""
        if self.mode is not None or self._calibrated_mode is not None or self.bit_budget is not None:
            return False
        if len(self.base.modes) == 1:
            return False  # the mode of the options applies to the base precision, which has only one
        return any(len(precisions.PRECISIONS[name].modes) > 1 for name in (self.base.name, *self.per_module.values()))

    @property
    def _calibrated_mode(self) -> precisions.Mode | None:
        """Mode that reads the stated calibration options, if no mode is requested and nothing else reads them."""
        is_read = self.bit_budget is not None or self.kv_cache is not None or self.solving_algorithms
        if self.mode is not None or self.smooth_quant is not None or is_read:
            return None
        return "qdq" if self._stated_range_options() else None

    def quantized_operators(self) -> frozenset[str]:
        """Return the operators whose weights a mode in use changes; any possible mode if the graph decides it."""
        modes = set(self.modes())
        if self.has_open_mode:
            modes.update(*(precisions.PRECISIONS[name].modes for name in (self.base.name, *self.per_module.values())))
        return frozenset().union(*(precisions.MODES[mode].operators for mode in modes))

    def mode_of(self, precision: precisions.Precision) -> precisions.Mode | None:
        """Quantization mode of a precision; ``None`` for float32.

        Raises:
            UsageError: the base precision does not support the mode.
        """
        # The mode applies to the base precision, and to the precisions of single modules that support it.
        wish = self.mode if precision == self.base or self.mode in precision.modes else None
        if wish is None and self._calibrated_mode in precision.modes:
            wish = self._calibrated_mode
        return precisions.mode_for(precision, wish)


def _spell_flag(name: str, value: object) -> str:
    """Option and value as written on the command line."""
    field = next(field for field in fields_of(QuantizeFields) if field.name == name)
    if isinstance(value, dict):
        value = ",".join(f"{key}={entry}" for key, entry in value.items())
    return spell(field.option(value)) + ("" if field.is_switch else f" {value}")
