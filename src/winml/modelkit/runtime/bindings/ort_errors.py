"""Which exceptions does ONNX Runtime raise, and what is the reason in one of them?"""

from __future__ import annotations

import re

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from winml.modelkit.errors import first_line

__all__ = ["ORT_ERRORS", "failed_node", "ort_reason"]

ORT_ERRORS: tuple[type[Exception], ...] = (
    # These share no base class; the Python binding itself raises RuntimeError and ValueError.
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    RuntimeError,
    ValueError,
)
"""The exceptions that ONNX Runtime raises."""


def ort_reason(error: Exception) -> str:
    """Return the reason in an error of ONNX Runtime, without error codes and source locations."""
    # "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from ... failed": the first three fields are codes.
    reason = first_line(error).rpartition("[ONNXRuntimeError] : ")[2].split(" : ", 2)[-1]
    return _NODE_FAILED.sub(_node_words, _SOURCE_LOCATION.sub("", reason))


def _node_words(found: re.Match[str]) -> str:
    operator, name, reason = found.groups()
    return f"node {name or 'without a name'} ({operator}): {reason}"


def failed_node(reason: str) -> str:
    """Return the name of the node that a reason of :func:`ort_reason` begins with, or an empty string."""
    found = _FAILED_NODE.search(reason)
    return found[1] if found is not None else ""


_FAILED_NODE = re.compile(r"\bnode (?!without a name )(.+?) \(\w+\): ")
"""How :func:`_node_words` names the node."""

_NODE_FAILED = re.compile(
    r"(?:Error in execution: )?Non-zero status code returned while running (\w+) node\. Name:'(.*?)' "
    r"Status Message: (?:[^.]+ was false\. )?(.*)",
    re.DOTALL,
)
"""How ONNX Runtime begins when a node refuses its values; the condition in C++ says nothing that the rest does not."""


_SOURCE_LOCATION = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^()]*(?:\((?:[^()]|\([^()]*\))*\))+(?: const)?(?: \[with [^\]]*\])? "
)
"""Location of an error in ONNX Runtime's own source: a path of its build machine, and a signature."""
