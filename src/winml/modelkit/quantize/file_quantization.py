"""Quantization of an ONNX file by module.

Reading, normalization, comparison and writing are shared with the other commands that transform a graph
(``graph_file``). Does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.compare.decoded_texts import compare_on_texts
from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.files import below_minimum_hint, refuse_below_minimum_sqnr, refuse_unfaithful
from winml.modelkit.compare.quality_minimum import TARGET_DB, WEAK_DB, QualityMinimum
from winml.modelkit.compare.quality_samples import SampleRequest
from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.errors import QuantizeError, VerificationError, opt, spell, spell_flag
from winml.modelkit.fields import command_words
from winml.modelkit.file_names import files_folder
from winml.modelkit.metadata_keys import INPUTS_KEY, OUTPUTS_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.bundle import is_one_of_several
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.writing import written_bytes
from winml.modelkit.onnx.pinning import open_dimensions, sizes_of_dimensions
from winml.modelkit.onnx.specs import stated_sums
from winml.modelkit.onnx.weights import to_weightless, weight_bytes
from winml.modelkit.optimize.decoders.packed_projections import PackedProjectionPass
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.decoding.inputs import TOKEN_IDS
from winml.modelkit.ort.default_sizes import fixing_command
from winml.modelkit.ort.execution_providers import find_execution_provider
from winml.modelkit.ort.host import available_bytes, has_integer_dot_products, is_x86
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.quantize import planning
from winml.modelkit.quantize.budget import SampleTools, choose_bits
from winml.modelkit.quantize.calibration.activation_statistics import measure_states
from winml.modelkit.quantize.calibration.calibration_data import Calibration, CalibrationStatistics, refuse_missing_data
from winml.modelkit.quantize.calibration.layer_calibration import LayerCalibration
from winml.modelkit.quantize.declared_options import QuantizeFields
from winml.modelkit.quantize.engines.half_float import clipped_values
from winml.modelkit.quantize.kv_cache import attentions_over_cache, narrow_cache, quantize_cache, refuse_no_cache
from winml.modelkit.quantize.options import BitBudget, QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult, quantize
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.precisions import FLOAT32, INTEGER_ACTIVATIONS, LEAST_CACHE_SQNR_DB, PRECISIONS, Mode
from winml.modelkit.quantize.preparation import ResolvedOptions, prepare, resolve_mode
from winml.modelkit.quantize.records import BudgetSearch, Calibrated, QuantizedFile
from winml.modelkit.quantize.unfinished_work import unfinished_folder
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.transform import graph_file
from winml.modelkit.transform.module_functions import graph_modules, source_notes
from winml.modelkit.transform.records import GraphSummary
from winml.modelkit.words import command_line, count_noun, size_change_words, size_words


def _kernel_notes(modes: Collection[Mode], *, signed_weights: bool) -> Iterator[str]:
    """Yield notes on the speed of a quantized file on the processor of this machine.

    ONNX Runtime performs the fusions of integer operators (DynamicQuantizeMatMul, MatMulIntegerToFloat with its bias)
    when it creates a session, so nothing is fused here.

    Args:
        modes: Quantization modes used.
        signed_weights: True if weights became signed integers.
    """
    if INTEGER_ACTIVATIONS.isdisjoint(modes):
        return
    has_dot_products = has_integer_dot_products()
    if has_dot_products and is_x86() and not signed_weights:
        yield (
            "Unsigned weights do not use the 8-bit dot products (VNNI) of this processor, signed weights do: "
            f"{opt.precision} int8 is faster."
        )
    if has_dot_products is False:
        note = (
            "This processor has no 8-bit dot products (VNNI): int8 is less of a speedup here than on processors "
            "with VNNI."
        )
        if is_x86() and signed_weights:
            note += (
                " Sums of signed weights saturate on it unless the ONNX Runtime session option "
                f"session.x64quantprecision is 1, as winml sets it. If you cannot set it, use {opt.precision} uint8."
            )
        yield note


_CACHE_TYPES: Mapping[ir.DataType | None, str] = {ir.DataType.INT8: "int8", ir.DataType.FLOAT16: "float16"}
"""Type of a KV cache that a quantization writes → its name in the records of inputs and outputs."""
_LEAST_SAVING = 0.9
"""Minimum ratio of result size to source size for a note that little was saved. Chosen: scales take less than the
rest."""


@dataclass
class QuantizationOutcome:
    """Results of one quantization, used to check and describe the written file."""

    options: QuantizeOptions | None = None
    """Options with the selected bits of each module; ``None`` without a selection."""
    search: BudgetSearch | None = None
    """Search for the bits of each module, if the options state a limit."""
    stays_float: bool = False
    """True if the graph is a part that stays float, since it is within the limit."""
    used: frozenset[str] = frozenset()
    """Precisions of the quantized modules."""
    saved_share: float = 1.0
    """Share of the weight bytes saved by quantization, if the mode left nodes float; else 1."""
    has_modules: bool = True
    """False if the nodes have no module information, so that no search can tell modules apart."""
    has_input_weights: bool = False
    """True if weights stayed float since they are graph inputs."""
    is_further: bool = False
    """True if the source was quantized already, so that few bytes are left to save."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Quantization(graph_file.FileWork[QuantizeResult, QuantizedFile]):
    """One quantization, as work on a graph."""

    step_name: ClassVar[str] = "quantization"

    source: Path
    options: QuantizeOptions
    sizes: Mapping[str, int]
    """Sizes of dynamic dimensions to compare at; for other dimensions, several sizes are tried."""
    may_stay_float: bool = False
    """Allow a part already within the limit to stay float (else raise)."""
    written: Path | None = None
    """File of the command, for a note with the command that fixes its sizes; ``None``: a stage of a build."""
    has_half_caches: bool = False
    """True if a KV cache read and written in float16 is an input and output in float16 too."""
    packs_projections: bool = False
    """True if the quantized projections of an attention over a cache are merged into one product."""
    tools: SampleTools | None = None
    """Samples and statistics; ``None`` before :func:`equipped`."""
    outcome: QuantizationOutcome = field(default_factory=QuantizationOutcome)
    """Filled in by :meth:`apply`."""

    @property
    def resolved(self) -> QuantizeOptions:
        """The options, with the selected bits of each module once known."""
        return self.outcome.options or self.options

    @property
    def calibration(self) -> Calibration | None:
        """Calibration samples, if the quantization runs the model."""
        return self.tools.data if self.tools is not None and self.resolved.needs_samples else None

    @contextlib.contextmanager
    def acquire_resources(self, task: graph_file.GraphFileTask) -> Iterator[Quantization]:
        """Yield this quantization with samples and statistics of the source."""
        folder = task.processors or files_folder(task.source.absolute())
        options, notes = self.resolved_mode
        samples = Calibration(options, folder, self.sizes, task.seed, task.source)
        recipe = replace(self, options=options)
        with recipe.equipped(samples, task.paths.model, task.is_external, task.statistics) as work:
            work.outcome.notes += notes
            yield work

    @functools.cached_property
    def resolved_mode(self) -> ResolvedOptions:
        """The options with the mode that fits the source, and a note on it.

        Raises:
            InputError: the source is no valid ONNX model, or its data is missing.
            UsageError: a selector names no module.
        """
        return resolve_mode(self.options, lambda: graph_file.read_plain(self.source)[0], self.source.stem)

    @contextlib.contextmanager
    def equipped(
        self,
        samples: Calibration,
        output: Path,
        is_external: Callable[[ir.Model], bool | None],
        statistics_folder: Path | None = None,
    ) -> Iterator[Quantization]:
        """Yield this quantization with its sample tools; solved weights stay on disk until the block ends.

        Args:
            samples: Samples, and the file of the float graph unless the graph is in memory only.
            output: File to write; intermediate results are stored beside the file.
            is_external: model → True if weights are stored in a separate file; ``None`` if a separate file is required.
            statistics_folder: As in :class:`GraphFileTask`.

        Raises:
            UsageError: options contradict each other, or data is missing.
        """
        options = self.options
        options.refuse_contradictions()
        budget = options.bit_budget
        is_judged = budget is not None and budget.max_drop is not None
        data = replace(samples, holds_out=is_judged)
        if options.needs_samples or is_judged:
            refuse_missing_data(data)
        with contextlib.ExitStack() as stack:
            stack.callback(data.close)
            statistics = solver = unfinished = None
            if options.needs_ranges:
                statistics = CalibrationStatistics(data, data.source, statistics_folder)
            if options.solves_weights or budget is not None:
                unfinished = stack.enter_context(unfinished_folder(output))
                solver = LayerCalibration(data, unfinished / "layers") if options.solves_weights else None
            tools = SampleTools(data, statistics, solver, unfinished, output, is_external)
            yield replace(self, tools=tools, outcome=QuantizationOutcome())

    def record(self, done: graph_file.Transformation[QuantizeResult]) -> QuantizedFile:
        """Return the record of the quantized nodes and of the search for bits."""
        outcome, calibration, modes = self.outcome, self.calibration, self.resolved.modes()
        notes = (
            *(calibration.notes if calibration is not None else ()),
            *done.file.notes,
            *self.late_notes(done.result.model),
            *self._dynamic_size_notes(done.result.model),
            *(
                _size_notes(
                    done.file.before, done.file.after, has_left=any(module.left for module in done.result.modules)
                )
                if modes and not outcome.is_further
                else ()
            ),
        )
        file = {**vars(done.file), "notes": tuple(dict.fromkeys(notes))}
        return QuantizedFile(
            **file,
            precision=self.resolved.base.name if outcome.search is None else outcome.search.form,
            modes=modes,
            budget=outcome.search,
            modules=done.result.modules,
            kv_cache=self.options.kv_cache,
            activations=done.result.activations,
            calibration=None if calibration is None else Calibrated(calibration.words, calibration.as_record()),
        )

    def judging_request(self, seed: int) -> DataSetRequest | None:
        """Return the request for the samples of the dataset; ``None`` without a dataset."""
        return self.options.judging_request(seed)

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse a quantized graph, an unknown dimension or a selector that matches no module.

        Raises:
            InputError: the graph is already quantized.
            UsageError: names the dimension or the selector.
        """
        if self.options.modes() or self.options.kv_cache is None:
            planning.refuse_quantized(model, self.options)
        if self.options.kv_cache is not None:
            refuse_no_cache(model)
        sizes_of_dimensions(model.graph, self.sizes)
        if selectors := self.options.selectors:
            modules = graph_modules(model, self.source.stem)
            for selector in selectors:
                modules.selected_tags(selector)

    def refuse_plain(self, read: Callable[[], ir.Model]) -> None:
        """Refuse options without effect before weights are measured or changed.

        Raises:
            UsageError: a selector has no effect, or no node can be quantized.
            QuantizeError: another mode quantizes much more.
        """
        options, _ = self.resolved_mode
        has_modes = bool(options.modes())
        if not (has_modes or options.selectors):
            return
        prepared = prepare(read(), options, self.source.stem)
        if has_modes and options.bit_budget is None:
            replace(self, options=options)._refuse_small_share(prepared.model, prepared.modules)

    def _refuse_small_share(self, model: ir.Model, modules: GraphModules) -> None:
        """Refuse a mode that quantizes a small share of the weights if another mode quantizes more.

        For one of several parts, a note is added instead, since options apply to all parts.
        """
        try:
            planning.refuse_small_share(model, self.options, modules)
        except QuantizeError as error:
            if not is_one_of_several(model.metadata_props):
                raise
            self.outcome.notes.append(f"{error.message}.")

    @property
    def request_words(self) -> str:
        """Requested precisions and modes."""
        return self.resolved_mode.options.words

    def apply(self, model: ir.Model) -> QuantizeResult:
        """Quantize the model at the opset of the operators; first select bits if a limit is stated."""
        prepared = prepare(model, self.options, self.source.stem)
        model, modules, outcome = prepared.model, prepared.modules, self.outcome
        outcome.is_further = QUANTIZATION_KEY in model.metadata_props
        outcome.has_modules = bool(modules.modules)
        outcome.notes += prepared.notes
        if self._is_within_limit(model):
            self._stay_float()
        elif self.options.bit_budget is not None:
            assert self.tools is not None  # set by equipped()
            run = RunOptions(str(self.source), sizes=self.sizes, seed=self.tools.data.seed)
            if self.options.precision is not None:
                from winml.modelkit.quantize.excluded_modules import choose_excluded  # needed only by this search

                outcome.options, outcome.search = choose_excluded(prepared, self.options, run, self.tools)
            else:
                outcome.options, outcome.search = choose_bits(prepared, self.options, run, self.tools, self._file_bytes)
        options, search = self.resolved, outcome.search
        outcome.notes += _provider_notes(options)
        if not options.modes() and (outcome.stays_float or options.kv_cache is not None):
            result = QuantizeResult(model, changed=True, notes=(), coverage=measure_coverage(model))
        else:
            outcome.notes += source_notes(modules)
            if search is None:
                self._refuse_small_share(model, modules)
            before = weight_bytes(model)
            reasons = {} if search is None else {module.tag: module.why for module in search.modules}
            statistics, solver = (None, None) if self.tools is None else (self.tools.statistics, self.tools.solver)
            result = quantize(model, options, modules, statistics, solver, reasons)
            if any(module.left and module.requested != FLOAT32 for module in result.modules):
                outcome.saved_share = 1 - weight_bytes(result.model) / before
            reasons_left = [reason for module in result.modules for reason in module.left]
            outcome.has_input_weights = any(f"{opt.freeze_inputs}" in reason for reason in reasons_left)
        outcome.notes += self._resumed_notes()
        outcome.used = frozenset(module.requested for module in result.modules if module.quantized)
        if options.kv_cache is not None:
            outcome.notes += quantize_cache(result.model, self._cache_maxima)
        if self.has_half_caches:
            narrow_cache(result.model.graph)
        if self.packs_projections:
            PackedProjectionPass()(result.model)
        return result

    def _is_within_limit(self, model: ir.Model) -> bool:
        """Return True if one of several parts is already within the limit.

        Raises:
            UsageError: the part is within the limit, and no other part exceeds the limit.
        """
        budget = self.options.bit_budget
        if budget is None:
            return False
        from winml.modelkit.onnx.contents import read_contents
        from winml.modelkit.onnx.module_costs import weights_cost  # needed only for a limit

        limit_words = budget.within_limit_words(
            lambda: self._file_bytes(model.clone()),
            lambda: weights_cost(read_contents(to_weightless(model).proto)).bits,
        )
        if limit_words and not self.may_stay_float:
            budget.refuse_met_limit([limit_words])
        return bool(limit_words)

    def _stay_float(self) -> None:
        """Note that the part is within the limit, and set its options to float."""
        budget = self.options.bit_budget
        assert budget is not None  # the graph is within it
        self.outcome.notes.append(f"{budget.option} {budget.words}: this part is within the limit, and stays in float.")
        float_options = {"precision": FLOAT32, "mode": None, "algorithm": "rtn", "budget": None, "max_size": None}
        self.outcome.options, self.outcome.stays_float = self.options.model_copy(update=float_options), True

    def _file_bytes(self, model: ir.Model) -> int:
        """Size of the file of a quantized graph, metadata included."""
        assert self.tools is not None  # set by equipped()
        if self.options.kv_cache is not None:
            quantize_cache(model, self._cache_maxima)
        graph_file.refresh_metadata(model, self, is_plain=True)
        output, float_file = self.tools.output, self.tools.data.source
        if float_file is not None:
            graph_file.record_float_source(
                model, graph_file.name_beside(float_file, output), "0" * graph_file.FLOAT_SOURCE_DIGITS
            )
        return written_bytes(model, output, external=self.tools.is_external(model))

    def refuse_written(self, size_bytes: int) -> None:
        """Refuse a file that exceeds its maximum size, or saves nothing.

        Raises:
            QuantizeError: names both sizes.
        """
        if self.outcome.saved_share < 1 - _LEAST_SAVING:
            self._refuse_larger(size_bytes)
        budget = self._searched_budget
        limit = None if budget is None else budget.max_bytes
        if limit is not None and size_bytes > limit:
            raise QuantizeError(
                f"{opt.max_size} {size_words(limit)}: the file has {size_bytes} bytes, {size_bytes - limit} too many",
                hint=f"No file was written. Allow {size_bytes}B or more.",
            )

    @property
    def _searched_budget(self) -> BitBudget | None:
        """Limit of the search for bits; ``None`` without a search."""
        return None if self.outcome.search is None else self.options.bit_budget

    def _refuse_larger(self, size_bytes: int) -> None:
        """Refuse a file as large as its source or larger.

        Raises:
            QuantizeError: names both sizes.
        """
        sizes, is_larger = size_words(size_bytes), self.outcome.saved_share <= 0
        if self.source.is_file():  # not a graph in memory
            source_bytes = sum(file.stat().st_size for file in (self.source, *external_files(self.source)))
            sizes, is_larger = f"{sizes}, {size_words(source_bytes)}", size_bytes >= source_bytes
        if is_larger:
            raise QuantizeError(
                f"the quantized file is not smaller than its source ({sizes}): {self.outcome.saved_share:.0%} of the "
                "bytes of its weights were saved",
                hint=f"No file was written. {self._saving_remedy}",
            )

    @property
    def _saving_remedy(self) -> str:
        """Return the remedy for a result that is not smaller."""
        if self.outcome.has_input_weights:
            return f"Weights are graph inputs, and stay in float: {opt.freeze_inputs} makes them constants."
        return f"Use another {opt.precision} or {opt.mode}, or exclude fewer modules."

    def _resumed_notes(self) -> Iterator[str]:
        """Note the results reused from an interrupted run."""
        solver = None if self.tools is None else self.tools.solver
        walks = [] if solver is None else solver.resumed
        layers = f"{sum(count for count, _ in walks)} of {sum(of for _, of in walks)} layers"
        resumed_results = [layers if len(walks) == 1 else f"{layers} in {len(walks)} passes"] if walks else []
        if (search := self.outcome.search) is not None and search.resumed:
            resumed_results.append(f"{search.resumed} of {search.measured} measurements")
        if resumed_results:
            yield f"Resumed from an interrupted run: {', '.join(resumed_results)}."

    @functools.cached_property
    def _cache_maxima(self) -> Mapping[str, Array]:
        """Maximum absolute value per channel of the source's keys and values over samples."""
        assert self.calibration is not None  # the options need samples
        source = load_by_reference(self.source)
        names = [value.name or "" for states in attentions_over_cache(source.graph) for value in states.present]
        return self.calibration.over_samples(lambda reader: measure_states(self.source, names, reader))

    def metadata(self, model: ir.Model) -> Mapping[str, Any]:
        """Input and output records with the new types."""
        if self.options.kv_cache is None and not self.has_half_caches:
            return {}
        types = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
        records: dict[str, Any] = {}
        for key in (INPUTS_KEY, OUTPUTS_KEY):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged metadata stays unchanged
                listed = load_metadata(model.metadata_props.get(key, "[]"))
                records[key] = [
                    {**entry, "dtype": _CACHE_TYPES.get(types.get(entry["name"]), entry["dtype"])} for entry in listed
                ]
        return records

    def summary(self, result: QuantizeResult) -> str:
        """Summarize the numbers of quantized nodes and of nodes left, with reasons."""
        reasons: Counter[str] = Counter()
        for module in result.modules:
            reasons.update(module.left)
        left_words = "".join(f", {count} left ({reason})" for reason, count in reasons.most_common())
        cache = "" if self.options.kv_cache is None else f", KV cache {self.options.kv_cache}"
        search = self.outcome.search
        bits = (
            ""
            if search is None
            else f", {search.form}: {search.mean_bits:.2f} bits ({search.measured} variants measured)"
        )
        return f"{count_noun(result.quantized, 'node')} quantized{left_words}{cache}{bits}"

    def late_notes(self, model: ir.Model) -> tuple[str, ...]:
        """Collect notes on the quantization, this processor, and weights beyond the range of float16."""
        kernels = _kernel_notes(self.resolved.modes(), signed_weights=self.resolved.base.signed_weights)
        return (*self.outcome.notes, *kernels, *_range_notes(model))

    def _dynamic_size_notes(self, model: ir.Model) -> Iterator[str]:
        """Note dynamic dimensions of the written file that the provider does not run."""
        if self.written is None or self.options.ep is None:
            return
        provider, dimensions = find_execution_provider(self.options.ep), open_dimensions(model.graph)
        if dimensions and not provider.takes_dynamic:
            sums = stated_sums(model.metadata_props)
            command = fixing_command(str(self.written), [name for name in dimensions if name not in sums])
            open_words = f"{', '.join(dimensions)} {'is' if len(dimensions) == 1 else 'are'} dynamic"
            yield (
                f"{provider.name} requires fixed sizes, and {open_words}. Before it runs there, fix the size of each: "
                f"{command}"
            )

    def compare(self, source: Path, written: Path, seed: int) -> FidelityInfo | None:
        """Compare outputs with the source if it fits into memory."""
        needed, available = sum(file.stat().st_size for file in (source, *external_files(source))), available_bytes()
        if needed > available:
            self.outcome.notes.append(
                f"Not verified: the comparison runs the source, which needs {size_words(needed)} of memory; "
                f"{size_words(available)} are available."
            )
            return None
        self._refuse_missing_kernels()
        if any(
            PRECISIONS[name].float_type == ir.DataType.FLOAT16.name for name in self.outcome.used if name in PRECISIONS
        ):
            from winml.modelkit.ort.half_rounding import ROUNDING_NOTE  # needed only by float16 files

            self.outcome.notes.append(ROUNDING_NOTE)
        hint = self.below_minimum_hint
        has_data_set = self.options.dataset is not None
        if self.calibration is not None and self.calibration.has_data and not has_data_set:
            read_samples = self.calibration.samples_to_compare
            return self._note_weak_result(refuse_unfaithful(source, written, self.minimum, read_samples, hint))
        run = RunOptions(str(source), sizes=self.sizes, seed=seed)
        processors = None if self.tools is None else self.tools.data.model_folder
        if has_data_set and processors is None:
            processors = files_folder(source.absolute())
        data_set = self.judging_request(seed)
        request = SampleRequest(run, processors, data_set, count=self.options.samples, model=source)
        fidelity = refuse_unfaithful(source, written, self.minimum, request.read, hint)
        if fidelity.samples is not None and fidelity.samples.note:
            self.outcome.notes.append(fidelity.samples.note)
        is_generated = fidelity.samples is not None and fidelity.samples.source == "processor"
        if is_generated and fidelity.outputs and not fidelity.worst.is_close:
            self.outcome.notes.append(
                f"Compared on generated inputs; the quality on real inputs may differ: {opt.dataset} uses a dataset."
            )
        return self._note_weak_result(fidelity)

    def compare_parts(
        self, sources: Mapping[str, Path], files: Mapping[str, Path], folder: Path | None, seed: int
    ) -> str:
        """Compare a prompt graph and a step, run together on texts, with their sources; return the result in words.

        Args:
            sources: Part → its file in float.
            files: Part → its quantized file.
            folder: Folder of the tokenizer; ``None``: the folder of the files.
            seed: Seed of generated texts.

        Raises:
            VerificationError: the scores are below the minimum.
            StageError: ONNX Runtime cannot run a file.
        """
        folder = folder or files_folder(self.source.absolute())
        with contextlib.closing(Calibration(self.options, folder, self.sizes, seed, self.source)) as data:
            texts = None if (feeds := data.decoder_data()) is None else (each[TOKEN_IDS][0] for each in feeds)
            text = compare_on_texts(sources, files, folder, seed, texts)
        fidelity = FidelityInfo.of_text(text, self.least_sqnr_db, len(files))
        refuse_below_minimum_sqnr(fidelity, "the float files", {}, self.below_minimum_hint)
        return fidelity_words(fidelity)

    def _note_weak_result(self, fidelity: FidelityInfo) -> FidelityInfo:
        """Note a low SQNR of quantized activations, with the command that finds their modules; return the comparison.

        Outputs judged by top-1 agreement are omitted.
        """
        worst, search = fidelity.worst, self._search_words
        ratio_db = fidelity.judged_db(worst)
        is_weak = fidelity.has_signal and ratio_db < WEAK_DB and not fidelity.is_by_agreement(worst)
        if is_weak and search and self.resolved.needs_ranges:
            self.outcome.notes.append(f"The SQNR of {worst.name} is low: {ratio_db:.1f} dB. {search}.")
        return fidelity

    @property
    def _search_words(self) -> str:
        """Sentence with the command that finds the modules to keep in float; ``""`` if the options rule it out."""
        options = self.resolved
        is_ruled_out = options.bit_budget is not None or options.kv_cache is not None or options.solves_weights
        is_ruled_out = is_ruled_out or not self.outcome.has_modules
        if is_ruled_out or not INTEGER_ACTIVATIONS.intersection(options.modes()):
            return ""
        stated = options.model_copy(update={"min_sqnr_db": None})
        source = str(self.source) if self.source.is_file() else "FLOAT.onnx"
        target = TARGET_DB if options.min_sqnr_db is None else max(options.min_sqnr_db, TARGET_DB)
        search_words = [spell_flag("sensitivity"), spell_flag("target"), f"sqnr_db={target:g}"]
        words = [*search_words, *command_words(stated, QuantizeFields)]
        command = command_line(["winml", "quantize", source, *words])
        return f"The modules to keep in float are found by {command}"

    @property
    def _budget_words(self) -> str:
        """Sentence with the options that keep modules in float32; ``""`` if the precision is not of 16-bit floats."""
        options = self.resolved
        is_ruled_out = options.per_module or options.kv_cache is not None or not self.outcome.has_modules
        if is_ruled_out or not options.base.float_type:
            return ""
        return (
            f"{opt.budget} smallest with {opt.min_sqnr} {self.least_sqnr_db:g} keeps the modules that lose most in "
            "float32"
        )

    def _refuse_missing_kernels(self) -> None:
        """Refuse to compare a file if the installed ONNX Runtime has no kernels for it.

        Raises:
            VerificationError: names the first version with the kernels.
        """
        # ONNX Runtime is loaded only for comparisons.
        from winml.modelkit.ort.sessions import is_onnxruntime_at_least, onnxruntime_version

        has_two_bits = any(PRECISIONS[name].weight_bits == 2 for name in self.outcome.used)
        needed = {"1.24": "2-bit weights"} if has_two_bits else {}
        if self.options.kv_cache is not None:
            needed["1.31"] = "a KV cache in 8 bits"
        for version, feature in needed.items():
            if not is_onnxruntime_at_least(version):
                raise VerificationError(
                    f"cannot verify: ONNX Runtime {onnxruntime_version()} has no kernel for {feature}",
                    hint=f"No file was written. Install onnxruntime {version} or newer (Python 3.11 or newer), or add "
                    f"{opt.no_verify}.",
                )

    @property
    def below_minimum_hint(self) -> str:
        """Hint for a file below the minimum: allow more if bits were selected within a limit."""
        budget = self._searched_budget
        if budget is None:
            search = self._search_words or self._budget_words
            return below_minimum_hint(self.resolved.remedies()) + (f" {search}." if search else "")
        if budget.max_drop is not None:
            return (
                f"No file was written. Lower {opt.min_sqnr}, set a stricter {opt.max_drop}, or write it with "
                f"{opt.no_verify}."
            )
        limit = spell("budget" if budget.max_bytes is None else "max_size")
        return below_minimum_hint(self.resolved.remedies(), budget=limit)

    @property
    def least_sqnr_db(self) -> float:
        """Minimum SQNR of every output in dB."""
        return self.minimum.sqnr_db

    @property
    def minimum(self) -> QualityMinimum:
        """Minimum quality of every output: as requested in dB, or that of the precisions in the file."""
        if self.options.min_sqnr_db is not None:
            return QualityMinimum(self.options.min_sqnr_db)
        of_cache = [QualityMinimum(LEAST_CACHE_SQNR_DB)] if self.options.kv_cache is not None else []
        # Rules that match no module set no minimum; modules that the source has in few bits do, since their kernels
        # round activations too: any change of the others changes the rounding.
        used = [precision for precision in PRECISIONS.values() if precision.name in self.outcome.used]
        used = used or [precision for precision, _ in self.resolved.requested_modes()]
        if self.outcome.stays_float:
            used = [*used, *(precision for precision in PRECISIONS.values() if precision.float_type)]
        return QualityMinimum.least_of((*(precision.minimum for precision in used), *of_cache))


