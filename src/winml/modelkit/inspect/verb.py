"""Python function of ``winml inspect``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import UsageError, python_function
from winml.modelkit.verbs.named_models import keyword_options, model_request, named_parts, refuse_checkpoint_options

if TYPE_CHECKING:
    from winml.modelkit.inspect.onnx_inspection import OnnxInspection
    from winml.modelkit.inspect.records import InspectedModel


@python_function(shape_config="sizes")
def inspect_model(
    model: str | os.PathLike[str], *, module: str | None = None, hierarchy: bool = True, **options: Any
) -> OnnxInspection | InspectedModel | dict[str, OnnxInspection]:
    """Describe an ONNX model, or the planned export of a checkpoint; no weights are read (``winml inspect``).

    Args:
        model: ONNX file, build folder, checkpoint, Hub id or factory.
        module: Modules whose subtrees and nodes are described; requires an ONNX file.
        hierarchy: Include the module tree of a checkpoint.
        **options: Options of loading a checkpoint, such as ``task``, ``sizes`` and ``submodel``.

    Returns:
        Inputs, outputs, operators, weights and modules of the file; part → description for a folder of several parts;
        or task, class, inputs and modules of the planned export.

    Raises:
        ConfigError: an option is unknown.
        UsageError: no module matches, or ``module`` is passed for a checkpoint.
        InputError: the file is damaged.
    """
    values = keyword_options("inspect_model", model, options)
    from winml.modelkit.builds.found_models import onnx_file, onnx_file_in
    from winml.modelkit.inspect.onnx_inspection import inspect_onnx
    from winml.modelkit.models.checkpoints.hub import hub_file

    if len(parts := named_parts(values)) > 1:
        return {part: inspect_onnx(path, selector=module) for part, path in parts.items()}
    name = values["model"]
    is_file = hub_file(name) is not None or Path(name).suffix.lower() == ".onnx"
    path = next(iter(parts.values()), None) or (onnx_file(name) if is_file else onnx_file_in(name))
    if path is not None:
        refuse_checkpoint_options(path, values, [*options])
        return inspect_onnx(path, selector=module)
    if module is not None:
        raise UsageError(f"module {module!r} requires an ONNX file", hint="Omit it; the result has the module tree.")
    from winml.modelkit.inspect.model_inspection import inspect_checkpoint

    return inspect_checkpoint(model_request(values), hierarchy=hierarchy)
