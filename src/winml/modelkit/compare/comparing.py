"""Comparison of two models on the same inputs, and search for the first module that diverges.

Each model is an ONNX file, a PyTorch model to load, or a live module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from winml.modelkit.compare.by_module.module_comparison import (
    TOLERANCE,
    are_quantized_alike,
    compare_modules,
    unchanged_modules,
)
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import Side, SidePair
from winml.modelkit.compare.by_module.value_matching import MatchedBoundary, match_files, match_with_torch
from winml.modelkit.compare.fidelity import OutputFidelity, QualitySource, measure_fidelity
from winml.modelkit.compare.quality_samples import (
    SampleRequest,
    SampleValues,
    data_set_values,
    quality_values,
    value_files,
)
from winml.modelkit.compare.records import ModelComparison
from winml.modelkit.compare.words import unchecked_words
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.request import ModelRequest, processor_folder, with_recorded_seed
from winml.modelkit.onnx.contexts import random_words
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.placing import model_digest
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.specs import InputTensorSpec, names_among
from winml.modelkit.ort.decoding.inputs import (
    SCORES,
    TOKEN_IDS,
    decoder_feeds,
    inputs_of_file,
    next_feeds,
    prompt_before,
)
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.ort.graph_inputs import graph_inputs, load_feeds, sizes_by_key
from winml.modelkit.ort.opened_model import RunOptions, Values, refusals_explained
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.samples.processors import processor_files

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.compare.by_module.torch_side import TorchSide
    from winml.modelkit.models.live_module import ExampleInputs
    from winml.modelkit.models.parts import LoadedModel, ModelPart

Comparable: TypeAlias = "Path | ModelRequest | nn.Module"
"""An ONNX file, a request for a PyTorch model, or a live module."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison."""

    run: RunOptions = field(default_factory=lambda: RunOptions(""))
    """Inputs of both models, and the execution provider of the candidate."""
    by_module: bool = False
    threshold: float | None = None
    """Maximum relative error of an output."""
    tolerance: float = TOLERANCE
    """Relative error of a module that is considered rounding."""
    draws: int | None = None
    """Number of generated samples; ``None``: the default for a file of this size."""
    step: int | None = None
    """Step of a generated text at which decoders are compared: the reference generates greedily with its KV cache, and
    both receive its inputs at this step; 0 is the prompt. ``None``: one run on random values."""
    data_set: DataSetRequest | None = None
    """Dataset that both models run, instead of generated samples."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the reference → name in the candidate, of inputs and outputs with different names."""


