"""What do the files of parts say of their graphs: which output becomes which input of another, and how texts begin?"""

from __future__ import annotations

from winml.modelkit.errors import InputError
from winml.modelkit.graph.bundle import TextTokens
from winml.modelkit.metadata_keys import PART_KEY
from winml.modelkit.options import load_json
from winml.modelkit.runtime.sessions import Session

__all__ = ["feeds_between", "text_tokens"]


def feeds_between(giver: Session, taker: Session) -> dict[str, str]:
    """Return output → input.

    Raises:
        InputError: the files do not say it, or say it of another model.
    """
    try:
        record = load_json(giver.metadata.get(PART_KEY) or "{}")
        name = load_json(taker.metadata.get(PART_KEY) or "{}").get("name")
        feeds = {feed["output"]: feed["input"] for feed in record.get("feeds", ()) if feed["part"] == name}
    except (ValueError, KeyError, TypeError, AttributeError):
        feeds = {}
    if not feeds or not set(feeds) <= set(giver.outputs) or not set(feeds.values()) <= set(taker.inputs):
        raise _unrelated(giver, taker)
    return feeds


def text_tokens(decoder: Session) -> TextTokens | None:
    """Return how a text begins and ends, where the file of a decoder says it.

    Raises:
        InputError: what it says is damaged.
    """
    try:
        return TextTokens.of_record(load_json(decoder.metadata.get(PART_KEY) or "{}").get("text"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{decoder.name}: {PART_KEY} is damaged", hint="Export the model again.") from error


def _unrelated(giver: Session, taker: Session) -> InputError:
    return InputError(
        f"{giver.name} and {taker.name} do not say how they belong together",
        hint="Build both again with this version of winml, from one model.",
    )
