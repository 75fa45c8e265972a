"""Blocks of the memory of a model by use and by module."""

from __future__ import annotations

from winml.modelkit.errors import opt
from winml.modelkit.profile.memory_records import ModuleBytes, ModuleMemory
from winml.modelkit.profile.module_records import ProfiledModules
from winml.modelkit.profile.module_rows_table import fold_layers, in_phase, module_rows, module_table
from winml.modelkit.report import document as doc
from winml.modelkit.words import shape_words, size_words

_MAX_VALUES = 5
"""Maximum number of values at the peak in a terminal. Chosen: enough to see the modules that hold most."""


def memory_blocks(
    profiled: ProfiledModules, memory: ModuleMemory, phase: str, *, depth: int | None, top: int | None
) -> list[doc.Block]:
    """Build the tables of memory by use, of the values at the peak, and of memory by module.

    Args:
        profiled: The model with its modules.
        memory: Its memory.
        phase: Phase of a decoder; empty for other models.
        depth: Levels of the module tree; the sums include deeper modules. ``None``: all.
        top: List this many modules with the most memory, instead of the tree. ``None``: the tree.
    """
    paths = {module.tag: module.path or module.tag for module in profiled.profile.modules()}
    rows = module_rows([profiled.profile], depth=depth)
    if top is not None:
        rows = sorted(rows, key=lambda row: -sum(_module_bytes(row.entry.memory)))[:top]
    columns = [doc.Column(name, "bytes", key=meaning) for name, meaning in _COLUMNS.items()]
    return [
        _use_table(memory, phase),
        _peak_table(memory, phase, paths),
        module_table(
            rows,
            [] if top is not None else list(fold_layers(rows)),
            columns,
            lambda module: _module_bytes(module.row.entry.memory),
            is_tree=top is None,
            is_hidden=False,
            phase=phase,
            name="memory",
            heading="Memory by module",
        ),
    ]


_COLUMNS = {
    "weights": "weights of the executed graph, with those of the modules inside",
    "packed": "memory of packed copies of weights beyond that of the weights that they replace",
    "at the peak": "values in memory at the peak of activations that the module computed",
    "scratch": "largest temporary memory of a kernel",
}
"""Heading → meaning, in the order of the fields of :class:`ModuleBytes`."""


def _module_bytes(memory: ModuleBytes | None) -> list[int]:
    return [*vars(memory or ModuleBytes()).values()]


def _use_table(memory: ModuleMemory, phase: str) -> doc.Table:
    """Build the table of memory by use; its rows add up to the growth of the process."""
    peak, growth = memory.peak, memory.growth
    uses = {
        "weights": memory.weights_bytes,
        "packed weights": memory.packed_bytes,
        "activations at the peak": peak.activation_bytes,
        "scratch at the peak": peak.scratch_bytes,
        "arena of ONNX Runtime": memory.allocator_bytes,
        "graph and kernels of ONNX Runtime": memory.other_bytes,
        "freed, not returned to the system": growth.freed_bytes,
    }
    whole = growth.growth_bytes or 1  # of a small file, nothing may be measured
    rows: list[list[doc.Cell]] = [[use, _size_cell(size), size / whole] for use, size in uses.items()]
    total: list[doc.Cell] = ["growth of the process", growth.growth_bytes, 1.0]
    opening: list[doc.Cell] = ["at most, while the file was opened", growth.opening_peak_bytes, None]
    return doc.Table(
        doc.columns((in_phase("memory", phase), "name"), ("size", "bytes"), ("share", "share")),
        [*rows, total, opening],
        name=f"memory_use{phase}",
        heading=in_phase("Memory by use", phase),
    )


def _size_cell(size_bytes: int) -> doc.Cell:
    """Format a size; a negative one if less memory was measured than counted."""
    return size_bytes if size_bytes >= 0 else doc.Number(size_bytes, f"-{size_words(-size_bytes)}")


def _peak_table(memory: ModuleMemory, phase: str, paths: dict[str, str]) -> doc.Table:
    """Build the table of the values in memory at the peak of activations."""
    peak = memory.peak
    rows: list[list[doc.Cell]] = [
        [value.value, paths.get(value.tag, value.tag), value.operator, shape_words(value.dtype, value.shape),
         value.size_bytes]
        for value in peak.values
    ]  # fmt: skip
    reserved: list[doc.Cell] = ["(reserved by ONNX Runtime for later values)", "", "", "", peak.reserved_bytes]
    where = f"{peak.operator} of {paths.get(peak.tag, peak.tag) or 'no module'}"
    return doc.Table(
        doc.columns((f"in memory at the peak, in {where}", "name"), ("module", "name"), "operator", "shape",
                    ("size", "bytes")),
        [*rows[:_MAX_VALUES], reserved, *rows[_MAX_VALUES:]],
        name=f"peak{phase}",
        heading=in_phase("Values in memory at the peak", phase),
        brief=range(_MAX_VALUES + 1),
        rest=f"… and {{}} smaller values ({opt.report} lists all)",
    )  # fmt: skip
