"""How is an input called that stands inside a container? Imports nothing."""

from __future__ import annotations

__all__ = ["SEPARATOR", "argument_of"]

SEPARATOR = "."
"""Between the names of containers and keys: ``features.input_ids``, ``images.0``."""


def argument_of(input_name: str) -> str:
    """Return the argument an input belongs to.

    >>> argument_of("features.input_ids")
    'features'
    """
    return input_name.partition(SEPARATOR)[0]
