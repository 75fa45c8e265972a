"""Which entries of a ``config.json`` lead out of the checkpoint's folder?

transformers follows several of them: to kernels on the Hub, to code or to backbones in other repositories, to weights
in other files. Entries that only choose an implementation are dropped, with a note; entries without which the model
would be another one are refused. What slips through finds the network closed (``library_access.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.load.checkpoints.weight_files import FORMATS

__all__ = ["refuse_foreign_weights", "without_foreign_references"]

_ATTENTION = frozenset({"eager", "sdpa", "flex_attention"})
_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
"""The implementations that torch and transformers bring along; others are packages, or kernels on the Hub."""

_IMPLEMENTATIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), _ATTENTION),
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), _EXPERTS
    ),
}
_KERNEL_SWITCHES = frozenset({"use_kernels", "kernel_config"})
_OWN_CODE = "auto_map"
_TIMM_NAMES = ("backbone", "architecture")
_ADAPTER = "adapter_config.json"
_WEIGHTS_KEY = "transformers_weights"
_DISTRIBUTED_SHARDS = "shard-*-model-*-of-*.safetensors"


def without_foreign_references(content: Mapping[str, object], path: Path) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the content of a config without the entries that lead elsewhere, and a note for each that was dropped.

    Args:
        content: What the file holds; its own ``auto_map`` is the caller's to decide on, nested ones are dropped.
        path: The file, for messages.

    Raises:
        CheckpointError: the config names an architecture that only another repository tells.
    """
    notes: dict[str, None] = {}
    outer = {key: value for key, value in content.items() if key != _OWN_CODE}
    cleaned = _cleaned(outer, path, lambda note: notes.setdefault(f"{path}: {note}"))
    return {**cleaned, **({_OWN_CODE: content[_OWN_CODE]} if _OWN_CODE in content else {})}, tuple(notes)


def _cleaned(record: Mapping[str, object], path: Path, tell: Callable[[str], object]) -> dict[str, object]:
    cleaned: dict[str, object] = {}
    for key, value in record.items():
        if key in _IMPLEMENTATIONS:
            usable = _usable_implementation(key, value, tell)
            if usable is not None:
                cleaned[key] = usable
        elif key in _KERNEL_SWITCHES:
            tell(f"{key} is not used: kernels are code from outside the checkpoint")
        elif key == _OWN_CODE:
            tell(f"an inner {key} is not used: transformers' own classes are taken")
        elif key in _TIMM_NAMES and isinstance(value, str) and ":" in value:
            raise CheckpointError(
                f"{path}: {key} is {value!r}, whose config lies elsewhere, and nothing but the folder is read",
                hint="Write the name of the timm model itself, such as resnet50.",
            )
        else:
            cleaned[key] = _cleaned_value(value, path, tell)
    return _with_timm_backbone(cleaned)


def _cleaned_value(value: object, path: Path, tell: Callable[[str], object]) -> Any:
    if isinstance(value, Mapping):
        return _cleaned(value, path, tell)
    return [_cleaned_value(item, path, tell) for item in value] if isinstance(value, list) else value


def _usable_implementation(key: str, value: object, tell: Callable[[str], object]) -> Any:
    """Return the part of the entry that names what torch and transformers bring along; None where there is none."""
    if isinstance(value, Mapping):  # one for each inner config
        inner = {name: _usable_implementation(key, item, tell) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item is not None} or None
    if value is None or (isinstance(value, str) and value in _IMPLEMENTATIONS[key]):
        return value
    tell(f"{key} {value!r} is not used, as its code is not part of transformers; the model's default is taken")
    return None


def _with_timm_backbone(record: dict[str, object]) -> dict[str, object]:
    """Write out a backbone of timm that older configs name alone, as transformers does once the Hub has no such model.

    Changes nothing where transformers does not ask the Hub first.
    """
    name, keywords = record.get("backbone"), record.get("backbone_kwargs")
    is_written_out = record.get("backbone_config") is not None or record.get("use_timm_backbone") is False
    if is_written_out or not isinstance(name, str) or "/" in name or not isinstance(keywords, dict) or not keywords:
        return record
    retained = {key: value for key, value in record.items() if key not in ("backbone", "backbone_kwargs")}
    return {**retained, "backbone_config": {**keywords, "model_type": "timm_backbone", "backbone": name}}


def refuse_foreign_weights(config: object, folder: Path) -> None:
    """Refuse a folder whose weights transformers would not take from the files that were checked.

    Raises:
        CheckpointError: the config names another file, or an adapter or a distributed checkpoint lies beside it.
    """
    named = getattr(config, _WEIGHTS_KEY, None)
    usual = next((name for _, *names in FORMATS for name in names if (folder / name).is_file()), None)
    if named is not None and named != usual:
        raise CheckpointError(
            f"{folder}: its config names {named!r} as the file of the weights ({_WEIGHTS_KEY}), which is not read",
            hint=f"Call that file {FORMATS[0][1]}, and leave {_WEIGHTS_KEY} out of the config.",
        )
    if (folder / _ADAPTER).is_file():
        raise CheckpointError(
            f"{folder}: holds an adapter ({_ADAPTER}) beside the model, which is not applied",
            hint=f"Merge it into the model and save that; or take {_ADAPTER} away to use the model without it.",
        )
    shard = next(iter(sorted(folder.glob(_DISTRIBUTED_SHARDS))), None)
    if shard is not None:
        raise CheckpointError(
            f"{folder}: holds a distributed checkpoint ({shard.name}), which is not read",
            hint="Save the model in one piece, or in shards with an index.",
        )
