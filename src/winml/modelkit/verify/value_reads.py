"""Finds which inputs a forward reads in Python: those that a value taken out of a tensor was computed from."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from winml.modelkit.errors import ExportError
from winml.modelkit.verify.other_sizes import Draw, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, run_reference

__all__ = ["read_inputs"]

_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"})
"""Operators that hand values to Python, or make shapes of them."""


def read_inputs(prepared: PreparedPart, traced: Draw) -> frozenset[str]:
    """Return the inputs that Python reads a value of, or of what was computed from them; none where PyTorch refuses.

    Args:
        prepared: The part, with values.
        traced: Inputs to run it with.
    """
    reads = _ValueReads(traced.inputs)
    try:
        with unchanged_attributes(prepared.model), reads:
            run_reference(prepared, traced.inputs)
    except ExportError:
        return frozenset()
    return frozenset(reads.read)


class _ValueReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from each input."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self._sources: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        for name, value in inputs.items():
            self._sources[value] = frozenset({name})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note from which inputs its results come."""
        result = func(*args, **(kwargs or {}))
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        sources = frozenset[str]().union(*(self._sources.get(value, frozenset()) for value in given))
        if func.name() in _READS:
            self.read |= sources
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._sources[value] = sources
        return result
