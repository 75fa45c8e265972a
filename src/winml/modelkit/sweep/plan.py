"""Plan of a sweep: models, configurations and steps. Read and checked before any model is loaded.

A plan is a JSON file, or a text file with one model per line. Imports no model library.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic

from winml.modelkit.builds.config import SCHEMA_VERSION as CONFIG_VERSION
from winml.modelkit.builds.config import SECTIONS, WinMLBuildConfig, parse_build_config
from winml.modelkit.builds.plan import is_onnx_path, plan_build
from winml.modelkit.errors import ConfigError, UsageError, opt, spell
from winml.modelkit.evaluate.options import MetricLimits
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.options import Options, parse_options, read_json, unknown_key_message

StepName = Literal["export", "build", "perf", "eval", "compare"]
STEPS: tuple[StepName, ...] = get_args(StepName)
RANDOM_PREFIX = "random:"
"""Prefix of the name of a small model of a transformers model type, made with random weights."""
MEASURES: Mapping[StepName, tuple[str, ...]] = {
    "export": (
        "export_seconds", "parameters", "nodes", "tags", "coverage_percent", "relative_diff", "generated_tokens",
    ),
    "build": ("build_seconds", "model_bytes", "nodes", "coverage_percent", "parts"),
    "perf": ("perf_seconds", "latency_p50_ms", "latency_p90_ms", "samples_per_sec", "session_creation_ms"),
    "eval": ("eval_seconds", "agreement", "samples"),
    "compare": ("compare_seconds", "sqnr_db", "relative_error", "cosine", "top1_agreement"),
}  # fmt: skip
"""Measures of each step; ``eval`` also adds the metrics of the task."""
_ALWAYS_MEASURED = ("seconds", "peak_bytes")
_OF_CHECKPOINTS = ("loader", "export")
"""Sections that do not apply to a model that is an ONNX file already."""
Text = Annotated[str, pydantic.Field(min_length=1)]


class PerfSection(Options):
    """Options of the latency measurement."""

    iterations: pydantic.PositiveInt = 100
    """Number of measured runs."""
    warmup: pydantic.NonNegativeInt = 10
    """Number of runs before the measurement."""
    threads: pydantic.PositiveInt | None = None
    """Threads within one operator. Null: number of cores, divided by the number of parallel processes."""
    ep: Text | None = None
    """Execution provider. Null: the CPU provider."""
    sizes: dict[Text, pydantic.PositiveInt] = pydantic.Field(default_factory=dict)
    """Sizes of dynamic dimensions, by name."""


class CompareSection(Options):
    """Options of the comparison of the built model with its source model."""

    samples: pydantic.PositiveInt = 1
    """Number of random inputs."""
    seed: pydantic.NonNegativeInt = 0
    """Seed of the random inputs."""
    sizes: dict[Text, pydantic.PositiveInt] = pydantic.Field(default_factory=dict)
    """Sizes of dynamic dimensions, by name."""


class ListedModel(Options):
    """A model of the list with separate settings."""

    model: Text
    """A path, an ONNX file, a Hub id, or `random:` with a model type; `random:*` stands for every model type."""
    set: dict[Text, Any] = pydantic.Field(default_factory=dict)
    """Key of the config → value for this model; takes precedence over `set` of the plan."""


class SweepPlan(Options):
    """Models, configurations and steps of a sweep."""

    schema_version: Literal[1] = 1
    """Version of the JSON format."""
    models: tuple[Text | ListedModel, ...]
    """List of models; duplicates are ignored."""
    config: dict[Text, Any] = pydantic.Field(default_factory=dict)
    """Config of all cells: a build config, with the additional sections `perf` and `compare`."""
    set: dict[Text, tuple[Any, ...]] = pydantic.Field(default_factory=dict)
    """Key of the config → its values; all combinations are configurations."""
    do: tuple[StepName, ...] = ("build",)
    """Steps, in the order `export`, `build`, `perf`, `eval`, `compare`."""
    min: MetricLimits = pydantic.Field(default_factory=dict)
    """Measure → its minimum in every cell."""
    max: MetricLimits = pydantic.Field(default_factory=dict)
    """Measure → its maximum in every cell."""

    @property
    def listed(self) -> tuple[ListedModel, ...]:
        """All entries of the list, as records."""
        return tuple(model if isinstance(model, ListedModel) else ListedModel(model=model) for model in self.models)


class WorkSettings(Options):
    """Work on one model: a parsed configuration."""

    build: WinMLBuildConfig
    perf: PerfSection = PerfSection()
    compare: CompareSection = CompareSection()


def read_plan(path: Path) -> tuple[SweepPlan, tuple[str, ...]]:
    """Read a plan, or a list of models.

    Args:
        path: A JSON file with suffix ``.json``; else a text file with one model per line, where ``#`` starts a
            comment.

    Returns:
        The plan, and notes on it.

    Raises:
        ConfigError: the file cannot be read, is no plan, or is empty.
    """
    if path.suffix.lower() == ".json":
        value, label = read_json(path, "plan")
        return plan_from_record(value, label)
    try:
        lines = named_path(path).read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"plan {path}: no such file", hint="Pass a JSON plan, or a list of models.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(
            f"plan {path}: cannot be read: {reason}", hint="Pass a JSON plan, or a list of models."
        ) from error
    names = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return plan_from_record({"models": [name for name in names if name]}, f"plan {path}")


def plan_from_record(value: object, label: str) -> tuple[SweepPlan, tuple[str, ...]]:
    """Validate a parsed plan; duplicate entries are removed and reported by a note.

    Raises:
        ConfigError: an unknown key (names the nearest), a value of the wrong kind, or an empty plan.
    """
    plan = parse_options(SweepPlan, value, label)
    if not plan.models:
        raise ConfigError(f"{label}: no model", hint="Write one model per line: a path, a Hub id, or random:bert.")
    for key, values in plan.set.items():
        if not values:
            raise ConfigError(f"{label}: set: {key} has no value", hint="Set at least one value.")
    models, notes = _drop_duplicates(plan.models, "the list of models")
    settings = {}
    for key, values in plan.set.items():
        settings[key], key_notes = _drop_duplicates(values, f"set: {key}")
        notes += key_notes
    steps = tuple(step for step in STEPS if step in plan.do)
    return plan.model_copy(update={"models": models, "set": settings, "do": steps}), notes


def _drop_duplicates(values: Sequence[object], label: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return values without duplicates, and a note that names the first duplicate."""
    unique: dict[str, object] = {}
    duplicates: list[str] = []
    for value in values:
        text = value.model_dump_json() if isinstance(value, ListedModel) else json.dumps(value)
        duplicates += [value.model if isinstance(value, ListedModel) else str(value)] if text in unique else []
        unique.setdefault(text, value)
    note = f"{label} lists {duplicates[0]} twice; duplicates are ignored ({len(duplicates)})" if duplicates else ""
    return tuple(unique.values()), (note,) if note else ()


