"""Runs two models on the same values, compares their answers, and finds the module where they part.

Each is an ONNX file, a PyTorch model that is loaded, or a live module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.data_sets import DataSetRequest
from winml.modelkit.flows.compare.decoding_step import at_step, step_words
from winml.modelkit.flows.compare.refusals import (
    few_shared_notes,
    fixed_sizes,
    refuse_no_module,
    refuse_no_tree,
    refuse_other_inputs,
    refuse_random_outputs,
    refuse_unknown_names,
)
from winml.modelkit.flows.compare.values import data_set_values, folder_of_processors, value_files
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.specs import names_among
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.results.comparison import ModelComparison
from winml.modelkit.runtime.decoding.inputs import decoder_feeds, prompt_before
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.runtime.graph_inputs import GraphInput, graph_inputs, load_feeds
from winml.modelkit.runtime.opened_model import RunOptions, Values, refusals_explained, values_for, with_fitting_sizes
from winml.modelkit.runtime.sessions import Session
from winml.modelkit.verify.by_module.module_comparison import TOLERANCE, compare_modules, unchanged_modules
from winml.modelkit.verify.by_module.onnx_side import OnnxSide
from winml.modelkit.verify.by_module.sides import Side, SidePair
from winml.modelkit.verify.by_module.value_matching import (
    MatchedBoundary,
    match_calls,
    match_files,
    match_with_torch,
    turned,
)

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.load.live_module import ExampleInputs
    from winml.modelkit.load.parts import LoadedModel, ModelPart
    from winml.modelkit.verify.by_module.torch_side import TorchSide

__all__ = ["Comparable", "CompareOptions", "compare_models"]

Comparable: TypeAlias = "Path | ModelRequest | nn.Module"
"""An ONNX file, what says which PyTorch model to load, or a live module."""


@dataclass(frozen=True)
class CompareOptions:
    """How two models are compared."""

    run: RunOptions = field(default_factory=lambda: RunOptions(""))
    """What both are fed."""
    by_module: bool = False
    threshold: float | None = None
    """Largest accepted relative error of an output."""
    tolerance: float = TOLERANCE
    """Relative error of a module that counts as rounding."""
    draws: int = 1
    step: int | None = None
    """Token of a text at which decoders are compared: the reference writes it greedily with its own cache, and both are
    fed what it is fed there; 0 is the prompt. None: one run on random values."""
    data_set: DataSetRequest | None = None
    """Samples that both are fed, in place of random values."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the reference → name in the candidate, of inputs and outputs that are called otherwise there."""


def compare_models(
    reference: Comparable, candidate: Comparable, options: CompareOptions, *, inputs: ExampleInputs | None = None
) -> ModelComparison:
    """Run two models on the same values, and compare their answers; with ``by_module`` module by module.

    Args:
        reference: What is right: an ONNX file, or a PyTorch model.
        candidate: What is compared with it.
        options: What both are fed, and what is compared.
        inputs: Example inputs of a live module, where its own config does not say what it takes; of two PyTorch models,
            both are fed them.

    Raises:
        UsageError: inputs or outputs do not match, values do not fit, no module is on both sides, or a model answers
            otherwise each time.
        InputError: a file is damaged.
        StageError: one of them cannot be run.
    """
    if reference is candidate and not isinstance(reference, (Path, ModelRequest)):
        raise UsageError(
            f"both sides are one {type(reference).__name__}, the same object",
            hint="Give a copy as one of them: copy.deepcopy(model).",
        )
    with ExitStack() as stack:
        inverse = {name: original for original, name in options.names.items()}
        left = stack.enter_context(_opened(reference, inputs, options, _InputNames.of(candidate, options.names)))
        right = stack.enter_context(_opened(candidate, inputs, options, _InputNames.of(reference, inverse)))
        refuse_unknown_names(left, right, options.names)
        matched = _match_before_running(left, right, options)
        folder = folder_of_processors((candidate, reference), options.data_set) if options.data_set else None
        few = few_shared_notes(left, right)
        stack.enter_context(_with_likely_reason(few))
        values, notes = _drawn_values(left, right, options, folder)
        notes = (*notes, *few)
        pair = SidePair(left, right, [draw.feeds for draw in values], options.names)
        if options.step is not None:
            pair = at_step(pair, options.step)
            notes = (*notes, step_words(pair, options.step))
        with refusals_explained(values[0]) if options.data_set is None else nullcontext():
            result = _whole(pair, values[0], notes, options)
        if options.by_module:
            result = _by_module(result, pair, matched if matched is not None else _match_with_torch(pair), options)
        return result


@contextmanager
def _with_likely_reason(notes: Sequence[str]) -> Iterator[None]:
    """Add to a refusal what may be the reason for it."""
    try:
        yield
    except UsageError as error:
        error.hint = " ".join(filter(None, (error.hint, *notes)))
        raise


