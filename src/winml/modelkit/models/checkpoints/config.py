"""Reading of the ``config.json`` of a checkpoint into a transformers config.

Parses the JSON, determines the model type, decides whether the checkpoint's own code is needed and allowed, and builds
the transformers config. References to other repositories are dropped or refused. Everything is read from the disk;
nothing is fetched. Task and class are decided in ``task.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, RemoteCodeError, UsageError, failed_import, first_line, opt
from winml.modelkit.file_names import MODEL_CARD_NAME
from winml.modelkit.models.checkpoints.quantized.formats import quantization_of, without_quantization
from winml.modelkit.models.checkpoints.task import tasks_for
from winml.modelkit.models.checkpoints.weight_files import FORMATS
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.foreign_numbers import refuse_absurd_sizes
from winml.modelkit.onnx.files.front_matter import FrontMatterError, front_matter_value
from winml.modelkit.options import JsonError, read_json_file, suggest

_AUTO_CONFIG = "AutoConfig"
_AUTO_MODEL_PREFIX = "AutoModel"

_SPECIAL_FLOAT_KEY = "__float__"
_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Specified by transformers: ``{"__float__": "Infinity"}`` encodes a number that JSON cannot express."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint, with notes for the user."""

    config: Any
    """The ``transformers.PreTrainedConfig``."""
    root: Path | None
    """Folder of the config, also of custom code, tokenizer and processor files; `None` without a checkpoint."""
    custom_models: dict[str, str]
    """Auto class → ``module.Class`` of the checkpoint's own code that may run; `{}`: transformers' classes are used."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    quantization: Mapping[str, Any] | None = None
    """Quantization of the weights; removed from the config, which describes the float model."""


def load_config(path: Path, name: str, *, trust_remote_code: bool) -> CheckpointConfig:
    """Build the config in a file.

    Args:
        path: The ``config.json``.
        name: Hub id or path as the user wrote it; determines the model type of old configs without one.
        trust_remote_code: Whether code of the checkpoint may run.

    Raises:
        CheckpointError: malformed JSON (line and column), an unknown model type, or values transformers refuses.
        RemoteCodeError: the checkpoint needs its own code, which is not allowed or missing.
    """
    content = read_json_config(path)
    _check_architectures(content, path)
    references = _own_class_references(content)
    model_type, notes = _decide_model_type(content, name, path, has_own_code=_AUTO_CONFIG in references)
    refuse_absurd_sizes(content, path)
    own_classes = _select_own_classes(references, model_type)
    if own_classes and not trust_remote_code:
        raise RemoteCodeError(
            f"{name}: needs custom code ({', '.join(sorted(set(own_classes.values())))}), which was not run",
            hint=f"Read that code; if you trust it, add {opt.trust_remote_code}.",
        )
    if references and not trust_remote_code:
        notes.append(f"the code in {name} was not run: transformers has the same classes")
    if references and trust_remote_code:
        own_classes = references
        notes.append(
            f"running code of {name}, as {opt.trust_remote_code} allows: {', '.join(sorted(set(own_classes.values())))}"
        )
    quantization = quantization_of(content)
    content, dropping_notes = _drop_foreign_references(without_quantization(content), path)
    notes += dropping_notes
    config = _build_config(path, content, model_type, own_classes.get(_AUTO_CONFIG))
    models = {key: reference for key, reference in own_classes.items() if key != _AUTO_CONFIG}
    return CheckpointConfig(config, path.parent, models, tuple(notes), quantization)


def default_config(model_type: str) -> CheckpointConfig:
    """Return transformers' default config of a model type.

    Raises:
        UsageError: transformers does not know the type (names the nearest).
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"{opt.model_type} {model_type}: unknown to transformers {transformers.__version__}",
            hint=suggest(
                model_type, CONFIG_MAPPING.keys(), otherwise="Pass a model type such as bert, vit or whisper."
            ),
        )
    return CheckpointConfig(_build_or_refuse(CONFIG_MAPPING[model_type], f"{opt.model_type} {model_type}"), None, {})


def with_config_of_class(checkpoint: CheckpointConfig, model_class: object) -> CheckpointConfig:
    """Replace the config by the inner config of a class's type, such as the decoder's config.

    Args:
        checkpoint: Config and files of the whole model.
        model_class: Class to build.
    """
    expected = getattr(model_class, "config_class", None)
    config = checkpoint.config
    if not isinstance(expected, type) or isinstance(config, expected):
        return checkpoint
    sub_configs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    fitting = [sub_config for sub_config in sub_configs if type(sub_config) is expected]
    return replace(checkpoint, config=fitting[0]) if len(fitting) == 1 else checkpoint


