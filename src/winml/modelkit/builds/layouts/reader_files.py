"""Writes files of a checkpoint as readers with code of their own take them; what they hold stays the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.builds.layouts.layout import Layout
from winml.modelkit.errors import InputError
from winml.modelkit.file_names import GENAI_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from winml.modelkit.options import JsonError, read_json_file

__all__ = ["rewritten_companions"]

_CLASS = "tokenizer_class"
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""Specified: how transformers 5 calls what reads ``tokenizer.json``, and how earlier ones and itself do."""

_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
"""Specified: where transformers 5 lists special tokens without a role, and where earlier ones and itself look for them.
"""


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
        changed = _as_before_transformers_5(record)
    if changed == record:
        return {}
    return {TOKENIZER_CONFIG_NAME: json.dumps(changed, indent=2, ensure_ascii=False) + "\n"}


def _as_before_transformers_5(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a tokenizer in the words that earlier versions read, which version 5 reads as well."""
    changed = {**record, **({_CLASS: _OLD_CLASS} if record.get(_CLASS) == _NEW_CLASS else {})}
    if isinstance(changed.get(_EXTRA), list):
        # A list; as an object, which both know, the key names the role of each token.
        changed[_OLD_EXTRA] = [*(changed.get(_OLD_EXTRA) or ()), *changed.pop(_EXTRA)]
    return changed
