"""Assumptions of a graph on its inputs: one record with a message each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Literal

from winml.modelkit.records import Record, entry

AssumptionKind = Literal["branch", "value", "size", "first_call", "constant_output"]
"""A choice by the value of a tensor, values handed to Python, a size taken for a number, state of the first call, an
output that was the same for all inputs."""

SourceLine = tuple[str, int]
"""File name and line of the user's Python."""


class Assumption(Record):
    """A property of the trace, possibly false for other inputs within the declared ranges."""

    kind: AssumptionKind
    input: str = field(default="", metadata=entry(omit_empty=True))
    """Names of the inputs it depends on, for a size the names of dynamic dimensions; ``""`` if unknown."""
    value: str | None = None
    """The traced value, as text; None if unknown."""
    file: str | None = None
    """Name of the Python file; None if no line is known."""
    line: int | None = None
    message: str = ""
    """One sentence, also used as the note."""

    @property
    def place(self) -> str:
        """The source line: ``net.py:8``; ``""`` if unknown."""
        return f"{self.file}:{self.line}" if self.file is not None else ""

    @property
    def words(self) -> str:
        """The assumption without its sentence: ``branch at net.py:8 (x: False)``."""
        at = f" at {self.place}" if self.place else ""
        detail = ": ".join(text for text in (self.input, self.value) if text)
        return f"{self.kind}{at}{f' ({detail})' if detail else ''}"


def _assume(
    kind: AssumptionKind, source_line: SourceLine | None, clause: str, value: str | None = None, names: str = ""
) -> Assumption:
    """Create an assumption whose message names the source line, or a scripted module, and continues with a clause."""
    file, line = source_line or (None, None)
    reader = "A scripted module" if source_line is None else f"{file}:{line}"
    return Assumption(kind, input=names, value=value, file=file, line=line, message=f"{reader} {clause}")


def assume_branch(source_line: SourceLine | None, value: str | None = None, inputs: Iterable[str] = ()) -> Assumption:
    """Create the assumption of a line that reads a value, fixed in the trace.

    Args:
        source_line: The line; None: in a scripted module.
        value: The traced value.
        inputs: Names of the inputs it depends on.
    """
    clause = "reads the value of a tensor: the graph contains the branch taken for the traced inputs."
    return _assume("branch", source_line, clause, value, ", ".join(sorted(inputs)))


def assume_values(source_line: SourceLine) -> Assumption:
    """Create the assumption of a line that converts a tensor to Python values."""
    return _assume(
        "value", source_line, "converts a tensor to Python values: the graph contains those of the traced inputs."
    )


def assume_size(
    source_line: SourceLine | None, value: str | None = None, sizes: Iterable[str] = (), *, is_branch: bool = False
) -> Assumption:
    """Create the assumption of a line that converts a dynamic size to a number, or branches on it.

    Args:
        source_line: The line; None: in a scripted module.
        value: The traced value.
        sizes: Names of the dynamic sizes it may depend on.
        is_branch: The line is known to branch; otherwise it does if the traced value is a truth value.
    """
    names = ", ".join(sorted(sizes))
    size = f"the size {names}" if names else "a size"
    clause = f"converts {size} to a number: the graph contains the traced one."
    if is_branch or value in ("True", "False"):
        clause = f"branches on {size}: the graph contains the branch for the traced one."
    return _assume("size", source_line, clause, value, names)


def constant_output(name: str) -> Assumption:
    """Create the assumption of an output equal for all compared inputs, in PyTorch and in the file."""
    message = f"Output {name!r} is the same for all inputs compared: the file was not verified for others."
    return Assumption("constant_output", value=name, message=message)


def places_of(assumed: Iterable[Assumption]) -> tuple[str, ...]:
    """Return the source lines of assumptions on values, each once."""
    return tuple(dict.fromkeys(assumption.place for assumption in assumed if assumption.kind in ("branch", "value")))