def parse_settings(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Read ``KEY=VALUE,VALUE``, given any number of times; a value is JSON, or text.

    Raises:
        UsageError: a text has another format, or a key occurs twice.

    >>> parse_settings(["export.opset_version=17,18", "quant.precision=fp32"])
    {'export.opset_version': (17, 18), 'quant.precision': ('fp32',)}
    """
    settings: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not key or not equals or not values:
            raise UsageError(f"{opt.set} {text!r}: expected KEY=VALUE", hint="For example optim.level=none,full.")
        if key in settings:
            raise UsageError(f"{opt.set}: {key} is set twice", hint="Set all its values at once, separated by commas.")
        settings[key] = tuple(_parse_values(values))
    return settings


_JSON = json.JSONDecoder()


def _parse_values(text: str) -> Iterator[Any]:
    """Yield comma-separated values: JSON, which may contain commas, or else text."""
    remaining: str | None = text
    while remaining is not None:
        remaining = remaining.lstrip()
        try:
            value, end = _JSON.raw_decode(remaining)
        except ValueError:
            end = -1
        if end < 0 or remaining[end:].lstrip()[:1] not in ("", ","):
            value = remaining.partition(",")[0].rstrip()
            end = len(value)
        yield value
        _, comma, tail = remaining[end:].partition(",")
        remaining = tail if comma else None


def configurations(plan: SweepPlan, listed: ListedModel) -> Iterator[dict[str, object]]:
    """Yield the settings of each cell of one model: key → value, in the order of the plan."""
    axes = {key: values for key, values in plan.set.items() if key not in listed.set}
    for values in itertools.product(*axes.values()):
        yield {**dict(zip(axes, values, strict=True)), **listed.set}


def settings_of_onnx(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that apply to an ONNX file."""
    return {key: value for key, value in settings.items() if key.split(".")[0] not in _OF_CHECKPOINTS}


def parse_work(config: Mapping[str, object], settings: Mapping[str, object], label: str) -> WorkSettings:
    """Assemble the settings of a configuration.

    Args:
        config: Config of all cells.
        settings: Dotted key → value, which takes precedence.
        label: Source of both, for messages.

    Raises:
        ConfigError: an unknown key (names the nearest known key), or a value of the wrong kind.
    """
    record: dict[str, object] = json.loads(json.dumps(dict(config)))
    for key, value in settings.items():
        _set_value(record, key, value, label)
    perf = parse_options(PerfSection, record.pop("perf", {}), f"{label}: perf")
    compare = parse_options(CompareSection, record.pop("compare", {}), f"{label}: compare")
    build, _ = parse_build_config({"schema_version": CONFIG_VERSION, **record}, label)
    return WorkSettings(build=build, perf=perf, compare=compare)


def _set_value(record: dict[str, Any], key: str, value: object, label: str) -> None:
    """Set the value of a dotted key, in place.

    Raises:
        ConfigError: the first segment names no section, or an inner segment is a value without keys.
    """
    *sections, last = key.split(".")
    names = [*SECTIONS, "perf", "compare", "layout", "auto"]
    if (sections or [last])[0] not in names:
        raise ConfigError(unknown_key_message((sections or [last])[0], names, f"{label}: {key}"))
    target = record
    for name in sections:
        if not isinstance(target.setdefault(name, {}), dict):
            raise ConfigError(f"{label}: {key}: {name} is {target[name]!r} and has no keys", hint="Remove one of them.")
        target = target[name]
    target[last] = value


def request_of(model: str, work: WorkSettings) -> ModelRequest:
    """Return the request for a model, with the options of the ``loader`` section."""
    loader = work.build.loader
    return ModelRequest(model, **{option.name: getattr(loader, option.name) for option in declared_options() if loader})


def refuse_unusable(plan: SweepPlan) -> None:
    """Refuse keys, values, steps and limits that are invalid for every model.

    Raises:
        UsageError: names the key, the step or the limit.
    """
    _refuse_steps(plan)
    all_work = []
    for entry in {json.dumps(entry.set, sort_keys=True): entry for entry in plan.listed}.values():
        for settings in configurations(plan, entry):
            work = parse_work(plan.config, settings, opt.set if settings else "config")
            plan_build(work.build, request_of("model", work))
            all_work.append(work)
    if "eval" in plan.do and any(work.build.eval is None for work in all_work):
        raise UsageError("eval: no dataset", hint=f"Set one with {opt.set} eval.dataset=FILE.")
    measures = {*_ALWAYS_MEASURED, *(name for step in plan.do for name in MEASURES[step])}
    for name in (*plan.min, *plan.max):
        # Names of metrics are known only once the task of a model is known.
        if name not in measures and "eval" not in plan.do:
            raise ConfigError(
                unknown_key_message(name, measures, spell("min" if name in plan.min else "max")),
                hint=f"Steps of this plan: {', '.join(plan.do)}.",
            )


def _refuse_steps(plan: SweepPlan) -> None:
    """Refuse a plan without steps, and steps without the ONNX file that they require; raises UsageError."""
    if not plan.do:
        raise UsageError(f"{opt.do}: no step", hint=f"Steps: {', '.join(STEPS)}.")
    if "compare" in plan.do and "build" not in plan.do:
        raise UsageError(f"{opt.do} compare: requires a build to compare with", hint=f"Add build to {opt.do}.")
    runs = [step for step in plan.do if step in ("perf", "eval")]
    unbuilt = [entry.model for entry in plan.listed if not is_onnx_path(entry.model)]
    if runs and unbuilt and "build" not in plan.do:
        raise UsageError(f"{opt.do} {runs[0]}: {unbuilt[0]} is not an ONNX file", hint=f"Add build to {opt.do}.")
