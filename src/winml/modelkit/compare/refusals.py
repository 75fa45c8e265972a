"""Refuses what cannot be compared: differing inputs, sizes or modules of the two sides, and sampled outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import Side, SidePair
from winml.modelkit.compare.by_module.value_matching import MatchedBoundary
from winml.modelkit.compare.fidelity import OutputFidelity, measure_fidelity
from winml.modelkit.errors import UsageError
from winml.modelkit.models.request import ModelRequest, processor_folder
from winml.modelkit.ort.graph_inputs import GraphInput, graph_inputs, sizes_by_key
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.samples.processors import processor_files

if TYPE_CHECKING:
    from torch import nn

_DISPLAYED_NODES = 3
"""Nodes named in a message; more would bury the rest of it."""


def refuse_unknown_names(reference: Side, candidate: Side, names: Mapping[str, str]) -> None:
    """Refuse a pair of names of which one side has none of that name.

    Raises:
        UsageError: names the pair; says where it is the wrong way round.
    """
    for left, right in names.items():
        for side, name, other in ((reference, left, candidate), (candidate, right, reference)):
            known = _names_of(side)
            # The outputs of a PyTorch model are not known before it runs.
            if name in known or (not isinstance(side, OnnxSide) and name not in _names_of(other)):
                continue
            is_turned = left in _names_of(candidate) and right in _names_of(reference)
            raise UsageError(
                f"--map {left}={right}: {side.shown} has no input or output {name!r}",
                hint=f"The name in REFERENCE is the first one: --map {right}={left}."
                if is_turned
                else f"It has {', '.join(known)}.",
            )


def _names_of(side: Side) -> list[str]:
    return [*side.input_names, *side.output_names] if isinstance(side, OnnxSide) else list(side.input_dtypes)


def refuse_other_inputs(reference: OnnxSide, candidate: OnnxSide, names: Mapping[str, str]) -> None:
    """Refuse two files that take other inputs.

    Raises:
        UsageError: names those of both.
    """
    theirs = [names.get(name, name) for name in reference.input_names]
    if set(theirs) != set(candidate.input_names):
        raise UsageError(
            f"{reference.shown} takes {', '.join(reference.input_names)}, "
            f"{candidate.shown} {', '.join(candidate.input_names)}",
            hint="Match the inputs with --map reference=candidate. Models with unmatched inputs cannot be compared.",
        )


def fixed_sizes(
    reference: OnnxSide, candidate: OnnxSide, names: Mapping[str, str], run: RunOptions
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the sizes that the reference fixes and the candidate leaves open, and a sentence that says so.

    Raises:
        UsageError: both fix a size, and not the same, or another is asked for.
    """
    theirs = {names.get(item.name, item.name): item for item in graph_inputs(reference.session())}
    sizes: dict[str, int] = {}
    inputs = graph_inputs(candidate.session())
    for ours in inputs:
        other = theirs.get(ours.name)
        if other is None:
            continue
        if len(other.shape) != len(ours.shape) or _are_apart(other, ours):
            raise UsageError(
                f"input {ours.name!r}: {reference.shown} takes {other.words}, {candidate.shown} {ours.words}",
                hint="Models can only be compared at equal input sizes: export one of them with these dimensions "
                "dynamic, or with equal sizes.",
            )
        for key, size in zip(ours.keys, other.shape, strict=True):
            if isinstance(key, str) and isinstance(size, int):
                sizes.setdefault(key, size)
    if not sizes or run.input_data is not None:
        return {}, ()
    requested = sizes_by_key(inputs, run.sizes)
    for key, size in sizes.items():
        if requested.get(key, size) != size:
            raise UsageError(
                f"--shape-config: {key} {requested[key]}, and {reference.shown} takes {size} only",
                hint="Omit this size: the fixed one is used.",
            )
    words = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return sizes, (f"fixed sizes of {reference.shown}: {words}",)


def _are_apart(left: GraphInput, right: GraphInput) -> bool:
    pairs = zip(left.shape, right.shape, strict=True)
    return any(isinstance(one, int) and isinstance(other, int) and one != other for one, other in pairs)


