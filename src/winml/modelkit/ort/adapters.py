"""Adapters in ONNX Runtime's format: LoRA weights for optional inputs of a graph.

Without an active adapter, a graph with such inputs runs as its base model. The metadata of the file lists the inputs
(``winml.adapters``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, StageError, UsageError, opt
from winml.modelkit.file_names import ADAPTER_SUFFIX
from winml.modelkit.metadata_keys import ADAPTERS_KEY
from winml.modelkit.onnx.files.foreign_files import library_file
from winml.modelkit.options import load_metadata, nearest
from winml.modelkit.ort.ort_values import to_ort_value
from winml.modelkit.ort.plug_ins import ORT_ERRORS, ort_reason

_VERSION = 1
"""Chosen: of an adapter and of its model; ONNX Runtime compares neither."""


@dataclass(frozen=True)
class AdapterInputs:
    """Adapter inputs of a graph, as stated in its file."""

    names: tuple[str, ...]
    """Names of the adapters written next to the model."""
    modules: Mapping[str, tuple[str, str]]
    """Path of a module → the names of its two inputs."""


def adapter_name(name: str) -> str:
    """Return the name of the file of an adapter.

    >>> adapter_name("french")
    'french.onnx_adapter'
    """
    return f"{name}{ADAPTER_SUFFIX}"


def adapter_inputs_of(metadata: Mapping[str, str]) -> AdapterInputs | None:
    """Return the adapter inputs of a graph; `None` without adapters, or for damaged metadata."""
    from winml.modelkit.onnx.lora_branches import lora_names  # imports onnx_ir

    try:
        record = load_metadata(metadata.get(ADAPTERS_KEY, ""))
        names = tuple(str(name) for name in record["names"])
        modules = {str(path): lora_names(path) for path in record["modules"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return AdapterInputs(names, modules)


def adapter_beside(model: Path, name: str, metadata: Mapping[str, str]) -> Path:
    """Return the file of an adapter next to a model.

    Args:
        model: The ONNX file.
        name: Name of the adapter.
        metadata: Metadata of the model.

    Raises:
        UsageError: the graph takes no adapters, or the adapter does not exist.
    """
    inputs = adapter_inputs_of(metadata)
    if inputs is None:
        raise UsageError(
            f"{opt.adapter} {name}: {model} was built without switchable adapters",
            hint=f"Build it with {opt.adapter} NAME=PATH, where PATH is the folder of the adapter.",
        )
    adapters = {
        path.name.removesuffix(ADAPTER_SUFFIX): path for path in sorted(model.parent.glob(f"*{ADAPTER_SUFFIX}"))
    }
    if name not in adapters:
        guess = nearest(name, adapters)
        available_words = (
            f"Available adapters: {', '.join(adapters)}."
            if adapters
            else "There is no adapter file: build the model again."
        )
        raise UsageError(
            f"{opt.adapter} {name}: no {adapter_name(name)} beside {model}",
            hint=f"Did you mean {guess}? {available_words}" if guess else available_words,
        )
    return library_file(model.parent, adapters[name].name) or adapters[name]


def write_adapter(path: Path, values: Mapping[str, Array]) -> None:
    """Write an adapter.

    Args:
        path: The file.
        values: Input of the graph → its value, of the input's type.

    Raises:
        StageError: ONNX Runtime cannot write the file.
    """
    try:
        adapter = ort.AdapterFormat()
        adapter.set_adapter_version(_VERSION)
        adapter.set_model_version(_VERSION)
        adapter.set_parameters({name: to_ort_value(array) for name, array in values.items()})
        adapter.export_adapter(str(path))
    except ORT_ERRORS as error:
        raise StageError(f"ONNX Runtime cannot write the adapter {path.name}: {ort_reason(error)}") from error


class ActiveAdapter:
    """Run options with an active adapter."""

    def __init__(self, path: Path) -> None:
        """Read the adapter.

        Raises:
            InputError: the file is no adapter, or damaged.
        """
        try:
            self._adapter = ort.LoraAdapter()
            self._adapter.Load(str(path))
            self.options = ort.RunOptions()
            # NOTE: options refer to an adapter without keeping it alive; a run without it reads freed memory.
            self.options.add_active_adapter(self._adapter)
        except ORT_ERRORS as error:
            raise InputError(
                f"{path}: ONNX Runtime cannot read this adapter: {ort_reason(error)}", hint="Build the model again."
            ) from error
