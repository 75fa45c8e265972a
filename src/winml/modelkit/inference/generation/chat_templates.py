"""Writes the message of a user as the chat template of a model asks for it.

A template is a program of the model's maker, in a sandbox that keeps it from files but not from filling the memory: it
runs in a process with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.tokenizer_calls import LONGEST_TEXT_CHARACTERS
from winml.modelkit.file_names import TOKENIZER_CONFIG_NAME
from winml.modelkit.inference.generation.config_file import read_record
from winml.modelkit.options import JsonError, read_text_file
from winml.modelkit.runtime.processes import ask_limited

__all__ = ["RENDERING", "chat_prompt", "rendered_chat"]

_TEMPLATE_NAME = "chat_template.jinja"
"""Specified: the file transformers keeps a chat template in; before, it was a key of the tokenizer's config."""
_LIMIT_SECONDS: Final = 5.0
"""Chosen: a thousand times what templates of chat models take (measured: 1 to 5 ms)."""
_LIMIT_BYTES: Final = 1_000_000_000
"""Chosen: more than ten times what rendering takes (measured: 60 MB, libraries included)."""
RENDERING = "winml.modelkit.inference.generation.template_rendering"
"""The module that renders."""


def chat_prompt(folder: Path, message: str) -> str:
    """Return the text with which a model is asked to answer a message of a user, as its chat template writes it.

    The special tokens are in the text: it is encoded without adding any.

    Raises:
        UsageError: the model has no chat template.
        InputError: the template fails or takes too much, or a file is damaged.
    """
    config = read_record(folder / TOKENIZER_CONFIG_NAME)
    template = _chat_template(folder, config)
    if template is None:
        raise UsageError(
            f"{folder}: has no chat template ({_TEMPLATE_NAME})",
            hint="Leave out --chat: the model goes on with any text.",
        )
    return rendered_chat(folder, template, message, _special_tokens(config))


def rendered_chat(
    folder: Path, template: str, content: str | Sequence[Mapping[str, object]], variables: Mapping[str, object]
) -> str:
    """Return what a template makes of one message of a user.

    Args:
        folder: Where the template is from, for messages.
        template: Its text.
        content: The text of the message, or its parts.
        variables: What the template knows besides, such as ``bos_token``.

    Raises:
        InputError: the template fails, or takes too much time or memory.
    """
    question = {
        "template": template,
        "messages": [{"role": "user", "content": content}],
        "variables": dict(variables),
    }
    try:
        output = ask_limited(
            RENDERING,
            question,
            f"{folder}: its chat template",
            seconds=_LIMIT_SECONDS,
            resident_bytes=_LIMIT_BYTES,
        )
    except InputError as error:
        error.hint = "Leave out --chat, or replace the template."
        raise
    if "error" in output:
        raise InputError(f"{folder}: its chat template fails: {output['error']}")
    text = str(output["text"])
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise InputError(
            f"{folder}: its chat template makes {len(text)} characters of the message, and at most "
            f"{LONGEST_TEXT_CHARACTERS} are tokenized",
            hint="Leave out --chat, or replace the template.",
        )
    return text


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / _TEMPLATE_NAME
    if path.is_file():
        try:
            return read_text_file(path)
        except JsonError as error:
            raise InputError(f"{path}: {error}", hint=error.hint) from error
    value = config.get("chat_template") or read_record(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, object]:
    """Return what templates know of a tokenizer: ``bos_token`` and the like."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in named.items() if isinstance(value, str)}