def compare_models(
    reference: Comparable, candidate: Comparable, options: CompareOptions, *, inputs: ExampleInputs | None = None
) -> ModelComparison:
    """Run two models on the same inputs and compare their outputs; with ``by_module``, module by module.

    Args:
        reference: The reference: an ONNX file, or a PyTorch model.
        candidate: The model to compare with the reference.
        options: Inputs and scope of the comparison.
        inputs: Example inputs of a live module, if its config does not define its inputs; two PyTorch models both run
            on them.

    Raises:
        UsageError: inputs or outputs do not match, values do not fit, the models have no common module, or a model is
            not deterministic.
        InputError: a file is damaged.
        StageError: one of the models cannot be run.
    """
    if reference is candidate and not isinstance(reference, (Path, ModelRequest)):
        raise UsageError(
            f"reference and candidate are the same {type(reference).__name__} object",
            hint="Pass a copy as one of them: copy.deepcopy(model).",
        )
    provider = options.run.stated_provider
    if provider is not None and not isinstance(candidate, Path):
        raise UsageError(
            f"{opt.ep if options.run.ep else opt.device} requires an ONNX file as candidate, and PyTorch runs this one",
            hint="Omit it, or pass the ONNX file as the second model.",
        )
    limits: tuple[str, ...] = ()
    if provider is not None and options.data_set is None and options.run.input_data is None:
        options, limits = _within_simulation(options, provider, (reference, candidate))
    with ExitStack() as stack:
        # The candidate runs like in production, with ONNX Runtime's optimizations, unless modules are compared.
        left_file, right_file = (
            OnnxSide(model, by_module=options.by_module, as_written=is_as_written, provider=runs_on)
            if isinstance(model, Path)
            else None
            for model, is_as_written, runs_on in ((reference, True, None), (candidate, options.by_module, provider))
        )
        inverse = {name: original for original, name in options.names.items()}
        left = left_file or stack.enter_context(open_in_torch(reference, inputs, right_file, inverse))
        right = right_file or stack.enter_context(open_in_torch(candidate, inputs, left_file, options.names))
        _refuse_unknown_names(left, right, options.names)
        matched = _match_before_running(left, right, options)
        folder = _find_processor_folder((candidate, reference), options.data_set)
        few = _few_shared_notes(left, right)
        stack.enter_context(_append_reasons(few))
        samples, notes = _create_samples(left, right, options, folder)
        values = samples.values
        notes = (*notes, *limits, *few, *_rounding_notes(left, right), *_node_notes(left, right))
        pair = SidePair(left, right, [draw.feeds for draw in values], options.names)
        if options.step is not None:
            pair = at_step(pair, options.step)
            notes = (*notes, _step_words(pair, options.step))
        with refusals_explained(values[0]) if options.data_set is None else nullcontext():
            result = _compare_whole(pair, samples, notes, options)
        if options.by_module:
            # All values of all modules are recorded: by default, of one sample, in which the outputs differ.
            if options.draws is None and samples.source in ("processor", "random"):
                number = result.worst.fidelity.differing_sample
                pair = replace(pair, draws=pair.draws[number : number + 1])
            if matched is None:
                matched = match_with_torch(pair)
                if not any(isinstance(side, OnnxSide) for side in (left, right)):
                    _refuse_no_module(left, right, matched)
            result = _compare_by_module(result, pair, matched, options)
        return result


@contextmanager
def _append_reasons(notes: Sequence[str]) -> Iterator[None]:
    """Append possible reasons to the hint of a usage error."""
    try:
        yield
    except UsageError as error:
        error.hint = " ".join(filter(None, (error.hint, *notes)))
        raise


@contextmanager
def open_in_torch(
    model: Comparable, inputs: ExampleInputs | None, file: OnnxSide | None, names: Mapping[str, str]
) -> Iterator[TorchSide]:
    """Yield a PyTorch model, ready to run; without KV cache if the file on the other side has none.

    Args:
        model: The model.
        inputs: Example inputs of a live module.
        file: The other side; ``None``: a PyTorch model too.
        names: Name there → name here, of inputs and outputs with different names.
    """
    from winml.modelkit.compare.by_module.torch_side import opened_torch_side

    assert not isinstance(model, Path)  # a file is not run in PyTorch
    if isinstance(model, ModelRequest):
        file_inputs = None
        if file is not None:
            # Weights missing in the checkpoint get the same random values as in the file.
            model = with_recorded_seed(model, {entry.key: entry.value for entry in file.structure.metadata_props})
            file_inputs = {names.get(name, name) for name in file.input_names}
        with opened_torch_side(_load_part(model, file_inputs), model.model or "the model") as side:
            yield side
        return
    from winml.modelkit.models.live_module import loaded_from_module
    from winml.modelkit.models.state_restoration import restored_module_state

    # Deciding the inputs of a live module may run the module as well.
    with restored_module_state(model):
        specs = () if file is None else inputs_of_file(file.path)
        renamed = tuple(spec.model_copy(update={"name": names.get(spec.name, spec.name)}) for spec in specs)
        part = loaded_from_module(model, inputs, file_inputs=renamed or None).only_part
        with opened_torch_side(part, type(model).__name__) as side:
            yield side


def _load_part(model: ModelRequest, inputs: Collection[str] | None) -> ModelPart:
    """Load a PyTorch model, and return the part with these inputs, or else the whole model without KV cache."""
    from winml.modelkit.models.model import load_model

    loaded = load_model(model)
    part = _select_part(loaded, inputs)
    if part is None and len(loaded.parts) > 1 and inputs is not None:
        # The decoder of the file may compute the keys and values of the encoder output itself.
        part = _select_part(load_model(replace(model, cross_keys="decoder")), inputs)
    return part or load_model(replace(model, cache=False)).only_part


