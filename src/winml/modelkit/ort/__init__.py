"""ONNX Runtime: sessions, devices, and the outputs of a graph.

Generates input values (``feeds``), opens and runs sessions (``sessions``), reads kernel times and memory. Independent
of torch and of the origin of a graph.
"""

import os

# From 1.29 on, ONNX Runtime sends telemetry after its import, unless this variable is set before (its Privacy.md).
# winml promises to send no telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
