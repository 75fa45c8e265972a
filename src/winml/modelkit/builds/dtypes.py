"""Files of a build that readers of its layout select by dtype, such as ``q4`` and ``fp16`` of transformers.js.

All files are made from one float graph by the quantize stage. Imports no model library.
"""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.builds.config import (
    QuantSection,
    WinMLBuildConfig,
    quantize_options,
    requested_provider,
    requested_quantization,
)
from winml.modelkit.builds.layouts.layout import LAYOUTS, Dtype, find_layout
from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.fields import fields_of
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.quantize.declared_options import QuantizeFields
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS

_OPTIONS_OF_ONE_FILE = ("precision", "mode", "per_module", "kv_cache", "budget", "max_size", "max_drop")
"""Options of the quantize stage that decide the precision, which each dtype decides itself."""
OPTIONS_OF_FLOATS = {
    "include", "exclude", "min_sqnr_db", "ep", "device", "dataset", "split", "columns", "samples",
}  # fmt: skip
"""Options of the quantize stage that apply to a conversion to float16."""


def dtypes_of(config: WinMLBuildConfig) -> dict[str, Dtype]:
    """Return the requested dtypes of a config, the first as the model of the folder: name → dtype."""
    known = find_layout(config.layout).dtypes
    return {name: known[name] for name in config.dtypes}


def quantized_dtypes(config: WinMLBuildConfig) -> tuple[str, ...]:
    """Return the names of the dtypes that the quantize stage makes, sources of others before these."""
    requested = dtypes_of(config)
    return tuple(dict.fromkeys(name for dtype, entry in requested.items() for name in (entry.of, dtype) if name))


def dtype_file(model: Path, dtype: str, config: WinMLBuildConfig) -> Path:
    """Return the path of a dtype in the quantize stage.

    Args:
        model: File of the stage, which is that of the first dtype.
        dtype: Name of the dtype.
        config: The config.
    """
    return model if dtype == config.dtypes[0] else model.with_name(f"{model.stem}_{dtype}{model.suffix}")


def dtype_quantization(config: WinMLBuildConfig, dtype: str) -> QuantizeOptions | None:
    """Return the options of the quantization that makes the file of a dtype; ``None`` for float32."""
    known = find_layout(config.layout).dtypes
    entry = known[dtype]
    if entry.precision is None:
        return None
    section = config.quant or QuantSection()
    if PRECISIONS[entry.precision].float_type:
        stated = {name: getattr(section, name) for name in section.model_fields_set & OPTIONS_OF_FLOATS}
        if entry.of and section.min_sqnr_db is None:
            # The file has to be as good as other files with such weights.
            stated["min_sqnr_db"] = PRECISIONS[known[entry.of].precision or FLOAT32].least_sqnr_db
        section = QuantSection(**stated)
    return quantize_options(with_weight_format(section.model_copy(update={"precision": entry.precision}), config))


def with_weight_format(section: QuantSection, config: WinMLBuildConfig) -> QuantSection:
    """Return a section with weights in operators of ONNX, or embedding tables by row, if the readers require it.

    A stated format is unchanged.

    Args:
        section: Options of the quantization.
        config: The config.
    """
    if "weight-only" not in quantize_options(section).modes():
        return section
    if config.optim is not None and config.optim.operators == "standard" and section.weight_operators is None:
        section = section.model_copy(update={"weight_operators": "standard"})
    is_stated = section.tables is not None or requested_provider(config) not in (None, "cpu")
    if is_stated or not find_layout(config.layout).for_browsers:
        return section
    return section.model_copy(update={"tables": "rows"})


def requested_quantizations(config: WinMLBuildConfig) -> tuple[QuantizeOptions, ...]:
    """Return the options of all quantizations of a build; ``()`` if nothing is quantized."""
    if not config.dtypes:
        return tuple(filter(None, [requested_quantization(config)]))
    return tuple(filter(None, (dtype_quantization(config, name) for name in quantized_dtypes(config))))


def planned_optimization(config: WinMLBuildConfig) -> OptimizeOptions | None:
    """Return the options of the optimize stage, without fusions that a quantization of the build does not support.

    ``None`` if the stage is left out.
    """
    options: OptimizeOptions | None = config.optim
    for quantization in requested_quantizations(config):
        options = options and options.with_plain_layers(quantization.quantized_operators())
    return options


def refuse_dtypes(config: WinMLBuildConfig) -> None:
    """Refuse dtypes that the layout does not have or winml does not write, and options that contradict them.

    Raises:
        UsageError: names the dtype or the option.
    """
    if not config.dtypes:
        return
    request, known = f"{opt.dtypes} {','.join(config.dtypes)}", find_layout(config.layout).dtypes
    if not known:
        layouts = " or ".join(name for name, layout in LAYOUTS.items() if layout.dtypes)
        subject = "no layout is requested" if config.layout is None else f"the layout {config.layout} has no dtypes"
        raise UsageError(
            f"{request}: {subject}", hint=f"Use {opt.layout} {layouts}, or {opt.precision} for a single file."
        )
    writable = ", ".join(name for name, entry in known.items() if not entry.unwritable)
    for name in config.dtypes:
        if name not in known or known[name].unwritable:
            reason = known[name].unwritable if name in known else f"{config.layout} has no such dtype"
            raise UsageError(f"{opt.dtypes} {name}: {reason}", hint=f"winml writes {writable}.")
    section = config.quant
    if section is None:
        raise UsageError(
            f"{request} has no effect without the quantize stage",
            hint=f"Remove {opt.no_quant} (quant: null in a config), or {opt.dtypes}.",
        )
    for name in _OPTIONS_OF_ONE_FILE:
        if name in section.model_fields_set and getattr(section, name) not in (None, {}):
            raise UsageError(
                f"{request} cannot be combined with {getattr(opt, name)}: each dtype has its own precision",
                hint=f"Remove one of them; {opt.precision} writes a single file.",
            )
    if config.compile is not None and config.compile.ep is not None:
        raise UsageError(
            f"{request} cannot be combined with a compilation for {config.compile.ep}",
            hint=f"Remove {opt.ep} (compile.ep in a config): {config.layout} compiles the files itself.",
        )
    _refuse_unread_by_all(config, section)
    for name in quantized_dtypes(config):
        _refuse_unread_options(config, name)


def _refuse_unread_by_all(config: WinMLBuildConfig, section: QuantSection) -> None:
    """Refuse options of the quantize stage that the quantization of no dtype reads; raises UsageError."""
    names = {name: dtype.precision for name, dtype in dtypes_of(config).items()}
    is_float = {precision is None or bool(PRECISIONS[precision].float_type) for precision in names.values()}
    if is_float != {True}:
        return
    read = OPTIONS_OF_FLOATS if any(names.values()) else {"ep", "device"}
    for field in fields_of(QuantizeFields):
        value = getattr(section, field.name)
        if field.name in section.model_fields_set - read and value != field.default:
            raise UsageError(
                f"{spell(field.option(value))} does not apply to {opt.dtypes} {','.join(names)}",
                hint="Omit the option, or add a quantized dtype such as q8.",
            )


def _refuse_unread_options(config: WinMLBuildConfig, dtype: str) -> None:
    """Refuse options of the quantize stage that the quantization of a dtype does not read; raises UsageError."""
    options = dtype_quantization(config, dtype)
    try:
        if options is not None:
            options.refuse_contradictions()
    except UsageError as error:
        error.message = f"{opt.dtypes} {dtype}: {error.message}"
        error.hint = "Omit the option, or the dtype."
        raise
