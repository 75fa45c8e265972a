"""``winml export`` of an ONNX file: fixes its open dimensions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from winml.modelkit.cli._answers import print_json
from winml.modelkit.cli._requests import sizes_by_name
from winml.modelkit.cli._streams import silence_library_warnings
from winml.modelkit.errors import ModelPathError, UsageError, told_as
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.load.load_options import declared_options, is_given

if TYPE_CHECKING:
    from winml.modelkit.results.pinned_model import PinnedModel

__all__ = ["is_pinning", "pin"]

_FOR_PYTORCH_MODELS = (
    *(option.name for option in declared_options() if not option.is_for_onnx),
    "input_specs", "dynamic_batch", "dynamic_sequence", "dynamic_image_size", "dynamic_axes", "allow_dynamic",
    "config", "export_config", "opset", "torch_module", "hierarchy", "clean_onnx", "keep_torch_metadata",
    "operation_fallback", "with_report", "ep",
)  # fmt: skip
"""Options that say how a graph is made from a PyTorch model."""


def is_pinning(options: Mapping[str, Any]) -> bool:
    """Say whether the model is an ONNX file, whose sizes can be fixed.

    Raises:
        ModelPathError: it has the name of one, and nothing can be there.
    """
    model = str(options["model"] or "").strip()
    return PurePath(model).suffix.lower() == ".onnx" and not named_path(model).is_dir()


def pin(options: Mapping[str, Any]) -> None:
    """Fix the sizes and show the result.

    Raises:
        UsageError: an option that has no meaning here, or a name the file does not have.
    """
    for name in _FOR_PYTORCH_MODELS:
        if is_given(name, options[name]):
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning for an ONNX file, whose sizes alone can be fixed",
                hint="Leave it out, or export the PyTorch model anew.",
            )
    if not named_path(options["model"].strip()).is_file():
        raise ModelPathError(f"{options['model']}: no such file", hint="Give the path of an ONNX file.")
    if not (options["shape_config"] or options["batch_size"]):
        raise UsageError(
            f"{options['model']}: is an ONNX file, and no size of it is to be fixed",
            hint="Give sizes of its open dimensions with --shape-config '{\"batch\": 1}', or export what it was made "
            "from: a checkpoint folder, config.json, Hub id or file.py:factory.",
        )
    sizes = sizes_by_name(options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.flows.pin import pin_model

    with told_as({} if options["shape_config"] else {"--shape-config": "--batch-size"}):
        result = pin_model(
            options["model"].strip(),
            options["output"],
            sizes,
            overwrite=options["overwrite"],
            verify=options["verify"] is not False,
            seed=options["seed"],
        )
    _show_result(result, options)


def _show_result(result: PinnedModel, options: Mapping[str, Any]) -> None:
    if options["format_"] == "json":
        print_json(result.as_record())
        return
    if options["quiet"]:
        return
    from winml.modelkit.report.pinned_model import pinned_lines
    from winml.modelkit.report.terminal import console_for, print_rows

    print_rows(pinned_lines(result, options["model"]), console_for(sys.stdout), width=9)
