"""Where on this disk does the checkpoint of a request lie? Of a Hub id, what is missing in its cache is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PureWindowsPath

from winml.modelkit.errors import UsageError, WinMLError
from winml.modelkit.load.checkpoints.hub import snapshot_folder
from winml.modelkit.load.request import ModelRequest, ModelSource, resolve_source
from winml.modelkit.metadata_keys import MODEL_KEY
from winml.modelkit.options import load_json

__all__ = [
    "checkpoint_path",
    "exported_from",
    "processor_folder",
]


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


# --- Which checkpoint was an ONNX file exported from? By what the file says of itself.


_HINT = "Give the model itself: -m with a Hub id, checkpoint folder or file.py:factory, and --baseline pytorch."
_SHARE = "\\\\"
"""Start of the drive of a path on another machine, which Windows asks for."""


def exported_from(
    metadata: Mapping[str, str], displayed: str, hint: str = _HINT, option: str = "--baseline pytorch"
) -> ModelRequest:
    """Return the checkpoint a file says it was exported from.

    Args:
        metadata: What the file says about itself.
        displayed: The file, for messages.
        hint: What to do where the checkpoint is not found.
        option: What asks for it, for messages.

    Raises:
        UsageError: it does not say, or what it names is no checkpoint on this machine. A file never makes us ask a
            network or run code it names.
    """
    try:
        record = load_json(metadata.get(MODEL_KEY, ""))
        request = ModelRequest(
            model=str(record["name_or_path"]),
            task=record.get("task"),
            random_weights=bool(record.get("random_weights")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{option}: {displayed} does not say which model it was exported from", hint=hint) from None
    try:
        is_remote = PureWindowsPath(request.model.strip()).drive.startswith(_SHARE)
        kind = "type" if is_remote else resolve_source(request).kind
    except WinMLError:
        kind = "type"
    if kind not in ("folder", "config"):
        raise UsageError(
            f"{option}: {displayed} was exported from {request.model}, which is no checkpoint at this place",
            hint=hint,
        )
    return request
