"""Builds a model with dynamic batch and sequence, as far as the model supports them: the default of a build.

Choices are tried, since only the exported file shows which sizes may be dynamic. The cache stores a result that is not
the first choice. No fixed size is chosen here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from winml.modelkit import errors
from winml.modelkit.builds.config import WinMLBuildConfig, with_values
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.errors import opt
from winml.modelkit.export.config import configured_request
from winml.modelkit.onnx.files.named_paths import pause_recording
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.execution_providers import find_execution_provider

_ResultT = TypeVar("_ResultT")

_CHOICES: tuple[dict[str, bool], ...] = (
    {"dynamic_batch": True, "dynamic_sequence": True},
    {"dynamic_batch": True},
    {"dynamic_sequence": True},
    {},
)
"""Keys of the export section to try, most dynamic sizes first."""

_SIZES = {
    "input_tensors", "dynamic_batch", "dynamic_sequence", "dynamic_image_size", "dynamic_axes", "dynamic_dimensions",
}  # fmt: skip
"""Keys of the export section that state sizes."""

_NO_SIZES = (errors.TaskError, errors.ModelPathError, errors.OutputExistsError, errors.WriteError)
"""Errors independent of sizes: another choice would raise them again."""


def with_fixed_sizes(config: WinMLBuildConfig) -> WinMLBuildConfig:
    """Return a config that states fixed sizes, if it states no sizes."""
    if config.export is None or config.export.model_fields_set & _SIZES:
        return config
    return with_values(config, {"export": {"dynamic_batch": False}})


def is_free_to_open(plan: BuildPlan) -> bool:
    """Return True if neither the request nor the config states a size, and the target supports dynamic sizes."""
    request, config = plan.request, plan.config
    if plan.onnx_path is not None or config.export is None or config.export.model_fields_set & _SIZES:
        return False
    stated_sizes = (request.shape_config, request.batch_size, request.input_specs)
    if any(value is not None for value in stated_sizes) or request.is_dynamic:
        return False
    targets = [section for section in (config.quant, config.compile) if section is not None]
    providers = {section.ep for section in (config.export, *targets) if section.ep is not None}
    if not providers:
        return all(section.device != "npu" for section in targets)
    return all(find_execution_provider(name).takes_dynamic for name in providers)


def first_attempt(plan: BuildPlan, note: Path, model_key: Callable[[], str]) -> BuildPlan:
    """Return the plan of the first attempt of :func:`make_most_open`, which describes the arguments."""
    if not is_free_to_open(plan):
        return plan
    remembered, _ = _read_choice(note, model_key)
    return _apply_choice(plan, _CHOICES[0] if remembered is None else remembered)


def make_most_open(
    plan: BuildPlan,
    make: Callable[[BuildPlan], _ResultT],
    note: Path | None = None,
    model_key: Callable[[], str] = str,
) -> tuple[_ResultT, tuple[str, ...]]:
    """Build or resolve a model with as many dynamic sizes as it supports, in several attempts if needed.

    Args:
        plan: The build; a plan that states sizes has one attempt.
        make: Builds or resolves a plan.
        note: File that stores a choice other than the first; None: not stored.
        model_key: Returns a digest of the model's content; a stored choice of other content is ignored.

    Returns:
        The result, and notes on sizes that are fixed because an attempt failed.

    Raises:
        WinMLError: see :func:`~winml.modelkit.build_hf_model`; the error of the build with fixed sizes if all choices
            fail.
    """
    if not is_free_to_open(plan):
        return make(plan), ()
    remembered, notes = _read_choice(note, model_key) if note is not None else (None, [])
    choices = list(_CHOICES) if remembered is None else [remembered]
    while True:
        choice = choices.pop(0)
        try:
            result = make(_apply_choice(plan, choice))
        except _NO_SIZES:
            raise
        except (errors.UsageError, errors.StageError, errors.VerificationError) as error:
            remaining = _remaining_choices(_CHOICES if choice == remembered else choices, error)
            if not remaining:  # the error with fixed sizes shows a fault of the model
                raise
            if choice == remembered:  # of another version of the model's code
                remembered, notes, choices = None, [], list(_CHOICES)
                continue
            choices = remaining
            if error.frozen or not isinstance(error, errors.UsageError):
                notes.append(_fallback_note(choice, choices[0], error))
            continue
        if note is not None and choice not in (_CHOICES[0], remembered):
            record = {"model": model_key(), "choice": choice, "notes": notes}
            # A read-only cache only costs time.
            with contextlib.suppress(errors.WriteError, OSError), pause_recording():
                write_atomically(note, json.dumps(record))
        return result, tuple(notes)


def _remaining_choices(choices: Sequence[dict[str, bool]], error: errors.WinMLError) -> list[dict[str, bool]]:
    """Return the choices that may succeed after an error; ``[]`` if dynamic sizes are not the cause.

    Args:
        choices: The choices that were not tried.
        error: Error of the tried choice.
    """
    if isinstance(error, errors.VerificationError) and error.is_quality:
        return []
    if isinstance(error, errors.UsageError) and error.is_after_export:
        return []
    if error.frozen:
        keys = {"dynamic_batch" if name.endswith("batch_size") else "dynamic_sequence" for name in error.frozen}
        return [choice for choice in choices if not keys & choice.keys()]
    if isinstance(error, errors.UsageError):  # refused before the trace: the model does not have such a size
        return list(choices)
    is_of_operator = isinstance(error, errors.ExportError) and error.operator is not None
    if is_of_operator or error.is_after_export:
        return [choice for choice in choices if not choice]
    return [choice for choice in choices if "dynamic_sequence" not in choice]


def _fallback_note(tried: Mapping[str, bool], used: Mapping[str, bool], error: errors.WinMLError) -> str:
    """Return a note on sizes that are fixed because the attempt to make them dynamic failed."""
    options = {"dynamic_batch": opt.dynamic_batch, "dynamic_sequence": opt.dynamic_seq_len}
    fixed = [key for key in tried if key not in used]
    names = " and ".join(key.removeprefix("dynamic_") for key in fixed)
    words = " ".join(options[key] for key in fixed)
    return f"Fixed size of {names}: the build failed with a dynamic one ({words}): {error.message.rstrip('.')}."


def _apply_choice(plan: BuildPlan, choice: Mapping[str, bool]) -> BuildPlan:
    """Return a plan with the dynamic sizes of a choice, in its config and its request."""
    config = with_values(plan.config, {"export": choice})
    assert config.export is not None  # the caller checked it
    return replace(plan, config=config, request=configured_request(plan.request, config.export, "export.{}"))


def _read_choice(note: Path, model_key: Callable[[], str]) -> tuple[dict[str, bool] | None, list[str]]:
    """Return the stored choice of dynamic sizes and its notes; ``None`` if missing, damaged or of another model."""
    try:
        record = read_json_file(note)
        choice, notes = record["choice"], [str(line) for line in record["notes"]]
        is_usable = choice in _CHOICES and record["model"] == model_key()
    except (OSError, ValueError, KeyError, TypeError):
        return None, []
    return (choice, notes) if is_usable else (None, [])
