"""The true module of each node of a file, found by values alone and without sharing code with the product.

A forward pass of PyTorch runs under a dispatch mode that records the result of every aten operator with its modules.
Then the ONNX file runs with all its inner values as outputs. Equal values up to layout tie nodes to operators: the
operators between a node's inputs and outputs are the work of the node. Their deepest common module is the node's
module; if products of one module are among the operators, that module. Nodes joined by values that PyTorch never had
are judged together.

Three kinds are not judged: nodes without floating-point results, nodes that depend on no input, nodes in subgraphs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

FEWEST_VALUES = 4
"""Arrays with fewer different numbers are masks and constants, which resemble too many other arrays."""
RELATIVE, ABSOLUTE = 2e-4, 2e-6
"""Tolerances of equal values: kernels sum in different orders."""
_PRODUCTS = ("aten.convolution", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Operators that own a node: an operation fused into a product belongs to the product's module."""
_SHAPE_OPERATORS = frozenset({"Shape", "Size"})


@dataclass
class Operator:
    """One executed aten operator."""

    name: str
    stack: tuple[str, ...]
    """Paths of the modules around it, outermost first."""
    sources: list[int]
    """Operators that produced its floating-point inputs; -1 for a value without a producing operator."""
    reads: set[int] = field(default_factory=set)
    """Classes of its input values."""
    makes: set[int] = field(default_factory=set)
    """Classes of its output values."""
    is_static: bool = True
    """True if the result depends on no input."""
    weights: set[int] = field(default_factory=set)
    """Classes of its parameters and buffers."""

    @property
    def keeps_values(self) -> bool:
        """True if the operator only changed the layout of values."""
        return bool(self.reads & self.makes)


class ValueClasses:
    """Numbers arrays; arrays with the same nonzero values in any order share a number."""

    def __init__(self) -> None:
        self._by_size: defaultdict[int, list[tuple[NDArray[Any], int]]] = defaultdict(list)
        self._count = 0

    def number(self, array: NDArray[Any], *, add: bool = False) -> int | None:
        """Return the class of an array; None if the class is unknown or the values are not distinctive."""
        values = np.sort(array[np.isfinite(array) & (array != 0)], axis=None).astype(np.float64)
        if values.size == 0 or not _is_telling(values):
            return None
        scale = float(np.abs(values).max())
        for known, number in self._by_size[values.size]:
            # For finite values np.allclose is equivalent, and ten times slower.
            if (np.abs(values - known) <= ABSOLUTE * scale + RELATIVE * np.abs(known)).all():
                return number
        if not add:
            return None
        self._by_size[values.size].append((values, self._count))
        self._count += 1
        return self._count - 1


def _is_telling(values: NDArray[Any]) -> bool:
    different = 1 + int(np.count_nonzero(np.diff(values) > 1e-6 * np.abs(values).max()))
    return different >= min(FEWEST_VALUES, values.size) and values.size > 1


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that runs, with its results and modules; operators of hooks are included."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.values = ValueClasses()
        self.weights = ValueClasses()
        self._stack: list[str] = []
        self._kept: list[torch.Tensor] = []
        self._makers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._handles: list[Any] = []
        self._dynamic_leaves = {id(tensor) for tensor in inputs}
        self._weight_classes: dict[int, int | None] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                self._weight_classes[id(tensor)] = self.weights.number(_array(tensor), add=True)
        for tensor in inputs:
            if tensor.is_floating_point():
                self.values.number(_array(tensor), add=True)
        for path, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(
                    lambda _module, _args, path=path: self._stack.append(path), prepend=True
                ),
                module.register_forward_hook(lambda *_: self._stack.pop() and None, always_call=True),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its inputs, results and modules."""
        read = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        operator = Operator(str(func), tuple(self._stack), [])
        for tensor in read:
            self._read(operator, tensor)
        result = func(*args, **(kwargs or {}))
        index = len(self.operators)
        self.operators.append(operator)
        written = [
            tensor
            for argument, tensor in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(tensor, torch.Tensor)
        ]
        for tensor in written:
            self._writers[tensor.untyped_storage()._cdata] = index
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._kept.append(tensor)
                self._makers[id(tensor)] = index
                self._make(operator, tensor)
        self._kept += read
        return result

    def _read(self, operator: Operator, tensor: torch.Tensor) -> None:
        maker = max(self._makers.get(id(tensor), -1), self._writers.get(tensor.untyped_storage()._cdata, -1))
        if id(tensor) in self._dynamic_leaves or (maker >= 0 and not self.operators[maker].is_static):
            operator.is_static = False
        if not tensor.is_floating_point():
            return
        if id(tensor) in self._weight_classes:
            if (number := self._weight_classes[id(tensor)]) is not None:
                operator.weights.add(number)
            return
        if maker >= 0:
            operator.sources.append(maker)
            # A tensor written by an operator is found only when it is read.
            self._make(self.operators[maker], tensor)
            operator.weights |= self.operators[maker].weights if self.operators[maker].is_static else set()
        if (number := self.values.number(_array(tensor), add=True)) is not None:
            operator.reads.add(number)

    def _make(self, operator: Operator, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and (number := self.values.number(_array(tensor), add=True)) is not None:
            operator.makes.add(number)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().float().numpy().copy()


def record(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Recording:
    """Run a model once and return the recording."""
    recording = Recording(model, inputs)
    try:
        with torch.no_grad(), recording:
            model(*inputs)
    finally:
        recording.close()
    return recording


class Verdict(NamedTuple):
    """Judgement of one node."""

    node: str
    operator: str
    tag: str
    expected: tuple[str, ...]
    """Tags of the modules that did the node's work; the node belongs to their common module."""
    judgement: str
    """``right``, ``wrong`` or ``high``."""


