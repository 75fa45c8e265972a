"""Selection of the modules that stay float32 in the smallest file of 16-bit floats, for a quality.

Modules are selected on other samples than the file is judged on; the selected list is measured on the samples of the
file, and the search is repeated with a stricter target if it misses the quality there. At the end, modules are
quantized again while the file still has the quality.
"""

from __future__ import annotations

from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.compare.quality_samples import SampleRequest
from winml.modelkit.errors import QuantizeError, VerificationError, opt
from winml.modelkit.onnx.weights import file_bytes
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.progress import part_of_step
from winml.modelkit.quantize.budget import FileBits, SampleTools, measurement_identity
from winml.modelkit.quantize.module_parts import list_parts
from winml.modelkit.quantize.module_study import ModuleStudy, first_samples, other_samples
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import quantize
from winml.modelkit.quantize.planning import plan_quantization
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.quantize.preparation import PreparedGraph
from winml.modelkit.quantize.quantized_variants import (
    MeasuredVariants,
    QuantizedVariants,
    VariantEvaluator,
    take_samples,
)
from winml.modelkit.quantize.records import BudgetChoice, BudgetSearch, BudgetTrial
from winml.modelkit.quantize.sensitivity_records import ExcludeList, FidelityTarget, MeasuredVariant, MetricTarget
from winml.modelkit.tags import address
from winml.modelkit.words import count_noun, size_words, sqnr_words


def choose_excluded(
    graph: PreparedGraph, requested: QuantizeOptions, run: RunOptions, tools: SampleTools
) -> tuple[QuantizeOptions, BudgetSearch]:
    """Select the modules that stay float32 in the smallest file of the requested quality.

    Args:
        graph: The float graph.
        requested: Requested options: a precision of 16-bit floats, ``budget`` smallest, and a quality.
        run: Sizes and seed of the samples that the file is judged on.
        tools: Samples.

    Returns:
        The options with the precision of each module, and the search.

    Raises:
        UsageError: the graph names no modules, or no node can be quantized.
        QuantizeError: no weight is stored in 16 bits, such as in a small model in bf16.
        VerificationError: no file smaller than the source reaches the quality.
    """
    budget = requested.bit_budget
    assert budget is not None  # the caller checks this
    graph.refuse_no_modules(run.shown)
    options = requested.model_copy(
        update={"budget": None, "max_drop": None, "calibration_data": None, "split": None, "columns": {}}
    )
    plan = plan_quantization(graph.model, options, graph.modules)
    request = SampleRequest(
        run,
        tools.data.model_folder,
        requested.judging_request(run.seed),
        count=requested.samples,
        model=tools.data.source,
    )
    samples, search_samples = (take_samples(graph, each, None) for each in (request, other_samples(request)))
    evaluator: VariantEvaluator | None = None
    float_perplexity: float | None = None
    target: FidelityTarget | MetricTarget
    if budget.max_drop is not None:
        from winml.modelkit.quantize.calibration.held_out_perplexity import held_out_evaluator  # imports the tasks

        evaluator, float_perplexity = held_out_evaluator(tools.data, graph.session(name=run.shown), budget.max_drop)
        target = evaluator.target
    else:
        assert requested.min_sqnr_db is not None  # options without a quality are refused
        target = FidelityTarget("sqnr_db", requested.min_sqnr_db)
    assert tools.unfinished is not None  # always set for a search
    identity = measurement_identity(graph, requested, tools, samples, has_evaluator=evaluator is not None)
    stored = MeasuredVariants(tools.unfinished / "measured.json", identity, overwrite=True)
    variants, selecting = (
        QuantizedVariants(graph, inputs, quantize, stored, evaluator=evaluator) for inputs in (samples, search_samples)
    )
    study = ModuleStudy(graph, options, plan, list_parts(plan, graph.modules, None, None), variants, selecting)
    with part_of_step("step 1 of 2, modules"):
        study.measure_modules(1, None, None if requested.samples or evaluator else first_samples(samples))
    if not study.whole.nodes:
        raise QuantizeError(study.whole.problem, hint=f"Use a different {opt.precision}.")
    with part_of_step("step 2 of 2, modules in float32"):
        listed = study.search(target)
    float_bytes = file_bytes(graph.model)
    if not listed.is_met or listed.form.file_bytes >= float_bytes:
        runs, worst = listed.form.runs, listed.form.worst
        best = "" if worst is None or not runs else f"; the best reaches {sqnr_words(worst.lower_db)}"
        if not runs:
            # No limit of a finite quality helps.
            failing = [row for row in study.rows() if row.form is not None and row.problem]
            inner = max(failing, key=lambda row: address.depth(row.tag), default=None)
            name = "" if inner is None else inner.path or inner.tag
            raise VerificationError(
                f"{listed.form.problem}{f', also with {name} alone in {options.base.name}' if name else ''}",
                hint=f"Keep {name or 'the model'} in float32.",
            )
        if listed.is_met:
            best = f"; the smallest has {size_words(listed.form.file_bytes)}, the source {size_words(float_bytes)}"
        quality = target.words if budget.max_drop is not None else f"{opt.min_sqnr} {target.value:g}"
        raise VerificationError(
            f"{quality}: no file smaller than the source reaches it{best}",
            hint=f"Lower {opt.min_sqnr if budget.max_drop is None else opt.max_drop}, or keep the model in float32.",
        )
    search = _describe_search(study, listed, samples.about, float_perplexity)
    return options.model_copy(update={"per_module": dict(listed.rules)}), search


def _describe_search(
    study: ModuleStudy, listed: ExcludeList, about: QualitySamples, float_perplexity: float | None
) -> BudgetSearch:
    """Describe the selected modules, and every measured list of modules."""
    name, bits, stored = study.options.base.name, FileBits.of_model(study.graph.model), study.variants.stored

    def trial(excluded: int, variant: MeasuredVariant, *, is_chosen: bool) -> BudgetTrial:
        form = f"{name}, {count_noun(excluded, 'module')} in float32" if excluded else name
        size, score = variant.weight_bytes, next(iter(variant.scores.values()), None)
        lower_db = variant.worst.lower_db if variant.worst is not None and variant.runs else None
        return BudgetTrial(form, bits.mean_bits(size), size, variant.sqnr_db, is_chosen, score, lower_db)

    choices = []
    for part in study.parts:
        variant, parameters = study.find_measurement(part), study.graph.parameters_of(part.node_names)
        if not part.is_unit or variant is None or not parameters:
            continue
        size = sum(tensor.nbytes for tensor in study.graph.weights_of(part.node_names).values())
        precision = FLOAT32 if part.module.tag in listed.excluded else name
        saved = 0 if precision == FLOAT32 else study.bytes_saved(part)
        alone = {name: variant.sqnr_db}
        choices.append(BudgetChoice(part.module.tag, precision, None, parameters, size - saved, alone))
    built = (tried for tried in listed.trials if tried.form.weight_bytes)
    trials = [trial(tried.excluded, tried.form, is_chosen=False) for tried in built]
    chosen = trial(len(listed.excluded), listed.form, is_chosen=True)
    return BudgetSearch(
        limit=f"the smallest file for {listed.target.words}",
        mean_bits=chosen.mean_bits,
        form=name,
        modules=tuple(choices),
        frontier=(*trials, chosen),
        measured=len(stored),
        samples=about.count,
        source=about.source,
        float_perplexity=float_perplexity,
        resumed=stored.reused,
        rules=listed.rules,
    )
