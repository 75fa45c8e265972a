"""How do the options of a verb become the request the stages understand?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["model_request"]


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
