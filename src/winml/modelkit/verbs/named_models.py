"""Resolution of the model that a command or a Python function names, with the options for loading it.

Names and paths are checked here, before any heavy import.
"""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from winml.modelkit.errors import ConfigError, UsageError, opt, spell
from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import Field, fields_of
from winml.modelkit.models.load_options import InputFields, LoadOptions, declared_options, is_not_default
from winml.modelkit.verbs.file_to_file import FileRequest, read_sizes

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.models.request import ModelRequest

FileRequestT = TypeVar("FileRequestT", bound=FileRequest[Any, Any])

FOR_CHECKPOINTS = (
    *(option.name for option in declared_options() if not option.is_for_onnx),
    *(option.name for option in fields_of(DynamicFields)),
    "input_specs",
    "dynamic_axes",
    "export_config",
)
"""Options for loading and exporting a checkpoint, refused for an ONNX file."""


def model_request(options: Mapping[str, Any]) -> ModelRequest:
    """Make a model request from the options of a command.

    Args:
        options: Values by option name; options that the verb does not offer are missing.

    Raises:
        ConfigError: ``--input-specs``, ``--shape-config`` or ``--dynamic-axes`` is malformed.
    """
    from winml.modelkit.models.inputs.options import parse_input_specs, parse_shape_config
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.specs import DynamicRequest, parse_dynamic_axes

    dynamic = DynamicRequest(
        batch=options.get("dynamic_batch", False),
        sequence=options.get("dynamic_sequence", False),
        image_size=options.get("dynamic_image_size", False),
        axes=parse_dynamic_axes(options.get("dynamic_axes", ())),
    )
    specs, shapes = options.get("input_specs"), options.get("shape_config")
    return ModelRequest(
        model=options["model"],
        **{option.name: options.get(option.name, option.default) for option in declared_options()},
        input_specs=parse_input_specs(specs) if specs else None,
        patches_inputs=True if specs else None,
        shape_config=parse_shape_config(shapes) if shapes else None,
        batch_size=options.get("batch_size"),
        dynamic=dynamic,
    )


def read_export_config(place: str) -> WinMLExportConfig:
    """Read the options of ``--export-config``: a file or JSON text.

    Raises:
        ConfigError: the text cannot be read, is no valid section, or is a complete build config.
    """
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.options import parse_options, read_json

    value, source = read_json(place, opt.export_config)
    if isinstance(value, dict) and "export" in value:
        raise ConfigError(f"{source}: this is a complete build config", hint=f"Use {opt.config}.")
    return parse_options(WinMLExportConfig, value, source)


