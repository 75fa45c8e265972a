"""Writes files of a checkpoint as readers with code of their own take them; what they hold stays the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from winml.modelkit.builds.layouts.layout import Layout
from winml.modelkit.errors import InputError
from winml.modelkit.file_names import GENAI_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from winml.modelkit.options import JsonError, read_json_file

__all__ = ["rewritten_companions"]

_CLASS = "tokenizer_class"
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""Specified: how transformers 5 calls what reads ``tokenizer.json``, and how earlier ones and itself do."""


def rewritten_companions(layout: Layout, sources: Mapping[str, Path]) -> dict[str, str]:
    """Return the files that go into the folder with other words than the checkpoint has: name → text.

    Args:
        layout: For whom the folder is laid out. optimum pins a transformers before version 5; onnxruntime-genai
            expects a text wherever there is an entry.
        sources: Files that come along: name → file.

    Raises:
        InputError: one is damaged.
    """
    path = sources.get(TOKENIZER_CONFIG_NAME)
    if TOKENIZER_CONFIG_NAME not in layout.written or path is None or TOKENIZER_NAME not in sources:
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error
    if not isinstance(record, dict):
        return {}
    if GENAI_CONFIG_NAME in layout.written:
        changed = {key: value for key, value in record.items() if value is not None}
    else:
        changed = {**record, **({_CLASS: _OLD_CLASS} if record.get(_CLASS) == _NEW_CLASS else {})}
    if changed == record:
        return {}
    return {TOKENIZER_CONFIG_NAME: json.dumps(changed, indent=2, ensure_ascii=False) + "\n"}
