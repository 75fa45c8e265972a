"""Candidates of a tuning on a machine, in the order of preference.

Data, decided before anything is exported or measured: the same machine and options give the same list. The order goes
from simple to involved, because the first of two indistinguishable candidates wins. Builds and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS
from winml.modelkit.ort.host import available_cores
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.precisions import FLOAT16, INT4, INT8, PRECISIONS, W8A8, W8A16
from winml.modelkit.records import Record
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.records import Candidate, CandidateKind
from winml.modelkit.words import count_noun

PLAIN: Final = "plain"
"""The unchanged export, the reference of all measurements."""
_LEVELS = ("basic", "extended", "full")
"""Optimization levels. The last is a form; the others are variations of a winner in float."""
INSTEAD_OF: Final[Mapping[str, str]] = {
    "weights-int8-16": "weights-int8",
    "qdq-w8a8-smooth": "qdq-w8a8",
    "qdq-mixed": "qdq-w8a8",
    "qdq-w8a16": "qdq-w8a8",
    "qdq-w8a16-blocks": "qdq-w8a16",
    "qdq-w16a16": "qdq-w8a16",
}
"""Form → smaller and faster form: the key is tried only if the value is outside the quality limit."""
_SMOOTHING = 0.5
"""Strength of SmoothQuant. Specified by its paper as the best for most models."""
_BLOCK_SIZE = 64
"""Block size of 8-bit weights. Measured on MiniLM with QNN 2.7: 31 dB instead of 28 with a scale for each channel."""
_RUN_BY_CPU = "cpu"
_PROVIDER_OPTIONS: Mapping[str, Mapping[str, tuple[str, Mapping[str, str]]]] = {
    # ONNX Runtime 1.24 reads this value as JSON, not as the path of a file. The default computes in float32.
    "openvino": {
        "bf16": (
            "in bfloat16 if the processor supports it",
            {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}}'},
        )
    },
}
"""Provider → name of a reduced-precision mode for float files → its description and provider options."""


class TuningMachine(Record):
    """Properties of a machine that determine the plan."""

    cores: int
    """Number of cores available to this process."""
    processor: str
    """Architecture and widest vector instruction set."""
    has_integer_dot_products: bool | None
    providers: tuple[str, ...]
    """Short names of the installed execution providers known to winml, with the CPU provider first."""
    onnxruntime: str


def look_at_tuning_machine() -> TuningMachine:
    """Return the properties of the machine that determine the plan."""
    from winml.modelkit.ort.devices import present_providers
    from winml.modelkit.ort.host import has_integer_dot_products, instruction_sets
    from winml.modelkit.ort.sessions import onnxruntime_version

    present = present_providers()
    names = [name for name, provider in EXECUTION_PROVIDERS.items() if provider.name in present and name != _RUN_BY_CPU]
    return TuningMachine(
        cores=available_cores(),
        processor=instruction_sets(),
        has_integer_dot_products=has_integer_dot_products(),
        providers=(_RUN_BY_CPU, *names),
        onnxruntime=onnxruntime_version(),
    )


def smaller_forms(name: str) -> Iterator[str]:
    """Yield the forms that make a form unnecessary if they are within the quality limit, the nearest in size first."""
    while smaller := INSTEAD_OF.get(name):
        yield smaller
        name = smaller


def plan_candidates(options: TuneOptions, machine: TuningMachine) -> tuple[Candidate, ...]:
    """Return the forms of the file to try, the simplest first."""
    # If throughput counts, several runs at a time keep the machine busy.
    callers = 2 if options.target == "throughput" and machine.cores > 1 else 1
    forms = [form for form in _list_forms(options, machine) if form.kind == PLAIN or is_requested(form.kind, options)]
    if options.ep not in (None, _RUN_BY_CPU):
        forms = [replace(form, ep=options.ep, ep_options={**options.ep_options, **form.ep_options}) for form in forms]
    return tuple(replace(_judged_on_data_set(form, options), callers=callers) for form in forms)


def plan_variations(best: Candidate, options: TuneOptions, machine: TuningMachine) -> tuple[Candidate, ...]:
    """Return the variations of the best form: lower levels, threads, fixed sizes, a compiled file."""
    variations: list[Candidate] = []
    if is_requested("level", options):
        if best.sections.get("quant"):
            level = _LEVELS[-1]
            sections = {**best.sections, "optim": {"level": level}}
            text = f"{best.words}; optimized first, level {level}"
            variations.append(replace(best, name=f"{best.name}+{level}", kind="level", words=text, sections=sections))
        elif best.kind in (PLAIN, "level"):
            variations += [
                replace(_level_candidate(level), callers=best.callers, ep=best.ep, ep_options=best.ep_options)
                for level in _LEVELS[:-1]
            ]
    if best.ep is None and is_requested("threads", options):
        variations += [_thread_variation(best, *numbers) for numbers in _thread_numbers(options, machine)]
    if options.sizes_to_fix and is_requested("fixed", options):
        sizes = options.sizes_to_fix
        text = f"{best.words}; sizes fixed: {', '.join(f'{name} {size}' for name, size in sizes.items())}"
        variations.append(replace(best, name=f"{best.name}+fixed", kind="fixed", words=text, fixed_sizes=sizes))
    if best.ep is None and is_requested("compile", options):
        sections = {**best.sections, "compile": {"ep": _RUN_BY_CPU}}
        text = f"{best.words}; compiled for this processor, which loads faster"
        variations.append(replace(best, name=f"{best.name}+compiled", kind="compile", words=text, sections=sections))
    return tuple(variations)


def placed_candidate(
    best: Candidate, rules: Mapping[str, str] | None, in_float: Mapping[str, str], name: str
) -> Candidate:
    """Return a candidate with additional modules in float."""
    quant = {**best.sections["quant"], "per_module": {**in_float, **(rules or {})}}
    text = f"{best.words}; {', '.join(in_float)} in float, because faster"
    sections = {**best.sections, "quant": quant}
    return replace(best, name=name, kind="placement", words=text, sections=sections, part_of="")


def is_requested(kind: CandidateKind, options: TuneOptions) -> bool:
    """Return True if candidates of a kind are to be tried."""
    return not options.only or kind in options.only


def _list_forms(options: TuneOptions, machine: TuningMachine) -> Iterator[Candidate]:
    """Yield the candidates of the first race, the simplest first; kinds that were not requested are included."""
    yield Candidate(PLAIN, PLAIN, "the export, not optimized")
    yield _level_candidate(_LEVELS[-1])
    if options.ep not in (None, _RUN_BY_CPU):
        yield from _list_forms_for_provider(options, options.ep)
        return
    quant = {"precision": INT8, "mode": "dynamic"}
    forms = [
        Candidate("dynamic-int8", "dynamic", "int8, activation ranges computed at run time", {"quant": quant}),
        Candidate("qdq-int8", "qdq", "int8, activation ranges from calibration", {"quant": _calibrated_quant(options)}),
        *_list_weight_only_forms(options),
    ]
    yield from forms
    yield from map(_mixed_variant, forms)
    if options.ep is None:
        yield from _list_float_forms(options, machine)
        yield from _list_forms_of_providers(options, machine)


def _level_candidate(level: str) -> Candidate:
    return Candidate(level, "level", f"optimized, level {level}", {"optim": {"level": level}})


def _list_forms_for_provider(options: TuneOptions, ep: str) -> Iterator[Candidate]:
    """Yield quantized forms for the provider, 16-bit floats for devices other than the CPU, and provider options."""
    forms = list(_list_integer_forms(options, ep))
    yield from forms
    yield from map(_mixed_variant, forms)
    if ep in EXECUTION_PROVIDERS and EXECUTION_PROVIDERS[ep].devices[0] != "cpu":
        yield Candidate(FLOAT16, "float", "16-bit floats", {"quant": {"precision": FLOAT16}})
    for name, (text, ep_options) in _PROVIDER_OPTIONS.get(ep, {}).items():
        yield Candidate(name, "provider", f"the export, run {text}", {}, "", ep, ep_options)


def _list_integer_forms(options: TuneOptions, ep: str) -> Iterator[Candidate]:
    """Yield forms with calibrated integers that the provider runs; 4-bit weights only if the target is the file size.

    All precisions are tried for a provider that computes all operators with integers of 8 and 16 bits.
    """
    placement = placement_for(ep)
    for precision in PRECISIONS.values():
        is_run = precision.modes == ("qdq",) and not placement.refusal(precision, "qdq")
        if not is_run or (precision.weight_bits < 8 and options.target != "size"):
            continue
        is_of_units = bool(precision.searched_blocks) and placement.is_by_unit
        if not (placement.has_bits_by_kind or is_of_units or precision.name == W8A8):
            continue
        quant: dict[str, object] = {**_calibrated_quant(options), "precision": precision.name, "ep": ep}
        name, text = f"qdq-{precision.name}", f"{precision.words} for {ep}"
        yield Candidate(name, "qdq", text, {"quant": quant})
        if not placement.has_bits_by_kind:
            continue
        if precision.name == W8A8:
            smooth = {"quant": {**quant, "smooth_quant": _SMOOTHING}}
            yield Candidate(f"{name}-smooth", "qdq", f"{text}; channels balanced (SmoothQuant)", smooth)
        if precision.name == W8A16 and not placement.product_refusal(8, 16, "block"):
            blocks = {"quant": {**quant, "block_size": _BLOCK_SIZE}}
            yield Candidate(f"{name}-blocks", "qdq", f"{text}; weights by blocks of {_BLOCK_SIZE}", blocks)


def _judged_on_data_set(form: Candidate, options: TuneOptions) -> Candidate:
    """Return a candidate whose build is judged on the dataset of the tuning, if any."""
    if options.dataset is None or "quant" not in form.sections:
        return form
    # With calibration data, these options belong to the data.
    names = () if options.calibration_data is not None else ("split", "columns", "samples")
    stated = {name: value for name in names if (value := getattr(options, name))}
    quant = {**form.sections["quant"], "dataset": options.dataset, **stated}
    return replace(form, sections={**form.sections, "quant": quant})


def _mixed_variant(form: Candidate) -> Candidate:
    """Return the mixed variant of a quantized form: some modules, not searched yet, stay in float."""
    text = f"{form.words}; the most sensitive modules in float"
    return replace(form, name=f"{form.name}-part", words=text, part_of=form.name)


def _calibrated_quant(options: TuneOptions) -> dict[str, object]:
    """Return the ``quant`` section for int8 with activation ranges from calibration."""
    data = {} if options.calibration_data is None else {"calibration_data": options.calibration_data}
    return {"precision": INT8, "mode": "qdq", **data}


def _list_weight_only_forms(options: TuneOptions) -> Iterator[Candidate]:
    """Yield forms with 8-bit weights, and with 4-bit weights if the target is the file size."""
    quant: dict[str, object] = {"precision": INT8, "mode": "weight-only"}
    yield Candidate("weights-int8", "weight-only", "8-bit weights by block", {"quant": quant})
    small_blocks = {"quant": {**quant, "block_size": 16}}
    yield Candidate("weights-int8-16", "weight-only", "8-bit weights by block of 16", small_blocks)
    if options.target == "size":
        yield Candidate("weights-int4", "weight-only", "4-bit weights by block", {"quant": {"precision": INT4}})


def _list_float_forms(options: TuneOptions, machine: TuningMachine) -> Iterator[Candidate]:
    """Yield 16-bit floats if they improve the target: on devices other than the CPU, for file size, or on request."""
    for provider in machine.providers:
        if EXECUTION_PROVIDERS[provider].devices[0] == "cpu":
            continue
        text = f"16-bit floats, run by {provider}"
        yield Candidate(f"{provider}-fp16", "float", text, {"quant": {"precision": FLOAT16}}, ep=provider)
    if options.target == "size" or "float" in options.only:
        for precision in (name for name, definition in PRECISIONS.items() if definition.float_type):
            yield Candidate(precision, "float", f"16-bit floats, {precision}", {"quant": {"precision": precision}})


def _list_forms_of_providers(options: TuneOptions, machine: TuningMachine) -> Iterator[Candidate]:
    """Yield forms for each installed provider but the CPU: the export, its reduced precisions, and calibrated int8."""
    for provider in machine.providers:
        if provider == _RUN_BY_CPU:
            continue
        yield Candidate(provider, "provider", f"the export, run by {provider}", ep=provider)
        for name, (text, ep_options) in _PROVIDER_OPTIONS.get(provider, {}).items():
            yield Candidate(
                f"{provider}-{name}", "provider", f"the export, run by {provider} {text}", {}, "", provider, ep_options
            )
        name, text = f"{provider}-qdq-int8", f"int8 with calibrated ranges, run by {provider}"
        form = Candidate(name, "provider", text, {"quant": _calibrated_quant(options)}, ep=provider)
        yield form
        yield _mixed_variant(form)


def _thread_numbers(options: TuneOptions, machine: TuningMachine) -> Sequence[tuple[int, int]]:
    """Return numbers of threads and of callers to try, without the default of ONNX Runtime: all cores."""
    core_counts = [machine.cores // 2**step for step in range(1, machine.cores.bit_length())]
    threads = [*(count for count in core_counts if count > 1), 1] if machine.cores > 1 else []
    if options.target == "throughput":
        return [(count, max(machine.cores // count, 1)) for count in threads]
    return [(count, 1) for count in threads]


def _thread_variation(best: Candidate, threads: int, callers: int) -> Candidate:
    caller_words = f", {callers} parallel runs" if callers > 1 else ""
    text = f"{best.words}; {count_noun(threads, 'thread')}{caller_words}"
    name = f"{best.name}+{threads}-threads"
    return replace(best, name=name, kind="threads", words=text, threads=threads, callers=callers)
