"""A layout: the folder of a build as a model of a Triton Inference Server.

Triton looks for ``<version>/model.onnx`` and for ``config.pbtxt`` beside the version. Copy the folder into a model
repository; its name is the name of the model.
"""

from __future__ import annotations

from winml.modelkit.extend import Layout, LayoutFiles, UsageError

_CONFIG = 'backend: "onnxruntime"\nmax_batch_size: 0\n'
"""Triton reads inputs and outputs from the graph; 0: the first dimension of the inputs is no batch of requests."""


def _model_name(part: str, of_several: bool, precision: str) -> str:
    """Return where the file of a part lies in the folder."""
    if of_several:
        raise UsageError(
            f"--layout triton: a model of a repository is one graph, and {part} is one of several",
            hint="Build one part at a time with --submodel.",
        )
    return "1/model.onnx"


def _describe(files: LayoutFiles) -> dict[str, str]:
    """Return what is written beside the model: name → text."""
    return {"config.pbtxt": _CONFIG}


TRITON = Layout(
    "triton",
    _model_name,
    readers="Triton Inference Server",
    described=("config.pbtxt",),
    describe=_describe,
    with_card=False,
)
