"""The layout of transformers.js: files named by precision, weights in numbered files that ``config.json`` counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from winml.modelkit.builds.layouts.layout import Layout, LayoutFiles
from winml.modelkit.builds.layouts.optimum import TASKS, model_stem
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.quantize.precisions import FLOAT32

__all__ = ["TRANSFORMERS_JS", "config_naming_data"]

_SUFFIXES: Mapping[str, str] = {
    FLOAT32: "", "fp16": "_fp16", "int8": "_quantized", "uint8": "_uint8", "int4": "_q4",
}  # fmt: skip
"""Specified: ``DEFAULT_DTYPE_SUFFIX_MAPPING`` of transformers.js; the others of ours have no name there."""


def _model_name(part: str, of_several: bool, precision: str) -> str:
    if precision not in _SUFFIXES:
        raise UsageError(
            f"--layout transformers.js has no name for precision {precision}", hint=f"It knows {', '.join(_SUFFIXES)}."
        )
    return f"onnx/{model_stem(part, of_several)}{_SUFFIXES[precision]}.onnx"


# --- Tells transformers.js in ``config.json`` which models keep weights in files of their own.
#
# A browser knows no folder: it fetches the files that the config counts. Everything else of the config stays as it is.


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


def _described(files: LayoutFiles) -> dict[str, str]:
    config = files.sources.get(CHECKPOINT_CONFIG_NAME)
    if config is None:
        return {}
    counts = {Path(name).name: len(files.data.get(part, ())) for part, (_, name) in files.models.items()}
    return {CHECKPOINT_CONFIG_NAME: config_naming_data(config, counts)}


TRANSFORMERS_JS = Layout(
    "transformers.js",
    _model_name,
    readers="transformers.js",
    tasks=TASKS,
    cross_keys="decoder",
    described=(CHECKPOINT_CONFIG_NAME,),
    describe=_described,
    unread=("vocab.txt", TOKENIZER_CONFIG_NAME),
    numbers_data=True,
)
"""For browsers and Node.js."""
