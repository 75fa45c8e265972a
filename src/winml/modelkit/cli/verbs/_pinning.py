"""How is ``winml export`` asked to fix the open dimensions of an ONNX file, and how is the answer told?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from winml.modelkit.cli._answers import print_json
from winml.modelkit.cli._streams import hear_no_warnings
from winml.modelkit.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from winml.modelkit.flows.pin import PinnedModel

__all__ = ["is_pinning", "pin", "sizes_by_name"]

_MEANINGLESS = (
    "task", "revision", "trust_remote_code", "random_weights", "input_specs", "dynamic_batch", "dynamic_sequence",
    "dynamic_image_size", "dynamic_axes", "allow_dynamic", "export_config", "torch_module", "hierarchy", "clean_onnx",
    "keep_torch_metadata", "operation_fallback", "with_report", "ep", "dtype",
)  # fmt: skip
"""Options about making a graph from a PyTorch model."""


def is_pinning(options: Mapping[str, Any]) -> bool:
    """Say whether sizes are given for a model that is an ONNX file."""
    sizes = options["shape_config"] or options["batch_size"]
    return str(options["model"]).strip().endswith(".onnx") and bool(sizes)


def pin(options: Mapping[str, Any]) -> None:
    """Fix the sizes and tell what came of it.

    Raises:
        UsageError: an option that has no meaning here, or a name the file does not have.
    """
    for name in _MEANINGLESS:
        if options[name] not in (None, False, ()):
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning for an ONNX file, whose sizes alone can be fixed",
                hint="Leave it out, or export the PyTorch model anew.",
            )
    sizes = sizes_by_name(options)
    hear_no_warnings(debug=options["debug"])
    from winml.modelkit.flows.pin import pin_model

    result = pin_model(
        options["model"].strip(),
        options["output"],
        sizes,
        overwrite=options["overwrite"],
        verify=options["verify"] is not False,
        seed=options["seed"],
    )
    _show(result, options)


def sizes_by_name(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of ``--shape-config`` and ``--batch-size`` by name or key.

    Names are an ONNX file's own, so any may stand here.

    Raises:
        ConfigError: the text is malformed, or a size is no whole number.
        UsageError: the two options disagree.
    """
    from winml.modelkit.options import read_json

    value: Any = {}
    source = "--shape-config"
    if options["shape_config"]:
        value, source = read_json(options["shape_config"], source)
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {type(value).__name__}")
    for name, size in value.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"{source}: {name}: expected a whole number of at least 1 (got {size!r})",
                hint="To leave a dimension open, leave it out.",
            )
    if options["batch_size"]:
        if value.get("batch_size", options["batch_size"]) != options["batch_size"]:
            raise UsageError(
                f"--batch-size {options['batch_size']}: --shape-config says batch_size {value['batch_size']}",
                hint="Give one of the two.",
            )
        value = {**value, "batch_size": options["batch_size"]}
    return dict(value)


def _show(result: PinnedModel, options: Mapping[str, Any]) -> None:
    if options["format_"] == "json":
        print_json(result.as_record())
        return
    if options["quiet"]:
        return
    from winml.modelkit.report.console import console_for
    from winml.modelkit.words import shape_words, size_words

    verification = result.verification
    verified = f"equals {options['model']} at these sizes" if verification else "skipped: nobody compared the files"
    if verification:
        verified += f" (largest difference {verification.worst.relative_diff:.1e} of scale)"
    rows = [
        ("pinned", ", ".join(f"{name} {size}" for name, size in result.sizes.items())),
        *([("open", ", ".join(result.still_open))] if result.still_open else []),
        ("inputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.outputs)),
        ("hierarchy", f"{result.coverage.tagged} of {result.coverage.nodes} nodes tagged"),
        ("verified", verified),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *(("note", note) for note in result.notes),
    ]
    console = console_for(sys.stdout)
    for name, value in rows:
        console.print(f"{name:<9}  {value}", highlight=False, markup=False)
