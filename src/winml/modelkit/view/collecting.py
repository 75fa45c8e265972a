"""Collection of the data of a page: structure and known numbers of one or two models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.manifest_records import StageRecord, find_manifest
from winml.modelkit.errors import InputError, UsageError, spell
from winml.modelkit.file_names import ONLY_PART, SIDECAR_SUFFIX
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import read_part_description
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS
from winml.modelkit.view.histograms import Histogram, weight_histograms
from winml.modelkit.view.known import (
    PLACEMENT,
    EarlierResult,
    KnownFiles,
    Measure,
    file_measures,
    read_results,
    results_beside,
)
from winml.modelkit.view.pairing import Pairing
from winml.modelkit.view.records import KnownNumbers, ModelPage, ViewedModel, ViewedPart
from winml.modelkit.view.structure import (
    GraphFile,
    ModuleLevel,
    TemplateStore,
    TemplateWriter,
    build_checkpoint_levels,
    build_levels,
    read_graph_file,
)
from winml.modelkit.view.titles import BITS, CHANGE, CLASS, PARAMETERS, STRUCTURE
from winml.modelkit.words import printable, size_words

Sides = Mapping[str, Mapping[str, Path] | ModelRequest]
"""Name of a model → its parts with their files, or the request of a checkpoint."""
MeasureMissing = Callable[[Sequence[str], Sequence[set[str]], Sequence[EarlierResult]], list[EarlierResult]]
"""Function from the names of models, the fingerprints of their files and the known results to further results."""


@dataclass(frozen=True)
class ViewedGraph:
    """One part of a model with its modules."""

    name: str
    file: GraphFile | None
    """None for a checkpoint before its export."""
    root: ModuleLevel
    measures: tuple[Measure, ...]
    tree_source: str
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Weight → distribution of its values; empty if not requested."""


@dataclass(frozen=True)
class ViewedSide:
    """One model of a page."""

    name: str
    parts: Sequence[ViewedGraph]
    verdicts: tuple[str, ...]
    """Sentences on the model as a whole, from earlier runs."""
    notes: tuple[str, ...] = ()
    """Limits of the view, and of its comparison with the first model."""
    build: Mapping[str, str] = field(default_factory=dict)
    """Stage of the build → nodes, size and quality of its result."""

    @property
    def measures(self) -> dict[str, Measure]:
        """Key → measure of any part."""
        return {measure.key: measure for viewed in self.parts for measure in viewed.measures}


def collect_page(
    sides: Sides,
    named_results: Sequence[Path] = (),
    measure_missing: MeasureMissing | None = None,
    *,
    histograms: bool = False,
    width: str = PARAMETERS,
    colour: str | None = None,
) -> ModelPage:
    """Collect the data of the page of one or two models.

    Args:
        sides: The models.
        named_results: JSON of earlier runs. Results in the folders of the models are found without being named.
        measure_missing: Measures what no earlier run has measured; `None`: nothing is measured.
        histograms: Read the weights, for the distribution of the values of each.
        width: Title of the number that is the width of the modules at first.
        colour: Title of the number or text that is their colour at first; `None`: the change of two models, or the
            class.

    Raises:
        UsageError: a named result belongs to another model, two models share no part, or a title is unknown.
        InputError: a file is damaged or no ONNX file.
        StageError: a model cannot be run.
    """
    files = _files_of(sides)
    results = [result for path in named_results for result in read_results(path)]
    known = KnownFiles(sides, files)
    known.refuse_foreign(results)
    results = [*results_beside(files), *results]
    if measure_missing is not None:
        side_prints = [{known.prints[path] for path in _files_of({name: source})} for name, source in sides.items()]
        usable = [result for path in files for result in known.results_of(path, results)]
        results += measure_missing([*sides], side_prints, usable)
    viewed_sides = [
        _read_checkpoint(name, source)
        if isinstance(source, ModelRequest)
        else _read_files(name, source, known, results)
        for name, source in sides.items()
    ]
    if histograms:
        viewed_sides = [_with_histograms(side) for side in viewed_sides]
    store = TemplateStore()
    has_graphs = all(viewed.file for side in viewed_sides for viewed in side.parts)
    pairing = _pair_sides(*viewed_sides) if len(viewed_sides) > 1 and has_graphs else None
    models = [_model_data(side, store, number, pairing) for number, side in enumerate(viewed_sides)]
    colour = colour or (CLASS if pairing is None else CHANGE)
    has_macs = all(viewed.root.total.macs is not None for side in viewed_sides for viewed in side.parts)
    # A checkpoint has no graph.
    structure = [PARAMETERS] if not files else STRUCTURE if has_macs else STRUCTURE[:-1]
    _refuse_unknown_titles(models, width, colour, structure)
    data = {"texts": store.texts, "templates": store.templates, "models": models, "width": width, "colour": colour}
    if pairing is None:
        return ModelPage(tuple(map(_viewed_model, viewed_sides)), None, _printable_data(data))
    data |= pairing.as_data()
    viewed_sides[1] = replace(viewed_sides[1], notes=(*viewed_sides[1].notes, *pairing.notes))
    return ModelPage(tuple(map(_viewed_model, viewed_sides)), pairing.differing, _printable_data(data))


