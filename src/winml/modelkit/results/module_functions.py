"""Which modules of a written file are functions, and which could not become one?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.graph.function_folding import FIRST_IR_VERSION
from winml.modelkit.hierarchy.address import ModuleIdentity
from winml.modelkit.words import count_noun

__all__ = ["LeftOutModule", "ModuleFunctions", "PartlyOutside"]

SHOWN = 3
"""Modules named in words; the JSON names all. Chosen: they fit on a screen."""


@dataclass(frozen=True)
class LeftOutModule:
    """A module that is no function."""

    module: ModuleIdentity
    reason: str

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**_identity(self.module), "reason": self.reason}


@dataclass(frozen=True)
class PartlyOutside:
    """A module some of whose nodes are not in its function: others need them before the rest can run, or after."""

    module: ModuleIdentity
    nodes: tuple[str, ...]
    """Names of these nodes."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**_identity(self.module), "nodes": list(self.nodes)}


@dataclass(frozen=True)
class ModuleFunctions:
    """The functions of a written file."""

    requested: str
    """``all``, ``classes`` or a selector."""
    functions: Mapping[str, int]
    """Name → calls of a module that it stands for."""
    written_nodes: int
    """Nodes in the file: of the graph and of the functions."""
    graph_nodes: int
    """Those of the graph alone."""
    left_out: tuple[LeftOutModule, ...]
    partly_outside: tuple[PartlyOutside, ...]
    raised_from: int | None = None
    """IR version of the graph, where that of the file had to be a newer one."""

    @property
    def words(self) -> str:
        """The functions in a sentence."""
        calls = sum(self.functions.values())
        shared = f" for {count_noun(calls, 'call')} of modules" if calls != len(self.functions) else ""
        nodes = f"{count_noun(self.written_nodes, 'node')} in the file, {self.graph_nodes} of them in the main graph"
        return f"{count_noun(len(self.functions), 'function')}{shared} · {nodes}"

    def notes(self) -> Iterator[str]:
        """Yield what the user should know, one sentence each."""
        if self.raised_from is not None:
            yield (
                f"IR version {self.raised_from} was raised to {FIRST_IR_VERSION}, the first with all that functions of "
                "modules need."
            )
        for item in self.left_out[:SHOWN]:
            yield f"{item.module.words} is no function: {item.reason}."
        if len(self.left_out) > SHOWN:
            yield f"{len(self.left_out) - SHOWN} other modules are no functions; --format json says why."
        for part in self.partly_outside[:SHOWN]:
            yield f"{part.module.words}: {', '.join(part.nodes)} stays outside its function, between others."

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "requested": self.requested,
            "functions": dict(self.functions),
            "written_nodes": self.written_nodes,
            "graph_nodes": self.graph_nodes,
            "left_out": [item.as_record() for item in self.left_out],
            "partly_outside": [item.as_record() for item in self.partly_outside],
        }


def _identity(module: ModuleIdentity) -> dict[str, str]:
    return {"module": module.module, "tag": module.tag, "class": module.class_name}
