"""Boundary of a module: the values that enter and leave one of its calls."""

from __future__ import annotations

from dataclasses import dataclass

from winml.modelkit.tags.address import ModuleIdentity

CallKey = tuple[str, int]
"""(tag of a module, number of its call from 1)."""


@dataclass(frozen=True)
class ModuleBoundary:
    """Inputs and outputs of one call of a module."""

    identity: ModuleIdentity
    inputs: tuple[str, ...] = ()
    """Names of floating-point values computed before, in the order they are first read."""
    outputs: tuple[str, ...] = ()
    """Names of values, in the order they are computed."""
    position: int = 0
    """Position of its last output in the order of computation."""
    reason: str = ""
    """Reason for a missing boundary."""
    ends_in: str = ""
    """Name of a node that fuses its last operators with those of other modules, so that ``outputs`` are not its return
    values; empty if there is none."""
    fused_with: tuple[str, ...] = ()
    """Tags of the other modules fused into its nodes."""

    @property
    def key(self) -> CallKey:
        """Tag and number of the call."""
        return self.identity.tag, self.identity.call
