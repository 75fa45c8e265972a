"""Chat templates of models: read from the files of a checkpoint, and rendered in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.file_names import TOKENIZER_CONFIG_NAME
from winml.modelkit.onnx.files.foreign_files import library_file, read_record
from winml.modelkit.options import JsonError, read_text_file
from winml.modelkit.ort.processes import ask_limited
from winml.modelkit.samples.processors import LONGEST_TEXT_CHARACTERS

_TEMPLATE_NAME = "chat_template.jinja"
"""Specified: transformers' file of a chat template; formerly a key of the tokenizer's config."""
_LIMIT_SECONDS: Final = 5.0
"""Chosen: a thousand times the rendering time of chat models' templates (measured: 1 to 5 ms)."""
_LIMIT_BYTES: Final = 1_000_000_000
"""Chosen: more than ten times the memory for rendering (measured: 60 MB, including libraries)."""
RENDERING = "winml.modelkit.samples.template_rendering"
"""The module that renders templates."""


def chat_prompt(folder: Path, message: str, system: str | None = None) -> str:
    """Render the chat template of a model for a user message.

    The text contains the special tokens: it is tokenized without adding any.

    Args:
        folder: Folder of the template.
        message: The user message.
        system: Message in the role ``system`` before it, or None.

    Raises:
        UsageError: the model has no chat template.
        InputError: the template fails or takes too much, or a file is damaged.
    """
    config = read_record(folder, TOKENIZER_CONFIG_NAME)
    template = read_chat_template(folder, config)
    if template is None:
        raise UsageError(
            f"{folder}: no chat template ({_TEMPLATE_NAME})",
            hint=f"Omit {opt.chat}: without it, the model continues the text as it is.",
        )
    before = [] if system is None else [{"role": "system", "content": system}]
    return rendered_chat(folder, template, [*before, {"role": "user", "content": message}], special_tokens(config))


def rendered_chat(
    folder: Path, template: str, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
) -> str:
    """Render a chat template.

    Args:
        folder: Folder of the template, for error messages.
        template: Text of the template.
        messages: Role and content of each message: a text, or parts.
        variables: Further variables, such as ``bos_token``.

    Raises:
        InputError: the template fails, or takes too much time or memory.
    """
    (output,) = rendered_chats(folder, template, [Chat(messages, variables)])
    if "error" in output:
        raise InputError(f"{folder}: the chat template failed: {output['error']}")
    text = str(output["text"])
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise InputError(
            f"{folder}: the chat template expands the message to {len(text)} characters; the maximum is "
            f"{LONGEST_TEXT_CHARACTERS}",
            hint=f"Omit {opt.chat}, or replace the template.",
        )
    return text


class Chat(NamedTuple):
    """Messages, and further variables of a chat template."""

    messages: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]


def rendered_chats(folder: Path, template: str, chats: Sequence[Chat]) -> list[dict[str, str]]:
    """Render a chat template for several chats; return the ``text`` of each, or the ``error`` of the template.

    Args:
        folder: Folder of the template, for error messages.
        template: Text of the template.
        chats: The chats.

    Raises:
        InputError: the template takes too much time or memory.
    """
    records = [{"messages": list(chat.messages), "variables": dict(chat.variables)} for chat in chats]
    try:
        output = ask_limited(
            RENDERING,
            {"template": template, "chats": records},
            f"{folder}: its chat template",
            seconds=_LIMIT_SECONDS,
            resident_bytes=_LIMIT_BYTES,
        )
    except InputError as error:
        error.hint = f"Omit {opt.chat}, or replace the template."
        raise
    answers: list[dict[str, str]] = output["answers"]
    return answers


def read_chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """Return the chat template in the files of a model; None without a template.

    Raises:
        InputError: a file is damaged.
    """
    path = library_file(folder, _TEMPLATE_NAME)
    if path is not None:
        try:
            return read_text_file(path)
        except JsonError as error:
            raise InputError(f"{path}: {error}", hint=error.hint) from error
    value = config.get("chat_template") or read_record(folder, "chat_template.json").get("chat_template")
    if isinstance(value, list):
        templates = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = templates.get("default")
    return value if isinstance(value, str) else None


def special_tokens(config: Mapping[str, object]) -> dict[str, object]:
    """Return the special tokens of a tokenizer as template variables: ``bos_token`` and the like."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
