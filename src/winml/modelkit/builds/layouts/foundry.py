"""The file by which Foundry Local finds a folder of onnxruntime-genai: its name, and its prompts.

Foundry Local does not read chat templates: it replaces ``{Content}`` in one text for each role. These texts are made
from the chat template of the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import TOKENIZER_CONFIG_NAME
from winml.modelkit.onnx.files.foreign_files import read_record
from winml.modelkit.samples.chat_templates import Chat, read_chat_template, rendered_chats, special_tokens

_CONTENT: Final = "{Content}"
"""Specified: placeholder for the message."""
_ROLES = ("system", "user", "assistant")


def foundry_record(model: str, folder: Path | None) -> dict[str, Any]:
    """Return the content of ``inference_model.json``.

    Args:
        model: Name of the model, as the user wrote it.
        folder: Folder of the checkpoint, with its chat template; None: unknown.

    Raises:
        InputError: a config is damaged.
    """
    record: dict[str, Any] = {"Name": Path(model).name or model}
    if folder is None:
        return record
    config = read_record(folder, TOKENIZER_CONFIG_NAME)
    template = read_chat_template(folder, config)
    tokens = tuple(special_tokens(config).items())
    prompts = {} if template is None else _prompt_texts(folder, template, tokens)
    return {**record, "PromptTemplate": prompts} if prompts else record


@functools.lru_cache(maxsize=2)
def _prompt_texts(folder: Path, template: str, tokens: tuple[tuple[str, object], ...]) -> Mapping[str, str]:
    """Return role, or ``prompt`` → text with a placeholder; ``{}`` for a template that has no such texts.

    A text is what a message adds to the messages before it. The first token of a text is omitted: the tokenizer adds
    it.
    """
    roles = [_ROLES[:count] for count in (1, 2, 3)] + [_ROLES[1:count] for count in (2, 3)]
    chats = [(chat, has_prompt) for chat in roles for has_prompt in (False, True)]
    try:
        answers = rendered_chats(folder, template, [_make_chat(*chat, dict(tokens)) for chat in chats])
    except InputError:  # the template takes too much
        return {}
    texts = {chat: answer["text"] for chat, answer in zip(chats, answers, strict=True) if "text" in answer}
    return _added_texts(texts, _ROLES) or _added_texts(texts, _ROLES[1:])


def _make_chat(roles: Sequence[str], has_prompt: bool, tokens: Mapping[str, object]) -> Chat:
    """Return a chat with a message of each role."""
    messages = [{"role": role, "content": _CONTENT} for role in roles]
    return Chat(messages, {**tokens, "bos_token": "", "add_generation_prompt": has_prompt})


def _added_texts(texts: Mapping[tuple[tuple[str, ...], bool], str], roles: tuple[str, ...]) -> dict[str, str]:
    """Return the text of each role in a chat; ``{}`` if the template refuses the chat, or depends on later messages.

    Args:
        texts: Roles of a chat, and True with the beginning of the next message → its text.
        roles: The roles, in the order of the chat.
    """
    added: dict[str, str] = {}
    before = ""
    for number, role in enumerate(roles, 1):
        ends = {"prompt": True, role: False} if role == "user" else {role: False}
        for name, has_prompt in ends.items():
            text = texts.get((roles[:number], has_prompt))
            if text is None or not text.startswith(before) or text[len(before) :].count(_CONTENT) != 1:
                return {}
            added[name] = text[len(before) :]
        before += added[role]
    return {name: added[name] for name in (*roles, "prompt")}
