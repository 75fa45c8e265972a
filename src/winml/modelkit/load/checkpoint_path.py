"""Where on this disk does the checkpoint of a request lie? Of a Hub id, what is missing in its cache is fetched."""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.load.checkpoints.hub import snapshot_folder
from winml.modelkit.load.request import ModelRequest, ModelSource, resolve_source

__all__ = ["checkpoint_path", "processor_folder"]


def checkpoint_path(source: ModelSource, request: ModelRequest) -> Path:
    """Return the folder of a checkpoint, or the file of a lone config.

    Raises:
        HubError: the Hub did not deliver.
    """
    if source.kind == "hub":
        return snapshot_folder(
            source.name,
            request.revision,
            needs_weights=not request.random_weights,
            needs_code=request.trust_remote_code,
        )
    assert source.path is not None  # a folder or a config file
    return source.path


def processor_folder(model: Path | ModelRequest) -> Path | None:
    """Return where the tokenizer or image processor of a model lies: its checkpoint, or the folder of its ONNX file.

    None for a model of a package, or one that is named by its type alone.

    Raises:
        UsageError: the request is wrong.
        HubError: the Hub did not deliver.
    """
    if isinstance(model, Path):
        return model.absolute().parent
    source = resolve_source(model)
    if source.kind != "hub" and source.path is None:
        return None
    path = checkpoint_path(source, model)
    return path if path.is_dir() else path.absolute().parent
