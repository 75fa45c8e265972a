"""Which version of winml is this?"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
"""Also read by the build, so that the distribution and the package cannot disagree."""
