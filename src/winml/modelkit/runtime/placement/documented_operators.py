"""What do execution providers document of the operators they run?

The tables are in ``documented_operators.json``, with the document and the version each was taken from. Operators that a
document does not list are not in its table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DocumentedOperator", "OperatorTable", "documented_providers", "operator_table"]

_TABLES = Path(__file__).with_name("documented_operators.json")


@dataclass(frozen=True)
class DocumentedOperator:
    """One operator of a table."""

    limit: str = ""
    """What the document asks of it beside its name; empty for nothing."""
    types: tuple[str, ...] = ()
    """Element types of its first input; empty where the document lists none."""
    devices: tuple[str, ...] = ()
    """Kinds of devices it is limited to; empty for none."""


@dataclass(frozen=True)
class OperatorTable:
    """The operators that one provider documents."""

    source: str
    """Address of the document."""
    version: str
    """What the document says it is about."""
    operators: Mapping[str, DocumentedOperator]
    """Operator, with its domain where that is not ONNX's own (``com.microsoft.Gelu``) → what is said of it."""
    also: Mapping[str, str]
    """Operators that run as part of a pattern only → the pattern, in words."""
    casts: Mapping[str, str]
    """Element types that are taken as others → how, in words."""
    opsets: tuple[int, int] | None
    """Oldest and newest opset; None where the document says none."""
    caveat: str
    """What else the document says of the table; empty for nothing."""


def operator_table(short: str) -> OperatorTable | None:
    """Return the table of a provider by its short name; None where there is none."""
    table = _tables().get(short)
    if table is None:
        return None
    operators = {
        name: DocumentedOperator(entry.get("limit", ""), tuple(entry.get("types", ())), tuple(entry.get("devices", ())))
        for name, entry in table["operators"].items()
    }
    opsets = table.get("opsets")
    return OperatorTable(
        source=table["source"],
        version=table["version"],
        operators=operators,
        also=table.get("also", {}),
        casts=table.get("casts", {}),
        opsets=None if opsets is None else (opsets[0], opsets[1]),
        caveat=table.get("caveat", ""),
    )


def documented_providers() -> tuple[str, ...]:
    """Return the short names of the providers that have a table."""
    return tuple(_tables())


@functools.cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(_TABLES.read_text(encoding="utf-8"))
    return tables
