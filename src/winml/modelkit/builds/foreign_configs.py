"""Translates configs of winml-cli into build configs.

Configs of winml-cli have the same sections and no ``schema_version``. A key with an equal meaning is read. A key
without effect here is named in a note. A key that would change the result without a counterpart is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.registries import Registry

Section = dict[str, object]
ConfigReader: TypeAlias = "Callable[[dict[str, Any], str], tuple[dict[str, Any], list[str]]]"
"""(JSON object, its origin for messages) → (build config, notes on unused keys). The object is not modified; a config
of another tool is returned unchanged."""

_EXPORT_KEYS = {
    "batch_size", "export_params", "verbose", "dynamo", "enable_hierarchy_tags", "clean_onnx", "hierarchy_tag_format",
    "compatibility",
}  # fmt: skip
_LOADER_KEYS = {"model_type", "module_path", "user_script"}
_QUANT_KEYS = {"weight_type", "activation_type", "calibration_method", "rtn_bits", "rtn_block_size", "rtn_symmetric"}
_QUANT_MODES = {"static", "rtn", "fp16", "w4a16"}
_QUANT_NAMES: Mapping[str, Mapping[str, str]] = {
    "static": {"samples": "samples", "calibration_method": "method", "per_channel": "per_channel",
               "symmetric": "symmetric", "weight_symmetric": "symmetric"},
    "dynamic": {"per_channel": "per_channel", "symmetric": "symmetric", "weight_symmetric": "symmetric"},
    "rtn": {"rtn_block_size": "block_size", "rtn_symmetric": "symmetric"},
    "fp16": {},
}  # fmt: skip
"""Quantization mode of winml-cli → its keys that apply in the mode → our keys."""
_PLACE = {"device", "ep"}
_QUANT_CHOICES = {
    "nodes_to_exclude": "Exclude modules: exclude, a list of selectors.",
    "op_types_to_quantize": "Remove it; include and exclude choose modules.",
    "fp16_op_block_list": "Exclude modules: exclude, a list of selectors.",
}
"""Key of winml-cli that chooses nodes → hint if it is refused."""
_BITS = re.compile(r"^u?int(\d+)$")


def read_winml_cli_config(value: dict[str, Any], source: str) -> tuple[dict[str, object], list[str]]:
    """Translate a config of winml-cli; return the build config, and notes on unused keys.

    A config without keys specific to winml-cli is returned unchanged.

    Args:
        value: The JSON object; not modified.
        source: Origin of the object, for messages.

    Raises:
        ConfigError: a key would change the result and has no counterpart.
    """
    config = {name: dict(section) if isinstance(section, dict) else section for name, section in value.items()}
    if "schema_version" in config or not _is_of_winml_cli(config):
        return value, []
    notes: list[str] = []
    readers: Mapping[str, Callable[[Section, str], list[str]]] = {
        "loader": _translate_loader, "export": _translate_export, "optim": _translate_optim, "quant": _translate_quant,
        "compile": _translate_compile,
    }  # fmt: skip
    for name, translate in readers.items():
        if isinstance(config.get(name), dict):
            notes += [f"{name}.{note}" for note in translate(config[name], source)]
        elif name in ("quant", "compile"):
            config[name] = None  # winml-cli skips an omitted section
    if config.pop("skip_optimize", False):
        config["optim"] = None
    if config.get("eval"):
        notes.append("eval: ignored, since its format differs")
    return {**config, "eval": None}, notes


CONFIG_READERS: Registry[ConfigReader] = Registry(
    "configs", "config reader", {"winml-cli": read_winml_cli_config}, lambda: FunctionType
)
"""Tool → reader of its configs."""


def _is_of_winml_cli(config: Mapping[str, Any]) -> bool:
    """Return True if a config has keys or values that only winml-cli writes."""

    def keys(name: str) -> set[str]:
        section = config.get(name)
        return set(section) if isinstance(section, dict) else set()

    outputs = [spec for spec in _tensor_specs(config.get("export"), "output_tensors") if "shape" not in spec]
    foreign_keys = keys("export") & _EXPORT_KEYS or keys("loader") & _LOADER_KEYS
    quant = config["quant"] if isinstance(config.get("quant"), dict) else {}
    # Build configs have an algorithm rtn, too.
    is_quant = str(quant.get("mode")) in _QUANT_MODES or str(quant.get("algorithm")) in _QUANT_MODES - {"rtn"}
    has_keys_of_later_stages = keys("quant") & _QUANT_KEYS or is_quant or "execution_provider" in keys("compile")
    return bool(foreign_keys or has_keys_of_later_stages or outputs or "skip_optimize" in config)


def _tensor_specs(section: object, key: str) -> list[dict[str, object]]:
    """Return the objects in a list of a section; ``[]`` without such a list."""
    specs = section.get(key) if isinstance(section, dict) else None
    return [spec for spec in specs if isinstance(spec, dict)] if isinstance(specs, list) else []


def _refuse_key(source: str, key: str, value: object, hint: str) -> NoReturn:
    """Raise ConfigError for a value without a counterpart."""
    raise ConfigError(f"{source}: {key}: {value!r} is not supported, and would change the result", hint=hint)


def _translate_loader(loader: Section, source: str) -> list[str]:
    """Translate section ``loader`` in place; return notes on unused keys, or raise ConfigError."""
    hints = {
        "module_path": "Export the whole model, then extract the module: winml extract.",
        "user_script": "Write a function that returns the model, and pass it as file.py:function.",
    }
    for key, hint in hints.items():
        if (value := loader.pop(key, None)) is not None:
            _refuse_key(source, f"loader.{key}", value, hint)
    model_type = loader.pop("model_type", None)
    return [] if model_type is None else [f"model_type {model_type}: ignored, the checkpoint determines it"]


def _translate_export(export: Section, source: str) -> list[str]:
    """Translate section ``export`` in place; return notes on unused keys, or raise ConfigError."""
    notes = []
    if export.pop("dynamo", False):
        export["exporter"] = "dynamo"
    if "enable_hierarchy_tags" in export or "clean_onnx" in export:
        is_clean = export.pop("clean_onnx", False)
        export["hierarchy"] = export.pop("enable_hierarchy_tags", True) and not is_clean
    if not export.pop("export_params", True):
        _refuse_key(source, "export.export_params", False, "Weights are always included; remove it.")
    if (tags := export.pop("hierarchy_tag_format", "full")) != "full":
        _refuse_key(source, "export.hierarchy_tag_format", tags, "Tags always contain the full class path; remove it.")
    if compatibility := export.pop("compatibility", None):
        _refuse_key(source, "export.compatibility", compatibility, "Remove it.")
    if export.pop("verbose", False):
        notes.append("verbose: ignored, pass -v")
    specs = _tensor_specs(export, "input_tensors")
    if (batch := export.pop("batch_size", 1)) != 1 and not specs:
        _refuse_key(source, "export.batch_size", batch, f"Remove it, and pass {opt.batch_size}.")
    for spec in specs:
        _translate_input(spec, source)
    export["input_tensors"] = specs or None
    outputs = _tensor_specs(export, "output_tensors")
    if any("shape" not in spec for spec in outputs):
        names = ", ".join(str(spec.get("name")) for spec in outputs)
        notes.append(f"output_tensors {names}: ignored, the model determines the names of outputs")
        del export["output_tensors"]
    return notes


def _translate_input(tensor: Section, source: str) -> None:
    """Translate an input in place: an integer range of winml-cli excludes its second number, ours includes it."""
    bounds, is_whole = tensor.get("value_range"), str(tensor.get("dtype")).startswith(("int", "uint", "bool"))
    if is_whole and isinstance(bounds, list) and len(bounds) == 2 and type(bounds[1]) in (int, float):
        tensor["value_range"] = [bounds[0], bounds[1] - 1]
    if runs := tensor.pop("dummy_value_runs", None):
        key = f"export.input_tensors: {tensor.get('name')}.dummy_value_runs"
        _refuse_key(source, key, runs, "Set the first values of each row as first_values, [[value, count], …].")


def _translate_optim(optim: Section, source: str) -> list[str]:
    """Translate section ``optim`` in place; return notes on unused keys, or raise ConfigError."""
    unknown = []
    for key, value in tuple(optim.items()):
        name = key.replace("-", "_")
        if name in OptimizeOptions.model_fields:
            optim[name] = optim.pop(key)
        elif value in (False, None):
            unknown.append(key)
            del optim[key]
        else:
            _refuse_key(source, f"optim.{key}", value, "Remove it; winml optimize --list shows the capabilities.")
    return [f"{', '.join(unknown)}: ignored, and off"] if unknown else []


def _translate_quant(quant: Section, source: str) -> list[str]:
    """Translate section ``quant`` in place; return notes on unused keys, or raise ConfigError."""
    if "precision" in quant:
        return []  # a key of build configs only
    for key, hint in _QUANT_CHOICES.items():
        if value := quant.pop(key, None):
            _refuse_key(source, f"quant.{key}", value, hint)
    mode, options = _take_mode(quant, source)
    for theirs, ours in _QUANT_NAMES[mode].items():
        if ours in QuantizeOptions.model_fields and (value := quant.pop(theirs, None)) is not None:
            options[ours] = value
    elsewhere = {key for names in _QUANT_NAMES.values() for key in names} - _QUANT_NAMES[mode].keys()
    ignored = [key for key in quant if key not in _PLACE and key not in elsewhere and quant[key] not in (None, False)]
    for key in set(quant) - _PLACE:
        del quant[key]
    quant.update(options)
    return [f"{', '.join(ignored)}: ignored"] if ignored else []


def _take_mode(quant: Section, source: str) -> tuple[str, Section]:
    """Remove the keys with mode and bits; return the mode of winml-cli, and our keys of precision and mode.

    Raises:
        ConfigError: there is no precision of ours for the mode and bits.
    """
    mode_key = "algorithm" if "algorithm" in quant else "mode"
    mode = {"qdq": "static", "w4a16": "rtn"}.get(name := str(quant.pop(mode_key, "static")), name)
    if mode == "fp16":
        return mode, {"precision": "fp16"}
    if mode == "rtn":
        if (width := quant.pop("rtn_bits", 4)) not in (4, 8):
            _refuse_key(source, "quant.rtn_bits", width, "Weight-only quantization takes 4 or 8 bits.")
        return mode, {"precision": f"int{width}", "mode": "weight-only"}
    types = [str(quant.pop(key, "uint8")) for key in ("weight_type", "activation_type")]
    bits = [_BITS.sub(r"\1", name) for name in types]
    if mode == "dynamic" and bits[0] == "8":
        return mode, {"precision": types[0], "mode": mode}
    if mode == "static" and bits[0] == "8":
        return mode, {"precision": f"w8a{bits[1]}"}
    hint = "Set key precision instead."
    _refuse_key(source, f"quant.{mode_key}", f"{mode}, weights {types[0]}, activations {types[1]}", hint)


def _translate_compile(section: Section, source: str) -> list[str]:  # noqa: ARG001  # as the others
    """Translate section ``compile`` in place; return notes on unused keys."""
    provider = section.pop("execution_provider", None)
    ignored = [key for key in section if key not in _PLACE]
    for key in ignored:
        del section[key]
    if provider:
        section["ep"] = provider
    return [f"{', '.join(ignored)}: ignored, no stage reads them yet"] if ignored else []
