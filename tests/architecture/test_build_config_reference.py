"""The generated pages of the reference against the code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from architecture.sources import REPOSITORY


@pytest.mark.parametrize(
    "script", ["build_config_reference.py", "verb_reference.py", "benchmark_page.py", "provider_formats.py"]
)
def test_reference_is_current(script: str) -> None:
    """Running the script of a document would not change the document."""
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