def sizes_by_name(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of ``--shape-config`` and ``--batch-size`` by name or key.

    Names are not checked, because ONNX files define them.

    Raises:
        ConfigError: the text is malformed, or a size is not an integer.
        UsageError: the two options disagree.
    """
    value = read_sizes(options["shape_config"]) if options["shape_config"] else {}
    if options["batch_size"]:
        if value.get("batch_size", options["batch_size"]) != options["batch_size"]:
            raise UsageError(
                f"{opt.batch_size} {options['batch_size']}: {opt.shape_config} says batch_size {value['batch_size']}",
                hint="Use one of them.",
            )
        value = {**value, "batch_size": options["batch_size"]}
    return value


def named_parts(options: Mapping[str, Any], *, beside_weights: bool = False) -> Mapping[str, Path]:
    """Return the files of the parts that the options select; empty if the model is not a folder of several parts.

    Args:
        options: Options with ``model`` and ``submodel``.
        beside_weights: Also accept parts exported into the folder of their checkpoint.

    Raises:
        UsageError: the folder has no part with a requested name.
    """
    if options["model"] is None:
        return {}
    from winml.modelkit.builds.found_models import chosen_parts

    return chosen_parts(options["model"], options["submodel"], beside_weights=beside_weights)


def options_of_part(options: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the options of a verb with the file of a part as the model."""
    return {**options, "model": str(path), "submodel": ()}


def model_name(options: Mapping[str, Any], taken: str) -> str:
    """Return the model of the command line.

    Args:
        options: Values by option name, with ``model``.
        taken: Kinds of models that the verb accepts, for the hint.

    Raises:
        UsageError: no model is specified.
    """
    model: str | None = options["model"]
    if model is None:
        raise UsageError("no model is specified", hint=f"Specify one: {taken}.")
    return model


def resolve_named_model(name: str, options: Mapping[str, Any], refused: Iterable[str] = FOR_CHECKPOINTS) -> NamedModel:
    """Find the ONNX file or checkpoint of a name, with all checks that need no heavy import.

    Args:
        name: The model.
        options: Values by option name.
        refused: Options that do not apply to an ONNX file.

    Raises:
        UsageError: nothing exists at the path, or an option does not apply to an ONNX file.
    """
    from winml.modelkit.builds.found_models import NamedModel, onnx_file
    from winml.modelkit.models.request import resolve_source

    path = onnx_file(name)
    if path is not None:
        refuse_checkpoint_options(path, options, refused)
        return NamedModel(name, path)
    request = model_request({**options, "model": name})
    resolve_source(request)
    config = options.get("export_config")
    return NamedModel(name, request=request, export=read_export_config(config) if config else None)


def runnable_model(options: Mapping[str, Any]) -> tuple[NamedModel, dict[str, Any]]:
    """Return the model, and the fields of ``RunOptions`` for its inputs.

    Names and paths are checked here, before any heavy import.

    Args:
        options: Values by option name.

    Raises:
        UsageError: no model, nothing at its path, or an option that does not apply to an ONNX file.
    """
    name = model_name(options, "an ONNX file, a build folder, a Hub id, a checkpoint folder or file.py:function")
    from winml.modelkit.onnx.files.named_paths import refuse_missing_values

    input_data = Path(options["input_data"]) if options["input_data"] else None
    refuse_missing_values(input_data)
    common = {"shown": name, "seed": options["seed"], "input_data": input_data}
    model = resolve_named_model(name, options)
    if model.path is None:
        return model, {"is_exported": True, **common}
    sizes = sizes_by_name({**options, "batch_size": None})
    return model, {"sizes": sizes, "batch_size": options["batch_size"], **common}


def refuse_checkpoint_options(
    path: Path,
    options: Mapping[str, object],
    names: Iterable[str],
    hint: str = "Omit it, or specify the checkpoint that the file was exported from.",
) -> None:
    """Refuse options for loading and exporting a checkpoint, because the model is an ONNX file.

    Raises:
        UsageError: names the first specified option of ``names``.
    """
    fields = {field.name: field for field in (*declared_options(), *fields_of(DynamicFields))}
    for name in names:
        value = options.get(name)
        if is_not_default(name, value):
            flag = spell(fields[name].option(value) if name in fields else name)
            raise UsageError(f"{flag} does not apply to ONNX files such as {path}", hint=hint)


def files_read(model: NamedModel, options: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that a verb reads: files of the model and of its options; none of them may be replaced.

    Raises:
        WinMLError: the model is not usable.
    """
    values = (options.get(name) for name in ("input_data", "shape_config", "input_specs", "export_config"))
    return (
        *model.files_read(),
        *(Path(value) for value in values if value and not str(value).lstrip().startswith(("{", "["))),
    )


def keyword_options(
    function: str, model: str | os.PathLike[str], given: Mapping[str, Any], *requests: type, **more: Any
) -> dict[str, Any]:
    """Return the options of a command for the keywords of its Python function: given values, and defaults for the rest.

    Args:
        function: Name of the function, for errors.
        model: The model.
        given: The keywords. ``sizes``, ``input_specs`` and ``dynamic_axes`` may be JSON values, which the command takes
            as text.
        requests: Dataclasses that declare options of the command, besides those of loading.
        more: Further options of the command: name → default.

    Raises:
        ConfigError: a keyword is unknown.
    """
    from winml.modelkit.options import unknown_key_message

    fields = [field for kind in (LoadOptions, InputFields, *requests) for field in fields_of(kind)]
    defaults = {"shape_config": None, **{field.name: field.default for field in fields}, **more}
    values = {("shape_config" if name == "sizes" else name): value for name, value in given.items()}
    for name in values:
        if name not in defaults:
            raise ConfigError(unknown_key_message(name, defaults, function))
    for name in ("shape_config", "input_specs", "dynamic_axes"):
        if isinstance(value := values.get(name), (Mapping, list)):
            text = json.dumps(value)
            values[name] = (text,) if name == "dynamic_axes" else text
    values |= {field.name: _converted(field, values[field.name]) for field in fields if field.name in values}
    return {"input_data": None, **defaults, **values, "model": os.fspath(model)}


def stated_keywords(request_class: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are fields of a class of requests.

    Raises:
        ConfigError: a value is of another type than its field.
        UsageError: a number is below the minimum of its field.
    """
    fields = fields_of(request_class)
    values = {field.name: _converted(field, keywords[field.name]) for field in fields if field.name in keywords}
    for field in fields:
        value = values.get(field.name)
        if isinstance(value, (int, float)) and field.minimum is not None and value < field.minimum:
            raise UsageError(
                f"{spell(field.name)} {value} is too small: expected at least {field.minimum}",
                hint="Pass a larger one.",
            )
    paths = {field.name for field in fields if Path in (field.annotation, *get_args(field.annotation))}
    return {name: Path(value) if name in paths and value is not None else value for name, value in values.items()}


def file_request(kind: type[FileRequestT], function: str, arguments: Mapping[str, Any]) -> FileRequestT:
    """Return the request of a Python function that transforms a file.

    Args:
        kind: Class of the request.
        function: Name of the function, for errors.
        arguments: Its arguments by name: ``options``, or their fields in ``flags``, and fields of the request.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong type.
        UsageError: options and flags are combined, or a number is below the minimum of its field.
    """
    from winml.modelkit.options import options_of, unknown_key_message

    record = kind.options_record()
    keywords = {*record.model_fields, *arguments} - {"flags"}
    for flag in arguments["flags"]:
        if flag not in {*keywords, *record.ways_out}:
            raise ConfigError(unknown_key_message(flag, keywords, function))
    options = options_of(record, arguments["options"], arguments["flags"], function)
    stated = stated_keywords(kind, {name: value for name, value in arguments.items() if value is not None})
    return kind(options=options, **stated)


_SIMPLE_TYPES = (str, int, float, bool, Path, type(None))


def _converted(field: Field, value: Any) -> Any:
    """Return the value of a keyword in the type of its field; values of compound types are returned unchanged.

    Raises:
        ConfigError: the value is of another type; a text is no number.
    """
    parts = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    is_simple = all(part in _SIMPLE_TYPES or get_origin(part) is Literal for part in parts)
    if not is_simple and tuple[str, ...] not in parts:
        return value
    if isinstance(value, (str, os.PathLike)):
        value = Path(value) if Path in parts else os.fspath(value)
    elif isinstance(value, (list, tuple)):
        value = tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in value)
    elif type(value).__module__ == "numpy" and isinstance(value, numbers.Real):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    import pydantic

    try:
        return pydantic.TypeAdapter(field.annotation).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        name = "sizes" if field.name == "shape_config" else field.name
        reason = "expected a dict" if name in ("sizes", "input_specs") else error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{name}: {reason} (got {value!r})", hint=field.expectation(value)) from None
