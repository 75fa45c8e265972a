"""Tells transformers.js in ``config.json`` which models keep weights in files of their own.

A browser knows no folder: it fetches the files that the config counts. Everything else of the config stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from winml.modelkit.errors import InputError
from winml.modelkit.options import JsonError, read_json_file

__all__ = ["config_naming_data"]

_SECTION, _COUNTS = "transformers.js_config", "use_external_data_format"
"""Specified: what transformers.js reads for itself; model file → number of its data files."""


def config_naming_data(source: Path, counts: Mapping[str, int]) -> str:
    """Return the text of a config; that of the checkpoint itself where all weights are inside the models.

    Args:
        source: ``config.json`` of the checkpoint.
        counts: Name of each model file → number of its data files.

    Raises:
        InputError: it is damaged.
    """
    try:
        record = read_json_file(source)
        text = source.read_text(encoding="utf-8")
    except JsonError as error:
        raise InputError(f"{source}: {error}", hint=error.hint) from error
    outside = {name: count for name, count in counts.items() if count}
    if not isinstance(record, dict) or not isinstance(record.get(_SECTION, {}), dict):
        raise InputError(f"{source}: is no config: {_SECTION!r} or the whole is no JSON object")
    section = {key: value for key, value in record.get(_SECTION, {}).items() if key != _COUNTS}
    if outside:
        section[_COUNTS] = outside
    if section == record.get(_SECTION, {}):
        return text
    return json.dumps({**record, _SECTION: section}, indent=2, ensure_ascii=False) + "\n"