def _select_part(loaded: LoadedModel, inputs: Collection[str] | None) -> ModelPart | None:
    """Return the part with these inputs; `None` if only the model without a cache may have them."""
    if len(loaded.parts) > 1:
        return None if inputs is None else loaded.part_taking(inputs)
    part = loaded.only_part
    is_fed = inputs is None or {spec.name for spec in part.inputs if spec.cache is not None} <= set(inputs)
    return part if is_fed else None


def _match_before_running(left: Side, right: Side, options: CompareOptions) -> list[MatchedBoundary] | None:
    """Open the sessions of files with the values to record; return the common modules of two files.

    With PyTorch on one side, the inputs of its modules are unknown before it runs; all boundary values of the file are
    then recordable, and the result is ``None``. ``[]`` without ``by_module``, and no session is opened.

    Raises:
        UsageError: a file has no modules, or no module is common.
    """
    if not options.by_module:
        return []
    if isinstance(left, OnnxSide) and isinstance(right, OnnxSide):
        matched = match_files(left, right)
        have_common = left.boundaries and right.boundaries and _has_common_module(left, right, matched)
        if not (have_common or left.is_tagged or right.is_tagged):
            for file in (left, right):
                file.read_nodes_as_modules()
            matched = match_files(left, right)
        _refuse_no_module(left, right, matched)
        for number, file in enumerate((left, right)):
            file.session([names[number] for match in matched for names in match.taps])
        return matched
    for side in (left, right):
        if isinstance(side, OnnxSide):
            _refuse_no_tree(side)
            side.session([name for call in side.boundaries.values() for name in (*call.inputs, *call.outputs)])
    return None


def _as_torch(side: Side) -> TorchSide:
    assert not isinstance(side, OnnxSide)  # a side is a file or a model in PyTorch
    return cast("TorchSide", side)


def _create_samples(
    left: Side, right: Side, options: CompareOptions, folder: Path | None
) -> tuple[SampleValues, tuple[str, ...]]:
    """Create the inputs of both, named as in the candidate, and notes.

    Args:
        left: The reference.
        right: The candidate.
        options: The requested options.
        folder: Folder of the processors for the samples of a dataset.
    """
    if isinstance(right, OnnxSide):
        sizes, notes = _fixed_sizes(left, right, options.names, options.run) if isinstance(left, OnnxSide) else ({}, ())
        run = replace(options.run, sizes={**sizes, **options.run.sizes})
        path = left.path if isinstance(left, OnnxSide) else None
        return create_file_samples(right.session(), replace(options, run=run), folder, path), notes
    if isinstance(left, OnnxSide):
        samples = create_file_samples(left.session(), options, folder, left.path)
        renamed = (
            replace(draw, feeds={options.names.get(name, name): array for name, array in draw.feeds.items()})
            for draw in samples.values
        )
        return replace(samples, values=tuple(renamed)), ()
    draws = _create_torch_samples(_as_torch(right).part, options, folder)
    source: QualitySource = "dataset" if options.data_set else "random" if draws[0].file is None else "file"
    return SampleValues(tuple(draws), source, options.run.seed), ()


def create_file_samples(
    session: Session, options: CompareOptions, folder: Path | None, model: Path | None, *, takes_stored: bool = True
) -> SampleValues:
    """Create the samples of a comparison with a file: values of the user, a dataset, or generated samples.

    Args:
        session: The opened file.
        options: The requested samples.
        folder: Folder of tokenizer and processor; ``None`` without one.
        model: File of the reference, whose size determines the number of samples; ``None`` for a PyTorch model.
        takes_stored: Use samples stored beside the file, if any, instead of generated ones.
    """
    run = options.run
    count = options.draws
    if options.step is not None:
        run = replace(run, decoding=prompt_before(graph_inputs(session), run.sizes, options.step))
        count = count or 1
    return quality_values(
        session, SampleRequest(run, folder, options.data_set, count, model=model, takes_stored=takes_stored)
    )


