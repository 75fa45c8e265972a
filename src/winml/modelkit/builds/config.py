"""The config of a build, its versions, and its JSON Schema.

The config has one section for each stage; a null section skips its stage. Precision ``auto`` is resolved here, other
missing values in ``config_resolution.py``. Imports no model library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic

from winml.modelkit.builds.foreign_configs import CONFIG_READERS
from winml.modelkit.builds.layouts.layout import LayoutName
from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.load_options import LoadOptions, declared_options
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.optimize.capabilities import CAPABILITIES
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.options import Options, parse_options, unknown_key_message
from winml.modelkit.ort.execution_providers import Device, checked_short_name, find_execution_provider
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import PRECISIONS, PrecisionName

SCHEMA_VERSION: Final = 1
"""Raised when a key changes its name or meaning; :data:`MIGRATIONS` then converts the previous version."""

SECTIONS = ("loader", "export", "optim", "quant", "compile", "eval")
"""Keys that may be null, in the order of the stages."""

AUTO_PRECISION: Final = "auto"
"""Placeholder for the usual precision of the device."""
ProviderName = Annotated[str, pydantic.Field(min_length=1)]


class _ModelSection(Options):
    """The model of a build, without options of loading."""

    model: str | None = None
    """Hub id, checkpoint folder, `config.json`, `file.py:function` or `package.module:function`."""


class LoaderSection(LoadOptions, _ModelSection):  # type: ignore[misc]  # Options is frozen by its config
    """The model of a build."""


def loader_section(request: ModelRequest, **decided: object) -> LoaderSection:
    """Return the ``loader`` section of a request, with decided values for some keys."""
    values = {name: getattr(request, name) for name in LoaderSection.model_fields if hasattr(request, name)}
    return LoaderSection(**{**values, **decided})


def check_load_keywords(load: Mapping[str, object], function: str) -> None:
    """Refuse keywords that are no option of loading, and values of the wrong kind.

    Args:
        load: Keywords of the caller.
        function: Name of the called function, for messages.

    Raises:
        ConfigError: a keyword is unknown (names the nearest), or its value has the wrong kind.
    """
    names = [option.name for option in declared_options()]
    for name, value in load.items():
        if name not in names:
            raise ConfigError(unknown_key_message(name, names, function))
        try:
            parse_options(LoaderSection, {name: value}, function)
        except TypeError:
            raise ConfigError(
                f"{function}: {name}: expected text, a number or a bool, got {value!r} ({type(value).__name__})",
                hint="Write it as on the command line, such as dtype='fp16'.",
            ) from None


class OptimSection(OptimizeOptions):
    """Options of the optimize stage. A null capability is enabled by the level; without both, the level is ``full``."""

    section: ClassVar[str] = "optim"

    @property
    def states_optimization(self) -> bool:
        """True if a level or a capability is stated."""
        stated = self.model_dump(exclude_none=True, exclude_unset=True)
        return "level" in stated or any(name in stated for name in CAPABILITIES)


class QuantSection(QuantizeOptions):
    """Options of quantization. A build quantizes if an option other than the minimum SQNR is requested."""

    precision: PrecisionName | Literal["auto"] | None = None
    """Precision of what is quantized; `auto`: `fp32` for a CPU, `fp16` for a GPU, `w8a16` for an NPU. Null: `int8` if
    another key requests quantization, else nothing is quantized."""
    device: Device | None = None
    """Target device, which determines `auto`. Null: that of `ep`, or any."""
    ep: ProviderName | None = None
    """Target execution provider. Null: any of the device."""


class CompileSection(CompileOptions):
    """Target of the compilation. A build compiles if an execution provider is specified."""

    share_weights: bool | None = None
    """Store the weights of a prompt graph and a step once, in one compiled file. It opens on a device only."""


class EvalSection(EvaluationOptions):
    """Evaluation of the finished build; its result is written to `eval.json`."""


class WinMLBuildConfig(Options):
    """The config of a build. A null section skips its stage."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this schema; earlier versions are read as well. Default: the current one."""
    loader: LoaderSection | None = LoaderSection()
    """The model."""
    export: WinMLExportConfig | None = WinMLExportConfig()
    """Options of the export. `winml export` reads this section alone with `-c` or `--export-config`."""
    optim: OptimSection | None = OptimSection()
    """Options of the optimizer."""
    quant: QuantSection | None = QuantSection()
    """Options of quantization."""
    compile: CompileSection | None = CompileSection()
    """Target of the compilation."""
    eval: EvalSection | None = None
    """Evaluation of the result. Null: none."""
    layout: LayoutName | None = None
    """Tool that will open the folder; determines file names and companion files. Null: none."""
    dtypes: tuple[str, ...] = ()
    """Names of the files to write for the tool of `layout`, such as `q4` and `fp16` of transformers.js. Empty: one file
    of `quant.precision`."""
    auto: bool = True
    """Determine missing values from the model. If false, all values that a stage needs are required."""

    def as_record(self) -> dict[str, object]:
        """Return the JSON object, which parses to the same config: null sections stay, other nulls are omitted."""
        record: dict[str, Any] = {"schema_version": self.schema_version}
        for name in SECTIONS:
            section = getattr(self, name)
            record[name] = None if section is None else _drop_nulls(section.model_dump(mode="json"))
        if self.export is not None and self.export.input_tensors is not None:
            record["export"]["input_tensors"] = [_input_record(spec) for spec in self.export.input_tensors]
        layout = {} if self.layout is None else {"layout": self.layout}
        dtypes = {"dtypes": list(self.dtypes)} if self.dtypes else {}
        return {**record, **layout, **dtypes, "auto": self.auto}


