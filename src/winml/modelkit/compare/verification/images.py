"""Verification that all parts of a diffusers pipeline together make the image of PyTorch, from equal latents.

Each part is compared on its own first, at other inputs and sizes. The image shows that the parts fit one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from winml.modelkit.arrays import Array
from winml.modelkit.compare.outputs import ImageInfo
from winml.modelkit.errors import InputError, StageError, UsageError, VerificationError, first_line
from winml.modelkit.models.checkpoints.pipeline_files import VAE
from winml.modelkit.models.graph_pipelines import run_as_graphs
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.pipelines import assemble_pipeline, quiet_diffusers
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.sessions import Session
from winml.modelkit.ort.shared_settings import attribute_replaced

_STEPS = 2
"""Chosen: the second step reads what the first one made."""
_LATENTS = 16
"""Chosen: a multiple of the strides of all known UNets, and quick to run."""
_GUIDANCE = 2.0
"""Chosen: more than 1, so that a second text without content is encoded."""
_PROMPT = "a photo of a cat"
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 2e-2
"""Chosen, of a range of 1: a quarter of one of 255 levels; five levels for weights of 16 bits, whose rounding errors
each step of a pipeline adds up."""


def compare_image(parts: Sequence[ModelPart], folder: Path, paths: Mapping[str, Path], seed: int) -> ImageInfo | str:
    """Compare one image of a pipeline in PyTorch with the image of the files, from equal texts, seeds and latents.

    Args:
        parts: All parts, with weights.
        folder: Folder of the pipeline.
        paths: Part → its file.
        seed: Seed of the latents.

    Returns:
        The comparison, or the reason why no image was made.

    Raises:
        VerificationError: the images differ, or ONNX Runtime cannot run a file.
    """
    model = parts[0].model
    vae: Any = model.get_submodule(VAE)
    inputs = {spec.name: spec.shape for part in parts for spec in part.inputs}
    _rows, _channels, *latent_edges = inputs["latent_sample"]
    batch = parts[0].inputs[0].shape[0]
    if batch not in (1, "batch_size"):
        return f"the batch size is fixed to {batch}"
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    height, width = (scale * (edge if isinstance(edge, int) else _LATENTS) for edge in latent_edges)

    def make_image() -> Array:
        with torch.no_grad(), quiet_diffusers():
            images = pipeline(
                _PROMPT,
                num_inference_steps=_STEPS,
                guidance_scale=_GUIDANCE if isinstance(batch, str) else 1.0,
                height=height,
                width=width,
                generator=torch.Generator().manual_seed(seed),
                output_type="np",
            ).images
        return np.asarray(images, dtype=np.float64)

    try:
        pipeline = assemble_pipeline(folder, model)
        with foreign_parser(f"{type(pipeline).__name__} fails"), _casting_decoder(vae):
            expected = make_image()
    except InputError as error:
        return first_line(error)
    try:
        with run_as_graphs(model, {name: Session(path) for name, path in paths.items()}):
            actual = make_image()
    except (StageError, UsageError) as error:
        if any(isinstance(size, int) for size in (*latent_edges, *inputs["encoder_hidden_states"][:2])):
            return first_line(error)  # the pipeline passes other sizes than the fixed ones
        raise VerificationError(
            f"cannot verify: the parts of {type(pipeline).__name__} do not run together: {error.message}",
            hint="No file was written.",
        ) from error
    is_half = any(parameter.dtype != torch.float32 for parameter in model.parameters())
    difference = float(np.abs(expected - actual).max())
    info = ImageInfo(_STEPS, height, width, difference, _HALF_TOLERANCE if is_half else _TOLERANCE)
    if not np.isfinite(expected).all() or expected.std() < info.tolerance:
        return "PyTorch makes an image of one color, from which no difference would show"
    if not difference <= info.tolerance:
        raise VerificationError(
            f"cannot verify: an image differs from PyTorch's by {difference:.1e} of 1, tolerance {info.tolerance:.0e}, "
            "although each part equals its module",
            hint="No file was written. This is a bug in winml: please report it.",
        )
    return info


@contextmanager
def _casting_decoder(vae: Any) -> Iterator[None]:
    """Cast latents to the type of a decoder's weights inside the block, as a graph does."""
    decode = vae.decode

    def decode_cast(z: torch.Tensor, **keywords: Any) -> Any:
        return decode(z.to(vae.dtype), **keywords)

    with attribute_replaced(vae, "decode", decode_cast):
        yield
