"""Runs a file piece by piece, so that memory holds the weights of one piece at a time.

A piece is a run of nodes in the order of the file; values that later pieces read are kept. ONNX Runtime opens each
piece as it opens any file: optimized, with the weight layout of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.verification.float32_sides import comparable_graph
from winml.modelkit.onnx.cutting import Cut, Cutter, cut_model
from winml.modelkit.progress import counted


class FilePieces:
    """A file that is cut into pieces."""

    def __init__(self, path: Path, piece_bytes: int) -> None:
        """Cut a file; no weight is read.

        Args:
            path: An ONNX file, its data beside it.
            piece_bytes: Weights of a piece, unless one node alone has more.
        """
        self._path = path
        self._model = comparable_graph(path)
        self._cuts = _cuts(self._model, piece_bytes)

    @property
    def count(self) -> int:
        """How many pieces there are; 0 where the file has few weights or cannot be cut."""
        return len(self._cuts)

    def run(self, draws: Sequence[Arrays]) -> list[dict[str, Array]]:
        """Return what the graph answers to each of several feeds; a piece answers all before the next is opened.

        Raises:
            StageError: ONNX Runtime cannot load or run a piece.
        """
        names = [str(value.name) for value in self._model.graph.outputs]
        readers = [{str(value.name) for value in cut.inputs} for cut in self._cuts]
        known = [dict(feeds) for feeds in draws]
        for number, cut in enumerate(counted(self._cuts, "piece")):
            outputs = self._run_piece(cut, known)
            later = set(names).union(*readers[number + 1 :])
            known = [
                {name: array for name, array in {**values, **output}.items() if name in later}
                for values, output in zip(known, outputs, strict=True)
            ]
        return [{name: values[name] for name in names} for values in known]

    def _run_piece(self, cut: Cut, known: Sequence[Arrays]) -> list[dict[str, Array]]:
        # ONNX Runtime is loaded by those who verify only.
        from winml.modelkit.ort.graph_sessions import session_of_graph

        for value in cut.inputs:
            if value.dtype is None:
                value.dtype = ir.DataType.from_numpy(known[0][str(value.name)].dtype)
        session = session_of_graph(cut_model(self._model, cut), self._path, prepack=False)
        return [session.run({name: values[name] for name in session.inputs}) for values in known]


def _cuts(model: ir.Model, piece_bytes: int) -> tuple[Cut, ...]:
    """Return the pieces of a graph; none where it has to stay whole."""
    cutter = Cutter(model)
    pieces = [list(nodes) for nodes in _pieces(model.graph, cutter, piece_bytes)]
    if len(pieces) < 2:
        return ()
    found = [cutter.cut(nodes) for nodes in pieces if not all(map(cutter.is_constant, nodes))]
    cuts = tuple(item for item in found if isinstance(item, Cut))
    created = {value for cut in cuts for value in cut.outputs}
    is_whole = len(cuts) == len(found) and all(value in created for value in model.graph.outputs)
    return cuts if is_whole else ()


def _pieces(graph: ir.Graph, cutter: Cutter, piece_bytes: int) -> Iterator[list[ir.Node]]:
    """Yield the nodes of a graph in order, in runs that read no more weights than a piece may.

    What is computed of weights alone comes with the node that reads it, wherever it stands.
    """
    outputs = set(graph.outputs)
    nodes: list[ir.Node] = []
    weights: dict[ir.Value, int] = {}
    for node in graph:
        if cutter.is_constant(node) and outputs.isdisjoint(node.outputs):
            continue
        read = dict(_weights_behind(node, cutter))
        if weights and not read.keys() <= weights.keys() and sum({**weights, **read}.values()) > piece_bytes:
            yield nodes
            nodes, weights = [], {}
        nodes.append(node)
        weights |= read
    yield nodes


def _weights_behind(node: ir.Node, cutter: Cutter) -> Iterator[tuple[ir.Value, int]]:
    """Yield the weights that a node reads, also by way of nodes that compute constants of them, with their sizes."""
    for value in cutter.reads(node):
        maker = value.producer()
        if value.const_value is not None:
            yield value, value.const_value.nbytes
        elif maker is not None and cutter.is_constant(maker):
            yield from _weights_behind(maker, cutter)
