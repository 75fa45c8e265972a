"""Pipelines of diffusers whose modules are the graphs of a build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from winml.modelkit.builds.found_models import part_files
from winml.modelkit.errors import ModelPathError
from winml.modelkit.file_names import PIPELINE_INDEX_NAME, is_pipeline_folder
from winml.modelkit.models.checkpoints.pipeline_files import DENOISERS, read_pipeline_files
from winml.modelkit.models.graph_pipelines import replace_by_graphs, take_storage_out
from winml.modelkit.models.pipelines import assemble_pipeline, build_modules
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.graph_inputs import element_type
from winml.modelkit.python_functions import python_function


@python_function()
def load_pipeline(folder: str | os.PathLike[str], *, ep: str | None = None) -> Any:
    """Open the build of a diffusers pipeline as a pipeline of diffusers whose modules run in ONNX Runtime.

    Tokenizers, scheduler and the loop are those of diffusers; no weights of PyTorch are read.

    Args:
        folder: Folder of the build.
        ep: Execution provider of all graphs; None: the CPU.

    Returns:
        The pipeline, an object of the class in ``model_index.json``: ``load_pipeline("built")("a cat").images[0]``.

    Raises:
        ModelPathError: the folder is not the finished build of a pipeline.
        InputError: diffusers is not installed, or a file is damaged.
        UsageError: the provider is unknown or not installed.
        StageError: ONNX Runtime cannot load a graph.

    Example:
        ```python
        pipeline = load_pipeline("built")  # ep="cuda" for another execution provider
        pipeline("a photo of a cat", height=512, width=512).images[0].save("cat.png")
        ```
    """
    path = Path(folder)
    paths = part_files(os.fspath(folder))
    if not paths or not is_pipeline_folder(path):
        raise ModelPathError(
            f"{path}: is not the build of a diffusers pipeline (no {PIPELINE_INDEX_NAME} with all graphs)",
            hint=f"Build one: winml build PIPELINE -o {path}",
        )
    provider = choose_provider(ep, None, {})
    sessions = {name: provider.open(file) for name, file in paths.items()}
    denoiser = next(session for name, session in sessions.items() if name in DENOISERS)
    # The type of latents and embeddings; the first input is one of them.
    dtype = getattr(torch, element_type(next(iter(denoiser.inputs.values()))))
    modules = build_modules(read_pipeline_files(path, is_built=True), dtype)
    take_storage_out(modules)
    replace_by_graphs(modules, sessions)
    return assemble_pipeline(path, modules)