def _create_torch_samples(part: ModelPart, options: CompareOptions, folder: Path | None) -> list[Values]:
    """Create the inputs of two PyTorch models: dataset samples, values of files, a decoding step, or random values.

    The example of the part, if any, replaces the first random values.

    Args:
        part: The part of one of the models.
        options: Options of the comparison.
        folder: Folder of the processors for dataset samples; without it, ``options.data_set`` is ignored.
    """
    run = options.run
    inputs = tuple(part.inputs)
    if options.data_set is not None and folder is not None:
        return list(data_set_values(inputs, run.sizes, options.data_set, folder).values)
    if run.input_data is not None:
        return [Values(inputs, load_feeds(file, inputs), file=file) for file in value_files(run.input_data)]
    if options.step is not None:
        prompt = prompt_before(inputs, run.sizes, options.step)
        seeds = [run.seed + number for number in range(options.draws or 1)]
        drawn = (decoder_feeds(inputs, prompt, run.sizes, batch_size=None, seed=seed) for seed in seeds)
        return [Values(inputs, feeds, notes) for feeds, notes in drawn]
    traced = part.trace_sizes
    sizes = {**traced, **{dim: size for name, size in run.sizes.items() for dim in names_among(name, traced)}}
    draws = [make_feeds(part.inputs, run.seed + number, sizes=sizes) for number in range(options.draws or 1)]
    if part.example is not None:
        from winml.modelkit.models.tensors import to_numpy

        draws[0] = {name: to_numpy(tensor) for name, tensor in part.example.items()}
    return [Values(inputs, feeds) for feeds in draws]


def _compare_whole(
    pair: SidePair, samples: SampleValues, notes: tuple[str, ...], options: CompareOptions
) -> ModelComparison:
    """Run both models and compare their outputs.

    Raises:
        UsageError: two files have different inputs, or the outputs of one model differ between two runs.
    """
    if isinstance(pair.reference, OnnxSide) and isinstance(pair.candidate, OnnxSide):
        _refuse_other_inputs(pair.reference, pair.candidate, options.names)
    outputs, missing = pair.compared_outputs()
    unchecked: tuple[str, ...] = ()
    if not any(output.fidelity.has_signal for output in outputs):
        words = unchecked_words(None, "reference", f"compare on real inputs ({opt.dataset} or {opt.input_data})")
        unchecked = (f"{words[0].upper()}{words[1:]}.",)
    result = ModelComparison(
        reference=pair.reference.shown,
        candidate=pair.candidate.shown,
        samples=samples.about,
        outputs=outputs,
        threshold=options.threshold,
        step=options.step,
        tolerance=options.tolerance,
        provider=options.run.stated_provider,
        notes=(*samples.values[0].notes, *notes, *_missing_notes(pair, missing), *unchecked),
    )
    _refuse_random_outputs(pair, result.worst.fidelity, options.tolerance)
    return result


def _within_simulation(
    options: CompareOptions, provider: ChosenProvider, models: Sequence[Comparable]
) -> tuple[CompareOptions, tuple[str, ...]]:
    """Return options with the sizes that a simulated device computes like a real one, and notes about them.

    Sizes are only set if they are open in all files.
    """
    limits = [provider.simulated_sizes(inputs_of_file(model)) for model in models if isinstance(model, Path)]
    sizes = limits[0] if all(limits) else {}
    added = {name: size for name, size in sizes.items() if name not in options.run.sizes}
    if not added:
        return options, ()
    words = ", ".join(f"{name} {size}" for name, size in added.items())
    run = replace(options.run, sizes={**options.run.sizes, **added})
    note = f"{words}: {provider.provider.name} simulated on the {provider.stand_in} computes attention of more wrongly"
    return replace(options, run=run), (f"{note} ({opt.shape_config} sets another size)",)


