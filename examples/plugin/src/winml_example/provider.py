"""An execution provider by the path of its library: ``winml perf --ep example``.

A package for a real device brings the library. Here its path is that of a file that this package could bring.
"""

from __future__ import annotations

import os
from pathlib import Path

from winml.modelkit.extend import ExecutionProvider

EXAMPLE = ExecutionProvider("ExampleExecutionProvider", ("npu",), plug_in="winml_example.provider")


def get_library_path() -> str:
    """Return the path of the library that registers the provider with ONNX Runtime."""
    return os.environ.get("WINML_EXAMPLE_LIBRARY") or str(Path(__file__).with_name("libexample_provider.so"))
