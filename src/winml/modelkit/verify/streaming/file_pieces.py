"""Runs a file piece by piece, so that memory holds the weights of one piece at a time.

A piece is a run of nodes in the order of the file; what it computes for later ones is kept. Each piece is opened in
ONNX Runtime as any file is: optimized, with its kernels' own layout of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.graph.cutting import Cut, Cutter, cut_model
from winml.modelkit.graph.files.graph_reading import graph_of
from winml.modelkit.graph.files.reading import read_referring
from winml.modelkit.runtime.ir_versions import newest_ir_version

__all__ = ["FilePieces"]

Array = NDArray[Any]
Feeds = Mapping[str, Array]


class FilePieces:
    """A file that is cut into pieces."""

    def __init__(self, path: Path, piece_bytes: int) -> None:
        """Cut a file; no weight is read.

        Args:
            path: An ONNX file, its data beside it.
            piece_bytes: Weights of a piece, unless one node alone has more.
        """
        self._path = path
        self._model = graph_of(read_referring(path), path)
        self._cuts = _cuts(self._model, piece_bytes)

    @property
    def count(self) -> int:
        """How many pieces there are; 0 where the file has few weights or cannot be cut."""
        return len(self._cuts)

    def run(self, draws: Sequence[Feeds]) -> list[dict[str, Array]]:
        """Return what the graph answers to each of several feeds; a piece answers all before the next is opened.

        Raises:
            StageError: ONNX Runtime cannot load or run a piece.
        """
        names = [str(value.name) for value in self._model.graph.outputs]
        readers = [{str(value.name) for value in cut.inputs} for cut in self._cuts]
        known = [dict(feeds) for feeds in draws]
        for number, cut in enumerate(self._cuts):
            answers = self._run_piece(cut, known)
            later = set(names).union(*readers[number + 1 :])
            known = [
                {name: array for name, array in {**values, **answer}.items() if name in later}
                for values, answer in zip(known, answers, strict=True)
            ]
        return [{name: values[name] for name in names} for values in known]

    def _run_piece(self, cut: Cut, known: Sequence[Feeds]) -> list[dict[str, Array]]:
        # ONNX Runtime is loaded by those who verify only.
        from winml.modelkit.runtime.sessions import Session

        for value in cut.inputs:
            if value.dtype is None:
                value.dtype = ir.DataType.from_numpy(known[0][str(value.name)].dtype)
        model = cut_model(self._model, cut)
        model.ir_version = min(model.ir_version, newest_ir_version())
        content = ir.serde.serialize_model(model).SerializeToString()
        session = Session(content, data_folder=self._path.absolute().parent, name=str(self._path))
        return [session.run({name: values[name] for name in session.inputs}) for values in known]


def _cuts(model: ir.Model, piece_bytes: int) -> tuple[Cut, ...]:
    """Return the pieces of a graph; none where it has to stay whole."""
    cutter = Cutter(model)
    pieces = [list(nodes) for nodes in _pieces(model.graph, cutter, piece_bytes)]
    if len(pieces) < 2:
        return ()
    found = [cutter.cut(nodes) for nodes in pieces if not all(map(cutter.is_constant, nodes))]
    cuts = tuple(item for item in found if isinstance(item, Cut))
    made = {value for cut in cuts for value in cut.outputs}
    is_whole = len(cuts) == len(found) and all(value in made for value in model.graph.outputs)
    return cuts if is_whole else ()


def _pieces(graph: ir.Graph, cutter: Cutter, piece_bytes: int) -> Iterator[list[ir.Node]]:
    """Yield the nodes of a graph in order, in runs that read no more weights than a piece may."""
    nodes: list[ir.Node] = []
    weights: dict[ir.Value, int] = {}
    for node in graph:
        read = {value: value.const_value.nbytes for value in cutter.reads(node) if value.const_value is not None}
        if weights and not read.keys() <= weights.keys() and sum({**weights, **read}.values()) > piece_bytes:
            yield nodes
            nodes, weights = [], {}
        nodes.append(node)
        weights |= read
    yield nodes