def _refuse_unknown_titles(
    models: Sequence[Mapping[str, Any]], width: str, colour: str, structure: Sequence[str]
) -> None:
    """Refuse a width or colour that no model has.

    Args:
        models: Data of the models.
        width: Title of the width.
        colour: Title of the colour.
        structure: Titles of the numbers that the files have.

    Raises:
        UsageError: lists the titles.
    """
    measures = [measure for model in models for measure in model["measures"]]
    widths = [*structure, *(measure["title"] for measure in measures if measure["isSize"])]
    bits = [BITS] if len(structure) > 1 else []
    colours = [CLASS, *structure, *bits, *(measure["title"] for measure in measures)]
    for option, title, known in (("width", width, widths), ("colour", colour, colours)):
        if title not in known:
            raise UsageError(
                f"{spell(option)}: no module has a value of {title!r}",
                hint=f"Known are {', '.join(dict.fromkeys(known))}. {spell('with')} names a result of an earlier run.",
            )


def _files_of(sides: Sides) -> list[Path]:
    """Return the ONNX files of models."""
    return [path for source in sides.values() if not isinstance(source, ModelRequest) for path in source.values()]


def _read_checkpoint(name: str, request: ModelRequest) -> ViewedSide:
    """Read the module tree of a checkpoint as an export would build it.

    Raises:
        InputError: the checkpoint is damaged, or its forward fails.
    """
    from winml.modelkit.inspect.model_inspection import inspect_checkpoint

    inspection = inspect_checkpoint(request, hierarchy=True)
    if inspection.tree is None:
        raise InputError(f"{name}: the modules of the checkpoint cannot be determined", hint="Export it first.")
    root = build_checkpoint_levels(inspection.tree)
    note = f"{name} is shown before its export: modules and parameters without a graph"
    return ViewedSide(
        name, [ViewedGraph(ONLY_PART, None, root, (), inspection.tree_source)], (), (note, *inspection.notes)
    )


def _read_files(
    name: str, parts: Mapping[str, Path], known: KnownFiles, results: Sequence[EarlierResult]
) -> ViewedSide:
    """Read the files of a model with the numbers of its modules; later results replace earlier ones."""
    graphs: list[ViewedGraph] = []
    verdicts: list[str] = []
    unknown: list[str] = []
    for part, path in parts.items():
        file = read_graph_file(path)
        own_results = known.results_of(path, results)
        unknown += known.notes(path, results)
        measures = {measure.key: measure for measure in file_measures(file)}
        measures |= {measure.key: measure for result in own_results for measure in result.measures}
        verdicts += filter(None, (known.verdict(name, result) for result in own_results))
        graphs.append(ViewedGraph(part, file, build_levels(file), tuple(measures.values()), file.tree.source))
    notes = [note for viewed in graphs if viewed.file for note in (*viewed.file.notes, *_tree_notes(viewed.file))]
    notes = [*notes, *dict.fromkeys(unknown)]
    return ViewedSide(name, graphs, tuple(dict.fromkeys(verdicts)), tuple(notes), dict(_build_stages(parts)))


