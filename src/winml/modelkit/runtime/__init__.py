"""What does a graph answer on a device?

Values to feed it (``feeds``) and sessions to run it (``sessions``). Knows nothing of torch or of where a graph came
from.
"""

import os

# From 1.29 on ONNX Runtime reports to its maker from the moment it is imported, unless this stands in the environment
# by then (its Privacy.md). We promise that nothing is sent.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
