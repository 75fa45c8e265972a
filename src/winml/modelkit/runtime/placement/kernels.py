"""Which kernels does the installed ONNX Runtime contain for a provider, and does one of them take a node?

Providers that compile parts of a graph have none; those are asked in ``assignment``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from winml.modelkit.runtime.placement.own_process import answered

__all__ = ["KernelTable", "TypedNode", "is_composed", "kernel_table"]

_NO_END = 2**31 - 1
"""Specified by ONNX Runtime: the last version of a kernel that has none."""
_SECONDS = 300
"""Chosen: the list is there within two."""
_NUMPY_NAMES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class TypedNode:
    """What decides which kernel takes a node."""

    op_type: str
    domain: str
    """Empty for ONNX's own."""
    inputs: Sequence[str | None]
    """Element type of each input as numpy calls it; None where it is unknown or absent."""
    outputs: Sequence[str | None]


@dataclass(frozen=True)
class _Kernel:
    first: int
    last: int
    types: Mapping[str, frozenset[str]]
    """Type parameter, or name of an input or output → element types."""


@dataclass(frozen=True)
class _Schema:
    since_version: int
    inputs: Sequence[tuple[str, str]]
    """Name and type parameter of each."""
    outputs: Sequence[tuple[str, str]]


_Operator = tuple[str, str]
"""Domain and name."""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of one provider."""

    kernels: Mapping[_Operator, Sequence[_Kernel]]
    schemas: Mapping[_Operator, Sequence[_Schema]]
    opsets: Mapping[str, int]
    """Domain → its version in the graph."""

    def refusal(self, node: TypedNode) -> tuple[str, str] | None:
        """Return why no kernel takes a node: ``operator`` or ``dtype``, and the reason; None where one does."""
        schema = self._schema(node)
        if schema is None:
            return "operator", "ONNX Runtime does not know it"
        if self._is_composed(node, schema):
            return None
        kernels = self.kernels.get((node.domain, node.op_type), ())
        if not kernels:
            return "operator", "there is no kernel"
        fitting = [kernel for kernel in kernels if _is_for(kernel, schema.since_version)]
        if not fitting:
            newest = max(kernel.first for kernel in kernels)
            return "operator", f"there is no kernel for its version {schema.since_version}, the newest is {newest}"
        actual = _types_by_parameter(node, schema)
        if any(_takes(kernel, actual) for kernel in fitting):
            return None
        return "dtype", _type_words(fitting, actual)

    def _schema(self, node: TypedNode) -> _Schema | None:
        opset = self.opsets.get(node.domain, 1)
        known = [
            schema for schema in self.schemas.get((node.domain, node.op_type), ()) if schema.since_version <= opset
        ]
        return max(known, key=lambda schema: schema.since_version, default=None)

    def _is_composed(self, node: TypedNode, schema: _Schema) -> bool:
        """Say whether ONNX Runtime replaces an operator without a kernel by those ONNX defines it with."""
        if (node.domain, node.op_type) in self.kernels:
            return False
        try:
            defined = onnx.defs.get_schema(node.op_type, schema.since_version, node.domain)
        except onnx.defs.SchemaError:
            return False
        return is_composed(defined)


def is_composed(schema: Any) -> bool:
    """Say whether ONNX defines an operator by others.

    Args:
        schema: An ``onnx.defs.OpSchema``; its type stubs lack what is asked.
    """
    return bool(schema.has_function or schema.has_context_dependent_function)


def kernel_table(provider: str, opsets: Mapping[str, int]) -> KernelTable | None:
    """Return the kernels of a provider by its name in ONNX Runtime; None where it has none, or does not list them.

    Args:
        provider: Its name.
        opsets: Domain → version, as the graph imports them.

    Raises:
        StageError: the process that lists them ended, or did not in time.
    """
    kernels, schemas = _listed(provider)
    return KernelTable(kernels, schemas, opsets) if kernels else None


@functools.cache
def _listed(provider: str) -> tuple[dict[_Operator, list[_Kernel]], dict[_Operator, list[_Schema]]]:
    kernels: dict[_Operator, list[_Kernel]] = defaultdict(list)
    schemas: dict[_Operator, list[_Schema]] = defaultdict(list)
    with answered({"kernels_of": provider}, provider, _SECONDS) as (told, _):
        for domain, name, first, last, types in told["kernels"]:
            allowed = {key: frozenset(map(_dtype, names)) for key, names in types.items()}
            kernels[_own_domain(domain), name].append(_Kernel(first, last, allowed))
        for domain, name, since, inputs, outputs in told["schemas"]:
            schemas[_own_domain(domain), name].append(
                _Schema(since, list(map(tuple, inputs)), list(map(tuple, outputs)))
            )
    return kernels, schemas


def _own_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _is_for(kernel: _Kernel, version: int) -> bool:
    """Say whether a kernel is for a version, by the rule of ONNX Runtime's registry."""
    return kernel.first == version or kernel.first < version <= kernel.last != _NO_END


def _types_by_parameter(node: TypedNode, schema: _Schema) -> dict[str, set[str]]:
    """Return the element types of a node by type parameter, and by name of the input or output."""
    types: dict[str, set[str]] = defaultdict(set)
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for place, dtype in enumerate(values):
            if dtype is not None and formal:
                for key in formal[min(place, len(formal) - 1)]:  # the last may stand for any number
                    types[key].add(dtype)
    return types


def _takes(kernel: _Kernel, actual: Mapping[str, set[str]]) -> bool:
    return all(actual.get(name, set()) <= types for name, types in kernel.types.items())


def _dtype(name: str) -> str:
    """Return numpy's name for ``tensor(float)``; of other types what ONNX Runtime writes."""
    inner = name.removeprefix("tensor(").removesuffix(")") if name.startswith("tensor(") else name
    return _NUMPY_NAMES.get(inner, inner)


def _type_words(kernels: Sequence[_Kernel], actual: Mapping[str, set[str]]) -> str:
    allowed: dict[str, set[str]] = defaultdict(set)
    for kernel in kernels:
        for name, types in kernel.types.items():
            allowed[name] |= types
    wrong = [types for name, types in allowed.items() if not actual.get(name, set()) <= types]
    if not wrong:
        return "there is no kernel for these types together"
    return "kernels take " + "; ".join(", ".join(sorted(types)) for types in wrong)
