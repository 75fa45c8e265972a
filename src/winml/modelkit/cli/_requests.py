"""How do the options of a verb become the request that loading takes, and the sizes of an ONNX file?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["model_request", "sizes_by_name"]


def model_request(options: Mapping[str, Any]) -> ModelRequest:
    """Return the request the options of :mod:`~winml.modelkit.cli._options` make.

    Args:
        options: Values by the name of the option; a verb that does not offer one leaves it out.

    Raises:
        ConfigError: ``--input-specs``, ``--shape-config`` or ``--dynamic-axes`` is malformed.
    """
    from winml.modelkit.graph.dimensions import DynamicRequest, parse_dynamic_axes
    from winml.modelkit.load.inputs.options import parse_input_specs, parse_shape_config
    from winml.modelkit.load.load_options import declared_options
    from winml.modelkit.load.request import ModelRequest

    dynamic = DynamicRequest(
        batch=options.get("dynamic_batch", False),
        sequence=options.get("dynamic_sequence", False),
        image_size=options.get("dynamic_image_size", False),
        axes=parse_dynamic_axes(options.get("dynamic_axes", ())),
    )
    specs, shapes = options.get("input_specs"), options.get("shape_config")
    return ModelRequest(
        model=options["model"],
        **{option.name: options.get(option.name, option.default) for option in declared_options()},
        input_specs=parse_input_specs(specs) if specs else None,
        shape_config=parse_shape_config(shapes) if shapes else None,
        batch_size=options.get("batch_size"),
        dynamic=dynamic,
    )


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
