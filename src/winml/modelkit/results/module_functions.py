"""Which modules of a written file are functions, and which could not become one?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from winml.modelkit.graph.function_folding import FIRST_IR_VERSION
from winml.modelkit.hierarchy.address import ModuleIdentity
from winml.modelkit.records import Record, entry
from winml.modelkit.words import count_noun

__all__ = ["LeftOutModule", "ModuleFunctions", "PartlyOutside"]

SHOWN = 3
"""Modules named in words; the JSON names all. Chosen: they fit on a screen."""

_IDENTITY = entry(inline=True, keys=("module", "tag", "class"))


@dataclass(frozen=True)
class LeftOutModule(Record):
    """A module that is no function."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    reason: str


@dataclass(frozen=True)
class PartlyOutside(Record):
    """A module some of whose nodes are not in its function: others need them before the rest can run, or after."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    nodes: tuple[str, ...]
    """Names of these nodes."""


@dataclass(frozen=True)
class ModuleFunctions(Record):
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
    raised_from: int | None = field(default=None, metadata=entry(skip=True))
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
