"""What does a float graph compute before the first node that a quantized form changes? Computed once for all forms.

A form in which one module has fewer bits answers as the float graph does up to that module. Its rest is cut off and run
on the values of the float graph, which stay in memory for a few places of the graph that few values cross.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import StageError
from winml.modelkit.onnx.cutting import Cutter, cut_model
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS
from winml.modelkit.tags.tagging import all_nodes

PLACES = 16
"""Chosen: a form then runs at most a sixteenth of the nodes before its module again."""
_STORED_BYTES = 256_000_000
"""Values stored, of all samples together. Chosen: small beside a model whose runs take long; where it is too little,
fewer places are used."""


@dataclass(frozen=True)
class Start:
    """A place of the float graph, and what crosses it."""

    names: frozenset[str]
    """Names of the nodes before it."""
    values: tuple[Arrays, ...]
    """Of each sample: the values that nodes before it compute and others read, by name."""


class SharedStarts:
    """The places of one graph from which forms of it may be run."""

    def __init__(self, model: ir.Model, sessions: GraphSessions, feeds: Sequence[Arrays], threads: int | None) -> None:
        """Run the float graph once on each sample.

        Args:
            model: The float graph; it stays as it is.
            sessions: Opens graphs that are made of it.
            feeds: The samples.
            threads: Threads of the session; None: as many as ONNX Runtime chooses.
        """
        self._nodes = tuple(model.graph)
        self._starts: list[Start] = []
        is_random = any(node.op_type in RANDOM_OPERATORS for node in all_nodes(model))
        places = {} if is_random or not feeds else _places(model)
        if not places:
            return
        names = list(dict.fromkeys(name for crossing in places.values() for name in crossing))
        tapped = model.clone()
        made = {value.name: value for node in tapped.graph for value in node.outputs}
        tapped.graph.outputs[:] = [made[name] for name in names]
        try:
            session = sessions.open(tapped, threads=threads, name="the float graph")
            samples = [session.run(feeds[0])]
            places = _within_limit(places, samples[0], _STORED_BYTES // len(feeds))
            wanted = list(dict.fromkeys(name for crossing in places.values() for name in crossing))
            samples += [session.run(item, wanted) for item in feeds[1:]] if wanted else []
        except StageError:  # forms are run from the inputs
            return
        for count, crossing in places.items():
            values = tuple({name: sample[name] for name in crossing} for sample in samples)
            before = frozenset(node.name or "" for node in self._nodes[:count])
            self._starts.append(Start(before, values))

    def last_before(self, form: ir.Model) -> Start | None:
        """Return the last place before which a form is the float graph; None where that is its beginning."""
        same = _unchanged_nodes(self._nodes, form)
        fitting = (start for start in self._starts if len(start.names) <= same)
        return max(fitting, key=lambda start: len(start.names), default=None)

    @staticmethod
    def rest_of(form: ir.Model, start: Start) -> ir.Model | None:
        """Return what a form computes behind a place, as a model; None where it reads other values than are stored."""
        cut = Cutter(form).cut_exactly(node for node in form.graph if node.name not in start.names)
        given = {value.name for value in form.graph.inputs}
        computed = start.values[0]
        if not cut.outputs or any(value.name not in computed and value.name not in given for value in cut.inputs):
            return None
        rest = cut_model(form, cut, keeps_sizes=True)
        for value in rest.graph.inputs:
            if (array := computed.get(value.name or "")) is not None:
                value.dtype = ir.DataType.from_numpy(array.dtype)
                value.shape = ir.Shape([None] * array.ndim)
        return rest


def feeds_of(session: Session, start: Start, sample: int, feeds: Arrays) -> dict[str, Array]:
    """Return what the rest of a form reads of one sample."""
    values = {**feeds, **start.values[sample]}
    return {name: values[name] for name in session.inputs}


def _places(model: ir.Model) -> dict[int, tuple[str, ...]]:
    """Return number of nodes before a place → names of the values that cross it, which are few."""
    nodes = list(model.graph)
    cutter = Cutter(model)
    crossing = cutter.crossing()
    step = max(1, len(nodes) // PLACES)
    found = {}
    for begin in range(0, len(nodes) - 1, step):
        place = min(range(begin, min(begin + step, len(nodes) - 1)), key=lambda index: (crossing[index], -index))
        cut = cutter.cut_exactly(nodes[place + 1 :])
        values = [value for value in cut.inputs if value.producer() is not None]
        if values and all(value.type is None or isinstance(value.type, ir.TensorType) for value in values):
            found[place + 1] = tuple(value.name or "" for value in values)
    return found


def _within_limit(places: Mapping[int, tuple[str, ...]], sample: Arrays, limit: int) -> dict[int, tuple[str, ...]]:
    """Return as many of the places, in equal distances, as hold no more bytes than the limit."""
    for every in (1, 2, 4, 8):
        chosen = dict(list(places.items())[every - 1 :: every])
        names = {name for crossing in chosen.values() for name in crossing}
        if sum(sample[name].nbytes for name in names) <= limit:
            return chosen
    return {}


def _unchanged_nodes(nodes: Sequence[ir.Node], form: ir.Model) -> int:
    """Return how many nodes from the beginning a form has as they are, with the same weights."""
    own = {node.name: node for node in form.graph}
    for count, node in enumerate(nodes):
        other = own.get(node.name)
        if other is None or not _is_same(node, other):
            return count
    return len(nodes)


def _is_same(node: ir.Node, other: ir.Node) -> bool:
    if node.op_identifier() != other.op_identifier() or len(node.inputs) != len(other.inputs):
        return False
    if [value.name for value in node.outputs] != [value.name for value in other.outputs]:
        return False
    pairs = list(zip(node.inputs, other.inputs, strict=True))
    if any((left and left.name) != (right and right.name) for left, right in pairs):
        return False
    return all(left is None or right is None or _is_same_weight(left, right) for left, right in pairs)


def _is_same_weight(left: ir.Value, right: ir.Value) -> bool:
    """Say whether two values are the same stored tensor, or none."""
    one, other = left.const_value, right.const_value
    if one is other or one is None or other is None:
        return one is other
    if isinstance(one, ir.ExternalTensor) and isinstance(other, ir.ExternalTensor):
        places = ((os.fspath(item.path), item.offset, item.length) for item in (one, other))
        return len(set(places)) == 1
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.dtype != ir.DataType.STRING and np.array_equal(one.numpy(), other.numpy())
