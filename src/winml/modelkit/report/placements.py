"""Table of the modules of a file on a device: their nodes on the device, and the reasons of the other nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from winml.modelkit.errors import opt
from winml.modelkit.ort.device_trace import ModulePlacement
from winml.modelkit.report import document as doc

_MAX_ROWS = 12
"""Number of modules in a terminal. Chosen: a screen has room for the rest of the result."""


def placement_table(
    modules: Sequence[ModulePlacement], device: str, parts: Sequence[Collection[str]] = ()
) -> doc.Table:
    """Build the table, modules with nodes outside of the device first.

    Args:
        modules: The modules.
        device: Kind of the device.
        parts: Modules of each compiled part; with several parts, a column has the numbers of the parts of a module.
    """
    has_parts = len(parts) > 1
    part_column = ["part"] if has_parts else []
    columns = doc.columns(
        ("module", "name"), *part_column, ("nodes", "count"), (f"on the {device}", "count"), "outside, reason"
    )
    rows: list[list[doc.Cell]] = []
    for placement in sorted(modules, key=lambda placement: not placement.reasons):
        numbers = [str(number) for number, part in enumerate(parts, 1) if placement.module in part]
        rows.append(
            [
                placement.module or "(the root)",
                *([", ".join(numbers) if placement.on_device else ""] if has_parts else []),
                placement.nodes,
                placement.on_device,
                placement.reason_words,
            ]
        )
    return doc.Table(columns, rows, brief=range(_MAX_ROWS), rest=f"… and {{}} more ({opt.verbose} shows all)")
