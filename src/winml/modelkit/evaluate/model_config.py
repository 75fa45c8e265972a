"""Reads the transformers config that lies beside a model, for the names of its classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from winml.modelkit.errors import InputError, first_line
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME

__all__ = ["UNREADABLE", "open_config"]

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
"""What transformers raises for files that are missing, damaged, or need code of their own or another package."""


def open_config(folder: Path) -> Any:
    """Return the config in a folder, or None where there is none.

    Raises:
        InputError: it is damaged.
    """
    if not (folder / CHECKPOINT_CONFIG_NAME).is_file():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise InputError(
            f"{folder / CHECKPOINT_CONFIG_NAME} cannot be read: {first_line(error)}", hint="Mend or replace it."
        ) from error
