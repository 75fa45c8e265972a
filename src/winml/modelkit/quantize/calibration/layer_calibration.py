"""Layer-by-layer solution of weight blocks on samples: GPTQ, AWQ, or per module the algorithm with the least error.

The graph is cut into layers. Each layer runs on the outputs of the quantized layers before it; only sums over the
inputs of its products are stored. Then its weights are quantized, and the layer runs again with the quantized weights.
Values between layers and solved blocks are stored on disk: memory holds one layer and the sums of its inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import QuantizeError, StageError, opt
from winml.modelkit.onnx.cutting import Cut, Cutter, cut_model
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import MASK
from winml.modelkit.ort.graph_inputs import described_inputs
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session, onnxruntime_version
from winml.modelkit.progress import count_progress
from winml.modelkit.quantize.calibration.calibration_data import Calibration
from winml.modelkit.quantize.declared_options import Algorithm
from winml.modelkit.quantize.engines.block_quantizers import (
    BlockFormat,
    Blocks,
    InputStatistics,
    SolvedWeight,
    awq_scale,
    dequantized_tensor,
    gptq_blocks,
    quantize_blocks,
    relative_error,
    unpack_blocks,
)
from winml.modelkit.quantize.engines.integer_weights import make_non_finite_error
from winml.modelkit.quantize.engines.weight_only import BlockWeight, operand_of
from winml.modelkit.quantize.planning import WeightKey
from winml.modelkit.quantize.unfinished_work import StoredArrays, digest_of, graph_digest
from winml.modelkit.tags.tagging import read_tag
from winml.modelkit.version import __version__

_LAYER_BYTES = 500_000_000
"""Maximum weight of a layer in bytes of float32, unless one product has more. Chosen: half a layer of a 7 B decoder;
with the sums of its inputs and a session, memory stays below 3 GB."""
FEWEST_LAYERS = 24
"""Chosen: small models are cut too, so that later layers run on the outputs of quantized layers."""
_JUDGING = 4
"""Every n-th sample is withheld from the algorithms if several algorithms are compared by their errors on these
samples. Chosen: three quarters of the samples give nearly the same blocks."""


@dataclass(frozen=True)
class LayerCalibration:
    """Solver that runs a model on samples, layer by layer."""

    calibration: Calibration
    folder: Path
    """Folder of the blocks and of resumable results; it must exist as long as the blocks are read."""
    resumed: list[tuple[int, int]] = field(default_factory=list, compare=False)
    """(finished layers, layers of the model) of each resumed walk."""
    _solved_weights: dict[tuple[WeightKey, BlockFormat, Algorithm], SolvedWeight] = field(
        default_factory=dict, compare=False
    )

    def as_record(self) -> dict[str, object]:
        """Origin of the blocks, JSON-ready."""
        return self.calibration.as_record()

    def solve(self, model: ir.Model, weights: Sequence[BlockWeight]) -> dict[WeightKey, SolvedWeight]:
        """Return the blocks of weights; blocks that were solved for an earlier graph of the file are reused.

        Raises:
            UsageError, InputError, QuantizeError: as :meth:`_search_algorithms`.
        """
        solved = self._solved_weights
        if missing := [weight for weight in weights if weight.request not in solved]:
            searched = self._search_algorithms(model, missing)
            solved.update({weight.request: searched[weight.key] for weight in missing})
        return {weight.key: solved[weight.request] for weight in weights}

    def find_solved(
        self, names: Collection[str], bits: int, block_size: int, algorithm: Algorithm
    ) -> list[SolvedWeight]:
        """Blocks solved for weights of these names with this format and algorithm."""
        return [
            solved
            for (key, fmt, requested), solved in self._solved_weights.items()
            if key.name in names and (fmt.bits, fmt.block_size, requested) == (bits, block_size, algorithm)
        ]

    def _search_algorithms(self, model: ir.Model, weights: Sequence[BlockWeight]) -> dict[WeightKey, SolvedWeight]:
        """Solve the blocks of a model's weights; the model is not changed.

        Layers finished by an interrupted run with the same graph, weights, formats and samples are not run again.

        Raises:
            UsageError: data does not fit the inputs.
            InputError: a file is damaged.
            QuantizeError: the model does not run on the data, or an input of a product is NaN or infinite.
        """
        request = {
            "graph": graph_digest(model),
            "weights": [[*weight.key, *astuple(weight.block_format), weight.algorithm] for weight in weights],
            "winml": __version__,
            "onnxruntime": onnxruntime_version(),
        }
        walk = _Walk(self.folder / digest_of(request), request, weights)
        self._take_samples(model, walk.values)
        return self._solve_layers(model, weights, walk)

    def _solve_layers(
        self, model: ir.Model, weights: Sequence[BlockWeight], walk: _Walk
    ) -> dict[WeightKey, SolvedWeight]:
        """Solve the weights of each layer in graph order, and run the layer with the solved weights."""
        cutter = Cutter(model)
        values = walk.values
        layers = _cut_layers(model, cutter, weights)
        finished, solved = walk.resume()
        if finished:
            self.resumed.append((finished, len(layers)))
        for number, layer in enumerate(layers, 1):
            later = {value.name or "" for later in layers[number:] for value in later.cut.inputs}
            if number > finished:
                run = _LayerRun(model, layer, values)
                new = [weight for weight in weights if weight.products[0] in layer.members and weight.key not in solved]
                if new:
                    solved |= _LayerSolver(walk).solve(new, run)
                if number < len(layers):
                    run.advance({weight.key: solved[weight.key] for weight in weights if weight.key in solved})
                run.release()
                walk.keep(number, later)
            values.retain(later)  # after the remaining values are recorded
            count_progress(number, len(layers), f"layer {number} of {len(layers)}", notifies_listeners=True)
        return solved

    def _take_samples(self, model: ir.Model, values: _HeldValues) -> None:
        """Store the calibration samples as values of the graph inputs, with their masks."""
        inputs = _describe_inputs(model)
        for number, sample in enumerate(self.calibration.read_samples(inputs)):
            for name, array in sample.items():
                values.put(name, number, array)
            mask = sample.get(MASK)
            if mask is not None and mask.ndim == 2 and not mask.all():
                values.masks[number] = mask > 0
            values.count = number + 1


def _describe_inputs(model: ir.Model) -> tuple[InputTensorSpec, ...]:
    """Return the inputs of a graph as an open session would describe them."""
    values = [value for value in model.graph.inputs if not value.is_initializer()]
    types = {}
    shapes: dict[str, list[int | str | None] | None] = {}
    for value in values:
        element = "float" if value.dtype is None else value.dtype.name.lower()
        types[value.name or ""] = f"tensor({element})"
        sizes = value.shape
        shapes[value.name or ""] = (
            None if sizes is None else [size if isinstance(size, int) else size.value for size in sizes]
        )
    return described_inputs(types, shapes, model.metadata_props)


class _HeldValues:
    """Values of each sample on disk, by name."""

    def __init__(self, folder: Path) -> None:
        self.arrays = StoredArrays(folder)
        self.count = 0
        """Number of samples."""
        self.masks: dict[int, Array] = {}
        """Sample number → attention mask of a sample with padding: True for tokens."""

    def put(self, name: str, sample: int, array: Array) -> None:
        """Store a value of a sample."""
        self.arrays.put(_make_stored_name(name, sample), array)

    def read(self, names: Iterable[str], sample: int) -> dict[str, Array]:
        """Read values of a sample."""
        return {name: self.arrays.read(_make_stored_name(name, sample)) for name in names}

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Stored name → digest of the stored values."""
        stored = (_make_stored_name(name, sample) for name in names for sample in range(self.count))
        return {name: self.arrays.digests[name] for name in stored if name in self.arrays.digests}

    def retain(self, names: Iterable[str]) -> None:
        """Remove all values except the named ones."""
        for stored in self.arrays.digests.keys() - self.digests(names).keys():
            self.arrays.remove(stored)


