"""Opens a file so that a run also returns inner values of the graph.

The file is not changed and external weights are not copied: the outputs are appended to the bytes of the model file.
Which values are returned is decided by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from winml.modelkit.errors import ModelPathError
from winml.modelkit.runtime.sessions import Session

__all__ = ["open_with_outputs"]


def open_with_outputs(path: Path, names: Sequence[str]) -> Session:
    """Open a file with more outputs than it has, to be run node by node as it is written.

    Args:
        path: An ONNX file, its data beside it.
        names: Values of the main graph that are not outputs already.

    Raises:
        ModelPathError: the file cannot be read.
        StageError: ONNX Runtime cannot load the graph.
    """
    added_outputs = onnx.ModelProto()
    for name in names:
        # ONNX Runtime infers the type.
        added_outputs.graph.output.add().name = name
    try:
        # Specified: two concatenated messages are one message whose repeated fields are joined.
        data = path.read_bytes() + added_outputs.SerializeToString()
    except OSError as error:
        raise ModelPathError(f"{path}: cannot be read: {error.strerror}", hint="Give an ONNX file.") from None
    return Session(data, name=str(path), optimize=False, data_folder=path.resolve().parent)
