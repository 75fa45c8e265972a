"""What does the section ``quant`` of a config ask for, and which precision stands for ``auto``?

Decided from the section alone, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.builds.config import AUTO_PRECISION, QuantSection
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS, PrecisionName
from winml.modelkit.runtime.execution_providers import Device, find_execution_provider

__all__ = ["AUTO_PRECISIONS", "auto_words", "idle_quantization", "quantize_options", "with_precision"]

AUTO_PRECISIONS: Mapping[Device, PrecisionName] = {"cpu": FLOAT32, "gpu": "fp16", "npu": "w8a16"}
"""Kind of device → the precision that ``auto`` stands for. Chosen: a CPU computes float32 as exactly as PyTorch does,
and whether it gains by fewer bits depends on its instructions; GPUs compute in 16-bit floating point; NPUs compute in
integers, and 16 bits for activations keep most of the answer."""


def quantize_options(section: QuantSection) -> QuantizeOptions:
    """Return what the stage is asked for; ``auto`` becomes the precision it stands for."""
    values = {name: getattr(section, name) for name in QuantizeOptions.model_fields}
    if section.precision == AUTO_PRECISION:
        values["precision"] = AUTO_PRECISIONS[_device_of(section)]
    return QuantizeOptions(**values)


def idle_quantization(section: QuantSection) -> str:
    """Return why a build that has this section quantizes nothing, or an empty string where it does."""
    options = quantize_options(section)
    if options.model_copy(update={"ep": None}) == QuantizeOptions():
        return "no precision is asked for (--precision)"
    if options.base.modes or any(PRECISIONS[name].modes for name in options.per_module.values()):
        return ""
    return auto_words(section) or f"precision {options.base.name} is what the model has"


def auto_words(section: QuantSection) -> str:
    """Say what ``auto`` stands for and why; an empty string where the section names a precision itself."""
    if section.precision != AUTO_PRECISION:
        return ""
    device = _device_of(section)
    reason = f"for {section.ep}, whose default is the {device}" if section.device is None and section.ep else ""
    reason = reason or (f"for the {device}" if section.device else f"where no device is named, as for the {device}")
    return f"precision auto is {AUTO_PRECISIONS[device]} {reason}"


def with_precision(section: QuantSection | None, precision: str) -> QuantSection:
    """Return a section, or an empty one where it is null, with a precision.

    Raises:
        ConfigError: nobody knows that precision.
    """
    passed = {} if section is None else {name: getattr(section, name) for name in section.model_fields_set}
    return QuantSection(**{**passed, "precision": precision})


def _device_of(section: QuantSection) -> Device:
    if section.device is not None:
        return section.device
    return "cpu" if section.ep is None else find_execution_provider(section.ep).devices[0]
