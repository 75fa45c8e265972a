"""Reads the ``config.json`` of a checkpoint into a transformers config.

Reads the JSON, decides the model type, decides whether the checkpoint's own code is needed and allowed, and builds the
transformers config. Everything is read from the disk; nothing is fetched. Does not decide task or class (``task.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, RemoteCodeError, UsageError, failed_import, first_line
from winml.modelkit.load.checkpoints.foreign_references import without_foreign_references
from winml.modelkit.load.checkpoints.size_limits import refuse_absurd_sizes
from winml.modelkit.load.checkpoints.task import tasks_for
from winml.modelkit.options import JsonError, nearest, read_json_file

__all__ = [
    "CheckpointConfig",
    "build_error",
    "default_config",
    "load_config",
    "model_type_of_class",
    "own_class",
    "with_config_of_class",
]

_AUTO_CONFIG = "AutoConfig"
_AUTO_MODEL_PREFIX = "AutoModel"

_SPECIAL_FLOAT_KEY = "__float__"
_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Specified by transformers: ``{"__float__": "Infinity"}`` is how a config writes what JSON has no number for."""

_CONFIG_ERRORS = (
    ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError,
    OSError,
)  # fmt: skip
"""What config classes raise for values that make no sense to them."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint and what the user should hear about it."""

    config: Any
    """The ``transformers.PreTrainedConfig``."""
    root: Path | None
    """Folder it stands in: custom code, tokenizer and processor files stand beside it. None without a checkpoint."""
    custom_models: dict[str, str]
    """Auto class → ``module.Class`` of the checkpoint's own code that may run; empty when transformers' is used."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


def load_config(path: Path, name: str, *, trust_remote_code: bool) -> CheckpointConfig:
    """Build the config that ``path`` holds.

    Args:
        path: The ``config.json``.
        name: Hub id or path as the user wrote it; old configs without a model type are told by it.
        trust_remote_code: Whether code of the checkpoint may run.

    Raises:
        CheckpointError: malformed JSON (line and column), an unknown model type, or values transformers refuses.
        RemoteCodeError: the checkpoint needs its own code, and that was not allowed or is not there.
    """
    content = _read_content(path)
    _check_architectures(content, path)
    references = _own_class_references(content)
    model_type, notes = _decide_model_type(content, name, path, has_own_code=_AUTO_CONFIG in references)
    refuse_absurd_sizes(content, path)
    own = _classes_of_own_code(references, model_type)
    if own and not trust_remote_code:
        raise RemoteCodeError(
            f"{name}: needs code of its own ({', '.join(sorted(set(own.values())))}), which was not run",
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    if references and not trust_remote_code:
        notes.append(f"the code in {name} was not run: transformers has the same classes")
    if references and trust_remote_code:
        own = references
        notes.append(f"running code of {name}, as --trust-remote-code allows: {', '.join(sorted(set(own.values())))}")
    content, dropped = without_foreign_references(content, path)
    notes += dropped
    config = _build_config(path, content, model_type, own.get(_AUTO_CONFIG))
    models = {key: reference for key, reference in own.items() if key != _AUTO_CONFIG}
    return CheckpointConfig(config, path.parent, models, tuple(notes))


def default_config(model_type: str) -> CheckpointConfig:
    """Return the config transformers takes for a model type where nothing else is said.

    Raises:
        UsageError: transformers does not know the type (names the nearest).
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        guess = nearest(model_type, CONFIG_MAPPING.keys())
        raise UsageError(
            f"--model-type {model_type}: unknown to transformers {transformers.__version__}",
            hint=f"Did you mean {guess!r}?" if guess else "Give a model type such as bert, vit or whisper.",
        )
    return CheckpointConfig(_built_or_refused(CONFIG_MAPPING[model_type], f"--model-type {model_type}"), None, {})


def with_config_of_class(checkpoint: CheckpointConfig, model_class: Any) -> CheckpointConfig:
    """Return the checkpoint with the config a class takes: that of a decoder alone is inside the config of the whole.

    Args:
        checkpoint: Config and files of the whole model.
        model_class: The class that is to be built.
    """
    expected = getattr(model_class, "config_class", None)
    config = checkpoint.config
    if not isinstance(expected, type) or isinstance(config, expected):
        return checkpoint
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    fitting = [item for item in inner if type(item) is expected]
    return replace(checkpoint, config=fitting[0]) if len(fitting) == 1 else checkpoint


def model_type_of_class(name: str) -> str:
    """Return the model type of a transformers class.

    Raises:
        UsageError: transformers has no model class of this name, or it is one of every type.
    """
    import transformers

    if name.startswith("Auto") and hasattr(transformers, name):
        raise UsageError(
            f"--model-class {name}: is a class of every architecture", hint="Give --model-type beside it, or a model."
        )
    model_type = getattr(getattr(getattr(transformers, name, None), "config_class", None), "model_type", None)
    if not isinstance(model_type, str):
        guess = nearest(name, dir(transformers))
        raise UsageError(
            f"--model-class {name}: transformers {transformers.__version__} has no model class of this name",
            hint=f"Did you mean {guess!r}?" if guess else "Give a class such as BertForMaskedLM.",
        )
    return model_type


