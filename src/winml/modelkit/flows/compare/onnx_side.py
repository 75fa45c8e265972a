"""An ONNX file as one side of a comparison: its modules, the values at their boundaries, and a session that gives them.

Runs the graph node by node as it is written, so that every value that is asked for exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.graph.cutting import Refusal
from winml.modelkit.graph.files.foreign_reading import read_foreign
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.module_parts import ModuleParts
from winml.modelkit.hierarchy.module_identity import ModuleIdentity
from winml.modelkit.inspect.onnx_contents import read_contents
from winml.modelkit.inspect.onnx_tree import OnnxModule, read_tree
from winml.modelkit.quantize.planning import QUANTIZED_OPERATORS
from winml.modelkit.runtime.recording import open_with_outputs
from winml.modelkit.runtime.sessions import Session

__all__ = ["ModuleBoundary", "OnnxSide"]

Array = NDArray[Any]
CallKey = tuple[str, int]
"""Tag of a module and number of its call, from 1."""

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, None})
"""Types of values that have an error; None is unknown before a run."""


@dataclass(frozen=True)
class ModuleBoundary:
    """What goes into one call of a module, and what comes out of it."""

    identity: ModuleIdentity
    inputs: tuple[str, ...] = ()
    """Names of floating-point values that are computed before, in the order they are first read."""
    outputs: tuple[str, ...] = ()
    """Names of values, in the order they are computed."""
    position: int = 0
    """Index of the node that computes the last of them."""
    reason: str = ""
    """Why there is no such boundary."""

    @property
    def key(self) -> CallKey:
        """Which call of which module."""
        return self.identity.tag, self.identity.call


class OnnxSide:
    """One ONNX file.

    Attributes:
        path: The file.
        boundaries: Every call of every module, by tag and number.
        value_names: Values of the main graph.
        tree_source: What says which module a node belongs to.
        is_rounded: Whether nodes compute with fewer bits than float32.
    """

    def __init__(self, path: Path, *, by_module: bool) -> None:
        """Read the file; with ``by_module`` its modules as well.

        Raises:
            InputError: it is no ONNX model, or its graph has a cycle.
        """
        self.path = path
        self.boundaries: dict[CallKey, ModuleBoundary] = {}
        self.value_names: frozenset[str] = frozenset()
        self.tree_source = "none"
        self.is_rounded = False
        self._session: Session | None = None
        structure = read_structure(path)
        self._declared = [value.name for value in structure.graph.output]
        if by_module:
            self._read_modules(structure)

    @property
    def shown(self) -> str:
        """The side, for people."""
        return str(self.path)

    def session(self, tapped: Sequence[str] = ()) -> Session:
        """Return the session, opened the first time with these values as further outputs.

        Raises:
            StageError: ONNX Runtime cannot load the file.
        """
        if self._session is None:
            self._session = open_with_outputs(self.path, [name for name in tapped if name not in self._declared])
        return self._session

    def outputs(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, and return what it answers."""
        return self.session().run(feeds, self._declared)

    def values(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return inner values by name."""
        return self.session().run(feeds, list(names)) if names else {}

    def _read_modules(self, structure: onnx.ModelProto) -> None:
        model, _ = read_foreign(self.path)
        metadata = {item.key: item.value for item in structure.metadata_props}
        nodes = [node.proto for node in read_contents(structure).nodes]
        tree = read_tree(nodes, metadata, structure.graph.name.strip("/") or "graph")
        self.tree_source = tree.source
        self.value_names = frozenset(str(value.name) for node in model.graph for value in node.outputs)
        self.is_rounded = any(map(_has_few_bits, model.graph))
        parts = ModuleParts(model)
        position = {node: number for number, node in enumerate(model.graph)}
        for module in tree.modules:
            for boundary in _boundaries(module, parts, position):
                self.boundaries[boundary.key] = boundary


def _boundaries(module: OnnxModule, parts: ModuleParts, position: Mapping[ir.Node, int]) -> list[ModuleBoundary]:
    calls = parts.cut(module.tag)
    if not calls:
        identity = ModuleIdentity(module.path, module.tag, module.class_name)
        return [ModuleBoundary(identity, reason="it has no node of its own: fused into another, or only a container")]
    found = []
    for item in calls:
        identity = ModuleIdentity(module.path, module.tag, module.class_name, item.call, item.calls)
        if isinstance(item.result, Refusal):
            found.append(ModuleBoundary(identity, reason=item.result.reason))
            continue
        fed = dict.fromkeys(map(_as_float, item.result.inputs))
        # What is given to the model is the same on both sides; whole numbers are positions and masks.
        inputs = [value for value in fed if value.dtype in _FLOATS and value.producer() is not None]
        outputs = [value for value in dict.fromkeys(map(_as_float, item.result.outputs)) if value.dtype in _FLOATS]
        makers = [maker for value in outputs if (maker := value.producer()) is not None]
        found.append(
            ModuleBoundary(
                identity,
                tuple(str(value.name) for value in inputs),
                tuple(str(value.name) for value in outputs),
                max((position[maker] for maker in makers if maker in position), default=0),
                "" if outputs else "it computes no floating-point value that others read",
            )
        )
    return found


def _as_float(value: ir.Value) -> ir.Value:
    """Return the floating-point value that a quantized one, its scale or its zero point was made of."""
    while (producer := value.producer()) is not None and producer.op_type in _QUANTIZING:
        first = producer.inputs[0]
        if first is None or first.is_initializer():
            break
        value = first
    return value


_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Operators that change how a value is written, not what it is."""


def _has_few_bits(node: ir.Node) -> bool:
    return node.op_type in QUANTIZED_OPERATORS or any(
        value is not None and value.const_value is not None and value.const_value.dtype in _HALVES
        for value in node.inputs
    )


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
