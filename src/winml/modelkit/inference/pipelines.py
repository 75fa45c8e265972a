"""Lets transformers' pipelines take built models without an error message that is not true of them.

A pipeline knows transformers' own classes by name and logs an error for every other class, then works with it.
"""

from __future__ import annotations

import logging

__all__ = ["accept_in_pipelines"]

_LOGGER = "transformers.pipelines.base"
"""Private seam: who logs it, and the words it begins with."""
_COMPLAINT = "The model 'WinMLModel"


def _is_true(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_COMPLAINT)


def accept_in_pipelines() -> None:
    """Keep that message back from now on; doing it again changes nothing."""
    logging.getLogger(_LOGGER).addFilter(_is_true)