def _make_stored_name(name: str, sample: int) -> str:
    """Return the file name of a value of one sample."""
    return f"{digest_of(name)}_{sample}"


class _Walk:
    """Solved blocks, and the values read by later layers."""

    def __init__(self, folder: Path, request: Mapping[str, object], weights: Sequence[BlockWeight]) -> None:
        self.values = _HeldValues(folder / "values")
        self._blocks = StoredArrays(folder / "blocks")
        self._folder, self._request, self._weights = folder, request, weights
        self._records: dict[int, dict[str, Any]] = {}
        """Position of a weight → record of its blocks and algorithm."""
        self._scales: dict[int, str] = {}
        """Identity of a scale → stored name; weights with the same inputs share a scale."""
        self._state: ResumableResults | None = None

    def hold(
        self,
        weight: BlockWeight,
        algorithm: str,
        fmt: BlockFormat,
        blocks: Blocks,
        scale: Array | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> SolvedWeight:
        """Store the blocks of a weight on disk."""
        position = self._weights.index(weight)
        for part, array in blocks._asdict().items():
            if array is not None:
                self._blocks.put(f"{position}_{part}", array)
        if scale is not None and id(scale) not in self._scales:
            self._scales[id(scale)] = name = f"{position}_input_scale"
            self._blocks.put(name, scale)
        stored = None if scale is None else self._scales[id(scale)]
        record = {"algorithm": algorithm, "searched_by": fmt.algorithm, "scale": stored, "errors": dict(errors or {})}
        self._records[position] = record
        return self._make_solved_weight(position, fmt, scale)

    def keep(self, finished: int, later: Collection[str]) -> None:
        """Record the finished layers and the values that later layers read."""
        assert self._state is not None  # set by resume()
        self._state.write(
            {
                "finished": finished,
                "values": self.values.digests(later),
                "blocks": self._blocks.digests,
                "weights": self._records,
            }
        )

    def resume(self) -> tuple[int, dict[WeightKey, SolvedWeight]]:
        """Return the number of layers finished by an interrupted run on these samples, and their blocks.

        Damaged results are ignored: ``0, {}``.
        """
        samples = digest_of(self.values.arrays.digests)
        self._state = ResumableResults(self._folder / "state.json", {**self._request, "samples": samples}, 2)
        record = self._state.read(dict)
        if record is None or isinstance(record, OtherRequest):
            return 0, {}
        try:
            return self._restore_layers(record)
        except (ValueError, LookupError, TypeError, AttributeError):
            self._records.clear()
            return 0, {}

    def _restore_layers(self, record: Mapping[str, Any]) -> tuple[int, dict[WeightKey, SolvedWeight]]:
        """Restore the state of the walk from a record; return the number of finished layers and the solved weights.

        The state is the records of weights, the digests of the stored arrays, and the names of the input scales.

        Raises:
            ValueError: an array is damaged.
        """
        if not self.values.arrays.holds(record["values"]) or not self._blocks.holds(record["blocks"]):
            raise ValueError("an array is damaged")
        scales = {name: self._blocks.read(name) for name in record["blocks"] if name.endswith("_input_scale")}
        solved = {}
        for position, weight_record in (
            (int(position), dict(weight_record)) for position, weight_record in record["weights"].items()
        ):
            weight = self._weights[position]
            fmt = replace(weight.block_format, algorithm=weight_record["searched_by"])
            self._records[position] = weight_record
            scale = None if weight_record["scale"] is None else scales[weight_record["scale"]]
            solved[weight.key] = self._make_solved_weight(position, fmt, scale)
        self.values.arrays.digests |= record["values"]
        self._blocks.digests = dict(record["blocks"])
        self._scales = {id(array): name for name, array in scales.items()}
        return int(record["finished"]), solved

    def _make_solved_weight(self, position: int, fmt: BlockFormat, scale: Array | None) -> SolvedWeight:
        """Create a solved weight whose blocks are read from disk on demand."""
        names = {part: f"{position}_{part}" for part in ("packed", "scales", "zero_points")}

        def read() -> Blocks:
            parts = {part: self._blocks.read(name) for part, name in names.items() if name in self._blocks.digests}
            return Blocks(parts["packed"], parts["scales"], parts.get("zero_points"))

        record = self._records[position]
        return SolvedWeight(record["algorithm"], fmt, read, scale, record["errors"])


@dataclass(frozen=True, eq=False)
class _Layer:
    cut: Cut
    members: frozenset[ir.Node]


def _cut_layers(model: ir.Model, cutter: Cutter, weights: Sequence[BlockWeight]) -> list[_Layer]:
    """Cut the graph at positions crossed by few values, after products of at most ``_LAYER_BYTES`` of weights.

    Nodes after the last product are omitted.
    """
    nodes = list(model.graph)
    position = {node: offset for offset, node in enumerate(nodes)}
    groups: defaultdict[tuple[ir.Value, ...], list[BlockWeight]] = defaultdict(list)
    for weight in weights:
        groups[weight.inputs].append(weight)
    bytes_at: defaultdict[int, int] = defaultdict(int)
    inside: set[int] = set()  # positions between weights with the same inputs, which are solved together
    for group in groups.values():
        offsets = sorted(position[weight.products[0]] for weight in group)
        bytes_at[offsets[-1]] += sum(4 * weight.matrix.depth * weight.matrix.width for weight in group)
        inside.update(range(offsets[0], offsets[-1]))
    last = max(position[node] for weight in weights for node in weight.products)
    crossing = cutter.crossing()
    limit = min(_LAYER_BYTES, sum(bytes_at.values()) // FEWEST_LAYERS)
    layers, start, layer_bytes = [], 0, 0
    ends = sorted(bytes_at)
    for index, offset in enumerate(ends):
        layer_bytes += bytes_at[offset]
        stop = last
        if offset != ends[-1]:
            following = ends[index + 1]
            offsets = [end for end in range(offset, following) if end not in inside]
            if not offsets or layer_bytes + bytes_at[following] <= limit:
                continue
            # Between this product and the next, take the first position crossed by the fewest values.
            stop = min(offsets, key=lambda end: (crossing[end], end))
        members = nodes[start : stop + 1]
        layers.append(_Layer(cutter.cut_exactly(members), frozenset(members)))
        start, layer_bytes = stop + 1, 0
    return layers


_LAYER = "the layer"


class _LayerRun:
    """Runs of one layer on the samples."""

    def __init__(self, model: ir.Model, layer: _Layer, values: _HeldValues) -> None:
        self._layer, self._values = layer, values
        self._graph = cut_model(model, layer.cut)
        self._sessions = GraphSessions(self._graph)

    def observe(self, names: Sequence[str]) -> Iterator[Arrays]:
        """Yield values of the layer for each sample: name → array."""
        values_by_name = {value.name: value for node in self._graph.graph for value in node.outputs}
        layer_inputs = [
            name for name in names if name not in values_by_name
        ]  # inputs of the layer are not computed again
        with _compute_outputs(
            self._graph, [values_by_name[name] for name in names if name in values_by_name]
        ) as computed:
            session = self._open_session() if computed else None
            for sample in range(self._values.count):
                feeds = self._read_feeds(sample)
                yield {
                    **{name: feeds[name] for name in layer_inputs},
                    **(self._run_layer(session, feeds, computed) if session is not None else {}),
                }

    def advance(self, solved: Mapping[WeightKey, SolvedWeight]) -> None:
        """Run the layer with the solved weights and store its outputs."""
        self.release()  # some weights are replaced
        initializers = self._graph.graph.initializers
        for key, solved_weight in solved.items():
            value = initializers.get(key.name)
            if value is not None and value.const_value is not None:
                value.const_value = dequantized_tensor(
                    value.const_value, solved_weight, is_transposed=key.is_transposed
                )
        names = [value.name or "" for value in self._layer.cut.outputs]
        session = self._open_session()
        for sample in range(self._values.count):
            for name, array in self._run_layer(session, self._read_feeds(sample), names).items():
                self._values.put(name, sample, array)

    def mask(self, sample: int) -> Array | None:
        """Mask of the tokens of a sample; ``None`` without padding or mask."""
        return self._values.masks.get(sample)

    def release(self) -> None:
        """Unmap the weights of the layer from memory; they are mapped again when read."""
        for value in self._graph.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                with contextlib.suppress(BufferError):  # a reader holds the buffer
                    value.const_value.release()

    def _read_feeds(self, sample: int) -> dict[str, Array]:
        """Read the inputs of the layer for one sample."""
        return self._values.read([value.name or "" for value in self._layer.cut.inputs], sample)

    def _open_session(self) -> Session:
        """Open a session of the layer with its present weights."""
        return self._sessions.open(self._graph, name=_LAYER, prepack=False)

    def _run_layer(self, session: Session, feeds: Arrays, names: Sequence[str]) -> dict[str, Array]:
        """Run the layer on one sample.

        Raises:
            QuantizeError: the layer cannot run on the calibration data.
        """
        try:
            return session.run(feeds, names)
        except StageError as error:
            reason = error.message.partition(f"{_LAYER}: ")[2] or error.message
            raise QuantizeError(
                f"the model cannot run on the calibration data: {reason}",
                hint=f"Pass values that are valid for the model with {opt.calibration_data}.",
            ) from error


@contextlib.contextmanager
def _compute_outputs(model: ir.Model, values: Sequence[ir.Value]) -> Iterator[list[str]]:
    """Set the outputs of a graph to some of its values until the block ends; yield the output names."""
    outputs = model.graph.outputs
    before = list(outputs)
    outputs[:] = values
    try:
        yield [value.name or "" for value in values]
    finally:
        outputs[:] = before


_CANDIDATES = ("rtn", "k_quant", "gptq", "awq", "awq+gptq")
"""Candidates of ``auto``; all take the same bytes. Zero points of hqq take four bytes and are left to a budget."""


class _Candidate(NamedTuple):
    algorithm: str
    blocks: Sequence[Blocks]
    """Aligned with the weights of a group."""
    block_formats: Sequence[BlockFormat]
    scale: Array | None
    errors: Sequence[float]


@dataclass
class _Statistics:
    """Sums over one input: of the samples used for solving, and of the samples used for judging."""

    fitted: InputStatistics
    judged: InputStatistics


class _LayerSolver:
    """Solver for the weights of one layer."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        # With few samples, withheld samples would be missed.
        self._has_many_samples = walk.values.count >= 2 * _JUDGING

    def solve(self, weights: Sequence[BlockWeight], run: _LayerRun) -> dict[WeightKey, SolvedWeight]:
        """Solve the blocks of weights, in groups of weights with the same inputs."""
        groups: defaultdict[tuple[str, ...], list[BlockWeight]] = defaultdict(list)
        for weight in weights:
            groups[tuple(value.name or "" for value in weight.inputs)].append(weight)
        statistics = self._measure_inputs(groups, run)
        solved: dict[WeightKey, SolvedWeight] = {}
        for names, group in groups.items():
            sums = statistics.pop(names)
            algorithms = list(dict.fromkeys(weight.algorithm for weight in group))
            for algorithm in algorithms:
                alike = [weight for weight in group if weight.algorithm == algorithm]
                # GPTQ consumes the sums.
                used = sums if algorithm == algorithms[-1] else replace(sums, fitted=_copy_statistics(sums.fitted))
                solved |= self._solve_group(algorithm, alike, used, shares_input=len(names) == 1)
        return solved

    def _measure_inputs(
        self, groups: Mapping[tuple[str, ...], Sequence[BlockWeight]], run: _LayerRun
    ) -> dict[tuple[str, ...], _Statistics]:
        """Sum the inputs of each group of weights over the samples.

        Raises:
            QuantizeError: an input is NaN or infinite.
        """
        statistics = {}
        for names, group in groups.items():
            depth = group[0].matrix.depth
            fitted = InputStatistics.of_depth(depth)
            judges = self._has_many_samples and any(weight.algorithm == "auto" for weight in group)
            statistics[names] = _Statistics(fitted, InputStatistics.of_depth(depth) if judges else fitted)
        observed = list(dict.fromkeys(name for names in groups for name in names))
        for sample, arrays in enumerate(run.observe(observed)):
            for names, sums in statistics.items():
                is_judging = sums.judged is not sums.fitted and sample % _JUDGING == _JUDGING - 1
                for name in names:
                    if not np.isfinite(arrays[name]).all():
                        raise QuantizeError(
                            f"an input of {_weight_words(groups[names][0])} is NaN or infinite (sample {sample + 1} of "
                            "the calibration data)",
                            hint=f"Pass suitable data with {opt.calibration_data}, or {opt.exclude} the module.",
                        )
                    rows = _remove_padding(arrays[name], run.mask(sample))
                    (sums.judged if is_judging else sums.fitted).add(rows)
        return statistics

    def _solve_group(
        self, algorithm: Algorithm, group: Sequence[BlockWeight], sums: _Statistics, *, shares_input: bool
    ) -> dict[WeightKey, SolvedWeight]:
        """Solve the blocks of weights with the same inputs and the same algorithm."""
        if algorithm == "gptq":
            return self._solve_by_gptq(group, sums.fitted)
        matrices = [_read_matrix(weight) for weight in group]
        tried = list(self._iterate_candidates(algorithm, group, matrices, sums, shares_input=shares_input))
        # All inputs are divided or none, so that the scale can be folded into the preceding normalization.
        sets = [[trial for trial in tried if (trial.scale is None) == is_plain] for is_plain in (True, False)]
        best = min(
            ([min(trials, key=lambda trial: trial.errors[i]) for i in range(len(group))] for trials in sets if trials),
            key=lambda chosen: sum(trial.errors[i] for i, trial in enumerate(chosen)),
        )
        return {
            weight.key: self._walk.hold(
                weight,
                trial.algorithm,
                trial.block_formats[i],
                trial.blocks[i],
                trial.scale,
                {attempt.algorithm: attempt.errors[i] for attempt in tried},
            )
            for i, (weight, trial) in enumerate(zip(group, best, strict=True))
        }

    def _solve_by_gptq(
        self, group: Sequence[BlockWeight], statistics: InputStatistics
    ) -> dict[WeightKey, SolvedWeight]:
        """Solve the blocks of weights one at a time; the last weight consumes the sums, which avoids a copy."""
        solved = {}
        for weight in group:
            sums = statistics if weight is group[-1] else _copy_statistics(statistics)
            blocks = gptq_blocks(_read_matrix(weight), sums, weight.block_format)
            solved[weight.key] = self._walk.hold(weight, "gptq", weight.block_format, blocks)
        return solved

    @staticmethod
    def _iterate_candidates(
        requested: Algorithm,
        group: Sequence[BlockWeight],
        matrices: Sequence[Array],
        sums: _Statistics,
        *,
        shares_input: bool,
    ) -> Iterator[_Candidate]:
        """Yield the blocks of a group by each applicable algorithm, with their output errors."""
        formats = [weight.block_format for weight in group]
        algorithms = _CANDIDATES if requested == "auto" else (requested,)
        judged = sums.judged

        def candidate(
            algorithm: str, blocks: Sequence[Blocks], used: Sequence[BlockFormat], scale: Array | None
        ) -> Any:
            """Create a candidate with the output error of each weight."""
            errors = []
            for matrix, packed, fmt in zip(matrices, blocks, used, strict=True):
                rounded = unpack_blocks(packed, fmt, len(matrix))
                rounded = rounded if scale is None else rounded / scale[:, None]
                errors.append(relative_error(rounded - matrix, matrix, judged))
            return _Candidate(algorithm, blocks, used, scale, errors)

        def rounded(scale: Array | None, used: Sequence[BlockFormat]) -> list[Blocks]:
            """Round each weight to nearest, with its rows multiplied by a scale."""
            return [
                quantize_blocks(matrix if scale is None else matrix * scale[:, None], fmt)
                for matrix, fmt in zip(matrices, used, strict=True)
            ]

        def solved(scale: Array | None) -> list[Blocks]:
            """Solve each weight by GPTQ, with its rows multiplied by a scale."""
            fitted = sums.fitted if scale is None else sums.fitted.scaled(scale)
            return [
                gptq_blocks(matrix if scale is None else matrix * scale[:, None], _copy_statistics(fitted), fmt)
                for matrix, fmt in zip(matrices, formats, strict=True)
            ]

        if requested in ("rtn", "hqq"):
            yield candidate(requested, rounded(None, formats), formats, None)
            return
        if "rtn" in algorithms:
            yield candidate("rtn", rounded(None, formats), formats, None)
        if "k_quant" in algorithms and not any(fmt.is_symmetric for fmt in formats):
            searched = [replace(fmt, algorithm="k_quant") for fmt in formats]
            yield candidate("k_quant", rounded(None, searched), searched, None)
        if "gptq" in algorithms:
            yield candidate("gptq", solved(None), formats, None)
        if "awq" not in algorithms:
            return
        # A weight with several inputs, or with row lookups, has no input to divide.
        may_scale = shares_input and not any(_has_lookups(weight) for weight in group)
        scale = awq_scale(matrices, sums.fitted, formats) if may_scale else None
        if scale is not None or "rtn" not in algorithms:
            yield candidate("awq" if scale is not None else "rtn", rounded(scale, formats), formats, scale)
        if scale is not None and "awq+gptq" in algorithms:
            yield candidate("awq+gptq", solved(scale), formats, scale)


def _read_matrix(weight: BlockWeight) -> Array:
    """Return a weight as float32, depth × width.

    Raises:
        QuantizeError: a value is NaN or infinite.
    """
    matrix = weight.matrix.values()
    if not math.isfinite(float(np.abs(matrix).max(initial=0))):
        node = weight.products[0]
        tag = read_tag(node)
        fault = f"weight {weight.key.name} has values that are NaN or infinite"
        raise make_non_finite_error(fault, "" if tag is None else tag.tag, node.name or "")
    return matrix


def _copy_statistics(statistics: InputStatistics) -> InputStatistics:
    """Copy statistics, for an algorithm that consumes the Gram matrix."""
    return InputStatistics(statistics.gram.copy(), statistics.absolute, statistics.rows)


def _remove_padding(rows: Array, mask: Array | None) -> Array:
    """Drop the rows of padding tokens; values without a row per token are returned unchanged."""
    return rows if mask is None or rows.shape[:-1] != mask.shape else rows[mask]


def _has_lookups(weight: BlockWeight) -> bool:
    """Return True if rows of the weight are looked up too."""
    operand = operand_of(weight.products[0])
    assert operand is not None  # a product with few bits has a weight
    return any(reader.op_type == "Gather" for reader, _ in operand.value.uses())


def _weight_words(weight: BlockWeight) -> str:
    """Name a weight and its module, for messages."""
    tag = read_tag(weight.products[0])
    return f"weight {weight.key.name} of module {tag.tag if tag is not None else '(unknown)'}"
