"""How is the graph of a model made? Each option of the export stage is declared here, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from winml.modelkit.errors import ConfigError
from winml.modelkit.fields import OPTIONS, declare
from winml.modelkit.hierarchy.torch_modules import TorchModules, normalized_torch_modules

__all__ = ["ACCEPT_ASSUMPTIONS", "EXPORTER", "Activations", "DynamicFields", "ExportFields", "ExporterChoice"]

ExporterChoice = Literal["auto", "torchscript", "dynamo"]
Activations = Literal["float32", "int8"]

OLDEST_OPSET = 11
"""Chosen: the oldest opset in which the shape-computing operators the exporter emits take int64 inputs throughout."""
NEWEST_OPSET = 20
"""Specified: the newest opset torch's TorchScript exporter writes."""

_INPUTS = "Model inputs"


EXPORTER: Mapping[str, Any] = {
    "default": "auto",
    "help": "Exporter that makes the graph: dynamo, or TorchScript. `auto`, where left out: TorchScript, and dynamo "
    "for what it cannot export.",
    "spelling": "--dynamo/--no-dynamo",
    "read": lambda is_dynamo: "dynamo" if is_dynamo else "torchscript",
}
"""Declaration of the option, which several verbs have, apart from its heading."""


ACCEPT_ASSUMPTIONS: Mapping[str, Any] = {
    "default": False,
    "help": "Report a file as verified although it assumes something of its inputs (`verification.assumed`).",
}
"""Declaration of the option, which several verbs have, apart from its heading."""


def _read_classes(text: str) -> object:
    try:
        return normalized_torch_modules(text)
    except ValueError as error:
        hint = "Give auto, none, all, or names of classes separated by commas."
        raise ConfigError(f"--torch-module {text}: {error}", hint=hint) from None


@dataclass(kw_only=True)
class DynamicFields:
    """The dimensions that are left open, of verbs that make a graph."""

    dynamic_batch: bool = declare(False, "Leave the batch size of every input open.", _INPUTS)
    dynamic_sequence: bool = declare(
        False,
        "Leave the length of sequences open: of text, of the decoder's text, or of audio.",
        _INPUTS,
        spelling="--dynamic-seq-len --dynamic-sequence",
    )
    dynamic_image_size: bool = declare(False, "Leave height and width of images open.", _INPUTS)
    allow_dynamic: bool = declare(
        False, "Leave dimensions open even where the execution provider `ep` needs fixed sizes.", _INPUTS
    )


@dataclass(kw_only=True)
class ExportFields:
    """The options of the export stage, apart from its inputs."""

    ep: str | None = declare(
        None,
        "Execution provider the file is for, such as qnn; one that needs fixed sizes refuses open dimensions.",
        OPTIONS,
        metavar="NAME",
    )
    exporter: ExporterChoice = declare(**EXPORTER, group=OPTIONS)
    opset_version: int | None = declare(
        None,
        "Version of the default ONNX operator set in the file. 17 with TorchScript and 18 with dynamo where left out.",
        OPTIONS,
        minimum=OLDEST_OPSET,
        maximum=NEWEST_OPSET,
        spelling="--opset",
    )
    do_constant_folding: bool = declare(
        True,
        "Compute at export what depends on no input. Weights are never duplicated by it.",
        OPTIONS,
        in_command=False,
    )
    torch_module: TorchModules = declare(
        "auto",
        "`torch.nn` classes that become modules of the hierarchy: those listed, such as Linear,LayerNorm, `all` or "
        "`none`. `auto`, where left out: those with no other class between them and the root.",
        OPTIONS,
        metavar="CLASSES",
        read=_read_classes,
    )
    hierarchy: bool = declare(
        True, "Write the module tags. Without them the file carries no key of winml, nor of torch.", OPTIONS
    )
    keep_torch_metadata: bool = declare(
        False, "Keep torch's own metadata of nodes, which holds local paths and names of the trace.", OPTIONS
    )
    operation_fallback: bool = declare(
        False,
        "Tag a node without a known scope by the longest scope that its neighbours share, instead of by the root.",
        OPTIONS,
    )
    activations: Activations | None = declare(
        None,
        "Of a checkpoint whose weights have few bits: type of activations in products with them. `float32` is exact; "
        "`int8` rounds them by blocks, which is up to 8 times as fast in 4 bits. float32 in 4 bits, and int8 in 2 and "
        "8 bits, for which there is no other fast kernel, where left out.",
        OPTIONS,
    )
    verify: bool = declare(True, "Compare ONNX Runtime with PyTorch before the file is put in place.", OPTIONS)
    accept_assumptions: bool = declare(**ACCEPT_ASSUMPTIONS, group=OPTIONS)