def _rounding_notes(reference: Side, candidate: Side) -> Iterator[str]:
    """Note files whose float16 values are rounded, unlike in an application on the CPU."""
    files = [side for side in (reference, candidate) if isinstance(side, OnnxSide)]
    if rounded := [side for side in files if side.rounds_halves]:
        names = " and ".join(dict.fromkeys(side.shown for side in rounded))
        remedy = f" ({opt.ep} cpu: computed as by ONNX Runtime's CPU provider)" if candidate in rounded else ""
        yield f"float16 values of {names} are rounded as on a device{remedy}"


def _missing_notes(pair: SidePair, missing: tuple[Sequence[str], Sequence[str]]) -> Iterator[str]:
    """Note the outputs of each side that were not compared, with advice."""
    sides = (pair.reference, pair.candidate)
    texts = [f"of {side.shown} only: {', '.join(names)}" for side, names in zip(sides, missing, strict=True) if names]
    advice = f" To compare two outputs with different names, use {opt.map} reference=candidate." if all(missing) else ""
    if texts:
        yield f"Outputs {'; '.join(texts)}.{advice}"


def _compare_by_module(
    whole: ModelComparison, pair: SidePair, matched: Sequence[MatchedBoundary], options: CompareOptions
) -> ModelComparison:
    """Run both models and return the comparison with all modules.

    Args:
        whole: The comparison of the outputs.
        pair: The two models.
        matched: The common modules.
        options: Options of the comparison.
    """
    left, right = pair.reference, pair.candidate
    unchanged, are_alike = None, False
    if isinstance(left, OnnxSide) and isinstance(right, OnnxSide):
        unchanged = unchanged_modules(left, right)
        are_alike = whole.provider is None and are_quantized_alike(left, right, unchanged)
    compared = compare_modules(pair, matched, whole.worst.fidelity, unchanged=unchanged, are_rounded_alike=are_alike)
    file = next((side for side in (right, left) if isinstance(side, OnnxSide)), None)
    trees = {side.shown: side.tree.source for side in (left, right) if isinstance(side, OnnxSide) and side.tree}
    untagged = [
        f"{name} has no tags: modules were read from {source}."
        for name, source in trees.items()
        if source != "winml tags"
    ]
    return replace(
        whole,
        notes=(*whole.notes, *untagged),
        modules=compared.modules,
        divergence=compared.divergence(options.tolerance),
        graph_name=file.structure.graph.name if file is not None else "",
        node_tags=file.node_tags() if file is not None else {},
        fingerprint=fingerprint(graph_of(file.structure, file.path)) if file is not None else "",
        digests={
            role: model_digest(side.path)
            for role, side in (("reference", left), ("candidate", right))
            if isinstance(side, OnnxSide)
        },
    )


NamedSide: TypeAlias = "Path | ModelRequest"
"""A named model: an ONNX file, or a request for a PyTorch model."""


def compare_parts(
    parts: Mapping[str, tuple[NamedSide, NamedSide]],
    displayed: tuple[str, str],
    options: CompareOptions,
    notes: Sequence[str] = (),
) -> ModelComparison:
    """Compare every part of a model with the part of the same name.

    Args:
        parts: Name of the part → reference and candidate, in the order the parts run; one of the two is a file.
        displayed: Names of both models in messages.
        options: Inputs and scope of the comparison; a size applies to the parts with its dimension.
        notes: Sentences on what is not compared.

    Raises:
        UsageError: no part has a dimension of that name, or a part cannot be compared.
        InputError: a file is damaged.
        StageError: a part cannot be run.
    """
    sizes = _sizes_by_part(parts, options.run.sizes)
    compared = {
        name: compare_models(*sides, replace(options, run=replace(options.run, sizes=sizes[name])))
        for name, sides in parts.items()
    }
    return ModelComparison.of_parts(*displayed, compared, notes)