def with_values(config: WinMLBuildConfig, section_values: Mapping[str, Mapping[str, Any]]) -> WinMLBuildConfig:
    """Return a config with other values for some keys; null sections stay null.

    Args:
        config: The config.
        section_values: Section → key → value.
    """
    # Sections are copied, so that unset fields stay unset.
    sections = {
        name: section.model_copy(update=dict(values))
        for name, values in section_values.items()
        if (section := getattr(config, name)) is not None
    }
    return config.model_copy(update=sections)


def parse_build_config(value: Any, source: str) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Validate a parsed JSON config of the current version, an earlier version, or another tool.

    Args:
        value: The parsed JSON.
        source: Origin of the JSON, for messages.

    Returns:
        The config, and one sentence for each converted or unused key.

    Raises:
        ConfigError: an unknown key (names the nearest), a value of the wrong kind, or a version newer than this.
    """
    foreign: list[str] = []
    for reader in CONFIG_READERS.values() if isinstance(value, dict) else ():
        value, unread = reader(value, source)
        foreign += unread
    migrated, notes = _migrate_to_current(value, source)
    migrated, renamed = _rename_precision(migrated)
    return parse_options(WinMLBuildConfig, migrated, source), (*foreign, *notes, *renamed)


def _rename_precision(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a config with the current name of its precision, and a note if the name changed."""
    section = value.get("quant") if isinstance(value, dict) else None
    bits = section.get("precision") if isinstance(section, dict) else None
    name = next((name for name, precision in PRECISIONS.items() if bits in precision.older_names), None)
    if not isinstance(section, dict) or name is None:
        return value, ()
    if bits in PRECISIONS:
        return value, ()  # an installed package adds a precision of this name
    return {**value, "quant": {**section, "precision": name}}, (f"quant.precision {bits} is now called {name}",)


def _rename_optimize(config: dict[str, object]) -> list[str]:
    """Rename section ``optimize`` in place; return notes on the change."""
    if "optimize" not in config:
        return []
    config["optim"] = config.pop("optimize")
    return ["section optimize is now called optim"]


def _rename_model_id(config: dict[str, object]) -> list[str]:
    """Rename key ``loader.model_id`` in place; return notes on the change."""
    loader = config.get("loader")
    if not isinstance(loader, dict) or "model_id" not in loader:
        return []
    loader["model"] = loader.pop("model_id")
    return ["loader.model_id is now called loader.model"]


Migration = Callable[[dict[str, object]], list[str]]

MIGRATIONS: Mapping[int, tuple[Migration, ...]] = {
    0: (_rename_optimize, _rename_model_id),
}
"""Version → functions that convert its configs to the next version in place and return notes."""


def _migrate_to_current(value: object, source: str) -> tuple[Any, tuple[str, ...]]:
    """Return a copy converted to this version, and notes on the changes; a value that is no object, unchanged.

    Raises:
        ConfigError: the version is unknown, or newer than this package.
    """
    if not isinstance(value, dict):
        return value, ()
    version = value.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < min(MIGRATIONS):
        raise ConfigError(f"{source}: schema_version {version!r}: expected a number from 0 to {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: schema_version {version}: newer than {SCHEMA_VERSION}, the newest that this winml reads",
            hint="Update winml, or write a new config: winml config.",
        )
    config = copy.deepcopy(value)
    notes = [
        note for step in range(version, SCHEMA_VERSION) for migrate in MIGRATIONS[step] for note in migrate(config)
    ]
    return {**config, "schema_version": SCHEMA_VERSION}, tuple(notes)