def model_type_of_class(name: str) -> str:
    """Return the model type of a transformers class.

    Raises:
        UsageError: transformers has no model class of this name, or the class serves every model type.
    """
    import transformers

    if name.startswith("Auto") and hasattr(transformers, name):
        raise UsageError(
            f"{opt.model_class} {name}: is not specific to an architecture",
            hint=f"Pass {opt.model_type} as well, or a model.",
        )
    model_type = getattr(getattr(getattr(transformers, name, None), "config_class", None), "model_type", None)
    if not isinstance(model_type, str):
        raise UsageError(
            f"{opt.model_class} {name}: transformers {transformers.__version__} has no model class of this name",
            hint=suggest(name, dir(transformers), otherwise="Pass a class such as BertForMaskedLM."),
        )
    return model_type


def read_json_config(path: Path) -> dict[str, object]:
    """Read a ``config.json``.

    Raises:
        CheckpointError: the file is missing, or not a JSON object.
    """
    try:
        content = read_json_file(path, object_hook=_decode_float)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file", hint="Download the checkpoint again.") from error
    except JsonError as error:
        raise CheckpointError(
            f"{path}: {error}", hint="Correct the config, or download the checkpoint again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, got {type(content).__name__}", hint="Pass a transformers config."
        )
    return content


def _decode_float(value: dict[str, object]) -> Any:
    """Return an object of the JSON unchanged, or the float that it encodes."""
    tag = value.get(_SPECIAL_FLOAT_KEY)
    return _SPECIAL_FLOATS.get(tag, value) if isinstance(tag, str) and len(value) == 1 else value


def _decide_model_type(
    content: dict[str, object], name: str, path: Path, *, has_own_code: bool
) -> tuple[str, list[str]]:
    """Return the model type, with a note if the type is derived from the name.

    Args:
        content: The content of the config.
        name: The name of the model, as the user gives it.
        path: The config, for messages.
        has_own_code: True if classes in the folder may define the type.

    Raises:
        CheckpointError: transformers does not know the type, or no type is declared or part of the name.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    declared_type = content.get("model_type")
    if isinstance(declared_type, str) and (declared_type in CONFIG_MAPPING or has_own_code):
        return declared_type, []
    if declared_type is not None:
        import transformers

        remedy = "A newer transformers may support it; else pass the model as file.py:function."
        raise CheckpointError(
            f"{path}: model_type {declared_type!r} is unknown to transformers {transformers.__version__}",
            hint=suggest(str(declared_type), CONFIG_MAPPING.keys(), also=remedy),
        )
    # As in transformers: configs older than the key are identified by name, by the longest model type in the name.
    base_name = name.replace("\\", "/").rstrip("/").rpartition("/")[2].removesuffix(".json")
    for model_type in sorted(CONFIG_MAPPING.keys(), key=len, reverse=True):
        if model_type in base_name.lower():
            return model_type, [f"{path} has no model_type; {model_type!r} is assumed from the name {base_name!r}"]
    raise CheckpointError(
        f"{path}: has no model_type, and none is part of the name {base_name!r}",
        hint='Add "model_type", such as "bert"; only configs of transformers are supported.',
    )


def _own_class_references(content: dict[str, object]) -> dict[str, str]:
    """Return the config and model classes in the checkpoint's own code; tokenizers are never built here."""
    auto_map = content.get("auto_map")
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return {
        key: value
        for key, value in entries
        if isinstance(value, str) and (key == _AUTO_CONFIG or key.startswith(_AUTO_MODEL_PREFIX))
    }