def _read_content(path: Path) -> dict[str, Any]:
    try:
        content = read_json_file(path, object_hook=_plain_value)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file", hint="Fetch the checkpoint again.") from error
    except JsonError as error:
        raise CheckpointError(f"{path}: {error}", hint="Mend the config, or fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, got {type(content).__name__}", hint="Give a transformers config."
        )
    return content


def _plain_value(value: dict[str, Any]) -> Any:
    """Return an object of the JSON as it is, or the float it stands for."""
    tag = value.get(_SPECIAL_FLOAT_KEY)
    return _SPECIAL_FLOATS.get(tag, value) if isinstance(tag, str) and len(value) == 1 else value


def _decide_model_type(content: dict[str, Any], name: str, path: Path, *, has_own_code: bool) -> tuple[str, list[str]]:
    """Return the model type, with a note where it was not simply written down."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    declared = content.get("model_type")
    if isinstance(declared, str) and (declared in CONFIG_MAPPING or has_own_code):
        return declared, []
    if declared is not None:
        raise _unknown_type_error(declared, path, CONFIG_MAPPING.keys())
    # Configs older than the key are told by their name, the longest type in it winning, as transformers does.
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].removesuffix(".json")
    for model_type in sorted(CONFIG_MAPPING.keys(), key=len, reverse=True):
        if model_type in last.lower():
            return model_type, [f"{path} names no model_type; taken as {model_type!r}, from the name {last!r}"]
    raise CheckpointError(
        f"{path}: names no model_type, and none is part of the name {last!r}",
        hint='Add "model_type", such as "bert"; configs of other libraries are not read.',
    )


def _unknown_type_error(declared: Any, path: Path, model_types: Any) -> CheckpointError:
    import transformers

    guess = nearest(str(declared), model_types)
    ending = f"Did you mean {guess!r}? " if guess else ""
    return CheckpointError(
        f"{path}: model_type {declared!r} is unknown to transformers {transformers.__version__}",
        hint=f"{ending}A newer transformers may know it; else give the model as file.py:factory.",
    )


def _own_class_references(content: dict[str, Any]) -> dict[str, str]:
    """Return the config and model classes of the checkpoint's own code; tokenizers are never built here."""
    auto_map = content.get("auto_map")
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return {
        key: value
        for key, value in entries
        if isinstance(value, str) and (key == _AUTO_CONFIG or key.startswith(_AUTO_MODEL_PREFIX))
    }


def _classes_of_own_code(references: dict[str, str], model_type: str) -> dict[str, str]:
    """Return the references that transformers has no class of the same name for.

    Models that moved into transformers keep their ``auto_map``; the class of the same name is then the same model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    native = {CONFIG_MAPPING[model_type].__name__} if model_type in CONFIG_MAPPING else set()
    native.update(name for classes in tasks_for(model_type).values() for name in classes)
    return {key: value for key, value in references.items() if value.rpartition(".")[2] not in native}


def _build_config(path: Path, content: dict[str, Any], model_type: str, reference: str | None) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = own_class(reference, path.parent) if reference else CONFIG_MAPPING[model_type]
    values = {**content, "model_type": model_type}
    return _built_or_refused(lambda: config_class.from_dict(values), f"{path}: {config_class.__name__}")


def _built_or_refused(build: Callable[[], Any], subject: str) -> Any:
    from huggingface_hub.errors import OfflineModeIsEnabled, StrictDataclassError

    try:
        return build()
    except OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"{subject} looks for a part of the config on the Hub ({_asked_address(error)}), and nothing but the "
            "folder is read",
            hint="Write that part into the config itself, such as a backbone as backbone_config.",
        ) from error
    except (StrictDataclassError, *_CONFIG_ERRORS) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{subject} refuses the config: {reason}", hint="Mend the value, or fetch the checkpoint again."
        ) from error


def _asked_address(error: Exception) -> str:
    return next((word.rstrip(":") for word in str(error).split() if "://" in word), first_line(error))


def own_class(reference: str, root: Path) -> Any:
    """Import a class of the checkpoint's own code. Call only after the user allowed it.

    Raises:
        RemoteCodeError: the code is not beside the config, or cannot be imported.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    repository, separator, _ = reference.rpartition("--")
    if separator:
        raise RemoteCodeError(
            f"{root}: its code {reference} lives in another repository, {repository}, which is not fetched",
            hint="Put that code beside config.json in a local folder, and name it in auto_map without the repository.",
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
    """Return what to raise when ``model_class`` could not be built from a config, with the reason it gave."""
    return CheckpointError(
        f"{model_class.__name__} cannot be built from this config: {type(error).__name__}: {first_line(error)}",
        hint="Mend the config.",
    )


def _check_architectures(content: dict[str, Any], path: Path) -> None:
    architectures = content.get("architectures")
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not is_list:
        raise CheckpointError(
            f"{path}: architectures is {architectures!r}, expected a list of class names",
            hint='Write it as ["BertModel"], or leave it out.',
        )
