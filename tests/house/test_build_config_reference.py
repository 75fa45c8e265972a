"""Does the reference of the build config say what the code says?"""

from __future__ import annotations

import subprocess
import sys

from house.sources import REPOSITORY


def test_build_config_reference_is_current() -> None:
    """The document is what its script writes today."""
    done = subprocess.run(
        [sys.executable, "scripts/build_config_reference.py", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