def _drop_nulls(value: object) -> Any:
    """Return a JSON value without null members, at any depth of objects."""
    if isinstance(value, dict):
        return {key: _drop_nulls(member) for key, member in value.items() if member is not None}
    return value


def _input_record(spec: Any) -> dict[str, object]:
    """Return the JSON object of an input, with ``last_value`` if stated."""
    ending = {} if spec.last_value is None else {"last_value": spec.last_value}
    return {**spec.as_record(), **ending}


_AUTO_PRECISIONS = {precision.auto_device: name for name, precision in PRECISIONS.items() if precision.auto_device}
"""Kind of device → precision of ``auto``. Chosen: a CPU computes float32 as exactly as PyTorch does, and its gain by
fewer bits depends on its instructions; GPUs compute in 16-bit floating point; NPUs compute in integers, and activations
of 16 bits preserve most of the accuracy."""


def quantize_options(section: QuantSection) -> QuantizeOptions:
    """Return the options of the quantize stage, with ``auto`` resolved to a precision."""
    values = {name: getattr(section, name) for name in QuantizeOptions.model_fields}
    if section.precision == AUTO_PRECISION:
        values["precision"] = _AUTO_PRECISIONS[_target_device(section)]
    return QuantizeOptions(**values)


def requested_quantization(config: WinMLBuildConfig) -> QuantizeOptions | None:
    """Return the options of the quantize stage; ``None`` if nothing is quantized."""
    return None if config.quant is None or idle_quantization(config) else quantize_options(config.quant)


def requested_provider(config: WinMLBuildConfig) -> str | None:
    """Return the short name of the provider that a build is for; ``None`` if no provider is requested.

    Raises:
        UsageError: the provider is unknown.
    """
    return None if config.compile is None else checked_short_name(config.compile.ep)


_DEFAULT_LEVEL: Final = "full"
"""Optimization level of builds. Chosen: the fastest on the CPU; capabilities that the provider lacks stay off."""


def with_default_level(section: OptimSection) -> OptimSection:
    """Return a section with the default level, unless it states a level or a capability."""
    return section if section.states_optimization else section.model_copy(update={"level": _DEFAULT_LEVEL})


def idle_quantization(config: WinMLBuildConfig) -> str:
    """Return the reason why the quant section of a config quantizes nothing; ``""`` if anything is quantized."""
    section = config.quant
    assert section is not None  # checked by the caller
    options = quantize_options(section)
    # A provider and a limit request nothing by themselves.
    if options.model_copy(update={"ep": None, "min_sqnr_db": None}) == QuantizeOptions():
        return f"no precision was requested ({opt.precision})"
    has_rules = options.kv_cache is not None or any(PRECISIONS[name].modes for name in options.per_module.values())
    dtype = None if config.loader is None or config.export is None else config.loader.dtype
    if dtype == options.base.name and not has_rules:
        return f"the model is exported in {dtype} already ({opt.dtype} {dtype})"
    if options.base.modes or has_rules:
        return ""
    return auto_words(section) or f"precision {options.base.name} is that of the model"


def auto_words(section: QuantSection) -> str:
    """Describe the precision of ``auto`` and its reason; ``""`` if the section names another precision."""
    if section.precision != AUTO_PRECISION:
        return ""
    device = _target_device(section)
    reason = f"on the {device}, the default of {section.ep}" if section.device is None and section.ep else ""
    reason = reason or (f"on the {device}" if section.device else f"on the {device}, the default device")
    return f"precision auto is {_AUTO_PRECISIONS[device]} {reason}"


def with_precision(section: QuantSection | None, precision: str) -> QuantSection:
    """Return a copy of a section with a precision; None: a new section.

    Raises:
        ConfigError: the precision is unknown.
    """
    values = {} if section is None else section.stated_options()
    return QuantSection(**{**values, "precision": precision})


def _target_device(section: QuantSection) -> Device:
    """Return the stated device, or else the default device of the provider; ``cpu`` without either."""
    if section.device is not None:
        return section.device
    return "cpu" if section.ep is None else find_execution_provider(section.ep).devices[0]
