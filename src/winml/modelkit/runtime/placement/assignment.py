"""Asks an installed execution provider which nodes of a file it takes, by opening a session in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.placement.own_process import answered

__all__ = ["AssignedNode", "Assignment", "can_be_asked", "find_assignment", "read_answer"]

_NODE = re.compile(r"Operator type: \S+ Node name: (.*?) Node index: \d+")
_REASON = re.compile(r"^\s*REASON : (.*\S)")
"""How QNN's provider names the nodes of a unit that it refuses, and then why."""
_SECONDS = 1800
"""Chosen: half an hour to compile a graph."""


@dataclass(frozen=True)
class AssignedNode:
    """A node as a session has it when providers are asked: folded and fused by then."""

    name: str
    op_type: str
    domain: str
    is_taken: bool
    """Whether the provider runs it; else the CPU provider does."""


@dataclass(frozen=True)
class Assignment:
    """What a provider takes of a graph."""

    nodes: tuple[AssignedNode, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of a node that is left → why, where the provider says it."""
    problem: str = ""
    """Why no session could be opened; then there are no nodes."""


def can_be_asked() -> bool:
    """Say whether the installed ONNX Runtime tells which provider got which node."""
    return hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")


def find_assignment(model: Path, chosen: ChosenProvider) -> Assignment:
    """Return which nodes of a file a provider takes. It compiles what it takes, which may last.

    Args:
        model: An ONNX file, with its data beside it.
        chosen: The provider, its device and options.

    Raises:
        StageError: the process ended without an answer, or did not end in time.
    """
    question = {"model": str(model.absolute()), "providers": list(chosen.names), "options": dict(chosen.options)}
    name = chosen.provider.name
    with answered(question, name, _SECONDS) as (told, log), log.open(encoding="utf-8", errors="replace") as lines:
        return read_answer(name, told, lines)


def read_answer(name: str, told: Mapping[str, Any], log: Iterable[str]) -> Assignment:
    """Return what a session told of a provider.

    Args:
        name: The provider.
        told: The answer of the process.
        log: Lines that it printed.
    """
    reasons = _reasons(log)
    if "problem" in told:
        return Assignment(reasons=reasons, problem=told["problem"])
    nodes = tuple(AssignedNode(node, op_type, domain, ep == name) for ep, node, op_type, domain in told["assigned"])
    return Assignment(nodes, reasons)


def _reasons(lines: Iterable[str]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if found := _NODE.search(line):
            names.append(found[1])
        elif found := _REASON.match(line):
            reasons |= dict.fromkeys(names, found[1])
            names = []
        elif line.strip():
            names = []
    return reasons