def _select_own_classes(references: dict[str, str], model_type: str) -> dict[str, str]:
    """Return the references without a class of the same name in transformers.

    Models that moved into transformers keep their ``auto_map``; the class of the same name is then the same model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    native = {CONFIG_MAPPING[model_type].__name__} if model_type in CONFIG_MAPPING else set()
    native.update(name for classes in tasks_for(model_type).values() for name in classes)
    return {key: value for key, value in references.items() if value.rpartition(".")[2] not in native}


def _build_config(path: Path, content: dict[str, object], model_type: str, reference: str | None) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = own_class(reference, path.parent) if reference else CONFIG_MAPPING[model_type]
    values = {**content, "model_type": model_type}
    return _build_or_refuse(lambda: config_class.from_dict(values), f"{path}: {config_class.__name__}")


def _build_or_refuse(build: Callable[[], object], subject: str) -> Any:
    """Call ``build``, and convert the refusal of a config by transformers into a :class:`CheckpointError`.

    Raises:
        CheckpointError: transformers refuses the config.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with foreign_parser(
            f"{subject} rejects the config",
            error=CheckpointError,
            hint="Correct the value, or download the checkpoint again.",
            reason=lambda error: " ".join(str(error).split()) or type(error).__name__,
            spared=OfflineModeIsEnabled,
        ):
            return build()
    except OfflineModeIsEnabled as error:
        url = next((word.rstrip(":") for word in str(error).split() if "://" in word), first_line(error))
        raise CheckpointError(
            f"{subject} requires a part of the config from the Hub ({url}), but only the folder is read",
            hint="Write that part into the config, such as a backbone as backbone_config.",
        ) from error


def own_class(reference: str, root: Path) -> Any:
    """Import a class of the checkpoint's own code. Call only after the user allowed the code.

    Raises:
        RemoteCodeError: the code is not in the folder of the config, or cannot be imported.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    repository, separator, _ = reference.rpartition("--")
    if separator:
        raise RemoteCodeError(
            f"{root}: its code {reference} is in another repository, {repository}, which is not downloaded",
            hint="Put that code beside config.json in a local folder, and reference it in auto_map without the "
            "repository.",
        )
    try:
        return get_class_from_dynamic_module(reference, str(root), local_files_only=True)
    except (OSError, ImportError, AttributeError, ValueError, SyntaxError) as error:
        reason = str(error).strip().partition("\n")[0]
        package = failed_import(error)
        broken = f"{package}: " if package not in ("", reference.partition(".")[0], "transformers_modules") else ""
        raise RemoteCodeError(
            f"{root}: its code {reference} cannot be imported: {broken}{reason}",
            hint="Put the module beside config.json, and install what it imports.",
        ) from error


def build_error(model_class: type, error: Exception) -> CheckpointError:
    """Return the error for a class that cannot be built from a config, with the reason."""
    return CheckpointError(
        f"{model_class.__name__} cannot be built from this config: {type(error).__name__}: {first_line(error)}",
        hint="Correct the config.",
    )


def _check_architectures(content: dict[str, object], path: Path) -> None:
    architectures = content.get("architectures")
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not is_list:
        raise CheckpointError(
            f"{path}: architectures is {architectures!r}, expected a list of class names",
            hint='Write it as ["BertModel"], or remove it.',
        )


_LONGEST_TAG = 1000
"""Bytes of the line of the tag. Chosen: the longest name of a task has 30 letters."""


def card_task(folder: Path | None) -> str | None:
    """Return the ``pipeline_tag`` of the model card in a folder; `None` without a readable card, or without the tag.

    A card is the ``README.md`` in the folder of the config. The card is optional: an unreadable card is no error.
    """
    if folder is None:
        return None
    try:
        tag = front_matter_value(folder / MODEL_CARD_NAME, "pipeline_tag", _LONGEST_TAG)
    except FrontMatterError:
        return None
    return tag if isinstance(tag, str) else None


_ATTENTION = frozenset({"eager", "sdpa", "flex_attention"})
_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
"""Implementations included in torch and transformers; others are packages, or kernels on the Hub."""

_IMPLEMENTATIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), _ATTENTION),
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), _EXPERTS
    ),
}
_KERNEL_SWITCHES = frozenset({"use_kernels", "kernel_config"})
_OWN_CODE = "auto_map"
_TIMM_NAMES = ("backbone", "architecture")
_ADAPTER_NAME = "adapter_config.json"
_WEIGHTS_KEY = "transformers_weights"
_DISTRIBUTED_SHARDS = "shard-*-model-*-of-*.safetensors"


def _drop_foreign_references(content: Mapping[str, object], path: Path) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the content of a config without references to code or files elsewhere, and a note per dropped entry.

    Args:
        content: Content of the file; the caller decides on its own ``auto_map``, nested ones are dropped.
        path: The file, for messages.

    Raises:
        CheckpointError: the config names an architecture that is defined in another repository.
    """
    notes: dict[str, None] = {}
    outer_entries = {key: value for key, value in content.items() if key != _OWN_CODE}
    cleaned = _clean_record(outer_entries, path, lambda note: notes.setdefault(f"{path}: {note}"))
    return {**cleaned, **({_OWN_CODE: content[_OWN_CODE]} if _OWN_CODE in content else {})}, tuple(notes)


