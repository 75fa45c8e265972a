"""What does the model card of a checkpoint say the model is for?

A card is the ``README.md`` beside the config; facts for programs stand in front of its text. It is a help, never a
need: one that cannot be read says nothing.
"""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.file_names import MODEL_CARD_NAME

__all__ = ["card_task"]

_MOST_BYTES = 4 * 10**6
"""Chosen: cards are text of some thousand words."""


def card_task(folder: Path | None) -> str | None:
    """Return the ``pipeline_tag`` of the card in a folder; None where there is no card, or none is named."""
    path = None if folder is None else folder / MODEL_CARD_NAME
    if path is None or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    import yaml
    from huggingface_hub import metadata_load

    try:
        facts = metadata_load(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    tag = facts.get("pipeline_tag") if isinstance(facts, dict) else None
    return tag if isinstance(tag, str) else None
