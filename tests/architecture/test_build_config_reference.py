"""Do the pages of the reference that are made from the code say what the code says?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from architecture.sources import REPOSITORY


@pytest.mark.parametrize("script", ["build_config_reference.py", "verb_reference.py", "benchmark_page.py"])
def test_reference_is_current(script: str) -> None:
    """The document is what its script writes today."""
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