def _clean_record(record: Mapping[str, object], path: Path, report: Callable[[str], object]) -> dict[str, object]:
    """Return a config, or an inner config, without references to code and files elsewhere; report each of them.

    Raises:
        CheckpointError: the config of a timm model is outside the folder.
    """
    cleaned: dict[str, object] = {}
    for key, value in record.items():
        if key in _IMPLEMENTATIONS:
            usable = _usable_implementation(key, value, report)
            if usable is not None:
                cleaned[key] = usable
        elif key in _KERNEL_SWITCHES:
            report(f"{key} is ignored: kernels are code from outside the checkpoint")
        elif key == _OWN_CODE:
            report(f"an inner {key} is ignored: the classes of transformers are used")
        elif key in _TIMM_NAMES and isinstance(value, str) and ":" in value:
            raise CheckpointError(
                f"{path}: {key} is {value!r}, whose config is elsewhere, but only the folder is read",
                hint="Write the name of the timm model, such as resnet50.",
            )
        else:
            cleaned[key] = _clean_value(value, path, report)
    return _expand_timm_backbone(cleaned)


def _clean_value(value: object, path: Path, report: Callable[[str], object]) -> Any:
    if isinstance(value, Mapping):
        return _clean_record(value, path, report)
    return [_clean_value(element, path, report) for element in value] if isinstance(value, list) else value


def _usable_implementation(key: str, value: object, report: Callable[[str], object]) -> Any:
    """Return the part of an entry with implementations of torch and transformers, else `None`; report dropped parts."""
    if isinstance(value, Mapping):  # one entry per inner config
        usable = {name: _usable_implementation(key, entry, report) for name, entry in value.items()}
        return {name: entry for name, entry in usable.items() if entry is not None} or None
    if value is None or (isinstance(value, str) and value in _IMPLEMENTATIONS[key]):
        return value
    report(f"{key} {value!r} is ignored, as its code is not part of transformers; the default of the model is used")
    return None


def _expand_timm_backbone(record: dict[str, object]) -> dict[str, object]:
    """Expand a timm backbone that older configs give by name, as transformers does for names unknown to the Hub.

    Changes nothing unless transformers would ask the Hub first.
    """
    name, keywords = record.get("backbone"), record.get("backbone_kwargs")
    is_written_out = record.get("backbone_config") is not None or record.get("use_timm_backbone") is False
    if is_written_out or not isinstance(name, str) or "/" in name or not isinstance(keywords, dict) or not keywords:
        return record
    other_entries = {key: value for key, value in record.items() if key not in ("backbone", "backbone_kwargs")}
    return {**other_entries, "backbone_config": {**keywords, "model_type": "timm_backbone", "backbone": name}}


def refuse_foreign_weights(config: object, folder: Path) -> None:
    """Refuse a folder if transformers would load weights from unchecked files.

    Raises:
        CheckpointError: the config names another file, or the folder has an adapter or a distributed checkpoint.
    """
    file_name = getattr(config, _WEIGHTS_KEY, None)
    default_name = next((name for _, *names in FORMATS for name in names if (folder / name).is_file()), None)
    if file_name is not None and file_name != default_name:
        raise CheckpointError(
            f"{folder}: its config sets {file_name!r} as the file of weights ({_WEIGHTS_KEY}), which is not supported",
            hint=f"Rename that file to {FORMATS[0][1]}, and remove {_WEIGHTS_KEY} from the config.",
        )
    if (folder / _ADAPTER_NAME).is_file():
        raise CheckpointError(
            f"{folder}: contains an adapter ({_ADAPTER_NAME}) with the model, which is not applied",
            hint=f"Merge it into the model and save that, or remove {_ADAPTER_NAME} to use the model without it.",
        )
    shard = next(iter(sorted(folder.glob(_DISTRIBUTED_SHARDS))), None)
    if shard is not None:
        raise CheckpointError(
            f"{folder}: contains a distributed checkpoint ({shard.name}), which is not supported",
            hint="Save the model in one piece, or in shards with an index.",
        )