def _provider_notes(options: QuantizeOptions) -> Iterator[str]:
    """Yield notes on precisions and modes that execution providers compute differently than expected."""
    if any((precision.activation_bits or 0) > 8 for precision, _ in options.requested_modes()):
        yield (
            "ONNX Runtime's CPU provider has no integer kernels for 16-bit activations and computes in "
            "float32 between the conversions, slower than the source. The file is for providers with such "
            "kernels, such as QNN."
        )
    placement = placement_for(options.ep)
    for precision, mode in options.requested_modes():
        if mode != "qdq" and (reason := placement.refusal(precision, mode)):  # refused earlier
            yield (
                f"{options.ep} does not run the operators of {opt.mode} {mode} in {precision.name}; they run on the "
                f"CPU instead: {reason}. Use {opt.mode} qdq ({opt.precision} w8a8 or w8a16)."
            )


def _size_notes(before: GraphSummary, after: GraphSummary, *, has_left: bool) -> tuple[str, ...]:
    """Note a file that is not clearly smaller: scripts that read the exit code would not notice.

    Args:
        before: The source.
        after: The result.
        has_left: True if nodes with weights stay in float.
    """
    if after.size_bytes < _LEAST_SAVING * before.size_bytes:
        return ()
    sizes = f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)}"
    change = size_change_words(before.size_bytes, after.size_bytes)
    reason = "the lines left state which nodes stay in float, and why"
    if not has_left:
        reason = "in a small file, the operators and scales of the quantization take what the weights save"
    return (f"Compared with its source, the result is {change} ({sizes}): {reason}.",)


def _range_notes(model: ir.Model) -> Iterator[str]:
    """Note weights clipped to the range of float16."""
    if count := clipped_values(model):
        yield f"{count_noun(count, 'weight value', 'were')} beyond the range of float16 and clipped to 65504."
