"""Which output of one graph becomes which input of another, as their files say it?"""

from __future__ import annotations

import json

from winml.modelkit.errors import InputError
from winml.modelkit.metadata_keys import PART_KEY
from winml.modelkit.runtime.sessions import Session

__all__ = ["feeds_between", "only_feed_between"]


def feeds_between(giver: Session, taker: Session) -> dict[str, str]:
    """Return output → input.

    Raises:
        InputError: the files do not say it, or say it of another model.
    """
    try:
        record = json.loads(giver.metadata.get(PART_KEY) or "{}")
        name = json.loads(taker.metadata.get(PART_KEY) or "{}").get("name")
        feeds = {feed["output"]: feed["input"] for feed in record.get("feeds", ()) if feed["part"] == name}
    except (ValueError, KeyError, TypeError, AttributeError):
        feeds = {}
    if not feeds or not set(feeds) <= set(giver.outputs) or not set(feeds.values()) <= set(taker.inputs):
        raise _unrelated(giver, taker)
    return feeds


def only_feed_between(giver: Session, taker: Session) -> tuple[str, str]:
    """Return the output and the input where there is one of each.

    Raises:
        InputError: the files do not say it, or name several.
    """
    feeds = list(feeds_between(giver, taker).items())
    if len(feeds) != 1:
        raise _unrelated(giver, taker)
    return feeds[0]


def _unrelated(giver: Session, taker: Session) -> InputError:
    return InputError(
        f"{giver.name} and {taker.name} do not say how they belong together",
        hint="Build both again with this version of winml, from one model.",
    )