def refuse_no_tree(side: OnnxSide) -> None:
    """Refuse a file in which nothing says what its modules are.

    Raises:
        UsageError: names it.
    """
    if not side.boundaries:
        raise UsageError(
            f"--by-module: {side.shown} has no module information for its nodes",
            hint="Transfer the tags of its source file with winml retag, or compare without --by-module.",
        )


def refuse_no_module(reference: Side, candidate: Side, matched: Sequence[MatchedBoundary]) -> None:
    """Refuse two models that have no module in common.

    Raises:
        UsageError: one has no modules, or none is on both sides.
    """
    for side in (reference, candidate):
        if isinstance(side, OnnxSide):
            refuse_no_tree(side)
    if any(item.outputs for item in matched if not item.is_root):
        return
    if isinstance(reference, OnnxSide) and isinstance(candidate, OnnxSide):
        if reference.boundaries.keys() & candidate.boundaries.keys():
            return
    elif all(item.is_root for item in matched):
        return
    raise UsageError(
        f"--by-module: {reference.shown} and {candidate.shown} have no module in common",
        hint="Compare two variants of one model, or omit --by-module.",
    )


def refuse_random_outputs(pair: SidePair, worst: OutputFidelity, tolerance: float) -> None:
    """Refuse a model that answers otherwise each time; only where answers differ it is run once more.

    Raises:
        UsageError: names the model, and in a file the nodes that draw.
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
            drawn = f": {', '.join(nodes[:_DISPLAYED_NODES])}" if nodes else ", or keeps state between calls"
            raise UsageError(
                f"{side.shown} returns different outputs for the same inputs: it generates random numbers{drawn}",
                hint="Compare deterministic models: disable dropout, or make the noise an input.",
            )


_FEW = 0.5
"""Chosen: other forms of a model, such as optimized and quantized files, keep all modules in their metadata. A tree of
node names also holds modules of torch.nn, so the side with fewer modules is the one to ask."""


def few_shared_notes(reference: Side, candidate: Side) -> tuple[str, ...]:
    """Return one sentence where the side with fewer modules has less than half of them in common with the other.

    A PyTorch model beside a file has modules that do not run, which do not count.

    Args:
        reference: What is right.
        candidate: What is compared with it.
    """
    sides = (reference, candidate)
    counted: tuple[Side, ...] = tuple(side for side in sides if isinstance(side, OnnxSide)) or sides
    numbers = [len(side.module_classes) for side in counted]
    shared = _shared(reference.module_classes, candidate.module_classes)
    # Nobody knows the modules of a file without tags and scopes.
    if not all(numbers) or shared >= _FEW * min(numbers):
        return ()
    counts = ", ".join(f"{shared} of {number} of {side.shown}" for side, number in zip(counted, numbers, strict=True))
    meaning = "These seem to be different models, not two variants of one, so the output differences may be meaningless"
    return (
        f"The models have few modules in common: {counts}. {meaning}. Compare their quality on a task with winml eval.",
    )


def _shared(left: Mapping[str, str], right: Mapping[str, str]) -> int:
    """Return how many modules have one path, and no other class."""
    common = left.keys() & right.keys()
    return sum(left[path] == right[path] or not (left[path] and right[path]) for path in common)


def folder_of_processors(
    models: Sequence[Path | ModelRequest | nn.Module], request: DataSetRequest | None
) -> Path | None:
    """Return the folder of the first model that has something beside it to make arrays with.

    Args:
        models: What is compared.
        request: The data set whose samples are made arrays; None: nobody asks for one.

    Raises:
        UsageError: a data set is asked for, and none of the models lies in a folder.
    """
    named = [model for model in models if isinstance(model, (Path, ModelRequest))]
    folders = [folder for model in named if (folder := processor_folder(model)) is not None]
    if not folders and request is not None:
        raise UsageError(
            f"{request.words}: samples require a tokenizer or image processor, and neither model is in a folder",
            hint="Pass inputs in an .npz file.",
        )
    return next((folder for folder in folders if processor_files(folder)), next(iter(folders), None))


def value_files(path: Path) -> list[Path]:
    """Return the files of a folder that hold values, in their order; of a file, itself.

    Raises:
        UsageError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.npz")):
        return files
    raise UsageError(
        f"--input-data {path}: no .npz file in this folder", hint="Pass an .npz file, or a folder of .npz files."
    )
