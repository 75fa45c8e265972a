"""Builds a model in the cache with dynamic batch and sequence, as far as the model supports them.

Choices are tried, since only the exported file shows which sizes may be dynamic. The cache stores the result. No fixed
size is chosen here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from winml.modelkit import errors
from winml.modelkit.builds.build import identify_plan
from winml.modelkit.builds.build_model import build_in_cache, cache_key, to_build_config
from winml.modelkit.builds.config import WinMLBuildConfig, with_values
from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.export.config import configured_request
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.files.named_paths import cache_root, pause_recording
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.execution_providers import find_execution_provider

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


def build_with_open_sizes(
    request: ModelRequest,
    config: WinMLBuildConfig | Mapping[str, object] | str | os.PathLike[str] | None,
    *,
    ep: str | None = None,
    precision: str | None = None,
) -> BuildResult:
    """Build in the cache with dynamic sizes if possible; sizes in the config are used as stated.

    Args:
        request: The model.
        config: See :func:`~winml.modelkit.build_hf_model`.
        ep: Execution provider of the model; fixed sizes if it requires them.
        precision: See :func:`~winml.modelkit.build_hf_model`.

    Raises:
        WinMLError: see :func:`~winml.modelkit.build_hf_model`; the error of the build with fixed sizes if all choices
            fail.
    """
    plan = plan_build(to_build_config(config, precision=precision), request)
    if not _allows_open_sizes(plan, ep):
        return build_in_cache(plan)
    note = cache_root() / "open_sizes" / f"{cache_key(plan, identify_plan(plan))}.json"
    return build_most_open(plan, build_in_cache, note)


def _allows_open_sizes(plan: BuildPlan, ep: str | None = None) -> bool:
    """Return True if the config states no sizes, and each named provider supports dynamic sizes."""
    export = plan.config.export
    if export is None or export.model_fields_set & _SIZES:
        return False
    return all(find_execution_provider(name).takes_dynamic for name in (ep, export.ep) if name)


def is_free_to_open(plan: BuildPlan) -> bool:
    """Return True if a build for another tool has dynamic sizes: such a tool passes any number of rows."""
    request = plan.request
    stated_sizes = (request.shape_config, request.batch_size, request.input_specs)
    is_requested = any(value is not None for value in stated_sizes) or request.is_dynamic
    return plan.config.layout is not None and not is_requested and _allows_open_sizes(plan)


def opened_first(plan: BuildPlan) -> BuildPlan:
    """Return the first plan that :func:`build_most_open` tries; an unsuitable plan is returned unchanged."""
    return _apply_choice(plan, _CHOICES[0]) if is_free_to_open(plan) else plan


def build_most_open(
    plan: BuildPlan, build: Callable[[BuildPlan], BuildResult], note: Path | None = None
) -> BuildResult:
    """Build with as many dynamic sizes as the model supports, in several attempts if needed.

    Args:
        plan: The build; its config states no sizes.
        build: Builds a plan.
        note: File that stores the choice that works; None: not stored.

    Raises:
        WinMLError: see :func:`~winml.modelkit.build_hf_model`; the error of the build with fixed sizes if all choices
            fail.
    """
    remembered = _read_choice(note) if note is not None else None
    preferred = [remembered] if remembered is not None else []
    last_error: errors.WinMLError | None = None
    for choice in (*preferred, *(choice for choice in _CHOICES if choice not in preferred)):
        try:
            result = build(_apply_choice(plan, choice))
        except _NO_SIZES:
            raise
        except (errors.UsageError, errors.StageError, errors.VerificationError) as error:
            if isinstance(error, errors.VerificationError) and error.is_quality:
                raise
            # The error with fixed sizes shows a fault of the model; with dynamic sizes, these may be the cause.
            last_error = error if last_error is None or not choice else last_error
            if note is not None and choice == remembered:
                with contextlib.suppress(OSError):
                    note.unlink()
            continue
        if note is None:
            return result
        # A read-only cache only costs time.
        with contextlib.suppress(errors.WriteError, OSError), pause_recording():
            write_atomically(note, json.dumps(choice))
        return result
    assert last_error is not None  # every choice returns or fails
    raise last_error


def _apply_choice(plan: BuildPlan, choice: Mapping[str, bool]) -> BuildPlan:
    """Return a plan with the dynamic sizes of a choice, in its config and its request."""
    config = with_values(plan.config, {"export": choice})
    assert config.export is not None  # the caller checked it
    return replace(plan, config=config, request=configured_request(plan.request, config.export, "export.{}"))


def _read_choice(note: Path) -> dict[str, bool] | None:
    """Return the stored choice of dynamic sizes; ``None`` if missing, damaged or outdated."""
    try:
        choice = read_json_file(note)
    except (OSError, ValueError):
        return None
    return choice if choice in _CHOICES else None
