"""Opens a file so that a run also returns inner values of the graph.

The file is not changed and weights are not copied: they are mapped wherever they lie. Which values are returned is
decided by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from winml.modelkit.graph.files.reading import read_referring
from winml.modelkit.runtime.ir_versions import newest_ir_version
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
    file = path.resolve()  # data lies beside the file that a link leads to
    model = read_referring(file)
    model.ir_version = min(model.ir_version, newest_ir_version())
    for name in names:
        # ONNX Runtime infers the type.
        model.graph.output.add().name = name
    return Session(model.SerializeToString(), name=str(path), optimize=False, data_folder=file.parent)