def judge(path: Path, recording: Recording, feeds: Mapping[str, NDArray[Any]]) -> list[Verdict]:
    """Compare the tag of every node of a file with the recording."""
    return _Judging(path, recording, feeds).verdicts()


class _Judging:
    def __init__(self, path: Path, recording: Recording, feeds: Mapping[str, NDArray[Any]]) -> None:
        self.recording = recording
        self.model = onnx.load(path)
        self.nodes = list(self.model.graph.node)
        self.tree = _tree(self.model)
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        arrays = {**_run_all(self.model, feeds), **feeds}
        self.classes = {
            name: recording.values.number(array) for name, array in arrays.items() if array.dtype.kind == "f"
        }
        self.dynamic = self._dynamic_values(set(feeds))
        self.weights = {
            tensor.name: recording.weights.number(array)
            for tensor in self.model.graph.initializer
            if (array := onnx.numpy_helper.to_array(tensor)).dtype == np.float32
        }
        self.by_class: defaultdict[int, list[Operator]] = defaultdict(list)
        for operator in recording.operators:
            for number in operator.makes:
                if not operator.is_static:
                    self.by_class[number].append(operator)

    def _dynamic_values(self, inputs: set[str]) -> set[str]:
        dynamic = set(inputs)
        for node in self.nodes:
            if node.op_type not in _SHAPE_OPERATORS and (dynamic.intersection(node.input) or _has_graphs(node)):
                dynamic.update(node.output)
        return dynamic

    def verdicts(self) -> list[Verdict]:
        """Judge every cluster of nodes."""
        return [verdict for cluster in self._clusters() for verdict in self._judge(cluster)]

    def _is_float(self, name: str) -> bool:
        return name in self.classes and name in self.dynamic

    def _clusters(self) -> list[list[onnx.NodeProto]]:
        """Join nodes that share a value PyTorch never had."""
        leader = {id(node): id(node) for node in self.nodes}

        def find(key: int) -> int:
            while leader[key] != key:
                key = leader[key]
            return key

        judged = [node for node in self.nodes if any(map(self._is_float, node.output))]
        for node in judged:
            for name in node.input:
                if self._is_float(name) and self.classes[name] is None and name in self.makers:
                    leader[find(id(node))] = find(id(self.makers[name]))
        clusters: defaultdict[int, list[onnx.NodeProto]] = defaultdict(list)
        for node in judged:
            clusters[find(id(node))].append(node)
        return list(clusters.values())

    def _judge(self, cluster: list[onnx.NodeProto]) -> list[Verdict]:
        made = {self.classes[name] for node in cluster for name in node.output if self._is_float(name)} - {None}
        inner = {name for node in cluster for name in node.output}
        read = {
            self.classes[name] for node in cluster for name in node.input if self._is_float(name) and name not in inner
        }
        outputs = {value.name for value in self.model.graph.output}
        is_open = any(self.classes.get(name, 0) is None for name in outputs & inner)
        if None in read or not made or is_open:
            return []
        if len(cluster) == 1 and made <= read:
            # A node that changes a layout belongs to the producer, to the reader, or to an operator between.
            around = [operator for operator in self.recording.operators if (operator.makes | operator.reads) & made]
            return [self._judge_among(cluster[0], around)] if around else []
        results = made - read if len(cluster) > 1 else made
        ways = [way for number in results if number is not None for way in self._ways(number, read - {None})]
        if not ways:
            return []
        if len(cluster) > 1:
            work = [operator for way in ways for operator in way]
            return [self._judge_among(node, work, self._layouts(read)) for node in cluster]
        return [self._judge_one(cluster[0], ways, self._layouts(read | results))]

    def _layouts(self, numbers: set[Any]) -> list[Operator]:
        """Return the operators that changed the layout of these values: a node may include such a change."""
        return [operator for number in numbers for operator in self.by_class[number] if operator.keeps_values]

    def _ways(self, number: int, read: set[Any]) -> list[list[Operator]]:
        """Return the operators between the read values and a class, per operator that computed the class."""
        makers = [operator for operator in self.by_class[number] if number not in operator.reads]
        return [self._behind(operator, read) for operator in makers]

    def _behind(self, last: Operator, read: set[Any]) -> list[Operator]:
        found, pending = [last], [last]
        while pending:
            operator = pending.pop()
            for source in operator.sources:
                earlier = self.recording.operators[source]
                is_boundary = earlier.makes & read & operator.reads
                if not (earlier.is_static or is_boundary or any(earlier is known for known in found)):
                    found.append(earlier)
                    pending.append(earlier)
        return found

    def _tag(self, operator: Operator) -> str:
        return next(self.tree[path] for path in reversed(operator.stack) if path in self.tree)

    def _judge_one(self, node: onnx.NodeProto, ways: list[list[Operator]], layouts: list[Operator]) -> Verdict:
        """Judge a node with known inputs and outputs."""
        tag = _metadata(node, "winml.hierarchy.tag")
        judgements = []
        lowest = []
        for way in ways:
            owners = {self._tag(operator) for operator in way if operator.name.startswith(_PRODUCTS)}
            if len(owners) == 1 and len(way) > 1:
                (owner,) = owners
                lowest.append(owner)
                judgements.append("right" if tag == owner else "high" if _within(owner, tag) else "wrong")
                continue
            # Operators that changed a layout may or may not be part of the work.
            work = [operator for operator in way if not operator.keeps_values] or way
            low, high = _common(map(self._tag, work)), _common(map(self._tag, [*way, *layouts]))
            lowest.append(low)
            judgements.append(
                "right" if _within(low, tag) and _within(tag, high) else "high" if _within(high, tag) else "wrong"
            )
        if len(lowest) > 1 and tag == _common(lowest):
            judgements.append("right")
        best = next(name for name in ("right", "high", "wrong") if name in judgements)
        expected = tuple(sorted({self._tag(operator) for way in ways for operator in way}))
        return Verdict(node.name, node.op_type, tag, expected, best)

    def _judge_among(self, node: onnx.NodeProto, work: list[Operator], layouts: Sequence[Operator] = ()) -> Verdict:
        """Judge a node of a cluster that does some work together."""
        tag = _metadata(node, "winml.hierarchy.tag")
        tags = tuple(sorted({self._tag(operator) for operator in work}))
        weights = {self.weights.get(name) for name in node.input} - {None}
        readers = {self._tag(operator) for operator in work if operator.weights & weights}
        highest = _common([*tags, *map(self._tag, layouts)])
        if _within(highest, tag) and tag != highest:
            judgement = "high"
        elif readers:
            judgement = "right" if any(_within(reader, tag) or _within(tag, reader) for reader in readers) else "wrong"
        else:
            judgement = "right" if any(_within(possible, tag) for possible in tags) else "wrong"
        return Verdict(node.name, node.op_type, tag, tags, judgement)


def _common(tags: Iterable[str]) -> str:
    parts = [tag.split("/") for tag in tags]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "/".join(shared)


def _within(tag: str, outer: str) -> bool:
    return tag == outer or tag.startswith(f"{outer}/")


def _tree(model: onnx.ModelProto) -> dict[str, str]:
    tree = next(entry.value for entry in model.metadata_props if entry.key == "winml.hierarchy.tree")
    return {entry["path"]: entry["tag"] for entry in json.loads(tree)}


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == key), "")


def _has_graphs(node: onnx.NodeProto) -> bool:
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def _run_all(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Run a graph without optimization and return all its values."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = session.run(names, dict(feeds))
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}
