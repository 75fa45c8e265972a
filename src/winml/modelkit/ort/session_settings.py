"""Settings of an ONNX Runtime session that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnxruntime as ort

from winml.modelkit.ort.custom_operators import custom_libraries

SEVERITY_FATAL = 4
"""Minimum logged severity: warnings are for developers of ONNX Runtime, and errors are raised."""

SHARE_CONTEXTS = "ep.share_ep_contexts"
"""Specified: entry of ONNX Runtime's session configuration; sessions of one process then share compiled contexts."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session, except its providers and output files."""

    level: str = "ORT_ENABLE_ALL"
    """Name of a graph optimization level of ONNX Runtime."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Entries of the session configuration."""
    threads: int | None = None
    """Threads per operator; None: the default of ONNX Runtime."""
    in_written_order: bool = False
    """Run nodes in the order of the file."""

    def options(self) -> ort.SessionOptions:
        """Create the session options."""
        options = ort.SessionOptions()
        options.log_severity_level = SEVERITY_FATAL
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, self.level)
        for library in custom_libraries():
            options.register_custom_ops_library(library)
        for key, value in self.entries.items():
            options.add_session_config_entry(key, value)
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        if self.in_written_order:
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        return options