def _sizes_by_part(
    parts: Mapping[str, tuple[NamedSide, NamedSide]], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Part → the sizes whose dimensions it has.

    Raises:
        UsageError: no part has a dimension of that name.
    """
    if not sizes:
        return {name: {} for name in parts}
    # Dynamic dimensions of the candidate may be static in the reference, as in the comparison of two files.
    files = {name: next(side for side in reversed(sides) if isinstance(side, Path)) for name, sides in parts.items()}
    inputs = {name: inputs_of_file(file) for name, file in files.items()}
    fitting = {name: {key: size for key, size in sizes.items() if _has_dimension(inputs[name], key)} for name in parts}
    for key, size in sizes.items():
        if not any(key in fitted for fitted in fitting.values()):
            sizes_by_key([spec for items in inputs.values() for spec in items], {key: size})  # raises
    return fitting


def _has_dimension(inputs: Sequence[InputTensorSpec], key: str) -> bool:
    """Return True if an input has a dimension of this name."""
    try:
        sizes_by_key(inputs, {key: 1})
    except UsageError:
        return False
    return True


def at_step(pair: SidePair, step: int) -> SidePair:
    """Replace the prompts by the inputs of the reference at a step of each text.

    Args:
        pair: Both sides, with prompts.
        step: Number of tokens that the reference generates greedily, with its KV cache; 0 keeps the prompts.

    Raises:
        UsageError: the model has no KV cache, no token ids as input, or no scores as output.
        WinMLError: a run fails.
    """
    _refuse_without_ids(pair, step)
    states, shapes = pair.candidate.states or pair.reference.states, pair.candidate.input_shapes
    if not states:
        raise UsageError(
            f"{opt.step}: the models have no KV cache", hint="Compare decoders that were exported with a KV cache."
        )
    texts = []
    for prompt in pair.draws:
        feeds = dict(prompt)
        for _ in range(step):
            outputs = pair.reference.outputs(pair.reference_feeds(feeds))
            output = {pair.names.get(name, name): array for name, array in outputs.items()}
            _refuse_without_scores(pair, list(output), step)
            feeds = next_feeds(feeds, output, states, shapes)
        texts.append(feeds)
    return replace(pair, draws=texts)


def _step_words(pair: SidePair, step: int) -> str:
    """Describe the inputs at a step."""
    tokens = pair.draws[0][TOKEN_IDS].shape[1]
    if step == 0:
        return f"Compared at step 0: a prompt of {tokens} tokens."
    return (
        f"Compared at step {step}: token {step} of the text that {pair.reference.shown} generates greedily. "
        "Each model uses the cache of its previous runs."
    )


def _refuse_without_ids(pair: SidePair, step: int) -> None:
    """Check, before running, that the reference can generate text.

    Raises:
        UsageError: the model has no token ids as input, or a file no scores as output.
    """
    if TOKEN_IDS not in pair.candidate.input_shapes:
        raise UsageError(
            f"{opt.step} {step}: {pair.candidate.shown} has no input {TOKEN_IDS!r} for the next token",
            hint=f"{opt.step} requires a decoder with token ids as input. Compare other models on the inputs of a "
            f"file: {opt.input_data}, without {opt.step}.",
        )
    if step and isinstance(pair.reference, OnnxSide):
        _refuse_without_scores(pair, [pair.names.get(name, name) for name in pair.reference.output_names], step)


def _refuse_without_scores(pair: SidePair, outputs: Sequence[str], step: int) -> None:
    """Refuse a reference without scores for the next token.

    Raises:
        UsageError: names the missing output.
    """
    if SCORES not in outputs:
        raise UsageError(
            f"{opt.step} {step}: {pair.reference.shown} has no output {SCORES!r} to select the next token from",
            hint=f"Name the output with {opt.map}, or compare without {opt.step}.",
        )


def _refuse_unknown_names(reference: Side, candidate: Side, names: Mapping[str, str]) -> None:
    """Refuse a pair of names if one side has no such name.

    Raises:
        UsageError: names the pair; detects exchanged names.
    """
    for left, right in names.items():
        for side, name, opposite in ((reference, left, candidate), (candidate, right, reference)):
            declared = side.declared_names
            # The outputs of a PyTorch model are unknown before it runs.
            if name in declared or (not isinstance(side, OnnxSide) and name not in opposite.declared_names):
                continue
            is_turned = left in candidate.declared_names and right in reference.declared_names
            raise UsageError(
                f"{opt.map} {left}={right}: {side.shown} has no input or output {name!r}",
                hint=f"The name in REFERENCE is the first one: {opt.map} {right}={left}."
                if is_turned
                else f"It has {', '.join(declared)}.",
            )


def _refuse_other_inputs(reference: OnnxSide, candidate: OnnxSide, names: Mapping[str, str]) -> None:
    """Refuse two files with different inputs.

    Raises:
        UsageError: names the inputs of both.
    """
    theirs = [names.get(name, name) for name in reference.input_names]
    if set(theirs) != set(candidate.input_names):
        raise UsageError(
            f"{reference.shown} takes {', '.join(reference.input_names)}, "
            f"{candidate.shown} {', '.join(candidate.input_names)}",
            hint=f"Match the inputs with {opt.map} reference=candidate. Models with unmatched inputs cannot be "
            "compared.",
        )


def _fixed_sizes(
    reference: OnnxSide, candidate: OnnxSide, names: Mapping[str, str], run: RunOptions
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Find sizes that are static in the reference and dynamic in the candidate; return the sizes and a note.

    ``({}, ())`` without such sizes, or with values of the user.

    Raises:
        UsageError: static sizes differ, or another size is requested.
    """
    theirs = {names.get(spec.name, spec.name): spec for spec in graph_inputs(reference.session())}
    sizes: dict[str, int] = {}
    inputs = graph_inputs(candidate.session())
    for ours in inputs:
        fixed = theirs.get(ours.name)
        if fixed is None:
            continue
        if len(fixed.shape) != len(ours.shape) or _have_different_sizes(fixed, ours):
            raise UsageError(
                f"input {ours.name!r}: {reference.shown} takes {fixed.words}, {candidate.shown} {ours.words}",
                hint="Models can only be compared at equal input sizes: export one of them with these dimensions "
                "dynamic, or with equal sizes.",
            )
        for key, size in zip(ours.shape, fixed.shape, strict=True):
            if isinstance(key, str) and isinstance(size, int):
                sizes.setdefault(key, size)
    if not sizes or run.input_data is not None:
        return {}, ()
    requested = sizes_by_key(inputs, run.sizes)
    for key, size in sizes.items():
        if requested.get(key, size) != size:
            raise UsageError(
                f"{opt.shape_config}: {key} {requested[key]}, and {reference.shown} takes {size} only",
                hint="Omit this size: the fixed one is used.",
            )
    text = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return sizes, (f"fixed sizes of {reference.shown}: {text}",)


def _have_different_sizes(a: InputTensorSpec, b: InputTensorSpec) -> bool:
    """Return True if two inputs have different static sizes along an axis."""
    pairs = zip(a.shape, b.shape, strict=True)
    return any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in pairs)


