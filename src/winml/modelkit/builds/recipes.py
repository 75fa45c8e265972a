"""The recipe of a build in its manifest, and the plan of the same build with other weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def recipe_of(plan: BuildPlan) -> Recipe:
    """Return the recipe of a build; of a refit, the recipe of its build with the other weights."""
    return plan.recipe or Recipe(
        request=json.loads(json.dumps(request_record(plan.request))),
        # Unset values stay unset: some decisions depend on what is stated.
        config=plan.config.model_dump(mode="json", exclude_unset=True),
        switched_off=dict(plan.switched_off),
        verify=plan.verify,
        with_companions=plan.with_companions,
        has_default_level=plan.has_default_level,
    )


def plan_refit(
    recipe: Recipe,
    graphs: Mapping[str, Path],
    changes: Mapping[str, Any],
    *,
    verify: bool = True,
    proof: ProofRequest | None = None,
) -> BuildPlan:
    """Return the plan of the build of a recipe, with other weights.

    Args:
        recipe: The recipe.
        graphs: Part → file with its traced graph.
        changes: Fields of the request with other values, such as ``model``.
        verify: Compare the result of each stage, if the recipe does.
        proof: Requested proof, or None.

    Raises:
        WinMLError: see :func:`~winml.modelkit.builds.plan.plan_build`.
    """
    config = WinMLBuildConfig.model_validate_json(json.dumps(recipe.config))
    request = replace(_read_request(recipe.request), **changes)

    def plan_with(*, verify: bool) -> BuildPlan:
        plan = plan_build(
            config,
            request,
            switched_off=recipe.switched_off,
            verify=verify,
            with_companions=recipe.with_companions,
            proof=proof,
            is_refittable=True,
        )
        return replace(plan, has_default_level=recipe.has_default_level)

    # A refit without a comparison leaves the recipe as it is.
    next_recipe = recipe_of(plan_with(verify=recipe.verify))
    return replace(plan_with(verify=recipe.verify and verify), refit=graphs, recipe=next_recipe)


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
