"""Run of a written file in ONNX Runtime for comparison with PyTorch: whole, or in pieces.

A piece is a run of consecutive nodes of the file; values read by later pieces are kept. Memory holds the weights of one
piece at a time. ONNX Runtime opens each piece like any file: optimized, with the weight layout of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from torch import nn

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import (
    HALF_UNITS,
    OutputComparison,
    Rounding,
    compare_outputs,
    find_channel_beyond_rounding,
)
from winml.modelkit.compare.verification.reference_run import PreparedPart, dtypes_inside, with_values
from winml.modelkit.compare.verification.rounding import accept_half_precision, accept_rounding, rankings
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.compare.verification.sizes import Draw, WrittenGraph
from winml.modelkit.errors import StageError, VerificationError, opt
from winml.modelkit.onnx.cutting import Cut, Cutter, cut_model
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.operators import probability_outputs
from winml.modelkit.onnx.widening import computes_in, widen_floats
from winml.modelkit.progress import counted

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session


_HALVES = ("float16", "bfloat16")
_BFLOAT16 = "bfloat16"
"""Dtype of float32 outputs if constants of the graph were rounded to bfloat16, which PyTorch in float32 does not do.
Measured on Llamas with random weights: 5e-4 with 12 layers, 9e-3 with 32, for a scale of attention that is off by
1e-4."""


class WrittenFile:
    """A written file in ONNX Runtime, opened on the first run, and its exported part in PyTorch."""

    def __init__(
        self,
        written: WrittenGraph,
        prepared: PreparedPart,
        *,
        adapter: Path | None = None,
        piece_bytes: int | None = None,
    ) -> None:
        """Store the file and its options.

        Args:
            written: The file, and the traced sample.
            prepared: The exported part.
            adapter: Active adapter of every run, if any.
            piece_bytes: Maximum weight bytes in memory; ``None``: all weights.
        """
        self.written, self.prepared = written, prepared
        is_bfloat16 = computes_in(written.model, ir.DataType.BFLOAT16)
        dtypes = (*dtypes_inside(prepared.part.module, written.draw.reference), *([_BFLOAT16] if is_bfloat16 else []))
        self.rounding = Rounding(dtypes, lambda: probability_outputs(written.model.graph))
        """Rounding errors to accept."""
        self._adapter = adapter
        self._piece_bytes = piece_bytes
        self._has_single_rows = takes_single_rows(written.model)
        self._session: Session | None = None
        self._known: dict[int, tuple[Draw, Arrays]] = {}
        self._accepts_other_ranks = self._holds_weights_once = False

    def hold_weights_once(self) -> None:
        """Close the session before loading weights, and copy no tables, so that memory holds the weights once.

        Afterwards, another order of equal ranked values is accepted.
        """
        self._accepts_other_ranks = self._holds_weights_once = True
        load = self.prepared.part.with_weights
        if load is None:
            return

        def load_alone() -> nn.Module:
            self._session = None
            return load()

        self.prepared = replace(self.prepared, part=replace(self.prepared.part, with_weights=load_alone))

    def run_beforehand(self, draws: Sequence[Draw]) -> None:
        """Run several samples, each piece of the file once for all of them; store the outputs."""
        try:
            outputs = self.run_all(draws)
        except VerificationError:
            # Single runs later identify the failing sample.
            return
        self._known = {id(draw): (draw, output) for draw, output in zip(draws, outputs, strict=True)}

    def answer(self, draw: Draw) -> Arrays:
        """Return the outputs of the file for the inputs of a sample.

        Raises:
            StageError: ONNX Runtime cannot run the file.
        """
        cached = self._known.get(id(draw))
        return cached[1] if cached is not None else self._compute_outputs([draw])[0]

    def run(self, draw: Draw) -> Arrays:
        """Return the outputs of the file for the inputs of a sample, like :meth:`answer`.

        Raises:
            VerificationError: ONNX Runtime cannot run the file.
        """
        with self._failures_as_unverified():
            return self.answer(draw)

    def run_all(self, draws: Sequence[Draw]) -> list[Arrays]:
        """Return the outputs for several samples, running each piece of the file once.

        Raises:
            VerificationError: ONNX Runtime cannot run the file.
        """
        with self._failures_as_unverified():
            return self._compute_outputs(draws)

    def compare(self, draw: Draw) -> tuple[OutputComparison, ...]:
        """Compare the outputs of the file with those of PyTorch, relative to the rounding error of PyTorch.

        Raises:
            StageError: ONNX Runtime cannot run the file.
        """
        outputs = self.answer(draw)
        comparisons = compare_outputs([draw.reference], [outputs], rounding=self.rounding).comparisons
        is_half = any(entry.dtype in _HALVES or entry.computed_in in _HALVES for entry in comparisons)
        is_equal = all(entry.is_equal and _has_equal_channels(entry, draw, outputs) for entry in comparisons)
        if is_half and not is_equal:
            comparisons = accept_half_precision(self.prepared, draw, outputs, comparisons)
        if not all(entry.is_equal for entry in comparisons):
            comparisons = accept_rounding(self.prepared, draw, comparisons, self.rounding)
        return comparisons

    def _compute_outputs(self, draws: Sequence[Draw]) -> list[Arrays]:
        """Run the file on all samples, in pieces or whole; row by row if required."""
        # Some decoders support one row at a time only.
        fed = [feeds_by_rows(draw.arrays) if self._has_single_rows else [draw.arrays] for draw in draws]
        rows = [feeds for parts in fed for feeds in parts]
        pieces = None if self._piece_bytes is None else FilePieces(self.written.path, self._piece_bytes)
        outputs: Iterable[Arrays]
        outputs = pieces.run(rows) if pieces is not None and pieces.count else map(self._open_session().run, rows)
        following = iter(outputs)
        joined = [joined_rows(list(islice(following, len(parts)))) for parts in fed]
        return [self._apply_reference_ranks(draw, output) for draw, output in zip(draws, joined, strict=True)]

    def _open_session(self) -> Session:
        from winml.modelkit.ort.graph_sessions import open_session
        from winml.modelkit.ort.sessions import Session

        path = self.written.path
        if self._session is None:
            self._session = (
                Session(path, adapter=self._adapter)
                if self._adapter is not None
                else open_session(path, as_written=False, copies_tables=not self._holds_weights_once)
            )
        return self._session

    def _apply_reference_ranks(self, draw: Draw, answers: Arrays) -> Arrays:
        """Replace indices of equal ranked values in another order by PyTorch's indices."""
        differing = [
            name
            for name, expected in draw.reference.items()
            if expected.dtype.kind in "iu" and expected.shape == answers[name].shape
            if not np.array_equal(expected, answers[name])
        ]
        if not differing or not self._accepts_other_ranks:
            return answers
        with with_values(self.prepared) as weighted:
            ranked = rankings(weighted, draw.inputs)
        return {
            name: draw.reference[name]
            if name in differing and any(ranking.leads_alike(draw.reference[name], value) for ranking in ranked)
            else value
            for name, value in answers.items()
        }

    @contextmanager
    def _failures_as_unverified(self) -> Iterator[None]:
        """Report a failure of ONNX Runtime in the block as a failed verification.

        Raises:
            VerificationError: ONNX Runtime cannot run the file.
        """
        try:
            yield
        except StageError as error:
            hint = _failure_hint(error.message, self.prepared.model)
            raise VerificationError(
                f"cannot verify: {error.message.replace(str(self.written.path), 'the file')}",
                hint=f"{hint}; {opt.no_verify} writes the file without comparing.",
                is_graph_wrong=True,
            ) from error


