"""The recipe of a build in its manifest, and the plan of the same build with other weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.config import WinMLBuildConfig
from winml.modelkit.builds.manifest_records import Recipe
from winml.modelkit.builds.plan import BuildPlan, plan_build, request_record
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.records import ProofRequest


_PATH_KEYS = (("quant", "calibration_data"), ("quant", "calibration_cache"), ("quant", "dataset"), ("eval", "dataset"))
"""Keys of a config that may be paths of data. Other files of a recipe belong to the model, which a refit replaces."""


def recipe_of(plan: BuildPlan, folder: Path) -> Recipe:
    """Return the recipe of a build; of a refit, the recipe of its build with the other weights.

    Args:
        plan: The build.
        folder: Its folder; paths of data are relative to it.
    """
    recipe = plan.recipe or _describe_plan(plan)
    return recipe.model_copy(update={"config": _with_paths(recipe.config, lambda path: _path_from(path, folder))})


def _describe_plan(plan: BuildPlan) -> Recipe:
    return Recipe(
        request=json.loads(json.dumps(request_record(plan.request))),
        # Unset values stay unset: some decisions depend on what is stated.
        config=plan.config.model_dump(mode="json", exclude_unset=True),
        switched_off=dict(plan.switched_off),
        verify=plan.verify,
        with_companions=plan.with_companions,
        has_default_level=plan.has_default_level,
    )


def _with_paths(config: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a config with other paths of data."""
    changed = {name: dict(section) if isinstance(section, Mapping) else section for name, section in config.items()}
    for name, key in _PATH_KEYS:
        section = changed.get(name)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = change(section[key])
    return changed


def _path_from(path: str, folder: Path) -> str:
    """Return a path on this disk relative to a folder; another text, such as the name of a dataset, unchanged."""
    if not Path(path).exists():
        return path
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # on another drive of Windows
        return Path(path).absolute().as_posix()


def _path_in(path: str, folder: Path) -> str:
    """Return a path relative to a folder as one that can be opened here; another text unchanged."""
    return _path_from(str(folder / path), Path()) if (folder / path).exists() else path


def plan_refit(
    recipe: Recipe,
    folder: Path,
    graphs: Mapping[str, Path],
    changes: Mapping[str, Any],
    *,
    verify: bool = True,
    proof: ProofRequest | None = None,
) -> BuildPlan:
    """Return the plan of the build of a recipe, with other weights.

    Args:
        recipe: The recipe.
        folder: Folder of the build, which its paths are relative to.
        graphs: Part → file with its traced graph.
        changes: Fields of the request with other values, such as ``model``.
        verify: Compare the result of each stage, also if the recipe does not.
        proof: Requested proof, or None.

    Raises:
        WinMLError: see :func:`~winml.modelkit.builds.plan.plan_build`.
    """
    values = _with_paths(recipe.config, lambda path: _path_in(path, folder))
    request = replace(_read_request(recipe.request), **changes)

    def plan_with(values: Mapping[str, Any], *, verify: bool) -> BuildPlan:
        plan = plan_build(
            WinMLBuildConfig.model_validate_json(json.dumps(values)),
            request,
            switched_off=recipe.switched_off,
            verify=verify,
            with_companions=recipe.with_companions,
            proof=proof,
            is_refittable=True,
        )
        return replace(plan, has_default_level=recipe.has_default_level)

    # A refit without a comparison leaves the recipe as it is.
    next_recipe = _describe_plan(plan_with(values, verify=recipe.verify))
    export = values.get("export")
    if verify and export is not None:  # a build with --no-verify may have been made for its graph alone
        values["export"] = {**export, "verify": True}
    return replace(plan_with(values, verify=verify), refit=graphs, recipe=next_recipe)


def _read_request(record: Mapping[str, Any]) -> ModelRequest:
    """Read the JSON values of :func:`~winml.modelkit.builds.plan.request_record`."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    values["dynamic"] = DynamicRequest.model_validate_json(json.dumps(record["dynamic"]))
    if "shape_config" in record:
        values["shape_config"] = ShapeConfig.model_validate_json(json.dumps(record["shape_config"]))
    if "input_specs" in record:
        specs = record["input_specs"]
        values["input_specs"] = tuple(InputTensorSpec.model_validate_json(json.dumps(spec)) for spec in specs)
    return ModelRequest(**values)
