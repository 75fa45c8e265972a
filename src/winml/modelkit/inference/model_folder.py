"""What do the files beside a built model say: its config, and the token that fills short rows up?

Reads local files only; code that comes with a checkpoint is not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.evaluate.processors import UNREADABLE, tokenizer_call
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["config_beside", "pad_token_beside"]


def config_beside(model: Path) -> PretrainedConfig | None:
    """Return the transformers config in the folder of a model, or None where there is none it can read."""
    if not (model.parent / CHECKPOINT_CONFIG_NAME).is_file():
        return None
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model.parent, local_files_only=True, trust_remote_code=False
        )
    except UNREADABLE:
        return None
    return config


def pad_token_beside(model: Path, config: PretrainedConfig | None) -> int | None:
    """Return the token that fills short rows up: the config's, else that of the tokenizer in the folder of a model."""
    pad_token = getattr(config, "pad_token_id", None)
    if pad_token is not None or config is None:
        return pad_token
    from transformers import AutoTokenizer

    try:
        with tokenizer_call(model.parent):
            tokenizer = AutoTokenizer.from_pretrained(model.parent, local_files_only=True, trust_remote_code=False)
    except UNREADABLE:
        return None
    token: int | None = tokenizer.pad_token_id
    return token
