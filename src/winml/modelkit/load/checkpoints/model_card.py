"""What does the model card of a checkpoint say the model is for?

A card is the ``README.md`` beside the config; facts for programs stand in front of its text. It is a help, never a
need: one that cannot be read says nothing.
"""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.file_names import MODEL_CARD_NAME
from winml.modelkit.graph.files.front_matter import FrontMatterError, front_matter_value

__all__ = ["card_task"]

_LONGEST_TAG = 1000
"""Bytes of the line of the tag. Chosen: the longest name of a task has 30 letters."""


def card_task(folder: Path | None) -> str | None:
    """Return the ``pipeline_tag`` of the card in a folder; None where there is no card, or none is named."""
    if folder is None:
        return None
    try:
        tag = front_matter_value(folder / MODEL_CARD_NAME, "pipeline_tag", _LONGEST_TAG)
    except FrontMatterError:
        return None
    return tag if isinstance(tag, str) else None