def _refuse_no_tree(side: OnnxSide) -> None:
    """Refuse a file without module information.

    Raises:
        UsageError: names the file.
    """
    if not side.boundaries:
        raise UsageError(
            f"{opt.by_module}: {side.shown} has no module information for its nodes",
            hint=f"Transfer the tags of its source file with winml retag, or compare without {opt.by_module}.",
        )


def _refuse_no_module(reference: Side, candidate: Side, matched: Sequence[MatchedBoundary]) -> None:
    """Refuse two models without a common module.

    Raises:
        UsageError: a model has no modules, or no module is common.
    """
    for side in (reference, candidate):
        if isinstance(side, OnnxSide):
            _refuse_no_tree(side)
    if _has_common_module(reference, candidate, matched):
        return
    raise UsageError(
        f"{opt.by_module}: {reference.shown} and {candidate.shown} have no module in common",
        hint=f"Compare two variants of one model, or omit {opt.by_module}.",
    )


def _has_common_module(reference: Side, candidate: Side, matched: Sequence[MatchedBoundary]) -> bool:
    """Return True if a module of one model is a module of the other, too; the root of two PyTorch models suffices."""
    if any(match.outputs for match in matched if not match.is_root):
        return True
    if isinstance(reference, OnnxSide) and isinstance(candidate, OnnxSide):
        return bool(reference.boundaries.keys() & candidate.boundaries.keys())
    return all(match.is_root for match in matched)


