"""Options of the export stage, which state how the graph of a model is made; each is declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winml.modelkit.errors import ConfigError, UsageError, opt
from winml.modelkit.fields import ADVANCED, DEVICE, EXPORT, QUANTIZATION, SIZES, VERIFICATION, declare
from winml.modelkit.tags.torch_modules import TorchModules, normalized_torch_modules

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.records import ProofRequest

ExporterChoice = Literal["auto", "torchscript", "dynamo"]
Activations = Literal["float32", "int8"]

OLDEST_OPSET = 11
"""Chosen: the oldest opset in which the shape-computing operators the exporter emits take int64 inputs throughout."""
NEWEST_OPSET = 24
"""Chosen: the newest opset of which common readers have the operators."""

EXPORTER: Mapping[str, Any] = {
    "default": "auto",
    "text": "Export with torch.export (`dynamo`), or with the TorchScript exporter. `auto`: TorchScript, or dynamo if "
    "that fails.",
    "spelling": "--dynamo/--no-dynamo",
    "read": lambda is_dynamo: "dynamo" if is_dynamo else "torchscript",
    "default_words": "auto",
}
"""Declaration of the option, which several verbs have, apart from its group."""


ACCEPT_ASSUMPTIONS: Mapping[str, Any] = {
    "default": False,
    "text": "Accept a file that is verified only under assumptions about its inputs (`verification.assumed`).",
}
"""Declaration of the option, which several verbs have, apart from its group."""


def _parse_classes(text: str) -> object:
    try:
        return normalized_torch_modules(text)
    except ValueError as error:
        hint = "Use auto, none, all, or names of classes separated by commas."
        raise ConfigError(f"{opt.torch_module} {text}: {error}", hint=hint) from None


@dataclass(frozen=True, kw_only=True)
class ProofFields:
    """Options of the proof, for commands that make a model from PyTorch."""

    proof: bool = declare(False, VERIFICATION)
    """Store a proof beside the model: inputs, and PyTorch's outputs and values of modules. winml verify compares the
    model with it on any machine, without PyTorch."""
    proof_inputs: Path | None = declare(None, VERIFICATION, metavar="FILE", default_words="generated samples")
    """Inputs to store in the proof: an .npz file with one array per input, or a folder of such files."""

    def proof_request(self, seed: int) -> ProofRequest | None:
        """Return the request for a proof; ``None`` if none is requested.

        Args:
            seed: Seed of generated samples.

        Raises:
            UsageError: inputs without a proof, or no such inputs.
        """
        if self.proof_inputs is not None and not self.proof:
            raise UsageError(f"{opt.proof_inputs} {self.proof_inputs} requires {opt.proof}", hint=f"Add {opt.proof}.")
        if self.proof_inputs is not None and not self.proof_inputs.exists():
            raise UsageError(
                f"{opt.proof_inputs} {self.proof_inputs}: no such file", hint="Pass an .npz file, or a folder of them."
            )
        if not self.proof:
            return None
        from winml.modelkit.compare.proof.records import ProofRequest

        return ProofRequest(self.proof_inputs, seed)


@dataclass(kw_only=True)
class DynamicFields:
    """The dynamic dimensions, for commands that make a graph."""

    dynamic_batch: bool = declare(False, SIZES, is_common=True)
    """Make the batch size of every input dynamic."""
    dynamic_sequence: bool = declare(False, SIZES, spelling="--dynamic-seq-len --dynamic-sequence", is_common=True)
    """Make sequence lengths dynamic. Applies to text, decoder text and audio."""
    dynamic_image_size: bool = declare(False, SIZES)
    """Make the height and width of images dynamic."""
    allow_dynamic: bool = declare(False, SIZES)
    """Allow dynamic dimensions even if the execution provider `ep` requires fixed sizes."""


@dataclass(kw_only=True)
class ExportFields:
    """The options of the export stage, apart from its inputs."""

    ep: str | None = declare(None, DEVICE, metavar="NAME", default_words="any", is_common=True)
    """Target execution provider, such as qnn. Dynamic dimensions are an error if it requires fixed sizes."""
    exporter: ExporterChoice = declare(**EXPORTER, group=EXPORT, is_common=True)
    opset_version: int | None = declare(
        None,
        EXPORT,
        minimum=OLDEST_OPSET,
        maximum=NEWEST_OPSET,
        spelling="--opset",
        default_words="17, or 18 with dynamo",
        is_common=True,
    )
    """Opset version of the ONNX file."""
    do_constant_folding: bool = declare(True, EXPORT, in_command=False)
    """Fold constants during the export. Weights are never duplicated."""
    torch_module: TorchModules = declare("auto", ADVANCED, metavar="CLASSES", read=_parse_classes, default_words="auto")
    """`torch.nn` classes that appear in the module hierarchy: names such as Linear,LayerNorm, `all` or `none`. `auto`:
    those that only `torch.nn` modules and the root contain."""
    hierarchy: bool = declare(True, EXPORT)
    """Write module tags. Without them, the file contains no metadata of winml or torch."""
    keep_torch_metadata: bool = declare(False, ADVANCED)
    """Keep the node metadata of torch. It contains local paths and the names of traced values."""
    operation_fallback: bool = declare(False, ADVANCED)
    """Tag a node without a scope by the longest common scope of its neighbors, instead of the root."""
    activations: Activations | None = declare(
        None, QUANTIZATION, default_words="float32 with 4 bits; int8 with 2 and 8 bits, which have no other fast kernel"
    )
    """Type of the activations that are multiplied by low-bit weights of the checkpoint. `float32` is exact; `int8`
    quantizes them by block, and is up to 8 times as fast with 4 bits."""
    verify: bool = declare(True, VERIFICATION, is_common=True)
    """Compare ONNX Runtime with PyTorch before the file is written."""
    accept_assumptions: bool = declare(**ACCEPT_ASSUMPTIONS, group=VERIFICATION)
