"""Writes the graph that ONNX Runtime's optimizer makes of a file.

Opens a session only to have the optimized graph written. Which graph transformers are disabled is decided by the
caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import onnxruntime as ort

from winml.modelkit.errors import StageError
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.runtime.bindings.ort_errors import ORT_ERRORS, ort_reason
from winml.modelkit.runtime.sessions import CPU, SEVERITY_FATAL

__all__ = ["DATA_LIMIT_BYTES", "rewrite_file"]

DATA_LIMIT_BYTES = 1024
"""Initializers from this size on are written to the data file. Chosen: shapes and scalars stay in the graph."""


def rewrite_file(
    original: Path,
    target: Path,
    *,
    disabled: Iterable[str],
    with_layouts: bool = False,
    config: Mapping[str, str] | None = None,
) -> None:
    """Write the optimized graph of ONNX Runtime's CPU provider for ``original``.

    Weights are written to ``<target>.data``, so that models of any size can be written.

    Args:
        original: An ONNX file, with its data beside it.
        target: The file to write, in the same folder.
        disabled: Graph transformers and rewrite rules that must not run.
        with_layouts: Also run transformers that choose layouts for this machine's processor.
        config: Further entries of the session's configuration.

    Raises:
        StageError: ONNX Runtime cannot load the graph; gives its reason.
    """
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_FATAL
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if with_layouts else level.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    entries = {
        "session.optimized_model_external_initializers_file_name": unfinished_data_path(target).name,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(DATA_LIMIT_BYTES),
        # The session never runs, so packed copies of the weights are not needed.
        "session.disable_prepacking": "1",
        "optimization.disable_specified_optimizers": ";".join(sorted(disabled)),
        **(config or {}),
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(str(original), sess_options=options, providers=list(CPU))
    except ORT_ERRORS as error:
        raise StageError(f"ONNX Runtime cannot load the graph: {ort_reason(error)}") from error
