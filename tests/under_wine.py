"""Plug-in of pytest for unit tests under Wine, loaded by ``pytest -p under_wine``.

torch and transformers cannot be imported, since torch ends long processes there; tests that import them are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

# As in winml.modelkit.ort.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

from winml.modelkit.errors import error_chain

_LIBRARIES = ("torch", "transformers")
_UNSUITABLE = {
    "test_registry_names_every_transformer_of_onnxruntime": "Wine drops the log of ONNX Runtime",
    "test_weights_of_several_folders_and_links_are_read": "ONNX Runtime follows no link of Wine",
    "test_library_imports.py": "processes that import torch",
    "test_state.py": "processes that import torch",
    "test_bounded_processes.py": "processes of Wine start too slowly for time limits",
    "test_placement.py": "processes of Wine start too slowly for time limits",
    "test_latency.py": "compares times",
    "test_race.py": "compares times",
}
"""Test, or file of tests → reason to skip it."""
_INTEGER_OPERATORS = (
    b"MatMulInteger",
    b"ConvInteger",
    b"QLinear",
    b"QGemm",
    b"QuantizeLinear",
    b"MatMulNBits",
    b"LSTM",
)


class _Refusal(MetaPathFinder):
    """Finder of modules that refuses the libraries."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise for a library, and leave other modules to the other finders."""
        del path, target
        if name in _LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _FloatSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # it is untyped
    """Session that skips a test of integer products."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        if any(operator in content for operator in _INTEGER_OPERATORS):
            pytest.skip("Wine does not permit the AMX registers of this processor, which integer products use")
        super().__init__(model, *args, **kwargs)


sys.meta_path.insert(0, _Refusal())
if "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
    onnxruntime.InferenceSession = _FloatSession


def _missing_library(call: pytest.CallInfo[Any]) -> str:
    """Return the name of the library whose import caused an error; ``""`` for another error."""
    links = error_chain(call.excinfo.value) if call.excinfo is not None else ()
    names = (str(link.name).partition(".")[0] for link in links if isinstance(link, ModuleNotFoundError))
    return next((name for name in names if name in _LIBRARIES), "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that Wine or missing libraries make fail or last."""
    for item in items:
        if (reason := _UNSUITABLE.get(item.name) or _UNSUITABLE.get(item.path.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports a library."""
    report = yield
    if report.failed and (call := getattr(report, "call", None)) and (library := _missing_library(call)):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 1, f"Skipped: needs {library}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that imports a library."""
    report = yield
    if report.failed and (library := _missing_library(call)):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 1, f"Skipped: needs {library}")
    return report
