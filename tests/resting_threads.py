"""Threads of ONNX Runtime that sleep while they wait, for test processes that share the cores."""

from __future__ import annotations

import os


def rest_where_cores_are_shared() -> None:
    """Put waiting threads of ONNX Runtime to sleep if test workers share the cores; results stay equal.

    Threads would spin for up to 40 ms after each session is opened or run, and take that time from the other workers. A
    comparison of latencies then needs no settling time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    # Set before the import, as in winml.modelkit.ort.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    from winml.modelkit.profile import latency

    class RestingOptions(onnxruntime.SessionOptions):  # type: ignore[misc]  # it is untyped
        """Session options without spinning threads."""

        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    onnxruntime.SessionOptions = RestingOptions
    latency.SETTLE_S = 0.0
