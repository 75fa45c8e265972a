"""Torch's operator tables, built once for many dynamo exports of a process.

For each export torch builds anew

* the table of ONNX operators, from the source text of 500 functions: half the time of a small export;
* the set of operators that it decomposes, once for each of 25 namespaces and twice an export, and the annotations of
  5,000 functions that it registers for the time of a decomposition: half the time of an export that is decomposed.
"""

from __future__ import annotations

import functools
import sys
import typing
from types import ModuleType
from typing import Any


def share_operator_table() -> None:
    """Share the tables in this process, if torch has imported their modules."""
    if (module := sys.modules.get("torch.onnx._internal.exporter._registration")) is not None:
        _share(module.ONNXRegistry)
    if (module := sys.modules.get("torch.export.exported_program")) is not None:
        _share_decomposed_operators(module)


def build_operator_table() -> None:
    """Build the tables now, for exports in processes forked from this process."""
    from torch.export import exported_program
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from winml.modelkit.export.dynamo.shortcuts import shortcuts
    from winml.modelkit.models.state_restoration import quiet_torch

    share_operator_table()
    with quiet_torch(), shortcuts(keep_stack_traces=False):
        ONNXRegistry.from_torchlib()
    exported_program._collect_all_valid_cia_ops()


@functools.cache
def _share(registry: type) -> None:
    built = functools.cache(registry.from_torchlib)  # type: ignore[attr-defined]

    def from_torchlib(**options: int) -> object:
        first, copied = built(**options), registry()
        copied._opset_version = first._opset_version
        # An export adds operators of its own to these lists.
        copied.functions = {target: [*forms] for target, forms in first.functions.items()}
        return copied

    registry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[attr-defined]


@functools.cache
def _share_decomposed_operators(module: ModuleType) -> None:
    import torch
    import torch.export.decomp_utils

    collect: Any = module._collect_all_valid_cia_ops  # type: ignore[attr-defined]
    last: dict[tuple[str, ...], Any] = {}

    def collect_where_registrations_changed() -> Any:
        # A library or a test may have registered an operator since.
        names = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if names not in last:
            found = collect()
            last.clear()
            last[names] = found
        return last[names]

    for owner in (module, torch.export.decomp_utils):
        owner._collect_all_valid_cia_ops = collect_where_registrations_changed  # type: ignore[attr-defined]
    # Subscripts of this type are cached; torch evaluates two for each function that it registers.
    torch._ops.Callable = typing.Callable  # type: ignore[misc]
