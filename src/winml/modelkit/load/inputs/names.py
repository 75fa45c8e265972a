"""The names of inputs inside containers, and the spelling of options that describe inputs. Imports nothing."""

from __future__ import annotations

__all__ = [
    "INPUT_SPECS_OPTION",
    "SEPARATOR",
    "SHAPE_CONFIG_OPTION",
    "argument_of",
]


# --- How is an input called that stands inside a container? Imports nothing.


SEPARATOR = "."
"""Between the names of containers and keys: ``features.input_ids``, ``images.0``."""


def argument_of(input_name: str) -> str:
    """Return the argument an input belongs to.

    >>> argument_of("features.input_ids")
    'features'
    """
    return input_name.partition(SEPARATOR)[0]


# --- How are the options spelled that describe inputs? For messages; imports nothing.


SHAPE_CONFIG_OPTION = "--shape-config"
INPUT_SPECS_OPTION = "--input-specs"
