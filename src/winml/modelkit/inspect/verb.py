"""Python function of ``winml inspect``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.python_functions import python_function
from winml.modelkit.verbs.named_models import keyword_options, model_request, named_parts, refuse_checkpoint_options

if TYPE_CHECKING:
    from winml.modelkit.inspect.onnx_inspection import OnnxInspection
    from winml.modelkit.inspect.records import InspectedModel
    from winml.modelkit.ort.execution_providers import Device

_InspectionT = TypeVar("_InspectionT", "OnnxInspection", "InspectedModel")


@python_function(shape_config="sizes")
def inspect_model(
    model: str | os.PathLike[str],
    *,
    module: str | None = None,
    hierarchy: bool = True,
    ep: str | None = None,
    device: Device | None = None,
    ep_options: Mapping[str, str] | None = None,
    **options: Any,
) -> OnnxInspection | InspectedModel | dict[str, OnnxInspection]:
    """Describe an ONNX model, or the planned export of a checkpoint; no weights are read (``winml inspect``).

    Args:
        model: ONNX file, build folder, checkpoint, Hub id or factory.
        module: Modules whose subtrees and nodes are described; requires an ONNX file.
        hierarchy: Include the module tree of a checkpoint.
        ep: Execution provider whose support of each node is checked (``fit`` of the result); a checkpoint is exported
            into the cache first.
        device: Kind of device of the provider. ``None``: that of the provider.
        ep_options: Options of the provider.
        **options: Options of loading a checkpoint, such as ``task``, ``sizes`` and ``submodel``.

    Returns:
        Inputs, outputs, operators, weights and modules of the file; part → description for a folder of several parts;
        or task, class, inputs and modules of the planned export.

    Raises:
        ConfigError: an option is unknown.
        UsageError: no module matches, ``module`` is passed for a checkpoint, the provider is unknown, or an option of
            the provider is passed without one.
        InputError: the file is damaged.

    Example:
        ```python
        contents = inspect_model("model.onnx")
        ```
    """
    values = keyword_options("inspect_model", model, options)
    if ep is None and (device is not None or ep_options):
        name = "device" if device is not None else "ep_options"
        raise UsageError(f"{spell(name)} requires an execution provider", hint=f"Add {opt.ep}.")

    def checked(inspection: _InspectionT, path: Path) -> _InspectionT:
        if ep is None:
            return inspection
        from winml.modelkit.inspect.provider_check import check_provider

        return replace(inspection, fit=check_provider(path, ep, device, ep_options or {}))

    from winml.modelkit.builds.found_models import onnx_file, onnx_file_in
    from winml.modelkit.inspect.onnx_inspection import inspect_onnx
    from winml.modelkit.models.checkpoints.hub import hub_file

    if len(parts := named_parts(values)) > 1:
        return {part: checked(inspect_onnx(path, selector=module), path) for part, path in parts.items()}
    name = values["model"]
    is_file = hub_file(name) is not None or Path(name).suffix.lower() == ".onnx"
    path = next(iter(parts.values()), None) or (onnx_file(name) if is_file else onnx_file_in(name))
    if path is not None:
        refuse_checkpoint_options(path, values, [*options])
        return checked(inspect_onnx(path, selector=module), path)
    if module is not None:
        raise UsageError(f"module {module!r} requires an ONNX file", hint="Omit it; the result has the module tree.")
    from winml.modelkit.inspect.model_inspection import inspect_checkpoint

    request = model_request(values)
    inspection = inspect_checkpoint(request, hierarchy=hierarchy)
    if ep is None:
        return inspection
    from winml.modelkit.builds.build_model import exported_file
    from winml.modelkit.builds.found_models import NamedModel

    return checked(inspection, exported_file(NamedModel(request.model, request=request)))