def _build_stages(parts: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield the stages of the build of some files with their results, from the manifest beside the files."""
    for name, path in parts.items():
        for folder in path.parents[:_LAYOUT_DEPTH]:
            manifest = find_manifest(folder)
            built = manifest.parts if manifest else ()
            for part in (part for part in built if part.model and folder / part.model[0].name == path):
                if part.model[0].size_bytes == path.stat().st_size:
                    prefix = f"{name} " if len(parts) > 1 else ""
                    yield from ((f"{prefix}{stage.name}", _stage_words(stage)) for stage in part.stages if stage.files)


_LAYOUT_DEPTH = 2
"""Specified: layouts place the files of a model in the folder of the build, or in a folder inside it."""


def _stage_words(stage: StageRecord) -> str:
    """Return nodes, size and quality of the result of a stage."""
    size = size_words(sum(file.size_bytes for file in stage.files if not file.name.endswith(SIDECAR_SUFFIX)))
    return ", ".join(filter(None, (f"{stage.nodes} nodes", size, stage.summary)))


def _with_histograms(side: ViewedSide) -> ViewedSide:
    """Return a model with the distributions of its weights."""
    parts = [
        replace(viewed, histograms=weight_histograms(viewed.file.path)) if viewed.file else viewed
        for viewed in side.parts
    ]
    return replace(side, parts=parts)


def _pair_sides(before: ViewedSide, after: ViewedSide) -> Pairing:
    """Compare the parts that two models share; the only part of a model is compared with that of the other.

    Raises:
        UsageError: the models share no part.
    """
    others = {viewed.name: viewed for viewed in after.parts}
    pairs = [(viewed, others[viewed.name]) for viewed in before.parts if viewed.name in others]
    if not pairs:
        names = [", ".join(viewed.name for viewed in side.parts) for side in (before, after)]
        raise UsageError(
            f"the models share no part: {before.name} has {names[0]}, {after.name} has {names[1]}",
            hint="Specify two variants of one model.",
        )
    pairing = Pairing()
    for left, right in pairs:
        assert left.file is not None  # both models are files
        assert right.file is not None
        pairing.add(left.name, (left.file, left.root), (right.file, right.root))
        places = [measure for viewed in (left, right) for measure in viewed.measures if measure.key == PLACEMENT]
        if len(places) == 2:
            pairing.add_placements(left.name, right.root, *places)
    return pairing


def _model_data(side: ViewedSide, store: TemplateStore, number: int, pairing: Pairing | None) -> dict[str, Any]:
    """Return one model of the page: its parts, the tensors between them, and its known numbers."""
    feeds = []
    if len(side.parts) > 1:
        for viewed in side.parts:
            part = read_part_description(viewed.file.path) if viewed.file else None
            feeds += [[viewed.name, feed.output, feed.part, feed.input] for feed in (part.feeds if part else ())]
    measures = [measure.as_data() for measure in side.measures.values()]
    if pairing is not None:
        measures.append(Measure(CHANGE, CHANGE, {}, kind="text").as_data())
    return {
        "name": side.name,
        "file": side.name,
        "parts": [_part_data(viewed, store, number, pairing) for viewed in side.parts],
        "feeds": feeds,
        "measures": measures,
    }


def _part_data(viewed: ViewedGraph, store: TemplateStore, number: int, pairing: Pairing | None) -> dict[str, Any]:
    """Return one part: its template, the names of inputs and outputs, and the value of each module by measure."""
    root = viewed.root
    levels = list(root.walk())
    values: dict[str, list[Any]] = {}
    for measure in viewed.measures:
        values[measure.key] = [
            None if level.is_group else measure.value(level.address.tag, level.address.path) for level in levels
        ]
    if pairing is not None:
        values["change"] = [pairing.status(number, viewed.name, level) for level in levels]
    return {
        "name": viewed.name,
        "file": str(viewed.file.path) if viewed.file else "",
        "isQuantized": viewed.file is not None
        and any(node.proto.op_type in QUANTIZED_OPERATORS for node in viewed.file.contents.nodes),
        "label": root.label,
        "path": root.address.path,
        "tag": root.address.tag,
        "inputs": list(root.inputs),
        "outputs": list(root.outputs),
        "template": TemplateWriter(viewed.file, store).add(root),
        "measures": values,
        "histograms": viewed.histograms,
    }


def _viewed_model(side: ViewedSide) -> ViewedModel:
    parts = tuple(
        ViewedPart(
            viewed.name,
            viewed.file.path if viewed.file else None,
            viewed.tree_source,
            sum(not level.is_group for level in viewed.root.walk()),
            viewed.root.total,
        )
        for viewed in side.parts
    )
    known = [KnownNumbers(measure.title, measure.source, len(measure.values)) for measure in side.measures.values()]
    return ViewedModel(side.name, parts, tuple(known), side.build, (*side.verdicts, *side.notes))


def _tree_notes(file: GraphFile) -> Iterable[str]:
    """Yield a note on modules that do not come from tags."""
    if file.tree.source == "none":
        yield f"{file.path.name} has no tags and no scopes: the graph is shown without modules"
    elif file.tree.source != "winml tags":
        yield f"{file.path.name} has no tags of winml: the modules come from {file.tree.source}"


def _printable_data(value: Any) -> Any:
    """Escape the unprintable characters in all texts of the data."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable_data(key): _printable_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable_data(entry) for entry in value]
    return value