@dataclass(frozen=True)
class _InputNames:
    """What the other side takes."""

    inputs: frozenset[str] | None
    """None where that is not known before it is loaded."""
    renamed: Mapping[str, str]
    """Name here → name there, where it is another one."""

    @classmethod
    def of(cls, model: Comparable, renamed: Mapping[str, str]) -> _InputNames:
        """Read the names from a file; a PyTorch model does not tell them."""
        if not isinstance(model, Path):
            return cls(None, renamed)
        return cls(frozenset(item.name for item in read_structure(model).graph.input), renamed)

    def has(self, name: str) -> bool:
        """Say whether an input of this side is one of the other."""
        return self.inputs is None or self.renamed.get(name, name) in self.inputs

    def part_of(self, loaded: LoadedModel) -> ModelPart | None:
        """Return the part of a model that takes the same; None where at most the model without a cache does."""
        if len(loaded.parts) == 1:
            part = loaded.only_part
            return part if all(self.has(spec.name) for spec in part.inputs if spec.cache is not None) else None
        if self.inputs is None:
            return None
        original = {name: own for own, name in self.renamed.items()}
        return loaded.part_taking([original.get(name, name) for name in self.inputs])


@contextmanager
def _opened(
    model: Comparable, inputs: ExampleInputs | None, options: CompareOptions, other: _InputNames
) -> Iterator[Side]:
    """Yield one side, ready to be run; without its cache where the other side takes none."""
    if isinstance(model, Path):
        yield OnnxSide(model, by_module=options.by_module)
        return
    from winml.modelkit.verify.by_module.torch_side import opened_torch_side

    if isinstance(model, ModelRequest):
        displayed = model.model or "the model"
        part = _part_for(model, other)
        with opened_torch_side(part, displayed) as side:
            yield side
        return
    from winml.modelkit.export.state_restoration import module_left_as_found
    from winml.modelkit.load.live_module import loaded_from_module

    # Deciding the inputs of a live module may run it as well.
    with module_left_as_found(model):
        part = loaded_from_module(model, inputs).only_part
        with opened_torch_side(part, type(model).__name__) as side:
            yield side


def _part_for(model: ModelRequest, other: _InputNames) -> ModelPart:
    """Load a PyTorch model, and return the part that takes what the other side takes; else all of it, without cache."""
    from winml.modelkit.load.model import load_model

    loaded = load_model(model)
    if (part := other.part_of(loaded)) is not None:
        return part
    if len(loaded.parts) > 1 and other.inputs is not None:
        # The file may be of a layout whose decoder computes the keys and values of what was encoded.
        part = other.part_of(load_model(replace(model, cross_keys="decoder")))
    return part or load_model(replace(model, cache=False)).only_part


def _match_before_running(left: Side, right: Side, options: CompareOptions) -> list[MatchedBoundary] | None:
    """Open the sessions of files with the values that are to be recorded; return what they have in common.

    With PyTorch on one side, it is not known before it runs what its modules take; then all values that modules of the
    file hand on can be recorded, and None is returned.
    """
    files = [side for side in (left, right) if isinstance(side, OnnxSide)]
    if not options.by_module:
        return []
    if isinstance(left, OnnxSide) and isinstance(right, OnnxSide):
        matched = match_files(left, right)
        refuse_no_module(left, right, matched)
        for number, side in enumerate((left, right)):
            side.session(list(dict.fromkeys(names[number] for item in matched for names in item.taps)))
        return matched
    for side in files:
        refuse_no_tree(side)
        values = [name for item in side.boundaries.values() for name in (*item.inputs, *item.outputs)]
        side.session(list(dict.fromkeys(values)))
    return None


def _match_with_torch(pair: SidePair) -> list[MatchedBoundary]:
    """Run the PyTorch models once, and return what both sides have in common."""
    left, right = pair.reference, pair.candidate
    if isinstance(right, OnnxSide):
        return match_with_torch(_as_torch(left).calls(pair.reference_feeds(pair.draws[0])).counts, right)
    calls = _as_torch(right).calls(pair.candidate_feeds(pair.draws[0]))
    if isinstance(left, OnnxSide):
        return turned(match_with_torch(calls.counts, left))
    reference = _as_torch(left).calls(pair.reference_feeds(pair.draws[0]))
    matched = match_calls(reference.identities, reference.counts, calls.counts)
    refuse_no_module(left, right, matched)
    return matched


def _as_torch(side: Side) -> TorchSide:
    assert not isinstance(side, OnnxSide)  # a side is a file, or a model in PyTorch
    return cast("TorchSide", side)


def _drawn_values(
    left: Side, right: Side, options: CompareOptions, folder: Path | None
) -> tuple[list[Values], tuple[str, ...]]:
    """Return what both are fed, by the names of the candidate, and what is to be said of that.

    Args:
        left: The reference.
        right: The candidate.
        options: What is asked for.
        folder: Where what makes arrays of the samples of a data set lies.
    """
    if isinstance(right, OnnxSide):
        sizes, notes = fixed_sizes(left, right, options.names, options.run) if isinstance(left, OnnxSide) else ({}, ())
        return _draws(right.session(), _with_sizes(options, sizes), folder), notes
    if isinstance(left, OnnxSide):
        draws = _draws(left.session(), options, folder)
        return [replace(draw, feeds=_renamed(draw.feeds, options.names)) for draw in draws], ()
    return _torch_draws(_as_torch(right).part, options, folder), ()