def _refuse_random_outputs(pair: SidePair, worst: OutputFidelity, tolerance: float) -> None:
    """Refuse a nondeterministic model; models are run again only if their outputs differ.

    Args:
        pair: The two models.
        worst: Comparison of the least equal output.
        tolerance: Relative error up to which outputs count as equal.

    Raises:
        UsageError: names the model and, for a file, its random nodes.
    """
    if not worst.problem and worst.relative_error <= tolerance:
        return
    feeds = pair.draws[0]
    for side, values in ((pair.reference, pair.reference_feeds(feeds)), (pair.candidate, pair.candidate_feeds(feeds))):
        nodes = side.drawing_nodes if isinstance(side, OnnxSide) else []
        if isinstance(side, OnnxSide) and not nodes:
            continue
        again = measure_fidelity([side.outputs(values)], [side.outputs(values)], 0.0).worst
        if again.problem or again.relative_error > tolerance:
            drawn = f": {random_words(nodes)}" if nodes else ", or keeps state between calls"
            raise UsageError(
                f"{side.shown} returns different outputs for the same inputs: it generates random numbers{drawn}",
                hint="Compare deterministic models: disable dropout, or make the noise an input.",
            )


def _node_notes(*sides: Side) -> Iterator[str]:
    """Note that nodes of files without module information are compared."""
    if any(isinstance(side, OnnxSide) and side.is_by_node for side in sides):
        yield "The files have no module in common: nodes are compared, named after their first output."


_FEW = 0.5
"""Minimum share of common modules. Chosen: variants of a model, such as optimized and quantized files, keep all modules
in their metadata. A tree of node names also contains modules of torch.nn, so the side with fewer modules decides."""


def _few_shared_notes(reference: Side, candidate: Side) -> tuple[str, ...]:
    """Note that the side with fewer modules shares less than half of them with the other side.

    For a PyTorch model and a file, only the modules of the file count, since some PyTorch modules do not run.

    Args:
        reference: The reference.
        candidate: The model to compare with the reference.
    """
    sides = (reference, candidate)
    counted: tuple[Side, ...] = tuple(side for side in sides if isinstance(side, OnnxSide)) or sides
    numbers = [len(side.module_classes) for side in counted]
    shared = _count_shared(reference.module_classes, candidate.module_classes)
    # The modules of a file without tags and scopes are unknown.
    if not all(numbers) or shared >= _FEW * min(numbers):
        return ()
    counts = ", ".join(f"{shared} of {number} of {side.shown}" for side, number in zip(counted, numbers, strict=True))
    meaning = "These seem to be different models, not two variants of one, so the output differences may be meaningless"
    return (
        f"The models have few modules in common: {counts}. {meaning}. Compare their quality on a task with winml eval.",
    )


def _count_shared(a: Mapping[str, str], b: Mapping[str, str]) -> int:
    """Count the modules with the same path and without different classes."""
    common = a.keys() & b.keys()
    return sum(a[path] == b[path] or not (a[path] and b[path]) for path in common)


def _find_processor_folder(
    models: Sequence[Path | ModelRequest | nn.Module], request: DataSetRequest | None
) -> Path | None:
    """Find the folder of the first model with processors.

    Args:
        models: The compared models.
        request: The requested dataset, if any.

    Raises:
        UsageError: a dataset is requested, and no model is in a folder.
    """
    loadable = [model for model in models if isinstance(model, (Path, ModelRequest))]
    folders = [folder for model in loadable if (folder := processor_folder(model)) is not None]
    if not folders and request is not None:
        raise UsageError(
            f"{request.words}: samples require a tokenizer or image processor, and neither model is in a folder",
            hint="Pass inputs in an .npz file.",
        )
    return next((folder for folder in folders if processor_files(folder)), next(iter(folders), None))
