"""What does transformers call the cache, as an argument of a forward and as a field of its result?

It is ``cache`` since transformers 5.24, and ``past_key_values`` or ``cache_params`` before. The forward of a checkpoint
with code of its own may have an older name than the installed version, which then renames the field of its result. So
no version is asked for: the names are looked up in the signature, in the result, and in the generation loop.

Names of graph inputs (``past_key_values.N.key``) do not depend on it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["CACHE_ARGUMENTS", "argument_of", "cache_argument", "cache_field", "loop_cache_name"]

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Specified by transformers, the newest first."""


def cache_argument(names: Collection[str]) -> str | None:
    """Return which of the names of a cache is among parameters or fields; None: none is."""
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def argument_of(field: str, parameters: Collection[str]) -> str | None:
    """Return the parameter of a forward that takes what its result has in a field; None: none does."""
    if field in parameters:
        return field
    return cache_argument(parameters) if field in CACHE_ARGUMENTS else None


def cache_field(outputs: Mapping[str, Any], argument: str) -> str:
    """Return the field of a result that an argument of the next call takes; see :func:`argument_of`."""
    # A list: records of transformers warn where they are asked for an older name.
    fields = list(outputs)
    return argument if argument in fields else cache_argument(fields) or argument


@functools.cache
def loop_cache_name() -> str:
    """Return what the generation loop of the installed transformers calls a cache, and its records do."""
    from transformers import GenerationMixin

    name = cache_argument(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)
    assert name is not None
    return name