_MISSING_KERNEL = ("NOT_IMPLEMENTED", "Could not find an implementation", "Type Error", "not implemented")
"""Specified: ONNX Runtime's messages for a missing kernel."""


def _failure_hint(reason: str, model: nn.Module) -> str:
    """Hint for an error of ONNX Runtime; kernels are mentioned only if one is missing."""
    if "Only 4b and 8b quantization is supported" in reason:
        return "2-bit weights need onnxruntime 1.24 or newer (Python 3.11 or newer)"
    if not any(message in reason for message in _MISSING_KERNEL):
        return (
            "A value or shape is not valid for the node: often a size or value that the trace recorded as a constant. "
            "Compute it with tensors in that module's forward"
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if small := " and ".join(sorted(dtypes & {"bfloat16", "float16", "float64"})):
        return f"The weights are {small}, for which its CPU has few kernels: {opt.dtype} fp32 casts them"
    return "Its CPU has no kernel for this operator with these dtypes"


class FilePieces:
    """A file cut into pieces."""

    def __init__(self, path: Path, piece_bytes: int) -> None:
        """Cut a file; no weight is read.

        Args:
            path: An ONNX file, its data beside it.
            piece_bytes: Maximum weight bytes of a piece, unless one node has more.
        """
        self._path = path
        self._model = load_by_reference(path)
        widen_floats(self._model, ir.DataType.BFLOAT16)
        if computes_in(self._model, ir.DataType.FLOAT16):
            from winml.modelkit.ort.half_rounding import round_half_values  # needed only by float16 files

            round_half_values(self._model)
        self._cuts = _cuts(self._model, piece_bytes)

    @property
    def count(self) -> int:
        """Number of pieces; 0 for a file with few weights, or that cannot be cut."""
        return len(self._cuts)

    def run(self, draws: Sequence[Arrays]) -> list[dict[str, Array]]:
        """Run the graph on several feeds; each piece runs on all feeds before the next is opened.

        Raises:
            StageError: ONNX Runtime cannot load or run a piece.
        """
        names = [str(value.name) for value in self._model.graph.outputs]
        readers = [{str(value.name) for value in cut.inputs} for cut in self._cuts]
        arrays = [dict(feeds) for feeds in draws]
        for number, cut in enumerate(counted(self._cuts, "piece")):
            outputs = self._run_piece(cut, arrays)
            later = set(names).union(*readers[number + 1 :])
            arrays = [
                {name: array for name, array in {**values, **output}.items() if name in later}
                for values, output in zip(arrays, outputs, strict=True)
            ]
        return [{name: values[name] for name in names} for values in arrays]

    def _run_piece(self, cut: Cut, arrays: Sequence[Arrays]) -> list[dict[str, Array]]:
        """Run one piece on all samples."""
        # Only verification loads ONNX Runtime.
        from winml.modelkit.ort.graph_sessions import session_of_graph

        for value in cut.inputs:
            if value.dtype is None:
                value.dtype = ir.DataType.from_numpy(arrays[0][str(value.name)].dtype)
        session = session_of_graph(cut_model(self._model, cut), self._path, prepack=False)
        return [session.run({name: values[name] for name in session.inputs}) for values in arrays]


def _cuts(model: ir.Model, piece_bytes: int) -> tuple[Cut, ...]:
    """Cut a graph into pieces; ``()`` if it must stay whole."""
    cutter = Cutter(model)
    pieces = [list(nodes) for nodes in _group_nodes(model.graph, cutter, piece_bytes)]
    if len(pieces) < 2:
        return ()
    piece_cuts = [cutter.cut(nodes) for nodes in pieces if not all(map(cutter.is_constant, nodes))]
    cuts = tuple(piece for piece in piece_cuts if isinstance(piece, Cut))
    created = {value for cut in cuts for value in cut.outputs}
    is_whole = len(cuts) == len(piece_cuts) and all(value in created for value in model.graph.outputs)
    return cuts if is_whole else ()


def _group_nodes(graph: ir.Graph, cutter: Cutter, piece_bytes: int) -> Iterator[list[ir.Node]]:
    """Yield the nodes of a graph in order, in runs that read at most the weights of a piece.

    Nodes computed from weights alone belong to the piece of their reader.
    """
    outputs = set(graph.outputs)
    nodes: list[ir.Node] = []
    weights: dict[ir.Value, int] = {}
    for node in graph:
        if cutter.is_constant(node) and outputs.isdisjoint(node.outputs):
            continue
        sizes = dict(_weights_behind(node, cutter))
        if weights and not sizes.keys() <= weights.keys() and sum({**weights, **sizes}.values()) > piece_bytes:
            yield nodes
            nodes, weights = [], {}
        nodes.append(node)
        weights |= sizes
    yield nodes


def _weights_behind(node: ir.Node, cutter: Cutter) -> Iterator[tuple[ir.Value, int]]:
    """Yield (weight, size) for the weights of a node, including weights read through constant nodes."""
    for value in cutter.reads(node):
        maker = value.producer()
        if value.const_value is not None:
            yield value, value.const_value.nbytes
        elif maker is not None and cutter.is_constant(maker):
            yield from _weights_behind(maker, cutter)


def _has_equal_channels(entry: OutputComparison, draw: Draw, outputs: Arrays) -> bool:
    """Return True if no channel of an output in 16 bits differs by more than rounding of its own values."""
    expected, unit = draw.reference[entry.name], HALF_UNITS.get(entry.computed_in or entry.dtype)
    return unit is None or not find_channel_beyond_rounding(expected, outputs[entry.name], expected, unit)