def _with_sizes(options: CompareOptions, sizes: Mapping[str, int]) -> CompareOptions:
    return replace(options, run=replace(options.run, sizes={**sizes, **options.run.sizes}))


def _renamed(feeds: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    return {names.get(name, name): array for name, array in feeds.items()}


def _draws(session: Session, options: CompareOptions, folder: Path | None) -> list[Values]:
    if options.data_set is not None and folder is not None:
        return data_set_values(graph_inputs(session), options.run.sizes, options.data_set, folder)
    run = options.run
    if run.input_data is not None:
        return [values_for(session, replace(run, input_data=file)) for file in value_files(run.input_data)]
    if options.step is not None:
        run = replace(run, decoding=prompt_before(graph_inputs(session), run.sizes, options.step))
    run = with_fitting_sizes(session, run)
    return [values_for(session, replace(run, seed=run.seed + number)) for number in range(options.draws)]


def _torch_draws(part: ModelPart, options: CompareOptions, folder: Path | None) -> list[Values]:
    """Return what two PyTorch models are fed: the values of a file, the examples that were given, or random ones."""
    run = options.run
    inputs = tuple(
        GraphInput(
            spec.name,
            spec.dtype,
            spec.shape,
            spec.value_range,
            sums=spec.sums or {},
            cache=None if spec.cache is None else spec.cache.kind,
        )
        for spec in part.inputs
    )
    if options.data_set is not None and folder is not None:
        return data_set_values(inputs, run.sizes, options.data_set, folder)
    if run.input_data is not None:
        return [Values(inputs, load_feeds(file, inputs), file=file) for file in value_files(run.input_data)]
    if options.step is not None:
        prompt = prompt_before(inputs, run.sizes, options.step)
        seeds = [run.seed + number for number in range(options.draws)]
        drawn = (decoder_feeds(inputs, prompt, run.sizes, batch_size=None, seed=seed) for seed in seeds)
        return [Values(inputs, feeds, notes) for feeds, notes in drawn]
    traced = part.trace_sizes
    sizes = {**traced, **{own: size for name, size in run.sizes.items() for own in names_among(name, traced)}}
    draws = [make_feeds(part.inputs, run.seed + number, sizes=sizes) for number in range(options.draws)]
    if part.example is not None:
        from winml.modelkit.export.tensors import to_numpy

        draws[0] = {name: to_numpy(tensor) for name, tensor in part.example.items()}
    return [Values(inputs, feeds) for feeds in draws]


def _whole(pair: SidePair, values: Values, notes: tuple[str, ...], options: CompareOptions) -> ModelComparison:
    """Compare what both answer."""
    if isinstance(pair.reference, OnnxSide) and isinstance(pair.candidate, OnnxSide):
        refuse_other_inputs(pair.reference, pair.candidate, options.names)
    outputs, missing = pair.compared_outputs()
    result = ModelComparison(
        reference=pair.reference.shown,
        candidate=pair.candidate.shown,
        draws=len(pair.draws),
        input_source="data set" if options.data_set else "random" if values.file is None else "file",
        outputs=outputs,
        threshold=options.threshold,
        step=options.step,
        tolerance=options.tolerance,
        notes=(*values.notes, *notes, *_missing_notes(pair, missing)),
    )
    refuse_random_outputs(pair, result.worst.fidelity, options.tolerance)
    return result


def _missing_notes(pair: SidePair, missing: tuple[Sequence[str], Sequence[str]]) -> tuple[str, ...]:
    """Say which outputs of each side were not compared, and what may be done."""
    sides = (pair.reference, pair.candidate)
    words = [f"of {side.shown} only: {', '.join(names)}" for side, names in zip(sides, missing, strict=True) if names]
    if not words:
        return ()
    advice = " Two that mean the same are compared with --map reference=candidate." if all(missing) else ""
    return (f"Outputs {'; '.join(words)}.{advice}",)


def _by_module(
    complete: ModelComparison, pair: SidePair, matched: Sequence[MatchedBoundary], options: CompareOptions
) -> ModelComparison:
    """Return the comparison with that of every module."""
    left, right = pair.reference, pair.candidate
    unchanged = None
    if isinstance(left, OnnxSide) and isinstance(right, OnnxSide):
        unchanged = unchanged_modules(left, right)
    compared = compare_modules(pair, matched, complete.worst.fidelity, unchanged=unchanged)
    file = next((side for side in (right, left) if isinstance(side, OnnxSide)), None)
    trees = {side.shown: side.tree.source for side in (left, right) if isinstance(side, OnnxSide) and side.tree}
    untagged = [
        f"{displayed} bears no tags: modules were read from {source}."
        for displayed, source in trees.items()
        if source != "winml tags"
    ]
    return replace(
        complete,
        notes=(*complete.notes, *untagged),
        modules=compared.modules,
        divergence=compared.divergence(options.tolerance),
        graph_name=file.structure.graph.name if file is not None else "",
        node_tags=file.node_tags() if file is not None else {},
    )
