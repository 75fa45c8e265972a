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


def _reader(source_line: SourceLine | None) -> str:
    return "A scripted module" if source_line is None else f"{source_line[0]}:{source_line[1]}"


def assume_branch(source_line: SourceLine | None) -> Assumption:
    """Create the assumption of a line that reads a value, fixed in the trace; None: in a scripted module."""
    file, line = source_line or (None, None)
    reader = _reader(source_line)
    message = f"{reader} reads the value of a tensor: the graph contains the branch taken for the traced inputs."
    return Assumption("branch", file=file, line=line, message=message)


def assume_values(source_line: SourceLine) -> Assumption:
    """Create the assumption of a line that converts a tensor to a list or a NumPy array."""
    file, line = source_line
    message = f"{file}:{line} converts a tensor to Python values: the graph contains those of the traced inputs."
    return Assumption("value", file=file, line=line, message=message)


def assume_size(source_line: SourceLine | None, value: str | None = None, sizes: Iterable[str] = ()) -> Assumption:
    """Create the assumption of a line that converts a dynamic size to a number, or branches on it.

    Args:
        source_line: The line; None: in a scripted module.
        value: The traced value.
        sizes: Names of the dynamic sizes it may depend on.
    """
    file, line = source_line or (None, None)
    names = ", ".join(sorted(sizes))
    if value in ("True", "False"):
        message = f"branches on the size{f' {names}' * bool(names)}: the graph contains the branch for the traced one."
    else:
        message = (
            f"converts {f'the size {names}' if names else 'a size'} to a number: the graph contains the traced one."
        )
    message = f"{_reader(source_line)} {message}"
    return Assumption("size", input=names, value=value, file=file, line=line, message=message)


def constant_output(name: str) -> Assumption:
    """Create the assumption of an output equal for all compared inputs, in PyTorch and in the file."""
    message = f"Output {name!r} is the same for all inputs compared: the file was not verified for others."
    return Assumption("constant_output", value=name, message=message)


def places_of(assumed: Iterable[Assumption]) -> tuple[str, ...]:
    """Return the source lines of assumptions on values, each once."""
    return tuple(dict.fromkeys(assumption.place for assumption in assumed if assumption.kind in ("branch", "value")))
