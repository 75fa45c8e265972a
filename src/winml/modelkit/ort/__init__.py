"""How does a graph run on a device, and what are its outputs?

Generates input values (``feeds``), opens and runs sessions (``sessions``), reads kernel times and memory. Knows nothing
of torch, nor of how a graph was made.
"""

import os

# From 1.29 on, ONNX Runtime sends telemetry from its import on, unless this variable is set before (its Privacy.md).
# We promise that nothing is sent.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
